"""What kinds of mistakes greedy completions have, before and after, by the operators of the generator's solution; and
twenty problems in full.

    python benchmark/countdown/mistakes.py runs/countdown/sft__1.graded runs/countdown/rloo__1.graded

value: a right form and right numbers, but another value than the target. numbers: not each number once. form: no
expression of whole numbers and operators.
"""

import sys
from collections import Counter
from pathlib import Path

import expression

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import runs  # noqa: E402

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
    for group in ("+ -", "*", "/", "all"):
        table.append([group, *(f"{counts[0][group, what]}, {counts[1][group, what]}" for what in KINDS)])
    print(runs.markdown(table))
    for text in shown[:: max(1, len(shown) // problems)][:problems]:
        print(f"\n{text}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
