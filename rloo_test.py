"""Tests of rloo.py. They build tiny random models, need no network and no GPU, and read from top to bottom.

First the formulas and whole updates against a second implementation; then group rows and the decoder against a row per
completion, and what other trainers got wrong; at the end whole runs, which are evaluated, interrupted, killed and
resumed, on one process and on two. `-m slow` runs the one test that is left out without it: 100 kills.
"""

import asyncio
import datetime
import functools
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
import warnings
from collections import Counter, defaultdict
from copy import deepcopy
from pathlib import Path
from statistics import mean, stdev
from unittest.mock import ANY

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
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import rloo
from rloo import Args, Batch, InputError

warnings.filterwarnings("ignore", "Unknown pytest.mark.slow")

WORDS = [*"abcdefghijklm"]  # with eos, pad and unknown: a vocabulary of 16
torch.set_num_threads(1)  # the models are tiny


# ---- Tiny models, data and runs --------------------------------------------------------------------------------------


def tiny_tokenizer(pad: str = "[PAD]", words: dict[str, int] | None = None) -> PreTrainedTokenizerFast:
    """Words in, words out. Token 0 is eos, 1 is pad (or pad is eos too), 2 is unknown."""
    words = words or {word: i for i, word in enumerate(WORDS, 3)}
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "[PAD]": 1, "[UNK]": 2} | words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token=pad, unk_token="[UNK]")


SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"max_position_embeddings": 128, "initializer_range": 0.3}
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
GROUP_ROWS = {
    "cohere": HEADS | {"logit_scale": 0.4},
    "deepseek_v2": SIZE | LATENT,  # values are smaller than keys
    "falcon": SIZE,
    "granite": HEADS | {"logits_scaling": 3.0},
    # Is its own base_model, and its routers are linear layers that return a tuple.
    "llama4_text": HEADS | {"num_local_experts": 4, "intermediate_size_mlp": 32, "layer_types": ["full_attention"] * 2},
}
PLAIN_ROWS = {  # those that cannot be computed in group rows
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},  # ALiBi
    "gemma2": HEADS | {"final_logit_softcapping": 2.0, "sliding_window": 12},  # no sdpa
    "mistral": HEADS | {"sliding_window": 12},  # a window shorter than prompt and completion
    "stablelm": HEADS,  # its layers do not hand on how rows are laid out
}
ARCHITECTURES = FAMILIES | GROUP_ROWS | PLAIN_ROWS


def tiny_model(family: str = "gpt_neox", seed: int = 0, classifier: bool = False, layout: str = "group", **config):
    """With random weights; with layout="plain" as transformers makes it."""
    torch.manual_seed(seed)
    tokens = {"vocab_size": 3 + len(WORDS), "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    config = transformers.AutoConfig.for_model(family, **ARCHITECTURES.get(family, {}) | tokens | config)
    if classifier:
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    if layout == "group":
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
    """Samples k completions for each row's prompt: a Batch and the log-probs of its tokens."""
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

    monkeypatch.setattr(rloo, name, noted)
    return seen


def flat_grad(loss: torch.Tensor, model) -> torch.Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(model.parameters(), grads)])


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
    starting = threading.Thread(target=lambda: [process.start() for process in processes])
    starting.start()  # in a thread: starting waits until the server has imported what it needs

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
    """Starts the processes that tests will wait for, so that they run beside the tests before."""
    wanted = {name for item in request.session.items for name in item.fixturenames}
    for name in sorted({"alone", "begun"} & wanted):
        request.getfixturevalue(name)


def constant_reward(prompts, completions, completion_ids, **columns):
    return [1.0] * len(completions)


