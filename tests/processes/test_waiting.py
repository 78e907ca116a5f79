"""Waiting for a lane: in slices, with a limit, and looking at what the others have posted."""

import logging
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from gossamer.comm.runner import Ticket
from gossamer.comm.torch import board as failure_board
from gossamer.comm.torch import waiting as wait_policy
from gossamer.comm.torch.board import FailureBoard
from gossamer.comm.torch.connection_errors import first_line, is_connection_error
from gossamer.comm.torch.links import Links
from gossamer.comm.torch.store import StoreSilentError
from gossamer.comm.torch.waiting import Opening, WaitPolicy
from gossamer.errors import CommunicationError, CommunicationTimeout, ConfigurationError, PeerLeftError, UsageError
from processes.test_failure_board import Gone, Shelf


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_policy, "SLICE", 0.01)
    monkeypatch.setattr(wait_policy, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(failure_board, "WARN_AFTER", 0.2)


def ticket(number: int = 3) -> Ticket[Any]:
    made: Ticket[Any] = Ticket(number, f"bucket {number} (a …) at step 9")
    made.doing, made.peers = "all_reduce(float32[5])", "all 3 ranks"
    return made


def three(timeout: float = 5.0, store: Any = None) -> tuple[WaitPolicy, list[FailureBoard]]:
    store = store or Shelf()
    boards = [FailureBoard(store, range(3), rank, "test") for rank in range(3)]
    return WaitPolicy(boards[0], 0, timeout), boards


def nothing() -> None:
    return None


def later(seconds: float, action: Any) -> None:
    threading.Timer(seconds, action).start()


def test_a_result() -> None:
    waiting, _ = three()
    made = ticket()
    later(0.05, made.done.set)
    assert waiting.wait(made, nothing) is made


def test_a_timeout_names_everything() -> None:
    waiting, boards = three(timeout=0.3)
    boards[1].wait_in(3)
    with pytest.raises(CommunicationTimeout) as caught:
        waiting.wait(ticket(), nothing)
    where = "all_reduce(float32[5]) of bucket 3 (a …) at step 9, waiting for all 3 ranks"
    assert str(caught.value) == f"rank 0 gave up after 0.3 s in {where}; late: rank 2"


def test_a_warning_comes_again_and_again_and_names_everything(caplog: pytest.LogCaptureFixture) -> None:
    waiting, boards = three()
    boards[1].wait_in(3)
    made = ticket()
    threading.Thread(
        target=lambda: [time.sleep(0.01) for _ in iter(lambda: len(caplog.records) < 3, False)] + [made.done.set()]
    ).start()
    with caplog.at_level(logging.WARNING, "gossamer"):
        waiting.wait(made, nothing)
    assert len(caplog.records) >= 3
    for record in caplog.records:
        assert re.fullmatch(
            r"rank 0 has waited \d+ s in all_reduce\(float32\[5\]\) of bucket 3 \(a …\) at step 9, "
            r"waiting for all 3 ranks \(late: rank 2\)",
            record.getMessage(),
        )


def test_ranks_that_wait_in_different_flows_do_not_wait_for_ever() -> None:
    waiting, boards = three()
    boards[1].wait_in(3, "the average of the replicas")
    boards[2].wait_in(3, "bucket 3 (a …) at step 9")
    with pytest.raises(UsageError, match=r"rank 0 waits in bucket 3 \(a …\) at step 9, but rank 1 in the average of the repl"):
        waiting.wait(ticket(), nothing)


def test_process_groups_of_other_ranks_may_be_opened_at_the_same_time(caplog: pytest.LogCaptureFixture) -> None:
    """One rank is late for one of them: that is no reason to end."""
    waiting, boards = three()
    first, second = (Opening[Any](3, f"gossamer.replicate(): NCCL among ranks {members}") for members in ([0, 3], [1, 2]))
    made = ticket()
    for rank, waited_for in ((1, second), (2, made)):
        threading.Thread(target=WaitPolicy(boards[rank], rank, 5.0).wait, args=(waited_for, nothing), daemon=True).start()
    for each in (first, second, made):
        later(1.0, each.done.set)
    with caplog.at_level(logging.WARNING, "gossamer"):
        assert waiting.wait(first, nothing) is first
    assert "every rank waits" in caplog.text


def test_where_ranks_may_part_flows_of_one_number_may_differ() -> None:
    waiting, boards = three()
    waiting.in_step = False
    boards[1].wait_in(3, "the end of exchanges that may lag")
    boards[2].wait_in(3, "the end of exchanges that may lag")
    made = ticket()
    later(1.2, made.done.set)
    assert waiting.wait(made, nothing) is made


def test_a_rank_that_goes_on_says_so() -> None:
    store = Shelf()
    waiting, boards = three(store=store)
    made = ticket()
    later(0.2, made.done.set)
    waiting.wait(made, nothing)
    boards[2].wait_in(4)
    assert boards[1].late(4) == [0]


def test_a_rank_that_got_on_in_between_goes_on_all_the_same() -> None:
    """It has said where it waits, then its wait began anew, and then it was over soon."""
    store = Shelf()
    waiting, boards = three(store=store)
    made, got_on = ticket(), []

    def meanwhile() -> bool:
        if not store.posted or got_on:
            return False
        got_on.append(True)
        made.done.set()
        return True

    waiting.wait(made, nothing, meanwhile)
    assert got_on
    boards[2].wait_in(4)
    assert boards[1].late(4) == [0]


def test_a_wait_that_begins_anew_warns_anew(caplog: pytest.LogCaptureFixture) -> None:
    waiting, _ = three(timeout=60.0)
    made = ticket()

    def meanwhile() -> bool:
        if len(caplog.records) == 2:
            made.done.set()
        return len(caplog.records) == 1 and not seen and not seen.append(True)  # type: ignore[func-returns-value]

    seen: list[bool] = []
    with caplog.at_level(logging.WARNING, "gossamer"):
        waiting.wait(made, nothing, meanwhile)
    assert len(caplog.records) == 2


def test_who_wakes_after_the_timeout_is_told_what_the_others_have_posted() -> None:
    """A process that was stopped while it waited: the wait is over, and its reason is on the board."""
    waiting, boards = three(timeout=0.3)
    boards[1].alarm("rank 1 gave up after 0.3 s in all_reduce; late: rank 0")

    class Stopped(Ticket[Any]):
        def wait(self, seconds: float) -> bool:
            time.sleep(0.5)
            return False

    made = Stopped(3, "bucket 3")
    with pytest.raises(CommunicationError, match=r"rank 1 gave up after 0\.3 s .*; late: rank 0 \(reported by rank 1\)"):
        waiting.wait(made, nothing)


def test_who_was_absent_for_longer_than_the_timeout_is_told_that_it_was_late() -> None:
    """The others have ended since, and the store with them."""
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [1.2.3.4]:5")
    waiting, _ = three(timeout=0.3, store=Gone())
    time.sleep(0.4)
    with pytest.raises(CommunicationTimeout, match=r"rank 0 was late: for 0 s it took part in no exchange \(stopped, or busy"):
        raise waiting.explain(waiting.wait(ticket(), lambda: failed_with(gloo)))
    waiting, _ = three(timeout=30.0, store=Gone())
    assert "the key-value store is lost too" in str(waiting.explain(waiting.wait(ticket(), lambda: failed_with(gloo))))


class Vanished(Links):
    """Connections to hosts that have acknowledged nothing for a while."""

    def __init__(self, *ranks: int) -> None:
        super().__init__()
        self._ranks = ranks

    def silent(self) -> dict[int, float]:
        return dict.fromkeys(self._ranks, 12.0)


def test_a_host_that_has_vanished_is_named_long_before_the_timeout() -> None:
    waiting, _ = three(timeout=60.0)
    waiting.links = Vanished(2)
    with pytest.raises(CommunicationError, match=r"all_reduce.*, but rank 2 cannot be reached: nothing .* for 12 s \(power"):
        waiting.wait(ticket(), nothing)
    waiting.links = Vanished(1, 2)
    with pytest.raises(
        CommunicationError, match="no other rank can be reached for 12 s: the host of rank 0 seems to be cut off"
    ):
        waiting.wait(ticket(), nothing)


def test_process_groups_that_cannot_be_opened_name_the_setting_that_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_policy, "ROLL_CALL", 0.2)  # nobody answers
    waiting, _ = three(timeout=0.2)
    waiting.opening_hint = "; rank 0 listens for the others at 10.0.0.1: name the network interface by GLOO_SOCKET_IFNAME"
    with pytest.raises(CommunicationTimeout, match=r"listens for the others at 10\.0\.0\.1: .* by GLOO_SOCKET_IFNAME"):
        waiting.wait(Opening(0, "gossamer.replicate()"), nothing)
    refused: Opening[Any] = Opening(0, "gossamer.replicate()")
    refused.error = RuntimeError("[gloo] Connection refused")
    assert "GLOO_SOCKET_IFNAME" in str(waiting.explain(refused))
    assert "GLOO_SOCKET_IFNAME" not in str(waiting.explain(failed_with(RuntimeError("[gloo] Connection closed"))))


