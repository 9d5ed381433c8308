"""Tests of rloo.py. They build tiny random models, need no network and no GPU, and read from top to bottom.

First the formulas against loops, and whole updates against a second implementation in the plainest Python; then group
rows and the decoder against a row per completion, and what other trainers got wrong; at the end whole runs. Extensions
have their tests in benchmark/extensions; screens, signals from outside and trackers, in benchmark/metrics.
"""

import asyncio
import contextlib
import datetime
import functools
import importlib.util
import inspect
import io
import itertools
import json
import math
import multiprocessing.forkserver
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: a name that is no folder is not asked for

import pytest
import torch
import torch.nn.functional as F
import transformers
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    get_scheduler,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import rloo
from rloo import Args, Batch, InputError

WORDS = [*"abcdefghijklm"]  # with eos, pad and unknown: a vocabulary of 16
CPU = torch.device("cpu")
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
HEADS = SIZE | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 4, "intermediate_size": 64, "first_k_dense_replace": 2}
FAMILIES = {  # multi-head, multi-query, grouped-query attention, and a mixture of experts
    "gpt_neox": SIZE | {"intermediate_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3},
    "llama": SIZE | {"num_key_value_heads": 1, "intermediate_size": 64},
    "qwen3": HEADS,
    "qwen3_moe": HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
GROUP_ROWS = {  # others that can
    "cohere": HEADS | {"logit_scale": 0.4},
    "deepseek_v2": SIZE | LATENT,  # values are smaller than keys
    "granite": HEADS | {"logits_scaling": 3.0},
    # Is its own base_model, and its routers are linear layers that return a tuple.
    "llama4_text": HEADS | {"num_local_experts": 4, "intermediate_size_mlp": 32, "layer_types": ["full_attention"] * 2},
}
PLAIN_ROWS = {  # those that cannot run group rows
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},  # ALiBi
    "falcon": SIZE,  # attention of its own
    "gemma2": HEADS | {"final_logit_softcapping": 2.0, "sliding_window": 12},  # no sdpa
    "mistral": HEADS | {"sliding_window": 12},  # a window shorter than prompt and completion
    "stablelm": HEADS,  # its layers do not hand on how rows are laid out
}
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 0)
ARCHITECTURES = FAMILIES | GROUP_ROWS | PLAIN_ROWS


