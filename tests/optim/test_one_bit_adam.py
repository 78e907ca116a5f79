"""1-bit Adam: AdamW at first, then compressed momenta under a frozen variance; all ranks alike, resumable, convergent."""

import copy
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from contracts.cases import same_bits, weights
from gossamer import AllReduce, loopback
from gossamer.codecs.sign import Sign
from gossamer.errors import ConfigurationError, UsageError
from gossamer.optim import MasterWeights, OneBitAdam, QAdam

CUTS = (slice(None, 30), slice(-30, None))


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))


def data(step: int, rank: int, size: int = 16) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(size, 12, generator=source)
    return inputs, (inputs[:, :3] * 2).sin() + 0.1 * torch.randn(size, 3, generator=source)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs, targets = data(step, rank)
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(world: int, steps: int, kind: Any = OneBitAdam, **options: Any) -> list[tuple[Tensor, list[float], Any]]:
    def body(rank: int) -> tuple[Tensor, list[float], Any]:
        model = make_model(rank)
        optimizer = kind(model.parameters(), lr=1e-2, **options)
        replica = gossamer.replicate(model, optimizer)
        losses = train(model, optimizer, rank, range(steps))
        counted = replica.metrics()["bytes_sent"]
        replica.close()
        return weights(model), losses, (optimizer.param_groups[0].get("frozen_at"), counted)

    return loopback(body, world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_warming_up_it_is_adamw(world: int) -> None:
    """Adam on the mean gradient, up to the order of operations."""

    def reference(rank: int) -> Tensor:
        model = make_model(rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        replica = gossamer.replicate(model, optimizer, AllReduce())
        for step in range(20):
            inputs, targets = data(step, rank)
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
        replica.close()
        return weights(model)

    ours = run(world, 20, warmup=1000, weight_decay=0.1)
    # Gradients here are far below the limit of clipping, which acts before the average in one and after it in the other.
    for (mine, _, _), theirs in zip(ours, loopback(reference, world), strict=True):
        assert (mine - theirs).abs().max() < 2e-5


@pytest.mark.parametrize("kind", [OneBitAdam, QAdam])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_stay_bit_identical_in_both_phases(kind: Any, world: int) -> None:
    runs = run(world, 30, kind, warmup=10)
    assert all(same_bits(mine, runs[0][0]) for mine, _, _ in runs)
    assert all(frozen == 10 for _, _, (frozen, _) in runs)
    assert runs[0][0].isfinite().all()


@pytest.mark.parametrize("kind", [OneBitAdam, QAdam])
def test_compressed_momenta_learn_as_exact_ones(kind: Any) -> None:
    compressed = run(4, 300, kind, warmup=60)
    exact = run(4, 300, kind, warmup=1000)
    first, last = ([sum(sum(losses[cut]) for _, losses, _ in runs) for runs in (compressed, exact)] for cut in CUTS)
    assert last[1] < 0.15 * first[1]
    assert last[0] < 0.2 * first[0]


def test_the_second_phase_sends_signs() -> None:
    """480 + 120 weights as one bit each, scales, and 43 biases exactly."""
    short, long = (run(2, steps, warmup=10)[0][2][1] for steps in (20, 30))
    exact = run(2, 30, warmup=100)[0][2][1] / 30
    assert 0 < (long - short) / 10 < 0.35 * exact


def test_the_variance_is_frozen_when_it_is_stable() -> None:
    (_, _, (frozen, _)), *_ = run(2, 150, interval=10, tolerance=0.25)
    assert frozen is not None
    assert frozen >= 20
    assert frozen % 10 == 0
    (_, _, (never, _)), *_ = run(2, 30, interval=10, tolerance=0.0)
    assert never is None


@pytest.mark.parametrize("saved_at", [5, 15])
def test_a_run_resumes_bit_identically(saved_at: int) -> None:
    """Saved in either phase: moments in the optimizer's state, what was not sent in the replica's."""

    def through(rank: int) -> tuple[Tensor, Any]:
        model = make_model()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, warmup=10)
        replica = gossamer.replicate(model, optimizer)
        train(model, optimizer, rank, range(saved_at))
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), replica.state_dict()])
        train(model, optimizer, rank, range(saved_at, 25))
        replica.close()
        return weights(model), saved

    runs = loopback(through, 3)

    def resumed(rank: int) -> Tensor:
        model = make_model(5)
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, warmup=10)
        replica = gossamer.replicate(model, optimizer)
        for part, saved in zip((model, optimizer, replica), runs[rank][1], strict=True):
            part.load_state_dict(saved)
        train(model, optimizer, rank, range(saved_at, 25))
        replica.close()
        return weights(model)

    for (whole, _), again in zip(runs, loopback(resumed, 3), strict=True):
        assert same_bits(whole, again)


