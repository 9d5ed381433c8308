"""Tests of the study: posts, measuring, runs, intervals, choices, and the page against its records.

python -m pytest -q benchmark/study
"""

import itertools
import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: nothing is asked for over the network
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import compare  # noqa: E402
import headline  # noqa: E402
import lora  # noqa: E402
import models  # noqa: E402
import peers_trl  # noqa: E402
import reach  # noqa: E402
import study  # noqa: E402
import variants  # noqa: E402

import rloo  # noqa: E402

# ---- Posts and measuring ---------------------------------------------------------------------------------------------


def test_fresh_posts_share_no_combination_of_facts_and_are_always_the_same():
    kinds = [study.shipped_combinations()]
    for kind, size in study.FRESH.items():
        combinations = [study.combination(post) for post in study.fresh_posts(kind)]
        assert len(set(combinations)) == size  # none twice
        kinds.append(set(combinations))
    for one, other in itertools.combinations(kinds, 2):
        assert not one & other
    first = study.fresh_posts("test", 5)
    study.all_fresh_posts.cache_clear()
    assert study.fresh_posts("test", 5) == first != study.fresh_posts("validation", 5)


@pytest.fixture(scope="module")
def engine():
    return study.Engine(chunk_size=16)


def test_values_belong_to_their_posts(engine):
    posts = study.fresh_posts("validation", 6)
    found = study.grade(engine, engine.reference, posts, 1, seed=1, temperature=0.0)
    turned = study.grade(engine, engine.reference, posts[::-1], 1, seed=1, temperature=0.0)
    for name, values in found.items():
        assert np.allclose(values, turned[name][::-1], atol=1e-4), name
    assert not found["kl"].any()


def test_the_policy_has_no_kl_from_itself_and_another_has(engine):
    posts = study.fresh_posts("validation", 4)
    other = engine.policy(study.TASK / "sft")  # not known to be the reference
    assert np.abs(study.grade(engine, other, posts, 2, seed=1)["kl"]).max() < 1e-3
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    assert study.grade(engine, other, posts, 8, seed=1)["kl"].mean() > 0.1


def test_scores_are_of_prompt_and_completion_with_its_stop_token(engine):
    rows = engine.rows(study.fresh_posts("validation", 3))
    batch, _ = engine.rollout(engine.reference, rows, 2, 0.7)
    found, ids = engine.scores(engine.rewards["score"], batch), batch.completion_ids()
    for j, b in itertools.product(range(2), range(3)):
        tokens = ids[j * 3 + b]
        assert tokens[-1] == engine.tokenizer.eos_token_id or len(tokens) == study.RESPONSE_LENGTH
        alone = torch.tensor([rows[b]["prompt_ids"] + tokens])
        assert math.isclose(engine.rewards["score"](alone).logits.item(), found[j, b].item(), abs_tol=1e-4)


def test_wins():
    ours, reference = np.array([[1.0, 2.0], [3.0, 0.1 + 0.2]]), np.array([[1.0], [0.3]])
    assert study.wins(ours, reference).tolist() == [[0.5, 1.0], [1.0, 0.5]]


# ---- Runs and records ------------------------------------------------------------------------------------------------


def test_rloos_defaults_are_those_of_the_study():
    """Without any flag, and by the command of the default's runs."""
    plain, ours = (
        rloo.resolve_args(rloo.parse_args(words)) for words in (["--seed", "3"], reach.DEFAULT.command(3)[1:])
    )
    plain.output_dir = ours.output_dir
    assert plain == ours


def all_trials() -> list[compare.Trial]:
    rows = [*compare.OPTIONS, *compare.PEERS]
    return [compare.Trial(row, 3e-4, row.betas[-1], 6_400, row.size) for row in rows]


