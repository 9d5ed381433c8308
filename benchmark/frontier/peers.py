"""RLOO against its peers on mini TL;DR, each tuned with the same number of trials.

    python benchmark/frontier/peers.py --trl0 trl0/bin/python --trl1 trl1/bin/python          # all; many hours
    python benchmark/frontier/peers.py --methods rloo raft                                    # some of it
    python benchmark/frontier/peers.py --quick --trl0 trl0/bin/python --trl1 trl1/bin/python  # each table in small
    python benchmark/frontier/peers.py --report                                               # only tables, picture

benchmark/requirements.txt says how to make the environments with TRL. Without them its methods are skipped.

Each method gets six trials of 6,400 episodes with seed 1, measured by the gold win rate on the fresh validation posts:

    1 to 3  a learning rate to begin with, half of it and twice of it
    4       if one of the ends is the best so far, another step in its direction; else the rate between the best and the
            better of its neighbours
    5       the best learning rate with another β
    6       the best of these, with updates of a quarter of the completions at half of its learning rate

The best trial gets seeds 2 to 6, by which nothing was chosen, and these are measured on the fresh test posts. First
come all trials of the methods of FIRST, then their seeds. The other methods take over the settings of one of these and
get seeds 2 to 4.

Runs are made one at a time, on one thread. What is found is written at once to peers.json (a record for each run) and
peers_posts.json (what is needed of each test post); what has its record there is not made again. Training output is in
runs/peers, which may be deleted. Two processes with different --methods may run side by side.
"""

import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import frontier
import measure
import peers_report
import torch
import tyro

HERE = Path(__file__).resolve().parent
VARIANTS, TRL = "benchmark/frontier/variants.py", "benchmark/frontier/peers_trl.py"
DIVERGED = ("is not finite", "probability tensor contains")  # what rloo.py and `generate` say of NaN
KEPT = {  # of each update: name in peers.json -> name in metrics.jsonl
    "scores": "objective/scores",
    "kl": "objective/kl",
    "cpu_seconds": "cpu_seconds",
    "optimizer_steps": "optimizer_steps",
}


# ---- What is compared ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    name: str
    title: str
    lr: float = 5e-4
    """learning rate of the first trial"""
    betas: tuple[float, ...] = (0.05, 0.02)
    """weights of the KL; the first one is to begin with"""
    k: int = 4
    epochs: int = 1
    """passes over the completions of an update, an optimizer step each"""
    variant: str = "plain"
    """of variants.py"""
    flags: tuple[str, ...] = ()
    """of rloo.py, beside those that every method has"""
    trainer: str = ""
    """of peers_trl.py, instead of rloo.py: ppo or grpo"""
    value_model: str = ""
    """where PPO's value model begins: reward, policy, or a reward model of noisy.py"""
    like: str = ""
    """the method whose best setting it takes over; it has no trials of its own"""

    @property
    def environment(self) -> str:
        """Whose python runs it; empty: this one."""
        return {"ppo": "trl0", "grpo": "trl1"}.get(self.trainer, "")


PPO = Method("ppo", "PPO", 2e-4, k=1, epochs=4, trainer="ppo", value_model="reward")
GRPO = Method("grpo_trl", "GRPO (TRL)", betas=(0.0, 0.04), trainer="grpo")
RAFT = Method("raft", "RAFT, k = 4", betas=(0.0, 0.02), variant="raft")
METHODS = [
    Method("rloo", "RLOO, k = 4"),
    PPO,
    GRPO,
    RAFT,
    Method("no_baseline", "REINFORCE without baseline", variant="no_baseline"),
    # what PPO owes to its value model and to its epochs, at the same settings
    replace(PPO, name="ppo_policy", title="PPO, value model from the policy", value_model="policy", like="ppo"),
    replace(PPO, name="ppo_noisy", title="PPO, value model from comparisons only", value_model="noisy10", like="ppo"),
    replace(PPO, name="ppo_1_epoch", title="PPO, 1 epoch", epochs=1, like="ppo"),
    # equal k, at the settings of k = 4
    *(Method(f"rloo_k{k}", f"RLOO, k = {k}", k=k, like="rloo") for k in (2, 8, 16)),
    *(replace(RAFT, name=f"raft_k{k}", title=f"RAFT, k = {k}", k=k, like="raft") for k in (2, 8)),
]
FIRST = ("rloo", "ppo", "grpo_trl", "raft", "no_baseline")
BY_NAME = {method.name: method for method in METHODS}


