"""ChunkSparse: the same chunks everywhere, nothing lost, few bytes; momentum correction; bad input."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gossamer
from contracts.cases import exchange, noise, own_runner, same_bits, weights
from gossamer import AllReduce, ChunkSparse, PowerSGD, loopback
from gossamer.algorithms import Algorithm
from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.chunks import Chosen, evenly, fitting, mask_of_largest
from gossamer.algorithms.chunk_sparse import CHOSEN, NORMS
from gossamer.codecs import Cast, ErrorFeedback, Quantize
from gossamer.errors import ConfigurationError, UsageError
from gossamer.state import State

FP32 = Cast(wire="fp32")


class Wide(nn.Module):
    """One matrix of 64 thousand weights, whose gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256, 256))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def gradient(step: int, rank: int) -> Tensor:
    source = torch.Generator().manual_seed(100 * step + rank)
    scale = torch.logspace(0, -3, 256).unsqueeze(1)
    return torch.randn(256, 256, generator=source) * scale


def train(algorithm: Algorithm, world: int, steps: int, momentum: float = 0.0) -> list[tuple[Tensor, list[float]]]:
    def body(rank: int) -> tuple[Tensor, list[float]]:
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)
        replica = gossamer.replicate(model, optimizer, algorithm)
        sent = []
        for step in range(steps):
            optimizer.zero_grad()
            model(gradient(step, rank)).backward()
            optimizer.step()
            sent.append(replica.metrics()["bytes_sent"])
        replica.close()
        assert optimizer.param_groups[0]["momentum"] == momentum
        return weights(model), sent

    return loopback(body, world)


def test_a_tenth_of_the_chunks_in_half_precision_is_six_percent_of_the_bytes() -> None:
    """Norms and the small agreements of every step included."""
    sparse, dense = train(ChunkSparse(chunk=512), 4, 8)[0][1], train(AllReduce(), 4, 8)[0][1]
    assert (sparse[-1] - sparse[1]) / (dense[-1] - dense[1]) < 0.06


def test_what_is_not_sent_comes_later() -> None:
    """After steps without gradient, everything has arrived: the weights are those of exact all-reduce."""
    world, steps = 3, 5

    def body(rank: int) -> Tensor:
        model = Wide()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, ChunkSparse(chunk=512, codec=FP32, residual="fp32"))
        for step in range(steps + 30):
            optimizer.zero_grad()
            model(gradient(step, rank) if step < steps else torch.zeros(256, 256)).backward()
            optimizer.step()
        replica.close()
        return model.weight.detach()

    late = loopback(body, world)
    exact = -sum(gradient(step, rank) for step in range(steps) for rank in range(world)) / world
    assert all(same_bits(each, late[0]) for each in late)
    assert (late[0] - exact).abs().max() < 1e-5


@pytest.mark.parametrize("codec", [Cast(wire="fp16"), Quantize()], ids=repr)
def test_rounding_is_kept_too(codec: Any) -> None:
    inputs = [noise(4, 1000, seed=step) for step in range(5)]
    outcomes = exchange(ChunkSparse(chunk=64, codec=codec, residual="fp32"), inputs)
    had = torch.stack([torch.stack(tensors).double().sum(0) for tensors in inputs]).sum(0)
    sent = 4 * torch.stack([result.double() for result in outcomes[0].results]).sum(0)
    kept = torch.stack([outcome.state["residual"].double() for outcome in outcomes]).sum(0)
    # What the sum on the wire itself rounds (fp16 adds in fp16) is nobody's to keep.
    assert (sent + kept - had).abs().max() < (2e-2 if isinstance(codec, Cast) else 1e-4)


@pytest.mark.parametrize("world", [1, 3])
def test_momentum_correction_at_full_density_is_sgd_with_momentum(world: int) -> None:
    corrected = train(ChunkSparse(density=1.0, codec=FP32, momentum_correction=True, chunk=512), world, 12, momentum=0.9)
    plain = train(AllReduce(), world, 12, momentum=0.9)
    assert (corrected[0][0] - plain[0][0]).abs().max() < 1e-4 * plain[0][0].abs().max()


