"""Master weights: small updates arrive, and everything around an optimizer works as with any other."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import gossamer
from gossamer import ConfigurationError, loopback
from gossamer.optim import LAMB, LARS, MasterWeights

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def model_of(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int, begin: int = 0, scaler: Any = None, limit: float = 0.0) -> None:
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        dtype = next(model.parameters()).dtype
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss = model(x).float().square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if limit:
            nn.utils.clip_grad_norm_(model.parameters(), limit * (scaler.get_scale() if scaler else 1.0))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def masters(optimizer: MasterWeights) -> list[Tensor]:
    return [entry["master_weight"].clone() for entry in optimizer.state_dict()["state"].values()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def travel(wrapped: bool) -> float:
    """How far a bfloat16 weight of 1 goes in 400 updates of 1e-4, as a share of the whole way."""
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MasterWeights(torch.optim.SGD, [weight], lr=1e-4) if wrapped else torch.optim.SGD([weight], lr=1e-4)
    for _ in range(400):
        weight.grad = -torch.ones_like(weight)
        optimizer.step()
    return (weight.float().mean().item() - 1.0) / 0.04


def test_small_updates_move_the_weights_by_their_full_length() -> None:
    assert travel(wrapped=False) == 0.0
    assert travel(wrapped=True) == pytest.approx(1.0, abs=0.1)  # 1.04 in bfloat16 is 1.0391


@HALVES
def test_the_copies_do_what_a_float32_model_does(dtype: torch.dtype) -> None:
    """Fed with the same gradients, they are that model; the half-precision weights are its roundings."""
    half, full = model_of(dtype), model_of(dtype).float()
    ours, theirs = MasterWeights(torch.optim.AdamW, half.parameters(), lr=1e-2), torch.optim.AdamW(full.parameters(), lr=1e-2)
    for step in range(5):
        for p, q in zip(half.parameters(), full.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(dtype)
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    assert same(masters(ours), values(full))
    assert same(values(half), [value.to(dtype) for value in values(full)])


def test_gradients_keep_the_dtype_of_the_model_and_zero_grad_clears_them() -> None:
    model = model_of()
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    before = values(model)
    optimizer.step()
    assert same(values(model), before), "a step without gradients does nothing"


def test_other_dtypes_are_updated_in_place() -> None:
    model = model_of()
    model[2].float()
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = values(model)
    optimizer.step()
    assert same(values(model)[2:], [value - 0.1 for value in before[2:]])
    assert sum("master_weight" in entry for entry in optimizer.state_dict()["state"].values()) == 2


def test_schedules_and_groups_reach_the_inner_optimizer() -> None:
    a, b = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = MasterWeights(torch.optim.SGD, [{"params": [a]}, {"params": [b], "lr": 0.0}], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.25)
    for _ in range(2):
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        optimizer.step()
        schedule.step()
    assert a.tolist() == [1 - 1 - 0.25] * 4
    assert b.tolist() == [1.0] * 4


def test_a_group_may_be_added() -> None:
    a, b = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = MasterWeights(torch.optim.SGD, [a], lr=0.5)
    optimizer.add_param_group({"params": b, "lr": 0.25})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    optimizer.step()
    assert (a.tolist(), b.tolist()) == ([0.5] * 4, [0.75] * 4)


def test_named_parameters_keep_their_names() -> None:
    optimizer = MasterWeights(torch.optim.AdamW, model_of().named_parameters(), lr=0.1)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_clipping_between_backward_and_step_is_effective() -> None:
    model = model_of()
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)
    before = [value.float() for value in values(model)]
    train(model, optimizer, 1, limit=1e-3)
    moved = torch.cat([(m - b).flatten() for m, b in zip(masters(optimizer), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(1e-3, rel=0.01)


def fresh(model: nn.Module) -> MasterWeights:
    return MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)


@pytest.mark.parametrize("at", [0, 3])
def test_a_reloaded_state_goes_on_bit_for_bit(at: int) -> None:
    straight, broken = model_of(), model_of()
    whole, first = fresh(straight), fresh(broken)
    train(straight, whole, 6)
    train(broken, first, at)
    file = io.BytesIO()
    torch.save({"model": broken.state_dict(), "optimizer": first.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = model_of(seed=7)
    second = fresh(resumed)
    second.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["model"])
    train(resumed, second, 6 - at, begin=at)
    assert same(values(resumed), values(straight))
    assert same(masters(second), masters(whole))


def test_a_state_without_copies_is_refused() -> None:
    model = model_of()
    plain = torch.optim.AdamW(model.parameters())
    train(model, plain, 1)
    with pytest.raises(ConfigurationError, match="saved by an optimizer without master weights"):
        fresh(model).load_state_dict(plain.state_dict())


def copies_of(optimizer: MasterWeights, model: nn.Module) -> list[Tensor]:
    return [optimizer.exact_weight(p).detach().clone() for p in model.parameters()]


def test_a_state_from_before_the_first_step_is_empty_and_leaves_the_copies_to_the_model() -> None:
    model = model_of()
    optimizer, saved = fresh(model), fresh(model).state_dict()
    train(model, optimizer, 3)
    rounded = [value.float() for value in values(model)]
    assert not same(copies_of(optimizer, model), rounded)
    optimizer.load_state_dict(saved)
    assert same(copies_of(optimizer, model), rounded)
    assert not optimizer.state
    assert not optimizer.state_dict()["state"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1e-6)  # beside what was there a difference to it would lose digits
    optimizer.state_dict()
    assert same(copies_of(optimizer, model), [value.float() for value in values(model)])


def test_a_deep_copy_is_independent_and_complete() -> None:
    model = model_of()
    optimizer = fresh(model)
    train(model, optimizer, 2)
    other_model, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2, begin=2)
    train(other_model, other, 2, begin=2)
    assert same(values(model), values(other_model))
    assert same(masters(optimizer), masters(other))


def test_a_factory_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="must return a torch"):
        MasterWeights(lambda groups: groups, model_of().parameters())  # type: ignore[arg-type, return-value]


def test_what_changes_the_weights_between_steps_moves_the_copies() -> None:
    """By the difference: what the copies hold below the last 16-bit digit stays."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterWeights(torch.optim.SGD, [weight], lr=1e-4)
    weight.grad = -torch.ones_like(weight)
    optimizer.step()
    weight.data += 2
    assert torch.allclose(masters(optimizer)[0], torch.full((4,), 3.0001), atol=1e-6, rtol=0)