@dataclass(frozen=True)
class Trial:
    """A setting of a method."""

    method: Method
    lr: float
    beta: float
    episodes: int = 6_400
    size: int = 128
    """completions per update"""

    @property
    def name(self) -> str:
        size = "" if self.size == Trial.size else f"_size{self.size}"
        return f"{self.method.name}_lr{self.lr:g}{size}_beta{self.beta:g}"

    def command(self, seed: int) -> list[str]:
        """The command without its output folder."""
        method = self.method
        if not method.trainer:
            setting = frontier.Setting(self.lr, self.size, self.beta, method.epochs, k=method.k, episodes=self.episodes)
            return ["python", VARIANTS, method.variant, *setting.command(seed)[1:], *method.flags]
        flags = {
            "seed": seed,
            "learning_rate": f"{self.lr:g}",
            "beta": f"{self.beta:g}",
            "episodes": self.episodes,
            "size": self.size,
        }
        if method.trainer == "ppo":
            flags |= {"epochs": method.epochs, "value_model": method.value_model}
        else:
            flags |= {"k": method.k}
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        return [f"{method.environment}/bin/python", TRL, method.trainer, *words]


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    methods: tuple[Method, ...] = tuple(METHODS)
    first: tuple[str, ...] = FIRST
    trials: int = 6
    """of each method, at least 3"""
    seeds: tuple[int, ...] = (2, 3, 4, 5, 6)
    """of the best trial: not the one it was chosen by; methods that are not of `first` have the first three"""
    episodes: int = 6_400
    size: int = 128
    """completions per update"""
    validation_posts: int = 2_000
    test_posts: int = 5_000
    noisy_posts: int = 20_000
    """that the reward model from comparisons is trained on"""
    at_episodes: tuple[int, ...] = (1_600, 3_200, 6_400)
    """where the table of equal budgets looks"""
    at_seconds: tuple[int, ...] = (25, 50, 100, 200, 400, 800)
    at_steps: tuple[int, ...] = (25, 50, 100, 200, 400, 800)


def quick_plan() -> Plan:
    names = (*FIRST, "ppo_1_epoch", "rloo_k2")
    return Plan(
        methods=tuple(BY_NAME[name] for name in names),
        trials=3,
        seeds=(2, 3),
        episodes=128,
        size=64,
        validation_posts=100,
        test_posts=200,
        at_episodes=(64, 128),
        at_seconds=(1, 2, 4, 8),
        at_steps=(1, 2, 4, 8),
    )


