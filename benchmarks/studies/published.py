"""Published: step times that others have measured on their clusters, beside what ``step_time`` predicts of them.

python -m benchmarks.studies.published

Rows that a cluster is calibrated on (and bounds that nobody published) are marked, and never judged. Sources: BAGUA (Gan et al.
2021, arXiv 2107.01499, digitised from its figures), GradientFlow (Sun et al. 2019, arXiv 1902.06855), GossipGraD (Daily et al.
2018, arXiv 1803.05880) and github.com/Adnan082/diloco-measured (2026, Apache-2.0).
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median

import torch
from torch import nn

from benchmarks.studies.harness import RESULTS
from gossamer import AllReduce, ByteGrad, ChunkSparse, GossipGraD, Hierarchical, LocalSGD, LowPrecisionDecentralized
from gossamer.algorithms import Algorithm
from gossamer.bench.rows import markdown
from gossamer.simulate import Cluster, Compute, Link, Machines, Processor, Stragglers, Transport, step_time
from gossamer.simulate.counted import as_mean, count_step
from gossamer.simulate.models import MODELS


@dataclass(frozen=True)
class Row:
    """A figure that was published, and the prediction beside it. ``calibrates``: the cluster was made from it."""

    source: str
    what: str
    published: float
    predicted: float
    calibrates: bool = False

    @property
    def error(self) -> float:
        """Relative to what was published."""
        return self.predicted / self.published - 1


def streams(algorithm: Algorithm) -> int:
    """How many collectives are under way: NCCL carries out those of a communicator one after the other, and by node there are
    two communicators."""
    return 2 if isinstance(algorithm, Hierarchical) else 1


# -- BAGUA: 16 machines of 8 V100, NVLink inside, TCP between ---------------------------------------------------------

BERT_STEPS = 115
BERT: Mapping[str, Mapping[int, float]] = {
    "ddp": {1: 2590, 2: 1290, 4: 645, 8: 322, 16: 160, 100: 126},
    "bytegrad": {1: 690, 2: 350, 4: 183, 8: 95, 16: 90, 100: 86},
}
"""Seconds per epoch of BERT-Large's encoder (302 million parameters) by Gbit/s; 61 of an asynchronous run, which waits for
nothing: what is computed."""
BERT_COMPUTE = 61 / BERT_STEPS
VGG: Mapping[int, Mapping[str, float]] = {
    10: {
        "ddp": 4534, "horovod": 4472, "bagua_allreduce": 4472, "decentralized": 4720, "low_precision_decentralized": 16025,
        "qadam": 17826, "bytegrad": 19689,
    },
    100: {
        "ddp": 8882, "horovod": 9689, "bagua_allreduce": 12298, "decentralized": 13665, "low_precision_decentralized": 15901,
        "qadam": 18882, "bytegrad": 21801,
    },
}  # fmt: skip
"""Images per second of VGG-16 over 128 devices by Gbit/s. The decentralized bar moves as much as an all-reduce. BytePS, whose
servers are machines of their own, is left out."""
VGG_IMAGES = 128 * 32
VGG_COMPUTE = VGG_IMAGES / 28882
INSIDE = Link(bandwidth=1.2e12, latency=5e-6)
DDP, BYTES = AllReduce(bucket_bytes=25 * 2**20), Hierarchical(ByteGrad(bucket_bytes=10 * 2**20), ranks_per_node=8)
LEADERS = Hierarchical(AllReduce(bucket_bytes=10 * 2**20), ranks_per_node=8)
NEIGHBOURS = Hierarchical(LowPrecisionDecentralized(bucket_bytes=10 * 2**20), ranks_per_node=8)


@cache
def profile(name: str, seconds: float) -> tuple[nn.Module, Compute]:
    """A shipped model and a step of it that computes for so long."""
    if name == "encoder":
        with torch.device("meta"):
            model: nn.Module = nn.ModuleList(
                nn.ParameterList([torch.empty(302_000_000 // 24 // 1024, 1024)]) for _ in range(24)
            )
        return model, Compute.uniform(model, forward=seconds / 3, backward=2 * seconds / 3)
    known = MODELS[name]
    model = known.model()
    return model, count_step(model, (known.inputs(known.batch),), as_mean).compute(seconds)


def on_bagua(name: str, seconds: float, algorithm: Algorithm, link: Link, processor: Processor | None = None) -> float:
    """Seconds of a step."""
    model, compute = profile(name, seconds)
    cluster = Cluster(
        machines=Machines(count=16, devices=8), between=link, inside=INSIDE, processor=processor or Processor(cores=8)
    )
    found = step_time(model, algorithm, cluster=cluster, compute=compute, steps=2, buffers="local", lanes=streams(algorithm))
    return found.step_seconds


def link_of(gbit: float, efficiency: float, ceiling: float = float("inf")) -> Link:
    return Link(bandwidth=gbit * 1e9, latency=5e-5, transport=Transport(efficiency=min(1.0, efficiency), ceiling=ceiling))


def solved(predict: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """The speed at which a prediction, which is linear in its inverse while it waits for that, is what is wanted."""
    slow, fast = predict(low), predict(high)
    inverse = 1 / high + (wanted - fast) / (slow - fast) * (1 / low - 1 / high)
    return 1 / max(inverse, 1e-15)


@cache
def transport_of_ddp() -> tuple[float, float]:
    """Efficiency and ceiling, of BERT's rows at the slowest and the fastest rate."""
    ddp, figures = partial(on_bagua, "encoder", BERT_COMPUTE, DDP), BERT["ddp"]
    efficiency = solved(lambda share: ddp(link_of(1, share)), figures[1] / BERT_STEPS, 0.5, 1)
    return efficiency, solved(lambda most: ddp(link_of(100, efficiency, most)), figures[100] / BERT_STEPS, 1.5e10, 2.1e10)


