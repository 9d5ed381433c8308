"""Trains SmolLM2-135M-Instruct by rloo.py (and by TRL), and measures what has become of it.

    python benchmark/smollm/smollm.py                      # every run that has no record yet, and the page
    python benchmark/smollm/smollm.py --quick              # 10 updates of each task; prints their tables
    python benchmark/smollm/smollm.py --names sentiment-full-beta0.02-seed1 --again

prepare.py comes first. A run is trained, measured on prompts that it was not trained on, and gets its record in
records.json; what has its record is not run again, and a run that was stopped goes on. With --again runs are made
although they have a record, and compared with it. Policies are in runs/smollm, 0.5 GB each, and may be deleted.
"""

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import report

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from common import Records, folder_of_runs, read_lines, require, run_logged  # noqa: E402

K, SIZE, TEMPERATURE = 4, 32, 0.7  # completions per prompt and per update
GLADNESS = ("glad", "happy", "love")
PREPARED = HERE / "prepared"
# Test prompts whose answers are kept.
EXAMPLES = ("Tell me about rust.", "What do you think of parking fines?")


@dataclass(frozen=True)
class Task:
    response_length: int
    learning_rate: float  # of all weights; adapters get ten times that
    splits: tuple[tuple[str, int], ...]  # measured on: split, number of its first prompts


TASKS = {
    "sentiment": Task(32, 2e-5, (("test", 200),)),
    "reversal": Task(16, 1e-5, (("test", 200), ("harder", 100))),
}


@dataclass(frozen=True)
class Run:
    task: str
    method: str  # base: none; full: all weights; lora8; trl: all weights by TRL
    beta: float = 0.0
    seed: int = 0
    updates: int = 40

    @property
    def name(self) -> str:
        if self.method == "base":
            return f"{self.task}-base"
        return f"{self.task}-{self.method}-beta{self.beta:g}-seed{self.seed}"

    def flags(self, prepared: Path) -> list[str]:
        rate = TASKS[self.task].learning_rate
        values = {
            "learning_rate": 10 * rate if self.method == "lora8" else rate,
            "kl_coef": self.beta,
            "rloo_k": K,
            "total_episodes": self.updates * SIZE,
            "per_device_train_batch_size": SIZE // 2,
            "gradient_accumulation_steps": 2,
            "seed": self.seed,
        }
        if self.method == "lora8":
            values["lora_rank"] = 8
        return [*task_flags(self.task, prepared), *(f"--{name}={value:g}" for name, value in values.items())]


def task_flags(task: str, prepared: Path) -> list[str]:
    reward = f"--reward_fns={HERE / 'rewards.py'}:{task}"
    length = f"--response_length={TASKS[task].response_length}"
    return [f"--dataset_name={prepared / task}", reward, length, f"--temperature={TEMPERATURE}"]


def planned() -> list[Run]:
    """All runs, those of the first seed first."""
    settings = [(task, "full", 0.02) for task in TASKS]
    settings += [("sentiment", "full", 0), ("sentiment", "full", 0.1), ("sentiment", "lora8", 0.02)]
    settings += [("sentiment", "trl", 0.02)]
    bases = [Run(task, "base") for task in TASKS]
    return [*bases, *(Run(*setting, seed) for seed in (1, 2, 3) for setting in settings)]


# ---- Training --------------------------------------------------------------------------------------------------------


def train(run: Run, folder: Path, prepared: Path, trl: str | None) -> Path:
    """The folder with the trained policy."""
    if run.method == "base":
        return prepared / "smollm2"
    out = folder / run.name
    if (out / "model.safetensors").is_file():
        return out
    flags = [*run.flags(prepared), f"--sft_model_path={prepared / 'smollm2'}", f"--output_dir={out}"]
    if run.method == "trl":
        command = [trl, "benchmark/trl/run.py", "rloo", *flags]
    else:  # it evaluates itself on 16 prompts only: measuring comes after
        flags += ["--num_eval_prompts=16", "--num_sample_generations=0", "--save_steps=20", "--save_total_limit=1"]
        command = [sys.executable, "rloo.py", *flags, "--resume"]
    run_logged(command, folder / f"{run.name}.log")
    for checkpoint in out.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return out


def course(folder: Path) -> dict:
    """What a run's metrics say: its score in each update, and the median of its seconds."""
    lines = read_lines(folder / "metrics.jsonl")
    seconds = median(sum(value for name, value in line.items() if name.startswith("time/")) for line in lines)
    return {
        "reward": [round(line["objective/scores"], 4) for line in lines],
        "seconds_per_update": round(seconds, 1),
    }


# ---- Measuring -------------------------------------------------------------------------------------------------------


