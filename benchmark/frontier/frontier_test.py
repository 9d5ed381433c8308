"""Tests of the study of what RLOO can reach: posts, estimates, choice, records.

python -m pytest -q benchmark/frontier/frontier_test.py
"""

import itertools
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import distil  # noqa: E402
import estimates  # noqa: E402
import frontier  # noqa: E402
import measure  # noqa: E402
import report  # noqa: E402

import rloo  # noqa: E402

# ---- Posts -----------------------------------------------------------------------------------------------------------


def test_fresh_posts_share_no_combination_of_facts():
    kinds = [measure.shipped_combinations()]
    for kind, size in measure.FRESH.items():
        combinations = [measure.combination(post) for post in measure.fresh_posts(kind)]
        assert len(set(combinations)) == size  # none twice
        kinds.append(set(combinations))
    for one, other in itertools.combinations(kinds, 2):
        assert not one & other


def test_fresh_posts_are_always_the_same():
    first = measure.fresh_posts("test", 5)
    measure.all_fresh_posts.cache_clear()
    assert measure.fresh_posts("test", 5) == first
    assert measure.fresh_posts("test")[:5] == first
    assert measure.fresh_posts("validation", 5) != first


def test_rloos_defaults_are_those_of_the_study():
    """Without any flag, and by the command of the default's runs."""
    plain, ours = (
        rloo.resolve_args(rloo.parse_args(words)) for words in (["--seed", "3"], frontier.DEFAULT.command(3)[1:])
    )
    plain.output_dir = ours.output_dir
    assert plain == ours


# ---- Estimates -------------------------------------------------------------------------------------------------------


def test_best_of_n_is_the_mean_over_all_choices_of_n():
    rng = np.random.default_rng(1)
    scores, values = rng.integers(0, 4, (3, 7)).astype(float), rng.normal(size=(3, 7))  # with ties
    for n in (1, 2, 3, 7):
        weights = estimates.best_of_n_weights(scores, n)
        for line in range(3):
            means = []
            for chosen in itertools.combinations(range(7), n):
                highest = max(scores[line, i] for i in chosen)
                means.append(np.mean([values[line, i] for i in chosen if scores[line, i] == highest]))
            assert math.isclose((weights[line] * values[line]).sum(), np.mean(means), abs_tol=1e-12)


@pytest.mark.parametrize("n", [2, 4, 64])
def test_kl_of_best_of_n_is_exact_where_completions_repeat(n):
    probability = np.random.default_rng(1).dirichlet(np.ones(6))  # in the order of their scores
    quantile = np.cumsum(probability)
    chosen = quantile**n - (quantile - probability).clip(0) ** n
    exact = (chosen * np.log(chosen / probability))[chosen > 0].sum()
    below = (chosen * estimates.kl_below_bound(probability, quantile, n)).sum()
    assert math.isclose(estimates.kl_bound(n) - below, exact, rel_tol=1e-6)


def test_kl_of_best_of_n_is_the_bound_where_nothing_repeats():
    below = estimates.kl_below_bound(np.array([1e-9, 1e-5]), np.array([0.5, 1.0]), 16)
    assert np.all(below < 1e-6)


def test_best_of_one_is_the_mean():
    rng = np.random.default_rng(1)
    grades = {name: rng.normal(size=(4, 8)) for name in ("score", "win", "kl")} | {"logprob": -np.full((4, 8), 9.0)}
    found = estimates.best_of_n(grades, 1)
    assert math.isclose(found["win"]["mean"], grades["win"].mean(), abs_tol=1e-5)
    assert math.isclose(found["kl"]["mean"], grades["kl"].mean(), abs_tol=1e-5)


def test_intervals_cover_the_mean_in_95_of_100_cases():
    rng = np.random.default_rng(1)
    seeds = 1.0 + rng.normal(0, 1.0, (2_000, 4))
    covered = np.mean([low < 1.0 < high for low, high in map(estimates.interval_over_seeds, seeds)])
    assert 0.93 < covered < 0.97
    effects = rng.normal(0, 0.5, (2_000, 4, 1)) + rng.normal(0, 2.0, (2_000, 1, 30)) + rng.normal(0, 1, (2_000, 4, 30))
    covered = np.mean([low < 0.0 < high for low, high in map(estimates.interval_over_seeds_and_posts, effects)])
    assert covered > 0.95


