"""DAPO's filter (Yu et al. 2025, arXiv:2503.14476) for rloo.py: prompts whose completions all have the same score leave
the loss, which with --loss_mean tokens is a mean over the tokens of the others. DAPO also samples other prompts in
their place; this file does not, so an update has fewer prompts. completions/in_loss is the share that is left.

    python benchmark/extensions/dapo.py --loss_mean tokens --cliprange_high 0.28 --kl_coef 0

Stands on grpo.py. Wraps `improve`.
"""

import sys
from copy import copy
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402
from benchmark.extensions import grpo  # noqa: E402, F401  its advantages, means and flags

improve = rloo.improve


def improve_without_equal_groups(args, policy, master, optimizer, experience):
    scores = experience.shaped_scores
    unequal = ~scores.isclose(scores[0], rtol=1e-6, atol=1e-6).all(0)  # (B,)
    others = copy(experience)
    mask = experience.batch.policy_mask & unequal[:, None]  # no token of theirs is learned from or counted
    others.batch = experience.batch._replace(policy_mask=mask)
    return improve(args, policy, master, optimizer, others) | {"completions/in_loss": unequal}


rloo.improve = improve_without_equal_groups

if __name__ == "__main__":
    rloo.command_line()
