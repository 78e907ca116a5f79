"""Forward overlap: late updates end with the same bits, whatever the loop does between the step and the next forward pass."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gossamer
from gossamer.algorithms import AllReduce, ChunkSparse, Gossip, Hierarchical, PowerSGD, ScatterReduce, after
from gossamer.comm.loopback import loopback
from gossamer.engine.launch import launch_order
from gossamer.errors import ConfigurationError, UsageError
from gossamer.optim import LAMB, MasterWeights

WORLD, STEPS, WIDTH = 2, 6, 12


class Net(nn.Module):
    """Tied weights, attention whose projection is never called, a parameter of its own, and a module that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.also_tied = nn.Linear(WIDTH, WIDTH)
        self.also_tied.weight = self.tied.weight
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.attention(x, x, x)[0] + self.tied(x)
        return self.also_tied(torch.relu(x)) * self.scale


LATE = 2
"""The first step whose update is late; alone there is no order to be found, which takes a step."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def lamb(parameters):
    return LAMB(parameters, lr=0.01)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(
    overlap: bool, algorithm, make=sgd, between=lambda *what: None, steps: int = STEPS, world: int = WORLD, half=False, passes=1
):
    """The weights and the losses of every rank; ``between(model, optimizer, replica, step)`` is called after each step.

    ``passes``: how many backward passes a step is made of; all but the last one inside ``no_sync()``.
    """

    def body(rank: int):
        torch.manual_seed(0)
        model = Net().bfloat16() if half else Net()
        optimizer = make(model.parameters())
        replica = gossamer.replicate(model, optimizer, algorithm, overlap_forward=overlap)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        losses = []
        for step in range(steps):
            loss = model(batch(rank, step).to(model.scale.dtype)).square().mean()
            losses.append(loss.item())
            optimizer.zero_grad()
            with replica.no_sync():
                for number in range(1, passes):
                    model(batch(rank, 1000 * number + step)).square().mean().backward()
            loss.backward()
            optimizer.step()
            assert (model.first.weight.grad is None) == (overlap and step >= (LATE if world > 1 else LATE - 1))
            schedule.step()
            between(model, optimizer, replica, step)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        replica.close()
        return weights, losses

    return loopback(body, world)


def same(some, others) -> None:
    for (weights, losses), (other_weights, other_losses) in zip(some, others, strict=True):
        assert losses == other_losses
        for name, tensor in weights.items():
            assert torch.equal(tensor, other_weights[name]), name


@pytest.mark.parametrize(
    "algorithm",
    [
        AllReduce(bucket_bytes=256),
        ChunkSparse(density=0.5, chunk=8, bucket_bytes=256),
        ChunkSparse(density=0.5, chunk=8, bucket_bytes=256, momentum_correction=True),
        Hierarchical(PowerSGD(bucket_bytes=256), ranks_per_node=2),
        after(4, ScatterReduce(bucket_bytes=256), before=PowerSGD(bucket_bytes=256)),
    ],
    ids=repr,
)
def test_gradients_add_up_inside_no_sync(algorithm) -> None:
    runs = [trained(overlap, algorithm, world=3, passes=3) for overlap in (False, True)]
    same(*runs)
    alone = trained(True, algorithm, world=3)
    assert not torch.equal(runs[0][0][0]["scale"], alone[0][0]["scale"]), "the first passes count"


@pytest.mark.parametrize("make", [sgd, adamw, lamb])
@pytest.mark.parametrize("world", [1, 3])
def test_late_updates_end_with_the_same_bits(make, world: int) -> None:
    runs = [trained(overlap, AllReduce(bucket_bytes=256), make, world=world) for overlap in (False, True)]
    same(*runs)


@pytest.mark.parametrize(
    "algorithm",
    [ScatterReduce(gather_below=0), ChunkSparse(chunk=8, density=0.5, warmup=0), PowerSGD()],
    ids=lambda a: type(a).__name__,
)
def test_what_is_remembered_is_the_same(algorithm) -> None:
    algorithm = algorithm.__class__(**{**algorithm.__dict__, "bucket_bytes": 256})
    same(trained(False, algorithm), trained(True, algorithm))


def looks(what: str):
    """What a loop may do between the step and the next forward pass."""

    def between(model, optimizer, replica, step: int) -> None:
        if step <= LATE:
            return
        if what == "evaluation":
            with torch.inference_mode():
                model.eval()(batch(0, 0))
            model.train()
        elif what == "state of the model":
            model.state_dict()
        elif what == "state of the optimizer":
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif what == "metrics":
            replica.metrics()
        elif what == "state of the replica":
            replica.load_state_dict(replica.state_dict())
        elif what == "copy":
            copy.deepcopy(model)(batch(0, 0))
        elif what == "accumulation":
            with replica.no_sync():
                model(batch(1, 1)).mean().backward()
            optimizer.zero_grad()

    return between


@pytest.mark.parametrize(
    "what",
    ["evaluation", "state of the model", "state of the optimizer", "metrics", "state of the replica", "copy", "accumulation"],
)
def test_a_reader_sees_the_update(what: str) -> None:
    algorithm = AllReduce(bucket_bytes=256)
    same(trained(False, algorithm, adamw, looks(what)), trained(True, algorithm, adamw, looks(what)))


def test_one_rank_alone_may_look() -> None:
    """Whatever a step ends with is communicated at the same place on all ranks, between the same other messages."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.net = nn.BatchNorm1d(3), Net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.norm(x))

    def body(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Normed()
        optimizer = sgd(model.parameters())
        algorithm = ChunkSparse(density=0.5, chunk=8, bucket_bytes=256)
        replica = gossamer.replicate(model, optimizer, algorithm, overlap_forward=True)
        for step in range(STEPS):
            loss = model(batch(rank, step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                model.state_dict()
                replica.metrics()
        replica.close()
        return dict(model.named_parameters())

    first, second = loopback(body, WORLD)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name]), name


def test_updates_wait_for_the_module_that_needs_them() -> None:
    def body(rank: int) -> list[list[str]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        optimizer = sgd(model.parameters())
        replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=1), overlap_forward=True)
        changed: list[list[str]] = []

        def note(module: nn.Module, inputs, output) -> None:
            changed.append([name for name, p in model.named_parameters() if not torch.equal(p, before[name])])

        for step in range(4):
            if step == 3:
                assert all(p.grad is None for p in model.parameters())
                before = {name: p.detach().clone() for name, p in model.named_parameters()}
                assert replica.metrics()["step"] == 3, "reading the counters completes nothing"
                for module in model:
                    module.register_forward_hook(note)
            loss = model(batch(rank, step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        replica.close()
        return changed

    layers = [["0.weight", "0.bias"], ["1.weight", "1.bias"], ["2.weight", "2.bias"]]
    assert loopback(body, WORLD) == [[layers[0], layers[0] + layers[1], layers[0] + layers[1] + layers[2]]] * WORLD


def loop(body, world: int = WORLD, make=sgd, algorithm=None, model=None):
    """Train STEPS steps in loopback; ``body(model, optimizer, replica, step)`` takes each."""

    def train(rank: int):
        torch.manual_seed(0)
        net = (model or Net)()
        optimizer = make(net)
        replica = gossamer.replicate(net, optimizer, algorithm or AllReduce(bucket_bytes=256), overlap_forward=True)
        for step in range(STEPS):
            optimizer.zero_grad()
            body(net, optimizer, replica, rank, step)
        replica.close()
        return net

    return loopback(train, world)


def net_sgd(model: nn.Module):
    return sgd(model.parameters())


@pytest.mark.parametrize("look", ["metrics", "state_dict"])
def test_a_reader_before_the_step_takes_nothing_away(look: str) -> None:
    def body(model, optimizer, replica, rank: int, step: int) -> None:
        model(batch(rank, step)).square().mean().backward()
        if rank == 0:
            replica.metrics() if look == "metrics" else model.state_dict()
        optimizer.step()

    first, second = loop(body, make=net_sgd)
    reference = trained(False, AllReduce(bucket_bytes=256), steps=1)
    assert not torch.equal(first.first.weight, reference[0][0]["first.weight"])
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_step_that_is_not_taken_is_an_error() -> None:
    def body(model, optimizer, replica, rank: int, step: int) -> None:
        model(batch(rank, step)).mean().backward()
        if step < STEPS - 2:
            optimizer.step()

    with pytest.raises(UsageError, match=r"optimizer\.step\(\) was not called"):
        loop(body, make=net_sgd)


def test_closed_before_the_step_gradients_are_left() -> None:
    def body(model, optimizer, replica, rank: int, step: int) -> None:
        model(batch(rank, step)).mean().backward()
        if step < STEPS - 1:
            optimizer.step()

    first, second = loop(body, make=net_sgd)
    assert first.first.weight.grad is not None
    assert torch.equal(first.first.weight.grad, second.first.weight.grad)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_hook_that_was_there_before_sees_the_new_weights() -> None:
    """Weight norm computes a weight in a hook that was there before."""

    def normed() -> nn.Module:
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))

    def body(model, optimizer, replica, rank: int, step: int) -> None:
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()

    first, second = loop(body, make=net_sgd, model=normed)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


