"""Tables in README.md and pictures, of what the study has found so far. `frontier.py --stages report` makes them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import estimates
import numpy as np

# A column of a table: title, where its number is in a run's measures, factor, decimals.
COLUMNS = [
    ("gold win rate, %", ("sampled", "win"), 100, 1),
    ("greedy, %", ("greedy", "win"), 100, 1),
    ("gold score", ("sampled", "gold"), 1, 2),
    ("reward model", ("sampled", "score"), 1, 2),
    ("KL, nats", ("sampled", "kl"), 1, 2),
    ("tokens", ("sampled", "length"), 1, 1),
]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ("| " + " | ".join(row) + " |" for row in rows)
    if not body:
        return "*(not measured yet)*"
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def cell(values: Sequence[dict], factor: float, decimals: int) -> str:
    """Mean ± standard error: over seeds or, of one seed, over posts, which is marked by brackets; no -0.0."""
    if len(values) == 1:
        mean, error = values[0]["mean"], values[0]["stderr"]
        return f"{round(factor * mean, decimals) + 0.0:.{decimals}f} (± {factor * error:.{decimals}f})"
    mean, error = estimates.mean_and_error([value["mean"] for value in values])
    return f"{factor * mean:.{decimals}f} ± {factor * error:.{decimals}f}"


def measures(found: Sequence[dict], columns=COLUMNS) -> list[str]:
    """The cells of the columns for the measures of several seeds."""
    return [cell([x[mode][key] for x in found], factor, digits) for _, (mode, key), factor, digits in columns]


def having(study, setting, seeds: Iterable[int], part: str) -> dict[int, dict]:
    """seed -> a part of the record, of the seeds that have it."""
    found = {seed: study.runs.value(f"{setting.name}__{seed}", part) for seed in seeds}
    return {seed: value for seed, value in found.items() if value is not None}


REWARD_MODELS = {
    "": "embedded task's",
    "noisy10": "comparisons, 10% flipped",
    "noisy25": "comparisons, 25% flipped",
}


# ---- Tables ----------------------------------------------------------------------------------------------------------


def sweep_table(study) -> str:
    plan = study.plan
    settings = list(dict.fromkeys([plan.old, *plan.grid]))
    if all(having(study, setting, [1], "validation") for setting in plan.grid):
        settings = list(dict.fromkeys([*settings, *study.second_grid()]))
    first_choice = study.first_choice()
    finalists = [plan.old, *(study.finalists() if first_choice else [])]  # `robust` gives seeds to others as well
    seeds = {setting: plan.few_seeds if setting in finalists else [1] for setting in settings}
    found = {setting: having(study, setting, seeds[setting], "validation") for setting in settings}
    found = {setting: list(parts.values()) for setting, parts in found.items() if parts}
    order = sorted(
        found, key=lambda x: (-len(found[x]), -np.mean([part["sampled"]["win"]["mean"] for part in found[x]]))
    )
    head = ["learning rate", "completions per update", "β", "else", "seeds", *(column[0] for column in COLUMNS), "time"]
    rows = [head]
    for setting in order:
        extra = [
            f"{key} {getattr(setting, key)}"
            for key in ("epochs", "minis", "k", "warmup", "eps")
            if getattr(setting, key) != getattr(plan.old, key)
        ]
        note = {plan.old: " (old default)", first_choice: " **(first choice)**"}.get(setting, "")
        line = [
            f"{setting.lr:g}{note}",
            str(setting.size),
            f"{setting.beta:g}",
            ", ".join(extra),
            str(len(found[setting])),
        ]
        cost = study.cost(setting)
        rows.append([*line, *measures(found[setting]), "" if np.isnan(cost) else f"{cost:.2f}"])
    return markdown(rows)


def robust_table(study) -> str:
    plan, chosen = study.plan, study.chosen()
    columns = [column for column in COLUMNS if column[1][0] == "sampled"]
    rows = [
        ["learning rate", "completions per update", "β", "seeds", *(column[0] for column in columns)]
        + ["ahead of the old default, points", "seed by seed"]
    ]
    for setting in (plan.old, *plan.robust):
        having_both = [having(study, x, plan.robust_seeds, "validation") for x in (plan.old, setting)]
        seeds = [seed for seed in plan.robust_seeds if all(seed in found for found in having_both)]
        if not seeds:
            continue
        note = {plan.old: " (old default)"}.get(setting, "") + (" **(chosen)**" if setting == chosen else "")
        found = [having_both[1][seed] for seed in seeds]
        row = [
            f"{setting.lr:g}{note}",
            str(setting.size),
            f"{setting.beta:g}",
            str(len(seeds)),
            *measures(found, columns),
        ]
        if setting == plan.old:
            rows.append([*row, "", ""])
            continue
        leads = 100 * study.leads(setting, seeds)
        interval = ""
        if len(seeds) > 1:
            low, high = estimates.interval_over_seeds(leads)
            interval = f" [{low:+.1f}, {high:+.1f}]"
        rows.append([*row, f"{leads.mean():+.1f}{interval}", ", ".join(f"{lead:+.1f}" for lead in leads)])
    return markdown(rows)


def difference(study, setting, other, seeds: Sequence[int], key: str) -> np.ndarray:
    """By how much a setting's values are above another's, (seeds, posts)."""
    values = [
        np.array([study.posts.value(f"{x.name}__{seed}", key) for seed in seeds], float) / study.post_units
        for x in (setting, other)
    ]
    return values[0] - values[1]


def mean_and_interval(differences: np.ndarray, factor: float, unit: str = "", decimals: int = 2) -> str:
    """The mean of differences (seeds, posts), and its interval where there are several seeds."""
    text = f"{factor * differences.mean():+.{decimals}f}{unit}"
    if len(differences) == 1:
        return text
    low, high = estimates.interval_over_seeds_and_posts(differences)
    return f"{text} [{factor * low:+.{decimals}f}, {factor * high:+.{decimals}f}]"


def compare_table(study, split: str, candidate, plan_seeds, name: str) -> str:
    """Today's default and a candidate on fresh test posts."""
    old = study.plan.old
    if candidate == old:
        return "*(the old default was chosen: there is nothing to compare)*"
    settings = [old] if candidate is None else [old, candidate]
    found = {setting: having(study, setting, plan_seeds, split) for setting in settings}
    rows = [["", "seeds", *(column[0] for column in COLUMNS)]]
    start = study.runs.value("sft", split)
    if start:
        rows.append(["SFT policy", "", *measures([start])])
    for setting, parts in found.items():
        if parts:
            label = "old default" if setting == old else f"{name}: `{setting.name}`"
            rows.append([label, str(len(parts)), *measures(list(parts.values()))])
    lines = [markdown(rows)]
    shared = [seed for seed in plan_seeds if all(seed in parts for parts in found.values())]
    if len(settings) == 2 and shared:
        lines.append("")
        for key, title, factor, unit in (
            ("sampled/win", "gold win rate, sampled", 100, " points"),
            ("greedy/win", "gold win rate, greedy", 100, " points"),
            ("sampled/gold", "gold score, sampled", 1, ""),
        ):
            found = difference(study, candidate, old, shared, f"{split}/{key}")
            per_seed = ", ".join(f"{factor * x:+.2f}" for x in found.mean(1))
            lines.append(
                f"- {title}, {name} less old default: {mean_and_interval(found, factor, unit)}; seed by seed {per_seed}"
            )
    return "\n".join(lines)


