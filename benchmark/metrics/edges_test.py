"""The edges of a run: screens that close, trackers that die, folders that move, files with odd names.

Ctrl-C through tee, SIGHUP, SIGTERM to a pool as well, an error in metrics and a full disk: see end_runs.py.
"""

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import sys
import threading
import types
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]
import end_runs  # noqa: E402

import rloo  # noqa: E402
from rloo_test import modules_of_this_test  # noqa: E402, F401

USER = {"role": "user", "content": "b c"}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with a policy, data and a reward function."""
    folder = tmp_path_factory.mktemp("edges")
    end_runs.save_policy(folder / "policy")
    rows = [json.dumps({"prompt": f"a post about {n}"}) for n in range(16)]
    (folder / "data.jsonl").write_text("\n".join(rows))
    (folder / "plain.py").write_text("def brief(completions, **columns):\n    return [-len(x) for x in completions]\n")
    return folder


@pytest.fixture
def train(files, monkeypatch):
    """Runs `python rloo.py` in the folder, three updates by default."""
    monkeypatch.chdir(files)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for stream in ("stdout", "stderr"):  # command_line replaces them
        monkeypatch.setattr(sys, stream, getattr(sys, stream))

    def run(output, *flags, total_episodes=12, sft_model_path="policy", **replacements):
        given = {"sft_model_path": sft_model_path, "dataset_name": "data.jsonl", "output_dir": output, "device": "cpu"}
        given |= {"rloo_k": 2, "per_device_train_batch_size": 4, "response_length": 4, "num_sample_generations": 0}
        given |= {"num_eval_prompts": 0, "total_episodes": total_episodes, "reward_fns": "plain.py:brief"}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        rloo.command_line([*words, *flags], **replacements)

    return run


def saved(output: Path) -> set[str]:
    return {path.name for path in output.glob("checkpoint-*")}


def test_what_is_done_when_a_run_is_ended_stays(tmp_path):
    """One run of each kind; end_runs.py has 20 of each."""
    found = end_runs.run(tmp_path / "ends", number=1, seed=1)
    for kind, counts in found.items():
        lost = 1 if kind == "full disk" else 0  # there the save of that update has failed
        assert counts == {"runs": 1, "updates lost": lost, "differences": 0}, kind


class ClosedTerminal:
    """A stream whose terminal is gone."""

    encoding = "utf-8"

    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")

    def flush(self):
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("stream", [ClosedTerminal(), None])
def test_a_run_whose_output_cannot_be_written_goes_on(train, tmp_path, monkeypatch, stream):
    """None: the process was started with `>&- 2>&-`."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        train(tmp_path / "out")
    assert saved(tmp_path / "out") == {"checkpoint-3"}


def test_a_hangup_that_nohup_has_made_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with rloo.noted_signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)


def tracker(log=lambda metrics, step: None):
    return types.SimpleNamespace(init=lambda **options: types.SimpleNamespace(log=log), Table=lambda *inputs: None)


def test_a_tracker_that_dies_ends_the_run_with_its_error_and_a_checkpoint(train, tmp_path, monkeypatch):
    def log(metrics, step):
        if step == 2:
            raise ConnectionResetError("Connection lost")

    monkeypatch.setitem(sys.modules, "wandb", tracker(log))
    with pytest.raises(ConnectionResetError):
        train(tmp_path / "out", "--track")
    assert saved(tmp_path / "out") == {"checkpoint-2"}


def test_a_tracker_without_a_key_or_package_is_one_line_before_anything_is_loaded(train, tmp_path, monkeypatch):
    def no_key(**options):
        raise RuntimeError("No API key configured. Use `wandb login` to log in.\nSecond line")

    def load_policy(*inputs):
        pytest.fail("a model is loaded")

    for module, said in ((types.SimpleNamespace(init=no_key), "No API key configured"), (None, "ModuleNotFoundError")):
        monkeypatch.setitem(sys.modules, "wandb", module)
        with pytest.raises(SystemExit, match=f"--track: .*{said}") as ended:
            train(tmp_path / "out", "--track", load_policy=load_policy)
        assert "\n" not in str(ended.value)
        assert not (tmp_path / "out").exists()


def test_no_file_is_locked(train, tmp_path, monkeypatch):
    """Lustre and NFS may have no locks."""

    def no_locks(*inputs):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    train(tmp_path / "out")
    assert saved(tmp_path / "out") == {"checkpoint-3"}


