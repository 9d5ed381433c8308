"""Trains by a trainer of TRL, with the flags of rloo.py, in an environment that has this TRL.

    trl0/bin/python benchmark/trl_run.py rloo --output_dir runs/trl0      # RLOOTrainer of TRL 0.19
    trl0/bin/python benchmark/trl_run.py ppo --output_dir runs/ppo --num_ppo_epochs 4 --learning_rate 2e-4
    trl1/bin/python benchmark/trl_run.py rloo --output_dir runs/trl1      # RLOOTrainer of TRL 1.x
    trl1/bin/python benchmark/trl_run.py grpo --output_dir runs/grpo

benchmark/requirements.txt says how to make the environments. Defaults are those of rloo.py for mini TL;DR; prompts are
texts. A trainer's config raises TypeError for a flag that it does not have. PPO samples one completion per prompt,
whatever --rloo_k says.

The folder gets the policy, with the tokenizer and the configuration that it had before, and metrics.jsonl: a line for
each update with its score, the seconds since the previous update and, on a GPU, the peak memory. With --save_steps, a
run of TRL 1.x that was stopped continues, with other samples, when its command is repeated.
"""

import argparse
import json
import math
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parent))
from runs import HERE, lines  # noqa: E402

TASK = HERE / "mini_tldr"
DEFAULTS = {"seed": 1, "rloo_k": 4, "response_length": 53, "temperature": 0.7, "total_episodes": 6_400}
DEFAULTS |= {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "num_mini_batches": 1}
DEFAULTS |= {"local_rollout_forward_batch_size": 64, "num_ppo_epochs": 1, "kl_coef": 0.02, "learning_rate": 2.5e-4}
DEFAULTS |= {"lr_scheduler_type": "linear", "warmup_ratio": 0.0, "adam_eps": 1e-8, "max_grad_norm": 1.0}
OFF = ("missing_eos_penalty", "reward_clip_range")  # numbers; without the flag nothing is set
SWITCHES = ("token_level_kl", "normalize_reward", "normalize_advantage", "mask_truncated_completions")
NAMES_1 = {  # in the configs of TRL 1.x; those of TRL 0.19 have the names of rloo.py
    "rloo_k": "num_generations",
    "response_length": "max_completion_length",
    "num_ppo_epochs": "num_iterations",
    "kl_coef": "beta",
    "normalize_advantage": "normalize_advantages",
    "warmup_ratio": "warmup_steps",  # below 1 it is a share
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["rloo", "ppo", "grpo"])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--sft_model_path", type=Path, default=TASK / "sft")
    parser.add_argument("--reward_model_path", type=Path, default=TASK / "reward")
    parser.add_argument(
        "--value_model_path", type=Path, help="what PPO's value model begins as; default: the reward model"
    )
    parser.add_argument("--reward_fns", help="1.x: file.py:function, in place of the reward model")
    parser.add_argument("--reward_by", choices=["ids", "text"], default="ids", help="1.x: what a reward model reads")
    parser.add_argument("--dataset_name", type=Path, default=TASK, help="folder with train.jsonl")
    parser.add_argument("--max_prompt_length", type=int, default=512)
    parser.add_argument("--save_steps", type=int, default=0, help="1.x: optimizer steps between checkpoints; 0: none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name in OFF:
        parser.add_argument(f"--{name}", type=float)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", default=None)
    return parser.parse_args(argv)


def config_of(args, version: int) -> dict:
    """Returns the arguments of the trainer's config. Nothing is evaluated or shown."""
    names = [name for name in (*DEFAULTS, *OFF, *SWITCHES) if getattr(args, name) is not None]
    config = {name: getattr(args, name) for name in names}
    config["adam_epsilon"] = config.pop("adam_eps")
    config |= {
        "output_dir": str(args.output_dir),
        "optim": "adamw_torch_fused",
        "bf16": args.dtype == "bfloat16",
        "use_cpu": args.device == "cpu",
        "dataloader_pin_memory": args.device != "cpu",
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "steps" if args.save_steps else "no",
        "save_steps": args.save_steps or 1,
        "save_total_limit": 1,
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    if version == 0:
        if args.trainer == "ppo":
            del config["rloo_k"]
        return config | {"stop_token": "eos", "num_sample_generations": 0}
    del config["local_rollout_forward_batch_size"]
    config.pop("missing_eos_penalty", None)  # see with_penalty
    micro_batches = args.gradient_accumulation_steps * config.pop("num_mini_batches")  # of an update
    updates = math.ceil(config.pop("total_episodes") / (args.per_device_train_batch_size * micro_batches))
    if args.reward_clip_range:
        config["reward_clip_range"] = (-args.reward_clip_range, args.reward_clip_range)
    return {NAMES_1.get(name, name): value for name, value in config.items()} | {
        "steps_per_generation": micro_batches,
        "max_steps": updates * args.num_ppo_epochs * args.num_mini_batches,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
    }


# ---- Models and rewards ---------------------------------------------------------------------------------------------


def load_in_transformers_4(path: Path, dtype: str, auto_class=AutoModelForSequenceClassification):
    """Loads a model that transformers 5 has saved, whose configuration has other names for RoPE's settings."""
    config = transformers.AutoConfig.from_pretrained(path, num_labels=1)
    config.rope_theta = config.rotary_emb_base = config.rope_parameters["rope_theta"]
    config.rotary_pct = config.rope_parameters.get("partial_rotary_factor", 1.0)
    options = {"attn_implementation": "sdpa", "torch_dtype": getattr(torch, dtype)}
    return auto_class.from_pretrained(path, config=config, **options)


def score_by_ids(args, tokenizer) -> Callable:
    """Returns the reward model as a function of token ids. Given the model's folder, TRL 1.x would score the text,
    tokenized again and without the stop token."""
    model = AutoModelForSequenceClassification.from_pretrained(args.reward_model_path).to(args.device).eval()

    @torch.no_grad()
    def reward_model(prompts, completions, completion_ids, **columns) -> list[float]:
        rows = [p + c for p, c in zip(tokenizer(prompts)["input_ids"], completion_ids, strict=True)]
        inputs = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt").to(args.device)
        return model(**inputs).logits[:, 0].tolist()

    return reward_model


def with_penalty(reward: Callable, penalty: float, eos: int) -> Callable:
    """Returns the reward minus the penalty for completions that do not end with the stop token."""

    @wraps(reward)
    def penalized(completion_ids, **columns):
        scores = reward(completion_ids=completion_ids, **columns)
        return [score - penalty * (ids[-1] != eos) for score, ids in zip(scores, completion_ids, strict=True)]

    return penalized


# ---- The trainer -----------------------------------------------------------------------------------------------------


class Metrics(transformers.TrainerCallback):
    """Writes metrics.jsonl: a line for each update. What is logged has been read from the GPU, which has then finished
    the update."""

    def __init__(self, steps: int):
        self.steps = steps  # optimizer steps of an update

    def on_train_begin(self, args, state, control, **options):
        self.file = Path(args.output_dir) / "metrics.jsonl"
        self.updates, self.begin = state.global_step // self.steps, time.perf_counter()
        before = self.file.read_text().splitlines(keepends=True) if self.updates else []
        self.file.write_text("".join(before[: self.updates]))

    def on_log(self, args, state, control, logs, **options):
        score = logs.get("objective/scores", logs.get("reward"))
        if score is None:  # a later step of the update, or the summary at the end
            return
        now, self.updates = time.perf_counter(), self.updates + 1
        line = {"update": self.updates, "objective/scores": score, "time/update": now - self.begin}
        if torch.cuda.is_available():
            line["memory/peak_gb"] = torch.cuda.max_memory_reserved() / 2**30  # GiB, as rloo.py counts them
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.begin = now


def trainer_of(args, rows: list[dict]):
    """Returns the trainer of the installed TRL for rows with a prompt each."""
    import datasets
    import trl

    version = int(trl.__version__.partition(".")[0])
    config = getattr(trl, f"{args.trainer.upper()}Config")(**config_of(args, version))
    trainer = getattr(trl, f"{args.trainer.upper()}Trainer")
    tokenizers = AutoTokenizer if version == 1 else transformers.PreTrainedTokenizerFast  # 4 lacks 5's classes
    tokenizer = tokenizers.from_pretrained(args.sft_model_path, padding_side="left")
    rows = [row for row in rows if len(tokenizer(row["prompt"])["input_ids"]) <= args.max_prompt_length]
    data = datasets.Dataset.from_list(rows)
    metrics = Metrics(args.num_ppo_epochs * args.num_mini_batches)
    given = {"train_dataset": data, "processing_class": tokenizer, "callbacks": [metrics]}
    if version == 1:
        if args.reward_fns:
            path, name = args.reward_fns.rsplit(":", 1)
            reward = runpy.run_path(path)[name]
        else:
            reward = score_by_ids(args, tokenizer) if args.reward_by == "ids" else str(args.reward_model_path)
        if args.missing_eos_penalty:
            reward = with_penalty(reward, args.missing_eos_penalty, tokenizer.eos_token_id)
        return trainer(str(args.sft_model_path), reward, args=config, **given)

    if args.reward_fns:
        raise SystemExit("trl_run.py: TRL 0.19 does not call --reward_fns")
    given["train_dataset"] = data.map(lambda row: tokenizer(row["prompt"]), remove_columns=data.column_names)
    policy = load_in_transformers_4(args.sft_model_path, "float32", AutoModelForCausalLM)
    reference = load_in_transformers_4(args.sft_model_path, args.dtype, AutoModelForCausalLM)
    given["reward_model"] = load_in_transformers_4(args.reward_model_path, args.dtype)
    if args.trainer == "rloo":
        return trainer(config=config, policy=policy, ref_policy=reference, **given)
    given["value_model"] = load_in_transformers_4(args.value_model_path or args.reward_model_path, "float32")
    given["eval_dataset"] = given["train_dataset"].select(range(1))  # required, but unused
    return trainer(args=config, model=policy, ref_model=reference, **given)


def main(args: argparse.Namespace):
    transformers.set_seed(args.seed)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    trainer = trainer_of(args, lines(args.dataset_name / "train.jsonl"))
    stopped = any(args.output_dir.glob("checkpoint-*"))
    trainer.train(**{"resume_from_checkpoint": True} if stopped else {})  # in 0.19 there is no such argument
    policy = trainer.accelerator.unwrap_model(trainer.model)
    policy = getattr(policy, "policy", policy)  # PPO's model has a value model as well
    policy.save_pretrained(args.output_dir)
    for path in (*args.sft_model_path.glob("*.json"), *args.sft_model_path.glob("*.jinja")):
        shutil.copy(path, args.output_dir)  # TRL writes other names, and a generation config without eos


# ---- For scripts that run this one -----------------------------------------------------------------------------------


def versions(python: str) -> str:
    """Returns the versions of TRL and transformers that a python has."""
    code = 'from importlib.metadata import version as v; print(f\'TRL {v("trl")}, transformers {v("transformers")}\')'
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def words_of(flags: dict) -> list[str]:
    """Returns flags as words of a command. True stands for a flag without a value, None for no flag."""
    words = []
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


if __name__ == "__main__":
    main(parse_args())
