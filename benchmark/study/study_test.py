"""Tests of the study: posts, measuring, runs, best-of-n, variants, and the page against its records.

python -m pytest -q benchmark/study
"""

import itertools
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trl")]
import measure  # noqa: E402
import peers  # noqa: E402
import reach  # noqa: E402
import run as trl_run  # noqa: E402
import variants  # noqa: E402
from measure import Setting, common  # noqa: E402

import rloo  # noqa: E402

PAGE = (HERE / "README.md").read_text(encoding="utf-8")


# ---- Posts and measuring ---------------------------------------------------------------------------------------------


def test_fresh_posts_share_no_combination_of_facts_and_are_always_the_same():
    kinds = [measure.shipped_combinations()]
    for kind, size in measure.FRESH.items():
        kinds.append({measure.combination(post) for post in measure.fresh_posts()[kind]})
        assert len(kinds[-1]) == size  # none twice
    for one, other in itertools.combinations(kinds, 2):
        assert not one & other
    first = measure.fresh_posts()["test"][:5]
    measure.fresh_posts.cache_clear()
    assert measure.fresh_posts()["test"][:5] == first != measure.fresh_posts()["validation"][:5]


@pytest.fixture
def small_chunks(monkeypatch):
    """Several forward passes, in the order of lengths."""
    monkeypatch.setattr(measure, "CHUNK", 4)


def test_values_belong_to_their_posts(small_chunks):
    posts = measure.fresh_posts()["validation"][:12]
    policy = measure.engine().reference
    found = measure.grade(policy, posts, 1, seed=1, temperature=0.0)
    turned = measure.grade(policy, posts[::-1], 1, seed=1, temperature=0.0)
    for name, values in found.items():
        assert np.allclose(values, turned[name][::-1], atol=1e-4), name
    assert not found["kl"].any() and found["score"].std() > 0.1 and set(found["win"].flatten()) >= {0, 1}


def test_the_policy_has_no_kl_from_itself_and_another_has(small_chunks):
    posts = measure.fresh_posts()["validation"][:4]
    other = measure.engine().policy(common.TASK / "sft")  # not known to be the reference
    assert np.abs(measure.grade(other, posts, 2, seed=1)["kl"]).max() < 1e-3
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    assert measure.grade(other, posts, 8, seed=1)["kl"].mean() > 0.1


# ---- Runs ------------------------------------------------------------------------------------------------------------


def test_rloos_defaults_are_those_of_the_study():
    """Without any flag, and by the command of the default's runs."""
    plain, ours = (
        rloo.resolve_args(rloo.parse_args(words))
        for words in (["--seed", "3"], reach.ROWS["default"].setting.flags(seed=3))
    )
    plain.output_dir = ours.output_dir
    assert plain == ours


@pytest.mark.parametrize("name", peers.ROWS)
def test_a_method_has_the_settings_that_its_row_says(name):
    row = peers.ROWS[name]
    script, *words = row.command(5)
    assert (common.ROOT / script).is_file()
    if row.environment:
        args = trl_run.parse_args([*words, "--output_dir", "out"])
        assert args.trainer == name.split("_")[0] and args.num_ppo_epochs == (4 if name in ("ppo", "ppo_policy") else 1)
        assert (args.value_model_path is None) == (name != "ppo_policy")
    else:
        variant = [words.pop(0)] if script.endswith("variants.py") else []
        assert not variant or variant[0] in variants.ADVANTAGES
        args = rloo.resolve_args(rloo.parse_args([*words, *row.setting.own_flags(), "--output_dir", "out"]))
        assert args.resume and args.save_total_limit == 1
    assert (args.seed, args.learning_rate, args.kl_coef) == (5, row.setting.lr, row.setting.beta)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == row.setting.size
    assert (args.rloo_k, args.total_episodes) == (row.setting.k, 6_400)


