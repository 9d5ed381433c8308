"""How good is a policy on posts that no run has seen? Everything that the study measures is measured here.

    python benchmark/frontier/measure.py --policy runs/my_run              # on 2,000 fresh validation posts
    python benchmark/frontier/measure.py --policy benchmark/mini_tldr/sft --samples 4 --posts 500

Fresh posts come from mini TL;DR's own generator. Their combinations of facts occur neither in the splits that are
shipped nor among fresh posts of another kind. Each post gets completions sampled at T = 0.7 and, with
`--greedy`, one greedy completion. Measured are

    score     the reward model's
    gold      the gold judge's
    win       1 where the gold score is above that of the post's reference, 0.5 where it is equal, else 0
    kl        Σ_t log π(y_t) - log π_SFT(y_t) at T = 0.7, in nats; its mean over samples estimates KL(π ‖ π_SFT)
    length    in tokens

A mean over posts stands with its standard error. All policies are sampled with the same random numbers, chunk by chunk,
so that two similar policies give similar completions and their difference is known better than either value.
"""

import json
import random
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import transformers
import tyro
from estimates import mean_over_posts

ROOT = Path(__file__).resolve().parents[2]
TASK = ROOT / "benchmark" / "mini_tldr"  # data, sft/, reward/
GENERATOR = next(path for path in (TASK / "mini_tldr.py", ROOT / "benchmark" / "mini_tldr.py") if path.is_file())
sys.path[:0] = [str(ROOT), str(GENERATOR.parent)]
import mini_tldr  # noqa: E402

import rloo  # noqa: E402

TEMPERATURE = 0.7
FRESH = {"validation": 2_000, "test": 5_000, "second_test": 5_000}  # posts of each kind; later ones avoid earlier ones


# ---- Posts -----------------------------------------------------------------------------------------------------------


def combination(row: dict) -> tuple:
    """The facts of a row, by which posts are told apart."""
    return tuple(mini_tldr.values_of(row["facts"]).values())


def shipped_combinations() -> set[tuple]:
    """Combinations of facts in the splits that are shipped."""
    files = [TASK / f"{split}.jsonl" for split in ("train", "validation", "test")]
    return {combination(json.loads(line)) for file in files for line in file.read_text(encoding="utf-8").splitlines()}


def fresh_posts(split: str, number: int | None = None) -> list[dict]:
    """The first `number` fresh posts of a kind, as rows of the dataset; always the same ones."""
    return all_fresh_posts()[split][:number]


@lru_cache(maxsize=1)
def all_fresh_posts() -> dict[str, list[dict]]:
    """All of them by kind. A combination of facts occurs once."""
    taken, found = shipped_combinations(), {}
    for kind, size in FRESH.items():
        rng = random.Random(f"fresh {kind} posts")
        found[kind] = [mini_tldr.sample_row(rng, taken) for _ in range(size)]  # adds to `taken`
    return found


# ---- What is used of rloo.py -----------------------------------------------------------------------------------------


