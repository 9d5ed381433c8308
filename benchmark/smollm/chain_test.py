import chain
import judges
import models
import numpy as np
import prepare
import pytest
import report
import rules
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
    rows = [row("a", text_of("other"), "x", "a-data"), row("a", text_of("a"), "y"), row("b", text_of("b", 51))]
    rows += [row("c", text_of("c"), "z", "c-doc"), row("c", text_of("c", 14))]
    assert sorted(x["package"] for x in prepare.choose(rows)) == ["a", "c-doc"]


def test_near_copies_and_equal_synopses_are_dropped():
    sources = sorted("abcde", key=prepare.order_of)
    rows = [row(source, text_of(source)) for source in sources]
    rows[1]["text"] = " ".join(text_of(sources[0]).split()[:30] + text_of(sources[1]).split()[:20])  # 26 of 46 shingles
    rows[2]["text"] = " ".join(text_of(sources[0]).split()[:10] + text_of(sources[2]).split()[:40])  # 6 of 46
    rows[3]["synopsis"] = rows[0]["synopsis"].upper()
    assert [x["source"] for x in prepare.choose(rows[::-1])] == [sources[0], sources[2], sources[4]]


def test_no_source_is_in_two_splits_and_a_new_package_moves_few(monkeypatch):
    monkeypatch.setattr(prepare, "SPLITS", {"test": 500, "validation": 200, "sft": 500})
    names = [f"source{i}" for i in range(2_000)]
    rows = prepare.choose([row(name, text_of(name)) for name in names])
    splits = prepare.split(rows)
    packages = [x["package"] for part in splits.values() for x in part]
    assert len(packages) == len(set(packages)) == 2_000
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


def completion(package: str, text: str = "a b", **grades) -> dict:
    return {"package": package, "text": text} | dict.fromkeys((*chain.JUDGES, "length"), 0.0) | grades


def test_wins_ties_count_half_and_like_lengths_differ_by_two_words_at_most():
    theirs = [completion(name, closeness=0.5) for name in "abcd"]
    texts, closeness = ["a b", "a b c d", "a b c d e", "a"], [0.5 + 1e-6, 0.6, 0.9, 0.1]
    ours = [completion(*x[:2], closeness=x[2]) for x in zip("abcd", texts, closeness, strict=True)]
    found = chain.measures(ours, theirs)
    assert found["closeness_wins"].tolist() == [0.5, 1, 1, 0] and found["similar"].tolist() == [1, 1, 0, 1]
    assert np.nan_to_num(found["similar_wins"], nan=7).tolist() == [0.5, 1, 7, 0]
    assert found["rouge_l_wins"].tolist() == [0.5] * 4


def test_intervals_cover_seeds_and_packages():
    random = np.random.default_rng(0)
    packages, seeds = random.normal(size=(1, 400)), random.normal(size=(3, 1))
    for values in (np.repeat(packages, 3, 0), np.repeat(seeds, 400, 1)):  # all from packages, then all from seeds
        mean, low, high = chain.interval(values)
        assert mean == pytest.approx(values.mean(), abs=1e-4) and low < mean < high
    mean, low, high = chain.interval(np.repeat(packages, 3, 0))
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.15)  # seeds that are equal add nothing
    assert high - low < 0.5 * np.subtract(*chain.interval(np.repeat(seeds, 400, 1))[:0:-1])
    assert chain.interval(np.array([[1.0, np.nan, 0.0]]))[0] == 0.5


def test_of_mode_is_the_last_of_each_package_by_name():
    lines = [
        {"mode": mode, "columns": {"package": package}, "completion": f" {n} ", "grades": {"closeness": n}}
        for n, (mode, package) in enumerate([("sampled", "b"), ("greedy", "b"), ("sampled", "a"), ("sampled", "b")])
    ]
    expected = [{"package": "a", "text": "2", "closeness": 2}, {"package": "b", "text": "3", "closeness": 3}]
    assert chain.of_mode(lines, "sampled") == expected


