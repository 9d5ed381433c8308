"""The table of headline numbers of benchmark/README.md, from the records of all pages.

    python benchmark/study/index.py     # writes it anew

A number is the one of its page; index_test.py compares the table with the records.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parent
sys.path[:0] = [str(HERE), str(TOP / "speed"), str(TOP / "gradient"), str(TOP / "trl")]

import headline  # noqa: E402
import study  # noqa: E402
import throughput  # noqa: E402


def read(path: str) -> dict:
    return json.loads((TOP / path).read_text(encoding="utf-8"))


def speed_rows() -> list[list[str]]:
    """How many times as long an update takes as in group rows, and decoding against vLLM."""
    records, script = read("speed/throughput.json"), "`python benchmark/speed/throughput.py`"
    first, *_ = records.values()

    def times(part: str, ending: str) -> str:
        lanes = throughput.ratios(first["found"][part])
        (rounds,) = (x for name, x in lanes.items() if ending in name)
        return f"{throughput.median(rounds):.2f}"

    updates = [times("whole update", name) for name in ("plain rows", "TRL 0.19.1", "TRL 1.16.0", "vLLM")]
    vllm = [throughput.ratios(x["found"]["decode"]) for x in records.values() if "decode" in x["found"]]
    decoding = sorted(throughput.median(rounds) for lanes in vllm for name, rounds in lanes.items() if "vLLM" in name)
    title = "time of an update: plain rows, TRL's RLOO 0.19.1, 1.16.0, rollouts by vLLM, each over rloo.py's"
    return [
        [title, ", ".join(updates), "", script],
        ["time of decoding: vLLM over rloo.py", f"{decoding[0]:.2f} to {decoding[-1]:.2f}", "", script],
    ]


def trl_rows() -> list[list[str]]:
    script = "`python benchmark/trl/trl_parity.py"
    differences = [line["difference"] for line in read("trl/golden.json")["table"] if not line["why"]]
    found = read("trl/train.json")["found"]
    seconds = {name: sum(run["cpu_seconds"] for run in runs) for name, runs in found.items() if name != "before"}
    ratios = [f"{seconds[name] / seconds['rloo.py']:.1f}" for name in ("TRL 0.19.1", "TRL 1.16.0")]
    largest = f"{max(differences):.1e}".replace("e-0", "e-")
    title = f"largest difference of a weight from TRL's after 3 updates, {len(differences)} settings"
    trained = "CPU time of training: TRL's RLOO 0.19.1, 1.16.0, each over rloo.py's"
    return [
        [title, largest, "", f"{script} same`"],
        [trained, ", ".join(ratios), "3", f"{script} train`"],
    ]


def gradient_rows() -> list[list[str]]:
    biases = [row["found"]["rloo (the defaults)"][0] for row in read("gradient/exact.json")["options"]]
    title = f"bias of RLOO's gradient, the largest of {len(biases)} cases"
    return [[title, f"{max(biases):.0e}", "", "`python benchmark/gradient/exact.py`"]]


def table() -> str:
    """Numbers of mini TL;DR, then those of the trainers."""
    ours = [[f"mini TL;DR: {title}", *rest] for title, *rest in headline.rows()]
    return study.markdown(
        [["result", "number", "seeds", "command"], *ours, *trl_rows(), *speed_rows(), *gradient_rows()]
    )


if __name__ == "__main__":
    study.insert(TOP / "README.md", {"headline": table()})