def test_wins():
    gold, reference = np.array([[1.0, 2.0], [3.0, 0.1 + 0.2]]), np.array([[1.0], [0.3]])
    assert measure.wins(gold, reference).tolist() == [[0.5, 1.0], [1.0, 0.5]]


# ---- Settings and the choice of one ----------------------------------------------------------------------------------


def all_settings():
    plan = frontier.Plan()
    return [
        plan.old,
        *plan.grid,
        *frontier.around(plan.grid[0]),
        replace(plan.old, reward="noisy10"),
        replace(plan.old, norm=0.0),
    ]


def test_names_are_unique():
    settings = set(all_settings())
    assert len({setting.name for setting in settings}) == len(settings)


def test_commands_are_of_rloo_and_have_the_completions_that_they_say():
    for setting in all_settings():
        args = rloo.parse_args(setting.command(seed=3)[1:])
        steps = args.per_device_train_batch_size * args.gradient_accumulation_steps
        assert steps * args.num_mini_batches == setting.size
        assert (args.seed, args.learning_rate, args.kl_coef) == (3, setting.lr, setting.beta)
        assert (args.max_grad_norm, args.adam_eps) == (setting.norm, setting.eps)
        assert (args.rloo_k, args.num_ppo_epochs, args.total_episodes) == (4, 1, 6_400) or setting != frontier.OLD


def study_with(tmp_path, wins: dict, plan=None, seconds=None):
    """A study whose runs have been found to win so often: (setting, seed) -> share."""
    study = frontier.Study(plan or frontier.Plan(), tmp_path / "runs", tmp_path / "results")
    measures = {name: {"mean": 1.0, "stderr": 0.1} for name in ("score", "gold", "kl", "length")}
    for (setting, seed), win in wins.items():
        found = {"sampled": measures | {"win": {"mean": win, "stderr": 0.01}}}
        found["greedy"] = found["sampled"]
        cost = (seconds or {}).get(setting, 80.0)
        study.runs.add(f"{setting.name}__{seed}", validation=found, cpu_seconds=cost)
    return study


def small_plan(**changes):
    grid = (frontier.OLD, replace(frontier.OLD, size=64), replace(frontier.OLD, size=32))
    return replace(frontier.Plan(), grid=grid, second_grid=0, finalists=2, few_seeds=(1, 2), **changes)


def test_the_choice_is_by_the_mean_over_seeds_of_the_finalists(tmp_path):
    old, middle, small = small_plan().grid
    wins = {(old, 1): 0.60, (old, 2): 0.60, (middle, 1): 0.62, (small, 1): 0.63, (small, 2): 0.61}
    study = study_with(tmp_path, wins, small_plan())
    assert study.finalists() == [small, middle]
    assert study.first_choice() is None  # a finalist lacks a seed
    study = study_with(tmp_path, wins | {(middle, 2): 0.64}, small_plan())
    assert study.first_choice() == middle


def test_the_choice_by_more_seeds_takes_only_what_is_surely_ahead(tmp_path):
    old, middle, small = small_plan().grid
    plan = small_plan(robust=(middle, small), robust_seeds=(1, 2, 3), worthwhile=0.01)
    wins = {(old, seed): 0.60 + 0.01 * seed for seed in (1, 2, 3)}
    wins |= {(middle, seed): wins[old, seed] + lead for seed, lead in ((1, 0.010), (2, 0.011), (3, 0.012))}
    wins |= {(small, seed): wins[old, seed] + lead for seed, lead in ((1, 0.050), (2, 0.060), (3, -0.010))}
    study = study_with(tmp_path / "a", wins, plan)
    assert np.allclose(study.leads(small, (1, 2, 3)), [0.05, 0.06, -0.01])
    assert study.chosen() == middle  # the mean of the other is higher, but its interval has 0
    assert study_with(tmp_path / "b", wins, replace(plan, robust=(small,))).chosen() == old
    del wins[middle, 3]
    assert study_with(tmp_path / "c", wins, plan).chosen() is None
    assert study_with(tmp_path / "d", wins, replace(plan, worthwhile=0.02)).chosen() == old  # middle is no candidate


