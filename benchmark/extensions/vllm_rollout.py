"""Completions by vLLM for rloo.py. This file has never run on a GPU.

    python benchmark/extensions/vllm_rollout.py FLAGS OF rloo.py

README.md in this folder says how to install vLLM. vLLM changes torch and transformers in the process that imports it,
so it has a process of its own, which runs `serve`. Under torchrun each process of rloo.py starts one, on its own GPU.
Each call of `rollout` writes the model's weights to a temporary folder, from which vLLM reads them. TMPDIR=/dev/shm
keeps it in memory, if there is room (in docker: --shm-size).
"""

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
from transformers.core_model_loading import revert_weight_conversion

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

FIXED = {"skip_tokenizer_init": True, "generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
FIXED |= {"hf_overrides": {"tie_word_embeddings": False}, "use_tqdm_on_load": False}
OPTIONS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
SETTINGS = {  # further arguments of vllm.LLM for the model's device; for a larger cache, edit them
    "cpu": {"kv_cache_memory_bytes": 2**30, "enable_chunked_prefill": False},  # with it, seeds make vLLM fail
    "cuda": {"gpu_memory_utilization": 0.3},
}
pipe = None  # to vLLM's process


def rollout(args, model, examples, k, temperature, stop_ids):
    """As rloo.rollout: returns k completions of each prompt as a Batch, and their log-probs (k, B, T)."""
    global pipe
    pipe = pipe or start(model.device)
    T = args.response_length
    # Twice T: the prompts of later turns, see turns.py, have up to T tokens more.
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**20
    longest = min(positions, args.max_prompt_length + 2 * T)
    settings = FIXED | SETTINGS[model.device.type] | {"max_model_len": longest}
    settings |= {"dtype": args.dtype}
    options = OPTIONS | {"temperature": temperature, "max_tokens": T, "stop_token_ids": stop_ids}
    prompts = [example["prompt_ids"] for example in examples for _ in range(k)]
    seeds = torch.randint(2**48, (len(prompts),)).tolist()  # they follow from --seed and the update
    with tempfile.TemporaryDirectory(prefix="rloo-vllm-") as folder:
        write_weights(model, folder)
        pipe.send((folder, settings, [*zip(prompts, seeds, strict=True)], options))
        tokens, logprobs = pipe.recv()  # lists of B·k lists. EOFError: vLLM's process has ended, with a message above
    whole = all(len(ids) == T or ids[-1] in stop_ids for ids in tokens)
    rloo.require(whole, "vLLM cut a completion off: prompt and completion do not fit into its max_model_len")

    def padded(lists):
        rows = [numbers + [0] * (T - len(numbers)) for numbers in lists]
        return torch.tensor(rows, device=model.device).view(-1, k, T).transpose(0, 1)  # (k, B, T)

    batch = rloo.make_batch(examples, padded(tokens), stop_ids)
    return batch, padded(logprobs)


def check_policy(original, args, model, pair):
    """Checks the policy, from which vLLM samples; a master has another dtype."""
    if model.dtype == getattr(torch, args.dtype):
        original(args, model, pair)


def draw_tokens(*inputs):
    raise NotImplementedError("vLLM draws the tokens")  # so another file cannot change how they are drawn


def write_weights(model, folder):
    """Writes config and weights, under the names in the model's own files. A tied head is written too: without it, vLLM
    would keep the first one."""
    weights = revert_weight_conversion(model, model.state_dict())  # experts, for example, are stacked at loading
    weights = {name: weight.to("cpu", copy=True).contiguous() for name, weight in weights.items()}
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    Path(folder, "config.json").write_text(json.dumps(config))


def start(device) -> Connection:
    """Starts a process that runs `serve`; returns the pipe to it."""
    ours, theirs = Pipe()
    of_torchrun = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    environment = {"VLLM_LOGGING_LEVEL": "ERROR"}
    environment |= {name: x for name, x in os.environ.items() if not name.startswith(of_torchrun)}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if device.type == "cuda":  # the same GPU as rloo.py's
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = device.index or 0
        environment["CUDA_VISIBLE_DEVICES"] = visible[number] if visible != [""] else str(number)
    command = [sys.executable, "-W", "ignore", __file__, "serve", str(theirs.fileno())]
    # A session of its own: Ctrl-C does not reach it, since rloo.py may want to finish its update.
    subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    return ours


def serve(pipe: Connection):
    """Reads weights, samples and answers until rloo.py has ended."""
    from vllm import LLM, SamplingParams

    llm = None
    while True:
        folder, settings, requests, options = pipe.recv()
        if llm is None:
            llm = LLM(folder, **settings)
        else:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            llm.reset_prefix_cache()  # it was computed by the old weights
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [SamplingParams(seed=seed, **options) for _, seed in requests]
        completions = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
        tokens = [list(completion.token_ids) for completion in completions]
        steps = [zip(completion.token_ids, completion.logprobs, strict=True) for completion in completions]
        pipe.send((tokens, [[of_step[token].logprob for token, of_step in step] for step in steps]))


rloo.replace(rollout=rollout, draw_tokens=draw_tokens)
rloo.wrap(check_policy=check_policy)

if __name__ == "__main__" and sys.argv[1:2] == ["serve"]:
    with suppress(EOFError, BrokenPipeError):  # rloo.py has ended
        serve(Connection(int(sys.argv[2])))
elif __name__ == "__main__":
    rloo.command_line()
