"""Codecs: what is on the wire. A codec is what one worker can do alone: encode, decode, state its error."""

from gossamer.codecs.base import Codec
from gossamer.codecs.cast import Cast
from gossamer.codecs.error_feedback import ErrorFeedback
from gossamer.codecs.kernels import chunk_norms
from gossamer.codecs.quantize import Quantize
from gossamer.codecs.sign import Sign
from gossamer.codecs.sparse import RandomK, Sparse, TopChunks, TopK
from gossamer.codecs.top_per_chunk import TopPerChunk

__all__ = [
    "Cast",
    "Codec",
    "ErrorFeedback",
    "Quantize",
    "RandomK",
    "Sign",
    "Sparse",
    "TopChunks",
    "TopK",
    "TopPerChunk",
    "chunk_norms",
]
