"""Training: what of a workload a study trains with, beyond what timing a step needs."""

from functools import partial

from torch import nn
from torch.optim import Optimizer

from gossamer.bench.methods import KINDS, made_of_names
from gossamer.bench.workload import Batches, Quality, Workload
from gossamer.errors import ConfigurationError


def training_of(workload: Workload) -> tuple[Batches, Quality]:
    """What to train with, and what it is worth; ConfigurationError if the workload does not say."""
    if workload.training_batches is None or workload.quality is None:
        raise ConfigurationError(f"the workload {workload.name} defines no training_batches() and quality()")
    return workload.training_batches, partial(_evaluated, workload.quality)


def parse_optimizer(text: str) -> partial[Optimizer]:
    """A maker of one of gossamer's optimizers, spelled as in a script without its parameters. Raises ConfigurationError."""
    made = made_of_names(text, {name: partial(partial, kind) for name, kind in KINDS.items()}, "optimizer", list(KINDS))
    if not isinstance(made, partial):
        raise ConfigurationError(f"{text!r} is no optimizer; write for example GossipAdamW()")
    return made


def _evaluated(quality: Quality, model: nn.Module) -> dict[str, float]:
    """What ``quality`` says of the model in evaluation mode; each of its modules goes back to its own."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return quality(model)
    finally:
        for module, training in modes:
            module.training = training