def complete(task: str, split: str, prompts: int, policy: Path, prepared: Path, out: Path) -> list[dict]:
    """A sampled and a greedy completion of each prompt, with scores: rloo.py's evaluation without training."""
    file = out / "completions.jsonl"
    if not file.is_file() or not file.stat().st_size:
        flags = [*task_flags(task, prepared), f"--sft_model_path={policy}", "--total_episodes=0"]
        flags += [f"--dataset_test_split={split}", f"--num_eval_prompts={prompts}"]
        run_logged([sys.executable, "rloo.py", *flags, "--resume", f"--output_dir={out}"], Path(f"{out}.log"))
    return [sample | sample["grades"] for sample in read_lines(file)]


def mean_of(values) -> float:
    values = list(values)
    return round(sum(values) / len(values), 4)


def summary(samples: list[dict]) -> dict:
    """Of the completions of one mode. exact: the share of full scores."""
    scores = [sample["score"] for sample in samples]
    return {"score": mean_of(scores), "exact": mean_of(score > 1 - 1e-6 for score in scores)}


def habits(samples: list[dict]) -> dict:
    """Shares of the completions that name the last word of their topic, and that speak of gladness or love."""
    texts = [sample["completion"].lower() for sample in samples]
    topics = [last_question(sample["prompt"]).strip(".?").split()[-1].lower().removesuffix("s") for sample in samples]
    return {
        "names_topic": mean_of(topic in text for topic, text in zip(topics, texts, strict=True)),
        "gladness": mean_of(any(word in text for word in GLADNESS) for text in texts),
    }


def last_question(prompt: str) -> str:
    """What the user said last, of a prompt as the model reads it."""
    return prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]


def measure(name: str, task: str, policy: Path, folder: Path, prepared: Path, limit: int) -> dict:
    """limit: the largest number of prompts of a split"""
    found = {}
    for split, prompts in TASKS[task].splits:
        samples = complete(task, split, min(prompts, limit), policy, prepared, folder / "measured" / f"{name}-{split}")
        modes = {mode: [sample for sample in samples if sample["mode"] == mode] for mode in ("sampled", "greedy")}
        found[split] = {mode: summary(of_mode) for mode, of_mode in modes.items()}
    if task == "sentiment":
        found["test"]["sampled"] |= habits(modes["sampled"])
        kept = [sample for sample in modes["greedy"] if last_question(sample["prompt"]) in EXAMPLES]
        found["examples"] = [
            {"prompt": last_question(x["prompt"]), "completion": x["completion"], "score": round(x["score"], 2)}
            for x in sorted(kept or modes["greedy"][:4], key=lambda x: x["prompt"])
        ]
    return found


def make(runs: list[Run], folder: Path, prepared: Path, records: Records, trl: str | None = None, limit: int = 500):
    """Trains and measures what has no record, or is made again."""
    for run in [run for run in runs if records.needs(run.name)]:
        if run.method == "trl" and not trl:
            print(f"{run.name}: left out, needs --trl (see benchmark/requirements.txt)")
            continue
        print(f"training and measuring {run.name}", flush=True)
        policy, found = train(run, folder, prepared, trl), {}
        if run.method != "base":
            command = " ".join(["run.py rloo" if run.method == "trl" else "rloo.py", *run.flags(Path("prepared"))])
            found = {"command": command.replace(f"{HERE}/", ""), **course(policy)}
        records.add(run.name, **found, **measure(run.name, run.task, policy, folder, prepared, limit))


def main():
    runs = {run.name: run for run in planned()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 updates of each task, in records of their own")
    parser.add_argument("--trl", help="python of an environment with TRL 1.16")
    parser.add_argument(
        "--names", nargs="+", choices=runs, default=list(runs), metavar="NAME", help="runs, by their records"
    )
    parser.add_argument(
        "--again", action="store_true", help="make runs that have a record, and compare; writes nothing"
    )
    args = parser.parse_args()
    require(vaderSentiment="vaderSentiment==3.3.2", reasoning_gym="reasoning-gym==0.1.25")
    if not (PREPARED / "smollm2" / "model.safetensors").is_file():
        sys.exit("smollm.py: no model yet; run this first: python benchmark/smollm/prepare.py")
    if args.quick:
        folder = folder_of_runs("smollm-quick")
        records = Records(folder / "records.json")
        runs = [Run(task, "base") for task in TASKS] + [Run(task, "full", 0.02, 1, updates=10) for task in TASKS]
        make(runs, folder, PREPARED, records, limit=32)
        print("\n\n".join(report.tables(records).values()))
        return
    if not args.again:
        require(matplotlib="matplotlib")
    records = Records(report.RECORDS, args.again)
    make([runs[name] for name in args.names], folder_of_runs("smollm", args.again), PREPARED, records, args.trl)
    if not args.again:
        report.report()


if __name__ == "__main__":
    main()
