"""The page of metrics names what a run writes: all of it, and nothing else."""

import re
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import end_runs  # noqa: E402
import kill_runs  # noqa: E402

from rloo_test import count_tokens, read_metrics, tiny, train  # noqa: E402, F401


def test_the_page_of_metrics_has_those_that_a_run_writes(train, tmp_path):  # noqa: F811
    page = Path(__file__).with_name("README.md").read_text()
    flags = {"reward_fns": (f"{__file__}:count_tokens",), "eval_fns": (f"{__file__}:words",)}
    (metrics,), output = train(**flags, output_dir=str(tmp_path / "out"), num_eval_prompts=4, log_completions=True)

    def first_column(head):
        return re.findall(r"`(.*?)`", " ".join(re.findall(r"(?m)^\| ([^|]*) \|", page.split(head)[1].split("\n\n")[0])))

    names = [re.escape(x).replace("<name>", r"\w+").replace(r"\*", r"\w+") for x in first_column("| metric |")]
    assert [x for x in metrics if not any(re.fullmatch(name, x) for name in names)] == []
    assert [name for name in names if not any(re.fullmatch(name, x) for x in metrics)] == []
    for file in first_column("| in `output_dir`"):
        assert file == "adapter/" or (output / file.replace("<update>", "1")).exists(), file
    grades = ("length", "score", "words", "rewards/reward_model", "rewards/count_tokens")
    expected = {f"{mode}/{x}{end}" for mode in ("sampled", "greedy") for x in grades for end in ("", "_stderr")}
    assert [{*x} - {"update", "episode"} for x in read_metrics(output, "evaluations")] == [expected] * 2


def words(prompts, completions, completion_ids, **columns):
    return [len(text.split()) for text in completions]


def test_runs_are_logged_and_resumed_ones_continue_their_log(train, monkeypatch):  # noqa: F811
    logged, started = [], []
    service = types.SimpleNamespace(
        init=lambda **flags: started.append(flags) or service,
        log=lambda metrics, step: logged.append((step, metrics)),
        Table=lambda columns, rows: (columns, rows),
    )
    monkeypatch.setitem(sys.modules, "wandb", service)
    names = {"wandb_project_name": "project", "wandb_entity": "team"}
    metrics, output = train(track=True, total_episodes=48, num_eval_prompts=4, **names)
    assert started[0].items() >= {"project": "project", "entity": "team", "name": output.name}.items()
    assert [step for step, _ in logged] == [0, 0, 1, 2, 3, 3, 3] and [x for _, x in logged[2:5]] == metrics
    samples = read_metrics(output, "completions")
    for n, evaluation in enumerate(read_metrics(output, "evaluations")):
        (_, values), (_, table) = sorted(logged[5 * n : 5 * n + 2], key=lambda entry: "samples" in entry[1])
        assert values == {f"eval/{name}": x for name, x in evaluation.items()}
        columns, rows = table["samples"]
        assert columns == ["mode", "query", "response", "grades"]
        texts = [[x["mode"], x["prompt"], x["completion"]] for x in samples if x["update"] == evaluation["update"]]
        assert [row[:3] for row in rows] == texts
    train(track=True, total_episodes=64, output_dir=str(output), resume=True)
    train(track=True)
    one, resumed, other = (flags["id"] for flags in started)
    assert one == resumed != other and {flags["resume"] for flags in started} == {"allow"}


def test_the_page_says_what_was_recorded_of_stopped_and_killed_runs():
    page = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    said = kill_runs.sentence(kill_runs.common.Records(kill_runs.RECORDS))
    ends = end_runs.table(kill_runs.common.Records(end_runs.RECORDS))
    assert kill_runs.common.filled(page, {"kills": said, "ends": ends}) == page


def test_runs_killed_at_random_moments_and_resumed_end_like_one_that_was_not(tiny, tmp_path):  # noqa: F811
    """SIGKILL, also during a save; kill_runs.py does the same more often."""
    counts = kill_runs.run(tmp_path / "kill", kills=3, seed=1, models=tiny, data=tiny / "data")
    assert counts["kills"] == 3 and counts["runs"] >= 1 and counts["differences"] == 0