class Engine:
    """The forward passes of policies and reward models, by the functions that rloo.py trains with.

    `reward_models`: name of a measure -> folder of the reward model behind it, beside the embedded task's `score`."""

    def __init__(self, reward_models: dict[str, Path] | None = None, chunk_size: int = 128):
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.args = rloo.Args(
            sft_model_path=str(TASK / "sft"),
            model_name_or_path=str(TASK / "sft"),
            dtype="float32",
            device="cpu",
            local_rollout_forward_batch_size=chunk_size,
        )
        rloo.start_processes(torch.device("cpu"))
        self.tokenizer = rloo.load_tokenizer(self.args, "--policy", self.args.sft_model_path)
        trial = self.rows(fresh_posts("validation", 16))
        self.reference = self.policy(TASK / "sft")
        self.rewards = {}
        for name, path in ({"score": TASK / "reward"} | (reward_models or {})).items():
            self.args.reward_model_path = str(path)
            vocabulary = self.reference.config.vocab_size
            self.rewards[name] = rloo.load_reward_model(self.args, self.tokenizer, trial, vocabulary)
        self.stop_ids = rloo.stop_token_ids(self.args, self.reference, self.tokenizer)

    def rows(self, posts: list[dict]) -> list[dict]:
        """Posts as rollout wants them."""
        return [rloo.prepare_row(post, self.tokenizer) for post in posts]

    def policy(self, path: str | Path):
        """The policy of a folder."""
        return rloo.load_model(self.args, "--policy", str(path), trained=False)

    def complete(self, policy, rows: list[dict], k: int, temperature: float):
        """k completions of each row: their texts, number j·B + b, and by name what is measured of them, (k, B)."""
        size = self.args.local_rollout_forward_batch_size
        batch, logprobs = rloo.rollout(
            policy, rows, k, temperature, self.args.response_length, self.stop_ids, chunk_size=size
        )
        found = {name: rloo.score(reward, (1.0,), batch)[0] for name, reward in self.rewards.items()}
        found["length"] = batch.response_mask.sum(-1)
        found["logprob"] = logprobs.sum(-1)
        found["kl"] = torch.zeros_like(logprobs[..., 0])
        if temperature and policy is not self.reference:
            found["kl"] = (logprobs - rloo.chunked_logprobs(self.reference, batch, temperature, "group", size)).sum(-1)
        return rloo.completion_texts(batch, self.tokenizer), found


# ---- Measuring -------------------------------------------------------------------------------------------------------


def wins(gold: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """1 where gold is above the reference's, 0.5 where it is equal, else 0."""
    return np.where(np.isclose(gold, reference, atol=1e-6), 0.5, (gold > reference).astype(float))


def grade(engine: Engine, policy, posts: list[dict], samples: int, seed: int, temperature: float = TEMPERATURE) -> dict:
    """measure -> its values (posts, samples); "logprob" is that of the whole completion under the policy."""
    rows = engine.rows(posts)
    reference = np.array(
        mini_tldr.gold_judge(None, [p["completion"] for p in posts], facts=[p["facts"] for p in posts])
    )
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]["prompt_ids"]), i))  # little padding
    found: dict[str, np.ndarray] = {}
    size = max(1, engine.args.local_rollout_forward_batch_size // samples)
    for number, begin in enumerate(range(0, len(order), size)):
        index = order[begin : begin + size]
        transformers.set_seed(seed * 1_000_000 + number)
        texts, values = engine.complete(policy, [rows[i] for i in index], samples, temperature)
        facts = [posts[i]["facts"] for i in index] * samples
        values["gold"] = torch.tensor(mini_tldr.gold_judge(None, texts, facts=facts)).view(samples, -1)
        for name, tensor in values.items():
            found.setdefault(name, np.empty((len(rows), samples)))[index] = tensor.T.numpy()
    found["win"] = wins(found["gold"], reference[:, None])
    return found


def summaries(grades: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Means over posts, of the mean over a post's samples, and their standard errors."""
    return {name: mean_over_posts(values.mean(1)) for name, values in grades.items() if name != "logprob"}


@dataclass
class Args:
    """Measures a policy on fresh posts."""

    policy: str
    """folder of the policy: a run's output_dir or a checkpoint in it"""
    split: str = "validation"
    """validation, to choose by, or test or second_test, to report"""
    posts: int | None = None
    """the first so many; if not given, all"""
    samples: int = 2
    """completions sampled for each post"""
    greedy: bool = False
    """measure greedy completions as well"""
    seed: int = 1
    """of sampling"""


def main(args: Args):
    torch.set_num_threads(1)
    engine, posts = Engine(), fresh_posts(args.split, args.posts)
    policy = engine.policy(args.policy)
    found = {"sampled": summaries(grade(engine, policy, posts, args.samples, args.seed))}
    if args.greedy:
        found["greedy"] = summaries(grade(engine, policy, posts, 1, args.seed, temperature=0.0))
    print(json.dumps({"posts": len(posts), **found}, indent=2))


if __name__ == "__main__":
    main(tyro.cli(Args))
