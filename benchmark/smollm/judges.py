"""Two judges of a synopsis, which both read the maintainer's: the annotator and ROUGE-L. As functions of rloo.py:

--reward_fns benchmark/smollm/judges.py:closeness       --eval_fns benchmark/smollm/judges.py:rouge_l
"""

import re
from functools import cache
from pathlib import Path

import torch

ANNOTATOR = Path(__file__).resolve().parent / "prepared" / "annotator"


@cache
def annotator():
    from transformers import AutoModel, AutoTokenizer

    return AutoTokenizer.from_pretrained(ANNOTATOR), AutoModel.from_pretrained(ANNOTATOR).eval()


@torch.no_grad()
def embed(texts: list[str]) -> torch.Tensor:
    """Sentence embeddings (n, H) of norm 1: the mean of the last hidden states of a text's tokens."""
    tokenizer, model = annotator()
    inputs = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    mask = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((model(**inputs).last_hidden_state * mask).sum(1), dim=-1)


def closeness(completions, synopsis, **columns) -> list[float]:
    """The annotator: cosine of completion and maintainer's synopsis, -1 to 1."""
    ours = embed([text.strip() for text in completions])
    different = list(dict.fromkeys(synopsis))  # k completions share one
    theirs = embed(different)[[different.index(text) for text in synopsis]]
    return (ours * theirs).sum(-1).tolist()


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def longest_common(a: list[str], b: list[str]) -> int:
    """Length of the longest common subsequence."""
    lengths = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for i, y in enumerate(b, 1):
            before, lengths[i] = lengths[i], before + 1 if x == y else max(lengths[i], lengths[i - 1])
    return lengths[-1]


def rouge_l(completions, synopsis, **columns) -> list[float]:
    """F1 of the longest common subsequence of words, 0 to 1 (Lin 2004)."""
    pairs = [(words(ours), words(theirs)) for ours, theirs in zip(completions, synopsis, strict=True)]
    return [2 * longest_common(a, b) / max(1, len(a) + len(b)) for a, b in pairs]
