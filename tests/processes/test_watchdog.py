"""What a device was given and does not finish is noticed beside the main thread, and ended."""

import logging
import re
import time
import weakref
from typing import Any

import pytest
import torch

from fake_device import FakeDevice, FakeEvent
from gossamer.comm.ops import AllReduce, Permute
from gossamer.comm.runner import Meter, Ticket
from gossamer.comm.topology import shift
from gossamer.comm.torch import board as failure_board
from gossamer.comm.torch import waiting as wait_policy
from gossamer.comm.torch.board import FailureBoard
from gossamer.comm.torch.device_ports import DevicePort
from gossamer.comm.torch.gloo import Circle
from gossamer.comm.torch.waiting import WaitPolicy
from gossamer.comm.torch.watchdog import Issued, Watchdog
from gossamer.errors import CommunicationTimeout, GossamerError
from processes.test_failure_board import Shelf

ASKED = ("all_reduce", "all 3 ranks")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_policy, "SLICE", 0.01)
    monkeypatch.setattr(wait_policy, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(failure_board, "WARN_AFTER", 0.2)


def issued(event: FakeEvent, number: int = 3) -> Issued:
    made = Issued(Ticket(number, f"bucket {number} (a …) at step 9"))
    made.follow(event, ASKED)
    return made


class Failed(list[GossamerError]):
    """What a runner was told."""

    def tell(self, error: GossamerError) -> None:
        self.append(error)


def watch(timeout: float) -> tuple[Watchdog, list[FailureBoard], Failed]:
    boards = [FailureBoard(store, range(3), rank, "test") for store in [Shelf()] for rank in range(3)]
    failed = Failed()
    return Watchdog(WaitPolicy(boards[0], 0, timeout), FakeDevice(), failed.tell), boards, failed


def until(holds: Any) -> bool:
    end = time.monotonic() + 30
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(holds())


def test_what_a_device_does_not_finish_is_named_and_ended(caplog: pytest.LogCaptureFixture) -> None:
    watching, boards, failed = watch(timeout=3.0)
    boards[1].wait_in(4)
    with caplog.at_level(logging.WARNING, "gossamer"):
        watching.add(issued(FakeEvent({}), 3))
        watching.add(issued(FakeEvent({}, done=False), 4))
        assert until(lambda: failed)
    where = "all_reduce of bucket 4 (a …) at step 9, waiting for all 3 ranks"
    (warning,) = {re.sub(r"waited \d+ s", "waited", record.getMessage()) for record in caplog.records}
    assert warning == f"rank 0 has waited in {where} (late: rank 2)"
    assert isinstance(failed[0], CommunicationTimeout)
    assert str(failed[0]) == f"rank 0 gave up after 3 s in {where}; late: rank 2"


def test_a_host_that_does_not_come_back_from_issuing_is_noticed() -> None:
    """The first message to a rank makes a connection, for which the host waits."""
    watching, _, failed = watch(timeout=0.3)
    made = Issued(Ticket(3, "bucket 3 (a …) at step 9"))
    watching.add(made)
    assert until(lambda: failed)
    assert "the first message to another rank of bucket 3 (a …) at step 9" in str(failed[0])


def test_a_flow_that_failed_before_it_was_issued_is_not_waited_for() -> None:
    watching, _, failed = watch(timeout=60.0)
    made = Issued(Ticket(3, "bucket 3"))
    watching.add(made)
    made.follow(None, ASKED)
    watching.close()
    assert watching.ends(5.0)
    assert not failed


def test_the_failure_of_another_rank_ends_what_waits_for_it() -> None:
    watching, boards, failed = watch(timeout=60.0)
    watching.add(issued(FakeEvent({}, done=False)))
    boards[2].alarm("the reason")
    assert until(lambda: failed)
    assert "the reason" in str(failed[0])


def test_what_is_finished_is_forgotten(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_board, "WARN_AFTER", 60.0)
    watching, _, failed = watch(timeout=60.0)
    event = FakeEvent({}, done=False)
    watching.add(issued(event))
    time.sleep(0.1)
    event.done = True
    watching.close()
    assert watching.ends(30.0)
    assert not failed
    assert not caplog.records


def test_its_end_is_that_of_the_work() -> None:
    watching, _, failed = watch(timeout=60.0)
    event = FakeEvent({}, done=False)
    watching.add(issued(event))
    watching.close()
    assert not watching.ends(0.1)
    event.done = True
    assert watching.ends(5.0)
    assert not failed


def test_its_end_is_a_failure_else() -> None:
    watching, _, failed = watch(timeout=0.2)
    watching.add(issued(FakeEvent({}, done=False)))
    watching.close()
    assert watching.ends(5.0)
    assert isinstance(failed[0], CommunicationTimeout)


def test_who_lets_go_of_it_leaves_no_thread_behind() -> None:
    """A runner that nobody closes is collected, with its communicators, although its watch waits for more to do."""
    watching, _, failed = watch(timeout=60.0)
    watching.add(issued(FakeEvent({})))
    ended, owner = watching._ended, weakref.ref(failed)
    del failed
    assert owner() is None
    del watching
    assert ended.wait(5.0)


class Group:
    def rank(self) -> int:
        return 1

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        return None

    def _get_backend(self, device: torch.device) -> "Group":
        return self

    supports_coalescing = False

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> None:
        return None

    recv = send


def test_a_port_says_once_what_it_was_asked() -> None:
    circle = Circle(Group(), Group(), (0, 1, 2))
    port = DevicePort(circle, lambda group: circle, Meter())
    assert port.asked() == ("the computation", "")
    for _ in range(2):
        port.start(AllReduce(torch.ones(2)))
    port.start(Permute(torch.ones(2), shift(1, 3)))
    peers = "all 3 ranks and rank 2 (sending to rank 0)"
    assert port.asked() == ("all_reduce and permute", peers)
    assert port.asked() == ("the computation", "")
