"""What does it cost if the sampler is not the policy, and what do the corrections leave of that?

    python benchmark/gradient/mismatch.py exact           # bias, direction and noise on a tiny language model
    python benchmark/gradient/mismatch.py train           # all runs without a record yet: 2 minutes of one core each
    python benchmark/gradient/mismatch.py train --quick   # each setting in small, in runs/mismatch-quick
    python benchmark/gradient/mismatch.py report          # the tables of README.md, from the numbers that are there

exact. The enumeration of estimators.py with updates that a sampler μ draws, for four ways in which μ can differ from
the policy: see `differing`. What rollout_weight makes of the log-probs of both goes into the loss.

train. The embedded task, updates of 32 completions, with samplers that differ from the policy: rounded to bfloat16, or
the policy of 1, 4 or 16 updates ago (stale.py); each with --rollout_correction off, truncate and mask. A trained policy
is measured on fresh validation posts, by ../frontier/measure.py. Runs are made one at a time on one thread, all
settings with the first seed, then with the next. What is found of a run is written at once to mismatch.json, and what
has its record there is not made again. A run that was stopped begins anew.
"""

import itertools
import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import torch
import tyro

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "frontier")]

import estimators  # noqa: E402
import measure  # noqa: E402
from estimates import mean_and_error  # noqa: E402
from frontier import QUIET, SAMPLES, Records, Setting, run_logged  # noqa: E402
from report import insert_tables, markdown  # noqa: E402


@dataclass
class Args:
    """Samplers that are not the policy: exactly on a tiny language model, or by training the embedded task."""

    stage: Literal["exact", "train", "report"]
    """what to do; report only writes the tables"""
    seeds: tuple[int, ...] | None = None
    """train: all settings with the first, then with the next, 1 to 3 if not given; exact: of the tiny models, 1 to 5"""
    quick: bool = False
    """train each setting in small, with one seed, in runs/mismatch-quick"""


# ---- Exactly ---------------------------------------------------------------------------------------------------------

UNLIMITED = "no cap"
WEIGHTS = {"off": estimators.Option()} | {  # what differs from the defaults
    f"{name}, {level}": estimators.Option(rollout_correction=correction, rollout_correction_cap=cap, ratio_level=level)
    for level in ("sequence", "token")
    for name, correction, cap in (
        ("truncate", "truncate", 2.0),
        ("mask", "mask", 2.0),
        (UNLIMITED, "truncate", math.inf),
    )
}
DIFFERENCES = {  # name -> kind and size, see `differing`
    "logits off by 0.02": ("logits", 0.02),
    "logits off by 0.3": ("logits", 0.3),
    "top-p 0.9": ("top-p", 0.9),
    "one update old, step 0.03": ("step", 0.03),
    "one update old, step 0.3": ("step", 0.3),
    "one update old, step 1": ("step", 1.0),
}