class Encoder(nn.Module):
    """A parameter that autograd does not save, in a module that is called, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.net = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return self.net(x + self.position)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def test_a_parameter_that_is_used_behind_its_modules_back_is_an_error() -> None:
    def body(model, optimizer, replica, rank: int, step: int) -> None:
        outputs = model(batch(rank, step)) if step < STEPS - 1 else model.encode(batch(rank, step))
        outputs.square().mean().backward()
        optimizer.step()

    with pytest.raises(UsageError, match="'position' was used before its update"):
        loop(body, make=net_sgd, model=Encoder, algorithm=AllReduce(bucket_bytes=1))


def in_groups(parameters):
    """Float32 copies, and weights of matrices that decay apart from the others."""
    matrices, others = [], []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else others).append(parameter)
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return MasterWeights(torch.optim.AdamW, groups, lr=0.01)


def test_groups_of_which_a_bucket_has_nothing_stay() -> None:
    algorithm = AllReduce(bucket_bytes=1)
    same(trained(False, algorithm, in_groups, half=True), trained(True, algorithm, in_groups, half=True))


class Counting(torch.optim.SGD):
    """Keeps a number of its own in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_its_steps_in_its_groups_is_refused() -> None:
    def body(model, optimizer, replica, rank: int, step: int) -> None:
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()

    with pytest.raises(UsageError, match="writes 'count' into its parameter groups"):
        loop(body, make=lambda model: Counting(model.parameters(), lr=0.1))


