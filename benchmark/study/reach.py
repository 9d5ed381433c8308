"""What does RLOO reach on mini TL;DR, by the default and with four times the episodes, beside best-of-n?

    python benchmark/study/reach.py                                        # all that has no record yet
    python benchmark/study/reach.py --names default --seeds 1 --again      # one run again, compared with its record

Records: reach.json.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import measure
import numpy as np
import tyro
from measure import Setting, common

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "reach.json"
POSTS = 5_000
MOST, BEST_OF_N_POSTS = 64, 2_000  # best-of-n: samples of each post, and test posts
# Evaluations of a run after the start, on the 500 posts of the test split, as `python rloo.py` does them.
EVALUATIONS = 10


@dataclass(frozen=True)
class Row:
    """A setting of rloo.py with its seeds, measured on one kind of fresh posts."""

    title: str
    setting: Setting
    seeds: Sequence[int]
    kind: str = "test"
    evaluations: int = 0
    """of each run, for the picture"""

    def names(self) -> list[str]:
        """Of its records."""
        return [f"beta{self.setting.beta:g}_episodes{self.setting.episodes}__{seed}" for seed in self.seeds]


ROWS = {
    # It was chosen with seeds 1 to 6 on validation posts, and has test posts of its own.
    "default": Row("**default**: β = 0.02, 6,400 episodes", Setting(), range(7, 17), "second_test", EVALUATIONS),
    "beta0.05": Row("β = 0.05, 25,600 episodes", Setting(beta=0.05, episodes=25_600), (1, 2, 3)),
}


COURSES = [f"course__{seed}" for seed in ROWS["default"].seeds]
NAMES = ["sft", *COURSES, *(name for row in ROWS.values() for name in row.names())]  # all records


def make(records: common.Records, row: Row, runs: Path, seeds: int | None = None):
    """Trains and measures the first runs of a row, those that have no record."""
    for seed, name in list(zip(row.seeds, row.names()))[:seeds]:
        command = ["rloo.py", *row.setting.flags(seed)]
        words = [sys.executable, *command, *row.setting.own_flags(evaluations=row.evaluations)]
        own_course = f"course__{seed}"
        if row.evaluations and records.needs(own_course):
            records.add(own_course, **course(measure.train(name, words, runs)))
        if records.needs(name, row.kind):
            folder = measure.train(name, words, runs)
            found = {row.kind: measure.measured(folder, row.kind, POSTS, seed, greedy=True)}
            records.add(name, command=" ".join(command), seconds=measure.seconds(folder), **found)


def course(folder: Path) -> dict[str, list[float]]:
    """A run's own evaluations on the test split, and the KL between one and the next, over training."""
    evaluations = common.read_lines(folder / "evaluations.jsonl")
    kl = [line["objective/kl"] for line in common.read_lines(folder / "metrics.jsonl")]
    parts = np.split(np.array(kl), [x["update"] for x in evaluations[1:-1]])
    return {
        "episode": [x["episode"] for x in evaluations],
        "score": [round(x["sampled/score"], 4) for x in evaluations],
        "win": [round(x["sampled/gold_win_rate"], 4) for x in evaluations],
        "greedy": [round(x["greedy/gold_win_rate"], 4) for x in (evaluations[0], evaluations[-1])],
        "kl_between": [round(part.mean(), 4) for part in parts],
    }


def make_sft(records: common.Records):
    """The SFT policy on the posts of both kinds, and the best of n = 1, 2, 4, ... samples by the reward model."""
    for kind in ("test", "second_test"):
        if records.needs("sft", kind):
            records.add("sft", **{kind: measure.measured(common.TASK / "sft", kind, POSTS, 1, greedy=True)})
    if records.needs("sft", "best_of_n"):
        posts = measure.fresh_posts()["test"][:BEST_OF_N_POSTS]
        grades = measure.grade(measure.engine().reference, posts, MOST, 1)
        records.add("sft", best_of_n={str(2**i): best_of(grades, 2**i) for i in range(MOST.bit_length())})


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


