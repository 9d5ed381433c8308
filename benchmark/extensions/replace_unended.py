"""The rule of TRL's published TL;DR run for rloo.py: -1 replaces the score of a completion without a stop token.

    python benchmark/extensions/replace_unended.py FLAGS OF rloo.py, without --missing_eos_penalty

Wraps `shape_scores` and `check_args`. Source: release 0.9.6 of huggingface/trl, trl/trainer/rloo_trainer.py.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

check_flags = rloo.check_args
shape_ended = rloo.shape_scores


def check_args(args):
    check_flags(args)
    rloo.require(args.missing_eos_penalty is None, "--missing_eos_penalty: replace_unended.py is used instead of it")


def replace_unended(scores, ended, *options):
    """rloo.shape_scores of scores (k, B), with -1 for completions that have not ended."""
    return shape_ended(torch.where(ended, scores, -1.0), ended, *options)


rloo.check_args, rloo.shape_scores = check_args, replace_unended

if __name__ == "__main__":
    rloo.command_line()
