"""What can RLOO reach on mini TL;DR? The runs and measurements of the study in README.md.

    python benchmark/frontier/frontier.py                        # all that is not there yet; hours of one core
    python benchmark/frontier/frontier.py --stages sweep report  # some of it
    python benchmark/frontier/frontier.py --quick                # each table in small, in runs/frontier-quick

The stages, in their order:

    sweep      settings of 6,400 episodes, measured on fresh validation posts; the best by three seeds is `first_choice`
    robust     six seeds for a short list of settings, on the same posts; the best that is surely ahead is `chosen`
    compare    both against the default that they may replace, five seeds each, each on fresh test posts of its own
    time       both in turn, on all cores, which should have nothing else to do
    headline   five seeds of the default, measured along the way
    long       25,600 episodes for several β, and of reward models from noisy comparisons, measured along the way
    limits     what may keep RLOO below best-of-n: the limit of the gradient's norm, and the size of the network
    best_of_n  the best of n samples, of the SFT policy and of trained ones, by the reward model
    report     tables in README.md and pictures, of what is there

Runs are made one at a time and, but for `time`, on one thread. What is found is written at once to runs.json (a record
for each run), posts.json (what `compare` needs of each post) and best_of_n.json; what has its record there is not made
again, and a run that was stopped goes on. Training output is in runs/frontier, which may be deleted.
"""

import fcntl
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import distil
import estimates
import measure
import noisy
import numpy as np
import report
import torch
import tyro

HERE = Path(__file__).resolve().parent
Stage = Literal["sweep", "robust", "compare", "time", "headline", "long", "limits", "best_of_n", "report"]
SAMPLES = 2  # completions sampled for each post
QUIET = ["--dataset_test_split", "validation", "--num_eval_prompts", "1", "--num_sample_generations", "0"]
# Of a finalist, relative to the old default. On a shared machine seconds vary by a quarter; see `time`.
COST_LIMIT = 1.4


# ---- What is run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Flags of a run that the study varies; all of them are on its command line, whatever rloo.py's defaults are."""

    lr: float = 5e-4
    size: int = 128
    """completions per update"""
    beta: float = 0.05
    epochs: int = 1
    minis: int = 1
    """mini-batches per epoch"""
    k: int = 4
    episodes: int = 6_400
    warmup: float = 0.0
    """part of the run over which the learning rate rises"""
    eps: float = 1e-8
    """of Adam"""
    norm: float = 1.0
    """limit of the gradient's norm; 0: none"""
    reward: str = ""
    """the embedded task's reward model, or one that is trained here: noisy10, noisy25"""

    @property
    def name(self) -> str:
        parts = [f"lr{self.lr:g}", f"size{self.size}", f"beta{self.beta:g}"]
        for key in ("epochs", "minis", "k", "warmup", "eps", "norm", "episodes", "reward"):
            value = getattr(self, key)
            if value != getattr(Setting(), key):
                parts.append(value if key == "reward" else f"{key}{value:g}")
        return "_".join(parts)

    def command(self, seed: int) -> list[str]:
        """The command without its output folder."""
        step = self.size // self.minis  # completions per optimizer step
        micro = min(64, step)
        flags = {
            "seed": seed,
            "learning_rate": f"{self.lr:g}",
            "kl_coef": f"{self.beta:g}",
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": step // micro,
            "num_mini_batches": self.minis,
            "num_ppo_epochs": self.epochs,
            "rloo_k": self.k,
            "total_episodes": self.episodes,
        }
        if self.warmup:
            flags["warmup_ratio"] = self.warmup
        if self.eps != Setting.eps:
            flags["adam_eps"] = self.eps
        if self.norm != Setting.norm:
            flags["max_grad_norm"] = f"{self.norm:g}"
        return ["rloo.py", *(word for flag, value in flags.items() for word in (f"--{flag}", str(value)))]


