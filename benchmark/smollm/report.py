"""Tables and picture of README.md from records.json; chain.py and `python benchmark/common.py` call it."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import common  # noqa: E402

RECORDS = HERE / "records.json"
SIZE = 32  # completions of an update
BETA, ANNOTATOR_BETA = 0.03, 0.02  # BETA: the best of the trials
EXAMPLES = 5  # of the first test packages, which are in a random order
SEEDS = (1, 2, 3)
TRIALS = [f"beta{beta}-seed1" for beta in (0.01, 0.03, 0.1)]
LEARNED = f"beta{BETA}"
RUNS = {  # kind -> row of the table
    LEARNED: "RLOO, learned reward model",
    "annotator": "RLOO, the annotator as reward",
    "trl": "TRL 1.16, learned reward model",
}
NAMES = ["sft", "reward", *TRIALS, "annotator-seed1", f"{LEARNED}-seed2", f"{LEARNED}-seed3", "trl-seed1", "speed"]
NAMES += ["annotator-seed2", "annotator-seed3"]
BEST_OF = {
    "best_of_4": "best of 4 of SFT's by the reward model",
    "best_of_16": "best of 16 of SFT's by the reward model",
    "closest_of_16": "best of 16 of SFT's by the annotator",
}
JUDGES = {"closeness_wins": "annotator", "rouge_l_wins": "ROUGE-L"}


def of_kind(records: common.Records, kind: str) -> list[dict]:
    """The records of its seeds."""
    return [records.all[f"{kind}-seed{seed}"] for seed in SEEDS if f"{kind}-seed{seed}" in records.all]


def row(title: str, found: list[dict], difference: str = "") -> list[str]:
    """A row of the table of results: win rates by each judge, sampled and greedy, and what the sampled ones are like.
    found: records with the modes; best-of-n has no greedy completions."""

    def cell(mode: str, entry: str, factor: float = 100, decimals: int = 1) -> str:
        return common.plus_minus([x[mode][entry] for x in found if mode in x], factor, decimals)

    wins = [cell(mode, judge) for judge in JUDGES for mode in ("sampled", "greedy")]
    kl = common.plus_minus([x["kl"] for x in found if "kl" in x], 1, 1)
    return [title, *wins, cell("sampled", "ended", 100, 0), cell("sampled", "length", 1, 1), kl]


def tables(records: common.Records) -> dict[str, str]:
    head = [
        "of the test packages",
        *(f"{judge}, {mode}" for judge in JUDGES.values() for mode in ("sampled", "greedy")),
    ]
    rows = [[*head, "end, %", "tokens", "KL"], row("SFT model", [records.all["sft"]])]
    rows += [row(title, of_kind(records, kind)) for kind, title in RUNS.items() if of_kind(records, kind)]
    rows += [row(title, [{"sampled": records.all["reward"][name]}]) for name, title in BEST_OF.items()]
    return {"results": common.markdown(rows)}


def show(records: common.Records, names: list[str]):
    """Prints what is recorded, by which commit of rloo.py and when."""
    for name in names:
        if name in records.all:
            made = records.all[name]["made"]
            print(f"{name}: recorded on {made['date']} with rloo.py of {made['rloo.py']}")
    print(*tables(records).values(), sep="\n\n")


def report():
    records = common.Records(RECORDS)
    if records.complete(NAMES, "tables and picture of benchmark/smollm"):
        common.insert(HERE / "README.md", tables(records))
