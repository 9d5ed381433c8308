"""Which problems are solved greedily, by the operators of the generator's solution; what kinds of mistakes are made,
before and after; and twenty problems in full.

    python benchmark/countdown/mistakes.py    # of all records
    python benchmark/countdown/mistakes.py runs/countdown/sft__1.graded runs/countdown/rloo__1.graded

value: a right form and right numbers, but another value than the target. numbers: not each number once. form: no
expression of whole numbers and operators.
"""

import sys
from collections import Counter
from math import comb
from pathlib import Path

import expression
import models
import numpy as np
import transformers

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
import runs  # noqa: E402

import rloo  # noqa: E402

GROUPS = ("+ -", "*", "/")
KINDS = ("right", "value", "numbers", "form")


def kind(completion: str, numbers: list[int], target: int) -> str:
    if expression.correct([completion], [numbers], [target]) == [1]:
        return "right"
    if not expression.FORM.fullmatch(completion.strip()):
        return "form"
    return "value" if expression.uses(completion, numbers) else "numbers"


def operators(solution: str) -> str:
    return "/" if "/" in solution else "*" if "*" in solution else "+ -"


def greedy(folder: Path) -> dict[str, dict]:
    """Returns prompt -> completion of an evaluation."""
    lines = runs.lines(folder / "completions.jsonl")
    return {line["prompt"]: line for line in lines if line["mode"] == "greedy"}


def print_records(prepared: Path, records: dict[str, dict]):
    """Prints, for each record with a grade per test problem, how many are solved, and what a fixed expression solves;
    and, for each with many samples, the share of problems that one of k samples solves, in %."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared / "base")
    problems = runs.lines(prepared / "test.jsonl")
    problems.sort(key=lambda row: len(rloo.prepare_example(row, tokenizer)["prompt_ids"]))  # as evaluations do
    solved = {name: runs.unpacked(record["by_prompt"]) for name, record in records.items() if "by_prompt" in record}
    columns = {name: [row[name] for row in problems] for name in ("numbers", "target")}
    fixed = ["{2} - {1} + {0}".format(*sorted(numbers)) for numbers in columns["numbers"]]
    solved["largest - middle + smallest"] = expression.correct(fixed, **columns)
    groups = np.array([operators(row["solution"]) for row in problems])
    table = [["solved greedily", *(f"{group}: of {(groups == group).sum()}" for group in GROUPS)]]
    for name, right in solved.items():
        table.append([name, *(f"{np.sum(np.array(right)[groups == group]):.0f}" for group in GROUPS)])
    print(runs.markdown(table) + "\n")
    n, ks = models.K, (1, 2, 4, 8, 16)
    table = [["solved by one of k samples, %", *map(str, ks)]]
    for name, right in ((name, record["right"]) for name, record in records.items() if "right" in record):
        shares = [np.mean([1 - comb(n - r, k) / comb(n, k) for r in right]) for k in ks]
        table.append([name, *(f"{share:.1%}".rstrip("%") for share in shares)])
    print(runs.markdown(table))


def main(before: Path, after: Path, problems: int = 20):
    pair = [greedy(folder) for folder in (before, after)]
    counts, shown = [Counter(), Counter()], []
    for prompt in pair[0]:
        text = prompt
        for number, found in enumerate(pair):
            columns, completion = found[prompt]["columns"], found[prompt]["completion"]
            what = kind(completion, columns["numbers"], columns["target"])
            for group in (operators(columns["solution"]), "all"):
                counts[number][group, what] += 1
            text += f"\n[{('before', 'after')[number]}: {what}]{completion}"
        shown.append(text)
    table = [["operators of a solution", *(f"{what}: before, after" for what in KINDS)]]
    for group in (*GROUPS, "all"):
        table.append([group, *(f"{counts[0][group, what]}, {counts[1][group, what]}" for what in KINDS)])
    print(runs.markdown(table))
    for text in shown[:: max(1, len(shown) // problems)][:problems]:
        print(f"\n{text}")


if __name__ == "__main__":
    if folders := sys.argv[1:]:
        main(*map(Path, folders))
    else:
        print_records(HERE / "prepared", runs.Records("countdown"))
