"""How much memory of a GPU a run needs, computed from the sizes of its models.

    python benchmark/gpu/gpu_memory.py                                # prints the table of README.md
    python benchmark/gpu/gpu_memory.py --config MODEL --k 8 --T 400   # a run of yours; MODEL: a folder or Hub id

A test counts what the formula for activations says, for small models on the CPU.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import tyro

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
import common  # noqa: E402

GIB = 2**30
LOGIT_BYTES = 22  # for each logit of a block: float32 logits, log-probs, probabilities and their gradients
BLOCK = 2**27  # logits of a block, see completion_logprobs
CONTEXT = 0.5 * GIB  # CUDA's own memory, and kernels
NCCL = 1 * GIB  # buffers of several processes
# Bytes that a layer keeps of a token for backward: a · width + b · feed_forward + 2c · rank; of a prompt's token
# p · width more (or less). c is the number of linear layers that have adapters.
KEPT = {"Qwen2.5": (24, 8, 0, 2), "GPT-NeoX": (22, 4, 0, -2)}
KEPT_WITH_LORA = {"Qwen2.5": (20, 8, 7, 2), "GPT-NeoX": (22, 4, 4, -2)}
GATED = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "olmo2")  # model types whose layers are like Qwen2.5's


@dataclass
class Model:
    """Sizes of a policy."""

    family: str
    parameters: float
    layers: int
    width: int
    feed_forward: int
    key_width: int  # of all key heads of a layer together
    vocabulary: int


@dataclass
class Args:
    """Memory that a run needs on each GPU."""

    config: str | None = None  # folder or Hub id of the policy; only its configuration is read
    reward_parameters: float = 0.0  # of a reward model
    k: int = 4  # --rloo_k
    m: int = 32  # --per_device_train_batch_size
    P: int = 512  # --max_prompt_length
    T: int = 53  # --response_length
    chunk: int = 64  # --local_rollout_forward_batch_size
    gpus: int = 1  # more than one: with benchmark/extensions/fsdp.py
    gradient_checkpointing: bool = False
    lora_rank: int = 0  # with benchmark/extensions/lora.py


QWEN_05B = Model("Qwen2.5", 494e6, 24, 896, 4864, 128, 151_936)
QWEN_15B = Model("Qwen2.5", 1544e6, 28, 1536, 8960, 256, 151_936)
QWEN_3B = Model("Qwen2.5", 3086e6, 36, 2048, 11_008, 256, 151_936)
QWEN_7B = Model("Qwen2.5", 7616e6, 28, 3584, 18_944, 512, 152_064)
PYTHIA_1B = Model("GPT-NeoX", 1012e6, 16, 2048, 8192, 2048, 50_304)
LORA_32 = {"gradient_checkpointing": True, "lora_rank": 32}
RUNS = {
    "Qwen2.5-0.5B, 24 GB": (QWEN_05B, Args(k=8, m=8, P=256, T=400, chunk=256)),
    "pythia-1b, 80 GB": (PYTHIA_1B, Args(reward_parameters=909e6, m=64, chunk=256)),
    "Qwen2.5-1.5B, 80 GB": (QWEN_15B, Args(k=8, m=16, P=256, T=512, chunk=256)),
    "Qwen2.5-3B, LoRA, 24 GB": (QWEN_3B, Args(k=8, m=8, P=256, T=512, chunk=32, **LORA_32)),
    "Qwen2.5-7B, LoRA, 80 GB": (QWEN_7B, Args(k=8, m=16, P=256, T=512, **LORA_32)),
    "Qwen2.5-7B, 4 × 80 GB": (QWEN_7B, Args(k=8, m=16, P=256, T=512, gpus=4, gradient_checkpointing=True)),
}


def kept_by_layer(model: Model, run: Args) -> float:
    """Bytes that a layer keeps for backward of a prompt and its completions. Each completion has a copy of the keys and
    values of its prompt, as wide as the queries; attention keeps its masks in bfloat16."""
    a, b, c, p = (KEPT_WITH_LORA if run.lora_rank else KEPT)[model.family]
    k, P, T = run.k, run.P, run.T
    tokens = (P + k * T) * (a * model.width + b * model.feed_forward + 2 * c * run.lora_rank)
    keys = 4 * model.width * k * (P + T)
    return tokens + keys + p * model.width * P + 2 * (P * P + T * (P + T))


def adapter_parameters(model: Model, rank: int) -> int:
    """Parameters of the adapters: rank · (inputs + outputs) of each linear layer."""
    d, f = model.width, model.feed_forward
    if model.family == "Qwen2.5":  # queries and output, keys and values, three of the MLP
        sizes = 2 * (d + d) + 2 * (d + model.key_width) + 3 * (d + f)
    else:  # queries, keys and values together, output, two of the MLP
        sizes = (d + 3 * d) + (d + d) + 2 * (d + f)
    return rank * sizes * model.layers


def needed(model: Model, run: Args) -> dict[str, float]:
    """Bytes on each GPU, by the columns of the table."""
    groups = run.m // run.k
    layer = groups * kept_by_layer(model, run)
    head = model.vocabulary * model.width
    trained = adapter_parameters(model, run.lora_rank) if run.lora_rank else model.parameters
    frozen = 2 * model.parameters  # the reference, with LoRA also the policy, which shares its weights
    sampler = 2 * model.parameters  # in bfloat16, whole on each GPU: the policy, or with LoRA and FSDP a copy
    rest = sampler + 2 * run.reward_parameters + CONTEXT
    if run.gradient_checkpointing:  # every layer's input, and all of one layer
        activations = groups * (run.P + run.k * run.T) * 2 * model.width * model.layers + layer
    else:
        activations = layer * model.layers
    kept = activations + LOGIT_BYTES * min(run.m * run.T * model.vocabulary, BLOCK)
    if run.lora_rank:
        kept += 2 * trained  # adapters in bfloat16
    else:
        kept += 4 * head  # gradients of the head: of a block of logits, and their sum
    gathered = 0
    if run.gpus > 1:  # embedding and head; two layers, their gradients, and these in float32 to be summed
        rest += NCCL
        gathered = 4 * head + 2 * 8 * model.parameters / model.layers
    training = (16 * trained + frozen) / run.gpus + kept + gathered + rest
    # Of prompts and completions. That of a completion doubles up to T, layer by layer: old and new of one layer exist
    # at once, which is left out here.
    cache = 4 * model.layers * model.key_width * (run.chunk / run.k * run.P + run.chunk * run.T)
    rollout = (12 * trained + frozen) / run.gpus + cache + LOGIT_BYTES * run.chunk * model.vocabulary + rest
    return {"training": training, "kept": kept, "rollout": rollout, "cache": cache}


def table(runs: dict[str, tuple[Model, Args]]) -> str:
    """A row for each run, in GiB."""
    rows = [["model, GPU", "k, m, P, T", "training (activations, logits)", "rollout (cache)"]]
    for name, (model, run) in runs.items():
        found = {part: f"{size / GIB:.1f}" for part, size in needed(model, run).items()}
        sizes = f"{run.k}, {run.m}, {run.P}, {run.T}"
        rows.append([name, sizes, f"{found['training']} ({found['kept']})", f"{found['rollout']} ({found['cache']})"])
    return common.markdown(rows)


def report():
    """Writes the table of README.md."""
    common.insert(HERE / "README.md", {"memory": table(RUNS)})


def model_of(path: str) -> Model:
    """Sizes from the configuration of a model, whose weights are not loaded."""
    config = transformers.AutoConfig.from_pretrained(path).get_text_config()
    if config.model_type not in (*GATED, "gpt_neox"):
        sys.exit(f"{path}: no formula for layers of type {config.model_type}")
    with torch.device("meta"):
        count = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    family = "GPT-NeoX" if config.model_type == "gpt_neox" else "Qwen2.5"
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_width = (getattr(config, "num_key_value_heads", None) or heads) * head_width
    widths = config.hidden_size, config.intermediate_size, key_width
    return Model(family, count, config.num_hidden_layers, *widths, config.vocab_size)


def main(args: Args):
    if args.config is None:
        print(table(RUNS))
    else:
        print(table({args.config: (model_of(args.config), args)}))
        print("\nGiB for each GPU. The larger of training and rollout must fit in 90% of its memory.")


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