def tiny_model(family: str = "gpt_neox", seed: int = 0, classifier: bool = False, as_it_comes: bool = False, **config):
    """With random weights, in group rows if the family can, unless it is wanted as transformers makes it."""
    torch.manual_seed(seed)
    tokens = {"vocab_size": 3 + len(WORDS), "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    config = AutoConfig.for_model(family, **ARCHITECTURES.get(family, {}) | tokens | config)
    if classifier:
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    model.layout = "plain"
    if family not in PLAIN_ROWS and not as_it_comes:
        model.layout = "group"
        model.set_attn_implementation(rloo.GROUP_KERNEL)
    return model


def random_batch(k: int = 3, B: int = 4, T: int = 6, vocab: int = 16, seed: int = 0, max_prompt: int = 9) -> Batch:
    """Prompts of unequal length; completions that meet the stop token (0) early, late or never."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.randint(2, max_prompt))] for _ in range(B)]
    rows = [{"prompt": "", "prompt_ids": ids, "columns": {}} for ids in prompts]
    responses = torch.randint(3, vocab, (k, B, T), generator=torch.Generator().manual_seed(seed))
    for j, b in itertools.product(range(k), range(B)):
        if (stop := rng.randint(0, T + 1)) < T:
            responses[j, b, stop] = 0
    return rloo.make_batch(rows, responses, stop_ids=[0])


def sample_batch(model, rows, k: int, temperature: float, T: int, stop_ids: list[int], **flags):
    """k completions of each row's prompt by a rollout: a Batch and the log-probs of its tokens."""
    args = Args(response_length=T, temperature=temperature or 1.0, device="cpu", dtype="float32", **flags)
    return rloo.rollout(args, model, rows, k, temperature, stop_ids)


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save(folder: Path, *parts) -> str:
    """Saves models and tokenizers; returns the folder as a flag's value."""
    for part in parts:
        part.save_pretrained(folder)
    return str(folder)


def spec(name: str) -> str:
    """A function of this file as a flag's value."""
    return f"{__name__}:{name}"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with a policy, a reward model and a dataset: all that a run needs."""
    folder = tmp_path_factory.mktemp("tiny")
    save(folder / "sft", tiny_model(), tiny_tokenizer())
    save(folder / "reward", tiny_model(classifier=True, seed=1), tiny_tokenizer())
    rng = random.Random(0)

    def words(n):
        return " ".join(rng.choices(WORDS, k=n))

    rows = [{"prompt": words(rng.randint(2, 9)), "completion": words(3), "n": i} for i in range(24)]
    (folder / "data").mkdir()
    write_rows(folder / "data" / "train.jsonl", rows[:16])
    write_rows(folder / "data" / "test.jsonl", rows[16:])
    return folder


def run_flags(tiny: Path, output, **flags) -> dict:
    """The flags of a short run on the tiny folder."""
    paths = {"dataset_name": tiny / "data", "sft_model_path": tiny / "sft", "reward_model_path": tiny / "reward"}
    sizes = {"rloo_k": 2, "response_length": 6, "per_device_train_batch_size": 16, "total_episodes": 16}
    others = {"temperature": 1.0, "learning_rate": 1e-2, "num_eval_prompts": 0, "num_sample_generations": 0}
    others |= {"device": "cpu", "output_dir": str(output)}
    return {name: str(path) for name, path in paths.items()} | sizes | others | flags


def command(tiny: Path, output, **flags) -> list[str]:
    """The command line of such a run."""
    flags = run_flags(tiny, output, **flags)
    return [str(part) for name, value in flags.items() for part in (f"--{name}", value)]


@pytest.fixture
def train(tiny, tmp_path):
    """train(flag=value, ...) -> metrics of each update and the output folder, of a short run on the tiny folder."""
    count = itertools.count()

    def run(**flags):
        output = Path(flags.get("output_dir", tmp_path / f"run{next(count)}"))
        rloo.main(Args(**run_flags(tiny, output, **flags)))
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
    file = output / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def final_weights(output: Path) -> torch.Tensor:
    """All weights of the policy that a run left, as one vector."""
    return torch.cat([p.detach().flatten() for p in AutoModelForCausalLM.from_pretrained(output).parameters()])


def without_times(metrics: list[dict]) -> list[dict]:
    """Metrics that depend on flags and seed alone."""
    times = ("time/", "eps", "memory/")
    return [{name: x for name, x in update.items() if not name.startswith(times)} for update in metrics]


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


# Processes


def forkserver():
    """Starts processes that have imported rloo.py already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rloo", "rloo_test"])
    multiprocessing.forkserver.ensure_running()
    return context


def on_two_processes(folder: Path, function, *inputs):
    """Begins to call a function in two processes, to which the environment says what torchrun says. Returns a function
    that waits for them and returns their logs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [folder / f"log{rank}" for rank in range(2)]
    both = [(rank, port, log, function, inputs) for rank, log in enumerate(logs)]
    processes = [forkserver().Process(target=one_of_two, args=x, daemon=False) for x in both]

    def start():  # waits until the server has imported what it needs
        for process in processes:
            process.start()

    starting = threading.Thread(target=start)
    starting.start()

    def wait() -> list[Path]:
        starting.join()
        for process in processes:
            process.join(100)
            process.kill()
        assert [process.exitcode for process in processes] == [0, 0], [log.read_text()[-3000:] for log in logs]
        return logs

    return wait


def one_of_two(rank: int, port: int, log: Path, function, inputs):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 2)
    function(*inputs)


@pytest.fixture(scope="session", autouse=True)
def other_processes(request):
    """Those that tests will wait for work beside the tests before."""
    wanted = {name for item in request.session.items for name in item.fixturenames}
    for name in sorted({"alone", "begun"} & wanted):
        request.getfixturevalue(name)


# Reward functions, which spec(name) names


def constant_reward(prompts, completions, completion_ids, **columns):
    return [1.0] * len(completions)


def count_tokens(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


# ----------------------------------------------------------------------------------------------------------------------
# The formulas


def advantages_of(scores, kl, mask, kl_coef: float, token_level: bool, normalize: bool = False):
    args = Args(kl_coef=kl_coef, token_level_kl=token_level, normalize_advantage=normalize)
    batch = types.SimpleNamespace(policy_mask=mask, ended=torch.ones_like(scores, dtype=torch.bool))
    return rloo.advantages_of(args, batch, scores, kl)


def test_equal_rewards_have_no_advantage_that_normalisation_could_blow_up():
    for k in (3, 4, 7, 8):
        scores = torch.tensor([[0.1, 1.1, 0.7, 0.3]]).expand(k, -1)
        kl, mask = torch.zeros(k, 4, 2), torch.ones(k, 4, 2, dtype=torch.bool)
        for normalize, token_level in itertools.product((False, True), (False, True)):
            assert not advantages_of(scores, kl, mask, 0.1, token_level, normalize).any()


def test_scores_of_any_size_are_normalised_to_deviation_1():
    scores, ended = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.ones(2, 2).bool()
    assert rloo.shape_scores(scores * 1e-5, ended, None, True, None).std().item() == pytest.approx(1, abs=0.01)


def test_a_ratio_beyond_float32_leaves_loss_and_gradient_finite():
    new = torch.tensor([[[150.0]], [[150.0]], [[150.0]]], requires_grad=True)
    advantages, mask = torch.tensor([1.0, 0.0, -1e-30]).view(3, 1, 1), torch.ones(3, 1, 1, dtype=torch.bool)
    losses, _, _ = rloo.policy_loss(new, torch.zeros(3, 1, 1), advantages, mask, 0.2, 0.2)
    losses.sum().backward()
    assert losses[0].item() == pytest.approx(-1.2) and losses.isfinite().all() and new.grad.isfinite().all()


# Log-probs and entropies


def only_a_head(head: torch.nn.Linear):
    """What final_logits wants to know of a model."""
    config = types.SimpleNamespace()
    config.get_text_config = lambda: config
    return types.SimpleNamespace(config=config, get_output_embeddings=lambda: head)


@pytest.mark.parametrize("bias", [None, 0.0, 1000.0, -1000.0, "-inf"])
def test_log_probs_and_entropies_are_those_of_log_softmax(bias):
    """... and the gradient of log-probs; far from zero as well, where an offset of all logits changes nothing, and of
    tokens that are impossible."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 50, bias=bias is not None), torch.randn(23, 8, requires_grad=True)
    tokens, inputs = torch.randint(15, (23,)), [hidden, *head.parameters()]
    if bias == "-inf":
        head.bias.data[16:32] = -math.inf
    elif bias is not None:
        head.bias.data.add_(bias)
    full = F.log_softmax(F.linear(hidden.double(), *(p.double() for p in head.parameters())) / 0.7, dim=-1)
    expected = full.gather(1, tokens[:, None]).squeeze(1), -(full.exp() * full.clamp(min=-1e4)).sum(-1)
    found = rloo.block_logprobs(only_a_head(head), hidden, tokens, 0.7)
    tolerance = 1e-3 if bias in (1000.0, -1000.0) else 1e-5  # float32 has 7 digits
    for one, other in zip(found, expected):
        assert torch.allclose(one.double(), other, atol=tolerance)
    assert not found[1].requires_grad  # entropies are only logged
    gradients = [torch.autograd.grad(x[0] @ torch.arange(23).to(x[0]), inputs) for x in (found, expected)]
    for grad, exact in zip(*gradients):
        assert grad.isfinite().all() and (grad - exact).abs().max() < 20 * tolerance * max(1, exact.abs().max())


def test_in_bfloat16_training_reads_the_log_probs_that_were_sampled():
    """... from the same hidden states: logits are rounded, as a product in bfloat16 is, and nothing after them."""
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(64, 40).bfloat16(), torch.randn(50, 64).bfloat16()
    tokens, sampled = rloo.sample(rloo.final_logits(only_a_head(head), hidden), 0.7, torch.rand(50, 1))
    training, _ = rloo.block_logprobs(only_a_head(head), hidden, tokens, 0.7)
    expected = F.log_softmax(F.linear(hidden, head.weight, head.bias).float() / 0.7, dim=-1)
    for found in (sampled, training):
        assert found.dtype == torch.float32 and torch.equal(found, expected[torch.arange(50), tokens])


def test_logits_are_never_made_for_prompts_nor_all_at_once(monkeypatch):
    """The head sees the real completion tokens only, 128 at a time where the vocabulary is large, and once more in
    backward; the numbers are those of a single block."""
    model, batch = tiny_model(), random_batch(k=2, B=8, T=16)
    n, head = int(batch.response_mask.sum()), model.get_output_embeddings()
    weight = torch.cat([head.weight.detach(), torch.zeros(2**16 - len(head.weight), head.weight.shape[1])])
    head.weight, head.out_features = torch.nn.Parameter(weight), 2**16
    seen = spy(monkeypatch, "final_logits")
    logprobs, entropy = rloo.completion_logprobs(model, batch, 0.7)
    assert [hidden.shape[0] for (_, hidden), _ in seen] == [128, n - 128]
    gradient = flat_grad(logprobs.square().sum(), model)
    assert sorted(hidden.shape[0] for (_, hidden), _ in seen) == sorted(2 * [128, n - 128])

    mask, hidden = batch.response_mask, rloo.completion_hidden(model, batch)[:, :, :-1]
    whole = (head(hidden) / 0.7).log_softmax(-1)
    expected = whole.gather(-1, batch.responses[..., None]).squeeze(-1) * mask
    assert (logprobs - expected).abs().max() < 1e-5
    assert (entropy - (-whole.exp() * whole).sum(-1) * mask).abs().max() < 1e-5
    exact = flat_grad(expected.square().sum(), model)
    assert (gradient - exact).abs().max() < 1e-5 * exact.abs().max()


def test_tokens_that_the_policy_did_not_write_are_read_but_not_learned_from():
    """Those of a tool, in an extension with turns: in the middle of a completion, or its last."""
    batch, scores = random_batch(), torch.rand(3, 4)
    mask = batch.response_mask & (torch.rand(3, 4, 6) < 0.6)
    others = batch._replace(policy_mask=mask)
    for layout in ("plain", "group"):
        model = tiny_model()
        model.layout = layout
        logprobs, whole = (rloo.completion_logprobs(model, x, 0.7) for x in (others, batch))
        assert all(torch.allclose(part, full * mask, atol=1e-6) for part, full in zip(logprobs, whole))
    args = Args(token_level_kl=True)
    assert torch.equal(rloo.advantages_of(args, others, scores, torch.rand(3, 4, 6) * mask) != 0, mask)


# The expected update, exactly


def enumerate_completions(vocab: int, T: int) -> list[list[int]]:
    """Every completion there is: sequences that end at the first stop token (0), and those of T tokens without one."""
    everything = itertools.product(range(vocab), repeat=T)
    return [[*ids] for ids in sorted({ids[: ids.index(0) + 1] if 0 in ids else ids for ids in everything})]


def one_completion_each(prompt_ids: list[int], completions: list[list[int]]) -> Batch:
    """The completions as those (k = 1) of as many times the same prompt."""
    return rloo.make_batch([{"prompt_ids": prompt_ids}] * len(completions), rloo.pad(completions)[0][None], [0])


@pytest.mark.parametrize("token_level", [False, True])
def test_the_expected_update_is_the_exact_gradient(token_level):
    """The mean gradient of the loss over all pairs of completions (k = 2) of a vocabulary of 3 and T = 3, weighted by
    their probabilities, is that of E[score - β KL(π ‖ π_ref)], to rounding."""
    policy, reference, beta = tiny_model(vocab_size=3), tiny_model(vocab_size=3, seed=1), 0.4
    batch = one_completion_each([2, 0], enumerate_completions(3, 3))
    n = len(batch.examples)  # 1 + 2 + 4 + 8
    logprobs, _ = rloo.completion_logprobs(policy, batch, 0.8)  # (1, n, T)
    with torch.no_grad():
        ref, _ = rloo.completion_logprobs(reference, batch, 0.8)
    scores = torch.randn(1, n, generator=torch.Generator().manual_seed(3)) + 3  # rewards with a mean
    probability = logprobs[0].sum(-1).exp()
    assert probability.sum().item() == pytest.approx(1, abs=1e-5)  # these are all there are
    rewards = (scores - beta * (logprobs - ref).sum(-1))[0]
    exact = -flat_grad((probability * rewards).sum(), policy)
    assert exact.abs().max() > 0.1

    # As k = 2 completions of n² prompts, for the functions that training uses.
    pairs = torch.stack([x.flatten() for x in torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")])
    new, mask, scores = logprobs[0][pairs], batch.response_mask[0][pairs], scores[0][pairs]
    kl = ((new - ref[0][pairs]) * mask).detach()
    weight = new.detach().sum(-1).exp().prod(0)

    def error(advantages) -> float:
        losses, _, _ = rloo.policy_loss(new, new.detach(), advantages, mask, 0.2, 0.2, token_level)
        update = flat_grad((losses.mean(0) * weight).sum(), policy)
        return ((update - exact).abs().max() / exact.abs().max()).item()

    assert error(advantages_of(scores, kl, mask, beta, token_level)) < 2e-5
    assert error(rloo.rlhf_reward(scores, kl, beta, token_level)) < 2e-5  # the baseline changes nothing
    assert error(advantages_of(scores, kl, mask, 0.0, token_level)) > 1e-2  # the test sees the KL term


# ----------------------------------------------------------------------------------------------------------------------
# Whole updates, repeated in the plainest way: float64, a row per completion, loops over completions and tokens, nothing
# from rloo.py. Completion c = (j, b) is number j of prompt b. Numbers are Python's, but for what needs a gradient.


def token_logprobs(model, prompt: list[int], completion: list[int], temperature: float):
    """Log-probs of a completion's tokens, and entropies of what they were drawn from: (length,) each."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    table = logits.log_softmax(-1)
    return table[torch.arange(len(completion)), torch.tensor(completion)], -(table.exp() * table).sum(-1)


def standardized(values: dict) -> dict:
    """To mean 0 and standard deviation 1; one value alone to 0."""
    if len(values) < 2:
        return dict.fromkeys(values, 0.0)
    center, scale = mean(values.values()), stdev(values.values()) + 1e-8
    return {c: (x - center) / scale for c, x in values.items()}


def plain_scores(args, raw: dict, ended: dict) -> dict:
    """{c: score} of all completions, after penalty, normalisation and the clip. One without a score then gets the mean
    of its siblings, or 0."""
    scores = {c: x - (args.missing_eos_penalty or 0) * (not ended[c]) for c, x in raw.items()}
    scores = standardized(scores) if args.normalize_reward else scores
    limits = args.reward_clip_range or (math.inf,)
    low, high = limits if len(limits) == 2 else (-limits[0], limits[0])
    scores = {c: min(max(x, low), high) for c, x in scores.items()}
    of_prompt = {b: [x for c, x in scores.items() if c[1] == b] for _, b in ended}
    return {c: scores[c] if c in scores else mean(of_prompt[c[1]] or [0.0]) for c in ended}


def plain_advantages(args, scores: dict, kl: dict) -> dict:
    """{(j, b, t): advantage} where there is one; t is 0 at sequence level. kl: {c: list over tokens}"""
    found = {}
    steps = range(args.response_length if args.token_level_kl else 1)
    # What is still to come from token t on: at 0 all of it, beyond a completion's end its score alone.
    rewards = {(*c, t): x - args.kl_coef * math.fsum(kl[c][t:]) for c, x in scores.items() for t in steps}
    for (j, b, t), reward in rewards.items():
        if t < len(kl[j, b]):
            found[j, b, t] = reward - mean(rewards[(*c, t)] for c in scores if c[1] == b and c[0] != j)
    return standardized(found) if args.normalize_advantage else found


def completion_loss(args, new, old, advantages: list[float], notes: dict):
    """The sum over tokens; new, old: log-probs (length,); one advantage, or one per token."""
    high, loss = args.cliprange if args.cliprange_high is None else args.cliprange_high, 0.0
    for t, log_ratio in enumerate(new - old if args.token_level_kl else (new - old).sum().view(1)):
        a, ratio = advantages[min(t, len(advantages) - 1)], log_ratio.exp()
        plain, clipped = -a * ratio, -a * ratio.clamp(1 - args.cliprange, 1 + high)
        loss = loss + torch.maximum(plain, clipped)
        notes["policy/clipfrac_avg"].append(float(clipped > plain))
        notes["undecided"].append(float(abs(a) < 1e-5))  # rounding says which of the two is larger
        notes["policy/approxkl_avg"].append(0.5 * log_ratio.item() ** 2)
    return loss


def plain_update(args, policy, reference, found, prompts, completions, ended, orders, optimizer, lr: float) -> dict:
    """Trains the policy in place; the metrics. prompts: B token lists; completions, ended: {c: token list}, {c: bool};
    found: {reward's name: {c: number or None}}; orders: the prompts' numbers in each epoch."""
    lengths, notes = {c: len(x) for c, x in completions.items()}, defaultdict(list)

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
    if args.mask_truncated_completions:
        advantages = {(j, b, t): x * ended[j, b] for (j, b, t), x in advantages.items()}
    size = len(prompts) // args.num_mini_batches
    for step in (order[start : start + size] for order in orders for start in range(0, len(order), size)):
        mini_batch, loss = [c for c in completions if c[1] in step], 0.0
        for c in mini_batch:
            new, entropy = read(policy, c)
            own = [advantages[(*c, t)] for t in range(lengths[c] if args.token_level_kl else 1)]
            loss = loss + completion_loss(args, new, old[c], own, notes) / len(mini_batch)
            notes["policy/entropy_avg"] += entropy.tolist()
            notes["val/ratio"] += (new - old[c]).exp().tolist()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm or math.inf)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        notes["grad_norm"].append(norm.item())
        notes["loss/policy_avg"].append(loss.item())
    sums = {c: math.fsum(x) for c, x in kl.items()}
    groups = [[raw[c] for c in raw if c[1] == b] for b in range(len(prompts))]
    named = {f"rewards/{name}/": [x for x in values.values() if x is not None] for name, values in found.items()}
    metrics = {
        "objective/kl": sums.values() if args.kl_coef else [],
        "objective/non_score_reward": [-args.kl_coef * x for x in sums.values()] if args.kl_coef else [],
        "objective/rlhf_reward": [scores[c] - args.kl_coef * sums[c] for c in raw],
        "objective/entropy": [-x.sum().item() for x in old.values()],
        "objective/scores": raw.values(),
        "frac_reward_zero_std": [not x or max(x) - min(x) <= 1e-6 for x in groups],
        "completions/mean_length": lengths.values(),
        "completions/clipped_ratio": [not x for x in ended.values()],
    }
    metrics |= notes | {name + "mean": x for name, x in named.items()}
    spreads = {name + "std": x for name, x in named.items()} | {"objective/scores_std": raw.values()}
    return (
        {name: mean(map(float, x)) for name, x in metrics.items() if x}
        | {name: stdev(x) for name, x in spreads.items() if len(x) > 1}
        | {"val/ratio_var": stdev(notes["val/ratio"]) ** 2, "val/num_eos_tokens": sum(ended.values()), "lr": lr}
        | {"val/rollout_logprob_gap": 0.0}
    )


def plain_run(args, policy, reference, rewards: dict, stop_ids: list[int], sampled: list, orders: list) -> list[dict]:
    """Metrics of each update. rewards: {name: function of a row and a token list}; sampled: for each update its rows
    and responses (k, B, T); orders: for each epoch of all updates the prompts' numbers."""
    metrics, epochs, warmup = [], args.num_ppo_epochs, math.ceil(args.warmup_ratio * len(sampled))
    optimizer = torch.optim.AdamW(policy.parameters(), eps=args.adam_eps, weight_decay=args.weight_decay)
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
        prompts, own_orders = [row["prompt_ids"] for row in rows], orders[done * epochs : (done + 1) * epochs]
        update = plain_update(args, policy, reference, found, prompts, completions, ended, own_orders, optimizer, lr)
        metrics.append(update | {"update": done + 1, "episode": (done + 1) * len(completions)})
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
        "reward_fns": tuple(spec(function.__name__) for function in functions),
        "reward_weights": one_of(None, weights),
        "with_model": with_model,
        "family": one_of("gpt_neox", "gpt2", "llama"),
        "stop_ids": one_of([0], [0, 7, 9], [5]),
        "pad": one_of("[PAD]", "<eos>"),
        "temperature": one_of(1.0, 0.7, 1.5),
        "kl_coef": one_of(0.0, 0.1, 1.0),
        "token_level_kl": one_of(False, True),
        "missing_eos_penalty": one_of(None, 1.0),
        "normalize_reward": one_of(False, True),
        "reward_clip_range": one_of(None, None, (1.2,), (-0.5, 1.2)),
        "normalize_advantage": one_of(False, False, True),
        "mask_truncated_completions": one_of(False, True),
        "cliprange": one_of(0.05, 0.2),
        "cliprange_high": one_of(None, 0.1, 0.4),
        "learning_rate": 1e-2,
        "adam_eps": 1e-2,
        "weight_decay": one_of(0.0, 0.5),
        "lr_scheduler_type": one_of("linear", "cosine", "constant"),
        "warmup_ratio": one_of(0.0, 0.0, 0.5),
        "max_grad_norm": one_of(0.0, 0.1, 1.0),
        "layout": one_of("group", "plain"),
        "local_rollout_forward_batch_size": one_of(64, 4),
    }


@pytest.mark.parametrize("seed", range(18))
def test_updates_equal_a_plain_implementation_for_flags_drawn_at_random(train, tiny, tmp_path, monkeypatch, seed):
    """Weights and metrics of two updates; prompts of unequal length, one of them twice. The reference is another model,
    since a KL that is 0 but for rounding would decide about advantages where all scores are equal."""
    flags = flags_drawn(seed)
    stop_ids, with_model, family, pad = (flags.pop(name) for name in ("stop_ids", "with_model", "family", "pad"))
    model, reference = tiny_model(family), tiny_model(family)
    for weight, other in zip(reference.parameters(), tiny_model(family, seed=1).parameters()):
        weight.data.lerp_(other.data, 0.1)
    model.generation_config.eos_token_id = stop_ids if len(stop_ids) > 1 else 0
    flags |= {"stop_token": WORDS[5 - 3]} if stop_ids == [5] else {}
    rows = [{"prompt": "a b c d e f g"[: 2 * i % 14 + 1], "n": i} for i in range(9)]  # of 1 to 7 tokens
    experiences, orders, randperm = spy(monkeypatch, "collect"), [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n: orders.append(randperm(n)) or orders[-1])
    spy(monkeypatch, "load_models", lambda _, models: (*models[:2], models[2] and reference))
    metrics, output = train(
        dataset_name=write_rows(tmp_path / "rows.jsonl", rows),
        sft_model_path=save(tmp_path / "sft", model, tiny_tokenizer(pad)),
        reward_model_path=str(tiny / "reward") if with_model else None,
        **flags,
    )

    policy, reference, scorer = (x.double() for x in (model, reference, tiny_model(classifier=True, seed=1)))
    rewards = {}
    if with_model:  # the score of the last token
        rewards["reward_model"] = lambda row, ids: scorer.score(
            scorer.base_model(torch.tensor([row["prompt_ids"] + ids])).last_hidden_state[0, -1]
        ).item()
    for name in (function.rpartition(":")[2] for function in flags["reward_fns"]):
        rewards[name] = functools.partial(reward_of_one, globals()[name])
    sampled = [(experience.batch.examples, experience.batch.responses) for _, experience in experiences]
    expected = plain_run(Args(**flags), policy, reference, rewards, stop_ids, sampled, [x.tolist() for x in orders])

    for one, other in zip(without_times(metrics), expected, strict=True):
        clipped, plainly_clipped = one.pop("policy/clipfrac_avg"), other.pop("policy/clipfrac_avg")
        assert clipped == pytest.approx(plainly_clipped, abs=other.pop("undecided") + 1e-6)
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    plain_weights = torch.cat([p.detach().flatten() for p in policy.parameters()]).float()
    assert (final_weights(output) - plain_weights).abs().max() < 3e-4  # one case has gradients of 1,000, others 1e-6


# ----------------------------------------------------------------------------------------------------------------------
# The group layout and the decoder against a row per completion


LAYOUTS = [*itertools.product(ARCHITECTURES, ["plain"]), *itertools.product(FAMILIES | GROUP_ROWS, ["group"])]


@pytest.mark.parametrize("name, layout", LAYOUTS)
def test_padded_equals_unpadded(name, layout):
    """Log-probs, their gradients, entropies and scores of left-padded prompts and right-padded completions, in either
    layout, are those that a model as it comes gives each sequence alone, with logits that it scales (Cohere, Granite)
    or caps (Gemma 2)."""
    batch, policy, alone = random_batch(), tiny_model(name), tiny_model(name, as_it_comes=True)
    rloo.check_model(alone, [example["prompt_ids"] for example in batch.examples], longest=12)  # is not refused
    family = name if name in FAMILIES else "gpt2"  # of the reward model
    reward = tiny_model(family, 1, classifier=True)
    reward_alone = tiny_model(family, 1, classifier=True, as_it_comes=True, pad_token_id=None)  # a row: head at its end
    policy.layout = reward.layout = layout
    logprobs, entropies = rloo.completion_logprobs(policy, batch, 0.7)
    expected = [torch.zeros_like(x) for x in (logprobs, entropies, batch.ended.float())]
    for j, b in itertools.product(range(3), range(4)):
        prompt, completion = batch.examples[b]["prompt_ids"], batch.completion_ids()[j * 4 + b]
        ids, n = torch.tensor([prompt + completion]), len(completion)
        table = F.log_softmax(alone(ids).logits[0, len(prompt) - 1 : -1] / 0.7, dim=-1)
        expected[0][j, b, :n] = table[torch.arange(n), completion]
        expected[1][j, b, :n] = -(table.exp() * table).sum(-1)
        expected[2][j, b] = reward_alone(ids).logits[0, 0]
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    found = [
        logprobs,
        entropies,
        rloo.reward_of_model(reward, 64, batch),
        flat_grad((logprobs * weights).sum(), policy),
    ]
    expected.append(flat_grad((expected[0] * weights).sum(), alone))
    for one, other, limit in zip(found, expected, [2e-6, 2e-6, 2e-6, 3e-6], strict=True):
        assert (one - other).norm() < limit * other.norm()


def layout_of(model, longest: int, T: int, **flags) -> str:
    """The layout that is chosen for prompts of up to `longest` tokens."""
    rloo.choose_layout(Args(response_length=T, **flags), model, longest)
    return model.layout


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_of_the_list_run_in_group_rows_if_they_see_prompt_and_completion(name):
    """... at positions that do not depend on the length of a row, and whose attention is sdpa."""

    def chosen(longest=12, T=8, layout="auto", **config):
        return layout_of(tiny_model(name, as_it_comes=True, **config), longest, T, layout=layout)

    assert chosen() == ("plain" if name in PLAIN_ROWS else "group")
    assert chosen(layout="plain") == "plain"
    if name == "mistral":  # a prompt and a completion, not the whole row, must fit into its window of 12 tokens
        assert chosen(6, 6) == "group"
        assert chosen(6, 7) == "plain"  # one is out of sight
    chunks = {"attention_chunk_size": 12, "layer_types": ["chunked_attention", "full_attention"]}
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    refused = {
        "mistral": [{}],
        "gemma2": [{}],
        "llama4_text": [chunks],
        "llama": [{"attn_implementation": "eager"}, {"rope_parameters": dynamic}],
    }
    for config in refused.get(name, []):
        assert chosen(**config) == "plain"
        with pytest.raises(InputError, match="^--layout group: "):
            chosen(layout="group", **config)
    if name in FAMILIES:
        with pytest.raises(InputError, match="has 128 positions; the longest prompt and completion need 129"):
            chosen(100, 29)


def undefined_name(inputs, output):
    return undefined  # noqa: F821


@pytest.mark.parametrize(
    "name, edit, error, words",
    [
        ("sample", undefined_name, NameError, "undefined"),
        ("step_attention", lambda _, x: x[:, :, 1:], RuntimeError, "shape"),
        ("group_attention", lambda _, x: x[:, 1:], RuntimeError, "size"),
        ("step_attention", lambda _, x: 0.5 * x, rloo.InputError, "what samples is not the policy"),
        ("group_attention", lambda _, x: x.flip(1), rloo.InputError, "what samples is not the policy"),
        ("sample", lambda _, x: (x[0], x[1] - 0.02), rloo.InputError, "log-probs differ by 0.02"),
        ("advantage", lambda _, x: x[..., 0], AssertionError, r"not \(k, B, 1 or T\)"),
    ],
)
def test_a_mistake_in_an_edit_ends_the_run_before_a_step_and_nothing_falls_back(
    train, monkeypatch, name, edit, error, words
):
    spy(monkeypatch, name, edit)
    clipped = spy(monkeypatch, "clip_gradients")
    with pytest.raises(error, match=words):
        train(kl_coef=0.0)
    assert not clipped


def test_a_gap_of_rounding_is_none_and_bfloat16_rounds_more():
    for dtype, rounding in (("float32", 0.005), ("bfloat16", 0.1)):
        rloo.check_gap(Args(dtype=dtype), torch.tensor([0.0, 2 * rounding]))
        with pytest.raises(rloo.InputError, match="log-probs differ by"):
            rloo.check_gap(Args(dtype=dtype), torch.tensor([0.0, 6 * rounding]))


def cut(*sections: tuple[str, str]) -> types.ModuleType:
    """rloo.py without what is between these titles, and with plain rows."""
    source = Path(rloo.__file__).read_text()
    for begin, end in sections:
        source = source[: source.index(f"# ---- {begin}")] + source[source.index(f"# ---- {end}") :]
    module = types.ModuleType("rloo")
    module.__file__ = rloo.__file__
    module.choose_layout = lambda args, model, longest: setattr(model, "layout", "plain")
    exec(compile(source, rloo.__file__, "exec"), vars(module))
    return module


def test_group_rows_can_be_cut_out(tiny, tmp_path):
    """Two updates in plain rows end as with it."""
    ends = []
    for name, module in (("whole", rloo), ("without", cut(("Group rows", "Command line")))):
        flags = {"layout": "plain", "log_completions": True, "total_episodes": 32, "num_eval_prompts": 2}
        module.main(Args(**run_flags(tiny, tmp_path / name, **flags)))
        ends.append(end_of(tmp_path / name))
    assert ends[0] == ends[1]


def test_a_loop_of_ones_own_needs_neither_the_run_nor_evaluation_files_and_group_rows(monkeypatch):
    """... and its first update draws the same completions as with them."""
    scores = []
    for module in (rloo, cut(("The run", "Data"), ("Files of a run", "Command line"))):
        monkeypatch.setitem(sys.modules, "rloo", module)
        torch.manual_seed(0)
        loop = runpy.run_path(str(Path(rloo.__file__).parent / "benchmark" / "extensions" / "own_loop.py"))
        scores.append(loop["main"]()[2])
    assert scores[0][0] == scores[1][0] and len(scores[1]) == 3


def test_importing_rloo_changes_nothing_else_in_the_process_and_may_be_done_again():
    """... as importlib.reload or the autoreload of a notebook do it: other models keep their attention, and the
    process its signals, random numbers, paths and settings of PyTorch."""
    kernels, masks = (x._global_mapping for x in (transformers.AttentionInterface, transformers.AttentionMaskInterface))
    ours = kernels[rloo.GROUP_KERNEL]

    def state():
        others = [{name: f for name, f in table.items() if name != rloo.GROUP_KERNEL} for table in (kernels, masks)]
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        settings = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
        return others, signals, settings, random.getstate(), torch.get_rng_state().tolist(), [*sys.path]

    transformers.set_seed(7)  # not that of an import
    before = state()
    again = types.ModuleType("again")
    again.__file__ = rloo.__file__
    try:
        for _ in range(2):
            importlib.util.spec_from_file_location("again", rloo.__file__).loader.exec_module(again)
        assert state() == before
        assert kernels["sdpa"] is sdpa_attention_forward and masks["sdpa"] is sdpa_mask
        assert torch.backends.cuda.cudnn_sdp_enabled()  # as PyTorch has it: nor has the first import changed it
        logprobs, expected = (x.completion_logprobs(tiny_model(), random_batch(), 1.0)[0] for x in (again, rloo))
        assert torch.equal(logprobs, expected)
    finally:
        transformers.AttentionInterface.register(rloo.GROUP_KERNEL, ours)


# The decoder


@pytest.mark.parametrize("name, layout", LAYOUTS)
def test_rollout_at_temperature_0_is_greedy_decoding_of_each_prompt_alone(name, layout):
    """By the decoder and by `generate`."""
    model, rows = tiny_model(name, as_it_comes=layout == "plain"), random_batch().examples
    batch, _ = sample_batch(model, rows, 2, 0.0, 8, [0], local_rollout_forward_batch_size=6)
    model = tiny_model(name, as_it_comes=True)
    for b, row in enumerate(rows):
        ids = row["prompt_ids"]
        while len(ids) < len(row["prompt_ids"]) + 8 and ids[len(row["prompt_ids"]) :][-1:] != [0]:
            ids = ids + [model(torch.tensor([ids])).logits[0, -1].argmax().item()]
        for j in range(2):
            assert batch.completion_ids()[j * 4 + b] == ids[len(row["prompt_ids"]) :]


@pytest.mark.parametrize("name", FAMILIES)
def test_both_layouts_draw_the_same_completions_by_the_same_random_numbers(name):
    found = []
    for as_it_comes in (False, True):  # group rows, plain rows
        torch.manual_seed(1)
        model, rows = tiny_model(name, as_it_comes=as_it_comes), random_batch(B=6).examples
        torch.manual_seed(2)
        found.append(sample_batch(model, rows, 3, 0.7, 9, [0]))
    (group, logprobs), (plain, others) = found
    assert torch.equal(group.responses, plain.responses) and len(group.responses.unique()) > 9
    assert torch.allclose(logprobs, others, atol=1e-5) and (logprobs < 0).any()


@torch.no_grad()
def decoded(model, batch: Batch, k: int, T: int, stop_ids: list[int], seed: int = 1) -> tuple:
    """Tokens and log-probs of k completions of each prompt."""
    torch.manual_seed(seed)
    return rloo.decode(model, batch.prompt_ids, batch.prompt_mask, k, T, 1.0, stop_ids)


@pytest.mark.parametrize(
    "k, B, seed, expected",
    [(4, 6, 1, [(8, 4, 6), (16, 2, 4), (28, 2, 2)]), (1, 6, 6, [(8, 1, 6), (16, 1, 5), (28, 1, 2)])],
)
def test_completions_do_not_depend_on_which_lanes_have_left(k, B, seed, expected, monkeypatch):
    """... twice, the second time from fewer lanes than k of fewer prompts than B."""
    monkeypatch.setattr(rloo, "FIRST_SLOTS", 8)
    model, prompts = tiny_model("qwen3"), random_batch(B=B)
    steps = spy(monkeypatch, "step_attention")
    tokens, logprobs = decoded(model, prompts, k, 28, [0], seed)
    sizes = {(own.shape[2], len(query) // len(prompt), len(prompt)) for (query, own, _, prompt, *_), _ in steps}
    assert sorted(sizes) == expected  # slots, lanes, prompts
    stay, stay_logprobs = decoded(model, prompts, k, 28, [99], seed)
    batch = rloo.make_batch(prompts.examples, tokens, [0])
    mask = batch.response_mask
    assert torch.equal(tokens[mask], stay[mask]) and not batch.ended.all()
    assert torch.allclose(logprobs[mask], stay_logprobs[mask], atol=1e-5)
    model.layout = "plain"
    assert torch.allclose(logprobs[mask], rloo.completion_logprobs(model, batch, 1.0)[0][mask], atol=1e-5)


class Graph:
    """A CUDA graph on a CPU: the operations of a step, which a replay runs again on the same memory, without the Python
    around them. What they return goes where it went when they were recorded."""

    def __init__(self):
        self.operations = []

    def replay(self):
        for operation, inputs, options, outputs in self.operations:
            for old, new in zip(outputs, tree_leaves(operation(*inputs, **options)), strict=True):
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():  # no view, and not in place
                    old.copy_(new)


class Recording(TorchDispatchMode):
    """Writes the operations into a graph and, at its end, undoes what they have changed."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph
        self.changed = []

    def __torch_dispatch__(self, operation, types, inputs=(), options=None):
        if operation._schema.is_mutable:
            self.changed.append((inputs[0], inputs[0].clone()))
        found = operation(*inputs, **(options or {}))
        self.graph.operations.append((operation, inputs, options or {}, tree_leaves(found)))
        return found

    def undo(self):
        for x, before in reversed(self.changed):
            x.copy_(before)


def fake_cuda(monkeypatch):
    """Lets cuda_graph work on the CPU."""

    @contextlib.contextmanager
    def recording(graph, capture_error_mode):
        with torch.random.fork_rng(devices=[]), Recording(graph) as mode:
            yield
        mode.undo()  # CUDA only records

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)


MOE = pytest.param("qwen3_moe", marks=pytest.mark.skipif(OLD, reason="waits for the device before transformers 5"))


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "llama", MOE])
def test_replayed_graphs_sample_what_steps_sample(family, monkeypatch):
    """... bit for bit. A step is recorded when it has run once with the same shapes."""
    model, prompts, stop_ids = tiny_model(family, seed=3, vocab_size=64), random_batch(B=6), [0, 1, 2, 3, 4, 5]
    captured, cuda_graph = [], rloo.cuda_graph

    def noted_graph(step):
        names = inspect.getclosurevars(step).nonlocals
        captured.append((names["t"].item(), names["lanes"].numel()))
        return cuda_graph(step)

    monkeypatch.setattr(rloo, "cuda_graph", noted_graph)
    for slots, T, at in ((8, 3, [0]), (8, 20, [0, 7, 15])):
        monkeypatch.setattr(rloo, "FIRST_SLOTS", slots)
        captured.clear()
        plain = decoded(model, prompts, 3, T, stop_ids)
        assert not captured
        with monkeypatch.context() as patch:
            fake_cuda(patch)
            replayed = decoded(model, prompts, 3, T, stop_ids)
        assert [t for t, _ in captured] == at
        assert all(torch.equal(*pair) for pair in zip(plain, replayed, strict=True)), (slots, T)
        assert captured[-1][1] < 18 or T == 3  # lanes have left


@torch.no_grad()
@pytest.mark.skipif(OLD, reason="before transformers 5 reading the prompts, though no step, waits for the device")
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "llama", "qwen3"])
def test_a_rollout_waits_for_nothing_on_the_device(family):
    """Tensors on the meta device have no values: to ask for one raises, as does a tensor on another device."""
    with torch.device("meta"):
        model, prompt_ids, prompt_mask = tiny_model(family), torch.ones(4, 5).long(), torch.ones(4, 5).bool()
    found = rloo.decode(model, prompt_ids, prompt_mask, 2, 3, 0.7, [0, 9])  # with 5 tokens it would ask who ended
    assert all(x.is_meta for x in found)


# ----------------------------------------------------------------------------------------------------------------------
# What others got wrong, where neither the formulas nor the random updates above show it


def test_token_level_kl_is_not_the_sequence_level_in_disguise():
    """Elsewhere the token-level rewards are summed back to the sequence-level one. Here they are rewards to go."""
    scores, kl = torch.tensor([[1.0], [2.0]]), torch.tensor([[[0.1, 0.2, 0.4]], [[0.3, 0.0, 0.0]]])
    G = rloo.rlhf_reward(scores, kl, 1.0, token_level_kl=True)  # past its end a completion keeps its score:
    assert torch.allclose(G, torch.tensor([[[0.3, 0.4, 0.6]], [[1.7, 2.0, 2.0]]]))
    advantages = rloo.advantage(G)
    assert torch.allclose(advantages[0, 0], torch.tensor([-1.4, -1.6, -1.4]))
    assert torch.allclose(advantages[0], -advantages[1])
    assert torch.allclose(G[..., :1], rloo.rlhf_reward(scores, kl, 1.0))


@pytest.mark.parametrize("layout", ["group", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_update_of_a_batch_has_ratio_exactly_one(train, dtype, layout, monkeypatch):
    """... also where --local_rollout_forward_batch_size is less than k: a forward pass has a whole group at least; and
    where log π_old is read before two steps (that change nothing here). In bfloat16 what samples rounds otherwise,
    which is not hidden: the gap is a metric of its own."""
    flags = {"rloo_k": 4, "local_rollout_forward_batch_size": 1, "num_eval_prompts": 2}
    if dtype == "bfloat16":
        flags = {"response_length": 32, "num_eval_prompts": 2}
    if dtype == "bfloat16" and layout == "group":
        flags |= {"num_mini_batches": 2, "per_device_train_batch_size": 8, "learning_rate": 1e-20}
    loads, rollouts = spy(monkeypatch, "read_model"), spy(monkeypatch, "rollout")
    metrics, _ = train(dtype=dtype, layout=layout, total_episodes=32, **flags)
    limits = {"float32": (0, 1e-5), "bfloat16": (1e-3, 0.1)}
    for update in metrics:
        assert update["val/ratio"] == 1 and update["val/ratio_var"] == 0
        assert update["policy/clipfrac_avg"] == 0 and update["policy/approxkl_avg"] == 0
        assert limits[dtype][0] <= update["val/rollout_logprob_gap"] <= limits[dtype][1]
    in_dtype = getattr(torch, dtype)
    assert {inputs[1].dtype for inputs, _ in rollouts} == {in_dtype}  # those of evaluations as well
    others = 3 if dtype == "bfloat16" else 2  # its rounded copy, reference and reward model
    assert [model.dtype for _, model in loads] == [torch.float32] + [in_dtype] * others


def gradient_of_an_update(path: str, dtype: str, monkeypatch):
    """... of 16 completions in four micro-batches, as the optimizer gets it; the same, added up in float32 from those
    of each micro-batch by the policy; and their dtype."""
    args = Args(sft_model_path=path, dtype=dtype, device="cpu", rloo_k=2, kl_coef=0.0, cliprange_high=0.2)
    args = replace(args, per_device_train_batch_size=4, max_grad_norm=0.0)
    master, policy, _ = rloo.load_models(args, 9, None)
    batch = random_batch(k=2, B=8)
    logprobs = rloo.chunked_logprobs(policy, batch, args.temperature, 64)
    advantages = torch.randn(2, 8, 1, generator=torch.Generator().manual_seed(0))
    scores = advantages[..., 0]
    kl = torch.zeros_like(logprobs)
    experience = rloo.Experience(batch, logprobs, None, kl, scores, {}, scores, advantages, {})
    parts = spy(monkeypatch, "completion_loss")
    torch.manual_seed(0)
    optimizer = types.SimpleNamespace(step=lambda: None, zero_grad=lambda: None)
    rloo.improve(args, policy, master, optimizer, experience)
    assert master is policy or all(weight.grad is None for weight in policy.parameters())

    indices = [inputs[2] for inputs, _ in parts]
    assert [len(index) for index in indices] == [2] * 4
    total, weights = 0.0, [*policy.parameters()]
    for index in indices:
        new, _ = rloo.completion_logprobs(policy, batch.select(index), args.temperature)
        loss = -(advantages[:, index, 0] * (new - new.detach()).sum(-1).exp()).sum() / 16
        total = total + torch.cat([x.flatten().float() for x in torch.autograd.grad(loss, weights)])
    return torch.cat([weight.grad.flatten() for weight in master.parameters()]), total, weights[0].dtype


def test_in_bfloat16_gradients_of_micro_batches_add_up_in_float32(tmp_path, monkeypatch):
    path = save(tmp_path, tiny_model(), tiny_tokenizer())
    exact, total, dtype = gradient_of_an_update(path, "float32", monkeypatch)
    assert dtype == torch.float32 and (total - exact).norm() < 1e-6 * exact.norm()
    found, total, dtype = gradient_of_an_update(path, "bfloat16", monkeypatch)
    assert dtype == torch.bfloat16 and torch.equal(found, total)
    assert 0 < (found - exact).norm() < 0.03 * exact.norm()


def test_in_bfloat16_the_policy_samples_by_what_the_master_has_learned(train, tiny, monkeypatch):
    improved = spy(monkeypatch, "improve")
    train(dtype="bfloat16")
    (_, policy, master, *_), _ = improved[-1]
    before = AutoModelForCausalLM.from_pretrained(tiny / "sft", dtype=torch.bfloat16)
    learned = [weight.bfloat16() for weight in master.parameters()]
    assert all(map(torch.equal, learned, policy.parameters()))
    assert not any(map(torch.equal, learned, before.parameters()))


def test_no_forward_pass_is_repeated(train, monkeypatch):
    """Old log-probs cost one only if there are several optimizer steps. Without a KL no reference is loaded. With
    --gradient_checkpointing backward repeats the layers of the policy."""
    halves = {"num_mini_batches": 2, "per_device_train_batch_size": 8, "local_rollout_forward_batch_size": 16}
    loads, seen, rollouts = (spy(monkeypatch, name) for name in ("read_model", "completion_logprobs", "decode"))
    for flags, passes, loaded in (
        ({}, [False, True], 3),  # whether they have a gradient: the reference, training
        ({"kl_coef": 0.0}, [True], 2),
        ({"num_ppo_epochs": 2}, [False, False, True, True], 3),
        (halves, [False, False, False, True, True], 3),
        ({"layout": "plain"}, [False, True], 3),
        ({"local_rollout_forward_batch_size": 6}, [False, False, False, True], 3),  # of 16 completions, in groups of 2
    ):
        loads.clear()
        seen.clear()
        train(**flags)
        assert [output[0].requires_grad for _, output in seen] == passes and len(loads) == loaded, flags
    assert [len(inputs[1]) for inputs, _ in rollouts[-3:]] == [3, 3, 2]  # prompts
    layers = spy(monkeypatch, "group_attention")
    for again in (False, True):
        train(kl_coef=0.0, gradient_checkpointing=again)
        assert len(layers) == (4 + 6 if again else 4)  # two of the policy, two of the reward model


@pytest.mark.parametrize("layout", ["group", "plain"])
def test_one_temperature_in_sampling_and_scoring_and_no_hidden_sampling_settings(layout, tmp_path):
    """The model's own generation config asks for top-k, a repetition penalty and another temperature: all are ignored,
    and the frequencies of the sampled tokens are those of the softmax that scores them."""
    path, example, n = save(tmp_path, tiny_model(vocab_size=6)), {"prompt_ids": [3, 4, 5]}, 10_000
    hidden = {"top_k": 1, "repetition_penalty": 3.0, "temperature": 0.1, "do_sample": True, "eos_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(hidden))
    args = Args(sft_model_path=path, dtype="float32", device="cpu", response_length=2, layout=layout, kl_coef=0.0)
    _, model, _ = rloo.load_models(args, 3, None)
    torch.manual_seed(0)
    batch, sampled = sample_batch(model, [example] * 10, n // 10, 1.7, 2, [0], local_rollout_forward_batch_size=n)
    with torch.no_grad():
        completions, model = enumerate_completions(6, 2), tiny_model(vocab_size=6, as_it_comes=True)
        assert torch.allclose(sampled, rloo.completion_logprobs(model, batch, 1.7)[0], atol=1e-5)
        exact = rloo.completion_logprobs(model, one_completion_each([3, 4, 5], completions), 1.7)[0][0].sum(-1).exp()
    assert exact.sum().item() == pytest.approx(1, abs=1e-4)
    found = Counter(map(tuple, batch.completion_ids()))
    counts = torch.tensor([found[tuple(completion)] for completion in completions]).float()
    chi2, freedom = ((counts - n * exact) ** 2 / (n * exact)).sum().item(), len(completions) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)  # five standard deviations of the chi-squared distribution


@pytest.mark.parametrize("as_it_comes", [False, True])
def test_any_token_may_be_sampled_however_large_the_vocabulary(as_it_comes):
    """`generate`, which a model as it comes is sampled from by, keeps the likeliest 50 by default."""
    model = tiny_model(vocab_size=100, as_it_comes=as_it_comes)
    model.get_output_embeddings().weight.data.mul_(0.01)  # nearly alike
    torch.manual_seed(0)
    batch, _ = sample_batch(model, [{"prompt_ids": [3]}], 1000, 1.0, 1, [0])
    assert len(set(batch.responses.flatten().tolist())) == 100


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


def test_pad_equal_to_eos_keeps_the_stop_token_and_every_stop_id_counts():
    """... and the penalty looks for what stops the rollout, not for eos (0)."""
    responses = torch.tensor([[[5, 0, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8], [5, 9, 0, 7]]])
    rows = [{"prompt_ids": [0, 5]}] * 4
    one, two, other = (rloo.make_batch(rows, responses, stop_ids) for stop_ids in ([0], [0, 9], [9]))
    assert one.prompt_mask.all()  # a token of a prompt is never taken for padding
    assert one.response_mask.sum(-1).tolist() == [[2, 1, 4, 3]]
    assert two.response_mask.sum(-1).tolist() == [[2, 1, 4, 2]]
    assert one.ended.tolist() == two.ended.tolist() == [[True, True, False, True]]
    assert two.responses.tolist() == [[[5, 0, 5, 5], [0, 0, 0, 0], [5, 6, 7, 8], [5, 9, 5, 5]]]
    assert rloo.shape_scores(torch.zeros(1, 4), other.ended, 2.0, False, None).tolist() == [[-2, -2, -2, 0]]


def test_stop_ids_come_from_the_generation_config_and_the_tokenizer_if_the_model_can_emit_them():
    model, tokenizer = tiny_model(), tiny_tokenizer()

    def ids(configured, token=None):
        model.generation_config.eos_token_id = configured
        return rloo.stop_token_ids(Args(stop_token=token), model, tokenizer)

    assert ids([7, 9]) == ids([7, 9], "eos") == [0, 7, 9]
    assert ids([7, 9], "c") == tokenizer("c")["input_ids"]
    with pytest.raises(InputError, match="--stop_token"):
        ids([7, 9], "a b")
    tokenizer.eos_token = None
    assert ids(3) == ids([16, -1, 3]) == [3]
    for configured in (16, [16, 17], None):
        with pytest.raises(InputError, match="no token ends a completion: .*; give --stop_token"):
            ids(configured)


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
PHI3 = HEADS | {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}
FALCON_H1 = HEADS | {"lm_head_multiplier": 0.9, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8}
FALCON_H1 |= {"mamba_d_head": 8, "mamba_n_groups": 1}


@pytest.mark.skipif(OLD, reason="names of settings and models of transformers 5")
@pytest.mark.parametrize(
    "family, config, fits",
    [
        ("llama", {"is_causal": False}, None),  # sees later tokens
        ("phi3", PHI3, 16),  # frequencies change where a row is longer than 16
        ("hyperclovax", HEADS | {"logits_scaling": 0.9}, None),  # logits are scaled otherwise than Granite's
        ("falcon_h1", FALCON_H1, None),
        ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2}, None),  # reads padding
    ],
)
def test_a_model_whose_logits_are_not_those_that_this_file_computes_is_refused(family, config, fits):
    model, prompts = tiny_model(family, as_it_comes=True, **config), [[3, 4, 5], [4, 5, 6, 7, 8]]
    if fits:
        rloo.check_model(model, prompts, fits)
    reason = (
        "what it computes depends on padding" if family == "rwkv" else "its logits are not those of its hidden states"
    )
    with pytest.raises(InputError, match=f"^{type(model).__name__}: {reason}"):
        rloo.check_model(model, prompts, 17)


def test_a_prompt_token_that_the_model_lacks_is_said_at_the_start(train, tiny, tmp_path):
    """... not at the update that draws it."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<think>"])
    path = save(tmp_path / "sft", tiny_model(), tokenizer)
    rows = write_rows(tmp_path / "x.jsonl", [{"prompt": "a"}] * 30 + [{"prompt": "a <think>"}])
    with pytest.raises(InputError, match="a prompt has the token 16, but GPTNeoXForCausalLM knows 16"):
        train(sft_model_path=path, dataset_name=rows, reward_model_path=None, reward_fns=(spec("constant_reward"),))


def collected(scores: list[list[float]], monkeypatch, kl=None, **flags):
    """What is collected of prompts of like length with the scores (k, B), NaN: None; kl (k, B, T)."""
    scores = torch.tensor(scores)
    k, B = scores.shape
    model, batch = tiny_model(), random_batch(k=k, B=B)
    kl = torch.zeros(batch.response_mask.shape) if kl is None else kl * batch.response_mask
    monkeypatch.setattr(rloo, "rollout", lambda *inputs: (batch, kl))
    monkeypatch.setattr(rloo, "chunked_logprobs", lambda *inputs: torch.zeros_like(kl))
    args = Args(rloo_k=k, **flags)
    return rloo.collect(args, model, model, {"r": lambda batch: scores}, batch.examples, [0])


def test_unscorable_completions_leave_the_baseline_none_is_not_zero_and_zero_is_not_none(monkeypatch):
    """Their own advantage is 0, and that of their siblings the one of the others, times k (k - 2) / (k - 1)²."""
    nan = math.nan
    scores = [[1.0, nan, 0.0, nan], [4.0, nan, nan, 5.0], [nan, 2.0, 3.0, nan], [0.0, 1.0, 2.0, nan]]
    experience = collected(scores, monkeypatch)
    factor = 4 * 2 / 3**2
    first, third = [1 - 2.0, 4 - 0.5, 0.0, 0 - 2.5], [0 - 2.5, 0.0, 3 - 1.0, 2 - 1.5]
    found = experience.advantages[..., 0]
    assert found[:, 0].tolist() == pytest.approx([factor * x for x in first], abs=1e-6)
    assert found[:, 2].tolist() == pytest.approx([factor * x for x in third], abs=1e-6)
    assert found[:2, 1].tolist() == pytest.approx([0, 0], abs=1e-6) and found[2, 1] == -found[3, 1] > 0
    assert found[:, 3].abs().max() < 1e-6  # one score alone
    assert collected([[nan, 0.0], [nan, 0.0]], monkeypatch).shaped_scores.tolist() == [[0, 0], [0, 0]]
    ties = [
        [nan if j < B else -0.9 for B in range(1, 7)] for j in range(8)
    ]  # in float32 a mean of these may not be one
    assert not collected(ties, monkeypatch).advantages.any()

    a, b = torch.tensor([[0.0, nan, nan]]), torch.tensor([[2.0, 3.0, nan]])
    total, by_name = rloo.score({"a": lambda batch: a, "b": lambda batch: b}, (1.0, 0.5), None)
    assert torch.equal(total[0, :2], torch.tensor([1.0, 1.5])) and total[0, 2].isnan()
    assert by_name == {"a": a, "b": b}


@pytest.mark.parametrize("token_level", [False, True])
def test_masked_truncated_completions_keep_kl_and_baseline_and_have_weight_0_also_without_a_score(
    monkeypatch, token_level
):
    """... and an ended completion without a score is still learned from: its KL is."""
    kl = torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0))
    scores = [[1.0, 2.0, math.nan, 0.5], [0.0, math.nan, math.nan, 3.0], [math.nan, 1.0, 2.0, math.nan]]
    flags = {"kl_coef": 1.0, "token_level_kl": token_level}
    free = collected(scores, monkeypatch, kl, **flags)
    masked = collected(scores, monkeypatch, kl, mask_truncated_completions=True, **flags)
    ended = free.batch.ended
    assert {(end, nan) for end, nan in zip(ended.flatten().tolist(), free.scores.isnan().flatten().tolist())} == {
        *itertools.product((False, True), (False, True))
    }
    assert torch.equal(masked.kl, free.kl) and (free.advantages != 0).any(-1).all()
    assert torch.equal(masked.advantages, free.advantages * ended[..., None])


def test_scores_count_as_equal_up_to_rounding_and_where_they_are_raw(monkeypatch):
    """KL, normalisation and penalty do not tell them apart, nor does a score that is missing."""
    nan, kl = math.nan, torch.rand(3, 5, 6)
    scores = [[0.3, 1.0, 1.0, nan, nan], [0.1 + 0.2, 1.001, 1.0, 2.0, nan], [0.3 + 3e-7, 1.0, nan, 2.0, nan]]
    flags = {"missing_eos_penalty": 1.0, "normalize_reward": True}
    metrics = rloo.metrics_of(Args(**flags), collected(scores, monkeypatch, kl, **flags), {})
    assert metrics["frac_reward_zero_std"] == pytest.approx(4 / 5)
    assert metrics["objective/scores"] == pytest.approx(torch.tensor(scores).nanmean().item())


def test_dropout_is_off_in_rollout_scoring_and_training(train, tmp_path):
    """A policy whose config asks for half of everything to be dropped ends where one without dropout ends."""
    runs = []
    for name, dropout in (("off", 0.0), ("on", 0.5)):
        model = tiny_model(hidden_dropout=dropout, attention_dropout=dropout)
        path = save(tmp_path / name, model, tiny_tokenizer())
        runs.append(train(sft_model_path=path, total_episodes=32, dtype="bfloat16"))
    assert without_times(runs[0][0]) == without_times(runs[1][0])
    assert AutoModelForCausalLM.from_pretrained(runs[1][1]).config.hidden_dropout == 0.5


@pytest.mark.parametrize(
    "settings, layout",
    [({"temperature": 0.6, "top_p": 0.9}, "plain"), ({"pad_token_id": -1}, "group"), ({"do_sample": True}, "plain")],
)
def test_the_saved_model_keeps_its_generation_config_also_one_that_cannot_be_saved(train, tmp_path, settings, layout):
    """... by transformers, as the first two, which many released models have."""
    path, settings = save(tmp_path / "sft", tiny_model(), tiny_tokenizer()), settings | {"eos_token_id": [0, 9]}
    (tmp_path / "sft" / "generation_config.json").write_text(json.dumps(settings))
    _, output = train(sft_model_path=path, layout=layout)
    assert settings.items() <= json.loads((output / "generation_config.json").read_text()).items()
    assert AutoModelForCausalLM.from_pretrained(output / "checkpoint-1").generation_config.eos_token_id == [0, 9]
    assert "group" not in (output / "config.json").read_text()  # nor how it was trained


def resumed_at(output: Path, update: int, to: Path) -> dict:
    """Flags that continue a copy of a run at the checkpoint of an update."""
    shutil.copytree(output, to)
    for folder in rloo.checkpoints(to):
        if int(folder.name.removeprefix("checkpoint-")) > update:
            shutil.rmtree(folder)
    return {"output_dir": str(to), "resume": True}


def test_a_weight_without_a_gradient_has_no_moments_and_its_run_resumes(train, tmp_path, monkeypatch):
    """... such as those of an expert without tokens: its first step is as long as in a run that was not resumed. In
    bfloat16 the first rollout is by the weights of the checkpoint, too."""
    updates = itertools.count(1)

    def without_the_heads(policy):
        if next(updates) == 1:
            policy.get_output_embeddings().weight.grad = None

    monkeypatch.setattr(rloo, "average_gradients", without_the_heads)
    flags = {"total_episodes": 48, "save_steps": 1, "save_total_limit": 9, "lr_scheduler_type": "constant"}
    flags |= {"dtype": "bfloat16"}
    metrics, output = train(**flags)
    moments = torch.load(output / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert [len(state) for state in moments.values()] == [3] * (len([*tiny_model().parameters()]) - 1)
    again, resumed = train(**flags, **resumed_at(output, 1, tmp_path / "again"))
    assert without_times(again) == without_times(metrics)
    assert torch.equal(final_weights(resumed), final_weights(output))


ERNIE = SIZE | {"num_key_value_heads": 2, "intermediate_size": 32}
ERNIE |= {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2}


def named_tensors(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


@torch.no_grad()
def test_in_bfloat16_the_policy_is_what_transformers_would_load_of_the_master(tmp_path):
    """... before and after an update: what a model keeps in float32 is not rounded. Ernie has such a tensor for its
    routers."""
    model = tiny_model("ernie4_5_moe", **ERNIE)
    for name, tensor in named_tensors(model).items():
        if "correction_bias" in name:
            torch.nn.init.normal_(tensor)
    args = Args(sft_model_path=save(tmp_path, model), dtype="bfloat16", device="cpu", response_length=4)
    master, policy, _ = rloo.load_models(args, 2, None)
    for change in (0.0, 0.1):
        for weight in master.parameters():
            weight.add_(change)
        rloo.copy_weights(policy, master)
        master.save_pretrained(tmp_path / "master")
        expected = named_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "master", dtype=torch.bfloat16))
        assert any(x.dtype == torch.float32 for name, x in expected.items() if "correction_bias" in name)
        for name, x in named_tensors(policy).items():
            assert x.dtype == expected[name].dtype and torch.equal(x, expected[name]), name


# ----------------------------------------------------------------------------------------------------------------------
# Data and rewards

USER = {"role": "user", "content": "b c"}
SYSTEM = {"role": "system", "content": "e"}
ASSISTANT = {"role": "assistant", "content": "d f"}
TURNS = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
CHAT = TURNS + "{% if add_generation_prompt %}a{% endif %}"


def chat_tokenizer(template: str = CHAT) -> PreTrainedTokenizerFast:
    """CHAT: the first letter of each turn's role and its text; at the end an `a` that asks for an answer."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def tokenizer_of(vocab: dict[str, int]) -> PreTrainedTokenizerFast:
    """Like tiny_tokenizer's, with other words."""
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "[PAD]": 1, "[UNK]": 2} | vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"eos_token": "<eos>", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


