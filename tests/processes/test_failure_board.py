"""The board beside the exchanges: threads stand for ranks, a dictionary for the store."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gossamer.comm.calls import names
from gossamer.comm.torch import board as failure_board
from gossamer.comm.torch.attempts import note_exit
from gossamer.comm.torch.board import FailureBoard
from gossamer.comm.torch.store import StoreLostError, StoreSilentError
from gossamer.errors import CommunicationError, CommunicationTimeout, PeerLeftError


class Shelf:
    """A store in this process."""

    def __init__(self) -> None:
        self.posted: dict[str, str] = {}
        self.calls = 0
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.posted[key] = value

    def get(self, key: str) -> str:
        return self.posted[key]

    def values(self, keys: Sequence[str]) -> list[str]:
        self.calls += 1
        return [self.posted.get(key, "") for key in keys]

    def has(self, key: str) -> bool:
        self.calls += 1
        return key in self.posted

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.posted[key] = str(int(self.posted.get(key, "0")) + amount)
            return int(self.posted[key])


class Gone(Shelf):
    """A store whose host has ended."""

    def _ask(self, *arguments: Any) -> Any:
        raise StoreLostError("gone")

    has = set = get = add = values = _ask  # type: ignore[assignment]


def boards(world: int, store: Any = None) -> list[FailureBoard]:
    store = store or Shelf()
    return [FailureBoard(store, range(10, 10 + world), rank, "test") for rank in range(world)]


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Run at the same time; what each returned, or its error."""

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(attempt, calls))


def test_names() -> None:
    assert names([2]) == "rank 2"
    assert names({3, 1, 2}) == "ranks 1, 2, 3"


def test_many_ranks_are_asked_after_in_one_call() -> None:
    """All ranks look at the same time, mostly: one by one, their questions would keep the store busy for seconds."""
    store = Shelf()
    board = boards(200, store)
    board[5].leave(9)
    for look in (
        lambda: board[3].check(5, "an exchange"),
        lambda: board[3].late(5),
        lambda: board[3].elsewhere(5, "an exchange"),
        lambda: board[3].roll_call(0.15),
    ):
        store.calls = 0
        look()
        assert store.calls <= 4


def test_nothing_posted_costs_one_look() -> None:
    store = Shelf()
    boards(8, store)[3].check(5, "an exchange")
    assert store.calls == 1


def test_the_first_alarm_is_what_all_report() -> None:
    board = boards(3)
    board[1].alarm("the reason")
    board[2].alarm("a consequence")
    with pytest.raises(CommunicationError, match="rank 0 gave up an exchange: the reason"):
        board[0].check(0, "an exchange")


def test_a_departure_counts_from_its_flow_on() -> None:
    board = boards(3)
    board[2].leave(5)
    board[0].check(4, "flow 4")
    with pytest.raises(PeerLeftError, match=r"rank 0 waits in flow 5, but rank 2 ended .*join\(\)"):
        board[0].check(5, "flow 5")
    board[1].leave(4)
    with pytest.raises(PeerLeftError, match="ranks 1, 2"):
        board[0].check(6, "flow 6")


def test_a_departure_is_reported_before_the_alarm_that_follows_from_it() -> None:
    board = boards(3)
    board[2].leave(0)
    board[1].alarm("rank 1 waits in vain")
    with pytest.raises(PeerLeftError):
        board[0].check(0, "an exchange")


def test_who_is_late() -> None:
    board = boards(4)
    board[1].wait_in(7)
    assert board[0].late(7) == [2, 3], "the ranks that wait for nobody"
    board[2].wait_in(6)
    assert board[0].late(7) == [3]
    board[3].wait_in(7)
    assert board[0].late(7) == [2], "who waits in an earlier flow"
    board[2].wait_in(None)
    assert board[0].late(7) == [2]
    board[2].wait_in(8)
    assert board[0].late(7) == []


def test_of_two_threads_that_wait_the_one_in_the_earlier_flow_counts() -> None:
    """On a device one watches what was issued while the main thread waits for something else."""
    board = boards(3)
    board[2].wait_in(9)
    board[1].wait_in(9)
    in_threads(lambda: board[1].wait_in(4, "a bucket"))
    assert board[0].late(9) == [1]
    board[1].wait_in(None)
    assert board[0].elsewhere(4, "") == {1: "a bucket"}
    assert board[0].late(4) == [], "it still waits"


def test_who_waits_in_something_else() -> None:
    """What only some ranks have called is another flow with the same number."""
    board = boards(5)
    board[1].wait_in(7, "bucket 0 (a …) after step 5")
    board[2].wait_in(7, "the average of the replicas")
    board[3].wait_in(8, "something that comes later")
    board[4].wait_in(7)
    assert board[0].elsewhere(7, "bucket 0 (a …) after step 5") == {2: "the average of the replicas"}


def test_for_whom_bytes_wait() -> None:
    board = boards(4)
    board[1].note_backlog({2: 51234.4})
    board[2].note_backlog({3: 1000.0, 0: 0.0})
    board[3].note_backlog({})
    assert board[0].backlogs() == {1: {2: 51234.0}, 2: {3: 1000.0, 0: 0.0}}


def test_roll_call_names_who_is_silent() -> None:
    board = boards(4)

    def answer() -> None:
        time.sleep(0.3)
        board[2].check(0, "an exchange")

    missing, other, _ = in_threads(lambda: board[0].roll_call(1.0), lambda: board[3].roll_call(1.0), answer)
    assert missing == other == [1]
    assert not board[0].heard_by_all()
    board[2].leave(0)
    board[3].alarm("lost")
    assert board[0].heard_by_all()


def test_arrival() -> None:
    board = boards(3)
    assert in_threads(*(lambda b=b: b.arrive(5.0, "the start") for b in board)) == [None] * 3


