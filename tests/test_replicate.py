"""The entry point: what it takes, what it refuses, and what it leaves as it was."""

import copy
import inspect
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import gossamer
from gossamer import (
    Algorithm,
    AllReduce,
    ChunkSparse,
    ConfigurationError,
    DisagreementError,
    Gossip,
    Hierarchical,
    PowerSGD,
    ScatterReduce,
    UsageError,
    loopback,
)
from gossamer.codecs import Quantize, Sign
from gossamer.comm.torch.opening import instance_name
from gossamer.optim import MasterWeights
from processes.test_failure_board import Shelf


def make(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def train(model: nn.Module, optimizer: Any, steps: int = 3, rank: int = 0) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        source = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(5, 4, generator=source)).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in model.state_dict().values()])


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group with nobody else in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- the signature --------------------------------------------------------------------------------------------------


def test_the_signature() -> None:
    parameters = inspect.signature(gossamer.replicate).parameters
    keyword = {name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert list(parameters)[:3] == ["model", "optimizer_or_optimizers", "algorithm"]
    assert keyword == {
        "buffers", "fidelity", "group", "ignore", "mesh", "overlap_forward", "plan", "scaler", "statistics", "switch",
        "synchronize", "timeout",
    }  # fmt: skip
    assert all(not parameters[name].default for name in keyword | {"algorithm"})


def test_the_handle() -> None:
    public = {name for name in dir(gossamer.Replica) if not name.startswith("_")}
    assert public == {
        "answer", "catch_up", "close", "consensus", "consensus_distance", "join", "load_state_dict", "metrics", "no_sync",
        "state_dict", "step", "stragglers", "switch", "synchronize", "trace", "wait_for_exchanges", "weigh",
    }  # fmt: skip


# -- a world of one -------------------------------------------------------------------------------------------------


def check_alone() -> None:
    """Trains as without gossamer, bit by bit, and everything on the handle works."""
    for algorithm in (None, AllReduce(wire="bf16"), Gossip()):
        plain, model = make(), make()
        train(plain, AdamW(plain.parameters()))
        optimizer = AdamW(model.parameters())
        replica = gossamer.replicate(model, optimizer, algorithm)
        with replica.join(), replica.no_sync():
            pass
        train(model, optimizer)
        if algorithm != AllReduce(wire="bf16"):
            assert torch.equal(values(plain), values(model))
        with replica.consensus() as same:
            assert same is model
        replica.load_state_dict(replica.state_dict())
        assert replica.step == 3
        assert replica.metrics()["step"] == 3
        assert replica.metrics()["bytes_sent"] == 0
        replica.close()


def test_alone_without_a_process_group() -> None:
    check_alone()


@pytest.mark.usefixtures("group_of_one")
def test_alone_in_a_process_group() -> None:
    check_alone()


def test_the_default_is_exact_all_reduce() -> None:
    model = make()
    assert gossamer.replicate(model, AdamW(model.parameters())).algorithm == AllReduce()


@pytest.mark.parametrize("launcher", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_launched_without_a_process_group(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.setenv(launcher, "2")
    with pytest.raises(ConfigurationError, match=rf"one of 2 \({launcher}\).*init_process_group"):
        gossamer.replicate(model, AdamW(model.parameters()))
    monkeypatch.setenv(launcher, "1")
    gossamer.replicate(model, AdamW(model.parameters())).close()


# -- what stays as it was -------------------------------------------------------------------------------------------


def test_model_and_optimizer_stay_what_they_were() -> None:
    model = make()
    kind, keys, dictionary = type(model), list(model.state_dict()), set(vars(model))
    optimizer = SGD(model.parameters(), lr=0.1)
    step = SGD.step
    replica = gossamer.replicate(model, optimizer)
    train(model, optimizer)
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert set(vars(model)) == dictionary
    assert SGD.step is step
    replica.close()


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=repr)
def test_close_removes_every_hook(algorithm: gossamer.Algorithm) -> None:
    def body(rank: int) -> None:
        model = make()
        optimizer = SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        train(model, optimizer, rank=rank)
        replica.close()
        replica.close()
        assert not model._forward_pre_hooks
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        if rank == 1:
            train(model, optimizer)  # alone
        gossamer.replicate(model, optimizer, algorithm).close()

    loopback(body, 2)


def test_a_copy_of_the_model_trains_alone() -> None:
    def body(rank: int) -> None:
        model = make()
        optimizer = SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer)
        twin = copy.deepcopy(model)
        if rank == 0:
            train(twin, SGD(twin.parameters(), lr=0.1))
        train(model, optimizer, rank=rank)

    loopback(body, 2)


# -- what is refused ------------------------------------------------------------------------------------------------


def refused(match: str, *arguments: Any, **options: Any) -> None:
    """Refused alone, and by every rank of a world."""
    with pytest.raises(ConfigurationError, match=match):
        gossamer.replicate(*arguments, **options)
    with pytest.raises(ConfigurationError, match=match):
        loopback(lambda rank: gossamer.replicate(*arguments, **options), 2)


def test_refuses_what_is_no_model() -> None:
    refused("torch.nn.Module", "resnet50", None)


@pytest.mark.parametrize("optimizer", [None, [], "adam", [None], SGD], ids=repr)
def test_refuses_what_is_no_optimizer(optimizer: Any) -> None:
    refused("torch.optim.Optimizer", make(), optimizer)


def with_adamw(**options: Any) -> tuple[tuple[nn.Module, AdamW], dict[str, Any]]:
    model = make()
    return (model, AdamW(model.parameters())), options


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"algorithm": AllReduce}, r"AllReduce\(\)"),
        ({"algorithm": "gossip"}, "'gossip'"),
        ({"buffers": "sometimes"}, "broadcast, average, local"),
        ({"scaler": 1024}, "GradScaler"),
        ({"timeout": 0}, "timeout .*0"),
        ({"timeout": -1.5}, "timeout .*-1.5"),
        ({"timeout": float("nan")}, "timeout .*nan"),
        ({"timeout": float("inf")}, "timeout .*inf"),
        ({"timeout": "soon"}, "timeout .*'soon'"),
        ({"timeout": True}, "timeout .*True"),
        ({"timeout": timedelta(0)}, "timeout"),
        ({"mesh": 2}, "DeviceMesh"),
        ({"mesh": 2, "group": 3}, "not both"),
    ],
    ids=repr,
)
def test_refuses_wrong_options(options: dict[str, Any], match: str) -> None:
    arguments, options = with_adamw(**options)
    refused(match, *arguments, **options)


