"""What every benchmark does: records, runs with a log, statistics over seeds, tables in Markdown, pictures.

    python benchmark/common.py     # redraws every page from its records: tables, pictures, and the table of README.md

The rule of intervals is in README.md, "Conventions". This file needs numpy alone, and matplotlib for pictures, so that
environments with TRL or vLLM can import it.
"""

import fcntl
import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TASK = HERE / "mini_tldr"  # data, sft/, reward/
# Each module has report(), which redraws its page; headline(), if it has one, gives rows of README.md's table.
REPORTS = ("study/reach", "study/peers", "smollm/report", "speed/throughput", "trl/parity", "gradient/exact")


# ---- Records and runs ------------------------------------------------------------------------------------------------


class Records:
    """A JSON file of name -> record, written anew, under another name first, at each change. Several processes may
    write to it."""

    def __init__(self, path: Path):
        self.path = path
        self.all: dict[str, dict] = {}
        self.read()

    def read(self):
        if self.path.is_file():
            self.all = json.loads(self.path.read_text(encoding="utf-8"))

    def add(self, name: str, **found):
        """Adds entries to a record."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.parent, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.read()
        self.all[name] = self.all.get(name, {}) | found
        lines = [f"{json.dumps(x)}: {json.dumps(self.all[x])}" for x in sorted(self.all)]
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        unfinished.replace(self.path)
        os.close(lock)

    def value(self, name: str, *keys):
        """An entry of a record, None where there is none."""
        found = self.all.get(name)
        for key in keys:
            found = None if found is None else found.get(key)
        return found


def run_logged(command: Sequence, log: Path):
    """Runs a command in the top folder, on one thread, with its output at the end of a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    words, one_thread = [str(word) for word in command], os.environ | {"OMP_NUM_THREADS": "1"}
    with open(log, "a", encoding="utf-8") as out:
        subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=one_thread, check=True)


def read_lines(path: Path) -> list[dict]:
    """The objects of a file of JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- Statistics over seeds -------------------------------------------------------------------------------------------


def mean_and_error(values) -> tuple[float, float]:
    """Mean and its standard error, NaN for one value."""
    values = np.asarray(values, float)
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)


def two_sided_p(t: float, freedom: float) -> float:
    """P(|T| > |t|) of Student's t, by the integral of cos^(freedom - 1) from atan(|t| / √freedom) to π/2."""
    edge = math.atan2(abs(t), math.sqrt(freedom))
    midpoints = (np.arange(2_000) + 0.5) / 2_000
    tail = (np.cos(edge + (math.pi / 2 - edge) * midpoints) ** (freedom - 1)).mean() * (math.pi / 2 - edge)
    return float(tail / ((np.cos(math.pi / 2 * midpoints) ** (freedom - 1)).mean() * math.pi / 2))


def t_quantile(freedom: float, outside: float = 0.05) -> float:
    """The t beyond which a share `outside` lies, on both sides together."""
    low, high = 0.0, 1e4
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, freedom) > outside else (low, middle)
    return high


class Difference(NamedTuple):
    mean: float
    low: float
    high: float
    p: float
    holm: float
    """p after the correction for all rows of the table"""

    @property
    def verdict(self) -> str:
        return "not told apart" if not self.holm < 0.05 else "ahead" if self.mean > 0 else "behind"


def error_and_freedom(ours, theirs, pool) -> tuple[float, float]:
    """Standard error of a difference of means, and its degrees of freedom."""
    if min(len(ours), len(theirs)) >= 5:  # Welch's
        parts = [np.var(x, ddof=1) / len(x) for x in (ours, theirs)]
        spread = sum(part**2 / (len(x) - 1) for part, x in zip(parts, (ours, theirs)))
        return math.sqrt(sum(parts)), sum(parts) ** 2 / spread if spread else 1.0
    rows = [x for x in pool if len(x) > 1]
    freedom = sum(len(x) - 1 for x in rows)
    variance = sum((len(x) - 1) * np.var(x, ddof=1) for x in rows) / freedom if freedom else math.nan
    return math.sqrt(variance * (1 / len(ours) + 1 / len(theirs))), max(freedom, 1)


def difference(ours, theirs, pool: Sequence[Sequence[float]] = ()) -> Difference:
    """Of two means over seeds; `pool` has the values of all rows of the table."""
    error, freedom = error_and_freedom(ours, theirs, pool or (ours, theirs))
    mean = float(np.mean(ours) - np.mean(theirs))
    half = t_quantile(freedom) * error
    p = two_sided_p(mean / error if error else math.copysign(math.inf, mean), freedom)
    return Difference(mean, mean - half, mean + half, p, p)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction of p values for each other."""
    adjusted, largest = [math.nan] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def differences(rows: dict[str, Sequence[float]], base: str) -> dict[str, Difference]:
    """Each row of a table, its values one for each seed, less the row `base`; corrected for each other."""
    found = {name: difference(x, rows[base], list(rows.values())) for name, x in rows.items() if name != base}
    return {name: x._replace(holm=p) for (name, x), p in zip(found.items(), holm([x.p for x in found.values()]))}


# ---- Markdown and pictures -------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def plus_minus(values, factor: float = 1, decimals: int = 1) -> str:
    """Mean ± standard error over seeds, without an error for fewer than three; empty without any."""
    if not len(values):
        return ""
    mean, error = mean_and_error(values)
    text = f"{factor * mean:.{decimals}f}"
    return text if len(values) < 3 else f"{text} ± {factor * error:.{decimals}f}"


def listed(values, factor: float = 1, decimals: int = 1) -> str:
    """Each seed's value, where seeds go such different ways that their mean is of none of them."""
    return ", ".join(f"{factor * value:.{decimals}f}" for value in values)


def with_interval(found: Difference, decimals: int = 1) -> str:
    return f"{found.mean:+.{decimals}f} [{found.low:+.{decimals}f}, {found.high:+.{decimals}f}]"


def filled(text: str, tables: dict[str, str]) -> str:
    """A page's text with each table between <!-- name --> and <!-- end of name -->."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return text


def insert(page: Path, tables: dict[str, str]):
    """Writes tables into a page."""
    page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def canvas(columns: int, width: float, height: float, **options):
    """A figure and its axes (1, columns), in the style of all pictures. Needs matplotlib."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    style = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 10, "legend.frameon": False}
    plt.rcParams.update(style)
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False, **options)


def save(figure, path: Path):
    figure.savefig(path, dpi=110)
    figure.clear()
    print(f"picture: {path}")


# ---- Every page ------------------------------------------------------------------------------------------------------


def modules() -> list:
    """Those of REPORTS."""
    sys.path[:0] = [str((HERE / name).parent) for name in REPORTS]
    return [importlib.import_module(Path(name).name) for name in REPORTS]


def headline(rooms: Sequence) -> str:
    """The table of README.md: each number once, beside the command that makes it."""
    rows = [row for room in rooms if hasattr(room, "headline") for row in room.headline()]
    return markdown([["result", "number", "seeds", "command"], *rows])


if __name__ == "__main__":
    rooms = modules()
    for room in rooms:
        room.report()
    insert(HERE / "README.md", {"headline": headline(rooms)})
