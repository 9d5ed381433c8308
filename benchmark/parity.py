"""Do TRL's RLOO trainers and rloo.py, given the same completions of mini TL;DR, end in the same weights?

    python benchmark/parity.py --trl trl0/bin/python trl1/bin/python            # all settings: a few minutes on a CPU
    python benchmark/parity.py --trl trl0/bin/python trl1/bin/python --again    # compares with records/parity.jsonl

benchmark/requirements.txt says how to make the environments, with TRL 0.19 and 1.x. Completions are sampled once by the
SFT policy; some have no stop token. Both sides train on them in float32. After three updates the weights must differ by
less than 0.01% of the way that TRL has moved them, except in settings with a known reason (`why`). The status is 1 if
another setting differs.

TRL's trainers run unchanged, with three exceptions: their generation returns the given completions (0.19:
`batch_generation`, 1.x: `_generate_single_turn`); data and completions are not shuffled; a mini-batch holds whole
prompts.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import runs
import torch
import transformers
import trl_run
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

SFT, REWARD = trl_run.TASK / "sft", trl_run.TASK / "reward"
FOLDER = runs.RUNS / "parity"
UPDATES, PROMPTS, K, LENGTH = 3, 4, 4, 20  # prompts per update, completions of each, tokens of each
AGREE = 1e-4  # share of TRL's movement by which weights may differ; rounding makes 2e-5
BASE = {  # flags of both sides, which a Row may change
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
    theirs: dict = field(default_factory=dict)  # TRL's config, over what follows from the flags
    reward_by: str = "ids"  # 1.x: what the reward model reads, see trl_run.py
    short_data: bool = False  # the data end with the last update


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
SHORT = {"max_grad_norm": 0.5}
TOKEN_KL = {"token_level_kl": True}
MASKED = {"mask_truncated_completions": True}
OWN_SCORE = {"reward_fns": f"{Path(__file__).resolve()}:length_score"}
ROWS = [
    *(Row(0, name, flags) for name, flags in BOTH.items()),
    Row(0, "missing-EOS penalty 1", {"missing_eos_penalty": 1.0}),
    Row(0, "reward normalization", NORMAL),
    Row(0, "penalty 5, normalization, clip ±1", NORMAL | CLIPPED | {"missing_eos_penalty": 5.0}),
    Row(0, "all of these", ALL),
    Row(0, "its token-level KL, our sequence KL", {"kl_coef": 1.0}, theirs=TOKEN_KL),
    Row(0, "score clip ±1", CLIPPED, "0.19 clips only where it normalizes"),
    Row(0, "gradient norm ≤ 0.5", SHORT, "0.19 never reads max_grad_norm"),
    Row(0, "token-level KL", TOKEN_KL | {"kl_coef": 1.0}, "0.19 sums it back to the sequence's: a no-op"),
    Row(0, "4 micro-batches, data end", MICRO, "0.19 steps at each micro-batch of the last batch", short_data=True),
    *(Row(1, name, flags | (CONSTANT if "num_ppo_epochs" in flags else {})) for name, flags in BOTH.items()),
    Row(1, "missing-EOS penalty 1, in the function", {"missing_eos_penalty": 1.0}),
    Row(1, "score clip ±1", CLIPPED),
    Row(1, "gradient norm ≤ 0.5", SHORT),
    Row(1, "reward model's folder given", {}, "1.x scores text: no stop token, tokenized again", reward_by="text"),
    Row(1, "truncated completions masked", MASKED, "1.x drops their KL, not their reward, from siblings' baselines"),
    Row(1, "2 epochs, linear schedule", {"num_ppo_epochs": 2}, "1.x lowers the rate at each optimizer step"),
    Row(1, "unscorable completions", OWN_SCORE),
]


def length_score(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """Rewards short completions, and gives no score to every third."""
    return [None if sum(ids) % 3 == 0 else -len(ids) / 4 for ids in completion_ids]


# ---- What both sides need --------------------------------------------------------------------------------------------


def rows_of(trl: int) -> list[Row]:
    return [row for row in ROWS if row.trl == trl]


def copy_of(model) -> dict[str, torch.Tensor]:
    """Returns the weights of a model by their names in its file (transformers 5 calls GPT-NeoX's head lm_head)."""
    return {name.replace("lm_head.", "embed_out."): x.detach().clone() for name, x in model.named_parameters()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Returns the norm of the difference of all weights."""
    return sum((a[name].double() - b[name].double()).square().sum().item() for name in a) ** 0.5


# ---- rloo.py ---------------------------------------------------------------------------------------------------------


def sample_completions() -> dict[str, list]:
    """Returns the prompts (texts) of each update and their completions (k, B, T) by the SFT policy."""
    import rloo  # environments with TRL cannot import it

    args = rloo.resolve_args(rloo.Args(output_dir="none", device="cpu", response_length=LENGTH))
    tokenizer = rloo.load_tokenizer(args, str(SFT))
    rows = rloo.load_rows(args.dataset_name, "validation")[: UPDATES * PROMPTS]
    prompts = [[row["prompt"] for row in rows[i : i + PROMPTS]] for i in range(0, len(rows), PROMPTS)]
    policy = rloo.read_model(args, str(SFT), torch.float32)
    stop_ids = rloo.stop_token_ids(args, policy, tokenizer)
    rloo.set_seed(1)
    completions = []
    for texts in prompts:
        examples = [rloo.prepare_example({"prompt": text}, tokenizer) for text in texts]
        batch, _ = rloo.rollout(args, policy, examples, K, args.temperature, stop_ids)
        responses = batch.responses.where(batch.response_mask, tokenizer.pad_token_id)
        completions.append(torch.nn.functional.pad(responses, (0, LENGTH - responses.shape[-1])).tolist())
    return {"prompts": prompts, "completions": completions}


def train_rloo(flags: dict, given: dict) -> dict[str, torch.Tensor]:
    """Returns the weights that rloo.py has after UPDATES updates on the given completions."""
    import rloo

    flags = {"sft_model_path": str(SFT), "dataset_name": str(trl_run.TASK)} | BASE | flags
    if "reward_clip_range" in flags:
        flags["reward_clip_range"] = (flags["reward_clip_range"],)
    if "reward_fns" in flags:
        flags["reward_fns"] = (flags["reward_fns"],)
    else:
        flags["reward_model_path"] = str(REWARD)
    args = rloo.resolve_args(rloo.Args(**flags))
    tokenizer = rloo.load_tokenizer(args, args.sft_model_path)
    updates = [[rloo.prepare_example({"prompt": text}, tokenizer) for text in texts] for texts in given["prompts"]]
    examples = sum(updates, [])
    master, policy, reference = rloo.load_models(args, resumed=None)
    reward_functions = rloo.load_reward_model(args, tokenizer, examples)
    reward_functions |= rloo.load_functions(args.reward_fns, examples[0], tokenizer)
    stop_ids = rloo.stop_token_ids(args, policy, tokenizer)
    optimizer = rloo.make_optimizer(args, master)
    for done in range(UPDATES):
        batch = rloo.make_batch(updates[done], torch.tensor(given["completions"][done]), stop_ids)
        sampled = batch, rloo.chunked_logprobs(policy, batch, args.temperature, args.local_rollout_forward_batch_size)
        with mock.patch.object(rloo, "rollout", lambda *_, sampled=sampled: sampled):
            experience = rloo.collect(args, policy, reference, reward_functions, updates[done], stop_ids)
        optimizer.param_groups[0]["lr"] = args.learning_rate * rloo.share_of_peak(args, done, UPDATES)
        with mock.patch.object(torch, "randperm", torch.arange):  # mini-batches take prompts in their order
            rloo.improve(args, policy, master, optimizer, experience)
    return copy_of(master)


# ---- TRL, in its own environment -------------------------------------------------------------------------------------


class Notes(transformers.TrainerCallback):
    """Saves the weights after the last of `steps` optimizer steps."""

    def __init__(self, file: Path, steps: int):
        self.file, self.steps = file, steps

    def on_step_end(self, args, state, control, model, **options):
        if state.global_step == self.steps:
            save_file(copy_of(model), self.file)


def train_trl(folder: Path):
    """Trains each row of ROWS. The folder gets the weights after the last update, <row>.safetensors."""
    import numpy as np
    import trl
    from trl.trainer import rloo_trainer as trainers

    version = int(trl.__version__[0])
    given = json.loads((FOLDER / "given.json").read_text(encoding="utf-8"))
    trl_run.write_for_transformers_4(SFT, folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    eos = tokenizer.eos_token_id
    updates = iter(())

    def next_given(prompt_ids: list[list[int]]) -> torch.Tensor:
        """Returns the responses of the next update, if the trainer has its prompts."""
        texts, responses = next(updates)
        assert prompt_ids == tokenizer(texts)["input_ids"], "the trainer shuffles its data"
        return torch.tensor(responses)

    def batch_generation(model, queries, size, pad_id, generation_config):  # 0.19
        first = queries[: len(queries) // K]
        responses = next_given([row[row != pad_id].tolist() for row in first]).flatten(0, 1)
        sequences = torch.cat([queries, responses], dim=1)
        with torch.no_grad():
            logits = trainers.forward(model, sequences, pad_id).logits[:, queries.shape[1] - 1 : -1]
        return sequences, logits / generation_config.temperature

    def generate_single_turn(prompt_ids, images, multimodal_fields):  # 1.x
        responses = next_given(prompt_ids[::K]).transpose(0, 1).flatten(0, 1).tolist()
        return [row[: row.index(eos) + 1] if eos in row else row for row in responses]

    if version == 0:
        loader = trainers.DataLoader
        trainers.batch_generation = batch_generation
        trainers.DataLoader = lambda *data, **options: loader(*data, **options | {"shuffle": False})
        np.random.permutation = lambda n: np.arange(n).reshape(K, -1).T.flatten()  # prompt by prompt
    else:
        trainers.shuffle_sequence_dict = lambda batch: batch

    for number, row in enumerate(rows_of(version)):
        flags = BASE | row.flags | {"reward_by": row.reward_by, "output_dir": folder}
        words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
        args = trl_run.parse_args(["rloo", *words])
        steps = args.num_ppo_epochs * args.num_mini_batches if version == 1 else 1  # per update
        notes = Notes(folder / f"{number}.safetensors", UPDATES * steps)
        updates = iter(zip(given["prompts"], given["completions"]))
        data = [{"prompt": text} for texts in given["prompts"] for text in texts]
        data += [] if row.short_data else data[:PROMPTS]
        theirs = row.theirs | ({"shuffle_dataset": False} if version == 1 else {})
        trainer = trl_run.trainer_of(args, folder, data, notes, **theirs)
        if version == 1:
            trainer._generate_single_turn = generate_single_turn
        trainer.train()
        print(f"{row.name}: trained", flush=True)
    said = f"TRL {trl.__version__}, transformers {transformers.__version__}"
    (folder / "versions").write_text(said)


# ---- Both ------------------------------------------------------------------------------------------------------------


def compare(python: str, folder: Path, given: dict) -> list[dict]:
    """Trains all rows by the TRL of a python and by rloo.py. Returns how far their weights are apart."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "log").open("w") as log:
        words = [Path(python).absolute(), Path(__file__).resolve(), "--inside", folder]
        subprocess.run(words, check=True, stdout=log, stderr=log)
    said = (folder / "versions").read_text()
    start, found = load_file(SFT / "model.safetensors"), []
    for number, row in enumerate(rows_of(int(said.removeprefix("TRL ")[0]))):
        ours = train_rloo(row.flags, given)
        theirs = load_file(folder / f"{number}.safetensors")
        largest = max((ours[name] - theirs[name]).abs().max().item() for name in ours)
        share = distance(ours, theirs) / distance(start, theirs)
        found.append({"trl": said, "setting": row.name, "largest": largest, "share": share, "why": row.why})
        print(f"{said}, {row.name}: {largest:.1e}, {share:.3%} of TRL's movement {row.why}", flush=True)
    return found


def summary(rows: list[dict]) -> str:
    """Returns a line for each version of TRL."""
    text = []
    for version in dict.fromkeys(row["trl"] for row in rows):
        of_version = [row for row in rows if row["trl"] == version]
        agree = [row for row in of_version if row["share"] <= AGREE]
        largest, share = (max(row[name] for row in agree) for name in ("largest", "share"))
        counts = f"{len(agree)} of {len(of_version)} settings agree"
        text.append(f"{version}: {counts}; weights to {largest:.1e}, {share:.3%} of TRL's movement")
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", nargs="+", default=[], help="pythons of environments with TRL 0.19 and 1.x")
    parser.add_argument("--again", action="store_true", help="compare with the records and write nothing")
    parser.add_argument("--inside", type=Path, metavar="FOLDER", help="how this script runs itself in an environment")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if args.inside:
        train_trl(args.inside)
        return
    records = runs.Records("parity", args.again)
    found = []
    if args.trl:
        given = sample_completions()
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "given.json").write_text(json.dumps(given), encoding="utf-8")
        for number, python in enumerate(args.trl):
            found += compare(python, FOLDER / str(number), given)
        for row in found:
            records.add(f"{row['trl'].partition(',')[0]}, {row['setting']}", **row)
    print(summary(found or list(records.values())))
    wrong = [f"{row['trl']}, {row['setting']}" for row in found if row["share"] > AGREE and not row["why"]]
    if wrong:
        sys.exit(f"the weights differ by more than {AGREE:g} of TRL's movement, without a known reason: {wrong}")


if __name__ == "__main__":
    main()
