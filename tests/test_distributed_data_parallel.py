"""The class in DDP's form, as scripts and frameworks look at it; in memory."""

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, ConfigurationError, Gossip, UsageError, loopback

TORCH = nn.parallel.DistributedDataParallel


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def made(algorithm: Any = None, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gossamer.DistributedDataParallel(model, optimizer, algorithm, **options), optimizer


def test_it_is_torchs_class_and_keeps_its_names() -> None:
    model, _ = made()
    assert isinstance(model, TORCH)
    assert list(model.state_dict()) == [f"module.{name}" for name in model.module.state_dict()]
    model.load_state_dict({name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()})
    assert model.module[0].weight.eq(1).all()
    assert model.broadcast_buffers is True
    assert model.device == torch.device("cpu")
    assert model.device_ids is None
    assert not model.find_unused_parameters
    assert not hasattr(model, "reducer")
    assert "DistributedDataParallel" in repr(model)


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()])
def test_it_trains_as_replicate_does(algorithm: gossamer.Algorithm) -> None:
    def train(rank: int, wrapped: bool) -> Tensor:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        called: nn.Module = model
        if wrapped:
            called = gossamer.DistributedDataParallel(model, optimizer, algorithm)
            replica = called.replica
        else:
            replica = gossamer.replicate(model, optimizer, algorithm)
        assert replica is not None
        for step in range(4):
            optimizer.zero_grad()
            called(torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))).sum().backward()
            optimizer.step()
        replica.close(average=True)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    for plain, wrapped in zip(*(loopback(lambda rank, each=each: train(rank, each), 2) for each in (False, True)), strict=True):
        assert torch.equal(plain, wrapped)


def test_both_ways_of_accumulating_are_honoured() -> None:
    def body(_: int) -> None:
        model, _ = made()
        replica = model.replica
        for way in ("no_sync", "attribute", "nested"):
            before = replica.step
            if way == "attribute":
                model.require_backward_grad_sync = False
                model(torch.ones(2, 4)).sum().backward()
                model.require_backward_grad_sync = True
            else:
                with model.no_sync():
                    if way == "nested":
                        with model.no_sync():
                            model(torch.ones(2, 4)).sum().backward()
                        assert not model.require_backward_grad_sync
                    model(torch.ones(2, 4)).sum().backward()
            assert replica.step == before
            assert model.require_backward_grad_sync
            model(torch.ones(2, 4)).sum().backward()
            assert replica.step == before + 1
        replica.close()

    loopback(body, 2)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_trains_alone(how: str) -> None:
    def body(rank: int) -> None:
        model, _ = made()
        if how == "deepcopy":
            alone = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            alone = torch.load(file, weights_only=False)
        assert isinstance(alone, TORCH)
        assert alone.replica is None
        if rank == 0:  # alone: the other rank does not take part
            with alone.no_sync(), alone.join():
                alone(torch.ones(2, 4)).sum().backward()
            alone(torch.ones(2, 4)).sum().backward()
        assert list(alone.state_dict()) == list(model.state_dict())
        assert all(p.grad is None for p in model.parameters())
        model.replica.close()

    loopback(body, 2)


def test_an_average_of_weights_takes_it_as_it_takes_ddp() -> None:
    model, optimizer = made()
    average = torch.optim.swa_utils.AveragedModel(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    average.update_parameters(model)
    assert torch.equal(average.module.module[0].weight, model.module[0].weight)


def test_it_joins_and_refuses_what_has_no_counterpart() -> None:
    model, optimizer = made()
    with model.join(enable=False), model.join():
        model(torch.ones(2, 4)).sum().backward()
    for call in (
        lambda: model.register_comm_hook(None, lambda state, bucket: None),
        lambda: model.join_hook(),
        lambda: model._register_fused_optim(torch.optim.SGD, 0.1),
        lambda: model._register_builtin_comm_hook(None),
        lambda: model._register_buffer_comm_hook(None, print),
    ):
        with pytest.raises(UsageError):
            call()
    with pytest.raises(ConfigurationError, match="wrapped in DistributedDataParallel"):
        gossamer.replicate(model, optimizer)


def test_arguments_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigurationError, match="device_ids takes the one device"):
        made(device_ids=[0])
    with pytest.raises(ConfigurationError, match="ask for different things"):
        made(broadcast_buffers=False, buffers="average")
    model = net()
    with pytest.raises(ConfigurationError, match=r"Optimizer or a sequence"):
        gossamer.DistributedDataParallel(model, [0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert gossamer.DistributedDataParallel(model, optimizer, broadcast_buffers=False).broadcast_buffers is False


def test_arguments_of_ddp_need_not_be_taken_out_of_a_call() -> None:
    model, _ = made(find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=25)
    model._set_static_graph()
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_the_forward_pass_decides_whether_its_backward_pass_is_synchronised(inside: str) -> None:
    """As in DDP: a forward pass inside no_sync() accumulates locally, wherever backward runs, and one outside exchanges."""

    def body(_: int) -> None:
        model, _ = made()
        inputs, before = torch.ones(2, 4), model.replica.step
        if inside == "forward":
            with model.no_sync():
                loss = model(inputs).sum()
            loss.backward()
            assert model.replica.step == before
            loss = model(inputs).sum()
            loss.backward()
        else:
            loss = model(inputs).sum()
            with model.no_sync():
                loss.backward()
        assert model.replica.step == before + 1
        model.replica.close()

    loopback(body, 2)


def test_a_backward_pass_may_be_synchronised_after_its_forward_pass_was_not() -> None:
    def body(_: int) -> None:
        model, _ = made()
        with model.no_sync():
            loss = model(torch.ones(2, 4)).sum()
        model.synchronize_next_backward()
        loss.backward()
        assert model.replica.step == 1
        model.replica.close()

    loopback(body, 2)


def test_every_argument_of_ddp_is_taken_or_refused_by_name() -> None:
    own = set(inspect.signature(TORCH.__init__).parameters) - {"self", "module"}
    no_effect = {"dim": 0, "init_sync": True, "check_reduction": False, "bucket_cap_mb": 25}
    for name in sorted(own):
        try:
            made(**{name: no_effect.get(name)})
        except TypeError as error:
            raise AssertionError(f"{name} is no argument") from error
    made(forward_sync_buffers=True, **no_effect)
    with pytest.raises(ConfigurationError, match="mixed_precision has no counterpart"):
        made(mixed_precision=object())
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_cap_kb'"):
        made(bucket_cap_kb=1)


def test_a_wrapper_leaves_the_model_to_another_as_ddp_does() -> None:
    model, optimizer = made()
    model._remove_autograd_hooks()
    again = gossamer.DistributedDataParallel(model.module, optimizer)
    again(torch.ones(2, 4)).sum().backward()
    assert again.replica.step == 1
    again.replica.close()
