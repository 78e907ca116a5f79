"""Emulated compute: real sizes, real order, and the time that was asked for."""

from math import prod

import pytest
import torch

from gossamer.bench import emulated
from gossamer.bench.catalogue import find_workload
from gossamer.bench.emulated import MODELS, Emulated
from gossamer.errors import ConfigurationError
from hand_clock import set_clock

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("AlexNet", 61_100_840), ("ResNet50", 25_557_032), ("Convnet", 1_630_090), ("GPT2", 124_439_808)],
)
def test_the_models_have_the_published_numbers_of_parameters(name, parameters):
    assert sum(prod(shape) for layer in MODELS[name]() for shape in layer.shapes) == parameters


def test_the_multiplications_of_alexnet_and_resnet_are_the_published_ones():
    assert sum(layer.multiplications for layer in MODELS["AlexNet"]()) == pytest.approx(0.714e9, rel=0.01)
    assert sum(layer.multiplications for layer in MODELS["ResNet50"]()) == pytest.approx(3.86e9, rel=0.01)


def test_a_step_takes_its_time_and_gradients_come_from_the_last_layer_to_the_first(monkeypatch):
    clock = set_clock(monkeypatch, emulated)
    model, arrived = Emulated(MODELS["Convnet"](), 0.3), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    workload = find_workload("Convnet(0.3)")
    inputs, targets = workload.random_batch(torch.Generator())
    begin = clock.now
    workload.loss(model(inputs), targets).backward()
    assert clock.now - begin == pytest.approx(0.3)
    assert [name.split(".")[1] for name in arrived] == ["3", "3", "2", "2", "1", "1", "0", "0"]
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_training_stays_finite():
    workload = find_workload("Convnet(0.001)")
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        workload.loss(model(torch.rand(1)), torch.zeros(1)).backward()
        optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert any((parameter != old).any() for parameter, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    "text", ["ResNet50", "ResNet50()", "ResNet50(-1)", "ResNet50('a')", "ResNet50(1, 2)", "ResNet50(x)", "nowhere.py"]
)
def test_what_is_no_workload_is_refused(text):
    with pytest.raises(ConfigurationError):
        find_workload(text)
