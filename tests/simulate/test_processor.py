"""What codecs, copies and messages take on the processor that the workers of a machine, or emulated machines, share."""

import pytest
import torch

from gossamer import AllReduce, ScatterReduce
from gossamer.algorithms import Algorithm
from gossamer.simulate import Cluster, Compute, Link, Machines, Processor, StepTime, step_time

from .test_step_time import tensors

WORLD = 4
COMPUTE = Compute(forward=0.02, backward=0.04)
FAST = Link(bandwidth=1e15)


def priced(algorithm: Algorithm, processor: Processor, world: int = WORLD) -> StepTime:
    cluster = Cluster(machines=Machines(count=world), between=FAST, processor=processor)
    return step_time(tensors(2**16), algorithm, cluster=cluster, compute=COMPUTE)


@pytest.mark.parametrize(
    ("algorithm", "world", "messages"),
    [(AllReduce(gather_below=0), 4, 6), (AllReduce(gather_below=0), 8, 14), (AllReduce(gather_below=2**30), 8, 7)],
    ids=["ring of 4", "ring of 8", "gathered by 8"],
)
def test_every_message_costs(algorithm: Algorithm, world: int, messages: int) -> None:
    found = priced(algorithm, Processor(message=1e-3, computes=False), world)
    assert found.processor_seconds == pytest.approx(1e-3 * messages)


@pytest.mark.parametrize("machines", [2, 4])
def test_emulated_machines_share_one_processor(machines: int) -> None:
    """Computing was timed on all of them, so it takes no longer; what is beside it takes a share of the cores."""
    own = priced(ScatterReduce(), Processor(cores=1, copy=1e9))
    shared = priced(ScatterReduce(), Processor(cores=1, copy=1e9, machines=machines))
    assert shared.compute_seconds == own.compute_seconds == COMPUTE.seconds
    assert shared.processor_seconds == pytest.approx(own.processor_seconds)
    assert shared.exposed_seconds == pytest.approx(machines * own.exposed_seconds, rel=0.01)


def test_what_computes_elsewhere_is_delayed_by_no_codec() -> None:
    slow = {"cores": 1, "copy": 1e8, "machines": WORLD}
    on_it, beside_it = (priced(ScatterReduce(), Processor(**slow, computes=computes)) for computes in (True, False))
    assert beside_it.step_seconds < on_it.step_seconds
    assert beside_it.processor_seconds == pytest.approx(on_it.processor_seconds)


def test_the_seconds_of_a_processor_are_a_sum_of_its_figures() -> None:
    """So that figures can be found from measured processor time by least squares."""
    figures = {"copy": 2e9, "transport": 1e9, "message": 2e-4}
    alone = [priced(ScatterReduce(), Processor(**{name: value})).processor_seconds for name, value in figures.items()]
    assert priced(ScatterReduce(), Processor(**figures)).processor_seconds == pytest.approx(sum(alone))
    assert all(seconds > 0 for seconds in alone)


def test_operations_that_write_are_counted_as_copies() -> None:
    nbytes = 4 * 2**16
    found = priced(AllReduce(), Processor(copy=1e9))
    assert found.processor_seconds >= nbytes / 1e9
    assert torch.isfinite(torch.tensor(found.step_seconds))
