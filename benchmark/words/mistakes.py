"""What kinds of mistakes greedy answers have, before and after, by template; and twenty problems in full.

    python benchmark/words/mistakes.py runs/words/sft__1.graded runs/words/rloo__1.graded > benchmark/records/words.txt

form: no number after ####. arithmetic: an equation of the answer is false, as 19 - 7 = 13. set-up: all equations are
true, but not the right ones.
"""

import re
import sys
from collections import Counter
from pathlib import Path

import answers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import runs  # noqa: E402

KINDS = ("right", "arithmetic", "set-up", "form")
NUMBER = r"\d+(?:\.\d+)?"
EQUATION = re.compile(rf"({NUMBER}(?: [-+*/] {NUMBER})+) = ({NUMBER})")


def equations(text: str) -> list[tuple[str, float]]:
    """Returns the equations of a text, without units: what is computed, and the result that is given."""
    plain = re.sub(r"(?<=[\d\s])x(?=[\d\s])", "*", text.replace("÷", "/").replace("=", " = "))
    plain = re.sub(r"[^\d.\-+*/=\n ]", " ", plain)
    plain = re.sub(r"(?<=[\d ])[-+*/](?=[\d ])", r" \g<0> ", plain)
    return [(left, float(right)) for left, right in EQUATION.findall(re.sub(" +", " ", plain))]


def kind(completion: str, answer: str) -> str:
    if answers.correct([completion], [answer])[0]:
        return "right"
    if answers.final_number(completion) is None:
        return "form"
    false = [left for left, right in equations(completion) if abs(eval(left) - right) > 0.01]  # digits and operators
    return "arithmetic" if false else "set-up"


def main(before: Path, after: Path, problems: int = 20):
    found = []
    for folder in (before, after):
        lines = [line for line in runs.lines(folder / "completions.jsonl") if line["mode"] == "greedy"]
        found.append([line | {"kind": kind(line["completion"], line["columns"]["answer"])} for line in lines])
    rows = [["template", *(f"{name}: before, after" for name in KINDS)]]
    for template in [*sorted({line["columns"]["template"] for line in found[0]}), "all"]:
        counts = [Counter(x["kind"] for x in lines if template in ("all", x["columns"]["template"])) for lines in found]
        rows.append([str(template), *(f"{counts[0][name]}, {counts[1][name]}" for name in KINDS)])
    print(runs.markdown(rows))
    pairs = list(zip(*found, strict=True))  # by length
    for old, new in pairs[:: max(1, len(pairs) // problems)][:problems]:
        print(
            f"\n{old['prompt']}\n[before: {old['kind']}]{old['completion']}\n[after: {new['kind']}]{new['completion']}"
        )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
