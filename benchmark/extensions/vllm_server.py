"""vLLM's process, which vllm_rollout.py starts: reads weights, samples and answers until rloo.py has ended."""

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

FIXED = {"skip_tokenizer_init": True, "generation_config": "vllm", "logprobs_mode": "processed_logprobs"}
FIXED |= {"hf_overrides": {"tie_word_embeddings": False}, "use_tqdm_on_load": False}
OPTIONS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}


def serve(pipe: Connection):
    from vllm import LLM, SamplingParams

    llm = None
    while True:
        folder, settings, requests, options = pipe.recv()
        if llm is None:
            llm = LLM(folder, **FIXED, **settings)
        else:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            llm.reset_prefix_cache()  # it was computed by the old weights
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        params = [SamplingParams(seed=seed, **OPTIONS, **options) for _, seed in requests]
        completions = [result.outputs[0] for result in llm.generate(prompts, params, use_tqdm=False)]
        tokens = [list(completion.token_ids) for completion in completions]
        steps = [zip(completion.token_ids, completion.logprobs, strict=True) for completion in completions]
        pipe.send((tokens, [[of_step[token].logprob for token, of_step in step] for step in steps]))


if __name__ == "__main__":
    with suppress(EOFError, BrokenPipeError):  # rloo.py has ended
        serve(Connection(int(sys.argv[1])))