@pytest.mark.parametrize("timeout", [5, 0.5, timedelta(minutes=1)])
def test_takes_every_kind_of_timeout(timeout: Any) -> None:
    arguments, options = with_adamw(timeout=timeout)
    gossamer.replicate(*arguments, **options).close()


@pytest.mark.parametrize("kind", [AllReduce, Gossip])
def test_refuses_unknown_fields_and_values(kind: type[gossamer.Algorithm]) -> None:
    with pytest.raises(TypeError, match="wirre"):
        kind(wirre="fp16")
    with pytest.raises(TypeError):
        kind("fp16")
    with pytest.raises(ConfigurationError, match=r"fp32, fp16, bf16.*'fp8'"):
        kind(wire="fp8")
    for size in (0, -1, 1.5, "2MB"):
        with pytest.raises(ConfigurationError, match=re.escape(repr(size))):
            kind(bucket_bytes=size)
    with pytest.raises(AttributeError):
        kind().wire = "bf16"


def test_refuses_parameters_that_cannot_be_replicated() -> None:
    lazy = nn.LazyLinear(3)
    refused("lazy", lazy, SGD(lazy.parameters(), lr=0.1))
    model = nn.ParameterList([nn.Parameter(torch.zeros(2).to_sparse())])
    refused("sparse", model, SGD(model.parameters(), lr=0.1))


def test_refuses_a_model_that_is_frozen() -> None:
    model = make().requires_grad_(False)
    refused("no trainable parameter", model, SGD(model.parameters(), lr=0.1))


def test_refuses_optimizers_that_do_not_fit() -> None:
    model, other = make(), make()
    refused("does not hold.*'0.weight'", model, SGD(other.parameters(), lr=0.1))
    refused("does not hold parameter '0.weight':", model, SGD(list(model.parameters())[1:], lr=0.1))
    refused("more than one optimizer", model, [SGD(model.parameters(), lr=0.1), SGD(model[3].parameters(), lr=0.1)])
    refused("2 parameter.* the model does not have", model, SGD([*model.parameters(), *other[3].parameters()], lr=0.1))


