"""Tables and picture of the comparison with peers. `peers.py --report` makes them."""

from pathlib import Path

import estimates
import numpy as np
import report

WINDOW = 640  # completions that a point of a curve is the mean of
CLAIMS = [  # what should be ahead of what; the first and the last three are of Ahmadian et al.
    ("RLOO beats PPO", "rloo", "ppo"),
    ("the same, PPO with 1 epoch", "rloo", "ppo_1_epoch"),
    ("the same, PPO's value model from the policy", "rloo", "ppo_policy"),
    ("the same, PPO's value model from comparisons only", "rloo", "ppo_noisy"),
    ("PPO's value model: from the reward model beats from the policy", "ppo", "ppo_policy"),
    ("PPO's value model: from the reward model beats from comparisons only", "ppo", "ppo_noisy"),
    ("PPO: 4 epochs beat 1", "ppo", "ppo_1_epoch"),
    ("RLOO beats RAFT, k = 2", "rloo_k2", "raft_k2"),
    ("RLOO beats RAFT, k = 4", "rloo", "raft"),
    ("RLOO beats RAFT, k = 8", "rloo_k8", "raft_k8"),
]
COLUMNS = [column for column in report.COLUMNS if column[1][0] == "sampled"]
DRAWN = {  # method -> colour
    "rloo": "tab:blue",
    "ppo": "tab:red",
    "ppo_1_epoch": "tab:orange",
    "ppo_policy": "tab:pink",
    "ppo_noisy": "tab:brown",
    "grpo_trl": "tab:green",
    "raft": "tab:purple",
    "no_baseline": "tab:grey",
}


# ---- What has been found ---------------------------------------------------------------------------------------------


def chosen_trials(study) -> dict:
    """method's name -> its best trial, of the methods that are tuned."""
    found = {method.name: study.best(method) for method in study.plan.methods}
    return {name: trial for name, trial in found.items() if trial is not None}


def tested(study, trial) -> list[int]:
    """The seeds that a trial has on test posts."""
    return list(report.having(study, trial, study.plan.seeds, "test"))


def compared(study, trial, other, key: str = "test/sampled/win") -> np.ndarray | None:
    """A trial's values less another's, (seeds, posts), of the seeds that both have."""
    seeds = [seed for seed in tested(study, trial) if seed in tested(study, other)]
    return report.difference(study, trial, other, seeds, key) if seeds else None


def verdict(differences: np.ndarray) -> str:
    """What the interval says."""
    if len(differences) == 1:
        return "one seed only"
    low, high = estimates.interval_over_seeds_and_posts(differences)
    return "ahead" if low > 0 else "behind" if high < 0 else "not told apart"


# ---- Tables ----------------------------------------------------------------------------------------------------------


def summary(study, trials: dict) -> str:
    """Who is ahead of RLOO and who is not, before the table."""
    groups = {"ahead": [], "behind": [], "not told apart": []}
    for name, trial in trials.items():
        found = compared(study, trial, trials["rloo"]) if name != "rloo" and "rloo" in trials else None
        if found is not None and len(found) > 1:
            text = f"{trial.method.title} ({report.mean_and_interval(found, 100, decimals=1)})"
            groups[verdict(found)].append((found.mean(), text))
    titles = {
        "ahead": "**Ahead of RLOO, k = 4**",
        "behind": "**Behind RLOO, k = 4**",
        "not told apart": "**Not told apart from RLOO, k = 4**",
    }
    return "\n".join(
        f"- {titles[group]}, points of the gold win rate: "
        f"{', '.join(text for _, text in sorted(found, reverse=True)) or 'none'}."
        for group, found in groups.items()
    )


