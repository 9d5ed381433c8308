"""Tests of prepare.py, expression.py and models.py, without the problems and the model that prepare.py makes."""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import expression  # noqa: E402
import mistakes  # noqa: E402
import models  # noqa: E402
import prepare  # noqa: E402
import runs  # noqa: E402

from rloo_test import write_rows  # noqa: E402

MINI = HERE.parent / "mini_gsm8k" / "sft"  # a tiny model


def test_no_numbers_are_in_two_splits_and_no_problem_is_twice(monkeypatch):
    for name in ("TEST", "VALIDATION", "SFT"):
        monkeypatch.setattr(prepare, name, 3)
    problems = [
        prepare.row_of(numbers, target, f"{numbers} {target}")
        for a in range(1, 6)
        for b in range(a, 6)
        for numbers in ([a, b, 7], [7, b, a])
        for target in (1, 2)
    ]
    splits = prepare.split(problems)
    shots = splits.pop("three_shot")
    keys = {name: [(*sorted(row["numbers"]), row["target"]) for row in rows] for name, rows in splits.items()}
    assert [len(keys[name]) for name in ("test", "validation", "sft")] == [3, 3, 3]
    everything = sum(keys.values(), [])
    assert len(set(everything)) == len(everything) > 15
    numbers = {name: {key[:3] for key in found} for name, found in keys.items()}
    assert sum(map(len, numbers.values())) == len(set.union(*numbers.values())) == 15
    first = splits["sft"][0]
    assert first["prompt"].startswith(f"Numbers: {first['numbers'][0]}, ")
    assert shots[0]["prompt"].startswith(f"{first['prompt']} {first['solution']}\n\n")
    assert shots[0]["prompt"].endswith(splits["test"][0]["prompt"])
    assert splits == {name: rows for name, rows in prepare.split(problems).items() if name != "three_shot"}


@pytest.mark.parametrize("completion, grade", [
    (" 3 + 4*5", 1), ("(4*5)+3", 1), ("3 + 5*4 ", 1), ("3 + 4*5\n", 1), ("23", 0), ("3 + 4*5 = 23", 0), ("20 + 3", 0),
    ("5 * 4 - -3", 0), ("4*5 + 3 + 3 - 3", 0), ("3 + 4*5)", 0), ("", 0), ("4**5 + 3", 0), ("3.0 + 4*5", 0),
    ("f(3, 4, 5)", 0), ("4*5/(3 - 3)", 0), ("x + 3*4*5", 0), ("3 + 4*5 # yes", 0), ("eval('3 + 4*5')", 0),
])  # fmt: skip
def test_a_completion_is_correct_if_it_uses_each_number_once_and_has_the_value(completion, grade):
    assert expression.correct([completion], [[5, 3, 4]], [23]) == [grade]


def test_values_are_exact_and_a_division_by_zero_is_wrong():
    assert expression.correct(["7/3*6", "(7 - 6)/3", "3/(7 - 7)"], [[7, 3, 6]] * 2 + [[3, 7, 7]], [14, 0, 0]) == [
        1,
        0,
        0,
    ]
    assert expression.correct(["(" * 99 + "1" + ")" * 99], [[1]], [1]) == [1]


def test_the_majority_is_the_most_frequent_sample():
    columns = {"numbers": [3, 4, 5], "target": 23}
    grades = models.grades_of(["3+4*5", "3+4*5", "3+4+5", "4*5+3"], columns)
    assert grades == {"greedy/correct": 1, "sampled/correct": 0.75, "pass@16": 1}
    grades = models.grades_of(["3+4+5", "3+4+5", "3+4*5"], columns)
    assert grades == {"greedy/correct": 0, "sampled/correct": pytest.approx(1 / 3), "pass@16": 1}
    assert not any(models.grades_of(["?"], columns).values())


@pytest.fixture
def small(tmp_path, monkeypatch):
    rows = [prepare.row_of([n, n, 1], 2 * n, f"{n} + {n}") for n in range(6)]
    for split in ("sft", "test"):
        write_rows(tmp_path / f"{split}.jsonl", rows)
    monkeypatch.setattr(models, "PREPARED", tmp_path)
    return tmp_path / "out"


