"""TRL's own RLOO trainers beside rloo.py, on the embedded mini TL;DR task.

    python benchmark/trl/trl_parity.py same --trl trl0/bin/python --trl trl1/bin/python     # a few minutes
    python benchmark/trl/trl_parity.py clip --trl trl0/bin/python --trl trl1/bin/python     # half an hour
    python benchmark/trl/trl_parity.py train --trl trl0/bin/python --trl trl1/bin/python    # hours; can be repeated
    python benchmark/trl/trl_parity.py draw                                                 # train's picture again

benchmark/requirements.txt says how to make the environments for --trl, TRL 0.19 and 1.x. Everything runs on the CPU.

same    TRL and rloo.py train on the same completions in float32, some of which have no stop token. Three updates later
        the weights must agree to 1e-6; where TRL does something else, the table says why, and how much it matters.
        The completions and TRL's numbers go to golden.json, which trl_parity_test.py checks without TRL.
clip    the share of completions that the clip removes from the first optimizer step after a rollout, in bfloat16. No
        step lies between the policy that sampled and the one that is trained, so each ratio should be 1.
train   all trainers from the same policy by the same settings, rloo.py's defaults: what they learn, and how fast.

TRL's trainers run unchanged, with these exceptions. same: their generation returns the given completions
(0.19: `batch_generation`, 1.x: `_generate_single_turn`), data and completions are not shuffled, and a mini-batch holds
whole prompts. clip: torch.clamp, torch.max and torch.min note the ratios that pass through them.
"""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "speed"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # rloo.py is imported later: TRL's environments cannot

from throughput import call, device_name, draw_beside, fail, save, trl_versions

HERE = Path(__file__).resolve().parent
MINI_TLDR = HERE.parent / "mini_tldr"
GOLDEN = HERE / "golden.json"
UPDATES, PROMPTS, K, LENGTH = 3, 4, 4, 20  # of `same`: updates, prompts per update, completions each, tokens each
BASE = {  # rloo.py's flags for `same`, which a Row may change
    "rloo_k": K,
    "response_length": LENGTH,
    "temperature": 0.7,
    "kl_coef": 0.2,
    "learning_rate": 1.5e-4,
    "adam_eps": 1e-3,
    "max_grad_norm": 0.0,
    "per_device_train_batch_size": PROMPTS * K,
    "gradient_accumulation_steps": 1,
    "total_episodes": UPDATES * PROMPTS * K,
}
AGREE = 1e-6  # largest difference of a weight between trainers that do the same


@dataclass
class Row:
    """A line of the table of `same`: a setting, in rloo.py's flags, and what of TRL's differs from these."""

    trl: str  # first number of TRL's version
    name: str
    flags: dict = field(default_factory=dict)  # over BASE
    theirs: dict = field(default_factory=dict)  # TRL's config, over what follows from the flags
    why: str = ""  # why the two differ; empty: they must agree
    reward: Literal["ids", "text", "length"] = "ids"  # 1.x: how completions are scored, see trl1_reward
    short_data: bool = False  # the data end with the last update
    golden: bool = True  # its numbers are kept for the test; not where other rows have the same in them


TWO_BY_TWO = {"num_ppo_epochs": 2, "num_mini_batches": 2, "per_device_train_batch_size": PROMPTS * K // 2}
NORMAL = {"normalize_reward": True, "reward_clip_range": 10.0}
MICRO = {"per_device_train_batch_size": K, "gradient_accumulation_steps": PROMPTS}
CONSTANT = {"lr_scheduler_type": "constant"}  # 1.x lowers the learning rate with each optimizer step
ROWS = [
    Row("0", "1 epoch"),
    Row("0", "2 epochs", {"num_ppo_epochs": 2}),
    Row("0", "2 epochs of 2 mini-batches", TWO_BY_TWO, golden=False),
    Row("0", "4 micro-batches", MICRO, golden=False),
    Row("0", "no KL", {"kl_coef": 0.0}, golden=False),
    Row("0", "sequence KL, β = 1", {"kl_coef": 1.0}, golden=False),
    Row("0", "missing-EOS penalty 1", {"missing_eos_penalty": 1.0}, golden=False),
    Row("0", "reward normalisation", NORMAL, golden=False),
    Row("0", "penalty 5, normalisation, clip ±1", NORMAL | {"missing_eos_penalty": 5.0, "reward_clip_range": 1.0}),
    Row("0", "advantage normalisation", {"normalize_advantage": True}, golden=False),
    Row(
        "0",
        "all of these",
        TWO_BY_TWO
        | {"per_device_train_batch_size": K, "gradient_accumulation_steps": 2}
        | NORMAL
        | {"missing_eos_penalty": 1.0, "normalize_advantage": True},
    ),
    Row("0", "its token-level KL, our sequence KL", {"kl_coef": 1.0}, {"token_level_kl": True}, golden=False),
    Row("0", "score clip ±1", {"reward_clip_range": 1.0}, why="0.19 clips only where it normalises"),
    Row("0", "gradient norm ≤ 0.5", {"max_grad_norm": 0.5}, why="0.19 never reads max_grad_norm"),
    Row(
        "0",
        "token-level KL",
        {"kl_level": "token", "kl_coef": 1.0},
        {"token_level_kl": True},
        "0.19 sums it back to the sequence's: a no-op",
    ),
    Row(
        "0",
        "4 micro-batches, data end",
        MICRO,
        short_data=True,
        why="0.19 steps at each micro-batch of the data's last batch",
    ),
    Row("1", "1 epoch"),
    Row("1", "2 epochs", CONSTANT | {"num_ppo_epochs": 2}, golden=False),
    Row("1", "2 epochs of 2 mini-batches", CONSTANT | TWO_BY_TWO),
    Row("1", "4 micro-batches", MICRO, golden=False),
    Row("1", "no KL", {"kl_coef": 0.0}, golden=False),
    Row("1", "sequence KL, β = 1", {"kl_coef": 1.0}, golden=False),
    Row("1", "missing-EOS penalty 1, in the function", {"missing_eos_penalty": 1.0}, golden=False),
    Row("1", "score clip ±1", {"reward_clip_range": 1.0}, golden=False),
    Row("1", "advantage normalisation", {"normalize_advantage": True}, golden=False),  # theirs adds 1e-4, not 1e-8
    Row("1", "gradient norm ≤ 0.5", {"max_grad_norm": 0.5}),
    Row("1", "unscorable completions", {"reward_fns": f"{HERE / 'trl_parity.py'}:length_score"}, reward="length"),
    Row("1", "reward model's folder given", reward="text", why="1.x scores text: no stop token, tokenized again"),
    Row(
        "1",
        "truncated completions masked",
        {"mask_truncated_completions": True},
        why="1.x drops their KL, but not their reward, from their siblings' baselines",
    ),
    Row("1", "2 epochs, linear schedule", {"num_ppo_epochs": 2}, why="1.x lowers the rate at each optimizer step"),
]


def length_score(prompts, completions, completion_ids, **columns) -> list[float | None]:
    """A reward function: short completions score well, and every third has no score."""
    return [None if sum(ids) % 3 == 0 else -len(ids) / 4 for ids in completion_ids]


# ---- What both sides need --------------------------------------------------------------------------------------------


def training_prompts(number: int | None = None) -> list[str]:
    """The first prompts of the training split, or all."""
    lines = (MINI_TLDR / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:number]]


