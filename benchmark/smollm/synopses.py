"""Grades of a package's synopsis, as reward functions of rloo.py and for --eval_fns.

    --reward_fns benchmark/smollm/synopses.py:closeness benchmark/smollm/synopses.py:plain_words

closeness      cosine with the maintainer's synopsis, by the embeddings of all-MiniLM-L6-v2
rouge_l        F1 of the longest common subsequence of words with the maintainer's synopsis
plain_words    share of the words that are among the 1,000 most frequent in descriptions
keeps_all      1 if all of six heuristics hold, ours, after Debian's rules (Policy 3.4.1, Developer's Reference 6.2.2)
"""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

import torch

PREPARED = Path(__file__).resolve().parent / "prepared"


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def description(prompt: str) -> str:
    """Returns a package's description from its prompt, which may begin with the examples of other packages."""
    return prompt.removesuffix("\n\nTL;DR:").rpartition("\n\n")[2]


@cache
def annotator():
    from transformers import AutoModel, AutoTokenizer

    folder = PREPARED / "annotator"
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


@torch.no_grad()
def embed(texts: list[str]) -> torch.Tensor:
    """Returns sentence embeddings (n, H) of norm 1: the mean of the last hidden states of a text's tokens."""
    tokenizer, model = annotator()
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    mask = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((model(**inputs).last_hidden_state * mask).sum(1), dim=-1)


def closeness(completions, synopsis, **columns) -> list[float]:
    """Returns the cosine of each completion and the maintainer's synopsis, -1 to 1."""
    ours, different = embed([text.strip() for text in completions]), list(dict.fromkeys(synopsis))
    theirs = embed(different)[[different.index(text) for text in synopsis]]  # k completions share one
    return (ours * theirs).sum(-1).tolist()


def longest_common(a: list[str], b: list[str]) -> int:
    """Returns the length of the longest common subsequence."""
    lengths = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for i, y in enumerate(b, 1):
            before, lengths[i] = lengths[i], before + 1 if x == y else max(lengths[i], lengths[i - 1])
    return lengths[-1]


def rouge_l(completions, synopsis, **columns) -> list[float]:
    """Returns the F1 of the longest common subsequence of words, 0 to 1 (Lin 2004)."""
    pairs = [(words(ours), words(theirs)) for ours, theirs in zip(completions, synopsis, strict=True)]
    return [2 * longest_common(a, b) / max(1, len(a) + len(b)) for a, b in pairs]


@cache
def common_words() -> frozenset[str]:
    """Returns the 1,000 most frequent words of the descriptions that SFT reads."""
    with (PREPARED / "sft.jsonl").open(encoding="utf-8") as lines:
        counts = Counter(word for line in lines for word in words(description(json.loads(line)["prompt"])))
    return frozenset(word for word, _ in counts.most_common(1_000))


def plain_words(completions, **columns) -> list[float]:
    """Returns the share of each completion's words that are common; 0 if it has none."""
    found = [[word in common_words() for word in words(text)] for text in completions]
    return [sum(common) / max(1, len(common)) for common in found]


def kept(synopsis: str, package: str, text: str) -> list[bool]:
    """Returns which heuristics a synopsis keeps for a package with the description `text`; an empty one keeps none."""
    if not synopsis:
        return [False] * 6
    first, ours = re.match(r"[\w+]*", synopsis)[0], words(synopsis)
    # A name has a capital or digit after its first letter, or has its capital within a sentence of the text.
    is_name = re.search(r"[A-Z0-9]", first[1:]) or re.search(rf"[\w,)] {re.escape(first)}(?!\w)", text)
    sentence = re.split(r"(?<=[.!?])\s|\n", text)[0]
    repeats = ours == words(sentence)[: len(ours)] or rouge_l([synopsis], [sentence])[0] >= 0.8
    return [
        len(synopsis) < 80 and "\n" not in synopsis,
        not re.search(rf"(?<!\w){re.escape(package)}(?!\w)", synopsis.lower()),
        ours[:1] not in (["a"], ["an"], ["the"]),
        not synopsis.endswith("."),
        not first[:1].isupper() or bool(is_name),
        not repeats,
    ]


def keeps_all(completions, package, prompts, **columns) -> list[float]:
    rows = zip(completions, package, map(description, prompts), strict=True)
    return [float(all(kept(ours.strip(), *row))) for ours, *row in rows]
