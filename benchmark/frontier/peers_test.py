"""Tests of the comparison with peers: gradients of the variants, trials and their choice, commands, tables, curves.

python -m pytest -q benchmark/frontier/peers_test.py
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import measure  # noqa: E402
import peers  # noqa: E402
import peers_report  # noqa: E402
import peers_trl  # noqa: E402
import usage  # noqa: E402
import variants  # noqa: E402

import rloo  # noqa: E402

RLOO, PPO, RAFT = (peers.BY_NAME[name] for name in ("rloo", "ppo", "raft"))


# ---- The variants ----------------------------------------------------------------------------------------------------


def test_best_of_group():
    rewards = torch.tensor([[1.0, 2.0, math.nan], [3.0, 2.0, -1.0]])
    assert variants.best_of_group(rewards, "rloo").tolist() == [[0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("variant", ["no_baseline", "raft"])
def test_an_update_follows_the_plain_gradient(variant, monkeypatch):
    engine = measure.Engine()
    policy = rloo.load_model(engine.args, "--policy", str(measure.TASK / "sft"), trained=True)
    rows = engine.rows(measure.fresh_posts("validation", 3))
    torch.manual_seed(1)
    batch, sampled = rloo.rollout(policy, rows, 2, 0.7, response_length=6, stop_ids=engine.stop_ids)
    scores = torch.tensor([[0.5, 2.0, -1.0], [1.5, 0.3, -0.2]])  # (k, B)
    best = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])

    # The mean over all k·B completions of R · log π(y), or of log π(y) of the best ones.
    logprobs, _ = rloo.completion_logprobs(policy, batch, 0.7)
    plain = ({"no_baseline": scores, "raft": best}[variant] * logprobs.sum(-1)).mean()
    expected = torch.autograd.grad(plain, list(policy.parameters()))

    monkeypatch.setattr(rloo, "rollout", lambda *_, **options: (batch, sampled))
    monkeypatch.setattr(rloo, "advantage", variants.ADVANTAGES[variant])
    flags = {"rloo_k": 2, "kl_coef": 0.0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    args = rloo.resolve_args(rloo.Args(**flags, max_grad_norm=0.0))
    before = [x.detach().clone() for x in policy.parameters()]
    step = torch.optim.SGD(policy.parameters(), lr=1.0)
    metrics = rloo.update(args, policy, None, {"given": lambda _: scores}, step, rows, {}, "group")
    assert metrics["grad_norm"] > 0.1
    for old, new, gradient in zip(before, policy.parameters(), expected):
        assert torch.allclose(new - old, gradient, atol=2e-6, rtol=1e-3)


def test_raft_with_a_kl_weight_chooses_by_score_less_kl():
    scores, kl = torch.tensor([[1.0], [0.9]]), torch.tensor([[[8.0, 2.0]], [[1.0, 0.0]]])
    chosen = [variants.best_of_group(rloo.rlhf_reward(scores, kl, beta), "rloo").tolist() for beta in (0.0, 0.05)]
    assert chosen == [[[1.0], [0.0]], [[0.0], [1.0]]]


def test_figures_of_an_update_are_added():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([weight])

    def update(*_):
        weight.sum().backward()
        optimizer.step()
        optimizer.step()
        return {"objective/scores": 1.0}

    found = variants.measured(update)("args", "policy", "reference", "rewards", optimizer, "rows")
    assert (found["objective/scores"], found["optimizer_steps"]) == (1.0, 2)
    assert found["cpu_seconds"] >= 0 and found["memory/hwm_gb"] > 0.01


def test_peak_memory_is_that_of_the_process_and_not_of_its_parent():
    ballast = np.ones(2**27, np.uint8)
    code = "import usage; print(usage.peak_memory())"
    found = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, check=True)
    assert 0 < float(found.stdout) < 0.05 < len(ballast) / 2**30 < usage.peak_memory()


# ---- TRL's side ------------------------------------------------------------------------------------------------------


def test_both_trainers_logs_become_lines_by_the_same_names(tmp_path):
    marks = peers_trl.Marks(tmp_path / "metrics.jsonl", 128)
    marks.on_train_begin()
    optimizer = SimpleNamespace(state={"weight": {"step": torch.tensor(4.0)}})
    for logs in (
        {"objective/scores": 1.5, "objective/kl": 2.0},  # PPO's
        {"reward": 1.6, "kl": 0.1, "completions/mean_length": 20.0},  # GRPO's
        {"reward": 1.7},  # GRPO's with β = 0
        {"train_runtime": 3.0},  # at the end
    ):
        marks.on_log(None, None, None, logs, optimizer, model="policy")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["objective/scores"] for line in lines] == [1.5, 1.6, 1.7]
    assert [line.get("objective/kl") for line in lines] == [2.0, 2.0, None]
    assert [line["episode"] for line in lines] == [128, 256, 384]
    assert {line["optimizer_steps"] for line in lines} == {4}


# ---- Trials and their choice -----------------------------------------------------------------------------------------


def rates_and_betas(trials) -> list[tuple[float, float]]:
    return [(trial.lr, trial.beta) for trial in trials if trial.size == 128]


def test_trials_follow_the_best_learning_rate():
    first = peers.Trial(RLOO, 4e-4, 0.05)
    wins = {}

    def plan(number=6):
        return rates_and_betas(peers.planned(first, number, lambda trial: wins.get((trial.lr, trial.beta))))

    begin = [(4e-4, 0.05), (2e-4, 0.05), (8e-4, 0.05)]
    assert plan() == begin
    wins |= {begin[0]: 0.60, begin[1]: 0.61}
    assert plan() == begin  # one is missing
    for win, fourth in ((0.5, 1e-4), (0.7, 1.6e-3)):  # the best one is the lowest, the highest
        wins[begin[2]] = win
        assert plan() == [*begin, (fourth, 0.05)]
        assert plan(3) == begin
    wins |= {begin[0]: 0.65, begin[2]: 0.62}  # the middle, and the upper one is its better neighbour
    assert plan() == [*begin, (5.7e-4, 0.05)]
    wins[5.7e-4, 0.05] = 0.5
    assert plan() == [*begin, (5.7e-4, 0.05), (4e-4, 0.02)]
    assert plan(4) == [*begin, (5.7e-4, 0.05)]
    for win, beta in ((0.5, 0.05), (0.7, 0.02)):  # the other β is worse, or better
        wins[4e-4, 0.02] = win
        last = peers.planned(first, 6, lambda trial: wins.get((trial.lr, trial.beta)))[5]
        assert (last.size, last.lr, last.beta) == (32, 2e-4, beta)
        assert last.name == f"rloo_lr0.0002_size32_beta{beta}"


def test_all_methods_have_the_same_number_of_different_trials():
    wins = iter(np.random.default_rng(1).random(1_000))
    for method in peers.METHODS:
        if not method.like:
            found = {}
            first = peers.Trial(method, method.lr, method.betas[0])
            while len(trials := peers.planned(first, 6, found.get)) > len(found):
                found |= {trial: next(wins) for trial in trials if trial not in found}
            assert len(set(trials)) == len({trial.name for trial in trials}) == 6
    assert len(peers.BY_NAME) == len(peers.METHODS)


def test_commands_have_the_completions_and_settings_that_they_say():
    for method in peers.METHODS:
        trial = peers.Trial(method, 3e-4, 0.02)
        python, script, *words = trial.command(seed=5)
        if method.trainer:
            args = peers_trl.parse_args([*words, "--output_dir", "out"])
            assert (args.trainer, args.size, args.episodes, args.beta) == (method.trainer, 128, 6_400, 0.02)
            assert python == {"ppo": "trl0/bin/python", "grpo": "trl1/bin/python"}[args.trainer]
            assert args.trainer == "grpo" or (args.epochs, args.value_model) == (method.epochs, method.value_model)
            assert args.trainer == "ppo" or args.k == method.k
        else:
            assert words[0] == method.variant in variants.ADVANTAGES
            args = rloo.parse_args(words[1:])
            size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.num_mini_batches
            assert (size, args.total_episodes, args.kl_coef) == (128, 6_400, 0.02)
            assert (args.rloo_k, args.num_ppo_epochs) == (method.k, method.epochs)
        assert (args.seed, args.learning_rate) == (5, 3e-4)
        assert (measure.ROOT / script).is_file()


def study_with(tmp_path, methods, wins: dict, trials=3) -> peers.Peers:
    """A study in which all trials of the methods have been made: (method's name, learning rate) -> win rate."""
    plan = peers.Plan(methods=methods, trials=trials, test_posts=4, at_episodes=(128, 256), at_seconds=(10, 20))
    study = peers.Peers(plan, tmp_path / "runs", tmp_path / "results", {"trl0": "python", "trl1": "python"})
    part = {name: {"mean": 1.0, "stderr": 0.1} for name in ("gold", "kl", "length")}
    for method in methods:
        for trial in study.trials(method):
            win = wins[method.name, trial.lr]
            found = {"sampled": part | {"win": {"mean": win, "stderr": 0.01}, "score": {"mean": 2.0, "stderr": 0.1}}}
            study.runs.add(f"{trial.name}__1", validation=found, cpu_seconds=80.0, command=" ".join(trial.command(1)))
        best = study.best(method)
        found = {"sampled": found["sampled"] | {"win": {"mean": wins[method.name, best.lr], "stderr": 0.01}}}
        found["greedy"] = found["sampled"]
        for seed in plan.seeds:
            record = {"test": found, "cpu_seconds": 20.0, "optimizer_steps": 2 * method.epochs, "peak_memory": 0.7}
            steps = [method.epochs, 2 * method.epochs]
            curve = {"scores": [1.0, 1.5], "cpu_seconds": [8.0, 12.0], "optimizer_steps": steps}
            study.runs.add(f"{best.name}__{seed}", **record, curve=curve)
            per_post = np.rint(20 * (wins[method.name, best.lr] + 0.05 * np.array([-1, 0, 0, 1]))).tolist()
            study.posts.add(f"{best.name}__{seed}", **{"test/sampled/win": per_post, "test/sampled/gold": per_post})
    study.runs.add("sft", test=found)
    return study


def wins_of(method, low, middle, high) -> dict:
    return {(method.name, method.lr * factor): win for factor, win in ((0.5, low), (1, middle), (2, high))}


def test_the_best_trial_is_chosen_once_all_are_made(tmp_path):
    study = study_with(tmp_path, (RLOO,), wins_of(RLOO, 0.60, 0.62, 0.61))
    assert study.best(RLOO) == peers.Trial(RLOO, 5e-4, 0.05)
    taken_over = study.best(peers.BY_NAME["rloo_k2"])
    assert (taken_over.lr, taken_over.beta, taken_over.method.k) == (5e-4, 0.05, 2)
    assert (study.seeds(RLOO), study.seeds(taken_over.method)) == ((2, 3, 4, 5, 6), (2, 3, 4))
    assert study.best(PPO) is None
    study.plan = replace(study.plan, trials=6)
    assert study.best(RLOO) is None


def test_what_is_recorded_is_not_made_again_and_the_rest_is_made_one_by_one(tmp_path, monkeypatch):
    study = study_with(tmp_path, (RLOO,), wins_of(RLOO, 0.60, 0.62, 0.61))
    study.plan = replace(study.plan, trials=6)
    made = []

    def validate(trial, seed, greedy):
        made.append((trial.lr, trial.beta, seed))
        found = {"sampled": {"win": {"mean": 0.5, "stderr": 0.1}}}
        study.runs.add(f"{trial.name}__{seed}", validation=found)

    monkeypatch.setattr(study, "validate", validate)
    study.tune(RLOO)
    assert made == [(7.1e-4, 0.05, 1), (5e-4, 0.02, 1), (2.5e-4, 0.05, 1)]  # the last in smaller updates
    study.tune(RLOO)
    assert len(made) == 3
    monkeypatch.setattr(study, "train", lambda *_: pytest.fail("trained again"))
    study.repeat(RLOO)


def test_a_run_that_diverges_is_a_result_and_any_other_failure_an_error(tmp_path, monkeypatch):
    study = study_with(tmp_path, (RLOO,), wins_of(RLOO, 0.60, 0.62, 0.61))
    trial = peers.Trial(RLOO, 1e-2, 0.05)
    log = Path(f"{study.folder / trial.name}__1.log")

    def fail(command, path):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(peers.frontier, "run_logged", fail)
    log.write_text("no such file")
    with pytest.raises(subprocess.CalledProcessError):
        study.measure_unless_diverged(study.validate, trial, 1, False)
    assert study.win(trial) is None
    log.write_text("rloo.py: the loss is not finite: lower --learning_rate")
    study.measure_unless_diverged(study.validate, trial, 1, False)
    assert study.win(trial) == 0.0


# ---- Tables and curves -----------------------------------------------------------------------------------------------


def test_tables_say_who_is_ahead_and_the_page_has_all_trials(tmp_path):
    wins = wins_of(RLOO, 0.50, 0.60, 0.55) | wins_of(PPO, 0.50, 0.70, 0.55) | wins_of(RAFT, 0.40, 0.50, 0.45)
    study = study_with(tmp_path, (RLOO, PPO, RAFT), wins)
    page = study.results / "README.md"
    names = ("peers", "claims", "budgets", "tuning")
    page.write_text("before\n" + "".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in names) + "after\n")
    peers_report.write_tables(study)
    text = page.read_text()
    assert "- **Ahead of RLOO, k = 4**, points of the gold win rate: PPO (+10.0 [+10.0, +10.0])." in text
    assert "- **Behind RLOO, k = 4**, points of the gold win rate: RAFT, k = 4 (-10.0 [-10.0, -10.0])." in text
    assert text.index("| PPO | 0.0002 |") < text.index("| RLOO, k = 4 | 0.0005 |") < text.index("| RAFT, k = 4 |")
    assert "| RLOO beats PPO | 5 | -10.0 [-10.0, -10.0] | behind |" in text
    assert "| RLOO beats RAFT, k = 4 | 5 | +10.0 [+10.0, +10.0] | ahead |" in text
    assert "| PPO | 3 | 0.0001, 0.0002, 0.0004 | 0.05 | 0.0002, β = 0.05, 128 completions | 70.0, 55.0, 50.0 |" in text
    trials = (study.results / "trials.md").read_text()
    assert trials.count("benchmark/frontier/variants.py") == 6 and trials.count("trl0/bin/python") == 3
    assert "| **1** | 70.0 (± 1.0) |" in trials


