"""Tests of this folder on a tiny random Llama with a byte-level tokenizer like that of SmolLM2. The
packages of the tasks are not needed: stand-ins take their place."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent))
import prepare
import smollm
import smollm_report

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
    class Problems(list):
        def score_answer(self, answer, entry):
            return float(answer == entry["answer"])
    made = Problems()
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
    (folder / "vaderSentiment" / "__init__.py").touch()
    (folder / "vaderSentiment" / "vaderSentiment.py").write_text(VADER)
    (folder / "reasoning_gym.py").write_text(REASONING_GYM)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """What prepare.py makes, in small: a random Llama with grouped queries, tied head and chat template."""
    folder = tmp_path_factory.mktemp("prepared")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    bpe = Tokenizer(models.BPE(vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHAT
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=2,
    )
    for name in ("smollm2", "other"):
        model = LlamaForCausalLM(config)
        model.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=2)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = {split: rows[:40] for split, rows in prepare.sentiment_rows().items()}
    for split in rows:
        prepare.write(folder / "sentiment" / f"{split}.jsonl", rows[split])
    return folder


def test_no_topic_and_no_list_is_in_two_splits(packages, monkeypatch):
    monkeypatch.syspath_prepend(str(packages))
    topics = {
        split: {row["prompt"][1]["content"].split(maxsplit=1)[1] for row in rows}
        for split, rows in prepare.sentiment_rows().items()
    }
    assert len(topics["test"]) == prepare.TEST_TOPICS * len(prepare.QUESTIONS)
    assert not topics["test"] & topics["train"]
    rows = prepare.reversal_rows()
    lists = [row["prompt"][-1]["content"] for of_split in rows.values() for row in of_split]
    examples = {message["content"] for message in rows["test"][0]["prompt"][1:-1]}
    assert len(set(lists)) == len(lists) > 20
    assert not examples & set(lists)
    for split, of_split in rows.items():
        for row in of_split:
            words = row["prompt"][-1]["content"].split(": ")[1].split(", ")
            assert row["answer"] == ", ".join(reversed(words))
            assert (len(words) == 4) == (split == "harder")


def test_summary_counts_words_of_equal_amounts_of_text():
    samples = [{"score": 1.0, "length": 3, "completion": "One, two two."}] * 1_999
    samples += [{"score": 0.0, "length": 1, "completion": "three"}]
    found = smollm.summary(samples)
    assert found["exact"] == found["score"] == round(1_999 / 2_000, 4)
    assert (found["words"], found["distinct_words"]) == (3_000, 2)  # "three" comes later
    assert found["length"] == round((1_999 * 3 + 1) / 2_000, 2)
    few = smollm.summary([{"score": x, "length": 1, "completion": ""} for x in (0.0, 1.0, 1.0)])
    assert few["stderr"] == round(math.sqrt(2 / 3 / 2 / 3), 4)


def test_habits_of_completions():
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nDescribe bus stops.<|im_end|>\n"
    completions = ["A bus stop is cold.", "I'm so Glad!", "Lovely stops.", "Stone."]
    found = smollm.habits([{"prompt": prompt, "completion": text} for text in completions])
    assert found == {"names_topic": 0.5, "gladness": 0.5}


def test_kl_and_perplexity_are_those_of_whole_sequences(prepared):
    samples = [
        {"prompt": "<|im_start|>user\nHi<|im_end|>\n", "completion": "abc"},
        {"prompt": "x", "completion": "Hello there"},
        {"prompt": "y", "completion": ""},
    ]
    found = smollm.against_reference(samples, prepared / "other", prepared / "smollm2")
    tokenizer = smollm_tokenizer(prepared)
    sums = {}
    for name, temperature in (("smollm2", 1.0), ("smollm2", 0.7), ("other", 0.7)):
        model = LlamaForCausalLM.from_pretrained(prepared / name).requires_grad_(False)
        for sample in samples[:2]:
            first, ids = (
                tokenizer(x)["input_ids"] for x in (sample["prompt"], sample["prompt"] + sample["completion"])
            )
            logprobs = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
            sums.setdefault((name, temperature), []).extend(
                float(logprobs[t - 1, ids[t]]) for t in range(len(first), len(ids))
            )
    assert len(sums["other", 0.7]) == 14
    assert found["kl"] == pytest.approx((sum(sums["other", 0.7]) - sum(sums["smollm2", 0.7])) / 2, abs=0.006)
    assert found["reference_perplexity"] == pytest.approx(math.exp(-sum(sums["smollm2", 1.0]) / 14), abs=0.006)
    assert abs(found["kl"]) > 0.05
    assert smollm.against_reference(samples, prepared / "smollm2", prepared / "smollm2")["kl"] == 0


def smollm_tokenizer(prepared):
    return PreTrainedTokenizerFast.from_pretrained(prepared / "smollm2")


def test_a_run_is_made_once_and_one_that_was_stopped_goes_on(prepared, packages, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(packages))
    records, runs = tmp_path / "records", tmp_path / "runs"
    run = smollm.Run("sentiment", "full", 0.02, 1, updates=2)
    smollm.make([run], runs, prepared, records, None, limit=32)
    record = json.loads((records / f"{run.name}.json").read_text())
    assert len(record["reward"]) == len(record["kl"]) == 2
    assert record["seed"] == 1 and "--total_episodes 64" in record["command"]
    assert str(prepared) not in record["command"]
    for mode in ("sampled", "greedy"):
        assert record["test"][mode]["prompts"] == 32
    assert 0 < record["test"]["sampled"]["reference_perplexity"] < 1_000
    base = json.loads((records / "sentiment-base.json").read_text())
    assert base["test"]["sampled"]["kl"] == 0 and "reward" not in base
    assert not list((runs / run.name).glob("checkpoint-*"))

    # What has its record is not made again; without the record, what has been trained and completed is not.
    def no_calls(*args):
        raise AssertionError("nothing was left to run")

    monkeypatch.setattr(smollm, "call", no_calls)
    with monkeypatch.context() as patch:
        patch.setattr(smollm, "train", no_calls)
        smollm.make([run], runs, prepared, records, None, limit=32)
    (records / f"{run.name}.json").unlink()
    smollm.make([run], runs, prepared, records, None, limit=32)
    assert json.loads((records / f"{run.name}.json").read_text()) == record
    smollm.make([smollm.Run("sentiment", "trl", 0.02, 1)], runs, prepared, records, None, limit=32)
    assert "left out" in capsys.readouterr().out


def test_runs_of_adapters_have_ten_times_the_learning_rate():
    def flags(method):
        run = smollm.Run("sentiment", method, 0.02, 3)
        words = run.flags(Path("prepared"))
        return dict(zip(words[::2], words[1::2]))

    full, lora = flags("full"), flags("lora8")
    assert float(lora.pop("--learning_rate")) == 10 * float(full.pop("--learning_rate"))
    assert lora.pop("--lora_rank") == "8"
    assert lora == full
    assert flags("trl") == flags("full") and flags("trl-lora8") == flags("lora8")
    swept = smollm.Run("sentiment", "lora8", 0.02, 3, rate=3)
    assert swept.name == "sentiment-lora8-beta0.02-rate3-seed3"
    assert swept.flags(Path())[swept.flags(Path()).index("--learning_rate") + 1] == "0.0006"
    names = [run.name for run in smollm.planned()]
    assert len(set(names)) == len(names)


def test_tables_give_no_error_of_few_seeds(tmp_path):
    def record(seed, score):
        mode = {"score": score, "exact": score, "kl": 2.0, "length": 7}
        return {"seed": seed, "reward": [score], "test": {"sampled": mode, "greedy": mode}, "seconds_per_update": 20}

    base = record(0, 0.1)
    del base["seed"], base["reward"]
    smollm.write_record(tmp_path / "sentiment-base.json", base | {"examples": []})
    for seed, score in ((1, 0.2), (2, 0.4)):
        smollm.write_record(tmp_path / f"sentiment-full-beta0-seed{seed}.json", record(seed, score))
    for seed, score in ((1, 0.2), (2, 0.3), (3, 0.4)):
        smollm.write_record(tmp_path / f"sentiment-full-beta0.02-seed{seed}.json", record(seed, score))
    smollm.write_record(tmp_path / "sentiment-full-beta0-rate3-seed1.json", record(1, 0.9))
    found = smollm_report.load(tmp_path)
    assert smollm_report.rate_table(found["sentiment"]).splitlines()[2:] == [
        "| all weights, β = 0 |  | 0.20, 2.0 | 0.90, 2.0 |"
    ]
    lines = smollm_report.sentiment_table(found["sentiment"]).splitlines()
    assert lines[2].startswith("| before training |  | 0.10; 0.10 |")
    assert lines[3].startswith("| all weights, β = 0 | 1, 2 | 0.30; 0.30 |")
    assert lines[4].startswith("| all weights, β = 0.02 | 1, 2, 3 | 0.30 ± 0.06; 0.30 ± 0.06 |")
    for seed in (1, 2, 3):
        smollm.write_record(tmp_path / f"sentiment-full-beta0.1-seed{seed}.json", record(seed, 0.7 + seed / 10))
    assert smollm_report.difference_table(smollm_report.load(tmp_path)).splitlines()[2:] == [
        "| sentiment | all weights, β = 0.1 | +0.60 [+0.37, +0.83] | below 0.005 | ahead |"  # β = 0 has two seeds
    ]
    page = tmp_path / "README.md"
    marks = "\n".join(
        f"<!-- {x} -->\nold\n<!-- end of {x} -->" for x in ("sentiment", "samples", "rates", "differences", "cost")
    )
    page.write_text(f"above\n{marks}\nbelow\n")
    smollm_report.write(tmp_path, page)
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n")
    assert "old" not in text and "| all weights, β = 0 | 20.0 |" in text
    assert smollm_report.smooth([1, 2, 3, 4, 5, 6]) == [3, 4] and smollm_report.smooth([1, 2]) == []


def test_trl_gets_the_text_of_messages(tmp_path):
    import smollm_trl

    (tmp_path / "own.py").write_text(
        "def length(prompts, completions, ids, **columns):\n    return [len(x) for x in completions]\n"
    )
    reward = smollm_trl.reward_by_text(f"{tmp_path / 'own.py'}:length")
    assert reward(None, [[{"role": "assistant", "content": "four"}]], None, answer=[1]) == [4]
    assert reward.__name__ == "length"