def best_of_n_table(study) -> str:
    rows = [["samples of", "best of", "gold win rate, %", "gold score", "reward model", "KL, nats", "J"]]

    def line(*cells, found):
        numbers = [("win", 100, 1), ("gold", 1, 2), ("score", 1, 2), ("kl", 1, 2)]
        numbers = [cell([found[key]], factor, digits) for key, factor, digits in numbers]
        rows.append([*cells, *numbers, f"{objective(found):.2f}"])

    distilled = study.runs.value(f"distilled{study.plan.distilled}", "test", "sampled")
    for name in sorted(study.best_of_n.all, key=lambda name: name != "sft"):
        title = "SFT policy" if name == "sft" else name_of_run(study, name)
        for n, found in study.best_of_n.all[name]["by_n"].items():
            line(title, n, found=found)
        if name == "sft" and distilled:
            line(f"SFT policy fine-tuned on its best of {study.plan.distilled}", "1", found=distilled)
    return markdown(rows)


def name_of_run(study, name: str) -> str:
    """A run of RLOO by its β and episodes."""
    setting = next(setting for setting in study.sampled_settings() if f"{setting.name}__1" == name)
    return f"RLOO, β = {setting.beta:g}, {setting.episodes:,} episodes"


def objective(found: dict) -> float:
    """What RLOO maximises if β = 0.05."""
    return found["score"]["mean"] - 0.05 * found["kl"]["mean"]


