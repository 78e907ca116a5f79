"""Buckets hold every parameter once, in its own strides, and plans are the same wherever they are made."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.bucket_plan import OneSize, make_layout, make_plan, plan_from_names
from gossamer.buckets import Bucket

DTYPES = [torch.float32, torch.float64, torch.bfloat16]

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
models = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12).map(
    lambda rows: {f"p{i}": torch.zeros(shape, dtype=dtype) for i, (shape, dtype) in enumerate(rows)}
)
thresholds = st.sampled_from([1, 16, 64, 300, 10**6])


@given(models, thresholds)
def test_every_parameter_is_in_one_bucket_in_order(tensors: dict[str, Tensor], threshold: int) -> None:
    plan = make_plan(tensors, threshold)
    assert sorted(plan.names) == sorted(tensors)
    for dtype in DTYPES:
        alike = [name for name in tensors if tensors[name].dtype == dtype]
        held = [layout for layout in plan.layouts if layout.dtype == dtype]
        assert [name for layout in held for name in layout.names] == alike
        assert all(layout.nbytes >= threshold for layout in held[:-1]), "only the last one of a dtype may be small"
        assert all(sum(s.numel for s in layout.segments[:-1]) * dtype.itemsize < threshold for layout in held)


@given(models, thresholds)
def test_full_buckets_stand_in_the_order_of_their_last_tensor(tensors: dict[str, Tensor], threshold: int) -> None:
    place = {name: index for index, name in enumerate(tensors)}
    full = [layout for layout in make_plan(tensors, threshold).layouts if layout.nbytes >= threshold]
    ends = [place[layout.names[-1]] for layout in full]
    assert ends == sorted(ends)


@given(models, thresholds)
def test_views_cover_a_bucket_without_overlap(tensors: dict[str, Tensor], threshold: int) -> None:
    for index, layout in enumerate(make_plan(tensors, threshold).layouts):
        bucket = Bucket(index, layout)
        assert bucket.flat.numel() == layout.numel == sum(math.prod(tensors[name].shape) for name in layout.names)
        for view in bucket.views:
            view.add_(1)
        assert torch.equal(bucket.flat, torch.ones_like(bucket.flat))


@given(models, thresholds)
def test_a_plan_survives_its_dictionary(tensors: dict[str, Tensor], threshold: int) -> None:
    plan = make_plan(tensors, threshold)
    again = plan_from_names(plan.to_dict()["buckets"], tensors, OneSize(threshold))
    assert again == plan
    assert again.lines() == plan.lines()


@settings(max_examples=30)
@given(models, st.data())
def test_the_digest_tells_plans_apart(tensors: dict[str, Tensor], data: st.DataObject) -> None:
    plan = make_plan(tensors, 64)
    name = data.draw(st.sampled_from(sorted(tensors)))
    others = [
        tensors | {name: torch.zeros(*tensors[name].shape, 7, dtype=tensors[name].dtype)},
        tensors | {name: tensors[name].to(torch.float16)},
        {("q" if key == name else key): tensor for key, tensor in tensors.items()},
        tensors | {"another": torch.zeros(1)},
    ]
    assert all(make_plan(other, 64).lines() != plan.lines() for other in others)
    if len(tensors) > 1:
        alike = {key: torch.zeros(3) for key in tensors}
        assert make_plan(alike, 1).lines() != make_plan(alike, 10**6).lines(), "other cuts"
        assert make_plan(dict(reversed(alike.items())), 1).lines() != make_plan(alike, 1).lines(), "another order"


LAYOUTS = {
    "contiguous": (torch.empty(2, 3, 4, 5), (60, 20, 5, 1)),
    "channels-last": (torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), (60, 1, 15, 3)),
    "transposed": (torch.empty(3, 4).t(), (1, 4)),
    "sliced": (torch.empty(3, 8)[:, ::2], (4, 1)),
    "expanded": (torch.empty(3, 1).expand(3, 4), (4, 1)),
    "scalar": (torch.empty(()), ()),
    "empty": (torch.empty(0, 3), (3, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dense_strides_are_kept_and_others_made_contiguous(name: str) -> None:
    tensor, stride = LAYOUTS[name]
    bucket = Bucket(0, make_layout({"before": torch.empty(3), "it": tensor, "after": torch.empty(1)}))
    view = bucket.views[1]
    assert (view.shape, view.stride()) == (tensor.shape, stride)
    view.copy_(torch.arange(float(tensor.numel())).view(tensor.shape))
    assert torch.equal(view, torch.arange(float(tensor.numel())).view(tensor.shape))
    assert torch.equal(bucket.flat[[0, 1, 2, -1]], torch.zeros(4))


@given(models)
def test_splitting_another_tensor_leaves_the_bucket_alone(tensors: dict[str, Tensor]) -> None:
    for index, layout in enumerate(make_plan(tensors, 64).layouts):
        bucket = Bucket(index, layout)
        other = torch.arange(float(layout.numel)).to(layout.dtype)
        assert torch.equal(torch.cat([piece.reshape(-1) for piece in bucket.split(other)]), other)
        assert not bucket.flat.any()


@given(models, st.data())
def test_gathering_undoes_splitting(tensors: dict[str, Tensor], data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.sampled_from(sorted(tensors))))
    values = {name: torch.rand(tensors[name].shape) + 1 for name in chosen}
    for index, layout in enumerate(make_plan(tensors, 64).layouts):
        bucket = Bucket(index, layout)
        flat = bucket.gather(values)
        assert (flat is None) == (not chosen & set(layout.names))
        if flat is not None:
            for name, piece in zip(layout.names, bucket.split(flat), strict=True):
                assert torch.equal(piece, values.get(name, torch.zeros(tensors[name].shape)))


def test_a_fitting_result_is_taken_over_and_another_one_copied() -> None:
    bucket = Bucket(0, make_layout({"a": torch.empty(2, 3), "b": torch.empty(())}))
    fitting = torch.arange(7.0)
    bucket.adopt(fitting)
    assert bucket.flat is fitting
    assert torch.equal(bucket.views[0], torch.arange(6.0).view(2, 3))
    for result in (torch.ones(7, dtype=torch.float64), torch.ones(14)[::2]):
        bucket.adopt(result)
        assert bucket.flat is fitting
        assert torch.equal(bucket.flat, torch.ones(7))
        assert bucket.views[1] == 1
        bucket.flat.zero_()
    bucket.adopt(bucket.flat)
    assert bucket.flat is fitting


def test_what_is_given_away_is_not_filled_again() -> None:
    bucket = Bucket(0, make_layout({"a": torch.empty(2, 3), "b": torch.empty(())}))
    bucket.flat.fill_(1)
    bucket.renew()
    assert bucket.flat.eq(1).all(), "nobody was given anything"
    given = bucket.give()
    bucket.renew()
    bucket.flat.fill_(2)
    assert given.eq(1).all()
    assert bucket.views[0].eq(2).all()
    for result in (torch.full((7,), 3.0), torch.full((7,), 3.0, dtype=torch.float64)):
        given = bucket.give().fill_(4)
        assert bucket.adopt(result)
        assert bucket.fresh().data_ptr() != given.data_ptr(), "somebody still looks at it"
        assert given.eq(4).all()
        assert bucket.views[1] == 3


def test_a_bucket_around_the_same_tensor_gives_it_for_both() -> None:
    bucket = Bucket(0, make_layout({"a": torch.empty(4)}))
    given = bucket.holding(bucket.flat).give().fill_(1)
    bucket.renew()
    bucket.flat.fill_(2)
    assert given.eq(1).all()
    other = bucket.holding(bucket.flat.clone())
    other.give()
    before = bucket.flat
    bucket.renew()
    assert bucket.flat is before, "that was another tensor"


def test_a_bucket_says_what_it_holds() -> None:
    assert str(Bucket(3, make_layout({"a": torch.empty(2), "b": torch.empty(1)}))) == "bucket 3 (a … b, 12 bytes)"
