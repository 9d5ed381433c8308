"""Tests of prepare.py, synopses.py and models.py, without the data and models that prepare.py makes."""

import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import models  # noqa: E402
import prepare  # noqa: E402
import runs  # noqa: E402
import study  # noqa: E402
import synopses  # noqa: E402

from rloo_test import write_rows  # noqa: E402

MINI = HERE.parent / "mini_tldr" / "sft"  # a tiny model
TEXT = "Foo reads files. It writes others."


# ---- Texts -----------------------------------------------------------------------------------------------------------


def test_packages_are_read_with_their_source_and_paragraphs():
    packages = "Package: a-bin\nSource: a (1.0)\n\nPackage: b\n"
    texts = "Package: a-bin\nDescription-en: reads\n one\n two\n .\n three\n   - four\n\nPackage: b\n"
    found = {"package": "a-bin", "source": "a", "synopsis": "reads", "text": "one two\nthree\n- four"}
    assert prepare.read_packages(packages, texts) == [found]


def test_one_package_of_a_source_and_no_near_copies():
    long = " ".join(f"word{n}" for n in range(20))
    rows = [
        {"package": "a-bin", "source": "a", "synopsis": "one", "text": long},
        {"package": "a", "source": "a", "synopsis": "two", "text": f"{long} a"},
        {"package": "b", "source": "b", "synopsis": "three", "text": f"{long} b"},  # nearly a's
        {"package": "c", "source": "c", "synopsis": "four", "text": "too short"},
    ]
    chosen = prepare.choose(rows)
    assert len(chosen) == 1 and chosen[0]["package"] in ("a", "b")


def test_no_source_is_in_two_splits(monkeypatch):
    monkeypatch.setattr(prepare, "SPLITS", {"test": 2, "sft": 3})
    rows = [{"text": f"text {n}", "synopsis": f"s{n}", "package": f"p{n}"} for n in range(6)]
    splits = prepare.split(rows)
    assert [len(splits[name]) for name in ("test", "sft", "train")] == [2, 3, 1]
    assert splits["three_shot"][0]["prompt"].endswith("TL;DR: s4\n\ntext 0\n\nTL;DR:")
    assert synopses.description(splits["three_shot"][0]["prompt"]) == "text 0"


# ---- Grades ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("synopsis, broken", [
    ("reader of files", None), ("NumPy reader", None), ("x" * 80, 0), ("reader of files by foo-bin", 1),
    ("the reader of files", 2), ("reader of files.", 3), ("Reader of files", 4), ("foo reads files", 5),
])  # fmt: skip
def test_heuristics(synopsis, broken):
    assert synopses.kept(synopsis, "foo-bin", TEXT) == [number != broken for number in range(6)]


def test_an_empty_synopsis_keeps_nothing():
    prompts = [f"{TEXT}\n\nTL;DR:"] * 2
    assert synopses.keeps_all(["", " reader of files"], ["foo", "foo"], prompts) == [0, 1]


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    # "a c d" is the longest common subsequence: 3 of 4 and 3 of 5 words.
    assert synopses.rouge_l(["A b, c d"], ["a x c y d"]) == [pytest.approx(2 * 3 / (4 + 5))]
    assert synopses.rouge_l([""], ["a"]) == [0]


def test_plain_words_are_a_share(monkeypatch):
    monkeypatch.setattr(synopses, "common_words", lambda: {"a", "library"})
    assert synopses.plain_words(["A library", "a libfoo", ""]) == [1, 0.5, 0]


def test_closeness_is_1_for_the_same_text(monkeypatch):
    monkeypatch.setattr(synopses, "embed", lambda texts: torch.eye(3)[[len(text) for text in texts]])
    assert synopses.closeness([" a", "bb", "a"], ["c", "c", "dd"]) == [1, 0, 0]


# ---- Models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Six packages in each split, long prompts first; closeness is the length; the reward model has two layers."""
    rows = [{"prompt": f"{'the post ' * (6 - n)}\n\nTL;DR:", "synopsis": f"post {n}"} for n in range(6)]
    for split in ("sft", "train", "reward", "test"):
        write_rows(tmp_path / f"{split}.jsonl", [row | {"package": f"{split}{n}"} for n, row in enumerate(rows)])
    monkeypatch.setattr(synopses, "PREPARED", tmp_path)
    monkeypatch.setattr(synopses, "closeness", lambda completions, synopsis: [len(x) / 99 for x in completions])
    monkeypatch.setattr(models, "STOP", 0)
    monkeypatch.setattr(models, "GRADES", [synopses.rouge_l])
    monkeypatch.setattr(models, "REWARD_LAYERS", 2)
    return tmp_path / "out"


def test_sft_lowers_the_loss_and_trains_the_upper_half(small):
    models.sft(small, MINI, as_rloo=12, learning_rate=1e-2)
    losses = [update["loss"] for update in runs.lines(small / "metrics.jsonl")]
    assert len(losses) == 12 and losses[-1] < losses[0] / 2
    before, after = (load_file(folder / "model.safetensors") for folder in (MINI, small))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any("layers.2." in name for name in changed) and not any("layers.0." in name for name in changed)


def test_sft_continued_reads_the_packages_of_rloo(small, monkeypatch):
    """... of the split on which rloo.py trains, in the first steps those of its first updates."""
    flags = shlex.split(study.smollm.rows["continued"].train)
    split = flags[flags.index("--splits") + 1]
    batches = []
    monkeypatch.setattr(models, "B", 2)
    monkeypatch.setattr(models, "fit", lambda master, model, found, *options: batches.extend(found))
    models.sft(small, MINI, (split,), as_rloo=2)
    of_rloo = models.rloo.examples_of_update(models.rows_of("train"), 1, 0, 2 * models.B)
    packages = {example["columns"]["package"] for batch in batches for example, _ in batch}
    assert packages == {row["package"] for row in of_rloo}


def test_the_best_of_16_is_that_of_the_reward_model(small, monkeypatch):
    def longest(model, items):
        return torch.tensor([[float(len(text)) for text in texts] for _, _, texts in items]).T

    monkeypatch.setattr(models, "train_judge", lambda *_: None)
    monkeypatch.setattr(models, "read_judge", lambda *_: None)
    monkeypatch.setattr(models, "scores_of", longest)
    drawn, samples_of = [], models.samples_of
    monkeypatch.setattr(models, "samples_of", lambda *options: drawn.append(samples_of(*options)) or drawn[-1])
    models.best_of(small, MINI)
    samples, (evaluation,) = (runs.lines(small / f"{name}.jsonl") for name in ("completions", "evaluations"))
    found = {example["columns"]["package"]: max(texts, key=len).strip() for example, _, texts in drawn[1]}
    assert [x["completion"] for x in samples] == [found[f"test{n}"] for n in range(6)]
    assert evaluation["greedy/rouge_l"] == pytest.approx(sum(x["grades"]["rouge_l"] for x in samples) / 6)


def test_a_reward_model_learns_which_of_a_packages_samples_is_closer(small):
    tokenizer = models.rloo.load_tokenizer(models.ARGS, MINI)
    examples = [models.rloo.prepare_example(row, tokenizer) for row in models.rows_of("reward")] * 20
    texts = [" a short one", " one that is longer than the other"]
    ids = [[*tokenizer(text)["input_ids"], 0] for text in texts]
    models.train_judge(MINI, [(example, ids, texts) for example in examples], small, 1)
    short, long = models.scores_of(models.read_judge(small, torch.bfloat16), [(examples[0], ids)])
    assert short < long
