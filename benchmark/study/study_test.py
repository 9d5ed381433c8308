"""Tests of the study: posts, measuring, runs, best-of-n, variants, and the page against its records.

python -m pytest -q benchmark/study
"""

import itertools
import json
import math
import shutil
import sys
from pathlib import Path

import measure
import numpy as np
import overoptimise
import peers
import pytest
import reach
import torch
import tyro
import variants
from measure import common

import rloo
from benchmark.trl import run as trl_run

PAGE = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def parsed(words: list[str]):
    """The flags of a command of rloo.py."""
    return rloo.resolve_args(tyro.cli(rloo.Args, args=words, use_underscores=True))


# ---- Posts and measuring ---------------------------------------------------------------------------------------------


def test_fresh_posts_share_no_combination_of_facts_and_are_always_the_same(monkeypatch):
    kinds = [measure.shipped_combinations()]
    for kind, size in measure.FRESH.items():
        kinds.append({measure.combination(post) for post in measure.fresh_posts()[kind]})
        assert len(kinds[-1]) == size  # none twice
    for one, other in itertools.combinations(kinds, 2):
        assert not one & other
    first = measure.fresh_posts()["test"][:5]
    monkeypatch.setattr(measure, "FRESH", {"test": 5})
    assert measure.fresh_posts.__wrapped__()["test"] == first != measure.fresh_posts()["validation"][:5]


def test_values_belong_to_their_posts(monkeypatch):
    monkeypatch.setattr(measure, "CHUNK", 4)  # several forward passes, in the order of lengths
    posts = measure.fresh_posts()["validation"][:12]
    policy = measure.engine().reference
    found = measure.grade(policy, posts, 1, seed=1, temperature=0.0)
    turned = measure.grade(policy, posts[::-1], 1, seed=1, temperature=0.0)
    for name, values in found.items():
        assert np.allclose(values, turned[name][::-1], atol=1e-4), name
    assert not found["kl"].any() and found["score"].std() > 0.1 and set(found["win"].flatten()) >= {0, 1}


def test_the_policy_has_no_kl_from_itself_and_another_has():
    posts = measure.fresh_posts()["validation"][:4]
    other = measure.engine().read(common.TASK / "sft")  # not known to be the reference
    assert np.abs(measure.grade(other, posts, 2, seed=1)["kl"]).max() < 1e-3
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    assert measure.grade(other, posts, 8, seed=1)["kl"].mean() > 0.1


# ---- Runs ------------------------------------------------------------------------------------------------------------


def test_rloos_defaults_are_those_of_the_study():
    """Without any flag, and by the command of the default's runs."""
    plain, ours = parsed(["--seed", "3"]), parsed(reach.ROWS["default"].setting.flags(seed=3))
    plain.output_dir = ours.output_dir
    assert plain == ours


@pytest.mark.parametrize("name", peers.ROWS)
def test_what_runs_a_method_takes_its_flags(name):
    row = peers.ROWS[name]
    script, *words = row.command(5)
    if name == "value":  # the rest are flags of rloo.py
        assert script.endswith("value.py") and words[:2] == ["--value_model_path", "benchmark/mini_tldr/reward"]
        del words[:2]
    if row.environment:
        args = trl_run.parse_args([*words, "--output_dir", "out"])
        assert (args.trainer, args.num_ppo_epochs) == (name, 4 if name == "ppo" else 1)
    else:
        assert name in ("rloo", "value") or words.pop(0) in variants.ADVANTAGES
        args = parsed([*words, *row.setting.own_flags(), "--output_dir", "out"])
        assert args.resume and args.save_total_limit == 1
    assert (args.seed, args.learning_rate, args.kl_coef) == (5, row.setting.lr, row.setting.beta)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == row.setting.size