class Usual(nn.Module):
    """Matrices, biases and the scales of a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)


def learn(algorithm: Algorithm, world: int, stop: int = 12, rest: int = 0, **options: Any) -> list[Tensor]:
    """``rest``: steps with what was saved after ``stop``, in new objects."""

    def made(rank: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, gossamer.Replica]:
        torch.manual_seed(seed)
        model = Usual()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        return model, optimizer, gossamer.replicate(model, optimizer, algorithm)

    def body(rank: int) -> Tensor:
        objects = made(rank, 0)
        for step in range(stop + rest):
            if rest and step == stop:
                saved = copy.deepcopy([each.state_dict() for each in objects])
                objects[2].close()
                objects = made(rank, 1)
                for each, state in zip(objects, saved, strict=True):
                    each.load_state_dict(state)
            model, optimizer, _ = objects
            optimizer.zero_grad()
            model.layers(noise(1, 96, seed=10 * step + rank)[0].view(8, 12)).square().mean().backward()
            optimizer.step()
        objects[2].close()
        assert {name: objects[1].param_groups[0][name] for name in options} == options
        return weights(objects[0])

    return loopback(body, world)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("world", [1, 3])
def test_momentum_correction_reaches_biases_and_weight_decay(world: int, decay: float) -> None:
    """At full density all of it is SGD with momentum, whatever the parameters are."""
    options = {"momentum": 0.9, "weight_decay": decay}
    everything = ChunkSparse(density=1.0, chunk=64, codec=FP32, momentum_correction=True)
    corrected, plain = (learn(algorithm, world, **options) for algorithm in (everything, AllReduce()))
    assert all(same_bits(each, corrected[0]) for each in corrected)
    assert (corrected[0] - plain[0]).abs().max() < 1e-5


def test_momentum_correction_resumes_bit_identically() -> None:
    options = {"momentum": 0.9, "weight_decay": 0.1}
    algorithm = ChunkSparse(density=0.3, chunk=64, momentum_correction=True)
    through, resumed = (learn(algorithm, 3, stop, rest, **options) for stop, rest in ((12, 0), (7, 5)))
    assert all(same_bits(a, b) for a, b in zip(through, resumed, strict=True))


def test_momentum_correction_gives_the_momentum_back_and_resumes() -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    replica = gossamer.replicate(model, optimizer, ChunkSparse(momentum_correction=True))
    assert optimizer.param_groups[0]["momentum"] == 0
    saved = optimizer.state_dict()
    replica.close()
    assert optimizer.param_groups[0]["momentum"] == 0.9
    optimizer.load_state_dict(saved)
    replica = gossamer.replicate(model, optimizer, ChunkSparse(momentum_correction=True))
    assert replica.algorithm.momentum == 0.9
    replica.close()


@pytest.mark.parametrize("world", [1, 3])
def test_momentum_correction_leaves_alone_what_nobody_uses(world: int) -> None:
    """As SGD does: u waits, and nothing of it is sent, or unsent, meanwhile. At density 1 all is SGD with momentum."""

    def body(rank: int, algorithm: Algorithm) -> Tensor:
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("always", "sometimes")})
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(12):
            optimizer.zero_grad()
            used = ["always"] if 3 <= step < 9 else ["always", "sometimes"]
            sum(model[name](noise(1, 32, seed=10 * step + rank)[0].view(4, 8)).sum() for name in used).backward()
            optimizer.step()
        replica.close()
        return weights(model)

    everything = ChunkSparse(density=1.0, chunk=16, codec=FP32, momentum_correction=True, residual="fp32")
    corrected, plain = (loopback(lambda rank, a=a: body(rank, a), world)[0] for a in (everything, AllReduce()))
    torch.testing.assert_close(corrected, plain, rtol=1e-5, atol=1e-6)


def test_the_density_falls() -> None:
    schedule = ChunkSparse(density=0.01, warmup=3, ramp=4)
    assert [schedule.density_at(step) for step in (0, 2, 3, 5, 7, 100)] == pytest.approx([1, 1, 1, 0.1, 0.01, 0.01])


def test_chunks_are_packed_and_unpacked() -> None:
    flat = torch.arange(1.0, 11.0)
    chosen = Chosen.of(flat, 3, torch.tensor([0, 3]))
    packed = chosen.pack(flat)
    assert packed.tolist() == [1, 2, 3, 10, 0, 0]
    chosen.unpack(-packed, flat)
    assert flat.tolist() == [-1, -2, -3, 4, 5, 6, 7, 8, 9, -10]
    assert evenly(10, 3).sum() == 3
    assert mask_of_largest(torch.tensor([1.0, 5.0, float("nan"), 5.0]), 2).tolist() == [False, True, True, False]


class Copies(TorchDispatchMode):
    """Counts the copies of a tensor on the host to where there are no values."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_meta:
            self.count += any(isinstance(each, Tensor) and each.device.type == "cpu" for each in args)
        return result