def test_a_frozen_parameter_needs_no_optimizer() -> None:
    model = make()
    model[0].requires_grad_(False)
    optimizer = SGD(model[1:].parameters(), lr=0.1)
    gossamer.replicate(model, optimizer)
    train(model, optimizer)


@pytest.mark.filterwarnings("ignore:FSDP is switching")
@pytest.mark.usefixtures("group_of_one")
def test_refuses_wrapped_models() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped: dict[str, nn.Module] = {
        "DistributedDataParallel": nn.parallel.DistributedDataParallel(make()),
        "DataParallel": nn.DataParallel(make()),
        "FSDP1": FullyShardedDataParallel(make(), device_id=torch.device("cpu")),
    }
    for match, model in wrapped.items():
        for whole in (model, nn.Sequential(model)):
            with pytest.raises(ConfigurationError, match=match):
                gossamer.replicate(whole, SGD(whole.parameters(), lr=0.1))


@pytest.mark.usefixtures("group_of_one")
def test_refuses_what_is_no_group() -> None:
    model = make()
    for group in ("gloo", 3, dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ConfigurationError, match="group"):
            gossamer.replicate(model, SGD(model.parameters(), lr=0.1), group=group)


def test_refuses_a_model_that_is_replicated_already() -> None:
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    replica = gossamer.replicate(model, optimizer)
    refused("called twice", model, optimizer)
    shares = nn.Sequential(model[0], nn.Linear(6, 6))
    refused("'0.weight' is replicated already", shares, SGD(shares.parameters(), lr=0.1))
    replica.close()
    gossamer.replicate(model, optimizer)


def test_ranks_that_differ_are_told_who_differs() -> None:
    def body(rank: int) -> None:
        model = make()
        gossamer.replicate(model, SGD(model.parameters(), lr=0.1), Gossip() if rank == 2 else None)

    with pytest.raises(DisagreementError, match=r"algorithm: ranks 0, 1: AllReduce\(.*\); rank 2: Gossip\("):
        loopback(body, 3)


def test_a_rank_without_the_compiler_of_the_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import threading

    def compiler(device_type: str) -> str:
        return "torch" if threading.current_thread().name == "rank-1" else "numba"

    monkeypatch.setattr(sys.modules["gossamer.replication"], "compiler_for", compiler)

    def body(rank: int) -> None:
        model = make()
        gossamer.replicate(model, SGD(model.parameters(), lr=0.1))

    with pytest.raises(DisagreementError, match=r"kernels: ranks 0, 2: cpu: numba; rank 1: cpu: torch"):
        loopback(body, 3)


# -- what is noticed later ------------------------------------------------------------------------------------------


def change_after(change: Callable[[nn.Module, SGD], None], match: str) -> None:
    """The next optimizer step says what was changed; after close() and replicate() the change is part of the run."""
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    replica = gossamer.replicate(model, optimizer)
    train(model, optimizer)
    change(model, optimizer)
    with pytest.raises(UsageError, match=match):
        train(model, optimizer)
    replica.close()
    optimizer = SGD(model.parameters(), lr=0.1)
    gossamer.replicate(model, optimizer)
    train(model, optimizer)


def test_a_parameter_that_is_added() -> None:
    change_after(lambda m, o: m[0].register_parameter("extra", nn.Parameter(torch.zeros(1))), "'extra' was added")


def test_a_parameter_that_is_replaced() -> None:
    change_after(lambda m, o: setattr(m[0], "bias", nn.Parameter(torch.zeros(6))), "'bias' was added, replaced")


def test_a_parameter_that_is_removed() -> None:
    change_after(lambda m, o: setattr(m[0], "bias", None), "'bias' was added, replaced or removed")


def test_a_layer_that_is_replaced() -> None:
    change_after(lambda m, o: m.__setitem__(3, nn.Linear(6, 1)), "'3' was added, replaced")


def test_a_layer_that_is_added() -> None:
    change_after(lambda m, o: m.append(nn.Linear(2, 2)), "'4' was added")