def llama_tokenizer(add_eos: bool = False):
    """Pieces of words as SentencePiece has them, <s> before every text; decoding drops the space before the first."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "▁a", "▁the", "▁cat", "s", "▁b"]
    backend = Tokenizer(models.Unigram([(piece, -float(len(piece) < 2)) for piece in pieces], 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    single = ["<s>", "$A", "</s>"] if add_eos else ["<s>", "$A"]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)


LLAMA_CHAT = llama_tokenizer()
LLAMA_CHAT.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"
TOOLS = chat_tokenizer("{% for t in tools or [] %}{{ t.x }} {% endfor %}" + CHAT)
NO_TOOLS = chat_tokenizer("{% if tools is not none %}{{ 1 / 0 }}{% endif %}a")
KWARGS = chat_tokenizer("{{ mood }} a")
ENDS = chat_tokenizer(TURNS.replace("{% endfor %}", "m {% endfor %}"))  # each turn ends with a token
NULLS = chat_tokenizer(CHAT.replace("{% endfor %}", "{% if m.x is defined %}{{ 1 / 0 }}{% endif %}{% endfor %}"))
TEXTS = [  # tokenizer, row, the ids that are read
    (tiny_tokenizer(), {"prompt": "b c", "completion": " d"}, [4, 5]),
    (tiny_tokenizer(), {"prompt": "b c", "messages": [ASSISTANT]}, [4, 5]),
    (chat_tokenizer(), {"prompt": "b c"}, [4, 5]),  # a text is read as it is
    (chat_tokenizer(), {"messages": [USER, ASSISTANT]}, [2, 4, 5, 3]),
    (chat_tokenizer(), {"prompt": [USER]}, [2, 4, 5, 3]),
    (chat_tokenizer(), {"messages": [SYSTEM, USER, ASSISTANT, USER]}, [2, 7, 2, 4, 5, 3]),
    (chat_tokenizer(), {"prompt": [USER, ASSISTANT, SYSTEM]}, [2, 4, 5, 3, 6, 8, 2, 7, 3]),
    (ENDS, {"prompt": [USER, ASSISTANT]}, [2, 4, 5, 15, 3, 6, 8]),  # it is continued
    (TOOLS, {"prompt": [USER], "tools": [{"x": "e"}]}, [7, 2, 4, 5, 3]),
    (TOOLS, {"prompt": [USER], "tools": None}, [2, 4, 5, 3]),
    (NO_TOOLS, {"prompt": [USER], "tools": []}, [3]),  # read as none
    (KWARGS, {"prompt": [USER], "chat_template_kwargs": {"mood": "d"}}, [6, 3]),
    (chat_tokenizer(), {"prompt": [{"role": "user", "content": [{"type": "text", "text": "b c"}]}]}, [2, 4, 5, 3]),
    (NULLS, {"prompt": [USER | {"x": None}]}, [2, 4, 5, 3]),  # a table gives each message the keys of all
    (llama_tokenizer(), {"prompt": "the cats"}, [1, 5, 6, 7]),
    (llama_tokenizer(), {"prompt": "<s> b"}, [1, 8]),
    (llama_tokenizer(add_eos=True), {"prompt": "b"}, [1, 8]),
    (llama_tokenizer(add_eos=True), {"prompt": "b</s>"}, None),  # ends with its own
    (LLAMA_CHAT, {"prompt": [{"role": "user", "content": " b"}]}, [1, 8, 2]),
]


def test_the_tokenizer_puts_nothing_after_a_prompt_and_no_second_bos_before_it():
    """What is read of a row, in every documented form of rows."""
    for tokenizer, row, ids in TEXTS:
        prepared = rloo.prepare_example(row, tokenizer)
        assert prepared["prompt_ids"] == ids or (ids is None and prepared["prompt_ids"][:3] == [1, 8, 2]), row
        assert prepared["columns"] == {name: value for name, value in row.items() if name != "prompt"}


REFUSING = chat_tokenizer("{{ raise_exception('no system messages') }}")
BAD_ROWS = {  # a row -> words of the line, and a tokenizer with another chat template than none
    "{'text': 'b'}": ("text", None),
    "{'messages': [ASSISTANT]}": ("user", chat_tokenizer()),
    "{'prompt': 3}": ("", None),
    "{'prompt': ''}": ("empty", None),
    "{'prompt': None}": ("prompt", None),
    "{'prompt': '\\ud800'}": ("", None),
    "{'prompt': []}": ("", chat_tokenizer()),
    "{'prompt': [SYSTEM, USER]}": ("no chat template", None),
    "{'prompt': [{'role': 'user'}]}": ("", chat_tokenizer(CHAT.replace("m['content']", "m['content'] + ''"))),
    "{'prompt': [USER], 'a': 1}": ("no system messages", REFUSING),
    "{'prompt': 'b', 'image': 'x.png'}": ("images", None),
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_row_that_cannot_be_read_is_named(tmp_path, row):
    words, tokenizer = BAD_ROWS[row]
    data = write_rows(tmp_path / "x.jsonl", [{"prompt": "a"}, eval(row)])
    with pytest.raises(InputError, match=f"x.jsonl, row 2: .*{words}"):
        rloo.load_data(Args(dataset_name=data, num_eval_prompts=0), tokenizer or tiny_tokenizer())


def test_datasets_from_jsonl_files_folders_and_their_splits(tmp_path, capsys):
    rows = [{"prompt": "a"}, {"prompt": "b é\u2028"}]  # a line separator inside a text
    folder, file = str(tmp_path), tmp_path / "x.jsonl"
    file.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    write_rows(tmp_path / "validation.jsonl", rows)

    def sizes(**flags) -> list[int]:
        return [len(part) for part in rloo.load_data(Args(**flags), tiny_tokenizer())]

    assert rloo.load_rows(str(file), "train") == rloo.load_rows(folder, "validation") == rows
    assert rloo.load_rows(folder, "train") == rloo.load_rows(str(file), "test") == []
    write_rows(tmp_path / "test.jsonl", rows * 300)
    assert sizes(dataset_name=folder, dataset_train_split="validation") == [2, 500]
    assert sizes(dataset_name=folder, dataset_train_split="validation", num_eval_prompts=7) == [2, 7]
    assert sizes(dataset_name=folder, dataset_train_split="test", dataset_test_split="validation") == [600, 2]
    assert sizes(dataset_name=folder, dataset_train_split="test") == [540, 60]  # not its own training rows

    write_rows(file, rows * 10)  # without a test split: the last tenth, of at most 100 rows
    train_rows, test_rows = rloo.load_data(Args(dataset_name=str(file)), tiny_tokenizer())
    assert [row["prompt"] for row in train_rows + test_rows] == [row["prompt"] for row in rows * 10]
    assert sizes(dataset_name=str(file)) == [18, 2] and sizes(dataset_name=str(file), num_eval_prompts=0) == [20, 0]
    assert sizes(dataset_name=str(file), max_prompt_length=1) == [9, 1]  # every second prompt has 2 tokens
    assert "9 of 18 prompts" in capsys.readouterr().out
    write_rows(file, rows * 600)
    assert sizes(dataset_name=str(file)) == [1100, 100]


def test_prompts_that_skip_the_chat_template_are_said(tmp_path, capsys):
    for row, said in (({"prompt": "a"}, True), ({"prompt": [USER]}, False)):
        data = write_rows(tmp_path / "x.jsonl", [row] * 2)
        rloo.load_data(Args(dataset_name=data, num_eval_prompts=0), chat_tokenizer())
        assert ("prompts are plain text" in capsys.readouterr().out) == said


def test_a_hub_name_goes_to_the_datasets_package(monkeypatch, tmp_path):
    """... whose columns may be anything, such as dates."""
    row = {"when": datetime.date(2024, 1, 2)}
    fake = types.SimpleNamespace(load_dataset=lambda name, config: {"train": [row | {"prompt": f"{name} {config}"}]})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert rloo.load_rows("someone/something", "train") == [row | {"prompt": "someone/something None"}]
    assert rloo.load_rows("someone/something", "test") == []
    rows, _ = rloo.load_data(Args(dataset_name="someone/something", dataset_config="main"), tiny_tokenizer())
    assert rows[0]["prompt"] == "someone/something main"
    rloo.append(tmp_path / "x.jsonl", rows)
    assert read_metrics(tmp_path, "x")[0]["columns"] == {"when": "2024-01-02"}
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        rloo.load_rows("someone/something", "train")


def test_reward_functions_see_the_completions_of_a_prompt_one_after_the_other():
    """... with prompts, texts, ids and columns in the same order, as in TRL 1.x, so that it can compare siblings."""
    batch, tokenizer, calls = random_batch(), tiny_tokenizer(), []
    for i, row in enumerate(batch.examples):
        row.update(prompt=[f"prompt {i}"], columns={"answer": i})

    def reward(prompts, completions, completion_ids, answer, **columns):
        calls.append((deepcopy(prompts), completions, completion_ids, answer, columns))
        prompts[0].append("which the next function must not see")
        assert prompts[1] == ["prompt 0"]  # nor a sibling
        return [None if i == 3 else i for i in range(12)]

    scores = rloo.function_reward("--reward_fns r", reward, tokenizer, batch)
    assert scores[0, 1].isnan() and scores[:, 2].tolist() == [6, 7, 8] and scores.shape == (3, 4)
    ((prompts, completions, completion_ids, answer, columns),) = calls
    assert prompts == [[f"prompt {b}"] for b in range(4) for _ in range(3)] and columns == {}
    assert answer == [b for b in range(4) for _ in range(3)]
    assert [row["prompt"] for row in batch.examples] == prompts[::3]
    for b, j in itertools.product(range(4), range(3)):
        real = batch.responses[j, b][batch.response_mask[j, b]].tolist()
        assert completion_ids[b * 3 + j] == real  # the stop token included
        assert completions[b * 3 + j].split() == [WORDS[i - 3] for i in real if i > 0]


def test_texts_are_without_the_stop_token_whatever_it_is_and_otherwise_as_sampled(tmp_path):
    """The stop token may be a word, and tags may be special tokens. A tokenizer that tidies up spaces would make "a ."
    "a.", and SentencePiece drops the space before a text. Ids may have gaps, and models more than tokenizers."""
    row = {"prompt_ids": [3]}
    batch = rloo.make_batch([row] * 2, torch.tensor([[[4, 5, 0, 0], [4, 3, 4, 3]]]), stop_ids=[5])
    assert rloo.completion_texts(batch, tiny_tokenizer()) == [" b", " b a b a"]
    tagged = tiny_tokenizer()
    tagged.add_special_tokens({"additional_special_tokens": ["b"]})
    assert [text.split() for text in rloo.completion_texts(batch, tagged)] == [["b"], ["b", "a", "b", "a"]]
    tidy = tokenizer_of({".": 3, "a": 4})
    tidy.clean_up_tokenization_spaces = True
    assert rloo.completion_texts(batch, tidy) == [" a", " a . a ."]

    gaps = tokenizer_of({"a": 3, "b": 40})
    gaps.add_tokens(["<think>"])
    think = gaps.convert_tokens_to_ids("<think>")
    batch = rloo.make_batch([row] * 2, torch.tensor([[[think, 40, 3, 0], [199, 3, 199, 3]]]), stop_ids=[0])
    assert [text.split() for text in rloo.completion_texts(batch, gaps)] == [["<think>", "b", "a"], ["a", "a"]]

    tokenizer = llama_tokenizer()
    responses = torch.tensor([[[5, 6, 2, 0], [6, 7, 5, 6]], [[7, 5, 2, 0], [2, 0, 0, 0]]])
    batch = rloo.make_batch([{"prompt_ids": [1, 6], "columns": {}}] * 2, responses, [2])
    assert tokenizer.decode([5, 6]) == "the cat"
    assert rloo.completion_texts(batch, tokenizer) == [" the cat", " cats the cat", "s the", ""]
    (sample, *_) = rloo.write_samples(tmp_path / "x.jsonl", 1, "sampled", batch, {}, tokenizer)
    assert (sample["prompt"].split(), sample["completion"]) == (["<s>", "cat"], " the cat")  # prompts are as read


def wants_n_and_m(prompts, completions, completion_ids, n, m):
    return n


def test_every_row_has_all_columns_of_the_dataset(train, tmp_path, capsys):
    """... so that a function is always called with the same names, None where a row has nothing, which is said. The two
    rows with m are those to evaluate on."""
    rows = [{"prompt": "a b"}] * 18 + [{"prompt": "c", "n": 1}] + [{"prompt": "d", "m": 2}] * 2
    data = write_rows(tmp_path / "rows.jsonl", rows)
    loaded = rloo.load_data(Args(dataset_name=data), tiny_tokenizer())
    columns = [{"n": row.get("n"), "m": row.get("m")} for row in rows]
    assert [row["columns"] for part in loaded for row in part] == columns
    said = capsys.readouterr().out
    assert "20 rows have no n, the first is number 1; functions get None" in said and "19 rows have no m," in said
    functions = {"reward_fns": (spec("wants_n_and_m"),), "reward_model_path": None, "num_eval_prompts": 9}
    (metrics,), output = train(dataset_name=data, per_device_train_batch_size=38, total_episodes=38, **functions)
    assert metrics["rewards/wants_n_and_m/mean"] == 1 and len(read_metrics(output, "completions")) == 8


@functools.cache
def client() -> asyncio.Queue:
    """Belongs to the loop in which it is first waited for, like a session of a server."""
    return asyncio.Queue(1)


async def through_a_queue(completions, **columns):
    pairs = [await asyncio.gather(client().get(), client().put(float(len(text)))) for text in completions]
    return [length for length, _ in pairs]


def test_a_reward_function_may_be_a_coroutine():
    """... with a client of its own, which belongs to one loop, and where a loop runs already, as in a notebook."""
    batch, tokenizer = random_batch(), tiny_tokenizer()

    async def notebook():
        return rloo.function_reward("--reward_fns r", through_a_queue, tokenizer, batch)

    scores = rloo.function_reward("--reward_fns r", through_a_queue, tokenizer, batch)
    lengths = torch.tensor([float(len(text)) for text in rloo.completion_texts(batch, tokenizer)]).view(3, 4)
    assert torch.equal(scores, lengths) and torch.equal(asyncio.run(notebook()), lengths)


BAD_RETURNS = [[1.0], [1.0] * 13, None, 3.0, ["1"] * 12, iter([1.0] * 12), torch.zeros(12, 2)]
BAD_RETURNS += [{f"completion {i}": 1.0 for i in range(12)}, {*range(12)}]
BAD_RETURNS += [[number] * 12 for number in (math.nan, math.inf, 1e300)]


@pytest.mark.parametrize("returned", BAD_RETURNS, ids=lambda returned: f"{returned!r:.20}")
def test_what_a_reward_function_may_not_return(returned):
    line = "^--reward_fns r must return a list of 12 finite numbers or Nones, not "
    with pytest.raises(InputError, match=line):
        rloo.function_reward("--reward_fns r", lambda **kw: returned, tiny_tokenizer(), random_batch())


USERS_FILES = {  # content of a file, the error that its use shows, the line where it is
    "import nowhere_to_be_found\n": (ModuleNotFoundError, 1),
    "import json\n\ndef f(completions, **columns):\n    return json.loads('{')\n": (json.JSONDecodeError, 4),
}


@pytest.mark.parametrize("flag", ["reward_fns", "eval_fns"])
@pytest.mark.parametrize("content", USERS_FILES)
def test_an_error_in_a_users_function_is_raised_as_it_is(train, tmp_path, flag, content):
    """... with the trace down to the line of the user's file, and beyond."""
    file = tmp_path / "my_functions.py"
    file.write_text(content)
    error, line = USERS_FILES[content]
    with pytest.raises(error) as raised:
        train(num_eval_prompts=2, **{flag: (f"{file}:f",)})
    assert (file, line) in [(Path(str(place.path)), place.lineno + 1) for place in raised.traceback]


