"""Tests of throughput.py and limits.py: the commands run on a tiny model, also with vLLM or a stand-in for it; work is
counted right; numbers can be drawn again; mistakes are one line."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import limits
import pytest
import throughput
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

HERE = Path(__file__).resolve().parent
PICTURES = importlib.util.find_spec("matplotlib") is not None
SIZES = ["--prompts", 2, "--min_prompt", 4, "--max_prompt", 8, "--rloo_k", 2, "--response_length", 6, "--threads", 1]


def run(*words) -> subprocess.CompletedProcess:
    command = [sys.executable, HERE / "throughput.py", *words]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


@pytest.fixture
def in_this_process(monkeypatch):
    """Only trainers are started, since each process takes seconds, and a machine is not measured again and again. What
    is left of the threads and the environment is undone."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(throughput, "machine_probe", lambda *_: lambda: {"flop_per_s": 1e9, "bytes_per_s": 1e9})
    monkeypatch.setattr(throughput, "in_a_process", lambda function, *arguments: function(*arguments))
    yield
    torch.set_num_threads(threads)


def test_decoding_and_phases_of_a_tiny_model(tmp_path, in_this_process, capsys):
    output = tmp_path / "found.json"
    flags = ["--shape", "tiny", "--skip", "updates", "--repetitions", 2, "--stop_share", 0.2, "--output", output]
    throughput.command_line([str(word) for word in (*SIZES, *flags)])
    said = capsys.readouterr().out
    result = json.loads(output.read_text())
    assert list(result["found"]) == ["decode", "first token", "reference", "reward model", "training"]
    for part, lanes in result["found"].items():
        assert {len(rounds) for rounds in lanes.values()} == {2} and part in said
        assert list(result["speedups"][part]) == list(lanes)[1:]
        assert all(one["flop"] > 0 for rounds in lanes.values() for one in rounds)
        assert len(result["machine"][part]) == 2
    sampled = [one for rounds in result["found"]["decode"].values() for one in rounds]
    assert all(4 <= one["tokens"] <= 4 * one["steps"] <= 24 for one in sampled)
    assert len({one["tokens"] for one in sampled}) > 1
    assert output.with_suffix(".png").is_file() == PICTURES


def test_updates_of_a_tiny_model(tmp_path, in_this_process):
    output = tmp_path / "found.json"
    flags = ["--shape", "tiny-llama", "--skip", "decode", "--skip", "phases", "--rounds", 1, "--updates", 1]
    throughput.command_line([str(word) for word in (*SIZES, *flags, "--output", output)])
    result = json.loads(output.read_text())
    assert list(result["found"]) == ["whole update"] and len(result["machine"]["whole update"]) == 1
    for (one,) in result["found"]["whole update"].values():
        assert one["tokens"] == 24 and one["flop"] > 0 and one["peak_gb"] > 0