def given_prompts() -> list[list[str]]:
    """Prompts of each update of `same`."""
    texts = training_prompts(UPDATES * PROMPTS)
    return [texts[i : i + PROMPTS] for i in range(0, len(texts), PROMPTS)]


def hash_of(name: str) -> str:
    """Of a model's weights."""
    return hashlib.sha256((MINI_TLDR / name / "model.safetensors").read_bytes()).hexdigest()


def movement(start: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> list[float]:
    """How far a model has moved: the norms of its tensors' changes, in the order of their names, and 8 projections of
    the change of all weights. In these, unlike in single weights, rounding averages out."""
    changes = [(weights[name].double() - start[name].double()).flatten() for name in sorted(start)]
    change = torch.cat(changes)
    place = torch.arange(1, len(change) + 1, dtype=torch.float64)
    return [x.norm().item() for x in changes] + [torch.dot(change, (place * i).cos()).item() for i in range(1, 9)]


def copy_of(model) -> dict[str, torch.Tensor]:
    """A model's weights by the names that they have in its file (transformers 5 calls GPT-NeoX's head lm_head)."""
    return {name.replace("lm_head.", "embed_out."): x.detach().clone() for name, x in model.named_parameters()}


def rounded(x):
    """The same numbers with 9 digits, so that the file is small."""
    if isinstance(x, dict):
        return {name: rounded(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(value) for value in x]
    return float(f"{x:.9g}") if isinstance(x, float) else x


class Stopwatch:
    """Sums seconds, by the clock and of the processor, that passed between `start` and `stop`."""

    def __init__(self):
        self.times: list[dict[str, float]] = []  # after each `stop`

    def start(self):
        self.begin = time.perf_counter(), time.process_time()

    def stop(self):
        before = self.times[-1] if self.times else {"seconds": 0.0, "cpu_seconds": 0.0}
        passed = time.perf_counter() - self.begin[0], time.process_time() - self.begin[1]
        self.times.append({name: total + x for (name, total), x in zip(before.items(), passed)})


# ---- rloo.py ---------------------------------------------------------------------------------------------------------


def train_rloo(flags: dict, output: Path) -> list[dict]:
    """Trains by rloo.py, in this process; returns the lines of its metrics.jsonl."""
    import rloo

    shutil.rmtree(output, ignore_errors=True)  # of a run that was ended
    flags = {
        "sft_model_path": MINI_TLDR / "sft",
        "dataset_name": MINI_TLDR,
        "device": "cpu",
        "num_eval_prompts": 0,
        "save_steps": 0,
        "output_dir": output,
    } | flags
    if "reward_fns" not in flags:
        flags["reward_model_path"] = MINI_TLDR / "reward"
    switches = [f"--{name}" for name, value in flags.items() if value is True]
    options = [f"--{name}={value}" for name, value in flags.items() if value is not True]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        rloo.main(rloo.parse_args(switches + options))
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def given_completions(prompts: list[list[str]], completions: list, note: Callable):
    """Within it a rollout of rloo.py returns the given completions (k, B, R) of the given prompts, update by update,
    and calls `note(policy)` before. Mini-batches take prompts in their order; no disk is waited for."""
    import rloo

    tokenizer = AutoTokenizer.from_pretrained(MINI_TLDR / "sft")
    updates = zip(prompts, completions, strict=True)
    own = rloo.rollout, torch.randperm, os.sync

    @torch.no_grad()
    def rollout(policy, rows, k, temperature, *, stop_ids, **options):
        note(policy)
        texts, ids = next(updates)
        rows = [rloo.prepare_row({"prompt": text}, tokenizer) for text in texts]
        batch = rloo.make_batch(rows, torch.tensor(ids), stop_ids)
        return batch, rloo.completion_logprobs(policy, batch, temperature)[0]

    rloo.rollout, torch.randperm, os.sync = rollout, lambda n, **options: torch.arange(n), lambda: None
    try:
        yield
    finally:
        rloo.rollout, torch.randperm, os.sync = own


def same_rloo(flags: dict, prompts: list[list[str]], completions: list, output: Path) -> dict:
    """rloo.py on given completions: its weights after each update and its metrics of each."""
    weights, data = [], output.with_suffix(".jsonl")
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts[0]))  # replaced by what is given
    with given_completions(prompts, completions, lambda policy: weights.append(copy_of(policy))):
        lines = train_rloo(BASE | {"seed": 1, "dataset_name": data} | flags, output)
    weights.append(load_file(output / "model.safetensors"))
    return {"weights": weights, "metrics": lines}


