"""MaxRL (Tajwar et al. 2026, arXiv:2602.02710) for rloo.py: the advantage is (r - mean) / mean over a prompt's
completions, and 0 where none of them is right. Rewards must be 0 or 1, so β must be 0.

    python benchmark/extensions/maxrl.py --kl_coef 0 --temperature 1.0 --learning_rate 3e-4 \
        --dataset_name benchmark/mini_gsm8k --sft_model_path benchmark/mini_gsm8k/sft \
        --reward_fns benchmark/mini_gsm8k/gsm8k_reward.py:correctness

Replaces `advantage`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402


def maxrl(rewards):
    """Advantages of rewards (k, B, 1). One without a score has the mean of its siblings, so it changes nothing."""
    mean = rewards.mean(0)  # the share of right completions, (B, 1)
    binary = (rewards == 0) | (rewards == 1) | rewards.isclose(mean)
    rloo.require(binary.all(), "maxrl.py: rewards must be 0 or 1, and --kl_coef 0")
    return (rewards - mean) / mean.where(mean > 0, 1.0)


rloo.require_original("advantage", "advantages_of")
rloo.advantage = maxrl

if __name__ == "__main__":
    rloo.command_line()
