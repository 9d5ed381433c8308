import chain
import judges
import models
import prepare
import pytest
import report
import torch

MINI = models.HERE.parent / "mini_tldr"

PACKAGES = """Package: libfoo1
Source: foo (1.2)
Version: 1.2

Package: foo
Depends: libfoo1,
 bar
"""
TRANSLATIONS = """Package: libfoo1
Description-md5: 0
Description-en: library of foo
 A wrapped
 paragraph.
 .
 Features:
  * one
  * two

Package: foo
Description-en: foo itself
 Short.

Package: unknown
Description-en: not in the list of packages
 Text.
"""


def test_packages_have_source_synopsis_and_unwrapped_text():
    foo, library = prepare.read_packages(PACKAGES, TRANSLATIONS)
    assert foo == {"package": "foo", "source": "foo", "synopsis": "foo itself", "text": "Short."}
    assert library["source"] == "foo" and library["synopsis"] == "library of foo"
    assert library["text"] == "A wrapped paragraph.\nFeatures:\n* one\n* two"


def row(source: str, text: str, synopsis: str | None = None, package: str | None = None) -> dict:
    return {"package": package or source, "source": source, "synopsis": synopsis or source, "text": text}


def text_of(source: str, n: int = 50) -> str:
    return " ".join(f"{source}word{i}" for i in range(n))


def test_one_package_of_a_source_the_one_with_its_name_and_of_the_right_length():
    rows = [row("a", text_of("other"), "x", "a-data"), row("a", text_of("a"), "y"), row("b", text_of("b", 121))]
    rows += [row("c", text_of("c"), "z", "c-doc"), row("c", text_of("c", 39))]
    assert sorted(x["package"] for x in prepare.choose(rows)) == ["a", "c-doc"]


def test_near_copies_and_equal_synopses_are_dropped():
    sources = sorted("abcde", key=prepare.order_of)
    rows = [row(source, text_of(source)) for source in sources]
    rows[1]["text"] = " ".join(text_of(sources[0]).split()[:30] + text_of(sources[1]).split()[:20])  # 26 of 46 shingles
    rows[2]["text"] = " ".join(text_of(sources[0]).split()[:10] + text_of(sources[2]).split()[:40])  # 6 of 46
    rows[3]["synopsis"] = rows[0]["synopsis"].upper()
    assert [x["source"] for x in prepare.choose(rows[::-1])] == [sources[0], sources[2], sources[4]]


def test_no_source_is_in_two_splits_and_a_new_package_moves_few():
    names = [f"source{i}" for i in range(5_000)]
    rows = prepare.choose([row(name, text_of(name)) for name in names])
    splits = prepare.split(rows)
    packages = [x["package"] for part in splits.values() for x in part]
    assert len(packages) == len(set(packages)) == 5_000
    assert [len(splits[name]) for name in prepare.SPLITS] == list(prepare.SPLITS.values())
    assert splits["test"][0]["prompt"].endswith("\n\nTL;DR:") and packages != sorted(packages)
    more = prepare.split(prepare.choose([row(name, text_of(name)) for name in [*names, "another"]]))
    moved = {x["package"] for x in more["test"]} ^ {x["package"] for x in splits["test"]}
    assert len(moved) <= 2


def test_rouge_l():
    assert judges.longest_common(list("abcde"), list("xaxcxe")) == 3
    assert judges.longest_common(["a"], ["a", "a"]) == judges.longest_common(["a", "b"], ["b", "a"]) == 1
    scores = judges.rouge_l(["a fast web server", "", "Web Server"], ["fast server", "fast server", "web server!"])
    assert scores == pytest.approx([2 * 2 / 6, 0, 1])


def test_closeness_is_by_package_and_ignores_spaces_around(monkeypatch):
    monkeypatch.setattr(
        judges, "embed", lambda texts: torch.tensor([[float(x == "a"), float(x != "a")] for x in texts])
    )
    assert judges.closeness([" a", "a ", "b", "a"], ["a", "b", "b", "a"]) == [1, 0, 1, 1]


def test_ties_count_half():
    assert chain.win_rate([0.5, 0.2, 0.9, 0.1], [0.5 + 1e-6, 0.1, 1.0, 0.1]) == (0.5 + 1 + 0 + 0.5) / 4


