"""Tests of text_reward.py with random reward models that have the shape and the tokenizer of a bundled one.

python -m pytest -q benchmark/tldr/text_reward_test.py
"""

from pathlib import Path

import pytest
import text_reward
import torch
from conftest import GSM8K, MINI
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import rloo

PROMPTS = ["my boss is rude. ", "I ", "a sister and a brother ", "last week "]
COMPLETIONS = ["he left", "", "they have a new house", "x"]
TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}"


def save_reward_model(folder: Path, monkeypatch, source=MINI / "sft", positions=128, template=None, bos=False):
    """Saves a model into `folder`, named by the environment variable. With bos, its texts begin with eos."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(source, num_labels=1, max_position_embeddings=positions, initializer_range=0.3)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = template
    if bos:
        special = (tokenizer.eos_token, tokenizer.eos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{special[0]} $A", None, [special])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    monkeypatch.setenv("TEXT_REWARD_MODEL", str(folder))
    text_reward.load.cache_clear()
    return model, AutoTokenizer.from_pretrained(source)


@pytest.mark.parametrize("positions", [128, 4])
@pytest.mark.parametrize("chat, template, bos", [(False, None, True), (True, None, False), (True, TEMPLATE, True)])
def test_scores_are_those_of_each_text_alone(tmp_path, monkeypatch, capsys, positions, chat, template, bos):
    """In batches of 3, sorted by length and padded, cut from the left where the model has too few positions."""
    model, plain = save_reward_model(tmp_path, monkeypatch, MINI / "sft", positions, template, bos)
    monkeypatch.setenv("TEXT_REWARD_BATCH", "3")
    text_reward.say_once.cache_clear()
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS] if chat else PROMPTS
    scores = text_reward.text_reward(prompts, COMPLETIONS, None)
    for prompt, text, score in zip(PROMPTS, COMPLETIONS, scores, strict=True):
        whole = f"u {prompt} a {text} " if template else plain.eos_token * bos + prompt + text + plain.eos_token
        last = model.base_model(torch.tensor([plain(whole)["input_ids"][-positions:]]))[0][0, -1]
        assert score == pytest.approx(model.score(last).item(), abs=1e-4)
    assert len({round(score, 3) for score in scores}) == 4
    assert capsys.readouterr().out.count("cut from the left") == (positions == 4)


def test_a_run_that_refuses_the_model_trains_by_the_function(tmp_path, monkeypatch):
    """With another tokenizer --reward_model_path is refused, and the message names this file, which then scores."""
    save_reward_model(tmp_path / "reward", monkeypatch, GSM8K / "sft")
    flags = {"sft_model_path": f"{MINI}/sft", "dataset_name": f"{MINI}/validation.jsonl", "num_eval_prompts": 8}
    flags |= {"total_episodes": 8, "per_device_train_batch_size": 8, "response_length": 5, "device": "cpu"}
    with pytest.raises(rloo.InputError, match="benchmark/tldr/text_reward.py"):
        rloo.main(rloo.Args(**flags, output_dir=f"{tmp_path}/a", reward_model_path=str(tmp_path / "reward")))
    reward = f"{text_reward.__file__}:text_reward"
    evaluations = rloo.main(rloo.Args(**flags, output_dir=f"{tmp_path}/b", reward_fns=(reward,)))
    assert evaluations[-1]["greedy/score_stderr"] > 0
