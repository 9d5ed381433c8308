"""Speed and memory of rloo.py's group rows against plain rows, `generate` of transformers, vLLM and TRL.

    python benchmark/speed/throughput.py                       # decoding, phases, updates: pythia-70m, TL;DR's lengths
    python benchmark/speed/throughput.py --vllm ../vllm-env/bin/python              # and vLLM: see README.md
    python benchmark/speed/throughput.py --trl trl0/bin/python --trl trl1/bin/python    # and TRL: see requirements.txt
    python benchmark/speed/throughput.py length                # forward + backward over the completions' length
    python benchmark/speed/throughput.py report                # the tables and the picture of README.md again

Models have random weights: nothing is downloaded. All completions have --response_length tokens; with --stop_share
they end at random. What is compared takes turns, A B C A B C ..., after a warm-up of each. A ratio is that of two times
within a round, so that a slow minute slows all of them; per real token (up to and including the stop) where those are
counted.

decode   k completions of each prompt, by weights in --dtype: by the group engine, by `generate` with the dynamic and
         with the static cache (compiled on CUDA), and by vLLM, to which the weights are sent before each round; the
         sending is not timed. With --vllm all of this runs in vLLM's environment.
phases   policy forward + backward: group and plain layout
updates  rloo.py in group layout and engine, in plain layout and hf engine, in group layout with vLLM as its engine (to
         which the new weights are sent in each update), and TRL's RLOOTrainer, each in a process of its own, without
         loading and first update

Peak memory of phases is that of the tensors that the first call, the warm-up, adds, counted by torch; of updates all
that the process holds (on CUDA: all tensors). vLLM's is not counted.

TRL has the same models, prompts, k, R, temperature, β, threads; one epoch, one mini-batch; sdpa; float32, or bfloat16
autocast over float32 weights; fused AdamW; gradient checkpointing off (1.x: on by default); no logging, saving or
evaluation; no vLLM. 1.x generates and scores a whole update at once, with the dynamic cache, both its defaults. 0.19
has its reference and reward model in --dtype.
"""

import dataclasses
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal
from unittest import mock

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), *(str(HERE.parent / name) for name in ("study", "trl", "speed"))]
import environment  # noqa: E402
import study  # noqa: E402
from environment import answer_job, call, default_flags, fail, run_job, trl_versions, write_model  # noqa: E402

import rloo  # noqa: E402

TEMPERATURE, KL_COEF, LEARNING_RATE = 0.7, 0.05, 1e-6  # of every trainer
NEVER = 10**9  # a stop id that no token has
GPT_NEOX = {  # vocabulary, layers, width, heads, width of the MLP
    "tiny": (1024, 2, 128, 4, 256),
    "pythia-70m": (50304, 6, 512, 8, 2048),
}
LLAMA = {  # the same, and key heads; an MLP that makes a layer as large as that of the GPT-NeoX of that width above
    "tiny-llama": (1024, 2, 128, 4, 224, 2),
    "llama-17m": (8192, 4, 512, 8, 1024, 2),
    "llama-17m-mha": (8192, 4, 512, 8, 768, 8),  # the same size without shared key heads
    "llama-70m": (50304, 6, 512, 8, 1624, 2),
}
Shape = Literal[(*GPT_NEOX, *LLAMA)]
Dtype = Literal["float32", "bfloat16"]
LAYOUTS = ("group", "plain")


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
    device: str | None = None
    """cpu or cuda; if not given, cuda if there is one"""
    threads: int = 0
    """CPU threads of every process; 0: torch's default"""
    repetitions: int = 5
    """rounds of what is measured within a process"""
    output: str = str(HERE / "throughput.json")
    """.json file to which the result is added, under its command"""


