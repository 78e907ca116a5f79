"""Line rate: what plain TCP sockets reach between the hosts, the 100 % of every comparison.

As a script of the lab it prints one JSON object, from rank 0:

    gossamer lab --hosts 4 --rate 200mbit -- -m gossamer.lab.line_rate --pattern pair --mbytes 8
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from gossamer.lab.rates import parse_rate

Pattern = Literal["pair", "ring"]

_CHUNK = 1 << 18
_PATIENCE_S = 60.0
_PORT = 29700


def line_rate(
    rank: int,
    world: int,
    peer_addresses: Sequence[str],
    pattern: Pattern = "pair",
    nbytes: int = 8_000_000,
    repeats: int = 5,
    *,
    port: int = _PORT,
    drain: int | None = None,
) -> list[float]:
    """Seconds which each repeat of an exchange takes over plain TCP; the slowest rank's, the same on all ranks.

    All ranks call it. In a `"pair"` ranks 0 and 1, 2 and 3 … send each other `nbytes`, in both directions concurrently (an
    odd last rank looks on); in a `"ring"` each rank sends `nbytes` to the next and receives as many from the one
    before. `peer_addresses` are the ranks' IPv4 addresses; ranks may share one. `port` to `port + 2 * world` must
    be free. Before the clock starts, `drain` bytes (by default four bursts of the lab's rate, at least 256 kB) have
    passed on the same connection: a token bucket's burst would make small messages look free; the largest that any rank asks
    for counts. Raises OSError when a peer is not there or stays silent for 60 s.
    """
    if drain is None:
        drain = max(256_000, 4 * parse_rate(os.environ.get("GOSSAMER_LAB_RATE", "unshaped")).burst)
    with contextlib.ExitStack() as stack:
        agree = stack.enter_context(_agreement(rank, world, peer_addresses, port))
        drain = int(agree(drain))  # hosts of different rates see different bursts
        peers = _partners(rank, world, pattern)
        links = stack.enter_context(_links(rank, peers, peer_addresses, port + world)) if peers else None
        return [agree(_exchange(links, drain, nbytes) if links else 0.0) for _ in _rounds(agree, repeats)]


def _partners(rank: int, world: int, pattern: Pattern) -> tuple[int, int] | None:
    """To whom a rank sends and from whom it receives; None if it has nobody."""
    if pattern == "ring":
        return None if world == 1 else ((rank + 1) % world, (rank - 1) % world)
    partner = rank ^ 1
    return (partner, partner) if partner < world else None


def _rounds(agree: _Agree, repeats: int) -> Iterator[int]:
    """Begin every round at the same time on all ranks."""
    for index in range(repeats):
        agree(0.0)
        yield index


def _exchange(links: tuple[socket.socket, socket.socket], drain: int, nbytes: int) -> float:
    """Send and receive concurrently; seconds between the arrival of the last drained byte and of the last byte."""
    out, into = links
    sender = threading.Thread(target=_send, args=(out, drain + nbytes))
    sender.start()
    _receive(into, drain)
    began = time.perf_counter()
    _receive(into, nbytes)
    seconds = time.perf_counter() - began
    sender.join()
    return seconds


def _send(out: socket.socket, nbytes: int) -> None:
    chunk = memoryview(bytes(_CHUNK))
    while nbytes:
        nbytes -= out.send(chunk[:nbytes])


def _receive(into: socket.socket, nbytes: int) -> None:
    chunk = memoryview(bytearray(_CHUNK))
    while nbytes:
        got = into.recv_into(chunk[:nbytes])
        if not got:
            raise ConnectionError("the peer closed its connection during the exchange")
        nbytes -= got


class _Agree:
    """Called by all ranks with a number: waits for all, and returns the largest. Rank 0 collects."""

    def __init__(self, links: list[socket.socket], collects: bool) -> None:
        self._links = links
        self._collects = collects

    def __call__(self, value: float) -> float:
        if self._collects:
            value = max([value, *(_take(link) for link in self._links)])
        for link in self._links:
            link.sendall(struct.pack("!d", value))
        return value if self._collects else _take(self._links[0])


def _take(link: socket.socket) -> float:
    data = link.recv(8, socket.MSG_WAITALL)
    if len(data) < 8:
        raise ConnectionError("a rank ended before the measurement did")
    return float(struct.unpack("!d", data)[0])


@contextlib.contextmanager
def _agreement(rank: int, world: int, addresses: Sequence[str], port: int) -> Iterator[_Agree]:
    with contextlib.ExitStack() as stack:
        if rank == 0:
            listener = stack.enter_context(_listen(addresses[0], port, world))
            links = [stack.enter_context(_accept(listener)) for _ in range(world - 1)]
        else:
            links = [stack.enter_context(_dial(addresses[0], port))]
        yield _Agree(links, collects=rank == 0)


@contextlib.contextmanager
def _links(
    rank: int, peers: tuple[int, int], addresses: Sequence[str], port: int
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """One connection each way: what goes to the one peer, and what comes from the other."""
    to, _ = peers
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(addresses[rank], port + rank, 1))
        out = stack.enter_context(_dial(addresses[to], port + to))
        into = stack.enter_context(_accept(listener))
        yield out, into


def _listen(address: str, port: int, backlog: int) -> socket.socket:
    listener = socket.create_server((address, port), backlog=backlog)
    listener.settimeout(_PATIENCE_S)
    return listener


def _accept(listener: socket.socket) -> socket.socket:
    link, _ = listener.accept()
    return _prepared(link)


def _dial(address: str, port: int) -> socket.socket:
    """Connect, waiting for the peer to listen."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _prepared(socket.create_connection((address, port), timeout=_PATIENCE_S))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _prepared(link: socket.socket) -> socket.socket:
    link.settimeout(_PATIENCE_S)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def lab_addresses() -> list[str]:
    """The IPv4 addresses of all ranks of the lab's run that this process belongs to."""
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    master = os.environ["MASTER_ADDR"]
    if master.startswith("127."):
        return [master] * world
    network, _, first = master.rpartition(".")
    return [f"{network}.{int(first) + rank // local}" for rank in range(world)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure as a rank of the lab, and print the outcome from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pattern", choices=("pair", "ring"), default="pair")
    parser.add_argument("--mbytes", type=float, default=8.0, help="message size in 10^6 bytes")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    nbytes = round(options.mbytes * 1e6)
    if world < 2:
        parser.error("one rank has nobody to exchange with: take two hosts or more")
    if options.repeats < 1 or nbytes < 1:
        parser.error("there is nothing to measure: --repeats and --mbytes must be positive")
    if options.pattern == "pair" and int(os.environ["LOCAL_WORLD_SIZE"]) > 1:
        parser.error("ranks 0 and 1 are on one host, and no line is between them: take --pattern ring, or one process per host")
    rate = _lowest_rate(rank, world, lab_addresses())
    seconds = line_rate(rank, world, lab_addresses(), options.pattern, nbytes, options.repeats)
    if rank == 0:
        bps = 8 * nbytes / statistics.median(seconds)
        outcome = {"pattern": options.pattern, "world": world, "bytes": nbytes, "seconds": seconds, "bps": bps}
        shaped = {"rate": "unshaped", "share": None} if rate is None else {"rate": f"{rate:.0f}bit", "share": bps / rate}
        sys.stdout.write(json.dumps(outcome | shaped) + "\n")


def _lowest_rate(rank: int, world: int, addresses: Sequence[str]) -> float | None:
    """Bits per second of the slowest host, on which the slowest exchange depends; None if none is shaped."""
    own = parse_rate(os.environ.get("GOSSAMER_LAB_RATE", "unshaped")).bps
    # On a port of its own: a rank may be at the next agreement already while rank 0 still listens for this one.
    with _agreement(rank, world, addresses, _PORT - 1) as agree:
        lowest = -agree(-(math.inf if own is None else own))
    return None if lowest == math.inf else lowest


if __name__ == "__main__":
    main()
