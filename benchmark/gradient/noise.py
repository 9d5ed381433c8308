"""How noisy are the gradient estimates of a real language model? By samples, with the gold judge of mini TL;DR.

    python benchmark/gradient/noise.py              # the embedded SFT policy: 11 minutes
    python benchmark/gradient/noise.py --policy runs/my_run --output trained.json
    python benchmark/gradient/noise.py --report     # the table of README.md again, from noise.json

16 completions of each of 2,048 prompts are sampled once. The gradient ∇ log π of each is computed and kept as a sketch:
what is asked for are inner products of gradients alone, which a sketch keeps, of all weights alike. At ratio 1 every
estimate is their sum, weighted by advantages, so that all estimators and all k use the same completions, each in
exactly one update, and all updates have equally many completions (with k = 2, 64 prompts of an update of 128; with k =
16, 8 prompts). Unlike in exact.py prompts are sampled as well, and their variance is part of an update's.

The target g* is the long-run mean gradient of rloo with k = 16, which is unbiased. What is compared with it comes from
other prompts: prompts stand in blocks, and only products across blocks are used, so that noise which two sides share
does not look like agreement. Standard errors: jackknife over blocks.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import tyro
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "study")]

import study  # noqa: E402

import rloo  # noqa: E402

K_MAX = 16  # completions per prompt that are sampled; every k divides it
KS = (2, 4, 8, 16)
ESTIMATORS = ("rloo", "grpo", "reinforce")  # drgrpo is rloo times (k - 1) / k
UPDATE = 128  # completions
BLOCK = UPDATE // min(KS)  # prompts
REWARDS = {"gold": "gold score", "win": "0/1: beats the reference"}


@dataclass
class Args:
    """Noise of gradient estimates on the embedded task."""

    policy: str = str(study.TASK / "sft")
    """folder of the policy; the reference is the SFT policy in any case"""
    num_prompts: int = 2048
    """16 completions each; rounded down to whole blocks of 64"""
    kl_coef: float = 0.05
    """β, which matters only if the policy is not the reference"""
    seed: int = 1
    """of the rollouts"""
    output: Path = HERE / "noise.json"
    """all numbers"""
    report: bool = False
    """only write the table, from the numbers that are there"""


class Sketch:
    """A random linear map of gradients to 2 · `size` numbers that keeps inner products, without bias and up to
    √(1 / size) of the norms: each weight goes twice, with a random sign, to one of `size` places (count sketch;
    Charikar et al. 2002)."""

    def __init__(self, weights: int, size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.size = size
        self.place = torch.randint(0, size, (2, weights), generator=generator)
        self.sign = torch.randint(0, 2, (2, weights), generator=generator) * 2.0 - 1

    def __call__(self, gradients: torch.Tensor) -> torch.Tensor:
        """(n, weights) to (n, 2 · size)."""
        halves = [
            gradients.new_zeros(len(gradients), self.size).index_add_(1, place, gradients * sign)
            for place, sign in zip(self.place, self.sign)
        ]
        return torch.cat(halves, dim=1) / math.sqrt(2)


def completion_gradients(policy, prompt: list[int], responses, mask, temperature: float) -> torch.Tensor:
    """∇ log π(y_j) of each completion of one prompt, (k, weights); responses, mask (k, R)."""
    weights = {name: weight.detach() for name, weight in policy.named_parameters()}
    R = int(mask.sum(-1).max())
    responses, mask = responses[:, :R], mask[:, :R]
    ids = torch.cat([torch.tensor([prompt]).expand(len(responses), -1), responses], dim=1)

    def logprob(weights: dict, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        options = {"input_ids": ids[None], "use_cache": False, "logits_to_keep": R + 1}
        logits = torch.func.functional_call(policy, weights, (), options).logits[0, :-1]
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1).gather(1, ids[-R:, None]).squeeze(1)
        return (logprobs * mask).sum()

    # Nothing is padded on the left, and what is padded on the right comes after all that counts: causal is enough.
    found = torch.func.vmap(torch.func.grad(logprob), in_dims=(None, 0, 0))(weights, ids, mask)
    return torch.cat([x.flatten(1) for x in found.values()], dim=1)


def to_updates(x: torch.Tensor, k: int, prompts: int) -> torch.Tensor:
    """(16, block, ...) to (updates, k, prompts, ...): every completion of a block of prompts in exactly one update."""
    x = x.unflatten(0, (-1, k)).unflatten(2, (-1, prompts))  # (16 / k, k, block / prompts, prompts, ...)
    return x.transpose(1, 2).flatten(0, 1)


def update_gradients(scores, kl, sketches, k: int, estimator: str, kl_coef: float) -> torch.Tensor:
    """g (updates, m) of a block of prompts, at ratio 1 the mean of A_j ∇ log π(y_j), A by rloo.py's function, called
    once per update; scores (16, block), kl (16, block, R), sketches (16, block, m)."""
    parts = (to_updates(x, k, UPDATE // k) for x in (scores, kl, sketches))
    return torch.stack(
        [
            torch.einsum("jb,jbm->m", rloo.advantage(rloo.rlhf_reward(s, kl, kl_coef), estimator), g) / UPDATE
            for s, kl, g in zip(*parts)
        ]
    )


class Products(NamedTuple):
    """Inner products of an estimator's gradients, by blocks of prompts (n); blocks are independent of each other."""

    square: torch.Tensor  # (n,): mean |g|² of the block's updates
    own: torch.Tensor  # (n, n): of the blocks' mean gradients
    target: torch.Tensor  # (n, n): block i's mean gradient with block j's of the target