def results_table(study, trials: dict) -> str:
    """All methods on test posts, the best first."""
    rows = [
        ["", "learning rate", "completions per update", "β", "seeds", *(column[0] for column in COLUMNS)]
        + ["CPU seconds", "optimizer steps", "peak memory, GiB", "ahead of RLOO, points"]
    ]
    lines = []
    for name, trial in trials.items():
        found = report.having(study, trial, study.plan.seeds, "test")
        if not found:
            continue
        records = [study.runs.all[f"{trial.name}__{seed}"] for seed in found]
        diverged = sum(bool(study.runs.value(f"{trial.name}__{seed}", "diverged")) for seed in study.plan.seeds)
        lead = ""
        if name != "rloo" and "rloo" in trials:
            difference = compared(study, trial, trials["rloo"])
            lead = "" if difference is None else report.mean_and_interval(difference, 100, decimals=1)
        line = [
            trial.method.title,
            f"{trial.lr:g}",
            f"{trial.size}",
            f"{trial.beta:g}",
            f"{len(found)}" + (f" ({diverged} more diverged)" if diverged else ""),
            *report.measures(list(found.values()), COLUMNS),
            f"{np.mean([record['cpu_seconds'] for record in records]):.0f}",
            f"{records[0]['optimizer_steps']}",
            f"{np.mean([record['peak_memory'] for record in records]):.1f}",
            lead,
        ]
        lines.append((np.mean([part["sampled"]["win"]["mean"] for part in found.values()]), line))
    rows += [line for _, line in sorted(lines, key=lambda pair: -pair[0])]
    start = study.runs.value("sft", "test")
    if start and lines:
        rows.append(["SFT policy", "", "", "", "", *report.measures([start], COLUMNS), "", "", "", ""])
    table = report.markdown(rows)
    return f"{summary(study, trials)}\n\n{table}" if lines else table


def claims_table(study, trials: dict) -> str:
    rows = [["claim", "seeds", "gold win rate, points", "", "gold score", ""]]
    for claim, name, other in CLAIMS:
        if name not in trials or other not in trials:
            continue
        found = [compared(study, trials[name], trials[other], f"test/sampled/{key}") for key in ("win", "gold")]
        if found[0] is not None:
            cells = [
                cell
                for values, factor, decimals in zip(found, (100, 1), (1, 2))
                for cell in (report.mean_and_interval(values, factor, decimals=decimals), verdict(values))
            ]
            rows.append([claim, str(len(found[0])), *cells])
    return report.markdown(rows)


def tuning_table(study) -> str:
    """What each method was tuned with, and what came of it."""
    rows = [["", "trials", "learning rates", "β", "best", "gold win rate of all trials, %"]]
    for method in study.plan.methods:
        made = [trial for trial in study.trials(method) if study.win(trial) is not None]
        if made:
            best = study.best(method)
            rows.append(
                [
                    method.title,
                    str(len(made)),
                    ", ".join(f"{rate:g}" for rate in sorted({trial.lr for trial in made})),
                    ", ".join(f"{beta:g}" for beta in sorted({trial.beta for trial in made})),
                    f"{best.lr:g}, β = {best.beta:g}, {best.size} completions" if best else "",
                    ", ".join(f"{100 * win:.1f}" for win in sorted(map(study.win, made), reverse=True)),
                ]
            )
    return report.markdown(rows)


def trials_page(study) -> str:
    """Every trial of every method, in the order in which they were made."""
    lines = [
        "# All trials",
        "",
        "Each trial of [the comparison with peers](peers.md), in the order in which a method's "
        f"trials are made, measured on {study.plan.validation_posts:,} fresh validation posts. Each method gets "
        f"{study.plan.trials}. The best by gold win rate, in bold, is what is measured on test posts. `python` is the "
        "environment of rloo.py, `trl0` and `trl1` are those with TRL 0.19.1 and 1.16.0; `--value_model noisy10` "
        "stands for the folder of that reward model. `peers.py` writes this page.",
    ]
    for method in study.plan.methods:
        made = [trial for trial in study.trials(method) if study.win(trial) is not None]
        rows = [["", *(column[0] for column in COLUMNS), "CPU seconds", "command"]]
        for number, trial in enumerate(made, 1):
            record = study.runs.all[f"{trial.name}__1"]
            mark = f"**{number}**" if trial == study.best(method) else str(number)
            if record.get("diverged"):
                cells = ["diverged", *[""] * len(COLUMNS)]
            else:
                cells = [*report.measures([record["validation"]], COLUMNS), f"{record['cpu_seconds']:.0f}"]
            rows.append([mark, *cells, f"`{record['command']}`"])
        if made:
            lines += ["", f"## {method.title}", "", report.markdown(rows)]
    return "\n".join(lines) + "\n"


# ---- Curves ----------------------------------------------------------------------------------------------------------


