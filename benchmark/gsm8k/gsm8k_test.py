"""Tests of the GSM8K benchmark: rewards, commands and the report."""

import importlib.util
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mini_gsm8k"))

import gsm8k_measure
import gsm8k_mini
import gsm8k_mini_report
import gsm8k_report
import gsm8k_reward
import mini_gsm8k

import rloo

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


def gsm8k_sh(*args: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHON": sys.executable, "HF_HUB_OFFLINE": "1", **env}
    return subprocess.run(["bash", HERE / "gsm8k.sh", *args], capture_output=True, text=True, cwd=cwd, env=env)


def commands(printed: str) -> list[rloo.Args]:
    words = [shlex.split(line) for line in printed.splitlines() if not line.startswith("#")]
    return [rloo.parse_args(line[2:]) for line in words if line[1] == "rloo.py"]


def test_dry_run_prints_what_rloo_parses(tmp_path):
    result = gsm8k_sh("mini", "--dry_run", OUT=str(tmp_path))
    runs = commands(result.stdout)
    assert result.returncode == 0 and not any(tmp_path.iterdir()), result.stderr
    assert [(run.learning_rate, run.seed) for run in runs] == [(setting.lr, 1) for setting in gsm8k_mini.Plan().first]
    (real,) = commands(gsm8k_sh("qwen3-0.6b", "--dry_run", "--total_episodes", "64", OUT=str(tmp_path)).stdout)
    assert (real.sft_model_path, real.dtype, real.rloo_k) == ("Qwen/Qwen3-0.6B", "bfloat16", 8)
    assert real.total_episodes == 64 and real.resume
    for run in [*runs, real]:
        assert len(run.reward_fns) == len(run.reward_weights) == 2
        assert run.per_device_train_batch_size % run.rloo_k == 0
        for spec in (*run.reward_fns, run.judge_fn):
            file, _, name = spec.partition(":")
            assert (ROOT / file).samefile(gsm8k_reward.__file__) and callable(getattr(gsm8k_reward, name))
    result = gsm8k_sh("7b")
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1 and "mini" in result.stderr


def test_gsm8k_is_prepared_once_and_seeds_that_are_done_are_skipped(tmp_path):
    """With a `datasets` package that has two rows, and a `python rloo.py` and report that do nothing."""
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(name, config, split):\n"
        "    assert (name, config) == ('openai/gsm8k', 'main')\n"
        "    return [{'question': split + '?', 'answer': '2 é. #### 2'}]\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = - ] || exit 0\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    out = tmp_path / "out"
    first = gsm8k_sh("qwen3-0.6b", OUT=str(out), PYTHON=str(python), SEEDS="1 2")
    assert first.returncode == 0, first.stderr
    for split in ("train", "test"):
        (row,) = rloo.load_rows(str(out / "data"), split)
        system, user = row["prompt"]
        assert user == {"role": "user", "content": split + "?"} and row["answer"] == "2 é. #### 2"
        assert system["role"] == "system" and system["content"] == gsm8k_reward.SYSTEM + " /no_think"
    assert sorted(path.name for path in (out / "data").iterdir()) == ["test.jsonl", "train.jsonl"]
    (out / "qwen3-0.6b" / "seed-1").mkdir(parents=True)
    (out / "qwen3-0.6b" / "seed-1" / "model.safetensors").touch()
    second = gsm8k_sh("qwen3-0.6b", OUT=str(out), PYTHON="/no/python", SEEDS="1")  # nothing but the report is left
    assert "# openai" in first.stdout and "# openai" not in second.stdout and "seed-1 is done" in second.stdout
    assert [run.seed for run in commands(first.stdout)] == [1, 2] and not commands(second.stdout)
    (tmp_path / "datasets.py").write_text("raise ImportError")
    missing = gsm8k_sh("qwen3-0.6b", OUT=str(tmp_path / "other"), PYTHON=str(python))
    assert missing.returncode == 1 and missing.stderr.strip().endswith("pip install datasets")
    assert not commands(missing.stdout)


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quick") / "mini"
    mini_gsm8k.build(mini_gsm8k.Config(quick=True, output_dir=str(folder)))
    return folder


def test_a_tiny_run_trains_through_rloo_and_is_reported(tmp_path, quick, capsys):
    """What `gsm8k.sh qwen3-0.6b` does, by its own flags, on the quick model."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.jsonl").touch()  # nothing is prepared
    printed = gsm8k_sh("qwen3-0.6b", "--dry_run", OUT=str(tmp_path), SEEDS="1 2").stdout
    for args in commands(printed):
        args.dataset_name, args.sft_model_path = str(quick), str(quick / "sft")
        args.reward_fns = tuple(str(ROOT / spec) for spec in args.reward_fns)
        args.judge_fn = str(ROOT / args.judge_fn)
        args.dtype, args.device, args.max_prompt_length = "float32", "cpu", 500
        args.gradient_accumulation_steps, args.total_episodes, args.response_length = 1, 32, 8
        evaluations = rloo.main(args)
        assert "sampled/judge_score" in evaluations["before"] and "greedy/judge_score" in evaluations["after"]
    capsys.readouterr()
    gsm8k_report.report(tmp_path / "qwen3-0.6b")
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "qwen3-0.6b" / "gsm8k.json").read_text())
    assert "accuracy, greedy" in shown and "20 held-out problems" in shown
    assert list(found["runs"]) == ["seed-1", "seed-2"]
    run = found["runs"]["seed-1"]
    assert run["episodes"] == [16, 32] and len(run["correctness"]) == 2 and set(run["held_out"]) == {"0", "32"}
    table = found["percent: mean, standard error over seeds"]["format, sampled"]
    values = [100 * found["runs"][seed]["format, sampled, after"] for seed in found["runs"]]
    assert math.isclose(table["after"][0], sum(values) / 2)
    assert math.isclose(table["after"][1], abs(values[0] - values[1]) / 2, abs_tol=1e-9)
    with pytest.raises(SystemExit, match="no finished run"):
        gsm8k_report.report(quick)


# ----------------------------------------------------------------------------------------------------------------------
# The study on mini GSM8K


def test_pass_at_k_is_the_mean_over_all_choices():
    samples = [True, False, False, True, False, False]
    for k in range(1, 7):
        choices = list(itertools.combinations(samples, k))
        (found,) = gsm8k_measure.pass_at(k, [2], 6)
        assert found == pytest.approx(sum(map(any, choices)) / len(choices))
    assert gsm8k_measure.pass_at(6, [0, 1], 6).tolist() == [0.0, 1.0]


def test_majority_shares_ties_and_gives_no_vote_to_missing_answers():
    def majority(answers, k):
        return gsm8k_measure.majority(answers, 7, k)

    assert majority([7, 7, 3, 3], 4) == 0.5 and majority([7, 7, 3, 3], 2) == 0.5 and majority([7, 3, 3, 5], 4) == 0.0
    assert majority([7, None, None, None], 4) == 1.0 and majority([None] * 4, 4) == 0.0
    assert majority([7, 7, 3, 3, 7], 2) == 0.5  # an incomplete group does not count


def test_mistakes_are_told_by_the_first_one():
    solution = "6 * 4 = 24. 24 - 12 = 12. 12 + 5 = 17. #### 17"
    for text, kind in (
        (solution, "none"),
        ("6 + 11 = 17. #### 17", "none"),
        ("6 * 4 = 24. 24 - 12 = 12. #### 12", "stops early"),
        ("", "stops early"),
        ("6 + 4 = 10. #### 10", "misreads"),
        ("6 * 4 = 24. 24 - 12 = 13. 13 + 5 = 18. #### 18", "miscalculates"),
        ("6 * 4 = 24. 24 - 12 = 12. 12 + 5 = 17. 17 + 1 = 18. #### 18", "else"),
    ):
        assert gsm8k_measure.mistake(text, solution) == kind in gsm8k_measure.MISTAKES


def test_completions_are_matched_with_their_problems():
    """They come back in the order of the rows, whatever the order and chunks in which they are sampled."""
    rows = rloo.load_rows(str(HERE.parent / "mini_gsm8k"), "test")[:7]
    engine = gsm8k_measure.Engine(chunk_size=4)
    policy = rloo.load_model(engine.args, "--policy", str(HERE.parent / "mini_gsm8k" / "sft"), trained=False)
    together = engine.complete(policy, rows, 2, 0.0, seed=1)
    alone = [engine.complete(policy, [row], 1, 0.0, seed=1) for row in rows]
    assert together == [[text, text] for ((text,),) in alone]


TINY = gsm8k_mini.Plan(
    first=tuple(gsm8k_mini.Setting(lr, size=16, episodes=16) for lr in (1e-3, 1e-4)),
    around=(("beta", 0.0),),
    seeds=(1, 2),
    validation_samples=8,
)


def test_the_study_in_tiny(tmp_path, quick, monkeypatch):
    """Tunes, trains, measures and reports on the quick model; what is there is not made again."""
    monkeypatch.setattr(gsm8k_measure, "RESPONSE_LENGTH", 8)
    monkeypatch.chdir(ROOT)  # in this process: each start of another takes seconds
    monkeypatch.setattr(gsm8k_mini.subprocess, "run", lambda command, **_: rloo.main(rloo.parse_args(command[2:])))
    task = os.path.relpath(quick, ROOT)
    study = gsm8k_mini.Study(TINY, tmp_path, task)
    with pytest.raises(SystemExit, match="tune first"):
        study.test()
    study.tune()
    study.test()
    gsm8k_mini_report.write(study)
    names = {"start"} | {f"{setting.name}__1" for setting in study.trials()}
    names |= {f"{setting.name}__2" for setting in (study.chosen(), study.broadest())}
    assert set(study.found) == names
    assert (tmp_path / "gsm8k_mini.png").is_file() == bool(importlib.util.find_spec("matplotlib"))
    text = (tmp_path / "tables.md").read_text()
    assert all(f"## {name}\n" in text for name in ("trials", "commands", "results", "steps", "beyond", "mistakes"))

    again = gsm8k_mini.Study(TINY, tmp_path, task)
    monkeypatch.setattr(gsm8k_mini.subprocess, "run", None)
    monkeypatch.setattr(gsm8k_measure.Engine, "measure", None)
    again.tune()
    again.test()
    assert again.found == study.found


def test_the_page_has_the_tables_of_the_shipped_numbers():
    study = gsm8k_mini.Study(gsm8k_mini.Plan(), HERE)
    page = (HERE / "README.md").read_text()
    tables = gsm8k_mini_report.tables_of(study)
    assert set(tables) >= {"trials", "commands", "results", "steps", "beyond", "mistakes"}
    for name, table in tables.items():
        assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in page
    rows = rloo.load_rows(str(HERE.parent / "mini_gsm8k"), "test")
    assert study.found["start"]["steps"] == [row["steps"] for row in rows]
    results = gsm8k_mini_report.Results(study, study.chosen())
    assert results.after("greedy").shape == (len(results.seeds), 1000)
    assert np.isclose(results.after("sampled").mean(), np.mean([np.mean(run["right"]) / 64 for run in results.runs]))


def test_an_interval_has_the_errors_over_problems_and_over_seeds():
    rng = np.random.default_rng(0)
    problems = rng.normal(size=1000)
    low, high = gsm8k_mini_report.interval(problems)
    half = 1.96 * problems.std(ddof=1) / 1000**0.5
    assert np.allclose((low, high), (problems.mean() - half, problems.mean() + half))
    low, high = gsm8k_mini_report.interval(np.array([problems, problems, problems]))
    assert np.isclose((high - low) / 2, half)  # seeds that do not differ add nothing
    low, high = gsm8k_mini_report.interval(np.array([[0.0] * 9, [1.0] * 9, [2.0] * 9]))
    assert np.isclose((high - low) / 2, 4.303 / 3**0.5)
