"""Tests of judge.py against a small server on this machine that answers, delays, breaks and refuses.

python -m pytest -q benchmark/tldr/judge_test.py
"""

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network

import judge
import pytest

HERE = Path(__file__).resolve().parent
KEY = "sk-this-must-not-be-seen-0123456789"


# ---- The server ------------------------------------------------------------------------------------------------------


def reply(content, **usage):
    usage = {"prompt_tokens": 11, "completion_tokens": 7} | usage
    return {"choices": [{"message": {"content": content}}], "usage": usage}


def texts_of(prompt: str) -> tuple[str, str, str]:
    """The post and the summaries in the order in which they are shown."""
    return re.fullmatch(r".*POST\n(.*)\n\nSUMMARY A\n(.*)\n\nSUMMARY B\n(.*)\n\nCompare.*", prompt, re.DOTALL).groups()


def prefers_good(prompt: str) -> dict:
    _, a, b = texts_of(prompt)
    points = ("good" in a) - ("good" in b)
    return reply("They differ.\nVerdict: " + {1: "A", -1: "B", 0: "tie"}[points])


@contextmanager
def server(answer):
    """A server whose `answer(prompt, how often this prompt came)` returns a reply, or (status, headers, bytes), or None
    to hang up. Gives its address and a Counter of the prompts that came."""
    came, headers, lock = Counter(), [], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][0]["content"]
            with lock:
                came[prompt] += 1
                headers.append(dict(self.headers) | {"path": self.path, "body": body})
            found = answer(prompt, came[prompt])
            if found is None:
                self.connection.close()
                return
            status, more, data = found if isinstance(found, tuple) else (200, {}, json.dumps(found).encode())
            try:
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(data))} | more).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # it did not wait
                pass

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *args):  # a client that was killed
            pass

    running = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1", came, headers
    finally:
        running.shutdown()
        running.server_close()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("no_proxy", "*")


def write_completions(folder: Path, name: str, completions, references=None) -> str:
    references = references or [f" reference {i}" for i in range(len(completions))]
    rows = [
        {
            "post": i,
            "sample": 0,
            "prompt": f"POST number {i}\n\nTL;DR:",
            "completion": ours,
            "reference": theirs,
            "ended": True,
            "columns": {"number": i},
        }
        for i, (ours, theirs) in enumerate(zip(completions, references))
    ]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(monkeypatch, url: str, path: str, output: Path, **flags) -> dict:
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    flags = {"judge": "openai:test-model", "first_wait": 0.001, "timeout": 60.0} | flags
    judge.main(judge.Args(completions=(path,), output=str(output), **flags))
    return json.loads(output.read_text())


def numbers(found: dict) -> tuple:
    return tuple(found[name] for name in ("posts", "wins", "ties", "losses", "unparsable"))


# ---- Counting --------------------------------------------------------------------------------------------------------


def test_wilson_by_hand():
    """8 of 10, z² = 3.841459: middle (0.8 + 0.19207295) / 1.3841459 = 0.7167401; half = 1.959964 / 1.3841459 ·
    sqrt(0.016 + 0.0096036) = 1.4160097 · 0.1600114 = 0.2265776."""
    assert judge.wilson(8, 10) == pytest.approx((0.7167401 - 0.2265776, 0.7167401 + 0.2265776), abs=1e-6)
    assert judge.wilson(0, 10) == pytest.approx((0, 3.841459 / 13.841459), abs=1e-6)  # z² / (n + z²)
    assert judge.wilson(0, 0) == (0.0, 1.0)


def test_totals():
    found = judge.count([1.0] * 7 + [0.5] * 2 + [0.0] + [None] * 5)
    assert numbers(found) == (15, 7, 2, 1, 5)
    assert found["win_rate"] == 0.8 and found["interval"] == [*judge.wilson(8, 10)]
    assert judge.count([None])["win_rate"] is None


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("A says more.\nVerdict: A", "A"),
        ("Verdict: B", "B"),
        ("verdict: **b**", "B"),
        ("Verdict: tie", "TIE"),
        ("Verdict: a tie.", "TIE"),
        ("B", "B"),
        (" tie\n", "TIE"),
        ("B is shorter.\n\nA", "A"),
        ("A is better.", None),
        ("", None),
        ("Verdict: A\nVerdict: B\nVerdict: tie", None),
        ("Verdict: both", None),
    ],
)
def test_verdict(answer, expected):
    assert judge.verdict(answer) == expected


