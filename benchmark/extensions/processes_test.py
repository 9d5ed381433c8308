"""Tests on two processes: of fsdp.py, whose runs must be those of rloo.py; of lora.py; of turns.py with value.py."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import GSM8K, MINI, command_of, load, write_data
from safetensors.torch import load_file
from torch import distributed as dist

import rloo
from rloo_test import on_two_processes, read_metrics, without_times

NORM = "gpt_neox.final_layer_norm.weight"


def with_a_constant_norm(read_model):
    """`read_model`, but on the second process the weight of the last norm gets no gradient, like that of an expert to
    which no token goes."""

    def read(*inputs, **options):
        model = read_model(*inputs, **options)
        norm = model.base_model.final_layer_norm
        if dist.get_rank() == 1:
            norm.forward = lambda x: F.layer_norm(x, x.shape[-1:], norm.weight.detach(), norm.bias, norm.eps)
        return model

    return read


def with_equal_weights(save_policy):
    """`save_policy`, but the weights that are trained, also those of a critic, must be the same on both processes."""

    def save(folder, master, tokenizer):
        weights = [*rloo.trained_weights(master).values()]
        if value := sys.modules.get("benchmark.extensions.value"):
            weights += value.critic.parameters()
        first, second = rloo.gather([[x.double().sum().item() for x in weights]])
        assert first == second and any(first)
        save_policy(folder, master, tokenizer)

    return save


def several_runs(runs: dict):
    """Does the runs one after the other, each with the extensions in its name."""
    before = dict(vars(rloo))
    for name, flags in runs.items():
        vars(rloo).update(before)
        extensions = [x for x in ("fsdp", "lora", "turns", "value") if x in name]
        if name == "fsdp, resumed":
            rloo.on_first_rank(lambda target=flags["output_dir"]: copy_with_first_checkpoint(target))
        if name.startswith(("fsdp", "none")):
            rloo.read_model = with_a_constant_norm(rloo.read_model)
        if extensions:
            load(*extensions)
        if "fsdp" not in name:
            rloo.save_policy = with_equal_weights(rloo.save_policy)
        rloo.main(rloo.tyro.cli(rloo.Args, args=command_of(flags), use_underscores=True))
    dist.destroy_process_group()


def copy_with_first_checkpoint(target: Path):
    shutil.copytree(target.with_name("fsdp"), target)
    for newer in rloo.checkpoints(target)[:-1]:
        shutil.rmtree(newer)


def begin(folder: Path):
    common = {"dataset_name": write_data(folder), "sft_model_path": MINI / "sft", "reward_model_path": MINI / "reward"}
    common |= {"response_length": 8, "rloo_k": 4, "per_device_train_batch_size": 8, "total_episodes": 32}
    common |= {"learning_rate": 1e-3, "temperature": 1.0, "num_ppo_epochs": 2, "num_eval_prompts": 0, "device": "cpu"}
    short = {"total_episodes": 16}
    tied = short | {"sft_model_path": GSM8K / "sft", "reward_model_path": None, "reward_fns": f"{__file__}:remainder"}
    tool = {"dataset_name": GSM8K, "tool": f"{__file__}:seven", "tool_mark": " =", "response_length": 16}
    wanted = {
        "fsdp": {"save_steps": 1, "save_total_limit": 9},
        "fsdp, resumed": {"resume": True},
        "none": {},
        "fsdp, bfloat16": short | {"dtype": "bfloat16"},
        "none, bfloat16": short | {"dtype": "bfloat16"},
        "tied, fsdp": tied | {"layout": "plain", "kl_coef": 0.0, "learning_rate": 1e-12},
        "lora": short | {"lora_rank": 2},
        "turns, value": tied | tool,
    }
    wanted = {name: common | flags | {"output_dir": folder / name} for name, flags in wanted.items()}
    return on_two_processes(folder, several_runs, wanted)


@pytest.fixture(scope="module")
def runs(started):
    """The folder of all runs, which two processes have made."""
    folder, wait = started
    wait()
    return folder


def seven(text):
    return " 7."


def remainder(completion_ids, **columns):
    return [sum(ids) % 7 for ids in completion_ids]


@pytest.mark.parametrize("dtype, tolerance, updates", [("", 1e-4, 2), (", bfloat16", 2e-2, 1)])
def test_sharded_runs_are_those_of_rloo_py_also_where_a_process_has_no_gradient(dtype, tolerance, updates, runs):
    ours, theirs = (without_times(read_metrics(runs / f"{name}{dtype}")) for name in ("fsdp", "none"))
    assert len(ours) == len(theirs) == updates
    for found, expected in zip(ours, theirs):
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)
    before, found, expected = (
        load_file(folder / "model.safetensors")
        for folder in (MINI / "sft", runs / f"fsdp{dtype}", runs / f"none{dtype}")
    )
    assert found.keys() == expected.keys() == before.keys() and found[NORM].dtype == torch.float32
    moved = torch.cat([(expected[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(found[name] - expected[name]).flatten() for name in before])
    assert apart.norm() < (0.01 if dtype == "" else 0.2) * moved.norm()
    if dtype == "":
        assert (found[NORM] - expected[NORM]).abs().max() < 1e-5 < (expected[NORM] - before[NORM]).abs().max()


def test_a_resumed_run_ends_like_a_whole_one_and_checkpoints_are_those_of_rloo_py(runs, run, tmp_path):
    whole, resumed = runs / "fsdp", runs / "fsdp, resumed"
    ours, theirs = (without_times(read_metrics(x)) for x in (whole, resumed))
    assert ours == theirs and len(ours) == 2
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    weights = [load_file(x / "model.safetensors") for x in (whole / "checkpoint-1", whole / "checkpoint-2", whole)]
    assert not torch.equal(weights[0][NORM], weights[1][NORM]) and torch.equal(weights[1][NORM], weights[2][NORM])
    moments = torch.load(whole / "checkpoint-1" / "optimizer.pt", weights_only=True)
    for state, weight in zip(
        moments.values(), rloo.AutoModelForCausalLM.from_pretrained(whole).parameters(), strict=True
    ):
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == weight.shape
        assert state["step"] == 2 and state["exp_avg"].any()  # two epochs of one step

    target = shutil.copytree(whole, tmp_path / "to one")
    metrics, _ = run(output_dir=target, resume=True, total_episodes=40, learning_rate=1e-9)
    assert len(metrics) == 3  # one more, on one process
    found = load_file(target / "model.safetensors")
    assert all(torch.allclose(x, weights[2][name], atol=1e-6) for name, x in found.items())


def test_tied_weights_are_saved_once(runs):
    base, found = load_file(GSM8K / "sft/model.safetensors"), load_file(runs / "tied, fsdp" / "model.safetensors")
    assert found.keys() == base.keys() and "lm_head.weight" not in base
    assert all(torch.allclose(x.float(), base[name].float(), atol=1e-6) for name, x in found.items())


def test_adapters_of_two_processes_are_trained_alike(runs):
    saved = load_file(runs / "lora" / "adapter" / "adapter_model.safetensors")  # equal on both, see with_equal_weights
    assert any(x.any() for name, x in saved.items() if "lora_B" in name)


def test_turns_and_value_together_keep_equal_weights(runs):  # see with_equal_weights
    (metrics,) = read_metrics(runs / "turns, value")
    assert metrics["episode"] == 16 and metrics["tool/answers"] > 0.5 and metrics["grad_norm"] > 0


def test_layers_are_gathered_in_dtype_and_gradients_added_up_in_float32(monkeypatch):
    fsdp = load("fsdp")
    model = rloo.AutoModelForCausalLM.from_pretrained(MINI / "sft")
    model.set_reduce_scatter_unused_params = lambda unused: None
    sharded = []
    monkeypatch.setattr(dist, "init_device_mesh", lambda *inputs: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, **options: sharded.append((module, options["mp_policy"])))
    monkeypatch.setattr(fsdp, "register_fsdp_forward_method", lambda *inputs: None)
    fsdp.shard(rloo.Args(device="cpu", dtype="bfloat16"), model)
    assert [module for module, _ in sharded] == [*model.base_model.layers, model]
    assert {(x.param_dtype, x.reduce_dtype) for _, x in sharded} == {(torch.bfloat16, torch.float32)}
