"""Leaves prompts whose completions all have advantage 0 out of training, since they have no gradient. DAPO samples
others in their place (Yu et al. 2025, arXiv:2503.14476); here the update stays RLOO's.

    python benchmark/extensions/skip.py --kl_coef 0

Without a KL penalty, equal scores make equal rewards. If answers are right or wrong, this is often so for half of the
prompts. The gradient is that of all prompts but for rounding. With a KL penalty, advantages differ and nothing is left
out. `policy/*` and `val/*` are then means over the prompts that are read.
"""

import copy
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402


def check_args(original, args):
    original(args)
    plain = all(getattr(rloo, name) is rloo.ORIGINAL[name] for name in ("completion_loss", "policy_loss"))
    rloo.require(plain, "skip.py: with another file's loss, prompts whose advantages are 0 have a gradient")
    rloo.require(args.num_mini_batches == 1, "skip.py needs --num_mini_batches 1: what is left may be few prompts")
    rloo.require(os.environ.get("WORLD_SIZE", "1") == "1", "skip.py needs one process: others may have more to read")


def improve(original, args, policy, optimizer, experience):
    numbers = experience.advantages.any(-1).any(0).nonzero().squeeze(1)  # of prompts with a gradient, out of B
    B = experience.advantages.shape[1]
    if 0 < len(numbers) < B:
        tensors = {name: x[:, numbers] for name, x in vars(experience).items() if isinstance(x, torch.Tensor)}
        experience = copy.copy(experience)
        vars(experience).update(tensors, batch=experience.batch.select(slice(None), numbers))
        experience.advantages *= len(numbers) / B  # the loss is a mean over all B prompts
    return original(args, policy, optimizer, experience)


rloo.wrap(check_args=check_args, improve=improve)

if __name__ == "__main__":
    rloo.command_line()
