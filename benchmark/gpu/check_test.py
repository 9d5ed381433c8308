"""Tests of check.py: it passes here, and whatever of rloo.py is broken, a line that names the place fails."""

import importlib.util
import json
import types
from pathlib import Path

import check
import gpu_memory
import pytest
import torch

import rloo


def test_all_lines_pass_on_a_cpu_and_are_written(tmp_path, capsys):
    """Without those of several processes, which start Python five times, and the run that resumes."""
    check.SECTIONS["here"] = [x for x in check.SECTIONS["right"] if x is not check.resume]
    output = tmp_path / "gpu-check.json"
    sections = ("here", "used", "fast", "memory", "learns")
    assert check.main(check.Args(device="cpu", only=sections, output=str(output))) == 0
    found = json.loads(output.read_text())
    assert found["failed"] == 0 and {line["section"] for line in found["lines"]} == set(sections)
    assert {"device", "commit", "torch"} <= found["about"].keys()
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("PASS", "INFO", "SKIP"))]
    assert len(shown) == len(found["lines"]) > 40
    page = " ".join((Path(__file__).parent / "README.md").read_text().split())
    counts = [line for line in found["lines"] if line["what"].startswith("kernels: operations")]
    for line in counts:
        assert f"{line['value']:,} for {line['what'].rpartition(', ')[2]}" in page, line
    assert len(counts) == 3


def lanes_see_a_sibling(x, P, k, original=rloo.prompt_and_own):
    return original(x, P, k).roll(1, dims=1)


def empty_slots_are_seen(query, key, value, mask, scaling, original=rloo.step_attention):
    mask = mask.clone()
    mask[..., key[0].shape[2] :] = True
    return original(query, key, value, mask, scaling)


def many_operations(query, key, value, mask, scaling, original=rloo.step_attention):
    for _ in range(40):
        query = query + 0
    return original(query, key, value, mask, scaling)


