"""Tests of choices.py: small versions are measured, and the page has the tables of the records."""

import choices
import pytest
from choices import common


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(choices, "ROUNDS", 2)
    monkeypatch.setattr(choices, "SHAPES", [(12, 4, 2)])
    monkeypatch.setitem(choices.LLAMA, "hidden_size", 64)
    monkeypatch.setitem(choices.LLAMA, "intermediate_size", 64)
    monkeypatch.setitem(choices.LANES, "lengths", (130,))


def test_both_layouts_and_both_ways_are_measured():
    times = choices.measure_shapes()["shapes"]["12 4 2"]
    assert times.keys() == {"forward_and_backward", "forward"}
    assert all(0 < x < 10 for layouts in times.values() for both in layouts.values() for x in both)
    times = choices.measure_lanes()["lanes"]["130"]
    assert len(times["leave"]) == len(times["stay"]) == 2 and min(times["leave"] + times["stay"]) > 0


def test_a_ratio_is_of_two_times_of_a_round():
    assert choices.ratios({"plain": [2.0, 9.0, 4.0], "group": [1.0, 3.0, 4.0]}, "plain", "group") == (
        "2.00 (1.00 to 3.00)"
    )


def test_the_page_has_the_tables_of_the_records():
    page = (choices.HERE / "README.md").read_text(encoding="utf-8")
    tables = choices.tables(common.Records(choices.RECORDS))
    assert common.filled(page, tables) == page
