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
# Data and rewards

SYSTEM, USER, ASSISTANT = (
    {"role": role, "content": text} for role, text in (("system", "e"), ("user", "b c"), ("assistant", " d"))
)
OTHER = {"role": "assistant", "content": "f"}


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Its template: the first letter of a turn's role, its text; at the end an `a` that asks for an answer."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    return tokenizer


def tokenizer_with_bos() -> PreTrainedTokenizerFast:
    """Puts token 1 before every text."""
    tokenizer = chat_tokenizer()
    bos = processors.TemplateProcessing(single="[PAD] $A", special_tokens=[("[PAD]", 1)])
    tokenizer.backend_tokenizer.post_processor = bos
    return tokenizer


def test_a_prompt_that_is_a_text_has_special_tokens_a_templates_has_its_own_and_a_reference_none():
    tokenizer, (b, c, d) = tokenizer_with_bos(), (4, 5, 6)
    assert rloo.prepare_row({"prompt": "b c"}, tokenizer)["prompt_ids"] == [1, b, c]
    chat = rloo.prepare_row({"prompt": [{"role": "b", "content": "c"}], "completion": "d"}, tokenizer)
    assert chat["prompt_ids"] == [b, c, 3] and chat["reference_ids"] == [d]


def test_rows_of_every_documented_form():
    tokenizer, chat = tiny_tokenizer(), chat_tokenizer()
    for row, own, text in (
        ({"prompt": "b c", "completion": " d"}, tokenizer, "b c"),
        ({"messages": [USER, ASSISTANT]}, tokenizer, "b c"),
        ({"prompt": "b c", "messages": [USER, ASSISTANT]}, tokenizer, "b c"),
        ({"prompt": [USER], "messages": [USER, ASSISTANT]}, tokenizer, "b c"),
        ({"prompt": [USER], "completion": [ASSISTANT]}, tokenizer, "b c"),
        ({"prompt": [USER], "completion": [SYSTEM, ASSISTANT]}, tokenizer, "b c"),  # the last message
        ({"prompt": [USER], "completion": " d"}, chat, "u b c a"),
        ({"messages": [SYSTEM, USER, ASSISTANT, USER]}, chat, "s e u b c a"),
        ({"prompt": [USER, OTHER, USER], "messages": [USER, OTHER, USER, ASSISTANT]}, chat, "u b c a f u b c a"),
    ):
        prepared = rloo.prepare_row(row, own)
        assert prepared["prompt_text"] == text and prepared["reference"] == " d" and prepared["columns"] == row
        assert prepared["prompt_ids"] == tokenizer(text)["input_ids"]
    for row, why in (
        ({"text": "b"}, "the row has text"),
        ({"prompt": 3}, "TypeError"),
        ({"prompt": ""}, "prompt is empty"),
        ({"messages": [ASSISTANT]}, "ValueError"),
        ({"prompt": "b", "completion": 7}, "must be texts"),
        ({"prompt": [SYSTEM, USER]}, "chat_template is not set"),
        ({"prompt": [USER | {"content": None}]}, "content of a message must be a text"),
        ({"prompt": [USER | {"content": [{"type": "text", "text": "a"}]}]}, "content of a message must be a text"),
        ([], "AttributeError"),
    ):
        with pytest.raises(InputError, match=rf"^x, row 1: needs `prompt` .*\(.*{why}"):
            rloo.prepare_rows([row], tokenizer, 9, "x")


def test_datasets_from_jsonl_files_folders_and_their_splits(tmp_path, capsys):
    rows = [{"prompt": "a"}, {"prompt": "b é\u2028"}]  # a line separator inside a text
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n"
    for name in ("x", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    file, folder = str(tmp_path / "x.jsonl"), str(tmp_path)
    assert rloo.load_rows(file, "train") == rloo.load_rows(folder, "validation") == rows
    assert rloo.load_rows(folder, "train") is rloo.load_rows(file, "test") is rloo.load_rows(folder, "x" * 300) is None
    (tmp_path / "test.jsonl").write_text(text * 5)
    both = rloo.load_data(Args(dataset_name=folder, dataset_train_split="test"), tiny_tokenizer())
    assert [len(part) for part in both] == [9, 1]  # what is trained on is not evaluated on
    (tmp_path / "test.jsonl").write_text(text * 300)
    for train_split, test_split, sizes in (("validation", None, [2, 500]), ("test", "validation", [600, 2])):
        args = Args(dataset_name=folder, dataset_train_split=train_split, dataset_test_split=test_split)
        assert [len(part) for part in rloo.load_data(args, tiny_tokenizer())] == sizes
    (tmp_path / "x.jsonl").write_text(text * 10)
    train, test = rloo.load_data(Args(dataset_name=file, max_prompt_length=1), tiny_tokenizer())
    assert (len(train), len(test)) == (9, 1)  # every second prompt has 2 tokens
    said = capsys.readouterr().out
    assert "the last 2 rows of its split train are held out" in said
    assert "x.jsonl, train: 9 of 18 prompts are within --max_prompt_length 1" in said
    (tmp_path / "x.jsonl").write_text(text * 600)
    assert [len(part) for part in rloo.load_data(Args(dataset_name=file), tiny_tokenizer())] == [1100, 100]
    (tmp_path / "x.jsonl").write_text(text + "{oh\n")
    with pytest.raises(InputError, match=r"x.jsonl: line 4 must be a JSON object .* \(JSONDecodeError"):
        rloo.load_rows(file, "train")


def test_a_hub_name_goes_to_the_datasets_package(monkeypatch):
    fake = types.SimpleNamespace(load_dataset=lambda name, config: {"train": [{"prompt": f"{name} {config} train"}]})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert rloo.load_rows("someone/something", "train") == [{"prompt": "someone/something None train"}]
    train, _ = rloo.load_data(Args(dataset_name="someone/something", dataset_config="main"), tiny_tokenizer())
    assert train[0]["prompt"] == "someone/something main train"
    with pytest.raises(InputError, match="^--dataset_config main: .*mini_tldr is not a Hub dataset$"):
        rloo.load_rows(str(rloo.MINI_TLDR), "train", "main")
    assert rloo.load_rows("someone/something", "test") is None
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        rloo.load_rows("someone/something", "train")


def test_reward_functions_see_prompts_texts_ids_and_columns_in_row_order():
    batch, tokenizer, calls = random_batch(), tiny_tokenizer(), []
    for i, row in enumerate(batch.rows):
        row.update(prompt=f"prompt {i}", columns={"prompt": f"prompt {i}", "answer": i})

    def reward(prompts, completions, completion_ids, answer, **columns):
        calls.append((prompts, completions, completion_ids, answer, columns))
        return [None if i == 3 else i for i in range(12)]

    scores = rloo.function_reward("--reward_fns r", reward, tokenizer, batch)
    assert scores[0, 3].isnan() and scores[2, 1] == 9 and scores.shape == (3, 4)
    ((prompts, completions, completion_ids, answer, columns),) = calls
    assert prompts == [f"prompt {i}" for i in range(4)] * 3 and answer == [0, 1, 2, 3] * 3 and columns == {}
    for j, b in itertools.product(range(3), range(4)):
        real = batch.responses[j, b][batch.response_mask[j, b]].tolist()
        assert completion_ids[j * 4 + b] == real  # the stop token included
        assert completions[j * 4 + b] == tokenizer.decode([3] + [i for i in real if i > 2])[1:]  # after an "a"


def test_texts_are_without_the_stop_token_whatever_it_is_and_otherwise_as_sampled():
    """The stop token may be a word; and a tokenizer that tidies up spaces would make "a." of "a ."."""
    responses = torch.tensor([[[4, 5, 0, 0], [4, 3, 4, 3]]])
    batch = rloo.make_batch([{"prompt_ids": [3]}] * 2, responses, stop_ids=[5])
    assert rloo.completion_texts(batch, tiny_tokenizer()) == [" b", " b a b a"]
    tokenizer = tokenizer_of([".", "a"])
    tokenizer.clean_up_tokenization_spaces = True
    assert rloo.completion_texts(batch, tokenizer) == [" a", " a . a ."]


def test_every_row_has_all_columns_of_the_dataset(train, tmp_path):
    """... so that a reward function is always called with the same names, None where a row has nothing."""
    rows = [{"prompt": "a b"}] * 18 + [{"prompt": "c", "n": 1}] + [{"prompt": "d", "m": 2}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = rloo.load_data(Args(dataset_name=str(tmp_path / "rows.jsonl")), tiny_tokenizer())
    assert [row["columns"] for part in loaded for row in part] == [
        {"prompt": row["prompt"], "n": row.get("n"), "m": row.get("m")} for row in rows
    ]
    function = f"{__file__}:number_or_none"  # the two rows with m are those to evaluate on
    metrics, _ = train(
        dataset_name=str(tmp_path / "rows.jsonl"),
        reward_model_path=None,
        total_episodes=38,
        reward_fns=(function,),
        judge_fn=function,
        per_device_train_batch_size=2,
        num_eval_prompts=9,
    )
    assert sum("rewards/number_or_none/mean" in update for update in metrics) == 1 < len(metrics)


@pytest.mark.parametrize(
    "returned, message",
    [
        ([1.0], r"a list of 12 finite numbers or Nones, not \[1.0\] .*invalid for input of size 1"),
        ([1.0] * 13, r"a list of 12 finite .* \[1.0, .*invalid for input of size 13"),
        (None, "a list of 12 finite numbers or Nones, not None"),
        (3.0, "a list of 12 finite numbers or Nones, not 3.0"),
        (["1"] * 12, r"a list of 12 finite numbers or Nones, not \['1', "),
        ([math.nan] * 12, r"a list of 12 finite numbers or Nones, not \[nan, "),
        ([math.inf] * 12, r"a list of 12 finite numbers or Nones, not \[inf, "),
        ([1e300] * 12, r"a list of 12 finite numbers or Nones, not \[1e\+300, "),
        ([10**400] * 12, r"a list of 12 finite numbers or Nones, not \[1000"),
    ],
)
def test_what_a_reward_function_may_not_return(returned, message):
    with pytest.raises(InputError, match=f"^--reward_fns r must return {message}"):
        rloo.function_reward("--reward_fns r", lambda **kw: returned, tiny_tokenizer(), random_batch())


def test_models_that_the_decoder_cannot_run_are_found_by_a_trial(capsys):
    """DiffLlama attends to its values in another arrangement than they are cached in; MiniCPM3 unpacks its cache."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    for name, more in (("diffllama", {}), ("minicpm3", latent))[: 1 if OLD else 2]:
        config = AutoConfig.for_model(name, vocab_size=16, eos_token_id=0, **sizes, **more)
        model = AutoModelForCausalLM.from_config(config).eval()
        args = Args(device="cpu", response_length=4, rloo_k=2)
        assert rloo.choose_layout(model, args, [{"prompt_ids": [5, 6, 7]}]) == "plain"
        assert "falls back to --layout plain" in capsys.readouterr().out


@pytest.mark.skipif(OLD, reason="before transformers 5 Qwen2-MoE's attention is its own")
def test_a_sliding_window_of_0_is_none():
    """As in the configs of Qwen2-MoE."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("qwen2_moe", vocab_size=16, num_key_value_heads=2, num_experts=4, **sizes)
    assert not config.sliding_window
    model = AutoModelForCausalLM.from_config(config).eval()
    rows = [{"prompt_ids": [5, 6, 7]}, {"prompt_ids": [8]}]
    assert rloo.choose_layout(model, Args(device="cpu", response_length=4, rloo_k=2), rows) == "group"


@pytest.mark.parametrize("flag", ["reward_fns", "judge_fn"])
def test_an_error_in_a_users_function_is_raised_as_it_is(train, tmp_path, flag):
    """... with the trace down to the line of the user's file, and beyond."""
    code = "import json\n\n\ndef f(completions, **columns):\n    return json.loads('{')\n"
    (tmp_path / "mine.py").write_text(code)
    spec = f"{tmp_path}/mine.py:f"
    with pytest.raises(json.JSONDecodeError) as error:
        train(num_eval_prompts=2, **{flag: (spec,) if flag == "reward_fns" else spec})
    assert (tmp_path / "mine.py", 4) in [(Path(str(place.path)), place.lineno) for place in error.traceback]


def test_functions_of_one_file_share_it_and_can_be_pickled(tmp_path):
    (tmp_path / "shared_file.py").write_text("seen = []\ndef one(**_): return seen\ndef two(**_): return seen\n")
    found = rloo.load_functions(
        [f"{tmp_path}/shared_file.py:{name}" for name in ("one", "two")], "reward_fns", None, {"columns": {}}
    )
    one, two = (found[name].args[1] for name in ("one", "two"))
    assert one() is two() and pickle.loads(pickle.dumps(one)) is one


def test_weights_add_reward_model_and_functions(train):
    (alone,), _ = train()
    (both,), _ = train(reward_fns=(f"{__file__}:constant_reward",), reward_weights=(2.0, -3.0))
    assert both["rewards/reward_model/mean"] == alone["objective/scores"] and both["rewards/constant_reward/mean"] == 1
    assert both["objective/scores"] == pytest.approx(2 * alone["objective/scores"] - 3, abs=1e-5)
    assert both["rewards/reward_model/std"] > 0 == both["rewards/constant_reward/std"]


def test_a_reward_of_weight_0_is_logged_and_makes_nothing_scorable(train):
    functions = tuple(f"{__file__}:{name}" for name in ("never", "constant_reward"))
    flags = {"reward_model_path": None, "reward_fns": functions, "reward_weights": (1.0, 0.0), "kl_coef": 0.0}
    (metrics,), _ = train(**flags)
    assert metrics["rewards/constant_reward/mean"] == 1 and "objective/scores" not in metrics


def test_a_reward_model_reads_the_policys_tokens_or_is_refused(train, tiny, tmp_path):
    """It has the policy's tokenizer, with or without [PAD], and an embedding for each of the policy's tokens."""

    def reward(policy_tokenizer):
        args = Args(reward_model_path=str(tmp_path), device="cpu", response_length=6)
        rows = [{"prompt_ids": [3] * 9}]
        return rloo.load_reward_model(args, policy_tokenizer, rows, len(policy_tokenizer))["reward_model"]

    model, more = tiny_model(classifier=True), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"--reward_model_path {tmp_path}: "):
        reward(tiny_tokenizer())
    tiny_tokenizer().save_pretrained(tmp_path)
    vocab = {word: i for word, i in tiny_tokenizer().get_vocab().items() if word != "[PAD]"}
    unpadded = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab)), eos_token="<eos>")
    scores = [reward(tokenizer)(random_batch()) for tokenizer in (unpadded, tiny_tokenizer())]
    assert torch.equal(*scores) and scores[0].shape == (3, 4)
    named = tiny_tokenizer("<eos>")
    named.add_special_tokens({"pad_token": "<pad>"})  # a 17th token, which the reward model has no embedding for
    more.add_tokens(["more"])
    refused = "cannot read the policy's tokens, .*benchmark/tldr/text_reward.py is a reward function for such models"
    for other in (named, more):
        with pytest.raises(InputError, match=f"^--reward_model_path {tmp_path}: {refused}"):
            reward(other)
    model.resize_token_embeddings(17)
    model.save_pretrained(tmp_path)
    assert reward(named)(random_batch()).isfinite().all()

    # A policy's embeddings are often padded to a round number, and it may sample such a token.
    for part in (tiny_model(vocab_size=24), tiny_tokenizer()):
        part.save_pretrained(tmp_path / "padded")
    with pytest.raises(InputError, match=refused):
        train(sft_model_path=str(tmp_path / "padded"))


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    """Like tiny_tokenizer's, with other words."""
    backend = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    backend["model"]["vocab"] = {word: i for i, word in enumerate(["<eos>", "[PAD]", "[UNK]", *words])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)),
        eos_token="<eos>",
        pad_token="[PAD]",
        unk_token="[UNK]",
    )


def test_a_few_lines_sample_completions_and_score_given_ones(tiny):
    """The example for users of `import rloo`."""
    model, tokenizer = (auto.from_pretrained(tiny / "sft") for auto in (AutoModelForCausalLM, AutoTokenizer))
    stop_ids = [tokenizer.eos_token_id]
    rows = [rloo.prepare_row({"prompt": text}, tokenizer) for text in ("a b", "c d e f")]

    batch, logprobs = rloo.rollout(model, rows, k=3, temperature=0.7, response_length=6, stop_ids=stop_ids)
    texts = rloo.completion_texts(batch, tokenizer)  # completion j of prompt b is number j * 2 + b

    given = ["g h", "i", "j k l", "m"]  # two completions of each prompt, in the same order
    responses, _ = rloo.pad([tokenizer(text)["input_ids"] + stop_ids for text in given])
    own = rloo.make_batch(rows, responses.view(2, 2, -1), stop_ids)
    own_logprobs, entropies = rloo.completion_logprobs(model, own, temperature=0.7)

    assert len(texts) == 6 and [text.strip() for text in rloo.completion_texts(own, tokenizer)] == given
    assert (entropies > 0).sum() == own.response_mask.sum()
    for made, found in ((batch, logprobs), (own, own_logprobs)):
        for j, b in itertools.product(range(len(found)), range(2)):
            completion = made.responses[j, b][made.response_mask[j, b]]
            logits = model(torch.cat([torch.tensor(rows[b]["prompt_ids"]), completion])[None]).logits[0]
            expected = F.log_softmax(logits[-len(completion) - 1 : -1] / 0.7, dim=-1)
            expected = expected.gather(1, completion[:, None])[:, 0]
            assert torch.allclose(found[j, b, : len(completion)], expected, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------------------
# Flags


def parse(line: str) -> Args:
    return rloo.resolve_args(rloo.parse_args(line.split()))


def test_trl_commands_parse_and_mean_the_same():
    for line in (
        "--dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style --learning_rate 3e-6 "
        "--dataset_train_split descriptiveness --output_dir models/minimal/rloo --missing_eos_penalty 1.0 "
        "--gradient_accumulation_steps 1 --total_episodes 10000 --per_device_train_batch_size 64 "
        "--model_name_or_path EleutherAI/pythia-1b-deduped --reward_model_path EleutherAI/pythia-1b-deduped",
        "--dataset_name trl-internal-testing/tldr-preference-sft-trl-style --dataset_test_split validation "
        "--output_dir models/minimal/rloo_tldr --num_ppo_epochs 2 --num_mini_batches 2 --learning_rate 3e-6 "
        "--per_device_train_batch_size 16 --gradient_accumulation_steps 16 --total_episodes 1000000 "
        "--model_name_or_path EleutherAI/pythia-1b-deduped --sft_model_path cleanrl/sft__tldr "
        "--reward_model_path cleanrl/reward__tldr --local_rollout_forward_batch_size 16 "
        "--missing_eos_penalty 1.0 --stop_token eos --kl_coef 0.03",
    ):
        args = parse(line)
        for flag, value in re.findall(r"--(\w+) (\S+)", line):
            assert str(getattr(args, flag)) == value or getattr(args, flag) == float(value)
        assert args.judge_fn is None and args.sft_model_path in ("EleutherAI/pythia-1b-deduped", "cleanrl/sft__tldr")
        assert (args.response_length, args.temperature, args.cliprange) == (53, 0.7, 0.2)  # TRL's defaults


TRL = {  # defaults of TRL 0.19 by the names of our flags, and ours where they differ
    "kl_coef": (0.05, 0.02),
    "rloo_k": (2, 4),
    "num_ppo_epochs": (4, 1),
    "num_sample_generations": (10, 4),
    "save_steps": (500, 100),
    "seed": (42, 1),
    "adam_eps": 1e-8,
    "cliprange": 0.2,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "missing_eos_penalty": None,
    "normalize_advantage": False,
    "normalize_reward": False,
    "num_mini_batches": 1,
    "response_length": 53,
    "temperature": 0.7,
    "trust_remote_code": False,
    "warmup_ratio": 0.0,
    "weight_decay": 0.0,
    # What TRL has no flag for, since it always does so.
    "advantage_estimator": "rloo",
    "kl_in_reward": True,
    "kl_level": "sequence",
    "loss_aggregation": "sequence",
    "mask_truncated_completions": False,
    "rollout_correction": "off",
}


def test_defaults_are_those_of_trl_but_for_those_that_its_page_names():
    """... and README's table has the defaults of the flags that it lists."""
    readme, page = ((HERE / path).read_text() for path in ("README.md", "benchmark/trl/README.md"))
    defaults = vars(Args())
    for name, value in TRL.items():
        trl, ours = value if isinstance(value, tuple) else (value, value)
        assert defaults[name] == ours, name
        assert (f"`{name}` {ours} (" in page) == (trl != ours), name
    shown = re.findall(r"(?m)^\| `--(\w+)` \| ([\d.]+(?:e-\d+)?)", readme)
    of_own_task = vars(rloo.resolve_args(Args(dataset_name="data", sft_model_path="model", device="cpu")))
    assert len(shown) >= 5 and all(of_own_task[name] == float(value) for name, value in shown)


def test_hyphens_trls_name_for_the_token_level_and_the_bundled_task():
    assert parse("--rloo-k 8 --kl-coef 0.1").rloo_k == parse("--rloo_k 8 --kl_coef 0.1").rloo_k == 8
    args = parse("--token_level_kl")
    assert args.kl_level == "token" and parse("--reward_fns x.py:f").reward_model_path is None
    assert all(Path(path).is_dir() for path in (args.sft_model_path, args.reward_model_path, args.dataset_name))


def command(tiny: Path, output, **flags) -> list[str]:
    """The command line of a short run on the tiny folder."""
    flags = {
        "dataset_name": tiny / "data",
        "sft_model_path": tiny / "sft",
        "reward_model_path": tiny / "reward",
        "rloo_k": 2,
        "response_length": 6,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "total_episodes": 16,
        "num_eval_prompts": 0,
        "device": "cpu",
        "output_dir": output,
    } | flags
    return [str(part) for name, value in flags.items() for part in (f"--{name}", value)]


def snapshot(*folders: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in str(path)
    }


BROKEN = {  # what the next test finds in the folder {x}
    "empty.jsonl": "",
    "broken.jsonl": '{"prompt": "a"}\n{"prompt": }\n',
    "list.jsonl": "[1]\n",
    "deep.jsonl": "[" * 100_000,
    "latin.jsonl": b'{"prompt": "\xe4\xff"}\n',
    "rows.json": '[{"prompt": "a"}]',
    "text.jsonl": '{"text": "a"}\n',
    "fns.py": "thing = 5\ndef boom(**kw): 1 / 0\ndef sum(a, **kw): 0\ndef few(n): 0\n",
    "json.py": "",
    "time.py": "",
}
MISTAKES = {  # what the line must say besides the flag's name -> what is added to a command line that works
    "must be finite and at least 2": ["--rloo_k 1", "--rloo_k 0"],
    "must be finite and at least 1": [
        "--per_device_train_batch_size 0",
        "--gradient_accumulation_steps -1",
        "--num_mini_batches 0",
        "--num_ppo_epochs 0",
        "--response_length 0",
        "--local_rollout_forward_batch_size 0",
        "--max_prompt_length -5",
        "--save_total_limit 0",
        "--lora_alpha 0",
        "--rollout_correction_cap 0.9",
    ],
    "must be finite and at least 0": [
        "--total_episodes -1",
        "--learning_rate -1",
        "--learning_rate inf",
        "--kl_coef nan",
        "--cliprange -0.1",
        "--missing_eos_penalty nan",
        "--save_steps -1",
        "--lora_rank -1",
    ],
    "must be a multiple of --rloo_k 2": ["--per_device_train_batch_size 7"],
    "must be below 1": ["--warmup_ratio 2", "--warmup_ratio 1"],
    "at least 1e-06": ["--temperature 0"],
    "not both": ["--stop_token eos --stop_token_id 3"],
    "must name one of the model's 16": ["--stop_token zebra", "--stop_token_id 99"],
    "1 finite numbers, not all 0": ["--reward_weights 1 2", "--reward_weights nan", "--reward_weights 0"],
    "another reward is called boom; rename one of them": ["--reward_fns {x}/fns.py:boom {x}/fns.py:boom"],
    "there is no file {x}/no.py": ["--reward_fns {x}/no.py:f"],
    "must be file.py:function or module:function; add :function": ["--reward_fns fns", "--reward_fns {x}/fns.py"],
    "there is no module no": ["--reward_fns no:f", "--rollout_engine no.where:f"],
    "is loaded under the same name; rename the file": ["--reward_fns {x}/json.py:f", "--reward_fns {x}/time.py:f"],
    "is not a callable object": ["--reward_fns {x}/fns.py:thing"],
    "add **columns for what it ignores (TypeError: missing a required argument: 'a')": [
        "--reward_fns {x}/fns.py:sum",
        "--judge_fn {x}/fns.py:sum",
    ],
    "does not take what it is given, prompts, completions, completion_ids, ": ["--reward_fns {x}/fns.py:few"],
    "--total_episodes, completions in all": ["--max_steps 3", "--num-train-epochs=1"],
    "--dtype bfloat16": ["--bf16 True", "--bf16"],
    "--lora_rank": ["--use_peft"],
    "give --track": ["--report-to wandb"],
    "a switch takes no value": ["--gradient_checkpointing True", "--track false", "--track=True"],
    "vllm_engine.py": ["--use_vllm"],
    "give --resume": ["--resume_from_checkpoint out"],
    "there is no nothing in {x}/fns.py": ["--reward_fns {x}/fns.py:nothing", "--judge_fn {x}/fns.py:nothing"],
    "--resume needs --output_dir": ["--resume"],
    "cannot be written to": ["--output_dir {x}/fns.py/x"],
    "is not empty; choose a new": ["--output_dir {x}"],
    "if it holds a run": ["--output_dir {x} --resume"],
    "cannot be used": ["--device meta", "--device gpu", "--device cuda:99"],
    "no .jsonl file, folder of them or (pip install datasets) Hub id": [
        f"--dataset_name {name}" for name in ("{x}/nowhere.jsonl", "./nowhere", "nobody/nothing", "{x}/rows.json")
    ],
    "its split dev has no rows; choose one with --dataset_train_split": ["--dataset_train_split dev"],
    "{data} has no rows in tset": ["--dataset_test_split tset"],
    "line 1 must be a JSON object like": [f"--dataset_name {{x}}/{name}.jsonl" for name in ("latin", "list", "deep")],
    "empty.jsonl: its split train has no rows": ["--dataset_name {x}/empty.jsonl"],
    "line 2 must be a JSON object like": ["--dataset_name {x}/broken.jsonl"],
    "text.jsonl, train, row 1: needs `prompt`": ["--dataset_name {x}/text.jsonl"],
    "train: no prompt is within": ["--max_prompt_length 1"],
    "has 128 positions; the longest prompt": ["--response_length 125", "--response_length 4000"],
    "cannot be loaded as a folder or Hub model": ["--sft_model_path /nowhere", "--reward_model_path ./no"],
    "{x}: cannot be loaded": ["--sft_model_path {x}", "--model_name_or_path {x}"],
    "is not a trained model of this kind": ["--sft_model_path {reward}"],
    "nonsense": ["--attn_implementation nonsense"],
}


@pytest.mark.parametrize("message, flags", [(message, flags) for message, lines in MISTAKES.items() for flags in lines])
def test_a_mistake_is_one_line_and_touches_nothing(tiny, tmp_path, message, flags, monkeypatch, capfd):
    for name, content in BROKEN.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)  # where runs/ would be
    before, line = snapshot(tiny, tmp_path), command(tiny, "out")
    flags, message = (text.format(x=tmp_path, reward=tiny / "reward", data=tiny / "data") for text in (flags, message))
    with pytest.raises(SystemExit) as end:
        rloo.command_line((line[:-2] if flags == "--resume" else line) + flags.split())
    said = end.value.code
    assert isinstance(said, str) and said.startswith("rloo.py: ") and message in said
    assert (
        flags.split()[0].lstrip("-") in said or ".jsonl" in flags or said.startswith(f"rloo.py: {flags.split()[-1]}: ")
    )
    assert "\n" not in said and len(said) < 600 and "Traceback" not in "".join(capfd.readouterr())
    after = snapshot(tiny, tmp_path)
    assert after == before


