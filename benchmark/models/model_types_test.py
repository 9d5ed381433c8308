"""Tests of model_types.py on some model types: `pytest -q benchmark/models`. All take minutes: run model_types.py."""

import model_types
import pytest
import torch

import rloo

KNOWN = [name for name in rloo.GROUP_MODELS if name in model_types.CONFIG_MAPPING]  # not all are in older transformers


@pytest.mark.parametrize("name", KNOWN[::12])
def test_some_of_the_list_are_right_in_both_layouts(name):
    assert not any(model_types.compare(model_types.small_model(name)).values())


@pytest.mark.parametrize(
    "name, fails",
    [
        ("falcon", ["group"]),  # attention of its own
        ("jamba", ["group"]),  # a layer that reads the slots in their order
        ("gpt_neo", ["group"]),  # no sdpa
        ("cpmant", ["group", "plain", "start"]),  # sees later tokens
    ],
)
def test_what_cannot_run_is_found_and_what_is_wrong_in_plain_rows_is_refused(name, fails):
    found = model_types.compare(model_types.small_model(name))
    assert sorted(what for what in found if found[what]) == fails


def test_small_mistakes_are_found(monkeypatch):
    """In a step of the decoder, in positions; and a list that has others."""
    model = model_types.small_model("llama")
    with monkeypatch.context() as patched:
        step = rloo.step_attention
        patched.setattr(rloo, "step_attention", lambda *inputs: step(*inputs) * 1.001)
        found = model_types.compare(model)
        assert "sampling" in found["group"] and "gradient" not in found["group"] and not found["plain"]
    with monkeypatch.context() as patched:
        patched.setattr(rloo, "positions_of", lambda mask: torch.arange(mask.shape[1]).expand(mask.shape) % 9)
        found = model_types.compare(model)
        assert "gradient" in found["group"] and "log-probs" in found["plain"] and found["start"]
    monkeypatch.setattr(rloo, "GROUP_MODELS", ["llama", "falcon"])
    with pytest.raises(SystemExit, match="^falcon: is in GROUP_MODELS$"):
        model_types.main(["llama", "falcon"], "cpu")
