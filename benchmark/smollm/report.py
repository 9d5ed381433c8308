"""Tables and picture of README.md from records.json; smollm.py and `python benchmark/common.py` call it.

A cell is the mean over the seeds that have a record, with ± the standard error over seeds if there are three or more.
"""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import common  # noqa: E402

RECORDS = HERE / "records.json"
BASE = "full-beta0.02"  # what the others are compared with
LABELS = {
    "base": "before training",
    "full-beta0": "all weights, β = 0",
    "full-beta0.02": "all weights, β = 0.02",
    "full-beta0.1": "all weights, β = 0.1",
    "lora8-beta0.02": "LoRA of rank 8, β = 0.02",
    "trl-beta0.02": "TRL 1.16, all weights, β = 0.02",
}
COLOURS = {"full-beta0.02": "tab:blue", "lora8-beta0.02": "tab:orange", "trl-beta0.02": "tab:purple"}  # in the picture
TITLES = {
    "sentiment": "Positive answers: sentiment, from −1 to 1",
    "reversal": "Reversing lists of words: verifier's score, from 0 to 1",
}
COLUMNS = {  # of a task's table: title -> keys of an entry, its factor and decimals; the first is compared
    "sentiment": {
        "score": ("test sampled score", 1, 2),
        "KL, nats": ("test sampled kl", 1, 1),
        "name their topic, %": ("test sampled names_topic", 100, 0),
        "say glad, happy or love, %": ("test sampled gladness", 100, 0),
        "seconds of an update": ("seconds_per_update", 1, 1),
    },
    "reversal": {
        "exact, sampled, %": ("test sampled exact", 100, 1),
        "exact, greedy, %": ("test greedy exact", 100, 1),
        "exact of four words, greedy, %": ("harder greedy exact", 100, 1),
    },
}


def of_setting(records: common.Records, task: str, setting: str) -> list[dict]:
    """The records of its seeds."""
    names = [f"{task}-base"] if setting == "base" else [f"{task}-{setting}-seed{seed}" for seed in (1, 2, 3)]
    return [records.all[name] for name in names if name in records.all]


def values(found: list[dict], keys: str, factor: float = 1) -> list[float]:
    """An entry of each record that has it."""
    for key in keys.split():
        found = [record[key] for record in found if key in record]
    return [factor * value for value in found]


def task_table(records: common.Records, task: str) -> str:
    """A line for each setting; differences as on all pages, with a correction for each task."""
    found = {setting: of_setting(records, task, setting) for setting in LABELS}
    first, *others = COLUMNS[task]
    keys, factor, decimals = COLUMNS[task][first]
    scores = {setting: values(found[setting], keys, factor) for setting in LABELS}
    apart = common.differences(scores, BASE)
    rows = [["policy", first, f"minus {LABELS[BASE]}", *others]]
    for setting in [setting for setting in LABELS if found[setting]]:
        x = apart.get(setting)
        difference = common.with_interval(x, decimals) if x else ""
        score, *cells = (cell(found[setting], *column) for column in COLUMNS[task].values())
        rows.append([LABELS[setting], score, difference, *cells])
    return common.markdown(rows)


def cell(found: list[dict], keys: str, factor: float, decimals: int) -> str:
    return common.plus_minus(values(found, keys, factor), decimals=decimals)


def samples_table(records: common.Records) -> str:
    """Greedy completions of the same prompts, before training and of the first seed, with their scores."""
    rows = [["prompt", LABELS["base"], LABELS[BASE]]]
    before, after = (of_setting(records, "sentiment", setting)[0]["examples"] for setting in ("base", BASE))
    for examples in zip(before, after, strict=True):
        texts = [" ".join(example["completion"].split()).replace("|", "\\|") for example in examples]
        scored = [f"{text} **{example['score']:.2f}**" for text, example in zip(texts, examples, strict=True)]
        rows.append([examples[0]["prompt"], *scored])
    return common.markdown(rows)


def tables(records: common.Records) -> dict[str, str]:
    """The page's tables, by their names."""
    return {task: task_table(records, task) for task in TITLES} | {"samples": samples_table(records)}


def draw(records: common.Records):
    """The score in training: mean and range of the seeds of each setting of COLOURS."""
    figure, (axes,) = common.canvas(2, 10, 4.2)
    for axis, (task, title) in zip(axes, TITLES.items(), strict=True):
        for setting, colour in COLOURS.items():
            rewards = [record["reward"] for record in of_setting(records, task, setting)]
            if rewards:  # TRL has one task
                lines = np.array([np.convolve(x, np.ones(5) / 5, "valid") for x in rewards])
                updates = range(5, 5 + lines.shape[1])
                label = f"{LABELS[setting]}: mean and range of {len(rewards)} seeds"
                axis.plot(updates, lines.mean(0), color=colour, label=label)
                axis.fill_between(updates, lines.min(0), lines.max(0), color=colour, alpha=0.18, lw=0)
        (before,) = values(of_setting(records, task, "base"), "test sampled score")
        axis.axhline(before, color="tab:grey", ls=":", label="before training, on held-out prompts")
        axis.set(title=title, xlabel="update (32 completions each)", ylabel="mean score of 5 updates", xlim=(5, 40))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    common.save(figure, HERE / "training.png")


def report():
    records = common.Records(RECORDS)
    common.insert(HERE / "README.md", tables(records))
    draw(records)


def headline() -> list[list[str]]:
    """Rows of benchmark/README.md's table."""
    records, rows = common.Records(RECORDS), []
    for task, what in (("sentiment", "sentiment of sampled answers, −1 to 1"), ("reversal", "exact lists, sampled, %")):
        before, after = (of_setting(records, task, setting) for setting in ("base", BASE))
        column = next(iter(COLUMNS[task].values()))
        number = f"{cell(before, *column)} → {cell(after, *column)}"
        rows.append([f"SmolLM2-135M: {what}", number, str(len(after)), "`python benchmark/smollm/smollm.py`"])
    return rows
