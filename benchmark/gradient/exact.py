"""How good are the gradient estimates of rloo.py's options, and what if the sampler is not the policy? Exactly.

    python benchmark/gradient/exact.py             # measures, writes exact.json, tables and picture: two minutes
    python benchmark/gradient/exact.py --report    # tables and picture again, from exact.json

The policy is a language model with a vocabulary of 3 (token 0 stops), at most 2 tokens per completion and 15
parameters: a row of logits per prompt and one per previous token. An update is 2 prompts with k completions each. There
are 7 completions of a prompt, so all updates, with their probability, can be listed; a mean or a variance is a sum over
them, in float64, without sampling. The estimate g of an update is what rloo.py's own functions make of it
(shape_scores, rlhf_reward, advantage, policy_loss at ratio 1, kl_penalty, loss_weight, rollout_weight). g* is the
gradient of E[score - β KL(π ‖ π_ref)], the mean over both prompts. For every option:

    bias      |E g - g*| / |g*|: a wrong scale counts as well as a wrong direction
    cosine    of E g with g*: 1 where the direction is right, whatever the scale
    variance  the trace of g's covariance, relative to that of rloo.py's defaults at the same k
    noise     variance / (the part of E g along g*)², relative to the same; none where that part is against g*. It does
              not depend on the scale of g, which a learning rate undoes

Prompts are fixed here, so all variance is that of the completions. Options that look at the whole update (reinforce,
normalize_*, loss_aggregation=token) see 2 prompts, not the hundred of a real update: their bias is larger here.

Three parts. options: a result for each model, reward, place of the policy, k and option. kl: the KL alone, score 0.
samplers: another distribution draws all updates, see `differing`, and rollout_weight gets both log-probs.
"""

import itertools
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import tyro

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "study")]

import rloo  # noqa: E402

RECORDS = HERE / "exact.json"
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


def token_logprobs(theta: torch.Tensor, top_p: float = 1.0) -> torch.Tensor:
    """Log-probs (B, n, R) of the tokens of all completions, 0 where masked. A token's logits are a row for the prompt
    plus a row for the token before; theta is flat. Nothing follows a stop token, so its row is that of the beginning.

    With top_p, of the softmax that is cut to the fewest likeliest tokens that reach it, as samplers do it; -inf for a
    token that is cut."""
    of_prompt, of_previous = theta[: B * V].view(B, 1, 1, V), theta[B * V :].view(V, V)
    previous = torch.cat([torch.zeros_like(TOKENS[:, :1]), TOKENS[:, :-1]], dim=1)
    logprobs = torch.log_softmax(of_prompt + of_previous[previous], dim=-1)  # (B, n, R, V)
    if top_p < 1:
        ordered, order = logprobs.exp().sort(dim=-1, descending=True)
        kept = torch.zeros_like(logprobs).scatter(-1, order, (ordered.cumsum(-1) - ordered < top_p).double()) > 0
        logprobs = torch.log_softmax(logprobs.masked_fill(~kept, -math.inf), dim=-1)
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
    kl_level: str = "sequence"
    loss_aggregation: str = "sequence"
    normalize_advantage: bool = False
    normalize_reward: bool = False
    reward_clip_range: float | None = None
    baseline: bool = True  # without it the advantage is the reward itself
    rollout_correction: str = "off"
    rollout_correction_cap: float = 2.0
    token_ratio: bool = False  # one ratio per token even where nothing else is per token

    @property
    def level(self) -> str:
        per_token = self.token_ratio or not self.kl_level == self.loss_aggregation == "sequence"
        return "token" if per_token else "sequence"

    @property
    def mixes_prompts(self) -> bool:
        normalizes = self.normalize_advantage or self.normalize_reward
        return normalizes or self.advantage_estimator == "reinforce" or self.loss_aggregation == "token"


OPTIONS = {
    "rloo (the defaults)": Option(),
    "grpo": Option("grpo"),
    "grpo, k3 in loss, sequence-mean": Option("grpo", "k3 in loss", loss_aggregation="sequence-mean"),
    "drgrpo": Option("drgrpo"),
    "reinforce": Option("reinforce"),
    "no baseline": Option(baseline=False),
    "kl_level token": Option(kl_level="token"),
    "k3 in the reward": Option(kl="k3 in reward"),
    "k3 in the loss": Option(kl="k3 in loss"),
    "k3 in both": Option(kl="k3 in both"),
    "no KL": Option(kl="none"),
    "normalize_advantage": Option(normalize_advantage=True),
    "normalize_reward": Option(normalize_reward=True),
    "reward_clip_range 1": Option(reward_clip_range=1.0),
    "loss_aggregation token": Option(loss_aggregation="token"),
    "loss_aggregation sequence-mean": Option(loss_aggregation="sequence-mean"),
}


