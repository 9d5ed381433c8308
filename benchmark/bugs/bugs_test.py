"""Tests of put_back.py: each change still applies, the page is theirs, and a few are put back, others each day.

python -m pytest -q benchmark/bugs
"""

import datetime
import os
import re
from pathlib import Path

import put_back
import pytest
from put_back import CHANGES, FILES, HERE, SECTIONS, changed, common, tables

from rloo_test import forkserver

SLOW = {"torchrun_trains", "plain_implementation"}  # tests of over 5 seconds


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_applies_and_its_test_is_there(name):
    test = CHANGES[name]["test"].partition(" and ")[0]
    file, text = changed(name)
    assert text != (common.ROOT / file).read_text() and compile(text, name, "exec")
    assert re.search(rf"^def test_\w*{test}\w*\(", (common.ROOT / FILES[name]).read_text(), re.MULTILINE)


def test_the_page_is_that_of_the_data():
    page = (HERE / "README.md").read_text()
    assert common.filled(page, {"bugs": tables()}) == page
    assert f"[{len(CHANGES)} bugs that trainers have had]" in (common.ROOT / "README.md").read_text()
    for row in (row for rows in SECTIONS.values() for row in rows):
        kinds = ({"note"}, change := {"old", "new", "test"}, change | {"tests"}, change | {"file", "tests"})
        assert row.keys() - {"name", "bug", "seen"} in kinds


def call(names: list[str], log: Path):
    """Puts bugs back, the first of which has no effect."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    CHANGES[names[0]]["new"] = CHANGES[names[0]]["old"]
    put_back.main(tuple(names), 2)


def begin(folder: Path):
    fast = [name for name in CHANGES if CHANGES[name]["test"] not in SLOW]
    first = 2 * datetime.date.today().toordinal()
    names = [fast[(first + i) % len(fast)] for i in range(2)]
    process = forkserver().Process(target=call, args=(names, folder / "log"))
    process.start()
    return process, names, (HERE / "README.md").read_bytes()


def test_some_bugs_others_each_day_are_caught_and_one_that_is_not_is_said(started):
    """One change becomes harmless. Only a call with all bugs writes the page."""
    folder, (process, names, page) = started
    process.join(200)
    said = (folder / "log").read_text()
    assert process.exitcode == 1 and said.endswith(f"not caught: {names[0]}\n"), said
    assert (HERE / "README.md").read_bytes() == page
