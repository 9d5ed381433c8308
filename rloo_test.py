"""Tests of rloo.py. They build tiny random models, need no network and no GPU, and read from top to bottom.

First the formulas and whole updates against a second implementation; then group rows and the decoder against a row per
completion, and what other trainers got wrong; at the end whole runs, which are evaluated, interrupted, killed and
resumed, on one process and on two. With KILLS=100 in the environment runs are killed so often.
"""

import datetime
import functools
import gc
import itertools
import json
import math
import multiprocessing.forkserver
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
import weakref
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean, stdev
from unittest.mock import ANY

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: a name that is no folder is not asked for

import pytest
import torch
import torch.nn.functional as F
import transformers
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import PreTrainedTokenizerFast as Fast

import rloo
from rloo import Args, Batch, InputError

WORDS = [*"abcdefghijklm"]  # with eos, pad and unknown: a vocabulary of 16
torch.set_num_threads(1)  # the models are tiny


# ---- Tiny models, data and runs --------------------------------------------------------------------------------------


def tiny_tokenizer(pad: str = "[PAD]", words: dict[str, int] | None = None) -> Fast:
    """Words in, words out. Token 0 is eos, 1 is pad (or pad is eos too), 2 is unknown."""
    words = words or {word: i for i, word in enumerate(WORDS, 3)}
    backend = Tokenizer(models.WordLevel({"<eos>": 0, "[PAD]": 1, "[UNK]": 2} | words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Fast(tokenizer_object=backend, eos_token="<eos>", pad_token=pad, unk_token="[UNK]")


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
    "gemma2": HEADS | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0},  # an eager kernel
    "gpt_oss": HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},  # sinks, an eager kernel
    "granite": HEADS | {"logits_scaling": 3.0},
    # Is its own base_model, and its routers are linear layers that return a tuple.
    "llama4_text": HEADS | {"num_local_experts": 4, "intermediate_size_mlp": 32, "layer_types": ["full_attention"] * 2},
    "stablelm": HEADS,
}
PLAIN_ROWS = {  # those that cannot be computed in group rows
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},  # ALiBi
    "mistral": HEADS | {"sliding_window": 12},  # a window shorter than prompt and completion
}
ARCHITECTURES = FAMILIES | GROUP_ROWS | PLAIN_ROWS


