"""Tests of rloo.py: the formulas, one test for every mistake known from other trainers, the flags, whole runs.

They build tiny random models, need no network and no GPU, and read from top to bottom like rloo.py itself.
"""

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
import weakref
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: a name that is no folder is not asked for

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    get_scheduler,
)

import rloo
from rloo import Args, Batch, InputError

HERE = Path(__file__).resolve().parent
WORDS = [
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    "g",
    "h",
    "i",
    "j",
    "k",
    "l",
    "m",
]  # with eos, pad and unknown: a vocabulary of 16
torch.set_num_threads(1)  # the models are tiny


# ----------------------------------------------------------------------------------------------------------------------
# Tiny models, data and runs


def tiny_tokenizer(pad: str = "[PAD]") -> PreTrainedTokenizerFast:
    """Words in, words out. Token 0 is eos, 1 is pad (or pad is eos too), 2 is unknown."""
    vocab = {word: i for i, word in enumerate(["<eos>", "[PAD]", "[UNK]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token=pad, unk_token="[UNK]")


SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
FAMILIES = {  # multi-head, multi-query, grouped-query attention, and a mixture of experts
    "gpt_neox": lambda **kw: GPTNeoXConfig(**SIZE, intermediate_size=64, **kw),
    "gpt2": lambda **kw: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, **kw),
    "llama": lambda **kw: LlamaConfig(**SIZE, num_key_value_heads=1, intermediate_size=64, **kw),
    "qwen3": lambda **kw: Qwen3Config(**SIZE, num_key_value_heads=2, head_dim=8, intermediate_size=64, **kw),
    "mixtral": lambda **kw: MixtralConfig(
        **SIZE, num_key_value_heads=2, intermediate_size=64, num_local_experts=4, sliding_window=None, **kw
    ),
}


def tiny_model(family: str = "gpt_neox", seed: int = 0, classifier: bool = False, **config):
    torch.manual_seed(seed)
    config = {"vocab_size": 3 + len(WORDS), "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1, **config}
    if classifier:
        return AutoModelForSequenceClassification.from_config(FAMILIES[family](num_labels=1, **config)).eval()
    return AutoModelForCausalLM.from_config(FAMILIES[family](**config)).eval()


def random_batch(k: int = 3, B: int = 4, R: int = 6, vocab: int = 16, seed: int = 0, max_prompt: int = 9) -> Batch:
    """Prompts of unequal length; completions that meet the stop token (0) early, late or never."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.randint(2, max_prompt))] for _ in range(B)]
    rows = [{"prompt": "", "prompt_text": "", "prompt_ids": i, "reference": None, "columns": {}} for i in prompts]
    responses = torch.randint(3, vocab, (k, B, R), generator=torch.Generator().manual_seed(seed))
    for j, b in itertools.product(range(k), range(B)):
        if (stop := rng.randint(0, R + 1)) < R:
            responses[j, b, stop] = 0
    return rloo.make_batch(rows, responses, stop_ids=[0])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with a policy, a reward model and a dataset: all that a run needs."""
    folder = tmp_path_factory.mktemp("tiny")
    for name, model in (("sft", tiny_model()), ("reward", tiny_model(classifier=True, seed=1))):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    rng = random.Random(0)

    def words(n):
        return " ".join(rng.choices(WORDS, k=n))

    rows = [{"prompt": words(rng.randint(2, 9)), "completion": words(3), "n": i} for i in range(24)]
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
        defaults = {
            "dataset_name": str(tiny / "data"),
            "sft_model_path": str(tiny / "sft"),
            "reward_model_path": str(tiny / "reward"),
            "response_length": 6,
            "per_device_train_batch_size": 16,
            "gradient_accumulation_steps": 1,
            "rloo_k": 2,
            "total_episodes": 16,
            "temperature": 1.0,
            "learning_rate": 1e-2,
            "num_sample_generations": 0,
            "num_eval_prompts": 0,
            "output_dir": str(output),
        }
        rloo.say_once.cache_clear()
        rloo.main(Args(**{**defaults, **flags}), signals)
        return read_metrics(output), output

    return run


@pytest.fixture(autouse=True)
def modules_of_this_test(monkeypatch):
    """What a test lets be imported from its own folder, the next one does not find."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in [*sys.modules.items()]:
        if "pytest-of-" in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def read_metrics(output: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (output / f"{name}.jsonl").read_text().splitlines()]


def final_weights(output: Path) -> torch.Tensor:
    """All weights of the policy that a run left, as one vector."""
    return torch.cat([p.detach().flatten() for p in AutoModelForCausalLM.from_pretrained(output).parameters()])


TIMES = ("time/", "cpu_time", "eps", "tokens_per_second", "memory/")


def without_times(metrics: list[dict]) -> list[dict]:
    return [{name: x for name, x in update.items() if not name.startswith(TIMES)} for update in metrics]


def spy(monkeypatch, name: str, after=lambda inputs, output: output) -> list:
    """Notes inputs and output of every call of a function of rloo.py; `after` may change the output."""
    seen, original = [], getattr(rloo, name)

    def noted(*inputs, **kwargs):
        output = after(inputs, original(*inputs, **kwargs))
        seen.append((inputs, output))
        return output

    noted.__name__ = name
    monkeypatch.setattr(rloo, name, noted)
    return seen


def flat_grad(loss: torch.Tensor, model) -> torch.Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(model.parameters(), grads)])


# Reward functions that tests name as f"{__file__}:function"


def constant_reward(prompts, completions, completion_ids, **columns):
    return [1.0] * len(completions)


def count_tokens(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def sometimes_none(prompts, completions, completion_ids, n, **columns):
    """Unscorable for every third dataset row; otherwise the number of tokens."""
    return [None if i % 3 == 0 else float(len(ids)) for i, ids in zip(n, completion_ids)]


def wrapped(function):
    @functools.wraps(function)
    def called(prompts, completions, completion_ids, n, m):
        return function(n)

    return called


@wrapped
def number_or_none(numbers):
    return numbers


def column_value(prompts, completions, completion_ids, value, **columns):
    return value


def constant_for_even_rows(prompts, completions, completion_ids, n, **columns):
    """2 for all completions of an even row; 2.5 and 3.5 for the two of an odd one."""
    return [2.0 if row % 2 == 0 else 2.5 + (i >= len(n) // 2) for i, row in enumerate(n)]


# ----------------------------------------------------------------------------------------------------------------------
# The formulas


def advantages_of(scores, kl, mask, kl_coef: float, level: str, normalize: bool = False, estimator: str = "rloo"):
    """As in `update`: (k, B, 1), or (k, B, R) at token level."""
    advantages = rloo.advantage(rloo.rlhf_reward(scores, kl, kl_coef, level), estimator)
    advantages = advantages.view(*scores.shape, -1)
    counts = mask[..., : advantages.shape[-1]] & ~advantages.isnan()
    return (rloo.standardize(advantages, counts) if normalize else advantages).masked_fill(~counts, 0.0)


def test_baseline_is_the_one_of_trl_s_documented_example():
    """3 prompts, 4 completions, flattened as j·B + b: the first one's siblings have the rewards 2, 5 and 8."""
    rlhf_reward = torch.tensor([1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10]).float().view(4, 3)
    assert rloo.advantage(rlhf_reward)[0, 0] == 1 - (2 + 5 + 8) / 3


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "drgrpo", "reinforce"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_kl_rewards_and_advantages_equal_the_loops(level, normalize, estimator):
    """... where one group has an unscorable completion, and another has nothing but one that is scorable."""
    torch.manual_seed(0)
    k, B, R, beta = 3, 4, 5, 0.3
    kl, scores, mask = torch.randn(k, B, R), torch.randn(k, B), torch.arange(R) < torch.randint(1, R + 1, (k, B, 1))
    scores[0, 1] = scores[1:, 2] = math.nan
    args = Args(
        response_length=R, kl_coef=beta, kl_level=level, advantage_estimator=estimator, normalize_advantage=normalize
    )
    completions = [*itertools.product(range(k), range(B))]
    expected = plain_advantages(
        args,
        {c: scores[c].item() for c in completions if not scores[c].isnan()},
        {c: kl[c][mask[c]].tolist() for c in completions},
    )
    found = advantages_of(scores, kl * mask, mask, beta, level, normalize, estimator).view(k, B, -1)
    for c, t in itertools.product(completions, range(found.shape[2])):
        assert found[c][t].item() == pytest.approx(expected.get((*c, t), 0.0), abs=1e-5)


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "drgrpo"])
def test_equal_rewards_have_no_advantage_that_normalisation_could_blow_up(estimator):
    for k in (3, 4, 7, 8):
        scores = torch.tensor([[0.1, 1.1, 0.7, 0.3]]).expand(k, -1)
        kl, mask = torch.zeros(k, 4, 2), torch.ones(k, 4, 2, dtype=torch.bool)
        for normalize, level in itertools.product((False, True), ("sequence", "token")):
            assert not advantages_of(scores, kl, mask, 0.1, level, normalize, estimator).any()


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "drgrpo", "reinforce"])
@pytest.mark.parametrize("normalize", [False, True])
def test_one_reward_apart_from_equal_siblings_has_a_moderate_advantage(estimator, normalize):
    """Without it the deviation of the group would be 0, and in float32, as the mean of squares less the square of the
    mean, not quite 0: it must not be divided by."""
    scores = torch.tensor([[0.0, 0.35]] + [[0.95, 0.95]] * 7)
    kl, mask = torch.zeros(8, 2, 1), torch.ones(8, 2, 1, dtype=torch.bool)
    found = advantages_of(scores, kl, mask, 0.0, "sequence", normalize, estimator)
    args = Args(response_length=1, kl_coef=0.0, normalize_advantage=normalize, advantage_estimator=estimator)
    completions = [*itertools.product(range(8), range(2))]
    expected = plain_advantages(args, {c: scores[c].item() for c in completions}, {c: [0.0] for c in completions})
    assert found.abs().max() < 4
    for c in completions:
        assert found[c].item() == pytest.approx(expected[(*c, 0)], abs=1e-4)


def test_a_ratio_beyond_float32_leaves_loss_and_gradient_finite():
    new = torch.tensor([[[150.0]], [[150.0]], [[150.0]]], requires_grad=True)
    advantages, mask = torch.tensor([1.0, 0.0, -1e-30]).view(3, 1, 1), torch.ones(3, 1, 1, dtype=torch.bool)
    losses, _, _ = rloo.policy_loss(new, torch.zeros(3, 1, 1), advantages, mask, 0.2, 0.2)
    losses.sum().backward()
    assert losses[0].item() == pytest.approx(-1.2) and losses.isfinite().all() and new.grad.isfinite().all()


def test_dr_grpos_advantage_is_rloos_times_k_minus_1_over_k():
    rewards = torch.randn(4, 5, 6)
    assert torch.allclose(rloo.advantage(rewards, "drgrpo"), 3 / 4 * rloo.advantage(rewards), atol=1e-6)


def test_scores_are_penalised_then_normalised_then_clipped():
    scores, ended = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([[True, True], [True, False]])
    penalised = torch.tensor([[1.0, 2.0], [3.0, 1.0]])
    assert torch.equal(rloo.shape_scores(scores, ended, None, False, None), scores)
    assert torch.equal(rloo.shape_scores(scores, ended, 5.0, False, None), penalised)
    normalised = (penalised - penalised.mean()) / (penalised.std() + 1e-8)
    assert torch.allclose(rloo.shape_scores(scores, ended, 5.0, True, None), normalised)
    assert torch.allclose(rloo.shape_scores(scores, ended, 5.0, True, 0.5), normalised.clamp(-0.5, 0.5))
    assert torch.equal(rloo.shape_scores(scores, ended, None, False, 2.5), scores.clamp(-2.5, 2.5))  # alone
    assert rloo.shape_scores(scores[:1, :1], ended[:1, :1], None, True, None) == 1  # one score has no deviation


def test_scores_of_any_size_are_normalised_to_deviation_1():
    small = rloo.shape_scores(torch.tensor([[1.0, 2.0], [3.0, 6.0]]) * 1e-5, torch.ones(2, 2).bool(), None, True, None)
    assert small.std().item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("ratio_level, per_token", [("sequence", False), ("token", False), ("token", True)])
def test_policy_loss_equals_the_formula_in_loops(ratio_level, per_token):
    torch.manual_seed(0)
    k, B, R, low, high = 2, 3, 4, 0.1, 0.4
    new, old = torch.randn(k, B, R) * 0.2, torch.randn(k, B, R) * 0.2
    mask = torch.arange(R) < torch.randint(1, R + 1, (k, B, 1))
    advantages = torch.randn(k, B, R if per_token else 1)
    losses, log_ratio, clipped = rloo.policy_loss(new, old, advantages, mask, low, high, ratio_level)
    log_ratios, clips = [], []
    for j, b in itertools.product(range(k), range(B)):
        x = [(new - old)[j, b, t].item() for t in range(R) if mask[j, b, t]]
        x = [sum(x)] if ratio_level == "sequence" else x
        a = advantages[j, b].tolist() if per_token else advantages[j, b].tolist() * len(x)
        terms = [(-a * math.exp(x), -a * min(max(math.exp(x), 1 - low), 1 + high)) for x, a in zip(x, a)]
        assert losses[j, b].item() == pytest.approx(sum(max(pair) for pair in terms), abs=1e-5)
        log_ratios += x
        clips += [clip > plain for plain, clip in terms]
    assert log_ratio.tolist() == pytest.approx(log_ratios, abs=1e-6) and clipped.tolist() == clips
    assert any(clips) and not all(clips)


def test_weights_make_the_loss_a_mean_in_which_tokens_outside_the_loss_do_not_count():
    """Of a mean over completions those outside the loss stay a part, as 0."""
    lengths, in_loss = torch.tensor([[2, 3], [7, 5]]), torch.tensor([[True, True], [False, True]])
    sums = (torch.rand(2, 2, 7) * (torch.arange(7) < lengths[..., None])).sum(-1)
    for aggregation, expected in (
        ("sequence", sums[in_loss].sum() / 4),
        ("token", sums[in_loss].sum() / (2 + 3 + 5)),
        ("sequence-mean", (sums / lengths)[in_loss].sum() / 4),
    ):
        weight = rloo.loss_weight(lengths, in_loss, aggregation)
        assert weight[1, 0] == 0 and (weight * sums).mean().item() == pytest.approx(expected.item(), rel=1e-6)
        assert not rloo.loss_weight(lengths, in_loss & ~in_loss, aggregation).any()  # nobody left


def only_a_head(head: torch.nn.Linear):
    """What final_logits wants to know of a model."""
    config = types.SimpleNamespace()
    config.get_text_config = lambda: config
    return types.SimpleNamespace(config=config, get_output_embeddings=lambda: head)


@pytest.mark.parametrize("bias", [None, 0.0, 1000.0, -1000.0, "-inf"])
def test_log_probs_and_entropies_are_those_of_log_softmax_with_the_same_gradient(bias):
    """... far from zero as well, where an offset of all logits changes nothing, and of tokens that are impossible."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 50, bias=bias is not None), torch.randn(23, 8, requires_grad=True)
    tokens, inputs = torch.randint(15, (23,)), [hidden, *head.parameters()]
    if bias == "-inf":
        head.bias.data[16:32] = -math.inf
    elif bias is not None:
        head.bias.data.add_(bias)
    full = F.log_softmax(F.linear(hidden.double(), *(p.double() for p in head.parameters())) / 0.7, dim=-1)
    expected = full.gather(1, tokens[:, None]).squeeze(1)
    logprobs, entropy = rloo.block_logprobs(only_a_head(head), hidden, tokens, 0.7)
    tolerance = 1e-3 if bias in (1000.0, -1000.0) else 1e-5  # float32 has 7 digits
    assert torch.allclose(logprobs.double(), expected, atol=tolerance)
    assert torch.allclose(entropy.double(), -(full.exp() * full).nansum(-1), atol=tolerance)
    for grad, other in zip(*(torch.autograd.grad(x @ torch.arange(23).to(x), inputs) for x in (logprobs, expected))):
        assert torch.allclose(grad, other, atol=20 * tolerance)


def test_log_probs_in_autocast_keep_float32_sums_and_gradients():
    torch.manual_seed(0)
    head, hidden, tokens = torch.nn.Linear(8, 50), torch.randn(23, 8, requires_grad=True), torch.randint(50, (23,))
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logprobs, entropy = rloo.block_logprobs(only_a_head(head), hidden, tokens, 0.7)
        found.append([logprobs, *torch.autograd.grad(logprobs.sum(), [hidden, *head.parameters()])])
    for exact, half in zip(*found):
        assert half.dtype == torch.float32 and 0 < (exact - half).norm() < 0.02 * exact.norm()
    rounded = F.linear(hidden.bfloat16(), head.weight.bfloat16(), head.bias.bfloat16()).float() / 0.7
    assert torch.allclose(entropy, torch.distributions.Categorical(logits=rounded).entropy(), atol=1e-5)


def test_in_bfloat16_training_and_reference_read_the_log_probs_that_were_sampled():
    """... from the same hidden states: at a temperature other than 1 nothing is rounded once more."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(64, 40), torch.randn(50, 64).bfloat16()
    half = only_a_head(torch.nn.Linear(64, 40).bfloat16())
    half.get_output_embeddings().load_state_dict(head.state_dict())
    tokens, sampled = rloo.sample(rloo.final_logits(half, hidden), 0.7, torch.rand(50, 1))
    reference, _ = rloo.block_logprobs(half, hidden, tokens, 0.7)
    with torch.autocast("cpu", torch.bfloat16):
        training, _ = rloo.block_logprobs(only_a_head(head), hidden.float(), tokens, 0.7)
    assert torch.equal(reference, sampled) and torch.equal(training, sampled)


