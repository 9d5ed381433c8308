"""Is rloo.py right on your device, and for your model?

    python benchmark/gpu/check.py                            # on a GPU, else on the CPU: tiny models, then short runs
    python benchmark/gpu/check.py --sft_model_path MODEL     # a folder or Hub id: may it run with --layout group?

With a model of yours it takes the flags of rloo.py, such as --dtype, --max_prompt_length, --response_length, --rloo_k,
and tries both layouts at these sizes. Prints PASS, FAIL, SKIP or a number (INFO) for each line, and ends with status 1
if a line has failed. Without --sft_model_path nothing is downloaded.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import transformers
import tyro

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]
import common  # noqa: E402

import rloo  # noqa: E402

COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON |= {"intermediate_size": 64, "initializer_range": 0.2, "max_position_embeddings": 256}
TINY = {
    "grouped-query": transformers.LlamaConfig(**COMMON, num_key_value_heads=2, tie_word_embeddings=False),
    "multi-head": transformers.GPTNeoXConfig(**COMMON),
}
RELATIVE = {"float32": 1e-3, "bfloat16": 0.1}  # the largest relative errors that pass
NATS = {"float32": 0.01, "bfloat16": 0.2}  # of a token's log-prob; a run with more ends
EXTENSIONS = ROOT / "benchmark" / "extensions"
NEEDS = {"maxrl": "needs rewards of 0 and 1", "turns": "needs a tool", "vllm_rollout": "needs vLLM"}
Line = tuple[str, float | str, float | None]  # what, its value, and the largest that passes; None: none does fail


def relative(x, expected) -> float:
    return float((x.double() - expected.double()).norm() / expected.double().norm())


# ---- A model in both layouts -----------------------------------------------------------------------------------------


def random_model(config, args):
    """The same weights on each device."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(deepcopy(config)).to(args.device, args.torch_dtype).eval()