def tiny_model(family: str = "gpt_neox", seed: int = 0, classifier: bool = False, layout: str = "group", **config):
    """A model with random weights."""
    torch.manual_seed(seed)
    tokens = {"vocab_size": 3 + len(WORDS), "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1}
    config = transformers.AutoConfig.for_model(family, **ARCHITECTURES.get(family, {}) | tokens | config)
    if classifier:
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    model.layout = layout
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


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save(folder: Path, *parts) -> str:
    """Saves models and tokenizers; returns the folder as a flag's value."""
    for part in parts:
        part.save_pretrained(folder)
    return str(folder)


def spec(name: str) -> str:
    return f"{__name__}:{name}"  # a function of this file as a flag's value


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
    words = []
    for name, value in run_flags(tiny, output, **flags).items():
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        if value is not None:
            words += [f"--{name}", *map(str, values)]
    return words


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
def process_as_it_was(monkeypatch):
    """What a test lets be imported from its own folder, and its handlers of signals, are gone in the next one."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
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
    for process in processes:
        process.start()

    def wait() -> list[Path]:
        for process in processes:
            process.join(300)  # a busy machine needs long
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
    """... while scores that differ are scaled to deviation 1, however small they are."""
    for k, token_level in itertools.product((3, 4, 7, 8), (False, True)):
        flags = {"normalize_advantage": True, "token_level_kl": token_level}
        scores = torch.tensor([[0.1, 1.1, 0.7, 0.3]]).expand(k, -1)
        kl, mask = torch.zeros(k, 4, 2), torch.ones(k, 4, 2, dtype=torch.bool)
        assert not advantages_of(scores, kl, mask, **flags).any()
        scores = 1e-5 * torch.arange(4.0 * k).view(k, 4)
        assert advantages_of(scores, kl, mask, **flags).std().item() == pytest.approx(1, abs=0.01)
        assert rloo.standardize(scores).std().item() == pytest.approx(1, abs=0.01)


def test_the_gradient_is_0_where_the_clip_decides_however_large_the_ratio_is():
    """Elsewhere it is -A ρ; beyond the largest number it is not finite, which ends a run."""
    for log_ratio, advantage, expected in [
        (0.1, 2.0, -2 * math.exp(0.1)),
        (0.2, 2.0, 0.0),
        (85.0, 2.0, 0.0),
        (100.0, 2.0, 0.0),
        (-0.3, -1.0, 0.0),
        (5.0, -1.0, math.exp(5)),
        (85.0, -1.0, math.exp(85)),
        (100.0, -1.0, math.inf),
    ]:
        new = torch.full((1, 1, 1), log_ratio, requires_grad=True)
        advantages, mask = torch.full((1, 1, 1), advantage), torch.ones(1, 1, 1, dtype=torch.bool)
        losses, _, _ = rloo.policy_loss(new, torch.zeros(1, 1, 1), advantages, mask, 0.2, 0.2)
        losses.sum().backward()
        assert new.grad.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bias", [0.0, 1000.0, -math.inf])
def test_log_probs_and_entropies_are_those_of_log_softmax(bias):
    """... and the gradient of log-probs; of logits far from zero, and of tokens that are impossible, as well."""
    torch.manual_seed(0)
    model, hidden, tokens = tiny_model(), torch.randn(23, 32, requires_grad=True), torch.randint(10, (23,))
    head = torch.nn.Linear(32, 16)
    head.bias.data[10 if bias < 0 else 0 :] += bias
    model.set_output_embeddings(head)
    full = F.log_softmax(F.linear(hidden.double(), *(p.double() for p in head.parameters())) / 0.7, dim=-1)
    expected = full.gather(1, tokens[:, None]).squeeze(1), -(full.exp() * full.clamp(min=-1e4)).sum(-1)
    found = rloo.block_logprobs(model, hidden, tokens, 0.7)
    tolerance = 1e-3 if bias == 1000 else 1e-5  # float32 has 7 digits
    for one, other in zip(found, expected):
        assert torch.allclose(one.double(), other, atol=tolerance)
    inputs = [hidden, *head.parameters()]
    gradients = [torch.autograd.grad(x[0] @ torch.arange(23).to(x[0]), inputs) for x in (found, expected)]
    for grad, exact in zip(*gradients):
        assert grad.isfinite().all() and (grad - exact).abs().max() < 20 * tolerance * max(1, exact.abs().max())


@pytest.mark.parametrize("again", [False, True])
def test_a_prompt_is_read_once_for_all_its_completions(again, tmp_path, monkeypatch):
    """... and these in two parts of similar lengths. With --gradient_checkpointing layers run again in the backward
    pass, which changes no number."""
    batch, model, update = random_batch(k=3, B=8, T=16), tiny_model(), rloo.Cache.update
    exact = flat_grad(rloo.completion_logprobs(model, batch, 0.7)[0].sum(), model)
    args = Args(sft_model_path=save(tmp_path, model), device="cpu", dtype="float32", gradient_checkpointing=again)
    _, model, _ = rloo.load_models(args, None)
    reads = spy(monkeypatch, "read_rows")
    updates = []
    monkeypatch.setattr(rloo.Cache, "update", lambda *inputs: updates.append(1) or update(*inputs))
    assert torch.equal(flat_grad(rloo.completion_logprobs(model, batch, 0.7)[0].sum(), model), exact)
    rows = [(len(ids), "after a prompt" if real.shape[1] > ids.shape[1] else "") for (_, ids, real, _), _ in reads]
    assert rows == [(8, ""), (12, "after a prompt"), (12, "after a prompt")]
    assert len(updates) == 2 * 3 * (1 + again)  # two layers in three reads
    slots = sum(inputs[1].numel() for inputs, _ in reads[1:])
    assert slots < 1.4 * batch.response_mask.sum()


def test_ranks_read_equally_often_wherever_their_completions_end(monkeypatch):
    """... since FSDP gathers weights in each read."""
    reads, model = spy(monkeypatch, "read_rows"), tiny_model()
    batch, numbers = random_batch(k=2, B=4, T=512), []
    for longest in (5, 500):
        ends = torch.arange(512) < longest
        rloo.completion_hidden(model, batch._replace(response_mask=ends.expand_as(batch.response_mask)))
        numbers.append(len(reads))
    assert numbers == [5, 10]  # prompts, and four parts of completions


def test_logits_are_never_made_for_prompts_nor_all_at_once(monkeypatch):
    """The head sees real completion tokens only, 128 at a time in a large vocabulary, and again in backward."""
    model, batch = tiny_model(), random_batch(k=2, B=8, T=16)
    whole = rloo.completion_logprobs(model, batch, 0.7)
    exact = flat_grad(whole[0].square().sum(), model)
    large_head = functools.partial(model.get_output_embeddings())
    large_head.weight = torch.empty(2**20, 0)  # of which the number of rows is looked at
    monkeypatch.setattr(model, "get_output_embeddings", lambda: large_head)
    seen = spy(monkeypatch, "final_logits")
    found = rloo.completion_logprobs(model, batch, 0.7)
    sizes = [128, int(batch.response_mask.sum()) - 128]
    assert [len(hidden) for (_, hidden), _ in seen] == sizes
    gradient = flat_grad(found[0].square().sum(), model)
    assert sorted(len(hidden) for (_, hidden), _ in seen) == sorted(2 * sizes)
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, whole))
    assert (gradient - exact).abs().max() < 1e-5 * exact.abs().max()
    check(model, batch.examples, T=64)  # compares 256 tokens at once, or more
    assert max(hidden.shape[:-1].numel() for (_, hidden), _ in seen) == 128


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
    """To mean 0 and standard deviation 1; a single value to 0."""
    if len(values) < 2:
        return dict.fromkeys(values, 0.0)
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
    mini_batches, none = one_of(1, 1, 2, 3), "often_none"
    rewards = one_of("continuous", none, none, f"constant {none}", "large continuous", "", f"{none} continuous").split()
    if rewards == [none]:  # of two prompts at least, of which one has scores
        size, steps = one_of((k, 2), (2 * k, 1))
    with_model = rewards in ([], [none, "continuous"])
    weights = tuple(one_of(-0.5, 0.3, 1.0, 2.0) for _ in range(len(rewards) + with_model))
    flags = {"seed": seed, "rloo_k": k, "per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
    flags |= {"num_mini_batches": mini_batches, "total_episodes": 2 * size * steps * mini_batches}
    flags |= {"num_ppo_epochs": one_of(1, 2), "response_length": draw.randint(2, 5), "layout": one_of("group", "plain")}
    flags |= {"reward_fns": flag_of(**{name: score_each(SCORES[name]) for name in rewards})}
    flags |= {"reward_weights": one_of(None, weights), "with_model": with_model}
    flags |= {"family": one_of("gpt_neox", "gpt2", "llama"), "pad": one_of("[PAD]", "<eos>")}
    flags |= {"stop_ids": one_of([0], [0, 7, 9], [5]), "temperature": one_of(1.0, 0.7, 1.5)}
    flags |= {"kl_coef": one_of(0.0, 0.1, 1.0), "token_level_kl": one_of(False, True)}
    flags |= {"missing_eos_penalty": one_of(None, 1.0), "mask_truncated_completions": one_of(False, True)}
    flags |= {"normalize_reward": one_of(False, True), "normalize_advantage": one_of(False, False, True)}
    flags |= {"reward_clip_range": one_of(None, None, (1.2,), (-0.5, 1.2)), "max_grad_norm": one_of(0.0, 0.1, 1.0)}
    flags |= {"cliprange": one_of(0.05, 0.2), "cliprange_high": one_of(None, 0.1, 0.4)}
    flags |= {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "adam_eps": 1e-2}
    return flags | {"weight_decay": one_of(0.0, 0.5), "local_rollout_forward_batch_size": one_of(64, 4)}


@pytest.mark.parametrize("seed", range(18))
def test_updates_equal_a_plain_implementation_for_flags_drawn_at_random(train, tiny, tmp_path, monkeypatch, seed):
    """Weights and metrics of two updates. The reference is another model, since a KL that is 0 but for rounding would
    decide about advantages where all scores are equal."""
    flags = flags_drawn(seed)
    stop_ids, with_model, family, pad = (flags.pop(name) for name in ("stop_ids", "with_model", "family", "pad"))
    model, reference = (tiny_model(family, layout=flags["layout"]) for _ in range(2))
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
    check(policy, batch.examples, 6)  # is not refused
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


def check(model, examples: list[dict], T: int):
    """check_policy, as a run calls it."""
    args = Args(response_length=T, layout=model.layout, local_rollout_forward_batch_size=4)
    by_length = sorted(examples, key=lambda example: len(example["prompt_ids"]))
    rloo.check_policy(args, model, [by_length[0], by_length[-1]])


def prompts_of(*lengths: int) -> list[dict]:
    return [{"prompt_ids": [3 + i % 13 for i in range(n)]} for n in lengths]


REFUSED = {  # what a model does: its family and settings, the layouts in which it is refused
    "reads padding": ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2}, ["group", "plain"]),
    "scales its logits in a way of its own": ("hyperclovax", HEADS | {"logits_scaling": 0.9}, ["group", "plain"]),
    "attends to a window": ("mistral", {}, ["group"]),
    "has attention of its own": ("bloom", {}, ["group"]),
}


def refusal(folder: Path, model, layout: str) -> str:
    """What a run says to refuse the model for prompts of 3 and 9 tokens; "" if it does not."""
    args = Args(sft_model_path=save(folder, model), layout=layout, device="cpu")
    try:
        check(rloo.read_model(args, args.sft_model_path, torch.float32), prompts_of(3, 9), T=8)
    except Exception as error:
        return f"{error}"
    return ""


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_this_file_would_compute_wrongly_is_refused(kind, tmp_path):
    """... by one line, which names the layout."""
    family, config, layouts = REFUSED[kind]
    model = tiny_model(family, **config)
    said = {layout: refusal(tmp_path, model, layout) for layout in ("group", "plain")}
    assert [layout for layout, line in said.items() if line] == layouts, said
    assert "--layout group" in said["group"] or kind == "has attention of its own"  # which ends with a trace


@pytest.mark.parametrize(
    "name, edit, words",
    [
        ("draw_tokens", lambda _, x: (x[0], x[1] - 0.02), "InputError: .* log-probs in sampling differ"),
        ("group_hidden", lambda _, x: x.flip(1), "InputError: .* padded batch differ from"),
        ("final_logits", lambda _, x: x * 1.1, "InputError: .* logits differ"),
        ("completion_logprobs", lambda _, x: len(3), "TypeError: .* has no len"),  # is not said to be the model's
    ],
)
def test_a_mistake_in_an_edit_ends_a_run_before_it_evaluates(train, tmp_path, name, edit, words, monkeypatch):
    spy(monkeypatch, name, edit)
    for episodes in (0, 16):
        with pytest.raises((InputError, TypeError)) as error:
            train(kl_coef=0.0, total_episodes=episodes, num_eval_prompts=2, output_dir=str(tmp_path / f"{episodes}"))
        assert re.match(words, f"{error.typename}: {error.value}")
        assert not read_metrics(tmp_path / f"{episodes}", "evaluations")


def test_in_bfloat16_the_rounded_copy_is_checked_too(train, monkeypatch):
    spy(monkeypatch, "group_hidden", lambda inputs, x: x.flip(1) if inputs[0].dtype == torch.bfloat16 else x)
    with pytest.raises(InputError, match="differ from"):
        train(kl_coef=0.0, reward_model_path=None, reward_fns=(spec("count_tokens"),), dtype="bfloat16")


def test_a_sampler_that_goes_wrong_later_ends_the_run_before_a_step(train, monkeypatch):
    steps = spy(monkeypatch, "optimizer_step")
    spy(monkeypatch, "rollout", lambda _, x: (x[0], x[1] - 0.02) if len(steps) == 1 else x)
    with pytest.raises(InputError, match="sampler does not match"):
        train(kl_coef=0.0, response_length=32, total_episodes=48)
    assert len(steps) == 1


def test_rounding_is_not_another_sampler_and_top_p_is_one():
    """The mean of log μ - log π_old of sampled tokens is KL(μ || π_old); rounding, of either sign, cancels in it."""
    gaps = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    rloo.check_sampler(0.05 * gaps)
    rloo.check_sampler(torch.zeros(1000))
    for another in (0.05 * gaps + 0.03, -math.log(0.9) + 0.0 * gaps, torch.tensor([0.5])):
        with pytest.raises(InputError, match="the sampler does not match the policy"):
            rloo.check_sampler(another)
    with pytest.raises(FloatingPointError, match="is not finite"):
        rloo.check_sampler(torch.cat([gaps, torch.tensor([math.nan])]))


@torch.no_grad()
@pytest.mark.parametrize("name, layout", LAYOUTS)
def test_rollout_at_temperature_0_is_greedy_decoding_of_each_prompt_alone(name, layout):
    model, alone, rows = tiny_model(name, layout=layout), tiny_model(name, layout="plain"), random_batch(B=3).examples
    args = Args(response_length=8, local_rollout_forward_batch_size=4)
    batch, _ = rloo.rollout(args, model, rows, 2, 0.0, [0])
    for b, row in enumerate(rows):
        ids, n = row["prompt_ids"], len(row["prompt_ids"])
        while len(ids) < n + 8 and ids[n:][-1:] != [0]:
            ids = ids + [alone(torch.tensor([ids])).logits[0, -1].argmax().item()]
        assert batch.completion_ids()[b] == batch.completion_ids()[3 + b] == ids[n:]


@torch.no_grad()
def decoded(model, batch: Batch, k: int, T: int, stop_ids: list[int], seed: int = 1) -> tuple:
    """Tokens and log-probs of k completions of each prompt."""
    torch.manual_seed(seed)
    prompts = rloo.pad([example["prompt_ids"] for example in batch.examples], left=True)
    return rloo.decode(model, *prompts, k, T, 1.0, stop_ids)


def test_keys_and_values_are_freed_when_a_rollout_ends(monkeypatch):
    """... at once, without Python's collector of cycles, which a GPU's memory does not wake."""
    tensors, update = [], rloo.Cache.update

    def watched(cache, *inputs, **others):
        if cache.slot is not None:
            tensors.append(weakref.ref(cache.layers[0][0]))
        return update(cache, *inputs, **others)

    monkeypatch.setattr(rloo.Cache, "update", watched)
    gc.disable()
    decoded(tiny_model(), random_batch(), 2, 5, [99])
    freed = [tensor() is None for tensor in tensors]
    gc.enable()
    assert freed and all(freed)


@pytest.mark.parametrize("k, seed", [(4, 0), (1, 1)])
def test_completions_do_not_depend_on_which_rows_have_left(k, seed, monkeypatch):
    """They leave when they are half, or when the slots are full."""
    model, prompts = tiny_model("qwen3", vocab_size=50), random_batch(B=6)
    reads = spy(monkeypatch, "read_rows")
    tokens, logprobs = decoded(model, prompts, k, 80, [0], seed)
    P = max(len(example["prompt_ids"]) for example in prompts.examples)
    sizes = [(len(real), real.shape[-1] - P) for (_, _, real, _), _ in reads[1:]]  # of the steps
    assert any(
        room == before and 2 * rows <= all_rows for (all_rows, before), (rows, room) in itertools.pairwise(sizes)
    )
    assert any(before == 64 and room == 80 for (_, before), (_, room) in itertools.pairwise(sizes))
    stay, stay_logprobs = decoded(model, prompts, k, 80, [99], seed)
    batch = rloo.make_batch(prompts.examples, tokens, [0])
    mask = batch.response_mask
    assert torch.equal(tokens[mask], stay[mask]) and not batch.ended.all()
    assert torch.allclose(logprobs[mask], stay_logprobs[mask], atol=1e-5)
    trained_on, _ = rloo.completion_logprobs(model, batch, 1.0)
    assert torch.allclose(logprobs[mask], trained_on[mask], atol=1e-4)


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


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2", "llama", "qwen3_moe", "gpt_oss"])
def test_replayed_graphs_sample_what_steps_sample(family, monkeypatch):
    """... bit for bit. A step is recorded once more whenever rows leave or get more slots."""
    model, prompts, stop_ids = tiny_model(family, seed=3, vocab_size=64), random_batch(B=6), [0, 1]
    recorded = []
    for T, least in ((3, 1), (80, 3)):
        plain = decoded(model, prompts, 3, T, stop_ids)
        assert not recorded
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            patch.setattr(torch.cuda, "CUDAGraph", Graph)
            patch.setattr(torch.cuda, "graph", lambda graph: recorded.append(graph) or graph)
            replayed = decoded(model, prompts, 3, T, stop_ids)
        assert len(recorded) >= least
        assert all(torch.equal(*pair) for pair in zip(plain, replayed, strict=True)), T
        recorded.clear()


def test_a_step_that_cannot_be_recorded_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: [].pop())
    with pytest.raises(
        InputError, match="^the model cannot be recorded as a CUDA graph; try --layout plain .*pop from"
    ):
        decoded(tiny_model(), random_batch(), 2, 5, [0])


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
    """... also where a rollout takes one completion at a time, and where log π_old is read before two steps, which
    change nothing here. The sampler rounds otherwise, and the difference is a metric of its own."""
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
    assert {inputs[1].dtype for inputs, _ in rollouts[2:]} == {in_dtype}  # after two that check the models
    others = 3 if dtype == "bfloat16" else 2  # its rounded copy, reference and reward model
    assert [model.dtype for _, model in loads] == [torch.float32] + [in_dtype] * others


def test_the_rollouts_kl_is_positive_where_the_sampler_is_the_surer(train, monkeypatch):
    monkeypatch.setattr(rloo, "check_policy", lambda *_, **__: None)
    spy(monkeypatch, "rollout", lambda _, found: (found[0], (found[1] + 0.005) * found[0].policy_mask))
    metrics, _ = train(total_episodes=16, num_eval_prompts=0)
    assert metrics[0]["val/rollout_kl"] == pytest.approx(0.005, abs=1e-4)


def test_in_bfloat16_gradients_of_micro_batches_add_up_in_float32(tmp_path):
    args = Args(sft_model_path=save(tmp_path, tiny_model()), dtype="bfloat16", device="cpu", kl_coef=0.0)
    master, policy, _ = rloo.load_models(args, None)
    rloo.make_optimizer(rloo.resolve_args(args), master, policy)
    total = 0.0
    for prompts in torch.arange(4).split(1):
        logprobs, _ = rloo.completion_logprobs(policy, random_batch().select(slice(None), prompts), 0.7)
        total = total + flat_grad(logprobs.sum(), policy).float()
        logprobs.sum().backward()
    assert torch.equal(torch.cat([weight.grad.flatten() for weight in master.parameters()]), total)
    assert all(weight.dtype == torch.bfloat16 and weight.grad is None for weight in policy.parameters())


def test_in_bfloat16_each_step_is_made_from_the_weights_of_the_step_before(train, monkeypatch):
    """The policy has the rounded weights of the master whenever it is read."""
    loads, moved = spy(monkeypatch, "load_models"), []

    def compare(inputs, found):
        master, policy, reference = (list(model.parameters()) for model in loads[0][1])
        if inputs[0] is loads[0][1][1]:
            assert all(torch.equal(weight, exact.bfloat16()) for weight, exact in zip(policy, master, strict=True))
            moved.append(not torch.equal(policy[0], reference[0]))
        return found

    spy(monkeypatch, "completion_logprobs", compare)
    train(dtype="bfloat16", total_episodes=32, num_mini_batches=2, num_ppo_epochs=2, per_device_train_batch_size=8)
    assert moved[-8:] == [True] * 8 and False in moved


def test_no_forward_pass_is_repeated(train, monkeypatch):
    """... but those of layers, with --gradient_checkpointing. Without a KL no reference is loaded."""
    for name in ("check_model", "check_policy"):
        monkeypatch.setattr(rloo, name, lambda *inputs, **options: None)
    loads, seen, rollouts = (spy(monkeypatch, name) for name in ("read_model", "completion_logprobs", "decode"))
    for flags, passes, loaded in (
        ({}, [False, True], 3),  # whether they have a gradient: the reference, training
        ({"kl_coef": 0.0}, [True], 2),
        ({"num_mini_batches": 2, "per_device_train_batch_size": 8}, [False, False, False, True, True], 3),
        ({"local_rollout_forward_batch_size": 6}, [False, False, False, True], 3),  # of 16 completions, in groups of 2
    ):
        loads.clear()
        seen.clear()
        train(**flags)
        assert [output[0].requires_grad for _, output in seen] == passes and len(loads) == loaded, flags
    assert [len(inputs[1]) for inputs, _ in rollouts[-3:]] == [3, 3, 2]  # prompts


@pytest.mark.parametrize("layout", ["group", "plain"])
def test_one_temperature_in_sampling_and_scoring_and_no_hidden_sampling_settings(layout, tmp_path, monkeypatch):
    """The model's own generation config is ignored: the frequencies of sampled tokens are those of the softmax that
    scores them. Random numbers have 53 bits: in 24 most tokens of a long tail could never be drawn."""
    path, example, n = save(tmp_path, tiny_model(vocab_size=6)), {"prompt_ids": [3, 4, 5]}, 10_000
    hidden = {"top_k": 1, "repetition_penalty": 3.0, "temperature": 0.1, "do_sample": True, "eos_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(hidden))
    args = Args(sft_model_path=path, dtype="float32", device="cpu", response_length=2, layout=layout, kl_coef=0.0)
    args.local_rollout_forward_batch_size = n
    _, model, _ = rloo.load_models(args, None)
    drawn = spy(monkeypatch, "draw_tokens")
    torch.manual_seed(0)
    batch, sampled = rloo.rollout(args, model, [example] * 10, n // 10, 1.7, [0])
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
    """10,000 tokens of probability 1e-10, which in float32 would add nothing to the sum of the others. One of
    probability 0 is never drawn."""
    logits = torch.cat([torch.zeros(1), math.log(1e-10) - torch.linspace(0, 0.1, 10_000)])[None]
    exact = logits.double().softmax(-1).cumsum(-1)[0]
    for token in (0, 1, 2, 5_000, 9_999, 10_000):
        begin = exact[token - 1].item() if token else 0.0
        inside = (begin + exact[token].item()) / 2
        found, logprob = rloo.draw_tokens(logits, 1.0, torch.tensor([[inside]], dtype=torch.double))
        assert abs(found.item() - token) <= 1e-4 * token, (found, token)  # rounding of the probabilities to float32
        assert logprob.item() == pytest.approx(logits[0, token].item(), abs=1e-4)
    for n, uniform in itertools.product((4, 20_000), (0.0, 0.25, 0.5, 2 / 3, 1 - 2**-53)):
        logits = torch.zeros(3, n)
        logits[0, [0, -1]] = logits[1, : n // 2] = logits[2, n // 2 : -1] = -math.inf
        _, logprob = rloo.draw_tokens(logits, 1.0, torch.full((3, 1), uniform, dtype=torch.double))
        assert logprob.isfinite().all()


def test_pad_equal_to_eos_keeps_the_stop_token_and_every_stop_id_counts():
    """Padding repeats a token of its row: that of id 0 may have an embedding of zeros, whose norm has no gradient."""
    ids, real = rloo.pad([[0, 6], [7, 0, 9]], left=True)
    assert ids.tolist() == [[0, 0, 6], [7, 0, 9]] and real.tolist() == [[False, True, True], [True] * 3]
    responses = torch.tensor([[[5, 0, 0, 0], [0, 0, 0, 0], [5, 6, 7, 8], [5, 9, 0, 7]]])
    one, two = (rloo.make_batch([{"prompt_ids": [0, 5]}] * 4, responses, stop_ids) for stop_ids in ([0], [0, 9]))
    assert one.response_mask.sum(-1).tolist() == [[2, 1, 4, 3]]
    assert two.response_mask.sum(-1).tolist() == [[2, 1, 4, 2]]
    assert one.ended.tolist() == two.ended.tolist() == [[True, True, False, True]]
    assert two.responses.tolist() == [[[5, 0, 5, 5], [0, 0, 0, 0], [5, 6, 7, 8], [5, 9, 5, 5]]]


def test_stop_ids_come_from_the_generation_config_and_the_tokenizer():
    model, tokenizer = types.SimpleNamespace(own_generation_config=transformers.GenerationConfig()), tiny_tokenizer()

    def ids(configured, token=None):
        model.own_generation_config.eos_token_id = configured
        return rloo.stop_token_ids(Args(stop_token=token), model, tokenizer)

    assert ids([7, 9]) == ids([7, 9], "eos") == [0, 7, 9] and ids([7, 9], "c") == [5]
    with pytest.raises(InputError, match="--stop_token 'c d': must be one token, is 2"):
        ids(7, "c d")
    tokenizer.eos_token = None
    assert ids(3) == [3]
    with pytest.raises(InputError, match="no token of the model ends a completion; give --stop_token"):
        ids(None)


def test_unscorable_completions_leave_the_baseline_none_is_not_zero_and_zero_is_not_none():
    """Their own advantage is exactly 0, and so is that of a completion without others, whatever their KL."""
    nan, mask = math.nan, random_batch(k=4, B=4).response_mask
    scores = torch.tensor([[1.0, nan, 0.0, nan], [4.0, nan, nan, 5.0], [nan, 2.0, 3.0, nan], [0.0, 1.0, 2.0, nan]])
    expected = torch.tensor([[-1, 0, -2.5, 0], [3.5, 0, 0, 0], [0, 1, 2, 0], [-2.5, -1, 0.5, 0]])
    assert torch.allclose(advantages_of(scores, torch.zeros(4, 4, 6), mask)[..., 0], expected)
    for token_level, normalize in itertools.product((False, True), (False, True)):
        flags = {"kl_coef": 1.0, "token_level_kl": token_level, "normalize_advantage": normalize}
        kl = torch.rand(4, 4, 6) * mask
        assert torch.equal((advantages_of(scores, kl, mask, **flags) != 0).any(-1), expected != 0)
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
    shutil.copytree(output, to)  # which is continued at the checkpoint of an update
    for newer in range(update + 1, 10):
        shutil.rmtree(to / f"checkpoint-{newer}", ignore_errors=True)
    return {"output_dir": str(to), "resume": True}


def test_a_weight_without_a_gradient_has_no_moments_and_its_run_resumes(train, tmp_path, monkeypatch):
    """... such as that of an expert without tokens. In bfloat16 the first rollout is by the checkpoint, too."""
    step = rloo.optimizer_step

    def without_the_first(args, optimizer):
        optimizer.param_groups[0]["params"][0].grad = None
        return step(args, optimizer)

    monkeypatch.setattr(rloo, "optimizer_step", without_the_first)
    flags = {"total_episodes": 48, "save_steps": 1, "dtype": "bfloat16"}
    metrics, output = train(**flags)
    moments = torch.load(output / "checkpoint-2" / "optimizer.pt", weights_only=True)
    assert 0 not in moments and 1 in moments
    again, resumed = train(**flags, **resumed_at(output, 2, tmp_path / "again"))
    assert without_times(again) == without_times(metrics) and torch.equal(*map(final_weights, (resumed, output)))


@torch.no_grad()
def test_in_bfloat16_the_policy_is_what_transformers_would_load_of_the_master(train, tmp_path, monkeypatch):
    """... after an update: what a model keeps in float32 is not rounded. Ernie has such a tensor for its routers."""
    ernie = HEADS | {"moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2}
    loads = spy(monkeypatch, "load_models")
    _, output = train(
        sft_model_path=save(tmp_path, tiny_model("ernie4_5_moe", **ernie), tiny_tokenizer()), dtype="bfloat16"
    )
    policy = loads[0][1][1]
    again = AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16)
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


def chat_tokenizer(template: str = CHAT) -> Fast:
    """CHAT: the first letter of each turn's role and its text; at the end an `a` that asks for an answer."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def with_ends(*parts: str) -> Fast:
    """A tokenizer that puts <s>, and nothing or an end, around every text."""
    tokenizer = tiny_tokenizer(words={"b": 4, "<s>": 5})
    single = [*parts] or ["<s>", "$A"]
    ends = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 5), ("<eos>", 0)])
    tokenizer.backend_tokenizer.post_processor = ends
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    return tokenizer