def leaves(**columns):
    sys.exit(0)


def test_a_reward_function_that_exits_is_an_error_and_names_itself(train):
    """... not the end of the run, as if it were complete."""
    with pytest.raises(RuntimeError, match="leaves called exit"):
        train(reward_fns=(spec("leaves"),))


def never(prompts, completions, completion_ids, **columns):
    return [None] * len(prompts)


def test_a_reward_of_weight_0_is_logged_and_makes_nothing_scorable(train):
    functions = {"reward_fns": (spec("never"), spec("constant_reward")), "reward_weights": (1.0, 0.0)}
    (metrics,), _ = train(reward_model_path=None, kl_coef=0.0, **functions)
    assert metrics["rewards/constant_reward/mean"] == 1
    assert "objective/scores" not in metrics and "rewards/never/mean" not in metrics


def test_a_reward_model_reads_the_policys_tokens_or_is_refused(tmp_path):
    """It has the policy's tokenizer, with or without [PAD]: another one would read other words."""

    def reward(policy_tokenizer):
        args = Args(reward_model_path=str(tmp_path), device="cpu", response_length=6, dtype="float32")
        return rloo.load_reward_model(args, policy_tokenizer, 9)["reward_model"]

    save(tmp_path, tiny_model(classifier=True))
    with pytest.raises(InputError, match=f"{tmp_path}: (has another|its) tokenizer"):
        reward(tiny_tokenizer())
    save(tmp_path, tiny_tokenizer())
    vocab = {word: i for word, i in tiny_tokenizer().get_vocab().items() if word != "[PAD]"}
    unpadded = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab)), eos_token="<eos>")
    other_pad = tiny_tokenizer()
    other_pad.add_special_tokens({"pad_token": "<pad>"})
    scores = [reward(tokenizer)(random_batch()) for tokenizer in (unpadded, tiny_tokenizer(), other_pad)]
    assert torch.equal(*scores[:2]) and torch.equal(*scores[1:]) and scores[0].shape == (3, 4)
    more = tiny_tokenizer()
    more.add_tokens(["more"])
    for other in (more, tokenizer_of({word: i for i, word in enumerate(reversed(WORDS), 3)}), tokenizer_of({"z": 3})):
        with pytest.raises(InputError, match=f"{tmp_path}: has another tokenizer"):
            reward(other)


