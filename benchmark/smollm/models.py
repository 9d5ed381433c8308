"""What the chain needs besides RLOO: SFT, samples, a reward model that learns from pairs of them. All by functions of
rloo.py, so that a prompt is read once for its completions."""

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))
import judges  # noqa: E402

import rloo  # noqa: E402

T, TEMPERATURE = 16, 1.0  # tokens of a completion at most
LONGEST_SYNOPSIS = 20  # tokens that SFT reads of one
LONGEST = 128  # tokens of a prompt; the few longer ones are left out here
STOP = 2  # <|im_end|>
REWARD_LAYERS = 20  # of 30, of which the upper half is trained


def flags(layout: str = "group", k: int = 4) -> rloo.Args:
    lengths = {"response_length": T, "max_prompt_length": LONGEST, "local_rollout_forward_batch_size": 64}
    return rloo.Args(layout=layout, rloo_k=k, dtype="bfloat16", device="cpu", **lengths)


def load(path: Path, dtype=torch.bfloat16, kind=transformers.AutoModelForCausalLM, layout="group", **options):
    """A model as rloo.py loads it, and its tokenizer."""
    model = rloo.read_model(flags(), path, dtype, kind, **options)
    if hasattr(model, "score"):
        model.score.float()
    rloo.choose_layout(flags(layout), model, LONGEST)
    return model, transformers.AutoTokenizer.from_pretrained(path)


def read_examples(rows: list[dict], tokenizer) -> list[dict]:
    """The examples of rows whose prompts are short enough."""
    examples = [rloo.prepare_example(row, tokenizer) for row in rows]
    return [example for example in examples if len(example["prompt_ids"]) <= LONGEST]


def batch_of(examples: Sequence[dict], completions: Sequence[list[list[int]]]) -> rloo.Batch:
    """Prompts with k completions each, as token ids up to the first stop."""
    k = len(completions[0])
    longest = max(len(ids) for own in completions for ids in own)
    rows = [own[j] + [STOP] * (longest - len(own[j])) for j in range(k) for own in completions]  # in the order (k, B)
    return rloo.make_batch(list(examples), torch.tensor(rows).view(k, -1, longest), [STOP])


def of_like_length(items: list, size: int, seed: int) -> list[list]:
    """All items in random batches, each of prompts of like length, which need little padding."""
    random = np.random.default_rng(seed)
    order, batches = random.permutation(len(items)), []
    for begin in range(0, len(items), 8 * size):
        part = sorted((items[i] for i in order[begin : begin + 8 * size]), key=lambda item: len(item[0]["prompt_ids"]))
        batches += [part[i : i + size] for i in range(0, len(part), size)]
    return [batches[i] for i in random.permutation(len(batches))]


