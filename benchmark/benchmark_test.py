"""Tests of the scripts in this folder and of the judge of TL;DR: `python -m pytest -q benchmark/benchmark_test.py`.

Each script has a section. Where a script takes hours, the test walks its whole way in miniature.
"""

import importlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "mini_tldr"), str(Path(__file__).parents[1])]
import check  # noqa: E402
import gradient  # noqa: E402
import mini_tldr  # noqa: E402
import numpy as np  # noqa: E402
import on_gpu  # noqa: E402
import parity  # noqa: E402
import plot  # noqa: E402
import put_back  # noqa: E402
import pytest  # noqa: E402
import runs  # noqa: E402
import speed  # noqa: E402
import study  # noqa: E402
import torch  # noqa: E402
import trl_run  # noqa: E402
import tyro  # noqa: E402
from conftest import MINI, start_script, write_rows  # noqa: E402

import rloo  # noqa: E402

HERE = Path(__file__).parent


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Runs and records are in a temporary folder."""
    (tmp_path / "records").mkdir()
    monkeypatch.setattr(runs, "HERE", tmp_path)
    monkeypatch.setattr(study, "RUNS", tmp_path / "runs")
    return tmp_path


# ---- runs.py ---------------------------------------------------------------------------------------------------------


def test_the_last_of_two_lines_counts_and_again_writes_nothing(elsewhere, capsys):
    records = runs.Records("x")
    records.add("a", win=1)
    records.add("a", win=2)
    assert runs.Records("x")["a"]["win"] == 2 and len(records.file.read_text().splitlines()) == 2
    assert {"rloo.py", "torch", "transformers", "machine", "date"} == runs.Records("x")["a"]["made"].keys()
    runs.Records("x", again=True).add("a", win=3, made={})
    assert capsys.readouterr().out == "a, win: recorded 2, now 3\n" and runs.Records("x")["a"]["win"] == 2


def test_a_command_runs_once_on_one_thread_and_its_log_grows(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.getcwd()); sys.exit(os.environ.get('END'))"
    for end in ({"END": "some error"}, {"END": "some error"}, {}, {"END": "not run"}):
        try:
            runs.run([sys.executable, "-c", script], tmp_path / "run", **end)
        except subprocess.CalledProcessError:
            (tmp_path / "run").mkdir(exist_ok=True)  # as a run that began does
    log = (tmp_path / "run.log").read_text()
    assert log.count("some error") == 2 and log.count(f"1 {runs.ROOT}") == 3 and "not run" not in log
    assert "is complete" in capsys.readouterr().out and runs.made(tmp_path / "run").keys() >= {"rloo.py", "date"}


def test_t_quantiles_are_those_of_tables():
    for freedom, expected in ((1, 12.706), (4, 2.776), (24, 2.064)):
        assert runs.t_quantile(freedom, 0.05) == pytest.approx(expected, abs=2e-3)


def test_grades_of_items_are_packed_and_unpacked():
    assert runs.packed([0.0, 0.5, 1.0, 0.75]) == "0243" and runs.packed([0.1234, -2]) == [0.123, -2.0]
    for grades in ([0.0, 0.5, 1.0, 0.75], [0.123, -2.0]):
        assert runs.unpacked(json.loads(json.dumps(runs.packed(grades)))).tolist() == grades


SEED, ITEM, BETWEEN, CHANCE = 0.02, 0.3, 0.1, 0.4  # deviations: of seeds, items, items between policies, chance


@pytest.mark.parametrize("seeds, seed", [((3, 3), SEED), ((5, 5), SEED), ((5, 5), 0.0), ((1, 4), SEED)])
def test_intervals_hold_the_truth_in_95_of_100_simulations(seeds, seed):
    rng, items, held, halves = np.random.default_rng(1), 300, 0, []
    for _ in range(800):
        of_items = rng.normal(0, ITEM, items)
        policies = []
        for n in seeds:
            of_seeds = rng.normal(0, seed, (n, 1)) * (n > 1)  # a single seed stands for itself
            chance = rng.normal(0, CHANCE, (n, items))
            policies.append(0.5 + of_seeds + of_items + rng.normal(0, BETWEEN, items) + chance)
        error, freedom = runs.error_and_freedom(*policies)
        gap = policies[0].mean() - policies[1].mean()
        halves.append(runs.t_quantile(round(freedom), 0.05) * error)
        held += abs(gap) < halves[-1]
    assert 0.935 < held / 800 < 0.985
    own = sum(seed**2 * (n > 1) / n for n in seeds)
    true = (own + 2 * BETWEEN**2 / items + sum(CHANCE**2 / n / items for n in seeds)) ** 0.5
    assert 1.9 * true < np.mean(halves) < 4 * true  # t of few seeds; not so wide that it says nothing


def test_an_error_counts_seeds_and_items():
    equal = [[0.714, 0.006], [0.714, 0.006], [0.714, 0.006]]  # seeds agree by luck: posts remain
    assert runs.mean_and_error(equal) == pytest.approx((0.714, 0.006))
    assert runs.mean_and_error([[1.0, 0.3], [2.0, 0.3], [6.0, 0.3]]) == pytest.approx(
        (3, np.hypot(1.5275, 0.3)), abs=1e-4
    )
    by_item = np.tile([0.0, 0.0, 1.0, 1.0], (3, 25))  # no spread of seeds, no chance
    grades = [[0.5, 0.05]] * 3
    assert runs.mean_and_error(grades, by_item) == pytest.approx((0.5, by_item[0].std(ddof=1) / 10))
    # Paired on items a common effect of items cancels, unpaired it does not; twice as many intervals are wider.
    other = by_item + 0.1 + np.array([[0.01], [0.0], [-0.01]])
    paired = runs.difference(grades, grades, 1, (by_item, other))
    assert paired == pytest.approx((-0.1, -0.1 - 4.303 * 0.01 / 3**0.5, -0.1 + 4.303 * 0.01 / 3**0.5), abs=1e-4)
    unpaired = runs.difference(grades, grades)
    assert unpaired == pytest.approx((0, -1.96 * 0.05 * 2**0.5, 1.96 * 0.05 * 2**0.5), abs=1e-3)
    assert runs.difference(grades, grades, 5, (by_item, other))[2] > paired[2] + 0.01


# ---- study.py --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, row", [(name, row) for name, found in study.STUDIES.items() for row in found.rows])
def test_commands_of_studies_are_scripts_and_flags_that_exist(name, row):
    pythons = {"": sys.executable, "trl0": "trl0", "trl1": "trl1"}
    for words in study.commands(name, row, 1, Path("runs") / name, pythons).values():
        assert (runs.ROOT / words[1]).is_file() and words[words.index("--seed") + 1].isdigit()
        if words[1] in ("rloo.py", "benchmark/tldr/train.py"):
            tyro.cli(rloo.Args, args=words[2:], use_underscores=True)
        if words[1] == "benchmark/trl_run.py":
            trl_run.parse_args([*words[2:], "--output_dir", "out"])


PAGES = {
    "mini": "study.md",
    "peers": "study.md",
    "trl": "trl.md",
    "fooled": "study.md",
    "gsm8k": "mini_gsm8k/README.md",
    "countdown": "countdown/README.md",
}


@pytest.mark.parametrize("name, page", PAGES.items())
def test_records_are_of_rows_and_the_page_has_what_the_command_prints(name, page):
    found, records = study.STUDIES[name], runs.Records(name)
    assert records.keys() <= {f"{row}__{seed}" for row, x in found.rows.items() for seed in x.seeds}
    for record in records.values():
        assert record["made"].keys() >= {"rloo.py", "date"} and next(iter(found.grades)) in record
    table, *not_run, _ = study.table(found, records).split("\n\n")
    text = (HERE / page).read_text(encoding="utf-8")
    assert table in text and all(line in text for line in not_run)


@pytest.mark.parametrize("name", PAGES)
def test_a_grade_of_a_record_is_the_mean_of_its_items(name):
    for record in runs.Records(name).values():
        for grade, key in zip(study.STUDIES[name].grades, study.BY_PROMPT):
            if key not in record:
                continue
            mean, error = record[grade]
            items = runs.unpacked(record[key])
            assert items.mean() == pytest.approx(mean, abs=6e-4)
            assert items.std(ddof=1) / len(items) ** 0.5 == pytest.approx(error, rel=0.02)


def test_fresh_posts_avoid_the_facts_of_bundled_ones_and_are_always_the_same(tmp_path, monkeypatch):
    avoided, found, sample_row = [], [], mini_tldr.sample_row

    def spy(rng, taken):
        avoided.append(len(taken))
        return sample_row(rng, taken)

    monkeypatch.setattr(mini_tldr, "sample_row", spy)
    monkeypatch.setattr(study, "POSTS", {"validation": 3, "test": 3})
    monkeypatch.setattr(study, "RUNS", tmp_path)
    for _ in range(2):
        study.fresh_posts()
        study.fresh_posts()  # which finds both files
        found.append([runs.lines(tmp_path / "posts" / f"{split}.jsonl") for split in ("validation", "test")])
        (tmp_path / "posts" / "validation.jsonl").unlink()
    assert found[0] == found[1] and [len(rows) for rows in found[0]] == [3, 3]
    assert avoided == [*range(11_000, 11_006)] * 2  # the facts of bundled posts, and of each fresh one before


@pytest.fixture
def written_down(elsewhere, monkeypatch):
    """A study whose runs are written down in place of being run."""
    commands = []

    def run(words, folder, **_):
        commands.append([str(word) for word in words])
        folder.mkdir(parents=True, exist_ok=True)
        updates = [{"update": n + 1, "time/train": 2.0, "objective/kl": n} for n in range(20)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in updates))
        evaluation = {"update": 20, "greedy/win": 0.5 + 0.01 * len(commands), "greedy/win_stderr": 0.1}
        evaluation |= {"sampled/win": 0.5, "sampled/win_stderr": 0.1}
        (folder / "evaluations.jsonl").write_text(json.dumps(evaluation))
        samples = [{"update": 20, "mode": "greedy", "grades": {"win": x}} for x in (0.25, 0.75)]
        (folder / "completions.jsonl").write_text("".join(json.dumps(x) + "\n" for x in samples))
        (folder / "done").write_text(json.dumps({"rloo.py": "abc", "date": "today"}))
        return folder

    monkeypatch.setattr(runs, "run", run)
    rows = {
        "sft": study.Row("SFT", "rloo.py"),
        "ours": study.Row("RLOO", "rloo.py --sft_model_path {sft}", (1, 2), grade="--stop_token x"),
        "trl": study.Row("PPO", "run.py", python="trl0"),
    }
    grades = {"greedy/win": "wins, %", "sampled/win": "sampled, %"}  # the second has no items
    monkeypatch.setitem(study.STUDIES, "mini", study.Study(rows, "--eval_fns a:win", grades, second=True))
    return commands


def test_a_row_is_trained_and_graded_once_recorded_and_again_only_if_asked(written_down, elsewhere, capsys):
    for _ in range(2):
        study.main("mini", rows=("ours",), seeds=1)
    sft, ours, graded = written_down
    folder = str(elsewhere / "runs" / "mini" / "ours__1")
    assert sft[1:] == ["rloo.py", "--resume", "--seed", "1"]
    assert ours[2:4] == ["--sft_model_path", str(elsewhere / "runs" / "mini" / "sft__1")]
    assert graded[graded.index("--stop_token") + 1] == "x" and graded[graded.index("--sft_model_path") + 1] == folder
    assert runs.Records("mini") == {
        "ours__1": {
            "name": "ours__1",
            "command": "rloo.py --sft_model_path {sft} --seed 1",
            "seconds": 40.0,
            "kl": 18.5,
            "greedy/win": [0.53, 0.1],
            "sampled/win": [0.5, 0.1],
            "by_prompt": "13",
            "made": {"rloo.py": "abc", "date": "today"},
        }
    }
    written_down.clear()
    capsys.readouterr()
    study.main("mini", rows=("ours",), seeds=1, again=True)
    assert written_down[-1][-3] == str(elsewhere / "runs" / "again" / "mini" / "ours__1")
    assert "ours__1, greedy/win: recorded [0.53, 0.1], now" in capsys.readouterr().out
    study.main("mini", rows=("sft", "ours"), seeds=1, base="sft")
    assert "| greedy minus sft, points |" in capsys.readouterr().out


def test_dry_prints_each_command_once_and_runs_nothing(written_down, capsys):
    study.main("mini", dry=True, trl0="other/python")
    printed = [shlex.split(line)[:-2] for line in capsys.readouterr().out.splitlines()]
    assert written_down == [] and len(printed) == 2 * 4 and printed[-2][:2] == ["other/python", "run.py"]
    study.main("mini", rows=("ours",), seeds=1)
    assert [printed[0], *printed[2:4]] == written_down  # the SFT of another row is not graded for it


def test_the_course_of_a_run_has_the_kl_around_each_evaluation():
    evaluations = [
        {"update": update, "episode": 4 * update, "sampled/a": grade, "sampled/a_stderr": 0.1, "sampled/a_count": 9}
        for update, grade in ((0, 0.1), (10, 0.2), (20, 0.3))
    ]
    updates = [{"update": n + 1, "objective/kl": float(n)} for n in range(20)]
    expected = {"episode": [0, 40, 80], "sampled/a": [0.1, 0.2, 0.3], "kl": [0.0, 9.5, 17.0]}
    assert study.course(evaluations, updates) == expected


def test_gaps_are_paired_if_the_items_are_the_same_and_hold_together():
    def records(*seeds, packed=True):
        by_prompt = [runs.packed(items) for items in seeds]
        means = [[np.mean(items), 0.1] for items in seeds]
        return [{"win": mean} | ({"by_prompt": items} if packed else {}) for mean, items in zip(means, by_prompt)]

    base = ([1.0, 0, 0, 1], [1.0, 0, 1, 0], [0.0, 1, 1, 0])
    better = ([1.0, 1, 0, 1], [1.0, 0.5, 1, 1], [1.0, 1, 1, 0.25])
    rows = {"base": records(*base), "better": records(*better), "old": records([0.5], packed=False)}
    found = study.gaps_from_base(study.Study({}, "", {"win": "wins, %"}, base="base"), rows)
    assert found.keys() == {"better", "old"}
    expected = runs.difference([], [], 2, (np.array(better), np.array(base)))
    assert found["better"] == pytest.approx([100 * x for x in expected]) and found["better"][0] == pytest.approx(31.25)
    assert found["old"] == pytest.approx([100 * x for x in runs.difference([[0.5, 0.1]], [[0.5, 0.1]] * 3, 2)])
    fewer = rows | {"better": records(*(items[:3] for items in better))}  # of other items
    expected = runs.difference(*([record["win"] for record in fewer[name]] for name in ("better", "base")), 2)
    found_of_fewer = study.gaps_from_base(study.Study({}, "", {"win": "wins, %"}, base="base"), fewer)
    assert found_of_fewer["better"] == pytest.approx([100 * x for x in expected])
    two = rows | {"two": records(*better[:2])}
    assert study.gaps_from_base(study.Study({}, "", {"win": "wins, %"}, base="base"), two).keys() == found.keys()
    assert not study.gaps_from_base(study.Study({}, "", {"win": "wins, %"}, base="none"), rows)
    apart = study.Study({}, "", {"win": "wins, %"}, base="base", apart=["better"])
    assert "better" in found and study.gaps_from_base(apart, rows).keys() == found.keys() - {"better"}
    both = study.Study(
        dict.fromkeys(rows, study.Row("")), "", {"a/old": "", "b/win": "wins, %"}, base="base", second=True
    )
    for record in sum(rows.values(), []):
        record |= {"a/old": [0.5, 0.1], "b/win": record["win"], "made": {}}
        record |= {"by_prompt_2": record.pop("by_prompt")} if "by_prompt" in record else {}
    expected = runs.difference([], [], 4, (np.array([items[:4] for items in better]), np.array(base)))
    assert study.gaps_from_base(both, rows, 1)["better"] == pytest.approx([100 * x for x in expected])
    assert study.gaps_from_base(both, rows)["better"][0] == 0


def test_the_best_of_n_is_that_with_the_highest_score(monkeypatch, tmp_path):
    (tmp_path / "posts").mkdir()
    write_rows(tmp_path / "posts" / "test.jsonl", [{"prompt": "a"}] * 3)
    monkeypatch.setattr(study, "RUNS", tmp_path)
    scores = [torch.tensor([[1.0, 8], [2, 7], [4, 5], [3, 6]]), torch.tensor([[0.0], [1], [0], [1]])]  # (k, posts)
    samples = [(None, {"rewards/reward_model": x, "gold_win_rate": x * 10}) for x in scores]
    monkeypatch.setattr(study, "samples_of_sft", lambda posts, *rest: samples[: len(posts)])
    found = json.loads(json.dumps(study.best_of_n(2, most=4, number=3)))  # as in a record
    by_post = [(2 + 4) / 2, (8 + 6) / 2, 1.0]
    error = np.std(by_post, ddof=1) / 3**0.5
    assert found["sampled/score"] == pytest.approx([np.mean(by_post), error])
    assert found["sampled/gold_win_rate"] == pytest.approx([10 * np.mean(by_post), 10 * error])
    assert found["kl"] == pytest.approx(np.log(2) - 0.5)


def test_proxies_are_trained_once_on_labels_of_the_judge(tmp_path, monkeypatch):
    """With few posts, and without wrong labels."""
    monkeypatch.setattr(study, "RUNS", tmp_path)
    monkeypatch.setattr(study, "fresh_posts", lambda: None)
    monkeypatch.setattr(mini_tldr, "LABEL_NOISE", 0.0)
    trained, train = [], mini_tldr.train_on_comparisons

    def train_on(name, model, pairs, *rest):
        trained.append((name, pairs))
        return train(name, model, pairs, *rest)

    monkeypatch.setattr(mini_tldr, "train_on_comparisons", train_on)
    study.proxies(study.fooled.rows["feelings"])  # which needs none
    assert not trained and not (tmp_path / "proxies").exists()
    for _ in range(2):
        study.proxies(study.fooled.rows["500"], sizes=(4, 12), start_posts=8, seen=16)
    assert [(name, len(pairs)) for name, pairs in trained] == [("4", 4), ("12", 12)]
    args = rloo.resolve_args(rloo.Args(device="cpu", reward_model_path=str(tmp_path / "proxies" / "12")))
    tokenizer = rloo.load_tokenizer(args, args.sft_model_path)
    posts = runs.lines(MINI / "test.jsonl")[:2]
    assert rloo.load_reward_model(args, tokenizer, [rloo.prepare_example(post, tokenizer) for post in posts])
    for pair in trained[1][1]:
        prompt, *texts = tokenizer.batch_decode(
            [pair["prompt_ids"], pair["better"], pair["worse"]], skip_special_tokens=True
        )
        facts = {slot: mini_tldr.stated(prompt)[slot] for slot in mini_tldr.SLOTS}  # the author's and others'
        counts = [sum(bool(mini_tldr.stated(text)[slot] & facts[slot]) for slot in facts) for text in texts]
        assert counts[0] + 3 > counts[1]


# ---- TL;DR: its whole way in miniature, with a judge on this machine that speaks OpenAI's protocol -------------------

KEY = "sk-this-must-not-be-seen-0123456789"
ROWS = runs.lines(MINI / "validation.jsonl")[:24]


class Judge(BaseHTTPRequestHandler):
    """Answers by the gold judge, with "=" for a tie; the first question gets status 429, an unknown post 401."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        expected = {"model": "gold", "max_tokens": 1, "messages": [{"role": "user", "content": question}]}
        assert self.path == "/v1/chat/completions" and body == expected  # so no temperature
        assert self.headers["Authorization"] == f"Bearer {KEY}"
        self.server.asked.append(question)
        prompt, *texts = re.findall(r'"""(.*?)"""', question, re.DOTALL)
        facts = [row["facts"] for row in ROWS if row["prompt"] == prompt]
        if len(self.server.asked) == 1 or not facts:
            return self.reply(401 if not facts else 429, {"error": self.headers["Authorization"]})
        a, b = mini_tldr.gold_judge(None, texts, facts=facts * 2)
        answer = "0" if a > b else "1" if b > a else "="
        self.reply(200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": answer}}]})

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A judge; its address, the key and a cache are in the environment."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    running.asked = []
    Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    settings = {"OPENAI_BASE_URL": f"http://127.0.0.1:{running.server_port}/v1", "OPENAI_API_KEY": KEY, "no_proxy": "*"}
    for name, value in (settings | {"JUDGE_MODEL": "gold", "JUDGE_CACHE": str(tmp_path / "cache.jsonl")}).items():
        monkeypatch.setenv(name, value)
    yield running
    running.shutdown()
    running.server_close()


def small_tldr(data: Path) -> study.Study:
    """The study of TL;DR with the bundled models, few posts and small batches: nothing else of its commands differs."""
    smaller = {
        "trl-internal-testing/tldr-preference-sft-trl-style": data,
        "EleutherAI/pythia-1b-deduped": MINI / "sft",
        "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr": MINI / "sft",
        "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr": MINI / "reward",
        "vwxyzjn/rloo_tldr": MINI / "sft",
        "--total_episodes 999424": "--total_episodes 24",
        "--per_device_train_batch_size 64": "--per_device_train_batch_size 4",
        "--gradient_accumulation_steps 32": "--gradient_accumulation_steps 1",
        "--learning_rate 3e-6": "--learning_rate 1e-3 --device cpu",
        "--save_steps 20": "--save_steps 1",
        "--num_eval_prompts 1000": "--num_eval_prompts 1000 --device cpu",
        "--response_length 200": "--response_length 20",
    }
    used = set()

    def small(text: str) -> str:
        for name, own in smaller.items():
            used.update([name] if name in text else [])
            text = text.replace(name, str(own))
        return text

    rows = {name: replace(row, train=small(row.train), model=small(row.model)) for name, row in study.tldr.rows.items()}
    found = replace(study.tldr, rows=rows, measure=small(study.tldr.measure))
    assert used == smaller.keys()
    return found


def test_tldr_is_trained_stopped_resumed_graded_and_recorded(server, elsewhere, monkeypatch, capsys):
    data = elsewhere / "data"
    data.mkdir()
    for split, rows in {"train": ROWS[:12], "validation": ROWS[12:14], "test": ROWS[14:]}.items():
        write_rows(data / f"{split}.jsonl", rows)
    monkeypatch.setitem(study.STUDIES, "tldr", small_tldr(data))
    run, commands, stopped = subprocess.run, [], []

    def run_here(words, **options):
        """In a process that has imported rloo.py; the first training is killed after its first checkpoint."""
        if words[0] != sys.executable:
            return run(words, **options)
        commands.append(words)
        process = start_script(words[1:], Path(options["stdout"].name))
        output = Path(words[words.index("--output_dir") + 1])
        while process.is_alive():
            if not stopped and (output / "checkpoint-1").exists():
                process.kill()
                stopped.append(output)
            process.join(0.01)
        if process.exitcode:
            raise subprocess.CalledProcessError(process.exitcode, words)

    study.main("tldr", seeds=1, dry=True)
    dry = [shlex.split(line) for line in capsys.readouterr().out.splitlines()[:4]]
    monkeypatch.setattr(subprocess, "run", run_here)
    with pytest.raises(subprocess.CalledProcessError):
        study.main("tldr", seeds=1)
    assert list(runs.Records("tldr")) == ["sft__1", "published__1"]
    study.main("tldr", seeds=1)
    assert commands == [*dry[:3], *dry[2:]]  # only training is repeated

    records = runs.Records("tldr")
    assert [update["update"] for update in runs.lines(stopped[0] / "metrics.jsonl")] == [1, 2, 3]
    assert re.search(r"per prompt; [123] done\n", Path(f"{stopped[0]}.log").read_text())
    for name in ("sft__1", "own__1"):
        samples = runs.lines(elsewhere / "runs" / "tldr" / f"{name}.graded" / "completions.jsonl")
        for mode in ("greedy", "sampled"):
            wins = []
            for sample in (sample for sample in samples if sample["mode"] == mode):
                texts = [sample["completion"].strip(), sample["columns"]["completion"].strip()]
                ours, theirs = mini_tldr.gold_judge(None, texts, facts=[sample["columns"]["facts"]] * 2)
                wins.append(ours > theirs)
                assert sample["grades"]["win_rate"] == (ours > theirs)
            assert records[name][f"{mode}/win_rate"][0] == pytest.approx(np.mean(wins)) and len(wins) == 10
    assert records["published__1"]["greedy/win_rate"] == records["sft__1"]["greedy/win_rate"]  # the same model here
    assert records["own__1"]["kl"] and "course" in records["own__1"]
    assert len(server.asked) == len({*server.asked}) + 1  # the one that got status 429
    printed = capsys.readouterr().out
    assert "| rloo.py (1) |" in printed and "Not run: rloo.py (1 of 2 seeds)." in printed
    written = "".join(file.read_text() for file in elsewhere.rglob("*") if file.suffix in (".json", ".jsonl", ".log"))
    assert KEY not in printed + written and "answers are neither 0 nor 1" in written


def test_scores_of_tldr_are_minus_1_without_a_stop_token():
    import tldr.train

    args, scores, ended = rloo.Args(), torch.tensor([[2.0, 3.0]]), torch.tensor([[True, False]])
    rewards = rloo.rewards_of(args, scores, ended, torch.zeros(1, 2, 1))
    assert rewards[..., 0].tolist() == [[2.0, -1.0]] and tldr.train.rloo is rloo


def test_the_page_of_tldr_has_the_hours_and_the_memory_that_dry_prints():
    hours, peak = re.search(r"([\d.]+) hours; at most (\d+) GiB", study.tldr.takes).groups()
    page = (HERE / "tldr" / "README.md").read_text(encoding="utf-8")
    assert f"{hours} hours" in page and f"{peak} GiB" in page


def test_the_judge_reads_chats_asks_again_and_never_shows_the_key(server, tmp_path, monkeypatch, capsys):
    import tldr.judge as judge

    monkeypatch.setattr(judge, "WAITS", (0.01,))
    rows = [row for row in ROWS if mini_tldr.gold_judge(None, [row["completion"]], facts=[row["facts"]])[0] > 0]
    prompts, good, none = [row["prompt"] for row in rows], [row["completion"] for row in rows], [""] * len(rows)
    for ours, theirs, wins in ((good, none, 1), (none, good, 0), (good, good, 0)):
        chats = [[{"content": prompt}, {"content": text}] for prompt, text in zip(prompts, theirs)]
        assert judge.win_rate(prompts, ours, messages=chats) == [wins] * len(rows)
    empty = [re.findall(r'model "(\d)":\n""""""', question) for question in server.asked]
    assert {"0", "1"} <= {*itertools.chain(*empty)}  # a coin decides about the order
    asked = len(server.asked)
    with (tmp_path / "cache.jsonl").open("a") as cache:
        cache.write('\n["gold", "half a li')
    assert judge.win_rate(prompts, good, completion=none) == [1] * len(rows) and len(server.asked) == asked
    with pytest.raises(RuntimeError, match="401") as error:
        judge.win_rate(["unknown"], ["a"], completion=["b"])
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(RuntimeError, match="127.0.0.1:9"):
        judge.win_rate(["another"], ["a"], completion=["b"])
    assert KEY not in str(error.value) and error.value.__suppress_context__
    (tmp_path / "trl/trainer").mkdir(parents=True)
    (tmp_path / "trl/__init__.py").write_text("raise ImportError")
    (tmp_path / "trl/trainer/judges.py").write_text("import no\nDEFAULT_PAIRWISE_SYSTEM_PROMPT = '{prompt}?'")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert judge.question_of_trl() == "{prompt}?" and "TRL's question, from" in capsys.readouterr().out


# ---- speed.py --------------------------------------------------------------------------------------------------------


def test_ratios_are_of_times_within_a_round():
    def row(trainer, *updates, **more):
        return {"trainer": trainer, "size": 8, "k": 4, "completions": "full", "updates": list(updates), **more}

    ours, theirs = row("rloo.py, group rows", [1.0], [10.0]), row("TRL", [3.0], [40.0])
    line = speed.table([ours, theirs]).splitlines()[3]
    assert line.endswith("| 21.50 (3.00 to 40.00) |  |  | 3.50 (3.00 to 4.00) |")


def test_trainers_get_the_same_flags_and_each_run_is_recorded(elsewhere, monkeypatch):
    found = []

    def run(words, folder, **_):
        found.append([str(word) for word in words])
        folder.mkdir()
        write_rows(folder / "metrics.jsonl", [{"time/train": 9.0}, {"time/train": 8.0}, {"time/train": 2.0}])
        return folder

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(speed, "FOLDER", elsewhere)
    monkeypatch.setattr(speed, "write_inputs", lambda *_: None)
    monkeypatch.setattr(speed.trl_run, "versions", lambda python: f"TRL of {python}")
    records = runs.Records("speed")
    speed.measure("tiny, cpu", speed.SHAPES["tiny"], "cpu", ["trl1"], (2, 4), records)
    assert records["tiny, cpu: rloo.py, group rows, 8, ended, k = 2"]["updates"] == [[2.0]]
    assert len(found) == len(records) == 2 * 5
    for words in found:
        assert words[:3] == ["trl1", "benchmark/trl_run.py", "rloo"] or words[:2] == [sys.executable, "rloo.py"]
        shared = words[words.index("--sft_model_path") :]
        args = tyro.cli(rloo.Args, args=shared, use_underscores=True)
        assert trl_run.parse_args(["rloo", "--output_dir=x", *shared]).rloo_k == args.rloo_k
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        assert size == 4 * args.rloo_k == args.local_rollout_forward_batch_size and args.total_episodes == 3 * size


def test_completions_that_should_end_do_with_the_probability_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "FOLDER", tmp_path / "speed")
    shape = replace(speed.SHAPES["tiny"], dtype="float32")
    speed.write_inputs(shape, "cpu")
    args = rloo.Args(layout="group", device="cpu", response_length=60)
    model = rloo.read_model(args, speed.FOLDER / "ends", torch.float32)
    torch.manual_seed(0)
    examples = [{"prompt_ids": [5, 6, 7]}] * 100
    batch, _ = rloo.rollout(args, model, examples, 2, speed.TEMPERATURE, [shape.vocabulary - 2])
    ended = batch.ended.float().mean().item()
    assert ended == pytest.approx(1 - (1 - speed.ENDS) ** 60, abs=0.15)


