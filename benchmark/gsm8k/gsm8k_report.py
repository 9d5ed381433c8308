"""What training with verifiable rewards gained: table, numbers and picture of the runs of gsm8k.sh with a real model.

    python benchmark/gsm8k/gsm8k_report.py runs/gsm8k/qwen3-0.6b     # gsm8k.sh qwen3-0.6b does this at its end

It reads every finished run seed-<number> in the folder and writes gsm8k.json and gsm8k.png beside them.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

from gsm8k_reward import format


def read_run(folder: Path) -> dict:
    """What a finished run left: held-out accuracy and format before and after, and training's course."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    found = {
        "episodes": [m["episode"] for m in metrics],
        "correctness": [m["rewards/correctness/mean"] for m in metrics],
        "format": [m["rewards/format/mean"] for m in metrics],
        "kl": [m.get("objective/kl", 0.0) for m in metrics],  # without a reference there is none
        "held_out": {evaluation["episode"]: evaluation["sampled/judge_score"] for evaluation in evaluations},
        "seconds": sum(value for m in metrics for name, value in m.items() if name.startswith("time/")),
    }
    for when, update in (("before", 0), ("after", metrics[-1]["update"])):
        for mode in ("sampled", "greedy"):
            shown = [x for x in samples if (x["update"], x["mode"]) == (update, mode)]
            found[f"accuracy, {mode}, {when}"] = fmean([x["judge_score"] for x in shown])
            found[f"format, {mode}, {when}"] = fmean(format(None, [x["completion"] for x in shown], None))
            found["problems"] = len(shown)
    return found


def mean_and_error(xs: list[float]) -> tuple[float, float | None]:
    """Mean, and its standard error; a single number has none."""
    mu, n = fmean(xs), len(xs)
    return mu, (sum((x - mu) ** 2 for x in xs) / (n - 1) / n) ** 0.5 if n > 1 else None


def report(folder: Path):
    """Table on screen, gsm8k.json and gsm8k.png, over the runs folder/seed-*."""
    done = [path for path in sorted(folder.glob("seed-*")) if (path / "model.safetensors").is_file()]
    runs = {path.name: read_run(path) for path in done}
    if not runs:
        raise SystemExit(f"{folder}: there is no finished run in it (seed-<number>/model.safetensors)")
    if len({(run["problems"], *run["episodes"]) for run in runs.values()}) > 1:
        raise SystemExit(f"{folder}: its runs are of different length or on different numbers of problems")
    args = json.loads((done[0] / "args.json").read_text())
    table = {}
    print(f"{runs[done[0].name]['problems']} held-out problems, %; mean ± standard error over {', '.join(runs)}")
    print(f"{'':20} {'before':>12} {'after':>12} {'gained':>12}   per seed")
    for what in ("accuracy, sampled", "accuracy, greedy", "format, sampled", "format, greedy"):
        before, after = ([100 * run[f"{what}, {when}"] for run in runs.values()] for when in ("before", "after"))
        gained = [b - a for a, b in zip(before, after)]
        table[what] = dict(zip(("before", "after", "gained"), map(mean_and_error, (before, after, gained))))
        cells = (f"{mu:.1f}" + ("" if error is None else f" ± {error:.1f}") for mu, error in table[what].values())
        print(f"{what:20}", *(f"{cell:>12}" for cell in cells), "  " + ", ".join(f"{x:+.1f}" for x in gained))
    kept = (
        "sft_model_path",
        "total_episodes",
        "rloo_k",
        "learning_rate",
        "kl_coef",
        "temperature",
        "reward_fns",
        "reward_weights",
        "response_length",
    )
    text = {
        "command": "bash benchmark/gsm8k/gsm8k.sh " + folder.name,
        "flags": {name: args[name] for name in kept},
        "percent: mean, standard error over seeds": table,
        "runs": runs,
    }
    (folder / "gsm8k.json").write_text(json.dumps(text, indent=1) + "\n")
    draw(folder / "gsm8k.json")


def draw(path: Path):
    """The picture of a file of numbers, as .png beside it: accuracy and format over episodes."""
    try:
        import matplotlib
    except ImportError:
        print("no picture without matplotlib: pip install -r benchmark/requirements.txt")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = json.loads(path.read_text())
    runs = list(result["runs"].values())
    episodes = runs[0]["episodes"]
    ends = [0, episodes[-1]]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.3), layout="constrained", sharey=True)

    def training(panel, what: str):
        middle, error = percent([list(run[what]) for run in runs])
        panel.plot(episodes, middle, color="tab:gray", lw=1, label="training problems, sampled")
        low, high = ([m + side * e for m, e in zip(middle, error)] for side in (-1, 1))
        panel.fill_between(episodes, low, high, color="tab:gray", alpha=0.2, lw=0)

    def held_out(panel, x, values: list[list[float]], label: str, **style):
        middle, error = percent(values)
        panel.errorbar(x, middle, error, marker="o", ms=4, capsize=2, label=label, **style)

    accuracy, form = axes
    training(accuracy, "correctness")
    points = sorted(runs[0]["held_out"], key=int)
    courses = [[run["held_out"][point] for point in points] for run in runs]
    held_out(accuracy, [int(point) for point in points], courses, "held-out problems, sampled", color="tab:blue")
    training(form, "format")
    for panel, what in ((accuracy, "accuracy"), (form, "format")):
        if panel is form:
            values = [[run[f"{what}, sampled, {when}"] for when in ("before", "after")] for run in runs]
            held_out(panel, ends, values, "held-out problems, sampled", color="tab:blue", linestyle=":")
        values = [[run[f"{what}, greedy, {when}"] for when in ("before", "after")] for run in runs]
        held_out(panel, ends, values, "held-out problems, greedy", color="tab:orange", linestyle=":")
        panel.set(xlabel="episodes (completions sampled in training)", ylim=(0, 105))
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(loc="lower right", frameon=False)
        panel.grid(alpha=0.3)
    accuracy.set(ylabel="% of the completions", title="accuracy: the answer is right")
    form.set(title="format: the answer is where it was asked for")
    count = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
    figure.suptitle(
        f"{result['command']}: mean and standard error over {count}; dotted: evaluated before and after training only",
        fontsize=10,
    )
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plt.close(figure)
    print(path.with_suffix(".png"))


def percent(values: list[list[float]]) -> tuple[list[float], list[float]]:
    """Mean and standard error over runs, in percent, of what each run has at several points."""
    found = [mean_and_error(list(column)) for column in zip(*values)]
    return [100 * mean for mean, _ in found], [100 * (error or 0.0) for _, error in found]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("gsm8k_report.py: name the folder of the runs, for instance runs/gsm8k/qwen3-0.6b")
    report(Path(sys.argv[1]))
