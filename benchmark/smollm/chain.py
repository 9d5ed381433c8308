"""TL;DR with real text: SFT, reward model, RLOO and judges, on the synopses of packages (see README.md).

    python benchmark/smollm/chain.py --quick                  # all steps but TRL's, small; prints the table
    python benchmark/smollm/chain.py --trl trl1/bin/python    # all that has no record yet, and the page
    python benchmark/smollm/chain.py --names sft --again      # one step, compared with its record

prepare.py comes first. A step that has its record in records.json is not made again; one that was stopped goes on. With
--again, steps are made although they have a record, and compared with it. Models are in runs/smollm, 0.5 GB each.
"""

import argparse
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import models
import report
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from common import Records, folder_of_runs, read_lines, require, run_logged  # noqa: E402

PREPARED = HERE / "prepared"
SAME = 1e-4  # judged values closer than this are a tie
COUNTS = (4, 16)  # best of so many
JUDGES = ("closeness", "rouge_l")


@dataclass(frozen=True)
class Chain:
    """Sizes, and where models are. A step reads the models of others from `models` and writes to `folder`, which is the
    same unless it is made again."""

    folder: Path
    models: Path
    trl: str | None = None  # python of an environment that has it
    sft: int = 1_600  # pairs
    reward: int = 800  # prompts, with 4 completions each
    updates: int = report.UPDATES
    seeds: tuple[int, ...] = report.SEEDS
    test: int = 100


# ---- Judging ---------------------------------------------------------------------------------------------------------


def win_rate(ours: list[float], theirs: list[float]) -> float:
    """Share of the packages for which ours is better; ties count half."""
    margins = [a - b for a, b in zip(ours, theirs, strict=True)]
    return mean(0.5 if abs(margin) < SAME else float(margin > 0) for margin in margins)


def compared(ours: dict[str, dict], theirs: dict[str, dict]) -> dict:
    """Grades of completions by package: their means, and by each judge the win rate against others."""
    names = [name for name in ours if name in theirs]
    found = {grade: round(mean(ours[name][grade] for name in names), 4) for grade in (*JUDGES, "length")}
    found["ended"] = mean(ours[name]["length"] < models.T for name in names)
    for judge in JUDGES:
        found[f"{judge}_wins"] = win_rate(*([side[name][judge] for name in names] for side in (ours, theirs)))
    return found


def of_mode(samples: list[dict], mode: str) -> dict[str, dict]:
    """Grades and text by package, of the lines of completions.jsonl."""
    chosen = [x for x in samples if x["mode"] == mode]
    return {x["columns"]["package"]: x["grades"] | {"text": x["completion"].strip()} for x in chosen}


def completions_of(folder: Path, name: str, prompts: int) -> list[dict]:
    """A sampled and a greedy completion of each test prompt, graded: rloo.py's evaluation without training."""
    out = folder / "judged" / name
    file = out / "completions.jsonl"
    if not file.is_file() or not file.stat().st_size:
        flags = [*shared_flags(), f"--sft_model_path={folder / name}", "--total_episodes=0", f"--output_dir={out}"]
        flags += ["--eval_fns", *(f"{HERE / 'judges.py'}:{judge}" for judge in JUDGES), "--resume"]
        run_logged([sys.executable, "rloo.py", *flags, f"--num_eval_prompts={prompts}"], Path(f"{out}.log"))
    return read_lines(file)


def judged(chain: Chain, name: str) -> dict:
    """By mode, on the test packages, against the SFT model; and human and greedy synopses of the first packages."""
    samples = completions_of(chain.folder, name, chain.test)
    sft, greedy = completions_of(chain.models, "sft", chain.test), of_mode(samples, "greedy")
    found = {mode: compared(of_mode(samples, mode), of_mode(sft, mode)) for mode in ("sampled", "greedy")}
    first = of_split("test", report.EXAMPLES)
    return found | {"examples": {x["package"]: [x["synopsis"], greedy[x["package"]]["text"]] for x in first}}


# ---- SFT and the reward model ----------------------------------------------------------------------------------------


def of_split(split: str, limit: int | None = None) -> list[dict]:
    return read_lines(PREPARED / f"{split}.jsonl")[:limit]


def sampled(chain: Chain, name: str, k: int, rows: list[dict]) -> list[dict]:
    """k completions of each row's prompt, by the SFT model."""
    file = chain.folder / f"samples-{name}.jsonl"
    if not file.is_file():
        models.sample(chain.models / "sft", rows, k, file)
    return read_lines(file)


