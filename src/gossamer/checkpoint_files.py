"""Checkpoint files: how one rank writes, reads and removes them, so that each is there whole or not at all."""

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gossamer.errors import CheckpointError, ConfigurationError

COMPLETE = "complete.json"
_FOLDER = re.compile(r"step-(\d+)-([0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint: its folder, step, number, and by how many ranks it was saved."""

    place: Path
    step: int
    number: int
    world: int

    def path(self, rank: int) -> Path:
        """The file of a rank."""
        return self.place / file_name(rank, self.world)


def file_name(rank: int, world: int) -> str:
    """The file of one rank among ``world``."""
    return f"rank{rank}-of-{world}.pt"


def _write(path: Path, fill: Callable[[Path], None]) -> None:
    """Write a file that is there whole or not at all, also after a loss of power."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    fill(part)
    _to_disk(part)
    os.replace(part, path)
    for place in path.parents[:3]:  # the entries of the file, of its folder, and of the folder of all checkpoints
        with suppress(PermissionError):
            _to_disk(place)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(path: Path, contents: Mapping[str, Any]) -> None:
    """Write what one rank saves. Raises ConfigurationError if it could not be loaded safely."""

    def fill(part: Path) -> None:
        _save(part, contents)

    _write(path, fill)


def _save(path: Path, contents: Mapping[str, Any]) -> None:
    try:
        torch.save(dict(contents), path)
        torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except (OSError, RuntimeError):  # the disk; torch's writer has a RuntimeError for it
        raise
    except Exception as error:  # whatever the reader says: it would say the same when it is too late
        raise ConfigurationError(
            f"{_first_unreadable(contents)} holds more than numbers, strings, tensors and containers of them, and could not be "
            f"loaded safely: {str(error).splitlines()[0]}"
        ) from error


def _first_unreadable(contents: Mapping[str, Any]) -> str:
    for name, value in contents.items():
        written = io.BytesIO()
        try:
            torch.save(value, written)
            written.seek(0)
            torch.load(written, weights_only=True)
        except Exception:
            return f"{name}="
    return "what is saved"


def write_record(place: Path, record: Mapping[str, Any]) -> None:
    """Make a checkpoint, all of whose files are there, a complete one."""

    def fill(part: Path) -> None:
        part.write_text(json.dumps(record) + "\n")

    _write(place / COMPLETE, fill)


def read(path: Path) -> dict[str, Any]:
    """What one rank saved, on the host. Raises CheckpointError if that cannot be read."""
    try:
        contents: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    return contents


def complete(folder: Path) -> list[Found]:
    """The complete checkpoints that lie in ``folder``, the newest last."""
    found = []
    for place in folder.iterdir() if folder.is_dir() else ():
        named = _FOLDER.fullmatch(place.name)
        with suppress(OSError, ValueError, KeyError):  # without the record, or being removed: not complete
            record = json.loads((place / COMPLETE).read_text())
            if named:
                found.append(Found(place, int(record["step"]), number_of(place), int(record["world"])))
    return sorted(found, key=lambda each: each.number)


def number_of(place: Path) -> int:
    """The number of a checkpoint, by the name of its folder."""
    return int(place.name.rpartition("-")[2], 16)


def remove_older(folder: Path, keep: int, newest: Path) -> None:
    """Remove all but the ``keep`` newest complete checkpoints, and what ranks that ended have left unfinished."""
    kept = {each.place for each in complete(folder)[-keep:]} | {newest}
    for place in list(folder.iterdir()):
        if place not in kept and _FOLDER.fullmatch(place.name) and number_of(place) < number_of(newest):
            (place / COMPLETE).unlink(missing_ok=True)  # first: what is left of it is not complete
            shutil.rmtree(place, ignore_errors=True)
