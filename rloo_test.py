"""Tests of rloo.py: the formulas, one test for every mistake known from other trainers, the flags, whole runs.

They build tiny random models, need no network and no GPU, and read from top to bottom like rloo.py itself.
"""

import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPTNeoXConfig,
                          GPTNeoConfig, LlamaConfig, MistralConfig, MptConfig, OPTConfig, PreTrainedTokenizerFast, Qwen3Config)

import rloo
from rloo import Args, Batch, InputError

HERE = Path(__file__).resolve().parent
WORDS = "a b c d e f g h i j k l m".split()  # with eos, pad and unknown: a vocabulary of 16
torch.set_num_threads(1)  # the models are tiny


# ----------------------------------------------------------------------------------------------------------------------
# Tiny models, data and runs


def tiny_tokenizer(pad: str = "[PAD]") -> PreTrainedTokenizerFast:
    """Words in, words out. Token 0 is eos, 1 is pad (or pad is eos too), 2 is unknown."""
    vocab = {word: i for i, word in enumerate(["<eos>", "[PAD]", "[UNK]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token=pad, unk_token="[UNK]")


FAMILIES = {
    "gpt_neox": lambda **kw: GPTNeoXConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                                           max_position_embeddings=128, initializer_range=0.3, **kw),
    "gpt2": lambda **kw: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, **kw),
    "llama": lambda **kw: LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, intermediate_size=64,
                                      max_position_embeddings=128, initializer_range=0.3, **kw),
    "qwen3": lambda **kw: Qwen3Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                                      intermediate_size=64, max_position_embeddings=128, initializer_range=0.3, **kw),
}


