"""Tests of mini GSM8K: rewards, the builder, and what is shipped."""

import itertools
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import gsm8k_reward
import mini_gsm8k
import pytest
from transformers import AutoTokenizer

import rloo

HERE = Path(__file__).resolve().parent

GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 in all.\n#### 72"


def correct(text: str, answer) -> float | None:
    chat = [{"role": "assistant", "content": text}]
    found, of_chat = gsm8k_reward.correctness([None] * 2, [text, chat], [[0]] * 2, answer=[answer] * 2, id=[7] * 2)
    assert found == of_chat
    return found


@pytest.mark.parametrize("text, number", [
    (GSM8K, 72), ("####42", 42), ("3 + 4 = 7. #### 7", 7),
    # thousands, currencies, units, signs
    ("#### 1,234", 1234), ("#### $1,234,567.50", Fraction(2469135, 2)), (r"\boxed{12{,}345}", 12345),
    ("It costs $18.", 18), (r"So \$5 in all", 5), ("50%", 50), (r"50\%", 50), ("#### 7 apples", 7),
    ("12 m^2", 12), ("12 m2", 12), ("x_1 = 4", 4), ("18 km/h", 18), ("3pm", 3), ("#### -5", -5), ("−5", -5),
    ("-$5", -5), ("$-5", -5), ("10-5", 5), ("(10)-5", 5), ("x-5", 5), ("US$5", 5), ("1,2", 2), ("12,34", 34),
    # fractions and decimals
    ("#### 0.5", Fraction(1, 2)), (".5", Fraction(1, 2)), ("#### 3.0", 3), ("1/2", Fraction(1, 2)),
    ("1 1/2", Fraction(3, 2)), (r"\boxed{\frac{3}{4}}", Fraction(3, 4)), (r"-\dfrac{1}{2}", -Fraction(1, 2)),
    # marks
    (r"Thus \boxed{\text{total} = {9}} as \frac{1}{3} of 27", 9), (r"\boxed {8}", 8), (r"\boxed{8", 8),
    (r"\boxed{\mathbf{x = \text{9}} eggs}", 9),
    ("<reasoning>2 + 2</reasoning>\n<answer>\n4 eggs\n</answer>", 4), ("<answer>4", 4), ("#### **42**", 42),
    # several numbers: the last mark, in it what follows the last =, there the first number; else the last number
    ("#### 5\nNo: #### 6", 6), ("#### 42\nThat took 7 steps.", 42), ("#### 41 or 42", 41), ("#### 6 * 7 = 42", 42),
    ("<answer>3</answer> I mean <answer>4</answer>", 4), (r"#### 5, so \boxed{5}", 5), ("First 3, then 4, so 7.", 7),
    ("<think>#### 5</think>#### 6", 6), ("<think></think>\n\nIt is 6", 6),
    # none
    ("", None), ("no idea", None), ("7 ####", None), ("<answer></answer>", None), (r"7 \boxed{}", None), ("1/0", None),
    ("<think>It may be 7", None), ("#### " + "9" * 5000, None), ("=", None), ("#### x", None),
])  # fmt: skip
def test_the_number_that_counts(text, number):
    assert gsm8k_reward.final_answer(text) == number
    if number is not None:
        assert correct(text, str(number)) == correct(text, f"Some steps.\n#### {number}") == 1.0
        assert correct(text, str(number + 1)) == 0.0
    else:
        assert correct(text, "42") == 0.0


def test_rows_without_an_answer_are_not_scored():
    for answer in (None, "", "unknown", "####"):
        assert correct("#### 42", answer) is None
    assert correct("#### 42", 42) == correct("#### 42", 42.0) == correct("#### 0.1", 0.1) == 1.0


