"""Tables and picture of README.md from records.json; chain.py and `python benchmark/common.py` call it."""

import sys
from pathlib import Path

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
    "trl": "TRL 1.16's RLOO, learned reward model",
}
ONCE = ["annotator-seed1", "trl-seed1"]
NAMES = ["sft", "reward", *(f"{kind}-seed1" for kind in TRIALS), f"{LEARNED}-seed2", f"{LEARNED}-seed3", *ONCE]
BEST_OF = {  # entry of the record `reward` -> row of the table
    "best_of_4": "SFT, best of 4 by the reward model",
    "best_of_16": "SFT, best of 16 by the reward model",
    "closest_of_16": "SFT, best of 16 by the annotator",
}
JUDGES = {"closeness_wins": "annotator", "rouge_l_wins": "ROUGE-L"}


def of_kind(records: common.Records, kind: str) -> list[dict]:
    """The records of its seeds."""
    return [records.all[f"{kind}-seed{seed}"] for seed in SEEDS if f"{kind}-seed{seed}" in records.all]


def row(title: str, found: list[dict]) -> list[str]:
    """Win rates by each judge, and what the sampled completions are like; best-of-n has no greedy completions."""

    def cell(mode: str, entry: str, factor: float = 100, decimals: int = 1) -> str:
        return common.plus_minus([x[mode][entry] for x in found if mode in x], factor, decimals)

    wins = [cell(mode, judge) for judge in JUDGES for mode in ("sampled", "greedy")]
    kl = common.plus_minus([x["kl"] for x in found if "kl" in x], 1, 1)
    return [title, *wins, cell("sampled", "ended", 100, 0), cell("sampled", "length", 1, 1), kl]


def results(records: common.Records) -> str:
    wins = [f"{judge}, {mode}" for judge in JUDGES.values() for mode in ("sampled", "greedy")]
    rows = [["beats SFT's own, %: policy", *wins, "end, %", "tokens", "KL"], row("SFT", [records.all["sft"]])]
    rows += [row(title, of_kind(records, kind)) for kind, title in RUNS.items() if of_kind(records, kind)]
    rows += [row(title, [{"sampled": records.all["reward"][name]}]) for name, title in BEST_OF.items()]
    return common.markdown(rows)


def trials(records: common.Records) -> str:
    rows = [["β", "closeness, second half of the training", "KL"]]
    for kind in TRIALS:
        found = records.all[f"{kind}-seed1"]
        late = found["closeness"][UPDATES // 2 :]
        rows.append([kind.removeprefix("beta"), f"{sum(late) / len(late):.3f}", f"{found['kl']:.1f}"])
    return common.markdown(rows)


def examples(records: common.Records) -> str:
    rows = [["package", "maintainer", "SFT", "RLOO"]]
    ours = records.all[f"{LEARNED}-seed1"]["examples"]
    for package, (human, sft) in records.all["sft"]["examples"].items():
        rows.append([package, *(text.replace("|", "\\|") for text in (human, sft, ours[package][1]))])
    return common.markdown(rows)


def speed(records: common.Records) -> str:
    """All updates but the first of each run."""
    rows = [["seconds of an update", "median", "range"]]
    for kind in (LEARNED, "trl"):
        seconds = sorted(x for found in of_kind(records, kind) for x in found["seconds"][1:])
        rows.append([RUNS[kind], f"{seconds[len(seconds) // 2]:.0f}", f"{seconds[0]:.0f} to {seconds[-1]:.0f}"])
    return common.markdown(rows)


def tables(records: common.Records) -> dict[str, str]:
    return {table.__name__: table(records) for table in (results, trials, examples, speed)}


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
        lines = [plot.smoothed(x["closeness"], WINDOW) for x in of_kind(records, kind)]
        plot.course(axis, range(WINDOW, WINDOW + len(lines[0])), lines, color=f"C{number}", label=RUNS[kind])
    reward = records.all["reward"]
    axis.axhline(reward["closeness"], color="0.4", label="SFT")
    for style, (name, title) in zip(("--", "-.", ":"), BEST_OF.items(), strict=True):
        axis.axhline(reward[name]["closeness"], color="0.4", ls=style, label=title)
    axis.set(xlabel=f"update ({SIZE} completions each)", ylabel=f"cosine, mean of {WINDOW} updates")
    figure.suptitle(
        "Closeness to the maintainer's synopsis: packages that are new to the policy; lines: test", fontsize=9
    )
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