def test_best_of_n_takes_the_best_score_of_the_first_n():
    row = {"package": "a", "closeness": [0.1, 0.2, 0.3, 0.4], "rouge_l": [0.0] * 4, "text": list("abcd")}
    rows, scores = [row | {"ids": [[1], [1, 2], [1], [1, 1, 2]]}], torch.tensor([[0.0], [7.0], [8.0], [9.0]])
    sft = {"a": completion("a", closeness=0.25)}
    assert chain.best_of(2, rows, scores, sft)["closeness"][0] == 0.2
    found = chain.best_of(4, rows, scores, sft)
    assert (found["closeness"][0], found["closeness_wins"][0], found["length"][0]) == (0.4, 1, 3)
    assert "keeps_all" not in found


def test_agreement_over_a_run_is_within_prompts_and_by_part():
    pairs = [(1.0, 0.1), (2.0, 0.2), (9.0, 0.0), (9.5, 0.05), (1.0, 0.2), (2.0, 0.1), (5.0, 0.9), (4.0, 0.95)]
    lines = [{"grades": {"reward_model": score, "closeness": gold}} for score, gold in pairs]
    assert chain.agreements(lines, k=2, parts=2) == [1.0, 0.0]


def test_wins_are_over_the_completions_before_training():
    def line(update, package, value):
        grades, columns = {"closeness": value}, {"package": package}
        return {"update": update, "mode": "sampled", "columns": columns, "completion": "", "grades": grades}

    values = {0: (0.5, 0.5), 10: (0.6, 0.4), 20: (0.6, 0.6)}
    lines = [line(update, package, x) for update, pair in values.items() for package, x in zip("ab", pair, strict=True)]
    assert chain.wins_watched(lines) == [[0, 0.5], [10, 0.5], [20, 1.0]]


def test_the_reward_model_learns_differences_within_a_prompt():
    scores, gold = torch.tensor([[1.0, 5.0], [0.8, 5.0]]), torch.tensor([[0.3, 0.2], [0.1, 0.0]])  # (k, B)
    torch.testing.assert_close(models.centred_error(scores, gold), torch.tensor([0.0, 1.0]))


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
    full = list(range(10, 20))
    batch = models.batch_of(examples, [[[8, models.STOP], full], [[9, 9, models.STOP], [models.STOP]]])
    assert batch.completion_ids() == [[8, models.STOP], [9, 9, models.STOP], full, [models.STOP]]
    assert batch.ended.tolist() == [[True, True], [False, True]]


def test_sft_learns_and_the_reward_model_learns_what_the_annotator_prefers(tmp_path, monkeypatch):
    tokenizer = models.transformers.AutoTokenizer.from_pretrained(MINI / "sft")
    monkeypatch.setattr(models, "STOP", tokenizer.eos_token_id)
    monkeypatch.setattr(models, "REWARD_LAYERS", 3)
    # It prefers short texts; a thousand for each prompt's number shows whose completion it is.
    grade = lambda texts, synopses: [1000.0 * int(x) - len(text) for text, x in zip(texts, synopses, strict=True)]  # noqa: E731
    monkeypatch.setattr(judges, "closeness", grade)
    prompts = [line["prompt"] for line in report.common.read_lines(MINI / "train.jsonl")[:24]]
    rows = [{"prompt": text, "synopsis": str(i), "package": f"p{i}"} for i, text in enumerate(prompts)]
    models.sft(MINI / "sft", rows, tmp_path / "policy", learning_rate=1e-3, size=4)
    log = report.common.read_lines(tmp_path / "policy" / "log.jsonl")
    assert sum(line["items"] for line in log) == 24 and log[-1]["loss"] < log[0]["loss"] - 0.5
    monkeypatch.setattr(models, "T", 24)
    models.sample(MINI / "sft", rows, 4, tmp_path / "samples.jsonl")
    samples = report.common.read_lines(tmp_path / "samples.jsonl")
    assert [len(x["ids"]) for x in samples] == [4] * 24 and len({x["package"] for x in samples}) == 24
    assert all(x["closeness"] == grade(x["text"], [x["package"][1:]] * 4) for x in samples)
    models.reward_model(MINI / "sft", samples, tmp_path / "reward", learning_rate=3e-3, size=4)
    kind = models.transformers.AutoModelForSequenceClassification
    model, tokenizer = models.load(tmp_path / "reward", kind=kind, num_labels=1)
    scores = models.score_samples(model, samples, tokenizer)
    assert models.agreement(scores, torch.tensor([x["closeness"] for x in samples]).T) > 0.7


