"""How good are the gradient estimates of rloo.py's options? Bias and variance, exactly; on a real model, by samples.

    python benchmark/gradient/estimators.py            # exact: about a minute on one core
    python benchmark/gradient/estimators.py --model    # the embedded policy with its gold judge: about 15 minutes

Exact. The policy is a language model with a vocabulary of 3 (token 0 stops), at most 2 tokens per completion and 15
parameters: a row of logits per prompt and one per previous token. An update is 2 prompts with k completions each. There
are 7 completions of a prompt, so all updates, with their probability, can be listed; a mean or a variance is a sum over
them, in float64, without sampling. The estimate g of an update is what rloo.py's own functions make of it
(shape_scores, rlhf_reward, advantage, policy_loss at ratio 1, kl_penalty, loss_weight). g* is the gradient of
E[score - β KL(π ‖ π_ref)], the mean over both prompts. For every option:

    bias      |E g - g*| / |g*|: a wrong scale counts as well as a wrong direction
    cosine    of E g with g*: 1 where the direction is right, whatever the scale
    variance  the trace of g's covariance, relative to that of rloo.py's defaults at the same k
    noise     variance / (the part of E g along g*)², relative to the same; - where that part is against g*. It does
              not depend on the scale of g, which a learning rate undoes

Prompts are fixed here, so all variance is that of the completions. Options that look at the whole update (reinforce,
normalize_*, loss_aggregation=token) see 2 prompts, not the hundred of a real update: their bias is larger here.

--model. See `measure_model`."""

import itertools
import json
import math
import re
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
import tyro
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mini_tldr"))

from mini_tldr import gold_judge

import rloo

MINI_TLDR = Path(__file__).resolve().parents[1] / "mini_tldr"

B = 2  # prompts of an exact update
MOST_UPDATES = 50_000  # that are listed, else it would take hours
REWARDS = ("dense", "sparse", "large mean")
POSITIONS = ("at the reference", "away from it")


@dataclass
class Args:
    """Bias and variance of gradient estimates: exactly on a tiny language model, or by samples on a real one."""

    model: bool = False
    """sample from a real model instead of listing everything"""
    redraw: bool = False
    """only draw the picture, from the numbers in --output"""
    output: str | None = None
    """all numbers, .json, with a figure beside it as .png; if not given, exact.json or embedded_policy.json
    beside this file"""
    seed: int = 1
    """of the first tiny model, whose tables are shown, or of the rollouts"""
    threads: int = 1
    """of torch"""
    kl_coef: float | None = None
    """β; if not given, 0.3, or 0.05 with --model, where it matters only if --policy is not the reference"""

    seeds: int = 5
    """exact: tiny models to try, each with rewards of its own; the sentences count cases over all of them"""
    vocab_size: int = 3
    """exact: tokens, the stop token among them"""
    response_length: int = 2
    """exact: R, tokens per completion at most"""
    rloo_k: tuple[int, ...] = (2, 3)
    """exact: completions per prompt"""
    away: float = 0.5
    """exact: KL from the reference, in nats, of the policy away from it"""

    policy: str | None = None
    """--model: folder of the policy; if not given, the embedded task's, which is the reference in any case"""
    num_prompts: int = 2048
    """--model: prompts, 16 completions each; rounded down to whole blocks of update / 2"""
    update: int = 128
    """--model: completions of an update, a multiple of 16"""
    sketch: int = 2048
    """--model: a gradient is sketched twice to this many numbers"""
    temperature: float = 0.7
    """--model: of the sampling"""
    minutes: float = math.inf
    """--model: sampling stops after this time, with fewer prompts"""


class InputError(ValueError):
    """A mistake in the flags; it ends the program with one line."""


def require(condition: object, message: str):
    if not condition:
        raise InputError(message)


# ---- Exact: a tiny language model, everything that it can say, and all updates ---------------------------------------


def all_completions(vocab_size: int, R: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every completion, (n, R), and its mask: sequences up to the first stop token, and those of R tokens without."""
    cut = {ids[: ids.index(0) + 1] if 0 in ids else ids for ids in itertools.product(range(vocab_size), repeat=R)}
    return rloo.pad([list(ids) for ids in sorted(cut)])


def policy_logits(theta: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (B, n, R, V) of the next token: a row for the prompt plus a row for the token before. theta is flat; the
    stop token precedes nothing, so its row is that of the beginning."""
    V = round(math.sqrt(len(theta) + B * B / 4) - B / 2)
    of_prompt, of_previous = theta[: B * V].view(B, 1, 1, V), theta[B * V :].view(V, V)
    previous = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], dim=1)
    return of_prompt + of_previous[previous]


def token_logprobs(theta: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, top_p: float = 1.0) -> torch.Tensor:
    """Log-probs (B, n, R) of the completions' tokens, 0 where masked. With top_p, of the softmax that is cut to the
    fewest likeliest tokens that reach it, as samplers do it; -inf for a token that is cut."""
    logprobs = torch.log_softmax(policy_logits(theta, tokens), dim=-1)
    if top_p < 1:
        ordered, order = logprobs.exp().sort(dim=-1, descending=True)
        kept = torch.zeros_like(logprobs).scatter(-1, order, (ordered.cumsum(-1) - ordered < top_p).double()) > 0
        logprobs = torch.log_softmax(logprobs.masked_fill(~kept, -math.inf), dim=-1)
    chosen = logprobs.gather(-1, tokens.expand(B, -1, -1)[..., None]).squeeze(-1)
    return torch.where(mask, chosen, 0.0)


class Case(NamedTuple):
    """A policy, its reference and a reward, on all n completions of B prompts; float64."""

    theta: torch.Tensor  # (d,)
    tokens: torch.Tensor  # (n, R)
    mask: torch.Tensor  # (n, R)
    logprobs: torch.Tensor  # (B, n, R)
    ref_logprobs: torch.Tensor  # (B, n, R)
    jacobian: torch.Tensor  # (B, n, R, d): ∇ log π of each token
    scores: torch.Tensor  # (B, n)
    kl_coef: float
    exact: torch.Tensor  # (d,): g*
    kl: float  # KL(π ‖ π_ref), nats, mean over prompts


def objective(theta: torch.Tensor, tokens, mask, ref_logprobs, scores, kl_coef: float) -> tuple[torch.Tensor, ...]:
    """E[score - β KL] and KL, means over prompts, as sums over all completions; for autograd."""
    logprobs = token_logprobs(theta, tokens, mask).sum(-1)
    kl = logprobs - ref_logprobs.sum(-1)
    mean = (logprobs.exp() * (scores - kl_coef * kl)).sum(-1).mean()
    return mean, (logprobs.exp() * kl).sum(-1).mean()


def make_case(
    theta: torch.Tensor,
    reference: torch.Tensor,
    scores: torch.Tensor,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    kl_coef: float,
) -> Case:
    theta = theta.detach().requires_grad_()
    ref_logprobs = token_logprobs(reference, tokens, mask)
    mean, kl = objective(theta, tokens, mask, ref_logprobs, scores, kl_coef)
    (exact,) = torch.autograd.grad(mean, theta)
    jacobian = torch.autograd.functional.jacobian(lambda x: token_logprobs(x, tokens, mask), theta.detach())
    theta = theta.detach()
    return Case(
        theta,
        tokens,
        mask,
        token_logprobs(theta, tokens, mask),
        ref_logprobs,
        jacobian,
        scores,
        kl_coef,
        exact,
        kl.item(),
    )