def test_a_reward_model_without_a_score_head_gets_a_random_one_which_depends_on_the_seed_alone(tiny, capsys):
    scores = []
    for seed, before in ((1, 3), (1, 5), (2, 3)):
        torch.manual_seed(before)
        args = Args(reward_model_path=str(tiny / "sft"), device="cpu", dtype="float32", seed=seed)
        scores.append(rloo.load_reward_model(args, tiny_tokenizer(), 9)["reward_model"](random_batch()))
        said = f"{tiny / 'sft'}: has no `score` head and gets a random one, as a reward model good for a trial only\n"
        assert said in capsys.readouterr().out
    assert torch.equal(*scores[:2]) and not torch.equal(*scores[1:])


def test_scores_of_siblings_in_bfloat16_are_told_apart(tmp_path):
    """... where the scores' mean is large and their deviation small: bfloat16 has 32 numbers between 8 and 10. The mean
    is one feature, which is 1 in all hidden states, and its weight, 11.1, which bfloat16 rounds."""
    reward = tiny_model(classifier=True)
    torch.nn.init.normal_(reward.score.weight, std=0.01)
    norm = reward.base_model.final_layer_norm
    norm.weight.data[0], norm.bias.data[0], reward.score.weight.data[0, 0] = 0.0, 1.0, 11.1
    path = save(tmp_path, reward, tiny_tokenizer())
    scores = {}
    for dtype in ("float32", "bfloat16"):
        args = Args(reward_model_path=path, device="cpu", response_length=6, dtype=dtype)
        scores[dtype] = rloo.load_reward_model(args, tiny_tokenizer(), 9)["reward_model"](random_batch(k=8, B=8))
    found = scores["bfloat16"]
    assert found.dtype == torch.float32 and found.std() < 0.3 and len(found.unique()) > 60
    assert (found - scores["float32"]).abs().max() < 0.1


def test_padding_repeats_a_token_of_its_row():
    """Gemma 3n's gradient is NaN at an embedding of zeros, masked or not: that of a pad token, which may be id 0."""
    ids, mask = rloo.pad([[5, 6], [7, 8, 9]], left=True)
    assert ids.tolist() == [[5, 5, 6], [7, 8, 9]] and mask.tolist() == [[False, True, True], [True] * 3]
    known = random_batch()
    batch = rloo.make_batch(known.examples, known.responses.masked_fill(known.responses == 0, 15), stop_ids=[15])
    assert not batch.response_mask.all() and batch.responses.all() and batch.prompt_ids.all()


# ----------------------------------------------------------------------------------------------------------------------
# Flags


def parsed(line: str) -> Args:
    return tyro.cli(Args, args=line.split(), use_underscores=True)


def resolved(line: str) -> Args:
    return rloo.resolve_args(parsed(line))


TRL_1 = (
    "--num-generations 8 --beta 0.1 --num_iterations 3 --epsilon 0.1 --epsilon_high 0.3 --max_completion_length 99 "
    "--reward_funcs x.py:f --normalize_advantages"
)
SAME = "--rloo_k 8 --kl_coef 0.1 --num_ppo_epochs 3 --cliprange 0.1 --cliprange_high 0.3 --response-length 99 "
SAME += "--reward_fns x.py:f --normalize_advantage"