@pytest.mark.parametrize("kind", [OneBitAdam, QAdam])
def test_memory_of_the_warm_up_ends_with_it(kind: Any) -> None:
    """Its buckets are as large as the model; a run that goes back to the warm-up gets them again."""

    def body(rank: int) -> None:
        model = make_model()
        optimizer = kind(model.parameters(), lr=1e-2, warmup=10)
        replica = gossamer.replicate(model, optimizer)
        parts = (model, optimizer, replica)
        train(model, optimizer, rank, range(5))
        saved = copy.deepcopy([part.state_dict() for part in parts])
        exact = [weakref.ref(bucket) for bucket in replica._parts.links[0]._exact.buckets]
        train(model, optimizer, rank, range(5, 15))
        once, ratio = weights(model).clone(), replica.metrics()["compression_ratio"]
        assert exact
        assert not any(bucket() for bucket in exact)
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)
        train(model, optimizer, rank, range(5, 15))
        assert same_bits(weights(model), once)
        assert ratio > 1  # what was exchanged exactly before is counted, too
        assert replica.metrics()["compression_ratio"] == pytest.approx(ratio, rel=0.2)
        replica.close()

    loopback(body, 2)


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 3)])
def test_what_was_not_sent_is_shared_out_among_other_numbers_of_ranks(before: int, now: int) -> None:
    def first(rank: int) -> list[dict[str, Any]]:
        model = make_model()
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, warmup=10, residual="fp32")
        replica = gossamer.replicate(model, optimizer)
        train(model, optimizer, rank, range(15))
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), replica.state_dict()])
        replica.close()
        return saved

    states = loopback(first, before)
    merged = {key: value for saved in states for key, value in saved[2].items()}

    def second(rank: int) -> tuple[Any, Tensor]:
        model = make_model(5)
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, warmup=10, residual="fp32")
        replica = gossamer.replicate(model, optimizer)
        for part, saved in zip((model, optimizer, replica), (*states[0][:2], merged), strict=True):
            part.load_state_dict(saved)
        unsent = copy.deepcopy(replica.state_dict()[f"rank{rank}"][0].get("residual", {}))  # a new rank has no residual
        train(model, optimizer, rank, range(15, 20))
        replica.close()
        return unsent, weights(model)

    with pytest.warns(UserWarning, match="shared out"):
        found = loopback(second, now)
    assert all(same_bits(each, found[0][1]) for _, each in found)
    for name in found[0][0]:
        kept = sum(unsent[name] for unsent, _ in found if unsent) / now
        had = sum(merged[f"rank{rank}"][0]["residual"][name] for rank in range(before)) / before
        torch.testing.assert_close(kept, had, rtol=1e-5, atol=1e-7)
        assert had.any() == (had.ndim > 1)


def test_alone_it_is_what_it_is_in_a_world_of_one() -> None:
    model = make_model(0)
    train(model, OneBitAdam(model.parameters(), lr=1e-2, warmup=10), 0, range(30))
    assert same_bits(weights(model), run(1, 30, warmup=10)[0][0])


