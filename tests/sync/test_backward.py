"""Where a backward pass begins and ends, and which ones are communicated."""

import pytest
import torch
from torch import Tensor, nn

from gossamer.comm.runner import InlineRunner, LocalPort, Meter
from gossamer.errors import CommunicationError, ConfigurationError, UsageError
from gossamer.sync.backward import Backward, alarming


class Alarmed(InlineRunner):
    """A world of one that keeps what it would tell the others."""

    def __init__(self) -> None:
        super().__init__(LocalPort(Meter()), Meter())
        self.alarms: list[str] = []

    def alarm(self, message: str) -> None:
        self.alarms.append(message)


class Watched:
    """A model of two layers, and the record of its backward passes."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.events: list[str] = []
        self.runner = Alarmed()
        self.backward = Backward(self.runner, lambda: self.events.append("begin"), lambda: self.events.append("end"))
        for name, parameter in self.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self.note(name))

    def note(self, name: str) -> None:
        self.events.append(name if self.backward.reached() else f"({name})")

    def loss(self) -> Tensor:
        return self.model(torch.ones(1, 2)).sum()


def test_one_pass() -> None:
    watched = Watched()
    watched.loss().backward()
    assert watched.events[0] == "begin"
    assert watched.events[-1] == "end"
    assert sorted(watched.events[1:-1]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert (watched.backward.passes, watched.backward.synchronised_passes) == (1, 1)


def test_each_pass_begins_and_ends() -> None:
    watched = Watched()
    for _ in range(3):
        watched.loss().backward()
    loss = watched.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.autograd.backward([watched.loss(), watched.loss()])
    assert watched.events.count("begin") == watched.events.count("end") == 6
    assert watched.backward.synchronised_passes == 6


def test_without_synchronisation() -> None:
    watched = Watched()
    watched.backward.synchronise = False
    watched.loss().backward()
    watched.loss().backward()
    assert set(watched.events) == {"(0.bias)", "(0.weight)", "(1.bias)", "(1.weight)"}
    assert (watched.backward.passes, watched.backward.synchronised_passes) == (2, 0)
    watched.backward.synchronise = True
    watched.loss().backward()
    assert (watched.backward.passes, watched.backward.synchronised_passes) == (3, 1)


def test_a_pass_that_reaches_no_parameter_is_none() -> None:
    watched = Watched()
    x = torch.ones(1, requires_grad=True)
    (x * 2).sum().backward()
    torch.autograd.grad(watched.loss(), list(watched.model.parameters()))
    assert watched.events == []
    assert watched.backward.passes == 0


def test_after_an_error_half_way() -> None:
    watched = Watched()
    middle = watched.model[0](torch.ones(1, 2))

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("the user's own")

    middle.register_hook(fail)
    with pytest.raises(ArithmeticError):
        watched.model[1](middle).sum().backward()
    assert watched.events == ["begin", "1.bias", "1.weight"] or watched.events == ["begin", "1.weight", "1.bias"]
    assert not watched.runner.alarms
    with pytest.raises(UsageError, match="has not ended: it raised an error half-way"):
        watched.loss().backward()
    assert "has not ended" in watched.runner.alarms[0]


def test_after_an_error_before_any_parameter() -> None:
    """Nothing was sent, so nothing is lost."""
    watched = Watched()
    output = watched.loss()

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("the user's own")

    output.register_hook(fail)
    with pytest.raises(ArithmeticError):
        output.backward()
    watched.loss().backward()
    assert watched.backward.passes == 1


def test_an_error_at_the_end_reaches_the_caller() -> None:
    runner = Alarmed()

    def fail() -> None:
        raise ConfigurationError("from the end")

    backward = Backward(runner, lambda: None, fail)
    model = nn.Linear(2, 2)

    def note(parameter: Tensor) -> None:
        backward.reached()

    model.weight.register_post_accumulate_grad_hook(note)
    with pytest.raises(ConfigurationError, match="from the end"):
        model(torch.ones(1, 2)).sum().backward()
    assert runner.alarms == ["from the end"]


def test_who_is_alarmed() -> None:
    """Errors of this rank's own are told; what comes from the others they know."""
    runner = Alarmed()
    for error in (UsageError("a"), ValueError("b"), CommunicationError("c"), KeyboardInterrupt()):
        with pytest.raises(type(error)), alarming(runner):
            raise error
    assert runner.alarms == ["a", "rank 0: ValueError: b"]
