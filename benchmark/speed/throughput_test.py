"""Tests of throughput.py: the commands run on a tiny model; the page has the tables of the records; mistakes are one
line."""

import importlib.util
import json
import math
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import throughput
import torch

HERE = Path(__file__).resolve().parent
SIZES = ["--prompts", 2, "--min_prompt", 4, "--max_prompt", 8, "--rloo_k", 2, "--response_length", 6, "--threads", 1]


@pytest.fixture
def in_this_process(monkeypatch):
    """Only trainers are started, since each process takes seconds. What is left of the threads and the environment is
    undone."""
    threads, start = torch.get_num_threads(), throughput.run_job

    def run_job(python, file, out, name, **arguments):
        if name in ("rloo", "trl"):
            return start(python, file, out, name, **arguments)
        return throughput.JOBS[name](**arguments, out=str(out))

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(throughput, "run_job", run_job)
    yield
    torch.set_num_threads(threads)


def run(*words) -> None:
    throughput.command_line([str(word) for word in words])


def test_decoding_phases_and_updates_of_a_tiny_model(tmp_path, in_this_process, capsys):
    output = tmp_path / "found.json"
    run(*SIZES, "--shape", "tiny", "--repetitions", 2, "--rounds", 1, "--updates", 1, "--output", output)
    only_decode = ["--shape", "tiny-llama", "--skip", "updates", "--skip", "phases"]
    run(*SIZES, *only_decode, "--stop_share", 0.2, "--repetitions", 2, "--output", output)
    first, second = (result["found"] for result in json.loads(output.read_text()).values())
    assert list(first) == list(throughput.PARTS) and list(second) == ["decode"]
    for part, lanes in first.items():
        assert {len(rounds) for rounds in lanes.values()} == {1 if part == "whole update" else 2}
        assert all(one["seconds"] > 0 for rounds in lanes.values() for one in rounds)
        assert part == "decode" or all(one["peak_gb"] > 0 for rounds in lanes.values() for one in rounds)
    full, sampled = ([one["tokens"] for rounds in x["decode"].values() for one in rounds] for x in (first, second))
    assert set(full) == {24}
    assert len(set(sampled)) > 1 and all(4 <= tokens <= 24 for tokens in sampled)
    assert "| whole update: rloo.py, plain rows | 1 |" in capsys.readouterr().out


def test_length_of_a_tiny_model(tmp_path, in_this_process):
    output = tmp_path / "length.json"
    run("length", "--shapes", "tiny-llama", "--response_lengths", 3, 4, "--threads", 1, "--output", output)
    result = json.loads(output.read_text())
    assert len(result["found"]) == 2
    for lengths in result["found"].values():
        assert list(lengths) == ["3", "4"] and all(set(lanes) == {"group", "plain"} for lanes in lengths.values())
    if importlib.util.find_spec("matplotlib"):
        throughput.draw_length(result, output.with_suffix(".png"))
        assert output.with_suffix(".png").is_file()


def test_the_page_has_the_tables_of_the_records():
    page = (HERE / "README.md").read_text(encoding="utf-8")
    for name, table in throughput.tables().items():
        assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in page
        assert table.splitlines()[0].count("|") <= 9
    said = " ".join(page.split())
    records = json.loads((HERE / "throughput.json").read_text())
    length = json.loads((HERE / "length.json").read_text())
    commits = {record["machine"].rpartition(" ")[2] for record in records.values()}
    assert f"tables of commit {' '.join(commits)}, the picture of {length['machine'].rpartition(' ')[2]}" in said
    first, *_ = records.values()
    assert "The process needs less memory too" in said
    peaks = [max(one["peak_gb"] or math.inf for one in rounds) for rounds in first["found"]["whole update"].values()]
    assert peaks[0] < min(peaks[1:])
    found = {part: throughput.ratios(lanes) for part, lanes in first["found"].items()}
    assert "less than half of the time of plain rows" in said and min(found["whole update"]["rloo.py, plain rows"]) > 2
    assert "less than a third of that of TRL" in said
    assert all(min(rounds) > 3 for name, rounds in found["whole update"].items() if "TRL" in name)
    generate = [rounds for name, rounds in found["decode"].items() if "generate" in name]
    assert "about half of that of `generate`" in said and all(1.9 < x < 2.4 for rounds in generate for x in rounds)
    decoded = [throughput.ratios(record["found"]["decode"]).items() for record in records.values()]
    vllm = [rounds for lanes in decoded for name, rounds in lanes if "vLLM" in name]
    assert "vLLM is faster in two workloads of four, slower in one, and in one the rounds disagree" in said
    assert sorted((min(rounds) > 1) - (max(rounds) < 1) for rounds in vllm) == [-1, -1, 0, 1]
    worst = [
        1 / ratio
        for part, lengths in length["found"].items()
        for ratio in throughput.ratios(lengths["512"])["plain"]
        if "2 completions" in part
    ]
    assert f"take {min(worst):.2f} to {max(worst):.2f} times as long in the {len(worst)} rounds" in said


@pytest.mark.parametrize(
    "words, message",
    [
        (["--max_prompt", "2040"], "must be a range within 2,048 positions"),
        (["--stop_share", "0.01"], "--stop_share: is for decode, so --skip updates"),
        (["--vllm", "no/such/python"], "no/such/python: cannot be run"),
    ],
)
def test_mistakes_are_one_line(words, message, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the threads are set there
    with pytest.raises(SystemExit) as end:
        throughput.command_line(words)
    assert message in str(end.value) and "\n" not in str(end.value)


# ---- Other programs, where they are installed ------------------------------------------------------------------------


@pytest.mark.skipif(getattr(importlib.util.find_spec("vllm"), "origin", None) is None, reason="needs vLLM")
def test_decoding_and_updates_by_vllm(tmp_path):
    output = tmp_path / "found.json"
    flags = ["--shape", "tiny-llama", "--skip", "phases", "--repetitions", 1, "--rounds", 1, "--updates", 1]
    run(*SIZES, *flags, "--vllm", sys.executable, "--output", output)
    (result,) = json.loads(output.read_text()).values()
    for part in ("decode", "whole update"):
        (name,) = [name for name in result["found"][part] if "vLLM" in name]
    assert [one["tokens"] for rounds in result["found"]["decode"].values() for one in rounds] == [24] * 4
