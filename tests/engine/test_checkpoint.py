"""A state that was saved by another number of ranks, or with other settings: nothing that was not sent yet is lost."""

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    AllReduce,
    ChunkSparse,
    DiLoCo,
    EagerDiLoCo,
    Gossip,
    Hierarchical,
    LocalSGD,
    PowerSGD,
    ScatterReduce,
    SparseLoCo,
    after,
    loopback,
    streaming_diloco,
)
from gossamer.algorithms import Algorithm
from gossamer.codecs import Quantize, Sign
from gossamer.engine.checkpoint import _entries
from gossamer.engine.other_ranks import means
from gossamer.errors import ConfigurationError


def training(algorithm: Algorithm) -> tuple[nn.Module, torch.optim.Optimizer, gossamer.Replica]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, gossamer.replicate(model, optimizer, algorithm)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def saved(algorithm: Algorithm, world: int) -> dict[str, Any]:
    """The merged states of ``world`` ranks after three steps."""

    def run(rank: int) -> dict[str, Any]:
        model, optimizer, replica = training(algorithm)
        for number in range(3):
            step(model, optimizer, 10 * number + rank)
        state = copy.deepcopy(replica.state_dict())
        replica.close()
        return state

    merged: dict[str, Any] = {}
    for state in loopback(run, world):
        merged |= state
    return merged


def reloaded(algorithm: Algorithm, state: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """What each of ``world`` ranks holds after loading ``state``; then they train on."""

    def run(rank: int) -> dict[str, Any]:
        model, optimizer, replica = training(algorithm)
        replica.load_state_dict(state)
        mine = copy.deepcopy(replica.state_dict())[f"rank{rank}"][0]
        step(model, optimizer, rank)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        replica.close()
        return mine

    return loopback(run, world)


def mean(entries: list[dict[str, dict[str, Tensor]]], key: str, name: str) -> Tensor:
    held = [entry[key][name].double() for entry in entries if key in entry]
    return torch.stack(held).sum(0) / len(entries)


algorithms = pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        (ScatterReduce(codec=Quantize(bits=2), residual="fp32"), ["residual"]),
        (ChunkSparse(density=0.3, chunk=16, momentum_correction=False, residual="fp32"), ["residual"]),
        (PowerSGD(rank=1, residual="fp32"), ["residual"]),
    ],
)


@algorithms
@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4), (3, 5), (5, 3), (3, 1)])
def test_the_mean_of_what_was_not_sent_stays(algorithm: Algorithm, keys: list[str], before: int, now: int) -> None:
    state = saved(algorithm, before)
    with pytest.warns(UserWarning, match=f"a state of {before} ranks is loaded by {now}"):
        after = reloaded(algorithm, state, now)
    for key in keys:
        for name, had in state["rank0"][0][key].items():
            kept, expected = mean(after, key, name), mean([state[f"rank{rank}"][0] for rank in range(before)], key, name)
            assert kept.shape == had.shape
            torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:the saved run had other settings")
@pytest.mark.parametrize(("before", "now", "per_machine"), [(8, 3, 2), (4, 5, 2), (6, 2, 2), (8, 8, 4), (6, 4, 1), (8, 4, 4)])
def test_leaders_of_before_still_send_their_residuals(before: int, now: int, per_machine: int) -> None:
    """Whichever rank leads a machine now, of as many workers or not: all residuals, in one exact step at the next change."""

    def of(per_machine: int) -> Algorithm:
        outer = ScatterReduce(codec=Quantize(bits=2), residual="fp32")
        return after(4, AllReduce(), before=Hierarchical(outer, ranks_per_node=per_machine))

    algorithm, state = of(per_machine), saved(of(2), before)
    unsent = {
        name: 2 * sum(state[f"rank{rank}"][0][key][name] for rank in range(before) if key in state[f"rank{rank}"][0]) / before
        for key, tensors in state["rank0"][0].items()
        if key.endswith("outer: residual")
        for name in tensors
    }
    assert unsent

    def run(rank: int) -> dict[str, Tensor]:
        model, optimizer, replica = training(algorithm)
        replica.load_state_dict(state)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(3):
            optimizer.zero_grad()
            sum(p.sum() * 0 for p in model.parameters()).backward()
            optimizer.step()
        replica.close()
        return {name: (start[name] - p.detach()) / 0.05 for name, p in model.named_parameters()}

    with pytest.warns(UserWarning, match="shared out"):
        moved = loopback(run, now)[0]
    for name, expected in unsent.items():
        torch.testing.assert_close(moved[name], expected, rtol=1e-4, atol=1e-6)


