"""The small steps of tldr.sh: prepare the data, best of n by the reward model, estimate the cost, make the table.

python benchmark/tldr/tldr_steps.py prepare --help        (best_of, estimate, table)
"""

import json
import math
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for rloo.py

from judge import (
    Mistake,
    Text,
    aligned,
    mistakes_in_a_line,
    model_scores,
    order_of,
    parse,
    require,
    require_new,
    write_whole,
)


@dataclass
class Prepare:
    """Writes a dataset as a folder of <split>.jsonl whose rows have `prompt` and `completion`, both text."""

    dataset_name: str  # .jsonl file, folder of <split>.jsonl, or Hub id (pip install datasets)
    splits: tuple[str, ...]  # splits to write
    output: str  # folder; never overwritten


@dataclass
class BestOf:
    """Picks, from each post's samples, the one that the reward model scores highest."""

    completions: str  # a file of complete.py with several samples of each post
    reward_model_path: str  # sequence classifier with one label
    output: str  # .jsonl file; never overwritten
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the reward model
    device: str | None = None  # device of the reward model; if not given, cuda if there is one
    batch_size: int = 32  # completions per forward pass


@dataclass
class Estimate:
    """Estimates hours and memory of a run on one H100 by counting; parameters are in millions."""

    body: float  # N: parameters of the policy's layers
    head: float  # H: parameters of its output embedding, vocabulary x width
    layers: int  # layers of the policy
    width: int  # width of the policy
    reward_body: float  # parameters of the reward model's layers
    rloo_k: int  # k
    total_episodes: int  # completions in the run
    num_ppo_epochs: int  # passes over the completions
    num_mini_batches: int  # optimizer steps per pass
    local_rollout_forward_batch_size: int  # completions that are sampled together
    prompt_length: int = 350  # P: tokens of a prompt; an assumption
    response_length: int = 53  # R: tokens of a completion; an upper bound
    utilisation: float = 0.35  # part of 989 TFLOP/s (bfloat16, dense) that is reached; an assumption
    bandwidth: float = 0.5  # part of 3.35 TB/s that decoding reaches; an assumption


@dataclass
class Table:
    """The table of win rates of one run of tldr.sh, or the mean over the runs of several seeds."""

    runs: tuple[str, ...]  # output folders of tldr.sh
    output: str  # .txt file; all numbers go to the .json file beside it


# ---- Data ------------------------------------------------------------------------------------------------------------


def plain_row(row: dict) -> dict:
    """A row with `prompt` and `completion` (with one space in front), taken from these or from `messages`."""
    messages = row.get("messages") or []
    prompt, completion = row.get("prompt"), row.get("completion")
    if prompt is None:
        prompt = next(message["content"] for message in messages if message["role"] == "user")
    if completion is None:
        completion = next(message["content"] for message in messages if message["role"] == "assistant")
    rest = {name: value for name, value in row.items() if name not in ("prompt", "messages", "completion")}
    return {"prompt": str.__str__(prompt), "completion": " " + completion.strip()} | rest