OLD = Setting()  # what was rloo.py's default before this study
DEFAULT = Setting(2.5e-4, 32, 0.02)  # rloo.py's default, by this study

# The first grid, with one seed.
GRID = [Setting(lr, size, beta) for beta in (0.05, 0.02) for lr in (5e-4, 2.5e-4) for size in (32, 64, 128)]
GRID += [Setting(lr=1e-3)]


def around(best: Setting) -> list[Setting]:
    """The second grid, with one seed: what differs from the best of the first in one thing."""
    found = [replace(best, lr=round(best.lr * factor, 6)) for factor in (0.7, 1.4)]
    found += [replace(best, size=best.size // 2), replace(best, beta=0.1), replace(best, k=8), replace(best, epochs=2)]
    found += [replace(best, size=best.size * 4, minis=4)]  # steps of the same size, four for each rollout
    found += [replace(best, warmup=0.1)]
    found += [replace(best, lr=best.lr * 2, eps=1e-3)]  # near the root mean square of a clipped gradient
    return found


# The first choice, the best of three seeds, did not hold on test posts: its fifth seed fell behind. Larger steps are
# clearly worse, so that it may be close to an edge. The short list has it, the runner-up, and smaller steps of both; it
# was fixed before any of these got more seeds.
ROBUST = [Setting(5e-4, 32, 0.05), Setting(3.5e-4, 32, 0.05), Setting(2.5e-4, 32, 0.02)]
ROBUST += [Setting(5e-4, 64, 0.02), Setting(3.5e-4, 64, 0.02)]


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    old: Setting = OLD
    grid: tuple[Setting, ...] = tuple(GRID)
    second_grid: int = 99
    """settings of the second grid, at most"""
    finalists: int = 3
    few_seeds: tuple[int, ...] = (1, 2, 3)
    robust: tuple[Setting, ...] = tuple(ROBUST)
    robust_seeds: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    worthwhile: float = 0.01
    """lead over the old default, with few seeds, below which a setting of `robust` gets no more seeds"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    second_seeds: tuple[int, ...] = tuple(range(7, 17))
    """of the second comparison: seeds by which nothing was chosen; the first five left open what is better"""
    headline_seeds: tuple[int, ...] = tuple(range(12, 17))
    validation_posts: int = 2_000
    test_posts: int = 5_000
    curve_posts: int = 1_000
    """the first test posts, on which a long run is measured along the way"""
    curve_points: int = 8
    rounds: int = 3
    timed_episodes: int = 1_920
    betas: tuple[float, ...] = (0.02, 0.0, 0.05, 0.01, 0.1)
    long_seeds: tuple[int, ...] = (1, 2, 3)
    noisy_betas: tuple[float, ...] = (0.0, 0.02)
    noisy: tuple[str, ...] = ("noisy10", "noisy25")
    long_episodes: int = 25_600
    most: int = 64
    """n of best-of-n, at most"""
    best_of_n_posts: int = 2_000
    longest_episodes: int = 100_000
    longest_beta: float = 0.05
    """the one that gold rises longest with"""
    noisy_posts: int = 20_000
    """that a reward model from noisy comparisons is trained on"""
    distilled: int = 16
    """n of the best-of-n that a policy is fine-tuned on"""
    distilled_prompts: int = 10_000


def quick_plan() -> Plan:
    grid = [replace(setting, episodes=1_280) for setting in (OLD, Setting(size=64), Setting(size=32))]
    return Plan(
        old=grid[0],
        grid=tuple(grid),
        second_grid=2,
        finalists=1,
        few_seeds=(1, 2),
        robust=tuple(grid[2:]),
        robust_seeds=(1, 2, 3),
        seeds=(1, 2),
        second_seeds=(4, 5),
        headline_seeds=(4,),
        validation_posts=200,
        test_posts=300,
        curve_posts=100,
        curve_points=4,
        rounds=1,
        timed_episodes=640,
        betas=(0.02, 0.0),
        long_seeds=(1,),
        noisy_betas=(0.0,),
        noisy=("noisy25",),
        long_episodes=1_920,
        most=16,
        best_of_n_posts=100,
        longest_episodes=0,
        noisy_posts=400,
        distilled_prompts=160,
    )


# ---- Records ---------------------------------------------------------------------------------------------------------


class Records:
    """A JSON file of name -> record, written anew, under another name first, at each change. Several processes may
    write to it."""

    def __init__(self, path: Path, compact: bool = False):
        self.path = path
        self.compact = compact
        self.all: dict[str, dict] = {}
        self.read()

    def read(self):
        if self.path.is_file():
            self.all = json.loads(self.path.read_text())

    def add(self, name: str, **found):
        lock = os.open(self.path.parent, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.read()
        self.all[name] = self.all.get(name, {}) | found
        separators = (",", ":") if self.compact else None
        lines = [f"{json.dumps(x)}: {json.dumps(self.all[x], separators=separators)}" for x in sorted(self.all)]
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        unfinished.replace(self.path)
        os.close(lock)

    def value(self, name: str, *keys):
        """An entry of a record, None where there is none."""
        found = self.all.get(name)
        for key in keys:
            found = None if found is None else found.get(key)
        return found


def win_of(records: Records, setting: Setting, seeds) -> float | None:
    """What settings are chosen by: the gold win rate, sampled, on fresh validation posts; the mean over seeds."""
    wins = [records.value(f"{setting.name}__{seed}", "validation", "sampled", "win") for seed in seeds]
    return None if None in wins else float(np.mean([win["mean"] for win in wins]))


def ranked(records: Records, settings, seeds) -> list[Setting]:
    """The settings that have a value for all seeds, the best first."""
    having = [setting for setting in dict.fromkeys(settings) if win_of(records, setting, seeds) is not None]
    return sorted(having, key=lambda setting: -win_of(records, setting, seeds))


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_logged(command: list[str], log: Path):
    """Runs a command in the top folder, on one thread, with its output at the end of a log."""
    with open(log, "a", encoding="utf-8") as output:
        subprocess.run(
            command,
            cwd=measure.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
        )


def seconds_of_updates(folder: Path) -> list[float]:
    """The time of each update of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [sum(value for key, value in line.items() if key.startswith("time/")) for line in lines]


# ---- The study -------------------------------------------------------------------------------------------------------


class Study:
    """A plan, its folders, and what has been found so far."""

    post_units = 20  # what is kept of each post is in twentieths
    files = {"runs": "runs.json", "posts": "posts.json"}
    kept = (("sampled", "win"), ("sampled", "gold"), ("greedy", "win"))  # of each test post

    def __init__(self, plan: Plan, folder: Path, results: Path):
        self.plan = plan
        self.folder = folder
        self.results = results
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results.mkdir(parents=True, exist_ok=True)
        self.runs = Records(results / self.files["runs"])
        self.posts = Records(results / self.files["posts"], compact=True)
        self.best_of_n = Records(results / "best_of_n.json")

    @lru_cache(maxsize=1)  # noqa: B019  (there is one study in a process)
    def engine(self, reward: str = "", chunk_size: int = 128) -> measure.Engine:
        """What measures; where a run's reward is not the embedded task's, `proxy` is its own."""
        return measure.Engine({"proxy": self.reward_model(reward)} if reward else {}, chunk_size)

    def reward_model(self, reward: str) -> Path:
        """The folder of a reward model that is trained here."""
        folder = self.folder / reward
        if not folder.is_dir():
            found = noisy.build(folder, float(reward.removeprefix("noisy")) / 100, self.plan.noisy_posts)
            self.runs.add(f"reward_{reward}", **found)
        return folder

    def train(self, setting: Setting, seed: int, checkpoints: int = 0) -> Path:
        """The folder of a complete run. It evaluates on one validation post only: measuring is done here."""
        name = f"{setting.name}__{seed}"
        folder = self.folder / name
        command = setting.command(seed)
        if setting.reward:
            command += ["--reward_model_path", str(self.reward_model(setting.reward).relative_to(measure.ROOT))]
        updates = -(-setting.episodes // setting.size)
        extra = [*QUIET, "--save_steps", str(-(-updates // checkpoints) if checkpoints else 0)]
        extra += ["--save_total_limit", str(max(2, checkpoints))]
        if not (folder / "model.safetensors").is_file():
            print(f"{time.strftime('%T')} training {name}", flush=True)
            begun, before = folder.exists(), cpu_seconds_of_children()
            run_logged(
                [sys.executable, *command, *extra, "--resume", "--output_dir", str(folder)], Path(f"{folder}.log")
            )
            if not begun:
                self.runs.add(name, cpu_seconds=round(cpu_seconds_of_children() - before, 1))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last = lines[-max(1, len(lines) // 20) :]  # the last twentieth of the updates
        names = ["objective/kl", "objective/scores", "objective/entropy", "grad_norm", "policy/clipfrac_avg"]
        training = {key: float(np.mean([line[key] for line in last])) for key in names if key in last[0]}
        training |= {"clipped_norms": float(np.mean([line["grad_norm"] > 1.0 for line in lines]))}
        self.runs.add(
            name,
            command=" ".join(["python", *command]),
            seed=seed,
            seconds_of_updates=round(sum(seconds_of_updates(folder)), 1),
            training={key: round(value, 4) for key, value in training.items()},
        )
        return folder

    def grade(self, folder: Path, split: str, posts: int, seed: int, greedy: bool, reward: str = ""):
        """Summaries of a policy, and its values for each post."""
        engine, rows = self.engine(reward), measure.fresh_posts(split, posts)
        policy = engine.policy(folder)
        grades = {"sampled": measure.grade(engine, policy, rows, SAMPLES, seed)}
        if greedy:
            grades["greedy"] = measure.grade(engine, policy, rows, 1, seed, temperature=0.0)
        found = {mode: measure.summaries(values) for mode, values in grades.items()}
        return {"posts": posts, "samples": SAMPLES, **found}, grades

    # 1. The sweep: all on validation posts.
    def validate(self, setting: Setting, seed: int, greedy: bool = True):
        """Makes a run and measures it."""
        name = f"{setting.name}__{seed}"
        if self.runs.value(name, "validation") is None:
            folder = self.train(setting, seed)
            found, _ = self.grade(folder, "validation", self.plan.validation_posts, seed, greedy)
            self.runs.add(name, validation=found)
            print(f"{name}: win {found['sampled']['win']['mean']:.4f}", flush=True)

    def second_grid(self) -> list[Setting]:
        return around(ranked(self.runs, self.plan.grid, [1])[0])[: self.plan.second_grid]

    def finalists(self) -> list[Setting]:
        """The best settings by one seed, of those that cost no more than the limit."""
        found = ranked(self.runs, [*self.plan.grid, *self.second_grid()], [1])
        return [setting for setting in found if not self.cost(setting) > COST_LIMIT][: self.plan.finalists]

    def cost(self, setting: Setting) -> float:
        """The processor's seconds for a run relative to the old default's, means over seeds; NaN if not known."""

        def seconds(setting):
            found = [self.runs.value(f"{setting.name}__{seed}", "cpu_seconds") for seed in self.plan.few_seeds]
            found = [value for value in found if value is not None]
            return np.mean(found) if found else np.nan

        return float(seconds(setting) / seconds(self.plan.old))

    def first_choice(self) -> Setting | None:
        """The best finalist by few seeds; None while the sweep is not complete."""
        if any(win_of(self.runs, setting, [1]) is None for setting in (self.plan.old, *self.plan.grid)):
            return None
        if any(win_of(self.runs, setting, [1]) is None for setting in self.second_grid()):
            return None
        finalists = [*self.finalists(), self.plan.old]
        if any(win_of(self.runs, setting, self.plan.few_seeds) is None for setting in finalists):
            return None
        return ranked(self.runs, finalists, self.plan.few_seeds)[0]

    def sweep(self):
        for seed in self.plan.few_seeds:
            self.validate(self.plan.old, seed)
        for setting in self.plan.grid:
            self.validate(setting, 1)
        for setting in self.second_grid():
            self.validate(setting, 1)
        for seed in self.plan.few_seeds:
            for setting in self.finalists():
                self.validate(setting, seed)
        print(f"first choice: {self.first_choice().name}", flush=True)

    # 2. More seeds for a short list, on the same posts.
    def robust(self):
        for seed in self.plan.few_seeds:
            for setting in (self.plan.old, *self.plan.robust):
                self.validate(setting, seed, greedy=False)
        for seed in self.plan.robust_seeds:
            for setting in (self.plan.old, *self.candidates()):
                self.validate(setting, seed, greedy=False)
        print(f"chosen: {self.chosen().name}", flush=True)

    def candidates(self) -> list[Setting]:
        """The settings that get all seeds."""
        seeds, worthwhile = self.plan.few_seeds, self.plan.worthwhile
        return [setting for setting in self.plan.robust if self.leads(setting, seeds).mean() >= worthwhile]

    def leads(self, setting: Setting, seeds) -> np.ndarray:
        """By how much a setting's win rate is above the old default's, seed by seed."""
        return np.array([win_of(self.runs, setting, [x]) - win_of(self.runs, self.plan.old, [x]) for x in seeds])

    def chosen(self) -> Setting | None:
        """The best candidate whose lead is above 0 with its whole interval; the old default where there is none.

        None while one of them lacks a seed."""
        old, seeds = self.plan.old, self.plan.robust_seeds
        if any(win_of(self.runs, setting, self.plan.few_seeds) is None for setting in (old, *self.plan.robust)):
            return None
        if any(win_of(self.runs, setting, seeds) is None for setting in (old, *self.candidates())):
            return None
        ahead = [x for x in self.candidates() if estimates.interval_over_seeds(self.leads(x, seeds))[0] > 0]
        return ranked(self.runs, ahead or [old], seeds)[0]

    # 3. The comparisons: test posts, which nothing was chosen by.
    def test(self, setting: Setting, seed: int, split: str):
        """Makes a run and measures it on fresh test posts; keeps its values for each post."""
        name = f"{setting.name}__{seed}"
        if self.runs.value(name, split) is None:
            folder = self.train(setting, seed)
            greedy = "greedy" in dict(self.kept)
            found, grades = self.grade(folder, split, self.plan.test_posts, seed, greedy)
            per_post = {}
            for mode, measured in self.kept:
                twentieths = np.rint(grades[mode][measured].mean(1) * self.post_units)
                per_post[f"{split}/{mode}/{measured}"] = twentieths.astype(int).tolist()
            self.posts.add(name, **per_post)
            self.runs.add(name, **{split: found})
            print(f"{name}: win on {split} posts {found['sampled']['win']['mean']:.4f}", flush=True)

    def comparisons(self) -> list[tuple[str, Setting | None, tuple[int, ...]]]:
        """Test posts, what is compared with the old default on them, and by which seeds."""
        return [
            ("test", self.first_choice(), self.plan.seeds),
            ("second_test", self.chosen(), self.plan.second_seeds),
        ]

    def compare(self):
        for split, candidate, seeds in self.comparisons():
            if candidate is None:
                sys.exit(f"compare: the choice of what is compared on {split} posts is not complete")
            if candidate != self.plan.old:
                for seed in seeds:
                    for setting in (self.plan.old, candidate):
                        self.test(setting, seed, split)
        if self.runs.value("sft", "test") is None:
            found, _ = self.grade(measure.TASK / "sft", "test", self.plan.test_posts, 1, greedy=True)
            self.runs.add("sft", test=found)

    # 4. Time.
    def time(self):
        """Seconds of short runs of chosen and the old default, in turn: the training alone, as their time/* have it."""
        chosen = self.chosen()
        if chosen in (None, self.plan.old) or self.runs.value("time", "rounds") == self.plan.rounds:
            return
        seconds = {"old": [], "chosen": []}
        for _ in range(self.plan.rounds):
            for name, setting in (("old", self.plan.old), ("chosen", chosen)):
                short = replace(setting, episodes=self.plan.timed_episodes)
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, *short.command(1), *QUIET, "--output_dir", folder]
                    threads = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
                    subprocess.run(command, cwd=measure.ROOT, env=threads, check=True, capture_output=True)
                    first, *others = seconds_of_updates(Path(folder))  # the first warms up: it counts as another
                    seconds[name].append(round(sum(others) * (1 + 1 / len(others)), 2))
        ratios = [ours / old for ours, old in zip(seconds["chosen"], seconds["old"])]
        print(f"time: {seconds}, chosen over old {np.mean(ratios):.3f}", flush=True)
        self.runs.add(
            "time",
            rounds=self.plan.rounds,
            threads=os.cpu_count(),
            seconds=seconds,
            ratios=np.round(ratios, 3).tolist(),
        )

    # 5. The default along the way.
    def headline(self):
        for seed in self.plan.headline_seeds:
            self.follow(self.chosen() or self.plan.old, seed, on_all=False)

    # 6. Long runs.
    def long_settings(self) -> list[Setting]:
        base = replace(self.chosen() or self.plan.old, episodes=self.plan.long_episodes)
        return [replace(base, beta=beta) for beta in self.plan.betas]

    def longest_setting(self) -> Setting:
        return replace(self.long_settings()[0], beta=self.plan.longest_beta, episodes=self.plan.longest_episodes)

    def large_updates(self) -> Setting:
        """The old default's large updates, for as many episodes as the others."""
        return replace(self.plan.old, episodes=self.plan.long_episodes)

    def noisy_settings(self) -> list[Setting]:
        """The same runs on reward models that are worse than the embedded task's."""
        base = self.long_settings()[0]
        betas = self.plan.noisy_betas
        return [replace(base, reward=reward, beta=beta) for reward in self.plan.noisy for beta in betas]

    def follow(self, setting: Setting, seed: int, on_all: bool = True):
        """Makes a run and measures its checkpoints and its end on the first test posts, and its end on all."""
        name = f"{setting.name}__{seed}"
        if self.runs.value(name, "curve") is not None:
            return
        folder = self.train(setting, seed, self.plan.curve_points)
        curve = [{"episode": 0, **self.start(setting.reward)}]
        for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:])):
            episode = int(checkpoint.name[11:]) * setting.size
            if episode < setting.episodes:
                found, _ = self.grade(checkpoint, "test", self.plan.curve_posts, seed, False, setting.reward)
                curve.append({"episode": episode, **found})
        posts = self.plan.test_posts if on_all else self.plan.curve_posts
        found, grades = self.grade(folder, "test", posts, seed, on_all, setting.reward)
        same_posts = {key: values[: self.plan.curve_posts] for key, values in grades["sampled"].items()}
        curve.append({"episode": setting.episodes, "sampled": measure.summaries(same_posts)})
        self.runs.add(name, curve=curve, **({"test": found} if on_all else {}))
        print(f"{name}: win on test posts {found['sampled']['win']['mean']:.4f}", flush=True)

    def start(self, reward: str) -> dict:
        """The SFT policy, where every curve begins."""
        name = "sft" + (f"_{reward}" if reward else "")
        if self.runs.value(name, "start") is None:
            found, _ = self.grade(measure.TASK / "sft", "test", self.plan.curve_posts, 1, greedy=False, reward=reward)
            self.runs.add(name, start=found)
        return self.runs.value(name, "start")

    def long_runs(self) -> list[tuple[Setting, int]]:
        """In the order in which they are made: each setting once, then more seeds."""
        plan = self.plan
        runs = [(setting, 1) for setting in (*self.long_settings(), *self.noisy_settings(), self.large_updates())]
        if plan.longest_episodes:
            runs.append((self.longest_setting(), 1))
        runs += [(setting, seed) for seed in plan.long_seeds for setting in self.long_settings()]
        return list(dict.fromkeys(runs))

    def long(self):
        for setting, seed in self.long_runs():
            self.follow(setting, seed)

    # 7. What may keep RLOO below best-of-n.
    def without_limit(self) -> Setting:
        """The chosen setting without a limit of the gradient's norm."""
        return replace(self.chosen() or self.plan.old, norm=0.0)

    def limits(self):
        for seed in self.plan.few_seeds:
            self.validate(self.without_limit(), seed, greedy=False)
        name = f"distilled{self.plan.distilled}"
        if self.runs.value(name, "test") is None:
            folder = self.folder / name
            if not folder.is_dir():
                self.runs.add(name, **distil.build(folder, self.plan.distilled, self.plan.distilled_prompts))
            found, _ = self.grade(folder, "test", self.plan.best_of_n_posts, 1, greedy=True)
            self.runs.add(name, test=found)

    # 8. Best-of-n.
    def sample_best_of_n(self, name: str, folder: Path, most: int, posts: int):
        """Measures of best-of-n for n = 1, 2, 4, ... `most`, from `most` samples of each of the first test posts."""
        if name not in self.best_of_n.all:
            engine = self.engine(chunk_size=512)
            rows = measure.fresh_posts("test", posts)
            grades = measure.grade(engine, engine.policy(folder), rows, most, seed=1)
            powers = [2**i for i in range(most.bit_length())]
            by_n = {str(n): estimates.best_of_n(grades, n) | {"kl_bound": estimates.kl_bound(n)} for n in powers}
            self.best_of_n.add(name, posts=posts, samples=most, by_n=by_n)
            print(f"{name}: best of {most} wins {by_n[str(most)]['win']['mean']:.4f}", flush=True)

    def sample_all_best_of_n(self):
        self.sample_best_of_n("sft", measure.TASK / "sft", self.plan.most, self.plan.best_of_n_posts)
        for setting in self.sampled_settings():
            name = f"{setting.name}__1"
            if name not in self.best_of_n.all:
                folder = self.train(setting, 1)
                self.sample_best_of_n(name, folder, min(16, self.plan.most), self.plan.best_of_n_posts // 2)

    def sampled_settings(self) -> list[Setting]:
        """Trained policies that best-of-n samples, by their episodes."""
        chosen = self.chosen() or self.plan.old
        found = [chosen, replace(chosen, beta=self.plan.longest_beta, episodes=self.plan.long_episodes)]
        return found + ([self.longest_setting()] if self.plan.longest_episodes else [])


def main(stages: tuple[Stage, ...] = get_args(Stage), quick: bool = False):
    """The study's runs, measurements, tables and pictures.

    Args:
        stages: which, in this order
        quick: each table in small, in runs/frontier-quick, within a quarter of an hour
    """
    torch.set_num_threads(1)  # as in the runs: a measurement is then the same to the digit
    folder = measure.ROOT / "runs" / ("frontier-quick" if quick else "frontier")
    study = Study(quick_plan() if quick else Plan(), folder, folder / "results" if quick else HERE)
    for stage in stages:
        print(f"{time.strftime('%T')} {stage}", flush=True)
        if stage == "report":
            report.write_tables(study)
            report.draw_pictures(study)
        else:
            getattr(study, "sample_all_best_of_n" if stage == "best_of_n" else stage)()


if __name__ == "__main__":
    tyro.cli(main)
