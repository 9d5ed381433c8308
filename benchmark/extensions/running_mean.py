"""A running mean of each prompt's rewards as its baseline, in place of the mean of the siblings.

    python benchmark/extensions/running_mean.py --dataset_name benchmark/mini_tldr/validation.jsonl \
        --sft_model_path benchmark/mini_tldr/sft --reward_model_path benchmark/mini_tldr/reward --learning_rate 2.5e-4

The baseline comes from the updates before, so it does not depend on the completions that it is compared with. A prompt
that is read for the first time has the baseline of rloo.py. The means are not saved: a resumed run starts new ones, and
with several processes each has its own. It is worth it only if each prompt comes several times. Wraps `advantages_of`,
`improve` and `check_args`. Not with grpo.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

RATE = 0.5  # weight of the newest rewards in a running mean
means = {}  # tokens of a prompt -> running mean of its rewards

check_flags = rloo.check_args
advantages_of_siblings = rloo.advantages_of
improve = rloo.improve


def check_args(args):
    check_flags(args)
    rloo.require(not args.token_level_kl, "running_mean.py: has one baseline per completion, not one per token")
    rloo.require(not args.normalize_advantage, "running_mean.py: advantages would be normalised before it")


def with_running_means(args, batch, shaped_scores, kl):
    advantages = advantages_of_siblings(args, batch, shaped_scores, kl)  # (k, B, 1)
    rewards = rloo.rlhf_reward(shaped_scores, kl, args.kl_coef)
    for b, example in enumerate(batch.examples):
        mean = means.get(tuple(example["prompt_ids"]))
        if mean is not None:
            advantages[:, b] = rewards[:, b] - mean
    return advantages


def improve_and_note(args, policy, master, optimizer, experience):
    """`improve`, where a completion without a score has no advantage; then this update's rewards enter the means."""
    scored = ~experience.scores.isnan()
    learned = scored & experience.batch.ended if args.mask_truncated_completions else scored
    experience.advantages = experience.advantages * learned[..., None]
    improved = improve(args, policy, master, optimizer, experience)
    rewards = rloo.rlhf_reward(experience.shaped_scores, experience.kl, args.kl_coef)
    for b, example in enumerate(experience.batch.examples):
        if scored[:, b].any():
            prompt = tuple(example["prompt_ids"])
            mean = rewards[scored[:, b], b].mean().item()
            means[prompt] = RATE * mean + (1 - RATE) * means.get(prompt, mean)
    return improved


rloo.require_original("advantages_of")
rloo.check_args, rloo.advantages_of, rloo.improve = check_args, with_running_means, improve_and_note

if __name__ == "__main__":
    rloo.command_line()