def test_an_optimizer_that_gets_another_parameter() -> None:
    change_after(lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}), "SGD changed")


def test_a_parameter_that_is_unfrozen() -> None:
    model = make()
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    gossamer.replicate(model, optimizer)
    train(model, optimizer)
    model[0].requires_grad_(True)
    with pytest.raises(UsageError, match=r"'0.weight', '0.bias'.*unfrozen"):
        train(model, optimizer)


def test_a_model_that_is_converted() -> None:
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    gossamer.replicate(model, optimizer)
    model.double()
    with pytest.raises(UsageError, match=r"'0.weight' moved from torch.float32 on cpu to torch.float64"):
        optimizer.step()


def test_a_closed_replica_says_so() -> None:
    model = make()
    replica = gossamer.replicate(model, SGD(model.parameters(), lr=0.1))
    state = replica.state_dict()
    replica.close()
    for call in (replica.state_dict, lambda: replica.load_state_dict(state)):
        with pytest.raises(UsageError, match="closed"):
            call()


def test_a_step_without_a_backward() -> None:
    def body(rank: int) -> None:
        model = make()
        optimizer = SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer, AllReduce())
        train(model, optimizer)
        with pytest.raises(UsageError, match=f"rank {rank}.*step 3.*no backward pass"):
            optimizer.step()

    loopback(body, 2)


def gradient_pass(model: nn.Module, seed: int) -> None:
    model(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


COARSE = ScatterReduce(codec=Quantize(bits=2), residual="fp32")
KEEP_RESIDUALS = [
    ChunkSparse(chunk=2, density=0.2, residual="fp32"),
    PowerSGD(residual="fp32"),
    ScatterReduce(codec=Sign(), gather_below=0, residual="fp32"),
    Hierarchical(COARSE, inner=COARSE, ranks_per_node=2),
]


def two_passes_for_a_step(algorithm: gossamer.Algorithm, between: Callable[[SGD], None]) -> list[tuple[Tensor, ...]]:
    """Of each of three workers: by how much its weight has moved, the gradients of the first pass and of the second of every
    step, and what is unsent at the end. ``between``: what is done with the gradients after the first one."""

    def body(rank: int) -> tuple[Tensor, ...]:
        weight = nn.Parameter(torch.zeros(8, 8))
        model = nn.ParameterList([weight, nn.Parameter(torch.zeros(8, 8))])
        optimizer = SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        given = torch.zeros(2, 8, 8)
        for step in range(6):
            for number in range(2):
                factor = torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank))
                (weight * factor + model[1] * (step + 1)).sum().backward()
                given[number] += factor
                if number == 0:
                    between(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert replica._gradients is not None
        exchange = replica._gradients.exchange
        ((index, segment),) = [(b.index, s) for b in exchange.buckets for s in b.segments if s.name == "0"]
        unsent = exchange.handlers[index].hand_over(
            torch.zeros_like(exchange.buckets[index].flat), exchange.states[index], exchange.context(0)
        )
        return -weight.detach(), *given, segment.view(unsent).clone()

    return loopback(body, 3)


@pytest.mark.parametrize("algorithm", KEEP_RESIDUALS, ids=repr)
def test_gradients_that_are_thrown_away_leave_nothing_unsent(algorithm: gossamer.Algorithm) -> None:
    """Those of a generator that pass through the discriminator, or of a step that is left out."""
    found = two_passes_for_a_step(algorithm, SGD.zero_grad)
    moved, _, second, unsent = (torch.stack(each) for each in zip(*found, strict=True))
    torch.testing.assert_close(3 * moved[0] + unsent.sum(0), second.sum(0), atol=2e-3, rtol=1e-3)


def test_where_some_have_ended_nothing_is_undone() -> None:
    """A rank inside join() without batches has no pass to throw away; all must remember alike."""

    def body(rank: int) -> Tensor:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, ChunkSparse(chunk=2, density=0.5, momentum_correction=True))
        with replica.join():
            for step in range(2 if rank else 6):
                gradient_pass(model, 10 * step + rank)
                if rank == 0 and step == 4:  # left out: only this rank still trains
                    optimizer.zero_grad()
                    continue
                optimizer.step()
                optimizer.zero_grad()
        momenta = {
            name: tensor for name, tensor in replica.state_dict()[f"rank{rank}"][0]["momentum"].items() if "bias" in name
        }
        assert momenta
        return torch.cat([tensor.reshape(-1) for tensor in momenta.values()])

    first, second = loopback(body, 2)
    assert torch.equal(first, second)


