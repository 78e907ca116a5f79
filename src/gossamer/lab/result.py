"""Result: how a run in the lab went."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LabResult:
    """How a run went.

    `exit_code` is the first failing rank's (128 + the number of a signal), 124 after the timeout, otherwise 0.
    `shaping` is what was really done: `namespaces`, `runner` or `none`. `notes` are what the user should know.
    """

    exit_code: int
    failed_rank: int | None
    failed_host: int | None
    traceback: str
    timed_out: bool
    shaping: str
    notes: tuple[str, ...]