def test_commands_of_trls_documentation_parse_and_mean_the_same():
    """Those of 0.19: benchmark/trl/commands_test.py."""
    args = resolved("--model_name_or_path x --dataset_name y")
    assert args.sft_model_path == "x" and args.eval_fns == ()
    assert parsed(TRL_1) == parsed(SAME) != Args()


DEFAULTS = (  # other ones than TRL 0.19 has; those that it has; and what it has no flag for, since it always does so
    "--rloo_k 4 --kl_coef 0.02 --num_ppo_epochs 1 --num_sample_generations 4 --save_steps 100 --seed 1 "
    "--reward_clip_range None --adam_eps 1e-8 --cliprange 0.2 --lr_scheduler_type linear --max_grad_norm 1.0 "
    "--missing_eos_penalty None --no_normalize_advantage --no_normalize_reward --num_mini_batches 1 --warmup_ratio 0 "
    "--response_length 53 --temperature 0.7 --no_token_level_kl --no_trust_remote_code --weight_decay 0 "
    "--no_mask_truncated_completions"
)


def test_defaults_are_those_of_trl_or_depend_on_what_is_trained(tiny, train):
    assert parsed(DEFAULTS) == Args()
    own = f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_fns x.py:f --device cpu"
    bundled, *others = map(resolved, ("", own, f"--sft_model_path {tiny}/sft --device cpu"))
    assert (bundled.learning_rate, bundled.total_episodes, bundled.dtype) == (2.5e-4, 6400, "float32")
    assert {(args.learning_rate, args.total_episodes, args.dtype) for args in others} == {(1e-6, None, "float32")}
    assert resolved("--reward_fns x.py:f").reward_model_path is None
    assert resolved("--total_episodes 0").total_episodes == 0  # only evaluates
    with pytest.raises(InputError, match="^no reward: "):
        rloo.check_args(resolved(f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --output_dir {tiny}/out"))
    assert resolved("--exp_name x --seed 3").output_dir.startswith("runs/x__3__")

    metrics, output = train(learning_rate=None, total_episodes=None, rloo_k=4)
    assert [update["episode"] for update in metrics] == [16, 32, 48, 64]  # 4 completions of each of 16 prompts
    written = json.loads((output / "args.json").read_text())
    assert metrics[0]["lr"] == written["learning_rate"] == 1e-6 and written["torch"] == torch.__version__
    assert [update["episode"] for update in train(total_episodes=17)[0]] == [16, 32]  # whole updates


def test_devices_and_that_on_a_gpu_attention_is_never_cudnns(tiny, monkeypatch):
    """bfloat16 is the default of one's own task on a GPU that has it; a T4 or V100 emulates it, slowly. Each process of
    torchrun has a GPU of its own, unless --device gives a number. Attention is never cuDNN's, whose backward pass gives
    NaN with some masks."""
    own = f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_fns x.py:f --device cuda"
    for emulated, dtype in ((False, "bfloat16"), (True, "float32")):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True, x=emulated: including_emulation or not x
        )
        assert resolved(own).dtype == dtype and resolved("--device cuda").dtype == "float32"
    assert resolved(f"{own}:1").device == "cuda:1" and resolved(own).device == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert [resolved(x).device for x in (own, f"{own}:1", "--device cpu")] == ["cuda:2", "cuda:1", "cpu"]

    used, enabled, device = [], [], torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", enabled.append)
    assert rloo.start_processes(device) == (0, 1) and used == [device] and enabled == [False]


BROKEN_FILES = {  # what the next test finds in the folder {x}
    "empty.jsonl": "",
    "broken.jsonl": '{"prompt": "a"}\n{"prompt": }\n',
    "list.jsonl": "[1]\n",
    "rows.json": '[{"prompt": "a"}]',
    "text.jsonl": '{"text": "a", "id": 1}\n',
    "chat.jsonl": '{"prompt": [{"role": "user", "content": "a"}]}\n',
    "completions.jsonl": '{"prompt": "a", "completions": "b"}',
    "fns.py": "thing = 5\ndef boom(**kw): 1 / 0\ndef sum(a, **kw): 0\ndef few(n): 0\ndef score(**kw): 0\n",
}
POSITIVE = ["response_length", "max_prompt_length", "local_rollout_forward_batch_size", "per_device_train_batch_size"]
POSITIVE += ["gradient_accumulation_steps", "num_ppo_epochs", "num_mini_batches", "save_total_limit", "temperature"]
MISTAKES = {  # what the line must say -> what is added to a command line that works
    "at least 2": "--rloo_k 1; --rloo_k 0",
    "must be finite and above 0": "; ".join(f"--{name} 0" for name in POSITIVE),
    "at least 0": "--cliprange -0.1; --save_steps -1; --seed -1; --total_episodes -1; --kl_coef nan; "
    "--num_sample_generations -1; --learning_rate -1",
    "must be a multiple of --rloo_k 2": "--per_device_train_batch_size 7",
    "must be at least 0 and below 1": "--warmup_ratio 2; --warmup_ratio 1",
    "must be 1 numbers": "--reward_weights 1 2",
    "must not all be 0": "--reward_weights 0",
    "--reward_clip_range": "--reward_clip_range 2 1; --reward_clip_range 0; --reward_clip_range 1 2 3",
    "boom is taken": "--reward_fns {x}/fns.py:boom {x}/fns.py:boom",
    "score is taken": "--reward_fns {x}/fns.py:score; --eval_fns {x}/fns.py:score",
    "there is no file {x}/no.py": "--reward_fns {x}/no.py:f",
    "must be file.py:function or module:function": "--reward_fns fns; --reward_fns {x}/fns.py; --eval_fns no_module:f",
    "add **columns for those that it ignores": "--reward_fns {x}/fns.py:few; --eval_fns {x}/fns.py:few; "
    "--reward_fns {x}/fns.py:sum",
    "must have no column": "--reward_fns {x}/fns.py:boom --dataset_name {x}/completions.jsonl",
    "fns.py:nothing: there is no nothing in it": "--reward_fns {x}/fns.py:nothing",
    "--resume needs --output_dir": "--resume",
    "--output_dir {x}: is not empty": "--output_dir {x}; --output_dir {x} --resume",
    "there is no such GPU": "--device cuda:99",
    "must be cpu, cuda, cuda:1 or the like": "--device gpu",
    "is subtracted": "--missing_eos_penalty -1; --missing_eos_penalty nan",
    "no .jsonl file, folder of them or (pip install datasets) Hub id": "--dataset_name {x}/nowhere.jsonl; "
    "--dataset_name ./nowhere; --dataset_name nobody/nothing; --dataset_name {x}/rows.json",
    "has no rows in its split dev": "--dataset_train_split dev",
    "--dataset_test_split tset: has no rows": "--dataset_test_split tset",
    "line 1 must be a JSON object like": "--dataset_name {x}/list.jsonl",
    "line 2 must be a JSON object like": "--dataset_name {x}/broken.jsonl",
    "empty.jsonl: has no rows in its split train": "--dataset_name {x}/empty.jsonl",
    "text, id": "--dataset_name {x}/text.jsonl",
    "no chat template": "--dataset_name {x}/chat.jsonl",
    "no prompt is within --max_prompt_length 1": "--max_prompt_length 1",
    "no system": "--dataset_name {x}/chat.jsonl --model_name_or_path {x}/raises",
    "there is no such folder": "--sft_model_path /nowhere; --reward_model_path ./no; --model_name_or_path runs/a/b",
}
OF_MODELS = {  # those that only models show
    "must be one token, is 3": "--stop_token a:b",
    "has 128 positions": "--response_length 125; --response_length 4000",
    "cannot be loaded": "--sft_model_path {x}; --sft_model_path nobody/nothing; --reward_model_path nobody/nothing",
    "lacks weights": "--sft_model_path {reward}",
    "nonsense": "--attn_implementation nonsense",
    "--layout group": "--layout group --attn_implementation eager",
}


def test_a_copy_without_the_bundled_task_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(rloo, "MINI_TLDR", tmp_path / "nowhere")
    with pytest.raises(rloo.InputError, match="^--dataset_name is needed: the bundled task is not at"):
        rloo.check_args(rloo.resolve_args(rloo.Args()))


@pytest.mark.parametrize("message", MISTAKES | OF_MODELS)
def test_a_mistake_is_one_line_and_touches_nothing(tiny, tmp_path, message, monkeypatch, capfd):
    for name, content in BROKEN_FILES.items():
        (tmp_path / name).write_text(content)
    save(tmp_path / "raises", chat_tokenizer("{{ raise_exception('no system messages') }}"))
    monkeypatch.chdir(tmp_path)  # where runs/ would be
    if message not in OF_MODELS:
        monkeypatch.setattr(rloo, "read_model", lambda *inputs: pytest.fail("a model is loaded"))

    def snapshot() -> dict[Path, bytes]:
        files = [path for folder in (tiny, tmp_path) for path in folder.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files if "__pycache__" not in str(path)}

    before, line = snapshot(), command(tiny, "out")
    for text in (MISTAKES | OF_MODELS)[message].split("; "):
        flags = text.format(x=tmp_path, reward=tiny / "reward").split()
        with pytest.raises(SystemExit) as end:
            rloo.command_line((line[:-2] if flags == ["--resume"] else line) + flags)
        said = end.value.code
        assert isinstance(said, str) and said.startswith("rloo.py: ") and "\n" not in said, said
        assert message.format(x=tmp_path) in said and len(said) < 900, said
    assert "Traceback" not in "".join(capfd.readouterr())
    assert snapshot() == before


@pytest.mark.parametrize("flag, rank", [("--rloo_k three", 0), ("--dtype float16", 0), ("--nonsense 3", 1)])
def test_a_flag_that_does_not_parse_is_named_by_the_first_process(monkeypatch, capsys, flag, rank):
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as end:
        rloo.command_line(flag.split())
    said = "".join(capsys.readouterr())
    assert end.value.code == 2 and (said == "" if rank else flag.split()[0] in said)


def test_sdpa_is_refused_where_it_would_ignore_a_cap_of_the_attention(tmp_path):
    save(tmp_path, tiny_model("gemma2"))
    assert rloo.read_model(Args(device="cpu"), str(tmp_path), torch.float32).config._attn_implementation == "eager"
    with pytest.raises(InputError, match="cap, which sdpa would ignore"):
        rloo.read_model(Args(device="cpu", attn_implementation="sdpa"), str(tmp_path), torch.float32)


@pytest.mark.parametrize("change", ["no tokenizer", "three labels", "more than a head", "adapters"])
def test_a_model_that_cannot_be_used_is_refused(train, tiny, tmp_path, monkeypatch, change):
    flags = {f"{name}_model_path": str(shutil.copytree(tiny / name, tmp_path / name)) for name in ("sft", "reward")}
    if change == "no tokenizer":
        words = "prompt is empty|tokenizer cannot be loaded"
        for file in (tmp_path / "sft").glob("*token*"):
            file.unlink()
    elif change == "three labels":
        words = "cannot be loaded"
        kind = AutoModelForSequenceClassification
        save(tmp_path / "reward", kind.from_pretrained(tiny / "reward", num_labels=3, ignore_mismatched_sizes=True))
    elif change == "more than a head":
        words = "computes more than its `score` head"
        kind = type(tiny_model(classifier=True))

        def scaled(self, *inputs, forward=kind.forward, **options):
            output = forward(self, *inputs, **options)
            output.logits = (output.logits - 1) * 20
            return output

        monkeypatch.setattr(kind, "forward", scaled)
    else:  # with peft installed, transformers adds those beside a model, and would save only them
        words = "adapters; merge them"
        monkeypatch.setattr(type(tiny_model()), "peft_config", {}, raising=False)
    with pytest.raises(InputError, match=words):
        train(**flags)
    assert not (tmp_path / "run0").exists()


@pytest.mark.parametrize("layout", ["group", "plain"])
def test_a_tokenizer_needs_no_pad_token_and_may_have_more_tokens_than_prompts_use(train, tiny, tmp_path, layout):
    """The numbers are the same, and it is saved as it was. Gemma 3's text models have one embedding fewer than their
    tokenizer has tokens: that of an image."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["x", "y"])
    tokenizer.pad_token = None
    for name in ("sft", "reward"):
        save(shutil.copytree(tiny / name, tmp_path / name), tokenizer)
    models = {"sft_model_path": f"{tmp_path}/sft", "reward_model_path": f"{tmp_path}/reward"}
    metrics, output = train(**models, layout=layout)
    assert without_times(metrics) == without_times(train(layout=layout)[0])
    assert AutoTokenizer.from_pretrained(output).pad_token is None


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_learning_rates_are_those_of_transformers_but_that_none_is_0(schedule):
    """A warm-up does not begin at 0, and leaves what follows as it was."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 1.0)
    for warmup, ratio in ((0, 0.0), (3, 0.3), (3, 0.21)):  # 2.1 updates are 3
        name = "constant_with_warmup" if schedule == "constant" else schedule
        (factor,) = get_scheduler(name, optimizer, warmup, 10).lr_lambdas
        expected = [(i + 1) / (warmup + 1) for i in range(warmup)] + [factor(i) for i in range(warmup, 10)]
        args = Args(lr_scheduler_type=schedule, warmup_ratio=ratio)
        assert [rloo.share_of_peak(args, done, 10) for done in range(10)] == pytest.approx(expected, rel=1e-12)


def test_each_group_of_an_optimizer_of_ones_own_follows_the_schedule_from_its_own_rate(train, monkeypatch):
    """... also after a resume."""
    made = []

    def two_groups(args, master):
        first, *others = rloo.trained_weights(master).values()
        made.append(torch.optim.AdamW([{"params": [first], "lr": 1e-3}, {"params": others}], args.learning_rate))
        return made[-1]

    monkeypatch.setattr(rloo, "make_optimizer", two_groups)
    metrics, output = train(total_episodes=64)
    train(total_episodes=96, resume=True, output_dir=str(output))
    rates = [x["lr"] for x in read_metrics(output)]
    for optimizer, last in zip(made, (3, 5), strict=True):
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([rates[last] / 10, rates[last]])
    assert rates == pytest.approx([1e-2 * x for x in (1, 3 / 4, 2 / 4, 1 / 4, 2 / 6, 1 / 6)])


def test_seed_kernel_and_whole_numbers_in_a_run(train, tmp_path, monkeypatch):
    """Other flags: the random updates above."""
    one_prompt = write_rows(tmp_path / "x.jsonl", [{"prompt": "a b"}] * 16)  # whatever their order, the seed is seen
    drawn = spy(monkeypatch, "examples_of_update")
    assert not torch.equal(*(final_weights(train(dataset_name=one_prompt, seed=seed)[1]) for seed in (1, 2)))
    assert [inputs[1] for inputs, _ in drawn] == [1, 2]
    base = {"adam_eps": 1e-3, "layout": "plain"}
    eager, sdpa = (final_weights(train(**base, attn_implementation=x)[1]) for x in ("eager", None))
    assert 0 < (eager - sdpa).abs().max() < 1e-3  # by rounding
    whole_numbers = {"kl_coef": 0, "temperature": 1, "learning_rate": 1, "max_grad_norm": 0}  # from Python
    assert torch.equal(*(final_weights(train(**{x: y(z) for x, z in whole_numbers.items()})[1]) for y in (int, float)))


def of_reward_model(inputs, hidden):
    return hidden * math.nan if hasattr(inputs[0], "score") else hidden


SPOILED = {  # what is spoiled in the second update: a function, its output -> what the line calls it
    "logits of the policy": ("final_logits", lambda inputs, out: out * math.nan, "a log-prob"),
    "log-probs of the reference": ("chunked_logprobs", lambda inputs, out: out * math.nan, "a log-prob"),
    "a score": ("completion_hidden", of_reward_model, "a score"),  # it is not taken for one that is not given
    "the loss": ("policy_loss", lambda inputs, out: (out[0] * math.inf, *out[1:]), "a gradient"),
    "a gradient": ("policy_loss", lambda inputs, out: (out[0] + (out[0] * 0).sqrt(), *out[1:]), "a gradient"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_numbers_that_are_not_finite_stop_the_run_before_they_are_saved(train, tmp_path, monkeypatch, kind):
    """The checkpoint of the first update stays the newest."""
    name, spoil, called = SPOILED[kind]
    output = tmp_path / "out"
    metrics = output / "metrics.jsonl"

    def in_second_update(inputs, found):
        return spoil(inputs, found) if metrics.exists() and metrics.read_text() else found

    spy(monkeypatch, name, in_second_update)
    with pytest.raises(FloatingPointError, match=f"^{called}.* is not finite"):
        train(output_dir=str(output), total_episodes=48, save_steps=1)
    assert len(read_metrics(output)) == 1 and saved_updates(output) == [1]
    assert final_weights(output / "checkpoint-1").isfinite().all()


def test_a_policy_that_has_diverged_takes_the_place_of_no_checkpoint(train, tmp_path, monkeypatch):
    """The third of four steps is far too large, which shows when the next completions are sampled."""
    output = tmp_path / "out"
    spy(monkeypatch, "share_of_peak", lambda inputs, share: 1e30 if inputs[1] == 2 else share)
    with pytest.raises(FloatingPointError, match="lower --learning_rate"):
        train(output_dir=str(output), total_episodes=64, save_steps=2, save_total_limit=1)
    assert len(read_metrics(output)) == 3 and saved_updates(output) == [2]


# ----------------------------------------------------------------------------------------------------------------------
# Evaluations


def test_evaluations_are_first_last_and_evenly_between():
    def due(updates: int, between: int) -> list[int]:
        return sorted(rloo.evaluations_due(Args(num_sample_generations=between), updates))

    assert due(50, 4) == [0, 10, 20, 30, 40, 50] and due(50, 1) == [0, 25, 50] and due(23, 3) == [0, 6, 12, 17, 23]
    assert due(12, 0) == [0, 12] and due(1, 4) == [0, 1] and due(0, 4) == [0]


def two_by_length(prompts, completions, completion_ids, n, **columns):
    """None for every second row."""
    return [float(len(ids)) if row % 2 else None for ids, row in zip(completion_ids, n, strict=True)]


def test_what_evaluations_leave_in_files_and_on_the_screen(train, tiny, capsys):
    """A completion of each of five prompts, then the greedy ones; at learning rate 1e-20, so that every evaluation
    finds the same: all draw the same random numbers. A grade that is no number is left out of the means."""
    functions = {"reward_fns": (spec("two_by_length"),), "eval_fns": (spec("count_tokens"),)}
    flags = {"num_eval_prompts": 5, "num_sample_generations": 1, "total_episodes": 64, "learning_rate": 1e-20}
    metrics, output = train(**flags, **functions)
    rows = read_metrics(output, "completions")
    held_out = [json.loads(line) for line in (tiny / "data" / "test.jsonl").read_text().splitlines()][:5]
    expected = [(0, "sampled"), (0, "greedy"), (2, "sampled"), (4, "sampled"), (4, "greedy")]
    expected = [(*when, row) for when in expected for row in held_out]
    names = {"length", "score", "rewards/reward_model", "rewards/two_by_length", "count_tokens"}
    for row, (update, mode, of_data) in zip(rows, expected, strict=True):
        assert {*row} == {"update", "mode", "prompt", "completion", "grades", "columns"}
        assert (row["update"], row["mode"]) == (update, mode)
        assert row["columns"] | {"prompt": row["prompt"]} == of_data
        grades, scored = row["grades"], of_data["n"] % 2 == 1
        assert {*grades} == (names if scored else names - {"rewards/two_by_length"})
        of_function = grades["length"] if scored else 0.0
        assert grades["count_tokens"] == grades["length"] and grades.get("rewards/two_by_length", 0.0) == of_function
        assert len(row["completion"].split()) in (grades["length"], grades["length"] - 1)
        assert grades["score"] == pytest.approx(grades["rewards/reward_model"] + of_function)
    completions = [row["completion"] for row in rows]
    assert completions[:10] == completions[15:] and completions[:5] == completions[10:15] != completions[5:10]

    first, middle, last = read_metrics(output, "evaluations")
    ends = ("", "_stderr", "_count")
    sampled, greedy = ({f"{mode}/{name}{end}" for name in names for end in ends} for mode in ("sampled", "greedy"))
    assert {*middle} == {"update", "episode"} | sampled and {*first} == {*last} == {*middle} | greedy
    for name in names:  # over those that have one
        own = [row["grades"][name] for row in rows[:5] if name in row["grades"]]
        found = [first[f"sampled/{name}{end}"] for end in ends]
        assert found == pytest.approx([mean(own), stdev(own) / len(own) ** 0.5, len(own)]), name
    assert first["sampled/rewards/two_by_length_count"] in (2, 3) and first["sampled/score_count"] == 5
    assert len(metrics) == 4 and not any("eval" in name for update in metrics for name in update)
    screen = capsys.readouterr().out
    assert re.search(r"mean ± standard error.* +update 0 +update 4 *\n", screen)
    value, error = first["sampled/score"], first["sampled/score_stderr"]
    assert re.search(rf"\nsampled/score +{value:.3f} ± {error:.3f} ", screen)
    assert screen.count("query  ") == 3 and completions[0].strip() in screen
    assert re.search(r"\nsampled/rewards/two_by_length .*\((2|3) of 5 have it\)", screen)


def test_samples_are_shown_as_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    samples = [{"prompt": "a b " * 40, "completion": "c d " * 4, "grades": {"score": 1.0}}]
    samples.append({"prompt": "e", "completion": "", "grades": {}})
    lines = rloo.table_of_samples(samples).strip("\n").splitlines()
    assert lines[0].split() == ["query", "|", "response", "|", "score"] and all(len(line) <= 60 for line in lines)
    assert [line for line in lines if line.startswith("-")] == [lines[1], lines[6]] and len(lines) == 8
    first, *_ = lines[2:6]
    assert first.split("|")[1].strip().startswith("c d c d") and first.endswith("1.00")
    assert all("|" in line for line in lines[2:6]) and lines[7].split() == ["e", "|", "|", "nan"]


def test_without_episodes_left_a_run_evaluates_and_ends(train):
    """It needs no reward, leaves no policy, and can be continued by training."""
    graded = {"eval_fns": (spec("count_tokens"),), "num_eval_prompts": 4}
    metrics, output = train(total_episodes=0, reward_model_path=None, **graded)
    assert metrics == [] and not [*output.glob("*.safetensors"), *output.glob("checkpoint-*")]
    (evaluated,) = read_metrics(output, "evaluations")
    assert evaluated["sampled/count_tokens"] == evaluated["sampled/length"] and "sampled/score" not in evaluated
    with pytest.raises(InputError, match="is not empty"):  # its result is not overwritten
        train(total_episodes=0, output_dir=str(output), **graded)
    assert read_metrics(output, "evaluations") == [evaluated]
    train(total_episodes=32, output_dir=str(output), resume=True, **graded)
    before, after = read_metrics(output, "evaluations")
    assert before["sampled/count_tokens"] == evaluated["sampled/count_tokens"] and after["update"] == 2


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs


def count_a(prompts, completions, completion_ids, **columns):
    return [text.split().count("a") for text in completions]


@pytest.fixture(scope="session")
def alone(tiny, tmp_path_factory):
    """The folder and the process of a run of a copy of rloo.py."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(rloo.__file__, folder)
    code = "import os, sys, rloo; print(os.listdir(), flush=True); rloo.command_line(sys.argv[1:])"
    line = [sys.executable, "-Bc", code, *command(tiny, "out", num_eval_prompts=8), "--track"]
    environment = os.environ | {"WANDB_MODE": "offline"}
    with subprocess.Popen(line, cwd=folder, stdout=-1, stderr=-1, text=True, env=environment) as process:
        yield folder, process


def test_the_file_alone_runs_in_an_empty_folder_and_what_it_leaves_loads(alone):
    """Importing it has no side effect."""
    folder, process = alone
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert said.startswith("['rloo.py']\n") and f"results: {folder}/out\n" in said
    out = folder / "out"
    files = {"args.json", "metrics.jsonl", "evaluations.jsonl", "completions.jsonl", "checkpoint-1"}
    files |= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} - {"special_tokens_map.json"} == files
    assert [*folder.glob("wandb/offline-run-*/*.wandb")]
    model, tokenizer = (auto.from_pretrained(out) for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert model(**tokenizer("a b c", return_tensors="pt")).logits.shape == (1, 3, 16)


@pytest.mark.skipif(not rloo.MINI_TLDR.is_dir(), reason="the bundled task is not here: rloo.py was copied alone")
def test_the_main_command_runs_on_the_bundled_task(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    splits = "--dataset_train_split validation --dataset_test_split test"
    rloo.command_line(f"--total_episodes 32 --num_eval_prompts 8 {splits}".split())
    screen = capfd.readouterr().out
    assert "\nsampled/gold_win_rate " in screen and "\nquery  " in screen
    (output,) = (tmp_path / "runs").iterdir()
    assert AutoModelForCausalLM.from_pretrained(output).config.model_type == "gpt_neox"
    (metrics,) = read_metrics(output)
    assert metrics["grad_norm"] > 0 and metrics["lr"] == 2.5e-4


def test_what_an_extension_replaces_is_used_said_and_recorded(tiny, tmp_path, monkeypatch, capsys):
    """That each function can be replaced: extensions_test.py."""
    rloo.command_line(command(tiny, tmp_path / "without"))
    assert "replaced: " not in capsys.readouterr().out

    @dataclass
    class OtherArgs(Args):
        mine: int = 3

    monkeypatch.setattr(rloo, "Args", OtherArgs)
    calls = {name: spy(monkeypatch, name) for name in ("advantage", "attention")}
    rloo.command_line(command(tiny, tmp_path / "with", mine=-5))
    said = capsys.readouterr().out
    assert len(calls["advantage"]) == 1 and calls["attention"]
    with_them, without = (json.loads((tmp_path / name / "args.json").read_text()) for name in ("with", "without"))
    assert with_them["mine"] == -5 and with_them["replaced"].keys() == {"Args", "advantage", "attention"}
    assert with_them["replaced"]["advantage"].startswith(f"{__name__}:") and without["replaced"] == {}
    assert f"replaced: advantage by {__name__}:" in said


def test_an_extension_that_replaces_what_rloo_py_lacks_is_refused(tiny, tmp_path, monkeypatch):
    """... such as a name that is spelled wrong or was changed."""
    monkeypatch.setattr(rloo, "advantge", lambda rewards: rewards, raising=False)
    with pytest.raises(SystemExit, match="^rloo.py: rloo.py has no advantge"):
        rloo.command_line(command(tiny, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Killed, resumed, told to stop, out of space

# Evaluations at 0, 3 and 6 of six updates, with two optimizer steps each; checkpoints at 2, 4 and 6.
LONG = {
    "missing_eos_penalty": 0.5,
    "log_completions": True,
    "total_episodes": 96,
    "num_mini_batches": 2,
    "per_device_train_batch_size": 8,
    "learning_rate": 3e-3,
}
LONG |= {"lr_scheduler_type": "cosine", "warmup_ratio": 0.3, "save_steps": 2, "save_total_limit": 9}
LONG |= {"num_eval_prompts": 4, "num_sample_generations": 1, "eval_fns": (spec("count_tokens"),)}
LONG |= {"reward_fns": (spec("noise"),)}


def noise(prompts, completions, completion_ids, **columns):
    """Random numbers depend on the update alone, in reward functions too."""
    return [random.random() + torch.rand(1).item() for _ in completions]


def run(tiny: Path, output: Path, **flags) -> Path:
    rloo.main(Args(**run_flags(tiny, output, **LONG | flags)))
    return output


def end_of(output: Path) -> dict:
    """What a finished run leaves: weights, metrics without times, evaluations and all completions."""
    return {
        "weights": (output / "model.safetensors").read_bytes(),
        "metrics": without_times(read_metrics(output)),
        "evaluations": (output / "evaluations.jsonl").read_bytes(),
        "completions": (output / "completions.jsonl").read_bytes(),
        "training": (output / "training_completions.jsonl").read_bytes(),
    }


def saved_updates(output: Path) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in rloo.checkpoints(output)]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> Path:
    """A run that nothing interrupts."""
    return run(tiny, tmp_path_factory.mktemp("whole") / "out")


def test_a_run_repeats_itself_and_its_checkpoints_are_models(whole, tiny, tmp_path):
    """... and what is saved, shown or evaluated does not change what is trained."""
    assert end_of(run(tiny, tmp_path / "again", save_steps=0)) == end_of(whole)
    silent = run(tiny, tmp_path / "silent", num_eval_prompts=0, save_total_limit=1)
    assert torch.equal(final_weights(silent), final_weights(whole))
    assert saved_updates(whole) == [6, 4, 2] and saved_updates(silent) == [6]
    assert not torch.equal(final_weights(whole / "checkpoint-4"), final_weights(whole))
    assert torch.equal(final_weights(whole / "checkpoint-6"), final_weights(whole))
    run(tiny, tmp_path / "from a checkpoint", sft_model_path=str(whole / "checkpoint-4"), total_episodes=16)


def test_training_completions_have_the_numbers_that_training_learned_from(whole, train, monkeypatch):
    lines, updates = read_metrics(whole, "training_completions"), read_metrics(whole)
    for metrics in updates:
        own = [line for line in lines if line["update"] == metrics["update"]]
        assert len(own) == 16 and {line["mode"] for line in own} == {"training"}
        for name, metric in (("score", "objective/scores"), ("kl", "objective/kl")):
            assert mean(line["grades"][name] for line in own) == pytest.approx(metrics[metric], abs=1e-5)
        for i in range(0, len(own), 2):  # k = 2: siblings, one after the other, have opposite advantages
            assert own[i]["prompt"] == own[i + 1]["prompt"]
            advantages = [line["grades"]["advantage"] for line in own[i : i + 2]]
            assert advantages[0] == pytest.approx(-advantages[1], abs=1e-6)
    assert len(lines) == 16 * len(updates) and any(line["grades"]["advantage"] > 0 for line in lines)

    collected = spy(monkeypatch, "collect")  # advantages of tokens are added up
    _, output = train(log_completions=True, token_level_kl=True, total_episodes=1)
    sums = collected[0][1].advantages.sum(-1).T.flatten().tolist()
    assert [x["grades"]["advantage"] for x in read_metrics(output, "training_completions")] == pytest.approx(sums)


def error(*inputs, **options):
    raise ZeroDivisionError


def no_space(*inputs):
    raise OSError(28, "No space left on device")


def leave(*inputs):
    sys.exit(0)


def stop(*inputs):
    signal.raise_signal(signal.SIGTERM)


def ctrl_c_twice(*inputs):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    pytest.fail("the second one did not end it")


INTERRUPTED = {  # the starts of one run: a function, its call in this start, what happens there, the newest checkpoint
    "before the first checkpoint": ("policy_loss", 4, error, []),  # half of update 2 is done
    "the first rollout": ("rollout", 1, no_space, []),  # what the one before has left is emptied
    "a signal before training": ("evaluate", 1, stop, [0]),
    "an exit in a reward": ("score", 2, leave, [1]),
    "a signal in a reward": ("score", 1, stop, [1]),
    "a signal in an update": ("improve", 1, stop, [2]),
    "an evaluation's reward": ("score", 2, error, [3]),
    "between the files of an evaluation": ("append", 2, no_space, [3]),
    "Ctrl-C twice in an evaluation": ("score", 1, ctrl_c_twice, [3]),
    "a signal in an evaluation": ("evaluate", 1, stop, [3]),
    "a full disk": ("torch.save", 1, no_space, [4]),  # it is tried once more
    "a rollout": ("rollout", 1, no_space, [4]),
    "between two steps": ("policy_loss", 4, error, [4]),  # of update 6: 5 is lost as well
    "before the first step": ("policy_loss", 3, error, [5]),  # as if memory was too small for the rows of update 6
    "Ctrl-C twice in a reward": ("score", 1, ctrl_c_twice, [5]),
    "the last evaluation": ("score", 3, error, [6]),
    "a full disk at the end": ("save_policy", 1, no_space, [6]),
}


def test_a_run_that_is_interrupted_and_resumed_again_and_again_ends_like_a_whole_one(
    whole, tiny, tmp_path, monkeypatch, capfd, request
):
    """... in which each update is once in all files. An error or a signal says how to go on."""
    output = tmp_path / "out"
    # Shells let jobs in the background ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    for where, (name, call, event, newest) in INTERRUPTED.items():
        owner = torch if name.startswith("torch.") else rloo
        name = name.removeprefix("torch.")
        calls, original = itertools.count(1), getattr(owner, name)

        def interrupted(*inputs, original=original, calls=calls, call=call, event=event, **options):
            if next(calls) == call:
                event()
            return original(*inputs, **options)

        with monkeypatch.context() as patch, pytest.raises((Exception, SystemExit, KeyboardInterrupt)) as end:
            patch.setattr(owner, name, interrupted)
            collected = spy(patch, "collect")
            run(tiny, output, resume=True)
        how = f"to go on, repeat the command with --resume --output_dir {output}"
        if event == stop:
            assert end.value.code == 143 and f"stopped by a signal; {how}\n" in capfd.readouterr().out, where
        elif newest and where not in ("between two steps", "the last evaluation", "a full disk at the end"):
            assert how in "".join(end.value.__notes__).replace("To", "to"), where
        assert saved_updates(output)[:1] == newest, where
        if where == "between the files of an evaluation":
            assert "\n" in (output / "completions.jsonl").read_text().partition('{"update": 3')[2]
        elif event == stop:  # no rollout follows
            assert len(collected) == (1 if where.endswith(("reward", "update")) else 0), where
        elif where == "between two steps":
            (output / "metrics.jsonl").open("a").write('{"update": 6, "obj')  # cut when the power failed
    assert end_of(run(tiny, output, resume=True)) == end_of(whole)
    assert not (output / "unfinished-checkpoint").exists()


def test_an_error_after_an_update_saves_it(whole, tiny, tmp_path, monkeypatch):
    """... and no more than its line of metrics.jsonl is lost, if that is where the error was."""
    output = tmp_path / "out"
    resumed_at(whole, 2, output)
    fails = {"start_tracker": lambda *inputs: types.SimpleNamespace(log=error), "metrics_of": error, "append": error}
    for update, (name, replacement) in enumerate(fails.items(), 3):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(rloo, name, replacement)
            run(tiny, output, resume=True, num_eval_prompts=0)
        assert saved_updates(output)[0] == update
    run(tiny, output, resume=True)
    assert torch.equal(final_weights(output), final_weights(whole))
    assert [update["update"] for update in read_metrics(output)] == [1, 2, 3, 6]


def test_a_sampler_that_differs_ends_the_run_and_the_updates_before_are_saved(tiny, tmp_path, monkeypatch):
    rollouts, check_gap = spy(monkeypatch, "collect"), rloo.check_gap
    monkeypatch.setattr(rloo, "check_gap", lambda args, gaps: check_gap(args, gaps + (len(rollouts) == 3)))
    with pytest.raises(rloo.InputError, match="what samples is not the policy"):
        run(tiny, tmp_path / "out", num_eval_prompts=0, save_steps=0)
    assert saved_updates(tmp_path / "out") == [2]


def test_a_process_that_is_killed_while_it_cuts_a_file_leaves_all_of_it(tmp_path, monkeypatch):
    write_rows(tmp_path / "metrics.jsonl", [{"update": 1}, {"update": 2}])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Path, "replace", error)
        rloo.cut_file(tmp_path / "metrics.jsonl", [1])
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert rloo.cut_file(tmp_path / "metrics.jsonl", [1]) == [{"update": 1}] == read_metrics(tmp_path)


def test_a_run_that_failed_before_it_had_a_result_begins_anew_by_the_same_command(tiny, tmp_path, monkeypatch):
    output = tmp_path / "out"
    for call in (1, 3):  # in the first evaluation, and after it
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            calls = itertools.count(1)
            spy(patch, "score", lambda inputs, found, calls=calls, call=call: error() if next(calls) == call else found)
            run(tiny, output)
    run(tiny, output, total_episodes=16)
    assert [x["update"] for x in read_metrics(output, "evaluations")] == [0, 1]
    with pytest.raises(InputError, match="is not empty"):
        run(tiny, output, total_episodes=16)


def test_resume_says_which_flags_changed_and_goes_on(whole, tiny, tmp_path, capsys):
    output = shutil.copytree(whole, tmp_path / "out")
    changed = {"total_episodes": 144, "save_steps": 9, "learning_rate": 1e-3, "rloo_k": 4, "seed": 7}
    run(tiny, output, resume=True, **changed, reward_fns=(spec("count_a"),))
    said = capsys.readouterr().out.split("resumed after update 6; changed flags: ")[1].splitlines()[0]
    expected = {f"{name} {LONG.get(name)} -> {value}" for name, value in changed.items() if name in LONG}
    expected |= {"rloo_k 2 -> 4", "seed 1 -> 7"}
    expected |= {f"output_dir {whole} -> {output}", f"reward_fns ['{spec('noise')}'] -> ['{spec('count_a')}']"}
    assert {*said.split(", ")} == expected
    assert json.loads((output / "args.json").read_text())["rloo_k"] == 4
    metrics, old = read_metrics(output), read_metrics(whole)
    assert metrics[:6] == old and [update["update"] for update in metrics] == [*range(1, 10)]
    lrs = [1e-3 * (0.5 - 0.5 * math.cos(math.pi * left / 6)) for left in (3, 2, 1)]  # of nine updates, not of three
    assert [update["lr"] for update in metrics[6:]] == pytest.approx(lrs)
    evaluations = read_metrics(output, "evaluations")  # that of the finished run stays
    assert evaluations[:3] == read_metrics(whole, "evaluations") and evaluations[-1]["update"] == 9


def test_a_run_resumed_with_another_batch_ends_at_its_number_of_episodes(whole, tiny, tmp_path, monkeypatch):
    """... or, since updates are whole, just above it, on the prompts that come next."""
    drawn = spy(monkeypatch, "examples_of_update")
    for size, ends in ((4, [40, 48, 56, 64]), (16, [64]), (24, [80])):
        flags = resumed_at(whole, 2, tmp_path / str(size)) | {"per_device_train_batch_size": size}
        metrics = read_metrics(run(tiny, Path(flags.pop("output_dir")), **flags, num_eval_prompts=0, total_episodes=64))
        assert [x["episode"] for x in metrics] == [16, 32, *ends]
        assert [x["update"] for x in metrics] == [*range(1, len(metrics) + 1)]
    assert [inputs[2] for inputs, _ in drawn] == [16, 20, 24, 28, 16, 16]


class RunsCode:
    """Its pickle runs code when it is loaded: here it stops."""

    def __reduce__(self):
        return sys.exit, ("code of a checkpoint was run",)


def saved(thing) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def smaller(moments: dict) -> dict:
    return {number: {name: x[:1] if x.dim() else x for name, x in state.items()} for number, state in moments.items()}


def more(moments: dict) -> dict:
    return moments | {len(moments): moments[0]}


DAMAGED = {  # what happens to a file of the newest checkpoint; None: it is removed
    "model.safetensors": lambda content: content[:-100],
    "optimizer.pt": lambda content: content[:-100],
    "state.json": lambda content: b"{",
    "config.json": None,
    "optimizer.pt that runs code": lambda content: saved(RunsCode()),
    # That of another kind of run, such as one with adapters: AdamW would write beyond its moments.
    "optimizer.pt of other shapes": lambda content: saved(smaller(torch.load(io.BytesIO(content)))),
    "optimizer.pt of more weights": lambda content: saved(more(torch.load(io.BytesIO(content)))),
}


def test_a_damaged_checkpoint_is_not_loaded_and_the_one_before_goes_on(whole, tiny, tmp_path):
    output = shutil.copytree(whole, tmp_path / "out")
    for damage, change in DAMAGED.items():
        file = output / "checkpoint-6" / damage.split()[0]
        content = file.read_bytes()
        file.unlink()
        if change:
            file.write_bytes(change(content))
        errors = InputError if " of " in damage else (RuntimeError, ValueError, pickle.UnpicklingError)
        with pytest.raises(errors):  # not the SystemExit of its code
            run(tiny, output, resume=True)
        file.write_bytes(content)
    file.parent.rename(tmp_path / "away")
    assert end_of(run(tiny, output, resume=True)) == end_of(whole)


def test_a_finished_run_is_not_repeated_and_fewer_episodes_undo_nothing(whole, tiny, tmp_path, monkeypatch, capsys):
    output = shutil.copytree(whole, tmp_path / "out")
    collected = spy(monkeypatch, "collect")
    for episodes in (96, 16):
        run(tiny, output, resume=True, total_episodes=episodes)
        assert not collected and end_of(output) == end_of(whole)
        assert re.search(r"standard error.* +update 0 +update 6 *\n", capsys.readouterr().out)
        with pytest.raises(InputError, match="is not empty; choose another, or --resume if a run is there"):
            run(tiny, output)
    for name in ("checkpoint-100", "checkpoint-10", "checkpoint-x", "unfinished-checkpoint"):
        (output / name).mkdir()
    assert saved_updates(output) == [100, 10, 6, 4, 2]


def test_seeds_are_told_apart_not_added_up_and_every_epoch_is_each_prompt_once():
    """... the run's, the update's and the rank's; in the order of rows the run's and the epoch's."""
    drawn = set()
    for numbers in itertools.product(range(4), repeat=3):
        rloo.set_seed(*numbers)
        drawn.add((torch.rand(1).item(), random.random()))
    assert len(drawn) == len({x for x, _ in drawn}) == 4**3
    orders = {
        tuple(rloo.examples_of_update([*range(50)], seed, 50 * epoch, 50)) for seed in range(5) for epoch in range(5)
    }
    assert len(orders) == 5**2

    rows = [*range(10)]  # every epoch is each prompt once, and small datasets cycle
    drawn = sum((rloo.examples_of_update(rows, 1, begin, 4) for begin in range(0, 40, 4)), [])
    assert all(sorted(drawn[i : i + 10]) == rows for i in range(0, 40, 10))
    assert len(rloo.examples_of_update([1, 2], 1, 0, 7)) == 7


def test_signals_are_noted_but_those_that_are_ignored_as_by_nohup(monkeypatch):
    """... and are as before afterwards. Not every system has SIGHUP, and only the main thread can note signals."""
    handled, ignored = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}, {signal.SIGHUP: signal.SIG_IGN}
    old = {number: signal.getsignal(number) for number in handled}
    try:
        for handlers, noted in ((handled | ignored, [signal.SIGTERM]), (handled, [signal.SIGTERM, signal.SIGHUP])):
            for number, handler in handlers.items():
                signal.signal(number, handler)
            with monkeypatch.context() as patch, rloo.noted_signals() as signals:
                patch.setattr(rloo.dist, "is_initialized", lambda: True)  # so that the second one ends nothing
                for number in handlers:
                    signal.raise_signal(number)
            assert signals == noted and {number: signal.getsignal(number) for number in handlers} == handlers
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)

    def in_a_thread():
        with rloo.noted_signals() as signals:
            noted.append(signals)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    monkeypatch.delattr(signal, "SIGHUP")
    with rloo.noted_signals() as signals:
        stop()
    assert noted[2:] == [[]] and signals == [signal.SIGTERM]


def test_processes_of_a_reward_function_can_be_told_to_end_while_signals_are_noted():
    """As graders of code do with what takes too long."""
    with rloo.noted_signals() as signals:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
        process.start()
        process.join(0.1)
        process.terminate()
        process.join(10)
    assert process.exitcode and signals == []  # it has ended


# ----------------------------------------------------------------------------------------------------------------------
# More than one process


@torch.no_grad()
def ranked_rollout(args, model, examples, k, temperature, stop_ids):
    """Without chance: completion j takes the j-th likeliest token each time, or the stop token for every fifth."""
    sampled = []
    for example in examples:
        rows = torch.tensor([example["prompt_ids"]] * k)
        for _ in range(args.response_length):
            token = model(rows).logits[:, -1].argsort(-1, descending=True)[range(k), range(k)]
            rows = torch.cat([rows, (token * (token % 5 > 0))[:, None]], dim=1)
        sampled.append(rows[:, -args.response_length :])
    batch = rloo.make_batch(examples, torch.stack(sampled, dim=1), stop_ids)
    return batch, rloo.chunked_logprobs(model, batch, temperature or 1.0, 64)


def signal_one(prompts, completions, **columns):
    """SIGTERM for the second of two processes in the second update."""
    if next(CALLS) == 2 and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGTERM)
    return [0.0] * len(prompts)


