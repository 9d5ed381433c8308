"""How long does an update take: in group rows, in plain rows, by TRL, and in bfloat16?

    python benchmark/speed/throughput.py --trl trl0/bin/python --trl trl1/bin/python     # see ../requirements.txt
    python benchmark/speed/throughput.py --part dtype --again                            # one part against its record

Writes throughput.json and the tables of README.md. What is compared takes turns, A B C A B C, and a ratio is that of
two times within a round, so that a slow minute slows all of them.

update   rloo.py in both layouts, and TRL, in float32
dtype    rloo.py in float32 and in bfloat16
shapes   forward and backward of two layers in group and in plain rows, prompts of P and completions of T tokens

Each run of the first two is a process of its own, whose output is in runs/throughput.log; of its two updates the second
counts. Policy and reward model have pythia-70m's shape and random weights, prompts and completions TL;DR's lengths. TRL
has the same models, prompts, k, T, temperature, β, threads; one epoch, one mini-batch; sdpa; fused AdamW; gradient
checkpointing off (1.x: on by default); no saving and no evaluation. 1.x generates and scores a whole update at once,
with the dynamic cache, both its defaults. The last part has CPU seconds of one thread.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
import common  # noqa: E402

import rloo  # noqa: E402

RECORDS = HERE / "throughput.json"
ROUNDS = 3

# The shape of pythia-70m, and TL;DR's lengths
SHAPE = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
VOCABULARY = 50_304
PROMPTS = 4  # B: prompts per update
PROMPT_TOKENS = (224, 449)  # the range of their lengths, without its end
K = 4
T = 53

LLAMA = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 2, "num_attention_heads": 8}
LLAMA |= {"vocab_size": 1000, "max_position_embeddings": 4096}
SHAPES = [(448, 53, 4), (256, 256, 8), (64, 256, 8), (16, 256, 4), (256, 1024, 8), (64, 1024, 4)]  # P, T, k


# ---- Inputs ----------------------------------------------------------------------------------------------------------


def write_inputs(folder: Path):
    """Writes policy/, reward/ and data/."""
    torch.manual_seed(1)
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": None, "num_labels": 1}
    config = transformers.GPTNeoXConfig(**SHAPE, **tokens, **write_texts(folder, VOCABULARY, PROMPTS, PROMPT_TOKENS))
    kinds = {"policy": transformers.AutoModelForCausalLM, "reward": transformers.AutoModelForSequenceClassification}
    for name, kind in kinds.items():
        kind.from_config(config).save_pretrained(folder / name)


def write_texts(folder: Path, vocabulary: int, prompts: int, lengths: tuple[int, int]) -> dict[str, int]:
    """Writes data/, and a tokenizer into policy/ and reward/; returns its special tokens. Word w<i> is token i, so
    decoded text becomes the same tokens again."""
    eos, padding = vocabulary - 2, vocabulary - 1
    words = {f"w{i}": i for i in range(eos)} | {"<eos>": eos, "[PAD]": padding}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "[PAD]", "clean_up_tokenization_spaces": False}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(folder / name)
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(*lengths, (prompts,), generator=generator).tolist()
    tokens = [torch.randint(eos, (count,), generator=generator).tolist() for count in counts]
    lines = [json.dumps({"prompt": " ".join(f"w{i}" for i in ids)}) + "\n" for ids in tokens]
    (folder / "data").mkdir()
    for split in ("train", "test"):  # without a test split rloo.py would hold out training rows
        (folder / "data" / f"{split}.jsonl").write_text("".join(lines))
    return {"eos_token_id": eos, "pad_token_id": padding}


# ---- Measuring -------------------------------------------------------------------------------------------------------


def run(command: list, folder: Path, first: int = 1) -> dict:
    """A trainer in a process of its own: its updates from number `first`, counted from 0, with the seconds of each, and
    the process's peak memory, GiB."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    log = common.ROOT / "runs" / "throughput.log"
    log.parent.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    words = [*map(str, command), "--output_dir", str(out)]
    with log.open("a") as lines:
        process = subprocess.Popen(words, cwd=common.ROOT, stdout=lines, stderr=lines, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(words)}: ended with an error, see {log}:\n{log.read_text()[-2000:]}")
    updates = common.read_lines(out / "metrics.jsonl")[first:]
    for update in updates:
        update["seconds"] = sum(value for name, value in update.items() if name.startswith("time/"))
    return {"updates": updates, "peak_gb": usage.ru_maxrss / 2**20}  # KiB, on Linux


def shared_flags(folder: Path, **changes) -> list[str]:
    """Flags of rloo.py that trl/run.py has too, for two updates on the inputs in `folder`; None leaves one out."""
    batch = PROMPTS * K
    flags = {"sft_model_path": folder / "policy", "reward_model_path": folder / "reward"}
    flags |= {"dataset_name": folder / "data", "rloo_k": K, "response_length": T, "temperature": 0.7, "kl_coef": 0.05}
    flags |= {"learning_rate": 1e-6, "dtype": "float32", "total_episodes": 2 * batch}
    flags |= {"per_device_train_batch_size": batch, "local_rollout_forward_batch_size": batch} | changes
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def rloo_py(folder: Path, script="rloo.py", **changes) -> list:
    return [sys.executable, script, *shared_flags(folder, num_eval_prompts=0, save_steps=0, **changes)]


