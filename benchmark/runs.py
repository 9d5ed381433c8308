"""What every benchmark does: runs, their records, means and intervals over seeds, tables in Markdown.

A record is a line of records/<study>.jsonl: a run's name, its command, what was measured, and `made`: the commit of
rloo.py, versions, machine and date. Of two lines with one name the later one counts. This file needs numpy alone, so
that environments with TRL can import it.
"""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RUNS = ROOT / "runs"  # may be deleted
sys.path.insert(0, str(ROOT))


# ---- Runs and records ------------------------------------------------------------------------------------------------


def run(command: Sequence, folder: Path, **environment: str) -> Path:
    """Runs a command with --output_dir `folder` from the top folder, on one thread unless told otherwise. Its output
    goes to <folder>.log. A complete run is not repeated; a stopped run continues if the command has --resume."""
    if (folder / "done").is_file():
        print(f"{folder} is complete, by rloo.py {made(folder)['rloo.py']}; delete it to repeat the run", flush=True)
        return folder
    words = [*map(str, command), "--output_dir", str(folder)]
    print(f"running {folder}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "a", encoding="utf-8") as log:
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | environment
        subprocess.run(words, check=True, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
    (folder / "done").write_text(json.dumps(provenance()))
    return folder


def made(folder: Path) -> dict[str, str]:
    """Returns the provenance of a complete run."""
    return json.loads((folder / "done").read_text())


def lines(file: Path) -> list[dict]:
    """Returns the objects of a file of JSON lines, [] if there is no such file."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def seconds(update: dict) -> float:
    """Returns the seconds of an update, a line of metrics.jsonl, without loading, evaluating and saving."""
    return sum(value for name, value in update.items() if name.startswith("time/"))


def provenance() -> dict[str, str]:
    """Returns what makes a record: commit of rloo.py, versions, machine and date."""

    def git(*words):
        command = ["git", *words, "--", "rloo.py"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    commit = git("log", "-1", "--format=%h") or "unknown"
    if git("status", "--porcelain"):
        commit += ", changed"
    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {"rloo.py": commit, **versions, "machine": machine, "date": datetime.date.today().isoformat()}


class Records(dict):
    """Name -> record of records/<study>.jsonl. With `again`, `add` compares with the record and writes nothing. `made`
    may be given, for a run that was made before."""

    def __init__(self, study: str, again: bool = False):
        self.file = HERE / "records" / f"{study}.jsonl"
        self.again = again
        super().__init__((record["name"], record) for record in lines(self.file))

    def add(self, name: str, **found):
        if self.again:
            for key in [key for key in found if key != "made"]:
                print(f"{name}, {key}: recorded {self.get(name, {}).get(key)}, now {found[key]}", flush=True)
            return
        self[name] = {"name": name, **found}
        self[name].setdefault("made", provenance())
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self[name], ensure_ascii=False) + "\n")


def made_by(records: Sequence[dict]) -> str:
    """Returns a sentence about the commits, dates and old gradings of records, most frequent first."""
    kinds = Counter()
    for made in (record["made"] for record in records):
        graded = f", {made['graded']}" if "graded" in made else ""
        kinds[f"rloo.py {made['rloo.py']}, {made['date']}{graded}"] += 1
    most_first = sorted(kinds, key=lambda kind: (-kinds[kind], kind))
    return "Records: " + "; ".join(f"{kinds[kind]} of {kind}" for kind in most_first) + "."


# ---- Means and intervals over seeds ----------------------------------------------------------------------------------


def mean_and_error(grades: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns the mean and standard error of a grade over seeds, or with fewer than three seeds over prompts. grades:
    mean and standard error over prompts, for each seed."""
    means, errors = np.transpose(grades)
    error = means.std(ddof=1) / len(means) ** 0.5 if len(means) > 2 else errors.mean()
    return float(means.mean()), float(error)


def t_quantile(freedom: float, outside: float) -> float:
    """Returns the t of Student's distribution beyond which a share `outside` lies, on both sides together.

    With t = √freedom · tan(angle) the density is proportional to cos(angle)^(freedom - 1), here summed over midpoints.
    """
    edges = np.linspace(0, math.pi / 2, 5_001)
    density = np.cos((edges[1:] + edges[:-1]) / 2) ** (freedom - 1)
    within = np.append(0, density.cumsum()) / density.sum()  # the share up to each edge
    return math.sqrt(freedom) * math.tan(np.interp(1 - outside, within, edges))


def interval(values: Sequence[float], of: int = 1) -> tuple[float, float, float]:
    """Returns the mean of two or more values and the ends of its 95% interval (Student's t). With `of` intervals in a
    table, all of them hold together with 95% (Bonferroni)."""
    mean = float(np.mean(values))
    half = t_quantile(len(values) - 1, 0.05 / of) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return mean, mean - half, mean + half


def difference(ours: Sequence[float], theirs: Sequence[float], of: int = 1) -> tuple[float, float, float]:
    """Returns the difference of two means over seeds and the ends of its 95% interval (Welch's t), as `interval`."""
    parts = [np.var(x, ddof=1) / len(x) for x in (ours, theirs)]
    freedom = sum(parts) ** 2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (ours, theirs)))
    mean = float(np.mean(ours) - np.mean(theirs))
    half = t_quantile(freedom, 0.05 / of) * math.sqrt(sum(parts))
    return mean, mean - half, mean + half


# ---- Tables ----------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table whose head is the first row."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
