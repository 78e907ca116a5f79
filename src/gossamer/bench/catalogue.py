"""Catalogue: workloads by what a user writes: a Python file of their own, or an emulated model such as ``ResNet50(2.0)``."""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gossamer.bench.emulated import MODELS, emulated
from gossamer.bench.spelled import value_of
from gossamer.bench.workload import Workload, usual_loss, usual_optimizer
from gossamer.errors import ConfigurationError

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


def digest(text: str | Path) -> str | None:
    """What tells one version of a workload's file from another; None of an emulated model, or where there is no file."""
    path = Path(text)
    return None if is_emulated(text) or not path.is_file() else hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def is_of(row: Mapping[str, Any], of_file: str | None) -> bool:
    """Whether a result is of the workload's file with this :func:`digest`. Old ones do not tell, and count as such."""
    return bool(row.get("digest", of_file) == of_file)


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
    try:
        spec.loader.exec_module(module)
    except Exception as error:
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
