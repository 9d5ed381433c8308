"""How long does an update take: in group rows, in plain rows, by TRL, and in bfloat16?

    python benchmark/speed/throughput.py --trl trl0/bin/python --trl trl1/bin/python     # see ../requirements.txt
    python benchmark/speed/throughput.py --part dtype                                    # five minutes on one core

Writes throughput.json and the table of README.md. Each run is a process of its own, whose output is in
runs/throughput.log; of its two updates the second counts. What is compared takes turns, A B C A B C, and a ratio is
that of two times within a round, so that a slow minute slows all of them. Policy and reward model have pythia-70m's
shape and random weights, prompts and completions TL;DR's lengths.

update   rloo.py in both layouts, and TRL, in float32
dtype    rloo.py in float32 and in bfloat16

TRL has the same models, prompts, k, T, temperature, β, threads; one epoch, one mini-batch; sdpa; fused AdamW; gradient
checkpointing off (1.x: on by default); no saving and no evaluation. 1.x generates and scores a whole update at once,
with the dynamic cache, both its defaults.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import common  # noqa: E402

COMMAND = "python benchmark/speed/throughput.py --trl trl0/bin/python --trl trl1/bin/python"
RECORDS = HERE / "throughput.json"
ROUNDS = 3
FIRST = ("rloo.py, group rows", "rloo.py, float32")  # what the other lanes of a part are compared with

# The shape of pythia-70m, and TL;DR's lengths
SHAPE = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
VOCABULARY = 50_304
PROMPTS = 4  # B: prompts per update
PROMPT_TOKENS = (224, 449)  # the range of their lengths, without its end
K = 4
T = 53


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


def lanes_of_dtype(folder: Path, pythons: list[str]) -> dict[str, list]:
    """Name -> command."""
    return {f"rloo.py, {dtype}": rloo_py(folder, dtype=dtype) for dtype in ("float32", "bfloat16")}


def lanes_of_update(folder: Path, pythons: list[str]) -> dict[str, list]:
    """Name -> command."""
    lanes = {f"rloo.py, {layout} rows": rloo_py(folder, layout=layout) for layout in ("group", "plain")}
    code = "import trl, transformers as t; print(f'TRL {trl.__version__}, transformers {t.__version__}')"
    for python in pythons:
        name = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        run_py = [Path(python).absolute(), "benchmark/trl/run.py", "rloo", "--reward_by", "text"]
        lanes[name] = [*run_py, *shared_flags(folder)]
    return lanes


LANES = {"update": lanes_of_update, "dtype": lanes_of_dtype}


def cpu() -> str:
    """The processor, and what it has for bfloat16."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")]
    return ", ".join([*names[:1], *(flag for flag in ("avx512_bf16", "amx_bf16") if flag in info.split())])


def measure(records, part: str, pythons: list[str], again: bool = False):
    """Adds a record of each lane of a part, or nothing if there is a record of another lane. With `again` ratios are
    compared with the recorded ones instead."""
    recorded = lanes_of(records, part)
    with tempfile.TemporaryDirectory(prefix="throughput-") as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        lanes = LANES[part](folder, pythons)
        others = [name for name in recorded if name not in lanes]
        if others and not again:
            return print(
                f"{part}: its records and its table are left as they are, since --trl lacks {', '.join(others)}"
            )
        rounds = []
        for number in range(1, ROUNDS + 1):
            print(f"{part}: round {number} of {ROUNDS}", flush=True)
            rounds.append({name: run(command, folder) for name, command in lanes.items()})
    found = {}
    for name in lanes:
        runs = [lanes[name] for lanes in rounds]
        times = [one["updates"][0]["seconds"] for one in runs]
        peak = max(one["peak_gb"] for one in runs)
        found[name] = {"seconds": times, "peak_gb": peak, "cpu": cpu(), "threads": torch.get_num_threads()}
    for name, lane in found.items():
        if not again:
            records.add(f"{part}: {name}", **lane)
        elif over_first(found, name, "seconds"):
            before, now = (over_first(x, name, "seconds") for x in (recorded, found))
            print(f"{name}, time / the first line's: recorded {before}, now {now}")


# ---- Table -----------------------------------------------------------------------------------------------------------


def lanes_of(records, part: str) -> dict[str, dict]:
    """Lane -> its record; the first of rloo.py's own, then in the order of the alphabet."""
    names = [name.removeprefix(f"{part}: ") for name in records.all if name.startswith(f"{part}: ")]
    names.sort(key=lambda name: (name not in FIRST, "rloo.py" not in name, name))
    return {name: records.all[f"{part}: {name}"] for name in names}


def over_first(lanes: dict[str, dict], lane: str, key: str) -> str:
    """How many times as long a lane takes as the first one, by rounds: median and range. Empty for the first."""
    first = next(iter(lanes.values()))
    if lane not in lanes or lanes[lane] is first or key not in lanes[lane]:
        return ""
    ratios = [one / base for one, base in zip(lanes[lane][key], first[key], strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def table(records, part: str) -> str:
    """The lanes of a part, and what made them."""
    lanes = lanes_of(records, part)
    rows = [["", "seconds", "peak, GiB", "time / the first line's (range)"]]
    for lane, found in lanes.items():
        seconds, peak = f"{median(found['seconds']):.2f}", f"{found['peak_gb']:.1f}"
        rows.append([lane, seconds, peak, over_first(lanes, lane, "seconds")])
    first = next(iter(lanes.values()))
    machine = f"{len(first['seconds'])} rounds on {first['cpu']}, threads: {first['threads']}"
    return f"{common.markdown(rows)}\n\n{machine}, {made_by(first['made'])}."


def made_by(made: dict) -> str:
    """What made a record, in words. Old records have no date."""
    versions = f"torch {made['torch']}, transformers {made['transformers']}, rloo.py of commit {made['rloo.py']}"
    date = made.get("date", "between 21 and 25 November 2026")
    return f"{versions}, {date}"


def tables(records) -> dict[str, str]:
    """Those of README.md."""
    return {part: table(records, part) for part in LANES if lanes_of(records, part)}


def report():
    """Writes the tables of README.md."""
    common.insert(HERE / "README.md", tables(common.Records(RECORDS)))


def headline() -> list[list[str]]:
    """A row of the index's table."""
    lanes = lanes_of(common.Records(RECORDS), "update")
    ratios = {lane.split(",")[0]: over_first(lanes, lane, "seconds") for lane in lanes if lane.startswith("TRL")}
    answer = "; ".join(f"{trl}: {ratio} times" for trl, ratio in ratios.items())
    sure = f"{len(lanes[FIRST[0]]['seconds'])} rounds, their range; one CPU"
    question = "How many times as long does an update take with TRL?"
    return [[question, answer, sure, COMMAND, "speed/README.md#tldrs-lengths"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", action="append", default=[], help="python of an environment with TRL; may be repeated")
    parser.add_argument("--part", choices=LANES, help="measure this part alone")
    parser.add_argument("--again", action="store_true", help="compare with the records instead of replacing them")
    args = parser.parse_args()
    records = common.Records(RECORDS)
    for part in [args.part] if args.part else LANES:
        measure(records, part, args.trl, args.again)
    if not args.again:
        report()


if __name__ == "__main__":
    main()
