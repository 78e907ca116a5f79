"""Kernels: how fast codecs encode and decode on one thread, as shares of a memory copy in the same run."""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.studies.harness import Study, console, parser_of, seconds_of
from gossamer.bench.clock import clock_for
from gossamer.bench.conditions import processor
from gossamer.bench.rows import Column, Record, Store, number, text
from gossamer.codecs import Codec, Quantize, RandomK, Sign, TopChunks, TopK, TopPerChunk
from gossamer.codecs.kernels import chunk_norms, kernels_for
from gossamer.codecs.modulo import BLOCK as MODULO_BLOCK
from gossamer.codecs.modulo import ModuloGrid
from gossamer.codecs.residual import accumulate

COPY = "memory copy"
CODECS: Mapping[str, Codec] = {
    "8 bits": Quantize(bits=8),
    "8 bits, stochastic": Quantize(bits=8, rounding="stochastic"),
    "8 bits, symmetric": Quantize(bits=8, scheme="symmetric"),
    "4 bits": Quantize(bits=4),
    "2 bits": Quantize(bits=2),
    "sign": Sign(),
}
PLACES: Mapping[str, int] = {f"last {bits} bits of places": bits for bits in (8, 4)}
SPARSE: Mapping[str, Codec] = {"10 % of chunks": TopChunks(), "1 % random": RandomK(), "1 % largest": TopK()}
CHUNK = 32 * 1024
BUCKET = 2 * 2**20
BATCH = 20
"""Calls that are timed together on a device: one alone takes less time than to launch it and to wait for it."""


