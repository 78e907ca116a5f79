"""Every method that trains alone for some steps, with every codec and topology and between nodes: runs, or says why not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    DESLOC,
    DiLoCo,
    EagerDiLoCo,
    Gossip,
    Hierarchical,
    LocalSGD,
    LowPrecisionDecentralized,
    QuantizedGossip,
    ScatterReduce,
    SparseLoCo,
    loopback,
    sparta,
    streaming_diloco,
)
from gossamer.algorithms import Algorithm
from gossamer.algorithms.blocks.gathered import Gathered
from gossamer.codecs import ErrorFeedback
from gossamer.comm.topology import OnePeerExponential, Ring
from gossamer.errors import ConfigurationError

from ..contracts.cases import all_codecs, weights

WORLD, STEPS = 4, 7

METHODS: dict[str, Callable[..., Algorithm]] = {
    "LocalSGD": lambda **fields: LocalSGD(every=2, **fields),
    "DiLoCo": lambda **fields: DiLoCo(every=2, **fields),
    "SlowMo": lambda **fields: DiLoCo(every=2, rate=1.0, momentum=0.5, nesterov=False, **fields),
    "late deltas": lambda **fields: DiLoCo(every=2, lag=2, **fields),
    "without outliers": lambda **fields: DiLoCo(every=2, outlier=5.0, **fields),
    "streaming DiLoCo": lambda **fields: streaming_diloco(every=4, fragments=2, delay=2, **fields),
    "EagerDiLoCo": lambda **fields: EagerDiLoCo(every=2, **fields),
    "SparseLoCo": lambda **fields: SparseLoCo(every=2, **fields),
    "DESLOC": lambda **fields: DESLOC(every=2, **fields),
    "SPARTA": lambda **fields: sparta(DiLoCo(every=2, **fields), share=0.1),
}
WITHOUT_AVERAGING = ("LocalSGD", "DESLOC")
CODECS = list({type(codec): codec for codec in reversed(all_codecs()) if not isinstance(codec, ErrorFeedback)}.values())


def averagings() -> Iterator[Algorithm]:
    """Each codec over all workers and among peers, and gossip over two topologies."""
    for number, codec in enumerate(CODECS):
        yield Gathered(codec=codec) if number % 2 else ScatterReduce(codec=codec, gather_below=0, exact_vectors=False)
        yield LowPrecisionDecentralized(codec=codec)
    for topology in (Ring(), OnePeerExponential()):
        yield from (Gossip(topology=topology), QuantizedGossip(topology=topology))


def refusal(name: str, averaging: Algorithm | None, nodes: bool) -> str | None:
    """Why a method cannot be with this average, between nodes or not; None where it can."""
    among_peers = averaging is not None and averaging.subject == "weights"
    if name == "without outliers" and (among_peers or nodes):
        return "peers do not know what is in line" if among_peers else "takes three workers"
    if name == "EagerDiLoCo" and among_peers:
        return "EagerDiLoCo averages over all workers"
    return "lets them lag; set lag=0" if name == "late deltas" and nodes else None


def trained(algorithm: Algorithm) -> Tensor:
    """The weights of all workers, each of which pulls to its rank."""

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (model(torch.ones(2, 8)) - rank).square().mean().backward()
            optimizer.step()
        replica.close()
        return torch.stack([weights(model), start_of_all])

    torch.manual_seed(0)
    start_of_all = weights(nn.Linear(8, 4))
    return torch.stack(loopback(body, WORLD))


def check(name: str, averaging: Algorithm | None, nodes: bool) -> None:
    """It trains, or is refused for the reason that is known."""
    fields: dict[str, Any] = {} if averaging is None else {"averaging": averaging}

    def run() -> Tensor:
        method = METHODS[name](dense=0, **fields)
        return trained(Hierarchical(method, ranks_per_node=2) if nodes else method)

    reason = refusal(name, averaging, nodes)
    if reason is not None:
        with pytest.raises(ConfigurationError, match=reason):
            run()
        return
    found = run()
    assert found.isfinite().all()
    assert (found[:, 0].mean(0) - found[0, 1]).norm() > 0.1, "they have trained"


@pytest.mark.parametrize("nodes", [False, True], ids=["", "between nodes"])
@pytest.mark.parametrize("name", METHODS)
def test_alone_and_between_nodes(name: str, nodes: bool) -> None:
    check(name, None, nodes)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WITHOUT_AVERAGING])
def test_with_every_codec_and_two_topologies(name: str) -> None:
    for averaging in averagings():
        check(name, averaging, nodes=False)


@pytest.mark.parametrize("make", [ScatterReduce, Gathered, LowPrecisionDecentralized])
def test_error_feedback_is_the_average_s_own(make: Callable[..., Algorithm]) -> None:
    with pytest.raises(ConfigurationError, match="give the codec alone"):
        DiLoCo(averaging=make(codec=ErrorFeedback()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in WITHOUT_AVERAGING])
def test_with_every_codec_and_two_topologies_between_nodes(name: str) -> None:
    for averaging in averagings():
        check(name, averaging, nodes=True)
