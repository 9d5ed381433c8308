"""Completions of a checkpoint, sampled or greedy, by the engine that rloo.py trains with, as JSON Lines for judge.py.

    python benchmark/tldr/complete.py --sft_model_path runs/my_run --output rloo.jsonl    # greedy; flags of the run
    python benchmark/tldr/complete.py --sft_model_path my/sft --output samples.jsonl --temperature 0.7 --n 4

One line per completion: {"post": number of the row in its split, "sample": 0 ... n - 1, "prompt": as in the dataset,
"completion": text, "reference": text or null, "tokens": length, "ended": whether it ended with a stop token,
"columns": the dataset's other columns, "model", "temperature", "seed"}. Flags have the names of rloo.py.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py

from judge import mistakes_in_a_line, parse, require, require_new, write_whole

import rloo


@dataclass
class Args:
    """Completions of held-out prompts, as JSON Lines."""

    sft_model_path: str  # checkpoint: a run's output_dir, a checkpoint in it, or a Hub id
    output: str  # .jsonl file; never overwritten
    model_name_or_path: str | None = None  # tokenizer; if not given, that of sft_model_path
    dataset_name: str | None = (
        None  # .jsonl file, folder of <split>.jsonl, or Hub id; default: the run's, or mini TL;DR
    )
    dataset_test_split: str | None = None  # split to complete; default: test, or what the run held out of its data
    posts: int | None = None  # number of posts to complete, from the first; if not given, all
    max_prompt_length: int | None = None  # in tokens; longer prompts are left out; default: the run's, or 512
    n: int = 1  # completions per prompt
    temperature: float = 0.0  # 0: greedy
    response_length: int | None = None  # maximum length of a completion, in tokens; default: the run's, or 53
    stop_token: str | None = None  # text of the token that ends a completion; default: the run's; "eos": all eos tokens
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the model
    seed: int = 1  # seed of sampling
    local_rollout_forward_batch_size: int = 64  # completions that are sampled together
    device: str | None = None  # if not given, cuda if there is one


def flags_of_run(checkpoint: str) -> dict:
    """The flags of the run that left a checkpoint, from the args.json beside or above it; {} if there is none."""
    for folder in (Path(checkpoint), Path(checkpoint).parent):
        if (folder / "args.json").is_file():
            return json.loads((folder / "args.json").read_text())
    return {}


def held_out(args: Args, run: dict, tokenizer) -> list[dict]:
    """The rows to complete: those of the split, or those that the run held out of the split on which it was trained."""
    found = rloo.load_rows(args.dataset_name, args.dataset_test_split or "test")
    if found is None and args.dataset_test_split is None and args.dataset_name == run.get("dataset_name"):
        _, rows = rloo.load_data(rloo.Args(**{name: run[name] for name in vars(rloo.Args()) if name in run}), tokenizer)
        found = [row["columns"] for row in rows]
    require(found is not None, f"--dataset_test_split {args.dataset_test_split}: {args.dataset_name} has no such split")
    return found


def main(args: Args):
    require_new(args.output, ".jsonl")
    run = flags_of_run(args.sft_model_path)
    defaults = {
        "dataset_name": str(rloo.MINI_TLDR),
        "max_prompt_length": 512,
        "response_length": 53,
        "stop_token": None,
    }
    for flag, default in defaults.items():
        if getattr(args, flag) is None:
            setattr(args, flag, run.get(flag, default))
    for flag in ("n", "posts", "max_prompt_length", "response_length", "local_rollout_forward_batch_size"):
        value = getattr(args, flag)
        require(value is None or value > 0, f"--{flag} {value}: must be above 0")
    require(args.temperature >= 0, f"--temperature {args.temperature}: must be at least 0")
    require(args.temperature or args.n == 1, f"--n {args.n}: greedy completions are all equal; set a --temperature")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rloo.start_processes(device)
    flags = rloo.Args(
        sft_model_path=args.sft_model_path,
        dtype=args.dtype,
        device=str(device),
        rloo_k=max(2, args.n),
        model_name_or_path=args.model_name_or_path or args.sft_model_path,
        response_length=args.response_length,
        stop_token=args.stop_token,
        stop_token_id=run.get("stop_token_id") if args.stop_token is None else None,
    )

    tokenizer = rloo.load_tokenizer(flags, "--model_name_or_path or --sft_model_path", flags.model_name_or_path)
    found = held_out(args, run, tokenizer)
    numbered = [row | {"post": number} for number, row in enumerate(found[: args.posts])]
    rows = rloo.prepare_rows(numbered, tokenizer, args.max_prompt_length, args.dataset_name)
    model = rloo.load_model(flags, "--sft_model_path", args.sft_model_path, trained=False)
    layout = rloo.choose_layout(model, flags, rows)
    sampling = {
        "response_length": args.response_length,
        "stop_ids": rloo.stop_token_ids(flags, model, tokenizer),
        "engine": "group" if layout == "group" else "hf",
        "chunk_size": args.local_rollout_forward_batch_size,
    }

    transformers.set_seed(args.seed)
    lines, size = [], max(1, args.local_rollout_forward_batch_size // args.n)
    with tqdm(total=len(rows), desc=Path(args.output).stem, unit="post") as bar:
        for part in (rows[i : i + size] for i in range(0, len(rows), size)):
            batch, _ = rloo.rollout(model, part, args.n, args.temperature, **sampling)
            texts, tokens = rloo.completion_texts(batch, tokenizer), batch.response_mask.sum(-1).tolist()
            for b, row in enumerate(part):
                columns = {
                    name: x
                    for name, x in row["columns"].items()
                    if name not in ("post", "prompt", "messages", "completion")
                }
                lines += [
                    json.dumps(
                        {
                            "post": row["columns"]["post"],
                            "sample": j,
                            "prompt": row["prompt"],
                            "completion": texts[j * len(part) + b],
                            "reference": row["reference"],
                            "tokens": tokens[j][b],
                            "ended": bool(batch.ended[j, b]),
                            "columns": columns,
                            "model": args.sft_model_path,
                            "temperature": args.temperature,
                            "seed": args.seed,
                        }
                    )
                    + "\n"
                    for j in range(args.n)
                ]
            bar.update(len(part))
    write_whole(args.output, "".join(lines))


if __name__ == "__main__":
    with mistakes_in_a_line():
        main(parse(Args))
