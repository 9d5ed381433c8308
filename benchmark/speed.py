"""How long does an update take: rloo.py in group rows and in plain rows, and TRL's RLOO trainers?

    python benchmark/speed.py --trl trl0/bin/python trl1/bin/python                    # on a CPU: ten minutes
    python benchmark/speed.py --shape pythia-14m --k 2 4 8                             # what does a larger k cost?
    python benchmark/speed.py --shape pythia-1b --device cuda --trl trl1/bin/python    # on a GPU: five minutes

The last column compares with rloo.py in group rows. Trainers take turns, A B C A B C, and ratios are of times within a
round, so that a slow minute slows all. Each run is a process of its own. The first updates do not count. Models have
random weights. Completions have full length, or end with a probability of 2% at each token. Micro-batches are those
with which each trainer is fastest. TRL has the same models, prompts, k, T, temperature, β and threads; sdpa, fused
AdamW, no gradient checkpointing, no vLLM; 1.x its dynamic cache. Both read the same reward model's score from texts.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import log
from statistics import median
from typing import Literal

import runs
import torch
import transformers
import trl_run
import tyro
from runs import Records
from tokenizers import Tokenizer, models, pre_tokenizers

FOLDER = runs.RUNS / "speed"  # of the latest measurement
TEMPERATURE = 0.7
ENDS = 0.02  # probability of the stop token at each step where completions end


@dataclass(frozen=True)
class Shape:
    """A model and the sizes of a run."""

    config: type
    sizes: dict
    vocabulary: int
    lengths: tuple[int, int]  # the range of the prompts' lengths in tokens
    T: int
    k: int
    prompts: int  # per update
    ours: int  # prompts in a micro-batch of rloo.py
    theirs: int  # and of TRL
    dtype: str = "bfloat16"
    rounds: int = 1
    warm_up: int = 1  # updates that do not count
    timed: int = 1
    reward_model: bool = False  # a reward model of the policy's shape; else a function
    ends: tuple[bool, ...] = (False,)  # do completions end? GPT-NeoX only


NEOX, LLAMA = transformers.GPTNeoXConfig, transformers.LlamaConfig
PYTHIA_14M = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512}
PYTHIA_70M = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048}
PYTHIA_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8, "intermediate_size": 8192}
QWEN = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 4}
QWEN |= {"intermediate_size": 8960, "tie_word_embeddings": True}
SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM2 |= {"intermediate_size": 1536, "tie_word_embeddings": True}
MINI = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SHAPES = {
    "pythia-14m": Shape(NEOX, PYTHIA_14M, 50_304, (224, 448), 53, 4, 4, 4, 4, "float32", timed=3),
    "pythia-70m": Shape(NEOX, PYTHIA_70M, 50_304, (224, 448), 53, 4, 4, 4, 1, "float32", 2, timed=5, reward_model=True),
    "mini": Shape(NEOX, MINI, 1_024, (64, 112), 53, 4, 8, 8, 8, "float32", 2, timed=10, reward_model=True),
    "smollm2-135m": Shape(LLAMA, SMOLLM2, 49_152, (24, 64), 16, 8, 8, 4, 4, "float32", 2, timed=5),
    "pythia-1b": Shape(NEOX, PYTHIA_1B, 50_304, (336, 448), 53, 4, 64, 16, 8, timed=2, ends=(False, True)),
    "qwen2.5-1.5b": Shape(LLAMA, QWEN, 151_936, (192, 256), 512, 8, 32, 2, 2, warm_up=2, timed=3),
    "tiny": Shape(NEOX, TINY, 512, (4, 8), 6, 2, 4, 4, 4, warm_up=2, ends=(False, True)),
}
OURS = ["--num_eval_prompts", "0", "--save_steps", "0"]
REWARD = """def sevens(completions, **columns):
    return [text.count("7") / (1 + len(text)) for text in completions]
