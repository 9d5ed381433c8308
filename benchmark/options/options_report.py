"""Tables and pictures from the runs of run_options.sh: what the options of rloo.py do on the embedded task.

    python benchmark/options/options_report.py                        # from runs/options, into benchmark/options
    python benchmark/options/options_report.py --runs runs/options-quick --output_dir runs/options-quick/results
    python benchmark/options/options_report.py --redraw               # only the pictures, from results.json

It reads metrics.jsonl and completions.jsonl of every complete run and names the missing runs, so it can be used while
run_options.sh is running.

± is the standard error of the mean over seeds, std / √seeds. A difference from the default compares the same seeds on
the same posts. Its 95% interval is a paired bootstrap: seeds and posts are drawn again with replacement, both together,
and the quantiles of the mean difference are taken. The interval is rather too wide than too narrow: where the seeds
hardly differ, fewer than 1 in 20 intervals miss 0 by chance. "better" and "worse" mean that 0 lies outside.
"""

import json
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro

MINI_TLDR = Path(__file__).resolve().parents[1] / "mini_tldr"
DEFAULT = "rloo"  # the run that all are compared with
DEFAULT_KL_COEF = 0.05  # rloo.py's default for the embedded task
# name -> column of completions.jsonl, mode, title, factor and decimals in tables. The first two have words on them.
MEASURES = {
    "win_rate": ("judge_win_rate", "sampled", "gold win rate, %", 100, 1),
    "gold_score": ("judge_score", "sampled", "gold score", 1, 2),
    "greedy_win_rate": ("judge_win_rate", "greedy", "gold win rate, greedy, %", 100, 1),
    "greedy_gold_score": ("judge_score", "greedy", "gold score, greedy", 1, 2),
    "score": ("score", "sampled", "reward model's score", 1, 2),
    "length": ("length", "sampled", "tokens", 1, 1),
}
IRRELEVANT = {"seed", "output_dir", "resume", "exp_name", "num_sample_generations"}  # flags that change no result


@dataclass
class Args:
    """Tables and pictures from the runs of run_options.sh."""

    runs: str = "runs/options"
    """folder of the runs"""
    output_dir: str = "benchmark/options"
    """where tables.md, results.json and the pictures go"""
    bootstrap: int = 10_000
    """number of draws for an interval"""
    window: int = 5
    """number of rollouts over which the KL at an evaluation is averaged"""
    seed: int = 1
    """seed of the bootstrap"""
    redraw: bool = False
    """only draw the pictures, from output_dir's results.json"""


@dataclass
class Run:
    """One complete run."""

    flags: dict
    """as args.json has them"""
    metrics: list[dict]
    """one for each update"""
    evaluations: dict[tuple[int, str], dict[str, np.ndarray]]
    """(update, mode) -> column -> its value for each held-out post"""
    posts: list[str]
    """the held-out posts, in the order of those values"""


@dataclass
class Setting:
    """The runs of one line of the table."""

    group: str
    runs: dict[int, Run] = field(default_factory=dict)
    """seed -> run"""
    missing: list[int] = field(default_factory=list)
    """seeds whose run is not complete"""
    command: str = ""
    """of its first seed"""


def fail(message: str):
    sys.exit(f"options_report.py: {message}")


# ---- Reading ---------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_run(folder: Path) -> Run | None:
    """The run in a folder, or None where it is not complete."""
    try:
        flags = json.loads((folder / "args.json").read_text(encoding="utf-8"))
        metrics, samples = read_lines(folder / "metrics.jsonl"), read_lines(folder / "completions.jsonl")
    except (OSError, ValueError):  # not begun, or in the middle of a line
        return None
    if not metrics or "eval/sampled/score" not in metrics[-1] or metrics[-1]["episode"] < flags["total_episodes"]:
        return None
    columns: dict[tuple[int, str], dict[str, list]] = {}
    for sample in samples:
        found = columns.setdefault((sample["update"], sample["mode"]), {})
        for name in ("prompt", *dict.fromkeys(measure[0] for measure in MEASURES.values())):
            found.setdefault(name, []).append(sample[name])
    posts = columns[0, "sampled"]["prompt"]
    evaluations = {
        key: {name: np.array(values, float) for name, values in found.items() if name != "prompt"}
        for key, found in columns.items()
    }
    return Run(flags, metrics, evaluations, posts)


