"""Tests of limits.py: FLOPs against those that torch counts, and by hand."""

import limits
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPTNeoXConfig, LlamaConfig


def test_the_machine_is_measured():
    found = limits.machine_rates("cpu", "float32")
    assert list(found) == ["flop_per_s", "bytes_per_s"] and min(found.values()) > 0


SIZES = {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS = {"intermediate_size": 256, "num_labels": 1, "pad_token_id": 0}


@pytest.mark.parametrize(
    "config", [GPTNeoXConfig(**SIZES, **OTHERS), LlamaConfig(**SIZES, num_key_value_heads=2, **OTHERS)]
)
def test_flops_of_one_completion_are_those_that_torch_counts(config):
    """Except that eager attention multiplies all pairs of tokens, and for the products of rotary embeddings."""
    options = {"attn_implementation": "eager"}
    policy = AutoModelForCausalLM.from_config(config, **options)
    reward = AutoModelForSequenceClassification.from_config(config, **options)
    sizes, n, length = limits.model_sizes(policy), 5, 4
    needed = limits.needed_flops(sizes, [n], [[length]])

    def counted(function, tokens: int, passes: int) -> int:
        with FlopCounterMode(display=False) as counter:
            function(torch.randint(config.vocab_size, (1, tokens)))
        by_module = counter.get_flop_counts()
        rotary = sum(sum(flops.values()) for name, flops in by_module.items() if name.endswith("rotary_emb"))
        masked = tokens**2 - tokens * (tokens + 1) // 2
        return counter.get_total_flops() - rotary - passes * 4 * sizes["queries"] * masked

    def logits(ids):
        return policy.get_output_embeddings()(policy.base_model(ids)[0][:, n - 1 :])

    read = n + length - 1
    assert counted(logits, read, passes=1) == needed["decode"] == needed["reference"]
    assert counted(lambda ids: logits(ids).sum().backward(), read, passes=3) == needed["training"]
    assert counted(lambda ids: reward.score(reward.base_model(ids)[0][:, -1]), read + 1, 1) == needed["reward model"]
    assert needed["whole update"] == 5 * needed["decode"] + needed["reward model"]


def test_work_of_a_group_by_hand():
    sizes = {"body": 1000, "head": 100, "hidden": 10, "queries": 1, "cached": 8}

    def flops(prompts, responses):
        return limits.needed_flops(sizes, prompts, responses)["decode"]

    # Read: 7 + 3 + 2 tokens; head: 1 + 3 + 2; seen: 1 … 7 by the prompt, 8 … 10 and 8 … 9 by the completions.
    group = flops([7], [[4], [3]])
    assert group == 2 * 1000 * 12 + 2 * 100 * 6 + 4 * (28 + 27 + 17)
    assert flops([7, 5], [[4, 2], [3, 6]]) == group + flops([5], [[2], [6]])
    # 4 steps read the weights. Prompt of 7: read in 3 steps, completion of 4: 0 + 1 + 2 tokens, of 3: 0 + 1.
    # Prompt of 5: read in 1 step, completion of 2 sees no token from earlier steps, completion of 1 takes no step.
    cached = 3 * 7 + (0 + 1 + 2) + (0 + 1) + 1 * 5
    assert limits.needed_bytes(sizes, 4, [7, 5], [[4, 2], [3, 1]]) == 4 * (4 * 1100 + 8 * cached)