def prepare(args: Prepare):
    import rloo

    output, unfinished = Path(args.output), Path(f"{args.output}.unfinished")
    require(not output.exists(), f"--output {output}: is there; nothing is overwritten")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for split in args.splits:
        rows = rloo.load_rows(args.dataset_name, split)
        require(rows, f"--dataset_name {args.dataset_name}: has no split {split}, or nothing in it")
        try:
            lines = [json.dumps(plain_row(row)) + "\n" for row in rows]
        except (KeyError, TypeError, AttributeError, StopIteration) as error:
            raise Mistake(
                f"{args.dataset_name}, {split}: rows need `prompt` and `completion`, or `messages` of user "
                f"and assistant; they have {', '.join(sorted(rows[0]))} ({type(error).__name__})"
            ) from error
        (unfinished / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{split}: {len(rows):,} rows")
    unfinished.replace(output)


# ---- Best of n -------------------------------------------------------------------------------------------------------


def best_of(args: BestOf):
    require_new(args.output, ".jsonl")
    lines = Path(args.completions).read_text(encoding="utf-8").split("\n")
    rows = [json.loads(line) for line in lines if line]
    texts = [Text(row["prompt"], row["completion"], row["ended"], {}) for row in rows]
    scores = model_scores(args.reward_model_path, texts, args.dtype, args.device, args.batch_size)
    best: dict[int, dict] = {}
    for row, score in zip(rows, scores):
        chosen = row | {"sample": 0, "chosen": row["sample"], "score": score}
        if row["post"] not in best or score > best[row["post"]]["score"]:
            best[row["post"]] = chosen
    write_whole(args.output, "".join(json.dumps(row) + "\n" for row in best.values()))


# ---- What a run costs ------------------------------------------------------------------------------------------------


def counted(args: Estimate) -> dict[str, float]:
    """Hours of each part of a run.

    A forward pass costs 2 FLOPs per parameter and token, a backward pass twice as many. Attention (less than a tenth at
    these lengths), evaluations and checkpoints are left out. A prompt and its k completions are one row of P + k·R
    tokens. Logits are computed for the k·R tokens of completions only; in training once forward and once more in the
    backward pass. Decoding is limited by memory: each step reads all weights (2 bytes each) once per batch, and the
    keys and values."""
    N, H, M = 1e6 * args.body, 1e6 * args.head, 1e6 * args.reward_body
    P, k, R = args.prompt_length, args.rloo_k, args.response_length
    groups, row, answers = args.total_episodes / k, P + k * R, k * R
    flops = {
        "prompts": 2 * N * P,
        "reference": 2 * N * row + 2 * H * answers,
        "reward model": 2 * M * row,
        "old log-probs": (2 * N * row + 2 * H * answers) * (args.num_mini_batches > 1),
        "training": args.num_ppo_epochs * (6 * N * row + 8 * H * answers),
    }
    hours = {part: groups * count / (args.utilisation * 989e12) / 3600 for part, count in flops.items()}
    steps = R * args.total_episodes / args.local_rollout_forward_batch_size
    cache = 2 * 2 * args.layers * args.width * (P + answers / 2)  # bytes of a group: keys and values, bfloat16
    read = 2 * (N + H) + cache * args.local_rollout_forward_batch_size / k
    return hours | {"decoding": steps * read / (args.bandwidth * 3.35e12) / 3600}


def estimate(args: Estimate):
    hours = counted(args)
    policy, reward = args.body + 2 * args.head, args.reward_body + args.head  # embeddings in and out; millions
    weights = (16 * policy + 2 * policy + 2 * policy + 2 * reward) / 1000  # and a copy to sample by, reference, reward
    print(
        f"ESTIMATE for one H100, counted and not measured: {sum(hours.values()):.2f} hours of updates ("
        + ", ".join(f"{part} {x:.2f}" for part, x in hours.items() if x)
        + ")\n"
        f"  assumed: prompts of {args.prompt_length} tokens, all {args.response_length} of a completion, "
        f"{args.utilisation:.0%} of 989 TFLOP/s, {args.bandwidth:.0%} of 3.35 TB/s while decoding;\n"
        "  evaluations, checkpoints, completing and judging come on top; formula: `counted` in tldr_steps.py\n"
        f"  memory: {weights:.0f} GB of weights, gradients and AdamW's state (policy 16 + 2 bytes per parameter, "
        "reference and reward\n  model 2), and activations, keys and values beside them"
    )


# ---- The table -------------------------------------------------------------------------------------------------------

JUDGES = {"gold": "gold", "reward": "reward model"}  # name of the file: in words
ROWS = {"SFT": ("sft-greedy", "sft-samples"), "best of 4": (None, "best-of-4"), "RLOO": ("rloo-greedy", "rloo-sampled")}


def read_run(folder: Path) -> dict:
    """The command of a run of tldr.sh, both judges' results, KL and hours."""
    metrics = [json.loads(line) for line in (folder / "policy" / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(value for line in metrics for name, value in line.items() if name.startswith("time/"))
    samples = json.loads((folder / "sft-samples.jsonl").open().readline())
    return {
        "command": (folder / "settings").read_text().strip(),
        "temperature": samples["temperature"],
        "kl": metrics[-1].get("objective/kl", 0.0),
        "update": metrics[-1]["episode"] // metrics[-1]["update"],  # completions
        "hours": seconds / 3600,
        **{name: json.loads((folder / f"{name}.json").read_text()) for name in JUDGES},
    }


def spread(values: list[float], digits: int) -> str:
    """Mean and, of several values, standard deviation."""
    mean = statistics.fmean(values)
    return f"{mean:.{digits}f}" + (f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else "")


def table(args: Table):
    require(args.output.endswith(".txt"), f"--output {args.output}: must end in .txt")
    runs = [read_run(Path(folder)) for folder in args.runs]
    first = runs[0]

    def cell(judge: str, name: str | None) -> str:
        found = [run[judge]["results"][name] for run in runs] if name else []
        if not found or any(count["win_rate"] is None for count in found):
            return "-"
        text = spread([100 * count["win_rate"] for count in found], 1)
        low, high = found[0]["interval"]
        return text if len(runs) > 1 else f"{text} ± {50 * (high - low):.1f}"

    kl = {"SFT": "0", "best of 4": f"≤ {math.log(4) - 3 / 4:.2f}", "RLOO": spread([run["kl"] for run in runs], 2)}
    hours = {"SFT": "0", "best of 4": "0", "RLOO": spread([run["hours"] for run in runs], 2)}
    lines = [
        (
            "win rate, %",
            *(f"{title}, {way}" for title in JUDGES.values() for way in ("greedy", f"T = {first['temperature']}")),
            "KL, nats",
            "hours of training",
        )
    ]
    for row, names in ROWS.items():
        lines.append((row, *(cell(judge, name) for judge in JUDGES for name in names), kl[row], hours[row]))
    text = "\n".join(aligned(lines)) + "\n"
    for judge, title in JUDGES.items():
        counts = [count for run in runs for count in run[judge]["results"].values()]
        text += (
            f"{title}: {first[judge]['judge']}; {order_of(first[judge])}; {counts[0]['posts']} posts; "
            f"{sum(count['unparsable'] for count in counts)} answers without a verdict\n"
        )
    error = (
        "half of Wilson's 95% interval, which covers the choice of posts, not the seed"
        if len(runs) == 1
        else f"standard deviation over {len(runs)} seeds"
    )
    text += f"""\
Win rates are against the references, ties count half.
±: {error}.
best of 4: of the SFT model's samples the one that the reward model scores highest.
KL from the SFT model per completion: of RLOO over the {first["update"]:,} completions of the last update, of best of n
at most log n - (n - 1) / n. Hours: of the updates, without evaluations.
"""
    write_whole(args.output.removesuffix(".txt") + ".json", json.dumps(runs, indent=1) + "\n")
    write_whole(args.output, text)


if __name__ == "__main__":
    with mistakes_in_a_line():
        flags = parse(Prepare | BestOf | Estimate | Table)
        {Prepare: prepare, BestOf: best_of, Estimate: estimate, Table: table}[type(flags)](flags)
