"""Each row of the page says what is done about a bug, and the tests that it names are there."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_every_bug_of_the_page_has_its_test():
    page = (HERE / "README.md").read_text()
    files = [HERE.parents[1] / "rloo_test.py", HERE.parent / "objectives" / "objectives_test.py"]
    tests = "".join(path.read_text() for path in files)
    rows = [line for line in page.splitlines() if line.startswith("| ") and "| found in |" not in line]
    assert page.count(f"\n{len(rows)} bugs that ") == 1
    for row in rows:
        bug, where, trl, here = (cell.strip() for cell in row.split("|")[1:-1])
        done, _, by = here.partition(": ")
        named = re.findall(r"`(test_\w+)`", by)
        assert bug and where and trl and done in ("tested", "warned", "documented")
        assert named or done == "documented"
        assert [name for name in named if f"\ndef {name}(" not in tests] == []