def test_only_packages_of_both_sides_are_compared():
    grades = {"closeness": 0.5, "rouge_l": 0.2, "length": 10.0}
    ours = {"a": grades | {"closeness": 0.7}, "b": grades, "only ours": grades | {"length": 1_000.0}}
    found = chain.compared(ours, {"b": grades, "a": grades | {"rouge_l": 0.3}})
    assert found["length"] == 10 and found["ended"] == 1 and found["closeness"] == 0.6
    assert (found["closeness_wins"], found["rouge_l_wins"]) == (0.75, 0.25)


def test_best_of_n_takes_the_best_score_of_each_n():
    rows = [
        {"package": "a", "closeness": [0.1, 0.2, 0.3, 0.4], "rouge_l": [0.0] * 4, "ids": [[1], [1, 2], [1], [1, 1, 2]]}
    ]
    sft = {"a": {"closeness": 0.25, "rouge_l": 0.0}}
    scores = torch.tensor([[0.0], [9.0], [8.0], [7.0]])
    found = chain.best_of(2, rows, scores, sft)  # the second, then the third
    assert found["closeness"] == 0.25 and found["closeness_wins"] == 0.5 and found["length"] == 1.5
    assert found["rouge_l_wins"] == 0.5
    assert chain.best_of(4, rows, scores, sft)["closeness"] == 0.2


def test_bradley_terry_is_the_mean_over_pairs_that_differ():
    scores = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]])  # (k, B)
    gold = torch.tensor([[0.9, 0.5], [0.5, 0.5], [0.9, 0.1]])
    losses = models.bradley_terry(scores, gold)
    pairs = [[(2, 1), (0, 1)], [(0, 3), (0, 3)]]  # scores of the better and the worse one
    expected = [sum(-torch.sigmoid(torch.tensor(a - b * 1.0)).log() for a, b in own) / 2 for own in pairs]
    torch.testing.assert_close(losses, torch.stack(expected))
    assert models.bradley_terry(scores, torch.tensor([[0.0], [0.0], [0.09]]).expand(3, 2)).tolist() == [0, 0]


def test_agreement_is_of_pairs_and_equal_scores_count_half():
    gold = torch.tensor([[0.3], [0.2], [0.1]])
    assert models.agreement(torch.tensor([[3.0], [2.0], [1.0]]), gold) == 1
    assert models.agreement(torch.tensor([[1.0], [1.0], [2.0]]), gold) == pytest.approx(0.5 / 3)


def test_batches_hold_everything_once_and_prompts_of_like_length():
    items = [({"prompt_ids": [0] * (1 + i * 7 % 90)}, i) for i in range(90)]
    batches = models.of_like_length(items, 4, seed=1)
    assert sorted(i for batch in batches for _, i in batch) == list(range(90))
    widths = [max(lengths) - min(lengths) for lengths in ([len(x["prompt_ids"]) for x, _ in b] for b in batches)]
    assert sum(widths) / len(widths) < 20
    firsts = [len(batch[0][0]["prompt_ids"]) for batch in batches]
    assert firsts != sorted(firsts)


def test_a_batch_has_the_completions_of_each_prompt_and_nothing_after_the_stop():
    examples = [{"prompt_ids": [5, 6]}, {"prompt_ids": [7]}]
    full = list(range(10, 10 + models.T))
    batch = models.batch_of(examples, [[[8, models.STOP], full], [[9, 9, models.STOP], [models.STOP]]])
    assert batch.completion_ids() == [[8, models.STOP], [9, 9, models.STOP], full, [models.STOP]]
    assert batch.ended.tolist() == [[True, True], [False, True]]


