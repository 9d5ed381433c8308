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
            for key in [key for key in found if key not in ("made", "by_prompt", "by_prompt_2")]:
                print(f"{name}, {key}: recorded {self.get(name, {}).get(key)}, now {found[key]}", flush=True)
            return
        self[name] = {"name": name, **found}
        self[name].setdefault("made", provenance())
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self[name], ensure_ascii=False) + "\n")


def made_by(records: Sequence[dict]) -> str:
    """Returns a sentence about the dates and commits of records, oldest first."""
    made = sorted((record["made"]["date"], record["made"]["rloo.py"]) for record in records)
    dates = dict.fromkeys([made[0][0], made[-1][0]])
    commits = dict.fromkeys(commit for _, commit in made)
    return f"Records: {' to '.join(dates)}, rloo.py {', '.join(commits)}."


# ---- Errors that count seeds and held-out items ----------------------------------------------------------------------


def packed(grades: Sequence[float]) -> str | list[float]:
    """Returns a grade per item for a record: a digit each, the number of quarters, or numbers with three decimals."""
    quarters = [4 * grade for grade in grades]
    if set(quarters) <= {0, 1, 2, 3, 4}:
        return "".join(str(int(quarter)) for quarter in quarters)
    return [round(float(grade), 3) for grade in grades]


def unpacked(grades: str | list[float]) -> np.ndarray:
    return np.array([int(digit) / 4 for digit in grades] if isinstance(grades, str) else grades)


def t_quantile(freedom: float, outside: float) -> float:
    """Returns the t of Student's distribution beyond which a share `outside` lies, on both sides together.

    With t = √freedom · tan(angle) the density is proportional to cos(angle)^(freedom - 1), here summed over midpoints.
    """
    edges = np.linspace(0, math.pi / 2, 5_001)
    density = np.cos((edges[1:] + edges[:-1]) / 2) ** (freedom - 1)
    within = np.append(0, density.cumsum()) / density.sum()  # the share up to each edge
    return math.sqrt(freedom) * math.tan(np.interp(1 - outside, within, edges))


def error_and_freedom(*policies: np.ndarray, of_items: float | None = None) -> tuple[float, float]:
    """Returns the standard error of a policy's mean grade, or of the difference of two means, for other seeds and other
    items, with its degrees of freedom. policies: grades (seeds, items) of one or two policies, of the same items.

    A grade is the mean + an effect of the seed + an effect of the item + chance. Each policy has its own seeds, but the
    items are common, so a difference is taken item by item. The variance of means over seeds and that of means over
    items both contain chance, which is subtracted once. Freedom is Satterthwaite's. A single seed has no spread, so
    that it stands for itself alone.

    of_items: the items' part of the variance, for policies of which only means (seeds, 1) are known."""
    of_seeds, chance, freedom = 0.0, 0.0, 0.0  # variances; last the sum of variance² / its degrees of freedom
    for grades in policies:
        seeds, items = grades.shape
        if seeds > 1:
            part = grades.mean(1).var(ddof=1) / seeds
            of_seeds += part
            freedom += part**2 / (seeds - 1)
            rest = grades - grades.mean(1, keepdims=True) - grades.mean(0) + grades.mean()
            chance += (rest**2).sum() / max(1, (seeds - 1) * (items - 1)) / (seeds * items)
    if of_items is None:
        by_item = policies[0].mean(0) - (policies[1].mean(0) if len(policies) == 2 else 0)
        of_items = by_item.var(ddof=1) / len(by_item)
        freedom += of_items**2 / (len(by_item) - 1)
    variance = max(of_seeds + of_items - chance, of_seeds, of_items)
    return math.sqrt(variance), max(1.0, variance**2 / freedom) if freedom else math.inf


def mean_and_error(grades: Sequence[Sequence[float]], by_item: np.ndarray | None = None) -> tuple[float, float]:
    """Returns the mean and standard error of a policy's grade. grades: mean and standard error over items, for each
    seed. Without by_item (seeds, items), chance is counted twice and the error is a little too large."""
    means, errors = np.transpose(grades)
    if by_item is not None:
        return float(means.mean()), error_and_freedom(by_item)[0]
    return float(means.mean()), error_and_freedom(means[:, None], of_items=float(np.mean(errors**2)))[0]


def difference(ours: Sequence, theirs: Sequence, of: int = 1, by_item: Sequence[np.ndarray] | None = None):
    """Returns our mean minus theirs and the ends of its 95% interval. With `of` intervals in a table, all of them hold
    together with 95% (Bonferroni). ours, theirs: mean and standard error over items, for each seed; by_item: grades
    (seeds, items) of both. Without by_item items are not paired, and the interval is wider than it need be."""
    if by_item is None:
        means, errors = zip(*(np.transpose(grades) for grades in (ours, theirs)))
        of_items = float(sum(np.mean(error**2) for error in errors))
        error, freedom = error_and_freedom(*(mean[:, None] for mean in means), of_items=of_items)
    else:
        means = [grades.mean(1) for grades in by_item]  # of the items that both have
        error, freedom = error_and_freedom(*by_item)
    gap = float(means[0].mean() - means[1].mean())
    half = t_quantile(min(freedom, 1e4), 0.05 / of) * error
    return gap, gap - half, gap + half


# ---- Tables ----------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table whose head is the first row."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])
