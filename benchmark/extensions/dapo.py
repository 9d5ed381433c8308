"""DAPO's filter (Yu et al. 2025, arXiv:2503.14476) for rloo.py: prompts whose completions all have the same score leave
the loss, which is then a mean over the tokens of the others. DAPO also samples other prompts in their place; this file
does not, so an update has fewer prompts. completions/in_loss is the share that is left.

    python benchmark/extensions/dapo.py --advantage_estimator grpo --loss_aggregation token --cliprange_high 0.28 \
        --kl_coef 0

Replaces `collect`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402


def without_equal_groups(collect):
    """A `collect` that leaves groups of equal scores out of the loss."""

    def collect_and_filter(*inputs):
        experience = collect(*inputs)
        experience.in_loss = experience.in_loss & ~rloo.equal_groups(experience.shaped_scores)  # (k, B)
        return experience

    return collect_and_filter


SEAMS = {"collect": without_equal_groups(rloo.collect)}

if __name__ == "__main__":
    rloo.command_line(**SEAMS)