def planned(first: Trial, number: int, win: Callable[[Trial], float | None]) -> list[Trial]:
    """The trials of a method as far as they are known; `win` of a trial is None while it has not been made."""
    trials = [replace(first, lr=first.lr * factor) for factor in (1, 0.5, 2)]
    if number == 3 or None in [win(trial) for trial in trials]:
        return trials
    best, second, _ = [trial.lr for trial in sorted(trials, key=win, reverse=True)]
    if best == min(trial.lr for trial in trials):
        rate = best / 2
    elif best == max(trial.lr for trial in trials):
        rate = best * 2
    else:
        rate = math.sqrt(best * second)
    trials.append(replace(first, lr=float(f"{rate:.2g}")))
    changes = [
        lambda best: {"beta": first.method.betas[1]},
        lambda best: {"size": best.size // 4, "lr": best.lr / 2},
    ]
    for change in changes[: number - 4]:
        if win(trials[-1]) is None:
            break
        best = max(trials, key=win)
        trials.append(replace(best, **change(best)))
    return trials


# ---- The study -------------------------------------------------------------------------------------------------------


class Peers(frontier.Study):
    """What has been found so far. Measures and records runs as the study of the defaults does."""

    files = {"runs": "peers.json", "posts": "peers_posts.json"}
    kept = (("sampled", "win"), ("sampled", "gold"))

    def __init__(self, plan: Plan, folder: Path, results: Path, pythons: dict[str, str], noisy: Path | None = None):
        super().__init__(plan, folder, results)
        self.pythons = pythons | {"": sys.executable}
        self.noisy = noisy

    # Training.
    def value_model(self, method: Method) -> str:
        """For --value_model."""
        if not method.value_model.startswith("noisy"):
            return method.value_model
        return str(self.noisy or self.reward_model(method.value_model))

    def train(self, trial: Trial, seed: int) -> Path:
        """The folder of a complete run. Raises CalledProcessError where the run fails."""
        name = f"{trial.name}__{seed}"
        folder = self.folder / name
        command = trial.command(seed)
        if not (folder / "model.safetensors").is_file():
            print(f"{time.strftime('%T')} training {name}", flush=True)
            python = self.pythons[trial.method.environment]
            extra = [*frontier.QUIET, "--save_steps", "0", "--resume"]
            if trial.method.trainer:
                extra = ["--value_model", self.value_model(trial.method)] if trial.method.value_model else []  # a path
            log = Path(f"{folder}.log")
            frontier.run_logged([python, *command[1:], *extra, "--output_dir", str(folder)], log)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.runs.add(
            name,
            command=shlex.join(command),
            seed=seed,
            cpu_seconds=round(sum(line["cpu_seconds"] for line in lines), 1),
            optimizer_steps=lines[-1]["optimizer_steps"],
            peak_memory=round(lines[-1]["memory/hwm_gb"], 2),
            curve={
                key: [round(line[metric], 3) for line in lines] for key, metric in KEPT.items() if metric in lines[-1]
            },
        )
        return folder

    def measure_unless_diverged(self, measure_run: Callable, trial: Trial, seed: int, *arguments):
        """A run that ends with NaN is a result as well: it is recorded, and not made again."""
        name = f"{trial.name}__{seed}"
        if self.runs.value(name, "diverged"):
            return
        try:
            measure_run(trial, seed, *arguments)
        except subprocess.CalledProcessError:
            said = Path(f"{self.folder / name}.log").read_text(encoding="utf-8")[-2_000:]
            if not any(words in said for words in DIVERGED):
                raise
            print(f"{name}: diverged", flush=True)
            self.runs.add(name, command=shlex.join(trial.command(seed)), seed=seed, diverged=True)

    # Choosing.
    def first_trial(self, method: Method) -> Trial:
        return Trial(method, method.lr, method.betas[0], self.plan.episodes, self.plan.size)

    def win(self, trial: Trial) -> float | None:
        """What a trial is chosen by: the gold win rate on validation posts; 0 if it diverged, None if not made."""
        if self.runs.value(f"{trial.name}__1", "diverged"):
            return 0.0
        return frontier.win_of(self.runs, trial, [1])

    def trials(self, method: Method) -> list[Trial]:
        """As far as they are known."""
        return [] if method.like else planned(self.first_trial(method), self.plan.trials, self.win)

    def best(self, method: Method) -> Trial | None:
        """The best of all trials; None while one is missing."""
        if method.like:
            found = self.best(next(x for x in self.plan.methods if x.name == method.like))
            return found and replace(found, method=method)
        trials = self.trials(method)
        if len(trials) < self.plan.trials or None in [self.win(trial) for trial in trials]:
            return None
        return max(trials, key=self.win)

    # Running.
    def tune(self, method: Method):
        missing = True
        while missing:
            missing = [trial for trial in self.trials(method) if self.win(trial) is None]
            for trial in missing[:1]:
                self.measure_unless_diverged(self.validate, trial, 1, False)

    def repeat(self, method: Method):
        """All seeds of the best trial, on test posts."""
        self.runs.read()  # another process may have tuned it
        trial = self.best(method)
        if trial is None:
            print(f"{method.name}: skipped, since {method.like} has not been tuned", flush=True)
            return
        for seed in self.seeds(method):
            self.measure_unless_diverged(self.test, trial, seed, "test")

    def seeds(self, method: Method) -> tuple[int, ...]:
        return self.plan.seeds if method.name in self.plan.first else self.plan.seeds[:3]

    def start(self):
        """Measures the SFT policy, where every run begins."""
        if self.runs.value("sft", "test") is None:
            greedy = "greedy" in dict(self.kept)
            found, _ = self.grade(measure.TASK / "sft", "test", self.plan.test_posts, 1, greedy)
            self.runs.add("sft", test=found)

    def run(self, methods: list[Method]):
        first = [method for method in methods if method.name in self.plan.first]
        for method in first:
            self.tune(method)
        self.start()
        for method in first:
            self.repeat(method)
        for method in methods:
            if method not in first:
                self.tune(method)
                self.repeat(method)


def main(
    methods: tuple[str, ...] = (),
    trl0: str | None = None,
    trl1: str | None = None,
    noisy: Path | None = None,
    quick: bool = False,
    report: bool = False,
):
    """The comparison's runs, measurements, tables and picture.

    Args:
        methods: which, by the names in this file; default: all
        trl0: python of an environment with TRL 0.19, for PPO
        trl1: python of an environment with TRL 1.x, for GRPO
        noisy: reward model of noisy.py, made with --noise 0.1, that ppo_noisy's value model begins as; default: is made
        quick: each table in small, in runs/peers-quick, within a quarter of an hour
        report: only write tables and picture of what is there
    """
    torch.set_num_threads(1)  # as in the runs: a measurement is then the same to the digit
    plan = quick_plan() if quick else Plan()
    folder = measure.ROOT / "runs" / ("peers-quick" if quick else "peers")
    unknown = set(methods) - {method.name for method in plan.methods}
    if unknown:
        sys.exit(f"--methods {' '.join(sorted(unknown))}: must be of {' '.join(x.name for x in plan.methods)}")
    given = {name: os.path.abspath(path) for name, path in (("trl0", trl0), ("trl1", trl1)) if path}  # links stay links
    study = Peers(plan, folder, folder / "results" if quick else HERE, given, noisy and noisy.resolve())
    chosen = [method for method in plan.methods if not methods or method.name in methods]
    skipped = [
        f"{method.name} (--{method.environment})" for method in chosen if method.environment not in study.pythons
    ]
    if not report:
        if skipped:
            print(f"skipped, since these are not given: {', '.join(skipped)}", flush=True)
        study.run([method for method in chosen if method.environment in study.pythons])
    study.runs.read()
    study.posts.read()
    peers_report.write_tables(study)
    peers_report.draw_picture(study)


if __name__ == "__main__":
    tyro.cli(main)
