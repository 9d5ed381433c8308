"""The numbers of this study that other pages repeat, from its records: one number for one thing.

    python benchmark/study/headline.py        # prints the rows of the table in benchmark/README.md

The win rate of rloo.py's default is that of seeds 7 to 16 on the second set of 5,000 fresh test posts: neither was used
for any choice. A page that repeats a number here is tested against it.
"""

import math
from typing import NamedTuple

import compare
import reach
import study


class Number(NamedTuple):
    value: float
    error: float
    """standard error over seeds, NaN for fewer than three"""
    seeds: int
    """0 where nothing is trained"""
    command: str
    text: str
    """as pages write it"""


def number(values: list[float], command: str, decimals: int = 1, seeds: int | None = None) -> Number:
    mean, error = study.mean_and_error(values)
    text = study.plus_minus(values, 1, decimals)
    seeds = len(values) if seeds is None else seeds
    return Number(mean, error if len(values) > 2 else math.nan, seeds, command, text)


def headline() -> dict[str, Number]:
    """Name -> number; win rates are gold, in %, of one sample at T = 0.7 where nothing else is said."""
    plan, found = reach.Plan(), {}
    ours = reach.Reach(plan, study.ROOT / "runs" / "reach", study.HERE / "reach.json")
    script = "python benchmark/study/reach.py --stages"

    def percent(names: list[str], part: str, mode: str = "sampled") -> list[float]:
        return [100 * value for value in ours.records.means(names, part, "win", mode)]

    for mode in ("sampled", "greedy"):
        end = "" if mode == "sampled" else ", greedy"
        names = ours.names(ours.of(plan.episodes), plan.default_seeds)
        found[f"SFT{end}"] = number(percent(["sft"], "test", mode), f"{script} default", seeds=0)
        found[f"default{end}"] = number(percent(names, "second_test", mode), f"{script} default")
        names = ours.names(ours.of(plan.longest_episodes, plan.long_beta), plan.longest_seeds)
        found[f"100,000 episodes, β = 0.05{end}"] = number(percent(names, "test", mode), f"{script} long")
    for beta in plan.betas:
        names = ours.names(ours.of(plan.long_episodes, beta), plan.long_seeds)
        found[f"25,600 episodes, β = {beta:g}"] = number(percent(names, "test"), f"{script} long")
    for n, values in ours.records.value("sft", "best_of_n", "by_n").items():
        found[f"best of {n}"] = number([100 * values["win"]["mean"]], f"{script} best_of_n", seeds=0)

    peers = compare.Comparison("peers", study.ROOT / "runs" / "peers", study.HERE / "peers.json")
    script, compared = "python benchmark/study/compare.py peers", peers.differences()
    for name, values in peers.wins().items():
        title = peers.rows[name].title
        found[title] = number(values, script)
        seconds = [peers.records.value(run, "cpu_seconds") for run in peers.names(peers.rows[name])]
        found[f"{title}: CPU seconds"] = number([x for x in seconds if x], script, 0)
        if name in compared:
            x = compared[name]
            found[f"{title} less RLOO"] = Number(x.mean, math.nan, len(values), script, study.with_interval(x))
    return found


def rows() -> list[list[str]]:
    """What the table of all results has of this study: result, number, seeds, command."""
    found = headline()

    def row(title: str, numbers: str, name: str) -> list[str]:
        return [title, numbers, str(found[name].seeds or ""), f"`{found[name].command}`"]

    def texts(names) -> str:
        return ", ".join(found[name].text for name in names)

    betas = [f"25,600 episodes, β = {beta}" for beta in (0, 0.02, 0.05)]
    seconds = [round(found[f"{name}: CPU seconds"].value) for name in ("PPO (TRL)", "RLOO, k = 4")]
    longest = "100,000 episodes, β = 0.05"
    return [
        row("gold win rate, one sample, %", f"{found['SFT'].text} → {found['default'].text}", "default"),
        row("greedy, %", f"{found['SFT, greedy'].text} → {found['default, greedy'].text}", "default, greedy"),
        row("25,600 episodes, β = 0, 0.02, 0.05, %", texts(betas), betas[-1]),
        row(f"{longest}, %", found[longest].text, longest),
        row("best of 4, 16, 64 before training, %", texts(["best of 4", "best of 16", "best of 64"]), "best of 4"),
        row("TRL's GRPO less RLOO, points", found["GRPO (TRL) less RLOO"].text, "GRPO (TRL)"),
        row("TRL's PPO less RLOO, points", found["PPO (TRL) less RLOO"].text, "PPO (TRL)"),
        row("CPU seconds, TRL's PPO and RLOO", f"{seconds[0]}, {seconds[1]}", "PPO (TRL)"),
    ]


if __name__ == "__main__":
    print(study.markdown([["mini TL;DR", "number", "seeds", "command"], *rows()]))
