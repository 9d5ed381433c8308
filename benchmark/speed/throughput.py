"""Speed and memory of rloo.py's group layout against plain rows, `generate` of transformers, vLLM, TRL and the machine.

    python benchmark/speed/throughput.py                       # decoding, phases, updates: pythia-70m, TL;DR's lengths
    python benchmark/speed/throughput.py --vllm ../vllm-env/bin/python              # and vLLM: see vllm/README.md
    python benchmark/speed/throughput.py --trl trl0/bin/python --trl trl1/bin/python    # and TRL: see requirements.txt
    python benchmark/speed/throughput.py length                # forward + backward over the completions' length
    python benchmark/speed/throughput.py memory                # memory on one and on two processes, by --sharding
    python benchmark/speed/throughput.py draw FILE.json        # the picture of numbers that are there

A command's flags follow it (`length --help`). Models have random weights: nothing is downloaded. All completions have
--response_length tokens, unless --stop_share makes a set of stop tokens; then their lengths vary. What is compared
takes turns, A B C A B C ..., after a warm-up of each. A ratio is the median, over the rounds, of the ratio within a
round, so that a slow minute slows all of them; of seconds, or of seconds per real token (up to and including the stop)
where tokens are sampled, since every engine draws its own.

Without a command:

decode   k completions of each prompt, by weights in --dtype: by the group engine, by rloo.py's hf engine (`generate`,
         dynamic cache), by `generate` with the static cache, compiled on CUDA, and by vLLM. vLLM runs in a process of
         its own; its start and the sending of weights are not timed.
phases   reference log-probs and reward model without gradient, policy forward + backward: group and plain layout
updates  rloo.py in group layout and engine, in plain layout and hf engine, in group layout with vLLM as its engine (to
         which the new weights are sent in each update), and TRL's RLOOTrainer, each in a process of its own, without
         loading and first update

Peak memory: of decode and phases the tensors that the first call, the warm-up, holds beyond what is held before it,
counted by torch; of updates all that the process holds (on CUDA: all tensors). vLLM's is not counted.

The second table compares the work that no implementation can avoid (`needed_flops` and `needed_bytes` in limits.py)
with what the machine can do: its rates of matrix products and of reading memory are measured in the same rounds.

TRL's settings: same model folders, prompts, k, R, temperature, β, one epoch, one mini-batch, micro-batch, threads;
sdpa; float32, or bfloat16 autocast over float32 weights; fused AdamW; gradient checkpointing off (v1: on by default);
no logging, saving, evaluation or progress bar; no vLLM. A completion may end early there, because its stop token, eos,
comes by chance once per vocabulary. v1 generates and scores a whole update at once, with the dynamic cache, both its
defaults, unless --trl_static_cache. v0 has its reference and reward model in --dtype.

length   One prompt of 256 tokens with 8 completions, and one of 64 tokens with 2, where there is least to share; all
         completions have R tokens. Peak memory is of the tensors that the warm-up holds beyond weights and batch.

memory   Each line is a run of 2 updates of rloo.py by torchrun. Parameters, gradients and optimizer state are counted
         byte by byte at the second optimizer step. "peak" is the process's: torch's count on CUDA, else resident
         memory, which includes Python, libraries, reference, reward model and what loading needs.
"""

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Literal
from unittest import mock

import torch
import transformers
from limits import clock, machine_probe, model_sizes, work
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / "benchmark" / "vllm"
sys.path.insert(0, str(ROOT))  # rloo.py is imported where it is needed: TRL's environments cannot
TEMPERATURE, KL_COEF, LEARNING_RATE = 0.7, 0.05, 1e-6  # of every trainer
NEVER = 10**9  # a stop id that no token has
GPT_NEOX = {  # vocabulary, layers, width, heads, width of the MLP
    "tiny": (1024, 2, 128, 4, 256),
    "pythia-70m": (50304, 6, 512, 8, 2048),
    "pythia-160m": (50304, 12, 768, 12, 3072),
    "pythia-410m": (50304, 24, 1024, 16, 4096),
    "pythia-1b": (50304, 16, 2048, 8, 8192),
}
LLAMA = {  # the same, and key heads; an MLP that makes a layer as large as that of the GPT-NeoX of that width above
    "tiny-llama": (1024, 2, 128, 4, 224, 2),
    "llama-17m": (8192, 4, 512, 8, 1024, 2),
    "llama-17m-mha": (8192, 4, 512, 8, 768, 8),  # the same size without shared key heads
    "llama-70m": (50304, 6, 512, 8, 1624, 2),
}
Shape = Literal[(*GPT_NEOX, *LLAMA, "qwen3-0.6b")]
Dtype = Literal["float32", "bfloat16"]
transformers.logging.disable_progress_bar()
LAYOUTS = ("group", "plain")
GROUPS = ((256, 8), (64, 2))  # of `length`: tokens of the prompt, completions
# of `memory`: number of processes, options of rloo.py
RUNS = [(1, {}), (1, {"layout": "plain"}), (2, {"sharding": "ddp"}), (2, {"sharding": "fsdp"})]


@dataclass
class Workload:
    """What is trained on what: a model of a published shape with random weights, and random prompts."""

    shape: Shape = "pythia-70m"
    """shape of policy, reference and reward model; llama-70m: pythia-70m's size, 8 heads on 2 key heads; llama-17m:
    the same heads, vocabulary of 8,192; llama-17m-mha: that size with 8 key heads"""
    vocab_size: int = 0
    """tokens of the vocabulary; 0: the shape's own"""
    prompts: int = 4
    """B: prompts per update"""
    min_prompt: int = 224
    """tokens of the shortest prompt; lengths are uniform from here ..."""
    max_prompt: int = 448
    """... to here"""
    rloo_k: int = 4
    """k: completions per prompt"""
    response_length: int = 53
    """R: tokens per completion"""
    dtype: Dtype = "float32"
    """of the forward passes"""
    seed: int = 1
    """of weights, prompts and sampling"""

    def describe(self) -> str:
        """In a line, for titles."""
        tokens = " to ".join(str(n) for n in sorted({self.min_prompt, self.max_prompt}))
        vocabulary = f", vocabulary of {self.vocab_size:,}" if self.vocab_size else ""
        return (
            f"{self.shape}{vocabulary}, {self.dtype}: {self.prompts} prompt{'s' * (self.prompts > 1)} of {tokens} "
            f"tokens × {self.rloo_k} completions of {self.response_length} tokens"
        )


