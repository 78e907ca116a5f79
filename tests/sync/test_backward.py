"""Where a backward pass begins and ends, and which ones are communicated."""

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, ScatterReduce
from gossamer.algorithms import Algorithm
from gossamer.comm.runner import InlineRunner, LocalPort, Meter
from gossamer.errors import CommunicationError, ConfigurationError, UsageError
from gossamer.sync.backward import Backward, alarming, in_words


class Alarmed(InlineRunner):
    """One rank that keeps what it would tell the others."""

    def __init__(self, world: int = 1) -> None:
        super().__init__(LocalPort(Meter()), Meter(), world=world)
        self.alarms: list[str] = []

    def alarm(self, message: str) -> None:
        self.alarms.append(message)


class Watched:
    """A model of two layers, and the record of its backward passes."""

    def __init__(self, world: int = 1) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.events: list[str] = []
        self.runner = Alarmed(world)
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


def fail_half_way(watched: Watched) -> None:
    middle = watched.model[0](torch.ones(1, 2))

    def fail(grad: Tensor) -> Tensor:
        raise ArithmeticError("the user's own")

    middle.register_hook(fail)
    with pytest.raises(ArithmeticError):
        watched.model[1](middle).sum().backward()
    assert watched.events == ["begin", "1.bias", "1.weight"] or watched.events == ["begin", "1.weight", "1.bias"]
    assert not watched.runner.alarms


def test_after_an_error_half_way() -> None:
    watched = Watched(world=2)
    fail_half_way(watched)
    with pytest.raises(UsageError, match="has not ended: it raised an error half-way"):
        watched.loss().backward()
    assert "has not ended" in watched.runner.alarms[0]


def test_alone_the_next_pass_begins_anew_after_an_error_half_way() -> None:
    """As after running out of memory for one batch: there is nobody who is at another place."""
    watched = Watched()
    fail_half_way(watched)
    watched.events.clear()
    watched.loss().backward()
    assert watched.events[0] == "begin"
    assert watched.events[-1] == "end"
    assert (watched.backward.passes, watched.backward.synchronised_passes) == (1, 1)


@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("algorithm", [AllReduce(bucket_bytes=64), ScatterReduce(bucket_bytes=64)])
def test_alone_a_batch_that_fails_leaves_nothing_behind(algorithm: Algorithm, overlap_forward: bool) -> None:
    def train(failing: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm, overlap_forward=overlap_forward)
        for step in range(6):
            batch = torch.full((2, 6), step / 6)
            middle = model[:2](batch)
            if step == failing:
                middle.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model[2:](100 * middle).square().mean().backward()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        replica.close()
        assert replica.step == 6
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(train(failing=4), train(failing=-1))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("more_to_come", [True, False])
def test_a_pass_inside_another_one_is_refused(world: int, more_to_come: bool) -> None:
    watched = Watched(world)
    middle = watched.model[0](torch.ones(1, 2))
    if not more_to_come:
        middle = middle.detach().requires_grad_()

    def inside(grad: Tensor) -> None:
        with torch.enable_grad():
            watched.loss().backward()

    middle.register_hook(inside)
    with pytest.raises(UsageError, match="inside"):
        watched.model[1](middle).sum().backward()
    assert "inside" in watched.runner.alarms[0]


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


def test_what_ends_a_rank_in_words() -> None:
    assert in_words(2, ConfigurationError("rank 2: a field")) == "rank 2: a field"
    assert in_words(2, MemoryError("of 3 GB")) == "rank 2: MemoryError: of 3 GB"
    assert in_words(2, KeyboardInterrupt()) == "rank 2: KeyboardInterrupt"
