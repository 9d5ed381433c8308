"""Which problems are solved: those that sums and differences solve, or those that need a product or a quotient? What
kinds of mistakes are made, before and after? Then twenty problems in full.

    python benchmark/countdown/mistakes.py    # of all records
    python benchmark/countdown/mistakes.py runs/countdown/sft__1.graded runs/countdown/rloo__1.graded

value: a right form and right numbers, but another value than the target. numbers: not each number once. form: no
expression of whole numbers and operators.
"""

import sys
from collections import Counter
from itertools import product
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

GROUPS = ("sums suffice", "needs * or /")
KINDS = ("right", "value", "numbers", "form")


def kind(completion: str, numbers: list[int], target: int) -> str:
    if expression.correct([completion], [numbers], [target]) == [1]:
        return "right"
    if not expression.FORM.fullmatch(completion.strip()):
        return "form"
    return "value" if expression.uses(completion, numbers) else "numbers"


def group_of(numbers: list[int], target: int) -> str:
    sums = (sum(sign * number for sign, number in zip(signs, numbers)) for signs in product((1, -1), repeat=3))
    return GROUPS[0] if target in sums else GROUPS[1]  # the target is above 0, so one sign is +


def greedy(folder: Path) -> dict[str, dict]:
    """Returns prompt -> completion of an evaluation."""
    lines = runs.lines(folder / "completions.jsonl")
    return {line["prompt"]: line for line in lines if line["mode"] == "greedy"}


def print_records(prepared: Path, records: dict[str, dict]):
    """Prints, for each record with a grade per test problem, how many are solved, and what a fixed expression solves;
    and, for each with many samples of the first problems, the share that one of k samples solves, in %."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared / "base")
    problems = [row | {"place": place} for place, row in enumerate(runs.lines(prepared / "test.jsonl"))]
    group_by_place = np.array([group_of(row["numbers"], row["target"]) for row in problems])
    samples = {name: np.array(record["right"]) for name, record in records.items() if "right" in record}
    problems.sort(key=lambda row: len(rloo.prepare_example(row, tokenizer)["prompt_ids"]))  # as evaluations do
    columns = {name: [row[name] for row in problems] for name in ("numbers", "target")}
    fixed = ["{2} - {1} + {0}".format(*sorted(numbers)) for numbers in columns["numbers"]]
    always = expression.correct(fixed, **columns)
    places = np.array([row["place"] for row in problems])
    first = max(map(len, samples.values()))
    parts = {group: group_by_place[places] == group for group in GROUPS} | {f"first {first}": places < first}
    for title, key in (("solved greedily", "by_prompt"), ("solved by a sample", "by_prompt_2")):
        solved = {name: runs.unpacked(record[key]) for name, record in records.items() if key in record}
        table = [[title, *(f"{part}: of {mask.sum()}" for part, mask in parts.items())]]
        for name, right in (solved | {"largest - middle + smallest": always}).items():
            table.append([name, *(f"{np.sum(np.array(right)[mask]):.0f}" for mask in parts.values())])
        print(runs.markdown(table) + "\n")
    n, ks, masks = models.K, (1, 2, 4, 8, 16), {group: group_by_place[:first] == group for group in GROUPS}
    counts = [f"one of {n}, {group}: of {mask.sum()}" for group, mask in masks.items()]
    table = [[f"first {first}, solved by one of k samples, %", *map(str, ks), *counts]]
    for name, right in samples.items():
        shares = [np.mean([1 - comb(n - r, k) / comb(n, k) for r in right]) for k in ks]
        counts = [str((right[mask] > 0).sum()) for mask in masks.values()]
        table.append([name, *(f"{share:.1%}".rstrip("%") for share in shares), *counts])
    print(runs.markdown(table))


def main(before: Path, after: Path, problems: int = 20):
    pair = [greedy(folder) for folder in (before, after)]
    counts, shown = [Counter(), Counter()], []
    for prompt in pair[0]:
        text = prompt
        for number, found in enumerate(pair):
            columns, completion = found[prompt]["columns"], found[prompt]["completion"]
            what = kind(completion, columns["numbers"], columns["target"])
            for group in (group_of(columns["numbers"], columns["target"]), "all"):
                counts[number][group, what] += 1
            text += f"\n[{('before', 'after')[number]}: {what}]{completion}"
        shown.append(text)
    table = [["solved greedily", *(f"{what}: before, after" for what in KINDS)]]
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
