"""Can the policy's network hold what best-of-n reaches? Fine-tunes the SFT policy on the best of n of its own samples.

    python benchmark/frontier/distil.py --output_dir runs/frontier/distil16
    python benchmark/frontier/distil.py --output_dir runs/quick --prompts 100 --epochs 1

For each training prompt n completions are sampled and the one with the highest score of the reward model is kept. The
policy is trained to maximise the log-likelihood of these completions, at the temperature at which they were sampled.
There is no policy gradient in it, so that only the network and the number of prompts limit what this policy reaches.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import measure
import torch
import transformers
import tyro

import rloo


def sample_best(engine: measure.Engine, rows: list[dict], n: int) -> list[tuple[dict, list[int], float]]:
    """The best of n samples of each row by the reward model: the row, its token ids and its score."""
    rows = sorted(rows, key=lambda row: len(row["prompt_ids"]))  # little padding
    found = []
    size, length = engine.args.local_rollout_forward_batch_size, engine.args.response_length
    for begin in range(0, len(rows), size // n):
        part = rows[begin : begin + size // n]
        batch, _ = rloo.rollout(
            engine.reference, part, n, measure.TEMPERATURE, length, engine.stop_ids, chunk_size=size
        )
        scores = rloo.score(engine.rewards["score"], (1.0,), batch)[0]  # (n, b)
        ids = batch.completion_ids()  # completion (j, b) is at j·b + b
        best = scores.argmax(0).tolist()
        found += [(row, ids[j * len(part) + b], float(scores[j, b])) for b, (row, j) in enumerate(zip(part, best))]
    return found


def nll(policy, pairs: list[tuple], stop_ids: list[int]) -> torch.Tensor:
    """Negative log-likelihood of each completion, (b,), in nats, at the temperature of sampling."""
    responses, real = rloo.pad([ids for _, ids, _ in pairs])
    batch = rloo.make_batch([row for row, *_ in pairs], responses[None], stop_ids, real[None])
    logprobs, _ = rloo.completion_logprobs(policy, batch, measure.TEMPERATURE)
    return -logprobs.sum(-1)[0]


def fine_tune(policy, pairs, held_out, stop_ids, learning_rate: float, epochs: int, batch_size: int = 32):
    """Maximises the log-likelihood of the pairs; prints and returns the negative one of those held out, their mean."""

    def held_out_nll() -> float:
        with torch.no_grad():
            return float(torch.cat([nll(policy, part, stop_ids) for part in batches(held_out, batch_size)]).mean())

    steps = epochs * (len(pairs) // batch_size)
    optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)
    loss = held_out_nll()
    print(f"before: {loss:.3f} nats", flush=True)
    for epoch in range(epochs):
        order = torch.randperm(len(pairs)).tolist()
        for part in batches([pairs[i] for i in order], batch_size):
            if len(part) == batch_size:
                nll(policy, part, stop_ids).mean().backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        loss = held_out_nll()
        print(f"epoch {epoch + 1}: {loss:.3f} nats", flush=True)
    return loss


def batches(items: list, size: int) -> list[list]:
    return [items[begin : begin + size] for begin in range(0, len(items), size)]


def build(folder: Path, n: int, prompts: int, learning_rate: float = 5e-4, epochs: int = 3) -> dict[str, float]:
    """Trains a policy, saves it in `folder`, and says what that took."""
    start = time.process_time()
    transformers.set_seed(1)
    engine = measure.Engine()
    rows = rloo.load_rows(str(measure.TASK), "train")[:prompts]
    pairs = sample_best(engine, engine.rows(rows), n)
    sampled = time.process_time()
    print(f"{len(pairs)} completions, mean score {sum(score for *_, score in pairs) / len(pairs):.3f}", flush=True)
    order = torch.randperm(len(pairs)).tolist()
    held_out = [pairs[i] for i in order[: len(pairs) // 20]]
    policy = rloo.load_model(engine.args, "--policy", str(measure.TASK / "sft"), trained=True)
    loss = fine_tune(
        policy, [pairs[i] for i in order[len(pairs) // 20 :]], held_out, engine.stop_ids, learning_rate, epochs
    )
    policy.save_pretrained(folder)
    engine.tokenizer.save_pretrained(folder)
    seconds = {"seconds_of_sampling": sampled - start, "seconds_of_training": time.process_time() - sampled}
    return {key: round(value) for key, value in seconds.items()} | {"held_out_nll": round(loss, 3)}


@dataclass
class Args:
    """Fine-tunes the SFT policy on the best of n of its own samples."""

    output_dir: Path
    """folder of the policy"""
    n: int = 16
    """samples of each prompt, of which the best is kept"""
    prompts: int = 10_000
    """the first so many training prompts"""
    learning_rate: float = 5e-4
    """falls linearly to 0"""
    epochs: int = 3


def main(args: Args):
    torch.set_num_threads(1)
    print(build(args.output_dir, args.n, args.prompts, args.learning_rate, args.epochs))


if __name__ == "__main__":
    main(tyro.cli(Args))