def note_prompts(prompts, completions, completion_ids, **columns):
    """Notes what each rank trains on, and a random number."""
    if prompts[0] == "b a b":  # held out
        return [0.0] * len(prompts)
    with open(f"{os.environ['NOTES']}/rank{os.environ['RANK']}", "a") as file:
        file.write(json.dumps([random.random(), prompts[::2]]) + "\n")
    return [float(len(prompt)) for prompt in prompts]


CALLS = itertools.count(1)
TOKENS = {"token_level_kl": True, "num_ppo_epochs": 2, "num_eval_prompts": 0}
ONE = {"one": {"save_steps": 1, "save_total_limit": 9}, "one, tokens": TOKENS}
TWO_PROCESSES = {  # a run on two processes: its flags, and the run on one process that it equals
    "two": (ONE["one"], "one"),
    "two, tokens": (TOKENS | {"gradient_checkpointing": True}, "one, tokens"),
    "two, resumed": ({}, "one"),  # from checkpoint 2 of "one"
    # Those below equal no other.
    "two, one held-out row": ({"layout": "plain", "total_episodes": 16, "num_eval_prompts": 1}, None),
    "two, one signalled": ({"total_episodes": 96, "num_eval_prompts": 0, "reward_fns": (spec("signal_one"),)}, None),
}


