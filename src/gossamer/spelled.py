"""Spelled: objects written as in a script, for command lines and files: calls of known names, with constants, nothing else."""

import ast
from collections.abc import Mapping
from inspect import isabstract
from typing import Any

from gossamer import codecs
from gossamer.algorithms import Algorithm, Hierarchical, after, by_size, in_parts, registry, sparta, streaming_diloco
from gossamer.algorithms.blocks.gathered import Gathered
from gossamer.comm import digraph, topology
from gossamer.comm.topology import Pattern
from gossamer.errors import ConfigurationError


def algorithm_names() -> dict[str, Any]:
    """What an algorithm may be made of: algorithms, combinations, codecs, topologies."""
    made_of: dict[str, Any] = {
        name: getattr(codecs, name) for name in codecs.__all__ if isinstance(getattr(codecs, name), type)
    }
    patterns = {**vars(topology), **vars(digraph)}.items()
    made_of |= {name: made for name, made in patterns if isinstance(made, type) and issubclass(made, Pattern)}
    made_of = {name: made for name, made in made_of.items() if not isabstract(made)}
    combinations = {"Hierarchical": Hierarchical, "after": after, "by_size": by_size, "in_parts": in_parts}
    others = {"Gathered": Gathered, "rotated": topology.rotated, "sparta": sparta, "streaming_diloco": streaming_diloco}
    return made_of | combinations | others | dict(registry())


def algorithm_of(text: str) -> Algorithm:
    """The algorithm that ``text`` spells. Raises ConfigurationError."""
    try:
        made = value_of(text, algorithm_names())
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{text!r} is no algorithm that is known here: {error}") from error
    if not isinstance(made, Algorithm):
        raise ConfigurationError(f"{text!r} is no algorithm; write for example Gossip(wire='bf16')")
    return made


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