# ---- check.py --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, group, plain", [
    ("llama", "ok", "ok"), ("qwen3", "ok", "ok"), ("gpt_neox", "ok", "ok"), ("falcon", "ok", "ok"),
    ("gemma2", "ok", "ok"), ("trocr", "refused", "refused"), ("mamba", "error", "ok"), ("lfm2", "error", "ok"),
])  # fmt: skip
def test_what_a_run_would_do_with_a_model(name, group, plain):
    found = check.compare(check.small_model(name))
    assert [found[layout].partition(":")[0] for layout in ("group", "plain")] == [group, plain]


def test_small_mistakes_are_found(monkeypatch):
    update = rloo.Cache.update

    def wrong(cache, *inputs, **others):
        keys, values = update(cache, *inputs, **others)
        return (keys, values) if cache.slot is None else (keys, values * 1.0003)

    model = check.small_model("llama")
    with monkeypatch.context() as patched:
        patched.setattr(rloo.Cache, "update", wrong)
        found = check.compare(model)
        assert found["group"].startswith("WRONG: sampling") and found["plain"] == "ok"
    monkeypatch.setattr(rloo, "positions_of", lambda mask: torch.arange(mask.shape[1]).expand(mask.shape) % 9)
    assert "gradient" in check.compare(model)["group"]


