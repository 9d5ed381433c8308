"""Tests of common.py (records, logs, statistics, tables, the index) and of all pages: every command parses, and every
file, anchor and name of rloo.py that a page names is there.

python -m pytest -q benchmark/common_test.py
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import common
import numpy as np
import plot
import pytest
import tyro

import rloo


def test_records_are_json_with_a_line_for_each_and_keep_what_others_wrote(tmp_path):
    records = common.Records(tmp_path / "records.json")
    other = common.Records(records.path)
    records.add("b", one={"two": 1})
    other.add("a", three=[2])
    records.add("b", four=3.5)
    assert len(records.path.read_text().splitlines()) == 4
    found = json.loads(records.path.read_text())
    made = [found[name].pop("made") for name in "ab"]
    assert found == {"a": {"three": [2]}, "b": {"one": {"two": 1}, "four": 3.5}}
    assert made[0].keys() == {"rloo.py", "python", "torch", "transformers", "machine", "date"}
    assert (records.value("b", "one", "two"), records.value("c", "one", "two")) == (1, None)
    assert not records.needs("b", "one") and records.needs("b", "two")


def test_what_is_made_again_is_compared_and_overwrites_nothing(tmp_path, capsys):
    common.Records(tmp_path / "records.json").add("a", win=[63.8, 0.5], command="x", curve={"b": 1})
    before = (tmp_path / "records.json").read_text()
    records = common.Records(tmp_path / "records.json", again=True)
    assert records.needs("a", "win")
    records.add("a", win=[63.6, 0.5], curve={"b": 1}, new={"b": 2})
    assert capsys.readouterr().out.splitlines() == [
        "a, win: recorded [63.8, 0.5], now [63.6, 0.5]",
        "a, curve, b: as recorded",
        "a, new, b: recorded None, now 2",
    ]
    assert not records.added and not records.complete(["a"], "a table")
    assert (tmp_path / "records.json").read_text() == before


def test_what_is_recorded_is_not_made_and_says_once_by_what_it_was(tmp_path, capsys):
    records = common.Records(tmp_path / "records.json")
    records.add("a", win=1, score=2)
    assert [records.needs("a", key) for key in ("win", "score", "kl")] == [False, False, True]
    made = records.all["a"]["made"]
    said = f"a: recorded with rloo.py {made['rloo.py']}, {made['date']}; --again makes and compares it\n"
    assert capsys.readouterr().out == said
    assert records.complete(["a"], "the page") and capsys.readouterr().out == ""
    assert not records.complete(["a", "b"], "the page")
    assert capsys.readouterr().out == "the page: left as they are, since there is no record of b\n"


def test_a_missing_package_is_one_line_with_the_command():
    common.require(json="json")
    with pytest.raises(SystemExit, match="-m pip install some-package==1$"):
        common.require(json="json", some_package="some-package==1")


def test_a_command_runs_on_one_thread_and_its_log_grows(tmp_path):
    log = tmp_path / "new" / "run.log"
    script = "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.getcwd()); sys.exit('some error')"
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            common.run_logged([sys.executable, "-c", script], log)
    assert log.read_text().count("some error") == 2 and f"1 {common.ROOT}" in log.read_text()


def test_students_t():
    for freedom, expected in ((1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (24, 2.064), (1e4, 1.960)):
        assert math.isclose(common.t_quantile(freedom), expected, abs_tol=2e-3)
        assert math.isclose(common.two_sided_p(-expected, freedom), 0.05, abs_tol=2e-4)
    assert math.isclose(common.t_quantile(5, 0.1), 2.015, abs_tol=1e-3)


def test_differences_are_welchs():
    x = common.difference([3.0, 4.0, 5.0, 6.0, 7.0], [1.0, 1.1, 0.9, 1.2, 0.8])
    half = 2.753 * 0.7106  # by hand: 4.08 degrees of freedom, standard error
    assert math.isclose(x.mean, 4.0) and math.isclose((x.high - x.low) / 2, half, abs_tol=5e-3)


def test_intervals_of_a_table_hold_together_in_19_of_20_cases():
    rng, tables = np.random.default_rng(1), 50
    for sizes in ((5, 3), (5, 5)):
        hold = 0
        for _ in range(tables):
            rows = {"base": rng.normal(0, 1, sizes[0])} | {f"{i}": rng.normal(i, 1, sizes[1]) for i in (1, 2, 3)}
            hold += all(x.low < int(name) < x.high for name, x in common.differences(rows, "base").items())
        assert 0.93 < hold / tables < 0.995


def test_a_comparison_takes_three_seeds():
    rows = {"base": [0.0, 0.1, 0.2], "up": [5.0, 5.1, 5.3], "two": [9.0, 9.1]}
    assert common.differences(rows, "base").keys() == {"up"} and not common.differences(rows, "two")


def test_cells():
    assert [common.plus_minus(x, 10) for x in ([], [0.5], [0.4, 0.6], [0.4, 0.5, 0.6])] == [
        "",
        "5.0",
        "5.0",
        "5.0 ± 0.6",
    ]
    assert common.with_interval(common.Difference(1, -0.5, 2.5)) == "+1.0 [-0.5, +2.5]"


def test_tables_go_between_the_lines_that_name_them(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("above\n<!-- one -->\nold\n<!-- end of one -->\nbelow\n")
    common.insert(page, {"one": common.markdown([["a", "b"], ["1", "2"]])})
    table = "| a | b |\n|---|---|\n| 1 | 2 |"
    assert page.read_text() == f"above\n<!-- one -->\n{table}\n<!-- end of one -->\nbelow\n"


def test_the_index_has_numbers_of_the_pages_that_it_links_to_and_commands_that_are_there():
    index = (common.HERE / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| \[[^\]]*\]\(([\w/.]+)[^)]*\) \| (.*?) \|", index)
    assert len(rows) > 10
    for path, answer in rows:
        page = (common.HERE / path).read_text(encoding="utf-8").replace(",", "")
        numbers = set(re.findall(r"[-+]?\d+(?:\.\d+)?", answer.replace(",", "")))
        assert not [number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", page)], (
            path
        )
    scripts = re.findall(r"`python benchmark/(\w+/\w+\.py)", index)
    assert [path for path in scripts if not (common.HERE / path).is_file()] == []


def test_runs_are_drawn_side_by_side_also_without_kl_or_with_another_grade(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    for name, training, grade in (("a", {"objective/kl": 1.0}, "sampled/win"), ("b", {}, "sampled/other")):
        (tmp_path / name).mkdir()
        for file, found in (("metrics", {"objective/scores": 0.5} | training), ("evaluations", {grade: 1.0})):
            line = {"episode": 32, **found, f"{grade}_stderr": 0.1}
            (tmp_path / name / f"{file}.jsonl").write_text(json.dumps(line) + "\n")
    lines = {}
    count = lambda figure, path: lines.update({x.get_title().split(",")[0]: len(x.lines) for x in figure.axes})  # noqa: E731
    monkeypatch.setattr(common, "save", count)
    for name, kl_coef in (("a", 0.02), ("b", 0.2)):
        (tmp_path / name / "args.json").write_text(json.dumps({"kl_coef": kl_coef, "seed": 1, "output_dir": name}))
    assert plot.labels([tmp_path / "a", tmp_path / "b"]) == ["a,\nkl_coef 0.02", "b,\nkl_coef 0.2"]
    plot.draw([tmp_path / "a", tmp_path / "b"], tmp_path / "plot.png")
    assert list(lines) == ["score", "KL from the reference", "win", "other"]
    assert (lines["score"], lines["KL from the reference"]) == (2, 1)
    (tmp_path / "a" / "evaluations.jsonl").unlink()
    lines.clear()
    plot.draw([tmp_path / "a"], tmp_path / "plot.png")
    assert list(lines) == ["score", "KL from the reference"]
    monkeypatch.setattr(sys, "argv", ["plot.py", *(str(tmp_path / name) for name in ("a", "b", "none"))])
    plot.main()
    assert lines["score"] == 2 and "none: left out" in capsys.readouterr().out


# ---- Every page ------------------------------------------------------------------------------------------------------

PAGES = [common.ROOT / "README.md", common.HERE / "README.md", *sorted(common.HERE.glob("[a-z]*/README.md"))]
CODE = [common.ROOT / "rloo.py", *common.HERE.rglob("*.py")]
WORDS = set(re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in CODE)))
OF_OTHERS = {
    "deps",
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "shutdown_timeout",
}  # pip's, torchrun's


def commands_in(page: Path) -> list[str]:
    """The blocks of shell commands, and commands within lines."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return blocks + [line.replace("\n", " ") for line in re.findall(r"`((?:python|torchrun) [^`]+)`", text)]


def commands_of(blocks: list[str], folder: Path) -> list[list[str]]:
    """The words of each python or torchrun command, as bash expands them. The blocks are run one after another in one
    shell, where these two only write down their words, and nothing is installed."""
    stubs = 'python() { printf "<<"; printf \'%s\\t\' "$@"; printf ">>"; }\ntorchrun() { python "$@"; }\n'
    stubs += "".join(f"{name}() {{ :; }}\n" for name in ("pip", "python3", "apt-get"))
    done = subprocess.run(["bash", "-c", stubs + "\n".join(blocks)], cwd=folder, capture_output=True, text=True)
    return [words.split("\t")[:-1] for words in re.findall("<<(.*?)>>", done.stdout, flags=re.DOTALL)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(common.ROOT)))
def test_every_command_of_a_page_parses(page, tmp_path):
    """... and every script that it names is there. Whether they do what they say: the other tests."""
    blocks = commands_in(page)
    commands = commands_of(blocks, tmp_path)
    lines = [line.lstrip() for block in blocks for line in block.splitlines()]
    assert len(commands) >= sum(line.startswith(("python ", "torchrun ")) for line in lines) > 0
    for words in commands:
        (script,) = [word for word in words if word == "-" or word.endswith(".py")][:1] or ["pytest"]
        if Path(script).name == "rloo.py" and "--help" not in words:
            tyro.cli(rloo.Args, args=words[words.index(script) + 1 :], use_underscores=True)
        assert script in ("-", "pytest", "rloo.py", "mine.py") or (common.ROOT / script).is_file(), script


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(common.ROOT)))
def test_what_a_page_names_is_there(page):
    """Links with their anchors, pictures, every file under benchmark/, names of rloo.py, and flags."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists() and (not anchor or anchor in anchors(target)), link
    for path in re.findall(r"benchmark/[\w/.-]+\.(?:py|sh|json|md|png|txt)\b", text):
        assert (common.ROOT / path).is_file(), path
    for name in re.findall(r"\brloo\.(\w+)", text):
        assert name in ("py", "git") or hasattr(rloo, name), f"rloo.{name}"
    for flag in re.findall(r"(?<![\w-])--([a-z]\w+)", re.sub(r"<!-- | -->", "", text)):
        assert flag.removeprefix("no_") in WORDS | OF_OTHERS, f"--{flag}"
