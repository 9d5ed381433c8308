"""Tests of prepare.py, answers.py and models.py, without the problems and the model that prepare.py makes."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import answers  # noqa: E402
import mistakes  # noqa: E402
import models  # noqa: E402
import prepare  # noqa: E402
import runs  # noqa: E402
import templates  # noqa: E402

from rloo_test import write_rows  # noqa: E402

MINI = HERE.parent / "mini_gsm8k" / "sft"  # a tiny model


def problem(number: int, template: int = 1, name: str = "", **changed) -> dict:
    found = {"question": f"{name} What is {number} + 1?", "solution": f"It is 1.\n#### {number}", "answer": str(number)}
    return found | {"template": template} | changed


@pytest.mark.parametrize("changed", [
    {"question": " What is 7 + 1?"},  # as another
    {"question": "Why? " * 61}, {"solution": "So. " * 42 + "#### 8"},  # too long
    {"question": "What is 101 - 93?"}, {"solution": "It is 1,008.\n#### 8"},  # too large
    {"answer": "8.5", "solution": "#### 8.5"}, {"solution": "#### 9"},  # not whole; another answer
])  # fmt: skip
def test_problems_that_are_left_out(changed):
    found = prepare.choose([problem(7), problem(8, **changed), problem(9)], most=3)
    assert [row["answer"] for row in found[1]] == ["7", "9"]


def test_of_a_template_the_first_problems_are_taken():
    problems = [problem(number, template, str(template)) for template in (1, 2) for number in range(9)]
    found = prepare.choose(problems, most=3)
    assert [[row["answer"] for row in rows] for rows in found.values()] == [["0", "1", "2"]] * 2


def test_test_problems_differ_from_others_and_from_each_other_in_more_than_names():
    known = prepare.choose([problem(7, name="Ann"), problem(7, name="Bob"), problem(8, name="Ann")], most=9)
    assert len(known[1]) == 3
    new = [problem(n, t, name) for n, t, name in ((7, 1, "Eve"), (9, 1, "Ann"), (9, 1, "Eve"), (7, 2, "Ann"))]
    found = prepare.choose(new, 9, prepare.key, map(prepare.key, known[1]))
    assert {t: [row["prompt"] for row in rows] for t, rows in found.items()} == {
        1: ["Question: Ann What is 9 + 1?\nAnswer:"], 2: ["Question: Ann What is 7 + 1?\nAnswer:"]
    }  # fmt: skip


def test_no_problem_is_in_two_splits_and_no_unseen_template_in_another(monkeypatch):
    sizes = {"TOO_FEW": 10, "SPLITS": {"validation": 5, "sft": 5}, "UNSEEN": 2, "A_TEMPLATE": 8}
    for name, value in sizes.items():
        monkeypatch.setattr(prepare, name, value)
    rows = {t: [{"prompt": f"{t} {n}", "template": t, "solution": f"s{t}{n}"} for n in range(10)] for t in range(5)}
    rows[5] = rows[0][:9]  # too few
    splits = prepare.split(rows, {t: [{"prompt": f"{t} new", "template": t, "solution": "s"}] for t in range(6)})
    shots = splits.pop("three_shot")
    prompts = [row["prompt"] for found in splits.values() for row in found]
    assert len(set(prompts)) == len(prompts)
    assert [len(splits[name]) for name in ("test", "validation", "sft", "train")] == [3, 5, 5, 14]
    assert [row["prompt"].endswith("new") for row in splits["test"]] == [True] * 3
    unseen = {row["template"] for row in splits.pop("unseen")}
    assert len(unseen) == 2 and unseen.isdisjoint(row["template"] for found in splits.values() for row in found)
    first = splits["sft"][0]
    assert shots[0]["prompt"].startswith(f"{first['prompt']} {first['solution']}\n\n")
    assert shots[0]["prompt"].endswith(splits["test"][0]["prompt"])


@pytest.mark.parametrize("completion, grade", [
    (" 3 + 4 = 7\n#### 7", 1), ("#### 7.0", 1), ("####7 apples", 1), ([{"role": "assistant", "content": "#### 7"}], 1),
    ("#### 1,007", 0), ("#### 7.5", 0), ("#### -7", 0), ("#### 6 #### 7", 0), ("7", 0), ("#### seven", 0), ("", 0),
])  # fmt: skip
def test_a_completion_is_correct_by_the_first_number_after_the_mark(completion, grade):
    assert answers.correct([completion], ["7"]) == [grade]


def test_numbers_have_commas_and_signs():
    assert [answers.final_number(text) for text in ("#### 1,007", "#### -7", "7")] == [1007, -7, None]


def test_the_majority_is_of_samples_with_a_number():
    grades = models.grades_of(["?", "?", "?", "#### 7", "#### 7", "#### 8"], "7")
    assert grades == {"greedy/correct": 1, "sampled/correct": pytest.approx(1 / 3), "pass@16": 1}
    grades = models.grades_of(["#### 8", "#### 8", "#### 7"], "7")
    assert grades == {"greedy/correct": 0, "sampled/correct": pytest.approx(1 / 3), "pass@16": 1}
    assert not any(models.grades_of(["?"], "7").values())


@pytest.mark.parametrize("completion, kind", [
    ("35 - 14 = 20\n#### 21", "right"), ("35 - 14 = 20\n#### 20", "arithmetic"),
    ("20 - 7 = 13, 15 - 1 = 15\n#### 15", "arithmetic"),
    ("35 + 2 = 37\n#### 37", "set-up"), ("35 - 14 = 21", "form"),
])  # fmt: skip
def test_a_mistake_is_one_of_form_of_arithmetic_or_of_the_set_up(completion, kind):
    assert mistakes.kind(completion, "21") == kind


def test_equations_are_found_with_units_and_without_spaces():
    text = "35 pages x 2/5 = 14 pages. $19 - $7 = $13\n48*0.5=24 and 42 ÷ 18 - 1 = 2"
    pairs = [("35 * 2 / 5", 14), ("19 - 7", 13), ("48 * 0.5", 24), ("42 / 18 - 1", 2)]
    assert mistakes.equations(text) == pairs


def test_mistakes_are_counted_by_template_and_problems_shown_in_full(tmp_path, capsys):
    for folder, texts in (("a", ("#### 1", "2")), ("b", ("1 + 1 = 3 #### 3", "#### 2"))):
        pairs = [(t, texts[t], mode) for t in (0, 1) for mode in ("greedy", "sampled")]
        lines = [
            {"mode": m, "prompt": "q?", "completion": x, "columns": {"template": t, "answer": "2"}} for t, x, m in pairs
        ]
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / "completions.jsonl", lines)
    mistakes.main(tmp_path / "a", tmp_path / "b", problems=1)
    shown = capsys.readouterr().out
    assert "| 0 | 0, 0 | 0, 1 | 1, 0 | 0, 0 |" in shown and "| all | 0, 1 | 0, 1 | 1, 0 | 1, 0 |" in shown
    assert shown.endswith("q?\n[before: set-up]#### 1\n[after: arithmetic]1 + 1 = 3 #### 3\n")


@pytest.fixture
def small(tmp_path, monkeypatch):
    rows = [{"prompt": f"What is {n} + {n}?", "solution": f"{n} + {n} is\n#### {2 * n}"} for n in range(6)]
    for split in ("sft", "test"):
        answered = [row | {"answer": str(2 * n)} for n, row in enumerate(rows)]
        write_rows(tmp_path / f"{split}.jsonl", answered)
    monkeypatch.setattr(models, "PREPARED", tmp_path)
    return tmp_path / "out"


@pytest.mark.parametrize("target, text", [("solution", " 2 + 2 is\n#### 4"), ("answer", " #### 4")])
def test_sft_learns_the_target(small, target, text):
    models.sft(small, MINI, target=target, steps=40, batch_size=6, learning_rate=3e-3)
    losses = [update["loss"] for update in runs.lines(small / "metrics.jsonl")]
    assert len(losses) == 40 and losses[-1] < losses[0] / 5
    tokenizer = models.transformers.AutoTokenizer.from_pretrained(small)
    item = tokenizer("What is 2 + 2?")["input_ids"], [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert models.loss_of(models.transformers.AutoModelForCausalLM.from_pretrained(small), [item]) < 0.5


def test_the_loss_is_of_the_target_alone_whatever_else_is_in_the_batch():
    model = models.transformers.AutoModelForCausalLM.from_pretrained(MINI, dtype=torch.float32)
    one, longer = ([1, 2, 3], [4, 5]), ([6, 7, 8, 9, 10, 11], [12, 13, 14])
    logprobs = model(torch.tensor([one[0] + one[1]])).logits[0].log_softmax(-1)
    expected = -(logprobs[2, 4] + logprobs[3, 5]) / 2
    assert models.loss_of(model, [one]).item() == pytest.approx(expected.item(), rel=2e-2)  # bfloat16
    alone = 3 / 5 * models.loss_of(model, [longer]) + 2 / 5 * models.loss_of(model, [one])
    assert models.loss_of(model, [one, longer]).item() == pytest.approx(alone.item(), rel=1e-2)


def test_many_samples_are_graded_and_a_model_has_no_kl_from_itself(small, monkeypatch):
    """... each of them by the answer to its own problem."""

    def texts(batch, tokenizer):
        return [x["columns"]["answer"] for x in batch.examples] * 63 + ["#### 2"] * len(batch.examples)

    monkeypatch.setattr(models.rloo, "completion_texts", texts)
    models.many(small, MINI, reference=MINI, problems=5, k=64)  # two problems in a pass
    (evaluation,), lines = (runs.lines(small / f"{name}.jsonl") for name in ("evaluations", "completions"))
    assert [line["completions"] for line in lines] == [[f"{2 * n}"] * 63 + ["#### 2"] for n in range(5)]
    assert evaluation["right"] == [0, 1, 0, 0, 0] and abs(evaluation["kl"]) < 0.3
    assert [evaluation[name] for name in ("sampled/correct", "pass@16", "greedy/correct")] == [1 / 320, 0.2, 0.2]


def test_templates_that_are_drawn_anew_widen_an_interval():
    gaps = np.repeat([[1.0, 1.0, 0.0, 0.0], [0.9, 1.1, 0.1, -0.1]], 5, axis=1)  # two seeds of four templates
    low, high = templates.drawn_anew(gaps, np.repeat(range(4), 5), of=1)
    assert (low + high) / 2 == pytest.approx(0.5)
    assert (high - low) / 2 == pytest.approx(3.182 * gaps.mean(0).reshape(4, 5).mean(1).std(ddof=1) / 2, rel=1e-3)