def test_an_exchange_of_weights_begins_anew() -> None:
    state = saved(Gossip(), 3)
    with pytest.warns(UserWarning, match="begins anew"):
        assert all(not entry for entry in reloaded(Gossip(), state, 2))


def outer_steps(
    algorithm: Algorithm, world: int, state: dict[str, Any] | None, average: Tensor | None, optimizers: int
) -> list[Any]:
    """Of each rank: eight steps of training, its weights and its state; or with a ``state``, from their ``average``, six steps
    without a gradient, and the weights after each. ``optimizers``: among how many the parameters are dealt out."""

    def run(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        parameters = list(model.parameters())
        own = [torch.optim.SGD(parameters[number::optimizers], lr=0.1) for number in range(optimizers)]
        replica = gossamer.replicate(model, own, algorithm)
        seen = []
        if state is not None:
            nn.utils.vector_to_parameters(average.clone(), model.parameters())
            replica.load_state_dict(state)
        for number in range(8 if state is None else 6):
            inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)
            model.zero_grad()
            ((model(inputs).square().mean() + model.bias.sum()) * (state is None)).backward()
            for optimizer in own:
                optimizer.step()
            seen.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        found = copy.deepcopy(replica.state_dict()) if state is None else {}
        replica.close()
        return torch.stack(seen), found

    return loopback(run, world)


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(dense=0, every=2, delay=0),
        DiLoCo(dense=0, every=3, delay=0),
        after(2, DiLoCo(dense=0, every=2, delay=0)),
        DiLoCo(dense=0, every=2, delay=0, averaging=Gossip(wire="fp32")),
        DiLoCo(dense=0, every=2, delay=0, averaging=ScatterReduce(residual="fp32", gather_below=0)),
        SparseLoCo(dense=0, every=2, delay=0),
        Hierarchical(DiLoCo(dense=0, every=2, delay=0), ranks_per_node=2),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:rank .. the model has not the weights")
@pytest.mark.parametrize(("now", "optimizers"), [(3, 1), (6, 1), (3, 2)])
def test_outer_weights_and_momentum_go_on_with_another_number_of_ranks(algorithm: Algorithm, now: int, optimizers: int) -> None:
    """Whether they left in the middle of a period or not: the mean goes on by the outer momentum as with as many ranks."""
    trained = outer_steps(algorithm, 4, None, None, optimizers)
    merged = {key: value for _, state in trained for key, value in state.items()}
    average = torch.stack([seen[-1] for seen, _ in trained]).mean(0)
    with pytest.warns(UserWarning, match="outer weights and momenta become their means"):
        found = torch.stack([seen for seen, _ in outer_steps(algorithm, now, merged, average, optimizers)]).mean(0)
    kept = torch.stack([seen for seen, _ in outer_steps(algorithm, 4, merged, average, optimizers)]).mean(0)
    assert (kept[-1] - average).abs().max() > 1e-2, "nothing goes on"
    bound = 1e-2 if isinstance(algorithm, SparseLoCo) or "Scatter" in repr(algorithm) else 1e-9
    torch.testing.assert_close(found, kept, rtol=0, atol=bound)


