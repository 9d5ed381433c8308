"""Top-p and top-k for rloo.py: completions are drawn from the most likely tokens, and log-probs are of that policy.

    python benchmark/extensions/truncate.py --top_p 0.9 FLAGS OF rloo.py

Of the --top_k most likely tokens, the fewest with a total probability of at least --top_p are kept, and scaled up to 1.
The reference keeps all tokens, or the KL could be infinite. In training, the policy keeps the sampled token and those
that are the most likely by its newest weights: in the first step of an update, this is the sampler's distribution.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

draw_from_all = rloo.draw_tokens
limits = {}  # set by check_policy


@dataclass
class Args(rloo.Args):
    top_p: float = 1.0  # at most 1, which keeps all tokens
    top_k: int = 0  # 0: keep all tokens


def check_policy(original, args, model, pair):
    """Sets the limits after `check_policy`, which compares the log-probs of the whole distribution."""
    limits.update(top_p=1.0, top_k=0)
    original(args, model, pair)
    limits.update(top_p=args.top_p, top_k=args.top_k)


def left_out(logits):
    """Returns which tokens are left out, bool (n, vocabulary); logits are divided by the temperature."""
    kept = TopKLogitsWarper(limits["top_k"] or logits.shape[-1])(None, logits)
    return TopPLogitsWarper(limits["top_p"])(None, kept).isneginf()


def draw_tokens(logits, temperature, uniform):
    return draw_from_all(logits.masked_fill(left_out(logits / (temperature or 1.0)), -torch.inf), temperature, uniform)


def block_logprobs(model, hidden, tokens, temperature):
    """As rloo.block_logprobs, of the tokens that are kept; the reference, which is not trained, keeps all."""
    logits = rloo.final_logits(model, hidden) / temperature
    if any(weight.requires_grad for weight in model.parameters()):
        logits = logits.masked_fill(left_out(logits).scatter(1, tokens[:, None], False), -torch.inf)
    entropies = torch.distributions.Categorical(logits=logits.detach()).entropy()
    return -torch.nn.functional.cross_entropy(logits, tokens, reduction="none"), entropies


rloo.Args = Args
rloo.replace(draw_tokens=draw_tokens, block_logprobs=block_logprobs)
rloo.wrap(check_policy=check_policy)

if __name__ == "__main__":
    rloo.command_line()
