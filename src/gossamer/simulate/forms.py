"""Forms of an all-reduce: how many bytes and rounds each takes, of which a transport takes the one that ends first.

Among n machines, for each byte of the tensor: a ring sends 2(n-1)/n bytes in 2(n-1) rounds (Patarasuk and Yuan 2009);
recursive halving and doubling as much in 2 log2(n) rounds, and with n no power of two another byte in two more (Thakur,
Rabenseifner and Gropp 2005); a double binary tree 2 bytes in 2 log2(n) rounds (Sanders, Speck and Traff 2009). Bytes are those
of the busiest machine in its busier direction.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal

from gossamer.comm.operations import Traffic

Form = Literal["ring", "halving-doubling", "tree"]


def _ring(nbytes: int, machines: int) -> Traffic:
    return Traffic(math.ceil(2 * (machines - 1) * nbytes / machines), 2 * (machines - 1))


def _halving_doubling(nbytes: int, machines: int) -> Traffic:
    power = machines.bit_length() - 1
    core, beside = 2**power, machines != 2**power
    return Traffic(math.ceil(2 * (core - 1) * nbytes / core) + beside * nbytes, 2 * power + 2 * beside)


def _tree(nbytes: int, machines: int) -> Traffic:
    return Traffic(2 * nbytes * (machines > 1), 2 * (machines - 1).bit_length())


FORMS: dict[Form, Callable[[int, int], Traffic]] = {
    "ring": _ring,
    "halving-doubling": _halving_doubling,
    "tree": _tree,
}


def least(forms: Iterable[Form], nbytes: int, machines: int, seconds: Callable[[Traffic], float]) -> tuple[Form, Traffic]:
    """The form that takes the fewest ``seconds`` for a tensor of ``nbytes`` among so many machines, and its traffic."""
    priced = [(form, FORMS[form](nbytes, machines)) for form in forms]
    return min(priced, key=lambda each: seconds(each[1]))
