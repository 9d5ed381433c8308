"""Tests of gpu_memory.py: its formula holds for small models, and the page has its table."""

import sys
from dataclasses import replace
from pathlib import Path

import gpu_memory
import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402


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


@pytest.mark.parametrize("lora_rank", [0, 16])
@pytest.mark.parametrize("family, width, feed_forward", [("Qwen2.5", 448, 4864), ("GPT-NeoX", 256, 1024)])
def test_a_layer_keeps_what_the_formula_says(family, width, feed_forward, lora_rank):
    formula = gpu_memory.kept_by_layer(family, width, feed_forward, lora_rank)
    assert counted(family, width, feed_forward, lora_rank) == pytest.approx(formula, rel=0.02)


@pytest.mark.parametrize("family, heads", [("Qwen2.5", 1), ("GPT-NeoX", 4)])
def test_adapters_have_as_many_weights_as_the_formula_says(family, heads):
    policy = small_model(family, 256, 1024, 3, lora_rank=4)
    sizes = gpu_memory.Model(family, 0, 3, 256, 1024, 64 * heads, 512)
    count = sum(weight.numel() for weight in rloo.trained_weights(policy).values())
    assert gpu_memory.adapter_parameters(sizes, 4) == count


def test_the_page_has_the_table():
    page = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    assert gpu_memory.table(gpu_memory.RUNS) in page


def test_a_configuration_gives_the_sizes_of_the_table(tmp_path, capsys):
    """Qwen2.5-0.5B's."""
    config = transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path)
    given = {"k": 8, "m": 8, "P": 256, "R": 400, "chunk": 256}
    gpu_memory.main(gpu_memory.Args(config=str(tmp_path), **given))
    shown = capsys.readouterr().out
    row = gpu_memory.table(gpu_memory.RUNS[:1]).splitlines()[-1]
    assert row.partition("24 GB")[2].rpartition("|")[0].rpartition("|")[0] in shown
    assert "it fits: 24 GB, 40 GB, 48 GB, 80 GB, 141 GB" in shown


def test_a_model_without_a_formula_is_refused(tmp_path):
    transformers.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="no formula for layers of type gpt2"):
        gpu_memory.main(gpu_memory.Args(config=str(tmp_path)))


def test_what_needs_less_memory_fits_smaller_cards():
    run = next(run for run in gpu_memory.RUNS if run.gpus > 1)
    base = gpu_memory.needed(run)
    for change in ({"gpus": 1}, {"checkpointing": False}, {"R": 1024}):
        assert gpu_memory.needed(replace(run, **change))["training"] > base["training"]
    assert gpu_memory.fitting(run) == [80, 141] and gpu_memory.fitting(replace(run, gpus=1)) == []
    assert min(gpu_memory.fitting(replace(run, gpus=16, micro_batch=8))) < 80
    full, low, high = (gpu_memory.needed(replace(gpu_memory.RUNS[0], lora_rank=rank)) for rank in (0, 8, 64))
    assert all(low[what] < high[what] for what in ("states", "training", "rollout"))
    assert high["training"] < 0.6 * full["training"] and high["states"] < 0.2 * full["states"]
