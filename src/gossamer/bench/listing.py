"""Listing: everything that can be typed as a method, one line each, and what of it cannot run here."""

import inspect
import re
import textwrap
from collections.abc import Iterable

from gossamer import optim
from gossamer.algorithms import registry
from gossamer.bench.methods import OPTIMIZERS, known_names
from gossamer.bench.peers import PEERS

_MARGIN, _WIDTH = 30, 128


def everything() -> list[str]:
    """Every method that needs no settings: the peers, and all algorithms with their defaults; optimizers that communicate in
    the phase in which they compress, which with their defaults begins somewhere between the rounds."""
    return [*PEERS, *(f"{name}()" for name in registry()), *(f"{name}(warmup=2)" for name in OPTIMIZERS)]


def listing() -> list[str]:
    """Lines: peers with what they are and why they cannot run; algorithms and optimizers; what those may be made of."""
    algorithms = dict(registry())
    made_of = sorted(set(known_names()) - set(algorithms) - set(OPTIMIZERS))
    return [
        "Without gossamer:",
        *(line for name, peer in PEERS.items() for line in _entry(name, peer.what, peer.missing())),
        "gossamer's algorithms, written as in a script: Gossip(wire='bf16'), ScatterReduce(codec=Quantize(bits=4)):",
        *_described(algorithms.items()),
        "gossamer's optimizers that communicate:",
        *_described((name, getattr(optim, name)) for name in OPTIMIZERS),
        *textwrap.wrap(f"What these may be made of: {', '.join(made_of)}.", _WIDTH, subsequent_indent="  "),
    ]


def _described(kinds: Iterable[tuple[str, type]]) -> list[str]:
    return [line for name, kind in kinds for line in _entry(f"{name}()", summary(kind))]


def _entry(name: str, text: str, missing: str | None = None) -> list[str]:
    told = [f"  {name:{_MARGIN - 3}} {text}"]
    return (
        told
        if missing is None
        else told + textwrap.indent("\n".join(_wrapped(f"not here: {missing}")), " " * _MARGIN).split("\n")
    )


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH - _MARGIN, break_on_hyphens=False)


def summary(kind: type) -> str:
    """The first sentence of its documentation, on one line."""
    paragraph = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    plain = re.sub(r":\w+:`([^`]*)`|``([^`]*)``", lambda found: found[1] or found[2], paragraph)
    return textwrap.shorten(plain, _WIDTH - _MARGIN, placeholder=" …", break_on_hyphens=False)
