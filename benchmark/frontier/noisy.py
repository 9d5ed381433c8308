"""A reward model from noisy comparisons alone, such as over-optimisation is to be expected of.

    python benchmark/frontier/noisy.py --output_dir runs/frontier/noisy25 --noise 0.25

The reward model of the embedded task learns what each token is worth before it learns to compare. This one begins as
the SFT policy, as a real one does, and learns only which of two completions is preferred, where the labellers err in a
certain share of all pairs. Posts, completions, loss and optimizer are those of mini TL;DR's own script.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path

import measure
import torch
import transformers
import tyro
from measure import mini_tldr


def train_on_comparisons(tokenizer, body, noise: float, posts: int, samples_of: int, rng: random.Random):
    """A reward model, from a policy whose layers it takes over."""
    taken = measure.shipped_combinations() | {
        measure.combination(row) for rows in measure.all_fresh_posts().values() for row in rows
    }

    def fresh(n: int) -> list[dict]:
        return [mini_tldr.sample_row(rng, taken) for _ in range(n)]

    rows = fresh(samples_of)
    prompts = [row["prompt"] for row in rows]
    drawn = [mini_tldr.generate(body, tokenizer, prompts, temperature) for temperature in (0.7, 1.0)]
    pool = [(row, [first, second]) for row, (first, _), (second, _) in zip(rows, *drawn)]

    optimise, label_noise = mini_tldr.optimise, mini_tldr.LABEL_NOISE
    mini_tldr.LABEL_NOISE = noise
    mini_tldr.optimise = lambda name, model, *rest: optimise(name, model, *rest) if "comparing" in name else model
    try:  # only its last stage
        return mini_tldr.train_reward_model(tokenizer, body, (0, 0, posts), fresh, pool, rng)
    finally:
        mini_tldr.optimise, mini_tldr.LABEL_NOISE = optimise, label_noise


def agreement(reward_model, tokenizer, policy, posts: list[dict]) -> dict[str, float]:
    """The share of pairs of samples (T = 0.7) on which a reward model agrees with the gold judge; ties are left out."""
    texts = [text for text, _ in mini_tldr.generate(policy, tokenizer, [p["prompt"] for p in posts for _ in "ab"], 0.7)]
    facts = [post["facts"] for post in posts for _ in "ab"]
    gold = mini_tldr.gold_judge(None, texts, facts=facts)
    score = mini_tldr.reward(reward_model, tokenizer, [p["prompt"] for p in posts for _ in "ab"], texts)
    pairs = [(i, i + 1) for i in range(0, len(texts), 2) if gold[i] != gold[i + 1]]
    agree = sum((gold[i] > gold[j]) == (score[i] > score[j]) for i, j in pairs)
    return {"pairs": len(pairs), "agreement": agree / len(pairs)}


def build(folder: Path, noise: float, posts: int) -> dict[str, float]:
    """Trains a reward model, saves it in `folder`, and says how good it is on fresh validation posts."""
    start = time.time()
    transformers.set_seed(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(measure.TASK / "sft")
    policy = transformers.AutoModelForCausalLM.from_pretrained(measure.TASK / "sft").eval()
    model = train_on_comparisons(tokenizer, policy, noise, posts, min(4_000, posts), random.Random(f"noise {noise}"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = agreement(model, tokenizer, policy, measure.fresh_posts("validation", min(1_000, posts)))
    return {"noise": noise, "posts": posts, "seconds": round(time.time() - start), **found}


@dataclass
class Args:
    """Trains a reward model on noisy comparisons."""

    output_dir: str
    """its folder"""
    noise: float = 0.1
    """share of comparisons that the labellers get wrong"""
    posts: int = 20_000
    """six completions of each are compared"""


def main(args: Args):
    torch.set_num_threads(1)
    print(build(Path(args.output_dir), args.noise, args.posts))


if __name__ == "__main__":
    main(tyro.cli(Args))