KWARGS = chat_tokenizer("{{ mood }} a")
ENDS = chat_tokenizer(TURNS.replace("{% endfor %}", "m {% endfor %}"))  # each turn ends with a token
TEXTS = [  # tokenizer, row, the ids that are read
    (tiny_tokenizer(), {"prompt": "b c", "completion": " d", "messages": [ASSISTANT]}, [4, 5]),
    (chat_tokenizer(), {"prompt": "b c"}, [4, 5]),  # a text is read as it is
    (chat_tokenizer(), {"messages": [USER, ASSISTANT]}, [2, 4, 5, 3]),
    (chat_tokenizer(), {"prompt": [USER]}, [2, 4, 5, 3]),
    (chat_tokenizer(), {"messages": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]}, [2, 7, 2, 4, 5, 3, 6, 8, 2, 4, 5, 3]),
    (ENDS, {"prompt": [USER, ASSISTANT]}, [2, 4, 5, 15, 3, 6, 8]),  # it is continued
    (KWARGS, {"prompt": [USER], "chat_template_kwargs": {"mood": "d"}}, [6, 3]),
    (with_ends(), {"prompt": "b"}, [5, 4]),
    (with_ends(), {"prompt": "<s> b"}, [5, 4]),
    (with_ends("<s>", "$A", "<eos>"), {"prompt": "b"}, [5, 4]),
    (with_ends("<s>", "$A", "<eos>"), {"prompt": "b <eos>"}, [5, 4, 0, 0]),
]


