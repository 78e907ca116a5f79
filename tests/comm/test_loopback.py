"""Loopback: ranks in one process behave as ranks in processes of their own, and disagreement never hangs."""

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, Gossip, loopback
from gossamer.comm.ops import AllGather, all_gather, all_reduce, all_to_all, broadcast, maximum, permute, start, wait
from gossamer.comm.topology import shift
from gossamer.errors import CommunicationError, ConfigurationError, DisagreementError

from ..contracts.cases import own_runner

pytestmark = pytest.mark.timeout(60)


def run(make_flow: Callable[[], object], label: str = "a test") -> object:
    return own_runner().run(make_flow, label)


# -- what operations give ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8, 13])
def test_the_maximum_takes_the_logarithm_of_messages(world: int) -> None:
    def body(rank: int) -> tuple[Tensor, int]:
        runner = own_runner()
        mine = torch.zeros(world, dtype=torch.uint8)
        mine[rank] = rank + 1
        before = sum(meter.messages for meter in runner.meters())
        found = runner.run(lambda: maximum(mine, world), "the maximum")
        return found, sum(meter.messages for meter in runner.meters()) - before

    for found, messages in loopback(body, world):
        assert found.tolist() == list(range(1, world + 1))
        assert messages == (world - 1).bit_length()


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_operation(world: int) -> None:
    def table(rank: int) -> Tensor:
        return 100.0 * rank + torch.arange(2.0 * world).view(world, 2)

    def body(rank: int) -> list[Tensor]:
        runner = own_runner()
        flows = [
            lambda: all_reduce(table(rank)),
            lambda: all_reduce(table(rank), "max"),
            lambda: permute(table(rank), shift(1, world)),
            lambda: all_to_all(table(rank)),
            lambda: all_gather(table(rank)),
            lambda: broadcast(table(rank), world - 1),
        ]
        return [runner.run(flow, "an operation") for flow in flows]

    everyone = torch.stack([table(rank) for rank in range(world)])
    for rank, results in enumerate(loopback(body, world)):
        expected = [
            everyone.sum(0),
            everyone.amax(0),
            everyone[(rank + 1) % world],
            everyone[:, rank],
            everyone,
            everyone[world - 1],
        ]
        assert all(map(torch.equal, results, expected))


def test_results_are_in_order_of_rank() -> None:
    assert loopback(lambda rank: rank**2, 5) == [0, 1, 4, 9, 16]


def test_results_belong_to_one_rank() -> None:
    """Writing what one rank received changes nothing for the others."""

    def body(rank: int) -> Tensor:
        results = [run(lambda: all_reduce(torch.ones(3))), run(lambda: all_gather(torch.ones(3)))]
        for result in results:
            result.mul_(rank)
        run(lambda: all_reduce(torch.ones(1)))
        return torch.cat([result.reshape(-1) for result in results])

    for rank, result in enumerate(loopback(body, 3)):
        assert torch.equal(result, rank * torch.tensor([3.0] * 3 + [1.0] * 9))


def test_operations_may_be_outstanding_and_awaited_in_any_order() -> None:
    def flow(rank: int):
        handles = []
        for i in range(3):
            handles.append((yield start(AllGather(torch.tensor([10 * i + rank])))))
        results = {}
        for i in (2, 0, 1):
            results[i] = yield wait(handles[i])
        return [results[i].flatten().tolist() for i in range(3)]

    expected = [[0, 1], [10, 11], [20, 21]]
    assert loopback(lambda rank: run(lambda: flow(rank)), 2) == [expected, expected]


