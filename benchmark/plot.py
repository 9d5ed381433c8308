"""Runs of rloo.py side by side: score and KL in training, and the grades of held-out completions, over episodes.

    python benchmark/plot.py runs/one runs/two                   # writes plot.png
    python benchmark/plot.py runs/* --output mine.png

It reads metrics.jsonl and evaluations.jsonl, also of runs that have not ended. The legend has the names of the folders.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import runs
import tyro

TRAINING = {"objective/scores": "score, training prompts", "objective/kl": "KL from the reference, nats"}


def canvas(rows: int, columns: int, height: float = 3.2, **options):
    """Returns a figure and its axes (rows, columns). Pages show them about 8 inches wide."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        sys.exit("plot.py needs one more package: pip install matplotlib")
    plt.switch_backend("Agg")
    style = {"axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 11, "legend.frameon": False}
    plt.rcParams.update(style | {"figure.titlesize": 10})
    return plt.subplots(rows, columns, figsize=(8, height * rows), layout="constrained", squeeze=False, **options)


def save(figure, file: Path):
    figure.savefig(file, dpi=150)
    print(f"picture: {file}")


def course(axis, records: list[dict], over: str, measure: str, **style) -> np.ndarray:
    """Draws how a row's runs went, seeds thin, their mean thick and wins before training dashed. Returns this mean."""
    x, y = (np.array([record["course"][key] for record in records]) for key in (over, measure))
    axis.plot(x.T, y.T, lw=0.6, alpha=0.5, color=style["color"])
    axis.plot(x.mean(0), y.mean(0), lw=2, **style)
    if measure == "sampled/gold_win_rate":
        axis.axhline(y[:, 0].mean(), ls="--", color="black")
        axis.yaxis.set_major_formatter("{x:.0%}")
        axis.set_ylabel("wins over reference summaries")
    return y.mean(0)


def courses(titles: dict[str, str], records: dict[str, list[dict]], file: Path, panels: dict[str, list[str]]):
    """Draws score and wins of rows of a study over KL, in a color for each row: panels: title -> rows."""
    figure, axes = canvas(len(panels), 2)
    for (title, names), pair in zip(panels.items(), axes):
        for axis, measure, name in zip(pair, ("sampled/score", "sampled/gold_win_rate"), ("Score", "Wins")):
            axis.set_ylabel("score that RLOO is trained on")
            for row in names:
                course(axis, records[row], "kl", measure, color=f"C{list(titles).index(row)}", label=titles[row])
            axis.set_xscale("function", functions=(np.sqrt, np.square))
            axis.set(title=f"{name}: {title}", xlabel="KL from SFT, nats (square-root scale)", xlim=(0, None))
        pair[0].legend(fontsize=9)
        pair[1].set_ylim(0, None)
    figure.suptitle("Sampled summaries of held-out posts. Thin: seeds; thick: their mean; dashed: wins before training")
    save(figure, file)


def trainers(titles: dict[str, str], records: dict[str, list[dict]], file: Path):
    """Draws the score of training completions over a run, and wins at its end, for each trainer of a study."""
    records = {row: found for row, found in records.items() if "scores" in found[0]}
    figure, ((scores, wins),) = canvas(1, 2)
    for number, (row, found) in enumerate(records.items()):
        curves, style = np.array([record["scores"] for record in found]), {"color": f"C{number}"}
        share = (np.arange(curves.shape[1]) + 0.5) / curves.shape[1]
        scores.plot(share, curves.T, lw=0.6, alpha=0.5, **style)
        scores.plot(share, curves.mean(0), lw=2, label=titles[row], **style)
        for mode, marker in (("sampled", "o"), ("greedy", "s")):
            mean, error = runs.mean_and_error([record[f"{mode}/gold_win_rate"] for record in found])
            wins.errorbar(mean, number, xerr=error, fmt=marker, **style)
    scores.set(title="Score, training prompts", xlabel="share of the run\nThin: seeds; thick: their mean")
    scores.legend(fontsize=9)
    wins.set_yticks(range(len(records)), [f"({len(found)})" for found in records.values()])
    wins.xaxis.set_major_formatter("{x:.0%}")
    wins.set(title="Wins of held-out posts at the end", ylim=(len(records) - 0.5, -0.5))
    wins.set_xlabel("Circles: sampled; squares: greedy\n(n): seeds; lines: ± one standard error")
    save(figure, file)


def ends(titles: dict[str, str], records: dict[str, list[dict]], file: Path):
    """Draws wins at the end over KL, for each row of a study whose runs measured it: small seeds, and a large mean."""
    figure, ((axis,),) = canvas(1, 1, height=4.2)
    records = {row: found for row, found in records.items() if all("kl" in record for record in found)}
    for number, (row, found) in enumerate(records.items()):
        x, y = np.array([[record["kl"], record["sampled/gold_win_rate"][0]] for record in found]).T
        style = {"ls": "", "color": f"C{number % 10}", "marker": "os^"[number // 10]}
        axis.plot(x, y, ms=4, alpha=0.4, **style)
        axis.plot(x.mean(), y.mean(), ms=10, label=titles[row], **style)
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.set(xlabel="KL from SFT, nats", ylabel="wins over reference summaries", xlim=(0, None))
    figure.suptitle("Sampled summaries of 5,000 held-out posts. Small: seeds; large: their mean")
    figure.legend(loc="outside right center", fontsize=8)
    save(figure, file)


def wins(titles: dict[str, str], records: dict[str, list[dict]], file: Path):
    """Draws wins of the default run of mini TL;DR over its episodes."""
    figure, ((axis,),) = canvas(1, 1)
    mean = course(axis, records["default"], "episode", "sampled/gold_win_rate", color="C3")
    axis.legend(axis.lines[-2:], [f"after RLOO: {mean[-1]:.0%}", f"before RLOO: {mean[0]:.0%}"], fontsize=11)
    episodes = f"episodes (completions). Thin: {len(records['default'])} seeds; thick: their mean"
    axis.set(title="0.86M parameters, 500 held-out posts", xlabel=episodes, ylim=(0, None))
    save(figure, file)


def solved(titles: dict[str, str], records: dict[str, list[dict]], file: Path, without: Sequence[str] = ()):
    """Draws the share of test problems that are solved: by samples over training, for rows that sample, and greedily
    and by samples in the end, for all but those of `without`."""
    records = {row: found for row, found in records.items() if row not in without}
    figure, ((axis, end),) = canvas(1, 2, height=3.6)
    sampling = [row for row, found in records.items() if "course" in found[0]]
    colors = dict(zip(sampling, ["C3", "C4", "C5", "C6", "C0", "C1", "C2", "C8", "C9"]))  # gray is for the others
    for row, color in colors.items():
        course(axis, records[row], "episode", "sampled/score", color=color)
    graded = {row: found for row, found in records.items() if "by_prompt" in found[0]}  # on all problems
    greedy = {row: np.mean([record["greedy/correct"][0] for record in found]) for row, found in graded.items()}
    rows = sorted(greedy, key=greedy.get)
    for height, row in enumerate(rows):
        for mode, key, fill in (("greedy", "by_prompt", None), ("sampled", "by_prompt_2", "white")):
            items = np.array([runs.unpacked(record[key]) for record in graded[row]])  # (seeds, problems)
            mean, error = runs.mean_and_error([record[f"{mode}/correct"] for record in graded[row]], items)
            style = {"color": colors.get(row, "0.3"), "markerfacecolor": fill}
            end.errorbar(mean, height, xerr=error, fmt="o", **style)
    end.yaxis.tick_right()
    end.set_yticks(range(len(rows)), [titles[row] for row in rows])
    for label, row in zip(end.get_yticklabels(), rows):
        label.set_color(colors.get(row, "0.3"))
    end.xaxis.set_major_formatter("{x:.0%}")
    axis.yaxis.set_major_formatter("{x:.0%}")
    axis.set(title="Samples, over training", ylim=(0, None), xlim=(0, None))
    axis.set_xlabel("episodes (completions)\nThin: seeds; thick: their mean\nColors: see the labels at the right")
    end.set(title="In the end", xlim=(0, None))
    end.set_xlabel("Filled: greedy; open: sampled\nLines: ± one standard error")
    figure.suptitle("SmolLM2-135M: solved test problems of Countdown")
    save(figure, file)


def main(folders: tyro.conf.Positional[tuple[Path, ...]], output: Path = Path("plot.png")):
    """Draws runs side by side: a panel for each metric of training and for each grade, with a color for each run.

    Args:
        folders: output folders of rloo.py; folders without metrics are left out
        output: the picture
    """
    found = {folder: runs.lines(folder / "metrics.jsonl") for folder in folders if (folder / "metrics.jsonl").is_file()}
    if not found:
        sys.exit("plot.py: name output folders of rloo.py")
    found = {folder: lines + runs.lines(folder / "evaluations.jsonl") for folder, lines in found.items()}
    names = dict.fromkeys(name for lines in found.values() for line in lines for name in line)
    grades = [name for name in names if name.startswith("sampled/") and f"{name}_stderr" in names]
    grades = {name: f"{name.removeprefix('sampled/')}, held-out prompts" for name in grades if name != "sampled/length"}
    figure, axes = canvas(len(TRAINING | grades), 1, height=2.2, sharex=True)
    for axis, (name, title) in zip(axes.flat, (TRAINING | grades).items()):
        for number, (folder, logged) in enumerate(found.items()):
            style = {"color": f"C{number}", "label": folder.resolve().name}
            lines = [line for line in logged if name in line]
            x, y = (np.array([line[key] for line in lines]) for key in ("episode", name))
            if name in grades:
                error = np.array([line[f"{name}_stderr"] for line in lines])
                axis.fill_between(x, y - error, y + error, alpha=0.2, color=style["color"])
                axis.plot(x, y, marker="o", ms=4, **style)
            elif lines:  # no KL without a reference
                width = max(1, len(lines) // 20)
                axis.plot(x[width - 1 :], np.convolve(y, np.ones(width) / width, "valid"), **style)
        axis.set_title(title)
    axes[-1, 0].set_xlabel("episodes (completions)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle("Training: mean over 1/20 of the updates. Held out: sampled; band: ± standard error over prompts")
    save(figure, output)


if __name__ == "__main__":
    tyro.cli(main)
