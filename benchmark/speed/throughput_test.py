"""Tests of throughput.py: it measures tiny models; ratios are of one round; records are replaced all or none."""

import sys

import throughput
from throughput import common

import rloo

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
TINY = {"SHAPE": SMALL, "VOCABULARY": 512, "PROMPTS": 2, "PROMPT_TOKENS": (4, 9), "K": 2, "T": 6, "ROUNDS": 2}


def test_a_tiny_model_is_measured(tmp_path, monkeypatch):
    for name, value in TINY.items():
        monkeypatch.setattr(throughput, name, value)
    throughput.write_inputs(tmp_path)
    commands = throughput.commands_of("update", tmp_path, [])
    assert [*commands] == ["rloo.py, group rows", "rloo.py, plain rows"]
    python, script, *words = map(str, commands["rloo.py, group rows"])
    assert (python, script) == (sys.executable, "rloo.py")
    rloo.command_line([*words, "--output_dir", str(tmp_path / "out")])  # what the command does, but in this process
    _, second = common.read_lines(tmp_path / "out" / "metrics.jsonl")
    copies = f"import shutil, sys; shutil.copytree({str(tmp_path / 'out')!r}, sys.argv[2])"
    found = throughput.run([python, "-c", copies], tmp_path)
    (update,) = found["updates"]
    assert update["time/rollout"] == second["time/rollout"] and 0.1 < found["peak_gb"] < 20
    assert update["seconds"] == sum(second[f"time/{part}"] for part in ("rollout", "reference", "reward", "train"))


def measure(path, monkeypatch, lanes: dict[str, list[float]], again=False):
    """Two rounds of lanes whose times are given, the second in a slow minute."""
    times = {name: iter(seconds) for name, seconds in lanes.items()}
    found = {name: lambda name=name: {"updates": [{"seconds": next(times[name])}], "peak_gb": 2.0} for name in lanes}
    monkeypatch.setattr(throughput, "ROUNDS", 2)
    monkeypatch.setattr(throughput, "write_inputs", lambda folder: None)
    monkeypatch.setattr(throughput, "commands_of", lambda part, folder, pythons: {name: name for name in lanes})
    monkeypatch.setattr(throughput, "run", lambda name, folder: found[name]())
    records = common.Records(path, again)
    throughput.measure(records, "update", [])
    return records


def test_ratios_are_of_one_round(tmp_path, monkeypatch):
    lanes = {"rloo.py, group rows": [1.0, 10.0], "rloo.py, plain rows": [2.0, 10.0], "TRL 0.19.1": [3.0, 40.0]}
    records = measure(tmp_path / "x.json", monkeypatch, lanes)
    assert throughput.table(records.all["update"]).splitlines()[2:5] == [
        "| rloo.py, group rows | 5.50 | 2.0 |  |",
        "| rloo.py, plain rows | 6.00 | 2.0 | 1.50 (1.00 to 2.00) |",
        "| TRL 0.19.1 | 21.50 | 2.0 | 3.50 (3.00 to 4.00) |",
    ]


def test_an_incomplete_call_and_again_write_nothing(tmp_path, monkeypatch, capsys):
    file = tmp_path / "x.json"
    ours = {"rloo.py, group rows": [1.0, 2.0], "rloo.py, plain rows": [3.0, 6.0]}
    measure(file, monkeypatch, ours | {"TRL 0.19.1": [3.0, 6.0]})
    before = file.read_text()
    measure(file, monkeypatch, ours)
    assert "left as they are, since --trl lacks TRL 0.19.1" in capsys.readouterr().out
    measure(file, monkeypatch, ours | {"rloo.py, plain rows": [4.0, 6.0]}, again=True)
    assert "plain rows, time / the first line's: recorded 3.00 (3.00 to 3.00), now 3.50" in capsys.readouterr().out
    assert file.read_text() == before


def test_both_layouts_of_a_shape_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "ROUNDS", 2)
    monkeypatch.setattr(throughput, "SHAPES", [(12, 4, 2)])
    monkeypatch.setitem(throughput.LLAMA, "hidden_size", 64)
    monkeypatch.setitem(throughput.LLAMA, "intermediate_size", 64)
    records = common.Records(tmp_path / "x.json")
    throughput.measure_shapes(records)
    lanes = records.all["shapes"]["lanes"]["12 4 2"]
    assert [len(lanes[layout]["seconds"]) for layout in ("group", "plain")] == [2, 2]
    row = throughput.table_of_shapes(records.all["shapes"]).splitlines()[2]
    assert row == f"| 12, 4, 2 | 1.60 | {throughput.over_first(lanes, 'plain')} |"


def test_the_page_has_the_tables_of_the_records():
    page = (throughput.HERE / "README.md").read_text(encoding="utf-8")
    assert common.filled(page, throughput.tables(common.Records(throughput.RECORDS))) == page
