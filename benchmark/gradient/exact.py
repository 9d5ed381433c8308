"""How good are the gradient estimates of rloo.py's options, and what if the sampler is not the policy? Exactly.

    python benchmark/gradient/exact.py    # measures, writes exact.json, tables and picture: one minute

The policy is a language model with a vocabulary of 3 (token 0 stops), at most 2 tokens per completion and 15
parameters: a row of logits per prompt and one per previous token. An update is 2 prompts with k completions each. There
are 7 completions of a prompt, so all updates, with their probability, can be listed; a mean or a variance is a sum over
them, in float64, without sampling. The estimate g of an update is what rloo.py's own functions make of it, in one step
at ratio 1. g* is the gradient of E[score - β KL(π ‖ π_ref)], the mean over both prompts. For every option:

    bias      |E g - g*| / |g*|: a wrong scale counts as well as a wrong direction
    cosine    of E g with g*: 1 where the direction is right, whatever the scale
    variance  the trace of g's covariance, relative to that of rloo.py's defaults at the same k
    noise     variance / (the part of E g along g*)², relative to the same; none where that part is against g*. It does
              not depend on the scale of g, which a learning rate undoes

Prompts are fixed, so all variance is that of the completions. Options that look at the whole update (reinforce,
normalize_*, loss_aggregation=token) are left out: of 2 prompts they would show little of what they do with many.
"""

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
import common  # noqa: E402

import rloo  # noqa: E402

RECORDS, PICTURE = HERE / "exact.json", HERE / "exact.png"
SEEDS = range(1, 6)  # tiny models, each with rewards of its own
B, V, R = 2, 3, 2  # prompts of an update, vocabulary, tokens of a completion
KS, KL_COEF = (2, 3), 0.3
REWARDS = ("dense", "sparse", "large mean")
POSITIONS = ("at the reference", "away from it")
AWAY = 0.5  # KL from the reference, in nats, of a policy away from it
COLUMNS = ("bias", "cosine", "variance", "noise")


# ---- A tiny language model, everything that it can say, and all updates ----------------------------------------------


def all_completions() -> tuple[torch.Tensor, torch.Tensor]:
    """Every completion, (n, R), and its mask: sequences up to the first stop token, and those of R tokens without."""
    cut = {ids[: ids.index(0) + 1] if 0 in ids else ids for ids in itertools.product(range(V), repeat=R)}
    return rloo.pad([list(ids) for ids in sorted(cut)])


TOKENS, MASK = all_completions()
N = len(TOKENS)


def token_logprobs(theta: torch.Tensor) -> torch.Tensor:
    """Log-probs (B, n, R) of the tokens of all completions, 0 where masked. A token's logits are a row for the prompt
    plus a row for the token before; that of the stop token, which nothing follows, is the beginning's. theta: (d,)."""
    of_prompt, of_previous = theta[: B * V].view(B, 1, 1, V), theta[B * V :].view(V, V)
    previous = torch.cat([torch.zeros_like(TOKENS[:, :1]), TOKENS[:, :-1]], dim=1)
    logprobs = torch.log_softmax(of_prompt + of_previous[previous], dim=-1)  # (B, n, R, V)
    chosen = logprobs.gather(-1, TOKENS.expand(B, -1, -1)[..., None]).squeeze(-1)
    return torch.where(MASK, chosen, 0.0)


class Case(NamedTuple):
    """A policy, its reference and a reward, on all n completions of B prompts; float64."""

    theta: torch.Tensor  # (d,)
    reference: torch.Tensor  # (d,)
    logprobs: torch.Tensor  # (B, n, R)
    ref_logprobs: torch.Tensor  # (B, n, R)
    jacobian: torch.Tensor  # (B, n, R, d): ∇ log π of each token
    scores: torch.Tensor  # (B, n)
    kl_coef: float
    exact: torch.Tensor  # (d,): g*


