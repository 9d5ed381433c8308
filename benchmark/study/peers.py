"""How does RLOO compare with PPO, GRPO, RAFT and REINFORCE without a baseline on mini TL;DR?

    python benchmark/study/peers.py --trl0 trl0/bin/python --trl1 trl1/bin/python
    python benchmark/study/peers.py --names raft --seeds 1 --again    # one run again, compared with its record

benchmark/requirements.txt says how to make the environments with TRL 0.19 (PPO) and 1.x (GRPO); without them these rows
are skipped. Records: peers.json. Two processes with other --names may run side by side.

Each method has the best of six settings (learning rate, β, completions per update), tried with seed 1 on fresh
validation posts; the seeds here are others, and so are the posts. value.py has that of TRL's PPO.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import measure
import numpy as np
import tyro
from measure import Setting, common

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "peers.json"
POSTS = 5_000  # fresh test posts
SEEDS = range(2, 7)  # 1 was used to choose


@dataclass(frozen=True)
class Row:
    """A method: what trains it, and how."""

    title: str
    setting: Setting
    script: str = "rloo.py"
    """and its first argument, if it has one"""
    environment: str = ""
    """whose python runs it: trl0 or trl1; empty: this one"""

    def command(self, seed: int) -> list[str]:
        """Without python and output folder."""
        return [*self.script.split(), *self.setting.flags(seed)]


ROWS = {
    "rloo": Row("RLOO, k = 4", Setting(3.55e-4)),
    "ppo": Row("PPO, 4 epochs (TRL)", Setting(2e-4, beta=0.05, epochs=4), "benchmark/trl/run.py ppo", "trl0"),
    "value": Row(
        "PPO, 4 epochs (value.py)",
        Setting(2e-4, beta=0.05, epochs=4, k=1),
        "benchmark/extensions/value.py --value_model_path benchmark/mini_tldr/reward --normalize_advantage",
    ),
    "grpo": Row("GRPO (TRL)", Setting(2.5e-4, 128, 0.0), "benchmark/trl/run.py grpo", "trl1"),
    "raft": Row("RAFT, k = 4", Setting(size=128), "benchmark/study/variants.py raft"),
    "no_baseline": Row("REINFORCE without baseline", Setting(3.5e-4, 128), "benchmark/study/variants.py no_baseline"),
}


def names_of(row: str) -> list[str]:
    """Of the records of a row."""
    return [f"{row}__{seed}" for seed in SEEDS]


NAMES = [name for row in ROWS for name in names_of(row)]  # of all records


def make(records: common.Records, row: str, python: str, runs: Path, seeds: int | None = None):
    """Trains and measures the first runs of a row, those that have no record."""
    for seed, name in list(zip(SEEDS, names_of(row)))[:seeds]:
        if records.needs(name, "test"):
            command = ROWS[row].command(seed)
            own = [] if ROWS[row].environment else ROWS[row].setting.own_flags()
            folder = measure.train(name, [python, *command, *own], runs)
            found = measure.measured(folder, "test", POSTS, seed)
            records.add(name, command=" ".join(command), seconds=measure.seconds(folder), test=found)


# ---- Table -----------------------------------------------------------------------------------------------------------


def wins(records: common.Records) -> dict[str, list[float]]:
    """Row -> its gold win rates on test posts in points, one for each seed; the best row first."""
    found = {row: [100 * win for win in measure.means(records, names_of(row), "test", "win")] for row in ROWS}
    return dict(sorted(found.items(), key=lambda item: -np.mean(item[1])))


def table(records: common.Records) -> str:
    apart = common.differences(wins(records), "rloo")
    rows = [["method", "gold win rate, %", "minus RLOO, points", "seconds"]]
    for row, found in wins(records).items():
        difference = common.with_interval(apart[row]) if row in apart else ""
        seconds = [records.all[name].get("seconds", np.nan) for name in names_of(row)]  # none: the core was shared
        shown = "" if np.isnan(seconds).any() else f"{np.mean(seconds):.0f}"
        rows.append([ROWS[row].title, common.plus_minus(found), difference, shown])
    return common.markdown(rows)


def report(records: common.Records):
    if records.complete(NAMES, "README.md's table"):
        print(table(records))
        print("value.py minus TRL's PPO:", common.with_interval(common.differences(wins(records), "ppo")["value"]))
        common.insert(HERE / "README.md", {"peers": table(records)})


def main(
    names: tuple[str, ...] = tuple(ROWS),
    seeds: int | None = None,
    again: bool = False,
    trl0: str = "",
    trl1: str = "",
):
    """Runs, measurements and table.

    Args:
        names: which rows, by their names in this file
        seeds: at most so many of each row
        again: what has a record too; it is compared with the record, and nothing is written
        trl0: python of an environment with TRL 0.19
        trl1: python of an environment with TRL 1.x
    """
    pythons = {"": sys.executable, "trl0": trl0, "trl1": trl1}
    records, runs = common.Records(RECORDS, again), common.folder_of_runs("study", again)
    for row in names:
        python = pythons[ROWS[row].environment]
        if python or not any(records.needs(name, "test") for name in names_of(row)[:seeds]):
            make(records, row, python, runs, seeds)
        else:
            print(f"{row}: skipped, since --{ROWS[row].environment} is not given")
    report(records)


if __name__ == "__main__":
    tyro.cli(main)
