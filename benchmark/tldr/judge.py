"""The TL;DR win rate: a language model says whether a completion or the reference is better. A function for --eval_fns:

    OPENAI_API_KEY=... python rloo.py --total_episodes 0 --eval_fns benchmark/tldr/judge.py:win_rate ...

The protocol is that of TRL's published win rates: one question for each completion, with the two summaries in an order
that a coin decides for each post; the answer is one token. A completion wins if the judge names it, and loses if the
judge names the reference or neither. There are no ties, and equal texts are asked about as well.

Sources in huggingface/trl, each with its commit:
    docs/source/rloo_trainer.md, 1894146fb                  command; 33.0%, 51.2%
    release 0.9.6                                           k = 2, score -1 without an end
    examples/scripts/rloo/rloo_tldr.py, c6046ea4d           prompts
    examples/scripts/evals/generate_tldr.py, e88b5ed89      test rows
    examples/scripts/evals/judge_tldr.py, 203b1ae97         greedy, 200 tokens
    trl/trainer/judges.py, 51c69f5bf                        question, coin, one token

Environment variables: OPENAI_API_KEY, which is in no output; OPENAI_BASE_URL for another server that speaks OpenAI's
protocol; JUDGE_MODEL (default gpt-4o-mini); JUDGE_CACHE (default runs/judge.jsonl). An answer is written to the cache
as it comes, so a repeated command asks only what has no answer yet.
"""

import ast
import importlib.util
import json
import os
import random
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

QUESTION = """\
I am making a leaderboard of language models. Two of them were given the instruction below; compare what they wrote, as
a person who gave that instruction would.

Instruction:
\"\"\"{prompt}\"\"\"

Output of model "0":
\"\"\"{response0}\"\"\"

Output of model "1":
\"\"\"{response1}\"\"\"

Which model's output is better, more relevant and of higher quality? The order of the two means nothing. Answer with
the model's identifier alone, 0 or 1: only the first character of your answer is read.
"""
AT_ONCE = 8  # questions
WAITS = (1, 2, 4, 8, 16, 32)  # seconds before each repetition of a question


def win_rate(prompts, completions, completion_ids=None, *, completion=None, messages=None, **columns) -> list[float]:
    """Returns 1 where the judge prefers a completion to the row's reference, else 0. The reference is the column
    `completion`, or the last of `messages`."""
    template, questions, names = question_of_trl() or QUESTION, [], []
    references = completion or [chat[-1]["content"] for chat in messages]
    for prompt, ours, reference in zip(prompts, completions, references, strict=True):
        ours_first = random.Random(prompt).random() < 0.5  # the same order in each run, and for each model
        pair = [ours.strip(), reference.strip()]
        first, second = pair if ours_first else reversed(pair)
        questions.append(template.format(prompt=prompt, response0=first, response1=second))
        names.append("0" if ours_first else "1")
    answers = ask_all(os.environ.get("JUDGE_MODEL", "gpt-4o-mini"), questions)
    unclear = sum(answer not in ("0", "1") for answer in answers)
    tqdm.write(f"judge: {unclear} of {len(answers)} answers are neither 0 nor 1 and count as losses")
    return [float(answer == name) for answer, name in zip(answers, names, strict=True)]


def question_of_trl() -> str | None:
    """Returns TRL's question, read from its source without importing it, if trl 0.19.1 is installed."""
    spec = importlib.util.find_spec("trl")
    source = Path(spec.origin).parent / "trainer/judges.py" if spec and spec.origin else Path()
    for node in ast.parse(source.read_text("utf-8")).body if source.is_file() else ():
        if isinstance(node, ast.Assign) and node.targets[0].id == "DEFAULT_PAIRWISE_SYSTEM_PROMPT":
            tqdm.write(f"judge: TRL's question, from {source}")
            return ast.literal_eval(node.value)
    tqdm.write("judge: this file's own question; after `pip install --no-deps trl==0.19.1` it is TRL's")
    return None


def ask_all(model: str, questions: list[str]) -> list[str]:
    """Returns the answers. The cache has a line [model, question, answer] for each question that was answered."""
    file, lock = Path(os.environ.get("JUDGE_CACHE", "runs/judge.jsonl")), threading.Lock()
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.is_file() else []
    known = [json.loads(line) for line in lines if line.endswith('"]')]  # a killed run may leave half a line
    answers = {asked: answer for of, asked, answer in known if of == model}

    def answer_to(question: str):
        answer = ask(model, question)
        with lock, file.open("a") as cache:
            answers[question] = answer
            cache.write("\n" + json.dumps([model, question, answer]))  # the newline comes first, after half a line

    missing = [question for question in dict.fromkeys(questions) if question not in answers]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(tqdm(pool.map(answer_to, missing), total=len(missing), desc=f"judge {model}", unit="answer"))
    return [answers[question] for question in questions]


def ask(model: str, question: str) -> str:
    """Returns the server's answer of one token. A busy or failing server is asked again."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 1}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1") + "/chat/completions"
    for wait in (*WAITS, None):
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=60) as reply:
                return (json.load(reply)["choices"][0]["message"]["content"] or "")[:8]
        except OSError as error:  # an error of HTTP, no connection, or no answer in time
            refused = isinstance(error, urllib.error.HTTPError) and error.code != 429 and error.code < 500
            if refused or wait is None:
                raise RuntimeError(f"judge {model}: {url}: {error}") from None
        time.sleep(wait)
