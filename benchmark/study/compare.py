"""What does each option of rloo.py do to the result on mini TL;DR, and does RLOO beat its peers?

    python benchmark/study/compare.py options                                                  # about 3 hours of a core
    python benchmark/study/compare.py peers --trl0 trl0/bin/python --trl1 trl1/bin/python      # about 9 hours
    python benchmark/study/compare.py peers --names rloo raft                                  # some of it
    python benchmark/study/compare.py options --quick                                          # in small, in runs/
    python benchmark/study/compare.py options --report_only                                     # only tables, pictures

benchmark/requirements.txt says how to make the environments with TRL. Without them its methods are skipped.

Every row has trials with seed 1, chosen by the gold win rate on the fresh validation posts:

    1 to 3  a learning rate to begin with, half of it and twice of it; an option has only these
    4       if one of the ends is the best so far, another step in its direction; else the rate between the best and the
            better of its neighbours
    5       the best learning rate with another β
    6       the best of these, with updates of a quarter of the completions at half of its learning rate

The best trial gets seeds by which nothing was chosen, on the fresh test posts. Rows with `like` take over the settings
of another row. With one step per rollout --normalize_advantage and --advantage_estimator drgrpo only rescale a gradient
whose norm is cut to 1, and the clip has nothing to do: they are no rows.

Records: options.json and peers.json, also of trials. Two processes with other --names may run side by side.
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import models
import numpy as np
import reach
import study
import torch
import tyro
from reach import DEFAULT
from study import TASK, Run, Setting

VARIANTS, TRL = "benchmark/study/variants.py", "benchmark/study/peers_trl.py"
BASES = {"options": "default", "peers": "rloo"}  # what the others are compared with


@dataclass(frozen=True)
class Row:
    """A row of a table: an option of rloo.py or a method."""

    name: str
    title: str
    lr: float = DEFAULT.lr
    """learning rate of the first trial"""
    betas: tuple[float, ...] = (DEFAULT.beta,)
    """weights of the KL; the first one is to begin with"""
    size: int = DEFAULT.size
    """completions per update to begin with"""
    k: int = 4
    epochs: int = 1
    flags: tuple[str, ...] = ()
    """of rloo.py, beside those that every row has"""
    variant: str = "plain"
    """of variants.py"""
    trainer: str = ""
    """of peers_trl.py, instead of rloo.py: ppo or grpo"""
    value_model: str = ""
    """where PPO's value model begins: reward, policy, or noisy10, a reward model of models.py"""
    like: str = ""
    """the row whose best setting it takes over; it has no trials of its own"""
    seeds: int = 3

    @property
    def environment(self) -> str:
        """Whose python runs it; empty: this one."""
        return {"ppo": "trl0", "grpo": "trl1"}.get(self.trainer, "")


REINFORCEPP = ("--kl_level", "token", "--normalize_reward", "--reward_clip_range", "1", "--normalize_advantage")
OPTIONS = [
    Row("default", "rloo.py's default", seeds=9),
    Row("std", "advantage divided by the group's std, as in GRPO", flags=("--advantage_estimator", "grpo")),
    Row("mean", "baseline: mean of the whole update", flags=("--advantage_estimator", "reinforce")),
    Row("beta_0", "β = 0 (no KL)", betas=(0.0,), like="default"),
    Row("beta_005", "β = 0.05", betas=(0.05,), like="default"),
    Row("token", "KL per token, rewards to go", flags=("--kl_level", "token")),
    Row("in_loss", "KL in the loss (k3)", flags=("--no_kl_in_reward",)),
    Row("reinforcepp", "Reinforce++: KL per token, all scaled", flags=REINFORCEPP),
    Row("by_token", "loss: mean over tokens", flags=("--loss_aggregation", "token")),
    Row("by_mean", "loss: mean over completions' means", flags=("--loss_aggregation", "sequence-mean")),
    Row("epochs_4", "4 epochs", epochs=4, lr=DEFAULT.lr / 2),
    Row("no_clip", "4 epochs, never clipped", epochs=4, flags=("--cliprange", "1000"), like="epochs_4"),
]
RLOO = Row("rloo", "RLOO, k = 4", 5e-4, (0.05, 0.02), size=128, seeds=5)
PPO = Row("ppo", "PPO (TRL)", 2e-4, (0.05, 0.02), 128, k=1, epochs=4, trainer="ppo", value_model="reward", seeds=5)
PPO_LIKE = replace(PPO, like="ppo", seeds=3)
RAFT = replace(RLOO, name="raft", title="RAFT, k = 4", betas=(0.0, 0.02), variant="raft")
PEERS = [
    RLOO,
    PPO,
    replace(RLOO, name="grpo_trl", title="GRPO (TRL)", betas=(0.0, 0.04), trainer="grpo"),
    RAFT,
    replace(RLOO, name="no_baseline", title="REINFORCE without baseline", variant="no_baseline"),
    # what PPO owes to its value model and to its epochs, at the same settings
    replace(PPO_LIKE, name="ppo_policy", title="PPO, value model from the policy", value_model="policy"),
    replace(PPO_LIKE, name="ppo_noisy", title="PPO, value model from comparisons only", value_model="noisy10"),
    replace(PPO_LIKE, name="ppo_1_epoch", title="PPO, 1 epoch", epochs=1, seeds=2),
    # equal k, at the settings of k = 4
    *(replace(RLOO, name=f"rloo_k{k}", title=f"RLOO, k = {k}", k=k, like="rloo", seeds=3) for k in (2, 8, 16)),
    *(replace(RAFT, name=f"raft_k{k}", title=f"RAFT, k = {k}", k=k, like="raft", seeds=3) for k in (2, 8)),
]