def tiny_model(family: str = "gpt_neox", seed: int = 0, classifier: bool = False, **config):
    torch.manual_seed(seed)
    config = {"vocab_size": 3 + len(WORDS), "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1, **config}
    if classifier:
        return AutoModelForSequenceClassification.from_config(FAMILIES[family](num_labels=1, **config)).eval()
    return AutoModelForCausalLM.from_config(FAMILIES[family](**config)).eval()


def random_batch(k: int = 3, B: int = 4, R: int = 6, vocab: int = 16, seed: int = 0, max_prompt: int = 9) -> Batch:
    """Left-padded prompts of unequal length and completions that stop at eos (0) early, late or never."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.randint(2, max_prompt))] for _ in range(B)]
    rows = [{"prompt": "", "prompt_text": "", "prompt_ids": ids, "reference": None, "columns": {}} for ids in prompts]
    prompt_ids, prompt_mask = rloo.pad(prompts, pad_id=1, left=True)
    responses = torch.randint(3, vocab, (k, B, R), generator=torch.Generator().manual_seed(seed))
    for j, b in itertools.product(range(k), range(B)):
        if (stop := rng.randint(0, R + 1)) < R:
            responses[j, b, stop] = 0
    mask = rloo.mask_after_stop(responses, [0])
    return Batch(rows, prompt_ids, prompt_mask, responses.masked_fill(~mask, 1), mask)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with a policy, a reward model and a dataset: all that a run needs."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder / "sft")
    tiny_tokenizer().save_pretrained(folder / "sft")
    tiny_model(classifier=True, seed=1).save_pretrained(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")
    rng = random.Random(0)
    rows = [{"prompt": " ".join(rng.choices(WORDS, k=rng.randint(2, 9))), "completion": " ".join(rng.choices(WORDS, k=3)), "n": i} for i in range(24)]
    (folder / "data").mkdir()
    for split, part in (("train", rows[:16]), ("test", rows[16:])):
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


@pytest.fixture
def train(tiny, tmp_path):
    """train(flag=value, ...) -> metrics of each update and the output folder, of a short run on the tiny folder."""
    count = itertools.count()

    def run(signals=(), **flags):
        output = Path(flags.get("output_dir", tmp_path / f"run{next(count)}"))
        defaults = dict(dataset_name=str(tiny / "data"), sft_model_path=str(tiny / "sft"), reward_model_path=str(tiny / "reward"),
                        response_length=6, per_device_train_batch_size=16, gradient_accumulation_steps=1, rloo_k=2, total_episodes=16,
                        temperature=1.0, learning_rate=1e-2, num_sample_generations=0, num_eval_prompts=0, output_dir=str(output))
        rloo.main(Args(**{**defaults, **flags}), signals)
        return [json.loads(line) for line in open(output / "metrics.jsonl")], output

    return run


# ----------------------------------------------------------------------------------------------------------------------
# The formulas


def test_baseline_equals_the_double_loop():
    """TRL's documented example: 3 prompts, 4 completions, flattened as j·B + b."""
    rlhf_reward = torch.tensor([1, 2, 3,  # first completion of the three prompts
                                2, 3, 4, 5, 6, 7, 8, 9, 10]).float().view(4, 3)
    expected = torch.zeros(4, 3)
    for j, b in itertools.product(range(4), range(3)):
        siblings = [rlhf_reward[i, b].item() for i in range(4) if i != j]
        expected[j, b] = rlhf_reward[j, b] - sum(siblings) / 3
    assert torch.allclose(rloo.leave_one_out_advantage(rlhf_reward), expected)
    assert expected[0, 0] == 1 - (2 + 5 + 8) / 3


def test_kl_rewards_and_reward_to_go_equal_the_loops():
    torch.manual_seed(0)
    k, B, R, beta = 3, 4, 5, 0.3
    logprobs, ref_logprobs, scores = torch.randn(k, B, R), torch.randn(k, B, R), torch.randn(k, B)
    mask = torch.arange(R) < torch.randint(1, R + 1, (k, B, 1))
    kl = rloo.kl_per_token(logprobs, ref_logprobs, mask)
    for j, b in itertools.product(range(k), range(B)):
        terms = [(logprobs[j, b, t] - ref_logprobs[j, b, t]).item() if mask[j, b, t] else 0.0 for t in range(R)]
        assert rloo.sequence_reward(scores, kl, beta)[j, b].item() == pytest.approx(scores[j, b].item() - beta * sum(terms), abs=1e-5)
        for t in range(R):
            assert rloo.reward_to_go(scores, kl, beta)[j, b, t].item() == pytest.approx(
                scores[j, b].item() - beta * sum(terms[t:]), abs=1e-5)


def test_scores_are_penalised_then_normalised_then_clipped():
    scores, ended = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([[True, True], [True, False]])
    penalised = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    assert torch.equal(rloo.shape_scores(scores, ended, None, False, None), scores)
    assert torch.equal(rloo.shape_scores(scores, ended, 5.0, False, None), penalised)
    normalised = (penalised - penalised.mean()) / (penalised.std() + 1e-8)
    assert torch.allclose(rloo.shape_scores(scores, ended, 5.0, True, None), normalised)
    assert torch.allclose(rloo.shape_scores(scores, ended, 5.0, True, 0.5), normalised.clamp(-0.5, 0.5))
    assert torch.equal(rloo.shape_scores(scores, ended, None, False, 2.5), scores.clamp(-2.5, 2.5))  # clipping alone works too


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_policy_loss_equals_the_formula_in_loops(level):
    torch.manual_seed(0)
    k, B, R, low, high = 2, 3, 4, 0.1, 0.4
    new, old = torch.randn(k, B, R) * 0.2, torch.randn(k, B, R) * 0.2
    mask = torch.arange(R) < torch.randint(1, R + 1, (k, B, 1))
    advantages = torch.randn(k, B) if level == "sequence" else torch.randn(k, B, R)
    losses, log_ratio, clipped = rloo.policy_loss(new, old, advantages, mask, low, high)
    for j, b in itertools.product(range(k), range(B)):
        log_ratios = [(new - old)[j, b, t].item() for t in range(R) if mask[j, b, t]]
        pairs = ([(sum(log_ratios), advantages[j, b].item())] if level == "sequence" else
                 [(x, advantages[j, b, t].item()) for t, x in enumerate(log_ratios)])
        expected = sum(max(-a * math.exp(x), -a * min(max(math.exp(x), 1 - low), 1 + high)) for x, a in pairs)
        assert losses[j, b].item() == pytest.approx(expected, abs=1e-5)
        was_clipped = [-a * min(max(math.exp(x), 1 - low), 1 + high) > -a * math.exp(x) for x, a in pairs]
        assert clipped[j, b].flatten()[: len(was_clipped)].tolist() == was_clipped


@pytest.fixture
def blocks(monkeypatch) -> list[torch.Size]:
    """Shapes of the (tokens, some of the vocabulary) blocks that rloo.py makes, of 16 columns or fewer."""
    made, original = [], rloo.logit_blocks

    def counted(*args):
        for block in original(*args):
            made.append(tuple(block[1].shape))
            yield block

    monkeypatch.setattr(rloo, "logit_blocks", counted)
    monkeypatch.setitem(rloo.LOGITS_AT_ONCE, "cpu", 1)
    monkeypatch.setattr(rloo, "MIN_COLUMNS", 16)
    return made


@pytest.mark.parametrize("bias", [None, "random", "-inf"])
def test_token_logprobs_are_log_softmax_in_blocks_with_the_same_gradient(blocks, bias):
    torch.manual_seed(0)
    head, hidden, tokens = torch.nn.Linear(8, 50, bias=bias is not None), torch.randn(23, 8, requires_grad=True), torch.randint(15, (23,))
    tokens[:5] = torch.tensor([32, 33, 47, 48, 49])  # first and last columns of blocks
    if bias == "-inf":  # impossible tokens: a whole block of them, and one more
        head.bias.data[16:32] = head.bias.data[40] = -math.inf
    inputs = [hidden, *head.parameters()]
    full = F.log_softmax(head(hidden) / 0.7, dim=-1)
    expected = full.gather(1, tokens[:, None]).squeeze(1)
    grads = torch.autograd.grad((expected * torch.arange(23)).sum(), inputs)
    logprobs, entropy = rloo.TokenLogprobs.apply(hidden, head.weight, head.bias, tokens, 0.7)
    assert torch.allclose(logprobs, expected, atol=1e-6) and not entropy.requires_grad
    assert torch.allclose(entropy, -(full.exp() * full).nansum(-1), atol=1e-5)
    for grad, other in zip(grads, torch.autograd.grad((logprobs * torch.arange(23)).sum(), inputs), strict=True):
        assert torch.allclose(grad, other, atol=1e-4)
    assert blocks == 2 * [(23, 16), (23, 16), (23, 16), (23, 2)]  # forward and again in backward


@pytest.mark.parametrize("offset", [0.0, 1000.0, -1000.0])
def test_token_logprobs_of_logits_far_from_zero(blocks, offset):
    """No block's sum overflows or vanishes, whichever block holds the largest logit, and an offset of all changes nothing."""
    torch.manual_seed(0)
    for spread in (1.0, 1e4):
        bias, tokens = torch.randn(64).mul(spread).round(decimals=2), torch.arange(60, 64)
        full = F.log_softmax((bias + offset).double(), dim=-1)
        logprobs, entropy = rloo.TokenLogprobs.apply(torch.zeros(4, 1), torch.zeros(64, 1), bias + offset, tokens, 1.0)
        assert torch.allclose(logprobs.double(), full[60:], atol=2e-4, rtol=1e-6)
        assert torch.allclose(entropy.double(), -(full.exp() * full).nansum(), atol=2e-4) and (entropy >= 0).all()


def test_in_bfloat16_training_and_reference_read_the_log_probs_that_were_sampled():
    """... from the same hidden states: at a temperature other than 1 nothing is rounded once more."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    tokens, sampled = rloo.sample(F.linear(hidden, weight), 0.7)
    for x, kind in ((hidden, torch.float32), (hidden.float(), torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == torch.bfloat16):
            assert (rloo.TokenLogprobs.apply(x, weight, None, tokens, 0.7)[0] - sampled).abs().max() < 1e-5


def test_token_logprobs_in_autocast_keep_float32_sums_and_gradients(blocks):
    torch.manual_seed(0)
    head, hidden, tokens = torch.nn.Linear(8, 50), torch.randn(23, 8, requires_grad=True), torch.randint(50, (23,))
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logprobs, entropy = rloo.TokenLogprobs.apply(hidden, head.weight, head.bias, tokens, 0.7)
        found.append([logprobs, *torch.autograd.grad(logprobs.sum(), [hidden, *head.parameters()])])
    for exact, half in zip(*found):
        assert half.dtype == torch.float32 and 0 < (exact - half).norm() < 0.02 * exact.norm()
    rounded = F.linear(hidden.bfloat16(), head.weight.bfloat16(), head.bias.bfloat16()).float() / 0.7
    assert torch.allclose(entropy, torch.distributions.Categorical(logits=rounded).entropy(), atol=1e-5)


def enumerate_completions(vocab: int, R: int, stop: int = 0) -> list[list[int]]:
    """Every completion there is: sequences that end at the first stop token, and those of R tokens without one."""
    done, open_ = [], [[]]
    for _ in range(R):
        grown = [prefix + [token] for prefix in open_ for token in range(vocab)]
        done += [sequence for sequence in grown if sequence[-1] == stop]
        open_ = [sequence for sequence in grown if sequence[-1] != stop]
    return done + open_


def flat_grad(loss: torch.Tensor, model) -> torch.Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(model.parameters(), grads)])


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_expected_update_is_the_exact_gradient_and_the_baseline_lowers_its_variance(level):
    """Every pair of completions (k = 2) of a vocabulary of 3 and R = 3, weighted by its probability under the policy: the
    mean gradient of the loss is -∇ E[score - β KL(π ‖ π_ref)], to rounding."""
    beta, T, vocab, R = 0.4, 0.8, 3, 3
    policy, reference = tiny_model(vocab_size=vocab), tiny_model(vocab_size=vocab, seed=1)
    completions = enumerate_completions(vocab, R)
    n = len(completions)  # 1 + 2 + 4 + 8
    responses, mask = (x[None] for x in rloo.pad(completions, pad_id=1))
    prompt_ids = torch.tensor([[1, 2, 0]]).repeat(n, 1)
    batch = Batch([{}] * n, prompt_ids, prompt_ids != 1, responses, mask)
    logprobs, _ = rloo.completion_logprobs(policy, batch, T)  # (1, n, R)
    with torch.no_grad():
        ref_logprobs, _ = rloo.completion_logprobs(reference, batch, T)
    scores = torch.randn(1, n, generator=torch.Generator().manual_seed(3)) + 3  # rewards with a mean

    probability = logprobs.sum(-1).exp()
    assert probability.sum().item() == pytest.approx(1, abs=1e-5)  # these are all there are
    objective = (probability * (scores - beta * (logprobs - ref_logprobs).sum(-1))).sum()
    exact = -flat_grad(objective, policy)

    # The loss of every pair (i, j), as k = 2 completions of n² prompts, by the functions that training uses.
    first, second = (x.flatten() for x in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    pairs = torch.stack([first, second])
    new, pair_mask = logprobs[0][pairs], mask[0][pairs]
    kl = rloo.kl_per_token(new, ref_logprobs[0][pairs], pair_mask).detach()
    rewards = (rloo.sequence_reward if level == "sequence" else rloo.reward_to_go)(scores[0][pairs], kl, beta)
    weight = (probability[0][first] * probability[0][second]).detach()

    def expected_loss(advantages):
        losses, _, _ = rloo.policy_loss(new, new.detach(), advantages, pair_mask, 0.2, 0.2)
        return (losses.mean(0) * weight).sum()

    with_baseline = flat_grad(expected_loss(rloo.leave_one_out_advantage(rewards)), policy)
    without_baseline = flat_grad(expected_loss(rewards), policy)
    scale = exact.abs().max()
    assert scale > 0.1
    assert (with_baseline - exact).abs().max() < 2e-5 * scale
    assert (without_baseline - exact).abs().max() < 2e-5 * scale
    dropped_kl = rloo.leave_one_out_advantage((rloo.sequence_reward if level == "sequence" else rloo.reward_to_go)(scores[0][pairs], kl, 0.0))
    assert (flat_grad(expected_loss(dropped_kl), policy) - exact).abs().max() > 1e-2 * scale  # the test sees the KL term

    # Variance: E‖g‖² over the pairs, g = -½ Σ_j Σ_t A_jt ∇ log π(y_jt), through the Gram matrix of the tokens' gradients.
    token_grads = torch.stack([flat_grad(logprobs[0, i, t], policy) for i in range(n) for t in range(R)])
    gram = token_grads @ token_grads.T

    def second_moment(advantages):
        per_token = (advantages if level == "token" else advantages[..., None]) * pair_mask  # (2, n², R)
        coefficients = torch.zeros(n * n, n, R)
        for j in range(2):
            coefficients[torch.arange(n * n), pairs[j]] -= 0.5 * per_token[j]
        c = coefficients.flatten(1)
        return (weight * (c @ gram * c).sum(1)).sum()

    assert second_moment(rloo.leave_one_out_advantage(rewards)) < 0.9 * second_moment(rewards)


def test_means_do_not_depend_on_the_split():
    values, mask = torch.randn(6, 5), torch.rand(6, 5) > 0.4
    whole, split = rloo.Means(), rloo.Means()
    whole.add("x", values, mask)
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        split.add("x", values[part], mask[part])
    assert whole.means()["x"] == pytest.approx(split.means()["x"], abs=1e-12)
    assert whole.means()["x"] == pytest.approx(values[mask].mean().item(), abs=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# The group layout against a row per completion


def test_group_mask_is_the_documented_picture():
    """P = 2 slots, one of them padding; k = 2 completions a and b; 2 steps."""
    mask = rloo.group_mask(torch.tensor([[False, True]]), 2, 6, torch.arange(6))
    picture = """x . . . . .
                 . x . . . .
                 . x x . . .
                 . x . x . .
                 . x x . x .
                 . x . x . x"""
    assert mask[0, 0].tolist() == [[cell == "x" for cell in line.split()] for line in picture.splitlines()]
    assert torch.equal(mask[:, :, 4:6, :], rloo.group_mask(torch.tensor([[False, True]]), 2, 6, torch.tensor([4, 5])))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_group_layout_equals_plain_rows(family, attention, monkeypatch):
    """Log-probs, entropies, scores, and gradients of all parameters; a row per forward, or all rows, padded."""
    policy, reward, batch = tiny_model(family), tiny_model(family, classifier=True, seed=1), random_batch()
    policy.set_attn_implementation(attention)
    results = []
    for layout, width in (("plain", 512), ("group", 512), ("group", 32)):
        monkeypatch.setattr(rloo, "CPU_WIDTH", width)
        logprobs, entropy = rloo.completion_logprobs(policy, batch, 0.7, layout)
        gradient = flat_grad((logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum(), policy)
        results.append((logprobs, entropy, rloo.model_reward(reward, batch, layout), gradient))
    for plain, *groups in zip(*results):
        assert all((plain - group).abs().max() < 1e-5 * max(1, plain.abs().max()) for group in groups)


def test_rows_read_alone_share_one_embedding_look_up(monkeypatch):
    """Its gradient is as large as all embeddings, so it is made once, however many forwards there are."""
    monkeypatch.setattr(rloo, "CPU_WIDTH", 32)
    model, batch, seen = tiny_model(), random_batch(), []
    for name, module in (("embedding", model.get_input_embeddings()), ("model", model.base_model)):
        module.register_forward_hook(lambda *a, name=name: seen.append(name))
    rloo.completion_logprobs(model, batch, 1.0)
    assert len(batch.rows) > 1 and seen == ["embedding"] + ["model"] * len(batch.rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_lanes_see_neither_each_other_nor_padding_in_any_layer(family):
    """Another token in one completion, or in the padding, changes nothing at the others' slots in any layer's output."""
    model, batch, k = tiny_model(family), random_batch(), 3
    outputs = []
    layers = [module for module in model.base_model.modules() if type(module).__name__.endswith(("Layer", "Block"))]
    assert len(layers) == 2
    for layer in layers:
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output[0] if isinstance(output, tuple) else output))
    changed = batch.responses.clone()
    changed[1, :, 1] = (changed[1, :, 1] + 1) % 16
    variants = {"as it is": batch, "lane 1": batch._replace(responses=changed),
                "padding": batch._replace(prompt_ids=batch.prompt_ids.where(batch.prompt_mask, torch.tensor(7)))}
    with torch.no_grad():
        for variant in variants.values():
            rloo.group_hidden(model, [variant])
    base, lane, padding = outputs[0:2], outputs[2:4], outputs[4:6]
    P = batch.prompt_ids.shape[1]
    others = torch.tensor([slot < P or (slot - P) % k != 1 for slot in range(base[0].shape[1])])
    for layer in range(2):
        assert torch.equal(base[layer][:, others], lane[layer][:, others])
        assert not torch.equal(base[layer][:, ~others], lane[layer][:, ~others])
        real = F.pad(batch.prompt_mask, (0, base[0].shape[1] - P), value=True)
        assert torch.equal(base[layer][real], padding[layer][real])


@pytest.mark.parametrize("flags", [{}, {"kl_level": "token", "num_ppo_epochs": 2}, {"num_mini_batches": 2, "per_device_train_batch_size": 8}])
def test_updates_in_group_and_plain_layout_end_in_the_same_weights(train, monkeypatch, flags):
    """Three updates from the same completions: those of `generate`, so that the layouts share their random numbers."""
    runs = [train(layout=layout, rollout_engine="hf", total_episodes=48, adam_eps=1e-3, **flags) for layout in ("group", "plain")]
    for one, other in zip(*(without_times(metrics) for metrics, _ in runs)):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    monkeypatch.setattr(rloo, "generate_group", None)  # which none of the two has used
    weights = [torch.cat([p.flatten() for p in AutoModelForCausalLM.from_pretrained(output).parameters()]) for _, output in runs]
    assert (weights[0] - weights[1]).abs().max() < 1e-5


def test_a_sliding_window_falls_back_to_plain_rows(train, tmp_path, capsys):
    """... with one line of warning, and the same results as --layout plain."""
    config = MistralConfig(vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                           intermediate_size=64, max_position_embeddings=128, sliding_window=12, pad_token_id=1, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    runs = [train(sft_model_path=str(tmp_path), layout=layout) for layout in ("group", "plain")]
    assert capsys.readouterr().out.count("--layout plain") == 1
    assert without_times(runs[0][0])[0] == pytest.approx(without_times(runs[1][0])[0], abs=1e-5)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert rloo.best_layout(wide, 6, 3, 6) == "group" and rloo.best_layout(wide, 9, 3, 6) == "plain"  # prompt + completion


@pytest.mark.parametrize("config, layout", [
    (MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=16, max_seq_len=128, initializer_range=0.3), "plain"),  # ALiBi
    (GPTNeoConfig(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8, vocab_size=16,
                  max_position_embeddings=128, initializer_range=0.3), "plain"),  # local attention
    (OPTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, vocab_size=16, max_position_embeddings=128,
               word_embed_proj_dim=32, init_std=0.3), "group")], ids=["mpt", "gpt_neo", "opt"])
def test_the_layout_is_found_by_trying_on_rows_of_the_run_s_size(config, layout):
    torch.manual_seed(0)
    model, batch = AutoModelForCausalLM.from_config(config).eval(), random_batch(max_prompt=12, R=8)
    with torch.no_grad():
        plain, group = (rloo.completion_logprobs(model, batch, 1.0, which)[0] for which in ("plain", "group"))
    assert ((plain - group).abs().max() < 1e-4) == (layout == "group")
    assert rloo.best_layout(model, 12, 3, 8) == layout


def test_transposed_products_equal_the_stock_ones_and_end_with_their_block():
    stock, x, weight = F.linear, torch.randn(2, 3, 8), torch.randn(5, 8)
    for bias in (None, torch.randn(5)):
        with rloo.transposed_linear(True):
            assert F.linear is not stock
            found = F.linear(x, weight, bias)
        assert torch.allclose(found, stock(x, weight, bias), atol=1e-5) and found.is_contiguous()
    with rloo.transposed_linear(False):
        assert F.linear is stock
    with pytest.raises(ValueError), rloo.transposed_linear(True):
        raise ValueError
    assert F.linear is stock


def test_a_step_of_decoding_has_static_shapes_and_addresses(monkeypatch):
    """What a CUDA graph needs: run as on CUDA, over all slots, a step changes its state in place, the cache stays where it
    is, nothing is asked of the device, and it follows weights that change in place."""
    model, batch = tiny_model("llama"), random_batch()
    (B, P), k, R = batch.prompt_ids.shape, 3, 6
    state, stop = rloo.new_decoding(B, P, k, R, model.device), torch.tensor([0])
    state.prompt_mask.copy_(batch.prompt_mask)
    torch.manual_seed(0)
    with torch.no_grad():
        positions = (batch.prompt_mask.cumsum(1) - 1).clamp(min=0)
        hidden = rloo.read_slots(model, state, slice(B), batch.prompt_ids, positions, torch.arange(P), P)
        rloo.sample_into(model, state, hidden[:, -1:].expand(-1, k, -1), 1.0, stop)

        def addresses():
            tensors = [x for x in state if torch.is_tensor(x)] + [x for pair in state.cache.states.values() for x in pair]
            return [(x.data_ptr(), x.shape, x.stride()) for x in tensors]

        before = addresses()
        for name in ("item", "__bool__", "__int__", "tolist", "nonzero", "cpu"):  # each of them would wait for the device
            monkeypatch.setattr(torch.Tensor, name, lambda self, *a, name=name: pytest.fail(f"a step calls {name}"))
        for t in range(R - 1):
            if t == 2:
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            rloo.decode_step(model, state, 1.0, stop, P + k * R)
        monkeypatch.undo()
        assert addresses() == before and int(state.step) == R - 1
        tokens = state.tokens.transpose(0, 1)
        full = Batch(batch.rows, batch.prompt_ids, batch.prompt_mask, tokens, torch.ones_like(tokens, dtype=torch.bool))
        expected, _ = rloo.completion_logprobs(model, full, 1.0, "plain")
        old = tiny_model("llama")
        early, _ = rloo.completion_logprobs(old, full, 1.0, "plain")
        got = state.logprobs.transpose(0, 1)
        assert torch.allclose(got[..., :3], early[..., :3], atol=1e-5)  # tokens 0 to 2 came from the weights as they were
        assert not torch.allclose(got[..., 3:], early[..., 3:], atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_query_heads_that_share_keys_do_not_copy_them(family, monkeypatch, tmp_path):
    """The folded attention equals the stock one, and hands the kernel as many key heads as the model has."""
    tiny_model(family).save_pretrained(tmp_path)
    stock = tiny_model(family)
    folded = rloo.load(Args(), AutoModelForCausalLM, str(tmp_path), "sft_model_path", attn_implementation="sdpa").eval()
    batch, heads, original = random_batch(), [], F.scaled_dot_product_attention
    one = rloo.completion_logprobs(stock, batch, 0.7)[0]
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **kw: heads.append(k.shape[1]) or original(q, k, v, **kw))
    other = rloo.completion_logprobs(folded, batch, 0.7)[0]
    assert torch.allclose(one, other, atol=1e-5) and set(heads) == {stock.config.num_key_value_heads}
    monkeypatch.undo()
    assert torch.allclose(flat_grad(one.sum(), stock), flat_grad(other.sum(), folded), atol=1e-4)
    folded.save_pretrained(tmp_path / "saved")
    assert "folded" not in (tmp_path / "saved" / "config.json").read_text()


def test_attention_that_ignores_the_mask_falls_back_to_plain_rows():
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal_only", lambda module, q, k, v, mask, **kw: sdpa_attention_forward(module, q, k, v, None, **kw))
    model = tiny_model()
    assert rloo.best_layout(model, 9, 2, 4) == "group"
    model.set_attn_implementation("causal_only")
    assert rloo.best_layout(model, 9, 2, 4) == "plain"


# ----------------------------------------------------------------------------------------------------------------------
# What others got wrong: one test each


def test_token_level_kl_is_not_the_sequence_level_in_disguise():
    """Elsewhere the token-level rewards are summed back to the sequence-level one. Here they are rewards to go."""
    scores, kl = torch.tensor([[1.0], [2.0]]), torch.tensor([[[0.1, 0.2, 0.4]], [[0.3, 0.0, 0.0]]])
    G = rloo.reward_to_go(scores, kl, 1.0)
    assert torch.allclose(G, torch.tensor([[[0.3, 0.4, 0.6]], [[1.7, 2.0, 2.0]]]))  # past its end a completion keeps its score
    advantages = rloo.leave_one_out_advantage(G)
    assert torch.allclose(advantages[0, 0], torch.tensor([-1.4, -1.6, -1.4]))
    assert torch.allclose(advantages[0], -advantages[1])
    assert torch.allclose(G[..., 0], rloo.sequence_reward(scores, kl, 1.0))


def test_token_level_run_differs_from_sequence_level(train):
    weights = []
    for level in ("sequence", "token"):
        _, output = train(kl_level=level, total_episodes=48, kl_coef=1.0)
        weights.append(AutoModelForCausalLM.from_pretrained(output).get_input_embeddings().weight)
    assert (weights[0] - weights[1]).abs().max() > 1e-3


@pytest.mark.parametrize("engine", ["group", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_update_of_a_batch_has_ratio_exactly_one(train, dtype, engine):
    metrics, _ = train(dtype=dtype, rollout_engine=engine, total_episodes=32, response_length=32)
    for update in metrics:
        assert update["val/ratio"] == 1 and update["val/ratio_var"] == 0
        assert update["policy/clipfrac_avg"] == 0 and update["policy/approxkl_avg"] == 0
        gap = update["val/rollout_logprob_gap"]  # the difference is not hidden: it is a metric of its own
        assert 0 <= gap < 1e-5 if dtype == "float32" else 1e-4 < gap < 0.5


def test_log_probs_are_float32_in_bfloat16_runs():
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropy = rloo.completion_logprobs(tiny_model(), random_batch(), 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize("engine", [rloo.generate_group, rloo.generate_hf])
def test_one_temperature_in_sampling_and_scoring_and_no_hidden_sampling_settings(engine):
    """The model's own generation config asks for top-k, a repetition penalty and another temperature: all are ignored, and
    the frequencies of the sampled tokens are those of the softmax that scores them."""
    model = tiny_model(vocab_size=6)
    model.generation_config.update(top_k=1, repetition_penalty=3.0, temperature=0.1, do_sample=True)
    row = {"prompt_ids": [3, 4, 5], "prompt": "", "prompt_text": "", "reference": None, "columns": {}}
    torch.manual_seed(0)
    n, T = 20_000, 1.7
    batch, rollout_logprobs = rloo.rollout(model, engine, [row] * 10, n // 10, 2, T, stop_ids=[0], pad_id=1, forward_rows=n)
    assert torch.allclose(rollout_logprobs, rloo.completion_logprobs(model, batch, T, "plain")[0], atol=1e-5)
    completions = enumerate_completions(6, 2)
    responses, mask = (x[None] for x in rloo.pad(completions, 1))
    n_rows = len(completions)
    prompt_ids = torch.tensor([row["prompt_ids"]] * n_rows)
    all_of_them = Batch([row] * n_rows, prompt_ids, prompt_ids > 0, responses, mask)
    exact = rloo.completion_logprobs(model, all_of_them, T)[0][0].detach().sum(-1).exp()
    assert exact.sum().item() == pytest.approx(1, abs=1e-4)
    sampled = [tuple(c) for c in rloo.completion_tokens(batch)]
    counts = torch.tensor([sampled.count(tuple(c)) for c in completions]).float()
    chi2 = ((counts - n * exact) ** 2 / (n * exact)).sum().item()
    freedom = len(completions) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)  # five standard deviations of the chi-squared distribution


def test_pad_equal_to_eos_keeps_the_stop_token_and_every_stop_id_counts():
    responses = torch.tensor([[[5, 0, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8], [5, 9, 0, 7]]])
    one, two = rloo.mask_after_stop(responses, [0]), rloo.mask_after_stop(responses, [0, 9])
    assert one.sum(-1).tolist() == [[2, 1, 4, 3]] and two.sum(-1).tolist() == [[2, 1, 4, 2]]
    batch = rloo.Batch([], torch.empty(4, 0), torch.empty(4, 0), responses, two)
    assert rloo.contains_stop(batch, [0, 9]).tolist() == [[True, True, False, True]]


def test_a_run_where_pad_is_eos_ends_in_the_same_weights(train, tiny, tmp_path):
    tiny_tokenizer(pad="<eos>").save_pretrained(tmp_path / "tokenizer")
    shutil.copytree(tiny / "reward", tmp_path / "reward")
    tiny_tokenizer(pad="<eos>").save_pretrained(tmp_path / "reward")
    (one, out1), (two, out2) = train(), train(model_name_or_path=str(tmp_path / "tokenizer"), reward_model_path=str(tmp_path / "reward"))
    assert 0 < one[0]["val/num_eos_tokens"] < 16 and one[0]["objective/scores"] == pytest.approx(two[0]["objective/scores"], abs=1e-5)
    weights = [AutoModelForCausalLM.from_pretrained(out).get_output_embeddings().weight for out in (out1, out2)]
    assert torch.allclose(*weights, atol=1e-5)


def test_stop_ids_come_from_the_generation_config_and_the_tokenizer():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 9]
    assert rloo.stop_token_ids(model, tokenizer, None, None) == [0, 7, 9]
    assert rloo.stop_token_ids(model, tokenizer, "eos", None) == [0, 7, 9]
    assert rloo.stop_token_ids(model, tokenizer, "c", None) == tokenizer("c")["input_ids"]
    assert rloo.stop_token_ids(model, tokenizer, None, 12) == [12]
    for wrong in ({"stop_token": "a b", "stop_token_id": None}, {"stop_token": None, "stop_token_id": 10_000}):
        with pytest.raises(InputError, match="--stop_token"):
            rloo.stop_token_ids(model, tokenizer, **wrong)


def test_tokens_after_the_stop_are_neither_attended_to_nor_trained_on_nor_scored():
    batch, policy, reward = random_batch(), tiny_model(), tiny_model(classifier=True)
    assert not batch.response_mask.all()
    garbage = batch._replace(responses=batch.responses.where(batch.response_mask, torch.tensor(11)),
                             prompt_ids=batch.prompt_ids.where(batch.prompt_mask, torch.tensor(12)))
    grads = []
    for b in (batch, garbage):
        logprobs, entropy = rloo.completion_logprobs(policy, b, 1.0)
        assert (logprobs[~b.response_mask] == 0).all() and (entropy[~b.response_mask] == 0).all()
        grads.append((logprobs, rloo.model_reward(reward, b), flat_grad(logprobs.sum(), policy)))
    for one, other in zip(*grads):
        assert torch.allclose(one, other, atol=1e-5)


def test_missing_eos_penalty_looks_for_what_stops_the_rollout(train, tiny):
    """With another stop token than eos the penalty goes to the completions without that token, not to those without eos."""
    flags = dict(stop_token="c", reward_model_path=None, reward_fns=(f"{__file__}:constant_reward",), kl_coef=0.0, total_episodes=64)
    metrics, _ = train(missing_eos_penalty=3.0, **flags)
    assert 0 < metrics[-1]["completions/clipped_ratio"] < 1
    for update in metrics:
        assert update["objective/scores"] == 1  # raw
        assert update["objective/rlhf_reward"] == pytest.approx(1 - 3 * update["completions/clipped_ratio"])


def constant_reward(prompts, completions, completion_ids, **columns):
    return [1.0] * len(completions)


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_equals_unpadded(family):
    """Log-probs and scores of left-padded prompts and right-padded completions are those of each sequence on its own."""
    batch, policy, reward = random_batch(), tiny_model(family), tiny_model(family, classifier=True, seed=1)
    with torch.no_grad():
        logprobs, entropy = rloo.completion_logprobs(policy, batch, 0.7)
        scores = rloo.model_reward(reward, batch)
        for j, b in itertools.product(range(3), range(4)):
            prompt, completion = batch.rows[b]["prompt_ids"], batch.responses[j, b][batch.response_mask[j, b]].tolist()
            ids = torch.tensor([prompt + completion])
            log_softmax = F.log_softmax(policy(ids).logits[0, len(prompt) - 1 : -1] / 0.7, dim=-1)
            expected = log_softmax[torch.arange(len(completion)), completion]
            assert torch.allclose(logprobs[j, b, : len(completion)], expected, atol=1e-5)
            assert torch.allclose(entropy[j, b, : len(completion)], -(log_softmax.exp() * log_softmax).sum(-1), atol=1e-5)
            reward.config.pad_token_id = None  # a single row: the head at the last token
            assert torch.allclose(scores[j, b], reward(ids).logits[0, 0], atol=1e-5)


@pytest.mark.parametrize("engine, width", [(rloo.generate_group, 512), (rloo.generate_group, 32), (rloo.generate_hf, 512)])
@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_at_temperature_0_is_greedy_decoding_of_each_prompt_alone(monkeypatch, family, engine, width):
    """The group engine reads prompts together or, where the model is wide, each alone."""
    monkeypatch.setattr(rloo, "CPU_WIDTH", width)
    model, rows = tiny_model(family), random_batch().rows
    batch, _ = rloo.rollout(model, engine, rows, 2, 8, 0.0, stop_ids=[0], pad_id=1, forward_rows=6)
    for b, row in enumerate(rows):
        ids = row["prompt_ids"]
        for t in range(8):
            ids = ids + [model(torch.tensor([ids])).logits[0, -1].argmax().item()]
            if ids[-1] == 0:
                break
        for j in range(2):
            assert batch.responses[j, b][batch.response_mask[j, b]].tolist() == ids[len(row["prompt_ids"]) :]


def test_metrics_count_real_tokens_only_and_once(train, monkeypatch):
    """Entropies, ratio, lengths and stop tokens against loops over the real tokens of each completion."""
    seen = []
    original = rloo.rollout
    monkeypatch.setattr(rloo, "rollout", lambda *a: seen.append(original(*a)) or seen[-1])
    (update,), output = train(learning_rate=0.0, kl_coef=0.0)
    policy, (batch, _) = AutoModelForCausalLM.from_pretrained(output).eval(), seen[0]
    surprise, entropies, stops, lengths = [], [], 0, []
    for j, b in itertools.product(range(2), range(8)):
        prompt, completion = batch.rows[b]["prompt_ids"], rloo.completion_tokens(batch)[j * 8 + b]
        with torch.no_grad():
            log_softmax = F.log_softmax(policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1], dim=-1)
        surprise.append(-sum(log_softmax[t, token].item() for t, token in enumerate(completion)))
        entropies += (-(log_softmax.exp() * log_softmax).sum(-1)).tolist()
        stops, lengths = stops + (0 in completion), lengths + [len(completion)]
    assert len(set(lengths)) > 1 and 0 < stops < 16
    assert update["objective/entropy"] == pytest.approx(sum(surprise) / 16, abs=1e-4)
    assert update["policy/entropy_avg"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-4)
    assert update["val/num_eos_tokens"] == stops
    assert update["completions/clipped_ratio"] == pytest.approx(1 - stops / 16)
    assert update["completions/mean_length"] == pytest.approx(sum(lengths) / 16)
    assert "val/clipfrac_avg" not in update and isinstance(update["eps"], float)


def test_metrics_of_a_policy_that_moved_equal_the_formulas(train, monkeypatch):
    """KL per completion against the reference, and ratio and approximate KL against the policy that sampled, in loops."""
    seen, original = [], rloo.policy_loss
    monkeypatch.setattr(rloo, "policy_loss", lambda new, old, a, mask, *clip: seen.append((new.detach(), old.clone(), mask)) or original(new, old, a, mask, *clip))
    (_, second), _ = train(num_ppo_epochs=2, total_episodes=32, kl_coef=0.1, learning_rate=1e-3)
    log_ratios = [[(new - old)[j, b][mask[j, b]].tolist() for j in range(2) for b in range(8)] for new, old, mask in seen[2:]]
    tokens, sums = sum(sum(log_ratios, []), []), [sum(x) for epoch in log_ratios for x in epoch]
    assert second["val/ratio"] == pytest.approx(sum(map(math.exp, tokens)) / len(tokens), abs=1e-6) != 1
    assert second["policy/approxkl_avg"] == pytest.approx(sum(0.5 * x * x for x in sums) / len(sums), rel=1e-4)
    assert second["objective/kl"] == pytest.approx(-second["objective/non_score_reward"] / 0.1) and second["objective/kl"] != 0
    assert second["objective/rlhf_reward"] == pytest.approx(second["objective/scores"] + second["objective/non_score_reward"], abs=1e-5)


TIMES = ("time/", "eps", "tokens_per_second", "memory/")


def without_times(metrics: list[dict]) -> list[dict]:
    return [{name: value for name, value in update.items() if not name.startswith(TIMES)} for update in metrics]


@pytest.mark.parametrize("flags", [{}, {"kl_level": "token", "num_ppo_epochs": 2, "mask_truncated_completions": True}])
def test_gradients_and_metrics_do_not_depend_on_the_split_into_micro_batches(train, flags):
    runs = [train(per_device_train_batch_size=size, gradient_accumulation_steps=16 // size, local_rollout_forward_batch_size=16, seed=3,
                  learning_rate=1e-3, adam_eps=1e-3, total_episodes=48, **flags) for size in (16, 8, 2)]
    reference = runs[0]
    assert reference[0][0]["grad_norm"] > 0.1
    for metrics, output in runs[1:]:
        for one, other in zip(without_times(reference[0]), without_times(metrics)):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
        weights = [torch.cat([p.flatten() for p in AutoModelForCausalLM.from_pretrained(o).parameters()]) for o in (reference[1], output)]
        assert (weights[0] - weights[1]).abs().max() < 1e-5


def test_every_epoch_is_each_prompt_once_and_small_datasets_cycle():
    flat = list(itertools.islice(rloo.prompt_order(10, seed=1), 20))
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10)) and flat[:10] != flat[10:]
    assert flat == list(itertools.islice(rloo.prompt_order(10, seed=1), 20))
    assert flat != list(itertools.islice(rloo.prompt_order(10, seed=2), 20))
    small = list(itertools.islice(rloo.prompt_order(3, seed=1), 8))
    assert all(2 <= small.count(i) <= 3 for i in range(3))


def test_a_dataset_smaller_than_a_batch_trains(train, tmp_path):
    (tmp_path / "three.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "c"}\n{"prompt": "d e f"}\n')
    metrics, _ = train(dataset_name=str(tmp_path / "three.jsonl"), total_episodes=32)
    assert len(metrics) == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_one_seed_repeats_a_run_exactly_and_evaluation_does_not_change_it(train, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = [train(total_episodes=48, seed=seed, num_ppo_epochs=2, num_mini_batches=2, **flags)
                for seed, flags in ((5, {}), (5, {"num_eval_prompts": 4, "num_sample_generations": 1}), (6, {}))]
    finally:
        torch.set_num_threads(before)
    plain = [[{k: v for k, v in update.items() if not k.startswith("eval")} for update in without_times(metrics)] for metrics, _ in runs]
    assert plain[0] == plain[1] != plain[2]
    files = [(output / "model.safetensors").read_bytes() for _, output in runs]
    assert files[0] == files[1] != files[2]


def test_masked_truncated_completions_have_no_loss_but_stay_in_the_baseline(train, monkeypatch):
    """Gradients flow from the completions that ended alone, with advantages that still know the truncated siblings."""
    seen = []
    original = rloo.policy_loss

    def spy(new, old, advantages, mask, *clip):
        new.retain_grad()
        seen.append((new, advantages, mask))
        return original(new, old, advantages, mask, *clip)

    monkeypatch.setattr(rloo, "policy_loss", spy)
    plain, _ = train(per_device_train_batch_size=16)
    masked, _ = train(per_device_train_batch_size=16, mask_truncated_completions=True)
    (new, advantages, mask), (masked_new, masked_advantages, _) = seen
    truncated = mask.all(-1) & (new.grad != 0).all(-1)  # a completion of full length may still have ended in its last token
    assert torch.equal(advantages, masked_advantages)
    silent = (masked_new.grad == 0).all(-1)
    assert silent.sum() == round(16 * masked[0]["completions/clipped_ratio"]) > 0
    assert (silent <= mask.all(-1)).all() and truncated.any()
    assert torch.equal(new.grad[~silent], masked_new.grad[~silent])  # the weight of the others does not change


def test_unscorable_completions_leave_the_baseline():
    rewards = torch.tensor([[1.0, math.nan, 0.0], [4.0, math.nan, math.nan], [math.nan, 2.0, 3.0]])
    expected = torch.tensor([[1.0 - 4.0, 0.0, 0.0 - 3.0], [4.0 - 1.0, 0.0, 0.0], [0.0, 0.0, 3.0 - 0.0]])
    assert torch.equal(rloo.leave_one_out_advantage(rewards), expected)
    assert torch.equal(rloo.leave_one_out_advantage(rewards[..., None].expand(3, 3, 2)), expected[..., None].expand(3, 3, 2))


def test_none_is_not_zero_and_zero_is_not_none():
    a, b = torch.tensor([[0.0, math.nan]]), torch.tensor([[2.0, math.nan]])
    total = rloo.weighted_sum([a, b], (1.0, 0.5))
    assert total[0, 0] == 1.0 and total[0, 1].isnan()
    assert torch.equal(rloo.weighted_sum([a, torch.tensor([[math.nan, 3.0]])], (2.0, 2.0)), torch.tensor([[0.0, 6.0]]))


def sometimes_none(prompts, completions, completion_ids, n, **columns):
    """Unscorable for every third dataset row; otherwise the number of tokens."""
    return [None if i % 3 == 0 else float(len(ids)) for i, ids in zip(n, completion_ids)]


def test_a_run_with_unscorable_completions(train):
    metrics, _ = train(reward_model_path=None, reward_fns=(f"{__file__}:sometimes_none",), normalize_reward=True, normalize_advantage=True,
                       total_episodes=48, num_eval_prompts=8)
    assert all(math.isfinite(value) for update in metrics for value in update.values())


def test_groups_go_by_position_never_by_text(train, tmp_path):
    """Two rows with the same prompt and different columns stay two groups: within each all rewards are equal."""
    (tmp_path / "same.jsonl").write_text('{"prompt": "a b", "value": 1}\n{"prompt": "a b", "value": 5}\n')
    metrics, _ = train(dataset_name=str(tmp_path / "same.jsonl"), reward_model_path=None, reward_fns=(f"{__file__}:column_value",), kl_coef=0.0)
    assert metrics[0]["objective/scores"] == 3 and metrics[0]["frac_reward_zero_std"] == 1
    assert metrics[0]["loss/policy_avg"] == 0 and metrics[0]["grad_norm"] == 0


def column_value(prompts, completions, completion_ids, value, **columns):
    return value


def test_raw_scores_are_logged_and_zero_std_is_counted_before_kl(train):
    """Half of the prompts give equal scores to all completions. Once KL is subtracted no two rewards are equal any more."""
    metrics, _ = train(reward_model_path=None, reward_fns=(f"{__file__}:constant_for_even_rows",), normalize_reward=True, total_episodes=64)
    for even, odd in (metrics[:2], metrics[2:]):  # an epoch is two updates
        assert even["frac_reward_zero_std"] + odd["frac_reward_zero_std"] == 1
        assert even["objective/scores"] + odd["objective/scores"] == pytest.approx(5 / 2 + 5 / 2)
    assert all(update["objective/kl"] != 0 for update in metrics[1:])


def constant_for_even_rows(prompts, completions, completion_ids, n, **columns):
    """2 for all completions of an even row; 2.5 and 3.5 for the two of an odd one."""
    return [2.0 if row % 2 == 0 else 2.5 + (i >= len(n) // 2) for i, row in enumerate(n)]


def test_normalisation_is_over_the_whole_update(train, monkeypatch):
    """Advantages have mean 0 and standard deviation 1 over all prompts of the update, not per micro-batch or group."""
    seen = []
    original = rloo.policy_loss
    monkeypatch.setattr(rloo, "policy_loss", lambda new, old, a, mask, *clip: seen.append((a, mask)) or original(new, old, a, mask, *clip))
    train(normalize_advantage=True, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    advantages = torch.cat([a for a, _ in seen], dim=1)
    assert advantages.shape == (2, 8)
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6) and advantages.std().item() == pytest.approx(1, abs=1e-5)
    seen.clear()
    train(normalize_advantage=True, kl_level="token", per_device_train_batch_size=4, gradient_accumulation_steps=4)
    real = torch.cat([a[mask] for a, mask in seen])
    assert real.mean().item() == pytest.approx(0, abs=1e-6) and real.std().item() == pytest.approx(1, abs=1e-5)


def test_without_kl_no_reference_is_loaded(train, monkeypatch):
    loads = []
    original = rloo.load_policy
    monkeypatch.setattr(rloo, "load_policy", lambda *a: loads.append(a) or original(*a))
    metrics, _ = train(kl_coef=0.0)
    assert len(loads) == 1 and metrics[0]["objective/kl"] == 0
    train()
    assert len(loads) == 3


def test_dropout_is_off_in_rollout_scoring_and_training(train, tiny, tmp_path):
    """A policy whose config asks for half of everything to be dropped ends where one without dropout ends."""
    outputs = []
    for name, dropout in (("off", 0.0), ("on", 0.5)):
        model = tiny_model(hidden_dropout=dropout, attention_dropout=dropout)
        model.load_state_dict(tiny_model().state_dict())
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        outputs.append(train(sft_model_path=str(tmp_path / name), total_episodes=32))
    assert without_times(outputs[0][0]) == without_times(outputs[1][0])
    assert AutoModelForCausalLM.from_pretrained(outputs[1][1]).config.hidden_dropout == 0.5


def test_the_saved_model_keeps_its_generation_config(train, tiny, tmp_path):
    shutil.copytree(tiny / "sft", tmp_path / "sft")
    config = {"eos_token_id": [0, 9], "pad_token_id": 1, "do_sample": True, "top_k": 7, "temperature": 0.3}
    (tmp_path / "sft" / "generation_config.json").write_text(json.dumps(config))
    _, output = train(sft_model_path=str(tmp_path / "sft"))
    saved = json.loads((output / "generation_config.json").read_text())
    assert {name: saved[name] for name in config} == config


def test_logits_are_never_made_for_prompts_nor_all_at_once(monkeypatch, blocks):
    """The head sees the real completion tokens only, at most LOGITS_AT_ONCE entries at a time."""
    model, batch = tiny_model(), random_batch()
    tokens = int(batch.response_mask.sum())
    monkeypatch.setitem(rloo.LOGITS_AT_ONCE, "cpu", 5 * tokens)
    monkeypatch.setattr(rloo, "MIN_COLUMNS", 1)
    with torch.no_grad():
        rloo.completion_logprobs(model, batch, 1.0)
    assert max(blocks) == (tokens, 5) and sum(columns for _, columns in blocks) == model.config.vocab_size


# ----------------------------------------------------------------------------------------------------------------------
# Data and rewards


def test_rows_of_every_documented_form(tiny):
    tokenizer = tiny_tokenizer()
    chat = tiny_tokenizer()
    chat.chat_template = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}a{% endif %}"
    user, assistant = {"role": "user", "content": "b c"}, {"role": "assistant", "content": " d"}
    system = {"role": "system", "content": "e"}
    cases = [({"prompt": "b c", "completion": " d"}, tokenizer, "b c"), ({"prompt": [user], "completion": [assistant]}, tokenizer, "b c"),
             ({"messages": [user, assistant]}, tokenizer, "b c"), ({"prompt": [user], "completion": " d"}, chat, "u b c a"),
             ({"messages": [system, user, assistant, user]}, chat, "s e u b c a")]
    for row, tok, text in cases:
        prepared = rloo.prepare_row(row, tok, "row")
        assert prepared["prompt_text"] == text and prepared["reference"] == " d"
        assert prepared["prompt_ids"] == tokenizer(text)["input_ids"]
    for row, message in (({"text": "b"}, "needs `prompt` or a list of `messages`, has text"), ({"prompt": 3}, "must be text or a list"),
                         ({"prompt": ""}, "empty"), ({"messages": [assistant]}, "no turn with role `user`"),
                         ({"prompt": [system, user]}, "no chat template")):
        with pytest.raises(InputError, match=message):
            rloo.prepare_row(row, tokenizer, "row")


def test_datasets_from_jsonl_json_folders_and_their_splits(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b é"}]
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "x.jsonl").write_text(lines + "\n\n", encoding="utf-8")
    (tmp_path / "validation.json").write_text(json.dumps(rows))
    assert rloo.load_rows(str(tmp_path / "x.jsonl"), "train") == rloo.load_rows(str(tmp_path), "validation") == rows
    assert rloo.load_rows(str(tmp_path), "train") is rloo.load_rows(str(tmp_path / "x.jsonl"), "test") is None
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(InputError, match="broken.jsonl, line 2: not JSON"):
        rloo.load_rows(str(tmp_path / "broken.jsonl"), "train")


def test_a_hub_name_goes_to_the_datasets_package(monkeypatch):
    class FakeDatasets:
        get_dataset_split_names = staticmethod(lambda name: ["train"])
        load_dataset = staticmethod(lambda name, split: [{"prompt": f"{name} {split}"}])

    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets)
    assert rloo.load_rows("someone/something", "train") == [{"prompt": "someone/something train"}]
    assert rloo.load_rows("someone/something", "test") is None
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        rloo.load_rows("someone/something", "train")


def test_too_long_prompts_are_left_out_and_counted(capsys):
    assert rloo.load_rows(str(HERE), "x" * 300) is None  # a name that no file can have
    rows = rloo.prepare_rows([{"prompt": "a b c"}, {"prompt": "a"}], tiny_tokenizer(), 2, "x")
    assert [row["prompt_text"] for row in rows] == ["a"]
    assert "1 of 2 prompts left out, over 2 tokens" in capsys.readouterr().out
    with pytest.raises(InputError, match="no prompt within --max_prompt_length 2"):
        rloo.prepare_rows([{"prompt": "a b c"}], tiny_tokenizer(), 2, "x")


def test_reward_functions_see_prompts_texts_ids_and_columns_in_row_order():
    batch, tokenizer = random_batch(), tiny_tokenizer()
    for i, row in enumerate(batch.rows):
        row.update(prompt=f"prompt {i}", columns={"prompt": f"prompt {i}", "answer": i})
    calls = []

    def reward(prompts, completions, completion_ids, answer, **columns):
        calls.append((prompts, completions, completion_ids, answer, columns))
        return [None if i == 3 else i for i in range(12)]

    scores = rloo.function_reward(reward, "reward", lambda b: rloo.decode(b, tokenizer, [0]), batch)
    assert scores[0, 3].isnan() and scores[2, 1] == 9 and scores.shape == (3, 4)
    prompts, completions, completion_ids, answer, columns = calls[0]
    assert prompts == [f"prompt {i}" for i in range(4)] * 3 and answer == [0, 1, 2, 3] * 3 and columns == {}
    for j, b in itertools.product(range(3), range(4)):
        real = batch.responses[j, b][batch.response_mask[j, b]].tolist()
        assert completion_ids[j * 4 + b] == real  # the stop token included
        assert completions[j * 4 + b] == tokenizer.decode([i for i in real if i > 2])


@pytest.mark.parametrize("returned, message", [
    ([1.0], "returned 1 numbers for 12 completions"), (3.0, "raised TypeError"), ([math.nan] * 12, "finite number"),
    ([math.inf] * 12, "finite number"), ([1e300] * 12, "finite number"), ([10**400] * 12, "finite number"), (["x"] * 12, "returned 'x', not a finite number or None, for the prompt")])
def test_what_a_reward_function_may_not_return(returned, message):
    with pytest.raises(InputError, match=message):
        rloo.function_reward(lambda **kw: returned, "reward", lambda batch: [""] * 12, random_batch())


def test_a_reward_function_that_raises_is_named():
    with pytest.raises(InputError, match="reward function f.py:f raised ZeroDivisionError"):
        rloo.function_reward(lambda **kw: 1 / 0, "f.py:f", lambda batch: [""] * 12, random_batch())


def test_weights_add_reward_model_and_functions(train):
    function = f"{__file__}:constant_reward"
    (alone,), _ = train()
    (both,), _ = train(reward_fns=(function,), reward_weights=(2.0, -3.0))
    assert both["rewards/reward_model/mean"] == alone["objective/scores"] and both["rewards/constant_reward/mean"] == 1
    assert both["objective/scores"] == pytest.approx(2 * alone["objective/scores"] - 3, abs=1e-5)
    assert both["rewards/reward_model/std"] > 0 == both["rewards/constant_reward/std"]


def test_a_reward_model_with_another_tokenizer_reads_the_text(train, tmp_path):
    """Its vocabulary holds the same words under other numbers and its embeddings are permuted alike: the scores are those of
    the model that shares the policy's tokenizer."""
    order = torch.randperm(len(WORDS), generator=torch.Generator().manual_seed(0)).tolist()
    vocab = {word: i for i, word in enumerate(["<eos>", "[PAD]", "[UNK]", *(WORDS[i] for i in order)])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    other = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="[PAD]", unk_token="[UNK]")
    model, permuted, tokenizer = tiny_model(classifier=True), tiny_model(classifier=True), tiny_tokenizer()
    with torch.no_grad():
        permuted.get_input_embeddings().weight[3:] = model.get_input_embeddings().weight[3:][order]
    batch = random_batch()
    for row in batch.rows:
        row["prompt_text"] = tokenizer.decode(row["prompt_ids"]) + " "
    with torch.no_grad():
        scores = rloo.text_reward(permuted, batch, other, lambda b: rloo.decode(b, tokenizer, [0]), [0])
        assert torch.allclose(scores, rloo.model_reward(model, batch), atol=1e-5)
    permuted.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    metrics, _ = train(reward_model_path=str(tmp_path))  # and main takes this path by itself
    assert metrics[0]["objective/scores_std"] > 0


def test_a_chat_template_s_special_tokens_are_not_added_twice_for_a_reward_model_with_another_tokenizer():
    tokenizer, model, batch = tiny_tokenizer(), tiny_model(classifier=True), random_batch()
    adds_bos = tiny_tokenizer()
    adds_bos.bos_token = "<eos>"
    adds_bos.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    texts = [tokenizer.decode(row["prompt_ids"]) + " " for row in batch.rows]
    as_text = [row | {"prompt": text, "prompt_text": text} for row, text in zip(batch.rows, texts)]
    as_chat = [row | {"prompt": [{"role": "user", "content": text}], "prompt_text": "<eos> " + text} for row, text in zip(batch.rows, texts)]
    with torch.no_grad():
        one, other = (rloo.text_reward(model, batch._replace(rows=rows), adds_bos, lambda b: rloo.decode(b, tokenizer, [0]), [0])
                      for rows in (as_text, as_chat))
    assert torch.equal(one, other)


def test_a_reward_model_shares_the_tokenizer_or_has_its_own(tiny, tmp_path):
    args, tokenizer = Args(reward_model_path=str(tiny / "reward")), tiny_tokenizer()
    def own_tokenizer(vocab_size=16):
        return rloo.load_reward_model(args, tokenizer, vocab_size, torch.device("cpu"), torch.float32)[1]

    assert own_tokenizer() is None
    with pytest.raises(InputError, match="has 16 tokens, which do not fit"):  # the policy could sample a 17th
        args.reward_model_path = str(tmp_path / "none")
        shutil.copytree(tiny / "reward", tmp_path / "none", ignore=shutil.ignore_patterns("*token*"))
        assert own_tokenizer() is None  # none of its own: the policy's
        own_tokenizer(vocab_size=17)
    shutil.copytree(tiny / "reward", tmp_path / "reward")
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(tmp_path / "reward")
    args.reward_model_path = str(tmp_path / "reward")
    assert own_tokenizer().get_vocab()["a"] == 1
    (tmp_path / "reward" / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="--reward_model_path"):
        own_tokenizer()


# ----------------------------------------------------------------------------------------------------------------------
# Flags


def parse(line: str) -> Args:
    return rloo.parse_args(line.split())


def test_trl_commands_parse_and_mean_the_same():
    one = rloo.resolve_args(parse("--dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style --dataset_train_split descriptiveness "
                                  "--learning_rate 3e-6 --output_dir models/minimal/rloo --per_device_train_batch_size 64 "
                                  "--gradient_accumulation_steps 1 --total_episodes 10000 --model_name_or_path EleutherAI/pythia-1b-deduped "
                                  "--reward_model_path EleutherAI/pythia-1b-deduped --missing_eos_penalty 1.0"))
    assert one.sft_model_path == one.model_name_or_path == "EleutherAI/pythia-1b-deduped" and one.dataset_train_split == "descriptiveness"
    assert (one.learning_rate, one.per_device_train_batch_size, one.gradient_accumulation_steps, one.total_episodes) == (3e-6, 64, 1, 10_000)
    assert one.missing_eos_penalty == 1.0 and one.output_dir == "models/minimal/rloo" and one.judge_fn is None
    two = rloo.resolve_args(parse("--dataset_name trl-internal-testing/tldr-preference-sft-trl-style --dataset_test_split validation "
                                  "--output_dir models/minimal/rloo_tldr --num_ppo_epochs 2 --num_mini_batches 2 --learning_rate 3e-6 "
                                  "--per_device_train_batch_size 16 --gradient_accumulation_steps 16 --total_episodes 1000000 "
                                  "--model_name_or_path EleutherAI/pythia-1b-deduped --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr "
                                  "--reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr "
                                  "--local_rollout_forward_batch_size 16 --missing_eos_penalty 1.0 --stop_token eos --kl_coef 0.03"))
    assert (two.num_ppo_epochs, two.num_mini_batches, two.local_rollout_forward_batch_size, two.stop_token, two.kl_coef) == (2, 2, 16, "eos", 0.03)
    assert two.sft_model_path == "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr" and two.model_name_or_path == "EleutherAI/pythia-1b-deduped"
    for args in (one, two):  # not named in either command, so TRL's defaults
        assert (args.response_length, args.temperature, args.cliprange, args.reward_clip_range, args.seed) == (53, 0.7, 0.2, 10.0, Args.seed)


def test_hyphens_and_trls_name_for_the_token_level():
    assert parse("--rloo-k 8 --kl-coef 0.1").rloo_k == parse("--rloo_k 8 --kl_coef 0.1").rloo_k == 8
    assert rloo.resolve_args(parse("--token_level_kl")).kl_level == "token"


def test_without_a_dataset_the_embedded_task_is_meant():
    args = rloo.resolve_args(Args())
    assert Path(args.sft_model_path).is_dir() and Path(args.reward_model_path).is_dir() and Path(args.dataset_name).is_dir()
    assert rloo.resolve_args(Args(reward_fns=("x.py:f",))).reward_model_path is None


def snapshot(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in str(path)}


BROKEN = {  # what the next test finds in the folder {x}
    "empty.jsonl": "", "broken.jsonl": '{"prompt": "a"}\n{"prompt": }\n', "list.jsonl": "[1]\n", "noprompt.jsonl": '{"text": "a"}\n',
    "number.jsonl": '{"prompt": 3}\n', "blank.jsonl": '{"prompt": ""}\n', "nouser.jsonl": '{"messages": [{"role": "system", "content": "a"}]}\n',
    "completion.jsonl": '{"prompt": "a", "completion": 7}\n', "deep.json": "[" * 100_000, "object.json": '{"prompt": "a"}',
    "latin.jsonl": b'{"prompt": "\xe4\xff"}\n', "chat.jsonl": '{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}\n',
    "fns.py": "import math\ndef boom(**kw): 1 / 0\ndef short(**kw): return [1.0]\ndef nan(completions, **kw): return [math.nan] * len(completions)\n"
              "def inf(completions, **kw): return [math.inf] * len(completions)\ndef text(completions, **kw): return ['x'] * len(completions)\n"
              "def number(**kw): return 3\nthing = 5\n",
    "bad.py": "import nowhere_to_be_found\n", "syntax.py": "def f(:\n", "quits.py": "raise SystemExit(3)\n",
}
MISTAKES = [  # what is added to a command line that works, and what the line must say
    ("--rloo_k 1", "--rloo_k 1: must be at least 2"), ("--rloo_k 0", "--rloo_k 0"), ("--rloo_k three", "--rloo_k: invalid literal"),
    ("--per_device_train_batch_size 7", "--per_device_train_batch_size 7: must be a multiple of --rloo_k 2"),
    ("--per_device_train_batch_size 0", "--per_device_train_batch_size 0: must be at least 1"),
    ("--gradient_accumulation_steps -1", "--gradient_accumulation_steps -1"), ("--num_mini_batches 0", "--num_mini_batches 0"),
    ("--num_ppo_epochs 0", "--num_ppo_epochs 0"), ("--total_episodes 0", "--total_episodes 0"), ("--response_length 0", "--response_length 0"),
    ("--local_rollout_forward_batch_size 0", "--local_rollout_forward_batch_size 0"), ("--max_prompt_length -5", "--max_prompt_length -5"),
    ("--learning_rate -1", "--learning_rate -1.0: must be finite and not negative"), ("--learning_rate inf", "--learning_rate inf"),
    ("--kl_coef nan", "--kl_coef nan"), ("--cliprange -0.1", "--cliprange -0.1"), ("--warmup_ratio 2", "--warmup_ratio 2.0: must be at most 1"),
    ("--missing_eos_penalty nan", "--missing_eos_penalty nan"), ("--temperature 0", "--temperature 0: must be above 0"),
    ("--seed 4294967296", "--seed 4294967296"), ("--save_steps -1", "--save_steps -1"), ("--save_total_limit 0", "--save_total_limit 0: must be at least 1"),
    ("--stop_token eos --stop_token_id 3", "not both"), ("--stop_token zebra", "--stop_token 'zebra'"), ("--stop_token_id 99", "--stop_token_id 99"),
    ("--reward_weights 1 2", "--reward_weights has 2 numbers for 1 rewards"), ("--reward_weights nan", "must be finite"),
    ("--reward_fns {x}/fns.py:number {x}/fns.py:number", "names a function twice"), ("--reward_fns {x}/no.py:f", "no file"),
    ("--reward_fns fns", "must be file.py:function"), ("--reward_fns {x}/fns.py:nothing", "has no attribute 'nothing'"),
    ("--reward_fns {x}/fns.py:thing", "is not a function"), ("--reward_fns {x}/bad.py:f", "ModuleNotFoundError"),
    ("--reward_fns {x}/syntax.py:f", "SyntaxError"), ("--reward_fns {x}/quits.py:f", "SystemExit"),
    ("--judge_fn {x}/fns.py:nothing --num_eval_prompts 2", "--judge_fn"),
    ("--output_dir {x}/fns.py/x", "cannot write"), ("--output_dir {x}", "exists and is not empty"), ("--output_dir {x} --resume", "no run to resume"),
    ("--device meta", "--device meta"), ("--device cuda:99", "--device cuda:99: cannot be used"), ("--device gpu", "--device gpu"),
    ("--dataset_name {x}/nowhere.jsonl", "no such file"), ("--dataset_name nobody/nothing", "--dataset_name nobody/nothing"),
    ("--dataset_name " + "n" * 5000, "--dataset_name nnn"), ("--dataset_train_split dev", "no split dev"), ("--dataset_name {x}/empty.jsonl", "there are no rows"),
    ("--dataset_name {x}/broken.jsonl", "broken.jsonl, line 2: not JSON"), ("--dataset_name {x}/list.jsonl", "list.jsonl, row 1: must be a JSON object"),
    ("--dataset_name {x}/noprompt.jsonl", "row 1: needs `prompt` or a list of `messages`, has text"), ("--dataset_name {x}/deep.json", "line 1: not JSON"),
    ("--dataset_name {x}/number.jsonl", "row 1: `prompt` must be text"), ("--dataset_name {x}/blank.jsonl", "row 1: the prompt is empty"),
    ("--dataset_name {x}/nouser.jsonl", "no turn with role `user`"), ("--dataset_name {x}/completion.jsonl", "the reference must be text"),
    ("--dataset_name {x}/object.json", "must be a list of rows"), ("--dataset_name {x}/latin.jsonl", "cannot be read as UTF-8"),
    ("--dataset_name {x}/chat.jsonl", "no chat template"), ("--max_prompt_length 1", "no prompt within --max_prompt_length 1"),
    ("--response_length 125", "exceed the model's 128 positions"), ("--sft_model_path /nowhere", "--sft_model_path /nowhere: no such folder"),
    ("--sft_model_path {x}", "--sft_model_path {x}: cannot be loaded"), ("--sft_model_path {reward}", "is no trained GPTNeoXForCausalLM"),
    ("--reward_model_path ./no", "--reward_model_path ./no"), ("--model_name_or_path {x}", "--model_name_or_path"),
    ("--attn_implementation nonsense", "--sft_model_path"), ("--nonsense 3", "--nonsense"), ("--dtype float16", "float16"), ("--kl_level word", "word"),
    ("--learning_rate fast", "Error parsing --learning_rate"), ("stray", "stray"), ("--resume", "--resume needs --output_dir"),
    ("--reward_fns {x}/fns.py:boom", "reward function {x}/fns.py:boom raised ZeroDivisionError"),
    ("--reward_fns {x}/fns.py:short", "returned 1 numbers for 16 completions"), ("--reward_fns {x}/fns.py:nan", "returned nan, not a finite number or None, for the prompt"),
    ("--reward_fns {x}/fns.py:inf", "returned inf"), ("--reward_fns {x}/fns.py:text", "returned 'x'"), ("--reward_fns {x}/fns.py:number", "raised TypeError"),
]


@pytest.mark.parametrize("flags, message", MISTAKES, ids=[flags[:60] for flags, _ in MISTAKES])
def test_a_mistake_is_one_line_and_touches_nothing(tiny, tmp_path, flags, message, monkeypatch, capfd):
    for name, content in BROKEN.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)  # where runs/ would be
    before = snapshot(tiny, tmp_path)
    line = (f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_model_path {tiny}/reward --response_length 6 --rloo_k 2 --num_eval_prompts 0 "
            f"--per_device_train_batch_size 16 --gradient_accumulation_steps 1 --total_episodes 16 {'' if '--output_dir' in flags or flags == '--resume' else '--output_dir out'} ")
    fill = lambda text: text.format(x=tmp_path, reward=tiny / "reward")
    with pytest.raises(SystemExit) as end:
        rloo.command_line((line + fill(flags)).split())
    said = end.value.code
    assert isinstance(said, str) and said.startswith("rloo.py: ") and "\n" not in said and fill(message) in said and len(said) < 600
    assert "Traceback" not in "".join(capfd.readouterr())
    after = snapshot(tiny, tmp_path)
    left = {"args.json", "metrics.jsonl", "completions.jsonl"} if "raised" in message or "returned" in message else set()
    assert {path.name for path in after.keys() - before.keys()} == left and {path: after[path] for path in before} == before


