"""Tests of judge.py on mini TL;DR, with a judge on this machine that speaks OpenAI's protocol.

python -m pytest -q benchmark/tldr/judge_test.py    # by openai's client if it is installed, else by CLIENT
"""

import importlib.util
import json
import re
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

CLIENT = """
import json, os, types, urllib.error, urllib.request
class OpenAIError(Exception): pass
class OpenAI:
    def __init__(self, max_retries, timeout):
        self.api_key, self.attempts, self.timeout = os.environ["OPENAI_API_KEY"], max_retries + 1, timeout
        self.chat = types.SimpleNamespace(completions=self)
    def create(self, **body):
        headers = {"Authorization": f"Bearer {self.api_key}"}
        url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        for _ in range(self.attempts):
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            try:
                reply = urllib.request.urlopen(request, timeout=self.timeout)
                return json.load(reply, object_hook=lambda x: types.SimpleNamespace(**x))
            except urllib.error.HTTPError as error:
                message = error.read().decode()
        raise OpenAIError(message)
"""
STAND_IN = tempfile.mkdtemp()
if importlib.util.find_spec("openai") is None:
    Path(STAND_IN, "openai.py").write_text(CLIENT)
    sys.path.append(STAND_IN)

import judge  # noqa: E402
import pytest  # noqa: E402
from conftest import MINI, start_script  # noqa: E402

import rloo  # noqa: E402

HERE = Path(__file__).resolve().parent
gold_judge = rloo.load_function(f"{MINI}/mini_tldr.py:gold_judge")
KEY = "sk-this-must-not-be-seen-0123456789"
ROWS = rloo.load_rows(f"{MINI}/validation.jsonl", "train")


class Handler(BaseHTTPRequestHandler):
    """Answers by the gold judge, late, with "=" for a tie; to each question first with status 429 or 500."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        expected = {"model": "gold", "max_tokens": 1, "messages": [{"role": "user", "content": question}]}
        assert self.path == "/v1/chat/completions" and body == expected  # so no temperature
        prompt, *texts = re.findall(r'"""(.*?)"""', question, re.DOTALL)
        facts = [row["facts"] for row in ROWS if row["prompt"] == prompt]
        if not facts:
            return self.reply(401, {"error": {"message": f"wrong key: {self.headers['Authorization']}"}})
        if question not in self.server.asked:
            self.server.asked.append(question)
            return self.reply(429 if len(question) % 2 else 500, "not now")
        time.sleep(0.02)
        a, b = gold_judge(None, texts, facts=facts * 2)
        message = {"role": "assistant", "content": "0" if a > b else "1" if b > a else "="}
        self.reply(200, {"choices": [{"index": 0, "finish_reason": "length", "message": message}]})
        self.server.answered.append(question)

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": len(data),
            "Content-Type": "application/json",
            "Retry-After-Ms": 9,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A judge; its address, the key and a cache are in the environment, and a client is on the path."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.asked, running.answered, running.handle_error = [], [], lambda *args: None
    Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    settings = {"OPENAI_BASE_URL": f"http://127.0.0.1:{running.server_port}/v1", "OPENAI_API_KEY": KEY, "no_proxy": "*"}
    settings |= {"JUDGE_MODEL": "gold", "JUDGE_CACHE": str(tmp_path / "cache.jsonl"), "PYTHONPATH": STAND_IN}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield running
    running.shutdown()
    running.server_close()


def test_train_measure_kill_repeat(server, tmp_path, capfd):
    """Trains, then measures both models by the judge. That is killed once and repeated, and asks nothing twice."""
    (tmp_path / "data").mkdir()
    for split, rows in (("train", ROWS[:16]), ("test", ROWS[-16:])):
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"--dataset_name {tmp_path}/data --device cpu --learning_rate 1e-3".split()
    train = f"--sft_model_path {MINI}/sft --reward_model_path {MINI}/reward --total_episodes 32".split()
    rloo.command_line([*common, *train, "--num_eval_prompts", "0", "--output_dir", f"{tmp_path}/run"])
    graders = [f"{HERE}/judge.py:win_rate", f"{MINI}/mini_tldr.py:gold_win_rate"]
    measure = [*common, "--total_episodes", "0", "--resume", "--eval_fns", *graders]
    first_model = [*measure, "--sft_model_path", f"{MINI}/sft", "--output_dir", f"{tmp_path}/sft"]
    killed = start_script(["rloo.py", *first_model], tmp_path / "killed.jsonl")
    while len(server.answered) < 8 and killed.is_alive():
        time.sleep(0.005)
    killed.kill()
    killed.join()
    cached = [line for line in (tmp_path / "cache.jsonl").read_text().splitlines() if line.endswith('"]')]
    first, server.answered = server.answered, []
    (tmp_path / "cache.jsonl").open("a").write('\n["cut')

    rloo.command_line(first_model)
    assert 0 < len(cached) < len(server.asked)
    assert len(server.answered) == len(set(server.answered)) == len({*first, *server.answered}) - len(cached)
    rloo.command_line([*measure, "--sft_model_path", f"{tmp_path}/run", "--output_dir", f"{tmp_path}/trained"])
    rates = set()
    for output in (tmp_path / "sft", tmp_path / "trained"):
        samples = [json.loads(line) for line in (output / "completions.jsonl").read_text().splitlines()]
        evaluation = json.loads((output / "evaluations.jsonl").read_text())
        for mode in ("greedy", "sampled"):
            grades = [sample["grades"] for sample in samples if sample["mode"] == mode]
            wins = [grade["gold_win_rate"] == 1 for grade in grades]
            assert [grade["win_rate"] for grade in grades] == wins and len(wins) == 16
            assert evaluation[f"{mode}/win_rate"] == pytest.approx(sum(wins) / 16)
            rates.add(sum(wins))
    assert len(rates) > 1
    said = "".join(capfd.readouterr()) + "".join(file.read_text() for file in tmp_path.rglob("*.json*"))
    assert KEY not in said and "answers are neither 0 nor 1 and count as losses" in said


def test_messages_a_refused_key_and_the_question(server, tmp_path, monkeypatch, capsys):
    """The reference may be the last of `messages`; an error does not show the key; TRL's question is found."""
    rows = [row for row in ROWS[:20] if gold_judge(None, [row["completion"]], facts=[row["facts"]])[0] > 0]
    prompts, good, none = [row["prompt"] for row in rows], [row["completion"] for row in rows], [""] * len(rows)
    for ours, theirs, wins in ((good, none, 1), (none, good, 0), (good, good, 0)):
        chats = [[{"content": prompt}, {"content": text}] for prompt, text in zip(prompts, theirs, strict=True)]
        assert judge.win_rate(prompts, ours, messages=chats) == [wins] * len(rows)
    with pytest.raises(RuntimeError, match=r"wrong key: Bearer \*\*\*"):
        judge.win_rate(["unknown"], ["a"], completion=["b"])
    with pytest.raises(ValueError, match="no reference"):
        judge.win_rate(["a"], ["b"])
    (tmp_path / "trl/trainer").mkdir(parents=True)
    (tmp_path / "trl/__init__.py").write_text("raise ImportError")
    (tmp_path / "trl/trainer/judges.py").write_text("import no\nDEFAULT_PAIRWISE_SYSTEM_PROMPT = '{prompt}?'")
    monkeypatch.syspath_prepend(tmp_path)
    assert judge.template.__wrapped__() == "{prompt}?" and "TRL's question, from" in capsys.readouterr().out


def test_a_missing_package_is_said_before_anything_is_sampled(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(SystemExit, match="pip install -r benchmark/tldr/requirements.txt"):
        importlib.reload(judge)
