"""The store of a process group, asked quietly; and the sockets of this process."""

import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from gossamer.comm.torch import sockets
from gossamer.comm.torch.store import QuietStore, StoreLostError, StoreSilentError, _Line

HOST = """
import sys, torch.distributed as dist
from datetime import timedelta
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that hosts a store, and its port."""
    command = [sys.executable, "-c", textwrap.dedent(HOST)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)


def connect(port: int, seconds: float = 20) -> dist.PrefixStore:  # type: ignore[name-defined]
    tcp = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=seconds))  # type: ignore[attr-defined]
    return dist.PrefixStore("a", dist.PrefixStore("b", tcp))  # type: ignore[attr-defined]


def test_a_lost_store_is_noticed_without_a_word(
    host: tuple[subprocess.Popen[str], int], capfd: pytest.CaptureFixture[str]
) -> None:
    process, port = host
    origin = connect(port)
    store = QuietStore(origin)
    store.set("key", "välue")
    assert store.get("key") == "välue"
    assert store.has("key")
    assert not store.has("other")
    assert [store.add("counter", 2), store.add("counter", 0)] == [2, 2]
    assert not store.hosted
    process.kill()
    process.wait()
    for call in (lambda: store.has("key"), lambda: store.set("key", "x"), lambda: store.add("counter", 1)):
        with pytest.raises(StoreLostError, match="the process of rank 0, which hosts it, has ended"):
            call()
    for own in (True, False):
        with pytest.raises(StoreLostError):
            QuietStore(origin, own_connection=own).has("key")
    assert capfd.readouterr().err == ""


def test_a_host_that_ends_while_it_is_connected_to_is_noticed(host: tuple[subprocess.Popen[str], int]) -> None:
    """torch goes on connecting for as long as the store's own limit says."""
    process, port = host
    origin = connect(port, seconds=200)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    threading.Timer(0.5, process.kill).start()
    begin = time.monotonic()
    with pytest.raises(StoreLostError, match="the process of rank 0, which hosts it, has ended"):
        QuietStore(origin)
    assert time.monotonic() - begin < 100


def test_a_store_that_waits_in_another_thread_does_not_stop_this_one(host: tuple[subprocess.Popen[str], int]) -> None:
    origin = connect(host[1])
    waiting = threading.Thread(target=lambda: origin.wait(["never before"], timedelta(seconds=15)), daemon=True)
    store = QuietStore(origin)
    waiting.start()
    store.set("never before", "now")
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_store_that_is_stopped_is_silent_and_may_go_on(host: tuple[subprocess.Popen[str], int]) -> None:
    process, port = host
    store = QuietStore(connect(port), within=0.5)
    store.set("key", "value")
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until all of its threads have stopped
    begin = time.monotonic()
    for _ in range(20):  # only the first one waits
        with pytest.raises(StoreSilentError, match=r"the process of rank 0, which hosts it, has not answered for 0\.5 s"):
            store.has("key")
    assert time.monotonic() - begin < 5
    process.send_signal(signal.SIGCONT)
    while True:
        assert time.monotonic() - begin < 60
        try:
            found = store.get("key")
        except StoreSilentError:
            time.sleep(0.05)
        else:
            break
    assert found == "value"


def test_what_a_store_says_is_raised_where_it_was_asked() -> None:
    store = QuietStore(dist.HashStore())  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="on purpose"):
        store._ask(lambda: int("on purpose"))
    store.set("key", "value")
    assert store.has("key")


def test_other_stores_work_too(tmp_path: object) -> None:
    for origin in (dist.HashStore(), dist.FileStore(f"{tmp_path}/store", 1)):  # type: ignore[attr-defined]
        store = QuietStore(origin)
        store.set("key", "value")
        assert (store.get("key"), store.has("other"), store.add("n", 3)) == ("value", False, 3)


def test_several_values_are_read_together(tmp_path: object, host: tuple[subprocess.Popen[str], int]) -> None:
    for origin in (connect(host[1]), dist.HashStore(), dist.FileStore(f"{tmp_path}/store", 1)):  # type: ignore[attr-defined]
        store = QuietStore(origin)
        store.set("a", "1")
        store.set("b", "")
        assert store.values(["a", "b"]) == ["1", ""]
        assert store.values(["c", "b", "a"]) == ["", "", "1"]


def test_the_thread_that_asks_ends_with_its_store() -> None:
    """One asks; that which made the store's connection ends when that is there."""
    others = set(threading.enumerate())

    def asking(until: int) -> int:
        """How many there are of this store, once there are ``until``, or after ten seconds."""
        end = time.monotonic() + 10
        while (there := sum(each.name == "gossamer-store" for each in {*threading.enumerate()} - others)) != until:
            if time.monotonic() > end:
                break
            time.sleep(0.01)
        return there

    store = QuietStore(dist.HashStore())  # type: ignore[attr-defined]
    store.set("key", "value")
    assert asking(1) == 1
    del store
    assert asking(0) == 0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """Two connected sockets, and the port of the second one's listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one, server.accept()[0] as other:
            yield one, other, port


def test_connections_are_found_and_cut(pair: tuple[socket.socket, socket.socket, int]) -> None:
    one, other, port = pair
    (found,) = (connection for connection in sockets.connections() if connection.port == port)
    assert found.descriptor == one.fileno()
    assert one.getblocking()
    line = _Line({one.fileno()})
    other.sendall(b"something to read")
    assert not line.is_cut()
    sockets.cut([found])
    assert other.recv(10) == b""
    assert one.recv(100) == b"something to read"
    assert one.recv(100) == b""


def test_those_with_a_limit_of_ones_own_are_told_from_others(pair: tuple[socket.socket, socket.socket, int]) -> None:
    one, other, port = pair
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 1234, 0))
    found = [connection for connection in sockets.connections() if connection.descriptor in (one.fileno(), other.fileno())]
    assert len(found) == 2
    assert [connection.port for connection in sockets.with_limit(1234, found)] == [port]


def test_what_is_no_tcp_is_no_connection() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect(("127.0.0.1", 9))
        assert datagrams.fileno() not in [connection.descriptor for connection in sockets.connections()]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP tells nobody else")
def test_tcp_says_how_far_the_other_end_is(pair: tuple[socket.socket, socket.socket, int]) -> None:
    one, other, port = pair
    (found,) = (connection for connection in sockets.connections() if connection.port == port)
    one.sendall(b"there")
    other.sendall(other.recv(5))
    assert one.recv(5) == b"there"
    seconds = sockets.round_trip([found])
    assert seconds is not None
    assert 1e-6 <= seconds < 0.05
    assert sockets.round_trip([]) is None


def test_a_line_is_cut_when_the_other_side_closes(pair: tuple[socket.socket, socket.socket, int]) -> None:
    one, other, _ = pair
    line = _Line({one.fileno()})
    assert not line.is_cut()
    other.close()
    assert line.is_cut()


def test_a_descriptor_that_is_something_else_by_now_is_left_alone(pair: tuple[socket.socket, socket.socket, int]) -> None:
    one, _, port = pair
    (found,) = (connection for connection in sockets.connections() if connection.port == port)
    third, fourth = socket.socketpair()
    os.dup2(third.fileno(), one.fileno())
    sockets.cut([found])
    fourth.sendall(b"still there")
    assert third.recv(20) == b"still there"
    third.close()
    fourth.close()


def test_a_default_timeout_is_respected(pair: tuple[socket.socket, socket.socket, int]) -> None:
    """Looking at a socket would make it non-blocking."""
    try:
        socket.setdefaulttimeout(5.0)
        assert not sockets.connections()
    finally:
        socket.setdefaulttimeout(None)
