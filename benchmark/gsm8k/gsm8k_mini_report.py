"""Tables and a picture of what gsm8k_mini.py has found so far. Its stage `report` makes them."""

import math
import sys
from pathlib import Path

import gsm8k_measure
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "frontier"))
from estimates import T_QUANTILES, mean_and_error  # noqa: E402

MEASURES = ["greedy", "sampled", "pass@8", "pass@64", "maj@8", "maj@64"]


def markdown(rows: list[list[str]]) -> str:
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


# ---- Numbers ---------------------------------------------------------------------------------------------------------


class Results:
    """The measures of each test problem, before and after training with a setting, of the seeds that are there."""

    def __init__(self, study, setting):
        start = study.found["start"]
        self.setting = setting
        self.start = start["test"]
        self.start_again = start["test again"]
        self.steps = np.array(start["steps"])
        self.seeds = [seed for seed in study.plan.seeds if study.has(f"{setting.name}__{seed}", "test")]
        self.runs = [study.found[f"{setting.name}__{seed}"]["test"] for seed in self.seeds]

    def before(self, measure: str) -> np.ndarray:
        """(problems,)"""
        return gsm8k_measure.per_problem(self.start, measure)

    def after(self, measure: str) -> np.ndarray:
        """(seeds, problems)"""
        return np.array([gsm8k_measure.per_problem(run, measure) for run in self.runs])

    def where(self, steps: int | None) -> np.ndarray:
        """Which problems have so many steps, all for None."""
        return self.steps > 0 if steps is None else self.steps == steps


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95% interval of the mean of values (problems,) or (seeds, problems), for other problems and other seeds.

    Half of it is 1.96 standard errors over problems and, over the few seeds, Student's t of them, their squares added.
    What a seed does to a problem is in both, so that the interval is a little too wide."""
    values = np.atleast_2d(values)
    mean, error = mean_and_error(values.mean(0))
    half = 1.96 * error
    if len(values) > 1:
        _, seed_error = mean_and_error(values.mean(1))
        half = math.hypot(half, T_QUANTILES[len(values) - 2] * seed_error)
    return mean - half, mean + half


def percent(values: np.ndarray, signed: bool = False) -> str:
    """Mean and 95% interval of values (problems,) or (seeds, problems), in percent."""
    sign = "+" if signed else ""
    mean, low, high = (round(100 * x, 1) + 0.0 for x in (values.mean(), *interval(values)))  # no -0.0
    return f"{mean:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]".replace("-", "−")


# ---- Tables ----------------------------------------------------------------------------------------------------------


def trials_table(study) -> str:
    names = ["greedy", "sampled", "pass@8", "maj@8"]
    by_steps = [f"sampled, {n}" for n in (1, 2, 3)]
    titles = [f"{name}, %" for name in names] + [f"sampled, {n} step{'s' * (n > 1)}, %" for n in (1, 2, 3)]
    rows = [["learning rate", "β", *titles, "KL, nats", "minutes"]]

    def cells(name: str) -> list[str]:
        found = study.found[name]["validation"]
        return [f"{100 * found[x]:.1f}" if x in found else "" for x in names + by_steps]

    rows.append(["before training", "", *cells("start"), "0", ""])
    for setting in study.trials():
        name = f"{setting.name}__1"
        note = " **(chosen)**" if setting == study.chosen() else " (broadest)" if setting == study.broadest() else ""
        line = [f"{setting.lr:g}{note}", f"{setting.beta:g}", *cells(name)]
        kl, minutes = study.found[name]["kl"], study.found[name]["seconds_of_updates"] / 60
        rows.append([*line, "" if kl is None else f"{kl:.2f}", f"{minutes:.1f}"])
    return markdown(rows)


def commands_list(study) -> str:
    lines = [study.found[f"{setting.name}__1"]["command"] for setting in study.trials()]
    return "\n".join(["```sh", *lines, "```"])


def results_table(results: Results, steps: int | None = None) -> str:
    seeds = ", ".join(map(str, results.seeds))
    rows = [["%", "before", "after", "gained, points", f"gained, seed by seed ({seeds})"]]
    mask = results.where(steps)
    for measure in MEASURES:
        before = results.before(measure)[mask]
        after = results.after(measure)[:, mask]
        gained = after - before
        per_seed = ", ".join(f"{100 * x:+.1f}" for x in gained.mean(1)).replace("-", "−")
        rows.append([measure, percent(before), percent(after), percent(gained, signed=True), per_seed])
    return markdown(rows)


def difference_table(one: Results, other: Results) -> str:
    """The second setting minus the first one, on the same seeds and problems."""
    shared = min(len(one.seeds), len(other.seeds))  # seeds are made in the same order
    rows = [["points", "all", "1 step", "2 steps", "3 steps"]]
    for measure in MEASURES:
        difference = other.after(measure)[:shared] - one.after(measure)[:shared]
        rows.append([measure, *(percent(difference[:, one.where(n)], signed=True) for n in (None, 1, 2, 3))])
    return markdown(rows)


def steps_table(results: Results) -> str:
    rows = [["steps", "problems", "", *MEASURES]]
    for steps in sorted(set(results.steps.tolist())):
        mask = results.where(steps)
        lines = {"before": [], "after": [], "gained, points": []}
        for measure in MEASURES:
            before = results.before(measure)[mask]
            after = results.after(measure)[:, mask]
            lines["before"].append(f"{100 * before.mean():.1f}")
            lines["after"].append(f"{100 * after.mean():.1f}")
            lines["gained, points"].append(percent(after - before, signed=True))
        for i, (name, cells) in enumerate(lines.items()):
            rows.append([str(steps) if i == 0 else "", str(mask.sum()) if i == 0 else "", name, *cells])
    return markdown(rows)


def beyond_table(results: Results) -> str:
    """Is what was gained more than the start's own majority vote, and more than its many samples find?"""
    rows = [["", "steps", "problems", "before", "after", "difference, points"]]

    def line(title: str, steps: int | None, mask, before, after):
        label = "all" if steps is None else str(steps)
        before, after = before[mask], after[:, mask]
        cells = [percent(before), percent(after), percent(after - before, signed=True)]
        rows.append([title, label, str(mask.sum()), *cells])

    for steps in (None, 1, 2, 3):
        mask = results.where(steps)
        line(
            "majority of 64 samples before, greedy after",
            steps,
            mask,
            results.before("maj@64"),
            results.after("greedy"),
        )
    unsolved = np.array(results.start["right"]) == 0
    for steps in (None, 2, 3):
        mask = unsolved & results.where(steps)
        if mask.sum() < 2:
            continue
        again = gsm8k_measure.per_problem(results.start_again, "pass@64")
        title = "unsolved by 64 samples before: solved by 64 others before, by 64 after"
        line(title, steps, mask, again, results.after("pass@64"))
        again = gsm8k_measure.per_problem(results.start_again, "sampled")
        line("the same problems: accuracy of those samples", steps, mask, again, results.after("sampled"))
    return markdown(rows)


