"""Tests of stale.py: old weights, the runs, the page's table."""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import stale
import torch

import rloo

sys.path.insert(0, str(stale.HERE.parent / "study"))
import study  # noqa: E402


@pytest.fixture
def policy():
    stale.versions.clear()
    stale.copies.clear()
    folder = str(rloo.MINI_TLDR / "sft")
    args = rloo.Args(sft_model_path=folder, model_name_or_path=folder, dtype="float32", device="cpu")
    return rloo.load_model(args, "--sft_model_path", folder, trained=True)


PROMPTS = [[300 + i, 301, 302, 303][: 2 + i] for i in range(3)]


def sampled(engine, policy, version: int, k: int = 4):
    options = {"k": k, "temperature": 0.7, "response_length": 12, "stop_ids": [0], "seed": 5, "max_length": 70}
    return engine(policy, PROMPTS, version=version, **options)


def own(policy, k: int = 4):
    torch.manual_seed(5)
    batch, logprobs = rloo.rollout(policy, [{"prompt_ids": ids} for ids in PROMPTS], k, 0.7, 12, [0])
    return stale.grouped(batch.responses, batch.response_mask), stale.grouped(logprobs, batch.response_mask)


def test_completions_come_from_weights_of_the_given_age_and_evaluations_from_those_of_now(policy):
    assert sampled(stale.updates_0, policy, 0) == own(policy)
    stale.versions.clear()
    expected = []
    for version in range(8):
        expected.append(own(policy))
        assert sampled(stale.updates_4, policy, version)[0] == expected[max(0, version - 4)][0], version
        assert sampled(stale.updates_4, policy, version, k=1)[0] == own(policy, k=1)[0]
        with torch.no_grad():
            for x in policy.parameters():
                x.add_(0.02 * torch.randn_like(x))
    assert expected[0] != expected[4] and len(stale.versions) == 5  # older ones are not kept


def test_it_is_an_engine_of_rloo_and_the_correction_sees_its_age(tmp_path, policy):
    flags = ["--rollout_engine", f"{stale.HERE}/stale.py:updates_1", "--rollout_correction", "mask", *study.QUIET]
    flags += ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1", "--total_episodes", "24"]
    flags += ["--save_steps", "0", "--response_length", "16", "--output_dir", str(tmp_path / "out")]
    rloo.main(rloo.parse_args(flags))
    lines = study.read_lines(tmp_path / "out" / "metrics.jsonl")
    assert lines[0]["val/rollout_logprob_gap"] < 1e-5 and lines[0]["val/rollout_weight_share"] > 0.999
    assert all(line["val/rollout_logprob_gap"] > 1e-3 for line in lines[1:])
    assert all(line["val/ratio"] == 1 for line in lines)
    found = stale.summary([{"val/rollout_logprob_gap": i} for i in range(40)])
    assert found == {"val/rollout_logprob_gap": sum(range(16, 40)) / 24}


def test_all_runs_parse_and_the_records_are_theirs():
    found = {run.name: run for run in stale.runs(study, (1, 2, 3), quick=False)}
    assert len(found) == 6 + 3 * 4 * 2
    for run in found.values():
        args = rloo.parse_args(list(run.command[1:]))
        assert (args.seed, args.learning_rate, args.kl_coef) == (run.seed, 5e-4, 0.05)
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
    for name, record in json.loads((stale.HERE / "stale.json").read_text()).items():
        words = record["command"].split()
        assert found[name].seed == record["seed"] and set(words[2:]) <= set(found[name].command)


def test_the_page_has_the_table_of_the_records():
    table = stale.table(study, study.Records(stale.HERE / "stale.json"))
    page = (stale.HERE / "README.md").read_text(encoding="utf-8")
    assert f"<!-- stale -->\n{table}\n<!-- end of stale -->" in page
    assert all(line.count("|") == 8 for line in table.splitlines())
