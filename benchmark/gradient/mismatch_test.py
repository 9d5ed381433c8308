"""Tests of mismatch.py and stale.py: samplers that differ, their figures, old weights, records and tables."""

import json
import os
import re

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import estimators
import mismatch
import pytest
import stale
import torch

import rloo

TOKENS, MASK = estimators.all_completions(3, 2)


def a_case() -> tuple[estimators.Case, torch.Tensor]:
    """A policy away from its reference, and the reference's parameters."""
    reference = torch.randn(15, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = estimators.make_scores("dense", len(TOKENS), 1)
    theta = estimators.move_away(reference, scores, TOKENS, MASK, 0.5)
    return estimators.make_case(theta, reference, scores, TOKENS, MASK, 0.3), reference


# ---- Samplers that differ --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mismatch.DIFFERENCES)
def test_a_sampler_is_a_distribution_that_differs_from_the_policy(name):
    start, reference = a_case()
    case, sampler = mismatch.differing(start, reference, *mismatch.DIFFERENCES[name], seed=1)
    assert sampler.sum(-1).exp().sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12)
    gap, share = mismatch.gap_and_share(case, sampler)
    assert 1e-3 < gap < 0.5 and 0.5 < share < 1


def test_the_policy_is_a_step_of_the_given_length_from_the_one_that_samples():
    start, reference = a_case()
    case, sampler = mismatch.differing(start, reference, "step", 0.1, seed=1)
    assert (case.theta - start.theta).norm().item() == pytest.approx(0.1)
    assert torch.equal(sampler, start.logprobs) and not torch.allclose(case.exact, start.exact)
    assert torch.equal(case.ref_logprobs, start.ref_logprobs)


def test_gap_and_share_are_those_of_samples():
    start, reference = a_case()
    case, sampler = mismatch.differing(start, reference, "logits", 0.5, seed=1)
    index = torch.multinomial(sampler.sum(-1).exp(), 50_000, True, generator=torch.Generator().manual_seed(1))
    difference = (case.logprobs - sampler)[torch.arange(2)[:, None], index]  # (B, draws, R)
    real = MASK[index]
    w = difference.sum(-1).exp()
    gap, share = mismatch.gap_and_share(case, sampler)
    assert difference[real].abs().mean().item() == pytest.approx(gap, rel=0.02)
    assert (w.mean() ** 2 / w.square().mean()).item() == pytest.approx(share, rel=0.02)


def test_the_exact_rows_have_no_bias_where_they_should_and_become_tables():
    rows = mismatch.measure_differences([1], rloo_k=(2,))
    assert len(rows) == 2 * 2 * len(mismatch.DIFFERENCES)
    for row in rows:
        bias = {label: values[0] for label, values in row["weights"].items()}
        full_support = row["sampler"] != "top-p 0.9"
        assert (bias[f"{mismatch.UNLIMITED}, sequence"] < 1e-10) == full_support
        assert bias["off"] > 1e-3 and bias[f"{mismatch.UNLIMITED}, token"] > 1e-4
    tables = mismatch.exact_tables(rows)
    assert list(tables) == ["bias", "cosine", "noise"]
    first = tables["bias"].splitlines()[2]
    values = sorted(row["weights"]["off"][0] for row in rows if row["sampler"] == "logits off by 0.02")
    assert first.startswith("| logits off by 0.02 |") and f"({values[-1]:.3f})" in first


# ---- Old weights -----------------------------------------------------------------------------------------------------


@pytest.fixture
def policy():
    stale.versions.clear()
    stale.copies.clear()
    folder = str(rloo.MINI_TLDR / "sft")
    args = rloo.Args(sft_model_path=folder, model_name_or_path=folder, dtype="float32", device="cpu")
    return rloo.load_model(args, "--sft_model_path", folder, trained=True)


PROMPTS = [[300 + i, 301, 302, 303][: 2 + i] for i in range(3)]


def sampled(engine, policy, version: int, k: int = 4):
    return engine(
        policy, PROMPTS, k=k, temperature=0.7, response_length=12, stop_ids=[0], seed=5, version=version, max_length=70
    )


def own(policy, k: int = 4):
    torch.manual_seed(5)
    return rloo.rollout(policy, [{"prompt_ids": ids} for ids in PROMPTS], k, 0.7, 12, [0])


def change(policy):
    with torch.no_grad():
        for x in policy.parameters():
            x.add_(0.02 * torch.randn_like(x))


def test_the_newest_weights_give_what_the_own_engine_gives(policy):
    tokens, logprobs = sampled(stale.updates_0, policy, 0)
    batch, expected = own(policy)
    flat = [ids for j in range(4) for ids in (group[j] for group in tokens)]
    assert flat == batch.completion_ids()
    numbers = [x for j in range(4) for group in logprobs for x in group[j]]
    assert numbers == expected[batch.response_mask].tolist()


