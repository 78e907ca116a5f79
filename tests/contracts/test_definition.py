"""How every algorithm and codec is defined: frozen, keyword-only, said in words, found by itself."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Literal, get_origin, get_type_hints

import pytest

import gossamer
from gossamer.algorithms import Algorithm, registry
from gossamer.codecs import Codec
from gossamer.comm.topology import Topology
from gossamer.errors import ConfigurationError

from .cases import algorithms, all_codecs, descendants

classes = pytest.mark.parametrize("cls", [*registry().values(), *dict.fromkeys(map(type, all_codecs()))])
algorithm_classes = pytest.mark.parametrize("cls", list(registry().values()))


@classes
def test_hyperparameters_are_frozen_and_named(cls: type) -> None:
    for field in dataclasses.fields(cls):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(cls(), field.name, field.default)
        assert field.kw_only or field.name == "codec", "only a wrapped codec goes without its name"
    with pytest.raises(TypeError):
        cls(no_such_field=1)


@classes
def test_unknown_values_are_refused(cls: type) -> None:
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if get_origin(hints[field.name]) is Literal:
            with pytest.raises(ConfigurationError, match=f"{field.name} must be one of"):
                cls(**{field.name: "no such value"})


@algorithm_classes
@pytest.mark.parametrize("size", [0, -1, 1.5, "1MB", None])
def test_a_bucket_size_is_a_positive_number_of_bytes(cls: type[Algorithm], size: object) -> None:
    with pytest.raises(ConfigurationError, match="bucket_bytes"):
        cls(bucket_bytes=size)


@pytest.mark.parametrize("algorithm", algorithms(), ids=repr)
def test_the_representation_says_everything(algorithm: Algorithm) -> None:
    """Ranks agree on an algorithm by comparing its representation."""
    names = {cls.__name__: cls for cls in (*descendants(Algorithm), *descendants(Codec), *descendants(Topology))}
    assert eval(repr(algorithm), names) == algorithm


@algorithm_classes
def test_one_method_one_file(cls: type[Algorithm]) -> None:
    """Under about 100 lines; the docstring says what it sends, when not to use it, and where it comes from."""
    module = importlib.import_module(cls.__module__)
    assert module.__doc__.startswith(f"{cls.__name__}: ")
    assert len(inspect.getsource(module).splitlines()) <= 180
    for said in ("message", "Not the choice", "Source: "):
        assert said in cls.__doc__


@algorithm_classes
def test_registered_means_exported(cls: type[Algorithm]) -> None:
    assert getattr(gossamer, cls.__name__) is cls
    assert cls.__name__ in gossamer.__all__


def test_the_page_on_extending_gives_methods_their_parameters() -> None:
    """Those of an algorithm that it names with what they take."""
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    named = {name: taken for name, taken in re.findall(r"`(\w+)\(([\w, ]+)\)`", page) if hasattr(Algorithm, name)}
    assert {"finish", "hand_over", "put_back"} <= named.keys()
    for name, taken in named.items():
        assert ["self", *taken.split(", ")] == list(inspect.signature(getattr(Algorithm, name)).parameters), name


def test_an_algorithm_has_few_names() -> None:
    """What somebody must know before writing, or wrapping, one."""
    names = {name for name in dir(Algorithm) if not name.startswith("_")} | {f.name for f in dataclasses.fields(Algorithm)}
    assert len(names) <= 14, sorted(names)
