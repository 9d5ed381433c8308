"""What to measure first on a GPU: is it right, how fast is an update, where does its time go?

    git show 8212336:rloo.py > before.py
    python benchmark/gpu/hour.py --trl trl1/bin/python --other before.py    # all parts; ../requirements.txt makes trl1
    python benchmark/gpu/hour.py --parts check 1b profile-1b                # some, without TRL: five minutes
    python benchmark/gpu/hour.py --device cpu --parts 1b                    # a trial with tiny models

Each part prints its table and writes it to <out>/<part>.txt when it is done: check and rewards take two minutes on an
H100, the runs of rloo.py in 1b twenty seconds each and those of TRL two minutes.

check        check.py: all lines
1b           updates of a model in the shape of pythia-1b, prompts of 336 to 448 tokens, T = 53, k = 4: rloo.py in both
             layouts, --other versions of it and RLOOTrainer of TRL (--trl); completions of full length, and ones that
             end with a probability of 2% at each token
0.5b, 1.5b   the same in the shape of Qwen2.5, T = 512, k = 8; 1.5b: rloo.py in group rows alone
profile-...  profiled.py for one of the three
rewards      mini TL;DR in bfloat16 against float32: scores of three seeds
real         benchmark/smollm/chain.py, after its prepare.py

Models have random weights but in the last two parts. Of the updates of a run the first two do not count.
"""

import argparse
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median

import gpu_memory
import torch
import transformers

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE.parent / "speed")]
import common  # noqa: E402
import throughput  # noqa: E402

import rloo  # noqa: E402

SHAPES = {  # model, and sizes of a run: chunk completions are an update
    "1b": (gpu_memory.PYTHIA_1B, gpu_memory.Args(k=4, m=64, P=448, T=53, chunk=256)),
    "0.5b": (gpu_memory.QWEN_05B, gpu_memory.Args(k=8, m=16, P=256, T=512, chunk=128)),
    "1.5b": (gpu_memory.QWEN_15B, gpu_memory.Args(k=8, m=16, P=256, T=512, chunk=256)),
}
TINY = (gpu_memory.Model("Qwen2.5", 0, 2, 64, 64, 64, 512), gpu_memory.Args(k=2, m=4, P=16, T=6, chunk=8))
WARM_UP, TIMED = 2, 3  # updates
ENDS = 0.02  # probability of the stop token where completions end
TEMPERATURE = 0.7
EPISODES = 3_200  # of a run of the part `rewards`


REWARD = """def sevens(completions, **columns):
    return [text.count("7") / (1 + len(text)) for text in completions]
"""


# ---- Models of random weights ----------------------------------------------------------------------------------------


def config_of(model: gpu_memory.Model, **tokens):
    """The configuration of a model of gpu_memory.py, with layers of Llama for Qwen2.5, which has its own tokenizer."""
    sizes = {"vocab_size": model.vocabulary, "hidden_size": model.width, "num_hidden_layers": model.layers}
    sizes |= {"intermediate_size": model.feed_forward, **tokens, "bos_token_id": None}
    if model.family == "GPT-NeoX":
        return transformers.GPTNeoXConfig(**sizes, num_attention_heads=8)
    heads = {"num_attention_heads": model.width // 64, "num_key_value_heads": model.key_width // 64}
    return transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True)


@torch.no_grad()
def let_it_end(model, stop: int):
    """Gives the stop token a probability of about ENDS at each step. Component 0 of the residual stream is made the
    same everywhere, and large; after the last norm it is about 0.01, and the head's row of the stop token reads
    nothing else."""
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "attention.dense.weight", "dense_4h_to_h.weight")):
            weight[0] = 0.0  # the rows that add to it
    model.get_input_embeddings().weight[:, 0] = 100.0
    ids = torch.arange(1, 65, device=model.device)[None]
    norm = [weight for name, weight in weights.items() if "norm" in name and name.endswith("weight")][-1]
    norm[0] *= 0.01 / rloo.body_of(model)(ids)[0][0, :, 0].float().mean()
    others = model(ids).logits[0].float().div(TEMPERATURE).logsumexp(-1).mean()
    row = torch.zeros_like(norm)
    row[0] = TEMPERATURE * (others + torch.tensor(ENDS / (1 - ENDS)).log()) / 0.01
    model.get_output_embeddings().weight[stop] = row


