"""What the study of synopses trains and grades besides RLOO, by functions of rloo.py: SFT, a reward model, baselines.

    python benchmark/smollm/models.py sft --output_dir runs/sft
    python benchmark/smollm/models.py sft --splits sft train --output_dir runs/sft_all
    python benchmark/smollm/models.py sft --source runs/sft --as_rloo 100 --all_layers --output_dir runs/continued
    python benchmark/smollm/models.py reward --source runs/sft --output_dir runs/reward
    python benchmark/smollm/models.py best_of --source runs/sft --output_dir runs/best_of
    python benchmark/smollm/models.py cut --output_dir runs/cut

sft       on prompts and the maintainers' synopses; --as_rloo N: N steps on the packages of a run of N updates
reward    a reward model: the lower 20 of the SFT model's 30 layers and a head, for the closeness of four of its samples
best_of   trains that reward model, and takes its favorite among 16 of the SFT model's samples of each test package
cut       the words of the description, from one number to another, that have the highest ROUGE-L in validation
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import synopses
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
import rloo  # noqa: E402

LONGEST = 128  # tokens of a prompt; SFT leaves out the few that are longer
LONGEST_SYNOPSIS = 20  # tokens that SFT reads of one
STOP = 2  # <|im_end|>
SHORT = 64  # --max_prompt_length of the study's RLOO
B = 8  # prompts of its updates
REWARD_LAYERS = 20  # of 30, of which the upper part is trained
PACKAGES, SAMPLES = 1_500, 4  # that the reward model learns from: packages, and samples of each
GRADES = (synopses.closeness, synopses.rouge_l, synopses.keeps_all, synopses.plain_words)


def flags(layout: str = "group", k: int = SAMPLES) -> rloo.Args:
    return rloo.Args(layout=layout, rloo_k=k, response_length=16, temperature=1.0, dtype="bfloat16", device="cpu")


def examples_of(splits: Sequence[str], tokenizer) -> list[dict]:
    rows = [row for split in splits for row in rloo.load_rows(str(synopses.PREPARED), split)]
    return [rloo.prepare_example(row, tokenizer) for row in rows]


def batch_of(items: list[tuple[dict, list[list[int]]]]) -> rloo.Batch:
    """Examples with k completions each, as token ids up to the first stop."""
    examples, completions = zip(*items, strict=True)
    k = len(completions[0])
    longest = max(len(ids) for lanes in completions for ids in lanes)
    rows = [lanes[j] + [STOP] * (longest - len(lanes[j])) for j in range(k) for lanes in completions]  # (k, B)
    return rloo.make_batch(list(examples), torch.tensor(rows).view(k, -1, longest), [STOP])


# ---- Training --------------------------------------------------------------------------------------------------------


def of_like_length(items: list, size: int, seed: int) -> list[list]:
    """All items in random batches, each of prompts of like length, which need little padding."""
    random = np.random.default_rng(seed)
    order, batches = random.permutation(len(items)), []
    for begin in range(0, len(items), 8 * size):
        part = sorted((items[i] for i in order[begin : begin + 8 * size]), key=lambda item: len(item[0]["prompt_ids"]))
        batches += [part[i : i + size] for i in range(0, len(part), size)]
    return [batches[i] for i in random.permutation(len(batches))]


def fit(load: Callable, batches: list[list], loss_of: Callable, folder: Path, learning_rate: float, all_layers=False):
    """A step of AdamW on each batch, on the upper half of the layers and a head or on all weights. As in rloo.py a
    bfloat16 model is trained, with float32 weights and gradients. `load(dtype)` reads the model; `loss_of(model,
    items)` is a sum over items."""
    master, model = load(torch.float32), load(torch.bfloat16)
    if hasattr(master, "score"):
        model.score.float()
        torch.nn.init.normal_(master.score.weight, std=0.01)
        rloo.copy_weights(model, master)
    layers = master.config.num_hidden_layers
    upper = tuple(f"layers.{number}." for number in range(layers // 2, layers))
    for part in (master, model):
        for name, weight in part.named_parameters():
            weight.requires_grad_(all_layers or name == "score.weight" or any(layer in name for layer in upper))
    rloo.send_gradients(model, master)
    trained = [weight for weight in master.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0, fused=True)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w", buffering=1) as log:
        for step, items in enumerate(batches):
            begin = time.perf_counter()
            loss = loss_of(model, items) / len(items)
            loss.backward()
            rise, fall = (step + 1) / max(1, len(batches) // 20), 1 - step / len(batches)
            optimizer.param_groups[0]["lr"] = learning_rate * min(rise, fall)
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            rloo.copy_weights(model, master)
            line = {"update": step + 1, "loss": loss.item(), "time/train": time.perf_counter() - begin}
            log.write(json.dumps(line) + "\n")
    master.set_attn_implementation("sdpa")
    master.save_pretrained(folder)


def sft(args, tokenizer):
    """The loss is the mean over pairs of the mean over tokens of -log π."""

    def loss_of(model, items):
        batch = batch_of(items)
        logprobs, _ = rloo.completion_logprobs(model, batch, 1.0)
        return -(logprobs.sum(-1) / batch.response_mask.sum(-1)).sum()

    examples = examples_of(args.splits, tokenizer)
    if args.as_rloo:
        examples = [example for example in examples if len(example["prompt_ids"]) <= SHORT]
        examples = rloo.examples_of_update(examples, args.seed, 0, args.as_rloo * B)
    examples = [example for example in examples if len(example["prompt_ids"]) <= LONGEST]
    texts = tokenizer([" " + example["columns"]["synopsis"] for example in examples])["input_ids"]
    items = [(example, [[*ids[: LONGEST_SYNOPSIS - 1], STOP]]) for example, ids in zip(examples, texts, strict=True)]
    batches = of_like_length(items, 32, args.seed)
    while len(batches) < args.as_rloo:  # another pass
        batches += of_like_length(items, 32, args.seed + len(batches))
    batches = batches[: args.as_rloo or None]
    load = partial(rloo.read_model, flags("plain"), args.source)  # a prompt has one completion
    fit(load, batches, loss_of, args.output_dir, args.learning_rate, args.all_layers)
    tokenizer.save_pretrained(args.output_dir)


# ---- The reward model ------------------------------------------------------------------------------------------------


def samples_of(
    model, examples: list[dict], tokenizer, k: int, temperature: float = 1.0
) -> list[tuple[dict, list[list[int]], list[str]]]:
    """Each example with the token ids and texts of k completions."""
    found = []
    for begin in range(0, len(examples), 100):
        rloo.set_seed(1, begin)
        some = sorted(examples[begin : begin + 100], key=lambda example: len(example["prompt_ids"]))
        batch, _ = rloo.rollout(flags(k=k), model, some, k, temperature, [STOP])
        ids, texts = batch.completion_ids(), rloo.completion_texts(batch, tokenizer)
        found += [(example, ids[b :: len(some)], texts[b :: len(some)]) for b, example in enumerate(some)]
    return found


def scores_of(model, items: list[tuple]) -> torch.Tensor:
    """Scores (k, B): the head, in float32, at the last tokens."""
    batch = batch_of(items)
    hidden = rloo.completion_hidden(model, batch)
    last = batch.response_mask.sum(-1)[..., None, None].expand(-1, -1, 1, hidden.shape[-1])
    return model.score(hidden.gather(2, last).squeeze(2).float()).squeeze(-1)


def reward(args, tokenizer):
    """The loss is the squared error, in tenths, of scores (k, B) less the mean of their prompt: only differences
    between the completions of a prompt are learned."""

    def loss_of(model, items):
        scores = scores_of(model, [item[:2] for item in items])
        gold = torch.tensor([item[2] for item in items]).T
        return (10 * (scores - scores.mean(0) - gold + gold.mean(0))).square().mean(0).sum()

    policy = rloo.read_model(flags(), args.source, torch.bfloat16)
    items = []
    for example, ids, texts in samples_of(policy, examples_of(["reward"], tokenizer)[:PACKAGES], tokenizer, SAMPLES):
        items.append((example, ids, synopses.closeness(texts, [example["columns"]["synopsis"]] * len(texts))))
    load = partial(read_judge, args.source, num_hidden_layers=REWARD_LAYERS)
    fit(load, of_like_length(items, 16, 1), loss_of, args.output_dir, learning_rate=1e-4)
    tokenizer.save_pretrained(args.output_dir)


def read_judge(path, dtype, **options):
    return rloo.read_model(
        flags(),
        path,
        dtype,
        transformers.AutoModelForSequenceClassification,
        num_labels=1,
        may_lack=["score.weight"],
        **options,
    )


# ---- Baselines that are texts ----------------------------------------------------------------------------------------


def write_grades(folder: Path, examples: list[dict], texts: list[str]):
    """Writes the mean grades of a text of each example, as an evaluation of rloo.py does."""
    rows = {name: [example["columns"][name] for example in examples] for name in ("synopsis", "package")}
    rows["prompts"] = [example["prompt"] for example in examples]
    samples = [{"update": 0, "mode": "greedy", "completion": text, "grades": {}} for text in texts]
    evaluation = {"update": 0}
    for grade in GRADES:
        values = grade(completions=texts, **rows)
        for sample, value in zip(samples, values, strict=True):
            sample["grades"][grade.__name__] = value
        evaluation[f"greedy/{grade.__name__}"] = np.mean(values)
        evaluation[f"greedy/{grade.__name__}_stderr"] = np.std(values, ddof=1) / len(values) ** 0.5
    folder.mkdir(parents=True, exist_ok=True)
    for file, lines in (("evaluations", [evaluation]), ("completions", samples)):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def best_of(args, tokenizer, n: int = 16):
    folder = args.output_dir / "reward"
    if not (folder / "model.safetensors").is_file():
        reward(argparse.Namespace(source=args.source, output_dir=folder), tokenizer)
    judge = read_judge(folder, torch.bfloat16)
    judge.score.float()
    policy = rloo.read_model(flags(), args.source, torch.bfloat16)
    examples = examples_of(["test"], tokenizer)
    items = samples_of(policy, examples, tokenizer, n, temperature=0.7)
    items.sort(key=lambda item: examples.index(item[0]))
    texts = []
    for begin in range(0, len(items), 8):
        some = items[begin : begin + 8]
        with torch.no_grad():
            best = scores_of(judge, [item[:2] for item in some]).argmax(0).tolist()
        texts += [item[2][j].strip() for item, j in zip(some, best, strict=True)]
    write_grades(args.output_dir, [item[0] for item in items], texts)


def cut(args, tokenizer):
    def cuts(examples, begin, end):
        return [" ".join(synopses.description(x["prompt"]).split()[begin:end]) for x in examples]

    validation, test = (examples_of([split], tokenizer) for split in ("validation", "test"))
    theirs = [example["columns"]["synopsis"] for example in validation]
    ends = [(begin, begin + length) for begin in range(8) for length in range(2, 16)]
    begin, end = max(ends, key=lambda x: np.mean(synopses.rouge_l(cuts(validation, *x), theirs)))
    print(f"words {begin + 1} to {end}")
    write_grades(args.output_dir, test, cuts(test, begin, end))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {function.__name__: function for function in (sft, reward, best_of, cut)}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("--source", type=Path, default=synopses.PREPARED / "base", help="model that is read")
    parser.add_argument("--splits", nargs="+", default=["sft"], help="that SFT trains on")
    parser.add_argument("--as_rloo", type=int, default=0, help="steps of SFT, on the packages of as many updates")
    parser.add_argument("--all_layers", action="store_true", help="train all weights, not the upper half of the layers")
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output_dir", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rloo.set_seed(args.seed)
    kinds[args.kind](args, transformers.AutoTokenizer.from_pretrained(args.source))


if __name__ == "__main__":
    main()
