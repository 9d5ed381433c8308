"""Tests of the pages: every command parses, and every file, anchor and name of rloo.py that a page names is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parent
ROOT = BENCHMARK.parent
sys.path.insert(0, str(ROOT))

import rloo  # noqa: E402

PAGES = [ROOT / "README.md", *sorted(BENCHMARK.rglob("*.md"))]
WITH_COMMANDS = [page for page in PAGES if page.parent.name in (ROOT.name, "extensions", "gpu", "speed", "tldr")]


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands_of(blocks: list[str], folder: Path) -> list[list[str]]:
    """The words of each python or torchrun command, as bash expands them. The blocks are run one after another in one
    shell, where these two only write down their words, and nothing is installed."""
    stubs = 'python() { printf \'%s\\t\' "$@"; echo; }\ntorchrun() { python "$@"; }\npip() { :; }\npython3() { :; }\n'
    done = subprocess.run(["bash", "-c", stubs + "\n".join(blocks)], cwd=folder, capture_output=True, text=True)
    return [line.split("\t")[:-1] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.parent.name)
def test_every_command_of_a_page_parses(page, tmp_path):
    """... and every script that it names is there. Whether they do what they say: the other tests."""
    blocks = blocks_of(page, "sh")
    commands = commands_of(blocks, tmp_path)
    lines = [line.lstrip() for block in blocks for line in block.splitlines()]
    assert len(commands) >= sum(line.startswith(("python ", "torchrun ")) for line in lines) > 0
    for words in commands:
        (script,) = [word for word in words if word == "-" or word.endswith(".py")][:1] or ["pytest"]
        if Path(script).name == "rloo.py" and "--help" not in words:
            assert isinstance(rloo.parse_args(words[words.index(script) + 1 :]), rloo.Args)
        assert script in ("-", "pytest", "rloo.py", "mine.py") or (ROOT / script).is_file(), script


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    """Links with their anchors, pictures, every file under benchmark/, and every name of rloo.py."""
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if not path.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists() and (not anchor or anchor in anchors(target)), link
    for path in re.findall(r"benchmark/[\w/.-]+\.(?:py|sh|json|md|png|txt)\b", text):
        assert (ROOT / path).is_file(), path
    for name in re.findall(r"\brloo\.(\w+)", text):
        assert name in ("py", "git") or hasattr(rloo, name), f"rloo.{name}"
