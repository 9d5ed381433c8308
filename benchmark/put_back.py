"""Would the tests notice the bugs of other trainers? Puts each bug of bugs.toml into a copy of the code, by a change of
a few words, and runs the test that must pass before and fail after.

    python benchmark/put_back.py                                    # all: 10 minutes on two cores
    python benchmark/put_back.py dropout two-bos                    # some, by name
    python benchmark/put_back.py benchmark/records/planted.toml     # mistakes of a file: all of rloo_test.py for each

The status is 1 unless all bugs are caught.
"""

import os
import re
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


def changed(bug: dict) -> str:
    """Returns the text of a bug's file with the bug."""
    text = (runs.ROOT / file_of(bug)).read_text(encoding="utf-8")
    count = text.count(bug["old"])
    if count != 1:
        raise ValueError(f"{bug['name']}: {bug['old']!r} stands {count} times in {file_of(bug)}, not once")
    return text.replace(bug["old"], bug["new"])


def caught(bug: dict) -> bool:
    """Returns whether the bug's test passes in a copy of the repository, and fails there once the bug is put back."""
    tests = ["-m", "pytest", "-qx", "-p", "no:cacheprovider", bug.get("tests", "rloo_test.py")]
    tests += ["-k", bug["test"]] if "test" in bug else []
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "copy")
        shutil.copytree(runs.ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs", "*.png"))
        # Without the bug, and with it. A file that cannot be imported has another status.
        for status in (0, 1) if "test" in bug else (1,):
            if status == 1:
                (folder / file_of(bug)).write_text(changed(bug), encoding="utf-8")
            done = subprocess.run([sys.executable, *tests], cwd=folder, capture_output=True, text=True)
            if done.returncode != status:
                print(f"{bug['name']}: NOT CAUGHT, status {done.returncode} instead of {status}", flush=True)
                if "test" in bug:
                    print(done.stdout[-1500:])
                return False
    by = "" if "test" in bug else " by " + re.search("^(FAILED|ERROR) .*::(.*?)( |$)", done.stdout, re.MULTILINE)[2]
    print(f"{bug['name']}: caught{by}", flush=True)
    return True


def main(names: list[str]):
    os.environ["OMP_NUM_THREADS"] = "1"
    if names and names[0].endswith(".toml"):
        bugs = tomllib.loads(Path(names[0]).read_text(encoding="utf-8"))["planted"]
        tests = {bug.get("tests", "rloo_test.py") for bug in bugs}
        subprocess.run([sys.executable, "-m", "pytest", "-qx", *tests], cwd=runs.ROOT, check=True)  # must pass before
    else:
        bugs = [BUGS[name] for name in names or BUGS]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(caught, bugs))
    print(f"{sum(found)} of {len(found)} are caught")
    sys.exit(not all(found))


if __name__ == "__main__":
    main(sys.argv[1:])
