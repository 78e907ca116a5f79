"""Scenarios: torch.distributed.checkpoint of models that are in parts, on the same mesh and on others."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer
from gossamer import DiLoCo, Gossip, ScatterReduce, checkpoint
from processes.expect import raises
from processes.sharded import Sharded, flat, loss_of, reshard, stage_of, transformer
from processes.sharded import batch as words_of
from processes.worker import Here

Training = tuple[Sharded, torch.optim.Optimizer, gossamer.Replica]


def begun(here: Here, algorithm: Any, seed: int = 0) -> Training:
    parts = Sharded("fsdp", seed)
    optimizer = torch.optim.AdamW(parts.model.parameters(), lr=1e-2)
    return parts, optimizer, here.replicate(parts.model, optimizer, algorithm, mesh=parts.mesh["replicate"])


def train(parts: Sharded, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        parts.loss(step).backward()
        optimizer.step()


class Equal:
    """Model and optimizer as DCP takes them where they are equal on all replicas."""

    def __init__(self, parts: Sharded, optimizer: torch.optim.Optimizer) -> None:
        self._parts, self._optimizer = parts, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._parts.model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self._parts.model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)


def saved_and_loaded(here: Here, algorithm: Any, per_rank: bool, asynchronous: bool = False) -> None:
    """Three steps, saved, three more; loaded into new objects, three more: the same bits."""
    name = str(Path(here.folder) / f"{type(algorithm).__name__}-{per_rank}-{asynchronous}")

    def what(parts: Sharded, optimizer: torch.optim.Optimizer, replica: gossamer.Replica) -> dict[str, Any]:
        if per_rank:
            return {"run": checkpoint.PerRank(model=parts.model, optimizer=optimizer, replica=replica)}
        return {"equal": Equal(parts, optimizer), "replica": replica}

    parts, optimizer, replica = begun(here, algorithm)
    train(parts, optimizer, range(3))
    if asynchronous:
        pending: Any = dcp.async_save(what(parts, optimizer, replica), checkpoint_id=name)
        train(parts, optimizer, range(3, 6))  # what is saved must not follow
        pending.result()
    else:
        dcp.save(what(parts, optimizer, replica), checkpoint_id=name)
        train(parts, optimizer, range(3, 6))
    here.close()
    again, other, replica_again = begun(here, algorithm, seed=1)
    dcp.load(what(again, other, replica_again), checkpoint_id=name)
    assert replica_again.step == 3
    train(again, other, range(3, 6))
    here.close()
    assert torch.equal(parts.whole(), again.whole())


def residuals_beside_the_model(here: Here) -> None:
    saved_and_loaded(here, ScatterReduce(), per_rank=False)


def weights_of_every_rank(here: Here) -> None:
    saved_and_loaded(here, Gossip(), per_rank=True)
    saved_and_loaded(here, DiLoCo(every=2), per_rank=True)


def asynchronously(here: Here) -> None:
    saved_and_loaded(here, ScatterReduce(), per_rank=False, asynchronous=True)
    saved_and_loaded(here, Gossip(), per_rank=True, asynchronous=True)


def the_average_on_other_meshes(here: Here) -> None:
    """What two by two processes have saved of the average, four shards load, and one whole model."""
    name = str(Path(here.folder) / "average")
    parts, optimizer, replica = begun(here, Gossip())
    train(parts, optimizer, range(3))
    with raises(gossamer.UsageError, match="consensus"):
        dcp.save({"model": parts.model}, checkpoint_id=str(Path(here.folder) / "mixed"))
    with replica.consensus():
        average = parts.whole()
        dcp.save({"model": parts.model.state_dict()}, checkpoint_id=name)
    for sharded in (True, False):
        other = transformer(7)
        if sharded:
            fully_shard(other, mesh=init_device_mesh("cpu", (4,)))
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=name)
        other.load_state_dict(state["model"])
        reshard(other)
        assert torch.equal(flat(other), average)


def another_mesh_is_refused(here: Here) -> None:
    """A replica's own state is of the parts it was saved with."""
    parts, optimizer, replica = begun(here, ScatterReduce())
    train(parts, optimizer, range(2))
    state = replica.state_dict()
    here.close()
    whole = transformer()
    together = here.replicate(whole, torch.optim.SGD(whole.parameters(), lr=0.1), ScatterReduce())
    with raises(gossamer.ConfigurationError, match="another shape"):
        together.load_state_dict(state)


def stages_side_by_side(here: Here) -> None:
    """Of a pipeline's stages each has keys of its own; other numbers of replicas share out what was not sent."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pipe"))
    number = mesh.get_local_rank("pipe")
    name = str(Path(here.folder) / "stages")

    def made(seed: int) -> tuple[Any, Any, gossamer.Replica]:
        model = stage_of(transformer(seed), number)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = ScatterReduce(gather_below=0)
        return model, optimizer, here.replicate(model, optimizer, algorithm, mesh=mesh["replicate"], synchronize="step")

    def step(model: Any, optimizer: Any, count: int) -> None:
        x: Tensor = words_of(count, here.rank)
        outputs = model(x if number == 0 else torch.randn(3, 6, 10, dtype=torch.float64))
        (outputs.square().mean() if number == 0 else loss_of(outputs, x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, replica = made(0)
    step(model, optimizer, 0)
    own = replica.state_dict()
    dcp.save({"replica": replica}, checkpoint_id=name)
    here.close()
    _, _, again = made(1)
    dcp.load({"replica": again}, checkpoint_id=name)
    assert repr(again.state_dict()) == repr(own)


def the_page_on_checkpoints(here: Here) -> None:
    """Its blocks run, where the replicas are equal and where they are not."""
    text = (Path(gossamer.__file__).parents[2] / "docs" / "sharded.md").read_text()
    blocks = [block for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if "dcp.save" in block]
    for algorithm, block in zip((ScatterReduce(), Gossip()), blocks, strict=True):
        parts, optimizer, replica = begun(here, algorithm)
        train(parts, optimizer, range(2))
        place = f'checkpoint_id="{here.folder}/page-'
        names = {"dcp": dcp, "checkpoint": checkpoint, "get_state_dict": get_state_dict, "replica": replica}
        exec(block.replace('checkpoint_id="', place), names | {"model": parts.model, "optimizer": optimizer})
        here.close()