@dataclass
class Machine:
    """The device, and the number of rounds."""

    device: str | None = None
    """cpu or cuda; if not given, cuda if there is one"""
    threads: int = 0
    """CPU threads of every process; 0: torch's default"""
    repetitions: int = 5
    """rounds of what is measured within a process"""

    def settle(self):
        """Fills in the defaults that depend on the machine and refuses what it does not have."""
        self.device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = "cuda:0" if self.device == "cuda" else self.device
        self.threads = self.threads or torch.get_num_threads()
        if self.device != "cpu" and not (self.device.startswith("cuda") and torch.cuda.is_available()):
            fail(f"--device {self.device}: there is none")
        if min(self.threads, self.repetitions) < 1:
            fail("--threads and --repetitions must be at least 1")
        os.environ |= {
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "KINETO_LOG_LEVEL": "99",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # the profiler counts in silence

    def describe_machine(self) -> str:
        """In a line, for titles."""
        return (
            f"{device_name(self.device)}, threads: {self.threads}, torch {torch.__version__}, transformers "
            f"{transformers.__version__}"
        )


@dataclass
class Args(Workload, Machine):
    """Throughput of rloo.py's group layout against the plain layout, `generate` of transformers, vLLM and TRL."""

    stop_share: float = 0.0
    """share of the vocabulary that ends a completion, its probability at each step; 0: all have R tokens"""
    micro_batch: int = 0
    """completions per forward and backward pass in training; 0: all of an update"""
    rollout_batch: int = 0
    """completions per forward pass without gradient and per call of generate; 0: as micro_batch"""
    rounds: int = 3
    """rounds of updates, each of which starts a process per trainer"""
    updates: int = 3
    """timed updates per process, after one to warm up"""
    skip: tuple[Literal["decode", "phases", "updates", "generate", "memory"], ...] = ()
    """a part not to measure, `generate` in decode, or the memory of decode and phases, which needs a profiler that may
    take more memory than there is for thousands of steps; may be given several times"""
    vllm: str | None = None
    """python of an environment with vLLM"""
    trl: tuple[str, ...] = ()
    """python of an environment with TRL 0.19 or 1.x; may be given several times"""
    trl_static_cache: bool = False
    """let TRL 1.x generate with the static cache"""
    output: str = "benchmark/speed/throughput.json"
    """all raw numbers; the picture goes beside it, as .png"""

    def describe(self) -> str:
        return super().describe() + (f", a stop at {self.stop_share:.3g} per step" if self.stop_share else "")

    def stop_ids(self) -> list[int]:
        """Ids of the tokens that end a completion: by random weights, a share of all ids has about this share of the
        probability."""
        return list(range(round(self.stop_share * shape_config(self).vocab_size)))


@dataclass
class Length(Machine):
    """Seconds and peak memory of forward + backward over the completions' length, in group and in plain rows."""

    shapes: tuple[Shape, ...] = ("pythia-70m", "llama-70m")
    """of the models"""
    vocab_size: int = 8192
    """tokens of the vocabulary; 0: the shape's own"""
    response_lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    """R: tokens per completion"""
    dtype: Dtype = "float32"
    """of the forward passes"""
    seed: int = 1
    """of weights and tokens"""
    output: str = "benchmark/speed/length.json"
    """all raw numbers; the picture goes beside it, as .png"""


@dataclass
class Memory(Workload):
    """Memory of training by rloo.py on one and on two processes; prompts are those of each process."""

    grouped_query_shape: Shape = "llama-70m"
    """shape of the last two lines"""
    output: str = "benchmark/speed/memory.json"
    """all numbers"""


def resolve_args(args: Args) -> Args:
    """Fills in the defaults that depend on others and refuses what cannot run."""
    total, k, longest = args.prompts * args.rloo_k, args.rloo_k, args.max_prompt + args.response_length
    args = dataclasses.replace(args, micro_batch=args.micro_batch or total)
    args = dataclasses.replace(args, rollout_batch=args.rollout_batch or args.micro_batch)
    args.settle()
    positions = shape_config(args).max_position_embeddings
    sizes = {"micro_batch": args.micro_batch, "rollout_batch": args.rollout_batch}
    at_least_1 = ("prompts", "min_prompt", "rounds", "updates", "micro_batch")
    for wrong, message in [
        (min(k, args.response_length) < 2, "--rloo_k and --response_length must be at least 2"),
        *((getattr(args, name) < 1, f"--{name} {getattr(args, name)}: must be at least 1") for name in at_least_1),
        (args.min_prompt > args.max_prompt, f"--min_prompt {args.min_prompt} exceeds --max_prompt {args.max_prompt}"),
        (longest > positions, f"{longest} tokens exceed the {positions} positions of {args.shape}: lower --max_prompt"),
        *(
            (
                min(size, k) < 1 or size % k or total % size,
                f"--{name} {size}: must be a multiple of --rloo_k {k} that divides the {total} "
                "completions of an update",
            )
            for name, size in sizes.items()
        ),
        (args.vocab_size and args.vocab_size < 8, f"--vocab_size {args.vocab_size}: must be at least 8"),
        (not 0 <= args.stop_share < 1, f"--stop_share {args.stop_share}: must be at least 0 and below 1"),
        (args.stop_share and args.trl, "--stop_share: the comparison with --trl is of completions of full length"),
        (
            args.trl_static_cache and args.dtype == "bfloat16" and args.shape in GPT_NEOX,
            f"--trl_static_cache: the static cache of transformers fails on {args.shape} in bfloat16 autocast",
        ),
        ({"decode", "phases", "updates"} <= set(args.skip), "--skip: nothing is left to measure"),
        (not args.output.endswith(".json"), f"--output {args.output}: must end in .json"),
    ]:
        if wrong:
            fail(message)
    return args


def fail(message: str):
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")


def shape_config(args: Workload):
    """The transformers config of a workload's shape."""
    if args.shape == "qwen3-0.6b":
        return transformers.Qwen3Config(
            vocab_size=args.vocab_size or 151936,
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    vocab, layers, width, heads, mlp, *key_heads = (GPT_NEOX | LLAMA)[args.shape]
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    common = {
        "vocab_size": args.vocab_size or vocab,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    if key_heads:
        return transformers.LlamaConfig(**common, num_key_value_heads=key_heads[0], rope_parameters=rope)
    return transformers.GPTNeoXConfig(
        **common, use_parallel_residual=True, rope_parameters=rope | {"partial_rotary_factor": 0.25}
    )


def write_inputs(folder: Path, args: Workload) -> dict[str, int]:
    """Writes policy/, reward/ and data/, for transformers 4.53 as well. Returns the policy's sizes."""
    torch.manual_seed(args.seed)
    config = shape_config(args)
    eos, pad = config.vocab_size - 2, config.vocab_size - 1
    config.bos_token_id, config.eos_token_id, config.pad_token_id, config.num_labels = eos, eos, pad, 1
    models = {
        "policy": AutoModelForCausalLM.from_config(config),
        "reward": AutoModelForSequenceClassification.from_config(config),
    }
    rope, special = config.rope_parameters, {"<eos>": eos, "[PAD]": pad}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False) | {"special": True}
    tokenizer = {  # word w<i> is token i, so decoded text becomes the same tokens again
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in special.items()],
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(eos)} | special, "unk_token": "w0"},
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "[PAD]",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        saved = json.loads((folder / name / "config.json").read_text()) | {  # the names of transformers 4
            "torch_dtype": "float32",
            "rope_theta": rope["rope_theta"],
            "rotary_emb_base": rope["rope_theta"],
            "rotary_pct": rope.get("partial_rotary_factor", 1.0),
        }
        for file, value in (("config", saved), ("tokenizer", tokenizer), ("tokenizer_config", tokenizer_config)):
            (folder / name / f"{file}.json").write_text(json.dumps(value))
    (folder / "data").mkdir()
    rows = [{"prompt": "".join(f"w{i} " for i in ids)} for ids in sample_prompts(args, eos)]
    for split in ("train", "test"):  # without a test split rloo.py would hold out training rows
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model_sizes(models["policy"])


