"""Rollouts by vLLM: `python rloo.py --rollout_engine benchmark/gpu/vllm_engine.py:generate`.

`generate` runs in the trainer. vLLM changes torch and transformers in the process that imports it, so it has a process
of its own, which runs this file as well: `serve`.
"""

import importlib.util
import json
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

SETTINGS = {  # further arguments of vllm.LLM, by the policy's device; for more cache edit a copy
    "cpu": {"kv_cache_memory_bytes": 2**30, "enable_chunked_prefill": False},  # with it, seeds end vLLM
    "cuda": {"gpu_memory_utilization": 0.3},
}
# Where weights are written; None: the temporary folder. /dev/shm is small in many containers (docker: --shm-size).
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
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
    groups = range(0, len(tokens), k)
    return [tokens[i : i + k] for i in groups], [logprobs[i : i + k] for i in groups]


def write_weights(model, folder):
    """Config and weights, which is all that vLLM reads, by the names of the model's own files. A tied head is written
    too: left out, it would keep its first weights in vLLM."""
    from safetensors.torch import save_file

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
    """The pipe to a new process that runs `serve`."""
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit("vllm_engine.py: vLLM is not installed; benchmark/gpu/README.md says how to install it")
    import torch  # here, so that vLLM's process imports it its own way

    ours, theirs = Pipe()
    environment = {"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # as many as the trainer
    command = [sys.executable, "-W", "ignore", __file__, str(theirs.fileno()), str(os.getpid())]
    subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
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
