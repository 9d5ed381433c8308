"""Tests of rloo.py: the formulas, one test for every mistake known from other trainers, the flags, whole runs.

They build tiny random models, need no network and no GPU, and read from top to bottom like rloo.py itself.
"""

import dataclasses
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import tyro
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GPTNeoXConfig,
                          LlamaConfig, PreTrainedTokenizerFast, Qwen3Config)

import rloo
from rloo import Args, Batch, InputError

HERE = Path(__file__).resolve().parent
WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z one two three four good bad yes no".split()


# ----------------------------------------------------------------------------------------------------------------------
# Tiny models, data and runs


def tiny_tokenizer(pad: str = "[PAD]") -> PreTrainedTokenizerFast:
    """Words in, words out. Token 0 is eos, 1 is pad (or pad is eos too), 2 is unknown."""
    vocab = {word: i for i, word in enumerate(["<eos>", "[PAD]", "[UNK]", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token=pad, unk_token="[UNK]")


FAMILIES = {
    "gpt_neox": lambda **kw: GPTNeoXConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
                                           max_position_embeddings=128, initializer_range=0.3, **kw),
    "gpt2": lambda **kw: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3, **kw),
    "llama": lambda **kw: LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, intermediate_size=64,
                                      max_position_embeddings=128, initializer_range=0.3, **kw),
    "qwen3": lambda **kw: Qwen3Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                                      intermediate_size=64, max_position_embeddings=128, initializer_range=0.3, **kw),
}


def tiny_model(family: str = "gpt_neox", seed: int = 0, classifier: bool = False, **config):
    torch.manual_seed(seed)
    config = {"vocab_size": 3 + len(WORDS), "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1, **config}
    if classifier:
        return AutoModelForSequenceClassification.from_config(FAMILIES[family](num_labels=1, **config)).eval()
    return AutoModelForCausalLM.from_config(FAMILIES[family](**config)).eval()


def random_batch(k: int = 3, B: int = 4, R: int = 6, vocab: int = 37, seed: int = 0, max_prompt: int = 9) -> Batch:
    """Left-padded prompts of unequal length and completions that stop at eos (0) early, late or never."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, vocab) for _ in range(rng.randint(2, max_prompt))] for _ in range(B)]
    rows = [{"prompt": "", "prompt_text": "", "prompt_ids": ids, "reference": None, "columns": {}} for ids in prompts]
    prompt_ids, prompt_mask = rloo.pad(prompts, pad_id=1, left=True)
    responses = torch.randint(3, vocab, (k, B, R), generator=torch.Generator().manual_seed(seed))
    for j, b in itertools.product(range(k), range(B)):
        if (stop := rng.randint(0, R + 1)) < R:
            responses[j, b, stop] = 0
    mask = rloo.mask_after_stop(responses, [0])
    return Batch(rows, prompt_ids, prompt_mask, responses.masked_fill(~mask, 1), mask)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with a policy, a reward model and a dataset: all that a run needs."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder / "sft")
    tiny_tokenizer().save_pretrained(folder / "sft")
    tiny_model(classifier=True, seed=1).save_pretrained(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")
    rng = random.Random(0)
    rows = [{"prompt": " ".join(rng.choices(WORDS, k=rng.randint(2, 9))), "completion": " ".join(rng.choices(WORDS, k=3)), "n": i} for i in range(24)]
    (folder / "data").mkdir()
    for split, part in (("train", rows[:16]), ("test", rows[16:])):
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


@pytest.fixture
def train(tiny, tmp_path):
    """train(flag=value, ...) -> metrics of each update and the output folder, of a short run on the tiny folder."""
    count = itertools.count()

    def run(**flags):
        output = tmp_path / f"run{next(count)}"
        defaults = dict(dataset_name=str(tiny / "data"), sft_model_path=str(tiny / "sft"), reward_model_path=str(tiny / "reward"),
                        response_length=6, per_device_train_batch_size=8, gradient_accumulation_steps=1, rloo_k=2, total_episodes=16,
                        temperature=1.0, learning_rate=1e-2, num_sample_generations=0, num_eval_prompts=0, output_dir=str(output))
        rloo.main(Args(**{**defaults, **flags}))
        return [json.loads(line) for line in open(output / "metrics.jsonl")], output

    return run