def read_runs(folder: Path) -> dict[str, Setting]:
    """name -> setting, group by group, in the order of run_options.sh's plan.tsv: group, name, seed, command."""
    if not (folder / "plan.tsv").is_file():
        fail(f"--runs {folder}: has no plan.tsv; `bash benchmark/options/run_options.sh` makes the runs")
    settings: dict[str, Setting] = {}
    for line in (folder / "plan.tsv").read_text(encoding="utf-8").splitlines():
        group, name, seed, command = line.split("\t")
        setting = settings.setdefault(name, Setting(group, command=" ".join(command.split())))
        run = read_run(folder / f"{name}__{seed}")
        if run is None:
            setting.missing.append(int(seed))
        else:
            setting.runs[int(seed)] = run
    if not settings.get(DEFAULT, Setting("")).runs:
        fail(f"--runs {folder}: no run of {DEFAULT} is complete yet, and everything is compared with it")
    first = next(iter(settings[DEFAULT].runs.values()))
    for name, setting in settings.items():
        for seed, run in setting.runs.items():
            if run.posts != first.posts:
                fail(f"{folder}/{name}__{seed}: was evaluated on other posts than the first run of {DEFAULT}")
            if changed(run, next(iter(setting.runs.values()))):
                fail(f"{folder}/{name}__{seed}: has other flags than {name}'s first seed")
    groups = list(dict.fromkeys(setting.group for setting in settings.values()))
    return dict(sorted(settings.items(), key=lambda item: groups.index(item[1].group)))


def changed(run: Run, other: Run) -> dict[str, object]:
    """The flags of a run, as far as they change its results, that differ from those of another."""
    return {
        name: value for name, value in run.flags.items() if name not in IRRELEVANT and value != other.flags.get(name)
    }


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def mean_and_error(values) -> tuple[float, float]:
    """Mean and standard error, std / √n, of numbers; the error of a single one is NaN."""
    values = np.asarray(values, float)
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def bootstrap_interval(differences: np.ndarray, times: int, seed: int) -> tuple[float, float]:
    """The 2.5% and 97.5% quantiles of the mean of `differences` (seeds, posts) when seeds and posts are drawn again."""
    random, (seeds, posts) = np.random.default_rng(seed), differences.shape
    seed_weights = random.multinomial(seeds, [1 / seeds] * seeds, size=times) / seeds
    post_weights = random.multinomial(posts, [1 / posts] * posts, size=times) / posts
    means = ((seed_weights @ differences) * post_weights).sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def last_update(run: Run) -> int:
    return max(update for update, _ in run.evaluations)