def random_batch(args, model, longest: int) -> rloo.Batch:
    """Three prompts, of full length, one token less and half, so that the second sees limits of attention and the third
    sees padding; and k completions of each, none of which ends."""
    k, T = args.rloo_k, args.response_length
    config = model.config.get_text_config()
    tokens = torch.randint(config.vocab_size - 1, (longest + 3 * k * T,), generator=torch.Generator().manual_seed(0))
    tokens += tokens >= (getattr(config, "pad_token_id", None) or 0)  # all but that one: its embedding may be 0
    prompts = [tokens[:n].tolist() for n in (longest, max(1, longest - 1), (longest + 1) // 2)]
    responses = tokens[longest:].view(k, 3, T).to(model.device)
    return rloo.make_batch([{"prompt_ids": ids} for ids in prompts], responses, stop_ids=[-1])


def both_layouts(args, name: str, model) -> Iterator[Line]:
    """What rloo.py computes before and after the last completions, which follow all others in a group row, against the
    model itself, for the prompt alone and with the completion; log-probs and gradients of group rows against those of
    plain rows; and the decoder."""
    longest = args.max_prompt_length
    batch = random_batch(args, model, longest)
    alone = []
    for example, completion in zip(batch.examples, batch.responses[-1].tolist()):
        rows = example["prompt_ids"], example["prompt_ids"] + completion
        with torch.no_grad():
            alone.append(torch.stack([model(torch.tensor([row], device=model.device)).logits[0, -1] for row in rows]))
    alone = torch.stack(alone)  # (3, 2, vocabulary)
    limit = RELATIVE[args.dtype]

    found = {}
    for layout in ("plain", "group"):
        rloo.choose_layout(replace(args, layout=layout), model, longest)
        with torch.no_grad():
            hidden = rloo.completion_hidden(model, batch)[-1][:, [0, -1]]  # (3, 2, H)
            logits = rloo.final_logits(model, hidden)
        for i, when in enumerate(("prompt", "completion")):
            what = f"{name}, {layout} rows: logits after the {when}, against the model alone"
            yield what, relative(logits[:, i], alone[:, i]), limit
        logprobs, _ = rloo.completion_logprobs(model, batch, args.temperature)
        (logprobs * torch.linspace(-1, 1, logprobs.shape[-1], device=logprobs.device)).sum().backward()
        gradients = {key: weight.grad.cpu() for key, weight in model.named_parameters() if weight.grad is not None}
        model.zero_grad()
        found[layout] = {"log-probs": logprobs.detach()} | gradients
    errors = {key: relative(found["group"].get(key, 0 * x), x) for key, x in found["plain"].items()}
    yield f"{name}: log-probs, group rows against plain rows", errors.pop("log-probs"), limit
    worst = max(errors, key=errors.get)
    yield f"{name}: gradients, group rows against plain rows ({worst})", errors[worst], 2 * limit
    yield from decoder(args, name, model, batch)


@torch.no_grad()
def decoder(args, name: str, model, batch: rloo.Batch) -> Iterator[Line]:
    """Log-probs of samples against a forward pass, and on a GPU its CUDA graphs against single steps. Completions are
    long enough for the cache to double, and one token in 64 ends them, so that lanes leave it."""
    T = max(args.response_length, rloo.FIRST_SLOTS + 16)
    stop_ids = [*range(0, model.config.get_text_config().vocab_size, 64)]

    def decoded(**how):
        torch.manual_seed(0)
        with mock.patch.object(rloo, "cuda_graph", **how) as capture:
            prompts = batch.prompt_ids, batch.prompt_mask
            tokens, logprobs = rloo.decode(model, *prompts, args.rloo_k, T, args.temperature, stop_ids)
        return rloo.make_batch(batch.examples, tokens, stop_ids), logprobs, capture.call_count

    sampled, logprobs, captures = decoded(wraps=rloo.cuda_graph)
    expected, _ = rloo.completion_logprobs(model, sampled, args.temperature)
    differences = (logprobs - expected)[sampled.response_mask].abs()
    yield (
        f"{name}: decoder's log-probs less a forward pass's, nats per token",
        float(differences.mean()),
        NATS[args.dtype],
    )
    if model.device.type != "cuda":
        yield f"{name}: CUDA graphs", "need a GPU", None
        return
    yield f"{name}: no step is a CUDA graph", float(not captures), 0.0
    by_steps, _, _ = decoded(side_effect=lambda step: step)
    different = (sampled.responses != by_steps.responses)[sampled.response_mask].double().mean()
    yield (
        f"{name}: tokens of CUDA graphs unlike single steps'",
        float(different),
        0.0 if args.dtype == "float32" else None,
    )


# ---- Samples and runs ------------------------------------------------------------------------------------------------


def sampling(args) -> Iterator[Line]:
    """How often each token is sampled."""
    logits = torch.linspace(-2, 2, 16, device=args.device).expand(50_000, -1)
    torch.manual_seed(0)
    tokens, _ = rloo.sample(logits, 0.7, torch.rand(len(logits), 1, device=args.device))
    errors = tokens.bincount(minlength=16) / len(tokens) - (logits[0] / 0.7).softmax(-1)
    yield "sampling: largest error of a token's share", float(errors.abs().max()), 0.01


def commands() -> dict[str, list]:
    """Name -> how it is started: rloo.py, each extension that is a program, and two processes."""
    found = {"rloo.py": [ROOT / "rloo.py"]}
    for file in sorted(EXTENSIONS.glob("*.py")):
        if "\n    rloo.command_line()" in file.read_text() and file.stem != "fsdp":
            found[file.stem] = [file]
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--nproc_per_node=2",
    ]
    for file in (ROOT / "rloo.py", EXTENSIONS / "fsdp.py"):
        found[f"two processes, {file.stem}"] = [*torchrun, file]
    return found


def runs(args) -> Iterator[Line]:
    """Two updates of the bundled model by each. What samples must have the weights that are trained: with LoRA those
    with the adapters, with FSDP those of all shards."""
    kind = torch.device(args.device).type
    flags = {"device": kind, "dtype": args.dtype, "response_length": 8, "num_eval_prompts": 2}
    flags |= {"per_device_train_batch_size": 16, "num_sample_generations": 0, "learning_rate": 1e-2}
    flags |= {"sft_model_path": rloo.MINI_TLDR / "sft", "reward_model_path": rloo.MINI_TLDR / "reward"}
    flags |= {"dataset_name": rloo.MINI_TLDR / "validation.jsonl"}

    def gap_of(out: Path, name: str, start: list) -> float | str:
        several = name.startswith("two processes")
        if name in NEEDS:
            return NEEDS[name]
        if several and kind == "cuda" and torch.cuda.device_count() < 2:
            return "needs two GPUs"
        words = [f"--{flag}={value}" for flag, value in flags.items()]
        words += [f"--total_episodes={64 if several else 32}", f"--output_dir={out}"]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *start, *words], capture_output=True, text=True, cwd=ROOT, env=one_thread
        )
        if done.returncode:
            return f"ended with an error: {done.stderr[-2000:]}"
        return max(json.loads(line)["val/rollout_logprob_gap"] for line in (out / "metrics.jsonl").open())

    starts = commands()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, os.cpu_count() // 2)) as pool:
        outs = [Path(folder, name) for name in starts]
        for name, gap in zip(starts, pool.map(gap_of, outs, starts, starts.values())):
            yield f"{name}: log-probs at sampling less training's", gap, NATS[args.dtype]


