"""Tests of check.py: it passes here, and whatever of rloo.py is broken, a line that names the place fails."""

import json

import check
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
