"""Memory that is used again is never that of somebody who still needs it."""

import threading

import torch
from torch import Tensor

from gossamer.buckets import Memory
from gossamer.memory import is_momentary, momentary, portions

CPU = torch.device("cpu")


def test_what_a_thread_needs_for_a_moment_lies_in_the_same_place() -> None:
    first = momentary(15, torch.float32, CPU)
    assert (first.shape, first.dtype) == ((15,), torch.float32)
    place = first.data_ptr()
    del first
    second = momentary(10, torch.bfloat16, CPU)
    assert (second.shape, second.dtype) == ((10,), torch.bfloat16)
    assert second.data_ptr() == place
    del second
    longer = momentary(2**18, torch.float32, CPU)
    place = longer.data_ptr()
    del longer
    assert momentary(4, torch.float32, CPU).data_ptr() == place


def test_what_somebody_still_looks_at_is_not_given_to_another() -> None:
    first = momentary(15, torch.float32, CPU).fill_(1.0)
    view = first[3:5]
    del first
    second = momentary(15, torch.float32, CPU).fill_(2.0)
    assert view.tolist() == [1.0, 1.0]
    assert second.sum() == 30


def test_another_thread_has_its_own() -> None:
    places: list[int] = []
    mine = momentary(100, torch.float32, CPU)
    thread = threading.Thread(target=lambda: places.append(momentary(100, torch.float32, CPU).data_ptr()))
    thread.start()
    thread.join()
    assert len(places) == 1
    assert places[0] != mine.data_ptr()


def test_what_is_large_or_not_on_the_host_is_not_kept() -> None:
    one, other = (momentary(2**20 + 1, torch.float32, CPU) for _ in range(2))
    assert one.data_ptr() != other.data_ptr()
    assert not is_momentary(2**20 + 1, torch.float32, CPU)
    assert is_momentary(2**20, torch.float32, CPU)
    assert not is_momentary(3, torch.float32, torch.device("meta"))
    assert momentary(3, torch.float32, torch.device("meta")).device.type == "meta"
    with torch.device("meta"):
        assert momentary(2**19, torch.float32, CPU).device.type == "cpu"


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