def train_sft(chain: Chain) -> Path:
    out = chain.folder / "sft"
    if not (out / "model.safetensors").is_file():
        if not (PREPARED / "base" / "model.safetensors").is_file():
            sys.exit("chain.py: no model yet; run this first: python benchmark/smollm/prepare.py")
        models.sft(PREPARED / "base", of_split("sft", chain.sft), out)
    return out


def make_sft(chain: Chain) -> dict:
    log = read_lines(train_sft(chain) / "log.jsonl")
    found = {"pairs": sum(line["items"] for line in log), "seconds": round(sum(line["seconds"] for line in log))}
    found["closeness"] = {str(seed): sft_closeness(chain, seed) for seed in chain.seeds}
    return found | judged(chain, "sft")


def sft_closeness(chain: Chain, seed: int) -> list[float]:
    """What the SFT model's samples have on the packages of each update of a run."""
    sizes = chain.updates, report.SIZE // models.K
    updates = models.rows_of_updates(of_split("train"), chain.models / "sft", seed, *sizes)
    samples = sampled(chain, f"seed{seed}", models.K, sum(updates, []))
    found = {row["package"]: mean(row["closeness"]) for row in samples}
    return [round(mean(found[row["package"]] for row in update), 4) for update in updates]


def train_reward(chain: Chain) -> Path:
    out = chain.folder / "reward"
    if not (out / "model.safetensors").is_file():
        samples = sampled(chain, "reward", models.K, of_split("reward", chain.reward))
        models.reward_model(chain.models / "sft", samples, out)
    return out


def make_reward(chain: Chain) -> dict:
    """How often the reward model agrees with the judges on pairs of test completions, and best-of-n by it."""
    kind = transformers.AutoModelForSequenceClassification
    model, tokenizer = models.load(train_reward(chain), kind=kind, num_labels=1)
    rows = sampled(chain, "test", max(COUNTS), of_split("test", chain.test))
    scores = models.score_samples(model, rows, tokenizer)
    gold = {judge: torch.tensor([row[judge] for row in rows]).T for judge in JUDGES}
    found = {f"agreement_{judge}": models.agreement(scores, of_judge) for judge, of_judge in gold.items()}
    found["agreement_decided"] = models.agreement(scores, gold["closeness"], models.UNDECIDED)
    found["closeness"] = gold["closeness"].mean().item()
    sft = of_mode(completions_of(chain.models, "sft", chain.test), "sampled")
    found |= {f"best_of_{n}": best_of(n, rows, scores, sft) for n in COUNTS}
    return found | {"closest_of_16": best_of(max(COUNTS), rows, gold["closeness"], sft)}


def best_of(n: int, rows: list[dict], scores: torch.Tensor, sft: dict[str, dict]) -> dict:
    """The completion with the best of the scores (k, B) in each n of a package, against the SFT model's own."""
    parts = []
    for begin in range(0, len(scores) - n + 1, n):
        best = (begin + scores[begin : begin + n].argmax(0)).tolist()
        lines = [
            {judge: row[judge][i] for judge in JUDGES} | {"length": len(row["ids"][i])} for row, i in zip(rows, best)
        ]
        parts.append(compared({row["package"]: line for row, line in zip(rows, lines)}, sft))
    return {grade: mean(part[grade] for part in parts) for grade in parts[0]}


# ---- RLOO ------------------------------------------------------------------------------------------------------------


def shared_flags() -> list[str]:
    flags = {"dataset_name": PREPARED, "response_length": models.T, "temperature": models.TEMPERATURE}
    return [f"--{name}={value}" for name, value in (flags | {"dtype": "bfloat16"}).items()]