def sample_completions() -> list:
    """Completions (k, B, R) of each update's prompts by the policy to begin with, sampled on past the stop token as
    TRL 0.19 does. Each update has some with a stop token and some without."""
    import rloo

    tokenizer = AutoTokenizer.from_pretrained(MINI_TLDR / "sft")
    policy = AutoModelForCausalLM.from_pretrained(MINI_TLDR / "sft").eval()
    transformers.set_seed(1)
    found = []
    for texts in given_prompts():
        rows = [rloo.prepare_row({"prompt": text}, tokenizer) for text in texts]
        batch, _ = rloo.rollout(policy, rows, K, 1.0, response_length=LENGTH, stop_ids=[-1])
        ended = (batch.responses == tokenizer.eos_token_id).any(-1)
        assert 0.1 < ended.float().mean() < 0.9 and (batch.responses != tokenizer.pad_token_id).all()
        found.append(batch.responses.tolist())
    return found


def comparable(version: str, lines: list[dict], ours: bool) -> list[dict[str, float]]:
    """Metrics of each update that both sides log, by our names, from our lines or theirs."""
    if version == "0":
        names = [
            "objective/kl",
            "objective/non_score_reward",
            "objective/rlhf_reward",
            "loss/policy_avg",
            "policy/approxkl_avg",
            "policy/clipfrac_avg",
        ]
        return [{name: line[name] for name in names} for line in lines]

    def per_token(line):
        return line["objective/kl"] / line["completions/mean_length"]

    names = {
        "reward": "objective/scores",
        "completions/mean_length": "completions/mean_length",
        "completions/clipped_ratio": "completions/clipped_ratio",
    }
    if ours:
        return [{name: line[name] for name in names.values()} | {"kl per token": per_token(line)} for line in lines]
    return [
        {name: line[theirs] for theirs, name in names.items()} | {"kl per token": line.get("kl", 0.0)} for line in lines
    ]


# ---- TRL, in its own environment -------------------------------------------------------------------------------------


def write_model(source: Path, target: Path):
    """A model for any transformers: config and tokenizer by the names of version 4 as well."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for file, more in (
        ("config", {"torch_dtype": "float32", "rotary_pct": 0.25, "rotary_emb_base": 10000}),
        ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        path = target / f"{file}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more | {"padding_side": "left"}))


def write_models(folder: Path):
    """Policy and reward model for any transformers."""
    for name in ("sft", "reward"):
        write_model(MINI_TLDR / name, folder / name)


def run_trl(python: str, job: dict) -> dict:
    """What `trl_job` writes, from this file run by `python`. Flags that it does not name are rloo.py's defaults."""
    import rloo

    out = Path(job["out"])
    out.mkdir(parents=True, exist_ok=True)
    defaults = dataclasses.asdict(rloo.resolve_args(rloo.parse_args([])))
    (out / "job.json").write_text(json.dumps(job | {"defaults": defaults}))
    call([python, __file__, "--trl_job", out / "job.json"])
    return json.loads((out / "result.json").read_text())


def trl_job(job: dict):
    """Runs in an environment with TRL: what the job asks for, as result.json."""
    torch.set_num_threads(1)  # so small a model gains nothing from a second one
    run = {"same": same_trl, "clip": clip_trl, "train": learn_trl}[job["part"]]
    Path(job["out"], "result.json").write_text(json.dumps(run(job)))


