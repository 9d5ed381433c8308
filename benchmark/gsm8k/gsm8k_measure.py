"""How many problems does a policy solve: greedily, with one sample, with k samples, by the majority of k samples?

    python benchmark/gsm8k/gsm8k_measure.py --policy benchmark/mini_gsm8k/sft                     # a table by steps
    python benchmark/gsm8k/gsm8k_measure.py --policy runs/my_run --split validation --samples 16

Each problem gets a greedy completion and `--samples` completions sampled at T = 1. From them,

    greedy    the share of the problems whose greedy answer is right
    sampled   the share of the samples whose answer is right
    pass@k    a right answer is among k samples: the unbiased estimate from all samples (Chen et al. 2021,
              arXiv:2107.03374, equation 1)
    maj@k     the answer that most of k samples have is right; equally frequent answers share the point. The samples are
              cut into groups of k, and the mean over these groups is unbiased

The greedy completions that are wrong are counted by the kind of their first mistake.
"""

import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
import tyro
from gsm8k_reward import final_answer, format

ROOT = Path(__file__).resolve().parents[2]
TASK = ROOT / "benchmark" / "mini_gsm8k"
sys.path.insert(0, str(ROOT))
import rloo  # noqa: E402

RESPONSE_LENGTH = 48  # tokens; the longest right solution of mini GSM8K has 40 with its end


# ---- Estimates -------------------------------------------------------------------------------------------------------


def pass_at(k: int, right, samples: int) -> np.ndarray:
    """pass@k of each problem, of whose `samples` completions so many are `right`."""
    none_right = [math.comb(samples - count, k) / math.comb(samples, k) for count in right]
    return 1 - np.array(none_right)


def majority(answers: list, truth, k: int) -> float:
    """maj@k of a problem: the mean over groups of k of its answers. None is no answer and has no vote."""
    points = []
    for begin in range(0, len(answers) - k + 1, k):
        votes = Counter(answer for answer in answers[begin : begin + k] if answer is not None)
        most = max(votes.values(), default=0)
        winners = [answer for answer, count in votes.items() if count == most]
        points.append(1 / len(winners) if truth in winners else 0.0)
    return sum(points) / len(points)


MISTAKES = ["none", "stops early", "misreads", "miscalculates", "else"]
STEP = re.compile(r"(-?\d+ [-+*] -?\d+) = (-?\d+)")


def mistake(text: str, solution: str) -> str:
    """Where a completion of mini GSM8K first leaves the solution, one of MISTAKES; "none" if its answer is right.

    stops early: all its steps are right, and the next one is missing
    misreads: a step has another number or sign than the solution's
    miscalculates: a step is the right one, and its result is wrong
    else: too many steps, or none of the above
    """
    if final_answer(text) == final_answer(solution):
        return "none"
    written, wanted = STEP.findall(text), STEP.findall(solution)
    for (step, result), (right_step, right_result) in zip(written, wanted):
        if step != right_step:
            return "misreads"
        if result != right_result:
            return "miscalculates"
    return "stops early" if len(written) < len(wanted) else "else"


# ---- Completions -----------------------------------------------------------------------------------------------------


