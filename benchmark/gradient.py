"""Is each option's gradient right, and how noisy? Exactly, for language models so tiny that all updates can be listed.

    python benchmark/gradient.py    # prints the table: a minute

The policy has a vocabulary of 3 (token 0 stops), at most 2 tokens per completion and 15 parameters: a row of logits per
prompt and one per previous token. An update is 2 prompts with k completions each. Its estimate g comes from the
functions of rloo.py and grpo.py, in one step at ratio 1, in float64. g* is the gradient of E[score - β KL(π ‖ π_ref)].
Means and variances are sums over all updates, weighted by their probability.

bias   |E g - g*| / |g*|: a wrong scale counts as well as a wrong direction
turn   the same after the best scale: the sine of the angle between E g and g*, 1 where E g is against g*
noise  variance of g / (part of E g along g*)², relative to rloo.py's; left out where E g is against g*
"""

import itertools
import math
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import runs
import torch

import rloo

with mock.patch.dict(vars(rloo)):  # importing an extension replaces functions of rloo.py
    from extensions import correction, grpo

    of_grpo = SimpleNamespace(**vars(rloo))

SEEDS, KS = range(1, 6), (2, 3)  # models, each with rewards of its own; completions per prompt
B, V, T = 2, 3, 2
BETAS = (0.02, 0.3)  # the default, and one with which the KL penalty counts
AWAY = 0.5  # nats from the reference, at least

