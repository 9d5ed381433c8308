"""Peak memory of training by rloo.py on one and on two processes: --sharding, --gradient_checkpointing.

    python benchmark/memory.py                              # pythia-70m on TL;DR's lengths, a few minutes on 2 cores
    python benchmark/memory.py --shape pythia-1b --dtype bfloat16

Each line of the table is a run of 2 updates with --save_steps 0, by torchrun, on models of a published shape with random
weights, as in throughput.py. "held" counts what a process holds at the second optimizer step, byte by byte: parameters,
gradients and optimizer state of the policy. "peak" is the process's: torch's count on CUDA, else resident memory, with
Python, libraries, reference and reward model in it, and with what loading whole models before sharding them takes.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from throughput import ROOT, Workload, in_a_process, write_inputs

sys.path.insert(0, str(ROOT))


@dataclass
class Args(Workload):
    """Peak memory of training by rloo.py on one and on two processes; prompts are those of each process."""

    output: str = "benchmark/memory.json"
    """the numbers"""


RUNS = [(1, {}), (1, {"gradient_checkpointing": True}), (1, {"layout": "plain", "rollout_engine": "hf"}),
        (1, {"layout": "plain", "rollout_engine": "hf", "gradient_checkpointing": True}), (2, {"sharding": "ddp"}),
        (2, {"sharding": "ddp", "gradient_checkpointing": True}), (2, {"sharding": "fsdp"}),
        (2, {"sharding": "fsdp", "gradient_checkpointing": True})]


def worker(flags: dict, result: str):
    """One process of a run: trains, and the first one writes down what it held."""
    import rloo

    held, optimizers, average, adamw = {}, [], rloo.average_gradients, torch.optim.AdamW

    def nbytes(tensors) -> int:
        return sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in tensors)

    def note(parameters):
        parameters = list(parameters)
        average(parameters)
        state = [x for values in optimizers[0].state.values() for x in values.values()]
        gradients = nbytes(p.grad for p in parameters)
        held.update(parameters=nbytes(parameters), gradients=gradients, optimizer=nbytes(state))

    rloo.average_gradients = note
    torch.optim.AdamW = lambda *args, **kwargs: optimizers.append(adamw(*args, **kwargs)) or optimizers[0]
    rloo.main(rloo.Args(**flags))
    if int(os.environ["RANK"]) == 0:
        last = json.loads((Path(flags["output_dir"]) / "metrics.jsonl").read_text().splitlines()[-1])
        Path(result).write_text(json.dumps({"held": held, "peak_gb": last["memory/peak_gb"]}))


def main(args: Args):
    found = []
    with tempfile.TemporaryDirectory(prefix="memory-") as temporary:
        folder = Path(temporary)
        in_a_process(write_inputs, folder, args)
        for i, (processes, options) in enumerate(RUNS):
            total = args.prompts * args.rloo_k
            flags = {"sft_model_path": folder / "policy", "reward_model_path": folder / "reward",
                     "dataset_name": folder / "data", "rloo_k": args.rloo_k, "response_length": args.response_length,
                     "output_dir": folder / f"out{i}",
                     "max_prompt_length": args.max_prompt, "per_device_train_batch_size": total, "dtype": args.dtype,
                     "local_rollout_forward_batch_size": total, "gradient_accumulation_steps": 1, "num_eval_prompts": 0,
                     "total_episodes": 2 * processes * total, "num_sample_generations": 0, "save_steps": 0, **options}
            job = json.dumps({name: str(value) if isinstance(value, Path) else value for name, value in flags.items()})
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes),
                       __file__, "--worker", job, str(folder / f"result{i}.json")]
            print(f"{processes} process{'es' * (processes > 1)}: {options}", flush=True)
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
            if done.returncode:
                sys.exit(f"memory.py: the run failed:\n{done.stderr[-2000:]}")
            result = json.loads((folder / f"result{i}.json").read_text())
            found.append({"processes": processes, "options": options, **result})
    Path(args.output).write_text(json.dumps({"args": dataclasses.asdict(args), "found": found}, indent=2) + "\n")
    print(f"\n{args.shape}, {args.dtype}, {args.prompts} prompts of {args.min_prompt} to {args.max_prompt} tokens x "
          f"{args.rloo_k} completions of {args.response_length} tokens per process; GiB per process\n")
    print(f"{'processes':11}{'options':58}{'parameters':>11}{'gradients':>11}{'optimizer':>11}{'peak':>8}")
    for run in found:
        options = " ".join(f"--{name}" + f" {value}" * (value is not True) for name, value in run["options"].items())
        numbers = "".join(f"{run['held'][name] / 2**30:11.3f}" for name in ("parameters", "gradients", "optimizer"))
        print(f"{run['processes']:<11}{options:58}{numbers}{run['peak_gb']:8.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]), sys.argv[3])
    else:
        import tyro

        main(tyro.cli(Args, use_underscores=True))
