"""1-bit Adam: Adam whose momentum, not its gradient, is communicated, compressed, once its variance has settled."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.scatter_reduce import ScatterReduce
from gossamer.checks import is_whole
from gossamer.codecs.base import Codec
from gossamer.codecs.quantize import Quantize
from gossamer.codecs.sign import Sign
from gossamer.codecs.wire import Wire
from gossamer.errors import ConfigurationError
from gossamer.memory import wide, widened
from gossamer.optim.adam import adam_steps, check_adam
from gossamer.optim.communicating import Communicating
from gossamer.optim.loading import State, loading, put_back
from gossamer.optim.wide import check_dense, check_number, evaluated, fill_in

_logger = logging.getLogger("gossamer")


class OneBitAdam(Communicating):
    """AdamW in two phases.

    Warm-up: gradients are averaged exactly, and this is AdamW. Then the variance v is frozen, and in every step each
    worker adds its own gradient to the momentum, m ← β₁·m + (1 − β₁)·g, and the workers average that, encoded by
    ``codec`` with error feedback on both sides (:class:`~gossamer.ScatterReduce`):
    w ← w − lr·(m̂/(√v̂ + ε) + weight_decay·w). A frozen variance makes the step linear in what is averaged, so that
    error feedback can make up for what a sign loses. Biases and the scales of norms are averaged exactly throughout.

    Where there was hardly a gradient before the freeze (a dead feature, a rare token), √v̂ is close to zero, and what
    rounding makes of zero would move the weight without bounds. So frozen roots are at least ``floor`` times the mean of
    their tensor's; such weights move less than with Adam. A parameter without any gradient before the freeze (a branch that
    is switched on later) stays as it is for good, and a warning says so.

    ``warmup``: the number of steps of the first phase; None ends it when the variance is stable: the L1 norm of v̂ has
    changed by less than ``tolerance`` over the last ``interval`` steps. (The original compares over 1/(1 − β₂) steps.)
    These are steps of the optimizer. m̂ and v̂ are corrected by the number of steps in which any worker had a gradient for the
    parameter, as AdamW does; v̂ by their number at the freeze, from then on.

    Bytes per step in the second phase: 1/32 of an all-reduce with the sign codec, plus its scales. Communication
    comes after backward and overlaps with nothing but itself. Memory: momentum, variance and its root, one residual per
    element, in 16 bits (``residual="fp32"``: in full precision).

    Give it to :func:`gossamer.replicate` without an algorithm. Gradients that ``clip_grad_norm_`` sees are this worker's.

    Not the choice while the learning rate still warms up: let ``warmup`` last longer than that.

    Source: Tang et al. 2021 (arXiv 2102.02888), algorithm 1; weight decay as in AdamW.

    Raises:
        ConfigurationError: an option out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        warmup: int | None = None,
        interval: int = 50,
        tolerance: float = 0.04,
        floor: float = 0.1,
        codec: Codec | None = None,
        residual: Wire = "bf16",
        bucket_bytes: int = 2 * 2**20,
    ) -> None:
        for name, value in {"tolerance": tolerance, "floor": floor}.items():
            check_number(name, value)
        if warmup is not None and not is_whole(warmup, 1):
            raise ConfigurationError(f"warmup must be a number of steps, at least 1, or None to find its end; got {warmup!r}")
        if not is_whole(interval, 1):
            raise ConfigurationError(f"interval must be a number of steps, at least 1; got {interval!r}")
        codec = self.default_codec() if codec is None else codec
        self._algorithm = ScatterReduce(codec=codec, residual=residual, bucket_bytes=bucket_bytes)
        self._warmup, self._interval, self._tolerance, self._floor = warmup, interval, tolerance, floor
        # Constant once the variance is frozen; made again from it after loading, so not saved.
        self._inverse_roots: dict[Tensor, Tensor | None] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._fill_in_first()

    def _fill_in_first(self) -> None:
        """What is counted for all, in the first group, so that it is saved and loaded with that."""
        for name, value in {"steps": 0, "frozen_at": None, "variance_norm": None}.items():
            self.param_groups[0].setdefault(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What a loaded state does not know (Adam's does not know our phases) is as at the beginning."""
        super().__setstate__(state)
        fill_in(self)
        self._fill_in_first()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own. Raises ConfigurationError for options out of range."""
        check_adam(self.defaults | param_group)
        super().add_param_group(param_group)

    @staticmethod
    def default_codec() -> Codec:
        """What the momentum travels as unless another codec is given."""
        return Sign()

    @property
    def algorithm(self) -> Algorithm:
        return self._algorithm

    @property
    def frozen(self) -> bool:
        """Whether the second phase has begun."""
        return self.param_groups[0]["frozen_at"] is not None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; ``closure`` recomputes the loss, which is returned."""
        loss = evaluated(closure)
        parameters = self.parameters()
        for parameter in parameters:
            check_dense(self, parameter)
        here = [parameter.grad is not None for parameter in parameters]
        used = (lambda: here) if self.link is None else self.link.used(here)
        self._remember(parameters)
        self.param_groups[0]["steps"] += 1
        self._compressed(parameters, used) if self.frozen else self._exact(parameters, used)
        return loss

    def _remember(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                kept = widened(parameter.dtype)
                self.state[parameter]["step"] = 0
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter, dtype=kept)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter, dtype=kept)

    def _exact(self, parameters: list[Tensor], used: Callable[[], list[bool]]) -> None:
        """AdamW on the mean gradient; perhaps the last time."""

        def write(index: int, place: Tensor) -> None:
            gradient = parameters[index].grad
            place.zero_() if gradient is None else place.copy_(gradient)

        means = self.means(write, False, self._steps())
        for parameter, group, mean in self._each(means, used()):
            state = self.state[parameter]
            state["step"] += 1
            gradient = mean.to(state["exp_avg"].dtype)
            (step,) = adam_steps(group, [state["exp_avg"]], [state["exp_avg_sq"]], [gradient], [state["step"]])
            _write(parameter, _decayed(parameter, group).add_(step, alpha=-group["lr"]))
        if self._is_stable():
            self._freeze()

    def _freeze(self) -> None:
        """The first phase has ended."""
        self.param_groups[0]["frozen_at"] = self._steps()
        for state in self.state.values():
            state["frozen_at"] = state["step"]

    def _compressed(self, parameters: list[Tensor], used: Callable[[], list[bool]]) -> None:
        """The mean of the momenta that the workers would have; the variance as it was frozen."""
        owners = self._each(parameters)

        def write(index: int, place: Tensor) -> None:
            parameter, group, _ = owners[index]
            decay = group["betas"][0]
            average, gradient = self.state[parameter]["exp_avg"], parameter.grad
            gradient = average.new_zeros(()) if gradient is None else gradient.to(average.dtype)
            torch.lerp(average, gradient, 1 - decay, out=place)

        means = self.means(write, True, self._steps())
        for parameter, group, mean in self._each(means, used()):
            state = self.state[parameter]
            state["step"] += 1
            state["exp_avg"] = mean  # no copy: a pass over memory less
            if parameter not in self._inverse_roots:
                self._inverse_roots[parameter] = self._frozen_inverse_root(parameter, group)
            inverse_root = self._inverse_roots[parameter]
            if inverse_root is not None:
                rate = group["lr"] / (1 - group["betas"][0] ** state["step"])
                _write(parameter, _decayed(parameter, group).addcmul_(mean, inverse_root, value=-rate))

    def _frozen_inverse_root(self, parameter: Tensor, group: dict[str, Any]) -> Tensor | None:
        """1/(√v̂ + ε) of the frozen variance, with its floor; None for a tensor that had no gradient until it was frozen:
        nothing tells how far its weights are to go, so they stay."""
        state = self.state[parameter]
        if not state["exp_avg_sq"].any():
            if parameter.numel():
                _logger.warning(
                    "%s: a parameter of shape %s has its first gradient after the variance was frozen (at step %d), so nothing "
                    "tells how far its weights are to go, and they stay: let warmup= last until all parameters have gradients",
                    type(self).__name__, tuple(parameter.shape), self.param_groups[0]["frozen_at"]
                )  # fmt: skip
            return None
        root: Tensor = (state["exp_avg_sq"] / (1 - group["betas"][1] ** state["frozen_at"])).sqrt_()
        return root.clamp_(min=self._floor * root.mean()).add_(group["eps"]).reciprocal_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what ``state_dict()`` returned, with moments in the precision that they were saved in."""
        with loading(self, self._put_back):
            super().load_state_dict(state_dict)

    def _put_back(self, state_dict: State) -> None:
        put_back(self, state_dict)
        first = self.param_groups[0]
        for state in self.state.values():
            if "step" not in state:  # saved when steps were counted for all parameters together
                counted = bool(state["exp_avg_sq"].any())
                state["step"], state["frozen_at"] = counted * first["steps"], counted * (first["frozen_at"] or 0)
        self._inverse_roots.clear()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("_algorithm", "_warmup", "_interval", "_tolerance", "_floor")}
        return {**super().__getstate__(), **own, "_inverse_roots": {}}

    def _is_stable(self) -> bool:
        """Whether the first phase ends with this step. All workers hold the same variance, so they agree."""
        steps, first = self._steps(), self.param_groups[0]
        if self._warmup is not None:
            return steps >= self._warmup
        if steps % self._interval:
            return False
        counts = [(self.state[p], group["betas"][1]) for p, group, _ in self._each(self.parameters()) if self.state[p]["step"]]
        norms = [state["exp_avg_sq"].sum() / (1 - beta2 ** state["step"]) for state, beta2 in counts]
        before = first["variance_norm"]
        now = float(torch.stack([n.to(norms[0].device) for n in norms]).sum()) if norms else 0.0
        first["variance_norm"] = now
        return bool(before) and abs(now - before) <= self._tolerance * before

    def _steps(self) -> int:
        return int(self.param_groups[0]["steps"])

    def _each(self, tensors: list[Tensor], used: list[bool] | None = None) -> list[tuple[Tensor, dict[str, Any], Tensor]]:
        """Parameter, its group, and its tensor; of the used ones."""
        owners = [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]
        rows = [(parameter, group, tensor) for (parameter, group), tensor in zip(owners, tensors, strict=True)]
        return rows if used is None else [row for row, yes in zip(rows, used, strict=True) if yes]


def _decayed(parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """The weight after its decay, in at least fp32: the parameter itself, unless it has fewer bits."""
    weight = wide(parameter)
    if group["weight_decay"]:
        weight.mul_(1 - group["lr"] * group["weight_decay"])
    return weight


def _write(parameter: Tensor, weight: Tensor) -> None:
    """Round the weight into the parameter, unless it is that itself."""
    if weight is not parameter:
        parameter.copy_(weight)


class QAdam(OneBitAdam):
    """BAGUA's QAdam: as :class:`OneBitAdam`, with 8 bits per element of the momentum.

    Bytes per step in the second phase: a quarter of an all-reduce.

    Source: Gan et al. 2021 (arXiv 2107.01499).
    """

    @staticmethod
    def default_codec() -> Codec:
        return Quantize()
