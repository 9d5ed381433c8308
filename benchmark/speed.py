"""How long does an update take: rloo.py in group rows and in plain rows, and TRL's RLOO trainers?

    python benchmark/speed.py --trl trl0/bin/python trl1/bin/python                    # on a CPU: ten minutes
    python benchmark/speed.py --shape pythia-14m --k 2 4 8                             # what does a larger k cost?
    python benchmark/speed.py --shape pythia-1b --device cuda --trl trl1/bin/python    # on a GPU: five minutes
    python benchmark/speed.py --shape qwen2.5-1.5b --device cuda --profile             # where the time goes

The last column compares with rloo.py in group rows. Trainers take turns, A B C A B C, and ratios are of times within a
round, so that a slow minute slows all. Each run is a process of its own. The first updates do not count. Models have
random weights. Completions have full length, or end with a probability of 2% at each token. Micro-batches are those
with which each trainer is fastest. TRL has the same models, prompts, k, T, temperature, β and threads; sdpa, fused
AdamW, no gradient checkpointing, no vLLM; 1.x its dynamic cache. Both read the same reward model's score from texts.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import runs
import torch
import transformers
import tyro
from runs import Records
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile

import rloo

TEMPERATURE = 0.7
ENDS = 0.02  # probability of the stop token at each step where completions end


@dataclass(frozen=True)
class Shape:
    """A model and the sizes of a run."""

    config: type
    sizes: dict
    vocabulary: int
    prompts: tuple[int, int]  # the range of their lengths in tokens
    T: int
    k: int
    completions: int  # per update
    ours: int  # completions in a micro-batch of rloo.py
    theirs: int  # and of TRL
    dtype: str = "bfloat16"
    rounds: int = 1
    warm_up: int = 1  # updates that do not count
    timed: int = 1
    reward_model: bool = False  # a reward model of the policy's shape; else a function
    ends: tuple[bool, ...] = (False,)  # do completions end?


NEOX, LLAMA = transformers.GPTNeoXConfig, transformers.LlamaConfig
PYTHIA_14M = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
PYTHIA_70M = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
PYTHIA_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8, "intermediate_size": 8192}
QWEN = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 4}
QWEN |= {"intermediate_size": 8960, "tie_word_embeddings": True}
SMOLLM = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM |= {"intermediate_size": 1536, "tie_word_embeddings": True}
TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES = {
    "pythia-14m": Shape(NEOX, PYTHIA_14M, 50_304, (224, 448), 53, 4, 16, 16, 16, "float32", timed=3),
    "pythia-70m": Shape(
        NEOX, PYTHIA_70M, 50_304, (224, 448), 53, 4, 16, 16, 16, "float32", rounds=2, reward_model=True
    ),
    "pythia-1b": Shape(NEOX, PYTHIA_1B, 50_304, (336, 448), 53, 4, 256, 64, 32, timed=2, ends=(False, True)),
    "qwen2.5-1.5b": Shape(LLAMA, QWEN, 151_936, (192, 256), 512, 8, 256, 16, 16, warm_up=2, timed=3),
    "smollm2-135m": Shape(LLAMA, SMOLLM, 49_152, (32, 64), 16, 8, 64, 64, 64),
    "tiny": Shape(LLAMA, TINY, 512, (4, 8), 6, 2, 8, 8, 8, warm_up=2, ends=(False, True)),
}


REWARD = """def sevens(completions, **columns):
    return [text.count("7") / (1 + len(text)) for text in completions]