def write_inputs(folder: Path, model: gpu_memory.Model, run: gpu_memory.Args, device: str):
    """policy/, whose completions hardly ever end, and ends/; data/ with prompts of 3/4 P to P tokens."""
    prompts = (WARM_UP + TIMED) * run.chunk // run.k
    tokens = throughput.write_texts(folder, model.vocabulary, prompts, (3 * run.P // 4, run.P + 1))
    torch.manual_seed(1)
    with torch.device(device):
        policy = transformers.AutoModelForCausalLM.from_config(config_of(model, **tokens), dtype=torch.bfloat16).eval()
    policy.save_pretrained(folder / "policy")
    let_it_end(policy, tokens["eos_token_id"])
    (folder / "sevens.py").write_text(REWARD)
    (folder / "reward").rename(folder / "ends")  # with the tokenizer
    policy.save_pretrained(folder / "ends")


# ---- Parts -----------------------------------------------------------------------------------------------------------


def flags_of(args, folder: Path, run: gpu_memory.Args, model="policy") -> dict:
    """Flags of rloo.py and of trl/run.py."""
    flags = {"sft_model_path": folder / model, "reward_model_path": None, "rloo_k": run.k, "response_length": run.T}
    flags |= {"reward_fns": f"{folder / 'sevens.py'}:sevens", "dtype": "bfloat16", "device": args.device}
    flags |= {"per_device_train_batch_size": run.m, "gradient_accumulation_steps": run.chunk // run.m}
    flags |= {"local_rollout_forward_batch_size": run.chunk, "temperature": TEMPERATURE}
    return flags | {"total_episodes": (WARM_UP + TIMED) * run.chunk}


def speed(args, shape: str) -> str:
    model, run = TINY if args.device == "cpu" else SHAPES[shape]
    rows = [["", "s / update (range)", "rollout, reference, training", "completions / s", "peak, GiB", "log-prob gap"]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder, model, run, args.device)
        lanes = {}
        for ends in ("full", "ends"):
            flags = flags_of(args, folder, run, "policy" if ends == "full" else "ends")
            lanes[f"rloo.py, group rows, {ends}"] = throughput.rloo_py(folder, **flags)
            if args.trl and shape != "1.5b":
                half = max(run.k, run.m // 2)  # for its memory
                flags |= {"per_device_train_batch_size": half, "gradient_accumulation_steps": run.chunk // half}
                words = throughput.shared_flags(folder, **flags)
                less = ["env", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]  # else it runs out
                lanes[f"TRL, {ends}"] = [*less, args.trl, HERE.parent / "trl" / "run.py", "rloo", *words]
        flags = flags_of(args, folder, run)
        if shape != "1.5b":
            lanes["rloo.py, plain rows, full"] = throughput.rloo_py(folder, layout="plain", **flags)
        for file in args.other:
            lanes[f"{file.name}, group rows, full"] = throughput.rloo_py(folder, file, **flags)
        for name, command in lanes.items():
            try:
                rows.append([name, *cells(throughput.run(command, folder, WARM_UP)["updates"], run)])
                print(rows[-1], flush=True)
            except SystemExit as error:  # the others go on
                print(error, flush=True)
    formula = gpu_memory.needed(model, run)
    peak = max(formula["training"], formula["rollout"]) / 2**30
    note = f"Full length: {peak:.1f} GiB by gpu_memory.py; {operations(model, run):.2e} operations in training"
    return f"{common.markdown(rows)}\n\n{note}"


def cells(updates: list[dict], run: gpu_memory.Args) -> list[str]:
    seconds = [update["seconds"] for update in updates]
    parts = [median(update.get(f"time/{part}", 0) for update in updates) for part in ("rollout", "reference", "train")]
    gap = mean(update.get("val/rollout_logprob_gap", 0) for update in updates)
    peak = max(update.get("memory/peak_gb", 0) for update in updates)
    spread = f"{median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    times = ", ".join(f"{part:.2f}" for part in parts)
    return [spread, times, f"{run.chunk / median(seconds):.1f}", f"{peak:.1f}", f"{gap:.4f}"]


def operations(model: gpu_memory.Model, run: gpu_memory.Args) -> float:
    """Of the matrix products with weights of a training step, completions of full length: 6 for each weight and token,
    8 for the head, which backward computes again."""
    head = model.vocabulary * model.width
    groups = run.chunk / run.k
    layers = max(0, model.parameters - head * (2 if model.family == "GPT-NeoX" else 1))
    return groups * (6 * layers * (0.875 * run.P + run.k * run.T) + 8 * head * run.k * run.T)


def profile(args, shape: str) -> str:
    model, run = TINY if args.device == "cpu" else SHAPES[shape]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder, model, run, args.device)
        command = throughput.rloo_py(folder, HERE / "profiled.py", **flags_of(args, folder, run))
        shown = output_of([*command, f"--output_dir={folder / 'out'}"])
    return f"{shape}, full length\n\n{shown[shown.index('| seconds') :]}"


def rewards(args) -> str:
    lanes = {f"rloo.py, {dtype}": ("rloo.py", dtype) for dtype in ("float32", "bfloat16")}
    lanes |= {f"{file.name}, bfloat16": (file, "bfloat16") for file in args.other}
    rows = [["three seeds", "score in the last tenth of the updates", "log-prob gap"]]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        flags = {"sft_model_path": rloo.MINI_TLDR / "sft", "reward_model_path": rloo.MINI_TLDR / "reward"}
        flags |= {"dataset_name": rloo.MINI_TLDR, "learning_rate": 2.5e-4, "total_episodes": EPISODES}
        flags |= {"device": args.device, "num_eval_prompts": 0, "save_steps": 0}
        runs = {(name, seed): Path(folder, f"{name} {seed}") for name in lanes for seed in (1, 2, 3)}
        commands = []
        for (name, seed), out in runs.items():
            script, dtype = lanes[name]
            given = flags | {"dtype": dtype, "seed": seed, "output_dir": out}
            commands.append([sys.executable, script, *(f"--{flag}={value}" for flag, value in given.items())])
        list(pool.map(output_of, commands))
        for name in lanes:
            found = [common.read_lines(runs[name, seed] / "metrics.jsonl") for seed in (1, 2, 3)]
            last = [mean(line["objective/scores"] for line in lines[-max(1, len(lines) // 10) :]) for lines in found]
            gap = mean(line["val/rollout_logprob_gap"] for lines in found for line in lines)
            rows.append([name, common.plus_minus(last, decimals=3), f"{gap:.4f}"])
    return common.markdown(rows)


def output_of(command: list) -> str:
    """What a program prints; raises its error."""
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


PARTS = {
    "check": lambda args: output_of([sys.executable, HERE / "check.py", f"--device={args.device}"]),
    **{shape: lambda args, shape=shape: speed(args, shape) for shape in SHAPES},
    **{f"profile-{shape}": lambda args, shape=shape: profile(args, shape) for shape in SHAPES},
    "rewards": rewards,
    "real": lambda args: output_of([sys.executable, HERE.parent / "smollm" / "chain.py"]),
}


def machine(device: str) -> str:
    """The card, versions, the commit, and how fast the card is."""
    commit = common.provenance()["rloo.py"]
    if device == "cpu":
        return f"{throughput.cpu()}, torch {torch.__version__}, transformers {transformers.__version__}, {commit}"
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for repeats in (3, 20):  # the first warm up
        start.record()
        for _ in range(repeats):
            x @ x
        end.record()
    torch.cuda.synchronize()
    rate = 20 * 2 * 8192**3 / (start.elapsed_time(end) / 1e3)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, rloo.py of commit {commit}"
    return f"{torch.cuda.get_device_name(device)}, {versions}; a large product in bfloat16: {rate:.2e} operations / s"


def main(args) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    head = machine(args.device)
    print(head, flush=True)
    failed = 0
    for part in args.parts:
        try:
            text = PARTS[part](args)
        except (Exception, SystemExit):
            failed += 1
            text = traceback.format_exc()
        print(f"\n== {part}\n{text}", flush=True)
        (args.out / f"{part}.txt").write_text(f"{head}\n\n{text}\n", encoding="utf-8")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("hour"), help="folder for the tables")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trl", help="python of an environment with TRL 1.x")
    parser.add_argument("--other", type=Path, nargs="+", default=[], help="other versions of rloo.py")
    sys.exit(main(parser.parse_args()) > 0)