def test_records_are_of_the_commands_that_would_be_run():
    commands = {reach.RECORDS: {}, peers.RECORDS: {}, overoptimise.RECORDS: {}}
    for row in reach.ROWS.values():
        for seed, name in zip(row.seeds, row.names()):
            commands[reach.RECORDS][name] = ["rloo.py", *row.setting.flags(seed)]
    for key, row in peers.ROWS.items():
        commands[peers.RECORDS] |= {name: row.command(int(name[-1])) for name in peers.names_of(key)}
    for row in overoptimise.ROWS.values():
        commands[overoptimise.RECORDS] |= {name: row.command(int(name[-1])) for name in row.names()}
    for path, expected in commands.items():
        recorded = {name: x["command"] for name, x in common.Records(path).all.items() if "command" in x}
        assert recorded == {name: " ".join(command) for name, command in expected.items()}


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    """Runs train nothing. Returns the commands that would have been run."""
    commands = []

    def run(command, log):
        commands.append([str(word) for word in command])
        folder = log.with_suffix("")
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()
        metrics = [{"time/train": 1.5, "objective/kl": 9.0}, {"time/train": 2.0, "time/rollout": 1, "objective/kl": 2}]
        metrics.append({"objective/kl": 4})
        evaluations = [
            {"update": n, "episode": 32 * n, "sampled/score": n, "sampled/gold_win_rate": 1, "greedy/gold_win_rate": n}
            for n in (0, 1, 3)
        ]
        for file, lines in (("metrics", metrics), ("evaluations", evaluations)):
            (folder / f"{file}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    found = {mode: dict.fromkeys(("win", "score", "kl"), [0.5, 0.1]) for mode in ("sampled", "greedy")}
    monkeypatch.setattr(common, "run_logged", run)
    monkeypatch.setattr(common, "folder_of_runs", lambda room, again: tmp_path / ("again" if again else "runs"))
    monkeypatch.setattr(measure, "measured", lambda *_, **__: found)
    for room in (reach, peers):
        monkeypatch.setattr(room, "RECORDS", tmp_path / f"{room.__name__}.json")
        monkeypatch.setattr(room, "HERE", tmp_path)  # no page there: to write one is an error
    return commands


def test_a_run_is_made_once_recorded_and_again_only_if_asked(pretended, capsys, monkeypatch):
    monkeypatch.setattr(reach, "report", lambda records: print("report"))
    for again in (False, False, True):
        reach.main(("default",), seeds=2, again=again)
    assert len(pretended) == 2 + 2 and "/again/" in pretended[-1][-1]
    assert [parsed(command[2:]).seed for command in pretended] == [7, 8, 7, 8]
    records = common.Records(reach.RECORDS)
    first, second = (records.all[name] for name in reach.ROWS["default"].names()[:2])
    assert (first["seconds"], first["second_test"]["sampled"]["win"]) == (4.5, [0.5, 0.1]) and "made" in second
    course = {"episode": [0, 32, 96], "score": [0, 1, 3], "win": [1, 1, 1], "greedy": [0, 3], "kl_between": [9.0, 3.0]}
    assert {key: records.all["course__7"][key] for key in course} == course
    said = capsys.readouterr().out
    made = first["made"]
    assert f"episodes6400__8: recorded with rloo.py {made['rloo.py']}, {made['date']}; --again" in said
    assert "episodes6400__7, second_test, sampled, win: as recorded" in said


def test_a_method_of_trl_is_run_by_its_own_python_and_others_can_go_on(pretended):
    peers.main(("grpo", "ppo", "raft"), trl1="trl1/bin/python")
    theirs, ours = pretended[0], pretended[5]
    assert theirs[:3] == ["trl1/bin/python", "benchmark/trl/run.py", "grpo"] and "--resume" not in theirs
    assert ours[:3] == [sys.executable, "benchmark/study/variants.py", "raft"] and "--resume" in ours
    assert len(pretended) == 10 and common.Records(peers.RECORDS).all["grpo__2"]["test"]["sampled"]["win"] == [0.5, 0.1]


# ---- Reward models from comparisons ----------------------------------------------------------------------------------


def test_a_reward_model_is_trained_on_comparisons(tmp_path, monkeypatch):
    shutil.copytree(common.TASK / "reward", tmp_path / "start")
    for name, value in {"PROXY_FOLDER": tmp_path, "SEEN": 16, "PROXIES": {"8": 8}}.items():
        monkeypatch.setattr(overoptimise, name, value)
    monkeypatch.setitem(measure.fresh_posts(), "comparisons", measure.fresh_posts()["comparisons"][:16])
    pairs = {}
    for noise in (1, 0):
        monkeypatch.setattr(measure.mini_tldr, "LABEL_NOISE", noise)
        overoptimise.comparisons.cache_clear()
        pairs[noise] = overoptimise.comparisons()
    assert [(x["better"], x["worse"]) for x in pairs[0]] == [(x["worse"], x["better"]) for x in pairs[1]]
    ids = torch.tensor([[[5, 6, 7 + i] for i in range(16)]])
    posts = measure.fresh_posts()["comparisons"]
    scores = overoptimise.reward_of("8")(rloo.make_batch(measure.engine().examples(posts), ids, [0]))
    assert scores.shape == (1, 16) and scores.std() > 1e-3


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
    policy = engine.read(common.TASK / "sft").requires_grad_(True)
    scores = torch.tensor([[0.5, 2.0, -1.0], [1.5, 0.3, -0.2]])  # (k, B)
    monkeypatch.setattr(rloo, "advantage", variants.ADVANTAGES[variant])
    stop_ids = [engine.tokenizer.eos_token_id]
    collected = rloo.collect(args, policy, policy, {"given": lambda _: scores}, examples, stop_ids)
    logprobs, _ = rloo.completion_logprobs(policy, collected.batch, args.temperature)
    best = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    plain = ({"no_baseline": scores, "raft": best}[variant] * logprobs.sum(-1)).mean()
    expected = torch.autograd.grad(plain, list(policy.parameters()))
    before = [x.detach().clone() for x in policy.parameters()]
    rloo.improve(args, policy, policy, torch.optim.SGD(policy.parameters(), lr=1.0), collected)
    for old, new, gradient in zip(before, policy.parameters(), expected):
        assert torch.allclose(new - old, gradient, atol=2e-6, rtol=1e-3)
    assert max(gradient.abs().max() for gradient in expected) > 1e-3


# ---- The page --------------------------------------------------------------------------------------------------------


def test_the_page_has_the_tables_of_the_records():
    records = common.Records(overoptimise.RECORDS)
    tables = {
        "reached": reach.table(common.Records(reach.RECORDS)),
        "peers": peers.table(common.Records(peers.RECORDS)),
        "overoptimised": overoptimise.table(records),
    }
    assert common.filled(PAGE, tables) == PAGE


def test_verdicts_and_orders_of_the_page_are_those_of_the_records():
    found = common.differences(peers.wins(common.Records(peers.RECORDS)), "rloo")
    assert found["ppo"].low > 0 > found["grpo"].low and found["grpo"].high > 0
    assert max(found["raft"].high, found["no_baseline"].high) < 0
    records = common.Records(reach.RECORDS)
    wins = {name: measure.means(records, row.names(), row.kind, "win") for name, row in reach.ROWS.items()}
    assert max(wins["default"]) < min(wins["beta0.05"])
    best_of = records.all["sft"]["best_of_n"]
    assert best_of["4"]["win"][0] < np.mean(wins["default"]) < best_of["8"]["win"][0]
    records = common.Records(overoptimise.RECORDS)
    by_judge = {name: overoptimise.along(records, name, "win") for name in overoptimise.ROWS}
    for name in ("100", "500", "2000", "4800"):
        assert (by_judge[name][:, 1:3].max(1) > 38).all() and (by_judge[name][:, -1] < 34).all()
        assert (overoptimise.along(records, name, "proxy_win")[:, -1] > 90).all()
    assert by_judge["500_beta0.3"][:, -1].mean() > by_judge["500"].max(1).mean()
