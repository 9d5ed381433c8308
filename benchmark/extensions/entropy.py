"""An entropy bonus for rloo.py, as in PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 9): the loss of a completion
minus --entropy_coef times the entropy of its tokens' distributions, summed over the tokens.

    python benchmark/extensions/entropy.py --entropy_coef 0.02

Replaces `Args` (a flag of its own), `completion_loss` (a term of the loss) and `entropy_of` (which has no gradient in
rloo.py, since it is only logged there).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

loss_without_bonus = rloo.completion_loss


@dataclass
class Args(rloo.Args):
    entropy_coef: float = 0.01  # weight of the entropy, summed over a completion's tokens, in nats


def with_bonus(args, experience, index, logprobs, old_logprobs, entropies):
    losses, *others = loss_without_bonus(args, experience, index, logprobs, old_logprobs, entropies)
    return losses - args.entropy_coef * entropies.sum(-1), *others  # (k, b)


def entropy_with_gradient(logprobs):
    """Entropies (n,) in nats of distributions with log-probs (n, vocabulary)."""
    return -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)  # a token of probability 0 adds 0


SEAMS = {"Args": Args, "completion_loss": with_bonus, "entropy_of": entropy_with_gradient}

if __name__ == "__main__":
    rloo.command_line(**SEAMS)
