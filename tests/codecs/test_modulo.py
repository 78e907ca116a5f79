"""The last bits of a value's place: what they tell a worker that holds nearly the same, and when they tell nothing."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gossamer.codecs.kernels.reference import pack, unpack
from gossamer.codecs.modulo import BLOCK, ModuloGrid, reach, scale_all_blocks, scale_blocks


def grid(bits: int, numel: int, dtype: torch.dtype = torch.float64) -> ModuloGrid:
    return ModuloGrid(bits, torch.ones(-(-numel // BLOCK), dtype=dtype))


def told(bits: int, theirs: Tensor, own: Tensor) -> tuple[Tensor, list[bool]]:
    """What a worker with the places ``own`` makes of a message about ``theirs``: the same in both precisions, which kernels of
    their own compute, where the places are numbers of both."""
    difference, true = read(grid(bits, own.numel()), theirs.double(), own.double())
    if torch.equal(theirs.float().long(), theirs.long()):
        again, known = read(grid(bits, own.numel(), torch.float32), theirs.float(), own.float())
        assert torch.equal(again.double(), difference)
        assert torch.equal(known, true)
    return difference, true.tolist()


def read(grid: ModuloGrid, theirs: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """All of a message."""
    message, sizes = grid.pack(theirs)
    assert torch.equal(sizes, reach(theirs))
    difference = torch.empty_like(own)
    true, furthest = grid.difference(message, own, 1.0, difference, add=False)
    assert torch.equal(furthest, reach(difference))
    return difference, true


@pytest.mark.parametrize("bits", [8, 4])
@given(st.lists(st.integers(-(2**22), 2**22), min_size=BLOCK, max_size=BLOCK))
def test_packing_keeps_the_last_bits(bits: int, places: list[int]) -> None:
    tensor = torch.tensor([places], dtype=torch.int32)
    folded = pack(tensor & (2**bits - 1), bits)
    assert folded.shape == (1, BLOCK * bits // 8)
    assert unpack(folded, bits, BLOCK).tolist() == [[place % 2**bits for place in places]]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", [1, 511, 512, 513, 2**16 + 1])
def test_a_message_has_the_bits_and_a_checksum_per_block(bits: int, numel: int) -> None:
    message, _ = grid(bits, numel).pack(torch.zeros(numel, dtype=torch.float64))
    assert message.numel() == -(-numel // BLOCK) * (BLOCK * bits // 8 + 4)


@pytest.mark.parametrize("bits", [8, 4])
@given(st.integers(-(2**22), 2**22), st.data())
def test_the_nearest_place_is_the_senders(bits: int, place: int, data: st.DataObject) -> None:
    away = data.draw(st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
    difference, true = told(bits, torch.tensor([place + away]), torch.tensor([place]))
    assert (difference.tolist(), true) == ([away], [True])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", [511, 512, 513, 2**16, 2**17 + 700])
def test_differences_are_whole_steps_of_each_blocks_grid(bits: int, numel: int) -> None:
    steps = torch.linspace(0.5, 2, -(-numel // BLOCK), dtype=torch.float64)
    one = ModuloGrid(bits, steps)
    generator = torch.Generator().manual_seed(numel)
    own = 100 * torch.randn(numel, generator=generator, dtype=torch.float64)
    theirs = own + torch.rand(numel, generator=generator, dtype=torch.float64) * 2 ** (bits - 1) * 0.4
    difference, true = read(one, theirs, own)
    step = steps.repeat_interleave(BLOCK)[:numel]
    assert true.all()
    assert torch.allclose(difference, step * ((theirs / step).round() - (own / step).round()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("numel", [1, 513, 2**16 + 700])
def test_differences_are_shared_added_and_put_in_the_place_of_values(dtype: torch.dtype, numel: int) -> None:
    one = ModuloGrid(4, torch.linspace(0.5, 2, -(-numel // BLOCK), dtype=dtype))
    generator = torch.Generator().manual_seed(numel)
    own, theirs, total = (torch.rand(numel, generator=generator, dtype=dtype) * 3 for _ in range(3))
    message, _ = one.pack(theirs)
    difference, added, place = torch.empty_like(own), total.clone(), own.clone()
    one.difference(message, own, 1.0, difference, add=False)
    one.difference(message, own, 0.5, added, add=True)
    one.difference(message, place, 0.5, place, add=False)
    assert torch.equal(place, difference / 2)
    assert torch.equal(added, total + difference / 2)


@pytest.mark.parametrize("scale", [scale_blocks, scale_all_blocks])
@pytest.mark.parametrize("numel", [0, 1, 512, 2**16, 2**17 + 700])
def test_blocks_are_scaled_each_by_its_factor(scale: Callable[[Tensor, Tensor], None], numel: int) -> None:
    factors = (torch.arange(-(-numel // BLOCK)) % 7).bfloat16()
    tensor = torch.ones(numel)
    scale(tensor, factors)
    assert tensor.tolist() == [number // BLOCK % 7 for number in range(numel)]


@pytest.mark.parametrize("bits", [8, 4])
@given(st.integers(-(2**22), 2**22), st.integers(1, 2**16), st.sampled_from([-1, 1]))
def test_what_is_further_away_is_found_out(bits: int, place: int, turns: int, sign: int) -> None:
    places = torch.full((3 * BLOCK,), place)
    sent = places.clone()
    sent[BLOCK + 7] += sign * turns * 2**bits
    assert told(bits, sent, places)[1] == [True, False, True], "only in its own block"


def test_a_block_of_any_piece_is_found_out() -> None:
    places = torch.zeros(2**17)
    sent = places.clone()
    sent[2**16 + 3 * BLOCK] += 16
    assert [number for number, true in enumerate(told(4, sent, places)[1]) if not true] == [131]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("wrong", [(1, -1), (2, -1, -1), (1, -2, 1), (3, -3), (8, -8)])
@pytest.mark.parametrize("apart", [1, 10, 100])
def test_turns_up_and_down_do_not_hide_each_other(bits: int, wrong: tuple[int, ...], apart: int) -> None:
    places = torch.arange(BLOCK)
    sent = places.clone()
    for number, turns in enumerate(wrong):
        sent[5 + number * apart] += turns * 2**bits
    assert told(bits, places, places)[1] == [True]
    assert told(bits, sent, places)[1] == [False]
