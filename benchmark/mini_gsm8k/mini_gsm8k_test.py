"""Tests of the embedded mini GSM8K: its builder, and what is shipped."""

import itertools
import json
import os
import random
import re
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gsm8k"))

import gsm8k_reward
import mini_gsm8k

import rloo

HERE = Path(__file__).resolve().parent


def computation(row: dict) -> tuple:
    """What a row's solution computes: ("3 + 4", "7 - 2")."""
    return tuple(re.findall(r"(\d+ [-+*] \d+) =", row["answer"]))


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quick") / "mini"
    mini_gsm8k.build(mini_gsm8k.Config(quick=True, output_dir=str(folder)))
    return folder


def test_the_shipped_miniature_is_what_the_builder_writes(quick):
    def names(folder):
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    built = names(quick)
    shipped = [name for name in names(HERE) if not name.endswith((".py", ".pyc", ".md"))]
    assert shipped == built and "sft/model.safetensors" in shipped
    assert sum((HERE / name).stat().st_size for name in shipped) < 4.3e6
    ours, theirs = (json.loads((folder / "figures.json").read_text()) for folder in (quick, HERE))
    assert ours.keys() == theirs.keys() and ours["seed"] == theirs["seed"] == 1
    model, tokenizer = (kind.from_pretrained(HERE / "sft") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.model_type == "qwen3" and model.config.vocab_size == len(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == end != tokenizer.pad_token_id
    rows = {split: rloo.load_rows(str(HERE), split) for split in ("train", "validation", "test")}
    assert [len(rows[split]) for split in rows] == [3000, 400, 1000]
    computations = {split: {computation(row) for row in rows[split]} for split in rows}
    assert not any(one & other for one, other in itertools.combinations(computations.values(), 2))
    assert [len(computations[split]) for split in ("validation", "test")] == [400, 1000]
    for row in itertools.chain(*rows.values()):
        assert len(computation(row)) == row["steps"] in (1, 2, 3)
    # Greedy, the shipped model solves problems it has not seen; and what it says goes through the rewards.
    few = [rloo.prepare_row(row, tokenizer) for row in rows["test"][:40]]
    batch, _ = rloo.rollout(model.eval(), few, 1, 0.0, 40, stop_ids=[tokenizer.eos_token_id])
    texts = rloo.completion_texts(batch, tokenizer)
    scores = gsm8k_reward.correctness(None, texts, None, [row["answer"] for row in rows["test"][:40]])
    assert batch.ended.all() and sum(scores) >= 20 and sum(gsm8k_reward.format(None, texts, None)) >= 30


def test_the_chat_template_renders(quick):
    for folder in (quick, HERE):
        tokenizer = AutoTokenizer.from_pretrained(folder / "sft")
        prompt = gsm8k_reward.chat("Tom has 12 pens.")
        row = rloo.prepare_row({"prompt": prompt, "answer": "#### 12"}, tokenizer)
        assert row["prompt_text"] == (
            f"<|im_start|>system\n{gsm8k_reward.SYSTEM}<|im_end|>\n"
            "<|im_start|>user\nTom has 12 pens.<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokenizer.decode(row["prompt_ids"]) == row["prompt_text"]
        start, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
        assert [row["prompt_ids"].count(token) for token in (start, end)] == [3, 2]
        assert tokenizer.tokenize("12") == ["1", "2"]


def test_problems_are_solved_and_their_keys_are_what_is_computed():
    rng = random.Random(0)
    for count in [1, 2, 3] * 200:
        problem = mini_gsm8k.sample_problem(rng, count)
        assert len(problem["steps"]) == count
        right, hurried = mini_gsm8k.solve(problem), mini_gsm8k.solve(problem, rng)
        number = problem["first"]
        for sign, b in problem["steps"]:
            number = {"+": number + b, "-": number - b, "*": number * b}[sign]
            assert str(b) in problem["text"] and number > 0
        assert str(problem["first"]) in problem["text"] and problem["text"].endswith("?")
        assert mini_gsm8k.key(problem) == (problem["first"], *problem["steps"])
        assert right.endswith(f"#### {number}") and gsm8k_reward.correctness(None, [right], None, [number]) == [1]
        assert gsm8k_reward.format(None, [right], None) == [1] and hurried[0].isdigit()