def kl_at(run: Run, update: int, window: int) -> float:
    """KL from the reference after `update` updates: the mean over the `window` nearest rollouts.

    Line u + 1 of metrics.jsonl has the KL of the policy after u updates, which samples in update u + 1. Before
    training it is 0; after the last update it is that of the last rollouts, when the learning rate is near 0."""
    if update == 0:
        return 0.0
    kl = [line["objective/kl"] for line in run.metrics]
    begin = min(max(update - window // 2, 0), len(kl) - window)
    return float(np.mean(kl[max(begin, 0) : begin + window]))


def compare(setting: Setting, default: Setting, args: Args, update: int | None = None) -> dict[str, dict]:
    """measure -> what the table says of it: seeds, mean, its error, each seed's value, and, where seeds are shared
    with another setting, difference, its interval and verdict. update: 0 for before training; None: after it."""
    found = {}
    for measure, (column, mode, *_) in MEASURES.items():
        grades = {
            seed: run.evaluations[last_update(run) if update is None else update, mode][column]
            for seed, run in setting.runs.items()
        }
        values = {seed: float(grade.mean()) for seed, grade in grades.items()}
        mean, error = mean_and_error(list(values.values()))
        found[measure] = {"mean": mean, "stderr": error, "per_seed": values}
        shared = [seed for seed in grades if seed in default.runs]
        if setting is not default and shared:
            theirs = [default.runs[seed].evaluations[last_update(default.runs[seed]), mode][column] for seed in shared]
            differences = np.stack([grades[seed] for seed in shared]) - np.stack(theirs)
            low, high = bootstrap_interval(differences, args.bootstrap, args.seed)
            verdict = "better" if low > 0 else "worse" if high < 0 else "not told apart"
            found[measure] |= {
                "difference": float(differences.mean()),
                "low": low,
                "high": high,
                "verdict": verdict,
                "seeds_compared": len(shared),
            }
    kl = {
        seed: kl_at(run, last_update(run) if update is None else update, args.window)
        for seed, run in setting.runs.items()
    }
    mean, error = mean_and_error(list(kl.values()))
    return found | {"kl": {"mean": mean, "stderr": error, "per_seed": kl}}


def along_the_way(setting: Setting, args: Args) -> list[dict]:
    """For each evaluation: update, episode, and for each measure and the KL the mean over seeds and its error."""
    runs, found = list(setting.runs.values()), []
    for update in sorted({update for run in runs for update, mode in run.evaluations if mode == "sampled"}):
        having = [run for run in runs if (update, "sampled") in run.evaluations]
        values = {
            measure: [run.evaluations[update, "sampled"][column].mean() for run in having]
            for measure, (column, mode, *_) in MEASURES.items()
            if mode == "sampled"
        }
        values["kl"] = [kl_at(run, update, args.window) for run in having]
        episode = having[0].metrics[update - 1]["episode"] if update else 0
        found.append(
            {"update": update, "episode": episode, "seeds": len(having)}
            | {name: mean_and_error(x) for name, x in values.items()}
        )
    return found


# ---- Words and tables ------------------------------------------------------------------------------------------------


def number(entry: dict, factor: float = 1, decimals: int = 2) -> str:
    """mean ± standard error"""
    error = "" if math.isnan(entry["stderr"]) else f" ± {factor * entry['stderr']:.{decimals}f}"
    return f"{factor * entry['mean']:.{decimals}f}{error}"


def difference(entry: dict, factor: float, decimals: int) -> str:
    """difference [interval], with a star where 0 lies outside"""
    if "difference" not in entry:
        return ""
    middle, low, high = (f"{factor * entry[name]:+.{decimals}f}" for name in ("difference", "low", "high"))
    return f"{middle} [{low}, {high}]" + " *" * (entry["verdict"] != "not told apart")


def cells(name: str, flags: str, seeds: int, found: dict[str, dict], measures: list[str]) -> list[str]:
    """A line of a table: name, flags, seeds, and for each of the measures its mean and its difference."""
    line = [name, flags, str(seeds)]
    for measure in measures:
        *_, factor, decimals = MEASURES[measure]
        line += [number(found[measure], factor, decimals), difference(found[measure], factor, decimals)]
    return line


def plain(rows: list[list[str]]) -> str:
    """Rows, the first one being the head, in columns as wide as they need."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def markdown(rows: list[list[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def as_flags(flags: dict[str, object]) -> str:
    """Flags as a command line has them."""
    return " ".join(
        f"--{name}" if value is True else f"--no_{name}" if value is False else f"--{name} {value}"
        for name, value in flags.items()
    )


def tables(results: dict[str, dict]) -> list[list[list[str]]]:
    """Two tables, of completions sampled and of what else there is: rows of cells, the first one being the head."""
    found = []
    for measures, extra in [(["win_rate", "gold_score"], []), (["greedy_win_rate", "score"], ["kl", "length"])]:
        titles = [[MEASURES[measure][2], "difference"] for measure in measures]
        head = ["", "flags", "seeds", *sum(titles, []), *("KL, nats" if name == "kl" else "tokens" for name in extra)]
        rows = [head]
        for name, result in results.items():
            row = cells(name, result["flags"], result["seeds"], result["found"], measures)
            rows.append(row + [number(result["found"][measure], 1, 2 if measure == "kl" else 1) for measure in extra])
        found.append(rows)
    return found


def words(results: dict[str, dict]) -> list[str]:
    """Which settings are better, worse, or not told apart from the default, for the two measures of sampled text."""
    lines = []
    for measure in ("win_rate", "gold_score"):
        *_, title, factor, decimals = MEASURES[measure]
        verdicts: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": []}
        widths = []
        for name, result in results.items():
            entry = result["found"][measure]
            if "verdict" in entry and name != "before":
                verdicts[entry["verdict"]].append(name)
                widths.append((entry["high"] - entry["low"]) / 2)
        if widths:
            spread = f"{factor * min(widths):.{decimals}f} to {factor * max(widths):.{decimals}f}"
            parts = "; ".join(f"{verdict}: {', '.join(names) or 'none'}" for verdict, names in verdicts.items())
            lines.append(f"{title}, against {DEFAULT}: {parts}. (Half an interval: {spread}.)")
    return lines


def overoptimisation(results: dict[str, dict]) -> list[str]:
    """For each weight of the KL: what the reward model's score and the gold score do while the KL grows."""
    lines = []
    for name, result in results.items():
        along = result["along"]
        if name == DEFAULT or result["group"] == "kl_coef":
            best, last = max(along, key=lambda point: point["gold_score"][0]), along[-1]
            lines.append(
                f"{name}: KL {last['kl'][0]:.1f} nats, reward model's score {along[0]['score'][0]:.2f} -> "
                f"{last['score'][0]:.2f}, gold score {along[0]['gold_score'][0]:.2f} -> "
                f"{last['gold_score'][0]:.2f} (highest {best['gold_score'][0]:.2f}, after "
                f"{best['episode']:,} episodes)"
            )
    return ["Over-optimisation is a gold score that falls while the reward model's rises. " + "; ".join(lines) + "."]


def missing(settings: dict[str, Setting]) -> str:
    """What is not there yet, or nothing."""
    parts = [f"{name} {', '.join(map(str, setting.missing))}" for name, setting in settings.items() if setting.missing]
    return "not there yet (seeds): " + "; ".join(parts) if parts else ""


def summarize(settings: dict[str, Setting], args: Args) -> dict[str, dict]:
    """name -> its line: group, command, flags, seeds, found (see compare), along (see along_the_way).

    The first line is the default before training; it has no command of its own."""
    default = settings[DEFAULT]
    first = next(iter(default.runs.values()))
    results = {
        "before": {
            "group": "",
            "command": default.command,
            "flags": "",
            "seeds": len(default.runs),
            "found": compare(Setting("", default.runs), default, args, update=0),
            "along": [],
        }
    }
    for name, setting in settings.items():
        if setting.runs:
            flags = changed(next(iter(setting.runs.values())), first)
            results[name] = {
                "group": setting.group,
                "command": setting.command,
                "flags": as_flags(flags),
                "seeds": len(setting.runs),
                "found": compare(setting, default, args),
                "along": along_the_way(setting, args),
            }
    return results


def save(settings: dict[str, Setting], results: dict[str, dict], args: Args, output: Path) -> str:
    """Writes tables.md and results.json; returns the report for the screen."""
    first = next(iter(settings[DEFAULT].runs.values()))
    setup = (
        f"{first.metrics[-1]['episode']:,} episodes, {len(first.posts)} held-out posts; mean ± standard error "
        f"over seeds; difference from {DEFAULT} on the same seeds and posts with its 95% interval (paired "
        "bootstrap); *: without 0"
    )
    first_table, second_table = tables(results)
    gaps, spoken = missing(settings), words(results)
    ask = sum("verdict" in result["found"]["win_rate"] for name, result in results.items() if name != "before")
    spoken += overoptimisation(results)
    if ask > 5:
        spoken.append(f"Of {ask} comparisons at 95% one in twenty may stand out by chance: a single star is a hint.")
    whole = {
        "commands": ["bash benchmark/options/run_options.sh", "python benchmark/options/options_report.py"],
        "setup": setup,
        "missing": gaps,
        "window": args.window,
        "bootstrap": args.bootstrap,
        "bootstrap_seed": args.seed,
        "results": results,
    }
    (output / "results.json").write_text(json.dumps(rounded(whole), indent=1) + "\n")
    text = [
        setup[0].upper() + setup[1:] + ".",
        *[gaps] * bool(gaps),
        markdown(first_table),
        markdown(second_table),
        *spoken,
    ]
    (output / "tables.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    # The screen has no room for flags: the names say them.
    screens = [plain([row[:1] + row[2:] for row in table]) for table in (first_table, second_table)]
    return "\n\n".join([setup, *screens, "\n".join([*spoken, *[gaps] * bool(gaps)])])


def rounded(value):
    """The same with numbers to five digits and None for NaN, for JSON."""
    if isinstance(value, dict):
        return {str(name): rounded(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(x) for x in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value


# ---- Pictures --------------------------------------------------------------------------------------------------------
# All are drawn from what results.json holds, so `--redraw` makes them again without the runs.


def curve(panel, along: list[dict], measure: str, factor: float, label: str, color):
    """A measure over episodes at the evaluations: the mean over seeds, its standard error as a band."""
    episodes = [point["episode"] for point in along]
    mean, error = zip(*(point[measure] for point in along))
    mean = factor * np.array(mean)
    error = factor * np.array([x or 0.0 for x in error], float)  # one seed has none
    panel.plot(episodes, mean, "o-", color=color, label=label, markersize=4)
    panel.fill_between(episodes, mean - error, mean + error, color=color, alpha=0.22, linewidth=0)
    panel.set_xlabel("episodes (completions sampled in training)")
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.25)


def note(panel, words: str, x: float, y: float, below: bool, color: str):
    """Words that end at x, above or below y."""
    up = -14 if below else 8
    panel.annotate(words, (x, y), xytext=(0, up), textcoords="offset points", ha="right", color=color)


def draw_headline(pyplot, results: dict[str, dict], best_of: dict[int, float]):
    """The default's gold win rate, beside what the SFT policy and the best of n of its samples reach."""
    default, before = results[DEFAULT], results["before"]["found"]["win_rate"]["mean"]
    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    curve(axes, default["along"], "win_rate", 100, "", "C0")
    lines = {"SFT policy": before} | {f"best of {n} samples of the SFT policy": rate for n, rate in best_of.items()}
    last = default["along"][-1]["episode"]
    for words, rate in lines.items():
        axes.axhline(100 * rate, color="gray", linestyle="--", linewidth=1)
        note(axes, f"{words}: {100 * rate:.1f}", last, 100 * rate, below=True, color="dimgray")
    rate = default["found"]["win_rate"]["mean"]
    note(axes, f"RLOO, one sample: {100 * rate:.1f}", last, 100 * rate, below=False, color="C0")
    axes.set_ylabel("gold win rate against the references, %")
    axes.set_ylim(30, 5 * math.ceil(20 * max([rate, *lines.values()])) + 2)
    axes.set_title(
        f"rloo.py with its default flags on mini TL;DR; held-out posts, sampled\nband: ± standard error over "
        f"{default['seeds']} seeds; best of n: by the reward model",
        fontsize=10,
    )


def draw_kl_coef(pyplot, results: dict[str, dict]):
    """KL, the reward model's score and the gold score over episodes, a line for each weight of the KL."""
    betas = {name: beta_of(result) for name, result in results.items() if name != "before" and is_kl_coef(name, result)}
    names = sorted(betas, key=betas.get)
    shades = pyplot.get_cmap("viridis")(np.linspace(0, 0.88, len(names)))
    panels = {"kl": "KL of the rollouts, nats", "score": "reward model's score", "gold_score": "gold score"}
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for (measure, title), panel in zip(panels.items(), axes):
        for name, color in zip(names, shades):
            label = f"kl_coef {betas[name]:g} ({results[name]['seeds']} seeds)"
            curve(panel, results[name]["along"], measure, 1, label, color)
        panel.set_title(title, fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(
        "The weight of the KL; scores of held-out posts, sampled; bands: ± standard error over seeds", fontsize=11
    )


def is_kl_coef(name: str, result: dict) -> bool:
    return name == DEFAULT or result["group"] == "kl_coef"


def beta_of(result: dict) -> float:
    """The weight of the KL in a setting's flags; 1e-9 stands for 0, and no flag for the default's 0.05."""
    found = re.search(r"--kl_coef (\S+)", result["flags"])
    beta = float(found[1]) if found else DEFAULT_KL_COEF
    return beta if beta > 1e-6 else 0.0


def draw_differences(pyplot, results: dict[str, dict]):
    """Differences from the default with their intervals, for three measures."""
    shown = {
        f"{name} ({result['found']['win_rate']['seeds_compared']})": result["found"]
        for name, result in results.items()
        if name != "before" and "difference" in result["found"]["win_rate"]
    }
    colors = {"better": "C0", "worse": "C3", "not told apart": "gray"}
    measures = ("win_rate", "greedy_win_rate", "gold_score")
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 1.9 + 0.3 * len(shown)), sharey=True, layout="constrained")
    for panel, measure in zip(axes, measures):
        *_, title, factor, _ = MEASURES[measure]
        for place, found in enumerate(shown.values()):
            entry = found[measure]
            low, middle, high = (factor * entry[key] for key in ("low", "difference", "high"))
            panel.plot([low, high], [place, place], color=colors[entry["verdict"]], linewidth=2)
            panel.plot(middle, place, "o", color=colors[entry["verdict"]])
        panel.axvline(0, color="black", linewidth=1)
        panel.set_xlabel(f"{title.replace(', %', '')}: difference" + " in points" * (factor == 100))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="x", alpha=0.25)
    axes[0].set_yticks(range(len(shown)), list(shown))
    axes[0].invert_yaxis()
    for verdict, color in colors.items():
        axes[0].plot([], [], "o-", color=color, label={"not told apart": "interval contains 0"}.get(verdict, verdict))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        "Each option against the default flags after training: same seeds (number in brackets) and posts; point: mean "
        "difference, line: 95% interval",
        fontsize=11,
    )


def draw(results: dict[str, dict], output: Path) -> list[str]:
    """Draws what there are results for; returns the pictures' names."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = json.loads((MINI_TLDR / "figures.json").read_text())
    best_of = {n: figures[f"best of {n}: win rate"] for n in (4, 16)}
    pictures = []

    def keep(name: str):
        pyplot.savefig(output / f"{name}.png", dpi=110)
        pyplot.close()
        pictures.append(f"{name}.png")

    draw_headline(pyplot, results, best_of)
    keep("headline")
    if any(result["group"] == "kl_coef" for result in results.values()):
        draw_kl_coef(pyplot, results)
        keep("kl_coef")
    if len(results) > 2:
        draw_differences(pyplot, results)
        keep("differences")
    return pictures


def main():
    args = tyro.cli(Args, description=__doc__, use_underscores=True)
    if args.bootstrap < 1 or args.window < 1:
        fail("--bootstrap and --window must be at least 1")
    output = Path(args.output_dir)
    if args.redraw:
        results = json.loads((output / "results.json").read_text())["results"]
        written = []
    else:
        settings = read_runs(Path(args.runs))
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--output_dir {output}: cannot be made ({error.strerror})")
        results = summarize(settings, args)
        print(save(settings, results, args, output))
        results = rounded(results)
        written = ["tables.md", "results.json"]
    try:
        written += draw(results, output)
    except ImportError:
        print("no pictures without matplotlib: pip install -r benchmark/requirements.txt")
    print(f"\n{output}: {', '.join(written)}")


if __name__ == "__main__":
    main()