def test_gradients_that_somebody_else_has_used_are_not_thrown_away() -> None:
    """An optimizer around the one that was given, or a loop that changes the weights by itself."""

    def used(optimizer: SGD) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.sub_(parameter.grad)
        optimizer.zero_grad()

    found = two_passes_for_a_step(KEEP_RESIDUALS[2], used)
    moved, first, second, unsent = (torch.stack(each) for each in zip(*found, strict=True))
    torch.testing.assert_close(3 * moved[0] + unsent.sum(0), (first + second).sum(0), atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("algorithm", KEEP_RESIDUALS, ids=repr)
def test_gradients_that_accumulate_are_sent_or_kept_in_full(algorithm: gossamer.Algorithm) -> None:
    """Both passes are exchanged: what the first one has kept back is sent with the second, or later."""
    found = two_passes_for_a_step(algorithm, lambda optimizer: None)
    moved, first, second, unsent = (torch.stack(each) for each in zip(*found, strict=True))
    torch.testing.assert_close(3 * moved[0] + unsent.sum(0), (first + second).sum(0), atol=2e-3, rtol=1e-3)


def test_a_hook_that_is_registered_later_says_nothing_and_is_called_first(caplog: pytest.LogCaptureFixture) -> None:
    """What it makes of gradients is averaged: tests/faults."""
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    gossamer.replicate(model, optimizer)
    seen: list[bool] = []
    model[3].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    train(model, optimizer)
    assert seen
    assert all(seen)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_buffers_of_a_model_that_is_not_called_itself_are_synchronised() -> None:
    def body(rank: int) -> list[float]:
        model = nn.ModuleList(make())
        optimizer = SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = torch.ones(5, 4) + rank
            for layer in model:
                hidden = layer(hidden)
            hidden.sum().backward()
            optimizer.step()
        return [value for buffer in model.buffers() for value in buffer.reshape(-1).tolist()]

    first, second = loopback(body, 2)
    assert first == second
    assert any(first)


def test_an_optimizer_whose_steps_nobody_takes_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Wrapper(SGD):
        def __init__(self, inner: SGD) -> None:
            super().__init__(inner.param_groups, lr=0.1)
            self.inner = inner

        def second_step(self) -> None:
            self.inner.step()

    model = make()
    optimizer = Wrapper(SGD(model.parameters(), lr=0.1))
    gossamer.replicate(model, optimizer, Gossip())
    for step in range(25):
        optimizer.zero_grad()
        gradient_pass(model, step)
        optimizer.second_step()
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "the weights have changed during 20 backward passes, but the optimizer given to replicate() took no step" in told


def test_many_passes_for_one_step_are_nothing_strange(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    gossamer.replicate(model, optimizer, Gossip())
    for _ in range(2):
        for step in range(30):
            gradient_pass(model, step)
        optimizer.step()
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_an_optimizer_inside_another_object_is_asked_for() -> None:
    class Prepared(torch.optim.Optimizer):
        """As accelerate's: an optimizer by its class, and not by its making."""

        def __init__(self, optimizer: SGD) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> Any:  # type: ignore[override]
            return self.optimizer.param_groups

    model = make()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"Prepared wraps an optimizer.*give the one inside it"):
        gossamer.replicate(model, Prepared(optimizer))
    gossamer.replicate(model, optimizer)


# -- the state ------------------------------------------------------------------------------------------------------


def test_a_state_that_does_not_fit() -> None:
    model = make()
    replica = gossamer.replicate(model, SGD(model.parameters(), lr=0.1))
    state = replica.state_dict()
    for wrong, match in (
        ({"format": 99}, "format"),
        ({"algorithm": "Gossip()"}, "Gossip"),
        ({"world": 8}, "saved by 8 ranks, this run has 1"),
        ({"plan": {"buckets": [["other"]], "learned": True}}, "other parameters"),
    ):
        with pytest.raises(ConfigurationError, match=match):
            replica.load_state_dict(state | wrong)
    for nothing in (None, "state", []):
        with pytest.raises(ConfigurationError, match="not a state of gossamer in format"):
            replica.load_state_dict(nothing)  # type: ignore[arg-type]
    del state["rank0"]
    with pytest.raises(ConfigurationError, match="no entry for rank 0"):
        replica.load_state_dict(state)


def test_a_state_of_other_optimizers_is_refused_and_changes_nothing() -> None:
    def body(rank: int) -> None:
        def made(halves: bool) -> gossamer.Replica:
            model = make()
            parts = [SGD(half.parameters(), lr=0.1) for half in (model[:2], model[2:])]
            optimizers: Any = parts if halves else SGD(model.parameters(), lr=0.1)
            replica = gossamer.replicate(model, optimizers, Gossip())
            gradient_pass(model, rank)
            for optimizer in parts if halves else [optimizers]:
                optimizer.step()
            return replica

        state, other = made(True).state_dict(), made(False)
        before = other.state_dict()
        with pytest.raises(ConfigurationError, match=r"is of 2 exchanges and this replica has 1 .*as many optimizers"):
            other.load_state_dict(state)
        after = other.state_dict()
        assert repr(before) == repr(after)

    loopback(body, 2)


def test_the_state_can_be_saved_without_pickling() -> None:
    import io

    def body(rank: int) -> None:
        model = make()
        optimizer = SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Gossip())
        train(model, optimizer)
        file = io.BytesIO()
        torch.save(replica.state_dict(), file)
        file.seek(0)
        replica.load_state_dict(torch.load(file, weights_only=True))

    loopback(body, 2)


