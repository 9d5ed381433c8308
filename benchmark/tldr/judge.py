"""Which of two summaries of a post is better? Win rates of completions, by one of three kinds of judge.

    python benchmark/tldr/judge.py --completions rloo.jsonl sft.jsonl --output gold.json --judge function:my.py:grade
    python benchmark/tldr/judge.py --completions rloo.jsonl --output reward.json --judge model:path/of/reward_model
    python benchmark/tldr/judge.py --completions rloo.jsonl --output gpt.json --judge openai:gpt-4o-mini
    python benchmark/tldr/judge.py --completions rloo.jsonl --against sft.jsonl --output versus.json --judge openai:M

README.md says what each kind of judge sees and how answers are counted. The address and the key of an endpoint come
from the environment only: OPENAI_BASE_URL (default: OpenAI's own server) and OPENAI_API_KEY. The key appears in no
output, message or file. Each answer is written to a cache at once, so the same command continues after an interruption.

A line of a completions file is {"post": 0, "sample": 0, "prompt": text, "completion": text, "reference": text,
"ended": true, "columns": {...}}, as complete.py writes it. Of several samples of a post the first is judged.

A tie counts as half a win; two equal texts are a tie and are not sent to the judge. Answers without a verdict (or with
a score of None) are counted as unparsable and left out of the win rate. The interval is Wilson's (1927) at 95%, which
is slightly too wide where there are ties.
"""

import dataclasses
import hashlib
import http.client
import json
import math
import os
import random
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
OPTIONS = {"temperature": 0, "max_tokens": 200}  # of each request
ATTEMPTS = 6  # for one request before the program stops; the same command continues
FIRST_WAIT = 1.0  # seconds before the second attempt; doubles each time


@dataclass
class Args:
    """Win rates of completions against references or against other completions, by one judge."""

    completions: tuple[str, ...]  # files of complete.py; one row of the table for each
    judge: str  # function:FILE.py:FUNCTION, model:PATH or openai:MODEL
    output: str  # .json file for all numbers
    against: str | None = None  # completions of the same posts to compare with; if not given, the references
    posts: int | None = None  # number of posts to judge, from the first; if not given, all
    prompt_file: str | None = None  # prompt for openai, a text with {post}, {a} and {b}; if not given, JUDGE_PROMPT
    verdicts: tuple[str, ...] = ("A", "B", "tie")  # words of the answer: first is better, second is, neither is
    seed: int = 1  # seed of the order in which openai sees a pair
    concurrency: int = 8  # simultaneous requests to openai
    timeout: float = 60.0  # seconds to wait for openai
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of a model judge
    device: str | None = None  # device of a model judge; if not given, cuda if there is one
    batch_size: int = 32  # texts per forward pass of a model judge


class Text(NamedTuple):
    """A summary and what a judge that scores needs to know about it."""

    prompt: str | list
    text: str
    ended: bool  # whether it ended with a stop token; true for references
    columns: dict  # the other columns of the dataset


def require(condition: object, message: str):
    if not condition:
        sys.exit(f"{Path(sys.argv[0]).name}: {message}")


# ---- Files -----------------------------------------------------------------------------------------------------------


def read_rows(path: str) -> dict[int, dict]:
    """The first sample of each post of a completions file."""
    require(Path(path).is_file(), f"{path}: there is no such file")
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
    found = {row["post"]: row for row in rows if row["sample"] == 0}
    require(found, f"{path}: is empty")
    return found


def read_pairs(path: str, against: str | None, posts: int | None) -> list[tuple[Text, Text]]:
    """(ours, theirs) of each post."""
    others = read_rows(against) if against else {}
    pairs = []
    for post, row in [*read_rows(path).items()][:posts]:
        columns = row["columns"] | ({} if row["reference"] is None else {"completion": row["reference"]})
        ours = Text(row["prompt"], row["completion"], row["ended"], columns)
        if against:
            other = others.get(post, {})
            same = other.get("prompt") == row["prompt"]
            require(same, f"{against}: does not have the posts of {path} (post {post})")
            theirs = Text(row["prompt"], other["completion"], other["ended"], columns)
        else:
            require(row["reference"] is not None, f"{path}: post {post} has no reference; compare --against")
            theirs = Text(row["prompt"], row["reference"], True, columns)
        pairs.append((ours, theirs))
    return pairs


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
    import rloo

    function = rloo.load_function(spec, "--judge function")
    names = sorted({name for text in texts for name in text.columns})
    columns = {name: [text.columns.get(name) for text in texts] for name in names}
    prompts, completions = [text.prompt for text in texts], [text.text for text in texts]
    scores = function(prompts, completions, [None] * len(texts), **columns)
    require(len(scores) == len(texts), f"--judge function:{spec}: {len(scores)} scores for {len(texts)} completions")
    return [None if score is None or math.isnan(score) else float(score) for score in scores]


