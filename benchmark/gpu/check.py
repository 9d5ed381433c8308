"""Checks rloo.py on the device that you have: are its results right, does it use the GPU as it should, how fast is it?

    python benchmark/gpu/check.py                 # on a GPU: ten minutes
    python benchmark/gpu/check.py --device cpu    # tiny models on a CPU: under a minute
    python benchmark/gpu/check.py --only right used

Prints PASS, FAIL, SKIP or a number (INFO) for each line, writes all of them to gpu-check.json, and ends with status 1
if a line has failed. Models have random weights, so nothing is downloaded.
"""

import contextlib
import importlib.util
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
import tyro
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark" / "speed")]
import gpu_memory  # noqa: E402
import limits  # noqa: E402

import rloo  # noqa: E402

COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
COMMON |= {"initializer_range": 0.2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0}
TINY = {
    "grouped-query": transformers.LlamaConfig(**COMMON, num_key_value_heads=2, tie_word_embeddings=False),
    "multi-head": transformers.GPTNeoXConfig(**COMMON),
}


def llama(kind, layers, width, feed_forward, heads, key_heads, vocabulary):
    """A configuration with tied embeddings, of the family of Llama or Qwen2."""
    return kind(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


def pythia(layers, width, heads):
    return transformers.GPTNeoXConfig(
        vocab_size=50_304,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )


SHAPES = {
    "Qwen2.5-0.5B": llama(transformers.Qwen2Config, 24, 896, 4864, 14, 2, 151_936),
    "pythia-410m": pythia(24, 1024, 16),
    "pythia-1b": pythia(16, 2048, 8),
    "Llama-3.2-1B": llama(transformers.LlamaConfig, 16, 2048, 8192, 32, 8, 128_256),
}
TIMED_SIZES = 256, 128, 16, 8  # P, R, B, k
TIMED = {name: SHAPES[name] for name in ("Qwen2.5-0.5B", "pythia-1b", "Llama-3.2-1B")}
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.03}  # of relative errors of log-probs and gradients
STOPS = [7, 8, 9, 10, 11, 12]  # of 64 tokens
Line = tuple[str, float | str, float | None]  # what, its value, and the largest that passes; None: none does fail


