"""Tests of lora.py: what it records of a run, and that the page has the table of the records."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lora


def write(folder: Path, rank: int, seed: int, win_rate: float):
    run = folder / f"rank{rank}_seed{seed}"
    for update in (100, 200):
        (run / f"checkpoint-{update}").mkdir(parents=True)
        (run / f"checkpoint-{update}" / "optimizer.pt").write_bytes(b"x" * update * 1000)
    rates = [{"sampled/judge_win_rate": x, "greedy/judge_win_rate": x + 0.1} for x in (0.1, win_rate)]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rates))
    lines = [{"objective/kl": float(update)} for update in range(20)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "model.safetensors").write_text("")


def test_runs_are_recorded_once_and_compared_with_all_weights(tmp_path, monkeypatch):
    """The last evaluation, the KL of the last ten updates, the newest checkpoint."""
    for rank in lora.RANKS:
        for seed in lora.SEEDS:
            write(tmp_path, rank, seed, 0.5 + 0.01 * seed + (0.1 if rank == 8 else 0))
    (tmp_path / "README.md").write_text("a <!-- lora -->\n<!-- end of lora --> b")
    monkeypatch.setattr(lora, "HERE", tmp_path)
    monkeypatch.setattr(lora.study, "run_logged", lambda *args: pytest.fail("it is finished"))
    lora.main(lora.Args(runs=tmp_path))
    records = json.loads((tmp_path / "lora.json").read_text())
    assert records["rank 8, seed 2"] == pytest.approx({"sampled": 62, "greedy": 72, "kl": 14.5, "checkpoint_mb": 0.2})
    page = (tmp_path / "README.md").read_text()
    assert "| all weights | 3 | 52.0 ± 0.6 |  | 62.0 ± 0.6 | 14.5 ± 0.0 | 0.2 |" in page
    assert "| LoRA of rank 8 | 3 | 62.0 ± 0.6 | +10.0 [" in page


def test_the_page_has_the_table_of_the_records():
    records = json.loads((lora.HERE / "lora.json").read_text())
    assert f"<!-- lora -->\n{lora.table(records)}\n<!-- end of lora -->" in (lora.HERE / "README.md").read_text()
