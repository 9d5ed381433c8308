"""Makes what the study of word problems compares RLOO with: models by SFT, and grades of many samples.

    python benchmark/words/models.py sft --output_dir runs/sft
    python benchmark/words/models.py sft --source runs/sft --split train --steps 100 --output_dir runs/on_train
    python benchmark/words/models.py many --source runs/sft --output_dir runs/sft_many

The commands of the study's rows are in ../study.py. SFT is plain PyTorch.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Literal

import answers
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
TARGETS = {"solution": " {solution}", "answer": " #### {answer}"}
T = 72  # --response_length of the study


def rows_of(split: str) -> list[dict]:
    return runs.lines(PREPARED / f"{split}.jsonl")


def sft(
    output_dir: Path,
    source: Path = PREPARED / "base",
    split: str = "sft",
    target: Literal["solution", "answer"] = "solution",
    steps: int = 0,
    batch_size: int = 16,
    learning_rate: float = 5e-5,
    seed: int = 1,
):
    """Trains all weights on worked solutions, or on answers alone, of a split. steps: 0 makes one pass over the split.
    Forward passes are in bfloat16, weights and their gradients in float32."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).train()
    items = []  # token ids of a prompt and of what follows it
    for row in rows_of(split):
        target_ids = [*tokenizer(TARGETS[target].format(**row))["input_ids"], tokenizer.eos_token_id]
        items.append((tokenizer(row["prompt"])["input_ids"], target_ids))
    steps = steps or len(items) // batch_size
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
    """Returns the mean of -log π over all target tokens of a batch."""
    ids = torch.zeros(len(batch), max(len(prompt + target) for prompt, target in batch), dtype=torch.long)
    learned = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, target) in enumerate(batch):
        end = len(prompt + target)
        ids[row, :end] = torch.tensor(prompt + target)
        learned[row, len(prompt) : end] = True
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(ids).last_hidden_state  # no token attends to the padding behind it
        logits = model.lm_head(hidden[:, :-1][learned[:, 1:]])  # of the tokens before those that are learned
    return F.cross_entropy(logits.float(), ids[learned])


def many(
    output_dir: Path, source: Path, reference: Path | None = None, problems: int = 100, k: int = 16, seed: int = 1
):
    """Grades k samples at T = 1 for each of the first test problems: how often one is right (pass@k), and whether the
    most frequent answer is (majority, which is this row's greedy grade). reference: also the KL from this model."""
    args = rloo.Args(response_length=T, dtype="bfloat16", device="cpu", local_rollout_forward_batch_size=128)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    examples = [rloo.prepare_example(row, tokenizer) for row in rows_of("test")[:problems]]
    policy = rloo.read_model(args, str(source), torch.bfloat16)
    other = rloo.read_model(args, str(reference), torch.bfloat16) if reference else None
    samples, kl = [], []
    for begin in range(0, len(examples), 128 // k):
        rloo.set_seed(seed, begin)
        some = examples[begin : begin + 128 // k]
        batch, logprobs = rloo.rollout(args, policy, some, k, 1.0, [tokenizer.eos_token_id])
        texts = rloo.completion_texts(batch, tokenizer)
        samples += [texts[b :: len(some)] for b in range(len(some))]
        if other:
            with torch.no_grad():
                kl.append((logprobs - rloo.completion_logprobs(other, batch, 1.0)[0]).sum(-1).flatten())
    grades = [grades_of(texts, example["columns"]["answer"]) for texts, example in zip(samples, examples, strict=True)]
    right = [round(k * grade["sampled/correct"]) for grade in grades]  # samples of each problem
    evaluation = {"update": 0, "right": right} | ({"kl": torch.cat(kl).mean().item()} if kl else {})
    for name in grades[0]:
        values = [grade[name] for grade in grades]
        evaluation[name] = float(np.mean(values))
        evaluation[f"{name}_stderr"] = float(np.std(values, ddof=1) / len(values) ** 0.5)
    output_dir.mkdir(parents=True, exist_ok=True)
    rloo.append(output_dir / "evaluations.jsonl", [evaluation])
    label = {"update": 0, "mode": "greedy", "grades": {}}  # without grades: other rows have other problems
    lines = [label | {"completions": x, "columns": e["columns"]} for x, e in zip(samples, examples, strict=True)]
    rloo.append(output_dir / "completions.jsonl", lines)


def grades_of(texts: list[str], answer: str) -> dict[str, float]:
    """Returns the grades of a problem's samples. Samples without a number do not vote; of equally frequent answers the
    first one counts."""
    votes = Counter(number for number in map(answers.final_number, texts) if number is not None)
    right = answers.correct(texts, [answer] * len(texts))
    majority = bool(votes) and votes.most_common(1)[0][0] == float(answer)
    return {"greedy/correct": float(majority), "sampled/correct": float(np.mean(right)), "pass@16": max(right)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    tyro.extras.subcommand_cli_from_dict({"sft": sft, "many": many}, use_underscores=True)