# -- disagreement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flow", "said"),
    [
        (lambda rank: all_reduce(torch.zeros(3 + rank)), ["all_reduce(float32[3])", "all_reduce(float32[4])"]),
        (lambda rank: all_reduce(torch.zeros(3).to([torch.float32, torch.float64][rank])), ["float32[3]", "float64[3]"]),
        (lambda rank: [all_reduce, all_gather][rank](torch.zeros(3)), ["all_reduce(", "all_gather("]),
        (lambda rank: all_reduce(torch.zeros(3), ["sum", "max"][rank]), ["all_reduce(float32[3])", "[3], max)"]),
        (lambda rank: permute(torch.zeros(3), shift(rank, 2)), ["to=[0, 1]", "to=[1, 0]"]),
        (lambda rank: broadcast(torch.zeros(3), rank), ["source=0", "source=1"]),
    ],
    ids=["shape", "dtype", "kind", "reduction", "partners", "source"],
)
def test_disagreement_says_who_yielded_what(flow: Callable[[int], object], said: list[str]) -> None:
    with pytest.raises(DisagreementError) as caught:
        loopback(lambda rank: run(lambda: flow(rank), f"bucket {rank}"), 2)
    for rank, text in enumerate(said):
        assert f"rank {rank} yielded" in str(caught.value)
        assert f"(bucket {rank})" in str(caught.value)
        assert text in str(caught.value)


def test_disagreement_of_the_last_of_many_ranks() -> None:
    with pytest.raises(DisagreementError, match="rank 6 yielded"):
        loopback(lambda rank: run(lambda: all_reduce(torch.zeros(1 + (rank == 6)))), 7)


def test_a_rank_that_ends_early_is_a_deadlock() -> None:
    with pytest.raises(
        DisagreementError, match=r"in vain: rank 0 waits in all_reduce\(float32\[1\]\) \(bucket 7\); rank 2.*ended: \[1\]"
    ):
        loopback(lambda rank: None if rank == 1 else run(lambda: all_reduce(torch.zeros(1)), "bucket 7"), 3)


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    """Two channels, used in opposite order."""

    def body(rank: int) -> None:
        channels = [own_runner(), own_runner()]
        for index in (0, 1) if rank == 0 else (1, 0):
            channels[index].run(lambda: all_reduce(torch.zeros(1)), f"channel {index}")

    with pytest.raises(DisagreementError, match=r"in vain: rank 0 .*channel 0.*rank 1 .*channel 1"):
        loopback(body, 2)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_error_of_one_rank_ends_all(failing: int) -> None:
    ended: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            run(lambda: all_reduce(torch.zeros(1)))
            if rank == failing:
                raise ZeroDivisionError("rank says no")
            run(lambda: all_reduce(torch.zeros(1)))
        except BaseException as error:
            ended[rank] = error
            raise

    with pytest.raises(ZeroDivisionError, match="rank says no"):
        loopback(body, 3)
    assert sorted(ended) == [0, 1, 2]
    assert all(isinstance(error, CommunicationError) for rank, error in ended.items() if rank != failing)
    assert all("rank says no" in str(error) for error in ended.values())


def test_ranks_that_have_not_begun_do_not_begin_after_a_failure() -> None:
    begun = []

    def body(rank: int) -> None:
        begun.append(rank)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loopback(body, 4)
    assert begun == [0]


def test_replicas_that_differ_are_refused() -> None:
    def body(rank: int) -> None:
        model = nn.Linear(2, 2)
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0), [AllReduce(), Gossip()][rank])

    with pytest.raises(DisagreementError, match=r"ranks differ in algorithm: rank 0: AllReduce.*rank 1: Gossip"):
        loopback(body, 2)


def test_an_empty_world_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        loopback(lambda rank: None, 0)


# -- as in a process of its own ---------------------------------------------------------------------------------------


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_every_rank_draws_as_in_a_process_of_its_own() -> None:
    def body(rank: int) -> list[list[float]]:
        drawn = [draws()]
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        for _ in range(3):
            drawn.append(draws())
            run(lambda: all_reduce(torch.rand(2)))
        return drawn

    together = loopback(body, 4)
    for rank in range(4):
        alone = []
        loopback(lambda _, rank=rank: alone.append(body(rank)), 1)
        assert together[rank] == alone[0]
    assert together[0][1] != together[1][1]