"""


# ---- Inputs ----------------------------------------------------------------------------------------------------------


def write_inputs(folder: Path, shape: Shape, device: str):
    """Writes policy/, ends/ (a policy whose completions end), reward/ and data/. Word w<i> is token i, so that decoded
    text becomes the same tokens again."""
    eos, pad = shape.vocabulary - 2, shape.vocabulary - 1
    words = {f"w{i}": i for i in range(eos)} | {"<eos>": eos, "[PAD]": pad}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "[PAD]", "clean_up_tokenization_spaces": False}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    tokens = {"vocab_size": shape.vocabulary, "bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad}
    config = shape.config(**shape.sizes, **tokens, num_labels=1)
    torch.manual_seed(1)
    with torch.device(device):
        dtype = getattr(torch, shape.dtype)
        policy = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        policy.save_pretrained(folder / "policy")
        if shape.reward_model:
            reward = transformers.AutoModelForSequenceClassification.from_config(config, dtype=dtype)
            reward.save_pretrained(folder / "reward")
        if True in shape.ends:
            let_it_end(policy, eos)
            policy.save_pretrained(folder / "ends")
    for name in ("policy", "reward", "ends"):
        tokenizer.save_pretrained(folder / name)
    low, high = shape.prompts
    counts = torch.randint(low, high + 1, ((shape.warm_up + shape.timed) * shape.completions // shape.k,)).tolist()
    rows = [{"prompt": " ".join(f"w{i}" for i in torch.randint(eos, (count,)).tolist())} for count in counts]
    (folder / "sevens.py").write_text(REWARD)
    (folder / "data").mkdir()
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@torch.no_grad()
def let_it_end(model, stop: int):
    """Gives the stop token a probability of about ENDS at each step. Component 0 of the residual stream becomes large
    and the same everywhere. After the last norm it is about 0.01, and the head's row of the stop token reads nothing
    else."""
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "attention.dense.weight", "dense_4h_to_h.weight")):
            weight[0] = 0.0  # the rows that add to it
    if model.get_input_embeddings().weight is model.get_output_embeddings().weight:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.get_input_embeddings().weight[:, 0] = 100.0
    ids = torch.arange(1, 65, device=model.device)[None]
    norm = [weight for name, weight in weights.items() if "norm" in name and name.endswith("weight")][-1]
    norm[0] *= 0.01 / rloo.body_of(model)(ids)[0][0, :, 0].float().mean()
    others = model(ids).logits[0].float().div(TEMPERATURE).logsumexp(-1).mean()
    row = torch.zeros_like(norm)
    row[0] = TEMPERATURE * (others + torch.tensor(ENDS / (1 - ENDS)).log()) / 0.01
    model.get_output_embeddings().weight[stop] = row


# ---- Measuring -------------------------------------------------------------------------------------------------------


def with_k(shape: Shape, k: int) -> Shape:
    """Returns a shape with k completions for as many prompts per micro-batch and per update as before."""
    sizes = {name: getattr(shape, name) // shape.k * k for name in ("ours", "theirs", "completions")}
    return replace(shape, k=k, **sizes)


def flags(shape: Shape, folder: Path, device: str, size: int, ends: bool) -> list[str]:
    """Returns flags that rloo.py and trl_run.py share; `size`: completions of a micro-batch."""
    given = {"sft_model_path": folder / ("ends" if ends else "policy"), "dataset_name": folder / "data"}
    given |= {"rloo_k": shape.k, "response_length": shape.T, "temperature": TEMPERATURE, "kl_coef": 0.05}
    given |= {"learning_rate": 1e-6, "dtype": shape.dtype, "device": device, "per_device_train_batch_size": size}
    given |= {"gradient_accumulation_steps": shape.completions // size}
    given |= {"total_episodes": (shape.warm_up + shape.timed) * shape.completions}
    given |= {"local_rollout_forward_batch_size": shape.completions}
    if shape.reward_model:
        given |= {"reward_model_path": folder / "reward"}
    else:
        given |= {"reward_fns": f"{folder}/sevens.py:sevens"}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def trainers(shape: Shape, folder: Path, device: str, trl: list[str]) -> dict[tuple, list]:
    """Returns (trainer, micro-batch, k, "full" or "ended") -> command."""
    found = {}
    versions = "import trl, transformers as t; print(f'TRL {trl.__version__}, transformers {t.__version__}')"
    for ends in shape.ends:
        kind = shape.k, "ended" if ends else "full"
        ours = [sys.executable, "rloo.py", *flags(shape, folder, device, shape.ours, ends)]
        ours += ["--num_eval_prompts", "0", "--save_steps", "0"]
        found["rloo.py, group rows", shape.ours, *kind] = ours
        if not ends:
            found["rloo.py, plain rows", shape.ours, *kind] = [*ours, "--layout", "plain"]
        for python in trl:
            said = subprocess.run([python, "-c", versions], capture_output=True, text=True, check=True).stdout
            theirs = [python, "benchmark/trl_run.py", "rloo", *flags(shape, folder, device, shape.theirs, ends)]
            theirs += ["--reward_by", "text"] if shape.reward_model else []
            found[said.splitlines()[-1], shape.theirs, *kind] = theirs
    return found


def measure(name: str, shape: Shape, device: str, trl: list[str], ks: Sequence[int], records: Records):
    """Adds a record for each trainer, micro-batch, k and kind of completions, anew after each run: the seconds of each
    counted update, those of its parts and, on a GPU, the peak memory in GiB. What ran out of memory is recorded too."""
    runs.RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=runs.RUNS) as temporary:
        folder = Path(temporary)
        write_inputs(folder, shape, device)
        torch.cuda.empty_cache()  # the trainers run in other processes
        commands = {}
        for k in ks or (shape.k,):
            commands |= trainers(with_k(shape, k), folder, device, trl)
        found = {key: dict(zip(("trainer", "size", "k", "completions"), key), updates=[]) for key in commands}
        for turn in range(shape.rounds):
            for number, (key, command) in enumerate(commands.items()):
                environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
                if key[0].startswith("TRL"):  # without this it runs out of memory
                    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
                out = folder / f"{number}-{turn}"
                try:
                    runs.run(command, out, **environment)
                    updates = runs.lines(out / "metrics.jsonl")[shape.warm_up :]
                    found[key]["updates"].append([round(runs.seconds(update), 3) for update in updates])
                    for part in ("time/rollout", "time/reference", "time/reward", "time/train", "memory/peak_gb"):
                        if part in updates[0]:
                            found[key].setdefault(part, []).extend(round(update[part], 3) for update in updates)
                except subprocess.CalledProcessError:
                    said = Path(f"{out}.log").read_text()
                    found[key]["failed"] = "out of memory" if "out of memory" in said else said[-1500:]
                print(f"{key}: {found[key]['updates'] or found[key]['failed']}", flush=True)
                records.add(f"{name}: {key[0]}, {key[1]}, {key[3]}, k = {key[2]}", **found[key])


def table(found: list[dict]) -> str:
    rows = [
        ["k, completions", "trainer", "micro-batch", "s (range)", "rollout, reference, training: s", "peak, GiB", "×"]
    ]
    base = {(row["k"], row["completions"]): row for row in found if row["trainer"] == "rloo.py, group rows"}
    for row in found:
        kind = row["k"], row["completions"]
        head = ["{}, {}".format(*kind), row["trainer"], str(row["size"])]
        if not row["updates"]:
            rows.append([*head, row["failed"][:40].strip(), "", "", ""])
            continue
        parts = [row.get(f"time/{part}") for part in ("rollout", "reference", "train")]
        pairs = zip(row["updates"], base[kind]["updates"])
        cells = [
            median_and_range([x for turn in row["updates"] for x in turn]),
            ", ".join(f"{median(part):.2f}" for part in parts if part),
            f"{max(row['memory/peak_gb']):.1f}" if "memory/peak_gb" in row else "",
            median_and_range([one / other for turns in pairs for one, other in zip(*turns)]),
        ]
        rows.append([*head, *cells])
    return runs.markdown(rows)


def median_and_range(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""


# ---- Where the time of an update goes --------------------------------------------------------------------------------


def profiled_run(words: list[str], T: int, update: int):
    """Runs rloo.py, and prints torch.profiler's table for each part of an update. On a GPU the rollout has too many
    kernels for a profiler; its seconds are divided into the capture of CUDA graphs and the T decode steps."""
    timed, cuda_graph = rloo.timed, rloo.cuda_graph
    begun, captures = Counter(), []

    @contextmanager
    def profiled_part(times, name, device):
        begun[name] += 1
        on_gpu = device.type == "cuda"
        captures.clear()
        whole = begun[name] != update or (on_gpu and name == "rollout")
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with nullcontext() if whole else profile(activities=[activity]) as profiled, timed(times, name, device):
            yield
        if begun[name] != update:
            return
        print(f"\n{name}: {times[f'time/{name}']:.3f} s")
        if whole:
            step = (times["time/rollout"] - sum(captures)) / T
            print(f"capture of {len(captures)} CUDA graphs {sum(captures):.3f} s, a decode step {1000 * step:.2f} ms")
        else:
            column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
            print(profiled.key_averages().table(sort_by=column, row_limit=15, max_name_column_width=60))

    def timed_graph(step):
        torch.cuda.synchronize()
        start = time.perf_counter()
        replay = cuda_graph(step)
        captures.append(time.perf_counter() - start)
        return replay

    rloo.timed, rloo.cuda_graph = profiled_part, timed_graph
    rloo.command_line(words)


# ----------------------------------------------------------------------------------------------------------------------


def main(
    shape: Literal["pythia-14m", "pythia-70m", "pythia-1b", "qwen2.5-1.5b", "smollm2-135m", "tiny"] = "pythia-70m",
    device: str = "cpu",
    trl: tuple[str, ...] = (),
    k: tuple[int, ...] = (),
    profile: bool = False,
    again: bool = False,
):
    """Measures and records a shape, and prints its table.

    Args:
        shape: model and sizes
        device: cpu or cuda
        trl: pythons of environments with TRL
        k: completions per prompt, in place of the shape's, for as many prompts per update
        profile: print where the time of an update by rloo.py goes instead
        again: compare with the record and write nothing
    """
    if profile:
        sizes = replace(SHAPES[shape], warm_up=1, timed=1)
        with tempfile.TemporaryDirectory() as temporary:
            write_inputs(Path(temporary), sizes, device)
            words = flags(sizes, Path(temporary), device, sizes.ours, ends=False)
            words += ["--num_eval_prompts", "0", "--save_steps", "0", "--output_dir", f"{temporary}/out"]
            profiled_run(words, sizes.T, update=2)
        return
    name = f"{shape}, {device}" + (f", k of {k}" if k else "")
    records = Records("speed", again)
    if again or not any(key.startswith(f"{name}: ") for key in records):
        print(torch.cuda.get_device_name() if device != "cpu" else f"{torch.get_num_threads()} threads", flush=True)
        measure(name, SHAPES[shape], device, trl, k, records)
    found = [record for key, record in records.items() if key.startswith(f"{name}: ")]
    print(table(found), *sorted({str(record["made"]) for record in found}), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
