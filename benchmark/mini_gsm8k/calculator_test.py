"""Tests of calculator.py: the tool, the grades, the problems, the policy that asks, and the table."""

import os
import random
import re
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


def test_questions_are_counted_and_results_checked_by_their_mark():
    texts = ["3 + 4? 7. 7 - 2? 6. 6 + 1 = 7.", "3 * 4 = 13. 13 - 15 = -2. #### -2", "How? 5"]
    assert calculator.asked([], texts, []) == [2.0, 0.0, 1.0]
    assert calculator.own_right([], texts, []) == [1.0, 0.5, None]
    assert calculator.asked_right([], texts, []) == [0.5, None, None]


def test_a_share_of_the_results_of_right_solutions_is_asked_for():
    rng = random.Random(1)
    solutions = [mini_gsm8k.solve(mini_gsm8k.sample_problem(rng, 3, calculator.LARGEST)) for _ in range(200)]
    texts = [calculator.with_questions(solution, rng) for solution in solutions]
    assert [text.replace("?", " =") for text in texts] == solutions
    assert calculator.ASK - 0.05 < sum(calculator.asked([], texts, [])) / 600 < calculator.ASK + 0.05
    for grade in (calculator.own_right, calculator.asked_right):
        assert {x for x in grade([], texts, []) if x is not None} == {1.0}


def test_no_computation_is_in_two_splits_or_twice_in_one_and_numbers_are_large():
    splits, keys = calculator.make_splits(random.Random(1))
    rows = [row for split in splits.values() for row in split]
    assert len(keys) == len(rows) == sum(calculator.SIZES.values())
    assert {mini_gsm8k.key(row["problem"]) for row in rows} == keys
    firsts = [row["problem"]["first"] for row in rows]
    assert max(firsts) == calculator.LARGEST and sum(firsts) / len(firsts) > calculator.LARGEST / 4


def test_numbers_up_to_20_are_still_drawn_as_the_shipped_problems_were():
    """The builder's first draws, which larger numbers must not move."""
    rng, keys = random.Random(1), set()
    for split in ("test", "validation"):
        for shipped in rloo.load_rows(str(HERE), split):
            row = mini_gsm8k.sample_row(rng, keys, mini_gsm8k.STEPS)
            keys.add(mini_gsm8k.key(row["problem"]))
            assert {name: row[name] for name in shipped} == shipped


def test_flags_are_known_and_the_policy_that_asks_is_written_with_its_problems(tmp_path):
    args = tyro.cli(rloo.Args, args=calculator.FLAGS, use_underscores=True)
    assert args.total_episodes > 0 and args.temperature == 1.0 and len(args.eval_fns) == 3
    calculator.teach(tmp_path, seed=1, total=32)
    assert rloo.load_tokenizer(args, tmp_path).eos_token_id == 2
    assert (tmp_path / "model.safetensors").read_bytes() != (HERE / "sft" / "model.safetensors").read_bytes()
    for split, size in calculator.SIZES.items():
        rows = rloo.load_rows(str(tmp_path), split)
        assert len(rows) == size and {*rows[0]} == {"prompt", "answer", "steps"}


def test_the_page_has_the_table_and_the_intervals_of_the_records():
    records = calculator.common.Records(HERE / "calculator.json")
    page = " ".join((HERE / "README.md").read_text().split())
    assert " ".join(calculator.table(records, calculator.SEEDS).split()) in page
    intervals = re.findall(r"(?m): (.*)$", calculator.compared(records))
    assert len(intervals) == 4 and not [interval for interval in intervals if interval not in page]
    assert {*records.all} == {f"{row}__{seed}" for row in calculator.ROWS for seed in (1, *calculator.SEEDS)}
    choice = [" --dataset_test_split validation" in record["command"] for record in records.all.values()]
    assert sum(choice) == 2 and " --dataset_test_split validation" in records.all["with__1"]["command"]