def enumerate_completions(vocab: int, R: int) -> list[list[int]]:
    """Every completion there is: sequences that end at the first stop token (0), and those of R tokens without one."""
    everything = itertools.product(range(vocab), repeat=R)
    return [[*ids] for ids in sorted({ids[: ids.index(0) + 1] if 0 in ids else ids for ids in everything})]


def one_completion_each(prompt_ids: list[int], completions: list[list[int]]) -> Batch:
    """The completions as those (k = 1) of as many times the same prompt."""
    return rloo.make_batch([{"prompt_ids": prompt_ids}] * len(completions), rloo.pad(completions)[0][None], [0])


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_expected_update_is_the_exact_gradient_and_the_baseline_lowers_its_variance(level):
    """Every pair of completions (k = 2) of a vocabulary of 3 and R = 3, weighted by its probability under the policy:
    the mean gradient of the loss is -∇ E[score - β KL(π ‖ π_ref)], to rounding."""
    beta, T, R = 0.4, 0.8, 3
    policy, reference = tiny_model(vocab_size=3), tiny_model(vocab_size=3, seed=1)
    batch = one_completion_each([2, 0], enumerate_completions(3, R))
    n = len(batch.rows)  # 1 + 2 + 4 + 8
    logprobs, _ = rloo.completion_logprobs(policy, batch, T)  # (1, n, R)
    with torch.no_grad():
        ref_logprobs, _ = rloo.completion_logprobs(reference, batch, T)
    scores = torch.randn(1, n, generator=torch.Generator().manual_seed(3)) + 3  # rewards with a mean

    probability = logprobs[0].sum(-1).exp()
    assert probability.sum().item() == pytest.approx(1, abs=1e-5)  # these are all there are
    exact = -flat_grad((probability * (scores - beta * (logprobs - ref_logprobs).sum(-1))[0]).sum(), policy)

    # The loss of every pair (i, j), as k = 2 completions of n² prompts, by the functions that training uses.
    first, second = (x.flatten() for x in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    pairs = torch.stack([first, second])
    new, mask = logprobs[0][pairs], batch.response_mask[0][pairs]
    kl = ((new - ref_logprobs[0][pairs]) * mask).detach()
    weight = (probability[first] * probability[second]).detach()
    without_baseline = rloo.rlhf_reward(scores[0][pairs], kl, beta, level).view(2, n * n, -1)
    with_baseline, without_kl = (
        advantages_of(scores[0][pairs], kl, mask, coefficient, level) for coefficient in (beta, 0.0)
    )

    def error(advantages) -> float:
        """of the expected update, relative to the largest entry of the exact one"""
        losses, _, _ = rloo.policy_loss(new, new.detach(), advantages, mask, 0.2, 0.2, level)
        return ((flat_grad((losses.mean(0) * weight).sum(), policy) - exact).abs().max() / exact.abs().max()).item()

    assert exact.abs().max() > 0.1
    assert error(with_baseline) < 2e-5 and error(without_baseline) < 2e-5
    assert error(without_kl) > 1e-2  # the test sees the KL term

    # Variance: E‖g‖² over the pairs, g = -½ Σ_j Σ_t A_jt ∇ log π(y_jt), by the Gram matrix of the tokens' gradients.
    token_grads = torch.stack([flat_grad(logprobs[0, i, t], policy) for i in range(n) for t in range(R)])
    gram = token_grads @ token_grads.T

    def second_moment(advantages):
        per_token = advantages * mask  # (2, n², R)
        coefficients = torch.zeros(n * n, n, R)
        for j in range(2):
            coefficients[torch.arange(n * n), pairs[j]] -= 0.5 * per_token[j]
        c = coefficients.flatten(1)
        return (weight * (c @ gram * c).sum(1)).sum()

    assert second_moment(with_baseline) < 0.9 * second_moment(without_baseline)


@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("correction", ["off", "truncate", "mask"])
def test_the_weights_of_a_mismatch_equal_the_formula_in_loops(correction, level):
    torch.manual_seed(0)
    old, sampled, cap = torch.randn(2, 3, 4), torch.randn(2, 3, 4), 1.5
    mask = torch.arange(4) < torch.randint(1, 5, (2, 3, 1))
    weight, w = rloo.rollout_weight(old, sampled, mask, correction, cap, level)
    for j, b in itertools.product(range(2), range(3)):
        logs = [(old - sampled)[j, b, t].item() for t in range(4) if mask[j, b, t]]
        exact = [math.exp(x) for x in ([sum(logs)] if level == "sequence" else logs)]
        used = {
            "off": [1.0 for _ in exact],
            "truncate": [min(x, cap) for x in exact],
            "mask": [x if 1 / cap <= x <= cap else 0.0 for x in exact],
        }[correction]
        assert w[j, b, : len(exact)].tolist() == pytest.approx(exact, rel=1e-5)
        assert weight[j, b, : len(used)].tolist() == pytest.approx(used, rel=1e-5)


def test_a_weight_beyond_float32_is_finite_and_masked():
    """A completion that the sampler all but excluded: e^100 is no float32, and infinity times 0 would be NaN."""
    old, mask = torch.full((2, 1, 1), 100.0), torch.ones(2, 1, 1, dtype=torch.bool)
    for correction, expected in (("truncate", 2.0), ("mask", 0.0)):
        weight, w = rloo.rollout_weight(old, torch.zeros(2, 1, 1), mask, correction, 2.0)
        assert (weight == expected).all() and w.isfinite().all()


def test_the_largest_weight_is_that_of_all_ranks(monkeypatch):
    monkeypatch.setattr(rloo, "gather", lambda items: [*items, 7.0])  # the other rank's
    assert rloo.weight_metrics(torch.tensor([0.5, 2.0]))["val/rollout_weight_max"] == 7


def test_untruncated_weights_make_the_update_of_another_samplers_completions_exact():
    """As in the test of the exact gradient above, but the pairs come from the reference, μ: without the weights the
    mean gradient of the loss is wrong, with them it is -∇ E[score - β KL(π ‖ π_ref)] under π."""
    beta, T, R = 0.4, 0.8, 3
    policy, sampler = tiny_model(vocab_size=3), tiny_model(vocab_size=3, seed=1)
    batch = one_completion_each([2, 0], enumerate_completions(3, R))
    n = len(batch.rows)
    logprobs, _ = rloo.completion_logprobs(policy, batch, T)
    with torch.no_grad():
        sampled, _ = rloo.completion_logprobs(sampler, batch, T)
    scores = torch.randn(1, n, generator=torch.Generator().manual_seed(3)) + 3
    probability = logprobs[0].sum(-1).exp()
    exact = -flat_grad((probability * (scores - beta * (logprobs - sampled).sum(-1))[0]).sum(), policy)

    first, second = (x.flatten() for x in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij"))
    pairs = torch.stack([first, second])
    new, mask, mu = logprobs[0][pairs], batch.response_mask[0][pairs], sampled[0][pairs]
    kl = ((new - mu) * mask).detach()
    chance = mu.sum(-1).exp().prod(0)  # of each pair
    rewards = rloo.rlhf_reward(scores[0][pairs], kl, beta)[..., None]

    def error(advantages, correction: str) -> float:
        weight, _ = rloo.rollout_weight(new.detach(), mu, mask, correction, math.inf)
        losses, _, _ = rloo.policy_loss(new, new.detach(), advantages, mask, 0.2, 0.2, "sequence", weight)
        return ((flat_grad((losses.mean(0) * chance).sum(), policy) - exact).abs().max() / exact.abs().max()).item()

    assert error(rewards, "truncate") < 2e-5  # a cap of infinity truncates nothing
    assert error(rewards, "off") > 0.05


@pytest.mark.parametrize("correction", ["off", "truncate", "mask"])
def test_a_mismatch_of_sampler_and_policy_is_corrected_and_logged(train, monkeypatch, correction):
    """The log-probs at sampling are changed by up to 0.3: the KL is that of training's log-probs, the loss is weighted,
    and the ratio of the first step stays 1."""
    noise = torch.rand(2, 8, 6, generator=torch.Generator().manual_seed(0)) * 0.6 - 0.3
    spy(monkeypatch, "rollout", lambda inputs, output: (output[0], (output[1] + noise) * output[0].response_mask))
    seen, weights = spy(monkeypatch, "policy_loss"), spy(monkeypatch, "rollout_weight")
    (metrics,), _ = train(rollout_correction=correction, rollout_correction_cap=1.2)
    weight = seen[-1][0][7].flatten()
    assert metrics["val/ratio"] == 1 and 0.1 < metrics["val/rollout_logprob_gap"] < 0.2
    if correction == "off":
        assert (weight == 1).all() and "val/rollout_weight" not in metrics and abs(metrics["objective/kl"]) > 1e-3
    else:
        assert metrics["objective/kl"] == pytest.approx(0, abs=1e-5)
        assert weight.max() <= 1.2001 and (weight == 0).any() == (correction == "mask")
        w = weights[-1][1][1].double()  # before it is cut
        assert 0 < metrics["val/rollout_weight_share"] < 1 < metrics["val/rollout_weight_max"]
        assert metrics["val/rollout_weight_share"] == pytest.approx(float(w.sum() ** 2 / w.square().sum() / w.numel()))


# ----------------------------------------------------------------------------------------------------------------------
# Whole updates, repeated in the plainest way: float64, a row per completion, loops over completions and tokens, nothing
# from rloo.py. Completion c = (j, b) is number j of prompt b. Numbers are Python's, but for what needs a gradient.


def token_logprobs(model, prompt: list[int], completion: list[int], temperature: float):
    """Log-probs of a completion's tokens, and entropies of what they were drawn from: (length,) each."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    table = logits.log_softmax(-1)
    return table[torch.arange(len(completion)), torch.tensor(completion)], -(table.exp() * table).sum(-1)


def standardized(values: dict) -> dict:
    """To mean 0 and standard deviation 1; a lone number stays what it is."""
    if len(values) < 2:
        return values
    center, scale = mean(values.values()), stdev(values.values()) + 1e-8
    return {c: (x - center) / scale for c, x in values.items()}


def plain_scores(args, raw: dict, ended: dict) -> dict:
    """The penalty first, then normalisation, then the clip: each from {c: score} to {c: score}."""
    scores = {c: x - (args.missing_eos_penalty or 0.0) * (not ended[c]) for c, x in raw.items()}
    scores = standardized(scores) if args.normalize_reward else scores
    most = math.inf if args.reward_clip_range is None else args.reward_clip_range
    return {c: min(max(x, -most), most) for c, x in scores.items()}


def plain_advantages(args, scores: dict, kl: dict) -> dict:
    """{(j, b, t): advantage} where there is one; t is 0 at sequence level. kl: {c: list over tokens}"""
    beta, found = args.kl_coef * args.kl_in_reward, {}
    steps = range(args.response_length if args.kl_level == "token" else 1)
    # What is still to come from token t on: at 0 all of it, beyond a completion's end its score alone.
    rewards = {(*c, t): x - beta * math.fsum(kl[c][t:]) for c, x in scores.items() for t in steps}
    for (j, b, t), reward in rewards.items():
        group = [rewards[(*c, t)] for c in scores if c[1] == b]
        peers = {
            "rloo": [rewards[(*c, t)] for c in scores if c[1] == b and c[0] != j],
            "reinforce": [rewards[(*c, t)] for c in scores],
        }.get(args.advantage_estimator, group)
        if t < len(kl[j, b]) and len(peers) > (args.advantage_estimator != "rloo"):  # else nothing to compare with
            scale = stdev(group) + 1e-4 if args.advantage_estimator == "grpo" else 1.0
            found[j, b, t] = (reward - mean(peers)) / scale
    return standardized(found) if args.normalize_advantage else found


def completion_loss(args, new, old, ref, advantages: list[float], notes: dict):
    """The sum over tokens; new, old, ref: log-probs (length,); one advantage, or one per token."""
    per_token = "token" in (args.kl_level, args.ratio_level) or args.loss_aggregation != "sequence"
    per_token &= args.kl_level == "token" or args.ratio_level != "sequence"
    high, loss = args.cliprange if args.cliprange_high is None else args.cliprange_high, 0.0
    for t, log_ratio in enumerate(new - old if per_token else (new - old).sum().view(1)):
        a, ratio = advantages[min(t, len(advantages) - 1)], log_ratio.exp()
        plain, clipped = -a * ratio, -a * ratio.clamp(1 - args.cliprange, 1 + high)
        loss = loss + torch.maximum(plain, clipped)
        notes["policy/clipfrac_avg"].append(float(clipped > plain))
        notes["undecided"].append(float(abs(a) < 1e-5))  # rounding says which of the two is larger
        notes["policy/approxkl_avg"].append(0.5 * log_ratio.item() ** 2)
    if args.kl_in_reward:
        return loss
    return loss + args.kl_coef * sum((y - x).exp() - 1 - (y - x) for x, y in zip(new, ref))


def adamw_step(args, parameters: list, gradients: list, moments: dict, lr: float) -> float:
    """Returns the norm of the gradient before clipping."""
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    shrink = min(1.0, args.max_grad_norm / (norm + 1e-6)) if args.max_grad_norm else 1.0
    moments["steps"] = n = moments.get("steps", 0) + 1
    with torch.no_grad():
        for i, (p, g) in enumerate(zip(parameters, gradients)):
            m, v = moments.get(i, (0.0, 0.0))
            moments[i] = m, v = 0.9 * m + 0.1 * shrink * g, 0.999 * v + 0.001 * (shrink * g) ** 2
            p -= lr * args.weight_decay * p
            p -= lr * m / (1 - 0.9**n) / ((v / (1 - 0.999**n)).sqrt() + args.adam_eps)
    return norm


def plain_update(
    args,
    policy,
    reference,
    found: dict,
    prompts: list,
    completions: dict,
    ended: dict,
    orders: list,
    moments: dict,
    lr: float,
) -> dict:
    """Trains the policy in place; the metrics. prompts: B token lists; completions, ended: {c: token list}, {c: bool};
    found: {reward's name: {c: number or None}}; orders: the prompts' numbers in each epoch."""
    lengths, parameters, notes = {c: len(x) for c, x in completions.items()}, [*policy.parameters()], defaultdict(list)

    def read(model, c):
        return token_logprobs(model, prompts[c[1]], completions[c], args.temperature)

    with torch.no_grad():
        old = {c: read(policy, c)[0] for c in completions}
        ref = {c: read(reference, c)[0] for c in completions} if args.kl_coef else old
    kl = {c: (old[c] - ref[c]).tolist() for c in completions}
    weights = args.reward_weights or [1.0] * len(found)
    terms = {c: [w * x[c] for w, x in zip(weights, found.values()) if x[c] is not None] for c in completions}
    raw = {c: math.fsum(x) for c, x in terms.items() if x}
    scores = plain_scores(args, raw, ended)
    advantages = plain_advantages(args, scores, kl)
    size = len(prompts) // args.num_mini_batches
    for step in (order[start : start + size] for order in orders for start in range(0, len(order), size)):
        mini_batch, loss = [c for c in completions if c[1] in step], 0.0
        trained = [c for c in mini_batch if c in scores and (ended[c] or not args.mask_truncated_completions)]
        for c in mini_batch:
            new, entropy = read(policy, c)
            own = [advantages.get((*c, t), 0.0) for t in range(lengths[c] if args.kl_level == "token" else 1)]
            own_loss = completion_loss(args, new, old[c], ref[c], own, notes)
            if c in trained:
                denominators = {
                    "sequence": len(mini_batch),
                    "token": sum(lengths[i] for i in trained),
                    "sequence-mean": len(mini_batch) * lengths[c],
                }
                loss = loss + own_loss / denominators[args.loss_aggregation]
            notes["policy/entropy_avg"] += entropy.tolist()
            notes["val/ratio"] += (new - old[c]).exp().tolist()
        loss = loss + 0 * new.sum()  # which also has a gradient where nobody is trained
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        notes["grad_norm"].append(adamw_step(args, parameters, gradients, moments, lr))
        notes["loss/policy_avg"].append(loss.item())
    sums, beta = {c: math.fsum(x) for c, x in kl.items()}, args.kl_coef * args.kl_in_reward
    groups = [x for x in ([raw[c] for c in raw if c[1] == b] for b in range(len(prompts))) if len(x) > 1]
    named = {f"rewards/{name}/": [x for x in values.values() if x is not None] for name, values in found.items()}
    metrics = {
        "objective/kl": sums.values() if args.kl_coef else [],
        "objective/non_score_reward": [-beta * x for x in sums.values()],
        "objective/rlhf_reward": [x - beta * sums[c] for c, x in scores.items()],
        "objective/entropy": [-x.sum().item() for x in old.values()],
        "objective/scores": raw.values(),
        "frac_reward_zero_std": [float(max(x) - min(x) <= 1e-6) for x in groups],
        "completions/mean_length": lengths.values(),
        "completions/clipped_ratio": [1.0 - x for x in ended.values()],
        "completions/in_loss": [float(c in raw and (ended[c] or not args.mask_truncated_completions)) for c in ended],
    }
    metrics |= notes | {name + "mean": x for name, x in named.items()}
    metrics |= {f"rewards/{name}/applied": [float(x is not None) for x in found[name].values()] for name in found}
    spreads = {name + "std": x for name, x in named.items()} | {"objective/scores_std": raw.values()}
    return (
        {name: mean(x) for name, x in metrics.items() if x}
        | {name: stdev(x) for name, x in spreads.items() if len(x) > 1}
        | {
            "val/ratio_var": stdev(notes["val/ratio"]) ** 2,
            "val/num_eos_tokens": sum(ended.values()),
            "lr": lr,
            "val/rollout_logprob_gap": 0.0,
        }
    )


def plain_run(args, policy, reference, rewards: dict, stop_ids: list[int], sampled: list, orders: list) -> list[dict]:
    """Metrics of each update. rewards: {name: function of a row and a token list}; sampled: for each update its rows
    and responses (k, B, R); orders: for each epoch of all updates the prompts' numbers."""
    metrics, moments, epochs, warmup = [], {}, args.num_ppo_epochs, math.ceil(args.warmup_ratio * len(sampled))
    for done, (rows, responses) in enumerate(sampled):
        completions, ended = {}, {}
        for j, b in ((j, b) for b in range(len(rows)) for j in range(args.rloo_k)):
            ids = responses[j][b].tolist()
            stop = min([t for t, token in enumerate(ids) if token in stop_ids], default=None)
            completions[j, b], ended[j, b] = ids if stop is None else ids[: stop + 1], stop is not None
        part = max(done - warmup, 0) / max(len(sampled) - warmup, 1)  # of the way from the peak
        course = {"linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2, "constant": 1.0}
        lr = args.learning_rate * ((done + 1) / (warmup + 1) if done < warmup else course[args.lr_scheduler_type])
        found = {name: {c: reward(rows[c[1]], x) for c, x in completions.items()} for name, reward in rewards.items()}
        one = plain_update(
            args,
            policy,
            reference,
            found,
            [row["prompt_ids"] for row in rows],
            completions,
            ended,
            orders[done * epochs : (done + 1) * epochs],
            moments,
            lr,
        )
        metrics.append(one | {"update": done + 1, "episode": (done + 1) * len(completions)})
    return metrics


def continuous(prompts, completions, completion_ids, n, **columns):
    """A number that tells almost any two completions apart, so that what is 0 is 0 in any rounding."""
    return [math.sin(row + sum((t + 1) * token for t, token in enumerate(ids))) for row, ids in zip(n, completion_ids)]


def large(prompts, completions, completion_ids, n, **columns):
    return [100 * x for x in continuous(prompts, completions, completion_ids, [row + 1 for row in n])]


def often_none(prompts, completions, completion_ids, n, **columns):
    """None for half of the completions, and for all of some rows."""
    scores = continuous(prompts, completions, completion_ids, n)
    return [None if row % 4 == 0 or sum(ids) % 2 == 0 else x for row, ids, x in zip(n, completion_ids, scores)]


def reward_of_one(function, row: dict, ids: list[int]):
    return function([""], [""], [ids], n=[row["columns"]["n"]])[0]


def flags_drawn(seed: int) -> dict:
    """For a run of two updates."""
    draw = random.Random(seed)
    k, one_of = draw.randint(2, 4), lambda *values: draw.choice(values)
    groups, epochs, mini_batches = one_of((1, 1), (1, 2), (2, 1)), draw.randint(1, 2), one_of(1, 1, 2, 3)
    functions, with_model = one_of(
        ([continuous], False),
        ([often_none], False),
        ([often_none], False),
        ([constant_reward, often_none], False),
        ([large, continuous], False),
        ([], True),
        ([often_none, continuous], True),
    )
    weights = tuple(one_of(-0.5, 0.3, 1.0, 2.0) for _ in range(len(functions) + with_model))
    return {
        "rloo_k": k,
        "per_device_train_batch_size": groups[0] * k,
        "gradient_accumulation_steps": groups[1],
        "num_mini_batches": mini_batches,
        "num_ppo_epochs": epochs,
        "seed": seed,
        "total_episodes": 2 * k * groups[0] * groups[1] * mini_batches,
        "response_length": draw.randint(2, 5),
        "reward_fns": tuple(f"{__file__}:{function.__name__}" for function in functions),
        "reward_weights": one_of(None, weights),
        "with_model": with_model,
        "family": one_of("gpt_neox", "gpt2", "llama"),
        "stop_ids": one_of([0], [0, 7, 9], [5]),
        "pad": one_of("[PAD]", "<eos>"),
        "temperature": one_of(1.0, 0.7, 1.5),
        "kl_coef": one_of(0.0, 0.1, 1.0),
        "kl_level": one_of("sequence", "token"),
        "kl_in_reward": one_of(True, True, False),
        "advantage_estimator": one_of("rloo", "rloo", "grpo", "drgrpo", "reinforce"),
        "loss_aggregation": one_of("sequence", "sequence", "token", "sequence-mean"),
        "missing_eos_penalty": one_of(None, 1.0),
        "normalize_reward": one_of(False, True),
        "reward_clip_range": one_of(None, None, 1.2),
        "normalize_advantage": one_of(False, False, True),
        "mask_truncated_completions": one_of(False, False, True),
        "cliprange": one_of(0.05, 0.2),
        "cliprange_high": one_of(None, 0.1, 0.4),
        "learning_rate": 1e-2,
        "adam_eps": 1e-2,
        "weight_decay": one_of(0.0, 0.5),
        "lr_scheduler_type": one_of("linear", "cosine", "constant"),
        "warmup_ratio": one_of(0.0, 0.0, 0.5),
        "max_grad_norm": one_of(0.0, 0.1, 1.0),
        "rollout_engine": one_of("group", "hf"),
        "layout": one_of("group", "plain"),
        "ratio_level": one_of(None, None, "token"),
    }


@pytest.mark.parametrize("seed", range(20))
def test_updates_equal_a_plain_implementation_for_flags_drawn_at_random(train, tiny, tmp_path, monkeypatch, seed):
    """Weights and metrics of two updates; prompts of unequal length, one of them twice."""
    flags = flags_drawn(seed)
    stop_ids, with_model, family, pad = (flags.pop(name) for name in ("stop_ids", "with_model", "family", "pad"))
    model = tiny_model(family)
    model.generation_config.eos_token_id = stop_ids if len(stop_ids) > 1 else 0
    flags |= {"stop_token_id": 5} if stop_ids == [5] else {}
    for part in (model, tiny_tokenizer(pad)):
        part.save_pretrained(tmp_path / "sft")
    rows = [{"prompt": "a b c d e f g"[: 2 * i % 14 + 1], "n": i} for i in range(9)]  # of 1 to 7 tokens
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward_path = str(tiny / "reward") if with_model else None

    rollouts, orders, randperm = spy(monkeypatch, "rollout"), [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n: orders.append(randperm(n)) or orders[-1])
    metrics, output = train(
        dataset_name=str(tmp_path / "rows.jsonl"),
        sft_model_path=str(tmp_path / "sft"),
        reward_model_path=reward_path,
        **flags,
    )

    policy, reference, scorer = (x.double() for x in (model, tiny_model(family), tiny_model(classifier=True, seed=1)))
    rewards = {}
    if with_model:  # the score of the last token
        rewards["reward_model"] = lambda row, ids: scorer.score(
            scorer.base_model(torch.tensor([row["prompt_ids"] + ids])).last_hidden_state[0, -1]
        ).item()
    for name in (spec.rpartition(":")[2] for spec in flags["reward_fns"]):
        rewards[name] = functools.partial(reward_of_one, globals()[name])
    sampled = [(output[0].rows, output[0].responses) for _, output in rollouts]
    expected = plain_run(Args(**flags), policy, reference, rewards, stop_ids, sampled, [x.tolist() for x in orders])

    for one, other in zip(without_times(metrics), expected, strict=True):
        clipped, plainly_clipped = one.pop("policy/clipfrac_avg"), other.pop("policy/clipfrac_avg")
        assert clipped == pytest.approx(plainly_clipped, abs=other.pop("undecided") + 1e-6)
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    plain_weights = torch.cat([p.detach().flatten() for p in policy.parameters()]).float()
    assert (final_weights(output) - plain_weights).abs().max() < 3e-4  # one case has gradients of 1,000, others 1e-6


# ----------------------------------------------------------------------------------------------------------------------
# The group layout against a row per completion


def sees(prompt_mask: torch.Tensor, k: int, R: int) -> torch.Tensor:
    """(B, 1, P + k·R, P + k·R), who sees whom in group rows, slot by slot."""
    B, P = prompt_mask.shape
    seen = torch.zeros(B, 1, P + k * R, P + k * R, dtype=torch.bool)
    for b, i, j in itertools.product(range(B), range(P + k * R), range(P + k * R)):
        real = j >= P or prompt_mask[b, j]
        own = j < P or (j - P) % k == (i - P) % k
        seen[b, 0, i, j] = j <= i and real and own or i == j
    return seen


def group_mask(prompt_mask: torch.Tensor, k: int, R: int) -> torch.Tensor:
    mask = rloo.causal_mask(F.pad(prompt_mask, (0, R), value=True))
    mask.lanes = prompt_mask.shape[1], k
    return mask


def test_lane_attention_is_the_documented_picture():
    """P = 2 slots, one of them padding; k = 2 completions a and b; 2 steps. Where all scores are equal and the values
    are unit vectors, the output of a slot names the slots that it sees."""
    picture = """x . . . . .
                 . x . . . .
                 . x x . . .
                 . x . x . .
                 . x x . x .
                 . x . x . x"""
    expected = torch.tensor([[cell == "x" for cell in line.split()] for line in picture.splitlines()])
    prompt_mask, equal = torch.tensor([[False, True]]), torch.zeros(1, 1, 6, 8)
    assert torch.equal(sees(prompt_mask, 2, 2)[0, 0], expected)
    mask = group_mask(prompt_mask, 2, 2)
    out, _ = rloo.attention(None, equal, equal, torch.eye(6)[None, None], mask, scaling=1.0)
    assert torch.allclose(out[0, :, 0], expected / expected.sum(1, keepdim=True))


@pytest.mark.parametrize("k, R", [(3, 4), (2, 1), (1, 4)])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_lane_attention_equals_one_large_mask(key_heads, k, R):
    """Multi-head, grouped-query and multi-query attention over (P + k·R)² pairs, by softmax; the gradients as well."""
    torch.manual_seed(0)
    B, P, H, D = 2, 5, 4, 8
    prompt_mask, n = torch.arange(P) >= torch.tensor([[0], [3]]), P + k * R
    inputs = [torch.randn(B, heads, n, D, requires_grad=True) for heads in (H, key_heads, key_heads)]
    query, key, value = inputs[0], *(x.repeat_interleave(H // key_heads, dim=1) for x in inputs[1:])
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~sees(prompt_mask, k, R), -math.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    mask = group_mask(prompt_mask, k, R)
    module = types.SimpleNamespace(num_key_value_groups=H // key_heads)  # as the layers of models have it
    out, _ = rloo.attention(module, *inputs, mask, scaling=0.3)
    assert out.shape == (B, n, H, D) and torch.allclose(out, expected, atol=1e-6)
    weights = torch.randn_like(out)
    for one, other in zip(*(torch.autograd.grad((x * weights).sum(), inputs) for x in (out, expected))):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("k", [3, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_group_layout_equals_plain_rows(family, k):
    """Log-probs, entropies, scores, and gradients of all parameters."""
    policy, reward, batch = tiny_model(family), tiny_model(family, classifier=True, seed=1), random_batch(k)
    results = []
    for layout in ("plain", "group"):
        logprobs, entropy = rloo.completion_logprobs(policy, batch, 0.7, layout)
        gradient = flat_grad((logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum(), policy)
        results.append((logprobs, entropy, rloo.model_scores(reward, batch, layout), gradient))
    for plain, group in zip(*results):
        assert (plain - group).abs().max() < 1e-5 * max(1, plain.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_lanes_see_neither_each_other_nor_padding_in_any_layer(family):
    """Another token in one completion, or in the padding, changes nothing at the others' slots in any layer."""
    model, batch = tiny_model(family), random_batch()
    outputs, layers = [], next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    for layer in layers:
        layer.register_forward_hook(
            lambda module, inputs, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
    changed = batch.responses.clone()
    changed[1, :, 1] = (changed[1, :, 1] + 1) % 16
    other_padding = batch.prompt_ids.where(batch.prompt_mask, torch.tensor(7))
    with torch.no_grad():
        for variant in (batch, batch._replace(responses=changed), batch._replace(prompt_ids=other_padding)):
            rloo.completion_hidden(model, variant, "group")
    (base, lane, padding), P = (outputs[i : i + 2] for i in (0, 2, 4)), batch.prompt_ids.shape[1]
    others = torch.tensor([slot < P or (slot - P) % 3 != 1 for slot in range(base[0].shape[1])])
    real = F.pad(batch.prompt_mask, (0, base[0].shape[1] - P), value=True)
    for layer in range(2):
        assert torch.equal(base[layer][:, others], lane[layer][:, others])
        assert not torch.equal(base[layer][:, ~others], lane[layer][:, ~others])
        assert torch.equal(base[layer][real], padding[layer][real])


@pytest.mark.parametrize(
    "flags", [{}, {"kl_level": "token", "num_ppo_epochs": 2}, {"num_mini_batches": 2, "per_device_train_batch_size": 8}]
)
def test_updates_in_group_and_plain_layout_end_in_the_same_weights(train, monkeypatch, flags):
    """Three updates from the same completions: those of `generate`, so that the layouts share their random numbers."""
    monkeypatch.setattr(rloo, "Decoder", None)
    flags = dict(rollout_engine="hf", total_episodes=48, adam_eps=1e-3, **flags)
    (group, out1), (plain, out2) = (train(layout=layout, **flags) for layout in ("group", "plain"))
    for one, other in zip(without_times(group), without_times(plain), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    assert (final_weights(out1) - final_weights(out2)).abs().max() < 1e-5


HEADS = SIZE | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
OLD = VERSION < (5, 0)
GPT_J = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8, "initializer_range": 0.3}
OTHERS = {  # by how transformers calls them, with a window of 12 tokens where there is one; and whether lanes work
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}, False),  # ALiBi
    "codegen": (GPT_J, VERSION >= (5, 24)),  # no sdpa before
    "cohere": (HEADS | {"logit_scale": 0.4}, True),
    "falcon": (SIZE, False),  # attention of its own
    "gemma2": (HEADS | {"final_logit_softcapping": 2.0, "sliding_window": 12}, False),  # no sdpa
    "gemma3_text": (HEADS | {"sliding_window": 12}, False),
    "gemma3n_text": (  # its last two layers have no keys of their own
        HEADS
        | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["full_attention"] * 4, "laurel_rank": 4}
        | {"hidden_size_per_layer_input": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": None},
        True,
    ),
    "gpt_neo": (
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 12,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
        },
        False,
    ),
    "gpt_oss": (HEADS | {"sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2}, False),
    "gptj": (GPT_J, VERSION >= (5, 24)),
    "granite": (HEADS | {"logits_scaling": 3.0}, True),
    "mistral": (HEADS | {"sliding_window": 12}, False),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "initializer_range": 0.3}, False),  # ALiBi
    "olmo2": (HEADS, True),
    "opt": (
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 32,
            "init_std": 0.3,
        },
        True,
    ),
    "stablelm": (HEADS, True),
}


OLD_FSDP = not hasattr(rloo.fsdp.FSDPModule, "set_reduce_scatter_unused_params")
if OLD:
    OTHERS["stablelm"] = (OTHERS["stablelm"][0], False)  # there its attention is its own
    del OTHERS["gemma3n_text"]  # there it is refused: without a cache its logits are other ones


def any_model(name: str):
    if name in FAMILIES:
        return tiny_model(name)
    torch.manual_seed(0)
    tokens = {"vocab_size": 3 + len(WORDS), "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **tokens, **OTHERS[name][0])).eval()


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_the_layout_is_found_by_trying_on_rows_of_the_run_s_size(name):
    model, (_, lanes) = any_model(name), OTHERS.get(name, (SIZE, True))

    def layout(longest: int, R: int, layout: str = "auto", dtype: str = "float32") -> str:
        return rloo.choose_layout(
            model,
            Args(rloo_k=3, response_length=R, layout=layout, device="cpu", dtype=dtype),
            [{"prompt_ids": [3] * longest}, {"prompt_ids": [4]}],
        )

    assert layout(12, 8) == ("group" if lanes else "plain")
    if name in ("mistral", "gemma3_text"):  # a prompt and a completion, not the whole row, must fit into the window
        assert layout(6, 6) == "group"
        assert {layout(6, 7), layout(6, 7, dtype="bfloat16")} == {"plain"}  # where only one token is out of sight
    assert layout(12, 8, "plain") == "plain"


def test_the_trial_of_layouts_is_given_numbers_instead_of_rows(monkeypatch):
    """With FSDP it is a model's forward pass, whose hooks look through all that they are given: 1 ms for each row."""
    trials = spy(monkeypatch, "same_in_both_layouts")
    args = Args(device="cpu", response_length=4, rloo_k=2)
    assert rloo.choose_layout(tiny_model(), args, [{"prompt_ids": [5, 6, 7]}, {"prompt_ids": [8]}]) == "group"
    ((given, _),) = trials
    assert given[1:] == (3, 2, 4)  # the longest prompt, k and R


def test_in_float32_group_rows_that_are_off_by_a_hundredth_are_not_run(monkeypatch):
    spy(monkeypatch, "completion_hidden", lambda inputs, hidden: hidden * (1.01 if inputs[2] == "group" else 1.0))
    args = Args(device="cpu", response_length=4, rloo_k=2)
    assert rloo.choose_layout(tiny_model(), args, [{"prompt_ids": [5, 6, 7]}]) == "plain"


@pytest.mark.parametrize("name", FAMILIES)
def test_kernels_may_return_another_order_in_memory(monkeypatch, name):
    """CUDA's memory-efficient one fills (B, n, H, D) and returns that as (B, H, n, D)."""
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *inputs, **options: kernel(*inputs, **options).transpose(1, 2).contiguous().transpose(1, 2),
    )
    model = tiny_model(name)
    assert (
        rloo.choose_layout(model, Args(rloo_k=3, response_length=8, device="cpu"), [{"prompt_ids": [3] * 12}])
        == "group"
    )
    rows = [{"prompt_ids": [3, 4, 5]}, {"prompt_ids": [6]}]
    batch, logprobs = rloo.rollout(model, rows, 2, 1.0, response_length=4, stop_ids=[0])
    assert torch.allclose(rloo.completion_logprobs(model, batch, 1.0)[0], logprobs, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_every_architecture_trains(train, tmp_path, capsys, name):
    """Those that lanes do not fit fall back to plain rows, with a line that says so, and the same results as theirs."""
    any_model(name).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    flags = {
        "sft_model_path": str(tmp_path),
        "reward_model_path": None,
        "reward_fns": (f"{__file__}:count_tokens",),
        "response_length": 12,
        "total_episodes": 32,
    }
    runs = []
    for run in ({}, {"rollout_engine": "hf"}):
        metrics, _ = train(**run, **flags)
        said = capsys.readouterr().out
        assert ("--layout plain" in said) == (not OTHERS[name][1])
        assert name != "falcon" or "FalconForCausalLM: falls back to --layout plain (a " in said
        for update in metrics:
            assert update["val/rollout_logprob_gap"] < 1e-4 and update["val/ratio"] == 1
        assert len(metrics) == 2 and metrics[0]["grad_norm"] > 0
        runs.append(without_times(metrics))
    assert OTHERS[name][1] or runs[0] == runs[1]


def test_kernels_other_than_sdpa_run_in_plain_rows(train, capsys):
    runs = [train(**flags)[0] for flags in ({"attn_implementation": "eager"}, {"layout": "plain"})]
    assert capsys.readouterr().out.count("falls back to --layout plain") == 2  # the policy and the reward model
    assert without_times(runs[0])[0] == pytest.approx(without_times(runs[1])[0], abs=1e-5)


class Copies(TorchDispatchMode):
    """Notes what is copied from one device to another, for which a CUDA device is waited for as well."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in (out, *args) if torch.is_tensor(x)]
        if "copy" in str(function) and len({x.device for x in tensors}) > 1:
            self.seen.append(str(function))
        return out


@pytest.mark.skipif(OLD, reason="before transformers 5 reading the prompts, though no step, waits for the device")
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "llama", "qwen3"])
def test_a_rollout_waits_for_nothing_on_the_device(family, monkeypatch):
    """Tensors on the meta device have no values: to ask for one raises, as does a tensor on another device. What is
    watched for copies: all that CUDA watches in the trial of a step, and a rollout."""
    copies, modes, captured = Copies(), [], []

    def watch(mode):
        modes.append(mode)
        copies.__enter__() if mode == "error" else copies.__exit__(None, None, None)

    @contextlib.contextmanager
    def capture(graph):
        captured.append(graph)
        with copies:
            yield

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", watch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.random, "fork_rng", lambda *args, **options: contextlib.nullcontext())
    with torch.device("meta"):
        model, prompt_ids, prompt_mask = tiny_model(family), torch.ones(4, 5).long(), torch.ones(4, 5).bool()
    with torch.no_grad():  # three tokens: from the fifth on it asks now and then whether all have stopped
        decoder = rloo.Decoder(model, 4, 5, 2, 3, 0.7, [0, 9])
        assert decoder.capture() == "graph" and captured == ["graph"]
        assert modes == ["error", "default"]
        with copies:
            decoder.generate(prompt_ids, prompt_mask)
    assert not copies.seen
    assert decoder.tokens.is_meta and decoder.logprobs.is_meta


def test_a_step_of_decoding_has_static_shapes_and_addresses():
    """What a CUDA graph needs: run as on CUDA, over all slots, a step changes its state in place, the cache stays where
    it is, and it follows weights that change in place."""
    model, batch = tiny_model("llama"), random_batch()
    (B, P), k, R = batch.prompt_ids.shape, 3, 6
    decoder = rloo.Decoder(model, B, P, k, R, 1.0, stop_ids=[])
    torch.manual_seed(0)
    with torch.no_grad():
        decoder.generate(batch.prompt_ids, batch.prompt_mask)
        decoder.t.zero_()  # the steps once more: the first tokens stay
        decoder.lane_cache.length = R

        def addresses():
            tensors = [x for x in vars(decoder).values() if torch.is_tensor(x)]
            for i, layer in enumerate(decoder.prompt_cache.layers):
                tensors += [layer.keys, layer.values, *decoder.lane_cache.own[i]]
            return [(x.data_ptr(), x.shape, x.stride()) for x in tensors]

        before = addresses()
        assert len(before) >= 6 + 2 * 2 * 2
        for t in range(R - 1):
            if t == 2:
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            decoder.step()
        assert addresses() == before and int(decoder.t) == R - 1
        tokens, found = (x.unflatten(0, (B, k)).transpose(0, 1) for x in (decoder.tokens, decoder.logprobs))
        full = rloo.make_batch(batch.rows, tokens, stop_ids=[99])
        old, _ = rloo.completion_logprobs(tiny_model("llama"), full, 1.0, "plain")
        assert torch.allclose(found[..., :3], old[..., :3], atol=1e-5)  # tokens 0 to 2: the weights as they were
        assert not torch.allclose(found[..., 3:], old[..., 3:], atol=1e-3)


class Kernels(TorchDispatchMode):
    """Counts the operations that compute or copy something, each of which is a kernel at least on a GPU."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "_unsafe_view" not in str(function):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("heads", [2, 4])
def test_attention_of_a_step_has_few_kernels(heads):
    """At most twelve, of which four are products of matrices: a step takes as long as launching them, if the model is
    small."""
    query, key = torch.randn(6, 4, 1, 8).bfloat16(), torch.randn(2, heads, 5, 8).bfloat16()
    own, mask = torch.randn(6, heads, 3, 8).bfloat16(), torch.ones(6, 1, 1, 8).bool()
    with Kernels() as kernels:
        rloo.step_attention(query, (key, own), (key, own), mask, 0.3)
    assert len(kernels.seen) <= 12, kernels.seen


def test_softmax_in_bfloat16_rounds_once():
    scores = torch.randn(100, 300, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
    assert torch.equal(scores.softmax(-1), scores.float().softmax(-1).bfloat16())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_reads_the_caches_where_they_are(family, monkeypatch):
    """With as many key heads as the model has, and no copy of a prompt's keys for its lanes."""
    model, batch, steps = tiny_model(family), random_batch(), spy(monkeypatch, "step_attention")
    decoder = rloo.Decoder(model, *batch.prompt_ids.shape, 3, 2, 1.0, stop_ids=[0])
    with torch.no_grad():
        decoder.generate(batch.prompt_ids, batch.prompt_mask)
    heads = getattr(model.config, "num_key_value_heads", 4)
    assert len(steps) == 2  # layers
    for layer, ((_, keys, values, *_), _) in enumerate(steps):
        prompt = decoder.prompt_cache.layers[layer]
        for pair, kept in zip((keys, values), zip((prompt.keys, prompt.values), decoder.lane_cache.own[layer])):
            for given, own in zip(pair, kept, strict=True):
                assert given.shape[1] == heads and given.data_ptr() == own.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_size", [8, 6])  # some models have shorter values than keys
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_attention_of_a_step_equals_softmax_over_prompt_and_own_keys(key_heads, value_size, dtype):
    torch.manual_seed(0)
    b, k, P, n, H, D = 3, 4, 7, 5, 4, 8
    query = torch.randn(b * k, H, 1, D, dtype=dtype)
    key, prompt_key = (torch.randn(m, key_heads, slots, D, dtype=dtype) for m, slots in ((b * k, n), (b, P)))
    value, prompt_value = (torch.randn(*x.shape[:3], value_size, dtype=dtype) for x in (key, prompt_key))
    prompt_mask = torch.arange(P) >= torch.tensor([[0], [3], [6]])  # left-padded
    visible = torch.arange(n) <= 3  # the last slot is one of those still to come
    mask = torch.cat([prompt_mask.repeat_interleave(k, dim=0), visible.expand(b * k, n)], dim=1)[:, None, None]
    out = rloo.step_attention(query, (prompt_key, key), (prompt_value, value), mask, scaling=0.3)

    keys, values = (
        torch.cat([prompt.repeat_interleave(k, dim=0), own], dim=2).repeat_interleave(H // key_heads, dim=1).double()
        for prompt, own in ((prompt_key, key), (prompt_value, value))
    )
    scores = (query.double() @ keys.mT * 0.3).masked_fill(~mask, -math.inf)
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    assert out.dtype == dtype and out.shape == expected.shape
    assert torch.allclose(out.double(), expected, atol=1e-6 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", [1, 3])
def test_completions_do_not_depend_on_which_lanes_have_left(family, k, monkeypatch):
    """Those that are left are what they would have been, whether ended lanes leave or not."""
    model, sizes, leave = tiny_model(family), [], rloo.Decoder.drop_ended

    def note(decoder, alive):
        before = decoder.lanes.numel()
        leave(decoder, alive)
        sizes.append(tuple(decoder.lanes.shape))
        assert decoder.lanes.numel() == before or decoder.lanes.numel() <= 0.8 * before

    def stay(decoder, alive):
        pass

    rows, results = random_batch(B=8).rows, []
    for method in (note, stay):
        monkeypatch.setattr(rloo.Decoder, "drop_ended", method)
        torch.manual_seed(1)
        results.append(rloo.rollout(model, rows, k, 1.0, 24, [0, 5]))
    (batch, logprobs), (whole, whole_logprobs) = results
    assert min(prompts for prompts, _ in sizes) < len(rows) and (k == 1 or min(lanes for _, lanes in sizes) < k)
    assert len(set(batch.response_mask.sum(-1).flatten().tolist())) > 4
    assert torch.equal(batch.responses, whole.responses) and torch.equal(batch.ended, whole.ended)
    assert torch.allclose(logprobs, whole_logprobs, atol=1e-5)
    assert torch.allclose(logprobs, rloo.completion_logprobs(model, batch, 1.0, "plain")[0], atol=1e-5)


def test_the_lanes_that_are_left_are_a_rectangle():
    """Of prompts with two lanes alive, with none and with one, two lanes each are left, those alive first."""
    decoder = rloo.Decoder(tiny_model(), 3, 2, 3, 4, 1.0, stop_ids=[0])
    with torch.no_grad():
        decoder.generate(torch.full((3, 2), 5), torch.ones(3, 2).bool())
    prompts, own = decoder.prompt_cache.layers[1].keys.clone(), decoder.lane_cache.own[1][0].clone()
    decoder.drop_ended(torch.tensor([[False, True, True], [False] * 3, [False, False, True]]))
    assert decoder.lanes.tolist() == [[1, 2], [8, 6]]
    assert torch.equal(decoder.lane_cache.own[1][0], own[[1, 2, 8, 6]])
    assert torch.equal(decoder.prompt_cache.layers[1].keys, prompts[[0, 2]]) and len(decoder.prompt_mask) == 2


def test_prompts_of_like_length_share_a_forward_pass(train, monkeypatch):
    """In the rollout's chunks, in the reference's and in the micro-batches of a mini-batch, drawn at random."""
    calls = {"decode": [], "chunks": [], "training": []}  # lengths of the prompts of each call
    read_prompts, completion_hidden = rloo.Decoder.read_prompts, rloo.completion_hidden

    def note_decode(decoder, prompt_ids, prompt_mask):
        calls["decode"].append(prompt_mask.sum(1).tolist())
        return read_prompts(decoder, prompt_ids, prompt_mask)

    def note_forward(model, batch, layout):
        kind = "training" if torch.is_grad_enabled() else "chunks"
        calls[kind].append(batch.prompt_mask.sum(1).tolist())
        return completion_hidden(model, batch, layout)

    monkeypatch.setattr(rloo.Decoder, "read_prompts", note_decode)
    monkeypatch.setattr(rloo, "choose_layout", lambda *args: "group")
    monkeypatch.setattr(rloo, "completion_hidden", note_forward)
    train(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_mini_batches=2,
        local_rollout_forward_batch_size=4,
        total_episodes=32,
    )
    assert len(calls["decode"]) == 8 and len(calls["chunks"]) == 24  # old and reference log-probs, rewards
    assert len(calls["training"]) == 8 and len(set(sum(calls["decode"], []))) > 4
    for one_pass in (calls["decode"], *batched(calls["chunks"], 8), *batched(calls["training"], 4)):
        lengths = sum(one_pass, [])
        assert lengths == sorted(lengths)
    assert calls["training"] != sorted(calls["training"])  # the mini-batches are not


def test_a_group_of_more_completions_than_a_chunk_may_have_is_a_chunk():
    assert [len(part.rows) for part in random_batch(k=3, B=2).chunks(2)] == [1, 1]


def batched(values: list, n: int) -> list[list]:
    return [values[i : i + n] for i in range(0, len(values), n)]


# ----------------------------------------------------------------------------------------------------------------------
# What others got wrong: one test each


def test_token_level_kl_is_not_the_sequence_level_in_disguise(train):
    """Elsewhere the token-level rewards are summed back to the sequence-level one. Here they are rewards to go."""
    scores, kl = torch.tensor([[1.0], [2.0]]), torch.tensor([[[0.1, 0.2, 0.4]], [[0.3, 0.0, 0.0]]])
    G = rloo.rlhf_reward(scores, kl, 1.0, "token")  # past its end a completion keeps its score:
    assert torch.allclose(G, torch.tensor([[[0.3, 0.4, 0.6]], [[1.7, 2.0, 2.0]]]))
    advantages = rloo.advantage(G)
    assert torch.allclose(advantages[0, 0], torch.tensor([-1.4, -1.6, -1.4]))
    assert torch.allclose(advantages[0], -advantages[1])
    assert torch.allclose(G[..., 0], rloo.rlhf_reward(scores, kl, 1.0))
    outputs = [train(kl_level=level, total_episodes=48, kl_coef=1.0)[1] for level in ("sequence", "token")]
    assert (final_weights(outputs[0]) - final_weights(outputs[1])).abs().max() > 1e-3


@pytest.mark.parametrize("engine", ["group", "hf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_update_of_a_batch_has_ratio_exactly_one(train, dtype, engine):
    metrics, _ = train(dtype=dtype, rollout_engine=engine, total_episodes=32, response_length=32)
    for update in metrics:
        assert update["val/ratio"] == 1 and update["val/ratio_var"] == 0
        assert update["policy/clipfrac_avg"] == 0 and update["policy/approxkl_avg"] == 0
        gap = update["val/rollout_logprob_gap"]  # the difference is not hidden: it is a metric of its own
        assert 0 <= gap < 1e-5 if dtype == "float32" else 1e-4 < gap < 0.5


@pytest.mark.parametrize(
    "flags", [{"num_mini_batches": 2, "per_device_train_batch_size": 8}, {"rollout_correction": "truncate"}]
)
def test_in_bfloat16_old_log_probs_are_read_as_in_training_and_only_the_policy_is_in_float32(train, monkeypatch, flags):
    loads, rollouts, improved = (spy(monkeypatch, name) for name in ("load_model", "rollout", "improve"))
    train(dtype="bfloat16", learning_rate=0.0, num_eval_prompts=2, **flags)
    assert {model.dtype for (model, *_), _ in rollouts} == {torch.bfloat16}  # those of evaluations as well
    assert [model.dtype for _, model in loads] == [torch.float32, torch.bfloat16, torch.bfloat16]  # reference, reward
    (((_, policy, _, layout, batch, _, old, *_), _),) = improved
    with torch.no_grad():
        exact, _ = rloo.completion_logprobs(policy, batch, 1.0, layout)
        with torch.autocast("cpu", torch.bfloat16):
            training, _ = rloo.completion_logprobs(policy, batch, 1.0, layout)
    assert (old - training).abs().max() < 1e-6 and (old - exact).abs().max() > 1e-3


@pytest.mark.parametrize("engine", ["group", "hf"])
def test_one_temperature_in_sampling_and_scoring_and_no_hidden_sampling_settings(engine):
    """The model's own generation config asks for top-k, a repetition penalty and another temperature: all are ignored,
    and the frequencies of the sampled tokens are those of the softmax that scores them."""
    model, row, n, T = tiny_model(vocab_size=6), {"prompt_ids": [3, 4, 5]}, 20_000, 1.7
    model.generation_config.update(top_k=1, repetition_penalty=3.0, temperature=0.1, do_sample=True)
    torch.manual_seed(0)
    batch, sampled = rloo.rollout(model, [row] * 200, n // 200, T, 2, [0], engine, chunk_size=n)
    with torch.no_grad():
        assert torch.allclose(sampled, rloo.completion_logprobs(model, batch, T, "plain")[0], atol=1e-5)
        completions = enumerate_completions(6, 2)
        exact = rloo.completion_logprobs(model, one_completion_each([3, 4, 5], completions), T)[0][0].sum(-1).exp()
    assert exact.sum().item() == pytest.approx(1, abs=1e-4)
    found = batch.completion_ids()
    counts = torch.tensor([found.count(completion) for completion in completions]).float()
    chi2, freedom = ((counts - n * exact) ** 2 / (n * exact)).sum().item(), len(completions) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)  # five standard deviations of the chi-squared distribution


def test_a_token_of_probability_0_is_never_drawn():
    """The first one not at the smallest random number, the last one not at the largest, even where rounding makes the
    sum of the others less than that."""
    n, largest = 20_000, 1 - 2**-24
    logits = torch.zeros(1, n)
    logits[0, [0, -1]] = -math.inf
    assert F.log_softmax(logits, -1).exp().cumsum(-1)[0, -1] < largest
    for uniform in (0.0, largest):
        _, logprob = rloo.sample(logits, 1.0, torch.tensor([[uniform]]))
        assert logprob.isfinite()


@pytest.mark.parametrize("engine", ["group", "hf"])
def test_any_token_may_be_sampled_however_large_the_vocabulary(engine):
    """`generate` keeps the likeliest 50 by default."""
    model = tiny_model(vocab_size=100)
    model.get_output_embeddings().weight.data.mul_(0.01)  # nearly alike
    torch.manual_seed(0)
    batch, _ = rloo.rollout(model, [{"prompt_ids": [3]}], 1000, 1.0, 1, [0], engine, chunk_size=1000)
    assert len(set(batch.responses.flatten().tolist())) == 100


def test_pad_equal_to_eos_keeps_the_stop_token_and_every_stop_id_counts():
    responses = torch.tensor([[[5, 0, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8], [5, 9, 0, 7]]])
    rows = [{"prompt_ids": [0, 5]}] * 4
    one, two = (rloo.make_batch(rows, responses, stop_ids) for stop_ids in ([0], [0, 9]))
    assert one.prompt_mask.all()  # a token of a prompt is never taken for padding
    assert one.response_mask.sum(-1).tolist() == [[2, 1, 4, 3]]
    assert two.response_mask.sum(-1).tolist() == [[2, 1, 4, 2]]
    assert one.ended.tolist() == two.ended.tolist() == [[True, True, False, True]]
    assert two.responses.tolist() == [[[5, 0, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8], [5, 9, 0, 0]]]
    given, real = rloo.pad([[5, 6], [7], [5, 0]])  # completions of one's own, two of them without a stop token
    given = rloo.make_batch(rows[:3], given[None], [0], real[None])
    assert given.response_mask.sum(-1).tolist() == [[2, 1, 2]] and given.ended.tolist() == [[False, False, True]]


def test_a_run_where_pad_is_eos_ends_in_the_same_weights(train, tiny, tmp_path):
    tiny_tokenizer(pad="<eos>").save_pretrained(tmp_path / "tokenizer")
    shutil.copytree(tiny / "reward", tmp_path / "reward")
    tiny_tokenizer(pad="<eos>").save_pretrained(tmp_path / "reward")
    pad_is_eos = {"model_name_or_path": str(tmp_path / "tokenizer"), "reward_model_path": str(tmp_path / "reward")}
    ((one,), out1), ((two,), out2) = train(), train(**pad_is_eos)
    assert 0 < one["val/num_eos_tokens"] < 16
    assert one["objective/scores"] == pytest.approx(two["objective/scores"], abs=1e-5)
    assert torch.allclose(final_weights(out1), final_weights(out2), atol=1e-5)


def test_stop_ids_come_from_the_generation_config_and_the_tokenizer():
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [7, 9]

    def ids(token, number):
        return rloo.stop_token_ids(Args(stop_token=token, stop_token_id=number), model, tokenizer)

    assert ids(None, None) == [0, 7, 9]
    assert ids("eos", None) == [0, 7, 9]
    assert ids("c", None) == tokenizer("c")["input_ids"]
    assert ids(None, 12) == [12]
    assert ids("[UNK]", None) == [2]  # some tokenizers have one token for eos and unknown
    for wrong in (("a b", None), ("unknown", None), (None, 10_000)):
        with pytest.raises(InputError, match="--stop_token"):
            ids(*wrong)


def test_tokens_after_the_stop_are_neither_attended_to_nor_trained_on_nor_scored():
    batch, policy, reward = random_batch(), tiny_model(), tiny_model(classifier=True)
    assert not batch.response_mask.all()
    garbage = batch._replace(
        responses=batch.responses.where(batch.response_mask, torch.tensor(11)),
        prompt_ids=batch.prompt_ids.where(batch.prompt_mask, torch.tensor(12)),
    )
    results = []
    for b in (batch, garbage):
        logprobs, entropy = rloo.completion_logprobs(policy, b, 1.0)
        assert (logprobs[~b.response_mask] == 0).all() and (entropy[~b.response_mask] == 0).all()
        results.append((logprobs, rloo.model_scores(reward, b), flat_grad(logprobs.sum(), policy)))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*results))


def test_missing_eos_penalty_looks_for_what_stops_the_rollout(train):
    """With another stop token than eos the penalty goes to the completions without that token, not without eos."""
    metrics, _ = train(
        missing_eos_penalty=3.0,
        stop_token="c",
        reward_model_path=None,
        kl_coef=0.0,
        total_episodes=64,
        reward_fns=(f"{__file__}:constant_reward",),
    )
    assert 0 < metrics[-1]["completions/clipped_ratio"] < 1
    for update in metrics:
        assert update["objective/scores"] == 1  # raw
        assert update["objective/rlhf_reward"] == pytest.approx(1 - 3 * update["completions/clipped_ratio"])


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_padded_equals_unpadded(name):
    """Log-probs, entropies and scores of left-padded prompts and right-padded completions are those that a model as it
    comes gives each sequence alone, with logits that it scales (Cohere, Granite) or caps (Gemma 2)."""
    batch, policy, layout = random_batch(), any_model(name), "group" if OTHERS.get(name, (SIZE, True))[1] else "plain"
    family = name if name in FAMILIES else "gpt2"  # of the reward model
    with torch.no_grad():
        logprobs, entropy = rloo.completion_logprobs(policy, batch, 0.7, layout)
        scores = rloo.model_scores(tiny_model(family, 1, classifier=True), batch)
        policy = any_model(name)
        reward = tiny_model(family, 1, classifier=True, pad_token_id=None)  # a single row: the head at its end
        for j, b in itertools.product(range(3), range(4)):
            prompt, completion = batch.rows[b]["prompt_ids"], batch.responses[j, b][batch.response_mask[j, b]]
            ids, n = torch.tensor([prompt + completion.tolist()]), len(completion)
            logits = policy(ids).logits
            assert torch.allclose(logits, rloo.final_logits(policy, rloo.body_of(policy)(ids)[0]), atol=1e-5)
            log_softmax = F.log_softmax(logits[0, len(prompt) - 1 : -1] / 0.7, dim=-1)
            assert torch.allclose(logprobs[j, b, :n], log_softmax.gather(1, completion[:, None])[:, 0], atol=1e-5)
            assert torch.allclose(entropy[j, b, :n], -(log_softmax.exp() * log_softmax).sum(-1), atol=1e-5)
            assert torch.allclose(scores[j, b], reward(ids).logits[0, 0], atol=1e-5)


@pytest.mark.parametrize("engine", ["group", "hf"])
@pytest.mark.parametrize("name", [*FAMILIES, *(name for name in OTHERS if OTHERS[name][1])])
def test_rollout_at_temperature_0_is_greedy_decoding_of_each_prompt_alone(name, engine):
    model, rows = any_model(name), random_batch().rows
    batch, _ = rloo.rollout(model, rows, 2, 0.0, 8, stop_ids=[0], engine=engine, chunk_size=6)
    model = any_model(name)  # as it comes
    for b, row in enumerate(rows):
        ids = row["prompt_ids"]
        while len(ids) < len(row["prompt_ids"]) + 8 and ids[len(row["prompt_ids"]) :][-1:] != [0]:
            ids = ids + [model(torch.tensor([ids])).logits[0, -1].argmax().item()]
        for j in range(2):
            assert batch.completion_ids()[j * 4 + b] == ids[len(row["prompt_ids"]) :]


def test_metrics_count_real_tokens_only_and_once(train, monkeypatch):
    """Entropies, ratio, lengths and stop tokens against loops over the real tokens of each completion."""
    seen = spy(monkeypatch, "rollout")
    (update,), output = train(learning_rate=0.0, kl_coef=0.0)
    policy, batch = AutoModelForCausalLM.from_pretrained(output).eval(), seen[0][1][0]
    surprise, entropies, stops, lengths = [], [], 0, []
    for j, b in itertools.product(range(2), range(8)):
        prompt, completion = batch.rows[b]["prompt_ids"], batch.completion_ids()[j * 8 + b]
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        log_softmax = F.log_softmax(logits, dim=-1)
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


def test_times_speeds_and_memory_are_those_of_their_phases(train, monkeypatch):
    """By a clock that only the phases of an update move; the second update is that of a resumed run."""
    now, seconds = [0.0], {"rollout": 1, "chunked_logprobs": 10, "score": 100, "improve": 1000}
    monkeypatch.setattr(rloo, "clock", lambda device: now[0])
    for name in seconds:
        spy(monkeypatch, name, lambda inputs, output, name=name: (now.append(now.pop() + seconds[name]), output)[1])
    _, output = train()
    metrics, _ = train(output_dir=str(output), resume=True, total_episodes=32)
    for update in metrics:
        phases = [update[f"time/{name}"] for name in ("rollout", "reference", "reward", "train")]
        assert phases == [*seconds.values()]
        assert update["tokens_per_second"] == pytest.approx(16 * update["completions/mean_length"] / 1111)
        assert update["eps"] == pytest.approx(16 / 1111)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
        assert 0.5 * used < update["memory/peak_gb"] <= used


def test_equal_scores_are_equal_up_to_rounding():
    scores = torch.tensor([[0.3, 1.0, 1.0, math.nan], [0.1 + 0.2, 1.001, 1.0, 2.0], [0.3 + 3e-7, 1.0, math.nan, 2.0]])
    assert rloo.equal_groups(scores).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"kl_level": "token", "num_ppo_epochs": 2, "mask_truncated_completions": True},
        {"loss_aggregation": "token", "advantage_estimator": "reinforce", "kl_in_reward": False, "num_ppo_epochs": 2},
        {"loss_aggregation": "sequence-mean", "advantage_estimator": "grpo", "kl_level": "token"},
    ],
)
def test_gradients_and_metrics_do_not_depend_on_the_split_into_micro_batches(train, flags):
    (whole, output), *runs = [
        train(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=16 // size,
            seed=3,
            local_rollout_forward_batch_size=16,
            learning_rate=1e-3,
            adam_eps=1e-3,
            total_episodes=48,
            **flags,
        )
        for size in (16, 8, 2)
    ]
    assert whole[0]["grad_norm"] > 0.1
    for metrics, other_output in runs:
        for one, other in zip(without_times(whole), without_times(metrics), strict=True):
            assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
        assert (final_weights(output) - final_weights(other_output)).abs().max() < 1e-5


def test_every_epoch_is_each_prompt_once_and_small_datasets_cycle(train, tmp_path, monkeypatch):
    seen = spy(monkeypatch, "update")

    def order(rows: int, **flags) -> list[int]:
        """Numbers of the prompts of two updates."""
        text = "".join(json.dumps({"prompt": "a" * (number + 1)}) + "\n" for number in range(rows))
        (tmp_path / "rows.jsonl").write_text(text)
        seen.clear()
        train(dataset_name=str(tmp_path / "rows.jsonl"), num_eval_prompts=0, **flags)
        return [len(row["prompt"]) - 1 for inputs, _ in seen for row in inputs[5]]

    # 8 prompts an update; 5 episodes of each
    first, again, other = (order(8, total_episodes=32, seed=seed) for seed in (1, 1, 2))
    assert sorted(first[:8]) == sorted(first[8:]) == list(range(8)) and first[:8] != first[8:]
    assert first == again != other
    few = order(3, total_episodes=32)
    assert len(few) == 16 and all(sorted(few[i : i + 3]) == [0, 1, 2] for i in range(0, 15, 3))
    part = functools.partial(rloo.rows_of_update, range(50), 1)
    assert part(40, 20) == part(40, 10) + part(50, 10)  # an update in which an epoch ends


@pytest.mark.parametrize("threads", [1, 2])
def test_one_seed_repeats_a_run_exactly_and_evaluation_does_not_change_it(train, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        runs = [
            train(total_episodes=48, seed=seed, num_ppo_epochs=2, num_mini_batches=2, **flags)
            for seed, flags in ((5, {}), (5, {"num_eval_prompts": 4, "num_sample_generations": 1}), (6, {}))
        ]
    finally:
        torch.set_num_threads(before)
    plain = [without_times(metrics) for metrics, _ in runs]
    assert plain[0] == plain[1] != plain[2]
    files = [(output / "model.safetensors").read_bytes() for _, output in runs]
    assert files[0] == files[1] != files[2]


def test_masked_truncated_completions_have_no_loss_but_stay_in_the_baseline(train, monkeypatch):
    """Gradients flow from the completions that ended alone, with advantages that still know the truncated siblings."""
    seen = spy(monkeypatch, "policy_loss", after=lambda inputs, output: inputs[0].retain_grad() or output)
    train()
    (masked,), _ = train(mask_truncated_completions=True)
    (new, _, advantages, mask, *_), (masked_new, _, masked_advantages, *_) = (inputs for inputs, _ in seen)
    silent = (masked_new.grad == 0).all(-1)
    assert torch.equal(advantages, masked_advantages) and not (new.grad == 0).all(-1).any()
    assert silent.sum() == round(16 * masked["completions/clipped_ratio"]) > 0
    assert (silent <= mask.all(-1)).all()  # a completion of full length may still have ended in its last token
    assert torch.equal(new.grad[~silent], masked_new.grad[~silent])  # the weight of the others does not change


def test_unscorable_completions_leave_the_baseline_none_is_not_zero_and_zero_is_not_none():
    rewards = torch.tensor([[1.0, math.nan, 0.0], [4.0, math.nan, math.nan], [math.nan, 2.0, 3.0]])
    expected = torch.tensor([[1.0 - 4.0, 0.0, 0.0 - 3.0], [4.0 - 1.0, 0.0, 0.0], [0.0, 0.0, 3.0 - 0.0]])
    assert torch.equal(rloo.advantage(rewards).nan_to_num(0.0), expected)
    a, b = torch.tensor([[0.0, math.nan, math.nan]]), torch.tensor([[2.0, 3.0, math.nan]])
    total, by_name = rloo.score({"a": lambda batch: a, "b": lambda batch: b}, (1.0, 0.5), None)
    assert torch.equal(total[0, :2], torch.tensor([1.0, 1.5])) and total[0, 2].isnan()
    assert by_name == {"a": a, "b": b}


def test_a_run_with_unscorable_completions(train):
    metrics, _ = train(
        reward_model_path=None,
        reward_fns=(f"{__file__}:sometimes_none",),
        normalize_reward=True,
        normalize_advantage=True,
        total_episodes=48,
        num_eval_prompts=8,
    )
    assert len(metrics) == 3 and all(math.isfinite(value) for update in metrics for value in update.values())


def test_groups_go_by_position_never_by_text(train, tmp_path):
    """Two rows with the same prompt and different columns stay two groups: within each all rewards are equal."""
    (tmp_path / "same.jsonl").write_text('{"prompt": "a b", "value": 1}\n{"prompt": "a b", "value": 5}\n')
    (update,), _ = train(
        dataset_name=str(tmp_path / "same.jsonl"),
        reward_model_path=None,
        kl_coef=0.0,
        reward_fns=(f"{__file__}:column_value",),
    )
    assert update["objective/scores"] == 3 and update["frac_reward_zero_std"] == 1
    assert update["loss/policy_avg"] == 0 and update["grad_norm"] == 0


def test_raw_scores_are_logged_and_zero_std_is_counted_before_kl(train):
    """Half of the prompts give equal scores to all completions. With KL in them no two rewards are equal any more."""
    metrics, _ = train(
        reward_model_path=None,
        reward_fns=(f"{__file__}:constant_for_even_rows",),
        total_episodes=64,
        normalize_reward=True,
    )
    for even, odd in (metrics[:2], metrics[2:]):  # an epoch is two updates
        assert even["frac_reward_zero_std"] + odd["frac_reward_zero_std"] == 1
        assert even["objective/scores"] + odd["objective/scores"] == pytest.approx(5 / 2 + 5 / 2)
    assert all(update["objective/kl"] != 0 for update in metrics[1:])


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_normalisation_is_over_the_whole_update(train, monkeypatch, level):
    """Advantages have mean 0 and standard deviation 1 over all prompts of the update, not per micro-batch or group."""
    seen = spy(monkeypatch, "policy_loss")
    train(normalize_advantage=True, kl_level=level, per_device_train_batch_size=4, gradient_accumulation_steps=4)
    real = torch.cat([advantages[mask[..., : advantages.shape[-1]]] for (_, _, advantages, mask, *_), _ in seen])
    assert len(seen) == 4 and len(real) >= 16
    assert real.mean().item() == pytest.approx(0, abs=1e-6) and real.std().item() == pytest.approx(1, abs=1e-5)


def test_without_kl_no_reference_is_loaded(train, monkeypatch):
    loads = spy(monkeypatch, "load_model")
    (update,), _ = train(kl_coef=0.0)
    assert len(loads) == 2 and "objective/kl" not in update  # policy and reward model
    train()
    assert len(loads) == 5


def test_dropout_is_off_in_rollout_scoring_and_training(train, tmp_path):
    """A policy whose config asks for half of everything to be dropped ends where one without dropout ends."""
    runs = []
    for name, dropout in (("off", 0.0), ("on", 0.5)):
        tiny_model(hidden_dropout=dropout, attention_dropout=dropout).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        runs.append(train(sft_model_path=str(tmp_path / name), total_episodes=32))
    assert without_times(runs[0][0]) == without_times(runs[1][0])
    assert AutoModelForCausalLM.from_pretrained(runs[1][1]).config.hidden_dropout == 0.5


def test_dropout_is_off_in_the_copy_that_samples():
    assert not rloo.sampling_model(tiny_model(hidden_dropout=0.5), torch.bfloat16).training


@pytest.mark.parametrize("engine", ["group", "hf"])
def test_the_saved_model_keeps_its_generation_config(train, tiny, tmp_path, engine):
    """... and says nothing of the attention that it was trained by."""
    shutil.copytree(tiny / "sft", tmp_path / "sft")
    config = {"eos_token_id": [0, 9], "pad_token_id": 1, "do_sample": True, "top_k": 7, "temperature": 0.3}
    (tmp_path / "sft" / "generation_config.json").write_text(json.dumps(config))
    _, output = train(sft_model_path=str(tmp_path / "sft"), rollout_engine=engine)
    assert config.items() <= json.loads((output / "generation_config.json").read_text()).items()
    assert "lanes" not in (output / "config.json").read_text()


def test_logits_are_never_made_for_prompts_nor_all_at_once(monkeypatch):
    """The head sees the real completion tokens only, 128 at a time where the vocabulary is large, and once more in
    backward; the numbers are those of a single block."""
    model, batch = tiny_model(), random_batch(k=4, B=10, R=12)
    n, head = int(batch.response_mask.sum()), model.get_output_embeddings()
    weight = torch.cat([head.weight.detach(), torch.zeros(2**16 - len(head.weight), head.weight.shape[1])])
    head.weight, head.out_features = torch.nn.Parameter(weight), 2**16
    seen = spy(monkeypatch, "final_logits")
    logprobs, entropy = rloo.completion_logprobs(model, batch, 0.7)
    assert [hidden.shape[0] for (_, hidden), _ in seen] == [128, 128, n - 256]
    gradient = flat_grad(logprobs.square().sum(), model)
    assert sorted(hidden.shape[0] for (_, hidden), _ in seen) == sorted(2 * [128, 128, n - 256])

    mask, hidden = batch.response_mask, rloo.completion_hidden(model, batch, "group")[:, :, :-1]
    whole = (head(hidden) / 0.7).log_softmax(-1)
    expected = whole.gather(-1, batch.responses[..., None]).squeeze(-1) * mask
    assert (logprobs - expected).abs().max() < 1e-5
    assert (entropy - (-whole.exp() * whole).sum(-1) * mask).abs().max() < 1e-5
    exact = flat_grad(expected.square().sum(), model)
    assert (gradient - exact).abs().max() < 1e-5 * exact.abs().max()


def test_no_table_of_log_probs_outlives_the_backward_pass(train, monkeypatch):
    """... for the sake of an entropy whose gradient nobody has asked for."""
    tables, alive, log_softmax = [], [], F.log_softmax

    def noted(*args, **options):
        table = log_softmax(*args, **options)
        tables.append(weakref.ref(table.untyped_storage()))
        return table

    monkeypatch.setattr(F, "log_softmax", noted)
    spy(monkeypatch, "average_gradients", lambda *_: alive.append([x for x in tables if x() is not None]))
    train()
    assert tables and alive == [[]]


# ----------------------------------------------------------------------------------------------------------------------
# Traps for users and editors


def test_what_is_not_given_depends_on_what_is_trained(train, tiny, capsys):
    bundled, own = parse(""), parse(f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_fns x.py:f")
    assert (bundled.learning_rate, bundled.total_episodes, bundled.dtype) == (2.5e-4, 6400, "float32")
    assert (own.learning_rate, own.total_episodes, own.dtype) == (1e-6, None, "float32")  # on a CPU
    assert capsys.readouterr().out == ""
    assert parse(f"--sft_model_path {tiny}/sft").learning_rate == 1e-6  # mini TL;DR, but not its policy
    assert capsys.readouterr().out.startswith("--dataset_name is not given: ")
    assert parse("--total_episodes 0").total_episodes == 0  # only evaluates
    assert parse("--exp_name x --seed 3").output_dir.startswith("runs/x__3__")
    metrics, output = train(learning_rate=None, total_episodes=None, rloo_k=4)
    assert [update["episode"] for update in metrics] == [16, 32, 48, 64]  # 4 completions of each of 16 prompts
    assert metrics[0]["lr"] == 1e-6 and json.loads((output / "args.json").read_text())["total_episodes"] == 64
    said = capsys.readouterr().out
    assert "learning rate 1e-06, one ratio per sequence, forward passes in float32, layout " in said


def test_episodes_are_rounded_up_to_whole_updates(train):
    assert [update["episode"] for update in train(total_episodes=17)[0]] == [16, 32]


def test_bfloat16_is_the_default_of_ones_own_task_on_a_gpu_that_has_it(tiny, monkeypatch):
    own = f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_fns x.py:f --device cuda"
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None: zeros(*size))  # there is no such device here
    for supported in (True, False):  # a T4 or V100 emulates it, slowly
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True, found=supported: including_emulation or found,
        )
        assert parse(own).dtype == ("bfloat16" if supported else "float32")
        assert parse("--device cuda").dtype == "float32"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert parse("--device cuda").device == "cuda:1"  # each process its own


def test_on_a_gpu_attention_is_never_cudnns(monkeypatch):
    """... whose backward pass gives NaN with some masks."""
    used, enabled = [], []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", enabled.append)
    device = torch.device("cuda:1")
    assert rloo.start_processes(device) == (0, 1) and used == [device] and enabled == [False]


def test_one_process_shards_nothing():
    assert rloo.resolve_args(Args(sharding="fsdp", device="cpu")).sharding == "ddp"


@pytest.mark.parametrize("share", [0.6, 0.4])
def test_completions_that_are_mostly_cut_are_said_once(train, monkeypatch, capfd, share):
    metrics = {"grad_norm": 1.0, "objective/scores": 0.0, "completions/clipped_ratio": share}
    metrics |= {"completions/mean_length": 1.0, "time/train": 0.0, "cpu_time": 0.0}
    monkeypatch.setattr(rloo, "update", lambda *args: dict(metrics))
    train(total_episodes=48, response_length=1)
    said = "".join(capfd.readouterr())
    cut = "most completions are cut at --response_length 1: raise it, or set --stop_token to"
    assert said.count(cut) == (share > 0.5)


@pytest.mark.parametrize("metrics", [{"grad_norm": 0.0}, {"frac_reward_zero_std": 0.92}, {}])
def test_an_update_that_teaches_nothing_is_said_and_no_other(train, monkeypatch, capfd, metrics):
    usual = {"grad_norm": 1.0, "objective/scores": 0.0, "completions/clipped_ratio": 0.0, "frac_reward_zero_std": 0.9}
    usual |= {"completions/mean_length": 1.0, "time/train": 0.0, "cpu_time": 0.0}
    monkeypatch.setattr(rloo, "update", lambda *args: usual | metrics)
    train()
    assert ("of an update gave hardly any learning signal" in "".join(capfd.readouterr())) == bool(metrics)


@pytest.mark.parametrize(
    "name, edit, error",
    [
        ("prompt_and_own", lambda x, P, k: torch.tensor("typo"), TypeError),
        ("lanes_as_heads", lambda x, P, k, own=rloo.lanes_as_heads: own(x, P, k + 1), RuntimeError),
        ("prompt_and_own", lambda x, P, k, own=rloo.prompt_and_own: own(x, P, k).flip(2), InputError),  # numbers
        ("lanes_as_heads", lambda x, P, k, own=rloo.lanes_as_heads: own(x, P, k).flip(1), InputError),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_mistake_in_an_edit_of_group_rows_is_said_and_shows_its_trace(train, monkeypatch, capsys, name, edit, error):
    monkeypatch.setattr(rloo, name, edit)
    train()
    said = capsys.readouterr().out
    assert said.count("falls back to --layout plain") == 2
    assert error is InputError or f"({error.__name__}: " in said and "--layout group shows the trace" in said
    with pytest.raises(error) as raised:
        train(layout="group")
    assert error is not InputError or "group rows give other results" in str(raised.value)


def test_an_attention_of_ones_own_is_used(train, monkeypatch):
    seen = spy(monkeypatch, "group_attention")
    train()
    assert seen


def append_turns(prompts, completions, completion_ids, **columns):
    """As a careless reward function does: makes whole chats of the prompts that it gets."""
    for prompt, text in zip(prompts, completions):
        prompt.append({"role": "assistant", "content": text})
    return [float(sum(len(turn["content"]) for turn in prompt)) for prompt in prompts]


def test_a_reward_function_may_change_what_it_gets(train, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = rloo.load_functions([f"{__file__}:append_turns"], "reward_fns", tiny_tokenizer(), {"columns": {}})
    batch = random_batch()
    for row in batch.rows:
        row["prompt"] = [{"role": "user", "content": "b"}]
    first, second = (seen["append_turns"](batch) for _ in range(2))
    assert torch.equal(first, second) and all(len(row["prompt"]) == 1 for row in batch.rows)


@pytest.mark.parametrize("content", ["import nowhere_to_be_found\n", "def f(:\n", "1 / 0\n"])
def test_an_error_in_a_users_file_shows_its_trace(tiny, tmp_path, content):
    (tmp_path / "damaged.py").write_text(content)
    done = shell(["rloo.py", *command(tiny, tmp_path / "out"), "--reward_fns", f"{tmp_path}/damaged.py:f"], HERE)
    assert done.returncode == 1 and f'{tmp_path}/damaged.py", line 1' in done.stderr and "Traceback" in done.stderr


def test_log_probs_of_padding_do_not_count(train, monkeypatch):
    (plain,), _ = train()
    fill = lambda inputs, output: (output[0], output[1].masked_fill(~output[0].response_mask, -3.0))  # noqa: E731
    spy(monkeypatch, "rollout", fill)
    (filled,), _ = train()
    assert without_times([plain]) == without_times([filled])


def test_an_advantage_of_another_shape_is_refused(train, monkeypatch):
    monkeypatch.setattr(rloo, "advantage", lambda rewards, estimator: rewards.T.contiguous())
    with pytest.raises(InputError, match="^advantage: must return a tensor of the same shape as its rewards"):
        train()


def test_group_rows_that_are_asked_for_are_run_or_refused(train, tmp_path, capsys):
    for part in (any_model("falcon"), tiny_tokenizer()):
        part.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="size of tensor"):  # its attention is its own, with masks as wide as rows
        train(sft_model_path=str(tmp_path), layout="group")
    train(sft_model_path=str(tmp_path))
    said = capsys.readouterr().out
    assert (
        "FalconForCausalLM: falls back to --layout plain (a policy also to --rollout_engine hf), because its layers do "
        "not accept them (RuntimeError: " in said
    )
    assert "layout plain, rollout engine hf" in said


def test_a_model_that_takes_no_mask_of_group_rows_falls_back_with_its_reason(train, monkeypatch, capsys):
    body = type(tiny_model().base_model)
    original = body.forward

    def refuses(self, *args, attention_mask=None, **options):
        if attention_mask is not None and attention_mask.dim() == 4:
            raise ValueError("a mask has two axes")
        return original(self, *args, attention_mask=attention_mask, **options)

    monkeypatch.setattr(body, "forward", refuses)
    train()
    assert "its layers do not accept them (ValueError: a mask has two axes; " in capsys.readouterr().out
    with pytest.raises(ValueError, match="two axes"):
        train(layout="group")


def test_a_kl_of_weight_0_in_the_loss_adds_nothing(train, monkeypatch):
    monkeypatch.setattr(rloo, "kl_penalty", lambda new, *_: new.sum(-1) * math.inf)
    (metrics,), _ = train(kl_coef=0.0, kl_in_reward=False)
    assert math.isfinite(metrics["loss/policy_avg"])


def test_a_run_in_which_nothing_can_be_scored_says_so(train, capfd):
    train(reward_model_path=None, reward_fns=(f"{__file__}:never",))
    assert "gave hardly any learning signal: in over 90% of the groups all are equal, or none is used" in "".join(
        capfd.readouterr()
    )


def test_metrics_say_how_many_completions_have_a_score_and_how_many_a_loss(train):
    flags = {"reward_fns": (f"{__file__}:sometimes_none",), "reward_model_path": None}
    (metrics,), _ = train(**flags)
    assert metrics["rewards/sometimes_none/applied"] == metrics["completions/in_loss"]
    assert 0.5 < metrics["completions/in_loss"] < 1
    (masked,), _ = train(mask_truncated_completions=True)
    assert masked["completions/in_loss"] == pytest.approx(1 - masked["completions/clipped_ratio"])
    (both,), _ = train(mask_truncated_completions=True, **flags)
    assert both["completions/in_loss"] < min(x["completions/in_loss"] for x in (metrics, masked))


def test_columns_that_rewards_would_not_see_are_refused(train, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a b", "completions": 3}\n' * 20)
    with pytest.raises(InputError, match="rename its column `completions`"):
        train(dataset_name=str(tmp_path / "x.jsonl"))


def test_estimators_without_a_name_or_with_nan_are_refused(train, monkeypatch):
    with pytest.raises(ValueError, match="advantage estimator 'rlo': must be rloo, "):
        rloo.advantage(torch.zeros(2, 3), "rlo")
    monkeypatch.setattr(rloo, "advantage", lambda rewards, estimator: rewards * math.nan)
    with pytest.raises(InputError, match="^advantage: is not finite"):
        train()


def test_prompts_are_shown_as_the_model_reads_them(train, tiny, tmp_path, capsys):
    """A tokenizer that knows no word must not look as if it did."""
    folder = shutil.copytree(tiny / "sft", tmp_path / "sft")
    blind = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0, "w": 3, "[UNK]": 2}, unk_token="[UNK]")),
        eos_token="<eos>",
        unk_token="[UNK]",
    )
    blind.save_pretrained(folder)
    functions = (f"{__file__}:constant_reward",)
    train(
        sft_model_path=str(folder), num_eval_prompts=2, total_episodes=0, reward_model_path=None, reward_fns=functions
    )
    assert re.search(r"\nprompt +\[UNK\]\n", capsys.readouterr().out)


def begins_with_l(prompts, completions, completion_ids, **columns):
    return [float(text.strip().startswith("l m")) for text in completions]


def test_a_reward_for_what_the_template_writes_is_said_to_teach_nothing(train, tiny, tmp_path, capfd):
    """A template that begins the answer, as those do that write <think>: the completions are without its beginning, so
    a reward that asks for it is 0 everywhere. The end of a prompt is shown as the model reads it."""
    folder = shutil.copytree(tiny / "sft", tmp_path / "sft")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}l m"
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": [{"role": "user", "content": word}]} for word in WORDS]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (metrics,), output = train(
        sft_model_path=str(folder),
        dataset_name=str(tmp_path / "chat.jsonl"),
        reward_model_path=None,
        reward_fns=(f"{__file__}:begins_with_l",),
        num_eval_prompts=1,
        kl_coef=0.0,
    )
    said = "".join(capfd.readouterr())
    assert metrics["objective/scores"] == 0 and "an update gave hardly any learning signal" in said
    assert re.search(r"\nprompt +\w l m\n", said)
    assert all(sample["prompt"].endswith(" l m") for sample in read_metrics(output, "completions"))


def third_call(prompts, completions, completion_ids, calls=itertools.count(1), **columns):  # noqa: B008, counts calls
    """Raises in the third update of a process, until the file named by BROKEN is gone."""
    if os.path.exists(os.environ["BROKEN"]) and next(calls) % 3 == 0 and os.environ.get("RANK", "1") == "1":
        return {}["no such key"]
    return count_tokens(prompts, completions, completion_ids)


def test_an_error_of_a_reward_function_costs_no_update(train, tmp_path, monkeypatch):
    flags = {**LONG, "num_eval_prompts": 0, "save_steps": 0, "reward_model_path": None}
    flags["reward_fns"] = (f"{__file__}:third_call",)
    monkeypatch.setenv("BROKEN", str(tmp_path / "broken"))
    expected = end_of(train(**flags)[1])
    (tmp_path / "broken").touch()
    with pytest.raises(KeyError, match="no such key"):
        train(**flags, output_dir=str(tmp_path / "out"))
    assert [path.name for path in rloo.checkpoints(tmp_path / "out")] == ["checkpoint-2"]
    (tmp_path / "broken").unlink()
    train(**flags, output_dir=str(tmp_path / "out"), resume=True)
    assert end_of(tmp_path / "out") == expected


def test_an_error_before_an_updates_first_step_costs_none_and_after_it_saves_nothing_half_done(
    train, tmp_path, monkeypatch, capsys
):
    """LONG has two optimizer steps per update; the 5th and 6th backward pass are those of the third update."""
    for call, newest in ((5, ["checkpoint-2"]), (6, [])):
        calls, output = itertools.count(1), tmp_path / str(call)

        def fail(inputs, found, calls=calls, call=call):
            return found if next(calls) < call else 1 / 0

        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            spy(patch, "policy_loss", fail)
            train(**{**LONG, "num_eval_prompts": 0, "save_steps": 0}, output_dir=str(output))
        assert [path.name for path in output.glob("*checkpoint*")] == newest
        said = f"ended by ZeroDivisionError; newest checkpoint: {output / newest[0] if newest else 'none'}; to go on, "
        assert said in capsys.readouterr().out


def test_an_error_between_an_updates_last_step_and_its_end_saves_nothing(train, tmp_path, monkeypatch):
    """Its metrics are not yet written; the weights are already those of the third update."""
    calls, output = itertools.count(1), tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(OSError):
        spy(patch, "peak_memory", lambda inputs, found: found if next(calls) < 3 else Path("/nowhere").read_bytes())
        train(**{**LONG, "num_eval_prompts": 0, "save_steps": 0}, output_dir=str(output))
    assert rloo.checkpoints(output) == [] and len(read_metrics(output)) == 2


def test_the_command_line_shows_the_trace_of_a_users_function(tiny, tmp_path):
    code = "def f(completions, **columns):\n    return [len(text) for text in Completions]\n"
    (tmp_path / "mine.py").write_text(code)
    done = shell(["rloo.py", *command(tiny, tmp_path / "out"), "--reward_fns", f"{tmp_path}/mine.py:f"], HERE)
    assert done.returncode == 1 and "in f\n    return [len(text) for text in Completions]" in done.stderr
    assert "NameError: name 'Completions' is not defined" in done.stderr


def test_two_processes_save_together_what_an_error_in_one_of_them_would_lose(tiny, tmp_path):
    """The function of the second rank raises, in the third update."""
    (tmp_path / "broken").touch()
    line = command(tiny, tmp_path / "out", per_device_train_batch_size=8, total_episodes=96)
    line += ["--reward_fns", f"{__file__}:third_call"]
    run = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "rloo.py", *line]
    done = shell(run, HERE, BROKEN=str(tmp_path / "broken"))
    assert done.returncode == 1 and "KeyError: 'no such key'" in done.stderr
    assert "RuntimeError: another process raised an error, which it prints" in done.stderr
    assert [path.name for path in rloo.checkpoints(tmp_path / "out")] == ["checkpoint-2"]
    assert f"; newest checkpoint: {tmp_path}/out/checkpoint-2; " in done.stdout


def nan_in_the_third_update(prompts, completions, completion_ids, calls=itertools.count(1), **columns):  # noqa: B008
    """Makes the loss NaN, though not its gradient, and on the second rank only."""
    if next(calls) == 3 and os.environ["RANK"] == "1":
        run, loss = sys.modules["__main__"], sys.modules["__main__"].policy_loss
        run.policy_loss = lambda *args: (loss(*args)[0] + math.nan, *loss(*args)[1:])
    return count_tokens(prompts, completions, completion_ids)


def test_two_processes_end_and_save_together_when_a_number_of_one_of_them_is_not_finite(tiny, tmp_path):
    line = command(tiny, tmp_path / "out", per_device_train_batch_size=8, total_episodes=96)
    line += ["--reward_fns", f"{__file__}:nan_in_the_third_update"]
    done = shell(["-m", "torch.distributed.run", "--nproc_per_node", "2", "rloo.py", *line], HERE)
    assert done.returncode == 1
    assert done.stderr.count("rloo.py: the loss or its gradient is not finite") == 2
    assert [path.name for path in rloo.checkpoints(tmp_path / "out")] == ["checkpoint-2"]


def test_optimizer_steps_send_no_python_objects(tiny, monkeypatch):
    """Whether numbers are finite on all ranks is a sum of tensors."""
    args, policy, optimizer, rows = library_call(tiny)
    rewards, sampling = {"sum": lambda batch: batch.responses.sum(-1).float()}, {"response_length": 4, "stop_ids": [0]}
    objects, sums = spy(monkeypatch, "gather"), spy(monkeypatch, "sum_over_ranks")
    rloo.require_finite("a number", torch.zeros(3))
    assert not objects and len(sums) == 1
    rloo.update(args, policy, policy, rewards, optimizer, rows, sampling, "group")
    assert len(objects) == 1  # whether a reward function raised an error


def test_a_failed_first_attempt_does_not_block_its_folder(train, tmp_path, monkeypatch):
    flags = {"reward_fns": (f"{__file__}:third_call",), "output_dir": str(tmp_path / "out")}
    monkeypatch.setenv("BROKEN", str(tmp_path / "broken"))
    for prompts in (0, 2):  # after an evaluation it needs --resume
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            spy(patch, "update", lambda inputs, metrics: 1 / 0)
            train(**flags, num_eval_prompts=prompts)
    assert len(train(**flags, resume=True)[0]) == 1
    with pytest.raises(InputError, match="is not empty"):
        train(**flags)


def test_only_mistakes_and_a_lack_of_memory_are_one_line():
    assert rloo.one_line(InputError("x")) == "x" and "batch_size" in rloo.one_line(MemoryError())
    assert rloo.one_line(FileNotFoundError(2, "No such file", "/a/b")) is rloo.one_line(KeyError("x")) is None


def test_a_missing_column_is_named_with_those_that_there_are(train, tmp_path):
    (tmp_path / "mine.py").write_text("def f(completions, animal, **columns):\n    return [1.0 for _ in completions]\n")
    with pytest.raises(
        InputError, match="what it is given, .*, completion, n; add .*missing a required argument: 'animal'"
    ):
        train(reward_fns=(f"{tmp_path}/mine.py:f",))


def test_the_entropy_has_the_gradient_of_its_formula():
    """... also where a token is impossible, whose 0 · -inf must not become NaN."""
    model, batch = tiny_model(), random_batch()
    head = model.get_output_embeddings()
    logits = head(rloo.completion_hidden(model, batch, "group")[:, :, :-1])[batch.response_mask] / 0.7
    p = logits.softmax(-1)
    expected = flat_grad(-(p * p.log()).sum(), model)
    assert (flat_grad(rloo.completion_logprobs(model, batch, 0.7)[1].sum(), model) - expected).abs().max() < 1e-4
    head.bias = torch.nn.Parameter(torch.zeros(16).index_fill(0, torch.tensor([7]), -math.inf))
    batch = batch._replace(responses=batch.responses.masked_fill(batch.responses == 7, 8))
    logprobs, entropy = rloo.completion_logprobs(model, batch, 0.7)
    assert entropy.isfinite().all() and flat_grad((logprobs - entropy).sum(), model.base_model).isfinite().all()


def library_call(tiny, **flags):
    """What a caller of `update` or `improve` needs: args, policy, optimizer, tokenizer's rows."""
    policy, tokenizer = (auto.from_pretrained(tiny / "sft") for auto in (AutoModelForCausalLM, AutoTokenizer))
    rows = [rloo.prepare_row({"prompt": text}, tokenizer) for text in ("a b", "c d e f")] * 4
    return rloo.resolve_args(Args(device="cpu", **flags)), policy, torch.optim.AdamW(policy.parameters(), 1e-3), rows


def test_update_is_a_library_call(tiny):
    args, policy, optimizer, rows = library_call(tiny)
    rewards = {"sum": lambda batch: batch.responses.sum(-1).float()}
    sampling = {"response_length": 4, "stop_ids": [0]}
    metrics = rloo.update(args, policy, None, rewards, optimizer, rows, sampling, "group")
    assert metrics["grad_norm"] > 0 and metrics["val/ratio"] == 1
    with pytest.raises(ValueError, match="ratio level None: must be sequence or token; resolve_args fills in the"):
        rloo.update(Args(), policy, None, rewards, optimizer, rows, sampling, "group")


@pytest.mark.parametrize("mini_batches, epochs", [(1, 1), (2, 1), (2, 2)])
def test_improve_is_a_library_call_with_advantages_from_anywhere(tiny, mini_batches, epochs):
    """Here they say: less of the first of two completions, more of the second. Its metrics are tensors; ρ is 1 in the
    first step."""
    args, policy, optimizer, rows = library_call(
        tiny,
        rloo_k=2,
        per_device_train_batch_size=16 // mini_batches,
        num_mini_batches=mini_batches,
        num_ppo_epochs=epochs,
    )
    torch.manual_seed(3)
    batch, sampled = rloo.rollout(policy, rows, 2, 0.7, response_length=4, stop_ids=[0])
    advantages = torch.tensor([-1.0, 1.0]).view(2, 1, 1).expand(2, 8, 1)
    in_loss = torch.ones(2, 8, dtype=torch.bool)
    same = torch.ones(2, 8, 1)
    with torch.no_grad():
        before = rloo.completion_logprobs(policy, batch, 0.7)[0].sum(-1)
    logged = rloo.improve(args, policy, optimizer, "group", batch, sampled, sampled, None, advantages, in_loss, same)
    with torch.no_grad():
        gain = rloo.completion_logprobs(policy, batch, 0.7)[0].sum(-1) - before
    assert gain[0].mean() < 0 < gain[1].mean()
    tokens = int(batch.response_mask.sum())
    steps = mini_batches * epochs
    assert logged["grad_norm"].shape == (steps,) and (logged["grad_norm"] > 0).all()
    assert logged["val/ratio"].shape == logged["policy/entropy_avg"].shape == (tokens * epochs,)
    assert logged["loss/policy_avg"].shape == logged["policy/clipfrac_avg"].shape == (16 * epochs,)
    first = len(logged["val/rollout_logprob_gap"])
    assert (logged["val/ratio"][:first] == 1).all() and (logged["policy/approxkl_avg"][: 16 // mini_batches] == 0).all()
    assert first == tokens if mini_batches == 1 else first < tokens and (logged["val/ratio"] != 1).any()
    nothing, *_ = [x.detach().clone() for x in policy.parameters()]
    rloo.improve(args, policy, optimizer, "group", batch, sampled, sampled, None, 0 * advantages, ~in_loss, same)
    assert logged["loss/policy_avg"].dtype == torch.float32 and nothing.isfinite().all()


def test_each_micro_batch_has_its_part_of_every_tensor(tiny, monkeypatch):
    args, policy, optimizer, rows = library_call(
        tiny, rloo_k=2, per_device_train_batch_size=4, gradient_accumulation_steps=4
    )
    batch, old = rloo.rollout(policy, rows, 2, 0.7, response_length=4, stop_ids=[0])
    advantages, correction = torch.randn(2, 8, 1), torch.rand(2, 8, 1)
    in_loss = torch.ones(2, 8, dtype=torch.bool)
    seen = spy(monkeypatch, "policy_loss")
    rloo.improve(args, policy, optimizer, "group", batch, old, old, None, advantages, in_loss, correction)
    assert len(seen) == 4
    for number, whole in ((2, advantages), (3, batch.response_mask), (7, correction)):
        assert torch.equal(torch.cat([inputs[number] for inputs, _ in seen], dim=1), whole)


def forward_passes(monkeypatch, train, **flags) -> list[bool]:
    """For each forward pass of an update by the policy or the reference: whether it has a gradient."""
    seen = []
    with monkeypatch.context() as patch:
        spy(patch, "completion_logprobs", lambda inputs, output: (seen.append(torch.is_grad_enabled()), output)[1])
        train(**flags)
    return seen


def test_no_forward_pass_is_repeated(train, monkeypatch):
    """Old log-probs cost one only for a correction or for several optimizer steps per epoch."""
    halves = {"num_mini_batches": 2, "per_device_train_batch_size": 8, "local_rollout_forward_batch_size": 16}
    correction = {"rollout_correction": "truncate"}
    monkeypatch.setattr(rloo, "choose_layout", lambda *args: "group")  # without the passes of its trial
    for flags, passes in (
        ({}, [False, True]),  # the reference, training
        ({"kl_coef": 0.0}, [True]),
        ({"num_ppo_epochs": 2}, [False, True, True]),
        (halves, [False, False, True, True]),
        (correction, [False, False, True]),
        (halves | correction, [False, False, True, True]),
    ):
        assert forward_passes(monkeypatch, train, **flags) == passes, flags


def test_defaults_are_filled_in_without_a_refusal_and_refusals_change_nothing(tmp_path):
    wrong = Args(rloo_k=1, resume=True, reward_weights=(1.0, 2.0, 3.0), warmup_ratio=3.0, device="cpu")
    before = vars(wrong).copy()
    resolved = rloo.resolve_args(wrong)
    assert vars(wrong) == before and resolved.learning_rate == 2.5e-4 and resolved.output_dir is None
    assert rloo.resolve_args(resolved) == resolved
    args = rloo.resolve_args(Args(output_dir=str(tmp_path / "out"), device="cpu"))
    before = vars(args).copy()
    assert rloo.check_args(args) is None and vars(args) == before and not (tmp_path / "out").exists()
    with pytest.raises(InputError):
        rloo.check_args(resolved)


def test_the_heads_gradient_in_bfloat16_does_not_depend_on_the_number_of_blocks(monkeypatch):
    """... without autocast's cache, which is why training switches it off (the next test): with it, blocks share a copy
    of the head in bfloat16 and add up its gradient in bfloat16."""
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 512, bias=False)
    hidden, tokens = torch.randn(1024, 64), torch.randint(512, (1024,))

    class Model(torch.nn.Module):
        config = types.SimpleNamespace(get_text_config=types.SimpleNamespace)

        def get_output_embeddings(self):
            return head

    def gradient(blocks: int, half: bool, cache: bool = False):
        head.weight.grad, parts = None, zip(hidden.chunk(blocks), tokens.chunk(blocks))
        with torch.autocast("cpu", torch.bfloat16, enabled=half, cache_enabled=cache):
            losses = [rloo.checkpoint(rloo.block_logprobs, Model(), *x, 1.0, use_reentrant=False)[0] for x in parts]
            torch.cat(losses).sum().backward()
        return head.weight.grad.clone()

    exact = gradient(1, half=False)
    one, many = ((gradient(blocks, half=True) - exact).norm() / exact.norm() for blocks in (1, 64))
    shared = (gradient(64, half=True, cache=True) - exact).norm() / exact.norm()
    assert many < 1.2 * one and shared > 1.5 * many


def test_training_runs_without_autocasts_cache(train, monkeypatch):
    seen = []
    monkeypatch.setattr(
        rloo,
        "block_logprobs",
        lambda *args, f=rloo.block_logprobs: (
            seen.append(torch.is_autocast_cache_enabled()) if torch.is_grad_enabled() else None,
            f(*args),
        )[1],
    )
    train(dtype="bfloat16")
    assert seen and not any(seen)


@pytest.mark.parametrize(
    "error, goes_on",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("called a synchronizing CUDA operation"), True),
    ],
)
def test_only_a_step_that_waits_goes_without_a_graph_and_the_debug_mode_is_reset(monkeypatch, error, goes_on):
    """Run on the CPU: what would be CUDA is replaced."""
    modes, steps = [], []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.random, "fork_rng", lambda *args, **options: contextlib.nullcontext())
    decoder = rloo.Decoder(tiny_model(), 4, 5, 3, 4, 1.0, stop_ids=[0])

    def fail():
        steps.append(len(modes))
        if len(steps) == 2:  # the first is not watched
            raise error

    decoder.step = fail
    with torch.no_grad(), contextlib.nullcontext() if goes_on else pytest.raises(type(error)):
        assert decoder.capture() is None
    assert modes == ["error", "default"] and steps == [0, 1]


def test_the_trial_of_a_step_warns_of_nothing(monkeypatch, recwarn):
    """PyTorch warns when the mode is set."""
    text = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: warnings.warn(text, stacklevel=1))
    monkeypatch.setattr(torch.random, "fork_rng", lambda *args, **options: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    with torch.no_grad():
        assert rloo.Decoder(tiny_model(), 4, 5, 3, 4, 1.0, stop_ids=[0]).capture()
    assert not [str(warning.message) for warning in recwarn if text in str(warning.message)]


def test_a_capture_that_fails_ends_the_run(monkeypatch):
    """It would leave the process on the stream of the capture."""

    def not_permitted(graph):
        raise RuntimeError("operation not permitted when stream is capturing")

    decoder = rloo.Decoder(tiny_model(), 4, 5, 3, 4, 1.0, stop_ids=[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(torch.random, "fork_rng", lambda *args, **options: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", not_permitted)
    with torch.no_grad(), pytest.raises(RuntimeError, match="not permitted"):
        decoder.capture()


@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_masks_have_a_column_for_each_key(family, monkeypatch):
    """Also that of the single slot which `capture` reads: CUDA's memory-efficient kernel cannot broadcast over keys."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(torch.random, "fork_rng", lambda *args, **options: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    batch, calls = random_batch(), spy(monkeypatch, "sdpa_attention")
    with torch.no_grad():
        decoder = rloo.Decoder(tiny_model(family), *batch.prompt_ids.shape, 3, 4, 1.0, stop_ids=[0])
        decoder.capture()
        decoder.generate(batch.prompt_ids, batch.prompt_mask)
    assert len(calls) == 2 * 2  # capture and generate, layers
    for (_, _, key, _, mask), _ in calls:
        assert mask.shape[-1] == key.shape[2] == batch.prompt_ids.shape[1]


def test_an_error_of_cuda_is_no_reason_for_plain_rows(monkeypatch):
    """... such as a capture that fails: nothing that runs on the device afterwards can be trusted."""
    error = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
    monkeypatch.setattr(rloo, "decode", lambda *args, **options: (_ for _ in ()).throw(error))
    args = Args(device="cpu", response_length=4, rloo_k=2)
    with pytest.raises(torch.AcceleratorError, match="not permitted"):
        rloo.choose_layout(tiny_model(), args, [{"prompt_ids": [5, 6, 7]}])


def test_a_graph_is_replayed_in_place_of_steps():
    """A graph that runs the step of a decoder, as CUDA's would: the same completions."""
    model, batch, results = tiny_model("llama"), random_batch(), []
    for replayed in (True, False):
        torch.manual_seed(0)
        decoder = rloo.Decoder(model, *batch.prompt_ids.shape, 3, 6, 1.0, stop_ids=[99])
        step = decoder.step
        if replayed:
            decoder.graph = types.SimpleNamespace(replay=step)
            decoder.step = None
        with torch.no_grad():
            decoder.generate(batch.prompt_ids, batch.prompt_mask)
        results.append(decoder.tokens)
    assert torch.equal(*results)


def test_a_decoder_that_is_used_again_begins_anew():
    """As on a GPU, where all chunks share one. Nothing stops, so that no lane leaves."""
    model, (first, second) = tiny_model("llama"), (random_batch(seed=seed) for seed in (0, 1))
    P = max(batch.prompt_ids.shape[1] for batch in (first, second))
    prompts = [(F.pad(x.prompt_ids, (P - x.prompt_ids.shape[1], 0)), x.prompt_mask) for x in (first, second)]
    prompts = [(ids, F.pad(mask, (P - mask.shape[1], 0))) for ids, mask in prompts]
    decoders = [rloo.Decoder(model, 4, P, 3, 6, 1.0, stop_ids=[99]) for _ in range(2)]
    with torch.no_grad():
        decoders[0].generate(*prompts[0])
        for decoder in decoders:
            torch.manual_seed(0)
            decoder.generate(*prompts[1])
    (used_again, new) = decoders
    assert torch.equal(used_again.tokens, new.tokens) and torch.equal(used_again.logprobs, new.logprobs)


# ----------------------------------------------------------------------------------------------------------------------
# LoRA


LORA = {"lora_rank": 3, "lora_alpha": 6}
ADAPTABLE = [name for name in [*FAMILIES, *OTHERS] if name != "gpt2"]  # GPT-2's layers are no torch.nn.Linear


def with_adapters(model, seed: int = 0):
    """The model with adapters that change what it says: their B is not 0."""
    rloo.add_adapters(model, *LORA.values(), seed)
    for linear in rloo.adapted_layers(model).values():
        torch.nn.init.normal_(linear.lora_B.weight, std=0.3)
    return model


def weights_with_adapters(base, adapter: Path, dtype=torch.float32) -> dict:
    """The state dict of a model with the adapters of a folder merged, by PEFT's names and formula."""
    weights, config = base.state_dict(), json.loads((adapter / "adapter_config.json").read_text())
    saved = load_file(adapter / "adapter_model.safetensors")
    for name in {name.rpartition(".lora_")[0] for name in saved}:
        A, B = (saved[f"{name}.lora_{x}.weight"] for x in "AB")
        assert A.dtype == B.dtype == torch.float32 and len(A) == B.shape[1] == config["r"]
        own = name.removeprefix("base_model.model.") + ".weight"
        weights[own] = (weights[own].float() + config["lora_alpha"] / config["r"] * (B @ A)).to(dtype)
    return weights


@pytest.mark.parametrize("name", ADAPTABLE)
def test_adapters_change_nothing_at_first_and_nothing_while_they_are_off(name):
    base, policy, tokens = any_model(name), any_model(name), torch.tensor([[5, 3, 8, 4]])
    expected = base(tokens).logits
    rloo.add_adapters(policy, *LORA.values(), seed=0)
    assert torch.equal(policy(tokens).logits, expected)
    for linear in rloo.adapted_layers(policy).values():
        torch.nn.init.normal_(linear.lora_B.weight, std=0.3)
    assert (policy(tokens).logits - expected).abs().max() > 1e-2
    with pytest.raises(ZeroDivisionError), rloo.without_adapters(policy):
        assert torch.equal(policy(tokens).logits, expected)
        raise ZeroDivisionError
    assert (policy(tokens).logits - expected).abs().max() > 1e-2
    with rloo.without_adapters(base):
        assert torch.equal(base(tokens).logits, expected)


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "qwen3", "mixtral", "falcon", "cohere"])
def test_every_linear_layer_of_the_layers_has_an_adapter_and_nothing_else_has(name, capsys):
    base, policy = any_model(name), with_adapters(any_model(name))
    linears = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    inside = {name for name in linears if ".layers." in name or ".h." in name}
    assert set(rloo.adapted_layers(policy)) == inside and len(inside) >= 2 * 4 and linears - inside
    trained = rloo.trained_weights(policy)
    assert {name.rpartition(".lora_")[0] for name in trained} == inside and len(trained) == 2 * len(inside)
    count = sum(weight.numel() for weight in trained.values())
    assert f"{count:,} weights are trained, the adapters of {len(inside)} linear layers" in capsys.readouterr().out
    assert rloo.trained_weights(base).keys() == dict(base.named_parameters()).keys()


def test_adapters_begin_as_in_peft_and_depend_on_the_seed_alone():
    first = {}
    for seed, other in ((1, 0), (1, 5), (2, 0)):
        model = tiny_model("llama", seed=other)
        rloo.add_adapters(model, 4, 32, seed)
        for name, linear in rloo.adapted_layers(model).items():
            A, B = linear.lora_A.weight, linear.lora_B.weight
            assert (A.shape, B.shape) == ((4, linear.in_features), (linear.out_features, 4)) and not B.any()
            assert 0.8 < A.abs().max() * linear.in_features**0.5 <= 1  # uniform within ± 1 / √in
            same = torch.equal(A, first.setdefault(name, A))
            assert same == (seed == 1)


@pytest.mark.parametrize("layout", ["group", "plain"])
@pytest.mark.parametrize("name", ["gpt_neox", "llama", "qwen3", "mixtral", "tied"])
def test_what_samples_has_the_merged_weights_and_the_policy_keeps_its_own(name, layout):
    def model():
        return tiny_model("qwen3", tie_word_embeddings=True) if name == "tied" else tiny_model(name)

    policy = with_adapters(model())
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    for _ in range(3):
        copy = rloo.sampling_model(policy, torch.float32)
    assert [*copy.state_dict()] == [*model().state_dict()] and not rloo.adapted_layers(copy)
    assert (copy.get_output_embeddings().weight is copy.get_input_embeddings().weight) == (name == "tied")
    assert all(torch.equal(weight, before[name]) for name, weight in policy.state_dict().items())
    with torch.no_grad():
        ours, theirs = (rloo.completion_logprobs(m, random_batch(), 0.7, layout)[0] for m in (policy, copy))
        with rloo.without_adapters(policy):
            base, _ = rloo.completion_logprobs(policy, random_batch(), 0.7, layout)
    assert (ours - theirs).abs().max() < 1e-4 < 1e-1 < (ours - base).abs().max()


@pytest.mark.parametrize("layout", ["group", "plain"])
@pytest.mark.parametrize("name", ["gpt_neox", "qwen3"])
def test_gradients_of_adapters_are_those_through_the_merged_weights(name, layout):
    policy, batch = with_adapters(tiny_model(name)), random_batch()
    trained, frozen = rloo.trained_weights(policy), tiny_model(name)
    copies = {name: weight.detach().clone().requires_grad_() for name, weight in trained.items()}
    weights = frozen.state_dict()
    for linear in rloo.adapted_layers(policy):
        A, B = (copies[f"{linear}.lora_{x}.weight"] for x in "AB")
        weights[f"{linear}.weight"] = weights[f"{linear}.weight"] + LORA["lora_alpha"] / LORA["lora_rank"] * B @ A

    def backward(model):
        rloo.completion_logprobs(model, batch, 0.7, layout)[0].square().sum().backward()

    backward(policy)
    frozen.forward = lambda: backward(frozen)
    torch.func.functional_call(frozen, weights)
    for name, weight in trained.items():
        assert (weight.grad - copies[name].grad).norm() < 1e-4 * copies[name].grad.norm(), name
    assert all(weight.grad is None for name, weight in policy.named_parameters() if name not in trained)


def test_gradients_of_adapters_alone_are_averaged(monkeypatch):
    monkeypatch.setattr(rloo.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(rloo.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(rloo.dist, "all_reduce", lambda x: x.add_(3.0))  # the other rank's
    policy = with_adapters(tiny_model())
    rloo.average_gradients(policy)
    for name, weight in policy.named_parameters():
        assert (weight.grad == 1.5).all() if ".lora_" in name else weight.grad is None


@pytest.mark.parametrize("layout", ["group", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_stays_the_base_model_bit_by_bit(train, tiny, monkeypatch, dtype, layout):
    """... and is not loaded. The policy moves away from it."""
    loads, seen = spy(monkeypatch, "load_model"), spy(monkeypatch, "chunked_logprobs")
    metrics, _ = train(**LORA, dtype=dtype, layout=layout, total_episodes=64)
    assert len(loads) == 2  # policy and reward model
    assert abs(metrics[0]["objective/kl"]) < 0.02 < abs(metrics[-1]["objective/kl"])
    args = Args(device="cpu", dtype=dtype)
    base = rloo.load_model(args, "", tiny / "sft", trained=False)
    last = [call for call in seen if rloo.adapted_layers(call[0][0])][-1]
    (policy, *inputs), logprobs = last
    base.set_attn_implementation(policy.config._attn_implementation)
    assert torch.equal(rloo.chunked_logprobs(base, *inputs), logprobs)
    with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
        assert not torch.equal(rloo.chunked_logprobs(policy, *inputs), logprobs)


@pytest.mark.parametrize("engine", ["group", "hf", f"{__file__}:engine_by_generate"])
def test_rollouts_and_evaluations_sample_from_the_adapted_policy(train, monkeypatch, engine):
    sampled = spy(monkeypatch, "rollout")
    metrics, output = train(
        **LORA, rollout_engine=engine, total_episodes=64, save_steps=1, num_eval_prompts=4, save_total_limit=9
    )
    assert abs(metrics[-1]["objective/kl"]) > 0.02
    assert all(update["val/rollout_logprob_gap"] < 1e-5 and update["val/ratio"] == 1 for update in metrics)
    (model, *_), _ = sampled[-1]  # the last evaluation's
    saved = AutoModelForCausalLM.from_pretrained(output)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), saved.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_run_with_adapters_leaves(train, tiny, tmp_path, monkeypatch, dtype):
    """The merged policy, which loads as it is, and the adapters beside it; weight decay takes nothing off the base."""
    shutil.copytree(tiny / "sft", tmp_path / "sft")
    (tmp_path / "sft" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [0, 9], "top_k": 7, "do_sample": True})
    )
    optimizers = spy(monkeypatch, "make_optimizer")
    metrics, output = train(
        **LORA, sft_model_path=str(tmp_path / "sft"), dtype=dtype, total_episodes=64, weight_decay=0.5
    )
    (_, policy, _), (optimizer, _) = optimizers[0]
    assert policy.dtype == getattr(torch, dtype)
    adapters = optimizer.param_groups[0]["params"]
    assert len(adapters) == 2 * 8 and {weight.dtype for weight in adapters} == {torch.float32}
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "sft", dtype=policy.dtype)
    expected = weights_with_adapters(base, output / "adapter", policy.dtype)
    found = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    assert found.state_dict().keys() == expected.keys() and found.dtype == policy.dtype
    assert all(torch.equal(weight, expected[name]) for name, weight in found.state_dict().items())
    assert "lanes" not in (output / "config.json").read_text()
    assert {"eos_token_id": [0, 9], "top_k": 7}.items() <= found.generation_config.to_dict().items()
    assert AutoTokenizer.from_pretrained(output).eos_token == "<eos>"
    config = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert config == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(tmp_path / "sft"),
        "target_modules": ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"],
        "r": 3,
        "lora_alpha": 6,
    }
    for update in metrics:
        assert update["val/ratio"] == 1 and update["grad_norm"] > 0
        assert update["val/rollout_logprob_gap"] < (0.1 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("name", ["gpt_neox", "qwen3", "mixtral"])
def test_peft_loads_the_adapters(name, tmp_path):
    """... onto the base, with the policy's logits, and merges them to the weights that are saved."""
    peft = pytest.importorskip("peft", reason="peft is not installed: only the format of the adapters was tested")
    tiny_model(name).save_pretrained(tmp_path / "base")
    policy = with_adapters(AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval())
    rloo.save_adapters(tmp_path / "adapter", policy)
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    tokens = torch.tensor([[5, 3, 8, 4]])
    assert (loaded(tokens).logits - policy(tokens).logits).abs().max() < 1e-4
    merged, copy = loaded.merge_and_unload().state_dict(), rloo.sampling_model(policy, torch.float32).state_dict()
    assert merged.keys() == copy.keys() and all((merged[name] - copy[name]).abs().max() < 1e-5 for name in copy)


def test_runs_with_adapters_end_alike_in_both_layouts_and_with_activations_computed_again(train):
    flags = {**LORA, "rollout_engine": "hf", "total_episodes": 48, "adam_eps": 1e-3}
    (metrics, output), *others = (
        train(**flags, layout=layout, gradient_checkpointing=again)
        for layout, again in (("group", False), ("plain", False), ("group", True))
    )
    assert abs(metrics[-1]["objective/kl"]) > 0.01
    for theirs, other in others:
        for one, update in zip(without_times(metrics), without_times(theirs), strict=True):
            assert one == pytest.approx(update, rel=1e-3, abs=1e-4)
        assert (final_weights(output) - final_weights(other)).abs().max() < 1e-5


def test_checkpoints_hold_the_adapters_only_and_resumed_runs_end_like_others(train, capsys):
    run = {**LONG, **LORA, "seed": 5}
    _, output = train(**run)
    files = {path.name for path in (output / "checkpoint-4").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "state.json"}
    moments = torch.load(output / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert moments["state"].keys() == rloo.trained_weights(with_adapters(tiny_model())).keys()
    adapter = (output / "adapter" / "adapter_model.safetensors").read_bytes()
    assert (output / "checkpoint-4" / "adapter_model.safetensors").read_bytes() == adapter
    expected = end_of(output)
    train(**run, output_dir=str(output), resume=True)  # nothing is left to do
    assert end_of(output) == expected
    for last in (3, 1):
        for path in rloo.checkpoints(output):
            if int(path.name[11:]) > last:
                shutil.rmtree(path)
        train(**run, output_dir=str(output), resume=True)
        assert f"resumed from {output}/checkpoint-{last}; changed: nothing\n" in capsys.readouterr().out
        assert end_of(output) == expected
        assert (output / "adapter" / "adapter_model.safetensors").read_bytes() == adapter
    for changed in ({"lora_rank": 2}, {"lora_alpha": 5}, {"lora_rank": 0}):
        (name,), (value,) = changed.keys(), changed.values()
        with pytest.raises(InputError, match=f"run with other flags: {name} {LORA[name]} -> {value}"):
            train(**run | changed, output_dir=str(output), resume=True)


@pytest.mark.parametrize("content", [b"", "another", None])
def test_adapters_that_do_not_load_are_named(train, content):
    _, output = train(**LONG, **LORA)
    file = output / "checkpoint-4" / "adapter_model.safetensors"
    if content == "another":  # without the last adapter
        weights = load_file(file)
        weights.popitem()
        save_file(weights, file)
    else:
        file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(InputError, match=f"move it away.* {output}/checkpoint-4: cannot be loaded"):
        train(**LONG, **LORA, output_dir=str(output), resume=True)


def test_a_model_whose_layers_have_no_linear_is_refused_in_a_sentence(train, tiny, tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(InputError, match="^--lora_rank 3: GPT2LMHeadModel has no torch.nn.Linear in its layers$"):
        train(**LORA, sft_model_path=str(tmp_path / "gpt2"))


def test_the_learning_rate_of_adapters_is_ten_times_that_of_all_weights_unless_given(train, tiny, capsys):
    own = f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_fns x.py:f"
    for line, rate in (("", 2.5e-4), (own, 1e-6)):
        assert parse(line).learning_rate == rate
        assert parse(f"{line} --lora_rank 1").learning_rate == pytest.approx(10 * rate)
        assert parse(f"{line} --lora_rank 1 --learning_rate 3e-4").learning_rate == 3e-4
    train(**LORA, learning_rate=None)
    assert "learning rate 1e-05, " in capsys.readouterr().out


@pytest.mark.skipif(OLD_FSDP, reason="--sharding fsdp refuses this torch")
def test_adapters_on_two_processes_equal_those_on_one(tiny, tmp_path, monkeypatch):
    """ddp and fsdp on gloo, resumed across both, with a tied head, and in bfloat16."""
    base = {
        **LORA,
        "dataset_name": str(tiny / "data"),
        "sft_model_path": str(tiny / "sft"),
        "reward_model_path": str(tiny / "reward"),
        "rloo_k": 2,
        "response_length": 6,
        "num_eval_prompts": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "adam_eps": 1e-4,
        "device": "cpu",
        "save_steps": 1,
        "save_total_limit": 9,
        "total_episodes": 48,
        "seed": 3,
    }
    fsdp, small = {"sharding": "fsdp"}, {"gradient_checkpointing": True}
    bfloat16, tied = {"dtype": "bfloat16"}, {"sft_model_path": str(tmp_path / "tied model")}
    tiny_model("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path / "tied model")
    tiny_tokenizer().save_pretrained(tmp_path / "tied model")

    flags, resumed = runs_in(tmp_path, base)

    monkeypatch.setattr(rloo.Decoder, "append", ranked)
    rloo.main(Args(**flags("one", 16)))
    rloo.main(Args(**flags("one, tied", 16, **tied)))
    runs = [
        flags("ddp", **small),
        flags("fsdp", **fsdp),
        flags("fsdp, small", **fsdp, **small),
        resumed("one to fsdp", "one", **fsdp),
        resumed("one to ddp", "one"),
        flags("fsdp, tied", **fsdp, **tied),
        flags("ddp, bfloat16", **bfloat16),
        flags("fsdp, bfloat16", **fsdp, **bfloat16),
    ]
    logs = on_two_processes(runs, tmp_path)
    rloo.main(Args(**resumed("fsdp to one", "fsdp", 16)))
    assert logs[0].read_text().count("weights are trained") == len(runs)

    def adapters(name: str) -> dict:
        return load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")

    assert (final_weights(tmp_path / "one") - final_weights(tiny / "sft")).abs().max() > 1e-2
    for name in ("ddp", "fsdp", "fsdp, small", "one to fsdp", "one to ddp", "fsdp to one", "fsdp, tied"):
        one = "one, tied" if name == "fsdp, tied" else "one"
        assert (final_weights(tmp_path / one) - final_weights(tmp_path / name)).abs().max() < 1e-5, name
        ours, theirs = adapters(one), adapters(name)
        assert ours.keys() == theirs.keys() and all((ours[x] - theirs[x]).abs().max() < 1e-5 for x in ours), name
        for ours, theirs in zip(*(without_times(read_metrics(tmp_path / n)) for n in (one, name)), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4), name
    for name in ("ddp, bfloat16", "fsdp, bfloat16"):
        metrics = read_metrics(tmp_path / name)
        assert all(update["val/ratio"] == 1 and 0 < update["val/rollout_logprob_gap"] < 0.1 for update in metrics)
        sft = AutoModelForCausalLM.from_pretrained(tiny / "sft", dtype=torch.bfloat16)
        expected = weights_with_adapters(sft, tmp_path / name / "adapter", torch.bfloat16)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        assert found.keys() == expected.keys() and all(torch.equal(found[x], expected[x]) for x in found), name
