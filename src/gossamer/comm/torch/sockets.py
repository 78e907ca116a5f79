"""Sockets: the connections of this process, for what their owners in C++ offer no way to do: look at them, cut them."""

import contextlib
import os
import select
import socket
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_FOLDER = "/dev/fd"


@dataclass(frozen=True, slots=True)
class Connection:
    """A connected socket. The inode tells whether its descriptor still is the same socket."""

    descriptor: int
    inode: int
    port: int
    """The port at the other end."""


def visible() -> bool:
    """Whether the connections of this process can be found."""
    # A socket object makes its descriptor non-blocking, for its owner too, if there is a default timeout.
    return os.path.isdir(_FOLDER) and socket.getdefaulttimeout() is None


def connections() -> frozenset[Connection]:
    """Every TCP connection of this process; none where that cannot be found out."""
    if not visible():
        return frozenset()
    found = (_connection(descriptor) for descriptor in map(int, os.listdir(_FOLDER)))
    return frozenset(connection for connection in found if connection is not None)


def _connection(descriptor: int) -> Connection | None:
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISSOCK(status.st_mode):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as handle:
            if handle.family not in (socket.AF_INET, socket.AF_INET6) or handle.type != socket.SOCK_STREAM:
                return None
            return Connection(descriptor, status.st_ino, handle.getpeername()[1])
    except OSError:
        return None


def with_limit(seconds: int, found: Iterable[Connection]) -> frozenset[Connection]:
    """Those of some connections on which a wait for data ends after so many seconds: the mark of an owner who alone asks so."""
    return frozenset(connection for connection in found if _limit(connection) == seconds)


def _limit(connection: Connection) -> int:
    """In whole seconds; 0 if there is none, or it is unknown."""
    try:
        with _handle(connection) as handle:
            told = handle.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size)
    except OSError:
        return 0
    return int(_TIMEVAL.unpack(told)[0]) if len(told) == _TIMEVAL.size else 0


_TIMEVAL = struct.Struct("@ll")
"""Seconds and microseconds."""


def round_trip(chosen: Iterable[Connection]) -> float | None:
    """Seconds from one end to the other and back, without waiting in queues, on the longest of these connections, as TCP has
    measured it; None where it does not say."""
    found = [told.min_rtt for connection in chosen if (told := progress(connection)) and told.min_rtt]
    return max(found, default=None)


@dataclass(frozen=True, slots=True)
class Progress:
    """What TCP knows of the other end of a connection."""

    unanswered: bool
    """Whether something was sent more than once, or a probe, and has had no answer yet."""
    since_answer: float
    """Seconds since the last acknowledgement."""
    acknowledged: int
    """Bytes that the other end has acknowledged."""
    queued: int
    """Bytes that were handed to TCP and have not been acknowledged."""
    min_rtt: float
    """The shortest round trip in seconds; 0 if none was measured."""


def progress(connection: Connection) -> Progress | None:
    """How a connection gets on; None where that is unknown, or it is no longer the same socket."""
    if not sys.platform.startswith("linux") or not _is_same(connection):
        return None
    try:
        with _handle(connection) as handle:
            told = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except OSError:
        return None
    if len(told) < _TCP_INFO.size:
        return None
    retransmits, probes, mss, unacked, since, acknowledged, notsent, rtt = _TCP_INFO.unpack(told)
    rtt = 0 if rtt == 2**32 - 1 else rtt  # before the first measurement
    return Progress(bool(retransmits or probes), since * 1e-3, acknowledged, notsent + unacked * mss, rtt * 1e-6)


_TCP_INFO = struct.Struct("=2x B B 12x I 4x I 28x I 60x Q 16x I I")
"""Of Linux's ``struct tcp_info`` (linux/tcp.h, since 4.6): retransmits, probes, snd_mss, unacked, last_ack_recv (ms),
bytes_acked, notsent_bytes, min_rtt (µs)."""


def keep_alive(chosen: Iterable[Connection]) -> None:
    """Have the kernel ask the other end of an idle connection for a sign of life, every few seconds.

    No TCP_USER_TIMEOUT: that would also end a connection whose other end is merely stopped while its receive window is full
    (linux/net/ipv4/tcp_timer.c: a user timeout ends a window probe that *is* answered). Data that are never acknowledged are
    noticed by :func:`progress`.
    """
    for connection in chosen:
        with contextlib.suppress(OSError, AttributeError), _handle(connection) as handle:
            handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 3), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 8)):
                handle.setsockopt(socket.IPPROTO_TCP, option, value)


# Linux tells a connection that the other side has closed from one with something to read; elsewhere POLLHUP does.
CLOSED = vars(select).get("POLLRDHUP", 0)


def is_open(connection: Connection) -> bool:
    """Whether neither end has closed a connection."""
    if not _is_same(connection):
        return False
    poll = select.poll()
    poll.register(connection.descriptor, CLOSED)
    return not poll.poll(0)


def ends(connection: Connection) -> tuple[str, str] | None:
    """``address:port`` of this end and of the other one."""
    try:
        with _handle(connection) as handle:
            return _spelled(handle.getsockname()), _spelled(handle.getpeername())
    except OSError:
        return None


def local_address(connection: Connection) -> str | None:
    """The address by which this host reaches the other end."""
    both = ends(connection)
    return both[0].rpartition(":")[0] if both else None


def address_towards(other: str) -> str | None:
    """The address of this host on the way to another one; None if there is no way."""
    family = socket.AF_INET6 if ":" in other else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # which sends nothing
            probe.connect((other, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _spelled(name: tuple[str, int]) -> str:
    return f"{name[0].removeprefix('::ffff:')}:{name[1]}"


@contextlib.contextmanager
def _handle(connection: Connection) -> Iterator[socket.socket]:
    """A socket object on a descriptor of its own: closing it leaves the connection open."""
    with socket.socket(fileno=os.dup(connection.descriptor)) as handle:
        yield handle


def _is_same(connection: Connection) -> bool:
    """Whether the descriptor still is the same connected socket."""
    return _connection(connection.descriptor) == connection


def cut(chosen: Iterable[Connection]) -> None:
    """End these connections in both directions, so that waits on them end."""
    for connection in chosen:
        if _is_same(connection):
            try:
                with _handle(connection) as handle:
                    handle.shutdown(socket.SHUT_RDWR)
            except OSError:  # its owner, or the other end, was quicker
                continue
