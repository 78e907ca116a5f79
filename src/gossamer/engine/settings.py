"""Settings: those of the algorithm that goes on with a saved state, beside those of the one that saved it."""

import ast
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from gossamer.algorithms.after import Phases
from gossamer.algorithms.base import CHANGEABLE, Algorithm
from gossamer.errors import ConfigurationError


def other_settings(algorithm: Algorithm, saved: str) -> list[str]:
    """Where the settings differ from those in ``saved``, the ``repr`` of the algorithm that saved the state.

    What it does not mention, because its version did not have it, was as by default.

    Raises:
        ConfigurationError: it is, or is made of, other algorithms: what those remember has another meaning.
    """
    if repr(algorithm) == saved:
        return []
    if isinstance(algorithm, Phases) and (last := algorithm.phases[-1][1]).traits.dense and repr(last) == saved:
        raise ConfigurationError(
            f"the state was saved by {saved} without a dense start, as switch() begins it: give replicate() that with dense=0"
        )
    return list(_differences(algorithm, _parsed(saved), "", f"the state was saved by {saved}, this replica runs {algorithm!r}"))


def _differences(now: Any, saved: ast.expr, place: str, refusal: str) -> Iterator[str]:
    if ast.dump(_parsed(repr(now))) == ast.dump(saved):
        return
    if isinstance(now, tuple) and isinstance(saved, ast.Tuple) and len(now) == len(saved.elts):
        for number, (value, element) in enumerate(zip(now, saved.elts, strict=True)):
            yield from _differences(value, element, f"{place}[{number}]", refusal)
        return
    same_kind = isinstance(saved, ast.Call) and ast.unparse(saved.func) == type(now).__name__ and not saved.args
    if not same_kind and (isinstance(now, Algorithm) or (now is None and isinstance(saved, ast.Call))):
        raise ConfigurationError(f"{refusal}: give replicate() the algorithm of the saved run")
    if not same_kind or not is_dataclass(now):
        yield f"{place} is {now!r}, was {ast.unparse(saved)}"
        return
    assert isinstance(saved, ast.Call)
    given = {keyword.arg: keyword.value for keyword in saved.keywords}
    for field in fields(now):
        if field.name == "residual" or field.metadata.get(CHANGEABLE):
            continue  # in how many bits it is kept, or when it is used, changes nothing of what it means
        value, inside = getattr(now, field.name), f"{place}.{field.name}".removeprefix(".")
        if field.name in given:
            yield from _differences(value, given[field.name], inside, refusal)
        elif value != _default(field):
            yield f"{inside} is {value!r}"


def _parsed(text: str) -> ast.expr:
    """The expression that a ``repr`` is; as a string, if it is none."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return ast.Constant(text)


def _default(field: "Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default
