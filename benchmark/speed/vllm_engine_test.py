"""Tests of vllm_engine.py. All but the last run without vLLM; a stand-in for it takes its place in its process."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import torch
import vllm_engine
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
POLICIES = [HERE.parent / task / "sft" for task in ("mini_tldr", "mini_gsm8k")]  # GPT-NeoX; Qwen3 with a tied head
PROMPTS = [[5, 6, 7], [8, 9], [10]]
OPTIONS = {"k": 2, "temperature": 0.7, "response_length": 4, "stop_ids": [0], "max_length": 64}

STAND_IN = '''
"""Each completion is the first id of its prompt, the number of weights so far, and the two parts of its seed."""
import os
from pathlib import Path
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, seed, **options):
        self.seed, self.options = seed, options

class LLM:
    def __init__(self, folder, **settings):
        self.weights, self.settings = 0, settings
        self.read(folder)

    def read(self, folder):
        assert Path(folder, "model.safetensors").is_file() and Path(folder, "config.json").is_file()
        self.weights += 1

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.read(kwargs["weights_path"])

    def reset_prefix_cache(self):
        self.weights += 10

    def generate(self, prompts, params, use_tqdm):
        if prompts[0]["prompt_token_ids"] == [99]:
            os._exit(3)
        found = []
        for prompt, sampling in zip(prompts, params, strict=True):
            assert sampling.options["stop_token_ids"] == [0] and sampling.options["ignore_eos"]
            ids = [prompt["prompt_token_ids"][0], self.weights, *divmod(sampling.seed, 2**24)]
            steps = [{token: SimpleNamespace(logprob=-float(i))} for i, token in enumerate(ids)]
            found.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=steps)]))
        return found
'''


@pytest.fixture
def policy():
    return AutoModelForCausalLM.from_pretrained(POLICIES[0], dtype=torch.float32)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A package vllm that both processes find, and an engine that has not been started."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(vllm_engine, "pipe", None)
    monkeypatch.setattr(vllm_engine, "newest", None)
    yield tmp_path
    if vllm_engine.pipe is not None:
        vllm_engine.pipe.close()  # ends the process


def test_prompts_seeds_and_versions_reach_vllm_and_completions_come_back_in_groups(stand_in, policy):
    def call(seed, version):
        return vllm_engine.generate(policy, PROMPTS, seed=seed, version=version, **OPTIONS)

    tokens, logprobs = call(seed=1, version="a")
    assert [[ids[0] for ids in group] for group in tokens] == [[5, 5], [8, 8], [10, 10]]
    assert logprobs == [[[0.0, -1.0, -2.0, -3.0]] * 2] * 3
    seeds = [high * 2**24 + low for group in tokens for *_, high, low in group]
    assert seeds == list(range(seeds[0], seeds[0] + 6))  # child j of a prompt: its first seed + j
    assert call(seed=1, version="a") == (tokens, logprobs)
    others = {high * 2**24 + low for group in call(seed=2, version="a")[0] for *_, high, low in group}
    assert len(others) == 6 and not others & set(seeds)

    assert tokens[0][0][1] == 1  # the weights it started with; version a was not sent again
    assert call(seed=1, version="b")[0][0][0][1] == 12  # new weights, and the cache of prompts was emptied
    assert call(seed=1, version="b")[0][0][0][1] == 12


def test_the_end_of_vllm_is_an_error_of_one_line(stand_in, policy):
    with pytest.raises(RuntimeError, match="^vLLM's process has ended; what it said is above$"):
        vllm_engine.generate(policy, [[99]], seed=1, version=0, **OPTIONS)


@pytest.mark.parametrize("how", ["returns", "is killed"])
def test_vllm_ends_when_the_trainer_ends(how, stand_in):
    """Its process has the trainer's standard output, which closes once both have ended."""
    script = f"""if True:
        import sys
        sys.path.insert(0, {str(HERE)!r})
        import vllm_engine
        pipe = vllm_engine.start()
        print("ended" if pipe.poll(1) else "runs", flush=True)
        {"sys.stdin.read()" if how == "is killed" else ""}
    """
    trainer = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "runs\n"
    if how == "is killed":
        trainer.send_signal(signal.SIGKILL)
    reader = threading.Thread(target=trainer.stdout.read, daemon=True)
    reader.start()
    reader.join(10)
    assert not reader.is_alive(), "it still runs"
    assert trainer.wait() == (-signal.SIGKILL if how == "is killed" else 0)


@pytest.mark.parametrize("folder", POLICIES, ids=lambda folder: folder.parent.name)
def test_the_weights_file_has_every_weight_a_tied_head_as_well(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vllm_engine.write_weights(model, tmp_path)
    weights, shipped = load_file(tmp_path / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(weights) - set(shipped) <= {"lm_head.weight"} and set(shipped) <= set(weights)
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert ("lm_head.weight" in weights) is tied
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, tie_word_embeddings=False)
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_without_vllm_a_line_says_where_to_read(monkeypatch, policy):
    monkeypatch.setattr(vllm_engine, "pipe", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="vLLM is not installed; benchmark/speed/README.md says how to install it$"):
        vllm_engine.generate(policy, PROMPTS, seed=1, version=0, **OPTIONS)


@pytest.mark.skipif(getattr(importlib.util.find_spec("vllm"), "origin", None) is None, reason="needs vLLM")
@pytest.mark.parametrize("folder", POLICIES, ids=lambda folder: folder.parent.name)
def test_vllm_samples_from_the_newest_weights(folder, monkeypatch):
    monkeypatch.setattr(vllm_engine, "pipe", None)
    monkeypatch.setattr(vllm_engine, "newest", None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stop = AutoTokenizer.from_pretrained(folder).eos_token_id
    options = OPTIONS | {"response_length": 20, "stop_ids": [stop]}
    for version in range(2):
        tokens, logprobs = vllm_engine.generate(model, PROMPTS, seed=version, version=version, **options)
        for prompt, group, given in zip(PROMPTS, tokens, logprobs, strict=True):
            assert len(group) == len(given) == 2
            for ids, numbers in zip(group, given, strict=True):
                assert stop not in ids[:-1] and (len(ids) == 20 or ids[-1] == stop)
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.7
                own = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
                assert torch.allclose(own, torch.tensor(numbers), atol=1e-4)
        for weight in model.parameters():
            weight.data *= 1.01
    vllm_engine.pipe.close()
