"""Tests of check.py: it passes here, and whatever of rloo.py is broken, a line that names the place fails."""

from dataclasses import replace
from types import SimpleNamespace

import check
import pytest
import torch
from conftest import start_script

import rloo

BUNDLED = str(rloo.MINI_TLDR / "sft")
SMALL = {"device": "cpu", "dtype": "float32", "rloo_k": 8, "max_prompt_length": 12, "response_length": 9}


def flags(**changes) -> rloo.Args:
    return rloo.resolve_args(rloo.Args(**SMALL | changes))


def test_tiny_models_pass_on_a_cpu_in_both_dtypes(monkeypatch, capsys):
    monkeypatch.setattr(check, "runs", lambda args: iter(()))
    assert check.main(rloo.Args(device="cpu")) == 0
    verdicts = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-2]]
    assert [verdicts.count(x) for x in ("PASS", "SKIP")] == [4 * 7 + 1, 4]


def test_a_model_is_tried_by_its_path(capsys):
    given = {name: SMALL[name] for name in ("device", "max_prompt_length", "response_length")}
    assert check.main(rloo.Args(**given, sft_model_path=BUNDLED)) == 0
    assert "INFO gpt_neox: by default in group rows" in capsys.readouterr().out

    assert check.main(rloo.Args(**given, sft_model_path=BUNDLED, attn_implementation="eager")) == 1
    shown = capsys.readouterr().out
    assert "PASS GPTNeoXForCausalLM, plain rows: logits after the completion" in shown
    assert "has eager attention" in shown


def lanes_see_a_sibling(module, query, key, value, mask, scaling, P, k, original=rloo.group_attention):
    lanes = key[:, :, P:].unflatten(2, (k, -1)).roll(1, dims=2).flatten(2, 3)
    return original(module, query, torch.cat([key[:, :, :P], lanes], dim=2), value, mask, scaling, P, k)


def padding_is_seen(real, original=rloo.causal_mask):
    return original(torch.ones_like(real))


def larger_logits(model, hidden, original=rloo.final_logits):
    return 1.05 * original(model, hidden)


def gradient_stops_in_group_rows(model, batch, original=rloo.group_hidden):
    return original(model, batch).detach().requires_grad_()


def another_scale(*args, original=rloo.step_attention):
    return original(*args[:-1], 1.3 * args[-1])


def skewed(logits, temperature, uniform, original=rloo.sample):
    return original(logits, temperature, uniform**2)


def hotter(logits, temperature, uniform, original=rloo.sample):
    return original(logits, 1.2 * temperature, uniform)


def tiny(args):
    return check.both_layouts(args, "tiny", check.random_model(check.TINY["multi-head"], args))


BROKEN = [  # a function, what it does instead, the check, and the beginning of the line that fails
    ("group_attention", lanes_see_a_sibling, tiny, "tiny, group rows: logits after the completion"),
    ("causal_mask", padding_is_seen, tiny, "tiny, group rows: logits after the prompt"),
    ("final_logits", larger_logits, tiny, "tiny, plain rows: logits after the prompt"),
    ("group_hidden", gradient_stops_in_group_rows, tiny, "tiny: gradients"),
    ("step_attention", another_scale, tiny, "tiny: decoder's log-probs"),
    ("sample", hotter, tiny, "tiny: decoder's log-probs"),
    ("sample", skewed, check.sampling, "sampling"),
]


@pytest.mark.parametrize("function, instead, run, expected", BROKEN, ids=lambda x: getattr(x, "__name__", None))
def test_what_is_broken_is_named(monkeypatch, function, instead, run, expected):
    monkeypatch.setattr(f"rloo.{function}", instead)
    failed = [text for verdict, text in check.lines_of(run(flags())) if verdict == "FAIL"]
    assert failed and failed[0].startswith(expected)


STALE = """
import copy
import rloo

models = []
original = rloo.decode


def decode(model, *args):
    models.append(copy.deepcopy(model))
    return original(models[0], *args)


rloo.decode = decode
if __name__ == "__main__":
    rloo.command_line()
"""


def test_each_extension_is_run_and_a_sampler_without_the_trained_weights_fails(tmp_path, monkeypatch):
    commands = check.commands()
    assert {"rloo.py", "lora", "correction", "grpo", "two processes, fsdp"} <= {*commands}
    (tmp_path / "stale.py").write_text(STALE)
    monkeypatch.setattr(check, "commands", lambda: {"rloo.py": commands["rloo.py"], "stale": [tmp_path / "stale.py"]})

    def run(words, **options):
        process = start_script(words[1:], tmp_path / "log")
        process.join()
        return SimpleNamespace(returncode=process.exitcode, stderr=(tmp_path / "log").read_text())

    monkeypatch.setattr(check.subprocess, "run", run)
    monkeypatch.setattr(check.os, "cpu_count", lambda: 1)  # one after the other, since they write one log
    (first, _), (second, text) = check.lines_of(check.runs(flags(dtype="bfloat16")))
    assert (first, second) == ("PASS", "FAIL") and "what samples is not the policy" in text


def test_an_error_and_a_failed_line_are_the_exit_status(monkeypatch, capsys):
    def lines():
        yield "x", float("nan"), 1.0
        raise ValueError("no such thing")

    monkeypatch.setattr(check, "checks", lambda args, bundled: [lines()])
    assert check.main(replace(flags(), sft_model_path=BUNDLED)) == 2
    shown = capsys.readouterr().out
    assert "FAIL x: nan (at most 1)" in shown and "ValueError: no such thing" in shown
