"""Tests of noise.py: the sketch, the gradients, the errors, the page's table."""

import json
import math
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import noise
import pytest
import torch

import rloo


def test_the_sketch_keeps_inner_products():
    x = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1))
    x[1] = x[0] + 0.1 * x[1]
    found = torch.stack([s @ s.T for s in (noise.Sketch(5000, 200, seed)(x) for seed in range(60))])
    error = found.std(0) / math.sqrt(60)
    assert ((found.mean(0) - x @ x.T).abs() < 4 * error).all()
    norms = x.norm(dim=1)
    assert (found.std(0) < 1.5 * math.sqrt(1 / 200) * norms[:, None] * norms).all()


def test_every_completion_is_in_one_update_with_its_group():
    x = torch.arange(16 * 8).view(16, 8)
    for k in (2, 4, 8, 16):
        updates = noise.to_updates(x, k, 16 // k)
        assert updates.shape == (8, k, 16 // k) and sorted(updates.flatten().tolist()) == [*range(128)]
        assert (updates % 8 == updates[:, :1] % 8).all()  # a group is of one prompt


def test_figures_are_without_bias_and_their_errors_are_right():
    """Updates with a known mean and covariance, whose noise within a block is shared in part."""
    mean = torch.tensor([1.0, 0.5, 0, 0, 0, 0])
    found = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        shared, own = torch.randn(60, 1, 6, generator=generator), torch.randn(60, 8, 6, generator=generator)
        g = mean + shared + own  # trace of the covariance: 12
        gradients = {("rloo", 16): g.double(), ("grpo", 16): 0.5 * g[..., [1, 0, 2, 3, 4, 5]].double()}
        found.append(noise.with_errors(gradients))
    for row, expected in ((0, 12 / 1.25), (1, 12 / 1.25 / 0.8**2)):  # grpo's mean has the cosine 0.8 with the target
        values = torch.tensor([rows[row]["noise"] for rows in found])
        errors = torch.tensor([rows[row]["noise_stderr"] for rows in found])
        assert abs(values.mean() - expected) < 4 * values.std() / math.sqrt(40) + 0.02 * expected
        assert errors.mean() == pytest.approx(values.std().item(), rel=0.4)


def test_gradients_are_those_of_the_log_probs_and_the_estimate_that_of_rloo():
    torch.manual_seed(1)
    engine = noise.study.Engine()
    policy = engine.policy(noise.study.TASK / "sft", trained=True)
    rows = engine.rows(noise.study.read_lines(noise.study.TASK / "train.jsonl")[:2])
    batch, _ = rloo.rollout(policy, rows, 4, 0.7, 6, engine.stop_ids)
    policy.set_attn_implementation("eager")
    completions = [(batch.responses[:, b], batch.response_mask[:, b]) for b in (0, 1)]
    found = [noise.completion_gradients(policy, rows[b]["prompt_ids"], *completions[b], 0.7) for b in (0, 1)]
    policy.set_attn_implementation("sdpa")
    A = rloo.advantage(torch.arange(8.0).view(4, 2).square())
    new, _ = rloo.completion_logprobs(policy, batch, 0.7)
    losses, _, _ = rloo.policy_loss(new, new.detach(), A[..., None], batch.response_mask, 0.2, 0.2)
    exact = -torch.cat([x.flatten() for x in torch.autograd.grad(losses.mean(), list(policy.parameters()))])
    ours = torch.einsum("jb,jbw->w", A, torch.stack(found, dim=1)) / 8
    assert (ours - exact).norm() < 1e-4 * exact.norm()


def test_a_small_run_has_the_figures_of_the_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(noise, "UPDATE", 16)
    monkeypatch.setattr(noise, "BLOCK", 8)
    noise.main(noise.Args(num_prompts=24, output=tmp_path / "small.json"))
    small, record = (json.loads(path.read_text()) for path in (tmp_path / "small.json", noise.HERE / "noise.json"))
    assert small.keys() == record.keys() and capsys.readouterr().out.startswith("| noise | k = 2 |")
    for name in noise.REWARDS:
        assert [row.keys() for row in small["tables"][name]] == [row.keys() for row in record["tables"][name]]
    with pytest.raises(SystemExit, match="at least 24, 3 blocks"):
        noise.main(noise.Args(num_prompts=16, output=tmp_path / "none.json"))
    page = (noise.HERE / "README.md").read_text(encoding="utf-8")
    assert f"<!-- noise -->\n{noise.table(record)}\n<!-- end of noise -->" in page
