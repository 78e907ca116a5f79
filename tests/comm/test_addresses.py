"""At which address a host listens for the other ranks."""

import pytest

from gossamer.comm.torch import sockets
from gossamer.comm.torch.groups import address_among


@pytest.fixture(autouse=True)
def _routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other host is reached from 10.0.0.9, but not 10.9.9.9."""
    monkeypatch.setattr(sockets, "address_towards", lambda other: None if other == "10.9.9.9" else "10.0.0.9")


def test_the_address_that_reaches_the_store() -> None:
    assert address_among("10.0.0.1", ["10.0.0.1", "127.0.0.1"]) == "10.0.0.1"
    assert address_among("fd00::1", ["fd00::1", "fd00::2"]) == "fd00::1"


@pytest.mark.parametrize("own", ["127.0.0.1", "127.0.1.1", "::1"])
def test_the_host_of_the_store_listens_where_the_others_reach_it(own: str) -> None:
    """It reaches the store by an address of its own alone."""
    assert address_among(own, ["10.0.0.2", own, "10.0.0.3"]) == "10.0.0.9"


def test_ranks_of_one_host_need_no_network() -> None:
    assert address_among("127.0.0.1", ["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"


def test_what_is_unknown_is_left_to_torch() -> None:
    assert address_among("", ["somewhere", "somewhere"]) == ""
    assert address_among("127.0.0.1", ["127.0.0.1", "10.9.9.9"]) == "127.0.0.1"


def test_the_way_to_another_host_needs_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert sockets.address_towards("127.0.0.1") == "127.0.0.1"
