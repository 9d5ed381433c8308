"""Tables and picture of README.md from records.json; smollm.py and `python benchmark/common.py` call it.

A cell is the mean over the seeds that have a record, with ± the standard error over seeds if there are three or more.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import common  # noqa: E402
import plot  # noqa: E402

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
TITLES = {  # in the picture
    "sentiment": "Positive answers: sentiment, from −1 to 1",
    "reversal": "Reversing lists of words: verifier's score, from 0 to 1",
}
COLUMNS = {  # of a task's table: title -> keys of an entry, its factor and decimals; the first is compared
    "sentiment": {
        "score": ("test sampled score", 1, 2),
        "name their topic, %": ("test sampled names_topic", 100, 0),
        "say glad, happy or love, %": ("test sampled gladness", 100, 0),
    },
    "reversal": {
        "exact, sampled, %": ("test sampled exact", 100, 1),
        "exact, greedy, %": ("test greedy exact", 100, 1),
        "exact of four words, greedy, %": ("harder greedy exact", 100, 1),
    },
}


# What tables and picture are drawn from
NAMES = [f"{task}-base" for task in TITLES]
NAMES += [f"sentiment-{setting}-seed{seed}" for setting in list(LABELS)[1:] for seed in (1, 2, 3)]
NAMES += [f"reversal-{BASE}-seed{seed}" for seed in (1, 2, 3)]


def of_setting(records: common.Records, task: str, setting: str) -> list[dict]:
    """The records of its seeds."""
    names = [name for name in NAMES if (name.rpartition("-seed")[0] or name) == f"{task}-{setting}"]
    return [records.all[name] for name in names if name in records.all]


def values(found: list[dict], keys: str, factor: float = 1) -> list[float]:
    """An entry of each record that has it."""
    for key in keys.split():
        found = [record[key] for record in found if key in record]
    return [factor * value for value in found]


def task_table(records: common.Records, task: str) -> str:
    """A line for each setting; differences as on all pages."""
    found = {setting: of_setting(records, task, setting) for setting in LABELS}
    first, *others = COLUMNS[task]
    keys, factor, decimals = COLUMNS[task][first]
    scores = {setting: values(found[setting], keys, factor) for setting in LABELS}
    apart = common.differences(scores, BASE)
    minus = {f"minus {LABELS[BASE]}": {x: common.with_interval(apart[x], decimals) for x in apart}} if apart else {}
    rows = [["policy", first, *minus, *others]]
    for setting in [setting for setting in LABELS if found[setting]]:
        score, *cells = (cell(found[setting], *column) for column in COLUMNS[task].values())
        rows.append([LABELS[setting], score, *(column.get(setting, "") for column in minus.values()), *cells])
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
    """The score of training prompts: mean and range over the seeds of each setting."""
    figure, (axes,) = common.canvas(2, 10, 4.2)
    for axis, (task, title) in zip(axes, TITLES.items(), strict=True):
        for number, (setting, label) in enumerate(LABELS.items()):
            found = of_setting(records, task, setting) if setting != "base" else []
            if found:
                scores = [plot.smoothed(record["reward"], 5) for record in found]
                plot.course(axis, range(5, 41), scores, color=f"C{number - 1}", label=label)
        axis.set(title=title, xlabel="update (32 completions each)", ylabel="mean score of 5 updates")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("SmolLM2-135M: prompts that it is trained on. Mean and range of three seeds", fontsize=10)
    common.save(figure, HERE / "training.png")


def report():
    records = common.Records(RECORDS)
    if records.complete(NAMES, "smollm/README.md's tables, training.png"):
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
