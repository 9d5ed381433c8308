"""Other advantages for rloo.py, each of a line: REINFORCE without a baseline, REINFORCE++, RAFT, MaxRL.

    python benchmark/extensions/advantages.py --advantages none
    python benchmark/extensions/advantages.py --advantages none --token_level_kl --normalize_advantage  # REINFORCE++
    python benchmark/extensions/advantages.py --advantages raft --kl_coef 0
    python benchmark/extensions/advantages.py --advantages maxrl --kl_coef 0 --temperature 1.0 --learning_rate 3e-4 \
        --dataset_name benchmark/mini_gsm8k --sft_model_path benchmark/mini_gsm8k/sft \
        --reward_fns benchmark/mini_gsm8k/gsm8k_reward.py:correctness

none   the reward; with these flags REINFORCE++ (Hu 2025, arXiv:2501.03262)
raft   1 for the completion of a prompt with the highest reward, 0 for the rest (Dong et al. 2023, arXiv:2304.06767)
maxrl  (r - mean) / mean over the prompt's completions, for rewards of 0 and 1 (Tajwar et al. 2026, arXiv:2602.02710)
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402


@dataclass
class Args(rloo.Args):
    # none: A = R; raft: 1 for the best completion of a prompt, else 0, and 0 for all if none is better than another;
    # maxrl: for rewards of 0 and 1, (r - mean) / mean
    advantages: Literal["none", "raft", "maxrl"] = "none"


# Functions of rewards (k, B, 1 or T) that return the same shape. A reward that is NaN, for a completion without a
# score, has the advantage NaN and no effect on the others.


def raft(rewards):
    best, index = rewards.nan_to_num(-torch.inf).max(0, keepdim=True)
    differ = (rewards < best).any(0, keepdim=True)  # else wrong answers would be learned where all are wrong
    return torch.zeros_like(rewards).scatter(0, index, differ.to(rewards)).where(~rewards.isnan(), rewards)


def maxrl(rewards):
    binary = (rewards == 0) | (rewards == 1) | rewards.isnan()
    rloo.require(binary.all(), "--advantages maxrl: rewards must be 0 or 1")
    mean = rewards.nanmean(0)  # the share of right answers, (B, 1)
    return (rewards - mean) / mean.where(mean > 0, 1.0)


def advantage(rewards):
    return chosen(rewards)


def check_args(original, args):
    global chosen
    original(args)
    rloo.require(args.advantages != "maxrl" or not args.kl_coef, "--advantages maxrl: needs --kl_coef 0")
    # With a reward per token, another completion could be the best one at each token.
    rloo.require(args.advantages != "raft" or not args.token_level_kl, "--advantages raft: not with --token_level_kl")
    chosen = {"none": lambda rewards: rewards, "raft": raft, "maxrl": maxrl}[args.advantages]


rloo.Args = Args
rloo.replace(advantage=advantage)
rloo.wrap(check_args=check_args)

if __name__ == "__main__":
    rloo.command_line()
