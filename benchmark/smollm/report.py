"""Tables and picture of README.md from records.json: chain.py calls it; `python benchmark/smollm/report.py` redraws."""

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import common  # noqa: E402
import plot  # noqa: E402

RECORDS = HERE / "records.json"
TITLES = {"model": "RLOO by the reward model", "annotator": "RLOO by the annotator", "rules": "rules 1 : closeness 2"}
WEIGHTS = {"rules": ("1", "2")}
FLAGS = {"rloo_k": 6, "per_device_train_batch_size": 18, "learning_rate": 3e-5, "kl_coef": 0.003}  # after SFT
FLAGS |= {"missing_eos_penalty": 0.3}
RULES_FLAGS = {"rloo_k": 8, "per_device_train_batch_size": 32, "learning_rate": 5e-5, "kl_coef": 0.03}  # without
RULES_FLAGS |= {"missing_eos_penalty": 1}
UPDATES, RULES_UPDATES = 150, 30
WINDOW = 10  # updates that a point of the picture is the mean of
SHORT = 64  # tokens of the longest prompt that RLOO trains on; tests have longer ones
WATCHED = 40  # first test prompts; those that are short enough, 26, are evaluated while a run trains
SEEDS = (1, 2, 3)
EXAMPLES = 5  # the first test packages, which are in a random order
MODES = ("sampled", "greedy")
BEST_OF = (4, 16)
NAMES = ["sft", "reward", *(f"{kind}-seed{seed}" for kind in ("rules", "model") for seed in SEEDS)]
NAMES += [f"judged-{kind}" for kind in ("base", "rules", "sft", "model")]
MORE = [*(f"annotator-seed{seed}" for seed in SEEDS), "judged-annotator"]  # made only if they are named


def with_interval(entry: list[float], factor: float = 100, decimals: int = 1) -> str:
    """Mean [95% interval]."""
    mean, low, high = (f"{factor * x:.{decimals}f}" for x in entry)
    return f"{mean} [{low}, {high}]"


def of_kind(records: common.Records, kind: str) -> list[dict]:
    """The records of its seeds."""
    return [records.all[f"{kind}-seed{seed}"] for seed in SEEDS if f"{kind}-seed{seed}" in records.all]


def title_of(records: common.Records, kind: str) -> str:
    number = len(of_kind(records, kind))
    return f"{TITLES[kind]}, {number} seed{'s' if number > 1 else ''}"


def rows_of(records: common.Records, kinds: list[str], first: str, entries: list[str], last: str) -> list[list[str]]:
    """For the policy before and each kind, sampled and greedy: entries of the records `judged-...`; of `last` the mean
    alone."""
    rows = []
    for mode in MODES:
        for kind in [kind for kind in (first, *kinds) if f"judged-{kind}" in records.all]:
            found = records.all[f"judged-{kind}"][mode]
            title = {"base": "before", "sft": "SFT"}.get(kind) or title_of(records, kind)
            cells = ["" if kind == first and "wins" in entry else with_interval(found[entry]) for entry in entries]
            mean_of_last = f"{found[last][0] * (1 if last == 'length' else 100):.1f}"
            kl = common.plus_minus([np.mean(run["kl"][-WINDOW:]) for run in of_kind(records, kind)])
            rows.append([f"{title}, {mode}", *cells, mean_of_last, kl])
    return rows


def results(records: common.Records) -> str:
    """After SFT: what the judges give, and how often a policy wins against the SFT model."""
    entries = ["closeness", "rouge_l", "closeness_wins", "similar_wins", "rouge_l_wins"]
    head = ["%", "closeness", "ROUGE-L", "wins", "wins, like length", "wins, ROUGE-L", "tokens", "KL"]
    rows = rows_of(records, ["model", "annotator"], "sft", entries, "length")
    for n in BEST_OF:
        found = records.value("reward", f"best_of_{n}")
        cells = [with_interval(found[entry]) for entry in entries]
        rows.append([f"best of {n} SFT samples", *cells, f"{found['length'][0]:.1f}", f"{np.log(n) - (n - 1) / n:.1f}"])
    return common.markdown([head, *rows])


def rules(records: common.Records) -> str:
    """Without SFT: which rules are kept, and closeness."""
    entries = ["keeps_all", "keeps_the_rules", "closeness", "rouge_l", "closeness_wins"]
    head = ["%", "keeps all rules", "rules kept", "closeness", "ROUGE-L", "wins", "not empty", "KL"]
    return common.markdown([head, *rows_of(records, ["rules"], "base", entries, "not_empty")])


def agreement(records: common.Records) -> str:
    """Of the reward model with the annotator."""
    found = [f"{100 * x:.1f}%" for x in records.all["reward"]["agreement"]]
    parts = np.array([run["agreement"] for run in of_kind(records, "model")]).mean(0)
    own = ", ".join(f"{100 * x:.1f}%" for x in parts)
    text = f"It orders {found[0]} of pairs of SFT samples of a package as the annotator does; {', '.join(found[1:3])}\n"
    text += f"and {found[3]} of those that differ by more than 0.05, 0.1 and 0.2; and {own} of the policy's own, in\n"
    return f"{text}thirds of the runs."


def examples(records: common.Records) -> str:
    """Greedy synopses of the first test packages."""
    kinds = {"rules": "rules, no SFT", "sft": "SFT", "model": "SFT and RLOO by the reward model"}
    columns = [records.all["sft"]["examples"], *(records.all[f"judged-{kind}"]["examples"] for kind in kinds)]
    columns = [[text.replace("|", "\\|").replace("\n", " ↵ ") for text in column] for column in columns]
    return common.markdown([["maintainer", *kinds.values()], *zip(*columns)])


def tables(records: common.Records) -> dict[str, str]:
    return {table.__name__: table(records) for table in (rules, results, agreement, examples)}


def draw(records: common.Records):
    """Closeness of training samples, wins on the watched test prompts and KL, over updates."""
    figure, (axes,) = common.canvas(3, 11, 3.9)
    for number, kind in enumerate(("model", "annotator", "rules")):
        runs, options = of_kind(records, kind), {"color": f"C{number}"}
        if not runs:
            continue
        for axis, entry in ((axes[0], "closeness"), (axes[2], "kl")):
            lines = [plot.smoothed(run[entry], WINDOW) for run in runs]
            plot.course(axis, range(WINDOW, WINDOW + len(lines[0])), lines, label=title_of(records, kind), **options)
        wins = np.array([run["wins"] for run in runs])  # (seeds, evaluations, 2)
        plot.course(axes[1], wins[0, :, 0], 100 * wins[:, :, 1], marker="o", ms=3, **options)
    axes[1].axhline(50, color="black", lw=0.8)
    axes[0].set(title="closeness of training samples", ylabel="cosine to the maintainer's synopsis")
    axes[1].set(title="wins over the policy before, 26 test packages", ylabel="% of packages, sampled")
    axes[2].set(title="KL from the policy before", ylabel="nats a completion")
    for axis in axes:
        axis.set(xlabel="update")
    figure.suptitle(f"Mean of seeds and their range (band); closeness and KL: mean of {WINDOW} updates", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    common.save(figure, HERE / "closeness.png")


def report():
    records = common.Records(RECORDS)
    if records.complete(NAMES, "smollm/README.md's tables, closeness.png"):
        common.insert(HERE / "README.md", tables(records))
        draw(records)


if __name__ == "__main__":
    report()