def test_types_are_those_of_text_decoders():
    types = check.decoder_only()
    assert len(types) > 100 and {"llama", "mamba", "gpt2"} <= set(types) and not {"bert", "t5", "llava"} & set(types)


# ---- gradient.py -----------------------------------------------------------------------------------------------------


def test_rloo_has_no_bias_and_a_wrong_baseline_has(monkeypatch):
    case = next(gradient.cases(beta=0.3))
    for name in ("rloo.py", "token_level_kl", "no baseline", "k3 in reward and loss"):
        assert gradient.bias_turn_noise(case, 2, gradient.OPTIONS[name])[0] < 1e-10
    for name in ("GRPO", "Dr. GRPO's baseline", "k3 in the reward", "sampler's logits off by 0.3"):
        assert gradient.bias_turn_noise(case, 2, gradient.OPTIONS[name])[0] > 1e-2
    right = rloo.advantage
    monkeypatch.setattr(rloo, "advantage", lambda rewards: right(rewards) - 0.1 * rewards)
    assert gradient.bias_turn_noise(case, 2, {})[0] > 1e-2


def test_the_exact_gradient_is_that_of_finite_differences_over_all_completions():
    case, step = next(gradient.cases(beta=0.3)), 1e-6
    assert case.sampler["policy"].sum(-1).exp().sum(-1).tolist() == pytest.approx([1, 1], abs=1e-12)
    for i in (0, 4, 7, 14):
        move = torch.zeros(15, dtype=torch.float64)
        move[i] = step
        up, down = (gradient.objective(case.theta + x, case.ref, case.scores, case.beta)[0] for x in (move, -move))
        assert ((up - down) / (2 * step)).item() == pytest.approx(case.exact[i].item(), abs=1e-8)


