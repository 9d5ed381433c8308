"""Tests of all pages: links, files, commands, flags and names of rloo.py that a page names are there."""

import re
import subprocess
from pathlib import Path

import pytest
import tyro

import rloo

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PAGES = [ROOT / "README.md", *sorted(HERE.glob("*.md")), *sorted(HERE.glob("*/README.md"))]
CODE = [ROOT / "rloo.py", *HERE.rglob("*.py")]
WORDS = set(re.findall(r"\w+", " ".join(path.read_text(encoding="utf-8") for path in CODE)))
OF_TORCHRUN_AND_PIP = {"deps", "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "shutdown_timeout"}
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
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"benchmark/[\w/.-]+\.(?:py|sh|json|jsonl|md|png|txt|toml)\b", text):
        assert (ROOT / path).is_file(), path
    for name in re.findall(r"\brloo\.(\w+)", text):
        assert name in ("py", "git") or hasattr(rloo, name), f"rloo.{name}"
    for flag in re.findall(r"(?<![\w-])--([a-z]\w+)", re.sub(r"<!-- | -->", "", text)):
        assert flag.removeprefix("no_") in WORDS | OF_TORCHRUN_AND_PIP, f"--{flag}"


def test_numbers_of_the_index_stand_on_the_pages_that_it_links_to():
    index = (HERE / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| \[[^\]]*\]\(([\w/]+\.md)[^)]*\) \| (.*?) \|", index)
    assert len(rows) > 8
    for path, answer in rows:
        page = (HERE / path).read_text(encoding="utf-8").replace(",", "")
        for number in re.findall(r"[-+]?\d+(?:\.\d+)?", answer.replace(",", "")):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", page), f"{path}: {number}"
