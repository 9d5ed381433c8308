"""Trains by a trainer of TRL, with the flags of rloo.py, in an environment that has this TRL.

    trl0/bin/python benchmark/trl_run.py rloo --output_dir runs/trl0      # RLOOTrainer of TRL 0.19
    trl0/bin/python benchmark/trl_run.py ppo --output_dir runs/ppo --num_ppo_epochs 4 --learning_rate 2e-4
    trl1/bin/python benchmark/trl_run.py rloo --output_dir runs/trl1      # RLOOTrainer of TRL 1.x
    trl1/bin/python benchmark/trl_run.py grpo --output_dir runs/grpo

benchmark/requirements.txt says how to make the environments. Defaults are those of rloo.py for mini TL;DR. A flag that
would change the objective is refused if the trainer has no setting for it. PPO samples one completion per prompt,
whatever --rloo_k says, and begins its value model as the reward model.

The folder gets the policy, with the tokenizer and the configuration that it had before, and metrics.jsonl: a line for
each update with its score, the seconds since the previous update and, on a GPU, the peak memory. The folder appears
when the run is complete; a run cannot be resumed.
"""

import argparse
import json
import math
import runpy
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parent))
from runs import HERE, lines  # noqa: E402

TASK = HERE / "mini_tldr"
# Settings of each trainer: flag -> its name in the config of TRL 0.19 or 1.x. `config_of` adds the common ones.
PPO_V0 = ("total_episodes", "num_ppo_epochs", "num_mini_batches", "kl_coef", "response_length", "missing_eos_penalty")
PPO_V0 += ("local_rollout_forward_batch_size",)
RLOO_V0 = PPO_V0 + ("rloo_k", "token_level_kl", "normalize_reward", "normalize_advantage", "reward_clip_range")
GRPO_V1 = {
    "rloo_k": "num_generations",
    "kl_coef": "beta",
    "response_length": "max_completion_length",
    "num_ppo_epochs": "num_iterations",
    "mask_truncated_completions": "mask_truncated_completions",
}
SETTINGS = {
    ("ppo", 0): {name: name for name in PPO_V0},
    ("rloo", 0): {name: name for name in RLOO_V0},
    ("grpo", 1): GRPO_V1,
    ("rloo", 1): GRPO_V1 | {"normalize_advantage": "normalize_advantages", "reward_clip_range": "reward_clip_range"},
}
OFF = {  # flags that not every trainer has, with the values at which they do nothing
    "token_level_kl": False,
    "normalize_reward": False,
    "normalize_advantage": False,
    "mask_truncated_completions": False,
    "reward_clip_range": None,
    "missing_eos_penalty": None,
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["rloo", "ppo", "grpo"])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--sft_model_path", type=Path, default=TASK / "sft")
    parser.add_argument("--reward_model_path", type=Path, default=TASK / "reward")
    parser.add_argument("--reward_fns", help="1.x: file.py:function, which gets texts, in place of the reward model")
    parser.add_argument("--reward_by", choices=["ids", "text"], default="ids", help="1.x: what a reward model reads")
    parser.add_argument("--dataset_name", type=Path, default=TASK, help="folder with train.jsonl")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--lr_scheduler_type", default="linear", choices=["linear", "cosine", "constant"])
    numbers = {"seed": 1, "rloo_k": 4, "response_length": 53, "total_episodes": 6_400, "num_ppo_epochs": 1}
    numbers |= {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1, "num_mini_batches": 1}
    numbers |= {"local_rollout_forward_batch_size": 64, "temperature": 0.7, "kl_coef": 0.02, "learning_rate": 2.5e-4}
    numbers |= {"adam_eps": 1e-8, "max_grad_norm": 1.0, "warmup_ratio": 0.0, "max_prompt_length": 512}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name, default in OFF.items():
        options = {"type": float} if default is None else {"action": "store_true"}
        parser.add_argument(f"--{name}", default=default, **options)
    return parser.parse_args(argv)


