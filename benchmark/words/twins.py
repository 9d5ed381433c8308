"""What RLOO gains on test problems that have a twin among RLOO's training problems, and on those that have none.

    python benchmark/words/twins.py > benchmark/records/words_twins.txt

A twin has the same template, numbers and answer, but other names. Needs the problems of prepare.py, and the records of
study.py. Intervals are corrected for all rows of the study, as there; the last column is for new templates as well.
"""

import re
import sys
from pathlib import Path

import numpy as np
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import runs  # noqa: E402
from study import by_item, records_of, words  # noqa: E402


def key(row: dict) -> tuple:
    return row["template"], tuple(re.findall(r"\d+(?:\.\d+)?", row["prompt"])), row["answer"]


def over_templates(gaps: np.ndarray, templates: np.ndarray, of: int) -> tuple[float, float]:
    """Returns the ends of the interval of a mean of gaps (seeds, problems), if seeds and templates were drawn anew."""
    sums = np.array([(gaps.mean(0) - gaps.mean())[templates == one].sum() for one in np.unique(templates)])
    variance = (sums**2).sum() * len(sums) / (len(sums) - 1) / len(templates) ** 2
    error = np.sqrt(variance + gaps.mean(1).var(ddof=1) / len(gaps))
    half = runs.t_quantile(len(sums) - 1, 0.05 / of) * error
    return gaps.mean() - half, gaps.mean() + half


def main():
    prepared = HERE / "prepared"
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared / "base")
    train, test = (runs.lines(prepared / f"{split}.jsonl") for split in ("train", "test"))
    test.sort(key=lambda row: len(tokenizer(row["prompt"])["input_ids"]))  # as evaluations have them
    templates, known = np.array([row["template"] for row in test]), {key(row) for row in train}
    twin = np.array([key(row) in known for row in test])
    records = records_of(words, runs.Records("words"))
    ours, of = by_item(records["rloo"]), len(records) - 1
    table = [["RLOO minus", "test problems", "number", "points", "templates drawn anew"]]
    for other in ("sft", "continued"):
        theirs = by_item(records[other])
        for name, chosen in (("all", twin | True), ("with a twin", twin), ("without a twin", ~twin)):
            found = runs.difference([], [], of, (ours[:, chosen], theirs[:, chosen]))
            anew = over_templates((ours - theirs)[:, chosen], templates[chosen], of)
            line = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * value for value in found))
            line = [other, name, str(chosen.sum()), line, "[{:+.1f}, {:+.1f}]".format(*(100 * x for x in anew))]
            table.append(line)
    print(runs.markdown(table))


if __name__ == "__main__":
    main()