def test_arrival_of_some(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_board, "WARN_AFTER", 0.1)
    board = boards(4)
    with caplog.at_level(logging.WARNING, "gossamer"):
        errors = in_threads(*(lambda b=b: b.arrive(0.5, "the start") for b in board[:2]))
    assert all(isinstance(error, CommunicationTimeout) for error in errors)
    assert all("the start: ranks 2, 3 not there after 0.5 s" in str(error) for error in errors)
    assert "the start: ranks 2, 3 not there" in caplog.text


@pytest.mark.parametrize("absent", ["alarm", "leave", "exit"])
def test_arrival_of_one_that_fails_first(absent: str) -> None:
    store = Shelf()
    board = boards(2, store)

    def fail() -> None:
        time.sleep(0.1)
        if absent == "exit":
            note_exit(store, 11, "its process ended with ValueError: x")  # the global rank of rank 1
        else:
            board[1].alarm("ValueError: x") if absent == "alarm" else board[1].leave(0)

    begin = time.monotonic()
    error, _ = in_threads(lambda: board[0].arrive(30.0, "the start"), fail)
    assert isinstance(error, CommunicationError)
    assert "rank 1" in str(error) or "ValueError: x" in str(error)
    assert time.monotonic() - begin < 2.0


def test_who_comes_after_the_others_gave_up_is_told() -> None:
    board = boards(2)
    with pytest.raises(CommunicationTimeout):
        board[0].arrive(0.2, "the start")
    board[0].alarm("rank 1 not there after 0.2 s")
    with pytest.raises(CommunicationError, match="rank 1 gave up the start: rank 1 not there after"):
        board[1].arrive(5.0, "the start")


def test_without_a_store_posting_is_quiet_and_reading_is_an_error() -> None:
    board = boards(2, Gone())[0]
    board.alarm("x")
    board.leave(1)
    assert not note_exit(Gone(), 0, "x")
    for read in (lambda: board.check(0, "x"), lambda: board.roll_call(0.1), lambda: board.arrive(1.0, "x")):
        with pytest.raises(StoreLostError):
            read()


def sealed(world: int, store: Shelf) -> list[FailureBoard]:
    made = boards(world, store)
    for board in made:
        board.seal(b"the secret of this run")
    return made


def test_a_message_that_no_rank_of_the_run_wrote_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Any process that reaches the store's port can write there, and read what is there; the secret is not."""
    store = Shelf()
    board = sealed(3, store)
    stranger = boards(3, store)[1]
    other_run = boards(3, store)[1]
    other_run.seal(b"the secret of another run")
    for forger in (stranger, other_run):
        forger.alarm("the run is over")
        forger.leave(0)
        with caplog.at_level(logging.WARNING, "gossamer"):
            board[0].check(5, "an exchange")
    assert "no rank of this run wrote it" in caplog.text
    assert not any("secret" in text for text in store.posted.values())


def test_a_message_cannot_be_made_another_ranks_or_another_replicas() -> None:
    store = Shelf()
    board = sealed(3, store)
    board[1].alarm("the reason")
    (key,) = (key for key in store.posted if key.endswith("alarm/1"))
    store.posted[key.replace("alarm/1", "alarm/2")] = store.posted[key]
    store.posted[key] = store.posted[key].replace("the reason", "another reason")
    board[0].check(5, "an exchange")
    again = FailureBoard(store, range(3), 0, "another replica")
    again.seal(b"the secret of this run")
    store.posted = {name.replace("/test/", "/another replica/"): text for name, text in store.posted.items()}
    again.check(5, "an exchange")


def test_a_message_says_who_wrote_it_and_the_order_cannot_be_spoilt() -> None:
    store = Shelf()
    board = sealed(3, store)
    for key in [key for key in store.posted if key.endswith("alarms")] or ["gossamer/attempt-0/test/alarms"]:
        store.posted[key] = "41"
    board[2].alarm("the reason")
    board[1].alarm("a consequence")
    with pytest.raises(CommunicationError, match=r"rank 0 gave up an exchange: the reason \(reported by rank 2\)"):
        board[0].check(0, "an exchange")


def test_messages_belong_to_one_attempt_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --max-restarts may keep the store while it starts all processes anew."""
    store = Shelf()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = boards(2, store)
    note_exit(store, 11, "its process ended with ValueError: x")
    first[1].alarm("of the first attempt")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = boards(2, store)
    assert in_threads(*(lambda b=b: b.arrive(5.0, "the start") for b in again)) == [None] * 2


def test_a_process_that_ended_without_a_word_does_not_come() -> None:
    begin = time.monotonic()
    with pytest.raises(PeerLeftError, match=r"rank 0: the start: rank 2 will not come: connections .* were closed"):
        boards(3)[0].arrive(60.0, "the start", ended=lambda absent: [rank for rank in absent if rank == 2])
    assert time.monotonic() - begin < 20.0


def test_a_store_that_is_silent_for_a_while_does_not_end_the_arrival() -> None:
    class Stopped(Shelf):
        def add(self, key: str, amount: int) -> int:
            if amount == 0 and time.monotonic() < begin + 0.5:
                raise StoreSilentError("the process of rank 0 has not answered for 10 s")
            return super().add(key, amount)

    begin = time.monotonic()
    assert in_threads(*(lambda b=b: b.arrive(20.0, "the start") for b in boards(2, Stopped()))) == [None] * 2


def test_boards_of_two_replicas_do_not_mix() -> None:
    store = Shelf()
    one, other = FailureBoard(store, range(2), 0, "a"), FailureBoard(store, range(2), 1, "b")
    other.alarm("x")
    other.leave(0)
    one.check(0, "an exchange")
