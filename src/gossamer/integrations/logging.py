"""Logging: what a replica communicates, as rates, for TensorBoard, W&B, MLflow or a function."""

from collections.abc import Callable, Mapping
from typing import Any

from gossamer.errors import ConfigurationError
from gossamer.replica import Replica

__all__ = ["Rates"]

Write = Callable[[Mapping[str, float], int], object]

_COUNTED = ("bytes_sent", "messages_sent", "exposed_seconds", "wire_seconds", "local_seconds", "elapsed_seconds")


class Rates:
    """Logs what was communicated since it was called last::

        rates = Rates(replica, SummaryWriter())  # or wandb.init(…), mlflow, or a function of (values, step)
        for step, batch in enumerate(batches):
            ...
            if step % 50 == 0:
                rates(step)

    ``seconds_per_step``, ``bytes_per_step``, ``messages_per_step``, ``bytes_per_second``; ``exposed_share``: of the time, how
    much the loop stood still for communication (0 to 1); ``wire_share``, ``local_share``: how much lanes waited for the
    network, and encoded and decoded (several lanes may do so together); ``compression_ratio`` and ``residual_norm`` as of
    :meth:`gossamer.Replica.metrics`. Local to this rank: it waits for no other.

    Args:
        replica: the handle.
        writer: an object with ``add_scalar(name, value, step)`` (TensorBoard), ``log(values, step=…)`` (W&B) or
            ``log_metrics(values, step=…)`` (MLflow, Lightning's loggers), or a function of ``(values, step)``.
        prefix: stands before every name.
    """

    def __init__(self, replica: Replica, writer: Any, prefix: str = "gossamer/") -> None:
        self._replica, self._write, self._prefix = replica, _writes(writer), prefix
        self._before = replica.metrics()

    def __call__(self, step: int | None = None) -> dict[str, float]:
        """Log, as of ``step`` (that of the replica by default); returns the values without the prefix."""
        now = self._replica.metrics()
        took = {name: now[name] - self._before[name] for name in _COUNTED}
        steps, seconds = max(1.0, now["step"] - self._before["step"]), max(1e-9, took["elapsed_seconds"])
        self._before = now
        values = {
            "seconds_per_step": seconds / steps,
            "bytes_per_step": took["bytes_sent"] / steps,
            "messages_per_step": took["messages_sent"] / steps,
            "bytes_per_second": took["bytes_sent"] / seconds,
            "exposed_share": took["exposed_seconds"] / seconds,
            "wire_share": took["wire_seconds"] / seconds,
            "local_share": took["local_seconds"] / seconds,
            "compression_ratio": now["compression_ratio"],
            "residual_norm": now["residual_norm"],
        }
        self._write({self._prefix + name: value for name, value in values.items()}, int(now["step"]) if step is None else step)
        return values


def _writes(writer: Any) -> Write:
    if callable(getattr(writer, "add_scalar", None)):
        return lambda values, step: [writer.add_scalar(name, value, step) for name, value in values.items()]
    for method in ("log_metrics", "log"):
        if callable(getattr(writer, method, None)):
            return lambda values, step: getattr(writer, method)(dict(values), step=step)
    if callable(writer):
        return writer  # type: ignore[no-any-return]
    raise ConfigurationError(
        f"writer has none of add_scalar() (TensorBoard), log() (W&B) and log_metrics() (MLflow), and is no function: {writer!r}"
    )
