"""Ends training runs in five ways that happen to people, and looks at what they have saved.

    python benchmark/metrics/end_runs.py            # 20 runs of each kind; about 2 minutes on 2 cores
    python benchmark/metrics/end_runs.py --again    # compares with the record instead

    tee          Ctrl-C on `python rloo.py ... 2>&1 | tee log`, which ends tee as well
    hangup       SIGHUP, as when a connection drops
    group        SIGTERM to all processes, those of a pool in a reward function (concurrent.futures) too
    metrics      an error in one's own metrics_of
    full disk    the third save cannot write: no file may grow beyond some size

Each run has a very small model. It is signalled at a random moment after its second update,
or meets its error there, and must leave a checkpoint of the last update before that moment whose weights and optimizer
equal, bit for bit, those of the same update in a run that nobody ended. Only a disk without room for another checkpoint
costs the update whose save failed; those runs save after each update, the others only when they are ended.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]  # for rloo.py, which the processes import, and common.py
import common  # noqa: E402
import kill_runs  # noqa: E402

RECORDS = HERE / "end_runs.json"
FLAGS = "--response_length 8 --per_device_train_batch_size 4 --rloo_k 2 --learning_rate 5e-4 "
FLAGS += "--lr_scheduler_type constant --num_sample_generations 0 --num_eval_prompts 2 --device cpu"
KINDS = {  # and what the page calls them
    "tee": "Ctrl-C with output piped into `tee`",
    "hangup": "SIGHUP, as when a connection drops",
    "group": "SIGTERM to the run and the pool of its reward function",
    "metrics": "an error in `metrics_of`",
    "full disk": "a full disk at a save",
}
POOL = []  # the workers of brief_by_pool, once it has been called


def brief_by_pool(completions, **columns):
    """kill_runs.brief by other processes."""
    if not POOL:
        POOL.append(ProcessPoolExecutor(2, multiprocessing.get_context("fork")))
    return [-n / 100 for n in POOL[0].map(len, completions)]


def train(kind: str, folder: Path, output: Path, moment: int):
    """One run, in a process group of its own; what it prints goes to a log beside its output folder."""
    os.setpgrp()
    with open(f"{output}.log", "wb") as log:
        out = log.fileno()
        if kind == "tee":
            tee = subprocess.Popen(["tee", f"{output}.tee"], stdin=subprocess.PIPE, stdout=log)
            out = tee.stdin.fileno()
        os.dup2(out, 1)
        os.dup2(out, 2)
    sys.stdout, sys.stderr = (open(n, "w", closefd=False) for n in (1, 2))  # noqa: SIM115
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # nohup, a shell's `&` or pytest may change them
        signal.signal(number, signal.SIG_DFL)
    import torch

    import rloo

    torch.set_num_threads(1)
    if kind == "whole":
        kill_runs.save_policy(folder / "policy")
    metrics_of, save_checkpoint = rloo.metrics_of, rloo.save_checkpoint

    def broken_metrics(args, experience, improved):
        if Path(output, "metrics.jsonl").read_bytes().count(b"\n") == moment:
            raise ValueError("an error of the user's")
        return metrics_of(args, experience, improved)

    def save_on_full_disk(args, folder, state, *others):
        if state["update"] > 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (moment, resource.RLIM_INFINITY))
        save_checkpoint(args, folder, state, *others)

    if kind == "metrics":
        rloo.metrics_of = broken_metrics
    if kind == "full disk":
        rloo.save_checkpoint = save_on_full_disk
    flags = ["--sft_model_path", folder / "policy", "--dataset_name", folder / "data", "--output_dir", output]
    reward = "end_runs.py:brief_by_pool" if kind == "group" else "kill_runs.py:brief"
    flags += ["--reward_fns", HERE / reward]
    flags += ["--save_steps", 1 if kind in ("full disk", "whole") else 0, "--save_total_limit", 100]
    flags += ["--total_episodes", 80 if kind == "whole" else 800]
    rloo.command_line([*map(str, flags), *FLAGS.split()])


def updates(output: Path) -> int:
    """How many updates a run has written."""
    file = output / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def end(kind: str, process, output: Path, rng) -> int:
    """Waits for the second update, ends the run unless it ends itself, and returns the last update before that."""
    while process.is_alive() and updates(output) < 2:
        time.sleep(0.002)
    if kind in ("metrics", "full disk"):
        process.join(120)
        return updates(output) + (kind == "metrics")  # its update was made but not written
    time.sleep(rng.uniform(0, 0.2))
    done = updates(output)
    to_all = {"tee": signal.SIGINT, "group": signal.SIGTERM}
    if kind in to_all:
        os.killpg(process.pid, to_all[kind])
    else:
        os.kill(process.pid, signal.SIGHUP)
    process.join(120)
    return done


def run(folder: Path, number: int, seed: int) -> dict[str, dict]:
    """Of each kind: runs, the most updates that one of them lost, and how many checkpoints were others."""
    kill_runs.small_data(folder / "data", 2)

    def start(kind: str, name: str, moment: int = 0):
        return kill_runs.start(train, kind, folder, folder / name, moment)

    whole = folder / "whole"
    start("whole", "whole").join()
    largest = max(file.stat().st_size for file in (whole / "checkpoint-1").iterdir())
    rng = random.Random(seed)
    found = {kind: {"runs": 0, "updates lost": 0, "differences": 0} for kind in KINDS}
    for i, kind in itertools.product(range(number), KINDS):
        output = folder / f"{kind} {i}"
        moment = rng.randrange(2, 5) if kind == "metrics" else rng.randrange(2000, largest)
        done = end(kind, start(kind, output.name, moment), output, rng)
        saved = max([int(path.name[11:]) for path in output.glob("checkpoint-*")], default=0)
        names = [f"checkpoint-{saved}/{name}" for name in ("model.safetensors", "optimizer.pt")]
        counts = found[kind]
        counts["runs"] += 1
        counts["updates lost"] = max(counts["updates lost"], done - saved)
        if not saved or any((output / name).read_bytes() != (whole / name).read_bytes() for name in names):
            counts["differences"] += 1
            print(f"{output}: checkpoint {saved} after {done} updates, see {output}.log")
    return found


def sentence(records) -> str:
    """What README.md says of the records."""
    lost = [f"{title} ({records.all[kind]['updates lost']})" for kind, title in KINDS.items()]
    found = records.all["tee"]
    commit = found["made"]["rloo.py"]
    return f"Most updates lost in {found['runs']} runs each: {'; '.join(lost)} (rloo.py of commit {commit})."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="compare with the record instead of replacing it")
    records = common.Records(RECORDS, parser.parse_args().again)
    folder = Path(tempfile.mkdtemp(prefix="end-runs-"))
    found = run(folder, number=20, seed=1)
    for kind, counts in found.items():
        print(f"{kind}: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    if any(counts["differences"] for counts in found.values()):
        sys.exit(1)
    shutil.rmtree(folder)
    for kind, counts in found.items():
        records.add(kind, **counts)
    if records.added:
        common.insert(HERE / "README.md", {"ends": sentence(records)})


if __name__ == "__main__":
    main()
