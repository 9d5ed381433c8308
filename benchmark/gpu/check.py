"""Checks rloo.py and its extensions on the device that you have: are results right, what do they need, how fast is it?

    python benchmark/gpu/check.py                 # on a GPU: ten minutes; without one as the next
    python benchmark/gpu/check.py --device cpu    # tiny models, under two minutes

Prints PASS, FAIL, SKIP or a number (INFO) for each line, and ends with status 1 if a line has failed. Models have
random weights or are those of the bundled task, so nothing is downloaded.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import math
import platform
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import transformers
import tyro
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
import gpu_memory  # noqa: E402

import rloo  # noqa: E402

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON |= {"intermediate_size": 64, "initializer_range": 0.2, "max_position_embeddings": 256}
COMMON |= {"bos_token_id": 0, "eos_token_id": 0}
TINY = {
    "grouped-query": transformers.LlamaConfig(**COMMON, num_key_value_heads=2, tie_word_embeddings=False),
    "multi-head": transformers.GPTNeoXConfig(**COMMON),
}
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.03}  # of relative errors of log-probs
STOPS = [7, 8, 9, 10, 11, 12]  # of 64 tokens
Line = tuple[str, float | str, float | None]  # what, its value, and the largest that passes; None: none does fail


def config_of(model: gpu_memory.Model):
    """The configuration of a model of gpu_memory.py. Its heads have 64 dimensions, which memory does not depend on."""
    sizes = {"vocab_size": model.vocabulary, "hidden_size": model.width, "num_hidden_layers": model.layers}
    sizes |= {"intermediate_size": model.feed_forward, "num_attention_heads": model.width // 64}
    if model.family == "GPT-NeoX":
        return transformers.GPTNeoXConfig(**sizes)
    heads = {"num_key_value_heads": model.key_width // 64, "tie_word_embeddings": True}
    return transformers.Qwen2Config(**sizes, **heads)


def random_model(config, device, dtype=torch.float32):
    """A model that runs group rows."""
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.layout = "group"
    model.set_attn_implementation(rloo.GROUP_KERNEL)
    return model


def random_examples(B, longest, vocabulary=64, shortest=None) -> list[dict]:
    """Examples with prompts of `shortest` (default: a third) to `longest` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(shortest or longest // 3, longest, B).long().tolist()
    prompts = [torch.randint(13, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return [{"prompt_ids": ids} for ids in prompts]


def flags(device, **changes) -> rloo.Args:
    """Flags for parts of rloo.py without files."""
    given = {"device": str(device), "dtype": "float32", "sft_model_path": "none", "dataset_name": "none"}
    return rloo.resolve_args(rloo.Args(**(given | {"output_dir": "none"} | changes)))


def sample(args, model, examples, k=4, temperature=0.7, stop_ids=STOPS):
    """A Batch of completions and, in group rows, their log-probs."""
    torch.manual_seed(0)
    return rloo.rollout(args, model, examples, k, temperature, stop_ids)


def update(args, policy, sampler, reference, reward_functions, optimizer, examples) -> dict[str, float]:
    """The metrics of an update of rloo.py in which no completion ends early."""
    experience = rloo.collect(args, policy, sampler, reference, reward_functions, examples, stop_ids=[-1])
    improved = rloo.improve(args, policy, optimizer, experience)
    rloo.update_sampler(sampler, policy)
    return rloo.metrics_of(args, experience, improved)


def quietly(args: rloo.Args) -> list[dict]:
    """The evaluations of a run that prints nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return rloo.main(args)


def words_of(flags: dict) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def relative(x, expected) -> float:
    x, expected = x.detach().double().cpu(), expected.detach().double().cpu()
    return float((x - expected).norm() / expected.norm())


def apart(folder: str, name: str) -> float:
    """The largest relative difference between the weights of two runs, `name` and `whole`."""
    x, y = (load_file(f"{folder}/{run}/model.safetensors") for run in (name, "whole"))
    return max(relative(x[weight], y[weight]) for weight in y)


# ---- Right -----------------------------------------------------------------------------------------------------------


def by_transformers(model, batch):
    """Log-probs (k, B, T) by the model's own forward pass of each prompt and completion alone: no padding, no mask."""
    out = torch.zeros(batch.responses.shape, device=model.device)
    for j, lane in enumerate(batch.responses):
        for b, example in enumerate(batch.examples):
            n, m = len(example["prompt_ids"]), int(batch.response_mask[j, b].sum())
            ids = torch.cat([torch.tensor(example["prompt_ids"], device=model.device), lane[b, :m]])
            logprobs = (model(ids[None]).logits[0, n - 1 : -1].float() / 0.7).log_softmax(-1)
            out[j, b, :m] = logprobs.gather(1, ids[n:, None])[:, 0]
    return out


def log_probs_and_gradients(device) -> Iterator[Line]:
    """Of group rows and plain rows, padded, against separate sequences on the CPU."""
    for family, config in TINY.items():
        expected_model = random_model(config, "cpu")
        responses = torch.randint(0, 64, (4, 3, 9), generator=torch.Generator().manual_seed(1))
        batch = rloo.make_batch(random_examples(3, 12), responses, STOPS)
        expected = by_transformers(expected_model, batch)
        (expected * torch.linspace(-1, 1, 9)).sum().backward()
        for dtype, limit in LIMITS.items():
            for layout in ("group", "plain"):
                model = random_model(config, "cpu").to(device)  # the same weights as the CPU's
                model.layout = layout
                on_device = rloo.make_batch(batch.examples, responses.to(device), STOPS)
                with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
                    found, _ = rloo.completion_logprobs(model, on_device, 0.7)
                (found * torch.linspace(-1, 1, 9, device=device)).sum().backward()
                label = f"{layout} rows, {family}, {str(dtype)[6:]}"
                yield f"log-probs: {label}", relative(found, expected), limit
                pairs = zip(model.parameters(), expected_model.parameters(), strict=True)
                errors = [math.inf if x.grad is None else relative(x.grad, y.grad) for x, y in pairs]
                yield f"gradients: {label}", max(errors), 5 * limit


def decoding(device) -> Iterator[Line]:
    """The decoder's tokens and log-probs, by CUDA graphs and by single steps. Completions are long enough for the cache
    to double twice, and few tokens stop them, so that lanes leave each time and others go on."""
    args = flags(device, response_length=140)
    examples = random_examples(4, 12)
    captured = []

    def capture(step, original=rloo.cuda_graph):
        captured.append(step)
        return original(step)

    for family, config in TINY.items():
        model = random_model(config, device)
        with mock.patch.object(rloo, "cuda_graph", capture):
            batch, logprobs = sample(args, model, examples, k=8, stop_ids=STOPS[:1])
        yield f"decoding: log-probs of samples, {family}", relative(logprobs, by_transformers(model, batch)), 1e-4

        short = replace(args, response_length=16)
        greedy, _ = sample(short, model, examples, k=1, temperature=0.0)
        model.layout = "plain"
        by_generate, _ = sample(short, model, examples, k=1, temperature=0.0)
        model.layout = "group"
        different = (greedy.responses != by_generate.responses).double().mean()
        yield f"decoding: greedy tokens unlike generate's, {family}", float(different), 0.0

        if torch.device(device).type != "cuda":
            yield f"graph replay, {family}", "needs a GPU", None
            continue
        yield f"graph replay: no step is a CUDA graph, {family}", float(not captured), 0.0
        with mock.patch.object(rloo, "cuda_graph", lambda step: step):
            by_steps, _ = sample(args, model, examples, k=8, stop_ids=STOPS[:1])
        different = (batch.responses != by_steps.responses).double().mean()
        yield f"graph replay: tokens unlike single steps', {family}", float(different), 0.0


def stop_tokens(device) -> Iterator[Line]:
    """Completions end with their first stop token, and are random between prompts and lanes."""
    args = flags(device, response_length=24)
    batch, _ = sample(args, random_model(TINY["multi-head"], device), random_examples(8, 12), k=8, temperature=1.0)
    wrong = 0
    for ids, ended in zip(batch.completion_ids(), batch.ended.flatten().tolist(), strict=True):
        stops = [token in STOPS for token in ids]
        wrong += any(stops[:-1]) or stops[-1] != ended or not (ended or len(ids) == 24)
    yield "stop tokens: completions that do not end at the first", wrong, 0
    yield "stop tokens: completions without one, of 64", float((~batch.ended).sum()), 60


def sampling(device) -> Iterator[Line]:
    """How often each token is sampled."""
    logits = torch.linspace(-2, 2, 16, device=device).expand(50_000, -1)
    torch.manual_seed(0)
    tokens, _ = rloo.sample(logits, 0.7, torch.rand(len(logits), 1, device=device))
    errors = tokens.bincount(minlength=16) / len(tokens) - (logits[0] / 0.7).softmax(-1)
    yield "sampling: largest error of a token's share", float(errors.abs().max()), 0.01


def updates(device) -> Iterator[Line]:
    """The first step of an update has ratio 1; a policy learns which half of the tokens is rewarded."""
    args = flags(device, learning_rate=0.02, rloo_k=8, per_device_train_batch_size=64, kl_coef=0.0, temperature=1.0)
    args.response_length = 8
    policy = random_model(TINY["multi-head"], device)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, fused=True)
    reward_functions = {"low": lambda batch: (batch.responses < 32).float().mean(-1)}
    examples = random_examples(8, 12)
    seen = [update(args, policy, policy, None, reward_functions, optimizer, examples) for _ in range(12)]
    yield "update: ratio less 1 in its first step", max(abs(x["val/ratio"] - 1) for x in seen), 1e-6
    yield "update: rollout's log-probs less training's", max(x["val/rollout_logprob_gap"] for x in seen), 1e-3
    yield "update: share of tokens without reward after 12, about 0.5 before", 1 - seen[-1]["objective/scores"], 0.25


MINI = rloo.MINI_TLDR  # its 500 validation rows load faster than all
SMALL_RUN = {name: f"{MINI}/{kind}" for name, kind in (("sft_model_path", "sft"), ("reward_model_path", "reward"))}
SMALL_RUN |= {"dataset_name": f"{MINI}/validation.jsonl"}
SMALL_RUN |= {"dtype": "float32", "response_length": 8, "num_eval_prompts": 2, "num_sample_generations": 0}
# With a large ε AdamW does not enlarge the rounding of gradients that are nearly 0, which differs from run to run.
SMALL_RUN |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "adam_eps": 1e-3}


def resume(device) -> Iterator[Line]:
    """Two updates against one, a checkpoint and another one."""
    common = SMALL_RUN | {"device": str(device), "per_device_train_batch_size": 16}
    with tempfile.TemporaryDirectory() as folder:
        quietly(rloo.Args(**common, total_episodes=32, output_dir=f"{folder}/whole"))
        quietly(rloo.Args(**common, total_episodes=16, output_dir=f"{folder}/resumed"))
        quietly(rloo.Args(**common, total_episodes=32, output_dir=f"{folder}/resumed", resume=True))
        yield "resume: weights unlike an uninterrupted run's", apart(folder, "resumed"), 1e-6


# ---- Extensions, and several processes -------------------------------------------------------------------------------


def extension_names() -> list[str]:
    """Files of benchmark/extensions that replace functions, but fsdp.py, which takes several processes."""
    files = sorted((ROOT / "benchmark" / "extensions").glob("*.py"))
    return [file.stem for file in files if "\nSEAMS = " in file.read_text() and file.stem != "fsdp"]


def extensions(device) -> Iterator[Line]:
    """Two updates by each extension, in float32. Its sampler must have the weights that are trained: with LoRA, those
    with the adapters."""
    for name in extension_names():
        if name.startswith("vllm") and importlib.util.find_spec("vllm") is None:
            yield f"extension {name}", "vLLM is not installed", None
        else:
            limit = 1e-2 if name.startswith("vllm") else 1e-3
            yield f"extension {name}: rollout's log-probs less training's", gap_of_extension(name, device), limit


def even_length(completion_ids, **columns) -> list[float]:
    """A reward of 0 or 1, as maxrl.py needs it."""
    return [float(len(ids) % 2 == 0) for ids in completion_ids]


def gap_of_extension(name, device) -> float:
    seams = importlib.import_module(f"benchmark.extensions.{name}").SEAMS
    flags = SMALL_RUN | {"device": str(device), "per_device_train_batch_size": 16, "total_episodes": 32}
    flags |= {"learning_rate": 1e-2, "adam_eps": 1e-8}  # so that the second rollout shows which weights it has
    if name == "maxrl":
        flags |= {"kl_coef": 0.0, "reward_fns": f"{__file__}:even_length"}
        del flags["reward_model_path"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                rloo.command_line(words_of(flags | {"output_dir": f"{folder}/run"}), **seams)
        except SystemExit as error:
            raise RuntimeError(f"{name}: {error}") from error
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        return max(json.loads(line)["val/rollout_logprob_gap"] for line in lines)


def fixed_completions(args, model, examples, k, temperature, stop_ids):
    """A rollout whose completions depend on the prompt alone, so that one process and two train on the same."""
    tokens = []
    for example in examples:
        generator = torch.Generator().manual_seed(sum(example["prompt_ids"]))
        tokens.append(torch.randint(13, 64, (k, args.response_length), generator=generator))
    return rloo.make_batch(examples, torch.stack(tokens, dim=1).to(model.device), stop_ids), None


def several(device) -> Iterator[Line]:
    """The weights of a run of two updates by two processes, each with all weights or by fsdp.py, against one."""
    kind = torch.device(device).type
    if kind == "cuda" and torch.cuda.device_count() < 2:
        yield "two processes against one", "needs two GPUs", None
        return
    common = words_of(SMALL_RUN | {"device": kind, "total_episodes": 32})
    start = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    with tempfile.TemporaryDirectory() as folder:
        for name, count, seams in (("whole", 1, ""), ("ddp", 2, ""), ("fsdp", 2, ", **fsdp.SEAMS")):
            lines = [f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(HERE)!r}]", "import check, rloo"]
            lines += ["from benchmark.extensions import fsdp"] if seams else []
            lines += [f"rloo.command_line(rollout=check.fixed_completions{seams})"]
            script = Path(folder, f"run_{name}.py")
            script.write_text("\n".join(lines))
            command = [*start, f"--nproc_per_node={count}", script, *common, f"--output_dir={folder}/{name}"]
            command.append(f"--per_device_train_batch_size={16 // count}")
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr}")
        for name in ("ddp", "fsdp"):
            yield f"weights by {name} unlike one process's", apart(folder, name), 1e-5