def test_length_of_a_tiny_model(tmp_path, in_this_process):
    output = tmp_path / "length.json"
    flags = ["--shapes", "tiny-llama", "--response_lengths", 3, 4, "--repetitions", 1, "--threads", 1]
    throughput.command_line([str(word) for word in ("length", *flags, "--output", output)])
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
        (["--stop_share", "1"], "--stop_share 1.0: must be at least 0 and below 1"),
        (["--stop_share", "0.01", "--trl", "python"], "completions of full length"),
        (["--vllm", "no/such/python"], "no/such/python: cannot be run"),
        (["length", "--output", "x.txt"], "must end in .json"),
    ],
)
def test_mistakes_are_one_line(words, message, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # the flags of the machine are set there
    with pytest.raises(SystemExit) as end:
        throughput.command_line(words)
    assert message in str(end.value) and "\n" not in str(end.value)


# ---- Work ------------------------------------------------------------------------------------------------------------


def test_the_machine_is_measured():
    found = limits.machine_probe("cpu", "float32")()
    assert list(found) == ["flop_per_s", "bytes_per_s"] and min(found.values()) > 0


@pytest.mark.parametrize("shape", ["tiny", "tiny-llama"])
def test_flops_of_one_completion_are_those_that_torch_counts(shape):
    """Except that eager attention multiplies all pairs of tokens, and for the products of rotary embeddings."""
    config = throughput.shape_config(throughput.Workload(shape=shape))
    config.num_labels, config.pad_token_id = 1, 0
    options = {"attn_implementation": "eager"}
    policy = AutoModelForCausalLM.from_config(config, **options)
    reward = AutoModelForSequenceClassification.from_config(config, **options)
    sizes, n, length = limits.model_sizes(policy), 5, 4
    needed = limits.needed_flops(sizes, [n], [[length]])

    def counted(function, tokens: int, passes: int) -> int:
        with FlopCounterMode(display=False) as counter:
            function(torch.randint(config.vocab_size, (1, tokens)))
        by_module = counter.get_flop_counts()
        rotary = sum(sum(flops.values()) for name, flops in by_module.items() if name.endswith("rotary_emb"))
        masked = tokens**2 - tokens * (tokens + 1) // 2
        return counter.get_total_flops() - rotary - passes * 4 * sizes["queries"] * masked

    def logits(ids):
        return policy.get_output_embeddings()(policy.base_model(ids)[0][:, n - 1 :])

    read = n + length - 1
    assert counted(logits, read, passes=1) == needed["decode"] == needed["reference"]
    assert counted(lambda ids: logits(ids).sum().backward(), read, passes=3) == needed["training"]
    assert counted(lambda ids: reward.score(reward.base_model(ids)[0][:, -1]), read + 1, 1) == needed["reward model"]
    assert (
        needed["whole update"] == needed["decode"] + needed["reference"] + needed["reward model"] + needed["training"]
    )


def test_flops_of_a_prompt_are_shared_by_its_completions():
    sizes = {"body": 1000, "head": 100, "hidden": 10, "queries": 1}

    def flops(prompts, responses):
        return limits.needed_flops(sizes, prompts, responses)["decode"]

    group = flops([7], [[4], [3]])
    assert group == flops([7], [[4]]) + flops([7], [[3]]) - flops([7], [[1]])
    assert flops([7, 5], [[4, 2], [3, 6]]) == group + flops([5], [[2], [6]])
    # Read: 7 + 3 + 2 tokens; head: 1 + 3 + 2; seen: 1 … 7 by the prompt, 8 … 10 and 8 … 9 by the completions.
    assert group == 2 * 1000 * 12 + 2 * 100 * 6 + 4 * (28 + 27 + 17)


def test_bytes_of_decoding_by_hand():
    sizes = {"body": 1000, "head": 100, "cached": 8}
    # 4 steps read the weights. Prompt of 7: read in 3 steps, completion of 4: 0 + 1 + 2 tokens, of 3: 0 + 1.
    # Prompt of 5: read in 1 step, completion of 2 sees no token from earlier steps, completion of 1 takes no step.
    cached = 3 * 7 + (0 + 1 + 2) + (0 + 1) + 1 * 5
    assert limits.needed_bytes(sizes, 4, [7, 5], [[4, 2], [3, 1]]) == 4 * (4 * 1100 + 8 * cached)


# ---- vLLM ------------------------------------------------------------------------------------------------------------

STAND_IN = '''
"""Each completion ends with its third token."""
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, **options):
        assert options["stop_token_ids"] == list(range(102))
        self.max_tokens = options["max_tokens"]

class LLM:
    def __init__(self, folder, **settings):
        self.sent, self.known = 0, set()

    def collective_rpc(self, method, kwargs):
        self.sent += 1

    def reset_prefix_cache(self):
        self.known.clear()

    def generate(self, prompts, params, use_tqdm):
        prompts = [tuple(prompt["prompt_token_ids"]) for prompt in prompts]
        assert not self.known & set(prompts)
        self.known |= set(prompts)
        ids = [500, 500, 3][: params[0].max_tokens]
        steps = [{token: SimpleNamespace(logprob=-1.0)} for token in ids]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, logprobs=steps)]) for _ in prompts]
'''


def test_decoding_by_a_stand_in_for_vllm(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sizes = {"prompts": 2, "min_prompt": 4, "max_prompt": 8, "rloo_k": 2, "response_length": 6}
    args = throughput.Args(shape="tiny", **sizes, stop_share=0.1, device="cpu", threads=1, vllm=sys.executable)
    throughput.write_inputs(tmp_path, args)
    with throughput.vllm_process(tmp_path, args) as sample:
        for length in (6, 6, 1):  # the same prompts, but vLLM must not know them any more
            seconds, lengths = sample(length)
            assert seconds > 0 and lengths == [[min(length, 3)] * 2] * 2
    with pytest.raises(SystemExit, match="is not a stop"), throughput.vllm_process(tmp_path, args) as sample:
        (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('this is not a stop')")
        sample(6)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_decoding_and_updates_by_vllm(tmp_path):
    output = tmp_path / "found.json"
    flags = ["--shape", "tiny-llama", "--skip", "phases", "--repetitions", 1, "--rounds", 1, "--updates", 1]
    done = run(*SIZES, *flags, "--vllm", sys.executable, "--output", output)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())["found"]
    for part, tokens in (("decode", 24), ("first token", 4), ("whole update", 24)):
        (name,) = [name for name in found[part] if "vLLM" in name]
        assert found[part][name][0]["tokens"] == tokens