"""


# ---- Inputs ----------------------------------------------------------------------------------------------------------


def write_inputs(shape: Shape, device: str):
    """Writes policy/, ends/ (a policy whose completions end), reward/, data/ and sevens.py. Word w<i> is token i, so
    that decoded text becomes the same tokens again."""
    eos, pad = shape.vocabulary - 2, shape.vocabulary - 1
    words = {f"w{i}": i for i in range(eos)} | {"<eos>": eos, "[PAD]": pad}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<eos>", "pad_token": "[PAD]", "clean_up_tokenization_spaces": False}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    tokens = {"vocab_size": shape.vocabulary, "bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad}
    config = shape.config(**shape.sizes, **tokens, num_labels=1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    torch.manual_seed(1)
    with torch.device(device):
        dtype = getattr(torch, shape.dtype)
        policy = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        policy.save_pretrained(FOLDER / "policy")
        if shape.reward_model:
            reward = transformers.AutoModelForSequenceClassification.from_config(config, dtype=dtype)
            reward.save_pretrained(FOLDER / "reward")
        if True in shape.ends:
            let_it_end(policy, eos)
            policy.save_pretrained(FOLDER / "ends")
    for name in ("policy", "reward", "ends"):
        tokenizer.save_pretrained(FOLDER / name)
    low, high = shape.lengths
    counts = torch.randint(low, high + 1, (shape.prompts,)).tolist()  # each update has the same prompts
    rows = [{"prompt": " ".join(f"w{i}" for i in torch.randint(eos, (count,)).tolist())} for count in counts]
    (FOLDER / "sevens.py").write_text(REWARD)
    (FOLDER / "data").mkdir()
    (FOLDER / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@torch.no_grad()
def let_it_end(model, stop: int):
    """Gives the stop token a probability of about ENDS at each step: component 0 of the last hidden state is always 1,
    and the stop token's row of the head reads nothing else."""
    norm, head = model.gpt_neox.final_layer_norm, model.get_output_embeddings().weight
    norm.weight[0], norm.bias[0] = 0.0, 1.0
    ids = torch.arange(1, 65, device=model.device)[None]
    others = model(ids).logits.float().div(TEMPERATURE).logsumexp(-1).mean()
    head[stop] = 0.0
    head[stop, 0] = TEMPERATURE * (others + log(ENDS / (1 - ENDS)))


# ---- Measuring -------------------------------------------------------------------------------------------------------


def flags(shape: Shape, device: str, k: int, prompts: int, ends: bool = False) -> list[str]:
    """Returns flags that rloo.py and trl_run.py share; `prompts` is the size of a micro-batch."""
    given = {
        "sft_model_path": FOLDER / ("ends" if ends else "policy"),
        "dataset_name": FOLDER / "data",
        "rloo_k": k,
        "response_length": shape.T,
        "temperature": TEMPERATURE,
        "kl_coef": 0.05,
        "learning_rate": 1e-6,
        "dtype": shape.dtype,
        "device": device,
        "per_device_train_batch_size": k * prompts,
        "gradient_accumulation_steps": shape.prompts // prompts,
        "total_episodes": (shape.warm_up + shape.timed) * k * shape.prompts,
        "local_rollout_forward_batch_size": k * shape.prompts,
        "reward_model_path": FOLDER / "reward" if shape.reward_model else None,
        "reward_fns": None if shape.reward_model else f"{FOLDER}/sevens.py:sevens",
    }
    return trl_run.words_of(given)


