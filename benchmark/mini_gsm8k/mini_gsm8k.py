"""Mini GSM8K: word problems, a chat tokenizer and a small Qwen3 that solves some of them, made from a seed.

    python benchmark/mini_gsm8k/mini_gsm8k.py --output_dir runs/mini_gsm8k    # 11 minutes on one core

Rows have `prompt`, chat messages with the system message of gsm8k_reward.py; `answer`, a solution that ends with
"#### 42" as in GSM8K; and `steps`, the number of computations, 1 to 3. The policy is fine-tuned mostly on problems of
one step: it solves most of these and few of the others. The solutions are those of a simulated pupil in a hurry, who
stops early, takes a wrong number or sign, makes mistakes in sums and forgets how the answer should be written. A
problem's key is its computation, signs and numbers: no key of a held-out problem occurs in fine-tuning or training, and
none is in both held-out splits.
"""

import random
import sys
from pathlib import Path
from statistics import mean

import torch
import tyro
from gsm8k_reward import chat, correctness
from transformers import Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "mini_tldr"))

from mini_tldr import save, save_jsonl, train_lm, train_tokenizer  # noqa: E402

# ---- Problems --------------------------------------------------------------------------------------------------------

NAMES = ["Tom", "Ann", "Ben", "Mia", "Sam", "Lea", "Max", "Eva", "Leo", "Ida"]
ITEMS = ["apples", "pens", "books", "cards", "eggs", "shells", "stamps", "coins"]
PLACES = ["boxes", "bags", "jars", "drawers"]
BEGIN = {
    "has": ["{n} has {a} {i}.", "There are {a} {i} in {n}'s room.", "{n} starts the day with {a} {i}."],
    "*": [
        "{n} has {a} {p} with {b} {i} in each.",
        "{n} fills {a} {p}. There are {b} {i} in each of them.",
        "{n} owns {b} {i} in each of {a} {p}.",
    ],
}
CHANGE = {
    "+": ["{n} buys {b} more.", "{m} gives {n} {b} {i}.", "Then {n} finds {b} {i}.", "{n} gets {b} from {m}."],
    "-": ["{n} gives {b} to {m}.", "{m} takes {b} of them.", "Then {n} loses {b} {i}.", "{n} sells {b} {i} to {m}."],
}
ASK = {
    "now": ["How many {i} does {n} have now?", "How many {i} has {n} got left?", "With how many {i} does {n} end?"],
    "+": [
        "{m} has {b} {i} more than {n}. How many {i} does {m} have?",
        "{n} has {b} {i} less than {m}. How many {i} has {m} got?",
    ],
    "-": [
        "{m} has {b} {i} less than {n}. How many {i} does {m} have?",
        "{n} has {b} {i} more than {m}. How many {i} has {m} got?",
    ],
    "*": ["{m} has {b} times as many {i}. How many {i} does {m} have?"],
}
IDLE = ["{m} is {c} years old.", "It is {c} degrees outside.", "{m} waits for {c} minutes.", "{n} has {c} cousins."]


def apply(x: int, sign: str, y: int) -> int:
    return {"+": x + y, "-": x - y, "*": x * y}[sign]


def sample_problem(rng: random.Random, count: int) -> dict:
    """Returns a problem of `count` steps: its text, first number, steps [(sign, number), ...] and a number that does
    not matter, or None."""
    steps, (n, m), idle = [], rng.sample(NAMES, 2), rng.randint(2, 20)
    words = {"n": n, "m": m, "i": rng.choice(ITEMS), "p": rng.choice(PLACES)}
    if rng.random() < 0.4:
        first, b = rng.randint(2, 9), rng.randint(2, 9)
        steps.append(("*", b))
        sentences = [rng.choice(BEGIN["*"]).format(a=first, b=b, **words)]
    else:
        first = rng.randint(3, 20)
        sentences = [rng.choice(BEGIN["has"]).format(a=first, **words)]
    number = first * steps[0][1] if steps else first
    while len(steps) < count:
        last = len(steps) == count - 1  # the last step may ask what somebody else has
        signs = ["+", "+"] + ["-", "-"] * (number > 3) + ["*"] * (last and number <= 12)
        sign = rng.choice(signs)
        b = rng.randint(2, 4) if sign == "*" else rng.randint(2, min(12, number - 1) if sign == "-" else 12)
        steps.append((sign, b))
        number = apply(number, sign, b)
        asked = last and (sign == "*" or rng.random() < 0.5)
        sentences.append(rng.choice((ASK if asked else CHANGE)[sign]).format(b=b, **words))
    if not sentences[-1].endswith("?"):
        sentences.append(rng.choice(ASK["now"]).format(**words))
    idles = rng.random() < 0.5
    if idles:
        sentences.insert(rng.randint(0, len(sentences) - 1), rng.choice(IDLE).format(c=idle, **words))
    return {"text": " ".join(sentences), "first": first, "steps": steps, "idle": idle if idles else None}


