"""Tests of throughput.py: it measures a tiny model and goes on where it was ended; ratios are of one round."""

import importlib.util
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import throughput
from throughput import common

HERE = Path(__file__).resolve().parent
SMALL = {"vocabulary": 512, "layers": 2, "width": 64, "heads": 4, "prompts": 2, "prompt_tokens": (4, 8), "k": 2, "R": 6}
TINY = throughput.Workload(**SMALL, groups=((8, 2),), lengths=(3, 4))
PAGE = "".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in ("about", "speed", "length", "memory"))


def test_a_tiny_model_is_measured_and_a_run_that_was_ended_goes_on(tmp_path, capsys):
    records = common.Records(tmp_path / "throughput.json")
    throughput.measure(TINY, records, 1, [], "cpu")
    lanes = 3 + 2 * 2 + 2
    assert len(records.all) == 1 + lanes
    assert all(record["seconds"] > 0 for name, record in records.all.items() if name != "about")
    assert all(0.1 < one["peak_gb"] < 2 for (one,) in throughput.lanes_of(records, "update").values())

    del records.all["decode: generate, static cache: 1"]
    records.path.write_text(json.dumps(records.all))
    capsys.readouterr()
    throughput.measure(TINY, common.Records(records.path), 1, [], "cpu")
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith(": 1")]
    assert said == ["decode: generate, static cache: 1"]
    if importlib.util.find_spec("matplotlib"):
        (tmp_path / "README.md").write_text(PAGE)
        throughput.report(TINY, tmp_path)
        assert (tmp_path / "length.png").is_file()
        assert "| update: rloo.py, plain rows | 1 |" in (tmp_path / "README.md").read_text()


@pytest.fixture
def records(tmp_path):
    """Of two rounds, the second in a slow minute; a third has only begun."""
    records = common.Records(tmp_path / "x.json")
    seconds = {"rloo.py, group rows": (1, 10, 2), "TRL 0.19.1": (3, 40), "rloo.py, plain rows": (2, 10)}
    for lane, times in seconds.items():
        for number, time in enumerate(times, 1):
            records.add(f"update: {lane}: {number}", seconds=time, peak_gb=number)
    return records


def test_ratios_are_of_one_round_and_the_first_line_is_ours(records):
    lines = throughput.table(records).splitlines()[2:]
    assert lines == [
        "| update: rloo.py, group rows | 3 | 2.00 | 3.0 | 1 |",
        "| update: rloo.py, plain rows | 2 | 6.00 | 2.0 | 1.50 (1.00 to 2.00) |",
        "| update: TRL 0.19.1 | 2 | 21.50 | 2.0 | 3.50 (3.00 to 4.00) |",
    ]


def test_records_of_another_place_are_replaced(tmp_path, monkeypatch):
    records = common.Records(tmp_path / "x.json")
    records.add("about", where="another machine")
    records.add("decode: generate: 1", seconds=1)
    monkeypatch.setattr(throughput, "write_inputs", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        throughput.measure(TINY, records, 1, [], "cpu")
    assert common.Records(records.path).all == {"about": {"where": throughput.where()}}


def test_the_page_has_the_tables_of_the_records():
    page = (HERE / "README.md").read_text(encoding="utf-8")
    records = common.Records(HERE / "throughput.json")
    assert common.filled(page, throughput.tables(records)) == page