def sample_prompts(args: Workload, words: int) -> list[list[int]]:
    """Token ids below `words` of the prompts, of lengths uniform from min_prompt to max_prompt, from the seed."""
    generator = torch.Generator().manual_seed(args.seed)
    lengths = torch.randint(args.min_prompt, args.max_prompt + 1, (args.prompts,), generator=generator).tolist()
    return [torch.randint(words, (length,), generator=generator).tolist() for length in lengths]


def alternate(lanes: dict[str, Callable[[], dict]], rounds: int) -> dict[str, list[dict]]:
    """What each lane returns in each of `rounds` rounds through all lanes: {"seconds": ...} and perhaps more."""
    found = [{name: lane() for name, lane in lanes.items()} for _ in range(rounds)]
    return {name: [one[name] for one in found] for name in lanes}


def timed(functions: dict[str, Callable], rounds: int, device: str, memory: bool = True) -> dict[str, list[dict]]:
    """Seconds of each function in each of `rounds` rounds, and its peak GiB, from a round before, which warms it up.
    A function may return a dict, which is added to these and may replace them."""
    peaks = {}
    for name, function in functions.items():
        if memory:
            peaks[name] = added_memory(function, device)
        else:
            function()

    def lane(name: str) -> dict:
        begin = clock(device)
        more = functions[name]() or {}
        return {"seconds": clock(device) - begin, "peak_gb": peaks.get(name)} | more

    return alternate({name: partial(lane, name) for name in functions}, rounds)


def added_memory(function: Callable, device: str) -> float:
    """GiB of tensors that a call holds at its peak beyond what is held before it, as torch counts them."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**30
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]  # negative where freed
    return max(itertools.accumulate(sizes, initial=0)) / 2**30


def touch_memory(weights: int):
    """Uses as much free memory once as training so many weights may need, at most 12 GiB. A virtual machine may get its
    memory only when it first uses it, a second or more per GiB, and the first trainer measured would pay for all."""
    with contextlib.suppress(AttributeError, ValueError, RuntimeError):  # no Linux, or less may be had than is free
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        torch.ones(min(12 * 2**30, 2**30 + 160 * weights, free * 3 // 4), dtype=torch.uint8)


def seconds(rounds: list[dict]) -> float:
    return median(one["seconds"] for one in rounds)


def in_a_process(function: Callable, *arguments):
    """`function(*arguments)` in a fresh process, which gives all its memory back. This process stays small, since Linux
    counts what the starting process holds into the peak of the started one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def set_up(args: Args):
    """Prepares a process that calls functions of rloo.py, as its `main` does."""
    import rloo

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    rloo.start_processes(torch.device(args.device))


def prompt_rows(args: Workload) -> list[dict]:
    """The workload's prompts, as rows of rloo.py."""
    words = shape_config(args).vocab_size - 2  # without eos and padding
    return [{"prompt_ids": ids} for ids in sample_prompts(args, words)]


def random_batch(args: Workload, device: str, stop_ids: list[int]):
    """The workload's prompts, each with k random completions of up to R tokens, as a Batch of rloo.py."""
    import rloo

    shape = (args.rloo_k, args.prompts, args.response_length)
    responses = torch.randint(shape_config(args).vocab_size, shape, device=device)
    return rloo.make_batch(prompt_rows(args), responses, stop_ids)


def lengths_of(batch) -> tuple[list[int], list[list[int]]]:
    """Numbers of real tokens of a Batch's prompts (B,) and completions (k, B)."""
    return batch.prompt_mask.sum(-1).tolist(), batch.response_mask.sum(-1).tolist()


def in_layout(layout: str, model):
    """The model; for plain rows with the attention of transformers again, which rloo.py changes for group rows."""
    if layout == "plain":
        model.set_attn_implementation("sdpa")
    return model


def train(policy, batch, dtype: str, micro_batch: int, layout: str):
    """Forward and backward of the completions' mean log-prob, as in an update of rloo.py."""
    import rloo

    for part in batch.chunks(micro_batch):
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = rloo.completion_logprobs(in_layout(layout, policy), part, TEMPERATURE, layout)[0].mean()
        loss.backward()
    policy.zero_grad()