@dataclass
class Args(Workload):
    """Throughput of rloo.py's group layout against the plain layout, `generate` of transformers, vLLM and TRL."""

    stop_share: float = 0.0
    """share of the vocabulary that ends a completion in decode, its probability at each step; 0: all have R tokens"""
    rounds: int = 3
    """rounds of updates, each of which starts a process per trainer"""
    updates: int = 3
    """timed updates per process, after one to warm up"""
    skip: tuple[Literal["decode", "phases", "updates", "generate"], ...] = ()
    """a part not to measure, or `generate` in decode; may be given several times"""
    vllm: str | None = None
    """python of an environment with vLLM"""
    trl: tuple[str, ...] = ()
    """python of an environment with TRL 0.19 or 1.x; may be given several times"""


@dataclass
class Length(Workload):
    """Forward + backward over the completions' length, in group and in plain rows: one prompt of 256 tokens with 8
    completions, and one of 64 tokens with 2, where there is least to share."""

    shapes: tuple[Shape, ...] = ("pythia-70m", "llama-70m")
    """of the models"""
    vocab_size: int = 8192
    repetitions: int = 2
    response_lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    """R: tokens per completion"""
    output: str = str(HERE / "length.json")


def settle(args):
    """Fills in the defaults that depend on the machine and refuses what cannot run."""
    args.device = args.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    args.threads = args.threads or torch.get_num_threads()
    if args.min_prompt > args.max_prompt or args.max_prompt + args.response_length > 2048:
        fail("--min_prompt to --max_prompt, with --response_length: must be a range within 2,048 positions")
    if isinstance(args, Args) and args.stop_share and "updates" not in args.skip:
        fail("--stop_share: is for decode, so --skip updates; their completions all have R tokens")
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
    os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler counts in silence


# ---- Inputs ----------------------------------------------------------------------------------------------------------


def shape_config(args: Workload):
    """The transformers config of a workload's shape."""
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
    rope["partial_rotary_factor"] = 0.25
    return transformers.GPTNeoXConfig(**common, use_parallel_residual=True, rope_parameters=rope)


def write_inputs(args: Workload, folder: Path):
    """Writes policy/, reward/ and data/, for transformers 4.53 as well."""
    torch.manual_seed(args.seed)
    config = shape_config(args)
    eos, pad = config.vocab_size - 2, config.vocab_size - 1
    config.eos_token_id, config.pad_token_id, config.num_labels, config.bos_token_id = eos, pad, 1, None
    special = {"<eos>": eos, "[PAD]": pad}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False) | {"special": True}
    tokenizer = {  # word w<i> is token i, so decoded text becomes the same tokens again
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in special.items()],
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(eos)} | special, "unk_token": "w0"},
    }
    names = {"eos_token": "<eos>", "pad_token": "[PAD]", "clean_up_tokenization_spaces": False}
    policy = AutoModelForCausalLM.from_config(config)
    reward = AutoModelForSequenceClassification.from_config(config)
    for name, model in (("policy", policy), ("reward", reward)):
        model.save_pretrained(folder / "made" / name)
        (folder / "made" / name / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "made" / name / "tokenizer_config.json").write_text(json.dumps(names))
        write_model(folder / "made" / name, folder / name)
    (folder / "data").mkdir()
    rows = [{"prompt": "".join(f"w{i} " for i in row["prompt_ids"])} for row in prompt_rows(args)]
    for split in ("train", "test"):  # without a test split rloo.py would hold out training rows
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompt_rows(args: Workload) -> list[dict]:
    """The workload's prompts, as rows of rloo.py: lengths uniform from min_prompt to max_prompt, from the seed."""
    words = shape_config(args).vocab_size - 2  # without eos and padding
    generator = torch.Generator().manual_seed(args.seed)
    lengths = torch.randint(args.min_prompt, args.max_prompt + 1, (args.prompts,), generator=generator).tolist()
    return [{"prompt_ids": torch.randint(words, (length,), generator=generator).tolist()} for length in lengths]


def stop_ids(args: Args) -> list[int]:
    """Ids of the tokens that end a completion: by random weights, a share of all ids has about this share of the
    probability."""
    return list(range(round(args.stop_share * shape_config(args).vocab_size)))


def random_batch(args: Workload):
    """The workload's prompts, each with k random completions of R tokens, as a Batch of rloo.py."""
    shape = (args.rloo_k, args.prompts, args.response_length)
    responses = torch.randint(shape_config(args).vocab_size, shape, device=args.device)
    return rloo.make_batch(prompt_rows(args), responses, [NEVER])


