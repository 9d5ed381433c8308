"""The verifier of Countdown: does an expression use each number once, and is its value the target?"""

import ast
import operator
import re
from contextlib import suppress
from fractions import Fraction

FORM = re.compile(r"[\d+\-*/() ]+")  # of an expression
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node: ast.expr) -> Fraction:
    """Returns the exact value of a tree of whole numbers and the four operators; other trees are a ValueError."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    raise ValueError(f"{ast.dump(node)} is not allowed")


def uses(text: str, numbers: list[int]) -> bool:
    """Returns whether a text has each of the numbers once, and no others."""
    return sorted(map(int, re.findall(r"\d+", text))) == sorted(numbers)


def correct(completions: list[str], numbers: list[list[int]], target: list[int], **columns) -> list[float]:
    """Returns 1 for each completion that solves its problem, else 0."""
    grades = []
    for text, given, wanted in zip(completions, numbers, target, strict=True):
        solved = False
        if uses(text, given) and FORM.fullmatch(text.strip()):
            with suppress(SyntaxError, ValueError, ZeroDivisionError):
                solved = value(ast.parse(text.strip(), mode="eval").body) == wanted
        grades.append(float(solved))
    return grades
