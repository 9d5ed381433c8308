"""Tests of options_report.py and run_options.sh: python -m pytest -q benchmark/options/options_report_test.py"""

import importlib.util
import json
import math
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py

import options_report

import rloo

HERE = Path(__file__).resolve().parent
PLAN = [
    ("estimators", "rloo", {}),
    ("estimators", "grpo", {"advantage_estimator": "grpo"}),
    ("kl_coef", "kl_coef_0", {"kl_coef": 1e-9}),
    ("kl_coef", "kl_coef_0.3", {"kl_coef": 0.3}),
    ("loss", "no_kl_in_reward", {"kl_in_reward": False}),
]
FLAGS = {"advantage_estimator": "rloo", "kl_coef": 0.05, "kl_in_reward": True}


def write_run(
    folder: Path, flags: dict, seed: int, better: float = 0.0, updates: int = 12, posts: int = 40, order: int = 1
):
    """A made-up run: evaluations before, at update 5 and after training; `better` is added to every gold score."""
    random = np.random.default_rng([seed, len(folder.name)])
    folder.mkdir(parents=True)
    args = FLAGS | flags | {"seed": seed, "output_dir": str(folder), "total_episodes": 8 * updates}
    (folder / "args.json").write_text(json.dumps(args))
    metrics = [
        {"update": u, "episode": 8 * u, "objective/kl": 0.1 * (u - 1), "objective/scores": 1 + 0.1 * u}
        for u in range(1, updates + 1)
    ]
    metrics[-1]["eval/sampled/score"] = 2.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    samples = []
    for update in (0, 5, updates):
        for mode in ("sampled", "greedy")[: 1 if update == 5 else 2]:
            for post in range(posts)[::order]:
                gold = round(post % 5 + 0.1 * update + better * (update > 0) + random.normal(scale=0.5), 2)
                samples.append(
                    {
                        "update": update,
                        "mode": mode,
                        "prompt": f"post {post}",
                        "score": 1.0,
                        "length": 20,
                        "judge_score": gold,
                        "judge_win_rate": float(gold > 2.5),
                    }
                )
    (folder / "completions.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))


def write_runs(folder: Path, seeds=(1, 2, 3), better=None, **options) -> Path:
    """Made-up runs of PLAN; better: name -> what is added to its gold scores."""
    lines = []
    for group, name, flags in PLAN:
        for seed in seeds:
            lines.append(f"{group}\t{name}\t{seed}\tpython rloo.py --seed {seed}  --name {name}\n")
            write_run(folder / f"{name}__{seed}", flags, seed, (better or {}).get(name, 0.0), **options)
    (folder / "plan.tsv").write_text("".join(lines))
    return folder


def table(output: Path) -> dict[tuple[str, str], dict]:
    results = json.loads((output / "results.json").read_text())["results"]
    return {
        (name, measure): {"flags": result["flags"], "seeds": result["seeds"]} | entry
        for name, result in results.items()
        for measure, entry in result["found"].items()
    }


def run_tool(runs: Path, output: Path, monkeypatch, figures: bool = False) -> dict[tuple[str, str], dict]:
    """Runs options_report.py; the figures take most of its time."""
    monkeypatch.setattr(sys, "argv", ["options_report.py", "--runs", str(runs), "--output_dir", str(output)])
    with monkeypatch.context() as patch:
        if not figures:
            patch.setattr(options_report, "draw", lambda *_: [])
        options_report.main()
    return table(output)


def test_numbers_against_plain_loops(tmp_path, monkeypatch, capsys):
    runs = write_runs(tmp_path / "runs", better={"grpo": 1.0, "kl_coef_0.3": -1.0})
    rows = run_tool(runs, tmp_path / "out", monkeypatch, figures=True)

    def final(name: str, seed: int) -> list[float]:
        lines = (runs / f"{name}__{seed}" / "completions.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        return [s["judge_score"] for s in samples if s["update"] == 12 and s["mode"] == "sampled"]

    means = [sum(final("grpo", seed)) / 40 for seed in (1, 2, 3)]
    mean = sum(means) / 3
    error = math.sqrt(sum((x - mean) ** 2 for x in means) / 2) / math.sqrt(3)
    difference = (
        sum(mine - theirs for seed in (1, 2, 3) for mine, theirs in zip(final("grpo", seed), final("rloo", seed))) / 120
    )
    row = rows["grpo", "gold_score"]
    found = [row[key] for key in ("mean", "stderr", "difference")]
    assert found == pytest.approx([mean, error, difference], rel=1e-4)
    assert row["verdict"] == "better" and row["low"] > 0 and row["flags"] == "--advantage_estimator grpo"
    assert rows["kl_coef_0.3", "gold_score"]["verdict"] == "worse"
    assert rows["no_kl_in_reward", "gold_score"]["verdict"] == "not told apart"
    assert rows["no_kl_in_reward", "gold_score"]["flags"] == "--no_kl_in_reward"
    assert rows["before", "gold_score"]["verdict"] == "worse"  # training added 1.2
    assert "difference" not in rows["rloo", "gold_score"]
    said = capsys.readouterr().out
    assert "better: grpo; worse: kl_coef_0.3; not told apart: kl_coef_0, no_kl_in_reward" in said
    assert "40 held-out posts" in said and "not there yet" not in said
    figures = {"headline", "kl_coef", "differences"}
    drawn = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert drawn == (figures if importlib.util.find_spec("matplotlib") else set())
    for path in (tmp_path / "out").glob("*.png"):
        path.unlink()
    monkeypatch.setattr(sys, "argv", ["options_report.py", "--output_dir", str(tmp_path / "out"), "--redraw"])
    options_report.main()
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == drawn
    again = tmp_path / "again"
    run_tool(runs, again, monkeypatch)
    assert (again / "results.json").read_bytes() == (tmp_path / "out" / "results.json").read_bytes()


def test_kl_is_of_the_rollouts_nearest_to_an_evaluation(tmp_path):
    write_run(tmp_path / "run", {}, seed=1)
    run = options_report.read_run(tmp_path / "run")
    assert options_report.kl_at(run, 0, 5) == 0
    assert options_report.kl_at(run, 5, 5) == pytest.approx(0.5)  # line u + 1 has 0.1 · u: the policy after u updates
    assert options_report.kl_at(run, 12, 5) == pytest.approx(np.mean([0.7, 0.8, 0.9, 1.0, 1.1]))
    assert options_report.kl_at(run, 12, 100) == pytest.approx(np.mean([line["objective/kl"] for line in run.metrics]))


def test_interval_covers_seeds_and_posts():
    """Without a difference 0 lies outside in about 1 of 20 at most, whatever varies; and with one it is found."""
    random, seeds, posts = np.random.default_rng(1), 5, 60
    for by_seed, by_post, noise in [(0.0, 0.3, 0.5), (0.1, 0.0, 0.5), (0.0, 0.0, 1.0)]:
        alarms = 0
        for trial in range(100):
            differences = (
                by_seed * random.normal(size=(seeds, 1))
                + by_post * random.normal(size=(1, posts))
                + noise * random.normal(size=(seeds, posts))
            )
            low, high = options_report.bootstrap_interval(differences, 400, trial)
            assert low < differences.mean() < high
            alarms += not low <= 0 <= high
        assert alarms <= 12
        low, high = options_report.bootstrap_interval(differences + 1, 400, 1)
        assert low > 0
    same_posts = np.tile(random.normal(size=(1, posts)), (seeds, 1))  # seeds agree: only posts vary
    low, high = options_report.bootstrap_interval(same_posts, 4000, 1)
    error = same_posts[0].std() / posts**0.5
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)


def test_partial_results(tmp_path, monkeypatch, capsys):
    runs = write_runs(tmp_path / "runs")
    (runs / "grpo__2" / "metrics.jsonl").write_text('{"update": 1, "episode": 8, "objec')  # being written
    unfinished = runs / "kl_coef_0__1" / "metrics.jsonl"
    unfinished.write_text("".join(line + "\n" for line in unfinished.read_text().splitlines()[:-1]))
    for seed in (1, 2, 3):
        (runs / f"kl_coef_0.3__{seed}" / "args.json").unlink()
    (runs / "rloo__3" / "completions.jsonl").unlink()
    rows = run_tool(runs, tmp_path / "out", monkeypatch)
    assert "not there yet (seeds): rloo 3; grpo 2; kl_coef_0 1; kl_coef_0.3 1, 2, 3" in capsys.readouterr().out
    assert rows["grpo", "win_rate"]["seeds"] == 2
    assert ("kl_coef_0.3", "win_rate") not in rows
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert results["grpo"]["found"]["win_rate"]["seeds_compared"] == 1  # seed 1 alone has both
    assert "not there yet" in (tmp_path / "out" / "tables.md").read_text()


def test_one_seed_has_no_error(tmp_path, monkeypatch):
    rows = run_tool(write_runs(tmp_path / "runs", seeds=(1,)), tmp_path / "out", monkeypatch)
    assert rows["grpo", "gold_score"]["stderr"] is None
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "nan" not in text
    json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))