def products(g: torch.Tensor, target: torch.Tensor) -> Products:
    """g (n, updates, m), target (n, m)."""
    mean = g.mean(1)
    return Products(g.square().sum(-1).mean(1), mean @ mean.T, mean @ target.T)


def across(x: torch.Tensor) -> torch.Tensor:
    """The mean of the products of different blocks: without bias, for noise of different blocks is independent."""
    return (x.sum() - x.diagonal().sum()) / (len(x) * (len(x) - 1))


def figures(found: dict[tuple[str, int], Products], keep: torch.Tensor) -> dict[tuple[str, int], dict[str, float]]:
    """Of each (estimator, k), from the blocks `keep`: an update's noise, and that over RLOO's at the same k."""
    target = across(found["rloo", K_MAX].own[keep][:, keep])  # |g*|²
    table, noise = {}, {}
    for key, p in found.items():
        signal, along = across(p.own[keep][:, keep]), across(p.target[keep][:, keep])
        trace = p.square[keep].mean() - signal
        noise[key] = (trace / (along.square() / target)).item()
        table[key] = {"noise": noise[key], "relative_noise": noise[key] / noise["rloo", key[1]]}  # RLOO comes first
    return table


def with_errors(gradients: dict[tuple[str, int], torch.Tensor]) -> list[dict]:
    """`figures` with their standard errors by the jackknife: all blocks but one, each in turn. Of each (estimator, k)
    the gradients are (blocks, updates, m)."""
    target = gradients["rloo", K_MAX].mean(1)
    found = {key: products(g, target) for key, g in gradients.items()}
    n = len(target)
    everything = torch.arange(n)
    without = [figures(found, everything[everything != i]) for i in range(n)]
    rows = []
    for key, row in figures(found, everything).items():
        said = {"estimator": key[0], "k": key[1]}
        for name, value in row.items():
            left_out = torch.tensor([other[key][name] for other in without], dtype=torch.float64)
            error = math.sqrt(n - 1) * left_out.std(correction=0).item()
            said |= {name: float(f"{value:.4g}"), f"{name}_stderr": float(f"{error:.2g}")}
        rows.append(said)
    return rows


def measure(args: Args) -> dict:
    torch.manual_seed(args.seed)
    engine = study.Engine()
    policy = engine.policy(args.policy)
    policy.requires_grad_(False)
    posts = study.read_lines(study.TASK / "train.jsonl")[: args.num_prompts // BLOCK * BLOCK]
    if len(posts) < 3 * BLOCK:
        sys.exit(f"noise.py: --num_prompts {args.num_prompts}: must be at least {3 * BLOCK}, 3 blocks")
    sketch = Sketch(sum(x.numel() for x in policy.parameters()), 2048, args.seed)
    gradients: dict[tuple, list] = {(name, e, k): [] for name in REWARDS for e in ESTIMATORS for k in KS}
    for begin in tqdm(range(0, len(posts), BLOCK), unit="block"):
        part = posts[begin : begin + BLOCK]
        policy.set_attn_implementation("sdpa")
        batch, logprobs = engine.rollout(policy, engine.rows(part), K_MAX, study.TEMPERATURE)
        with torch.no_grad():
            ref_logprobs = rloo.chunked_logprobs(engine.reference, batch, study.TEMPERATURE, "group", 256)
        kl = (logprobs - ref_logprobs) * batch.response_mask
        gold = torch.tensor(study.gold(rloo.completion_texts(batch, engine.tokenizer), part * K_MAX)).view(K_MAX, -1)
        reference = torch.tensor(study.gold([post["completion"] for post in part], part))
        scores = {"gold": gold, "win": (gold > reference).double()}
        policy.set_attn_implementation("eager")  # whose gradients vmap knows
        sketches = []
        for b, row in enumerate(batch.rows):
            completions = batch.responses[:, b], batch.response_mask[:, b]
            sketches.append(sketch(completion_gradients(policy, row["prompt_ids"], *completions, study.TEMPERATURE)))
        stacked = torch.stack(sketches, dim=1).double()  # (16, block, 2 · sketch)
        for (name, estimator, k), kept in gradients.items():
            kept.append(update_gradients(scores[name], kl.double(), stacked, k, estimator, args.kl_coef))
    tables = {
        name: with_errors({(e, k): torch.stack(x) for (reward, e, k), x in gradients.items() if reward == name})
        for name in REWARDS
    }
    return {"prompts": len(posts), "completions": K_MAX * len(posts), "update": UPDATE, "tables": tables}


def table(result: dict) -> str:
    """Noise of RLOO, and of the others over it."""
    rows = [["noise", *(f"k = {k}" for k in KS)]]
    for reward, title in REWARDS.items():
        found = {(row["estimator"], row["k"]): row for row in result["tables"][reward]}
        for estimator in ESTIMATORS:
            name = "noise" if estimator == "rloo" else "relative_noise"
            label = "RLOO" if estimator == "rloo" else f"{estimator.upper()} / RLOO"
            cells = [f"{found[estimator, k][name]:.2f} ± {found[estimator, k][f'{name}_stderr']:.2f}" for k in KS]
            rows.append([f"{label}, {title}", *cells])
    return study.markdown(rows)


def main(args: Args):
    torch.set_num_threads(1)
    if not args.report:
        said = {"command": "python benchmark/gradient/noise.py", "policy": Path(args.policy).name, "seed": args.seed}
        args.output.write_text(json.dumps(said | measure(args), indent=1) + "\n")
    result = json.loads(args.output.read_text())
    if args.output == HERE / "noise.json":
        study.insert(HERE / "README.md", {"noise": table(result)})
    else:
        print(table(result))


if __name__ == "__main__":
    main(tyro.cli(Args))