class Engine:
    """The rollouts of rloo.py, on the problems of a data set."""

    def __init__(self, tokenizer: str | Path = TASK / "sft", chunk_size: int = 256):
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.chunk_size = chunk_size
        self.args = rloo.Args(model_name_or_path=str(tokenizer), dtype="float32", device="cpu")
        rloo.start_processes(torch.device("cpu"))
        self.tokenizer = rloo.load_tokenizer(self.args, "--policy", str(tokenizer))

    def complete(self, policy, rows: list[dict], k: int, temperature: float, seed: int) -> list[list[str]]:
        """k completions of each row."""
        stop_ids = rloo.stop_token_ids(self.args, policy, self.tokenizer)
        prepared = [rloo.prepare_row(row, self.tokenizer) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: (len(prepared[i]["prompt_ids"]), i))  # little padding
        size = max(1, self.chunk_size // k)
        found: list[list[str]] = [[] for _ in rows]
        for number, begin in enumerate(range(0, len(order), size)):
            index = order[begin : begin + size]
            transformers.set_seed(seed * 1_000_000 + number)
            chunk = [prepared[i] for i in index]
            batch, _ = rloo.rollout(
                policy, chunk, k, temperature, RESPONSE_LENGTH, stop_ids, chunk_size=self.chunk_size
            )
            texts = rloo.completion_texts(batch, self.tokenizer)  # completion j of prompt b has number j·B + b
            for b, i in enumerate(index):
                found[i] = texts[b :: len(index)]
        return found

    def measure(self, path: str | Path, rows: list[dict], samples: int, seed: int = 1) -> dict:
        """What is measured of the policy in a folder, lists with an entry for each row: `greedy` (0 or 1), `mistake`
        (of the greedy completion), `right` (how many of the samples), `majority_8` and `majority_64` (where there are
        so many samples); and shares of completions in the format that is asked for."""
        policy = rloo.load_model(self.args, "--policy", str(path), trained=False)
        greedy = [text for (text,) in self.complete(policy, rows, 1, 0.0, seed)]
        sampled = self.complete(policy, rows, samples, 1.0, seed)
        truths = [final_answer(row["answer"]) for row in rows]
        answers = [[final_answer(text) for text in texts] for texts in sampled]
        found = {
            "samples": samples,
            "greedy": [int(final_answer(text) == truth) for text, truth in zip(greedy, truths)],
            "mistake": [mistake(text, row["answer"]) for text, row in zip(greedy, rows)],
            "right": [own.count(truth) for own, truth in zip(answers, truths)],
            "format": {
                "greedy": round(float(np.mean(format(None, greedy, None))), 4),
                "sampled": round(float(np.mean([format(None, texts, None) for texts in sampled])), 4),
            },
        }
        for k in (8, 64):
            if k <= samples:
                found[f"majority_{k}"] = [round(majority(own, truth, k), 4) for own, truth in zip(answers, truths)]
        return found


def per_problem(found: dict, name: str) -> np.ndarray:
    """A measure of each problem: greedy, sampled, pass@<k> or maj@<k>."""
    kind, _, k = name.partition("@")
    if kind == "pass":
        return pass_at(int(k), found["right"], found["samples"])
    if kind == "maj":
        return np.array(found[f"majority_{k}"])
    if kind == "sampled":
        return np.array(found["right"]) / found["samples"]
    return np.array(found["greedy"], float)


# ---- Command line ----------------------------------------------------------------------------------------------------


@dataclass
class Args:
    """Measures a policy on mini GSM8K."""

    policy: str
    """folder of the policy: a run's output_dir or a checkpoint in it"""
    data: str = str(TASK)
    """folder of the data"""
    split: str = "test"
    """validation, to choose by, or test, to report"""
    samples: int = 64
    """completions sampled for each problem"""
    problems: int | None = None
    """the first so many; if not given, all"""
    seed: int = 1
    """of sampling"""


def main(args: Args):
    torch.set_num_threads(1)
    rows = rloo.load_rows(args.data, args.split)[: args.problems]
    found = Engine().measure(args.policy, rows, args.samples, args.seed)
    steps = np.array([row["steps"] for row in rows])
    names = ["greedy", "sampled"]
    names += [f"{kind}@{k}" for kind in ("pass", "maj") for k in (8, 64) if k <= args.samples]
    print(f"{'%':>9} {'problems':>9}", *(f"{name:>8}" for name in names))
    for label, chosen in (("all", steps > 0), *((f"{n} steps", steps == n) for n in sorted(set(steps.tolist())))):
        values = [100 * per_problem(found, name)[chosen].mean() for name in names]
        print(f"{label:>9} {chosen.sum():>9}", *(f"{value:8.1f}" for value in values))


if __name__ == "__main__":
    main(tyro.cli(Args))
