"""What reach.py, peers.py and overoptimise.py share: they train policies on mini TL;DR and measure them on fresh posts.

Each run has its record in a .json file and is made only once, unless --again asks for it; a run that was stopped goes
on. What runs write is in runs/study, which may be deleted.
"""

import itertools
import random
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE.parent / "mini_tldr")]
import common  # noqa: E402
import mini_tldr  # noqa: E402
from common import TASK  # noqa: E402

import rloo  # noqa: E402

TEMPERATURE = 0.7
SAMPLES = 2  # completions sampled for each post
CHUNK = 128  # completions of a forward pass
# Fresh posts of each kind; later ones avoid earlier ones. Settings were chosen on those of validation.
FRESH = {"validation": 2_000, "test": 5_000, "second_test": 5_000, "comparisons": 6_000}


# ---- Runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Flags of rloo.py that studies vary. All are on a run's command line, whatever the defaults are."""

    lr: float = 2.5e-4
    size: int = 32
    """completions per update"""
    beta: float = 0.02
    episodes: int = 6_400
    k: int = 4
    epochs: int = 1

    def flags(self, seed: int) -> list[str]:
        """Those of rloo.py and of trl/run.py."""
        micro = min(64, self.size)
        flags = {
            "seed": seed,
            "learning_rate": f"{self.lr:g}",
            "kl_coef": f"{self.beta:g}",
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": self.size // micro,
            "num_mini_batches": 1,
            "num_ppo_epochs": self.epochs,
            "rloo_k": self.k,
            "total_episodes": self.episodes,
        }
        return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]

    def own_flags(self, save_steps: int = 100, kept: int = 1, evaluations: int = 0) -> list[str]:
        """Flags by which a run of rloo.py goes on if it was stopped, and keeps checkpoints. It evaluates itself on the
        test split at so many points after the start, or on one post: the rest is measured here."""
        evaluation = ["--num_sample_generations", str(max(0, evaluations - 1))]
        if not evaluations:
            evaluation += ["--dataset_test_split", "validation", "--num_eval_prompts", "1"]
        return [*evaluation, "--save_steps", str(save_steps), "--save_total_limit", str(kept), "--resume"]


def train(name: str, command: list[str], runs: Path) -> Path:
    """The folder of a complete run, in the folder `runs`. command: without output folder."""
    folder = runs / name
    if not (folder / "model.safetensors").is_file():
        print(f"{time.strftime('%T')} training {name}", flush=True)
        common.run_logged([*command, "--output_dir", folder], Path(f"{folder}.log"))
    return folder


def seconds(folder: Path) -> float:
    """Of training on one thread: all updates, without loading and evaluating."""
    lines = common.read_lines(folder / "metrics.jsonl")
    return round(sum(value for line in lines for key, value in line.items() if key.startswith("time/")), 1)


# ---- Posts -----------------------------------------------------------------------------------------------------------


def combination(row: dict) -> tuple:
    """The facts of a row, by which posts are told apart."""
    return tuple(mini_tldr.values_of(row["facts"]).values())


def shipped_combinations() -> set[tuple]:
    rows = [common.read_lines(TASK / f"{split}.jsonl") for split in ("train", "validation", "test")]
    return {combination(row) for row in itertools.chain(*rows)}


@cache
def fresh_posts() -> dict[str, list[dict]]:
    """Posts of each kind by the task's own generator, always the same. No combination of facts is in two kinds, nor in
    a split that is shipped."""
    taken, found = shipped_combinations(), {}
    for kind, size in FRESH.items():
        rng = random.Random(f"fresh {kind} posts")
        found[kind] = [mini_tldr.sample_row(rng, taken) for _ in range(size)]  # adds to `taken`
    return found


# ---- Measuring -------------------------------------------------------------------------------------------------------


