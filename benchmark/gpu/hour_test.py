"""Tests of hour.py and profiled.py: tiny models, on a CPU."""

import argparse
from pathlib import Path
from types import SimpleNamespace

import gpu_memory
import hour
import profiled
import pytest
import torch
import transformers

import rloo

DEVICE = torch.autograd.DeviceType


def arguments(tmp_path, *parts):
    return argparse.Namespace(
        parts=parts, out=tmp_path / "out", device="cpu", trl="trl/python", other=[Path("before.py")]
    )


@pytest.mark.parametrize("family", ["Qwen2.5", "GPT-NeoX"])
def test_completions_end_with_two_percent_at_each_token(family):
    model = gpu_memory.Model(family, 0, 2, 512, 512, 512, 1_000)
    torch.manual_seed(0)
    config = hour.config_of(model, eos_token_id=998, pad_token_id=999)
    policy = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    hour.let_it_end(policy, 998)
    with torch.no_grad():
        logits = policy(torch.randint(998, (4, 30))).logits.float() / hour.TEMPERATURE
    found = logits.softmax(-1)[..., 998]
    assert 0.015 < found.min() < found.max() < 0.027


def test_a_run_of_rloo_py_is_profiled_by_parts_and_kinds(tmp_path, monkeypatch, capfd):
    model, run = hour.TINY
    hour.write_inputs(tmp_path, model, run, "cpu")
    monkeypatch.setattr(rloo, "timed", profiled.profiled_part)
    monkeypatch.setattr(hour, "TIMED", 1)
    command = hour.throughput.rloo_py(tmp_path, **hour.flags_of(arguments(tmp_path), tmp_path, run))
    rloo.command_line([*command[2:], f"--output_dir={tmp_path / 'out'}"])
    last = hour.common.read_lines(tmp_path / "out" / "metrics.jsonl")[2]
    for part in ("rollout", "reference", "train"):
        kinds = profiled.found[part]
        assert kinds["together"] == last[f"time/{part}"] > kinds["matrix products"] > 0 and kinds["gaps"] > 0
        assert sum(kinds.values()) == pytest.approx(2 * kinds["together"])
    assert profiled.found["train"]["optimizer"] > 0 and "optimizer" not in profiled.found["rollout"]
    assert profiled.table().startswith("| seconds | rollout | reference | reward | train |")


def test_kernels_of_a_gpu_have_kinds():
    times = {
        "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)": "attention",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>": "attention",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT": "matrix products",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>": "matrix products",
        "at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
        "void at::native::cunn_SoftMaxForward<8, float, LogSoftMaxForwardEpilogue>": profiled.ELEMENTWISE,
        "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>": profiled.ELEMENTWISE,
        "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::CatArrayBatchedCopy<at::native::OpaqueType<2u>>": "copies",
    }
    rows = [SimpleNamespace(key=name, device_type=DEVICE.CUDA, self_device_time_total=2e6) for name in times]
    rows += [SimpleNamespace(key="Optimizer.step#AdamW.step", device_type=DEVICE.CUDA, self_device_time_total=9e6)]
    rows += [SimpleNamespace(key="aten::mm", device_type=DEVICE.CPU, self_device_time_total=9e6)]
    found = profiled.kernels(SimpleNamespace(key_averages=lambda: rows), on_gpu=True)
    assert found == dict.fromkeys(times, 2.0)
    assert {name: profiled.kind_of(name) for name in times} == times


def test_lanes_take_the_same_flags_and_a_part_that_fails_is_the_exit_status(tmp_path, monkeypatch, capsys):
    seen = []

    def run(command, folder, first):
        seen.append([str(word) for word in command])
        update = {"seconds": 2.0, "time/train": 1.5, "memory/peak_gb": 3.0}
        return {"updates": [update, update | {"seconds": 4.0}], "peak_gb": 0.0}

    monkeypatch.setattr(hour.throughput, "run", run)
    monkeypatch.setitem(hour.PARTS, "real", lambda args: 1 / 0)
    assert hour.main(arguments(tmp_path, "real", "0.5b")) == 1
    assert "ZeroDivisionError" in (tmp_path / "out" / "real.txt").read_text()
    text = (tmp_path / "out" / "0.5b.txt").read_text()
    assert "| TRL, ends | 3.00 (2.00 to 4.00) | 0.00, 0.00, 1.50 | 2.7 | 3.0 | 0.0000 |" in text

    programs = [next(word.rpartition("/")[2] for word in words if word.endswith(".py")) for words in seen]
    assert programs == ["rloo.py", "run.py", "rloo.py", "run.py", "rloo.py", "before.py"]
    episodes = {word for words in seen for word in words if "total_episodes" in word}
    assert episodes == {"--total_episodes=40"} and "--layout=plain" in seen[4]
    models = [word.rpartition("/")[2] for words in seen for word in words if "sft_model_path" in word]
    assert models == ["policy"] * 2 + ["ends"] * 2 + ["policy"] * 2


def test_rewards_are_means_over_seeds_of_the_last_tenth_of_the_updates(tmp_path, monkeypatch):
    def output_of(command):
        flags = dict(word.removeprefix("--").split("=") for word in command[2:])
        out = Path(flags["output_dir"])
        out.mkdir()
        own = int(flags["seed"]) + 10 * ("bfloat16" in flags["dtype"]) + 100 * (command[1] != "rloo.py")
        rloo.append(out / "metrics.jsonl", [{"objective/scores": 0.0, "val/rollout_logprob_gap": 0.25}] * 9)
        rloo.append(out / "metrics.jsonl", [{"objective/scores": own, "val/rollout_logprob_gap": 0.25}])

    monkeypatch.setattr(hour, "output_of", output_of)
    lines = hour.rewards(arguments(tmp_path)).splitlines()[2:]
    assert lines == [
        "| rloo.py, float32 | 2.000 ± 0.577 | 0.2500 |",
        "| rloo.py, bfloat16 | 12.000 ± 0.577 | 0.2500 |",
        "| before.py, bfloat16 | 112.000 ± 0.577 | 0.2500 |",
    ]
