"""Tables and picture of README.md from records.json; chain.py and `python benchmark/common.py` call it."""

import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import common  # noqa: E402
import plot  # noqa: E402

RECORDS = HERE / "records.json"
UPDATES, SIZE = 20, 32  # of a run; completions of an update
WINDOW = 5  # updates that a point of the picture is the mean of
BETA, ANNOTATOR_BETA = 0.01, 0.002  # BETA: the best of the trials; the annotator spreads a fifth as much
EXAMPLES = 5  # of the first test packages, which are in a random order
SEEDS = (1, 2, 3)
TRIALS = [f"beta{beta}" for beta in (0.01, 0.03, 0.1)]
LEARNED = f"beta{BETA}"
RUNS = {  # kind -> row of the table
    LEARNED: "RLOO by the reward model",
    "annotator": "RLOO by the annotator",
}
NAMES = ["sft", "reward", *(f"{kind}-seed1" for kind in TRIALS), f"{LEARNED}-seed2", f"{LEARNED}-seed3"]
NAMES += ["annotator-seed1", "speed"]
BEST_OF = {  # entry of the record `reward` -> row of the table
    "best_of_16": "best of 16 by the reward model",
    "closest_of_16": "best of 16 by the annotator",
}
MEASURES = {  # entry of a record -> row of the table
    "closeness": "closeness × 100",
    "rouge_l": "ROUGE-L × 100",
    "closeness_wins": "wins by closeness, %",
    "rouge_l_wins": "wins by ROUGE-L, %",
}


def of_kind(records: common.Records, kind: str) -> list[dict]:
    """The records of its seeds."""
    return [records.all[f"{kind}-seed{seed}"] for seed in SEEDS if f"{kind}-seed{seed}" in records.all]


def run_title(records: common.Records, kind: str) -> str:
    number = len(of_kind(records, kind))
    return f"{RUNS[kind]}, {number} seed{'s' if number > 1 else ''}"


def policies(records: common.Records) -> dict[str, list[dict]]:
    """Column of the table -> its records; best-of-n has no greedy completions."""
    found = {"SFT": [records.all["sft"]]} | {run_title(records, kind): of_kind(records, kind) for kind in RUNS}
    found |= {title: [{"sampled": records.all["reward"][name]}] for name, title in BEST_OF.items()}
    return {title: rows for title, rows in found.items() if rows}


def results(records: common.Records) -> str:
    """What the judges give to each policy, and how often it wins against the SFT model; sampled / greedy."""
    found = policies(records)
    rows = [["sampled / greedy", *found]]
    for entry, title in MEASURES.items():
        modes = [
            [[x[mode][entry] for x in column if mode in x] for mode in ("sampled", "greedy")]
            for column in found.values()
        ]
        rows.append([title, *(" / ".join(common.plus_minus(x, 100) for x in both if x) for both in modes)])
    length = [common.plus_minus([x["sampled"]["length"] for x in column]) for column in found.values()]
    kl = [common.plus_minus([x["kl"] for x in column if "kl" in x]) for column in found.values()]
    return common.markdown([*rows, ["tokens, sampled", *length], ["KL from SFT, nats", *kl]])


def agreement(records: common.Records) -> str:
    """Of the reward model with the annotator, on pairs of 16 SFT samples of each test package."""
    share = records.all["reward"]["agreement_closeness"]
    return f"It orders {100 * share:.1f}% of pairs of SFT samples as the annotator does; chance is 50%."


def gains(records: common.Records, kind: str) -> list[list[float]]:
    """Closeness of each seed's samples in each update, less that of the SFT model's on the same packages."""
    sft = records.all["sft"]["closeness"]
    courses = [(x["closeness"], sft[str(seed)]) for seed, x in zip(SEEDS, of_kind(records, kind))]
    return [[ours - theirs for ours, theirs in zip(*course)] for course in courses]


