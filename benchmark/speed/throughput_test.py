"""Tests of throughput.py: its commands run on a tiny model, numbers can be drawn again, mistakes are one line."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import throughput

HERE = Path(__file__).resolve().parent
PICTURES = importlib.util.find_spec("matplotlib") is not None


def run(*words) -> subprocess.CompletedProcess:
    command = [sys.executable, HERE / "throughput.py", *words]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def test_decoding_and_phases_of_a_tiny_model(tmp_path):
    output = tmp_path / "found.json"
    sizes = ["--prompts", 2, "--min_prompt", 4, "--max_prompt", 8, "--rloo_k", 2, "--response_length", 3]
    flags = ["--shape", "tiny", "--skip", "updates", "--repetitions", 2, "--threads", 1, "--output", output]
    done = run(*sizes, *flags)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert list(result["found"]) == ["decode", "first token", "reference", "reward model", "training"]
    for part, lanes in result["found"].items():
        assert {len(rounds) for rounds in lanes.values()} == {2} and part in done.stdout
        assert list(result["speedups"][part]) == list(lanes)[1:]
    assert output.with_suffix(".png").is_file() == PICTURES


def test_length_of_a_tiny_model(tmp_path):
    output = tmp_path / "length.json"
    flags = ["--shapes", "tiny-llama", "--response_lengths", 3, 4, "--repetitions", 1, "--threads", 1]
    done = run("length", *flags, "--output", output)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())["found"]
    assert len(found) == 2 and all(list(lengths) == ["3", "4"] for lengths in found.values())
    assert all(set(lanes) == {"group", "plain"} for lengths in found.values() for lanes in lengths.values())
    assert output.with_suffix(".png").is_file() == PICTURES


@pytest.mark.skipif(not PICTURES, reason="needs matplotlib")
def test_the_pictures_can_be_drawn_from_the_numbers_that_are_kept(tmp_path):
    files = [tmp_path / name for name in ("throughput.json", "throughput-llama.json", "length.json")]
    for file in files:
        shutil.copy(HERE / file.name, file)
    throughput.command_line(["draw", *map(str, files)])
    assert all(file.with_suffix(".png").is_file() for file in files)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--prompts", "0"], "--prompts 0: must be at least 1"),
        (["--rloo_k", "0"], "--rloo_k and --response_length must be at least 2"),
        (["--rloo_k", "4", "--micro_batch", "6"], "--micro_batch 6: must be a multiple"),
        (["--skip", "decode", "--skip", "phases", "--skip", "updates"], "nothing is left to measure"),
        (["length", "--output", "x.txt"], "must end in .json"),
    ],
)
def test_mistakes_are_one_line(words, message, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the flags of the machine are set there
    with pytest.raises(SystemExit) as end:
        throughput.command_line(words)
    assert message in str(end.value) and "\n" not in str(end.value)
