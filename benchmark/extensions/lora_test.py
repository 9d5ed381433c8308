"""Tests of lora.py: adapters in 12 architectures, runs like those that rloo.py recorded when it had LoRA itself, what a
run and its checkpoints leave, and PEFT."""

import json
import shutil

import lora
import pytest
import torch
from conftest import MINI, read_lines, rloo, without_times
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
HEADS = SIZE | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
EXPERTS = SIZE | {"num_key_value_heads": 2, "intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
FAMILIES = {
    "gpt_neox": SIZE | {"intermediate_size": 64},
    "llama": EXPERTS,
    "qwen3": HEADS | {"tie_word_embeddings": True},
    "mixtral": EXPERTS | {"num_local_experts": 4, "sliding_window": None},
    "cohere": HEADS,
    # Its routers are linear layers that return a tuple.
    "llama4_text": HEADS | {"num_local_experts": 4, "intermediate_size_mlp": 32, "layer_types": ["full_attention"] * 2},
    "opt": SIZE | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    # Its Mamba layers read the weight of dt_proj directly.
    "jamba": EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False},
    "dots1": EXPERTS | ROUTED | {"first_k_dense_replace": 0, "n_shared_experts": 1},  # has a buffer in float32
}


def tiny_model(family: str, path=None, seed=0):
    """A random model; saved into the folder `path`."""
    torch.manual_seed(seed)
    config = {"vocab_size": 16, "initializer_range": 0.3, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES.get(family, {}) | config)).eval()
    if path:
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                torch.nn.init.normal_(buffer)
        model.save_pretrained(path)
    return model.requires_grad_(False)


def trial_args(**flags):
    defaults = {"lora_rank": 3, "lora_alpha": 6, "device": "cpu", "dtype": "float32", "response_length": 4}
    return lora.Args(**defaults | flags)


def with_adapters(model, std=0.3):
    """The model with adapters whose B is not 0."""
    lora.add_adapters(trial_args(), model)
    for linear in lora.adapted_layers(model).values():
        torch.nn.init.normal_(linear.lora_B.weight, std=std)
    return model


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
def test_adapters_begin_without_effect_and_the_reference_and_the_sampler_are_right(family, tmp_path, monkeypatch):
    """The reference is the base model bit by bit and has its tensors; the sampler equals the policy, and what it keeps
    in float32 is not rounded."""
    tokens = torch.tensor([[5, 3, 8, 4]])
    args = trial_args(sft_model_path=str(tmp_path))
    expected = tiny_model(family, tmp_path)(tokens).logits
    policy = tiny_model(family)
    policy.load_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())
    policy.layout = "plain"
    lora.add_adapters(args, policy)
    assert torch.equal(policy(tokens).logits, expected)
    for linear in lora.adapted_layers(policy).values():
        torch.nn.init.normal_(linear.lora_B.weight, std=0.3)
    found = policy(tokens).logits
    assert (found - expected).abs().max() > 1e-2

    reference = lora.load_reference(args, policy)
    assert torch.equal(reference(tokens).logits, expected) and not lora.adapted_layers(reference)
    own = dict(policy.named_parameters())
    assert all(x is own[name] for name, x in reference.named_parameters())

    sampler = lora.load_sampler(args, policy)
    for _ in range(2):  # again and again from W, not from what was merged before
        lora.update_sampler(sampler, policy)
    assert (sampler(tokens).logits - found).abs().max() < 1e-4
    assert torch.equal(policy(tokens).logits, found)
    half = lora.load_sampler(trial_args(sft_model_path=str(tmp_path), dtype="bfloat16"), policy)
    dtypes = {name: x.dtype for name, x in [*half.named_parameters(), *half.named_buffers()]}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert dtypes == {name: x.dtype for name, x in [*again.named_parameters(), *again.named_buffers()]}


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3", "mixtral", "opt", "jamba", "llama4_text"])
def test_every_linear_layer_but_the_head_has_an_adapter_with_a_gradient(family):
    base, policy = tiny_model(family), with_adapters(tiny_model(family), std=0.03)
    linears = {name for name, module in base.named_modules() if type(module) is torch.nn.Linear}
    expected = {name for name in linears if ".layers." in name and "dt_proj" not in name}
    assert set(lora.adapted_layers(policy)) == expected and len(expected) >= 2 * 4 and linears - expected
    trained = rloo.trained_weights(policy)
    assert {name.rpartition(".lora_")[0] for name in trained} == expected and len(trained) == 2 * len(expected)
    policy(torch.tensor([[5, 3, 8, 4, 9, 11]])).logits.log_softmax(-1)[..., 3].sum().backward()
    assert all(weight.grad.any() for weight in trained.values())


def test_adapters_begin_as_in_peft_and_depend_on_the_seed_alone():
    first = {}
    for seed, other in ((1, 0), (1, 5), (2, 0)):
        model = tiny_model("llama", seed=other)
        lora.add_adapters(trial_args(lora_rank=4, seed=seed), model)
        for name, linear in lora.adapted_layers(model).items():
            A, B = linear.lora_A.weight, linear.lora_B.weight
            assert (A.shape, B.shape) == ((4, linear.in_features), (linear.out_features, 4)) and not B.any()
            assert 0.7 < A.abs().max() * linear.in_features**0.5 <= 1  # uniform within ± 1 / √in
            assert torch.equal(A, first.setdefault(name, A)) == (seed == 1)