def test_commands_have_the_completions_and_settings_that_they_say():
    for setting in [*reach.SHORT_LIST, study.Setting(1e-3, 128, 0.1, 25_600, 4, 8)]:
        args = rloo.parse_args(setting.command(5)[1:])
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == setting.size
        assert (args.seed, args.learning_rate, args.kl_coef) == (5, setting.lr, setting.beta)
        assert (args.rloo_k, args.num_ppo_epochs, args.total_episodes) == (setting.k, setting.epochs, setting.episodes)
    trials = all_trials()
    for found in ([trial.name for trial in trials], [trial.command(1) for trial in trials if not trial.row.trainer]):
        assert len(set(found)) == len(found)  # each of its own
    for trial in trials:
        script, kind, *words = trial.command(5)
        assert (study.ROOT / script).is_file()
        if trial.row.trainer:
            args = peers_trl.parse_args([kind, *words, "--output_dir", "out"])
            assert (args.trainer, args.size, args.beta) == (trial.row.trainer, 128, trial.beta)
            assert args.trainer == "grpo" or (args.epochs, args.value_model) == (
                trial.row.epochs,
                trial.row.value_model,
            )
            assert args.trainer == "ppo" or args.k == trial.row.k
        else:
            assert kind == trial.row.variant in variants.ADVANTAGES
            args = rloo.resolve_args(rloo.parse_args(words))
            assert args.per_device_train_batch_size * args.gradient_accumulation_steps == trial.size
            assert (args.kl_coef, args.rloo_k, args.num_ppo_epochs) == (trial.beta, trial.row.k, trial.row.epochs)
        assert (args.seed, args.learning_rate) == (5, 3e-4)


def test_records_are_json_with_a_line_for_each(tmp_path):
    records = study.Records(tmp_path / "records.json")
    records.add("b", one={"two": 1})
    records.add("a", three=[2])
    records.add("b", four=3.5)
    assert json.loads(records.path.read_text()) == {"a": {"three": [2]}, "b": {"one": {"two": 1}, "four": 3.5}}
    assert len(records.path.read_text().splitlines()) == 4
    assert (records.value("b", "one", "two"), records.value("c", "one", "two")) == (1, None)


class Fake(study.Study):
    """Trains nothing; a checkpoint's win rate is its number."""

    def __init__(self, tmp_path, monkeypatch):
        super().__init__(tmp_path / "runs", tmp_path / "records.json")
        self.commands = []
        monkeypatch.setattr(study, "run_logged", self.pretend)

    def pretend(self, command, log):
        self.commands.append(command)
        folder = log.with_suffix("")
        for name in ("checkpoint-2", "checkpoint-4", "."):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").touch()
        (folder / "metrics.jsonl").write_text('{"cpu_time": 1.5}\n{"cpu_time": 2.0}\n')

    def grade(self, folder, part, posts, seed, greedy, reward=""):
        win = float(folder.name[11:]) if folder.name.startswith("checkpoint") else 0.5
        return {"posts": posts, "sampled": {"win": {"mean": win}}}, {"win": np.full((posts, 2), win)}


def test_a_run_is_made_once_measured_along_the_way_and_recorded(tmp_path, monkeypatch):
    fake = Fake(tmp_path, monkeypatch)
    setting = study.Setting(size=32, episodes=128)
    run = study.Run("some", tuple(setting.command(7)), 7, "test", 9, checkpoints=2, curve_posts=4, reward="folder")
    fake.make(run)
    fake.make(run)
    (command,) = fake.commands
    for flag, value in (("--save_steps", "2"), ("--reward_model_path", "folder"), ("--num_eval_prompts", "1")):
        assert command[command.index(flag) + 1] == value
    rloo.parse_args(command[2:])
    record = json.loads((tmp_path / "records.json").read_text())["some"]
    assert (record["cpu_seconds"], record["test"]["posts"]) == (3.5, 9)
    assert record["command"].startswith("python rloo.py --seed 7") and "--save_steps" not in record["command"]
    assert [point["episode"] for point in record["curve"]] == [0, 64, 128]  # checkpoint-4 is the end
    assert [point["sampled"]["win"]["mean"] for point in record["curve"]] == [0.5, 2.0, 0.5]