def mistakes_table(results: Results) -> str:
    """The first mistakes of greedy completions."""
    rows = [["steps", "", "right", *gsm8k_measure.MISTAKES[1:]]]
    for steps in sorted(set(results.steps.tolist())):
        mask = results.where(steps)
        for title, records in (("before", [results.start]), ("after", results.runs)):
            found = np.array([record["mistake"] for record in records])[:, mask]
            shares = [100 * (found == kind).mean() for kind in gsm8k_measure.MISTAKES]
            rows.append([str(steps) if title == "before" else "", title, *(f"{share:.1f}" for share in shares)])
    return markdown(rows)


# ---- Picture ---------------------------------------------------------------------------------------------------------


def draw(all_results: list[Results], path):
    """pass@k over k, before training and after it with each setting, by the number of steps."""
    try:
        import matplotlib
    except ImportError:
        print("no picture without matplotlib: pip install -r benchmark/requirements.txt")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    start = all_results[0]
    ks = [2**i for i in range(start.start["samples"].bit_length())]
    figure, axes = plt.subplots(1, 3, figsize=(12, 5), sharey=True)
    for axis, steps in zip(axes, (1, 2, 3)):
        mask = start.where(steps)
        before = [100 * start.before(f"pass@{k}")[mask].mean() for k in ks]
        axis.plot(ks, before, "o-", ms=4, color="tab:gray", label="before training: pass@k")
        axis.axhline(
            100 * start.before("greedy")[mask].mean(), color="tab:gray", ls="--", lw=1.2, label="its greedy accuracy"
        )
        for results, colour in zip(all_results, ("tab:blue", "tab:orange")):
            after = np.array([100 * results.after(f"pass@{k}")[:, mask].mean(1) for k in ks])  # (points, seeds)
            setting = results.setting
            count = f"{len(results.seeds)} seed{'s' * (len(results.seeds) > 1)}"
            label = f"after, learning rate {setting.lr:g}, β = {setting.beta:g} ({count}): pass@k"
            axis.plot(ks, after.mean(1), "o-", ms=4, color=colour, label=label)
            axis.fill_between(ks, after.min(1), after.max(1), color=colour, alpha=0.2, lw=0)
            greedy = 100 * results.after("greedy")[:, mask].mean()
            axis.axhline(greedy, color=colour, ls="--", lw=1.2, label="its greedy accuracy")
        axis.set_xscale("log", base=2)
        axis.set_xticks(ks, [str(k) for k in ks])
        axis.set(xlabel="k samples at T = 1", ylim=(0, 102))
        axis.set_title(f"{steps} step{'s' * (steps > 1)}: {mask.sum()} problems", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("problems solved by at least one sample, %")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="lower center", ncols=1 + len(all_results), frameon=False, fontsize=9
    )
    figure.suptitle(
        "Mini GSM8K, held-out problems by their number of steps, before and after RLOO (mean over seeds, band: range)"
    )
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    print(path)