def model_scores(path: str, texts: list[Text], dtype: str, device: str | None, batch_size: int) -> list[float]:
    """Scores by a sequence classifier and its tokenizer, read at a text's last token: eos if the text ended."""
    import torch
    import transformers
    from text_reward import scores_of

    import rloo

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, dtype=getattr(torch, dtype), output_loading_info=True
    )
    missing = [*info["missing_keys"]]
    require(not missing, f"model:{path}: is not a trained reward model, {missing} is missing")
    ids = []
    for text in texts:
        prompt = rloo.prepare_row({"prompt": text.prompt}, tokenizer)["prompt_ids"]
        completion = tokenizer(text.text, add_special_tokens=False)["input_ids"]
        ids.append(prompt + completion + [tokenizer.eos_token_id] * text.ended)
    return scores_of(model.to(device).eval(), ids, batch_size)


# ---- The judge that is asked -----------------------------------------------------------------------------------------


class Endpoint(NamedTuple):
    url: str
    key: str
    model: str
    timeout: float

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
    fits = key.isascii() and key.isprintable() and " " not in key
    require(fits, "OPENAI_API_KEY: contains characters that no key has")
    url, model = f"{base.rstrip('/')}/chat/completions", args.judge.partition(":")[2]
    return Endpoint(url, key, model, args.timeout)


def send(endpoint: Endpoint, prompt: str) -> dict:
    """One request. Returns {"answer": text, "prompt_tokens": n, "completion_tokens": n}."""
    body = OPTIONS | {"model": endpoint.model, "messages": [{"role": "user", "content": prompt}]}
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


def ask(endpoint: Endpoint, prompt: str, sleep: Callable[[float], object] = time.sleep) -> dict:
    """`send` with retries after status 408, 409, 429 and 5xx, lost connections, timeouts and unreadable replies. What
    it raises in the end is RuntimeError."""
    problem = ""
    for attempt in range(ATTEMPTS):
        wait = FIRST_WAIT * 2**attempt * random.uniform(0.75, 1.25)  # not all threads at once
        try:
            return send(endpoint, prompt)
        except urllib.error.HTTPError as error:
            said = error.read(2**16).decode(errors="replace")
            problem = " ".join(endpoint.without_key(f"HTTP {error.code} {error.reason} {said}").split())[:300]
            if error.code not in (408, 409, 429) and error.code < 500:
                raise RuntimeError(f"{endpoint.name()}: {problem}") from None
            asked = error.headers.get("Retry-After") or ""
            wait = max(wait, min(600.0, float(asked)) if asked.isdigit() else 0.0)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            problem = endpoint.without_key(f"{type(error).__name__}: {error}")[:300]
        if attempt + 1 < ATTEMPTS:
            sleep(wait)
    raise RuntimeError(f"{endpoint.name()}: no answer after {ATTEMPTS} attempts; the last: {problem}")


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


def judge_prompt(template: str, post: str | list, first: str, second: str) -> str:
    """The template with its gaps filled, all at once: a text may contain what looks like a gap."""
    text = post if isinstance(post, str) else "\n\n".join(message["content"] for message in post)
    gaps = {"{post}": text.strip().removesuffix("TL;DR:").strip(), "{a}": first.strip(), "{b}": second.strip()}
    return re.sub("|".join(map(re.escape, gaps)), lambda match: gaps[match[0]], template)


def read_cache(path: Path) -> dict[str, dict]:
    """The answers in a cache, by their keys. A line that a kill cut short is left out, and ended."""
    text, found = path.read_text(encoding="utf-8") if path.is_file() else "", {}
    for line in text.splitlines():
        try:
            reply = json.loads(line)
            found[reply.pop("key")] = reply
        except ValueError:
            continue
    if text and not text.endswith("\n"):
        path.write_text(text + "\n", encoding="utf-8")
    return found


