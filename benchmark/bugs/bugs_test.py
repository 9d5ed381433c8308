"""Each row of the page says where a bug was found and what is done about it, and the tests that it names are there."""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent


def test_every_bug_of_the_page_has_its_test():
    page = (HERE / "README.md").read_text()
    files = [HERE.parents[1] / "rloo_test.py", HERE.parent / "objectives" / "objectives_test.py"]
    tests = "".join(path.read_text() for path in files)
    rows = [line for line in page.splitlines() if line.startswith("- ")]
    assert page.count(f"\n{len(rows)} bugs made ") == 1
    for row in rows:
        assert re.fullmatch(
            r"- .+ \(.+\): (`test_\w+`(, `test_\w+`)*|\*warned\*: `test_\w+`|\*documented\*: .+)", row
        ), row
        assert [name for name in re.findall(r"`(test_\w+)`", row) if f"\ndef {name}(" not in tests] == []
