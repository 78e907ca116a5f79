"""Network: one bridge, and per host a network namespace behind two token buckets."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gossamer.lab import syscalls
from gossamer.lab.isolation import Unavailable, in_child, step
from gossamer.lab.rates import Rate

INTERFACE = "eth0"


def address(host: int) -> str:
    """The IPv4 address of a host."""
    return f"10.77.0.{host + 1}"


def host_namespaces(hosts: int) -> list[int]:
    """Make one anonymous network namespace per host; the open file descriptors are all that holds them."""
    with step("unshare(CLONE_NEWNET)"):
        here = _current()
        fds = []
        for _ in range(hosts):
            syscalls.unshare(syscalls.CLONE_NEWNET)
            fds.append(_current())
        syscalls.setns(here, syscalls.CLONE_NEWNET)
        os.close(here)
    return fds


def connect(namespaces: Sequence[int], rates: Sequence[Rate]) -> None:
    """Join the hosts' namespaces by a bridge in this one, shaped both ways; Unavailable where that is refused."""
    in_child(lambda: _connect(namespaces, rates))


def delay(namespaces: Sequence[int], rates: Sequence[Rate], latency_s: float) -> None:
    """Add latency to what each host sends; Unavailable where the kernel has no netem."""
    in_child(lambda: _delay(namespaces, rates, latency_s))


def set_link(host: int, up: bool) -> None:
    """Let the bridge pass on what a host sends and receives, or drop it without a sign to either side."""
    in_child(lambda: _set_link(host, up))


def throttle(namespace: int, host: int, rate: Rate) -> None:
    """Give a host's link another rate, both ways; `rate` may be unshaped."""
    in_child(lambda: _throttle(namespace, host, rate))


def queue_limit(rate: Rate) -> int:
    """Bytes which may wait in a token bucket's queue: 50 ms of the rate, at least four bursts and 256 kB.

    Measured, as shares of the rate. Three hosts that send to one at 200 Mbit/s reach 57–81 % with a queue of 100 kB
    and 65–96 % with 200 kB (what overflows is sent again after 200 ms of silence), and 95–96 % with 1.25 MB. Twice
    or four times as much gains nothing. All-to-all: 48–64 %, 64–90 % and 73–84 %. One pair is the same with all of
    them.
    """
    assert rate.bps is not None
    return max(4 * rate.burst, round(rate.bps / 8 * 0.05), 256_000)


def _connect(namespaces: Sequence[int], rates: Sequence[Rate]) -> None:
    _no_ipv6()
    with _netlink("a bridge") as ip:
        _up(ip, "lo")
        ip.link("add", ifname="bridge", kind="bridge")
        _up(ip, "bridge")
        bridge = _index(ip, "bridge")
    for host, (namespace, rate) in enumerate(zip(namespaces, rates, strict=True)):
        port = f"host{host}"
        with _netlink("a veth pair") as ip:
            ip.link("add", ifname=port, kind="veth", peer={"ifname": INTERFACE, "net_ns_fd": namespace})
            ip.link("set", index=_index(ip, port), master=bridge)
            _shape(ip, port, rate)
            _up(ip, port)
    for host, (namespace, rate) in enumerate(zip(namespaces, rates, strict=True)):
        syscalls.setns(namespace, syscalls.CLONE_NEWNET)
        _no_ipv6()
        _steady_tcp()
        with _netlink("a host's interface") as ip:
            _up(ip, "lo")
            _shape(ip, INTERFACE, rate)
            ip.addr("add", index=_index(ip, INTERFACE), address=address(host), prefixlen=24)
            _limit_segments(ip, rate)
            _up(ip, INTERFACE)


