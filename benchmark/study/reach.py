"""What can RLOO reach on mini TL;DR, by episodes and β, beside best-of-n, and when does reward stop meaning quality?

    python benchmark/study/reach.py                          # all that has no record yet
    python benchmark/study/reach.py --names sft default      # some of it

Records: reach.json. A run that has its record is not made again.
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
RECORDS, PICTURE = HERE / "reach.json", HERE / "episodes.png"
POSTS = 5_000
MOST, BEST_OF_N_POSTS = 64, 2_000  # best-of-n: samples of each post, and test posts


@dataclass(frozen=True)
class Row:
    """A setting of rloo.py with its seeds, measured on one kind of fresh posts."""

    title: str
    setting: Setting
    seeds: Sequence[int]
    kind: str = "test"
    curve_seeds: Sequence[int] = ()
    """those that are measured along the way"""

    def names(self) -> list[str]:
        """Of its records."""
        return [f"beta{self.setting.beta:g}_episodes{self.setting.episodes}__{seed}" for seed in self.seeds]


def long(beta: float, seeds: Sequence[int], **more) -> Row:
    return Row(f"β = {beta:g}, 25,600 episodes", Setting(beta=beta, episodes=25_600), seeds, **more)


ROWS = {
    # It was chosen with seeds 1 to 6 on validation posts, and has test posts of its own.
    "default": Row("**default**: β = 0.02, 6,400 episodes", Setting(), range(7, 17), "second_test", range(12, 17)),
    "beta0": long(0.0, (1, 2, 3), curve_seeds=(1, 2, 3)),
    "beta0.01": long(0.01, (1, 2)),
    "beta0.02": long(0.02, (1, 2, 3)),
    "beta0.05": long(0.05, (1, 2, 3), curve_seeds=(1, 2, 3)),
    "beta0.1": long(0.1, (1, 2)),
}


def make(records: common.Records, row: Row):
    """Trains and measures the runs of a row that have no record."""
    for seed, name in zip(row.seeds, row.names()):
        if records.value(name, row.kind) is None:
            curve = seed in row.curve_seeds
            command = ["rloo.py", *row.setting.flags(seed)]
            folder = measure.train(name, [sys.executable, *command, *row.setting.own_flags(curve)])
            found = {"command": " ".join(command), "seconds": measure.seconds(folder)}
            if curve:
                found["curve"] = measure.curve(folder, row.setting.size, seed)
            records.add(name, **found, **{row.kind: measure.measured(folder, row.kind, POSTS, seed, greedy=True)})


def make_sft(records: common.Records):
    """The SFT policy on the posts of both kinds, and the best of n = 1, 2, 4, ... samples by the reward model."""
    for kind in ("test", "second_test"):
        if records.value("sft", kind) is None:
            records.add("sft", **{kind: measure.measured(common.TASK / "sft", kind, POSTS, 1, greedy=True)})
    if records.value("sft", "best_of_n") is None:
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


def over_seeds(values: list[float], setting: Setting, factor: float = 1, decimals: int = 1) -> str:
    """Without a KL penalty seeds go such different ways that each is listed."""
    write = common.plus_minus if setting.beta else common.listed
    return write(values, factor, decimals)


def table(records: common.Records) -> str:
    """What policies reach on test posts. ± is over seeds, or, where the brackets count posts, over posts."""
    rows = [["policy (seeds or posts)", *(title for _, title, *_ in MEASURES)]]

    def untrained(title: str, found: dict, posts: int):
        rows.append([f"{title} ({posts:,} posts)", *(over_posts(found[name], *form) for name, _, *form in MEASURES)])

    def trained(row: Row):
        values = {name: measure.means(records, row.names(), row.kind, name) for name, *_ in MEASURES}
        cells = [over_seeds(values[name], row.setting, *form) for name, _, *form in MEASURES]
        rows.append([f"{row.title} ({len(row.seeds)})", *cells])

    default, *others = ROWS.values()
    untrained("SFT, posts of the default", records.all["sft"]["second_test"]["sampled"], POSTS)
    trained(default)
    untrained("SFT, posts of all below", records.all["sft"]["test"]["sampled"], POSTS)
    for n in ("4", "8"):
        untrained(f"best of {n} of SFT", records.all["sft"]["best_of_n"][n], BEST_OF_N_POSTS)
    for row in others:
        trained(row)
    return common.markdown(rows)


DRAWN = {"default": "tab:blue", "beta0.05": "tab:green", "beta0": "tab:orange"}


def draw_row(axis, records: common.Records, row: Row, measured: str, factor: float, colour: str):
    """A line for each seed along the way, and dots at the end."""
    curves = [x for x in (records.value(name, "curve") for name in row.names()) if x]
    for curve in curves:
        episodes, values = zip(*((point["episode"], factor * point[measured]) for point in curve))
        axis.plot(episodes, values, "-", lw=0.8, color=colour, alpha=0.7)
    ends = factor * np.array(measure.means(records, row.names(), row.kind, measured))
    shown = [ends.mean()] if row.setting.beta else ends
    count = f"seeds: {len(ends)}" + (f", {len(curves)} with lines" if len(curves) < len(ends) else "")
    label = f"{row.title.replace('**', '')} ({count})"
    axis.plot([row.setting.episodes] * len(shown), shown, "o", ms=6, color=colour, label=label)


def draw(records: common.Records):
    """Win rate, score and KL over episodes."""
    figure, (axes,) = common.canvas(3, 13, 4.8)
    for axis, (measured, title, factor, _) in zip(axes, MEASURES):
        for name, colour in DRAWN.items():
            draw_row(axis, records, ROWS[name], measured, factor, colour)
        if measured != "kl":  # which is 0
            before = factor * records.all["sft"]["test"]["sampled"][measured][0]
            axis.axhline(before, color="tab:grey", ls=":", label="SFT, before training")
        axis.set(title=title, xlabel="episodes, logarithmic", xscale="log")
        axis.set_xticks([800, 3_200, 12_800], ["800", "3,200", "12,800"])
    axes[2].set_yscale("log")
    axes[2].set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
    for axis in axes:
        axis.minorticks_off()
    figure.suptitle(
        "RLOO on mini TL;DR: fresh test posts, sampled at T = 0.7. Lines: a seed each, along the way, on "
        f"{measure.CURVE_POSTS:,} posts.\nDots: ends, on {POSTS:,} posts, the mean over seeds, for β = 0 each seed",
        fontsize=10,
    )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    common.save(figure, PICTURE)


def headline() -> list[list[str]]:
    """Rows of the benchmarks' README."""
    records, rows = common.Records(RECORDS), []
    command = "`python benchmark/study/reach.py --names {}`"
    for mode in ("sampled", "greedy"):
        before = records.all["sft"]["second_test"][mode]["win"][0]
        ends = measure.means(records, ROWS["default"].names(), "second_test", "win", mode)
        number = f"{100 * before:.1f} → {common.plus_minus(ends, 100)}"
        rows.append(
            [f"mini TL;DR, default: gold win rate, {mode}, %", number, str(len(ends)), command.format("sft default")]
        )
    for name in ("beta0", "beta0.02", "beta0.05"):
        ends = measure.means(records, ROWS[name].names(), "test", "win")
        number = over_seeds(ends, ROWS[name].setting, 100)
        rows.append([f"{ROWS[name].title}: gold win rate, %", number, str(len(ends)), command.format(name)])
    bests = [over_posts(records.all["sft"]["best_of_n"][n]["win"], 100) for n in ("4", "16", "64")]
    rows.append(["best of 4, 16, 64 before training, ± over posts, %", ", ".join(bests), "", command.format("sft")])
    return rows


def report():
    records = common.Records(RECORDS)
    common.insert(HERE / "README.md", {"reached": table(records)})
    draw(records)


def main(names: tuple[str, ...] = ("sft", *ROWS)):
    """Runs, measurements, table and picture.

    Args:
        names: which parts: sft, or rows by their names in this file
    """
    records = common.Records(RECORDS)
    for name in names:
        if name == "sft":
            make_sft(records)
        else:
            make(records, ROWS[name])
    report()


if __name__ == "__main__":
    tyro.cli(main)
