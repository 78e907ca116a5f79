"""TopK, RandomK, TopChunks: which elements travel."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.codecs import Codec, RandomK, TopChunks, TopK
from gossamer.codecs.kernels.layout import keys
from gossamer.codecs.sparse import Sparse
from gossamer.errors import ConfigurationError

NAN, INF = float("nan"), float("inf")


def through(codec: Codec, tensor: Tensor, seed: int = 0) -> Tensor:
    return codec.decode(codec.encode(tensor, seed), tensor.numel(), tensor.dtype)


def noise(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


@pytest.mark.parametrize("codec", [TopK, RandomK, TopChunks])
@pytest.mark.parametrize("density", [0, -0.1, 1.01, NAN, "0.1", None, True])
def test_bad_densities_are_refused(codec: type[Sparse], density: object) -> None:
    with pytest.raises(ConfigurationError, match="density must be above 0 and at most 1"):
        codec(density=density)


@pytest.mark.parametrize("chunk", [0, -1, 2.0, None, True])
def test_bad_chunks_are_refused(chunk: object) -> None:
    with pytest.raises(ConfigurationError, match="chunk must be a positive number of elements"):
        TopChunks(chunk=chunk)


def test_the_share_is_rounded_up_and_not_by_accident() -> None:
    assert [TopK(density=0.07).share(n) for n in (0, 1, 99, 100, 101)] == [0, 1, 7, 7, 8]
    assert TopK(density=1).share(3) == 3
    assert TopK(density=1e-9).share(10) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_top_k_sends_the_largest_exactly(dtype: torch.dtype) -> None:
    tensor = noise(1000).to(dtype)
    decoded = through(TopK(density=0.1), tensor)
    kept = decoded != 0
    assert kept.sum() == 100
    assert torch.equal(decoded[kept], tensor[kept])
    assert tensor[~kept].abs().max() <= tensor[kept].abs().min()
    assert torch.equal(through(TopK(density=1), tensor), tensor)


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_is_not_finite_is_the_largest(poison: float) -> None:
    tensor = noise(1000) * 1e30
    tensor[123] = poison
    assert not through(TopK(density=0.001), tensor)[123].isfinite()
    assert not through(TopChunks(density=0.01, chunk=10), tensor)[120:130].isfinite().all()


def test_random_k_draws_every_element_alike() -> None:
    """One of every stretch, each as often as its neighbours; where stretches are uneven, too."""
    codec, tensor = RandomK(density=0.3), torch.ones(10)
    counts = torch.stack([through(codec, tensor, seed) for seed in range(3000)]).sum(0)
    assert counts.sum() == 9000
    stretches = [(0, 3), (3, 6), (6, 10)]
    for begin, end in stretches:
        share = 3000 / (end - begin)
        assert ((counts[begin:end] - share).abs() < 5 * share**0.5).all()


def test_random_k_shows_what_it_does_not_send() -> None:
    tensor = torch.ones(1000)
    tensor[5] = INF
    for seed in range(20):
        decoded = through(RandomK(density=0.001), tensor, seed)
        assert decoded.isnan().sum() + decoded.isinf().sum() == 1


def test_random_k_needs_the_payload_alone() -> None:
    codec, tensor = RandomK(density=0.1, unbiased=True), noise(100).double()
    decoded = through(codec, tensor, seed=-7)
    kept = decoded != 0
    assert kept.sum() == 10
    assert torch.allclose(decoded[kept], 10 * tensor[kept], rtol=1e-12)


class Asked(TorchDispatchMode):
    """Notes whether a value was asked for: of a device the host would have to wait for it."""

    asked = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked |= "local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("unbiased", [False, True])
def test_random_k_asks_for_no_value(unbiased: bool) -> None:
    codec, tensor, total = RandomK(density=0.1, unbiased=unbiased), noise(100), torch.zeros(100)
    with Asked() as mode:
        payload = codec.encode(tensor, seed=3)
        codec.add_decoded(payload, total)
        assert not mode.asked
        total.sum().item()
        assert mode.asked, "it can be seen"
    assert torch.equal(total, through(codec, tensor, seed=3))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**62 + 7, 2**64 - 1])
def test_a_payload_tells_which_elements_a_seed_draws(seed: int) -> None:
    """Both words of its keys, the sign bit of either included."""
    tensor = torch.arange(1, 10_001).double()
    decoded = through(RandomK(density=0.1), tensor, seed)
    indices, _ = RandomK(density=0.1).drawn(keys(seed), 10_000, tensor.device)
    assert torch.equal(decoded.nonzero().flatten(), indices)


@pytest.mark.parametrize("codec", [TopK(), TopChunks(chunk=1)], ids=repr)
def test_more_places_than_32_bits_tell_apart_are_refused(codec: Codec) -> None:
    with pytest.raises(ConfigurationError, match="32-bit numbers which of 2147483649 places"):
        codec.encode(torch.empty(2**31 + 1, device="meta"))


def test_top_chunks_sends_whole_chunks() -> None:
    tensor = torch.full((100,), 0.1)
    tensor[42], tensor[73] = 5.0, -7.0
    decoded = through(TopChunks(density=0.2, chunk=10), tensor)
    assert torch.equal(decoded[40:50], tensor[40:50])
    assert torch.equal(decoded[70:80], tensor[70:80])
    assert torch.count_nonzero(decoded) == 20


@pytest.mark.parametrize("numel", [1, 3, 99, 100, 101])
def test_a_chunk_larger_than_the_tensor_is_the_tensor(numel: int) -> None:
    tensor = noise(numel)
    assert torch.equal(through(TopChunks(density=0.01, chunk=10**9), tensor), tensor)


@pytest.mark.parametrize("numel", [1, 7, 512, 513, 1023, 1025])
@pytest.mark.parametrize("chunk", [1, 2, 512])
def test_all_chunks_are_everything(numel: int, chunk: int) -> None:
    tensor, total = noise(numel), torch.ones(numel)
    codec = TopChunks(density=1, chunk=chunk)
    assert torch.equal(through(codec, tensor), tensor)
    codec.add_decoded(codec.encode(tensor), total)
    assert torch.equal(total, 1 + tensor)