def _limit_segments(ip: Any, rate: Rate) -> None:
    """Let a host hand over segments that fit into a burst.

    A token bucket cuts longer ones into packets of 1500 bytes, which at 200 Mbit/s took 400 ms of the processors per
    training step of DDP on four hosts, and 55 ms with this. The rate is the same: headers are counted for every packet.
    """
    if rate.bps is not None:
        with suppress(Unavailable), _naming("smaller segments"):  # an optimisation: kernels without it emulate as well
            ip.link("set", index=_index(ip, INTERFACE), gso_max_size=max(4096, min(65536, round(0.8 * rate.burst))))


def _shape(ip: Any, interface: str, rate: Rate, command: str = "add") -> None:
    """Put a token bucket on what leaves through an interface."""
    if rate.bps is None:
        return
    with _naming("a token bucket (tc tbf, kernel module sch_tbf)"):
        ip.tc(
            command, "tbf", index=_index(ip, interface), handle="1:",
            rate=round(rate.bps / 8), burst=rate.burst, limit=queue_limit(rate),
        )  # fmt: skip


def _set_link(host: int, up: bool) -> None:
    """Take the host's end out of the bridge: its frames then come to nobody, while both sides keep their carrier."""
    with _netlink("a change of a bridge's port") as ip:
        ip.link("set", index=_index(ip, f"host{host}"), master=_index(ip, "bridge") if up else 0)


def _throttle(namespace: int, host: int, rate: Rate) -> None:
    with _netlink("another rate") as ip:
        _reshape(ip, f"host{host}", rate)
    syscalls.setns(namespace, syscalls.CLONE_NEWNET)
    with _netlink("another rate") as ip:
        _reshape(ip, INTERFACE, rate)


def _reshape(ip: Any, interface: str, rate: Rate) -> None:
    """Change the token bucket of an interface, which may have none, or is to have none any more."""
    if rate.bps is None:
        ip.tc("del", index=_index(ip, interface), parent=_ROOT)
    else:
        _shape(ip, interface, rate, "replace")


_ROOT = 0xFFFFFFFF


def _delay(namespaces: Sequence[int], rates: Sequence[Rate], latency_s: float) -> None:
    """Inside the bucket where there is one, so that the bucket paces what comes out of the delay.

    There it replaces the bucket's own queue, and with that its limit: what waits then is limited in packets, as delayed ones
    are, which here means hardly at all.
    """
    for namespace, rate in zip(namespaces, rates, strict=True):
        syscalls.setns(namespace, syscalls.CLONE_NEWNET)
        place = {} if rate.bps is None else {"parent": "1:1"}
        with _netlink("added latency (tc netem, kernel module sch_netem)") as ip:
            delay_us = round(latency_s * 1e6)
            ip.tc("add", "netem", index=_index(ip, INTERFACE), handle="10:", delay=delay_us, limit=100_000, **place)


def _no_ipv6() -> None:
    """Keep neighbour discovery off the line where the kernel lets us; a few packets where it does not."""
    for scope in ("all", "default"):
        try:
            Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1")
        except OSError:
            return


def _steady_tcp() -> None:
    """Have TCP fill the line steadily where the kernel lets us, whatever this machine's own setting is.

    BBR probes for bandwidth by slowing down: at 200 Mbit/s one message in four of 3 MB took 15 to 60 % longer than the
    line, with Reno one in twenty 12 to 20 %.
    """
    try:
        Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("reno")
    except OSError:
        return


def _index(ip: Any, interface: str) -> int:
    return int(ip.link_lookup(ifname=interface)[0])


def _up(ip: Any, interface: str) -> None:
    ip.link("set", index=_index(ip, interface), state="up")


@contextmanager
def _netlink(what: str) -> Iterator[Any]:
    """A netlink socket in the present network namespace; a refusal names `what` was being made."""
    from pyroute2 import IPRoute

    with _naming(what), IPRoute() as ip:
        yield ip


@contextmanager
def _naming(what: str) -> Iterator[None]:
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except NetlinkError as error:
        name = errno.errorcode.get(error.code, str(error.code))
        raise Unavailable(f"making {what} failed with {name} ({os.strerror(error.code)})") from error


def _current() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
