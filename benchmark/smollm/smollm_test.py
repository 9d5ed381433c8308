"""Tests of this folder on a tiny random Llama with a byte-level tokenizer like that of SmolLM2. The packages of the
tasks are not needed: stand-ins take their place."""

import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent))
import prepare
import report
import smollm

import rloo

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VADER = """
class SentimentIntensityAnalyzer:
    def polarity_scores(self, text):
        return {"compound": len(set(text)) / 50}
"""
REASONING_GYM = """
def create_dataset(name, seed=1, size=1, min_words=2, max_words=3):
    words = ["ab", "cd", "ef", "gh", "ij", "kl"]
    made = []
    for i in range(size):
        length = min_words + i % (max_words - min_words + 1)
        chosen = [words[(i * 5 + seed + j * (1 + i // 36)) % 6] for j in range(length)]
        question = "Solve.\\n\\nReverse this list of words: " + ", ".join(chosen) + "\\n"
        made.append({"question": question, "answer": ", ".join(reversed(chosen))})
    return made
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with stand-ins for the tasks' packages."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "vaderSentiment").mkdir()
    (folder / "vaderSentiment" / "vaderSentiment.py").write_text(VADER)
    (folder / "reasoning_gym.py").write_text(REASONING_GYM)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """What prepare.py makes, in small: a random Llama with grouped queries, tied head and chat template."""
    folder = tmp_path_factory.mktemp("prepared")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bpe = Tokenizer(models.BPE(vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHAT
    torch.manual_seed(1)
    sizes = {"vocab_size": len(vocabulary), "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=2, pad_token_id=2))
    model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder / "smollm2")
    tokenizer.save_pretrained(folder / "smollm2")
    for split, rows in prepare.sentiment_rows().items():
        prepare.write(folder / "sentiment" / f"{split}.jsonl", rows[:40])
    return folder


def test_no_topic_and_no_list_is_in_two_splits(packages, monkeypatch):
    monkeypatch.syspath_prepend(str(packages))
    topics = {
        split: {row["prompt"][1]["content"].split(maxsplit=1)[1] for row in rows}
        for split, rows in prepare.sentiment_rows().items()
    }
    assert topics["test"] and not topics["test"] & topics["train"]
    rows = prepare.reversal_rows()
    lists = [row["prompt"][-1]["content"] for of_split in rows.values() for row in of_split]
    examples = {message["content"] for message in rows["test"][0]["prompt"][1:-1]}
    assert len(set(lists)) == len(lists) > 20 and not examples & set(lists)
    for split, of_split in rows.items():
        for row in of_split:
            words = row["prompt"][-1]["content"].split(": ")[1].split(", ")
            assert row["answer"] == ", ".join(reversed(words)) and (len(words) == 4) == (split == "harder")


def test_what_is_counted_in_completions():
    found = smollm.summary([{"score": 1.0}, {"score": 0.5}])
    assert found == {"score": 0.75, "exact": 0.5}
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nDescribe bus stops.<|im_end|>\n"
    completions = ["A bus stop is cold.", "I'm so Glad!", "Lovely stops.", "Stone."]
    found = smollm.habits([{"prompt": prompt, "completion": text} for text in completions])
    assert found == {"names_topic": 0.5, "gladness": 0.5}


def test_a_run_is_made_once_and_one_that_was_stopped_goes_on(prepared, packages, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(packages))

    def in_this_process(command, log):
        assert command[:2] == [sys.executable, "rloo.py"]
        rloo.command_line([str(word) for word in command[2:]])

    monkeypatch.setattr(smollm, "run_logged", in_this_process)
    base, trl = smollm.Run("sentiment", "base"), smollm.Run("sentiment", "trl", 0.02, 1)
    run = smollm.Run("sentiment", "lora8", 0.02, 1, updates=2)
    records = smollm.Records(tmp_path / "records.json")
    make = lambda: smollm.make([base, run, trl], tmp_path / "runs", prepared, records, limit=8)  # noqa: E731
    make()
    record = records.all.pop(run.name)
    assert len(record["reward"]) == 2 and record["seconds_per_update"] > 0
    assert record["command"].startswith("rloo.py --dataset_name=prepared/sentiment --reward_fns=rewards.py:sentiment")
    completions = smollm.read_lines(tmp_path / "runs" / "measured" / f"{run.name}-test" / "completions.jsonl")
    assert sorted(line["mode"] for line in completions) == ["greedy"] * 8 + ["sampled"] * 8
    assert list(records.all) == ["sentiment-base"]
    assert "left out" in capsys.readouterr().out
    monkeypatch.setattr(smollm, "run_logged", None)  # without its record, nothing is trained or completed again
    make()
    assert records.all[run.name] == record
    again = smollm.Records(records.path, again=True)
    smollm.make([run], tmp_path / "runs", prepared, again)
    assert "reward: recorded" in capsys.readouterr().out and smollm.Records(records.path).all == records.all


def test_runs_of_adapters_have_ten_times_the_learning_rate():
    full, lora, trl = (smollm.Run("sentiment", method, 0.02, 3).flags(Path()) for method in ("full", "lora8", "trl"))
    rates = [float(word.partition("=")[2]) for flags in (full, lora) for word in flags if "learning_rate" in word]
    assert rates == [2e-5, 2e-4] and trl == full
    assert [word for word in lora if word not in full] == ["--learning_rate=0.0002", "--lora_rank=8"]


def test_the_page_has_the_records_and_few_seeds_have_no_error():
    records = smollm.Records(report.RECORDS)
    page = (report.HERE / "README.md").read_text(encoding="utf-8")
    assert report.common.filled(page, report.tables(records)) == page
    del records.all["sentiment-full-beta0-seed3"]
    tables = report.tables(records)
    assert (
        "| all weights, β = 0 | 0.91 |  |" in tables["sentiment"] and "β = 0.1 | 0.42 ± 0.01 | -" in tables["sentiment"]
    )