def bert() -> Iterator[Row]:
    """Of each method the slowest rate gives the efficiency, and the fastest one the ceiling, or the codec's speed."""
    ddp, (efficiency, ceiling) = partial(on_bagua, "encoder", BERT_COMPUTE, DDP), transport_of_ddp()
    yield from _bert("ddp", lambda gbit: ddp(link_of(gbit, efficiency, ceiling)))
    coded, figures = partial(on_bagua, "encoder", BERT_COMPUTE, BYTES), BERT["bytegrad"]
    share = solved(lambda share: coded(link_of(1, share)), figures[1] / BERT_STEPS, 0.5, 1)
    link = link_of(100, share, ceiling)
    copy = solved(lambda speed: coded(link, copying(speed)), figures[100] / BERT_STEPS, 2e10, 2e11)
    yield from _bert("bytegrad", lambda gbit: coded(link_of(gbit, share, ceiling), copying(copy)))


def _bert(method: str, step: Callable[[int], float]) -> Iterator[Row]:
    for gbit, seconds in BERT[method].items():
        what = f"BERT-Large, {method}, {gbit} Gbit/s, seconds per epoch"
        yield Row("BAGUA", what, seconds, BERT_STEPS * step(gbit), gbit in (1, 100))


def copying(speed: float) -> Processor:
    """A processor of its own for each device."""
    return Processor(cores=8, copy=speed)


CALIBRATING = ((10, "bagua_allreduce"), (100, "bagua_allreduce"), (10, "qadam"), (100, "low_precision_decentralized"))