@pytest.mark.parametrize("tokenizer, row, ids", TEXTS)
def test_the_tokenizer_puts_nothing_after_a_prompt_and_no_second_bos_before_it(tokenizer, row, ids):
    columns = {name: value for name, value in row.items() if name != "prompt"}
    assert rloo.prepare_example(row, tokenizer) == {"prompt": ANY, "prompt_ids": ids, "columns": columns}


def test_datasets_from_jsonl_files_folders_and_their_splits(tmp_path):
    rows = [{"prompt": "a", "n": 1}, {"prompt": "b é\u2028", "m": 2}]  # a line separator inside a text
    file = tmp_path / "validation.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file.write_text(f"{lines[0]}\n\n{lines[1]}\n", encoding="utf-8")
    places = {f"{file}, line 1": rows[0], f"{file}, line 3": rows[1]}
    assert rloo.load_rows(str(file), "train") == rloo.load_rows(str(tmp_path), "validation") == places
    assert rloo.load_rows(str(tmp_path), "train") == rloo.load_rows(str(file), "test") == {}
    write_rows(tmp_path / "test.jsonl", rows * 600)
    write_rows(tmp_path / "x.jsonl", rows * 10)
    for name, flags, sizes in (
        ("", {"dataset_train_split": "validation"}, [2, 500]),
        ("", {"dataset_train_split": "test", "dataset_test_split": "validation"}, [1200, 2]),
        ("", {"dataset_train_split": "test"}, [1100, 100]),  # not its own training rows: the last tenth, at most 100
        ("x.jsonl", {"max_prompt_length": 1, "num_eval_prompts": 7}, [9, 1]),  # every second prompt has 2 tokens
        ("x.jsonl", {"num_eval_prompts": 0}, [20, 0]),
        ("x.jsonl", {}, [18, 2]),
    ):
        train, test = rloo.load_data(Args(dataset_name=str(tmp_path / name), **flags), tiny_tokenizer())
        assert [len(train), len(test)] == sizes
    assert [row["prompt"] for row in train] == [row["prompt"] for row in rows * 9]
    assert [row["columns"] for row in train[:2]] == [{"n": 1, "m": None}, {"n": None, "m": 2}]  # the same for each row
    assert [len(row["prompt_ids"]) for row in test] == [1, 2]  # by length


def test_a_wrong_row_is_named_by_its_file_and_line_and_a_mistake_in_an_edit_by_its_own(tmp_path, monkeypatch):
    for split, content in (("train", '\n{"prompt": "a"}\n\n'), ("test", '{"prompt": "a"}\n\n\n{"text": "b"}\n')):
        (tmp_path / f"{split}.jsonl").write_text(content)
    with pytest.raises(InputError, match=f"^{tmp_path}/test.jsonl, line 4: its `prompt` .*it has .'text'.*$"):
        rloo.load_data(Args(dataset_name=str(tmp_path)), tiny_tokenizer())
    monkeypatch.setattr(rloo, "prepare_example", lambda row, tokenizer: row["input_idz"])
    line = rloo.prepare_example.__code__.co_firstlineno
    with pytest.raises(InputError, match=f"train.jsonl, line 2: .*KeyError: 'input_idz', at {__file__}:{line}"):
        rloo.load_data(Args(dataset_name=str(tmp_path)), tiny_tokenizer())


def test_a_hub_name_goes_to_the_datasets_package(monkeypatch, tmp_path):
    """... whose columns may be anything, such as dates."""
    args, rows = Args(dataset_name="someone/data", dataset_config="main"), [{"prompt": "a", "on": datetime.date.max}]
    fake = types.SimpleNamespace(load_dataset=lambda name, config: {"train": rows} if config == "main" else None)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    rloo.append(tmp_path / "x.jsonl", rloo.load_data(args, tiny_tokenizer())[0])
    assert read_metrics(tmp_path, "x")[0]["columns"] == {"on": "9999-12-31"}
    rows.append({"prompt": ""})
    with pytest.raises(InputError, match="someone/data, train, row 2: its `prompt`"):
        rloo.load_data(args, tiny_tokenizer())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        rloo.load_rows("someone/something", "train")


@pytest.mark.parametrize("chat", [False, True])
def test_reward_functions_see_the_completions_of_a_prompt_one_after_the_other(chat):
    """... with prompts, texts, ids and columns in the same order, as in TRL 1.x, so that it can compare siblings; for
    chats prompts and completions are messages."""
    batch, calls = random_batch(), []
    for i, row in enumerate(batch.examples):
        prompt = [{"role": "user", "content": f"prompt {i}"}] if chat else f"prompt {i}"
        row.update(prompt=prompt, columns={"answer": i})

    def reward(**given):
        calls.append(given)
        return [None if i == 3 else i for i in range(12)]

    scores = rloo.reward_of_function(reward, tiny_tokenizer(), batch)
    assert scores[0, 1].isnan() and scores[:, 2].tolist() == [6, 7, 8] and scores.shape == (3, 4)
    order = [*itertools.product(range(4), range(3))]  # b, j
    ids = [batch.responses[j, b][batch.response_mask[j, b]].tolist() for b, j in order]  # the stop token included
    texts = [" ".join(WORDS[i - 3] for i in real if i) for real in ids]
    completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    prompts, answers = [batch.examples[b]["prompt"] for b, _ in order], [b for b, _ in order]
    assert calls == [{"prompts": prompts, "completions": completions, "completion_ids": ids, "answer": answers}]


def test_trls_reward_functions_run_as_they_are(train, tmp_path):
    """... on chats: the first reads messages, the others, which are made with settings, token ids."""
    pytest.importorskip("trl.rewards")
    (tmp_path / "of_trl.py").write_text(
        "import trl.rewards as of_trl\n"
        "overlong = of_trl.get_soft_overlong_punishment(6, 3)\n"
        "repetition = of_trl.get_repetition_penalty_reward(2, -1.0)\n"
    )
    (metrics,), _ = train(
        sft_model_path=save(tmp_path / "sft", tiny_model(), chat_tokenizer()),
        dataset_name=write_rows(tmp_path / "chats.jsonl", [{"prompt": [USER]}] * 16),
        reward_model_path=None,
        reward_fns=(
            "trl.rewards:think_format_reward",
            f"{tmp_path}/of_trl.py:overlong",
            f"{tmp_path}/of_trl.py:repetition",
        ),
    )
    assert metrics["rewards/think_format_reward/mean"] == 0
    assert -1 <= metrics["rewards/overlong/mean"] < 0 and -1 <= metrics["rewards/repetition/mean"] < 0


