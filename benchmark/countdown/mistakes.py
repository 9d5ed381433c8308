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
BY_SIZE = "a sum by the target's size"
FORMS = ["{2} + {1} + {0}", "{2} + {1} - {0}", "{2} - {1} + {0}", "{1} + {0} - {2}", "{2} - {1} - {0}"]  # {2}: largest


def kind(completion: str, numbers: list[int], target: int) -> str:
    if expression.correct([completion], [numbers], [target]) == [1]:
        return "right"
    if not expression.FORM.fullmatch(completion.strip()):
        return "form"
    return "value" if expression.uses(completion, numbers) else "numbers"


def sums_of(numbers: list[int]) -> list[int]:
    """Returns the values above 0 of sums and differences of all numbers, as targets are."""
    sums = (sum(sign * number for sign, number in zip(signs, numbers)) for signs in product((1, -1), repeat=3))
    return [value for value in sums if value > 0]


def group_of(numbers: list[int], target: int) -> str:
    return GROUPS[0] if target in sums_of(numbers) else GROUPS[1]


def by_size(problems: list[dict], solved: list[dict], limits: tuple[int, ...] = (20, 30)) -> list[str]:
    """Returns an expression for each problem, without computing anything: the form is looked up by how many of its
    numbers and of `limits` are below its target. Each form is the one that solves most problems of `solved`."""

    def size(row: dict) -> int:
        return sum(limit < row["target"] for limit in (*row["numbers"], *limits))

    def solves(form: str, row: dict) -> bool:
        return expression.correct([form.format(*sorted(row["numbers"]))], [row["numbers"]], [row["target"]]) == [1]

    rights = Counter((size(row), form) for row in solved for form in FORMS if solves(form, row))
    return [max(FORMS, key=lambda form: rights[size(row), form]).format(*sorted(row["numbers"])) for row in problems]


def greedy(folder: Path) -> dict[str, dict]:
    """Returns prompt -> completion of an evaluation."""
    lines = runs.lines(folder / "completions.jsonl")
    return {line["prompt"]: line for line in lines if line["mode"] == "greedy"}


def sign_test(more: int, fewer: int) -> float:
    """Returns the two-sided p of the exact test that one of two policies solves as many of the problems that they do
    not both solve or both miss: `more` are solved by the one alone, `fewer` by the other alone."""
    n = more + fewer
    return min(1.0, 2 * sum(comb(n, i) for i in range(min(more, fewer) + 1)) / 2**n)


def print_records(prepared: Path, records: dict[str, dict]):
    """Prints, for each record with a grade per test problem, how many are solved, and what fixed expressions solve;
    and, for each with many samples of the first problems, the share that one of k samples solves, in %."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(prepared / "base")
    problems = [row | {"place": place} for place, row in enumerate(runs.lines(prepared / "test.jsonl"))]
    group_by_place = np.array([group_of(row["numbers"], row["target"]) for row in problems])
    samples = {name: np.array(record["right"]) for name, record in records.items() if "right" in record}
    problems.sort(key=lambda row: len(rloo.prepare_example(row, tokenizer)["prompt_ids"]))  # as evaluations do
    columns = {name: [row[name] for row in problems] for name in ("numbers", "target")}
    solved = runs.lines(prepared / "sft.jsonl")
    fixed = {
        "largest - middle + smallest": [FORMS[2].format(*sorted(numbers)) for numbers in columns["numbers"]],
        BY_SIZE: by_size(problems, solved),
        f"{BY_SIZE}, without 20 and 30": by_size(problems, solved, ()),
    }
    always = {name: expression.correct(texts, **columns) for name, texts in fixed.items()}
    places = np.array([row["place"] for row in problems])
    first = max(map(len, samples.values()))
    parts = {group: group_by_place[places] == group for group in GROUPS}
    parts["sums suffice, not by size"] = parts[GROUPS[0]] & (np.array(always[BY_SIZE]) == 0)
    parts[f"first {first}"] = places < first
    for title, key in (("solved greedily", "by_prompt"), ("solved by a sample", "by_prompt_2")):
        rights = {name: runs.unpacked(record[key]) for name, record in records.items() if key in record}
        table = [[title, *(f"{part}: of {mask.sum()}" for part, mask in parts.items())]]
        for name, right in (rights | always).items():
            table.append([name, *(f"{np.sum(np.array(right)[mask]):.0f}" for mask in parts.values())])
        print(runs.markdown(table) + "\n")
    table = [["solved greedily, " + GROUPS[1], "with β = 0.05 alone", "with β = 0 alone", "p"]]
    for names in product(*([name for name in records if name.startswith(row)] for row in ("rloo_c_kl__", "rloo_c__"))):
        one, other = (np.array(runs.unpacked(records[name]["by_prompt"]))[parts[GROUPS[1]]] == 1 for name in names)
        more, fewer = (one & ~other).sum(), (other & ~one).sum()
        table.append([" and ".join(names), str(more), str(fewer), f"{sign_test(int(more), int(fewer)):.3f}"])
    print(runs.markdown(table) + "\n")
    n, ks, masks = models.K, (1, 2, 4, 8, 16), {group: group_by_place[:first] == group for group in GROUPS}
    counts = [f"one of {n}, {group}: of {mask.sum()}" for group, mask in masks.items()]
    table = [[f"first {first}, solved by one of k samples, %", *map(str, ks), *counts]]
    for name, right in samples.items():
        shares = [np.mean([1 - comb(n - r, k) / comb(n, k) for r in right]) for k in ks]
        counts = [str((right[mask] > 0).sum()) for mask in masks.values()]
        table.append([name, *(f"{share:.1%}".rstrip("%") for share in shares), *counts])
    chances = np.array([np.mean([x == row["target"] for x in sums_of(row["numbers"])]) for row in problems])
    shares = [np.mean(1 - (1 - chances[places < first]) ** k) for k in ks]
    table.append(["a random sum", *(f"{share:.1%}".rstrip("%") for share in shares), "", ""])
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
