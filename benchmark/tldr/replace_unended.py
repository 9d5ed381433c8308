"""rloo.py with the rule of TRL's published TL;DR run: the score of a completion without eos is replaced by -1.

python benchmark/tldr/replace_unended.py ...    # flags of rloo.py, without --missing_eos_penalty
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py

import rloo

shape_scores = rloo.shape_scores


def replace_unended(scores, ended, missing_eos_penalty, normalize: bool, clip_range):
    """shape_scores with -1 in place of the scores of completions that have not ended."""
    rloo.require(missing_eos_penalty is None, "--missing_eos_penalty: replace_unended.py is used instead of it")
    return shape_scores(torch.where(ended | scores.isnan(), scores, -1.0), ended, None, normalize, clip_range)


if __name__ == "__main__":
    rloo.shape_scores = replace_unended
    rloo.command_line()
