"""Puts bugs of other trainers back into rloo.py and its extensions, one at a time, and runs the test that must fail.

    python benchmark/bugs/put_back.py                          # all of changes.toml, and writes the page's tables
    python benchmark/bugs/put_back.py --rows dropout two-bos   # some, by name

Each goes into a copy of its file. Exits with an error unless all tests pass without bugs and each bug is caught.
"""

import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest
import tyro

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import common  # noqa: E402

SECTIONS: dict[str, list[dict]] = tomllib.loads((HERE / "changes.toml").read_text(encoding="utf-8"))
CHANGES = {row["name"]: row for rows in SECTIONS.values() for row in rows if "old" in row}
FILES = {name: row.get("tests", "rloo_test.py") for name, row in CHANGES.items()}  # name -> file of its test
UNCHANGED = {f"unchanged-{Path(file).name}": file for file in dict.fromkeys(FILES.values())}


def changed(name: str) -> tuple[str, str]:
    """The file of a bug and its text with the bug; that of rloo.py as it is for other names."""
    change = CHANGES.get(name, {})
    file = change.get("file", "rloo.py")
    text = (common.ROOT / file).read_text(encoding="utf-8")
    if not change:
        return file, text
    if text.count(change["old"]) != 1:
        raise ValueError(f"{name}: {change['old']!r} stands {text.count(change['old'])} times in {file}, not once")
    return file, text.replace(change["old"], change["new"])


def write_copy(folder: Path):
    """rloo.py, its tests and the extensions, beside links to what else is in benchmark/."""
    shutil.copytree(common.HERE / "extensions", folder / "benchmark" / "extensions")
    for file in ("rloo.py", "rloo_test.py", "benchmark/conftest.py"):
        shutil.copy(common.ROOT / file, folder / file)
    for path in common.HERE.iterdir():
        if path.name not in ("extensions", "conftest.py"):
            (folder / "benchmark" / path.name).symlink_to(path)


def begin(name: str, folder: Path) -> int:
    """Starts a bug's test, or those of all bugs in a file without any bug. Returns the process, whose exit status is
    pytest's."""
    write_copy(folder)
    file, text = changed(name)
    (folder / file).write_text(text, encoding="utf-8")
    tests = UNCHANGED.get(name) or FILES[name]
    words = [CHANGES[name]["test"]] if name in CHANGES else {CHANGES[x]["test"] for x in FILES if FILES[x] == tests}
    process = os.fork()
    if process:
        return process
    os.chdir(folder)
    os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    options = ["-q", "-x", "--assert=plain", "--basetemp", str(folder / "pytest-of-put-back")]
    os._exit(pytest.main([tests, "-k", " or ".join(f"({word})" for word in sorted(words)), *options]))


def put_back(names, jobs: int):
    """Tests bugs, `jobs` at a time. Yields name, the test that failed, if any, pytest's exit status and its output."""
    os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    import rloo_test  # noqa: F401  (what it imports is loaded before the forks; rloo.py itself, in each of them)

    del sys.modules["rloo"], sys.modules["rloo_test"]
    running = {}
    with tempfile.TemporaryDirectory() as top:
        for name in [*names, *[None] * jobs]:
            if len(running) == jobs or not name and running:
                process, status = os.wait()
                ended = running.pop(process)
                log = (Path(top) / ended / "log").read_text(encoding="utf-8", errors="replace")
                failed = re.search(r"^FAILED \S+_test.py::(\w+(\[.*?\])?)(?=$| - (?!Name|Attribute))", log, re.M)
                yield ended, failed[1] if failed else "", os.waitstatus_to_exitcode(status), log
            if name:
                running[begin(name, Path(top) / name)] = name


def tables() -> str:
    """The page's tables, by section."""
    text = f"**{len(CHANGES)} bugs are put back.**"
    for section, rows in SECTIONS.items():
        cells = [[row["bug"], row["seen"], row.get("note") or f"`{row['test']}`"] for row in rows]
        head = ["bug", "seen", "caught by" if any("old" in row for row in rows) else "what to know"]
        text += f"\n\n## {section}\n\n" + common.markdown([head, *cells]).replace(" | ", "|")
    return text


def main(rows: tuple[str, ...] = (), jobs: int = 2):
    """Puts bugs back. rows: names in changes.toml, none: all; jobs: tests at a time, on one thread each."""
    start, caught = time.time(), {}
    for name, failed, status, log in put_back(rows or (*UNCHANGED, *CHANGES), jobs):
        print(f"{name}: {failed or ('nothing fails' if status == 0 else log[-1500:])}", flush=True)
        if name in CHANGES:
            caught[name] = failed
        elif status:
            sys.exit(f"a test fails without any bug:\n{log[-3000:]}")
    missed = [name for name, failed in caught.items() if not failed]
    minutes = (time.time() - start) / 60
    print(f"{len(caught) - len(missed)} of {len(caught)} are caught, in {minutes:.1f} minutes")
    if not rows:
        common.insert(HERE / "README.md", {"bugs": tables()})
    sys.exit(f"not caught: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    tyro.cli(main)