def move_away(reference: torch.Tensor, scores: torch.Tensor, tokens, mask, distance: float) -> torch.Tensor:
    """Parameters on the way that exact gradient ascent on the score takes, where KL from the reference is `distance`
    (or the farthest on the way, if it does not get there)."""
    theta, ref_logprobs = reference.clone().requires_grad_(), token_logprobs(reference, tokens, mask)
    for _ in range(2000):
        mean, kl = objective(theta, tokens, mask, ref_logprobs, scores, 0.0)
        if kl >= distance:
            break
        (step,) = torch.autograd.grad(mean, theta)
        theta = (theta + 0.02 * step / step.norm()).detach().requires_grad_()
    return theta.detach()


def make_scores(reward: str, n: int, seed: int) -> torch.Tensor:
    """(B, n). dense: standard normal numbers; large mean: 10 more; sparse: 1 for 2 completions of a prompt, else 0."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(B, n, generator=generator, dtype=torch.float64)
    if reward == "sparse":
        return (dense >= dense.topk(2, dim=-1).values[:, -1:]).double()
    return dense + 10 * (reward == "large mean")


def all_updates(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every update: which completions it holds, (k, N, B), and in how many orders they can be drawn, (N,).

    Within a prompt order makes no difference, so each combination stands for all its orders."""
    groups = list(itertools.combinations_with_replacement(range(n), k))
    orders = [math.factorial(k) // math.prod(math.factorial(m) for m in Counter(group).values()) for group in groups]
    groups, orders = torch.tensor(groups), torch.tensor(orders, dtype=torch.float64)
    pairs = torch.cartesian_prod(*[torch.arange(len(groups))] * B)  # (N, B)
    return groups[pairs].permute(2, 0, 1), orders[pairs].prod(-1)


# ---- Exact: the options and the estimate that rloo.py's functions make of an update ----------------------------------


@dataclass
class Option:
    """What differs from rloo.py's defaults; names as its flags."""

    advantage_estimator: str = "rloo"
    kl: str = "k1 in reward"  # k1 in reward, k3 in reward, k3 in loss, k3 in both, none
    kl_level: str = "sequence"
    loss_aggregation: str = "sequence"
    normalize_advantage: bool = False
    normalize_reward: bool = False
    reward_clip_range: float | None = None
    top_p: float = 1.0  # of the sampling; scored by the full softmax
    divide: str | None = None  # leave-one-out advantages by: the group's std, or that of the siblings alone
    baseline: bool = True  # without it the advantage is the reward itself
    rollout_correction: str = "off"  # matters where a sampler is given, see `moments`
    rollout_correction_cap: float = 2.0
    ratio_level: str | None = None

    @property
    def mixes_prompts(self) -> bool:
        return (
            self.advantage_estimator == "reinforce"
            or self.normalize_advantage
            or self.normalize_reward
            or self.loss_aggregation == "token"
        )


OPTIONS = {
    "rloo (the defaults)": Option(),
    "grpo": Option("grpo"),
    "drgrpo": Option("drgrpo"),
    "reinforce": Option("reinforce"),
    "grpo, k3 in loss, sequence-mean": Option("grpo", "k3 in loss", loss_aggregation="sequence-mean"),
    "no baseline": Option(baseline=False),
    "normalize_advantage": Option(normalize_advantage=True),
    "k3 in the reward": Option(kl="k3 in reward"),
    "k3 in the loss": Option(kl="k3 in loss"),
    "k3 in both": Option(kl="k3 in both"),
    "no KL": Option(kl="none"),
    "kl_level token": Option(kl_level="token"),
    "loss_aggregation token": Option(loss_aggregation="token"),
    "loss_aggregation sequence-mean": Option(loss_aggregation="sequence-mean"),
    "sampled with top-p 0.9": Option(top_p=0.9),
    "normalize_reward": Option(normalize_reward=True),
    "reward_clip_range 1": Option(reward_clip_range=1.0),
    "normalize_reward, clip 1": Option(normalize_reward=True, reward_clip_range=1.0),
    "rloo / (group std + 1e-4)": Option(divide="group, 1e-4"),
    "rloo / (siblings' std + 1e-6)": Option(divide="siblings, 1e-6"),
}
BASE, PUBLISHED = "rloo (the defaults)", "grpo, k3 in loss, sequence-mean"


def siblings_std(rewards: torch.Tensor) -> torch.Tensor:
    """Standard deviation (over k - 1, not k - 2) of the other completions of the prompt, (k, B)."""
    k = len(rewards)
    others = torch.stack([rewards[[i for i in range(k) if i != j]] for j in range(k)])
    return others.std(1, correction=0)


def divided(advantages: torch.Tensor, rewards: torch.Tensor, divide: str) -> torch.Tensor:
    """Leave-one-out advantages (k, B) over a standard deviation: not in rloo.py, seen elsewhere."""
    whose, eps = divide.split(", ")
    return advantages / ((rewards.std(0) if whose == "group" else siblings_std(rewards)) + float(eps))


def advantages_and_weights(scores, kl, k3, mask, option: Option, kl_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages (k, B, 1 or R) and weights (k, B) of an update, by rloo.py's functions in the order of `update`;
    scores, k3 (k, B), kl, mask (k, B, R)."""
    ended = torch.ones_like(scores, dtype=torch.bool)
    scores = rloo.shape_scores(scores, ended, None, option.normalize_reward, option.reward_clip_range)
    if option.kl in ("k3 in reward", "k3 in both"):
        scores = scores - kl_coef * k3
    reward_kl_coef = kl_coef if option.kl == "k1 in reward" else 0.0
    rewards = rloo.rlhf_reward(scores, kl, reward_kl_coef, option.kl_level)
    advantages = rloo.advantage(rewards, option.advantage_estimator).view(*scores.shape, -1)
    advantages = advantages.masked_fill(~mask[..., : advantages.shape[-1]], math.nan)
    advantages = (rloo.standardize(advantages) if option.normalize_advantage else advantages).nan_to_num(0.0)
    rewards = rloo.rlhf_reward(scores, kl, reward_kl_coef)
    if option.divide:
        advantages = divided(advantages[..., 0], rewards, option.divide)[..., None]
    if not option.baseline:
        advantages = rewards[..., None]
    return advantages, rloo.loss_weight(mask.sum(-1), ended, option.loss_aggregation)


def estimates(case: Case, index: torch.Tensor, option: Option, sampler: torch.Tensor | None = None) -> torch.Tensor:
    """g (N, d) of the updates `index` (k, N, B): minus the gradient of the loss that training would step along.

    `sampler` (B, n, R) are the log-probs under what sampled the completions, if that was not the policy. As in
    `update`, the KL is then the sampler's from the reference, but with a rollout_correction the policy's.

    rloo.py's loss is differentiated by the tokens' log-probs, and those by the parameters. Where an option looks at the
    whole update, its functions are called once per update; else all updates are one batch of N·B prompts."""
    k, N, _ = index.shape
    prompts = torch.arange(B)
    sampler = case.logprobs if sampler is None else sampler
    new, sampled, ref, scores, mask = (
        x[prompts, index].flatten(1, 2)
        for x in (case.logprobs, sampler, case.ref_logprobs, case.scores, case.mask.expand(B, -1, -1))
    )  # (k, N·B, ...)
    level = option.ratio_level or rloo.default_ratio_level(option)
    correction, _ = rloo.rollout_weight(
        new, sampled, mask, option.rollout_correction, option.rollout_correction_cap, level
    )
    of_kl = sampled if option.rollout_correction == "off" else new
    kl, k3 = (of_kl - ref) * mask, rloo.kl_penalty(of_kl, ref, mask)
    parts = [slice(i, i + B) for i in range(0, N * B, B)] if option.mixes_prompts else [slice(None)]
    found = [
        advantages_and_weights(scores[:, part], kl[:, part], k3[:, part], mask[:, part], option, case.kl_coef)
        for part in parts
    ]
    advantages, weight = (torch.cat(x, dim=1) for x in zip(*found))
    old, new = new, new.clone().requires_grad_()
    losses, _, _ = rloo.policy_loss(new, old, advantages, mask, 0.2, 0.2, level, correction)
    if option.kl in ("k3 in loss", "k3 in both"):
        losses = losses + case.kl_coef * rloo.kl_penalty(new, ref, mask)
    (slope,) = torch.autograd.grad((losses * weight).sum() / (k * B), new)  # an update's loss: the mean of its k·B
    return -torch.einsum("jnbt,jnbtd->nd", slope.view(k, N, B, -1), case.jacobian[prompts, index])


def moments(
    case: Case, updates: tuple[torch.Tensor, torch.Tensor], option: Option, sampler: torch.Tensor | None = None
) -> tuple[torch.Tensor, float]:
    """E g (d,) and the trace of g's covariance, over all updates. What samples them is the policy, or another
    distribution, `sampler`: its log-probs (B, n, R), which are then known in training as well."""
    index, orders = updates
    drawn = token_logprobs(case.theta, case.tokens, case.mask, option.top_p) if sampler is None else sampler
    weight = orders * drawn.sum(-1).exp()[torch.arange(B), index].prod(0).prod(-1)
    if abs(weight.sum().item() - 1) > 1e-9:
        raise AssertionError(f"the probabilities of all updates add up to {weight.sum().item()}")
    possible = weight > 0  # what a sampler cannot draw has no log-prob
    index, weight = index[:, possible], weight[possible]
    g = estimates(case, index, option, sampler)
    mean = weight @ g
    return mean, (weight @ (g - mean).square().sum(-1)).item()


def judge(exact: torch.Tensor, mean: torch.Tensor, variance: float, base: tuple[torch.Tensor, float]) -> dict:
    """The four columns; NaN where there is nothing to compare (E g = 0)."""
    some = mean.norm() > 1e-12 * base[0].norm()
    along, base_along = ((x @ exact / exact.norm()).item() for x in (mean, base[0]))
    return {
        "bias": ((mean - exact).norm() / exact.norm()).item(),
        "cosine": torch.cosine_similarity(mean, exact, dim=0).item() if some else math.nan,
        "variance": variance / base[1],
        "noise": (variance / along**2) / (base[1] / base_along**2) if some and along > 0 else math.nan,
    }


def measure_exactly(args: Args) -> list[dict]:
    """A result for each seed, reward, position, k and option. Options that look at the whole update are measured at all
    k for the first seed, at the smallest k for the others."""
    tokens, mask = all_completions(args.vocab_size, args.response_length)
    n, V, found = len(tokens), args.vocab_size, []
    updates = {k: all_updates(n, k) for k in args.rloo_k}
    for seed in range(args.seed, args.seed + args.seeds):
        reference = torch.randn(B * V + V * V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for reward, position in itertools.product(REWARDS, POSITIONS):
            scores = make_scores(reward, n, seed + 1000)
            there = position == POSITIONS[0]
            theta = reference if there else move_away(reference, scores, tokens, mask, args.away)
            case = make_case(theta, reference, scores, tokens, mask, args.kl_coef)
            for k in args.rloo_k:
                base = moments(case, updates[k], OPTIONS[BASE])
                for name, option in OPTIONS.items():
                    if option.mixes_prompts and seed > args.seed and k > min(args.rloo_k):
                        continue  # one call per update takes its time
                    mean, variance = moments(case, updates[k], option)
                    found.append(
                        {
                            "seed": seed,
                            "reward": reward,
                            "position": position,
                            "k": k,
                            "option": name,
                            **judge(case.exact, mean, variance, base),
                            "kl": case.kl,
                            "variance_per_completion": variance * k * B,
                        }
                    )
    return found


DISTANCES = (0.01, 0.1, 0.5, 1.0)
KL_OPTIONS = {
    "k1 in the reward": Option(),
    "k1, reward-to-go per token": Option(kl_level="token"),
    "k3 in the reward": Option(kl="k3 in reward"),
    "k3 in the loss": Option(kl="k3 in loss"),
    "k3 in both": Option(kl="k3 in both"),
}


def measure_kl(args: Args) -> list[dict]:
    """The KL alone: score 0, β = 1, k = 2, so that g* = -∇KL. For policies at some distances from the reference, on the
    way of ascent on the dense reward: the mean and the standard deviation of Σ_t k1 and Σ_t k3 as numbers, and the
    gradients that they give. Variance and noise are relative to k1 in the reward."""
    tokens, mask = all_completions(args.vocab_size, args.response_length)
    n, V, found = len(tokens), args.vocab_size, []
    updates = all_updates(n, 2)
    for seed, distance in itertools.product(range(args.seed, args.seed + args.seeds), DISTANCES):
        reference = torch.randn(B * V + V * V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        theta = move_away(reference, make_scores("dense", n, seed + 1000), tokens, mask, distance)
        case = make_case(theta, reference, torch.zeros(B, n, dtype=torch.float64), tokens, mask, 1.0)
        kl = (case.logprobs - case.ref_logprobs) * mask
        k3 = rloo.kl_penalty(case.logprobs, case.ref_logprobs, mask)
        probability = case.logprobs.sum(-1).exp() / B
        base = moments(case, updates, Option())
        for name, option in KL_OPTIONS.items():
            number = k3 if "k3" in name else kl.sum(-1)
            mean = (probability * number).sum()
            spread = (probability * (number - mean).square()).sum().sqrt()
            found.append(
                {
                    "seed": seed,
                    "distance": distance,
                    "option": name,
                    "kl": case.kl,
                    "mean": mean.item(),
                    "std": spread.item(),
                    **judge(case.exact, *moments(case, updates, option), base),
                }
            )
    return found


ALONE, ROUNDED = "1, 0, 0, 0", "0.7 four times, one rounded up"
GROUPS = {  # rewards of a prompt's completions
    "0.2, 0.4, 0.6, 0.8": [0.2, 0.4, 0.6, 0.8],
    ALONE: [1.0, 0.0, 0.0, 0.0],
    "0.95 and 7 times 0.35": [0.95] + [0.35] * 7,
    ROUNDED: [0.7, 0.7, 0.7, 0.7 + 6e-8],
}


def one_pass_std(rewards: torch.Tensor) -> torch.Tensor:
    """Siblings' standard deviation as √(E r² - (E r)²), which rounding spoils."""
    k = len(rewards)
    mean, square = ((x.sum(0) - x) / (k - 1) for x in (rewards, rewards.square()))
    return (square - mean.square()).clamp(min=0).sqrt()


def measure_explosions() -> dict[str, dict[str, float]]:
    """The largest |A| of a group, in float32, by what leave-one-out advantages are divided by."""
    found = {}
    for name, rewards in GROUPS.items():
        rewards = torch.tensor(rewards, dtype=torch.float32)[:, None]
        A = rloo.advantage(rewards)
        ways = {
            "as it is": A,
            "group std + 1e-4": divided(A, rewards, "group, 1e-4"),
            "group std + 1e-8": divided(A, rewards, "group, 1e-8"),
            "siblings’ + 1e-4": divided(A, rewards, "siblings, 1e-4"),
            "siblings’ + 1e-6": divided(A, rewards, "siblings, 1e-6"),
            "one pass + 1e-6": A / (one_pass_std(rewards) + 1e-6),
        }
        found[name] = {way: values.abs().max().item() for way, values in ways.items()}
    return found


# ---- Exact: what is shown and said -----------------------------------------------------------------------------------


def number(value: float | None, width: int = 9) -> str:
    """Few digits; - where there is none, 0 below 1e-10 (rounding)."""
    if value is None or math.isnan(value):
        return f"{'-':>{width}}"
    return f"{0.0 if abs(value) < 1e-10 else value:{width}.3f}" if abs(value) < 1e4 else f"{value:{width}.1e}"


def exact_table(found: list[dict], seed: int) -> str:
    """A block for each reward and position of the first seed, all k side by side."""
    lines, ks = [], sorted({row["k"] for row in found})
    for reward, position in itertools.product(REWARDS, POSITIONS):
        rows = [row for row in found if (row["seed"], row["reward"], row["position"]) == (seed, reward, position)]
        lines.append(
            f"\n{reward} reward, {position} (KL {rows[0]['kl']:.2f} nats)\n{'':32}"
            + "".join(f"{f'k = {k}: bias':>14}{'cosine':>9}{'variance':>9}{'noise':>9}" for k in ks)
        )
        for name in OPTIONS:
            cells = {row["k"]: row for row in rows if row["option"] == name}
            if reward == "large mean" and all(same_as_dense(found, row) for row in cells.values()):
                continue
            lines.append(
                f"{name:32}"
                + "".join(
                    "".join(number(cells[k][column], 14 if column == "bias" else 9) for column in COLUMNS) for k in ks
                )
            )
        if reward == "large mean":
            lines.append("all others: as with the dense reward")
    return "\n".join(lines)


def same_as_dense(found: list[dict], row: dict) -> bool:
    """Whether a row is that of the dense reward: a baseline takes any constant off."""
    key = ("seed", "position", "k", "option")
    (dense,) = (x for x in found if x["reward"] == "dense" and all(x[name] == row[name] for name in key))
    return all(math.isclose(row[column], dense[column], rel_tol=1e-4, abs_tol=1e-6) for column in COLUMNS)


COLUMNS = ("bias", "cosine", "variance", "noise")


def kl_table(found: list[dict], seed: int) -> str:
    lines = [
        f"\nthe KL alone: score 0, β 1, k = 2\n{'':28}{'KL':>7}{'number ± its std':>18}{'bias':>10}{'cosine':>9}"
        f"{'variance':>9}{'noise':>9}"
    ]
    for row in (row for row in found if row["seed"] == seed):
        lines.append(
            f"{row['option']:28}{row['kl']:7.3f}{row['mean']:9.3f} ± {row['std']:6.3f} "
            + "".join(number(row[column]) for column in COLUMNS)
        )
    return "\n".join(lines)


def explosion_table(found: dict[str, dict[str, float]]) -> str:
    ways = list(next(iter(found.values())))
    lines = [
        "\nthe largest |A| of a group, float32, leave-one-out advantages divided by (siblings': the std of the "
        f"others' rewards)\n{'rewards':32}" + "".join(f"{way:>18}" for way in ways)
    ]
    return "\n".join(
        lines + [f"{name:32}" + "".join(f"{value:18.3g}" for value in row.values()) for name, row in found.items()]
    )


def span(rows: list[dict], column: str, digits: str = ".2f") -> str:
    """The smallest and the largest number of a column."""
    values = [row[column] for row in rows if not math.isnan(row[column])]
    low, high = f"{min(values):{digits}}", f"{max(values):{digits}}"
    return low if low == high else f"{low} to {high}"


def exact_words(found: list[dict], kl_found: list[dict], explosions: dict) -> str:
    """What is true of two sentences that are often said, in numbers of all seeds, rewards, positions and k."""

    def of(option: str, **where) -> list[dict]:
        return [row for row in found if row["option"] == option and all(row[key] == x for key, x in where.items())]

    def say(column: str, option: str, digits: str = ".2f", **where) -> str:
        return span(of(option, **where), column, digits)

    base, grpo, clip, there = of(BASE), "grpo", "reward_clip_range 1", {"position": POSITIONS[0]}
    largest = max(row["bias"] for row in base + of("kl_level token"))
    scale = max(abs(row["bias"] - 1 / row["k"]) + abs(row["cosine"] - 1) for row in of("drgrpo"))
    models, ks = len({row["seed"] for row in base}), sorted({row["k"] for row in base})
    alone, rounded = explosions[ALONE], explosions[ROUNDED]
    lines = [
        f'"RLOO is unbiased, with lower variance than GRPO": {len(base)} cases, {models} models',
        f"- Unbiased: true. The bias is at most {largest:.0e}, rounding, at sequence and at token level. GRPO's bias "
        f"is {say('bias', grpo)}. Its direction is off as well, cosine {say('cosine', grpo)}; it is right "
        f"({say('cosine', grpo, '.3f', reward='sparse', **there)}) with 0/1 rewards at the reference, where, for "
        "k ≤ 3, all groups that are not equal have one standard deviation. With its k3 in the loss and its mean over "
        f"each completion's tokens as well: cosine {say('cosine', PUBLISHED)}. Dr. GRPO's bias is its scale, 1 / k, "
        f"to {scale:.0e}.",
        f"- Lower variance: not as it is said. GRPO's variance is {say('variance', grpo)} of RLOO's, but dividing by a "
        "standard deviation changes the scale, and the variance with it. Noise, which has no scale:",
    ]
    for reward, position in itertools.product(REWARDS, POSITIONS):
        rows = of(grpo, reward=reward, position=position)
        less, more = (sum(test(row["noise"]) for row in rows) for test in (lambda x: x < 0.999, lambda x: x > 1.001))
        lines.append(
            f"    {reward}, {position}: {span(rows, 'noise')} of RLOO's; less in {less}, more in {more} of {len(rows)}"
        )
    if len(ks) > 1:
        first, last = ([row["variance_per_completion"] for row in base if row["k"] == k] for k in (ks[0], ks[-1]))
        ratios = [{"ratio": y / x} for x, y in zip(first, last)]
        lines.append(
            f"- At equal completions RLOO's variance with k = {ks[-1]} is {span(ratios, 'ratio')} of that "
            f"with k = {ks[0]}, for given prompts."
        )
    lines += [
        "- The baseline pays where rewards have a mean: without it the variance is "
        f"{say('variance', 'no baseline', reward='large mean')} of RLOO's for rewards around 10, "
        f"{say('variance', 'no baseline', reward='sparse')} for 0/1 and "
        f"{say('variance', 'no baseline', reward='dense')} for those around 0; unbiased in any case. One baseline for "
        "the whole update (reinforce) shrinks the gradient by 1 / completions of the update, bias "
        f"{say('bias', 'reinforce')} here; noise {say('noise', 'reinforce')} of RLOO's.",
        f"- normalize_advantage: cosine {say('cosine', 'normalize_advantage')}. loss_aggregation: token "
        f"{say('cosine', 'loss_aggregation token', '.3f')}, sequence-mean "
        f"{say('cosine', 'loss_aggregation sequence-mean', '.3f')}. Sampled with top-p 0.9 and scored by the full "
        f"softmax: bias {say('bias', 'sampled with top-p 0.9')}. Rewards clipped to ±1: bias "
        f"{say('bias', clip, reward='sparse')} for 0/1, {say('bias', clip, reward='dense')} for dense, "
        f"{say('bias', clip, reward='large mean', **there)} for large-mean ones at the reference, which nearly all "
        "become 1.",
        "- Leave-one-out over the group's standard deviation is GRPO times k / (k - 1), and |A| stays below √k. It "
        "explodes over that of the siblings alone: they agree whenever one completion differs from all others, as in "
        f"1, 0, 0, 0, and |A| is {alone['siblings’ + 1e-6']:.0e} with 1e-6, {alone['siblings’ + 1e-4']:.0e} with 1e-4; "
        "at k = 2 it is always so. Over the group's, rewards that differ by rounding alone give |A| "
        f"{rounded['group std + 1e-8']:.1f} with 1e-8, {rounded['group std + 1e-4']:.0e} with the 1e-4 of rloo.py's "
        "grpo.",
        "",
        "k1 against k3, the KL alone (score 0)",
    ]
    for distance in DISTANCES:
        k1, go, reward, loss, both = (
            [row for row in kl_found if (row["option"], row["distance"]) == (name, distance)] for name in KL_OPTIONS
        )
        ratios = [{"ratio": a["std"] / b["std"]} for a, b in zip(reward, k1)]
        lines.append(
            f"- KL {distance}. As numbers both have the right mean, and k3's std is {span(ratios, 'ratio')} of k1's, "
            f"smaller in {sum(x['ratio'] < 1 for x in ratios)} of {len(ratios)}. As gradients: k1 in the reward, bias "
            f"{max(row['bias'] for row in k1):.0e}; k3 in the reward, bias {span(reward, 'bias')}, cosine "
            f"{span(reward, 'cosine')}; k3 in the loss, bias {span(loss, 'bias')}, cosine {span(loss, 'cosine')}; k3 "
            f"in both, bias {max(row['bias'] for row in both):.0e}, variance {span(both, 'variance')} of k1's; k1 as "
            f"reward-to-go {span(go, 'variance')} of it."
        )
    lines.append(
        "- So a number's variance is not its gradient's. The gradient of E k3 has two parts: k3 · ∇ log π, which a "
        "reward gives, and ∇ k3, which a loss gives. k3 in the reward leaves out the second; k3 in the loss the first, "
        "and with it what a token does to the KL of later ones. k1 needs only the first, because E ∇ k1 = 0."
    )
    return "\n".join(lines)


def draw_exact(found: list[dict], pyplot):
    """Bias, cosine and noise of every option: the range and the median over all cases, for both positions."""
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 7), sharey=True, layout="constrained")
    names = list(OPTIONS)
    lowest_bias = 1e-4
    for panel, column in zip(axes, ("bias", "cosine", "noise")):
        for number, position in enumerate(POSITIONS):
            for place, name in enumerate(names):
                rows = [row for row in found if (row["option"], row["position"]) == (name, position)]
                values = [row[column] for row in rows if row[column] is not None and not math.isnan(row[column])]
                if not values:  # an option that points against g* in all cases has no noise
                    continue
                if column == "bias":
                    values = [max(value, lowest_bias) for value in values]
                y = place + (-0.16, 0.16)[number]
                label = f"policy {position}" if place == 0 else None
                panel.plot([min(values), max(values)], [y, y], color=f"C{number}", linewidth=2, label=label)
                panel.plot(statistics.median(values), y, "o", color=f"C{number}", markersize=5)
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].set(xscale="log", xlabel="bias: |E g − g*| / |g*|\n(at the left edge: 0.0001 or less)")
    axes[1].set(xlabel="direction: cosine of E g with g*\n(1: right)")
    axes[2].set(
        xscale="log", xlabel="noise: variance of g / (part of E g along g*)²,\nrelative to rloo's at the same k"
    )
    for panel in axes[1:]:
        panel.axvline(1, color="gray", linewidth=0.8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(
        "Gradient estimates of rloo.py's options, exactly, on a tiny language model. g: the estimate from one update;\n"
        "E g: its mean over all updates; g*: the true gradient. Line: range over models, rewards and k; point: median",
        fontsize=11,
    )


def run_exactly(args: Args):
    args.kl_coef = 0.3 if args.kl_coef is None else args.kl_coef
    n = sum((args.vocab_size - 1) ** t for t in range(args.response_length + 1))
    for k in args.rloo_k:
        updates = math.comb(n + k - 1, k) ** B
        require(
            updates <= MOST_UPDATES,
            f"--rloo_k {k} with {n} completions per prompt: {updates:,} updates to list, "
            f"more than {MOST_UPDATES:,}; lower --vocab_size, --response_length or --rloo_k",
        )
    start = time.perf_counter()
    found, kl_found, explosions = measure_exactly(args), measure_kl(args), measure_explosions()
    words = exact_words(found, kl_found, explosions)
    print(
        f"{n} completions of each of {B} prompts; β {args.kl_coef}; variance and noise relative to rloo's at the "
        f"same k; the first of {args.seeds} models\n{exact_table(found, args.seed)}\n{kl_table(kl_found, args.seed)}"
        f"\n{explosion_table(explosions)}\n\n{words}\n\n{time.perf_counter() - start:.0f} s"
    )
    cases = {}
    for row in found:
        case = {name: row[name] for name in ("seed", "reward", "position", "kl", "k")}
        options = cases.setdefault(tuple(case.values()), case | {"options": {}})["options"]
        options[row["option"]] = [row[column] for column in COLUMNS]
    result = {
        "command": command(args),
        "columns": COLUMNS,
        "exact": [*cases.values()],
        "kl_alone": kl_found,
        "explosions": explosions,
        "words": words.splitlines(),
    }
    save(result, args.output, lambda pyplot: draw_exact(found, pyplot))


def command(args: Args) -> str:
    """The command line that made a result."""
    default = Args()
    flags = {name: value for name, value in vars(args).items() if value != getattr(default, name)}
    for name in ("model", "output", "threads", "minutes", "redraw"):
        flags.pop(name, None)
    said = [f"--{name} {' '.join(map(str, x)) if isinstance(x, tuple) else x}" for name, x in flags.items()]
    return " ".join(["python benchmark/gradient/estimators.py", *["--model"] * args.model, *said])


def compact(value):
    """Numbers to 4 digits and lists of objects as tables, so that the file stays small."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: compact(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], dict):
            return {"columns": list(value[0]), "rows": [compact(list(row.values())) for row in value]}
        return [compact(x) for x in value]
    return value


def save(result: dict, output: str, draw):
    """Writes the numbers, a row of a table per line, and beside them the picture that `draw(pyplot)` makes."""
    path, text = Path(output), json.dumps(compact(result), indent=1, ensure_ascii=False)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(f"numbers: {path}")
    draw_beside(path, draw)


def draw_beside(path: Path, draw):
    """What `draw(pyplot)` makes, as .png beside the numbers."""
    try:
        import matplotlib
    except ImportError:
        print("no picture without matplotlib: pip install -r benchmark/requirements.txt")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw(pyplot)
    pyplot.savefig(path.with_suffix(".png"), dpi=110)
    pyplot.close()
    print(f"picture: {path.with_suffix('.png')}")


def expanded(value):
    """What `compact` made of lists of objects, as lists of objects again."""
    if isinstance(value, list):
        return [expanded(x) for x in value]
    if isinstance(value, dict) and set(value) == {"columns", "rows"}:
        return [dict(zip(value["columns"], expanded(row))) for row in value["rows"]]
    if isinstance(value, dict):
        return {name: expanded(x) for name, x in value.items()}
    return value


def redraw(path: Path):
    """The picture of numbers that are there."""
    result = expanded(json.loads(path.read_text()))
    if "tables" in result:
        draw_beside(path, lambda pyplot: draw_model(result, pyplot))
        return
    found = [
        {**case, "option": option, **dict(zip(result["columns"], values))}
        for case in result["exact"]
        for option, values in case["options"].items()
    ]
    draw_beside(path, lambda pyplot: draw_exact(found, pyplot))


# ---- A real model, by samples ----------------------------------------------------------------------------------------

K_MAX = 16  # completions per prompt that are sampled; every k divides it
KS = (2, 4, 8, 16)
ESTIMATORS = ("rloo", "grpo", "drgrpo", "reinforce")
JUDGED = ("gold", "win")


class Sketch:
    """A random linear map of gradients to `size` numbers that keeps inner products, without bias and up to √(2 / size)
    of the norms: each weight goes, with a random sign, to one of `size` places (count sketch; Charikar et al. 2002).

    Two independent ones, of `size` numbers each, stand side by side: figures can also be had from each alone."""

    def __init__(self, weights: int, size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.size = size
        self.place = torch.randint(0, size, (2, weights), generator=generator)
        self.sign = torch.randint(0, 2, (2, weights), generator=generator) * 2.0 - 1

    def __call__(self, gradients: torch.Tensor) -> torch.Tensor:
        """(n, weights) to (n, 2 · size)."""
        halves = [
            gradients.new_zeros(len(gradients), self.size).index_add_(1, place, gradients * sign)
            for place, sign in zip(self.place, self.sign)
        ]
        return torch.cat(halves, dim=1) / math.sqrt(2)


def completion_gradients(policy, group, temperature: float) -> torch.Tensor:
    """∇ log π(y_j) of each completion of one prompt, (k, weights): a `Batch` of B = 1."""
    weights = {name: weight.detach() for name, weight in policy.named_parameters()}
    P, R = int(group.prompt_mask.sum()), int(group.response_mask.sum(-1).max())
    responses, mask = group.responses[:, 0, :R], group.response_mask[:, 0, :R]
    ids = torch.cat([group.prompt_ids[:, -P:].expand(len(responses), -1), responses], dim=1)

    def logprob(weights: dict, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        options = {"input_ids": ids[None], "use_cache": False, "logits_to_keep": R + 1}
        logits = torch.func.functional_call(policy, weights, (), options).logits[0, :-1]
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1).gather(1, ids[-R:, None]).squeeze(1)
        return (logprobs * mask).sum()

    # Nothing is padded on the left, and what is padded on the right comes after all that counts: causal is enough.
    found = torch.func.vmap(torch.func.grad(logprob), in_dims=(None, 0, 0))(weights, ids, mask)
    return torch.cat([x.flatten(1) for x in found.values()], dim=1)


def to_updates(x: torch.Tensor, k: int, prompts: int) -> torch.Tensor:
    """(16, block, ...) to (updates, k, prompts, ...): every completion of a block of prompts in exactly one update."""
    x = x.unflatten(0, (-1, k)).unflatten(2, (-1, prompts))  # (16 / k, k, block / prompts, prompts, ...)
    return x.transpose(1, 2).flatten(0, 1)


def update_gradients(scores, kl, sketches, k: int, estimator: str, kl_coef: float, size: int) -> torch.Tensor:
    """g (updates, m) of a block of prompts, at ratio 1 the mean of A_j ∇ log π(y_j), A by rloo.py's function, called
    once per update; scores (16, block), kl (16, block, R), sketches (16, block, m)."""
    parts = (to_updates(x, k, size // k) for x in (scores, kl, sketches))
    return torch.stack(
        [
            torch.einsum("jb,jbm->m", rloo.advantage(rloo.rlhf_reward(s, kl, kl_coef), estimator), g) / size
            for s, kl, g in zip(*parts)
        ]
    )


class Products(NamedTuple):
    """Inner products of an estimator's gradients, by blocks of prompts (n); blocks are independent of each other."""

    square: torch.Tensor  # (n,): mean |g|² of the block's updates
    own: torch.Tensor  # (n, n): of the blocks' mean gradients
    target: torch.Tensor  # (n, n): block i's mean gradient with block j's of the target
    direction: torch.Tensor  # (n, n): mean of g / |g| of block i's updates, with block j's mean of the target


def products(g: torch.Tensor, target: torch.Tensor) -> Products:
    """g (n, updates, m), target (n, m)."""
    mean, unit = g.mean(1), (g / g.norm(dim=-1, keepdim=True).clamp(min=1e-30)).mean(1)
    return Products(g.square().sum(-1).mean(1), mean @ mean.T, mean @ target.T, unit @ target.T)


def across(x: torch.Tensor) -> torch.Tensor:
    """The mean of the products of different blocks: without bias, for noise of different blocks is independent."""
    return (x.sum() - x.diagonal().sum()) / (len(x) * (len(x) - 1))


def figures(found: dict[tuple[str, int], Products], keep: torch.Tensor) -> dict[tuple[str, int], dict[str, float]]:
    """The columns of the table for each (estimator, k), from the blocks `keep`."""

    def of(key):
        p = Products(*(x[keep] if x.dim() == 1 else x[keep][:, keep] for x in found[key]))
        signal = across(p.own)
        return p, signal, p.square.mean() - signal, across(p.target).square() / target

    target = across(found["rloo", K_MAX].own[keep][:, keep])  # |g*|²
    table = {}
    for estimator, k in found:
        p, signal, trace, along = of((estimator, k))
        _, _, rloo_trace, rloo_along = of(("rloo", k))
        table[estimator, k] = {
            "cosine_of_mean": across(p.target) / (signal * target).sqrt(),
            "cosine_of_update": across(p.direction) / target.sqrt(),
            "trace": trace,
            "variance": trace / rloo_trace,
            "noise": trace / along,
            "relative_noise": (trace / along) / (rloo_trace / rloo_along),
        }
    return {key: {name: x.item() for name, x in row.items()} for key, row in table.items()}


def with_errors(found: dict[tuple[str, int], Products]) -> dict[tuple[str, int], dict[str, tuple[float, float]]]:
    """`figures` with their standard errors by the jackknife: all blocks but one, each in turn."""
    n = len(next(iter(found.values())).square)
    everything = torch.arange(n)
    without = [figures(found, everything[everything != i]) for i in range(n)]
    table = {}
    for key, row in figures(found, everything).items():
        left_out = {name: torch.tensor([other[key][name] for other in without], dtype=torch.float64) for name in row}
        table[key] = {name: (x, math.sqrt(n - 1) * left_out[name].std(correction=0).item()) for name, x in row.items()}
    return table


def load(args: Args):
    """Policy, reference (None where the policy is the reference), tokenizer, rows and what `rollout` needs."""

    def model(path: str):
        require(Path(path, "config.json").is_file(), f"{path}: is no folder with a model")
        try:
            return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"{path}: cannot be loaded ({str(error).splitlines()[0]})") from error

    folder = str(MINI_TLDR)
    policy, reference = model(args.policy or f"{folder}/sft"), model(f"{folder}/sft") if args.policy else None
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/sft")
    rows = rloo.prepare_rows(rloo.load_rows(folder, "train")[: args.num_prompts], tokenizer, 512, folder)
    sampling = {"response_length": 53, "stop_ids": [tokenizer.eos_token_id]}
    return policy, reference, tokenizer, rows, sampling