# ---- Intervals and tables --------------------------------------------------------------------------------------------


def test_students_t():
    for freedom, expected in ((1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (24, 2.064), (1e4, 1.960)):
        assert math.isclose(study.t_quantile(freedom), expected, abs_tol=2e-3)
        assert math.isclose(study.two_sided_p(-expected, freedom), 0.05, abs_tol=2e-4)
    assert math.isclose(study.t_quantile(5, 0.1), 2.015, abs_tol=1e-3)


def test_differences_are_welchs_and_below_five_seeds_pooled():
    ours, theirs = [3.0, 4.0, 5.0, 6.0, 7.0], [1.0, 1.1, 0.9, 1.2, 0.8]
    x = study.difference(ours, theirs)  # by hand: standard error 0.7106, 4.08 degrees of freedom
    assert math.isclose(x.mean, 4.0) and math.isclose((x.high - x.low) / 2, 2.753 * 0.7106, abs_tol=5e-3)
    few = study.difference(ours[:3], theirs, [ours[:3], theirs, [0.0, 2.0]])  # variances 1, 0.025, 2; 2 + 4 + 1
    error = math.sqrt((2 * 1 + 4 * 0.025 + 1 * 2) / 7 * (1 / 3 + 1 / 5))
    assert math.isclose(few.high - few.mean, study.t_quantile(7) * error, rel_tol=1e-6)
    assert math.isclose(few.p, study.two_sided_p(3 / error, 7), rel_tol=1e-6)


def test_intervals_hold_the_truth_in_19_of_20_cases():
    rng, n = np.random.default_rng(1), 400
    for sizes in ((3, 9), (5, 5)):
        draws = [[rng.normal(i, 1.0, size) for i, size in enumerate(sizes)] + [rng.normal(0, 1, 3)] for _ in range(n)]
        inside = [x.low < 1 < x.high for x in (study.difference(b, a, [a, b, c]) for a, b, c in draws)]
        assert 0.93 < np.mean(inside) < 0.97


def test_holms_correction_and_verdicts():
    assert np.allclose(study.holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    rows = {"base": [0.0, 0.1, 0.2], "up": [5.0, 5.1, 5.2], "same": [0.1, 0.2, 0.3], "down": [-5.0, -5.1, -5.2]}
    found = study.differences(rows, "base")
    assert {name: x.verdict for name, x in found.items()} == {"up": "ahead", "same": "not told apart", "down": "behind"}
    assert found["up"].holm > found["up"].p


def test_tables_go_between_the_lines_that_name_them(tmp_path):
    page = tmp_path / "README.md"
    study.insert(page, {"one": "| a |"})
    assert page.read_text() == "## one\n\n| a |\n"
    page.write_text("above\n<!-- one -->\nold\n<!-- end of one -->\nbelow\n")
    study.insert(page, {"one": "| new |"})
    assert page.read_text() == "above\n<!-- one -->\n| new |\n<!-- end of one -->\nbelow\n"


# ---- Best of n, and variants -----------------------------------------------------------------------------------------


def test_best_of_n_is_the_mean_over_all_choices_of_n():
    rng = np.random.default_rng(1)
    scores, values = rng.integers(0, 4, (3, 7)).astype(float), rng.normal(size=(3, 7))  # with ties
    for n in (1, 2, 3, 7):
        weights = reach.best_of_n_weights(scores, n)
        for line in range(3):
            means = []
            for chosen in itertools.combinations(range(7), n):
                highest = max(scores[line, i] for i in chosen)
                means.append(np.mean([values[line, i] for i in chosen if scores[line, i] == highest]))
            assert math.isclose((weights[line] * values[line]).sum(), np.mean(means), abs_tol=1e-12)
    found = reach.best_of({"score": scores, "kl": 0 * scores}, 2)  # two of equally many: log 2 - 1/2
    assert math.isclose(found["kl"]["mean"], 0.19315, abs_tol=1e-5)


def test_best_of_group():
    rewards = torch.tensor([[1.0, 2.0, math.nan], [3.0, 2.0, -1.0]])
    assert variants.best_of_group(rewards, "rloo").tolist() == [[0, 1, 0], [1, 0, 1]]
    scores, kl = torch.tensor([[1.0], [0.9]]), torch.tensor([[[8.0, 2.0]], [[1.0, 0.0]]])
    chosen = [variants.best_of_group(rloo.rlhf_reward(scores, kl, beta)).tolist() for beta in (0.0, 0.05)]
    assert chosen == [[[1.0], [0.0]], [[0.0], [1.0]]]  # with a KL weight it chooses by score less KL


@pytest.mark.parametrize("variant", ["no_baseline", "raft"])
def test_an_update_follows_the_plain_gradient(variant, monkeypatch, engine):
    policy = engine.policy(study.TASK / "sft", trained=True)
    rows = engine.rows(study.fresh_posts("validation", 3))
    torch.manual_seed(1)
    batch, sampled = rloo.rollout(policy, rows, 2, 0.7, response_length=6, stop_ids=engine.stop_ids)
    scores = torch.tensor([[0.5, 2.0, -1.0], [1.5, 0.3, -0.2]])  # (k, B)
    best = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])

    # The mean over all k·B completions of R · log π(y), or of log π(y) of the best ones.
    logprobs, _ = rloo.completion_logprobs(policy, batch, 0.7)
    plain = ({"no_baseline": scores, "raft": best}[variant] * logprobs.sum(-1)).mean()
    expected = torch.autograd.grad(plain, list(policy.parameters()))

    monkeypatch.setattr(rloo, "rollout", lambda *_, **options: (batch, sampled))
    monkeypatch.setattr(rloo, "advantage", variants.ADVANTAGES[variant])
    monkeypatch.setattr(rloo, "score", lambda *_: (scores, {"given": scores}))
    flags = {"rloo_k": 2, "kl_coef": 0.0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    args = rloo.resolve_args(rloo.Args(**flags, max_grad_norm=0.0, dtype="float32", device="cpu"))
    before = [x.detach().clone() for x in policy.parameters()]
    step = torch.optim.SGD(policy.parameters(), lr=1.0)
    metrics = rloo.update(args, policy, None, {"given": None}, step, rows, {}, "group")
    assert metrics["grad_norm"] > 0.1
    for old, new, gradient in zip(before, policy.parameters(), expected):
        assert torch.allclose(new - old, gradient, atol=2e-6, rtol=1e-3)


def test_both_trainers_logs_become_lines_by_the_same_names(tmp_path):
    marks = peers_trl.Marks(tmp_path, 128)
    marks.on_train_begin()
    for logs in ({"objective/scores": 1.5, "objective/kl": 2.0}, {"reward": 1.6, "kl": 0.1}, {"train_runtime": 3.0}):
        marks.on_log(None, None, None, logs)
    lines = study.read_lines(tmp_path / "metrics.jsonl")
    assert [(line["objective/scores"], line["episode"]) for line in lines] == [(1.5, 128), (1.6, 256)]
    assert all(line["cpu_time"] >= 0 for line in lines)


# ---- Trials and their choice -----------------------------------------------------------------------------------------


def test_trials_follow_the_best_learning_rate():
    first, wins = compare.Trial(compare.RLOO, 4e-4, 0.05, 6_400, 128), {}

    def win(trial):
        return wins.get((trial.lr, trial.beta))

    def plan(number=6):
        return [(trial.lr, trial.beta) for trial in compare.planned(first, number, win) if trial.size == 128]

    begin = [(4e-4, 0.05), (2e-4, 0.05), (8e-4, 0.05)]
    assert plan() == begin
    wins |= {begin[0]: 0.60, begin[1]: 0.61}
    assert plan() == begin  # one is missing
    for high, fourth in ((0.5, 1e-4), (0.7, 1.6e-3)):  # the best one is the lowest, the highest
        wins[begin[2]] = high
        assert plan() == [*begin, (fourth, 0.05)]
        assert plan(3) == begin
    wins |= {begin[0]: 0.65, begin[2]: 0.62}  # the middle, and the upper one is its better neighbour
    assert plan() == [*begin, (5.7e-4, 0.05)]
    wins[5.7e-4, 0.05] = 0.5
    assert plan() == [*begin, (5.7e-4, 0.05), (4e-4, 0.02)]
    for value, beta in ((0.5, 0.05), (0.7, 0.02)):  # the other β is worse, or better
        wins[4e-4, 0.02] = value
        last = compare.planned(first, 6, win)[5]
        assert (last.size, last.lr, last.beta) == (32, 2e-4, beta)


def comparison(tmp_path, kind: str, **wins: float) -> compare.Comparison:
    """A comparison whose rows have all their trials and runs, each with this win rate."""
    found = compare.Comparison(kind, tmp_path / "runs", tmp_path / f"{kind}.json")

    def fake(trial, seed, part):
        value = wins[trial.row.name] - 0.1 * (trial.lr != trial.row.lr) + 0.001 * seed
        measures = {"win": {"mean": value}, "kl": {"mean": 4.0}}
        found.records.add(f"{trial.name}__{seed}", cpu_seconds=80.0, **{part: {"sampled": measures}})

    found.run, found.grade = fake, lambda *_: ({}, {})
    found.fill([found.rows[name] for name in wins])
    return found


def test_the_best_trial_gets_other_seeds_and_options_keep_their_own_change(tmp_path):
    found = comparison(tmp_path, "options", default=0.5, std=0.6, beta_0=0.4, epochs_4=0.5, no_clip=0.5)
    best = {name: found.best(found.rows[name]) for name in ("default", "std", "beta_0", "no_clip")}
    assert best["default"].lr == best["std"].lr == best["beta_0"].lr == 2.5e-4
    assert best["beta_0"].beta == 0 and best["no_clip"].lr == 1.25e-4 and "--cliprange" in best["no_clip"].command(1)
    assert len(found.wins()["default"]) == 9 and len(found.wins()["std"]) == 3
    trials = [name for name, record in found.records.all.items() if "validation" in record]
    assert len(trials) == 9 and all(name.endswith("__1") for name in trials)  # default, std, epochs_4
    assert not [name for name, record in found.records.all.items() if "test" in record and name.endswith("__1")]
    assert [(name, x.verdict) for name, x in found.differences().items()][0] == ("std", "ahead")


def test_a_method_has_six_trials_and_a_variant_takes_over_its_setting(tmp_path):
    found = comparison(tmp_path, "peers", rloo=0.5, ppo=0.7, rloo_k2=0.5)
    assert len([name for name in found.records.all if name.startswith("rloo_lr") and name.endswith("__1")]) == 6
    best, taken_over = found.best(found.rows["rloo"]), found.best(found.rows["rloo_k2"])
    assert taken_over == replace(best, row=found.rows["rloo_k2"]) and taken_over.row.k == 2
    table = compare.peers_table(found)
    assert table.index("| PPO (TRL) | 5 |") < table.index("| RLOO, k = 4 | 5 |") and "k = 2" not in table


def test_all_stages_of_the_small_forms_run(tmp_path, monkeypatch):
    """With runs and measurements that are pretended."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(study, "ROOT", tmp_path)
    names = ("win", "gold", "score", "proxy", "kl", "length")
    found = dict.fromkeys(("sampled", "greedy"), {name: {"mean": 0.5, "stderr": 0.1} for name in names})
    made = Fake(tmp_path, monkeypatch)
    for kind in (reach.Reach, compare.Comparison):
        monkeypatch.setattr(kind, "grade", lambda *_: (found, dict.fromkeys(names, np.full((9, 2), 0.5))))
    monkeypatch.setattr(models, "train_reward_model", lambda folder, *_: folder.mkdir() or {"agreement": 0.7})
    monkeypatch.setattr(study, "Engine", lambda **_: SimpleNamespace(policy=lambda folder: folder))
    monkeypatch.setattr(study, "grade", lambda *given: {name: np.full((3, given[3]), 0.5) for name in names})
    reach.main(quick=True)
    assert len(made.commands) == 6 * 2 + 2 * 2 + 2 + 1  # choice, default, long, noisy
    results = tmp_path / "runs/reach-quick/results"
    assert "| **RLOO, default**: β = 0.02, 128 | 2 | 50.0 |" in (results / "README.md").read_text()
    assert {path.name for path in results.glob("*.png")} == {"episodes.png", "overoptimisation.png"}
    for kind, table in (("options", False), ("peers", True)):
        compare.main(kind, trl0="trl0/bin/python", trl1="trl1/bin/python", quick=True)
        results = tmp_path / f"runs/{kind}-quick/results"
        assert (results / f"{kind}.png").is_file() and (results / "README.md").is_file() == table
    records = json.loads((results / "peers.json").read_text())
    assert records["ppo_lr0.0002_size64_beta0.05__2"]["command"].startswith("trl0/bin/python benchmark/study/peers_trl")


def test_lora_runs_are_recorded_once_and_compared_with_all_weights(tmp_path, monkeypatch):
    """The last evaluation, the KL of the last ten updates, the newest checkpoint."""
    for rank, seed in itertools.product(lora.RANKS, lora.SEEDS):
        run = tmp_path / f"rank{rank}_seed{seed}"
        for update in (100, 200):
            (run / f"checkpoint-{update}").mkdir(parents=True)
            (run / f"checkpoint-{update}" / "optimizer.pt").write_bytes(b"x" * update * 1000)
        rates = [0.1, 0.5 + 0.01 * seed + 0.1 * (rank == 8)]
        lines = [{"sampled/judge_win_rate": x, "greedy/judge_win_rate": x + 0.1} for x in rates]
        (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        updates = [json.dumps({"objective/kl": float(update)}) + "\n" for update in range(20)]
        (run / "metrics.jsonl").write_text("".join(updates))
        (run / "model.safetensors").touch()
    (tmp_path / "README.md").write_text("a <!-- lora -->\n<!-- end of lora --> b")
    monkeypatch.setattr(study, "HERE", tmp_path)
    monkeypatch.setattr(study, "run_logged", lambda *_: pytest.fail("it is finished"))
    lora.main(runs=tmp_path)
    record = json.loads((tmp_path / "lora.json").read_text())["rank 8, seed 2"]
    assert record == pytest.approx({"sampled": 62, "greedy": 72, "kl": 14.5, "checkpoint_mb": 0.2})
    page = (tmp_path / "README.md").read_text()
    assert "| all weights | 3 | 52.0 ± 0.6 |  | 62.0 ± 0.6 | 14.5 ± 0.0 | 0.2 |" in page
    assert "| LoRA of rank 8 | 3 | 62.0 ± 0.6 | +10.0 [" in page


# ---- The pages and their records -------------------------------------------------------------------------------------

PAGE = (HERE / "README.md").read_text(encoding="utf-8")
INDEX = (headline.TOP / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return reach.Reach(reach.Plan(), tmp_path_factory.mktemp("runs"), HERE / "reach.json")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The two comparisons, by their kind."""
    folder = tmp_path_factory.mktemp("runs")
    return {kind: compare.Comparison(kind, folder, HERE / f"{kind}.json") for kind in ("options", "peers")}


def test_the_tables_are_those_of_the_records(ours, compared):
    tables = {"reached": reach.reached_table(ours), "peers": compare.peers_table(compared["peers"])}
    tables["lora"] = lora.table(study.Records(HERE / "lora.json"))
    for page, found in ((PAGE, tables), (INDEX, headline.tables())):
        for name, table in found.items():
            assert f"<!-- {name} -->\n{table}\n<!-- end of {name} -->" in page
        assert all(line.count("|") <= 9 for line in page.splitlines())  # at most eight columns


def test_the_index_names_commands_that_are_there_and_its_answers_repeat_no_number():
    for _, number, *_, command in [*headline.study_rows(), *headline.trainer_rows()]:
        script, *words = command.strip("`").split()[1:]
        assert (study.ROOT / script).is_file()
        assert "--stages" not in words or words[1] in get_args(reach.Stage)
        assert INDEX.count(f"| {number} |") == 1
    assert "37.3 → 63.8 ± 0.4 | 10 |" in INDEX  # of the default; a new choice of it changes this line
    assert not re.findall(r"\d+\.\d+", INDEX.split("## The questions")[1].split("## Conventions")[0])


def test_only_what_survives_holms_correction_is_called_ahead_or_behind(compared):
    told = {kind: {n: x.verdict for n, x in c.differences().items() if x.holm < 0.05} for kind, c in compared.items()}
    assert told["options"] == {"mean": "behind", "beta_0": "behind"}
    assert told["peers"] == {"ppo": "ahead"} | dict.fromkeys(("raft", "raft_k2", "raft_k8", "no_baseline"), "behind")
    ranks = study.differences(lora.wins(study.Records(HERE / "lora.json")), "0")
    assert {rank: x.verdict for rank, x in ranks.items() if x.holm < 0.05} == {"1": "behind"}


def test_the_pages_numbers_are_those_of_the_records(ours, compared):
    """Those of its sentences; the tables are tested above."""
    said = re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", PAGE, flags=re.DOTALL)
    said = re.sub(r"\s+", " ", said).replace("−", "-")
    numbers, records = {name: text for name, (text, _) in headline.numbers().items()}, ours.records
    seeds, penalties = (1, 2, 3), (0.01, 0.02, 0.05, 0.1)

    def measured(setting, seeds, measure="win", part="test"):
        return records.means(ours.names(setting, seeds), part, measure)

    def wins(*given, **more):
        return [100 * x for x in measured(*given, **more)]

    def points(x: study.Difference) -> str:
        return study.with_interval(x).replace(" [", " points [")

    # what RLOO reaches, and over-optimisation
    expected = [f"best of 8 ({numbers['best of 8']}%, on other posts)"]
    best = records.value(ours.names(ours.of(25_600, 0.05), (1,))[0], "best_of_n", "by_n", "4", "win")
    expected.append(f"{study.over_posts(best, 100)}% (one seed, 1,000 posts)")
    apart = ours.beta_differences()["0.02"]
    expected.append(f"0.02 (+{-apart.mean:.1f} points [+{-apart.high:.1f}, +{-apart.low:.1f}], p = {apart.holm:.2f}")
    default, old = (wins(setting, range(7, 17), part="second_test") for setting in (reach.DEFAULT, reach.OLD))
    expected.append("it is " + points(study.difference(default, old)).lstrip("+"))
    expected.append(f"five seeds ({study.with_interval(study.difference(default[:5], old[:5]))})")
    expected.append(f"last five alone give {study.with_interval(study.difference(default[5:], old[5:]))}")
    none, some = ours.of(25_600, 0.0), [ours.of(25_600, beta) for beta in penalties]
    lowest = min(min(wins(setting, seeds)) for setting in some)
    assert max(wins(none, seeds)) < lowest
    expected.append(f"any run with a penalty and the same reward model ({lowest:.1f}% or more)")
    highest = max(max(measured(setting, seeds, "score")) for setting in some)
    collapsed = [seed for seed in seeds if measured(none, (seed,), "score")[0] > highest]
    lengths = [length for setting in some for length in measured(setting, seeds, "length")]
    tokens = "{:.0f} and {:.0f} tokens".format(*measured(none, collapsed, "length"))
    expected.append(f"{tokens} instead of {min(lengths):.0f} to {max(lengths):.0f}.")
    gold = [
        records.value(ours.names(ours.of(25_600, beta), (1,), reward)[0], "test", "sampled", "gold", "mean")
        for beta in (0.0, 0.02)
        for reward in ("noisy10", "noisy25")
    ]
    expected.append("ends at {:.1f} and {:.1f} with β = 0, at {:.1f} and {:.1f} with β = 0.02".format(*gold))
    agree = [100 * records.value(f"reward_{name}", "agreement") for name in ("noisy10", "noisy25")]
    expected.append("{:.0f} and {:.0f}% of pairs".format(*agree))

    # options
    options = compared["options"]
    usual = options.wins()["default"]
    others = {name: wins for name, wins in options.wins().items() if name != "default"}
    assert len(usual) == 9  # "nine seeds"
    expected.append(f"the default** ({study.plus_minus(usual)} on these posts, nine seeds)")
    spread = [np.std(wins, ddof=1) for wins in options.wins().values()]
    expected.append(f"run from {min(spread):.2f} to {max(spread):.1f} points")
    x = options.differences()["epochs_4"]

    def by_welch(wins):
        error, freedom = study.welch(wins, usual)
        return study.two_sided_p(abs(np.mean(wins) - np.mean(usual)) / error, freedom)

    corrected = dict(zip(others, study.holm([by_welch(wins) for wins in others.values()])))
    expected.append(
        f"four epochs (+{x.mean:.1f} points, twice the CPU seconds) would be ahead (p = {corrected['epochs_4']:.2f})"
    )
    behind = [name for name, p in corrected.items() if p < 0.05 and np.mean(others[name]) < np.mean(usual)]
    assert len(behind) == 4 and not {"mean", "beta_0"} & {*behind}  # "four other options behind"
    expected.append(f"the update's mean ({corrected['mean']:.2f}) and β = 0 ({corrected['beta_0']:.2f}) not")
    assert round(options.seconds(options.rows["epochs_4"]) / options.seconds(options.rows["default"])) == 2  # "twice"

    # peers, and vLLM as the engine
    peers, names = compared["peers"], ("PPO, value model from comparisons only", "PPO, value model from the policy")
    expected.append("{} and {}%, three".format(*(numbers[name] for name in names)))
    expected.append(f"two seeds ({numbers['PPO, 1 epoch']}%)")
    longer, runs = compare.longer_runs(HERE / "reach.json")
    equal = study.difference(runs, peers.wins()["ppo"])
    assert equal.verdict == "not told apart" and runs == wins(ours.of(25_600), seeds)
    expected.append(
        f"({study.with_interval(equal)}, three seeds, a comparison outside of the table) after {longer:.0f} CPU"
    )
    ppo, usual = (peers.seconds(peers.rows[name]) for name in ("ppo", "rloo"))
    expected.append(f"{ppo / usual:.0f} times the CPU seconds")
    x = peers.differences()["grpo_trl"]
    corrected = f"p is {x.p:.2f} alone and {x.holm:.1g} after Holm's correction"
    expected.append(f"{corrected} for all {len(peers.differences())} rows")
    engines = study.Records(HERE / "engines.json")
    names = [[f"{engine}__{seed}" for seed in range(1, 6)] for engine in ("vllm", "own")]
    vllm, own = ([100 * x for x in engines.means(runs, "shipped_test", "win")] for runs in names)
    expected.append(f"{study.plus_minus(vllm)} against {study.plus_minus(own)}%")
    expected.append(study.with_interval(study.difference(vllm, own)))
    kl = study.difference(*(engines.means(runs, "shipped_test", "kl") for runs in names))
    expected.append(f"{kl.mean:.1f} nats larger [+{kl.low:.1f}, +{kl.high:.1f}]")
    assert [text for text in expected if text not in said] == []
