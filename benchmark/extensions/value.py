"""A learned value as the baseline for rloo.py, as in PPO (Schulman et al. 2017, arXiv:1707.06347).

    python benchmark/extensions/value.py --rloo_k 1 --num_ppo_epochs 4 --normalize_advantage FLAGS OF rloo.py

The critic is a model with one output: V_t for the prompt and the tokens before t. The reward of a token is -β kl_t, and
that of the last token also has the score. With V = A = 0 past the end (Schulman et al. 2016, arXiv:1506.02438):

    A_t = δ_t + γ λ A_{t+1}      δ_t = r_t + γ V_{t+1} - V_t      R_t = A_t + V_t, with V before the update

The critic's loss is the mean over completions of Σ_t max((V_t - R_t)², (V'_t - R_t)²) / 2, where V' is V limited to
--value_cliprange around its value before the update. It is added to the policy loss, and to loss/policy_avg.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

critic = None  # set by load_reward_model


@dataclass
class Args(rloo.Args):
    gamma: float = 1.0  # γ: weight of what comes a token later
    lam: float = 0.95  # λ: at 1 an advantage is the sum of later rewards minus V; at 0 it is δ, that of one step
    value_model_path: str | None = None  # a reward model that the critic begins as; None: the policy, with V = 0
    value_learning_rate: float | None = None  # peak value for the critic; None: learning_rate
    value_cliprange: float = 0.2  # how far V can move in an update before its loss has no gradient


def check_args(original, args):
    if args.rloo_k == 1:  # enough here, since no completion needs others
        args = replace(args, rloo_k=2, per_device_train_batch_size=2 * args.per_device_train_batch_size)
    original(args)


def load_reward_model(original, args, tokenizer, pair):
    """Also loads the critic, in float32. It is checked like a reward model, which it begins as."""
    global critic
    path = args.value_model_path or args.sft_model_path
    as_reward = replace(args, reward_model_path=path, dtype="float32")
    critic = original(as_reward, tokenizer, pair)["rewards/reward_model"].args[0]
    if not args.value_model_path:
        print(f"{path}: the critic begins as the policy, with a head of 0")
        torch.nn.init.zeros_(critic.score.weight)
    if resumed := args.resume and next(iter(rloo.checkpoints(Path(args.output_dir))), None):
        with rloo.explained(f"{resumed}: has no critic of this shape"):
            critic.load_state_dict(torch.load(resumed / "critic.pt", map_location="cpu", weights_only=True))
    critic.requires_grad_(True)
    return original(args, tokenizer, pair)


def save_policy(original, folder, master, tokenizer):
    original(folder, master, tokenizer)
    if rloo.rank_and_world()[0] == 0:
        torch.save(critic.state_dict(), folder / "critic.pt")


def make_optimizer(original, args, *models):
    optimizer = original(args, *models)
    rate = args.learning_rate if args.value_learning_rate is None else args.value_learning_rate
    optimizer.add_param_group({"params": critic.parameters(), "lr": rate})
    return optimizer


def values_of(batch):
    """Returns V (k, B, T), 0 where masked."""
    values = critic.score(rloo.completion_hidden(critic, batch)[:, :, :-1]).squeeze(-1)  # (k, B, n), n ≤ T
    return torch.nn.functional.pad(values, (0, batch.policy_mask.shape[-1] - values.shape[-1])) * batch.policy_mask


def gae(rewards, values, mask, gamma: float, lam: float):
    """Returns A (k, B, T), 0 where masked, from rewards and values (k, B, T)."""
    advantages = torch.zeros_like(values)
    A = V = torch.zeros_like(values[..., 0])  # those of the next token
    for t in reversed(range(values.shape[-1])):
        delta = rewards[..., t] + gamma * V - values[..., t]
        A = torch.where(mask[..., t], delta + gamma * lam * A, A)
        V = torch.where(mask[..., t], values[..., t], V)
        advantages[..., t] = A * mask[..., t]
    return advantages


def advantage(rewards):
    """Has no baseline: `collect` puts advantages over the critic in the place of these."""
    return rewards


def collect(original, args, *inputs):
    """`collect` with the advantages of the critic, one per token. They are 0 for a completion without a score."""
    experience = original(args, *inputs)
    batch, kl = experience.batch, experience.kl
    scores = rloo.rewards_of(replace(args, kl_coef=0.0), experience.scores, batch.ended, kl)[..., :1]  # (k, B, 1)
    mask = experience.in_loss = batch.policy_mask & ~scores.isnan()
    last = mask & (mask.cumsum(-1) == mask.sum(-1, keepdim=True))
    rewards = scores.where(last, 0.0) - args.kl_coef * kl  # (k, B, T)
    experience.values = rloo.in_parts(values_of, batch, args.local_rollout_forward_batch_size)
    advantages = gae(rewards, experience.values, mask, args.gamma, args.lam)
    experience.returns = advantages + experience.values
    experience.advantages = rloo.advantages_for_loss(args, advantages, batch.ended, mask)
    return experience


def completion_loss(original, args, experience, index, *inputs):
    losses, *logged = original(args, experience, index, *inputs)
    batch = experience.batch.select(*index)
    old, returns = experience.values[index], experience.returns[index]
    values = values_of(batch)
    limited = old + (values - old).clamp(-args.value_cliprange, args.value_cliprange)
    errors = torch.max((values - returns).square(), (limited - returns).square()) * experience.in_loss[index]
    return losses + errors.sum(-1) / 2, *logged


rloo.Args = Args
rloo.replace(advantage=advantage)
rloo.wrap(check_args=check_args, load_reward_model=load_reward_model, make_optimizer=make_optimizer)
rloo.wrap(save_policy=save_policy, collect=collect, completion_loss=completion_loss)

if __name__ == "__main__":
    rloo.command_line()
