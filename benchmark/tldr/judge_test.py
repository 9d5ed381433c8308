"""Tests of judge.py against a small server on this machine that answers, delays, breaks and refuses."""

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
import torch
import transformers

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
    return reply("They differ.\nVerdict: " + {1: "A", -1: "B", 0: "tie"}[("good" in a) - ("good" in b)])


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
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | more).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

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
    monkeypatch.setattr(judge, "FIRST_WAIT", 0.001)


def write_completions(folder: Path, name: str, completions, references=None) -> str:
    rows = []
    for i, ours in enumerate(completions):
        reference = references[i] if references else f" reference {i}"
        row = {"post": i, "sample": 0, "prompt": f"POST number {i}\n\nTL;DR:", "completion": ours}
        rows.append(row | {"reference": reference, "ended": True, "columns": {"number": i}})
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(monkeypatch, url: str, path: str, output: Path, **flags) -> dict:
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    flags = {"judge": "openai:test-model"} | flags
    judge.main(judge.Args(completions=(path,), output=str(output), **flags))
    return json.loads(output.read_text())


def numbers(found: dict) -> tuple:
    return tuple(found[name] for name in ("posts", "wins", "ties", "losses", "unparsable"))


# ---- Counting --------------------------------------------------------------------------------------------------------


def test_wilson_and_totals_by_hand():
    """8 of 10, z² = 3.841459: middle (0.8 + 0.19207295) / 1.3841459 = 0.7167401; half = 1.959964 / 1.3841459 ·
    sqrt(0.016 + 0.0096036) = 1.4160097 · 0.1600114 = 0.2265776."""
    assert judge.wilson(8, 10) == pytest.approx((0.7167401 - 0.2265776, 0.7167401 + 0.2265776), abs=1e-6)
    assert judge.wilson(0, 10) == pytest.approx((0, 3.841459 / 13.841459), abs=1e-6)  # z² / (n + z²)
    found = judge.count([1.0] * 7 + [0.5] * 2 + [0.0] + [None] * 5)
    assert numbers(found) == (15, 7, 2, 1, 5)
    assert found["win_rate"] == 0.8 and found["interval"] == [*judge.wilson(8, 10)]
    assert judge.count([None])["win_rate"] is None and judge.wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("A says more.\nVerdict: A", "A"),
        ("verdict: **b**", "B"),
        ("Verdict: a tie.", "TIE"),
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
    assert [judge.verdict(x, ("0", "1")) for x in ("0", "Preferred: 1", "tie", "2")] == ["A", "B", None, None]


def test_prompts(tmp_path, monkeypatch):
    """Braces of the texts stay. The server gets the user's prompt; its words are the verdicts; its hash is kept."""
    text = judge.judge_prompt(judge.JUDGE_PROMPT, "a {post} about {a}\n\nTL;DR:", " {b}", " {}")
    assert texts_of(text) == ("a {post} about {a}", "{b}", "{}")
    prompt = tmp_path / "prompt.txt"
    prompt.write_text('{post}\n{"0": "{a}", "1": "{b}"}\nReply with 0 or 1.')

    def answer(prompt, times):
        return reply("0" if "good" in json.loads(prompt.splitlines()[1])["0"] else "1")

    path = write_completions(tmp_path, "ours", [" good one", " good two", " good three"])
    with server(answer) as (url, came, _):
        flags = {"prompt_file": str(prompt), "verdicts": ("0", "1")}
        result = run(monkeypatch, url, path, tmp_path / "found.json", **flags)
    assert numbers(result["results"]["ours"]) == (3, 3, 0, 0, 0)
    assert all(text.startswith("POST number") and '{"0": "' in text for text in came)
    assert result["prompt_sha256"] == hashlib.sha256(prompt.read_bytes()).hexdigest()


# ---- Asking ----------------------------------------------------------------------------------------------------------


def test_order_is_random_and_counts_back(tmp_path, monkeypatch):
    """Who always says A comes out near 50%, who looks at the texts at 100%; both see ours first half of the time."""
    n, orders = 200, []
    path = write_completions(tmp_path, "ours", [f" good {i}" for i in range(n)])
    for seed in (1, 1, 2):
        with server(lambda prompt, times: reply("Verdict: A")) as (url, came, headers):
            output = tmp_path / f"biased{len(orders)}.json"
            found = run(monkeypatch, url, path, output, seed=seed)["results"]["ours"]
        assert abs(found["win_rate"] - 0.5) < 0.15 and found["first_preferred"] == 1.0
        assert sum("good" in texts_of(prompt)[1] for prompt in came) == found["wins"]
        orders.append({texts_of(prompt)[:2] for prompt in came})
    assert orders[0] == orders[1] != orders[2]
    assert headers[0]["path"] == "/v1/chat/completions" and headers[0]["Authorization"] == f"Bearer {KEY}"
    assert headers[0]["body"]["model"] == "test-model" and headers[0]["body"]["temperature"] == 0
    with server(lambda prompt, times: prefers_good(prompt)) as (url, came, _):
        result = run(monkeypatch, url, path, tmp_path / "fair.json")
    assert result["results"]["ours"]["win_rate"] == 1.0 and 0.3 < result["results"]["ours"]["first_preferred"] < 0.7
    assert (result["prompt_tokens"], result["completion_tokens"]) == (11 * n, 7 * n)
    assert result["order_seed"] == 1 and result["judge"] == "openai:test-model at 127.0.0.1"


