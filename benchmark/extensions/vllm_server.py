"""vLLM's process, which vllm_rollout.py starts: takes weights, samples, answers, until rloo.py has ended."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

FIXED = {"skip_tokenizer_init": True, "generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
FIXED |= {"hf_overrides": {"tie_word_embeddings": False}, "use_tqdm_on_load": False}


def serve(pipe: Connection, trainer: int):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer may want to finish its update
    threading.Thread(target=end_with, args=[trainer], daemon=True).start()
    from vllm import LLM, SamplingParams

    llm = None
    while True:
        folder, settings, requests, options = pipe.recv()
        if llm is None:
            llm = LLM(folder, **FIXED, **settings)
        else:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            llm.reset_prefix_cache()  # it holds what the old weights made of the prompts
        options |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [SamplingParams(seed=seed, **options) for _, seed in requests]
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
