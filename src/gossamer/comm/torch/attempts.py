"""Attempts: keys of the launcher's attempts to run a job, and of the processes of one that have ended."""

import logging
import os

from gossamer.comm.torch.store import Store

_logger = logging.getLogger("gossamer")


def attempt() -> str:
    """Which attempt of the launcher's this is: torchrun may keep the store while it starts all processes again."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def exit_key() -> str:
    """Where processes that end without having come to any board say so."""
    return f"gossamer/attempt-{attempt()}/exit"


def note_exit(store: Store, member: int, reason: str) -> bool:
    """Post that a process ends that never came to any board: those who wait for its arrival look here."""
    try:
        store.set(f"{exit_key()}/{member}", reason)
        store.set(exit_key(), "1")
    except Exception as error:
        _logger.debug("could not post an exit: %s", error)
        return False
    return True
