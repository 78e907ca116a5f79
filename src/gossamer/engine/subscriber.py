"""Subscriber: what takes part in a training step."""


class Subscriber:
    """What takes part in a training step: the events of a :class:`Loop`, in the order in which they come."""

    def begin_backward(self) -> None:
        """A synchronised backward pass has produced its first gradient."""

    def end_backward(self) -> None:
        """The synchronised backward pass is over, with every pass that ran inside it."""

    def before_step(self, index: int, closure: bool) -> None:
        """An optimizer is about to take its step; ``closure``: backward runs inside the step."""

    def after_step(self, index: int) -> None:
        """An optimizer has taken its step."""
