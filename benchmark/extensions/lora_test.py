"""Tests of lora.py: adapters in nine architectures, their gradients, what a run and its checkpoints leave, and PEFT."""

import json
import shutil

import pytest
import torch
from conftest import MINI, load
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rloo
from rloo_test import SIZE, read_metrics, spy, tiny_model, without_times

EXPERTS = SIZE | {"num_key_value_heads": 2, "intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
FAMILIES = {
    "gpt_neox": {},
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "mixtral": EXPERTS | {"num_local_experts": 4, "sliding_window": None},
    "cohere": {},
    "llama4_text": {},  # its routers are linear layers that return a tuple
    "opt": SIZE | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    # Its Mamba layers read the weight of dt_proj directly.
    "jamba": EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False},
    "dots1": EXPERTS | ROUTED | {"first_k_dense_replace": 0, "n_shared_experts": 1},  # has a buffer in float32
}
TOKENS = torch.tensor([[5, 3, 8, 4, 9, 11]])


@pytest.fixture
def lora():
    return load("lora")


def small_model(family: str, path=None, seed=0):
    """A random model; saved into the folder `path`."""
    model = tiny_model(family, seed, as_it_comes=True, **FAMILIES.get(family, {}))
    if path:
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                torch.nn.init.normal_(buffer)
        model.save_pretrained(path)
    return model.requires_grad_(False)


def trial_args(path=None, **flags):
    defaults = {"lora_rank": 3, "lora_alpha": 6, "device": "cpu", "dtype": "float32", "response_length": 4}
    return rloo.Args(**defaults | {"sft_model_path": str(path), "kl_coef": 0.1} | flags)


def loaded(lora, path, std=0.3, **flags):
    """Policy and reference of a folder, after B has got other values than 0."""
    policy, master, reference = lora.load_models(trial_args(path, **flags), 8, None)
    assert master is policy
    for linear in lora.adapted_layers(policy).values():
        torch.nn.init.normal_(linear.lora_B.weight, std=std)
    return policy, reference


def merged_by_hand(base, adapter, dtype=torch.float32) -> dict:
    """The state dict of a model with the adapters of a folder merged, by PEFT's names and formula."""
    weights, config = base.state_dict(), json.loads((adapter / "adapter_config.json").read_text())
    saved = load_file(adapter / "adapter_model.safetensors")
    for name in {name.rpartition(".lora_")[0] for name in saved}:
        A, B = (saved[f"{name}.lora_{x}.weight"] for x in "AB")
        assert A.dtype == B.dtype == torch.float32 and len(A) == B.shape[1] == config["r"]
        own = name.removeprefix("base_model.model.") + ".weight"
        weights[own] = (weights[own].float() + config["lora_alpha"] / config["r"] * (B @ A)).to(dtype)
    return weights


def same_weights(ours: dict, theirs: dict) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


# ---- Adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_reference_and_merged_copy_are_those_of_the_formula(family, lora, tmp_path):
    """Every linear layer but the head has adapters, which begin without effect. The reference is the base model bit by
    bit and has its tensors. The merged copy equals the policy, and its gradient dW gives those of the adapters,
    dB = s dW Aᵀ and dA = s Bᵀ dW. What the model keeps in float32 is not rounded."""
    small_model(family, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False)
    expected = base(TOKENS).logits
    policy, _, _ = lora.load_models(trial_args(tmp_path), 8, None)
    assert torch.equal(policy(TOKENS).logits, expected)
    policy, reference = loaded(lora, tmp_path, std=0.1)
    adapted = lora.adapted_layers(policy)
    linears = {name for name, module in base.named_modules() if type(module) is torch.nn.Linear}
    assert set(adapted) == {name for name in linears if ".layers." in name and "dt_proj" not in name}
    assert set(adapted) < linears and len(adapted) >= 2 * 4 and len(rloo.trained_weights(policy)) == 2 * len(adapted)

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

    half = loaded(lora, tmp_path, dtype="bfloat16")[0].merged[0]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = [{name: x.dtype for name, x in [*m.named_parameters(), *m.named_buffers()]} for m in (half, again)]
    assert dtypes[0] == dtypes[1]


def test_adapters_begin_as_in_peft_and_depend_on_the_seed_alone(lora):
    first = {}
    for seed, other in ((1, 0), (1, 5), (2, 0)):
        model = small_model("llama", seed=other)
        lora.add_adapters(trial_args(lora_rank=4, seed=seed), model)
        for name, linear in lora.adapted_layers(model).items():
            A, B = linear.lora_A.weight, linear.lora_B.weight
            assert (A.shape, B.shape) == ((4, linear.in_features), (linear.out_features, 4)) and not B.any()
            assert 0.7 < A.abs().max() * linear.in_features**0.5 <= 1  # uniform within ± 1 / √in
            assert torch.equal(A, first.setdefault(name, A)) == (seed == 1)


def test_rounding_of_a_policy_in_bfloat16_is_no_reason_to_refuse_it(lora, tmp_path):
    """... for rloo.check_model, whose limits are for float32 otherwise."""
    small_model("llama", tmp_path)
    for dtype in ("float32", "bfloat16"):
        policy, _ = loaded(lora, tmp_path, dtype=dtype)
        rloo.check_model(policy, [TOKENS[0].tolist()], 40)


def test_what_cannot_be_adapted_is_refused_in_a_line(lora):
    with pytest.raises(rloo.InputError, match="^--lora_rank: GPT2LMHeadModel has no torch.nn.Linear in its layers$"):
        lora.add_adapters(trial_args(), small_model("gpt2"))
    for flags in ({"lora_rank": 0}, {"lora_rank": -1}, {"lora_alpha": 0}):
        with pytest.raises(rloo.InputError, match="^--lora_rank, --lora_alpha: must be above 0$"):
            lora.load_models(trial_args(**flags), 8, None)


