"""Alarms: an error that ends one rank's part is told to the other ranks, so that none of them waits in vain."""

from collections.abc import Iterator
from contextlib import contextmanager

from gossamer.comm.runner import Runner
from gossamer.errors import CommunicationError, GossamerError


@contextmanager
def alarming(runner: Runner) -> Iterator[None]:
    """Tell the other ranks about an error of this rank's own."""
    try:
        yield
    except CommunicationError:
        raise
    except Exception as error:
        runner.alarm(in_words(runner.rank, error))
        raise


def give_up(runner: Runner, error: BaseException) -> None:
    """Leave because of an error, which the other ranks are told of."""
    runner.alarm(in_words(runner.rank, error))
    runner.close(graceful=False)


def in_words(rank: int, error: BaseException) -> str:
    """The text of an alarm. Errors of gossamer name their rank by themselves."""
    if isinstance(error, GossamerError):
        return str(error)
    return f"rank {rank}: {type(error).__name__}: {error}".removesuffix(": ")
