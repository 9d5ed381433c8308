"""Is each option's gradient right, and how noisy? Exactly, for language models so tiny that all updates can be listed.

    python benchmark/gradient.py                       # prints the table of gradient.md: 15 seconds
    python benchmark/gradient.py --picture plot.png    # draws it too; needs matplotlib

The policy has a vocabulary of 3 (token 0 stops), at most 2 tokens per completion and 15 parameters: a row of logits per
prompt and one per previous token. An update is 2 prompts with k completions each. Its estimate g comes from the
functions of rloo.py and grpo.py, in one step at ratio 1, in float64. g* is the gradient of E[score - β KL(π ‖ π_ref)].
Means and variances are sums over all updates, weighted by their probability.

bias   |E g - g*| / |g*|: a wrong scale counts as well as a wrong direction
noise  variance of g / (part of E g along g*)², relative to rloo.py's defaults; left out where E g is against g*
"""

import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest import mock

import runs
import torch
import tyro

import rloo

unchanged = dict(vars(rloo))
sys.path.insert(0, str(runs.HERE))
from extensions import correction, grpo  # noqa: E402

vars(rloo).update(unchanged)  # importing the extensions has replaced them; below, their functions are called by name

SEEDS, KS = range(1, 6), (2, 3)  # models, each with rewards of its own; completions per prompt
B, V, T, BETA = 2, 3, 2, 0.3
AWAY = 0.5  # nats from the reference of the policies that are not at it


@dataclass(frozen=True)
class Option:
    """What differs from rloo.py's defaults."""

    kl: str = "k1"  # the estimator of the KL in the reward: k1, k3 or none
    baseline: bool = True
    token_level_kl: bool = False
    grpo: dict | None = None  # flags of grpo.py, whose functions take the place of rloo.py's
    kl_in_loss: bool = False
    noise: float = 0.0  # on the logits of the sampler
    correction: str = "off"  # by correction.py, with its cap of 2


SUMS = {"baseline": "rloo", "loss_mean": "completions"}  # flags by which grpo.py has RLOO's advantages and loss
OPTIONS = {
    "rloo.py (the defaults)": Option(),
    "no baseline": Option(baseline=False),
    "token_level_kl": Option(token_level_kl=True),
    "Dr. GRPO's baseline": Option(grpo=SUMS | {"baseline": "group"}),
    "GRPO's baseline": Option(grpo=SUMS | {"baseline": "grpo"}),
    "GRPO's mean over tokens": Option(grpo=SUMS | {"loss_mean": "tokens-then-completions"}),
    "k3 in the loss": Option("none", grpo=SUMS, kl_in_loss=True),
    "k3 in the loss, unbiased_kl": Option("none", grpo=SUMS | {"unbiased_kl": True}, kl_in_loss=True),
    "k3 in the reward": Option("k3"),
    "k3 in reward and loss": Option("k3", grpo=SUMS, kl_in_loss=True),
    "GRPO": Option("none", grpo={}, kl_in_loss=True),
    "sampler's logits off by 0.3": Option(noise=0.3),
    "..., correction.py truncate": Option(noise=0.3, correction="truncate"),
    "..., correction.py mask": Option(noise=0.3, correction="mask"),
    "..., truncate, token_level_kl": Option(noise=0.3, correction="truncate", token_level_kl=True),
}


# ---- A tiny language model, everything that it can say, and all updates ----------------------------------------------

CUT = {ids[: ids.index(0) + 1] if 0 in ids else ids for ids in itertools.product(range(V), repeat=T)}
TOKENS, MASK = rloo.pad([list(ids) for ids in sorted(CUT)])  # (n, T): every completion
PROMPTS = torch.arange(B)


def logprobs_of(theta):
    """Returns log-probs (B, n, T) of the tokens of all completions, 0 where masked, for parameters (d,)."""
    of_prompt, of_previous = theta[: B * V].view(B, 1, 1, V), theta[B * V :].view(V, V)
    previous = torch.cat([torch.zeros_like(TOKENS[:, :1]), TOKENS[:, :-1]], dim=1)
    logprobs = torch.log_softmax(of_prompt + of_previous[previous], dim=-1)  # (B, n, T, V)
    return torch.where(MASK, logprobs.gather(-1, TOKENS.expand(B, -1, -1)[..., None]).squeeze(-1), 0.0)


