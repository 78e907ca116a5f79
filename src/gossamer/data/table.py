"""Table: a dataset in memory, one row of bytes per sample, whatever the samples are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import TensorDataset

from gossamer.errors import ConfigurationError


@dataclass(frozen=True)
class Field:
    """One tensor of a sample."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in one sample, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class Layout:
    """What a sample is made of: its tensors, and the structure (tuple, dict, …) that holds them."""

    structure: TreeSpec
    fields: tuple[Field, ...]

    @property
    def row_bytes(self) -> int:
        """Size of one sample in bytes."""
        return sum(field.nbytes for field in self.fields)

    def unpack(self, rows: Tensor) -> Any:
        """A batch from rows: uint8 ``(n, row_bytes)`` becomes the samples' structure, every tensor a new ``(n, *shape)``."""
        tensors, begin = [], 0
        for field in self.fields:
            column = torch.empty(len(rows), *field.shape, dtype=field.dtype)
            _bytes(column).view(len(rows), field.nbytes).copy_(rows[:, begin : begin + field.nbytes])
            tensors.append(column)
            begin += field.nbytes
        return tree_unflatten(tensors, self.structure)

    def __str__(self) -> str:
        return f"{tree_unflatten([str(field) for field in self.fields], self.structure)}".replace("'", "")


@dataclass(frozen=True)
class Table:
    """Samples as ``rows``: uint8 ``(n, layout.row_bytes)``."""

    layout: Layout
    rows: Tensor


def load(dataset: Any, chosen: Sequence[int]) -> Table:
    """The ``chosen`` samples of a dataset, in that order.

    ``dataset``: a tensor or array (a sample is a row), a tuple or dict of them, or anything with ``len()`` whose items
    are tensors, arrays, numbers, or tuples, lists and dicts of these.

    Raises:
        ConfigurationError: samples that differ in shape, dtype or structure, or hold something else than numbers.
    """
    columns = _columns(dataset)
    table = _from_items(dataset, chosen) if columns is None else _from_columns(columns, chosen)
    if table.layout.row_bytes == 0:
        raise ConfigurationError(f"the samples hold no data: {table.layout}")
    return table


def count(dataset: Any) -> int:
    """Number of samples. Raises ConfigurationError if there is none, or if columns differ in length."""
    columns = _columns(dataset)
    if columns is None:
        if isinstance(dataset, dict) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigurationError(
                "a dataset must be tensors or arrays (or a tuple or dict of them), or have len() and items 0, 1, …; "
                f"got {type(dataset).__name__}"
            )
        return len(dataset)
    lengths = {len(part) for part in tree_flatten(columns)[0]}
    if len(lengths) != 1:
        raise ConfigurationError(f"the columns of the dataset differ in length: {sorted(lengths)}")
    return lengths.pop()


def _columns(dataset: Any) -> Any:
    """Whole tensors or arrays whose rows are the samples; None for a dataset of items."""
    if isinstance(dataset, TensorDataset):
        return dataset.tensors
    if isinstance(dataset, Tensor | np.ndarray):
        return dataset
    if isinstance(dataset, tuple | dict):
        parts = tree_flatten(dataset)[0]
        if parts and all(isinstance(part, Tensor | np.ndarray) and part.ndim > 0 for part in parts):
            return dataset
        _refuse_other_parts(dict(enumerate(dataset)) if isinstance(dataset, tuple) else dataset)
    return None


def _refuse_other_parts(parts: Mapping[Any, Any]) -> None:
    """Raise ConfigurationError where a column lies beside something else, as no samples of one dataset would."""
    arrays = {name: part for name, part in parts.items() if isinstance(part, Tensor | np.ndarray)}
    others = {name: type(part).__name__ for name, part in parts.items() if name not in arrays}
    if others and any(part.ndim > 0 for part in arrays.values()):
        name, kind = next(iter(others.items()))
        raise ConfigurationError(
            f"part {name!r} of the dataset is a {kind}, beside tensors or arrays whose rows are the samples: make it one, too"
        )


def _from_columns(columns: Any, chosen: Sequence[int]) -> Table:
    parts, structure = tree_flatten(columns)
    index = torch.as_tensor(chosen, dtype=torch.int64)
    # Rows of an array are chosen first: it may lie in a file, be read-only, or run backwards.
    taken = (part[index.numpy()] if isinstance(part, np.ndarray) else _tensor(part)[index.to(part.device)] for part in parts)
    tensors = [_tensor(rows).cpu() for rows in taken]
    fields = tuple(Field(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors)
    rows = [_bytes(tensor).reshape(len(index), field.nbytes) for tensor, field in zip(tensors, fields, strict=True)]
    return Table(Layout(structure, fields), torch.cat(rows, 1))


def _from_items(dataset: Any, chosen: Sequence[int]) -> Table:
    """Each item becomes a row when it is read, so that the samples are in memory only once."""
    layout, rows = _flattened(dataset[chosen[0]])[0], torch.empty(0)
    for row, index in enumerate(chosen):
        own, content = _flattened(dataset[index])
        if own != layout:
            raise ConfigurationError(
                f"samples differ: number {index} is {own}, number {chosen[0]} is {layout}; pad or resize them to one shape"
            )
        if row == 0:
            rows = torch.empty(len(chosen), layout.row_bytes, dtype=torch.uint8)
        rows[row] = content
    return Table(layout, rows)


def _flattened(item: Any) -> tuple[Layout, Tensor]:
    """What an item is made of, and its bytes."""
    parts, structure = tree_flatten(item)
    tensors = [_tensor(part).cpu() for part in parts]
    fields = tuple(Field(tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    return Layout(structure, fields), torch.cat([torch.empty(0, dtype=torch.uint8), *map(_bytes, tensors)])


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ConfigurationError(f"samples must be dense tensors; got one of layout {value.layout}")
        return value.detach()
    if not isinstance(value, bool | int | float | complex | np.ndarray | np.generic):
        raise ConfigurationError(f"samples must be made of tensors, arrays and numbers; got {type(value).__name__}")
    array = np.asarray(value)  # Python's floats become doubles, as in torch's own collation
    try:
        return torch.from_numpy(array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"samples must hold numbers that torch knows; got an array of {array.dtype}") from error


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
