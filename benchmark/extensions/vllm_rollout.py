"""Rollouts by vLLM for rloo.py.

    python benchmark/extensions/vllm_rollout.py FLAGS OF rloo.py

How to install it: README.md beside this file. vLLM changes torch and transformers in the process that imports it, so it
has a process of its own, which runs vllm_server.py. Each call of `rollout` writes the model's weights to a folder in
memory, from which vLLM reads them. (This file is not called vllm.py, which `import vllm` would find.)

Replaces `rollout`: import it before lora.py and fsdp.py, which then hand it whole models.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

SETTINGS = {  # further arguments of vllm.LLM, by the model's device; for more cache edit a copy
    "cpu": {"kv_cache_memory_bytes": 2**30, "enable_chunked_prefill": False},  # with it, seeds end vLLM
    "cuda": {"gpu_memory_utilization": 0.3},
}
# Where weights are written; None: the temporary folder. /dev/shm is small in many containers (docker: --shm-size).
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
pipe = None  # to vLLM's process


def rollout(args, model, examples, k, temperature, stop_ids):
    """As rloo.rollout: k completions of each prompt as a Batch, and their log-probs (k, B, T)."""
    global pipe
    pipe = pipe or start()
    T = args.response_length
    dtype = str(model.dtype).removeprefix("torch.")
    settings = SETTINGS[model.device.type] | {"dtype": dtype, "max_model_len": args.max_prompt_length + T}
    options = {"temperature": temperature, "max_tokens": T, "stop_token_ids": stop_ids}
    prompts = [example["prompt_ids"] for example in examples for _ in range(k)]
    seeds = torch.randint(2**48, (len(prompts),)).tolist()  # from the seed of rloo.py, and others in each call
    with tempfile.TemporaryDirectory(prefix="rloo-vllm-", dir=MEMORY) as folder:
        write_weights(model, folder)
        try:
            pipe.send((folder, settings, [*zip(prompts, seeds, strict=True)], options))
            tokens, logprobs = pipe.recv()  # lists of B·k lists
        except (EOFError, OSError) as error:
            raise RuntimeError("vLLM's process has ended; what it said is above") from error

    def padded(lists):
        filled = [numbers + [0] * (T - len(numbers)) for numbers in lists]
        return torch.tensor(filled, device=model.device).view(-1, k, T).transpose(0, 1)  # (k, B, T)

    batch = rloo.make_batch(examples, padded(tokens), stop_ids)
    lengths = batch.response_mask.sum(-1).T.flatten().tolist()
    complete = [*map(len, tokens)] == lengths == [*map(len, logprobs)]
    rloo.require(complete, f"vLLM: a completion must have {T} tokens or end with its first stop token")
    return batch, padded(logprobs).masked_fill(~batch.policy_mask, 0.0)


def write_weights(model, folder):
    """Config and weights, which is all that vLLM reads, by the names of the model's own files. A tied head is written
    too: left out, it would keep its first weights in vLLM."""
    weights = model.state_dict()
    with suppress(ImportError):  # transformers 5 renames and stacks some weights as it loads them, such as experts
        from transformers.core_model_loading import revert_weight_conversion

        weights = revert_weight_conversion(model, weights)
    seen = set()
    for name, weight in weights.items():
        weights[name] = weight.clone() if weight.data_ptr() in seen else weight.contiguous()
        seen.add(weight.data_ptr())
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    Path(folder, "config.json").write_text(json.dumps(config))


def start() -> Connection:
    """The pipe to a new process that runs vllm_server.py."""
    here = Path(__file__).resolve().parent
    missing = importlib.util.find_spec("vllm") is None
    rloo.require(not missing, "vllm_rollout.py: vLLM is not installed; benchmark/extensions/README.md says how")
    ours, theirs = Pipe()
    environment = {"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # as many as the trainer
    command = [sys.executable, "-W", "ignore", here / "vllm_server.py", str(theirs.fileno()), str(os.getpid())]
    subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours


rloo.require_original("rollout")
rloo.rollout = rollout

if __name__ == "__main__":
    rloo.command_line()
