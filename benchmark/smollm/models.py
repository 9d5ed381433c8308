"""Makes what the study of synopses compares RLOO with, by functions of rloo.py: models by SFT, and texts with grades.

    python benchmark/smollm/models.py sft --output_dir runs/sft
    python benchmark/smollm/models.py sft --source runs/sft --splits train --as_rloo 100 --output_dir runs/continued
    python benchmark/smollm/models.py best_of --source runs/sft --output_dir runs/best_of
    python benchmark/smollm/models.py cut --output_dir runs/cut

The commands of the study's rows are in ../study.py.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import synopses
import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import rloo  # noqa: E402

BASE = synopses.PREPARED / "base"
LONGEST = 128  # tokens of a prompt; SFT leaves out the few that are longer
LONGEST_SYNOPSIS = 20  # tokens that SFT reads of one
STOP = 2  # <|im_end|>
SHORT = 64  # --max_prompt_length of the study's RLOO
B = 8  # prompts of its updates
REWARD_LAYERS = 20  # of 30, of which the upper part is trained
PACKAGES, SAMPLES = 1_500, 4  # that the reward model learns from: packages, and samples of each
ARGS = rloo.Args(response_length=16, dtype="bfloat16", device="cpu")
GRADES = (synopses.closeness, synopses.rouge_l, synopses.keeps_all, synopses.plain_words)


def rows_of(*splits: str) -> list[dict]:
    return [row for split in splits for row in rloo.load_rows(str(synopses.PREPARED), split)]


def batch_of(items: list[tuple]) -> rloo.Batch:
    """Returns a Batch of items, each of which begins with an example and k completions, token ids up to the stop."""
    examples, completions, *_ = zip(*items, strict=True)
    k = len(completions[0])
    ids, _ = rloo.pad([lanes[j] for j in range(k) for lanes in completions])
    return rloo.make_batch(list(examples), ids.view(k, len(items), -1), [STOP])


# ---- Training --------------------------------------------------------------------------------------------------------


def of_like_length(items: list, size: int, seed: int) -> list[list]:
    """Returns all items in random batches, each of prompts of like length, which need little padding."""
    random = np.random.default_rng(seed)
    order, batches = random.permutation(len(items)), []
    for begin in range(0, len(items), 8 * size):
        part = sorted((items[i] for i in order[begin : begin + 8 * size]), key=lambda item: len(item[0]["prompt_ids"]))
        batches += [part[i : i + size] for i in range(0, len(part), size)]
    return [batches[i] for i in random.permutation(len(batches))]


def fit(master, model, batches: list[list], loss_of: Callable, folder: Path, learning_rate: float, all_layers=False):
    """Makes a step of AdamW on each batch, on the upper half of the layers and a head or on all weights. As in rloo.py
    a bfloat16 model is trained, with float32 weights and gradients. `loss_of(model, items)` is a sum over items."""
    layers = master.config.num_hidden_layers
    upper = ("score.", *(f"layers.{number}." for number in range(layers // 2, layers)))
    for part in (master, model):
        for name, weight in part.named_parameters():
            weight.requires_grad_(all_layers or any(layer in name for layer in upper))
    rloo.send_gradients(model, master)
    trained = [weight for weight in master.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0, fused=True)
    updates = []
    for step, items in enumerate(batches):
        begin = time.perf_counter()
        loss = loss_of(model, items) / len(items)
        loss.backward()
        rise, fall = (step + 1) / max(1, len(batches) // 20), 1 - step / len(batches)
        optimizer.param_groups[0]["lr"] = learning_rate * min(rise, fall)
        rloo.optimizer_step(ARGS, optimizer)
        rloo.copy_weights(model, master)
        updates.append({"update": step + 1, "loss": loss.item(), "time/train": time.perf_counter() - begin})
    master.set_attn_implementation("sdpa")
    master.save_pretrained(folder)
    rloo.append(folder / "metrics.jsonl", updates)


def sft(
    output_dir: Path,
    source: Path = BASE,
    splits: tuple[str, ...] = ("sft",),
    as_rloo: int = 0,
    all_layers: bool = False,
    learning_rate: float = 2e-4,
    seed: int = 1,
):
    """Trains on prompts and the maintainers' synopses, by means over pairs of the mean over tokens of -log π. as_rloo:
    make so many steps, on the packages that as many updates of RLOO with this seed read. 0: one pass over the splits.
    """

    def loss_of(model, items):
        batch = batch_of(items)
        logprobs, _ = rloo.completion_logprobs(model, batch, 1.0)
        return -(logprobs.sum(-1) / batch.response_mask.sum(-1)).sum()

    args = replace(ARGS, layout="plain")  # a prompt has one completion
    tokenizer = rloo.load_tokenizer(args, source)
    examples = [rloo.prepare_example(row, tokenizer) for row in rows_of(*splits)]
    longest = SHORT if as_rloo else LONGEST
    examples = [example for example in examples if len(example["prompt_ids"]) <= longest]
    if as_rloo:
        examples = rloo.examples_of_update(examples, seed, 0, as_rloo * B)
    texts = tokenizer([" " + example["columns"]["synopsis"] for example in examples])["input_ids"]
    items = [(example, [[*ids[: LONGEST_SYNOPSIS - 1], STOP]]) for example, ids in zip(examples, texts, strict=True)]
    batches = of_like_length(items, 32, seed)
    while len(batches) < as_rloo:  # another pass
        batches += of_like_length(items, 32, seed + len(batches))
    master, model = (rloo.read_model(args, source, dtype) for dtype in (torch.float32, torch.bfloat16))
    fit(master, model, batches[: as_rloo or None], loss_of, output_dir, learning_rate, all_layers)
    tokenizer.save_pretrained(output_dir)


# ---- Baselines that are texts ----------------------------------------------------------------------------------------


def samples_of(model, examples: list[dict], tokenizer, k: int, temperature: float, seed: int) -> list[tuple]:
    """Returns each example with the token ids and texts of k completions."""
    found = []
    for begin in range(0, len(examples), 100):
        rloo.set_seed(seed, begin)
        some = sorted(examples[begin : begin + 100], key=lambda example: len(example["prompt_ids"]))
        batch, _ = rloo.rollout(ARGS, model, some, k, temperature, [STOP])
        ids, texts = batch.completion_ids(), rloo.completion_texts(batch, tokenizer)
        found += [(example, ids[b :: len(some)], texts[b :: len(some)]) for b, example in enumerate(some)]
    return found


def read_judge(path: Path, dtype, **options):
    """Returns a reward model, whose head is in float32."""
    kind = transformers.AutoModelForSequenceClassification
    model = rloo.read_model(ARGS, path, dtype, kind, num_labels=1, may_lack=["score.weight"], **options)
    model.score.float()
    return model


def scores_of(judge, items: list[tuple]) -> torch.Tensor:
    """Returns scores (k, B): the head at the last tokens."""
    batch = batch_of(items)
    last = batch.response_mask.sum(-1)[..., None, None]
    hidden = torch.take_along_dim(rloo.completion_hidden(judge, batch), last, dim=2)  # (k, B, 1, H)
    return judge.score(hidden.squeeze(2).float()).squeeze(-1)


def train_judge(source: Path, samples: list[tuple], folder: Path, seed: int):
    """Trains a reward model, the lower layers of the SFT model and a head, for the closeness of samples. The loss is
    the squared error, in tenths, of scores (k, B) less the mean of their prompt: only differences between the
    completions of a prompt are learned."""

    def loss_of(model, items):
        scores = scores_of(model, items)
        gold = torch.tensor([item[2] for item in items]).T
        return (10 * (scores - scores.mean(0) - gold + gold.mean(0))).square().mean(0).sum()

    items = [(x, ids, synopses.closeness(texts, [x["columns"]["synopsis"]] * len(texts))) for x, ids, texts in samples]
    dtypes = (torch.float32, torch.bfloat16)
    master, model = (read_judge(source, dtype, num_hidden_layers=REWARD_LAYERS) for dtype in dtypes)
    torch.nn.init.normal_(master.score.weight, std=0.01)
    rloo.copy_weights(model, master)
    fit(master, model, of_like_length(items, 16, seed), loss_of, folder, learning_rate=1e-4)


def best_of(output_dir: Path, source: Path, n: int = 16, seed: int = 1):
    """Grades the sample that a reward model, trained for closeness, prefers among n of the SFT model `source`, for each
    test package."""
    tokenizer = rloo.load_tokenizer(ARGS, source)
    learned, test = ([rloo.prepare_example(row, tokenizer) for row in rows_of(split)] for split in ("reward", "test"))
    policy = rloo.read_model(ARGS, source, torch.bfloat16)
    samples = samples_of(policy, learned[:PACKAGES], tokenizer, SAMPLES, 1.0, seed)
    train_judge(source, samples, output_dir / "reward", seed)
    judge = read_judge(output_dir / "reward", torch.bfloat16)
    items = samples_of(policy, test, tokenizer, n, 0.7, seed)
    items.sort(key=lambda item: test.index(item[0]))
    texts = []
    for begin in range(0, len(items), 8):
        with torch.no_grad():
            best = scores_of(judge, items[begin : begin + 8]).argmax(0).tolist()
        texts += [item[2][j].strip() for item, j in zip(items[begin:], best)]
    write_grades(output_dir, texts)


def cut(output_dir: Path, seed: int = 1):
    """Grades words of the description, from one number to another that have the highest ROUGE-L in validation. The seed
    has no effect."""

    def cuts(rows, begin, end):
        return [" ".join(synopses.description(row["prompt"]).split()[begin:end]) for row in rows]

    validation = rows_of("validation")
    theirs = [row["synopsis"] for row in validation]
    ends = [(begin, begin + length) for begin in range(8) for length in range(2, 16)]
    begin, end = max(ends, key=lambda x: np.mean(synopses.rouge_l(cuts(validation, *x), theirs)))
    print(f"words {begin + 1} to {end}")
    write_grades(output_dir, cuts(rows_of("test"), begin, end))


def write_grades(folder: Path, texts: Sequence[str]):
    """Writes grades of a text for each test package, as an evaluation of rloo.py does."""
    rows = rows_of("test")
    columns = {name: [row[name] for row in rows] for name in ("synopsis", "package")}
    prompts = [row["prompt"] for row in rows]
    grades = {grade.__name__: grade(completions=texts, prompts=prompts, **columns) for grade in GRADES}
    evaluation = {"update": 0}
    for name, values in grades.items():
        evaluation[f"greedy/{name}"] = np.mean(values)
        evaluation[f"greedy/{name}_stderr"] = np.std(values, ddof=1) / len(values) ** 0.5
    of_each = [dict(zip(grades, values)) for values in zip(*grades.values(), strict=True)]
    labels = {"update": 0, "mode": "greedy"}
    samples = [labels | {"completion": text, "grades": found} for text, found in zip(texts, of_each, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    rloo.append(folder / "evaluations.jsonl", [evaluation])
    rloo.append(folder / "completions.jsonl", samples)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kinds = {function.__name__: function for function in (sft, best_of, cut)}
    tyro.extras.subcommand_cli_from_dict(kinds, use_underscores=True)
