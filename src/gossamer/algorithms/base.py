"""Algorithm: one relaxation of the exchange, written as a generator that never touches the network."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.state import State

_REGISTRY: dict[str, type["Algorithm"]] = {}


@dataclass(frozen=True, slots=True)
class Context:
    """What a flow may know: the step, and the members of this step's epoch.

    ``members`` are stable ids, not a fixed world: they may change between steps, never within a flow.
    ``rank`` is this worker's index among them.
    """

    step: int
    rank: int
    members: tuple[int, ...]
    role: str = "worker"

    @property
    def world(self) -> int:
        """Number of members."""
        return len(self.members)


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Base of all algorithms: frozen hyper-parameters, and one generator per bucket and step.

    ``bucket_bytes`` is the fusion threshold (GradientFlow's θ, BAGUA's bucket size): tensors are laid out in the
    order in which gradients become ready, and a bucket is closed when it holds at least this many bytes.
    """

    subject: ClassVar[Literal["gradients", "weights"]] = "gradients"
    exact: ClassVar[bool] = False

    bucket_bytes: int = 2 * 2**20

    def __init_subclass__(cls, register: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if register:
            _REGISTRY[cls.__name__] = cls

    def __post_init__(self) -> None:
        if not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 1:
            raise ConfigurationError(f"bucket_bytes must be a positive number of bytes; got {self.bucket_bytes!r}")

    @abstractmethod
    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        """Communicate one bucket.

        ``bucket.flat`` is read, never written. Returns a tensor like ``bucket.flat``: for ``subject = "gradients"``
        the gradient to use instead; for ``"weights"`` the delta to add to the weights before their next update.
        The returned tensor is given away: keep no reference to it.
        Writes to ``state`` take effect only when the whole step has succeeded.
        """

    def finish(self, buckets: Sequence[Bucket], state: State, ctx: Context) -> Flow[None] | None:
        """Once per step after the last bucket, for what belongs to the step; ``None`` (the default) for nothing."""
        return None


def wrong_shape(algorithm: Algorithm, bucket: Bucket, result: Tensor) -> ConfigurationError:
    """The error for an exchange whose result does not fit its bucket."""
    name, expected = type(algorithm).__name__, list(bucket.flat.shape)
    return ConfigurationError(f"{name}.exchange returned shape {list(result.shape)} for {bucket}; expected {expected}")


def registry() -> dict[str, type[Algorithm]]:
    """Every algorithm there is, by name."""
    return dict(sorted(_REGISTRY.items()))