def fit(source: Path, items: list, loss_of: Callable, out: Path, size: int, learning_rate: float, **options):
    """One epoch of AdamW on the upper half of the layers and a reward model's head, and saves. As in rloo.py a bfloat16
    model is trained, with float32 weights and gradients. `loss_of` (model, items) is a sum over items: (example,
    completions, ...)."""
    out.mkdir(parents=True, exist_ok=True)
    (master, tokenizer), (model, _) = (load(source, dtype, **options) for dtype in (torch.float32, torch.bfloat16))
    if hasattr(master, "score"):
        torch.nn.init.normal_(master.score.weight, std=0.01)
    rloo.copy_weights(model, master)
    layers = master.config.num_hidden_layers
    upper = tuple(f"layers.{number}." for number in range(layers // 2, layers))
    for name, weight in model.named_parameters():
        if name == "score.weight" or any(layer in name for layer in upper):
            own = master.get_parameter(name).requires_grad_(True)
            weight.requires_grad_(True).register_post_accumulate_grad_hook(partial(rloo.add_gradient, own))
    trained = list(rloo.trained_weights(master).values())
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0, fused=True)
    batches = of_like_length(items, size, seed=1)
    with (out / "log.jsonl").open("w", buffering=1) as log:
        for step, chosen in enumerate(batches):
            begin = time.perf_counter()
            loss = loss_of(model, chosen) / len(chosen)
            loss.backward()
            rise, fall = (step + 1) / max(1, len(batches) // 20), 1 - step / len(batches)
            optimizer.param_groups[0]["lr"] = learning_rate * min(rise, fall)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rloo.copy_weights(model, master)
            line = {"step": step + 1, "items": len(chosen), "loss": loss.item(), "seconds": time.perf_counter() - begin}
            log.write(json.dumps(line) + "\n")
    master.set_attn_implementation("sdpa")
    for part in (master, tokenizer):
        part.save_pretrained(out)


# ---- SFT -------------------------------------------------------------------------------------------------------------


def sft(source: Path, rows: list[dict], out: Path, learning_rate: float = 2e-4, size: int = 32):
    """Trains on prompts and synopses: the mean over pairs of the mean over tokens of -log π."""

    def loss_of(model, items):
        batch = batch_of(*zip(*items, strict=True))
        logprobs, _ = rloo.completion_logprobs(model, batch, 1.0)
        return -(logprobs.sum(-1) / batch.response_mask.sum(-1)).sum()

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    examples = read_examples(rows, tokenizer)
    texts = tokenizer([" " + example["columns"]["synopsis"] for example in examples])["input_ids"]
    items = [(example, [ids[: LONGEST_SYNOPSIS - 1] + [STOP]]) for example, ids in zip(examples, texts, strict=True)]
    fit(source, items, loss_of, out, size, learning_rate, layout="plain")  # a prompt has one completion


# ---- Samples ---------------------------------------------------------------------------------------------------------


def sample(policy: Path, rows: list[dict], k: int, out: Path):
    """k completions of each prompt, with the judges' grades, into a file."""
    model, tokenizer = load(policy)
    lines = []
    for begin in range(0, len(rows), 100):
        rloo.set_seed(1)
        examples = read_examples(rows[begin : begin + 100], tokenizer)
        examples = sorted(examples, key=lambda example: len(example["prompt_ids"]))
        batch, _ = rloo.rollout(flags(k=k), model, examples, k, TEMPERATURE, [STOP])
        texts = rloo.completion_texts(batch, tokenizer)
        synopses = [example["columns"]["synopsis"] for example in examples]
        found = {"ids": batch.completion_ids(), "text": texts}
        found |= {"closeness": judges.closeness(texts, synopses * k), "rouge_l": judges.rouge_l(texts, synopses * k)}
        for b, example in enumerate(examples):
            row = {"package": example["columns"]["package"], "prompt": example["prompt"], "synopsis": synopses[b]}
            row |= {name: values[b :: len(examples)] for name, values in found.items()}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    out.write_text("".join(lines), encoding="utf-8")


# ---- The reward model ------------------------------------------------------------------------------------------------


def centred_error(scores: torch.Tensor, gold: torch.Tensor) -> torch.Tensor:
    """Squared error in tenths, (B,), of scores (k, B), of each prompt less their mean: only differences are learned."""
    return (10 * (scores - scores.mean(0) - gold + gold.mean(0))).square().mean(0)


def agreement(scores: torch.Tensor, gold: torch.Tensor, undecided: float = 0.0) -> float:
    """Share of the pairs of (k, B), `undecided` ones aside, that both order alike; equal scores count half."""
    better = gold[:, None] > gold[None] + undecided
    margin = scores[:, None] - scores[None]
    return (((margin > 0) + 0.5 * (margin == 0)) * better).sum().item() / better.sum().item()


def scores_of(model, batch: rloo.Batch) -> torch.Tensor:
    """Scores (k, B) of completions: the head, in float32, at their last tokens."""
    hidden = rloo.completion_hidden(model, batch)
    last = batch.response_mask.sum(-1)[..., None, None].expand(-1, -1, 1, hidden.shape[-1])
    return model.score(hidden.gather(2, last).squeeze(2).float()).squeeze(-1)


@torch.no_grad()
def score_samples(model, rows: list[dict], tokenizer) -> torch.Tensor:
    """Scores (k, B) of the completions of rows as `sample` writes them."""
    examples = [{"prompt_ids": ids} for ids in tokenizer([row["prompt"] for row in rows])["input_ids"]]
    ids = [row["ids"] for row in rows]
    batches = [batch_of(examples[i : i + 8], ids[i : i + 8]) for i in range(0, len(rows), 8)]
    return torch.cat([scores_of(model, batch) for batch in batches], dim=1)


def reward_model(source: Path, samples: list[dict], out: Path, learning_rate: float = 1e-4, size: int = 16):
    """The lower REWARD_LAYERS layers of the SFT model with a head for closeness, up to a constant of each prompt."""
    rloo.set_seed(1)

    def loss_of(model, items):
        examples, completions, gold = zip(*items, strict=True)
        return centred_error(scores_of(model, batch_of(examples, completions)), torch.tensor(gold).T).sum()

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    items = [({"prompt_ids": tokenizer(x["prompt"])["input_ids"]}, x["ids"], x["closeness"]) for x in samples]
    kind = transformers.AutoModelForSequenceClassification
    fit(source, items, loss_of, out, size, learning_rate, kind=kind, num_labels=1, num_hidden_layers=REWARD_LAYERS)