def judge_scores(tokenizer, batch) -> dict[str, torch.Tensor]:
    """gold: the judge's score; win: 1 where it is above that of the row's reference summary, else 0; both (k, b)."""
    facts, references = ([row["columns"][name] for row in batch.rows] for name in ("facts", "completion"))
    k = len(batch.responses)
    gold = torch.tensor(gold_judge(None, rloo.completion_texts(batch, tokenizer), facts=facts * k)).view(k, -1)
    return {"gold": gold, "win": (gold > torch.tensor(gold_judge(None, references, facts=facts))).float()}


def measure_model(args: Args) -> dict:
    """The same by samples, on the embedded policy with the gold judge.

    16 completions of each of thousands of prompts are sampled once. The gradient ∇ log π of each is computed and kept
    as a sketch (see Sketch): what is asked for are inner products of gradients alone, which a sketch keeps, of all
    weights alike; the last layer, say, would be a choice. At ratio 1 every estimate is their sum, weighted by
    advantages. So all estimators and all k use the same completions, each in exactly one update, and all updates have
    equally many completions (with k = 2, 64 prompts of an update of 128; with k = 16, 8 prompts). Unlike in the exact
    part prompts are sampled as well, and their variance is part of an update's.

    The target g* is the long-run mean gradient of rloo with k = 16, which is unbiased. What is compared with it comes
    from other prompts: prompts stand in blocks, and only products across blocks are used, so that noise which two sides
    share does not look like agreement (a cosine can exceed 1 by its error). Standard errors: jackknife over blocks."""
    torch.manual_seed(args.seed)
    policy, reference, tokenizer, rows, sampling = load(args)
    block = args.update // min(KS)  # prompts
    blocks = len(rows) // block
    require(blocks >= 3, f"--num_prompts {args.num_prompts}: at least {3 * block}, 3 blocks of --update / 2 prompts")
    weights = sum(x.numel() for x in policy.parameters())
    sketch, check = Sketch(weights, args.sketch, args.seed), {}
    gradients = {(judged, estimator, k): [] for judged in JUDGED for estimator in ESTIMATORS for k in KS}
    scores_seen, kl_seen, lengths = {judged: [] for judged in JUDGED}, [], []
    begin = time.perf_counter()
    for b in tqdm(range(blocks), unit="block"):
        if b >= 3 and time.perf_counter() - begin > 60 * args.minutes:
            blocks, args.num_prompts = b, b * block
            break
        policy.set_attn_implementation("sdpa")
        batch, logprobs = rloo.rollout(
            policy, rows[b * block : (b + 1) * block], K_MAX, args.temperature, **sampling, chunk_size=256
        )
        ref_logprobs, mask = logprobs, batch.response_mask
        if reference is not None:
            with torch.no_grad():
                ref_logprobs = torch.cat(
                    [rloo.completion_logprobs(reference, part, args.temperature)[0] for part in batch.chunks(256)],
                    dim=1,
                )
        kl, scores = (logprobs - ref_logprobs) * mask, judge_scores(tokenizer, batch)
        policy.set_attn_implementation("eager")  # whose gradients vmap knows
        sketches = []
        for i in range(block):
            found = completion_gradients(policy, batch.prompts(torch.tensor([i])), args.temperature)
            sketches.append(sketch(found))
            if b == 0 and i < 4:
                check[i] = compare_sketch(found, sketches[-1], scores["gold"][:, i : i + 1])
        sketches = torch.stack(sketches, dim=1)  # (16, block, 2 · sketch)
        for (judged, estimator, k), kept in gradients.items():
            kept.append(update_gradients(scores[judged], kl, sketches, k, estimator, args.kl_coef, args.update))
        for judged in JUDGED:
            scores_seen[judged].append(scores[judged])
        kl_seen.append(kl.sum(-1))
        lengths.append(mask.sum(-1).float())
    tables = {}
    for judged in JUDGED:
        stacked = {key[1:]: torch.stack(x).double() for key, x in gradients.items() if key[0] == judged}
        whole, first, second = (
            table_of(stacked, part) for part in (slice(None), slice(args.sketch), slice(args.sketch, None))
        )
        tables[judged] = []
        for (estimator, k), columns in whole.items():
            row = {"estimator": estimator, "k": k}
            for name, (value, error) in columns.items():
                row |= {name: value, f"{name}_stderr": error}
                row |= {f"{name}_by_sketch_{i}": part[estimator, k][name][0] for i, part in ((1, first), (2, second))}
            tables[judged].append(row)
    return {
        "prompts": blocks * block,
        "blocks": blocks,
        "completions": blocks * block * K_MAX,
        "updates": blocks * block * K_MAX // args.update,
        "weights": weights,
        "sketch_check": list(check.values()),
        "mean_score": {judged: torch.cat(x, 1).mean().item() for judged, x in scores_seen.items()},
        "std_within_prompt": {judged: torch.cat(x, 1).std(0).mean().item() for judged, x in scores_seen.items()},
        "std_between_prompts": {judged: torch.cat(x, 1).mean(0).std().item() for judged, x in scores_seen.items()},
        "kl": torch.cat(kl_seen, 1).mean().item(),
        "mean_length": torch.cat(lengths, 1).mean().item(),
        "tables": tables,
    }