# ---- Timing ----------------------------------------------------------------------------------------------------------


def set_up(args: Workload):
    """Prepares a process that calls functions of rloo.py, as its `main` does."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rloo.start_processes(torch.device(args.device))


def timed(functions: dict[str, Callable], rounds: int, device: str, memory: bool = True) -> dict[str, list[dict]]:
    """Seconds of each function in each of `rounds` rounds, and its peak GiB, from a round before, which warms it up.
    A function may return a dict, which is added to these and may replace them."""
    peaks, found = {}, {name: [] for name in functions}
    for name, function in functions.items():
        peaks[name] = added_memory(function, device) if memory else function() and None
    for _, name in itertools.product(range(rounds), functions):
        begin = rloo.clock(torch.device(device))
        more = functions[name]() or {}
        found[name].append({"seconds": rloo.clock(torch.device(device)) - begin, "peak_gb": peaks[name]} | more)
    return found


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


def in_layout(layout: str, model):
    """The model; for plain rows with the attention of transformers again, which rloo.py changes for group rows."""
    if layout == "plain":
        model.set_attn_implementation("sdpa")
    return model


def train(policy, batch, dtype: str, layout: str):
    """Forward and backward of the completions' mean log-prob, as in an update of rloo.py."""
    with torch.autocast(policy.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        loss = rloo.completion_logprobs(in_layout(layout, policy), batch, TEMPERATURE, layout)[0].mean()
    loss.backward()
    policy.zero_grad()


def counted(batch) -> dict[str, int]:
    """Real tokens of a Batch's completions."""
    return {"tokens": int(batch.response_mask.sum())}


def load_policy(folder: str, args: Workload, dtype: str):
    options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
    return AutoModelForCausalLM.from_pretrained(f"{folder}/policy", **options).to(args.device).eval()


def decode_job(folder: str, args: dict, vllm_name: str, out: str) -> dict:
    """The lanes of decode."""
    args = Args(**args)
    set_up(args)
    k, length, stops = args.rloo_k, args.response_length, stop_ids(args) or [NEVER]
    model, rows = load_policy(folder, args, args.dtype), prompt_rows(args)

    def group_engine() -> dict:
        batch, _ = rloo.rollout(model, rows, k, TEMPERATURE, length, stops, "group", args.prompts * k)
        return counted(batch)

    def generate(cache: str | None) -> dict:
        in_layout("plain", model)
        ids, mask = rloo.pad([row["prompt_ids"] for row in rows], left=True)
        options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": TEMPERATURE, "max_new_tokens": length}
        options |= {"eos_token_id": stops, "pad_token_id": model.config.pad_token_id, "cache_implementation": cache}
        ids, mask = (x.to(args.device).repeat(k, 1) for x in (ids, mask.long()))
        out = model.generate(input_ids=ids, attention_mask=mask, **options)
        batch = rloo.make_batch(rows, out[:, ids.shape[1] :].unflatten(0, (k, len(rows))), stops)
        return counted(batch)

    versions = itertools.count()

    def by_vllm() -> dict:
        import vllm_engine

        fixed = {"stop_ids": stop_ids(args), "max_length": args.max_prompt + length}
        fixed |= {"engine": vllm_engine.generate, "version": next(versions)}
        rloo.rollout(model, [{"prompt_ids": [0]}], k, TEMPERATURE, 1, **fixed)  # new weights: drops cached prompts
        begin = rloo.clock(model.device)
        batch, _ = rloo.rollout(model, rows, k, TEMPERATURE, length, **fixed)
        return {"seconds": rloo.clock(model.device) - begin} | counted(batch)

    engines: dict[str, Callable] = {"group engine": group_engine}
    if "generate" not in args.skip:
        engines["generate, dynamic cache"] = partial(generate, cache=None)
        engines["generate, static cache"] = partial(generate, cache="static")
    if vllm_name:
        engines[vllm_name] = by_vllm
    return {"decode": timed(engines, args.repetitions, args.device, memory=False)}


def phases_job(folder: str, args: dict, out: str) -> dict:
    """The lanes of training."""
    args = Args(**args)
    set_up(args)
    batch = random_batch(args)
    policy = load_policy(folder, args, "float32")
    lanes = {f"{layout} rows": partial(train, policy, batch, args.dtype, layout) for layout in LAYOUTS}
    return {"training": timed(lanes, args.repetitions, args.device)}


# ---- Whole updates ---------------------------------------------------------------------------------------------------


def rloo_flags(folder: Path, args: Args) -> dict:
    """Flags of rloo.py to train on the inputs in `folder`, with a batch of all prompts."""
    total = args.prompts * args.rloo_k
    return {
        "sft_model_path": f"{folder}/policy",
        "reward_model_path": f"{folder}/reward",
        "dataset_name": f"{folder}/data",
        "max_prompt_length": args.max_prompt,
        "rloo_k": args.rloo_k,
        "response_length": args.response_length,
        "temperature": TEMPERATURE,
        "kl_coef": KL_COEF,
        "learning_rate": LEARNING_RATE,
        "per_device_train_batch_size": total,
        "gradient_accumulation_steps": 1,
        "local_rollout_forward_batch_size": total,
        "total_episodes": (args.updates + 1) * total,
        "num_eval_prompts": 0,
        "num_sample_generations": 0,
        "dtype": args.dtype,
        "device": args.device,
        "seed": args.seed,
    }


def rloo_job(flags: dict, stops: list[int], out: str) -> dict:
    """Median seconds of an update of rloo.py with these stop tokens, and peak GiB."""
    with mock.patch.object(rloo, "stop_token_ids", lambda *_: stops):
        rloo.main(rloo.Args(**flags, output_dir=f"{out}/run"))
    lines = study.read_lines(Path(out, "run", "metrics.jsonl"))
    lengths = {line["completions/mean_length"] for line in lines}
    assert lengths == {flags["response_length"]}, f"mean lengths: {lengths}"
    ends = [line["episode"] / line["eps"] for line in lines]  # seconds since the first update began
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    return {"seconds": median(seconds), "peak_gb": lines[-1]["memory/peak_gb"]}


def measure_updates(folder: Path, args: Args, trl_names: dict[str, str], vllm_name: str) -> dict:
    """For each trainer and round: median seconds of an update, and peak GiB."""
    flags = rloo_flags(folder, args)
    lanes = {f"rloo.py, {layout} rows": (sys.executable, {"layout": layout}) for layout in LAYOUTS}
    if args.vllm:
        lanes[f"rloo.py, {vllm_name}"] = (args.vllm, {"rollout_engine": f"{HERE}/vllm_engine.py:generate"})
    lanes |= {name: (python, {}) for name, python in trl_names.items()}
    found: dict[str, list] = {name: [] for name in lanes}
    for _, (name, (python, more)) in itertools.product(range(args.rounds), lanes.items()):
        print(f"updates: {name}", flush=True)
        out = Path(tempfile.mkdtemp(dir=folder))
        if name in trl_names:
            given = default_flags(**flags, frozen=args.dtype)
            one = run_job(python, environment.__file__, out, "updates", folder=folder, flags=given)
        else:  # vLLM would refuse an id that no token has, and needs none
            stops = [] if "rollout_engine" in more else [NEVER]
            one = run_job(python, __file__, out, "rloo", flags=flags | more, stops=stops)
        found[name].append(one)
    return {"whole update": found}


def vllm_version(python: str) -> str:
    """The version of vLLM in an environment."""
    code = (
        "import sys; from importlib.metadata import packages_distributions, version; "
        "found = packages_distributions().get('vllm') or sys.exit('vLLM is missing: see benchmark/speed/README.md'); "
        "print(f'vLLM {version(found[0])}')"
    )
    return call([python, "-c", code]).splitlines()[-1]


def compare(args: Args) -> dict:
    """Decoding, phases and whole updates."""
    trl_names = {} if "updates" in args.skip else trl_versions(args.trl)
    vllm_name = vllm_version(args.vllm) if args.vllm else ""
    found = {}
    with tempfile.TemporaryDirectory(prefix="throughput-") as temporary:
        folder = Path(temporary)
        write_inputs(args, folder)
        given = {"folder": folder, "args": dataclasses.asdict(args)}
        for part, python, more in (("decode", args.vllm, {"vllm_name": vllm_name}), ("phases", None, {})):
            if part not in args.skip:
                print(part, flush=True)
                found |= run_job(python or sys.executable, __file__, folder / part, part, **given, **more)
        if "updates" not in args.skip:
            found |= measure_updates(folder, args, trl_names, vllm_name)
    return {"args": dataclasses.asdict(args), "machine": describe(args), "found": found}


# ---- length -------------------------------------------------------------------------------------------------------

GROUPS = ((256, 8), (64, 2))  # of `length`: tokens of the prompt, completions


def length_job(args: dict, response_lengths: list[int], out: str) -> dict:
    """R -> layout -> its rounds, of one shape and group."""
    args = Workload(**args)
    set_up(args)
    policy = AutoModelForCausalLM.from_config(shape_config(args), attn_implementation="sdpa").to(args.device).eval()
    found = {}
    for R in (min(response_lengths), *response_lengths):  # once more at first: libraries set themselves up
        batch = random_batch(dataclasses.replace(args, response_length=R))
        lanes = {layout: partial(train, policy, batch, args.dtype, layout) for layout in LAYOUTS}
        found[R] = timed(lanes, args.repetitions, args.device)
    return found


def over_lengths(args: Length) -> dict:
    found = {}
    own = {field.name: getattr(args, field.name) for field in dataclasses.fields(Workload)}
    for shape, (prompt, k) in itertools.product(args.shapes, GROUPS):
        part = f"{shape}: prompt of {prompt} tokens, {k} completions"
        print(part, flush=True)
        workload = own | {"shape": shape, "prompts": 1, "min_prompt": prompt, "max_prompt": prompt, "rloo_k": k}
        with tempfile.TemporaryDirectory() as out:
            given = {"args": workload, "response_lengths": args.response_lengths}
            found[part] = run_job(sys.executable, __file__, Path(out), "length", **given)
    return {"args": dataclasses.asdict(args), "machine": describe(args), "found": found}


# ---- Tables and picture ----------------------------------------------------------------------------------------------


def describe(args: Workload) -> str:
    """The machine and the versions in a line."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.partition(": ")[2] for line in info.splitlines() if line.startswith("model name")]
    name = torch.cuda.get_device_name(args.device) if args.device != "cpu" else (names or [platform.machine()])[0]
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, commit {commit or 'unknown'}"
    return f"{name}, threads: {args.threads}, {versions}"


def ratios(lanes: dict[str, list[dict]]) -> dict[str, list[float]]:
    """How many times as long each lane takes as the first one, round by round; per real token where there are any,
    since lanes may have different ones."""
    first, *_ = lanes.values()

    def each(one: dict) -> float:
        return one["seconds"] / one.get("tokens", 1)

    return {name: [each(b) / each(a) for a, b in zip(first, lane)] for name, lane in lanes.items()}


def times_the_first(lanes: dict[str, list[dict]], name: str) -> str:
    """The median of a lane's ratios and, of several rounds, their range."""
    found = ratios(lanes)[name]
    several = len(found) > 1 and name != next(iter(lanes))
    return f"{median(found):.2f}" + (f" ({min(found):.2f} to {max(found):.2f})" if several else "")


PARTS = ("decode", "training", "whole update")


def table(result: dict) -> str:
    rows = [["", "rounds", "ms", "peak, GiB", "times the first (range)"]]
    for part in (part for part in PARTS if part in result["found"]):
        lanes = result["found"][part]
        for name, rounds in lanes.items():
            peaks = [one["peak_gb"] for one in rounds if one.get("peak_gb")]
            cells = [
                f"{part}: {name}",
                str(len(rounds)),
                f"{1e3 * median(one['seconds'] for one in rounds):,.0f}",
                f"{max(peaks):.2f}" if peaks else "",
                times_the_first(lanes, name),
            ]
            rows.append(cells)
    return study.markdown(rows)


DECODED = {  # of decode's further records: a part of their command -> title
    "--response_length 256 --repetitions 3": "8 prompts, R = 256, 8 key heads",
    "--stop_share 0.01": "the same, each step ends with probability 1%",
    "--response_length 1024 --repetitions 2": "4 prompts, R = 1,024, 2 key heads",
}


def tables() -> dict[str, str]:
    """All tables of the page, by their names, from the records."""
    records = json.loads((HERE / "throughput.json").read_text())
    first, *_ = records.values()
    decoded = [["workload", "rounds", "group engine, tokens per second", "vLLM", "its time over ours (range)"]]
    for words, title in DECODED.items():
        (lanes,) = (result["found"]["decode"] for command, result in records.items() if words in command)
        rates = [f"{median(one['tokens'] / one['seconds'] for one in rounds):,.0f}" for rounds in lanes.values()]
        (vllm,) = (name for name in lanes if name.startswith("vLLM"))
        decoded.append([title, str(len(lanes[vllm])), *rates, times_the_first(lanes, vllm)])
    return {"tldr": table(first), "decode": study.markdown(decoded)}


def draw_length(result: dict, path: Path):
    """Over R, a line for each model and group: how much longer plain rows take, and the memory of group rows."""
    figure, ((times, memory),) = study.canvas(2, 11, 4.4)
    for number, (part, found) in enumerate(result["found"].items()):
        lengths = [int(R) for R in found]
        style = {"color": f"C{number}", "marker": "o", "markersize": 4, "label": part}
        plain = [ratios(lanes)["plain"] for lanes in found.values()]
        times.plot(lengths, [median(x) for x in plain], **style)
        times.fill_between(lengths, [min(x) for x in plain], [max(x) for x in plain], color=f"C{number}", alpha=0.2)
        peaks = [lanes["group"][0]["peak_gb"] / lanes["plain"][0]["peak_gb"] for lanes in found.values()]
        memory.plot(lengths, peaks, **style)
    rounds = result["args"]["repetitions"]
    times.set_title("Above 1 group rows are faster")
    range_of = f"line: median; band: range of {rounds} rounds"
    times.set(ylabel=f"time in plain rows / time in group rows\n({range_of})", ylim=(0, None))
    memory.set_title("Below 1 group rows need less")
    memory.set(ylabel="peak memory in group rows / in plain rows\n(tensors beyond weights and batch)", ylim=(0, 1.1))
    for panel in (times, memory):
        panel.axhline(1, color="black", linewidth=1, linestyle="--")
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, lengths)
        panel.set_xlabel("R: tokens per completion")
    times.legend()
    title = "Forward + backward of one group of rows, vocabulary of 8,192, float32"
    figure.suptitle(f"{title}\n{result['machine']}", fontsize=9)
    study.save(figure, path)


# ---- The command line ------------------------------------------------------------------------------------------------


def command_line(words: list[str]):
    import tyro

    transformers.logging.disable_progress_bar()
    if words[:1] == ["report"]:
        study.insert(HERE / "README.md", tables())
        return draw_length(json.loads((HERE / "length.json").read_text()), HERE / "length.png")
    lengths = words[:1] == ["length"]
    config = () if lengths else (tyro.conf.FlagCreatePairsOff, tyro.conf.UseAppendAction)
    args = tyro.cli(Length if lengths else Args, args=words[lengths:], config=config, use_underscores=True)
    settle(args)
    result = over_lengths(args) if lengths else compare(args)
    path = Path(args.output)
    if not lengths:
        print(f"\n{result['machine']}\n\n{table(result)}")
        command = " ".join(["python", "benchmark/speed/throughput.py", *words])
        result = (json.loads(path.read_text()) if path.is_file() else {}) | {command: result}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"numbers: {path}")


JOBS = {"decode": decode_job, "phases": phases_job, "rloo": rloo_job, "length": length_job}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        answer_job(JOBS)
    else:
        command_line(sys.argv[1:])
