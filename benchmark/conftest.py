"""What the tests of this folder share: no network, rloo.py as it was before each, and short runs of extensions."""

import importlib
import itertools
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

# It keeps to one thread and off the network; `tiny` is a fixture.
from rloo_test import forkserver, read_metrics, rloo, tiny, write_rows  # noqa: E402, F401

STARTED = {}  # module -> folder, what its `begin` returned
MINI = ROOT / "benchmark" / "mini_tldr"
GSM8K = ROOT / "benchmark" / "mini_gsm8k"


def forget():
    """The next import of an extension runs its file again, which changes rloo.py."""
    for name in [name for name in sys.modules if name.startswith("benchmark.extensions")]:
        del sys.modules[name]


def load(*names):
    """Imports extensions anew, in this order; returns the last one."""
    forget()
    return [importlib.import_module(f"benchmark.extensions.{name}") for name in names][-1]


@pytest.fixture(autouse=True)
def rloo_as_it_was():
    before = dict(vars(rloo))
    yield
    vars(rloo).update(before)


@pytest.fixture(scope="session", autouse=True)
def other_processes(request, tmp_path_factory):
    """Modules whose tests wait for other processes start them in `begin(folder)`, before the first test of all."""
    for item in request.session.items:
        if "started" in item.fixturenames and item.module not in STARTED:
            folder = tmp_path_factory.mktemp("started")
            STARTED[item.module] = folder, item.module.begin(folder)


@pytest.fixture(scope="module")
def started(request):
    """The folder that the module's `begin` got, and what it returned."""
    return STARTED[request.module]


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


def write_data(folder: Path) -> str:
    """Rows with short prompts: the ends of posts."""
    rows = rloo.load_rows(str(MINI), "validation")[:40]
    rows = [row | {"prompt": row["prompt"][-60:]} for row in rows]
    return write_rows(folder / "rows.jsonl", rows)


@pytest.fixture
def run(data, tmp_path):
    """run(extension, ..., flag=value, ...) -> metrics of each update, and the output folder. Afterwards rloo.py is as
    it was before the call."""
    numbers = itertools.count()

    def run(*extensions: str, **flags):
        flags = {
            "dataset_name": data,
            "sft_model_path": MINI / "sft",
            "reward_model_path": MINI / "reward",
            "response_length": 6,
            "rloo_k": 2,
            "per_device_train_batch_size": 8,
            "total_episodes": 8,
            "learning_rate": 1e-3,
            "temperature": 1.0,
            "num_eval_prompts": 0,
            "device": "cpu",
            "output_dir": tmp_path / f"run{next(numbers)}",
        } | flags
        before = dict(vars(rloo))
        try:
            if extensions:
                load(*extensions)
            rloo.command_line(command_of(flags))
        finally:
            vars(rloo).update(before)
        return read_metrics(Path(flags["output_dir"])), Path(flags["output_dir"])

    return run


def start_script(words, log: Path):
    """Starts `python words` in the root folder, in a process that has imported rloo.py already."""
    process = forkserver().Process(target=script, args=([*map(str, words)], log, dict(os.environ)))
    process.start()
    return process


def script(words, log, environment):
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def command_of(flags: dict) -> list[str]:
    """The words of a command line; a flag that is None is left out."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return words