def random_model(config, device, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def random_rows(B, longest, vocabulary=64, shortest=None) -> list[dict]:
    """Rows with prompts of `shortest` (default: a third) to `longest` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(shortest or longest // 3, longest, B).long().tolist()
    prompts = [torch.randint(13, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return [{"prompt_ids": ids, "prompt_text": "", "prompt": "", "columns": {}} for ids in prompts]


def flags(device, **changes) -> rloo.Args:
    """Flags for `update` and `improve` without files."""
    given = {"device": str(device), "dtype": "float32", "sft_model_path": "none", "dataset_name": "none"}
    return rloo.resolve_args(rloo.Args(**(given | {"output_dir": "none", "learning_rate": 1e-6} | changes)))


def gradient(parameter):
    """Its gradient, 0 if it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def quietly(args: rloo.Args) -> dict:
    """A run that prints nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return rloo.main(args)


def relative(x, expected) -> float:
    x, expected = x.detach().double().cpu(), expected.detach().double().cpu()
    return float((x - expected).norm() / expected.norm())


# ---- Right -----------------------------------------------------------------------------------------------------------


def by_transformers(model, batch):
    """Log-probs (k, B, R) by the model's own forward pass of each prompt and completion alone: no padding, no mask."""
    out = torch.zeros(batch.responses.shape, device=model.device)
    for j, lane in enumerate(batch.responses):
        for b, row in enumerate(batch.rows):
            n, m = len(row["prompt_ids"]), int(batch.response_mask[j, b].sum())
            ids = torch.cat([torch.tensor(row["prompt_ids"], device=model.device), lane[b, :m]])
            logprobs = (model(ids[None]).logits[0, n - 1 : -1].float() / 0.7).log_softmax(-1)
            out[j, b, :m] = logprobs.gather(1, ids[n:, None])[:, 0]
    return out


def log_probs_and_gradients(device) -> Iterator[Line]:
    """Of group rows and plain rows, padded, against separate sequences on the CPU."""
    for family, config in TINY.items():
        expected_model = random_model(config, "cpu")
        responses = torch.randint(0, 64, (4, 3, 9), generator=torch.Generator().manual_seed(1))
        batch = rloo.make_batch(random_rows(3, 12), responses, STOPS)
        expected = by_transformers(expected_model, batch)
        (expected * torch.linspace(-1, 1, 9)).sum().backward()
        for dtype, limit in LIMITS.items():
            for layout in ("group", "plain"):
                model = random_model(config, "cpu").to(device)  # the same weights as the CPU's
                on_device = rloo.make_batch(batch.rows, responses.to(device), STOPS)
                with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
                    found, _ = rloo.completion_logprobs(model, on_device, 0.7, layout)
                (found * torch.linspace(-1, 1, 9, device=device)).sum().backward()
                label = f"{layout} rows, {family}, {str(dtype)[6:]}"
                yield f"log-probs: {label}", relative(found, expected), limit
                pairs = zip(model.parameters(), expected_model.parameters(), strict=True)
                yield f"gradients: {label}", max(relative(gradient(x), gradient(y)) for x, y in pairs), 5 * limit


def decoding(device) -> Iterator[Line]:
    """The decoder's tokens and log-probs, as CUDA graphs and as single steps."""
    rows = random_rows(4, 12)
    ids, mask = (x.to(device) for x in rloo.pad([row["prompt_ids"] for row in rows], left=True))
    for family, config in TINY.items():
        model = random_model(config, device)
        torch.manual_seed(0)
        batch, logprobs = rloo.rollout(model, rows, 4, 0.7, 16, STOPS)
        expected = by_transformers(model, batch)
        yield f"decoding: log-probs of samples, {family}", relative(logprobs, expected), LIMITS[torch.float32]

        greedy, _ = rloo.rollout(model, rows, 1, 0.0, 16, STOPS)
        by_generate, _ = rloo.rollout(model, rows, 1, 0.0, 16, STOPS, engine="hf")
        different = (greedy.responses != by_generate.responses).double().mean()
        yield f"decoding: greedy tokens unlike generate's, {family}", float(different), 0.0

        decoder = rloo.Decoder(model, *ids.shape, 4, 16, 0.7, [-1])
        if ids.is_cpu:
            decoder.graph = types.SimpleNamespace(replay=partial(static_step, decoder))
        yield f"graph replay: steps that are not a CUDA graph, {family}", float(decoder.graph is None), 0.0
        found = []
        for graph in (decoder.graph, None):
            decoder.graph = graph
            torch.manual_seed(0)
            decoder.generate(ids, mask)
            found.append(decoder.tokens.clone())
        yield f"graph replay: tokens unlike single steps', {family}", float((found[0] != found[1]).double().mean()), 0.0


def static_step(decoder: rloo.Decoder):
    """What a graph does, on a CPU: a step over all slots of a lane."""
    decoder.lane_cache.length = decoder.lane_cache.R
    decoder.step()


def stop_tokens(device) -> Iterator[Line]:
    """Completions end with their first stop token, and are random between prompts and lanes."""
    batch, _ = rloo.rollout(random_model(TINY["multi-head"], device), random_rows(8, 12), 8, 1.0, 24, STOPS)
    wrong = 0
    for ids, real, ended in zip(*(x.flatten(0, 1).tolist() for x in batch[3:5]), batch.ended.flatten().tolist()):
        n = sum(real)
        inside = [token in STOPS for token in ids[:n]]
        wrong += any(inside[:-1]) or inside[-1] != ended or any(ids[n:]) or not (ended or n == len(ids))
    yield "stop tokens: completions that do not end at the first", wrong, 0
    yield "stop tokens: completions without one, of 64", float((~batch.ended).sum()), 60


def sampling(device) -> Iterator[Line]:
    """How often each token is sampled."""
    logits = torch.linspace(-2, 2, 16, device=device).expand(50_000, -1)
    torch.manual_seed(0)
    tokens, _ = rloo.sample(logits, 0.7, torch.rand(len(logits), 1, device=device))
    shares = tokens.bincount(minlength=16) / len(tokens)
    yield (
        "sampling: largest error of a token's share",
        float((shares - (logits[0] / 0.7).softmax(-1)).abs().max()),
        0.01,
    )


def one_update(device) -> Iterator[Line]:
    """The first step of an update has ratio 1; a policy learns which half of the tokens is rewarded."""
    args = flags(device, learning_rate=0.02, rloo_k=8, per_device_train_batch_size=64, kl_coef=0.0, temperature=1.0)
    policy = random_model(TINY["multi-head"], device)
    optimizer, _ = rloo.make_optimizer(args, policy, 1)
    optimizer.param_groups[0]["lr"] = args.learning_rate  # else 0: `main` sets it before each update
    reward = {"low": lambda batch: (batch.responses < 32).float().mean(-1)}
    options = {"response_length": 8, "stop_ids": [-1], "engine": "group", "chunk_size": 64}
    seen = []
    for _ in range(12):
        seen.append(rloo.update(args, policy, None, reward, optimizer, random_rows(8, 12), options, "group"))
    yield "update: ratio less 1 in its first step", max(abs(x["val/ratio"] - 1) for x in seen), 1e-6
    yield "update: rollout's log-probs less training's", max(x["val/rollout_logprob_gap"] for x in seen), 1e-3
    yield "update: share of tokens without reward after 12, about 0.5 before", 1 - seen[-1]["objective/scores"], 0.25


def resume(device) -> Iterator[Line]:
    """Two updates against one, a checkpoint and another one. With a large ε AdamW does not enlarge the rounding of
    gradients that are nearly 0, which on a GPU differs from run to run."""
    common = {"device": str(device), "dtype": "float32", "response_length": 8, "per_device_train_batch_size": 16}
    common |= {
        "num_eval_prompts": 1,
        "num_sample_generations": 0,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "adam_eps": 1e-3,
    }
    with tempfile.TemporaryDirectory() as folder:
        runs = {"whole": [(32, False)], "resumed": [(16, False), (32, True)]}
        for name, parts in runs.items():
            for episodes, again in parts:
                run = rloo.Args(**common, total_episodes=episodes, output_dir=f"{folder}/{name}", resume=again)
                quietly(run)
        x, y = (rloo.safetensors.torch.load_file(f"{folder}/{name}/model.safetensors") for name in ("resumed", "whole"))
        yield "resume: weights unlike an uninterrupted run's", max(relative(x[name], y[name]) for name in y), 1e-6


# ---- Used ------------------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts operations that compute or copy something: on a GPU each is a kernel or more."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view and "_unsafe_view" not in str(function) and "empty" not in str(function)
        return function(*args, **(kwargs or {}))


def decoder_of(config, device) -> rloo.Decoder:
    """A decoder in bfloat16 that has made a step."""
    decoder = rloo.Decoder(random_model(config, device, torch.bfloat16), 4, 64, 4, 16, 1.0, [-1])
    ids = torch.ones(4, 64, dtype=torch.long, device=device)
    decoder.read_prompts(ids, ids > 0)
    decoder.step()
    return decoder


@torch.no_grad()
def kernels(device) -> Iterator[Line]:
    """What a decode step launches, and whether it waits for the host."""
    for name, config in TIMED.items():
        decoder = decoder_of(config, "meta")  # tensors without values, on any machine
        with Operations() as operations:
            decoder.step()
        yield f"kernels: operations of a step, {name}", operations.count, 60 * (config.num_hidden_layers + 1)
        if torch.device(device).type == "cuda":
            decoder = decoder_of(config, device)
            yield f"kernels: steps that are not a CUDA graph, {name}", float(decoder.graph is None), 0
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                decoder.step()
                torch.cuda.synchronize()
            launched = [event for event in profile.events() if event.device_type.name == "CUDA"]
            yield f"kernels: launched by a step, {name}", len(launched), None


def attention_kernels(device) -> Iterator[Line]:
    """Which kernels attention uses in training: cuDNN's are wrong at some lengths."""
    if torch.device(device).type != "cuda":
        yield "attention: kernels", "needs a GPU", None
        return
    rloo.start_processes(torch.device(device))  # switches cuDNN's off
    model = random_model(SHAPES["Qwen2.5-0.5B"], device, torch.bfloat16)
    batch = rloo.make_batch(random_rows(2, 128), torch.ones(4, 2, 64, dtype=torch.long, device=device), [-1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        rloo.completion_logprobs(model, batch, 1.0, "group")[0].sum().backward()
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    if not names:
        yield "attention: kernels", "needs the profiler (CUPTI), which saw none", None
        return
    used = sorted(
        name for name in names if any(part in name.lower() for part in ("flash", "fmha", "attention", "cudnn"))
    )
    yield "attention: kernels", "; ".join(name[:60] for name in used), None
    yield "attention: kernels of cuDNN", sum("cudnn" in name.lower() for name in used), 0
    yield "attention: no fused kernel", float(not used), 0


# ---- Fast and memory -------------------------------------------------------------------------------------------------


def seconds_of(function: Callable, device) -> float:
    """Seconds of a call, after one that warms up."""
    function()
    begin = rloo.clock(torch.device(device))
    function()
    return rloo.clock(torch.device(device)) - begin


def speed(device) -> Iterator[Line]:
    """Decoding and the phases of an update, beside what the machine could do."""
    on_gpu = torch.device(device).type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    peak = limits.machine_rates(str(device), str(dtype)[6:])
    P, R, B, k = TIMED_SIZES if on_gpu else (12, 8, 2, 4)
    for name, config in (TIMED if on_gpu else TINY).items():
        policy = random_model(config, device)
        args = flags(device, dtype=str(dtype)[6:], rloo_k=k, per_device_train_batch_size=2 * k)
        args.gradient_accumulation_steps = B // 2
        rows = random_rows(B, P, config.vocab_size, shortest=P)
        prompts, responses = [P] * B, [[R] * B] * k
        with torch.no_grad():
            sampler = rloo.sampling_model(policy, dtype)
            sizes = limits.model_sizes(sampler)
            ids, mask = (x.to(device) for x in rloo.pad([row["prompt_ids"] for row in rows], left=True))
            decoder = rloo.Decoder(sampler, B, P, k, R, 1.0, [-1])
            seconds = seconds_of(partial(decoder.generate, ids, mask), device)
            least = limits.needed_bytes(sizes, dtype.itemsize, prompts, responses) / peak["bytes_per_s"]
            yield f"decoding: ms of a step, {name}", 1e3 * seconds / R, None
            yield f"decoding: least ms of a step, {name}", 1e3 * least / R, None
            yield f"decoding: tokens per second, {name}", B * k * R / seconds, None
            other = seconds_of(partial(rloo.generate, sampler, [(ids, mask)], k, 1.0, R, [-1]), device)
            yield f"decoding: tokens per second by generate, {name}", B * k * R / other, None
            del decoder, sampler
        reference = random_model(config, device, dtype)
        optimizer, _ = rloo.make_optimizer(args, policy, 1)
        reward = {"length": lambda batch: batch.responses.float().mean(-1)}
        options = {"response_length": R, "stop_ids": [-1], "engine": "group", "chunk_size": B * k}
        for _ in range(2):
            metrics = rloo.update(args, policy, reference, reward, optimizer, rows, options, "group")
        flops = limits.needed_flops(sizes, prompts, responses)
        for phase, work in (("rollout", "decode"), ("reference", "reference"), ("train", "training")):
            yield f"update: seconds of {phase}, {name}", metrics[f"time/{phase}"], None
            yield f"update: least seconds of {phase}, {name}", flops[work] / peak["flop_per_s"], None
        del policy, reference, optimizer


def vllm(device) -> Iterator[Line]:
    """Tokens per second of vLLM, for a model and the prompts of `speed`."""
    if importlib.util.find_spec("vllm") is None:
        yield "vLLM: tokens per second", "needs vLLM, which is not installed", None
        return
    if torch.device(device).type != "cuda":
        yield "vLLM: tokens per second", "needs a GPU", None
        return
    torch.cuda.empty_cache()  # for vLLM's own process
    name = "Qwen2.5-0.5B"
    yield f"vLLM: tokens per second, {name}", vllm_tokens_per_second(SHAPES[name], *TIMED_SIZES), None


def vllm_tokens_per_second(config, P, R, B, k) -> float:
    """Of k completions of R tokens for each of B prompts, by vLLM in a process of its own."""
    prompts = [row["prompt_ids"] for row in random_rows(B, P, config.vocab_size, shortest=P)] * k
    with tempfile.TemporaryDirectory() as folder:
        random_model(config, "cpu", torch.bfloat16).save_pretrained(folder)
        Path(folder, "prompts.json").write_text(json.dumps(prompts))
        start = [sys.executable, __file__, "--worker", f"vllm:{R}:{folder}"]
        done = subprocess.run(start, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(first_error(done.stderr))
    return B * k * R / float(done.stdout.split()[-1])


def vllm_worker(R: int, folder: str):
    """What vLLM's process does: prints the seconds that it takes, after a call that warms up."""
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in json.loads(Path(folder, "prompts.json").read_text())]
    options = SamplingParams(temperature=0.0, max_tokens=R, ignore_eos=True, detokenize=False)
    llm = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.6)
    for _ in range(2):
        llm.reset_prefix_cache()  # else it would know the prompts
        begin = time.perf_counter()
        found = llm.generate(prompts, options, use_tqdm=False)
        seconds = time.perf_counter() - begin
    assert {len(x.outputs[0].token_ids) for x in found} == {R}
    print(seconds)


def first_error(text: str) -> str:
    """The first line of a process's stderr that names an error, then all of it."""
    named = [line for line in text.splitlines() if "Error: " in line]
    return "\n".join([*named[:1], text])


def memory(device) -> Iterator[Line]:
    """Peak memory of an update beside the formulas of gpu_memory.py."""
    if torch.device(device).type != "cuda":
        yield "measured beside the formulas", "needs a GPU", None
        return
    total = torch.cuda.get_device_properties(device).total_memory
    for run in gpu_memory.RUNS[:3]:
        need = gpu_memory.needed(run)
        expected = max(need["training"], need["rollout"])
        if expected > 0.9 * total:
            yield run.name, "does not fit this GPU", None
            continue
        measured = peak_of_updates(run, SHAPES[run.name.partition(",")[0]], device)
        expected -= gpu_memory.CONTEXT  # which torch does not count
        yield f"GiB, {run.name}", measured / 2**30, None
        yield f"GiB by the formula, {run.name}", expected / 2**30, None
        yield f"formula too low by, {run.name}", measured / expected - 1, 0.1


def peak_of_updates(run: gpu_memory.Run, config, device) -> int:
    """Bytes that two updates of a run take at most; from the first one on AdamW has its state."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    batch = max(run.micro_batch, run.chunk)
    args = flags(device, dtype="bfloat16", rloo_k=run.k, per_device_train_batch_size=run.micro_batch)
    args.gradient_accumulation_steps = batch // run.micro_batch
    policy, reference = (random_model(config, device, dtype) for dtype in (torch.float32, torch.bfloat16))
    reward_model = torch.empty(int(run.model.beside), dtype=torch.bfloat16, device=device)
    optimizer, _ = rloo.make_optimizer(args, policy, 1)
    rows = random_rows(batch // run.k, run.P, config.vocab_size, shortest=run.P)
    options = {"response_length": run.R, "stop_ids": [-1], "engine": "group", "chunk_size": run.chunk}
    reward = {"length": lambda batch: batch.responses.float().mean(-1)}
    for _ in range(2):
        rloo.update(args, policy, reference, reward, optimizer, rows, options, "group")
    del reward_model
    return torch.cuda.max_memory_allocated(device) - before


# ---- Several, and learns ---------------------------------------------------------------------------------------------


def several(device) -> Iterator[Line]:
    """A step of plain gradient descent by two processes, against one."""
    kind = torch.device(device).type
    if kind == "cuda" and torch.cuda.device_count() < 2:
        yield "two processes against one", "needs two GPUs", None
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, count in {"one": 1, "ddp": 2, "fsdp": 2}.items():
            start = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={count}", "--rdzv-backend=c10d"]
            start += ["--rdzv-endpoint=localhost:0", __file__, "--device", kind, "--worker", f"{folder}/{name}"]
            done = subprocess.run(start, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise RuntimeError(f"{name}: {first_error(done.stderr)}")
        weights = {name: torch.load(f"{folder}/{name}") for name in ("one", "ddp", "fsdp")}
    for name in ("ddp", "fsdp"):
        errors = [relative(weights[name][x], weights["one"][x]) for x in weights["one"]]
        yield f"weights by {name}, after a step, unlike one process's", max(errors), 1e-5


def worker(kind: str, path: str):
    """What a process of `several` does: saves the weights after a step on its part of the prompts."""
    sharding = "fsdp" if path.endswith("fsdp") else "ddp"
    args = flags(kind, sft_model_path=str(rloo.MINI_TLDR / "sft"), sharding=sharding, per_device_train_batch_size=16)
    rank, world = rloo.start_processes(torch.device(args.device))
    policy = rloo.load_policy(args)
    generator = torch.Generator().manual_seed(0)
    responses = torch.randint(13, 64, (4, 4, 8), generator=generator)
    advantages = torch.randn(4, 4, 1, generator=generator)
    part = slice(rank, None, world)
    device = torch.device(args.device)
    batch = rloo.make_batch(random_rows(4, 12)[part], responses[:, part].to(device), [-1])
    zeros = torch.zeros(batch.responses.shape, device=device)
    scored, weight = torch.ones_like(batch.ended), torch.ones(*zeros.shape[:2], 1, device=device)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    args.per_device_train_batch_size = 16 // world
    given = (batch, zeros, zeros, zeros, advantages[:, part].to(device), scored, weight)
    rloo.improve(args, policy, optimizer, "group", *given)
    weights = rloo.state_dict.get_model_state_dict(policy, options=rloo.FULL)
    if rank == 0:
        torch.save(weights, path)


def learns(device) -> Iterator[Line]:
    """The bundled task: from a win rate of 0.38 to about 0.64 with one sample."""
    if torch.device(device).type != "cuda":
        yield "the bundled task", "needs a GPU", None
        return
    with tempfile.TemporaryDirectory() as folder:
        after = quietly(rloo.Args(device=str(device), output_dir=f"{folder}/run"))["after"]
    yield "share of comparisons lost after training, about 0.36", 1 - after["sampled/judge_win_rate"], 0.42


SECTIONS: dict[str, list[Callable]] = {
    "right": [log_probs_and_gradients, decoding, stop_tokens, sampling, one_update, resume],
    "used": [kernels, attention_kernels],
    "fast": [speed, vllm],
    "memory": [memory],
    "several": [several],
    "learns": [learns],
}


# ---- The report ------------------------------------------------------------------------------------------------------


def lines_of(check: Callable, device) -> Iterator[dict]:
    """The lines of a check. An error fails a line with the check's name; too little memory only skips it where the
    check is about speed or memory."""
    try:
        for what, value, limit in check(device):
            verdict = "INFO" if limit is None else "PASS" if value <= limit else "FAIL"  # NaN fails
            if isinstance(value, str) and value.startswith(("needs", "does not fit")):
                verdict = "SKIP"
            yield {"verdict": verdict, "what": what, "value": value, "limit": limit}
    except Exception as error:
        skipped = isinstance(error, torch.OutOfMemoryError) and check in (speed, memory)
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: {str(error)[:300]}"
        line = {"verdict": "SKIP" if skipped else "FAIL", "what": check.__name__, "value": " ".join(said.split())}
        yield line | {"limit": None, "trace": traceback.format_exc()}


def about(device) -> dict:
    """What was checked, and on what."""
    git = partial(subprocess.run, capture_output=True, text=True, cwd=ROOT)
    found = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    found |= {"transformers": transformers.__version__, "python": platform.python_version()}
    found["commit"] = git(["git", "rev-parse", "HEAD"]).stdout.strip()
    if torch.device(device).type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        driver = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError):  # some containers have no nvidia-smi
            found["driver"] = subprocess.run(driver, capture_output=True, text=True).stdout.split("\n")[0]
    return found


@dataclass
class Args:
    """Checks rloo.py on this machine's device."""

    device: str | None = None
    """cpu, cuda, ...; default: cuda if available"""
    only: tuple[str, ...] = tuple(SECTIONS)
    """sections to run"""
    output: str = "gpu-check.json"
    """where the lines are written"""
    worker: str | None = None
    """internal: what a process of `several` or `vllm` does"""


def main(args: Args) -> int:
    """Runs the checks; returns how many lines failed."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda":
        rloo.start_processes(torch.device(device, 0) if device == "cuda" else torch.device(device))
    begin, lines = time.time(), []
    print(" ".join(f"{name} {value}" for name, value in about(device).items()))
    for section in args.only:
        for check in SECTIONS[section]:
            for line in lines_of(check, device):
                lines.append({"section": section, **line})
                value = line["value"] if isinstance(line["value"], str) else f"{line['value']:.4g}"
                limit = "" if line["limit"] is None else f" (at most {line['limit']:g})"
                print(f"{line['verdict']} {section}: {line['what']}: {value}{limit}", flush=True)
    failed = [line["what"] for line in lines if line["verdict"] == "FAIL"]
    found = {"about": about(device), "seconds": time.time() - begin, "failed": len(failed), "lines": lines}
    Path(args.output).write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{len(failed)} of {len(lines)} lines failed, in {time.time() - begin:.0f} s; all are in {args.output}")
    for what in failed:
        print(f"  {what}")
    return len(failed)


if __name__ == "__main__":
    given = tyro.cli(Args, use_underscores=True)
    if given.worker and given.worker.startswith("vllm:"):
        _, length, folder = given.worker.split(":", 2)
        vllm_worker(int(length), folder)
        sys.exit()
    if given.worker:
        worker(given.device or "cuda", given.worker)
        os._exit(0)  # without waiting for other processes' groups
    transformers.logging.set_verbosity_error()
    sys.exit(main(given) > 0)
