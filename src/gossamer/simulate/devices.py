"""Devices: what accelerators reach at most, as their makers state it, for a first estimate of what a step computes."""

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.errors import ConfigurationError

GIB = 2.0**30

UTILISATION = 0.4
"""The share of its peak at which a device is taken to compute. Large transformers reach 0.3 to 0.6, ResNet-50 0.1 to 0.2 of a
matrix unit's peak (an own measurement, given as seconds per step, is always better)."""

FORMATS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Device:
    """``memory`` in bytes, ``memory_rate`` in bytes per second, ``peaks`` in dense floating-point operations per second by the
    format in which matrices are multiplied."""

    memory: float
    memory_rate: float
    peaks: Mapping[str, float]


def _device(gib: float, gigabytes_per_second: float, **teraflops: float) -> Device:
    peaks = {name: 1e12 * peak for name, peak in teraflops.items()}
    return Device(memory=gib * GIB, memory_rate=1e9 * gigabytes_per_second, peaks=peaks)


# NVIDIA's data sheets, without sparsity, sums in fp32.
DEVICES: dict[str, Device] = {
    "P100": _device(16, 732, fp32=10.6, fp16=21.2),
    "V100": _device(32, 900, fp32=15.7, fp16=125),
    "T4": _device(16, 320, fp32=8.1, fp16=65),
    "A10": _device(24, 600, fp32=31.2, tf32=62.5, bf16=125, fp16=125),
    "A100": _device(80, 2039, fp32=19.5, tf32=156, bf16=312, fp16=312),
    "L40S": _device(48, 864, fp32=91.6, tf32=183, bf16=362, fp16=362),
    "H100": _device(80, 3350, fp32=67, tf32=495, bf16=989, fp16=989),
    "H200": _device(141, 4800, fp32=67, tf32=495, bf16=989, fp16=989),
    "RTX 3090": _device(24, 936, fp32=35.6, tf32=35.6, bf16=71, fp16=71),
    "RTX 4090": _device(24, 1008, fp32=82.6, tf32=82.6, bf16=165, fp16=165),
}
"""By name. Of several sizes of memory the largest."""


def find_device(name: str) -> Device:
    """The device of this name. ConfigurationError for one that is not known."""
    found = {known.lower(): device for known, device in DEVICES.items()}.get(name.lower())
    if found is None:
        raise ConfigurationError(
            f"nothing is known of the device {name!r}: say how long a step computes (--compute 0.3s), or name one of "
            f"{', '.join(DEVICES)}"
        )
    return found


def throughput(name: str, format: str, utilisation: float = UTILISATION) -> float:
    """Floating-point operations per second that a device is taken to reach. ConfigurationError where it has no such format."""
    peaks = find_device(name).peaks
    if format not in peaks:
        raise ConfigurationError(f"{name} multiplies no matrices in {format!r}; it does in {', '.join(peaks)}")
    return utilisation * peaks[format]