@pytest.mark.parametrize("flag", ["--nonsense 3", "--rloo_k three", "--dtype float16", "--kl_level word", "stray"])
def test_a_flag_that_does_not_parse_is_named_by_tyro(tmp_path, monkeypatch, capsys, flag):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        rloo.command_line(flag.split())
    assert end.value.code == 2 and flag.split()[0].lstrip("-") in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_under_torchrun_one_process_says_that_a_flag_does_not_parse(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    with pytest.raises(SystemExit) as end:
        rloo.command_line(["--nonsense", "3"])
    assert end.value.code == 2 and "".join(capsys.readouterr()) == ""


def test_two_thousand_damaged_datasets_end_in_rows_or_in_one_line(train, tmp_path):
    """Truncated, cut, repeated, NULs, other encodings and types, huge lines: every file is rows or an InputError."""
    rng, tokenizer, path, kept, lines = random.Random(0), tiny_tokenizer(), tmp_path / "x.jsonl", [], 0
    good = "".join(
        json.dumps(row) + "\n"
        for row in (
            {"prompt": "a b", "completion": "c"},
            {"prompt": "ä €", "n": 1},
            {"messages": [USER, ASSISTANT]},
            {"prompt": [USER]},
        )
    )
    values = [
        None,
        0,
        -1.5,
        1e999,
        True,
        "",
        "\x00",
        "\ud800",
        [],
        {},
        [[]],
        [None],
        [{"role": "user"}],
        [{"content": 3}],
        "a" * 100_000,
        {"role": "user"},
    ]
    swaps = [
        ("user", "User"),
        ("prompt", "messages"),
        ("messages", "prompt"),
        (":", ""),
        ("a", "\\u0000"),
        *(("\n", end) for end in ("\r\n", "\n\n", "\r", " ")),
    ]
    damages = [
        lambda text, at: text[:at],
        lambda text, at: text[:at] + text[at + rng.randint(1, 9) :],
        lambda text, at: text[:at] + rng.choice('{}[]",:\n\r\x00\ufeff\u2028é0-') + text[at:],
        lambda text, at: text[:at] + text[rng.randrange(len(text) + 1) :],
        lambda text, at: (
            json.dumps(
                dict(
                    zip(rng.sample(["prompt", "messages", "completion", "x"], 3), rng.sample(values, rng.randrange(4)))
                )
            )
            + "\n"
            + text
        ),
        lambda text, at: json.dumps(rng.choice(values)) + "\n" + text,
        lambda text, at: "[" * rng.choice([1, 30, 5000]) + text,
        lambda text, at: text.replace(*rng.choice(swaps)),
    ]
    for _ in range(2000):
        text = good
        for _ in range(rng.randint(1, 3)):
            text = rng.choice(damages)(text, rng.randrange(len(text) + 1))
        data = text.encode(rng.choice(["utf-8"] * 6 + ["utf-16", "utf-32", "utf-8-sig", "latin-1"]), errors="replace")
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data) + 1)] + rng.randbytes(rng.randint(0, 20))
        path.write_bytes(data)
        try:
            rloo.load_data(Args(dataset_name=str(path), num_eval_prompts=0), tokenizer)
            kept.append(data)
        except InputError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
            lines += 1
    assert len(kept) > 30 and lines > 500
    for data in rng.sample(kept, 6):  # what is accepted trains
        path.write_bytes(data)
        train(dataset_name=str(path), num_eval_prompts=4)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("no words", "--model_name_or_path or --sft_model_path {sft}: has no usable tokenizer; save one there"),
        ("no tokenizer", "--model_name_or_path or --sft_model_path {sft}: "),
        ("too many tokens", "GPTNeoXForCausalLM: has no embedding for token 17 of a prompt or reference, only 16: is "),
        (
            "no head",
            r"--reward_model_path \(with one label\) {reward}: "
            r"is not a trained model of this kind, it lacks .'score.weight'",
        ),
        ("labels", r"--reward_model_path \(with one label\) {reward}: cannot be loaded "),
    ],
)
def test_models_that_cannot_be_used_are_named(train, tiny, tmp_path, kind, message):
    folders = {part: shutil.copytree(tiny / part, tmp_path / part) for part in ("sft", "reward")}
    tokenizer = tokenizer_of([]) if kind == "no words" else tiny_tokenizer()
    tokenizer.add_tokens(["more", "words"] if kind == "too many tokens" else [])
    tokenizer.save_pretrained(folders["sft"])
    for file in folders["sft"].glob("*token*") if kind == "no tokenizer" else ():
        file.unlink()
    if kind == "no head":
        tiny_model().save_pretrained(folders["reward"])
    if kind == "labels":
        config = type(tiny_model().config).from_pretrained(tiny / "reward", num_labels=3)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folders["reward"])
    (tmp_path / "data.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "a more b words"}\n')
    data = {"dataset_name": str(tmp_path / "data.jsonl")} if kind == "too many tokens" else {}
    with pytest.raises(InputError, match=message.format(**folders)):
        train(sft_model_path=str(folders["sft"]), reward_model_path=str(folders["reward"]), **data)


def test_a_model_without_a_body_of_its_own_is_named():
    """As Llama 4's for text: its base_model is the model with its head."""

    class Headed(type(tiny_model())):
        base_model_prefix = "missing"

    with pytest.raises(InputError, match="^Headed: cannot be run .*RuntimeError"):
        rloo.choose_layout(Headed(tiny_model().config).eval(), Args(device="cpu"), [{"prompt_ids": [3, 4]}])


def test_positions_beyond_the_original_ones_are_refused():
    """With them, long-RoPE chooses other frequencies for all rows of a forward pass."""
    config = AutoConfig.for_model("phi3", **HEADS, vocab_size=16, pad_token_id=0, original_max_position_embeddings=16)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InputError, match="^Phi3ForCausalLM: has 16 positions"):
        rloo.choose_layout(model, Args(device="cpu", response_length=15), [{"prompt_ids": [3, 4]}])


def test_a_policy_that_reads_padding_is_refused():
    """... as RWKV does, which ignores the mask."""
    config = AutoConfig.for_model("rwkv", vocab_size=16, hidden_size=16, num_hidden_layers=2, context_length=99)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(InputError, match="^RwkvForCausalLM: cannot be (used, since padding changes|run .TypeError)"):
        rloo.choose_layout(model, Args(device="cpu"), [{"prompt_ids": [3, 4]}])


def test_a_policy_with_logits_of_its_own_kind_is_refused(monkeypatch):
    """... such as a scale of which final_logits does not know, here of 2%: its log-probs would be others."""
    spy(monkeypatch, "final_logits", lambda inputs, logits: 1.02 * logits)
    with pytest.raises(InputError, match="^GPTNeoXForCausalLM: final_logits does not reproduce its logits"):
        rloo.choose_layout(tiny_model(), Args(device="cpu"), [{"prompt_ids": [3, 4]}])


def test_a_reference_with_a_token_that_the_model_does_not_have_is_refused():
    rows = [{"prompt_ids": [3], "reference_ids": [4, 99]}]
    with pytest.raises(InputError, match="no embedding for token 99"):
        rloo.choose_layout(tiny_model(), Args(device="cpu"), rows)


def test_a_token_that_no_prompt_has_needs_no_embedding(train, tiny, tmp_path):
    """Gemma 3's text models have one fewer than their tokenizer has tokens: that of an image."""
    folders = {part: shutil.copytree(tiny / part, tmp_path / part) for part in ("sft", "reward")}
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<image>"])
    for folder in folders.values():
        tokenizer.save_pretrained(folder)
    found = [
        train(sft_model_path=str(x["sft"]), reward_model_path=str(x["reward"]))[0]
        for x in (folders, {part: tiny / part for part in folders})
    ]
    for ours, theirs in zip(*found, strict=True):
        for name in ("objective/scores", "objective/kl", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)


def test_prompt_and_completion_may_fill_the_positions_and_no_more():
    args, model = Args(response_length=28), tiny_model()  # with 128 of them
    rloo.check_sizes(model, args, [{"prompt_ids": [3] * 100}])
    with pytest.raises(InputError, match="has 128 positions; the longest prompt, 101 tokens"):
        rloo.check_sizes(model, args, [{"prompt_ids": [3] * 101}])


def test_held_out_prompts_must_fit_into_the_positions_of_the_policy_too(train, tmp_path):
    for split, n in (("train", 2), ("test", 123)):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"prompt": "a " * n}) + "\n")
    with pytest.raises(InputError, match="^GPTNeoXForCausalLM: has 128 positions; the longest prompt, 123 tokens"):
        train(dataset_name=str(tmp_path), num_eval_prompts=1)


@pytest.mark.parametrize("engine", ["group", "hf"])
def test_a_tokenizer_needs_no_pad_token(train, tiny, tmp_path, engine):
    """Without one the numbers are the same, and it is saved as it was."""
    folder = shutil.copytree(tiny / "sft", tmp_path / "sft")
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    runs = [train(sft_model_path=str(path), rollout_engine=engine, num_ppo_epochs=2) for path in (tiny / "sft", folder)]
    assert without_times(runs[0][0]) == without_times(runs[1][0])
    assert AutoTokenizer.from_pretrained(runs[1][1]).pad_token is None


def test_learning_rate_schedules(train):
    def rates(**flags):
        return [update["lr"] for update in train(total_episodes=64, learning_rate=1.0, **flags)[0]]

    assert rates(lr_scheduler_type="linear") == pytest.approx([1, 0.75, 0.5, 0.25])
    assert rates(lr_scheduler_type="constant", warmup_ratio=0.5) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert rates(lr_scheduler_type="constant", warmup_ratio=0.3) == pytest.approx(
        [1 / 3, 2 / 3, 1, 1]
    )  # 1.2 updates are 2
    cosine = [(1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)]
    assert rates(lr_scheduler_type="cosine") == pytest.approx(cosine)


@pytest.mark.parametrize(
    "name, value",
    [
        ("weight_decay", 0.5),
        ("adam_eps", 1.0),
        ("max_grad_norm", 1e-9),
        ("learning_rate", 1e-3),
        ("num_ppo_epochs", 2),
        ("num_mini_batches", 2),
        ("normalize_advantage", True),
        ("rloo_k", 4),
        ("normalize_reward", True),
        ("seed", 7),
        ("reward_clip_range", 0.1),
        ("missing_eos_penalty", 2.0),
        ("temperature", 0.5),
        ("mask_truncated_completions", True),
        ("attn_implementation", "eager"),
        ("advantage_estimator", "drgrpo"),
        ("advantage_estimator", "grpo"),
        ("advantage_estimator", "reinforce"),
        ("kl_in_reward", False),
        ("loss_aggregation", "token"),
        ("loss_aggregation", "sequence-mean"),
        ("lora_rank", 2),
        ("lora_alpha", 8),
    ],
)
def test_every_flag_changes_the_run(train, name, value):
    """... from what it is without the flag, but for the attention kernel, which changes nothing but rounding."""
    base = {
        "adam_eps": 1e-3,
        "max_grad_norm": 0.0,
        "total_episodes": 32,
        "seed": 2,
    }  # Adam sees the size of the gradient
    plain, changed = dict(base), {**base, name: value}
    if name == "num_mini_batches":  # the same update by another number of steps
        plain |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
        changed |= {"per_device_train_batch_size": 8}
    elif name == "attn_implementation":  # which runs in plain rows
        plain |= {"layout": "plain"}
    elif name == "lora_alpha":
        plain, changed = {**plain, "lora_rank": 2}, {**changed, "lora_rank": 2}
    change = (final_weights(train(**plain)[1]) - final_weights(train(**changed)[1])).abs().max()
    assert change < 1e-3 if name == "attn_implementation" else change > 1e-4


@pytest.mark.parametrize(
    "flags, sides",
    [
        ({"cliprange": 1e-4, "cliprange_high": 1e6}, {-1}),
        ({"cliprange": 0.9999, "cliprange_high": 1e-4}, {1}),
        ({"cliprange": 1e-4}, {-1, 1}),
    ],
)
def test_each_side_of_the_clip_range_clips_the_ratios_on_its_side(train, monkeypatch, flags, sides):
    """ε_high decides only where the advantage is positive and the ratio above 1, ε_low only where both are below; in
    the second epoch the ratios have moved."""
    seen = spy(monkeypatch, "policy_loss")
    (metrics,), _ = train(num_ppo_epochs=2, learning_rate=1e-3, **flags)
    (_, _, advantages, *_), (_, log_ratio, clipped) = seen[-1]
    advantages = advantages.flatten()
    assert set(advantages[clipped].sign().tolist()) == set(log_ratio[clipped].sign().tolist()) == sides
    assert metrics["policy/clipfrac_avg"] == pytest.approx(clipped.double().mean().item() / 2)  # none before


def test_kl_coef_keeps_the_policy_at_the_reference(train):
    runs = (train(kl_coef=beta, total_episodes=480, learning_rate=3e-3)[0] for beta in (1e-9, 1.0))
    free, held = (sum(update["objective/kl"] for update in metrics[-5:]) / 5 for metrics in runs)
    assert held < 0.5 * free


@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_the_temperature_is_the_same_for_policy_and_reference(train, num_mini_batches):
    """While policy and reference are the same model, the KL is 0 at any temperature, and the ratio is 1."""
    (first,), _ = train(
        temperature=0.6,
        learning_rate=0.0,
        num_mini_batches=num_mini_batches,
        per_device_train_batch_size=16 // num_mini_batches,
    )
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4) and first["val/ratio"] == pytest.approx(1, abs=1e-5)


