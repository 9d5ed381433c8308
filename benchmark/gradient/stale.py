"""Rollouts of a policy some updates old, as an asynchronous sampler would make them, and what training by them gives.

    python rloo.py --rollout_engine benchmark/gradient/stale.py:updates_4 --rollout_correction truncate
    python benchmark/gradient/stale.py             # all runs that have no record yet: 2 to 18 minutes each
    python benchmark/gradient/stale.py --quick     # each of them in small, in runs/stale-quick
    python benchmark/gradient/stale.py --report    # the table of README.md again, from stale.json

Completions are sampled by rloo.py's own decoder from the weights before the last 1, 4 or 16 updates, or from the first
ones until there are so many, with the log-probs that these weights give them. Evaluations (k = 1) use the weights of
now. Old weights are held in memory only, so a run that was stopped begins anew.
"""

import itertools
import shutil
import sys
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))

import rloo  # noqa: E402

versions: dict[int, dict] = {}  # number of updates -> the weights after so many
copies: list = []  # the model that holds old weights, once there is one


def generate(age, model, prompt_ids, *, k, temperature, response_length, stop_ids, seed, version, max_length):
    """A rollout engine, see `own_engine` in rloo.py, that samples from the weights `age` updates ago."""
    if k > 1:
        model = older(model, version, age)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        rows = [{"prompt_ids": ids} for ids in prompt_ids]
        batch, logprobs = rloo.rollout(model, rows, k, temperature, response_length, stop_ids)
    tokens = grouped(batch.responses, batch.response_mask)
    return tokens, grouped(logprobs, batch.response_mask)


def older(model, version: int, age: int):
    """The model as it was `age` updates before `version`, or as early as it was seen. Notes what it is now."""
    versions[version] = {name: x.detach().clone() for name, x in model.state_dict().items()}
    for passed in [number for number in versions if number < version - age]:
        del versions[passed]
    if not copies:
        copies.append(deepcopy(model))
    copies[0].load_state_dict(versions[min(versions)])
    return copies[0]


def grouped(values, mask) -> list[list[list]]:
    """The real entries of values (k, B, R) as [B][k] lists."""
    pairs = zip(values.transpose(0, 1), mask.transpose(0, 1), strict=True)
    return [[x[real].tolist() for x, real in zip(*group, strict=True)] for group in pairs]


updates_0, updates_1, updates_4, updates_16 = (partial(generate, age) for age in (0, 1, 4, 16))


# ---- Training runs ---------------------------------------------------------------------------------------------------

CORRECTIONS = ("off", "truncate")
SAMPLERS = {  # name of the runs -> in words, flags
    "bfloat16": ("in bfloat16", ("--dtype", "bfloat16")),
    **{
        f"stale{age}": (
            f"{age} update{'s' * (age > 1)} old",
            ("--rollout_engine", f"benchmark/gradient/stale.py:updates_{age}", "--dtype", "float32"),
        )
        for age in (1, 4, 16)
    },
}


def runs(study, seeds, quick: bool) -> list:
    """All runs: first the policy's own sampler, six seeds, then every sampler and correction, seed by seed."""
    size = {"episodes": 320} if quick else {}
    found = []

    def add(name: str, seed: int, *flags: str):
        setting = study.Setting(lr=5e-4, size=32, beta=0.05, flags=flags, **size)
        extra = (*study.QUIET, "--save_steps", "0")
        command, posts = tuple(setting.command(seed)), 100 if quick else 2_000
        found.append(study.Run(f"{name}__{seed}", command, seed, "validation", posts, greedy=True, extra=extra))

    for seed in range(1, 2 if quick else 7):
        add("policy", seed)
    for seed, (name, (_, flags)), correction in itertools.product(seeds, SAMPLERS.items(), CORRECTIONS):
        add(f"{name}_{correction}", seed, *flags, "--rollout_correction", correction)
    return found


def summary(lines: list[dict]) -> dict[str, float]:
    """The mean gap over a run's updates but the first 16, in which no sampler is that old yet."""
    late = lines[min(16, len(lines) // 2) :]
    name = "val/rollout_logprob_gap"
    return {name: round(sum(line[name] for line in late) / len(late), 8)} if name in late[0] else {}


def table(study, records) -> str:
    """A line for each sampler and correction that has a run, with all seeds: most have fewer than three."""
    labels = {"policy": ("the policy itself", "")}
    pairs = itertools.product(SAMPLERS.items(), CORRECTIONS)
    labels |= {f"{name}_{correction}": (words, f"`{correction}`") for (name, (words, _)), correction in pairs}
    rows = [["sampler", "correction", "gold win rate of each seed, %", "KL, nats", "gap"]]
    for name, label in labels.items():
        found = [record for key, record in sorted(records.all.items()) if key.rpartition("__")[0] == name]
        wins, kl = ([x["validation"]["sampled"][measure]["mean"] for x in found] for measure in ("win", "kl"))
        gaps = [x["training"]["val/rollout_logprob_gap"] for x in found if x.get("training")]
        if found:
            gap = f"{sum(gaps) / len(gaps):.1g}" if gaps else ""
            rows.append([*label, study.listed(wins, 100), study.listed(kl), gap])
    return study.markdown(rows)


@dataclass
class Args:
    """Training with samplers that are not the policy."""

    seeds: tuple[int, ...] = (1, 2, 3)
    """all settings with the first, then with the next"""
    quick: bool = False
    """train each setting in small, with one seed, in runs/stale-quick"""
    report: bool = False
    """only write the table, from the numbers that are there"""


def main(args: Args):
    sys.path.insert(0, str(HERE.parent / "study"))
    import study

    folder = HERE.parents[1] / "runs" / ("stale-quick" if args.quick else "stale")
    results = (folder if args.quick else HERE) / "stale.json"
    made = study.Study(folder, results)
    for run in () if args.report else runs(study, args.seeds[:1] if args.quick else args.seeds, args.quick):
        if run.name not in made.records.all:
            shutil.rmtree(folder / run.name, ignore_errors=True)
            made.make(run)
            lines = study.read_lines(folder / run.name / "metrics.jsonl")
            made.records.add(run.name, training=summary(lines))
    study.insert(results.parent / ("tables.md" if args.quick else "README.md"), {"stale": table(study, made.records)})


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, use_underscores=True))
