"""Data: samples that travel between the workers, so that each sees all of them while holding only its share."""

from gossamer.data.ring_shuffle import RingShuffle

__all__ = ["RingShuffle"]
