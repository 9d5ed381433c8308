"""What can RLOO reach on mini TL;DR, by episodes and β, beside best-of-n, and when does reward stop meaning quality?

    python benchmark/study/reach.py                            # all that has no record yet; about 12 hours of a core
    python benchmark/study/reach.py --stages default report    # some of it
    python benchmark/study/reach.py --quick                    # each in small, in runs/reach-quick

The stages, in their order:

    choice     the settings among which the default was chosen, six seeds each, on fresh validation posts
    default    the default and the one before it: ten other seeds on fresh test posts, five of them along the way
    long       25,600 episodes for each β, and 100,000, along the way
    noisy      the same for reward models from noisy comparisons
    best_of_n  the best of n samples, of the SFT policy and of a trained one, by the reward model
    report     table and pictures of what is there

Records: reach.json. It also has the one-seed trials from which the short list was made, with their commands.
"""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import models
import numpy as np
import study
import torch
import tyro
from study import TASK, Run, Setting

Stage = Literal["choice", "default", "long", "noisy", "best_of_n", "report"]
DEFAULT = Setting()  # rloo.py's, by this study
OLD = Setting(5e-4, 128, 0.05)  # rloo.py's before it
SHORT_LIST = [OLD, Setting(5e-4, beta=0.05), Setting(3.5e-4, beta=0.05), DEFAULT]
SHORT_LIST += [Setting(5e-4, 64), Setting(3.5e-4, 64)]


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    choice_seeds: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    default_seeds: tuple[int, ...] = tuple(range(7, 17))
    curve_seeds: tuple[int, ...] = tuple(range(12, 17))
    episodes: int = 6_400
    betas: tuple[float, ...] = (0.0, 0.01, 0.02, 0.05, 0.1)
    long_episodes: int = 25_600
    long_seeds: tuple[int, ...] = (1, 2, 3)
    longest_episodes: int = 100_000
    longest_seeds: tuple[int, ...] = (1, 2, 3, 4)
    long_beta: float = 0.05
    noises: tuple[str, ...] = ("noisy10", "noisy25")
    noisy_betas: tuple[float, ...] = (0.0, 0.02)
    noisy_posts: int = 20_000
    """that a reward model from noisy comparisons is trained on"""
    validation_posts: int = 2_000
    test_posts: int = 5_000
    curve_posts: int = 1_000
    points: int = 8
    """along the way"""
    most: int = 64
    """n of best-of-n, at most"""
    best_of_n_posts: int = 2_000


QUICK = Plan((1, 2), (7, 8), (7,), 128, (0.0, 0.05), 256, (1,), 0, (), 0.05, ("noisy25",), (0.0,), 200)
QUICK = replace(QUICK, validation_posts=50, test_posts=60, curve_posts=30, points=2, most=8, best_of_n_posts=30)


def name_of(setting: Setting, seed: int, reward: str = "") -> str:
    parts = [f"lr{setting.lr:g}", f"size{setting.size}", f"beta{setting.beta:g}"]
    parts += [f"episodes{setting.episodes}"] if setting.episodes != DEFAULT.episodes else []
    return "_".join(parts + ([reward] if reward else [])) + f"__{seed}"


