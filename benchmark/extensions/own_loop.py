"""A loop of your own around rloo.py's functions, in place of `main`: three updates whose reward is minus the length.

    python benchmark/extensions/own_loop.py

Then it prints log π of given completions. `class Batch` and `prepare_example` describe batches and examples. On CUDA,
call torch.backends.cuda.enable_cudnn_sdp(False) first, since the gradients of cuDNN's attention can be NaN.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

flags = {"response_length": 32, "per_device_train_batch_size": 8, "learning_rate": 1e-4, "device": "cpu"}
args = rloo.resolve_args(rloo.Args(**flags))  # the bundled task's model
rloo.check_args(args)
rloo.set_seed(args.seed)
tokenizer = rloo.load_tokenizer(args, args.sft_model_path)
texts = ["My cat ignores me. TL;DR:", "I lost my keys. TL;DR:"]
examples = [rloo.prepare_example({"prompt": text}, tokenizer) for text in texts]
master, policy, reference = rloo.load_models(args, resumed=None)
rloo.check_policy(args, policy, pair=examples)  # is what this file computes what the model computes?
optimizer = rloo.make_optimizer(args, master, policy)
stop_ids = rloo.stop_token_ids(args, policy, tokenizer)
rewards = {"brevity": lambda batch: -batch.response_mask.sum(-1).float()}  # of a Batch: scores (k, B)

# 1. Updates, as `main` makes them.
for _ in range(3):
    experience = rloo.collect(args, policy, reference, rewards, examples, stop_ids)
    improved = rloo.improve(args, policy, optimizer, experience)
    print(f"score {rloo.metrics_of(args, experience, improved)['objective/scores']:.2f}")

# 2. Log π of given completions, here one per prompt.
given = [tokenizer(text)["input_ids"] + stop_ids for text in (" cat trouble", " keys gone")]
ids, _ = rloo.pad(given)
batch = rloo.make_batch(examples, ids[None].to(policy.device), stop_ids)  # (1, 2, T)
with torch.no_grad():
    logprobs, _ = rloo.completion_logprobs(policy, batch, args.temperature)
print("log π", logprobs[0].sum(-1).tolist())