def test_steps_with_a_record_are_not_made_again(tmp_path, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(chain, "make_run", lambda _, name: made.append(name) or {"kl": 1.0})
    records, steps = chain.Records(tmp_path / "records.json"), chain.Chain(tmp_path / "again", tmp_path)
    for _ in range(2):
        chain.make(steps, ["annotator-seed1", "rules-seed2"], records)
    assert made == ["annotator-seed1", "rules-seed2"]
    chain.make(steps, ["annotator-seed1"], chain.Records(tmp_path / "records.json", again=True))
    assert made[2:] == ["annotator-seed1"] and "kl: as recorded" in capsys.readouterr().out


def test_flags_of_each_kind_of_run(tmp_path):
    steps = chain.Chain(tmp_path, tmp_path, updates=50, rules_updates=20)
    model, annotator, rules = (chain.training_flags(steps, f"{kind}-seed2") for kind in ("model", "annotator", "rules"))
    only_logged = model.index("--reward_weights")
    assert model[only_logged + 1 : only_logged + 3] == ["1", "0"]  # the reward model's comes first
    assert f"--reward_model_path={tmp_path / 'reward'}" in model and "--reward_weights" not in annotator
    for flags in (model, annotator):
        assert f"--sft_model_path={tmp_path / 'sft'}" in flags and "--seed=2" in flags
        assert f"--total_episodes={50 * report.FLAGS['per_device_train_batch_size']}" in flags
    assert f"--sft_model_path={chain.PREPARED / 'base'}" in rules
    assert f"--total_episodes={20 * report.RULES_FLAGS['per_device_train_batch_size']}" in rules
    first = rules.index("--reward_fns")
    assert [word.rpartition(":")[2] for word in rules[first + 1 : first + 3]] == ["keeps_the_rules", "closeness"]
    assert rules[first + 3 : first + 6] == ["--reward_weights", *report.WEIGHTS["rules"]]


# ---- Debian's rules: what breaks each, and what does not -------------------------------------------------------------

TEXT = "This is Foobar, a reader. It reads the files of Gnome and writes HTML5 pages"


@pytest.mark.parametrize(
    "rule, kept, broken",
    [
        (rules.one_short_line, ["x" * 79], ["x" * 80, "two\nlines", ""]),
        (rules.no_package_name, ["tools for foo-bars", "a foo"], ["reader of foo-bar", "Foo-Bar, a reader"]),
        (rules.no_article_first, ["another reader", "reader of a file"], ["a reader", "An editor", "the reader"]),
        (rules.no_full_stop, ["reads .txt files", "readers, etc"], ["reads files."]),
        (rules.small_letter_first, ["reader", "HTML5 writer", "Gnome reader", "3D files"], ["Reader", "It reads"]),
        (
            rules.not_the_first_sentence,
            ["reader of files", "it reads the files of Gnome"],
            ["this is Foobar: a reader.", "This is", "This is Foobar, the reader"],
        ),
    ],
)
def test_rule(rule, kept, broken):
    assert [rule(text, "foo-bar", TEXT) for text in kept] == [True] * len(kept)
    assert [rule(text, "foo-bar", TEXT) for text in broken] == [False] * len(broken)


def test_rewards_by_rules_are_the_share_that_is_kept_and_whether_all_are():
    given = {"package": ["foo"] * 3, "prompts": [f"{TEXT}\n\nTL;DR:"] * 3, "synopsis": ["x"] * 3}
    texts = [" reader of files", " The reader of files.", " "]
    assert rules.keeps_the_rules(texts, **given) == pytest.approx([1, 3 / 6, 0])
    assert rules.keeps_all(texts, **given) == [1, 0, 0]


def test_the_page_has_the_records():
    records = chain.Records(report.RECORDS)
    page = (report.HERE / "README.md").read_text(encoding="utf-8")
    assert report.common.filled(page, report.tables(records)) == page
