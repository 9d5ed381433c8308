"""Tests of calculator.py: the tool, the solutions with questions, and the table."""

import os
import random
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import calculator  # noqa: E402
import mini_gsm8k  # noqa: E402
import pytest  # noqa: E402
import tyro  # noqa: E402

import rloo  # noqa: E402


@pytest.mark.parametrize(
    "text, answer",
    [
        ("3 + 4?", " 7"),
        ("12 - 5 = 7. 7 * 9?", " 63"),
        ("4 - 9?", " -5"),
        ("-5 + 2?", " -3"),
        ("How?", ""),
        ("3 +?", ""),
    ],
)
def test_the_calculator_answers_the_computation_at_the_end(text, answer):
    assert calculator.calculate(text) == answer


def test_solutions_with_questions_have_right_results_there_and_held_out_problems_are_known():
    rng = random.Random(1)
    number = right = 0
    for _ in range(200):
        problem = mini_gsm8k.sample_problem(rng, 3)
        text = calculator.with_questions(mini_gsm8k.solve(problem, rng), rng)
        for part in text.split(". "):
            if "?" in part:
                asked, result = part.split("?")
                number += 1
                right += calculator.calculate(asked + "?") == result.rstrip(".")
    assert number == right and 180 < number < 320  # of about 490 steps
    assert calculator.asked([], ["3 + 4? 7. 7 - 2? 5.", "5"], []) == [2.0, 0.0]


def test_no_lesson_is_a_held_out_problem():
    keys = calculator.held_out()
    assert len(keys) == 1_400  # 400 and 1,000, one of each key
    rng = random.Random(1)
    problems = [mini_gsm8k.sample_problem(rng, count) for count in (1, 2, 3) for _ in range(20)]
    assert all(calculator.key_of(mini_gsm8k.solve(problem)) == mini_gsm8k.key(problem) for problem in problems)


def test_flags_are_known_and_the_policy_that_asks_is_written(tmp_path):
    args = tyro.cli(rloo.Args, args=calculator.FLAGS, use_underscores=True)
    assert args.total_episodes > 0 and args.temperature == 1.0
    calculator.teach(tmp_path / "taught", total=32)
    assert rloo.load_tokenizer(args, tmp_path / "taught").eos_token_id == 2
    assert (tmp_path / "taught" / "model.safetensors").read_bytes() != (HERE / "sft" / "model.safetensors").read_bytes()