def differing(case: estimators.Case, reference, kind: str, size: float, seed: int):
    """A policy, as a Case, and the log-probs (B, n, R) of a sampler that differs from it.

    logits: normal noise with standard deviation `size` is on every logit of the sampler
    top-p: the sampler cuts its softmax to the fewest likeliest tokens that reach `size`; its log-probs are of these
    step: the sampler is the policy of `case`, and the policy what it becomes by a step of length `size` along the
        estimate that an update of 32 completions (4 groups of 4 for both prompts) gives; a clipped one has one length
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, mask = case.tokens, case.mask
    if kind == "top-p":
        return case, estimators.token_logprobs(case.theta, tokens, mask, size)
    if kind == "logits":  # a logit is the sum of two numbers
        noise = torch.randn(len(case.theta), generator=generator, dtype=torch.float64) * size / math.sqrt(2)
        return case, estimators.token_logprobs(case.theta + noise, tokens, mask)
    drawn = torch.multinomial(case.logprobs.sum(-1).exp(), 16, replacement=True, generator=generator)  # (B, 16)
    g = estimators.estimates(case, drawn.T.view(4, 4, estimators.B), estimators.Option()).mean(0)
    theta = case.theta + size * g / g.norm()
    return estimators.make_case(theta, reference, case.scores, tokens, mask, case.kl_coef), case.logprobs


def gap_and_share(case: estimators.Case, sampler: torch.Tensor) -> tuple[float, float]:
    """The mean |log π - log μ| of a token that μ samples, and (E w)² / E w² of its completions: what training logs as
    val/rollout_logprob_gap and val/rollout_weight_share."""
    probability = sampler.sum(-1).exp()
    difference = (case.logprobs - sampler).masked_fill(probability[..., None] == 0, 0.0)
    gap = (probability[..., None] * difference.abs()).sum() / (probability @ case.mask.sum(-1).double()).sum()
    w = difference.sum(-1).exp()
    share = (probability * w).sum() ** 2 / ((probability * w * w).sum() * probability.sum())
    return gap.item(), share.item()


def measure_differences(seeds, rloo_k=(2, 3), kl_coef: float = 0.3) -> list[dict]:
    """A row for each model, reward, position, k and sampler; its `weights` are bias, cosine, variance and noise by the
    names of WEIGHTS. A constant in the reward has no effect, so `large mean` is left out."""
    tokens, mask = estimators.all_completions(3, 2)
    n, found = len(tokens), []
    updates = {k: estimators.all_updates(n, k) for k in rloo_k}
    for seed, reward, position in itertools.product(seeds, ("dense", "sparse"), estimators.POSITIONS):
        reference = torch.randn(15, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scores = estimators.make_scores(reward, n, seed + 1000)
        theta = reference
        if position != estimators.POSITIONS[0]:
            theta = estimators.move_away(reference, scores, tokens, mask, 0.5)
        start = estimators.make_case(theta, reference, scores, tokens, mask, kl_coef)
        for (name, (kind, size)), k in itertools.product(DIFFERENCES.items(), rloo_k):
            case, sampler = differing(start, reference, kind, size, seed)
            gap, share = gap_and_share(case, sampler)
            base = estimators.moments(case, updates[k], estimators.Option())  # sampled by the policy
            weights = {}
            for label, option in WEIGHTS.items():
                judged = estimators.judge(case.exact, *estimators.moments(case, updates[k], option, sampler), base)
                weights[label] = [float(f"{judged[column]:.4g}") for column in estimators.COLUMNS]
            found.append(
                {"seed": seed, "reward": reward, "position": position, "k": k, "sampler": name}
                | {"gap": round(gap, 5), "share": round(share, 5), "weights": weights}
            )
    return found


def exact_tables(rows: list[dict]) -> dict[str, str]:
    """Bias, direction and noise as tables: samplers × weights; a cell is the median over all cases and the worst."""
    tables = {}
    for name, worst in (("bias", max), ("cosine", min), ("noise", max)):
        column = estimators.COLUMNS.index(name)
        head = ["sampler", "gap", "share", *WEIGHTS]
        lines = [head]
        for sampler in DIFFERENCES:
            some = [row for row in rows if row["sampler"] == sampler]
            line = [sampler, *(f"{median(row[key] for row in some):.3f}" for key in ("gap", "share"))]
            for label in WEIGHTS:
                values = [row["weights"][label][column] for row in some]
                values = [x for x in values if not math.isnan(x)]
                line.append(f"{tidy(median(values))} ({tidy(worst(values))})")
            lines.append(line)
        tables[name] = markdown(lines)
    return tables


def tidy(value: float) -> str:
    """Three digits behind the point, or fewer; 0 where there is only rounding."""
    return "0" if abs(value) < 1e-10 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def run_exactly(seeds, output: Path):
    rows = measure_differences(seeds)
    lines = ",\n".join(json.dumps(row) for row in rows)
    said = {"command": "python benchmark/gradient/mismatch.py exact", "columns": estimators.COLUMNS}
    output.write_text(json.dumps(said)[:-1] + f', "rows": [\n{lines}\n]}}\n')
    for name, table in exact_tables(rows).items():
        print(f"\n{name}\n{table}")


# ---- By training -----------------------------------------------------------------------------------------------------

REFERENCE = Setting(size=32)  # float32, its own sampler, no correction: runs of ../frontier
SAMPLERS = {  # name -> flags
    "bfloat16": ["--dtype", "bfloat16"],
    **{f"stale{age}": ["--rollout_engine", f"benchmark/gradient/stale.py:updates_{age}"] for age in (1, 4, 16)},
}
CORRECTIONS = ("off", "truncate", "mask")
NOTED = ["val/rollout_logprob_gap", "val/rollout_weight", "val/rollout_weight_share", "objective/kl", "grad_norm"]


def command(sampler: str, correction: str, seed: int, episodes: int) -> list[str]:
    """The command of a run without its output folder: the reference's, whatever the defaults are, and its sampler."""
    flags = SAMPLERS[sampler] if sampler == "bfloat16" else [*SAMPLERS[sampler], "--dtype", "float32"]
    return [*replace(REFERENCE, episodes=episodes).command(seed), *flags, "--rollout_correction", correction]


