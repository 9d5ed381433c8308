"""What Debian asks of a synopsis (Policy 3.4.1, Developer's Reference 6.2.2), as a reward that one can check:

--reward_fns benchmark/smollm/rules.py:keeps_the_rules
"""

import re

from judges import rouge_l, words

SAME_SENTENCE = 0.8  # ROUGE-L from which a synopsis repeats the description's first sentence


def one_short_line(synopsis: str, package: str, text: str) -> bool:
    return 0 < len(synopsis) < 80 and "\n" not in synopsis


def no_package_name(synopsis: str, package: str, text: str) -> bool:
    return not re.search(rf"(?<!\w){re.escape(package)}(?!\w)", synopsis.lower())


def no_article_first(synopsis: str, package: str, text: str) -> bool:
    return words(synopsis)[:1] not in (["a"], ["an"], ["the"])


def no_full_stop(synopsis: str, package: str, text: str) -> bool:
    return not synopsis.endswith(".")


def small_letter_first(synopsis: str, package: str, text: str) -> bool:
    """But for names: words with a capital or digit later on, or that have theirs within a sentence of the text."""
    first = re.match(r"[\w+]*", synopsis)[0]
    is_name = re.search(r"[A-Z0-9]", first[1:]) or re.search(rf"[\w,)] {re.escape(first)}(?!\w)", text)
    return not first[:1].isupper() or bool(is_name)


def not_the_first_sentence(synopsis: str, package: str, text: str) -> bool:
    """Neither the whole of it nor its beginning."""
    sentence = re.split(r"(?<=[.!?])\s|\n", text)[0]
    ours, theirs = words(synopsis), words(sentence)
    return ours != theirs[: len(ours)] and rouge_l([synopsis], [sentence])[0] < SAME_SENTENCE


RULES = [one_short_line, no_package_name, no_article_first, no_full_stop, small_letter_first]
RULES += [not_the_first_sentence]


def kept(synopsis: str, package: str, prompt: str) -> list[bool]:
    """Which rules a synopsis keeps; an empty one keeps none."""
    text = prompt.removesuffix("\n\nTL;DR:")
    return [bool(synopsis) and rule(synopsis, package, text) for rule in RULES]


def keeps_the_rules(completions, package, prompts, **columns) -> list[float]:
    """The share of the rules that each completion keeps."""
    rows = zip(completions, package, prompts, strict=True)
    return [sum(kept(ours.strip(), *row)) / len(RULES) for ours, *row in rows]


def keeps_all(completions, package, prompts, **columns) -> list[float]:
    """1 for a completion that keeps all rules, else 0."""
    return [float(share == 1) for share in keeps_the_rules(completions, package, prompts)]