def test_a_slow_link_is_named_where_every_rank_waits(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Links):
        def backed_up(self) -> dict[int, float]:
            return {2: 5e5}

    waiting, boards = three()
    waiting.links = Slow()
    boards[1].wait_in(3)
    boards[2].wait_in(3)
    boards[2].note_backlog({1: 5e5})
    made = ticket()
    later(0.8, made.done.set)
    with caplog.at_level(logging.WARNING, "gossamer"):
        waiting.wait(made, nothing)
    assert "(every rank waits: the link of rank 2 is slow, 4 Mbit/s go over it)" in caplog.text


def test_a_process_that_ended_without_a_word_is_named_and_nobody_else_is_asked() -> None:
    class Ended(Links):
        def __bool__(self) -> bool:
            return True

        def closed(self) -> list[int]:
            return [1]

    waiting, boards = three()
    waiting.links = Ended()
    begin = time.monotonic()
    text = str(waiting.explain(failed_with(RuntimeError("[gloo] Connection closed by peer"))))
    assert "rank 1 ended without a word" in text
    assert time.monotonic() - begin < 2.5, "a roll call would take three seconds"
    boards[2].leave(0)
    assert boards[0].heard_by_all(), "nobody waits until rank 1 has read the board"


def test_a_short_wait_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_policy, "LOOK_EVERY", 60.0)
    store = Shelf()
    waiting, _ = three(store=store)
    made = ticket()
    later(0.02, made.done.set)
    waiting.wait(made, nothing)
    assert not store.calls
    assert not store.posted


