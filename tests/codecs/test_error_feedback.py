"""ErrorFeedback: what is remembered, and how it is kept."""

import pytest
import torch

from gossamer.codecs import Cast, Codec, ErrorFeedback, Quantize, RandomK, Sign, TopK
from gossamer.errors import ConfigurationError
from gossamer.state import State


def test_it_wraps_any_codec_and_sends_its_payloads() -> None:
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(0))
    state = State(tensor)
    assert torch.equal(ErrorFeedback(Sign()).send(tensor, state, "e"), Sign().encode(tensor))
    unsent = state["e"].float()
    assert ((unsent - (tensor - decoded(Sign(), tensor))).abs() <= 2.0**-7 * unsent.abs() + 1e-6).all()
    assert torch.equal(ErrorFeedback(Sign()).send(tensor, state, "e"), Sign().encode(tensor + unsent))
    assert ErrorFeedback().codec == Quantize()


def test_a_large_remainder_of_which_little_is_sent_gets_smaller() -> None:
    """Rounded to the nearest number of 16 bits, it would be sent for ever, and stay what it was."""
    codec = Sign(block=1024)
    memory, tensor = ErrorFeedback(codec), torch.randn(1024, generator=torch.Generator().manual_seed(0))
    tensor[0] = 1000.0
    state, sent = State(tensor), torch.zeros(1024)
    for step in range(600):
        memory.add_decoded(memory.send(tensor if step == 0 else torch.zeros(1024), state, "e", seed=step), sent)
    assert state["e"].dtype == torch.bfloat16
    assert sent[0] > 500
    assert abs(sent[0] + state["e"][0].float() - 1000) < 150


def decoded(codec: Sign, tensor: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(tensor), tensor.numel(), tensor.dtype)


def test_a_plain_codec_remembers_nothing() -> None:
    state = State(torch.zeros(3))
    Sign().send(torch.ones(3), state, "e")
    assert state.drafts() == []


@pytest.mark.parametrize(("residual", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_the_residual_is_kept_as_asked_and_written_anew(residual: str, dtype: torch.dtype) -> None:
    state, memory = State(torch.zeros(50)), ErrorFeedback(Sign(), residual=residual)
    memory.send(torch.linspace(-1, 2, 50), state, "e")
    first, copy = state["e"], state["e"].clone()
    assert first.dtype == dtype
    memory.send(torch.linspace(-1, 2, 50), state, "e")
    assert torch.equal(first, copy), "an exchange that is given up must find the old residual"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("codec", [Cast(wire="bf16"), Quantize(bits=4), TopK(density=0.1)], ids=repr)
def test_of_a_tensor_in_16_bits_the_residual_is_kept_in_full_precision(codec: Codec, dtype: torch.dtype) -> None:
    tensor = torch.randn(200, generator=torch.Generator().manual_seed(0)).to(dtype)
    state, memory, sent = State(tensor), ErrorFeedback(codec, residual="fp32"), torch.zeros(200, dtype=torch.float64)
    for step in range(50):
        sent += memory.decode(memory.send(tensor, state, "e", seed=step), 200, torch.float64)
    assert state["e"].dtype == torch.float32
    assert (sent + state["e"] - 50 * tensor.double()).abs().max() < 1e-3


def test_what_the_codec_can_do_in_one_pass_it_does_inside_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a decoded copy."""
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(0))
    inside, memory = Sign(block=8), ErrorFeedback(Sign(block=8))
    payload, rest = inside.encode_rest(tensor, tensor)
    monkeypatch.setattr(Sign, "decode", None)
    place, out = tensor.clone(), torch.empty(100)
    assert torch.equal(memory.encode_keeping(place, tensor, 0, place), payload)
    assert torch.equal(place, rest)
    memory.decode_into(payload, out)
    assert torch.allclose(out + rest, 2 * tensor, atol=1e-6)


def test_an_overflow_of_half_precision_is_cut_off() -> None:
    state = State(torch.zeros(200))
    tensor = torch.full((200,), 1e6)
    tensor[0] = 2e6
    ErrorFeedback(TopK(), residual="fp16").send(tensor, state, "e")
    assert state["e"].dtype == torch.float16
    assert state["e"].isfinite().all()


def test_a_step_that_overflowed_leaves_the_residual() -> None:
    state, memory = State(torch.zeros(40)), ErrorFeedback(Sign(block=8))
    memory.send(torch.linspace(-1, 2, 40), state, "e")
    before = state["e"]
    memory.send(torch.full((40,), float("nan")), state, "e")
    assert torch.equal(state["e"], before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"codec": ErrorFeedback(Sign())}, "same error twice"),
        ({"codec": "sign"}, "wraps a codec"),
        ({"codec": Sign}, "wraps a codec"),
        ({"codec": Cast(wire="bf16"), "residual": "fp8"}, "residual must be one of fp32, fp16, bf16; got 'fp8'"),
        ({"codec": RandomK(unbiased=True)}, "would grow from step to step"),
    ],
)
def test_bad_fields_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ErrorFeedback(**arguments)
