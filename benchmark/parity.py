"""Do TRL's RLOO trainers and rloo.py, given the same completions of mini TL;DR, end in the same weights?

    python benchmark/parity.py --trl trl0/bin/python trl1/bin/python            # all settings: a few minutes on a CPU
    python benchmark/parity.py --trl trl0/bin/python trl1/bin/python --again    # compares with records/parity.jsonl

benchmark/requirements.txt says how to make the environments, with TRL 0.19 and 1.x. The SFT policy has sampled the
completions in records/parity_given.jsonl; some have no stop token. Both sides train on them in float32. After three
updates the weights must differ by less than 0.01% of the way that TRL has moved them, except in settings with a known
reason (`why`). The status is 1 if another setting differs.

Both sides run unchanged, with three exceptions: the given completions take the place of sampling (rloo.py: `rollout`,
0.19: `batch_generation`, 1.x: `_generate_single_turn`); data and completions are not shuffled; a mini-batch of TRL
holds whole prompts.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import runs
import torch
import trl_run
from safetensors.torch import load_file
from transformers import AutoTokenizer

SFT = trl_run.TASK / "sft"
GIVEN = runs.HERE / "records" / "parity_given.jsonl"  # a row: number, prompt, K completions of LENGTH tokens
FOLDER = runs.RUNS / "parity"
UPDATES, PROMPTS, K, LENGTH = 3, 4, 4, 20  # prompts per update, completions of each, tokens of each
AGREE = 1e-4  # share of TRL's movement by which weights may differ; rounding makes 2e-5
BASE = {  # flags of both sides, which a Row may change
    "sft_model_path": SFT,
    "reward_model_path": trl_run.TASK / "reward",
    "dataset_name": FOLDER / "data",
    "rloo_k": K,
    "response_length": LENGTH,
    "temperature": 0.7,
    "kl_coef": 0.2,
    "learning_rate": 1.5e-4,
    "adam_eps": 1e-3,  # so large that AdamW does not amplify rounding
    "max_grad_norm": 0.0,
    "per_device_train_batch_size": PROMPTS * K,
    "total_episodes": UPDATES * PROMPTS * K,
    "device": "cpu",
    "dtype": "float32",
}


@dataclass
class Row:
    """A setting, in flags of rloo.py, and what differs in TRL."""

    trl: int  # first number of TRL's version
    name: str
    flags: dict = field(default_factory=dict)  # over BASE
    why: str = ""  # why the two differ; empty: they must agree
    theirs: dict = field(default_factory=dict)  # over both, for TRL alone


TWO_BY_TWO = {"num_ppo_epochs": 2, "num_mini_batches": 2, "per_device_train_batch_size": PROMPTS * K // 2}
NORMAL = {"normalize_reward": True, "reward_clip_range": 10.0}
MICRO = {"per_device_train_batch_size": K, "gradient_accumulation_steps": PROMPTS}
ALL = TWO_BY_TWO | {"per_device_train_batch_size": K, "gradient_accumulation_steps": 2} | NORMAL
ALL |= {"missing_eos_penalty": 1.0, "normalize_advantage": True}
CONSTANT = {"lr_scheduler_type": "constant"}  # 1.x lowers the learning rate with each optimizer step
BOTH = {
    "1 epoch": {},
    "2 epochs": {"num_ppo_epochs": 2},
    "2 epochs of 2 mini-batches": TWO_BY_TWO,
    "4 micro-batches": MICRO,
    "no KL": {"kl_coef": 0.0},
    "sequence KL, β = 1": {"kl_coef": 1.0},
    "advantage normalization": {"normalize_advantage": True},  # 1.x adds 1e-4 to the divisor, not 1e-8
}
CLIPPED = {"reward_clip_range": 1.0}
CLIPPED_GRADIENT = {"max_grad_norm": 0.5}
SHORT = {"dataset_name": FOLDER / "short"}  # data that end with the last update
TOKEN_KL = {"token_level_kl": True}
MASKED = {"mask_truncated_completions": True}
OWN_SCORE = {"reward_fns": f"{Path(__file__).resolve()}:length_score", "reward_model_path": None}
ROWS = [
    *(Row(0, name, flags) for name, flags in BOTH.items()),
    Row(0, "missing-EOS penalty 1", {"missing_eos_penalty": 1.0}),
    Row(0, "reward normalization", NORMAL),
    Row(0, "penalty 5, normalization, clip ±1", NORMAL | CLIPPED | {"missing_eos_penalty": 5.0}),
    Row(0, "all of these", ALL),
    Row(0, "score clip ±1", CLIPPED, "0.19 clips only where it normalizes"),
    Row(0, "gradient norm ≤ 0.5", CLIPPED_GRADIENT, "0.19 never reads max_grad_norm"),
    Row(0, "token-level KL", TOKEN_KL | {"kl_coef": 1.0}, "0.19 sums it back to the sequence's: a no-op"),
    Row(0, "4 micro-batches, data end", MICRO, "0.19 steps at each micro-batch of the last batch", SHORT),
    *(Row(1, name, flags | (CONSTANT if "num_ppo_epochs" in flags else {})) for name, flags in BOTH.items()),
    Row(1, "missing-EOS penalty 1, in the function", {"missing_eos_penalty": 1.0}),
    Row(1, "score clip ±1", CLIPPED),
    Row(1, "gradient norm ≤ 0.5", CLIPPED_GRADIENT),
    Row(1, "reward model's folder given", {}, "1.x scores text: no stop token, tokenized again", {"reward_by": "text"}),
    Row(1, "truncated completions masked", MASKED, "1.x drops their KL, not their reward, from siblings' baselines"),
    Row(1, "2 epochs, linear schedule", {"num_ppo_epochs": 2}, "1.x lowers the rate at each optimizer step"),
    Row(1, "unscorable completions", OWN_SCORE),
]


def length_score(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """Rewards short completions, and gives no score to every third."""
    return [None if sum(ids) % 3 == 0 else -len(ids) / 4 for ids in completion_ids]


# ---- Both sides ------------------------------------------------------------------------------------------------------


def write_data():
    """Writes two data sets: "data" has prompts for a fourth update, which is not made; "short" has none."""
    rows = runs.lines(GIVEN)
    for name, more in (("data", rows[:PROMPTS]), ("short", [])):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        (FOLDER / name / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + more))


def train_rloo(flags: dict) -> dict[str, torch.Tensor]:
    """Returns the weights after a run of rloo.py."""
    import rloo  # environments with TRL cannot import it

    def rollout(args, policy, examples, k, temperature, stop_ids):
        examples = sorted(examples, key=lambda example: example["columns"]["number"])
        responses = [[example["columns"]["given"][lane] for example in examples] for lane in range(k)]
        batch = rloo.make_batch(examples, torch.tensor(responses), stop_ids)
        return batch, rloo.logprobs_in_parts(args, policy, batch)

    def examples_of_update(examples, seed, begin, count):
        return examples[begin : begin + count]

    out = FOLDER / "rloo"
    shutil.rmtree(out, ignore_errors=True)
    flags = BASE | flags | {"output_dir": out, "num_eval_prompts": 0, "save_steps": 0}
    with (
        mock.patch.multiple(rloo, rollout=rollout, examples_of_update=examples_of_update),
        mock.patch.object(torch, "randperm", torch.arange),  # mini-batches take prompts in their order
        (FOLDER / "rloo.log").open("w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        rloo.command_line(trl_run.words_of(flags))
    return load_file(out / "model.safetensors")


def train_trl():
    """Trains each row of its version by the TRL of the environment in which it is called."""
    import numpy as np
    import trl
    from trl.trainer import rloo_trainer as trainers

    version = int(trl.__version__[0])
    tokenizer = AutoTokenizer.from_pretrained(SFT)
    eos = tokenizer.eos_token_id
    given = {tuple(tokenizer(row["prompt"])["input_ids"]): row["given"] for row in runs.lines(GIVEN)}

    def batch_generation(model, queries, size, pad_id, generation_config):  # 0.19; completion j of prompt b is j·B + b
        B = len(queries) // K
        prompts = [tuple(row[row != pad_id].tolist()) for row in queries]
        responses = torch.tensor([given[ids][number // B] for number, ids in enumerate(prompts)])
        sequences = torch.cat([queries, responses], dim=1)
        with torch.no_grad():
            logits = trainers.forward(model, sequences, pad_id).logits[:, queries.shape[1] - 1 : -1]
        return sequences, logits / generation_config.temperature

    def generate_single_turn(prompt_ids, images, multimodal_fields):  # 1.x; completion j of prompt b is b·K + j
        responses = [given[tuple(ids)][number % K] for number, ids in enumerate(prompt_ids)]
        return [row[: row.index(eos) + 1] if eos in row else row for row in responses]

    torch.randperm = lambda n, **options: torch.arange(n)  # data and completions keep their order
    if version == 0:
        np.random.permutation = lambda n: np.arange(n).reshape(K, -1).T.flatten()  # prompt by prompt
        trainers.batch_generation = batch_generation
    else:
        trainers.RLOOTrainer._generate_single_turn = staticmethod(generate_single_turn)
    for number, row in enumerate(rows_of(version)):
        flags = BASE | row.flags | row.theirs | {"output_dir": FOLDER / f"trl{version}" / str(number)}
        trl_run.main(trl_run.parse_args(["rloo", *trl_run.words_of(flags)]))


# ---- Comparing -------------------------------------------------------------------------------------------------------


def rows_of(trl: int) -> list[Row]:
    return [row for row in ROWS if row.trl == trl]


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Returns the norm of the difference of all weights."""
    return sum((a[name].double() - b[name].double()).square().sum().item() for name in a) ** 0.5


