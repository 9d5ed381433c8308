"""What every study of the benchmark does: runs by their flags, records, measuring, intervals, tables, pictures.

    python benchmark/study/study.py --policy runs/my_run              # a policy on 2,000 fresh validation posts
    python benchmark/study/study.py --policy benchmark/mini_tldr/sft --split test --posts 500 --greedy

A study is a list of runs. Each is made by its command, measured, and written to a .json file at once; what has its
record there is not made again, and a run that was stopped goes on. Training output is in runs/, which may be deleted.

The rule of intervals, for all pages:

    - The seed of a run is the unit. ± is the standard error of the mean over seeds, given for three or more.
    - An interval in square brackets is of 95%, by Student's t: of a mean over its seeds, of a difference by Welch's.
    - Where one side of a difference has fewer than five seeds, the standard deviation is pooled over all rows of its
      table: two or three seeds do not say how much a setting varies.
    - A row is ahead or behind if its p is below 0.05 after Holm's correction for all rows of the table.

All of it is about other seeds on the same posts. Other posts move all rows of a table together.
"""

import fcntl
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
import tyro

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TASK = ROOT / "benchmark" / "mini_tldr"  # data, sft/, reward/
sys.path[:0] = [str(ROOT), str(TASK)]
import mini_tldr  # noqa: E402

import rloo  # noqa: E402

TEMPERATURE, RESPONSE_LENGTH = 0.7, 53  # rloo.py's defaults
SAMPLES = 2  # completions sampled for each post
FRESH = {"validation": 2_000, "test": 5_000, "second_test": 5_000}  # posts of each kind; later ones avoid earlier ones
# A run evaluates itself on one post: measuring is done here.
QUIET = ["--dataset_test_split", "validation", "--num_eval_prompts", "1", "--num_sample_generations", "0"]


# ---- Runs and records ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Flags of rloo.py that studies vary; all of them are on a run's command line, whatever the defaults are."""

    lr: float = 2.5e-4
    size: int = 32
    """completions per update"""
    beta: float = 0.02
    episodes: int = 6_400
    epochs: int = 1
    k: int = 4
    flags: tuple[str, ...] = ()
    """more flags"""

    def command(self, seed: int) -> list[str]:
        """The command without its output folder."""
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
        return ["rloo.py", *(word for flag, value in flags.items() for word in (f"--{flag}", str(value))), *self.flags]