BROKEN = {  # what is broken, what it does instead, the check, and the beginning of the line that fails
    "attention of lanes": ("prompt_and_own", lanes_see_a_sibling, check.log_probs_and_gradients, "log-probs: group"),
    "mask": (
        "causal_mask",
        lambda real, original=rloo.causal_mask: original(torch.ones_like(real)),
        check.log_probs_and_gradients,
        "log-probs: group",
    ),
    "head": (
        "final_logits",
        lambda model, hidden, original=rloo.final_logits: 1.05 * original(model, hidden),
        check.log_probs_and_gradients,
        "log-probs: plain",
    ),
    "gradient of the head": (
        "block_logprobs",
        lambda model, hidden, *args, original=rloo.block_logprobs: original(model, hidden.detach(), *args),
        check.log_probs_and_gradients,
        "gradients: ",
    ),
    "attention of a step": (
        "step_attention",
        lambda *args, original=rloo.step_attention: original(*args[:4], 1.1 * args[4]),
        check.decoding,
        "decoding: log-probs",
    ),
    "graph replay": ("step_attention", empty_slots_are_seen, check.decoding, "graph replay"),
    "lanes that leave": ("LaneCache.reorder_cache", lambda self, index: None, check.decoding, "decoding"),
    "stop tokens": (
        "make_batch",
        lambda rows, responses, stop_ids, original=rloo.make_batch: original(rows, responses, stop_ids[:1]),
        check.stop_tokens,
        "stop tokens",
    ),
    "sampling": (
        "sample",
        lambda logits, temperature, uniform, original=rloo.sample: original(logits, temperature, uniform**2),
        check.sampling,
        "sampling",
    ),
    "advantages": (
        "advantage",
        lambda rewards, estimator, original=rloo.advantage: -original(rewards, estimator),
        check.one_update,
        "update: share of tokens without reward",
    ),
    "log-probs of the rollout": (
        "sample",
        lambda logits, temperature, uniform, original=rloo.sample: original(logits, 1.2 * temperature, uniform),
        check.one_update,
        "update: rollout's log-probs",
    ),
    "resume": ("load_moments", lambda *args: None, check.resume, "resume"),
    "kernels of a step": ("step_attention", many_operations, check.kernels, "kernels: operations"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(monkeypatch, name):
    function, instead, run, expected = BROKEN[name]
    monkeypatch.setattr(f"rloo.{function}", instead)
    lines = [*check.lines_of(run, "cpu")]
    assert any(line["verdict"] == "FAIL" and line["what"].startswith(expected) for line in lines), lines


def test_a_failed_line_is_the_exit_status(monkeypatch, tmp_path):
    monkeypatch.setitem(check.SECTIONS, "used", [lambda device: iter([("x", float("nan"), 1.0), ("y", 0.5, 1.0)])])
    assert check.main(check.Args(device="cpu", only=("used",), output=str(tmp_path / "x.json"))) == 1


def test_an_error_fails_and_too_little_memory_only_skips_what_is_measured(monkeypatch):
    def fails(device):
        yield "before", 0.0, 1.0
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert [line["verdict"] for line in check.lines_of(fails, "cpu")] == ["PASS", "FAIL"]
    monkeypatch.setattr(check, "speed", fails)
    assert [line["verdict"] for line in check.lines_of(fails, "cpu")] == ["PASS", "SKIP"]


def test_an_error_says_where_it_is_and_its_trace_is_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(rloo.Decoder, "step", lambda self: self.no_such_name)
    monkeypatch.setitem(check.SECTIONS, "right", [check.decoding])
    assert check.main(check.Args(device="cpu", only=("right",), output=str(tmp_path / "x.json"))) == 1
    shown = capsys.readouterr().out
    assert "FAIL right: decoding: AttributeError at check_test.py:" in shown and shown.endswith("\n  decoding\n")
    (line,) = json.loads((tmp_path / "x.json").read_text())["lines"]
    assert "rloo.py" in line["trace"] and "in generate" in line["trace"]


def test_a_graph_that_is_not_captured_fails(monkeypatch):
    monkeypatch.setattr(check.types, "SimpleNamespace", lambda replay: None)  # as on a GPU where a step waits
    lines = [*check.lines_of(check.decoding, "cpu")]
    assert any(line["verdict"] == "FAIL" and "not a CUDA graph" in line["what"] for line in lines), lines


FAKE_VLLM = """
import os, time

class SamplingParams:
    def __init__(self, **options):
        assert options == {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "detokenize": False}

class LLM:
    calls = 0
    def __init__(self, folder, **options):
        assert {"config.json", "model.safetensors"} <= set(os.listdir(folder)) and options["dtype"] == "bfloat16"
    def reset_prefix_cache(self):
        pass
    def generate(self, prompts, options, use_tqdm):
        assert len(prompts) == 2 * 4 and all(len(x["prompt_token_ids"]) == 12 for x in prompts)
        self.calls += 1
        time.sleep(self.calls)  # 1 second to warm up, then 2
        completion = type("Completion", (), {"token_ids": [1] * 8})
        return [type("Result", (), {"outputs": [completion]}) for _ in prompts]
"""


def test_tokens_per_second_of_vllm_are_those_of_its_second_call(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rate = check.vllm_tokens_per_second(check.TINY["grouped-query"], P=12, R=8, B=2, k=4)
    assert rate == pytest.approx(2 * 4 * 8 / 2, rel=0.1)


@pytest.mark.parametrize("installed", [None, "vllm"])
def test_without_vllm_or_a_gpu_one_line_says_so(monkeypatch, installed):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    (line,) = check.lines_of(check.vllm, "cpu")
    assert line["verdict"] == "SKIP" and line["value"] == (
        "needs a GPU" if installed else "needs vLLM, which is not installed"
    )


def test_an_error_of_a_process_is_found_in_what_it_said():
    said = "W1: a warning\n[rank0]: ValueError: no such device\n[rank1]: RuntimeError: closed\nChildFailedError:\n====="
    assert check.first_error(said).splitlines()[0] == "[rank0]: ValueError: no such device"
    assert check.first_error("killed") == "killed"


def test_memory_is_the_most_that_updates_add(monkeypatch):
    """On a CPU, where torch.cuda's functions are replaced: updates of a small model at the sizes of a run."""
    calls = []
    run = gpu_memory.Run("tiny", gpu_memory.Model("Qwen2.5", 0, 2, 32, 64, 16, 64), 4, 8, 12, 6, "", chunk=16)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + 5 * len(calls))
    update = rloo.update
    monkeypatch.setattr(rloo, "update", lambda *args: (calls.append("update"), update(*args)))
    assert check.peak_of_updates(run, check.TINY["grouped-query"], "cpu") == 5 * len(calls)
    assert calls == ["empty_cache", "reset_peak_memory_stats", "update", "update"]


def test_the_formula_is_compared_without_cudas_own_memory(monkeypatch):
    run = gpu_memory.RUNS[0]
    need = gpu_memory.needed(run)
    monkeypatch.setattr(gpu_memory, "RUNS", [run])
    monkeypatch.setattr(torch, "device", lambda name: types.SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=24e9))
    monkeypatch.setattr(check, "peak_of_updates", lambda *args: 1.05 * (need["training"] - gpu_memory.CONTEXT))
    lines = [*check.lines_of(check.memory, "cuda")]
    assert [line["verdict"] for line in lines] == ["INFO", "INFO", "PASS"]
    assert lines[-1]["value"] == pytest.approx(0.05)
