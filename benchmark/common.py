"""What every benchmark does: records, runs with a log, statistics over seeds, tables in Markdown, pictures.

The rules of records and of intervals are in README.md, "Conventions". This file needs numpy alone, and matplotlib for
pictures, so that environments with TRL or vLLM can import it.
"""

import datetime
import fcntl
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TASK = HERE / "mini_tldr"  # data, sft/, reward/
LEAST_SEEDS = 3  # on each side of a comparison, and for a standard error


# ---- Records and runs ------------------------------------------------------------------------------------------------


def git(*words: str) -> str:
    """What git says about this repository; empty where there is no git or no history."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def provenance() -> dict:
    """What made a record: the last commit of rloo.py, versions, machine and date."""
    commit = git("log", "-1", "--format=%h", "--", "rloo.py") or "unknown"
    versions = {}
    for package in ("torch", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return {
        "rloo.py": f"{commit}, changed" if git("status", "--porcelain", "--", "rloo.py") else commit,
        "python": platform.python_version(),
        **versions,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
    }


class Records:
    """A JSON file of name -> record, written anew, under another name first, at each change. Several processes may
    write to it. `made` of a record is the provenance of what was added last.

    With `again` nothing is written: what would be added is compared with what is there."""

    def __init__(self, path: Path, again: bool = False):
        self.path, self.again = path, again
        self.all: dict[str, dict] = {}
        self.told: set[str] = set()  # names of records that are not made anew, once that was said
        self.added = False  # whether anything was made and written
        self.read()

    def read(self):
        if self.path.is_file():
            self.all = json.loads(self.path.read_text(encoding="utf-8"))

    def needs(self, name: str, *keys) -> bool:
        """Whether an entry of a record is to be made: it is not there, or all is made again. If not, says by which
        rloo.py it was made."""
        if self.again or self.value(name, *keys) is None:
            return True
        made = self.all[name].get("made", {"rloo.py": "of an earlier commit", "date": "without a date"})
        if name not in self.told:
            print(f"{name}: recorded with rloo.py {made['rloo.py']}, {made['date']}; --again makes and compares it")
        self.told.add(name)
        return False

    def add(self, name: str, **found):
        """Adds entries to a record."""
        if self.again:
            print("\n".join(comparison(name, self.all.get(name, {}), found)), flush=True)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.parent, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.read()
        self.all[name] = self.all.get(name, {}) | found | {"made": provenance()}
        lines = [f"{json.dumps(x)}: {json.dumps(self.all[x])}" for x in sorted(self.all)]
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        unfinished.replace(self.path)
        self.added = True
        os.close(lock)

    def value(self, name: str, *keys):
        """An entry of a record, None where there is none."""
        found = self.all.get(name)
        for key in keys:
            found = None if found is None else found.get(key)
        return found

    def complete(self, names: Sequence[str], what: str) -> bool:
        """Whether all records are there that `what` (tables, a picture) is drawn from, and these may be
        written."""
        missing = [name for name in names if name not in self.all]
        if missing:
            print(f"{what}: left as they are, since there is no record of {', '.join(missing)}")
        return not self.again and not missing


def comparison(title: str, recorded: dict, found: dict) -> list[str]:
    """A line for each entry that was found: "run 1, win: recorded 63.8, now 63.6"."""
    lines = []
    for key, now in found.items():
        before = recorded.get(key)
        if isinstance(now, dict):
            lines += comparison(f"{title}, {key}", before or {}, now)
        else:
            lines.append(f"{title}, {key}: " + ("as recorded" if now == before else f"recorded {before}, now {now}"))
    return lines


def folder_of_runs(room: str, again: bool = False) -> Path:
    """Where the runs of a room are kept. Those made again have another folder, which is emptied first."""
    if not again:
        return ROOT / "runs" / room
    folder = ROOT / "runs" / "again" / room
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def require(**packages: str):
    """Ends the script if a module is not installed. packages: module -> what pip calls it."""
    specs = {name: importlib.util.find_spec(module) for module, name in packages.items()}
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]  # no folder of that name
    if missing:
        sys.exit(f"{Path(sys.argv[0]).name} needs more packages: {sys.executable} -m pip install {' '.join(missing)}")


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


def difference(ours: Sequence[float], theirs: Sequence[float], outside: float = 0.05) -> Difference:
    """Of two means over seeds, with Welch's interval, which a share `outside` of all intervals misses."""
    parts = [np.var(x, ddof=1) / len(x) for x in (ours, theirs)]
    spread = sum(part**2 / (len(x) - 1) for part, x in zip(parts, (ours, theirs)))
    freedom = sum(parts) ** 2 / spread if spread else 1.0
    mean, half = float(np.mean(ours) - np.mean(theirs)), t_quantile(freedom, outside) * math.sqrt(sum(parts))
    return Difference(mean, mean - half, mean + half)


def differences(rows: dict[str, Sequence[float]], base: str) -> dict[str, Difference]:
    """Each row of a table with at least three values, one for each seed, less the row `base`. The intervals hold for
    all these rows together (Bonferroni)."""
    compared = {name: x for name, x in rows.items() if name != base and min(len(x), len(rows[base])) >= LEAST_SEEDS}
    return {name: difference(x, rows[base], 0.05 / len(compared)) for name, x in compared.items()}


# ---- Markdown and pictures -------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def plus_minus(values, factor: float = 1, decimals: int = 1) -> str:
    """Mean ± standard error over seeds, without an error for fewer than LEAST_SEEDS; empty without any."""
    if not len(values):
        return ""
    mean, error = mean_and_error(values)
    text = f"{factor * mean:.{decimals}f}"
    return text if len(values) < LEAST_SEEDS else f"{text} ± {factor * error:.{decimals}f}"


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
    """A figure and its axes (1, columns), in the style of all pictures."""
    require(matplotlib="matplotlib")
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    style = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 10, "legend.frameon": False}
    plt.rcParams.update(style)
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False, **options)


def save(figure, path: Path):
    figure.savefig(path, dpi=110)
    figure.clear()
    print(f"picture: {path}")