def test_a_mesh_without_this_process() -> None:
    model = make()
    mesh = SimpleNamespace(ndim=1, get_group=lambda: [][0], get_coordinate=lambda: None)
    with pytest.raises(ConfigurationError, match="this process is not in"):
        gossamer.replicate(model, AdamW(model.parameters()), mesh=mesh)


def test_groups_have_names_of_their_own() -> None:
    store = Shelf()
    names = [instance_name(store, ranks, 1) for ranks in ((0, 1, 8, 9), (0, 4, 7, 9), (0, 1, 8, 9))]
    assert len(set(names)) == 3
    assert [instance_name(store, (0, 1, 8, 9), 2) for _ in range(2)] == [names[0], names[2]]
    assert instance_name(Shelf(), (0, 1, 8, 9), 1) == names[0], "another store, as of another process group, counts anew"


def test_what_cannot_be_replicated_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another algorithm may be tried then: the momentum is there, and no parameter counts as replicated."""

    def body(rank: int) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(8))])
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        model[0].grad = torch.ones(8)
        optimizer.step()
        sparse = ChunkSparse(momentum_correction=True)
        with pytest.raises(ConfigurationError, match="compresses matrices"):
            gossamer.replicate(model, optimizer, Hierarchical(sparse, inner=PowerSGD(), ranks_per_node=1))
        assert optimizer.param_groups[0]["momentum"] == 0.9
        monkeypatch.setattr(optimizer, "register_step_post_hook", out_of_memory)
        with pytest.raises(MemoryError):
            gossamer.replicate(model, optimizer, sparse)
        assert optimizer.param_groups[0]["momentum"] == 0.9
        assert torch.equal(optimizer.state[model[0]]["momentum_buffer"], torch.ones(8))
        monkeypatch.undo()
        gossamer.replicate(model, optimizer, sparse).close()

    def out_of_memory(hook: Any) -> None:
        raise MemoryError

    loopback(body, 1)


@pytest.mark.parametrize(
    ("script", "where"),
    [
        (lambda model: torch.jit.script(model), "''"),
        (lambda model: nn.Sequential(model, torch.jit.script(nn.ReLU())), "'1'"),
    ],
    ids=["whole", "a part without parameters"],
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:FutureWarning")  # of torch 2.14 on
def test_scripted_modules_are_refused_by_name(script: Callable[[nn.Module], nn.Module], where: str) -> None:
    model = script(nn.Linear(3, 2))
    with pytest.raises(ConfigurationError, match=f"module {where} is scripted .*as it was before torch.jit.script"):
        gossamer.replicate(model, SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=repr)
@pytest.mark.parametrize("around", [lambda kind, *given: kind(*given), MasterWeights], ids=["alone", "inside MasterWeights"])
def test_lbfgs_is_refused(algorithm: Algorithm, around: Callable[..., Optimizer]) -> None:
    model = nn.Linear(3, 2).bfloat16()
    with pytest.raises(ConfigurationError, match=r"LBFGS .* each rank's own loss"):
        gossamer.replicate(model, around(torch.optim.LBFGS, model.parameters()), algorithm)
    gossamer.replicate(model, SGD(model.parameters(), lr=0.1), algorithm).close()  # nothing is left of the refused one


# -- the average ----------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """A frozen base in 8 bits, and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.arange(256).to(torch.uint8), requires_grad=False)
        self.large = nn.Parameter(torch.tensor([2**30 + 7], dtype=torch.int32), requires_grad=False)
        self.weight = nn.Parameter(torch.zeros(3))


