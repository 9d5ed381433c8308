"""Tests of lora.py: adapters in several architectures, their gradients, what a run leaves and resumes, and PEFT.

python -m pytest -q benchmark/extensions/lora_test.py
"""

import json

import pytest
import torch
from extensions_test import MINI, data, load, rloo, rloo_as_it_was, run, without_times  # noqa: F401
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZE = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZE |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
FAMILIES = {
    "gpt_neox": {},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "llama4_text": {"intermediate_size_mlp": 48, "head_dim": 8},  # its routers are linear layers that return a tuple
    # Its Mamba layers read the weight of dt_proj directly.
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False},
}
TOKENS = torch.tensor([[5, 3, 8, 4, 9, 11]])


@pytest.fixture
def lora():
    return load("lora")


def save_small_model(family: str, path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZE | FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(path)


def loaded(lora, path, std=0.3, **flags):
    """Policy and reference from a folder, after B has got other values than 0."""
    flags = {"lora_rank": 3, "lora_alpha": 6, "device": "cpu", "dtype": "float32", "layout": "plain"} | flags
    policy, master, reference = lora.load_models(rloo.Args(sft_model_path=str(path), kl_coef=0.1, **flags), None)
    assert master is policy
    for linear in lora.adapted_layers(policy).values():
        torch.nn.init.normal_(linear.lora_B.weight, std=std)
    return policy, reference


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_reference_and_merged_copy_are_those_of_the_formula(family, lora, tmp_path):
    """Every linear layer but the head has an adapter. The reference is the base model to the last bit and has its
    tensors. The merged copy equals the policy, and its gradient dW gives dB = s dW Aᵀ and dA = s Bᵀ dW."""
    save_small_model(family, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False).eval()
    expected = base(TOKENS).logits
    policy, reference = loaded(lora, tmp_path, std=0.0)
    assert torch.equal(policy(TOKENS).logits, expected)
    policy, reference = loaded(lora, tmp_path, std=0.1)
    adapted = lora.adapted_layers(policy)
    linears = {name for name, module in base.named_modules() if type(module) is torch.nn.Linear}
    assert set(adapted) == {name for name in linears if ".layers." in name and "dt_proj" not in name} < linears
    assert len(lora.adapters_of(policy)) == 2 * len(adapted) >= 16
    assert {weight.dtype for weight in lora.adapters_of(policy).values()} == {torch.float32}

    assert torch.equal(reference(TOKENS).logits, expected) and not lora.adapted_layers(reference)
    own = dict(policy.named_parameters())
    assert all(x is own[name] for name, x in reference.named_parameters())

    for _ in range(2):  # again and again from W, not from what was merged before
        merged = lora.merged(policy).requires_grad_(True)
    found = policy(TOKENS).logits
    assert (found - expected).abs().max() > 1e-3 and (merged(TOKENS).logits - found).abs().max() < 1e-4
    for model in (merged, policy):
        model(TOKENS).logits.log_softmax(-1)[..., 3].sum().backward()
    for name, linear in adapted.items():
        A, B, s = linear.lora_A.weight, linear.lora_B.weight, linear.lora_scale
        dW = merged.get_submodule(name).weight.grad
        assert torch.allclose(B.grad, s * dW @ A.T, rtol=1e-3, atol=1e-4) and B.grad.any() and s == 2
        assert torch.allclose(A.grad, s * B.T @ dW, rtol=1e-3, atol=1e-4) and A.grad.any()


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral", "qwen3"])
def test_peft_reads_the_adapters_and_trains_them_alike(family, lora, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft, an optional package: pip install peft")
    save_small_model(family, tmp_path)
    policy, _ = loaded(lora, tmp_path)
    lora.save_adapters(tmp_path / "adapter", policy)
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).eval()
    outputs = [model(TOKENS).logits for model in (theirs, policy)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5
    for output in outputs:
        output.log_softmax(-1)[..., 3].sum().backward()
    gradients = {name.replace(".default", ""): x.grad for name, x in theirs.named_parameters() if x.grad is not None}
    for name, weight in lora.adapters_of(policy).items():
        assert torch.allclose(gradients[f"base_model.model.{name}"], weight.grad, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        merged = lora.merged(policy)(TOKENS).logits
        assert (theirs.merge_and_unload()(TOKENS).logits - merged).abs().max() < 1e-5


def test_adapters_begin_as_in_peft_and_depend_on_the_seed_alone(lora, tmp_path):
    save_small_model("gpt_neox", tmp_path)
    first = {}
    for seed in (1, 1, 2):
        torch.rand(seed)
        policy, _, _ = lora.load_models(
            rloo.Args(sft_model_path=str(tmp_path), device="cpu", dtype="float32", seed=seed), None
        )
        for name, linear in lora.adapted_layers(policy).items():
            A, B = linear.lora_A.weight, linear.lora_B.weight
            assert (A.shape, B.shape) == ((16, linear.in_features), (linear.out_features, 16)) and not B.any()
            assert 0.7 < A.abs().max() * linear.in_features**0.5 <= 1  # uniform within ± 1 / √in
            assert torch.equal(A, first.setdefault(name, A)) == (seed == 1)


def test_a_model_without_linear_layers_is_refused(lora):
    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=20))
    with pytest.raises(rloo.InputError, match="^--lora_rank: GPT2LMHeadModel has no torch.nn.Linear in its layers$"):
        lora.add_adapters(rloo.Args(), gpt2)


def test_the_learning_rate_of_adapters_is_ten_times_that_of_all_weights_unless_given(lora):
    assert rloo.resolve_args(rloo.Args(device="cpu")).learning_rate == pytest.approx(2.5e-3)
    assert rloo.resolve_args(rloo.Args(device="cpu", learning_rate=3e-4)).learning_rate == 3e-4


def test_what_a_resumed_run_in_bfloat16_leaves_is_merged_at_their_own_update(run, tmp_path):  # noqa: F811  a fixture
    """Checkpoints and the final folder hold merged weights, equal to those of an uninterrupted run to the last bit. A
    run of another kind is refused."""
    flags = {"lora_rank": 3, "lora_alpha": 6, "dtype": "bfloat16", "save_steps": 1, "weight_decay": 0.1}
    flags |= {"learning_rate": 1e-2, "num_mini_batches": 2, "per_device_train_batch_size": 4}
    metrics, output = run("lora", **flags, total_episodes=16)
    run("lora", **flags, total_episodes=8, lr_scheduler_type="constant", output_dir=tmp_path / "again")
    again, _ = run("lora", **flags, total_episodes=16, output_dir=tmp_path / "again", resume=True)
    assert without_times(again) == without_times(metrics) and len(metrics) == 2
    base = load_file(MINI / "sft" / "model.safetensors")
    for folder in (output, output / "checkpoint-2", tmp_path / "again"):
        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            assert (folder / file).read_bytes() == (output / file).read_bytes()
    saved = load_file(output / "adapter" / "adapter_model.safetensors")
    config = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]
    assert config["r"] == 3 and config["lora_alpha"] == 6 and config["base_model_name_or_path"] == str(MINI / "sft")
    for name, weight in load_file(output / "model.safetensors").items():
        adapter = f"base_model.model.{name.removesuffix('.weight')}"
        expected = base[name].bfloat16()
        if f"{adapter}.lora_B.weight" in saved:
            A, B = (saved[f"{adapter}.lora_{x}.weight"] for x in "AB")
            expected = (expected.float() + 2 * (B @ A)).bfloat16()
            assert not torch.equal(expected, base[name].bfloat16())
        assert torch.equal(weight, expected), name
    with pytest.raises(SystemExit, match="optimizer.pt: .*other weights"):
        load("own_loop")  # which replaces nothing
        plain = {name: x for name, x in flags.items() if "lora" not in name}
        run(**plain, total_episodes=24, output_dir=output, resume=True)
    (output / "checkpoint-2/adapter/adapter_model.safetensors").unlink()
    with pytest.raises(SystemExit, match="checkpoint-2 has no adapters, so it is not a checkpoint of lora.py"):
        run("lora", **flags, total_episodes=24, output_dir=output, resume=True)
