"""Runs of rloo.py side by side: score and KL in training, and the grades of held-out completions, over episodes.

    python benchmark/plot.py runs/one runs/two                   # writes plot.png
    python benchmark/plot.py runs/* --output mine.png

It reads metrics.jsonl and evaluations.jsonl, also of runs that have not ended. The legend has the names of the folders,
and the flags in args.json by which the runs differ.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common  # noqa: E402

TRAINING = {"objective/scores": "score, training prompts", "objective/kl": "KL from the reference, nats"}
SMOOTHED = 20  # a point is the mean of so large a part of the updates: 1 / SMOOTHED


def course(axis, x: Sequence[float], lines, **options):
    """The mean of lines (seeds, points) over x, and their range where there are several."""
    lines = np.asarray(lines, float)
    (drawn,) = axis.plot(x, lines.mean(0), **options)
    if len(lines) > 1:
        axis.fill_between(x, lines.min(0), lines.max(0), color=drawn.get_color(), alpha=0.18, lw=0)


def smoothed(values: Sequence[float], window: int) -> np.ndarray:
    """The mean of each value and the window - 1 before it; as many points as there are whole windows."""
    return np.convolve(values, np.ones(window) / window, "valid")


def held_out_grades(evaluations: list[dict]) -> list[str]:
    """Names of the grades of sampled completions, without their length."""
    names = dict.fromkeys(name for line in evaluations for name in line if name.startswith("sampled/"))
    return [name for name in names if f"{name}_stderr" in names and name != "sampled/length"]


def labels(runs: Sequence[Path]) -> list[str]:
    """The name of each run, with its values of up to three flags that are not equal in all runs."""
    flags = [json.loads((run / "args.json").read_text()) for run in runs]
    differ = [name for name in flags[0] if any(other.get(name) != flags[0][name] for other in flags)]
    others = ("output_dir", "exp_name", "resume", "replaced", "model_name_or_path")
    shown = [name for name in differ if name not in others][:3]
    values = [[f"{name} {str(own.get(name))[-30:]}" for name in shown] for own in flags]  # the end of a long path
    return [",\n".join([run.resolve().name, *own]) for run, own in zip(runs, values)]


def draw(runs: Sequence[Path], output: Path):
    """A panel for each metric of training and each grade; a colour for each run."""
    metrics = [common.read_lines(run / "metrics.jsonl") for run in runs]
    files = [run / "evaluations.jsonl" for run in runs]
    evaluations = [common.read_lines(file) if file.is_file() else [] for file in files]  # some runs have none
    grades = held_out_grades([line for lines in evaluations for line in lines])
    columns = len(TRAINING) + len(grades)
    figure, (axes,) = common.canvas(columns, 4 * columns, 4)
    for number, label in enumerate(labels(runs)):
        style = {"color": f"C{number}", "label": label}
        for axis, name in zip(axes, TRAINING):
            lines = [line for line in metrics[number] if name in line]  # no KL without a reference
            window = max(1, len(lines) // SMOOTHED)
            episodes = [line["episode"] for line in lines[window - 1 :]]
            if lines:
                course(axis, episodes, [smoothed([line[name] for line in lines], window)], **style)
        for axis, name in zip(axes[len(TRAINING) :], grades):
            found = [
                (line["episode"], line[name], line[f"{name}_stderr"]) for line in evaluations[number] if name in line
            ]
            if found:
                episodes, means, errors = zip(*found)
                axis.errorbar(episodes, means, errors, marker="o", ms=4, capsize=2, **style)
    titles = [*TRAINING.values(), *(f"{name.removeprefix('sampled/')}, held-out prompts" for name in grades)]
    for axis, title in zip(axes, titles):
        axis.set(title=title, xlabel="episodes (completions)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(
        f"Training: mean over 1/{SMOOTHED} of the updates. Held out: sampled, ± standard error over prompts"
    )
    common.save(figure, output)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("--output", type=Path, default=Path("plot.png"), help="the picture")
    args = parser.parse_args()
    common.require(matplotlib="matplotlib")
    runs = []
    for run in args.runs:
        if (run / "args.json").is_file() and (run / "metrics.jsonl").is_file():
            runs.append(run)
        else:
            print(f"{run}: left out; it has no args.json or no metrics.jsonl")
    if not runs:
        sys.exit("plot.py: name output folders of rloo.py")
    draw(runs, args.output)


if __name__ == "__main__":
    main()
