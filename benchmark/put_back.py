"""Would the tests notice the bugs of other trainers? Puts each bug of bugs.toml into a copy of the code, by a change of
a few words, and runs the test that must fail.

    python benchmark/put_back.py                    # all: 6 minutes on two cores
    python benchmark/put_back.py dropout two-bos    # some, by name

Before that, the same tests must pass without any bug. The status is 1 unless all bugs are caught.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import runs

SECTIONS = tomllib.loads((runs.HERE / "bugs.toml").read_text(encoding="utf-8"))
BUGS = {row["name"]: row for rows in SECTIONS.values() for row in rows if "old" in row}


def file_of(bug: dict) -> str:
    return bug.get("file", "rloo.py")


def tests_of(bug: dict) -> str:
    return bug.get("tests", "rloo_test.py")


def changed(bug: dict) -> str:
    """Returns the text of a bug's file with the bug."""
    text = (runs.ROOT / file_of(bug)).read_text(encoding="utf-8")
    count = text.count(bug["old"])
    if count != 1:
        raise ValueError(f"{bug['name']}: {bug['old']!r} stands {count} times in {file_of(bug)}, not once")
    return text.replace(bug["old"], bug["new"])


def run_tests(tests: str, words: str, bug: dict | None = None) -> subprocess.CompletedProcess:
    """Runs the tests that `pytest -k words` finds, in a copy of the repository with the bug, if there is one."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "copy")
        shutil.copytree(runs.ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "*.png"))
        if bug:
            (folder / file_of(bug)).write_text(changed(bug), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", tests, "-k", words]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=one_thread)


def caught(bug: dict) -> bool:
    """Puts a bug back; returns whether its test fails."""
    done = run_tests(tests_of(bug), bug["test"], bug)
    # An ERROR is a fixture that fails; a file that cannot be imported has another status.
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    fails = done.returncode == 1 and bool(failed)
    print(f"{bug['name']}: {failed[0][:150] if fails else f'NOT CAUGHT {done.stdout[-1500:]}'}", flush=True)
    return fails


def main(names: list[str]):
    bugs = [BUGS[name] for name in names or BUGS]
    for tests in {tests_of(bug): None for bug in bugs}:
        words = sorted({f"({bug['test']})" for bug in bugs if tests_of(bug) == tests})
        done = run_tests(tests, " or ".join(words))
        if done.returncode:
            sys.exit(f"a test fails without any bug:\n{done.stdout[-3000:]}")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(caught, bugs))
    print(f"{sum(found)} of {len(bugs)} are caught")
    sys.exit(not all(found))


if __name__ == "__main__":
    main(sys.argv[1:])