def trl_config(flags: dict, out: str) -> dict:
    """rloo.py's flags as arguments of the RLOOConfig of the TRL that is installed."""
    import trl

    alike = (
        "max_grad_norm",
        "temperature",
        "learning_rate",
        "lr_scheduler_type",
        "weight_decay",
        "seed",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    )
    common = {name: flags[name] for name in alike} | {
        "output_dir": out,
        "adam_epsilon": flags["adam_eps"],
        "bf16": flags["dtype"] == "bfloat16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    clip, epochs, mini_batches = flags["reward_clip_range"], flags["num_ppo_epochs"], flags["num_mini_batches"]
    if trl.__version__.startswith("0."):
        alike = (
            "rloo_k",
            "kl_coef",
            "response_length",
            "total_episodes",
            "num_ppo_epochs",
            "num_mini_batches",
            "normalize_reward",
            "normalize_advantage",
            "missing_eos_penalty",
            "local_rollout_forward_batch_size",
        )
        return (
            common
            | {name: flags[name] for name in alike}
            | {"reward_clip_range": clip or 10.0, "stop_token": "eos", "num_sample_generations": 0}
        )
    steps = flags["gradient_accumulation_steps"] * mini_batches
    updates = math.ceil(flags["total_episodes"] / (flags["per_device_train_batch_size"] * steps))
    return common | {
        "num_generations": flags["rloo_k"],
        "beta": flags["kl_coef"],
        "num_iterations": epochs,
        "max_completion_length": flags["response_length"],
        "steps_per_generation": steps,
        "max_steps": updates * epochs * mini_batches,
        "normalize_advantages": flags["normalize_advantage"],
        "reward_clip_range": clip and (-clip, clip),
        "mask_truncated_completions": flags["mask_truncated_completions"],
        "model_init_kwargs": {"dtype": flags.get("weights", "float32"), "attn_implementation": "sdpa"},
    }


def trl_trainer(job: dict, flags: dict, theirs: dict, prompts: list[str], reward: str, callback):
    """A trainer of the TRL that is installed. flags: rloo.py's, and `weights`, the dtype that models are loaded in."""
    import datasets
    import trl

    flags = job["defaults"] | flags
    tokenizer = AutoTokenizer.from_pretrained(f"{job['models']}/sft", padding_side="left")
    config = trl.RLOOConfig(**trl_config(flags, job["out"]) | theirs)
    dataset = datasets.Dataset.from_list([{"prompt": text} for text in prompts])
    if not trl.__version__.startswith("0."):
        return trl.RLOOTrainer(
            model=f"{job['models']}/sft",
            reward_funcs=trl1_reward(job, flags, reward, tokenizer),
            args=config,
            train_dataset=dataset,
            processing_class=tokenizer,
            callbacks=[callback],
        )

    def load(auto_class, name: str, **options):
        return auto_class.from_pretrained(
            f"{job['models']}/{name}",
            attn_implementation="sdpa",
            torch_dtype=getattr(torch, flags.get("weights", "float32")),
            **options,
        )

    return trl.RLOOTrainer(
        config=config,
        processing_class=tokenizer,
        policy=load(AutoModelForCausalLM, "sft"),
        ref_policy=load(AutoModelForCausalLM, "sft"),
        callbacks=[callback],
        reward_model=load(AutoModelForSequenceClassification, "reward", num_labels=1),
        train_dataset=dataset.map(lambda row: tokenizer(row["prompt"]), remove_columns=["prompt"]),
    )


def trl1_reward(job: dict, flags: dict, kind: str, tokenizer):
    """What TRL 1.x scores by. text: the reward model's folder, for which TRL tokenizes prompt and completion's text
    again, without a stop token. ids: the same model as a function of the tokens, which may end in one. length:
    length_score."""
    if kind != "ids":
        return length_score if kind == "length" else f"{job['models']}/reward"
    model = AutoModelForSequenceClassification.from_pretrained(f"{job['models']}/reward").eval()

    @torch.no_grad()
    def reward_model(prompts, completions, completion_ids, **columns) -> list[float]:
        rows = [p + c for p, c in zip(tokenizer(prompts)["input_ids"], completion_ids)]
        batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        scores = model(**batch).logits[:, 0].tolist()
        penalty = flags["missing_eos_penalty"] or 0.0
        return [score - penalty * (ids[-1] != tokenizer.eos_token_id) for score, ids in zip(scores, completion_ids)]

    return reward_model


class Notes(transformers.TrainerCallback):
    """Saves the weights after each update of `steps` steps as <prefix>-<update>.safetensors; keeps what is logged."""

    def __init__(self, prefix: str, steps: int):
        self.prefix, self.steps = prefix, steps
        self.lines: list[dict] = []

    def on_step_end(self, args, state, control, model, **options):
        if state.global_step % self.steps == 0:
            save_file(copy_of(model), f"{self.prefix}-{state.global_step // self.steps}.safetensors")

    def on_log(self, args, state, control, logs, **options):
        if "objective/kl" in logs or "reward" in logs:  # once for each rollout
            self.lines.append({name: value for name, value in logs.items() if isinstance(value, (int, float))})


def same_trl(job: dict) -> list[dict]:
    """Metrics of each update of each row on the given completions, and <row>-<update>.safetensors, the weights."""
    import numpy as np
    import trl
    from trl.trainer import rloo_trainer

    version = trl.__version__[0]
    tokenizer = AutoTokenizer.from_pretrained(f"{job['models']}/sft", padding_side="left")
    prompts, completions = job["prompts"], job["completions"]
    updates: Iterator = iter(())

    def next_given(prompt_ids: list[list[int]]):
        """Responses of the next update, once it is known that its prompts are those meant."""
        texts, responses = next(updates)
        assert prompt_ids == tokenizer(texts)["input_ids"], "the trainer shuffles its data"
        return torch.tensor(responses)

    def batch_generation(model, queries, size, pad_id, generation_config):  # 0.19
        first = queries[: len(queries) // K]
        responses = next_given([row[row != pad_id].tolist() for row in first]).flatten(0, 1)
        sequences = torch.cat([queries, responses], dim=1)
        with torch.no_grad():
            logits = rloo_trainer.forward(model, sequences, pad_id).logits[:, queries.shape[1] - 1 : -1]
        return sequences, logits / generation_config.temperature

    def generate_single_turn(prompt_ids, images, multimodal_fields):  # 1.x
        responses = next_given(prompt_ids[::K]).transpose(0, 1).flatten(0, 1).tolist()
        ends = [
            row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row) for row in responses
        ]
        return [row[:end] for row, end in zip(responses, ends)]

    if version == "0":
        loader = rloo_trainer.DataLoader
        rloo_trainer.batch_generation = batch_generation
        rloo_trainer.DataLoader = lambda *data, **options: loader(*data, **options | {"shuffle": False})
        np.random.permutation = lambda n: np.arange(n).reshape(K, -1).T.flatten()  # prompt by prompt
    else:
        rloo_trainer.shuffle_sequence_dict = lambda batch: batch

    found = []
    for number, row in enumerate(Row(**row) for row in job["rows"]):
        flags = BASE | row.flags
        steps = flags.get("num_ppo_epochs", 1) * flags.get("num_mini_batches", 1) if version == "1" else 1  # per update
        notes = Notes(f"{job['out']}/{number}", steps)
        updates = iter(zip(prompts, completions))
        data = [text for texts in prompts for text in texts]
        data += [] if row.short_data else data[:PROMPTS]
        theirs = row.theirs | ({"shuffle_dataset": False} if version == "1" else {})
        trainer = trl_trainer(job, flags, theirs, data, row.reward, notes)
        if version == "1":
            trainer._generate_single_turn = generate_single_turn
        trainer.train()
        assert len(notes.lines) == UPDATES
        found.append({"metrics": notes.lines})
    return found


class Ratios:
    """Notes what TRL's clip does: it passes a ratio to torch.clamp and then takes the larger of two losses (torch.max
    in 0.19) or the smaller of two gains (torch.min in 1.x), the clipped one being the second."""

    def __init__(self):
        self.calls: list[tuple[list[float], list[bool]]] = []  # per micro-batch: ratios; whether the clip decided
        own = torch.clamp, torch.max, torch.min
        waiting = []

        def clamp(x, *limits, **options):
            if limits and not options and abs(limits[0] - 0.8) < 1e-9 and abs(limits[1] - 1.2) < 1e-9:  # 1 ± cliprange
                waiting.append(x.detach().float().tolist())
            return own[0](x, *limits, **options)

        def chosen(function, x, *rest, **options):
            if waiting and rest and isinstance(rest[0], torch.Tensor):
                second = rest[0] > x if function is own[1] else rest[0] < x
                self.calls.append((waiting.pop(), second.tolist()))
            return function(x, *rest, **options)

        torch.clamp = clamp
        torch.max = lambda *x, **options: chosen(own[1], *x, **options)
        torch.min = lambda *x, **options: chosen(own[2], *x, **options)


def clip_trl(job: dict) -> dict:
    """Trains freely, once for each of the flags in job["runs"]; <run>.json: what the clip did in each micro-batch."""
    ratios = Ratios()
    for name, flags in job["runs"].items():
        ratios.calls = []
        trl_trainer(job, flags, {}, job["prompts"], "text", transformers.TrainerCallback()).train()
        Path(job["out"], f"{name}.json").write_text(json.dumps(ratios.calls))
    return {}


def learn_trl(job: dict) -> dict:
    """Trains freely, and saves a model every job["every"] updates. Times of training alone after each update."""
    watch = Stopwatch()

    class Marks(transformers.TrainerCallback):
        def on_train_begin(self, *args, **options):
            watch.start()

        def on_step_end(self, args, state, control, model, **options):
            watch.stop()
            if state.global_step % job["every"] == 0:
                model.save_pretrained(f"{job['out']}/{state.global_step}")
            watch.start()

    trl_trainer(job, job["flags"], {}, job["prompts"], job["reward"], Marks()).train()
    return {"times": watch.times}


# ---- same ------------------------------------------------------------------------------------------------------------


def same(args: "Args", trl: dict[str, str]):
    work = Path(args.work) / "same"
    write_models(work)
    prompts, completions = given_prompts(), sample_completions()
    start = load_file(MINI_TLDR / "sft" / "model.safetensors")
    table, golden = [], []
    for title, python in trl.items():
        rows = [row for row in ROWS if row.trl == title.split()[1][0]]
        out = work / title.split(",")[0].replace(" ", "-")
        print(f"{title}: {len(rows)} settings", flush=True)
        job = {
            "part": "same",
            "models": str(work),
            "out": str(out),
            "prompts": prompts,
            "completions": completions,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        for number, (row, theirs) in enumerate(zip(rows, run_trl(python, job))):
            ours = same_rloo(row.flags, prompts, completions, work / "rloo")
            weights = [load_file(out / f"{number}-{i}.safetensors") for i in range(1, UPDATES + 1)]
            assert len(ours["weights"]) == UPDATES + 1 and weights[0].keys() == start.keys()
            difference = largest(ours["weights"][-1], weights[-1])
            table.append(
                {
                    "trl": title,
                    "setting": row.name,
                    "difference": difference,
                    "rloo.py moved": largest(ours["weights"][-1], start),
                    "TRL moved": largest(weights[-1], start),
                    "relative": distance(ours["weights"][-1], weights[-1]) / distance(start, weights[-1]),
                    "agree": difference <= AGREE,
                    "why": row.why,
                }
            )
            if not row.why and row.golden:
                flags = {name: value for name, value in row.flags.items() if name != "reward_fns"}
                golden.append(
                    {
                        "trl": title,
                        "setting": row.name,
                        "flags": flags,
                        "reward": row.reward,
                        "metrics": comparable(row.trl, theirs["metrics"], ours=False),
                        "movement": [movement(start, after) for after in weights],
                    }
                )
    print(same_table(table))
    result = {
        "command": command(),
        "machine": device_name("cpu"),
        "torch": torch.__version__,
        "updates": UPDATES,
        "table": table,
        "models": {name: hash_of(name) for name in ("sft", "reward")},
        "base": BASE,
        "prompts": prompts,
        "completions": completions,
        "golden": golden,
    }
    GOLDEN.write_text(json.dumps(rounded(result), separators=(",", ":"), ensure_ascii=False) + "\n")
    print(f"\nnumbers: {GOLDEN}")
    wrong = [f"{line['trl']}, {line['setting']}" for line in table if not line["agree"] and not line["why"]]
    if wrong:
        fail(f"the weights differ by more than {AGREE:g} and no reason is known: {'; '.join(wrong)}")


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of an entry."""
    return max((a[name] - b[name]).abs().max().item() for name in a)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all weights."""
    return sum((a[name].double() - b[name].double()).square().sum().item() for name in a) ** 0.5


def same_table(table: list[dict]) -> str:
    lines = [
        f"max |Δw| after {UPDATES} updates on the same completions; moved: max |w − w before|; "
        "relative: ‖Δw‖ / ‖w − w before‖"
    ]
    for title, rows in itertools.groupby(table, lambda row: row["trl"]):
        lines.append(f"\n{title:42}{'max |Δw|':>10}{'relative':>10}{'rloo moved':>12}{'TRL moved':>11}  why it differs")
        for row in rows:
            verdict = row["why"] or ("" if row["agree"] else "NO REASON KNOWN")
            lines.append(
                f"  {row['setting']:40}{row['difference']:10.1e}{row['relative']:10.1e}"
                f"{row['rloo.py moved']:12.1e}{row['TRL moved']:11.1e}  {verdict}".rstrip()
            )
    return "\n".join(lines)


# ---- clip ------------------------------------------------------------------------------------------------------------


def clip_rloo(flags: dict, output: Path) -> list:
    """What the clip of rloo.py did in each micro-batch: ratios; whether the clip decided."""
    import rloo

    calls, policy_loss = [], rloo.policy_loss

    def noted(*arguments):
        found = policy_loss(*arguments)
        calls.append((found[1].double().exp().flatten().tolist(), found[2].flatten().tolist()))
        return found

    rloo.policy_loss = noted
    try:
        train_rloo(flags, output)
    finally:
        rloo.policy_loss = policy_loss
    return calls


def clip_figures(calls: list, steps: int, accumulation: int) -> dict[str, float]:
    """Shares of completions: in the first optimizer step of each update, and in all of its `steps`; |log ρ| of the
    first, its mean and maximum."""
    assert len(calls) % (steps * accumulation) == 0
    first = [call for i, call in enumerate(calls) if i % (steps * accumulation) < accumulation]
    ratios = [ratio for call in first for ratio in call[0]]
    logs = [abs(math.log(ratio)) for ratio in ratios]
    removed, all_removed = ([x for call in part for x in call[1]] for part in (first, calls))
    return {
        "first step, |log ρ|": statistics.mean(logs),
        "largest |log ρ|": max(logs),
        "first step, ρ outside": statistics.mean(abs(ratio - 1) > 0.2 for ratio in ratios),
        "first step, removed": statistics.mean(removed),
        "all steps, removed": statistics.mean(all_removed),
        "completions": len(ratios),
    }


def clip(args: "Args", trl: dict[str, str]):
    work = Path(args.work) / "clip"
    write_models(work)
    texts = training_prompts(args.clip_updates * 64)  # twice as many as are needed
    trainers = {"rloo.py --dtype bfloat16": ("", "")}
    for title, python in trl.items():
        for weights in ("float32", "bfloat16"):
            precision = "bfloat16 autocast" if weights == "float32" else "bfloat16 weights"
            trainers[f"{title.split(',')[0]}, {precision}"] = (python, weights)
    runs, found = {}, []
    for (trainer, (python, weights)), n, seed in itertools.product(trainers.items(), (1, 2), range(1, args.seeds + 1)):
        flags = {
            "dtype": "bfloat16",
            "num_ppo_epochs": n,
            "num_mini_batches": n,
            "gradient_accumulation_steps": 2 // n,
            "total_episodes": args.clip_updates * 128,
            "seed": seed,
        }
        name = f"{trainer}-{n}-{args.clip_updates}-{seed}".replace(" ", "").replace(",", "-")
        runs[trainer, n, seed] = python, name, flags | ({"weights": weights} if weights else {})
    for python in ("", *trl.values()):
        missing = {
            name: flags
            for owner, name, flags in runs.values()
            if owner == python and not (work / f"{name}.json").is_file()
        }
        print(f"{python or 'rloo.py'}: {len(missing)} runs", flush=True)
        if python and missing:
            run_trl(python, {"part": "clip", "models": str(work), "out": str(work), "prompts": texts, "runs": missing})
        for name, flags in missing.items() if not python else ():
            (work / f"{name}.json").write_text(json.dumps(clip_rloo(flags, work / name)))
    for trainer, n in itertools.product(trainers, (1, 2)):
        names = [runs[trainer, n, seed][1] for seed in range(1, args.seeds + 1)]
        calls = [json.loads((work / f"{name}.json").read_text()) for name in names]
        found.append(
            {
                "trainer": trainer,
                "epochs": n,
                "mini-batches": n,
                "runs": [clip_figures(x, n * n, 2 // n) for x in calls],
            }
        )
    result = {
        "command": command(),
        "machine": device_name("cpu"),
        "torch": torch.__version__,
        "versions": list(trl),
        "updates": args.clip_updates,
        "found": rounded(found),
    }
    print(f"\n{clip_table(found)}\n\n{save(result, args.output or str(HERE / 'clip.json'))}")


def clip_table(found: list[dict]) -> str:
    names = [name for name in found[0]["runs"][0] if name != "completions"]
    lines = [
        "bfloat16, embedded task: % of completions; |log ρ|: mean, maximum; ± standard error over the seeds",
        "",
        f"{'epochs × mini-batches':34}" + "".join(f"{name:>24}" for name in names),
    ]
    for line in found:
        cells = []
        for name in names:
            values = [run[name] * (1 if "log" in name else 100) for run in line["runs"]]
            digits = 5 if "log" in name else 2
            cells.append(f"{statistics.mean(values):.{digits}f} ± {standard_error(values):.{digits}f}")
        lines.append(
            f"{line['trainer']} {line['epochs']} × {line['mini-batches']}".ljust(34)
            + "".join(f"{cell:>24}" for cell in cells)
        )
    return "\n".join(lines)


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


# ---- train -----------------------------------------------------------------------------------------------------------


def learn_rloo(flags: dict, out: Path, every: int):
    """Trains by rloo.py; models and times as `learn_trl` leaves them."""
    import rloo

    watch, update = Stopwatch(), rloo.update

    def timed(*arguments):
        watch.start()
        metrics = update(*arguments)
        watch.stop()
        return metrics

    rloo.update = timed
    try:
        train_rloo(flags | {"save_steps": every, "save_total_limit": 1000}, out / "run")
    finally:
        rloo.update = update
    for path in (out / "run").glob("checkpoint-*"):
        path.rename(out / path.name.removeprefix("checkpoint-"))
    (out / "result.json").write_text(json.dumps({"times": watch.times}))


def win_rates(model: Path, seed: int) -> dict[str, float]:
    """Any trainer's model on the 500 test posts, by the evaluation of rloo.py in float32."""
    import rloo

    output = model / "evaluation"
    shutil.rmtree(output, ignore_errors=True)

    for path in (MINI_TLDR / "sft").glob("*.json"):  # TRL writes other names, and a generation config without eos
        shutil.copy(path, model)
    flags = [
        f"--sft_model_path={model}",
        f"--output_dir={output}",
        "--total_episodes=0",
        f"--seed={seed}",
        "--kl_coef=0",
        "--device=cpu",
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return rloo.main(rloo.parse_args(flags))["before"]


def train(args: "Args", trl: dict[str, str]):
    work = Path(args.work) / "train"
    write_models(work / "models")
    texts = training_prompts()
    trainers = {"rloo.py": (None, "")}
    for title, python in trl.items():
        name = title.split(",")[0]
        trainers[name] = (python, "text")
        if args.by_ids and name.startswith("TRL 1."):
            trainers[f"{name}, scored by ids"] = (python, "ids")
    found = defaultdict(list)
    for seed, (trainer, (python, reward)) in itertools.product(range(1, args.seeds + 1), trainers.items()):
        flags = {"seed": seed, "total_episodes": args.episodes, "dtype": args.dtype}
        out = work / f"{trainer}-{args.dtype}-{args.episodes}-{seed}".replace(" ", "")
        if not (out / "result.json").is_file():
            shutil.rmtree(out, ignore_errors=True)
            job = {
                "part": "train",
                "models": str(work / "models"),
                "out": str(out),
                "prompts": texts,
                "flags": flags,
                "reward": reward,
                "every": args.every,
            }
            run_trl(python, job) if python else learn_rloo(flags, out, args.every)
        if not (out / "learned.json").is_file():
            shutil.copytree(MINI_TLDR / "sft", out / "0", dirs_exist_ok=True)
            times = [{"seconds": 0.0, "cpu_seconds": 0.0}, *json.loads((out / "result.json").read_text())["times"]]
            points = [
                {"update": update} | times[update] | win_rates(out / str(update), seed)
                for update in range(0, len(times), args.every)
            ]
            (out / "learned.json").write_text(json.dumps(points))
        found[trainer].append(json.loads((out / "learned.json").read_text()))
        last = found[trainer][-1][-1]
        print(
            f"{trainer}, seed {seed}: {last['seconds']:.0f} s, {last['cpu_seconds']:.0f} of the processor; gold win "
            f"rate sampled {last['sampled/judge_win_rate']:.3f}, greedy {last['greedy/judge_win_rate']:.3f}",
            flush=True,
        )
    result = {
        "command": command(),
        "machine": f"{device_name('cpu')}, threads: {torch.get_num_threads()}",
        "torch": torch.__version__,
        "versions": list(trl),
        "found": rounded(found),
    }
    name = "train.json" if args.dtype == "float32" else f"train_{args.dtype}.json"
    print(f"\n{train_table(found, args)}\n\n{save(result, args.output or str(HERE / name), draw)}")


TABLE = {  # figure: its title, scale and digits
    "sampled/judge_win_rate": ("gold wins, sampled, %", 100, 1),
    "greedy/judge_win_rate": ("greedy, %", 100, 1),
    "sampled/judge_score": ("gold score, sampled", 1, 2),
    "sampled/score": ("proxy score, sampled", 1, 2),
    "sampled/length": ("tokens, sampled", 1, 1),
    "cpu_seconds": ("CPU seconds", 1, 0),
    "seconds": ("seconds", 1, 0),
}


def train_table(found: dict[str, list], args: "Args") -> str:
    title = (
        f"{args.episodes:,} episodes in {args.dtype}, {args.seeds} seeds, 500 test posts: mean ± standard error "
        "over the seeds; seconds of training alone, one thread"
    )
    lines = [title, "", f"{'':30}" + "".join(f"{name:>28}" for name, _, _ in TABLE.values())]
    before = [runs[0] for runs in found["rloo.py"]]
    for trainer, last in [("before", before), *((name, [run[-1] for run in runs]) for name, runs in found.items())]:
        cells = []
        for key, (_, scale, digits) in TABLE.items():
            values = [point[key] * scale for point in last]
            cells.append(f"{statistics.mean(values):.{digits}f} ± {standard_error(values):.{digits}f}")
        lines.append(f"{trainer:30}" + "".join(f"{cell:>28}" for cell in cells))
    return "\n".join(lines)


def draw(result: dict, pyplot):
    """Gold win rate, sampled, against CPU seconds of training: means over the seeds with their standard errors."""
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for trainer, runs in result["found"].items():
        points = list(zip(*runs))
        seconds = [statistics.mean(point["cpu_seconds"] for point in group) for group in points]
        rates = [[100 * point["sampled/judge_win_rate"] for point in group] for group in points]
        axes.errorbar(
            seconds,
            [statistics.mean(x) for x in rates],
            [standard_error(x) for x in rates],
            label=trainer,
            marker="o",
            markersize=3,
            capsize=3,
        )
    axes.set(
        xlabel="CPU seconds of training on one thread (without evaluations)",
        ylabel="gold win rate on 500 test posts, sampled, %",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    count = len(next(iter(result["found"].values())))
    figure.suptitle(
        f"Each trainer on mini TL;DR by the settings of rloo.py's defaults ({result['machine']})\n"
        f"points: evaluations, mean over {count} seeds; bars: ± standard error",
        fontsize=9,
    )


# ---- Command line ----------------------------------------------------------------------------------------------------


@dataclass
class Args:
    """TRL's own RLOO trainers beside rloo.py, on the embedded task."""

    part: Literal["same", "clip", "train", "draw"]
    """what to compare; draw: only the picture, from the numbers of train"""
    trl: tuple[str, ...] = ()
    """python of an environment with TRL 0.19 or 1.x; may be given several times"""
    seeds: int = 3
    """clip, train: runs of each trainer, with seeds 1, 2, ..."""
    clip_updates: int = 5
    """clip: updates per run, of 128 completions"""
    episodes: int = 6_400
    """train: completions per run"""
    every: int = 10
    """train: updates between evaluations"""
    by_ids: bool = False
    """train: TRL 1.x also with the reward model as a function of tokens, which sees the stop token"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """train: dtype of the forward passes"""
    work: str = "runs/trl_parity"
    """folder for the runs; finished runs of clip and train are not repeated"""
    output: str | None = None
    """clip, train: .json file for the numbers; if not given, beside this file"""


def command() -> str:
    """What was typed, with the ends of long paths."""
    short = ["/".join(Path(part).parts[-3:]) if part.startswith("/") else part for part in sys.argv[1:]]
    return " ".join(["python", "benchmark/trl/trl_parity.py", *short])


def main(args: Args):
    if args.part == "draw":
        path = Path(args.output or HERE / "train.json")
        print(draw_beside(json.loads(path.read_text()), path, draw))
        return
    if not args.trl:
        fail("--trl is needed: python of an environment with TRL, see benchmark/requirements.txt")
    if min(args.seeds, args.clip_updates, args.every) < 1 or args.episodes < 128 * args.every:
        fail("--seeds, --clip_updates and --every must be at least 1, --episodes at least 128 per --every")
    if args.output and not args.output.endswith(".json"):
        fail(f"--output {args.output}: must end in .json")
    trl = trl_versions(args.trl)
    for title in trl:
        if not title.startswith(("TRL 0.19", "TRL 1.")):
            fail(f"--trl: {title} is neither TRL 0.19 nor 1.x")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    {"same": same, "clip": clip, "train": train}[args.part](args, trl)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trl_job"]:
        trl_job(json.loads(Path(sys.argv[2]).read_text()))
    else:
        import tyro

        main(tyro.cli(Args, config=(tyro.conf.PositionalRequiredArgs, tyro.conf.UseAppendAction), use_underscores=True))