def test_alarms_and_departures_end_the_wait() -> None:
    waiting, boards = three()
    later(0.1, lambda: boards[2].alarm("the reason"))
    with pytest.raises(CommunicationError, match="the reason"):
        waiting.wait(ticket(), nothing)
    waiting, boards = three()
    later(0.1, lambda: boards[2].leave(3))
    with pytest.raises(PeerLeftError, match="rank 2"):
        waiting.wait(ticket(), nothing)


def test_what_is_posted_after_the_exchange_was_complete_does_not_end_it() -> None:
    """A rank that fails later may post it before this one has noticed that its own exchange is done."""
    made = ticket()

    class Late(Shelf):
        """Reading the alarm takes until the exchange is done."""

        def values(self, keys: Sequence[str]) -> list[str]:
            if "alarm" in keys[0]:
                read.extend(keys)
                made.done.set()
            return super().values(keys)

    read: list[str] = []
    waiting, boards = three(store=Late())
    boards[2].alarm("of the next step")
    assert not read
    assert waiting.wait(made, nothing) is made
    assert read


def test_another_flow_that_fails_ends_the_wait() -> None:
    waiting, _ = three()
    failed = ticket(4)
    assert waiting.wait(ticket(), lambda: failed) is failed


def test_a_lost_store_ends_the_wait() -> None:
    waiting, _ = three(store=Gone())
    with pytest.raises(CommunicationError, match=r"all_reduce.* the key-value store is lost: gone"):
        waiting.wait(ticket(), nothing)