def key(problem: dict) -> tuple:
    """Returns what is computed."""
    return (problem["first"], *problem["steps"])


# Probabilities of the pupil's mistakes; the first four apply at each step.
WRONG_SIGN, WRONG_NUMBER, SLIP, STOP, NO_MARK = 0.06, 0.04, 0.06, 0.2, 0.15


def solve(problem: dict, rng: random.Random | None = None) -> str:
    """Returns the right solution, or with `rng` that of the hurried pupil: "3 + 4 = 7. 7 - 2 = 5. #### 5"."""

    def chance(p):
        return rng is not None and rng.random() < p

    number, lines = problem["first"], []
    for sign, b in problem["steps"]:
        if chance(WRONG_SIGN):
            sign = rng.choice("+-*".replace(sign, ""))
        if chance(WRONG_NUMBER):
            b = problem["idle"] or rng.randint(2, 12)
        result = apply(number, sign, b)
        if chance(SLIP):
            result += rng.choice([-10, -2, -1, 1, 2, 10])
        lines.append(f"{number} {sign} {b} = {result}.")
        number = result
        if chance(STOP):
            break
    end = rng.choice(["", " That is {}.", " Answer: {}.", " #### {} I think."]) if chance(NO_MARK) else " #### {}"
    return " ".join(lines) + end.format(number)


def sample_row(rng: random.Random, held_out: set, shares: tuple[float, float, float]) -> dict:
    """Returns a row of the data and its problem, whose key is not in `held_out`. `shares`: of problems of 1, 2 and 3
    steps."""
    (count,) = rng.choices((1, 2, 3), shares)
    problem = sample_problem(rng, count)
    while key(problem) in held_out:
        problem = sample_problem(rng, count)
    return {"prompt": chat(problem["text"]), "answer": solve(problem), "steps": count, "problem": problem}


# ---- Sizes and template ----------------------------------------------------------------------------------------------

SIZES = {
    "test": 1000,  # rows, also of the next two
    "validation": 400,
    "train": 3000,
    "sft": 64_000,  # examples, mostly on problems that train.jsonl does not have
}
STEPS = (0.1, 0.45, 0.45)  # shares of problems of 1, 2 and 3 steps in the data
LESSONS = (0.84, 0.14, 0.02)  # and in what the policy is fine-tuned on

TEMPLATE = (  # ChatML as in Qwen, without tools and thinking
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---- Main ------------------------------------------------------------------------------------------------------------


def new_policy(tokenizer):
    """Returns a small Qwen3 with random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, intermediate_size=384, max_position_embeddings=512,
            initializer_range=0.06, tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )  # fmt: skip


def main(output_dir: Path):
    """Makes mini GSM8K, see above."""
    rng = random.Random(1)
    torch.manual_seed(1)
    torch.set_num_threads(1)  # so small a model gains nothing from a second thread
    output_dir.mkdir(parents=True, exist_ok=True)
    held_out, splits = set(), {"test": [], "validation": [], "train": []}
    for split, rows in splits.items():
        while len(rows) < SIZES[split]:
            rows.append(sample_row(rng, held_out, STEPS))
            if split != "train":  # a key has one held-out problem
                held_out.add(key(rows[-1]["problem"]))
        shipped = [{name: row[name] for name in ("prompt", "answer", "steps")} for row in rows]
        save_jsonl(output_dir / f"{split}.jsonl", shipped)

    texts = [message["content"] for row in splits["train"] for message in row["prompt"]]
    texts += [row["answer"] for row in splits["train"]]
    pad, start, eos = special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    names = {"eos_token": eos, "pad_token": pad, "additional_special_tokens": [start]}
    # As in Qwen, each digit is a token, and <|im_end|> ends a turn.
    tokenizer = train_tokenizer(texts, 512, special, digits=True, **names, chat_template=TEMPLATE)
    pupils = [solve(row["problem"], rng) for row in splits["test"]]
    answers = [row["answer"] for row in splits["test"]]
    print(f"the pupil solves {mean(correctness(None, pupils, None, answers)):.1%} of the test problems")

    def lessons(n):
        rows = [sample_row(rng, held_out, LESSONS) for _ in range(n)]
        chats = [row["prompt"] for row in rows]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        return [{"prompt": text, "completion": solve(row["problem"], rng)} for text, row in zip(prompts, rows)]

    policy = train_lm("policy", tokenizer, new_policy(tokenizer), SIZES["sft"], lessons, 3e-3, rng, 32)
    save(policy, tokenizer, output_dir / "sft")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