def train(folder: Path, line: list[str]) -> bool:
    """Makes a run, from its beginning; its output goes to <folder>.log. Returns whether it came to its end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *line, *QUIET, "--save_steps", "0", "--output_dir", str(folder)]
    try:
        run_logged(command, Path(f"{folder}.log"))
    except subprocess.CalledProcessError:
        return False
    return True


def summary(lines: list[dict]) -> dict[str, float]:
    """Means of a run's metrics over its updates but the first 16, in which no sampler is that old yet."""
    late = lines[min(16, len(lines) // 2) :]
    found = {name: float(np.mean([line[name] for line in late])) for name in NOTED if name in late[0]}
    largest = [line["val/rollout_weight_max"] for line in lines if "val/rollout_weight_max" in line]
    found |= {"largest val/rollout_weight_max": max(largest)} if largest else {}
    return {name: round(value, 8) for name, value in found.items()}


def grade(engine: measure.Engine, folder: Path, posts: int, seed: int) -> dict:
    """Measures of a trained policy on fresh validation posts, as the records of ../frontier have them."""
    policy, rows = engine.policy(folder), measure.fresh_posts("validation", posts)
    sampled = measure.summaries(measure.grade(engine, policy, rows, SAMPLES, seed))
    greedy = measure.summaries(measure.grade(engine, policy, rows, 1, seed, temperature=0.0))
    return {"posts": posts, "samples": SAMPLES, "sampled": sampled, "greedy": greedy}


def run_trainings(records: Records, output: Path, seeds, episodes: int, posts: int):
    """All runs that have no record yet."""
    output.mkdir(parents=True, exist_ok=True)
    engine = None
    for seed, sampler, correction in itertools.product(seeds, SAMPLERS, CORRECTIONS):
        name = f"{sampler}_{correction}__{seed}"
        if name in records.all:
            continue
        line = command(sampler, correction, seed, episodes)
        begin = time.perf_counter()
        print(f"{time.strftime('%T')} {name}", flush=True)
        complete = train(output / name, line)
        seconds = round(time.perf_counter() - begin, 1)
        lines = [json.loads(x) for x in (output / name / "metrics.jsonl").read_text().splitlines()]
        record = {"command": " ".join(["python", *line]), "seed": seed, "complete": complete, "seconds": seconds}
        record |= {"updates": len(lines), "training": summary(lines)}
        if complete:
            engine = engine or measure.Engine()
            record["validation"] = grade(engine, output / name, posts, seed)
            print(f"{name}: win {record['validation']['sampled']['win']['mean']:.4f}", flush=True)
        records.add(name, **record)


# ---- Tables ----------------------------------------------------------------------------------------------------------

GRADES = [  # title, where it is in a record's measures, factor, decimals
    ("gold win rate, %", ("sampled", "win"), 100, 1),
    ("greedy, %", ("greedy", "win"), 100, 1),
    ("gold score", ("sampled", "gold"), 1, 2),
    ("KL, nats", ("sampled", "kl"), 1, 2),
]


def training_table(records: Records, reference: Records, seeds=(1, 2, 3)) -> str:
    """A line for the reference and for each sampler and correction; means over the seeds that have a record."""
    head = ["sampler", "correction", "seeds", *(grade[0] for grade in GRADES), "difference, points"]
    lines = [[*head, "gap", "mean w", "largest w", "share"]]
    base = {seed: reference.all[f"{REFERENCE.name}__{seed}"] for seed in seeds}
    lines.append(["the policy", "", str(len(base)), *graded(list(base.values())), "", "", "", "", ""])
    for sampler, correction in itertools.product(SAMPLERS, CORRECTIONS):
        found = {seed: records.all.get(f"{sampler}_{correction}__{seed}") for seed in seeds}
        found = {seed: record for seed, record in found.items() if record}
        complete = {seed: record for seed, record in found.items() if record["complete"]}
        if not found:
            continue
        number = str(len(complete)) + (f" of {len(found)}" if len(complete) < len(found) else "")
        line = [sampler.replace("stale", "updates old: "), f"`{correction}`", number]
        if not complete:  # no run came to its end
            lines.append(line + [""] * (len(lines[0]) - len(line)))
            continue
        wins = [win_rate(record) - win_rate(base[seed]) for seed, record in complete.items()]
        lines.append([*line, *graded(list(complete.values())), plus_minus(wins, 100, 1, "+"), *weighed(complete)])
    return markdown(lines)


def win_rate(record: dict) -> float:
    return record["validation"]["sampled"]["win"]["mean"]


def graded(records: list[dict]) -> list[str]:
    """The cells of GRADES."""
    cells = []
    for _, (mode, name), factor, decimals in GRADES:
        values = [record["validation"][mode][name]["mean"] for record in records]
        cells.append(plus_minus(values, factor, decimals))
    return cells


def weighed(records: dict[int, dict]) -> list[str]:
    """The cells of gap, mean w, largest w and share; empty where no w was computed."""
    training = [record["training"] for record in records.values()]
    gap = np.mean([line["val/rollout_logprob_gap"] for line in training])
    if "val/rollout_weight" not in training[0]:
        return [f"{gap:.1g}", "", "", ""]
    mean, share = (np.mean([line[f"val/rollout_weight{end}"] for line in training]) for end in ("", "_share"))
    largest = max(line["largest val/rollout_weight_max"] for line in training)
    return [f"{gap:.1g}", f"{mean:.2f}", f"{largest:.3g}", f"{share:.2f}"]


def plus_minus(values: list[float], factor: float, decimals: int, sign: str = "") -> str:
    """Mean ± standard error over seeds, without an error for one seed."""
    mean, error = mean_and_error(values)
    text = f"{factor * mean:{sign}.{decimals}f}"
    return text if math.isnan(error) else f"{text} ± {factor * error:.{decimals}f}"


def main(args: Args):
    torch.set_num_threads(1)  # as in the runs: a measurement is then the same to the digit
    if args.stage == "exact":
        run_exactly(args.seeds or range(1, 6), HERE / "mismatch_exact.json")
    if args.stage == "train":
        output = ROOT / "runs" / ("mismatch-quick" if args.quick else "mismatch")
        records = Records((output if args.quick else HERE) / "mismatch.json")
        if args.quick:
            run_trainings(records, output, (1,), 320, 100)
        else:
            run_trainings(records, output, args.seeds or (1, 2, 3), REFERENCE.episodes, 2_000)
    if args.stage == "report":
        tables = exact_tables(json.loads((HERE / "mismatch_exact.json").read_text())["rows"])
        runs, reference = (Records(path) for path in (HERE / "mismatch.json", HERE.parent / "frontier" / "runs.json"))
        insert_tables(tables | {"training": training_table(runs, reference)}, HERE)


if __name__ == "__main__":
    main(tyro.cli(Args, use_underscores=True, config=[tyro.conf.PositionalRequiredArgs]))
