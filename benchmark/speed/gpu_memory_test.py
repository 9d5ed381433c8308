"""Tests of gpu_memory.py: its formula holds for small models, and README.md has its table."""

from dataclasses import replace
from pathlib import Path

import gpu_memory
import pytest


@pytest.mark.parametrize("family, width, feed_forward", [("Qwen2.5", 448, 4864), ("GPT-NeoX", 256, 1024)])
def test_a_layer_keeps_what_the_formula_says(family, width, feed_forward):
    formula = gpu_memory.kept_by_layer(family, width, feed_forward)
    assert gpu_memory.counted(family, width, feed_forward) == pytest.approx(formula, rel=0.02)


def test_readme_has_the_table():
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    assert gpu_memory.table(gpu_memory.RUNS) in readme


def test_fsdp_and_checkpointing_need_less_and_longer_completions_more():
    run = gpu_memory.RUNS[-1]
    base = gpu_memory.needed(run)
    for change in ({"gpus": 1}, {"checkpointing": False}, {"R": 1024}):
        assert gpu_memory.needed(replace(run, **change))["training"] > base["training"]