def test_a_store_of_somebody_else_is_not_needed(caplog: pytest.LogCaptureFixture) -> None:
    """Its host may end hours before this group does; only nobody can be asked then."""
    boards = [FailureBoard(Gone(), range(1, 3), rank, "test") for rank in range(2)]
    waiting = WaitPolicy(boards[0], 0, 0.6, store_is_vital=False)
    with caplog.at_level(logging.WARNING), pytest.raises(CommunicationTimeout, match="nobody can be asked who is late: gone"):
        waiting.wait(ticket(), nothing)
    assert "(nobody can be asked who is late: gone)" in caplog.text


def test_ctrl_c_ends_the_wait() -> None:
    import _thread

    waiting, _ = three()
    begin = time.monotonic()

    def interrupted() -> None:
        later(0.1, _thread.interrupt_main)
        waiting.wait(ticket(), nothing)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - begin < 10.0


def failed_with(error: BaseException) -> Ticket[Any]:
    made = ticket()
    made.error = error
    return made


def test_explanations() -> None:
    waiting, boards = three()
    own = ConfigurationError("a field")
    assert waiting.explain(failed_with(own)) is own
    text = str(waiting.explain(failed_with(ZeroDivisionError("x"))))
    assert text.startswith("rank 0: all_reduce(float32[5]) of bucket 3 (a …) at step 9")
    assert "ZeroDivisionError('x')" in text
    boards[1].leave(0)
    gloo = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [1.2.3.4]:5. This is typically caused by x")
    assert isinstance(waiting.explain(failed_with(gloo)), PeerLeftError)
    waiting, boards = three()
    later(0.3, lambda: boards[1].check(0, "x"))
    text = str(waiting.explain(failed_with(gloo)))
    assert "no answer (ended, or busy with something else): rank 2" in text
    assert text.endswith("Connection closed by peer [1.2.3.4]:5)")
    waiting, _ = three(store=Gone())
    assert "the key-value store is lost too: gone" in str(waiting.explain(failed_with(gloo)))


def test_what_a_connection_error_is() -> None:
    assert is_connection_error(RuntimeError("[gloo/transport] Connection reset by peer"))
    assert is_connection_error(RuntimeError("Timed out waiting 1000ms"))
    assert not is_connection_error(RuntimeError("shape mismatch"))
    assert not is_connection_error(ValueError("Connection"))
    assert first_line(RuntimeError("one\ntwo")) == "one"


class Silent(Shelf):
    """Its host is stopped."""

    def has(self, key: str) -> bool:
        raise StoreSilentError("the process of rank 0 has not answered for 10 s")

    def values(self, keys: Sequence[str]) -> list[str]:
        return [str(self.has(key)) for key in keys]

    def set(self, key: str, value: str) -> None:
        raise StoreSilentError("the process of rank 0 has not answered for 10 s")


def test_a_silent_store_is_no_lost_one(caplog: pytest.LogCaptureFixture) -> None:
    """Its host may be stopped for a while: it is named, and the timeout is the limit."""
    waiting, _ = three(timeout=0.6, store=Silent())
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(CommunicationTimeout, match=r"; the process of rank 0 has not answered"),
    ):
        waiting.wait(ticket(), nothing)
    assert "(the process of rank 0 has not answered for 10 s)" in caplog.text
