"""Memory that is used again is never that of somebody who still needs it."""

import threading

import torch
from torch import Tensor

from gossamer.memory import Memory, momentary, portions


def test_what_a_thread_needs_for_a_moment_lies_in_the_same_place() -> None:
    first = momentary(torch.empty(3, 5))
    second = momentary(torch.empty(10), torch.bfloat16)
    assert (first.shape, first.dtype) == ((3, 5), torch.float32)
    assert (second.shape, second.dtype) == ((10,), torch.bfloat16)
    assert first.data_ptr() == second.data_ptr()
    longer = momentary(torch.empty(2**18))
    assert longer.numel() == 2**18
    assert momentary(torch.empty(4)).data_ptr() == longer.data_ptr()
    assert first.fill_(1.0).sum() == 15, "what was handed out before is not taken away"


def test_another_thread_has_its_own() -> None:
    places: list[int] = []
    mine = momentary(torch.empty(100))
    thread = threading.Thread(target=lambda: places.append(momentary(torch.empty(100)).data_ptr()))
    thread.start()
    thread.join()
    assert len(places) == 1
    assert places[0] != mine.data_ptr()


def test_what_is_large_or_not_on_the_host_is_not_kept() -> None:
    large = torch.empty(2**20 + 1)
    one, other = momentary(large), momentary(large)
    assert one.data_ptr() != other.data_ptr()
    assert momentary(torch.empty(3, device="meta")).device.type == "meta"
    like = torch.empty(2**19)
    with torch.device("meta"):
        assert momentary(like).device.type == "cpu"


def test_only_what_nobody_looks_at_is_used_again() -> None:
    memory, like = Memory(), torch.empty(6)
    result: Tensor = memory.fresh(like)
    place = result.data_ptr()
    view = result[:2]
    memory.recycle(result)
    assert memory.fresh(like).data_ptr() != place, "a view of it is still there"
    del view
    memory.recycle(result)
    del result
    assert memory.fresh(like).data_ptr() == place


def test_portions_are_the_same_elements_of_all() -> None:
    one, other = torch.arange(200_000.0), torch.arange(200_000)
    for a, b in portions(one, other):
        assert torch.equal(a, b.float())
    assert sum(len(a) for a, _ in portions(one, other)) == 200_000