def measure_layouts(folder: Path, args: Args, sizes: dict[str, int], vllm_name: str) -> tuple[dict, dict]:
    """The lanes of decode and phases, and what the machine did in their rounds."""
    import rloo

    set_up(args)
    k, size, device, found, machine = args.rloo_k, args.rollout_batch, args.device, {}, {}
    stop_ids = args.stop_ids() or [NEVER]
    probe = machine_probe(device, args.dtype)

    def load(auto_class, name: str, dtype: str):
        options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        return auto_class.from_pretrained(folder / name, **options).to(device).eval()

    policy, reference = (load(AutoModelForCausalLM, "policy", dtype) for dtype in ("float32", args.dtype))
    reward = load(AutoModelForSequenceClassification, "reward", args.dtype)
    batch = random_batch(args, device, stop_ids)
    prompts, responses = lengths_of(batch)

    def decoded(responses: list[list[int]]) -> dict:
        return work("decode", sizes, args.dtype, prompts, responses)

    def group_engine(length: int) -> dict:
        model = in_layout("group", reference)
        sampled, _ = rloo.rollout(model, batch.rows, k, TEMPERATURE, length, stop_ids, "group", size)
        return decoded(lengths_of(sampled)[1])

    def generate(length: int, cache: str) -> dict:
        parts = []
        for part in batch.chunks(size):
            ids = part.prompt_ids.repeat(k, 1)
            out = in_layout("plain", reference).generate(
                input_ids=ids,
                attention_mask=part.prompt_mask.repeat(k, 1).long(),
                max_new_tokens=length,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=TEMPERATURE,
                eos_token_id=stop_ids,
                pad_token_id=policy.config.pad_token_id,
                cache_implementation=cache,
            )
            tokens = out[:, ids.shape[1] :].unflatten(0, (k, len(part.rows)))
            parts.append(lengths_of(rloo.make_batch(part.rows, tokens, stop_ids))[1])
        return decoded([list(itertools.chain(*lanes)) for lanes in zip(*parts)])

    def by_vllm(length: int, sample: Callable) -> dict:
        seconds, responses = sample(length)
        return {"seconds": seconds, "peak_gb": None} | decoded(responses)

    @torch.no_grad()
    def read(function: Callable, model, options: list, layout: str):
        for part in batch.chunks(size):
            function(in_layout(layout, model), part, *options, layout)

    def measure(part: str, lanes: dict[str, Callable]):
        found[part] = timed(lanes | {"machine": probe}, args.repetitions, device, "memory" not in args.skip)
        machine[part] = found[part].pop("machine")

    if "decode" not in args.skip:
        with vllm_process(folder, args) if args.vllm else contextlib.nullcontext() as sample:
            engines = {"group engine": group_engine}
            if "generate" not in args.skip:
                engines["generate, dynamic cache"] = partial(generate, cache=None)
                engines["generate, static cache"] = partial(generate, cache="static")
            if args.vllm:
                engines[vllm_name] = partial(by_vllm, sample=sample)
            for name, length in (("decode", args.response_length), ("first token", 1)):
                # decode and first token do not alternate: that would reallocate the static cache
                measure(name, {engine: partial(function, length) for engine, function in engines.items()})
    if "phases" not in args.skip:
        phases = {
            "reference": partial(read, rloo.completion_logprobs, reference, [TEMPERATURE]),
            "reward model": partial(read, rloo.model_scores, reward, []),
            "training": partial(train, policy, batch, args.dtype, args.micro_batch),
        }
        for name, phase in phases.items():
            measure(name, {f"{layout} layout": partial(phase, layout) for layout in LAYOUTS})
            for one in itertools.chain(*found[name].values()):
                one |= work(name, sizes, args.dtype, prompts, responses)
    return found, machine


@contextlib.contextmanager
def vllm_process(folder: Path, args: Args) -> Iterator[Callable]:
    """Starts a process that runs `vllm_job`. Yields a function that samples there: takes the number of tokens per
    completion, returns seconds and lengths (k, B)."""
    ours, theirs = multiprocessing.Pipe()
    log = folder / "vllm.txt"
    with log.open("w") as said:
        command = job(args.vllm, vllm_job, folder=folder, args=args, pipe=theirs.fileno())
        process = subprocess.Popen(command, stdout=said, stderr=said, pass_fds=[theirs.fileno()], env=environment())
    theirs.close()

    def sample(length: int) -> tuple[float, list[list[int]]]:
        ours.send(length)
        return ours.recv()

    try:
        yield sample
    except (EOFError, ConnectionError):
        fail(f"{args.vllm} ... failed:\n{log.read_text()[-5000:]}")
    finally:
        ours.close()  # ends the process
        process.wait()


def vllm_job(folder: str, args: dict, pipe: int):
    """Runs in an environment with vLLM: samples whenever `vllm_process` asks for it, until that closes the pipe."""
    sys.path.insert(0, str(VLLM))
    import vllm_engine

    import rloo

    args = Args(**args)
    set_up(args)
    options = {"dtype": getattr(torch, args.dtype), "attn_implementation": "sdpa"}
    policy = AutoModelForCausalLM.from_pretrained(f"{folder}/policy", **options).to(args.device).eval()
    rows, asked = prompt_rows(args), Connection(pipe)

    def sample(rows: list[dict], length: int, version: int):
        fixed = {"stop_ids": args.stop_ids(), "max_length": args.max_prompt + args.response_length}
        engine = vllm_engine.generate
        return rloo.rollout(policy, rows, args.rloo_k, TEMPERATURE, length, **fixed, engine=engine, version=version)[0]

    with contextlib.suppress(EOFError):
        for version in itertools.count():
            length = asked.recv()
            sample([{"prompt_ids": [0]}], 1, version)  # sends weights; vLLM drops what it cached of the prompts
            begin = clock(args.device)
            batch = sample(rows, length, version)
            asked.send((clock(args.device) - begin, lengths_of(batch)[1]))