@pytest.mark.parametrize("text, asked", [
    ("3 + 4 = 7. #### 7", 1), ("Some steps.\n\n#### 1,234\n", 1), ("So\n#### $5", 1), ("So #### -0.5.", 1),
    ("<think>#### 3</think>\nSo\n#### 7", 1), ("<think>\n\n</think>\n\n#### 7", 0), ("#### 7", 0), ("So 7", 0), ("", 0),
    ("So #### 7 apples", 0), ("So #### 7\nBye", 0), ("So #### 6 or #### 7", 0), ("So ####", 0), (r"So \boxed{7}", 0),
])  # fmt: skip
def test_format(text, asked):
    assert gsm8k_reward.format([None], [text], [[0]], answer=["3"]) == [asked]


def test_the_shipped_miniature_is_what_the_builder_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(mini_gsm8k, "SIZES", {"test": 20, "validation": 10, "train": 40, "sft": 64})
    mini_gsm8k.main(tmp_path)
    built, shipped = (
        {str(path.relative_to(folder)) for path in folder.rglob("*.json*")} for folder in (tmp_path, HERE)
    )
    assert built == shipped and (tmp_path / "sft" / "model.safetensors").exists()
    rows = {split: [*rloo.load_rows(str(HERE), split).values()] for split in ("train", "validation", "test")}
    for row in itertools.chain(*rows.values()):  # computations: ("3 + 4", "7 - 2")
        row["key"] = tuple(re.findall(r"(\d+ [-+*] \d+) =", row["answer"]))
        assert len(row["key"]) == row["steps"] in (1, 2, 3)
        results = [int(x) for x in re.findall(r"= (\d+)\.", row["answer"])]
        assert [eval(x) for x in row["key"]] == results and correct(row["answer"], results[-1]) == 1.0
    keys = {split: {row["key"] for row in rows[split]} for split in rows}
    assert not any(one & other for one, other in itertools.combinations(keys.values(), 2))
    assert [len(keys[split]) for split in ("validation", "test")] == [400, 1000]
    tokenizer = AutoTokenizer.from_pretrained(HERE / "sft")
    prompt = rloo.prepare_example({"prompt": gsm8k_reward.chat("Tom has 12 pens.")}, tokenizer)
    assert tokenizer.decode(prompt["prompt_ids"]) == (
        f"<|im_start|>system\n{gsm8k_reward.SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nTom has 12 pens.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.tokenize("12") == ["1", "2"]


def test_the_shipped_model_solves_problems_that_it_has_not_seen(tmp_path):
    graders = tuple(f"{HERE}/gsm8k_reward.py:{name}" for name in ("correctness", "format"))
    data = {
        "dataset_name": str(HERE / "test.jsonl"),
        "num_eval_prompts": 40,
        "response_length": 40,
        "total_episodes": 0,
    }
    places = {"sft_model_path": str(HERE / "sft"), "output_dir": str(tmp_path / "run")}
    (evaluation,) = rloo.main(rloo.Args(**data, **places, eval_fns=graders, kl_coef=0.0, device="cpu"))
    assert evaluation["greedy/correctness"] >= 0.5 and evaluation["greedy/format"] >= 0.75


def test_the_real_problems_are_prepared_as_the_page_says(tmp_path):
    """With a stand-in for the package datasets."""
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(name, config, split):\n"
        "    assert (name, config) == ('openai/gsm8k', 'main')\n"
        "    return [{'question': split + '?', 'answer': '1 + 1 = 2. #### 1,203'}]\n"
    )
    (tmp_path / "benchmark").symlink_to(HERE.parent)
    (script,) = re.findall(r"python - <<'END'\n(.*?)END\n", (HERE / "README.md").read_text(), re.S)
    (tmp_path / "gsm8k").mkdir()
    subprocess.run([sys.executable, "-"], input=script, text=True, cwd=tmp_path, check=True)
    for split in ("train", "test"):
        (row,) = rloo.load_rows(str(tmp_path / "gsm8k"), split).values()
        assert row["prompt"] == gsm8k_reward.chat(split + "?") and correct("It is 1203.", row["answer"]) == 1.0
