"""Tests of gpu_memory.py: its formulas hold for small models."""

import gpu_memory
import pytest
import torch
import transformers
from conftest import load

import rloo


def small_model(family: str, width: int, feed_forward: int, layers: int, lora, lora_rank: int):
    """A model of a family in bfloat16, with heads of 64; adapters are in float32."""
    sizes = {"vocab_size": 512, "hidden_size": width, "intermediate_size": feed_forward, "num_hidden_layers": layers}
    sizes["num_attention_heads"] = width // 64
    if family == "Qwen2.5":
        config = transformers.Qwen2Config(**sizes, num_key_value_heads=2)
    else:
        config = transformers.GPTNeoXConfig(**sizes, attention_dropout=0, hidden_dropout=0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.layout = "group"
    model.set_attn_implementation(rloo.GROUP_KERNEL)
    if lora_rank:
        lora.add_adapters(lora.Args(lora_rank=lora_rank), model.requires_grad_(False))
    return model


def saved_bytes(model, P: int, k: int, T: int) -> int:
    """Bytes that autograd saves for log-probs of k completions of T tokens, weights left out."""
    batch = rloo.make_batch([{"prompt_ids": [5] * P}], torch.full((k, 1, T), 7), [1])
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rloo.completion_logprobs(model, batch, 0.7)
    return sum(sizes.values())


@pytest.mark.parametrize("lora_rank", [0, 16])
@pytest.mark.parametrize("family, width, feed_forward", [("Qwen2.5", 256, 2432), ("GPT-NeoX", 256, 1024)])
def test_a_layer_keeps_what_the_formula_says(family, width, feed_forward, lora_rank):
    """What a third layer adds, at two sizes; their difference leaves out what does not depend on tokens: weights."""
    lora = load("lora")
    two, three = (small_model(family, width, feed_forward, layers, lora, lora_rank) for layers in (2, 3))
    sizes = gpu_memory.Model(family, 0, 3, width, feed_forward, 128 if family == "Qwen2.5" else width, 512)
    for small, large in (((64, 4, 32), (128, 4, 64)), ((96, 2, 16), (16, 8, 96))):
        counted, formula = [], []
        for P, k, T in (small, large):
            counted.append(saved_bytes(three, P, k, T) - saved_bytes(two, P, k, T))
            run = gpu_memory.Args(k=k, P=P, T=T, lora_rank=lora_rank)
            formula.append(gpu_memory.kept_by_layer(sizes, run))
        assert counted[1] - counted[0] == pytest.approx(formula[1] - formula[0], rel=0.01)
    if lora_rank:
        count = sum(weight.numel() for weight in rloo.trained_weights(three).values())
        assert gpu_memory.adapter_parameters(sizes, lora_rank) == count


def test_a_configuration_gives_the_sizes_of_the_table(tmp_path):
    sizes = {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    transformers.Qwen2Config(**sizes, **heads).save_pretrained(tmp_path)
    found, expected = gpu_memory.model_of(str(tmp_path)), gpu_memory.QWEN_05B
    assert found.parameters == pytest.approx(expected.parameters, rel=1e-3)
    found.parameters = expected.parameters
    assert found == expected


def test_the_page_has_the_table():
    page = (gpu_memory.HERE / "README.md").read_text(encoding="utf-8")
    assert gpu_memory.common.filled(page, {"memory": gpu_memory.table(gpu_memory.RUNS)}) == page