def vgg() -> Iterator[Row]:
    """VGG-16. BAGUA's own all-reduce gives efficiency and ceiling of its transport; QAdam at the lower rate the efficiency of
    the compressed collective; the exchange with neighbours at the higher one, which encodes and decodes most, the codec's
    speed. The ceiling of DDP and Horovod is that of BERT's rows with DDP."""
    step = partial(on_bagua, "vgg16", VGG_COMPUTE)
    seconds = {gbit: {name: VGG_IMAGES / images for name, images in figures.items()} for gbit, figures in VGG.items()}
    share = solved(lambda share: step(LEADERS, link_of(10, share)), seconds[10]["bagua_allreduce"], 0.5, 1)
    most = solved(lambda most: step(LEADERS, link_of(100, share, most)), seconds[100]["bagua_allreduce"], 1.5e10, 6e10)
    coded = solved(lambda share: step(BYTES, link_of(10, share)), seconds[10]["qadam"], 0.5, 1)
    line = link_of(100, coded, most)
    neighbours = seconds[100]["low_precision_decentralized"]
    processor = copying(solved(lambda speed: step(NEIGHBOURS, line, copying(speed)), neighbours, 8e10, 1.2e11))
    nccl, own, compressed = (share, transport_of_ddp()[1], None), (share, most, None), (coded, most, processor)
    algorithms: dict[str, tuple[Algorithm, tuple[float, float, Processor | None]]] = {
        "ddp": (DDP, nccl),
        "horovod": (DDP, nccl),
        "bagua_allreduce": (LEADERS, own),
        "decentralized": (LEADERS, own),
        "low_precision_decentralized": (NEIGHBOURS, compressed),
        "qadam": (BYTES, compressed),
        "bytegrad": (BYTES, compressed),
    }
    for gbit, figures in VGG.items():
        for name, images in figures.items():
            algorithm, (efficiency, ceiling, own_processor) = algorithms[name]
            found = VGG_IMAGES / step(algorithm, link_of(gbit, efficiency, ceiling), own_processor)
            what = f"VGG-16, {name}, {gbit} Gbit/s, images/s"
            yield Row("BAGUA", what, images, found, (gbit, name) in CALIBRATING)


# -- GradientFlow: 64 machines of 8 V100, fp16 on the wire ------------------------------------------------------------

LATENCY, JITTER = 3e-6, 0.035
"""Fitted to the two published speed-ups: a fit, and no test."""
LAZY, SPARSE = AllReduce(bucket_bytes=64 * 2**20), ChunkSparse(bucket_bytes=64 * 2**20)
EACH_TENSOR = AllReduce(bucket_bytes=1, gather_below=0)


def speed_up(name: str, seconds: float, algorithm: Algorithm) -> float:
    """Of 512 devices over one."""
    _, compute = profile(name, seconds)
    link = Link(bandwidth=56e9, latency=LATENCY, transport=Transport(efficiency=0.9))
    cluster = Cluster(
        machines=Machines(count=64, devices=8),
        between=link,
        inside=replace(INSIDE, latency=LATENCY),
        stragglers=Stragglers(jitter=JITTER, steps=400),
    )
    model = MODELS[name].model(torch.float16)
    found = step_time(model, algorithm, cluster=cluster, compute=compute, steps=2, buffers="local", lanes=streams(algorithm))
    return 512 * seconds / found.step_seconds


def gradientflow() -> Iterator[Row]:
    """The published speed-ups; and, as shares of them, without fusing and without sparse chunks: at most 0.6."""
    for name, seconds, algorithm, published in (
        ("alexnet", 128 / 3297, SPARSE, 410.2),
        ("resnet50", 128 / 606, LAZY, 434.1),
    ):
        yield Row("GradientFlow", f"{name}, speed-up of 512", published, speed_up(name, seconds, algorithm), True)
        alone = speed_up(name, seconds, EACH_TENSOR)
        yield Row("GradientFlow", f"{name}, every tensor alone (bound: 0.6 of the speed-up)", 0.6 * published, alone, True)


# -- GossipGraD: 128 workers ------------------------------------------------------------------------------------------


def gossipgrad() -> Iterator[Row]:
    """Efficiency with 5 % jitter; all-reduce beside it has no published figure: at most 0.93."""
    model, compute = profile("resnet50", 32 / 250)
    cluster = Cluster(
        machines=Machines(count=128), between=Link(bandwidth=56e9, latency=5e-6), stragglers=Stragglers(jitter=0.05)
    )
    for algorithm, published in ((GossipGraD(), 1.0), (AllReduce(), 0.93)):
        found = step_time(model, algorithm, cluster=cluster, compute=compute, buffers="local")
        what = f"ResNet-50, efficiency of 128, {type(algorithm).__name__}"
        yield Row("GossipGraD", what, published, found.compute_seconds / found.step_seconds, isinstance(algorithm, AllReduce))


# -- DiLoCo, measured on four L40S ------------------------------------------------------------------------------------

