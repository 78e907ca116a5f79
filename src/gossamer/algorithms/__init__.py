"""Algorithms: one relaxation, one file. A new file in this folder registers itself."""

import importlib
import pkgutil

from gossamer.algorithms.base import Algorithm, registry

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

from gossamer.algorithms.after import after  # noqa: E402  (after the registry is complete)
from gossamer.algorithms.all_reduce import AllReduce  # noqa: E402
from gossamer.algorithms.by_size import by_size  # noqa: E402
from gossamer.algorithms.byte_grad import ByteGrad  # noqa: E402
from gossamer.algorithms.chunk_sparse import ChunkSparse  # noqa: E402
from gossamer.algorithms.decentralized_sgd import DecentralizedSGD  # noqa: E402
from gossamer.algorithms.des_loc import DESLOC  # noqa: E402
from gossamer.algorithms.diloco import DiLoCo  # noqa: E402
from gossamer.algorithms.eager_diloco import EagerDiLoCo  # noqa: E402
from gossamer.algorithms.gossip import Gossip  # noqa: E402
from gossamer.algorithms.gossip_grad import GossipGraD  # noqa: E402
from gossamer.algorithms.gossip_pga import GossipPGA  # noqa: E402
from gossamer.algorithms.hierarchical import Hierarchical  # noqa: E402
from gossamer.algorithms.in_parts import in_parts  # noqa: E402
from gossamer.algorithms.local_sgd import LocalSGD  # noqa: E402
from gossamer.algorithms.low_precision_decentralized import LowPrecisionDecentralized  # noqa: E402
from gossamer.algorithms.power_sgd import PowerSGD  # noqa: E402
from gossamer.algorithms.push_sum import PushSum  # noqa: E402
from gossamer.algorithms.qsgd import QSGD  # noqa: E402
from gossamer.algorithms.quantized_gossip import QuantizedGossip  # noqa: E402
from gossamer.algorithms.scatter_reduce import ScatterReduce  # noqa: E402
from gossamer.algorithms.sparse_loco import SparseLoCo  # noqa: E402
from gossamer.algorithms.sparta import sparta  # noqa: E402
from gossamer.algorithms.streaming_diloco import streaming_diloco  # noqa: E402

__all__ = [
    "DESLOC",
    "QSGD",
    "Algorithm",
    "AllReduce",
    "ByteGrad",
    "ChunkSparse",
    "DecentralizedSGD",
    "DiLoCo",
    "EagerDiLoCo",
    "Gossip",
    "GossipGraD",
    "GossipPGA",
    "Hierarchical",
    "LocalSGD",
    "LowPrecisionDecentralized",
    "PowerSGD",
    "PushSum",
    "QuantizedGossip",
    "ScatterReduce",
    "SparseLoCo",
    "after",
    "by_size",
    "in_parts",
    "registry",
    "sparta",
    "streaming_diloco",
]
