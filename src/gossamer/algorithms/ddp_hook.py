"""DDPHook: a communication hook of PyTorch's DistributedDataParallel, run as an algorithm."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow, foreign
from gossamer.errors import ConfigurationError
from gossamer.state import State


@dataclass(frozen=True, kw_only=True, repr=False)
class DDPHook(Algorithm, register=False):
    """``DDPHook(hook, state)``: what ``ddp_model.register_comm_hook(state, hook)`` would do, bucket by bucket.

    The hook gets a bucket that answers ``buffer``, ``gradients``, ``index``, ``is_last`` and ``set_buffer`` as DDP's does, and
    returns a future of the averaged buffer. It communicates by itself, over the process group that its state names or the
    default one, so it runs on torch.distributed only: loopback and simulation refuse it. One bucket at a time,
    each waited for before the next, so that hooks of several messages (PowerSGD) meet in one order on all ranks. Not inside
    :class:`Hierarchical`, where only one worker of each machine would run it.

    What its ``state`` object remembers is not in ``replica.state_dict()``: save it yourself.

    Not the choice where gossamer has the same method: those overlap, pipeline and resume.
    """

    serial: ClassVar[bool] = True
    needs_everyone: ClassVar[bool] = True

    hook: Callable[[Any, Any], Any] = field(kw_only=False)
    state: Any = field(default=None, kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.hook):
            raise ConfigurationError(f"hook must be a function of (state, bucket); got {self.hook!r}")

    @property
    def name(self) -> str:
        """Where the hook is from."""
        return f"{getattr(self.hook, '__module__', '')}.{getattr(self.hook, '__qualname__', type(self.hook).__name__)}"

    def __repr__(self) -> str:
        # Without addresses: it is compared between ranks.
        return f"DDPHook({self.name}, {type(self.state).__name__}, bucket_bytes={self.bucket_bytes})"

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return bucket.flat.clone()
        is_last = any(algorithm is self for algorithm in bucket.last_of)
        handed = HookBucket(bucket.holding(bucket.flat.clone()), is_last)
        return (yield from foreign(handed.buffer(), repr(self), lambda: self.hook(self.state, handed)))


class HookBucket:
    """Looks to a hook as ``torch.distributed.GradBucket`` does."""

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._bucket, self._is_last = bucket, is_last

    def buffer(self) -> Tensor:
        """The flat gradients, 1-D."""
        return self._bucket.flat

    def set_buffer(self, tensor: Tensor) -> None:
        """Use another flat tensor from now on."""
        self._bucket = self._bucket.holding(tensor)

    def gradients(self) -> list[Tensor]:
        """Views of the buffer in the shapes of the parameters."""
        return self._bucket.views

    def index(self) -> int:
        """The place of the bucket in the order of launch."""
        return self._bucket.index

    def is_last(self) -> bool:
        """Whether no other bucket comes to the hook after it in this step: hooks count their steps by that."""
        return self._is_last

    def parameters(self) -> list[Tensor]:
        """Refused: algorithms never see parameters."""
        raise ConfigurationError("DDPHook: this hook asks for the parameters, which gossamer gives to no algorithm")