class Engine:
    """The forward passes of policies and of the reward model, on one thread of a CPU in float32."""

    def __init__(self):
        torch.set_num_threads(1)  # as in the runs
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.args = rloo.resolve_args(rloo.Args(device="cpu", local_rollout_forward_batch_size=CHUNK))
        self.tokenizer = rloo.load_tokenizer(self.args, str(TASK / "sft"))
        self.longest = max(len(x["prompt_ids"]) for x in self.examples(common.read_lines(TASK / "test.jsonl")))
        self.reference = self.read(TASK / "sft")
        (self.reward,) = rloo.load_reward_model(self.args, self.tokenizer, self.longest).values()

    def read(self, folder: Path, *auto_class, **options):
        """A model with its layout."""
        model = rloo.read_model(self.args, str(folder), torch.float32, *auto_class, **options)
        rloo.choose_layout(self.args, model, self.longest)
        return model

    def examples(self, posts: list[dict]) -> list[dict]:
        return [rloo.prepare_example(post, self.tokenizer) for post in posts]

    def complete(self, policy, examples: list[dict], k: int, temperature: float, reward):
        """k completions of each prompt: their texts, number j·B + b, and by name what is measured of them, (k, B)."""
        stop_ids = [self.tokenizer.eos_token_id]
        batch, logprobs = rloo.rollout(self.args, policy, examples, k, temperature, stop_ids)
        found = {"score": reward(batch), "kl": torch.zeros(batch.ended.shape)}
        if temperature and policy is not self.reference:
            found["kl"] = (logprobs - rloo.chunked_logprobs(self.reference, batch, temperature, CHUNK)).sum(-1)
        return rloo.completion_texts(batch, self.tokenizer), found


@cache
def engine() -> Engine:
    return Engine()


def grade(policy, posts: list[dict], samples: int, seed: int, temperature: float = TEMPERATURE, reward=None) -> dict:
    """Measure -> its values (posts, samples), with the same random numbers for all policies:

    win     1 where the gold judge prefers the completion to the post's reference, 0.5 for a tie, else 0
    score   the reward model's, by default that of the task
    kl      Σ_t log π(y_t) - log π_SFT(y_t) at this temperature, in nats; 0 for greedy completions
    """
    reward = reward or engine().reward
    examples = engine().examples(posts)
    order = sorted(range(len(examples)), key=lambda i: (len(examples[i]["prompt_ids"]), i))  # little padding
    found = {name: np.empty((len(examples), samples)) for name in ("win", "score", "kl")}
    size = max(1, CHUNK // samples)
    for number, begin in enumerate(range(0, len(order), size)):
        index = order[begin : begin + size]
        torch.manual_seed(seed * 1_000_000 + number)
        texts, values = engine().complete(policy, [examples[i] for i in index], samples, temperature, reward)
        columns = {name: [posts[i][name] for i in index] * samples for name in ("facts", "completion")}
        values["win"] = torch.tensor(mini_tldr.gold_win_rate(None, texts, **columns)).view(samples, -1)
        for name, tensor in values.items():
            found[name][index] = tensor.T.numpy()
    return found


def over_posts(values: np.ndarray) -> list[float]:
    """Mean and its standard error over posts, of values (posts, samples)."""
    return [round(x, 5) for x in common.mean_and_error(values.mean(1))]


def measured(folder: Path, kind: str, posts: int, seed: int, greedy: bool = False) -> dict:
    """How a policy does on the first fresh posts of a kind: sampled, and greedy -> measure -> [mean, error]."""
    rows, policy = fresh_posts()[kind][:posts], engine().read(folder)
    found = {"sampled": grade(policy, rows, SAMPLES, seed)}
    if greedy:
        found["greedy"] = grade(policy, rows, 1, seed, temperature=0.0)
    return {mode: {name: over_posts(x) for name, x in values.items()} for mode, values in found.items()}


def means(records: common.Records, names: list[str], kind: str, measure: str, mode: str = "sampled") -> list[float]:
    """A measure of the runs that have it."""
    found = [records.value(name, kind, mode, measure) for name in names]
    return [value[0] for value in found if value is not None]
