"""Tests of exact.py: the enumeration against sums written anew, and the page against its records.

python -m pytest -q benchmark/gradient
"""

import itertools
import math
from statistics import median

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
    probability = exact.token_logprobs(a_case().theta).sum(-1).exp()
    assert probability.sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12)


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
    for option in (Option(), Option(token_level_kl=True), Option(baseline=False), Option(kl="k3 in both")):
        assert bias(case, option, k) < 1e-10
    assert bias(case, Option(kl="none"), k) > 1e-2  # the KL is seen
    right = rloo.advantage
    monkeypatch.setattr(rloo, "advantage", lambda rewards, estimator: right(rewards) - 0.1 * rewards)
    assert bias(case, Option(), k) > 1e-2  # a baseline that knows the completion's own reward


@pytest.mark.parametrize("name", list(OPTIONS))
def test_the_enumeration_is_the_sum_over_all_ordered_updates(name):
    case = a_case("sparse")
    index = torch.tensor([*itertools.product(range(N), repeat=2 * B)]).view(-1, 2, B).transpose(0, 1)
    g = exact.estimates(case, index, OPTIONS[name])
    weight = case.logprobs.sum(-1).exp()[torch.arange(B), index].prod(0).prod(-1)
    mean = weight @ g
    found, variance = exact.moments(case, 2, OPTIONS[name])
    assert torch.allclose(found, mean, atol=1e-12)
    assert variance == pytest.approx((weight @ (g - mean).square().sum(-1)).item())
    assert exact.UPDATES[3][1].sum().item() == N ** (3 * B)


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
        "to go": exact.estimates(case, index, Option(token_level_kl=True)),
        "off": exact.estimates(case, index, Option(), sampler),
        "truncate": exact.estimates(case, index, corrected("truncate", 1.1), sampler),
        "mask": exact.estimates(case, index, corrected("mask", 1.1), sampler),
        "token": exact.estimates(case, index, corrected("truncate", 1.1, token=True), sampler),
    }
    for name in names:
        assert torch.allclose(found[name][0], expected[name], atol=1e-12), name
    assert not torch.allclose(found["truncate"], found["mask"]) and not torch.allclose(found["token"], found["off"])


@pytest.mark.parametrize("reward", ["dense", "sparse"])
def test_the_weight_of_whole_completions_without_a_cap_leaves_no_bias_and_nothing_less_does(reward):
    case = a_case(reward)
    sampler = another_sampler(case)
    whole = [corrected("truncate", math.inf), corrected("mask", math.inf)]
    less = [Option(), corrected("truncate", math.inf, token=True), corrected("truncate", 1.2), corrected("mask", 1.2)]
    assert all(bias(case, option, sampler=sampler) < 1e-10 for option in whole)
    assert all(bias(case, option, sampler=sampler) > 1e-2 for option in less)


@pytest.mark.parametrize("name", exact.SAMPLERS)
def test_a_sampler_is_a_distribution_that_differs_from_the_policy(name):
    start = a_case()
    kind, size = exact.SAMPLERS[name]
    case, sampler = exact.differing(start, kind, size, seed=1)
    assert sampler.sum(-1).exp().sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12)
    gap = exact.gap_of(case, sampler)
    assert 1e-3 < gap < 0.5
    if kind == "step":
        assert (case.theta - start.theta).norm().item() == pytest.approx(size)
        assert torch.equal(sampler, start.logprobs) and not torch.allclose(case.exact, start.exact)
    else:  # the gap is that of samples
        index = torch.multinomial(sampler.sum(-1).exp(), 50_000, True, generator=torch.Generator().manual_seed(1))
        apart = (case.logprobs - sampler)[torch.arange(B)[:, None], index]  # (B, draws, R)
        assert apart[MASK[index]].abs().mean().item() == pytest.approx(gap, rel=0.02)


def test_the_records_are_what_the_command_makes_and_the_page_has_them():
    recorded = exact.common.Records(exact.RECORDS).all
    for place, distances in exact.measure_kl().items():
        for distance, found in distances.items():
            assert recorded["kl"][place][distance] == pytest.approx(found, rel=1e-3, abs=1e-9)
    case, option = next(exact.cases(["dense"]))[1], OPTIONS["grpo"]
    one = exact.judge(case.exact, *exact.moments(case, 2, option), exact.moments(case, 2, Option()))
    for column, value in zip(exact.COLUMNS, one):
        low, _, high = recorded["options"]["grpo"][exact.POSITIONS[0]][column]
        assert low <= value <= high
    name, cases = "logits off by 0.3", exact.cases(exact.REWARDS[:2])
    gaps = [exact.gap_of(*exact.differing(case, *exact.SAMPLERS[name], seed)) for (seed, *_), case in cases]
    assert recorded["samplers"][name]["gap"] == pytest.approx(median(gaps), abs=1e-5)
    page = (exact.HERE / "README.md").read_text(encoding="utf-8")
    assert exact.common.filled(page, exact.tables(recorded)) == page
