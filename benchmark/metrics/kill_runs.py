"""Kills training runs at random moments, resumes them, and compares their end with that of a run that nobody killed.

    python benchmark/metrics/kill_runs.py            # 100 kills, about 7 minutes on 2 cores; writes kill_runs.json
    python benchmark/metrics/kill_runs.py --again    # compares with that record instead

A run has 10 updates of a very small model, with a checkpoint after each. It gets SIGKILL at a random time, half
of the time while a checkpoint is being written or removed, and is started again with --resume until it ends. Then
weights, optimizer, metrics, evaluations and completions must equal those of the run that nobody killed, bit for bit,
except times and memory. New runs are started until the number of kills is reached.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]  # for rloo.py, which the processes import, and common.py
import common  # noqa: E402

RECORDS = HERE / "kill_runs.json"
FLAGS = "--response_length 12 --per_device_train_batch_size 8 --rloo_k 2 --total_episodes 80 --learning_rate 5e-4 "
FLAGS += "--save_steps 1 --num_sample_generations 2 --device cpu --resume"


def save_policy(folder: Path):
    """A random Llama, small enough for a hundred runs, with the tokenizer of the bundled task."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(common.TASK / "sft")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
    transformers.set_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def brief(completions, **columns):
    """A reward function."""
    return [-len(text) / 100 for text in completions]


def small_data(folder: Path, held_out: int):
    """A folder with 24 rows of the bundled task to train on, and some of its held-out ones."""
    folder.mkdir(parents=True)
    for split, rows in (("train", 24), ("test", held_out)):
        lines = (common.TASK / f"{split}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:rows]))


def start(function, *inputs):
    """Begins a process that calls a function. All share one import of rloo, so that a start takes little time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rloo"])
    process = context.Process(target=function, args=inputs)
    process.start()
    return process


def train(folder: Path, output: Path):
    """One run, in a process of its own; what it prints goes to a log beside its output folder."""
    log = os.open(f"{output}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import torch

    import rloo

    torch.set_num_threads(1)
    flags = ["--sft_model_path", folder / "policy", "--dataset_name", folder / "data", "--output_dir", output]
    rloo.command_line([*map(str, flags), "--reward_fns", f"{HERE}/kill_runs.py:brief", *FLAGS.split()])


def result(output: Path) -> dict[str, object]:
    """What a finished run left, without times and memory."""
    changing = ("time/", "eps", "memory/")
    updates = common.read_lines(output / "metrics.jsonl")
    metrics = [{name: x for name, x in update.items() if not name.startswith(changing)} for update in updates]
    checkpoint = f"checkpoint-{metrics[-1]['update']}"
    names = ["model.safetensors", "evaluations.jsonl", "completions.jsonl"]
    names += [f"{checkpoint}/model.safetensors", f"{checkpoint}/optimizer.pt"]
    return {"metrics.jsonl": metrics} | {name: (output / name).read_bytes() for name in names}


def is_younger(path: Path, time_ns: int) -> bool:
    """Whether there is such a file or folder, and it was not left by something earlier."""
    try:
        return path.stat().st_ctime_ns > time_ns
    except FileNotFoundError:
        return False


def killed(process, output: Path, started: int, rng, duration: float) -> bool:
    """Kills a process at a random time, half of the time in the next save after it. Whether it was still running."""
    process.join(rng.uniform(0, duration))
    if rng.random() < 0.5:
        while process.is_alive() and not is_younger(output / "unfinished-checkpoint", started):
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.01))
    process.kill()
    process.join()
    return process.exitcode == -9


def run(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """The numbers of kills, of those during a save, of runs, and of differences from the run that nobody killed."""
    small_data(folder / "data", 4)
    save_policy(folder / "policy")

    def start_run(name: str):
        return start(train, folder, folder / name)

    start_run("first").join()  # imports rloo
    begin = time.perf_counter()
    start_run("whole").join()
    duration = time.perf_counter() - begin
    expected = result(folder / "whole")
    rng = random.Random(seed)
    counts = {"kills": 0, "kills during a save": 0, "runs": 0, "differences": 0}
    while counts["kills"] < kills:
        output = folder / f"run{counts['runs']}"
        started, process = time.time_ns(), start_run(output.name)
        while counts["kills"] < kills and killed(process, output, started, rng, duration):
            counts["kills"] += 1
            counts["kills during a save"] += is_younger(output / "unfinished-checkpoint", started)
            started, process = time.time_ns(), start_run(output.name)
        process.join()
        counts["runs"] += 1
        found = result(output)
        for name in expected:
            if found[name] != expected[name]:
                counts["differences"] += 1
                print(f"{output}: {name} is another one, see {output}.log")
    return counts


def sentence(records) -> str:
    """What README.md says of the record."""
    found = records.all["kills"]
    numbers = f"{found['kills']} kills, {found['kills during a save']} of them during a save"
    return f"{numbers}, left {found['differences']} differences (rloo.py of commit {found['made']['rloo.py']})."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many")
    parser.add_argument("--again", action="store_true", help="compare with the record instead of replacing it")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-runs-"))
    counts = run(folder, args.kills, seed=1)
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))
    if counts["differences"]:
        sys.exit(1)
    shutil.rmtree(folder)
    records = common.Records(RECORDS, args.again)
    records.add("kills", **counts)
    if records.added:
        common.insert(HERE / "README.md", {"kills": sentence(records)})


if __name__ == "__main__":
    main()
