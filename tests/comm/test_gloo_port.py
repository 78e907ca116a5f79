"""Operations on Gloo: what a group of ours says is what everyone is told."""

import pytest
import torch
import torch.distributed as dist

from gossamer.comm.ops import Broadcast
from gossamer.comm.runner import Meter
from gossamer.comm.torch.gloo import Circle, GlooPort


def test_a_source_that_is_not_there_is_named() -> None:
    """Functions of ``torch.distributed`` ask for a group's backend to describe an error, and know no group of ours."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = dist.ProcessGroupGloo(dist.PrefixStore("ours", store), 0, 1)  # type: ignore[attr-defined]
        circle = Circle(group, group, (0, 1))
        with pytest.raises(RuntimeError, match="invalid root rank: 5"):
            GlooPort(circle, lambda members: circle, Meter()).start(Broadcast(torch.ones(2), source=5))
    finally:
        dist.destroy_process_group()
