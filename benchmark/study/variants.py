"""rloo.py with an advantage that it does not have.

    python benchmark/study/variants.py raft --kl_coef 0 --output_dir runs/raft    # and any flag of rloo.py

    no_baseline  REINFORCE without a baseline: A = R
    raft         best-of-k fine-tuning (RAFT, Dong et al. 2023, arXiv:2304.06767): A = 1 for the completion with the
                 highest reward of each group, else 0

In the first step after a rollout ρ = 1, so that the loss -A ρ has the gradient of -A log π(y): with `raft` that of the
log-likelihood of the best completions. RAFT as published has no KL penalty, which is --kl_coef 0; with one, the best is
chosen by score - β·KL.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402


def no_baseline(rewards):
    return rewards.clone()


def best_of_group(rewards):
    """1 for the highest of the rewards (k, B, 1) of each group, 0 for the others; the first of equal ones."""
    best = rewards.argmax(0, keepdim=True)
    return torch.zeros_like(rewards).scatter(0, best, 1.0)


ADVANTAGES = {"no_baseline": no_baseline, "raft": best_of_group}

if __name__ == "__main__":
    rloo.advantage = ADVANTAGES[sys.argv[1]]
    rloo.command_line(sys.argv[2:])