def test_after_a_failure_everything_is_given_back() -> None:
    model = nn.Linear(WIDTH, 1)
    optimizer = sgd(model.parameters())
    replica = gossamer.replicate(model, optimizer, overlap_forward=True)
    for step in range(3):
        model(batch(0, step)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def broken(*args):
        raise RuntimeError("the network is gone")

    replica._runner.wait = broken
    with pytest.raises(RuntimeError, match="the network is gone"):
        replica.close()
    assert not model._forward_pre_hooks
    gossamer.replicate(model, optimizer).close()


def test_the_frontmost_of_those_that_are_there_goes_first() -> None:
    assert launch_order([0, 1, 2, 3], [10, 10, 10, 10], [3, 2, 1, 0]) == [0, 3, 2, 1]
    assert launch_order([0, 1, 2, 3], [0.1] * 4, [3, 2, 1, 0]) == [0, 1, 2, 3]
    assert launch_order([0, 1, 2, 3], [1.5] * 4, [3, 2, 1, 0]) == [0, 1, 3, 2]
    assert launch_order([], [], []) == []


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.integers(0, 5)), max_size=12))
def test_an_order_is_a_permutation(buckets) -> None:
    ready, seconds, needs = ([bucket[i] for bucket in buckets] for i in range(3))
    assert sorted(launch_order(ready, seconds, needs)) == list(range(len(buckets)))


