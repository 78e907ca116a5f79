"""Tickets: what a lane has done is let go, with the memory of its result."""

import gc
import threading
import time
import weakref
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.loopback import LocalPort
from gossamer.comm.ops import Flow, all_reduce
from gossamer.comm.runner import Meter, Ticket
from gossamer.comm.torch.lanes import PromptTicket, ThreadLanes


class Port(LocalPort):
    ticket: Any = None


def result() -> Flow[Tensor]:
    yield from ()
    return torch.ones(5)


def test_the_result_of_the_last_flow_lives_no_longer_than_its_ticket() -> None:
    meter = Meter()
    lanes = ThreadLanes([Port(meter)], [meter])
    ticket: Ticket[Tensor] = Ticket(0, "the only one")
    lanes.submit(ticket, result, 0)
    assert ticket.wait(5)
    alive = weakref.ref(ticket.result)
    lanes.close()
    lanes._threads[0].join(5)
    gc.disable()
    try:
        del ticket
        assert alive() is None
    finally:
        gc.enable()


def test_lanes_that_nobody_closes_end_when_nobody_has_them() -> None:
    meters = [Meter(), Meter()]
    lanes = ThreadLanes([Port(meter) for meter in meters], meters)
    ticket: Ticket[Tensor] = Ticket(0, "the only one")
    lanes.submit(ticket, result, 0)
    assert ticket.wait(5)
    threads = lanes._threads
    del lanes
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_the_time_in_which_the_main_thread_waits_for_a_prompt_flow_is_the_flows() -> None:
    """Else what lanes do beside waiting would seem to take less than nothing."""
    meter = Meter()

    class Slow(Port):
        def interruptible(self, handle: Any) -> bool:
            return True

        def arrives(self, handle: Any, seconds: float) -> bool:
            time.sleep(0.05)
            meter.wire_seconds += 0.05
            return True

    def flow() -> Flow[Tensor]:
        return (yield from all_reduce(torch.ones(5)))

    ticket = PromptTicket[Tensor](0, "the only one")
    ticket.begin(flow, Slow(meter), meter)
    assert ticket.wait(5)
    assert meter.busy_seconds >= meter.wire_seconds == 0.05


def test_a_flow_is_carried_on_by_one_lane_however_often_it_is_handed_over() -> None:
    """Where a wait cannot be cut short that is when it begins, and again when its runner is closed."""
    meters = [Meter(), Meter()]
    lanes = ThreadLanes([Port(meter) for meter in meters], meters)
    carried: list[str] = []

    class Noting(PromptTicket[Tensor]):
        def carry_on(self) -> None:
            carried.append(threading.current_thread().name)

    ticket = Noting(0, "the only one")
    lanes.take_over(ticket, 1)
    lanes.take_over(ticket)
    lanes.close()
    for thread in lanes._threads:
        thread.join(5)
    assert carried == ["gossamer-lane-1"]
