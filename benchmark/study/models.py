"""A reward model from noisy comparisons; reach.py and compare.py make them."""

import random
import time
from pathlib import Path

import study
import transformers
from study import TASK, mini_tldr


def train_reward_model(folder: Path, noise: float, posts: int) -> dict[str, float]:
    """Trains a reward model as over-optimisation is expected of and says how good it is on fresh validation posts.

    The embedded task's learns what each token is worth before it learns to compare. This one begins as the SFT policy,
    as a real one does, and learns only which of two completions is preferred, where labellers err in a share `noise` of
    all pairs. Posts, completions, loss and optimizer are those of mini TL;DR's own script, of which it is the last
    stage."""
    start = time.time()
    transformers.set_seed(1)
    rng = random.Random(f"noise {noise}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TASK / "sft")
    policy = transformers.AutoModelForCausalLM.from_pretrained(TASK / "sft").eval()
    taken = study.shipped_combinations()
    taken |= {study.combination(row) for rows in study.all_fresh_posts().values() for row in rows}

    def fresh(number: int) -> list[dict]:
        return [mini_tldr.sample_row(rng, taken) for _ in range(number)]

    rows = fresh(min(4_000, posts))
    drawn = [mini_tldr.generate(policy, tokenizer, [row["prompt"] for row in rows], t) for t in (0.7, 1.0)]
    pool = [(row, [first, second]) for row, (first, _), (second, _) in zip(rows, *drawn)]
    optimise, label_noise = mini_tldr.optimise, mini_tldr.LABEL_NOISE
    mini_tldr.LABEL_NOISE = noise
    mini_tldr.optimise = lambda name, model, *rest: optimise(name, model, *rest) if "comparing" in name else model
    try:
        model = mini_tldr.train_reward_model(tokenizer, policy, (0, 0, posts), fresh, pool, rng)
    finally:
        mini_tldr.optimise, mini_tldr.LABEL_NOISE = optimise, label_noise
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    found = agreement(model, tokenizer, policy, study.fresh_posts("validation", min(1_000, posts)))
    return {"noise": noise, "posts": posts, "seconds": round(time.time() - start), **found}


def agreement(reward_model, tokenizer, policy, posts: list[dict]) -> dict[str, float]:
    """The share of pairs of samples (T = 0.7) on which a reward model agrees with the gold judge; ties are left out."""
    posts = [post for post in posts for _ in range(2)]
    prompts = [post["prompt"] for post in posts]
    texts = [text for text, _ in mini_tldr.generate(policy, tokenizer, prompts, 0.7)]
    gold, score = study.gold(texts, posts), mini_tldr.reward(reward_model, tokenizer, prompts, texts)
    pairs = [(i, i + 1) for i in range(0, len(texts), 2) if gold[i] != gold[i + 1]]
    agree = sum((gold[i] > gold[j]) == (score[i] > score[j]) for i, j in pairs)
    return {"pairs": len(pairs), "agreement": agree / len(pairs)}