def learns(args) -> Iterator[Line]:
    """The bundled task: from a win rate of 0.37 to about 0.64 with one sample."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "rloo.py", f"--device={args.device}", f"--output_dir={folder}/run"]
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        last = json.loads(Path(folder, "run", "evaluations.jsonl").read_text().splitlines()[-1])
    yield "share of comparisons lost after training, about 0.36", 1 - last["sampled/gold_win_rate"], 0.42


# ---- The report ------------------------------------------------------------------------------------------------------


def checks(args, bundled: bool) -> Iterator[Iterator[Line]]:
    if not bundled:
        model = rloo.read_model(args, args.sft_model_path, args.torch_dtype).requires_grad_(True)
        known = model.config.model_type in rloo.GROUP_MODELS
        yield iter([(f"{model.config.model_type}: by default in {'group' if known else 'plain'} rows", 0.0, None)])
        yield both_layouts(args, type(model).__name__, model)
        return
    sizes = {"rloo_k": 8, "max_prompt_length": 12, "response_length": 9}
    for dtype in NATS:
        own = replace(args, dtype=dtype, **sizes)
        for name, config in TINY.items():
            yield both_layouts(own, f"{name}, {dtype}", random_model(config, own))
    yield sampling(args)
    yield runs(replace(args, dtype="bfloat16"))
    if args.device != "cpu":
        yield learns(args)


def lines_of(check: Iterator[Line]) -> Iterator[tuple[str, str]]:
    """The verdict and the text of each line of a check. An error fails a line."""
    try:
        for what, value, limit in check:
            if isinstance(value, str):
                yield ("FAIL" if value.startswith("ended") else "SKIP"), f"{what}: {value}"
            elif limit is None:
                yield "INFO", f"{what}: {value:.4g}"
            else:
                yield ("PASS" if value <= limit else "FAIL"), f"{what}: {value:.4g} (at most {limit:g})"  # NaN fails
    except Exception:
        yield "FAIL", traceback.format_exc()


def main(args: rloo.Args) -> int:
    """Runs the checks; returns how many lines failed."""
    bundled = args.sft_model_path is None
    args = rloo.resolve_args(args)
    device = torch.device(args.device)
    rloo.start_processes(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    commit = common.provenance()["rloo.py"]
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, rloo.py of commit {commit}")
    failed = []
    for check in checks(args, bundled):
        for verdict, text in lines_of(check):
            print(verdict, text, flush=True)
            if verdict == "FAIL":
                failed.append(text.splitlines()[0])
    print("\n".join([f"\n{len(failed)} lines failed", *failed]))
    return len(failed)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    sys.exit(main(tyro.cli(rloo.Args, use_underscores=True)) > 0)
