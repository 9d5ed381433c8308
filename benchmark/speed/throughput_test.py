"""Tests of throughput.py: it measures a tiny model; ratios are of one round."""

import importlib.util
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import throughput
from throughput import common

HERE = Path(__file__).resolve().parent
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
TINY = {"SHAPE": SMALL, "VOCABULARY": 512, "PROMPTS": 2, "PROMPT_TOKENS": (4, 8), "K": 2, "T": 6, "ROUNDS": 1}
TINY |= {"GROUPS": ((8, 2),), "LENGTHS": (3, 4)}
PAGE = "".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in ("about", "speed", "memory"))


def test_a_tiny_model_is_measured(tmp_path, monkeypatch):
    records = common.Records(tmp_path / "throughput.json")
    for name, value in (TINY | {"HERE": tmp_path, "RECORDS": records.path}).items():
        monkeypatch.setattr(throughput, name, value)
    trainers = throughput.trainers
    monkeypatch.setattr(throughput, "trainers", lambda *inputs: dict([*trainers(*inputs).items()][:1]))
    throughput.measure(records, [])
    lanes = 3 + 2 * 2 + 1
    assert len(records.all) == 1 + lanes
    assert all(record["seconds"] > 0 for name, record in records.all.items() if name != "about")
    assert all(0.1 < one["peak_gb"] < 2 for (one,) in throughput.lanes_of(records, "update").values())
    if importlib.util.find_spec("matplotlib"):
        (tmp_path / "README.md").write_text(PAGE)
        throughput.report()
        assert (tmp_path / "length.png").is_file()
        assert "| update: rloo.py, group rows | 1 |" in (tmp_path / "README.md").read_text()


@pytest.fixture
def records(tmp_path):
    """Of two rounds, the second in a slow minute."""
    records = common.Records(tmp_path / "x.json")
    seconds = {"rloo.py, group rows": (1, 10), "TRL 0.19.1": (3, 40), "rloo.py, plain rows": (2, 10)}
    for lane, times in seconds.items():
        for number, time in enumerate(times, 1):
            records.add(f"update: {lane}: {number}", seconds=time, peak_gb=number)
    return records


def test_ratios_are_of_one_round_and_the_first_line_is_ours(records):
    lines = throughput.table(records).splitlines()[2:]
    assert lines == [
        "| update: rloo.py, group rows | 2 | 5.50 | 2.0 | 1 |",
        "| update: rloo.py, plain rows | 2 | 6.00 | 2.0 | 1.50 (1.00 to 2.00) |",
        "| update: TRL 0.19.1 | 2 | 21.50 | 2.0 | 3.50 (3.00 to 4.00) |",
    ]


def test_the_page_has_the_tables_of_the_records():
    page = (HERE / "README.md").read_text(encoding="utf-8")
    records = common.Records(throughput.RECORDS)
    assert common.filled(page, throughput.tables(records)) == page
