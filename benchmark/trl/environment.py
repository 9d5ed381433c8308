"""Runs TRL's trainers, each version in an environment of its own, beside rloo.py.

benchmark/requirements.txt says how to make the environments. `run_job` starts the file that calls it once more by the
python of an environment; there `answer_job` calls the function that the job names. The functions below `rloo_config`
are called there: they need TRL, and run with the transformers that this version of TRL wants.
"""

import dataclasses
import itertools
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

BENCHMARK = Path(__file__).resolve().parents[1]
MINI_TLDR = BENCHMARK / "mini_tldr"
sys.path.append(str(BENCHMARK / "tldr"))
from text_reward import scores_of  # noqa: E402


def fail(message: str):
    sys.exit(f"{Path(sys.argv[0]).name}: {message}")


def call(command: list) -> str:
    """Standard output of a command. If it fails, this program ends with the last lines of its error."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    except OSError as error:
        fail(f"{command[0]}: cannot be run ({error.strerror})")
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        fail(f"{' '.join(str(part) for part in command)[:200]} ... failed:\n{said[-5000:]}")
    return done.stdout


def trl_versions(pythons: tuple[str, ...]) -> dict[str, str]:
    """Name with versions -> python of each environment."""
    code = "import trl, transformers as t; print(f'TRL {trl.__version__}, transformers {t.__version__}')"
    return {call([python, "-c", code]).splitlines()[-1]: python for python in pythons}


def run_job(python: str | list, file: str, out: Path, name: str, **arguments) -> dict:
    """What the function `name` of a file's jobs returns for `arguments`, called by another python. `out` is a folder
    for it to write to."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "job.json").write_text(json.dumps(arguments | {"job": name, "out": str(out)}, default=str))
    call([*([python] if isinstance(python, str) else python), file, "--job", out / "job.json"])
    return json.loads((out / "result.json").read_text())


def answer_job(jobs: dict[str, Callable]):
    """Does what `run_job` asks for, in the process that it has started."""
    arguments = json.loads(Path(sys.argv[2]).read_text())
    result = jobs[arguments.pop("job")](**arguments)
    if int(os.environ.get("RANK", 0)) == 0:
        Path(arguments["out"], "result.json").write_text(json.dumps(result))


def default_flags(**flags) -> dict:
    """rloo.py's flags, with its defaults for those that are not given."""
    import rloo  # TRL's environments cannot import it

    return dataclasses.asdict(rloo.resolve_args(rloo.parse_args([]))) | flags


def training_prompts(number: int | None = None) -> list[str]:
    """The first prompts of mini TL;DR's training split, or all."""
    lines = (MINI_TLDR / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:number]]


def write_model(source: Path, target: Path):
    """A model for any transformers: config and tokenizer by the names of version 4 as well."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    config, tokenizer = target / "config.json", target / "tokenizer_config.json"
    found = json.loads(config.read_text())
    rope = found.get("rope_parameters") or {"rope_theta": 10000}
    found |= {"torch_dtype": "float32", "rope_theta": rope["rope_theta"], "rotary_emb_base": rope["rope_theta"]}
    found["rotary_pct"] = rope.get("partial_rotary_factor", found.get("rotary_pct", 1.0))
    config.write_text(json.dumps(found))
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"}
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | more))


def write_mini_tldr(folder: Path):
    """Policy and reward model of mini TL;DR, as `rloo_trainer` reads them."""
    write_model(MINI_TLDR / "sft", folder / "policy")
    write_model(MINI_TLDR / "reward", folder / "reward")


def copy_settings(folder: Path):
    """The embedded policy's config and tokenizer into the folder of one that TRL has trained: TRL writes other names,
    and a generation config without eos."""
    for path in (MINI_TLDR / "sft").glob("*.json"):
        shutil.copy(path, folder)


# ---- In an environment with TRL --------------------------------------------------------------------------------------


class Marks(transformers.TrainerCallback):
    """Writes metrics.jsonl: a line for each update, by rloo.py's names, with its CPU seconds."""

    def __init__(self, folder: str | Path, size: int):
        self.path = Path(folder, "metrics.jsonl")
        self.size = size
        self.lines: list[dict] = []

    def on_train_begin(self, *args, **options):
        self.begin = time.process_time()

    def on_log(self, args, state, control, logs, **options):
        score = logs.get("objective/scores", logs.get("reward"))  # the name in 0.19, in 1.x
        if score is None:  # the summary at the end
            return
        now, update = time.process_time(), len(self.lines) + 1
        line = {"update": update, "episode": update * self.size, "objective/scores": score}
        self.lines.append(line | {"cpu_time": now - self.begin})
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        self.begin = now


