"""Optimizers that keep more than one sequence of weights, and advice: judged by what an optimizer keeps."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import gossamer
from gossamer import AllReduce, Gossip, GossipGraD, LocalSGD, UsageError, loopback
from gossamer.algorithms.base import Algorithm


class Stepping(Optimizer):
    """Plain steps, and what classes below it do beside them."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def after(self, parameter: Any) -> None:
        """One parameter was updated."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.one(parameter, group["lr"])
                    self.after(parameter)

    def one(self, parameter: Any, lr: float) -> None:
        parameter.add_(parameter.grad, alpha=-lr)


class ScheduleFree(Stepping):
    """SGD on z, gradients at y = 0.9·x + 0.1·z, x the mean of all z; the parameters are y."""

    def one(self, parameter: Any, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["z"], state["count"] = parameter.clone(), 0
        z, state["count"] = state["z"], state["count"] + 1
        parameter.lerp_(z, 1 / state["count"])
        z.sub_(parameter.grad, alpha=lr)


class Lookahead(Stepping):
    """Every third step half-way back to slow weights, which are made then and kept in the state."""

    def after(self, parameter: Any) -> None:
        state = self.state[parameter]
        state["k"] = state.get("k", 0) + 1
        if state["k"] % 3 == 0:
            slow = state.setdefault("slow_buffer", parameter.clone())
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)


class LookaheadInAList(Stepping):
    """The same, with slow weights in an attribute, one list for each group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.slow_weights = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group, slow in zip(self.param_groups, self.slow_weights, strict=True):
            for parameter, weight in zip(group["params"], slow, strict=True):
                weight.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(weight)


class KeptElsewhere(Stepping):
    """The same, with slow weights in an attribute that is made when they are needed first, at step ``at``."""

    at = 1

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps >= self.at:
            if not hasattr(self, "slow"):
                self.slow = self.kept([p for group in self.param_groups for p in group["params"]])
            self.meet()

    def kept(self, parameters: list[Any]) -> Any:
        return [p.detach().clone() for p in parameters]

    def meet(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, weight in zip(parameters, self.weights(), strict=True):
            weight.lerp_(parameter.detach(), 0.5)
            parameter.data.copy_(weight)

    def weights(self) -> Any:
        return self.slow


class LookaheadMadeLater(KeptElsewhere):
    """The first steps are those of the optimizer inside."""

    at = 3


class LookaheadInADict(KeptElsewhere):
    """By parameter."""

    def kept(self, parameters: list[Any]) -> Any:
        return {p: p.detach().clone() for p in parameters}

    def weights(self) -> Any:
        return self.slow.values()


class LookaheadAmongOthers(KeptElsewhere):
    """Beside something else that is kept of each parameter."""

    def kept(self, parameters: list[Any]) -> Any:
        return {"ages": [torch.zeros_like(p) for p in parameters], "weights": [p.detach().clone() for p in parameters]}

    def weights(self) -> Any:
        return self.slow["weights"]


class LookaheadInOneVector(KeptElsewhere):
    """As flat as ``torch.nn.utils.parameters_to_vector`` makes them."""

    def kept(self, parameters: list[Any]) -> Any:
        return torch.nn.utils.parameters_to_vector(parameters).detach().clone()

    def meet(self) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.slow.lerp_(torch.nn.utils.parameters_to_vector(parameters).detach(), 0.5)
        torch.nn.utils.vector_to_parameters(self.slow.clone(), parameters)


ELSEWHERE = [LookaheadMadeLater, LookaheadInADict, LookaheadAmongOthers, LookaheadInOneVector]


class LookaheadFlat(Stepping):
    """Slow weights of each parameter, as one row of numbers."""

    def after(self, parameter: Any) -> None:
        slow = self.slow_of(parameter)
        slow.lerp_(parameter.reshape(-1), 0.5)
        parameter.copy_(slow.view_as(parameter))

    def slow_of(self, parameter: Any) -> Any:
        return self.state[parameter].setdefault("slow", parameter.detach().reshape(-1).clone())


class LookaheadAmongState(LookaheadFlat):
    """The same, in a container."""

    def slow_of(self, parameter: Any) -> Any:
        kept = {"step": torch.zeros(()), "weights": [parameter.detach().reshape(-1).clone()]}
        return self.state[parameter].setdefault("slow", kept)["weights"][0]


class LookaheadTransposed(LookaheadFlat):
    """Slow weights with rows and columns exchanged, as some kernels want them."""

    def after(self, parameter: Any) -> None:
        slow = self.state[parameter].setdefault("slow", parameter.detach().t().contiguous().clone())
        slow.lerp_(parameter.t(), 0.5)
        parameter.copy_(slow.t())


class LookaheadAsMatrix(LookaheadFlat):
    """Slow weights as matrices of one column."""

    def slow_of(self, parameter: Any) -> Any:
        return self.state[parameter].setdefault("slow", parameter.detach().reshape(-1, 1).clone()).view(-1)


ELSEWHERE += [LookaheadFlat, LookaheadAmongState, LookaheadTransposed, LookaheadAsMatrix]


class OwnMomentum(Stepping):
    """A momentum under a name that nobody knows."""

    def one(self, parameter: Any, lr: float) -> None:
        mean = self.state[parameter].setdefault("mean_of_gradients", torch.zeros_like(parameter))
        mean.mul_(0.9).add_(parameter.grad)
        parameter.add_(mean, alpha=-lr)


class OwnAdam(Stepping):
    """Divides by the size of its own gradients, and is no subclass of torch's."""

    def one(self, parameter: Any, lr: float) -> None:
        square = self.state[parameter].setdefault("exp_avg_sq", torch.zeros_like(parameter))
        square.mul_(0.9).addcmul_(parameter.grad, parameter.grad, value=0.1)
        parameter.addcdiv_(parameter.grad, square.sqrt().add_(1e-8), value=-lr)


def train(rank: int, optimizer_of: Any, algorithm: Algorithm, steps: int = 8, width: int = 3) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, width)
    optimizer = optimizer_of(model.parameters())
    replica = gossamer.replicate(model, optimizer, algorithm)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
    replica.close()


