"""Tests of exact.py: the enumeration against sums written anew, and the page against its records.

python -m pytest -q benchmark/gradient
"""

import itertools
import math
from dataclasses import replace
from statistics import median

import exact
import pytest
import torch
from exact import MASK, OPTIONS, TOKENS, B, N, Option

import rloo


def a_case(reward: str = "dense") -> exact.Case:
    reference, scores = exact.make_reference(1), exact.make_scores(reward, 1)
    return exact.make_case(exact.move_away(reference, scores), reference, scores)


def bias(case: exact.Case, option: Option, k: int = 2) -> float:
    return exact.bias(case.exact, exact.moments(case, k, option)[0])


def corrected(correction: str, cap: float, per_token: bool = False) -> Option:
    return Option(rollout_correction=correction, rollout_correction_cap=cap, token_level_kl=per_token)


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
    for name in ("rloo (the defaults)", "token_level_kl", "no baseline", "k3 in reward and loss"):
        assert bias(case, OPTIONS[name], k) < 1e-10
    assert bias(case, Option(grpo=exact.SUMS), k) < 1e-10
    assert bias(case, Option(kl="none"), k) > 1e-2  # the KL is seen
    right = rloo.advantage
    monkeypatch.setattr(rloo, "advantage", lambda rewards: right(rewards) - 0.1 * rewards)
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
    or w = π / μ cut at 1.1, or of a mask 0 outside of [1 / 1.1, 1.1]; or each token with its own G_t and w_t. With the
    correction the KL is the policy's, without it the sampler's."""
    on_policy, index = a_case(), torch.tensor([[[1, 5]], [[4, 0]]])  # (k, 1, B)
    case = exact.with_noise(on_policy, 0.3, seed=2)
    names = ("default", "to go", "off", "truncate", "mask", "token")
    expected = {name: torch.zeros(15, dtype=torch.float64) for name in names}
    for b, j in itertools.product(range(B), range(2)):
        own, other = index[j, 0, b], index[1 - j, 0, b]

        def to_go(logprobs, i, t, b=b):
            return case.scores[b, i] - exact.KL_COEF * (logprobs[b, i] - case.ref_logprobs[b, i])[t:].sum()

        slopes = case.jacobian[b, own] / 4  # (T, d)
        A = to_go(case.logprobs, own, 0) - to_go(case.logprobs, other, 0)
        w = (case.logprobs[b, own] - case.sampler[b, own]).exp()
        expected["default"] += A * slopes.sum(0)
        of_sampler = to_go(case.sampler, own, 0) - to_go(case.sampler, other, 0)
        expected["off"] += of_sampler * slopes.sum(0)
        expected["truncate"] += min(w.prod().item(), 1.1) * A * slopes.sum(0)
        expected["mask"] += w.prod() * (1 / 1.1 <= w.prod() <= 1.1) * A * slopes.sum(0)
        for t in range(2):
            A_t = to_go(case.logprobs, own, t) - to_go(case.logprobs, other, t)
            expected["to go"] += A_t * slopes[t]
            expected["token"] += w[t].clamp(max=1.1) * A_t * slopes[t]
    found = {
        "default": exact.estimates(on_policy, index, Option()),
        "to go": exact.estimates(on_policy, index, OPTIONS["token_level_kl"]),
        "off": exact.estimates(case, index, Option()),
        "truncate": exact.estimates(case, index, corrected("truncate", 1.1)),
        "mask": exact.estimates(case, index, corrected("mask", 1.1)),
        "token": exact.estimates(case, index, corrected("truncate", 1.1, per_token=True)),
    }
    for name in names:
        assert torch.allclose(found[name][0], expected[name], atol=1e-12), name
    assert not torch.allclose(found["truncate"], found["mask"]) and not torch.allclose(found["token"], found["off"])


@pytest.mark.parametrize("reward", ["dense", "sparse"])
def test_the_weight_of_whole_completions_without_a_cap_leaves_no_bias_and_nothing_less_does(reward):
    case = exact.with_noise(a_case(reward), 0.7, seed=2)
    whole = [corrected("truncate", math.inf), corrected("mask", math.inf)]
    less = [
        Option(),
        corrected("truncate", math.inf, per_token=True),
        corrected("truncate", 1.2),
        corrected("mask", 1.2),
    ]
    for true, kl in ((case, "k1"), (exact.without_kl(case), "none")):
        assert all(bias(true, replace(option, kl=kl)) < 1e-10 for option in whole)
        assert all(bias(true, replace(option, kl=kl)) > 1e-2 for option in less)


@pytest.mark.parametrize("size", exact.SAMPLERS)
def test_a_sampler_is_a_distribution_that_differs_from_the_policy(size):
    case = exact.with_noise(a_case(), size, seed=1)
    probability = case.sampler.sum(-1).exp()
    assert probability.sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12)
    gap = exact.gap_of(case)
    assert size / 10 < gap < size
    index = torch.multinomial(probability, 50_000, True, generator=torch.Generator().manual_seed(1))
    apart = (case.logprobs - case.sampler)[torch.arange(B)[:, None], index]  # (B, draws, T)
    assert apart[MASK[index]].abs().mean().item() == pytest.approx(gap, rel=0.02)


def test_the_records_are_what_the_command_makes_and_the_page_has_them():
    recorded = exact.common.Records(exact.RECORDS).all
    _, position, case = next(exact.cases(["dense"]))
    one = exact.judge(case.exact, *exact.moments(case, 2, OPTIONS["grpo.py"]), exact.moments(case, 2, Option()))
    for column, value in zip(exact.COLUMNS, one):
        low, _, high = recorded["options"]["found"]["grpo.py"][position][column]
        assert math.isnan(value) or low <= value <= high
    gaps = [exact.gap_of(exact.with_noise(case, 0.3, seed)) for seed, _, case in exact.cases(exact.REWARDS[:2])]
    assert recorded["samplers"]["found"]["0.3"]["gap"] == pytest.approx(median(gaps), rel=1e-3)
    assert exact.table(recorded["samplers"]["found"]) in (exact.HERE / "README.md").read_text(encoding="utf-8")


def test_what_the_page_says_of_the_options_is_in_the_records():
    found = exact.common.Records(exact.RECORDS).value("options", "found")
    assert found.keys() == OPTIONS.keys()
    for name in ("rloo (the defaults)", "token_level_kl", "k3 in reward and loss"):
        assert max(found[name][position]["bias"][-1] for position in exact.POSITIONS) < 1e-10
    away = {name: x[exact.POSITIONS[1]] for name, x in found.items()}
    assert away["grpo.py: group's baseline alone (Dr. GRPO)"]["noise"] == [1, 1, 1]
    low, _, high = away["grpo.py: grpo's baseline alone"]["noise"]
    assert low < 1 < high
    for name in ("grpo.py", "grpo.py: k3 in the loss alone", "grpo.py: unbiased_kl alone", "k3 in the reward"):
        assert away[name]["bias"][0] > 0.04