@pytest.mark.parametrize("seeds", [(0, 0, 0, 0), (0, 1, 0, 2)], ids=str)
def test_normal_numbers_that_come_in_pairs_stay_with_their_rank(seeds: tuple[int, ...]) -> None:
    """NumPy draws two at a time, and holds the second back; ranks that hold one and that hold none have the same bits."""

    def body(rank: int, seed: int) -> list[float]:
        np.random.seed(seed)
        drawn = []
        for step in range(12):
            drawn += [float(np.random.standard_normal()) for _ in range((0, 1, 1, 2)[(rank + step) % 4])]
            if rank == 2 and step == 5:
                np.random.seed(seed)
            run(lambda: all_reduce(torch.zeros(1)))
        return drawn

    together = loopback(lambda rank: body(rank, seeds[rank]), 4)
    for rank in range(4):
        alone = []
        loopback(lambda _, rank=rank: alone.append(body(rank, seeds[rank])), 1)
        assert together[rank] == alone[0]


def test_a_normal_number_that_is_held_back_tells_apart_what_was_seeded_alike() -> None:
    """After one number and after two the generator itself is the same; a turn that seeds anew may end with either."""

    def body(rank: int) -> list[float]:
        drawn = []
        for numbers in ((2, 1), (1, 2), (1, 1))[rank]:
            np.random.seed(0)
            np.random.standard_normal(numbers)
            run(lambda: all_reduce(torch.zeros(1)))
            drawn.append(float(np.random.standard_normal()))
        return drawn

    together = loopback(body, 3)
    for rank in range(3):
        alone = []
        loopback(lambda _, rank=rank: alone.append(body(rank)), 1)
        assert together[rank] == alone[0]


def test_a_generator_of_another_kind_is_refused_and_nobody_waits() -> None:
    mersenne = np.random.get_bit_generator()
    try:
        with pytest.raises(ValueError, match="PCG64"):
            loopback(lambda rank: np.random.set_bit_generator(np.random.PCG64(0)) if rank == 0 else None, 3)
    finally:
        np.random.set_bit_generator(mersenne)


def test_the_callers_generators_are_left_alone() -> None:
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = draws()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    loopback(lambda rank: (draws(), run(lambda: all_reduce(torch.zeros(1)))), 3)
    assert draws() == expected


def test_ranks_compute_with_the_callers_number_of_threads() -> None:
    """Sums depend on it; kernels of oneDNN read it from the thread that calls them, not from torch."""

    def bits() -> Tensor:
        torch.manual_seed(0)
        layer = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        layer(torch.randn(64, 2, 8, 8)).square().mean().backward()
        return layer.weight.grad

    before = torch.get_num_threads()
    try:
        for cores in (1, 2):
            torch.set_num_threads(cores)
            assert torch.equal(loopback(lambda rank: bits(), 2)[1], bits())
    finally:
        torch.set_num_threads(before)


def test_one_rank_runs_at_a_time_in_the_same_order() -> None:
    """Another rank runs where one waits, and nowhere else."""

    def trace() -> list[tuple[int, int]]:
        running, steps = threading.Lock(), []

        def body(rank: int) -> None:
            for step in range(3):
                assert running.acquire(blocking=False), "two ranks run concurrently"
                steps.append((step, rank))
                running.release()
                run(lambda: all_reduce(torch.zeros(1)))

        loopback(body, 4)
        return steps

    first = trace()
    assert sorted(first) == [(step, rank) for step in range(3) for rank in range(4)]
    assert first == trace()


def test_many_ranks_reach_a_consensus() -> None:
    def body(rank: int) -> float:
        torch.manual_seed(rank)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32"))
        with torch.no_grad():
            model.bias.fill_(float(rank))
        for _ in range(6):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        replica.close()
        return float(model.bias.detach())

    assert loopback(body, 64) == pytest.approx([31.5] * 64)


def test_two_loopback_worlds_together() -> None:
    """A world inside a rank of another is a world of its own."""

    def body(rank: int) -> list[float]:
        inner = loopback(lambda inner: float(run(lambda: all_reduce(torch.tensor([float(inner)])))), 3)
        outer = float(run(lambda: all_reduce(torch.tensor([10.0]))))
        return [*inner, outer]

    assert loopback(body, 2) == [[3.0, 3.0, 3.0, 20.0]] * 2