def several_runs(runs: list[dict], last: list[str], notes: Path):
    """Does the runs one after the other, then a command line."""
    os.environ["NOTES"] = str(notes)
    rollout = rloo.rollout
    rloo.rollout = ranked_rollout
    for flags in runs:
        with contextlib.suppress(SystemExit):
            rloo.main(Args(**flags))
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(2)) for name in ("both", "first", "none")})
    model.device = CPU
    for name in ("both", "first")[: 2 - rloo.rank_and_world()[0]]:
        model[name].grad = torch.ones(2)
    rloo.average_gradients(model)
    print("gradients", [None if weight.grad is None else weight.grad.tolist() for weight in model.parameters()])
    rloo.rollout = rollout
    rloo.command_line(last)


@pytest.fixture(scope="session")
def begun(tiny, tmp_path_factory):
    """The folder of all runs of ONE and TWO_PROCESSES and of a command line, and a function that waits for them."""
    folder = tmp_path_factory.mktemp("processes")

    def flags(name: str, size: int, **more) -> dict:
        base = run_flags(tiny, folder / name, total_episodes=48, save_steps=0, num_eval_prompts=4)
        base |= {"eval_fns": (spec("count_tokens"),), "learning_rate": 1e-3, "adam_eps": 1e-4}
        base |= {"normalize_reward": True, "normalize_advantage": True, "missing_eos_penalty": 1.0}
        base |= {"lr_scheduler_type": "constant", "per_device_train_batch_size": 16 // size} | more
        return base

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rloo, "rollout", ranked_rollout)
        for name, more in ONE.items():
            rloo.main(Args(**flags(name, 1, **more)))
    runs = {name: flags(name, 2, **more) for name, (more, _) in TWO_PROCESSES.items()}
    runs["two, resumed"] |= resumed_at(folder / "one", 2, folder / "two, resumed")

    data = shutil.copytree(tiny / "data", folder / "data")
    write_rows(data / "test.jsonl", [{"prompt": "b a b"}] * 6)
    last = command(tiny, folder / "last", dataset_name=data, num_eval_prompts=6, per_device_train_batch_size=8)
    last += ["--total_episodes", "32", "--response_length", "40", "--reward_fns", spec("note_prompts")]
    return folder, on_two_processes(folder, several_runs, [*runs.values()], last, folder)


@pytest.fixture(scope="module")
def two_processes(begun):
    """The folder of these runs, and what the two processes printed."""
    folder, wait = begun
    return folder, wait()


def assert_equal_runs(one: Path, other: Path):
    """Weights, metrics, evaluations and completions, up to rounding."""
    assert (final_weights(one) - final_weights(other)).abs().max() < 1e-5, other.name
    for name in ("metrics", "evaluations"):
        for ours, theirs in zip(*(without_times(read_metrics(x, name)) for x in (one, other)), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4), other.name
    completions = [[x["completion"] for x in read_metrics(folder, "completions")] for folder in (one, other)]
    assert completions[0] == completions[1], other.name


def test_two_processes_equal_one_and_their_checkpoints_fit_each_other(two_processes, tiny, monkeypatch):
    """Three updates on the same prompts and completions, or two and one after a checkpoint."""
    folder, _ = two_processes
    assert (final_weights(folder / "one") - final_weights(tiny / "sft")).abs().max() > 1e-3
    assert all(0 < x["completions/clipped_ratio"] < 1 for x in read_metrics(folder / "one"))
    for update in read_metrics(folder / "one") + read_metrics(folder / "two"):  # completions of all ranks per second
        seconds = sum(x for name, x in update.items() if name.startswith("time/"))
        assert len([name for name in update if name.startswith("time/")]) == 4
        assert update["eps"] == pytest.approx(16 / seconds)
    for name, (_, one) in TWO_PROCESSES.items():
        if one:
            assert_equal_runs(folder / one, folder / name)
    monkeypatch.setattr(rloo, "rollout", ranked_rollout)
    flags = json.loads((folder / "one" / "args.json").read_text())
    flags = {name: flags[name] for name in vars(Args()) if name in flags}
    rloo.main(Args(**flags | resumed_at(folder / "two", 2, folder / "to one")))
    assert_equal_runs(folder / "one", folder / "to one")


def test_a_signal_to_one_of_two_processes_stops_and_saves_both(two_processes):
    folder, logs = two_processes
    assert saved_updates(folder / "two, one signalled") == [1]
    assert all("stopped by a signal; to go on" in log.read_text() for log in logs)


def test_a_gradient_is_the_mean_over_ranks_where_one_without_it_counts_as_0(two_processes):
    """... such as that of an expert without tokens. One that no rank has is None, not 0, by which AdamW would let it
    decay."""
    for log in two_processes[1]:
        assert "gradients [[1.0, 1.0], [0.5, 0.5], None]\n" in log.read_text()


def test_with_fewer_held_out_rows_than_processes_nothing_is_evaluated(two_processes):
    folder, _ = two_processes
    assert read_metrics(folder / "two, one held-out row", "evaluations") == []
    assert len(read_metrics(folder / "two, one held-out row")) == 1


def test_processes_train_on_different_prompts_and_one_of_them_speaks(two_processes, tiny):
    folder, logs = two_processes
    mains = len(TWO_PROCESSES) - 1  # which are not silenced; one was stopped
    first, second = (log.read_text() for log in logs)
    assert (first.count("\nresults: "), second.count("\nresults: ")) == (mains + 1, mains)
    assert "kl=" in first and "kl=" not in second  # the progress bar
    noted = [json.loads(line) for rank in (0, 1) for line in (folder / f"rank{rank}").read_text().splitlines()]
    assert len({number for number, _ in noted}) == len(noted) == 4  # no two of 2 ranks x 2 updates draw the same
    prompts = [json.loads(line)["prompt"] for line in (tiny / "data" / "train.jsonl").read_text().splitlines()]
    assert sorted(prompt for _, part in noted for prompt in part) == sorted(prompts)  # each of them once
    assert [update["episode"] for update in read_metrics(folder / "last")] == [16, 32]
    held_out = [x["completion"] for x in read_metrics(folder / "last", "completions") if x["mode"] == "sampled"]
    assert len(set(held_out[:6])) == 6  # equal prompts, other random numbers on each rank