def common_config(flags: dict, out: str) -> dict:
    """rloo.py's flags as arguments of any TRL trainer's config. Nothing is saved, evaluated or shown."""
    names = ["max_grad_norm", "temperature", "learning_rate", "lr_scheduler_type", "weight_decay", "seed"]
    names += ["per_device_train_batch_size", "gradient_accumulation_steps"]
    on_cpu = flags["device"] in (None, "cpu")
    return {name: flags[name] for name in names} | {
        "output_dir": out,
        "adam_epsilon": flags["adam_eps"],
        "bf16": flags["dtype"] == "bfloat16",
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def rloo_config(flags: dict, out: str) -> dict:
    """rloo.py's flags as arguments of the RLOOConfig of the TRL that is installed."""
    import trl

    common, clip = common_config(flags, out), flags["reward_clip_range"]
    epochs, mini_batches = flags["num_ppo_epochs"], flags["num_mini_batches"]
    if trl.__version__.startswith("0."):
        names = ["rloo_k", "kl_coef", "response_length", "total_episodes", "num_ppo_epochs", "num_mini_batches"]
        names += ["normalize_reward", "normalize_advantage", "missing_eos_penalty", "local_rollout_forward_batch_size"]
        common |= {name: flags[name] for name in names}
        return common | {"reward_clip_range": clip or 10.0, "stop_token": "eos", "num_sample_generations": 0}
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


def dataset_of(prompts: list[str], tokenizer=None):
    """A dataset of prompts, as texts or, with a tokenizer, as TRL 0.19 wants them: as token ids."""
    import datasets

    found = datasets.Dataset.from_list([{"prompt": text} for text in prompts])
    return found.map(lambda row: tokenizer(row["prompt"]), remove_columns=["prompt"]) if tokenizer else found


def rloo_trainer(flags: dict, models: str, out: str, prompts: list[str], callback, reward=None, **theirs):
    """An RLOOTrainer of the TRL that is installed, on the policy and the reward model in `models`.

    flags: all of rloo.py's, and perhaps `weights` and `frozen`, the dtypes that the policy and the other models are
    loaded in. theirs: arguments of TRL's config. reward: what TRL 1.x scores by, if not the reward model's folder."""
    import trl

    tokenizer = AutoTokenizer.from_pretrained(f"{models}/policy", padding_side="left")
    config = trl.RLOOConfig(**rloo_config(flags, out) | theirs)
    common = {"processing_class": tokenizer, "callbacks": [callback]}
    if not trl.__version__.startswith("0."):
        reward = reward or f"{models}/reward"
        return trl.RLOOTrainer(f"{models}/policy", reward, args=config, train_dataset=dataset_of(prompts), **common)

    def load(auto_class, name: str, dtype: str, **options):
        options |= {"attn_implementation": "sdpa", "torch_dtype": getattr(torch, dtype)}
        return auto_class.from_pretrained(f"{models}/{name}", **options)

    weights = flags.get("weights", "float32")
    frozen = flags.get("frozen", weights)
    return trl.RLOOTrainer(
        config=config,
        policy=load(AutoModelForCausalLM, "policy", weights),
        ref_policy=load(AutoModelForCausalLM, "policy", frozen),
        reward_model=load(AutoModelForSequenceClassification, "reward", frozen, num_labels=1),
        train_dataset=dataset_of(prompts, tokenizer),
        **common,
    )


def scored_by_ids(models: str, missing_eos_penalty: float | None = None) -> Callable:
    """The reward model in `models` as a function of the token ids, which may end in a stop token. From the model's
    folder TRL 1.x would read prompt and completion as text, tokenized again, without the stop token."""
    tokenizer = AutoTokenizer.from_pretrained(f"{models}/policy")
    model = AutoModelForSequenceClassification.from_pretrained(f"{models}/reward").eval()

    def reward_model(prompts, completions, completion_ids, **columns) -> list[float]:
        rows = [p + c for p, c in zip(tokenizer(prompts)["input_ids"], completion_ids)]
        scores, penalty = scores_of(model, rows, len(rows)), missing_eos_penalty or 0.0
        return [score - penalty * (ids[-1] != tokenizer.eos_token_id) for score, ids in zip(scores, completion_ids)]

    return reward_model


def timed_updates(folder: str, flags: dict, out: str) -> dict:
    """Median seconds of an update but the first, and peak GiB, by what throughput.py has written into `folder`."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    marks, on_cpu = [], flags["device"] == "cpu"

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args, **options):
            if not on_cpu:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    prompts = [json.loads(line)["prompt"] for line in Path(folder, "data", "train.jsonl").read_text().splitlines()]
    theirs = {"optim": "adamw_torch_fused", "logging_strategy": "no"}
    rloo_trainer(flags, folder, out, prompts, Clock(), **theirs).train()
    assert len(marks) == flags["total_episodes"] // flags["per_device_train_batch_size"], f"{len(marks)} updates"
    peak = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if on_cpu
        else torch.cuda.max_memory_allocated() / 2**30
    )
    return {"seconds": median(b - a for a, b in itertools.pairwise(marks)), "peak_gb": peak}


if __name__ == "__main__":
    answer_job({"updates": timed_updates})
