"""Tests of all pages: links, files, commands, flags and names of rloo.py that a page names are there."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tyro

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import parity  # noqa: E402
import runs  # noqa: E402
import speed  # noqa: E402
import study  # noqa: E402

import rloo  # noqa: E402

ROOT = HERE.parent
PAGES = [ROOT / "README.md", *sorted(HERE.glob("*.md")), *sorted(HERE.glob("*/*.md"))]
CODE = [ROOT / "rloo.py", *HERE.rglob("*.py")]
WORDS = set(re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in CODE)))
OF_TORCHRUN_AND_PIP = {"deps", "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "shutdown_timeout"}
OF_A_COMMIT = r"(?<=`git show )(\w+):([\w/.-]+)(?=`)"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def commands_in(page: Path) -> list[str]:
    """Returns the blocks of shell commands, and the commands within lines."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return blocks + [line.replace("\n", " ") for line in re.findall(r"`((?:python|torchrun) [^`]+)`", text)]


def words_of(blocks: list[str], folder: Path) -> list[list[str]]:
    """Returns the words of each python or torchrun command, as bash expands them. The blocks are run one after another
    in one shell, where these two only write down their words, and nothing is installed."""
    stubs = 'python() { printf "<<"; printf \'%s\\t\' "$@"; printf ">>"; }\ntorchrun() { python "$@"; }\n'
    stubs += "".join(f"{name}() {{ :; }}\n" for name in ("pip", "python3", "apt-get", "git"))
    done = subprocess.run(["bash", "-c", stubs + "\n".join(blocks)], cwd=folder, capture_output=True, text=True)
    return [words.split("\t")[:-1] for words in re.findall("<<(.*?)>>", done.stdout, flags=re.DOTALL)]


@each_page
def test_each_command_has_a_script_and_flags_that_exist(page, tmp_path):
    blocks = commands_in(page)
    commands = words_of(blocks, tmp_path)
    lines = [line.lstrip() for block in blocks for line in block.splitlines()]
    assert len(commands) >= sum(line.startswith(("python ", "torchrun ")) for line in lines)
    for words in commands:
        (script,) = [word for word in words if word == "-" or word.endswith(".py")][:1] or ["pytest"]
        if Path(script).name == "rloo.py" and "--help" not in words:
            tyro.cli(rloo.Args, args=words[words.index(script) + 1 :], use_underscores=True)
        assert script in ("-", "pytest", "rloo.py", "mine.py") or (ROOT / script).is_file(), script


def test_readme_has_each_command_that_ci_runs():
    (starts,) = re.findall(r"(?m)^for start in (.*); do$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    for start in re.findall('"(.*?)"', starts):
        assert [line for line in lines if line.startswith(start)], start


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists() and (not anchor or anchor in anchors(target)), link


@each_page
def test_files_names_and_flags_exist(page):
    text = re.sub(OF_A_COMMIT, "", page.read_text(encoding="utf-8"))
    for path in re.findall(r"benchmark/[\w/.-]+\.(?:py|sh|json|jsonl|md|png|txt|toml)\b", text):
        assert (ROOT / path).is_file(), path
    for name in re.findall(r"\brloo\.(\w+)", text):
        assert name in ("py", "git") or hasattr(rloo, name), f"rloo.{name}"
    for flag in re.findall(r"(?<![\w-])--([a-z]\w+)", re.sub(r"<!-- | -->", "", text)):
        assert flag.removeprefix("no_") in WORDS | OF_TORCHRUN_AND_PIP, f"--{flag}"


def test_the_lines_that_readme_names_are_those_of_two_sections():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence = re.search("the ([0-9,]+) lines of rloo.py, the math is lines .*?[.]\\s", readme)
    math, after_math, update, after_update = map(int, re.findall(r"\d+", sentence[0].split(" is ")[1]))
    lines = (ROOT / "rloo.py").read_text(encoding="utf-8").splitlines()
    assert int(sentence[1].replace(",", "")) == len(lines)
    for title, first, last in (("The math", math, after_math), ("One update", update, after_update)):
        assert lines[first - 1].startswith(f"# ---- {title}")
        assert lines[last - 1] and lines[last : last + 2] == ["", ""] and lines[last + 2].startswith("# ---- ")


def index_rows() -> list[list[str]]:
    """Returns the cells of the index's results: question, answer, command, record."""
    index = (HERE / "README.md").read_text(encoding="utf-8").partition("## What was shown")[2]
    rows = [line.strip("| ").split(" | ") for line in index.splitlines() if line.startswith("| [")]
    assert len(rows) > 10
    return rows


def test_numbers_of_the_index_stand_on_the_pages_that_it_links_to():
    for question, answer, *_ in index_rows():
        path = question.partition("](")[2].partition("#")[0].rstrip(")")
        page = (HERE / path).read_text(encoding="utf-8").replace(",", "")
        for number in re.findall(r"[-+]?\d+(?:\.\d+)?", answer.replace(",", "")) if path.endswith(".md") else ():
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", page), f"{path}: {number}"


def test_each_claim_of_the_index_has_a_command_and_a_record():
    for question, answer, command, record in index_rows():
        assert "`python benchmark/" in command or "](../README.md#" in command, question
        kept = [HERE / path for path in re.findall(r"\]\((records/[\w.]+)\)", record)]
        assert all(path.is_file() for path in kept)
        assert kept or re.search(OF_A_COMMIT, record) or "never been run" in answer, question


@each_page
def test_files_of_commits_are_there(page):
    if not (ROOT / ".git").exists():
        pytest.skip("the history is not here")
    for commit, path in re.findall(OF_A_COMMIT, page.read_text(encoding="utf-8")):
        found = subprocess.run(["git", "cat-file", "-e", f"{commit}:{path}"], cwd=ROOT)
        assert found.returncode == 0, f"{commit}:{path}"


# ---- Results: what a table says is printed from records --------------------------------------------------------------

RESULTS = {  # page -> its records
    "study.md": ["mini", "peers", "epochs", "fooled"],
    "trl.md": ["trl", "parity"],
    "gpu.md": ["speed"],
    "gradient.md": ["gradient.txt", "clip"],
    "countdown/README.md": ["countdown"],
    "mini_gsm8k/README.md": ["gsm8k"],
}
SETTINGS = ("Flags", "What the documents describe")  # sections whose tables have no results
NUMBER = r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)"


