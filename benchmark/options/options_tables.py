"""Tables and picture of what the options do. `options.py --report` makes them."""

import estimates
import numpy as np
import report

MARGIN = 1.0  # points of the gold win rate within which two settings count as the same
COLUMNS = [column for column in report.COLUMNS if column[1][0] == "sampled"]
COLOURS = {"better": "tab:blue", "worse": "tab:red", "the same": "tab:green", "not told apart": "tab:grey"}


def values(study, option) -> np.ndarray | None:
    """Gold wins on test posts of an option's best trial, (seeds, posts), in points; None for less than two seeds."""
    trial = study.best(option)
    names = [f"{trial.name}__{seed}" for seed in study.seeds(option)] if trial else []
    found = [study.posts.value(name, "test/sampled/win") for name in names]
    found = [line for line in found if line is not None]
    return 100 * np.array(found) / study.post_units if len(found) > 1 else None


def verdict(interval: tuple[float, float], narrow: tuple[float, float]) -> str:
    """What the 95% and the 90% interval of the difference from the default say."""
    if interval[0] > 0:
        return "better"
    if interval[1] < 0:
        return "worse"
    return "the same" if narrow[0] > -MARGIN and narrow[1] < MARGIN else "not told apart"


def comparisons(study) -> dict:
    """option -> mean difference from the default, its 95% interval, the verdict, and the margin within which it is
    equivalent to the default at 5% (the larger end of the 90% interval), of the options that have runs."""
    default, *options = study.plan.methods
    base, found = values(study, default), {}
    for option in options:
        ours = values(study, option)
        if base is not None and ours is not None:
            interval = estimates.interval_of_difference(ours, base)
            narrow = estimates.interval_of_difference(ours, base, estimates.T_QUANTILES_90)
            kind, margin = verdict(interval, narrow), max(-narrow[0], narrow[1])
            found[option] = (ours.mean() - base.mean(), *interval, kind, margin)
    return found


def answer(study) -> str:
    """Which options matter, in one line for each verdict."""
    titles = {
        "better": "**Better than the default**",
        "worse": "**Worse**",
        "the same": f"**The same within {MARGIN:g} point**",
        "not told apart": "**Not told apart, nor shown to be the same**",
    }
    lines = []
    for kind, title in titles.items():
        found = sorted((x for x in comparisons(study).items() if x[1][3] == kind), key=lambda pair: -pair[1][0])
        texts = [
            f"{full_title(option)} ({mean:+.1f} [{low:+.1f}, {high:+.1f}])" for option, (mean, low, high, *_) in found
        ]
        lines.append(f"- {title}: {'; '.join(texts) or 'none'}.")
    return "\n".join(lines)


def full_title(option) -> str:
    return f"{option.group}: {option.title}" if option.group else option.title


def results_table(study) -> str:
    """All options on test posts."""
    head = [
        "",
        "flags",
        "learning rate",
        "seeds",
        *(column[0] for column in COLUMNS),
        "difference, points",
        "",
        "equivalent within",
    ]
    rows, compared = [head], comparisons(study)
    for option in study.plan.methods:
        trial = study.best(option)
        found = list(report.having(study, trial, study.seeds(option), "test").values()) if trial else []
        if found:
            mean, low, high, kind, margin = compared.get(option, (None,) * 5)
            difference = "" if mean is None else f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"
            line = [full_title(option), flags(study, option), f"{trial.lr:g}", str(len(found))]
            within = "" if margin is None else f"± {margin:.1f}"
            rows.append([*line, *report.measures(found, COLUMNS), difference, kind or "", within])
    return report.markdown(rows)


def flags(study, option) -> str:
    """What an option changes in the default's command, besides the learning rate."""
    words = study.first_trial(option).command(1)
    default = study.first_trial(study.plan.methods[0]).command(1)
    pairs, usual = ([(a, b) for a, b in zip(line, line[1:]) if a.startswith("--")] for line in (words, default))
    changed = [f"{a} {b}" if not b.startswith("--") else a for a, b in pairs if (a, b) not in usual]
    if words[-1].startswith("--"):
        changed.append(words[-1])
    changed = [text for text in changed if not text.startswith("--learning_rate")]
    return f"`{' '.join(changed)}`" if changed else ""


def tuning_table(study) -> str:
    """The trials: gold win rate on validation posts by learning rate."""
    rows = [["", "trials: learning rate → gold win rate, %"]]
    for option in study.plan.methods:
        made = [(trial, study.win(trial)) for trial in study.trials(option)]
        cells = [
            f"**{trial.lr:g} → {100 * win:.1f}**" if trial == study.best(option) else f"{trial.lr:g} → {100 * win:.1f}"
            for trial, win in sorted(made, key=lambda pair: pair[0].lr)
            if win is not None
        ]
        if option.like:
            cells = [f"that of {next(full_title(x) for x in study.plan.methods if x.name == option.like)}"]
        if cells:
            rows.append([full_title(option), ", ".join(cells)])
    return report.markdown(rows)


def draw_picture(study):
    """Differences from the default with their intervals."""
    found = comparisons(study)
    if not found:
        return
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("the picture needs matplotlib: pip install matplotlib")
        return
    plt.switch_backend("Agg")
    figure, axis = plt.subplots(figsize=(11, 1.8 + 0.32 * len(found)), layout="constrained")
    axis.axvspan(-MARGIN, MARGIN, color="tab:green", alpha=0.1, lw=0, label=f"the same: within {MARGIN:g} point")
    axis.axvline(0, color="black", lw=1)
    for place, (mean, low, high, kind, _) in enumerate(found.values()):
        axis.plot([low, high], [place, place], color=COLOURS[kind], lw=2)
        axis.plot(mean, place, "o", color=COLOURS[kind])
    for kind, colour in COLOURS.items():
        axis.plot([], [], "o-", color=colour, label=kind)
    axis.set_yticks(range(len(found)), [full_title(option) for option in found])
    axis.invert_yaxis()
    axis.set_xlabel("gold win rate, difference from the default in points")
    axis.grid(axis="x", alpha=0.3)
    seeds = len(study.plan.seeds)
    figure.suptitle(
        f"Each option ({seeds} seeds) against the default ({3 * seeds} seeds)\n"
        "point: mean difference on fresh test posts; line: 95% interval",
        fontsize=10,
    )
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(study.results / "differences.png", dpi=110)
    plt.close(figure)
    print(f"picture: {study.results / 'differences.png'}")


def write_tables(study):
    tables = {"answer": answer(study), "options": results_table(study), "trials": tuning_table(study)}
    report.insert_tables(tables, study.results)
