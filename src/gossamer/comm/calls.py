"""Calls: what is said where not all ranks have made the same calls of a replica."""

from collections.abc import Iterable, Mapping

from gossamer.errors import PeerLeftError, UsageError

_ADVICE = (
    "not all ranks have made the same calls. Every rank enters consensus() and join(), and calls consensus_distance(), "
    "state_dict(), load_state_dict() and close(average=True), as often as the others. Ranks with different numbers of batches "
    "train inside replica.join(). Where gradients are exchanged, a backward pass of some ranks alone belongs inside no_sync()"
)


def names(ranks: Iterable[int]) -> str:
    """``rank 2``, or ``ranks 1, 2``."""
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


def differing(rank: int, where: str, others: Mapping[int, str]) -> UsageError:
    """The error of a rank that waits for others which wait in something else. ``where``, and the values of ``others``: in
    what."""
    elsewhere = "; ".join(f"rank {other} in {there}" for other, there in sorted(others.items()))
    return UsageError(f"rank {rank} waits in {where}, but {elsewhere}: {_ADVICE}")


def left_alone(rank: int, where: str, gone: Iterable[int]) -> PeerLeftError:
    """The error of a rank that waits for others which have ended."""
    return PeerLeftError(
        f"rank {rank} waits in {where}, but {names(gone)} ended their training (replica closed, or process ended). If the data "
        "of some ranks end earlier, train inside `with replica.join():`."
    )
