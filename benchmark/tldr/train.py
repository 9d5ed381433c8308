"""rloo.py with the rule of TRL's published TL;DR run: -1 replaces the score of a completion without a stop token.

    python benchmark/tldr/train.py FLAGS OF rloo.py    # without --missing_eos_penalty; see ../study.py

Source: release 0.9.6 of huggingface/trl, trl/trainer/rloo_trainer.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402


def rewards_of(found, args, scores, ended, kl):
    return found(args, scores.where(ended, -1.0), ended, kl)


rloo.wrap(rewards_of=rewards_of)

if __name__ == "__main__":
    rloo.command_line()