def test_texts_are_without_the_stop_token_whatever_it_is_and_otherwise_as_sampled():
    """The stop token may be a word, and tags may be special tokens. A tokenizer that tidies up spaces would make "a ."
    "a."."""
    tagged, tidy = tiny_tokenizer(), tiny_tokenizer(words={".": 3, "b": 4, "c": 5})
    tagged.add_special_tokens({"additional_special_tokens": ["b"]})
    tidy.clean_up_tokenization_spaces = True
    batch = rloo.make_batch([{"prompt_ids": [3]}] * 2, torch.tensor([[[4, 5, 0, 0], [4, 3, 4, 3]]]), stop_ids=[5])
    for tokenizer, texts in ((tiny_tokenizer(), "b, b a b a"), (tagged, "b, b a b a"), (tidy, "b, b . b .")):
        assert ", ".join(rloo.completion_texts(batch, tokenizer)) == texts


BAD_RETURNS = [[1.0], [1.0] * 13, None, 3.0, ["1"] * 12, iter([1.0] * 12), torch.zeros(12, 2)]
BAD_RETURNS += [{f"completion {i}": 1.0 for i in range(12)}]
BAD_RETURNS += [[number] * 12 for number in (math.nan, math.inf, 1e300)]


@pytest.mark.parametrize("returned", BAD_RETURNS, ids=lambda returned: f"{returned!r:.20}")
def test_what_a_reward_function_may_not_return(returned):
    def my_reward(**columns):
        return returned

    line = "^my_reward must return a list of 12 finite numbers or Nones, not "
    with pytest.raises(InputError, match=line) as error:
        rloo.reward_of_function(my_reward, tiny_tokenizer(), random_batch())
    assert ("it returned 13" in str(error.value)) == (isinstance(returned, list) and len(returned) == 13)


@pytest.mark.parametrize("flag", ["reward_fns", "eval_fns"])
def test_an_error_in_a_users_function_is_raised_as_it_is(train, tmp_path, flag):
    """... with the trace down to the line of the user's file, and beyond."""
    file = tmp_path / "my_functions.py"
    file.write_text("import json\n\ndef f(completions, **columns):\n    return json.loads('{')\n")
    with pytest.raises(json.JSONDecodeError) as raised:
        train(num_eval_prompts=2, **{flag: (f"{file}:f",)})
    assert (file, 4) in [(Path(str(place.path)), place.lineno + 1) for place in raised.traceback]


def test_a_reward_function_may_switch_gradients_off(train):
    functions = flag_of(switches=lambda prompts, **columns: torch.set_grad_enabled(False) and [1.0] * len(prompts))
    with torch.enable_grad():
        assert train(reward_fns=functions)[0][0]["grad_norm"] > 0


def test_a_reward_of_weight_0_is_logged_and_makes_nothing_scorable(train, capsys):
    """A run in which no completion has a score ends before its first step, with one line."""
    (never,) = flag_of(never=lambda prompts, **columns: [None] * len(prompts))
    flags = {"reward_model_path": None, "kl_coef": 0.0, "num_eval_prompts": 1}
    functions = spec("count_tokens"), spec("constant_reward"), never
    (metrics,), _ = train(reward_fns=functions, reward_weights=(1.0, 0.0, 1.0), **flags)
    assert metrics["rewards/constant_reward/mean"] == 1 and "rewards/never/mean" not in metrics
    assert metrics["objective/scores"] == pytest.approx(metrics["completions/mean_length"])
    capsys.readouterr()
    with pytest.raises(InputError, match="^no completion of this update has a score$"):
        train(reward_fns=(never, spec("constant_reward")), reward_weights=(1.0, 0.0), **flags)
    assert "update 0: sampled/length " in capsys.readouterr().out


def reward_model(path, tokenizer=None, **flags):
    args = Args(**{"reward_model_path": str(path), "device": "cpu", "response_length": 6, "dtype": "float32"} | flags)
    return rloo.load_reward_model(args, tokenizer or tiny_tokenizer(), prompts_of(3, 9))["rewards/reward_model"]


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


def test_a_reward_model_is_checked_whatever_the_scale_of_its_scores(tmp_path):
    """Scores around 50 round by 0.2 in bfloat16. A model that attends to a window is wrong at any scale."""
    right, wrong = tiny_model(classifier=True), tiny_model("mistral", classifier=True, layout="plain")
    right.score.weight.data.mul_(50 / right.score.weight.abs().mean())
    wrong.score.weight.data.mul_(1e-5)
    assert reward_model(save(tmp_path / "right", right, tiny_tokenizer()), dtype="bfloat16")(random_batch()).std() > 20
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(InputError, match="differ from"):
            reward_model(save(tmp_path / "wrong", wrong, tiny_tokenizer()), dtype=dtype, response_length=16)


def test_a_reward_model_without_a_head_gets_a_random_one_which_is_said(train, tiny, tmp_path, capsys):
    """... and the same one when the run is continued. A policy that lacks weights is refused."""
    flags = {"reward_model_path": str(tiny / "sft"), "total_episodes": 48, "save_steps": 1}
    metrics, output = train(**flags)
    assert f"{tiny}/sft: lacks score.weight, which now is random\n" in capsys.readouterr().out
    assert metrics[0]["rewards/reward_model/std"] > 0 and metrics[0]["grad_norm"] > 0
    again, _ = train(**flags, **resumed_at(output, 2, tmp_path / "again"))
    assert without_times(again) == without_times(metrics)


def test_names_of_functions_must_differ():
    """... from each other and from what is graded anyway; else one of two would be dropped without a word."""
    f, score, reward_model = flag_of(f=len, score=len, reward_model=len)
    sys.modules["other_of_this_test"] = sys.modules["of_this_test"]
    assert [*rloo.load_functions([f, score], None, "rewards/")] == ["rewards/f", "rewards/score"]
    for specs, prefix in (([f, "other_of_this_test:f"], ""), ([score], ""), ([reward_model], "rewards/")):
        with pytest.raises(InputError, match="names must differ"):
            rloo.load_functions(specs, None, prefix)


# ---- Flags -----------------------------------------------------------------------------------------------------------


def resolved(line: str) -> Args:
    return rloo.resolve_args(tyro.cli(Args, args=line.split(), use_underscores=True))


def test_commands_of_trls_documentation_parse_and_mean_the_same():
    args = resolved("--model_name_or_path x --dataset_name y")
    assert args.sft_model_path == "x" and args.eval_fns == ()
    flags = "--rloo_k 8 --kl_coef 0.1 --num_ppo_epochs 3 --cliprange 0.1 --cliprange_high 0.3 --response-length 99 "
    flags += "--reward_fns x.py:f --normalize_advantage --output_dir x"
    of_trl_1 = "--num-generations 8 --beta 0.1 --num_iterations 3 --epsilon 0.1 --epsilon_high 0.3 "
    of_trl_1 += "--max_completion_length 99 --reward_funcs x.py:f --normalize_advantages --output_dir x"
    assert resolved(of_trl_1) == resolved(flags) != resolved("--output_dir x")


def test_defaults_depend_on_what_is_trained(tiny, train):
    own = f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_fns x.py:f --device cpu"
    bundled, *others = map(resolved, ("", own, f"--sft_model_path {tiny}/sft --device cpu"))
    assert (bundled.learning_rate, bundled.total_episodes, bundled.dtype) == (2.5e-4, 6400, "float32")
    assert {(args.learning_rate, args.total_episodes, args.dtype) for args in others} == {(1e-6, None, "float32")}
    assert resolved("--reward_fns x.py:f").reward_model_path is None
    zeros = resolved("--total_episodes 0 --learning_rate 0 --cliprange_high 0")
    assert zeros.total_episodes == zeros.learning_rate == zeros.cliprange_high == 0
    assert rloo.Args().adam_eps == torch.optim.AdamW([torch.zeros(1)]).defaults["eps"]
    metrics, output = train(learning_rate=None, total_episodes=None, rloo_k=4)
    assert [update["episode"] for update in metrics] == [16, 32, 48, 64]  # 4 completions of each of 16 prompts
    assert metrics[0]["lr"] == json.loads((output / "args.json").read_text())["learning_rate"] == 1e-6
    assert [update["episode"] for update in train(total_episodes=17)[0]] == [16, 32]  # whole updates


def test_devices_and_that_on_a_gpu_attention_is_never_cudnns(tiny, tmp_path, monkeypatch):
    """A T4 or V100 only emulates bfloat16. The backward pass of cuDNN's attention gives NaN with some masks."""
    own = f"--dataset_name {tiny}/data --sft_model_path {tiny}/sft --reward_fns x.py:f --device cuda"
    for native, dtype in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, x=native: x)
        assert resolved(own).dtype == dtype and resolved("--device cuda").dtype == "float32"
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert [resolved(x).device for x in (own, f"{own}:1", "--device cpu")] == ["cuda:2", "cuda:1", "cpu"]

    used, enabled = [], []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", enabled.append)
    with pytest.raises(InputError, match="x.py:f"):
        rloo.main(resolved(f"{own}:1"))
    assert used == [torch.device("cuda:1")] and enabled == [False]


BROKEN_FILES = {  # what the next test finds in the folder {x}
    "broken.jsonl": '{"prompt": "a"}\n{"prompt": }\n',
    "empty.jsonl": '{"prompt": "a"}\n{"prompt": ""}\n',
    "chat.jsonl": '{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "b"}]}\n',
    "fns.py": "def f(**kw): 0\n",
}
MISTAKES = {  # what the line must say -> what is added to a command line that works
    "at least 2": "--rloo_k 1; --rloo_k 0",
    "must be above 0": "--temperature 0; --num_ppo_epochs 0; --num_mini_batches 0; --gradient_accumulation_steps 0",
    "must not be negative": "--max_grad_norm -1; --kl_coef -1; --seed -1; --total_episodes -5; "
    "--learning_rate -1; --weight_decay -1; --adam_eps -1; --warmup_ratio -1; --cliprange -1; --cliprange_high -1; "
    "--missing_eos_penalty -1; --save_steps -1; --num_sample_generations -1; --num_eval_prompts -1",
    "--reward_clip_range: must be": "--reward_clip_range -1; --reward_clip_range 2 1; --reward_clip_range 0",
    "--reward_clip_range: must be one number above 0": "--reward_clip_range",
    "must be 1 numbers, not all 0": "--reward_weights 0; --reward_weights 1 2",
    "or be a multiple, such as 16": "--per_device_train_batch_size 7; --per_device_train_batch_size 0",
    "must be whole groups of": "--per_device_train_batch_size 1 --gradient_accumulation_steps 3; "
    "--per_device_train_batch_size 1 --num_mini_batches 2",
    "No such file or directory": "--reward_fns {x}/no.py:f",
    "has no attribute 'g'": "--reward_fns {x}/fns.py:g",
    "loaded as file.py:function or module:function": "--reward_fns fns; --eval_fns fns; --reward_fns nowhere:f",
    "--resume: needs --output_dir": "--resume",
    "--output_dir {x}: is not empty": "--output_dir {x}",
    "has other files, but no checkpoint to continue from": "--output_dir {x} --resume",
    "there is no such file or folder": "--dataset_name nowhere.jsonl; --sft_model_path ./sft",
    "no .jsonl file, folder": "--dataset_name nobody/nothing",
    "has no rows in its split dev": "--dataset_train_split dev",
    "--dataset_test_split tset: has no rows": "--dataset_test_split tset",
    "line 2: must be a JSON object like": "--dataset_name {x}/broken.jsonl",
    "line 2: its `prompt` (text or chat messages) or `messages` cannot be used (it": "--dataset_name {x}/empty.jsonl",
    "chat_template is not set": "--dataset_name {x}/chat.jsonl",
    "no prompt is within --max_prompt_length 1": "--max_prompt_length 1",
    "tokenizer cannot be loaded": "--model_name_or_path nobody/nothing",
    "cannot be written to": "--output_dir {x}/chat.jsonl; --output_dir /proc/x",
    "cannot be loaded": "--reward_model_path {x}; --sft_model_path {x} --model_name_or_path {sft}",
    "lacks weights": "--sft_model_path {reward}",
}


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


