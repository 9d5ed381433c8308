"""Test of the table of headline numbers: it is that of the records, and so are the answers beside the questions."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import index
import study


def test_the_index_has_the_numbers_of_the_records():
    page = (index.TOP / "README.md").read_text(encoding="utf-8")
    table = index.table()
    assert f"<!-- headline -->\n{table}\n<!-- end of headline -->" in page
    known = set(re.findall(r"\d+\.\d+", table))
    questions = page.split("## The questions")[1].split("## Conventions")[0]
    said = set(re.findall(r"\d+\.\d+", questions))
    assert said <= known, said - known  # an answer repeats what the table says


def test_every_command_of_the_table_names_a_script():
    for line in index.table().splitlines()[2:]:
        (script,) = re.findall(r"`python (benchmark/\S+\.py)[^`]*`", line)
        assert (study.ROOT / script).is_file()
