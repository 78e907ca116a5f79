"""Methods of a comparison are spelled as in a script, and nothing else is understood."""

from functools import partial

import pytest
import torch

from gossamer import AllReduce, Gossip, Hierarchical, PushSum, ScatterReduce, after
from gossamer.algorithms import registry
from gossamer.bench.listing import everything
from gossamer.bench.methods import (
    OPTIMIZERS,
    PLAIN,
    OverlapForward,
    algorithm_of,
    join,
    known_names,
    overlaps_forward,
    parse_method,
)
from gossamer.bench.trained import _period
from gossamer.codecs import Quantize
from gossamer.comm.digraph import OutNeighbours
from gossamer.errors import ConfigurationError
from gossamer.optim import GossipAdamW, OneBitAdam


@pytest.mark.parametrize(
    ("text", "method"),
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
def test_methods_are_understood(text: str, method: object) -> None:
    assert parse_method(text) == method


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("AllReduce", r"write AllReduce\(\)"),
        ("Hierarchical(Gossip)", r"write Gossip\(\)"),
        ("AllReduce(", "never closed"),
        ("AllReduce(wires='fp16')", "wires"),
        ("Gossip(wire='int8')", "wire must be one of fp32, fp16, bf16; got 'int8'"),
        ("Gossip(wire=bf16)", "write 'bf16'"),
        ("Gossip(every=1 + 2)", r"1 \+ 2 is not understood"),
        ("Quantize()", "is not an algorithm"),
        ("overlap_forward(3)", "takes an algorithm"),
        ("PushSum(topology=RandomPush(peers=0))", "at least 1; got 0"),
        ("GossipAdamW(lr=0.1)", r"does not communicate; write for example with_optimizer\(Gossip\(\), GossipAdamW\(lr=0.1\)\)"),
        ("with_optimizer(GossipAdamW(), Gossip())", "takes an algorithm first"),
        ("with_optimizer(Gossip(), OneBitAdam())", "that does not communicate"),
        ("with_optimizer(Gossip(), Gossip())", "that does not communicate"),
        ("ScatterReduce(gather_below=True)", "got True"),
        ("Hierarchical(Gossip(), ranks_per_node=True)", "got True"),
        ("PowerSGD(rank=True)", "got True"),
        ("after(True, Gossip())", "got True"),
        ("Gossip(bucket_bytes=True)", "got True"),
    ],
)
def test_what_is_wrong_with_a_method_is_told_without_a_list(text: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        parse_method(text)
    assert "Known:" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("ddq", "ddp"),
        ("gossip", "Gossip()"),
        ("Alreduce()", "AllReduce()"),
        ("ddp-fp17", "ddp-fp16"),
        ("Hierarchical(Gosip())", "Gossip()"),
    ],
)
def test_an_unknown_name_is_told_with_those_that_are_near_and_all_that_are_known(text: str, near: str) -> None:
    with pytest.raises(ConfigurationError, match="unknown method") as caught:
        parse_method(text)
    hint, known = str(caught.value).split("Known: ")
    assert near in hint.split("did you mean ")[1].removesuffix("? ").split(" or ")
    assert {*PLAIN, "Gossip"} <= {*known.split(", ")}


def test_calls_of_anything_else_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown method 'print'"):
        parse_method("print(1)")


def test_an_optimizer_that_communicates_takes_the_others_place() -> None:
    method = parse_method("OneBitAdam(warmup=3)")
    assert isinstance(method, partial)
    model = torch.nn.Linear(2, 2)
    joined = join(method, model, torch.optim.SGD(model.parameters(), lr=0.5))
    assert joined.model is model
    assert isinstance(joined.optimizer, OneBitAdam)
    assert joined.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("text", ["Gossip()", "overlap_forward(ScatterReduce())"])
def test_an_algorithm_goes_with_another_optimizer_than_the_workloads(text: str) -> None:
    method, alone = parse_method(f"with_optimizer({text}, GossipAdamW(eps=0.5))"), parse_method(text)
    assert (algorithm_of(method), overlaps_forward(method)) == (algorithm_of(alone), overlaps_forward(alone))
    model = torch.nn.Linear(2, 2)
    joined = join(method, model, torch.optim.SGD(model.parameters(), lr=0.25))
    assert isinstance(joined.optimizer, GossipAdamW)
    assert (joined.optimizer.param_groups[0]["lr"], joined.optimizer.param_groups[0]["eps"]) == (0.25, 0.5)
    joined.close()


def test_an_optimizer_that_does_not_take_what_it_is_given_is_told() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=r"GossipAdamW: .*speed"):
        join(parse_method("with_optimizer(Gossip(), GossipAdamW(speed=1))"), model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_optimizers_that_communicate_are_known_as_such() -> None:
    assert {*OPTIMIZERS} == {"OneBitAdam", "QAdam"}
    assert algorithm_of(parse_method("QAdam()")) is None
    assert algorithm_of("ddp") is None


@pytest.mark.parametrize(
    ("method", "period"),
    [
        ("Gossip()", 1),
        ("Gossip(every=2)", 2),
        ("Gossip(lag=3)", 4),
        ("Gossip(every=2, lag=3)", 8),
        ("in_parts(8, Gossip())", 8),
        ("with_optimizer(Gossip(lag=1), GossipAdamW())", 2),
        ("OneBitAdam(warmup=2)", 1),
        ("post-localsgd", 8),
    ],
)
def test_a_method_is_timed_over_whole_periods_of_its_exchanges(method, period):
    """One that may lag is waited for only when it is late: over fewer steps nobody would ever wait for it."""
    assert _period(parse_method(method)) == period


def test_everything_that_is_listed_can_be_parsed():
    methods = everything()
    assert {"ddp", "torchft-diloco", "AllReduce()", "Gossip()", "OneBitAdam(warmup=2)"} <= set(methods)
    assert {f"{name}()" for name in registry()} <= set(methods), "a new algorithm appears by itself"
    for method in methods:
        parse_method(method)


def test_rotated_topologies_and_nothing_that_cannot_be_made():
    assert "Rotated" in repr(parse_method("Gossip(topology=rotated(Ring()))"))
    assert not {"Pattern", "Topology", "Codec"} & set(known_names())