def training_flags(chain: Chain, kind: str, seed: int) -> list[str]:
    """Of rloo.py and of benchmark/trl/run.py. kind: beta and a number, annotator or trl"""
    beta = float(kind.removeprefix("beta")) if kind.startswith("beta") else report.BETA
    reward, annotator = f"--reward_model_path={chain.models / 'reward'}", f"--reward_fns={HERE / 'judges.py'}:closeness"
    rewards = [reward] if kind == "trl" else [reward, annotator, "--reward_weights", "1", "0"]  # the latter: log only
    if kind == "annotator":
        beta, rewards = report.ANNOTATOR_BETA, [annotator]
    parts = 4 if kind == "trl" else 2  # micro-batches: TRL's plain rows need more memory
    size = {"per_device_train_batch_size": report.SIZE // parts, "gradient_accumulation_steps": parts}
    size |= {"rloo_k": models.K, "total_episodes": chain.updates * report.SIZE}
    values = size | {"learning_rate": 4e-5, "kl_coef": beta, "missing_eos_penalty": 1, "seed": seed}
    policy = f"--sft_model_path={chain.models / 'sft'}"
    return [*shared_flags(), policy, *rewards, *(f"--{name}={x:g}" for name, x in values.items())]


def train(chain: Chain, name: str, flags: list[str]) -> list[dict]:
    """Trains a policy into the folder of this name; returns its metrics."""
    out = chain.folder / name
    if not (out / "model.safetensors").is_file():
        command = [sys.executable, "rloo.py", "--resume", "--save_steps=10", "--save_total_limit=1"]
        command += [f"--max_prompt_length={models.LONGEST}", "--num_eval_prompts=1", "--num_sample_generations=0"]
        if name.startswith("trl"):
            command = [chain.trl, "benchmark/trl/run.py", "rloo"]
        run_logged([*command, *flags, f"--output_dir={out}"], chain.folder / f"{name}.log")
    for checkpoint in out.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return read_lines(out / "metrics.jsonl")


def seconds_of(metrics: list[dict]) -> list[float]:
    """Of each update."""
    return [round(sum(x for name, x in line.items() if name.startswith("time/")), 1) for line in metrics]


def make_speed(chain: Chain, updates: int = 4, rounds: int = 2) -> dict:
    """Seconds of the updates of rloo.py and TRL but the first of each run; a run of each in turns."""
    short, found = replace(chain, updates=updates), {"rloo": [], "trl": []}
    for _ in range(rounds):
        for kind, of_kind in found.items():
            shutil.rmtree(chain.folder / f"{kind}-speed", ignore_errors=True)
            metrics = train(
                short, f"{kind}-speed", training_flags(short, "trl" if kind == "trl" else report.LEARNED, 1)
            )
            of_kind.append(seconds_of(metrics)[1:])
    return found


def make_run(chain: Chain, name: str) -> dict:
    kind, _, seed = name.partition("-seed")
    flags = training_flags(chain, kind, int(seed))
    metrics = train(chain, name, flags)
    found = {"command": " ".join(["rloo.py", *flags]).replace(f"{HERE}/", "").replace(f"{chain.models}/", "")}
    found["scores"] = [round(line["objective/scores"], 4) for line in metrics]
    found["seconds"] = seconds_of(metrics)
    found["kl"] = round(mean(line["objective/kl"] for line in metrics[-10:]), 2)
    logged = "objective/scores" if kind == "annotator" else "rewards/closeness/mean"
    found["closeness"] = [round(line[logged], 4) for line in metrics]
    return found | judged(chain, name) if kind in report.RUNS else found


# ---- All steps -------------------------------------------------------------------------------------------------------


def make(chain: Chain, names: list[str], records: Records):
    """Makes the steps that have no record, or are made again, and the models that they need."""
    steps = {"sft": make_sft, "reward": make_reward, "speed": make_speed}
    ready = replace(chain, folder=chain.models)
    for name in [name for name in names if records.needs(name)]:
        if name == "speed" and not chain.trl:
            print(f"{name}: left out, needs --trl (see benchmark/requirements.txt)")
            continue
        print(f"making {name}", flush=True)
        if name != "sft":
            train_sft(ready)
            if name != "reward":
                train_reward(ready)
        records.add(name, **(steps[name](chain) if name in steps else make_run(chain, name)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="all steps but TRL's, small, in records of their own")
    parser.add_argument("--trl", help="python of an environment with TRL 1.16")
    parser.add_argument("--names", nargs="+", choices=report.NAMES, default=report.NAMES, metavar="NAME", help="steps")
    parser.add_argument("--again", action="store_true", help="make steps that have a record, compare, write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        folder = folder_of_runs("smollm-quick")
        shutil.rmtree(folder, ignore_errors=True)
        records = Records(folder / "records.json")
        chain = Chain(folder, folder, None, sft=160, reward=48, updates=6, seeds=(1,), test=24)
        make(chain, ["sft", "reward", f"{report.LEARNED}-seed1", "annotator-seed1"], records)
        print(report.results(records))
        return
    records = Records(report.RECORDS, args.again)
    make(Chain(folder_of_runs("smollm", args.again), folder_of_runs("smollm"), args.trl), args.names, records)
    report.show(records, args.names)
    if records.added:
        require(matplotlib="matplotlib")
        report.report()


if __name__ == "__main__":
    main()
