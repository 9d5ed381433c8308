"""Tests of vllm_rollout.py. All but the last run without vLLM: a stand-in takes its place in its process."""

import importlib.util

import pytest
import torch
import transformers
from conftest import GSM8K, MINI, load
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rloo
from rloo_test import spy

POLICIES = [MINI / "sft", GSM8K / "sft"]  # GPT-NeoX; Qwen3 with a tied head
STAND_IN = '''
"""A completion: a sum of its prompt, 10 times the number of weights so far, a part of its seed, and a stop token."""
import os
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, seed, **options):
        self.seed, self.options = seed, options

class LLM:
    def __init__(self, folder, **settings):
        assert settings["max_model_len"] == 512 + 6 and settings["dtype"] == "float32"
        assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
        self.weights = 1

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and "model.safetensors" in os.listdir(kwargs["weights_path"])
        self.weights += 1
        self.stale = True

    def reset_prefix_cache(self):
        self.stale = False

    def generate(self, prompts, params, use_tqdm):
        assert self.weights == 1 or not self.stale
        found = []
        for prompt, sampling in zip(prompts, params, strict=True):
            options = sampling.options
            assert options["stop_token_ids"] == [0] and options["ignore_eos"] and options["max_tokens"] == 6
            ids = [3 + sum(prompt["prompt_token_ids"]) % 800, 10 * self.weights, 3 + sampling.seed % 800]
            ids += [] if UNENDED else [0]
            steps = [{token: SimpleNamespace(logprob=-1.0 - i)} for i, token in enumerate(ids)]
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=steps)]))
        return found
'''


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in(unended) puts the stand-in in vLLM's place. Its process ends when the module with the pipe goes."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return lambda unended=False: (tmp_path / "vllm.py").write_text(STAND_IN.replace("UNENDED", str(unended)))


def test_vllm_samples_for_updates_and_evaluations_and_gets_new_weights_each_time(stand_in, run, monkeypatch):
    """Together with the correction, which allows its log-probs, that are not the policy's."""
    stand_in()
    load("vllm_rollout", "correction")
    seen = spy(monkeypatch, "rollout")
    flags = {"total_episodes": 16, "num_eval_prompts": 2, "num_sample_generations": 0}
    metrics, _ = run(**flags)
    assert [inputs[4] for inputs, _ in seen] == [1.0, 0.0, 1.0, 1.0, 1.0, 0.0]  # temperatures
    batches = [output for _, output in seen]
    seeds = []
    for weights, (batch, logprobs) in enumerate(batches, 1):
        k, B, T = batch.responses.shape
        first = [3 + sum(example["prompt_ids"]) % 800 for example in batch.examples]
        assert batch.responses[..., 0].tolist() == [first] * k and len(set(first)) > 1
        assert (batch.responses[..., 1] == 10 * weights).all() and batch.ended.all() and T == 6
        assert logprobs.tolist() == [[[-1.0, -2.0, -3.0, -4.0, 0.0, 0.0]] * B] * k
        seeds.append(batch.responses[..., 2].flatten().tolist())
    assert len({*seeds[2], *seeds[3]}) > 8 + 4 and seeds[0] == seeds[4]  # evaluations have the same ones
    assert all(update["val/rollout_logprob_gap"] > 0 and update["grad_norm"] > 0 for update in metrics)
    run(**flags)
    assert seen[8][1][0].responses[..., 2].flatten().tolist() == seeds[2]  # a run repeats itself


def test_a_completion_that_neither_ends_nor_is_full_is_refused(stand_in, run):
    stand_in(unended=True)
    with pytest.raises(SystemExit, match="vLLM: a completion must have 6 tokens or end with its first stop token"):
        run("vllm_rollout")


def test_without_vllm_a_line_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(rloo.InputError, match="vLLM is not installed; benchmark/extensions/README.md says how"):
        load("vllm_rollout").start()


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
    load("vllm_rollout").write_weights(model, tmp_path)
    weights, whole = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "whole" / "model.safetensors")
    assert set(weights) == set(whole) | ({"lm_head.weight"} if kind == "tied head" else set())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, tie_word_embeddings=False)
    assert torch.equal(again.eval()(torch.arange(20)[None]).logits, model.eval()(torch.arange(20)[None]).logits)


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM, an optional package: see the page of this folder"
)
@pytest.mark.parametrize("folder", POLICIES, ids=lambda folder: folder.parent.name)
def test_vllm_samples_from_the_newest_weights(folder):
    vllm_rollout = load("vllm_rollout")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    args = rloo.Args(response_length=4, max_prompt_length=60)
    examples = [{"prompt_ids": ids} for ids in ([5, 6, 7], [8, 9], [10])]
    for _ in range(2):
        batch, logprobs = vllm_rollout.rollout(args, model, examples, 2, 0.7, [0])
        assert len({tuple(ids) for ids in batch.completion_ids()}) > 3
        for example, ids, given in zip(
            batch.examples * 2, batch.completion_ids(), logprobs.flatten(0, 1).tolist(), strict=True
        ):
            prompt = example["prompt_ids"]
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
            own = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
            assert own.tolist() == pytest.approx(given[: len(ids)], abs=1e-4)
        for weight in model.parameters():
            weight.data *= 1.01
    vllm_rollout.pipe.close()
