"""Connections by rank: whose process has closed them, whose host is silent, and which link is backed up."""

import itertools
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from gossamer.comm.torch import links, sockets
from gossamer.comm.torch.links import Links, described, slow_rank
from gossamer.comm.torch.sockets import Connection, Progress

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Three connections between this process and itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = []
        for _ in range(3):
            near = socket.create_connection(server.getsockname())
            made.append((near, server.accept()[0]))
        yield made
        for end in itertools.chain(*made):
            end.close()


def own(end: socket.socket) -> Connection:
    return next(each for each in sockets.connections() if each.descriptor == end.fileno())


def of_rank_0(pairs: list[Pair]) -> Links:
    """Rank 0 has one connection to rank 1 and two to rank 2."""
    sides = [[own(near) for near, _ in pairs], [own(pairs[0][1])], [own(far) for _, far in pairs[1:]]]
    everyone = torch.stack([described(side, 4) for side in sides])
    return Links.found(sides[0], everyone, 0)


def test_each_rank_recognises_its_end_of_a_connection(pairs: list[Pair]) -> None:
    found = of_rank_0(pairs)
    assert found.closed() == []
    pairs[1][1].close()
    assert found.closed() == [2]
    pairs[0][1].close()
    assert sorted(found.closed()) == [1, 2]


def test_a_connection_that_nobody_recognises_belongs_to_no_rank(pairs: list[Pair]) -> None:
    """Behind a translation of addresses, for instance: then nothing is said of any rank."""
    mine = [own(near) for near, _ in pairs]
    found = Links.found(mine, torch.stack([described(mine, 4), torch.zeros(4, dtype=torch.int64)]), 0)
    pairs[0][1].close()
    assert not found
    assert found.closed() == []


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[int, Progress]:
    """What TCP says of each connection, by descriptor."""
    answers: dict[int, Progress] = {}
    monkeypatch.setattr(sockets, "progress", lambda connection: answers[connection.descriptor])
    monkeypatch.setattr(links, "SILENT_AFTER", 0.3)
    return answers


def state(*, unanswered: bool, since: float = 100.0, came: int = 0, queued: int = 0) -> Progress:
    return Progress(unanswered, since, came, queued, 1e-4)


ONE, TWO = Connection(1, 1, 1), Connection(2, 2, 2)


def test_a_host_is_silent_after_a_while_without_an_answer(told: dict[int, Progress]) -> None:
    found = Links({1: [ONE], 2: [TWO]})
    told.update({1: state(unanswered=False), 2: state(unanswered=True)})
    assert found.silent() == {}, "that nothing came for long says nothing: it may have been asked just now"
    time.sleep(0.35)
    assert list(found.silent()) == [2]


def test_an_answer_between_two_looks_counts(told: dict[int, Progress]) -> None:
    found = Links({2: [TWO]})
    told[2] = state(unanswered=True)
    assert found.silent() == {}
    time.sleep(0.35)
    told[2] = state(unanswered=True, since=0.1)
    assert found.silent() == {}


def test_the_kernel_answers_for_a_process_that_reads_nothing(pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped, its window full: window probes are answered, not more often than twice a second (Linux)."""
    monkeypatch.setattr(links, "SILENT_AFTER", 3.0)
    found = of_rank_0(pairs)
    sockets.keep_alive([own(near) for near, _ in pairs])
    pairs[0][0].setblocking(False)
    with suppress(BlockingIOError):
        while True:
            pairs[0][0].send(bytes(2**20))
    end = time.monotonic() + 6
    while time.monotonic() < end:
        assert found.silent() == {}
        time.sleep(0.1)


def test_what_is_queued_for_a_slow_link_and_how_fast_it_goes(told: dict[int, Progress]) -> None:
    found = Links({1: [ONE], 2: [TWO]})
    told.update({1: state(unanswered=False, queued=10), 2: state(unanswered=False, queued=10**6)})
    assert found.backed_up() == {}, "no rate yet"
    time.sleep(0.1)
    told[2] = state(unanswered=False, queued=10**6, came=50_000)
    ((rank, rate),) = found.backed_up().items()
    assert rank == 2
    assert 0 < rate < 600_000


def test_the_slow_rank_is_at_one_end_of_every_link_that_is_backed_up() -> None:
    assert slow_rank({1: {2: 5e4}, 2: {3: 5e4}}) == 2, "a ring: to it, and from it"
    assert slow_rank({0: {2: 5e4}, 1: {2: 5e4}}) == 2
    assert slow_rank({0: {1: 5e4}}) is None, "either of the two"
    assert slow_rank({0: {1: 5e4}, 1: {2: 5e4}, 2: {3: 5e4}, 3: {0: 5e4}}) is None, "all are slow"
    assert slow_rank({}) is None