def printed_from_records(name: str) -> str:
    """Returns what a command prints from its records, or what it has written."""
    records = runs.Records(name)
    if name.endswith(".txt"):
        return (HERE / "records" / name).read_text(encoding="utf-8")
    if name == "parity":
        return parity.summary(list(records.values()))
    if name == "speed":
        shapes = {key.partition(": ")[0] for key in records}
        of_shapes = ([record for key, record in records.items() if key.startswith(f"{name}: ")] for name in shapes)
        return "\n".join(map(speed.table, of_shapes))
    found = study.STUDIES[name]
    bases = {base for base in (found.base, "rloo", "rloo_c") if base in found.rows or not base}
    return "\n".join(study.table(replace(found, base=base), records) for base in bases)


@pytest.mark.parametrize("path", RESULTS)
def test_each_number_of_a_table_of_results_is_printed_from_records(path):
    known = "\n".join(map(printed_from_records, RESULTS[path]))
    for section in re.split(r"(?m)^#+ ", (HERE / path).read_text(encoding="utf-8"))[1:]:
        tables = [line for line in section.splitlines() if line.startswith("|")]
        if not tables or section.splitlines()[0] in SETTINGS:
            continue
        if re.search(OF_A_COMMIT, section) and not (ROOT / ".git").exists():
            continue
        texts = [known]
        for commit, file in re.findall(OF_A_COMMIT, section):
            shown = subprocess.run(["git", "show", f"{commit}:{file}"], cwd=ROOT, capture_output=True, text=True)
            texts.append(shown.stdout)
        numbers = np.array([float(number) for text in texts for number in re.findall(NUMBER, text.replace(",", ""))])
        for number in re.findall(NUMBER, "\n".join(tables).replace(",", "")):
            near = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9
            assert "." not in number or np.abs(numbers - float(number)).min() <= near, f"{path}: {number}"


@pytest.mark.parametrize("path", RESULTS)
def test_each_section_with_measured_numbers_has_a_command_or_a_record(path):
    for section in re.split(r"(?m)^#+ ", (HERE / path).read_text(encoding="utf-8"))[1:]:
        measured = re.search(r"\d\.\d%| ± |\d s\b|\d times|\bGiB|\[[-+−]\d", section)
        named = re.search(r"python benchmark/|commands? above|records/|\.md#|" + OF_A_COMMIT, section)
        assert named or not measured or section.splitlines()[0] in SETTINGS, f"{path}: {section.splitlines()[0]}"


@each_page
def test_no_number_is_without_a_record(page):
    assert not re.search(r"\bno records?\b(?! is)", page.read_text(encoding="utf-8"))