def compare(python: str) -> list[dict]:
    """Trains all rows by the TRL of a python and by rloo.py. Returns how far their weights are apart."""
    write_data()
    versions = trl_run.versions(python)
    version = int(versions.removeprefix("TRL ")[0])
    words = [Path(python).absolute(), "-c", "import parity; parity.train_trl()"]
    with (FOLDER / f"trl{version}.log").open("w") as log:
        subprocess.run(words, check=True, cwd=runs.HERE, stdout=log, stderr=log)
    start, found = load_file(SFT / "model.safetensors"), []
    for number, row in enumerate(rows_of(version)):
        ours = train_rloo(row.flags)
        theirs = load_file(FOLDER / f"trl{version}" / str(number) / "model.safetensors")
        largest = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
        share = distance(ours, theirs) / distance(start, theirs)
        found.append({"trl": versions, "setting": row.name, "largest": largest, "share": share, "why": row.why})
        print(f"{versions}, {row.name}: {largest:.1e}, {share:.3%} of TRL's movement {row.why}", flush=True)
    return found


def summary(rows: list[dict]) -> str:
    """Returns a line for each version of TRL, and a table of the settings that differ."""
    text = []
    for version in dict.fromkeys(row["trl"] for row in rows):
        of_version = [row for row in rows if row["trl"] == version]
        agree = [row for row in of_version if row["share"] <= AGREE]
        largest, share = (max(row[name] for row in agree) for name in ("largest", "share"))
        counts = f"{len(agree)} of {len(of_version)} settings agree"
        text.append(f"{version}: {counts}; weights to {largest:.1e}, {share:.3%} of TRL's movement")
    differ = sorted((row for row in rows if row["share"] > AGREE), key=lambda row: (row["trl"], -row["share"]))
    cells = [[row["setting"], f"{row['share']:.2%}", row["why"]] for row in differ]
    head = ["setting", "difference, % of TRL's movement", "why"]
    return "\n".join([*text, "", runs.markdown([head, *cells])])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", nargs="+", default=[], help="pythons of environments with TRL 0.19 and 1.x")
    parser.add_argument("--again", action="store_true", help="compare with the records and write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = runs.Records("parity", args.again)
    found = [row for python in args.trl for row in compare(python)]
    for row in found:
        records.add(f"{row['trl'].partition(',')[0]}, {row['setting']}", **row)
    print(summary(found or list(records.values())))
    wrong = [f"{row['trl']}, {row['setting']}" for row in found if row["share"] > AGREE and not row["why"]]
    if wrong:
        sys.exit(f"the weights differ by more than {AGREE:g} of TRL's movement, without a known reason: {wrong}")


if __name__ == "__main__":
    main()