@pytest.mark.parametrize("numel", [1000, 1024])
def test_what_is_chosen_is_copied_to_a_device_once(numel: int) -> None:
    flat = torch.empty(numel, device="meta")
    with Copies() as copies:
        chosen = Chosen.of(flat, 64, torch.tensor([0, 7, 15]))
        assert copies.count == 1
        packed = chosen.pack(flat)
        chosen.unpack(packed, flat)
        assert copies.count == 1
    assert packed.shape == (192,)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("world", range(2, 13))
def test_whatever_all_workers_have_fits_into_the_sum(wire: Any, world: int) -> None:
    """Also where what is left of the wire's range for each of them is rounded up, and then their sum."""
    for most in (torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max):
        tensors = [[torch.full((64,), most)] * world]
        for outcome in exchange(ChunkSparse(chunk=16, codec=Cast(wire=wire)), tensors):
            assert outcome.results[0].isfinite().all()
            assert (outcome.results[0].sign() * most > 0).all()
            assert outcome.state["residual"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("world", [*range(1, 13), 100, 1000])
def test_shares_fit_into_a_sum_that_is_rounded_at_every_worker(dtype: torch.dtype, world: int) -> None:
    share = fitting(torch.full((1,), torch.finfo(torch.float64).max, dtype=torch.float64), dtype, world).to(dtype)
    total = torch.zeros(1, dtype=dtype)
    for _ in range(world):
        total += share
    assert total.isfinite()
    assert total > torch.finfo(dtype).max * 0.9 or world > 12


def test_the_density_is_rounded_as_that_of_the_sparse_codecs() -> None:
    """Up, but not by accident: 0.07 of 100 chunks are 7."""

    def body(rank: int) -> Tensor | None:
        runner, state = own_runner(), State(torch.zeros(1600))
        state.set_extra(NORMS, torch.arange(100.0))
        ctx = Context(5, runner.rank, runner.members)
        runner.run(lambda: ChunkSparse(density=0.07, chunk=16).finish([], [state], State(torch.zeros(1)), ctx), "a choice")
        return state.extra(CHOSEN)

    for mask in loopback(body, 2):
        assert mask is not None
        assert mask.nonzero().flatten().tolist() == list(range(93, 100))


@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan"), "0.1", None, True])
def test_a_density_is_a_share(density: float) -> None:
    with pytest.raises(ConfigurationError, match="density must be above 0 and at most 1"):
        ChunkSparse(density=density)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codec": "int8"}, "codec must be a codec"),
        ({"codec": ErrorFeedback(Quantize())}, "give the codec alone"),
        ({"warmup": -1}, "numbers of steps"),
        ({"ramp": "3"}, "numbers of steps"),
        ({"warmup": 1.5}, "numbers of steps"),
        ({"momentum": 0.9}, "momentum is the optimizer's"),
        ({"momentum": 0.9, "momentum_correction": True}, "momentum is the optimizer's"),
        ({"chunk": 2.0}, "positive number of elements"),
        ({"residual": "fp8"}, "residual must be one of"),
    ],
)
def test_bad_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ChunkSparse(**fields)


