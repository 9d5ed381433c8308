"""Tests of vllm_engine.py. All but the last run without vLLM: a stand-in takes its place in its process."""

import importlib.util
from pathlib import Path

import pytest
import torch
import transformers
import vllm_engine
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

TASKS = Path(__file__).resolve().parents[1]
POLICIES = [TASKS / task / "sft" for task in ("mini_tldr", "mini_gsm8k")]  # GPT-NeoX; Qwen3 with a tied head
PROMPTS = [[5, 6, 7], [8, 9], [10]]
OPTIONS = {"k": 2, "temperature": 0.7, "response_length": 4, "stop_ids": [0], "max_length": 64}
STAND_IN = '''
"""Each completion is the first id of its prompt, the number of weights so far, and the two parts of its seed."""
import os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, seed, **options):
        self.seed, self.options = seed, options

class LLM:
    def __init__(self, folder, **settings):
        self.weights = 1

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and "model.safetensors" in os.listdir(kwargs["weights_path"])
        self.weights += 1

    def reset_prefix_cache(self):
        self.weights += 10

    def generate(self, prompts, params, use_tqdm):
        found = []
        for prompt, sampling in zip(prompts, params, strict=True):
            assert sampling.options["stop_token_ids"] == [0] and sampling.options["ignore_eos"]
            ids = [prompt["prompt_token_ids"][0], self.weights, *divmod(sampling.seed, 2**24)]
            steps = [{token: SimpleNamespace(logprob=-float(i))} for i, token in enumerate(ids)]
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=steps)]))
        return found
'''


@pytest.fixture
def fresh(monkeypatch):
    """An engine that has not been started; its process ends with the test."""
    monkeypatch.setattr(vllm_engine, "pipe", None)
    monkeypatch.setattr(vllm_engine, "newest", None)
    yield
    if vllm_engine.pipe is not None:
        vllm_engine.pipe.close()


def test_prompts_seeds_and_versions_reach_vllm_and_completions_come_back_in_groups(fresh, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = AutoModelForCausalLM.from_pretrained(POLICIES[0], dtype=torch.float32)

    def call(seed, version):
        return vllm_engine.generate(policy, PROMPTS, seed=seed, version=version, **OPTIONS)

    tokens, logprobs = call(seed=1, version="a")
    assert [[ids[0] for ids in group] for group in tokens] == [[5, 5], [8, 8], [10, 10]]
    assert logprobs == [[[0.0, -1.0, -2.0, -3.0]] * 2] * 3
    assert call(seed=1, version="a") == (tokens, logprobs)
    seeds = [{tuple(ids[2:]) for group in x for ids in group} for x in (tokens, call(seed=2, version="a")[0])]
    assert len(seeds[0] | seeds[1]) == 12  # another one for each completion of each call
    assert tokens[0][0][1] == 1  # the weights it started with; version a was not sent again
    assert call(seed=1, version="b")[0][0][0][1] == 12  # new weights, and the cache of prompts was emptied


MIXTURE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
MIXTURE |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize("kind", ["GPT-NeoX", "tied head", "mixture of experts"])
def test_the_files_have_every_weight_by_its_published_name(kind, tmp_path):
    """Whatever the generation config holds: `save_pretrained` refuses a temperature without sampling."""
    if kind == "mixture of experts":
        model = AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**MIXTURE))
    else:
        model = AutoModelForCausalLM.from_pretrained(POLICIES[kind == "tied head"], dtype=torch.float32)
    model.save_pretrained(tmp_path / "whole")
    model.generation_config.temperature, model.generation_config.pad_token_id = 0.6, -1
    vllm_engine.write_weights(model, tmp_path)
    weights, whole = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors")
    assert set(weights) == set(whole) | ({"lm_head.weight"} if kind == "tied head" else set())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, tie_word_embeddings=False)
    assert torch.equal(again.eval()(torch.arange(20)[None]).logits, model.eval()(torch.arange(20)[None]).logits)


@pytest.mark.skipif(getattr(importlib.util.find_spec("vllm"), "origin", None) is None, reason="needs vLLM")
@pytest.mark.parametrize("folder", POLICIES, ids=lambda folder: folder.parent.name)
def test_vllm_samples_from_the_newest_weights(folder, fresh):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for version in range(2):
        tokens, logprobs = vllm_engine.generate(model, PROMPTS, seed=version, version=version, **OPTIONS)
        for prompt, group, given in zip(PROMPTS, tokens, logprobs, strict=True):
            for ids, numbers in zip(group, given, strict=True):
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
                own = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
                assert torch.allclose(own, torch.tensor(numbers), atol=1e-4)
        for weight in model.parameters():
            weight.data *= 1.01