def test_a_run_goes_on_where_its_folder_and_its_files_have_moved_to(train, files, tmp_path, capsys):
    train(tmp_path / "old", total_episodes=4)
    shutil.move(tmp_path / "old", tmp_path / "new")
    shutil.copytree(files / "policy", tmp_path / "policy")
    train(tmp_path / "new", "--resume", sft_model_path=f"{tmp_path}/policy/")
    said = capsys.readouterr().out
    assert f"sft_model_path policy -> {tmp_path}/policy/" in said and "output_dir" in said
    updates = [json.loads(line)["update"] for line in (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()]
    assert updates == [1, 2, 3]


class MistralCommon:
    """What rloo.py meets of transformers' class for tokenizers of mistral-common: a template without chat_template, no
    sep_token_id, and no special token that comes from a text."""

    chat_template = None
    bos_token = "<s>"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, tools, tokenize, return_dict, **options):
        texts = [self(message["content"], add_special_tokens=False)["input_ids"] for message in messages]
        return {"input_ids": [1, 3, *sum(texts, []), 4]}


def test_ids_of_messages_are_those_of_the_tokenizers_own_template():
    tokenizer = MistralCommon()
    assert rloo.prepare_example({"prompt": [USER]}, tokenizer)["prompt_ids"] == [1, 3, *map(ord, "b c"), 4]
    assert rloo.prepare_example({"prompt": "b c"}, tokenizer)["prompt_ids"] == [1, *map(ord, "b c")]
    with pytest.raises(rloo.InputError, match="`tools` must be a list"):
        rloo.prepare_example({"prompt": [USER], "tools": "[]"}, tokenizer)


def test_the_command_line_runs_in_a_thread_of_a_notebook(train, tmp_path, monkeypatch):
    """... whose output has no `reconfigure`; and signals are handled as before, once a run has ended."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(tmp_path / "main", total_episodes=4)
    thread = threading.Thread(target=train, args=[tmp_path / "thread"])
    thread.start()
    thread.join()
    assert saved(tmp_path / "thread") == {"checkpoint-3"} and screen.getvalue().count("results: ") == 2
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_reward_function_may_be_in_the_script_that_runs(tmp_path, monkeypatch):
    """Importing it would run the script again. A script that is no file, as a notebook, may use one of a file."""
    script = tmp_path / "mine.py"
    script.write_text("def reward(completions, **columns): return [1.0]")
    running = types.ModuleType("__main__")
    running.reward = tracker
    monkeypatch.setitem(sys.modules, "__main__", running)
    for first, expected in ((str(script), tracker), ("-", None), ("", None)):
        monkeypatch.setattr(sys, "argv", [first])
        found = rloo.load_function(f"{script}:reward")
        assert found is expected or expected is None and found([]) == [1.0]


def test_a_reward_function_may_be_in_a_package_of_the_working_directory_or_in_a_file_with_a_dot(tmp_path, monkeypatch):
    """... and it may import what lies beside it. Functions of one file share its variables; a file with the name of a
    module that is loaded must be renamed."""
    monkeypatch.chdir(tmp_path)
    for folder in ("rewards", "a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "rewards" / "__init__.py").write_text("")
    (tmp_path / "rewards" / "beside.py").write_text("one = 1.0")
    (tmp_path / "rewards" / "length.py").write_text("from .beside import one\ndef reward(**columns): return [one]")
    (tmp_path / "beside_it.py").write_text("two = 2.0")
    (tmp_path / "my.rewards.v2.py").write_text("from beside_it import two\ndef reward(**columns): return [two]")
    for file in ("json.py", "a/same.py", "b/same.py"):
        (tmp_path / file).write_text("def reward(**columns): return [3.0]\n\ndef other(**columns): return []")
    specs = ("my.rewards.v2.py", "a/same.py", "rewards.length")
    assert [rloo.load_function(f"{spec}:reward")() for spec in specs] == [[2.0], [3.0], [1.0]]
    reward, other = (rloo.load_function(f"{tmp_path}/a/same.py:{name}") for name in ("reward", "other"))
    assert reward.__globals__ is other.__globals__
    for file in ("json.py", "b/same.py"):
        with pytest.raises(rloo.InputError, match=f"{file}:reward: rename it"):
            rloo.load_function(f"{file}:reward")
    assert sys.modules["json"] is json


def test_only_the_files_of_a_checkpoint_are_written_to_disk_and_before_it_has_its_name(train, tmp_path, monkeypatch):
    """os.sync waits for everything that the machine writes."""
    synced = set()

    def fsync(file):
        assert not saved(tmp_path / "out")
        synced.add(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).name)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("the whole machine"))
    train(tmp_path / "out")
    assert synced == {path.name for path in (tmp_path / "out" / "checkpoint-3").rglob("*") if path.is_file()}


def test_two_runs_that_begin_in_the_same_second_do_not_share_a_folder(tmp_path):
    """The name of the default folder has the time in seconds, and jobs of an array begin together."""
    rloo.begin_files({"resume": False, "log_completions": False}, tmp_path / "out", None, 0)
    with pytest.raises(FileExistsError):
        rloo.begin_files({"resume": False, "log_completions": False}, tmp_path / "out", None, 0)
    rloo.begin_files({"resume": True, "log_completions": False}, tmp_path / "out", None, 0)
