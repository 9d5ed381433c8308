"""What a machine can do, and what sampling, scoring and training on it cannot do without, for check.py."""

import time
from collections.abc import Callable

import torch


def clock(device: str) -> float:
    """Seconds, read once everything that was started on the device is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter()


def machine_rates(device: str, dtype: str) -> dict[str, float]:
    """FLOPs per second of a square matrix product in `dtype`, and bytes per second of reading 1 GiB, which is more than
    caches hold; each the best of three."""
    size = 8192 if device.startswith("cuda") else 2048
    square = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    memory = torch.ones(2**28, device=device)

    def least_seconds(function: Callable) -> float:
        found = []
        for _ in range(4):  # the first one warms up
            begin = clock(device)
            function()
            found.append(clock(device) - begin)
        return min(found)

    return {
        "flop_per_s": 2 * size**3 / least_seconds(lambda: square @ square),
        "bytes_per_s": memory.nbytes / least_seconds(lambda: memory.dot(memory)),
    }


def model_sizes(model) -> dict[str, int]:
    """Numbers of a causal model on which the work below depends; those per token are summed over the layers."""
    config = model.config
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    linear = [part for part in model.base_model.modules() if isinstance(part, torch.nn.Linear)]
    return {
        "parameters": model.num_parameters(),
        "body": sum(part.weight.numel() for part in linear),  # weights of the layers' linear maps
        "head": model.get_output_embeddings().weight.numel(),
        "hidden": config.hidden_size,
        "queries": config.num_hidden_layers * heads * head_dim,  # numbers in a token's queries
        "cached": 2 * config.num_hidden_layers * key_heads * head_dim,  # in its keys and values
    }


def needed_flops(sizes: dict[str, int], prompts: list[int], responses: list[list[int]]) -> dict[str, float]:
    """FLOPs that a phase cannot do without, for B prompts of so many tokens and completions of lengths (k, B).

    Only matrix products count, and nothing that is computed again.
    - A token that is read costs 2 FLOPs per weight of the layers' linear maps, and 4 · heads · head_dim per layer and
      token that it sees, itself included: its products with their keys and with their values.
    - Each prompt is read once, for all its completions, and by all layers.
    - To sample a completion, or for its log-probs, all its tokens but the last are read. The head costs 2 FLOPs per
      weight after each of these, and once after the prompt.
    - A reward model reads the last token as well. Its head costs 2 FLOPs per hidden unit and completion.
    - A backward pass costs twice its forward pass.
    - An update samples, takes the reference's log-probs, scores and trains (forward and backward).
    """

    def forward(left_out: int) -> float:
        read = seen = 0
        for n, lengths in zip(prompts, zip(*responses)):
            read += n
            seen += n * (n + 1) / 2
            for m in (length - left_out for length in lengths):
                read += m
                seen += m * n + m * (m + 1) / 2
        return 2 * sizes["body"] * read + 4 * sizes["queries"] * seen

    completions = len(prompts) * len(responses)
    after = sum(map(sum, responses)) - completions + len(prompts)  # tokens after which the next one is predicted
    logprobs = forward(left_out=1) + 2 * sizes["head"] * after
    scores = forward(left_out=0) + 2 * sizes["hidden"] * completions
    return {
        "decode": logprobs,
        "reference": logprobs,
        "reward model": scores,
        "training": 3 * logprobs,
        "whole update": 5 * logprobs + scores,
    }


def needed_bytes(sizes: dict[str, int], itemsize: int, prompts: list[int], responses: list[list[int]]) -> int:
    """Bytes that decoding has to read, for prompts and completions as above.

    Each step reads the weights of the layers' linear maps and of the head once, keys and values of each prompt once
    while one of its completions runs, and those that each running completion has from earlier steps. The first step
    reads the prompts; a completion of L tokens takes part in L - 1 more.
    """
    steps = max(map(max, responses))
    cached = 0  # tokens whose keys and values are read, over all steps
    for n, lengths in zip(prompts, zip(*responses)):
        cached += n * (max(lengths) - 1)
        cached += sum((length - 1) * (length - 2) // 2 for length in lengths)
    return itemsize * (steps * (sizes["body"] + sizes["head"]) + sizes["cached"] * cached)