def table_of(gradients: dict[tuple[str, int], torch.Tensor], part: slice):
    """The table from a part of the sketch; gradients (estimator, k) -> (blocks, updates, m)."""
    scale = math.sqrt(2) if part != slice(None) else 1.0
    some = {key: x[..., part] * scale for key, x in gradients.items()}
    target = some["rloo", K_MAX].mean(1)
    return with_errors({key: products(x, target) for key, x in some.items()})


def compare_sketch(gradients: torch.Tensor, sketched: torch.Tensor, scores: torch.Tensor) -> dict[str, float]:
    """A prompt's 16 gradients and their sketches: |g|² of the estimate by the sketch over the exact one."""
    found = {}
    for estimator in ("rloo", "grpo"):
        A = rloo.advantage(scores, estimator)
        exact, short = ((A.T @ x).square().sum().item() for x in (gradients, sketched))
        found[estimator] = short / exact if exact else math.nan
    norms = gradients.norm(dim=1)
    error = (sketched @ sketched.T - gradients @ gradients.T) / (norms[:, None] * norms)
    found["rms_error_of_cosines"] = error.square().mean().sqrt().item()
    return found


SHOWN = {
    "cosine_of_mean": "cosine of mean",
    "cosine_of_update": "of an update",
    "variance": "variance/rloo's",
    "noise": "noise",
    "relative_noise": "noise/rloo's",
}