SUMS = {"baseline": "rloo", "loss_mean": "completions"}  # flags by which grpo.py has RLOO's advantages and loss
OPTIONS = {  # name -> what differs from rloo.py's defaults, see `estimates`
    "rloo.py": {},
    "each g scaled to norm 1": {"norm_1": True},
    "no baseline": {"baseline": False},
    "token_level_kl": {"token_level_kl": True},
    "Dr. GRPO's baseline": {"flags": SUMS | {"baseline": "group"}},
    "GRPO's baseline": {"flags": SUMS | {"baseline": "grpo"}},
    "GRPO's mean over tokens": {"flags": SUMS | {"loss_mean": "tokens-then-completions"}},
    "k3 in the loss": {"kl": "none", "flags": SUMS, "kl_in_loss": True},
    "k3 in the loss, unbiased_kl": {"kl": "none", "flags": SUMS | {"unbiased_kl": True}, "kl_in_loss": True},
    "k3 in the reward": {"kl": "k3"},
    "k3 in reward and loss": {"kl": "k3", "flags": SUMS, "kl_in_loss": True},
    "GRPO": {"kl": "none", "flags": {}, "kl_in_loss": True},
    "sampler's logits off by 0.3": {"sampler": "off"},
    "..., correction.py truncate": {"sampler": "off", "correct": "truncate"},
    "..., correction.py mask": {"sampler": "off", "correct": "mask"},
    "..., truncate, token_level_kl": {"sampler": "off", "correct": "truncate", "token_level_kl": True},
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


def exact_gradient(theta, ref, scores, beta):
    return torch.autograd.functional.jacobian(lambda x: objective(x, ref, scores, beta)[0], theta)


def normal(*size: int, seed: int):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cases(beta: float):
    """Yields policies away from their references, each with scores. For each seed these are normal, sparse (1 for 2
    completions of a prompt), or normal but large."""
    for seed, kind in itertools.product(SEEDS, ("dense", "sparse", "large mean")):
        theta = normal(B * V + V * V, seed=seed)
        scores = normal(B, len(TOKENS), seed=seed + 1000)
        if kind == "sparse":
            scores = (scores >= scores.topk(2, dim=-1).values[:, -1:]).double()
        elif kind == "large mean":
            scores = scores + 10
        ref = logprobs_of(theta)
        while objective(theta, ref, scores, 0.0)[1] < AWAY:  # by exact gradient ascent on the score
            step = exact_gradient(theta, ref, scores, 0.0)
            theta = theta + 0.02 * step / step.norm()
        moved = theta + normal(len(theta), seed=seed) * 0.3 / math.sqrt(2)  # a logit is a sum of two
        yield SimpleNamespace(
            beta=beta,
            theta=theta,  # (d,)
            ref=ref,  # (B, n, T)
            scores=scores,  # (B, n)
            sampler={"policy": logprobs_of(theta), "off": logprobs_of(moved)},
            jacobian=torch.autograd.functional.jacobian(logprobs_of, theta),  # (B, n, T, d)
            exact=exact_gradient(theta, ref, scores, beta),  # g*
        )


def all_updates(k: int):
    """Returns the completions of each update, (k, U, B), and the number of orders in which they can be drawn, (U,)."""
    groups = list(itertools.combinations_with_replacement(range(len(TOKENS)), k))
    orders = [math.factorial(k) // math.prod(math.factorial(m) for m in Counter(group).values()) for group in groups]
    pairs = torch.cartesian_prod(*[torch.arange(len(groups))] * B)  # (U, B)
    return torch.tensor(groups)[pairs].permute(2, 0, 1), torch.tensor(orders, dtype=torch.float64)[pairs].prod(-1)


UPDATES = {k: all_updates(k) for k in KS}


# ---- What the functions of rloo.py make of an update -----------------------------------------------------------------


def estimates(
    case,
    index,
    kl="k1",
    baseline=True,
    token_level_kl=False,
    flags=None,
    kl_in_loss=False,
    sampler="policy",
    correct=None,
    norm_1=False,
):
    """Returns g (U, d) of updates `index` (k, U, B), which form one batch of U·B prompts.

    kl: the estimator of the KL in the reward, k1, k3 or none; flags: of grpo.py, whose functions then take the place of
    rloo.py's; kl_in_loss: its KL in the loss; correct: by correction.py, with its cap of 2; norm_1: scaled to norm 1,
    as --max_grad_norm does with larger ones.
    """
    k, U, _ = index.shape
    of_completions = (case.sampler["policy"], case.sampler[sampler], case.ref, case.scores, MASK.expand(B, -1, -1))
    old, sampled, ref, scores, mask = (x[PROMPTS, index].flatten(1, 2) for x in of_completions)  # (k, U·B, ...)
    in_reward = ((old if correct else sampled) - ref) * mask
    if kl == "k3":
        in_reward = torch.expm1(-in_reward) + in_reward
    args = rloo.Args(kl_coef=0.0 if kl == "none" else case.beta, token_level_kl=token_level_kl, cliprange_high=0.2)
    batch = SimpleNamespace(policy_mask=mask, ended=mask.any(-1))
    new = old.clone().requires_grad_()
    functions, centered = rloo, rloo.advantage
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # to which they round
        rewards = rloo.rewards_of(args, scores, batch.ended, in_reward)
        if flags is not None:
            functions, args = of_grpo, grpo.Args(**flags, kl_coef=case.beta if kl_in_loss else 0.0, cliprange_high=0.2)
            centered = grpo.BASELINES[args.baseline]
        advantages = centered(rewards) if baseline else rewards
        advantages = functions.advantages_for_loss(args, advantages, batch.ended, mask)
        if correct:
            advantages = advantages * correction.importance_weight(old, sampled, mask, correct, 2.0, token_level_kl)
        experience = SimpleNamespace(batch=batch, rewards=rewards, advantages=advantages, ref_logprobs=ref)
        losses, *_ = functions.completion_loss(args, experience, slice(None), new, old)
    (slope,) = torch.autograd.grad(losses.sum() / (k * B), new)
    g = -torch.einsum("jnbt,jnbtd->nd", slope.view(k, U, B, -1), case.jacobian[PROMPTS, index])
    return g / g.norm(dim=-1, keepdim=True).clamp(min=1e-12) if norm_1 else g


def bias_turn_noise(case, k: int, option: dict) -> tuple[float, float, float]:
    """Returns the bias of g, what is left of it after the best scale, and the noise, not yet relative."""
    index, orders = UPDATES[k]
    drawn = case.sampler[option.get("sampler", "policy")].sum(-1).exp()  # (B, n)
    weight = orders * drawn[PROMPTS, index].prod(0).prod(-1)
    g = estimates(case, index, **option)
    mean = weight @ g
    variance = weight @ (g - mean).square().sum(-1)  # the trace of the covariance
    along = (mean @ case.exact / case.exact.norm()).item()
    noise = variance.item() / along**2 if along > 0 else math.nan
    turn = math.sqrt(max(0.0, 1 - (along / mean.norm().item()) ** 2)) if along > 0 else 1.0
    return ((mean - case.exact).norm() / case.exact.norm()).item(), turn, noise


def main():
    """Prints bias, turn and noise of every option, medians over all cases."""
    found = [
        [[bias_turn_noise(case, k, option) for case in cases(beta) for k in KS] for beta in BETAS]
        for option in OPTIONS.values()
    ]
    bias, turn, noise = np.moveaxis(found, -1, 0)  # (options, betas, cases)
    noise = noise / noise[0]
    rows = [["", *(f"{what}, β = {beta:g}" for what in ("bias", "turn", "noise") for beta in BETAS)]]
    for number, name in enumerate(OPTIONS):
        cells = [f"{x:.2g}" if x > 1e-7 else "0" for x in np.median((bias[number], turn[number]), axis=-1).flat]
        for of_cases in noise[number]:
            against = int(np.isnan(of_cases).sum())
            cells.append(
                f"{np.nanmedian(of_cases):.2f}" + (f" ({against} of {len(of_cases)} left out)" if against else "")
            )
        rows.append([name, *cells])
    print(runs.markdown(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