def count_tokens(prompts, completions, completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def flag_of(**functions) -> tuple[str, ...]:
    """Functions that a test makes, by name, as a flag's values."""
    vars(sys.modules.setdefault("of_this_test", types.ModuleType("of_this_test"))).update(functions)
    return tuple(f"of_this_test:{name}" for name in functions)


# ---- The formulas ----------------------------------------------------------------------------------------------------


def advantages_of(scores, kl, mask, **flags):
    args, ended = Args(**flags), torch.ones_like(scores, dtype=torch.bool)
    rewards = rloo.rewards_of(args, scores, ended, kl)
    return rloo.advantages_for_loss(args, rloo.advantage(rewards), ended, mask)


def test_equal_rewards_have_no_advantage_that_normalization_could_scale_up():
    for k in (3, 4, 7, 8):
        scores = torch.tensor([[0.1, 1.1, 0.7, 0.3]]).expand(k, -1)
        kl, mask = torch.zeros(k, 4, 2), torch.ones(k, 4, 2, dtype=torch.bool)
        for normalize, token_level in itertools.product((False, True), (False, True)):
            assert not advantages_of(scores, kl, mask, normalize_advantage=normalize, token_level_kl=token_level).any()


def test_scores_of_any_size_are_normalized_to_deviation_1():
    scores, ended, kl = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.ones(2, 2).bool(), torch.zeros(2, 2, 1)
    rewards = rloo.rewards_of(Args(normalize_reward=True), scores * 1e-5, ended, kl)
    assert rewards.std().item() == pytest.approx(1, abs=0.01)


def test_a_large_ratio_that_nothing_clips_has_the_gradient_of_its_size():
    """Where A < 0 the gradient of -A ρ is -A ρ. Beyond the largest number it is not finite, which ends a run."""
    for log_ratio, expected in ((5.0, math.exp(5)), (85.0, math.exp(85)), (100.0, math.inf)):
        new = torch.full((1, 1, 1), log_ratio, requires_grad=True)
        advantages, mask = torch.full((1, 1, 1), -1.0), torch.ones(1, 1, 1, dtype=torch.bool)
        losses, _, _ = rloo.policy_loss(new, torch.zeros(1, 1, 1), advantages, mask, 0.2, 0.2)
        losses.sum().backward()
        assert new.grad.item() == pytest.approx(expected) or expected == math.inf and not new.grad.isfinite()


@pytest.mark.parametrize("bias", [0.0, 1000.0, -1000.0, "-inf"])
def test_log_probs_and_entropies_are_those_of_log_softmax(bias):
    """... and the gradient of log-probs; of logits far from zero, and of tokens that are impossible, as well."""
    torch.manual_seed(0)
    model, hidden, tokens = tiny_model(), torch.randn(23, 32, requires_grad=True), torch.randint(10, (23,))
    head = torch.nn.Linear(32, 16)
    if bias == "-inf":
        head.bias.data[10:] = -math.inf
    else:
        head.bias.data.add_(bias)
    model.set_output_embeddings(head)
    full = F.log_softmax(F.linear(hidden.double(), *(p.double() for p in head.parameters())) / 0.7, dim=-1)
    expected = full.gather(1, tokens[:, None]).squeeze(1), -(full.exp() * full.clamp(min=-1e4)).sum(-1)
    found = rloo.block_logprobs(model, hidden, tokens, 0.7)
    tolerance = 1e-3 if bias in (1000.0, -1000.0) else 1e-5  # float32 has 7 digits
    for one, other in zip(found, expected):
        assert torch.allclose(one.double(), other, atol=tolerance)
    assert not found[1].requires_grad  # entropies are only logged
    inputs = [hidden, *head.parameters()]
    gradients = [torch.autograd.grad(x[0] @ torch.arange(23).to(x[0]), inputs) for x in (found, expected)]
    for grad, exact in zip(*gradients):
        assert grad.isfinite().all() and (grad - exact).abs().max() < 20 * tolerance * max(1, exact.abs().max())


def test_padding_is_seen_by_attention_alone(monkeypatch):
    model, batch = tiny_model(), random_batch(k=2, B=8, T=16)
    tokens = batch.prompt_mask.sum() + batch.response_mask.sum()
    layers = spy(monkeypatch, "group_attention")
    rloo.completion_hidden(model, batch)
    assert {query.shape[2] for (_, query, *_), _ in layers} == {int(tokens)}


@pytest.mark.parametrize("kept", [True, False])
def test_logits_are_never_made_for_prompts_nor_all_at_once(kept, monkeypatch):
    """The head sees real completion tokens only, 128 at a time in a large vocabulary, and again in backward if there
    are too many logits to keep."""
    model, batch = tiny_model(vocab_size=2**16), random_batch(k=2, B=8, T=16)
    mask = batch.response_mask
    sizes = [128, int(mask.sum()) - 128]
    monkeypatch.setattr(rloo, "KEPT_LOGITS", int(mask.sum()) * 2**16 - (not kept))
    seen = spy(monkeypatch, "final_logits")
    found = rloo.completion_logprobs(model, batch, 0.7)
    assert [len(hidden) for (_, hidden), _ in seen] == sizes
    gradient = flat_grad(found[0].square().sum(), model)
    assert sorted(len(hidden) for (_, hidden), _ in seen) == sorted(sizes if kept else 2 * sizes)
    hidden = rloo.completion_hidden(model, batch)[:, :, :-1]
    whole = rloo.block_logprobs(model, hidden[mask], batch.responses[mask], 0.7)
    assert all(torch.allclose(x[mask], one, atol=1e-5) for x, one in zip(found, whole))
    exact = flat_grad(whole[0].square().sum(), model)
    assert (gradient - exact).abs().max() < 1e-5 * exact.abs().max()


def test_tokens_that_the_policy_did_not_write_are_read_but_not_learned_from():
    """Those of a tool, in an extension with turns: in the middle of a completion, or its last."""
    batch, scores = random_batch(), torch.rand(3, 4)
    mask = batch.response_mask & (torch.rand(3, 4, 6) < 0.6)
    others = batch._replace(policy_mask=mask)
    for layout in ("plain", "group"):
        model = tiny_model(layout=layout)
        logprobs, whole = (rloo.completion_logprobs(model, x, 0.7) for x in (others, batch))
        assert all(torch.allclose(part, full * mask, atol=1e-6) for part, full in zip(logprobs, whole))
    advantages = advantages_of(scores, torch.rand(3, 4, 6) * mask, mask, token_level_kl=True)
    assert torch.equal(advantages != 0, mask)
    zeros, ones = torch.zeros(3, 4, 6), torch.ones(3, 4, 6)
    assert torch.equal(rloo.policy_loss(zeros, zeros, ones, mask, 0.2, 0.2)[0], -mask.sum(-1).float())


def enumerate_completions(vocab: int, T: int) -> list[list[int]]:
    """Every completion there is: sequences that end at the first stop token (0), and those of T tokens without one."""
    everything = itertools.product(range(vocab), repeat=T)
    return [[*ids] for ids in sorted({ids[: ids.index(0) + 1] if 0 in ids else ids for ids in everything})]


def one_completion_each(prompt_ids: list[int], completions: list[list[int]]) -> Batch:
    """The completions as those (k = 1) of as many times the same prompt."""
    return rloo.make_batch([{"prompt_ids": prompt_ids}] * len(completions), rloo.pad(completions)[0][None], [0])


@pytest.mark.parametrize("token_level", [False, True])
def test_the_expected_update_is_the_exact_gradient(token_level):
    """The mean gradient of the loss over all pairs of completions is that of E[score - β KL(π ‖ π_ref)]."""
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
        losses, _, _ = rloo.policy_loss(new, new.detach(), advantages, mask, 0.2, 0.2)
        update = flat_grad((losses.mean(0) * weight).sum(), policy)
        return ((update - exact).abs().max() / exact.abs().max()).item()

    flags = {"kl_coef": beta, "token_level_kl": token_level}
    assert error(advantages_of(scores, kl, mask, **flags)) < 2e-5
    rewards = rloo.rewards_of(Args(**flags), scores, torch.ones_like(scores).bool(), kl)
    assert error(rewards) < 2e-5  # the baseline changes nothing
    assert error(advantages_of(scores, kl, mask, token_level_kl=token_level, kl_coef=0.0)) > 1e-2  # the KL term counts


# ---- Whole updates, repeated in the plainest way ---------------------------------------------------------------------
# In float64, a row per completion, loops over completions and tokens, nothing from rloo.py. c is (j, b), a completion.


def token_logprobs(model, prompt: list[int], completion: list[int], temperature: float):
    """Log-probs of a completion's tokens, and entropies of what they were drawn from: (length,) each."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    table = logits.log_softmax(-1)
    return table[torch.arange(len(completion)), torch.tensor(completion)], -(table.exp() * table).sum(-1)


def standardized(values: dict) -> dict:
    """To mean 0 and standard deviation 1; of fewer than two the deviation is unknown."""
    if len(values) < 2:
        return {}
    center, scale = mean(values.values()), stdev(values.values()) + 1e-8
    return {c: (x - center) / scale for c, x in values.items()}


def plain_scores(args, raw: dict, ended: dict) -> dict:
    """{c: score} of the completions that have one, after penalty, normalization and the clip."""
    scores = {c: x - (args.missing_eos_penalty or 0) * (not ended[c]) for c, x in raw.items()}
    scores = standardized(scores) if args.normalize_reward else scores
    limits = args.reward_clip_range or (math.inf,)
    low, high = limits if len(limits) == 2 else (-limits[0], limits[0])
    return {c: min(max(x, low), high) for c, x in scores.items()}


def plain_advantages(args, scores: dict, kl: dict) -> dict:
    """{(j, b, t): advantage} where there is one; t is 0 at sequence level. kl: {c: list over tokens}"""
    found = {}
    steps = range(args.response_length if args.token_level_kl else 1)
    # What is still to come from token t on: at 0 all of it, beyond a completion's end its score alone.
    rewards = {(*c, t): x - args.kl_coef * math.fsum(kl[c][t:]) for c, x in scores.items() for t in steps}
    for (j, b, t), reward in rewards.items():
        others = [rewards[(*c, t)] for c in scores if c[1] == b and c[0] != j]
        if t < len(kl[j, b]) and others:
            found[j, b, t] = reward - mean(others)
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


def plain_update(args, policy, reference, found, prompts, completions, ended, orders, optimizer) -> dict:
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
            own = [advantages.get((*c, t), 0.0) for t in range(lengths[c] if args.token_level_kl else 1)]
            loss = loss + completion_loss(args, new, old[c], own, notes) / len(mini_batch)
            notes["policy/entropy_avg"] += entropy.tolist()
            notes["val/ratio"] += (new - old[c]).exp().tolist()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()
        notes["grad_norm"].append(norm.item())
        notes["loss/policy_avg"].append(loss.item())
    sums = {c: math.fsum(x) for c, x in kl.items()}
    groups = [[raw[c] for c in raw if c[1] == b] for b in range(len(prompts))]
    named = {f"rewards/{name}/": [x for x in values.values() if x is not None] for name, values in found.items()}
    metrics = {
        "objective/kl": sums.values() if args.kl_coef else [],
        "objective/non_score_reward": [-args.kl_coef * x for x in sums.values()] if args.kl_coef else [],
        "objective/rlhf_reward": [x - args.kl_coef * sums[c] for c, x in scores.items()],
        "objective/entropy": [-x.sum().item() for x in old.values()],
        "objective/scores": raw.values(),
        "frac_reward_zero_std": [not x or max(x) - min(x) <= 1e-6 for x in groups],
        "completions/mean_length": lengths.values(),
        "completions/clipped_ratio": [not x for x in ended.values()],
        "val/rollout_kl": [0.0],
    }
    metrics |= notes | {name + "mean": x for name, x in named.items()}
    spreads = {name + "std": x for name, x in named.items()} | {"objective/scores_std": raw.values()}
    return (
        {name: mean(map(float, x)) for name, x in metrics.items() if x}
        | {name: stdev(x) for name, x in spreads.items() if len(x) > 1}
        | {"val/ratio_var": stdev(notes["val/ratio"]) ** 2, "val/num_eos_tokens": sum(ended.values())}
    )


def plain_run(args, policy, reference, rewards: dict, stop_ids: list[int], sampled: list, orders: list) -> list[dict]:
    """Metrics of each update. rewards: {name: function of a row and a token list}; sampled: for each update its rows
    and responses (k, B, T); orders: for each epoch of all updates the prompts' numbers."""
    metrics, epochs = [], args.num_ppo_epochs
    options = {"eps": args.adam_eps, "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, **options)
    for done, (rows, responses) in enumerate(sampled):
        completions, ended = {}, {}
        for j, b in ((j, b) for b in range(len(rows)) for j in range(args.rloo_k)):
            ids = responses[j][b].tolist()
            stop = min([t for t, token in enumerate(ids) if token in stop_ids], default=None)
            completions[j, b], ended[j, b] = ids if stop is None else ids[: stop + 1], stop is not None
        found = {name: {c: reward(rows[c[1]], x) for c, x in completions.items()} for name, reward in rewards.items()}
        prompts, own_orders = [row["prompt_ids"] for row in rows], orders[done * epochs : (done + 1) * epochs]
        update = plain_update(args, policy, reference, found, prompts, completions, ended, own_orders, optimizer)
        metrics.append(update | {"update": done + 1, "episode": (done + 1) * len(completions)})
    return metrics


def continuous(n: int, ids: list[int]) -> float:
    """A number that tells almost any two completions apart, so that what is 0 is 0 in any rounding."""
    return math.sin(n + sum((t + 1) * token for t, token in enumerate(ids)))


# Of a row's column n and a completion's tokens; the second is None for half of all completions, and for all of some n.
SCORES = {
    "continuous": continuous,
    "often_none": lambda n, ids: None if n % 4 == 0 or sum(ids) % 2 == 0 else continuous(n, ids),
    "large": lambda n, ids: 100 * continuous(n + 1, ids),
    "constant": lambda n, ids: 1.0,
}


def score_each(score):
    """A reward function that scores each completion by itself."""
    return lambda completion_ids, n, **columns: [score(*both) for both in zip(n, completion_ids, strict=True)]


def flags_drawn(seed: int) -> dict:
    draw = random.Random(seed)
    k, one_of = draw.randint(2, 4), lambda *values: draw.choice(values)
    # Completions of a micro-batch, and how many of these an optimizer step takes: a part of a group, or one, or two.
    size, steps = one_of((1, k), (1, 2 * k), (k, 1), (k, 2), (2 * k, 1))
    epochs, mini_batches = draw.randint(1, 2), one_of(1, 1, 2, 3)
    none = "often_none"
    rewards = one_of("continuous", none, none, f"constant {none}", "large continuous", "", f"{none} continuous").split()
    with_model = rewards in ([], [none, "continuous"])
    weights = tuple(one_of(-0.5, 0.3, 1.0, 2.0) for _ in range(len(rewards) + with_model))
    return {
        "rloo_k": k,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
        "num_mini_batches": mini_batches,
        "num_ppo_epochs": epochs,
        "seed": seed,
        "total_episodes": 2 * size * steps * mini_batches,
        "response_length": draw.randint(2, 5),
        "reward_fns": flag_of(**{name: score_each(SCORES[name]) for name in rewards}),
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
        "lr_scheduler_type": "constant",
        "max_grad_norm": one_of(0.0, 0.1, 1.0),
        "layout": one_of("group", "plain"),
        "local_rollout_forward_batch_size": one_of(64, 4),
    }


@pytest.mark.parametrize("seed", range(18))
def test_updates_equal_a_plain_implementation_for_flags_drawn_at_random(train, tiny, tmp_path, monkeypatch, seed):
    """Weights and metrics of two updates. The reference is another model, since a KL that is 0 but for rounding would
    decide about advantages where all scores are equal."""
    flags = flags_drawn(seed)
    stop_ids, with_model, family, pad = (flags.pop(name) for name in ("stop_ids", "with_model", "family", "pad"))
    model, reference = tiny_model(family), tiny_model(family)
    for weight, other in zip(reference.parameters(), tiny_model(family, seed=1).parameters()):
        weight.data.lerp_(other.data, 0.1)
    model.generation_config.eos_token_id = stop_ids if len(stop_ids) > 1 else 0
    flags |= {"stop_token": f" {WORDS[5 - 3]}"} if stop_ids == [5] else {}  # as it is decoded after another word
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

    def score_of_model(row, ids):  # that of the last token
        hidden = scorer.base_model(torch.tensor([row["prompt_ids"] + ids])).last_hidden_state
        return scorer.score(hidden[0, -1]).item()

    rewards = {"reward_model": score_of_model} if with_model else {}
    for name in (function.rpartition(":")[2] for function in flags["reward_fns"]):
        rewards[name] = lambda row, ids, score=SCORES[name]: score(row["columns"]["n"], ids)
    sampled = [(experience.batch.examples, experience.batch.responses) for _, experience in experiences]
    expected = plain_run(Args(**flags), policy, reference, rewards, stop_ids, sampled, [x.tolist() for x in orders])

    for one, other in zip(without_times(metrics), expected, strict=True):
        assert one.pop("lr") == flags["learning_rate"]
        clipped, plainly_clipped = one.pop("policy/clipfrac_avg"), other.pop("policy/clipfrac_avg")
        assert clipped == pytest.approx(plainly_clipped, abs=other.pop("undecided") + 1e-6)
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    plain_weights = torch.cat([p.detach().flatten() for p in policy.parameters()]).float()
    assert (final_weights(output) - plain_weights).abs().max() < 3e-4  # one case has gradients of 1,000, others 1e-6


# ---- Group rows and the decoder against a row per completion ---------------------------------------------------------


LAYOUTS = [*itertools.product(ARCHITECTURES, ["plain"]), *itertools.product(FAMILIES | GROUP_ROWS, ["group"])]


@pytest.mark.parametrize("name, layout", LAYOUTS)
def test_padded_equals_unpadded(name, layout):
    """Log-probs, their gradients, entropies and scores of padded prompts and completions, in either layout, are those
    that a model as it comes gives each sequence alone."""
    batch, policy, alone = random_batch(), tiny_model(name, layout=layout), tiny_model(name, layout="plain")
    probe(policy, batch.examples, 6)  # is not refused
    family = name if name in FAMILIES else "gpt2"  # of the reward model
    reward = tiny_model(family, 1, classifier=True, layout=layout)
    reward_alone = tiny_model(family, 1, classifier=True, layout="plain", pad_token_id=None)  # a row: head at its end
    found = [*rloo.completion_logprobs(policy, batch, 0.7), rloo.reward_of_model(reward, 64, batch)]
    expected = [torch.zeros_like(x) for x in found]
    for j, b in itertools.product(range(3), range(4)):
        prompt, completion = batch.examples[b]["prompt_ids"], batch.completion_ids()[j * 4 + b]
        for whole, own in zip(expected, token_logprobs(alone, prompt, completion, 0.7)):
            whole[j, b, : len(completion)] = own
        expected[2][j, b] = reward_alone(torch.tensor([prompt + completion])).logits[0, 0]
    weights = torch.linspace(-1, 1, found[0].numel()).view_as(found[0])
    found.append(flat_grad((found[0] * weights).sum(), policy))
    expected.append(flat_grad((expected[0] * weights).sum(), alone))
    for one, other, limit in zip(found, expected, [2e-6, 2e-6, 2e-6, 3e-6], strict=True):
        assert (one - other).norm() < limit * other.norm()


def probe(model, examples: list[dict], T: int, **flags):
    """check_model, as a run calls it for its policy."""
    layout = "group" if rloo.in_group_rows(model) else "plain"
    ours = functools.partial(rloo.chunked_logprobs, model, temperature=0.7, chunk_size=4)
    theirs = functools.partial(rloo.logprobs_alone, temperature=0.7)
    rloo.check_model(Args(response_length=T, layout=layout, **flags), model, examples, ours, theirs)


def prompts_of(*lengths: int) -> list[dict]:
    return [{"prompt_ids": [3 + i % 13 for i in range(n)]} for n in lengths]


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
PHI3 = HEADS | {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}
REFUSED = {  # what a model does: its family and settings, the layouts in which it is refused
    "reads padding": ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2}, ["group", "plain"]),
    "scales its logits in a way of its own": ("hyperclovax", HEADS | {"logits_scaling": 0.9}, ["group", "plain"]),
    "has positions that depend on the length of a row": ("phi3", PHI3, ["group", "plain"]),
    "attends to a window": ("mistral", {}, ["group"]),
    "has attention of its own": ("bloom", {}, ["group"]),
    "does not hand on how rows are laid out": ("stablelm", {}, ["group"]),
    "caps its attention": ("gemma2", {}, ["group", "plain"]),  # where --attn_implementation eager is needed, and said
}


