"""Tests of common.py: records, logs, statistics, tables, and the index.

python -m pytest -q benchmark/common_test.py
"""

import json
import math
import re
import subprocess
import sys

import common
import numpy as np
import pytest


def test_records_are_json_with_a_line_for_each_and_keep_what_others_wrote(tmp_path):
    records = common.Records(tmp_path / "records.json")
    other = common.Records(records.path)
    records.add("b", one={"two": 1})
    other.add("a", three=[2])
    records.add("b", four=3.5)
    assert json.loads(records.path.read_text()) == {"a": {"three": [2]}, "b": {"one": {"two": 1}, "four": 3.5}}
    assert len(records.path.read_text().splitlines()) == 4
    assert (records.value("b", "one", "two"), records.value("c", "one", "two")) == (1, None)


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


def test_differences_are_welchs_and_below_five_seeds_pooled():
    ours, theirs = [3.0, 4.0, 5.0, 6.0, 7.0], [1.0, 1.1, 0.9, 1.2, 0.8]
    x = common.difference(ours, theirs)  # by hand: standard error 0.7106, 4.08 degrees of freedom
    assert math.isclose(x.mean, 4.0) and math.isclose((x.high - x.low) / 2, 2.753 * 0.7106, abs_tol=5e-3)
    few = common.difference(ours[:3], theirs, [ours[:3], theirs, [0.0, 2.0]])  # variances 1, 0.025, 2; 2 + 4 + 1
    error = math.sqrt((2 * 1 + 4 * 0.025 + 1 * 2) / 7 * (1 / 3 + 1 / 5))
    assert math.isclose(few.high - few.mean, common.t_quantile(7) * error, rel_tol=1e-6)
    assert math.isclose(few.p, common.two_sided_p(3 / error, 7), rel_tol=1e-6)


def test_intervals_hold_the_truth_in_19_of_20_cases():
    rng, n = np.random.default_rng(1), 200
    for sizes in ((3, 9), (5, 5)):
        draws = [[rng.normal(i, 1.0, size) for i, size in enumerate(sizes)] + [rng.normal(0, 1, 3)] for _ in range(n)]
        inside = [x.low < 1 < x.high for x in (common.difference(b, a, [a, b, c]) for a, b, c in draws)]
        assert 0.93 < np.mean(inside) < 0.97


def test_holms_correction_and_verdicts():
    assert np.allclose(common.holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    rows = {"base": [0.0, 0.1, 0.2], "up": [5.0, 5.1, 5.2], "same": [0.1, 0.2, 0.3], "down": [-5.0, -5.1, -5.2]}
    found = common.differences(rows, "base")
    assert {name: x.verdict for name, x in found.items()} == {"up": "ahead", "same": "not told apart", "down": "behind"}
    assert found["up"].holm > found["up"].p


def test_cells():
    assert [common.plus_minus(x, 10) for x in ([], [0.5], [0.4, 0.6], [0.4, 0.5, 0.6])] == [
        "",
        "5.0",
        "5.0",
        "5.0 ± 0.6",
    ]
    assert common.listed([0.1, 0.234], 100) == "10.0, 23.4"
    assert common.with_interval(common.Difference(1, -0.5, 2.5, 0.1, 0.1)) == "+1.0 [-0.5, +2.5]"


def test_tables_go_between_the_lines_that_name_them(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("above\n<!-- one -->\nold\n<!-- end of one -->\nbelow\n")
    common.insert(page, {"one": common.markdown([["a", "b"], ["1", "2"]])})
    table = "| a | b |\n|---|---|\n| 1 | 2 |"
    assert page.read_text() == f"above\n<!-- one -->\n{table}\n<!-- end of one -->\nbelow\n"


def test_the_index_has_the_numbers_of_all_pages_and_commands_that_are_there():
    index = (common.HERE / "README.md").read_text(encoding="utf-8")
    rooms = common.modules()
    assert all(hasattr(room, "report") for room in rooms)
    assert common.filled(index, {"headline": common.headline(rooms)}) == index
    scripts = re.findall(r"`python benchmark/(\w+/\w+\.py)", index) + re.findall(r"\]\(([\w/.]+)\)", index)
    assert len(scripts) > 20
    assert [path for path in scripts if not (common.HERE / path).is_file()] == []
