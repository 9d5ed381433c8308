"""The table of README.md that says how much memory of a GPU a run needs, computed from the sizes of its models.

    python benchmark/speed/gpu_memory.py            # prints the table

gpu_memory_test.py counts what the formula for activations says, for small models on the CPU.
"""

from dataclasses import dataclass

GIB = 2**30
LOGIT_BYTES = 22  # for each logit of a block: float32 logits, log-probs, probabilities and their gradients
BLOCK = 2**27  # logits of a block, see completion_logprobs
FAMILIES = {"Qwen2.5": (34, 8), "GPT-NeoX": (26, 4)}  # bytes that a layer keeps of a token: · d + · f


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
    beside: float = 0.0  # parameters of the reference and the reward model


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


QWEN_0_5B = Model("Qwen2.5", 494e6, 24, 896, 4864, 128, 151_936, 494e6)
QWEN_7B = Model("Qwen2.5", 7616e6, 28, 3584, 18_944, 512, 152_064, 7616e6)
PYTHIA_410M = Model("GPT-NeoX", 405e6, 24, 1024, 4096, 1024, 50_304, 405e6 + 354e6)
PYTHIA_1B = Model("GPT-NeoX", 1012e6, 16, 2048, 8192, 2048, 50_304, 1012e6 + 909e6)
RUNS = [
    Run("Qwen2.5-0.5B, 24 GB", QWEN_0_5B, 8, 8, 256, 400, "1e-6"),
    Run("pythia-410m, 24 GB", PYTHIA_410M, 4, 32, 512, 53, "3e-6"),
    Run("pythia-1b, 80 GB", PYTHIA_1B, 4, 64, 512, 53, "3e-6", chunk=256),
    Run("Qwen2.5-7B, 4 × 80 GB", QWEN_7B, 8, 16, 256, 512, "1e-6", gpus=4, checkpointing=True),
]


def kept_by_layer(family: str, width: int, feed_forward: int) -> int:
    """Bytes that a layer keeps of a token for backward."""
    of_width, of_feed_forward = FAMILIES[family]
    return of_width * width + of_feed_forward * feed_forward


def needed(run: Run) -> dict[str, float]:
    """Bytes on each GPU, by the columns of the table."""
    model = run.model
    slots = run.micro_batch // run.k * (run.P + run.k * run.R)
    layer = kept_by_layer(model.family, model.width, model.feed_forward)
    head = model.vocabulary * model.width
    if run.checkpointing:  # every layer's input, and all of one layer
        activations = slots * (4 * model.width * model.layers + layer)
        cast = 2 * head + model.parameters / model.layers  # weights in bfloat16: embedding, head, one layer
    else:
        activations = slots * layer * model.layers
        cast = model.parameters
    cache = 4 * model.layers * model.key_width * (run.chunk / run.k * run.P + run.chunk * run.R)
    found = {
        "states": 16 * model.parameters / run.gpus,
        "copies": 2 * model.beside / run.gpus + 2 * cast,
        "activations": activations,
        "logits": LOGIT_BYTES * min(run.micro_batch * run.R * model.vocabulary, BLOCK) + 8 * head,
    }
    found["training"] = sum(found.values())
    weights = (12 * model.parameters + 2 * model.beside) / run.gpus + 2 * model.parameters
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


if __name__ == "__main__":
    print(table(RUNS))
