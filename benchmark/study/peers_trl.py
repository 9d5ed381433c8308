"""One training by TRL's PPOTrainer (0.19) or GRPOTrainer (1.x) on mini TL;DR, in an environment that has this TRL.

    trl0/bin/python benchmark/study/peers_trl.py ppo --learning_rate 2e-4 --beta 0.05 --output_dir runs/ppo
    trl1/bin/python benchmark/study/peers_trl.py grpo --learning_rate 5e-4 --beta 0 --output_dir runs/grpo

compare.py calls it. The folder gets the policy, as rloo.py and study.py load it, and metrics.jsonl with score, episode
and CPU seconds of each update. It appears when complete.
"""

import argparse
import json
import shutil
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

TASK = Path(__file__).resolve().parents[1] / "mini_tldr"
MICRO = 64  # completions per forward and backward pass, as in rloo.py
TEMPERATURE, RESPONSE_LENGTH = 0.7, 53  # rloo.py's defaults


class Marks(transformers.TrainerCallback):
    """Writes metrics.jsonl: a line for each update."""

    def __init__(self, path: Path, size: int):
        self.file = path.open("w")
        self.size = size
        self.updates = 0

    def on_train_begin(self, *args, **options):
        self.begin = time.process_time()

    def on_log(self, args, state, control, logs, **options):
        score = logs.get("objective/scores", logs.get("reward"))  # PPO's name, GRPO's name
        if score is None:  # the summary at the end
            return
        now = time.process_time()
        self.updates += 1
        line = {"update": self.updates, "episode": self.updates * self.size, "objective/scores": score}
        self.file.write(json.dumps(line | {"cpu_seconds": now - self.begin}) + "\n")
        self.file.flush()
        self.begin = now


def common_config(args, out: Path) -> dict:
    """What both trainers are told. All of it is rloo.py's default, and most of it is TRL's as well."""
    return {
        "output_dir": str(out),
        "seed": args.seed,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "linear",
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,  # 0.19's PPO does not read it
        "temperature": TEMPERATURE,
        "per_device_train_batch_size": min(MICRO, args.size),
        "gradient_accumulation_steps": max(1, args.size // MICRO),
        "bf16": False,
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


def training_prompts():
    import datasets

    lines = (TASK / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return datasets.Dataset.from_list([{"prompt": json.loads(line)["prompt"]} for line in lines])


def write_model(source: Path, target: Path):
    """A model for any transformers: config and tokenizer by the names of version 4 as well."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for file, more in (
        ("config", {"torch_dtype": "float32", "rotary_pct": 0.25, "rotary_emb_base": 10000}),
        ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        path = target / f"{file}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more | {"padding_side": "left"}))


def ppo(args, models: Path, out: Path, marks: Marks):
    """The policy that PPO has trained. PPO samples one completion for each prompt: as many prompts as episodes."""
    import trl

    def load(auto_class, name: str, **options):
        return auto_class.from_pretrained(models / name, torch_dtype=torch.float32, **options)

    tokenizer = AutoTokenizer.from_pretrained(models / "sft", padding_side="left")
    prompts = training_prompts().map(lambda row: tokenizer(row["prompt"]), remove_columns=["prompt"])
    config = trl.PPOConfig(
        **common_config(args, out),
        total_episodes=args.episodes,
        num_ppo_epochs=args.epochs,
        kl_coef=args.beta,
        response_length=RESPONSE_LENGTH,
        stop_token="eos",
        local_rollout_forward_batch_size=MICRO,
        num_sample_generations=0,
    )
    policy = load(AutoModelForCausalLM, "sft")
    trl.PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=load(AutoModelForCausalLM, "sft"),
        reward_model=load(AutoModelForSequenceClassification, "reward", num_labels=1),
        value_model=load(AutoModelForSequenceClassification, "value", num_labels=1),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(MICRO)),
        callbacks=[marks],
    ).train()
    return policy


def grpo(args, models: Path, out: Path, marks: Marks):
    """The policy that GRPO has trained."""
    import trl

    tokenizer = AutoTokenizer.from_pretrained(models / "sft", padding_side="left")
    reward_model = AutoModelForSequenceClassification.from_pretrained(models / "reward").eval()

    @torch.no_grad()
    def reward(prompts, completions, completion_ids, **columns) -> list[float]:
        """Of token ids, which may end in a stop token: TRL's own use of a reward model drops it."""
        rows = [p + c for p, c in zip(tokenizer(prompts)["input_ids"], completion_ids)]
        batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
        return reward_model(**batch).logits[:, 0].tolist()

    config = trl.GRPOConfig(
        **common_config(args, out),
        max_steps=-(-args.episodes // args.size),
        num_generations=args.k,
        beta=args.beta,
        max_completion_length=RESPONSE_LENGTH,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )
    trainer = trl.GRPOTrainer(
        model=str(models / "sft"),
        reward_funcs=reward,
        args=config,
        train_dataset=training_prompts(),
        processing_class=tokenizer,
        callbacks=[marks],
    )
    trainer.train()
    return trainer.accelerator.unwrap_model(trainer.model)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["ppo", "grpo"])
    parser.add_argument("--output_dir", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, required=True)
    parser.add_argument("--beta", type=float, required=True, help="weight of the KL")
    parser.add_argument("--episodes", type=int, default=6_400, help="completions in the whole run")
    parser.add_argument("--size", type=int, default=128, help="completions per update")
    parser.add_argument("--epochs", type=int, default=4, help="ppo: passes over an update's completions")
    parser.add_argument("--value_model", default="reward", help="ppo: reward, policy, or the folder of a reward model")
    parser.add_argument("--k", type=int, default=4, help="grpo: completions per prompt")
    args = parser.parse_args(argv)
    if args.size % min(MICRO, args.size):
        parser.error(f"--size {args.size}: must be a multiple of {MICRO}, or less")
    return args


def main(args: argparse.Namespace):
    torch.set_num_threads(1)
    transformers.set_seed(args.seed)
    out = args.output_dir.with_name(args.output_dir.name + ".unfinished")
    shutil.rmtree(out, ignore_errors=True)  # of a run that was ended
    value = {"reward": TASK / "reward", "policy": TASK / "sft"}.get(args.value_model, Path(args.value_model))
    for name, source in (("sft", TASK / "sft"), ("reward", TASK / "reward"), ("value", value)):
        write_model(source, out / "models" / name)
    marks = Marks(out / "metrics.jsonl", args.size)
    policy = {"ppo": ppo, "grpo": grpo}[args.trainer](args, out / "models", out, marks)
    policy.save_pretrained(out)
    for path in (TASK / "sft").glob("*.json"):  # TRL writes other names, and a generation config without eos
        shutil.copy(path, out)
    shutil.rmtree(out / "models")
    out.rename(args.output_dir)


if __name__ == "__main__":
    main(parse_args())