def test_a_parameter_without_gradient_stays() -> None:
    model = make_model()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, 3)))
    optimizer = OneBitAdam(model.parameters(), lr=1e-2, weight_decay=0.5, warmup=3)
    train(model, optimizer, 0, range(6))
    assert torch.equal(model.unused, torch.ones(3, 3))


def test_freezing_a_parameter_later_is_refused() -> None:
    """What follows would be exchanged under other numbers."""

    def body(rank: int) -> None:
        model = make_model()
        optimizer = OneBitAdam(model.parameters(), warmup=3)
        gossamer.replicate(model, optimizer)
        next(model.parameters()).requires_grad_(False)
        sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        with pytest.raises(gossamer.UsageError, match="was frozen, with an optimizer that communicates by itself"):
            optimizer.step()

    gossamer.loopback(body, 2)


@pytest.mark.parametrize("kind", [OneBitAdam, QAdam])
def test_what_was_kept_back_of_a_momentum_stays_unsent_while_nobody_uses_its_parameter(kind: Any) -> None:
    """Its momentum stays, too: nothing of what is sent meanwhile is applied."""

    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("always", "sometimes")})
        optimizer = kind(model.parameters(), lr=1e-3, warmup=2, residual="fp32")
        replica = gossamer.replicate(model, optimizer)
        unsent = []
        for step in range(9):
            optimizer.zero_grad()
            used = ["always", "sometimes"] if step < 6 else ["always"]
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            sum(model[name](inputs).square().sum() for name in used).backward()
            optimizer.step()
            unsent.append(
                replica.state_dict()[f"rank{rank}"][0].get("residual", {}).get("sometimes.weight", torch.zeros(8, 8)).clone()
            )
        return unsent[5:]

    before, *later = (torch.stack(each).sum(0) for each in zip(*loopback(body, 3), strict=True))
    assert before.abs().max() > 1e-4
    for after in later:
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)


def test_options_of_a_group_are_checked_too() -> None:
    with pytest.raises(ConfigurationError, match="lr must be at least 0"):
        OneBitAdam([{"params": list(make_model().parameters()), "lr": -1.0}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup": 0}, "warmup must be a number of steps"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"betas": (0.9, 1.0)}, "betas must be at least 0 and below 1"),
        ({"interval": 0}, "interval must be"),
    ],
)
def test_bad_options_are_named(options: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        OneBitAdam(make_model().parameters(), **options)


def test_it_goes_without_an_algorithm() -> None:
    model = make_model()
    optimizer = OneBitAdam(model.parameters(), codec=Sign())
    with pytest.raises(ConfigurationError, match="takes no algorithm"):
        gossamer.replicate(model, optimizer, AllReduce())
    two = [OneBitAdam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    with pytest.raises(ConfigurationError, match="all optimizers must, or none"):
        gossamer.replicate(model, two)
    with pytest.raises(ConfigurationError, match="MasterWeights"):
        MasterWeights(OneBitAdam, model.parameters())


@pytest.mark.parametrize("kind", [OneBitAdam, QAdam])
@pytest.mark.parametrize("counts", [(8, 20, 14), (0, 3, 15), (12, 12, 12)])
def test_ranks_may_have_different_numbers_of_batches(kind: Any, counts: tuple[int, ...]) -> None:
    """As if a rank that has ended went on with zero gradients, in both phases; afterwards all can go on together."""

    def body(rank: int, joined: bool) -> Tensor:
        model = make_model()
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1, warmup=10)
        replica = gossamer.replicate(model, optimizer)
        with replica.join() if joined else nullcontext():
            train(model, optimizer, rank, range(counts[rank]))
            for _ in () if joined else range(max(counts) - counts[rank]):
                optimizer.zero_grad()
                (model(torch.zeros(1, 12)) * 0).sum().backward()
                optimizer.step()
        assert replica.step == max(counts)
        train(model, optimizer, rank, range(20, 25))
        replica.close()
        return weights(model)

    together, by_hand = (loopback(lambda rank, joined=joined: body(rank, joined), 3) for joined in (True, False))
    assert all(same_bits(each, together[0]) for each in together)
    assert same_bits(together[0], by_hand[0])


def test_a_closure_goes_with_join() -> None:
    def body(rank: int) -> None:
        model = make_model()
        optimizer = OneBitAdam(model.parameters())
        replica = gossamer.replicate(model, optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 12)).square().mean()
            loss.backward()
            return loss

        with replica.join():
            for _ in range(1 + rank):
                optimizer.step(closure)
        replica.close()
        assert replica.step == 2

    loopback(body, 2)