def in_order(settings) -> list:
    """By reward model, episodes, size of the updates and β."""
    return sorted(settings, key=lambda x: (x.reward, x.episodes, x.size, x.beta))


def described(study, setting) -> list[str]:
    """Reward model, β, episodes, and what else differs from the chosen setting."""
    chosen = study.chosen() or study.plan.old
    extra = [f"updates of {setting.size}, learning rate {setting.lr:g}"] if setting.size != chosen.size else []
    extra += ["norm of the gradient not limited"] if not setting.norm else []
    return [REWARD_MODELS[setting.reward], f"{setting.beta:g}", f"{setting.episodes:,}", ", ".join(extra)]


def long_table(study, settings) -> str:
    rows = [["trained on", "β", "episodes", "else", "seeds", *(column[0] for column in COLUMNS), "J"]]
    for setting in settings:
        found = list(having(study, setting, study.plan.seeds, "test").values())
        if found:
            last = "" if setting.reward else f"{np.mean([objective(x['sampled']) for x in found]):.2f}"
            rows.append([*described(study, setting), str(len(found)), *measures(found), last])
    return markdown(rows)


def parting_table(study, settings) -> str:
    """Where the gold score of a setting's runs is highest, and where they end; means over seeds."""
    rows = [
        ["trained on", "β", "seeds", "gold highest at, episodes", "KL, nats", "gold score", "its reward model"]
        + ["at the end: KL, nats", "gold score", "its reward model"]
    ]
    for setting in settings:
        found = curves(study, setting)
        if found:
            episodes, values = found
            proxy = values["proxy" if setting.reward else "score"].mean(0)
            gold, kl = values["gold"].mean(0), values["kl"].mean(0)
            best = int(gold.argmax())
            model, beta, *_ = described(study, setting)
            cells = [f"{x:.{digits}f}" for i in (best, -1) for x, digits in ((kl[i], 1), (gold[i], 2), (proxy[i], 2))]
            rows.append([model, beta, str(len(values["kl"])), f"{episodes[best]:,}", *cells])
    return markdown(rows)


def limits_table(study) -> str:
    """What was tried against the limits of RLOO."""
    seeds = study.plan.few_seeds
    columns = [column for column in COLUMNS if column[1][0] == "sampled"]
    rows = [["", "seeds", *(column[0] for column in columns)]]
    chosen = study.chosen() or study.plan.old
    for title, setting in (("chosen", chosen), ("norm of the gradient not limited", study.without_limit())):
        found = list(having(study, setting, seeds, "validation").values())
        if found:
            rows.append([title, str(len(found)), *measures(found, columns)])
    return markdown(rows)


# ---- Pictures --------------------------------------------------------------------------------------------------------

PANELS = [("score", "reward model's score", 1), ("gold", "gold score", 1), ("win", "gold win rate, %", 100)]


def curves(study, setting, seeds=None) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
    """Episodes, and measure -> its values (seeds, points), of a setting's runs; None where there are none."""
    found = list(having(study, setting, seeds or study.plan.seeds, "curve").values())
    if not found:
        return None
    values = {
        name: np.array([[point["sampled"][name]["mean"] for point in curve] for curve in found])
        for name in found[0][0]["sampled"]
    }
    return np.array([point["episode"] for point in found[0]]), values