class Memory:
    """Tensors made once: the kernel is timed, not the system's handing out of pages, which takes longer."""

    def __init__(self, numel: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(numel, generator=generator).to(device)
        self.residual = 0.01 * self.x.flip(0)
        self.rest, self.out = torch.zeros_like(self.x), torch.zeros_like(self.x)
        self.narrow_residual, self.narrow_rest = self.residual.bfloat16(), self.rest.bfloat16()


def fused(codec: Codec, memory: Memory) -> dict[str, Callable[[], object]]:
    """The kernels of a block-wise codec: encoding with and without feedback, decoding, decoding and adding."""
    kernels, payload = kernels_for(memory.x.device.type), codec.encode(memory.x)

    def encode(residual: Tensor | None, rest: Tensor | None) -> None:
        if isinstance(codec, Quantize):
            kernels.quantize(memory.x, residual, codec.grid, 1, payload, rest)
        elif isinstance(codec, Sign):
            kernels.sign(memory.x, residual, codec.blocks, 1, payload, rest)

    def decode(add: bool) -> None:
        if isinstance(codec, Quantize):
            kernels.dequantize(payload, memory.out, codec.grid, add)
        elif isinstance(codec, Sign):
            kernels.unsign(payload, memory.out, codec.blocks, add)

    return {
        "encode with feedback": lambda: encode(memory.narrow_residual, memory.narrow_rest),
        "encode with feedback in full precision": lambda: encode(memory.residual, memory.rest),
        "encode": lambda: encode(None, None),
        "decode": lambda: decode(False),
        "decode and add": lambda: decode(True),
    }


def whole(codec: Codec, memory: Memory) -> dict[str, Callable[[], object]]:
    """A codec as algorithms call it, bucket by bucket; every bucket's new rest takes turns with its old one."""
    buckets, outs = (tensor.split(BUCKET // 4) for tensor in (memory.x, memory.out))
    residuals, rests = ([rest.clone() for rest in memory.narrow_residual.split(BUCKET // 4)] for _ in range(2))
    payloads = [codec.encode(bucket) for bucket in buckets]

    def encode() -> None:
        for index, bucket in enumerate(buckets):
            payloads[index] = codec.encode_keeping(bucket, residuals[index], index, rests[index])
            residuals[index], rests[index] = rests[index], residuals[index]

    def add() -> None:
        for payload, out in zip(payloads, outs, strict=True):
            codec.add_decoded(payload, out)

    return {"encode with feedback, by bucket": encode, "decode and add, by bucket": add}


def modulo(bits: int, memory: Memory) -> dict[str, Callable[[], object]]:
    """What :class:`~gossamer.QuantizedGossip` sends, and what partners make of it, in a single call."""
    steps = torch.full((-(-memory.x.numel() // MODULO_BLOCK),), 1e-3, device=memory.x.device)
    grid = ModuloGrid(bits, steps)
    message, _ = grid.pack(memory.x)
    return {
        "encode": lambda: grid.pack(memory.x),
        "decode": lambda: grid.difference(message, memory.x, 0.5, memory.out, add=False),
    }


def works(memory: Memory, sparse: bool) -> dict[tuple[str, str], Callable[[], object]]:
    """Everything that is timed, by codec and kernel."""
    found: dict[tuple[str, str], Callable[[], object]] = {(COPY, "copy"): lambda: memory.out.copy_(memory.x)}
    found["chunk norms", "of the sum with a residual"] = lambda: chunk_norms(memory.x, memory.residual, CHUNK)
    found["chunk norms", "adding a residual"] = lambda: accumulate(
        memory.x, memory.narrow_residual, CHUNK, 1, memory.narrow_rest
    )
    for name, codec in CODECS.items():
        found |= {(name, kernel): work for kernel, work in (fused(codec, memory) | whole(codec, memory)).items()}
    for name, bits in PLACES.items():
        found |= {(name, kernel): work for kernel, work in modulo(bits, memory).items()}
    largest, kernels = TopPerChunk(density=0.33), kernels_for(memory.x.device.type)
    counts = largest.counts(memory.x.numel())[1:]
    found["largest of each chunk", "encode"] = lambda: kernels.largest(memory.x, largest.chunk, *counts)
    for name, sparse_codec in SPARSE.items() if sparse else ():
        found |= {(name, kernel): work for kernel, work in whole(sparse_codec, memory).items()}
    return found


def measure(mbytes: float, device: str, rounds: int, sparse: bool) -> list[Record]:
    """Interleaved rounds; per kernel the median of bytes of gradient per second, and of the share of the copy in its round."""
    memory = Memory(round(mbytes * 2**20) // 4, device)
    jobs, clock, calls = works(memory, sparse), clock_for(memory.x.device), 1 if device == "cpu" else BATCH
    for work in jobs.values():
        seconds_of(work, clock)
    times = {key: [] for key in jobs}  # type: dict[tuple[str, str], list[float]]
    for _ in range(rounds):
        for key, work in jobs.items():
            times[key].append(seconds_of(work, clock, calls))
    copies = times[COPY, "copy"]
    return [
        {
            "machine": machine(device),
            "device": device,
            "mbytes": mbytes,
            "codec": codec,
            "kernel": kernel,
            "bytes_per_second": memory.x.nbytes / statistics.median(seconds),
            "share_of_copy": statistics.median(c / s for c, s in zip(copies, seconds, strict=True)),
            "seconds": seconds,
        }
        for (codec, kernel), seconds in times.items()
    ]


def machine(device: str) -> str:
    """What the figures of a device were measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"one thread of {processor()}"
    return f"{device}: {name}, torch {torch.__version__}"


STUDY = Study(
    "kernels",
    ("device", "mbytes", "codec", "kernel"),
    lambda rows: (
        Column("device", text("device")),
        Column("MiB", number("mbytes", "{:g}")),
        Column("codec", text("codec")),
        Column("kernel", text("kernel")),
        Column("GB/s of gradient", number("bytes_per_second", "{:.2f}", 1e-9)),
        Column("share of a memory copy", number("share_of_copy", "{:.2f}")),
    ),
    note=lambda rows: "; ".join(dict.fromkeys(row["machine"] for row in rows)),
)


def on_devices(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """The rows of every device that there is."""
    torch.set_num_threads(1)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        console.log(f"{options.mbytes:g} MiB on {device}: {options.rounds} rounds")
        yield from measure(options.mbytes, device, options.rounds, not options.no_sparse)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on the host, and on a GPU where there is one."""
    parser = parser_of(__doc__)
    parser.add_argument("--mbytes", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-sparse", action="store_true", help="leave out the slow ones")
    STUDY.main(parser, on_devices, arguments)


if __name__ == "__main__":
    main()