def test_a_model_of_ones_own_is_not_trained_on_the_bundled_task():
    args = rloo.resolve_args(Args(sft_model_path="model", reward_fns=("x.py:f",)))
    with pytest.raises(InputError, match="^give --dataset_name"):
        rloo.check_args(args)


def test_a_reward_model_that_cannot_be_used_is_refused(train, tiny, tmp_path):
    """It has two labels, a sliding window, or reads what follows a token."""
    labels = type(tiny_model(classifier=True)).from_pretrained(
        tiny / "reward", num_labels=2, ignore_mismatched_sizes=True
    )
    window = tiny_model("mistral", classifier=True)
    bert = tiny_model("bert", classifier=True, **SIZE, intermediate_size=64)
    for model, words in ((labels, "cannot be loaded"), (window, "padded batch differ from"), (bert, "is not causal")):
        with pytest.raises(InputError, match=words):
            train(reward_model_path=save(tmp_path / words, model, tiny_tokenizer()), response_length=16)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_learning_rates_are_those_of_transformers_but_that_none_is_0(schedule):
    """A warm-up does not begin at 0, and leaves what follows as it was."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    for warmup, ratio in ((0, 0.0), (3, 0.3), (3, 0.21)):  # 2.1 updates are 3
        (factor,) = transformers.get_scheduler(name, optimizer, warmup, 10).lr_lambdas
        expected = [(i + 1) / (warmup + 1) for i in range(warmup)] + [factor(i) for i in range(warmup, 10)]
        args = Args(lr_scheduler_type=schedule, warmup_ratio=ratio)
        assert [rloo.share_of_peak(args, done, 10) for done in range(10)] == pytest.approx(expected, rel=1e-12)


def test_groups_of_an_optimizer_have_rates_of_their_own_and_one_norm(train, monkeypatch):
    make, rates = rloo.make_optimizer, []

    def two_groups(*inputs):
        optimizer = make(*inputs)
        optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 1e-3})
        optimizer.register_step_pre_hook(lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
        return optimizer

    monkeypatch.setattr(rloo, "make_optimizer", two_groups)
    train(total_episodes=64)
    assert rates == [pytest.approx([1e-2 * x, 1e-3 * x]) for x in (1, 3 / 4, 2 / 4, 1 / 4)]
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    norm = rloo.optimizer_step(Args(), torch.optim.SGD([{"params": [weight]} for weight in weights], lr=1.0))
    assert norm == 5 and [weight.item() for weight in weights] == pytest.approx([-0.6, -0.8])


def test_another_seed_is_another_run(train, tmp_path):
    one_prompt = write_rows(tmp_path / "x.jsonl", [{"prompt": "a b"}] * 16)  # whatever their order, the seed is seen
    assert not torch.equal(*(final_weights(train(dataset_name=one_prompt, seed=seed)[1]) for seed in (1, 2)))


SPOILED = {  # what is spoiled in the second update: a function, its output -> what the line calls it
    "logits of the policy": ("final_logits", lambda _, out: out * math.nan, "a log-prob"),
    "log-probs of the reference": ("logprobs_in_parts", lambda _, out: out * math.nan, "a log-prob"),
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
        train(output_dir=str(output), total_episodes=48, save_steps=9)
    assert len(read_metrics(output)) == 1 and saved_updates(output) == []


def test_what_goes_wrong_in_learning_is_said_once(train, monkeypatch):
    """Equal scores, and a policy that draws one token only."""
    spy(monkeypatch, "completion_logprobs", lambda _, found: (found[0], 0 * found[1]))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        train(reward_fns=(spec("constant_reward"),), reward_model_path=None, total_episodes=64)
    texts = [str(x.message) for x in said]
    for words in ("equal scores", "entropy below 0.01 nats"):
        assert sum(words in text for text in texts) == 1, texts


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


def sum_of_two(prompts, completions, completion_ids, n, **columns):
    """The sum of the characters, None for every second row."""
    return [float(sum(map(ord, text))) if row % 2 else None for text, row in zip(completions, n, strict=True)]


def test_what_evaluations_leave_in_files_and_on_the_screen(train, tiny, capsys):
    """Of five prompts; at learning rate 1e-20, so that every evaluation finds the same: all draw the same random
    numbers. A grade that is None is left out of the means. The score is that of training, with its weights."""
    functions = {"reward_fns": (spec("sum_of_two"),), "eval_fns": (spec("count_tokens"),), "reward_weights": (1, 3)}
    flags = {"num_eval_prompts": 5, "num_sample_generations": 1, "total_episodes": 64, "learning_rate": 1e-20}
    _, output = train(**flags, **functions)
    rows = read_metrics(output, "completions")
    held_out = sorted(read_metrics(tiny / "data", "test")[:5], key=lambda row: len(row["prompt"]))
    expected = [(0, "sampled"), (0, "greedy"), (2, "sampled"), (4, "sampled"), (4, "greedy")]
    for row, ((update, mode), of_data) in zip(rows, itertools.product(expected, held_out), strict=True):
        grades = row["grades"]
        assert {*row} == {"update", "mode", "prompt", "completion", "grades", "columns"}
        assert (row["update"], row["mode"]) == (update, mode)
        assert row["columns"] | {"prompt": row["prompt"]} == of_data
        assert len(row["completion"].split()) in (grades["length"], grades["length"] - 1)
        assert grades["count_tokens"] == grades["length"]
        assert [grades.get("rewards/sum_of_two")] == sum_of_two("", [row["completion"]], "", [of_data["n"]])
        score = grades["rewards/reward_model"] + 3 * grades.get("rewards/sum_of_two", 0)
        assert grades["score"] == pytest.approx(score)
    completions = [row["completion"] for row in rows]
    assert completions[:10] == completions[15:] and completions[:5] == completions[10:15] != completions[5:10]

    first, middle, last = read_metrics(output, "evaluations")
    names = ("length", "count_tokens", "score", "rewards/reward_model", "rewards/sum_of_two")
    sampled, greedy = (
        {f"{mode}/{name}{end}" for name in names for end in ("", "_stderr", "_count")} for mode in ("sampled", "greedy")
    )
    assert {*middle} == {"update", "episode"} | sampled and {*first} == {*last} == {*middle} | greedy
    for name in names:  # over those that have one
        own = [row["grades"][name] for row in rows[:5] if name in row["grades"]]
        found = [first[f"sampled/{name}{end}"] for end in ("", "_stderr", "_count")]
        assert found == pytest.approx([mean(own), stdev(own) / len(own) ** 0.5, len(own)]), name
    assert len(own) < 5 and found[1] > 0  # of the one that is partly None
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
    assert [x["update"] for x in read_metrics(output, "evaluations")] == [0, 2]


# ---- Whole runs ------------------------------------------------------------------------------------------------------


def test_the_file_alone_runs_in_an_empty_folder_and_what_it_leaves_loads(tiny, tmp_path):
    """... also with a function that a reader adds to it, at its end."""
    text = Path(rloo.__file__).read_text(encoding="utf-8")
    edited = text.replace('\nif __name__ == "__main__":', '\ndef mine():\n    pass\n\n\nif __name__ == "__main__":')
    (tmp_path / "rloo.py").write_text(edited, encoding="utf-8")
    line = [sys.executable, "-B", "rloo.py", *command(tiny, "out", num_eval_prompts=8)]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0 and "results: out\n" in ended.stdout, ended.stderr
    assert "update/s" not in ended.stderr and "it/s" not in ended.stderr  # a bar would be one endless line of a file
    files = {"args.json", "metrics.jsonl", "evaluations.jsonl", "completions.jsonl", "checkpoint-1"}
    files |= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files | {".lock"}
    model, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForCausalLM, AutoTokenizer))
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
    """... with the number of updates as the step, which may go back, unlike the service's own. A second run in the same
    process does not log into the first."""
    logged, started, steps = [], [], []
    tracker = types.SimpleNamespace(log=logged.append, finish=lambda: None)
    tracker.define_metric = lambda name, step_metric: steps.append((name, step_metric))
    service = types.SimpleNamespace(init=lambda **flags: started.append(flags) or tracker)
    monkeypatch.setitem(sys.modules, "wandb", service)
    monkeypatch.setenv("WANDB_PROJECT", "project")
    flags = {"track": True, "num_eval_prompts": 4, "output_dir": str(tmp_path / "out"), "total_episodes": 32}
    metrics, output = train(**flags)
    first, last = read_metrics(output, "evaluations")
    assert [x["update"] for x in logged] == [0, 1, 2, 2] and logged[1:3] == metrics
    assert logged[3].items() >= {f"eval/{name}": x for name, x in last.items() if "/" in name}.items()
    train(**flags | {"total_episodes": 48}, resume=True)
    train(**flags | {"output_dir": str(tmp_path / "other")})
    train(**flags | {"output_dir": str(tmp_path / "untracked"), "track": False})
    one, resumed, other = (flags["id"] for flags in started)
    assert one == resumed != other and steps == [("*", "update")] * 3
    same = {"project": "project", "resume": "allow", "reinit": "finish_previous"}
    assert all(flags.items() >= same.items() for flags in started) and started[0]["name"] == "out"
    service.init = lambda **flags: [].pop()
    with pytest.raises(InputError, match="^--track: .*wandb login.*IndexError: pop from empty list"):
        train(track=True)


def test_a_reward_function_may_be_anywhere(tmp_path):
    """... also in a file whose name has a hyphen, or that pickles dataclasses. Two files of one name, and
    a name that is taken, are refused."""
    pickles = "import pickle\nfrom dataclasses import dataclass\n@dataclass\nclass Answer:\n    value: 'float'\n"
    for file, content in {
        "beside_it.py": "two = 2.0",
        "my-rewards.py": "from beside_it import two\ndef f(**columns): return two",
        "other/my-rewards.py": "def f(**columns): return 5.0",
        "json.py": "def f(**columns): return 3.0",
        "pool.py": pickles + "def f(**columns): return pickle.loads(pickle.dumps(Answer(4.0))).value",
    }.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    for source, value in (("my-rewards.py", 2), ("pool.py", 4)):
        assert rloo.load_function(f"{tmp_path}/{source}:f")() == value
    for source in ("other/my-rewards.py", "json.py"):
        with pytest.raises(InputError, match=f"{source}:f: .*rename the file"):
            rloo.load_function(f"{tmp_path}/{source}:f")


def test_misspelt_and_second_replacements_are_refused_and_wrappers_compose(tiny, tmp_path, monkeypatch):
    rloo.advantages = len
    with pytest.raises(SystemExit, match="^rloo.py: there is no advantages to replace$"):
        rloo.command_line(command(tiny, tmp_path / "out"))
    del rloo.advantages
    for change in (rloo.replace, rloo.wrap):
        with pytest.raises(KeyError, match="advantages"):
            change(advantages=len)
    for name in ("advantage", "policy_loss"):
        monkeypatch.setattr(rloo, name, getattr(rloo, name))  # put back afterwards
    rloo.replace(advantage=lambda rewards: rewards + 1)
    rloo.wrap(advantage=lambda advantage, rewards: 2 * advantage(rewards))
    rloo.wrap(advantage=lambda advantage, rewards: -advantage(rewards))
    assert rloo.advantage(3) == -8
    rloo.policy_loss = len  # as an assignment
    for name in ("advantage", "policy_loss"):
        with pytest.raises(InputError, match=f"two files replace {name}"):
            rloo.replace(**{name: max})


# ---- Killed, resumed, told to stop, out of space ---------------------------------------------------------------------

# Evaluations at 0, 3 and 6 of six updates, with two optimizer steps each; checkpoints at 2, 4 and 6.
LONG = {"total_episodes": 96, "num_mini_batches": 2, "per_device_train_batch_size": 8, "log_completions": True}
LONG |= {"learning_rate": 3e-3, "lr_scheduler_type": "cosine", "warmup_ratio": 0.3, "missing_eos_penalty": 0.5}
LONG |= {"save_steps": 2, "num_eval_prompts": 4, "num_sample_generations": 1}
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
    assert end_of(run(tiny, tmp_path / "again", save_steps=4)) == end_of(whole)
    silent = run(tiny, tmp_path / "silent", num_eval_prompts=0)
    assert torch.equal(final_weights(silent), final_weights(whole))
    assert saved_updates(whole) == [6, 4] and saved_updates(tmp_path / "again") == [6, 4]
    assert not torch.equal(final_weights(whole / "checkpoint-4"), final_weights(whole))
    assert torch.equal(final_weights(whole / "checkpoint-6"), final_weights(whole))
    run(tiny, tmp_path / "from a checkpoint", sft_model_path=str(whole / "checkpoint-4"), total_episodes=16)


def test_training_completions_have_the_numbers_that_training_learned_from(whole):
    lines = read_metrics(whole, "training_completions")
    for metrics in read_metrics(whole):
        own = [line["grades"] for line in lines if (line["update"], line["mode"]) == (metrics["update"], "training")]
        for name, metric in (("score", "scores"), ("kl", "kl")):
            assert mean(grades[name] for grades in own) == pytest.approx(metrics[f"objective/{metric}"], abs=1e-5)
        for one, other in zip(own[::2], own[1::2], strict=True):  # k = 2: siblings have opposite advantages
            assert one["advantage"] == pytest.approx(-other["advantage"], abs=1e-6) != 0


def test_records_have_the_texts_and_grades_of_their_own_completions():
    batch, tokenizer = random_batch(k=2, B=3), tiny_tokenizer()
    records = rloo.records_of(batch, {"index": torch.arange(6).view(2, 3)}, tokenizer)
    assert [record["grades"]["index"] for record in records] == [0, 3, 1, 4, 2, 5]  # prompt by prompt
    for record, (b, j) in zip(records, itertools.product(range(3), range(2)), strict=True):
        (text,) = rloo.completion_texts(batch.select(slice(j, j + 1), torch.tensor([b])), tokenizer)
        assert record["completion"] == text
    assert len({record["completion"] for record in records}) == 6


def test_a_number_that_is_not_finite_on_another_rank_ends_this_one_too(monkeypatch):
    rloo.require_finite(torch.ones(2), "a loss")
    monkeypatch.setattr(rloo, "sum_over_ranks", lambda x: x + 1)  # the other one has one
    with pytest.raises(FloatingPointError, match="a loss"):
        rloo.require_finite(torch.ones(2), "a loss")


ERROR, FULL = ZeroDivisionError(), OSError(28, "No space left on device")
INTERRUPTED = {  # starts of one run: a function, its call, what happens there, the newest checkpoint
    "Ctrl-C while models load": ("load_models", 1, signal.SIGINT, []),
    "a grader before training": ("count_tokens", 1, ERROR, []),
    "between two steps of an update": ("policy_loss", 4, ERROR, []),  # half of update 2 is done
    "a reward": ("scores_of", 4, ERROR, [1]),
    "a full disk at a checkpoint": ("torch.save", 1, FULL, [2]),
    "SIGTERM in a reward": ("scores_of", 1, signal.SIGTERM, [2]),
    "Ctrl-C before the first step of an update": ("policy_loss", 1, signal.SIGINT, [2]),
    "Ctrl-C between two steps": ("policy_loss", 2, signal.SIGINT, [3]),
    "an evaluation's reward": ("scores_of", 1, ERROR, [3]),
    "a grader in an evaluation": ("count_tokens", 1, ERROR, [3]),
    "between the files of an evaluation": ("append", 2, FULL, [3]),
    "SIGTERM in an evaluation": ("scores_of", 1, signal.SIGTERM, [3]),
    "Ctrl-C in an evaluation": ("count_tokens", 1, signal.SIGINT, [3]),
    "Ctrl-C in a rollout": ("collect", 1, signal.SIGINT, [3]),
    "before a checkpoint has its name": ("Path.rename", 1, ERROR, [4]),
    "SIGTERM in an update": ("policy_loss", 2, signal.SIGTERM, [5]),
    "Ctrl-C in the last update": ("policy_loss", 2, signal.SIGINT, [6]),
    "a grader in the last evaluation": ("count_tokens", 1, ERROR, [6]),
    "Ctrl-C in the last evaluation": ("scores_of", 2, signal.SIGINT, [6]),
    "a closed terminal in the last evaluation": ("evaluate", 1, signal.SIGHUP, [6]),
}


def test_a_run_that_is_interrupted_and_resumed_again_ends_like_a_whole_one(whole, tiny, tmp_path, monkeypatch, capsys):
    """... in which each update is once in all files. What was saved says how to go on. Files of the user stay."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # a shell's & and nohup have some of them ignored
    output = tmp_path / "out"
    saved = f"saved; to continue, repeat the command with --resume --output_dir {output}"
    for where, (name, call, event, newest) in INTERRUPTED.items():
        owner = {"torch": torch, "Path": Path, "": rloo}[name.rpartition(".")[0]]
        owner = sys.modules[__name__] if name == "count_tokens" else owner
        name, calls = name.rpartition(".")[2], itertools.count(1)
        original = getattr(owner, name)

        def interrupted(*inputs, original=original, calls=calls, call=call, event=event, **options):
            if next(calls) == call:
                if isinstance(event, Exception):
                    raise event
                signal.raise_signal(event)
            return original(*inputs, **options)

        with monkeypatch.context() as patch, pytest.raises((Exception, SystemExit)) as end:
            patch.setattr(owner, name, interrupted)
            rloo.command_line(command(tiny, output, **LONG, resume=True))
        assert saved_updates(output)[:1] == newest, where
        said = capsys.readouterr().err
        if isinstance(event, Exception):
            assert end.value is event, where
            assert "".join(getattr(event, "__notes__", [])) == (saved if newest else ""), where
            event.__notes__ = []
        else:
            assert end.value.code == 130 and said.endswith(f"stopped; {saved if newest else 'not saved'}\n"), where
        if where == "between two steps of an update":
            write_rows(output / "mine.jsonl", [{"of": "the user"}])
            (output / "checkpoint-1-keep").mkdir()
        if where == "a grader in an evaluation":
            (output / "metrics.jsonl").open("a").write('{"update": 6, "obj')  # cut when the power failed
    assert end_of(run(tiny, output, resume=True)) == end_of(whole)
    assert saved_updates(output) == [6, 5] and not (output / "unfinished-checkpoint").exists()
    assert read_metrics(output, "mine") == [{"of": "the user"}] and (output / "checkpoint-1-keep").exists()


