"""Runs of rloo.py side by side: score and KL in training, and the grades of held-out completions, over episodes.

    python benchmark/plot.py runs/one runs/two                   # writes plot.png
    python benchmark/plot.py runs/* --output mine.png

It reads metrics.jsonl and evaluations.jsonl, also of runs that have not ended. The legend has the names of the folders.
study.py draws its pictures with `courses` and `scatter`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import runs
import tyro

TRAINING = {"objective/scores": "score, training prompts", "objective/kl": "KL from the reference, nats"}
COURSE = {"sampled/score": "score: what is trained on", "sampled/gold_win_rate": "wins by the judge, %"}
SMOOTHED = 20  # a point is the mean of a 20th of the updates


def canvas(rows: int, columns: int, height: float = 3.2, **options):
    """Returns a figure and its axes (rows, columns)."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        sys.exit("plot.py needs one more package: pip install matplotlib")
    plt.switch_backend("Agg")
    style = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 10, "legend.frameon": False}
    plt.rcParams.update(style)
    size = (4 * columns, height * rows)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)


def save(figure, file: Path):
    figure.savefig(file, dpi=110)
    print(f"picture: {file}")


# ---- Runs ------------------------------------------------------------------------------------------------------------


def side_by_side(folders: Sequence[Path], output: Path):
    """Draws a panel for each metric of training and for each grade, with a color for each run."""
    evaluations = [runs.lines(folder / "evaluations.jsonl") for folder in folders]
    names = dict.fromkeys(name for lines in evaluations for line in lines for name in line if name != "sampled/length")
    grades = [name for name in names if name.startswith("sampled/") and f"{name}_stderr" in names]
    figure, (axes,) = canvas(1, len(TRAINING) + len(grades), height=4)
    for number, folder in enumerate(folders):
        style = {"color": f"C{number}", "label": folder.resolve().name}
        for axis, name in zip(axes, TRAINING):
            lines = [line for line in runs.lines(folder / "metrics.jsonl") if name in line]  # no KL without a reference
            width = max(1, len(lines) // SMOOTHED)
            if lines:
                means = np.convolve([line[name] for line in lines], np.ones(width) / width, "valid")
                axis.plot([line["episode"] for line in lines[width - 1 :]], means, **style)
        for axis, name in zip(axes[len(TRAINING) :], grades):
            found = [
                [line[x] for x in ("episode", name, f"{name}_stderr")] for line in evaluations[number] if name in line
            ]
            if found:
                axis.errorbar(*np.transpose(found), marker="o", ms=4, capsize=2, **style)
    titles = [*TRAINING.values(), *(f"{name.removeprefix('sampled/')}, held-out prompts" for name in grades)]
    for axis, title in zip(axes, titles):
        axis.set(title=title, xlabel="episodes (completions)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(
        f"Training: mean over 1/{SMOOTHED} of the updates. Held out: sampled, ± standard error over prompts"
    )
    save(figure, output)


# ---- Studies ---------------------------------------------------------------------------------------------------------


def courses(panels: dict[str, dict[str, list[dict]]], over: str, output: Path):
    """Draws how runs went, seeds thin and their mean thick: a row of panels for each title, with score, wins and, over
    episodes, KL. panels: title -> label -> course of each seed, see study.course."""
    shown = COURSE if over == "kl" else COURSE | {"kl": "KL from SFT, nats"}
    figure, axes = canvas(len(panels), len(shown))
    for (title, found_of), row in zip(panels.items(), axes):
        for (measure, name), axis in zip(shown.items(), row):
            factor = 100 if "%" in name else 1
            for number, (label, found) in enumerate(found_of.items()):
                x, y = (np.array([course[key] for course in found]) for key in (over, measure))
                x, y = np.sqrt(x) if over == "kl" else x, factor * y
                axis.plot(x.T, y.T, lw=0.6, alpha=0.5, color=f"C{number}")
                axis.plot(x.mean(0), y.mean(0), lw=2, color=f"C{number}", label=label)
            if "%" in name:
                axis.axhline(y[:, 0].mean(), ls="--", lw=1.2, color="black")
            label = "√KL from SFT, KL in nats" if over == "kl" else "episodes (completions)"
            axis.set(title=title, ylabel=name, xlabel=label, ylim=(0, None) if "%" in name else None)
        row[0].legend(fontsize=8)
    figure.suptitle("Sampled summaries of held-out posts. Thin: seeds, thick: their mean, dashed: wins before training")
    save(figure, output)


def scatter(points: dict[str, list[tuple[float, float, float]]], names: Sequence[str], ours: str, output: Path):
    """Draws a point for each label, [x, y], each a mean and the ends of its interval; that of `ours` stands out. Labels
    stand on the right, in the order of the points and so far apart that none covers another."""
    figure, ((axis,),) = canvas(1, 1, height=5)
    figure.set_size_inches(8, 5)
    order = sorted(points, key=lambda label: points[label][1][0])
    for number, label in enumerate(order):
        (x, *x_ends), (y, *y_ends) = points[label]
        color, size, weight = ("C3", 8, "bold") if label == ours else ("0.35", 5, "normal")
        axis.plot(x_ends, [y, y], [x, x], y_ends, color=color, lw=1.2)
        axis.plot(x, y, "o", ms=size, color=color)
        height = (number + 0.5) / len(order)
        axis.annotate(
            label, (x, y), (1.04, height), textcoords="axes fraction", va="center", color=color, weight=weight,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": color, "relpos": (0, 0.5)},
        )  # fmt: skip
    title = "Means and 95% intervals\nover seeds if there are three or more, else over prompts"
    axis.set(xlabel=names[0], ylabel=names[1], title=title)
    save(figure, output)


def main(folders: tyro.conf.Positional[tuple[Path, ...]], output: Path = Path("plot.png")):
    """Draws runs of rloo.py side by side.

    Args:
        folders: output folders of runs
        output: the picture
    """
    complete = [x for x in folders if (x / "args.json").is_file() and (x / "metrics.jsonl").is_file()]
    for folder in set(folders) - set(complete):
        print(f"{folder}: left out; it has no args.json or no metrics.jsonl")
    if not complete:
        sys.exit("plot.py: name output folders of rloo.py")
    side_by_side(complete, output)


if __name__ == "__main__":
    tyro.cli(main)
