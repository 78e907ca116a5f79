"""Sides of a comparison are spelled as in a script, and nothing else is understood."""

from functools import partial

import pytest
import torch

from gossamer import AllReduce, Gossip, Hierarchical, PushSum, ScatterReduce, after
from gossamer.bench.sides import PLAIN, OverlapForward, join, parse_side
from gossamer.codecs import Quantize
from gossamer.comm.digraph import OutNeighbours
from gossamer.errors import ConfigurationError
from gossamer.optim import OneBitAdam


@pytest.mark.parametrize(
    ("text", "side"),
    [
        *((name, name) for name in PLAIN),
        ("AllReduce()", AllReduce()),
        ("Gossip(wire='fp16', bucket_bytes=1024)", Gossip(wire="fp16", bucket_bytes=1024)),
        ("ScatterReduce(codec=Quantize(bits=4))", ScatterReduce(codec=Quantize(bits=4))),
        ("Hierarchical(Gossip(), ranks_per_node=2)", Hierarchical(Gossip(), ranks_per_node=2)),
        ("overlap_forward(ScatterReduce())", OverlapForward(ScatterReduce())),
        ("after(3, Gossip())", after(3, Gossip())),
        ("PushSum(topology=OutNeighbours(((1,), (0,))))", PushSum(topology=OutNeighbours(((1,), (0,))))),
    ],
)
def test_sides_are_understood(text: str, side: object) -> None:
    assert parse_side(text) == side


@pytest.mark.parametrize(
    "text",
    [
        "ddq",
        "AllReduce",
        "Nothing()",
        "AllReduce(",
        "AllReduce(wires='fp16')",
        "Quantize()",
        "print(1)",
        "overlap_forward(3)",
        "PushSum(topology=RandomPush(peers=0))",
    ],
)
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"known:|is not an algorithm"):
        parse_side(text)


def test_an_optimizer_that_communicates_takes_the_others_place() -> None:
    side = parse_side("OneBitAdam(warmup=3)")
    assert isinstance(side, partial)
    model = torch.nn.Linear(2, 2)
    joined = join(side, model, torch.optim.SGD(model.parameters(), lr=0.5))
    assert joined.model is model
    assert isinstance(joined.optimizer, OneBitAdam)
    assert joined.optimizer.param_groups[0]["lr"] == 0.5