def test_the_learning_rate_of_adapters_is_ten_times_that_of_all_weights_unless_given(lora):
    for model, rate in ((None, 2.5e-3), ("a model", 1e-5)):
        flags = {"device": "cpu", "sft_model_path": model}
        assert rloo.resolve_args(rloo.Args(**flags)).learning_rate == pytest.approx(rate)
        assert rloo.resolve_args(rloo.Args(**flags, learning_rate=3e-4)).learning_rate == 3e-4


# ---- Runs ------------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: in the middle of an update nothing is saved."""


def test_a_killed_run_ends_like_a_whole_one_and_checkpoints_are_merged_at_their_own_update(run, tmp_path, monkeypatch):
    """... also if it goes on with activations computed again. What is not a run of lora.py is refused in a line."""
    flags = {"lora_rank": 3, "lora_alpha": 6, "total_episodes": 24, "save_steps": 1, "save_total_limit": 9}
    flags |= {"weight_decay": 0.1, "learning_rate": 1e-2, "num_mini_batches": 2, "per_device_train_batch_size": 4}
    metrics, output = run("lora", **flags)
    loss = rloo.completion_loss
    losses = []

    def dying(*inputs):
        losses.append(inputs)
        if len(losses) == 2 * 2 + 2:  # between the two steps of the last update
            raise Killed
        return loss(*inputs)

    monkeypatch.setattr(rloo, "completion_loss", dying)
    with pytest.raises(Killed):
        run("lora", **flags, output_dir=tmp_path / "killed")
    monkeypatch.undo()
    assert [path.name for path in rloo.checkpoints(tmp_path / "killed")] == ["checkpoint-2", "checkpoint-1"]
    shutil.copytree(tmp_path / "killed", tmp_path / "other")
    resumed = flags | {"output_dir": tmp_path / "killed", "resume": True, "gradient_checkpointing": True}
    again, _ = run("lora", **resumed)
    assert without_times(again) == without_times(metrics)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "killed" / file).read_bytes() == (output / file).read_bytes()

    base = AutoModelForCausalLM.from_pretrained(MINI / "sft")
    folders = [output, *rloo.checkpoints(output)]
    assert [folder.name for folder in folders[1:]] == ["checkpoint-3", "checkpoint-2", "checkpoint-1"]
    for folder in folders:
        found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert same_weights(found, merged_by_hand(base, folder / "adapter")), folder
    files = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert files[0] == files[1] and len(set(files)) == 3

    resumed["output_dir"] = tmp_path / "other"
    with pytest.raises(SystemExit, match="^rloo.py: --lora_rank 4: the run had another$"):
        run("lora", **resumed | {"lora_rank": 4})
    resumed = {name: x for name, x in resumed.items() if "lora" not in name}
    with pytest.raises(SystemExit, match="^rloo.py: .*optimizer.pt: is of another kind of run, with other weights$"):
        run(**resumed)
    shutil.rmtree(tmp_path / "other" / "checkpoint-2" / "adapter")
    with pytest.raises(SystemExit, match="^rloo.py: --resume: .*checkpoint-2 has no adapters, so .* not of lora.py$"):
        run("lora", **resumed)


def test_what_a_run_in_bfloat16_leaves(run, tmp_path, monkeypatch):
    """The merged policy, from which the last evaluation has sampled, in bfloat16; the reference stays the base."""
    sft = shutil.copytree(MINI / "sft", tmp_path / "sft")
    generation = {"eos_token_id": [0, 9], "top_k": 7, "do_sample": True}
    (sft / "generation_config.json").write_text(json.dumps(generation))
    rollouts, updates = spy(monkeypatch, "rollout"), spy(monkeypatch, "improve")
    flags = {"total_episodes": 16, "weight_decay": 0.5, "num_eval_prompts": 4, "learning_rate": 1e-2}
    metrics, output = run("lora", **flags, sft_model_path=sft, dtype="bfloat16")
    (_, policy, _, _, experience), _ = updates[-1]
    assert policy.dtype == torch.bfloat16
    assert {x.dtype for x in rloo.trained_weights(policy).values()} == {torch.float32}
    base = AutoModelForCausalLM.from_pretrained(sft, dtype=torch.bfloat16)
    expected = merged_by_hand(base, output / "adapter", torch.bfloat16)
    assert same_weights(AutoModelForCausalLM.from_pretrained(output, dtype="auto").state_dict(), expected)
    assert same_weights(rollouts[-1][0][1].state_dict(), expected)
    assert generation.items() <= json.loads((output / "generation_config.json").read_text()).items()
    assert json.loads((output / "adapter" / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(sft),
        "target_modules": ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"],
        "r": 16,
        "lora_alpha": 32,
    }
    base.layout = policy.layout
    base.set_attn_implementation(policy.config._attn_implementation)
    assert torch.equal(rloo.chunked_logprobs(base, experience.batch, 1.0, 64), experience.ref_logprobs)
    assert all(update["val/rollout_logprob_gap"] < 0.1 and update["val/ratio"] == 1 for update in metrics)
    assert len(read_metrics(output, "evaluations")) == 3


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral", "qwen3"])
def test_peft_reads_the_adapters(family, lora, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft, an optional package: pip install peft")
    small_model(family, tmp_path)
    policy, _ = loaded(lora, tmp_path)
    lora.save_adapters(tmp_path / "adapter", policy.flags, policy)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / "adapter")
    assert (theirs(TOKENS).logits - policy(TOKENS).logits).abs().max() < 1e-5