def commands(shape: Shape, device: str, trl: Sequence[str], ks: Sequence[int]) -> Iterator[tuple]:
    """Yields what is compared: the beginning of a record, and a command."""
    pythons = {trl_run.versions(python): python for python in trl}
    for k, ends, trainer in product(ks or [shape.k], shape.ends, ["group rows", "plain rows", *pythons]):
        if trainer in pythons:
            prompts, command = shape.theirs, [pythons[trainer], "benchmark/trl_run.py", "rloo", "--reward_by", "text"]
        elif trainer == "plain rows" and ends:
            continue  # they differ from group rows in prompts, not in completions
        else:
            prompts, command = shape.ours, [sys.executable, "rloo.py", *OURS, "--layout", trainer.removesuffix(" rows")]
            trainer = f"rloo.py, {trainer}"
        record = {"trainer": trainer, "size": k * prompts, "k": k, "completions": "ended" if ends else "full"}
        yield record, [*command, *flags(shape, device, k, prompts, ends)]


def measure(name: str, shape: Shape, device: str, trl: Sequence[str], ks: Sequence[int], records: Records):
    """Adds a record for each trainer, k and kind of completions, anew after each run: the seconds of each counted
    update, those of its parts and, on a GPU, the peak memory in GiB."""
    write_inputs(shape, device)
    torch.cuda.empty_cache()  # the trainers run in other processes
    found = [(record | {"updates": []}, command) for record, command in commands(shape, device, trl, ks)]
    for turn in range(shape.rounds):
        for number, (record, command) in enumerate(found):
            environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
            if record["trainer"].startswith("TRL"):  # without this it runs out of memory
                environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
            out = runs.run(command, FOLDER / f"{number}-{turn}", **environment)
            updates = runs.lines(out / "metrics.jsonl")[shape.warm_up :]
            record["updates"].append([round(runs.seconds(update), 3) for update in updates])
            for part in ("time/rollout", "time/reference", "time/reward", "time/train", "memory/peak_gb"):
                if part in updates[0]:
                    record.setdefault(part, []).extend(round(update[part], 3) for update in updates)
            key = "{trainer}, {size}, {completions}, k = {k}".format(**record)
            print(f"{key}: {record['updates']}", flush=True)
            records.add(f"{name}: {key}", **record)


def table(found: Sequence[dict]) -> str:
    rows = [
        ["k, completions", "trainer", "micro-batch", "s (range)", "rollout, reference, training: s", "peak, GiB", "×"]
    ]
    base = {(row["k"], row["completions"]): row for row in found if row["trainer"] == "rloo.py, group rows"}
    for row in found:
        parts = [row.get(f"time/{part}") for part in ("rollout", "reference", "train")]
        pairs = zip(row["updates"], base[row["k"], row["completions"]]["updates"])
        rows.append(
            [
                f"{row['k']}, {row['completions']}",
                row["trainer"],
                str(row["size"]),
                median_and_range([x for turn in row["updates"] for x in turn]),
                ", ".join(f"{median(part):.2f}" for part in parts if part),
                f"{max(row['memory/peak_gb']):.1f}" if "memory/peak_gb" in row else "",
                median_and_range([one / other for turns in pairs for one, other in zip(*turns)]),
            ]
        )
    return runs.markdown(rows)


def median_and_range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(
    shape: Literal[*SHAPES] = "pythia-70m",
    device: str = "cpu",
    trl: tuple[str, ...] = (),
    k: tuple[int, ...] = (),
    again: bool = False,
):
    """Measures and records a shape, and prints its table.

    Args:
        shape: model and sizes
        device: cpu or cuda
        trl: pythons of environments with TRL
        k: completions per prompt, in place of the shape's, for as many prompts per update
        again: compare with the record and write nothing
    """
    name = f"{shape}, {device}" + (f", k of {k}" if k else "")
    records = Records("speed", again)
    if again or not any(key.startswith(f"{name}: ") for key in records):
        print(torch.cuda.get_device_name() if device != "cpu" else f"{torch.get_num_threads()} threads", flush=True)
        measure(name, SHAPES[shape], device, trl, k, records)
    found = [record for key, record in records.items() if key.startswith(f"{name}: ")]
    print(table(found), *sorted({str(record["made"]) for record in found}), sep="\n")


if __name__ == "__main__":
    tyro.cli(main)