@pytest.mark.parametrize(("floor", "stays"), [(0.1, True), (0.0, False)])
@pytest.mark.parametrize("kind", [OneBitAdam, QAdam])
def test_weights_without_a_gradient_are_not_moved_by_rounding(kind: Any, floor: float, stays: bool) -> None:
    """Features that are always zero: Adam leaves their weights alone."""

    def body(rank: int) -> float:
        model = make_model()
        optimizer = kind(model.parameters(), lr=1e-2, warmup=20, floor=floor)
        replica = gossamer.replicate(model, optimizer)
        dead = model[0].weight[:, 5:9].detach().clone()
        for step in range(80):
            inputs, targets = data(step, rank)
            inputs[:, 5:9] = 0
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
        replica.close()
        return float((model[0].weight[:, 5:9].detach() - dead).abs().max())

    moved = max(loopback(body, 3))
    assert (moved < 0.6) == stays, moved  # sixty steps of the learning rate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_of_16_bit_weights_are_loaded_in_full(dtype: torch.dtype) -> None:
    """In 16 bits small squares are zero, and their roots are divided by."""
    weight = nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = OneBitAdam([weight], lr=1e-3, warmup=2)
    for _ in range(3):
        weight.grad = torch.full_like(weight, 1e-4)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    again = OneBitAdam([weight], lr=1e-3, warmup=2)
    again.load_state_dict(saved)
    for name in ("exp_avg", "exp_avg_sq"):
        assert same_bits(again.state[weight][name], optimizer.state[weight][name])


@pytest.mark.parametrize("first", [3, 4])
def test_a_tensor_whose_first_gradient_comes_too_late_stays(first: int, caplog: pytest.LogCaptureFixture) -> None:
    late, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = OneBitAdam([late, other], lr=1e-3, weight_decay=0.5, warmup=3)
    for number in range(6):
        late.grad, other.grad = torch.full((4,), float(number > 3)) if number >= first else None, torch.ones(4)
        optimizer.step()
    assert torch.equal(late, torch.ones(4))
    assert (other - 1).abs().max() < 0.1
    (warning,) = caplog.messages
    assert "a parameter of shape (4,) has its first gradient after the variance was frozen (at step 3)" in warning


def test_a_parameter_counts_the_steps_in_which_it_had_a_gradient() -> None:
    """As AdamW does: one whose first gradient comes late begins as all others did."""

    def walk(kind: Any) -> Tensor:
        late, other = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
        optimizer = kind([late, other], lr=1e-2, weight_decay=0.1)
        source = torch.Generator().manual_seed(0)
        for number in range(60):
            late.grad = torch.randn(6, generator=source) if number > 40 else None
            other.grad = torch.randn(6, generator=source)
            optimizer.step()
        return torch.cat([late.detach(), other.detach()])

    torch.testing.assert_close(walk(OneBitAdam), walk(torch.optim.AdamW), rtol=1e-5, atol=1e-6)


def test_steps_are_not_too_long_where_the_first_gradient_came_just_before_the_freeze() -> None:
    late, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = OneBitAdam([late, other], lr=1e-3, warmup=201)
    for number in range(220):
        before = late.detach().clone()
        late.grad, other.grad = torch.ones(4) if number >= 200 else None, torch.ones(4)
        optimizer.step()
        assert (late.detach() - before).abs().max() < 2e-3, number
    assert optimizer.frozen
    assert (1 - late.detach()).min() > 15e-3, "it goes as far as Adam would"


