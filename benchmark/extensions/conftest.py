"""What the tests of this folder share: short runs on a part of mini TL;DR, by the command line with replacements."""

import itertools
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import rloo  # noqa: E402

MINI = ROOT / "benchmark" / "mini_tldr"
torch.set_num_threads(1)  # the models are tiny


@pytest.fixture(autouse=True)
def rloo_as_it_was():
    before = dict(vars(rloo))
    yield
    vars(rloo).update(before)
    rloo.REPLACED.clear()


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> str:
    lines = (MINI / "validation.jsonl").read_text().splitlines(keepends=True)[:40]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture
def run(data, tmp_path):
    """run(seams, flag=value, ...) -> metrics of each update, and the output folder."""
    numbers = itertools.count()

    def run(seams: dict, **flags):
        flags = {
            "dataset_name": data,
            "sft_model_path": MINI / "sft",
            "reward_model_path": MINI / "reward",
            "response_length": 6,
            "rloo_k": 2,
            "per_device_train_batch_size": 8,
            "total_episodes": 8,
            "learning_rate": 1e-3,
            "temperature": 1.0,
            "num_eval_prompts": 0,
            "device": "cpu",
            "output_dir": tmp_path / f"run{next(numbers)}",
        } | flags
        before = dict(vars(rloo))
        try:
            rloo.command_line(command_of(flags), **seams)
        finally:
            vars(rloo).update(before)
            rloo.REPLACED.clear()
        return read_lines(Path(flags["output_dir"]) / "metrics.jsonl"), Path(flags["output_dir"])

    return run


@pytest.fixture
def record():
    """record(name) -> flags of a run, and the metrics that rloo.py of commit 536c9f2 recorded, which had LoRA and FSDP
    in it (as --sharding fsdp), on the same 40 rows."""
    recorded = json.loads(Path(__file__).with_name("record.json").read_text())

    def read(name: str) -> tuple[dict, list[dict]]:
        one = recorded["runs"][name]
        flags = recorded["flags"] | one["flags"]
        return {name: x for name, x in flags.items() if name != "sharding"}, one["metrics"]

    return read


def command_of(flags: dict) -> list[str]:
    """The words of a command line; a flag that is None is left out."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_times(metrics: list[dict]) -> list[dict]:
    """Metrics that depend on flags and seed alone."""
    times = ("time/", "eps", "memory/")
    return [{name: x for name, x in update.items() if not name.startswith(times)} for update in metrics]
