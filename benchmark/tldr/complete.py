"""Completions of a checkpoint, sampled or greedy, by the engine that rloo.py trains with, as JSON Lines for judge.py.

    python benchmark/tldr/complete.py --sft_model_path runs/my_run --output rloo.jsonl    # greedy; flags of the run
    python benchmark/tldr/complete.py --sft_model_path my/sft --output samples.jsonl --temperature 0.7 --n 4

One line per completion: {"post": number of the row in its split, "sample": 0 ... n - 1, "prompt": as in the dataset,
"completion": text, "reference": text or null, "ended": whether it ended with a stop token, "columns": the dataset's
other columns, "model", "temperature", "seed"}. Flags have the names of rloo.py; those that are not given are taken from
the run's args.json, if there is one, or are rloo.py's defaults.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers
import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py

from judge import require, write_whole

import rloo


@dataclass
class Args:
    """Completions of held-out prompts, as JSON Lines."""

    sft_model_path: str  # checkpoint: a run's output_dir, a checkpoint in it, or a Hub id
    output: str  # .jsonl file
    dataset_name: str | None = None  # as that of rloo.py; default: the run's, or mini TL;DR
    dataset_test_split: str = "test"  # split to complete
    posts: int | None = None  # number of posts to complete, from the first; if not given, all
    max_prompt_length: int | None = None  # in tokens; longer prompts are left out
    n: int = 1  # completions per prompt
    temperature: float = 0.0  # 0: greedy
    response_length: int | None = None  # maximum length of a completion, in tokens
    stop_token: str | None = None  # text of the token that ends a completion; "eos": all eos tokens
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


def line_of(row: dict, completion: str, ended: bool, sample: int, args: Args) -> str:
    """A line of the output. A plain text's reference begins with a space, as completions do."""
    fields = ("post", "prompt", "messages", "completion")
    columns = {name: x for name, x in row["columns"].items() if name not in fields}
    reference = row["reference"]
    if reference is not None and isinstance(row["prompt"], str):
        reference = " " + reference.strip()
    found = {"post": row["columns"]["post"], "sample": sample, "prompt": row["prompt"], "completion": completion}
    found |= {"reference": reference, "ended": ended, "columns": columns}
    return json.dumps(found | {"model": args.sft_model_path, "temperature": args.temperature, "seed": args.seed}) + "\n"


def main(args: Args):
    require(args.output.endswith(".jsonl"), f"--output {args.output}: must end in .jsonl")
    require(args.temperature > 0 or args.n == 1, f"--n {args.n}: greedy completions are all equal; set a --temperature")
    run = flags_of_run(args.sft_model_path)
    names = ("dataset_name", "max_prompt_length", "response_length", "stop_token", "stop_token_id")
    taken = {name: run[name] for name in names if name in run}
    taken |= {name: x for name, x in vars(args).items() if name in names and x is not None}
    if args.stop_token is not None:
        taken.pop("stop_token_id", None)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    path = args.sft_model_path
    taken |= {"sft_model_path": path, "model_name_or_path": path, "dtype": args.dtype, "device": str(device)}
    flags = rloo.Args(**taken, rloo_k=max(2, args.n))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rloo.start_processes(device)
    tokenizer = rloo.load_tokenizer(flags, "--sft_model_path", path)
    data = str(flags.dataset_name or rloo.MINI_TLDR)
    found = rloo.load_rows(data, args.dataset_test_split)
    require(found, f"--dataset_test_split {args.dataset_test_split}: {data} has no such split")
    numbered = [row | {"post": number} for number, row in enumerate(found[: args.posts])]
    rows = rloo.prepare_rows(numbered, tokenizer, flags.max_prompt_length, data)
    model = rloo.load_model(flags, "--sft_model_path", path, trained=False)
    layout = rloo.choose_layout(model, flags, rows)
    stop_ids = rloo.stop_token_ids(flags, model, tokenizer)

    transformers.set_seed(args.seed)
    lines, size = [], max(1, args.local_rollout_forward_batch_size // args.n)
    with tqdm(total=len(rows), desc=Path(args.output).stem, unit="post") as bar:
        for part in (rows[i : i + size] for i in range(0, len(rows), size)):
            engine = "group" if layout == "group" else "hf"
            batch, _ = rloo.rollout(
                model, part, args.n, args.temperature, flags.response_length, stop_ids, engine, size * args.n
            )
            texts, ended = rloo.completion_texts(batch, tokenizer), batch.ended.tolist()
            for b, row in enumerate(part):
                lines += [line_of(row, texts[j * len(part) + b], ended[j][b], j, args) for j in range(args.n)]
            bar.update(len(part))
    write_whole(args.output, "".join(lines))


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True))
