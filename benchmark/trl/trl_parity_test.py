"""rloo.py against TRL's numbers in golden.json, without TRL: `pytest -q benchmark/trl/trl_parity_test.py`.

`python benchmark/trl/trl_parity.py same` trained TRL 0.19 and 1.x on the completions in that file and noted how far
their weights moved. On the same completions rloo.py must move as far, and have the same KL, rewards and loss.
"""

import json
import math
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import torch
import transformers
from safetensors.torch import load_file
from trl_parity import (
    GOLDEN,
    HERE,
    MINI_TLDR,
    ROWS,
    Args,
    Ratios,
    clip_figures,
    comparable,
    hash_of,
    main,
    movement,
    same_rloo,
)

golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
RUNS: dict[str, dict] = {}  # flags -> what rloo.py did; rows of both versions share it


@pytest.fixture(scope="module", autouse=True)
def quiet():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from a second thread
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


def run(flags: dict, folder) -> dict:
    key = json.dumps(flags, sort_keys=True)
    if key not in RUNS:
        RUNS[key] = same_rloo(flags, golden["prompts"], golden["completions"], folder / "out")
    return RUNS[key]


def test_golden_numbers_are_of_these_models_and_settings():
    for name, value in golden["models"].items():
        assert hash_of(name) == value, f"mini_tldr/{name} is another one: run `{golden['command']}` again"
    known = [(line["trl"].split()[1][0], line["setting"]) for line in golden["golden"]]
    assert known == [(row.trl, row.name) for row in ROWS if row.golden and not row.why]
    assert all(line["agree"] or line["why"] for line in golden["table"])
    ended = (torch.tensor(golden["completions"]) == 0).any(-1)
    assert ended.any() and not ended.all()


@pytest.mark.parametrize("line", golden["golden"], ids=lambda line: f"{line['trl'].split(',')[0]}, {line['setting']}")
def test_rloo_moves_as_trl_does(line, tmp_path):
    functions = {"reward_fns": f"{HERE / 'trl_parity.py'}:length_score"} if line["reward"] == "length" else {}
    ours = run(line["flags"] | functions, tmp_path)
    start = load_file(MINI_TLDR / "sft" / "model.safetensors")
    tensors = len(start)
    for weights, theirs in zip(ours["weights"][1:], line["movement"], strict=True):
        found, total = movement(start, weights), sum(norm**2 for norm in theirs[:tensors]) ** 0.5
        # What rounding costs on any CPU: 5e-6 of a tensor's norm, 3e-5 of a projection.
        assert sum(norm**2 for norm in found[:tensors]) ** 0.5 == pytest.approx(total, rel=1e-5)
        assert found[:tensors] == pytest.approx(theirs[:tensors], rel=5e-5)
        assert found[tensors:] == pytest.approx(theirs[tensors:], abs=1e-4 * total)
    metrics = comparable(line["trl"].split()[1][0], ours["metrics"], ours=True)
    for our_line, their_line in zip(metrics, line["metrics"], strict=True):
        assert our_line == pytest.approx(their_line, rel=1e-5, abs=1e-5)


def test_what_the_clip_removes_is_seen_in_either_trainer_s_loss(monkeypatch):
    for name in ("clamp", "max", "min"):
        monkeypatch.setattr(torch, name, getattr(torch, name))  # put back at the end
    ratios, seen = torch.tensor([0.7, 0.7, 1.0, 1.3, 1.3]), Ratios()
    advantages = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    clipped = torch.clamp(ratios, 1.0 - 0.2, 1.0 + 0.2)
    torch.max(-advantages * ratios, -advantages * clipped)  # as in 0.19
    clipped = torch.clamp(ratios, 1 - 0.2, 1 + 0.2)
    torch.min(advantages * ratios, advantages * clipped)  # as in 1.x
    torch.clamp(torch.ones(2), 0.0, 0.5), torch.max(torch.ones(2)), torch.min(torch.ones(2), torch.ones(2))
    assert len(seen.calls) == 2
    for call in seen.calls:
        assert call[0] == pytest.approx(ratios.tolist()) and call[1] == [False, True, False, True, False]


def test_shares_of_the_first_step_and_of_all():
    first, second = ([1.0, math.exp(0.5)], [False, True]), ([math.exp(-1.0), 1.0], [False, False])
    found = clip_figures([first, second] * 3, steps=2, accumulation=1)  # three updates of two steps
    assert found == pytest.approx(
        {
            "first step, |log ρ|": 0.25,
            "largest |log ρ|": 0.5,
            "first step, ρ outside": 0.5,
            "first step, removed": 0.5,
            "all steps, removed": 0.25,
            "completions": 6,
        }
    )
    assert clip_figures([first, second], steps=1, accumulation=2)["first step, |log ρ|"] == pytest.approx(0.375)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({}, "--trl is needed"),
        ({"trl": ("python",), "seeds": 0}, "at least 1"),
        ({"trl": ("python",), "episodes": 100}, "at least 128"),
        ({"trl": ("python",), "output": "x.txt"}, ".json"),
        ({"trl": ("/no/such/python",)}, "cannot be run"),
    ],
)
def test_a_mistake_is_one_line(wrong, message):
    with pytest.raises(SystemExit) as end:
        main(Args(part="same", **wrong))
    assert message in end.value.code and "\n" not in end.value.code
