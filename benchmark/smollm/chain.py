"""Synopses of packages by SmolLM2: SFT, reward model, RLOO by three rewards, judges (see README.md).

    python benchmark/smollm/chain.py --quick                    # all steps, small; prints the tables
    python benchmark/smollm/chain.py                            # all that has no record yet, and the page
    python benchmark/smollm/chain.py --names rules-seed1 --again   # one step, compared with its record

prepare.py comes first. A step that has its record in records.json is not made again; one that was stopped goes on. With
--again, steps are made although they have a record, and compared with it. Models are in runs/smollm, 0.5 GB each.
"""

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import models
import numpy as np
import report
import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from common import Records, folder_of_runs, read_lines, run_logged  # noqa: E402

PREPARED = HERE / "prepared"
NAMES, MORE = report.NAMES, report.MORE
SAME = 1e-4  # judged values closer than this are a tie
SIMILAR = 2  # words by which the lengths of two synopses differ at most to be compared with length controlled
MARGINS = (0.0, 0.05, 0.1, 0.2)  # of closeness, in pairs that the reward model is asked about
JUDGES = ("closeness", "rouge_l", "keeps_the_rules", "keeps_all")


@dataclass(frozen=True)
class Chain:
    """Sizes, and where models are. A step reads the models of others from `models` and writes to `folder`, which is the
    same unless it is made again."""

    folder: Path
    models: Path
    sft: int = 5_000  # pairs
    reward: int = 1_500  # prompts, with 4 completions each
    updates: int = report.UPDATES
    rules_updates: int = report.RULES_UPDATES
    seeds: tuple[int, ...] = report.SEEDS
    test: int = 500
    ranked: int = 200  # of these, with 16 SFT samples each that the reward model ranks


# ---- Judging ---------------------------------------------------------------------------------------------------------


def of_mode(samples: list[dict], mode: str) -> list[dict]:
    """Grades, text and package of the last of each package's completions in this mode."""
    last = {x["columns"]["package"]: x for x in samples if x["mode"] == mode}
    return [{"package": name, "text": x["completion"].strip()} | x["grades"] for name, x in sorted(last.items())]


