"""Ranks agree by hashes in tensors, and say in words where they differ."""

import pytest
import torch

from gossamer import DisagreementError, loopback
from gossamer.comm.connect import connect
from gossamer.engine import agreement
from gossamer.engine.agreement import agree, checksum, digest, same_from_rank


def test_a_digest_is_the_same_on_every_machine() -> None:
    assert digest("gossamer") == 8138794019302934626
    assert 0 <= digest("a") < 2**63
    assert len({digest(str(number)) for number in range(1000)}) == 1000


def test_agreement() -> None:
    loopback(lambda rank: agree(connect(), {"one": "x", "two": "y\nz"}), 3)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["a", "a", "b"], "two: ranks 0, 1: a; rank 2: b"),
        (["a", "b", "c"], "two: rank 0: a; rank 1: b; rank 2: c"),
        (["x\ny\nz", "x\nY\nz", "x\ny\nz"], "two: ranks 0, 2: y; rank 1: Y"),
        (["x", "x\ny", "x"], r"two: ranks 0, 2: \(nothing\); rank 1: y"),
        (["", "é", ""], "two: ranks 0, 2: ; rank 1: é"),
        (["x" * 100_000, "x" * 100_000 + "y", ""], "two: ranks 0, 1: xxx"),
    ],
)
def test_the_first_line_that_differs_is_named(texts: list[str], said: str) -> None:
    with pytest.raises(DisagreementError, match=f"ranks differ in {said}"):
        loopback(lambda rank: agree(connect(), {"one": "same", "two": texts[rank], "three": str(rank)}), 3)


def test_every_rank_is_told() -> None:
    def body(rank: int) -> str:
        try:
            agree(connect(), {"topic": str(rank)})
        except DisagreementError as error:
            return str(error)
        return ""

    for rank, text in enumerate(loopback(body, 3)):
        assert text == f"rank {rank}: ranks differ in topic: rank 0: 0; rank 1: 1; rank 2: 2"


KINDS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("portion", [agreement.PORTION, 50, 16])
def test_values_of_one_rank_for_all(monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    """Any dtype, any shape, any strides; bit by bit, in messages of any size."""
    monkeypatch.setattr(agreement, "PORTION", portion)

    def body(rank: int) -> tuple[int, int]:
        def tensors(seed: int) -> list[torch.Tensor]:
            torch.manual_seed(seed)
            made = [(torch.randn(3) * 4).to(kind) for kind in KINDS]
            made += [torch.randn(4, 6).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
            made += [torch.zeros(0), torch.tensor(float("nan")), torch.randn(8)[::2]]
            return made

        mine, theirs = tensors(rank), tensors(2)
        strides = [tensor.stride() for tensor in mine]
        runner = connect()
        before = sum(meter.messages for meter in runner.meters())
        same_from_rank(runner, mine, 2)
        sent = sum(meter.messages for meter in runner.meters()) - before
        total = sum(tensor.numel() * tensor.element_size() for tensor in mine)
        assert checksum(mine) == checksum(theirs)
        assert [tensor.stride() for tensor in mine] == strides
        return sent, -(-total // portion)

    sent, portions = zip(*loopback(body, 3), strict=True)
    assert sent == (0, 0, 2 * portions[0]), "to two others each"


def test_a_checksum_sees_every_bit() -> None:
    ones = torch.ones(1000, dtype=torch.float64)
    other = ones.clone()
    other[500] += 2**-52
    assert checksum([ones]) == checksum([ones.clone()])
    assert checksum([ones]) != checksum([other])
    assert checksum([torch.zeros(1)]) != checksum([-torch.zeros(1)])
    assert checksum([torch.zeros(0)]) == checksum([])


def test_what_differs_is_named_wherever_it_is() -> None:
    """Of a model with thousands of parameters whose last one is frozen on one rank."""
    lines = [f"block{number}.weight" for number in range(20_000)]

    def body(rank: int) -> None:
        agree(connect(), {"parameters": "\n".join([*lines, "frozen" if rank == 1 else "trainable"])})

    with pytest.raises(DisagreementError, match=r"ranks differ in parameters: ranks 0, 2: trainable; rank 1: frozen$"):
        loopback(body, 3)


def test_lines_too_long_to_be_shown_do_not_look_alike() -> None:
    def body(rank: int) -> None:
        agree(connect(), {"topic": 100_000 * "x" + str(rank)})

    with pytest.raises(DisagreementError, match=r"ranks differ in topic: what lies behind the first \d+ bytes of xxx"):
        loopback(body, 2)
