"""Tests on two processes: runs of fsdp.py, alone and with other files, must be the runs of the same files without it.

python -m pytest -q benchmark/extensions/processes_test.py
"""

import shutil
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from extensions_test import load, weights_of
from torch import distributed as dist

import rloo
from rloo_test import on_two_processes, read_metrics, run_flags, tiny_model, without_times

NORM = "gpt_neox.final_layer_norm.weight"
LONGER = {"total_episodes": 64}
VALUE = {"top_k": 5, "num_ppo_epochs": 1}
PLAIN = {  # name of a run with fsdp.py -> that of the run without it
    "fsdp": "plain",
    "fsdp, resumed": "plain",
    "fsdp, bfloat16": "plain, bfloat16",
    "truncate fsdp value": "truncate value",
    "lora fsdp": "lora",
}
RUNS = {  # name of a run, which begins with its extensions -> its flags
    "plain": LONGER,
    "fsdp": LONGER | {"save_steps": 1, "save_total_limit": 9},
    "fsdp, resumed": LONGER | {"resume": True},
    "plain, bfloat16": {"dtype": "bfloat16"},
    "fsdp, bfloat16": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "truncate value": VALUE,
    "truncate fsdp value": VALUE,
    "lora": {"lora_rank": 2},
    "lora fsdp": {"lora_rank": 2},
}


def constant_norm(norm, x):
    return F.layer_norm(x, x.shape[-1:], norm.weight.detach(), norm.bias, norm.eps)


def one_of_two(tiny: Path, folder: Path):
    """Does the runs one after the other, each with the extensions in its name. On the second process the weight of the
    last norm gets no gradient, like that of an expert to which no token goes. Weights that are trained, also those of a
    critic, must be the same on both when they are saved."""

    def read_model(*inputs, **options):
        model = rloo_read_model(*inputs, **options)
        norm = model.base_model.final_layer_norm
        if dist.get_rank() == 1:
            norm.forward = MethodType(constant_norm, norm)
        return model

    def save_policy(folder, master, tokenizer):
        weights = [x for x in master.parameters() if x.requires_grad]
        if "value" in name:
            weights += sys.modules["benchmark.extensions.value"].critic.parameters()
        sums = [getattr(x, "full_tensor", lambda x=x: x)().double().sum().item() for x in weights]
        first, second = rloo.gather([sums])
        assert first == second and any(first)
        extension_save_policy(folder, master, tokenizer)

    rloo_read_model = rloo.read_model
    for name, flags in RUNS.items():
        load(*name.partition(",")[0].replace("plain", "").split())
        extension_save_policy = rloo.save_policy
        rloo.read_model, rloo.save_policy = read_model, save_policy
        if "value" in name:
            flags = flags | {"value_model_path": str(tiny / "reward")}
        if name == "fsdp, resumed":
            if dist.get_rank() == 0:
                shutil.copytree(folder / "fsdp", folder / name)
                shutil.rmtree(folder / name / "checkpoint-2")
            dist.barrier()
        flags = {"rloo_k": 4, "num_ppo_epochs": 2, "total_episodes": 32} | flags
        rloo.main(rloo.Args(**run_flags(tiny, folder / name, **flags)))


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """The folder of all runs, which two processes have made."""
    folder = tmp_path_factory.mktemp("runs")
    on_two_processes(folder, one_of_two, tiny, folder)()
    return folder


@pytest.mark.parametrize("name", PLAIN)
def test_sharded_runs_are_those_without_shards_also_where_a_process_has_no_gradient(name, runs, tiny):
    ours, theirs = runs / name, runs / PLAIN[name]
    tolerance = 2e-2 if "bfloat16" in name else 1e-4
    found, expected = (without_times(read_metrics(folder)) for folder in (ours, theirs))
    assert len(found) == len(expected) > 0
    for mine, row in zip(found, expected, strict=True):
        assert mine == pytest.approx(row, rel=tolerance, abs=tolerance)
    before, found, expected = (weights_of(folder) for folder in (tiny / "sft", ours, theirs))
    assert found.keys() == expected.keys() == before.keys() and found[NORM].dtype == torch.float32
    moved = torch.cat([(expected[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(found[name] - expected[name]).flatten() for name in before])
    assert apart.norm() < (0.2 if "bfloat16" in name else 0.01) * moved.norm() != 0
    if "value" in name:
        mine, critic = (torch.load(folder / "critic.pt") for folder in (ours, theirs))
        assert all(torch.allclose(x, critic[name], atol=1e-5) for name, x in mine.items())


def test_a_resumed_run_ends_like_a_whole_one_and_checkpoints_are_those_of_rloo_py(runs, tiny, tmp_path):
    whole, resumed = runs / "fsdp", runs / "fsdp, resumed"
    assert without_times(read_metrics(whole)) == without_times(read_metrics(resumed))
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    first, second, last = (weights_of(folder) for folder in (whole / "checkpoint-1", whole / "checkpoint-2", whole))
    assert not torch.equal(first[NORM], second[NORM]) and torch.equal(second[NORM], last[NORM])

    target = shutil.copytree(whole, tmp_path / "to one")
    load()  # rloo.py alone, on one process
    rloo.main(rloo.Args(**run_flags(tiny, target, total_episodes=80, learning_rate=1e-9, resume=True)))
    assert len(read_metrics(target)) == 3
    assert all(torch.allclose(x, last[name], atol=1e-6) for name, x in weights_of(target).items())


def test_layers_are_gathered_in_dtype_and_gradients_added_up_in_float32(monkeypatch):
    fsdp = load("fsdp")
    model = tiny_model()
    model.set_reduce_scatter_unused_params = lambda unused: None
    sharded = []
    monkeypatch.setattr(dist, "init_device_mesh", lambda *inputs: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, **options: sharded.append((module, options["mp_policy"])))
    monkeypatch.setattr(fsdp, "register_fsdp_forward_method", lambda *inputs: None)
    fsdp.shard(rloo.Args(device="cpu", dtype="bfloat16"), model)
    assert [module for module, _ in sharded] == [*model.base_model.layers, model]
    assert {(x.param_dtype, x.reduce_dtype) for _, x in sharded} == {(torch.bfloat16, torch.float32)}
