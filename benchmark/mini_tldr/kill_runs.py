"""Kills training runs at random moments, resumes them, and compares their end with that of a run that nobody killed.

    python benchmark/mini_tldr/kill_runs.py                        # 100 kills, a few minutes on 2 cores
    python benchmark/mini_tldr/kill_runs.py --kills 10 --seed 2

A run is `python rloo.py --save_steps 1 --resume ...` on a small part of mini TL;DR: 10 updates with a checkpoint after
each, and evaluations at the beginning, in the middle and at the end. It gets SIGKILL at a random time, or while a
checkpoint is being written or removed, and is started again by the same command until it ends. Then weights,
metrics.jsonl, evaluations.jsonl, completions.jsonl and the last checkpoint must equal those of the run that nobody
killed, bit for bit, except times and memory. New runs are started until the number of kills is reached.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for rloo.py
MINI_TLDR = ROOT / "benchmark" / "mini_tldr"


def write_data(folder: Path, data: Path):
    """The first rows of a dataset."""
    (folder / "data").mkdir(parents=True)
    for split, rows in (("train", 24), ("test", 4)):
        lines = (data / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (folder / "data" / f"{split}.jsonl").write_text("".join(lines[:rows]))


def train(folder: Path, models: Path, output: Path):
    """One run, in a process of its own; what it prints goes to a log beside its output folder."""
    log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    import rloo

    torch.set_num_threads(1)
    flags = {
        "sft_model_path": models / "sft",
        "reward_model_path": models / "reward",
        "output_dir": output,
        "dataset_name": folder / "data",
        "response_length": 12,
        "per_device_train_batch_size": 8,
        "rloo_k": 2,
        "gradient_accumulation_steps": 1,
        "total_episodes": 80,
        "learning_rate": 5e-4,
        "save_steps": 1,
        "num_sample_generations": 2,
        "device": "cpu",
    }
    rloo.command_line([*(str(part) for name, value in flags.items() for part in (f"--{name}", value)), "--resume"])


def result(output: Path) -> dict[str, object]:
    """What a finished run left, without times, memory and what follows from them."""

    def lasting(metrics: dict) -> dict:
        changing = ("time/", "cpu_time", "eps", "tokens_per_second", "memory/")
        return {name: value for name, value in metrics.items() if not name.startswith(changing)}

    newest = max(output.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    state = json.loads((newest / "state.json").read_text())
    del state["files"]["metrics.jsonl"]  # times in it have more or fewer digits
    state = {name: value for name, value in state.items() if name not in ("flags", "run_id")}  # with its folder in them
    files = [
        output / "model.safetensors",
        output / "evaluations.jsonl",
        output / "completions.jsonl",
        newest / "model.safetensors",
        newest / "optimizer.pt",
    ]
    return {
        "metrics": [lasting(json.loads(line)) for line in (output / "metrics.jsonl").read_text().splitlines()],
        "counters": state,
        **{str(path.relative_to(output)): path.read_bytes() for path in files},
    }


def is_younger(path: Path, time_ns: int) -> bool:
    """Whether there is such a file or folder, and it was not left by something earlier."""
    try:
        return path.stat().st_ctime_ns > time_ns
    except FileNotFoundError:
        return False


def run(folder: Path, kills: int, seed: int, models: Path = MINI_TLDR, data: Path = MINI_TLDR) -> dict[str, int]:
    """Counts of kills, of those during a save, of resumed runs that ended, and of their differences."""
    rng, context = random.Random(seed), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rloo"])  # imported once, so that a start takes little time

    def start(output: Path):
        process = context.Process(target=train, args=(folder, models, output))
        process.start()
        return process

    write_data(folder, data)
    first = context.Process(target=os.getpid)  # with it the server imports rloo, once
    first.start()
    first.join()
    begin, whole = time.perf_counter(), start(folder / "whole")
    whole.join()
    duration = time.perf_counter() - begin
    if whole.exitcode:
        sys.exit(f"kill_runs.py: the run ended with status {whole.exitcode}:\n{(folder / 'whole.log').read_text()}")
    expected = result(folder / "whole")
    counts = {"kills": 0, "kills during a save": 0, "runs": 0, "differences": 0}
    while counts["kills"] < kills:
        output = folder / f"run{counts['runs']}"
        while True:
            before, process = time.time_ns(), start(output)
            if counts["kills"] < kills:
                process.join(rng.uniform(0.0, duration))
                saving = partial(is_younger, output / "unfinished-checkpoint", before)
                if rng.random() < 0.5:  # wait for the next save
                    while process.is_alive() and not saving():
                        time.sleep(0.0005)
                    time.sleep(rng.uniform(0.0, 0.01))
                if process.is_alive():
                    process.kill()
                    process.join()
                    if process.exitcode == -9:
                        counts["kills"] += 1
                        counts["kills during a save"] += saving()
                        continue
            process.join()
            break
        counts["runs"] += 1
        found = result(output) if process.exitcode == 0 else {}
        for name in expected:
            if found.get(name) != expected[name]:
                counts["differences"] += 1
                print(f"{output}: other {name} (status {process.exitcode}), see {output}.log")
        if found == expected:
            shutil.rmtree(output)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    args = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"  # the killed leave semaphores
    folder = Path(tempfile.mkdtemp(prefix="kill-runs-"))
    begin, counts = time.perf_counter(), run(folder, args.kills, args.seed)
    print(", ".join(f"{name}: {count}" for name, count in counts.items()), f"({time.perf_counter() - begin:.0f} s)")
    if counts["differences"]:
        sys.exit(1)
    shutil.rmtree(folder)