def test_an_optimizer_that_needs_its_closure() -> None:
    """L-BFGS evaluates the model several times per step, each time with the weights that it tries."""
    model = model_of(torch.bfloat16)
    optimizer = MasterWeights(torch.optim.LBFGS, model.parameters(), lr=0.5, max_iter=6)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert len(losses) > 6
    assert losses[-1] < 0.2 * losses[0]


# -- loss scaling ---------------------------------------------------------------------------------------------------


@HALVES
@pytest.mark.parametrize("limit", [0.0, 0.05])
def test_a_grad_scaler_changes_nothing_but_the_rounding(dtype: torch.dtype, limit: float) -> None:
    """A power of two leaves bfloat16 gradients bit-identical; so the same masters, clipped in scaled units or not."""
    plain, scaled = model_of(dtype), model_of(dtype)
    one, other = (MasterWeights(torch.optim.SGD, m.parameters(), lr=0.1) for m in (plain, scaled))
    train(plain, one, 3, limit=limit)
    train(scaled, other, 3, scaler=torch.amp.GradScaler("cpu", init_scale=256.0), limit=limit)
    for a, b in zip(masters(one), masters(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert not same(masters(one), [p.float() for p in model_of(dtype).parameters()])


@HALVES
def test_a_step_with_an_overflow_is_skipped_and_the_scale_falls(dtype: torch.dtype) -> None:
    model = model_of(dtype)
    model[2].float()
    optimizer = MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = values(model)
    scaler.scale(torch.ones(()))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert same(values(model), before)
    assert scaler.get_scale() == 128.0


def test_unscaling_bfloat16_gradients_before_clipping() -> None:
    model = model_of()
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = [value.float() for value in values(model)]
    scaler.scale(model(torch.ones(3, 4).bfloat16()).float().square().mean()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    moved = torch.cat([(m - b).flatten() for m, b in zip(masters(optimizer), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(1e-3, rel=0.01)


# -- replicas -------------------------------------------------------------------------------------------------------


def replicated(rank: int, algorithm: gossamer.Algorithm, factory: Any, scaled: bool) -> tuple[list[Tensor], list[Tensor]]:
    model = model_of(seed=rank)  # rank 0's weights reach the copies, too
    optimizer = MasterWeights(factory, model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    replica = gossamer.replicate(model, optimizer, algorithm, scaler=scaler)
    train(model, optimizer, 5, begin=10 * rank, scaler=scaler)
    replica.close()
    return values(model), masters(optimizer)


@pytest.mark.parametrize("factory", [torch.optim.AdamW, LARS], ids=["AdamW", "LARS"])
@pytest.mark.parametrize("scaled", [False, True])
def test_replicas_and_their_copies_stay_bit_identical(factory: Any, scaled: bool) -> None:
    ranks = loopback(lambda rank: replicated(rank, gossamer.AllReduce(), factory, scaled), 3)
    for weights, copies in ranks[1:]:
        assert same(weights, ranks[0][0])
        assert same(copies, ranks[0][1])


def test_gossip_moves_the_copies_and_the_model_with_them() -> None:
    for weights, copies in loopback(lambda rank: replicated(rank, gossamer.Gossip(), torch.optim.AdamW, False), 4):
        assert same(weights, [copy.bfloat16() for copy in copies])


class Line(nn.Module):
    """Weights from 1 to 2 whose gradient is what the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 256).bfloat16())

    def forward(self, slope: Tensor) -> Tensor:
        return (self.weight.float() * slope).sum()


def shares_of_the_way(rank: int, noise: float) -> tuple[Tensor, Tensor]:
    """After 400 updates of 1e-4 of the weights' size, with noise of a rank's own: the way of the copies, and the model's."""
    model = Line()
    begin = model.weight.detach().float()
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)
    replica = gossamer.replicate(model, optimizer, gossamer.Gossip())
    source = torch.Generator().manual_seed(rank)
    for _ in range(400):
        optimizer.zero_grad()
        slope = -1e-4 * begin + noise * torch.randn(256, generator=source)
        model(slope).backward()
        optimizer.step()
    replica.close()
    return tuple((w.float() - begin) / (0.04 * begin) for w in (masters(optimizer)[0], model.weight.detach()))  # type: ignore[return-value]


@pytest.mark.parametrize("noise", [0.0, 1e-4, 1e-3])
def test_small_updates_survive_gossip(noise: float) -> None:
    """Rounded averages of 16-bit weights would take them back: exchanged as they are, 4 to 7 % of the way is left."""
    ranks = loopback(lambda rank: shares_of_the_way(rank, noise), 4)
    for each in range(2):
        assert torch.stack([way[each] for way in ranks]).mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("early", [False, True], ids=["optimizer loaded after replicate", "and before it"])
def test_a_run_with_gossip_resumes_bit_for_bit(early: bool) -> None:
    """With an exchange under way when it was saved, and copies that are not those of rank 0."""

    def body(rank: int) -> bool:
        straight, broken, resumed = model_of(), model_of(), model_of()
        whole, first, second = fresh(straight), fresh(broken), fresh(resumed)
        with_all = gossamer.replicate(straight, whole, gossamer.Gossip())
        train(straight, whole, 5, begin=10 * rank)
        with_all.close()
        before = gossamer.replicate(broken, first, gossamer.Gossip())
        train(broken, first, 2, begin=10 * rank)
        saved = copy.deepcopy((broken.state_dict(), first.state_dict(), before.state_dict()))
        if early:
            second.load_state_dict(saved[1])
        after = gossamer.replicate(resumed, second, gossamer.Gossip())
        resumed.load_state_dict(saved[0])
        if not early:
            second.load_state_dict(saved[1])
        after.load_state_dict(saved[2])
        train(resumed, second, 3, begin=10 * rank + 2)
        after.close()
        return same(values(resumed), values(straight)) and same(masters(second), masters(whole))

    assert loopback(body, 3) == [True] * 3


def test_gossip_brings_the_copies_together() -> None:
    """Ranks that are pushed apart, 0.03 per step between the outermost, stay within a few pushes of each other."""

    def body(rank: int) -> Tensor:
        model = Line()
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)
        gossamer.replicate(model, optimizer, gossamer.Gossip())
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.full((256,), 0.01 * (rank - 1.5))).backward()
            optimizer.step()
        return masters(optimizer)[0]

    copies = torch.stack(loopback(body, 4))
    assert (copies.amax(0) - copies.amin(0)).max() < 0.15, "alone they would be 1.2 apart"


def test_copies_take_rank_0_s_weights_exactly() -> None:
    """However different a rank's own ones were: added to 1000, a difference would lose the last digits."""

    def body(rank: int) -> list[Tensor]:
        model = nn.Linear(3, 1).bfloat16()
        nn.init.constant_(model.weight, 1000.0 if rank else 1.23e-5)
        nn.init.zeros_(model.bias)
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-6)
        gossamer.replicate(model, optimizer)
        model(torch.ones(2, 3).bfloat16()).sum().backward()
        optimizer.step()
        return masters(optimizer)

    first, other = loopback(body, 2)
    assert same(first, other)


def test_what_a_script_writes_between_steps_is_kept_under_gossip() -> None:
    def body(rank: int) -> Tensor:
        model = Line()
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-6)
        gossamer.replicate(model, optimizer, gossamer.Gossip())
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(256)).backward()
            optimizer.step()
            if step == 1:
                nn.init.constant_(model.weight, 7.0)
        return masters(optimizer)[0]

    assert all(torch.allclose(copies, torch.tensor(7.0), atol=1e-4, rtol=0) for copies in loopback(body, 2))


def test_copies_that_were_used_alone_take_those_of_rank_0() -> None:
    """Else each rank would keep what its own hold below the last 16-bit digit."""

    def body(rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        model = model_of()
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1e-3)
        train(model, optimizer, 3, begin=10 * rank)
        before = copies_of(optimizer, model)
        replica = gossamer.replicate(model, optimizer, gossamer.AllReduce())
        equal = copies_of(optimizer, model)
        train(model, optimizer, 3, begin=10 * rank)
        replica.close()
        return before, equal, copies_of(optimizer, model)

    (before, first, trained), (apart, other, trained_too) = loopback(body, 2)
    assert not same(before, apart)
    assert same(first, before), "rank 0 keeps its own, to the last bit"
    assert same(other, before)
    assert same(trained, trained_too)


# -- state and its hooks --------------------------------------------------------------------------------------------


def test_the_state_is_there_from_the_first_step_on() -> None:
    model = model_of()
    model[2].float()
    optimizer = fresh(model)
    assert not optimizer.state
    give(model)
    optimizer.step()
    entry = optimizer.state[model[0].weight]
    assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "master_weight"}
    assert torch.equal(entry["master_weight"], optimizer.exact_weight(model[0].weight))
    assert set(optimizer.state[model[2].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(optimizer.state) == set(model.parameters())
    plain = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    plain.step()
    assert set(plain.state) == set(model[0].parameters()), "where there is nothing but copies, too"


def give(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)


def test_what_a_hook_does_before_the_state_is_saved_is_saved() -> None:
    """With overlap_forward it takes the rest of a step."""
    model = model_of()
    optimizer = MasterWeights(LAMB, model.parameters())
    give(model)
    optimizer.step()
    handle = optimizer.register_state_dict_pre_hook(lambda one: one.step())
    saved = optimizer.state_dict()
    handle.remove()
    assert [entry["step"] for entry in saved["state"].values()] == [2] * 4
    assert same([entry["master_weight"] for entry in saved["state"].values()], copies_of(optimizer, model))


def test_hooks_are_called_once() -> None:
    model = model_of()
    optimizer = fresh(model)
    train(model, optimizer, 1)
    called: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: called.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: called.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before saving", "after saving", "before loading", "after loading"]


def test_a_refused_state_changes_nothing() -> None:
    model = model_of()
    optimizer, plain = fresh(model), torch.optim.AdamW(model.parameters(), lr=7.0)
    train(model, plain, 1)
    with pytest.raises(ConfigurationError, match="without master weights"):
        optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_distributed_checkpoints_take_no_step_with_it() -> None:
    """They take one, without gradients, with an optimizer that has no state yet."""
    model, other_model = model_of(), model_of(seed=1)
    optimizer, other = fresh(model), fresh(other_model)
    train(model, optimizer, 3)
    optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    assert optimizer.state[model[0].weight]["step"] == 3
    get_optimizer_state_dict(other_model, other)  # the tensors to load into
    set_optimizer_state_dict(other_model, other, saved)
    other_model.load_state_dict(model.state_dict())
    train(model, optimizer, 2, begin=3)
    train(other_model, other, 2, begin=3)
    assert same(copies_of(optimizer, model), copies_of(other, other_model))


def test_a_model_that_was_mended_stays_mended() -> None:
    model = model_of()
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    good = copy.deepcopy(model.state_dict())
    give(model)
    next(model.parameters()).grad.fill_(float("nan"))
    optimizer.step()
    assert not all(value.isfinite().all() for value in values(model))
    model.load_state_dict(good)
    give(model)
    optimizer.step()
    assert all(value.isfinite().all() for value in (*values(model), *masters(optimizer)))


def test_a_scaled_step_without_any_gradient_does_nothing() -> None:
    model = model_of()
    optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
    before = [value.clone() for value in values(model)]
    optimizer.found_inf = 0  # as a GradScaler leaves it there
    optimizer.step()
    assert same(before, values(model))


def test_a_state_that_is_saved_at_the_average_leaves_the_copies_as_they_were() -> None:
    def body(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        model = model_of()
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, gossamer.Gossip())
        train(model, optimizer, 3, begin=10 * rank)
        before = [copy.clone() for copy in masters(optimizer)]
        with replica.consensus():
            optimizer.state_dict()
        optimizer.state_dict()
        after = [copy.clone() for copy in masters(optimizer)]
        replica.close()
        return before, after

    for before, after in loopback(body, 2):
        assert same(before, after)
