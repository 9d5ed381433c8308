"""Tests on two processes: runs of fsdp.py, alone and with other files, must be the runs of the same files without it.

python -m pytest -q benchmark/extensions/processes_test.py
"""

import multiprocessing
import os
import shutil
import socket
import sys
from pathlib import Path
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from extensions_test import MINI, SMALL, load, read, rloo, weights_of, without_times, write_data
from torch import distributed as dist

NORM = "gpt_neox.final_layer_norm.weight"
RUNS = {  # name of a run, which begins with its extensions -> its flags
    ", plain": {"total_episodes": 32},
    "fsdp": {"total_episodes": 32, "save_steps": 1, "save_total_limit": 9},
    "fsdp, resumed": {"total_episodes": 32, "resume": True},
    ", bfloat16": {"dtype": "bfloat16"},
    "fsdp, bfloat16": {"dtype": "bfloat16", "gradient_checkpointing": True},
    "truncate value": {"top_k": 20, "value_model_path": f"{MINI}/reward", "num_ppo_epochs": 1},
    "truncate fsdp value": {"top_k": 20, "value_model_path": f"{MINI}/reward", "num_ppo_epochs": 1},
    "lora": {"lora_rank": 2},
    "lora fsdp": {"lora_rank": 2},
}


def constant_norm(norm, x):
    return F.layer_norm(x, x.shape[-1:], norm.weight.detach(), norm.bias, norm.eps)


def with_a_constant_norm(read_model):
    """`read_model`, but on the second process the weight of the last norm gets no gradient, like that of an expert to
    which no token goes."""

    def read_with_constant(*inputs, **options):
        model = read_model(*inputs, **options)
        norm = getattr(model.base_model, "final_layer_norm", None)
        if norm and dist.get_rank() == 1:
            norm.forward = MethodType(constant_norm, norm)
        return model

    return read_with_constant


def equal_on_both(save_policy):
    """`save_policy`, but the weights that are trained, also those of a critic, must be the same on both processes."""

    def save(folder, master, tokenizer):
        weights = [x for x in master.parameters() if x.requires_grad]
        if value := sys.modules.get("benchmark.extensions.value"):
            weights += value.critic.parameters()
        sums = [getattr(x, "full_tensor", lambda x=x: x)().double().sum().item() for x in weights]
        first, second = rloo.gather([sums])
        assert first == second and any(first)
        save_policy(folder, master, tokenizer)

    return save


def one_of_two(rank: int, port: int, folder: Path):
    """Does the runs one after the other, each with the extensions in its name."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port)}
    sys.stdout = sys.stderr = (folder / f"log{rank}.txt").open("w", buffering=1)
    torch.set_num_threads(1)
    common = SMALL | {"dataset_name": f"{folder}/rows.jsonl", "response_length": 8, "rloo_k": 4, "num_ppo_epochs": 2}
    for name, flags in RUNS.items():
        load("own_loop", *name.partition(",")[0].split())
        rloo.read_model = with_a_constant_norm(rloo.read_model)
        rloo.save_policy = equal_on_both(rloo.save_policy)
        if name == "fsdp, resumed":
            if rank == 0:
                shutil.copytree(folder / "fsdp", folder / name)
                shutil.rmtree(folder / name / "checkpoint-2")
            dist.barrier()
        rloo.main(rloo.Args(**common | {"total_episodes": 16} | flags, output_dir=f"{folder}/{name}"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs, which two processes have made."""
    folder = tmp_path_factory.mktemp("runs")
    write_data(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=one_of_two, args=(rank, port, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        process.join()
        assert process.exitcode == 0, (folder / f"log{rank}.txt").read_text()[-3000:]
    return folder


@pytest.mark.parametrize("name", [name for name in RUNS if "fsdp" in name])
def test_sharded_runs_are_those_without_shards_also_where_a_process_has_no_gradient(name, runs):
    other = ", plain" if name in ("fsdp", "fsdp, resumed") else name.replace("fsdp ", "").replace(" fsdp", "")
    ours, theirs = runs / name, runs / other.replace("fsdp", "")
    tolerance = 2e-2 if "bfloat16" in name else 1e-4
    found, expected = (without_times(read(folder)) for folder in (ours, theirs))
    assert len(found) == len(expected) > 0
    for mine, row in zip(found, expected, strict=True):
        assert mine == pytest.approx(row, rel=tolerance, abs=tolerance)
    before, found, expected = (weights_of(folder) for folder in (MINI / "sft", ours, theirs))
    assert found.keys() == expected.keys() == before.keys() and found[NORM].dtype == torch.float32
    moved = torch.cat([(expected[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(found[name] - expected[name]).flatten() for name in before])
    assert apart.norm() < (0.2 if "bfloat16" in name else 0.01) * moved.norm() != 0
    if "value" in name:
        mine, critic = (torch.load(folder / "critic.pt") for folder in (ours, theirs))
        assert all(torch.allclose(x, critic[name], atol=1e-5) for name, x in mine.items())


def test_a_resumed_run_ends_like_a_whole_one_and_checkpoints_are_those_of_rloo_py(runs, tmp_path):
    whole, resumed = runs / "fsdp", runs / "fsdp, resumed"
    assert without_times(read(whole)) == without_times(read(resumed))
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    first, second, last = (weights_of(folder) for folder in (whole / "checkpoint-1", whole / "checkpoint-2", whole))
    assert not torch.equal(first[NORM], second[NORM]) and torch.equal(second[NORM], last[NORM])

    target = shutil.copytree(whole, tmp_path / "to one")
    load("own_loop")  # rloo.py alone, on one process
    flags = SMALL | {"dataset_name": f"{runs}/rows.jsonl", "total_episodes": 40, "learning_rate": 1e-9}
    rloo.main(rloo.Args(**flags, output_dir=str(target), resume=True))
    assert len(read(target)) == 3
    assert all(torch.allclose(x, last[name], atol=1e-6) for name, x in weights_of(target).items())


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