def frontier_picture(plt, study, settings, path: Path):
    """What is gained over √KL, by RLOO and by best-of-n."""
    if not any(curves(study, setting) for setting in settings):
        return
    figure, axes = plt.subplots(1, 3, figsize=(15, 5.4))
    settings = [setting for setting in in_order(settings) if setting.beta]  # without a penalty the KL is far larger
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(settings)))
    for axis, (name, title, factor) in zip(axes, PANELS):
        for setting, colour in zip(settings, colours):
            found = curves(study, setting)
            if found:
                _, values = found
                seeds = len(values["kl"])
                label = f"RLOO, β = {setting.beta:g}, {setting.episodes:,} episodes (seeds: {seeds})"
                for i in range(seeds):
                    x, y = np.sqrt(np.maximum(values["kl"][i], 0)), factor * values[name][i]
                    axis.plot(x, y, "o-", ms=3, lw=1, color=colour, label=label if i == 0 else None)
        for run, colour, label in (
            ("sft", "black", "best of 1 … {} of the SFT policy"),
            (f"{study.sampled_settings()[1].name}__1", "tab:red", "best of 1 … {} of the policy where it begins"),
        ):
            sampled = study.best_of_n.value(run, "by_n")
            if sampled:
                x = [np.sqrt(point["kl"]["mean"]) for point in sampled.values()]
                y = [factor * point[name]["mean"] for point in sampled.values()]
                axis.plot(x, y, "s--", color=colour, ms=4, label=label.format(max(map(int, sampled))))
                for n, a, b in zip(sampled, x, y):
                    axis.annotate(n, (a, b), textcoords="offset points", xytext=(-3, 6), ha="right", fontsize=8)
        n = study.plan.distilled
        found = study.runs.value(f"distilled{n}", "test", "sampled")
        if found:
            label = f"fine-tuned on the best of {n}"
            x, y = np.sqrt(found["kl"]["mean"]), factor * found[name]["mean"]
            axis.plot([x], [y], "*", color="tab:orange", ms=12, label=label, zorder=5)
        axis.set_xlabel("√KL from the SFT policy, √nats")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=9)
    figure.suptitle(
        "RLOO and best-of-n by the distance from the SFT policy (points along each run, on fresh test posts)"
    )
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def best_of_n_lines(axis, study, ns: Sequence[str]):
    """The gold win rates of best-of-n as lines, named on the right of the picture."""
    for n in ns:
        win = study.best_of_n.value("sft", "by_n", n, "win")
        if win:
            label = "SFT policy" if n == "1" else f"best of {n}"
            height = 100 * win["mean"]
            axis.axhline(height, color="grey", lw=1, ls=":")
            place = {"xycoords": axis.get_yaxis_transform(), "va": "center", "fontsize": 9}
            axis.annotate(f"{label}: {height:.1f}", (1.01, height), color="dimgrey", **place)


