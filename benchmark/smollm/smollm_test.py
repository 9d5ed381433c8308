"""Tests of prepare.py, synopses.py and models.py, without the data and models that prepare.py makes."""

import argparse
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import models  # noqa: E402
import prepare  # noqa: E402
import study  # noqa: E402
import synopses  # noqa: E402

MINI = HERE.parent / "mini_tldr" / "sft"  # a tiny model
TEXT = "Foo reads files. It writes others."


# ---- Texts -----------------------------------------------------------------------------------------------------------


def test_a_description_becomes_paragraphs():
    assert prepare.plain([" one", " two", " .", " three", "  - four"]) == "one two\nthree\n- four"


def test_packages_are_read_with_their_source():
    packages = "Package: a-bin\nSource: a (1.0)\n\nPackage: b\n"
    texts = "Package: a-bin\nDescription-en: reads files\n It reads files.\n\nPackage: b\n"
    found = {"package": "a-bin", "source": "a", "synopsis": "reads files", "text": "It reads files."}
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


@pytest.mark.parametrize(
    ("synopsis", "broken"),
    [
        ("reader of files", None),
        ("x" * 80, 0),
        ("reader of files by foo-bin", 1),
        ("the reader of files", 2),
        ("reader of files.", 3),
        ("Reader of files", 4),
        ("foo reads files", 5),
        ("NumPy reader", None),  # a name
    ],
)
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
    """Flags of models.py for a tiny model and six packages; closeness is the share of plain words."""
    rows = [{"prompt": f"the post {n}\n\nTL;DR:", "synopsis": f"post {n}", "package": f"p{n}"} for n in range(6)]
    for split in ("sft", "reward", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(synopses, "PREPARED", tmp_path)
    monkeypatch.setattr(synopses, "closeness", lambda completions, synopsis: [len(x) / 99 for x in completions])
    monkeypatch.setattr(models, "STOP", 0)
    monkeypatch.setattr(models, "GRADES", [synopses.rouge_l])
    monkeypatch.setattr(models, "REWARD_LAYERS", 2)
    flags = {"source": MINI, "splits": ["sft"], "as_rloo": 0, "all_layers": False}
    return argparse.Namespace(**flags, learning_rate=1e-2, seed=1, output_dir=tmp_path / "out")


def test_sft_lowers_the_loss_and_trains_the_upper_half(small):
    tokenizer = models.transformers.AutoTokenizer.from_pretrained(MINI)
    small.as_rloo = 12
    models.sft(small, tokenizer)
    losses = [json.loads(line)["loss"] for line in (small.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 12 and losses[-1] < losses[0] / 2
    before, after = (models.rloo.read_model(models.flags(), path, torch.float32) for path in (MINI, small.output_dir))
    last = before.config.num_hidden_layers - 1
    weights = zip(before.named_parameters(), after.named_parameters(), strict=True)
    changed = {name for (name, old), (_, new) in weights if not old.equal(new)}
    assert any(f"layers.{last}." in name for name in changed) and not any("layers.0." in name for name in changed)


def test_sft_continued_reads_the_packages_of_rloo(small, monkeypatch):
    """... of the split on which rloo.py trains, in the first steps those of its first updates."""
    rows = [{"prompt": f"the post {n}\n\nTL;DR:", "synopsis": f"post {n}", "package": f"t{n}"} for n in range(20)]
    (synopses.PREPARED / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = shlex.split(study.smollm.rows["continued"].train)
    small.splits, small.as_rloo = [flags[flags.index("--splits") + 1]], 2
    batches = []
    monkeypatch.setattr(models, "fit", lambda load, found, *options: batches.extend(found))
    tokenizer = models.transformers.AutoTokenizer.from_pretrained(MINI)
    models.sft(small, tokenizer)
    examples = models.examples_of(["train"], tokenizer)
    of_rloo = models.rloo.examples_of_update(examples, small.seed, 0, 2 * models.B)
    packages = {example["columns"]["package"] for example in of_rloo}
    assert {example["columns"]["package"] for batch in batches for example, _ in batch} <= packages


def test_the_best_of_16_is_that_of_the_reward_model(small, monkeypatch):
    tokenizer = models.transformers.AutoTokenizer.from_pretrained(MINI)
    scores = []

    def longest(model, items):
        scores.append(torch.tensor([[float(len(text)) for text in item] for _, item in items]).T)
        return scores[-1]

    models.reward(argparse.Namespace(source=MINI, output_dir=small.output_dir / "reward"), tokenizer)
    monkeypatch.setattr(models, "scores_of", longest)
    models.best_of(small, tokenizer)
    samples = [json.loads(line) for line in (small.output_dir / "completions.jsonl").read_text().splitlines()]
    (evaluation,) = [json.loads(line) for line in (small.output_dir / "evaluations.jsonl").read_text().splitlines()]
    assert scores[0].shape == (16, 6) and len(samples) == 6
    assert evaluation["greedy/rouge_l"] == pytest.approx(sum(x["grades"]["rouge_l"] for x in samples) / 6)