def measure_updates(
    folder: Path, args: Args, sizes: dict[str, int], trl_names: dict[str, str], vllm_name: str
) -> tuple[dict, list]:
    """For each trainer and round: median seconds of an update, peak memory in GiB, medians of the work of an update;
    and what the machine did in each round."""
    full = [len(row["prompt_ids"]) for row in prompt_rows(args)], [[args.response_length] * args.prompts] * args.rloo_k

    def lane(name: str, run: Callable, *arguments) -> dict:
        print(f"updates: {name}", flush=True)
        one = run(folder, args, Path(tempfile.mkdtemp(dir=folder)), *arguments)
        done = [work("whole update", sizes, args.dtype, *lengths) for lengths in one.pop("lengths", [full])]
        return one | {key: median(found[key] for found in done) for key in done[0]}

    lanes = {f"rloo.py, {layout}": (run_rloo, layout) for layout in LAYOUTS}
    if args.vllm:
        lanes[f"rloo.py, {vllm_name}"] = (run_rloo, "group", args.vllm)
    lanes |= {name: (run_trl, python) for name, python in trl_names.items()}
    lanes = {name: partial(lane, name, *run) for name, run in lanes.items()}
    found = alternate(lanes | {"machine": partial(in_a_process, measure_machine, args)}, args.rounds)
    machine = found.pop("machine")
    return found, machine


def measure_machine(args: Args) -> dict[str, float]:
    """In a process of its own: what its machine does."""
    torch.set_num_threads(args.threads)
    probe = machine_probe(args.device, args.dtype)
    probe()  # to warm up
    return probe()


def rloo_flags(folder: Path, args: Workload, out: Path, updates: int, **more) -> dict:
    """Flags of rloo.py to train on the inputs in `folder`, into out/run, with a batch of all prompts."""
    total = args.prompts * args.rloo_k
    return {
        "sft_model_path": f"{folder}/policy",
        "reward_model_path": f"{folder}/reward",
        "dataset_name": f"{folder}/data",
        "output_dir": f"{out}/run",
        "max_prompt_length": args.max_prompt,
        "rloo_k": args.rloo_k,
        "response_length": args.response_length,
        "per_device_train_batch_size": total,
        "gradient_accumulation_steps": 1,
        "local_rollout_forward_batch_size": total,
        "total_episodes": updates * total,
        "num_eval_prompts": 0,
        "num_sample_generations": 0,
        "dtype": args.dtype,
        **more,
    }


def run_rloo(folder: Path, args: Args, out: Path, layout: str, vllm: str | None = None) -> dict:
    """Median seconds of a timed update and of its phases, peak GiB, and lengths, of rloo.py; its rollouts are vLLM's if
    `vllm` is the python of an environment that has it."""
    flags = rloo_flags(
        folder,
        args,
        out,
        args.updates + 1,
        layout=layout,
        kl_coef=KL_COEF,
        temperature=TEMPERATURE,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.prompts * args.rloo_k // args.micro_batch,
        local_rollout_forward_batch_size=args.rollout_batch,
        learning_rate=LEARNING_RATE,
        device=args.device,
        seed=args.seed,
    )
    stop_ids = args.stop_ids()
    if vllm:
        flags["rollout_engine"] = f"{VLLM / 'vllm_engine.py'}:generate"
    elif not stop_ids:
        stop_ids = [NEVER]  # vLLM would refuse an id that no token has, and needs none
    call(job(vllm or sys.executable, rloo_job, flags=flags, stop_ids=stop_ids, out=out))
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    ends = [line["episode"] / line["eps"] for line in lines]  # seconds since the first update began
    kept = [name for name in lines[0] if name.startswith(("time/", "completions/"))]
    updates = [b - a for a, b in zip(ends, ends[1:])]
    return {
        "seconds": median(updates),
        "updates": updates,
        "peak_gb": None if vllm else lines[-1]["memory/peak_gb"],
        "lengths": json.loads((out / "lengths.json").read_text())[1:],
        **{name: median(line[name] for line in lines[1:]) for name in kept},
    }


def rloo_job(flags: dict, stop_ids: list[int], out: str):
    """Trains by rloo.py with these stop tokens, and writes the lengths of each update's prompts and completions."""
    import rloo

    lengths, rollout = [], rloo.rollout

    def noted(*args, **options):
        batch, logprobs = rollout(*args, **options)
        lengths.append(lengths_of(batch))
        return batch, logprobs

    with mock.patch.object(rloo, "rollout", noted), mock.patch.object(rloo, "stop_token_ids", lambda *_: stop_ids):
        rloo.main(rloo.Args(**flags))
    Path(out, "lengths.json").write_text(json.dumps(lengths))


def run_trl(folder: Path, args: Args, out: Path, python: str) -> dict:
    """Median seconds of a timed update and peak GiB of TRL's RLOOTrainer, by running this file with `python`."""
    call(job(python, trl_job, folder=folder, args=args, out=out))
    return json.loads((out / "result.json").read_text())