def headline_picture(plt, study, setting, path: Path):
    """The default's gold win rate over episodes."""
    found = curves(study, setting, study.plan.headline_seeds)
    if not found:
        return
    episodes, values = found
    wins = 100 * values["win"]
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    axis.plot(episodes, wins.mean(0), "o-", ms=4, color="tab:blue")
    axis.fill_between(episodes, wins.min(0), wins.max(0), color="tab:blue", alpha=0.2, lw=0)
    axis.annotate(
        f"RLOO, one sample: {wins[:, -1].mean():.1f}",
        (episodes[-1], wins[:, -1].max()),
        xytext=(0, 6),
        textcoords="offset points",
        ha="right",
        color="tab:blue",
    )
    best_of_n_lines(axis, study, ("1", "4", "16"))
    axis.set_ylim(bottom=30)
    axis.set_xlabel("episodes (completions sampled in training)")
    axis.set_ylabel("gold win rate against the references, %")
    axis.set_title(
        f"rloo.py with its default flags on mini TL;DR: fresh held-out posts, sampled at T = 0.7\n"
        f"line: mean of {len(wins)} seeds; band: their range; best of n samples of the SFT policy: by reward",
        fontsize=10,
    )
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def episodes_picture(plt, study, settings, path: Path):
    """Gold win rate over episodes, with what best-of-n reaches as lines."""
    if not any(curves(study, setting) for setting in settings):
        return
    figure, axis = plt.subplots(figsize=(9, 5.5))
    settings = in_order(settings)
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(settings)))
    for setting, colour in zip(settings, colours):
        found = curves(study, setting)
        if found:
            episodes, values = found
            wins = 100 * values["win"]
            seeds = len(wins)
            axis.plot(
                episodes, wins.mean(0), "o-", ms=3, color=colour, label=f"RLOO, β = {setting.beta:g} (seeds: {seeds})"
            )
            if seeds > 1:
                axis.fill_between(episodes, wins.min(0), wins.max(0), color=colour, alpha=0.15, lw=0)
    best_of_n_lines(axis, study, ("1", "4", "16", "64"))
    axis.set_xlabel("episodes")
    axis.set_ylabel("gold win rate over the references, %, sampled at T = 0.7")
    axis.set_title("RLOO by episodes, and the best of n samples of the SFT policy (band: range of seeds)")
    axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=9)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def noisy_picture(plt, study, path: Path):
    """The score that is trained on and the gold score, over √KL, by reward model and β."""
    panels = {}
    for setting in [*study.long_settings(), *study.noisy_settings()]:
        if setting.beta in study.plan.noisy_betas and curves(study, setting):
            panels.setdefault(setting.reward, []).append(setting)
    if not set(panels) - {""}:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.8), sharey=True, squeeze=False)
    for axis, (reward, settings) in zip(axes[0], panels.items()):
        for setting, style in zip(sorted(settings, key=lambda x: x.beta), ("o-", "s--")):
            _, values = curves(study, setting)
            proxy = "proxy" if reward else "score"
            for name, label, colour in ((proxy, "reward model trained on", "tab:orange"), ("gold", "gold", "tab:blue")):
                for i in range(len(values["kl"])):
                    x = np.sqrt(np.maximum(values["kl"][i], 0))
                    gained = values[name][i] - values[name][i][0]
                    label_of_line = f"{label}, β = {setting.beta:g}" if i == 0 else None
                    axis.plot(x, gained, style, ms=3, lw=1, color=colour, label=label_of_line)
        axis.axhline(0, color="grey", lw=0.8)
        axis.set_title(f"reward model: {REWARD_MODELS[reward]}", fontsize=10)
        axis.set_xlabel("√KL from the SFT policy, √nats")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("score gained over the SFT policy")
    figure.suptitle(f"Over-optimisation: what is trained on and what is wanted, {study.plan.long_episodes:,} episodes")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=2, fontsize=9)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_tables(study):
    """All tables of the study, into the pages that name them."""
    tables = {
        "sweep": sweep_table(study),
        "robust": robust_table(study),
        "compare": compare_table(study, *study.comparisons()[0], "first choice"),
        "second compare": compare_table(study, *study.comparisons()[1], "chosen"),
        "best of n": best_of_n_table(study),
        "long": long_table(study, in_order({setting for setting, _ in study.long_runs()})),
        "parting": parting_table(study, in_order({*study.long_settings(), *study.noisy_settings()})),
        "limits": limits_table(study),
    }
    insert_tables(tables, study.results)


def insert_tables(tables: dict[str, str], folder: Path, otherwise: str = "tables.md"):
    """Writes tables into the folder's pages, between the lines that name them, or, where there are none, into a page of
    their own."""
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(folder.glob("*.md"))}
    pages = {page: text for page, text in pages.items() if "<!-- end of " in text}
    for page, text in pages.items():
        for name, table in tables.items():
            begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
            if begin in text:
                before, rest = text.split(begin)
                text = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
        page.write_text(text, encoding="utf-8")
    if not pages:
        text = "\n\n".join(f"## {name}\n\n{table}" for name, table in tables.items()) + "\n"
        (folder / otherwise).write_text(text, encoding="utf-8")
    print(f"tables: {', '.join(map(str, pages)) or folder / otherwise}")


def draw_pictures(study):
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("pictures need matplotlib: pip install matplotlib")
        return
    plt.switch_backend("Agg")
    headline_picture(plt, study, study.chosen() or study.plan.old, study.results / "headline.png")
    frontier_picture(plt, study, [*study.long_settings(), study.longest_setting()], study.results / "frontier.png")
    episodes_picture(plt, study, study.long_settings(), study.results / "episodes.png")
    noisy_picture(plt, study, study.results / "overoptimisation.png")
