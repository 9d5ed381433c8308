"""How good are the gradient estimates of rloo.py's options, and what if the sampler is not the policy? Exactly.

    python benchmark/gradient/exact.py            # writes exact.json and the picture, prints a table: one minute
    python benchmark/gradient/exact.py --again    # compares with exact.json, writes nothing

The policy is a language model with a vocabulary of 3 (token 0 stops), at most 2 tokens per completion and 15
parameters: a row of logits per prompt and one per previous token. An update is 2 prompts with k completions each. There
are 7 completions of a prompt, so all updates, with their probability, can be listed; a mean or a variance is a sum over
them, in float64, without sampling. The estimate g of an update is what rloo.py's own functions make of it, in one step
at ratio 1. g* is the gradient of E[score - β KL(π ‖ π_ref)], the mean over both prompts. README.md says what is
measured.

Prompts are fixed, so all variance is that of the completions. Options that look at the whole update (normalize_*,
--baseline update and --loss_mean tokens of grpo.py) are left out: of 2 prompts they would show little of what they do
with many.
"""

import argparse
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
import common  # noqa: E402

import rloo  # noqa: E402

unchanged = dict(vars(rloo))
from benchmark.extensions import correction, grpo  # noqa: E402

vars(rloo).update(unchanged)  # what the extensions have replaced; their own functions are used here

RECORDS, PICTURE = HERE / "exact.json", HERE / "exact.png"
SEEDS = range(1, 6)  # tiny models, each with rewards of its own
B, V, T = 2, 3, 2  # prompts of an update, vocabulary, tokens of a completion
KS, KL_COEF = (2, 3), 0.3
REWARDS = ("dense", "sparse", "large mean")
POSITIONS = ("at the reference", "away from it")
AWAY = 0.5  # KL from the reference, in nats, of a policy away from it
COLUMNS = {  # of the picture
    "bias": "bias: |E g − g*| / |g*|",
    "noise": "noise: variance of g / (part of E g along g*)²,\nrelative to rloo's at equal k",
}


# ---- A tiny language model, everything that it can say, and all updates ----------------------------------------------


def all_completions() -> tuple[torch.Tensor, torch.Tensor]:
    """Every completion, (n, T), and its mask: sequences up to the first stop token, and those of T tokens without."""
    cut = {ids[: ids.index(0) + 1] if 0 in ids else ids for ids in itertools.product(range(V), repeat=T)}
    return rloo.pad([list(ids) for ids in sorted(cut)])


TOKENS, MASK = all_completions()
N = len(TOKENS)


def token_logprobs(theta: torch.Tensor) -> torch.Tensor:
    """Log-probs (B, n, T) of the tokens of all completions, 0 where masked. A token's logits are a row for the prompt
    plus a row for the token before; that of the stop token, which nothing follows, is the beginning's. theta: (d,)."""
    of_prompt, of_previous = theta[: B * V].view(B, 1, 1, V), theta[B * V :].view(V, V)
    previous = torch.cat([torch.zeros_like(TOKENS[:, :1]), TOKENS[:, :-1]], dim=1)
    logprobs = torch.log_softmax(of_prompt + of_previous[previous], dim=-1)  # (B, n, T, V)
    chosen = logprobs.gather(-1, TOKENS.expand(B, -1, -1)[..., None]).squeeze(-1)
    return torch.where(MASK, chosen, 0.0)


class Case(NamedTuple):
    """A policy, its sampler and reference, and a reward, on all n completions of B prompts; float64."""

    theta: torch.Tensor  # (d,)
    logprobs: torch.Tensor  # (B, n, T)
    sampler: torch.Tensor  # (B, n, T): log-probs under what samples the completions, in general the policy
    ref_logprobs: torch.Tensor  # (B, n, T)
    jacobian: torch.Tensor  # (B, n, T, d): ∇ log π of each token
    scores: torch.Tensor  # (B, n)
    exact: torch.Tensor  # (d,): g*