def test_records_are_of_the_commands_that_would_be_run():
    records = common.Records(reach.RECORDS)
    for row in reach.ROWS.values():
        for seed, name in zip(row.seeds, row.names()):
            assert records.all[name]["command"] == " ".join(["rloo.py", *row.setting.flags(seed)])
            assert ("curve" in records.all[name]) == (seed in row.curve_seeds)
    records = common.Records(peers.RECORDS)
    for key, row in peers.ROWS.items():
        for name in peers.names(key):
            assert records.all[name]["command"] == " ".join(row.command(int(name[-1])))
    assert len(records.all) == sum(row.seeds for row in peers.ROWS.values())  # no others


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """Runs train nothing, and a checkpoint's win rate is its number. Returns the commands that would have been run, and
    the folders that would have been measured."""
    commands, folders = [], []

    def run(command, log):
        commands.append([str(word) for word in command])
        folder = log.with_suffix("")
        for name in ("checkpoint-2", "checkpoint-10", "."):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").touch()
        (folder / "metrics.jsonl").write_text('{"time/train": 1.5, "lr": 9}\n{"time/train": 2.0, "time/rollout": 1}\n')

    def measured(folder, kind, posts, seed, greedy=False):
        folders.append(folder)
        win = [float(folder.name.removeprefix("checkpoint-")) if "checkpoint" in folder.name else 0.5, 0.1]
        return {mode: dict.fromkeys(("win", "score", "kl"), win) for mode in ("sampled", "greedy")}

    monkeypatch.setattr(measure, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(common, "run_logged", run)
    monkeypatch.setattr(measure, "measured", measured)
    return commands, folders


def test_a_run_is_made_once_measured_along_the_way_and_recorded(tmp_path, pretended):
    records = common.Records(tmp_path / "records.json")
    row = reach.Row("some", Setting(episodes=320), (7, 8), curve_seeds=(8,))
    for _ in range(2):
        reach.make(records, row)
    commands, folders = pretended
    assert (len(commands), len(folders)) == (2, 4) and json.loads(records.path.read_text()) == records.all
    args = rloo.parse_args(commands[1][2:])
    assert (args.seed, args.save_steps, args.save_total_limit, args.resume) == (8, 2, 8, True)
    first, second = (records.all[name] for name in row.names())
    assert (first["seconds"], first["test"]["sampled"]["win"]) == (4.5, [0.5, 0.1]) and "curve" not in first
    assert [(point["episode"], point["win"]) for point in second["curve"]] == [(64, 2.0), (320, 10.0)]


def test_a_method_of_trl_is_run_by_its_own_python_and_others_can_go_on(tmp_path, pretended):
    records = common.Records(tmp_path / "records.json")
    peers.make(records, "grpo", "trl1/bin/python")
    assert len(records.all) == 5 and records.all["grpo__2"]["test"]["sampled"]["win"] == [0.5, 0.1]
    peers.make(records, "raft", sys.executable)
    theirs, ours = pretended[0][0], pretended[0][5]
    assert theirs[:3] == ["trl1/bin/python", "benchmark/trl/run.py", "grpo"] and "--resume" not in theirs
    assert ours[:3] == [sys.executable, "benchmark/study/variants.py", "raft"] and "--resume" in ours


# ---- Best of n, and variants -----------------------------------------------------------------------------------------


def test_best_of_n_is_the_mean_over_all_choices_of_n():
    rng = np.random.default_rng(1)
    scores, values = rng.integers(0, 4, (3, 7)).astype(float), rng.normal(size=(3, 7))  # with ties
    for n in (1, 2, 3, 7):
        weights = reach.best_of_n_weights(scores, n)
        for line in range(3):
            means = []
            for chosen in itertools.combinations(range(7), n):
                highest = max(scores[line, i] for i in chosen)
                means.append(np.mean([values[line, i] for i in chosen if scores[line, i] == highest]))
            assert math.isclose((weights[line] * values[line]).sum(), np.mean(means), abs_tol=1e-12)
    found = reach.best_of({"score": scores, "kl": 0 * scores}, 4)  # log 4 - 3/4
    assert math.isclose(found["kl"][0], 0.63629, abs_tol=1e-5)


@pytest.mark.parametrize("variant", ["no_baseline", "raft"])
def test_an_update_follows_the_plain_gradient(variant, monkeypatch):
    """The mean over all k·B completions of R · log π(y), or of log π(y) of the best ones."""
    flags = {"rloo_k": 2, "kl_coef": 0.0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    flags |= {"max_grad_norm": 0.0, "dtype": "float32", "device": "cpu", "response_length": 6}
    args, engine = rloo.resolve_args(rloo.Args(**flags)), measure.engine()
    examples = engine.examples(measure.fresh_posts()["validation"][:3])
    policy = rloo.load_model(args, str(common.TASK / "sft"), examples, trained=True)
    scores = torch.tensor([[0.5, 2.0, -1.0], [1.5, 0.3, -0.2]])  # (k, B)
    monkeypatch.setattr(rloo, "advantage", variants.ADVANTAGES[variant])
    collected = rloo.collect(
        args, policy, None, {"given": lambda _: scores}, examples, [engine.tokenizer.eos_token_id], 0
    )
    logprobs, _ = rloo.completion_logprobs(policy, collected.batch, args.temperature)
    best = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    plain = ({"no_baseline": scores, "raft": best}[variant] * logprobs.sum(-1)).mean()
    expected = torch.autograd.grad(plain, list(policy.parameters()))
    before = [x.detach().clone() for x in policy.parameters()]
    rloo.improve(args, policy, torch.optim.SGD(policy.parameters(), lr=1.0), collected)
    for old, new, gradient in zip(before, policy.parameters(), expected):
        assert torch.allclose(new - old, gradient, atol=2e-6, rtol=1e-3)
    assert max(gradient.abs().max() for gradient in expected) > 1e-3


# ---- The page --------------------------------------------------------------------------------------------------------


def test_the_page_has_the_tables_of_the_records():
    tables = {
        "reached": reach.table(common.Records(reach.RECORDS)),
        "peers": peers.table(common.Records(peers.RECORDS)),
    }
    assert common.filled(PAGE, tables) == PAGE


def test_verdicts_and_orders_of_the_page_are_those_of_the_records():
    verdicts = {row: x.verdict for row, x in peers.compared(common.Records(peers.RECORDS)).items()}
    told = {row: verdict for row, verdict in verdicts.items() if verdict != "not told apart"}
    assert told == {"ppo": "ahead"} | dict.fromkeys(("raft", "raft_k2", "raft_k8", "no_baseline"), "behind")
    records = common.Records(reach.RECORDS)
    wins = {name: measure.means(records, row.names(), row.kind, "win") for name, row in reach.ROWS.items()}
    above = {name: wins[name] for name in ("beta0.01", "beta0.02", "beta0.05", "beta0.1")}
    assert min(map(np.mean, above.values())) > np.mean(wins["default"])
    assert max(above, key=lambda name: np.mean(above[name])) == "beta0.05"
    assert common.differences(above, "beta0.05")["beta0.02"].verdict == "not told apart"
    assert max(wins["beta0"]) < min(map(min, above.values()))
    best_of = records.all["sft"]["best_of_n"]
    assert best_of["4"]["win"][0] < np.mean(wins["default"]) < best_of["8"]["win"][0]
