"""What a run leaves and what happens at its edges: the page names all that is written; runs that are ended, killed or
logged; reward functions in odd places.

python -m pytest -q benchmark/metrics
"""

import json
import os
import re
import sys
import types
from pathlib import Path

import end_runs
import kill_runs
import pytest
from kill_runs import common

import rloo
from rloo_test import command, forkserver, read_metrics

PAGE = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


@pytest.fixture
def train(tiny):
    """Runs `python rloo.py`: three updates, if not told otherwise."""

    def run(output, *flags, **changed):
        given = {"per_device_train_batch_size": 4, "total_episodes": 12, "num_eval_prompts": 4} | changed
        rloo.command_line([*command(tiny, output, **given), *flags])

    return run


def saved(output: Path) -> set[str]:
    return {path.name for path in output.glob("checkpoint-*")}


# ---- What a run writes -----------------------------------------------------------------------------------------------


def test_the_page_has_the_files_metrics_and_grades_that_a_run_writes(train, tmp_path):
    functions = {"reward_fns": "rloo_test:constant_reward", "eval_fns": "rloo_test:count_tokens"}
    train(tmp_path, "--log_completions", **functions, total_episodes=4, save_steps=1)
    (metrics,) = read_metrics(tmp_path)

    def first_column(head):
        return re.findall(r"`(.*?)`", " ".join(re.findall(r"(?m)^\| ([^|]*) \|", PAGE.split(head)[1].split("\n\n")[0])))

    names = [re.escape(x).replace("<name>", r"\w+").replace(r"\*", r"\w+") for x in first_column("| metric |")]
    assert [x for x in metrics if not any(re.fullmatch(name, x) for name in names)] == []
    assert [name for name in names if not any(re.fullmatch(name, x) for x in metrics)] == []
    for file in first_column("| in `output_dir`"):
        assert file == "adapter/" or (tmp_path / file.replace("<update>", "1")).exists(), file
    grades = ("length", "score", "count_tokens", "rewards/reward_model", "rewards/constant_reward")
    ends = [end for end in ("", "_stderr", "_count") if not end or f"*{end}`" in PAGE]
    expected = {f"{mode}/{x}{end}" for mode in ("sampled", "greedy") for x in grades for end in ends}
    written = read_metrics(tmp_path, "evaluations")
    assert [{*x} - {"update", "episode"} for x in written] == [expected] * 2


def test_runs_are_logged_and_resumed_ones_continue_their_log(train, tmp_path, monkeypatch):
    logged, started = [], []
    service = types.SimpleNamespace(
        init=lambda **flags: started.append(flags),
        log=lambda metrics, step: logged.append((step, metrics)),
        Table=lambda columns, rows: (columns, rows),
    )
    monkeypatch.setitem(sys.modules, "wandb", service)
    output = tmp_path / "out"
    train(output, "--track", wandb_project_name="project", wandb_entity="team")
    assert started[0].items() >= {"project": "project", "entity": "team", "name": "out"}.items()
    assert [step for step, _ in logged] == [0, 0, 1, 2, 3, 3, 3]
    assert [x for _, x in logged[2:5]] == read_metrics(output)
    samples = [x for x in read_metrics(output, "completions") if x["mode"] == "sampled"]
    for n, evaluation in enumerate(read_metrics(output, "evaluations")):
        (_, table), (_, values) = logged[5 * n : 5 * n + 2]
        assert values == {f"eval/{name}": x for name, x in evaluation.items()}
        columns, rows = table["samples"]
        assert columns == ["query", "response", "grades"]
        texts = [[x["prompt"], x["completion"]] for x in samples if x["update"] == evaluation["update"]]
        assert [row[:2] for row in rows] == texts
    train(output, "--track", "--resume", total_episodes=16)
    train(tmp_path / "other", "--track")
    one, resumed, other = (flags["id"] for flags in started)
    assert one == resumed != other and {flags["resume"] for flags in started} == {"allow"}


def test_the_page_says_what_was_recorded_of_stopped_and_killed_runs():
    ends = end_runs.sentence(common.Records(end_runs.RECORDS))
    assert common.filled(PAGE, {"kills": kill_runs.sentence(common.Records(kill_runs.RECORDS)), "ends": ends}) == PAGE


