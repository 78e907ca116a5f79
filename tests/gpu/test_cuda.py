"""On a real GPU (``make test-gpu``): steps that never wait on the host, streams, staged Gloo, and NCCL where there are two."""

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer
from contracts.cases import exchange, noise
from echo import EchoRunner
from gossamer import QSGD, AllReduce, ChunkSparse, Gossip, PowerSGD, ScatterReduce, loopback
from gossamer.algorithms import Algorithm
from gossamer.algorithms.blocks.chunks import Chosen
from gossamer.algorithms.power_sgd import FACTOR
from gossamer.bench.clock import clock_for
from gossamer.bucket_plan import make_layout
from gossamer.codecs import Codec, Quantize, RandomK, Sign, TopChunks, TopK
from gossamer.comm.device import Device
from gossamer.comm.ops import AllGather, Permute
from gossamer.comm.ops import AllReduce as Sum
from gossamer.comm.runner import Meter
from gossamer.comm.topology import shift
from gossamer.comm.torch.device_ports import DevicePort
from gossamer.comm.torch.gloo import Circle
from gossamer.state import State
from processes.harness import launch, require
from processes.scenarios_cuda import ALGORITHMS
from processes.scenarios_runners import train_exact

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever makes the host wait for the GPU is an error."""
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def fake_group() -> Iterator[Circle]:
    """A process group of two ranks that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield Circle(dist.group.WORLD, dist.group.WORLD, (0, 1))
    finally:
        dist.destroy_process_group()


