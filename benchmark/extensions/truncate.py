"""Top-p and top-k for rloo.py: completions are drawn from the most likely tokens; log-probs are those of this policy.

    python benchmark/extensions/truncate.py --top_p 0.9 FLAGS OF rloo.py

Of the --top_k most likely tokens the fewest with a probability of at least --top_p are kept, and scaled up to 1; by the
reference all, or the KL could be infinite. In training the policy's newest ones and sampled tokens are: exact in an
update's first step. Replaces `block_logprobs` (as entropy.py does), wraps `Args`, `load_models`, `sample`.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

load_all, sample = rloo.load_models, rloo.sample
limits = {}  # top_k and top_p, by load_models


@dataclass
class Args(rloo.Args):
    top_p: float = 1.0  # at most 1: keeps all tokens
    top_k: int = 0  # 0: keeps all tokens


def load_models(args, longest, resumed):
    rloo.require(0 < args.top_p <= 1 and args.top_k >= 0, "--top_p: above 0, at most 1; --top_k: 0 or more")
    limits.update(top_k=args.top_k, top_p=args.top_p)
    models = load_all(args, longest, resumed)
    if args.kl_coef:
        models[2].keeps_all = True
    return models


def left_out(logits):  # (n, vocabulary), divided by the temperature -> which tokens are left out, bool (n, vocabulary)
    kept = TopKLogitsWarper(limits["top_k"] or logits.shape[-1])(None, logits)
    return TopPLogitsWarper(limits["top_p"])(None, kept).isneginf()


def sample_kept(logits, temperature, uniform):
    return sample(logits.masked_fill(left_out(logits / (temperature or 1.0)), -torch.inf), temperature, uniform)


def block_logprobs(model, hidden, tokens, temperature):
    logits = rloo.final_logits(model, hidden) / temperature
    if not hasattr(model, "keeps_all"):
        logits = logits.masked_fill(left_out(logits).scatter(1, tokens[:, None], False), -torch.inf)
    entropies = torch.distributions.Categorical(logits=logits.detach()).entropy()
    return -torch.nn.functional.cross_entropy(logits, tokens, reduction="none"), entropies


rloo.require_original("block_logprobs")
rloo.Args, rloo.load_models, rloo.block_logprobs, rloo.sample = Args, load_models, block_logprobs, sample_kept

if __name__ == "__main__":
    rloo.command_line()
