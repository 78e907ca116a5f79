"""Cluster file: a cluster described in TOML. What is wrong in it is told with file, line and key.

name = "two machines"
[machines]
count = 2
[links.between]
rate = "10gbit"
latency = "50us"
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from gossamer import units
from gossamer.errors import ConfigurationError
from gossamer.simulate.cluster import Cluster, Machines, Pauses, Processor, Stragglers
from gossamer.simulate.profile import Link

Read = Callable[["Table", str], Any]
"""Takes the value of a key of a table."""


def shipped() -> dict[str, Path]:
    """The cluster files that come with gossamer, by name."""
    folder = Path(str(resources.files("gossamer.simulate") / "clusters"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_cluster(text: str) -> Cluster:
    """The cluster of a file, or one that is shipped, by its name. Raises ConfigurationError."""
    known = shipped()
    path = known.get(text, Path(text))
    if path.suffix == ".py":
        raise ConfigurationError(f"{text} is no cluster: write gossamer simulate CLUSTER --model {text}")
    if not path.is_file():
        near = get_close_matches(text, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigurationError(f"there is no file {text}; {hint}shipped clusters are {', '.join(known)}")
    return read_cluster(path)


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes. ConfigurationError, with file, line and key, if it does not describe any."""
    try:
        text = path.read_text()
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return _cluster(Table(path, text, (), content))


class Table:
    """One table of the file: its values, and where they are."""

    def __init__(self, path: Path, text: str, place: tuple[str, ...], values: Mapping[str, Any]) -> None:
        self.path, self.text, self.place, self.values = path, text, place, values

    def fields(self, reads: Mapping[str, Read]) -> dict[str, Any]:
        """What is said of these keys. Any other one is refused."""
        unknown = next((key for key in self.values if key not in reads), None)
        if unknown is not None:
            near = get_close_matches(unknown, reads, n=1)
            raise self.error(unknown, "unknown key; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(reads)}"))
        return {key: read(self, key) for key, read in reads.items() if key in self.values}

    def table(self, key: str) -> "Table":
        """A table in this one."""
        values = self.values[key]
        if not isinstance(values, Mapping):
            raise self.error(key, f"must be a table; got {values!r}")
        return Table(self.path, self.text, (*self.place, key), values)

    def error(self, key: str, problem: str) -> ConfigurationError:
        """What is wrong with the value of a key, or, of "", with the table."""
        place = (*self.place, *([key] if key else []))
        where = f", line {_line(self.text, place)}, {'.'.join(place)}" if place else ""
        return ConfigurationError(f"{self.path}{where}: {problem}")

    @contextmanager
    def telling(self, names: Mapping[str, str] | None = None) -> Iterator[None]:
        """An object that refuses a field says its name first: the key is that one, or what ``names`` has for it."""
        try:
            yield
        except ConfigurationError as error:
            field = str(error).split()[0].partition("[")[0].rstrip("=")
            key = (names or {}).get(field, field)
            raise self.error(key if key in self.values else "", str(error)) from None


def _line(text: str, place: tuple[str, ...]) -> int:
    """The line at which the value of a key ends: the first one up to which the file has it."""
    lines = text.splitlines(keepends=True)
    for number in range(1, len(lines) + 1):
        try:
            found: Any = tomllib.loads("".join(lines[:number]))
        except tomllib.TOMLDecodeError:
            continue  # in the middle of a value
        for key in place:
            found = found.get(key) if isinstance(found, Mapping) else None
        if found is not None:
            return number
    return max(1, len(lines))


# -- values -----------------------------------------------------------------------------------------------------------


def _as(parse: Callable[[object], float]) -> Read:
    def read(table: Table, key: str) -> float:
        try:
            return parse(table.values[key])
        except ConfigurationError as error:
            raise table.error(key, str(error)) from None

    return read


def _plain(table: Table, key: str) -> Any:
    """As it is: its type is checked where it is used."""
    return table.values[key]


def _tuple(table: Table, key: str) -> Any:
    value = table.values[key]
    return tuple(value) if isinstance(value, list) else value


def _each(read: Read, by_number: bool) -> Read:
    """A table of such values, by number of machine or by name."""

    def read_all(table: Table, key: str) -> dict[Any, Any]:
        inner = table.table(key)
        return {(_number(inner, each) if by_number else each): read(inner, each) for each in inner.values}

    return read_all