def test_verdict_in_other_words():
    assert [judge.verdict(answer, ("0", "1")) for answer in ("0", "Verdict: 1", "tie", "2")] == ["A", "B", None, None]
    assert judge.verdict('Comparison: shorter.\nPreferred: "B"') == "B"


def test_texts_with_braces_and_the_end_of_a_prompt():
    prompt = judge.judge_prompt(judge.JUDGE_PROMPT, "a {post} about {a}\n\nTL;DR:", " {b}", " {}")
    assert texts_of(prompt) == ("a {post} about {a}", "{b}", "{}")


def test_a_prompt_of_the_users(tmp_path, monkeypatch):
    """The server gets the user's prompt, whose own braces stay; its words are the verdicts; its hash is kept."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text('{post}\n{"0": "{a}", "1": "{b}"}\nReply with 0 or 1.')

    def answer(prompt, times):
        shown = json.loads(prompt.splitlines()[1])
        return reply("0" if "good" in shown["0"] else "1")

    path = write_completions(tmp_path, "ours", [" good one", " good two", " good three"])
    with server(answer) as (url, came, _):
        flags = {"prompt_file": str(prompt), "verdicts": ("0", "1")}
        result = run(monkeypatch, url, path, tmp_path / "found.json", **flags)
    assert numbers(result["results"]["ours"]) == (3, 3, 0, 0, 0)
    assert all(text.startswith("POST number") and '{"0": "' in text for text in came)
    assert result["prompt_sha256"] == hashlib.sha256(prompt.read_bytes()).hexdigest()
    assert result["args"]["prompt_file"] == str(prompt)


# ---- Asking ----------------------------------------------------------------------------------------------------------


def test_order_is_random_and_counts_back(tmp_path, monkeypatch):
    """Who always says A comes out near 50%, who looks at the texts at 100%; both see ours first half of the time."""
    n = 400
    path = write_completions(tmp_path, "ours", [f" good {i}" for i in range(n)])
    with server(lambda prompt, times: reply("Verdict: A")) as (url, came, headers):
        found = run(monkeypatch, url, path, tmp_path / "biased.json")["results"]["ours"]
    assert abs(found["win_rate"] - 0.5) < 0.1 and found["first_preferred"] == 1.0
    ours_first = sum("good" in texts_of(prompt)[1] for prompt in came)
    assert found["came_first"] == ours_first == found["wins"] and 160 < ours_first < 240
    assert headers[0]["path"] == "/v1/chat/completions" and headers[0]["Authorization"] == f"Bearer {KEY}"
    assert headers[0]["body"]["model"] == "test-model" and headers[0]["body"]["temperature"] == 0
    with server(lambda prompt, times: prefers_good(prompt)) as (url, came, _):
        result = run(monkeypatch, url, path, tmp_path / "fair.json")
    assert result["results"]["ours"]["win_rate"] == 1.0 and 0.4 < result["results"]["ours"]["first_preferred"] < 0.6
    assert (result["prompt_tokens"], result["completion_tokens"]) == (11 * n, 7 * n)
    assert result["order_seed"] == 1 and result["judge"] == "openai:test-model at 127.0.0.1"


def test_another_seed_another_order(tmp_path, monkeypatch):
    path, orders = write_completions(tmp_path, "ours", [f" good {i}" for i in range(40)]), []
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        with server(lambda prompt, times: reply("Verdict: A")) as (url, came, _):
            run(monkeypatch, url, path, tmp_path / f"{name}.json", seed=seed)
            orders.append({texts_of(prompt)[:2] for prompt in came})
    assert orders[0] == orders[1] != orders[2]


def test_ties_equal_texts_and_answers_without_a_verdict(tmp_path, monkeypatch):
    ours, theirs = [" good", " bad", " same", " equal ", " odd"], [" x", " good", " alike", " equal", " odder"]
    path = write_completions(tmp_path, "ours", ours, theirs)

    def answer(prompt, times):
        return reply("I cannot say.") if "odd" in prompt else prefers_good(prompt)

    with server(answer) as (url, came, _):
        found = run(monkeypatch, url, path, tmp_path / "found.json")["results"]["ours"]
    assert numbers(found) == (5, 1, 2, 1, 1) and found["win_rate"] == 0.5
    assert len(came) == 4  # equal texts are a tie without being asked


def test_against_other_completions(tmp_path, monkeypatch):
    ours = write_completions(tmp_path, "ours", [" good 1", " 2"])
    theirs = write_completions(tmp_path, "theirs", [" 1", " good 2"])
    with server(lambda prompt, times: prefers_good(prompt)) as (url, came, _):
        result = run(monkeypatch, url, ours, tmp_path / "found.json", against=theirs)
        assert numbers(result["results"]["ours"]) == (2, 1, 0, 1, 0) and result["against"] == "theirs"
        assert not any("reference" in prompt for prompt in came)
        with pytest.raises(judge.Mistake, match="does not have the posts of"):
            run(monkeypatch, url, ours, tmp_path / "other.json", against=write_completions(tmp_path, "fewer", [" 1"]))


def test_every_trouble_is_asked_again(tmp_path, monkeypatch):
    """Each post meets a trouble, once or twice, and is answered at last; the totals are as if nothing had been."""
    troubles = [
        (429, {"Retry-After": "0"}, b"slow down"),
        (500, {}, b"{}"),
        (503, {}, b""),
        (200, {}, b"no json"),
        (200, {}, b"{}"),
        (200, {}, b'{"choices": []}'),
        (200, {}, b'{"choices": [{"message": null}]}'),
        (200, {}, json.dumps(reply("Verdict: A", prompt_tokens=math.inf)).encode()),
        (200, {"Content-Length": "1000"}, b'{"choices'),
        (200, {}, b"[" * 5000),
        (200, {}, b"\xff\xfe"),
        None,
    ]
    path = write_completions(tmp_path, "ours", [f" good {i}" for i in range(2 * len(troubles))])

    def answer(prompt, times):
        number = int(texts_of(prompt)[0].split()[-1])
        return prefers_good(prompt) if times > 1 + number // len(troubles) else troubles[number % len(troubles)]

    with server(answer) as (url, came, _):
        result = run(monkeypatch, url, path, tmp_path / "found.json")
    n = len(troubles)
    assert numbers(result["results"]["ours"]) == (2 * n, 2 * n, 0, 0, 0)
    assert sorted(came.values()) == [2] * n + [3] * n  # once more after each trouble, and not more often
    assert (result["prompt_tokens"], result["asked_now"]) == (22 * n, 2 * n)


def test_silence_is_asked_again(tmp_path, monkeypatch):
    path, asked_again = write_completions(tmp_path, "ours", [" good"]), threading.Event()

    def answer(prompt, times):
        asked_again.set() if times > 1 else asked_again.wait(60)
        return prefers_good(prompt)

    with server(answer) as (url, came, _):
        found = run(monkeypatch, url, path, tmp_path / "found.json", timeout=0.5)["results"]["ours"]
    assert found["wins"] == 1 and came.total() >= 2


def test_waits_double_and_follow_retry_after():
    """What is waited, seen by an event that does not wait; nothing is waited after the last attempt."""

    class Waits(list):
        wait = list.append

        def is_set(self):
            return False

    endpoint = judge.Endpoint("", "", "m", {}, 1.0, 5, 1.0)
    for header, least in [(None, 0.0), ("7", 7.0), ("300", 300.0)]:
        answer = (429, {"Retry-After": header} if header else {}, b"")
        with server(lambda prompt, times, answer=answer: answer) as (url, came, _):
            waits = Waits()
            with pytest.raises(judge.Mistake, match="no answer after 5 attempts; the last: HTTP 429"):
                judge.ask(endpoint._replace(url=url), "prompt", waits)
        assert came.total() == 5 and len(waits) == 4
        assert all(max(least, 0.75 * 2**i) <= wait <= max(least, 1.25 * 2**i) for i, wait in enumerate(waits))
    with (
        server(lambda prompt, times: (429, {"Retry-After": "86400"}, b"")) as (url, came, _),
        pytest.raises(judge.Mistake, match="tried again in 86400 s"),
    ):
        judge.ask(endpoint._replace(url=url), "prompt", Waits())
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    assert 90 < judge.retry_after(later) <= 100 and judge.retry_after("soon") == judge.retry_after(None) == 0


def test_killed_and_repeated_it_asks_nothing_twice(tmp_path, monkeypatch):
    n, workers, killed = 120, 4, threading.Event()
    path, output = write_completions(tmp_path, "ours", [f" good {i}" for i in range(n)]), tmp_path / "found.json"
    cache = tmp_path / "found.cache.jsonl"

    def answer(prompt, times):
        if came.total() > 60:
            killed.wait(60)  # so that it cannot end before it is killed
        return prefers_good(prompt)

    with server(answer) as (url, came, _):
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        command = [
            sys.executable,
            HERE / "judge.py",
            "--judge",
            "openai:test-model",
            "--completions",
            path,
            "--output",
            output,
            "--concurrency",
            str(workers),
        ]
        first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while came.total() < 40 and first.poll() is None:
            time.sleep(0.002)
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL and not output.exists()
        killed.set()
        before, kept = came.copy(), len(cache.read_text().splitlines())
        assert 40 - workers <= kept <= before.total() < n and set(before.values()) == {1}
        lines = cache.read_text()
        cache.write_text(lines.rstrip("\n") + '\n{"key": "0123', encoding="utf-8")  # cut short by the kill
        second = subprocess.run(command, capture_output=True, text=True)
        assert second.returncode == 0, second.stderr
        assert f"{n - kept} of {n} answers asked now" in second.stdout
        asked_twice = [prompt for prompt, times in came.items() if times > 1]
        assert len(asked_twice) <= workers  # what was on its way when the kill came
        assert len(came) == n and came.total() == n + len(asked_twice)
        result = json.loads(output.read_text())
        assert numbers(result["results"]["ours"]) == (n, n, 0, 0, 0) and result["prompt_tokens"] == 11 * n
        entries = [json.loads(line) for line in cache.read_text().splitlines() if line != '{"key": "0123']
        assert len({entry["key"] for entry in entries}) == len(entries) == n

        with pytest.raises(judge.Mistake, match="is there; nothing is overwritten"):
            run(monkeypatch, url, path, output)
        output.unlink()  # all of it is cached
        assert run(monkeypatch, url, path, output)["asked_now"] == 0 and came.total() == n + len(asked_twice)


def test_what_the_judge_depends_on_is_in_the_cache_key(tmp_path, monkeypatch):
    path = write_completions(tmp_path, "ours", [" good"])
    with server(lambda prompt, times: prefers_good(prompt)) as (url, came, headers):
        flags = {"cache": str(tmp_path / "cache.jsonl")}
        run(monkeypatch, url, path, tmp_path / "a.json", **flags)
        assert run(monkeypatch, url, path, tmp_path / "b.json", **flags)["asked_now"] == 0
        assert run(monkeypatch, url, path, tmp_path / "c.json", judge="openai:other", **flags)["asked_now"] == 1
        assert run(monkeypatch, url, path, tmp_path / "d.json", options='{"seed": 2}', **flags)["asked_now"] == 1
        assert "temperature" not in headers[-1]["body"] and headers[-1]["body"]["seed"] == 2
        monkeypatch.setattr(judge, "JUDGE_PROMPT", judge.JUDGE_PROMPT + "Be kind.\n")
        monkeypatch.setattr(sys.modules[__name__], "texts_of", lambda prompt: ("", "good", ""))
        assert run(monkeypatch, url, path, tmp_path / "e.json", **flags)["asked_now"] == 1


def test_two_judgings_do_not_share_a_cache_at_a_time(tmp_path):
    path = tmp_path / "cache.jsonl"
    busy = pytest.raises(judge.Mistake, match="another process of judge.py is writing to it")
    with judge.open_cache(path), busy, judge.open_cache(path):
        pass


def test_a_server_that_stays_broken_ends_it_and_keeps_the_answers(tmp_path, monkeypatch):
    path, output = write_completions(tmp_path, "ours", [f" good {i}" for i in range(10)]), tmp_path / "found.json"
    healthy = []

    def answer(prompt, times):
        return prefers_good(prompt) if healthy or "number 9\n" not in prompt else (502, {}, b"bad gateway")

    with server(answer) as (url, came, _):
        message = r"no answer after 2 attempts; the last: HTTP 502 .*\. 9 of 10 answers are in .*; the same command"
        with pytest.raises(judge.Mistake, match=message):
            run(monkeypatch, url, path, output, max_attempts=2, concurrency=1)
        assert not output.exists() and came.total() == 11
        healthy.append(True)
        assert run(monkeypatch, url, path, output)["asked_now"] == 1 and came.total() == 12


# ---- The key ---------------------------------------------------------------------------------------------------------


def everything_written(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("status", [200, 302, 400, 401, 500])
def test_the_key_is_nowhere(tmp_path, monkeypatch, capsys, status):
    """Not even where the server says it, in an answer, an error or a redirection."""
    path, said = write_completions(tmp_path, "ours", [" good"]), ""
    with server(lambda prompt, times: reply("Verdict: A")) as (elsewhere, came_elsewhere, _):

        def answer(prompt, times):
            if status == 200:
                return reply(f"Your key is {KEY}. Verdict: A")
            said = "x" * (255 if status == 400 else 0) + f" wrong key {KEY}"  # where a message is cut short, too
            return status, {"Location": elsewhere} if status == 302 else {}, said.encode()

        with server(answer) as (url, came, headers):
            if status == 200:
                run(monkeypatch, url, path, tmp_path / "o.json")
            else:
                with pytest.raises(SystemExit) as end, judge.mistakes_in_a_line():
                    run(monkeypatch, url, path, tmp_path / "o.json", max_attempts=2)
                said = str(end.value)
                assert ": openai:test-model at 127.0.0.1: " in said and f"HTTP {status}" in said and "\n" not in said
    assert headers[0]["Authorization"] == f"Bearer {KEY}" and came_elsewhere.total() == 0
    assert KEY[:12] not in said + "".join(capsys.readouterr()) + everything_written(tmp_path)


@pytest.mark.parametrize("key", ["sk-secret two words", "sk-secret\nX-Other: 1", "sk-secret-ü"])
def test_a_key_that_no_header_takes_is_not_shown(tmp_path, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(judge.Mistake) as error:
        run(monkeypatch, "http://127.0.0.1:9", write_completions(tmp_path, "ours", [" good"]), tmp_path / "o.json")
    assert "OPENAI_API_KEY: contains characters" in str(error.value) and "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hidden@127.0.0.1:9/v1",
        "http://127.0.0.1:9/v1?token=hidden",
        "hidden",
        "file:///hidden",
        "http://127.0.0.1:9/ hidden",
    ],
)
def test_a_secret_in_the_address_is_refused_and_not_shown(tmp_path, monkeypatch, url):
    with pytest.raises(judge.Mistake, match="OPENAI_BASE_URL: must be an address like") as error:
        run(monkeypatch, url, write_completions(tmp_path, "ours", [" good"]), tmp_path / "o.json")
    assert "hidden" not in str(error.value) + everything_written(tmp_path)


def test_no_key_is_said_and_a_server_without_one_works(tmp_path, monkeypatch):
    path = write_completions(tmp_path, "ours", [" good"])
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(judge.Mistake, match="set OPENAI_API_KEY"):
        run(monkeypatch, "", path, tmp_path / "o.json")
    with server(lambda prompt, times: prefers_good(prompt)) as (url, came, headers):
        assert run(monkeypatch, url, path, tmp_path / "o.json")["results"]["ours"]["wins"] == 1
    assert "Authorization" not in headers[0]


# ---- Judges that score, and mistakes ---------------------------------------------------------------------------------


def test_the_higher_score_wins(tmp_path, capsys):
    (tmp_path / "grades.py").write_text(
        "def grade(prompts, completions, completion_ids, number, completion, **columns):\n"
        "    assert len(prompts) == len(completions) == len(completion_ids) == len(number) == len(completion)\n"
        "    return [None if 'odd' in text else float(text.split()[-1]) for text in completions]\n"
    )
    path = write_completions(tmp_path, "ours", [" 2", " 1", " 0", " odd", " 3"], [" 1", " 1.0", " 1", " 1", " 1"])
    flags = {"completions": (path,), "judge": f"function:{tmp_path}/grades.py:grade"}
    judge.main(judge.Args(output=str(tmp_path / "o.json"), **flags))
    found = json.loads((tmp_path / "o.json").read_text())
    assert numbers(found["results"]["ours"]) == (5, 2, 1, 1, 1) and found["results"]["ours"]["win_rate"] == 2.5 / 4
    assert found["results"]["ours"]["mean_score"] == 1.5 and found["order_seed"] is None
    said = capsys.readouterr().out
    assert "each text scored alone, no order" in said and re.search(r"ours +5 +2 +1 +1 +1 +62\.5", said)
    judge.main(judge.Args(output=str(tmp_path / "two.json"), posts=2, **flags))
    assert numbers(json.loads((tmp_path / "two.json").read_text())["results"]["ours"]) == (2, 1, 1, 0, 0)


def test_functions_compare_files_without_references(tmp_path):
    (tmp_path / "grades.py").write_text(
        "def grade(prompts, completions, completion_ids):\n    return [float(text) for text in completions]\n"
    )
    ours, theirs = (
        write_completions(tmp_path, name, texts) for name, texts in (("ours", ["2", "1"]), ("theirs", "11"))
    )
    for path in map(Path, (ours, theirs)):
        rows = [json.loads(line) | {"reference": None, "columns": None} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"judge": f"function:{tmp_path}/grades.py:grade", "output": str(tmp_path / "o.json")}
    judge.main(judge.Args(completions=(ours,), against=theirs, **flags))
    assert numbers(json.loads((tmp_path / "o.json").read_text())["results"]["ours"]) == (2, 1, 1, 0, 0)


def test_scores_of_a_model_are_those_of_its_own_forward(tmp_path):
    """Padded and in batches, against transformers' classifier, one unpadded text at a time."""
    torch = pytest.importorskip("torch")
    import transformers

    path = str(HERE.parent / "mini_tldr" / "reward")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    texts = [
        judge.Text("POST: my boss is rude.\n\nTL;DR:", " my boss is rude", True, {}),
        judge.Text("a b c", " d", False, {}),
        judge.Text("It was a very long day for my sister.\n\nTL;DR:", "", True, {}),
        judge.Text("POST: my boss is rude.\n\nTL;DR:", " my boss", False, {}),
    ]
    ours = judge.model_scores(path, texts, "float32", "cpu", batch_size=3)
    for text, score in zip(texts, ours):
        ids = tokenizer(text.prompt + text.text)["input_ids"] + [tokenizer.eos_token_id] * text.ended
        with torch.no_grad():
            hidden = model.base_model(torch.tensor([ids]))[0]
            assert model.score(hidden)[0, -1, 0].item() == pytest.approx(score, abs=1e-4)
    assert len({round(score, 3) for score in ours}) == 4 and all(map(math.isfinite, ours))


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"judge": "gpt"}, "--judge gpt: must be function:"),
        ({"output": "x"}, "must end in .json"),
        ({"posts": 0}, "--posts 0: must be above 0"),
        ({"concurrency": 0}, "--concurrency 0"),
        ({"completions": ("missing.jsonl",)}, "missing.jsonl: No such file"),
        ({"options": "[]"}, "must be a JSON object"),
        ({"prompt_file": "missing.txt"}, "--prompt_file missing.txt: cannot be read"),
        ({"prompt_file": "ours.jsonl"}, "--prompt_file ours.jsonl: must contain {post}, {a}, {b}"),
        ({"prompt_file": "x.txt", "judge": "function:math:sqrt"}, "--prompt_file x.txt: only openai gets a prompt"),
        ({"verdicts": ("A", "a")}, "--verdicts: must be two or three different words"),
        ({"judge": "function:none.py:f"}, "--judge function:none.py:f: cannot be loaded (FileNotFound"),
        ({"judge": "function:math:none"}, "there is no function none"),
        ({"judge": "function:math"}, "cannot be loaded"),
        ({"judge": "model:nowhere"}, "model:nowhere: cannot be loaded"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    path = write_completions(tmp_path, "ours", [" a"])
    given = {"completions": (path,), "judge": "openai:m", "output": "o.json"} | flags
    with pytest.raises(ValueError, match=re.escape(message)):
        judge.main(judge.Args(**given))
    assert not (tmp_path / "o.json").exists()


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "a"}', '{"prompt": "a", "completion": 3}', ""])
def test_files_that_are_no_completions(tmp_path, line):
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(judge.Mistake, match="bad.jsonl: is (not a completions file|empty)"):
        judge.read_rows(str(tmp_path / "bad.jsonl"))


def test_command_line_mistakes_are_one_line():
    for flags in ([], ["--nothing"], ["--completions", "a", "--judge", "z", "--output", "o.json", "--seed", "x"]):
        with pytest.raises(judge.Mistake) as error:
            judge.parse(judge.Args, flags)
        assert "--" in str(error.value) and str(error.value).endswith("; see --help") and "\n" not in str(error.value)
    command = [sys.executable, HERE / "judge.py", "--completions", "a", "--judge", "z", "--output", "o.json"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("judge.py: --judge z: must be function:")
    assert len(result.stderr.splitlines()) == 1
