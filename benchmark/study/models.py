"""Models that the studies need beside those of mini TL;DR: a reward model from noisy comparisons, and the SFT policy
fine-tuned on the best of its own samples. reach.py and compare.py make them."""

import random
import time
from pathlib import Path

import study
import torch
import transformers
from study import TASK, Engine, mini_tldr

import rloo

# ---- A reward model from noisy comparisons ---------------------------------------------------------------------------


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


# ---- The SFT policy fine-tuned on the best of n ----------------------------------------------------------------------


def distil(folder: Path, n: int, prompts: int, learning_rate: float = 5e-4, epochs: int = 3):
    """Can the policy's network hold what best-of-n reaches? Of n completions of each training prompt the one with the
    highest score is kept, and the policy is trained to maximise its likelihood, at the temperature of sampling. No
    policy gradient is in it, so only the network and the number of prompts limit what it reaches."""
    transformers.set_seed(1)
    engine = Engine()
    pairs = sample_best(engine, engine.rows(rloo.load_rows(str(TASK), "train")[:prompts]), n)
    policy = engine.policy(TASK / "sft", trained=True)
    fine_tune(engine, policy, pairs, learning_rate, epochs)
    policy.save_pretrained(folder)
    engine.tokenizer.save_pretrained(folder)


def sample_best(engine: Engine, rows: list[dict], n: int) -> list[tuple[dict, list[int], float]]:
    """The best of n samples of each row by the reward model: the row, its token ids and its score."""
    rows, size, found = sorted(rows, key=lambda row: len(row["prompt_ids"])), max(1, engine.chunk_size // n), []
    for begin in range(0, len(rows), size):
        part = rows[begin : begin + size]
        batch, _ = engine.rollout(engine.reference, part, n, study.TEMPERATURE)
        scores, ids = engine.scores(engine.rewards["score"], batch), batch.completion_ids()
        for b, j in enumerate(scores.argmax(0).tolist()):
            found.append((part[b], ids[j * len(part) + b], float(scores[j, b])))
    return found


def nll(engine: Engine, policy, pairs: list[tuple]) -> torch.Tensor:
    """Negative log-likelihood of each completion, (b,), in nats, at the temperature of sampling."""
    ids = [row["prompt_ids"] + tokens for row, tokens, _ in pairs]
    batch = engine.tokenizer.pad({"input_ids": ids}, padding_side="right", return_tensors="pt")
    logprobs = (policy(**batch).logits[:, :-1] / study.TEMPERATURE).log_softmax(-1)
    chosen = logprobs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    slots = torch.arange(1, batch["input_ids"].shape[1])
    begin = torch.tensor([len(row["prompt_ids"]) for row, *_ in pairs])[:, None]
    return -(chosen * ((slots >= begin) & batch["attention_mask"][:, 1:].bool())).sum(-1)


def fine_tune(engine: Engine, policy, pairs: list[tuple], learning_rate: float, epochs: int, size: int = 32):
    """Maximises the log-likelihood of the pairs; the learning rate falls linearly to 0."""
    steps = epochs * (len(pairs) // size)
    optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)
    for _ in range(epochs):
        order = torch.randperm(len(pairs)).tolist()
        for begin in range(0, len(pairs) - size + 1, size):
            nll(engine, policy, [pairs[i] for i in order[begin : begin + size]]).mean().backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