def test_runs_that_are_killed_at_random_moments_and_resumed_end_like_a_whole_one(tiny, tmp_path, whole):
    """SIGKILL, also during a save. The first run, which nothing kills, says how long one takes."""
    kills, draw, seconds, output = int(os.environ.get("KILLS", 2)), random.Random(1), None, tmp_path / "run"
    while kills:
        process = forkserver().Process(target=run, args=(tiny, output), kwargs={"resume": True, "save_steps": 1})
        process.start()  # waits until the server has imported what it needs
        begin = time.perf_counter()
        process.join(seconds and draw.uniform(0, seconds))
        process.kill()
        process.join()
        seconds = seconds or time.perf_counter() - begin
        if process.exitcode == 0:
            assert end_of(output) == end_of(whole)
            shutil.rmtree(output)
        else:
            assert process.exitcode == -signal.SIGKILL
            kills -= 1
    assert end_of(run(tiny, output, resume=True)) == end_of(whole)


def test_an_old_checkpoint_is_removed_when_the_new_one_is_on_the_disk_and_has_its_name(train, tmp_path, monkeypatch):
    """By default a tenth of the run is between two checkpoints."""
    output, events, rename = tmp_path / "out", [], Path.rename
    monkeypatch.setattr(os, "sync", lambda: events.append((output / "unfinished-checkpoint" / "state.json").exists()))
    monkeypatch.setattr(Path, "rename", lambda *paths: events.append(saved_updates(output)) or rename(*paths))
    train(output_dir=str(output), total_episodes=16 * 20, response_length=2)
    assert events[:8] == [True, [], True, [2], True, [4, 2], True, [6, 4]] and saved_updates(output) == [20, 18]