class Reach(study.Study):
    """The runs of a plan."""

    def __init__(self, plan: Plan, folder: Path, results: Path):
        super().__init__(folder, results)
        self.plan = plan

    def run(self, setting: Setting, seed: int, part: str, curve: bool = False, reward: str = "", greedy: bool = True):
        """Makes a run of a setting unless it has its record."""
        plan, name = self.plan, name_of(setting, seed, reward)
        path = str(self.reward_model(reward).relative_to(study.ROOT)) if reward else ""
        posts = plan.validation_posts if part == "validation" else plan.test_posts
        points = plan.points if curve else 0
        self.make(Run(name, tuple(setting.command(seed)), seed, part, posts, greedy, points, plan.curve_posts, path))

    def reward_model(self, name: str) -> Path:
        """The folder of a reward model from noisy comparisons."""
        folder = self.folder / name
        if not folder.is_dir():
            found = models.train_reward_model(folder, int(name.removeprefix("noisy")) / 100, self.plan.noisy_posts)
            self.records.add(f"reward_{name}", **found)
        return folder

    def of(self, episodes: int, beta: float | None = None) -> Setting:
        """The default for so many episodes, with another β."""
        return replace(DEFAULT, episodes=episodes, beta=DEFAULT.beta if beta is None else beta)

    # The stages.
    def choice(self):
        for seed in self.plan.choice_seeds:
            for setting in SHORT_LIST:
                self.run(replace(setting, episodes=self.plan.episodes), seed, "validation", greedy=False)

    def default(self):
        for seed in self.plan.default_seeds:
            self.run(self.of(self.plan.episodes), seed, "second_test", curve=seed in self.plan.curve_seeds)
            self.run(replace(OLD, episodes=self.plan.episodes), seed, "second_test")
        for part in ("test", "second_test"):  # a policy is compared with SFT on the same posts
            if self.records.value("sft", part) is None:
                found, _ = self.grade(TASK / "sft", part, self.plan.test_posts, 1, True)
                self.records.add("sft", **{part: found})

    def long(self):
        for seed in self.plan.long_seeds:
            for beta in self.plan.betas:
                self.run(self.of(self.plan.long_episodes, beta), seed, "test", curve=True)
        for seed in self.plan.longest_seeds:
            self.run(self.of(self.plan.longest_episodes, self.plan.long_beta), seed, "test", curve=True)

    def noisy(self):
        for reward in self.plan.noises:
            for beta in self.plan.noisy_betas:
                self.run(self.of(self.plan.long_episodes, beta), 1, "test", curve=True, reward=reward)

    def best_of_n(self):
        trained = name_of(self.of(self.plan.long_episodes, self.plan.long_beta), 1)
        for name, folder, most, posts in (
            ("sft", TASK / "sft", self.plan.most, self.plan.best_of_n_posts),
            (trained, self.folder / trained, min(16, self.plan.most), self.plan.best_of_n_posts // 2),
        ):
            if self.records.value(name, "best_of_n") is None:
                engine = study.Engine(chunk_size=512)
                grades = study.grade(engine, engine.policy(folder), study.fresh_posts("test", posts), most, 1)
                by_n = {str(2**i): best_of(grades, 2**i) for i in range(most.bit_length())}
                self.records.add(name, best_of_n={"posts": posts, "samples": most, "by_n": by_n})

    # What is found.
    def names(self, setting: Setting, seeds, reward: str = "") -> list[str]:
        return [name_of(setting, seed, reward) for seed in seeds]

    def beta_differences(self) -> dict[str, study.Difference]:
        """The win rate of the long runs for each β > 0 less that for `long_beta`, in points."""
        plan = self.plan
        names = {beta: self.names(self.of(plan.long_episodes, beta), plan.long_seeds) for beta in plan.betas if beta}
        wins = {f"{beta:g}": [100 * x for x in self.records.means(runs, "test", "win")] for beta, runs in names.items()}
        return study.differences(wins, f"{plan.long_beta:g}")

    def curves(self, setting: Setting, seeds, reward: str = ""):
        """Episodes, and measure -> its values (seeds, points) along the way; None where there are none."""
        curves = [self.records.value(name, "curve") for name in self.names(setting, seeds, reward)]
        curves = [curve for curve in curves if curve]
        if not curves:
            return None
        values = {
            measure: np.array([[point["sampled"][measure]["mean"] for point in curve] for curve in curves])
            for measure in curves[0][-1]["sampled"]
        }
        return np.array([point["episode"] for point in curves[0]]), values


# ---- Best of n -------------------------------------------------------------------------------------------------------


def best_of_n_weights(scores: np.ndarray, n: int) -> np.ndarray:
    """The probability of each of N samples (..., N) to have the highest score among n of them, drawn at random.

    The mean of a measure with these weights is the unbiased estimate of its mean over best-of-n. Equal scores share
    their probability."""
    total = scores.shape[-1]
    below = (scores[..., None, :] < scores[..., :, None]).sum(-1)  # samples with a lower score
    equal = (scores[..., None, :] == scores[..., :, None]).sum(-1)  # with the same, its own among them
    ways = np.array([math.comb(m, n) / math.comb(total, n) for m in range(total + 1)])
    return (ways[below + equal] - ways[below]) / equal


def kl_bound(n: int) -> float:
    """KL of best-of-n from what it samples from, in nats, if no completion is ever drawn twice, which is rare here."""
    return math.log(n) - (n - 1) / n


def best_of(grades: dict[str, np.ndarray], n: int) -> dict[str, dict[str, float]]:
    """Measures of best-of-n by the reward model from N samples of each post: name -> mean over posts.

    "kl" is that from the SFT policy: the log-ratio, policy to SFT policy, of the completions chosen, plus that of
    best-of-n from the policy that it samples."""
    weights = best_of_n_weights(grades["score"], n)
    values = grades | {"kl": grades["kl"] + kl_bound(n)}
    return {name: study.mean_over_posts((weights * x).sum(-1)) for name, x in values.items()}


# ---- Table and pictures ----------------------------------------------------------------------------------------------

COLUMNS = [  # title, where it is in a run's measures, factor, decimals
    ("gold win rate, %", "sampled", "win", 100, 1),
    ("greedy, %", "greedy", "win", 100, 1),
    ("gold score", "sampled", "gold", 1, 2),
    ("reward model", "sampled", "score", 1, 2),
    ("KL, nats", "sampled", "kl", 1, 2),
]


def reached_table(found: Reach) -> str:
    """What policies reach on test posts. ± is over seeds, or, where the second column counts posts, over posts."""
    plan, records = found.plan, found.records
    rows = [["policy", "seeds", *(column[0] for column in COLUMNS)]]

    def untrained(title: str, measured: dict | None, posts: int):
        if measured:
            values = [measured.get(mode, {}).get(measure) for _, mode, measure, *_ in COLUMNS]
            cells = [study.over_posts(x, *column[3:]) if x else "" for x, column in zip(values, COLUMNS)]
            rows.append([title, f"{posts:,} posts", *cells])

    def trained(title: str, setting: Setting, seeds, part: str = "test"):
        names, write = found.names(setting, seeds), study.plus_minus if setting.beta else study.listed
        values = [records.means(names, part, measure, mode) for _, mode, measure, *_ in COLUMNS]
        if values[0]:
            rows.append([title, str(len(values[0])), *(write(x, *column[3:]) for x, column in zip(values, COLUMNS))])

    untrained("SFT, posts of the default", records.value("sft", "second_test"), plan.test_posts)
    trained(
        f"**RLOO, default**: β = 0.02, {plan.episodes:,}", found.of(plan.episodes), plan.default_seeds, "second_test"
    )
    untrained("SFT, posts of all below", records.value("sft", "test"), plan.test_posts)
    for n in ("4", "16", "64"):
        measured = records.value("sft", "best_of_n", "by_n", n)
        untrained(f"best of {n} of SFT", measured and {"sampled": measured}, plan.best_of_n_posts)
    for beta in plan.betas:
        trained(f"β = {beta:g}, {plan.long_episodes:,}", found.of(plan.long_episodes, beta), plan.long_seeds)
    longest = found.of(plan.longest_episodes, plan.long_beta)
    trained(f"β = {plan.long_beta:g}, {plan.longest_episodes:,}", longest, plan.longest_seeds)
    return study.markdown(rows)


def draw_episodes(found: Reach, path: Path):
    """Win rate, score and KL over episodes, with the lines of best-of-n."""
    plan = found.plan
    default, long = found.of(plan.episodes), found.of(plan.long_episodes, plan.long_beta)
    lines = [
        ("default: β = 0.02", default, "second_test", plan.default_seeds, study.BLUE),
        ("β = 0.05", long, "test", plan.long_seeds, study.GREEN),
        ("β = 0.05", replace(long, episodes=plan.longest_episodes), "test", plan.longest_seeds, "black"),
        ("β = 0", replace(long, beta=0.0), "test", plan.long_seeds, study.ORANGE),
    ]
    panels = [("win", "gold win rate, %", 100), ("score", "reward model's score", 1), ("kl", "KL from SFT, nats", 1)]
    figure, (axes,) = study.canvas(3, 13, 4.8)
    for axis, (measure, title, factor) in zip(axes, panels):
        for label, setting, part, seeds, colour in lines:
            curves = found.curves(setting, seeds)
            ends = factor * np.array(found.records.means(found.names(setting, seeds), part, measure))
            if curves:
                episodes, values = curves[0][1:], factor * curves[1][measure][:, 1:]
                axis.plot(episodes, values.T, "-", lw=0.8, color=colour, alpha=0.7)
                shown = [ends.mean()] if setting.beta else ends
                count = f"seeds: {len(ends)}" + (f", {len(values)} with lines" if len(values) < len(ends) else "")
                text = f"{label}, {setting.episodes:,} episodes ({count})"
                axis.plot([episodes[-1]] * len(shown), shown, "o", ms=6, color=colour, label=text)
        for n in ("1", "4", "16", "64"):
            by_n = found.records.value("sft", "best_of_n", "by_n", n)
            if by_n and (measure != "kl" or n != "1"):
                height, right = factor * by_n[measure]["mean"], measure == "kl"
                axis.axhline(height, color=study.GREY, lw=1, ls=":")
                place = {"xycoords": axis.get_yaxis_transform(), "ha": "right" if right else "left", "va": "bottom"}
                name = "SFT" if n == "1" else f"best of {n}"
                axis.annotate(name, (0.99 if right else 0.01, height), fontsize=7, color="dimgrey", **place)
        axis.set_title(title)
        axis.set_xlabel("episodes, logarithmic")
        axis.set_xscale("log")
        axis.set_xticks([800, 3_200, 12_800, 51_200], ["800", "3,200", "12,800", "51,200"])
        axis.margins(x=0.12)
    axes[2].set_yscale("log")
    axes[2].set_yticks([0.5, 1, 2, 5, 10, 20, 50, 100], ["0.5", "1", "2", "5", "10", "20", "50", "100"])
    for axis in axes:
        axis.minorticks_off()
    figure.suptitle(
        "RLOO on mini TL;DR: fresh test posts, sampled at T = 0.7. Lines: a seed each, along the way, on "
        f"{plan.curve_posts:,} posts.\nDots: ends, on {plan.test_posts:,} posts, the mean over seeds, for β = 0 each "
        f"seed. Dotted: best of n samples of the SFT policy by the reward model, on {plan.best_of_n_posts:,} posts",
        fontsize=10,
    )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    study.save(figure, path)


def draw_overoptimisation(found: Reach, path: Path):
    """The score that is trained on and the gold score, over √KL, by reward model and β."""
    plan = found.plan
    titles = {"": "embedded task's", "noisy10": "comparisons, 10% flipped", "noisy25": "comparisons, 25% flipped"}
    rewards = [reward for reward in ("", *plan.noises) if found.curves(found.of(plan.long_episodes, 0), (1,), reward)]
    if not rewards:
        return
    figure, (axes,) = study.canvas(len(rewards), 4.3 * len(rewards), 4.6, sharey=True)
    for axis, reward in zip(axes, rewards):
        seeds = plan.long_seeds if not reward else (1,)
        for beta, fill in ((0.02, "none"), (0.0, "full")):
            curves = found.curves(found.of(plan.long_episodes, beta), seeds, reward)
            measures = ("proxy" if reward else "score", study.ORANGE), ("gold", study.BLUE)
            for measure, colour in measures if curves else ():
                distance, gained = np.sqrt(np.maximum(curves[1]["kl"], 0)), curves[1][measure]
                label = f"{'gold judge' if measure == 'gold' else 'reward model trained on'}, β = {beta:g}"
                gained = gained - gained[:, :1]
                axis.plot(distance[:, 1:], gained[:, 1:], "o", ms=4, color=colour, fillstyle=fill)
                axis.plot([], [], "o", ms=4, color=colour, fillstyle=fill, label=label)
        axis.axhline(0, color="black", lw=0.8)
        axis.set_title(f"reward model: {titles[reward]} (seeds: {len(seeds)})")
        axis.set_xlabel("√KL from the SFT policy, √nats")
    axes[0].set_ylabel("score gained over the SFT policy")
    posts = f"{plan.curve_posts:,} test posts"
    title = f"Over-optimisation in {plan.long_episodes:,} episodes: {plan.points} points along each run, {posts}"
    figure.suptitle(title, fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    study.save(figure, path)


def report(found: Reach, folder: Path):
    study.insert(folder / "README.md", {"reached": reached_table(found)})
    draw_episodes(found, folder / "episodes.png")
    draw_overoptimisation(found, folder / "overoptimisation.png")


def main(stages: tuple[Stage, ...] = get_args(Stage), quick: bool = False):
    """The study's runs, measurements, table and pictures.

    Args:
        stages: which, in this order
        quick: each in small, in runs/reach-quick
    """
    torch.set_num_threads(1)  # as in the runs: a measurement is then the same to the digit
    folder = study.ROOT / "runs" / ("reach-quick" if quick else "reach")
    results = folder / "results" if quick else study.HERE
    found = Reach(QUICK if quick else Plan(), folder, results / "reach.json")
    for stage in stages:
        print(stage, flush=True)
        if stage == "report":
            report(found, results)
        else:
            getattr(found, stage)()


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
