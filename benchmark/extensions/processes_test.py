"""Tests on two processes: runs of fsdp.py, which must be those of rloo.py, alone and with other files; and of lora.py.

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
from extensions_test import GSM8K, MINI, load, read, rloo, without_times, words_of, write_data
from safetensors.torch import load_file
from torch import distributed as dist

NORM = "gpt_neox.final_layer_norm.weight"
SHORT = {"total_episodes": 16}


def flags_of_runs(folder: Path) -> dict:
    """Name of a run, which begins with its extensions -> its flags."""
    common = {"dataset_name": write_data(folder), "sft_model_path": MINI / "sft", "reward_model_path": MINI / "reward"}
    common |= {"response_length": 8, "rloo_k": 4, "per_device_train_batch_size": 8, "total_episodes": 32}
    common |= {"learning_rate": 1e-3, "temperature": 1.0, "num_ppo_epochs": 2, "num_eval_prompts": 0, "device": "cpu"}
    tied = {"sft_model_path": GSM8K / "sft", "reward_model_path": None, "reward_fns": f"{__file__}:remainder"}
    wanted = {
        ", plain": {},
        "fsdp": {"save_steps": 1, "save_total_limit": 9},
        "fsdp, resumed": {"resume": True},
        ", bfloat16": SHORT | {"dtype": "bfloat16"},
        "fsdp, bfloat16": SHORT | {"dtype": "bfloat16", "gradient_checkpointing": True},
        "fsdp, tied": SHORT | tied | {"layout": "plain", "kl_coef": 0.0, "learning_rate": 1e-12},
        "truncate": SHORT | {"top_k": 20, "num_ppo_epochs": 1},
        "truncate fsdp": SHORT | {"top_k": 20, "num_ppo_epochs": 1},
        "fsdp value": SHORT | {"num_ppo_epochs": 1, "value_model_path": MINI / "reward"},
        "value": SHORT | {"num_ppo_epochs": 1, "value_model_path": MINI / "reward"},
        "lora": SHORT | {"lora_rank": 2},
        "lora fsdp": {"lora_rank": 2},
    }
    return {name: common | flags | {"output_dir": folder / name} for name, flags in wanted.items()}


def remainder(completion_ids, **columns):
    return [sum(ids) % 7 for ids in completion_ids]


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


def one_of_two(rank: int, port: int, log: Path, runs: dict):
    """Does the runs one after the other, each with the extensions in its name."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    torch.set_num_threads(1)
    for name, flags in runs.items():
        load("own_loop", *name.partition(",")[0].split())
        rloo.read_model = with_a_constant_norm(rloo.read_model)
        rloo.save_policy = equal_on_both(rloo.save_policy)
        if name == "fsdp, resumed":
            if rank == 0:
                shutil.copytree(flags["output_dir"].with_name("fsdp"), flags["output_dir"])
                shutil.rmtree(flags["output_dir"] / "checkpoint-2")
            dist.barrier()
        try:
            rloo.main(rloo.tyro.cli(rloo.Args, args=words_of(flags), use_underscores=True))
        except rloo.InputError as error:
            log.with_suffix(".refused").write_text(str(error))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all runs, which two processes have made."""
    folder = tmp_path_factory.mktemp("runs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    wanted = flags_of_runs(folder)
    processes = []
    for rank in range(2):
        processes.append(context.Process(target=one_of_two, args=(rank, port, folder / f"log{rank}.txt", wanted)))
        processes[-1].start()
    for rank, process in enumerate(processes):
        process.join()
        assert process.exitcode == 0, (folder / f"log{rank}.txt").read_text()[-3000:]
    return folder


def weights_of(folder) -> dict:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "ours, theirs, tolerance, updates",
    [
        ("fsdp", ", plain", 1e-4, 2),
        ("fsdp, bfloat16", ", bfloat16", 2e-2, 1),
        ("truncate fsdp", "truncate", 1e-4, 1),
        ("fsdp value", "value", 1e-4, 1),
    ],
)
def test_sharded_runs_are_those_without_shards_also_where_a_process_has_no_gradient(
    ours, theirs, tolerance, updates, runs
):
    found, expected = (without_times(read(runs / name)) for name in (ours, theirs))
    assert len(found) == len(expected) == updates
    for mine, other in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, rel=tolerance, abs=tolerance)
    before, found, expected = (weights_of(folder) for folder in (MINI / "sft", runs / ours, runs / theirs))
    assert found.keys() == expected.keys() == before.keys() and found[NORM].dtype == torch.float32
    moved = torch.cat([(expected[name] - before[name]).flatten() for name in before])
    apart = torch.cat([(found[name] - expected[name]).flatten() for name in before])
    assert apart.norm() < (0.2 if "bfloat16" in ours else 0.01) * moved.norm()


def test_a_resumed_run_ends_like_a_whole_one_and_checkpoints_are_those_of_rloo_py(runs, tmp_path):
    whole, resumed = runs / "fsdp", runs / "fsdp, resumed"
    assert without_times(read(whole)) == without_times(read(resumed))
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    first, second, last = (weights_of(folder) for folder in (whole / "checkpoint-1", whole / "checkpoint-2", whole))
    assert not torch.equal(first[NORM], second[NORM]) and torch.equal(second[NORM], last[NORM])

    target = shutil.copytree(whole, tmp_path / "to one")
    load("own_loop")  # rloo.py alone, on one process
    flags = flags_of_runs(tmp_path)["fsdp"] | {"output_dir": target, "resume": True, "total_episodes": 40}
    rloo.main(rloo.tyro.cli(rloo.Args, args=words_of(flags | {"learning_rate": 1e-9}), use_underscores=True))
    assert len(read(target)) == 3
    assert all(torch.allclose(x, last[name], atol=1e-6) for name, x in weights_of(target).items())


def test_tied_weights_are_saved_once(runs):
    base, found = weights_of(GSM8K / "sft"), weights_of(runs / "fsdp, tied")
    assert found.keys() == base.keys() and "lm_head.weight" not in base
    assert all(torch.allclose(x.float(), base[name].float(), atol=1e-6) for name, x in found.items())


def test_adapters_and_critics_of_two_processes_are_trained_alike(runs):  # equal on both, see equal_on_both
    saved = load_file(runs / "lora" / "adapter" / "adapter_model.safetensors")
    assert any(x.any() for name, x in saved.items() if "lora_B" in name)
    ours, theirs = (torch.load(runs / name / "critic.pt") for name in ("fsdp value", "value"))
    assert all(torch.allclose(x, theirs[name], atol=1e-5) for name, x in ours.items())


def test_sharding_of_adapters_is_refused_in_a_line(runs):
    refused = (runs / "log0.refused").read_text()
    assert refused == "fsdp.py: trains all weights; for LoRA on several GPUs use torchrun with lora.py alone"
    assert not (runs / "lora fsdp").exists() or not list((runs / "lora fsdp").glob("*.safetensors"))


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
