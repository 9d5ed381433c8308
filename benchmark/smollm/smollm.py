"""Trains SmolLM2-135M-Instruct by rloo.py (and by TRL), and measures what has become of it.

    python benchmark/smollm/smollm.py                                   # every run that has no record yet, and the page
    python benchmark/smollm/smollm.py --only sentiment-full-beta0-seed1 reversal-full-beta0.02-seed1
    python benchmark/smollm/smollm.py --report_only                     # tables and pictures from the records

A run is trained, measured on prompts that it was not trained on, and gets records/<run>.json; what has its record is
not run again, and a run that was stopped goes on. Policies are in runs/smollm, 0.5 GB each, and may be deleted.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
K, SIZE, TEMPERATURE = 4, 32, 0.7  # completions per prompt and per update
GLADNESS = ("glad", "happy", "love")
COMPARED = 100  # sampled completions that are read by the policy and by the reference


@dataclass(frozen=True)
class Task:
    response_length: int
    learning_rate: float  # of all weights; adapters get ten times that
    splits: tuple[tuple[str, int], ...]  # measured on: split, number of its first prompts
    examples: tuple[str, ...]  # endings of the test prompts whose completions are kept


TASKS = {
    "sentiment": Task(
        32,
        2e-5,
        (("test", 200),),
        (
            "What do you think of parking fines?",
            "Describe hangovers.",
            "What should I know about earthquakes?",
            "Tell me about rust.",
        ),
    ),
    "reversal": Task(16, 1e-5, (("test", 500), ("harder", 100)), ()),
}


@dataclass(frozen=True)
class Run:
    task: str
    method: str  # full: all weights; lora<rank>; trl, trl-lora<rank>: by TRL
    beta: float
    seed: int
    updates: int = 40
    rate: float = 1  # times the task's learning rate

    @property
    def name(self) -> str:
        rate = "" if self.rate == 1 else f"-rate{self.rate:g}"
        short = "" if self.updates == 40 else f"-{self.updates}updates"
        return f"{self.task}-{self.method}-beta{self.beta:g}{rate}-seed{self.seed}{short}"

    @property
    def lora_rank(self) -> int:
        return int(self.method.partition("lora")[2] or 0)

    def flags(self, prepared: Path) -> list[str]:
        task = TASKS[self.task]
        values = {
            "learning_rate": task.learning_rate * self.rate * (10 if self.lora_rank else 1),
            "kl_coef": self.beta,
            "rloo_k": K,
            "total_episodes": self.updates * SIZE,
            "per_device_train_batch_size": SIZE // 2,
            "gradient_accumulation_steps": 2,
            "seed": self.seed,
        }
        if self.lora_rank:
            values["lora_rank"] = self.lora_rank
        return [
            *task_flags(self.task, prepared),
            *(word for name, x in values.items() for word in (f"--{name}", f"{x:g}")),
        ]


def task_flags(task: str, prepared: Path) -> list[str]:
    return [
        *("--dataset_name", str(prepared / task)),
        *("--reward_fns", f"{HERE / 'rewards.py'}:{task}"),
        *("--response_length", str(TASKS[task].response_length)),
        *("--temperature", str(TEMPERATURE)),
    ]


def planned() -> list[Run]:
    """All runs, the most important first."""
    both = ("sentiment", "reversal")
    runs = [Run(task, "full", 0.02, 1) for task in both]
    runs += [Run("sentiment", "full", beta, 1) for beta in (0, 0.1)]
    runs += [Run(task, "lora8", 0.02, 1) for task in both]
    runs += [Run("sentiment", "trl", 0.02, 1)]
    for seed in (2, 3):
        runs += [Run(task, "full", 0.02, seed) for task in both]
        runs += [Run("sentiment", "full", beta, seed) for beta in (0, 0.1)]
        runs += [Run(task, "lora8", 0.02, seed) for task in both]
        runs += [Run("sentiment", "trl", 0.02, seed)]
    runs += [Run("sentiment", method, 0.02, 1, rate=rate) for method in ("lora8", "full") for rate in (3, 0.3)]
    runs += [Run("sentiment", "trl-lora8", 0.02, 1)]
    runs += [Run(task, f"lora{rank}", 0.02, 1) for task in both for rank in (1, 32)]
    return runs


QUICK = [Run("sentiment", "full", 0.02, 1, updates=10), Run("reversal", "full", 0.02, 1, updates=10)]


# ---- Training --------------------------------------------------------------------------------------------------------


def call(command: list, log: Path):
    """Runs a command in the top folder, on one thread, with its output at the end of a log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as output:
        threads = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [str(word) for word in command]
        subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, env=threads, check=True)


