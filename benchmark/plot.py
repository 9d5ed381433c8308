"""Runs of rloo.py side by side: score and KL in training, and the grades of held-out completions, over episodes.

    python benchmark/plot.py runs/one runs/two                   # writes plot.png
    python benchmark/plot.py runs/* --output mine.png

It reads metrics.jsonl and evaluations.jsonl, also of runs that have not ended. The legend has the names of the folders.
study.py draws its pictures with `courses` and `scatter`.
"""

import sys
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


# ---- Studies ---------------------------------------------------------------------------------------------------------


Titles = dict[str, str]  # row -> title
Records = dict[str, list[dict]]  # row -> records of its seeds


def courses(titles: Titles, records: Records, file: Path, panels: dict[str, list[str]], over: str):
    """Draws how runs went, seeds thin and their mean thick: a row of panels for each title, with score, wins and, over
    episodes, KL. panels: title -> rows; over: "episode", or "kl" for √KL."""
    shown = COURSE if over == "kl" else COURSE | {"kl": "KL from SFT, nats"}
    figure, axes = canvas(len(panels), len(shown))
    for (title, names), line in zip(panels.items(), axes):
        for (measure, name), axis in zip(shown.items(), line):
            factor = 100 if "%" in name else 1
            for number, row in enumerate(names):
                x, y = (np.array([record["course"][key] for record in records[row]]) for key in (over, measure))
                x, y = np.sqrt(x) if over == "kl" else x, factor * y
                axis.plot(x.T, y.T, lw=0.6, alpha=0.5, color=f"C{number}")
                axis.plot(x.mean(0), y.mean(0), lw=2, color=f"C{number}", label=titles[row].strip("`"))
            if "%" in name:
                axis.axhline(y[:, 0].mean(), ls="--", lw=1.2, color="black")
            label = "√KL from SFT, KL in nats" if over == "kl" else "episodes (completions)"
            axis.set(title=title, ylabel=name, xlabel=label, ylim=(0, None) if "%" in name else None)
        line[0].legend(fontsize=8)
    figure.suptitle("Sampled summaries of held-out posts. Thin: seeds, thick: their mean, dashed: wins before training")
    save(figure, file)


def scatter(titles: Titles, records: Records, file: Path, axes: dict[str, str], ours: str):
    """Draws two grades of each row with 95% intervals; the row `ours` stands out. Labels stand on the right, in the
    order of the points and so far apart that none covers another. axes: grade -> title."""
    figure, ((axis,),) = canvas(1, 1, height=5)
    figure.set_size_inches(8, 5)
    points = {row: [interval([x[grade] for x in found]) for grade in axes] for row, found in records.items()}
    for number, row in enumerate(sorted(points, key=lambda row: points[row][1])):
        (x, *x_ends), (y, *y_ends) = points[row]
        color, size, weight = ("C3", 8, "bold") if row == ours else ("0.35", 5, "normal")
        axis.plot(x_ends, [y, y], [x, x], y_ends, color=color, lw=1.2)
        axis.plot(x, y, "o", ms=size, color=color)
        place = (1.04, (number + 0.5) / len(points))
        line = {"arrowstyle": "-", "lw": 0.5, "color": color, "relpos": (0, 0.5)}
        style = {"va": "center", "color": color, "weight": weight, "arrowprops": line}
        axis.annotate(titles[row], (x, y), place, textcoords="axes fraction", **style)
    title = "Means and 95% intervals\nover seeds if there are three or more, else over prompts"
    axis.set(title=title, **dict(zip(("xlabel", "ylabel"), axes.values())))
    save(figure, file)


def interval(grades: list[list[float]]) -> tuple[float, float, float]:
    """Returns the mean of a grade, in points, and the ends of its 95% interval, see runs.mean_and_error."""
    mean, error = (100 * x for x in runs.mean_and_error(grades))
    half = error * (runs.t_quantile(len(grades) - 1, 0.05) if len(grades) > 2 else 1.96)
    return mean, mean - half, mean + half


# ---- Runs ------------------------------------------------------------------------------------------------------------


def main(folders: tyro.conf.Positional[tuple[Path, ...]], output: Path = Path("plot.png")):
    """Draws runs side by side: a panel for each metric of training and for each grade, with a color for each run.

    Args:
        folders: output folders of rloo.py; folders without metrics are left out
        output: the picture
    """
    found = {folder: runs.lines(folder / "metrics.jsonl") for folder in folders if (folder / "metrics.jsonl").is_file()}
    if not found:
        sys.exit("plot.py: name output folders of rloo.py")
    evaluations = {folder: runs.lines(folder / "evaluations.jsonl") for folder in found}
    names = dict.fromkeys(name for lines in evaluations.values() for line in lines for name in line)
    grades = [name for name in names if name.startswith("sampled/") and f"{name}_stderr" in names]
    grades = {name: f"{name.removeprefix('sampled/')}, held-out prompts" for name in grades if name != "sampled/length"}
    figure, (axes,) = canvas(1, len(TRAINING) + len(grades), height=4)
    for axis, (name, title) in zip(axes, (TRAINING | grades).items()):
        axis.set(title=title, xlabel="episodes (completions)")
        axis.locator_params(axis="x", nbins=5)
        for number, folder in enumerate(found):
            style = {"color": f"C{number}", "label": folder.resolve().name}
            lines = [line for line in (found if name in TRAINING else evaluations)[folder] if name in line]
            x, y = ([line[key] for line in lines] for key in ("episode", name))
            if name in grades:
                axis.errorbar(x, y, [line[f"{name}_stderr"] for line in lines], marker="o", ms=4, capsize=2, **style)
            elif lines:  # no KL without a reference
                width = max(1, len(lines) // SMOOTHED)
                axis.plot(x[width - 1 :], np.convolve(y, np.ones(width) / width, "valid"), **style)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(
        f"Training: mean over 1/{SMOOTHED} of the updates. Held out: sampled, ± standard error over prompts"
    )
    save(figure, output)


if __name__ == "__main__":
    tyro.cli(main)
