"""Laws of the ring shuffle, in loopback: nothing is lost, everything is seen everywhere once, and a resumed run is the same."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gossamer
from gossamer import ConfigurationError, DisagreementError, UsageError, loopback
from gossamer.data import RingShuffle
from gossamer.data.ring_shuffle import UNDER_WAY

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 5])
MIXED = pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"mix": True}, {"deal": True}], ids=["plain", "in order", "mix", "deal"]
)
FULL = pytest.mark.parametrize("options", [{}, {"mix": True}, {"deal": True}], ids=["plain", "mix", "deal"])
SIZES = pytest.mark.parametrize("sizes", ["equal", "one apart", "far apart"])
BATCH = 4


def share_size(sizes: str, rank: int) -> int:
    """Equal with a short last batch; 9 or 8 (one of them makes two full batches, the other three); or up to twice as large."""
    return {"equal": 10, "one apart": 9 if rank % 2 == 0 else 8, "far apart": 12 - rank}[sizes]


def share(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Samples whose content says which they are: bfloat16 features, int64 names."""
    names = torch.arange(size) + 100 * rank
    return torch.stack([names % 16, names // 16], 1).bfloat16(), names


def names_of(batch: Any) -> list[int]:
    """The names in a batch, after checking that the features belong to them."""
    features, names = batch
    assert torch.equal(features, torch.stack([names % 16, names // 16], 1).bfloat16())
    return names.tolist()


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def everything(world: int, sizes: str) -> list[int]:
    return sorted(100 * rank + i for rank in range(world) for i in range(share_size(sizes, rank)))


def each(world: int, body: Callable[[RingShuffle, int], Any], sizes: str = "equal", **options: Any) -> list[Any]:
    """Run ``body(shuffle, rank)`` on every rank."""

    def run(rank: int) -> Any:
        with RingShuffle(share(rank, share_size(sizes, rank)), BATCH, **options) as shuffle:
            return body(shuffle, rank)

    return loopback(run, world)


@WORLDS
@MIXED
@SIZES
def test_every_sample_visits_every_worker_exactly_once(world: int, options: dict[str, bool], sizes: str) -> None:
    """Over ``world`` local epochs; and then again."""

    def body(shuffle: RingShuffle, rank: int) -> list[list[int]]:
        return [flat(names_of(batch) for batch in shuffle) for _ in range(2 * world)]

    for seen in each(world, body, sizes, **options):
        assert sorted(flat(seen[:world])) == everything(world, sizes)
        assert sorted(flat(seen[world:])) == everything(world, sizes)


@WORLDS
@MIXED
@SIZES
def test_the_union_over_ranks_is_unchanged_after_each_step(world: int, options: dict[str, bool], sizes: str) -> None:
    def body(shuffle: RingShuffle, rank: int) -> list[list[int]]:
        return [names_of(shuffle.samples()) for _ in range(world + 1) for _ in shuffle]

    ranks = each(world, body, sizes, **options)
    for step in zip(*ranks, strict=True):
        assert sorted(flat(step)) == everything(world, sizes)


@WORLDS
@SIZES
def test_all_ranks_take_the_same_number_of_full_enough_batches(world: int, sizes: str) -> None:
    def body(shuffle: RingShuffle, rank: int) -> tuple[int, list[int]]:
        return len(shuffle), [len(names) for _ in range(world) for _, names in shuffle]

    for length, lengths in each(world, body, sizes):
        assert length == 3
        assert len(lengths) == world * length
        assert all(1 <= size <= BATCH for size in lengths)


@WORLDS
def test_the_next_rank_s_batches_are_this_one_s_in_the_next_epoch(world: int) -> None:
    """In local epoch e, rank r uses what rank r + e brought, in the same batches."""

    def body(shuffle: RingShuffle, rank: int) -> list[list[list[int]]]:
        return [[names_of(batch) for batch in shuffle] for _ in range(world)]

    ranks = each(world, body)
    for rank in range(world):
        for epoch in range(world):
            assert ranks[rank][epoch] == ranks[(rank + epoch) % world][0]


@WORLDS
def test_shares_are_put_in_random_order_once(world: int) -> None:
    """Each in another one, drawn from the seed; every batch of a share sorted by label has several labels."""

    def body(shuffle: RingShuffle, rank: int) -> list[list[int]]:
        return [names_of(batch) for batch in shuffle]

    def orders(**options: Any) -> list[list[int]]:
        return [[name % 100 for name in flat(batches)] for batches in each(world, body, **options)]

    assert orders(shuffle=False) == [list(range(10))] * world
    assert orders(seed=1) == orders(seed=1) != orders(seed=2)
    assert len({tuple(order) for order in orders()}) == world
    assert all(sorted(order) == list(range(10)) for order in orders())
    labels = loopback(lambda rank: [set(y.tolist()) for y in RingShuffle(torch.arange(100) // 50, 20)], world)
    assert all(len(batch) == 2 for batches in labels for batch in batches)


# -- full batches only ----------------------------------------------------------------------------------------------


@WORLDS
@FULL
@SIZES
def test_with_drop_last_all_batches_are_full(world: int, options: dict[str, bool], sizes: str) -> None:
    """As many as the smallest share makes. What is held, used or not, visits every worker exactly once all the same."""

    def body(shuffle: RingShuffle, rank: int) -> tuple[list[list[int]], list[list[list[int]]]]:
        held, used = [], []
        for _ in range(2 * world):
            held.append(names_of(shuffle.samples()))
            used.append([names_of(batch) for batch in shuffle])
        return held, used

    ranks = each(world, body, sizes, drop_last=True, **options)
    smallest = min(len(held[0]) for held, _ in ranks)
    for held, used in ranks:
        assert all([len(batch) for batch in epoch] == [BATCH] * (smallest // BATCH) for epoch in used)
        assert all(len(set(flat(epoch))) == len(flat(epoch)) for epoch in used)
        assert sorted(flat(held[:world])) == everything(world, sizes)
    for epoch in range(2 * world):
        assert sorted(flat(held[epoch] for held, _ in ranks)) == everything(world, sizes)
        assert all(set(flat(used[epoch])) <= set(held[epoch]) for held, used in ranks)


@WORLDS
@SIZES
def test_with_drop_last_every_sample_is_left_out_as_often(world: int, sizes: str) -> None:
    """Over any k local epochs, of a share of n of which m are used, ⌊k·m/n⌋ or ⌈k·m/n⌉ times."""

    def body(shuffle: RingShuffle, rank: int) -> list[list[int]]:
        return [flat(names_of(batch) for batch in shuffle) for _ in range(9)]

    ranks = each(world, body, sizes, drop_last=True)
    used = len(ranks[0][0])
    for begin in range(3):
        for k in range(1, 7):
            counts = Counter(flat(flat(seen[begin : begin + k]) for seen in ranks))
            for name in everything(world, sizes):
                exact = k * used / share_size(sizes, name // 100)
                assert int(exact) <= counts[name] <= -int(-exact // 1)


@WORLDS
@FULL
def test_with_drop_last_the_union_is_unchanged_after_each_step(world: int, options: dict[str, bool]) -> None:
    def body(shuffle: RingShuffle, rank: int) -> list[list[int]]:
        return [names_of(shuffle.samples()) for _ in range(world + 1) for _ in shuffle]

    for step in zip(*each(world, body, "far apart", drop_last=True, **options), strict=True):
        assert sorted(flat(step)) == everything(world, "far apart")


def test_with_drop_last_shares_may_differ_as_they_like() -> None:
    def body(rank: int) -> list[int]:
        with RingShuffle(torch.arange(5 + 45 * rank), 4, drop_last=True) as shuffle:
            return [len(batch) for _ in range(3) for batch in shuffle]

    assert loopback(body, 2) == [[4, 4, 4]] * 2


@pytest.mark.parametrize("world", [1, 3])
def test_mixing_composes_batches_anew(world: int) -> None:
    """Reproducibly by seed, and never the same twice."""

    def body(shuffle: RingShuffle, rank: int) -> list[list[list[int]]]:
        return [[names_of(batch) for batch in shuffle] for _ in range(2 * world)]

    first = each(world, body, mix=True, seed=1)
    assert each(world, body, mix=True, seed=1) == first
    assert each(world, body, mix=True, seed=2) != first
    together = Counter(tuple(sorted(batch)) for epoch in first[0] for batch in epoch if len(batch) == BATCH)
    assert max(together.values()) == 1
    assert max(Counter(tuple(sorted(batch)) for epoch in each(world, body)[0] for batch in epoch).values()) == 2


@WORLDS
@SIZES
def test_dealt_shares_are_even_and_hold_some_of_everyones(world: int, sizes: str) -> None:
    def body(shuffle: RingShuffle, rank: int) -> list[int]:
        return names_of(shuffle.samples())

    hands = each(world, body, sizes, deal=True)
    assert sorted(flat(hands)) == everything(world, sizes)
    assert max(map(len, hands)) - min(map(len, hands)) <= world
    for hand in hands:
        brought = Counter(name // 100 for name in hand)
        for rank in range(world):
            assert abs(brought[rank] - share_size(sizes, rank) / world) < 1


def test_a_deal_is_random_and_reproducible() -> None:
    def body(shuffle: RingShuffle, rank: int) -> list[list[int]]:
        return [names_of(batch) for batch in shuffle]

    first = each(3, body, deal=True, seed=1)
    assert each(3, body, deal=True, seed=1) == first
    assert each(3, body, deal=True, seed=2) != first
    assert any(len({name // 100 for name in batch}) > 1 for batch in first[0]), "batches of one share's samples only"


def test_nothing_depends_on_the_generators_of_the_script() -> None:
    def body(shuffle: RingShuffle, rank: int) -> list[list[int]]:
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        seen = [names_of(batch) for batch in shuffle]
        assert torch.equal(before, torch.get_rng_state())
        return seen

    assert each(2, body, mix=True) == each(2, body, mix=True)


@WORLDS
@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": False}, {"mix": True}, {"deal": True}, {"drop_last": True}, {"drop_last": True, "mix": True}],
    ids=str,
)
@pytest.mark.parametrize("at", [(0, 0), (0, 2), (1, 3), (4, 1)], ids=str)
def test_a_resumed_run_goes_on_bit_for_bit(world: int, options: dict[str, bool], at: tuple[int, int]) -> None:
    """At the same sample, from a new shuffle or from one that has moved on; the state is the same on every rank."""
    epochs, sizes = 7, "far apart"

    def straight(shuffle: RingShuffle, rank: int) -> tuple[list[Any], dict[str, Any]]:
        seen, state = [], shuffle.state_dict()
        for epoch in range(epochs):
            for step, batch in enumerate(shuffle):
                seen.append((epoch, step, names_of(batch)))
                if (epoch, step + 1) == (at[0], min(at[1], len(shuffle))):
                    state = shuffle.state_dict()
        return seen, state

    def resumed(moved: int) -> Callable[[RingShuffle, int], list[Any]]:
        def body(shuffle: RingShuffle, rank: int) -> list[Any]:
            for _, _batch in zip(range(moved), shuffle, strict=False):
                pass
            shuffle.load_state_dict(state)
            return [(shuffle.epoch, names_of(batch)) for _ in range(epochs) for batch in shuffle]

        return body

    ranks = each(world, straight, sizes, **options)
    state = ranks[0][1]
    assert all(other == state for _, other in ranks)
    for moved in (0, 2, 3):
        for (seen, _), again in zip(ranks, each(world, resumed(moved), sizes, **options), strict=True):
            expected = [(epoch, names) for epoch, step, names in seen if (epoch, step) >= at]
            assert again[: len(expected)] == expected
            assert len(again) >= len(expected) > 0


def test_a_state_of_something_else_is_refused() -> None:
    def body(shuffle: RingShuffle, rank: int) -> None:
        shuffle.load_state_dict(shuffle.state_dict() | {"made for": "something else"})

    with pytest.raises(ConfigurationError, match=r"the state is of something else; this is batch_size=4.*shares of \[10, 10\]"):
        each(2, body)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": 4}, "step must be a number of batches, at most the 3 of a local epoch; got 4"),
        ({"step": -1}, "got -1"),
        ({"step": True}, "got True"),
        ({"epoch": -1}, "epoch must be a number of local epochs; got -1"),
        ({"epoch": "2"}, "got '2'"),
        ({"format": 2}, "no state of a RingShuffle"),
        (["epoch", "made for"], "lacks 'epoch', 'made for'"),
    ],
)
def test_a_state_that_is_none_is_refused(change: dict[str, Any] | list[str], said: str) -> None:
    def body(shuffle: RingShuffle, rank: int) -> None:
        state = shuffle.state_dict()
        kept = {key: value for key, value in state.items() if key not in change}
        shuffle.load_state_dict(kept | change if isinstance(change, dict) else kept)

    with pytest.raises(ConfigurationError, match=said):
        each(2, body)


def test_what_is_no_mapping_is_no_state() -> None:
    with pytest.raises(ConfigurationError, match="no state of a RingShuffle"):
        RingShuffle(torch.arange(8), 4).load_state_dict(None)  # type: ignore[arg-type]


def test_ranks_that_load_different_states_are_told() -> None:
    def body(shuffle: RingShuffle, rank: int) -> None:
        shuffle.load_state_dict(shuffle.state_dict() | {"step": rank})

    with pytest.raises(DisagreementError, match="position in the data: rank 0: epoch 0, batch 0; rank 1: epoch 0, batch 1"):
        each(2, body)


def test_a_loop_that_is_left_goes_on_where_it_stopped() -> None:
    def body(shuffle: RingShuffle, rank: int) -> list[int]:
        first = names_of(next(iter(shuffle)))
        return first + flat(names_of(batch) for batch in shuffle)

    assert each(2, body, shuffle=False)[1] == share(1, 10)[1].tolist()


def test_a_batch_belongs_to_the_caller() -> None:
    def body(shuffle: RingShuffle, rank: int) -> list[int]:
        for features, names in shuffle:
            features.zero_()
            names.zero_()
        return flat(names_of(batch) for batch in shuffle)

    assert each(3, body, shuffle=False)[0] == share(1, 10)[1].tolist()


@WORLDS
@pytest.mark.parametrize("total", [23, 25])
def test_a_whole_dataset_is_split_without_loss(world: int, total: int) -> None:
    def body(rank: int) -> tuple[list[int], list[int]]:
        with RingShuffle(np.arange(total), 3, seed=5, split=True) as shuffle:
            first = torch.cat(list(shuffle)).tolist()
            return first, first + [name for _ in range(world - 1) for batch in shuffle for name in batch.tolist()]

    ranks = loopback(body, world)
    assert sorted(flat(first for first, _ in ranks)) == list(range(total))
    assert all(sorted(seen) == list(range(total)) for _, seen in ranks)
    assert ranks[0][0] != list(range(len(ranks[0][0]))), "a random share"
    assert max(len(first) for first, _ in ranks) - min(len(first) for first, _ in ranks) <= 1


# -- where it is used -----------------------------------------------------------------------------------------------


def test_through_a_data_loader() -> None:
    def body(shuffle: RingShuffle, rank: int) -> list[int]:
        loader = DataLoader(shuffle, batch_size=None, num_workers=0)
        assert len(loader) == len(shuffle) == 3
        return [name for _ in range(2) for batch in loader for name in names_of(batch)]

    for rank, seen in enumerate(each(2, body, shuffle=False)):
        assert seen == share(rank, 10)[1].tolist() + share(1 - rank, 10)[1].tolist()


@MIXED
def test_a_run_through_a_data_loader_resumes_in_the_middle_of_a_local_epoch(options: dict[str, bool]) -> None:
    """With shares that three workers do not divide, at the last but one of the batches of the second epoch."""

    def straight(shuffle: RingShuffle, rank: int) -> tuple[dict[str, Any], list[list[int]]]:
        loader, seen, state = DataLoader(shuffle, batch_size=None, num_workers=0), [], {}
        for epoch in range(3):
            for step, batch in enumerate(loader):
                seen.append(names_of(batch))
                if (epoch, step) == (1, 1):
                    state, seen = shuffle.state_dict(), []
        return state, seen

    def resumed(shuffle: RingShuffle, rank: int) -> list[list[int]]:
        shuffle.load_state_dict(state)
        loader = DataLoader(shuffle, batch_size=None, num_workers=0)
        return [names_of(batch) for _ in range(2) for batch in loader]

    ranks = each(3, straight, "one apart", **options)
    state = ranks[0][0]
    assert each(3, resumed, "one apart", **options) == [seen for _, seen in ranks]


def test_a_state_of_another_number_of_ranks_is_refused() -> None:
    state = each(3, lambda shuffle, rank: shuffle.state_dict())[0]
    with pytest.raises(ConfigurationError, match=r"shares of \[10, 10, 10\].*this is .*shares of \[10, 10\]"):
        each(2, lambda shuffle, rank: shuffle.load_state_dict(state))


def test_workers_of_a_data_loader_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.data.ring_shuffle.get_worker_info", lambda: object())
    with pytest.raises(UsageError, match="num_workers=0"):
        next(iter(RingShuffle(torch.zeros(8), 4)))


def test_a_loader_that_would_put_batches_together_is_refused() -> None:
    """Its default batch_size of 1 would give one dimension more; a collate_fn of one's own may know what it does."""
    shuffle = RingShuffle(torch.arange(8), 4)
    for batch_size in (1, 2):
        with pytest.raises(UsageError, match="batch_size=None"):
            next(iter(DataLoader(shuffle, batch_size=batch_size)))
    taken = [batch.shape for batch in DataLoader(shuffle, batch_size=1, collate_fn=lambda batches: batches[0])]
    assert taken == [(4,), (4,)]
    assert [batch.shape for batch in shuffle] == [(4,), (4,)]


def test_beside_a_replica() -> None:
    """Training and shuffling keep to exchanges of their own."""

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        gossamer.replicate(model, optimizer)
        with RingShuffle(share(rank, 10), BATCH) as shuffle:
            for _ in range(3):
                for features, _ in shuffle:
                    optimizer.zero_grad()
                    model(features.float()).square().mean().backward()
                    optimizer.step()
        return model.weight.detach()

    first, *others = loopback(body, 3)
    assert all(torch.equal(first, other) for other in others)


def test_samples_travel_while_their_batch_is_in_use() -> None:
    """Sent before the loop gets the batch, waited for when it asks for the next one."""
    shuffle, events = RingShuffle(torch.arange(8), 4), []
    submit, wait = shuffle._runner.submit, shuffle._runner.wait
    shuffle._runner.submit = lambda *a: events.append("send") or submit(*a)  # type: ignore[method-assign, func-returns-value]
    shuffle._runner.wait = lambda *a: events.append("wait") or wait(*a)  # type: ignore[method-assign, func-returns-value]
    for _ in range(2):
        for _ in shuffle:
            events.append("use")
    assert events == ["send", "use", "wait"] * 3 + ["send", "use"]


def test_a_neighbour_may_fall_some_batches_behind_before_anyone_waits() -> None:
    """What arrives is needed in the next local epoch only."""
    shuffle, applied = RingShuffle(torch.arange(40), 4, shuffle=False), []
    wait = shuffle._runner.wait
    shuffle._runner.arrived = lambda ticket: False  # type: ignore[method-assign]
    shuffle._runner.wait = lambda *a: applied.append(step) or wait(*a)  # type: ignore[method-assign, func-returns-value]
    for step, batch in enumerate(shuffle):
        assert len(shuffle._pending) <= UNDER_WAY
        assert batch.tolist() == list(range(4 * step, 4 * step + 4))
    assert applied == [UNDER_WAY - 1, *range(UNDER_WAY, 9)]
    assert shuffle.samples().sort().values.tolist() == list(range(40))
    assert shuffle.waited_seconds > 0


def test_after_its_end_a_shuffle_says_so() -> None:
    shuffle = RingShuffle(torch.arange(8), 4)
    next(iter(shuffle))
    shuffle.close()
    shuffle.close()
    with pytest.raises(UsageError, match="closed"):
        next(iter(shuffle))


def test_who_does_not_come_is_told_where_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("gossamer.comm.runner.Runner.agree_on_opening", lambda self, what, devices=(): said.append(what))
    RingShuffle(torch.arange(8), 4)
    assert said == ["gossamer.data.RingShuffle()"]


# -- what is refused ------------------------------------------------------------------------------------------------


def refused(make: Callable[[int], Any], said: str, world: int = 2, error: type[Exception] = ConfigurationError) -> None:
    """Every rank is told, or stopped by one that is."""
    with pytest.raises(error, match=said):
        loopback(make, world)


def test_an_empty_share() -> None:
    refused(lambda rank: RingShuffle(torch.zeros(8 * (rank == 0)), 4), "rank 1 holds no sample")
    refused(lambda rank: RingShuffle([torch.zeros(2)] * 8 * (rank == 0), 2, deal=True), "rank 1 holds no sample")


def test_a_share_smaller_than_a_batch() -> None:
    refused(lambda rank: RingShuffle(torch.zeros(8 - 5 * rank), 4), "rank 1 holds 3 samples, fewer than one batch of 4")


def test_shares_that_differ_too_much() -> None:
    refused(
        lambda rank: RingShuffle(torch.zeros(5 + 45 * rank), 4), "rank 0 holds 5 samples, but the 50 of rank 1 make 13 batches"
    )


def test_samples_that_differ_between_ranks() -> None:
    dtypes = (torch.float32, torch.float64)
    said = r"ranks differ in samples: rank 0: float32\[3\]; rank 1: float64\[3\]"
    refused(lambda rank: RingShuffle(torch.zeros(8, 3, dtype=dtypes[rank]), 4), said, error=DisagreementError)
    said = r"rank 0: float32\[3\]; rank 1: float32\[4\]"
    refused(lambda rank: RingShuffle(torch.zeros(8, 3 + rank), 4), said, error=DisagreementError)
    said = "ranks differ in"
    whole = (lambda x: (x, x), lambda x: {"a": x, "b": x})
    refused(lambda rank: RingShuffle(whole[rank](torch.zeros(8)), 4), said, error=DisagreementError)


def test_options_that_differ_between_ranks() -> None:
    refused(lambda rank: RingShuffle(torch.zeros(8), 2 + rank), "batch_size=2.*batch_size=3", error=DisagreementError)
    refused(lambda rank: RingShuffle(torch.zeros(8), 2, seed=rank), "seed=0.*seed=1", error=DisagreementError)
    refused(lambda rank: RingShuffle(torch.zeros(8 + rank), 2, split=True), "8 samples.*9 samples", error=DisagreementError)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True])
def test_a_batch_size_that_is_none(batch_size: Any) -> None:
    with pytest.raises(ConfigurationError, match="batch_size must be a positive integer"):
        RingShuffle(torch.zeros(8), batch_size)


@pytest.mark.parametrize("option", ["shuffle", "mix", "split", "deal", "drop_last"])
def test_an_option_that_is_no_truth_value(option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} must be True or False; got 'yes'"):
        RingShuffle(torch.zeros(8), 4, **{option: "yes"})


@pytest.mark.parametrize("seed", [1.5, "a", None, True])
def test_a_seed_that_is_none(seed: Any) -> None:
    with pytest.raises(ConfigurationError, match="seed must be an integer"):
        RingShuffle(torch.zeros(8), 4, seed=seed)