def test_importing_the_extensions_leaves_rloo_py_as_it_is():
    assert rloo.advantage.__module__ == rloo.completion_loss.__module__ == rloo.Args.__module__ == "rloo"


# ---- parity.py and trl_run.py ----------------------------------------------------------------------------------------


def trl_config(*words: str, trainer="rloo", version=1):
    return trl_run.config_of(trl_run.parse_args([trainer, "--output_dir=x", *words]), version)


def test_a_critic_that_begins_as_the_policy_has_one_output():
    critic = trl_run.load_in_transformers_4(HERE / "mini_tldr" / "sft", "float32")
    assert critic.score.out_features == 1


def test_flags_become_settings_of_trls_trainers():
    words = ["--rloo_k=2", "--num_ppo_epochs=2", "--num_mini_batches=2", "--gradient_accumulation_steps=3"]
    new = trl_config(*words, "--per_device_train_batch_size=8", "--total_episodes=480", "--warmup_ratio=0.1")
    assert new["num_generations"] == 2 and new["num_iterations"] == 2 and new["steps_per_generation"] == 6
    assert new["max_steps"] == 10 * 2 * 2 and new["warmup_steps"] == 0.1
    old = trl_config(*words, "--reward_clip_range=1", "--normalize_reward", version=0)
    assert old["rloo_k"] == 2 and old["num_mini_batches"] == 2 and old["reward_clip_range"] == 1.0
    assert "rloo_k" not in trl_config(trainer="ppo", version=0)
    # What 1.x lacks is passed on, so that its config refuses it; what is not given is not.
    assert trl_config("--token_level_kl")["token_level_kl"] and "token_level_kl" not in new