def test_what_costs_too_much_is_no_finalist(tmp_path):
    old, middle, small = small_plan().grid
    wins = {(setting, seed): win for setting, win in ((old, 0.60), (middle, 0.62), (small, 0.63)) for seed in (1, 2)}
    study = study_with(tmp_path, wins, small_plan(), seconds={small: 113.0})
    assert study.finalists() == [middle, old]
    assert study.first_choice() == middle


def test_long_runs_have_every_beta_once_before_any_has_more_seeds(tmp_path):
    study = study_with(tmp_path, {})
    runs = study.long_runs()
    assert len(set(runs)) == len(runs)
    settings = list(dict.fromkeys(setting for setting, _ in runs))
    assert {setting.beta for setting in settings} == {0.0, 0.01, 0.02, 0.05, 0.1}
    once = [setting for setting in settings if setting.episodes == 25_600]
    assert runs[: len(once)] == [(setting, 1) for setting in once]


def test_what_is_recorded_is_not_made_again(tmp_path, monkeypatch):
    study = study_with(tmp_path, {(frontier.OLD, 1): 0.6})
    monkeypatch.setattr(study, "train", lambda *_: pytest.fail("trained again"))
    study.validate(frontier.OLD, 1)
    again = frontier.Study(frontier.Plan(), tmp_path / "runs", tmp_path / "results")
    assert again.runs.value(f"{frontier.OLD.name}__1", "validation", "sampled", "win", "mean") == 0.6
    assert again.runs.value("no such run", "validation") is None


def test_records_are_json_with_a_line_for_each(tmp_path):
    records = frontier.Records(tmp_path / "records.json")
    records.add("b", one=1)
    records.add("a", two=[2])
    records.add("b", three=3.5)
    assert json.loads(records.path.read_text()) == {"a": {"two": [2]}, "b": {"one": 1, "three": 3.5}}
    assert len(records.path.read_text().splitlines()) == 4


# ---- Tables ----------------------------------------------------------------------------------------------------------


def test_tables_are_written_between_their_marks(tmp_path):
    old, middle, small = small_plan().grid
    wins = {(setting, seed): win for setting, win in ((old, 0.60), (middle, 0.62), (small, 0.63)) for seed in (1, 2)}
    study = study_with(tmp_path, wins, small_plan(robust=(small,), robust_seeds=(1, 2)))
    page = study.results / "README.md"
    page.write_text(
        "before\n<!-- sweep -->\nold table\n<!-- end of sweep -->\n<!-- robust --><!-- end of robust -->\nafter\n"
    )
    report.write_tables(study)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old table" not in text
    assert "| 63.0 ± 0.0 |" in text
    assert "**(first choice)**" in text
    assert "| 0.0005 **(chosen)** | 32 | 0.05 | 2 | 63.0 ± 0.0 |" in text
    assert "| +3.0 [+3.0, +3.0] | +3.0, +3.0 |" in text


# ---- The models ------------------------------------------------------------------------------------------------------


def test_values_belong_to_their_posts():
    engine, posts = measure.Engine(chunk_size=4), measure.fresh_posts("validation", 6)
    found = measure.grade(engine, engine.reference, posts, 1, seed=1, temperature=0.0)
    turned = measure.grade(engine, engine.reference, posts[::-1], 1, seed=1, temperature=0.0)
    for name, values in found.items():
        assert np.allclose(values, turned[name][::-1], atol=1e-4), name
    assert not found["kl"].any()


def test_the_policy_has_no_kl_from_itself():
    engine, posts = measure.Engine(), measure.fresh_posts("validation", 4)
    again = engine.policy(measure.TASK / "sft")  # not known to be the reference
    found = measure.grade(engine, again, posts, 2, seed=1)
    assert found["kl"].shape == (4, 2)
    assert np.abs(found["kl"]).max() < 1e-3


