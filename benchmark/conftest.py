"""What the tests of this folder share: no network, rloo.py as it was before each test, and scripts in processes."""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

# It keeps to one thread and off the network; `tiny` is a fixture.
from rloo_test import forkserver, rloo, tiny, write_rows  # noqa: E402, F401

MINI = ROOT / "benchmark" / "mini_tldr"


@pytest.fixture(autouse=True)
def rloo_as_it_was():
    before = dict(vars(rloo))
    yield
    vars(rloo).update(before)


def start_script(words, log: Path):
    """Starts `python words` in the root folder, in a process that has imported rloo.py already."""
    process = forkserver().Process(target=script, args=([*map(str, words)], log, dict(os.environ)))
    process.start()
    return process


def script(words, log, environment):
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
