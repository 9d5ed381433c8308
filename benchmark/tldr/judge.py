"""Which of two summaries of a post is better? Win rates of completions, by one of three kinds of judge.

    python benchmark/tldr/judge.py --completions rloo.jsonl sft.jsonl --output gold.json --judge function:my.py:grade
    python benchmark/tldr/judge.py --completions rloo.jsonl --output reward.json --judge model:path/of/reward_model
    python benchmark/tldr/judge.py --completions rloo.jsonl --output gpt.json --judge openai:gpt-4o-mini
    python benchmark/tldr/judge.py --completions rloo.jsonl --against sft.jsonl --output versus.json --judge openai:M

`function` and `model` score each text alone, and the higher score wins. `function` is called like a reward function of
rloo.py; `model` is a sequence classifier with one label. `openai` asks any server with OpenAI's chat completions API.
Its address and key come from the environment only: OPENAI_BASE_URL (default: OpenAI's own server) and OPENAI_API_KEY.
It sees both texts in an order that is drawn by --seed. Each answer is written to a cache at once, so the same command
continues after an interruption and asks nothing twice. The key appears in no output, message or file.

A line of a completions file is {"post": 0, "sample": 0, "prompt": text, "completion": text, "reference": text,
"ended": true, "columns": {...}}, as complete.py writes it. Of several samples of a post the first is judged.

A tie counts as half a win; two equal texts are a tie and are not sent to the judge. Answers without a verdict (or with
a score of None) are counted as unparsable and left out of the win rate. The interval is Wilson's (1927) at 95%, which
is slightly too wide where there are ties.

The prompt for `openai` is JUDGE_PROMPT below or that of --prompt_file: a text in which {post}, {a} and {b} stand for
the post and the two summaries. The answer must contain one of --verdicts after "Verdict:" or "Preferred:" or alone on
a line. A win rate can be compared with a published one only if judge, prompt, order and posts are the same.
"""

import dataclasses
import fcntl
import hashlib
import http.client
import importlib
import io
import json
import math
import os
import random
import re
import runpy
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # rloo.py is imported where it is needed: it loads torch

JUDGE_PROMPT = """\
Below are a forum post and two summaries of it, A and B. Which one serves somebody better who will not read the post?

What counts, in this order:
1. It covers what matters: what happened, to whom, and what the writer wants to know.
2. It says nothing false, and nothing that the post does not say.
3. It is short: no word and no detail that could be left out.
Which of them comes first means nothing. A longer summary is better only if it tells more that matters.

POST
{post}

SUMMARY A
{a}

SUMMARY B
{b}

Compare them in one sentence. Then write a last line, which is one of these three:
Verdict: A
Verdict: B
Verdict: tie
"""
OPENAI = "https://api.openai.com/v1"
LONGEST_WAIT = 600  # seconds; the program stops if a server asks for more


@dataclass
class Args:
    """Win rates of completions against references or against other completions, by one judge."""

    completions: tuple[str, ...]  # files of complete.py; one row of the table for each
    judge: str  # function:FILE.py:FUNCTION, model:PATH or openai:MODEL
    output: str  # .json file for all numbers; never overwritten
    against: str | None = None  # completions of the same posts to compare with; if not given, the references
    posts: int | None = None  # number of posts to judge, from the first; if not given, all
    prompt_file: str | None = None  # prompt for openai, a text with {post}, {a} and {b}; if not given, JUDGE_PROMPT
    verdicts: tuple[str, ...] = ("A", "B", "tie")  # words of the answer: first is better, second is, neither is
    seed: int = 1  # seed of the order in which openai sees a pair
    cache: str | None = None  # .jsonl file for openai's answers; if not given, named after the output
    concurrency: int = 8  # simultaneous requests to openai
    timeout: float = 60.0  # seconds to wait for openai
    max_attempts: int = 6  # attempts for one request before the program stops; the same command continues
    first_wait: float = 1.0  # seconds before the second attempt; doubles each time; Retry-After is respected
    options: str = '{"temperature": 0, "max_tokens": 200}'  # JSON object added to each request
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of a model judge
    device: str | None = None  # device of a model judge; if not given, cuda if there is one
    batch_size: int = 32  # texts per forward pass of a model judge


class Text(NamedTuple):
    """A summary and what a judge that scores needs to know about it."""

    prompt: str | list
    text: str
    ended: bool  # whether it ended with a stop token; true for references
    columns: dict  # the other columns of the dataset


class Mistake(ValueError):
    """What the command line prints as one line, without a stack trace."""