@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(every=2)], ids=repr)
@pytest.mark.parametrize(
    ("optimizer_of", "key"),
    [
        (ScheduleFree, "z"),
        (Lookahead, "slow_buffer"),
        (LookaheadInAList, "slow_weights"),
        *((each, "slow") for each in ELSEWHERE),
    ],
)
def test_a_second_sequence_of_weights_that_would_not_travel_is_refused(
    optimizer_of: Any, key: str, algorithm: Algorithm
) -> None:
    with pytest.raises(UsageError, match=rf"rank .*{optimizer_of.__name__} keeps .*'{key}'.*weight"):
        loopback(lambda rank: train(rank, optimizer_of, algorithm), 2)


def test_a_transposed_copy_of_a_square_matrix_is_refused_too() -> None:
    with pytest.raises(UsageError, match="LookaheadTransposed keeps a second sequence of weights"):
        loopback(lambda rank: train(rank, LookaheadTransposed, Gossip(), width=4), 2)


@pytest.mark.parametrize("optimizer_of", [ScheduleFree, Lookahead, LookaheadInAList, *ELSEWHERE])
def test_where_gradients_travel_it_is_the_same_on_all_ranks(optimizer_of: Any) -> None:
    loopback(lambda rank: train(rank, optimizer_of, AllReduce()), 2)


def test_what_an_optimizer_remembers_may_travel_with_the_weights() -> None:
    """Then a second sequence does, too."""
    loopback(lambda rank: train(rank, ScheduleFree, GossipGraD(history=True)), 2)


@pytest.mark.parametrize("optimizer_of", [Lookahead, LookaheadInAList, *ELSEWHERE])
def test_one_that_is_made_later_or_kept_elsewhere_would_not_travel(optimizer_of: Any) -> None:
    with pytest.raises(UsageError, match="keeps a second sequence of weights"):
        loopback(lambda rank: train(rank, optimizer_of, GossipGraD(history=True)), 2)


@pytest.mark.parametrize(
    "optimizer_of",
    [
        OwnMomentum, OwnAdam, gossamer.optim.GossipAdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adadelta,
        torch.optim.Rprop, torch.optim.NAdam, torch.optim.Adamax,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adam(params, amsgrad=True),
    ],
)  # fmt: skip
def test_what_is_made_of_gradients_is_no_second_sequence(optimizer_of: Any) -> None:
    loopback(lambda rank: train(rank, optimizer_of, Gossip()), 2)


def test_a_counter_is_none_though_it_has_the_value_of_a_weight() -> None:
    """Adam's number of steps is a tensor without dimensions, and so is a scale of 1."""

    def body(rank: int) -> None:
        model = nn.ParameterDict({"scale": nn.Parameter(torch.ones(())), "weight": nn.Parameter(torch.ones(3))})
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        replica = gossamer.replicate(model, optimizer, Gossip())
        for _ in range(3):
            (model["scale"] * model["weight"].sum()).backward()
            optimizer.step()
        replica.close()

    loopback(body, 2)


def test_a_momentum_that_looks_like_the_weights_is_none_either() -> None:
    """The gradient of ½‖w‖² is w."""

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, Gossip())
        for _ in range(3):
            optimizer.zero_grad()
            sum(p.square().sum() / 2 for p in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
        replica.close()

    loopback(body, 2)


@pytest.mark.parametrize(
    ("optimizer_of", "algorithm", "told"),
    [
        (OwnAdam, Gossip(), True),
        (torch.optim.RMSprop, LocalSGD(every=1), True),
        (torch.optim.AdamW, Gossip(), True),
        (OwnAdam, AllReduce(), False),
        (OwnMomentum, Gossip(), False),
        (gossamer.optim.GossipAdamW, Gossip(), False),
    ],
    ids=repr,
)
def test_optimizers_that_divide_by_the_size_of_their_own_gradients_are_told_of(
    optimizer_of: Any, algorithm: Algorithm, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gossamer"):
        loopback(lambda rank: train(rank, optimizer_of, algorithm), 3)
    texts = [record.getMessage() for record in caplog.records]
    assert ["gossamer.optim.GossipAdamW learns faster" in text for text in texts] == [True] * told
