"""The reward of this study, for --reward_fns and --eval_fns: 1 if the first number after #### is the answer, else 0."""

import re


def correct(completions, answer, **columns) -> list[float]:
    found = [final_number(text) for text in completions]
    return [float(number == float(right)) for number, right in zip(found, answer, strict=True)]


def final_number(completion) -> float | None:
    """Returns the first number after ####, None if there is none; of a text, or of a chat message in a list."""
    text = completion if isinstance(completion, str) else completion[0]["content"]
    found = re.search(r"####\s*(-?\d[\d,]*(?:\.\d+)?)", text)
    return float(found[1].replace(",", "")) if found else None
