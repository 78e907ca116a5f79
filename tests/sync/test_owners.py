"""Optimizers that take turns over one replica: what one does not use reaches no other."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gossamer
from gossamer import AllReduce, ByteGrad, ChunkSparse, Gossip, Hierarchical, PowerSGD, ScatterReduce, loopback
from gossamer.algorithms import Algorithm
from gossamer.codecs import Quantize, Sign

WORLD = 3
DEBTORS = [
    ChunkSparse(chunk=2, density=0.2),
    PowerSGD(),
    ScatterReduce(codec=Sign(), gather_below=0),
    Hierarchical(ScatterReduce(codec=Quantize(bits=2)), inner=ScatterReduce(codec=Quantize(bits=2)), ranks_per_node=2),
]


def random(step: int, turn: int, rank: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + 10 * turn + rank))


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("algorithm", DEBTORS, ids=repr)
def test_what_the_other_ones_pass_gave_leaves_nothing_owed(algorithm: Algorithm, last: int) -> None:
    """The second's gradients pass through the first one's parameters, as a generator's through its discriminator. Each clears
    its own just before its pass."""

    def body(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        weights = nn.ParameterList([nn.Parameter(torch.zeros(8, 8)) for _ in range(2)])
        optimizers = [SGD([weight], lr=1.0) for weight in weights]
        replica = gossamer.replicate(weights, optimizers, algorithm)
        given = torch.zeros(2, 8, 8)
        for step in range(12 + last):
            turn = 1 - (step + 1) % 2
            optimizers[turn].zero_grad()
            factor = random(step, turn, rank)
            loss = (weights[turn] * factor).sum()
            if turn == 1:
                loss = loss + (weights[0] * random(step, 2, rank)).sum()
            loss.backward()
            given[turn] += factor
            optimizers[turn].step()
        assert replica._gradients is not None
        exchange = replica._gradients.exchange
        ((index, segment),) = [(b.index, s) for b in exchange.buckets for s in b.segments if s.name == str(turn)]
        owed = exchange.handlers[index].owed(exchange.states[index], exchange.context(0))
        assert owed is not None
        return -weights[turn].detach(), given[turn], segment.view(owed).clone()

    moved, given, owed = (torch.stack(each) for each in zip(*loopback(body, WORLD), strict=True))
    torch.testing.assert_close(WORLD * moved[0] + owed.sum(0), given.sum(0), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("algorithm", [AllReduce(), ByteGrad(), ScatterReduce(), Gossip()], ids=repr)
def test_an_overflow_of_one_ends(algorithm: Algorithm) -> None:
    """Its gradients stay until its own next turn: they make nobody else skip, and so do not come back to it either."""

    def body(rank: int) -> tuple[list[float], list[bool]]:
        nets = nn.ModuleList([nn.Linear(64, 4, bias=False) for _ in range(2)])
        optimizers = [SGD(net.parameters(), lr=0.1) for net in nets]
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
        gossamer.replicate(nets, optimizers, algorithm, scaler=scaler)
        scales, moves = [], []
        for step in range(6):
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                before = net.weight.detach().clone()
                broken = step == 1 and rank == 1 and net is nets[1]
                scaler.scale(net(torch.ones(1, 64)).sum() * (float("inf") if broken else 1.0)).backward()
                scaler.step(optimizer)
                moves.append(not torch.equal(before, net.weight))
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, moves

    for scales, moves in loopback(body, WORLD):
        assert scales == [16.0] + [8.0] * 5
        assert moves == [True] * 3 + [False] + [True] * 8


def test_only_what_is_not_exact_is_kept_apart() -> None:
    def body(rank: int) -> dict[str, int]:
        found = {}
        for algorithm in (AllReduce(), ScatterReduce()):
            nets = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            replica = gossamer.replicate(nets, [SGD(net.parameters(), lr=0.1) for net in nets], algorithm)
            assert replica._gradients is not None
            found[repr(algorithm)] = len(replica._gradients.exchange.buckets)
            replica.close()
        return found

    for found in loopback(body, 2):
        assert list(found.values()) == [1, 3], "of ScatterReduce the biases of both together, and the matrices of each"
