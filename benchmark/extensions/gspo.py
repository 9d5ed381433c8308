"""GSPO (Zheng et al. 2025, arXiv:2507.18071) for rloo.py: the ratio of a completion of n tokens is (π / π_old)^(1/n),
so its clip range is much smaller than PPO's.

    python benchmark/extensions/gspo.py --advantage_estimator grpo --cliprange 3e-4 --cliprange_high 4e-4 --kl_coef 0 \
        --num_mini_batches 4

Replaces `policy_loss`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

ppo = rloo.policy_loss


def gspo(new, old, advantages, mask, clip_low, clip_high, ratio_level):
    """PPO's clipped loss (k, B) with log-probs divided by lengths: then log ρ = Σ_t (new_t - old_t) / n."""
    rloo.require(ratio_level == "sequence", "gspo.py has one ratio per completion: --ratio_level sequence")
    n = mask.sum(-1, keepdim=True)  # (k, B, 1)
    return ppo(new / n, old / n, advantages, mask, clip_low, clip_high, ratio_level)


SEAMS = {"policy_loss": gspo}

if __name__ == "__main__":
    rloo.command_line(**SEAMS)
