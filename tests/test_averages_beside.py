"""A moving average of the weights is averaged over the ranks in ``consensus(…)``, on request."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gossamer
from gossamer import AllReduce, Gossip, PushSum, loopback
from gossamer.algorithms.base import Algorithm


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(rank: int, algorithm: Algorithm, **options: Any) -> tuple[gossamer.Replica, nn.Module, AveragedModel]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    replica = gossamer.replicate(model, optimizer, algorithm, **options)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(7 * step + rank), dtype=torch.float64)).sum().backward()
        optimizer.step()
        average.update_parameters(model)
    return replica, model, average


@pytest.mark.parametrize("algorithm", [Gossip(), PushSum(), gossamer.LocalSGD(every=3), AllReduce()], ids=repr)
def test_it_holds_the_mean_of_all_ranks_inside_and_its_own_afterwards(algorithm: Algorithm) -> None:
    own: dict[int, Tensor] = {}

    def body(rank: int) -> None:
        replica, model, average = trained(rank, algorithm, buffers="local")
        own[rank] = vector(average)
        mine, statistics = vector(model), average.module[1].running_mean.clone()
        with replica.consensus(average):
            inside, shared = vector(average), average.module[1].running_mean.clone()
            with replica.consensus(average):  # nested
                assert torch.allclose(vector(average), inside, rtol=0, atol=1e-12)
        assert torch.equal(vector(average), own[rank])
        assert torch.equal(vector(model), mine)
        assert torch.equal(average.module[1].running_mean, statistics)
        results[rank] = (inside, shared)
        replica.close()

    results: dict[int, tuple[Tensor, Tensor]] = {}
    loopback(body, 3)
    mean = torch.stack([own[rank] for rank in range(3)]).mean(0)
    for inside, shared in results.values():
        assert torch.allclose(inside, mean, rtol=0, atol=1e-12)
        assert torch.equal(shared, results[0][1])
    if not isinstance(algorithm, AllReduce):
        assert not torch.equal(own[0], own[1])


def test_modules_that_differ_between_ranks_are_named() -> None:
    def body(rank: int) -> None:
        replica, model, average = trained(rank, Gossip())
        with (
            pytest.raises(gossamer.DisagreementError, match="the modules beside the model"),
            replica.consensus(*([average] if rank else [average, model])),
        ):
            pass
        replica.close()

    loopback(body, 2)
