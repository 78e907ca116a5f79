"""Master weights: float32 copies of half-precision parameters, which keep the updates that 16 bits round away."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.errors import ConfigurationError
from gossamer.optim.communicating import Communicating
from gossamer.optim.loading import loading, saved_keys
from gossamer.optim.parts import own as parts_of
from gossamer.optim.wide import evaluated

_HALVES = (torch.float16, torch.bfloat16)
_KEY = "master_weight"


class MasterWeights(Optimizer):
    """Any optimizer, updating float32 copies of a model's bfloat16 or float16 parameters.

    An update smaller than half the spacing of 16-bit numbers (2⁻⁹ of a bfloat16 weight) would be rounded away, every
    time. Here it is added to the float32 copy, and the model receives the rounded sum::

        model = Net().bfloat16()
        optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)

    To a training loop, a learning-rate schedule and :func:`gossamer.replicate` it is an ordinary optimizer:
    ``param_groups`` hold the model's own parameters, whose gradients have the model's dtype and may be clipped between
    backward and step. Parameters of other dtypes are updated in place. Algorithms that exchange weights exchange the
    copies. What else changes the model's weights between two steps moves the copies by the same difference; before the first
    step they take the model's values. :func:`gossamer.replicate` gives all ranks rank 0's copies, unless a state was loaded
    after the last step: its model may be loaded later.

    With a ``torch.amp.GradScaler``, gradients are divided by the scale in float32. torch refuses
    ``scaler.unscale_(optimizer)`` for float16 gradients; clip them in scaled units instead:
    ``clip_grad_norm_(parameters, limit * scaler.get_scale())``.

    ``state`` and ``state_dict()`` have the usual form, and hold nothing before the first step; a parameter's copy is its entry
    ``"master_weight"``. ``state`` is made when it is asked for: what is written into it is lost.

    Args:
        optimizer_factory: called with groups of float32 parameters and ``options``: an optimizer's class, say.
        params: the model's parameters, or groups of them with options of their own.
        options: for the factory.

    Raises:
        ConfigurationError: the factory made something else than an optimizer of these parameters.

    Source: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.1.
    """

    _step_supports_amp_scaling = True  # torch then hands over the scale and the overflow flag instead of unscaling in 16 bits

    def __init__(self, optimizer_factory: Callable[..., Optimizer], params: Iterable[Any], **options: Any) -> None:
        self._masters: dict[Tensor, Tensor] = {}
        self._begun = False
        """Whether the copies hold more than the model: after a step, a loaded state, an exchange."""
        self._loaded = False
        """Whether the copies are those of a loaded state, with which no step was taken yet."""
        groups = [dict(group) for group in _grouped(params)]
        self._inner = optimizer_factory([self._mirrored(group) for group in groups], **options)
        if not isinstance(self._inner, Optimizer) or len(self._inner.param_groups) != len(groups):
            raise ConfigurationError(
                f"the factory must return a torch.optim.Optimizer with the {len(groups)} group(s) it was given; "
                f"got {type(self._inner).__name__}"
            )
        if isinstance(self._inner, Communicating):
            raise ConfigurationError(
                f"{type(self._inner).__name__} communicates inside its own step, where MasterWeights hides it: give it float32 "
                "parameters, without MasterWeights"
            )
        self._constructing = True
        super().__init__([_options(inner) | own for inner, own in zip(self._inner.param_groups, groups, strict=True)], {})
        self._constructing = False
        self.defaults: dict[str, Any] = self._inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own."""
        if not self._constructing:
            param_group = dict(param_group, params=_listed(param_group["params"]))
            self._inner.add_param_group(self._mirrored(param_group))
            param_group = _options(self._inner.param_groups[-1]) | param_group
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; skipped if a GradScaler has found an overflow. ``closure`` recomputes the loss, which is returned."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:  # a number, and no tensor, where there is no gradient at all
            return None
        self._follow_model()
        self._copy_options(self.param_groups, self._inner.param_groups)
        if closure is None:
            self._bring_gradients()
            with self._only_those_held():
                loss = self._inner.step()
        else:
            loss = self._inner.step(lambda: self._evaluate(closure))
        self._copy_options(self._inner.param_groups, self.param_groups)
        self._write_model()
        for master in self._masters.values():
            master.grad = None
        self._begun, self._loaded = True, False
        return loss

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """Of each parameter what the inner optimizer remembers, and its copy, as of now. Empty before the first step, by
        which ``torch.distributed.checkpoint`` sees that there is more to come.
        """
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        for own, master in self._pairs() if self._begun else ():
            copy = {_KEY: master.detach()} if own in self._masters else {}
            if entry := {**self._inner.state.get(master, {}), **copy}:
                state[own] = entry
        return state

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        """torch makes one for itself, which stays empty."""

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer; from the first step on a parameter with a float32 copy has it under ``"master_weight"``."""
        last = self.register_state_dict_pre_hook(lambda _: self._follow_model())  # the others may take a step that is late
        try:
            return super().state_dict()
        finally:
            last.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned, and load the model of the same moment before the next step.

        Raises:
            ConfigurationError: a copy is missing, as in a state saved without master weights.
        """
        with loading(self, self._put_back, self._check_copies):
            super().load_state_dict(state_dict)

    def _check_copies(self, state_dict: dict[str, Any]) -> None:
        """Refuse a state without copies, unless it is one from before the first step: then they are the model's values."""
        if not state_dict["state"]:
            return
        missing = [key for key, (own, _) in zip(saved_keys(state_dict), self._pairs(), strict=False) if own in self._masters]
        missing = [key for key in missing if _KEY not in state_dict["state"].get(key, {})]
        if missing:
            raise ConfigurationError(
                f"the state has no {_KEY!r} for parameter {missing[0]}: it was saved by an optimizer without master weights"
            )

    @torch.no_grad()
    def _put_back(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["state"]
        rest = {key: {k: v for k, v in entry.items() if k != _KEY} for key, entry in saved.items()}
        self._inner.load_state_dict({**state_dict, "state": {key: entry for key, entry in rest.items() if entry}})
        self._copy_options(self._inner.param_groups, self.param_groups)
        for key, (own, master) in zip(saved_keys(state_dict), self._pairs(), strict=True):
            if own in self._masters:
                master.copy_(saved[key][_KEY] if saved else own)
        self._begun = self._loaded = bool(saved)

    def exact_weight(self, parameter: Tensor) -> Tensor:
        """The float32 copy of a parameter, or itself if it has none."""
        return self._masters.get(parameter, parameter)

    def exact_state(self, parameter: Tensor) -> dict[str, Any]:
        """What the inner optimizer remembers of a parameter: the tensors themselves."""
        entry: dict[str, Any] = self._inner.state.get(self._masters.get(parameter, parameter), {})
        return entry

    @contextmanager
    def exact_weights_change(self) -> Iterator[None]:
        """Inside, the copies may be changed in place; they agree with the model at first, and the model follows them."""
        self._follow_model()
        yield
        self._write_model()
        self._begun = self._begun or any(bool(master.ne(own).any()) for own, master in self._masters.items())

    @property
    def exact_weights_wait(self) -> bool:
        """Whether the copies were loaded, and belong to a model that may be loaded later."""
        return self._loaded

    def __getstate__(self) -> dict[str, Any]:
        own = ("defaults", "param_groups", "_masters", "_inner", "_begun", "_loaded", "_constructing")
        return {name: getattr(self, name) for name in own}

    def _mirrored(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with float32 copies in place of half-precision parameters."""
        mirrored = [(p[0], self._mirror(p[1])) if isinstance(p, tuple) else self._mirror(p) for p in _listed(group["params"])]
        return {**group, "params": mirrored}

    def _mirror(self, parameter: Tensor) -> Tensor:
        if parameter.dtype not in _HALVES:
            return parameter
        self._masters[parameter] = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
        return self._masters[parameter]

    def _pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Every parameter and what the inner optimizer holds for it, in the order of the groups."""
        for group in self.param_groups:
            for own in group["params"]:
                yield own, self._masters.get(own, own)

    @torch.no_grad()
    def _follow_model(self) -> None:
        """Give the copies the model's values, exactly, and what they held below the last 16-bit digit: nothing at first."""
        for own, master in self._masters.items():
            # What is not finite has no last digit: a model that was mended stays mended.
            master.sub_(master.to(own.dtype)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).add_(own)

    def _bring_gradients(self) -> None:
        scale = getattr(self, "grad_scale", None)
        for own, master in self._pairs():
            if own.grad is None:
                master.grad = None
                continue
            if own in self._masters:
                master.grad = own.grad.float()
            if scale is not None and master.grad is not None:
                master.grad.div_(scale.to(master.grad.device))

    @contextmanager
    def _only_those_held(self) -> Iterator[None]:
        """Inside, nothing but what the groups hold now has a gradient: a step in parts (``overlap_forward``)
        leaves the other parameters out of them, and parameters without a copy may have their next gradient already."""
        held = {id(master) for _, master in self._pairs()}
        parameters = (p for group in self._inner.param_groups for p in group["params"])
        others = [(p, p.grad) for p in parameters if id(p) not in held and p.grad is not None]
        for parameter, _ in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in others:
                parameter.grad = gradient

    @property
    def inner(self) -> Optimizer:
        """The optimizer that updates the copies."""
        return self._inner

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._write_model()
        loss = evaluated(closure)
        self._bring_gradients()
        return loss

    @torch.no_grad()
    def _write_model(self) -> None:
        """Round the copies into the model, as far as the groups hold it now."""
        pairs = [(own, master) for own, master in self._pairs() if own in self._masters]
        if pairs:
            torch._foreach_copy_(parts_of(own for own, _ in pairs), parts_of(master for _, master in pairs))

    def _copy_options(self, sources: Iterable[dict[str, Any]], targets: Iterable[dict[str, Any]]) -> None:
        """Schedules write into our groups, some optimizers into theirs: both always hold the same options."""
        for source, target in zip(sources, targets, strict=True):
            options = _options(source)
            for name in target.keys() - options.keys() - {"params"}:
                del target[name]
            target.update(options)


def _grouped(params: Iterable[Any]) -> list[dict[str, Any]]:
    listed = _listed(params)
    if listed and isinstance(listed[0], dict):
        return [{**group, "params": _listed(group["params"])} for group in listed]
    return [{"params": listed}]


def _listed(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
