"""Catalogue: workloads by what a user writes: a Python file of their own, or an emulated model such as ``ResNet50(2.0)``."""

import ast
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gossamer.bench.emulated import MODELS, emulated
from gossamer.bench.workload import Workload, usual_loss, usual_optimizer
from gossamer.errors import ConfigurationError
from gossamer.spelled import canonical, value_of

_OPTIONAL = ("training_batches", "quality", "training_samples")
_FUNCTIONS = ("build_model", "random_batch")
_DEFAULTS: Mapping[str, Any] = {"build_optimizer": usual_optimizer, "loss": usual_loss}
"""What a file may leave out, because only the time of a step is measured."""


def find_workload(text: str | Path) -> Workload:
    """The workload of a Python file, or an emulated model with its seconds per step. Raises ConfigurationError."""
    name = _model(text)
    if name not in MODELS:
        return load_workload(Path(text))
    try:
        made: Workload = value_of(str(text), {name: partial(emulated, name)})
    except (SyntaxError, TypeError, KeyError) as error:
        raise ConfigurationError(f"{text!s}: an emulated model takes its seconds per step, as in {name}(2.0)") from error
    return made


def is_workload(path: Path) -> bool:
    """Whether a file is to be loaded as a workload: it has the functions of one, or there is no such Python file."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return True  # so that loading it says what is wrong
    names = {each.name for each in body if isinstance(each, ast.FunctionDef)}
    names |= {alias.asname or alias.name for each in body if isinstance(each, ast.ImportFrom) for alias in each.names}
    names |= {name.id for each in body if isinstance(each, ast.Assign) for name in each.targets if isinstance(name, ast.Name)}
    return names.issuperset(_FUNCTIONS)


def canonical_workload(text: str) -> str:
    """A workload as it is compared: ``./mine.py`` is ``mine.py``."""
    return canonical(text) if is_emulated(text) else os.path.normpath(text)


def digest(text: str | Path) -> str | None:
    """What tells one version of a workload's file from another, and, after a ``+``, of what it imports from beside it.

    None of an emulated model, or where there is no file.
    """
    path = Path(text)
    if is_emulated(text) or not path.is_file():
        return None
    beside = _beside(path)
    return _hash([path]) + (f"+{_hash(beside)}" if beside else "")


def _hash(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def _beside(path: Path) -> list[Path]:
    """The files that a workload's file imports from its own folder, or that those import, by name."""
    found, waiting = set[Path](), [path]
    while waiting:
        for name in _imported(waiting.pop()):
            module, package = path.parent / f"{name}.py", path.parent / name
            fresh = {module} if module.is_file() else set[Path]()
            fresh |= set(package.rglob("*.py")) if (package / "__init__.py").is_file() else set()
            fresh -= {*found, path}
            found |= fresh
            waiting += fresh
    return sorted(found)


def _imported(path: Path) -> set[str]:
    """The first parts of the names of all modules that a file imports; nothing of one that is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def is_of(row: Mapping[str, Any], of_file: str | None) -> bool:
    """Whether a result is of the workload's file with this :func:`digest`. Old ones do not tell, or of the file alone, and
    count as such."""
    known = row.get("digest", of_file)
    return bool(known == of_file or (known and of_file and "+" not in known and of_file.startswith(known)))


def is_emulated(text: str | Path) -> bool:
    """Whether this names an emulated model, whose compute is waiting."""
    return _model(text) in MODELS


def _model(text: str | Path) -> str:
    return str(text).partition("(")[0]


def load_workload(path: Path) -> Workload:
    """The workload that a Python file defines by two functions, or four. Raises ConfigurationError if one of two is missing."""
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}; emulated models are {', '.join(MODELS)}, as in ResNet50(2.0)")
    spec = importlib.util.spec_from_file_location(f"workload_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is no Python file; a workload is one that defines {', '.join(_FUNCTIONS)}")
    module = importlib.util.module_from_spec(spec)
    # As when Python runs the file itself, what lies beside it can be imported.
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[spec.name] = module  # dataclasses and pickle look there for what the file defines
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise ConfigurationError(_failure(path, error)) from error
    missing = [name for name in _FUNCTIONS if not callable(getattr(module, name, None))]
    if missing:
        raise ConfigurationError(f"{path} defines no {', '.join(missing)}(); a workload needs {', '.join(_FUNCTIONS)}")
    functions: dict[str, Any] = {name: getattr(module, name) for name in _FUNCTIONS}
    functions |= {name: getattr(module, name, usual) for name, usual in _DEFAULTS.items()}
    functions |= {name: getattr(module, name, None) for name in _OPTIONAL}
    return Workload(path.stem.lstrip("0123456789_"), **functions)


def _failure(path: Path, error: Exception) -> str:
    """One line: where a workload's file went wrong, and how."""
    if isinstance(error, SyntaxError):
        return f"{error.filename or path}, line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1] if lines else 1}: {type(error).__name__}: {error}"