def ask_all(endpoint: Endpoint, prompts: dict[str, str], cache: Path, concurrency: int) -> tuple[dict[str, dict], int]:
    """The answers to `prompts` (by their keys), and how many of them were asked now; the others are in the cache."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    answers, lock = read_cache(cache), threading.Lock()
    todo = [key for key in prompts if key not in answers]
    with cache.open("a", encoding="utf-8", buffering=1) as file, ThreadPoolExecutor(concurrency) as pool:

        def work(key: str):
            reply = ask(endpoint, prompts[key])
            with lock:  # a whole line at once
                answers[key] = reply
                file.write(json.dumps({"key": key} | reply) + "\n")

        try:
            list(tqdm(pool.map(work, todo), total=len(todo), desc=endpoint.name(), unit="pair"))
        except RuntimeError as error:
            done = sum(key in answers for key in prompts)
            require(False, f"{error}. {done} of {len(prompts)} answers are in {cache}; the same command goes on")
        finally:
            pool.shutdown(cancel_futures=True)  # after an error the rest is not asked
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
        found[name] = count(outcomes)
    return found


def judge_by_asking(args: Args, files: dict[str, list[tuple[Text, Text]]]) -> tuple[dict[str, dict], dict]:
    """The verdicts of an endpoint on pairs whose order the seed draws, and the tokens that they cost."""
    endpoint = endpoint_of(args)
    template = Path(args.prompt_file).read_text(encoding="utf-8") if args.prompt_file else JUDGE_PROMPT
    missing = [gap for gap in ("{post}", "{a}", "{b}") if gap not in template]
    require(not missing, f"--prompt_file {args.prompt_file}: must contain {', '.join(missing)}")
    prompts: dict[str, str] = {}
    orders: dict[str, list[tuple[bool, str | None]]] = {}  # whether ours comes first; the key, None for equal texts
    for name, pairs in files.items():
        rng, orders[name] = random.Random(args.seed), []
        for ours, theirs in pairs:
            first = rng.random() < 0.5
            texts = (ours.text, theirs.text) if first else (theirs.text, ours.text)
            prompt = judge_prompt(template, ours.prompt, *texts)
            asked = json.dumps([endpoint.name(), OPTIONS, prompt], sort_keys=True)
            key = None if ours.text.strip() == theirs.text.strip() else hashlib.sha256(asked.encode()).hexdigest()
            orders[name].append((first, key))
            if key:
                prompts[key] = prompt
    answers, asked_now = ask_all(endpoint, prompts, Path(f"{args.output}.cache.jsonl"), args.concurrency)
    said = {key: verdict(reply["answer"], args.verdicts) for key, reply in answers.items()} | {None: "TIE"}
    found = {}
    for name, order in orders.items():
        score = {"A": 1.0, "B": 0.0, "TIE": 0.5, None: None}
        as_asked = [score[said[key]] for _, key in order]  # of the text that came first
        outcomes = [x if first or x is None else 1 - x for x, (first, _) in zip(as_asked, order)]
        decided = [x for x in as_asked if x in (0.0, 1.0)]
        found[name] = count(outcomes) | {"first_preferred": sum(decided) / len(decided) if decided else None}
    cost = {name: sum(reply[name] for reply in answers.values()) for name in ("prompt_tokens", "completion_tokens")}
    details = {"judge": endpoint.name(), "order_seed": args.seed, "answers": len(answers), "asked_now": asked_now}
    return found, details | cost | {"prompt_sha256": hashlib.sha256(template.encode()).hexdigest()}


# ---- The program -----------------------------------------------------------------------------------------------------


def report(result: dict) -> str:
    """The table on screen."""
    seed = result["order_seed"]
    order = "each text scored alone" if seed is None else f"order of each pair drawn by seed {seed}"
    judge = f"judge: {result['judge']}; {order}; against {result['against']}"
    lines = [f"{judge}; 95% intervals by Wilson, ties count half"]
    lines += [
        f"{'':24}{'posts':>7}{'wins':>7}{'ties':>7}{'losses':>8}{'unparsable':>12}{'win rate, %':>13}  interval, %"
    ]
    for name, found in result["results"].items():
        rate = "-" if found["win_rate"] is None else f"{100 * found['win_rate']:.1f}"
        low, high = (100 * x for x in found["interval"])
        counts = f"{found['posts']:7}{found['wins']:7}{found['ties']:7}{found['losses']:8}{found['unparsable']:12}"
        lines.append(f"{name:24}{counts}{rate:>13}  {low:.1f} to {high:.1f}")
    return "\n".join(lines)


def main(args: Args):
    kind, _, name = args.judge.partition(":")
    known = kind in ("function", "model", "openai") and name
    require(known, f"--judge {args.judge}: must be function:FILE.py:FUNCTION, model:PATH or openai:MODEL")
    require(args.output.endswith(".json"), f"--output {args.output}: must end in .json")
    words = {word.lower() for word in args.verdicts}
    require(len(words) == len(args.verdicts) in (2, 3), "--verdicts: must be two or three different words")
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
    against = Path(args.against).stem if args.against else "the references"
    result = details | {"against": against, "results": results, "args": dataclasses.asdict(args)}
    write_whole(args.output, json.dumps(result, indent=1) + "\n")
    print(report(result))


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
