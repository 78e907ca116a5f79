"""Spelled: objects written as in a script, for command lines: calls of known names, with constants, and nothing else."""

import ast
from collections.abc import Mapping
from typing import Any


def value_of(text: str, names: Mapping[str, Any]) -> Any:
    """What ``text`` makes of ``names``. Raises SyntaxError, KeyError (an unknown name), or what calling them raises."""
    return _value(ast.parse(text, mode="eval").body, names)


def canonical(text: str) -> str:
    """The same as Python would write it, with quotes and spaces always alike, so that it is found again."""
    try:
        return ast.unparse(ast.parse(text, mode="eval")) if "(" in text else text
    except SyntaxError:
        return text  # refused where it is made an object


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        keywords = {str(keyword.arg): _value(keyword.value, names) for keyword in node.keywords}
        return names[node.func.id](*(_value(each, names) for each in node.args), **keywords)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Tuple):
        return tuple(_value(each, names) for each in node.elts)
    if isinstance(node, ast.Name):
        raise TypeError(_bare(node.id, names))
    raise TypeError(f"{ast.unparse(node)} is not understood: only names with brackets, and constants, are")


def _bare(name: str, names: Mapping[str, Any]) -> str:
    """What to write instead of a name by itself."""
    return f"write {name}()" if name in names else f"{name} is no name that is known here; if it is text, write {name!r}"