def smoothed(values: np.ndarray, size: int) -> np.ndarray:
    """Means over the neighbours of each value, an update of `size` completions; over fewer at the ends."""
    half = WINDOW // size // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def curves(study, trial) -> dict[str, np.ndarray] | None:
    """Of the seeds on test posts, each (seeds, updates + 1): the score of the policy after 0, 1, ... updates, and the
    episodes, CPU seconds and optimizer steps that it has had.

    Scores are those of training's own completions, smoothed, but for the last one, which is of the test posts."""
    records = [study.runs.all[f"{trial.name}__{seed}"] for seed in tested(study, trial)]
    if not records:
        return None
    ends = [[record["test"]["sampled"]["score"]["mean"]] for record in records]
    seconds = np.array([np.cumsum([0.0, *record["curve"]["cpu_seconds"]]) for record in records])
    steps = np.array([[0, *record["curve"]["optimizer_steps"]] for record in records])
    updates = np.tile(np.arange(seconds.shape[1]), (len(records), 1))
    scores = [
        np.append(smoothed(np.array(record["curve"]["scores"]), trial.size), end) for record, end in zip(records, ends)
    ]
    return {
        "score": np.array(scores),
        "episodes": updates * trial.size,
        "CPU seconds": seconds,
        "optimizer steps": steps,
    }


def score_at(found: dict[str, np.ndarray], axis: str, budget: float) -> np.ndarray | None:
    """The score of each seed after a budget of episodes, CPU seconds or optimizer steps; None if a run ends before."""
    if found[axis][:, -1].min() < budget:
        return None
    return np.array([np.interp(budget, x, y) for x, y in zip(found[axis], found["score"])])


def budgets_table(study, trials: dict) -> str:
    """The reward model's score at equal budgets, of the methods that differ in how they spend them."""
    plan = study.plan
    budgets = [("episodes", x) for x in plan.at_episodes] + [("CPU seconds", x) for x in plan.at_seconds]
    budgets += [("optimizer steps", x) for x in plan.at_steps]
    short = {"episodes": "episode", "CPU seconds": "CPU second", "optimizer steps": "step"}
    rows = [["", *(f"{short[axis]} {x:,}" for axis, x in budgets), "end"]]
    for name, trial in trials.items():
        found = curves(study, trial) if name in DRAWN else None
        if found:
            scores = [score_at(found, axis, x) for axis, x in budgets] + [found["score"][:, -1]]
            rows.append([trial.method.title, *("" if x is None else f"{x.mean():.2f}" for x in scores)])
    return report.markdown(rows)


def draw_picture(study):
    """The score over episodes, CPU seconds and optimizer steps."""
    trials = {name: trial for name, trial in chosen_trials(study).items() if name in DRAWN and tested(study, trial)}
    if not trials:
        return
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("the picture needs matplotlib: pip install matplotlib")
        return
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(1, 3, figsize=(15, 5.2), sharey=True)
    plan = study.plan
    ticks = {"episodes": plan.at_episodes, "CPU seconds": plan.at_seconds, "optimizer steps": plan.at_steps}
    for axis, x_name in zip(axes, ticks):
        for name, trial in trials.items():
            found = curves(study, trial)
            whole = min(max(1, WINDOW // trial.size // 2), found["score"].shape[1] - 2)  # the first whole window
            x, y = found[x_name][:, whole:], found["score"][:, whole:]
            seeds = len(y)
            label = f"{trial.method.title} ({seeds} seed{'s' if seeds > 1 else ''})"
            axis.plot(x.mean(0), y.mean(0), color=DRAWN[name], lw=1.6, label=label)
            axis.fill_between(x.mean(0), y.min(0), y.max(0), color=DRAWN[name], alpha=0.15, lw=0)
            axis.plot(x.mean(0)[-1], y.mean(0)[-1], "o", color=DRAWN[name], ms=5)
        start = study.runs.value("sft", "test", "sampled", "score")
        if start:
            axis.axhline(start["mean"], color="black", lw=1, ls="--", label="SFT policy, where all begin")
        axis.set_xscale("log")
        axis.set_xticks(ticks[x_name], [f"{x:,}" for x in ticks[x_name]])
        axis.minorticks_off()
        axis.set_xlabel(f"{x_name}, logarithmic")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("reward model's score")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=9)
    figure.suptitle(
        "RLOO and its peers, each at its best setting: the same runs by episodes, CPU seconds and optimizer steps\n"
        f"line: mean over seeds of a moving mean over {WINDOW} completions, on training prompts; "
        "band: range of the seeds; dot: the final policy on test posts",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(study.results / "peers.png", dpi=110)
    plt.close(figure)
    print(f"picture: {study.results / 'peers.png'}")


def write_tables(study):
    trials = chosen_trials(study)
    tables = {
        "peers": results_table(study, trials),
        "claims": claims_table(study, trials),
        "budgets": budgets_table(study, trials),
        "tuning": tuning_table(study),
    }
    report.insert_tables(tables, study.results)
    page: Path = study.results / "trials.md"
    page.write_text(trials_page(study), encoding="utf-8")
    print(f"trials: {page}")
