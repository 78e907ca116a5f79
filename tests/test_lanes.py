"""Lanes of a device: whatever one stream writes and another reads or overwrites is ordered by an event."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_device import FakeDevice, Judge
from gossamer.comm.loopback import LocalPort, solo_runner
from gossamer.comm.ops import Flow, all_reduce
from gossamer.comm.runner import Meter, Ticket
from gossamer.comm.torch.lanes import ThreadLanes
from gossamer.comm.torch.streams import StreamLanes

Lanes = StreamLanes | ThreadLanes


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def judge(device: FakeDevice) -> Iterator[Judge]:
    with device.judged() as judge:
        yield judge


@pytest.fixture(params=["streams", "threads"])
def lanes(request: pytest.FixtureRequest, device: FakeDevice) -> Iterator[Lanes]:
    meters = [Meter(), Meter()]
    if request.param == "streams":
        made: Lanes = StreamLanes(LocalPort(meters[0]), device, 2)
    else:
        made = ThreadLanes([LocalPort(meter) for meter in meters], meters, device)
    yield made
    made.close()


def doubled(tensor: Tensor) -> Callable[[], Flow[Tensor]]:
    def flow() -> Flow[Tensor]:
        return (yield from all_reduce(tensor * 2)) + tensor

    return flow


def submit(lanes: Lanes, tensor: Tensor, lane: int = 0) -> Ticket[Tensor]:
    ticket: Ticket[Tensor] = Ticket(0, "a flow")
    lanes.submit(ticket, doubled(tensor), lane)
    assert ticket.wait(10)
    return ticket


def test_a_judge_sees_races(device: FakeDevice, judge: Judge) -> None:
    """Else the tests below could not fail."""
    with device.new_stream():
        written = torch.ones(3)
    written + 1
    assert "reads what stream 2 may not have written" in judge.races.pop()
    read, other = torch.ones(3), device.new_stream()
    other.wait_stream(device.default)
    with other:
        read.sum()
    assert judge.races == []
    read.zero_()
    assert "aten.zero_.default on stream 1 writes what stream 3 may still read" in judge.races


def test_a_flow_reads_what_was_written_before_it(device: FakeDevice, judge: Judge, lanes: Lanes) -> None:
    tensor = torch.ones(3)
    ticket = submit(lanes, tensor)
    device.follow(ticket.event, ticket.result)
    assert torch.equal(ticket.result * 1, torch.full((3,), 3.0))
    tensor.zero_()
    assert judge.races == []


def test_without_following_its_event_nobody_may_read_a_result(device: FakeDevice, judge: Judge) -> None:
    ticket = submit(StreamLanes(LocalPort(Meter()), device, 1), torch.ones(3))
    ticket.result * 1
    assert len(judge.races) == 1


@pytest.mark.parametrize("noted", [True, False])
def test_gradients_from_other_streams_are_waited_for(device: FakeDevice, judge: Judge, lanes: Lanes, noted: bool) -> None:
    """Autograd may lay the gradients of one bucket in on several streams; the last of them submits."""
    bucket = torch.zeros(4)
    for part in bucket.split(1)[:3]:
        stream = device.new_stream()
        stream.wait_stream(device.default)
        with stream:
            part.fill_(2.0)
            if noted:
                device.note_writer()
    submit(lanes, bucket)
    assert bool(judge.races) is not noted


def test_what_has_been_exchanged_is_not_waited_for_again(device: FakeDevice) -> None:
    with device.new_stream() as other:
        device.note_writer()
        device.note_writer()
    assert device.writers() == [device.default, other]
    device.forget_writers()
    assert device.writers() == [device.default]


def test_a_result_that_another_stream_uses_is_kept_for_it(device: FakeDevice, lanes: Lanes) -> None:
    ticket = submit(lanes, torch.ones(3))
    with device.new_stream() as reader:
        device.follow(ticket.event, ticket.result)
    assert device.kept == [(ticket.result, reader)]


def test_a_thread_works_on_the_stream_that_submitted(device: FakeDevice) -> None:
    """So that it follows what was issued there, and reuses memory of that stream only."""
    seen: list[Any] = []

    class Port(LocalPort):
        def start(self, op: Any, group: Any = None) -> Any:
            seen.append(device.current())
            return super().start(op, group)

    lanes = ThreadLanes([Port(Meter())], [Meter()], device)
    with device.new_stream() as stream:
        submit(lanes, torch.ones(1))
    lanes.close()
    assert seen == [stream]


def test_every_thread_says_on_which_device_it_works(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would wake the first one: a context of some hundred megabytes for each process of a machine."""
    entered: list[str] = []
    monkeypatch.setattr(device, "enter_thread", lambda: entered.append(threading.current_thread().name))
    meters = [Meter(), Meter()]
    lanes = ThreadLanes([LocalPort(meter) for meter in meters], meters, device)
    for lane in range(2):
        submit(lanes, torch.ones(2), lane)
    assert sorted(entered) == ["gossamer-lane-0", "gossamer-lane-1"]
    lanes.close()


def test_flows_compute_in_their_own_types(device: FakeDevice, lanes: Lanes) -> None:
    """Backward may run under autocast, and then flows are submitted there."""
    ticket: Ticket[Tensor] = Ticket(0, "a flow")

    def flow() -> Flow[Tensor]:
        yield from ()
        return torch.ones(2, 2) @ torch.ones(2, 2)

    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        lanes.submit(ticket, flow, 0)
        assert solo_runner().run(flow, "alone").dtype == torch.float32
    assert ticket.wait(10)
    assert ticket.result is not None
    assert ticket.result.dtype == torch.float32


def test_after_an_error_nothing_more_is_issued(device: FakeDevice, lanes: Lanes) -> None:
    def broken() -> Flow[Tensor]:
        raise ZeroDivisionError
        yield

    first: Ticket[Tensor] = Ticket(0, "broken")
    lanes.submit(first, broken, 0)
    assert first.wait(10)
    second: Ticket[Tensor] = Ticket(1, "next")
    lanes.submit(second, doubled(torch.ones(1)), 1)
    assert second.wait(10)
    assert isinstance(first.error, ZeroDivisionError)
    assert second.error is first.error
    assert not second.begun
