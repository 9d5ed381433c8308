"""Tests of gpu_memory.py: its formula holds for small models, and README.md has its table."""

from dataclasses import replace
from pathlib import Path

import gpu_memory
import pytest


@pytest.mark.parametrize("lora_rank", [0, 16])
@pytest.mark.parametrize("family, width, feed_forward", [("Qwen2.5", 448, 4864), ("GPT-NeoX", 256, 1024)])
def test_a_layer_keeps_what_the_formula_says(family, width, feed_forward, lora_rank):
    formula = gpu_memory.kept_by_layer(family, width, feed_forward, lora_rank)
    assert gpu_memory.counted(family, width, feed_forward, lora_rank) == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("family, heads", [("Qwen2.5", 1), ("GPT-NeoX", 4)])
def test_adapters_have_as_many_weights_as_the_formula_says(family, heads):
    policy = gpu_memory.small_model(family, 256, 1024, 3, lora_rank=4)
    sizes = gpu_memory.Model(family, 0, 3, 256, 1024, 64 * heads, 512)
    count = sum(weight.numel() for weight in gpu_memory.rloo.trained_weights(policy).values())
    assert gpu_memory.adapter_parameters(sizes, 4) == count


def test_readme_has_the_table():
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    assert gpu_memory.table(gpu_memory.RUNS) in readme


def test_fsdp_and_checkpointing_need_less_and_longer_completions_more():
    run = next(run for run in gpu_memory.RUNS if run.gpus > 1)
    base = gpu_memory.needed(run)
    for change in ({"gpus": 1}, {"checkpointing": False}, {"R": 1024}):
        assert gpu_memory.needed(replace(run, **change))["training"] > base["training"]


def test_adapters_need_less_than_all_weights_and_more_at_a_higher_rank():
    run = gpu_memory.RUNS[0]
    full, low, high = (gpu_memory.needed(replace(run, lora_rank=rank)) for rank in (0, 8, 64))
    for what in ("states", "training", "rollout"):
        assert low[what] < high[what]
    assert high["training"] < 0.6 * full["training"] and high["states"] < 0.2 * full["states"]