def test_sft_learns_and_the_reward_model_learns_what_the_annotator_prefers(tmp_path, monkeypatch):
    tokenizer = models.transformers.AutoTokenizer.from_pretrained(MINI / "sft")
    monkeypatch.setattr(models, "STOP", tokenizer.eos_token_id)
    # It prefers short texts; a thousand for each prompt's number shows whose completion it is.
    grade = lambda texts, synopses: [1000.0 * int(x) - len(text) for text, x in zip(texts, synopses, strict=True)]  # noqa: E731
    monkeypatch.setattr(judges, "closeness", grade)
    prompts = [line["prompt"] for line in report.common.read_lines(MINI / "train.jsonl")[:24]]
    rows = [{"prompt": text, "synopsis": str(i), "package": f"p{i}"} for i, text in enumerate(prompts)]
    models.sft(MINI / "sft", rows, tmp_path / "policy", learning_rate=1e-3, size=4)
    log = report.common.read_lines(tmp_path / "policy" / "log.jsonl")
    assert sum(line["items"] for line in log) == 24 and log[-1]["loss"] < log[0]["loss"] - 0.5
    models.sample(MINI / "sft", rows, 4, tmp_path / "samples.jsonl")
    samples = report.common.read_lines(tmp_path / "samples.jsonl")
    assert [len(x["ids"]) for x in samples] == [4] * 24 and len({x["package"] for x in samples}) == 24
    assert all(x["closeness"] == grade(x["text"], [x["package"][1:]] * 4) for x in samples)
    models.reward_model(MINI / "sft", samples, tmp_path / "reward", learning_rate=3e-3, size=4)
    kind = models.transformers.AutoModelForSequenceClassification
    model, tokenizer = models.load(tmp_path / "reward", kind=kind, num_labels=1)
    scores = models.score_samples(model, samples, tokenizer)
    assert models.agreement(scores, torch.tensor([x["closeness"] for x in samples]).T) > 0.7


def test_rows_of_updates_are_those_that_rloo_trains_on():
    tokenizer = models.transformers.AutoTokenizer.from_pretrained(MINI / "sft")
    rows = report.common.read_lines(MINI / "train.jsonl")[:30]
    updates = models.rows_of_updates(rows, MINI / "sft", seed=2, updates=3, size=4)
    examples = models.read_examples(rows, tokenizer)
    theirs = [models.rloo.examples_of_update(examples, 2, done * 4, 4) for done in range(3)]
    assert [[x["prompt"] for x in own] for own in updates] == [[x["prompt"] for x in own] for own in theirs]


def test_steps_with_a_record_are_not_made_again(tmp_path, monkeypatch, capsys):
    made, needed = [], []
    monkeypatch.setattr(chain, "make_run", lambda _, name: made.append(name) or {"kl": 1.0})
    for step in ("train_sft", "train_reward"):
        monkeypatch.setattr(chain, step, lambda steps: needed.append(steps.folder))
    records = chain.Records(tmp_path / "records.json")
    steps = chain.Chain(tmp_path / "again", tmp_path)
    for _ in range(2):
        chain.make(steps, ["annotator-seed1", "annotator-seed2", "speed"], records)
    assert made == ["annotator-seed1", "annotator-seed2"] and set(needed) == {tmp_path}
    assert "needs --trl" in capsys.readouterr().out
    chain.make(steps, ["annotator-seed1"], chain.Records(tmp_path / "records.json", again=True))
    assert made[2:] == ["annotator-seed1"] and "recorded 1, now 1" in capsys.readouterr().out


def test_rloo_and_trl_get_the_same_flags_and_the_annotator_replaces_the_reward_model(tmp_path):
    steps = chain.Chain(tmp_path, tmp_path, updates=50)
    learned, trl, annotator = (chain.training_flags(steps, kind, 2) for kind in (report.LEARNED, "trl", "annotator"))
    micro_batches = ["--per_device_train_batch_size", "--gradient_accumulation_steps"]
    assert [word.split("=")[0] for word in trl if word not in learned] == micro_batches
    assert "--total_episodes=1600" in trl and "--seed=2" in trl
    model, *weights, beta = (word.split("=")[0] for word in learned if word not in annotator)
    assert (model, weights, beta) == ("--reward_model_path", ["--reward_weights", "1", "0"], "--kl_coef")
    logged = learned.index("--reward_weights")
    assert learned[logged - 1].endswith(":closeness") and learned[logged + 1 : logged + 3] == ["1", "0"]


def test_the_page_has_the_records():
    records = chain.Records(report.RECORDS)
    page = (report.HERE / "README.md").read_text(encoding="utf-8")
    assert report.common.filled(page, report.tables(records)) == page