def _number(table: Table, key: str) -> int:
    if not key.isdecimal():
        raise table.error(key, "must be the number of a machine, from 0 on")
    return int(key)


# -- tables -----------------------------------------------------------------------------------------------------------

_TRANSPORT: dict[str, Read] = {
    "efficiency": _plain,
    "ceiling": _as(units.bits_per_second),
    "window": _as(units.nbytes),
    "all_reduce": _tuple,
}
_LINK: dict[str, Read] = {"rate": _as(units.bits_per_second), "latency": _as(units.seconds), **_TRANSPORT}


def _link(table: Table, key: str, usual: Link | None = None) -> Link:
    """A link; what it does not say is as ``usual``, if there is one."""
    inner = table.table(key)
    said = inner.fields(_LINK)
    if usual is None and "rate" not in said:
        raise inner.error("", 'has no rate: write for example rate = "10gbit"')
    with inner.telling({"bandwidth": "rate"}):
        usual = usual or Link()
        transport = replace(usual.transport, **{name: said[name] for name in _TRANSPORT if name in said})
        return Link(
            bandwidth=said.get("rate", usual.bandwidth), latency=said.get("latency", usual.latency), transport=transport
        )


def _links(table: Table, key: str) -> dict[str, Any]:
    inner = table.table(key)
    if "between" not in inner.values:
        raise inner.error("", 'has no [links.between], the link of each machine: write for example rate = "10gbit"')
    between = _link(inner, "between")

    def own(table: Table, key: str) -> Link:
        return _link(table, key, between)

    return inner.fields({"between": _link, "inside": _link, "across": _link, "own": _each(own, by_number=True)})


def _made(kind: Callable[..., Any], reads: Mapping[str, Read]) -> Read:
    """A table whose keys are the fields of an object."""

    def read(table: Table, key: str) -> Any:
        inner = table.table(key)
        said = inner.fields(reads)
        try:
            with inner.telling():
                return kind(**said)
        except TypeError as error:  # a field without a default
            missing = str(error).partition("argument: ")[2] or str(error).partition("arguments: ")[2]
            raise inner.error("", f"does not say {missing.replace(chr(39), '')}") from None

    return read


_TABLES: dict[str, Read] = {
    "name": _plain,
    "machines": _made(Machines, dict.fromkeys(("count", "devices", "device", "speed", "sites"), _plain)),
    "links": _links,
    "processor": _made(
        Processor,
        {
            "cores": _plain,
            "copy": _as(units.bytes_per_second),
            "kernels": _each(_as(units.bytes_per_second), by_number=False),
            "transport": _as(units.bytes_per_second),
            "message": _as(units.seconds),
            "computes": _plain,
            "machines": _plain,
        },
    ),
    "stragglers": _made(
        Stragglers,
        {
            "jitter": _plain,
            "distribution": _plain,
            "slow": _each(_plain, by_number=True),
            "pauses": _made(Pauses, {"every": _as(units.seconds), "seconds": _as(units.seconds)}),
            "seed": _plain,
            "steps": _plain,
        },
    ),
}


def _cluster(table: Table) -> Cluster:
    said = table.fields(_TABLES)
    for needed in ("machines", "links"):
        if needed not in said:
            raise table.error("", f"the file has no table [{needed}]")
    if not isinstance(said.get("name", ""), str):
        raise table.error("name", f"must be a text; got {said['name']!r}")
    links = said.pop("links")
    try:
        return Cluster(**({"name": table.path.stem} | said | links))
    except ConfigurationError as error:
        field = str(error).split()[0].rstrip("=")
        within = {"own": ("links", "own"), "across": ("links", "across"), "stragglers.slow": ("stragglers", "slow")}
        holder, key = within.get(field, ("machines", ""))
        raise table.table(holder).error(key, str(error)) from None


def with_machines(cluster: Cluster, count: int) -> Cluster:
    """The same cluster of so many machines. What is said of single machines holds where they are among them."""
    slow = {number: factor for number, factor in cluster.stragglers.slow.items() if number < count}
    return replace(
        cluster,
        machines=replace(cluster.machines, count=count),
        own={number: link for number, link in cluster.own.items() if number < count},
        stragglers=replace(cluster.stragglers, slow=slow),
    )