def refusal(folder: Path, model, layout: str, T: int = 8) -> str:
    """What a run says to refuse the model for prompts of 3 and 9 tokens; "" if it does not."""
    args = Args(sft_model_path=save(folder, model), layout=layout, device="cpu", dtype="float32", response_length=T)
    try:
        probe(rloo.read_model(args, args.sft_model_path, torch.float32), prompts_of(3, 9), T)
    except InputError as error:
        return str(error)
    except RuntimeError as error:  # of the model itself, with its trace
        return error.__notes__[0]
    return ""


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_this_file_would_compute_wrongly_is_refused(kind, tmp_path):
    """... by one line, which names --layout plain where that helps."""
    family, config, layouts = REFUSED[kind]
    model = tiny_model(family, layout="plain", **config)
    said = {layout: refusal(tmp_path, model, layout) for layout in ("group", "plain")}
    assert [layout for layout, line in said.items() if line] == layouts, said
    assert "--layout plain" in said["group"] and "\n" not in "".join(said.values())


def test_a_prompt_must_fit_into_the_model(tmp_path):
    assert refusal(tmp_path, tiny_model(max_position_embeddings=17), "group") == ""  # 9 + 8
    assert "has 16 positions" in refusal(tmp_path, tiny_model(max_position_embeddings=16), "group")
    said = refusal(tmp_path, tiny_model(vocab_size=11), "group")  # prompts have the tokens 3 to 11
    assert "a prompt has token id 11" in said and "has 11 tokens" in said


@pytest.mark.parametrize(
    "name, edit, error, words",
    [
        ("draw_tokens", lambda *_: [].pop(), IndexError, "pop from empty list"),
        ("step_attention", lambda _, x: -x, InputError, "sampler does not match"),
        ("draw_tokens", lambda _, x: (x[0], x[1] - 0.02), InputError, "sampler does not match"),
        ("group_attention", lambda _, x: x.flip(1), InputError, "results in group rows are off by"),
    ],
)
def test_a_mistake_in_an_edit_ends_the_run_before_a_step(train, monkeypatch, name, edit, error, words):
    spy(monkeypatch, name, edit)
    steps = spy(monkeypatch, "optimizer_step")
    with pytest.raises(error, match=words):
        train(kl_coef=0.0, response_length=32)
    assert not steps


def test_rounding_is_not_another_sampler_and_top_p_is_one():
    """The mean of log μ - log π_old of sampled tokens is KL(μ || π_old); rounding, of either sign, cancels in it."""
    gaps = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rloo.check_sampler(0.05 * gaps)
    rloo.check_sampler(torch.zeros(1000))
    for another in (0.05 * gaps + 0.03, -math.log(0.9) + 0.0 * gaps, torch.tensor([0.5])):
        with pytest.raises(InputError, match="the sampler does not match the policy"):
            rloo.check_sampler(another)


def test_group_rows_can_be_cut_out(tiny, tmp_path):
    source = Path(rloo.__file__).read_text()
    before, after = (source.index(f"# ---- {title}") for title in ("Group rows", "Models"))
    without = types.ModuleType("rloo")
    without.__file__ = rloo.__file__
    without.in_group_rows = lambda model: False
    exec(compile(source[:before] + source[after:], rloo.__file__, "exec"), vars(without))
    ends = []
    for name, module in (("whole", rloo), ("without", without)):
        flags = {"layout": "plain", "log_completions": True, "total_episodes": 32, "num_eval_prompts": 2}
        module.main(module.Args(**run_flags(tiny, tmp_path / name, **flags)))
        ends.append(end_of(tmp_path / name))
    assert ends[0] == ends[1]


def test_importing_rloo_changes_nothing_else_in_the_process(monkeypatch):
    """... and may be done again."""
    kernels = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(kernels, rloo.GROUP_KERNEL, kernels[rloo.GROUP_KERNEL])  # put back afterwards

    def state():
        others = {name: function for name, function in kernels.items() if name != rloo.GROUP_KERNEL}
        settings = torch.get_num_threads(), torch.get_default_dtype(), torch.backends.cuda.cudnn_sdp_enabled()
        return others, signal.getsignal(signal.SIGINT), settings, random.getstate(), torch.initial_seed(), [*sys.path]

    transformers.set_seed(7)  # not that of an import
    before = state()
    runpy.run_path(rloo.__file__, run_name="again")
    assert state() == before and kernels["sdpa"] is sdpa_attention_forward


@torch.no_grad()
@pytest.mark.parametrize("name, layout", LAYOUTS)
def test_rollout_at_temperature_0_is_greedy_decoding_of_each_prompt_alone(name, layout):
    model, alone, rows = tiny_model(name, layout=layout), tiny_model(name, layout="plain"), random_batch(B=3).examples
    batch, _ = sample_batch(model, rows, 2, 0.0, 8, [0], local_rollout_forward_batch_size=4)
    for b, row in enumerate(rows):
        ids, n = row["prompt_ids"], len(row["prompt_ids"])
        while len(ids) < n + 8 and ids[n:][-1:] != [0]:
            ids = ids + [alone(torch.tensor([ids])).logits[0, -1].argmax().item()]
        assert batch.completion_ids()[b] == batch.completion_ids()[3 + b] == ids[n:]


@torch.no_grad()
def decoded(model, batch: Batch, k: int, T: int, stop_ids: list[int], seed: int = 1) -> tuple:
    """Tokens and log-probs of k completions of each prompt."""
    torch.manual_seed(seed)
    return rloo.decode(model, batch.prompt_ids, batch.prompt_mask, k, T, 1.0, stop_ids)


@pytest.mark.parametrize(
    "k, B, seed, expected",
    [(4, 6, 7, [(8, 4, 6), (16, 3, 4), (28, 2, 2)]), (1, 6, 5, [(8, 1, 6), (16, 1, 2), (28, 1, 1)])],
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
    plain = tiny_model("qwen3", layout="plain")
    assert torch.allclose(logprobs[mask], rloo.completion_logprobs(plain, batch, 1.0)[0][mask], atol=1e-5)


class Graph(TorchDispatchMode):
    """A CUDA graph on a CPU: a replay runs the recorded operations of a step again, on the same memory and without the
    Python around them. CUDA only records, so what they have changed is undone."""

    def __init__(self):
        super().__init__()
        self.operations, self.changed, self.random = [], [], torch.get_rng_state()

    def __torch_dispatch__(self, operation, types, inputs=(), options=None):
        if operation._schema.is_mutable:
            self.changed.append((inputs[0], inputs[0].clone()))
        found = operation(*inputs, **(options or {}))
        self.operations.append((operation, inputs, options or {}, tree_leaves(found)))
        return found

    def __exit__(self, *error):
        super().__exit__(*error)
        torch.set_rng_state(self.random)
        for x, before in reversed(self.changed):
            x.copy_(before)

    def replay(self):
        for operation, inputs, options, outputs in self.operations:
            for old, new in zip(outputs, tree_leaves(operation(*inputs, **options)), strict=True):
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():  # no view, and not in place
                    old.copy_(new)


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "llama", "qwen3_moe"])
def test_replayed_graphs_sample_what_steps_sample(family, monkeypatch):
    """... bit for bit. A step is recorded once for each size of the cache, here 8, 16 and 20 slots."""
    model, prompts, stop_ids = tiny_model(family, seed=3, vocab_size=64), random_batch(B=6), [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(rloo, "FIRST_SLOTS", 8)
    recorded = spy(monkeypatch, "cuda_graph")
    for T, graphs in ((3, 1), (20, 3)):
        plain = decoded(model, prompts, 3, T, stop_ids)
        assert not recorded
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            patch.setattr(torch.cuda, "CUDAGraph", Graph)
            patch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: graph)
            replayed = decoded(model, prompts, 3, T, stop_ids)
        assert len(recorded) == graphs
        assert all(torch.equal(*pair) for pair in zip(plain, replayed, strict=True)), T
        recorded.clear()


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "llama", "qwen3"])
def test_a_rollout_waits_for_nothing_on_the_device(family):
    """Tensors on the meta device have no values: to ask for one raises, as does a tensor on another device."""
    with torch.device("meta"):
        model, prompt_ids, prompt_mask = tiny_model(family), torch.ones(4, 5).long(), torch.ones(4, 5).bool()
    found = rloo.decode(model, prompt_ids, prompt_mask, 2, 3, 0.7, [0, 9])  # with 5 tokens it would ask who ended
    assert all(x.is_meta for x in found)


# ---- What others got wrong, where neither the formulas nor the random updates above show it --------------------------