def test_ranks_freeze_together_whichever_uses_a_parameter_late() -> None:
    def body(rank: int) -> tuple[Tensor, Any, list[int]]:
        model = make_model()
        model.register_parameter("late", nn.Parameter(torch.ones(12)))
        optimizer = OneBitAdam(model.parameters(), lr=1e-2, interval=10, tolerance=0.25)
        replica = gossamer.replicate(model, optimizer)
        for step in range(80):
            inputs, targets = data(step, rank)
            optimizer.zero_grad()
            outputs = model(inputs * model.late if rank and step >= 15 else inputs)
            (outputs - targets).square().mean().backward()
            optimizer.step()
        replica.close()
        state = optimizer.state[model.late]
        return weights(model), optimizer.param_groups[0]["frozen_at"], [state["step"], state["frozen_at"]]

    (first, frozen, counts), (other, *others) = loopback(body, 2)
    assert same_bits(first, other)
    assert [frozen, counts] == others
    assert counts == [65, frozen - 15]


@pytest.mark.parametrize("saved_at", [4, 9])
def test_states_without_counts_for_each_parameter_go_on(saved_at: int) -> None:
    """As they were saved when all parameters were counted together."""
    model, again = make_model(), make_model(1)
    optimizer, loaded = (OneBitAdam(each.parameters(), lr=1e-2, warmup=6) for each in (model, again))
    train(model, optimizer, 0, range(saved_at))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        assert state.pop("step") == saved_at
        state.pop("frozen_at", None)
    loaded.load_state_dict(saved)
    again.load_state_dict(model.state_dict())
    train(model, optimizer, 0, range(saved_at, 15))
    train(again, loaded, 0, range(saved_at, 15))
    assert same_bits(weights(model), weights(again))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", [OneBitAdam, QAdam])
def test_a_copy_trains_alone(kind: Any, copied: Callable[[Any], Any]) -> None:
    model = make_model()
    optimizer = kind(model.parameters(), lr=1e-2, warmup=5, floor=0.3)
    train(model, optimizer, 0, range(8))
    other_model, other = copied((model, optimizer))
    train(model, optimizer, 0, range(8, 12))
    assert not same_bits(weights(model), weights(other_model))
    train(other_model, other, 0, range(8, 12))
    assert same_bits(weights(model), weights(other_model))
    assert other.algorithm == optimizer.algorithm


def test_a_copy_of_a_replicated_one_has_no_way_to_the_others() -> None:
    def body(rank: int) -> None:
        model = make_model()
        optimizer = OneBitAdam(model.parameters())
        gossamer.replicate(model, optimizer)
        assert copy.deepcopy(optimizer).link is None

    loopback(body, 2)


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="QAdam needs all of it"):
        QAdam(table.parameters()).step()


def test_weights_of_16_bits_are_rounded_once_per_step() -> None:
    """Their decay alone would be rounded away, in either phase."""
    torch.manual_seed(0)
    half = nn.Parameter(torch.randn(4000).bfloat16())
    full = nn.Parameter(half.detach().float())
    optimizers = [OneBitAdam([each], lr=2e-3, weight_decay=0.5, warmup=2) for each in (half, full)]
    for _ in range(4):
        full.data.copy_(half)
        half.grad = torch.randn(4000).bfloat16()
        full.grad = half.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(half, full.bfloat16())


def test_it_goes_on_from_a_state_of_adam() -> None:
    """Which knows no phases: the first one begins, with the moments that are there."""
    parameters = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(3, 4))]
    adam = torch.optim.AdamW(parameters, lr=0.01)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    ours = OneBitAdam(parameters, warmup=2)
    ours.load_state_dict(adam.state_dict())
    for _ in range(3):
        ours.step()
    assert ours.frozen
    assert [ours.state[p]["step"] for p in parameters] == [4] * len(parameters)
    assert [ours.state[p]["frozen_at"] for p in parameters] == [3] * len(parameters)