def train(algorithm: Algorithm) -> None:
    """Steps that may wait on the host only while buckets are laid out."""
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = gossamer.replicate(model, optimizer, algorithm)
    inputs = torch.randn(8, 10, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with no_synchronisation():
        for _ in range(3):
            step()
    replica.close()


SIDES = [
    AllReduce(bucket_bytes=64),
    AllReduce(wire="bf16"),
    Gossip(bucket_bytes=64),
    Gossip(wire="bf16"),
    ScatterReduce(),
    ScatterReduce(codec=Sign(), gather_below=0),
    QSGD(gather_below=0),
]


@pytest.mark.parametrize("algorithm", SIDES, ids=repr)
def test_alone_no_step_waits_on_the_host(algorithm: Algorithm) -> None:
    train(algorithm)


@pytest.mark.parametrize("algorithm", SIDES, ids=repr)
def test_over_streams_no_step_waits_on_the_host(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_group() as circle:
        device = Device(torch.device("cuda", torch.cuda.current_device()))
        runner = EchoRunner(device, DevicePort(circle, lambda group: circle, Meter()))
        entry = importlib.import_module("gossamer.replicate")
        monkeypatch.setattr(entry, "connect", lambda *arguments, **options: runner)
        monkeypatch.setattr(entry, "_start_equal", lambda *arguments: None)
        train(algorithm)


ENCODED = [
    ScatterReduce(),
    ScatterReduce(gather_below=0),
    ScatterReduce(codec=Sign(), gather_below=0),
    QSGD(gather_below=0),
    ChunkSparse(chunk=64),
]


@pytest.mark.parametrize("algorithm", ENCODED, ids=repr)
def test_what_is_encoded_on_a_gpu_is_what_the_host_encodes(algorithm: Algorithm) -> None:
    """But for one code in ten thousand, which may be the next one."""
    steps = [noise(3, 5000, seed=step) for step in range(3)]
    there = exchange(algorithm, [[tensor.cuda() for tensor in tensors] for tensors in steps])
    for outcome, expected in zip(there, exchange(algorithm, steps), strict=True):
        for result, of_the_host in zip(outcome.results, expected.results, strict=True):
            assert torch.isclose(result.cpu(), of_the_host, rtol=1e-4, atol=1e-6).double().mean() > 0.99


def test_chunks_are_packed_without_waiting_for_the_gpu() -> None:
    flat, indices = torch.arange(1000.0, device="cuda"), torch.tensor([0, 7, 15])
    Chosen.of(flat, 64, indices)  # the first time the host finds itself pinned memory
    with no_synchronisation():
        chosen = Chosen.of(flat, 64, indices)
        packed = chosen.pack(flat)
        chosen.unpack(-packed, flat)
    expected = torch.arange(1000.0)
    for begin, end in ((0, 64), (448, 512), (960, 1000)):
        expected[begin:end] *= -1
    assert torch.equal(flat.cpu(), expected)


def test_power_sgd_begins_a_column_of_zeros_anew_without_asking_the_gpu() -> None:
    matrix = torch.empty(40, 30, device="cuda")
    (segment,), state, algorithm = make_layout({"matrix": matrix}).segments, State(matrix.view(-1)), PowerSGD(rank=2)
    first = algorithm._right(segment, matrix, state)
    factor = torch.randn(30, 2, device="cuda")
    factor[:, 1] = 0
    state.set_extra(FACTOR, factor, "matrix")
    with no_synchronisation():
        mended = algorithm._right(segment, matrix, state)
    assert torch.equal(mended, torch.stack([factor[:, 0], first[:, 1]], dim=1))


@pytest.mark.parametrize("codec", [RandomK(density=0.1), TopK(density=0.1), TopChunks(), Quantize(), Sign()], ids=repr)
def test_no_codec_waits_for_the_gpu(codec: Codec) -> None:
    tensor = torch.randn(5000, device="cuda")
    codec.decode(codec.encode(tensor, seed=1), 5000, tensor.dtype)  # kernels are chosen and compiled
    with no_synchronisation():
        codec.decode(codec.encode(tensor, seed=2), 5000, tensor.dtype)


def test_a_port_of_a_device_never_waits_on_the_host() -> None:
    with fake_group() as circle:
        port, tensor = DevicePort(circle, lambda group: circle, Meter()), torch.ones(1000, device="cuda")
        with no_synchronisation():
            for op in (Sum(tensor), AllGather(tensor), Permute(tensor, shift(1, 2))):
                port.wait(port.start(op))


def test_a_copy_to_the_host_waits_for_what_was_launched_and_comes_back_whole() -> None:
    device = Device(torch.device("cuda", torch.cuda.current_device()))
    with device.new_stream():
        tensor = torch.zeros(2**22, device="cuda")
        for _ in range(200):
            tensor.add_(1)
        host = device.to_host(tensor)
        assert host.is_pinned()
        assert host.eq(200).all()
        assert device.from_host(host).eq(200).all()


def test_streams_follow_each_other() -> None:
    device = Device(torch.device("cuda", torch.cuda.current_device()))
    writer, flow = device.new_stream(), device.new_stream()
    tensor = torch.zeros(2**22, device="cuda")
    writer.wait_stream(device.current())
    with writer:
        for _ in range(200):
            tensor.add_(1)
        device.note_writer()
    for stream in device.writers():
        flow.wait_stream(stream)
    with flow:
        result = tensor * 2
    device.follow(flow.record_event(), result)
    assert result.eq(400).all()
    assert device.writers() == [device.current(), writer]


def test_events_tell_how_long_a_device_takes() -> None:
    clock, tensor = clock_for(torch.device("cuda", torch.cuda.current_device())), torch.zeros(2**26, device="cuda")
    tensor.add_(1)
    clock.finish()
    begin = clock.now()
    for _ in range(50):
        tensor.add_(1)
    end = clock.now()
    clock.finish()
    assert 1e-4 < clock.seconds(begin, end) < 10


def trained(scenario: str, world: int) -> list[dict[str, list[Tensor]]]:
    return require(launch("scenarios_cuda", [scenario], world, timeout=240), scenario)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_gpu_gives_the_bits_of_the_host(backend: str) -> None:
    """Two processes: on one GPU over Gloo, and over NCCL if there are two."""
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    seen: list[dict[str, Any]] = trained(f"train_over_{backend}", 2)
    for name, algorithm in ALGORITHMS.items():
        inside = loopback(lambda rank, algorithm=algorithm: train_exact(algorithm, rank, 2), 2)
        for rank in range(2):
            expected, _ = inside[rank]
            assert all(torch.equal(*pair) for pair in zip(seen[rank][name], expected, strict=True)), (name, rank)
