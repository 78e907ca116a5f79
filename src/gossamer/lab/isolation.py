"""Isolation: the namespaces of a run, which the kernel removes with the last process in them.

Nothing is given a name outside (no file under /run/netns, no interface in the machine's own network), so there is
nothing to clean up: a run that is killed takes its namespaces, interfaces and processes with it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gossamer.lab import syscalls

_KINDS = {
    "CLONE_NEWUSER": syscalls.CLONE_NEWUSER,
    "CLONE_NEWPID": syscalls.CLONE_NEWPID,
    "CLONE_NEWNS": syscalls.CLONE_NEWNS,
    "CLONE_NEWNET": syscalls.CLONE_NEWNET,
}

_SYSCTLS = {
    "kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
}


class Unavailable(Exception):
    """A step of the emulation which this machine does not allow; says which, and with which error."""


@contextmanager
def step(call: str) -> Iterator[None]:
    """Turn an OSError inside into Unavailable, naming `call`."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"{call} failed with {_reason(error)}") from error


def isolate(*, network: bool) -> None:
    """Move this single-threaded process into namespaces of its own; its next child is pid 1 of the new PID namespace.

    With `network`, also into an empty network namespace. Without root's rights a user namespace in which we are
    root comes first. Raises Unavailable, naming every kind of namespace that is refused; this process is then as it was.
    """
    flags = syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNS | (syscalls.CLONE_NEWNET if network else 0)
    try:
        syscalls.unshare(flags)
        return
    except OSError as error:
        if error.errno != errno.EPERM:
            raise Unavailable(_diagnosis(network)) from error
    # Some kernels make a user namespace and then refuse to map this user into it, and there is no way back out: a child
    # tries it first, so that a process which may not is left as it was.
    in_child(lambda: _become_root(flags, network))
    _become_root(flags, network)


def advice() -> str:
    """What the user of this machine can do to have namespaces allowed."""
    if os.geteuid() == 0:
        return (
            "we are root without the right to make namespaces, as in a container: start it with "
            "--privileged, or with --cap-add SYS_ADMIN --cap-add NET_ADMIN --security-opt seccomp=unconfined"
        )
    for name, (bad, command) in _SYSCTLS.items():
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == bad:
            return f"run it as root, or have root allow user namespaces: {command}"
    return "run it as root, or in a container started with --security-opt seccomp=unconfined"


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked child, so that what it imports and opens goes with it; Unavailable comes back."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        message = b""
        try:
            work()
        except Unavailable as error:
            message = str(error).encode()
        except BaseException as error:
            message = f"setting up failed with {error!r}".encode()
        os.write(writer, message)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        message = stream.read()
    _, status = os.waitpid(pid, 0)
    if message or status:
        raise Unavailable(message.decode() or f"setting up ended with status {status}")


def _become_root(flags: int, network: bool) -> None:
    """Move into new namespaces, below a user namespace in which this user is root."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        syscalls.unshare(flags | syscalls.CLONE_NEWUSER)
    except OSError as error:
        raise Unavailable(_diagnosis(network)) from error
    with step("mapping this user to root in a user namespace"):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def _diagnosis(network: bool) -> str:
    """Name each kind of namespace that is refused, by trying it alone in a child."""
    privileged = os.geteuid() == 0
    refused = []
    for name, flag in _KINDS.items():
        if (flag == syscalls.CLONE_NEWUSER and privileged) or (flag == syscalls.CLONE_NEWNET and not network):
            continue
        extra = 0 if privileged else syscalls.CLONE_NEWUSER
        number = _refusal(flag | extra)
        if number:
            refused.append(f"unshare({name}) failed with {_reason(OSError(number, os.strerror(number)))}")
    return "; ".join(refused) or "unshare refused these kinds of namespace together"


def _refusal(flags: int) -> int:
    """The errno with which unshare(flags) fails here, 0 if it works."""
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.unshare(flags)
        except OSError as error:
            os._exit(min(error.errno or 255, 255))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _reason(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "error")
    return f"{name} ({error.strerror or error})"
