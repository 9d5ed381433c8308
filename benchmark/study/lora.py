"""LoRA against all weights on mini TL;DR, with ten times the learning rate, which is the default.

python benchmark/study/lora.py                  # trains what has no record in lora.json: 3 minutes a run
python benchmark/study/lora.py --report_only    # only writes the table of README.md
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent))

import study

HERE = Path(__file__).resolve().parent
RANKS = (0, 1, 8, 64)  # 0: all weights
SEEDS = (1, 2, 3)


@dataclass
class Args:
    """LoRA against all weights on mini TL;DR"""

    runs: Path = Path("runs/lora")
    """folder of the runs"""
    report_only: bool = False
    """write the table of what has a record, train nothing"""


def record(run: Path) -> dict:
    """What a finished run left: measures on the 500 shipped posts, KL of the last 10 updates, memory, a checkpoint's
    size."""
    after = study.read_lines(run / "evaluations.jsonl")[-1]
    updates = study.read_lines(run / "metrics.jsonl")
    newest = max(run.glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    size = sum(file.stat().st_size for file in newest.iterdir())
    return {
        "sampled": 100 * after["sampled/judge_win_rate"],
        "greedy": 100 * after["greedy/judge_win_rate"],
        "kl": mean(update["objective/kl"] for update in updates[-10:]),
        "checkpoint_mb": size / 1e6,
    }


def table(records: dict[str, dict]) -> str:
    """A row for each rank: means over seeds, and differences from all weights."""
    rows = {rank: [records[name] for name in records if name.startswith(f"rank {rank}, ")] for rank in RANKS}
    rows = {rank: found for rank, found in rows.items() if found}
    found = study.differences({str(rank): [x["sampled"] for x in row] for rank, row in rows.items()}, base="0")
    cells = [
        ["policy", "seeds", "gold win rate, %", "less all weights, points", "greedy, %", "KL, nats", "checkpoint, MB"]
    ]
    for rank, row in rows.items():
        sampled, greedy, kl = (study.plus_minus([x[name] for x in row]) for name in ("sampled", "greedy", "kl"))
        less = study.with_interval(found[str(rank)]) if rank else ""
        name = f"LoRA of rank {rank}" if rank else "all weights"
        cells.append([name, str(len(row)), sampled, less, greedy, kl, f"{mean(x['checkpoint_mb'] for x in row):.1f}"])
    return study.markdown(cells)


def main(args: Args):
    path = HERE / "lora.json"
    records = json.loads(path.read_text()) if path.is_file() else {}
    for seed in () if args.report_only else SEEDS:
        for rank in RANKS:
            name, run = f"rank {rank}, seed {seed}", args.runs / f"rank{rank}_seed{seed}"
            if name in records:
                continue
            if not (run / "model.safetensors").is_file():
                flags = ["--lora_rank", str(rank), "--seed", str(seed), "--output_dir", str(run), "--resume"]
                run.parent.mkdir(parents=True, exist_ok=True)
                study.run_logged([sys.executable, study.ROOT / "rloo.py", *flags], run.with_suffix(".log"))
            records[name] = record(run)
            path.write_text(json.dumps(records, indent=1) + "\n")
    study.insert(HERE / "README.md", {"lora": table(records)})


if __name__ == "__main__":
    main(tyro.cli(Args, description=Args.__doc__))