def test_ties_equal_texts_answers_without_a_verdict_and_other_completions(tmp_path, monkeypatch):
    ours, theirs = [" good", " bad", " same", " equal ", " odd"], [" x", " good", " alike", " equal", " odder"]
    path = write_completions(tmp_path, "ours", ours, theirs)

    def answer(prompt, times):
        return reply("I cannot say.") if "odd" in prompt else prefers_good(prompt)

    with server(answer) as (url, came, _):
        found = run(monkeypatch, url, path, tmp_path / "found.json")["results"]["ours"]
        assert numbers(found) == (5, 1, 2, 1, 1) and found["win_rate"] == 0.5
        assert len(came) == 4  # equal texts are a tie without being asked
        other = write_completions(tmp_path, "theirs", theirs)
        result = run(monkeypatch, url, path, tmp_path / "versus.json", against=other)
        assert numbers(result["results"]["ours"]) == numbers(found) and result["against"] == "theirs"
        with pytest.raises(SystemExit, match="does not have the posts of"):
            run(monkeypatch, url, path, tmp_path / "x.json", against=write_completions(tmp_path, "few", [" 1"]))


def test_every_trouble_is_asked_again(tmp_path, monkeypatch):
    """Each post meets a trouble and is answered at last; the totals are as if nothing had been."""
    troubles = [
        (429, {"Retry-After": "0"}, b"slow down"),
        (500, {}, b"{}"),
        (200, {}, b"no json"),
        (200, {}, b'{"choices": []}'),
        (200, {}, b'{"choices": [{"message": null}]}'),
        (200, {"Content-Length": "1000"}, b'{"choices'),
        (200, {}, b"\xff\xfe"),
        None,
    ]
    path = write_completions(tmp_path, "ours", [f" good {i}" for i in range(len(troubles))])

    def answer(prompt, times):
        return prefers_good(prompt) if times > 1 else troubles[int(texts_of(prompt)[0].split()[-1])]

    with server(answer) as (url, came, _):
        result = run(monkeypatch, url, path, tmp_path / "found.json")
    assert numbers(result["results"]["ours"]) == (len(troubles), len(troubles), 0, 0, 0)
    assert set(came.values()) == {2}
    endpoint = judge.Endpoint("", "", "m", timeout=1.0)
    monkeypatch.setattr(judge, "FIRST_WAIT", 1.0)
    for header, least in [(None, 0.0), ("300", 300.0)]:  # waits double, and follow Retry-After
        broken = (429, {"Retry-After": header} if header else {}, b"")
        with server(lambda prompt, times, broken=broken: broken) as (url, came, _):
            waits: list[float] = []
            with pytest.raises(RuntimeError, match="no answer after 6 attempts; the last: HTTP 429"):
                judge.ask(endpoint._replace(url=url), "prompt", waits.append)
        assert len(waits) == 5
        assert all(max(least, 0.75 * 2**i) <= wait <= max(least, 1.25 * 2**i) for i, wait in enumerate(waits))


def test_killed_and_repeated_it_asks_nothing_twice(tmp_path, monkeypatch):
    n, workers, killed = 60, 4, threading.Event()
    path, output = write_completions(tmp_path, "ours", [f" good {i}" for i in range(n)]), tmp_path / "found.json"
    cache = tmp_path / "found.json.cache.jsonl"

    def answer(prompt, times):
        if came.total() > 40:
            killed.wait(60)  # so that it cannot end before it is killed
        return prefers_good(prompt)

    with server(answer) as (url, came, _):
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        command = [sys.executable, HERE / "judge.py", "--judge", "openai:test-model", "--concurrency", str(workers)]
        command += ["--completions", path, "--output", output]
        first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while came.total() < 30 and first.poll() is None:
            time.sleep(0.002)
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL and not output.exists()
        killed.set()
        kept = len(cache.read_text().splitlines())
        assert 30 - workers <= kept < n
        cache.write_text(cache.read_text() + '{"key": "0123', encoding="utf-8")  # cut short by the kill
        second = subprocess.run(command, capture_output=True, text=True)
        assert second.returncode == 0, second.stderr
        result = json.loads(output.read_text())
        assert result["asked_now"] == n - kept and numbers(result["results"]["ours"]) == (n, n, 0, 0, 0)
        assert len(came) == n and sum(times > 1 for times in came.values()) <= workers  # on their way at the kill
        flags = {"judge": "openai:other"}  # what the judge depends on is in the cache's key
        assert run(monkeypatch, url, path, output)["asked_now"] == 0
        assert run(monkeypatch, url, path, output, **flags)["asked_now"] == n


