"""Tables and picture of README.md from records.json; smollm.py and `python benchmark/common.py` call it.

A cell is the mean over the seeds that have a record, with ± the standard error over seeds if there are three or more.
"""

import sys
from pathlib import Path

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
SHOWN = ("base", "full-beta0", "full-beta0.02")  # in the table of samples
COLOURS = {"full-beta0.02": "tab:blue", "lora8-beta0.02": "tab:orange", "trl-beta0.02": "tab:purple"}  # in the picture
TITLES = {
    "sentiment": "Positive answers: sentiment, from −1 to 1",
    "reversal": "Reversing lists of words: verifier's score, from 0 to 1",
}
COLUMNS = {  # of a task's table: title -> keys of an entry, its factor and decimals
    "sentiment": {
        "score, sampled": ("test sampled score", 1, 2),
        "score, greedy": ("test greedy score", 1, 2),
        "KL, nats": ("test sampled kl", 1, 1),
        "name their topic, %": ("test sampled names_topic", 100, 0),
        "say glad, happy or love, %": ("test sampled gladness", 100, 0),
        "CPU seconds of an update": ("cpu_seconds_per_update", 1, 1),
        "peak memory, GB": ("peak_gb", 1, 1),
    },
    "reversal": {
        "exact of 2 or 3 words, sampled, %": ("test sampled exact", 100, 1),
        "greedy, %": ("test greedy exact", 100, 1),
        "of 4 words, sampled, %": ("harder sampled exact", 100, 1),
        "of 4 words, greedy, %": ("harder greedy exact", 100, 1),
    },
}


def of_task(records: common.Records, task: str) -> dict[str, list[dict]]:
    """Setting, in the order of LABELS -> the records of its seeds."""
    names = {setting: [f"{task}-{setting}-seed{seed}" for seed in (1, 2, 3)] for setting in LABELS}
    names["base"] = [f"{task}-base"]
    found = {setting: [records.all[x] for x in of_it if x in records.all] for setting, of_it in names.items()}
    return {setting: of_it for setting, of_it in found.items() if of_it}


def values(records: list[dict], keys: str, factor: float = 1) -> list[float]:
    """An entry of each record that has it."""
    found = []
    for record in records:
        for key in keys.split():
            record = record.get(key, {})
        found += [factor * record] if record != {} else []
    return found


def cell(records: list[dict], keys: str, factor: float, decimals: int) -> str:
    return common.plus_minus(values(records, keys, factor), decimals=decimals)


def task_table(task: str, found: dict) -> str:
    rows = [["policy", *COLUMNS[task]]]
    for setting, records in found.items():
        rows.append([LABELS[setting], *(cell(records, *column) for column in COLUMNS[task].values())])
    return common.markdown(rows)


def samples_table(found: dict) -> str:
    """Greedy completions of the same prompts, of the first seed, with their scores."""
    settings = [setting for setting in SHOWN if setting in found]
    rows = [["prompt", *(LABELS[setting] for setting in settings)]]
    for examples in zip(*(found[setting][0]["examples"] for setting in settings), strict=True):
        texts = [" ".join(example["completion"].split()).replace("|", "\\|") for example in examples]
        scored = [f"{text} **{example['score']:.2f}**" for text, example in zip(texts, examples, strict=True)]
        rows.append([examples[0]["prompt"], *scored])
    return common.markdown(rows)


def difference_table(found: dict[str, dict]) -> str:
    """Of each setting from all weights with β = 0.02; verdicts as on all pages, with a correction for each task."""
    head = f"minus {LABELS[BASE]}"
    rows = [["task", head, "score or % exact, sampled", "p, after Holm's correction", "verdict"]]
    for task, columns in COLUMNS.items():
        keys, factor, decimals = next(iter(columns.values()))
        scores = {setting: values(records, keys, factor) for setting, records in found[task].items()}
        scores = {setting: of_it for setting, of_it in scores.items() if len(of_it) >= 3}
        if BASE in scores:
            for setting, x in common.differences(scores, BASE).items():
                p = f"{x.holm:.2f}" if x.holm >= 0.005 else "below 0.005"
                rows.append([task, LABELS[setting], common.with_interval(x, decimals), p, x.verdict])
    return common.markdown(rows)


def tables(records: common.Records) -> dict[str, str]:
    """The page's tables, by their names."""
    found = {task: of_task(records, task) for task in TITLES}
    made = {task: task_table(task, found[task]) for task in TITLES}
    return made | {"samples": samples_table(found["sentiment"]), "differences": difference_table(found)}


def smooth(line: list[float], width: int = 5) -> list[float]:
    """The mean of each `width` values in a row."""
    return [sum(line[i : i + width]) / width for i in range(len(line) - width + 1)]


def draw(records: common.Records, path: Path):
    """The score in training: mean and range of the seeds of each setting of COLOURS."""
    figure, (axes,) = common.canvas(2, 10, 4.2)
    for axis, (task, title) in zip(axes, TITLES.items(), strict=True):
        found = of_task(records, task)
        for setting in [x for x in COLOURS if x in found]:
            of_update = list(zip(*(smooth(record["reward"]) for record in found[setting]), strict=True))
            updates, style = range(5, 5 + len(of_update)), {"color": COLOURS[setting]}
            label = f"{LABELS[setting]}: mean and range of {len(found[setting])} seeds"
            axis.plot(updates, [sum(x) / len(x) for x in of_update], label=label, **style)
            axis.fill_between(
                updates, *zip(*((min(x), max(x)) for x in of_update), strict=True), alpha=0.18, lw=0, **style
            )
        before = found["base"][0]["test"]["sampled"]["score"]
        axis.axhline(before, color="tab:grey", ls=":", label="before training, on held-out prompts")
        axis.set(title=title, xlabel="update (32 completions each)", ylabel="mean score of 5 updates", xlim=(5, 40))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    common.save(figure, path)


def report():
    records = common.Records(RECORDS)
    common.insert(HERE / "README.md", tables(records))
    draw(records, HERE / "training.png")


def headline() -> list[list[str]]:
    """Rows of benchmark/README.md's table."""
    rows = []
    for task, what in (("sentiment", "sentiment of sampled answers, −1 to 1"), ("reversal", "exact lists, sampled, %")):
        found, column = of_task(common.Records(RECORDS), task), next(iter(COLUMNS[task].values()))
        number = f"{cell(found['base'], *column)} → {cell(found[BASE], *column)}"
        rows.append([f"SmolLM2-135M: {what}", number, str(len(found[BASE])), "`python benchmark/smollm/smollm.py`"])
    return rows
