"""The TL;DR win rate: a language model says whether a completion or the reference is better. A function for --eval_fns:

    pip install -r benchmark/tldr/requirements.txt
    OPENAI_API_KEY=... python rloo.py --total_episodes 0 --eval_fns benchmark/tldr/judge.py:win_rate ...

The protocol is that of TRL's published win rates, see README.md: one question per completion, with the two summaries in
an order that a coin decides for each post; the answer is one token; a completion wins if the judge names it, and loses
if the judge names the reference or neither. There are no ties, and equal texts are asked about as well.

Sources in huggingface/trl, each with its commit:
    docs/source/rloo_trainer.md, 1894146fb                  command; 33.0%, 51.2%
    release 0.9.6                                           k = 2, score -1 without an end
    examples/scripts/rloo/rloo_tldr.py, c6046ea4d           prompts
    examples/scripts/evals/generate_tldr.py, e88b5ed89      test rows
    examples/scripts/evals/judge_tldr.py, 203b1ae97         greedy, 200 tokens
    trl/trainer/judges.py, 51c69f5bf                        question, coin, one token

Environment variables: JUDGE_MODEL (default gpt-4o-mini), JUDGE_CACHE (default runs/judge.jsonl), and those of the
client: OPENAI_API_KEY, which is in no output, and OPENAI_BASE_URL for another server than OpenAI's. An answer is
written to the cache as it comes, so a repeated command asks only what has no answer yet.
"""

import ast
import hashlib
import importlib.util
import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tqdm import tqdm

try:
    import openai
except ModuleNotFoundError:
    raise SystemExit("judge.py needs more packages: pip install -r benchmark/tldr/requirements.txt") from None

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
REQUESTS = 8  # at once
CLIENT = {"max_retries": 8, "timeout": 60.0}  # of each request; the client waits longer before each retry, up to 8 s


def win_rate(prompts, completions, completion_ids=None, *, completion=None, messages=None, **columns) -> list[float]:
    """1 where the judge prefers a completion to the row's reference, else 0. The reference is the column `completion`,
    or the last of `messages`."""
    references = completion or messages
    if references is None:
        raise ValueError("judge.py: the data has no reference: it needs a column `completion` or `messages`")
    model = os.environ.get("JUDGE_MODEL", "gpt-4o-mini")
    questions, names = [], []
    for prompt, ours, theirs in zip(map(text_of, prompts), completions, map(text_of, references), strict=True):
        ours_first = random.Random(prompt).random() < 0.5  # the same order in each run, and for each model
        first, second = (ours, theirs) if ours_first else (theirs, ours)
        questions.append(template().format(prompt=prompt, response0=first.strip(), response1=second.strip()))
        names.append("0" if ours_first else "1")
    answers = ask_all(model, questions)
    unclear = sum(answer not in ("0", "1") for answer in answers)
    tqdm.write(f"judge {model}: {unclear} of {len(answers)} answers are neither 0 nor 1 and count as losses")
    return [float(answer == name) for answer, name in zip(answers, names, strict=True)]


def text_of(text: str | list[dict]) -> str:
    """A text, or that of a chat's last message."""
    return text if isinstance(text, str) else text[-1]["content"]


@cache
def template() -> str:
    """TRL's question, read from its source without importing it, if trl 0.19.1 is installed; else QUESTION."""
    spec = importlib.util.find_spec("trl")
    source = Path(spec.origin).parent / "trainer/judges.py" if spec and spec.origin else Path()
    for node in ast.parse(source.read_text("utf-8")).body if source.is_file() else ():
        if isinstance(node, ast.Assign) and node.targets[0].id == "DEFAULT_PAIRWISE_SYSTEM_PROMPT":
            tqdm.write(f"judge: TRL's question, from {source}")
            return ast.literal_eval(node.value)
    tqdm.write("judge: this file's own question; with `pip install trl==0.19.1` it is TRL's")
    return QUESTION


def ask_all(model: str, questions: list[str]) -> list[str]:
    """The answers. The cache has a line [key, answer] for each model and question that was answered."""
    file = Path(os.environ.get("JUDGE_CACHE", "runs/judge.jsonl"))
    file.parent.mkdir(parents=True, exist_ok=True)
    answers = {}
    for line in file.read_text().splitlines() if file.is_file() else ():
        if line.endswith('"]'):  # else it is empty, or was cut when a run was killed
            key, answer = json.loads(line)
            answers[key] = answer
    keys = [hashlib.sha256(json.dumps([model, question]).encode()).hexdigest() for question in questions]
    todo = {key: question for key, question in zip(keys, questions, strict=True) if key not in answers}
    client, lock = openai.OpenAI(**CLIENT), threading.Lock()

    def ask(key: str):
        messages = [{"role": "user", "content": todo[key]}]
        try:
            reply = client.chat.completions.create(model=model, messages=messages, max_tokens=1)
        except openai.OpenAIError as error:  # servers may repeat the key
            raise RuntimeError(f"judge {model}: {error}".replace(client.api_key, "***")) from None
        with lock, file.open("a") as lines:
            answers[key] = (reply.choices[0].message.content or "")[:8]
            lines.write("\n" + json.dumps([key, answers[key]]))  # the newline first, after a line that was cut

    with ThreadPoolExecutor(REQUESTS) as pool:
        list(tqdm(pool.map(ask, todo), total=len(todo), desc=f"judge {model}", unit="answer"))
    return [answers[key] for key in keys]
