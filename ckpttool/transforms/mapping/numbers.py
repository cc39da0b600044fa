"""Numbers that rules need, such as a model's heads: whole numbers, and expressions of a config's entries."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ...errors import UsageFault
from ...tensors.ref import MAX_BYTES

Number = int | str  # an expression: "heads * head_dim"
MAX_EXPRESSION = 200  # characters

OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}


class Unknown(LookupError):
    """A number that nothing gives; its text is the name."""


def evaluated(expression: Number, known: Mapping[str, Any]) -> int:
    """Return the value of an expression of +, -, *, // and names, which may be dotted (`rope.theta`).

    Raises:
        Unknown: a name in it is no whole number of `known`.
        UsageFault: it is no such expression, or does not divide.
    """
    if isinstance(expression, int):
        return expression
    return _value(parsed(expression), expression, known)


def parsed(expression: str) -> ast.expr:
    """Return an expression as a tree. Raises UsageFault where it has parts that are not allowed."""
    try:
        tree = ast.parse(expression[: MAX_EXPRESSION + 1], mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        raise _no_expression(expression) from None
    for node in ast.walk(tree):
        allowed = isinstance(node, ast.BinOp | ast.Name | ast.Attribute | ast.operator | ast.Load | ast.USub)
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        if not (allowed or is_number or isinstance(node, ast.UnaryOp)) or len(expression) > MAX_EXPRESSION:
            raise _no_expression(expression)
        if isinstance(node, ast.operator) and type(node) not in OPERATIONS:
            raise _no_expression(expression)
    return tree


def _no_expression(expression: str) -> UsageFault:
    hint = "whole numbers and names with +, -, * and //, such as 'heads * head_dim'"
    return UsageFault(f"'{expression[:80]}' is no number", hint=hint)


def _value(node: ast.expr, whole: str, known: Mapping[str, Any]) -> int:
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return node.value
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, whole, known)
    if not isinstance(node, ast.BinOp):
        return _named(ast.unparse(node), known)
    left, right = (_value(side, whole, known) for side in (node.left, node.right))
    if isinstance(node.op, ast.FloorDiv):
        if not right or left % right:
            raise UsageFault(f"'{whole}': {left} does not divide by {right}")
        return left // right
    result = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]
    if abs(result) > MAX_BYTES:
        raise UsageFault(f"'{whole}' is larger than any tensor")
    return result


def _named(name: str, known: Mapping[str, Any]) -> int:
    """Return an entry by its name, dotted where it is inside another."""
    value: Any = known
    for step in name.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    if type(value) is not int:
        raise Unknown(name)
    return value


def first_known(expressions: Number | tuple[Number, ...], config: Mapping[str, Any]) -> int | None:
    """Return the value of the first expression whose names a config has; None where it has those of none."""
    for expression in expressions if isinstance(expressions, tuple) else (expressions,):
        with suppress(Unknown):
            return evaluated(expression, config)
    return None
