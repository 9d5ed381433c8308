"""The same training by TRL's RLOOTrainer (1.16, in an environment of its own). smollm.py --trl calls it.

The folder gets the policy and metrics.jsonl, by rloo.py's names. It cannot resume, and appears when complete.
"""

import argparse
import importlib.util
import json
import resource
import shutil
import time
from pathlib import Path

import torch
import transformers


class Metrics(transformers.TrainerCallback):
    """A line of metrics for each update."""

    NAMES = {"reward": "objective/scores", "kl": "objective/kl", "frac_reward_zero_std": "frac_reward_zero_std"}
    NAMES |= {"completions/mean_length": "completions/mean_length"}

    def __init__(self, path: Path):
        self.path, self.cpu, self.seconds = path, time.process_time(), time.time()

    def on_train_begin(self, *args, **options):
        self.cpu, self.seconds = time.process_time(), time.time()

    def on_log(self, args, state, control, logs, **options):
        if "reward" not in logs:  # the summary at the end
            return
        line = {ours: logs[theirs] for theirs, ours in self.NAMES.items() if theirs in logs}
        line |= {"update": state.global_step, "time/train": time.time() - self.seconds}
        line |= {"cpu_time": time.process_time() - self.cpu}
        line |= {"memory/peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        self.on_train_begin()


def reward_by_text(spec: str):
    """A reward function of rloo.py's, file.py:name, for TRL, which gives it chat messages."""
    path, name = spec.rsplit(":", 1)
    module_spec = importlib.util.spec_from_file_location("rewards", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name)

    def reward(prompts, completions, completion_ids, **columns):
        return function(prompts, [messages[0]["content"] for messages in completions], completion_ids, **columns)

    reward.__name__ = name
    return reward


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("dataset_name", "reward_fns", "sft_model_path", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("temperature", "learning_rate", "kl_coef"):
        parser.add_argument(f"--{name}", type=float, required=True)
    whole = (
        "response_length",
        "rloo_k",
        "total_episodes",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    )
    for name in (*whole, "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lora_rank", type=int, default=0, help="0: train all weights")
    args = parser.parse_args()
    import datasets
    import trl

    torch.set_num_threads(1)
    folder = Path(args.output_dir)
    out = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    rows = [json.loads(line) for line in (Path(args.dataset_name) / "train.jsonl").read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.sft_model_path, padding_side="left")
    adapters = None
    if args.lora_rank:
        import peft

        # As rloo.py's: on every linear layer but the head, at the scale 32 / rank.
        adapters = peft.LoraConfig(r=args.lora_rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trl.RLOOTrainer(
        model=args.sft_model_path,
        reward_funcs=reward_by_text(args.reward_fns),
        args=trl.RLOOConfig(
            output_dir=str(out),
            seed=args.seed,
            learning_rate=args.learning_rate,
            lr_scheduler_type="linear",
            max_grad_norm=1.0,
            temperature=args.temperature,
            beta=args.kl_coef,
            num_generations=args.rloo_k,
            max_completion_length=args.response_length,
            per_device_train_batch_size=args.per_device_train_batch_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            max_steps=args.total_episodes // (args.per_device_train_batch_size * args.gradient_accumulation_steps),
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            dataloader_pin_memory=False,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Metrics(out / "metrics.jsonl")],
        peft_config=adapters,
    )
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    if args.lora_rank:
        model = model.merge_and_unload()
    model.save_pretrained(out)
    for path in Path(args.sft_model_path).glob("*.json*"):  # tokenizer, and a generation config with its stop token
        shutil.copy(path, out)
    shutil.copy(Path(args.sft_model_path) / "chat_template.jinja", out)
    out.rename(folder)


if __name__ == "__main__":
    main()
