"""A learned value as the baseline for rloo.py, as in PPO (Schulman et al. 2017, arXiv:1707.06347).

    python benchmark/extensions/value.py --rloo_k 1 --num_ppo_epochs 4 --normalize_advantage FLAGS OF rloo.py

The critic is a model of its own with one output: V_t for the prompt and the tokens before t. A token's reward is
-β kl_t, that of the last token plus the score. With V = A = 0 past the end (Schulman et al. 2016, arXiv:1506.02438):

    A_t = δ_t + γ λ A_{t+1}      δ_t = r_t + γ V_{t+1} - V_t      R_t = A_t + V_t, with V before the update

The critic's loss, the mean over completions of Σ_t max((V_t - R_t)², (V'_t - R_t)²) / 2, is a part of loss/policy_avg;
V' is V, but at most --value_cliprange from what it was. Replaces `advantages_of`; wraps `Args`, `check_args`,
`load_models`, `make_optimizer`, `save_optimizer`, `completion_loss`, `clip_gradients`.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForSequenceClassification as Scorer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

before = SimpleNamespace(**vars(rloo))  # what this file finds and adds to
critic = None  # by load_models


@dataclass
class Args(rloo.Args):
    token_level_kl: bool = True  # must stay so: advantages and ratios are per token
    gamma: float = 1.0  # γ: weight of what comes a token later
    lam: float = 0.95  # λ: at 1 an advantage is the sum of later rewards minus V, at 0 that of a single step, δ
    value_model_path: str | None = None  # what the critic begins as, a reward model; None: the policy, with V = 0
    value_learning_rate: float | None = None  # peak value of the critic; None: learning_rate
    value_cliprange: float = 0.2  # how far V can move in an update before its loss has no gradient


def check_args(args):
    two = replace(args, rloo_k=2, per_device_train_batch_size=2 * args.per_device_train_batch_size)
    before.check_args(two if args.rloo_k == 1 else args)  # one completion per prompt is enough here
    rloo.require(args.token_level_kl, "value.py: needs --token_level_kl")
    rloo.require(0 <= args.gamma <= 1 and 0 <= args.lam <= 1, "--gamma, --lam: must be from 0 to 1")


def load_models(args, longest, resumed):
    global critic
    critic = rloo.read_model(args, args.value_model_path or args.sft_model_path, torch.float32, Scorer, num_labels=1)
    rloo.choose_layout(args, critic, longest)
    if not args.value_model_path:
        torch.nn.init.zeros_(critic.score.weight)
    if resumed:
        critic.load_state_dict(torch.load(resumed / "critic.pt", map_location="cpu", weights_only=True))
    critic.requires_grad_(True)
    return before.load_models(args, longest, resumed)


def save_optimizer(file, optimizer):
    before.save_optimizer(file, optimizer)
    rloo.on_first_rank(lambda: torch.save(critic.state_dict(), file.with_name("critic.pt")))


def make_optimizer(args, master):
    optimizer = before.make_optimizer(args, master)
    rate = args.learning_rate if args.value_learning_rate is None else args.value_learning_rate
    optimizer.add_param_group({"params": critic.parameters(), "lr": rate})
    return optimizer


def values_of(batch):  # V (k, B, T), 0 where masked
    values = critic.score(rloo.completion_hidden(critic, batch)[:, :, :-1]).squeeze(-1)  # (k, B, n)
    return torch.nn.functional.pad(values, (0, batch.policy_mask.shape[-1] - values.shape[-1])) * batch.policy_mask


def gae(rewards, values, mask, gamma: float, lam: float):  # A (k, B, T), 0 where masked
    advantages = torch.zeros_like(values)
    A = V = torch.zeros_like(values[..., 0])  # of the next token
    for t in reversed(range(values.shape[-1])):
        delta = rewards[..., t] + gamma * V - values[..., t]
        A = torch.where(mask[..., t], delta + gamma * lam * A, A)
        V = torch.where(mask[..., t], values[..., t], V)
        advantages[..., t] = A * mask[..., t]
    return advantages


@torch.no_grad()
def advantages_of(args, batch, shaped_scores, kl):
    mask = batch.policy_mask
    last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
    rewards = last * shaped_scores[..., None] - args.kl_coef * kl
    critic.values = torch.cat([values_of(part) for part in batch.chunks(args.local_rollout_forward_batch_size)], dim=1)
    advantages = gae(rewards, critic.values, mask, args.gamma, args.lam)
    critic.returns = advantages + critic.values
    if args.normalize_advantage:
        advantages = rloo.standardize(advantages, mask)
    return advantages * (mask & batch.ended[..., None] if args.mask_truncated_completions else mask)


def completion_loss(args, experience, index, *inputs):
    rloo.require(not experience.scores.isnan().any(), "value.py: a reward must not be None")
    losses, *logged = before.completion_loss(args, experience, index, *inputs)
    batch = experience.batch.select(index)
    values, old, returns = values_of(batch), critic.values[:, index], critic.returns[:, index]
    limited = old + (values - old).clamp(-args.value_cliprange, args.value_cliprange)
    errors = torch.max((values - returns).square(), (limited - returns).square()) * batch.policy_mask
    return losses + errors.sum(-1) / 2, *logged


def clip_gradients(model, max_norm):
    rloo.average_gradients(critic)  # those of the policy are averaged already
    rloo.require_finite(before.clip_gradients(critic, max_norm), "the critic's gradient is not finite")
    return before.clip_gradients(model, max_norm)


rloo.require_original("advantage", "advantages_of")
rloo.Args, rloo.check_args, rloo.load_models, rloo.make_optimizer = Args, check_args, load_models, make_optimizer
rloo.save_optimizer, rloo.advantages_of = save_optimizer, advantages_of
rloo.completion_loss, rloo.clip_gradients = completion_loss, clip_gradients

if __name__ == "__main__":
    rloo.command_line()