def test_a_completion_without_the_stop_token_loses_the_penalty():
    def length(prompts, completions, completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    penalized = trl_run.with_penalty(length, 5.0, eos=2)
    given = {"prompts": ["p"] * 2, "completions": ["a", "b"], "completion_ids": [[1, 2], [1, 1, 1]], "column": [0, 0]}
    assert penalized(**given) == [2.0, -2.0] and penalized.__name__ == "length"


def test_a_run_of_trl_that_continues_keeps_the_metrics_of_updates_before_its_checkpoint(tmp_path):
    for step, kept in ((4, ["1", "2"]), (0, [])):
        (tmp_path / "metrics.jsonl").write_text("1\n2\n3\n")
        metrics = trl_run.Metrics(steps=2)
        metrics.on_train_begin(SimpleNamespace(output_dir=tmp_path), SimpleNamespace(global_step=step), None)
        metrics.on_log(None, None, None, {"reward": 0.5})
        *before, new = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert before == kept and json.loads(new)["update"] == len(kept) + 1


def test_rloo_py_trains_on_the_completions_given_to_both_sides(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "FOLDER", tmp_path)
    monkeypatch.setitem(parity.BASE, "dataset_name", tmp_path / "data")
    parity.write_data()
    start = parity.load_file(parity.SFT / "model.safetensors")
    weights = parity.train_rloo({})
    assert parity.distance(start, weights) > 0.01
    other = parity.train_rloo({"num_ppo_epochs": 2})
    assert parity.distance(weights, other) > 1e-3
    again = parity.train_rloo({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4})
    assert parity.distance(again, weights) < parity.AGREE * parity.distance(start, weights)


# ---- on_gpu.py -------------------------------------------------------------------------------------------------------


def test_each_part_for_a_gpu_ends_by_itself_or_at_its_limit(tmp_path, monkeypatch, capsys):
    parts = {"a": [30, "-c", "print('{trl1}')"], "b": [0.5, "-c", "import time; time.sleep(60)"]}
    monkeypatch.setattr(on_gpu, "PARTS", parts)
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    on_gpu.main(trl1="its python")
    assert re.findall(r"status (-?\d+)", capsys.readouterr().out) == ["0", "-15"]
    assert (tmp_path / "gpu" / "a.txt").read_text() == "its python\n"


def test_the_time_of_a_token_is_measured_for_few_and_for_many_completions(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "graph", torch.cuda.graph)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    on_gpu.steps(sizes=sizes, vocabulary=32, T=4, device="cpu")
    assert re.findall(r"(\d+) completions: [\d.]+ ms a token, 0% recording", capsys.readouterr().out) == [
        "64",
        "64",
        "256",
    ]


# ---- put_back.py -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", put_back.BUGS)
def test_each_bug_applies_and_its_test_is_there(name):
    bug = put_back.BUGS[name]
    compile(put_back.changed(bug), name, "exec")
    tests = runs.ROOT / bug.get("tests", "rloo_test.py")
    files = sorted(tests.glob("*_test.py")) if tests.is_dir() else [tests]
    assert re.search(rf"(?m)^def test_\w*{bug['test']}\w*\(", "".join(file.read_text() for file in files))


@pytest.mark.parametrize("before, after, found", [(0, 1, True), (0, 0, False), (0, 2, False), (1, 1, False)])
def test_a_bug_is_caught_if_its_test_passes_without_it_and_fails_with_it(before, after, found, monkeypatch):
    bug, texts = put_back.BUGS["micro-batches"], []

    def run(words, cwd, **options):
        texts.append((cwd / "rloo.py").read_text())
        return subprocess.CompletedProcess(words, (before, after)[len(texts) - 1], stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    assert put_back.caught(bug) == found
    assert texts == [(runs.ROOT / "rloo.py").read_text(), put_back.changed(bug)][: len(texts)]


# ---- plot.py ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def figures(monkeypatch):
    """Pictures, in place of being written."""
    pytest.importorskip("matplotlib")
    found = []
    monkeypatch.setattr(plot, "save", lambda figure, file: found.append(figure))
    return found


def test_runs_are_drawn_side_by_side_also_without_kl_or_with_another_grade(tmp_path, figures):
    for name, training, grade in (("a", {"objective/kl": 1.0}, "sampled/win"), ("b", {}, "sampled/other")):
        (tmp_path / name).mkdir()
        for file, found in (("metrics", {"objective/scores": 0.5} | training), ("evaluations", {grade: 1.0})):
            write_rows(tmp_path / name / f"{file}.jsonl", [{"episode": 32, **found, f"{grade}_stderr": 0.1}])
    plot.main(tuple(tmp_path / name for name in ("a", "b", "none")))
    lines = {axis.get_title().split(",")[0]: len(axis.lines) for axis in figures[0].axes}
    assert lines["score"] == 2 and lines["KL from the reference"] == 1 and list(lines)[2:] == ["win", "other"]


def test_trainers_are_drawn_with_the_seeds_of_each_and_wins_at_the_end(figures, tmp_path):
    record = {"scores": [1.0, 2.0], "sampled/gold_win_rate": [0.6, 0.01], "greedy/gold_win_rate": [0.7, 0.02]}
    old = {"sampled/gold_win_rate": [0.6, 0.01]}
    plot.trainers({"a": "A", "b": "B", "old": "C"}, {"a": [record] * 3, "old": [old], "b": [record] * 2}, tmp_path)
    scores, wins = figures[0].axes
    assert len(scores.lines) == 3 + 1 + 2 + 1
    assert [label.get_text() for label in wins.get_yticklabels()] == ["(3)", "(2)"]
    assert [line.get_xdata()[0] for line in wins.lines if line.get_marker() == "s"] == pytest.approx([0.7, 0.7])


def test_studies_are_drawn_over_episodes_and_over_kl(figures, tmp_path):
    for name in ("mini", "fooled"):
        study.main(name, picture=tmp_path / "a.png")
    (wins,), over_kl = (figure.axes for figure in figures)
    assert len(wins.lines) == 10 + 1 + 1  # seeds, mean, wins before
    assert all(axis.get_ylim()[1] > axis.dataLim.ymax for axis in over_kl)  # nothing is cut off
    courses = [record["course"] for name, record in runs.Records("fooled").items() if name.startswith("100__")]
    assert over_kl[0].lines[3].get_xdata() == pytest.approx(np.mean([course["kl"] for course in courses], axis=0))


def test_wins_at_the_end_are_drawn_over_kl_where_it_was_measured(figures, tmp_path):
    runs_of = {"a": [(2.0, 0.5), (4.0, 0.7)], "b": [(1.0, 0.4)]}
    records = {row: [{"kl": x, "sampled/gold_win_rate": [y, 0.1]} for x, y in ends] for row, ends in runs_of.items()}
    plot.ends({"a": "A", "b": "B", "c": "C"}, records | {"c": [{"sampled/gold_win_rate": [0.9, 0.1]}]}, tmp_path)
    (axis,) = figures[0].axes
    assert [list(line.get_xdata()) for line in axis.lines] == [[2, 4], [3], [1], [1]]
    assert [list(line.get_ydata()) for line in axis.lines] == [[0.5, 0.7], [pytest.approx(0.6)], [0.4], [0.4]]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["A", "B"]


def test_rows_of_countdown_stand_in_the_order_of_their_greedy_accuracy(figures, tmp_path):
    levels = {"rloo": (0.5, 0.4), "sft": (0.2, 0.1), "raft": (0.3, 0.2), "of_16": (0.9, 0.9), "other": (1, 1)}
    records = {}
    for row, (x, y) in levels.items():
        problems = {"by_prompt": runs.packed([0, 1, 1, 1]), "by_prompt_2": runs.packed([0, 0, 1, 1])}
        records[row] = [{"greedy/correct": [x, 0.1], "sampled/correct": [y, 0.2]} | problems]
    records["rloo"][0]["course"] = {"episode": [0, 100], "sampled/score": [0.1, 0.5]}
    del records["of_16"][0]["by_prompt"]  # of other problems
    plot.solved({row: row for row in records}, records, tmp_path / "a.png", without=["other"])
    axis, end = figures[0].axes
    assert [list(line.get_ydata()) for line in axis.lines] == [[0.1, 0.5]] * 2  # the seed, and the mean
    assert [label.get_text() for label in end.get_yticklabels()] == ["sft", "raft", "rloo"]
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in end.lines if line.get_marker() == "o"]
    assert dots == [(x, height) for height, row in enumerate(("sft", "raft", "rloo")) for x in levels[row]]
    spans = [np.ptp(bars.get_segments()[0][:, 0]) for bars in end.collections]
    assert spans == pytest.approx([2 * (p * (1 - p) / 3) ** 0.5 for p in (3 / 4, 1 / 2)] * 3)
