"""Tests of text_reward.py with a tiny reward model whose tokenizer knows words in another order than the policy's.

python -m pytest -q benchmark/tldr/text_reward_test.py
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import pytest
import text_reward
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTNeoXConfig,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # for rloo.py

import rloo  # noqa: E402

WORDS = list("abcdefghijklm")
CHAT = "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}"


def tokenizer_of(words: list[str], bos: bool = False) -> PreTrainedTokenizerFast:
    """Words in, words out; token 0 is eos, and bos if there is one."""
    vocab = {word: i for i, word in enumerate(["<eos>", "[PAD]", "[UNK]", *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        backend.post_processor = processors.TemplateProcessing("<eos> $A", None, [("<eos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="[PAD]", unk_token="[UNK]")


def tiny_model(auto_class, positions: int = 128, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = GPTNeoXConfig(
        **sizes,
        **options,
        vocab_size=16,
        max_position_embeddings=positions,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return auto_class.from_config(config).eval()


@pytest.fixture
def reward_model(tmp_path, monkeypatch):
    """reward_model(tokenizer, positions) saves one, sets the environment variable and returns the model."""

    def save(tokenizer, positions: int = 128):
        model = tiny_model(AutoModelForSequenceClassification, positions, num_labels=1)
        model.save_pretrained(tmp_path / "reward")
        tokenizer.save_pretrained(tmp_path / "reward")
        monkeypatch.setenv("TEXT_REWARD_MODEL", str(tmp_path / "reward"))
        text_reward.load.cache_clear()
        text_reward.say_once.cache_clear()
        return model

    return save


@pytest.mark.parametrize("kind", ["text", "text with bos", "chat", "one message, no template"])
@pytest.mark.parametrize("positions", [128, 6])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_scores_are_those_of_each_text_alone(reward_model, monkeypatch, capsys, kind, positions, size):
    """In batches, sorted by length and padded, cut from the left where the model has too few positions."""
    tokenizer = tokenizer_of(WORDS, bos="bos" in kind)
    if kind == "chat":
        tokenizer.chat_template = CHAT
    model = reward_model(tokenizer, positions)
    monkeypatch.setenv("TEXT_REWARD_BATCH", str(size))
    prompts = ["a b c", "d", "e f g h", "i j"]
    completions = ["k l", "", "m a b c d", "e"]
    bos = "<eos> " if "bos" in kind else ""
    texts = [f"{bos}{prompt} {text} <eos>" for prompt, text in zip(prompts, completions)]
    given = [f"{prompt} " for prompt in prompts]
    if kind == "chat":
        texts = [f"s e u {prompt} a {text}" for prompt, text in zip(prompts, completions)]
    if kind != "text" and "bos" not in kind:
        given = [[{"role": "user", "content": prompt}] for prompt in given]
    if kind == "chat":
        given = [[{"role": "system", "content": "e"}, *prompt] for prompt in given]
    scores = text_reward.text_reward(given, completions, None)
    plain = tokenizer_of(WORDS)
    for text, score in zip(texts, scores, strict=True):
        ids = torch.tensor([plain(text)["input_ids"][-positions:]])
        last = model.base_model(ids)[0][0, -1]
        assert score == pytest.approx(model.score(last).item(), abs=1e-5)
    assert len(set(scores)) == 4
    assert capsys.readouterr().out.count("cut from the left") == (positions == 6)


def test_what_is_missing_is_said(reward_model, monkeypatch):
    reward_model(tokenizer_of(WORDS))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    with pytest.raises(ValueError, match="no chat template for prompts of several messages"):
        text_reward.text_reward([turns], ["d"], None)
    monkeypatch.delenv("TEXT_REWARD_MODEL")
    text_reward.load.cache_clear()
    with pytest.raises(ValueError, match="set TEXT_REWARD_MODEL"):
        text_reward.text_reward(["a"], ["b"], None)


def test_a_run_that_refuses_the_model_trains_by_the_function(reward_model, tmp_path):
    """The same words under other numbers: --reward_model_path names this file, which then scores each completion."""
    reward_model(tokenizer_of(WORDS[::-1]))
    tiny_model(AutoModelForCausalLM).save_pretrained(tmp_path / "sft")
    tokenizer_of(WORDS).save_pretrained(tmp_path / "sft")
    rows = [{"prompt": f"{word} b ", "completion": "c d"} for word in WORDS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "sft_model_path": str(tmp_path / "sft"),
        "dataset_name": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "response_length": 5,
        "per_device_train_batch_size": 8,
        "rloo_k": 2,
        "total_episodes": 8,
        "device": "cpu",
    }
    with pytest.raises(rloo.InputError, match="benchmark/tldr/text_reward.py is a reward function for such models"):
        rloo.main(rloo.Args(**flags, reward_model_path=str(tmp_path / "reward")))
    evaluations = rloo.main(rloo.Args(**flags, reward_fns=(f"{HERE}/text_reward.py:text_reward",)))
    (metrics,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert metrics["rewards/text_reward/applied"] == 1 and metrics["rewards/text_reward/std"] > 0
    assert "sampled/win_rate" in evaluations["after"]
