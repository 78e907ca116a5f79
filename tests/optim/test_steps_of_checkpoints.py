"""torch.distributed.checkpoint takes a step with zeros for gradients, to see what an optimizer will keep."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import gossamer
from gossamer import AllReduce, Gossip, loopback


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=repr)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_state_may_be_asked_for_before_the_first_step(
    algorithm: gossamer.Algorithm, kind: type[torch.optim.Optimizer]
) -> None:
    def body(rank: int, asks: bool) -> tuple[Tensor, int]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = kind(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        if asks and rank == 0:
            get_state_dict(model, optimizer)
            optimizer.state.clear()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), 1.0 + rank)).sum().backward()
            optimizer.step()
        steps = replica.step
        replica.close(average=True)
        return model.weight.detach(), steps

    usual, asked = (loopback(lambda rank, asks=asks: body(rank, asks), 2) for asks in (False, True))
    for (weights, steps), (others, more) in zip(usual, asked, strict=True):
        assert torch.equal(weights, others)
        assert steps == more == 2
