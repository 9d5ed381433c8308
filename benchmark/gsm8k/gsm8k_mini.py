"""Does RL on verifiable rewards teach, or only sharpen? The runs, measurements and report on mini GSM8K.

    bash benchmark/gsm8k/gsm8k.sh mini                # all of it, in runs/gsm8k/mini
    bash benchmark/gsm8k/gsm8k.sh mini --quick        # each table in small, in runs/gsm8k/mini-quick
    python benchmark/gsm8k/gsm8k_mini.py --stages report --output_dir benchmark/gsm8k    # tables from shipped numbers

The stages, in their order:

    tune      settings with seed 1, measured on the validation problems; `chosen` has the best sampled accuracy, and
              `broadest` the best pass@8
    test      the start and these two settings, with several seeds, measured on the test problems
    report    tables and a picture of what is there

Runs are made one at a time, on one thread. What is found is written to gsm8k_mini.json in the output folder after each
measurement, and what is there is not made again.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import gsm8k_measure
import numpy as np
import torch
import tyro

Stage = Literal["tune", "test", "report"]
REWARDS = "benchmark/gsm8k/gsm8k_reward.py"


# ---- What is run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Flags of a run that the study varies."""

    lr: float
    beta: float = 0.02
    size: int = 128
    """completions per update"""
    episodes: int = 25_600

    @property
    def name(self) -> str:
        return f"lr{self.lr:g}_beta{self.beta:g}_size{self.size}"

    def command(self, task: str, seed: int) -> list[str]:
        """The command without its output folder."""
        micro = min(64, self.size)
        flags = {
            "dataset_name": task,
            "dataset_test_split": "validation",
            "sft_model_path": f"{task}/sft",
            "reward_fns": f"{REWARDS}:correctness {REWARDS}:format",
            "reward_weights": "1.0 0.2",
            "judge_fn": f"{REWARDS}:correctness",
            "rloo_k": 8,
            "temperature": 1.0,
            "response_length": gsm8k_measure.RESPONSE_LENGTH,
            "max_prompt_length": 128,
            "total_episodes": self.episodes,
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": self.size // micro,
            "learning_rate": f"{self.lr:g}",
            "kl_coef": f"{self.beta:g}",
            "local_rollout_forward_batch_size": 128,
            "num_eval_prompts": 1,  # measuring is done here
            "num_sample_generations": 0,
            "save_steps": 100,
            "save_total_limit": 1,
            "device": "cpu",
            "seed": seed,
        }
        return ["rloo.py", *(word for flag, value in flags.items() for word in (f"--{flag}", *str(value).split()))]


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    first: tuple[Setting, ...] = (Setting(1e-4), Setting(2e-4), Setting(4e-4))
    around: tuple[tuple[str, float], ...] = (("beta", 0.0), ("beta", 0.1), ("lr", 8e-4))
    """changes, one at a time, of the best of the first settings"""
    seeds: tuple[int, ...] = (1, 2, 3)
    validation_problems: int = 400
    validation_samples: int = 16
    test_problems: int = 1_000
    test_samples: int = 64


def quick_plan() -> Plan:
    return Plan(
        first=(Setting(1e-4, episodes=1_280), Setting(2e-4, episodes=1_280)),
        around=(("beta", 0.0),),
        seeds=(1, 2),
        validation_problems=100,
        validation_samples=8,
        test_problems=200,
    )


# ---- The study -------------------------------------------------------------------------------------------------------


