"""SendWindow: in which order messages are posted, and how many are under way."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.comm.torch.send_window import TOGETHER, Message, SendWindow
from gossamer.errors import CommunicationError


class Wire:
    """What was posted, in order, and what of it is done."""

    def __init__(self) -> None:
        self.posted: list[int] = []
        self.done: set[int] = set()
        self.waits: list[int] = []
        self.sizes: dict[int, int] = {}

    def post(self, number: int, nbytes: int) -> list[Any]:
        self.posted.append(number)
        self.sizes[number] = nbytes
        return [Work(self, number)]

    def under_way(self) -> list[int]:
        return [number for number in self.posted if number not in self.done]


class Work:
    """A message of Gloo's: it only says that it is done when somebody has waited for it."""

    def __init__(self, wire: Wire, number: int, error: str = "") -> None:
        self._wire, self._number, self._error = wire, number, error

    def wait(self) -> None:
        if self._error:
            raise RuntimeError(self._error)
        self._wire.waits.append(self._number)
        self._wire.done.add(self._number)

    def is_completed(self) -> bool:
        return self._number in self._wire.done


sizes = st.lists(st.sampled_from([1, TOGETHER // 8, TOGETHER // 3, TOGETHER, 4 * TOGETHER]), min_size=1, max_size=12)


@given(st.lists(sizes, min_size=1, max_size=4), st.randoms())
def test_messages_are_posted_in_order_and_few_at_a_time_in_whatever_order_they_are_waited_for(
    operations: list[list[int]], random: Any
) -> None:
    wire, window, messages = Wire(), SendWindow(), list[Message]()
    wanted = [*chain.from_iterable(operations)]
    for operation in operations:
        first = len(messages)
        messages += window.put((partial(wire.post, first + n, size), size) for n, size in enumerate(operation))
    for message in random.sample(messages, len(messages)):
        busy = wire.under_way()
        assert len(busy) <= 2 or sum(wire.sizes[number] for number in busy) <= TOGETHER
        left = [number for number in range(len(messages)) if number not in wire.posted]
        if left:  # no room for the next one
            assert len(busy) >= 2
            assert sum(wire.sizes[n] for n in busy) + wanted[left[0]] > TOGETHER
        message.wait()
        assert message.done
        assert message.is_completed()
    assert wire.posted == sorted(wire.posted) == [*range(len(messages))]
    assert wire.done == set(wire.posted)


def test_what_needs_no_rounds_waits_its_turn() -> None:
    wire, window = Wire(), SendWindow()
    assert isinstance(window.put_together(partial(wire.post, 0, 1))[0], Work), "nothing is before it"
    messages = window.put((partial(wire.post, number, TOGETHER), TOGETHER) for number in (1, 2, 3))
    (late,) = window.put_together(partial(wire.post, 4, 1))
    assert wire.posted == [0, 1, 2]
    messages[0].wait()
    assert wire.posted == [0, 1, 2, 3]
    late.wait()
    assert wire.posted == [0, 1, 2, 3, 4]
    assert wire.done == {1, 2, 4}, "what is posted already is waited for by its waiter"


def test_all_is_posted_before_something_that_goes_another_way() -> None:
    wire, window = Wire(), SendWindow()
    window.put((partial(wire.post, number, TOGETHER), TOGETHER) for number in range(9))
    assert len(wire.posted) == 2
    window.empty()
    assert wire.posted == [*range(9)]


def test_after_an_error_nothing_more_is_posted_and_nobody_waits() -> None:
    wire, window = Wire(), SendWindow()
    (broken,) = window.put([(lambda: [Work(wire, 0), Work(wire, 9, "connection closed")], 1)])
    others = window.put((partial(wire.post, number, TOGETHER), TOGETHER) for number in range(1, 5))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed"):
            broken.wait()
    others[0].wait()
    for message in others[1:]:
        with pytest.raises(RuntimeError, match="connection closed"):
            message.wait()
    assert wire.posted == [1]
    assert wire.waits == [0, 1], "what is done is not waited for again"


def test_who_waits_behind_an_interrupted_wait_is_not_interrupted() -> None:
    class Interrupted:
        def wait(self) -> None:
            raise KeyboardInterrupt

    wire, window = Wire(), SendWindow()
    (broken,) = window.put([(lambda: [Interrupted()], 1)])
    others = window.put((partial(wire.post, number, TOGETHER), TOGETHER) for number in range(3))
    with pytest.raises(KeyboardInterrupt):
        broken.wait()
    with pytest.raises(CommunicationError, match="before this one has failed"):
        others[1].wait()


def test_a_message_that_another_thread_is_posting_is_waited_for() -> None:
    """The main thread posts everything before a collective, while a lane waits for an operation in rounds."""
    wire, window, posting, go_on = Wire(), SendWindow(), threading.Event(), threading.Event()

    def slowly() -> list[Any]:
        posting.set()
        assert go_on.wait(10)
        return wire.post(2, TOGETHER)

    *_, last = window.put([(partial(wire.post, 0, TOGETHER), TOGETHER), (partial(wire.post, 1, 1), 1), (slowly, 1)])
    with ThreadPoolExecutor(2) as threads:
        emptied = threads.submit(window.empty)
        assert posting.wait(10)
        waited = threads.submit(last.wait)
        wait([waited], timeout=0.1)
        go_on.set()
        for each in (emptied, waited):
            each.result(10)
    assert wire.posted == [0, 1, 2]
    assert wire.waits == [2]