def test_completions_come_from_weights_of_the_given_age_and_evaluations_from_those_of_now(policy):
    expected = []
    for version in range(8):
        expected.append(own(policy)[0].completion_ids())
        tokens, logprobs = sampled(stale.updates_4, policy, version)
        assert [group[j] for j in range(4) for group in tokens] == expected[max(0, version - 4)], version
        now, _ = own(policy, k=1)
        tokens, _ = sampled(stale.updates_4, policy, version, k=1)
        assert [group[0] for group in tokens] == now.completion_ids()
        change(policy)
    assert expected[0] != expected[4] and len(stale.versions) == 5  # older ones are not kept


def test_it_is_an_engine_of_rloo_and_the_correction_sees_its_age(tmp_path):
    stale.versions.clear()
    stale.copies.clear()
    path = f"{mismatch.HERE}/stale.py:updates_1"
    flags = ["--rollout_engine", path, "--rollout_correction", "mask", "--output_dir", str(tmp_path / "out")]
    flags += ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1", "--total_episodes", "24"]
    rloo.main(rloo.parse_args([*flags, *mismatch.QUIET, "--save_steps", "0", "--response_length", "16"]))
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["val/rollout_logprob_gap"] < 1e-5 and lines[0]["val/rollout_weight_share"] > 0.999
    assert all(line["val/rollout_logprob_gap"] > 1e-3 for line in lines[1:])
    assert all(line["val/ratio"] == 1 for line in lines)


# ---- Records and tables ----------------------------------------------------------------------------------------------


def a_line(update: int) -> dict:
    return {
        "val/rollout_logprob_gap": 0.1 * update,
        "val/rollout_weight": 1.0,
        "val/rollout_weight_share": 0.5,
        "val/rollout_weight_max": 2.0 + update,
        "objective/kl": 1.0,
        "grad_norm": 3.0,
    }


def test_every_run_is_made_once_and_one_that_fails_is_noted(tmp_path, monkeypatch):
    made = []

    def train(folder, line):
        made.append(line)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("\n".join(json.dumps(a_line(i)) for i in range(40)))
        return folder.name not in ("stale16_mask__1", "stale16_off__1", "stale16_off__2")

    measures = {"sampled": {x: {"mean": 0.5} for x in ("win", "gold", "kl")}, "greedy": {"win": {"mean": 0.6}}}
    monkeypatch.setattr(mismatch, "train", train)
    monkeypatch.setattr(mismatch, "grade", lambda *args: measures)
    monkeypatch.setattr(mismatch.measure, "Engine", lambda: None)
    for _ in range(2):
        records = mismatch.Records(tmp_path / "mismatch.json")
        mismatch.run_trainings(records, tmp_path, (1, 2), 6_400, 10)
    settings = len(mismatch.SAMPLERS) * len(mismatch.CORRECTIONS)
    assert len(made) == 2 * settings and all(line[2] == "1" for line in made[:settings])  # seed 1 first
    records = mismatch.Records(tmp_path / "mismatch.json")
    failed = records.all["stale16_mask__1"]
    assert not failed["complete"] and "validation" not in failed and failed["updates"] == 40
    assert failed["training"]["val/rollout_logprob_gap"] == pytest.approx(0.1 * sum(range(16, 40)) / 24)
    assert failed["training"]["largest val/rollout_weight_max"] == 41

    reference = mismatch.Records(tmp_path / "reference.json")
    for seed in (1, 2, 3):
        base = {"sampled": {x: {"mean": 0.4 + 0.1 * seed} for x in ("win", "gold", "kl")}}
        reference.add(f"{mismatch.REFERENCE.name}__{seed}", validation=base | {"greedy": {"win": {"mean": 0.6}}})
    table = mismatch.training_table(records, reference).splitlines()
    assert len(table) == 3 + settings and "60.0 ± 5.8" in table[2]
    assert "-5.0 ± 5.0" in table[3]  # the mean of 0.5 - 0.5 and 0.5 - 0.6
    (line,) = (x for x in table if x.startswith("| updates old: 16 | `mask` "))
    assert re.search(r"\| 1 of 2 \| 50.0 \|.*\| -10.0 \|", line)
    (line,) = (x for x in table if x.startswith("| updates old: 16 | `off` "))
    assert line.count("|") == table[0].count("|") and "| 0 of 2 |  |" in line


def test_runs_say_all_that_the_defaults_may_change():
    line = " ".join(mismatch.command("stale4", "truncate", 2, 6_400))
    assert "--seed 2" in line and "--dtype float32" in line and "stale.py:updates_4" in line
    args = rloo.parse_args(line.split()[1:])
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (32, 1)
    assert (args.learning_rate, args.kl_coef) == (5e-4, 0.05)
    assert args.rollout_correction == "truncate"
    assert rloo.parse_args(mismatch.command("bfloat16", "off", 1, 32)[1:]).dtype == "bfloat16"
