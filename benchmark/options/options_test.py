"""Tests of the study of the options: commands, verdicts, tables, picture."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "frontier")]
import estimates  # noqa: E402
import options  # noqa: E402
import options_tables  # noqa: E402

import rloo  # noqa: E402


def make_study(folder: Path, wins: dict[str, float], seeds=(2, 3, 4)) -> options.Options:
    """A study in which the options of `wins` have all their runs."""
    study = options.Options(options.Plan(seeds=seeds, test_posts=50), folder / "runs", folder / "results", {})
    rng = np.random.default_rng(1)
    for option in options.OPTIONS:
        if option.name not in wins:
            continue
        while True:  # the trial with the option's own learning rate is the best
            missing = [trial for trial in study.trials(option) if study.win(trial) is None]
            for trial in missing:
                win = 0.6 if trial.lr == option.lr else 0.5
                study.runs.add(f"{trial.name}__1", command="", validation={"sampled": {"win": {"mean": win}}})
            if not missing:
                break
        for seed in study.seeds(option):
            per_post = rng.binomial(20, np.clip(wins[option.name], 0, 1), 50)
            mean = {"mean": float(per_post.mean() / 20), "stderr": 0.01}
            names = [column[1][1] for column in options_tables.COLUMNS]
            name = f"{study.best(option).name}__{seed}"
            study.runs.add(name, test={"sampled": dict.fromkeys(names, mean)})
            study.posts.add(name, **{"test/sampled/win": per_post.tolist()})
    return study


def test_every_option_is_a_change_of_the_default_that_rloo_accepts(tmp_path):
    study = options.Options(options.Plan(), tmp_path / "runs", tmp_path / "results", {})
    seen = set()
    for option in options.OPTIONS:
        command = study.first_trial(option).command(1)
        rloo.resolve_args(rloo.parse_args(command[3:]))
        flags = options_tables.flags(study, option)
        assert (flags == "") == (option.name == "default")
        assert flags not in seen
        seen.add(flags)


def test_an_option_that_takes_over_a_learning_rate_keeps_its_own_change(tmp_path):
    study = make_study(tmp_path, {"default": 0.5, "beta_0": 0.5, "epochs_4": 0.5, "no_clip": 0.5})
    found = {name: study.best(next(x for x in options.OPTIONS if x.name == name)) for name in ("beta_0", "no_clip")}
    assert found["beta_0"].beta == 0 and found["beta_0"].lr == options.LR
    assert found["no_clip"].lr == options.LR / 2 and "--cliprange" in found["no_clip"].command(1)


def test_the_default_has_three_times_as_many_seeds(tmp_path):
    study = options.Options(options.Plan(), tmp_path / "runs", tmp_path / "results", {})
    counts = {option.name: len(set(study.seeds(option))) for option in options.OPTIONS}
    assert counts.pop("default") == 9 and set(counts.values()) == {3}


@pytest.mark.parametrize(
    "interval, narrow, expected",
    [
        ((0.1, 3), (0.2, 2.9), "better"),
        ((-3, -0.1), (-2.9, -0.2), "worse"),
        ((-0.6, 1.1), (-0.5, 0.9), "the same"),
        ((-0.6, 1.2), (-0.5, 1.1), "not told apart"),
        ((-1.2, 0.6), (-1.1, 0.5), "not told apart"),
        ((0.1, 0.5), (0.2, 0.4), "better"),
    ],
)
def test_verdicts(interval, narrow, expected):
    assert options_tables.verdict(interval, narrow) == expected


def test_differences_are_found_with_their_sign(tmp_path):
    study = make_study(tmp_path, {"default": 0.5, "std": 0.9, "beta_0": 0.1})
    found = {option.name: x for option, x in options_tables.comparisons(study).items()}
    assert found["std"][3] == "better" and 30 < found["std"][0] < 50
    mean, *_, margin = found["std"]
    assert mean < margin < found["std"][2]  # the end of the 90% interval
    assert found["beta_0"][4] > -found["beta_0"][0] > 0
    assert found["beta_0"][3] == "worse" and found["beta_0"][1] < found["beta_0"][0] < found["beta_0"][2] < 0
    options_tables.write_tables(study)
    text = (study.results / "tables.md").read_text()
    assert "Better than the default**: advantage: divided by" in text and "**Worse**: KL: β = 0" in text
    assert "`--kl_coef 0`" in text and "**0.00025 → 60.0**" in text


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib")
def test_the_picture_is_drawn(tmp_path):
    study = make_study(tmp_path, {"default": 0.5, "std": 0.52})
    options_tables.draw_picture(study)
    assert (study.results / "differences.png").stat().st_size > 10_000


def test_interval_of_a_difference_holds_the_truth_in_19_of_20_cases():
    """... and the narrower one in 9 of 10: seeds, posts and chance within a run each add their part."""
    rng, inside, narrow, n = np.random.default_rng(1), 0, 0, 400
    for _ in range(n):
        posts = rng.normal(0, 0.3, 60)

        def draw(seeds, posts=posts, effect=0.0):
            own = rng.normal(0, 0.1, 60)  # what the setting does to a post
            return effect + posts + own + rng.normal(0, 0.05, (seeds, 1)) + rng.normal(0, 0.5, (seeds, 60))

        ours, theirs = draw(5, effect=0.2), draw(10)
        low, high = estimates.interval_of_difference(ours, theirs)
        inside += low < 0.2 < high
        low, high = estimates.interval_of_difference(ours, theirs, estimates.T_QUANTILES_90)
        narrow += low < 0.2 < high
    assert 0.92 < inside / n < 0.99 and 0.86 < narrow / n < 0.94


def test_records_are_of_options_that_exist():
    """Of the runs that the repository keeps."""
    file = HERE / "options.json"
    records = json.loads(file.read_text()) if file.is_file() else {}
    names = {option.name for option in options.OPTIONS}
    assert all(name == "sft" or name.split("_lr")[0] in names for name in records)
