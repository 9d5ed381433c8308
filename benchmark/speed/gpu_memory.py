"""The table of README.md that says how much memory of a GPU a run needs, computed from the sizes of its models.

    python benchmark/speed/gpu_memory.py                # prints the table
    python benchmark/speed/gpu_memory.py --lora_rank 8  # the same with adapters of rank 8 in place of all weights
    python benchmark/speed/gpu_memory.py --count        # counts, on the CPU, what its formulas for activations say

The bytes that a layer keeps for backward are counted for small models of both kinds: those of all tensors that autograd
saves in a forward pass under bfloat16 autocast, weights left out, with three layers less those with two.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

GIB = 2**30
LOGIT_BYTES = 22  # for each logit of a block: float32 logits, log-probs, probabilities and their gradients
BLOCK = 2**27  # logits of a block, see completion_logprobs
FAMILIES = {"Qwen2.5": (34, 8), "GPT-NeoX": (26, 4)}  # bytes that a layer keeps of a token: · d + · f
# The same with LoRA, whose weights and residual stream are in bfloat16; and how many linear layers have an adapter.
LORA = {"Qwen2.5": (18, 8, 7), "GPT-NeoX": (19, 4, 4)}

SMALL = [("Qwen2.5", 896, 4864), ("Qwen2.5", 448, 4864), ("Qwen2.5", 896, 2432)]  # that are counted: family, d, f
SMALL += [("GPT-NeoX", 512, 2048), ("GPT-NeoX", 512, 1024), ("GPT-NeoX", 256, 2048)]


@dataclass
class Model:
    """Sizes of a policy, and of the models beside it."""

    family: str
    parameters: float
    layers: int
    width: int
    feed_forward: int
    key_width: int  # of all key heads of a layer together
    vocabulary: int
    beside: float = 0.0  # parameters of the reward model


@dataclass
class Run:
    """A row of the table."""

    name: str
    model: Model
    k: int
    micro_batch: int
    P: int
    R: int
    learning_rate: str
    chunk: int = 64  # --local_rollout_forward_batch_size
    gpus: int = 1  # over which fsdp divides parameters
    checkpointing: bool = False
    lora_rank: int = 0  # 0: all weights are trained, and the reference is another model


RUNS = [
    Run(
        "Qwen2.5-0.5B, 24 GB",
        Model("Qwen2.5", 494e6, 24, 896, 4864, 128, 151_936),
        k=8,
        micro_batch=8,
        P=256,
        R=400,
        learning_rate="1e-6",
    ),
    Run(
        "pythia-410m, 24 GB",
        Model("GPT-NeoX", 405e6, 24, 1024, 4096, 1024, 50_304, 354e6),
        k=4,
        micro_batch=32,
        P=512,
        R=53,
        learning_rate="3e-6",
    ),
    Run(
        "pythia-1b, 80 GB",
        Model("GPT-NeoX", 1012e6, 16, 2048, 8192, 2048, 50_304, 909e6),
        k=4,
        micro_batch=64,
        P=512,
        R=53,
        learning_rate="3e-6",
        chunk=256,
    ),
    Run(
        "Qwen2.5-7B, 4 × 80 GB",
        Model("Qwen2.5", 7616e6, 28, 3584, 18_944, 512, 152_064),
        k=8,
        micro_batch=16,
        P=256,
        R=512,
        learning_rate="1e-6",
        gpus=4,
        checkpointing=True,
    ),
    Run(
        "Qwen2.5-3B, 24 GB, LoRA of rank 32",
        Model("Qwen2.5", 3086e6, 36, 2048, 11_008, 256, 151_936),
        k=8,
        micro_batch=8,
        P=256,
        R=512,
        learning_rate="1e-5",
        chunk=32,
        checkpointing=True,
        lora_rank=32,
    ),
    Run(
        "Qwen2.5-7B, 80 GB, LoRA of rank 32",
        Model("Qwen2.5", 7616e6, 28, 3584, 18_944, 512, 152_064),
        k=8,
        micro_batch=16,
        P=256,
        R=512,
        learning_rate="1e-5",
        checkpointing=True,
        lora_rank=32,
    ),
]


def kept_by_layer(family: str, width: int, feed_forward: int, lora_rank: int = 0) -> int:
    """Bytes that a layer keeps of a token for backward."""
    if lora_rank:
        of_width, of_feed_forward, linears = LORA[family]
        return of_width * width + of_feed_forward * feed_forward + 2 * linears * lora_rank
    of_width, of_feed_forward = FAMILIES[family]
    return of_width * width + of_feed_forward * feed_forward


def adapter_parameters(model: Model, rank: int) -> int:
    """Parameters of the adapters: rank · (inputs + outputs) of each linear layer."""
    d, f = model.width, model.feed_forward
    if model.family == "Qwen2.5":  # queries and output, keys and values, three of the MLP
        sizes = 2 * (d + d) + 2 * (d + model.key_width) + 3 * (d + f)
    else:  # queries, keys and values together, output, two of the MLP
        sizes = (d + 3 * d) + (d + d) + 2 * (d + f)
    return rank * sizes * model.layers


def needed(run: Run) -> dict[str, float]:
    """Bytes on each GPU, by the columns of the table."""
    model = run.model
    slots = run.micro_batch // run.k * (run.P + run.k * run.R)
    layer = kept_by_layer(model.family, model.width, model.feed_forward, run.lora_rank)
    head = model.vocabulary * model.width
    if run.lora_rank:  # the policy in bfloat16, which is the reference too, and its adapters
        trained, frozen, beside = adapter_parameters(model, run.lora_rank), model.parameters, model.beside
    else:
        trained, frozen, beside = model.parameters, 0, model.parameters + model.beside
    if run.checkpointing:  # every layer's input, and all of one layer
        stream = 2 if run.lora_rank else 4  # bytes of a number in the residual stream
        activations = slots * (stream * model.width * model.layers + layer)
        cast = 2 * head + model.parameters / model.layers  # weights in bfloat16: embedding, head, one layer
    else:
        activations = slots * layer * model.layers
        cast = model.parameters
    if run.lora_rank and run.gpus == 1:  # they are in bfloat16 already; fsdp still gathers them
        cast = trained
    cache = 4 * model.layers * model.key_width * (run.chunk / run.k * run.P + run.chunk * run.R)
    found = {
        "states": (16 * trained + 2 * frozen) / run.gpus,
        "copies": 2 * beside / run.gpus + 2 * cast,
        "activations": activations,
        "logits": LOGIT_BYTES * min(run.micro_batch * run.R * model.vocabulary, BLOCK)
        + (0 if run.lora_rank else 8 * head),
    }
    found["training"] = sum(found.values())
    weights = (12 * trained + 2 * frozen + 2 * beside) / run.gpus + 2 * model.parameters
    found["rollout"] = weights + cache + LOGIT_BYTES * run.chunk * model.vocabulary
    return found | {"cache": cache}


def table(runs: list[Run]) -> str:
    """The table of README.md."""
    head = ["model, GPU", "k", "m", "P, R", "states", "copies", "activations", "logits", "training"]
    head += ["rollout (cache)", "learning rate"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for run in runs:
        found = {name: f"{value / GIB:.1f}" for name, value in needed(run).items()}
        cells = [run.name, run.k, run.micro_batch, f"{run.P}, {run.R}"]
        cells += [found[name] for name in ("states", "copies", "activations", "logits", "training")]
        cells += [f"{found['rollout']} ({found['cache']})", run.learning_rate]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


# ---- The count -------------------------------------------------------------------------------------------------------


def small_model(family: str, width: int, feed_forward: int, layers: int, lora_rank: int = 0):
    """A model of a family with heads of 64; with LoRA it is in bfloat16 and its adapters are in float32."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
    }
    if family == "Qwen2.5":
        config = transformers.Qwen2Config(**sizes, num_key_value_heads=1)
    else:
        config = transformers.GPTNeoXConfig(**sizes, attention_dropout=0, hidden_dropout=0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if lora_rank:
        rloo.add_adapters(model.bfloat16(), lora_rank, alpha=32, seed=0)
    return model


def saved_bytes(model, P: int, k: int, R: int) -> int:
    """Bytes that autograd saves for log-probs of k completions of R tokens, weights left out."""
    rows = [{"prompt_ids": [5] * P}]
    batch = rloo.make_batch(rows, torch.full((k, 1, R), 7), [1])
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no address is used twice
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        rloo.completion_logprobs(model, batch, 0.7, "group")
    return sum(sizes.values())


def counted(family: str, width: int, feed_forward: int, lora_rank: int = 0) -> float:
    """Bytes that a layer keeps of a token: what a third layer and a twice as long row add."""

    def of_third_layer(P, R):
        three, two = (saved_bytes(small_model(family, width, feed_forward, n, lora_rank), P, 4, R) for n in (3, 2))
        return three - two

    return (of_third_layer(128, 64) - of_third_layer(64, 32)) / (64 + 4 * 32)


@dataclass
class Args:
    """Memory that a run needs on a GPU."""

    count: bool = False
    """count the bytes of activations instead"""
    lora_rank: int | None = None
    """rank of the adapters in all rows, 0: none; default: as the table in README.md"""


def main(args: Args):
    if not args.count:
        runs = RUNS if args.lora_rank is None else [replace(run, lora_rank=args.lora_rank) for run in RUNS]
        print(table(runs))
        return
    torch.set_num_threads(1)
    print("bytes that a layer keeps of a token     counted   formula")
    rank = args.lora_rank or 0
    for family, width, feed_forward in SMALL:
        formula = kept_by_layer(family, width, feed_forward, rank)
        name = f"{family}, d = {width}, f = {feed_forward}"
        print(f"{name:36}{counted(family, width, feed_forward, rank):11,.0f}{formula:10,}")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
