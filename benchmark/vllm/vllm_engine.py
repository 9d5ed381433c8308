"""Rollouts by vLLM: `python rloo.py --rollout_engine benchmark/vllm/vllm_engine.py:generate`.

`generate` runs in the trainer. vLLM changes torch and transformers in the process that imports it, so it has a process
of its own, which runs this file as well: `serve`.
"""

import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

SETTINGS = {  # further arguments of vllm.LLM, by the device of the policy
    "cpu": {"kv_cache_memory_bytes": 2**30, "enable_chunked_prefill": False},  # with it, seeds end vLLM
    "cuda": {"gpu_memory_utilization": 0.3},
}
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # where weights are written; None: the temporary folder
pipe, newest = None, None  # to vLLM's process, and the version of the weights that this process has


def generate(model, prompt_ids, *, k, temperature, response_length, stop_ids, seed, version, max_length):
    """k completions of each of B prompts: tokens and their log-probs, both [B][k] lists."""
    global pipe, newest
    pipe = pipe or start()
    settings = SETTINGS[model.device.type] | {"max_model_len": max_length, "dtype": str(model.dtype)[len("torch.") :]}
    options = {"temperature": temperature, "max_tokens": response_length, "stop_token_ids": list(stop_ids)}
    first = random.Random(seed).randrange(2**48)  # far from the seeds of other calls, even if their `seed` is near
    requests = [(list(ids), first + b * k + j) for b, ids in enumerate(prompt_ids) for j in range(k)]
    with tempfile.TemporaryDirectory(prefix="rloo-vllm-", dir=MEMORY) as folder:
        if version != newest:
            write_weights(model, folder)
        try:
            pipe.send((folder if version != newest else None, settings, requests, options))
            tokens, logprobs = pipe.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError("vLLM's process has ended; what it said is above") from error
    newest = version
    return [[x[i : i + k] for i in range(0, len(x), k)] for x in (tokens, logprobs)]


def write_weights(model, folder):
    """A checkpoint of the model that has a tied head twice, since vLLM is told that no weights are tied."""
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    weights, seen = {}, set()
    for name, weight in model.state_dict().items():
        weights[name] = weight.clone() if weight.data_ptr() in seen else weight.contiguous()
        seen.add(weight.data_ptr())
    weights = revert_weight_conversion(model, weights)  # names as in a checkpoint
    save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    model.config.save_pretrained(folder)


def start() -> Connection:
    """The pipe to a new process that runs `serve`."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("vLLM is not installed: benchmark/vllm/README.md says how")
    ours, theirs = Pipe()
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of the trainer
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())]
    subprocess.Popen(command, env={"VLLM_LOGGING_LEVEL": "ERROR"} | environment, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours


def serve(pipe: Connection, trainer: int):
    """vLLM's process: takes new weights if there are any, samples, answers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the trainer may want to finish its update
    threading.Thread(target=end_with, args=[trainer], daemon=True).start()
    from vllm import LLM, SamplingParams

    fixed = {"skip_tokenizer_init": True, "generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
    fixed |= {"hf_overrides": {"tie_word_embeddings": False}, "use_tqdm_on_load": False}
    llm = None
    while True:
        folder, settings, requests, options = pipe.recv()
        if llm is None:
            llm = LLM(folder, **fixed, **settings)
        elif folder:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            llm.reset_prefix_cache()  # it holds what the old weights made of the prompts
        options |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        params = [SamplingParams(seed=seed, **options) for _, seed in requests]
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        completions = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
        tokens = [list(completion.token_ids) for completion in completions]
        steps = [zip(completion.token_ids, completion.logprobs) for completion in completions]
        pipe.send((tokens, [[found[token].logprob for token, found in step] for step in steps]))


def end_with(trainer: int):
    """Ends this process soon after the trainer, however that ended."""
    while os.getppid() == trainer:
        time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    with suppress(EOFError):  # the trainer has ended
        serve(Connection(int(sys.argv[1])), int(sys.argv[2]))
