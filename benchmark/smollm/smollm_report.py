"""Tables and pictures from the records. smollm.py calls it.

A cell is the mean over the seeds that have a record, with ± the standard error over seeds if there are
three or more.
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "study"))
from study import differences, insert, markdown, with_interval  # noqa: E402

LABELS = {
    "base": "before training",
    "full-beta0": "all weights, β = 0",
    "full-beta0.02": "all weights, β = 0.02",
    "full-beta0.1": "all weights, β = 0.1",
    "lora1-beta0.02": "LoRA of rank 1, β = 0.02",
    "lora8-beta0.02": "LoRA of rank 8, β = 0.02",
    "lora32-beta0.02": "LoRA of rank 32, β = 0.02",
    "trl-beta0.02": "TRL 1.16, all weights, β = 0.02",
    "trl-lora8-beta0.02": "TRL 1.16, LoRA of rank 8, β = 0.02",
}
RATES = {"-rate0.3": "0.3", "": "1", "-rate3": "3"}
SHOWN = ("base", "full-beta0", "full-beta0.02", "full-beta0.1")  # in the tables of samples
DRAWN = ("full-beta0.02", "lora8-beta0.02", "trl-beta0.02")  # in the picture of training
TITLES = {
    "sentiment": "Positive answers: sentiment, from −1 to 1",
    "reversal": "Reversing lists of words: verifier's score, from 0 to 1",
}
COLOURS = dict(
    zip(
        LABELS,
        ("tab:grey", "tab:red", "tab:blue", "tab:green", "gold", "tab:orange", "tab:brown", "tab:purple", "tab:pink"),
    )
)


def load(records: Path) -> dict[str, dict[str, list[dict]]]:
    """Task -> setting, in the order of LABELS -> the records of its seeds."""
    found = {}
    for path in sorted(records.glob("*.json")):
        task, setting = path.stem.split("-", 1)
        setting = setting.split("-seed")[0]
        found.setdefault(task, {}).setdefault(setting, []).append(json.loads(path.read_text(encoding="utf-8")))
    order = [*LABELS, *(f"{setting}{rate}" for setting in LABELS for rate in RATES if rate)]
    return {task: {x: of_task[x] for x in order if x in of_task} for task, of_task in found.items()}


def labelled(of_task: dict) -> dict:
    """Without the runs at other learning rates."""
    return {setting: records for setting, records in of_task.items() if setting in LABELS}


def value(record: dict, *keys):
    for key in keys:
        record = record.get(key, {}) if isinstance(record, dict) else {}
    return None if record == {} else record


def cell(records: list[dict], *keys, factor: float = 1, decimals: int = 2) -> str:
    values = [value(record, *keys) for record in records]
    values = [factor * x for x in values if x is not None]
    if not values:
        return ""
    mean = sum(values) / len(values)
    if len(values) < 3:
        return f"{mean:.{decimals}f}"
    error = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))
    return f"{mean:.{decimals}f} ± {error:.{decimals}f}"


def seeds(records: list[dict]) -> str:
    return ", ".join(str(record["seed"]) for record in records if "seed" in record)


def sentiment_table(found: dict) -> str:
    head = [
        "policy",
        "seeds",
        "score, sampled; greedy",
        "KL, nats",
        "reference's perplexity",
        "distinct words of 3,000",
    ]
    rows = [[*head, "name their topic, %", "say glad, happy or love, %"]]
    for setting, records in labelled(found).items():
        sampled = ("test", "sampled")
        cells = [
            f"{cell(records, *sampled, 'score')}; {cell(records, 'test', 'greedy', 'score')}",
            cell(records, *sampled, "kl", decimals=1),
            cell(records, *sampled, "reference_perplexity", decimals=1),
            cell(records, *sampled, "distinct_words", decimals=0),
            cell(records, *sampled, "names_topic", factor=100, decimals=0),
            cell(records, *sampled, "gladness", factor=100, decimals=0),
        ]
        rows.append([LABELS[setting], seeds(records), *cells])
    return markdown(rows)


def reversal_table(found: dict) -> str:
    head = ["policy", "seeds", "exact of 2 or 3 words, sampled, %", "greedy, %", "of 4 words, sampled, %", "greedy, %"]
    rows = [head]
    for setting, records in labelled(found).items():
        modes = [(split, mode) for split in ("test", "harder") for mode in ("sampled", "greedy")]
        cells = [cell(records, split, mode, "exact", factor=100, decimals=1) for split, mode in modes]
        rows.append([LABELS[setting], seeds(records), *cells])
    return markdown(rows)


def difference_table(found: dict) -> str:
    """Of each setting from all weights with β = 0.02; verdicts as on all pages, with a correction for each task."""
    rows = [
        ["task", "minus all weights, β = 0.02", "score or % exact, sampled", "p, after Holm's correction", "verdict"]
    ]
    for task, measure, factor in (("sentiment", "score", 1), ("reversal", "exact", 100)):
        scores = {
            setting: [factor * value(record, "test", "sampled", measure) for record in records]
            for setting, records in labelled(found.get(task, {})).items()
            if setting != "base" and len(records) >= 3
        }
        if "full-beta0.02" in scores:
            for setting, x in differences(scores, "full-beta0.02").items():
                p = f"{x.holm:.2f}" if x.holm >= 0.005 else "below 0.005"
                rows.append([task, LABELS[setting], with_interval(x, 1 if factor > 1 else 2), p, x.verdict])
    return markdown(rows)


def rate_table(found: dict) -> str:
    """Runs at other learning rates: each cell is one seed, the first."""
    rows = [["policy, seed 1", *(f"{rate} × the learning rate" for rate in RATES.values())]]
    for setting in LABELS:
        if any(f"{setting}{rate}" in found for rate in RATES if rate):
            line = [found.get(f"{setting}{rate}", [])[:1] for rate in RATES]
            sampled = ("test", "sampled")
            cells = [f"{cell(x, *sampled, 'score')}, {cell(x, *sampled, 'kl', decimals=1)}" if x else "" for x in line]
            rows.append([LABELS[setting], *cells])
    return markdown(rows)


def cost_table(found: dict) -> str:
    rows = [["task", "policy", "seconds of an update", "CPU seconds of an update", "peak memory, GB"]]
    for task, of_task in found.items():
        for setting, records in labelled(of_task).items():
            if setting != "base":
                keys = ("seconds_per_update", "cpu_seconds_per_update", "peak_gb")
                costs = [cell(records, key, decimals=1) for key in keys]
                rows.append([task, LABELS[setting], *costs])
    return markdown(rows)


def samples_table(found: dict) -> str:
    """Greedy completions of the same prompts, of the first seed, with their scores."""
    settings = [x for x in SHOWN if x in found and found[x][0].get("examples")]
    rows = [["prompt", *(LABELS[x] for x in settings)]]
    for i, example in enumerate(found["base"][0]["examples"]):
        line = [example["prompt"]]
        for setting in settings:
            there = found[setting][0]["examples"][i]
            text = " ".join(there["completion"].split()).replace("|", "\\|")
            line.append(f"{text} **{there['score']:.2f}**")
        rows.append(line)
    return markdown(rows)


def tables(found: dict) -> dict[str, str]:
    made = {}
    if "sentiment" in found:
        made |= {"sentiment": sentiment_table(found["sentiment"]), "samples": samples_table(found["sentiment"])}
        if any("-rate" in setting for setting in found["sentiment"]):
            made |= {"rates": rate_table(found["sentiment"])}
    if "reversal" in found:
        made |= {"reversal": reversal_table(found["reversal"]), "reversal samples": samples_table(found["reversal"])}
    return made | {"differences": difference_table(found), "cost": cost_table(found)}


def smooth(values: list[float], width: int = 5) -> list[float]:
    """The mean of each `width` values in a row."""
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]


def draw_training(found: dict, axes):
    """The score in training of the settings of DRAWN that have three seeds or more: their mean and their range."""
    for axis, (task, title) in zip(axes, TITLES.items()):
        for setting in DRAWN:
            lines = [smooth(record.get("reward", [])) for record in found.get(task, {}).get(setting, [])]
            if len(lines) >= 3:
                updates = range(5, 5 + len(lines[0]))
                of_update = list(zip(*lines))
                label = f"{LABELS[setting]}: mean and range of {len(lines)} seeds"
                axis.plot(updates, [sum(x) / len(x) for x in of_update], color=COLOURS[setting], label=label)
                axis.fill_between(
                    updates, *([f(x) for x in of_update] for f in (min, max)), color=COLOURS[setting], alpha=0.18, lw=0
                )
        base = value(found.get(task, {}).get("base", [{}])[0], "test", "sampled", "score")
        if base is not None:
            axis.axhline(base, color="tab:grey", ls=":", label="before training, on held-out prompts")
        axis.set(title=title, xlabel="update (32 completions each)", ylabel="mean score of 5 updates", xlim=(5, 40))


def draw_kl(found: dict, axis):
    """The held-out score of each run over its KL divergence."""
    for setting, records in labelled(found.get("sentiment", {})).items():
        points = [(value(x, "test", "sampled", "kl"), value(x, "test", "sampled", "score")) for x in records]
        points = [point for point in points if None not in point]
        if points:
            marker = "x" if setting.startswith("trl") else "^" if setting.startswith("lora") else "o"
            axis.plot(*zip(*points), marker, color=COLOURS[setting], label=LABELS[setting])
    axis.set(
        title="Sentiment: held-out score over KL, a point for each run",
        xlabel="KL divergence from the model before training, nats",
        ylabel="mean score of sampled answers",
    )


def draw(found: dict, folder: Path):
    try:
        import matplotlib
    except ImportError:
        print("no pictures without matplotlib: pip install -r benchmark/requirements.txt")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for name, function, count, width in (("training", draw_training, 2, 10), ("kl", draw_kl, 1, 7)):
        figure, axes = plt.subplots(1, count, figsize=(width, 4.2), layout="constrained")
        function(found, axes)
        handles = {}  # by label: a setting that is in two pictures is once in the legend
        for axis in figure.axes:
            axis.grid(alpha=0.3)
            handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=2, fontsize=8)
        figure.savefig(folder / f"{name}.png", dpi=110)
        print(f"picture: {folder / name}.png")


def write(records: Path, page: Path | None):
    """The tables into the page, between <!-- name --> and <!-- end of name -->, and the pictures beside it; without a
    page, the tables are printed."""
    found = load(records)
    made = tables(found)
    if page is None:
        print("\n\n".join(made.values()))
        return
    insert(page, made)
    draw(found, page.parent)
