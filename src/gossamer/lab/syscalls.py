"""System calls: those of Linux that the lab needs and that Python 3.11 does not offer."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}

# Loaded when the module is: a process between fork and exec had better not load libraries.
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move this process into new namespaces; OSError where the kernel refuses."""
    _check(_libc.unshare(ctypes.c_int(flags)))


def setns(fd: int, kind: int) -> None:
    """Move this thread into the namespace behind `fd`; OSError where the kernel refuses."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)))


def keep_mounts_private() -> None:
    """Let no mount made from now on leave this mount namespace."""
    _mount(None, b"/", None, _MS_REC | _MS_PRIVATE)


def mount_proc() -> None:
    """Mount this PID namespace's own /proc."""
    _mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def cover_file(path: str, text: str) -> None:
    """Have `path` read as `text` in this mount namespace; nothing is written to any disk."""
    place = "/tmp"  # covered for a moment, as seen by this process alone
    _mount(b"tmpfs", place.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV)
    try:
        source = Path(place) / "covering"
        source.write_text(text)
        source.chmod(0o644)
        _mount(bytes(source), path.encode(), None, _MS_BIND)
    finally:
        _check(_libc.umount2(place.encode(), ctypes.c_int(_MNT_DETACH)))


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as the *thread* that made it ends.

    A parent that is already gone is not noticed: the caller has to look for that afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def share_processors_finely(slice_us: int) -> None:
    """Let the processor time of this thread, and of all that it makes, come in slices of `slice_us` microseconds.

    Linux from 6.12; OSError elsewhere, and on kernels or machines without this call.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    attributes = struct.pack("IIQiIQQQ", 48, 0, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, 1000 * slice_us, 0, 0)
    _check(_libc.syscall(ctypes.c_long(number), 0, ctypes.create_string_buffer(attributes), 0))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), 0, 0, 0))


def _mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int) -> None:
    _check(_libc.mount(source, target, kind, ctypes.c_ulong(flags), None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
