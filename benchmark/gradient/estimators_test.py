"""Tests of estimators.py: the enumeration against sums written anew and against samples; the sketch, the errors."""

import itertools
import json
import math
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import estimators
import pytest
import torch
from estimators import OPTIONS, B, Option

TOKENS, MASK = estimators.all_completions(3, 2)
N = len(TOKENS)


def a_case(reward: str = "dense", away: float = 0.5, kl_coef: float = 0.3, seed: int = 1) -> estimators.Case:
    reference = torch.randn(15, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = estimators.make_scores(reward, N, seed)
    theta = estimators.move_away(reference, scores, TOKENS, MASK, away) if away else reference
    return estimators.make_case(theta, reference, scores, TOKENS, MASK, kl_coef)


def measured(case: estimators.Case, option: Option, k: int = 2) -> dict:
    updates = estimators.all_updates(N, k)
    base = estimators.moments(case, updates, Option())
    return estimators.judge(case.exact, *estimators.moments(case, updates, option), base)


def test_all_completions_are_listed_once_and_their_probabilities_add_up_to_one():
    lists = [ids[:length].tolist() for ids, length in zip(TOKENS, MASK.sum(-1))]
    assert sorted(lists) == [[0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    case = a_case()
    assert case.logprobs.sum(-1).exp().sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12)
    cut = estimators.token_logprobs(case.theta, TOKENS, MASK, top_p=0.9).sum(-1).exp()
    assert cut.sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12) and (cut == 0).any()


def test_the_exact_gradient_is_that_of_finite_differences():
    case, step = a_case(), 1e-6

    def value(theta: torch.Tensor) -> float:
        logprobs = [
            [
                sum(
                    torch.log_softmax(theta[3 * b : 3 * b + 3] + theta[6:].view(3, 3)[([0, *ids])[t]], 0)[ids[t]]
                    for t in range(int(length))
                )
                for ids, length in zip(TOKENS.tolist(), MASK.sum(-1))
            ]
            for b in range(B)
        ]
        return (
            sum(
                (x.exp() * (case.scores[b, i] - 0.3 * (x - case.ref_logprobs[b, i].sum()))).item()
                for b in range(B)
                for i, x in enumerate(logprobs[b])
            )
            / B
        )

    for i in (0, 4, 7, 14):
        move = torch.zeros(15, dtype=torch.float64)
        move[i] = step
        slope = (value(case.theta + move) - value(case.theta - move)) / (2 * step)
        assert slope == pytest.approx(case.exact[i].item(), abs=1e-8)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("reward", estimators.REWARDS)
def test_rloo_has_no_bias_and_a_wrong_baseline_has(reward, k, monkeypatch):
    case = a_case(reward)
    for option in (Option(), Option(kl_level="token"), Option(baseline=False), Option(kl="k3 in both")):
        assert measured(case, option, k)["bias"] < 1e-10
    assert measured(case, Option(kl="none"), k)["bias"] > 1e-2  # the KL is seen
    right = estimators.rloo.advantage
    monkeypatch.setattr(estimators.rloo, "advantage", lambda rewards, estimator: right(rewards) - 0.1 * rewards)
    assert measured(case, Option(), k)["bias"] > 1e-2  # a baseline that knows the completion's own reward


@pytest.mark.parametrize("k", [2, 3])
def test_drgrpo_is_rloo_scaled_and_reinforce_shrinks_by_one_completion_of_the_update(k):
    case, updates = a_case(), estimators.all_updates(N, k)
    rloo = estimators.estimates(case, updates[0], Option())
    drgrpo = estimators.estimates(case, updates[0], Option("drgrpo"))
    assert (drgrpo - rloo * (k - 1) / k).abs().max() < 1e-12
    if k == 2:
        row = measured(case, Option("reinforce"), k)
        assert row["bias"] == pytest.approx(1 / (k * B)) and row["cosine"] == pytest.approx(1)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_an_update_stands_for_all_its_orders(name):
    """The estimate of an update with its completions in another order, its prompts one by one."""
    case, (index, orders) = a_case(), estimators.all_updates(N, 3)
    some = index[:, torch.randint(index.shape[1], (20,), generator=torch.Generator().manual_seed(1))]
    again = torch.stack([some[[2, 0, 1], :, 0], some[[1, 0, 2], :, 1]], dim=-1)
    first, second = (estimators.estimates(case, x, OPTIONS[name]) for x in (some, again))
    assert torch.allclose(first, second, rtol=1e-8, atol=1e-10)
    assert orders.sum().item() == N ** (3 * B)


def test_the_enumeration_is_the_sum_over_all_ordered_updates():
    case, option = a_case("sparse"), Option("grpo", normalize_reward=True)
    index = torch.tensor([*itertools.product(range(N), repeat=2 * B)]).view(-1, 2, B).transpose(0, 1)
    g = estimators.estimates(case, index, option)
    weight = case.logprobs.sum(-1).exp()[torch.arange(B), index].prod(0).prod(-1)
    mean = weight @ g
    found, variance = estimators.moments(case, estimators.all_updates(N, 2), option)
    assert torch.allclose(found, mean, atol=1e-12)
    assert variance == pytest.approx((weight @ (g - mean).square().sum(-1)).item())


def test_an_estimate_is_the_written_out_sum():
    """One update, k = 2: g = mean_j A_j ∇ log π(y_j), A_j = R_j - R_other; token level: each token with its own G_t."""
    case, index = a_case(), torch.tensor([[[1, 5]], [[4, 0]]])  # (k, 1, B)
    expected, per_token = torch.zeros(15, dtype=torch.float64), torch.zeros(15, dtype=torch.float64)
    for b in range(B):
        kl = [(case.logprobs - case.ref_logprobs)[b, index[j, 0, b]] for j in range(2)]
        score = [case.scores[b, index[j, 0, b]] for j in range(2)]
        for j in range(2):
            slopes = case.jacobian[b, index[j, 0, b]]  # (R, d)
            A = (score[j] - 0.3 * kl[j].sum()) - (score[1 - j] - 0.3 * kl[1 - j].sum())
            expected += A * slopes.sum(0) / 4
            for t in range(2):
                A = (score[j] - 0.3 * kl[j][t:].sum()) - (score[1 - j] - 0.3 * kl[1 - j][t:].sum())
                per_token += A * slopes[t] / 4
    assert torch.allclose(estimators.estimates(case, index, Option())[0], expected, atol=1e-12)
    assert torch.allclose(estimators.estimates(case, index, Option(kl_level="token"))[0], per_token, atol=1e-12)


@pytest.mark.parametrize("name", ["rloo (the defaults)", "grpo", "k3 in the loss", "sampled with top-p 0.9"])
def test_samples_have_the_mean_and_variance_of_the_enumeration(name):
    case, option, draws = a_case(), OPTIONS[name], 40_000
    mean, variance = estimators.moments(case, estimators.all_updates(N, 2), option)
    sampled = estimators.token_logprobs(case.theta, TOKENS, MASK, option.top_p).sum(-1).exp()
    index = torch.multinomial(sampled, 2 * draws, True, generator=torch.Generator().manual_seed(1))
    g = estimators.estimates(case, index.view(B, draws, 2).permute(2, 1, 0), option)
    assert (g.mean(0) - mean).norm() < 4 * math.sqrt(variance / draws)
    square = (g - mean).square().sum(-1)
    assert abs(square.mean() - variance) < 4 * square.std() / math.sqrt(draws)


def test_leave_one_out_over_the_siblings_standard_deviation_explodes():
    rewards = torch.tensor([[1.0], [0], [0], [0]])
    A = estimators.rloo.advantage(rewards)
    assert estimators.divided(A, rewards, "siblings, 1e-6").abs().max() == pytest.approx(1e6, rel=1e-3)
    assert estimators.divided(A, rewards, "group, 1e-6").abs().max() == pytest.approx(2, rel=1e-3)  # √k
    one, two = estimators.measure_explosions()[estimators.ALONE], estimators.measure_explosions()[estimators.ROUNDED]
    assert one["siblings’ + 1e-4"] > 9e3 and two["group std + 1e-8"] > 1 > 1e-2 > two["group std + 1e-4"]


def test_a_reward_with_a_large_mean_is_the_dense_one_to_a_baseline_and_not_without():
    dense, large = (measured(a_case(reward), Option(baseline=False)) for reward in ("dense", "large mean"))
    assert dense["variance"] < 2 and large["variance"] > 10
    dense, large = (a_case(reward) for reward in ("dense", "large mean"))
    updates = estimators.all_updates(N, 2)
    for option in (Option(), Option("grpo"), Option("reinforce"), Option(normalize_reward=True)):
        first, second = (estimators.moments(case, updates, option) for case in (dense, large))
        assert torch.allclose(first[0], second[0]) and first[1] == pytest.approx(second[1])


# ---- A sampler that is not the policy --------------------------------------------------------------------------------


def corrected(correction: str, cap: float = 2.0, level: str = "sequence") -> Option:
    return Option(rollout_correction=correction, rollout_correction_cap=cap, ratio_level=level)


def another_sampler(case: estimators.Case, size: float = 0.5) -> torch.Tensor:
    noise = torch.randn(15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return estimators.token_logprobs(case.theta + size * noise, TOKENS, MASK)


def biases(case: estimators.Case, sampler: torch.Tensor, k: int, options: dict[str, Option]) -> dict[str, float]:
    updates = estimators.all_updates(N, k)
    base = estimators.moments(case, updates, Option())
    found = {name: estimators.moments(case, updates, option, sampler) for name, option in options.items()}
    return {name: estimators.judge(case.exact, *x, base)["bias"] for name, x in found.items()}


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("reward", ["dense", "sparse"])
def test_the_weight_of_whole_completions_without_a_cap_leaves_no_bias_and_nothing_less_does(reward, k, monkeypatch):
    case = a_case(reward)
    options = {
        "off": Option(),
        "sequence": corrected("truncate", math.inf),
        "mask": corrected("mask", math.inf),
        "token": corrected("truncate", math.inf, "token"),
        "truncate at 1.2": corrected("truncate", 1.2),
        "mask at 1.2": corrected("mask", 1.2),
    }
    bias = biases(case, another_sampler(case), k, options)
    assert bias["sequence"] < 1e-10 and bias["mask"] < 1e-10
    assert all(bias[name] > 1e-2 for name in ("off", "token", "truncate at 1.2", "mask at 1.2"))
    right = estimators.rloo.rollout_weight
    monkeypatch.setattr(estimators.rloo, "rollout_weight", lambda old, sampled, *more: right(sampled, old, *more))
    assert biases(case, another_sampler(case), k, options)["sequence"] > 1e-2  # upside down


def test_without_a_difference_every_correction_is_the_same():
    case, updates = a_case(), estimators.all_updates(N, 2)
    expected, variance = estimators.moments(case, updates, Option())
    for option in (Option(), corrected("truncate"), corrected("mask"), corrected("truncate", 2.0, "token")):
        mean, found = estimators.moments(case, updates, option, case.logprobs)
        assert torch.allclose(mean, expected, atol=1e-12) and found == pytest.approx(variance)


def test_what_is_never_sampled_cannot_be_corrected():
    case = a_case()
    sampler = estimators.token_logprobs(case.theta, TOKENS, MASK, top_p=0.9)
    assert sampler.isinf().any()
    options = {"off": Option(), "sequence": corrected("truncate", math.inf)}
    assert all(1e-2 < bias < math.inf for bias in biases(case, sampler, 2, options).values())


def test_a_corrected_estimate_is_the_written_out_sum():
    """One update, k = 2: g = mean_j v_j A_j ∇ log π(y_j), where v is w = π / μ cut at 1.1 or, of a mask, 0 outside of
    [1 / 1.1, 1.1]. The KL in A is the policy's; that of the sampler without a correction."""
    case, index = a_case(), torch.tensor([[[1, 5]], [[4, 0]]])  # (k, 1, B)
    sampler = another_sampler(case, 0.2)
    expected = {name: torch.zeros(15, dtype=torch.float64) for name in ("off", "truncate", "mask", "token")}
    for b in range(B):
        ids = [index[j, 0, b] for j in range(2)]
        ref = [case.ref_logprobs[b, i].sum() for i in ids]
        R = [case.scores[b, i] - 0.3 * (case.logprobs[b, i].sum() - x) for i, x in zip(ids, ref)]
        sampled_R = [case.scores[b, i] - 0.3 * (sampler[b, i].sum() - x) for i, x in zip(ids, ref)]
        for j, i in enumerate(ids):
            slopes, per_token = case.jacobian[b, i], (case.logprobs[b, i] - sampler[b, i]).exp()
            w = per_token.prod().item()
            A, one = R[j] - R[1 - j], slopes.sum(0) / 4
            expected["off"] += (sampled_R[j] - sampled_R[1 - j]) * one
            expected["truncate"] += min(w, 1.1) * A * one
            expected["mask"] += w * (1 / 1.1 <= w <= 1.1) * A * one
            expected["token"] += A * (per_token.clamp(max=1.1)[:, None] * slopes).sum(0) / 4
    options = {
        "off": Option(),
        "truncate": corrected("truncate", 1.1),
        "mask": corrected("mask", 1.1),
        "token": corrected("truncate", 1.1, "token"),
    }
    found = {name: estimators.estimates(case, index, option, sampler)[0] for name, option in options.items()}
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=1e-12), name
    assert not torch.allclose(found["truncate"], found["mask"]) and not torch.allclose(found["token"], found["off"])


def test_corrected_samples_have_the_mean_and_variance_of_the_enumeration():
    case, option, draws = a_case(), corrected("truncate", 1.2), 40_000
    sampler = another_sampler(case)
    mean, variance = estimators.moments(case, estimators.all_updates(N, 2), option, sampler)
    drawn = torch.multinomial(sampler.sum(-1).exp(), 2 * draws, True, generator=torch.Generator().manual_seed(1))
    g = estimators.estimates(case, drawn.view(B, draws, 2).permute(2, 1, 0), option, sampler)
    assert (g.mean(0) - mean).norm() < 4 * math.sqrt(variance / draws)
    square = (g - mean).square().sum(-1)
    assert abs(square.mean() - variance) < 4 * square.std() / math.sqrt(draws)


# ---- --model ---------------------------------------------------------------------------------------------------------


def test_the_sketch_keeps_inner_products():
    x = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1))
    x[1] = x[0] + 0.1 * x[1]
    found = torch.stack([s @ s.T for s in (estimators.Sketch(5000, 200, seed)(x) for seed in range(60))])
    error = found.std(0) / math.sqrt(60)
    assert ((found.mean(0) - x @ x.T).abs() < 4 * error).all()
    norms = x.norm(dim=1)
    assert (found.std(0) < 1.5 * math.sqrt(2 / 400) * norms[:, None] * norms).all()  # two sketches of 200