BLOCKED = {50: 38.119, 200: 8.277, 1000: 1.506, 5000: 0.317}
"""Seconds in which a loop of 0.026 s a step stands still for one exchange of 30,846,720 fp32 parameters, by Mbit/s."""
PARAMETERS, COMPUTED = 30_846_720, 0.026


def seconds_of_period(mbit: int, period: int) -> float:
    """Seconds per step where weights are averaged every ``period`` steps, and waited for; the link's share is that of H = 1."""
    with torch.device("meta"):
        model = nn.ParameterList([torch.empty(1024, PARAMETERS // 1024)])
    compute = Compute(forward=COMPUTED / 3, backward=2 * COMPUTED / 3)
    bits = 8 * 2 * 3 / 4 * 4 * PARAMETERS
    link = Link(bandwidth=bits / BLOCKED[mbit])
    algorithm = LocalSGD(every=period, delay=0)
    return step_time(model, algorithm, world=4, link=link, compute=compute).step_seconds


def diloco() -> Iterator[Row]:
    """Of other periods no figures are committed here. Beside them stands what the rows with H = 1 say, a computation and a
    blocked exchange every H steps: an identity that the simulation must keep, and no test against a measurement."""
    for mbit, blocked in BLOCKED.items():
        for period in (1, 8, 32, 128):
            expected = COMPUTED + blocked / period
            found = seconds_of_period(mbit, period)
            yield Row("diloco-measured", f"{mbit} Mbit/s, H = {period}, seconds per step", expected, found, True)


def table(rows: list[Row]) -> list[str]:
    """Markdown: every row."""
    head = ("source", "what", "published", "predicted", "error", "")
    return markdown(
        head,
        [
            [
                row.source, row.what, f"{row.published:.4g}", f"{row.predicted:.4g}", f"{100 * row.error:+.1f} %",
                "calibrates" if row.calibrates else "",
            ]
            for row in rows
        ],
    )  # fmt: skip


def limit() -> str:
    """Why no model of this form can predict VGG-16's compressed row beside its exact one: arithmetic on published figures."""
    payload = 2 * 15 / 16 * 8 * 138.3e6 / 1e10
    published, exact = (VGG_IMAGES / VGG[10][name] for name in ("bytegrad", "bagua_allreduce"))
    least = payload + VGG_COMPUTE / 3
    return (
        f"VGG-16 with ByteGrad at 10 Gbit/s: each machine sends 2·15/16 bytes per parameter, which take {payload:.3f} s at the "
        f"whole rate; the forward pass before them takes {VGG_COMPUTE / 3:.3f} s. Together that is {least:.3f} s, and "
        f"{published:.3f} s were published: with all else free, a prediction is {100 * (1 - published / least):.0f} % too low "
        f"in images/s. A quarter of the published step with an exact all-reduce, which sends four times as much, is "
        f"{exact / 4:.3f} s. The bar is digitised, or the rate was not that of the exact row. QAdam at 100 Gbit/s sends "
        f"as many bytes as ByteGrad and took {VGG_IMAGES / VGG[100]['qadam']:.3f} s a step instead of "
        f"{VGG_IMAGES / VGG[100]['bytegrad']:.3f} s: what its optimizer computes before it sends is not in the prediction."
    )


def summary(rows: list[Row]) -> list[str]:
    """Markdown: of each source, the distances of rows that nothing was calibrated on."""
    head = ("source", "rows", "median error", "worst")
    found = []
    for source in dict.fromkeys(row.source for row in rows):
        errors = [abs(row.error) for row in rows if row.source == source and not row.calibrates]
        if errors:
            found.append([source, str(len(errors)), f"{100 * median(errors):.1f} %", f"{100 * max(errors):.1f} %"])
    return markdown(head, found)


def main() -> None:
    """Print the distances, and all rows, and keep them as the table of the results."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    rows = [row for rows in (bert, vgg, gradientflow, gossipgrad, diloco) for row in rows()]
    page = "\n".join([*summary(rows), "", limit(), "", *table(rows)]) + "\n"
    (RESULTS / "published.md").write_text(page)
    sys.stdout.write(page)


if __name__ == "__main__":
    main()