@dataclass(frozen=True)
class Run:
    """A run, and what is measured of it."""

    name: str
    command: tuple[str, ...]
    """without python and output folder"""
    seed: int
    part: str
    """kind of fresh posts that it is measured on"""
    posts: int
    """the first so many of them"""
    greedy: bool = False
    """measure greedy completions as well"""
    checkpoints: int = 0
    """so many points along the way are measured as well, the last one being the end"""
    curve_posts: int = 1_000
    """the first so many test posts, for the points along the way"""
    reward: str = ""
    """folder of the reward model that it is trained on; empty: the embedded task's"""
    python: str = ""
    """of another environment"""
    extra: tuple[str, ...] = (*QUIET, "--resume")
    """flags that do not belong to the record; with --resume the run saves its checkpoints"""

    @property
    def episodes(self) -> int:
        return int(self.value("--total_episodes"))

    @property
    def size(self) -> int:
        """Completions per update."""
        flags = ("--per_device_train_batch_size", "--gradient_accumulation_steps", "--num_mini_batches")
        return math.prod(int(self.value(flag)) for flag in flags)

    def value(self, flag: str) -> str:
        return self.command[self.command.index(flag) + 1]

    def full_command(self, folder: Path) -> list[str]:
        command = [self.python or sys.executable, *self.command, *self.extra, "--output_dir", str(folder)]
        if "--resume" in self.extra:
            updates, points = -(-self.episodes // self.size), self.checkpoints
            command += ["--save_steps", str(-(-updates // points) if points else 0)]
            command += ["--save_total_limit", str(max(2, points))]
        return command + (["--reward_model_path", self.reward] if self.reward else [])


class Records:
    """A JSON file of name -> record, written anew, under another name first, at each change. Several processes may
    write to it."""

    def __init__(self, path: Path):
        self.path = path
        self.all: dict[str, dict] = {}
        self.read()

    def read(self):
        if self.path.is_file():
            self.all = json.loads(self.path.read_text())

    def add(self, name: str, **found):
        lock = os.open(self.path.parent, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.read()
        self.all[name] = self.all.get(name, {}) | found
        lines = [f"{json.dumps(x)}: {json.dumps(self.all[x])}" for x in sorted(self.all)]
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        unfinished.replace(self.path)
        os.close(lock)

    def value(self, name: str, *keys):
        """An entry of a record, None where there is none."""
        found = self.all.get(name)
        for key in keys:
            found = None if found is None else found.get(key)
        return found

    def means(self, names: Sequence[str], part: str, measure: str, mode: str = "sampled") -> list[float]:
        """A measure of the runs that have it."""
        found = [self.value(name, part, mode, measure, "mean") for name in names]
        return [value for value in found if value is not None]


def run_logged(command: Sequence[str], log: Path):
    """Runs a command in the top folder, on one thread, with its output at the end of a log."""
    with open(log, "a", encoding="utf-8") as output:
        threads = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=threads, check=True
        )


def read_lines(path: Path) -> list[dict]:
    """The objects of a file of JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class Study:
    """Makes runs in `folder` and keeps what is found in the file `results`."""

    def __init__(self, folder: Path, results: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        results.parent.mkdir(parents=True, exist_ok=True)
        self.records = Records(results)

    def make(self, run: Run):
        """Trains and measures a run unless it has its record."""
        record = self.records.all.get(run.name, {})
        if run.part in record and ("curve" in record or not run.checkpoints):
            return
        found = self.measured(run, self.train(run))
        self.records.add(run.name, **found)
        print(f"{run.name}: win {found[run.part]['sampled']['win']['mean']:.4f} on {run.part} posts", flush=True)

    def train(self, run: Run) -> Path:
        """The folder of a complete run."""
        folder = self.folder / run.name
        if not (folder / "model.safetensors").is_file():
            print(f"{time.strftime('%T')} training {run.name}", flush=True)
            run_logged(run.full_command(folder), Path(f"{folder}.log"))
        seconds = sum(line["cpu_time"] for line in read_lines(folder / "metrics.jsonl"))
        self.records.add(run.name, cpu_seconds=round(seconds, 1))
        return folder

    def measured(self, run: Run, folder: Path) -> dict:
        """What a complete run's record gets."""
        found, grades = self.grade(folder, run.part, run.posts, run.seed, run.greedy, run.reward)
        record = {"command": shown(run), "seed": run.seed, run.part: found}
        if run.checkpoints:
            curve = [{"episode": 0, **self.start(run)}]
            for checkpoint in sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:])):
                episode = int(checkpoint.name[11:]) * run.size
                if episode < run.episodes:
                    point, _ = self.grade(checkpoint, "test", run.curve_posts, run.seed, False, run.reward)
                    curve.append({"episode": episode, **point})
            if run.part == "test":  # the end, on the posts of the other points
                end = {"sampled": summaries({name: x[: run.curve_posts] for name, x in grades.items()})}
            else:
                end, _ = self.grade(folder, "test", run.curve_posts, run.seed, False, run.reward)
            record["curve"] = [*curve, {"episode": run.episodes, **end}]
        return record

    def start(self, run: Run) -> dict:
        """The SFT policy, where every curve begins."""
        name = "sft" + (f"_{Path(run.reward).name}" if run.reward else "")
        if self.records.value(name, "start") is None:
            found, _ = self.grade(TASK / "sft", "test", run.curve_posts, 1, False, run.reward)
            self.records.add(name, start=found)
        return self.records.value(name, "start")

    def grade(self, folder: Path, part: str, posts: int, seed: int, greedy: bool, reward: str = ""):
        """Summaries of a policy on the first posts of a kind, and its values for each of them, sampled."""
        engine, rows = engine_with(reward), fresh_posts(part, posts)
        policy = engine.policy(folder)
        sampled = grade(engine, policy, rows, SAMPLES, seed)
        found = {"sampled": summaries(sampled)}
        if greedy:
            found["greedy"] = summaries(grade(engine, policy, rows, 1, seed, temperature=0.0))
        return found, sampled


def shown(run: Run) -> str:
    """The command in a run's record; `trl0` and `trl1` are environments with TRL 0.19 and 1.x."""
    python = {"": "python"}.get(run.python, f"{Path(run.python).parents[1].name}/bin/python" if run.python else "")
    return " ".join([python, *run.command])


# ---- Posts -----------------------------------------------------------------------------------------------------------


def combination(row: dict) -> tuple:
    """The facts of a row, by which posts are told apart."""
    return tuple(mini_tldr.values_of(row["facts"]).values())


def shipped_combinations() -> set[tuple]:
    """Combinations of facts in the splits that are shipped."""
    return {
        combination(row) for split in ("train", "validation", "test") for row in read_lines(TASK / f"{split}.jsonl")
    }


def fresh_posts(kind: str, number: int | None = None) -> list[dict]:
    """The first `number` fresh posts of a kind, as rows of the dataset; always the same ones."""
    return all_fresh_posts()[kind][:number]


@lru_cache(maxsize=1)
def all_fresh_posts() -> dict[str, list[dict]]:
    """Posts by the task's own generator. No combination of facts is in two kinds, nor in a split that is shipped."""
    taken, found = shipped_combinations(), {}
    for kind, size in FRESH.items():
        rng = random.Random(f"fresh {kind} posts")
        found[kind] = [mini_tldr.sample_row(rng, taken) for _ in range(size)]  # adds to `taken`
    return found


# ---- Measuring -------------------------------------------------------------------------------------------------------


class Engine:
    """The forward passes of policies and reward models, on one thread of a CPU in float32.

    `reward_models`: name of a measure -> folder of the reward model behind it, beside the embedded task's `score`."""

    def __init__(self, reward_models: dict[str, str] | None = None, chunk_size: int = 128):
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.chunk_size = chunk_size
        self.args = rloo.parse_args(["--device", "cpu", "--dtype", "float32"])
        self.tokenizer = rloo.load_tokenizer(self.args, "--policy", str(TASK / "sft"))
        self.stop_ids = [self.tokenizer.eos_token_id]
        self.reference = self.policy(TASK / "sft")
        folders = {"score": TASK / "reward"} | (reward_models or {})
        self.rewards = {
            name: transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
            for name, folder in folders.items()
        }

    def policy(self, path: str | Path, trained: bool = False):
        """The policy of a folder."""
        return rloo.load_model(self.args, "--policy", str(path), trained=trained)

    def rows(self, posts: list[dict]) -> list[dict]:
        """Posts as rollout wants them."""
        return [rloo.prepare_row(post, self.tokenizer) for post in posts]

    def rollout(self, policy, rows: list[dict], k: int, temperature: float):
        """rloo.py's own: a Batch and the log-probs (k, B, R) of its tokens."""
        return rloo.rollout(policy, rows, k, temperature, RESPONSE_LENGTH, self.stop_ids, chunk_size=self.chunk_size)

    def complete(self, policy, rows: list[dict], k: int, temperature: float):
        """k completions of each row: their texts, number j·B + b, and by name what is measured of them, (k, B)."""
        batch, logprobs = self.rollout(policy, rows, k, temperature)
        found = {name: self.scores(model, batch) for name, model in self.rewards.items()}
        found["length"] = batch.response_mask.sum(-1)
        found["kl"] = torch.zeros(found["length"].shape)
        if temperature and policy is not self.reference:
            reference = rloo.chunked_logprobs(self.reference, batch, temperature, "group", self.chunk_size)
            found["kl"] = (logprobs - reference).sum(-1)
        return rloo.completion_texts(batch, self.tokenizer), found

    def scores(self, model, batch) -> torch.Tensor:
        """A reward model's scores (k, B)."""
        return rloo.token_reward(model, "group", self.chunk_size, batch)


@lru_cache(maxsize=1)
def engine_with(reward: str = "") -> Engine:
    """What measures; where a run's reward is not the embedded task's, `proxy` is its own."""
    return Engine({"proxy": reward} if reward else {})


def grade(engine: Engine, policy, posts: list[dict], samples: int, seed: int, temperature: float = TEMPERATURE) -> dict:
    """Measure -> its values (posts, samples), with the same random numbers for all policies:

    score, length   the reward model's; in tokens
    gold            the gold judge's
    win             1 where the gold score is above that of the post's reference, 0.5 where equal, else 0
    kl              Σ_t log π(y_t) - log π_SFT(y_t) at this temperature, in nats
    """
    rows, reference = engine.rows(posts), gold([p["completion"] for p in posts], posts)
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]["prompt_ids"]), i))  # little padding
    found: dict[str, np.ndarray] = {}
    size = max(1, engine.chunk_size // samples)
    for number, begin in enumerate(range(0, len(order), size)):
        index = order[begin : begin + size]
        transformers.set_seed(seed * 1_000_000 + number)
        texts, values = engine.complete(policy, [rows[i] for i in index], samples, temperature)
        values["gold"] = torch.tensor(gold(texts, [posts[i] for i in index] * samples)).view(samples, -1)
        for name, tensor in values.items():
            found.setdefault(name, np.empty((len(rows), samples)))[index] = tensor.T.numpy()
    found["win"] = wins(found["gold"], reference[:, None])
    return found


def gold(texts: list[str], posts: list[dict]) -> np.ndarray:
    """The gold judge's scores."""
    return np.array(mini_tldr.gold_judge(None, texts, facts=[post["facts"] for post in posts]))


def wins(ours: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """1 where ours is above the reference's, 0.5 where it is equal, else 0."""
    return np.where(np.isclose(ours, reference, atol=1e-6), 0.5, (ours > reference).astype(float))


def summaries(grades: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Means over posts, of the mean over a post's samples, and their standard errors over posts."""
    return {name: mean_over_posts(values.mean(1)) for name, values in grades.items()}


def mean_over_posts(per_post: np.ndarray) -> dict[str, float]:
    mean, error = mean_and_error(per_post)
    return {"mean": round(mean, 5), "stderr": round(error, 5)}


# ---- Intervals: the rule at the top ----------------------------------------------------------------------------------


def mean_and_error(values) -> tuple[float, float]:
    """Mean and its standard error, NaN for one value."""
    values = np.asarray(values, float)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def two_sided_p(t: float, freedom: float) -> float:
    """P(|T| > |t|) of Student's t, by the integral of cos^(freedom - 1) from atan(|t| / √freedom) to π/2."""
    if math.isnan(t):
        return math.nan
    edge = math.atan2(abs(t), math.sqrt(freedom))
    angles = (np.arange(2_000) + 0.5) / 2_000  # midpoints
    tail = (np.cos(edge + (math.pi / 2 - edge) * angles) ** (freedom - 1)).mean() * (math.pi / 2 - edge)
    return float(tail / ((np.cos(math.pi / 2 * angles) ** (freedom - 1)).mean() * math.pi / 2))


@lru_cache(maxsize=1_000)
def t_quantile(freedom: float, outside: float = 0.05) -> float:
    """The t beyond which a share `outside` lies, on both sides together."""
    low, high = 0.0, 1e4
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, freedom) > outside else (low, middle)
    return high


class Difference(NamedTuple):
    mean: float
    low: float
    high: float
    p: float
    holm: float
    """p after the correction for all rows of the table"""

    @property
    def verdict(self) -> str:
        return "not told apart" if not self.holm < 0.05 else "ahead" if self.mean > 0 else "behind"


def welch(ours, theirs) -> tuple[float, float]:
    """Standard error of a difference of means, and its degrees of freedom."""
    parts = [np.var(x, ddof=1) / len(x) for x in (ours, theirs)]
    spread = sum(part**2 / (len(x) - 1) for part, x in zip(parts, (ours, theirs)))
    return math.sqrt(sum(parts)), sum(parts) ** 2 / spread if spread else 1.0


def pooled(ours, theirs, pool) -> tuple[float, float]:
    """The same with the standard deviation of all rows of `pool`."""
    rows = [x for x in pool if len(x) > 1]
    freedom = sum(len(x) - 1 for x in rows)
    variance = sum((len(x) - 1) * np.var(x, ddof=1) for x in rows) / freedom if freedom else math.nan
    return math.sqrt(variance * (1 / len(ours) + 1 / len(theirs))), max(freedom, 1)


def difference(ours, theirs, pool: Sequence[Sequence[float]] = ()) -> Difference:
    """Of two means over seeds: by Welch, or with the standard deviation pooled over `pool` where either side has fewer
    than five seeds."""
    enough = min(len(ours), len(theirs)) >= 5
    error, freedom = welch(ours, theirs) if enough else pooled(ours, theirs, pool or (ours, theirs))
    mean = float(np.mean(ours) - np.mean(theirs))
    half = t_quantile(round(float(freedom), 2)) * error
    p = two_sided_p(mean / error if error else math.copysign(math.inf, mean), freedom)
    return Difference(mean, mean - half, mean + half, p, p)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's correction of p values for each other."""
    adjusted, largest = [math.nan] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def differences(rows: dict[str, Sequence[float]], base: str) -> dict[str, Difference]:
    """Each row of a table, its values one for each seed, less the row `base`; corrected for each other."""
    others = {name: values for name, values in rows.items() if name != base}
    found = {name: difference(values, rows[base], list(rows.values())) for name, values in others.items()}
    return corrected(found)


def corrected(found: dict[str, Difference]) -> dict[str, Difference]:
    """Differences of one table, with Holm's correction."""
    return {name: x._replace(holm=p) for (name, x), p in zip(found.items(), holm([x.p for x in found.values()]))}


# ---- Tables ----------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def plus_minus(values, factor: float = 1, decimals: int = 1, sign: str = "") -> str:
    """Mean ± standard error over seeds, without an error for fewer than three; empty without any."""
    if not len(values):
        return ""
    mean, error = mean_and_error(values)
    text = f"{factor * mean:{sign}.{decimals}f}"
    return text if len(values) < 3 else f"{text} ± {factor * error:.{decimals}f}"


def listed(values, factor: float = 1, decimals: int = 1) -> str:
    """Each seed's value, where seeds go such different ways that their mean is of none of them."""
    return ", ".join(f"{factor * value:.{decimals}f}" for value in values)


def over_posts(found: dict[str, float], factor: float = 1, decimals: int = 1) -> str:
    """A measure of one policy ± its standard error over posts, if there is one."""
    text = f"{factor * found['mean'] + 0.0:.{decimals}f}"  # -0.0 becomes 0.0
    return f"{text} ± {factor * found['stderr']:.{decimals}f}" if found["stderr"] else text


def with_interval(found: Difference, decimals: int = 1) -> str:
    return f"{found.mean:+.{decimals}f} [{found.low:+.{decimals}f}, {found.high:+.{decimals}f}]"


def insert(page: Path, tables: dict[str, str]):
    """Writes tables into a page between <!-- name --> and <!-- end of name -->; a missing page gets them all."""
    if not page.is_file():
        page.write_text("\n\n".join(f"## {name}\n\n{table}" for name, table in tables.items()) + "\n", encoding="utf-8")
        return
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    page.write_text(text, encoding="utf-8")


# ---- Pictures --------------------------------------------------------------------------------------------------------

STYLE = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.titlesize": 10, "legend.frameon": False}
GREY, BLUE, ORANGE, GREEN = "tab:grey", "tab:blue", "tab:orange", "tab:green"
VERDICTS = {"ahead": BLUE, "behind": ORANGE, "not told apart": GREY}


def canvas(columns: int, width: float, height: float, **options):
    """A figure and its axes, side by side, in the style of all pictures. Needs matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        sys.exit("pictures need matplotlib: pip install matplotlib")
    plt.switch_backend("Agg")
    plt.rcParams.update(STYLE)
    return plt.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False, **options)


def save(figure, path: Path):
    figure.savefig(path, dpi=110)
    figure.clear()
    print(f"picture: {path}")


def forest(axis, found: dict[str, Difference], labels: dict[str, str]):
    """Differences with their intervals, a line each in the order given, the numbers on the right."""
    axis.axvline(0, color="black", lw=1)
    for place, x in enumerate(found.values()):
        axis.plot([x.low, x.high], [place, place], color=VERDICTS[x.verdict], lw=2)
        axis.plot(x.mean, place, "o", color=VERDICTS[x.verdict], ms=5)
        side = axis.get_yaxis_transform()
        axis.annotate(with_interval(x), (1.01, place), xycoords=side, va="center", fontsize=8, annotation_clip=False)
    axis.set_yticks(range(len(found)), [labels[name] for name in found])
    axis.set_ylim(len(found) - 0.4, -0.6)
    for verdict in dict.fromkeys(x.verdict for x in found.values()):
        rule = "" if verdict == "not told apart" else " (p < 0.05 after Holm's correction)"
        axis.plot([], [], "o-", color=VERDICTS[verdict], label=verdict + rule)


# ---- Command line ----------------------------------------------------------------------------------------------------


def main(policy: str, split: str = "validation", posts: int | None = None, greedy: bool = False, seed: int = 1):
    """Measures a policy on fresh posts.

    Args:
        policy: its folder: a run's output_dir or a checkpoint in it
        split: validation, to choose by, or test or second_test, to report
        posts: the first so many; if not given, all
        greedy: measure greedy completions as well
        seed: of sampling
    """
    torch.set_num_threads(1)
    engine, rows = Engine(), fresh_posts(split, posts)
    found = {"sampled": summaries(grade(engine, engine.policy(policy), rows, SAMPLES, seed))}
    if greedy:
        found["greedy"] = summaries(grade(engine, engine.policy(policy), rows, 1, seed, temperature=0.0))
    print(json.dumps({"posts": len(rows), **found}, indent=2))


if __name__ == "__main__":
    tyro.cli(main)
