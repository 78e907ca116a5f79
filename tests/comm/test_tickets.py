"""Tickets: what a lane has done is let go, with the memory of its result."""

import gc
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from gossamer.comm.ops import Flow
from gossamer.comm.runner import LocalPort, Meter, Ticket
from gossamer.lanes import PromptTicket, ThreadLanes


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