def test_other_bad_input() -> None:
    with pytest.raises(ConfigurationError, match="larger than a bucket"):
        ChunkSparse(chunk=2**20)
    with pytest.raises(ConfigurationError, match="positive number of elements"):
        ChunkSparse(chunk=0)
    model = Wide()
    with pytest.raises(ConfigurationError, match="not the moments of Adam"):
        gossamer.replicate(model, torch.optim.Adam(model.parameters()), ChunkSparse(momentum_correction=True))
    with pytest.raises(ConfigurationError, match="one momentum above 0"):
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0), ChunkSparse(momentum_correction=True))


def test_power_sgd_wants_matrices() -> None:
    vector = nn.ParameterList([torch.zeros(1000)])
    with pytest.raises(ConfigurationError, match="compresses matrices, and this model has none"):
        gossamer.replicate(vector, torch.optim.SGD(vector.parameters(), lr=1.0), PowerSGD())
    with pytest.raises(ConfigurationError, match="rank must be a positive number"):
        PowerSGD(rank=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("residual", ["fp32", "fp16"])
def test_what_is_not_finite_and_not_sent_stays_one_workers_affair(momentum: float, bad: float, residual: Any) -> None:
    """Otherwise that worker would forget the choice of the next chunks, and send others than the rest."""

    def body(rank: int) -> Tensor:
        model = nn.Linear(32, 32, bias=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        algorithm = ChunkSparse(density=0.1, chunk=32, momentum_correction=momentum > 0, residual=residual)
        replica = gossamer.replicate(model, optimizer, algorithm)
        generator = torch.Generator().manual_seed(rank)
        for number in range(12):
            optimizer.zero_grad()
            gradient = torch.randn(32, 32, generator=generator)
            gradient[:4] += 100  # these are the chunks that are chosen
            if rank == 1 and number == 4:
                gradient[31, 5] = bad
                if residual == "fp16":
                    gradient[30, 5] = 1e6  # finite, and too large for the residual
            ((model.weight * gradient).sum() + model.bias.sum()).backward()
            optimizer.step()
        assert replica.metrics()["residual_norm"] > 0
        return torch.cat([model.weight.detach().flatten(), model.bias.detach()])

    found = loopback(body, 3)
    assert found[0].isfinite().all()
    assert all(torch.equal(found[0], other) for other in found)


def test_momentum_correction_refuses_gradients_that_have_it_already() -> None:
    done = []

    def body(rank: int) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, ChunkSparse(chunk=4, momentum_correction=True))
        for _ in range(2):
            optimizer.zero_grad()
            with replica.no_sync():
                model(torch.ones(1, 4)).sum().backward()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        for set_to_none in (True, False):  # steps that were skipped, after an overflow
            optimizer.zero_grad(set_to_none)
            model(torch.ones(1, 4)).sum().backward()
        optimizer.zero_grad()
        with replica.no_sync():  # and one after which gradients are accumulated
            model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4)).sum().backward()
        done.append(rank)
        model(torch.ones(1, 4)).sum().backward()

    with pytest.raises(UsageError, match="without an optimizer's step"):
        loopback(body, 2)
    assert sorted(done) == [0, 1]


def test_momentum_that_a_loaded_state_brings_back_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = optimizer.state_dict()
    before["param_groups"][0]["momentum"] = 0.8
    gossamer.replicate(model, optimizer, ChunkSparse(chunk=4, momentum_correction=True))
    optimizer.load_state_dict(before)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ConfigurationError, match=r"before gossamer\.replicate"):
        optimizer.step()


def test_an_old_velocity_does_not_come_back_with_the_momentum() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    replica = gossamer.replicate(model, optimizer, ChunkSparse(chunk=4, momentum_correction=True))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    replica.close()
    weights_before = model.weight.detach().clone()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert torch.equal(model.weight, weights_before)
