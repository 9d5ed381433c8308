"""Tests of the GSM8K benchmark: rewards and commands."""

import os
import shlex
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import gsm8k_reward
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py
import rloo  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GSM8K = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 in all.\n#### 72"


def correct(text: str, answer) -> float | None:
    return gsm8k_reward.correctness([None], [text], [[0]], answer=[answer], id=[7])[0]


@pytest.mark.parametrize("text, number", [
    (GSM8K, 72), ("#### 42", 42), ("####42", 42), ("3 + 4 = 7. #### 7", 7),
    # thousands, currencies, units, signs
    ("#### 1,234", 1234), ("#### $1,234,567.50", Fraction(2469135, 2)), (r"\boxed{12{,}345}", 12345),
    ("It costs $18.", 18), (r"So \$5 in all", 5), ("50%", 50), (r"50\%", 50), ("#### 7 apples", 7),
    ("12 m^2", 12), ("12 m2", 12), ("x_1 = 4", 4), ("18 km/h", 18), ("3pm", 3), ("#### -5", -5), ("−5", -5),
    ("-$5", -5), ("$-5", -5), ("10-5", 5), ("(10)-5", 5), ("x-5", 5), ("US$5", 5), ("1,2", 2), ("12,34", 34),
    # fractions and decimals
    ("#### 0.5", Fraction(1, 2)), (".5", Fraction(1, 2)), ("#### 3.0", 3), ("1/2", Fraction(1, 2)),
    ("1 1/2", Fraction(3, 2)), (r"\boxed{\frac{3}{4}}", Fraction(3, 4)), (r"-\dfrac{1}{2}", -Fraction(1, 2)),
    ("#### 6/3", 2),
    # marks
    (r"Thus \boxed{\text{total} = {9}} as \frac{1}{3} of 27", 9), (r"\boxed {8}", 8), (r"\boxed{8", 8),
    ("<reasoning>2 + 2</reasoning>\n<answer>\n4 eggs\n</answer>", 4), ("<answer>4", 4), ("#### **42**", 42),
    # several numbers: the last mark, in it what follows the last =, there the first number; else the last number
    ("#### 5\nNo: #### 6", 6), ("#### 42\nThat took 7 steps.", 42), ("#### 41 or 42", 41), ("#### 6 * 7 = 42", 42),
    ("<answer>3</answer> I mean <answer>4</answer>", 4), (r"#### 5, so \boxed{5}", 5), ("First 3, then 4, so 7.", 7),
    ("The answer is 42. Bye!", 42), ("<think>#### 5</think>#### 6", 6), ("<think></think>\n\nIt is 6", 6),
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
    assert correct("#### 42", 42) == correct("#### 42", 42.0) == 1.0
    assert correct("#### 0.1", 0.1) == 1.0


@pytest.mark.parametrize("text, asked", [
    ("3 + 4 = 7. #### 7", 1), ("Some steps.\n\n#### 1,234\n", 1), ("So\n#### $5", 1), ("So #### -0.5.", 1),
    ("<think>#### 3</think>\nSo\n#### 7", 1), ("<think>\n\n</think>\n\n#### 7", 0), ("#### 7", 0), ("So 7", 0), ("", 0),
    ("So #### 7 apples", 0), ("So #### 7\nBye", 0), ("So #### 6 or #### 7", 0), ("So ####", 0), (r"So \boxed{7}", 0),
])  # fmt: skip
def test_format(text, asked):
    assert gsm8k_reward.format([None], [text], [[0]], answer=["3"]) == [asked]


def gsm8k_sh(*args: str, **env: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run(["bash", HERE / "gsm8k.sh", *args], capture_output=True, text=True, env=env)


def commands(printed: str) -> list[rloo.Args]:
    words = [shlex.split(line) for line in printed.splitlines() if not line.startswith("#")]
    return [rloo.parse_args(line[2:]) for line in words if line[1] == "rloo.py"]


def test_gsm8k_is_prepared_once_and_seeds_that_are_done_are_skipped(tmp_path):
    """With a `datasets` package that has two rows, and a `python rloo.py` that does nothing."""
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(name, config, split):\n"
        "    assert (name, config) == ('openai/gsm8k', 'main')\n"
        "    return [{'question': split + '?', 'answer': '2 é. #### 2'}]\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = - ] || exit 0\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    out = tmp_path / "out"
    dry = gsm8k_sh("--dry_run", "--total_episodes", "64", OUT=str(out), PYTHON=str(python), SEEDS="1 2")
    assert dry.returncode == 0 and not out.exists(), dry.stderr
    first = gsm8k_sh(OUT=str(out), PYTHON=str(python), SEEDS="1 2")
    assert first.returncode == 0, first.stderr
    for split in ("train", "test"):
        (row,) = rloo.load_rows(str(out / "data"), split)
        system, user = row["prompt"]
        assert user == {"role": "user", "content": split + "?"} and row["answer"] == "2 é. #### 2"
        assert system["role"] == "system" and system["content"] == gsm8k_reward.SYSTEM + " /no_think"
    assert sorted(path.name for path in (out / "data").iterdir()) == ["test.jsonl", "train.jsonl"]
    (out / "qwen3-0.6b" / "seed-1").mkdir(parents=True)
    (out / "qwen3-0.6b" / "seed-1" / "model.safetensors").touch()
    second = gsm8k_sh(OUT=str(out), PYTHON="/no/python", SEEDS="1")
    assert second.returncode == 0 and second.stdout.splitlines() == [f"# {out}/qwen3-0.6b/seed-1 is done"]
    for args, episodes in [(x, 64) for x in commands(dry.stdout)] + [(x, 59_784) for x in commands(first.stdout)]:
        assert (args.sft_model_path, args.dtype, args.rloo_k) == ("Qwen/Qwen3-0.6B", "bfloat16", 8)
        assert args.total_episodes == episodes and args.resume and len(args.reward_fns) == len(args.reward_weights) == 2
        assert args.per_device_train_batch_size % args.rloo_k == 0
        for spec in (*args.reward_fns, args.judge_fn):
            file, _, name = spec.partition(":")
            assert (ROOT / file).samefile(gsm8k_reward.__file__) and callable(getattr(gsm8k_reward, name))
    (tmp_path / "datasets.py").write_text("raise ImportError")
    missing = gsm8k_sh(OUT=str(tmp_path / "other"), PYTHON=str(python))
    assert missing.returncode == 1 and missing.stderr.strip().endswith("pip install datasets")


def test_its_rewards_train_the_embedded_miniature(tmp_path):
    flags = {"dataset_name": ROOT / "benchmark/mini_gsm8k", "sft_model_path": ROOT / "benchmark/mini_gsm8k/sft"}
    flags |= {"judge_fn": f"{HERE}/gsm8k_reward.py:correctness", "output_dir": tmp_path / "out", "device": "cpu"}
    flags |= {"rloo_k": 8, "total_episodes": 16, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    words = [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    functions = [f"{HERE}/gsm8k_reward.py:{name}" for name in ("correctness", "format")]
    words += ["--num_eval_prompts", "8", "--response_length", "24", "--reward_fns", *functions]
    found = rloo.main(rloo.parse_args([*words, "--reward_weights", "1.0", "0.2"]))
    assert all(f"{mode}/judge_score" in found[when] for mode in ("sampled", "greedy") for when in ("before", "after"))