def test_every_completion_is_in_one_update_with_its_group():
    x = torch.arange(16 * 8).view(16, 8)
    for k in (2, 4, 8, 16):
        updates = estimators.to_updates(x, k, 16 // k)
        assert updates.shape == (8, k, 16 // k) and sorted(updates.flatten().tolist()) == [*range(128)]
        assert (updates % 8 == updates[:, :1] % 8).all()  # a group is of one prompt


def made_up_gradients(n: int, seed: int) -> tuple[dict, torch.Tensor]:
    """Updates with a known mean and covariance, whose noise within a block is shared in part."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.tensor([1.0, 0.5, 0, 0, 0, 0])
    shared, own = torch.randn(n, 1, 6, generator=generator), torch.randn(n, 8, 6, generator=generator)
    g = mean + shared + own  # trace of the covariance: 12
    return {("rloo", 16): g, ("grpo", 16): 0.5 * g[..., [1, 0, 2, 3, 4, 5]]}, mean


def test_figures_are_without_bias_and_their_errors_are_right():
    tables = [estimators.table_of(made_up_gradients(40, seed)[0], slice(None)) for seed in range(40)]
    for key, name, expected in (
        (("rloo", 16), "trace", 12.0),
        (("grpo", 16), "variance", 0.25),
        (("grpo", 16), "cosine_of_mean", 1 / 1.25),
    ):
        values = torch.tensor([table[key][name][0] for table in tables])
        errors = torch.tensor([table[key][name][1] for table in tables])
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(40) + 0.01, (key, name)
        if name == "trace":
            assert errors.mean() == pytest.approx(values.std().item(), rel=0.4)


def test_gradients_are_those_of_the_log_probs_and_the_estimate_that_of_rloo():
    args = estimators.Args(model=True, num_prompts=2)
    torch.manual_seed(1)
    policy, reference, tokenizer, rows, sampling = estimators.load(args)
    assert reference is None
    sampling["response_length"] = 6
    batch, _ = estimators.rloo.rollout(policy, rows[:2], 4, 0.7, **sampling)
    scores = estimators.judge_scores(tokenizer, batch)
    assert scores["gold"].shape == (4, 2) and set(scores["win"].unique().tolist()) <= {0.0, 1.0}
    policy.set_attn_implementation("eager")
    groups = [batch.prompts(torch.tensor([i])) for i in (0, 1)]
    found = torch.stack([estimators.completion_gradients(policy, group, 0.7) for group in groups], dim=1)
    policy.set_attn_implementation("sdpa")
    policy.requires_grad_(True)
    rewards = torch.arange(8.0).view(4, 2).square()
    new, _ = estimators.rloo.completion_logprobs(policy, batch, 0.7)
    A = estimators.rloo.advantage(rewards)
    losses, _, _ = estimators.rloo.policy_loss(new, new.detach(), A[..., None], batch.response_mask, 0.2, 0.2)
    exact = -torch.cat([x.flatten() for x in torch.autograd.grad(losses.mean(), list(policy.parameters()))])
    ours = torch.einsum("jb,jbw->w", A, found) / 8
    assert (ours - exact).norm() < 1e-4 * exact.norm()


# ---- The command line ------------------------------------------------------------------------------------------------


def test_a_small_run_leaves_numbers_that_say_what_made_them(tmp_path, capsys, monkeypatch):
    output = tmp_path / "small.json"
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what is not installed is said, in one line
    estimators.main(estimators.Args(output=str(output), vocab_size=2, rloo_k=(2,), seeds=2))
    result, text = json.loads(output.read_text()), capsys.readouterr().out
    said = result["command"]
    assert said == "python benchmark/gradient/estimators.py --kl_coef 0.3 --seeds 2 --vocab_size 2 --rloo_k 2"
    cases = [dict(zip(result["exact"]["columns"], row)) for row in result["exact"]["rows"]]
    assert len(cases) == 2 * 6 and all(list(case["options"]) == list(OPTIONS) for case in cases)
    assert all(name in text for name in OPTIONS) and "Unbiased: true" in text
    assert "no picture without matplotlib" in text


@pytest.mark.parametrize(
    "flags",
    [
        ["--rloo_k", "1"],
        ["--vocab_size", "9"],
        ["--output", "x.txt"],
        ["--model", "--update", "40"],
        ["--model", "--policy", "/nowhere"],
        ["--model", "--num_prompts", "5"],
    ],
)
def test_a_mistake_is_one_line(flags):
    with pytest.raises(estimators.InputError) as error:
        estimators.main(estimators.tyro.cli(estimators.Args, args=flags, use_underscores=True))
    assert "\n" not in str(error.value)