def replicated(algorithm=None, optimizers=None, **options):
    model = nn.Linear(2, 2)
    return gossamer.replicate(model, optimizers(model) if optimizers else sgd(model.parameters()), algorithm, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"algorithm": Gossip()}, "moves weights"),
        ({"optimizers": lambda m: [sgd([m.weight]), sgd([m.bias])]}, "more than one optimizer"),
        ({"optimizers": lambda m: gossamer.optim.OneBitAdam(m.parameters())}, "communicates by itself"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "GradScaler"),
    ],
)
def test_what_needs_all_gradients_together_is_refused(options, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"overlap_forward=True cannot be used: .*{said}"):
        replicated(**options, overlap_forward=True)


def test_parameters_that_share_their_memory_are_refused() -> None:
    """Between their updates, a module would compute with half of what both bring."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ConfigurationError, match=r"parameters '0\.weight' and '1\.weight' share their memory"):
        gossamer.replicate(model, sgd(model.parameters()), overlap_forward=True)


def test_join_is_refused() -> None:
    replica = replicated(overlap_forward=True)
    with pytest.raises(UsageError, match="overlap_forward"), replica.join():
        pass
    replica.close()


def test_short_buckets_overtake_in_one_message_from_each_after_loading_too() -> None:
    """What is needed soon does not go around a ring behind longer buckets; and a resumed run sums in the same order."""

    def sizes(replica: gossamer.Replica) -> set[bool]:
        assert replica._gradients is not None
        return {replica._gradients.exchange.context(0).overtakes}

    def body(rank: int) -> list[set[bool]]:
        torch.manual_seed(0)
        found, saved = [], None
        for count in (STEPS, 0):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            optimizer = sgd(model.parameters())
            replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=1), overlap_forward=True)
            found.append(sizes(replica))
            if saved is not None:
                replica.load_state_dict(saved)  # the plan is adopted anew
            for step in range(count):
                optimizer.zero_grad()
                model(batch(rank, step)).square().mean().backward()
                optimizer.step()
            found.append(sizes(replica))
            saved = replica.state_dict()
            replica.close()
        return found

    assert loopback(body, WORLD) == [[{True}] * 4] * WORLD


def test_a_model_that_was_compiled_in_place_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.compile()
    with pytest.raises(ConfigurationError, match="give the model as it is, uncompiled"):
        gossamer.replicate(model, sgd(model.parameters()), overlap_forward=True)


class Mixed(nn.Module):
    """A body in bfloat16, of which a part is left out in every second step, and a head in float32, which has no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.branch = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        x = self.body(x.bfloat16())
        out: Tensor = self.head((self.branch(x) if branch else x).float())
        return out


def test_master_weights_update_no_parameter_with_a_gradient_that_is_not_averaged() -> None:
    """The update of a part that was left out is taken when backward has begun, and the head has its next gradient."""

    def trained(overlap_forward: bool) -> list[Tensor]:
        def body(rank: int) -> Tensor:
            torch.manual_seed(0)
            model = Mixed()
            optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.01)
            replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=32), overlap_forward=overlap_forward)
            for step in range(8):
                optimizer.zero_grad()
                model(batch(rank, step), step % 2 == 0).square().mean().backward()
                optimizer.step()
            replica.close()
            return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])

        return loopback(body, WORLD)

    expected = trained(False)[0]
    assert all(torch.equal(found, expected) for found in trained(True))