def require(condition: object, message: str):
    if not condition:
        raise Mistake(message)


# ---- Files -----------------------------------------------------------------------------------------------------------


def read_rows(path: str) -> list[dict]:
    """Rows of a completions file, the first sample of each post."""
    try:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
        rows = [row for row in rows if row.get("sample", 0) == 0]
        for number, row in enumerate(rows):
            row.setdefault("post", number)
            str.__str__(row["completion"])  # TypeError if it is no text
            row["prompt"], row["reference"] = row["prompt"], row.get("reference")
    except OSError as error:
        raise Mistake(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise Mistake(f"{path}: is not a completions file, see the top of judge.py ({what})") from error
    require(rows, f"{path}: is empty")
    return rows


def read_pairs(path: str, against: str | None, posts: int | None) -> list[tuple[Text, Text]]:
    """(ours, theirs) of each post."""
    rows = read_rows(path)[:posts]
    others = {row["post"]: row for row in read_rows(against)} if against else {}
    pairs = []
    for row in rows:
        columns = row.get("columns") or {}
        columns |= {"completion": row["reference"]} if isinstance(row["reference"], str) else {}
        ours = Text(row["prompt"], row["completion"], row.get("ended", True), columns)
        if against:
            other = others.get(row["post"], {})
            same = other.get("prompt") == row["prompt"]
            require(same, f"{against}: does not have the posts of {path} (post {row['post']})")
            theirs = Text(row["prompt"], other["completion"], other.get("ended", True), columns)
        else:
            given = isinstance(row["reference"], str)
            require(given, f"{path}: post {row['post']} has no reference; compare --against")
            theirs = Text(row["prompt"], row["reference"], True, columns)
        pairs.append((ours, theirs))
    return pairs


def require_new(path: str, suffix: str):
    require(path.endswith(suffix), f"--output {path}: must end in {suffix}")
    require(not os.path.exists(path), f"--output {path}: is there; nothing is overwritten")


def write_whole(path: str, text: str):
    """Writes to another name and renames, so that a file that exists is complete."""
    unfinished = Path(f"{path}.unfinished")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


# ---- Judges that score: list of Text -> list of numbers, None where there is none ------------------------------------


def function_scores(spec: str, texts: list[Text]) -> list[float | None]:
    """Scores by FILE.py:FUNCTION or MODULE:FUNCTION, called like a reward function of rloo.py, but without token ids.
    The column `completion` holds the reference, if there is one."""
    (source, _, name), path = spec.rpartition(":"), Path(spec.rpartition(":")[0]).resolve()
    sys.path.append(str(path.parent))  # the file may import its neighbours
    try:
        module = runpy.run_path(str(path)) if path.suffix == ".py" else vars(importlib.import_module(source))
    except Exception as error:  # a user's file raises what it likes
        raise Mistake(f"--judge function:{spec}: cannot be loaded ({type(error).__name__}: {error})") from error
    function = module.get(name)
    require(callable(function), f"--judge function:{spec}: there is no function {name}")
    names = sorted({name for text in texts for name in text.columns})
    columns = {name: [text.columns.get(name) for text in texts] for name in names}
    try:
        scores = function(
            prompts=[text.prompt for text in texts],
            completions=[text.text for text in texts],
            completion_ids=[None] * len(texts),
            **columns,
        )
        scores = [None if score is None else float(score) for score in scores]
    except Exception as error:
        raise Mistake(f"--judge function:{spec} raised {type(error).__name__}: {error}") from error
    require(len(scores) == len(texts), f"--judge function:{spec}: {len(scores)} scores for {len(texts)} completions")
    return [None if score is None or math.isnan(score) else score for score in scores]


def model_scores(path: str, texts: list[Text], dtype: str, device: str | None, batch_size: int) -> list[float]:
    """Scores by a sequence classifier and its tokenizer, read at a text's last token: eos if the text ended."""
    import torch
    import transformers

    import rloo

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rloo.start_processes(device)
    with rloo.explained(f"model:{path}: cannot be loaded"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=1, dtype=getattr(torch, dtype), output_loading_info=True
        )
        model.to(device).eval()
    missing = [*info["missing_keys"]]
    require(not missing, f"model:{path}: is not a trained reward model: {missing[:1]} is missing")
    eos, positions = tokenizer.eos_token_id, getattr(model.config, "max_position_embeddings", None) or sys.maxsize
    require(eos is not None, f"model:{path}: its tokenizer has no eos token")
    rows = [rloo.prepare_row({"prompt": text.prompt}, tokenizer) for text in texts]
    ids = [tokenizer(text.text, add_special_tokens=False)["input_ids"] + [eos] * text.ended or [eos] for text in texts]
    lengths = [len(row["prompt_ids"]) + len(tokens) for row, tokens in zip(rows, ids)]
    require(max(lengths) <= positions, f"model:{path}: {max(lengths)} tokens exceed its {positions} positions")
    scores, order = [math.nan] * len(texts), sorted(range(len(texts)), key=lengths.__getitem__)  # little padding
    for begin in tqdm(range(0, len(texts), batch_size), desc=f"model:{path}", unit="batch"):
        part = order[begin : begin + batch_size]
        prompt_ids, prompt_mask = rloo.pad([rows[i]["prompt_ids"] for i in part], left=True)
        responses, mask = rloo.pad([ids[i] for i in part])
        ended = torch.tensor([texts[i].ended for i in part])
        batch = rloo.Batch(
            [rows[i] for i in part],
            *(x.to(device) for x in (prompt_ids, prompt_mask, responses[None], mask[None], ended[None])),
        )
        found = rloo.token_reward(model, "plain", batch_size, batch)  # (1, len(part))
        for i, score in zip(part, found[0].tolist()):
            scores[i] = score
    return scores


# ---- The judge that is asked -----------------------------------------------------------------------------------------


class Endpoint(NamedTuple):
    url: str
    key: str
    model: str
    options: dict
    timeout: float
    max_attempts: int
    first_wait: float

    def name(self) -> str:
        """The judge in words, without what may be secret in its address."""
        return f"openai:{self.model} at {urlsplit(self.url).hostname}"

    def without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if len(self.key) >= 8 else text  # a shorter key is a placeholder


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so that the key is sent to the given address only."""

    def redirect_request(self, *args):
        return None


OPENER = urllib.request.build_opener(NoRedirect)


def endpoint_of(args: Args) -> Endpoint:
    """The address and the key, from the environment."""
    base, key = os.environ.get("OPENAI_BASE_URL") or OPENAI, (os.environ.get("OPENAI_API_KEY") or "").strip()
    plain = re.fullmatch(r"https?://[\w.\-\[\]:]+(/[\w.\-/~%]*)?", base)  # without name, password or token
    require(plain, f"OPENAI_BASE_URL: must be an address like {OPENAI} or http://localhost:8000/v1")
    require(key or base != OPENAI, f"--judge {args.judge}: set OPENAI_API_KEY (and OPENAI_BASE_URL for another server)")
    require(
        key.isascii() and key.isprintable() and " " not in key, "OPENAI_API_KEY: contains characters that no key has"
    )
    try:
        options = dict(**json.loads(args.options))
    except (ValueError, TypeError) as error:
        raise Mistake(f"--options {args.options!r}: must be a JSON object") from error
    return Endpoint(
        f"{base.rstrip('/')}/chat/completions",
        key,
        args.judge.partition(":")[2],
        options,
        args.timeout,
        args.max_attempts,
        args.first_wait,
    )


def retry_after(value: str | None) -> float:
    """Seconds that a Retry-After header (a number or a date) asks for; 0 without one."""
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError):
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def send(endpoint: Endpoint, prompt: str) -> dict:
    """One request. Returns {"answer": text, "prompt_tokens": n, "completion_tokens": n}."""
    body = endpoint.options | {"model": endpoint.model, "messages": [{"role": "user", "content": prompt}]}
    headers = {"Content-Type": "application/json"}
    if endpoint.key:
        headers["Authorization"] = f"Bearer {endpoint.key}"
    request = urllib.request.Request(endpoint.url, json.dumps(body).encode(), headers)
    with OPENER.open(request, timeout=endpoint.timeout) as response:
        reply = json.loads(response.read(2**22))
    answer = reply["choices"][0]["message"].get("content")  # None: the server declined to answer
    usage = reply.get("usage") or {}
    tokens = {name: int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
    return {"answer": endpoint.without_key(answer) if isinstance(answer, str) else ""} | tokens


def ask(endpoint: Endpoint, prompt: str, stop: threading.Event) -> dict:
    """`send` with retries after status 408, 409, 429 and 5xx, lost connections, timeouts and unreadable replies."""
    problem = "stopped"
    for attempt in range(endpoint.max_attempts):
        wait = endpoint.first_wait * 2**attempt * random.uniform(0.75, 1.25)  # not all threads at once
        if stop.is_set():
            break
        try:
            return send(endpoint, prompt)
        except urllib.error.HTTPError as error:
            try:
                said = error.read(2**16).decode(errors="replace")
            except (OSError, http.client.HTTPException):
                said = ""
            problem = " ".join(endpoint.without_key(f"HTTP {error.code} {error.reason} {said}").split())[:300]
            require(error.code in (408, 409, 429) or error.code >= 500, f"{endpoint.name()}: {problem}")
            asked = retry_after(error.headers.get("Retry-After"))
            require(asked <= LONGEST_WAIT, f"{endpoint.name()}: asks to be tried again in {asked:.0f} s ({problem})")
            wait = max(wait, asked)
        except (
            OSError,
            http.client.HTTPException,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            problem = endpoint.without_key(f"{type(error).__name__}: {error}")[:300]
        if attempt + 1 < endpoint.max_attempts:
            stop.wait(wait)
    raise Mistake(f"{endpoint.name()}: no answer after {endpoint.max_attempts} attempts; the last: {problem}")


def verdict(answer: str, words: tuple[str, ...] = ("A", "B", "tie")) -> str | None:
    """A, B or TIE, as one of `words` says, after "verdict" or "preferred" or else alone in a line; None for none or
    for more than one."""
    meaning = dict(zip((word.lower() for word in words), ("A", "B", "TIE")))
    choice = "|".join(map(re.escape, sorted(meaning, key=len, reverse=True)))
    answer = re.sub(r"\ba tie\b", "tie", answer.lower())
    found = re.findall(rf"(?:verdict|preferred)\W*({choice})\b", answer)
    found = found or re.findall(rf"(?m)^\W*({choice})\W*$", answer)
    said = {meaning[word] for word in found}
    return said.pop() if len(said) == 1 else None


def prompt_template(prompt_file: str | None) -> str:
    """The prompt with its three gaps."""
    if prompt_file is None:
        return JUDGE_PROMPT
    try:
        template = Path(prompt_file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Mistake(f"--prompt_file {prompt_file}: cannot be read ({error})") from error
    missing = [gap for gap in ("{post}", "{a}", "{b}") if gap not in template]
    require(not missing, f"--prompt_file {prompt_file}: must contain {', '.join(missing)}")
    return template


def judge_prompt(template: str, post: str | list, first: str, second: str) -> str:
    """The template with its gaps filled, all at once: a text may contain what looks like a gap."""
    text = post if isinstance(post, str) else "\n\n".join(message["content"] for message in post)
    gaps = {"{post}": text.strip().removesuffix("TL;DR:").strip(), "{a}": first.strip(), "{b}": second.strip()}
    return re.sub("|".join(map(re.escape, gaps)), lambda match: gaps[match[0]], template)


@contextmanager
def open_cache(path: Path) -> Iterator[tuple[io.TextIOBase, dict[str, dict]]]:
    """The file, to write at its end, and the answers in it by their key. A line that a kill cut short is skipped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8", errors="replace", buffering=1) as file:  # writes each line at once
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Mistake(f"{path}: another process of judge.py is writing to it") from error
        file.seek(0)
        text = file.read()
        answers = {}
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                answers[entry["key"]] = {
                    "answer": str(entry["answer"]),
                    "prompt_tokens": int(entry["prompt_tokens"]),
                    "completion_tokens": int(entry["completion_tokens"]),
                }
            except (ValueError, TypeError, LookupError):
                continue
        if text and not text.endswith("\n"):
            file.write("\n")
        yield file, answers


def ask_all(endpoint: Endpoint, prompts: dict[str, str], cache: Path, concurrency: int) -> tuple[dict[str, dict], int]:
    """The answers to `prompts` (by their keys), and how many of them were asked now; the others are in the cache."""
    lock, stop = threading.Lock(), threading.Event()
    with open_cache(cache) as (file, answers), ThreadPoolExecutor(concurrency) as pool:
        todo = {key: prompt for key, prompt in prompts.items() if key not in answers}

        def work(key: str, prompt: str):
            reply = ask(endpoint, prompt, stop)
            with lock:  # a whole line at once
                answers[key] = reply
                file.write(json.dumps({"key": key} | reply) + "\n")

        try:
            futures = [pool.submit(work, key, prompt) for key, prompt in todo.items()]
            done_before = len(prompts) - len(todo)
            for future in tqdm(
                as_completed(futures), total=len(prompts), initial=done_before, desc=endpoint.name(), unit="pair"
            ):
                future.result()
        except Mistake as mistake:
            stop.set()
            pool.shutdown(cancel_futures=True)
            done = sum(key in answers for key in prompts)
            raise Mistake(
                f"{mistake}. {done} of {len(prompts)} answers are in {cache}; the same command goes on"
            ) from None
        except KeyboardInterrupt:  # without waiting for pending requests
            os._exit(130)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        return {key: answers[key] for key in prompts}, len(todo)


# ---- Counting --------------------------------------------------------------------------------------------------------


def wilson(successes: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a proportion, successes / n; z: 95%."""
    if n == 0:
        return 0.0, 1.0
    p, shrink = successes / n, 1 + z * z / n
    middle, half = (p + z * z / (2 * n)) / shrink, z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    return max(0.0, middle - half), min(1.0, middle + half)


def count(outcomes: list[float | None]) -> dict:
    """Counts of the outcomes (1 won, 0.5 tie, 0 lost, None unparsable), and the win rate with its interval."""
    judged = [outcome for outcome in outcomes if outcome is not None]
    low, high = wilson(sum(judged), len(judged))
    return {
        "posts": len(outcomes),
        "wins": judged.count(1.0),
        "ties": judged.count(0.5),
        "losses": judged.count(0.0),
        "unparsable": outcomes.count(None),
        "win_rate": sum(judged) / len(judged) if judged else None,
        "interval": [low, high],
    }


def judge_by_scores(scorer: Callable, files: dict[str, list[tuple[Text, Text]]]) -> dict[str, dict]:
    """The higher score wins. The judge gets all texts in one call, each different text once."""

    def identity(text: Text) -> str:
        return json.dumps([text.prompt, text.text, text.ended, text.columns], sort_keys=True)

    texts = {identity(text): text for pairs in files.values() for pair in pairs for text in pair}
    scores = dict(zip(texts, scorer([*texts.values()])))
    found = {}
    for name, pairs in files.items():
        sides = [[scores[identity(text)] for text in side] for side in zip(*pairs)]
        outcomes = [None if None in (a, b) else 0.5 + 0.5 * ((a > b) - (a < b)) for a, b in zip(*sides)]
        means = [sum(x for x in side if x is not None) / max(1, len(side) - side.count(None)) for side in sides]
        found[name] = count(outcomes) | {"mean_score": means[0], "mean_score_of_the_others": means[1]}
    return found


def judge_by_asking(args: Args, files: dict[str, list[tuple[Text, Text]]]) -> tuple[dict[str, dict], dict]:
    """The verdicts of an endpoint on pairs whose order the seed draws, and the tokens that they cost."""
    endpoint, template = endpoint_of(args), prompt_template(args.prompt_file)
    prompts: dict[str, str] = {}
    orders: dict[str, list[tuple[bool, str | None]]] = {}  # whether ours comes first; the key, None for equal texts
    for name, pairs in files.items():
        rng, orders[name] = random.Random(args.seed), []
        for ours, theirs in pairs:
            first = rng.random() < 0.5
            texts = (ours.text, theirs.text) if first else (theirs.text, ours.text)
            prompt = judge_prompt(template, ours.prompt, *texts)
            asked = json.dumps([endpoint.name(), endpoint.options, prompt], sort_keys=True)
            key = None if ours.text.strip() == theirs.text.strip() else hashlib.sha256(asked.encode()).hexdigest()
            orders[name].append((first, key))
            if key:
                prompts[key] = prompt
    cache = Path(args.cache or args.output.removesuffix(".json") + ".cache.jsonl")
    answers, asked_now = ask_all(endpoint, prompts, cache, args.concurrency)
    said = {key: verdict(reply["answer"], args.verdicts) for key, reply in answers.items()} | {None: "TIE"}
    found = {}
    for name, order in orders.items():
        score = {"A": 1.0, "B": 0.0, "TIE": 0.5, None: None}
        as_asked = [score[said[key]] for _, key in order]  # of the text that came first
        outcomes = [x if first or x is None else 1 - x for x, (first, _) in zip(as_asked, order)]
        decided = [x for x in as_asked if x in (0.0, 1.0)]
        found[name] = count(outcomes) | {
            "came_first": sum(first for first, _ in order),
            "first_preferred": sum(decided) / len(decided) if decided else None,
        }
    cost = {name: sum(reply[name] for reply in answers.values()) for name in ("prompt_tokens", "completion_tokens")}
    return found, {
        "judge": endpoint.name(),
        "order_seed": args.seed,
        "answers": len(answers),
        "asked_now": asked_now,
        **cost,
        "prompt_sha256": hashlib.sha256(template.encode()).hexdigest(),
    }


# ---- The program -----------------------------------------------------------------------------------------------------


def order_of(result: dict) -> str:
    """The order in which the judge saw a pair, in words."""
    seed = result["order_seed"]
    return "each text scored alone, no order" if seed is None else f"order of each pair drawn by seed {seed}"


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def report(result: dict) -> str:
    """The table on screen."""
    lines = [
        f"judge: {result['judge']}; {order_of(result)}; against {result['against']}; 95% intervals by Wilson, "
        "ties count half"
    ]
    head = ("", "posts", "wins", "ties", "losses", "unparsable", "win rate, %", "interval, %")
    extra = {"first_preferred": "first preferred, %", "mean_score": "mean score", "mean_score_of_the_others": "others'"}
    rows = [head + tuple(text for name, text in extra.items() if name in next(iter(result["results"].values())))]
    for name, found in result["results"].items():
        rate = "-" if found["win_rate"] is None else f"{100 * found['win_rate']:.1f}"
        more = [found[key] for key in extra if key in found]
        scale = 100 if "first_preferred" in found else 1
        rows.append(
            (
                name,
                *(str(found[key]) for key in ("posts", "wins", "ties", "losses", "unparsable")),
                rate,
                "{:.1f} to {:.1f}".format(*(100 * x for x in found["interval"])),
                *("-" if x is None else f"{scale * x:.2f}" for x in more),
            )
        )
    lines += aligned(rows)
    if "prompt_tokens" in result:
        lines.append(
            f"{result['asked_now']} of {result['answers']} answers asked now, the others cached; tokens of "
            f"all answers: {result['prompt_tokens']:,} read, {result['completion_tokens']:,} written"
        )
    return "\n".join(lines)


def main(args: Args):
    kind, _, name = args.judge.partition(":")
    require(
        kind in ("function", "model", "openai") and name,
        f"--judge {args.judge}: must be function:FILE.py:FUNCTION, model:PATH or openai:MODEL",
    )
    require_new(args.output, ".json")
    for flag in ("concurrency", "max_attempts", "timeout", "batch_size"):
        require(getattr(args, flag) > 0, f"--{flag} {getattr(args, flag)}: must be above 0")
    require(args.posts is None or args.posts > 0, f"--posts {args.posts}: must be above 0")
    require(args.first_wait >= 0, f"--first_wait {args.first_wait}: must be at least 0")
    require(kind == "openai" or not args.prompt_file, f"--prompt_file {args.prompt_file}: only openai gets a prompt")
    different = {word.lower() for word in args.verdicts if word}
    require(
        len(args.verdicts) in (2, 3) and len(different) == len(args.verdicts),
        "--verdicts: must be two or three different words: the first is better, the second is, neither is",
    )
    files = {Path(path).stem: read_pairs(path, args.against, args.posts) for path in args.completions}
    require(len(files) == len(args.completions), "--completions: two files of the same name")
    details = {"judge": args.judge, "order_seed": None}
    if kind == "openai":
        results, details = judge_by_asking(args, files)
    elif kind == "model":
        scorer = partial(model_scores, name, dtype=args.dtype, device=args.device, batch_size=args.batch_size)
        results = judge_by_scores(scorer, files)
    else:
        results = judge_by_scores(partial(function_scores, name), files)
    result = details | {
        "against": Path(args.against).stem if args.against else "the references",
        "interval": "Wilson, 95%; ties count half, unparsable answers are left out",
        "results": results,
        "args": dataclasses.asdict(args),
    }
    write_whole(args.output, json.dumps(result, indent=1) + "\n")
    print(report(result))


def parse(kind, argv: list[str] | None = None):
    """The command line (default: sys.argv) as `kind`, a dataclass or several. A flag that is wrong is a Mistake."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(kind, args=argv, use_underscores=True)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        text = " ".join(re.sub("╭.*╮|[─-╿]", " ", said.getvalue()).split())  # without tyro's boxes and their titles
        raise Mistake(re.split(" (Argument|For full) helptext", text)[0] + "; see --help") from None


@contextmanager
def mistakes_in_a_line():
    """Ends the program with one line and status 1 on a mistake."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        if not isinstance(error, (Mistake, OSError)) and type(error).__name__ != "InputError":  # rloo.py's own kind
            raise
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


if __name__ == "__main__":
    with mistakes_in_a_line():
        main(parse(Args))