class Study:
    """A plan, the folder of its output, the embedded task, and what has been found so far."""

    def __init__(self, plan: Plan, folder: Path, task: str = "benchmark/mini_gsm8k"):
        self.plan = plan
        self.folder = folder
        self.task = task
        self.path = folder / "gsm8k_mini.json"
        self.found: dict[str, dict] = {}
        if self.path.is_file():
            self.found = json.loads(self.path.read_text())

    def add(self, name: str, **found):
        """Adds to a record and writes the file: a line for each record, under another name first."""
        self.found[name] = self.found.get(name, {}) | found
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in self.found.items()]
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        unfinished.replace(self.path)

    def has(self, name: str, part: str) -> bool:
        return part in self.found.get(name, {})

    def rows(self, split: str) -> list[dict]:
        problems = {"validation": self.plan.validation_problems, "test": self.plan.test_problems}[split]
        return gsm8k_measure.rloo.load_rows(str(gsm8k_measure.ROOT / self.task), split)[:problems]

    @cached_property
    def engine(self) -> gsm8k_measure.Engine:
        return gsm8k_measure.Engine(gsm8k_measure.ROOT / self.task / "sft")

    # 1. Runs.
    def train(self, setting: Setting, seed: int) -> Path:
        """The folder of a complete run."""
        name = f"{setting.name}__{seed}"
        folder = self.folder / name
        command = setting.command(self.task, seed)
        print(f"{time.strftime('%T')} python {shlex.join(command)}", flush=True)
        if not (folder / "model.safetensors").is_file():  # written at the end
            with open(f"{folder}.log", "a", encoding="utf-8") as log:
                subprocess.run(
                    [sys.executable, *command, "--resume", "--output_dir", str(folder.resolve())],
                    cwd=gsm8k_measure.ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    check=True,
                )
        metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seconds = sum(value for line in metrics for key, value in line.items() if key.startswith("time/"))
        last = metrics[-max(1, len(metrics) // 10) :]  # the last tenth
        self.add(
            name,
            command=shlex.join(["python", *command]),
            seconds_of_updates=round(seconds),
            kl=round(float(np.mean([line["objective/kl"] for line in last])), 3) if setting.beta else None,
        )
        return folder

    # 2. Tuning, on validation problems.
    def validate(self, name: str, folder: Path):
        rows = self.rows("validation")
        found = self.engine.measure(folder, rows, self.plan.validation_samples)
        values = {x: gsm8k_measure.per_problem(found, x) for x in ("greedy", "sampled", "pass@8", "maj@8")}
        steps = np.array([row["steps"] for row in rows])
        means = {x: round(float(value.mean()), 4) for x, value in values.items()}
        for n in sorted(set(steps.tolist())):
            means[f"sampled, {n}"] = round(float(values["sampled"][steps == n].mean()), 4)
        self.add(name, validation=means)
        print(f"{time.strftime('%T')} {name}: {means}", flush=True)

    def second(self) -> list[Setting]:
        """The best of the first settings, with one change each."""
        best = self.best(self.plan.first)
        return [replace(best, **{key: value}) for key, value in self.plan.around]

    def best(self, settings, measure: str = "sampled") -> Setting:
        """By a measure on all validation problems."""
        return max(settings, key=lambda setting: self.found[f"{setting.name}__1"]["validation"][measure])

    def is_tuned(self) -> bool:
        """Whether every trial of the tuning has its measurement."""
        return all(self.has(f"{setting.name}__1", "validation") for setting in self.plan.first) and all(
            self.has(f"{setting.name}__1", "validation") for setting in self.second()
        )

    def trials(self) -> list[Setting]:
        return [*self.plan.first, *self.second()]

    def chosen(self) -> Setting:
        """What the runs maximise is the accuracy of samples."""
        return self.best(self.trials())

    def broadest(self) -> Setting:
        """The setting that keeps most of what many samples find."""
        return self.best(self.trials(), "pass@8")

    def tune(self):
        if not self.has("start", "validation"):
            self.validate("start", gsm8k_measure.ROOT / self.task / "sft")
        for settings in (lambda: self.plan.first, self.second):  # the second ones depend on what the first ones gave
            for setting in settings():
                if not self.has(f"{setting.name}__1", "validation"):
                    self.validate(f"{setting.name}__1", self.train(setting, 1))
        print(f"chosen: {self.chosen().name}, broadest: {self.broadest().name}", flush=True)

    # 3. The test problems, by which nothing is chosen.
    def test(self):
        if not self.is_tuned():
            sys.exit("gsm8k_mini.py: nothing is chosen yet; run the stage tune first")
        rows, samples = self.rows("test"), self.plan.test_samples
        sft = gsm8k_measure.ROOT / self.task / "sft"
        for part, seed in (("test", 1), ("test again", 2)):  # other samples of the same policy
            if not self.has("start", part):
                self.add("start", **{part: self.engine.measure(sft, rows, samples, seed)})
        self.add("start", steps=[row["steps"] for row in rows])
        for setting in (self.chosen(), self.broadest()):
            for seed in self.plan.seeds:
                name = f"{setting.name}__{seed}"
                if not self.has(name, "test"):
                    folder = self.train(setting, seed)
                    self.add(name, test=self.engine.measure(folder, rows, samples, 10 + seed))

    def print_commands(self):
        """The commands that are known, which are all of them once the tuning is done."""
        tuned = self.is_tuned()
        runs = [(setting, 1) for setting in (self.trials() if tuned else self.plan.first)]
        if tuned:
            settings = dict.fromkeys((self.chosen(), self.broadest()))
            runs += [(setting, seed) for setting in settings for seed in self.plan.seeds if seed != 1]
        for setting, seed in runs:
            output = str(self.folder / f"{setting.name}__{seed}")
            print(shlex.join([sys.executable, *setting.command(self.task, seed), "--output_dir", output]))
        if not tuned:
            print("# then the best of these with other values of", ", ".join(dict(self.plan.around)))
            print("# then the best of all, by sampled accuracy and by pass@8, with seeds", *self.plan.seeds)


# ---- Command line ----------------------------------------------------------------------------------------------------


@dataclass
class Args:
    """RL on mini GSM8K: tunes, trains, measures and reports."""

    stages: tuple[Stage, ...] = get_args(Stage)
    """what to do, in the order above"""
    output_dir: str = "runs/gsm8k/mini"
    """folder for all that is written"""
    quick: bool = False
    """short runs and few problems, to see each table; -quick is added to output_dir"""
    dry_run: bool = False
    """only print the commands of the runs"""


def main(args: Args):
    torch.set_num_threads(1)
    if args.quick:
        study = Study(quick_plan(), Path(args.output_dir + "-quick"))
    else:
        study = Study(Plan(), Path(args.output_dir))
    if args.dry_run:
        study.print_commands()
        return
    study.folder.mkdir(parents=True, exist_ok=True)
    for stage in get_args(Stage):
        if stage not in args.stages:
            continue
        if stage == "report":
            import gsm8k_mini_report

            gsm8k_mini_report.write(study)
        else:
            getattr(study, stage)()


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