def job(python: str, function: Callable, **arguments) -> list[str]:
    """The command that calls one of JOBS in a process of its own, by the python of some environment."""

    def plain(value):
        return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)

    return [python, __file__, "--job", function.__name__, json.dumps(arguments, default=plain)]


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def call(command: list) -> str:
    """Standard output of a command; where it fails, the end of this program, with the end of what it said."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment())
    except OSError as error:
        fail(f"{command[0]}: cannot be run ({error.strerror})")
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        fail(f"{' '.join(str(part) for part in command)[:200]} ... failed:\n{said[-5000:]}")
    return done.stdout


def trl_versions(pythons: tuple[str, ...]) -> dict[str, str]:
    """Name with versions -> python of each environment."""
    code = "import trl, transformers as t; print(f'TRL {trl.__version__}, transformers {t.__version__}')"
    return {call([python, "-c", code]).splitlines()[-1]: python for python in pythons}


def vllm_version(python: str) -> str:
    """Versions of vLLM and transformers in an environment."""
    code = (
        "import sys, transformers; from importlib.metadata import packages_distributions, version; "
        "found = packages_distributions().get('vllm') or sys.exit('vLLM is missing: see benchmark/vllm/README.md'); "
        "print(f'vLLM {version(found[0])}, transformers {transformers.__version__}')"
    )
    return call([python, "-c", code]).splitlines()[-1]


def trl_job(folder: str, args: dict, out: str):
    """Runs in an environment with TRL: trains, and writes result.json for `run_trl`."""
    import datasets
    import trl

    args = Args(**args)
    torch.set_num_threads(args.threads)
    marks, total = [], args.prompts * args.rloo_k

    class Marks(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            marks.append(clock(args.device))

    def load(auto_class, name: str, dtype: str, **options):
        options |= {"torch_dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        return auto_class.from_pretrained(f"{folder}/{name}", **options)

    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/policy", padding_side="left")
    dataset = datasets.load_dataset("json", data_files=f"{folder}/data/train.jsonl", split="train", cache_dir=out)
    common = {
        "output_dir": out,
        "per_device_train_batch_size": args.micro_batch,
        "learning_rate": LEARNING_RATE,
        "seed": args.seed,
        "gradient_accumulation_steps": total // args.micro_batch,
        "temperature": TEMPERATURE,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "bf16": args.dtype == "bfloat16",
        "use_cpu": args.device == "cpu",
        "dataloader_pin_memory": args.device != "cpu",
        "disable_tqdm": True,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
    }
    if trl.__version__.startswith("0."):
        config = trl.RLOOConfig(
            **common,
            rloo_k=args.rloo_k,
            kl_coef=KL_COEF,
            response_length=args.response_length,
            stop_token="eos",
            total_episodes=(args.updates + 1) * total,
            num_ppo_epochs=1,
            num_mini_batches=1,
            num_sample_generations=0,
            local_rollout_forward_batch_size=args.rollout_batch,
        )
        trainer = trl.RLOOTrainer(
            config=config,
            processing_class=tokenizer,
            policy=load(AutoModelForCausalLM, "policy", "float32"),
            ref_policy=load(AutoModelForCausalLM, "policy", args.dtype),
            callbacks=[Marks()],
            reward_model=load(AutoModelForSequenceClassification, "reward", args.dtype, num_labels=1),
            train_dataset=dataset.map(lambda row: tokenizer(row["prompt"]), remove_columns=["prompt"]),
        )
    else:
        config = trl.RLOOConfig(
            **common,
            num_generations=args.rloo_k,
            beta=KL_COEF,
            max_completion_length=args.response_length,
            max_steps=args.updates + 1,
            cache_implementation="static" if args.trl_static_cache else None,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        )
        trainer = trl.RLOOTrainer(
            model=f"{folder}/policy",
            reward_funcs=f"{folder}/reward",
            args=config,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[Marks()],
        )
    trainer.train()
    assert len(marks) == args.updates + 1, f"{len(marks)} updates instead of {args.updates + 1}"
    peak = (
        torch.cuda.max_memory_allocated() / 2**30
        if args.device.startswith("cuda")
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    )
    updates = [b - a for a, b in zip(marks, marks[1:])]
    Path(out, "result.json").write_text(json.dumps({"seconds": median(updates), "updates": updates, "peak_gb": peak}))


def seconds_per_token(one: dict) -> float:
    """Seconds of a lane in a round; where it has real tokens, per token, since lanes may have different ones."""
    return one["seconds"] / one.get("tokens", 1)


def ratios_by_round(lanes: dict[str, list[dict]]) -> dict[str, list[float]]:
    """For every lane but the first: how many times as long it takes as the first one, round by round."""
    (_, first), *others = lanes.items()
    return {name: [seconds_per_token(b) / seconds_per_token(a) for a, b in zip(first, lane)] for name, lane in others}


def speedups(found: dict[str, dict]) -> dict[str, dict[str, float]]:
    """How many times faster the first lane of each part is than the others: medians over the rounds."""
    return {
        part: {name: median(ratios) for name, ratios in ratios_by_round(lanes).items()} for part, lanes in found.items()
    }


def report(result: dict, args: Args) -> str:
    """Two tables, at most 100 columns wide: time and memory; work, and how near it comes to the machine's rates."""
    completions = args.prompts * args.rloo_k
    lines = [result["title"], "", f"{'':38}{'ms':>11}{'per second':>12}{'peak GiB':>10}{'group faster':>14}"]
    for part, ratios in result["speedups"].items():
        of_tokens = part in ("decode", "first token")
        lines.append(part + (", tokens" if of_tokens else ", completions"))
        for name, rounds in result["found"][part].items():
            rate = median((one["tokens"] if of_tokens else completions) / one["seconds"] for one in rounds)
            peak = rounds[0]["peak_gb"] and max(one["peak_gb"] for one in rounds)
            cells = [
                f"{seconds(rounds) * 1e3:11.1f}",
                f"{rate:12.2f}",
                f"{peak:10.2f}" if peak else " " * 10,
                f"{ratios[name]:13.2f}x" if name in ratios else "",
            ]
            lines.append(f"  {name:36}" + "".join(cells).rstrip())
    lines.append("\npeak GiB: of a whole update all that its process holds, of the rest the tensors that it adds")

    rounds_of_machine = list(itertools.chain(*result["machine"].values()))
    flops, bandwidth = ([one[key] for one in rounds_of_machine] for key in ("flop_per_s", "bytes_per_s"))
    lines += ["", f"{'':38}{'tokens':>9}{'steps':>8}{'GFLOP':>11}{'of FLOP/s':>11}{'GB':>9}{'of GB/s':>9}"]
    for part, lanes in result["found"].items():
        lines.append(part)
        for name, rounds in lanes.items():
            cells = [f"{median(one['tokens'] for one in rounds):9,.0f}"]
            cells.append(f"{median(one['steps'] for one in rounds):8,.0f}" if "steps" in rounds[0] else " " * 8)
            for key, best, width in (("flop", max(flops), 11), ("bytes", max(bandwidth), 9)):
                if key in rounds[0]:
                    cells.append(f"{median(one[key] for one in rounds) / 1e9:{width},.1f}")
                    cells.append(f"{median(one[key] / one['seconds'] for one in rounds) / best:{width}.1%}")
            lines.append(f"  {name:36}" + "".join(cells))
    lines += [
        "\nGFLOP, GB: matrix products and reads of memory that these tokens cannot do without",
        f"of FLOP/s: of {max(flops) / 1e9:,.0f} GFLOP/s, the best {args.dtype} product (rounds: from "
        f"{min(flops) / 1e9:,.0f})",
        f"of GB/s: of {max(bandwidth) / 1e9:,.1f} GB/s, the best read of 1 GiB (rounds: from "
        f"{min(bandwidth) / 1e9:,.1f})",
    ]
    return "\n".join(lines)