def objective(theta: torch.Tensor, ref_logprobs, scores, kl_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """E[score - β KL] and KL, means over prompts, as sums over all completions; for autograd."""
    logprobs = token_logprobs(theta).sum(-1)
    kl = logprobs - ref_logprobs.sum(-1)
    mean = (logprobs.exp() * (scores - kl_coef * kl)).sum(-1).mean()
    return mean, (logprobs.exp() * kl).sum(-1).mean()


def make_case(theta: torch.Tensor, reference: torch.Tensor, scores: torch.Tensor, kl_coef: float = KL_COEF) -> Case:
    theta, ref_logprobs = theta.detach().requires_grad_(), token_logprobs(reference)
    (exact,) = torch.autograd.grad(objective(theta, ref_logprobs, scores, kl_coef)[0], theta)
    theta = theta.detach()
    jacobian = torch.autograd.functional.jacobian(token_logprobs, theta)
    return Case(theta, reference, token_logprobs(theta), ref_logprobs, jacobian, scores, kl_coef, exact)


def make_reference(seed: int) -> torch.Tensor:
    return torch.randn(B * V + V * V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_scores(reward: str, seed: int) -> torch.Tensor:
    """(B, n). dense: standard normal numbers; large mean: 10 more; sparse: 1 for 2 completions of a prompt, else 0."""
    dense = torch.randn(B, N, generator=torch.Generator().manual_seed(seed + 1000), dtype=torch.float64)
    if reward == "sparse":
        return (dense >= dense.topk(2, dim=-1).values[:, -1:]).double()
    return dense + 10 * (reward == "large mean")


def move_away(reference: torch.Tensor, scores: torch.Tensor, distance: float) -> torch.Tensor:
    """Parameters on the way that exact gradient ascent on the score takes, where KL from the reference is `distance`
    (or the farthest on the way, if it does not get there)."""
    theta, ref_logprobs = reference.clone().requires_grad_(), token_logprobs(reference)
    for _ in range(2000):
        mean, kl = objective(theta, ref_logprobs, scores, 0.0)
        if kl >= distance:
            break
        (step,) = torch.autograd.grad(mean, theta)
        theta = (theta + 0.02 * step / step.norm()).detach().requires_grad_()
    return theta.detach()


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
    """What differs from rloo.py's defaults; names as its flags."""

    advantage_estimator: str = "rloo"
    kl: str = "k1 in reward"  # k1 in reward, k3 in reward, k3 in loss, k3 in both, none
    token_level_kl: bool = False
    loss_aggregation: str = "sequence"
    baseline: bool = True  # without it the advantage is the reward itself
    rollout_correction: str = "off"
    rollout_correction_cap: float = 2.0
    token_ratio: bool = False  # one ratio per token even where nothing else is per token

    @property
    def level(self) -> str:
        per_token = self.token_ratio or self.token_level_kl or self.loss_aggregation != "sequence"
        return "token" if per_token else "sequence"


OPTIONS = {
    "rloo (the defaults)": Option(),
    "grpo": Option("grpo"),
    "grpo, k3 in loss, sequence-mean": Option("grpo", "k3 in loss", loss_aggregation="sequence-mean"),
    "drgrpo": Option("drgrpo"),
    "no baseline": Option(baseline=False),
    "token_level_kl": Option(token_level_kl=True),
    "k3 in the reward": Option(kl="k3 in reward"),
    "k3 in the loss": Option(kl="k3 in loss"),
    "k3 in both": Option(kl="k3 in both"),
    "no KL": Option(kl="none"),
    "loss_aggregation sequence-mean": Option(loss_aggregation="sequence-mean"),
}


def estimates(case: Case, index: torch.Tensor, option: Option, sampler: torch.Tensor | None = None) -> torch.Tensor:
    """g (U, d) of the updates `index` (k, U, B): minus the gradient of the loss that training would step along.

    `sampler` (B, n, R) are the log-probs under what sampled the completions, if that was not the policy. As in
    rloo.collect, the KL is then the sampler's from the reference, but with a rollout_correction the policy's. All
    updates are one batch of U·B prompts; the loss is differentiated by the tokens' log-probs, and those by the
    parameters."""
    k, U, _ = index.shape
    prompts = torch.arange(B)
    sampler = case.logprobs if sampler is None else sampler
    of_completions = (case.logprobs, sampler, case.ref_logprobs, case.scores, MASK.expand(B, -1, -1))
    old, sampled, ref, scores, mask = (x[prompts, index].flatten(1, 2) for x in of_completions)  # (k, U·B, ...)
    correction = option.rollout_correction, option.rollout_correction_cap, option.level
    correction = rloo.importance_weight(old, sampled, mask, *correction)
    of_kl = sampled if option.rollout_correction == "off" else old
    if option.kl in ("k3 in reward", "k3 in both"):
        scores = scores - case.kl_coef * rloo.kl_penalty(of_kl, ref, mask)
    kl_coef = case.kl_coef if option.kl == "k1 in reward" else 0.0
    advantages = rloo.rlhf_reward(scores, (of_kl - ref) * mask, kl_coef, option.token_level_kl)
    if option.baseline:
        advantages = rloo.advantage(advantages, option.advantage_estimator)
    advantages = advantages.reshape(k, U * B, -1)
    new = old.clone().requires_grad_()
    losses, _, _ = rloo.policy_loss(new, old, advantages, mask, 0.2, 0.2, option.level, correction)
    if option.kl in ("k3 in loss", "k3 in both"):
        losses = losses + case.kl_coef * rloo.kl_penalty(new, ref, mask)
    losses = losses * rloo.loss_scale(mask.sum(-1), mask.any(-1), option.loss_aggregation)
    (slope,) = torch.autograd.grad(losses.sum() / (k * B), new)  # an update's loss: the mean of its k·B
    return -torch.einsum("jnbt,jnbtd->nd", slope.view(k, U, B, -1), case.jacobian[prompts, index])


def moments(case: Case, k: int, option: Option, sampler: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    """E g (d,) and the trace of g's covariance, over all updates. What samples them is the policy, or another
    distribution, `sampler`: its log-probs (B, n, R), which are then known in training as well."""
    index, orders = UPDATES[k]
    drawn = case.logprobs if sampler is None else sampler
    weight = orders * drawn.sum(-1).exp()[torch.arange(B), index].prod(0).prod(-1)
    assert abs(weight.sum().item() - 1) < 1e-9, "the probabilities of all updates do not add up to 1"
    g = estimates(case, index, option, sampler)
    mean = weight @ g
    return mean, (weight @ (g - mean).square().sum(-1)).item()


def judge(exact: torch.Tensor, mean: torch.Tensor, variance: float, base: tuple[torch.Tensor, float]) -> list[float]:
    """The four columns; NaN where there is nothing to compare (E g = 0)."""
    some = mean.norm() > 1e-12 * base[0].norm()
    along, base_along = ((x @ exact / exact.norm()).item() for x in (mean, base[0]))
    found = [
        ((mean - exact).norm() / exact.norm()).item(),
        torch.cosine_similarity(mean, exact, dim=0).item() if some else math.nan,
        variance / base[1],
        (variance / along**2) / (base[1] / base_along**2) if some and along > 0 else math.nan,
    ]
    return [float(f"{x:.4g}") for x in found]


# ---- The three parts -------------------------------------------------------------------------------------------------


def cases(rewards) -> Iterator[tuple[tuple, Case]]:
    """Policies at and away from their reference: seed, reward and position, and the case."""
    for seed, reward, position in itertools.product(SEEDS, rewards, POSITIONS):
        reference, scores = make_reference(seed), make_scores(reward, seed)
        theta = reference if position == POSITIONS[0] else move_away(reference, scores, AWAY)
        yield (seed, reward, position), make_case(theta, reference, scores)


def ranges(found: list[list[float]]) -> dict[str, list[float]]:
    """Column -> smallest, median and largest of its values that are not NaN."""
    kept = {name: [x for x in values if not math.isnan(x)] for name, values in zip(COLUMNS, zip(*found))}
    return {name: [min(values), median(values), max(values)] for name, values in kept.items()}


def measure_options() -> dict:
    """Option -> position -> ranges over the cases."""
    found = {name: {position: [] for position in POSITIONS} for name in OPTIONS}
    for ((_, _, position), case), k in itertools.product(cases(REWARDS), KS):
        base = moments(case, k, Option())
        for name, option in OPTIONS.items():
            found[name][position].append(judge(case.exact, *moments(case, k, option), base))
    return {name: {position: ranges(x) for position, x in both.items()} for name, both in found.items()}


DISTANCES = (0.01, 1.0)
PLACES = {
    "k1 in the reward (the default)": Option(),
    "k1 per token (`--token_level_kl`)": Option(token_level_kl=True),
    "k3 in the reward": Option(kl="k3 in reward"),
    "k3 in the loss (`--no_kl_in_reward`)": Option(kl="k3 in loss"),
    "k3 in both": Option(kl="k3 in both"),
}


def measure_kl() -> dict:
    """Place of the KL -> distance -> ranges over models, of the KL alone: score 0, β = 1, k = 2, so that g* = -∇KL. The
    policies are at two distances from the reference, on the way of ascent on the dense reward."""
    found = {name: {f"{distance:g}": [] for distance in DISTANCES} for name in PLACES}
    for seed, distance in itertools.product(SEEDS, DISTANCES):
        reference = make_reference(seed)
        theta = move_away(reference, make_scores("dense", seed), distance)
        case = make_case(theta, reference, torch.zeros(B, N, dtype=torch.float64), 1.0)
        base = moments(case, 2, Option())
        for name, option in PLACES.items():
            found[name][f"{distance:g}"].append(judge(case.exact, *moments(case, 2, option), base))
    return {name: {distance: ranges(x)["bias"] for distance, x in both.items()} for name, both in found.items()}


CORRECTIONS = {
    "off": Option(),
    "truncate, sequence": Option(rollout_correction="truncate"),
    "mask, sequence": Option(rollout_correction="mask"),
    "truncate, token": Option(rollout_correction="truncate", token_ratio=True),
}
SAMPLERS = {  # name -> kind and size, see `differing`
    "logits off by 0.02": ("logits", 0.02),
    "logits off by 0.3": ("logits", 0.3),
    "one update old, step 0.03": ("step", 0.03),
    "one update old, step 0.3": ("step", 0.3),
    "one update old, step 1": ("step", 1.0),
}


def differing(case: Case, kind: str, size: float, seed: int) -> tuple[Case, torch.Tensor]:
    """A policy, and the log-probs (B, n, R) of a sampler that differs from it.

    logits: normal noise with standard deviation `size` is on every logit of the sampler
    step: the sampler is the policy of `case`, and the policy what it becomes by a step of length `size` along the
        estimate that an update of 32 completions (4 groups of 4 for both prompts) gives; a clipped one has one length
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "logits":  # a logit is the sum of two numbers
        noise = torch.randn(len(case.theta), generator=generator, dtype=torch.float64) * size / math.sqrt(2)
        return case, token_logprobs(case.theta + noise)
    drawn = torch.multinomial(case.logprobs.sum(-1).exp(), 16, replacement=True, generator=generator)  # (B, 16)
    g = estimates(case, drawn.T.view(4, 4, B), Option()).mean(0)
    return make_case(case.theta + size * g / g.norm(), case.reference, case.scores, case.kl_coef), case.logprobs


def gap_of(case: Case, sampler: torch.Tensor) -> float:
    """The mean |log π - log μ| of a token that μ samples: what training logs as val/rollout_logprob_gap."""
    probability = sampler.sum(-1).exp()
    apart = (case.logprobs - sampler).abs()
    return ((probability[..., None] * apart).sum() / (probability @ MASK.sum(-1).double()).sum()).item()


def measure_samplers() -> dict:
    """Sampler -> the median gap, and for each correction the range of the bias. A constant in the reward has no effect,
    so `large mean` is left out."""
    found = {name: {label: [] for label in ("gap", *CORRECTIONS)} for name in SAMPLERS}
    for ((seed, *_), start), (name, difference) in itertools.product(cases(REWARDS[:2]), SAMPLERS.items()):
        case, sampler = differing(start, *difference, seed)
        found[name]["gap"].append(gap_of(case, sampler))
        for k in KS:
            base = moments(case, k, Option())  # sampled by the policy
            for label, option in CORRECTIONS.items():
                found[name][label].append(judge(case.exact, *moments(case, k, option, sampler), base))
    return {
        name: {"gap": round(median(x.pop("gap")), 5)} | {label: ranges(rows)["bias"] for label, rows in x.items()}
        for name, x in found.items()
    }


# ---- Tables and picture ----------------------------------------------------------------------------------------------


def tidy(value: float) -> str:
    """Two decimals; 0 where there is only rounding."""
    if abs(value) < 1e-10:
        return "0"
    return f"{value:.2g}" if abs(value) < 0.01 else f"{value:.2f}"


def span(found: list[float]) -> str:
    """The smallest and the largest."""
    low, high = tidy(found[0]), tidy(found[-1])
    return low if low == high else f"{low} to {high}"


def tables(result: dict) -> dict[str, str]:
    options = [["option", *(f"{column}, {position}" for column in COLUMNS[2:] for position in POSITIONS)]]
    for name in ("drgrpo", "grpo", "grpo, k3 in loss, sequence-mean"):
        found = result["options"][name]
        options.append([name, *(span(found[position][column]) for column in COLUMNS[2:] for position in POSITIONS)])
    kl = [["place of the KL (score 0)", *(f"bias at KL {distance:g}" for distance in DISTANCES)]]
    kl += [[name, *map(span, result["kl"][name].values())] for name in PLACES]
    samplers = [["sampler", "gap", *CORRECTIONS]]
    for name in SAMPLERS:
        found = result["samplers"][name]
        biases = [f"{tidy(found[label][1])} ({tidy(found[label][2])})" for label in CORRECTIONS]
        samplers.append([name, f"{found['gap']:.3f}", *biases])
    made = {"options": options, "kl": kl, "samplers": samplers}
    return {name: common.markdown(rows) for name, rows in made.items()}


def draw(result: dict):
    """Bias, direction and noise of every option: the range and the median over all cases, for both positions."""
    figure, ((*panels,),) = common.canvas(3, 12, 6, sharey=True)
    lowest_bias = 1e-4
    for panel, column in zip(panels, ("bias", "cosine", "noise")):
        for offset, colour, position in ((-0.16, "tab:blue", POSITIONS[0]), (0.16, "tab:orange", POSITIONS[1])):
            for place, name in enumerate(OPTIONS):
                low, middle, high = result["options"][name][position][column]
                if column == "bias":
                    low, middle, high = (max(x, lowest_bias) for x in (low, middle, high))
                label = f"policy {position}" if place == 0 else None
                panel.plot([low, high], [place + offset] * 2, color=colour, lw=2, label=label)
                panel.plot(middle, place + offset, "o", color=colour, ms=5)
    panels[0].set_yticks(range(len(OPTIONS)), list(OPTIONS))
    panels[0].invert_yaxis()
    panels[0].set(xscale="log", xlabel="bias: |E g − g*| / |g*|\n(at the left edge: 0.0001 or less)")
    panels[1].set(xlabel="direction: cosine of E g with g*\n(1: right)")
    panels[2].set(xscale="log", xlabel="noise: variance of g / (part of E g along g*)²,\nrelative to rloo's at equal k")
    for panel in panels[1:]:
        panel.axvline(1, color="black", lw=0.8)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(
        "Gradient estimates of rloo.py's options on a tiny language model, without sampling. g: the estimate from one\n"
        "update; E g: its mean over all updates; g*: the true gradient. Line: range over all cases; point: median",
        fontsize=10,
    )
    common.save(figure, PICTURE)


def headline() -> list[list[str]]:
    """A row of the benchmarks' README."""
    positions = common.Records(RECORDS).all["options"]["rloo (the defaults)"].values()
    largest = f"{max(found['bias'][-1] for found in positions):.0e}"
    return [["bias of RLOO's gradient, largest case", largest, "", "`python benchmark/gradient/exact.py`"]]


def report():
    result = common.Records(RECORDS).all
    common.insert(HERE / "README.md", tables(result))
    draw(result)


if __name__ == "__main__":
    torch.set_num_threads(1)
    records = common.Records(RECORDS)
    records.add("options", **measure_options())
    records.add("kl", **measure_kl())
    records.add("samplers", **measure_samplers())
    report()