def test_one_run_at_a_time_writes_to_a_folder(tiny, tmp_path):
    """The lock ends with its process, see the kills."""
    args = Args(**run_flags(tiny, tmp_path, resume=True))
    with rloo.open_folder(args, tmp_path, 16)[0], forkserver().Pool(1) as pool, pytest.raises(InputError) as error:
        pool.apply(rloo.main, [args])
    assert "another run writes to it" in str(error.value)
    rloo.open_folder(args, tmp_path, 16)[0].close()


def test_a_checkpoint_of_another_batch_size_model_or_program_is_refused(whole, tiny, tmp_path):
    output = shutil.copytree(whole, tmp_path / "out")
    for other in ({"per_device_train_batch_size": 4}, {"sft_model_path": str(whole / "checkpoint-4")}):
        with pytest.raises(InputError, match="checkpoint-6: its run had model and batch size .*/sft', 16]"):
            run(tiny, output, resume=True, **other)
    assert end_of(output) == end_of(whole)
    shutil.copytree(whole / "checkpoint-6", output / "checkpoint-7")
    write_rows(output / "checkpoint-7" / "state.json", [{"global_step": 7}])
    with pytest.raises(InputError, match="checkpoint-7: is not a checkpoint of this version"):
        run(tiny, output, resume=True)


def test_weights_that_an_edit_added_are_not_lost_on_resume_without_a_word(train, tmp_path, monkeypatch):
    spy(monkeypatch, "load_models", lambda _, models: models[0].add_module("more", torch.nn.Linear(2, 2)) or models)
    flags = {"output_dir": str(tmp_path / "out"), "total_episodes": 16}
    train(**flags)
    with pytest.raises(InputError, match="checkpoint-1: has weights that would not be read, .*more.weight"):
        train(**flags, resume=True)


def test_a_finished_run_is_not_repeated_goes_on_with_more_episodes_and_loses_nothing_with_fewer(whole, tiny, tmp_path):
    output = shutil.copytree(whole, tmp_path / "out")
    for episodes in (96, 16):
        run(tiny, output, resume=True, total_episodes=episodes)
        assert end_of(output) == end_of(whole)
    run(tiny, output, resume=True, total_episodes=144, learning_rate=1e-3, rloo_k=4, seed=7)
    metrics = read_metrics(output)
    assert metrics[:6] == read_metrics(whole) and [update["update"] for update in metrics] == [*range(1, 10)]
    lrs = [1e-3 * (0.5 - 0.5 * math.cos(math.pi * left / 6)) for left in (3, 2, 1)]  # of nine updates, not of three
    assert [update["lr"] for update in metrics[6:]] == pytest.approx(lrs)
    for folder in rloo.checkpoints(output):  # to make room
        shutil.rmtree(folder)
    with pytest.raises(InputError, match="no checkpoint to continue from"):
        run(tiny, output, resume=True)
    assert read_metrics(output) == metrics


def test_seeds_are_told_apart_not_added_up_and_every_epoch_is_each_prompt_once():
    triples = itertools.product(range(4), repeat=3)  # the run's, the update's and the rank's
    assert len({rloo.set_seed(*numbers) or (random.random(), torch.rand(1).item()) for numbers in triples}) == 4**3
    examples = [{"prompt_ids": [0] * length} for length in range(1, 51)]
    drawn = [rloo.examples_of_update(examples, 1, begin, 10) for begin in range(0, 200, 10)]
    updates = [[len(example["prompt_ids"]) for example in update] for update in drawn]
    assert all(lengths == sorted(lengths) for lengths in updates)
    epochs = [updates[i : i + 5] for i in range(0, 20, 5)]
    assert all(sorted(sum(epoch, [])) == [*range(1, 51)] for epoch in epochs) and epochs[0] != epochs[1]
    assert len(rloo.examples_of_update(examples[:2], 1, 0, 7)) == 7  # small datasets cycle


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
    return batch, rloo.completion_logprobs(model, batch, temperature or 1.0)[0]


def note_prompts(prompts, completions, completion_ids, **columns):
    """Notes what each rank trains on, and a random number."""
    if prompts[0] == "b a b":  # held out
        return [0.0] * len(prompts)
    with open(f"{os.environ['NOTES']}/rank{os.environ['RANK']}", "a") as file:
        file.write(json.dumps([random.random(), prompts[::2]]) + "\n")
    return [float(len(prompt)) for prompt in prompts]


SETTINGS = {
    "sequences": {"save_steps": 1},
    "tokens": {"token_level_kl": True, "num_ppo_epochs": 2, "num_eval_prompts": 0},
}


def several_runs(runs: list[dict], last: list[str], notes: Path):
    os.environ["NOTES"] = str(notes)
    rollout = rloo.rollout
    rloo.rollout = ranked_rollout
    for flags in runs:
        rloo.main(Args(**flags))
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]  # have a gradient on both ranks, one, none
    for weight in weights[: 2 - rloo.rank_and_world()[0]]:
        weight.grad = torch.ones(2)
    rloo.optimizer_step(Args(max_grad_norm=0.0), torch.optim.SGD(weights, lr=0.1, weight_decay=1.0))
    print("weights", [round(weight[0].item(), 4) for weight in weights])
    rloo.rollout = rollout
    rloo.command_line(last)


@pytest.fixture(scope="session")
def two_processes(tiny, tmp_path_factory):
    """The folder of runs on one and on two processes and of a command line, and the logs of both."""
    folder = tmp_path_factory.mktemp("processes")

    def flags(name: str, processes: int, **more) -> dict:
        base = run_flags(tiny, folder / name, total_episodes=48, save_steps=9, num_eval_prompts=4)
        base |= {"eval_fns": (spec("count_tokens"),), "learning_rate": 1e-3, "adam_eps": 1e-4}
        base |= {"normalize_reward": True, "normalize_advantage": True, "missing_eos_penalty": 1.0}
        return base | {"lr_scheduler_type": "constant", "per_device_train_batch_size": 16 // processes} | more

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rloo, "rollout", ranked_rollout)
        for name, more in SETTINGS.items():
            rloo.main(Args(**flags(f"one, {name}", 1, **more)))
    runs = [flags(f"two, {name}", 2, gradient_checkpointing=True, **more) for name, more in SETTINGS.items()]
    runs.append(flags("", 2) | resumed_at(folder / "one, sequences", 2, folder / "two, resumed"))
    data = shutil.copytree(tiny / "data", folder / "data")
    write_rows(data / "test.jsonl", [{"prompt": "b a b"}] * 7)  # of which two processes share six
    last = run_flags(tiny, folder / "last", dataset_name=data, num_eval_prompts=7, per_device_train_batch_size=8)
    last |= {"total_episodes": 32, "response_length": 40, "reward_fns": (spec("note_prompts"),)}
    last = command(tiny, folder / "last", **last)
    return folder, on_two_processes(folder, several_runs, runs, last, folder)()


def assert_equal_runs(one: Path, other: Path):
    assert (final_weights(one) - final_weights(other)).abs().max() < 1e-5, other.name
    for name in ("metrics", "evaluations"):
        for ours, theirs in zip(*(without_times(read_metrics(x, name)) for x in (one, other)), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4), other.name
    completions = [[x["completion"] for x in read_metrics(folder, "completions")] for folder in (one, other)]
    assert completions[0] == completions[1], other.name


def test_two_processes_equal_one(two_processes, tiny):
    """... also with --gradient_checkpointing, and when they continue a run of one."""
    folder, _ = two_processes
    one, two = folder / "one, sequences", folder / "two, sequences"
    assert (final_weights(one) - final_weights(tiny / "sft")).abs().max() > 1e-3
    assert all(0 < x["completions/clipped_ratio"] < 1 for x in read_metrics(one))
    for update in read_metrics(one) + read_metrics(two):  # completions of all ranks per second
        assert update["eps"] == pytest.approx(16 / sum(x for name, x in update.items() if name.startswith("time/")))
    assert_equal_runs(one, two)
    assert_equal_runs(one, folder / "two, resumed")
    assert_equal_runs(folder / "one, tokens", folder / "two, tokens")


def test_a_gradient_is_the_mean_over_ranks_where_one_without_it_counts_as_0(two_processes):
    """A weight that has none on any rank is left as it is, also by weight decay."""
    for log in two_processes[1]:
        assert "weights [0.8, 0.85, 1.0]\n" in log.read_text()


def test_processes_train_on_different_prompts_and_one_of_them_speaks(two_processes, tiny):
    folder, logs = two_processes
    first, second = (log.read_text().count("\nresults: ") for log in logs)
    assert first == second + 1  # the command line
    noted = [json.loads(line) for rank in (0, 1) for line in (folder / f"rank{rank}").read_text().splitlines()]
    assert len({number for number, _ in noted}) == len(noted) == 4  # no two of 2 ranks x 2 updates draw the same
    prompts = [row["prompt"] for row in read_metrics(tiny / "data", "train")]
    assert sorted(prompt for _, part in noted for prompt in part) == sorted(prompts)  # each of them once
    assert [update["episode"] for update in read_metrics(folder / "last")] == [16, 32]
    held_out = [x["completion"] for x in read_metrics(folder / "last", "completions") if x["mode"] == "sampled"]
    assert len(set(held_out[:6])) == 6 and len(held_out) == 12  # equal prompts, other random numbers on each rank