# ---- The key ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 302, 400, 500])
def test_the_key_is_nowhere(tmp_path, monkeypatch, capsys, status):
    """Not even where the server says it, in an answer, an error or a redirection."""
    path, told = write_completions(tmp_path, "ours", [" good"]), ""
    with server(lambda prompt, times: reply("Verdict: A")) as (elsewhere, came_elsewhere, _):

        def answer(prompt, times):
            if status == 200:
                return reply(f"Your key is {KEY}. Verdict: A")
            said = "x" * (255 if status == 400 else 0) + f" wrong key {KEY}"  # where a message is cut short, too
            return status, {"Location": elsewhere} if status == 302 else {}, said.encode()

        with server(answer) as (url, _, headers):
            if status == 200:
                run(monkeypatch, url, path, tmp_path / "o.json")
            else:
                with pytest.raises(SystemExit) as end:
                    run(monkeypatch, url, path, tmp_path / "o.json")
                told = str(end.value)
                assert f"HTTP {status}" in told and "\n" not in told
    assert headers[0]["Authorization"] == f"Bearer {KEY}" and came_elsewhere.total() == 0
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY[:12] not in told + "".join(capsys.readouterr()) + written


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("OPENAI_API_KEY", "sk-hidden two words", "OPENAI_API_KEY: contains characters"),
        ("OPENAI_API_KEY", "sk-hidden\nX-Other: 1", "OPENAI_API_KEY: contains characters"),
        ("OPENAI_BASE_URL", "http://user:hidden@127.0.0.1:9/v1", "OPENAI_BASE_URL: must be an address like"),
        ("OPENAI_BASE_URL", "http://127.0.0.1:9/v1?token=hidden", "OPENAI_BASE_URL: must be an address like"),
        ("OPENAI_BASE_URL", "file:///hidden", "OPENAI_BASE_URL: must be an address like"),
    ],
)
def test_a_wrong_key_or_address_is_refused_and_not_shown(name, value, message, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=message) as end:
        judge.endpoint_of(judge.Args(completions=(), judge="openai:m", output=""))
    assert "hidden" not in str(end.value)


def test_no_key_is_said_and_a_server_without_one_works(tmp_path, monkeypatch):
    path = write_completions(tmp_path, "ours", [" good"])
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(SystemExit, match="set OPENAI_API_KEY"):
        run(monkeypatch, "", path, tmp_path / "o.json")
    with server(lambda prompt, times: prefers_good(prompt)) as (url, _, headers):
        assert run(monkeypatch, url, path, tmp_path / "o.json")["results"]["ours"]["wins"] == 1
    assert "Authorization" not in headers[0]


# ---- Judges that score, and mistakes ---------------------------------------------------------------------------------


def test_the_higher_score_wins(tmp_path, capsys):
    (tmp_path / "grades_of_a_test.py").write_text(
        "def grade(prompts, completions, completion_ids, number, completion, **columns):\n"
        "    assert len(prompts) == len(completions) == len(completion_ids) == len(number) == len(completion)\n"
        "    return [None if 'odd' in text else float(text.split()[-1]) for text in completions]\n"
    )
    path = write_completions(tmp_path, "ours", [" 2", " 1", " 0", " odd", " 3"], [" 1", " 1.0", " 1", " 1", " 1"])
    flags = {"completions": (path,), "judge": f"function:{tmp_path}/grades_of_a_test.py:grade"}
    judge.main(judge.Args(output=str(tmp_path / "o.json"), **flags))
    found = json.loads((tmp_path / "o.json").read_text())
    assert numbers(found["results"]["ours"]) == (5, 2, 1, 1, 1) and found["results"]["ours"]["win_rate"] == 2.5 / 4
    said = capsys.readouterr().out
    assert "each text scored alone" in said and re.search(r"ours +5 +2 +1 +1 +1 +62\.5", said)
    judge.main(judge.Args(output=str(tmp_path / "two.json"), posts=2, **flags))
    assert numbers(json.loads((tmp_path / "two.json").read_text())["results"]["ours"]) == (2, 1, 1, 0, 0)


def test_scores_of_a_model_are_those_of_its_own_forward():
    """Padded and in batches, against transformers' classifier, one unpadded text at a time."""
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
        ({"completions": ("missing.jsonl",)}, "missing.jsonl: there is no such file"),
        ({"prompt_file": "ours.jsonl"}, "--prompt_file ours.jsonl: must contain {post}, {a}, {b}"),
        ({"verdicts": ("A", "a")}, "--verdicts: must be two or three different words"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    write_completions(tmp_path, "ours", [" a"])
    with pytest.raises(SystemExit, match=re.escape(message)):
        judge.main(judge.Args(**({"completions": ("ours.jsonl",), "judge": "openai:m", "output": "o.json"} | flags)))
    assert not (tmp_path / "o.json").exists()