def test_what_cannot_be_adapted_is_refused_in_a_line():
    with pytest.raises(rloo.InputError, match="^--lora_rank: GPT2LMHeadModel has no torch.nn.Linear in its layers$"):
        with_adapters(tiny_model("gpt2"))
    with pytest.raises(rloo.InputError, match="^--lora_rank 0: must be at least 1$"):
        lora.add_adapters(trial_args(lora_rank=0), tiny_model("llama"))


def test_the_learning_rate_of_adapters_is_ten_times_that_of_all_weights_unless_given():
    for model, rate in ((None, 2.5e-4), ("a model", 1e-6)):
        flags = {"device": "cpu", "sft_model_path": model}
        assert rloo.resolve_args(rloo.Args(**flags)).learning_rate == rate
        assert lora.resolve_args(lora.Args(**flags)).learning_rate == pytest.approx(10 * rate)
        assert lora.resolve_args(lora.Args(**flags, learning_rate=3e-4)).learning_rate == 3e-4


# ---- Runs ------------------------------------------------------------------------------------------------------------


def test_a_run_has_the_metrics_that_rloo_py_recorded_when_it_had_lora(run, record):
    flags, expected = record("lora")
    metrics, _ = run(lora.SEAMS, **flags)
    for found, update in zip(metrics, expected, strict=True):
        assert {name: found[name] for name in update} == pytest.approx(update, rel=1e-3, abs=1e-4)


class Killed(BaseException):
    """Stands for SIGKILL: in the middle of an update nothing is saved."""


def test_a_killed_run_ends_like_a_whole_one_and_checkpoints_are_merged_at_their_own_update(run, tmp_path, monkeypatch):
    """... also if it goes on with activations computed again."""
    flags = {"lora_rank": 3, "lora_alpha": 6, "total_episodes": 24, "save_steps": 1, "save_total_limit": 9}
    flags |= {"weight_decay": 0.1, "learning_rate": 1e-2, "num_mini_batches": 2, "per_device_train_batch_size": 4}
    metrics, output = run(lora.SEAMS, **flags)
    losses = []

    def dying(*inputs):
        losses.append(inputs)
        if len(losses) == 2 * 2 + 2:  # between the two steps of the last update
            raise Killed
        return rloo_loss(*inputs)

    rloo_loss = rloo.completion_loss
    with pytest.raises(Killed):
        run(lora.SEAMS | {"completion_loss": dying}, **flags, output_dir=tmp_path / "killed")
    assert [path.name for path in rloo.checkpoints(tmp_path / "killed")] == ["checkpoint-2", "checkpoint-1"]
    resumed = {"output_dir": tmp_path / "killed", "resume": True, "gradient_checkpointing": True}
    again, _ = run(lora.SEAMS, **flags | resumed)
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


def test_what_a_run_in_bfloat16_leaves(run, tmp_path, monkeypatch):
    """The merged policy, from which the last evaluation has sampled, in bfloat16; the reference stays the base."""
    sft = shutil.copytree(MINI / "sft", tmp_path / "sft")
    generation = {"eos_token_id": [0, 9], "top_k": 7, "do_sample": True}
    (sft / "generation_config.json").write_text(json.dumps(generation))
    noted = {"rollout": [], "improve": [], "load_policy": []}

    def noting(name, function):
        def noted_call(*inputs, **options):
            output = function(*inputs, **options)
            noted[name].append((inputs, output))
            return output

        return noted_call

    functions = {name: {**vars(rloo), **lora.SEAMS}[name] for name in noted}
    seams = lora.SEAMS | {name: noting(name, function) for name, function in functions.items()}
    flags = {"total_episodes": 16, "weight_decay": 0.5, "num_eval_prompts": 4, "learning_rate": 1e-2}
    metrics, output = run(seams, **flags, sft_model_path=sft, dtype="bfloat16")
    ((_, policy),) = noted["load_policy"]
    assert policy.dtype == torch.bfloat16
    assert {x.dtype for x in rloo.trained_weights(policy).values()} == {torch.float32}
    base = AutoModelForCausalLM.from_pretrained(sft, dtype=torch.bfloat16)
    expected = merged_by_hand(base, output / "adapter", torch.bfloat16)
    assert same_weights(AutoModelForCausalLM.from_pretrained(output, dtype="auto").state_dict(), expected)
    assert same_weights(noted["rollout"][-1][0][1].state_dict(), expected)
    assert generation.items() <= json.loads((output / "generation_config.json").read_text()).items()
    assert json.loads((output / "adapter" / "adapter_config.json").read_text()) == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(sft),
        "target_modules": ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"],
        "r": 16,
        "lora_alpha": 32,
    }
    experience = noted["improve"][-1][0][3]
    base.layout = "group"
    base.set_attn_implementation(policy.config._attn_implementation)
    assert torch.equal(rloo.chunked_logprobs(base, experience.batch, 1.0, 64), experience.ref_logprobs)
    assert all(update["val/rollout_logprob_gap"] < 0.1 and update["val/ratio"] == 1 for update in metrics)
    assert len(read_lines(output / "evaluations.jsonl")) == 3


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral", "qwen3"])
def test_peft_reads_the_adapters(family, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft, an optional package: pip install peft")
    tokens = torch.tensor([[5, 3, 8, 4]])
    tiny_model(family, tmp_path)
    policy = with_adapters(tiny_model(family))
    policy.load_state_dict(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), strict=False)
    lora.save_adapters(tmp_path / "adapter", trial_args(sft_model_path=str(tmp_path)), policy)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / "adapter")
    assert (theirs(tokens).logits - policy(tokens).logits).abs().max() < 1e-5
