"""Tests of mini TL;DR: its tables, its judge, its builder."""

import itertools
import json
from pathlib import Path

import mini_tldr
import numpy as np
import study
from mini_tldr import SLOTS, gold_judge, gold_win_rate, stated
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rloo

HERE = Path(__file__).resolve().parent


def test_a_form_states_exactly_its_own_value_and_the_words_around_it_state_none():
    for slot, values in SLOTS.items():
        for name, forms in values.items():
            for form in forms:
                assert stated(form) == {s: {name} if s == slot else set() for s in SLOTS}, form
    tables = mini_tldr.WORDS
    words = [text for name in ("state", "decoy", "fragments") for texts in tables[name].values() for text in texts]
    for name in ("others", "fillers", "titles", "subreddits", "rambles"):
        words += tables[name]
    for text in [*words, *tables["dropped"].values()]:
        assert not any(stated(text).values()), text


def test_the_judge_and_its_win_rate():
    facts = {slot: next(iter(values)) for slot, values in SLOTS.items()}
    texts = ["", " my roommate", " my roommate, my roommate", " my roommate my boss", " my flatmate" + " so" * 27]
    grades = gold_judge(None, texts, facts=[facts] * 5)
    assert grades == [0.0, 1.0, 1.0, 0.0, 0.5]  # the last has 29 words, 5 more than are free
    columns = {"facts": [facts] * 3, "completion": [" my boss", " my flatmate", " my roommate last week"]}
    assert gold_win_rate(None, [" my roommate"] * 3, None, **columns, decoys=None) == [1.0, 0.5, 0.0]


def test_the_bundled_task_can_be_rebuilt(tmp_path, monkeypatch):
    """A very small one has the files of the shipped one, models that load, and no facts in two splits."""
    sizes = {"train": 100, "validation": 2, "test": 2, "sft": 16, "reader": 16, "pool": 2, "stages": (8, 16, 16)}
    monkeypatch.setattr(mini_tldr, "SIZES", sizes)
    monkeypatch.setattr(mini_tldr, "GROUP", 3)
    mini_tldr.main(tmp_path)
    built, shipped = (
        {str(path.relative_to(folder)) for path in folder.rglob("*.json*")} for folder in (tmp_path, HERE)
    )
    assert built == shipped
    for part, auto_class in (("sft", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
        model, tokenizer = (auto.from_pretrained(tmp_path / part) for auto in (auto_class, AutoTokenizer))
        assert model.config.vocab_size == len(tokenizer) and tokenizer.pad_token == "[PAD]" != tokenizer.eos_token
        config = json.loads((tmp_path / part / "tokenizer_config.json").read_text())
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"  # transformers 4 knows no other name
    rows = {split: [*rloo.load_rows(str(tmp_path), split).values()] for split in ("train", "validation", "test")}
    facts = [{tuple(row["facts"].values()) for row in split} for split in rows.values()]
    assert not any(one & other for one, other in itertools.combinations(facts, 2))
    own = [row["completion"] for row in rows["test"]]
    right, swapped = (
        sum(gold_judge(None, texts, facts=[row["facts"] for row in rows["test"]])) for texts in (own, own[1:] + own[:1])
    )
    assert right > swapped + len(own)  # a summary of another post loses
    for row in rows["train"]:
        said = stated(row["prompt"])
        assert all(said[slot] == {row["facts"][slot], row["decoys"].get(slot, row["facts"][slot])} for slot in SLOTS)


def test_the_shipped_reward_model_agrees_with_the_judge_on_samples_of_the_policy():
    agree = []
    for _, grades in study.samples_of_sft([*rloo.load_rows(str(HERE), "test").values()][:64], 2, 0.7):
        gold, score = (grades[name][0] - grades[name][1] for name in ("gold_judge", "rewards/reward_model"))
        agree += (gold * score > 0)[gold != 0].tolist()
    assert len(agree) > 40 and np.mean(agree) > 0.75
