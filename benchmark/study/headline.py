"""The tables of headline numbers of benchmark/README.md, from the records of all pages: one number for one thing.

    python benchmark/study/headline.py     # writes them anew

The win rate of rloo.py's default is that of seeds 7 to 16 on the second set of 5,000 fresh test posts: neither was used
for any choice. A page that repeats a number here is tested against it.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parent
sys.path[:0] = [str(HERE), str(TOP / "speed")]

import compare  # noqa: E402
import reach  # noqa: E402
import study  # noqa: E402
import throughput  # noqa: E402


def numbers() -> dict[str, tuple[str, int]]:
    """Of the study: name -> the number as pages write it, and its seeds, 0 where nothing is trained. Win rates are
    gold, in %, of one sample at T = 0.7 where nothing else is said."""
    plan, found = reach.Plan(), {}
    ours = reach.Reach(plan, study.ROOT / "runs" / "reach", HERE / "reach.json")

    def add(name: str, values: list[float], seeds: int | None = None, decimals: int = 1):
        found[name] = study.plus_minus(values, 1, decimals), len(values) if seeds is None else seeds

    def percent(names: list[str], part: str, mode: str = "sampled") -> list[float]:
        return [100 * value for value in ours.records.means(names, part, "win", mode)]

    for mode, end in (("sampled", ""), ("greedy", ", greedy")):
        add(f"SFT{end}", percent(["sft"], "test", mode), seeds=0)
        names = ours.names(ours.of(plan.episodes), plan.default_seeds)
        add(f"default{end}", percent(names, "second_test", mode))
    longest = ours.names(ours.of(plan.longest_episodes, plan.long_beta), plan.longest_seeds)
    add("100,000 episodes", percent(longest, "test"))
    for beta in plan.betas:
        names = ours.names(ours.of(plan.long_episodes, beta), plan.long_seeds)
        add(f"25,600 episodes, β = {beta:g}", percent(names, "test"))
    for n, values in ours.records.value("sft", "best_of_n", "by_n").items():
        add(f"best of {n}", [100 * values["win"]["mean"]], seeds=0)

    peers = compare.Comparison("peers", study.ROOT / "runs" / "peers", HERE / "peers.json")
    compared = peers.differences()
    for name, values in peers.wins().items():
        title = peers.rows[name].title
        add(title, values)
        found[f"{title}: CPU seconds"] = f"{peers.seconds(peers.rows[name]):.0f}", len(values)
        if name in compared:
            x = compared[name]
            found[f"{title} less RLOO"] = f"{study.with_interval(x)}, p = {x.holm:.2g}: {x.verdict}", len(values)
    return found


def study_rows() -> list[list[str]]:
    """Result, number, seeds, command."""
    found = numbers()
    texts, seeds = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
    betas = [f"25,600 episodes, β = {beta}" for beta in (0, 0.02, 0.05)]
    bests = ["best of 4", "best of 16", "best of 64"]
    seconds = f"{texts['PPO (TRL): CPU seconds']} and {texts['RLOO, k = 4: CPU seconds']}"
    default, peers = "`python benchmark/study/reach.py --stages default`", "`python benchmark/study/compare.py peers`"
    ppo = "TRL's PPO, whose value model begins as the reward model,"
    long, best_of_n = default.replace("default", "long"), default.replace("default", "best_of_n")

    def row(title: str, text: str, name: str, command: str) -> list[str]:
        return [title, text, str(seeds[name] or ""), command]

    return [
        row("gold win rate of the default, one sample, %", f"{texts['SFT']} → {texts['default']}", "default", default),
        row("greedy, %", f"{texts['SFT, greedy']} → {texts['default, greedy']}", "default, greedy", default),
        row("25,600 episodes with β = 0, 0.02, 0.05, %", ", ".join(texts[x] for x in betas), betas[-1], long),
        row("100,000 episodes with β = 0.05, %", texts["100,000 episodes"], "100,000 episodes", long),
        row("best of 4, 16, 64 before training, %", ", ".join(texts[x] for x in bests), bests[0], best_of_n),
        row("TRL's GRPO less RLOO, points", texts["GRPO (TRL) less RLOO"], "GRPO (TRL)", peers),
        row(f"{ppo} less RLOO, points", texts["PPO (TRL) less RLOO"], "PPO (TRL)", peers),
        row("CPU seconds of TRL's PPO and of RLOO", seconds, "PPO (TRL)", peers),
    ]


def read(path: str) -> dict:
    return json.loads((TOP / path).read_text(encoding="utf-8"))


def trainer_rows() -> list[list[str]]:
    """The same of speed, TRL and gradients."""
    same, train = (f"`python benchmark/trl/trl_parity.py {part}`" for part in ("same", "train"))
    speed, exact = "`python benchmark/speed/throughput.py`", "`python benchmark/gradient/exact.py`"
    runs = read("trl/train.json")["found"]
    seconds = {name: sum(run["cpu_seconds"] for run in runs[name]) for name in ("rloo.py", "TRL 0.19.1", "TRL 1.16.0")}
    ratios = [f"{x / seconds['rloo.py']:.1f}" for name, x in seconds.items() if name != "rloo.py"]
    records = read("speed/throughput.json")
    first, *_ = records.values()

    def update(ending: str) -> str:
        lanes = throughput.ratios(first["found"]["whole update"])
        (rounds,) = (x for name, x in lanes.items() if ending in name)
        return f"{throughput.median(rounds):.2f}"

    vllm = [throughput.ratios(x["found"]["decode"]) for x in records.values()]
    decoding = sorted(throughput.median(rounds) for lanes in vllm for name, rounds in lanes.items() if "vLLM" in name)
    differences = [line["difference"] for line in read("trl/golden.json")["table"] if not line["why"]]
    largest = f"{max(differences):.1e}".replace("e-0", "e-")
    biases = [row["found"]["rloo (the defaults)"][0] for row in read("gradient/exact.json")["options"]]
    trl, times = "TRL's RLOO 0.19.1, 1.16.0 over rloo.py", f"{update('0.19.1')}, {update('1.16.0')}"
    return [
        [f"{trl}: CPU time of training on mini TL;DR", ", ".join(ratios), train],
        [f"{trl}: time of an update at TL;DR's lengths", times, speed],
        ["plain rows, rollouts by vLLM over group rows: the same", f"{update('plain rows')}, {update('vLLM')}", speed],
        ["vLLM over rloo.py: time of decoding", f"{decoding[0]:.2f} to {decoding[-1]:.2f}", speed],
        [f"weights after 3 updates: largest difference from TRL's, {len(differences)} settings", largest, same],
        [f"bias of RLOO's gradient: largest of {len(biases)} cases", f"{max(biases):.0e}", exact],
    ]


def tables() -> dict[str, str]:
    ours = study.markdown([["on mini TL;DR", "number", "seeds", "command"], *study_rows()])
    return {"headline": ours, "trainers": study.markdown([["of the trainers", "number", "command"], *trainer_rows()])}


if __name__ == "__main__":
    study.insert(TOP / "README.md", tables())