# ---- Runs that are ended ---------------------------------------------------------------------------------------------


def begin(folder: Path):
    process = forkserver().Process(target=end_some, args=(folder,))
    process.start()
    return process


def end_some(folder: Path):
    """One run of each kind; the scripts end more."""
    found = {"killed": kill_runs.run(folder / "kill", kills=1, seed=1)}
    found["ended"] = end_runs.run(folder / "ends", number=1, seed=1)
    (folder / "found.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def ended(started) -> dict:
    folder, process = started
    process.join(200)
    return json.loads((folder / "found.json").read_text())


def test_a_run_killed_at_a_random_moment_and_resumed_ends_like_one_that_was_not(ended):
    """SIGKILL, also during a save."""
    counts = ended["killed"]
    assert counts["kills"] == counts["runs"] == 1 and counts["differences"] == 0


def test_what_is_done_when_a_run_is_ended_stays(ended):
    for kind, counts in ended["ended"].items():
        lost = 1 if kind == "full disk" else 0  # there the save of that update has failed
        assert counts == {"runs": 1, "updates lost": lost, "differences": 0}, kind


def test_a_tracker_without_a_key_or_package_is_one_line_before_anything_is_loaded(train, tmp_path, monkeypatch):
    def no_key(**options):
        raise RuntimeError("No API key configured. Use `wandb login` to log in.\nSecond line")

    monkeypatch.setattr(rloo, "load_models", lambda *inputs: pytest.fail("a model is loaded"))
    for module, said in ((types.SimpleNamespace(init=no_key), "No API key configured"), (None, "ModuleNotFoundError")):
        monkeypatch.setitem(sys.modules, "wandb", module)
        with pytest.raises(SystemExit, match=f"--track: .*{said}") as ended:
            train(tmp_path / "out", "--track")
        assert "\n" not in str(ended.value) and not (tmp_path / "out").exists()


def test_the_files_of_a_checkpoint_are_on_the_disk_before_it_has_its_name(train, tmp_path, monkeypatch):
    synced = set()

    def fsync(file):
        assert not saved(tmp_path / "out")
        synced.add(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).name)

    monkeypatch.setattr(os, "fsync", fsync)
    train(tmp_path / "out")
    assert synced == {path.name for path in (tmp_path / "out" / "checkpoint-3").rglob("*") if path.is_file()}


# ---- Where a reward function may be ----------------------------------------------------------------------------------


def test_a_reward_function_may_be_in_the_script_that_runs(tmp_path, monkeypatch):
    """Importing it would run the script again. A script that is no file, as a notebook, may use one of a file."""
    script = tmp_path / "mine.py"
    script.write_text("def reward(completions, **columns): return [1.0]")
    running = types.ModuleType("__main__")
    running.reward = len
    monkeypatch.setitem(sys.modules, "__main__", running)
    for first, expected in ((str(script), len), ("-", None), ("", None)):
        monkeypatch.setattr(sys, "argv", [first])
        found = rloo.load_function(f"{script}:reward")
        assert found is expected or expected is None and found([]) == [1.0]


def test_a_reward_function_may_be_in_a_package_of_the_working_directory(tmp_path, monkeypatch):
    """... and it may import what lies beside it. A file with the name of a module that is loaded must be renamed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "__init__.py").write_text("")
    (tmp_path / "rewards" / "beside.py").write_text("one = 1.0")
    (tmp_path / "rewards" / "length.py").write_text("from .beside import one\ndef reward(**columns): return [one]")
    (tmp_path / "beside_it.py").write_text("two = 2.0")
    (tmp_path / "my_rewards.py").write_text("from beside_it import two\ndef reward(**columns): return [two]")
    (tmp_path / "json.py").write_text("def reward(**columns): return [3.0]")
    specs = ("my_rewards.py", "rewards.length")
    assert [rloo.load_function(f"{spec}:reward")() for spec in specs] == [[2.0], [1.0]]
    with pytest.raises(rloo.InputError, match="json.py:reward: rename it"):
        rloo.load_function("json.py:reward")
    assert sys.modules["json"] is json