def config_of(args, version: int) -> dict:
    """Returns the arguments of the trainer's config. Nothing is saved, evaluated or shown."""
    settings = SETTINGS.get((args.trainer, version))
    if settings is None:
        raise SystemExit(f"trl_run.py: {args.trainer} is not a trainer of TRL {'0.19' if version == 0 else '1.x'}")
    known = {*settings}
    if version == 1 and (args.reward_by == "ids" or args.reward_fns):
        known.add("missing_eos_penalty")  # see with_penalty
    unknown = [name for name, off in OFF.items() if getattr(args, name) != off and name not in known]
    if version == 0 and args.reward_fns:
        unknown.append("reward_fns")
    if unknown:
        raise SystemExit(f"trl_run.py: {args.trainer} of this TRL has no setting for --{', --'.join(unknown)}")
    same = ("seed", "temperature", "learning_rate", "lr_scheduler_type", "max_grad_norm")
    same += ("per_device_train_batch_size", "gradient_accumulation_steps")
    config = {name: getattr(args, name) for name in same}
    config |= {theirs: getattr(args, name) for name, theirs in settings.items()}
    config |= {
        "adam_epsilon": args.adam_eps,
        "optim": "adamw_torch_fused",
        "bf16": args.dtype == "bfloat16",
        "use_cpu": args.device == "cpu",
        "dataloader_pin_memory": args.device != "cpu",
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    clip = args.reward_clip_range
    if version == 0:
        config["warmup_ratio"] = args.warmup_ratio
        config |= {"stop_token": "eos", "num_sample_generations": 0}
        if args.trainer == "rloo":
            config["reward_clip_range"] = clip or 10.0  # it cannot be switched off
        return config
    if clip:
        config["reward_clip_range"] = (-clip, clip)
    micro_batches = args.gradient_accumulation_steps * args.num_mini_batches  # of an update
    updates = math.ceil(args.total_episodes / (args.per_device_train_batch_size * micro_batches))
    return config | {
        "steps_per_generation": micro_batches,
        "warmup_steps": args.warmup_ratio,  # below 1 it is a share
        "max_steps": updates * args.num_ppo_epochs * args.num_mini_batches,
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
    }


# ---- Models and rewards ---------------------------------------------------------------------------------------------


def write_for_transformers_4(source: Path, target: Path):
    """Copies a model's folder and adds the names that transformers 4 uses for settings of the model and tokenizer."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config, tokenizer = target / "config.json", target / "tokenizer_config.json"
    found = json.loads(config.read_text())
    rope = found["rope_parameters"]
    found |= {"torch_dtype": "float32", "rope_theta": rope["rope_theta"], "rotary_emb_base": rope["rope_theta"]}
    config.write_text(json.dumps(found | {"rotary_pct": rope.get("partial_rotary_factor", 1.0)}))
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | more))


def score_by_ids(args) -> Callable:
    """Returns the reward model as a function of token ids. Given the model's folder, TRL 1.x would score the text,
    tokenized again and without the stop token."""
    tokenizer = AutoTokenizer.from_pretrained(args.sft_model_path)
    model = AutoModelForSequenceClassification.from_pretrained(args.reward_model_path).to(args.device).eval()

    @torch.no_grad()
    def reward_model(prompts, completions, completion_ids, **columns) -> list[float]:
        rows = [p + c for p, c in zip(tokenizer(prompts)["input_ids"], completion_ids, strict=True)]
        lengths = torch.tensor([len(row) for row in rows], device=args.device)
        rows = [torch.tensor(row, device=args.device) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(ids.shape[1], device=args.device) < lengths[:, None]
        hidden = model.base_model(ids, attention_mask=mask.long())[0]
        last = hidden[torch.arange(len(rows), device=args.device), lengths - 1]
        return model.score(last).squeeze(-1).tolist()

    return reward_model


def score_by_function(spec: str) -> Callable:
    """Loads a reward function of rloo.py, file.py:name. TRL passes completions for chat prompts as chats."""
    path, name = spec.rsplit(":", 1)
    function = runpy.run_path(path)[name]

    def reward(prompts, completions, completion_ids, **columns):
        texts = [x if isinstance(x, str) else x[0]["content"] for x in completions]
        return function(prompts=prompts, completions=texts, completion_ids=completion_ids, **columns)

    reward.__name__ = name
    return reward


def with_penalty(reward: Callable, penalty: float, eos: int) -> Callable:
    """Returns the reward minus the penalty for completions that do not end with the stop token."""

    def penalized(prompts, completions, completion_ids, **columns):
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        scores = reward(**given, **columns)
        return [score - penalty * (ids[-1] != eos) for score, ids in zip(scores, completion_ids, strict=True)]

    penalized.__name__ = reward.__name__
    return penalized


def prompt_length(tokenizer, prompt: str | list[dict]) -> int:
    """Returns the number of tokens of a prompt, text or chat messages."""
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])


# ---- The trainer -----------------------------------------------------------------------------------------------------


class Marks(transformers.TrainerCallback):
    """Writes metrics.jsonl: a line for each update."""

    def __init__(self, folder: Path, device: str):
        self.path, self.on_gpu, self.updates = folder / "metrics.jsonl", device != "cpu", 0

    def clock(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_begin(self, *args, **options):
        self.begin = self.clock()

    def on_log(self, args, state, control, logs, **options):
        score = logs.get("objective/scores", logs.get("reward"))
        if score is None:  # a later step of the update, or the summary at the end
            return
        now, self.updates = self.clock(), self.updates + 1
        line = {"update": self.updates, "objective/scores": score, "time/update": now - self.begin}
        if self.on_gpu:
            line["memory/peak_gb"] = torch.cuda.max_memory_reserved() / 2**30  # GiB, as rloo.py counts them
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.begin = now


def trainer_of(args, folder: Path, rows: list[dict], callback, **theirs):
    """Returns the trainer of the installed TRL for rows with a prompt each. It writes into `folder`; `theirs` are more
    arguments of its config."""
    import datasets
    import trl

    version = int(trl.__version__.partition(".")[0])
    config = config_of(args, version) | {"output_dir": str(folder)} | theirs
    config = getattr(trl, f"{args.trainer.upper()}Config")(**config)
    trainer = getattr(trl, f"{args.trainer.upper()}Trainer")
    source = args.sft_model_path
    if version == 0:
        for name, path in (("policy", args.sft_model_path), ("reward", args.reward_model_path)):
            write_for_transformers_4(path, folder / "models" / name)
        source = folder / "models" / "policy"
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    rows = [row for row in rows if prompt_length(tokenizer, row["prompt"]) <= args.max_prompt_length]
    data = datasets.Dataset.from_list(rows)
    if version == 1:
        if args.reward_fns:
            reward = score_by_function(args.reward_fns)
        else:
            reward = score_by_ids(args) if args.reward_by == "ids" else str(args.reward_model_path)
        if args.missing_eos_penalty:
            reward = with_penalty(reward, args.missing_eos_penalty, tokenizer.eos_token_id)
        given = {"args": config, "train_dataset": data, "processing_class": tokenizer, "callbacks": [callback]}
        return trainer(str(args.sft_model_path), reward, **given)

    def load(name: str, dtype: str, auto_class=AutoModelForSequenceClassification, **options):
        options |= {"attn_implementation": "sdpa", "torch_dtype": getattr(torch, dtype)}
        return auto_class.from_pretrained(folder / "models" / name, **options)

    data = data.map(lambda row: tokenizer(row["prompt"]), remove_columns=data.column_names)
    policy = load("policy", "float32", AutoModelForCausalLM)
    given = {"ref_model": load("policy", args.dtype, AutoModelForCausalLM), "train_dataset": data}
    given |= {"reward_model": load("reward", args.dtype, num_labels=1)}
    given |= {"processing_class": tokenizer, "callbacks": [callback]}
    if args.trainer == "rloo":
        given["ref_policy"] = given.pop("ref_model")
        return trainer(config=config, policy=policy, **given)
    given["value_model"] = load("reward", "float32", num_labels=1)
    given["eval_dataset"] = data.select(range(1))  # required, but unused
    return trainer(args=config, model=policy, **given)


def main(args: argparse.Namespace):
    transformers.set_seed(args.seed)
    out = args.output_dir.with_name(args.output_dir.name + ".unfinished")
    shutil.rmtree(out, ignore_errors=True)  # left by a run that was stopped
    out.mkdir(parents=True)
    trainer = trainer_of(args, out, lines(args.dataset_name / "train.jsonl"), Marks(out, args.device))
    trainer.train()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    policy = getattr(policy, "policy", policy)  # PPO's model has a value model as well
    policy.save_pretrained(out)
    for path in (*args.sft_model_path.glob("*.json"), *args.sft_model_path.glob("*.jinja")):
        shutil.copy(path, out)  # TRL writes other names, and a generation config without eos
    shutil.rmtree(out / "models", ignore_errors=True)
    out.rename(args.output_dir)


if __name__ == "__main__":
    main(parse_args())