def objective(theta: torch.Tensor, ref_logprobs, scores, kl_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """E[score - β KL] and KL, means over prompts, as sums over all completions; for autograd."""
    logprobs = token_logprobs(theta).sum(-1)
    kl = logprobs - ref_logprobs.sum(-1)
    mean = (logprobs.exp() * (scores - kl_coef * kl)).sum(-1).mean()
    return mean, (logprobs.exp() * kl).sum(-1).mean()


def make_case(theta: torch.Tensor, reference: torch.Tensor, scores: torch.Tensor) -> Case:
    ref_logprobs = token_logprobs(reference)
    exact = torch.autograd.functional.jacobian(lambda x: objective(x, ref_logprobs, scores, KL_COEF)[0], theta)
    jacobian = torch.autograd.functional.jacobian(token_logprobs, theta)
    logprobs = token_logprobs(theta)
    return Case(theta, logprobs, logprobs, ref_logprobs, jacobian, scores, exact)


def make_reference(seed: int) -> torch.Tensor:
    return torch.randn(B * V + V * V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_scores(reward: str, seed: int) -> torch.Tensor:
    """(B, n). dense: standard normal numbers; large mean: 10 more; sparse: 1 for 2 completions of a prompt, else 0."""
    dense = torch.randn(B, N, generator=torch.Generator().manual_seed(seed + 1000), dtype=torch.float64)
    if reward == "sparse":
        return (dense >= dense.topk(2, dim=-1).values[:, -1:]).double()
    return dense + 10 * (reward == "large mean")


def move_away(reference: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Parameters where exact gradient ascent on the score first has a KL of AWAY from the reference."""
    theta, ref_logprobs = reference.clone(), token_logprobs(reference)
    while True:
        mean, kl = objective(theta.requires_grad_(), ref_logprobs, scores, 0.0)
        if kl >= AWAY:
            return theta.detach()
        (step,) = torch.autograd.grad(mean, theta)
        theta = (theta + 0.02 * step / step.norm()).detach()


def all_updates(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every update: which completions it holds, (k, U, B), and in how many orders they can be drawn, (U,).

    Within a prompt order makes no difference, so each combination stands for all its orders."""
    groups = list(itertools.combinations_with_replacement(range(N), k))
    orders = [math.factorial(k) // math.prod(math.factorial(m) for m in Counter(group).values()) for group in groups]
    groups, orders = torch.tensor(groups), torch.tensor(orders, dtype=torch.float64)
    pairs = torch.cartesian_prod(*[torch.arange(len(groups))] * B)  # (U, B)
    return groups[pairs].permute(2, 0, 1), orders[pairs].prod(-1)


UPDATES = {k: all_updates(k) for k in KS}


# ---- The options, and the estimate that rloo.py's functions make of an update ----------------------------------------


@dataclass(frozen=True)
class Option:
    """What differs from rloo.py's defaults."""

    kl: str = "k1"  # the estimator of the KL in the reward: k1, k3 or none
    baseline: bool = True  # without it the advantage is the reward itself
    token_level_kl: bool = False
    grpo: dict | None = None  # flags of grpo.py, whose advantages and loss take the place of rloo.py's
    kl_in_loss: bool = False  # as grpo.py has it
    rollout_correction: str = "off"  # flags of correction.py
    rollout_correction_cap: float = 2.0


SUMS = {"baseline": "rloo", "loss_mean": "completions"}  # the flags by which grpo.py has RLOO's advantages and loss
OPTIONS = {
    "rloo (the defaults)": Option(),
    "no baseline": Option(baseline=False),
    "token_level_kl": Option(token_level_kl=True),
    "grpo.py: grpo's baseline alone": Option(grpo=SUMS | {"baseline": "grpo"}),
    "grpo.py: group's baseline alone (Dr. GRPO)": Option(grpo=SUMS | {"baseline": "group"}),
    "grpo.py: tokens-then-completions alone": Option(grpo=SUMS | {"loss_mean": "tokens-then-completions"}),
    "grpo.py: k3 in the loss alone": Option("none", grpo=SUMS, kl_in_loss=True),
    "grpo.py: unbiased_kl alone": Option("none", grpo=SUMS | {"unbiased_kl": True}, kl_in_loss=True),
    "grpo.py": Option("none", grpo={}, kl_in_loss=True),
    "k3 in the reward": Option("k3"),
    "k3 in reward and loss": Option("k3", grpo=SUMS, kl_in_loss=True),
}


def estimates(case: Case, index: torch.Tensor, option: Option) -> torch.Tensor:
    """g (U, d) of the updates `index` (k, U, B): minus the gradient of the loss that training would step along.

    As in rloo.collect, the KL is the sampler's from the reference; with the correction it is the policy's. All updates
    are one batch of U·B prompts; the loss is differentiated by the tokens' log-probs, and those by the parameters."""
    k, U, _ = index.shape
    prompts = torch.arange(B)
    of_completions = (case.logprobs, case.sampler, case.ref_logprobs, case.scores, MASK.expand(B, -1, -1))
    old, sampled, ref, scores, mask = (x[prompts, index].flatten(1, 2) for x in of_completions)  # (k, U·B, ...)
    corrected = option.rollout_correction != "off"
    kl = ((old if corrected else sampled) - ref) * mask
    if option.kl == "k3":
        kl = torch.expm1(-kl) + kl
    in_reward = 0.0 if option.kl == "none" else KL_COEF
    batch = SimpleNamespace(policy_mask=mask, ended=mask.any(-1))
    flags = {"kl_coef": in_reward, "token_level_kl": option.token_level_kl, "cliprange_high": 0.2}
    functions = rloo
    if option.grpo is not None:
        functions = grpo
        scores = rloo.rlhf_reward(scores, kl, in_reward).squeeze(-1)
        flags = option.grpo | {"kl_coef": KL_COEF if option.kl_in_loss else 0.0, "cliprange_high": 0.2}
    args = grpo.Args(**flags)
    new = old.clone().requires_grad_()
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # to which they round
        advantages = functions.advantages_of(args, batch, scores, kl)
        if not option.baseline:
            advantages = rloo.rlhf_reward(scores, kl, in_reward)
        if corrected:
            limits = option.rollout_correction, option.rollout_correction_cap, option.token_level_kl
            advantages = advantages * correction.importance_weight(old, sampled, mask, *limits)
        experience = SimpleNamespace(batch=batch, scores=scores, advantages=advantages, ref_logprobs=ref)
        losses, *_ = functions.completion_loss(args, experience, slice(None), new, old, None)
    (slope,) = torch.autograd.grad(losses.sum() / (k * B), new)  # each update has a loss of its own
    return -torch.einsum("jnbt,jnbtd->nd", slope.view(k, U, B, -1), case.jacobian[prompts, index])


def moments(case: Case, k: int, option: Option) -> tuple[torch.Tensor, float]:
    """E g (d,) and the trace of g's covariance, over all updates that the sampler can draw."""
    index, orders = UPDATES[k]
    weight = orders * case.sampler.sum(-1).exp()[torch.arange(B), index].prod(0).prod(-1)
    g = estimates(case, index, option)
    mean = weight @ g
    return mean, (weight @ (g - mean).square().sum(-1)).item()


def bias(exact: torch.Tensor, mean: torch.Tensor) -> float:
    """|E g - g*| / |g*|: a wrong scale counts as well as a wrong direction."""
    return short(((mean - exact).norm() / exact.norm()).item())


def judge(exact: torch.Tensor, mean: torch.Tensor, variance: float, base: tuple[torch.Tensor, float]) -> list[float]:
    """Bias and noise; no noise, NaN, where E g is against g*."""
    along, base_along = ((x @ exact / exact.norm()).item() for x in (mean, base[0]))
    noise = (variance / along**2) / (base[1] / base_along**2) if along > 0 else math.nan
    return [bias(exact, mean), short(noise)]


def short(x: float) -> float:
    """Four digits of it, for the records."""
    return float(f"{x:.4g}")


# ---- The two parts ---------------------------------------------------------------------------------------------------


def cases(rewards) -> Iterator[tuple[int, str, Case]]:
    """Seed, position and case of each policy."""
    for seed, reward, position in itertools.product(SEEDS, rewards, POSITIONS):
        reference, scores = make_reference(seed), make_scores(reward, seed)
        theta = reference if position == POSITIONS[0] else move_away(reference, scores)
        yield seed, position, make_case(theta, reference, scores)


def ranges(found: list[list[float]]) -> dict[str, list[float]]:
    """Column -> smallest, median and largest of its values that are not NaN."""
    kept = {name: [x for x in values if not math.isnan(x)] for name, values in zip(COLUMNS, zip(*found))}
    return {name: [min(values), median(values), max(values)] for name, values in kept.items()}


def measure_options() -> dict:
    """Option -> position -> ranges over the cases."""
    found = {name: {position: [] for position in POSITIONS} for name in OPTIONS}
    for (_, position, case), k in itertools.product(cases(REWARDS), KS):
        base = moments(case, k, Option())
        for name, option in OPTIONS.items():
            found[name][position].append(judge(case.exact, *moments(case, k, option), base))
    return {name: {position: ranges(x) for position, x in both.items()} for name, both in found.items()}


CORRECTIONS = {
    "off": Option(),
    "truncate, sequence": Option(rollout_correction="truncate"),
    "mask, sequence": Option(rollout_correction="mask"),
    "truncate, token_level_kl": Option(rollout_correction="truncate", token_level_kl=True),
}
SAMPLERS = (0.02, 0.3)  # standard deviation of the noise on a logit


def with_noise(case: Case, size: float, seed: int) -> Case:
    """The case with a sampler whose logits differ from those of the policy by normal noise."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(case.theta), generator=generator, dtype=torch.float64)
    return case._replace(sampler=token_logprobs(case.theta + noise * size / math.sqrt(2)))  # a logit is a sum of two


def gap_of(case: Case) -> float:
    """The mean |log π - log μ| of a token that μ samples: what training logs as val/rollout_logprob_gap."""
    probability = case.sampler.sum(-1).exp()
    apart = (case.logprobs - case.sampler).abs()
    return ((probability[..., None] * apart).sum() / (probability @ MASK.sum(-1).double()).sum()).item()


def without_kl(case: Case) -> Case:
    """The case with the gradient of E[score] alone as g*."""

    def mean_score(theta):
        return objective(theta, case.ref_logprobs, case.scores, 0.0)[0]

    return case._replace(exact=torch.autograd.functional.jacobian(mean_score, case.theta))


def measure_samplers() -> dict:
    """Size of the noise -> the median gap, and for each β and correction the median and the largest bias. A constant in
    the reward has no effect, so `large mean` is left out."""
    found = {}
    for size in SAMPLERS:
        gaps, biases = [], {kl: {label: [] for label in CORRECTIONS} for kl in ("k1", "none")}
        for seed, _, case in cases(REWARDS[:2]):
            case = with_noise(case, size, seed)
            gaps.append(gap_of(case))
            for kl, k, label in itertools.product(biases, KS, CORRECTIONS):
                true = without_kl(case) if kl == "none" else case
                mean, _ = moments(true, k, replace(CORRECTIONS[label], kl=kl))
                biases[kl][label].append(bias(true.exact, mean))
        found[f"{size}"] = {"gap": short(median(gaps))}
        for kl, of_corrections in biases.items():
            found[f"{size}"][kl] = {label: [median(x), max(x)] for label, x in of_corrections.items()}
    return found


# ---- Tables and picture ----------------------------------------------------------------------------------------------


def tidy(value: float) -> str:
    """Two decimals; 0 where there is only rounding."""
    if abs(value) < 1e-10:
        return "0"
    return f"{value:.2g}" if abs(value) < 0.01 else f"{value:.2f}"


def table(samplers: dict) -> str:
    rows = [["logits off by", "gap", "β", *CORRECTIONS]]
    for size, found in samplers.items():
        for kl, beta in (("k1", f"{KL_COEF}"), ("none", "0")):
            biases = [f"{tidy(middle)} ({tidy(largest)})" for middle, largest in map(found[kl].get, CORRECTIONS)]
            rows.append([size, f"{found['gap']:.3f}", beta, *biases])
    return common.markdown(rows)


def draw(options: dict):
    """Bias and noise of every option: the range and the median over all cases, for both positions."""
    figure, ((*panels,),) = common.canvas(2, 11, 5.5, sharey=True)
    places = torch.arange(len(OPTIONS))
    for panel, (column, title) in zip(panels, COLUMNS.items()):
        for offset, colour, position in ((-0.16, "tab:blue", POSITIONS[0]), (0.16, "tab:orange", POSITIONS[1])):
            low, middle, high = torch.tensor([options[name][position][column] for name in OPTIONS]).T
            panel.hlines(
                places + offset,
                low,
                high,
                color=colour,
                lw=2,
                label=f"policy {position}".replace("away from", f"{AWAY} nats away from"),
            )
            panel.plot(middle, places + offset, "o", color=colour, ms=5)
        panel.set(xlabel=title)
    panels[0].axvline(0, color="black", lw=0.8)
    panels[0].set_yticks(places, list(OPTIONS))
    panels[0].invert_yaxis()
    panels[1].axvline(1, color="black", lw=0.8)
    panels[1].set_xscale("log")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    title = (
        "Gradient estimates of rloo.py's options on a tiny language model. g: the estimate from one update; E g: its\n"
    )
    title += "mean over all updates; g*: the true gradient. Line: range over all cases; point: median"
    figure.suptitle(title, fontsize=10)
    common.save(figure, PICTURE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="compare with the records, write nothing")
    args = parser.parse_args()
    if not args.again:
        common.require(matplotlib="matplotlib")
    torch.set_num_threads(1)
    records = common.Records(RECORDS, args.again)
    records.add("options", found=measure_options())
    records.add("samplers", found=measure_samplers())
    print(table(records.value("samplers", "found")))
    if not args.again:
        draw(records.value("options", "found"))


if __name__ == "__main__":
    main()