def draw(result: dict, pyplot):
    """How many times as long the alternatives take as group layout and engine: a bar each, a colour for each kind."""
    kinds = {
        "generate": "generate of transformers",
        "plain": "rloo.py in plain rows",
        "TRL": "TRL's RLOOTrainer",
        "vLLM": "rollouts by vLLM",
    }
    bars = [
        (f"{part}: {name}", ratios, next(kind for kind in kinds if kind in name))
        for part, lanes in result["found"].items()
        for name, ratios in ratios_by_round(lanes).items()
    ]
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.42 * len(bars)), layout="constrained")
    for place, (_, ratios, kind) in enumerate(bars):
        axes.barh(place, median(ratios), color=f"C{list(kinds).index(kind)}")
        axes.plot([min(ratios), max(ratios)], [place, place], color="black", linewidth=1.5)
        axes.annotate(
            f"{median(ratios):.2f}×", (max(ratios), place), xytext=(5, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color="black", linewidth=1, linestyle="--", label="group layout and engine")
    for place, (kind, words) in enumerate(kinds.items()):
        if any(kind == drawn for _, _, drawn in bars):
            axes.barh(0, 0, color=f"C{place}", label=words)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, 1.15 * max(max(ratios) for _, ratios, _ in bars))
    axes.set_xlabel("time relative to the group layout and engine (bar: median, line: range)")
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    axes.set_title(result["title"], fontsize=8)
    figure.suptitle("How many times as long it takes without rloo.py's group layout and engine", fontsize=11)


def save(result: dict, output: str, draw: Callable | None = None) -> str:
    """Writes the numbers and, where `draw` is given, the picture; returns what to tell."""
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return f"numbers: {path}" + (f"\n{draw_beside(result, path, draw)}" if draw else "")


def draw_beside(result: dict, path: Path, draw: Callable) -> str:
    """What `draw(result, pyplot)` makes, as .png beside the numbers; returns what to tell."""
    try:
        import matplotlib
    except ImportError:
        return "no picture without matplotlib: pip install -r benchmark/requirements.txt"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw(result, pyplot)
    pyplot.savefig(path.with_suffix(".png"), dpi=130)
    pyplot.close()
    return f"picture: {path.with_suffix('.png')}"


def device_name(device: str) -> str:
    """What the GPU or the CPU calls itself."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def compare(args: Args):
    """Decoding, phases and whole updates."""
    args = resolve_args(args)
    trl_names = {} if "updates" in args.skip else trl_versions(args.trl)
    vllm = vllm_version(args.vllm) if args.vllm else ""
    vllm_name = vllm.partition(",")[0]
    found: dict[str, dict] = {}
    machine: dict[str, list] = {}
    with tempfile.TemporaryDirectory(prefix="throughput-") as temporary:
        sizes = in_a_process(write_inputs, Path(temporary), args)
        if "updates" not in args.skip:  # first, since other programs may fail
            with contextlib.suppress(BrokenProcessPool):  # a container's limit ended it
                in_a_process(touch_memory, sizes["parameters"])
            updates = measure_updates(Path(temporary), args, sizes, trl_names, vllm_name)
            found["whole update"], machine["whole update"] = updates
        if not {"decode", "phases"} <= set(args.skip):
            print("decode and phases", flush=True)
            layouts, rounds = in_a_process(measure_layouts, Path(temporary), args, sizes, vllm_name)
            found, machine = layouts | found, rounds | machine
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": list(trl_names)}
    versions["vllm"] = vllm
    result = {
        "title": f"{args.describe()}\n{args.describe_machine()}",
        "args": dataclasses.asdict(args),
        "device": device_name(args.device),
        "versions": versions,
        "sizes": sizes,
        "speedups": speedups(found),
        "found": found,
        "machine": machine,
    }
    print(f"\n{report(result, args)}\n\n{save(result, args.output, draw)}")


# ---- length ----------------------------------------------------------------------------------------------------------


def measure_length(args: Length, workload: Workload) -> dict[int, dict]:
    """R -> layout -> its rounds, of one shape and group; runs in a process of its own."""
    set_up(args)
    policy = AutoModelForCausalLM.from_config(shape_config(workload), attn_implementation="sdpa").to(args.device).eval()
    found = {}
    for R in (min(args.response_lengths), *args.response_lengths):  # once more at first: libraries set themselves up
        batch = random_batch(dataclasses.replace(workload, response_length=R), args.device, [NEVER])
        lanes = {layout: partial(train, policy, batch, args.dtype, workload.rloo_k, layout) for layout in LAYOUTS}
        found[R] = timed(lanes, args.repetitions, args.device)
    return found


def peak(rounds: list[dict]) -> float:
    return rounds[0]["peak_gb"]


def report_length(result: dict) -> str:
    """The table: for each part seconds and peak memory of group and plain rows by R."""
    lines = [result["title"]]
    for part, found in result["found"].items():
        lines.append(
            f"\n{part}\n{'R':>8}{'group, s':>12}{'plain, s':>12}{'group faster':>15}{'group, GiB':>13}"
            f"{'plain, GiB':>13}{'of plain':>11}"
        )
        for R, lanes in found.items():
            times, (group, plain) = ([f(lanes[layout]) for layout in LAYOUTS] for f in (seconds, peak))
            lines.append(
                f"{R:8}{times[0]:12.3f}{times[1]:12.3f}{result['speedups'][part][R]['plain']:14.2f}x"
                f"{group:13.3f}{plain:13.3f}{group / max(plain, 1e-9):11.2f}"
            )
    return "\n".join(lines)


def draw_length(result: dict, pyplot):
    """Over R, a line for each model and group: how much longer plain rows take, and the memory of group rows."""
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for number, (part, found) in enumerate(result["found"].items()):
        lengths = [int(R) for R in found]
        style = {"color": f"C{number}", "marker": "o", "markersize": 4, "label": part}
        ratios = [ratios_by_round(lanes)["plain"] for lanes in found.values()]
        times.plot(lengths, [median(values) for values in ratios], **style)
        times.fill_between(lengths, [min(x) for x in ratios], [max(x) for x in ratios], color=f"C{number}", alpha=0.2)
        memory.plot(lengths, [peak(lanes["group"]) / peak(lanes["plain"]) for lanes in found.values()], **style)
    times.set_ylabel("time in plain rows / time in group rows\n(line: median; band: range over the rounds)")
    memory.set_ylabel("peak memory in group rows / in plain rows\n(tensors beyond weights and batch)")
    times.set_title("Above 1 group rows are faster", fontsize=10)
    memory.set_title("Below 1 group rows need less", fontsize=10)
    times.set_ylim(bottom=0)
    memory.set_ylim(0, 1.1)
    for panel in (times, memory):
        panel.axhline(1, color="black", linewidth=1, linestyle="--")
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, lengths)
        panel.set_xlabel("R: tokens per completion")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    times.legend(frameon=False, fontsize=9)
    figure.suptitle(f"Group rows against plain rows: {result['title']}", fontsize=9)


def over_lengths(args: Length):
    """Forward + backward over the completions' length."""
    args.settle()
    if not args.output.endswith(".json"):
        fail(f"--output {args.output}: must end in .json")
    found = {}
    for shape in args.shapes:
        for prompt, k in GROUPS:
            part = f"{shape}: prompt of {prompt} tokens, {k} completions"
            print(part, flush=True)
            found[part] = in_a_process(
                measure_length,
                args,
                Workload(
                    shape=shape, vocab_size=args.vocab_size, prompts=1, min_prompt=prompt, max_prompt=prompt, rloo_k=k
                ),
            )
    vocabulary = f"vocabulary of {args.vocab_size:,}, " if args.vocab_size else ""
    result = {
        "title": f"forward + backward of one group, {vocabulary}{args.dtype}\n{args.describe_machine()}",
        "args": dataclasses.asdict(args),
        "found": found,
        "speedups": {part: speedups(lengths) for part, lengths in found.items()},
    }
    print(f"\n{report_length(result)}\n\n{save(result, args.output, draw_length)}")


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory_job(flags: dict, result: str):
    """One process of a run: trains, and the first one writes down what it held."""
    import rloo

    held, clip = {}, torch.nn.utils.clip_grad_norm_
    optimizers, adamw = [], torch.optim.AdamW

    def nbytes(tensors) -> int:
        return sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in tensors)

    def note(parameters, *args):
        parameters = list(parameters)
        state = [x for values in optimizers[0].state.values() for x in values.values()]
        gradients = nbytes(p.grad for p in parameters)
        held.update(parameters=nbytes(parameters), gradients=gradients, optimizer=nbytes(state))
        return clip(parameters, *args)

    torch.nn.utils.clip_grad_norm_ = note
    torch.optim.AdamW = lambda *args, **kwargs: optimizers.append(adamw(*args, **kwargs)) or optimizers[0]
    rloo.main(rloo.Args(**flags))
    if int(os.environ["RANK"]) == 0:
        last = json.loads((Path(flags["output_dir"]) / "metrics.jsonl").read_text().splitlines()[-1])
        Path(result).write_text(json.dumps({"held": held, "peak_gb": last["memory/peak_gb"]}))