# ---- Page ------------------------------------------------------------------------------------------------------------


def tables_of(study) -> dict[str, str]:
    """Name -> table, of what is there."""
    if not study.is_tuned():
        return {}
    tables = {"trials": trials_table(study), "commands": commands_list(study)}
    all_results = measured(study)
    if all_results:
        chosen, *others = all_results
        tables |= {
            "results": results_table(chosen),
            "steps": steps_table(chosen),
            "beyond": beyond_table(chosen),
            "mistakes": mistakes_table(chosen),
        }
        for other in others:
            tables |= {
                "broadest": results_table(other),
                "broadest steps": steps_table(other),
                "broadest beyond": beyond_table(other),
                "difference": difference_table(chosen, other),
            }
    return tables


def measured(study) -> list[Results]:
    """Of the chosen setting, and of the broadest one if it is another; only those with a seed that is measured."""
    if not study.has("start", "steps"):
        return []
    settings = dict.fromkeys((study.chosen(), study.broadest()))
    return [results for results in (Results(study, setting) for setting in settings) if results.seeds]


def write(study):
    """Tables into the folder's README.md, between the lines that name them, or without such a page into tables.md."""
    tables = tables_of(study)
    page = study.folder / "README.md"
    if page.is_file():
        text = page.read_text(encoding="utf-8")
        for name, table in tables.items():
            begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
            before, rest = text.split(begin)
            text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    else:
        page = study.folder / "tables.md"
        text = "\n\n".join(f"## {name}\n\n{table}" for name, table in tables.items()) + "\n"
        print(text)
    page.write_text(text, encoding="utf-8")
    print(page)
    if "results" in tables:
        draw(measured(study), study.folder / "gsm8k_mini.png")
