"""The unbiased k3 estimator of the KL (DeepSeek-V3.2, arXiv:2512.02556) as a term of rloo.py's loss: k3 of a token is
multiplied by a ratio of value 1, so that its expected gradient is that of KL(π ‖ π_ref). Exact with one optimizer step
per update, the default.

    python benchmark/extensions/k3.py --no_kl_in_reward

Replaces `kl_penalty`.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402


def unbiased_k3(new, ref_logprobs, mask):
    """Σ_t (e^{-kl_t} - 1 + kl_t) π(y_t) / π(y_t), (k, B), where the lower π has no gradient."""
    kl = (new - ref_logprobs) * mask  # (k, B, T)
    k3 = torch.expm1((-kl).clamp(max=80.0)) + kl
    return ((new - new.detach()).exp() * k3).sum(-1)


SEAMS = {"kl_penalty": unbiased_k3}

if __name__ == "__main__":
    rloo.command_line(**SEAMS)