def test_what_cannot_be_compared_is_refused(tmp_path, monkeypatch):
    def refusal(runs: Path) -> str:
        with pytest.raises(SystemExit) as end:
            run_tool(runs, tmp_path / "out", monkeypatch)
        assert "\n" not in str(end.value)
        return str(end.value)

    (tmp_path / "empty").mkdir()
    assert "plan.tsv" in refusal(tmp_path / "empty")
    assert "plan.tsv" in refusal(tmp_path / "none")
    (tmp_path / "empty" / "plan.tsv").write_text("estimators\trloo\t1\tpython rloo.py\n")
    assert "no run of rloo is complete yet" in refusal(tmp_path / "empty")
    runs = write_runs(tmp_path / "other order", seeds=(1,))
    plan = runs / "plan.tsv"
    plan.write_text(plan.read_text() + "loss\tbackwards\t1\tpython rloo.py\n")
    write_run(runs / "backwards__1", {}, 1, order=-1)
    assert "backwards__1: was evaluated on other posts" in refusal(runs)
    runs = write_runs(tmp_path / "other flags", seeds=(1,))
    plan = runs / "plan.tsv"
    plan.write_text(plan.read_text() + "estimators\tgrpo\t2\tpython rloo.py\n")
    write_run(runs / "grpo__2", {"advantage_estimator": "drgrpo"}, 2)
    assert "grpo__2: has other flags" in refusal(runs)


