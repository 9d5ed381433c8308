"""What RLOO gains on the problems of each template, and over all templates if these were drawn anew.

    python benchmark/words/templates.py > benchmark/records/words_templates.txt

Needs the problems of prepare.py, and the records of study.py. Intervals are corrected for all rows of the study.
"""

import sys
from pathlib import Path

import numpy as np
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import runs  # noqa: E402
from study import by_item, records_of, words  # noqa: E402


def drawn_anew(gaps: np.ndarray, templates: np.ndarray, of: int) -> tuple[float, float]:
    """Returns the ends of the interval of a mean of gaps (seeds, problems), if seeds and templates were drawn anew."""
    sums = np.array([(gaps.mean(0) - gaps.mean())[templates == one].sum() for one in np.unique(templates)])
    variance = (sums**2).sum() * len(sums) / (len(sums) - 1) / len(templates) ** 2
    error = np.sqrt(variance + gaps.mean(1).var(ddof=1) / len(gaps))
    half = runs.t_quantile(len(sums) - 1, 0.05 / of) * error
    return gaps.mean() - half, gaps.mean() + half


def main():
    prepared = HERE / "prepared"
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared / "base")
    test = runs.lines(prepared / "test.jsonl")
    test.sort(key=lambda row: len(tokenizer(row["prompt"])["input_ids"]))  # as evaluations have them
    templates = np.array([row["template"] for row in test])
    records = records_of(words, runs.Records("words"))
    by_problem = {run: by_item(found) for run, found in records.items() if "by_prompt" in found[0]}
    ours = by_problem.pop("rloo")
    gaps = {run: ours - theirs.mean(0) for run, theirs in by_problem.items()}
    table = [["template", "problems", *(f"RLOO minus {run}" for run in gaps)]]
    for template in np.unique(templates):
        own = templates == template
        table.append([str(template), str(own.sum()), *(f"{100 * gap[:, own].mean():+.1f}" for gap in gaps.values())])
    table.append(["all", str(len(test)), *(f"{100 * gap.mean():+.1f}" for gap in gaps.values())])
    ends = (100 * np.array(drawn_anew(gap, templates, len(records) - 1)) for gap in gaps.values())
    table.append(["all, drawn anew", "", *("[{:+.1f}, {:+.1f}]".format(*pair) for pair in ends)])
    print(runs.markdown(table))


if __name__ == "__main__":
    main()
