"""Kernels: how fast they run beside a memory copy where a cluster does not say how fast they are."""

from collections.abc import Mapping

SHARES_OF_COPY: Mapping[str, float] = {
    "memory copy, copy": 1.0,
    "8 bits, encode": 0.91, "8 bits, encode with feedback": 0.49, "8 bits, decode": 1.42, "8 bits, decode and add": 1.23,
    "8 bits, stochastic, encode": 0.55, "8 bits, stochastic, encode with feedback": 0.36,
    "8 bits, stochastic, decode": 1.43, "8 bits, stochastic, decode and add": 1.34,
    "8 bits, symmetric, encode": 0.94, "8 bits, symmetric, encode with feedback": 0.48,
    "8 bits, symmetric, decode": 1.40, "8 bits, symmetric, decode and add": 1.33,
    "4 bits, encode": 0.87, "4 bits, encode with feedback": 0.50, "4 bits, decode": 1.40, "4 bits, decode and add": 1.28,
    "2 bits, encode": 0.90, "2 bits, encode with feedback": 0.50, "2 bits, decode": 1.26, "2 bits, decode and add": 1.24,
    "sign, encode": 1.28, "sign, encode with feedback": 0.68, "sign, decode": 1.39, "sign, decode and add": 1.41,
    "chunk norms, of the sum with a residual": 1.25, "chunk norms, adding a residual": 1.15,
    "last 8 bits of places, encode": 0.97, "last 8 bits of places, decode": 0.59,
    "last 4 bits of places, encode": 1.14, "last 4 bits of places, decode": 0.61,
    "1 % largest, encode": 0.03, "largest of each chunk, encode": 0.03,
}  # fmt: skip
"""Medians of ``benchmarks/results/kernels.jsonl``, on one thread of a processor."""
