"""Tests of truncate.py: which tokens are kept, and the log-probs of sampler, policy and reference."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import MINI, load

import rloo

PROMPTS = [[5, 9, 14], [20, 31, 44, 52, 60], [7, 8]]


def kept_by_hand(logits, temperature, top_k, top_p) -> dict[int, float]:
    """Token -> log-prob: the most likely ones, until there are top_k or those of top_k have a probability of top_p."""
    probs = (logits.double() / temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])[: top_k or None]
    whole = sum(probs[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= top_p * whole and kept:
            break
        kept.append(token)
        mass += probs[token]
    return {token: math.log(probs[token] / mass) for token in kept}


@pytest.fixture
def models():
    """models(layout, top_p=..., top_k=...) -> args, policy, reference."""

    def models(layout, **flags):
        truncate = load("truncate")
        args = truncate.Args(sft_model_path=str(MINI / "sft"), device="cpu", dtype="float32", layout=layout, **flags)
        args = replace(args, response_length=12, temperature=0.8)
        policy, _, reference = rloo.load_models(args, 8, None)
        return args, policy, reference

    return models


@pytest.mark.parametrize("layout", ["group", "plain"])
@pytest.mark.parametrize("limits", [{"top_p": 0.7}, {"top_k": 5}, {"top_p": 0.9, "top_k": 20}])
def test_log_probs_of_the_sampler_and_the_policy_are_those_of_the_kept_tokens(models, layout, limits):
    args, policy, reference = models(layout, **limits)
    torch.manual_seed(1)
    examples = [{"prompt_ids": ids} for ids in PROMPTS]
    batch, sampled = rloo.rollout(args, policy, examples, 4, args.temperature, [0])
    trained, _ = rloo.completion_logprobs(policy, batch, args.temperature)
    full = rloo.chunked_logprobs(reference, batch, args.temperature, 64)
    number = 0
    for row, ids in enumerate(batch.completion_ids()):
        j, b = divmod(row, len(PROMPTS))
        logits = policy(torch.tensor([PROMPTS[b] + ids])).logits[0, len(PROMPTS[b]) - 1 :].detach()
        for t, token in enumerate(ids):
            kept = kept_by_hand(logits[t], args.temperature, args.top_k, args.top_p)
            assert token in kept
            assert trained[j, b, t].item() == pytest.approx(kept[token], abs=1e-4)
            if sampled is not None:
                assert sampled[j, b, t].item() == pytest.approx(kept[token], abs=1e-4)
            of_all = (logits[t] / args.temperature).log_softmax(-1)[token]
            assert full[j, b, t].item() == pytest.approx(of_all.item(), abs=1e-4)
            number += len(kept) > 1
    assert number > 30


def test_a_sampled_token_stays_among_the_kept_ones_and_gets_a_gradient(models):
    args, policy, _ = models("plain", top_k=1)
    ids = torch.tensor([[[3]], [[4]]])  # not both are the most likely one
    batch = rloo.make_batch([{"prompt_ids": PROMPTS[0]}], ids, [0])
    logprobs, entropies = rloo.completion_logprobs(policy, batch, 1.0)
    logprobs.sum().backward()
    assert logprobs.isfinite().all() and (logprobs < 0).any() and entropies.isfinite().all()
    assert rloo.clip_gradients(policy, math.inf).isfinite()


def test_a_run_in_either_layout_has_no_gap_and_greedy_tokens_are_as_before(run):
    for layout in ("group", "plain"):
        (metrics,), _ = run("truncate", top_p=0.5, layout=layout, num_ppo_epochs=2, num_eval_prompts=2)
        assert metrics["val/rollout_logprob_gap"] < 1e-4
        (whole,), _ = run("truncate", layout=layout, num_ppo_epochs=2)
        assert metrics["objective/entropy"] < 0.8 * whole["objective/entropy"]
    with pytest.raises(SystemExit, match="--top_p: above 0, at most 1"):
        run("truncate", top_p=0.0)
