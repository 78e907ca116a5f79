"""Datasets in memory: whatever torch collates comes back bit for bit."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import TensorDataset, default_collate

from gossamer import ConfigurationError
from gossamer.data.shares import cut
from gossamer.data.table import count, load

Pair = namedtuple("Pair", ["image", "label"])


class Items:
    """A map-style dataset from a function."""

    def __init__(self, size: int, make: Any) -> None:
        self.size, self.make = size, make

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def same(ours: Any, theirs: Any) -> bool:
    (a, form), (b, other) = tree_flatten(ours), tree_flatten(theirs)
    return form == other and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.tensor([i, -i], dtype=torch.bfloat16),
        lambda i: (torch.full((2, 3), float(i)), i),
        lambda i: {"x": np.full((3,), i, dtype=np.uint8), "flag": i % 2 == 0, "weight": 0.5 * i},
        lambda i: Pair(torch.tensor(i / 3), np.float32(i)),
        lambda i: (torch.tensor(complex(i, 1)), (torch.zeros(0), np.int16(i))),
    ],
)
def test_it_stacks_as_torch_does(make: Any) -> None:
    dataset = Items(7, make)
    table = load(dataset, [5, 0, 6])
    assert count(dataset) == 7
    stacked, form = tree_flatten(table.layout.unpack(table.rows))
    assert form == tree_flatten(make(0))[1]
    assert same(stacked, tree_flatten(default_collate([make(5), make(0), make(6)]))[0])


@pytest.mark.parametrize("whole", [lambda x, y: TensorDataset(x, y), lambda x, y: (x, y), lambda x, y: (x.numpy(), y.numpy())])
def test_columns_are_taken_as_they_are(whole: Any) -> None:
    x, y = torch.arange(12.0).view(4, 3).t().contiguous().t(), torch.arange(4)
    table = load(whole(x, y), [3, 1])
    assert same(table.layout.unpack(table.rows), (x[[3, 1]], y[[3, 1]]))


def test_one_tensor_and_a_dict_and_a_list_of_items() -> None:
    x = torch.arange(6, dtype=torch.int8).view(3, 2)
    for dataset, expected in ((x, x), (x.numpy(), x), ({"a": x, "b": x}, {"a": x, "b": x}), (list(x), x)):
        table = load(dataset, [0, 1, 2])
        assert count(dataset) == 3
        assert same(table.layout.unpack(table.rows), expected)


def test_a_tuple_of_samples_is_a_dataset_of_items() -> None:
    pairs = ((torch.zeros(2), 1), (torch.ones(2), 2), (torch.ones(2), 3))
    table = load(pairs, [1, 2])
    assert count(pairs) == 3
    assert same(table.layout.unpack(table.rows), (torch.ones(2, 2), torch.tensor([2, 3])))
    assert count((torch.tensor(1), 2, 3)) == 3, "numbers, one of them in a tensor"


def test_arrays_of_any_layout(tmp_path: Path) -> None:
    """Backwards, every other row, of a file that may only be read; what is not chosen stays there."""
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    np.save(tmp_path / "x.npy", x)
    for array in (x[::-1], x[::2], x[:, ::-1], np.load(tmp_path / "x.npy", mmap_mode="r"), np.asfortranarray(x)):
        expected = torch.from_numpy(array[[3, 0]].copy())
        for dataset in (array, list(array)):
            table = load(dataset, [3, 0])
            assert same(table.layout.unpack(table.rows), expected)


def test_a_batch_shares_no_memory_with_the_table() -> None:
    table = load((torch.zeros(3, 2), torch.zeros(3)), [0, 1, 2])
    for tensor in table.layout.unpack(table.rows):
        tensor.fill_(9)
    assert table.rows.sum() == 0


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ([torch.zeros(2), torch.zeros(3)], r"number 1 is float32\[3\], number 0 is float32\[2\]"),
        ([torch.zeros(2), torch.zeros(2).int()], r"number 1 is int32\[2\]"),
        ([(torch.zeros(2),), [torch.zeros(2)]], "samples differ"),
        (["text"], "got str"),
        ([None], "got NoneType"),
        ([np.array(["a"])], "array of <U1"),
        (torch.zeros(3, 0), "hold no data"),
        ([()], "hold no data"),
        (torch.eye(3).to_sparse(), "dense tensors; got one of layout torch.sparse_coo"),
        ([torch.eye(3).to_sparse()], "dense tensors; got one of layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_stacked_is_refused(dataset: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        load(dataset, range(len(dataset)))


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ((torch.zeros(2), torch.zeros(3)), r"differ in length: \[2, 3\]"),
        (iter([1]), "len"),
        ({"a": 1}, "got dict"),
        ((torch.zeros(3, 2), [1, 2, 3]), "part 1 of the dataset is a list, beside tensors or arrays"),
        ({"x": np.zeros(3), "y": range(3)}, "part 'y' of the dataset is a range"),
    ],
)
def test_what_has_no_length_is_refused(dataset: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        count(dataset)


@pytest.mark.parametrize(
    ("size", "batches", "sizes"), [(12, 3, [4, 4, 4]), (9, 3, [4, 4, 1]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1]), (4, 1, [4])]
)
def test_shares_are_cut_into_the_same_number_of_batches(size: int, batches: int, sizes: list[int]) -> None:
    assert cut(size, batches, 4) == sizes
