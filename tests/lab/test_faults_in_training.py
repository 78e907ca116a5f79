"""Training on emulated hosts while they fail: what is chosen, and what is said."""

from collections.abc import Callable

import pytest

from gossamer.lab import LabSpec

from .conftest import Run

Lab = Callable[..., Run]

TRAINING = """
    import logging, os, sys, time, torch, torch.distributed as dist
    from datetime import timedelta
    import gossamer
    logging.basicConfig(level=logging.WARNING)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    del os.environ["GLOO_SOCKET_IFNAME"]  # gossamer finds an address by itself
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = gossamer.replicate(model, optimizer, gossamer.AllReduce(), timeout=90)
    for step in range({steps}):
        if step == 2 and rank == 2:
            print("training", flush=True)
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            time.sleep({pause})
    replica.close()
    print("done")
"""


@pytest.mark.slow
def test_gossamer_listens_at_the_address_that_reaches_the_store(lab: Lab, namespaces: None) -> None:
    """The name of an emulated host leads nowhere."""
    run = lab(LabSpec(hosts=3, timeout=200), TRAINING.format(steps=4, pause=0))
    assert run.result.exit_code == 0, run.lines
    assert [run.stdout(rank)[-1] for rank in range(3)] == ["done"] * 3


@pytest.mark.slow
def test_a_host_at_a_fiftieth_of_the_rate_is_named(lab: Lab, namespaces: None) -> None:
    spec = LabSpec(hosts=3, rate="50mbit", faults=["throttle 2 1mbit 40s @line:training"], timeout=280)
    run = lab(spec, TRAINING.format(steps=5, pause=3))
    warnings = [line for rank in range(3) for line in run.stderr(rank) if "has waited" in line]
    assert any("the link of rank 2 is slow" in line for line in warnings), warnings
    assert not any("the link of rank 0 is slow" in line or "the link of rank 1 is slow" in line for line in warnings), warnings
    assert run.result.exit_code == 0, run.lines
