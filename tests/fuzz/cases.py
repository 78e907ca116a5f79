"""A case: a model, an optimizer, a training loop and an algorithm, all drawn from one seed, and written as code."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import gossamer
from gossamer import codecs
from gossamer.algorithms import Algorithm, registry
from gossamer.algorithms.after import with_dense_start
from gossamer.algorithms.blocks.in_optimizer import InOptimizer
from gossamer.comm import digraph, topology
from gossamer.errors import ConfigurationError

NAMES: dict[str, Any] = {name: getattr(gossamer, name) for name in gossamer.__all__}
for _module in (codecs, topology, digraph):
    NAMES |= {name: value for name, value in vars(_module).items() if not name.startswith("_")}
NAMES |= registry() | {"InOptimizer": InOptimizer}


@dataclasses.dataclass(frozen=True)
class Case:
    """What one run does. ``layers``: see ``models.BLOCKS``; counts of ``batches`` per rank differ only inside ``join()``."""

    algorithm: str
    world: int = 2
    seed: int = 0
    dtype: str = "float64"
    linear: bool = False
    """The loss is linear in the parameters: gradients do not depend on them, and sums can be followed through the run."""
    layers: tuple[str, ...] = ("linear:5",)
    optimizer: str = "SGD(lr=0.1)"
    optimizers: int = 1
    steps: int = 5
    passes: int = 1
    several: bool = False
    """Each of the passes of a step is communicated; else all but the last are inside ``no_sync()``."""
    clip: float = 0.0
    set_to_none: bool = True
    scaler: bool = False
    overflow: tuple[int, int] | None = None
    """Step and rank of a loss that is infinite."""
    evaluate: bool = False
    consensus: bool = False
    resume: int = 0
    """After so many steps everything is saved, and loaded into new objects that must go on to the same bits; 0: not."""
    join: tuple[int, ...] | None = None
    overlap_forward: bool = False
    buffers: str | None = None

    def make_algorithm(self) -> Algorithm:
        """The algorithm itself."""
        made: Algorithm = eval(self.algorithm, dict(NAMES))
        return made

    def code(self) -> str:
        """The case as an expression, without the fields that are as by default."""
        shown = [f for f in dataclasses.fields(self) if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default]
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def batches(self, rank: int) -> int:
        """How many steps a rank takes."""
        return self.steps if self.join is None else self.join[rank]


def draw(seed: int) -> Case:
    """The case of a seed."""
    dice = random.Random(seed)
    while True:
        case = _drawn(dice, seed)
        if case is not None:
            return case


# -- algorithms -------------------------------------------------------------------------------------------------------

WIRES = ["fp32", "fp32", "fp16", "bf16"]
CODECS = ["Quantize()", "Quantize(bits=4)", "Quantize(bits=2)", "Sign()", "Quantize(bits=4, rounding='stochastic')"]
TOPOLOGIES = ["Dissemination()", "OnePeerExponential()", "Ring()", "ShiftOne()", "Complete()", "RandomMatching(seed=3)"]
POOL: dict[str, list[Any]] = {
    "bucket_bytes": [8, 64, 200, 1000, 2**20],
    "wire": WIRES,
    "residual": ["fp32", "fp32", "bf16"],
    "every": [1, 2, 3],
    "lag": [0, 1, 2],
    "ahead": [0.0, 0.0, 1.0, 0.5],
    "period": [1, 2, 3, 16],
    "bits": [4, 8],
    "chunk": [8, 16],
    "density": [0.1, 0.3, 1.0],
    "warmup": [0, 2],
    "ramp": [0, 2],
    "rank": [1, 2, 4],
    "gather_below": [0, 2**14],
    "worker_feedback": [True, True, False],
    "server_feedback": [True, True, False],
    "history": [True, False],
    "late": [True, False],
    "delay": [0, 1],
    "momentum": [0.0, 0.9],
    "nesterov": [True, False],
    "rate": [0.7, 1.0],
}
REQUIRED = {"ChunkSparse": {"chunk": 16}}


def _leaf(dice: random.Random, name: str) -> str:
    cls, given = registry()[name], dict(REQUIRED.get(name, {}))
    for field in dataclasses.fields(cls):
        if field.name in POOL and dice.random() < 0.4:
            given[field.name] = dice.choice(POOL[field.name])
    if name == "LowPrecisionDecentralized":
        given.pop("rate", None)
    fields = {field.name for field in dataclasses.fields(cls)}
    text = [f"{key}={value!r}" for key, value in given.items()]
    if "codec" in fields and name not in ("QSGD", "ByteGrad", "ChunkSparse") and dice.random() < 0.5:
        text.append(f"codec={dice.choice(CODECS)}")
    if "topology" in fields and dice.random() < 0.5:
        text.append(f"topology={dice.choice(TOPOLOGIES)}")
    if name == "DiLoCo" and dice.random() < 0.4:
        text.append("averaging=ScatterReduce()")
    return f"{name}({', '.join(text)})"


def _algorithm(dice: random.Random, kind: str) -> str:
    names = sorted(name for name in registry() if registry()[name].__module__.startswith("gossamer."))
    exact = [name for name in names if registry()[name]().traits.exact]
    gradients = [name for name in names if registry()[name]().subject == "gradients"]
    weights = [name for name in names if registry()[name]().subject == "weights"]

    def leaf(among: list[str]) -> str:
        return _leaf(dice, dice.choice(among))

    if kind == "exact":
        plain = f"AllReduce(bucket_bytes={dice.choice(POOL['bucket_bytes'])})"
        others = [
            plain,
            plain,
            f"after({dice.randint(1, 4)}, AllReduce(), before={plain})",
            f"by_size(30, small=AllReduce(), large={plain})",
            f"Hierarchical({plain}, ranks_per_node=2)",
        ]
        return dice.choice(others) if exact else plain
    one, any_ = {"gradients": gradients, "weights": weights, "mixed": gradients}[kind], [*gradients, *weights]
    shape = dice.choice(["plain", "plain", "after", "by_size", "nodes", "parts"])
    if shape == "after":
        last, before = leaf(any_ if kind == "mixed" else one), leaf(weights if kind == "mixed" else one)
        return f"after({dice.randint(1, 4)}, {last}, before={before})"
    if shape == "by_size":
        return f"by_size(30, small={leaf(one)}, large={leaf(one)})"
    if shape == "nodes":
        return f"Hierarchical({leaf(weights if kind == 'mixed' else one)}, ranks_per_node={dice.choice([1, 2, 3])})"
    if shape == "parts" and kind == "weights":
        return f"in_parts({dice.choice([2, 3])}, {leaf(weights)})"
    return leaf(weights if kind == "mixed" else one)


# -- everything else --------------------------------------------------------------------------------------------------

BLOCKS = ["linear:5", "linear:7", "conv:2", "channels_last:3", "embedding:6", "layernorm", "batchnorm", "frozen:4", "unused:3"]
BLOCKS += ["rarely", "tied", "tied_by_memory", "twice", "scalar", "empty", "alone:1", "transposed:4", "single:5"]
LOSSY_BLOCKS = [*BLOCKS, "half:4"]
OPTIMIZERS = ["SGD(lr=0.1)", "SGD(lr=0.05, momentum=0.9)", "SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)"]
OPTIMIZERS += [
    "Adam(lr=0.01, eps=1e-3)",
    "AdamW(lr=0.01, eps=1e-3, amsgrad=True)",
    "Adagrad(lr=0.05)",
    "Adamax(lr=0.01, eps=1e-3)",
]
OPTIMIZERS += ["RMSprop(lr=0.01, eps=1e-2, momentum=0.5)", "SGD(lr=0.1, maximize=True)"]
LOSSY_OPTIMIZERS = [
    *OPTIMIZERS,
    "GossipAdamW(lr=0.01)",
    "GossipAdamW(lr=0.01)",
    "MasterWeights(SGD, lr=0.05, momentum=0.9)",
    "MasterWeights(AdamW, lr=0.01, eps=1e-3)",
]
COMMUNICATING = ["OneBitAdam(lr=0.01, warmup=2)", "OneBitAdam(lr=0.01, warmup=3, bucket_bytes=64)", "QAdam(lr=0.01, warmup=2)"]


def _drawn(dice: random.Random, seed: int) -> Case | None:
    kind = dice.choice([*2 * ["exact", "gradients", "weights"], "mixed", "optimizer"])
    world = dice.choice([1, 2, 2, 3, 3, 4, 5])
    text = "InOptimizer()" if kind == "optimizer" else _algorithm(dice, kind)
    blocks, optimizers = (BLOCKS, OPTIMIZERS) if kind == "exact" else (LOSSY_BLOCKS, LOSSY_OPTIMIZERS)
    case = Case(
        text,
        world,
        seed,
        dtype="float64" if kind == "exact" else dice.choice(["float64", "float32", "float32"]),
        linear=kind != "optimizer" and dice.random() < 0.3,
        layers=tuple(dice.choice(blocks) for _ in range(dice.randint(1, 6))),
        optimizer=dice.choice(COMMUNICATING if kind == "optimizer" else optimizers),
        optimizers=dice.choice([1, 1, 1, 2]),
        steps=dice.randint(3, 8),
        passes=dice.choice([1, 1, 2, 3]),
        set_to_none=dice.random() < 0.8,
    )
    if case.linear:
        case = dataclasses.replace(case, optimizer="SGD(lr=0.1)")
    case = dataclasses.replace(case, layers=("linear:6", *case.layers), several=case.passes > 1 and dice.random() < 0.4)
    if dice.random() < 0.1:
        case = dataclasses.replace(case, layers=(*case.layers, "giant:1500"))
    if not case.linear and dice.random() < 0.2:
        case = dataclasses.replace(case, clip=0.1)
    if dice.random() < 0.2:
        case = dataclasses.replace(case, scaler=True)
        if dice.random() < 0.7:
            case = dataclasses.replace(case, overflow=(dice.randrange(case.steps), dice.randrange(world)))
    if dice.random() < 0.3:
        case = dataclasses.replace(case, evaluate=True, consensus=dice.random() < 0.6)
    if dice.random() < 0.35:
        case = dataclasses.replace(case, resume=dice.randint(1, case.steps - 1))
    if dice.random() < 0.15:
        case = dataclasses.replace(case, join=tuple(dice.randint(0 if dice.random() < 0.2 else 1, 5) for _ in range(world)))
    if kind in ("exact", "gradients") and dice.random() < 0.3:
        case = dataclasses.replace(case, overlap_forward=True)
    if "batchnorm" in case.layers:
        modes = ["local", "broadcast"] if "PushSum" in text else [None, None, "local", "broadcast", "average"]
        case = dataclasses.replace(case, buffers=dice.choice(modes))
    return case if sensible(case) else None


def sensible(case: Case) -> bool:
    """Whether a user may write this: what gossamer refuses with a reason is tested elsewhere."""
    try:
        algorithm = with_dense_start(case.make_algorithm())  # as replicate() runs it
        algorithm.check(case.world)
    except ConfigurationError:
        return False
    begun = with_dense_start(algorithm)
    both = begun.part("gradients") is not None and begun.part("weights") is not None
    if case.join is not None and (case.scaler or case.overlap_forward or both or case.resume or case.evaluate):
        return False
    simple = not (case.several or case.scaler or case.join) and case.optimizers == 1 and case.set_to_none
    simple = simple and "tied_by_memory" not in case.layers  # which one update changes after the other
    if case.overlap_forward and not (simple and algorithm.part("weights") is None):
        return False
    if case.linear and (case.clip or case.optimizer != "SGD(lr=0.1)"):
        return False
    if algorithm.traits.takes_momentum and (case.optimizers > 1 or "momentum=0.9" not in case.optimizer or case.several):
        return False
    if algorithm.traits.history and ("rarely" in case.layers or (case.join is not None and min(case.join) == 0)):
        return False  # ranks that remember different things
    if case.resume and "rarely" in case.layers and not case.set_to_none:
        return False  # a gradient of zeros moves AdamW's weights; in a new process it is None
    if case.join is not None and case.several:
        return False  # as in DDP, a rank without batches adds nothing to what the passes before have accumulated
    if case.scaler and case.several:
        return False  # the sum of two scaled passes is scaled once: the reference of that is DDP's own business
    if algorithm.cadence.lag and (case.scaler or case.join or case.optimizers > 1 or case.buffers == "broadcast"):
        return False
    if case.optimizers > 1 and "tied_by_memory" in case.layers and algorithm.part("weights") is not None:
        return False  # each of two optimizers would exchange the same memory
    own = any(name in case.optimizer for name in ("OneBitAdam", "QAdam"))
    return own == (case.algorithm == "InOptimizer()")


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing less."""
    default = Case(case.algorithm)
    for index in range(1, len(case.layers)):
        yield dataclasses.replace(case, layers=case.layers[:index] + case.layers[index + 1 :])
    for field in dataclasses.fields(case):
        if field.name not in ("algorithm", "layers", "seed", "dtype", "steps", "linear"):
            value = getattr(default, field.name)
            if getattr(case, field.name) != value and not (field.name == "world" and (case.join or case.overflow)):
                yield dataclasses.replace(case, **{field.name: value})
    if case.steps > 2 and not case.overflow and case.resume < case.steps - 1 and not case.join:
        yield dataclasses.replace(case, steps=case.steps - 1)