def completions_of(chain: Chain, name: str) -> list[dict]:
    """A sampled and a greedy completion of each test prompt, graded: rloo.py's evaluation without training. Prompts are
    sorted by length, so that those that share a forward pass need little padding."""
    plain = name.startswith(("base", "rules"))
    path = PREPARED / "base" if name == "base" else chain.models / name
    out = chain.folder / "judged" / name
    file = out / "run" / "completions.jsonl"
    if not file.is_file() or not file.stat().st_size:
        rows = sorted(of_split("test", chain.test), key=lambda row: len(row["prompt"]))
        out.mkdir(parents=True, exist_ok=True)
        (out / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = [*shared_flags(plain), f"--sft_model_path={path}", "--total_episodes=0", f"--output_dir={out / 'run'}"]
        flags += [f"--dataset_name={out}", "--dataset_train_split=test", "--dataset_test_split=test"]
        flags += ["--eval_fns", *map(function, JUDGES), "--resume", f"--num_eval_prompts={chain.test}"]
        run_logged([sys.executable, "rloo.py", *flags], Path(f"{out}.log"))
    return read_lines(file)


def win(ours: list[dict], theirs: list[dict], judge: str) -> np.ndarray:
    """1 for each package for which ours is better, 0 where theirs is, 0.5 for a tie."""
    margin = np.array([a[judge] - b[judge] for a, b in zip(ours, theirs, strict=True)])
    return np.where(abs(margin) < SAME, 0.5, margin > 0)


def measures(ours: list[dict], theirs: list[dict]) -> dict[str, np.ndarray]:
    """What is said of completions, by package; NaN where it says nothing."""
    found = {grade: np.array([x[grade] for x in ours]) for grade in (*JUDGES, "length") if grade in ours[0]}
    found |= {f"{judge}_wins": win(ours, theirs, judge) for judge in ("closeness", "rouge_l")}
    differ = [abs(len(a["text"].split()) - len(b["text"].split())) for a, b in zip(ours, theirs, strict=True)]
    found["similar"] = (np.array(differ) <= SIMILAR).astype(float)
    found["not_empty"] = np.array([float(x["text"] != "") for x in ours])
    return found | {"similar_wins": np.where(found["similar"], found["closeness_wins"], np.nan)}


def interval(values: np.ndarray, resamples: int = 2_000) -> list[float]:
    """Mean of (seeds, packages), and its 95% interval by a bootstrap over seeds and packages both."""
    random = np.random.default_rng(1)
    means = []
    for _ in range(resamples):
        seeds, packages = (random.integers(0, n, n) for n in values.shape)
        means.append(np.nanmean(values[seeds][:, packages]))
    return [round(float(x), 4) for x in (np.nanmean(values), *np.quantile(means, [0.025, 0.975]))]


def compared(ours: list[list[dict]], theirs: list[dict]) -> dict[str, list[float]]:
    """Each measure of the completions of all seeds, with its interval."""
    by_seed = [measures(one, theirs) for one in ours]
    return {name: interval(np.array([one[name] for one in by_seed])) for name in by_seed[0]}


def make_judged(chain: Chain, kind: str) -> dict:
    """By mode, on the test packages, against the policy before; and greedy synopses of the first packages."""
    names = [kind] if kind in ("base", "sft") else [f"{kind}-seed{seed}" for seed in chain.seeds]
    ours = [completions_of(chain, name) for name in names if (chain.models / name).is_dir() or name == "base"]
    before = completions_of(chain, "base" if kind.startswith(("base", "rules")) else "sft")
    found = {mode: compared([of_mode(one, mode) for one in ours], of_mode(before, mode)) for mode in report.MODES}
    greedy = {x["package"]: x["text"] for x in of_mode(ours[0], "greedy")}
    found["examples"] = [greedy[row["package"]] for row in of_split("test", report.EXAMPLES)]
    return found | {"seeds": len(ours)}


# ---- SFT and the reward model ----------------------------------------------------------------------------------------


def of_split(split: str, limit: int | None = None) -> list[dict]:
    return read_lines(PREPARED / f"{split}.jsonl")[:limit]


def sampled(chain: Chain, name: str, k: int, rows: list[dict]) -> list[dict]:
    """k completions of each row's prompt, by the SFT model."""
    file = chain.folder / f"samples-{name}.jsonl"
    if not file.is_file():
        models.sample(chain.models / "sft", rows, k, file)
    return read_lines(file)


def make_sft(chain: Chain) -> dict:
    out = chain.folder / "sft"
    if not (out / "model.safetensors").is_file():
        models.sft(PREPARED / "base", of_split("sft", chain.sft), out)
    seconds = round(sum(line["seconds"] for line in read_lines(out / "log.jsonl")))
    human = [row["synopsis"] for row in of_split("test", report.EXAMPLES)]
    return {"pairs": chain.sft, "seconds": seconds, "examples": human}


def make_reward(chain: Chain) -> dict:
    """How often the reward model agrees with the annotator on pairs of SFT samples, by margin; and best of n by it."""
    out = chain.folder / "reward"
    if not (out / "model.safetensors").is_file():
        models.reward_model(chain.models / "sft", sampled(chain, "reward", 4, of_split("reward", chain.reward)), out)
    model, tokenizer = models.load(out, kind=transformers.AutoModelForSequenceClassification, num_labels=1)
    rows = sampled(chain, "test", max(report.BEST_OF), of_split("test", chain.ranked))
    scores = models.score_samples(model, rows, tokenizer)
    gold = torch.tensor([row["closeness"] for row in rows]).T
    found = {"agreement": [models.agreement(scores, gold, margin) for margin in MARGINS]}
    found["seconds"] = round(sum(line["seconds"] for line in read_lines(out / "log.jsonl")))
    sft = {x["package"]: x for x in of_mode(completions_of(chain, "sft"), "sampled")}
    return found | {f"best_of_{n}": best_of(n, rows, scores, sft) for n in report.BEST_OF}


def best_of(n: int, rows: list[dict], scores: torch.Tensor, sft: dict[str, dict]) -> dict:
    """The completion with the best of the scores (k, B) among the first n of each package, against the SFT model's."""
    ours = []
    for row, i in zip(rows, scores[:n].argmax(0).tolist(), strict=True):
        grades = {judge: row[judge][i] for judge in ("closeness", "rouge_l")} | {"length": len(row["ids"][i])}
        ours.append({"package": row["package"], "text": row["text"][i].strip()} | grades)
    return compared([ours], [sft[x["package"]] for x in ours])


# ---- RLOO ------------------------------------------------------------------------------------------------------------


def function(name: str) -> str:
    return f"{HERE / ('rules' if name.startswith('keeps') else 'judges')}.py:{name}"


def shared_flags(plain: bool) -> list[str]:
    """plain: for the model as it is; else for that after SFT."""
    flags = {"dataset_name": PREPARED, "response_length": models.T, "dtype": "bfloat16"}
    flags |= {"stop_token": "\n"} if plain else {"temperature": models.TEMPERATURE}
    return [f"--{name}={value}" for name, value in flags.items()]


def training_flags(chain: Chain, name: str) -> list[str]:
    """Of rloo.py, for a kind of report.TITLES with its seed."""
    kind, seed = name.split("-seed")
    by_rules = kind in report.WEIGHTS
    rewards = ["--reward_fns", function("closeness")]
    if by_rules:
        rewards = ["--reward_fns", function("keeps_the_rules"), *rewards[1:], "--reward_weights", *report.WEIGHTS[kind]]
    if kind == "model":  # the annotator's grades are logged only
        rewards += [f"--reward_model_path={chain.models / 'reward'}", "--reward_weights", "1", "0"]
    flags = {"sft_model_path": PREPARED / "base" if by_rules else chain.models / "sft"}
    flags |= report.RULES_FLAGS if by_rules else report.FLAGS
    updates = chain.rules_updates if by_rules else chain.updates
    flags |= {"total_episodes": updates * flags["per_device_train_batch_size"], "seed": seed}
    return [*shared_flags(by_rules), *rewards, *(f"--{flag}={value}" for flag, value in flags.items())]


def train(chain: Chain, name: str) -> Path:
    """Trains a policy into the folder of this name; returns it."""
    out = chain.folder / name
    if not (out / "model.safetensors").is_file():
        more = ["--eval_fns", *map(function, JUDGES), "--num_sample_generations=2", "--log_completions", "--resume"]
        more += [f"--num_eval_prompts={report.WATCHED}", f"--max_prompt_length={report.SHORT}"]
        more += ["--save_steps=50", "--save_total_limit=1", f"--output_dir={out}"]
        run_logged([sys.executable, "rloo.py", *training_flags(chain, name), *more], chain.folder / f"{name}.log")
    for checkpoint in out.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    return out


def agreements(samples: list[dict], k: int, parts: int = 3) -> list[float]:
    """Of the reward model with the annotator, on pairs of the policy's own training samples, in thirds of the run."""
    names = ("reward_model", "closeness")
    groups = [torch.tensor([x["grades"][name] for x in samples]).view(parts, -1, k) for name in names]
    return [round(models.agreement(scores.T, gold.T), 4) for scores, gold in zip(*groups)]


def wins_watched(samples: list[dict]) -> list[list[float]]:
    """Update and wins by closeness of the sampled completions of each evaluation, against those before training."""
    updates = sorted({x["update"] for x in samples})
    found = {u: of_mode([x for x in samples if x["update"] == u], "sampled") for u in updates}
    return [[u, round(float(win(found[u], found[0], "closeness").mean()), 4)] for u in updates]


def make_run(chain: Chain, name: str) -> dict:
    out = train(chain, name)
    metrics, kind = read_lines(out / "metrics.jsonl"), name.split("-")[0]
    command = " ".join(["rloo.py", *training_flags(chain, name)])
    found = {"command": command.replace(f"{HERE}/", "").replace(f"{chain.models}/", "").replace("\n", "$'\\n'")}
    closeness = "objective/scores" if kind == "annotator" else "rewards/closeness/mean"
    found["closeness"] = [round(line[closeness], 3) for line in metrics]
    found["kl"] = [round(line["objective/kl"], 2) for line in metrics]
    found["seconds"] = round(sum(x for line in metrics for part, x in line.items() if part.startswith("time/")))
    found["wins"] = wins_watched(read_lines(out / "completions.jsonl"))
    if kind == "model":
        found["agreement"] = agreements(read_lines(out / "training_completions.jsonl"), report.FLAGS["rloo_k"])
    return found


# ---- All steps -------------------------------------------------------------------------------------------------------


def make(chain: Chain, names: list[str], records: Records):
    """Makes the steps that have no record, or are made again, and the models that they need."""
    for name in [name for name in names if records.needs(name)]:
        print(f"making {name}", flush=True)
        if name in ("sft", "reward"):
            found = make_sft(chain) if name == "sft" else make_reward(chain)
        else:
            judged = name.startswith("judged-")
            found = make_judged(chain, name.removeprefix("judged-")) if judged else make_run(chain, name)
        records.add(name, **found)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="all steps, small, in records of their own")
    parser.add_argument("--names", nargs="+", choices=NAMES + MORE, default=NAMES, metavar="NAME", help="steps")
    parser.add_argument("--again", action="store_true", help="make steps that have a record, compare, write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        folder = folder_of_runs("smollm-quick")
        shutil.rmtree(folder, ignore_errors=True)
        records = Records(folder / "records.json")
        sizes = {"sft": 160, "reward": 48, "updates": 6, "rules_updates": 4, "seeds": (1,), "test": 24, "ranked": 24}
        names = [name for name in NAMES if not name.endswith(("-seed2", "-seed3"))]
        make(Chain(folder, folder, **sizes), names, records)
    else:
        records = Records(report.RECORDS, args.again)
        make(Chain(folder_of_runs("smollm", args.again), folder_of_runs("smollm")), args.names, records)
    if set(NAMES) <= records.all.keys() or args.quick:
        print("\n\n".join(report.tables(records).values()))
    if records.added and not args.quick:
        report.report()


if __name__ == "__main__":
    main()
