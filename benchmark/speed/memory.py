"""Peak memory of training by rloo.py on one and on two processes: --sharding, --gradient_checkpointing.

    python benchmark/memory.py                              # pythia-70m on TL;DR's lengths, a few minutes on 2 cores
    python benchmark/memory.py --shape pythia-1b --dtype bfloat16

Each line of the table is a run of 2 updates by torchrun, on models of a published shape with random weights, as in
throughput.py; the last lines are a model with fewer key heads than heads, in both layouts. Parameters, gradients and
optimizer state are the policy's, counted byte by byte at the second optimizer step. "peak" is the process's: torch's
count on CUDA, else resident memory, with Python, libraries, reference, reward model and what loading takes in it.
"""

import dataclasses
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from throughput import Shape, Workload, call, in_a_process, save, write_inputs


@dataclass
class Args(Workload):
    """Peak memory of training by rloo.py on one and on two processes; prompts are those of each process."""

    grouped_query_shape: Shape = "llama-70m"
    """shape of the last lines"""
    output: str = "benchmark/speed/memory.json"
    """the numbers"""


KINDS = [(1, {}), (1, {"layout": "plain"}), (2, {"sharding": "ddp"}), (2, {"sharding": "fsdp"})]  # processes, options
RUNS = [(processes, options | more) for processes, options in KINDS for more in ({}, {"gradient_checkpointing": True})]


def worker(flags: dict, result: str):
    """One process of a run: trains, and the first one writes down what it held."""
    import rloo

    held, clip = {}, torch.nn.utils.clip_grad_norm_
    optimizers, adamw = [], torch.optim.AdamW

    def nbytes(tensors) -> int:
        return sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in tensors)

    def note(parameters, *args):
        parameters = list(parameters)
        state = [x for values in optimizers[0].state.values() for x in values.values()]
        gradients = nbytes(p.grad for p in parameters)
        held.update(parameters=nbytes(parameters), gradients=gradients, optimizer=nbytes(state))
        return clip(parameters, *args)

    torch.nn.utils.clip_grad_norm_ = note
    torch.optim.AdamW = lambda *args, **kwargs: optimizers.append(adamw(*args, **kwargs)) or optimizers[0]
    rloo.main(rloo.Args(**flags))
    if int(os.environ["RANK"]) == 0:
        last = json.loads((Path(flags["output_dir"]) / "metrics.jsonl").read_text().splitlines()[-1])
        Path(result).write_text(json.dumps({"held": held, "peak_gb": last["memory/peak_gb"]}))


def run(folder: Path, args: Args, processes: int, options: dict) -> dict:
    """Trains on the inputs in `folder`; what `worker` found."""
    total, out = args.prompts * args.rloo_k, Path(tempfile.mkdtemp(dir=folder))
    flags = {
        "sft_model_path": f"{folder}/policy",
        "reward_model_path": f"{folder}/reward",
        "output_dir": f"{out}/run",
        "dataset_name": f"{folder}/data",
        "max_prompt_length": args.max_prompt,
        "rloo_k": args.rloo_k,
        "response_length": args.response_length,
        "per_device_train_batch_size": total,
        "dtype": args.dtype,
        "local_rollout_forward_batch_size": total,
        "gradient_accumulation_steps": 1,
        "num_eval_prompts": 0,
        "total_episodes": 2 * processes * total,
        "num_sample_generations": 0,
        **options,
    }
    call(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            processes,
            __file__,
            "--worker",
            json.dumps(flags),
            out / "result.json",
        ]
    )
    return json.loads((out / "result.json").read_text())


def main(args: Args):
    found = []
    for shape, runs in ((args.shape, RUNS), (args.grouped_query_shape, KINDS[:2])):
        with tempfile.TemporaryDirectory(prefix="memory-") as temporary:
            in_a_process(write_inputs, Path(temporary), dataclasses.replace(args, shape=shape))
            for processes, options in runs:
                print(f"{shape}, {processes} process{'es' * (processes > 1)}: {options}", flush=True)
                result = run(Path(temporary), args, processes, options)
                found.append({"shape": shape, "processes": processes, "options": options, **result})
    print(
        f"\n{args.describe()} per process; GiB per process\n\n{'shape':14}{'processes':11}{'options':44}"
        f"{'parameters':>11}{'gradients':>11}{'optimizer':>11}{'peak':>8}"
    )
    for result in found:
        options = " ".join(f"--{name}" + f" {value}" * (value is not True) for name, value in result["options"].items())
        numbers = "".join(f"{result['held'][name] / 2**30:11.3f}" for name in ("parameters", "gradients", "optimizer"))
        print(f"{result['shape']:14}{result['processes']:<11}{options:44}{numbers}{result['peak_gb']:8.2f}")
    print(f"\n{save({'args': dataclasses.asdict(args), 'found': found}, args.output)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]), sys.argv[3])
    else:
        import tyro

        main(tyro.cli(Args, use_underscores=True))
