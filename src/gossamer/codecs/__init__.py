"""Codecs: what is on the wire. A codec is what one worker can do alone: encode, decode, state its error."""

from gossamer.codecs.base import Codec
from gossamer.codecs.cast import Cast, wire_codec

__all__ = ["Cast", "Codec", "wire_codec"]
