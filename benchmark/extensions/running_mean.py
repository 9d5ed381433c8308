"""A running mean of each prompt's rewards as its baseline, in place of the mean of the siblings.

    python benchmark/extensions/running_mean.py --dataset_name benchmark/mini_tldr/validation.jsonl \
        --sft_model_path benchmark/mini_tldr/sft --reward_model_path benchmark/mini_tldr/reward --learning_rate 2.5e-4

The baseline comes from the updates before, so it does not depend on the completions that it is compared with. A prompt
that is read for the first time has the baseline of rloo.py. The means are not saved: a resumed run starts new ones, and
with several processes each has its own. It is worth it only if each prompt comes several times. Not together with
correction.py, which computes advantages a second time. Replaces `advantages_of`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

RATE = 0.5  # weight of the newest rewards in a running mean
means = {}  # tokens of a prompt -> running mean of its rewards

advantages_of_siblings = rloo.advantages_of


def with_running_means(args, batch, shaped_scores, kl):
    rloo.require(not args.token_level_kl, "running_mean.py: has one baseline per completion, not one per token")
    rloo.require(not args.normalize_advantage, "running_mean.py: advantages would be normalised before it")
    advantages = advantages_of_siblings(args, batch, shaped_scores, kl)  # (k, B, 1)
    kl_coef = args.kl_coef if args.kl_in_reward else 0.0
    rewards = rloo.rlhf_reward(shaped_scores, kl, kl_coef)  # (k, B), NaN without a score
    for b, example in enumerate(batch.examples):
        prompt = tuple(example["prompt_ids"])
        mean = rewards[:, b].nanmean().item()
        if prompt in means:
            advantages[:, b, 0] = (rewards[:, b] - means[prompt]).nan_to_num(0.0)
            mean = RATE * mean + (1 - RATE) * means[prompt]
        if mean == mean:  # not NaN: at least one completion had a score
            means[prompt] = mean
    return advantages


SEAMS = {"advantages_of": with_running_means}

if __name__ == "__main__":
    rloo.command_line(**SEAMS)
