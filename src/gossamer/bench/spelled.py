"""Spelled: objects written as in a script, for command lines: calls of known names, with constants, and nothing else."""

import ast
from collections.abc import Mapping
from typing import Any


def value_of(text: str, names: Mapping[str, Any]) -> Any:
    """What ``text`` makes of ``names``. Raises SyntaxError, TypeError or KeyError (an unknown name)."""
    return _value(ast.parse(text, mode="eval").body, names)


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        keywords = {str(keyword.arg): _value(keyword.value, names) for keyword in node.keywords}
        return names[node.func.id](*(_value(each, names) for each in node.args), **keywords)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(_value(each, names) for each in node.elts)
    raise TypeError("only calls with constants are understood")
