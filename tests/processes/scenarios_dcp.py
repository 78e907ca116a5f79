"""Scenarios: torch.distributed.checkpoint, which takes tensors of one name to be the same on all ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, ChunkSparse, Gossip, ScatterReduce, after, checkpoint
from processes.expect import raises
from processes.worker import Here

Training = tuple[nn.Module, torch.optim.Optimizer, gossamer.Replica]


def training(here: Here, algorithm: gossamer.Algorithm, seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, here.replicate(model, optimizer, algorithm)


def steps(here: Here, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * number + here.rank))
        model(inputs).square().mean().backward()
        optimizer.step()


def values(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in model.state_dict().values()])


def folder(here: Here, name: str) -> str:
    """One that all ranks of this launch share."""
    return str(Path(here.folder) / name)


def saved_and_loaded(here: Here, algorithm: gossamer.Algorithm, alone: bool, asynchronous: bool = False) -> None:
    """Three steps, saved, three more; loaded into new objects, three more: the same bits. ``alone``: the replica itself is
    given to DCP beside the model and the optimizer, which are equal on all ranks; else all of it in one ``PerRank``."""
    name = folder(here, f"{type(algorithm).__name__}-{alone}-{asynchronous}")

    def parts(model: nn.Module, optimizer: torch.optim.Optimizer, replica: gossamer.Replica) -> dict[str, Any]:
        if not alone:
            return {"run": checkpoint.PerRank(model=model, optimizer=optimizer, replica=replica)}
        return {"replica": replica}

    model, optimizer, replica = training(here, algorithm)
    steps(here, model, optimizer, range(3))
    local = {"model": model.state_dict(), "optimizer": optimizer.state_dict()} if alone else {}
    local = {key: {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()} for key, state in local.items()}
    momenta = {p: state["momentum_buffer"].clone() for p, state in optimizer.state.items()}
    if asynchronous:
        pending: Any = dcp.async_save(parts(model, optimizer, replica), checkpoint_id=name)
        steps(here, model, optimizer, range(3, 6))  # what is saved must not follow
        pending.result()
    else:
        dcp.save(parts(model, optimizer, replica), checkpoint_id=name)
        steps(here, model, optimizer, range(3, 6))
    here.close()

    again, other, replica_again = training(here, algorithm, seed=1)
    if alone:
        again.load_state_dict(local["model"])
        for p, before in zip(other.param_groups[0]["params"], momenta.values(), strict=True):
            other.state[p]["momentum_buffer"] = before
    dcp.load(parts(again, other, replica_again), checkpoint_id=name)
    assert replica_again.step == 3
    steps(here, again, other, range(3, 6))
    here.close()
    assert torch.equal(values(model), values(again))


def residuals(here: Here) -> None:
    """What was not sent yet, different on every rank; a new replica has none that could be filled."""
    saved_and_loaded(here, ScatterReduce(), alone=True)


def chosen_chunks(here: Here) -> None:
    saved_and_loaded(here, ChunkSparse(density=0.3, chunk=16), alone=True)


def a_change_of_algorithms(here: Here) -> None:
    saved_and_loaded(here, after(4, AllReduce(), before=ScatterReduce()), alone=True)


def weights_of_every_rank(here: Here) -> None:
    saved_and_loaded(here, Gossip(), alone=False)


def residuals_with_the_rest(here: Here) -> None:
    saved_and_loaded(here, ScatterReduce(), alone=False)


def asynchronously(here: Here) -> None:
    saved_and_loaded(here, ScatterReduce(), alone=True, asynchronous=True)
    saved_and_loaded(here, Gossip(), alone=False, asynchronous=True)


def keys(here: Here) -> None:
    """Whatever differs from rank to rank has a key with its rank; under all other keys all ranks have the same."""
    for algorithm in (ScatterReduce(), Gossip(), after(9, Gossip(), before=ScatterReduce())):
        model, optimizer, replica = training(here, algorithm)
        steps(here, model, optimizer, range(3))
        state = replica.state_dict()
        assert f"rank{here.rank}" in state
        shared = {key: value for key, value in state.items() if key != f"rank{here.rank}"}
        assert not any(key.startswith("rank") for key in shared)
        everyone: list[Any] = [None] * here.world
        dist.all_gather_object(everyone, repr(shared))
        assert everyone == [everyone[0]] * here.world
        here.close()


def consensus_may_be_saved(here: Here) -> None:
    """Inside, all ranks hold the same model."""
    name = folder(here, "consensus")
    model, optimizer, replica = training(here, Gossip())
    steps(here, model, optimizer, range(3))
    with replica.consensus():
        mean = values(model)
        dcp.save({"model": model}, checkpoint_id=name)
    here.close()
    other, _, _ = training(here, Gossip(), seed=1)
    dcp.load({"model": other}, checkpoint_id=name)
    assert torch.equal(values(other), mean)


def another_number_of_ranks(here: Here) -> None:
    """Refused with the reason, not half loaded."""
    name = folder(here, "world")
    model, optimizer, replica = training(here, ScatterReduce())
    steps(here, model, optimizer, range(2))
    state = replica.state_dict() | {"world": here.world + 1}
    with raises(gossamer.ConfigurationError, match="saved by 4 ranks, this run has 3"):
        replica.load_state_dict(state)
    dcp.save({"replica": replica}, checkpoint_id=name)


def mixing(here: Here) -> None:
    """A model whose weights differ between ranks is refused, however it is given to DCP, and training goes on."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model, optimizer, replica = training(here, Gossip())
    steps(here, model, optimizer, range(2))
    forms = [lambda: model, model.state_dict, lambda: get_model_state_dict(model), lambda: {"inner": model.state_dict()}]
    for number, form in enumerate(forms):
        for save in (dcp.save, dcp.async_save):
            with raises(gossamer.UsageError, match=r"rank \d: .*'0.weight'.*consensus\(\).*PerRank"):
                save({"model": form()}, checkpoint_id=folder(here, f"mixed-{number}"))
    steps(here, model, optimizer, range(2, 4))
    replica.close(average=True)
    dcp.save({"model": model}, checkpoint_id=folder(here, "closed"))
    of_gradients, optimizer, _ = training(here, ScatterReduce())
    steps(here, of_gradients, optimizer, range(2))
    dcp.save({"model": of_gradients}, checkpoint_id=folder(here, "equal"))