def example(records: common.Records) -> str:
    """The first test package for which the greedy synopses of SFT and RLOO (seed 1) differ."""
    ours = {package: texts[1] for package, texts in records.all[f"{LEARNED}-seed1"]["examples"].items()}
    theirs = records.all["sft"]["examples"]
    name = next(package for package in theirs if theirs[package][1] != ours[package])
    lines = zip(("maintainer", "SFT", "RLOO"), (*theirs[name], ours[name]))
    return "\n".join([f"{name}:", "", *(f"- {who}: {text}" for who, text in lines)])


def speed(records: common.Records) -> str:
    """Of all updates but the first of each run; the range of the ratio is that of any two of them."""
    ours, theirs = (sorted(sum(records.all["speed"][kind], [])) for kind in ("rloo", "trl"))
    times = [f"{median(x):.0f} seconds ({x[0]:.0f} to {x[-1]:.0f})" for x in (ours, theirs)]
    ratio = (
        f"{median(theirs) / median(ours):.1f} times as long ({theirs[0] / ours[-1]:.1f} to {theirs[-1] / ours[0]:.1f})"
    )
    return f"An update takes rloo.py {times[0]} and TRL 1.16 {times[1]}: TRL takes **{ratio}**."


def tables(records: common.Records) -> dict[str, str]:
    return {table.__name__: table(records) for table in (results, agreement, example, speed)}


def show(records: common.Records, names: list[str]):
    """Prints by which commit of rloo.py and when steps were made, and the table if all that it needs is there."""
    for name in [name for name in names if name in records.all]:
        made = records.all[name]["made"]
        print(f"{name}: recorded {made['date']}, rloo.py {made['rloo.py']}")
    if {"sft", "reward"} <= records.all.keys():
        print(results(records))


def draw(records: common.Records):
    figure, (axes,) = common.canvas(1, 7, 4.4)
    axis = axes[0]
    for number, kind in enumerate((LEARNED, "annotator")):
        lines = [plot.smoothed(line, WINDOW) for line in gains(records, kind)]
        plot.course(
            axis, range(WINDOW, WINDOW + len(lines[0])), lines, color=f"C{number}", label=run_title(records, kind)
        )
    reward = records.all["reward"]
    for style, (name, title) in zip(("--", ":"), BEST_OF.items(), strict=True):
        label = f"SFT, {title}, test packages"
        axis.axhline(reward[name]["closeness"] - reward["closeness"], color="0.4", ls=style, label=label)
    axis.axhline(0, color="black", lw=0.8)
    axis.set(xlabel=f"update ({SIZE} completions each)", ylabel=f"cosine gained over SFT, mean of {WINDOW} updates")
    title = "How much closer to the maintainer's synopsis than SFT samples for the same packages, by the annotator.\n"
    title += "Curves: training packages, each new to the policy (mean; band: range of seeds)"
    figure.suptitle(title, fontsize=9)
    figure.legend(loc="outside lower center", ncols=2)
    common.save(figure, HERE / "closeness.png")


def report():
    records = common.Records(RECORDS)
    if records.complete(NAMES, "smollm/README.md's tables, closeness.png"):
        common.insert(HERE / "README.md", tables(records))
        draw(records)


def headline() -> list[list[str]]:
    """A row of benchmark/README.md's table."""
    records = common.Records(RECORDS)
    ours, sft = [x["greedy"] for x in of_kind(records, LEARNED)], records.all["sft"]["greedy"]
    mean, wins = (common.plus_minus([x[name] for x in ours], 100) for name in ("closeness", "closeness_wins"))
    answer = f"closeness to human summaries {100 * sft['closeness']:.1f} → {mean}; wins against SFT {wins}%"
    question = "Does SmolLM2-135M learn to summarise real texts?"
    return [
        [
            question,
            answer,
            "3 seeds; ± 4 points over texts",
            "python benchmark/smollm/chain.py",
            "smollm/README.md",
        ]
    ]