def advantages_and_weights(scores, kl, k3, mask, option: Option, kl_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages (k, B, 1 or R) and weights (k, B) of an update, by rloo.py's functions in the order of `update`;
    scores, k3 (k, B), kl, mask (k, B, R)."""
    ended = torch.ones_like(scores, dtype=torch.bool)
    scores = rloo.shape_scores(scores, ended, None, option.normalize_reward, option.reward_clip_range)
    if option.kl in ("k3 in reward", "k3 in both"):
        scores = scores - kl_coef * k3
    rewards = rloo.rlhf_reward(scores, kl, kl_coef if option.kl == "k1 in reward" else 0.0, option.kl_level)
    weights = rloo.loss_weight(mask.sum(-1), ended, option.loss_aggregation)
    if not option.baseline:
        return rewards[..., None], weights
    advantages = rloo.advantage(rewards, option.advantage_estimator).view(*scores.shape, -1)
    counts = mask[..., : advantages.shape[-1]] & ~advantages.isnan()
    if option.normalize_advantage:
        advantages = rloo.standardize(advantages, counts)
    return advantages.masked_fill(~counts, 0.0), weights


def estimates(case: Case, index: torch.Tensor, option: Option, sampler: torch.Tensor | None = None) -> torch.Tensor:
    """g (U, d) of the updates `index` (k, U, B): minus the gradient of the loss that training would step along.

    `sampler` (B, n, R) are the log-probs under what sampled the completions, if that was not the policy. As in
    `update`, the KL is then the sampler's from the reference, but with a rollout_correction the policy's.

    rloo.py's loss is differentiated by the tokens' log-probs, and those by the parameters. Where an option looks at the
    whole update, its functions are called once per update; else all updates are one batch of U·B prompts."""
    k, U, _ = index.shape
    prompts = torch.arange(B)
    sampler = case.logprobs if sampler is None else sampler
    new, sampled, ref, scores, mask = (
        x[prompts, index].flatten(1, 2)
        for x in (case.logprobs, sampler, case.ref_logprobs, case.scores, MASK.expand(B, -1, -1))
    )  # (k, U·B, ...)
    correction, _ = rloo.rollout_weight(
        new, sampled, mask, option.rollout_correction, option.rollout_correction_cap, option.level
    )
    of_kl = sampled if option.rollout_correction == "off" else new
    kl, k3 = (of_kl - ref) * mask, rloo.kl_penalty(of_kl, ref, mask)
    parts = [slice(i, i + B) for i in range(0, U * B, B)] if option.mixes_prompts else [slice(None)]
    found = [
        advantages_and_weights(scores[:, part], kl[:, part], k3[:, part], mask[:, part], option, case.kl_coef)
        for part in parts
    ]
    advantages, weight = (torch.cat(x, dim=1) for x in zip(*found))
    old, new = new, new.clone().requires_grad_()
    losses, _, _ = rloo.policy_loss(new, old, advantages, mask, 0.2, 0.2, option.level, correction)
    if option.kl in ("k3 in loss", "k3 in both"):
        losses = losses + case.kl_coef * rloo.kl_penalty(new, ref, mask)
    (slope,) = torch.autograd.grad((losses * weight).sum() / (k * B), new)  # an update's loss: the mean of its k·B
    return -torch.einsum("jnbt,jnbtd->nd", slope.view(k, U, B, -1), case.jacobian[prompts, index])


def moments(case: Case, k: int, option: Option, sampler: torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
    """E g (d,) and the trace of g's covariance, over all updates. What samples them is the policy, or another
    distribution, `sampler`: its log-probs (B, n, R), which are then known in training as well."""
    index, orders = UPDATES[k]
    drawn = case.logprobs if sampler is None else sampler
    weight = orders * drawn.sum(-1).exp()[torch.arange(B), index].prod(0).prod(-1)
    assert abs(weight.sum().item() - 1) < 1e-9, "the probabilities of all updates do not add up to 1"
    possible = weight > 0  # what a sampler cannot draw has no log-prob
    index, weight = index[:, possible], weight[possible]
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


def cases(seeds, rewards) -> Iterator[tuple[dict, Case]]:
    """Policies at and away from their reference: what they are, and the case."""
    for seed, reward, position in itertools.product(seeds, rewards, POSITIONS):
        reference, scores = make_reference(seed), make_scores(reward, seed)
        theta = reference if position == POSITIONS[0] else move_away(reference, scores, AWAY)
        yield {"seed": seed, "reward": reward, "position": position}, make_case(theta, reference, scores)


def measure_options(seeds) -> list[dict]:
    """Options that look at the whole update are measured with k = 2 alone but for the first seed: they take their
    time."""
    found = []
    for (said, case), k in itertools.product(cases(seeds, REWARDS), KS):
        base = moments(case, k, Option())
        row = said | {"k": k, "found": {}}
        for name, option in OPTIONS.items():
            if not (option.mixes_prompts and said["seed"] > seeds[0] and k > KS[0]):
                row["found"][name] = judge(case.exact, *moments(case, k, option), base)
        found.append(row)
    return found


DISTANCES = (0.01, 1.0)
PLACES = {
    "k1 in the reward (the default)": Option(),
    "k1 per token (`--kl_level token`)": Option(kl_level="token"),
    "k3 in the reward": Option(kl="k3 in reward"),
    "k3 in the loss (`--no_kl_in_reward`)": Option(kl="k3 in loss"),
    "k3 in both": Option(kl="k3 in both"),
}


def measure_kl(seeds) -> list[dict]:
    """The KL alone: score 0, β = 1, k = 2, so that g* = -∇KL. For policies at two distances from the reference, on the
    way of ascent on the dense reward. Variance and noise are relative to k1 in the reward."""
    found = []
    for seed, distance in itertools.product(seeds, DISTANCES):
        reference = make_reference(seed)
        theta = move_away(reference, make_scores("dense", seed), distance)
        case = make_case(theta, reference, torch.zeros(B, N, dtype=torch.float64), 1.0)
        base = moments(case, 2, Option())
        places = {name: judge(case.exact, *moments(case, 2, option), base) for name, option in PLACES.items()}
        found.append({"seed": seed, "distance": distance, "found": places})
    return found


CORRECTIONS = {
    "off": Option(),
    "truncate, sequence": Option(rollout_correction="truncate"),
    "mask, sequence": Option(rollout_correction="mask"),
    "no cap, sequence": Option(rollout_correction="truncate", rollout_correction_cap=math.inf),
    "truncate, token": Option(rollout_correction="truncate", token_ratio=True),
}
SAMPLERS = {  # name -> kind and size, see `differing`
    "logits off by 0.02": ("logits", 0.02),
    "logits off by 0.3": ("logits", 0.3),
    "top-p 0.9": ("top-p", 0.9),
    "one update old, step 0.03": ("step", 0.03),
    "one update old, step 0.3": ("step", 0.3),
    "one update old, step 1": ("step", 1.0),
}


def differing(case: Case, kind: str, size: float, seed: int) -> tuple[Case, torch.Tensor]:
    """A policy, and the log-probs (B, n, R) of a sampler that differs from it.

    logits: normal noise with standard deviation `size` is on every logit of the sampler
    top-p: the sampler cuts its softmax to the fewest likeliest tokens that reach `size`; its log-probs are of these
    step: the sampler is the policy of `case`, and the policy what it becomes by a step of length `size` along the
        estimate that an update of 32 completions (4 groups of 4 for both prompts) gives; a clipped one has one length
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "top-p":
        return case, token_logprobs(case.theta, size)
    if kind == "logits":  # a logit is the sum of two numbers
        noise = torch.randn(len(case.theta), generator=generator, dtype=torch.float64) * size / math.sqrt(2)
        return case, token_logprobs(case.theta + noise)
    drawn = torch.multinomial(case.logprobs.sum(-1).exp(), 16, replacement=True, generator=generator)  # (B, 16)
    g = estimates(case, drawn.T.view(4, 4, B), Option()).mean(0)
    return make_case(case.theta + size * g / g.norm(), case.reference, case.scores, case.kl_coef), case.logprobs


def gap_of(case: Case, sampler: torch.Tensor) -> float:
    """The mean |log π - log μ| of a token that μ samples: what training logs as val/rollout_logprob_gap."""
    probability = sampler.sum(-1).exp()
    apart = (case.logprobs - sampler).masked_fill(probability[..., None] == 0, 0.0)
    return ((probability[..., None] * apart.abs()).sum() / (probability @ MASK.sum(-1).double()).sum()).item()


def measure_samplers(seeds) -> list[dict]:
    """A constant in the reward has no effect, so `large mean` is left out."""
    found = []
    for (said, start), (name, difference) in itertools.product(cases(seeds, REWARDS[:2]), SAMPLERS.items()):
        case, sampler = differing(start, *difference, said["seed"])
        gap = gap_of(case, sampler)
        for k in KS:
            base = moments(case, k, Option())  # sampled by the policy
            row = said | {"k": k, "sampler": name, "gap": round(gap, 5)}
            judged = {label: judge(case.exact, *moments(case, k, x, sampler), base) for label, x in CORRECTIONS.items()}
            found.append(row | {"found": judged})
    return found


# ---- Tables and picture ----------------------------------------------------------------------------------------------


def values(rows: list[dict], name: str, column: str, **where) -> list[float]:
    """A column of an option, of the rows for which `where` is true; without NaN."""
    kept = [row for row in rows if all(row[key] == x for key, x in where.items())]
    found = [row["found"][name][COLUMNS.index(column)] for row in kept if name in row["found"]]
    return [x for x in found if not math.isnan(x)]


def tidy(value: float) -> str:
    """Two decimals; 0 where there is only rounding."""
    if abs(value) < 1e-10:
        return "0"
    return f"{value:.2g}" if abs(value) < 0.01 else f"{value:.2f}"


def span(found: list[float]) -> str:
    """The smallest and the largest."""
    low, high = tidy(min(found)), tidy(max(found))
    return low if low == high else f"{low} to {high}"


def tables(result: dict) -> dict[str, str]:
    from study import markdown

    kl = [["place of the KL (score 0)", *(f"bias at KL {distance:g}" for distance in DISTANCES)]]
    for name in PLACES:
        kl.append([name, *(span(values(result["kl"], name, "bias", distance=x)) for x in DISTANCES)])
    shown = ("off", "truncate, sequence", "mask, sequence", "truncate, token")
    samplers = [["sampler", "gap", *shown]]
    for name in SAMPLERS:
        gap = median(row["gap"] for row in result["samplers"] if row["sampler"] == name)
        biases = [values(result["samplers"], label, "bias", sampler=name) for label in shown]
        samplers.append([name, f"{gap:.3f}", *(f"{tidy(median(x))} ({tidy(max(x))})" for x in biases)])
    return {"kl": markdown(kl), "samplers": markdown(samplers)}


def draw(result: dict):
    """Bias, direction and noise of every option: the range and the median over all cases, for both positions."""
    from study import BLUE, ORANGE, canvas, save

    figure, ((*panels,),) = canvas(3, 12, 6, sharey=True)
    lowest_bias = 1e-4
    for panel, column in zip(panels, ("bias", "cosine", "noise")):
        for offset, colour, position in ((-0.16, BLUE, POSITIONS[0]), (0.16, ORANGE, POSITIONS[1])):
            for place, name in enumerate(OPTIONS):
                found = values(result["options"], name, column, position=position)
                if column == "bias":
                    found = [max(x, lowest_bias) for x in found]
                label = f"policy {position}" if place == 0 else None
                panel.plot([min(found), max(found)], [place + offset] * 2, color=colour, lw=2, label=label)
                panel.plot(median(found), place + offset, "o", color=colour, ms=5)
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
    save(figure, HERE / "exact.png")


@dataclass
class Args:
    """Bias and variance of gradient estimates, exactly, on a tiny language model."""

    report: bool = False
    """only write the tables and the picture, from the numbers that are there"""


def main(args: Args):
    from study import insert

    torch.set_num_threads(1)
    if not args.report:
        parts = {"options": measure_options, "kl": measure_kl, "samplers": measure_samplers}
        lines = [
            f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in measure(SEEDS)) + "\n]"
            for name, measure in parts.items()
        ]
        said = json.dumps({"command": "python benchmark/gradient/exact.py", "columns": COLUMNS})
        RECORDS.write_text(said[:-1] + ",\n" + ",\n".join(lines) + "\n}\n")
    result = json.loads(RECORDS.read_text())
    insert(HERE / "README.md", tables(result))
    draw(result)


if __name__ == "__main__":
    main(tyro.cli(Args))
