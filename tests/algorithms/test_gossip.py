"""Gossip: half-way towards one partner, without losing anything of the mean."""

import pytest
import torch

from gossamer import Gossip
from gossamer.codecs import Cast
from gossamer.comm.topology import dissemination

from ..contracts.cases import exchange, gossip, noise, stacked, tap


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_delta_is_half_the_difference_of_what_was_sent(wire: str, world: int) -> None:
    tensors, codec = noise(world, 50), Cast(wire=wire)
    rounded = torch.stack([codec.decode(codec.encode(tensor), tensor.numel(), tensor.dtype) for tensor in tensors])
    outcomes = exchange(Gossip(wire=wire), [tensors] * 4)
    for step in range(4):
        partners = dissemination(step, world)
        theirs = rounded[[partners.source(rank) for rank in range(world)]]
        assert torch.equal(stacked(outcomes, step), (theirs - rounded) / 2)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4])
def test_one_cycle_reaches_the_exact_mean_for_powers_of_two(exponent: int) -> None:
    tensors = noise(2**exponent, 50, torch.float64)
    for result in gossip(Gossip(wire="fp32"), tensors, exponent):
        assert torch.allclose(result, torch.stack(tensors).mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("wire", "floor"), [("fp32", 1e-6), ("fp16", 1e-3), ("bf16", 8e-3)])
def test_the_consensus_is_as_close_as_the_wire_is_precise(wire: str, floor: float) -> None:
    tensors = noise(6, 200)
    together = torch.stack(gossip(Gossip(wire=wire), tensors, 60))
    assert (together - together.mean(0)).abs().max() < floor * torch.stack(tensors).abs().max()


@pytest.mark.parametrize("world", [2, 3, 8, 24])
def test_one_message_per_step_in_any_world(world: int) -> None:
    tape: dict = {}
    exchange(tap(Gossip(), tape), [noise(world, 50)])
    sent = [line for line in tape[0, 0] if line.startswith("start")]
    assert len(sent) == world
    assert all(line.startswith("start permute(bfloat16[50], to=") for line in sent)
