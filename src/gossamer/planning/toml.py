"""TOML: tables of numbers, strings, lists and tables as text. The standard library reads it and does not write it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def dumps(values: Mapping[str, Any]) -> str:
    """``values`` as TOML; a list of mappings is an array of tables."""
    return "\n".join(_table(values, ())).strip() + "\n"


def _table(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    inner = {key: value for key, value in values.items() if _is_table(value)}
    for key, value in values.items():
        if key not in inner:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in inner.items():
        where = (*path, key)
        name = ".".join(map(_key, where))
        for each in [value] if isinstance(value, Mapping) else value:
            yield ""
            yield f"[{name}]" if isinstance(value, Mapping) else f"[[{name}]]"
            yield from _table(each, where)


def _is_table(value: Any) -> bool:
    several = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
    return isinstance(value, Mapping) or (several and all(isinstance(each, Mapping) for each in value))


def _key(key: str) -> str:
    return key if key.replace("_", "a").replace("-", "a").isalnum() and key.isascii() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)  # inf and nan are written as Python does
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"{value!r} has no place in TOML")