def run_memory(folder: Path, args: Memory, processes: int, options: dict) -> dict:
    """Trains on the inputs in `folder`; what `memory_job` found."""
    out = Path(tempfile.mkdtemp(dir=folder))
    flags = rloo_flags(folder, args, out, 2 * processes, **options)
    python, *command = job(sys.executable, memory_job, flags=flags, result=out / "result.json")
    call([python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes, *command])
    return json.loads((out / "result.json").read_text())


def memory_of_runs(args: Memory):
    """Memory of training, by sharding, layout and checkpointing."""
    checkpointing = ({}, {"gradient_checkpointing": True})
    all_runs = [(processes, options | more) for processes, options in RUNS for more in checkpointing]
    found = []
    for shape, runs in ((args.shape, all_runs), (args.grouped_query_shape, RUNS[:2])):
        with tempfile.TemporaryDirectory(prefix="memory-") as temporary:
            in_a_process(write_inputs, Path(temporary), dataclasses.replace(args, shape=shape))
            for processes, options in runs:
                print(f"{shape}, {processes} process{'es' * (processes > 1)}: {options}", flush=True)
                result = run_memory(Path(temporary), args, processes, options)
                found.append({"shape": shape, "processes": processes, "options": options, **result})
    print(
        f"\n{args.describe()} per process; GiB per process\n\n{'shape':14}{'processes':11}{'options':44}"
        f"{'parameters':>11}{'gradients':>11}{'optimizer':>11}{'peak':>8}"
    )
    for result in found:
        options = " ".join(f"--{name}" + f" {value}" * (value is not True) for name, value in result["options"].items())
        numbers = "".join(f"{result['held'][name] / 2**30:11.3f}" for name in ("parameters", "gradients", "optimizer"))
        print(f"{result['shape']:14}{result['processes']:<11}{options:44}{numbers}{result['peak_gb']:8.2f}")
    print(f"\n{save({'args': dataclasses.asdict(args), 'found': found}, args.output)}")


# ---- The command line ------------------------------------------------------------------------------------------------


def redraw(paths: list[str]):
    """The pictures of numbers that are there."""
    for path in paths:
        result = json.loads(Path(path).read_text())
        print(draw_beside(result, Path(path), draw_length if "response_lengths" in result["args"] else draw))


def command_line(words: list[str]):
    import tyro

    commands = {"length": (Length, over_lengths), "memory": (Memory, memory_of_runs)}
    if words[:1] == ["draw"]:
        return redraw(words[1:])
    if words[:1] and words[0] in commands:
        (kind, run), words = commands[words[0]], words[1:]
        config = ()
    else:
        kind, run = Args, compare
        config = (tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction)
    try:
        run(tyro.cli(kind, args=words, config=config, use_underscores=True))
    except torch.OutOfMemoryError:
        fail("out of memory: lower --prompts, --micro_batch or --response_lengths")


JOBS = {function.__name__: function for function in (trl_job, vllm_job, rloo_job, memory_job)}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        JOBS[sys.argv[2]](**json.loads(sys.argv[3]))
    else:
        command_line(sys.argv[1:])