def objective(theta, ref, scores, beta):
    """Returns E[score - β KL] and the KL, means over prompts."""
    logprobs = logprobs_of(theta).sum(-1)
    kl = logprobs - ref.sum(-1)
    return (logprobs.exp() * (scores - beta * kl)).sum(-1).mean(), (logprobs.exp() * kl).sum(-1).mean()


@dataclass
class Case:
    """A policy, its reference, and the scores of all completions of both prompts."""

    theta: torch.Tensor  # (d,)
    ref: torch.Tensor  # (B, n, T)
    scores: torch.Tensor  # (B, n)
    seed: int
    moments: dict = field(default_factory=dict)  # k -> those of rloo.py's defaults

    def __post_init__(self):
        grad = torch.autograd.functional.jacobian
        self.logprobs, self.jacobian = logprobs_of(self.theta), grad(logprobs_of, self.theta)
        self.exact = grad(lambda x: objective(x, self.ref, self.scores, BETA)[0], self.theta)  # g*

    def sampler(self, noise: float):
        generator = torch.Generator().manual_seed(self.seed)
        moved = torch.randn(len(self.theta), generator=generator, dtype=torch.float64) * noise / math.sqrt(2)
        return logprobs_of(self.theta + moved)  # a logit is a sum of two


def cases(away: bool):
    """Yields for each seed rewards that are normal, sparse (1 for 2 completions of a prompt), or normal but large."""
    for seed, kind in itertools.product(SEEDS, ("dense", "sparse", "large mean")):
        theta, dense = (
            torch.randn(*size, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
            for size, s in (((B * V + V * V,), seed), ((B, len(TOKENS)), seed + 1000))
        )
        scores = dense + 10 * (kind == "large mean")
        if kind == "sparse":
            scores = (dense >= dense.topk(2, dim=-1).values[:, -1:]).double()
        ref = logprobs_of(theta)
        while away and objective(theta, ref, scores, 0.0)[1] < AWAY:  # by exact gradient ascent on the score
            (step,) = torch.autograd.grad(objective(theta.requires_grad_(), ref, scores, 0.0)[0], theta)
            theta = (theta + 0.02 * step / step.norm()).detach()
        yield Case(theta.detach(), ref, scores, seed)


def all_updates(k: int):
    """Returns the completions of each update, (k, U, B), and the number of orders in which they can be drawn, (U,)."""
    groups = list(itertools.combinations_with_replacement(range(len(TOKENS)), k))
    orders = [math.factorial(k) // math.prod(math.factorial(m) for m in Counter(group).values()) for group in groups]
    pairs = torch.cartesian_prod(*[torch.arange(len(groups))] * B)  # (U, B)
    return torch.tensor(groups)[pairs].permute(2, 0, 1), torch.tensor(orders, dtype=torch.float64)[pairs].prod(-1)


UPDATES = {k: all_updates(k) for k in KS}


# ---- What the functions of rloo.py make of an update -----------------------------------------------------------------


def estimates(case: Case, sampler, index, option: Option):
    """Returns g (U, d) of updates `index` (k, U, B), which form one batch of U·B prompts."""
    k, U, _ = index.shape
    of_completions = (case.logprobs, sampler, case.ref, case.scores, MASK.expand(B, -1, -1))
    old, sampled, ref, scores, mask = (x[PROMPTS, index].flatten(1, 2) for x in of_completions)  # (k, U·B, ...)
    corrected = option.correction != "off"
    kl = ((old if corrected else sampled) - ref) * mask
    kl = torch.expm1(-kl) + kl if option.kl == "k3" else kl
    beta = 0.0 if option.kl == "none" else BETA
    args = rloo.Args(kl_coef=beta, token_level_kl=option.token_level_kl, cliprange_high=0.2)
    ended = mask.any(-1)
    new = old.clone().requires_grad_()
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # to which they round
        functions, baseline = rloo, rloo.advantage
        rewards = rloo.rewards_of(args, scores, ended, kl)
        if option.grpo is not None:
            functions = grpo
            args = grpo.Args(**option.grpo, kl_coef=BETA if option.kl_in_loss else 0.0, cliprange_high=0.2)
            baseline = grpo.BASELINES[args.baseline]
        advantages = baseline(rewards) if option.baseline else rewards
        advantages = functions.advantages_for_loss(args, advantages, ended, mask)
        if corrected:
            per_token = option.token_level_kl
            advantages = advantages * correction.importance_weight(
                old, sampled, mask, option.correction, 2.0, per_token
            )
        batch = SimpleNamespace(policy_mask=mask, ended=ended)
        experience = {"batch": batch, "scores": scores, "rewards": rewards, "advantages": advantages}
        experience = SimpleNamespace(**experience, ref_logprobs=ref)
        losses, *_ = functions.completion_loss(args, experience, slice(None), new, old, None)
    (slope,) = torch.autograd.grad(losses.sum() / (k * B), new)
    return -torch.einsum("jnbt,jnbtd->nd", slope.view(k, U, B, -1), case.jacobian[PROMPTS, index])


def moments(case: Case, k: int, option: Option):
    """Returns E g (d,) and the trace of the covariance of g."""
    (index, orders), sampler = UPDATES[k], case.sampler(option.noise)
    weight = orders * sampler.sum(-1).exp()[PROMPTS, index].prod(0).prod(-1)
    g = estimates(case, sampler, index, option)
    mean = weight @ g
    return mean, (weight @ (g - mean).square().sum(-1)).item()


def bias_and_noise(case: Case, k: int, option: Option) -> tuple[float, float]:
    def noise(mean, variance):
        along = (mean @ case.exact / case.exact.norm()).item()
        return variance / along**2 if along > 0 else math.nan

    if k not in case.moments:
        case.moments[k] = moments(case, k, Option())
    mean, variance = moments(case, k, option)
    return ((mean - case.exact).norm() / case.exact.norm()).item(), noise(mean, variance) / noise(*case.moments[k])


def draw(found: dict, file: Path):
    """Draws bias and noise of every option: range and median over all cases."""
    import plot

    figure, (panels,) = plot.canvas(1, 2, height=6, sharey=True)
    figure.set_size_inches(11, 6)
    for panel, kind in zip(panels, ("bias", "noise")):
        for number, where in enumerate(next(iter(found.values()))):
            values = [of[where][kind] for of in found.values()]
            places = [place + 0.32 * number - 0.16 for place in range(len(found))]
            style = {"color": ("tab:blue", "tab:orange")[number]}
            panel.hlines(places, [*map(min, values)], [*map(max, values)], **style, lw=2, label=f"policy {where}")
            panel.plot([*map(median, values)], places, "o", **style, ms=5)
        panel.axvline(kind == "noise", color="black", lw=0.8)
    panels[0].set(xlabel="bias: |E g - g*| / |g*|", yticks=range(len(found)), yticklabels=list(found))
    panels[0].invert_yaxis()
    panels[1].set(xscale="log", xlabel="noise: variance of g / (part of E g along g*)²,\nrelative to the defaults")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    title = "Gradient estimates on a tiny language model. g: estimate from one update; E g: its mean over all updates;"
    figure.suptitle(f"{title}\ng*: true gradient. Line: range over all cases; point: median", fontsize=10)
    plot.save(figure, file)


def main(picture: Path | None = None):
    """Prints bias and noise of every option, over all cases; draws them into `picture`."""
    away = f"{AWAY} nats away"
    policies = {"at the reference": list(cases(away=False)), away: list(cases(away=True))}
    found = {name: {} for name in OPTIONS}  # option -> policy -> bias and noise -> values of all cases
    for name, option in OPTIONS.items():
        for where, some in policies.items():
            bias, noise = zip(*(bias_and_noise(case, k, option) for case in some for k in KS))
            found[name][where] = {"bias": bias, "noise": [x for x in noise if not math.isnan(x)]}
    rows = [["", *(f"bias {where}" for where in policies), f"noise {away}: least, median, most"]]
    for name, of in found.items():
        biases = [of[where]["bias"] for where in policies]
        cells = ["0" if max(bias) < 1e-10 else f"{median(bias):.2g} ({max(bias):.2f})" for bias in biases]
        noise = of[away]["noise"]
        rows.append([name, *cells, f"{min(noise):.2f}, {median(noise):.2f}, {max(noise):.2f}"])
    print(runs.markdown(rows))
    if picture:
        draw(found, picture)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.cli(main)