def test_sft_learns_the_solutions(small):
    models.sft(small, MINI, steps=40, batch_size=6, learning_rate=3e-3)
    losses = [update["loss"] for update in runs.lines(small / "metrics.jsonl")]
    assert len(losses) == 40 and losses[-1] < losses[0] / 5
    tokenizer = models.transformers.AutoTokenizer.from_pretrained(small)
    prompt = prepare.row_of([2, 2, 1], 4, "")["prompt"]
    item = tokenizer(prompt)["input_ids"], [*tokenizer(" 2 + 2")["input_ids"], tokenizer.eos_token_id]
    assert models.loss_of(models.transformers.AutoModelForCausalLM.from_pretrained(small), [item]) < 0.5


def test_the_loss_is_of_the_solution_alone_whatever_else_is_in_the_batch():
    model = models.transformers.AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.float32)
    one, longer = ([1, 2, 3], [4, 5]), ([6, 7, 8, 9, 10, 11], [12, 13, 14])
    logprobs = model(torch.tensor([one[0] + one[1]])).logits[0].log_softmax(-1)
    expected = -(logprobs[2, 4] + logprobs[3, 5]) / 2
    assert models.loss_of(model, [one]).item() == pytest.approx(expected.item(), rel=1e-5)
    alone = 3 / 5 * models.loss_of(model, [longer]) + 2 / 5 * models.loss_of(model, [one])
    assert models.loss_of(model, [one, longer]).item() == pytest.approx(alone.item(), rel=1e-5)


def test_each_of_many_samples_is_graded_by_its_own_problem(small, monkeypatch):
    def texts(batch, tokenizer):
        found = []
        for j in range(16):
            for example in batch.examples:
                a, b, c = example["columns"]["numbers"]
                found.append(f"{a} + {b}*{c}" if j < 9 else f"{a} + {b} - {c}")
        return found

    monkeypatch.setattr(models.rloo, "completion_texts", texts)
    models.many(small, MINI, problems=5)
    (evaluation,), lines = (runs.lines(small / f"{name}.jsonl") for name in ("evaluations", "completions"))
    assert [line["completions"][0] for line in lines] == [f"{n} + {n}*1" for n in range(5)]
    assert evaluation["right"] == [9] * 5
    assert [evaluation[name] for name in ("sampled/correct", "pass@16", "greedy/correct")] == [9 / 16, 1, 1]


@pytest.mark.parametrize("completion, kind", [
    (" 3 + 4*5", "right"), ("3*4 + 5", "value"), ("(3 - 4)/(5", "value"), ("20 + 3", "numbers"), ("3 and 4*5", "form"),
])  # fmt: skip
def test_a_mistake_is_one_of_form_of_numbers_or_of_the_value(completion, kind):
    assert mistakes.kind(completion, [5, 3, 4], 23) == kind


@pytest.mark.parametrize(
    "numbers, target, suffice", [([3, 5, 2], 6, True), ([3, 5, 2], 4, True), ([3, 5, 2], 9, False)]
)
def test_sums_and_differences_suffice_for_some_problems(numbers, target, suffice):
    assert mistakes.group_of(numbers, target) == mistakes.GROUPS[0 if suffice else 1]  # 3 + 5 - 2, 5 + 2 - 3, 3*(5 - 2)


def test_mistakes_are_counted_by_group_and_problems_shown_in_full(tmp_path, capsys):
    for folder, texts in (("a", ("1 + 2", "2*1*1")), ("b", ("1 + 1 + 2", "so 4"))):
        lines = []
        for text, solution, target in zip(texts, ("1 + 1 + 2", "2*2*1"), (4, 4)):
            line = {"prompt": f"{solution}?", "completion": text}
            line["columns"] = {"numbers": [1, 1, 2], "target": target, "solution": solution}
            lines += [line | {"mode": "greedy"}, line | {"mode": "sampled"}]
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / "completions.jsonl", lines)
    mistakes.main(tmp_path / "a", tmp_path / "b", problems=1)
    shown = capsys.readouterr().out
    assert "| sums suffice | 0, 1 | 1, 0 | 1, 0 | 0, 1 |" in shown and "| all | 0, 1 | 1, 0 | 1, 0 | 0, 1 |" in shown
    assert shown.endswith("1 + 1 + 2?\n[before: numbers]1 + 2\n[after: right]1 + 1 + 2\n")


