"""Tests of text_reward.py with a small reward model and the tokenizers of the embedded tasks.

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
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # for rloo.py

import rloo  # noqa: E402

TLDR, GSM8K = (HERE.parent / task / "sft" for task in ("mini_tldr", "mini_gsm8k"))
CHAT = "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}"
PROMPTS = ["my boss is rude. ", "I ", "a sister and a brother ", "last week "]
COMPLETIONS = ["he left", "", "they have a new house", "x"]


@pytest.fixture
def reward_model(tmp_path, monkeypatch):
    """reward_model(folder, **changes) saves a random one of that folder's shape and tokenizer, whose attributes may be
    changed, sets the environment variable, and returns both."""

    def save(folder: Path = TLDR, positions: int = 128, chat_template: str | None = None, bos: bool = False):
        sizes = {"num_labels": 1, "max_position_embeddings": positions, "initializer_range": 0.3}
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder, **sizes)
        model = AutoModelForSequenceClassification.from_config(config).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = chat_template
        if bos:
            eos = tokenizer.eos_token
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{eos} $A", None, [(eos, 0)])
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "reward")
        monkeypatch.setenv("TEXT_REWARD_MODEL", str(tmp_path / "reward"))
        text_reward.load.cache_clear()
        text_reward.say_once.cache_clear()
        return model

    return save


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


KINDS = {  # how the reward model is made, a prompt as it is given, and the text that is scored
    "text": ({}, str, "{prompt}{text}<eos>"),
    "text with bos": ({"bos": True}, str, "<eos>{prompt}{text}<eos>"),
    "one message, no template": ({}, user, "{prompt}{text}<eos>"),
    "chat": (
        {"chat_template": CHAT, "bos": True},
        lambda prompt: [{"role": "system", "content": "so"}, *user(prompt)],
        "s so u {prompt} a {text} ",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", [128, 4])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_scores_are_those_of_each_text_alone(reward_model, monkeypatch, capsys, kind, positions, size):
    """In batches, sorted by length and padded, cut from the left where the model has too few positions."""
    changes, given, scored = KINDS[kind]
    model = reward_model(positions=positions, **changes)
    monkeypatch.setenv("TEXT_REWARD_BATCH", str(size))
    scores = text_reward.text_reward([given(prompt) for prompt in PROMPTS], COMPLETIONS, None)
    plain = AutoTokenizer.from_pretrained(TLDR)
    for prompt, text, score in zip(PROMPTS, COMPLETIONS, scores, strict=True):
        whole = scored.format(prompt=prompt, text=text).replace("<eos>", plain.eos_token)
        ids = torch.tensor([plain(whole)["input_ids"][-positions:]])
        last = model.base_model(ids)[0][0, -1]
        assert score == pytest.approx(model.score(last).item(), abs=1e-4)
    assert len({round(score, 3) for score in scores}) == 4
    assert capsys.readouterr().out.count("cut from the left") == (positions == 4)


def test_what_is_missing_is_said(reward_model, monkeypatch):
    reward_model()
    with pytest.raises(ValueError, match="no chat template for prompts of several messages"):
        text_reward.text_reward([user("a") * 3], ["d"], None)
    monkeypatch.delenv("TEXT_REWARD_MODEL")
    text_reward.load.cache_clear()
    with pytest.raises(ValueError, match="set TEXT_REWARD_MODEL"):
        text_reward.text_reward(["a"], ["b"], None)


def test_a_run_that_refuses_the_model_trains_by_the_function(reward_model, tmp_path):
    """The other task's tokenizer: --reward_model_path names this file, which then scores each completion."""
    reward_model(GSM8K)
    flags = {"output_dir": str(tmp_path / "out"), "response_length": 5, "num_eval_prompts": 8, "device": "cpu"}
    flags |= {"rloo_k": 2, "total_episodes": 8, "per_device_train_batch_size": 8}
    flags |= {"sft_model_path": str(TLDR), "dataset_name": str(TLDR.parent / "validation.jsonl")}
    with pytest.raises(rloo.InputError, match="benchmark/tldr/text_reward.py is a reward function for such models"):
        rloo.main(rloo.Args(**flags, reward_model_path=str(tmp_path / "reward")))
    evaluations = rloo.main(rloo.Args(**flags, reward_fns=(f"{HERE}/text_reward.py:text_reward",)))
    (metrics,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert metrics["rewards/text_reward/applied"] == 1 and metrics["rewards/text_reward/std"] > 0
    assert "sampled/win_rate" in evaluations["after"]
