"""LoRA against all weights on mini TL;DR, with ten times the learning rate, which is the default.

python benchmark/study/lora.py                  # trains what has no record in lora.json: 3 minutes a run
python benchmark/study/lora.py --report_only    # only writes the table of README.md
"""

import sys
from pathlib import Path
from statistics import mean

import study
import tyro

RANKS = (0, 1, 8, 64)  # 0: all weights
SEEDS = (1, 2, 3)


def record(run: Path) -> dict:
    """What a finished run left: measures on the 500 shipped posts, KL of the last 10 updates, a checkpoint's size."""
    after = study.read_lines(run / "evaluations.jsonl")[-1]
    updates = study.read_lines(run / "metrics.jsonl")
    newest = max(run.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    return {
        "sampled": 100 * after["sampled/judge_win_rate"],
        "greedy": 100 * after["greedy/judge_win_rate"],
        "kl": mean(update["objective/kl"] for update in updates[-10:]),
        "checkpoint_mb": sum(file.stat().st_size for file in newest.iterdir()) / 1e6,
    }


def wins(records: study.Records) -> dict[str, list[float]]:
    """Rank -> its gold win rates in points, one for each seed."""
    found = {str(rank): [records.value(f"rank {rank}, seed {seed}", "sampled") for seed in SEEDS] for rank in RANKS}
    return {rank: [x for x in row if x is not None] for rank, row in found.items() if any(row)}


def table(records: study.Records) -> str:
    """A row for each rank: means over seeds, and differences from all weights."""
    sampled = wins(records)
    apart = study.differences(sampled, base="0")
    head = ["policy", "seeds", "gold win rate, %", "minus all weights, points", "greedy, %", "KL, nats"]
    rows = [[*head, "checkpoint, MB"]]
    for rank, row in sampled.items():
        found = [record for name, record in records.all.items() if name.startswith(f"rank {rank},")]
        greedy, kl = (study.plus_minus([x[name] for x in found]) for name in ("greedy", "kl"))
        minus = study.with_interval(apart[rank]) if rank in apart else ""
        name = f"LoRA of rank {rank}" if rank in apart else "all weights"
        size = f"{mean(x['checkpoint_mb'] for x in found):.1f}"
        rows.append([name, str(len(row)), study.plus_minus(row), minus, greedy, kl, size])
    return study.markdown(rows)


def main(runs: Path = Path("runs/lora"), report_only: bool = False):
    """LoRA against all weights on mini TL;DR.

    Args:
        runs: folder of the runs
        report_only: write the table of what has a record, train nothing
    """
    records = study.Records(study.HERE / "lora.json")
    for seed in () if report_only else SEEDS:
        for rank in RANKS:
            name, run = f"rank {rank}, seed {seed}", runs / f"rank{rank}_seed{seed}"
            if name in records.all:
                continue
            if not (run / "model.safetensors").is_file():
                flags = ["--lora_rank", str(rank), "--seed", str(seed), "--output_dir", str(run), "--resume"]
                run.parent.mkdir(parents=True, exist_ok=True)
                study.run_logged([sys.executable, study.ROOT / "rloo.py", *flags], run.with_suffix(".log"))
            records.add(name, **record(run))
    study.insert(study.HERE / "README.md", {"lora": table(records)})


if __name__ == "__main__":
    tyro.cli(main)