def model_table(result: dict) -> str:
    lines = []
    for judged, rows in result["tables"].items():
        lines.append(
            f"\nreward: {judged} (mean {result['mean_score'][judged]:.3f}, standard deviation within a prompt "
            f"{result['std_within_prompt'][judged]:.2f}, between prompts' means "
            f"{result['std_between_prompts'][judged]:.2f})\n{'':10}{'k':>4}"
            + "".join(f"{title:>18}" for title in SHOWN.values())
        )
        for row in rows:
            cells = (f"{row[name]:.3f} ± {row[name + '_stderr']:.3f}" for name in SHOWN)
            lines.append(f"{row['estimator']:10}{row['k']:4}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def compared(row: dict) -> str:
    """A ratio of noise, with what can be said of it at two standard errors."""
    value, error = row["relative_noise"], row["relative_noise_stderr"]
    verdict = "not told apart" if abs(value - 1) <= 2 * error else "less" if value < 1 else "more"
    return f"{value:.3f} ± {error:.3f} ({verdict})"


def model_words(result: dict) -> str:
    lines = []
    for judged, rows in result["tables"].items():
        table = {(row["estimator"], row["k"]): row for row in rows}
        lines.append(f"reward {judged}, noise over RLOO's at the same k and completions:")
        for k in KS:
            grpo, reinforce = (table[name, k] for name in ("grpo", "reinforce"))
            lines.append(
                f"- k = {k}: grpo {compared(grpo)}, cosine of its mean {grpo['cosine_of_mean']:.4f} ± "
                f"{grpo['cosine_of_mean_stderr']:.4f}; reinforce {compared(reinforce)}"
            )
        best = max(rows, key=lambda row: row["cosine_of_update"])
        own = [table["rloo", k] for k in KS]
        noise = ", ".join(f"k = {row['k']} {row['noise']:.2f} ± {row['noise_stderr']:.2f}" for row in own)
        lines.append(
            f"- RLOO's own noise at equal completions: {noise}. The highest cosine of an update with "
            f"g* is that of {best['estimator']}, k = {best['k']}: {best['cosine_of_update']:.3f} ± "
            f"{best['cosine_of_update_stderr']:.3f}."
        )
    shifts = sorted(
        abs(row["relative_noise_by_sketch_1"] - row["relative_noise_by_sketch_2"])
        for rows in result["tables"].values()
        for row in rows
        if row["estimator"] in ("grpo", "reinforce")
    )
    checks = [x for row in result["sketch_check"] for x in (row["rloo"], row["grpo"]) if not math.isnan(x)]
    lines.append(
        f"The sketch: |g|² of {len(checks)} estimates is {min(checks):.2f} to {max(checks):.2f} of the exact "
        f"one; these ratios of noise by two independent sketches differ by {shifts[len(shifts) // 2]:.3f} in "
        f"the median, {shifts[-1]:.3f} at most."
    )
    return "\n".join(lines)


def draw_model(result: dict, pyplot):
    """Over k: the noise of an update, a panel per reward. Dr. GRPO's is RLOO's: only their scale differs."""
    titles = {"gold": "reward: the gold score", "win": "reward: 1 where the summary beats the reference, else 0"}
    figure, axes = pyplot.subplots(1, len(JUDGED), figsize=(11, 4.4), layout="constrained")
    for (judged, rows), panel in zip(result["tables"].items(), axes):
        for i, estimator in enumerate(name for name in ESTIMATORS if name != "drgrpo"):
            some = [row for row in rows if row["estimator"] == estimator]
            panel.errorbar(
                [row["k"] * 1.03 ** (i - 1) for row in some],
                [row["noise"] for row in some],
                [row["noise_stderr"] for row in some],
                marker="o",
                markersize=4,
                capsize=2,
                label=estimator,
            )
        panel.set_xscale("log", base=2)
        panel.set_xticks(KS, KS)
        panel.set_ylim(bottom=0)
        panel.set_title(titles[judged], fontsize=10)
        panel.set_xlabel(f"k: completions per prompt, {result['update']} completions per update")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    axes[0].set_ylabel("noise of one update's gradient:\nvariance / (its mean along the true gradient)²")
    axes[0].legend(frameon=False, loc="lower right")
    figure.suptitle(
        f"The embedded policy: {result['prompts']:,} prompts × {K_MAX} completions; bars: ± standard error", fontsize=11
    )


def run_model(args: Args):
    args.kl_coef = 0.05 if args.kl_coef is None else args.kl_coef
    require(args.update >= K_MAX and args.update % K_MAX == 0, f"--update {args.update}: must be a multiple of {K_MAX}")
    require(args.sketch > 0, f"--sketch {args.sketch}: must be positive")
    start = time.perf_counter()
    measured = measure_model(args)
    result = {"command": command(args), "kl_coef": args.kl_coef, "update": args.update} | measured
    result["seconds"] = time.perf_counter() - start
    words = model_words(result)
    result["words"] = words.splitlines()
    print(
        f"{args.policy or 'the embedded policy'}, gold judge: {result['prompts']:,} prompts, "
        f"{result['completions']:,} completions (mean length {result['mean_length']:.1f}), KL {result['kl']:.3f} nats"
        f".\nEvery line: {result['updates']} updates of {args.update} completions; ± standard error over "
        f"{result['blocks']} blocks of prompts.\nCosines with g*, the long-run mean of rloo, k = {K_MAX}: of E g and "
        f"of one update's g. noise: variance / (part of E g along g*)²\n{model_table(result)}\n\n{words}\n\n"
        f"{result['seconds']:.0f} s"
    )
    save(result, args.output, lambda pyplot: draw_model(result, pyplot))


def main(args: Args):
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    args.output = args.output or str(Path(__file__).parent / ("embedded_policy.json" if args.model else "exact.json"))
    require(args.output.endswith(".json"), f"--output {args.output}: must end in .json")
    if args.redraw:
        redraw(Path(args.output))
        return
    for name, least in (("seeds", 1), ("vocab_size", 2), ("response_length", 1), ("threads", 1)):
        require(getattr(args, name) >= least, f"--{name} {getattr(args, name)}: must be at least {least}")
    require(args.rloo_k and min(args.rloo_k) >= 2, f"--rloo_k {args.rloo_k}: must be at least 2")
    (run_model if args.model else run_exactly)(args)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, use_underscores=True))
    except (InputError, rloo.InputError) as error:
        sys.exit(f"estimators.py: {error}")