def commands_of(part: str, folder: Path, pythons: list[str]) -> dict[str, list]:
    """Lane -> command; the first is what the others are compared with."""
    if part == "dtype":
        return {f"rloo.py, {dtype}": rloo_py(folder, dtype=dtype) for dtype in ("float32", "bfloat16")}
    lanes = {f"rloo.py, {layout} rows": rloo_py(folder, layout=layout) for layout in ("group", "plain")}
    code = "import trl, transformers as t; print(f'TRL {trl.__version__}, transformers {t.__version__}')"
    for python in pythons:
        name = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        run_py = [Path(python).absolute(), "benchmark/trl/run.py", "rloo", "--reward_by", "text"]
        lanes[name] = [*run_py, *shared_flags(folder)]
    return lanes


def cpu() -> str:
    """The processor, and what it has for bfloat16."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")]
    return ", ".join([*names[:1], *(flag for flag in ("avx512_bf16", "amx_bf16") if flag in info.split())])


def measure(records, part: str, pythons: list[str]):
    """Adds the record of a part, unless one of its lanes is missing now. Records that are made again are only compared,
    by their ratios."""
    recorded = records.value(part, "lanes") or {}
    with tempfile.TemporaryDirectory(prefix="throughput-") as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        commands = commands_of(part, folder, pythons)
        missing = ", ".join(name for name in recorded if name not in commands)
        if missing and not records.again:
            return print(f"{part}: its record and its table are left as they are, since --trl lacks {missing}")
        found = {name: {"seconds": [], "peak_gb": 0.0} for name in commands}
        for number in range(ROUNDS):
            print(f"{part}: round {number + 1} of {ROUNDS}", flush=True)
            for name, command in commands.items():
                done = run(command, folder)
                found[name]["seconds"].append(done["updates"][0]["seconds"])
                found[name]["peak_gb"] = max(found[name]["peak_gb"], done["peak_gb"])
    if not records.again:
        return records.add(part, lanes=found, cpu=cpu(), threads=torch.get_num_threads())
    for name in [*found][1:]:
        before = over_first(recorded, name) if name in recorded else "no record"
        print(f"{name}, time / the first line's: recorded {before}, now {over_first(found, name)}")


def measure_shapes(records):
    """A batch has two prompts, of P and of 3/4 P tokens; half of the completions end after 3/4 of T."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, found = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval(), {}
    model.set_attn_implementation(rloo.GROUP_KERNEL)
    for P, T, k in SHAPES:
        examples = [{"prompt_ids": torch.randint(1, 999, (n,)).tolist()} for n in (P, 3 * P // 4)]
        responses = torch.randint(1, 999, (k, 2, T))
        responses[1::2, :, 3 * T // 4] = 0
        batch = rloo.make_batch(examples, responses, [0])
        lanes = {"group": {"seconds": []}, "plain": {"seconds": []}}
        for _ in range(ROUNDS):
            for layout, lane in lanes.items():
                model.layout = layout
                start = time.process_time()
                rloo.completion_hidden(model, batch).sum().backward()
                lane["seconds"].append(time.process_time() - start)
                model.zero_grad()
        found[f"{P} {T} {k}"] = lanes
        print(P, T, k, lanes, flush=True)
    records.add("shapes", lanes=found)


# ---- Tables ----------------------------------------------------------------------------------------------------------


def over_first(lanes: dict[str, dict], lane: str) -> str:
    """How many times as long a lane takes as the first one, by rounds: median and range. Empty for the first."""
    first = next(iter(lanes.values()))
    if lanes[lane] is first:
        return ""
    ratios = [one / base for one, base in zip(lanes[lane]["seconds"], first["seconds"], strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def table(record: dict) -> str:
    """The lanes of a part."""
    rows = [["", "seconds", "peak, GiB", "time / the first line's (range)"]]
    for name, lane in record["lanes"].items():
        rows.append(
            [name, f"{median(lane['seconds']):.2f}", f"{lane['peak_gb']:.1f}", over_first(record["lanes"], name)]
        )
    rounds = len(next(iter(record["lanes"].values()))["seconds"])
    return f"{common.markdown(rows)}\n\n{rounds} rounds on {record['cpu']}, threads: {record['threads']}, "


def table_of_shapes(record: dict) -> str:
    rows = [["P, T, k", "tokens computed, plain / group", "time, plain / group (range)"]]
    for shape, lanes in record["lanes"].items():
        P, T, k = map(int, shape.split())
        rows.append([f"{P}, {T}, {k}", f"{k * (P + T) / (P + k * T):.2f}", over_first(lanes, "plain")])
    return common.markdown(rows) + "\n\n"


TABLES = {"update": table, "dtype": table, "shapes": table_of_shapes}


def tables(records) -> dict[str, str]:
    """Those of README.md, with what made them."""
    found = {}
    for part, draw in TABLES.items():
        made = records.all[part]["made"]
        versions = f"torch {made['torch']}, transformers {made['transformers']}, rloo.py of commit {made['rloo.py']}"
        found[part] = f"{draw(records.all[part])}{versions}, {made['date']}."
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", action="append", default=[], help="python of an environment with TRL; may be repeated")
    parser.add_argument("--part", choices=TABLES, help="measure this part alone")
    parser.add_argument("--again", action="store_true", help="compare with the records instead of replacing them")
    args = parser.parse_args()
    records = common.Records(RECORDS, args.again)
    for part in [args.part] if args.part else TABLES:
        if part == "shapes":
            measure_shapes(records)
        else:
            measure(records, part, args.trl)
    if not args.again:
        common.insert(HERE / "README.md", tables(records))


if __name__ == "__main__":
    main()
