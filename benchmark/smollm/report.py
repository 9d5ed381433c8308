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
    LEARNED: "RLOO, learned reward model",
    "annotator": "RLOO, the annotator as reward",
}
NAMES = ["sft", "reward", *(f"{kind}-seed1" for kind in TRIALS), f"{LEARNED}-seed2", f"{LEARNED}-seed3"]
NAMES += ["annotator-seed1", "speed"]
BEST_OF = {  # entry of the record `reward` -> row of the table
    "best_of_4": "SFT, best of 4 by the reward model",
    "best_of_16": "SFT, best of 16 by the reward model",
    "closest_of_16": "SFT, best of 16 by the annotator",
}
COLUMNS = ("annotator, sampled", "annotator, greedy", "ROUGE-L, sampled", "ROUGE-L, greedy")


def of_kind(records: common.Records, kind: str) -> list[dict]:
    """The records of its seeds."""
    return [records.all[f"{kind}-seed{seed}"] for seed in SEEDS if f"{kind}-seed{seed}" in records.all]


def policies(records: common.Records) -> dict[str, list[dict]]:
    """Row of a table -> its records; best-of-n has no greedy completions."""
    found = {"SFT": [records.all["sft"]]} | {title: of_kind(records, kind) for kind, title in RUNS.items()}
    found |= {title: [{"sampled": records.all["reward"][name]}] for name, title in BEST_OF.items()}
    return {title: rows for title, rows in found.items() if rows}


def cells(found: list[dict], entry: str, factor: float = 100, decimals: int = 1) -> list[str]:
    """An entry of sampled completions, and of greedy ones."""
    modes = [[x[mode][entry] for x in found if mode in x] for mode in ("sampled", "greedy")]
    return [common.plus_minus(values, factor, decimals) for values in modes]


def results(records: common.Records) -> str:
    """Win rates by each judge, and what the sampled completions are like."""
    rows = [["beats SFT's own, %", *COLUMNS, "end, %", "tokens", "KL"]]
    for title, found in policies(records).items():
        wins = [*cells(found, "closeness_wins"), *cells(found, "rouge_l_wins")]
        kl = common.plus_minus([x["kl"] for x in found if "kl" in x], 1, 1)
        rows.append([title, *wins, cells(found, "ended", 100, 0)[0], cells(found, "length", 1)[0], kl])
    return common.markdown(rows)


def means(records: common.Records) -> str:
    rows = [["mean × 100", *COLUMNS]]
    rows += [[title, *cells(x, "closeness"), *cells(x, "rouge_l")] for title, x in policies(records).items()]
    return common.markdown(rows)


def agreement(records: common.Records) -> str:
    """Of the reward model with the judges, on pairs of 16 SFT samples of each test package."""
    rows = {"closeness": "annotator", "decided": "annotator, cosines at least 0.1 apart", "rouge_l": "ROUGE-L"}
    found = [[title, f"{100 * records.all['reward'][f'agreement_{key}']:.1f}"] for key, title in rows.items()]
    return common.markdown([["reward model orders pairs as the", "%"], *found])


def gains(records: common.Records, kind: str) -> list[list[float]]:
    """Closeness of each seed's samples in each update, less that of the SFT model's on the same packages."""
    sft = records.all["sft"]["closeness"]
    courses = [(x["closeness"], sft[str(seed)]) for seed, x in zip(SEEDS, of_kind(records, kind))]
    return [[ours - theirs for ours, theirs in zip(*course)] for course in courses]


def trials(records: common.Records) -> str:
    rows = [["β", "cosine gained over SFT, second half of the training, × 100", "KL"]]
    for kind in TRIALS:
        late = gains(records, kind)[0][UPDATES // 2 :]
        kl = records.all[f"{kind}-seed1"]["kl"]
        rows.append([kind.removeprefix("beta"), f"{100 * sum(late) / len(late):+.1f}", f"{kl:.1f}"])
    return common.markdown(rows)


def examples(records: common.Records) -> str:
    rows = [["package", "maintainer", "SFT", "RLOO"]]
    ours = records.all[f"{LEARNED}-seed1"]["examples"]
    for package, (human, sft) in records.all["sft"]["examples"].items():
        rows.append([package, *(text.replace("|", "\\|") for text in (human, sft, ours[package][1]))])
    return common.markdown(rows)


def speed(records: common.Records) -> str:
    """Of all updates but the first of each run; the range of the ratio is that of any two of them."""
    ours, theirs = (sorted(sum(records.all["speed"][kind], [])) for kind in ("rloo", "trl"))
    rows = [["seconds of an update", "median", "range"]]
    for title, x in (("rloo.py", ours), ("TRL 1.16", theirs)):
        rows.append([title, f"{median(x):.0f}", f"{x[0]:.0f} to {x[-1]:.0f}"])
    ratios = f"{theirs[0] / ours[-1]:.1f} to {theirs[-1] / ours[0]:.1f}"
    return common.markdown([*rows, ["TRL / rloo.py", f"{median(theirs) / median(ours):.1f}", ratios]])


def tables(records: common.Records) -> dict[str, str]:
    return {table.__name__: table(records) for table in (results, means, agreement, trials, examples, speed)}


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
        plot.course(axis, range(WINDOW, WINDOW + len(lines[0])), lines, color=f"C{number}", label=RUNS[kind])
    reward = records.all["reward"]
    for style, (name, title) in zip(("--", "-.", ":"), BEST_OF.items(), strict=True):
        axis.axhline(reward[name]["closeness"] - reward["closeness"], color="0.4", ls=style, label=title)
    axis.set(xlabel=f"update ({SIZE} completions each)", ylabel=f"cosine gained over SFT, mean of {WINDOW} updates")
    title = "Closeness to the maintainer's synopsis, less SFT's on the same packages. Mean and range of seeds"
    figure.suptitle(title, fontsize=9)
    figure.legend(loc="outside lower center", ncols=2)
    common.save(figure, HERE / "closeness.png")


def report():
    records = common.Records(RECORDS)
    if records.complete(NAMES, "smollm/README.md's tables, closeness.png"):
        common.insert(HERE / "README.md", tables(records))
        draw(records)


def headline() -> list[list[str]]:
    """Rows of benchmark/README.md's table."""
    records, rows = common.Records(RECORDS), []
    for kind in (LEARNED, "annotator"):
        found = [x["sampled"]["closeness_wins"] for x in of_kind(records, kind)]
        title = f"real text, SmolLM2-135M (4-bit weights), {RUNS[kind]}: beats SFT by the annotator, sampled, %"
        rows.append([title, common.plus_minus(found, 100), str(len(found)), "`python benchmark/smollm/chain.py`"])
    return rows