def test_tables_go_between_the_lines_that_name_them(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("above\n<!-- sweep -->\nold\n<!-- end of sweep -->\nbelow\n")
    report.insert_tables({"sweep": "| new |", "not there": "| x |"}, tmp_path)
    assert page.read_text() == "above\n<!-- sweep -->\n| new |\n<!-- end of sweep -->\nbelow\n"


def test_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plan = frontier.Plan(headline_seeds=(1,), long_seeds=(1,))
    study = study_with(tmp_path, {}, plan)
    names = ("gold", "kl", "score", "win", "proxy")
    curve = [{"episode": e, "sampled": {name: {"mean": 0.1 * e} for name in names}} for e in (0, 8, 16)]
    settings = [frontier.OLD, *study.long_settings(), *study.noisy_settings()]
    for setting in settings:
        study.runs.add(f"{setting.name}__1", curve=curve)
    report.draw_pictures(study)
    found = {path.name for path in study.results.glob("*.png")}
    assert found == {"headline.png", "frontier.png", "episodes.png", "overoptimisation.png"}


# ---- Fine-tuning on the best of n ------------------------------------------------------------------------------------


def test_a_policy_is_fine_tuned_on_the_best_of_its_samples(capsys):
    engine, n = measure.Engine(chunk_size=16), 4
    rows = engine.rows(measure.fresh_posts("validation", 40))
    rloo.transformers.set_seed(1)
    pairs = distil.sample_best(engine, rows, n)
    assert sorted(row["prompt"] for row, *_ in pairs) == sorted(row["prompt"] for row in rows)

    # the score is that of this completion, and the highest of its n samples
    rloo.transformers.set_seed(1)
    part = sorted(rows, key=lambda row: len(row["prompt_ids"]))[: 16 // n]
    batch, _ = rloo.rollout(engine.reference, part, n, measure.TEMPERATURE, 53, engine.stop_ids, chunk_size=16)
    scores, ids = rloo.score(engine.rewards["score"], (1.0,), batch)[0], batch.completion_ids()
    for b, (row, chosen, score) in enumerate(pairs[: 16 // n]):
        samples = {tuple(ids[j * len(part) + b]): float(scores[j, b]) for j in range(n)}
        assert row is part[b]
        assert math.isclose(score, max(samples.values()), abs_tol=1e-4)
        assert math.isclose(samples[tuple(chosen)], score, abs_tol=1e-4)

    # the likelihood is that at the temperature of sampling
    row, chosen, _ = pairs[0]
    whole = torch.tensor([row["prompt_ids"] + chosen])
    logits = engine.reference(whole).logits[0, len(row["prompt_ids"]) - 1 : -1] / measure.TEMPERATURE
    exact = -logits.log_softmax(-1)[range(len(chosen)), chosen].sum()
    with torch.no_grad():
        assert torch.allclose(distil.nll(engine.reference, pairs[:3], engine.stop_ids)[0], exact, atol=1e-3)

    policy = rloo.load_model(engine.args, "--policy", str(measure.TASK / "sft"), trained=True)
    with torch.no_grad():
        before = distil.nll(policy, pairs, engine.stop_ids).mean()
    assert distil.fine_tune(policy, pairs[:32], pairs, engine.stop_ids, 5e-4, epochs=3) < before


def test_the_parting_table_has_the_highest_gold_score_and_the_end(tmp_path):
    study = study_with(tmp_path, {})
    setting = study.long_settings()[0]
    for seed, golds in ((1, (2.0, 4.0, 3.0)), (2, (2.0, 5.0, 3.5))):
        curve = [
            {"episode": e, "sampled": {name: {"mean": x} for name, x in (("gold", g), ("kl", e), ("score", e / 2))}}
            for e, g in zip((0, 8, 16), golds)
        ]
        study.runs.add(f"{setting.name}__{seed}", curve=curve)
    line = report.parting_table(study, [setting]).splitlines()[-1]
    assert line == f"| embedded task's | {setting.beta:g} | 2 | 8 | 8.0 | 4.50 | 4.00 | 16.0 | 3.25 | 8.00 |"
