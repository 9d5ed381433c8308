"""Makes what the study of Countdown compares RLOO with: models by SFT, and grades of many samples.

    python benchmark/countdown/models.py sft --output_dir runs/sft
    python benchmark/countdown/models.py sft --source runs/sft --split train --steps 120 --output_dir runs/on_train
    python benchmark/countdown/models.py many --source runs/sft --output_dir runs/sft_many

The commands of the study's rows are in ../study.py. SFT is plain PyTorch, in float32.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

import expression
import numpy as np
import torch
import torch.nn.functional as F
import transformers
import tyro

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
import runs  # noqa: E402

import rloo  # noqa: E402

PREPARED = HERE / "prepared"
T = 16  # --response_length of the study
K = 16  # samples of a problem in `many`


def sft(
    output_dir: Path,
    source: Path = PREPARED / "base",
    split: str = "sft",
    steps: int = 40,
    batch_size: int = 16,
    learning_rate: float = 1e-4,
    seed: int = 1,
):
    """Trains all weights on the solutions of a split, in as many passes as the steps make."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    items = []  # token ids of a prompt and of what follows it
    for row in runs.lines(PREPARED / f"{split}.jsonl"):
        solution = [*tokenizer(f" {row['solution']}")["input_ids"], tokenizer.eos_token_id]
        items.append((tokenizer(row["prompt"])["input_ids"], solution))
    random, order = np.random.default_rng(seed), []
    while len(order) < steps * batch_size:
        order += random.permutation(len(items)).tolist()  # another pass
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)
    updates = []
    for step in range(steps):
        begin = time.perf_counter()
        loss = loss_of(model, [items[i] for i in order[step * batch_size :][:batch_size]])
        loss.backward()
        rise, fall = (step + 1) / max(1, steps // 20), 1 - step / steps
        optimizer.param_groups[0]["lr"] = learning_rate * min(rise, fall)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        updates.append({"update": step + 1, "loss": loss.item(), "time/train": time.perf_counter() - begin})
        print(json.dumps(updates[-1]), flush=True)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    rloo.append(output_dir / "metrics.jsonl", updates)


def loss_of(model, batch: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Returns the mean of -log π over all tokens of a batch's solutions."""
    ids = torch.zeros(len(batch), max(len(prompt + solution) for prompt, solution in batch), dtype=torch.long)
    learned = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, solution) in enumerate(batch):
        end = len(prompt + solution)
        ids[row, :end] = torch.tensor(prompt + solution)
        learned[row, len(prompt) : end] = True
    hidden = model.model(ids).last_hidden_state  # no token attends to the padding behind it
    logits = model.lm_head(hidden[:, :-1][learned[:, 1:]])  # of the tokens before those that are learned
    return F.cross_entropy(logits, ids[learned])


def many(output_dir: Path, source: Path, problems: int = 200, seed: int = 1):
    """Grades K samples at T = 1 for each of the first test problems: how often one is right (pass@k), and whether the
    most frequent one is (majority, which is this row's greedy grade)."""
    args = rloo.Args(response_length=T, dtype="float32", device="cpu", local_rollout_forward_batch_size=256)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    examples = [rloo.prepare_example(row, tokenizer) for row in runs.lines(PREPARED / "test.jsonl")[:problems]]
    policy = rloo.read_model(args, str(source), torch.float32)
    rloo.set_seed(seed)
    batch, _ = rloo.rollout(args, policy, examples, K, 1.0, [tokenizer.eos_token_id])
    texts = rloo.completion_texts(batch, tokenizer)
    samples = [texts[b :: len(examples)] for b in range(len(examples))]
    grades = [grades_of(own, example["columns"]) for own, example in zip(samples, examples, strict=True)]
    evaluation = {"update": 0, "right": [round(K * grade["sampled/correct"]) for grade in grades]}
    for name in grades[0]:
        values = [grade[name] for grade in grades]
        evaluation[name] = float(np.mean(values))
        evaluation[f"{name}_stderr"] = float(np.std(values, ddof=1) / len(values) ** 0.5)
    output_dir.mkdir(parents=True, exist_ok=True)
    rloo.append(output_dir / "evaluations.jsonl", [evaluation])
    label = {"update": 0, "mode": "greedy", "grades": {}}  # without grades: other rows have other problems
    lines = [label | {"completions": x, "columns": e["columns"]} for x, e in zip(samples, examples, strict=True)]
    rloo.append(output_dir / "completions.jsonl", lines)


def grades_of(texts: list[str], columns: dict) -> dict[str, float]:
    """Returns the grades of a problem's samples; of equally frequent ones the first counts."""
    problem = {name: [columns[name]] * len(texts) for name in ("numbers", "target")}
    right = expression.correct(texts, **problem)
    (frequent, _), *_ = Counter(texts).most_common(1)
    majority = right[texts.index(frequent)]
    return {"greedy/correct": majority, "sampled/correct": float(np.mean(right)), "pass@16": max(right)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.extras.subcommand_cli_from_dict({"sft": sft, "many": many}, use_underscores=True)