def test_solved_problems_are_counted_in_the_order_of_evaluations(tmp_path, capsys):
    rows = [("Long, long: 1, 2, 4?", [1, 2, 4], 3, "4 - 2 + 1"), ("2, 3, 4?", [2, 3, 4], 24, "2*3*4")]
    (tmp_path / "base").symlink_to(MINI)
    names = ("prompt", "numbers", "target", "solution")
    write_rows(tmp_path / "test.jsonl", [dict(zip(names, row)) for row in rows])
    write_rows(tmp_path / "sft.jsonl", [{"numbers": [9, 2, 3], "target": 8}])  # the form 9 - 3 + 2; 8 is above 2 and 3
    records = {
        "rloo_c__2": {"by_prompt": runs.packed([1, 0]), "by_prompt_2": runs.packed([0, 1])},
        "rloo_c_kl__1": {"by_prompt": runs.packed([0, 1])},
        "of 16": {"right": [8, 0]},
        "and of 16": {"right": [16, 1]},
    }  # the shorter problem is first
    mistakes.print_records(tmp_path, records)
    shown = capsys.readouterr().out.splitlines()
    parts = "sums suffice: of 1 | needs * or /: of 1 | sums suffice, not by size: of 0 | first 2: of 2"
    fixed = ["| largest - middle + smallest | 1 | 0 | 0 | 1 |", f"| {mistakes.BY_SIZE} | 1 | 0 | 0 | 1 |"]
    fixed.append(f"| {mistakes.BY_SIZE}, without 20 and 30 | 1 | 0 | 0 | 1 |")
    assert shown[0] == f"| solved greedily | {parts} |" and shown[2] == "| rloo_c__2 | 0 | 1 | 0 | 1 |"
    assert shown[3:7] == ["| rloo_c_kl__1 | 1 | 0 | 0 | 1 |", *fixed]
    assert shown[8] == f"| solved by a sample | {parts} |"
    assert shown[10:14] == ["| rloo_c__2 | 1 | 0 | 0 | 1 |", *fixed]
    assert shown[17] == "| rloo_c_kl__1 and rloo_c__2 | 0 | 1 | 1.000 |"
    assert shown[19].endswith(" | one of 16, sums suffice: of 1 | one of 16, needs * or /: of 1 |")
    two_of_8 = 1 - (8 * 7) / (16 * 15)  # that not both of two samples are wrong
    assert shown[-3].startswith(f"| of 16 | {100 * 0.5 / 2:.1f} | {100 * two_of_8 / 2:.1f} | ")
    assert shown[-3].endswith(" | 50.0 | 1 | 0 |") and shown[-2].endswith(" | 100.0 | 1 | 1 |")
    # The sums of 1, 2 and 4 that are above 0 are 7, 5, 3 and 1, of which 3 is the target; no sum of 2, 3, 4 is 24.
    assert shown[-1].startswith(f"| a random sum | {100 / 4 / 2:.1f} | {100 * (1 - 0.75**2) / 2:.1f} | ")


def test_a_form_is_looked_up_by_what_is_below_the_target():
    solved = [{"numbers": [9, 4, 2], "target": 11}, *({"numbers": [x, 18, 12], "target": x + 30} for x in (16, 19))]
    assert mistakes.by_size(solved[:1], solved) == ["9 + 4 - 2"]  # 20 and 30 are not below 11, but below the others
    assert mistakes.by_size(solved[:1], solved, ()) == ["9 + 4 + 2"]


@pytest.mark.parametrize("more, fewer, p", [(2, 0, 1 / 2), (0, 3, 1 / 4), (1, 4, 3 / 8), (5, 4, 1), (0, 0, 1)])
def test_sign_test(more, fewer, p):
    assert mistakes.sign_test(more, fewer) == pytest.approx(p)  # (1, 4): 2 * (1 + 5) / 2**5


def test_a_sum_is_looked_up_by_the_size_of_its_target():
    solved = [{"numbers": [9, 2, 3], "target": 10}, {"numbers": [5, 2, 3], "target": 4}]
    problems = [{"numbers": [4, 8, 1], "target": 9}, {"numbers": [8, 4, 3], "target": 5}]
    assert mistakes.by_size(problems, solved) == ["8 + 4 - 1", "8 - 4 + 3"]
