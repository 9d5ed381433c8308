"""Verifiable rewards for GSM8K (Cobbe et al. 2021, arXiv:2110.14168): is the answer right and in the asked format?

    python rloo.py --reward_fns benchmark/mini_gsm8k/gsm8k_reward.py:correctness ...

A row has `answer`: a number ("42"), or a solution with its answer in one of the marks below, as in GSM8K.

Which number of a completion counts (`final_answer`):
1. Everything up to the last </think> is dropped. After a <think> that does not end there is no answer.
2. The last mark counts: `#### 42` (up to the end of the line), `<answer>42</answer>` or `\\boxed{42}`. If it holds no
   number there is no answer.
3. In a mark, the first number after its last `=` counts. Only one number counts, so naming many never helps.
4. Without a mark the last number of the text counts.
Units, currencies and % are left out ("50%" is 50); numbers are compared exactly, as fractions: 1/2 = 0.5, 3.0 = 3.
"""

import re
from fractions import Fraction

SYSTEM = "Solve the problem step by step. End with #### and the answer, a number alone."  # what `format` asks for

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+"  # 1,234,567.5 or 1234567.5 or .5
# A number stands alone: "m2", "x_1" and "m^2" hold none. The sign touches the number or its currency: "10-5" holds 10
# and 5, "-$5" holds -5. After a whole number and a space, a fraction belongs to it: 1 1/2 = 3/2.
NUMBER = re.compile(
    rf"(?<![\w^.])(?P<sign>(?<!\))-)?[$€£]?(?<![\w^.])(?P<whole>\d+ (?=\d+/\d))?(?P<top>{DIGITS})"
    rf"(?:/(?P<bottom>{DIGITS}))?"
)
BRACED = "[^{}]*"
for _ in range(3):  # up to three levels of braces within the outer ones
    BRACED = r"(?:[^{}]|\{" + BRACED + r"\})*"
MARK = re.compile(rf"####([^\n]*)|<answer>(.*?)(?:</answer>|\Z)|\\boxed\s*\{{({BRACED})", re.DOTALL)
ENDING = re.compile(r"####\s*-?\$?(?:" + DIGITS + r")(?:/\d+)?%?\.?\s*\Z")


def numbers(text: str) -> list[Fraction]:
    """Returns all numbers of a text, in order."""
    text = text.replace("−", "-").replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\,", "")
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    found = []
    for match in NUMBER.finditer(text):
        try:
            whole, top, bottom = (
                Fraction((match[name] or default).replace(",", "").strip())
                for name, default in (("whole", "0"), ("top", ""), ("bottom", "1"))
            )
            found.append((whole + top / bottom) * (-1 if match["sign"] else 1))
        except (ZeroDivisionError, ValueError):  # 1/0, or thousands of digits, which Python does not convert
            pass
    return found


def final_answer(text: str) -> Fraction | None:
    """Returns the answer in a text by the rules above, or None."""
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    marks = list(MARK.finditer(text))
    if not marks:
        return (numbers(text) or [None])[-1]
    held = marks[-1][marks[-1].lastindex]
    return (numbers(held.rpartition("=")[2]) or [None])[0]


def text_of(completion) -> str:
    """Returns the text of a completion, which for a chat is a list with a message."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def correctness(prompts, completions, completion_ids, answer, **columns) -> list[float | None]:
    """Returns 1 if the completion has the answer of the row, 0 if not, and None if the row has no answer."""
    wanted = [None if x is None else final_answer(str(x)) for x in answer]
    found = [final_answer(text_of(completion)) for completion in completions]
    return [None if right is None else float(answer == right) for answer, right in zip(found, wanted)]


def format(prompts, completions, completion_ids, **columns) -> list[float]:
    """Returns 1 if a completion has the format that SYSTEM asks for: steps, then one `####`, then only a number."""
    texts = [text_of(completion).rpartition("</think>")[2].strip() for completion in completions]
    return [
        float(text.count("####") == 1 and not text.startswith("####") and ENDING.search(text) is not None)
        for text in texts
    ]


def chat(question: str) -> list[dict]:
    """Returns the prompt of a question, as chat messages."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
