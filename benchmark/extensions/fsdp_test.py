"""Tests of fsdp.py, and of lora.py on two processes: both run as rloo.py did when these were in it."""

import json
import multiprocessing
import os
import shutil
import socket
import sys
from pathlib import Path

import fsdp
import lora
import pytest
import torch
import torch.nn.functional as F
from conftest import MINI, command_of, read_lines, rloo, without_times
from safetensors.torch import load_file
from torch import distributed as dist

NORM = "gpt_neox.final_layer_norm.weight"


def with_a_constant_norm(load_policy):
    """`load_policy`, but on the second process the weight of the last norm gets no gradient, like that of an expert to
    which no token goes."""

    def load(*inputs):
        policy = load_policy(*inputs)
        norm = policy.base_model.final_layer_norm
        if dist.get_rank() == 1:
            norm.forward = lambda x: F.layer_norm(x, x.shape[-1:], norm.weight.detach(), norm.bias, norm.eps)
        return policy

    return load


def worker(rank: int, port: int, runs: dict, log: Path):
    """One of two processes: does the runs one after the other."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    torch.set_num_threads(1)
    before = dict(vars(rloo))
    for name, flags in runs.items():
        if name == "fsdp, resumed":
            rloo.on_first_rank(lambda target=Path(flags["output_dir"]): copy_with_first_checkpoint(target))
        vars(rloo).update(before)
        vars(rloo).update(fsdp.SEAMS if "fsdp" in name else lora.SEAMS if "lora" in name else {})
        if "idle" in name:
            rloo.load_policy = with_a_constant_norm(rloo.load_policy)
        rloo.main(rloo.parse_args(command_of(flags)))
    dist.destroy_process_group()


def copy_with_first_checkpoint(target: Path):
    shutil.copytree(target.with_name("fsdp"), target)
    for newer in rloo.checkpoints(target)[:-1]:
        shutil.rmtree(newer)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """The folder of all runs, which two processes have made, and what the record says of them."""
    folder = tmp_path_factory.mktemp("processes")
    record = json.loads(Path(__file__).with_name("record.json").read_text())
    paths = {"dataset_name": data, "sft_model_path": MINI / "sft", "reward_model_path": MINI / "reward"}
    common = paths | {"device": "cpu", "save_total_limit": 9} | record["flags"]

    def flags(name, recorded=None, **more):
        own = record["runs"][recorded]["flags"] if recorded else {}
        chosen = common | own | more | {"output_dir": folder / name}
        return {name: value for name, value in chosen.items() if name != "sharding"}

    short = {"total_episodes": 16, "per_device_train_batch_size": 8, "response_length": 6}
    tied = {"sft_model_path": MINI.with_name("mini_gsm8k") / "sft", "reward_model_path": None, "learning_rate": 1e-12}
    tied |= {"reward_fns": f"{__file__}:lengths", "layout": "plain", "kl_coef": 0.0, "num_ppo_epochs": 1}
    wanted = {
        "fsdp": flags("fsdp", "fsdp", save_steps=1),
        "fsdp, resumed": flags("fsdp, resumed", "fsdp", resume=True),
        "fsdp, bfloat16": flags("fsdp, bfloat16", "fsdp, bfloat16", total_episodes=16),
        "fsdp, tied": flags("fsdp, tied", **short | tied),
        "fsdp, idle": flags("fsdp, idle", **short),
        "ddp, idle": flags("ddp, idle", **short),
        "lora": flags("lora", "lora, 2 processes", total_episodes=16),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rloo"])
    logs = [folder / f"log{rank}" for rank in range(2)]
    processes = [context.Process(target=worker, args=(rank, port, wanted, log)) for rank, log in enumerate(logs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0], [log.read_text()[-3000:] for log in logs]
    return folder, {name: one["metrics"] for name, one in record["runs"].items()}


def lengths(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize(
    "name, recorded", [("fsdp", "fsdp"), ("fsdp, bfloat16", "fsdp, bfloat16"), ("lora", "lora, 2 processes")]
)
def test_two_processes_have_the_metrics_that_rloo_py_recorded_when_it_had_fsdp_and_lora(name, recorded, runs):
    folder, record = runs
    metrics = read_lines(folder / name / "metrics.jsonl")
    tolerance = {"rel": 1e-3, "abs": 1e-4} if "bfloat16" not in name else {"rel": 2e-2, "abs": 1e-2}
    assert len(metrics) == (3 if name == "fsdp" else 1)
    for found, update in zip(metrics, record[recorded]):
        assert {name: found[name] for name in update} == pytest.approx(update, **tolerance)


def test_a_resumed_run_ends_like_a_whole_one_and_checkpoints_are_those_of_rloo_py(runs, run, tmp_path):
    folder, _ = runs
    whole, resumed = folder / "fsdp", folder / "fsdp, resumed"
    ours, theirs = (without_times(read_lines(x / "metrics.jsonl")) for x in (whole, resumed))
    assert ours == theirs and len(ours) == 3
    assert (whole / "model.safetensors").read_bytes() == (resumed / "model.safetensors").read_bytes()
    base = load_file(MINI / "sft" / "model.safetensors")
    weights = [load_file(x / "model.safetensors") for x in (whole / "checkpoint-1", whole / "checkpoint-3", whole)]
    assert all(x.keys() == base.keys() and x[NORM].dtype == torch.float32 for x in weights)
    assert not torch.equal(weights[0][NORM], weights[1][NORM]) and torch.equal(weights[1][NORM], weights[2][NORM])
    moments = torch.load(whole / "checkpoint-1" / "optimizer.pt", weights_only=True)
    for state, weight in zip(
        moments.values(), rloo.AutoModelForCausalLM.from_pretrained(whole).parameters(), strict=True
    ):
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == weight.shape
        assert state["step"] == 2 and state["exp_avg"].any()  # two epochs of one step

    target = shutil.copytree(whole, tmp_path / "to one")
    metrics, _ = run({}, output_dir=target, resume=True, total_episodes=32, learning_rate=1e-9)
    assert len(metrics) == 4  # one more, on one process
    found = load_file(target / "model.safetensors")
    assert all(torch.allclose(x, weights[2][name], atol=1e-6) for name, x in found.items())


def test_tied_weights_are_saved_once(runs):
    base = load_file(MINI.with_name("mini_gsm8k") / "sft" / "model.safetensors")
    found = load_file(runs[0] / "fsdp, tied" / "model.safetensors")
    assert found.keys() == base.keys() and "lm_head.weight" not in base
    assert all(torch.allclose(x.float(), base[name].float(), atol=1e-6) for name, x in found.items())


def test_a_weight_without_a_gradient_on_one_process_is_trained(runs):
    before = load_file(MINI / "sft" / "model.safetensors")[NORM]
    ddp, sharded = (load_file(runs[0] / name / "model.safetensors")[NORM] for name in ("ddp, idle", "fsdp, idle"))
    assert (ddp - sharded).abs().max() < 1e-5 < (ddp - before).abs().max()


def test_layers_are_gathered_in_dtype_and_gradients_added_up_in_float32(monkeypatch):
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
