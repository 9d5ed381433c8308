"""One training by TRL's PPOTrainer (0.19) or GRPOTrainer (1.x) on mini TL;DR, in an environment that has this TRL.

    trl0/bin/python benchmark/frontier/peers_trl.py ppo --value_model reward --learning_rate 2e-4 --output_dir runs/ppo
    trl1/bin/python benchmark/frontier/peers_trl.py grpo --k 4 --learning_rate 5e-4 --output_dir runs/grpo

peers.py calls it for the comparison in README.md, which says what is set here and what is left at TRL's defaults. The
folder gets the policy, as rloo.py and measure.py load it, and metrics.jsonl with a line for each update: score, KL, CPU
seconds, and so far optimizer steps and peak memory, by the names of variants.py. The folder appears when complete.
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from usage import peak_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trl"))
from trl_parity import MINI_TLDR, training_prompts, trl1_reward, write_model  # noqa: E402

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

    def on_log(self, args, state, control, logs, optimizer, **options):
        score = logs.get("objective/scores", logs.get("reward"))  # PPO's name, GRPO's name
        if score is None:  # the summary at the end
            return
        now = time.process_time()
        self.updates += 1
        line = {
            "update": self.updates,
            "episode": self.updates * self.size,
            "objective/scores": score,
            "cpu_seconds": now - self.begin,
            "optimizer_steps": max(int(moments["step"]) for moments in optimizer.state.values()),
            "memory/hwm_gb": peak_memory(),
        }
        if "objective/kl" in logs:
            line["objective/kl"] = logs["objective/kl"]
        elif "kl" in logs:  # GRPO's is the k3 estimate, per token
            line["objective/kl"] = logs["kl"] * logs["completions/mean_length"]
        self.file.write(json.dumps(line) + "\n")
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


def ppo(args, models: Path, out: Path, marks: Marks):
    """The policy that PPO has trained. PPO samples one completion for each prompt: as many prompts as episodes."""
    import datasets
    import trl

    def load(auto_class, name: str, **options):
        return auto_class.from_pretrained(models / name, torch_dtype=torch.float32, **options)

    tokenizer = AutoTokenizer.from_pretrained(models / "sft", padding_side="left")
    prompts = datasets.Dataset.from_list([{"prompt": text} for text in training_prompts()])
    prompts = prompts.map(lambda row: tokenizer(row["prompt"]), remove_columns=["prompt"])
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
    import datasets
    import trl

    tokenizer = AutoTokenizer.from_pretrained(models / "sft", padding_side="left")
    config = trl.GRPOConfig(
        **common_config(args, out),
        max_steps=-(-args.episodes // args.size),
        num_generations=args.k,
        beta=args.beta,
        max_completion_length=RESPONSE_LENGTH,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )
    job = {"models": str(models)}
    trainer = trl.GRPOTrainer(
        model=str(models / "sft"),
        # As a function of the tokens, which may end in a stop token: TRL's own use of a reward model drops it.
        reward_funcs=trl1_reward(job, {"missing_eos_penalty": None}, "ids", tokenizer),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in training_prompts()]),
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
    parser.add_argument("--beta", type=float, help="weight of the KL; default: TRL's, 0.05 for ppo and 0 for grpo")
    parser.add_argument("--episodes", type=int, default=6_400, help="completions in the whole run")
    parser.add_argument("--size", type=int, default=128, help="completions per update")
    parser.add_argument("--epochs", type=int, default=4, help="ppo: passes over an update's completions (TRL: 4)")
    parser.add_argument("--value_model", default="reward", help="ppo: reward, policy, or the folder of a reward model")
    parser.add_argument("--k", type=int, default=8, help="grpo: completions per prompt (TRL: 8)")
    args = parser.parse_args(argv)
    if args.beta is None:
        args.beta = {"ppo": 0.05, "grpo": 0.0}[args.trainer]
    if args.size % min(MICRO, args.size):
        parser.error(f"--size {args.size}: must be a multiple of {MICRO}, or less")
    return args


def main(args: argparse.Namespace):
    torch.set_num_threads(1)
    transformers.set_seed(args.seed)
    out = args.output_dir.with_name(args.output_dir.name + ".unfinished")
    shutil.rmtree(out, ignore_errors=True)  # of a run that was ended
    models = out / "models"
    value = {"reward": MINI_TLDR / "reward", "policy": MINI_TLDR / "sft"}.get(args.value_model, Path(args.value_model))
    for name, source in (("sft", MINI_TLDR / "sft"), ("reward", MINI_TLDR / "reward"), ("value", value)):
        write_model(source, models / name)

    marks = Marks(out / "metrics.jsonl", args.size)
    policy = {"ppo": ppo, "grpo": grpo}[args.trainer](args, models, out, marks)

    policy.save_pretrained(out)
    for path in (MINI_TLDR / "sft").glob("*.json"):  # TRL writes other names, and a generation config without eos
        shutil.copy(path, out)
    shutil.rmtree(models)
    out.rename(args.output_dir)


if __name__ == "__main__":
    main(parse_args())
