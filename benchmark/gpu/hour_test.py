"""Tests of hour.py and profiled.py: tiny models, on a CPU."""

import argparse
from pathlib import Path

import gpu_memory
import hour
import profiled
import pytest
import torch
import transformers


def arguments(tmp_path, *parts):
    return argparse.Namespace(parts=parts, out=tmp_path / "out", device="cpu", trl=None, before=None)


@pytest.mark.parametrize("family", ["Qwen2.5", "GPT-NeoX"])
def test_completions_end_with_two_percent_at_each_token(family):
    model = gpu_memory.Model(family, 0, 2, 512, 512, 512, 1_000)
    torch.manual_seed(0)
    config = hour.config_of(model, eos_token_id=998, pad_token_id=999)
    policy = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    hour.let_it_end(policy, 998)
    with torch.no_grad():
        logits = policy(torch.randint(998, (4, 30))).logits.float() / hour.TEMPERATURE
    found = logits.softmax(-1)[..., 998]
    assert 0.015 < found.min() < found.max() < 0.027
