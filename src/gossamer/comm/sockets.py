"""Sockets: the connections of this process, for what their owners in C++ offer no way to do: look at them, cut them."""

import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable
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
        with socket.socket(fileno=os.dup(connection.descriptor)) as handle:
            told = handle.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.size)
    except OSError:
        return 0
    return int(_TIMEVAL.unpack(told)[0]) if len(told) == _TIMEVAL.size else 0


_TIMEVAL = struct.Struct("@ll")
"""Seconds and microseconds."""


def round_trip(chosen: Iterable[Connection]) -> float | None:
    """Seconds from one end to the other and back, without waiting in queues, on the longest of these connections, as TCP has
    measured it; None where it does not say."""
    found = [microseconds for connection in chosen if (microseconds := _round_trip(connection))]
    return max(found) * 1e-6 if found else None


def _round_trip(connection: Connection) -> int:
    """In microseconds, the least there was; 0 if unknown."""
    if not sys.platform.startswith("linux") or _connection(connection.descriptor) != connection:
        return 0
    try:
        with socket.socket(fileno=os.dup(connection.descriptor)) as handle:
            told = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4)
    except OSError:
        return 0
    microseconds = int.from_bytes(told[_MIN_RTT : _MIN_RTT + 4], sys.byteorder)
    return 0 if microseconds == 2**32 - 1 else microseconds  # before the first measurement


_MIN_RTT = 148
"""Where Linux has ``tcpi_min_rtt`` in its ``struct tcp_info`` (linux/tcp.h, since 4.6)."""


def cut(chosen: Iterable[Connection]) -> None:
    """End these connections in both directions, so that whoever waits for something on them waits no more."""
    for connection in chosen:
        if _connection(connection.descriptor) == connection:
            try:
                with socket.socket(fileno=os.dup(connection.descriptor)) as handle:
                    handle.shutdown(socket.SHUT_RDWR)
            except OSError:  # its owner, or the other end, was quicker
                continue