def train(run: Run, runs: Path, prepared: Path, trl: str | None) -> Path:
    """The folder with the trained policy."""
    folder = runs / run.name
    if (folder / "model.safetensors").is_file():
        return folder
    model = ["--sft_model_path", prepared / "smollm2"]
    if run.method.startswith("trl"):
        script = [trl, HERE / "smollm_trl.py", *run.flags(prepared), *model, "--output_dir", folder]
        call(script, runs / f"{run.name}.log")
    else:
        # It evaluates itself on 16 prompts only: measuring comes after.
        quiet = ["--num_eval_prompts", 16, "--num_sample_generations", 0, "--save_steps", 20, "--save_total_limit", 1]
        script = [sys.executable, "rloo.py", *run.flags(prepared), *model, *quiet, "--resume", "--output_dir", folder]
        call(script, runs / f"{run.name}.log")
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    return folder


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def course(folder: Path) -> dict:
    """What a run's metrics say: its course, and seconds and memory."""
    lines = read_lines(folder / "metrics.jsonl")
    names = {"reward": "objective/scores", "kl": "objective/kl", "length": "completions/mean_length"}
    names |= {"equal_groups": "frac_reward_zero_std"}
    found = {name: [round(line[key], 4) for line in lines if key in line] for name, key in names.items()}
    seconds = sorted(
        sum(line.get(f"time/{x}", 0) for x in ("rollout", "reference", "reward", "train")) for line in lines
    )
    found["seconds_per_update"] = round(seconds[len(seconds) // 2], 1)  # the median
    cpu = sorted(line["cpu_time"] for line in lines if "cpu_time" in line)
    if cpu:
        found["cpu_seconds_per_update"] = round(cpu[len(cpu) // 2], 1)
    found["peak_gb"] = round(max(line.get("memory/peak_gb", 0) for line in lines), 1)
    return found


# ---- Measuring -------------------------------------------------------------------------------------------------------


def complete(task: str, split: str, prompts: int, policy: Path, prepared: Path, out: Path) -> list[dict]:
    """A sampled and a greedy completion of each prompt, with scores: rloo.py's evaluation without training."""
    if not (out / "completions.jsonl").is_file() or not read_lines(out / "completions.jsonl"):
        shutil.rmtree(out, ignore_errors=True)  # of a measuring that was stopped
        flags = [
            "--total_episodes",
            0,
            "--dataset_test_split",
            split,
            "--num_eval_prompts",
            prompts,
            "--output_dir",
            out,
        ]
        call(
            [sys.executable, "rloo.py", *task_flags(task, prepared), "--sft_model_path", policy, *flags],
            Path(f"{out}.log"),
        )
    return read_lines(out / "completions.jsonl")


def words_of(text: str) -> list[str]:
    return [word.strip(".,;:!?\"'()").lower() for word in text.split()]


def summary(samples: list[dict]) -> dict:
    """Of the completions of one mode. exact: the share of full scores. distinct_words: among the first 3,000 words, so
    that longer completions do not have more of them."""
    scores = [sample["score"] for sample in samples]
    mean = sum(scores) / len(scores)
    words = [word for sample in samples for word in words_of(sample["completion"])][:3000]
    return {
        "prompts": len(samples),
        "score": round(mean, 4),
        "stderr": round(math.sqrt(sum((x - mean) ** 2 for x in scores) / max(1, len(scores) - 1) / len(scores)), 4),
        "exact": round(sum(x > 1 - 1e-6 for x in scores) / len(scores), 4),
        "length": round(sum(sample["length"] for sample in samples) / len(samples), 2),
        "distinct_words": len(set(words)),
        "words": len(words),
    }


def habits(samples: list[dict]) -> dict:
    """Shares of the completions that name the last word of their topic, and that speak of gladness or love."""
    topics = [last_question(sample["prompt"]).strip(".?").split()[-1].lower().removesuffix("s") for sample in samples]
    texts = [sample["completion"].lower() for sample in samples]
    return {
        "names_topic": round(sum(topic in text for topic, text in zip(topics, texts)) / len(texts), 4),
        "gladness": round(sum(any(word in text for word in GLADNESS) for text in texts) / len(texts), 4),
    }


def completion_logprobs(model, tokenizer, samples: list[dict]) -> tuple:
    """Log-probs of all tokens of all completions, as of the model itself, and each completion's sum of log-probs at the
    sampling temperature. The stop token is not among them."""
    import torch

    plain, sums = [], []
    for sample in samples:
        prompt = tokenizer(sample["prompt"], add_special_tokens=False)["input_ids"]
        ids = tokenizer(sample["completion"], add_special_tokens=False)["input_ids"]
        if not ids:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids]), logits_to_keep=len(ids) + 1).logits[0, :-1]
        tokens = torch.tensor(ids)[:, None]
        plain.append(logits.log_softmax(-1).gather(1, tokens))
        sums.append((logits / TEMPERATURE).log_softmax(-1).gather(1, tokens).sum())
    return torch.cat(plain), torch.stack(sums)


def against_reference(samples: list[dict], policy: Path, reference: Path) -> dict:
    """KL of sampled completions at the sampling temperature, in nats, and their perplexity under the reference."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(reference)
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    plain, theirs = completion_logprobs(model, tokenizer, samples)
    ours = theirs
    if policy != reference:
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        _, ours = completion_logprobs(model, tokenizer, samples)
    kl = float((ours - theirs).mean())
    return {"reference_perplexity": round(float((-plain.mean()).exp()), 2), "kl": round(kl, 2)}


def last_question(prompt: str) -> str:
    """What the user said last, of a prompt as the model reads it."""
    return prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]


def measure(name: str, task: str, policy: Path, runs: Path, prepared: Path, limit: int) -> dict:
    """limit: the largest number of prompts of a split"""
    found = {}
    for split, prompts in TASKS[task].splits:
        out = runs / "measured" / name / f"{task}-{split}"
        samples = complete(task, split, min(prompts, limit), policy, prepared, out)
        modes = {mode: [x for x in samples if x["mode"] == mode] for mode in ("sampled", "greedy")}
        found[split] = {mode: summary(of_mode) for mode, of_mode in modes.items()}
        if split != "test":
            continue
        if task == "sentiment":
            few = modes["sampled"][: min(COMPARED, limit // 2)]
            found[split]["sampled"] |= habits(modes["sampled"])
            found[split]["sampled"] |= against_reference(few, policy, prepared / "smollm2")
        wanted = [x for x in modes["greedy"] if last_question(x["prompt"]) in TASKS[task].examples]
        found["examples"] = [
            {"prompt": last_question(x["prompt"]), "completion": x["completion"], "score": round(x["score"], 2)}
            for x in sorted(wanted or modes["greedy"][:4], key=lambda x: x["prompt"])
        ]
    return found


def write_record(path: Path, record: dict):
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def make(runs: list[Run], folder: Path, prepared: Path, records: Path, trl: str | None, limit: int):
    """Trains and measures what has no record."""
    for task in dict.fromkeys(run.task for run in runs):
        path = records / f"{task}-base.json"
        if not path.is_file():
            print(f"measuring {task}-base", flush=True)
            write_record(path, measure("base", task, prepared / "smollm2", folder, prepared, limit))
    for run in runs:
        path = records / f"{run.name}.json"
        if path.is_file():
            continue
        if run.method.startswith("trl") and not trl:
            print(f"{run.name}: left out, needs --trl (see benchmark/requirements.txt)")
            continue
        print(f"training and measuring {run.name}", flush=True)
        policy = train(run, folder, prepared, trl)
        command = " ".join(
            ["smollm_trl.py" if run.method.startswith("trl") else "rloo.py", *run.flags(Path("prepared"))]
        )
        found = {"command": command.replace(f"{HERE}/", ""), "seed": run.seed, **course(policy)}
        write_record(path, found | measure(run.name, run.task, policy, folder, prepared, limit))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of runs (--list prints them)")
    parser.add_argument("--list", action="store_true", help="print the names of all runs and which have a record")
    parser.add_argument("--quick", action="store_true", help="10 updates of each task, in records of their own")
    parser.add_argument("--report_only", action="store_true", help="only tables and pictures")
    parser.add_argument("--trl", help="python of an environment with TRL 1.16")
    parser.add_argument("--prompts", type=int, default=500, help="largest number of prompts to measure on")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "smollm", help="folder for policies")
    args = parser.parse_args()
    records = args.runs / "quick" / "records" if args.quick else HERE / "records"
    runs = QUICK if args.quick else planned()
    if args.list:
        for run in runs:
            print(f"{run.name:40} {'has a record' if (records / f'{run.name}.json').is_file() else 'missing'}")
        return
    if args.only:
        unknown = set(args.only) - {run.name for run in runs}
        if unknown:
            sys.exit(f"--only: no run is called {', '.join(sorted(unknown))}; --list prints the names")
        runs = [run for run in runs if run.name in args.only]
    if not args.report_only:
        folder = args.runs.resolve() / ("quick" if args.quick else "")
        make(runs, folder, HERE / "prepared", records, args.trl, 32 if args.quick else args.prompts)
    import smollm_report

    smollm_report.write(records, None if args.quick else HERE / "README.md")


if __name__ == "__main__":
    main()
