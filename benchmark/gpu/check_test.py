"""Tests of check.py: it passes here, and whatever of rloo.py is broken, a line that names the place fails."""

import types

import check
import gpu_memory
import pytest
import torch

import rloo
from benchmark.extensions import lora


@pytest.fixture(autouse=True)
def few_rows(tmp_path, monkeypatch):
    """They are read faster than 500."""
    lines = (check.MINI / "validation.jsonl").read_text().splitlines(keepends=True)[:40]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    monkeypatch.setitem(check.SMALL_RUN, "dataset_name", str(tmp_path / "rows.jsonl"))


def test_all_lines_pass_on_a_cpu(monkeypatch, capsys):
    """Without those of whole runs."""
    runs = (check.resume, check.extensions, check.several)
    monkeypatch.setattr(check, "CHECKS", [x for x in check.CHECKS if x not in runs])
    assert check.main("cpu") == 0
    verdicts = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-2]]
    assert [verdicts.count(x) for x in ("PASS", "INFO", "SKIP")] == [26, 2, 2]


def test_every_extension_is_checked_and_a_sampler_without_the_trained_weights_fails(monkeypatch):
    assert {"lora", "correction", "gspo", "vllm_rollout"} <= {*check.extension_names()}
    monkeypatch.setattr(check, "extension_names", lambda: ["lora", "maxrl"])
    assert [verdict for verdict, _ in check.lines_of(check.extensions, "cpu")] == ["PASS", "PASS"]
    monkeypatch.setitem(lora.SEAMS, "update_sampler", lambda sampler, policy: None)
    monkeypatch.setattr(check, "extension_names", lambda: ["lora"])
    assert [verdict for verdict, _ in check.lines_of(check.extensions, "cpu")] == ["FAIL"]


def lanes_see_a_sibling(sdpa, query, key, value, mask, P, k, original=rloo.group_attention):
    lanes = key[:, :, P:].unflatten(2, (-1, k)).roll(1, dims=3).flatten(2, 3)
    return original(sdpa, query, torch.cat([key[:, :, :P], lanes], dim=2), value, mask, P, k)


def padding_is_seen(real, original=rloo.causal_mask):
    return original(torch.ones_like(real))


def larger_logits(model, hidden, original=rloo.final_logits):
    return 1.05 * original(model, hidden)


def gradient_stops_before_the_head(model, hidden, *args, original=rloo.block_logprobs):
    return original(model, hidden.detach(), *args)


def another_scale(*args, original=rloo.step_attention):
    return original(*args[:-1], 1.1 * args[-1])


def other_lanes_stay(self, lanes, slots, original=rloo.LaneCache.grow):
    original(self, lanes.flip(0), slots)


def one_stop_token(responses, stop_ids, original=rloo.completion_mask):
    return original(responses, stop_ids[:1])


def skewed(logits, temperature, uniform, original=rloo.sample):
    return original(logits, temperature, uniform**2)


def hotter(logits, temperature, uniform, original=rloo.sample):
    return original(logits, 1.2 * temperature, uniform)


def opposite(rewards, estimator, original=rloo.advantage):
    return -original(rewards, estimator)


BROKEN = [  # a function, what it does instead, the check, and the beginning of the line that fails
    ("group_attention", lanes_see_a_sibling, check.log_probs_and_gradients, "log-probs: group"),
    ("causal_mask", padding_is_seen, check.log_probs_and_gradients, "log-probs: group"),
    ("final_logits", larger_logits, check.log_probs_and_gradients, "log-probs: plain"),
    ("block_logprobs", gradient_stops_before_the_head, check.log_probs_and_gradients, "gradients: "),
    ("step_attention", another_scale, check.decoding, "decoding: log-probs"),
    ("LaneCache.grow", other_lanes_stay, check.decoding, "decoding"),
    ("completion_mask", one_stop_token, check.stop_tokens, "stop tokens"),
    ("sample", skewed, check.sampling, "sampling"),
    ("advantage", opposite, check.updates, "update: share of tokens without reward"),
    ("sample", hotter, check.updates, "update: rollout's log-probs"),
    ("load_optimizer", lambda *args: None, check.resume, "resume"),
]


@pytest.mark.parametrize("function, instead, run, expected", BROKEN, ids=lambda x: getattr(x, "__name__", None))
def test_what_is_broken_is_named(monkeypatch, function, instead, run, expected):
    monkeypatch.setattr(f"rloo.{function}", instead)
    lines = check.lines_of(run, "cpu")  # made one by one, up to that one
    assert any(verdict == "FAIL" and text.startswith(expected) for verdict, text in lines)


def test_an_error_and_a_failed_line_are_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(rloo.Decoder, "step", lambda self: self.no_such_name)
    monkeypatch.setattr(check, "CHECKS", [check.decoding, lambda device: iter([("x", float("nan"), 1.0)])])
    assert check.main("cpu") == 2
    shown = capsys.readouterr().out
    assert "FAIL decoding: Traceback" in shown and "in run" in shown
    assert shown.endswith("\nx: nan (at most 1)\n")


def test_memory_of_two_updates_is_compared_without_cudas_own(monkeypatch):
    """On a CPU, where torch.cuda's functions are replaced: updates of a small model at the sizes of a run."""
    model = gpu_memory.Model("Qwen2.5", 0, 2, 64, 64, 64, 64)
    run = gpu_memory.Args(k=4, m=8, P=12, T=6, chunk=16)
    calls = []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 100 + 5 * len(calls))
    update = check.update
    monkeypatch.setattr(check, "update", lambda *args: (calls.append("update"), update(*args)))
    assert check.peak_of_updates(run, check.config_of(model), "cpu") == 5 * len(calls)
    assert calls == ["empty_cache", "reset_peak_memory_stats", "update", "update"]

    need = gpu_memory.needed(*gpu_memory.RUNS["Qwen2.5-0.5B, 24 GB"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=24e9))
    monkeypatch.setattr(check, "peak_of_updates", lambda *args: 1.05 * (need["training"] - gpu_memory.CONTEXT))
    lines = list(check.memory("cuda"))
    assert lines[1] == ("formula too low by, Qwen2.5-0.5B, 24 GB", pytest.approx(0.05), 0.1)
