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
from torch.distributed.fsdp import MixedPrecisionPolicy

import rloo
from rloo_test import on_two_processes, read_metrics, run_flags, without_times

NORM = "gpt_neox.final_layer_norm.weight"
CASES = {  # extensions without and with fsdp.py, flags
    "float32": ("", "fsdp", {"total_episodes": 64, "save_steps": 1, "num_ppo_epochs": 2}),
    "bfloat16": ("", "fsdp", {"dtype": "bfloat16", "gradient_checkpointing": True, "num_ppo_epochs": 2}),
    "value": ("truncate value", "truncate fsdp value", {"top_k": 5}),
    "lora": ("lora", "lora fsdp", {"lora_rank": 2, "num_ppo_epochs": 2}),
}


def constant_norm(norm, x):
    return F.layer_norm(x, x.shape[-1:], norm.weight.detach(), norm.bias, norm.eps)


def one_run(tiny: Path, output: Path, extensions: str, flags: dict):
    """On the second process the weight of the last norm gets no gradient, like that of an expert to which no token
    goes. Weights that are trained, also those of a critic, must be the same on both when they are saved, and layers
    must be gathered in --dtype and gradients summed in float32."""

    def read_model_with_constant_norm(*inputs, **options):
        model = read_model(*inputs, **options)
        norm = model.base_model.final_layer_norm
        if dist.get_rank() == 1:
            norm.forward = MethodType(constant_norm, norm)
        return model

    def save_equal_policies(folder, master, tokenizer):
        weights = [x for x in master.parameters() if x.requires_grad]
        if "value" in extensions:
            weights += sys.modules["benchmark.extensions.value"].critic.parameters()
        sums = [getattr(x, "full_tensor", lambda x=x: x)().double().sum().item() for x in weights]
        of_ranks = [None, None]
        dist.all_gather_object(of_ranks, sums)
        assert of_ranks[0] == of_ranks[1] and any(sums)
        save_policy(folder, master, tokenizer)

    def shard(module, **options):
        dtype = getattr(torch, flags.get("dtype", "float32"))
        assert options["mp_policy"] == MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
        fully_shard(module, **options)

    load(*extensions.split())
    read_model, save_policy = rloo.read_model, rloo.save_policy
    rloo.read_model, rloo.save_policy = read_model_with_constant_norm, save_equal_policies
    if "fsdp" in extensions:
        fsdp = sys.modules["benchmark.extensions.fsdp"]
        fully_shard, fsdp.fully_shard = fsdp.fully_shard, shard
    value = {"value_model_path": f"{tiny}/reward"} if "value" in extensions else {}
    rloo.main(rloo.Args(**run_flags(tiny, output, **{"rloo_k": 4, "total_episodes": 32} | flags | value)))


def all_runs(tiny: Path, folder: Path):
    for name, (without, sharded, flags) in CASES.items():
        one_run(tiny, folder / name, without, flags)
        one_run(tiny, folder / name / "fsdp", sharded, flags)
    resumed = folder / "resumed"
    if dist.get_rank() == 0:
        shutil.copytree(folder / "float32" / "fsdp", resumed)
        shutil.rmtree(resumed / "checkpoint-2")
    dist.barrier()
    one_run(tiny, resumed, "fsdp", CASES["float32"][2] | {"resume": True})


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """The folder of all runs, which two processes have made."""
    folder = tmp_path_factory.mktemp("runs")
    on_two_processes(folder, all_runs, tiny, folder)()
    return folder


@pytest.mark.parametrize("name", CASES)
def test_sharded_runs_are_those_without_shards_also_where_a_process_has_no_gradient(name, runs, tiny):
    ours, theirs = runs / name / "fsdp", runs / name
    tolerance = 2e-2 if name == "bfloat16" else 1e-4
    found, expected = (without_times(read_metrics(folder)) for folder in (ours, theirs))
    assert len(found) == len(expected) > 0
    for mine, row in zip(found, expected, strict=True):
        assert mine == pytest.approx(row, rel=tolerance, abs=tolerance)
    before, found, expected = (weights_of(folder) for folder in (tiny / "sft", ours, theirs))
    assert found.keys() == expected.keys() == before.keys() and found[NORM].dtype == torch.float32
    moved = torch.cat([(expected[weight] - before[weight]).flatten() for weight in before])
    apart = torch.cat([(found[weight] - expected[weight]).flatten() for weight in before])
    assert apart.norm() < (0.2 if name == "bfloat16" else 0.01) * moved.norm() != 0
    if name == "value":
        mine, critic = (torch.load(folder / "critic.pt") for folder in (ours, theirs))
        assert all(torch.allclose(x, critic[weight], atol=1e-5) for weight, x in mine.items())


def test_a_resumed_run_ends_like_a_whole_one_and_rloo_py_continues_from_its_checkpoint(runs, tiny):
    whole, resumed = runs / "float32" / "fsdp", runs / "resumed"
    assert without_times(read_metrics(whole)) == without_times(read_metrics(resumed))
    first, second, last = (weights_of(folder) for folder in (whole / "checkpoint-1", resumed / "checkpoint-2", whole))
    assert not torch.equal(first[NORM], second[NORM]) and torch.equal(second[NORM], last[NORM])
    load()  # rloo.py alone, on one process
    flags = {"per_device_train_batch_size": 32, "total_episodes": 96, "learning_rate": 1e-9, "resume": True}
    rloo.main(rloo.Args(**run_flags(tiny, resumed, **flags)))
    assert len(read_metrics(resumed)) == 3
    assert all(torch.allclose(x, last[name], atol=1e-6) for name, x in weights_of(resumed).items())
