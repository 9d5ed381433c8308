"""How does RLOO compare with PPO, GRPO, RAFT and REINFORCE without a baseline on mini TL;DR?

    python benchmark/study/peers.py --trl0 trl0/bin/python --trl1 trl1/bin/python
    python benchmark/study/peers.py --names rloo raft                                # some of it

benchmark/requirements.txt says how to make the environments with TRL 0.19 (PPO) and 1.x (GRPO); without them these rows
are skipped. Records: peers.json. A run that has its record is not made again. Two processes with other --names may run
side by side.

Each method with five seeds has the best of six settings (learning rate, β, completions per update), tried with seed 1
on fresh validation posts; the seeds here are others, and so are the posts. The other rows change one thing of these.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import measure
import numpy as np
import reach
import tyro
from measure import Setting, common

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "peers.json"
POSTS = 5_000  # fresh test posts


@dataclass(frozen=True)
class Row:
    """A method: what trains it, and how."""

    title: str
    setting: Setting
    script: str = "rloo.py"
    """and its first argument, if it has one"""
    flags: tuple[str, ...] = ()
    """more than those of the setting"""
    environment: str = ""
    """whose python runs it: trl0 or trl1; empty: this one"""
    seeds: int = 3

    def command(self, seed: int) -> list[str]:
        """Without python and output folder."""
        return [*self.script.split(), *self.setting.flags(seed), *self.flags]


RLOO = Row("RLOO, k = 4", Setting(3.55e-4), seeds=5)
RAFT = Row("RAFT, k = 4", Setting(size=128), "benchmark/study/variants.py raft", seeds=5)
PPO = Row(
    "PPO, 4 epochs (TRL)",
    Setting(2e-4, beta=0.05, epochs=4),
    "benchmark/trl/run.py ppo",
    environment="trl0",
    seeds=5,
)
OF_POLICY = ("--value_model_path", "benchmark/mini_tldr/sft")
ROWS = {
    "rloo": RLOO,
    "ppo": PPO,
    "grpo": Row("GRPO (TRL)", Setting(2.5e-4, 128, 0.0), "benchmark/trl/run.py grpo", environment="trl1", seeds=5),
    "raft": RAFT,
    "no_baseline": replace(
        RAFT,
        title="REINFORCE without baseline",
        setting=Setting(3.5e-4, 128),
        script="benchmark/study/variants.py no_baseline",
    ),
    # what PPO owes to its value model, which begins as the reward model, and to its epochs
    "ppo_policy": replace(PPO, title="PPO, value model from the policy", flags=OF_POLICY, seeds=3),
    "ppo_1_epoch": replace(PPO, title="PPO, 1 epoch", setting=replace(PPO.setting, epochs=1), seeds=2),
}
for k in (2, 8, 16):
    ROWS[f"rloo_k{k}"] = replace(RLOO, title=f"RLOO, k = {k}", setting=replace(RLOO.setting, k=k), seeds=3)
for k in (2, 8):
    ROWS[f"raft_k{k}"] = replace(RAFT, title=f"RAFT, k = {k}", setting=replace(RAFT.setting, k=k), seeds=3)


def names(row: str) -> list[str]:
    """Of the records of a row. Seed 1 was used to choose."""
    return [f"{row}__{seed}" for seed in range(2, 2 + ROWS[row].seeds)]


def make(records: common.Records, row: str, python: str):
    """Trains and measures the runs of a row that have no record."""
    for name in names(row):
        if records.value(name, "test") is not None:
            continue
        seed, setting = int(name.rpartition("__")[2]), ROWS[row].setting
        command = ROWS[row].command(seed)
        own = [] if ROWS[row].environment else setting.own_flags()
        folder = measure.train(name, [python, *command, *own])
        found = measure.measured(folder, "test", POSTS, seed)
        records.add(name, command=" ".join(command), seconds=measure.seconds(folder), test=found)


# ---- What is found ---------------------------------------------------------------------------------------------------


def wins(records: common.Records) -> dict[str, list[float]]:
    """Row -> its gold win rates on test posts in points, one for each seed, of the rows that have some."""
    found = {row: measure.means(records, names(row), "test", "win") for row in ROWS}
    return {row: [100 * value for value in values] for row, values in found.items() if values}


def compared(records: common.Records) -> dict[str, common.Difference]:
    """Each row less RLOO, the largest first."""
    return dict(sorted(common.differences(wins(records), "rloo").items(), key=lambda pair: -pair[1].mean))


def seconds(records: common.Records, runs: list[str]) -> str:
    """Mean over seeds."""
    return f"{np.mean([records.all[name]['seconds'] for name in runs if name in records.all]):.0f}"


def table(records: common.Records) -> str:
    """All methods, and RLOO's longer runs by reach.py, which are in no comparison."""
    apart, found = compared(records), wins(records)
    rows = [["method (seeds)", "gold win rate, %", "minus RLOO, k = 4, points", "seconds"]]
    for row in sorted(found, key=lambda row: -np.mean(found[row])):
        x = apart.get(row)
        difference = common.with_interval(x) if x else ""
        title, win = f"{ROWS[row].title} ({len(found[row])})", common.plus_minus(found[row])
        rows.append([title, win, difference, seconds(records, names(row))])
    longer, longer_runs = common.Records(reach.RECORDS), reach.ROWS["beta0.02"].names()
    win = measure.means(longer, longer_runs, "test", "win")
    title = f"RLOO, default with 25,600 episodes ({len(win)})"
    rows.append([title, common.plus_minus(win, 100), "", seconds(longer, longer_runs)])
    return common.markdown(rows)


def headline() -> list[list[str]]:
    """Rows of the benchmarks' README."""
    records = common.Records(RECORDS)
    apart, rows = compared(records), []
    for row in ("grpo", "ppo"):
        x = apart[row]
        number = f"{common.with_interval(x)}: {x.verdict}"
        if row == "ppo":
            number += f"; {seconds(records, names(row))} seconds against {seconds(records, names('rloo'))}"
        title = f"mini TL;DR, {ROWS[row].title} minus RLOO at learning rate 3.55e-4, points"
        rows.append([title, number, str(ROWS[row].seeds), "`python benchmark/study/peers.py`"])
    return rows


def report():
    common.insert(HERE / "README.md", {"peers": table(common.Records(RECORDS))})


def main(names: tuple[str, ...] = tuple(ROWS), trl0: str = "", trl1: str = ""):
    """Runs, measurements and table.

    Args:
        names: which rows, by their names in this file
        trl0: python of an environment with TRL 0.19
        trl1: python of an environment with TRL 1.x
    """
    pythons = {"": sys.executable, "trl0": trl0, "trl1": trl1}
    for row in names:
        python = pythons[ROWS[row].environment]
        if python:
            make(common.Records(RECORDS), row, python)
        else:
            print(f"skipped, since --{ROWS[row].environment} is not given: {row}")
    report()


if __name__ == "__main__":
    tyro.cli(main)
