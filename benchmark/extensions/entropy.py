"""An entropy bonus for rloo.py, as in PPO (Schulman et al. 2017, arXiv:1707.06347, equation 9).

    python benchmark/extensions/entropy.py --entropy_coef 0.02

The loss of a completion is reduced by --entropy_coef times the entropy of its tokens' distributions, summed over the
tokens that are learned from. With grpo.py, whose loss is a mean over tokens, it stays a sum.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402


@dataclass
class Args(rloo.Args):
    entropy_coef: float = 0.01  # weight of the entropy in nats, summed over the tokens of a completion


def block_logprobs(model, hidden, tokens, temperature):
    """As rloo.block_logprobs: log-probs (n,) of tokens and entropies (n,) in nats. Here both have a gradient."""
    logprobs = F.log_softmax(rloo.final_logits(model, hidden) / temperature, dim=-1)  # (n, vocabulary)
    entropies = -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)  # a token of probability 0 adds 0
    return logprobs.gather(1, tokens[:, None]).squeeze(1), entropies


def completion_logprobs(original, *inputs):
    """Hands the entropies on to `completion_loss`, as an attribute of the log-probs."""
    logprobs, entropies = original(*inputs)
    logprobs.entropies = entropies
    return logprobs, entropies


def completion_loss(original, args, experience, index, logprobs, old_logprobs):
    losses, *others = original(args, experience, index, logprobs, old_logprobs)
    learned = ~experience.scores.isnan()  # (k, B)
    if args.mask_truncated_completions:
        learned = learned & experience.batch.ended
    return losses - args.entropy_coef * logprobs.entropies.sum(-1) * learned[index], *others  # (m, b)


rloo.Args = Args
rloo.replace(block_logprobs=block_logprobs)
rloo.wrap(completion_logprobs=completion_logprobs, completion_loss=completion_loss)

if __name__ == "__main__":
    rloo.command_line()
