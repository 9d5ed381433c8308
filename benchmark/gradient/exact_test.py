"""Tests of exact.py: the enumeration against sums written anew and against samples; what the page says of it."""

import itertools
import json
import math
import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import exact
import pytest
import torch
from exact import MASK, OPTIONS, TOKENS, B, N, Option

import rloo


def a_case(reward: str = "dense", away: float = 0.5) -> exact.Case:
    reference, scores = exact.make_reference(1), exact.make_scores(reward, 1)
    return exact.make_case(exact.move_away(reference, scores, away), reference, scores)


def bias(case: exact.Case, option: Option, k: int = 2, sampler=None) -> float:
    base = exact.moments(case, k, Option())
    return exact.judge(case.exact, *exact.moments(case, k, option, sampler), base)[0]


def corrected(correction: str, cap: float = 2.0, token: bool = False) -> Option:
    return Option(rollout_correction=correction, rollout_correction_cap=cap, token_ratio=token)


def another_sampler(case: exact.Case, size: float = 0.5) -> torch.Tensor:
    noise = torch.randn(15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return exact.token_logprobs(case.theta + size * noise)


def test_all_completions_are_listed_once_and_their_probabilities_add_up_to_one():
    lists = [ids[:length].tolist() for ids, length in zip(TOKENS, MASK.sum(-1))]
    assert sorted(lists) == [[0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    for top_p in (1.0, 0.9):
        probability = exact.token_logprobs(a_case().theta, top_p).sum(-1).exp()
        assert probability.sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12)
        assert (probability == 0).any() == (top_p < 1)


def test_the_exact_gradient_is_that_of_finite_differences():
    case, step = a_case(), 1e-6

    def value(theta: torch.Tensor) -> float:
        total = 0.0
        for b, (i, ids) in itertools.product(range(B), enumerate(TOKENS.tolist())):
            logprob = 0.0
            for t in range(int(MASK[i].sum())):
                logits = theta[3 * b : 3 * b + 3] + theta[6:].view(3, 3)[([0, *ids])[t]]
                logprob = logprob + torch.log_softmax(logits, 0)[ids[t]]
            kl = logprob - case.ref_logprobs[b, i].sum()
            total += (logprob.exp() * (case.scores[b, i] - exact.KL_COEF * kl)).item() / B
        return total

    for i in (0, 4, 7, 14):
        move = torch.zeros(15, dtype=torch.float64)
        move[i] = step
        slope = (value(case.theta + move) - value(case.theta - move)) / (2 * step)
        assert slope == pytest.approx(case.exact[i].item(), abs=1e-8)


@pytest.mark.parametrize("k", exact.KS)
@pytest.mark.parametrize("reward", exact.REWARDS)
def test_rloo_has_no_bias_and_a_wrong_baseline_has(reward, k, monkeypatch):
    case = a_case(reward)
    for option in (Option(), Option(kl_level="token"), Option(baseline=False), Option(kl="k3 in both")):
        assert bias(case, option, k) < 1e-10
    assert bias(case, Option(kl="none"), k) > 1e-2  # the KL is seen
    right = rloo.advantage
    monkeypatch.setattr(rloo, "advantage", lambda rewards, estimator: right(rewards) - 0.1 * rewards)
    assert bias(case, Option(), k) > 1e-2  # a baseline that knows the completion's own reward


@pytest.mark.parametrize("name", list(OPTIONS))
def test_an_update_stands_for_all_its_orders(name):
    """The estimate of an update with its completions in another order, its prompts one by one."""
    case, (index, orders) = a_case(), exact.UPDATES[3]
    some = index[:, torch.randint(index.shape[1], (20,), generator=torch.Generator().manual_seed(1))]
    again = torch.stack([some[[2, 0, 1], :, 0], some[[1, 0, 2], :, 1]], dim=-1)
    first, second = (exact.estimates(case, x, OPTIONS[name]) for x in (some, again))
    assert torch.allclose(first, second, rtol=1e-8, atol=1e-10)
    assert orders.sum().item() == N ** (3 * B)


def test_the_enumeration_is_the_sum_over_all_ordered_updates():
    case, option = a_case("sparse"), Option("grpo", normalize_reward=True)
    index = torch.tensor([*itertools.product(range(N), repeat=2 * B)]).view(-1, 2, B).transpose(0, 1)
    g = exact.estimates(case, index, option)
    weight = case.logprobs.sum(-1).exp()[torch.arange(B), index].prod(0).prod(-1)
    mean = weight @ g
    found, variance = exact.moments(case, 2, option)
    assert torch.allclose(found, mean, atol=1e-12)
    assert variance == pytest.approx((weight @ (g - mean).square().sum(-1)).item())


def test_estimates_are_the_written_out_sums():
    """One update, k = 2: g = mean_j v_j A_j ∇ log π(y_j), A_j = R_j - R_other, or each token with its own G_t. v is 1,
    or w = π / μ cut at 1.1, or of a mask 0 outside of [1 / 1.1, 1.1]. With a correction the KL is the policy's, without
    one the sampler's."""
    case, index = a_case(), torch.tensor([[[1, 5]], [[4, 0]]])  # (k, 1, B)
    sampler = another_sampler(case, 0.2)
    names = ("default", "to go", "off", "truncate", "mask", "token")
    expected = {name: torch.zeros(15, dtype=torch.float64) for name in names}
    for b, j in itertools.product(range(B), range(2)):
        own, other = index[j, 0, b], index[1 - j, 0, b]

        def to_go(logprobs, i, t, b=b):
            return case.scores[b, i] - exact.KL_COEF * (logprobs[b, i] - case.ref_logprobs[b, i])[t:].sum()

        slopes = case.jacobian[b, own] / 4  # (R, d)
        A = to_go(case.logprobs, own, 0) - to_go(case.logprobs, other, 0)
        w = (case.logprobs[b, own] - sampler[b, own]).exp()
        expected["default"] += A * slopes.sum(0)
        expected["off"] += (to_go(sampler, own, 0) - to_go(sampler, other, 0)) * slopes.sum(0)
        expected["truncate"] += min(w.prod().item(), 1.1) * A * slopes.sum(0)
        expected["mask"] += w.prod() * (1 / 1.1 <= w.prod() <= 1.1) * A * slopes.sum(0)
        expected["token"] += A * (w.clamp(max=1.1)[:, None] * slopes).sum(0)
        for t in range(2):
            expected["to go"] += (to_go(case.logprobs, own, t) - to_go(case.logprobs, other, t)) * slopes[t]
    found = {
        "default": exact.estimates(case, index, Option()),
        "to go": exact.estimates(case, index, Option(kl_level="token")),
        "off": exact.estimates(case, index, Option(), sampler),
        "truncate": exact.estimates(case, index, corrected("truncate", 1.1), sampler),
        "mask": exact.estimates(case, index, corrected("mask", 1.1), sampler),
        "token": exact.estimates(case, index, corrected("truncate", 1.1, token=True), sampler),
    }
    for name in names:
        assert torch.allclose(found[name][0], expected[name], atol=1e-12), name
    assert not torch.allclose(found["truncate"], found["mask"]) and not torch.allclose(found["token"], found["off"])


# ---- A sampler that is not the policy --------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", ["dense", "sparse"])
def test_the_weight_of_whole_completions_without_a_cap_leaves_no_bias_and_nothing_less_does(reward, monkeypatch):
    case = a_case(reward)
    sampler = another_sampler(case)
    whole = [corrected("truncate", math.inf), corrected("mask", math.inf)]
    less = [Option(), corrected("truncate", math.inf, token=True), corrected("truncate", 1.2), corrected("mask", 1.2)]
    assert all(bias(case, option, sampler=sampler) < 1e-10 for option in whole)
    assert all(bias(case, option, sampler=sampler) > 1e-2 for option in less)
    cut = exact.token_logprobs(case.theta, 0.9)  # what is never sampled cannot be corrected
    assert 1e-2 < bias(case, whole[0], sampler=cut) < math.inf
    right = rloo.rollout_weight
    monkeypatch.setattr(rloo, "rollout_weight", lambda old, sampled, *more: right(sampled, old, *more))
    assert bias(case, whole[0], sampler=sampler) > 1e-2  # upside down


@pytest.mark.parametrize("name", exact.SAMPLERS)
def test_a_sampler_is_a_distribution_that_differs_from_the_policy(name):
    start = a_case()
    case, sampler = exact.differing(start, *exact.SAMPLERS[name], seed=1)
    assert sampler.sum(-1).exp().sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12)
    gap = exact.gap_of(case, sampler)
    assert 1e-3 < gap < 0.5
    kind, size = exact.SAMPLERS[name]
    if kind == "step":
        assert (case.theta - start.theta).norm().item() == pytest.approx(size)
        assert torch.equal(sampler, start.logprobs) and not torch.allclose(case.exact, start.exact)
    if kind == "logits":  # the gap is that of samples
        index = torch.multinomial(sampler.sum(-1).exp(), 50_000, True, generator=torch.Generator().manual_seed(1))
        apart = (case.logprobs - sampler)[torch.arange(B)[:, None], index]  # (B, draws, R)
        assert apart[MASK[index]].abs().mean().item() == pytest.approx(gap, rel=0.02)


# ---- Records and page ------------------------------------------------------------------------------------------------


def test_the_records_are_what_the_command_makes():
    """The numbers of one case of each part, measured again."""
    recorded = json.loads((exact.HERE / "exact.json").read_text())
    said, case = next(exact.cases([1], ["dense"]))
    base = exact.moments(case, 2, Option())
    for name in ("grpo", "kl_level token"):
        again = exact.judge(case.exact, *exact.moments(case, 2, OPTIONS[name]), base)
        assert recorded["options"][0]["found"][name] == pytest.approx(again, rel=1e-3, abs=1e-9)
    assert recorded["options"][0].items() >= said.items()
    row = recorded["samplers"][0]
    case, sampler = exact.differing(case, *exact.SAMPLERS[row["sampler"]], seed=1)
    again = exact.judge(case.exact, *exact.moments(case, 2, exact.CORRECTIONS["truncate, token"], sampler), base)
    assert row["found"]["truncate, token"] == pytest.approx(again, rel=1e-3, abs=1e-9)


def test_the_page_says_what_the_records_say():
    page = (exact.HERE / "README.md").read_text(encoding="utf-8")
    result = json.loads((exact.HERE / "exact.json").read_text())
    for name, table in exact.tables(result).items():
        assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in page
    (grpo,) = re.findall(r"- GRPO: .*?(?=\n- )", page, re.DOTALL)
    (noise_at, noise_away) = (exact.values(result["options"], "grpo", "noise", position=x) for x in exact.POSITIONS)
    ranges = [exact.values(result["options"], "grpo", column) for column in ("cosine", "variance")]
    assert re.findall(r"-?[\d.]+ to [\d.]+", grpo) == [exact.span(x) for x in (*ranges, noise_at, noise_away)]
    biases = [max(exact.values(result["options"], x, "bias")) for x in ("rloo (the defaults)", "kl_level token")]
    assert f"have no bias: at most {max(biases):.0e}, rounding" in page
    published = exact.values(result["options"], "grpo, k3 in loss, sequence-mean", "cosine")
    assert f"(direction {exact.span(published)})" in page
    pairs = [
        [exact.median(exact.values(result["samplers"], x, column, sampler=name)) for x in ("off", "truncate, token")]
        for name, column in ((name, "bias") for name in exact.SAMPLERS if "top-p" not in name)
    ]
    left = [token / off for off, token in pairs]
    assert f"leaves {100 * min(left):.0f} to {100 * max(left):.0f}% of the bias" in page
    noise = [
        exact.median(exact.values(result["samplers"], "truncate, sequence", "noise", sampler=x)) for x in exact.SAMPLERS
    ]
    assert f"median noise is at most {max(noise):.2f} times" in " ".join(page.split())
