"""The tables of headline numbers of benchmark/README.md, from the records of all pages: one number for one thing.

    python benchmark/study/headline.py     # writes them anew

The win rate of rloo.py's default is that of seeds 7 to 16 on the second set of 5,000 fresh test posts: neither was used
for any choice. A page that repeats a number here is tested against it.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parent
sys.path[:0] = [str(HERE), str(TOP / "speed")]

import compare  # noqa: E402
import reach  # noqa: E402
import study  # noqa: E402
import throughput  # noqa: E402


def numbers() -> dict[str, tuple[str, int]]:
    """Of the study: name -> the number as pages write it, and its seeds, 0 where nothing is trained. Win rates are
    gold, in %, of one sample at T = 0.7 where nothing else is said."""
    plan, found = reach.Plan(), {}
    ours = reach.Reach(plan, study.ROOT / "runs" / "reach", HERE / "reach.json")

    def add(name: str, setting: reach.Setting, seeds, part: str = "test", mode: str = "sampled"):
        values = ours.records.means(ours.names(setting, seeds), part, "win", mode)
        write = study.plus_minus if setting.beta else study.listed
        found[name] = write(values, 100), len(values)

    for mode in ("sampled", "greedy"):
        found[f"SFT, {mode}"] = f"{100 * ours.records.value('sft', 'second_test', mode, 'win', 'mean'):.1f}", 0
        add(f"default, {mode}", ours.of(plan.episodes), plan.default_seeds, "second_test", mode)
    found["SFT, other posts"] = f"{100 * ours.records.value('sft', 'test', 'sampled', 'win', 'mean'):.1f}", 0
    for beta in plan.betas:
        add(f"25,600 episodes, β = {beta:g}", ours.of(plan.long_episodes, beta), plan.long_seeds)
    add("100,000 episodes, β = 0.05", ours.of(plan.longest_episodes, plan.long_beta), plan.longest_seeds)
    for n, values in ours.records.value("sft", "best_of_n", "by_n").items():
        found[f"best of {n}"] = study.over_posts(values["win"], 100), 0

    peers = compare.Comparison("peers", study.ROOT / "runs" / "peers", HERE / "peers.json")
    compared = peers.differences()
    for name, values in peers.wins().items():
        title = peers.rows[name].title
        found[title] = study.plus_minus(values), len(values)
        found[f"{title}: CPU seconds"] = f"{peers.seconds(peers.rows[name]):.0f}", len(values)
        if name in compared:
            x = compared[name]
            found[f"{title} minus RLOO"] = f"{study.with_interval(x)}, p = {x.holm:.2g}: {x.verdict}", len(values)
    return found


def study_rows() -> list[list[str]]:
    """Result, number, seeds, command."""
    found = numbers()
    texts, seeds = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
    default, long, best_of_n = (
        f"`python benchmark/study/reach.py --stages {stage}`" for stage in ("default", "long", "best_of_n")
    )
    peers = "`python benchmark/study/compare.py peers`"

    def row(title: str, name: str, command: str, before: str = "", after: str = "") -> list[str]:
        return [title, before + texts[name] + after, str(seeds[name] or ""), command]

    ppo = "TRL's PPO (value model from the reward model) minus RLOO, points"
    cost = f"; {texts['PPO (TRL): CPU seconds']} CPU seconds against {texts['RLOO, k = 4: CPU seconds']}"
    bests = [texts[f"best of {n}"] for n in (4, 16, 64)]
    return [
        row("default: gold win rate, one sample, %", "default, sampled", default, f"{texts['SFT, sampled']} → "),
        row("default: greedy, %", "default, greedy", default, f"{texts['SFT, greedy']} → "),
        row("β = 0, 25,600 episodes, %", "25,600 episodes, β = 0", long, after=" (each seed)"),
        *(row(f"β = {x}, 25,600 episodes, %", f"25,600 episodes, β = {x}", long) for x in (0.02, 0.05)),
        row("β = 0.05, 100,000 episodes, %", "100,000 episodes, β = 0.05", long, f"{texts['SFT, other posts']} → "),
        ["best of 4, 16, 64 before training, ± over posts, %", ", ".join(bests), "", best_of_n],
        row("TRL's GRPO minus RLOO, points", "GRPO (TRL) minus RLOO", peers),
        row(ppo, "PPO (TRL) minus RLOO", peers, after=cost),
    ]


def read(path: str) -> dict:
    return json.loads((TOP / path).read_text(encoding="utf-8"))


def trainer_rows() -> list[list[str]]:
    """The same of speed, TRL and gradients."""
    same, train = (f"`python benchmark/trl/trl_parity.py {part}`" for part in ("same", "train"))
    speed, exact = "`python benchmark/speed/throughput.py`", "`python benchmark/gradient/exact.py`"
    runs = read("trl/train.json")["found"]
    ours, theirs = (sum(run["cpu_seconds"] for run in runs[name]) for name in ("rloo.py", "TRL 1.16.0"))
    first, *_ = read("speed/throughput.json").values()
    updates = throughput.ratios(first["found"]["whole update"])
    (rounds,) = (x for name, x in updates.items() if "TRL 1.16.0" in name)
    slower = f"{throughput.median(rounds):.2f} ({len(rounds)} rounds: {min(rounds):.2f}, {max(rounds):.2f})"
    differences = [line["difference"] for line in read("trl/golden.json")["table"] if not line["why"]]
    largest = f"{max(differences):.1e}".replace("e-0", "e-")
    biases = [row["found"]["rloo (the defaults)"][0] for row in read("gradient/exact.json")["options"]]
    return [
        ["an update at TL;DR's lengths: time of TRL 1.16.0's RLOO over rloo.py's", slower, speed],
        ["a run on mini TL;DR: CPU time of TRL 1.16.0's RLOO over rloo.py's", f"{theirs / ours:.1f}", train],
        [f"weights after 3 updates: largest difference from TRL's, {len(differences)} settings", largest, same],
        [f"bias of RLOO's gradient: largest of {len(biases)} cases", f"{max(biases):.0e}", exact],
    ]


def tables() -> dict[str, str]:
    ours = study.markdown([["on mini TL;DR", "number", "seeds", "command"], *study_rows()])
    return {
        "headline": ours,
        "trainers": study.markdown([["against TRL, and of gradients", "number", "command"], *trainer_rows()]),
    }


if __name__ == "__main__":
    study.insert(TOP / "README.md", tables())
