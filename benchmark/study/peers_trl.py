"""One training by TRL's PPOTrainer (0.19) or GRPOTrainer (1.x) on mini TL;DR, in an environment that has this TRL.

    trl0/bin/python benchmark/study/peers_trl.py ppo --learning_rate 2e-4 --beta 0.05 --output_dir runs/ppo
    trl1/bin/python benchmark/study/peers_trl.py grpo --learning_rate 5e-4 --beta 0 --output_dir runs/grpo

compare.py calls it. The folder gets the policy, as rloo.py and study.py load it, and metrics.jsonl with score, episode
and CPU seconds of each update. It appears when complete.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trl"))
from environment import (  # noqa: E402
    MINI_TLDR,
    Marks,
    common_config,
    copy_settings,
    dataset_of,
    scored_by_ids,
    training_prompts,
    write_model,
)

MICRO = 64  # completions per forward and backward pass, as in rloo.py
TEMPERATURE, RESPONSE_LENGTH = 0.7, 53  # rloo.py's defaults


def flags_of(args) -> dict:
    """What both trainers are told, by rloo.py's names. All of it is its default, and most of it is TRL's as well."""
    return {
        "seed": args.seed,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "linear",
        "adam_eps": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,  # 0.19's PPO does not read it
        "temperature": TEMPERATURE,
        "per_device_train_batch_size": min(MICRO, args.size),
        "gradient_accumulation_steps": max(1, args.size // MICRO),
        "dtype": "float32",
        "device": "cpu",
    }


def ppo(args, models: Path, out: Path, marks: Marks):
    """The policy that PPO has trained. PPO samples one completion for each prompt: as many prompts as episodes."""
    import trl

    def load(auto_class, name: str, **options):
        return auto_class.from_pretrained(models / name, torch_dtype=torch.float32, **options)

    tokenizer = AutoTokenizer.from_pretrained(models / "policy", padding_side="left")
    prompts = dataset_of(training_prompts(), tokenizer)
    config = trl.PPOConfig(
        **common_config(flags_of(args), str(out)),
        total_episodes=args.episodes,
        num_ppo_epochs=args.epochs,
        kl_coef=args.beta,
        response_length=RESPONSE_LENGTH,
        stop_token="eos",
        local_rollout_forward_batch_size=MICRO,
        num_sample_generations=0,
    )
    policy = load(AutoModelForCausalLM, "policy")
    trl.PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=load(AutoModelForCausalLM, "policy"),
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

    config = trl.GRPOConfig(
        **common_config(flags_of(args), str(out)),
        max_steps=-(-args.episodes // args.size),
        num_generations=args.k,
        beta=args.beta,
        max_completion_length=RESPONSE_LENGTH,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )
    trainer = trl.GRPOTrainer(
        model=str(models / "policy"),
        reward_funcs=scored_by_ids(str(models)),
        args=config,
        train_dataset=dataset_of(training_prompts()),
        processing_class=AutoTokenizer.from_pretrained(models / "policy", padding_side="left"),
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
    ours = {"policy": MINI_TLDR / "sft", "reward": MINI_TLDR / "reward"}
    value = ours.get(args.value_model, Path(args.value_model))
    for name, source in (ours | {"value": value}).items():
        write_model(source, out / "models" / name)
    marks = Marks(out, args.size)
    policy = {"ppo": ppo, "grpo": grpo}[args.trainer](args, out / "models", out, marks)
    policy.save_pretrained(out)
    copy_settings(out)
    shutil.rmtree(out / "models")
    out.rename(args.output_dir)


if __name__ == "__main__":
    main(parse_args())
