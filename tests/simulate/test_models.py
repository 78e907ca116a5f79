"""Shipped models: their sizes are the known ones, and what they compute is counted."""

import pytest
import torch
from torch import nn

from gossamer.simulate.counted import as_mean, count_step
from gossamer.simulate.models import MODELS

PARAMETERS = {
    "alexnet": 61_100_840,
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "googlenet": 6_998_552,
    "bert-large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "decoder-1b": 1_100_048_384,
    "decoder-7b": 6_738_415_616,
}
"""As published with the weights (Caffe's GoogLeNet; BERT without the heads of pretraining)."""

GIGA_MULTIPLICATIONS = {"alexnet": 0.714, "resnet50": 4.09, "vgg16": 15.47, "googlenet": 1.58}
"""Of the forward pass of one image, as tables of these networks have them."""


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert sum(p.numel() for p in MODELS[name].model().parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", GIGA_MULTIPLICATIONS)
def test_arithmetic_of_convolutional_networks_is_as_published(name: str) -> None:
    counted = count_step(MODELS[name].model(), [MODELS[name].inputs(2)], as_mean)
    assert counted.forward / 2 / 2 / 1e9 == pytest.approx(GIGA_MULTIPLICATIONS[name], rel=0.02)
    assert 1.8 < counted.backward / counted.forward <= 2, "backward is two products for one, but for the first layer"


@pytest.mark.parametrize("name", ["gpt2", "bert-large", "decoder-1b"])
def test_transformers_compute_six_operations_per_parameter_and_token(name: str) -> None:
    """And attention beside that: 12 · layers · width · length (Kaplan et al. 2020); embeddings multiply nothing."""
    known = MODELS[name]
    model = known.model()
    tokens = known.inputs(1)
    counted = count_step(model, [tokens], as_mean)
    looked_up = sum(p.numel() for each, p in model.named_parameters() if each.split(".")[0] in ("place", "kind"))
    looked_up += model.token.weight.numel() if not hasattr(model, "head") or model.head.weight is not model.token.weight else 0
    products = 6 * (PARAMETERS[name] - looked_up) * tokens.numel()
    assert products < counted.total < 1.25 * products


def test_gradients_are_ready_in_reverse_order_of_use() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 4))
        counted = count_step(model, [torch.empty(5, 8)], as_mean)
    assert counted.forward == 2 * 5 * (8 * 16 + 16 * 32 + 32 * 4)
    compute = counted.compute(3.0)
    assert compute.forward + compute.backward == pytest.approx(3.0)
    assert compute.needed["0.weight"] == 0 < compute.needed["1.weight"] < compute.needed["2.weight"]
    assert compute.ready["2.bias"] < compute.ready["1.weight"] <= compute.ready["0.weight"] <= compute.backward


def test_memory_that_backward_needs_is_counted_once() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
        counted = count_step(model, [torch.empty(5, 8)], as_mean)
    assert counted.saved == 4 * 5 * (8 + 16), "the input, and what the ReLU gives, which the second layer keeps as well"