# ---- What it learns, needs, and how fast it decodes ------------------------------------------------------------------


def learns(device) -> Iterator[Line]:
    """The bundled task: from a win rate of 0.37 to about 0.64 with one sample."""
    with tempfile.TemporaryDirectory() as folder:
        last = quietly(rloo.Args(device=str(device), output_dir=f"{folder}/run"))[-1]
    yield "share of comparisons lost after training, about 0.36", 1 - last["sampled/gold_win_rate"], 0.42


def memory(device) -> Iterator[Line]:
    """Peak memory of an update beside the formulas of gpu_memory.py."""
    total = torch.cuda.get_device_properties(device).total_memory
    for name, (model, run) in [*gpu_memory.RUNS.items()][:3]:
        need = gpu_memory.needed(model, run)
        expected = max(need["training"], need["rollout"])
        if expected > 0.9 * total:
            yield name, "does not fit this GPU", None
            continue
        expected -= gpu_memory.CONTEXT  # which torch does not count
        measured = peak_of_updates(run, config_of(model), device)
        yield f"GiB, {name}", measured / 2**30, None
        yield f"formula too low by, {name}", measured / expected - 1, 0.1


def peak_of_updates(run: gpu_memory.Args, config, device) -> int:
    """Bytes that two updates of a run take at most; from the first one on AdamW has its state."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    batch = max(run.m, run.chunk)
    sizes = {"rloo_k": run.k, "response_length": run.T, "local_rollout_forward_batch_size": run.chunk}
    sizes |= {"per_device_train_batch_size": run.m, "gradient_accumulation_steps": batch // run.m}
    args = flags(device, dtype="bfloat16", **sizes)
    dtypes = (torch.float32, torch.bfloat16, torch.bfloat16)
    policy, sampler, reference = (random_model(config, device, dtype) for dtype in dtypes)
    reward_model = torch.empty(int(run.reward_parameters), dtype=torch.bfloat16, device=device)
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, fused=True)
    examples = random_examples(batch // run.k, run.P, config.vocab_size, shortest=run.P)
    reward_functions = {"mean": lambda batch: batch.responses.float().mean(-1)}
    for _ in range(2):
        update(args, policy, sampler, reference, reward_functions, optimizer, examples)
    del reward_model
    return torch.cuda.max_memory_allocated(device) - before


def decode_rate(device) -> Iterator[Line]:
    """Tokens per second of both layouts, for a model of Qwen2.5-0.5B's size; plain rows have no log-probs yet."""
    on_gpu = torch.device(device).type == "cuda"
    P, T, B, k = (256, 128, 16, 8) if on_gpu else (12, 8, 2, 4)
    config = config_of(gpu_memory.QWEN_05B) if on_gpu else TINY["grouped-query"]
    model = random_model(config, device, torch.bfloat16 if on_gpu else torch.float32)
    examples = random_examples(B, P, config.vocab_size, shortest=P)
    args = flags(device, response_length=T, local_rollout_forward_batch_size=B * k)
    for layout in ("group", "plain"):
        model.layout = layout
        times = {}
        for _ in range(2):  # the first call warms up
            with rloo.timed(times, "rollout", torch.device(device)):
                rloo.rollout(args, model, examples, k, 1.0, stop_ids=[-1])
        yield f"tokens per second, --layout {layout}", B * k * T / times["time/rollout"], None