def test_a_mini_batch_s_gradient_is_the_mean_over_its_own_completions(train):
    """Two mini-batches that each are the update of a run of their own size have gradients of the same size."""
    flags = {
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "reward_model_path": None,
        "reward_fns": (f"{__file__}:count_tokens",),
    }
    halves, whole = (train(num_mini_batches=n, per_device_train_batch_size=16 // n, **flags)[0][0] for n in (2, 1))
    assert halves["loss/policy_avg"] == pytest.approx(whole["loss/policy_avg"], abs=1e-5)
    assert 0.7 * whole["grad_norm"] < halves["grad_norm"] < 3 * whole["grad_norm"]  # half the scale would fall below


def never(prompts, completions, completion_ids, **columns):
    return [None] * len(prompts)


def test_completions_without_a_score_do_not_train_with_the_kl_in_the_loss_either(train, monkeypatch):
    seen = spy(monkeypatch, "policy_loss", after=lambda inputs, output: inputs[0].retain_grad() or output)
    train(
        reward_model_path=None,
        reward_fns=(f"{__file__}:sometimes_none",),
        kl_in_reward=False,
        kl_coef=1.0,
        num_ppo_epochs=2,
    )
    untrained = seen[-1][0][0].grad.abs().sum((0, 2)) == 0  # prompts, once the policy has left the reference
    assert untrained.any() and not untrained.all()


def type_token_ratio(prompts, completions, completion_ids, **columns):
    """A ZeroDivisionError on an empty text."""
    return [len(set(ids[:-1])) / len(ids[:-1]) for ids in completion_ids]


def test_prompts_without_references_are_not_compared_with_anything(train, tmp_path):
    rows = [{"prompt": "a b"}, {"prompt": "c", "completion": " d e"}] * 8
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, output = train(
        dataset_name=str(tmp_path),
        reward_model_path=None,
        num_eval_prompts=4,
        reward_fns=(f"{__file__}:type_token_ratio",),
        total_episodes=0,
        response_length=20,
        seed=2,
        stop_token_id=2,
    )
    samples = read_metrics(output, "completions")
    assert [sample["win_rate"] is None for sample in samples] == [not sample["reference"] for sample in samples]
    assert {tuple(sample) for sample in samples} == {tuple(samples[0])} and len(samples) == 8


def test_every_completion_and_every_reference_is_graded_once(train, tmp_path, monkeypatch):
    """A judge may be paid by the text: of four rows two have a reference, so six texts are graded per mode."""
    rows = [
        {"prompt": "a b"},
        {"prompt": "c", "completion": "d e"},
        {"prompt": "f", "completion": "g"},
        {"prompt": "h"},
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    graded = spy(monkeypatch, "function_reward")
    _, output = train(
        dataset_name=str(tmp_path),
        reward_model_path=None,
        num_eval_prompts=4,
        reward_fns=(f"{__file__}:count_tokens",),
        reward_weights=(-2.0,),
        judge_fn=f"{__file__}:count_tokens",
        total_episodes=0,
    )
    samples = read_metrics(output, "completions")
    assert len(graded) == 4  # reward and judge, sampled and greedy
    for (_, _, tokenizer, batch), scores in graded:
        assert scores.shape == (1, 6) and rloo.completion_texts(batch, tokenizer)[4:] == [" d e", " g"]
        assert scores[0, 4:].tolist() == [3, 2]  # with the stop token
    for sample, reference in zip(samples, [None, 3, 2, None] * 2, strict=True):
        assert (sample["score"], sample["judge_score"]) == (-2 * sample["length"], sample["length"])
        if reference is None:
            assert sample["win_rate"] is sample["judge_win_rate"] is None
        else:
            assert sample["judge_win_rate"] == rloo.win(sample["length"], reference) == 1 - sample["win_rate"]


def test_a_tie_is_a_tie_up_to_rounding():
    assert [rloo.win(0.1 + 0.2, x) for x in (0.3, 0.3001, 0.2999, math.nan)] == [0.5, 0, 1, None]
    assert rloo.win(1e-9, 0.0) == 0.5 and rloo.win(1e6, 1e6 + 0.1) == 0.5


def test_updates_without_an_advantage_are_survived_and_said_once(train, capfd):
    functions = (f"{__file__}:constant_reward", f"{__file__}:never")
    metrics, output = train(
        reward_model_path=None, reward_fns=functions, kl_coef=0.0, total_episodes=48, num_eval_prompts=2
    )
    said = "".join(capfd.readouterr())
    row = read_metrics(output, "completions")[-1]
    assert said.count("the scores of an update gave hardly any learning signal: in over 90% of the groups all") == 1
    assert [update["grad_norm"] for update in metrics] == [0, 0, 0]
    assert metrics[0]["rewards/never/applied"] == 0 and "rewards/never/mean" not in metrics[0]
    assert (row["score"], row["win_rate"]) == (1, 0.5)  # a tie
    for text in (said, *(path.read_text() for path in output.glob("*.jsonl"))):
        assert not re.search(r"\bnan\b|infinity", text, re.IGNORECASE)


def one_of_even_rows(prompts, completions, completion_ids, n, **columns):
    """Of an even row only the first completion has a score."""
    return [
        None if row % 2 == 0 and i >= len(n) // 2 else len(ids) + i / 100
        for i, (row, ids) in enumerate(zip(n, completion_ids))
    ]


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_lone_scorable_completions_are_not_trained_on(train, monkeypatch, level):
    """... with normalised advantages either, whose mean is not theirs."""
    seen = spy(monkeypatch, "policy_loss")
    function = f"{__file__}:one_of_even_rows"
    train(reward_model_path=None, reward_fns=(function,), kl_level=level, normalize_advantage=True)
    (_, _, advantages, *_), _ = seen[-1]
    unscored = (advantages.view(2, 8, -1) == 0).all(-1).all(0)
    assert 0 < unscored.sum() < 8


@pytest.mark.parametrize(
    "what, name, call, spoil",
    [
        (
            "a log-prob of the policy or of the reference",
            "rollout",
            2,
            lambda out, new: (out[0], out[1] * math.nan),
        ),
        (
            "a log-prob of the policy or of the reference",
            "completion_logprobs",
            4,
            lambda out, new: (out[0] * math.nan, out[1]),
        ),
        ("the loss or its gradient", "completion_logprobs", 5, lambda out, new: (out[0] - math.inf, out[1])),
        ("the loss or its gradient", "policy_loss", 2, lambda out, new: (out[0] * math.inf, *out[1:])),
        ("the loss or its gradient", "policy_loss", 2, lambda out, new: (out[0] + (new.sum() * 0).sqrt(), *out[1:])),
    ],
)
def test_numbers_that_are_not_finite_stop_the_run_before_they_are_saved(
    train, tmp_path, monkeypatch, what, name, call, spoil
):
    """In the second update; the checkpoint of the first stays the newest."""
    calls, output = itertools.count(1), tmp_path / "out"
    spy(monkeypatch, name, lambda inputs, out: spoil(out, inputs[0]) if next(calls) == call else out)
    with pytest.raises(InputError, match=f"^{what} is not finite: lower --learning_rate") as error:
        train(output_dir=str(output), total_episodes=48, save_steps=1)
    assert "\n" not in str(error.value) and len(read_metrics(output)) == 1
    assert final_weights(output / "checkpoint-1").isfinite().all() and not (output / "checkpoint-2").exists()


def test_a_policy_of_nan_is_named(train, tiny, tmp_path):
    shutil.copytree(tiny / "sft", tmp_path / "sft")
    policy = AutoModelForCausalLM.from_pretrained(tiny / "sft")
    next(policy.parameters()).data.fill_(math.nan)
    policy.save_pretrained(tmp_path / "sft")
    with pytest.raises(InputError, match="GPTNeoXForCausalLM: its logits are not finite; is the file damaged"):
        train(sft_model_path=str(tmp_path / "sft"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_out_of_memory_names_the_batch_flags(monkeypatch, error):
    def fail(*args):
        raise error

    monkeypatch.setattr(rloo, "main", fail)
    with pytest.raises(SystemExit) as end:
        rloo.command_line([])
    for flag in ("per_device_train_batch_size", "gradient_accumulation_steps", "local_rollout_forward_batch_size"):
        assert f"--{flag}" in end.value.code
    assert end.value.code.startswith("rloo.py: out of memory") and "\n" not in end.value.code


def test_runs_are_logged_and_a_service_that_cannot_start_is_one_line(train, monkeypatch):
    logged, started = [], []
    service = types.SimpleNamespace(
        init=lambda **flags: started.append(flags),
        log=lambda metrics, step: logged.append((step, metrics)),
    )
    monkeypatch.setitem(sys.modules, "wandb", service)
    names = {"wandb_project_name": "project", "wandb_entity": "team"}
    metrics, output = train(track=True, total_episodes=48, num_eval_prompts=4, **names)
    assert started[0].items() >= {"project": "project", "entity": "team", "name": output.name}.items()
    assert [step for step, _ in logged] == [0, 1, 2, 3, 3] and [values for _, values in logged[1:4]] == metrics
    for (_, values), evaluation in zip(logged[::4], read_metrics(output, "evaluations"), strict=True):
        assert evaluation.items() >= {name.removeprefix("eval/"): x for name, x in values.items()}.items() and values
    train(track=True, total_episodes=64, output_dir=str(output), resume=True)
    train(track=True)
    one, resumed, other = (flags["id"] for flags in started)
    assert one == resumed != other and {flags["resume"] for flags in started} == {"allow"}
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="^--track: Weights & Biases cannot start"):
        train(track=True)


# ----------------------------------------------------------------------------------------------------------------------
# Evaluations


@pytest.mark.parametrize("updates, between", [(50, 4), (50, 1), (120, 100), (23, 3), (9, 4), (1, 4), (12, 0), (0, 4)])
def test_evaluations_are_first_last_and_far_apart_between(train, monkeypatch, updates, between):
    done, found = [], []
    metrics = {"grad_norm": 1.0, "objective/kl": 0.0, "objective/scores": 0.0, "completions/clipped_ratio": 0.0}
    metrics |= {"completions/mean_length": 1.0, "time/train": 0.0, "cpu_time": 0.0}
    monkeypatch.setattr(rloo, "update", lambda *args: done.append(0) or dict(metrics))
    monkeypatch.setattr(rloo, "evaluate", lambda *args: found.append((len(done), args[7])) or [])
    train(total_episodes=16 * updates, num_sample_generations=between, num_eval_prompts=1)
    greedy, found = ([update for update, mode in found if mode == x] for x in ("greedy", "sampled"))
    assert {*greedy} == {found[0], found[-1]} == {0, updates} and len(found) <= between + 2
    gaps = [late - early for early, late in zip(found, found[1:])]
    assert len(found) <= 2 or min(gaps) >= 5
    assert (updates, between) != (50, 4) or found == [0, 10, 20, 30, 40, 50]


def test_the_copy_that_samples_has_the_policys_buffers():
    policy = tiny_model("llama")
    policy.model.rotary_emb.inv_freq.mul_(2)  # like the router's bias of some mixtures of experts
    copy = rloo.sampling_model(policy, torch.bfloat16)
    assert torch.equal(copy.model.rotary_emb.inv_freq, policy.model.rotary_emb.inv_freq)
    assert all(torch.equal(mine, theirs.bfloat16()) for mine, theirs in zip(copy.parameters(), policy.parameters()))
    assert rloo.sampling_model(policy, torch.float32) is policy


def test_weights_are_cast_before_they_are_gathered(monkeypatch):
    """Half the memory and half of what processes send each other."""
    gathered = spy(monkeypatch, "whole")
    policy = tiny_model("llama")
    rloo.sampling_model(policy, torch.bfloat16)
    weights = [args[0].dtype for args, _ in gathered[: len([*policy.parameters()])]]
    assert weights == [torch.bfloat16] * len([*policy.parameters()])


@pytest.mark.parametrize("flags, stop", [({}, 0), ({"stop_token_id": 2}, 2)])
def test_references_end_in_the_stop_token(train, tiny, monkeypatch, flags, stop):
    made = spy(monkeypatch, "make_batch")
    train(num_eval_prompts=4, total_episodes=0, **flags)
    references = [json.loads(line)["completion"] for line in (tiny / "data" / "test.jsonl").read_text().splitlines()][
        :4
    ]
    expected = [tiny_tokenizer()(text)["input_ids"] + [stop] for text in references]
    assert expected in [batch.completion_ids()[4:] for _, batch in made]  # after the policy's


def test_what_evaluations_leave_in_files_and_on_the_screen(train, tiny, capsys):
    metrics, output = train(
        num_eval_prompts=5,
        num_sample_generations=1,
        total_episodes=160,
        learning_rate=0.0,
        judge_fn=f"{__file__}:count_tokens",
    )
    rows = [json.loads(line) for line in (output / "completions.jsonl").read_text().splitlines()]
    assert [(row["update"], row["mode"]) for row in rows[::5]] == [
        (0, "sampled"),
        (0, "greedy"),
        (5, "sampled"),
        (10, "sampled"),
        (10, "greedy"),
    ] and len(rows) == 25
    assert {*rows[0]} == {
        "update",
        "mode",
        "prompt",
        "completion",
        "reference",
        "score",
        "win_rate",
        "judge_score",
        "judge_win_rate",
        "length",
        "columns",
    }
    for row in rows:  # the judge counts tokens, of which each reference has 3 and the stop token
        assert row["judge_score"] == row["length"] and row["judge_win_rate"] == (
            1 if row["length"] > 4 else 0.5 if row["length"] == 4 else 0
        )
    sampled, greedy, *others = [[row["completion"] for row in rows[i : i + 5]] for i in range(0, 25, 5)]
    assert sampled != greedy and others == [sampled, sampled, greedy]  # every evaluation draws the same random numbers
    assert [row["reference"] for row in rows[:5]] == [
        json.loads(line)["completion"] for line in (tiny / "data" / "test.jsonl").read_text().splitlines()
    ][:5]
    first, middle, last = read_metrics(output, "evaluations")
    assert [(x["update"], x["episode"]) for x in (first, middle, last)] == [(0, 0), (5, 80), (10, 160)]
    names = {"score", "win_rate", "judge_score", "judge_win_rate", "length"}
    names |= {f"{name}_stderr" for name in names}
    assert {*middle} == {"update", "episode", *(f"sampled/{name}" for name in names)}
    assert {*first} == {*last} == {*middle, *(f"greedy/{name}" for name in names)}
    for i, evaluation in ((0, first), (10, middle), (15, last)):
        lengths = [row["length"] for row in rows[i : i + 5]]
        assert evaluation["sampled/length"] == mean(lengths)
        assert evaluation["sampled/length_stderr"] == pytest.approx(stdev(lengths) / 5**0.5)
    assert len(metrics) == 10 and not any("eval" in name for update in metrics for name in update)
    screen = capsys.readouterr().out
    assert screen.count("Held-out completions after") == 3 and "5 held-out prompts, mean" in screen
    assert f"\n{'before':>55}{'after':>19}\n" in screen  # over the columns of the closing table


def test_means_of_samples_have_their_standard_errors_and_leave_out_what_has_no_grade():
    scores = {"sampled": [1.0, 3.0, None, 8.0], "greedy": [2.0]}
    samples = [{"mode": mode, "prompt": "a", "score": x} for mode, values in scores.items() for x in values]
    means = {"sampled/score": 4, "sampled/score_stderr": stdev([1, 3, 8]) / 3**0.5}
    assert rloo.means_of(samples) == pytest.approx(means | {"greedy/score": 2, "greedy/score_stderr": 0})


def test_the_closing_table_has_before_on_the_left(capsys):
    before, after = ({"sampled/score": x, "sampled/score_stderr": x / 10} for x in (1.0, 2.0))
    rloo.print_evaluations(before, after, prompts=5)
    title, row = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert title == ["before", "after"] and row == ["sampled/score", "1.000", "±", "0.100", "2.000", "±", "0.200"]


def test_the_bar_shows_the_win_rate_by_the_judge_or_else_the_score():
    judged = {"sampled/judge_win_rate": 0.7, "sampled/score": 0.2, "sampled/win_rate": 0.3}
    scored = {"sampled/score": 0.2, "sampled/win_rate": 0.3}
    for evaluation, shown in ((judged, ["eval_win=0.7"]), (scored, ["eval_score=0.2"]), ({}, [])):
        bar = rloo.tqdm(total=2, file=io.StringIO())
        rloo.show_progress(bar, {"objective/scores": 1.5, "objective/kl": 0.5}, evaluation)
        assert bar.n == 1 and bar.postfix.split(", ") == ["score=1.5", "kl=0.5", *shown]


def test_samples_are_shown_with_the_end_of_their_prompts(train, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"prompt": "b\\nc"}\n' * 30 + json.dumps({"prompt": "a " * 60 + "h i"}) + "\n")
    _, out = train(dataset_name=str(tmp_path / "x.jsonl"), num_eval_prompts=3, total_episodes=0)
    samples = [json.loads(line) for line in (out / "completions.jsonl").read_text().splitlines()]
    shown = capsys.readouterr().out.split("sampled:\n")[1].split("prompt    ")[1:]
    for sample, text, prompt in zip(samples[:3], shown, ["b c", "b c", ("a " * 60 + "h i")[-100:]], strict=True):
        assert text.startswith(f"      {prompt}\n")
        assert f"completion      {sample['completion']}\n" in text and f"score           {sample['score']:.2f}" in text


def test_without_episodes_left_a_run_evaluates_and_ends(train, monkeypatch, capsys):
    results = spy(monkeypatch, "main")
    metrics, output = train(total_episodes=0, num_eval_prompts=4)
    (_, nothing_trained), screen = results[-1], capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {"args.json", *rloo.RUN_FILES} and metrics == []
    assert screen.count("\ncompletion ") == 3
    (evaluated,) = read_metrics(output, "evaluations")
    assert evaluated == {"update": 0, "episode": 0} | nothing_trained["before"] and nothing_trained["before"]
    assert "\n0 episodes in" in screen and "4 held-out prompts, mean" in screen
    assert f"\n{'before':>55}\n" in screen

    flags = {"num_eval_prompts": 4, "output_dir": str(output), "resume": True}
    with pytest.raises(InputError, match="is not empty"):  # its result is not overwritten
        train(**flags | {"resume": False})
    assert read_metrics(output, "evaluations") == [evaluated]
    train(total_episodes=48, **flags)  # there is no checkpoint, so it begins
    (_, trained), left, screen = results[-1], (output / "completions.jsonl").read_text(), capsys.readouterr().out
    assert "\n48 episodes in" in screen and "\nupdates 0 to 3 of " in screen
    assert "\nthese are few updates: " in screen
    assert len(read_metrics(output)) == 3 and read_metrics(output, "evaluations")[0] == evaluated
    assert trained["before"] == nothing_trained["before"] != trained["after"]
    train(total_episodes=16, **flags)  # fewer than were made: the end is evaluated again
    assert "\n0 episodes in" in capsys.readouterr().out and results[-1][1] == trained
    assert (output / "completions.jsonl").read_text() == left and len(read_metrics(output)) == 3
    train(total_episodes=64, **flags)
    assert "\n16 episodes in" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs


def shell(args: list, cwd: Path, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **env},
    )


def count_a(prompts, completions, completion_ids, **columns):
    return [text.split().count("a") for text in completions]


def test_a_custom_reward_function_is_learned(train):
    """The reward is the number of `a`s in the completion; nearly all tokens become `a`."""
    metrics, _ = train(
        reward_model_path=None, reward_fns=(f"{__file__}:count_a",), kl_coef=0.0, rloo_k=4, total_episodes=16 * 60
    )
    assert metrics[0]["objective/scores"] < 1.5 and metrics[-1]["objective/scores"] > 5


def test_the_file_alone_runs_in_an_empty_folder_and_what_it_leaves_loads(tiny, tmp_path):
    shutil.copy(HERE / "rloo.py", tmp_path)
    # Importing has no side effect.
    missing = shell(["-Bc", "import os, rloo; print(os.listdir(), flush=True); rloo.command_line([])"], tmp_path)
    assert missing.returncode == 1 and missing.stdout == "['rloo.py']\n" and len(missing.stderr.splitlines()) == 1
    assert missing.stderr.startswith("rloo.py: --dataset_name is needed")
    result = shell(
        ["rloo.py", *command(tiny, "out", kl_coef=0.03, num_eval_prompts=8), "--track"], tmp_path, WANDB_MODE="offline"
    )
    assert result.returncode == 0, result.stderr
    assert f" s. Results: {tmp_path}/out\n" in result.stdout and "before" in result.stdout
    out = tmp_path / "out"
    assert {
        "args.json",
        *rloo.RUN_FILES,
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    } <= {path.name for path in out.iterdir()}
    assert not list(out.glob("*.pt")) and not (out / "state.json").exists()
    assert list(out.glob("wandb/offline-run-*/*.wandb"))
    assert json.loads((out / "args.json").read_text())["kl_coef"] == 0.03
    model, tokenizer = (auto.from_pretrained(out) for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert model(**tokenizer("a b c", return_tensors="pt")).logits.shape == (1, 3, 16)


def test_main_command_runs_on_the_bundled_task(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rloo.command_line(["--total_episodes", "64", "--gradient_accumulation_steps", "1", "--num_eval_prompts", "8"])
    screen = capfd.readouterr().out
    assert "judge_win_rate" in screen and "\nprompt          " in screen
    (output,) = (tmp_path / "runs").iterdir()
    assert AutoModelForCausalLM.from_pretrained(output).config.model_type == "gpt_neox"


def test_the_bundled_task_can_be_rebuilt(tmp_path):
    """`mini_tldr.py --quick` makes a small one of the same kind, and the judge grades it."""
    result = shell([HERE / "benchmark" / "mini_tldr" / "mini_tldr.py", "--quick", "--output_dir", "mini"], tmp_path)
    assert result.returncode == 0 and "reward model agreement" in result.stdout, result.stderr
    splits = {split: rloo.load_rows(str(tmp_path / "mini"), split) for split in ("train", "validation", "test")}
    row = {"columns": splits["test"][0]}
    spec = f"{HERE}/benchmark/mini_tldr/mini_tldr.py:gold_judge"
    judge = rloo.load_functions([spec], "judge_fn", None, row)["gold_judge"].args[1]
    facts, own = ([row[name] for row in splits["test"]] for name in ("facts", "completion"))
    grades = [sum(judge(None, summaries, None, facts=facts)) for summaries in (own, own[1:] + own[:1])]
    assert grades[0] > grades[1] + len(own)  # a summary of another post loses
    who = " my " + facts[0]["who"]
    assert judge(None, ["", who, who * 2], None, facts=facts[:1] * 3) == [0.0, 1.0, 1.0]
    posts = [{tuple(row["facts"].values()) for row in rows} for rows in splits.values()]
    assert not any(one & other for one, other in itertools.combinations(posts, 2))
    for part, auto_class in (("sft", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
        model, tokenizer = (auto.from_pretrained(tmp_path / "mini" / part) for auto in (auto_class, AutoTokenizer))
        assert model.config.vocab_size == len(tokenizer) and tokenizer.pad_token == "[PAD]" != tokenizer.eos_token
        config = json.loads((tmp_path / "mini" / part / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 knows no other name


OBJECTIVES = HERE / "benchmark" / "objectives" / "README.md"  # whose blocks are files mine.py beside rloo.py
METRICS = HERE / "benchmark" / "metrics" / "README.md"
GPU = HERE / "benchmark" / "gpu" / "README.md"
RUNS_IT = "rloo.command_line()\n"  # the last line of such a block


def blocks_of(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def readme_blocks(language: str) -> list[str]:
    return blocks_of((HERE / "README.md").read_text(), language)


def commands_of(blocks: list[str], folder: Path) -> list[list[str]]:
    """The words of each python or torchrun command, as bash expands them. The blocks are run one after another in one
    shell, where these two only write down their words, and nothing is installed."""
    stubs = 'python() { printf \'%s\\t\' "$@"; echo; }\ntorchrun() { python "$@"; }\npip() { :; }\npython3() { :; }\n'
    done = subprocess.run(["bash", "-c", stubs + "\n".join(blocks)], cwd=folder, capture_output=True, text=True)
    return [line.split("\t")[:-1] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("page", [HERE / "README.md", OBJECTIVES, METRICS, GPU], ids=lambda page: page.parent.name)
def test_every_command_of_the_readme_parses(page, tmp_path):
    """... and every script that it names is there. Whether they do what they say: the other tests."""
    blocks = blocks_of(page.read_text(), "sh")
    if page == GPU:
        blocks = [*[block for block in readme_blocks("sh") if "common=(" in block], *blocks]  # as the page says
    commands = commands_of(blocks, tmp_path)
    lines = [line.lstrip() for block in blocks for line in block.splitlines()]
    assert len(commands) == sum(line.startswith(("python ", "torchrun ")) for line in lines) > 0
    ours = 0
    for words in commands:
        (script,) = [word for word in words if word == "-" or word.endswith(".py")][:1] or ["pytest"]
        if script in ("rloo.py", "mine.py") and "--help" not in words:
            assert isinstance(rloo.parse_args(words[words.index(script) + 1 :]), Args)
            ours += 1
        assert script in ("-", "pytest", "rloo.py", "mine.py") or (HERE / script).is_file(), script
    assert ours >= {"objectives": 11, "metrics": 1, "gpu": 3}.get(page.parent.name, 5)


PAGES = [HERE / "README.md", *sorted((HERE / "benchmark").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HERE)))
def test_what_a_page_names_is_there(page):
    """Links with their anchors, pictures, and every file under benchmark/ that a command names."""
    text = page.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists() and (not anchor or anchor in anchors(target)), link
    for path in re.findall(r"benchmark/[\w/.-]+\.(?:py|sh|json|md|png|txt)\b", text):
        assert (HERE / path).is_file(), path


def test_each_question_has_a_folder_with_a_page_and_the_index_has_them_all():
    """... every picture is on a page, and benchmark/ itself holds nothing else."""
    top = HERE / "benchmark"
    folders = {path.name for path in top.iterdir() if path.is_dir() and not path.name.startswith(("_", "."))}
    files = {path.name for path in top.iterdir() if path.is_file()}
    assert files <= {"README.md", "requirements.txt", ".gitignore"}
    assert set(re.findall(r"\]\((\w+)/README\.md\)", (top / "README.md").read_text())) == folders
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+\.png)\)", page.read_text())
    }
    assert {path.resolve() for path in top.rglob("*.png")} == shown


def edited(folder: Path, *blocks: str):
    """rloo.py as a module of its own, after edits in the form of diffs: lines that begin with - become those with +."""
    source = (HERE / "rloo.py").read_text()
    for block in blocks:
        lines = block.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in sign) for sign in ("- ", "+ "))
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (folder / "edited.py").write_text(source)
    spec = importlib.util.spec_from_file_location("edited", folder / "edited.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["edited"] = module  # where dataclasses look
    attention = AttentionInterface()["sdpa"]
    spec.loader.exec_module(module)
    AttentionInterface.register("sdpa", attention)  # rloo's again, for the tests after this one
    return module


REPLACED = ("advantage", "policy_loss", "kl_penalty", "improve", "update", "generate")


@pytest.fixture
def mine(monkeypatch):
    """mine(name): the names of the file mine.py that has the function, which runs as far as its last line."""
    for name in REPLACED:
        monkeypatch.setattr(rloo, name, getattr(rloo, name))  # put back afterwards
    pages = "\n".join(page.read_text() for page in (HERE / "README.md", OBJECTIVES))
    files = [text for text in blocks_of(pages, "python") if text.endswith(RUNS_IT)]

    def run(function: str) -> types.SimpleNamespace:
        (text,) = [text for text in files if f"def {function}(" in text]
        names = {}
        exec(text.removesuffix(RUNS_IT), names)
        assert names[function] in [getattr(rloo, name) for name in REPLACED]
        return types.SimpleNamespace(**names)

    return run


def sections_with_files() -> dict[str, str]:
    """anchor -> text, of the sections of the page of objectives that have a file mine.py, and of README's."""
    pages = ((HERE / "README.md").read_text() + OBJECTIVES.read_text()).replace("### ", "## ")
    parts = re.split(r"(?m)^## ", pages)[1:]
    anchor = {part: re.sub(r"[^\w\- ]", "", part.splitlines()[0].lower()).replace(" ", "-") for part in parts}
    return {anchor[part]: part for part in parts if RUNS_IT in part}


@pytest.mark.parametrize("part", sections_with_files().values(), ids=sections_with_files())
def test_each_file_of_the_page_of_objectives_runs_with_its_command(part, tmp_path, monkeypatch):
    """What a reader does, but only one update."""
    (text,) = [text for text in blocks_of(part, "python") if text.endswith(RUNS_IT)]
    *_, words = [["mine.py"], *commands_of(blocks_of(part, "sh"), tmp_path)]  # README's needs no flags
    assert words[0] == "mine.py"
    before = {name: getattr(rloo, name) for name in REPLACED}
    for name, function in before.items():
        monkeypatch.setattr(rloo, name, function)  # put back afterwards
    monkeypatch.setattr(rloo, "say_once", lambda text: None)
    monkeypatch.chdir(HERE)
    (tmp_path / "mine.py").write_text(text)
    fewer = ["--total_episodes", "1", "--num_eval_prompts", "0", "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*words, *fewer])
    runpy.run_path(str(tmp_path / "mine.py"), run_name="__main__")
    assert len([name for name in REPLACED if getattr(rloo, name) is not before[name]]) == 1
    (metrics,) = read_metrics(tmp_path / "out")
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["grad_norm"] > 0


def test_readme_mine_py_runs_beside_a_copy_of_the_file(tiny, tmp_path):
    """... and is used: with advantages of 0 nothing is learned."""
    shutil.copy(HERE / "rloo.py", tmp_path)
    (text,) = [text for text in readme_blocks("python") if text.endswith(RUNS_IT)]
    assert text.count("rloo.advantage = median") == 1
    (tmp_path / "mine.py").write_text(text.replace("    return rewards -", "    return 0 *"))
    done = shell(["mine.py", *command(tiny, "out", rloo_k=4)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert read_metrics(tmp_path / "out")[0]["grad_norm"] == 0


def rewards_of_all_kinds(k: int, B: int) -> torch.Tensor:
    """0 or 1 (k, B): all wrong, all right, and between."""
    shares = torch.linspace(0, 1, B)
    return (torch.rand(k, B, generator=torch.Generator().manual_seed(1)) < shares).float()


def test_readme_leave_one_out_median_equals_the_loops(mine):
    objective = mine("median")
    rewards = torch.randn(5, 4, 3)
    found = objective.median(rewards, "rloo")
    for j, b, t in itertools.product(range(5), range(4), range(3)):
        siblings = [rewards[i, b, t].item() for i in range(5) if i != j]
        assert found[j, b, t].item() == pytest.approx(rewards[j, b, t].item() - median(siblings), abs=1e-6)
    rewards[0, 0], rewards[1:, 1] = math.nan, math.nan
    found = objective.median(rewards, "rloo")
    assert found[0, 0].isnan().all() and found[1:, 0].isfinite().all() and found[:, 1].isnan().all()


def test_readme_maxrl_equals_the_loops(mine):
    """Tajwar et al. 2026, arXiv:2602.02710: (r - mean) / mean, and 0 where no completion is right."""
    objective = mine("maxrl")
    rewards = rewards_of_all_kinds(6, 7)
    rewards[0, 3] = math.nan
    found = objective.maxrl(rewards, "rloo")
    for b in range(7):
        scored = [x for x in rewards[:, b].tolist() if not math.isnan(x)]
        for j in range(6):
            if not rewards[j, b].isnan():
                expected = (rewards[j, b].item() - mean(scored)) / mean(scored) if any(scored) else 0.0
                assert found[j, b].item() == pytest.approx(expected, abs=1e-6)
    assert found[0, 3].isnan() and not found[:, 0].any() and found.nan_to_num().max() > 1


@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_readme_pass_at_k_equals_all_groups_of_k(mine, K):
    """Chen et al. 2025, arXiv:2508.10751, section 2.4, without its binomials: over all choices of K completions, of
    which each is right if one of them is. The mean over those with completion j, less the mean over all, divided by
    the standard deviation over all."""
    k, objective = 8, mine("pass_at_k")
    rewards = rewards_of_all_kinds(k, 9)
    objective.pass_at_k.__globals__["K"] = K
    found = objective.pass_at_k(rewards, "rloo")
    for b in range(9):
        groups = [*itertools.combinations(range(k), K)]
        right = [max(rewards[i, b].item() for i in group) for group in groups]
        scale = math.sqrt(mean(right) * (1 - mean(right)))
        for j in range(k):
            with_j = mean(x for x, group in zip(right, groups) if j in group)
            expected = (with_j - mean(right)) / scale if scale else 0.0
            assert found[j, b].item() == pytest.approx(expected, abs=1e-4)


def test_readme_shrinkage_equals_the_loops(mine):
    """Zeng et al. 2025, arXiv:2511.03710, equations 10 and 13 to 16."""
    objective = mine("shrinkage")
    k, B = 3, 5
    rewards = torch.randn(k, B, generator=torch.Generator().manual_seed(0))
    found = objective.shrinkage(rewards, "rloo")
    columns = rewards.T.tolist()
    for b in range(B):
        others = [column for i, column in enumerate(columns) if i != b]
        center = mean(map(mean, others))
        within = mean(stdev(column) ** 2 / k for column in others)
        between = mean((mean(column) - center) ** 2 for column in others)
        share = (B - 1) / B * within / (within + between)
        for j in range(k):
            siblings = [x for i, x in enumerate(columns[b]) if i != j]
            expected = columns[b][j] - (1 - share) * mean(siblings) - share * center
            assert found[j, b].item() == pytest.approx(expected, abs=1e-5)
    changed = rewards.clone()
    changed[0, 0] += 5  # the baseline of a completion does not know its own reward
    assert (objective.shrinkage(changed, "rloo") - found)[0, 0].item() == pytest.approx(5, abs=1e-5)


def log_probs_apart(k=3, B=4, R=5):
    """New log-probs with a gradient, old ones, advantages (k, B, 1) and a mask of unequal lengths."""
    generator = torch.Generator().manual_seed(0)
    new = (torch.randn(k, B, R, generator=generator) * 0.4).requires_grad_()
    old = torch.randn(k, B, R, generator=generator) * 0.4
    mask = torch.arange(R) < torch.randint(1, R + 1, (k, B, 1), generator=generator)
    return new, old, torch.randn(k, B, 1, generator=generator), mask


def test_readme_cispo_equals_the_loops(mine):
    """MiniMax-M1, arXiv:2506.13585: -min(ρ_t, cap) A log π(y_t), where the factor before the log has no gradient."""
    objective = mine("cispo")
    new, old, advantages, mask = log_probs_apart()
    losses, log_ratio, clipped = objective.cispo(new, old, advantages, mask, 0.2, 0.3, "token", 0.5)
    losses.sum().backward()
    factors, ratios = torch.zeros_like(old), []
    for c in itertools.product(*map(range, mask.shape)):
        if mask[c]:
            ratio = math.exp(new[c].item() - old[c].item())
            factors[c] = -0.5 * min(ratio, 1.3) * advantages[c[0], c[1], 0].item()
            ratios.append(ratio)
    assert torch.allclose(new.grad, factors, atol=1e-6)
    assert torch.allclose(losses, (factors * new).sum(-1), atol=1e-5)
    assert log_ratio.exp().tolist() == pytest.approx(ratios, rel=1e-5)
    assert clipped.tolist() == [ratio > 1.3 for ratio in ratios] and 0 < clipped.sum() < len(ratios)


def test_readme_gspo_equals_the_loops(mine):
    """Zheng et al. 2025, arXiv:2507.18071: the clipped objective of s = (π / π_old)^(1/|y|), one for a completion."""
    objective = mine("gspo")
    new, old, advantages, mask = log_probs_apart()
    losses, log_ratio, clipped = objective.gspo(new, old, advantages, mask, 0.05, 0.1, "sequence", 1.0)
    losses.sum().backward()
    clips = []
    for j, b in itertools.product(*map(range, mask.shape[:2])):
        length, a = int(mask[j, b].sum()), advantages[j, b].item()
        ratio = math.exp(sum(new[j, b, t].item() - old[j, b, t].item() for t in range(length)) / length)
        plain, clip = -a * ratio, -a * min(max(ratio, 0.95), 1.1)
        assert losses[j, b].item() == pytest.approx(max(plain, clip), abs=1e-6)
        slope = plain / length if plain >= clip or clip == plain else 0.0
        assert new.grad[j, b].tolist() == pytest.approx([slope] * length + [0.0] * (5 - length), abs=1e-6)
        clips.append(clip > plain)
    assert clipped.tolist() == clips and 0 < sum(clips) < len(clips) and log_ratio.shape == (12,)


def test_readme_unbiased_k3_has_the_gradient_of_the_kl(mine):
    """DeepSeek-V3.2, arXiv:2512.02556: ρ (e^-kl - 1 + kl). Over all tokens of a vocabulary, weighted by their
    probability, its gradient is that of KL(π ‖ π_ref), and that of k3 alone is another."""
    k3, objective = rloo.kl_penalty, mine("unbiased_k3")
    logits = torch.randn(7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ref = torch.randn(7, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    new = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((new.exp() * (new - ref)).sum(), logits, retain_graph=True)

    def gradient(penalty):
        values = penalty(new.view(7, 1, 1), ref.view(7, 1, 1), torch.ones(7, 1, 1))
        return torch.autograd.grad((new.detach().exp() * values[:, 0]).sum(), logits, retain_graph=True)[0]

    assert torch.allclose(gradient(objective.unbiased_k3), exact, atol=1e-6)
    assert (gradient(k3) - exact).abs().max() > 1e-2

    new, ref, _, mask = log_probs_apart()
    found = objective.unbiased_k3(new, ref, mask)
    found.sum().backward()
    for j, b in itertools.product(*map(range, mask.shape[:2])):
        kl = [(new - ref)[j, b, t].item() for t in range(5) if mask[j, b, t]]
        assert found[j, b].item() == pytest.approx(sum(math.exp(-x) - 1 + x for x in kl), abs=1e-5)
        slopes = [math.exp(-x) - 1 + x + 1 - math.exp(-x) for x in kl]  # of ρ, and of what it is multiplied by
        assert new.grad[j, b].tolist() == pytest.approx(slopes + [0.0] * (5 - len(kl)), abs=1e-5)


def test_readme_groups_of_equal_scores_leave_the_loss(mine, train, monkeypatch):
    """They have no advantage. Without them the mean is over the tokens of the others."""
    flags = {"reward_model_path": None, "kl_coef": 0.0, "max_grad_norm": 0.0, "loss_aggregation": "token"}
    flags |= {"advantage_estimator": "grpo", "reward_fns": (f"{__file__}:constant_for_even_rows",)}
    seen = spy(monkeypatch, "improve")
    (plain,), _ = train(**flags)
    ((*_, batch, _, _, _, advantages, _, _), _) = seen[0]
    lengths, kept = batch.response_mask.sum(-1), 0
    for b, row in enumerate(batch.rows):
        kept += int(lengths[:, b].sum()) if row["columns"]["n"] % 2 else 0
    mine("without_equal_groups")
    (changed,), _ = train(**flags)
    assert 0 < kept < int(lengths.sum()) and plain["grad_norm"] > 0
    assert changed["grad_norm"] == pytest.approx(plain["grad_norm"] * int(lengths.sum()) / kept, rel=1e-4)


def test_readme_entropy_bonus_is_the_gradient_of_the_entropy(train, tmp_path, monkeypatch):
    """... of completions whose scores are equal: -0.01 times its mean over completions, by loops over them."""
    flags = {"reward_model_path": None, "reward_fns": (f"{__file__}:constant_reward",), "kl_coef": 0.0}
    flags["max_grad_norm"] = 0.0
    seen = spy(monkeypatch, "rollout")
    (plain,), _ = train(**flags)
    (diff,) = blocks_of(OBJECTIVES.read_text(), "diff")
    module = edited(tmp_path, diff)
    with monkeypatch.context() as patch:
        patch.setattr(rloo, "main", lambda args, signals: module.main(args, signals))
        (changed,), output = train(**flags)
    batch, _ = seen[0][1]
    policy, total = tiny_model(), 0.0
    for j, b in itertools.product(range(2), range(8)):
        completion = batch.responses[j, b][batch.response_mask[j, b]].tolist()
        total = total + token_logprobs(policy, batch.rows[b]["prompt_ids"], completion, 1.0)[1].sum()
    gradient = flat_grad(total / 16, policy)
    assert plain["grad_norm"] == 0
    assert changed["grad_norm"] == pytest.approx(0.01 * gradient.norm().item(), rel=1e-3)
    trained = AutoModelForCausalLM.from_pretrained(output)
    moved = torch.cat([(p - q).detach().flatten() for p, q in zip(trained.parameters(), policy.parameters())])
    assert moved @ gradient > 0  # the entropy becomes larger


OBJECTIVES_OF_README = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (HERE / "README.md").read_text().split("| objective (arXiv number) | flags |")[1].splitlines()[2:]
    if line.startswith("| ") and "`--" in line and "_estimator" in line
]


def readme_flags(name: str) -> list[str]:
    """The flags in the row of an objective."""
    (how,) = [how for objective, how in OBJECTIVES_OF_README if objective.startswith(name) and "--" in how]
    return re.fullmatch(r"`(--[^`]*)`", how)[1].split()


def test_readme_names_each_objective_once():
    """By its flags, or by a link to the section that has its file; the median is README's own example."""
    links = re.findall(r"\]\(benchmark/objectives/README\.md#([\w-]+)\)", (HERE / "README.md").read_text())
    anchors = [link for link in links if link not in ("as-a-library", "batches-and-rows")]
    others = ["objectives-in-a-few-lines", "a-coefficient-that-changes", "a-metric-of-your-own", "sampling-with-top-p"]
    assert sorted([*anchors, *others]) == sorted(sections_with_files())
    assert len(OBJECTIVES_OF_README) == 4


def test_readme_flags_are_the_published_objectives():
    args = rloo.parse_args(readme_flags("REINFORCE++-baseline"))  # Hu 2025, arXiv:2501.03262
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    nothing, mask = torch.zeros(3, 4, 2), torch.ones(3, 4, 2, dtype=torch.bool)
    found = advantages_of(scores, nothing, mask, 0.0, args.kl_level, args.normalize_advantage, args.advantage_estimator)
    centered = [[x - mean(column) for x in column] for column in scores.T.tolist()]
    everything = [x for column in centered for x in column]
    for j, b in itertools.product(range(3), range(4)):
        assert found[j, b].item() == pytest.approx(centered[b][j] / stdev(everything), abs=1e-5)


def first_word_is_early(prompts, completions, completion_ids, **columns):
    """1 or 0: of the alphabet."""
    return [float(text.strip()[:1] in ("a", "b", "c", "d", "e", "f")) for text in completions]


@pytest.mark.parametrize("name", ["GRPO", "Dr. GRPO", "DAPO", "REINFORCE++"])
def test_readme_objectives_that_are_flags_run(tiny, tmp_path, monkeypatch, name):
    monkeypatch.setattr(rloo, "say_once", lambda text: None)
    line = command(tiny, tmp_path / "out", kl_coef=0.1, rloo_k=4, total_episodes=32)
    line = [word for word in line if word not in ("--reward_model_path", str(tiny / "reward"))]
    rloo.command_line([*line, "--reward_fns", f"{__file__}:first_word_is_early", *readme_flags(name)])
    updates = read_metrics(tmp_path / "out")
    assert all(math.isfinite(value) for update in updates for value in update.values())
    assert all(0 < update["objective/scores"] < 1 and update["grad_norm"] > 0 for update in updates)


def test_a_coefficient_that_changes_does_so_in_the_run_and_after_resuming(mine, train):
    mine("with_decay")
    _, output = train()
    metrics, _ = train(total_episodes=32, resume=True, output_dir=str(output))
    assert [found["kl_coef"] for found in metrics] == pytest.approx([0.1, 0.095])
    for found in metrics:
        expected = -found["kl_coef"] * found["objective/kl"]
        assert found["objective/non_score_reward"] == pytest.approx(expected, rel=1e-5)
    assert metrics[1]["objective/kl"] > 1e-3


def test_readme_metric_and_top_p(mine, train, monkeypatch):
    """What is drawn is among the likeliest tokens that make 0.9 together; its log-prob is that of the whole softmax."""
    mine("with_metric")
    mine("with_top_p")
    seen = spy(monkeypatch, "rollout")
    (metrics,), output = train(rollout_engine="hf", response_length=8, learning_rate=0.0, save_steps=1)
    norm = final_weights(output).norm().item()
    assert metrics["weights/norm"] == pytest.approx(norm, rel=1e-5)
    (batch, logprobs), policy, outside = seen[0][1], tiny_model(), 0
    for j, b in itertools.product(range(2), range(8)):
        ids = batch.responses[j, b][batch.response_mask[j, b]].tolist()
        prompt = batch.rows[b]["prompt_ids"]
        table = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for t, token in enumerate(ids):
            likelier = table[t][table[t] > table[t, token]].exp().sum().item()
            assert likelier < 0.9 and logprobs[j, b, t].item() == pytest.approx(table[t, token].item(), abs=1e-4)
            outside += 1 - table[t].exp().sort(descending=True).values.cumsum(0)[0].item() > 0.1
    assert outside > 20  # tokens that could have been others


def shell_file(page: Path, name: str) -> str:
    """The file that a shell block of a page writes."""
    blocks = "\n".join(blocks_of(page.read_text(), "sh"))
    (text,) = re.findall(rf"cat > {re.escape(name)} <<'END'\n(.*?)^END$", blocks, re.M | re.S)
    return text


def test_readme_length_penalty_grows_with_the_updates(tmp_path, train):
    (tmp_path / "shorter.py").write_text(shell_file(OBJECTIVES, "shorter.py"))
    function = {}
    exec(shell_file(OBJECTIVES, "shorter.py"), function)
    for done, weight in ((0, 0.0), (50, 0.5), (100, 1.0), (1000, 1.0)):
        found = function["shorter"](None, None, [[1, 2, 3], [4]], updates_done=done, n=[1])
        assert found == pytest.approx([-0.003 * weight, -0.001 * weight])
    metrics, _ = train(reward_fns=(f"{tmp_path}/shorter.py:shorter",), total_episodes=32)
    assert metrics[0]["rewards/shorter/mean"] == 0 > metrics[1]["rewards/shorter/mean"]


def test_readme_metric_of_completions_is_logged_and_changes_no_weights(tmp_path, train, monkeypatch):
    (tmp_path / "words.py").write_text(shell_file(OBJECTIVES, "words.py"))
    seen = spy(monkeypatch, "completion_texts")
    metrics, output = train(reward_fns=(f"{tmp_path}/words.py:words",), reward_weights=(1.0, 0.0))
    counts = [len(text.split(" ")) - text.count("  ") for text in map(str.strip, seen[0][1])]
    assert metrics[0]["rewards/words/mean"] == pytest.approx(mean(counts)) and len({*counts}) > 1
    _, plain = train()
    assert final_weights(output).equal(final_weights(plain))


def test_readme_gsm8k_is_prepared_for_its_reward_function(tmp_path):
    """The block runs with a stand-in for the package datasets, and rows and reward fit together."""
    (block,) = [text for text in readme_blocks("sh") if "openai/gsm8k" in text]
    (tmp_path / "datasets.py").write_text(
        "def load_dataset(name, config, split):\n"
        "    assert (name, config) == ('openai/gsm8k', 'main') and split in ('train', 'test')\n"
        "    return [{'question': 'How many?', 'answer': 'It is 1 + 2 = 3.\\n#### 1,203'}] * 3\n"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    lines = block.replace("pip install datasets\n", "")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": path}
    subprocess.run(["bash", "-ec", lines], cwd=tmp_path, check=True, env=environment)
    args = Args(dataset_name=str(tmp_path / "gsm8k"))
    train, test = rloo.load_data(args, chat_tokenizer())
    assert len(train) == len(test) == 3 and train[0]["prompt"][0]["content"].startswith("How many? Think")
    function = {}
    exec(shell_file(HERE / "README.md", "last_number.py"), function)
    answers = [row["columns"]["answer"] for row in train]
    found = function["right_number"](None, ["So it is 1203.", "1,203 of 4", "none"], None, answer=answers, n=None)
    assert found == [1.0, 0.0, 0.0]
    written = ["It is $12.00.", "10-12", "= 12.5", "-12"]
    assert function["right_number"](None, written, None, answer=["12"] * 4) == [1.0, 1.0, 0.0, 0.0]
    texts, returned = re.search(r"for\s+`(\[.*?)` it\s+returns\s+`(.*?)`", (HERE / "README.md").read_text()).groups()
    texts = json.loads(texts)
    assert function["right_number"](None, texts, None, answer=["12"] * len(texts)) == json.loads(returned)


def test_readme_gpu_commands_are_those_of_the_memory_table(tmp_path):
    """... and so is that of TL;DR's script."""
    sys.path.append(str(HERE / "benchmark" / "speed"))
    import gpu_memory

    script = ["bash", str(HERE / "benchmark" / "tldr" / "tldr.sh"), "1b-k4", "--dry_run"]
    tldr, *_ = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
    readme = (HERE / "README.md").read_text()
    blocks = readme_blocks("sh") + blocks_of(GPU.read_text(), "sh")
    commands = [" ".join(words) for words in commands_of(blocks, tmp_path) if "Qwen/" in " ".join(words)]
    assert len(commands) == 4
    for line in [*commands, tldr]:
        args = rloo.resolve_args(rloo.parse_args(line.partition("rloo.py ")[2].split()))
        name = re.search(r"Qwen2.5-[\d.]+B|pythia-1b", line)[0]
        lora = args.lora_rank > 0
        (run,) = [run for run in gpu_memory.RUNS if run.name.startswith(name) and (run.lora_rank > 0) == lora]
        assert f"--nproc_per_node {run.gpus} " in line or run.gpus == 1
        sizes = (args.rloo_k, args.per_device_train_batch_size, args.max_prompt_length, args.response_length)
        assert sizes == (run.k, run.micro_batch, run.P, run.R), name
        assert args.local_rollout_forward_batch_size == run.chunk and args.lora_rank == run.lora_rank
        assert args.gradient_checkpointing == run.checkpointing
        assert args.learning_rate == pytest.approx(float(run.learning_rate))
        size = int(re.search(r"(\d+) GB", run.name)[1])
        assert size in gpu_memory.fitting(run)
        needed = max(gpu_memory.needed(run)[name] for name in ("training", "rollout")) / 2**30
        if run.gpus == 1 and line != tldr:
            assert f" on one GPU of {size} GB** ({needed:.1f} GiB computed):" in readme, name


def test_library_example_is_a_step_of_rloo(monkeypatch):
    """Its losses and gradient are those of loops over the completions."""
    monkeypatch.chdir(HERE)
    (text,) = [text for text in blocks_of(OBJECTIVES.read_text(), "python") if "optimizer.step()" in text]
    assert text.count("\n") <= 22
    torch.manual_seed(0)
    names = {}
    exec(text, names)
    batch, model, k, B = names["batch"], names["model"], 4, 2
    texts = rloo.completion_texts(batch, names["tokenizer"])
    rewards = {(j, b): -float(len(texts[j * B + b])) for j in range(k) for b in range(B)}
    before = AutoModelForCausalLM.from_pretrained(names["path"]).eval()
    loss = 0.0
    for (j, b), reward in rewards.items():
        advantage = reward - mean(x for c, x in rewards.items() if c[1] == b and c[0] != j)
        ids = batch.responses[j, b][batch.response_mask[j, b]].tolist()
        new, _ = token_logprobs(before, batch.rows[b]["prompt_ids"], ids, 0.7)
        loss = loss - advantage * new.sum() / (k * B)
        assert names["losses"][j, b].item() == pytest.approx(-advantage, rel=1e-5)  # ρ is 1
    expected = flat_grad(loss, before)
    found = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    moved = torch.cat([(p - q).detach().flatten() for p, q in zip(model.parameters(), before.parameters())])
    assert 0 < moved.abs().max() < 2e-4


def test_readme_fields_of_a_batch_and_keys_of_a_row():
    tables = OBJECTIVES.read_text().split("| field of a Batch |")[1].split("\n\n")
    fields, keys = (re.findall(r"`(\w+)`", " ".join(re.findall(r"(?m)^\| ([^|]*) \|", t))) for t in tables[:2])
    assert fields == list(Batch._fields)
    assert sorted(keys) == sorted(rloo.prepare_row({"prompt": "a"}, tiny_tokenizer()))


def test_log_probs_of_given_completions_on_the_page_of_objectives(monkeypatch, capsys):
    monkeypatch.chdir(HERE)
    (text,) = [text for text in blocks_of(OBJECTIVES.read_text(), "python") if "rloo.make_batch(" in text]
    names = {}
    exec(text, names)
    model, tokenizer, batch = names["model"], names["tokenizer"], names["batch"]
    assert rloo.completion_texts(batch, tokenizer) == [" cat trouble", " keys gone"] and batch.ended.all()
    printed = torch.tensor(json.loads(re.search(r"\[\[.*\]\]", capsys.readouterr().out)[0]))
    for b, row in enumerate(names["rows"]):
        ids = tokenizer((" cat trouble", " keys gone")[b])["input_ids"] + [tokenizer.eos_token_id]
        expected = token_logprobs(model, row["prompt_ids"], ids, 0.7)[0].sum().item()
        assert printed[0, b].item() == pytest.approx(expected, abs=1e-3)


def test_attention_of_transformers_is_put_back_as_the_page_of_objectives_says():
    (code,) = re.findall(r"`(transformers\.AttentionInterface\.register\(.*?\))`", OBJECTIVES.read_text())
    own = AttentionInterface()["sdpa"]
    try:
        exec(code, {"transformers": transformers, "rloo": rloo})
        assert own is rloo.attention and AttentionInterface()["sdpa"] is rloo.sdpa_attention
    finally:
        AttentionInterface.register("sdpa", own)


def test_the_page_of_metrics_has_those_that_a_run_writes(train):
    """All of them, and no others."""
    table = METRICS.read_text().split("| metric |")[1].split("\n\n")[0]
    names = re.findall(r"`(.*?)`", " ".join(re.findall(r"(?m)^\| ([^|]*) \|", table)))
    patterns = [re.escape(name).replace("<name>", r"\w+").replace(r"\*", r"\w+") for name in names]
    (metrics, *_), _ = train(reward_fns=(f"{__file__}:first_word_is_early",), rollout_correction="truncate")
    assert [name for name in metrics if not any(re.fullmatch(x, name) for x in patterns)] == []
    assert [x for x in patterns if not any(re.fullmatch(x, name) for name in metrics)] == []


def test_readme_functions_and_lines_are_those_of_the_file():
    """Within a tenth, so that an edit need not count."""
    readme, source = (HERE / "README.md").read_text(), (HERE / "rloo.py").read_text()
    begin, end = source.index("# ---- The maths"), source.index("# ---- The run")
    algorithm = source[begin:end]
    stated, again = map(int, re.findall(r"(?:the algorithm takes|after these) (\d+)", readme))
    whole = int(re.search(r"one file of ([\d,]+) lines", readme)[1].replace(",", ""))
    assert whole == pytest.approx(source.count("\n"), rel=0.1)
    assert stated == again == pytest.approx(algorithm.count("\n"), rel=0.1)
    assert '"The maths" and "One update"' in readme and "# ---- One update" in algorithm
    formulas = readme.split("| formula | function |")[1].split("\n\n")[0]
    for name in re.findall(r"`(\w+)`", formulas):
        assert f"\ndef {name}(" in source, name


def test_readme_real_model_is_that_of_its_page():
    """Numbers, number of seeds and samples of SmolLM2."""
    readme, page = ((HERE / path).read_text() for path in ("README.md", "benchmark/smollm/README.md"))
    block = readme.split("<!-- real model -->")[1].split("<!-- end of real model -->")[0]
    samples = [[x.strip() for x in line.split("|")[1:-1]] for line in block.strip().splitlines()[2:]]
    below = " ".join(readme.split("<!-- end of real model -->")[1].split("Install, train")[0].split())

    def rows(name):
        part = page.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- end of {name} -->")[0]
        head, _, *body = [[x.strip() for x in line.split("|")[1:-1]] for line in part.splitlines()]
        return head, {row[0]: row for row in body}

    found = {}
    for name in ("sentiment", "reversal"):
        _, table = rows(name)
        found[name] = before, after = table["before training"], table["all weights, β = 0.02"]
        assert f"from {before[2].partition(';')[0]} to {after[2].partition(';')[0]}" in below
        assert f"Over {len(after[1].split(','))} seeds" in below
    before, after = found["sentiment"]
    assert f"{after[7]}% of its sampled answers say glad, happy or love (before: {before[7]}%)" in below
    assert f"{after[6]}% name their topic (before: {before[6]}%)" in below
    answers_of = {}
    for name in ("samples", "reversal samples"):
        head, body = rows(name)
        columns = [head.index(column) for column in ("before training", "all weights, β = 0.02")]
        answers_of |= {prompt: [row[column] for column in columns] for prompt, row in body.items()}
    assert len(samples) >= 3
    for prompt, *answers in samples:
        for answer, cell in zip(answers, answers_of[prompt], strict=True):
            text, cut, score = re.fullmatch(r"(.*?)( …)? (\*\*\S+\*\*)", answer).groups()
            assert cell.startswith(text) and cell.endswith(score) and (cut or cell == answer), prompt


def test_readme_numbers_are_those_of_the_records():
    """Those outside of tables that the scripts of benchmark/ write or test; a number is written as on its page."""
    sys.path.append(str(HERE / "benchmark" / "speed"))
    import throughput

    def read(path: str) -> dict:
        return json.loads((HERE / "benchmark" / path).read_text())

    def times(ending: str) -> float:
        record = next(iter(read("speed/throughput.json").values()))
        (rounds,) = (x for name, x in throughput.ratios(record["found"]["whole update"]).items() if ending in name)
        return throughput.median(rounds)

    readme = (HERE / "README.md").read_text()
    seconds = {name: sum(x["cpu_seconds"] for x in runs) for name, runs in read("trl/train.json")["found"].items()}
    (update,) = [line for line in readme.splitlines() if line.startswith("| time on a CPU, relative |")]
    on_mini_tldr = seconds["TRL 1.16.0"] / seconds["rloo.py"]
    smollm = {
        method: [
            read(f"smollm/records/{path.name}").get("cpu_seconds_per_update")
            for path in (HERE / "benchmark" / "smollm" / "records").glob(f"sentiment-{method}-beta0.02-seed*.json")
        ]
        for method in ("trl", "full")
    }
    on_smollm, ours = ([x for x in smollm[method] if x] for method in ("trl", "full"))
    on_smollm = sum(on_smollm) / len(on_smollm) / (sum(ours) / len(ours))
    shown = [f"{on_smollm:.1f}", f"{on_mini_tldr:.1f}", f"{times('TRL 1.16.0'):.1f}"]
    assert re.findall(r"\[([\d.]+)\]\(", update) == shown
    same = [row["difference"] for row in read("trl/golden.json")["table"] if not row["why"]]
    assert f"[{len(same)} settings within {max(same):.1e}".replace("e-0", "e-") in readme


def test_readme_results_are_rows_of_the_index_of_benchmarks():
    """Each number and title; the commands are there."""

    def rows(page: Path) -> list[list[str]]:
        table = page.read_text().split("| on mini TL;DR |")[1].split("\n\n")[0].splitlines()[2:]
        return [line.split(" | ")[:3] for line in table if line.startswith("| ")]

    shown = [[*cells[:2], cells[2].removesuffix(" |")] for cells in rows(HERE / "README.md")]
    assert len(shown) >= 4 and all(row in rows(HERE / "benchmark" / "README.md") for row in shown)


def test_every_bug_of_the_page_has_its_test():
    """... each test is named once in a row, and README says how many bugs there are."""
    page, tests = ((HERE / path).read_text() for path in ("benchmark/bugs/README.md", "rloo_test.py"))
    rows = [line for line in page.splitlines() if line.startswith("| ") and "| test here |" not in line]
    for row in rows:
        bug, where, trl, names = (cell.strip() for cell in row.split("|")[1:-1])
        found = re.findall(r"`(test_\w+)`", names)
        assert bug and where and trl and found and len(found) == len(set(found)) == names.count("`") // 2, row
        assert all(f"\ndef {name}(" in tests for name in found), row
    readme = (HERE / "README.md").read_text()
    assert f"[{len(rows)} bugs known from other trainers" in readme and page.count(f"{len(rows)} bugs that ") == 1


def test_ci_makes_an_environment_and_runs_the_test_command_of_the_readme(tmp_path):
    """Of the first shell block it runs the first line, which installs, and the last, which tests; not the second, which
    trains. If the installation fails, nothing is tested."""
    install, train, tests = readme_blocks("sh")[0].splitlines()
    assert install.startswith("python3 -m venv .venv && . .venv/bin/activate && ") and "-r requirements.txt" in install
    assert train == "python rloo.py" and tests.endswith("pytest -q rloo_test.py benchmark")
    (tmp_path / ".ci").mkdir()
    for name in (".ci/run", "README.md"):
        shutil.copy(HERE / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "old").touch()
    stubs = tmp_path / "stubs"  # in place of the programs; an environment has a python and a pip that do the same
    stubs.mkdir()
    note = f'#!/bin/bash\necho "${{0##*/}} $*" >> {tmp_path}/ran\n'
    make = "mkdir -p .venv/bin && cp $(dirname $0)/python $(dirname $0)/pip .venv/bin && "
    make += "echo 'export PATH=$PWD/.venv/bin:$PATH; echo $UNSET' > .venv/bin/activate\n"
    for name, body in (("python3", make), ("python", ""), ("pip", '[ -z "$FAILS" ]\n')):
        (stubs / name).write_text(note + body)
        (stubs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{stubs}:{os.environ['PATH']}"}
    for fails in ("", "1"):
        run = ["bash", str(tmp_path / ".ci" / "run")]
        done = subprocess.run(run, capture_output=True, text=True, env=environment | {"FAILS": fails})
        ran = (tmp_path / "ran").read_text().splitlines()
        (tmp_path / "ran").unlink()
        expected = ["python3 -m venv .venv", "pip install -r requirements.txt"]
        assert ran == expected + ([] if fails else [tests]), done.stderr
        assert (done.returncode == 0) == (not fails) and not (tmp_path / ".venv" / "old").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Killed, resumed, told to stop, out of space


LONG = {
    "total_episodes": 64,
    "save_steps": 1,
    "save_total_limit": 9,
    "num_eval_prompts": 4,
    "num_mini_batches": 2,
    "per_device_train_batch_size": 8,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.3,
}


def end_of(output: Path) -> tuple:
    """Weights, metrics without times, evaluations and completions of a finished run."""
    return (
        (output / "model.safetensors").read_bytes(),
        without_times(read_metrics(output)),
        (output / "evaluations.jsonl").read_bytes(),
        (output / "completions.jsonl").read_bytes(),
    )


class Runs:
    """Its pickle runs code when it is loaded: here it stops."""

    def __reduce__(self):
        return sys.exit, ("code of a checkpoint was run",)


@pytest.mark.parametrize(
    "name, content",
    [
        ("model.safetensors", b""),
        ("optimizer.pt", b""),
        ("optimizer.pt", None),
        pytest.param("optimizer.pt", pickle.dumps(Runs()), id="code"),
        ("state.json", b"{"),
        ("config.json", None),
    ],
)
def test_a_checkpoint_that_does_not_load_is_named_and_the_one_before_goes_on(train, tmp_path, name, content, capsys):
    _, output = train(**LONG)
    expected, file = end_of(output), output / "checkpoint-4" / name
    file.unlink() if content is None else file.write_bytes(content or file.read_bytes()[:-100])
    before = snapshot(tmp_path)
    with pytest.raises(InputError) as error:
        train(**LONG, output_dir=str(output), resume=True)
    said = str(error.value)
    assert "move it away" in said and f"{output}/checkpoint-4: cannot be loaded" in said
    assert "\n" not in said and snapshot(tmp_path) == before
    file.parent.rename(tmp_path / "away")
    train(**LONG, output_dir=str(output), resume=True)
    assert (
        f"resumed from {output}/checkpoint-3; changed: nothing\n" in capsys.readouterr().out
        and end_of(output) == expected
    )


def test_other_training_data_makes_another_run(train, tiny, tmp_path):
    """Without a test split, whether rows are held out decides which rows are trained on."""
    data = shutil.copy(tiny / "data" / "train.jsonl", tmp_path)
    flags = {"dataset_name": str(data), "output_dir": str(tmp_path / "out")}
    train(**flags, num_eval_prompts=0)
    with pytest.raises(InputError, match="other flags: training data [0-9a-f]{16} -> [0-9a-f]{16}$"):
        train(**flags, num_eval_prompts=5, resume=True, total_episodes=32)
    Path(data).write_text("".join(reversed(Path(data).read_text().splitlines(keepends=True))))
    with pytest.raises(InputError, match="other flags: training data [0-9a-f]{16} -> [0-9a-f]{16}$"):
        train(**flags, num_eval_prompts=0, resume=True, total_episodes=32)


def test_a_reward_model_that_gives_nan_stops_the_run(train, monkeypatch):
    """... and is not taken for one that has no score to give."""
    spy(monkeypatch, "model_scores", lambda inputs, output: output * math.nan)
    with pytest.raises(InputError, match="^a score of the reward model is not finite"):
        train()


def test_references_are_as_long_as_completions_at_most(train, tmp_path, monkeypatch, capsys):
    """Longer ones might not fit into the models' positions."""
    rows = [{"prompt": "a", "completion": "b " * n} for n in (99, 6, 5)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        shutil.copy(tmp_path / "long.jsonl", tmp_path / "data" / f"{split}.jsonl")
    seen = spy(monkeypatch, "make_batch")
    train(dataset_name=str(tmp_path / "data"), num_eval_prompts=3, total_episodes=0)
    assert {batch.responses.shape[-1] for (rows, *_), batch in seen if "prompt" in rows[0]} == {6}
    (_, graded) = seen[-1]
    assert graded.completion_ids()[3:] == [[4] * 5 + [0]] * 3  # all of them end in a stop token
    assert capsys.readouterr().out.count("2 of 3 references are cut to --response_length 6 for grading") == 1


def test_resume_begins_a_run_and_repeats_nothing_of_a_finished_one_whose_checkpoints_are_models(train, tmp_path):
    flags = dict(LONG, output_dir=str(tmp_path / "out"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("{")  # killed in its first moments
    _, output = train(**flags, resume=True)
    expected = end_of(output)
    assert len(train(**flags, resume=True)[0]) == 4 and end_of(output) == expected
    with pytest.raises(InputError, match="continue with --resume if it holds a run"):
        train(**flags)
    for path in (output / "checkpoint-1", output):  # both are models with a tokenizer
        assert len(train(sft_model_path=str(path))[0]) == 1
    for path in output.glob("checkpoint-*"):
        shutil.rmtree(path)
    with pytest.raises(InputError, match="has a trained policy and no checkpoint to continue from"):
        train(**flags, resume=True)
    assert end_of(output) == expected


def test_the_files_of_others_are_not_taken_for_those_of_a_run_without_updates(train, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    for name in ("args.json", "completions.jsonl"):
        (output / name).write_text("{}")
    before = snapshot(output)
    for resume in (False, True):
        with pytest.raises(InputError, match="is not empty"):
            train(output_dir=str(output), resume=resume)
    assert snapshot(output) == before
    (output / "metrics.jsonl").touch()  # as of a run that was killed in its first update
    train(output_dir=str(output), resume=True)


def test_a_file_that_is_shorter_than_at_the_checkpoint_is_not_filled_up(tmp_path):
    """... such as one that was moved away in between: bytes of 0 are not JSON."""
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    lengths = {"metrics.jsonl": 3, "completions.jsonl": 9}
    with rloo.open_output(Args(), tmp_path, {"files": lengths}, None):
        left = [(tmp_path / name).read_text() for name in lengths]
    assert left == ["{}\n", ""]


def test_evaluations_under_different_flags_are_not_shown_as_before_and_after(train, capsys, monkeypatch):
    results = spy(monkeypatch, "main")
    for changed, shown in (({}, True), ({"learning_rate": 1e-3}, False), ({"response_length": 5}, False)):
        _, output = train(num_eval_prompts=3)
        capsys.readouterr()
        train(output_dir=str(output), resume=True, total_episodes=32, num_eval_prompts=3, **changed)
        screen = capsys.readouterr().out
        (line,) = [x for x in screen.splitlines() if x.startswith("sampled/length ")]
        assert line.count("±") == 1 + shown and bool(results[-1][1]["before"]) == shown
        assert ("the closing table is without the evaluation before training" in screen) != shown
        updates = [evaluation["update"] for evaluation in read_metrics(output, "evaluations")]
        assert updates == [0, 1, 2]  # the file keeps the first one, and that of the finished run


def test_resume_says_which_flags_changed_and_refuses_those_that_make_another_run(
    train, tiny, tmp_path, monkeypatch, capsys
):
    results, optimizers = spy(monkeypatch, "main"), spy(monkeypatch, "make_optimizer")
    copy, (_, output) = shutil.copytree(tiny / "reward", tmp_path / "copy"), train()
    again, before = (
        {"output_dir": str(output), "resume": True, "total_episodes": 32, "learning_rate": 3e-3},
        snapshot(tmp_path),
    )
    for flags, message in (
        ({"rloo_k": 4}, "rloo_k 2 -> 4"),
        ({"seed": 7}, "seed 1 -> 7"),
        ({"dataset_name": str(tiny / "data" / "train.jsonl")}, "dataset_name .*data -> .*train"),
        ({"sft_model_path": str(output)}, "sft_model_path .*/sft -> "),
        ({"per_device_train_batch_size": 8}, "completions per update 16 -> 8"),
        ({"model_name_or_path": str(output)}, "model_name_or_path .*/sft -> "),
        ({"reward_model_path": str(copy)}, "reward_model_path .*/reward -> .*/copy"),
        ({"reward_fns": (f"{__file__}:constant_reward",)}, r"reward_fns \[\] -> \[.*:constant_reward"),
        ({"dataset_train_split": "test"}, "dataset_train_split train -> test"),
        ({"max_prompt_length": 100}, "max_prompt_length 512 -> 100"),
    ):
        with pytest.raises(InputError, match=f"^--resume: {output} is a run with other flags: {message}"):
            train(**again, **flags)
        assert snapshot(tmp_path) == before
    capsys.readouterr()
    again["weight_decay"] = 0.5
    metrics, _ = train(**again, gradient_accumulation_steps=2, per_device_train_batch_size=8, num_eval_prompts=3)
    assert json.loads((output / "args.json").read_text())["weight_decay"] == 0.5  # of this run alone
    (_, (optimizer, _)) = optimizers[-1]
    assert optimizer.param_groups[0]["weight_decay"] == 0.5  # not the checkpoint's
    state = json.loads((output / "checkpoint-2" / "state.json").read_text())
    assert state["flags"]["weight_decay"] == 0.5  # what another resumed run is compared with
    said = capsys.readouterr().out.split(f"resumed from {output}/checkpoint-1; changed: ")[1]
    for text in ("total_episodes 16 -> 32", "learning_rate 0.01 -> 0.003", "gradient_accumulation_steps 1 -> 2"):
        assert text in said.splitlines()[0]
    assert metrics[1]["lr"] == pytest.approx(3e-3 / 2) and "output_dir" not in said
    assert results[-1][1]["before"] == {} and "sampled/win_rate" in results[-1][1]["after"]
    assert "sampled/win_rate" in said


def test_a_process_that_outlives_the_run_does_not_keep_its_folder(tmp_path):
    """... such as one of a pool, after the run itself was killed."""
    output, state = tmp_path / "out", rloo.new_state(tmp_path / "out", {})
    with rloo.open_output(Args(), output, state, None):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.write(write, b"begun")
            time.sleep(60)
            os._exit(0)
        os.read(read, 5)
        with pytest.raises(InputError, match="another run is using it"), rloo.open_output(Args(), output, state, None):
            pass
    try:
        with rloo.open_output(Args(), output, state, None):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_second_live_run_in_a_folder_is_refused_and_one_after_it_is_not(train, tiny, tmp_path, monkeypatch, capfd):
    ends, inside, output = [], [], tmp_path / "out"

    def start_another(inputs, metrics):
        assert not inside, "two runs train in one folder"
        inside.append(True)
        with pytest.raises(SystemExit) as end:
            rloo.command_line([*command(tiny, output), "--resume"])
        ends.append(end.value.code)
        inside.clear()
        return metrics

    with monkeypatch.context() as patch:
        spy(patch, "update", start_another)  # before the first checkpoint, when there is none to resume from, and after
        train(**LONG, output_dir=str(output))
    said = f"rloo.py: --output_dir {output}: cannot be written to, or another run is using it"
    assert [end.split(" (")[0] for end in ends] == [said] * 4
    assert "Traceback" not in capfd.readouterr().err and end_of(output) == end_of(train(**LONG)[1])
    metrics, _ = train(**{**LONG, "total_episodes": 80}, output_dir=str(output), resume=True)
    assert len(metrics) == 5


def noise(prompts, completions, completion_ids, **columns):
    return [random.random() + torch.rand(1).item() for _ in completions]


def test_the_newest_checkpoints_are_kept_and_random_numbers_depend_on_the_update_alone(train):
    """... so that neither a resumed run nor one with evaluations draws others, in reward functions either."""
    flags = {**LONG, "reward_model_path": None, "reward_fns": (f"{__file__}:noise",), "save_total_limit": 2}
    _, whole = train(**flags)
    assert {path.name for path in whole.glob("*checkpoint*")} == {"checkpoint-3", "checkpoint-4"}
    shutil.rmtree(whole / "checkpoint-4")
    expected = end_of(whole)
    train(**flags, output_dir=str(whole), resume=True)
    assert end_of(whole) == expected
    _, silent = train(**{**flags, "num_eval_prompts": 0})
    assert torch.equal(final_weights(silent), final_weights(whole))


def test_a_process_that_evaluates_nothing_has_no_evaluation(train, monkeypatch):
    """The checkpoint of update 6 comes from a process that evaluated at 0 and 5."""
    run, results = (
        LONG | {"total_episodes": 160, "save_steps": 6, "num_sample_generations": 1},
        spy(monkeypatch, "main"),
    )
    _, output = train(**run)
    shutil.rmtree(output / "checkpoint-10")
    train(**{**run, "num_eval_prompts": 0}, output_dir=str(output), resume=True)
    (_, whole), (_, resumed) = results
    assert whole["before"] and whole["after"] and resumed == {"before": {}, "after": {}}


@pytest.mark.skipif(OLD, reason="before transformers 5 Gemma 3 saves its vision tower under other names")
def test_parameters_that_no_text_uses_have_no_moments_and_their_run_resumes(train, tiny, tmp_path):
    """The vision tower of a Gemma 3, which transformers' auto class for text loads as well."""
    tokens = {"vocab_size": 3 + len(WORDS), "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = AutoConfig.for_model("gemma3", text_config=HEADS | tokens, vision_config=vision, mm_tokens_per_image=4)
    folder = shutil.copytree(tiny / "sft", tmp_path / "sft")
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    run = {**LONG, "total_episodes": 32, "sft_model_path": str(folder)}
    (metrics, output), text = train(**run), set(model.get_decoder().parameters())
    assert metrics[0]["grad_norm"] > 0 and set(model.parameters()) - text
    expected = end_of(output)
    shutil.rmtree(output / "checkpoint-2")
    train(**run, output_dir=str(output), resume=True)
    assert end_of(output) == expected


def test_told_to_stop_no_process_leaves_before_the_first_has_saved(train, monkeypatch):
    """torchrun kills the others half a minute after the first of them has gone."""
    stop, seen = [], []
    spy(monkeypatch, "update", lambda inputs, output: (stop.append(15), output)[1])
    spy(monkeypatch, "save_checkpoint", lambda inputs, output: seen.append("saved"))
    spy(monkeypatch, "gather", lambda inputs, output: (seen.append("met"), output)[1])
    with pytest.raises(SystemExit):
        train(total_episodes=64, signals=stop)
    assert seen[-2:] == ["met", "saved"]  # the last thing that save_checkpoint does


def test_a_signal_that_only_another_process_has_got_stops_this_one_too(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(rloo, "gather", lambda items: [*items, True])
    monkeypatch.setattr(rloo.dist, "is_initialized", lambda: True)
    with pytest.raises(SystemExit) as end, rloo.saved_at_end(tmp_path, {"update": 3}, lambda: seen.append("saved")):
        rloo.stop_if_told([])
    assert end.value.code == 143 and seen == ["saved"]


def test_seeds_are_told_apart_not_added_up():
    """... the run's, the update's and the rank's; in the order of rows the run's and the epoch's."""
    drawn = set()
    for numbers in itertools.product(range(4), repeat=3):
        rloo.set_seed(*numbers)
        drawn.add(torch.rand(1).item())
    assert len(drawn) == 4**3
    orders = {tuple(rloo.shuffled(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 5**2


class Signal(list):
    """The signals of a run that gets a SIGTERM in call number `call` of a function."""

    def __init__(self, call: int):
        super().__init__()
        self.calls = range(1, call + 1).__iter__()
        self.last = call

    def count(self, inputs, output):
        if next(self.calls) == self.last:
            self.append(15)
        return output


def test_told_to_stop_a_run_saves_and_goes_on_as_if_nothing_was(train, tmp_path, monkeypatch, capsys):
    """An update that has made no step is dropped; an evaluation too, and the resumed run makes it again. Calls 1 and 2
    are the rollouts of the first evaluation, sampled and greedy; then come 5 updates, an evaluation, 5 updates and the
    last evaluation."""
    run = {
        **LONG,
        "total_episodes": 160,
        "save_steps": 3,
        "num_sample_generations": 1,
    }
    whole = end_of(train(**run)[1])
    for call, update in [(1, 0), (4, 1), (8, 5), (14, 10)]:
        stopped = tmp_path / f"stopped in call {call}"
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
            signals = Signal(call)
            calls = spy(patch, "rollout", signals.count)
            train(**run, output_dir=str(stopped), signals=signals)
        assert end.value.code == 143
        newest = f"{stopped}/checkpoint-{update}" if update else "none"
        assert f"ended by a signal; newest checkpoint: {newest}; to go on" in capsys.readouterr().out
        assert len(calls) == call  # no more rollouts
        newest = [folder.name for folder in rloo.checkpoints(stopped)[:1]]
        assert newest == [f"checkpoint-{update}"] * (update > 0)
        train(**run, output_dir=str(stopped), resume=True)
        assert end_of(stopped) == whole, call


def test_a_run_that_is_killed_stopped_and_killed_again_leaves_each_update_once(train, tmp_path, monkeypatch):
    """... where no checkpoint is made in between, so that each start cuts off what the one before has written."""
    flags = {**LONG, "save_steps": 0, "output_dir": str(tmp_path / "out"), "resume": True}
    expected = end_of(train(**LONG)[1])

    def killed_in(update):
        calls = itertools.count(1)

        def kill(inputs, metrics):
            if next(calls) == update:
                raise KeyboardInterrupt
            return metrics

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            spy(patch, "update", kill)
            train(**flags)

    killed_in(4)
    told = []
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        spy(patch, "update", lambda inputs, metrics: told.append(15) or metrics)
        train(signals=told, **flags)
    killed_in(3)
    train(**flags)
    assert end_of(tmp_path / "out") == expected


def count_a_in_a_sandbox(prompts, completions, completion_ids, **columns):
    """As graders of code do: in a folder of its own, with a process that takes too long and is told to end."""
    os.chdir(tempfile.gettempdir())
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    process.start()
    process.join(0.2)
    process.terminate()
    process.join(20)
    assert process.exitcode == -15
    return count_a(prompts, completions, completion_ids)


@pytest.mark.parametrize(
    "number, unread",
    [(15, False), (1, False), (2, False), (2, True)],
    ids=["SIGTERM", "end of the terminal", "Ctrl-C", "Ctrl-C that also ends who reads"],
)
def test_a_signal_ends_a_process_with_a_line_at_once_and_a_checkpoint(tiny, tmp_path, number, unread):
    line = command(tiny, "out", total_episodes=10**6, per_device_train_batch_size=8)
    line += ["--reward_fns", f"{__file__}:count_a_in_a_sandbox"] * unread
    process = subprocess.Popen(
        [sys.executable, HERE / "rloo.py", *line],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # also under nohup
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.read_text()):
        time.sleep(0.05)
    if unread:  # as `2>&1 | tee log` does
        process.stdout.close()
        process.send_signal(number)
        assert process.wait(timeout=60) in (1, 128 + number)
        assert len(list((tmp_path / "out").glob("checkpoint-*/state.json"))) == 1
        return
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    (folder,), saved = (tmp_path / "out").glob("checkpoint-*"), len(read_metrics(tmp_path / "out"))
    first, last = said.find("\nrloo.py will save and stop"), said.find(f"newest checkpoint: {folder}; ")
    assert process.returncode == 128 + number and 0 < first < last and "Traceback" not in said
    assert int(folder.name[11:]) == saved


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed")])
def test_a_full_disk_leaves_the_last_checkpoint_whole(train, monkeypatch, tmp_path, error):
    original, saves, output = torch.save, itertools.count(1), tmp_path / "full"

    def save(what, path):
        original(what, path)
        if next(saves) >= 3:  # one file of each checkpoint is written so
            os.truncate(path, 100)
            raise error

    line = "checkpoint-3 cannot be saved; free disk space and continue with --resume"
    with monkeypatch.context() as patch, pytest.raises(InputError, match=line):
        patch.setattr(torch, "save", save)
        train(**LONG, output_dir=str(output))
    left = sorted(path.name for path in output.iterdir())
    assert left == ["args.json", "checkpoint-1", "checkpoint-2", *sorted(rloo.RUN_FILES), "unfinished-checkpoint"]
    train(**LONG, output_dir=str(output), resume=True)
    assert not (output / "unfinished-checkpoint").exists()
    assert end_of(output) == end_of(train(**LONG)[1])


def test_other_held_out_data_are_not_shown_as_before_and_after(train, tiny, tmp_path, capsys):
    data = shutil.copytree(tiny / "data", tmp_path / "data")
    flags = {"dataset_name": str(data), "output_dir": str(tmp_path / "out"), "num_eval_prompts": 4}
    train(**flags)
    (data / "test.jsonl").write_text("".join(reversed((data / "test.jsonl").read_text().splitlines(keepends=True))))
    capsys.readouterr()
    train(**flags, resume=True, total_episodes=32)
    said = capsys.readouterr().out
    assert "held-out data" in said and "the closing table is without the evaluation before training" in said


def test_a_full_disk_at_the_very_end_is_one_line_and_resume_repairs_it(train, monkeypatch, tmp_path):
    flags = {"output_dir": str(tmp_path / "out"), "num_eval_prompts": 0}
    line = f"^{tmp_path}/out: the policy cannot be saved; free disk space and continue with --resume"
    with monkeypatch.context() as patch, pytest.raises(InputError, match=line):
        patch.setattr(rloo, "save_policy", lambda folder, *args: os.mkdir(folder / f"no file of {folder.name}/x/y"))
        train(**flags, save_steps=0, lora_rank=1)
    train(**flags, save_steps=0, lora_rank=1, resume=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_file_that_may_not_grow_is_one_line(tiny, tmp_path):
    """The operating system itself refuses to write, in a process of its own."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); import rloo; "
        "rloo.command_line(sys.argv[1:])"
    )
    done = shell(["-c", code, *command(tiny, tmp_path / "out")], HERE)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        f"rloo.py: {tmp_path}/out/checkpoint-1 cannot be saved; free disk space"
    )
    assert not list((tmp_path / "out").glob("checkpoint*"))


def test_runs_killed_at_random_moments_and_resumed_end_like_one_that_was_not(tiny, tmp_path, monkeypatch):
    """SIGKILL, also during a save; benchmark/mini_tldr/kill_runs.py does the same more often."""
    monkeypatch.syspath_prepend(HERE / "benchmark" / "mini_tldr")
    import kill_runs

    counts = kill_runs.run(tmp_path / "kill", kills=5, seed=1, models=tiny, data=tiny / "data")
    assert counts["kills"] == 5 and counts["runs"] >= 1 and counts["differences"] == 0


# ----------------------------------------------------------------------------------------------------------------------
# A rollout engine of the user's


def engine_by_generate(model, prompt_ids, *, k, temperature, response_length, stop_ids, seed, version, max_length):
    """As a server would: one prompt after the other; log-probs for every second call only. Notes how it was called."""
    found, given = [], not os.environ.get("NO_LOGPROBS")
    assert max(map(len, prompt_ids)) + response_length <= max_length
    if "NOTES" in os.environ:
        with open(f"{os.environ['NOTES']}/calls", "a") as file:
            file.write(json.dumps([len(prompt_ids), k, temperature, seed, version]) + "\n")
    torch.manual_seed(seed)
    for ids in prompt_ids:
        batch, logprobs = rloo.rollout(model, [{"prompt_ids": ids}], k, temperature, response_length, stop_ids, "hf")
        lengths = batch.response_mask.sum(-1)[:, 0].tolist()
        found.append((batch.completion_ids(), [x[:n] for x, n in zip(logprobs[:, 0].tolist(), lengths)]))
    tokens, logprobs = zip(*found)
    return tokens, logprobs if given else None


@pytest.mark.parametrize("logprobs", [True, False])
def test_an_engine_of_ones_own_samples_for_updates_and_evaluations(train, tmp_path, monkeypatch, logprobs):
    monkeypatch.setenv("NOTES", str(tmp_path))
    if not logprobs:
        monkeypatch.setenv("NO_LOGPROBS", "1")
    for split, prompt in (("train", "a b"), ("test", "a b c d e")):  # max_length is that of all rows
        (tmp_path / f"{split}.jsonl").write_text(f'{{"prompt": "{prompt}"}}\n' * 16)
    metrics, _ = train(
        rollout_engine=f"{__file__}:engine_by_generate",
        dataset_name=str(tmp_path),
        total_episodes=32,
        num_eval_prompts=4,
        temperature=0.7,
    )
    assert [update["val/ratio"] for update in metrics] == [1, 1]
    assert all(update["val/rollout_logprob_gap"] < 1e-5 and update["grad_norm"] > 0 for update in metrics)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    prompts, k, temperature, seeds, versions = zip(*calls)
    assert (prompts, k) == ((4, 4, 8, 8, 4, 4), (1, 1, 2, 2, 1, 1)) and temperature == (0.7, 0, 0.7, 0.7, 0.7, 0)
    assert versions == (0, 0, 0, 1, 2, 2) and len({seeds[0], *seeds[2:4]}) == 3 and seeds[0] == seeds[4]


@pytest.mark.parametrize(
    "tokens, logprobs, message",
    [
        ([[[5, 0]]], None, r"must return 2 completions for each of 1 prompts, not \[1\]"),
        ([[[5, 0], [5, 16]]], None, "completion 1 .* it has 2 tokens, 2 log-probs"),
        ([[[5, 0], [5, 5, 16]]], None, "completion 1 .* must have 3 tokens of the model or"),
        ([[[5, 0], [5, 5]]], None, "completion 1 .* it has 2 tokens"),
        ([[[5, 0], [0, 0]]], None, "completion 1 .* or end with its first stop token"),
        ([[[5, 0], [5] * 4]], None, "completion 1 .* it has 4 tokens"),
        ([[[5, 0], []]], None, "completion 1 .* it has 0 tokens"),
        ([[[5, 0], [0]]], [[[0.0, 0.0], [0.0, 0.0]]], "completion 1 .* it has 1 tokens, 2 log-probs"),
        ([[[5, 0], [0]]], [[[0.0, math.nan], [0.0]]], "completion 0 .* one finite log-prob for each"),
        ([[[5, 0], [0]]], [[[0.0, 0.3], [0.0]]], "completion 0 .* one finite log-prob for each"),
        ([[[5.5, 0], [0]]], None, "completion 0 .* must have 3 tokens of the model or"),
    ],
)
def test_what_an_engine_may_not_return(tokens, logprobs, message):
    with pytest.raises(InputError, match=f"^--rollout_engine: {message}"):
        rloo.check_completions(tokens, logprobs, 1, 2, 3, [0], 16)
    rloo.check_completions([[[5, 0], [5, 5, 5]]], [[[0.0, 0.0], [0.0] * 3]], 1, 2, 3, [0], 16)


@pytest.mark.skipif(OLD_FSDP, reason="--sharding fsdp refuses this torch")
def test_two_processes_share_the_completions_of_one_engine(tiny, tmp_path):
    """The first rank calls it with the prompts of both, and with the whole policy, whose weights are sharded."""
    line = command(tiny, tmp_path / "out", per_device_train_batch_size=8, total_episodes=32, sharding="fsdp")
    line += ["--rollout_engine", f"{__file__}:engine_by_generate"]
    run = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "rloo.py", *line]
    done = shell(run, HERE, NOTES=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [json.loads(call)[0] for call in (tmp_path / "calls").read_text().splitlines()] == [8, 8]
    for update in read_metrics(tmp_path / "out"):
        assert update["val/rollout_logprob_gap"] < 1e-5 and update["val/ratio"] == 1


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
# More than one process


def ranked(decoder: rloo.Decoder, hidden: torch.Tensor):
    """In place of `Decoder.append`, no chance: completion j takes the j-th likeliest token."""
    logprobs = F.log_softmax(rloo.final_logits(decoder.model, hidden) / (decoder.temperature or 1.0), dim=-1)
    lanes = decoder.lanes.flatten()
    k = vars(decoder).setdefault("k", decoder.lanes.shape[1])  # before any lane has left
    j = lanes[:, None] % k
    tokens = logprobs.argsort(-1, descending=True).gather(1, j)
    tokens = tokens * (tokens % 5 > 0)  # some end
    decoder.tokens[lanes, decoder.t] = tokens.squeeze(1)
    decoder.logprobs[lanes, decoder.t] = logprobs.gather(1, tokens).squeeze(1)


def worker(rank: int, port: int, runs: list[dict], log: Path):
    """One rank of two: does the runs one after the other."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    torch.set_num_threads(1)
    rloo.Decoder.append, load_model = ranked, rloo.load_model

    def without_a_gradient(*args, **options):
        model = load_model(*args, **options)
        norm = model.base_model.final_layer_norm
        norm.forward = lambda x: F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias.detach(), norm.eps)
        return model

    for flags in runs:
        idle = rank == 1 and flags["output_dir"].endswith("idle")  # like an expert that no token of this rank goes to
        rloo.load_model = without_a_gradient if idle else load_model
        rloo.main(Args(**flags))
    rloo.dist.destroy_process_group()


def on_two_processes(runs: list[dict], folder: Path) -> list[Path]:
    """Does the runs on two processes and returns what each of them printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context, logs = multiprocessing.get_context("forkserver"), [folder / f"log{rank}" for rank in range(2)]
    context.set_forkserver_preload(["rloo"])
    processes = [context.Process(target=worker, args=(i, port, runs, log), daemon=True) for i, log in enumerate(logs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0, 0], [log.read_text()[-3000:] for log in logs]
    return logs


def test_fsdp_gathers_in_dtype_and_adds_gradients_up_in_float32(monkeypatch):
    model, policies = tiny_model(), []
    monkeypatch.setattr(rloo.dist, "init_device_mesh", lambda *args: None)
    monkeypatch.setattr(rloo.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(rloo.fsdp, "fully_shard", lambda module, mp_policy, **options: policies.append(mp_policy))
    monkeypatch.setattr(rloo.state_dict, "set_model_state_dict", lambda *args, **options: None)
    model.set_reduce_scatter_unused_params = lambda unused: None
    rloo.shard(model, torch.device("cpu"), torch.bfloat16)
    assert len(policies) == 3  # two layers and all the rest
    assert {(x.param_dtype, x.reduce_dtype) for x in policies} == {(torch.bfloat16, torch.float32)}


def runs_in(folder: Path, base: dict) -> tuple:
    """Two functions that give the flags of a run in a folder of its own: of a new one, and of one that goes on from
    checkpoint 2 of another."""

    def flags(name: str, size: int = 8, **more) -> dict:
        return {**base, "output_dir": str(folder / name), "per_device_train_batch_size": size, **more}

    def resumed(name: str, source: str, size: int = 8, **more) -> dict:
        shutil.copytree(folder / source, folder / name)
        shutil.rmtree(folder / name / "checkpoint-3")
        return flags(name, size, resume=True, **more)

    return flags, resumed


@pytest.mark.skipif(OLD_FSDP, reason="--sharding fsdp refuses this torch")
def test_two_processes_equal_one_and_their_checkpoints_fit_each_other(tiny, tmp_path, monkeypatch):
    """ddp and fsdp on gloo: three updates on the same prompts and completions, then two + one across numbers of
    processes and shardings, a model whose head is its embedding, and one that does not run in group rows (it samples by
    `generate`, so two processes are compared with two). In bfloat16 they run, with ratios of exactly 1."""
    base = {
        "dataset_name": str(tiny / "data"),
        "sft_model_path": str(tiny / "sft"),
        "rloo_k": 2,
        "response_length": 6,
        "reward_model_path": str(tiny / "reward"),
        "gradient_accumulation_steps": 2,
        "num_eval_prompts": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "adam_eps": 1e-4,
        "normalize_reward": True,
        "device": "cpu",
        "normalize_advantage": True,
        "missing_eos_penalty": 1.0,
        "save_steps": 1,
        "save_total_limit": 9,
        "total_episodes": 96,
    }
    fsdp, small = {"sharding": "fsdp"}, {"gradient_checkpointing": True}
    bfloat16, tied = {"dtype": "bfloat16", "total_episodes": 64}, {"sft_model_path": str(tmp_path / "tied model")}
    token = {
        "loss_aggregation": "token",
        "advantage_estimator": "reinforce",
        "kl_in_reward": False,
        "num_ppo_epochs": 2,
    }
    tiny_model("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path / "tied model")
    falcon = {"sft_model_path": str(tmp_path / "falcon"), "total_episodes": 64}
    any_model("falcon").save_pretrained(tmp_path / "falcon")
    # The first process gets all rows with a reference, and so twice as many chunks to grade.
    references = {"dataset_name": str(tmp_path / "data"), "local_rollout_forward_batch_size": 1, "total_episodes": 64}
    rows = [{"prompt": "a b c"} if i % 2 else {"prompt": "d e", "completion": "f"} for i in range(16)]
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("tied model", "falcon"):
        tiny_tokenizer().save_pretrained(tmp_path / name)

    flags, resumed = runs_in(tmp_path, base)

    monkeypatch.setattr(rloo.Decoder, "append", ranked)
    rloo.main(Args(**flags("one", 16)))
    rloo.main(Args(**flags("one, tied", 16, **tied)))
    rloo.main(Args(**flags("one, token", 16, **token)))
    runs = [
        flags("ddp"),
        flags("fsdp", **fsdp),
        flags("ddp, small", **small),
        flags("fsdp, small", **fsdp, **small),
        resumed("one to fsdp", "one", **fsdp),
        flags("fsdp, tied", **fsdp, **tied),
        flags("ddp, token", **token),
        flags("ddp, bfloat16", **bfloat16),
        flags("fsdp, bfloat16", **fsdp, **bfloat16),
        flags("ddp, idle", num_eval_prompts=1),
        flags("fsdp, idle", num_eval_prompts=1, **fsdp),
        flags("ddp, falcon", **falcon),
        flags("fsdp, falcon", **fsdp, **falcon),
        flags("ddp, references", **references),
        flags("fsdp, references", **fsdp, **references),
    ]
    logs = on_two_processes(runs, tmp_path)
    rloo.main(Args(**resumed("fsdp to one", "fsdp", 16)))

    def samples(name: str) -> list[str]:
        return [
            json.loads(line)["completion"] for line in (tmp_path / name / "completions.jsonl").read_text().splitlines()
        ]

    assert (final_weights(tmp_path / "one") - final_weights(tiny / "sft")).abs().max() > 1e-3
    for name in ("ddp", "ddp, small", "fsdp", "fsdp, small", "one to fsdp", "fsdp to one", "fsdp, tied", "ddp, token"):
        one = {"fsdp, tied": "one, tied", "ddp, token": "one, token"}.get(name, "one")
        assert (final_weights(tmp_path / one) - final_weights(tmp_path / name)).abs().max() < 1e-5, name
        for ours, theirs in zip(*(without_times(read_metrics(tmp_path / n)) for n in (one, name)), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4), name
            assert theirs["val/rollout_logprob_gap"] < 1e-5 and 0 < theirs["completions/clipped_ratio"] < 1
        evaluations = [read_metrics(tmp_path / n, "evaluations") for n in (one, name)]
        for ours, theirs in zip(*evaluations, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4), name
        assert samples(name) == samples(one), name
    for update in read_metrics(tmp_path / "ddp, bfloat16") + read_metrics(tmp_path / "fsdp, bfloat16"):
        assert (update["val/ratio"], update["policy/clipfrac_avg"]) == (1, 0)
        assert 0 < update["val/rollout_logprob_gap"] < 0.1
    assert len(read_metrics(tmp_path / "ddp, idle")) == 3 and samples("ddp, idle") == []
    for update in read_metrics(tmp_path / "ddp"):  # tokens and times of both processes
        seconds = sum(value for name, value in update.items() if name.startswith("time/"))
        assert update["tokens_per_second"] * seconds == pytest.approx(32 * update["completions/mean_length"])
    assert logs[0].read_text().count(", 0 to evaluate on, ") == 2
    for one, other in [(f"ddp, {x}", f"fsdp, {x}") for x in ("idle", "falcon", "references")]:
        assert (final_weights(tmp_path / one) - final_weights(tmp_path / other)).abs().max() < 1e-5, other


def note_prompts(prompts, completions, completion_ids, **columns):
    """Notes what each rank trains on, and a random number."""
    if prompts[0] == "b a b":  # held out
        return [0.0] * len(prompts)
    with open(f"{os.environ['NOTES']}/rank{os.environ['RANK']}", "a") as file:
        file.write(json.dumps([random.random(), prompts[: len(prompts) // 2]]) + "\n")
    return [float(len(prompt)) for prompt in prompts]


def test_torchrun_trains_on_different_prompts_and_one_process_speaks(tiny, tmp_path):
    data, settings = tmp_path / "data", {"per_device_train_batch_size": 8, "total_episodes": 32, "response_length": 40}
    data.mkdir()
    shutil.copy(tiny / "data" / "train.jsonl", data)
    (data / "test.jsonl").write_text('{"prompt": "b a b"}\n' * 6)
    line = command(tiny, tmp_path / "out", dataset_name=data, num_eval_prompts=6, **settings)
    done = shell(
        [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "rloo.py",
            *line,
            "--reward_fns",
            f"{__file__}:note_prompts",
        ],
        HERE,
        NOTES=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" s. Results: ") == 1
    assert [done.stderr.count(f"update {number} of 2: ") for number in (1, 2)] == [1, 1]
    noted = [json.loads(line) for rank in (0, 1) for line in (tmp_path / f"rank{rank}").read_text().splitlines()]
    assert len({number for number, _ in noted}) == len(noted) == 4  # no two of 2 ranks x 2 updates draw the same
    prompts = [json.loads(line)["prompt"] for line in (tiny / "data" / "train.jsonl").read_text().splitlines()]
    assert sorted(prompt for _, part in noted for prompt in part) == sorted(prompts)  # each of them once
    assert [update["episode"] for update in read_metrics(tmp_path / "out")] == [16, 32]
    held_out = [x["completion"] for x in read_metrics(tmp_path / "out", "completions") if x["mode"] == "sampled"]
    assert len(set(held_out[:6])) == 6  # equal prompts, other random numbers on each rank


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


# ----------------------------------------------------------------------------------------------------------------------
# What users tripped over


def from_a_pool(prompts, completions, completion_ids, **columns):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(time.sleep, [1.0])
    return count_a(prompts, completions, completion_ids)


def from_a_program(prompts, completions, completion_ids, **columns):
    """1, or 0 if the program is killed."""
    done = subprocess.run(["sleep", "1"], check=False)
    return [float(done.returncode == 0) + i / 1000 for i in range(len(prompts))]


CALLS = []


def stuck_in_the_second_update(prompts, completions, completion_ids, **columns):
    CALLS.append(0)
    if len(CALLS) == 2:
        time.sleep(1000)
    return count_a(prompts, completions, completion_ids)


@contextlib.contextmanager
def begun(tiny, folder: Path, function: str):
    """A run in a process group of its own, in its second update or later. It is killed at the end."""
    line = command(tiny, "out", total_episodes=10**4) + ["--reward_fns", f"{__file__}:{function}"]
    process = subprocess.Popen(
        [sys.executable, HERE / "rloo.py", *line],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    metrics = folder / "out" / "metrics.jsonl"
    try:
        while process.poll() is None and not (metrics.is_file() and metrics.read_text()):
            time.sleep(0.05)
        time.sleep(0.5)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.communicate()


@pytest.mark.parametrize("function, number", [("from_a_pool", 15), ("from_a_program", 2)])
def test_a_signal_to_all_processes_neither_hangs_nor_gives_wrong_rewards(tiny, tmp_path, function, number):
    """... as `timeout`, systemd or Ctrl-C in a terminal send it. A run's own processes live on, or their update is not
    made."""
    with begun(tiny, tmp_path, function) as process:
        os.killpg(process.pid, number)
        said, _ = process.communicate(timeout=40)
        assert process.returncode == 128 + number and "Traceback" not in said
    metrics = read_metrics(tmp_path / "out")
    (folder,) = (tmp_path / "out").glob("checkpoint-*")
    assert int(folder.name[11:]) == len(metrics) > 0
    scores = [update[f"rewards/{function}/mean"] for update in metrics]
    assert function == "from_a_pool" or scores == pytest.approx([1.0075] * len(scores))


def stuck_whatever_comes(*lists, **columns):
    try:
        return stuck_in_the_second_update(*lists, **columns)
    except KeyboardInterrupt:
        time.sleep(1000)


@pytest.mark.parametrize("function, saves", [("stuck_in_the_second_update", True), ("stuck_whatever_comes", False)])
def test_a_second_signal_saves_a_run_that_is_stuck_and_a_third_ends_it(tiny, tmp_path, function, saves):
    """... as when the first one has ended the processes of a spawned pool, whose results never come."""
    with begun(tiny, tmp_path, function) as process:
        process.send_signal(15)
        time.sleep(0.5)
        process.send_signal(15)  # with the first: `timeout` sends it to the process and then to its group
        time.sleep(0.8)
        assert process.poll() is None
        process.send_signal(15)  # over a second after the first, which counts, though not after the other
        if saves:
            said, _ = process.communicate(timeout=40)
            assert process.returncode == 1 and "KeyboardInterrupt: a second signal" in said
        else:
            time.sleep(1.2)
            assert process.poll() is None
            process.send_signal(15)
            assert process.wait(timeout=40) == 143
    assert [folder.name for folder in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"] * saves


@pytest.mark.parametrize("spec", ["mine.py:shorter", "mine:shorter"])
def test_a_reward_function_may_be_in_the_script_that_runs(tiny, tmp_path, spec):
    """... which is not run again, as an import would."""
    (tmp_path / "mine.py").write_text(
        f"import sys\nsys.path.append({str(HERE)!r})\nimport rloo\nprint('begins')\n"
        "def shorter(prompts, completions, completion_ids, **columns):\n"
        "    return [-len(text) for text in completions]\nrloo.command_line()\n"
    )
    line = command(tiny, "out", reward_model_path=None, reward_fns=spec)
    done = shell(["mine.py", *line], tmp_path)
    assert done.returncode == 0 and done.stdout.count("begins") == 1, done.stderr
    assert read_metrics(tmp_path / "out")[0]["rewards/shorter/mean"] < 0


def test_a_signal_before_an_evaluation_is_not_made_to_wait_for_it(train, tmp_path, monkeypatch):
    told, evaluated = Signal(2), []
    flags = LONG | {"save_steps": 0, "total_episodes": 32, "output_dir": str(tmp_path / "out")}
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        spy(patch, "update", told.count)
        spy(patch, "evaluate", lambda inputs, output: evaluated.append(inputs[-1]) or output)
        train(**flags, signals=told)  # in the last update
    assert evaluated == ["sampled", "greedy"]  # before training
    assert [path.name for path in rloo.checkpoints(tmp_path / "out")] == ["checkpoint-2"]
    train(**flags, resume=True)
    assert end_of(tmp_path / "out") == end_of(train(**flags | {"output_dir": str(tmp_path / "whole")})[1])


def test_a_script_that_replaces_functions_is_said_and_so_is_that_it_was_edited(tiny, tmp_path):
    """Without a script of one's own, nothing is said."""
    text = f"import sys\nsys.path.append({str(HERE)!r})\nimport rloo\ndef advantage(rewards, estimator):\n"
    text += "    return {}rewards - rewards.mean(0)\nrloo.advantage = advantage\nrloo.command_line()\n"

    def said(script: str, *flags: str) -> str:
        done = shell([script, *command(tiny, "out"), *flags], tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "mine.py").write_text(text.format(""))
    assert ", replaced by mine.py: advantage\n" in said("mine.py")
    assert json.loads((tmp_path / "out" / "args.json").read_text())["made_by"]["script"] == "mine.py"
    assert "changed: nothing\n" in said("mine.py", "--resume")
    (tmp_path / "mine.py").write_text(text.format("2 * "))
    assert "changed: script " in said("mine.py", "--resume")
    shutil.rmtree(tmp_path / "out")
    assert "replaced" not in said(str(HERE / "rloo.py"))
    assert "changed: script " in said("mine.py", "--resume")


def test_a_reward_of_a_wrong_shape_is_one_line():
    with pytest.raises(InputError) as error:
        rloo.function_reward(
            "--reward_fns r", lambda **columns: rloo.np.zeros((12, 2)), tiny_tokenizer(), random_batch()
        )
    line = rloo.one_line(error.value)
    assert "\n" in str(error.value) and "\n" not in line and "12 finite numbers or Nones, not array([[0., 0.]," in line


def test_an_update_without_a_step_is_saved_and_resumed(train, monkeypatch):
    """... as of an objective that skips batches: saving makes a step of its own, which must not count."""
    values = {name: torch.ones(1) for name in ("val/ratio", "grad_norm")}
    with monkeypatch.context() as patch:
        patch.setattr(rloo, "improve", lambda *inputs: dict(values))
        _, output = train(save_steps=1)
    assert json.loads((rloo.newest_checkpoint(output) / "state.json").read_text())["update"] == 1
    metrics, _ = train(save_steps=1, resume=True, total_episodes=32, output_dir=str(output))
    assert [found["update"] for found in metrics] == [1, 2]


def test_a_misspelled_replacement_is_refused_and_any_callable_counts(monkeypatch, train):
    with monkeypatch.context() as patch:
        patch.setattr(rloo, "advantage", partial(rloo.advantage, estimator="drgrpo"))
        patch.setattr(rloo, "policy_loss", json.dumps)  # of another module
        assert sorted(rloo.replaced_names()) == ["advantage", "policy_loss"]
        patch.setattr(rloo, "advantges", rloo.advantage, raising=False)
        with pytest.raises(InputError, match="replaces advantges, but rloo.py has nothing of this name"):
            train()
    assert rloo.replaced_names() == []


def test_a_reward_file_that_was_edited_is_said_when_a_run_is_resumed(train, tmp_path, capsys):
    (tmp_path / "graded.py").write_text("def f(prompts, *lists, **columns):\n    return [1.0] * len(prompts)\n")
    flags = {"reward_fns": (f"{tmp_path}/graded.py:f",), "output_dir": str(tmp_path / "out"), "save_steps": 1}
    train(**flags)
    capsys.readouterr()
    train(**flags, resume=True, total_episodes=32, save_total_limit=1)
    said = capsys.readouterr().out
    assert "functions" not in said and "save_total_limit 2 -> 1" in said and "evaluation before" not in said
    flags["save_total_limit"] = 1
    (tmp_path / "graded.py").write_text("def f(prompts, *lists, **columns):\n    return [2.0] * len(prompts)\n")
    train(**flags, resume=True, total_episodes=48)
    said = capsys.readouterr().out
    assert (
        "changed: total_episodes 32 -> 48, functions " in said
        and "the closing table is without the evaluation before" in said
    )


def starts_a_spawned_process(prompts, completions, completion_ids, **columns):
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return count_a(prompts, completions, completion_ids)


def test_a_spawned_process_of_a_reward_function_does_not_run_the_script_again(tiny, tmp_path):
    text = f"import sys\nsys.path.append({str(HERE)!r})\nimport rloo\nrloo.command_line()\n"
    (tmp_path / "mine.py").write_text(text)
    line = [*command(tiny, "out", total_episodes=0, num_eval_prompts=2), "--reward_fns"]
    done = shell(["mine.py", *line, f"{__file__}:starts_a_spawned_process"], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_second_signal_interrupts_only_functions_of_the_user():
    """Elsewhere it would drop an update that is about to be complete."""
    frames = []

    def note(*lists, **columns):
        frames.append(inspect.currentframe())
        return [0.0]

    batch = rloo.make_batch([rloo.prepare_row({"prompt": "b"}, tiny_tokenizer())], torch.tensor([[[1]]]), [1])
    rloo.function_reward("--reward_fns x", note, tiny_tokenizer(), batch)
    assert rloo.in_function_of_user(frames[0]) and not rloo.in_function_of_user(inspect.currentframe())


def test_an_evaluation_is_not_overwritten_by_another(train, tmp_path):
    flags = {"total_episodes": 0, "num_eval_prompts": 2, "output_dir": str(tmp_path / "out")}
    train(**flags, resume=True)  # there is nothing to resume yet
    before = snapshot(tmp_path / "out")
    for resume, why in ((False, "is not empty; choose a new folder"), (True, "has no checkpoint to evaluate")):
        with pytest.raises(InputError, match=why):
            train(**flags, seed=5, resume=resume)
        assert snapshot(tmp_path / "out") == before
    for name in ("evaluations.jsonl", "completions.jsonl"):  # as of a run that was killed in its evaluation
        (tmp_path / "out" / name).write_text("")
    train(**flags)
    assert (tmp_path / "out" / "evaluations.jsonl").read_text()


def test_the_handlers_of_signals_are_those_of_before_after_a_run(tiny, tmp_path, capsys):
    before = [signal.getsignal(number) for number in (2, 15, 1)]
    rloo.command_line(command(tiny, tmp_path / "out", total_episodes=0))
    with pytest.raises(SystemExit):
        rloo.command_line(["--rloo_k", "1"])
    assert [signal.getsignal(number) for number in (2, 15, 1)] == before


def from_a_session(prompts, completions, completion_ids, **columns):
    """As graders of code do, so that they can end all that a program has started."""
    subprocess.run(["true"], preexec_fn=os.setsid, check=True)
    return count_a(prompts, completions, completion_ids)


def test_a_reward_function_may_start_sessions(tiny, tmp_path):
    line = command(tiny, tmp_path / "out", num_eval_prompts=2, total_episodes=0)
    rloo.command_line([*line, "--reward_fns", f"{__file__}:from_a_session"])
    assert len(read_metrics(tmp_path / "out", "completions")) == 4


def test_a_run_whose_output_nobody_reads_any_more_is_saved(train, tmp_path, monkeypatch):
    write = rloo.tqdm.write

    def broken(text, *where, **options):
        if "3 of 4" in text or "ended by BrokenPipeError" in text:
            raise BrokenPipeError(32, "Broken pipe")
        write(text, *where, **options)

    monkeypatch.setattr(rloo.tqdm, "write", broken)
    with pytest.raises(BrokenPipeError):
        train(**LONG | {"save_steps": 0}, output_dir=str(tmp_path / "out"))
    assert [folder.name for folder in rloo.checkpoints(tmp_path / "out")] == ["checkpoint-3"]


def test_a_model_with_adapters_beside_it_is_refused(train, tiny, tmp_path):
    """transformers would add them if peft is there, ignore them if not, and save no more than the adapters."""
    shutil.copytree(tiny / "sft", tmp_path / "sft")
    (tmp_path / "sft" / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=f"^--sft_model_path {tmp_path / 'sft'}: has adapters; merge them"):
        train(sft_model_path=str(tmp_path / "sft"))


@pytest.mark.parametrize("name, update", [("rollout", 1), ("score", 1), ("policy_loss", 1), ("average_gradients", 2)])
def test_a_signal_before_an_update_s_first_step_drops_that_update(train, tmp_path, monkeypatch, name, update):
    """... in its second update of four; after its step it is finished. A resumed run ends like any other."""
    flags = {**LONG, "save_steps": 0, "num_eval_prompts": 0}
    whole = end_of(train(**flags)[1])
    calls_before = {"rollout": 1, "score": 1, "policy_loss": 2, "average_gradients": 3}
    told = Signal(calls_before[name] + 1)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        spy(patch, name, told.count)
        train(**flags, output_dir=str(tmp_path / "out"), signals=told)
    assert [folder.name for folder in rloo.checkpoints(tmp_path / "out")] == [f"checkpoint-{update}"]
    assert len(read_metrics(tmp_path / "out")) == update
    train(**flags, output_dir=str(tmp_path / "out"), resume=True)
    assert end_of(tmp_path / "out") == whole


def test_an_evaluation_in_which_a_signal_came_is_not_written(train, tmp_path, monkeypatch):
    """It may have killed processes of a reward function."""
    told = Signal(2)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        spy(patch, "score", told.count)
        train(output_dir=str(tmp_path / "out"), num_eval_prompts=4, signals=told)
    assert read_metrics(tmp_path / "out", "evaluations") == read_metrics(tmp_path / "out", "completions") == []


def llama_tokenizer(add_eos: bool = False) -> PreTrainedTokenizerFast:
    """Pieces of words as SentencePiece has them: decoding drops the space before the first."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁a", "▁the", "▁cat", "s", "▁b"]

    backend = Tokenizer(models.Unigram([(piece, -float(len(piece) < 2)) for piece in pieces], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    single = ["<s>", "$A", "</s>"] if add_eos else ["<s>", "$A"]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_the_space_at_the_beginning_of_a_completion_reaches_reward_functions():
    tokenizer = llama_tokenizer()
    row = rloo.prepare_row({"prompt": "b"}, tokenizer)
    responses = torch.tensor([[[5, 6, 2, 0], [6, 7, 5, 6]], [[7, 5, 2, 0], [2, 0, 0, 0]]])
    batch = rloo.make_batch([row, row], responses, [2])
    assert tokenizer.decode([5, 6]) == "the cat" and tokenizer.decode([8, 5, 6]) == "b the cat"
    assert rloo.completion_texts(batch, tokenizer) == [" the cat", " cats the cat", "s the", ""]


def test_references_and_stop_tokens_follow_a_text_so_they_have_no_space_before_them():
    tokenizer = llama_tokenizer()
    assert tokenizer("s the")["input_ids"] == [1, 3, 7, 5]
    for reference, ids in (("s the", [7, 5]), (" the s", [5, 3, 7]), ("", [])):
        row = rloo.prepare_row({"prompt": "b", "completion": reference}, tokenizer)
        assert row["reference_ids"] == ids, reference
        graded = rloo.make_batch([row], torch.tensor([[[*ids, 2]]]), [2])
        assert rloo.completion_texts(graded, tokenizer) == [reference]
    model = tiny_model()
    assert rloo.stop_token_ids(Args(stop_token="s"), model, tokenizer) == [7]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match="must name one of"):
        patch.setattr(rloo, "continuation_ids", lambda *_: [3])  # the token of a space, as nmt's normalizer makes it
        rloo.stop_token_ids(Args(stop_token="\n"), model, tokenizer)
    words = tiny_tokenizer()  # it knows no line break, nor a word after one
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    assert rloo.continuation_ids("b", words) == words("b")["input_ids"] != []
    merging = {"\n": [1], "\nab": [2, 3], "ab": [4, 3]}  # which has a token for a line break and the next letter
    assert rloo.continuation_ids("ab", lambda text, **options: {"input_ids": merging[text]}) == [4, 3]


def test_the_chat_template_gets_the_row_s_tools_and_arguments():
    tokenizer, row = chat_tokenizer(), {"prompt": [USER], "tools": [{"name": "f"}], "chat_template_kwargs": {"d": "e "}}
    tokenizer.chat_template = "{{ d }}{% if tools %}{{ tools[0]['name'] }} {% endif %}" + tokenizer.chat_template
    assert rloo.prepare_row(row, tokenizer)["prompt_text"] == "e f u b c a"
    assert rloo.prepare_row({"prompt": [USER], "tools": None}, tokenizer)["prompt_text"] == "u b c a"


def test_an_assistant_s_message_at_the_end_of_a_prompt_is_continued():
    prompt = [USER, {"role": "assistant", "content": "d f"}]
    assert rloo.prepare_row({"prompt": prompt}, chat_tokenizer())["prompt_text"] == "u b c a d f"


def leaves(prompts, completions, completion_ids, updates_done, **columns):
    return [1.0, 2.0] * (len(prompts) // 2) if updates_done < 2 else sys.exit(0)


def test_a_reward_function_that_exits_loses_no_update(train, tmp_path):
    """... as code of a completion that it runs may."""
    run = {**LONG, "save_steps": 0, "num_eval_prompts": 0, "reward_fns": (f"{__file__}:leaves",)}
    with pytest.raises(RuntimeError, match=r"ended by SystemExit\(0\)") as error:
        train(**run, reward_model_path=None, output_dir=str(tmp_path / "out"))
    assert isinstance(error.value.__cause__, SystemExit)  # whose trace shows the call
    assert [folder.name for folder in rloo.checkpoints(tmp_path / "out")] == ["checkpoint-2"]


def test_the_tokenizer_puts_nothing_after_a_prompt_and_no_second_bos_before_it():
    for add_eos in (False, True):
        tokenizer = llama_tokenizer(add_eos)
        assert tokenizer("b")["input_ids"] == ([1, 8, 2] if add_eos else [1, 8])
        for text, ids in (("b", [1, 8]), ("<s> b", [1, 8]), ("the cats", [1, 5, 6, 7]), ("b</s>", [1, 8, 2])):
            assert rloo.prepare_row({"prompt": text}, tokenizer)["prompt_ids"][: len(ids)] == ids, text
            assert rloo.prepare_row({"prompt": text}, tokenizer)["prompt_ids"].count(1) == 1
            assert "</s>" in text or 2 not in rloo.prepare_row({"prompt": text}, tokenizer)["prompt_ids"]
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
    assert rloo.prepare_row({"prompt": [{"role": "user", "content": " b"}]}, tokenizer)["prompt_ids"] == [1, 8, 2]
    tokenizer = llama_tokenizer(add_eos=True)
    tokenizer.eos_token, tokenizer.sep_token = None, "</s>"  # as BERT's
    assert [rloo.prepare_row({"prompt": x}, tokenizer)["prompt_ids"][-1] for x in ("b", "b</s>")] == [8, 2]


def test_a_checkpoint_s_evaluation_stays_when_the_run_goes_on_with_more_episodes(train, tmp_path):
    """... also that of an unfinished run, though the longer one would not have it."""
    run = LONG | {"total_episodes": 16 * 12, "num_sample_generations": 2, "num_eval_prompts": 2}
    output, told = tmp_path / "out", []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        spy(patch, "write_evaluation", lambda inputs, output: (inputs[2] == 5 and told.append(15), output)[1])
        train(**run, output_dir=str(output), signals=told)
    assert [x["update"] for x in read_metrics(output, "evaluations")] == [0, 5]
    train(**run | {"total_episodes": 16 * 30}, output_dir=str(output), resume=True)
    assert [x["update"] for x in read_metrics(output, "evaluations")] == [0, 5, 10, 20, 30]
    assert rloo.evaluation_modes(5, 0, 5, ["sampled"])[5] == ["sampled", "greedy"]  # where it has become the last one


def test_a_finished_run_that_goes_on_keeps_its_last_evaluation(train, monkeypatch):
    run = LONG | {"total_episodes": 32, "save_steps": 0}
    _, output = train(**run)
    before = [read_metrics(output, name) for name in ("evaluations", "completions")]
    graded = spy(monkeypatch, "evaluate")
    train(**run | {"total_episodes": 64}, output_dir=str(output), resume=True)
    after = [read_metrics(output, name) for name in ("evaluations", "completions")]
    assert [x["update"] for x in after[0]] == [0, 2, 4] and len(graded) == 4
    for old, new in zip(before, after, strict=True):
        assert new[: len(old)] == old and len(new) > len(old)
    assert [x["mode"] for x in after[1] if x["update"] == 2] == ["sampled"] * 4 + ["greedy"] * 4


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_a_warm_up_does_not_begin_at_0_and_leaves_what_follows_as_it_was(schedule):
    model = torch.nn.Linear(1, 1)

    def rates(updates, **flags):
        args = rloo.resolve_args(Args(lr_scheduler_type=schedule, learning_rate=1.0, device="cpu", **flags))
        _, rate = rloo.make_optimizer(args, model, updates)
        return [rate(done) for done in range(updates)]

    assert rates(1, warmup_ratio=0.1)[0] > 0
    found = rates(10, warmup_ratio=0.3)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    (factor,) = get_scheduler(name, optimizer, 3, 10).lr_lambdas
    assert found[:4] == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1])
    assert found[3:] == pytest.approx([factor(i) for i in range(3, 10)], rel=1e-12)
    assert rates(10, warmup_ratio=0.9)[:9] == pytest.approx([i / 10 for i in range(1, 10)])


@pytest.mark.parametrize("returned", [{float(i) for i in range(12)}, dict.fromkeys(range(12), 1.0), iter([1.0] * 12)])
def test_a_reward_function_may_not_return_what_has_no_order(returned):
    """... or is not computed yet, as what a generator returns."""
    with pytest.raises(InputError, match="^--reward_fns r must return a list of 12 finite numbers or Nones"):
        rloo.function_reward("--reward_fns r", lambda **kw: returned, tiny_tokenizer(), random_batch())


@pytest.mark.parametrize(
    "flags, said",
    [({}, True), ({"advantage_estimator": "reinforce"}, False), ({"missing_eos_penalty": 3.0}, False)],
)
def test_equal_scores_are_no_mistake_where_something_else_tells_completions_apart(train, capfd, flags, said):
    function = f"{__file__}:constant_for_even_rows" if "advantage_estimator" in flags else f"{__file__}:constant_reward"
    metrics, _ = train(reward_model_path=None, reward_fns=(function,), kl_coef=0.0, **flags)
    assert ("gave hardly any learning signal" in "".join(capfd.readouterr())) == said == (metrics[0]["grad_norm"] == 0)


def test_a_screen_that_is_not_utf_8_shows_samples(tiny, tmp_path):
    done = shell(
        [HERE / "rloo.py", *command(tiny, "out", num_eval_prompts=4)], tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C"
    )
    assert done.returncode == 0 and "held-out prompts, mean ?" in done.stdout, done.stderr


def two_by_length(prompts, completions, completion_ids, n, **columns):
    """None for every second row."""
    return [float(len(ids)) if row % 2 else None for ids, row in zip(completion_ids, n)]


def test_evaluations_and_samples_say_each_reward_and_the_columns(train, capsys):
    functions = (f"{__file__}:count_tokens", f"{__file__}:two_by_length")
    _, output = train(reward_model_path=None, reward_fns=functions, total_episodes=0, num_eval_prompts=4)
    samples, (evaluation,) = read_metrics(output, "completions"), read_metrics(output, "evaluations")
    assert [sample["columns"]["n"] for sample in samples] == [16, 17, 18, 19] * 2
    for sample in samples:
        assert sample["columns"].keys() == {"prompt", "completion", "n"}
        assert sample["rewards/count_tokens"] == sample["length"]
        assert sample["rewards/two_by_length"] == (sample["length"] if sample["columns"]["n"] % 2 else None)
    odd = [sample["length"] for sample in samples[:4] if sample["columns"]["n"] % 2]
    assert evaluation["sampled/rewards/count_tokens"] == mean(sample["length"] for sample in samples[:4])
    assert evaluation["sampled/rewards/two_by_length"] == mean(odd)
    assert not any("win_rate" in name and "rewards" in name for name in evaluation)
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    assert ["n", "16"] in lines and ["rewards/count_tokens", f"{samples[0]['length']:.2f}"] in lines
    assert [line[0] for line in lines if "±" in line].count("greedy/rewards/two_by_length") == 1
    assert "columns  " not in said

    _, output = train(total_episodes=0, num_eval_prompts=4)  # one reward: it is the score
    assert not any("rewards/" in name for x in read_metrics(output, "evaluations") for name in x)


def test_a_column_that_json_does_not_know_is_written_as_text(tmp_path):
    rloo.append(tmp_path, "completions.jsonl", [{"columns": {"when": Path("x")}}])
    assert read_metrics(tmp_path, "completions") == [{"columns": {"when": "x"}}]


UPDATES_DONE = []


def by_progress(prompts, completions, completion_ids, n, updates_done, **columns):
    assert "updates_done" not in columns
    UPDATES_DONE.append(updates_done)
    return [len(ids) * (1.0 + updates_done) for ids in completion_ids]


def test_reward_functions_may_ask_how_many_updates_are_done(train):
    """... in evaluations too; a resumed run continues to count."""
    flags = {**LONG, "num_eval_prompts": 2, "save_steps": 3}
    seen = rloo.load_functions([f"{__file__}:by_progress"], "reward_fns", None, {"columns": {"n": 0}})
    called = sys.modules[seen["by_progress"].args[1].__module__].UPDATES_DONE
    called.clear()
    flags |= {"reward_model_path": None, "reward_fns": (f"{__file__}:by_progress",)}
    _, output = train(**flags)
    assert called == [0, 0, 0, 1, 2, 3, 4, 4]
    shutil.rmtree(output / "checkpoint-4")
    called.clear()
    train(**flags, output_dir=str(output), resume=True)
    assert called == [3, 4, 4]
    with pytest.raises(InputError, match="rename its column `updates_done`"):
        (output / "x.jsonl").write_text(json.dumps({"prompt": "a", "updates_done": 1}) + "\n")
        rloo.load_data(Args(dataset_name=str(output / "x.jsonl")), tiny_tokenizer())


def test_what_is_said_about_prompts_before_training(tmp_path, capsys):
    rloo.say_once.cache_clear()
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "n": 1}\n' + '{"prompt": "a"}\n' * 11)
    rows, _ = rloo.load_data(Args(dataset_name=str(tmp_path / "x.jsonl")), chat_tokenizer())
    assert capsys.readouterr().out.count("text prompts are read as they are, without the chat template") == 1
    assert [row["columns"]["n"] for row in rows] == [1, *[None] * 10]  # which is not said

    rloo.say_once.cache_clear()
    rloo.prepare_row({"prompt": [USER]}, chat_tokenizer())
    rloo.prepare_row({"prompt": "b"}, tiny_tokenizer())
    assert capsys.readouterr().out == ""
    with pytest.raises(InputError, match=r"^x, row 1: needs .*\(ValueError: .*chat_template is not set"):
        rloo.prepare_rows([{"prompt": [SYSTEM, USER]}], tiny_tokenizer(), 9, "x")


def test_a_run_that_destroys_its_policy_is_told_so(train, capfd):
    train(learning_rate=1.0, total_episodes=48)
    assert "".join(capfd.readouterr()).count("above 1 nat per token") == 1
    train(learning_rate=1e-4, total_episodes=48)
    assert "nat per token" not in "".join(capfd.readouterr())


def test_updates_that_wait_for_the_cores_are_explained_once(train, capfd, monkeypatch):
    for seconds, threads, times in ((1000, 2, 0), (0, 1, 0), (0, 2, 1)):  # of CPU time between two readings
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            patch.setattr(time, "process_time", itertools.count(0, seconds).__next__)
            train(total_episodes=48)
        assert "".join(capfd.readouterr()).count("OMP_WAIT_POLICY=PASSIVE") == times


def test_other_trainers_names_of_flags_parse_and_help_does_not_show_them(capsys):
    args = parse(
        "--num_generations 8 --beta 0.1 --num-iterations 3 --epsilon 0.1 --epsilon_high 0.3 "
        "--max_completion_length 99 --lr 1e-3"
    )
    assert (args.rloo_k, args.kl_coef, args.num_ppo_epochs, args.response_length) == (8, 0.1, 3, 99)
    assert (args.cliprange, args.cliprange_high, args.learning_rate) == (0.1, 0.3, 1e-3)
    with pytest.raises(SystemExit):
        rloo.parse_args(["--help"])
    said = capsys.readouterr().out
    shown = re.findall(r"--(\w+)", said)
    args = parse("--max_new_tokens 77 --run-name mine")
    assert (args.response_length, args.exp_name) == (77, "mine")
    assert not {name.strip("_") for name in rloo.ALIASES} & {*shown} and "rloo_k" in shown
    assert "default: None" not in re.sub(r"\(default:\s+(│\s+│\s+)?None\)", "", said)
    assert "default" not in re.sub(r"\(default:.*?\)", "", said, flags=re.DOTALL)  # one default per flag
    for word in ("siblings", "drgrpo", "sequence-mean", "evaluations"):
        assert word in said


def test_functions_are_named_after_one_flag_and_with_their_names(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b2.py").write_text("def f(**columns): pass\n")
    line = command(tiny, tmp_path / "out")
    for more, message in (
        (["--reward_fns", "b2.py:f", "--reward_fns", "b2.py:f"], "name all functions after one"),
        (["--reward_fns=b2.py:f", "--reward-fns", "b2.py:f"], "name all functions after one"),
        (["--reward_fns", "b2.py"], "add :function"),
    ):
        with pytest.raises(SystemExit) as end:
            rloo.command_line(line + more)
        assert end.value.code.startswith("rloo.py: --reward_fns") and message in end.value.code


def test_weights_that_the_last_step_made_infinite_are_not_saved(train, tmp_path):
    with pytest.raises(InputError, match="^a weight is not finite: lower --learning_rate"):
        train(learning_rate=1e39, output_dir=str(tmp_path / "out"))
    assert not list((tmp_path / "out").glob("**/*.safetensors"))
    with pytest.raises(InputError, match="^a number is not finite"):
        rloo.require_finite("a number", torch.tensor([1.0, math.inf]))


def test_a_run_that_goes_on_while_another_one_loads_is_not_overwritten(train, tmp_path, monkeypatch):
    flags = {"output_dir": str(tmp_path / "out"), "resume": True, "save_steps": 1, "save_total_limit": 9}
    train(**flags, total_episodes=32)
    load_policy = rloo.load_policy

    def while_another_trains(*args):
        monkeypatch.setattr(rloo, "load_policy", load_policy)
        train(**flags, total_episodes=64)
        return load_policy(*args)

    monkeypatch.setattr(rloo, "load_policy", while_another_trains)
    with pytest.raises(InputError, match="another run has saved a checkpoint since this one began to load; start it"):
        train(**flags, total_episodes=80)
    assert len(read_metrics(tmp_path / "out")) == 4
    train(**flags, total_episodes=80)  # the refused run has let go of the folder
    assert len(read_metrics(tmp_path / "out")) == 5


def test_samplers_that_disagree_with_training_are_said(train, monkeypatch, capfd):
    rollout = rloo.rollout

    def other_sampler(*args, **options):
        batch, logprobs = rollout(*args, **options)
        return batch, (logprobs - 0.2) * batch.response_mask

    monkeypatch.setattr(rloo, "rollout", other_sampler)
    train()
    assert "sampling and training disagree about log-probs" in "".join(capfd.readouterr())


def test_a_screen_that_is_no_terminal_gets_a_line_per_update(train, tmp_path, capfd, monkeypatch):
    train(total_episodes=48, num_eval_prompts=4)
    said = capfd.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("update ")]
    assert [line.partition(":")[0] for line in lines] == [f"update {n} of 3" for n in (1, 2, 3)]
    assert all(re.fullmatch(r"update . of 3: score=\S+, kl=\S+, eval_score=\S+", line) for line in lines)
    assert "update/s" not in said.err

    (tmp_path / "x.jsonl").write_text('{"prompt": "b c"}\n' * 30)  # without references
    train(dataset_name=str(tmp_path / "x.jsonl"), num_eval_prompts=3, kl_coef=0.0)
    said = capfd.readouterr()
    assert "win" not in said.err and "win_rate  " not in said.out and "None" not in said.out

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    train()
    said = capfd.readouterr()
    assert "1/1" in said.err and "kl=" in said.err and "update 1 of" not in said.err


def test_args_json_says_what_a_run_was_made_by(train):
    _, output = train(total_episodes=0)
    written = json.loads((output / "args.json").read_text())
    made_by = written.pop("made_by")
    assert made_by["torch"] == torch.__version__ and made_by["transformers"] == transformers.__version__
    assert made_by["rloo.py"] == hashlib.sha256((HERE / "rloo.py").read_bytes()).hexdigest()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert made_by["git"] == commit and time.strptime(made_by["time"], "%Y-%m-%d %H:%M:%S")
    assert written["device"] == rloo.resolve_args(Args()).device and written.keys() == vars(Args()).keys()


def test_a_policy_that_was_changed_by_hand_is_named():
    policy = tiny_model()
    policy.extra = torch.nn.Linear(3, 3)
    with pytest.raises(InputError, match="other weights than a model of its config"):
        rloo.sampling_model(policy, torch.bfloat16)


@pytest.mark.parametrize("flag", ["adam_eps", "reward_clip_range"])
def test_0_is_refused_where_it_would_give_nan_or_train_on_the_kl_alone(flag):
    args = rloo.resolve_args(parse(f"--{flag} 0"))
    with pytest.raises(InputError, match=f"^--{flag} 0.0: must be finite and at least"):
        rloo.check_args(args)