# ---- run_options.sh, with a program in python's place that writes what it is told to do ------------------------------

STAND_IN = """#!/bin/sh
echo "$@" >> calls.txt
case "$*" in
    *options_report.py*) exit 0 ;;
    *kl_coef_0.1__2*) echo "rloo.py: it went wrong"; exit 1 ;;
esac
echo "The policy and its tokenizer: here"
"""


def script(folder: Path, *flags: str) -> subprocess.CompletedProcess:
    """run_options.sh in a folder of its own, where PYTHON is the stand-in."""
    (folder / "benchmark" / "options").mkdir(parents=True, exist_ok=True)
    (folder / "benchmark" / "options" / "run_options.sh").write_text((HERE / "run_options.sh").read_text())
    stand_in = folder / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    return subprocess.run(
        ["bash", "benchmark/options/run_options.sh", *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": str(stand_in)},
    )


def test_script_names_what_failed_and_goes_on_with_that_alone(tmp_path):
    done = script(tmp_path, "--quick", "--jobs", "8")
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert done.returncode == 1 and "kl_coef_0.1__2 failed: rloo.py: it went wrong" in done.stderr
    assert len(calls) == 18 * 2 + 1 and "options_report.py --runs runs/options-quick" in calls[-1]
    assert len({re.search(r"--output_dir (\S+)", call)[1] for call in calls[:-1]}) == 36
    plan = [line.split("\t") for line in (tmp_path / "runs/options-quick/plan.tsv").read_text().splitlines()]
    assert {len(line) for line in plan} == {4} and {line[2] for line in plan} == {"1", "2"}
    assert plan[0][1] == options_report.DEFAULT and len({line[0] for line in plan}) == 5
    again = script(tmp_path, "--quick")
    assert again.returncode == 1
    calls = (tmp_path / "calls.txt").read_text().splitlines()[len(calls) :]
    assert len(calls) == 2 and "kl_coef_0.1__2 --resume" in calls[0]


def test_script_prints_commands_that_rloo_takes(tmp_path):
    done = script(tmp_path, "--dry_run")
    assert done.returncode == 0 and not (tmp_path / "calls.txt").exists() and not (tmp_path / "runs").exists()
    commands = done.stdout.splitlines()
    assert len(commands) == 62
    seen = set()
    for command in commands:
        args = rloo.parse_args(command.split("rloo.py ")[1].split())
        assert args.per_device_train_batch_size % args.rloo_k == 0
        seen.add(
            (
                args.advantage_estimator,
                args.kl_level,
                args.kl_coef,
                args.rloo_k,
                args.loss_aggregation,
                args.kl_in_reward,
                args.normalize_reward,
                args.normalize_advantage,
                args.reward_clip_range,
            )
        )
    assert len(seen) == 18
    for flags in (["--jobs", "0"], ["--jobs"], ["--fast"]):
        done = script(tmp_path, *flags)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