@dataclass(frozen=True)
class Trial:
    """A setting of a row."""

    row: Row
    lr: float
    beta: float
    episodes: int
    size: int

    @property
    def name(self) -> str:
        size = "" if self.size == 128 else f"_size{self.size}"
        return f"{self.row.name}_lr{self.lr:g}{size}_beta{self.beta:g}"

    def command(self, seed: int) -> tuple[str, ...]:
        """The command without python and output folder."""
        row = self.row
        if not row.trainer:
            setting = Setting(self.lr, self.size, self.beta, self.episodes, row.epochs, row.k, row.flags)
            return (VARIANTS, row.variant, *setting.command(seed)[1:])
        flags = {"seed": seed, "learning_rate": f"{self.lr:g}", "beta": f"{self.beta:g}"}
        flags |= {"episodes": self.episodes, "size": self.size}
        flags |= {"epochs": row.epochs, "value_model": row.value_model} if row.trainer == "ppo" else {"k": row.k}
        return (TRL, row.trainer, *(word for flag, value in flags.items() for word in (f"--{flag}", str(value))))


def planned(first: Trial, number: int, win: Callable[[Trial], float | None]) -> list[Trial]:
    """The trials of a row as far as they are known; `win` of a trial is None while it has not been made."""
    trials = [replace(first, lr=first.lr * factor) for factor in (1, 0.5, 2)][:number]
    if number <= 3 or None in [win(trial) for trial in trials]:
        return trials
    best, second, _ = [trial.lr for trial in sorted(trials, key=win, reverse=True)]
    if best == min(trial.lr for trial in trials):
        rate = best / 2
    elif best == max(trial.lr for trial in trials):
        rate = best * 2
    else:
        rate = math.sqrt(best * second)
    trials.append(replace(first, lr=float(f"{rate:.2g}")))
    for change in (lambda _: {"beta": first.row.betas[1]}, lambda best: {"size": best.size // 4, "lr": best.lr / 2}):
        if win(trials[-1]) is None:
            break
        best = max(trials, key=win)
        trials.append(replace(best, **change(best)))
    return trials


class Comparison(study.Study):
    """The rows of a table, and what has been found of them."""

    def __init__(self, kind: str, folder: Path, results: Path, pythons: dict[str, str] | None = None, quick=False):
        super().__init__(folder, results)
        rows = {"options": OPTIONS, "peers": PEERS}[kind]
        if quick:
            rows = [replace(row, size=min(row.size, 64), seeds=2) for row in rows]
        self.rows = {row.name: row for row in rows}
        self.base = BASES[kind]
        self.pythons = {"": ""} | (pythons or {})
        self.trials_each = 1 if quick else 3 if kind == "options" else 6
        self.episodes = 128 if quick else 6_400
        self.validation_posts = 50 if quick else 2_000
        self.test_posts = 100 if quick else {"options": 2_000, "peers": 5_000}[kind]
        self.noisy_posts = 200 if quick else 20_000

    # Choosing.
    def win(self, trial: Trial) -> float | None:
        """What a trial is chosen by; None if it has not been made."""
        return self.records.value(f"{trial.name}__1", "validation", "sampled", "win", "mean")

    def trials(self, row: Row) -> list[Trial]:
        """As far as they are known."""
        first = Trial(row, row.lr, row.betas[0], self.episodes, row.size)
        return planned(first, self.trials_each, self.win)

    def best(self, row: Row) -> Trial | None:
        """The best of all trials; None while one is missing. An option's own β stays."""
        if row.like:
            found = self.best(self.rows[row.like])
            return found and replace(found, row=row, beta=row.betas[0] if self.base == "default" else found.beta)
        trials = self.trials(row)
        if len(trials) < self.trials_each or None in [self.win(trial) for trial in trials]:
            return None
        return max(trials, key=self.win)

    # Running.
    def run(self, trial: Trial, seed: int, part: str):
        row = trial.row
        posts = self.validation_posts if part == "validation" else self.test_posts
        run = Run(f"{trial.name}__{seed}", trial.command(seed), seed, part, posts)
        if row.trainer:
            extra = ("--value_model", self.value_model(row)) if row.value_model else ()  # now its path
            run = replace(run, python=self.pythons[row.environment], extra=extra)
        self.make(run)

    def value_model(self, row: Row) -> str:
        """For --value_model: a name, or the folder of a reward model."""
        if not row.value_model.startswith("noisy"):
            return row.value_model
        folder = self.folder / row.value_model
        if not folder.is_dir():
            noise = int(row.value_model.removeprefix("noisy")) / 100
            self.records.add(f"reward_{folder.name}", **models.train_reward_model(folder, noise, self.noisy_posts))
        return str(folder)

    def fill(self, rows: list[Row]):
        """All trials of the rows, then all seeds of the best ones."""
        for row in rows:
            while not row.like and self.best(row) is None:
                self.run(next(trial for trial in self.trials(row) if self.win(trial) is None), 1, "validation")
        if self.records.value("sft", "test") is None:
            self.records.add("sft", test=self.grade(TASK / "sft", "test", self.test_posts, 1, False)[0])
        for row in rows:
            self.records.read()  # another process may have tuned it
            if self.best(row) is None:
                print(f"{row.name}: skipped, since {row.like} has not been tuned", flush=True)
                continue
            for seed in self.seeds(row):
                self.run(self.best(row), seed, "test")

    def seeds(self, row: Row) -> range:
        """Those of the best trial: not the one by which it was chosen."""
        return range(2, 2 + row.seeds)

    # What is found.
    def names(self, row: Row) -> list[str]:
        trial = self.best(row)
        return [f"{trial.name}__{seed}" for seed in self.seeds(row)] if trial else []

    def wins(self) -> dict[str, list[float]]:
        """Row -> its gold win rates on test posts in points, one for each seed, of the rows that have some."""
        found = {name: self.records.means(self.names(row), "test", "win") for name, row in self.rows.items()}
        return {name: [100 * value for value in values] for name, values in found.items() if values}

    def differences(self) -> dict[str, study.Difference]:
        """Each row less the base, the largest first."""
        wins = self.wins()
        if len(wins.get(self.base, ())) < 2:
            return {}
        return dict(sorted(study.differences(wins, self.base).items(), key=lambda pair: -pair[1].mean))

    def seconds(self, row: Row) -> float:
        """CPU seconds of a training run, mean over seeds."""
        found = [self.records.value(name, "cpu_seconds") for name in self.names(row)]
        return float(np.mean([value for value in found if value is not None]))


# ---- Tables and pictures ---------------------------------------------------------------------------------------------


def peers_table(found: Comparison) -> str:
    """The methods that have trials of their own, and their difference from RLOO."""
    wins, compared = found.wins(), found.differences()
    rows = [["method", "seeds", "gold win rate, %", "minus RLOO, points", "p (Holm)", "KL, nats", "CPU seconds"]]
    for name in sorted(wins, key=lambda name: -np.mean(wins[name])):
        row, x = found.rows[name], compared.get(name)
        if not row.like:
            kl = study.plus_minus(found.records.means(found.names(row), "test", "kl"))
            cells = [study.with_interval(x), f"{x.holm:.2g}"] if x else ["", ""]
            cells = [row.title, str(len(wins[name])), study.plus_minus(wins[name]), *cells, kl]
            rows.append([*cells, f"{found.seconds(row):.0f}"])
    return study.markdown(rows)


def draw_forest(axis, found: Comparison, title: str):
    """All rows less the base."""
    compared, wins = found.differences(), found.wins()
    study.forest(axis, compared, {name: f"{found.rows[name].title} ({len(wins[name])})" for name in compared})
    axis.set_xlabel(f"gold win rate minus that of {found.rows[found.base].title}, points")
    axis.set_title(f"{title} (seeds in brackets) against {found.rows[found.base].title} ({len(wins[found.base])})")


def draw_options(found: Comparison, path: Path):
    figure, ((axis,),) = study.canvas(1, 10.5, 4.6)
    draw_forest(axis, found, "Each option")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    study.save(figure, path)


LABELS = {  # rows of the second picture: where the name stands beside its point, in points
    "rloo": ("right", -7, 0),
    "ppo": ("left", 7, 0),
    "grpo_trl": ("left", 7, 0),
    "raft": ("right", -7, 0),
    "no_baseline": ("left", 7, -3),
    "ppo_1_epoch": ("right", -7, 0),
    "ppo_policy": ("left", 7, -16),
    "ppo_noisy": ("left", 7, 16),
}


def draw_peers(found: Comparison, path: Path, longer: tuple[float, list[float]]):
    """A forest plot, and the win rate over CPU seconds beside RLOO's longer runs: their seconds, their win rates."""
    figure, (axes,) = study.canvas(2, 15, 5.2)
    draw_forest(axes[0], found, "Each method")
    wins = found.wins()
    rows = {name: found.rows[name] for name in LABELS if name in wins}
    points = [(row.title, found.seconds(row), wins[name], *LABELS[name]) for name, row in rows.items()]
    points.append(("RLOO, the default's settings,\n25,600 episodes", *longer, "right", -7, 0))
    for title, seconds, values, side, right, up in points:
        ours = title.startswith("RLOO")
        colour, mean = study.GREEN if ours else "black", np.mean(values)
        axes[1].plot([seconds] * len(values), values, ".", ms=3, color=colour, alpha=0.6)
        axes[1].plot(seconds, mean, "s" if ours else "o", ms=6, color=colour)
        place = {"xytext": (right, up), "ha": side, "va": "center", "fontsize": 8, "textcoords": "offset points"}
        axes[1].annotate(title.replace("model from", "model\nfrom"), (seconds, mean), color=colour, **place)
    axes[1].set_xscale("log")
    axes[1].set_xticks([50, 100, 200, 400, 800, 1_600], ["50", "100", "200", "400", "800", "1,600"])
    axes[1].minorticks_off()
    spent = [seconds for _, seconds, *_ in points]
    axes[1].set_xlim(min(spent) / 2.5, max(spent) * 3)
    axes[1].set_xlabel("CPU seconds of training, logarithmic")
    axes[1].set_ylabel("gold win rate, %")
    axes[1].set_title("Win rate over seconds (green: RLOO by rloo.py; small dots: seeds)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    study.save(figure, path)


def longer_runs(path: Path) -> tuple[float, list[float]]:
    """RLOO's runs of 25,600 episodes with the default's settings, which were not chosen on test posts, from the records
    of reach.py: CPU seconds, and win rates in points, one for each seed."""
    records = study.Records(path)
    names = [reach.name_of(replace(DEFAULT, episodes=25_600), seed) for seed in reach.Plan().long_seeds]
    seconds = [records.value(name, "cpu_seconds") for name in names]
    return float(np.mean(seconds)), [100 * value for value in records.means(names, "test", "win")]


def report(kind: str, found: Comparison, folder: Path):
    compared = found.differences()
    for name, x in compared.items():
        print(f"{found.rows[name].title:64} {study.with_interval(x):22} Holm {x.holm:.4f}: {x.verdict}")
    if compared and kind == "options":
        draw_options(found, folder / "options.png")
    if compared and kind == "peers":
        study.insert(folder / "README.md", {"peers": peers_table(found)})
        draw_peers(found, folder / "peers.png", longer_runs(study.HERE / "reach.json"))


def main(
    kind: tyro.conf.Positional[Literal["options", "peers"]],
    names: tuple[str, ...] = (),
    trl0: str = "",
    trl1: str = "",
    quick: bool = False,
    report_only: bool = False,
):
    """A comparison's runs, measurements, table and picture.

    Args:
        kind: which comparison
        names: which rows, by the names in this file; default: all
        trl0: python of an environment with TRL 0.19, for PPO
        trl1: python of an environment with TRL 1.x, for GRPO
        quick: in small, in runs/options-quick or runs/peers-quick
        report_only: only table and picture of what is there
    """
    torch.set_num_threads(1)  # as in the runs: a measurement is then the same to the digit
    folder = study.ROOT / "runs" / (kind + ("-quick" if quick else ""))
    results = folder / "results" if quick else study.HERE
    pythons = {name: os.path.abspath(path) for name, path in (("trl0", trl0), ("trl1", trl1)) if path}
    found = Comparison(kind, folder, results / f"{kind}.json", pythons, quick)
    unknown = set(names) - set(found.rows)
    if unknown:
        sys.exit(f"--names {' '.join(sorted(unknown))}: must be of {' '.join(found.rows)}")
    chosen = [row for name, row in found.rows.items() if not names or name in names]
    if not report_only:
        skipped = [f"{row.name} (--{row.environment})" for row in chosen if row.environment not in found.pythons]
        if skipped:
            print(f"skipped, since these are not given: {', '.join(skipped)}", flush=True)
        found.fill([row for row in chosen if row.environment in found.pythons])
    report(kind, found, results)


if __name__ == "__main__":
    tyro.cli(main)