def alike(algorithm: Algorithm, world: int, states: Any, steps: int, models: int | None = None) -> tuple[list[Any], Tensor]:
    """The states of workers that learn the same, and of the first its weight after each step; ``states``: from which they go
    on, of as many ranks or of others, with the models of all of these or of so many."""

    def run(rank: int) -> tuple[Any, Tensor]:
        model = nn.Linear(4, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = gossamer.replicate(model, optimizer, algorithm)
        if states:
            model.load_state_dict(states[rank % (models or len(states))][0])
            replica.load_state_dict({key: value for _, state in states for key, value in state.items()})
        seen = []
        for _ in range(steps):
            if algorithm.traits.by_samples:
                replica.weigh(2 + rank % 2)
            optimizer.zero_grad()
            model(torch.ones(1, 4, dtype=torch.float64)).sum().neg().backward()
            optimizer.step()
            seen.append(float(model.weight.detach()[0, 0]))
        state = copy.deepcopy((model.state_dict(), replica.state_dict()))
        replica.close()
        return state, torch.tensor(seen)

    found = loopback(run, world)
    return [state for state, _ in found], found[0][1]


@pytest.mark.parametrize("at", [20, 21, 24])
@pytest.mark.parametrize(
    "algorithm",
    [
        LocalSGD(every=5, dense=0),
        DiLoCo(every=5, dense=0),
        after(3, DiLoCo(every=5)),
        SparseLoCo(every=5, dense=0),
        streaming_diloco(every=8, fragments=2, delay=3, dense=0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("now", [3, 4])
@pytest.mark.filterwarnings("ignore:a state of 2 ranks")
def test_an_outer_step_that_is_on_its_way_goes_on_with_another_number_of_ranks(algorithm: Algorithm, at: int, now: int) -> None:
    """Where all workers learn the same, others' number makes no difference, whatever was under way."""
    states, _ = alike(algorithm, 2, None, at)
    kept, found = (alike(algorithm, world, states, 16)[1] for world in (2, now))
    bound = 0.02 if isinstance(algorithm, SparseLoCo) else 1e-6  # what is cut off depends on who has how many samples
    torch.testing.assert_close(found, kept, rtol=0, atol=bound)


@pytest.mark.parametrize(("at", "now"), [(10, 8), (11, 3), (11, 2)])
@pytest.mark.filterwarnings("ignore:a state of 4 ranks")
def test_what_others_learned_in_the_last_period_enters_with_another_number_of_ranks(at: int, now: int) -> None:
    """Of p workers that learn the same all but a p-th of a period comes a period later, before and afterwards."""
    every, later = 4, 24
    algorithm = EagerDiLoCo(every=every, dense=0, rate=1.0, momentum=0.0)
    states, _ = alike(algorithm, 4, None, at)
    kept, found = (alike(algorithm, world, states, later)[1][-1] for world in (4, now))
    assert float(found - kept) == pytest.approx(0.01 * every * (1 / now - 1 / 4), abs=1e-6)


@pytest.mark.parametrize("algorithm", [LocalSGD(every=4, dense=0), Gossip(), DiLoCo(every=4, dense=0)], ids=repr)
@pytest.mark.parametrize(("before", "per_node", "now", "later"), [(4, 1, 4, 2), (4, 2, 4, 4), (3, 2, 6, 2), (5, 2, 7, 2)])
@pytest.mark.filterwarnings("ignore:a state of . ranks")
@pytest.mark.filterwarnings("ignore:the saved run had other settings")
@pytest.mark.filterwarnings("ignore:rank .. the model has not the weights")
def test_workers_of_a_node_are_equal_where_they_were_in_several(
    algorithm: Algorithm, before: int, per_node: int, now: int, later: int
) -> None:
    """With the models and the optimizers of the old ranks, whose mean is kept."""

    def run(rank: int, nodes: int, states: list[Any] | None) -> tuple[Any, Tensor]:
        model = nn.Linear(4, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        if states is not None:
            optimizer.load_state_dict(copy.deepcopy(states[rank % before][1]))
        replica = gossamer.replicate(model, optimizer, Hierarchical(algorithm, ranks_per_node=nodes))
        if states is not None:
            model.load_state_dict(states[rank % before][0])
            replica.load_state_dict({key: value for *_, state in states for key, value in state.items()})
        seen = [model.weight.detach().clone()]
        for number in range(7):
            optimizer.zero_grad()
            model(torch.full((1, 4), 1.0 + rank + number, dtype=torch.float64)).sum().backward()
            optimizer.step()
            seen.append(model.weight.detach().clone())
        found = copy.deepcopy((model.state_dict(), optimizer.state_dict(), replica.state_dict()))
        replica.close()
        return found, torch.stack(seen)

    states = [state for state, _ in loopback(lambda rank: run(rank, per_node, None), before)]
    found = torch.stack([seen for _, seen in loopback(lambda rank: run(rank, later, states), now)])
    for first in range(0, now, later):
        assert all(torch.equal(worker, found[first]) for worker in found[first : first + later])
    if before == now and isinstance(algorithm, Gossip):
        mean = torch.stack([state[0]["weight"] for state in states]).mean(0)
        assert (found[:, 0].mean(0) - mean).abs().max() < 0.02, "what was under way is a difference of messages of 16 bits"


@pytest.mark.parametrize("algorithm", [LocalSGD(every=5, dense=0), LocalSGD(every=5, dense=6)], ids=repr)
@pytest.mark.parametrize(("at", "now", "models"), [(3, 1, None), (8, 1, None), (8, 4, 1), (8, 4, None)])
@pytest.mark.filterwarnings("ignore:a state of . ranks")
def test_samples_count_on_all_of_another_number_of_ranks_or_on_none(
    algorithm: Algorithm, at: int, now: int, models: int | None
) -> None:
    """Also where they do not take the models of the ranks whose state it is, and where one is alone."""
    states, _ = alike(algorithm, 2, None, at)
    _, seen = alike(algorithm, now, states, 12, models)
    torch.testing.assert_close(seen, 0.01 * torch.arange(at + 1, at + 13), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(every=5, dense=0),
        DiLoCo(every=5, dense=0, averaging=Gossip()),
        EagerDiLoCo(every=5, dense=0),
        SparseLoCo(every=5, dense=0),
        streaming_diloco(every=4, fragments=2, delay=2, dense=0),
        Hierarchical(DiLoCo(every=5, dense=0), ranks_per_node=2),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:a state of . ranks")
def test_what_a_worker_learned_alone_is_no_outer_delta(algorithm: Algorithm) -> None:
    """It has no peers for a while, and takes no outer steps; with peers again they begin where it is then."""
    per_node = 2 if isinstance(algorithm, Hierarchical) else 1
    states, _ = alike(algorithm, 2 * per_node, None, 20)
    states, alone = alike(algorithm, per_node, states, 100)
    _, seen = alike(algorithm, 2 * per_node, states, 16)
    assert alone[-1] - alone[0] > 0.9
    assert 0.1 < seen[-1] - alone[-1] < 0.5


def test_the_same_number_of_ranks_needs_no_warning() -> None:
    state = saved(ScatterReduce(), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reloaded(ScatterReduce(), state, 2)


def test_missing_entries_are_named() -> None:
    state = saved(ScatterReduce(), 3)
    del state["rank1"]
    with pytest.raises(ConfigurationError, match=r"saved by 3 ranks, this run has 2; it holds no entry for rank 1: merge"):
        reloaded(ScatterReduce(), state, 2)


@pytest.mark.parametrize(("before", "now"), [(2, 4), (3, 2)])
def test_momentum_of_means_stays_the_same_on_all_ranks(before: int, now: int) -> None:
    """That of vectors, whose mean is exact, is used by each rank as it is."""
    algorithm = ChunkSparse(density=0.3, chunk=16, momentum_correction=True)

    def run(rank: int, state: dict[str, Any] | None) -> tuple[dict[str, Any], list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, algorithm)
        if state is not None:
            replica.load_state_dict(state)
        for number in range(3):
            step(model, optimizer, 10 * number + rank)
        return copy.deepcopy(replica.state_dict()), torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()

    merged: dict[str, Any] = {}
    for state, _ in loopback(lambda rank: run(rank, None), before):
        merged |= state
    with pytest.warns(UserWarning, match="shared out"):
        found = loopback(lambda rank: run(rank, merged), now)
    assert all(weights == found[0][1] for _, weights in found)
    biases = [name for name in merged["rank0"][0]["momentum"] if name.endswith("bias")]
    assert biases
    for name in biases:
        held = [state[f"rank{rank}"][0]["momentum"][name] for rank, (state, _) in enumerate(found)]
        assert all(torch.equal(held[0], other) for other in held)


OTHERS = [
    (ScatterReduce(codec=Quantize(bits=2)), ScatterReduce(codec=Quantize(bits=4), bucket_bytes=64), "codec.bits"),
    (ScatterReduce(codec=Quantize(bits=2)), ScatterReduce(codec=Sign(), exact_vectors=False), "codec is Sign"),
    (PowerSGD(rank=1), PowerSGD(rank=2, bucket_bytes=64), "rank is 2, was 1"),
    (ChunkSparse(density=0.3, chunk=16), ChunkSparse(density=0.5, chunk=8, bucket_bytes=64), "chunk is 8, was 16"),
]


@pytest.mark.parametrize(("before", "now", "told"), OTHERS, ids=[told for _, _, told in OTHERS])
def test_with_other_settings_what_is_unsent_is_kept(before: Algorithm, now: Algorithm, told: str) -> None:
    state = saved(before, 2)
    with pytest.warns(UserWarning, match=f"other settings.*{told}.*what was not sent yet is kept"):
        loaded = reloaded(now, state, 2)
    for rank, found in enumerate(loaded):
        for name, unsent in state[f"rank{rank}"][0]["residual"].items():
            assert torch.equal(found["residual"][name], unsent)


def test_with_other_settings_buckets_are_cut_anew() -> None:
    state = saved(ScatterReduce(), 2)

    def run(rank: int) -> list[int]:
        _, _, replica = training(ScatterReduce(bucket_bytes=64))
        replica.load_state_dict(state)
        assert replica._gradients is not None
        return [len(replica._gradients.exchange.buckets), len(state["plan"]["buckets"])]

    with pytest.warns(UserWarning, match="other settings"):
        (cut, before), _ = loopback(run, 2)
    assert cut > before


@pytest.mark.filterwarnings("ignore:rank.*the model has not the weights")
def test_with_other_settings_an_exchange_of_weights_begins_anew() -> None:
    state = saved(Gossip(), 3)
    with pytest.warns(UserWarning, match="other settings.*every is 2, was 1"):
        assert all(not entry for entry in reloaded(Gossip(every=2), state, 3))


def test_what_the_saved_version_did_not_have_was_as_by_default() -> None:
    state = saved(PowerSGD(), 2)
    state["algorithm"] = state["algorithm"].replace(", residual='bf16'", "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reloaded(PowerSGD(), state, 2)


def test_a_residual_goes_on_in_as_many_bits_as_the_new_run_has_for_it() -> None:
    for before, now, kept in (("fp32", "bf16", torch.bfloat16), ("bf16", "fp32", torch.float32)):
        state = saved(PowerSGD(residual=before), 2)

        def run(rank: int, state: Any = state, now: Any = now) -> tuple[Any, Any]:
            model, optimizer, replica = training(PowerSGD(residual=now))
            replica.load_state_dict(state)
            loaded = copy.deepcopy(replica.state_dict())[f"rank{rank}"][0]["residual"]
            step(model, optimizer, rank)
            later = copy.deepcopy(replica.state_dict())[f"rank{rank}"][0]["residual"]
            replica.close()
            return loaded, later

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = loopback(run, 2)
        for rank, (loaded, later) in enumerate(found):
            assert all(torch.equal(loaded[name], had) for name, had in state[f"rank{rank}"][0]["residual"].items())
            assert {tensor.dtype for name, tensor in later.items() if "weight" in name} == {kept}


def test_a_run_that_was_switched_to_an_outer_loop_is_resumed_without_its_dense_start() -> None:
    def run(rank: int) -> None:
        model, optimizer, replica = training(AllReduce())
        replica.switch(LocalSGD(every=8))
        step(model, optimizer, rank)
        states = copy.deepcopy((model.state_dict(), replica.state_dict()))
        replica.close()
        for dense in (None, 0):
            model, optimizer, replica = training(LocalSGD(every=8, dense=dense))
            model.load_state_dict(states[0])
            if dense is None:
                with pytest.raises(ConfigurationError, match=r"without a dense start, as .* that with dense=0"):
                    replica.load_state_dict(states[1])
            else:
                replica.load_state_dict(states[1])
            replica.close()

    loopback(run, 2)


@pytest.mark.parametrize("other", [ChunkSparse(), Hierarchical(ScatterReduce()), after(2, ScatterReduce()), Gossip()], ids=repr)
def test_other_algorithms_are_refused(other: Algorithm) -> None:
    state = saved(ScatterReduce(), 2)
    with pytest.raises(ConfigurationError, match=r"was saved by ScatterReduce\(.*give replicate\(\) the algorithm of"):
        reloaded(other, state, 2)


@pytest.mark.parametrize("algorithm", [ChunkSparse(density=0.3, chunk=16), PowerSGD(rank=1)], ids=repr)
@pytest.mark.parametrize(("before", "now", "per_machine"), [(3, 5, 2), (5, 3, 2), (6, 4, 3)])
def test_other_leaders_go_on_as_one(algorithm: Algorithm, before: int, now: int, per_machine: int) -> None:
    """Who speaks for a machine now may have spoken for none, and remembers nothing that the others could share."""
    made = Hierarchical(algorithm, ranks_per_node=per_machine)
    state = saved(made, before)
    with pytest.warns(UserWarning, match="shared out"):
        reloaded(made, state, now)


def test_as_many_ranks_on_other_machines_begin_anew_what_machines_share() -> None:
    held = {"residual": {"weight": torch.ones(2)}}
    state = {
        "world": 2,
        "machines": repr(((0, 1),)),
        "algorithm": repr(Hierarchical(ChunkSparse())),
        "rank0": (held, [{"outer: chosen chunks": {}}], ""),
    }
    runner: Any = SimpleNamespace(world=2, rank=0, nodes=((0,), (1,)))
    gradients: Any = SimpleNamespace()
    with pytest.warns(UserWarning, match="2 ranks is loaded by ranks on other machines"):
        own, extras = _entries(state, runner, Hierarchical(ChunkSparse()), gradients, [])
    assert torch.equal(own["residual"]["weight"], torch.ones(2))
    assert extras == [{}]
    runner.nodes = ((0, 1),)
    assert _entries(state, runner, Hierarchical(ChunkSparse()), gradients, [])[1] is state["rank0"][1]


def test_a_plan_with_several_dtypes_is_restored() -> None:
    """The numbers of use have the dtype of their bucket, whichever parameter is defined last."""

    def run(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.ModuleDict({"in": nn.Linear(8, 8).bfloat16(), "norm": nn.LayerNorm(8)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=16))

        def train() -> None:
            for number in range(3):
                optimizer.zero_grad()
                inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(3 * number + rank)).bfloat16()
                model["norm"](model["in"](inputs).float()).pow(3).mean().backward()
                optimizer.step()

        train()
        state, weights = copy.deepcopy(replica.state_dict()), copy.deepcopy(model.state_dict())
        replica.close()
        model.load_state_dict(weights)
        replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=16))
        replica.load_state_dict(state)
        train()
        replica.close()

    loopback(run, 2)


def test_momenta_that_only_leaders_of_nodes_have_keep_their_size() -> None:
    held = {"outer: momentum": {"bias": torch.full((2,), 3.0)}, "residual": {"weight": torch.ones(1)}}
    found = means([held, {}, held, {}])
    assert found.keys() == {"outer: momentum"}
    assert torch.equal(found["outer: momentum"]["bias"], torch.full((2,), 3.0))