def test_two_thousand_damaged_datasets_end_in_rows_or_in_one_line(tiny, tmp_path, monkeypatch):
    """Truncated, cut, repeated, with NULs, other encodings, other types, huge lines: every file is rows or an InputError."""
    rng, tokenizer, outcomes = random.Random(0), tiny_tokenizer(), {"rows": 0, "line": 0}
    good = "".join(json.dumps(row) + "\n" for row in (
        {"prompt": "a b", "completion": "c"}, {"prompt": "ä €", "n": 1}, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": [{"role": "user", "content": "d"}]}))
    values = [None, 0, -1.5, 1e999, True, "", "\x00", "\ud800", [], {}, [[]], [None], [{"role": "user"}], [{"content": 3}], "a" * 100_000, {"role": "user"}]
    kept = []
    for i in range(2400):
        text = good
        for _ in range(rng.randint(1, 3)):
            kind, at = rng.randrange(9), rng.randrange(len(text) + 1)
            if kind == 0:
                text = text[:at]
            elif kind == 1:
                text = text[:at] + rng.choice("{}[]\",:\n\r\x00\ufeff\u2028é0-") + text[at:]
            elif kind == 2:
                text = text[:at] + text[at + rng.randint(1, 9):]
            elif kind == 3:
                text = text[:at] + text[rng.randrange(len(text) + 1):]
            elif kind == 4:
                text = json.dumps({rng.choice(["prompt", "messages", "completion", "x"]): rng.choice(values) for _ in range(rng.randint(0, 3))}) + "\n" + text
            elif kind == 5:
                text = json.dumps(rng.choice(values)) + "\n" + text
            elif kind == 6:
                text = text.replace("\n", rng.choice(["\r\n", "\n\n", "\r", " "]))
            elif kind == 7:
                text = "[" * rng.choice([1, 30, 5000]) + text
            else:
                text = text.replace(*rng.choice([("user", "User"), ("prompt", "messages"), ("messages", "prompt"), (":", ""), ("a", "\\u0000")]))
        data = text.encode(rng.choice(["utf-8"] * 6 + ["utf-16", "utf-32", "utf-8-sig", "latin-1"]), errors="replace")
        if rng.random() < 0.1:
            data = data[:rng.randrange(len(data) + 1)] + rng.randbytes(rng.randint(0, 20))
        path = tmp_path / f"train{rng.choice(['.jsonl', '.jsonl', '.json'])}"
        path.write_bytes(data)
        try:
            rloo.load_data(Args(dataset_name=str(path), num_eval_prompts=0), tokenizer)
            outcomes["rows"] += 1
            if len(kept) < 12 and rng.random() < 0.2:
                shutil.copy(path, tmp_path / f"kept{len(kept)}{path.suffix}")
                kept.append(tmp_path / f"kept{len(kept)}{path.suffix}")
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            outcomes["line"] += 1
    assert outcomes["rows"] > 50 and outcomes["line"] > 500
    for i, path in enumerate(kept):  # what is accepted trains
        rloo.main(Args(dataset_name=str(path), sft_model_path=str(tiny / "sft"), reward_model_path=str(tiny / "reward"), rloo_k=2, response_length=4, num_eval_prompts=4,
                       per_device_train_batch_size=4, gradient_accumulation_steps=1, total_episodes=4, num_sample_generations=0, output_dir=str(tmp_path / f"out{i}")))


@pytest.mark.parametrize("kind", ["no pad token", "labels", "no head", "too many tokens"])
def test_models_that_cannot_be_used_are_named(train, tiny, tmp_path, kind, capsys):
    shutil.copytree(tiny / "sft", tmp_path / "sft")
    flags, tokenizer = {}, tiny_tokenizer()
    if kind == "no pad token":
        tokenizer.pad_token = None
        tokenizer.save_pretrained(tmp_path / "sft")
        flags, message = {"sft_model_path": str(tmp_path / "sft")}, "the tokenizer has no pad token"
    elif kind == "too many tokens":
        tokenizer.add_tokens(["more", "words"])
        tokenizer.save_pretrained(tmp_path / "sft")
        flags, message = {"sft_model_path": str(tmp_path / "sft")}, "the tokenizer has 18 tokens, the model only 16"
    elif kind == "labels":
        config = tiny_model(classifier=True).config
        config.num_labels = 3
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "reward")
        flags, message = {"reward_model_path": str(tmp_path / "reward")}, "has 3 labels, a reward model has one"
    else:
        train(reward_model_path=str(tiny / "sft"))
        assert "has no trained reward head" in capsys.readouterr().out
        return
    with pytest.raises(InputError, match=message):
        train(**flags)


def test_a_tokenizer_without_pad_gets_one_where_the_model_has_room(train, tmp_path):
    tiny_model(vocab_size=20).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    metrics, output = train(sft_model_path=str(tmp_path), reward_model_path=None, reward_fns=(f"{__file__}:constant_reward",))
    assert len(metrics) == 1 and AutoTokenizer.from_pretrained(output).pad_token == "[PAD]"


def weights_after(train, **flags) -> torch.Tensor:
    _, output = train(**flags)
    return torch.cat([p.detach().flatten() for p in AutoModelForCausalLM.from_pretrained(output).parameters()])


def test_learning_rate_schedules(train):
    rates = {schedule: [update["lr"] for update in train(lr_scheduler_type=schedule, total_episodes=64, learning_rate=1.0, **flags)[0]]
             for schedule, flags in (("linear", {}), ("cosine", {}), ("constant", {"warmup_ratio": 0.5}))}
    assert rates["linear"] == pytest.approx([1, 0.75, 0.5, 0.25]) and rates["constant"] == pytest.approx([0, 0.5, 1, 1])
    assert rates["cosine"] == pytest.approx([(1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)])


@pytest.mark.parametrize("name, value", [("weight_decay", 0.5), ("adam_eps", 1.0), ("max_grad_norm", 1e-9), ("learning_rate", 1e-3),
                                         ("num_ppo_epochs", 2), ("num_mini_batches", 2), ("normalize_advantage", True), ("rloo_k", 4),
                                         ("normalize_reward", True), ("reward_clip_range", 0.1), ("missing_eos_penalty", 2.0), ("temperature", 0.5),
                                         ("mask_truncated_completions", True), ("seed", 7), ("attn_implementation", "eager")])
def test_every_flag_changes_the_run(train, name, value):
    """... from what it is without the flag, but for the attention kernel, which changes nothing but rounding."""
    base = dict(adam_eps=1e-3, max_grad_norm=0.0, total_episodes=32, seed=2)  # two updates; Adam sees the size of the gradient
    if name == "num_mini_batches":
        base["per_device_train_batch_size"] = 8
        plain = weights_after(train, **base, gradient_accumulation_steps=2)
    else:
        plain = weights_after(train, **base)
    change = (plain - weights_after(train, **{**base, name: value})).abs().max().item()
    assert change < 1e-3 if name == "attn_implementation" else change > 1e-4


@pytest.mark.parametrize("flags", [dict(cliprange=1e-4), dict(cliprange_high=1e-4), dict(cliprange=1e-4, cliprange_high=1e4)])
def test_clip_ranges(train, flags):
    """In the second epoch the ratios have moved; a tiny range clips some, and each side has a range of its own."""
    base = dict(num_ppo_epochs=2, learning_rate=1e-3)
    wide, _ = train(**base, cliprange=0.999, cliprange_high=1e6)
    narrow, _ = train(**base, **flags)
    assert wide[0]["policy/clipfrac_avg"] < narrow[0]["policy/clipfrac_avg"] <= 0.5


def test_kl_coef_keeps_the_policy_at_the_reference(train):
    runs = (train(kl_coef=beta, total_episodes=480, learning_rate=3e-3)[0] for beta in (1e-9, 1.0))
    free, held = (sum(update["objective/kl"] for update in metrics[-5:]) / 5 for metrics in runs)
    assert held < 0.5 * free


def test_each_side_of_the_clip_range_clips_the_ratios_on_its_side(train, monkeypatch):
    """ε_high decides only where the advantage is positive and the ratio above 1, ε_low only where both are below."""
    seen, original = [], rloo.policy_loss

    def spy(new, old, advantages, *rest):
        seen.append((advantages, *original(new, old, advantages, *rest)[1:]))
        return original(new, old, advantages, *rest)

    monkeypatch.setattr(rloo, "policy_loss", spy)
    for flags, side in ((dict(cliprange=1e-4, cliprange_high=1e6), -1), (dict(cliprange=0.9999, cliprange_high=1e-4), 1)):
        seen.clear()
        train(num_ppo_epochs=2, learning_rate=1e-3, **flags)
        advantages, log_ratio, clipped = seen[-1]
        assert clipped.any() and (advantages[clipped].sign() == side).all() and (log_ratio[clipped].sign() == side).all()


@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_the_temperature_is_the_same_for_policy_and_reference(train, num_mini_batches):
    """While policy and reference are the same model, the KL is 0 at any temperature, and the ratio is 1."""
    (first,), _ = train(temperature=0.6, learning_rate=0.0, num_mini_batches=num_mini_batches, per_device_train_batch_size=16 // num_mini_batches)
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4) and first["val/ratio"] == pytest.approx(1, abs=1e-5)


def test_a_mini_batch_s_gradient_is_the_mean_over_its_own_completions(train):
    """Two mini-batches that each are the update of a run of their own size have gradients of the same size."""
    flags = dict(learning_rate=0.0, reward_model_path=None, reward_fns=(f"{__file__}:count_tokens",), max_grad_norm=0.0)
    (halves,), _ = train(num_mini_batches=2, per_device_train_batch_size=8, **flags)
    (whole,), _ = train(num_mini_batches=1, per_device_train_batch_size=16, **flags)
    losses = halves["loss/policy_avg"], whole["loss/policy_avg"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert 0.7 * whole["grad_norm"] < halves["grad_norm"] < 3 * whole["grad_norm"]  # half the scale would fall below


def test_an_update_without_any_score_is_survived(train):
    metrics, _ = train(reward_model_path=None, reward_fns=(f"{__file__}:never",), total_episodes=32)
    assert len(metrics) == 2 and metrics[0]["grad_norm"] == 0 and "objective/scores" not in metrics[0]


def never(prompts, completions, completion_ids, **columns):
    return [None] * len(prompts)


def test_lone_scorable_completions_are_not_trained_on(train, monkeypatch):
    """... with normalised advantages either, whose mean is not theirs."""
    seen, original = [], rloo.policy_loss
    monkeypatch.setattr(rloo, "policy_loss", lambda new, old, a, mask, *clip: seen.append((a, mask)) or original(new, old, a, mask, *clip))
    for level in ("sequence", "token"):
        train(reward_model_path=None, reward_fns=(f"{__file__}:one_of_even_rows",), normalize_advantage=True, kl_level=level, num_eval_prompts=0)
        advantages, mask = seen[-1]
        unscored = (advantages.flatten(2) == 0).all(-1).all(0) if advantages.dim() == 3 else (advantages == 0).all(0)
        assert 0 < unscored.sum() < 8


def one_of_even_rows(prompts, completions, completion_ids, n, **columns):
    """Of an even row only the first completion has a score."""
    return [None if row % 2 == 0 and i >= len(n) // 2 else len(ids) + i / 100 for i, (row, ids) in enumerate(zip(n, completion_ids))]


@pytest.mark.parametrize("what, name, spoil", [
    ("a log-prob of the rollout", "rollout", lambda out: (out[0], out[1] * math.nan)),
    ("a log-prob under the reference", "kl_per_token", None),
    ("the loss", "policy_loss", lambda out: (out[0] * math.inf, *out[1:])),
    ("the gradient", "average_gradients", None)])
def test_numbers_that_are_not_finite_stop_the_run_before_they_are_saved(train, tmp_path, monkeypatch, what, name, spoil):
    """In the second update; the line names the update, the number and the checkpoint of the first."""
    calls, original = [], getattr(rloo, name)

    def second(*inputs, **kwargs):
        calls.append(1)
        if len(calls) == 2 and name == "average_gradients":
            inputs = list(inputs[0])
            inputs[0].grad.fill_(math.inf)
            return original(inputs)
        out = original(*inputs, **kwargs)
        return spoil(out) if len(calls) == 2 and spoil else out

    if name == "kl_per_token":  # the reference's forward is the second of each update that gives log-probs
        name, original = "in_chunks", rloo.in_chunks
        spoil = lambda out: out / 0
        monkeypatch.setattr(rloo, "in_chunks", second)
        flags = dict(reward_model_path=None, reward_fns=(f"{__file__}:constant_reward",))
    else:
        second.__name__ = name
        monkeypatch.setattr(rloo, name, second)
        flags = {}
    output = tmp_path / "out"
    with pytest.raises(InputError, match=f"update 2: {what} is not finite.*last checkpoint: {output}/checkpoint-1") as error:
        train(**flags, output_dir=str(output), total_episodes=48, save_steps=1)
    assert "\n" not in str(error.value) and len((output / "metrics.jsonl").read_text().splitlines()) == 1
    weights = AutoModelForCausalLM.from_pretrained(output / "checkpoint-1").state_dict()
    assert all(tensor.isfinite().all() for tensor in weights.values()) and not (output / "checkpoint-2").exists()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError(),
                                   RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")])
def test_out_of_memory_names_the_batch_flags(monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(rloo, "main", fail)
    with pytest.raises(SystemExit) as end:
        rloo.command_line([])
    for flag in ("--per_device_train_batch_size", "--gradient_accumulation_steps", "--local_rollout_forward_batch_size"):
        assert flag in end.value.code
    assert end.value.code.startswith("rloo.py: out of memory") and "\n" not in end.value.code


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_logging_service_that_fails_does_not_end_the_run(train, monkeypatch, capsys, where):
    logged = []

    def answer(name):
        def call(*args, **kwargs):
            logged.append(name)
            if name == where:
                raise ConnectionError("the service is down")
        return call

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=answer("init"), log=answer("log"), Table=answer("Table")))
    metrics, _ = train(track=True, total_episodes=48)
    assert len(metrics) == 3 and logged == ["init"] + ["log"] * (where == "log")
    assert capsys.readouterr().out.count("the run goes on without Weights & Biases (the service is down)") == 1


def test_references_end_in_eos_and_evaluations_draw_the_same_random_numbers(train):
    rows = [{"prompt_ids": [3], "reference": "a b"}, {"prompt_ids": [3, 4], "reference": "c"}]
    batch = rloo.reference_batch(rows, tiny_tokenizer(), [0, 9], 128, torch.device("cpu"))
    assert rloo.completion_tokens(batch) == [[3, 4, 0], [5, 0]]
    assert rloo.completion_tokens(rloo.reference_batch(rows, tiny_tokenizer(), [9], 128, torch.device("cpu")))[1] == [5, 9]
    _, output = train(num_eval_prompts=8, num_sample_generations=1, learning_rate=0.0, total_episodes=32)
    lines = [json.loads(line) for line in open(output / "completions.jsonl")]
    texts = {update: [line["completion"] for line in lines if line["update"] == update and line["mode"] == "sampled"] for update in (0, 1, 2)}
    assert texts[0] == texts[1] == texts[2]


def test_a_classifier_is_no_policy(train, tiny):
    with pytest.raises(InputError, match="is no trained GPTNeoXForCausalLM, it has no"):
        train(sft_model_path=str(tiny / "reward"))


def test_num_eval_prompts_samples_and_held_out_rows(train, tiny, capsys):
    metrics, output = train(num_eval_prompts=5, num_sample_generations=1, total_episodes=64, judge_fn=f"{__file__}:count_tokens")
    lines = [json.loads(line) for line in open(output / "completions.jsonl")]
    assert [(line["update"], line["mode"]) for line in lines[::5]] == [(0, "sampled"), (0, "greedy"), (2, "sampled"), (4, "sampled"), (4, "greedy")]
    assert len(lines) == 25 and set(lines[0]) == {"update", "mode", "prompt", "completion", "reference", "score"}
    references = [json.loads(line)["completion"] for line in open(tiny / "data" / "test.jsonl")]
    assert [line["reference"] for line in lines[:5]] == references[:5]
    assert {"eval_before/greedy/judge_win_rate", "eval_before/sampled/score"} <= set(metrics[0])
    assert "eval/sampled/win_rate" in metrics[1] and "eval/greedy/judge_score" in metrics[3]
    screen = capsys.readouterr().out
    assert screen.count("Held-out completions after") == 3 and "On 5 held-out prompts" in screen and str(output) in screen
    train(dataset_name=str(tiny / "data" / "train.jsonl"), num_eval_prompts=500)
    assert "no split test: its last 1 rows are held out" in capsys.readouterr().out


def count_tokens(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def test_win_rate_counts_ties_half_and_skips_what_has_no_score():
    won = rloo.wins(torch.tensor([1.0, 2.0, 3.0, math.nan, 5.0]), torch.tensor([0.0, 2.0, 4.0, 0.0, math.nan]))
    assert won[:3].tolist() == [1, 0.5, 0] and won[3:].isnan().all()


def test_tables_fit_the_terminal():
    table = rloo.text_table(["prompt", "completion", "score"], [["long words " * 30, "x" * 200, "1.25"]], 79)
    assert max(map(len, table.splitlines())) <= 79 and "1.25" in table


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs


def shell(args: list[str], cwd: Path, **env) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)


def test_a_custom_reward_function_is_learned(train):
    """The reward is the number of `a`s in the completion; nearly all tokens become `a`."""
    metrics, _ = train(reward_model_path=None, reward_fns=(f"{__file__}:count_a",), kl_coef=0.0, total_episodes=16 * 60, rloo_k=4, learning_rate=1e-2)
    assert metrics[0]["objective/scores"] < 1.5 and metrics[-1]["objective/scores"] > 5


def count_a(prompts, completions, completion_ids, **columns):
    return [text.split().count("a") for text in completions]


def test_the_file_alone_runs_in_an_empty_folder_and_what_it_leaves_loads(tiny, tmp_path):
    shutil.copy(HERE / "rloo.py", tmp_path)
    flags = (f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_model_path {tiny}/reward --response_length 6 --total_episodes 16 "
             "--per_device_train_batch_size 8 --rloo_k 4 --kl_coef 0.03 --output_dir out --track").split()
    result = shell(["rloo.py", *flags], tmp_path, WANDB_MODE="offline", COLUMNS="100")
    assert result.returncode == 0, result.stderr
    assert "The policy and its tokenizer: out" in result.stdout and "before" in result.stdout
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"args.json", "metrics.jsonl", "completions.jsonl", "model.safetensors", "config.json", "tokenizer.json"} <= left
    assert json.loads((tmp_path / "out" / "args.json").read_text())["kl_coef"] == 0.03
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model(**tokenizer("a b c", return_tensors="pt")).logits.shape == (1, 3, 16)
    assert list((tmp_path / "out").glob("wandb/offline-run-*/*.wandb"))
    missing = shell(["rloo.py"], tmp_path)
    assert missing.returncode == 1 and "--dataset_name is needed" in missing.stderr and "Traceback" not in missing.stderr


def test_main_command_runs_on_the_embedded_task(tmp_path):
    flags = "--total_episodes 64 --gradient_accumulation_steps 1 --num_eval_prompts 8 --num_sample_generations 1".split()
    result = shell([str(HERE / "rloo.py"), *flags], tmp_path, COLUMNS="80")
    assert result.returncode == 0, result.stderr
    assert "judge_win_rate" in result.stdout and max(map(len, result.stdout.splitlines())) <= 120
    (output,) = (tmp_path / "runs").iterdir()
    assert AutoModelForCausalLM.from_pretrained(output).config.model_type == "gpt_neox"


def test_a_mistake_on_the_command_line_is_one_line_and_a_status(tmp_path):
    result = shell([str(HERE / "rloo.py"), "--rloo_k", "1"], tmp_path)
    assert result.returncode == 1 and len(result.stderr.strip().splitlines()) == 1 and result.stderr.startswith("rloo.py: --")
    assert not list(tmp_path.iterdir())


def test_importing_has_no_side_effect(tmp_path):
    result = shell(["-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); import rloo"], tmp_path)
    assert (result.returncode, result.stdout, result.stderr, list(tmp_path.iterdir())) == (0, "", "", [])


def test_the_embedded_task_can_be_rebuilt(tmp_path):
    """`mini_tldr.py --quick` makes a small one of the same kind, and the judge grades it."""
    result = shell([str(HERE / "benchmark" / "mini_tldr.py"), "--quick", "--output_dir", "mini"], tmp_path)
    assert result.returncode == 0 and "reward model agreement" in result.stdout, result.stderr
    rows = rloo.load_rows(str(tmp_path / "mini"), "test")
    judge = rloo.load_function(f"{HERE}/benchmark/mini_tldr.py:gold_judge", "judge_fn")
    facts = [row["facts"] for row in rows]
    own = judge(prompts=None, completions=[row["completion"] for row in rows], completion_ids=None, facts=facts)
    others = judge(prompts=None, completions=[row["completion"] for row in rows[1:] + rows[:1]], completion_ids=None, facts=facts)
    assert sum(own) > sum(others) + len(rows)  # a summary of another post loses
    assert judge(None, ["", " my " + facts[0]["who"], (" my " + facts[0]["who"]) * 2], None, facts=facts[:1] * 3) == [0.0, 1.0, 1.0]
    splits = [{tuple(row["facts"].values()) for row in rloo.load_rows(str(tmp_path / "mini"), split)} for split in ("train", "validation", "test")]
    assert not (splits[0] & splits[1] or splits[0] & splits[2] or splits[1] & splits[2])
    for part, auto_class in (("sft", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
        model, tokenizer = auto_class.from_pretrained(tmp_path / "mini" / part), AutoTokenizer.from_pretrained(tmp_path / "mini" / part)
        assert model.config.vocab_size == len(tokenizer) and tokenizer.pad_token == "[PAD]" != tokenizer.eos_token


def test_ci_runs_the_second_shell_line_of_the_readme():
    """... which makes an environment, installs requirements.txt and runs these tests; the first one trains."""
    block = (HERE / "README.md").read_text().split("```sh\n")[1].split("```")[0].splitlines()
    assert len(block) == 2 and block[0].endswith("python rloo.py") and block[1].endswith("pytest -q rloo_test.py")
    assert all("venv" in line and "-r requirements.txt" in line for line in block)
    script = (HERE / ".ci" / "run").read_text().replace('eval "$command"', "").replace("rm -rf .venv", "")
    shown = subprocess.run(["bash", "-c", script.replace('"$(dirname "$0")/.."', f"'{HERE}'")], capture_output=True, text=True)
    assert shown.stdout.strip() == block[1]


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints


def end_of(output: Path) -> tuple:
    """Weights, metrics without times, completions of a finished run."""
    metrics = [json.loads(line) for line in open(output / "metrics.jsonl")]
    completions = output / "completions.jsonl"
    return (output / "model.safetensors").read_bytes(), without_times(metrics), completions.read_bytes()


def test_runs_killed_at_random_moments_and_resumed_end_like_one_that_was_not(tiny, tmp_path, monkeypatch):
    """SIGKILL, also during a save; benchmark/kill_test.py does the same more often."""
    monkeypatch.syspath_prepend(HERE / "benchmark")
    import kill_test

    counts = kill_test.run(tmp_path / "kill", kills=8, seed=1, models=tiny, data=tiny / "data")
    assert counts["kills"] == 8 and counts["runs"] >= 1 and counts["differences"] == 0


LONG = dict(total_episodes=64, save_steps=1, save_total_limit=9, num_eval_prompts=4, num_sample_generations=2, num_mini_batches=2,
            gradient_accumulation_steps=1, per_device_train_batch_size=8, lr_scheduler_type="cosine", warmup_ratio=0.3)


def test_a_damaged_checkpoint_is_named_skipped_and_left_in_place(train, capsys):
    _, whole = train(**LONG)
    expected = end_of(whole)
    (whole / "model.safetensors").unlink()
    for update, name in ((4, "model.safetensors"), (3, "optimizer.pt")):
        file = whole / f"checkpoint-{update}" / name
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    (whole / "checkpoint-2" / "checksums.json").unlink()
    train(**LONG, output_dir=str(whole), resume=True)
    screen = capsys.readouterr().out
    assert [f"checkpoint-{update} is damaged" in screen for update in (4, 3, 2, 1)] == [True, True, True, False]
    assert f"resumed from {whole / 'checkpoint-1'}" in screen and end_of(whole) == expected
    moved = sorted(path.name.rpartition("-")[0] for path in whole.glob("damaged-*"))
    assert moved == ["damaged-checkpoint-2", "damaged-checkpoint-3", "damaged-checkpoint-4"]


def test_resume_begins_a_new_run_and_repeats_nothing_of_a_finished_one(train, capsys):
    _, first = train(**LONG, resume=True)  # there is nothing yet
    expected = end_of(first)
    metrics, again = train(**LONG, output_dir=str(first), resume=True)
    assert end_of(again) == expected and len(metrics) == 4
    with pytest.raises(InputError, match="go on with that run by --resume"):
        train(**LONG, output_dir=str(first))


def test_the_newest_checkpoints_are_kept_and_the_state_of_all_generators_goes_on(train, tmp_path):
    (tmp_path / "noisy.py").write_text("import random, numpy, torch\n\ndef noise(completions, **columns):\n"
                                       "    return [random.random() + numpy.random.rand() + torch.rand(1).item() for _ in completions]\n")
    flags = {**LONG, "reward_model_path": None, "reward_fns": (f"{tmp_path}/noisy.py:noise",), "save_total_limit": 2}
    _, whole = train(**flags)
    assert sorted(path.name for path in whole.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    shutil.rmtree(whole / "checkpoint-4")
    expected = end_of(whole)
    train(**flags, output_dir=str(whole), resume=True)
    assert end_of(whole) == expected


def test_resume_overwrites_nothing_where_no_checkpoint_is_whole_and_begins_where_nothing_was_written(train, tmp_path):
    flags = {**LONG, "output_dir": str(tmp_path / "out")}
    train(**flags)
    for folder in (tmp_path / "out").glob("checkpoint-*"):
        (folder / "optimizer.pt").unlink()
    before = snapshot(tmp_path)
    with pytest.raises(InputError, match="no checkpoint in .* is whole"):
        train(**flags, resume=True)
    assert snapshot(tmp_path) == before
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "args.json.new").write_text("{")  # killed in its first moment
    assert len(train(**{**flags, "output_dir": str(tmp_path / "early")})[0]) == 4


def test_what_is_evaluated_may_change_when_a_run_goes_on(train, tmp_path, capsys):
    flags = {**LONG, "output_dir": str(tmp_path / "out"), "num_eval_prompts": 0}
    train(**flags)
    train(**{**flags, "num_eval_prompts": 3, "total_episodes": 80, "judge_fn": f"{__file__}:count_tokens"}, resume=True)
    assert re.search(r"sampled/judge_score +nan +\d", capsys.readouterr().out)


def test_evaluation_leaves_the_random_numbers_of_reward_functions_alone(train, tmp_path):
    (tmp_path / "noisy.py").write_text("import random, numpy, torch\n\ndef noise(completions, **columns):\n"
                                       "    return [random.random() + numpy.random.rand() + torch.rand(1).item() for _ in completions]\n")
    flags = dict(reward_model_path=None, reward_fns=(f"{tmp_path}/noisy.py:noise",), total_episodes=64, num_sample_generations=2)
    runs = [[update["objective/scores"] for update in train(**flags, num_eval_prompts=n)[0]] for n in (0, 3)]
    assert runs[0] == runs[1]


def test_told_to_stop_a_run_saves_after_the_update_in_progress(train, tmp_path, capsys):
    expected = end_of(train(**{**LONG, "save_steps": 0})[1])
    stop = []
    (tmp_path / "stop.py").write_text("def stop(completions, **columns):\n    return [0.0 for _ in completions]\n")
    run, scored = {**LONG, "save_steps": 0, "output_dir": str(tmp_path / "stopped")}, []
    original = rloo.leave_one_out_advantage

    def second_update(rewards):
        scored.append(1)
        if len(scored) == 2:
            stop.append(15)
        return original(rewards)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(rloo, "leave_one_out_advantage", second_update)
        train(**run, signals=stop)
    assert end.value.code == 143 and [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-2"]
    assert "told to stop after update 2 of 4" in capsys.readouterr().out
    train(**run, resume=True)
    assert end_of(tmp_path / "stopped") == expected


def test_sigterm_ends_a_process_with_a_checkpoint(tiny, tmp_path):
    command = [sys.executable, "rloo.py", "--dataset_name", tiny / "data", "--sft_model_path", tiny / "sft", "--reward_model_path",
               tiny / "reward", "--response_length", "6", "--per_device_train_batch_size", "8", "--total_episodes", "1000000",
               "--output_dir", tmp_path / "out", "--num_eval_prompts", "0"]
    process = subprocess.Popen([str(part) for part in command], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    metrics = tmp_path / "out" / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.read_text()):
        time.sleep(0.05)
    while process.poll() is None:  # launchers may send it twice, also while Python shuts down
        process.terminate()
        time.sleep(0.005)
    said, _ = process.communicate(timeout=60)
    (folder,) = (tmp_path / "out").glob("checkpoint-*")
    updates = len(metrics.read_text().splitlines())
    assert process.returncode == 143 and folder.name == f"checkpoint-{updates}" and f"told to stop after update {updates} of" in said


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")])
def test_a_full_disk_leaves_the_last_checkpoint_whole(train, monkeypatch, tmp_path, error):
    original, saves = torch.save, []

    def save(what, path):
        saves.append(path)
        if Path(path).name == "optimizer.pt" and len(saves) > 4:  # in the third checkpoint
            original(what, path)
            os.truncate(path, 100)
            raise error
        original(what, path)

    run = {**LONG, "output_dir": str(tmp_path / "full")}
    with monkeypatch.context() as patch, pytest.raises(InputError, match="checkpoint-3 cannot be saved .*make room and go on by --resume"):
        patch.setattr(torch, "save", save)
        train(**run)
    left = sorted(path.name for path in (tmp_path / "full").iterdir())
    assert left == ["args.json", "checkpoint-1", "checkpoint-2", "completions.jsonl", "metrics.jsonl"]
    train(**run, resume=True)
    assert end_of(tmp_path / "full") == end_of(train(**LONG)[1])


def test_a_file_that_may_not_grow_is_one_line(tiny, tmp_path):
    """The operating system itself refuses to write, in a process of its own."""
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); import rloo; "
            "rloo.command_line(sys.argv[1:])")
    flags = ["--dataset_name", tiny / "data", "--sft_model_path", tiny / "sft", "--reward_model_path", tiny / "reward", "--response_length", "6",
             "--per_device_train_batch_size", "8", "--total_episodes", "16", "--output_dir", tmp_path / "out", "--num_eval_prompts", "0"]
    done = subprocess.run([sys.executable, "-c", code, *map(str, flags)], cwd=HERE, capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert last.startswith(f"rloo.py: {tmp_path}/out/checkpoint-1 cannot be saved (") and not list((tmp_path / "out").glob("*checkpoint*"))


# ----------------------------------------------------------------------------------------------------------------------
# More than one process


def fixed_completions(policy, prompt_ids, prompt_mask, k, response_length, temperature, stop_ids, pad_id):
    """An engine without chance: completions are made from the prompt's tokens, their log-probs are the policy's."""
    lane, step = torch.arange(k)[:, None, None], torch.arange(response_length)
    tokens = (prompt_ids * prompt_mask).sum(-1)[None, :, None] * (lane + 1) + step * (lane + 2)
    tokens = tokens % 13 * (tokens % 5 > 0)  # 0 is eos
    mask = rloo.mask_after_stop(tokens, stop_ids)
    batch = Batch([{}] * len(prompt_ids), prompt_ids, prompt_mask, tokens, mask)
    logprobs = rloo.completion_logprobs(policy, batch, temperature, "plain")[0]
    assert not any(isinstance(p, rloo.DTensor) for p in policy.parameters())  # FSDP's weights stay gathered in a rollout
    return tokens, logprobs


def worker(rank: int, world: int, port: int, runs: list[dict]):
    """One rank of several: does the runs one after the other."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.stdout = sys.stderr = open(os.devnull, "w")
    torch.set_num_threads(1)
    rloo.CPU_WIDTH = 16  # group rows one by one: several forwards before a backward
    rloo.generate_group = fixed_completions
    for flags in runs:
        rloo.main(Args(**flags))


def test_two_processes_equal_one_and_their_checkpoints_fit_each_other(tiny, tmp_path, monkeypatch):
    """ddp and fsdp on gloo: three updates on the same prompts and completions, then two + one across numbers of processes."""
    base = dict(dataset_name=str(tiny / "data"), sft_model_path=str(tiny / "sft"), reward_model_path=str(tiny / "reward"), rloo_k=2,
                response_length=6, gradient_accumulation_steps=2, num_sample_generations=1, num_eval_prompts=5, learning_rate=1e-3,
                lr_scheduler_type="constant", adam_eps=1e-4, normalize_reward=True, normalize_advantage=True, device="cpu", missing_eos_penalty=1.0,
                save_steps=1, save_total_limit=9, total_episodes=96, judge_fn=f"{__file__}:count_tokens")

    def copy_without_end(name: str, source: str):
        shutil.copytree(tmp_path / source, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoint-3")

    def flags(name: str, size: int, **more) -> dict:
        return {**base, "output_dir": str(tmp_path / name), "per_device_train_batch_size": size, **more}

    def two(*runs: dict):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rloo"])
        processes = [context.Process(target=worker, args=(rank, 2, port, runs)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0]

    monkeypatch.setattr(rloo, "generate_group", fixed_completions)
    rloo.main(Args(**flags("one", 16)))
    copy_without_end("one to fsdp", "one")
    small = {"gradient_checkpointing": True, "offload_reference": True}
    two(flags("ddp", 8), flags("fsdp", 8, sharding="fsdp"), flags("fsdp, small", 8, sharding="fsdp", **small),
        flags("one to fsdp", 8, sharding="fsdp", resume=True), flags("ddp, small", 8, **small))
    copy_without_end("fsdp to one", "fsdp")
    rloo.main(Args(**flags("fsdp to one", 16, resume=True)))

    weights, metrics, completions = end_of(tmp_path / "one")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()
    initial = AutoModelForCausalLM.from_pretrained(tiny / "sft").state_dict()
    assert max((expected[name] - initial[name]).abs().max() for name in expected) > 1e-3
    for name in ("ddp", "ddp, small", "fsdp", "fsdp, small", "one to fsdp", "fsdp to one"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert max((expected[key] - found[key]).abs().max() for key in expected) < 1e-5, name
        for one, other in zip(metrics, end_of(tmp_path / name)[1], strict=True):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-4), name
        samples = [json.loads(line) for line in open(tmp_path / name / "completions.jsonl")]
        assert [sample["completion"] for sample in samples] == [json.loads(line)["completion"] for line in completions.splitlines()]


def test_torchrun_trains_on_different_prompts_and_one_process_speaks(tiny, tmp_path):
    (tmp_path / "seen.py").write_text("import os\n\ndef seen(prompts, **columns):\n    with open(f'{os.environ[\"SEEN\"]}/{os.environ[\"RANK\"]}', 'a') as file:\n"
                                      "        file.write('\\n'.join(prompts[:4]) + '\\n')\n    return [float(len(p)) for p in prompts]\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "rloo.py", "--dataset_name", tiny / "data", "--sft_model_path", tiny / "sft",
               "--reward_fns", tmp_path / "seen.py:seen", "--response_length", "6", "--per_device_train_batch_size", "8", "--rloo_k", "2",
               "--gradient_accumulation_steps", "1", "--total_episodes", "32", "--output_dir", tmp_path / "out", "--num_eval_prompts", "0", "--device", "cpu"]
    environment = {**os.environ, "SEEN": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(part) for part in command], cwd=HERE, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The policy and its tokenizer:") == 1 and done.stderr.count(" 0/2 ") == 1
    seen = [prompt for rank in (0, 1) for prompt in (tmp_path / str(rank)).read_text().splitlines()]
    prompts = [json.loads(line)["prompt"] for line in open(tiny / "data" / "train.jsonl")]
    assert sorted(seen) == sorted(prompts)  # 2 updates x 2 processes x 4 prompts are all 16, once
    assert [json.loads(line)["episode"] for line in open(tmp_path / "out" / "metrics.jsonl")] == [16, 32]
