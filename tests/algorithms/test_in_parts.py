"""One part of the weights per step: the same mathematics, spread evenly over the steps."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, DecentralizedSGD, Gossip, GossipGraD, after, by_size, in_parts
from gossamer.algorithms.base import Algorithm
from gossamer.comm.loopback import loopback
from gossamer.comm.topology import Complete
from gossamer.errors import ConfigurationError

WORLD, PARTS = 4, 3


def drifted(algorithm: Algorithm, steps: int, world: int = WORLD, lr: float = 0.0) -> list[tuple[list[Tensor], list[float]]]:
    """All ranks' weights before the first step and after each, and the bytes that each step sent; they begin apart."""

    def body(rank: int) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, algorithm)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank)))
        seen, sent = [flat(model)], [replica.metrics()["bytes_sent"]]
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
            optimizer.step()
            seen.append(flat(model))
            sent.append(replica.metrics()["bytes_sent"])
        replica.close()
        seen.append(flat(model))
        return seen, [now - before for before, now in pairwise(sent)]

    return loopback(body, world)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def test_one_part_is_the_algorithm_itself() -> None:
    for (some, _), (others, _) in zip(drifted(in_parts(1, Gossip()), 5, lr=0.1), drifted(Gossip(), 5, lr=0.1), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_every_step_exchanges_its_part_only_and_all_come_in_turn() -> None:
    seen, sent = drifted(in_parts(PARTS, Gossip(wire="fp32")), 7)[1]
    n = seen[0].numel()
    bounds = [n * part // PARTS for part in range(PARTS + 1)]
    for step in range(1, 7):  # what left after step s, counted from one, is there after step s + 1
        changed = (seen[step + 1] != seen[step]).nonzero().flatten()
        part = step % PARTS
        assert changed.min() >= bounds[part]
        assert changed.max() < bounds[part + 1]
        assert sent[step - 1] == 4 * (bounds[part + 1] - bounds[part])


@pytest.mark.parametrize(("algorithm", "rounds"), [(Gossip(wire="fp32"), 2), (DecentralizedSGD(topology=Complete()), 1)])
def test_replicas_agree_after_all_parts_have_met_everyone(algorithm: Algorithm, rounds: int) -> None:
    # The first exchange follows step 1, so part 0 comes last.
    results = drifted(in_parts(PARTS, algorithm), PARTS * rounds + 1)
    finals, starts = [seen[-1] for seen, _ in results], [seen[0] for seen, _ in results]
    mean = torch.stack(starts).double().mean(0)
    for final in finals:
        torch.testing.assert_close(final.double(), mean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("algorithm", [Gossip(), GossipGraD(wire="bf16")])
def test_the_mean_is_kept_on_every_wire(algorithm: Algorithm) -> None:
    results = drifted(in_parts(PARTS, algorithm), 9)
    means = [torch.stack([seen[at] for seen, _ in results]).double().mean(0) for at in (0, -1)]
    torch.testing.assert_close(means[0], means[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: in_parts(0, Gossip()), "number of parts"),
        (lambda: in_parts(2.5, Gossip()), "number of parts"),
        (lambda: in_parts(2, AllReduce()), "moves gradients"),
        (lambda: in_parts(2, after(3, Gossip())), "goes inside after"),
        (lambda: in_parts(2, by_size(9, small=Gossip(), large=Gossip())), "not go with by_size"),
        (lambda: by_size(9, small=in_parts(2, Gossip()), large=Gossip()), "not go with in_parts"),
        (lambda: after(3, in_parts(2, Gossip()), before=in_parts(3, Gossip())), "cut once"),
        (lambda: in_parts(2, Gossip(lag=1)), "lag"),
        (lambda: in_parts(2, Gossip), "an instance"),
        (lambda: in_parts(2, in_parts(2, Gossip())), "all weights in one exchange"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


@pytest.mark.parametrize("before", [AllReduce(), Gossip(wire="fp32")])
def test_after_other_steps_replicas_agree_as_well(before: Algorithm) -> None:
    algorithm = after(3, in_parts(PARTS, DecentralizedSGD(topology=Complete())), before=before)
    finals = [seen[-1] for seen, _ in drifted(algorithm, 3 + PARTS)]
    for final in finals:
        torch.testing.assert_close(final, finals[0], atol=1e-6, rtol=1e-5)


def test_weights_that_are_moved_to_other_memory_are_followed() -> None:
    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(6, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, in_parts(PARTS, Gossip(wire="fp32")))
        for step in range(2 * PARTS):
            model(torch.ones(1, 6)).sum().backward()
            optimizer.step()
            if step == 0:
                with torch.no_grad():
                    nn.utils.vector_to_parameters(flat(model) + rank, model.parameters())
        replica.close()
        return flat(model)

    first, second = loopback(body, 2)
    torch.testing.assert_close(first, second)