CHECKS = [log_probs_and_gradients, decoding, stop_tokens, sampling, updates, resume, extensions, several, decode_rate]
ON_A_GPU = [learns, memory]  # and only there


# ---- The report ------------------------------------------------------------------------------------------------------


def lines_of(check: Callable, device) -> Iterator[tuple[str, str]]:
    """The verdict and the text of each line of a check. An error fails a line with the check's name."""
    try:
        for what, value, limit in check(device):
            if isinstance(value, str):
                yield "SKIP", f"{what}: {value}"
            elif limit is None:
                yield "INFO", f"{what}: {value:.4g}"
            else:
                verdict = "PASS" if value <= limit else "FAIL"  # NaN fails
                yield verdict, f"{what}: {value:.4g} (at most {limit:g})"
    except Exception:
        yield "FAIL", f"{check.__name__}: {traceback.format_exc()}"


def main(device: str = "cuda:0" if torch.cuda.is_available() else "cpu") -> int:
    """Runs the checks; returns how many lines failed."""
    on_gpu = torch.device(device).type == "cuda"
    rloo.start_processes(torch.device(device))
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, rloo.py of commit {commit}")
    failed = []
    for check in CHECKS + ON_A_GPU if on_gpu else CHECKS:
        for verdict, text in lines_of(check, device):
            print(verdict, text, flush=True)
            if verdict == "FAIL":
                failed.append(text.splitlines()[0])
    print("\n".join([f"\n{len(failed)} lines failed", *failed]))
    return len(failed)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(tyro.cli(main) > 0)
