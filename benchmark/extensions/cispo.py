"""CISPO (Chen et al. 2025, "MiniMax-M1", arXiv:2506.13585) for rloo.py: the ratio of a token is a factor of its
log-prob, without gradient, and at most 1 + ε_high. So no token drops out of the gradient, as those that PPO clips do.

    python benchmark/extensions/cispo.py --loss_mean tokens --kl_coef 0 --num_mini_batches 4

Stands on grpo.py. Replaces `policy_loss`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402
from benchmark.extensions import grpo  # noqa: E402, F401  its advantages, means and flags


def cispo(new, old, advantages, mask, clip_low, clip_high, per_token):
    """-Σ_t min(ρ_t, 1 + ε_high) A log π(y_t) of each completion, (k, B)."""
    log_ratio = (new.detach() - old) * mask  # (k, B, T)
    ratio = log_ratio.exp()
    losses = -ratio.clamp(max=1 + clip_high) * advantages * new * mask
    return losses.sum(-1), log_ratio[mask], (ratio > 1 + clip_high)[mask]


rloo.require_original("policy_loss")
rloo.policy_loss = cispo

if __name__ == "__main__":
    rloo.command_line()