@pytest.mark.parametrize("layout", ["group", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_update_of_a_batch_has_ratio_exactly_one(train, dtype, layout, monkeypatch):
    """... also where a rollout takes one lane at a time, and where log π_old is read before two steps, which change
    nothing here. The sampler rounds otherwise, and the difference is a metric of its own."""
    flags = {"rloo_k": 4, "local_rollout_forward_batch_size": 1} if dtype == "float32" else {"response_length": 32}
    if (dtype, layout) == ("bfloat16", "group"):
        flags |= {"num_mini_batches": 2, "per_device_train_batch_size": 8, "learning_rate": 1e-20}
    loads, rollouts = spy(monkeypatch, "read_model"), spy(monkeypatch, "rollout")
    metrics, _ = train(dtype=dtype, layout=layout, total_episodes=32, num_eval_prompts=2, **flags)
    for update in metrics:
        assert update["val/ratio"] == 1 and update["val/ratio_var"] == 0
        assert update["policy/clipfrac_avg"] == 0 and update["policy/approxkl_avg"] == 0
        assert abs(update["val/rollout_kl"]) <= (1e-5 if dtype == "float32" else 0.01)
    in_dtype = getattr(torch, dtype)
    assert {inputs[1].dtype for inputs, _ in rollouts} == {in_dtype}  # those of evaluations as well
    others = 3 if dtype == "bfloat16" else 2  # its rounded copy, reference and reward model
    assert [model.dtype for _, model in loads] == [torch.float32] + [in_dtype] * others


@pytest.mark.parametrize("layout", ["group", "plain"])
def test_a_micro_batch_may_be_smaller_than_a_group(train, layout):
    # With a large --adam_eps the update follows the size of gradients.
    flags = {"rloo_k": 8, "adam_eps": 1e-2, "kl_coef": 0.0, "layout": layout}
    sizes = [{"per_device_train_batch_size": n, "gradient_accumulation_steps": 16 // n} for n in (16, 8, 4, 2, 1)]
    whole, *others = (final_weights(train(**flags, **size)[1]) for size in sizes)
    for weights in others:
        assert (weights - whole).abs().max() < 1e-6


def test_in_bfloat16_gradients_of_micro_batches_add_up_in_float32(tmp_path):
    args = Args(sft_model_path=save(tmp_path, tiny_model()), dtype="bfloat16", device="cpu", kl_coef=0.0)
    master, policy, _ = rloo.load_models(args, None)
    total = 0.0
    for prompts in torch.arange(4).split(1):
        logprobs, _ = rloo.completion_logprobs(policy, random_batch().select(slice(None), prompts), 0.7)
        total = total + flat_grad(logprobs.sum(), policy).float()
        logprobs.sum().backward()
    assert torch.equal(torch.cat([weight.grad.flatten() for weight in master.parameters()]), total)
    assert all(weight.dtype == torch.bfloat16 and weight.grad is None for weight in policy.parameters())


def test_no_forward_pass_is_repeated(train, monkeypatch):
    """... but those of layers, with --gradient_checkpointing. Without a KL no reference is loaded."""
    monkeypatch.setattr(rloo, "check_model", lambda *inputs: None)
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
def test_one_temperature_in_sampling_and_scoring_and_no_hidden_sampling_settings(layout, tmp_path, monkeypatch):
    """The model's own generation config is ignored: the frequencies of sampled tokens are those of the softmax that
    scores them. Random numbers have 53 bits: in 24 most tokens of a long tail could never be drawn."""
    path, example, n = save(tmp_path, tiny_model(vocab_size=6)), {"prompt_ids": [3, 4, 5]}, 10_000
    hidden = {"top_k": 1, "repetition_penalty": 3.0, "temperature": 0.1, "do_sample": True, "eos_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(hidden))
    args = Args(sft_model_path=path, dtype="float32", device="cpu", response_length=2, layout=layout, kl_coef=0.0)
    _, model, _ = rloo.load_models(args, None)
    drawn = spy(monkeypatch, "draw_tokens")
    torch.manual_seed(0)
    batch, sampled = sample_batch(model, [example] * 10, n // 10, 1.7, 2, [0], local_rollout_forward_batch_size=n)
    numbers = torch.cat([inputs[2] for inputs, _ in drawn])
    assert numbers.dtype == torch.double and (numbers.float().double() != numbers).any()
    with torch.no_grad():
        completions, model = enumerate_completions(6, 2), tiny_model(vocab_size=6, layout="plain")
        assert torch.allclose(sampled, rloo.completion_logprobs(model, batch, 1.7)[0], atol=1e-5)
        exact = rloo.completion_logprobs(model, one_completion_each([3, 4, 5], completions), 1.7)[0][0].sum(-1).exp()
    assert exact.sum().item() == pytest.approx(1, abs=1e-4)
    found = Counter(map(tuple, batch.completion_ids()))
    counts = torch.tensor([found[tuple(completion)] for completion in completions]).float()
    chi2, freedom = ((counts - n * exact) ** 2 / (n * exact)).sum().item(), len(completions) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)  # five standard deviations of the chi-squared distribution


def test_each_token_has_its_share_of_the_random_numbers_also_one_of_a_long_tail():
    """10,000 tokens of probability 1e-10, which in float32 would add nothing to the sum of the others."""
    logits = torch.cat([torch.zeros(1), math.log(1e-10) - torch.linspace(0, 0.1, 10_000)])[None]
    exact = logits.double().softmax(-1).cumsum(-1)[0]
    for token in (0, 1, 2, 5_000, 9_999, 10_000):
        begin = exact[token - 1].item() if token else 0.0
        inside = (begin + exact[token].item()) / 2
        found, logprob = rloo.draw_tokens(logits, 1.0, torch.tensor([[inside]], dtype=torch.double))
        assert abs(found.item() - token) <= 1e-4 * token, (found, token)  # rounding of the probabilities to float32
        assert logprob.item() == pytest.approx(logits[0, token].item(), abs=1e-4)


def test_a_token_of_probability_0_is_never_drawn():
    largest = 1 - 2**-53
    for n in (4, 20_000):
        logits = torch.zeros(3, n)
        logits[0, [0, -1]] = -math.inf
        logits[1, : n // 2] = -math.inf
        logits[2, n // 2 : -1] = -math.inf
        for uniform in (0.0, 0.25, 0.5, 2 / 3, largest):
            _, logprob = rloo.draw_tokens(logits, 1.0, torch.full((3, 1), uniform, dtype=torch.double))
            assert logprob.isfinite().all()


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
    rewards = rloo.rewards_of(Args(missing_eos_penalty=2.0), torch.zeros(1, 4), other.ended, torch.zeros(1, 4, 4))
    assert rewards[..., 0].tolist() == [[-2, -2, -2, 0]]


def test_stop_ids_come_from_the_generation_config_and_the_tokenizer_if_the_model_can_emit_them():
    model, tokenizer = tiny_model(), tiny_tokenizer()

    def ids(configured, token=None):
        model.generation_config.eos_token_id = configured
        return rloo.stop_token_ids(Args(stop_token=token), model, tokenizer)

    assert ids([7, 9]) == ids([7, 9], "eos") == [0, 7, 9]
    assert ids([7, 9], " c") == tokenizer("c")["input_ids"]  # as it is decoded after another word
    texts = Args(stop_token=" the"), Args(stop_token="s")  # of tokens that begin a word and that do not
    assert [rloo.stop_token_ids(args, model, llama_tokenizer()) for args in texts] == [[5], [7]]
    tokenizer.eos_token = None
    assert ids(3) == ids([16, -1, 3]) == [3]
    with pytest.raises(InputError, match="--stop_token eos: no token of the model ends a completion"):
        ids([16, 17])


def test_unscorable_completions_leave_the_baseline_none_is_not_zero_and_zero_is_not_none():
    """Their own advantage is exactly 0, and so is that of a completion without others, whatever their KL."""
    nan = math.nan
    scores = torch.tensor([[1.0, nan, 0.0, nan], [4.0, nan, nan, 5.0], [nan, 2.0, 3.0, nan], [0.0, 1.0, 2.0, nan]])
    mask = random_batch(k=4, B=4).response_mask
    first, third = [1 - 2.0, 4 - 0.5, 0.0, 0 - 2.5], [0 - 2.5, 0.0, 3 - 1.0, 2 - 1.5]
    found = advantages_of(scores, torch.zeros(4, 4, 6), mask)[..., 0]
    assert found[:, 0].tolist() == pytest.approx(first) and found[:, 2].tolist() == pytest.approx(third)
    assert found[:, 1].tolist() == [0, 0, 1, -1] and found[:, 3].tolist() == [0, 0, 0, 0]
    for token_level, normalize in itertools.product((False, True), (False, True)):
        flags = {"kl_coef": 1.0, "token_level_kl": token_level, "normalize_advantage": normalize}
        kl = torch.rand(4, 4, 6) * mask
        found = advantages_of(scores, kl, mask, **flags) != 0
        assert torch.equal(found.any(-1), ~scores.isnan() & (torch.arange(4) < 3))
        assert not advantages_of(scores * nan, kl, mask, **flags).any()


def test_dropout_is_off_in_rollout_scoring_and_training(train, tmp_path):
    runs = []
    for name, dropout in (("off", 0.0), ("on", 0.5)):
        model = tiny_model(hidden_dropout=dropout, attention_dropout=dropout)
        path = save(tmp_path / name, model, tiny_tokenizer())
        runs.append(train(sft_model_path=path, total_episodes=32, dtype="bfloat16"))
    assert without_times(runs[0][0]) == without_times(runs[1][0])
    assert AutoModelForCausalLM.from_pretrained(runs[1][1]).config.hidden_dropout == 0.5


@pytest.mark.parametrize("settings, layout", [({"top_p": 0.9}, "plain"), ({"pad_token_id": -1}, "group")])
def test_the_saved_model_keeps_its_generation_config_also_one_that_cannot_be_saved(train, tmp_path, settings, layout):
    """... by transformers; many released models have such ones."""
    path, settings = save(tmp_path / "sft", tiny_model(), tiny_tokenizer()), settings | {"eos_token_id": [0, 9]}
    (tmp_path / "sft" / "generation_config.json").write_text(json.dumps(settings))
    _, output = train(sft_model_path=path, layout=layout)
    assert settings.items() <= json.loads((output / "generation_config.json").read_text()).items()
    assert AutoModelForCausalLM.from_pretrained(output / "checkpoint-1").generation_config.eos_token_id == [0, 9]
    assert "group" not in (output / "config.json").read_text()  # nor how it was trained


def resumed_at(output: Path, update: int, to: Path) -> dict:
    """Flags that continue a copy of a run at the checkpoint of an update."""
    shutil.copytree(output, to)
    for newer in range(update + 1, 10):
        shutil.rmtree(to / f"checkpoint-{newer}", ignore_errors=True)
    return {"output_dir": str(to), "resume": True}


def test_a_weight_without_a_gradient_has_no_moments_and_its_run_resumes(train, tmp_path, monkeypatch):
    """... such as that of an expert without tokens. In bfloat16 the first rollout is by the checkpoint, too."""
    updates, step = itertools.count(1), rloo.optimizer_step

    def without_the_first(args, optimizer):
        if next(updates) == 1:
            optimizer.param_groups[0]["params"][0].grad = None
        return step(args, optimizer)

    monkeypatch.setattr(rloo, "optimizer_step", without_the_first)
    flags = {"total_episodes": 48, "save_steps": 1, "save_total_limit": 9, "dtype": "bfloat16"}
    metrics, output = train(**flags)
    moments = torch.load(output / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert len(moments) == len([*tiny_model().parameters()]) - 1
    again, resumed = train(**flags, **resumed_at(output, 1, tmp_path / "again"))
    assert without_times(again) == without_times(metrics)
    assert torch.equal(final_weights(resumed), final_weights(output))


@torch.no_grad()
def test_in_bfloat16_the_policy_is_what_transformers_would_load_of_the_master(tmp_path):
    """... after an update: what a model keeps in float32 is not rounded. Ernie has such a tensor for its routers."""
    ernie = HEADS | {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2}
    args = Args(sft_model_path=save(tmp_path, tiny_model("ernie4_5_moe", **ernie)), dtype="bfloat16", device="cpu")
    master, policy, _ = rloo.load_models(args, None)
    for weight in master.parameters():
        weight.add_(0.1)
    rloo.copy_weights(policy, master)
    master.save_pretrained(tmp_path / "master")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "master", dtype=torch.bfloat16)
    expected, found = (dict([*model.named_parameters(), *model.named_buffers()]) for model in (again, policy))
    assert any(x.dtype == torch.float32 and "correction_bias" in name for name, x in expected.items())
    for name, x in found.items():
        assert x.dtype == expected[name].dtype and torch.equal(x, expected[name]), name


# ---- Data and rewards ------------------------------------------------------------------------------------------------

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
    (tiny_tokenizer(), {"prompt": "b c", "completion": " d", "messages": [ASSISTANT]}, [4, 5]),
    (chat_tokenizer(), {"prompt": "b c"}, [4, 5]),  # a text is read as it is
    (chat_tokenizer(), {"messages": [USER, ASSISTANT]}, [2, 4, 5, 3]),
    (chat_tokenizer(), {"prompt": [USER]}, [2, 4, 5, 3]),
    (chat_tokenizer(), {"messages": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]}, [2, 7, 2, 4, 5, 3, 6, 8, 2, 4, 5, 3]),
    (chat_tokenizer(), {"prompt": [USER, ASSISTANT, SYSTEM]}, [2, 4, 5, 3, 6, 8, 2, 7, 3]),
    (ENDS, {"prompt": [USER, ASSISTANT]}, [2, 4, 5, 15, 3, 6, 8]),  # it is continued
    (TOOLS, {"prompt": [USER], "tools": [{"x": "e"}]}, [7, 2, 4, 5, 3]),
    (NO_TOOLS, {"prompt": [USER], "tools": []}, [3]),  # read as none
    (KWARGS, {"prompt": [USER], "chat_template_kwargs": {"mood": "d"}}, [6, 3]),
    (chat_tokenizer(), {"prompt": [{"role": "user", "content": [{"type": "text", "text": "b c"}]}]}, [2, 4, 5, 3]),
    (NULLS, {"prompt": [USER | {"x": None}]}, [2, 4, 5, 3]),  # a table gives each message the keys of all
    (llama_tokenizer(), {"prompt": "<s> b"}, [1, 8]),
    (llama_tokenizer(add_eos=True), {"prompt": "b"}, [1, 8]),
    (LLAMA_CHAT, {"prompt": [{"role": "user", "content": " b"}]}, [1, 8, 2]),
]


def test_the_tokenizer_puts_nothing_after_a_prompt_and_no_second_bos_before_it(monkeypatch):
    """What is read of a row, in every documented form of rows. A text is tokenized once: 100,000 take a minute."""
    texts, call = [], PreTrainedTokenizerFast.__call__
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", lambda *x, **y: texts.append(x[1]) or call(*x, **y))
    for tokenizer, row, ids in TEXTS:
        columns = {name: value for name, value in row.items() if name != "prompt"}
        assert rloo.prepare_example(row, tokenizer) == {"prompt": ANY, "prompt_ids": ids, "columns": columns}
    assert [text for text in texts if text in ("b c", "b")] == ["b c", "b c", "b"]


def test_prompts_that_skip_the_chat_template_are_said(tmp_path, capsys):
    for row, said in (({"prompt": "a"}, True), ({"prompt": [USER]}, False)):
        data = write_rows(tmp_path / "x.jsonl", [row] * 2)
        rloo.load_data(Args(dataset_name=data, num_eval_prompts=0), chat_tokenizer())
        assert ("prompts are plain text" in capsys.readouterr().out) == said


def test_datasets_from_jsonl_files_folders_and_their_splits(tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b é\u2028"}]  # a line separator inside a text
    file = tmp_path / "validation.jsonl"
    file.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    assert rloo.load_rows(str(file), "train") == rloo.load_rows(str(tmp_path), "validation") == rows
    assert rloo.load_rows(str(tmp_path), "train") == rloo.load_rows(str(file), "test") == []
    write_rows(tmp_path / "test.jsonl", rows * 600)
    write_rows(tmp_path / "x.jsonl", rows * 10)
    for name, flags, sizes in (
        ("", {"dataset_train_split": "validation"}, [2, 500]),
        ("", {"dataset_train_split": "validation", "num_eval_prompts": 7}, [2, 7]),
        ("", {"dataset_train_split": "test", "dataset_test_split": "validation"}, [1200, 2]),
        ("", {"dataset_train_split": "test"}, [1100, 100]),  # not its own training rows: the last tenth, at most 100
        ("x.jsonl", {"num_eval_prompts": 0}, [20, 0]),
        ("x.jsonl", {"max_prompt_length": 1}, [9, 1]),  # every second prompt has 2 tokens
        ("x.jsonl", {}, [18, 2]),
    ):
        parts = rloo.load_data(Args(dataset_name=str(tmp_path / name), **flags), tiny_tokenizer())
        assert [len(part) for part in parts] == sizes
    assert [row["prompt"] for part in parts for row in part] == [row["prompt"] for row in rows * 10]


def test_a_hub_name_goes_to_the_datasets_package(monkeypatch, tmp_path):
    """... whose columns may be anything, such as dates."""
    row = {"prompt": "a", "when": datetime.date(2024, 1, 2)}
    fake = types.SimpleNamespace(load_dataset=lambda name, config: {"train": [row] if config == "main" else []})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert rloo.load_rows("someone/something", "test") == []
    rows, _ = rloo.load_data(Args(dataset_name="someone/something", dataset_config="main"), tiny_tokenizer())
    rloo.append(tmp_path / "x.jsonl", rows)
    assert read_metrics(tmp_path, "x")[0]["columns"] == {"when": "2024-01-02"}
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        rloo.load_rows("someone/something", "train")


def test_reward_functions_see_the_completions_of_a_prompt_one_after_the_other():
    """... with prompts, texts, ids and columns in the same order, as in TRL 1.x, so that it can compare siblings."""
    batch, calls = random_batch(), []
    for i, row in enumerate(batch.examples):
        row.update(prompt=[f"prompt {i}"], columns={"answer": i})

    def reward(prompts, **given):
        calls.append(given | {"prompts": deepcopy(prompts)})
        prompts[0].append("which neither a sibling nor the next function must see")
        assert prompts[1] == ["prompt 0"]
        return [None if i == 3 else i for i in range(12)]

    scores = rloo.function_reward("--reward_fns r", reward, tiny_tokenizer(), batch)
    assert scores[0, 1].isnan() and scores[:, 2].tolist() == [6, 7, 8] and scores.shape == (3, 4)
    order = [*itertools.product(range(4), range(3))]  # b, j
    real = [batch.responses[j, b][batch.response_mask[j, b]].tolist() for b, j in order]
    (given,) = calls
    assert [text.split() for text in given.pop("completions")] == [[WORDS[i - 3] for i in ids if i] for ids in real]
    prompts, answers = [[f"prompt {b}"] for b, _ in order], [b for b, _ in order]
    assert given == {"prompts": prompts, "answer": answers, "completion_ids": real}  # the stop token included
    assert [row["prompt"] for row in batch.examples] == prompts[::3]


def test_texts_are_without_the_stop_token_whatever_it_is_and_otherwise_as_sampled():
    """The stop token may be a word, and tags may be special tokens. A tokenizer that tidies up spaces would make "a ."
    "a.", and SentencePiece drops the space before a text. Ids may have gaps, and models more than tokenizers."""

    def texts(responses: list, stop_id: int, tokenizer) -> list[str]:
        examples = [{"prompt_ids": [3]}] * len(responses[0])
        return rloo.completion_texts(rloo.make_batch(examples, torch.tensor(responses), [stop_id]), tokenizer)

    responses = [[[4, 5, 0, 0], [4, 3, 4, 3]]]
    assert texts(responses, 5, tiny_tokenizer()) == [" b", " b a b a"]
    tagged = tiny_tokenizer()
    tagged.add_special_tokens({"additional_special_tokens": ["b"]})
    assert [text.split() for text in texts(responses, 5, tagged)] == [["b"], ["b", "a", "b", "a"]]
    tidy = tiny_tokenizer(words={".": 3, "a": 4})
    tidy.clean_up_tokenization_spaces = True
    assert texts(responses, 5, tidy) == [" a", " a . a ."]
    gaps = tiny_tokenizer(words={"a": 3, "b": 40})
    assert [text.split() for text in texts([[[40, 3, 0, 0], [199, 3, 199, 3]]], 0, gaps)] == [["b", "a"], ["a", "a"]]
    slow, letters = tiny_tokenizer(), ["", "", "", *WORDS]  # other ids are an IndexError, as those of SentencePiece
    slow.batch_decode = lambda rows, **options: ["".join(letters[i] for i in row) for row in rows]
    assert texts([[[4, 99, 3, 0]]], 0, slow) == ["ba"]
    responses = [[[5, 6, 2, 0], [6, 7, 5, 6]], [[7, 5, 2, 0], [2, 0, 0, 0]]]
    assert texts(responses, 2, llama_tokenizer()) == [" the cat", " cats the cat", "s the", ""]


def test_every_row_has_all_columns_of_the_dataset(tmp_path, capsys):
    """... so that a function is always called with the same names, None where a row has nothing, which is said."""
    rows = [{"prompt": "a b"}] * 18 + [{"prompt": "c", "n": 1}] + [{"prompt": "d", "m": 2}] * 2
    loaded = rloo.load_data(Args(dataset_name=write_rows(tmp_path / "rows.jsonl", rows)), tiny_tokenizer())
    columns = [{"n": row.get("n"), "m": row.get("m")} for row in rows]
    assert [row["columns"] for part in loaded for row in part] == columns
    assert "not every row has all columns (prompt, n, m)" in capsys.readouterr().out


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
    with pytest.raises(InputError, match=line) as error:
        rloo.function_reward("--reward_fns r", lambda **kw: returned, tiny_tokenizer(), random_batch())
    assert ("it returned 13" in str(error.value)) == (isinstance(returned, list) and len(returned) == 13)


@pytest.mark.parametrize("flag", ["reward_fns", "eval_fns"])
def test_an_error_in_a_users_function_is_raised_as_it_is(train, tmp_path, flag):
    """... with the trace down to the line of the user's file, and beyond."""
    file = tmp_path / "my_functions.py"
    file.write_text("import json\n\ndef f(completions, **columns):\n    return json.loads('{')\n")
    with pytest.raises(json.JSONDecodeError) as raised:
        train(num_eval_prompts=2, **{flag: (f"{file}:f",)})
    assert (file, 4) in [(Path(str(place.path)), place.lineno + 1) for place in raised.traceback]


def test_code_of_the_user_that_exits_is_an_error(tiny, tmp_path):
    """... not the end of the run, as if it were complete; nor does an async function leave it waiting."""

    async def leaves_later(**columns):
        sys.exit(0)

    (tmp_path / "quits.py").write_text("import sys; sys.exit(0)")
    functions = flag_of(leaves=lambda **columns: sys.exit(0), leaves_later=leaves_later)
    for number, function in enumerate([*functions, f"{tmp_path}/quits.py:f"]):
        with pytest.raises(SystemExit, match="^rloo.py: a reward function called sys.exit"):
            rloo.command_line(command(tiny, tmp_path / f"out{number}", reward_fns=function))


def test_a_reward_function_that_switches_gradients_off_does_not_change_training(train):
    def switches_gradients_off(completions, **columns):
        torch.set_grad_enabled(False)
        return [1.0] * len(completions)

    functions = spec("constant_reward"), *flag_of(switches_gradients_off=switches_gradients_off)
    with torch.enable_grad():
        weights = [final_weights(train(reward_fns=(function,))[1]) for function in functions]
    assert torch.equal(*weights)


def test_a_reward_of_weight_0_is_logged_and_makes_nothing_scorable_which_is_said(train, capsys):
    functions = *flag_of(never=lambda prompts, **columns: [None] * len(prompts)), spec("constant_reward")
    flags = {"reward_model_path": None, "reward_weights": (1.0, 0.0), "kl_coef": 0.0, "num_eval_prompts": 1}
    (metrics,), _ = train(reward_fns=functions, **flags)
    assert metrics["rewards/constant_reward/mean"] == 1
    assert "objective/scores" not in metrics and "rewards/never/mean" not in metrics
    screen = capsys.readouterr().out
    assert "update 0: sampled/length " in screen
    assert "update 1: the completions of each prompt score the same, or have no score" in screen


def reward_model(path, tokenizer=None, **flags):
    args = Args(reward_model_path=str(path), device="cpu", response_length=6, **{"dtype": "float32"} | flags)
    return rloo.load_reward_model(args, tokenizer or tiny_tokenizer(), prompts_of(9))["reward_model"]


def test_a_reward_model_reads_the_policys_tokens_or_is_refused(tmp_path):
    """It has the policy's tokenizer, with any pad token: another one would read other words."""
    save(tmp_path, tiny_model(classifier=True), tiny_tokenizer())
    other_pad, more = tiny_tokenizer(), tiny_tokenizer()
    other_pad.add_special_tokens({"pad_token": "<pad>"})
    more.add_tokens(["more"])
    scores = [reward_model(tmp_path, tokenizer)(random_batch()) for tokenizer in (tiny_tokenizer(), other_pad)]
    assert torch.equal(*scores) and scores[0].shape == (3, 4)
    for other in (more, tiny_tokenizer(words={word: i for i, word in enumerate(reversed(WORDS), 3)})):
        with pytest.raises(InputError, match=f"{tmp_path}: has another tokenizer"):
            reward_model(tmp_path, other)


def test_scores_of_siblings_in_bfloat16_are_told_apart(tmp_path):
    """bfloat16 has 32 numbers between 8 and 10. One feature, 1 in all hidden states, of weight 11.1, is the mean."""
    reward = tiny_model(classifier=True)
    torch.nn.init.normal_(reward.score.weight, std=0.01)
    norm = reward.base_model.final_layer_norm
    norm.weight.data[0], norm.bias.data[0], reward.score.weight.data[0, 0] = 0.0, 1.0, 11.1
    path, batch = save(tmp_path, reward, tiny_tokenizer()), random_batch(k=8, B=8)
    exact, found = (reward_model(path, dtype=dtype)(batch) for dtype in ("float32", "bfloat16"))
    assert found.dtype == torch.float32 and found.std() < 0.3 and len(found.unique()) > 60
    assert (found - exact).abs().max() < 0.1


def test_padding_repeats_a_token_of_its_row():
    """Gemma 3n's gradient is NaN at an embedding of zeros, masked or not: that of a pad token, which may be id 0."""
    ids, mask = rloo.pad([[5, 6], [7, 8, 9]], left=True)
    assert ids.tolist() == [[5, 5, 6], [7, 8, 9]] and mask.tolist() == [[False, True, True], [True] * 3]


# ---- Flags -----------------------------------------------------------------------------------------------------------


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
    args = resolved("--model_name_or_path x --dataset_name y")
    assert args.sft_model_path == "x" and args.eval_fns == ()
    assert parsed(TRL_1) == parsed(SAME) != Args()


def test_defaults_depend_on_what_is_trained(tiny, train):
    own = f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_fns x.py:f --device cpu"
    bundled, *others = map(resolved, ("", own, f"--sft_model_path {tiny}/sft --device cpu"))
    assert (bundled.learning_rate, bundled.total_episodes, bundled.dtype) == (2.5e-4, 6400, "float32")
    assert {(args.learning_rate, args.total_episodes, args.dtype) for args in others} == {(1e-6, None, "float32")}
    assert resolved("--reward_fns x.py:f").reward_model_path is None
    assert resolved("--total_episodes 0").total_episodes == 0  # only evaluates
    metrics, output = train(learning_rate=None, total_episodes=None, rloo_k=4)
    assert [update["episode"] for update in metrics] == [16, 32, 48, 64]  # 4 completions of each of 16 prompts
    assert metrics[0]["lr"] == json.loads((output / "args.json").read_text())["learning_rate"] == 1e-6
    assert [update["episode"] for update in train(total_episodes=17)[0]] == [16, 32]  # whole updates


def test_devices_and_that_on_a_gpu_attention_is_never_cudnns(tiny, monkeypatch):
    """A T4 or V100 only emulates bfloat16. The backward pass of cuDNN's attention gives NaN with some masks."""
    own = f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_fns x.py:f --device cuda"
    for native, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, x=native: x)
        assert resolved(own).dtype == dtype and resolved("--device cuda").dtype == "float32"
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert [resolved(x).device for x in (own, f"{own}:1", "--device cpu")] == ["cuda:2", "cuda:1", "cpu"]

    used, enabled, device = [], [], torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", enabled.append)
    assert rloo.start_processes(device) == (0, 1) and used == [device] and enabled == [False]


BROKEN_FILES = {  # what the next test finds in the folder {x}
    "broken.jsonl": '{"prompt": "a"}\n{"prompt": }\n',
    "text.jsonl": '{"prompt": "a"}\n{"text": "b"}\n',
    "empty.jsonl": '{"prompt": "a"}\n{"prompt": ""}\n',
    "chat.jsonl": '{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "b"}]}\n',
    "image.jsonl": '{"prompt": "b", "image": "x.png"}',
    "completions.jsonl": '{"prompt": "a", "completions": "b"}',
    "fns.py": "def boom(**kw): 1 / 0\ndef sum(a, **kw): 0\ndef few(n): 0\ndef score(**kw): 0\n",
}
MISTAKES = {  # what the line must say -> what is added to a command line that works
    "at least 2": "--rloo_k 1; --rloo_k 0",
    "must be above 0": "--temperature 0; --num_ppo_epochs 0; --num_mini_batches 0; --save_total_limit 0",
    "must be at least 0": "--max_grad_norm -1; --kl_coef -1; --seed -1; --total_episodes -5",
    "--reward_clip_range: must be": "--reward_clip_range -1; --reward_clip_range 2 1; --reward_clip_range 1 2 3",
    "must be numbers, not all 0": "--reward_weights 0; --reward_weights nan",
    "or be a multiple, such as 16": "--per_device_train_batch_size 7; --per_device_train_batch_size 0",
    "must be whole groups of": "--per_device_train_batch_size 1 --gradient_accumulation_steps 3",
    "--warmup_ratio": "--warmup_ratio 2; --warmup_ratio 1",
    "one per reward, 1 in all": "--reward_weights 1 2",
    "the name score is taken": "--eval_fns {x}/fns.py:score",
    "there is no file {x}/no.py": "--reward_fns {x}/no.py:f --dataset_name {x}/broken.jsonl",
    "there is no function": "--reward_fns {x}/fns.py:g; --reward_fns {x}/fns.py:__name__",
    "must be file.py:function or module:function": "--reward_fns fns; --eval_fns fns",
    "need no others": "--reward_fns {x}/fns.py:few; --eval_fns {x}/fns.py:few; --reward_fns {x}/fns.py:sum",
    "multiple values for keyword": "--reward_fns {x}/fns.py:boom --dataset_name {x}/completions.jsonl",
    "--resume: needs --output_dir": "--resume",
    "--output_dir {x}: is not empty": "--output_dir {x}",
    "no such .jsonl file": "--dataset_name {x}/nowhere.jsonl; --dataset_name {x}/fns.py",
    "has no rows in its split dev": "--dataset_train_split dev",
    "--dataset_test_split tset: has no rows": "--dataset_test_split tset",
    "line 2 must be a JSON object like": "--dataset_name {x}/broken.jsonl",
    "row 2: its `prompt` (text or chat messages) or `messages` cannot be used (it": "--dataset_name {x}/text.jsonl",
    "the prompt has no tokens": "--dataset_name {x}/empty.jsonl",
    "chat_template is not set": "--dataset_name {x}/chat.jsonl",
    "no prompt is within --max_prompt_length 1": "--max_prompt_length 1",
    "tokenizer cannot be loaded": "--sft_model_path /nowhere; --model_name_or_path nobody/nothing",
    "needs --layout plain": "--attn_implementation eager",
    "no token of the model ends": "--stop_token a:b",
    "torch cannot use it": "--device gpu; --device cuda:99",
    "cannot be written to": "--output_dir {x}/text.jsonl; --output_dir /proc/x",
    "images are not supported": "--dataset_name {x}/image.jsonl",
    "cannot be loaded": "--reward_model_path {x}; --sft_model_path {x} --model_name_or_path {sft}",
    "lacks weights": "--sft_model_path {reward}; --reward_model_path {sft}",
}


def test_the_folder_of_a_run_that_failed_at_once_can_be_used_again(tmp_path):
    args = rloo.resolve_args(rloo.Args(output_dir=str(tmp_path), device="cpu"))
    (tmp_path / "args.json").touch()
    rloo.check_args(args)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(rloo.InputError, match="is not empty"):
        rloo.check_args(args)


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_line_and_touches_nothing(tiny, tmp_path, message, monkeypatch, capfd):
    for name, content in BROKEN_FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)  # where runs/ would be

    def snapshot() -> dict[Path, bytes]:
        files = [path for folder in (tiny, tmp_path) for path in folder.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files if "__pycache__" not in str(path) and path.name != ".lock"}

    before, line = snapshot(), command(tiny, "out")
    for text in MISTAKES[message].split("; "):
        flags = text.format(x=tmp_path, sft=tiny / "sft", reward=tiny / "reward").split()
        with pytest.raises(SystemExit) as end:
            rloo.command_line((line[:-2] if flags == ["--resume"] else line) + flags)
        said = end.value.code
        assert isinstance(said, str) and said.startswith("rloo.py: ") and "\n" not in said, said
        assert message.format(x=tmp_path) in said and len(said) < 900, said
    assert "Traceback" not in "".join(capfd.readouterr())
    assert snapshot() == before


@pytest.mark.parametrize("flag", ["--rloo_k three", "--attn_implementation flash_attention_2", "--nonsense 3"])
def test_a_flag_that_does_not_parse_is_named(capsys, flag):
    with pytest.raises(SystemExit, match="2"):
        rloo.command_line(flag.split())
    assert flag.split()[0] in "".join(capsys.readouterr())


def test_a_model_that_cannot_be_used_is_refused(train, tiny, tmp_path, monkeypatch):
    """A reward model with three labels or a sliding window; adapters, which would be saved without the model."""
    labels = type(tiny_model(classifier=True)).from_pretrained(tiny / "sft", num_labels=3)
    window = tiny_model("mistral", classifier=True, layout="plain")
    for model, words in ((labels, "cannot be loaded"), (window, "results in group rows are off by")):
        with pytest.raises(InputError, match=words):
            train(reward_model_path=save(tmp_path / words, model, tiny_tokenizer()))
    monkeypatch.setattr(type(tiny_model()), "peft_config", {}, raising=False)
    with pytest.raises(InputError, match="adapters; merge them"):
        train()


@pytest.mark.parametrize("layout", ["group", "plain"])
def test_a_tokenizer_needs_no_pad_token_and_may_have_more_tokens_than_prompts_use(train, tiny, tmp_path, layout):
    """Gemma 3's text models have one embedding fewer than their tokenizer has tokens: that of an image."""
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
        (factor,) = transformers.get_scheduler(name, optimizer, warmup, 10).lr_lambdas
        expected = [(i + 1) / (warmup + 1) for i in range(warmup)] + [factor(i) for i in range(warmup, 10)]
        args = Args(lr_scheduler_type=schedule, warmup_ratio=ratio)
        assert [rloo.share_of_peak(args, done, 10) for done in range(10)] == pytest.approx(expected, rel=1e-12)


def test_each_group_of_an_optimizer_of_ones_own_follows_the_schedule_from_its_own_rate(train, monkeypatch):
    rates = []

    def two_groups(args, master):
        first, *others = master.parameters()
        optimizer = torch.optim.AdamW([{"params": [first], "lr": 1e-3}, {"params": others}], args.learning_rate)
        optimizer.register_step_pre_hook(lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
        return optimizer

    monkeypatch.setattr(rloo, "make_optimizer", two_groups)
    train(total_episodes=64)
    assert rates == [pytest.approx([1e-3 * x, 1e-2 * x]) for x in (1, 3 / 4, 2 / 4, 1 / 4)]


def test_another_seed_is_another_run(train, tmp_path):
    one_prompt = write_rows(tmp_path / "x.jsonl", [{"prompt": "a b"}] * 16)  # whatever their order, the seed is seen
    assert not torch.equal(*(final_weights(train(dataset_name=one_prompt, seed=seed)[1]) for seed in (1, 2)))


SPOILED = {  # what is spoiled in the second update: a function, its output -> what the line calls it
    "logits of the policy": ("final_logits", lambda _, out: out * math.nan, "a log-prob"),
    "log-probs of the reference": ("chunked_logprobs", lambda _, out: out * math.nan, "a log-prob"),
    "a score": ("completion_hidden", lambda x, out: out * math.nan if hasattr(x[0], "score") else out, "a score"),
    "the loss": ("policy_loss", lambda _, out: (out[0] * math.inf, *out[1:]), "a gradient"),
    "a gradient": ("policy_loss", lambda _, out: (out[0] + (out[0] * 0).sqrt(), *out[1:]), "a gradient"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_numbers_that_are_not_finite_stop_the_run_before_they_are_saved(train, tmp_path, monkeypatch, kind):
    name, spoil, called = SPOILED[kind]
    output = tmp_path / "out"
    metrics = output / "metrics.jsonl"
    spy(monkeypatch, name, lambda inputs, found: spoil(inputs, found) if metrics.exists() else found)
    with pytest.raises(FloatingPointError, match=f"^{called}.* is not finite"):
        train(output_dir=str(output), total_episodes=48)
    assert len(read_metrics(output)) == 1 and saved_updates(output) == []


# ---- Evaluations -----------------------------------------------------------------------------------------------------


def test_evaluations_are_first_last_and_evenly_between(train, monkeypatch):
    """... sampled at --temperature as in training, and greedy at both ends."""
    temperatures = spy(monkeypatch, "rollout")
    evaluated = {"num_eval_prompts": 1, "temperature": 0.5, "learning_rate": 1e-20}
    for updates, between, expected in ((5, 1, [0, 2, 5]), (3, 4, [0, 1, 2, 3]), (2, 0, [0, 2])):
        _, output = train(total_episodes=16 * updates, num_sample_generations=between, **evaluated)
        assert [x["update"] for x in read_metrics(output, "evaluations")] == expected
    found = [inputs[4] for inputs, _ in temperatures[-6:]]  # of 0: sampled, greedy; training; of 2: sampled, greedy
    assert found == [0.5, 0.0, 0.5, 0.5, 0.5, 0.0]


def test_one_grade_has_a_mean_and_no_error():
    assert rloo.mean_and_error({"x": torch.tensor([[2.0, math.nan]])}, "greedy") == {"greedy/x": 2, "greedy/x_count": 1}


def test_the_clock_of_the_bar_never_runs_backwards(train, monkeypatch):
    starts = []
    monkeypatch.setattr(rloo.tqdm, "update", lambda bar, n=1: starts.append(bar.start_t))
    train(total_episodes=48, num_eval_prompts=2, num_sample_generations=2)
    assert len(starts) == 3 and len(set(starts)) == 1


def two_by_length(prompts, completions, completion_ids, n, **columns):
    """None for every second row."""
    return [float(len(ids)) if row % 2 else None for ids, row in zip(completion_ids, n, strict=True)]


def test_what_evaluations_leave_in_files_and_on_the_screen(train, tiny, capsys):
    """Of five prompts; at learning rate 1e-20, so that every evaluation finds the same: all draw the same random
    numbers. A grade that is None is left out of the means. The score is that of training, with its weights."""
    functions = {"reward_fns": (spec("two_by_length"),), "eval_fns": (spec("count_tokens"),), "reward_weights": (1, 3)}
    flags = {"num_eval_prompts": 5, "num_sample_generations": 1, "total_episodes": 64, "learning_rate": 1e-20}
    _, output = train(**flags, **functions)
    rows = read_metrics(output, "completions")
    held_out = read_metrics(tiny / "data", "test")[:5]
    expected = [(0, "sampled"), (0, "greedy"), (2, "sampled"), (4, "sampled"), (4, "greedy")]
    for row, ((update, mode), of_data) in zip(rows, itertools.product(expected, held_out), strict=True):
        assert {*row} == {"update", "mode", "prompt", "completion", "grades", "columns"}
        assert (row["update"], row["mode"]) == (update, mode)
        assert row["columns"] | {"prompt": row["prompt"]} == of_data
        grades, length = row["grades"], row["grades"]["length"]
        of_function = {"rewards/two_by_length": length} if of_data["n"] % 2 else {}
        score = grades["rewards/reward_model"] + 3 * sum(of_function.values())
        known = {"length": length, "count_tokens": length, "rewards/reward_model": grades["rewards/reward_model"]}
        assert grades == known | of_function | {"score": pytest.approx(score)}
        assert len(row["completion"].split()) in (length, length - 1)
    completions = [row["completion"] for row in rows]
    assert completions[:10] == completions[15:] and completions[:5] == completions[10:15] != completions[5:10]

    first, middle, last = read_metrics(output, "evaluations")
    names, ends = [*known, "score", "rewards/two_by_length"], ("", "_stderr", "_count")
    sampled, greedy = ({f"{mode}/{name}{end}" for name in names for end in ends} for mode in ("sampled", "greedy"))
    assert {*middle} == {"update", "episode"} | sampled and {*first} == {*last} == {*middle} | greedy
    for name in names:  # over those that have one
        own = [row["grades"][name] for row in rows[:5] if name in row["grades"]]
        found = [first[f"sampled/{name}{end}"] for end in ends]
        assert found == pytest.approx([mean(own), stdev(own) / len(own) ** 0.5, len(own)]), name
    screen = capsys.readouterr().out
    assert re.search(rf"\nsampled/score .*{first['sampled/score']:.3f}.*{last['sampled/score']:.3f}", screen)
    assert completions[0].strip() in screen


def test_without_episodes_left_a_run_evaluates_and_ends(train):
    """It needs no reward, leaves no policy, and can be continued by training."""
    graded = {"eval_fns": (spec("count_tokens"),), "num_eval_prompts": 4}
    metrics, output = train(total_episodes=0, reward_model_path=None, **graded)
    assert metrics == [] and not [*output.glob("*.safetensors"), *output.glob("checkpoint-*")]
    (evaluated,) = read_metrics(output, "evaluations")
    assert evaluated["sampled/count_tokens"] == evaluated["sampled/length"] and "sampled/score" not in evaluated
    train(total_episodes=32, output_dir=str(output), resume=True, **graded)
    before, after = read_metrics(output, "evaluations")
    assert before["sampled/count_tokens"] == evaluated["sampled/count_tokens"] and after["update"] == 2


# ---- Whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def alone(tiny, tmp_path_factory):
    """The folder and the process of a run of a copy of rloo.py."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(rloo.__file__, folder)
    code = "import os, sys, rloo; print(os.listdir(), flush=True); rloo.command_line(sys.argv[1:])"
    line = [sys.executable, "-Bc", code, *command(tiny, "out", num_eval_prompts=8)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}  # which lacks the sign of ±
    with subprocess.Popen(line, cwd=folder, stdout=-1, stderr=-1, text=True, env=environment) as process:
        yield folder, process


def test_the_file_alone_runs_in_an_empty_folder_and_what_it_leaves_loads(alone):
    folder, process = alone
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert said.startswith("['rloo.py']\n") and f"results: {folder}/out\n" in said
    out = folder / "out"
    files = {"args.json", "metrics.jsonl", "evaluations.jsonl", "completions.jsonl", "checkpoint-1"}
    files |= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == files | {".lock"}
    model, tokenizer = (auto.from_pretrained(out) for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert model(**tokenizer("a b c", return_tensors="pt")).logits.shape == (1, 3, 16)


@pytest.mark.skipif(not rloo.MINI_TLDR.is_dir(), reason="the bundled task is not here: rloo.py was copied alone")
def test_the_main_command_runs_on_the_bundled_task(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    splits = "--dataset_train_split validation --dataset_test_split test"
    rloo.command_line(f"--total_episodes 32 --num_eval_prompts 8 {splits}".split())
    assert "\nsampled/gold_win_rate " in capfd.readouterr().out
    (output,) = (tmp_path / "runs").iterdir()
    (metrics,) = read_metrics(output)
    assert metrics["grad_norm"] > 0 and metrics["lr"] == 2.5e-4


def test_runs_are_logged_and_resumed_ones_continue_their_log(train, tmp_path, monkeypatch):
    """... with the number of updates as the step, which may go back, unlike the service's own."""
    logged, started, steps = [], [], []
    service = types.SimpleNamespace(
        init=lambda **flags: started.append(flags),
        define_metric=lambda name, step_metric: steps.append((name, step_metric)),
        log=logged.append,
        Table=lambda columns, rows: rows,
    )
    monkeypatch.setitem(sys.modules, "wandb", service)
    flags = {"track": True, "num_eval_prompts": 4, "output_dir": str(tmp_path / "out"), "total_episodes": 32}
    metrics, output = train(**flags, wandb_project_name="project", wandb_entity="team")
    assert started[0].items() >= {"project": "project", "entity": "team", "name": "out"}.items()
    assert [x["update"] for x in logged] == [0, 1, 2, 2] and logged[1:3] == metrics
    first, last = read_metrics(output, "evaluations")
    assert logged[3].items() >= {f"eval/{name}": x for name, x in last.items()}.items()
    sample, *_ = read_metrics(output, "completions")
    assert logged[0]["samples"][0][:2] == [sample["prompt"], sample["completion"]]
    train(**flags | {"total_episodes": 48}, resume=True)
    train(**flags | {"output_dir": str(tmp_path / "other")})
    one, resumed, other = (flags["id"] for flags in started)
    assert one == resumed != other and {flags["resume"] for flags in started} == {"allow"}
    assert steps == [("*", "update")] * 3


def test_what_else_ends_with_one_line(tiny, tmp_path, monkeypatch, capsys):
    """Ctrl-C while models load; before that a service that does not start; rloo.py without the bundled task."""
    monkeypatch.setattr(rloo, "load_models", lambda *inputs: signal.default_int_handler(signal.SIGINT, None))
    monkeypatch.setattr(rloo, "MINI_TLDR", tmp_path / "mini_tldr")
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **flags: [].pop()))
    line, other = command(tiny, tmp_path / "out"), tmp_path / "other"
    for flags, words in (
        ([*line, "--track"], "--track: .*wandb login.*IndexError: pop from empty list.*"),
        (["--output_dir", str(other)], f"the bundled task is not at {tmp_path}.*; give --sft_model_path, .*"),
    ):
        with pytest.raises(SystemExit, match=f"^rloo.py: {words}$"):
            rloo.command_line(flags)
    assert not other.exists()
    with pytest.raises(SystemExit, match="^130$"):
        rloo.command_line(line)
    assert capsys.readouterr().err == "rloo.py: interrupted; not saved\n"
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match="--track: .*ModuleNotFoundError"):
        rloo.start_tracker(Args(track=True), tmp_path, "1")


def test_a_reward_function_may_be_anywhere(tmp_path, monkeypatch):
    """... also in a file whose name Python has taken or cannot import. Two files of one name are refused."""
    monkeypatch.chdir(tmp_path)
    for file, content in {
        "rewards/__init__.py": "",
        "rewards/beside.py": "one = 1.0",
        "rewards/length.py": "from .beside import one\ndef f(**columns): return [one]",
        "beside_it.py": "two = 2.0",
        "my_rewards.py": "from beside_it import two\ndef f(**columns): return [two]",
        "json.py": "def f(**columns): return [3.0]",
        "my.reward.py": "def f(**columns): return [4.0]",
        "other/my_rewards.py": "def f(**columns): return [5.0]",
    }.items():
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_text(content)
    sources = ("rewards.length", "my_rewards.py", "json.py", "my.reward.py")
    assert [rloo.load_function(f"{source}:f")() for source in sources] == [[1.0], [2.0], [3.0], [4.0]]
    with pytest.raises(InputError, match="other/my_rewards.py:f: rename it"):
        rloo.load_function("other/my_rewards.py:f")
    assert sys.modules["json"] is json


# ---- Killed, resumed, told to stop, out of space ---------------------------------------------------------------------

# Evaluations at 0, 3 and 6 of six updates, with two optimizer steps each; checkpoints at 2, 4 and 6.
LONG = {"total_episodes": 96, "num_mini_batches": 2, "per_device_train_batch_size": 8, "log_completions": True}
LONG |= {"learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_ratio": 0.3, "missing_eos_penalty": 0.5}
LONG |= {"save_steps": 2, "save_total_limit": 9, "num_eval_prompts": 4, "num_sample_generations": 1}
LONG |= {"eval_fns": (spec("count_tokens"),), "reward_fns": (spec("noise"),)}


def noise(prompts, completions, completion_ids, **columns):
    """Random numbers depend on the update alone, in reward functions too."""
    return [random.random() + torch.rand(1).item() for _ in completions]


def run(tiny: Path, output: Path, **flags) -> Path:
    rloo.main(Args(**run_flags(tiny, output, **LONG | flags)))
    return output


def end_of(output: Path) -> dict:
    """What a finished run leaves: weights, metrics without times, evaluations and all completions."""
    files = ("model.safetensors", "evaluations.jsonl", "completions.jsonl", "training_completions.jsonl")
    return {name: (output / name).read_bytes() for name in files} | {"metrics": without_times(read_metrics(output))}


def saved_updates(output: Path) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in rloo.checkpoints(output)]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory) -> Path:
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


def test_training_completions_have_the_numbers_that_training_learned_from(whole):
    lines, updates = read_metrics(whole, "training_completions"), read_metrics(whole)
    assert len(lines) == 16 * len(updates) and {line["mode"] for line in lines} == {"training"}
    of_means = {"score": "objective/scores", "kl": "objective/kl", "rewards/noise": "rewards/noise/mean"}
    for metrics in updates:
        own = [line["grades"] for line in lines if line["update"] == metrics["update"]]
        for name, metric in of_means.items():
            assert mean(grades[name] for grades in own) == pytest.approx(metrics[metric], abs=1e-5)
        for one, other in zip(own[::2], own[1::2]):  # k = 2: siblings, one after the other, have opposite advantages
            assert one["advantage"] == pytest.approx(-other["advantage"], abs=1e-6) != 0


ERROR, FULL = ZeroDivisionError(), OSError(28, "No space left on device")
INTERRUPTED = {  # starts of one run: a function, its call, what happens there (so many Ctrl-C), the newest checkpoint
    "before the first checkpoint": ("policy_loss", 4, ERROR, []),  # half of update 2 is done
    "a reward": ("scores_of", 4, ERROR, [1]),
    "Ctrl-C in an update": ("improve", 1, 1, [2]),
    "Ctrl-C twice in a reward": ("scores_of", 1, 2, [2]),
    "an evaluation's reward": ("scores_of", 2, ERROR, [2]),
    "between the files of an evaluation": ("append", 4, FULL, [2]),
    "a full disk": ("torch.save", 1, FULL, [2]),
    "before a checkpoint has its name": ("Path.rename", 1, ERROR, [2]),
    "a rollout": ("rollout", 3, FULL, [3]),
    "between two steps": ("policy_loss", 2, ERROR, [3]),
    "Ctrl-C in an evaluation": ("evaluate", 1, 1, [4]),
    "the last evaluation": ("scores_of", 3, ERROR, [6]),
    "a full disk at the end": ("save_policy", 1, FULL, [6]),
}


def test_a_run_that_is_interrupted_and_resumed_again_ends_like_a_whole_one(whole, tiny, tmp_path, monkeypatch):
    """... in which each update is once in all files. What was saved says how to go on."""
    output, handler = tmp_path / "out", signal.getsignal(signal.SIGINT)
    to_continue = f"to continue, repeat the command with --resume --output_dir {output}"
    for where, (name, call, event, newest) in INTERRUPTED.items():
        owner = {"torch": torch, "Path": Path}.get(name.rpartition(".")[0], rloo)
        name, calls = name.rpartition(".")[2], itertools.count(1)
        original = getattr(owner, name)

        def interrupted(*inputs, original=original, calls=calls, call=call, event=event, **options):
            if next(calls) == call:
                if isinstance(event, Exception):
                    raise event
                for _ in range(event):
                    signal.raise_signal(signal.SIGINT)
            return original(*inputs, **options)

        with monkeypatch.context() as patch, pytest.raises((Exception, SystemExit, KeyboardInterrupt)) as end:
            patch.setattr(owner, name, interrupted)
            run(tiny, output, resume=True)
        assert saved_updates(output)[:1] == newest, where
        if where in ("a reward", "a rollout"):
            assert to_continue in "".join(end.value.__notes__), where
        if isinstance(event, int):
            said = f"stopped and saved; {to_continue}" if event == 1 else ""  # the second one ends it at once
            assert str(end.value) == said, where
        if where == "between two steps":
            (output / "metrics.jsonl").open("a").write('{"update": 6, "obj')  # cut when the power failed
        assert signal.getsignal(signal.SIGINT) == handler, where
    assert end_of(run(tiny, output, resume=True)) == end_of(whole)
    assert not (output / "unfinished-checkpoint").exists()


def test_ctrl_c_saves_though_it_ends_the_pipe_to_tee(tiny, tmp_path, monkeypatch):
    def broken(*inputs, **options):
        raise BrokenPipeError

    def interrupted(*inputs, improve=rloo.improve):
        for name in ("write", "set_postfix", "update"):
            monkeypatch.setattr(rloo.tqdm, name, broken)
        signal.raise_signal(signal.SIGINT)
        return improve(*inputs)

    monkeypatch.setattr(rloo, "improve", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped and saved"):
        run(tiny, tmp_path / "out")
    assert saved_updates(tmp_path / "out") == [1]


@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_runs_that_are_killed_at_random_moments_and_resumed_end_like_a_whole_one(tiny, tmp_path, whole, request, kills):
    """SIGKILL, also during a save. The first run, which nothing kills, says how long one takes."""
    if kills == 100 and request.config.getoption("markexpr") != "slow":
        pytest.skip("takes minutes: -m slow")
    draw, done, seconds = random.Random(1), 0, None
    for n in itertools.count():
        output, exitcode = tmp_path / f"run{n}", None
        while exitcode != 0:
            process = forkserver().Process(target=run, args=(tiny, output), kwargs={"resume": True, "save_steps": 1})
            process.start()  # waits until the server has imported what it needs
            begin = time.perf_counter()
            process.join(draw.uniform(0, seconds) if seconds and done < kills else None)
            seconds = seconds or time.perf_counter() - begin
            if process.is_alive():
                process.kill()
                process.join()
                done += 1
            exitcode = process.exitcode
            assert exitcode in (0, -signal.SIGKILL)
        assert end_of(output) == end_of(whole)
        if done == kills:
            return


def test_the_old_checkpoint_is_removed_when_the_new_one_has_its_name_and_is_on_the_disk(train, tmp_path, monkeypatch):
    output, synced, renames, rename = tmp_path / "out", set(), [], Path.rename

    def fsync(file):
        name = os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")
        synced.add(str(Path(name).relative_to(output)))

    def renamed(folder, target):
        files = {str(path.relative_to(output)) for path in folder.rglob("*") if path.is_file()}
        renames.append((saved_updates(output), files - synced, len(files)))
        synced.clear()
        return rename(folder, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    train(output_dir=str(output), total_episodes=48, save_steps=1, save_total_limit=1)
    assert [old for old, _, _ in renames] == [[], [1], [2]] and saved_updates(output) == [3]
    assert all(missed == set() and n > 4 for _, missed, n in renames)


def run_the_same(prompts, **columns):
    """Starts a second run with --resume on the folder of this one."""
    with forkserver().Pool(1) as pool, pytest.raises(InputError, match="another run writes to it") as error:
        pool.apply(rloo.main, [Args(**json.loads(os.environ["SAME_FLAGS"]))])
    assert "\n" not in str(error.value)
    return [0.0] * len(prompts)


def test_one_run_at_a_time_writes_to_a_folder(train, tiny, tmp_path, monkeypatch):
    """A second one gets a line, and has cut no file by then. The lock ends with its process, see the kills."""
    output = tmp_path / "out"
    flags = {"reward_fns": (spec("run_the_same"),), "reward_weights": (1, 0), "total_episodes": 32, "save_steps": 1}
    monkeypatch.setenv("SAME_FLAGS", json.dumps(run_flags(tiny, output, **flags, resume=True)))
    metrics, _ = train(output_dir=str(output), **flags)
    assert [x["update"] for x in metrics] == [1, 2]
    assert json.loads((output / "args.json").read_text())["resume"] is False


def test_a_process_that_is_killed_while_it_cuts_a_file_leaves_all_of_it(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    before = write_rows(file, [{"update": 1}, {"update": 2}]) and file.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(AttributeError):
        patch.delattr(Path, "replace")
        rloo.keep_lines(file, 1)
    assert file.read_bytes() == before
    assert rloo.keep_lines(file, 1) == [{"update": 1}] == read_metrics(tmp_path)
    assert rloo.keep_lines(tmp_path / "none.jsonl", 1) == [] and not (tmp_path / "none.jsonl").exists()


def test_a_run_resumed_with_other_flags_says_so_and_goes_on_by_them(whole, tiny, tmp_path, capsys):
    output = shutil.copytree(whole, tmp_path / "out")
    changed = {"total_episodes": 144, "save_steps": 9, "learning_rate": 1e-3, "rloo_k": 4, "seed": 7}
    run(tiny, output, resume=True, **changed, reward_fns=(spec("count_tokens"),), eval_fns=())
    said = capsys.readouterr().out.partition("other flags than before: ")[2].partition("\n")[0]
    assert "rloo_k 2 -> 4" in said and "seed 1 -> 7" in said and "['" in said, said  # and --reward_fns, a list
    (before,) = output.glob("args-until-*.json")
    assert [json.loads(file.read_text())["rloo_k"] for file in (before, output / "args.json")] == [2, 4]
    metrics = read_metrics(output)
    assert metrics[:6] == read_metrics(whole) and [update["update"] for update in metrics] == [*range(1, 10)]
    lrs = [1e-3 * (0.5 - 0.5 * math.cos(math.pi * left / 6)) for left in (3, 2, 1)]  # of nine updates, not of three
    assert [update["lr"] for update in metrics[6:]] == pytest.approx(lrs)
    assert [x["update"] for x in read_metrics(output, "evaluations")] == [0, 3, 6, 9]


def test_a_run_resumed_with_another_batch_ends_at_its_number_of_episodes(whole, tiny, tmp_path, monkeypatch):
    """... or, since updates are whole, just above it, on the prompts that come next."""
    drawn = spy(monkeypatch, "examples_of_update")
    for size, ends in ((4, [40, 48, 56, 64]), (16, [64]), (24, [80])):
        flags = resumed_at(whole, 2, tmp_path / str(size)) | {"per_device_train_batch_size": size}
        metrics = read_metrics(run(tiny, Path(flags.pop("output_dir")), **flags, num_eval_prompts=0, total_episodes=64))
        assert [x["episode"] for x in metrics] == [16, 32, *ends]
        assert [x["update"] for x in metrics] == [*range(1, len(metrics) + 1)]
    assert [inputs[2] for inputs, _ in drawn] == [16, 20, 24, 28, 16, 16]


DAMAGED = {  # what happens to a file of the newest checkpoint
    "model.safetensors": lambda file: os.truncate(file, file.stat().st_size - 100),
    "optimizer.pt": lambda file: os.truncate(file, file.stat().st_size - 100),
    "state.json": lambda file: file.write_text("{"),
    "config.json": lambda file: file.unlink(),
    "state.json of another version": lambda file: file.write_text('{"update": 6}'),
    "optimizer.pt with code": lambda file: torch.save(os.getcwd, file),
    # That of another kind of run, such as one with adapters: AdamW would write beyond its moments.
    "optimizer.pt of other shapes": lambda file: torch.save({0: {"exp_avg": torch.zeros(1)}}, file),
    "optimizer.pt of more weights": lambda file: torch.save({99: {"exp_avg": torch.zeros(1)}}, file),
}


def test_a_damaged_checkpoint_is_not_loaded_and_the_one_before_goes_on(whole, tiny, tmp_path):
    output = shutil.copytree(whole, tmp_path / "out")
    for damage, change in DAMAGED.items():
        file = output / "checkpoint-6" / damage.split()[0]
        content = file.read_bytes()
        change(file)
        errors = InputError if " of " in damage else (RuntimeError, ValueError, pickle.UnpicklingError)
        with pytest.raises(errors):
            run(tiny, output, resume=True)
        file.write_bytes(content)
    file.parent.rename(tmp_path / "away")
    assert end_of(run(tiny, output, resume=True)) == end_of(whole)


def test_a_finished_run_is_not_repeated_and_fewer_episodes_undo_nothing(whole, tiny, tmp_path, monkeypatch):
    output = shutil.copytree(whole, tmp_path / "out")
    collected = spy(monkeypatch, "collect")
    for episodes in (96, 16):
        run(tiny, output, resume=True, total_episodes=episodes)
        assert not collected and end_of(output) == end_of(whole)
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
    pairs, rows = [*itertools.product(range(5), repeat=2)], [*range(50)]
    assert len({tuple(rloo.examples_of_update(rows, seed, 50 * epoch, 50)) for seed, epoch in pairs}) == 5**2
    drawn = sum((rloo.examples_of_update(rows, 1, begin, 20) for begin in range(0, 200, 20)), [])
    assert all(sorted(drawn[i : i + 50]) == rows for i in range(0, 200, 50))
    assert len(rloo.examples_of_update([1, 2], 1, 0, 7)) == 7  # small datasets cycle


# ---- More than one process -------------------------------------------------------------------------------------------


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


def note_prompts(prompts, completions, completion_ids, **columns):
    """Notes what each rank trains on, and a random number."""
    if prompts[0] == "b a b":  # held out
        return [0.0] * len(prompts)
    with open(f"{os.environ['NOTES']}/rank{os.environ['RANK']}", "a") as file:
        file.write(json.dumps([random.random(), prompts[::2]]) + "\n")
    return [float(len(prompt)) for prompt in prompts]


TOKENS = {"token_level_kl": True, "num_ppo_epochs": 2, "num_eval_prompts": 0}
ONE = {"one": {"save_steps": 1, "save_total_limit": 9}, "one, tokens": TOKENS}
TWO_PROCESSES = {  # a run on two processes: its flags, and the run on one process that it equals
    "two": (ONE["one"], "one"),
    "two, tokens": (TOKENS | {"gradient_checkpointing": True}, "one, tokens"),
    "two, resumed": ({}, "one"),  # from checkpoint 2 of "one"
    "two, one held-out row": (
        {"layout": "plain", "total_episodes": 16, "num_eval_prompts": 1},
        None,
    ),
}


def several_runs(runs: list[dict], last: list[str], notes: Path):
    os.environ["NOTES"] = str(notes)
    rollout = rloo.rollout
    rloo.rollout = ranked_rollout
    for flags in runs:
        rloo.main(Args(**flags))
    both, first, none = weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    for weight in [both, first][: 2 - rloo.rank_and_world()[0]]:
        weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD(weights)
    optimizer.register_step_pre_hook(lambda *inputs: print("gradients", [weight.grad.tolist() for weight in weights]))
    rloo.optimizer_step(Args(max_grad_norm=0.0), optimizer)
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
    folder, wait = begun
    return folder, wait()


def assert_equal_runs(one: Path, other: Path):
    assert (final_weights(one) - final_weights(other)).abs().max() < 1e-5, other.name
    for name in ("metrics", "evaluations"):
        for ours, theirs in zip(*(without_times(read_metrics(x, name)) for x in (one, other)), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4), other.name
    completions = [[x["completion"] for x in read_metrics(folder, "completions")] for folder in (one, other)]
    assert completions[0] == completions[1], other.name


def test_two_processes_equal_one_and_their_checkpoints_fit_each_other(two_processes, tiny, monkeypatch):
    folder, _ = two_processes
    assert (final_weights(folder / "one") - final_weights(tiny / "sft")).abs().max() > 1e-3
    assert all(0 < x["completions/clipped_ratio"] < 1 for x in read_metrics(folder / "one"))
    for update in read_metrics(folder / "one") + read_metrics(folder / "two"):  # completions of all ranks per second
        seconds = sum(x for name, x in update.items() if name.startswith("time/"))
        assert update["eps"] == pytest.approx(16 / seconds)
    for name, (_, one) in TWO_PROCESSES.items():
        if one:
            assert_equal_runs(folder / one, folder / name)
    monkeypatch.setattr(rloo, "rollout", ranked_rollout)
    flags = json.loads((folder / "one" / "args.json").read_text())
    flags = {name: flags[name] for name in vars(Args()) if name in flags}
    rloo.main(Args(**flags | resumed_at(folder / "two", 2, folder / "to one")))
    assert_equal_runs(folder / "one", folder / "to one")


def test_a_gradient_is_the_mean_over_ranks_where_one_without_it_counts_as_0(two_processes):
    for log in two_processes[1]:
        assert "gradients [[1.0, 1.0], [0.5, 0.5], [0.0, 0.0]]\n" in log.read_text()


def test_processes_train_on_different_prompts_and_one_of_them_speaks(two_processes, tiny):
    folder, logs = two_processes
    one_row = folder / "two, one held-out row"  # fewer than processes: nothing is evaluated
    assert len(read_metrics(one_row)) == 1 and read_metrics(one_row, "evaluations") == []
    mains = len(TWO_PROCESSES)  # which are not silenced
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