def test_pages_without_any_run_say_so(tmp_path):
    plan = peers.Plan(methods=(RLOO, PPO))
    study = peers.Peers(plan, tmp_path / "runs", tmp_path / "results", {})
    peers_report.write_tables(study)
    peers_report.draw_picture(study)
    assert (study.results / "tables.md").read_text().count("*(not measured yet)*") == 4
    assert not (study.results / "peers.png").exists()


def test_scores_at_equal_budgets(tmp_path):
    study = study_with(tmp_path, (PPO,), wins_of(PPO, 0.50, 0.70, 0.55))
    found = peers_report.curves(study, study.best(PPO))
    assert found["score"][0].tolist() == [1.25, 1.25, 2.0]  # the means of up to 5 updates, then test posts
    assert found["episodes"][0].tolist() == [0, 128, 256]
    assert found["CPU seconds"][0].tolist() == [0, 8, 20]
    assert found["optimizer steps"][0].tolist() == [0, 4, 8]
    assert np.allclose(peers_report.score_at(found, "CPU seconds", 14), 1.625)
    assert peers_report.score_at(found, "episodes", 257) is None


def test_moving_means():
    assert peers_report.smoothed(np.arange(7.0), 128).tolist() == [1.0, 1.5, 2.0, 3.0, 4.0, 4.5, 5.0]
