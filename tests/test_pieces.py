"""Tensors cut into even parts: nothing is lost, pieces are views, and what belongs together stays together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.pieces import cut, part_of, piece_name

sizes = st.lists(st.integers(0, 30), min_size=1, max_size=8)


@given(sizes, st.integers(2, 9))
def test_every_element_is_in_one_piece_and_parts_are_even(numels: list[int], parts: int) -> None:
    tensors = {f"t{i}": torch.zeros(numel) for i, numel in enumerate(numels)}
    pieces = cut(tensors, parts)
    for piece in pieces.values():
        piece += 1
    assert all((tensor == 1).all() for tensor in tensors.values())
    held = [0] * parts
    for name, piece in pieces.items():
        part = part_of(name)[1]
        assert part is not None
        held[part] += piece.numel()
    assert max(held) - min(held) <= 1
    assert [part_of(name)[1] for name in pieces] == sorted(part_of(name)[1] or 0 for name in pieces)


def test_one_part_is_everything_as_it_was() -> None:
    tensors = {"a": torch.zeros(3)}
    assert cut(tensors, 1) == tensors


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_dense_tensors_are_cut_in_the_order_of_their_memory(layout: torch.memory_format) -> None:
    tensor = torch.zeros(2, 3, 2, 2).contiguous(memory_format=layout)
    for number, piece in enumerate(cut({"w": tensor}, 3).values()):
        piece.fill_(number + 1)
    assert tensor.as_strided((24,), (1,)).tolist() == [1] * 8 + [2] * 8 + [3] * 8


def test_a_tensor_with_gaps_stays_whole() -> None:
    tensor = torch.zeros(4, 4)[:, ::2]
    (piece,) = cut({"w": tensor}, 2).values()
    assert piece is tensor


def test_a_view_is_cut_where_it_begins() -> None:
    base = torch.zeros(10)
    first, second = cut({"w": base[4:8]}, 2).values()
    first.fill_(1)
    second.fill_(2)
    assert base.tolist() == [0] * 4 + [1, 1, 2, 2] + [0] * 2


def test_what_is_remembered_is_cut_where_its_weight_is() -> None:
    tensors = {"a": torch.zeros(6), "b": torch.zeros(4), "momentum of b": torch.zeros(4)}
    pieces = cut(tensors, 2, lambda name: name.partition(" of ")[2] or name)
    shapes = {name: tuple(piece.shape) for name, piece in pieces.items()}
    assert shapes == {
        piece_name("a", 0): (5,), piece_name("a", 1): (1,), piece_name("b", 1): (4,), piece_name("momentum of b", 1): (4,)
    }  # fmt: skip


def test_a_name_that_looks_like_a_memory_is_a_weight() -> None:
    assert list(cut({"sum of parts": torch.zeros(2)}, 2, lambda name: name.partition(" of ")[2] or name)) == [
        piece_name("sum of parts", 0),
        piece_name("sum of parts", 1),
    ]


def test_names_are_taken_apart() -> None:
    assert part_of(piece_name("layers.0 [part 3]", 12)) == ("layers.0 [part 3]", 12)
    assert part_of("layers.0") == ("layers.0", None)