def best_of(grades: dict[str, np.ndarray], n: int) -> dict[str, list[float]]:
    """Measures of best-of-n by the reward model from N samples of each post: name -> [mean, error] over posts.

    The KL of best-of-n from what it samples is log n - (n - 1) / n nats if no completion is ever drawn twice, which is
    rare here."""
    weights = best_of_n_weights(grades["score"], n)
    values = grades | {"kl": grades["kl"] + math.log(n) - (n - 1) / n}
    return {name: measure.over_posts((weights * x).sum(-1, keepdims=True)) for name, x in values.items()}


# ---- Table and picture -----------------------------------------------------------------------------------------------

MEASURES = [  # name, title, factor, decimals
    ("win", "gold win rate, %", 100, 1),
    ("score", "reward model's score", 1, 2),
    ("kl", "KL from SFT, nats", 1, 2),
]


def over_posts(found: list[float], factor: float = 1, decimals: int = 1) -> str:
    """A measure of one policy ± its standard error over posts."""
    mean, error = (factor * x + 0.0 for x in found)  # -0.0 becomes 0.0
    return f"{mean:.{decimals}f} ± {error:.{decimals}f}" if error else f"{mean:.{decimals}f}"


def table(records: common.Records) -> str:
    """What policies reach on test posts. ± is over seeds, or, where the brackets count posts, over posts."""
    rows = [["policy (seeds or posts)", *(title for _, title, *_ in MEASURES)]]

    def untrained(title: str, found: dict, posts: int):
        rows.append([f"{title} ({posts:,} posts)", *(over_posts(found[name], *form) for name, _, *form in MEASURES)])

    def trained(row: Row):
        values = {name: measure.means(records, row.names(), row.kind, name) for name, *_ in MEASURES}
        cells = [common.plus_minus(values[name], *form) for name, _, *form in MEASURES]
        rows.append([f"{row.title} ({len(row.seeds)})", *cells])

    untrained("SFT", records.all["sft"]["second_test"]["sampled"], POSTS)
    trained(ROWS["default"])
    for n in ("4", "8", "16"):
        untrained(f"best of {n} of SFT", records.all["sft"]["best_of_n"][n], BEST_OF_N_POSTS)
    trained(ROWS["beta0.05"])
    return common.markdown(rows)


def draw(records: common.Records):
    """The course of the default over updates: score, win rate and KL, with those of the policy before training."""
    runs = [records.all[name] for name in COURSES]
    figure, (axes,) = common.canvas(3, 12, 3.1)
    updates = np.array(runs[0]["episode"]) / ROWS["default"].setting.size
    between = (updates[1:] + updates[:-1]) / 2
    panels = [  # title, name, x
        ("reward model's score: what is trained on", "score", updates),
        ("share of wins against the references, by the judge", "win", updates),
        ("KL from the policy before training, nats", "kl_between", between),
    ]
    for axis, (title, name, x) in zip(axes, panels):
        values = np.array([run[name] for run in runs])  # (seeds, points)
        axis.plot(x, values.T, lw=0.7, alpha=0.45, color="tab:blue")
        axis.plot(x, values.mean(0), lw=2.2, color="tab:blue", label=f"RLOO, mean of {len(runs)} seeds (thin)")
        before = 0 if name == "kl_between" else values[:, 0].mean()
        axis.axhline(before, ls="--", lw=1.4, color="black", label="SFT: before training")
        axis.set(title=title, xlabel="updates, of 32 completions each", xlim=(0, updates[-1]))
    axes[0].legend(fontsize=8, loc="center right")
    figure.suptitle("python rloo.py: summaries sampled for held-out posts, as training goes on")
    common.save(figure, HERE / "default.png")


def report(records: common.Records):
    if records.complete(NAMES, "README.md's table, default.png"):
        print(table(records))
        common.insert(HERE / "README.md", {"reached": table(records)})
        draw(records)


def main(names: tuple[str, ...] = ("sft", *ROWS), seeds: int | None = None, again: bool = False):
    """Runs, measurements and table.

    Args:
        names: which parts: sft, or rows by their names in this file
        seeds: at most so many of each row
        again: what has a record too; it is compared with the record, and nothing is written
    """
    records, runs = common.Records(RECORDS, again), common.folder_of_runs("study", again)
    for name in names:
        if name == "sft":
            make_sft(records)
        else:
            make(records, ROWS[name], runs, seeds)
    report(records)


if __name__ == "__main__":
    tyro.cli(main)