def test_frozen_integers_are_not_averaged() -> None:
    def body(rank: int) -> None:
        model = Packed()
        optimizer = SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Gossip())
        (model.weight * (rank + 1)).sum().backward()
        optimizer.step()
        replica.consensus_distance()
        with replica.consensus():
            assert model.packed.equal(torch.arange(256).to(torch.uint8))
        replica.close(average=True)
        assert model.packed.equal(torch.arange(256).to(torch.uint8))
        assert model.large.item() == 2**30 + 7

    loopback(body, 7)


def test_closing_inside_of_consensus_is_refused_because_it_would_be_undone() -> None:
    def body(rank: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        optimizer = SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, Gossip())
        (model.weight * rank).sum().backward()
        optimizer.step()
        with replica.consensus(), pytest.raises(UsageError, match="close the replica after that block"):
            replica.close(average=True)
        replica.close(average=True)
        return model.weight.item()

    weights = loopback(body, 2)
    assert weights[0] == weights[1]


def test_an_expanded_buffer_is_refused_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("pos", torch.arange(4).expand(3, -1))
    with pytest.raises(ConfigurationError, match=r"buffer '0\.pos' is expanded .*register it as pos\.clone\(\)"):
        gossamer.replicate(model, SGD(model.parameters(), lr=0.1), Gossip())


def test_a_sparse_buffer_is_refused_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("adjacency", torch.eye(3).to_sparse())
    with pytest.raises(ConfigurationError, match=r"buffer '0\.adjacency' is torch\.sparse_coo, and only dense ones"):
        gossamer.replicate(model, SGD(model.parameters(), lr=0.1))


def test_loading_into_other_weights_is_told() -> None:
    """``replicate()`` copies rank 0's weights to all ranks: a model that was loaded before it is not this rank's any more."""

    def made(loaded: Any = None) -> tuple[nn.Module, Any, gossamer.Replica]:
        model = make(0 if loaded is None else 1)
        if loaded is not None:
            model.load_state_dict(loaded)
        optimizer = SGD(model.parameters(), lr=0.1)
        return model, optimizer, gossamer.replicate(model, optimizer, Gossip())

    def saved(rank: int) -> Any:
        model, optimizer, replica = made()
        for _ in range(3):
            gradient_pass(model, rank)
            optimizer.step()
        found = copy.deepcopy((model.state_dict(), replica.state_dict()))
        replica.close()
        return found

    files = loopback(saved, 2)

    def resumed(rank: int) -> None:
        model, _, replica = made()
        model.load_state_dict(files[rank][0])
        replica.load_state_dict(files[rank][1])
        replica.close()

    def resumed_wrongly(rank: int) -> None:
        _, _, replica = made(files[rank][0])
        replica.load_state_dict(files[rank][1])
        replica.close()

    loopback(resumed, 2)
    with pytest.warns(UserWarning, match=r"rank 1: the model has not the weights .* then load the model") as told:
        loopback(resumed_wrongly, 2)
    assert len(told) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_replica_is_not_copied_and_says_what_is(copied) -> None:
    model = nn.Linear(2, 2)
    replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="copy or save the model"):
        copied(replica)
    replica.close()
