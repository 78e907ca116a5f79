"""``after(steps, None)``: gradients stay each rank's own from there on, so that replicas part as they should."""

from collections.abc import Callable

import pytest
from torch import nn

from faults.training import mlp, sgd, squares
from gossamer import Replica, after, loopback, replicate


def save(replica: Replica) -> None:
    replica.state_dict()
    replica.close()


def end(replica: Replica) -> None:
    replica.close(average=True)


@pytest.mark.parametrize("finish", [save, end])
def test_replicas_that_part_by_choice_can_be_saved_and_closed(finish: Callable[[Replica], None]) -> None:
    def run(rank: int) -> nn.Module:
        model = mlp()
        optimizer = sgd(model)
        replica = replicate(model, optimizer, after(2, None))
        for step in range(4):
            optimizer.zero_grad()
            squares(model, rank, step).backward()
            optimizer.step()
        finish(replica)
        return model

    loopback(run, 2)
