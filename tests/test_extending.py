"""docs/extending.md, executed: its files become modules, its snippets run, and the batteries' laws hold for what it shows."""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gossamer
from gossamer import loopback
from gossamer.algorithms import Algorithm, base, registry
from gossamer.codecs import Codec
from gossamer.simulate import Compute, Link, step_time

from .contracts import laws
from .contracts.cases import Oddities, batch, exchange, make_training, noise, same_bits, tap, train_step, weights

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
FILES = {match[1]: block for block in BLOCKS if (match := re.match(r"# src/(\S+)\.py\n", block))}
SNIPPETS = [block for block in BLOCKS if block not in FILES.values()]


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The page's files as modules of gossamer, for as long as these tests run."""
    known, names = dict(base._REGISTRY), [path.replace("/", ".") for path in FILES]
    for name, source in zip(names, FILES.values(), strict=True):
        path = tmp_path_factory.mktemp("page") / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    yield
    for name in names:
        del sys.modules[name]
    base._REGISTRY.clear()
    base._REGISTRY.update(known)


def algorithm(**fields: object) -> Algorithm:
    return sys.modules["gossamer.algorithms.sign_with_memory"].SignWithMemory(**fields)


def codec() -> Codec:
    return sys.modules["gossamer.codecs.eight_bits"].EightBits()


def test_the_page_shows_two_files_and_runs_its_snippets(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(FILES) == 2
    assert len(SNIPPETS) == 4
    namespace: dict[str, object] = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, str(PAGE), "exec"), namespace)
    assert "SignWithMemory(bucket_bytes=2097152, memory=1.0): 0." in capsys.readouterr().out


def test_the_algorithm_is_found_by_itself() -> None:
    assert base.registry()["SignWithMemory"] is type(algorithm())
    with pytest.raises(gossamer.ConfigurationError, match="between 0 and 1"):
        algorithm(memory=2)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "law",
    [
        partial(laws.result_is_like_the_bucket, shapes=[(7,), (3, 5), (0,)], dtype=torch.bfloat16),
        partial(laws.result_is_like_the_bucket, shapes=[(0,)], dtype=torch.float32),
        laws.meta_tensors_suffice,
        laws.nothing_stays_nothing,
        laws.a_huge_value_stays_finite,
        laws.an_abandoned_exchange_loses_nothing,
        laws.the_same_again_gives_the_same_bits,
        partial(laws.all_ranks_hold_the_same_bits, dtype=torch.float32),
        partial(laws.non_finite_values_reach_all_ranks_and_no_state, poison=float("nan")),
        partial(laws.non_finite_values_reach_all_ranks_and_no_state, poison=float("inf")),
    ],
)
def test_the_algorithm_keeps_the_laws(law: Callable[..., None], world: int) -> None:
    law(algorithm(), world)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "law",
    [
        laws.decoding_is_within_the_bound,
        laws.decoding_is_a_function_of_the_payload,
        laws.the_payload_is_fresh_contiguous_and_no_longer,
        laws.every_dtype_decodes,
        laws.meta_payloads_have_the_real_shape,
    ],
)
def test_the_codec_keeps_the_laws(law: Callable[..., None], dtype: torch.dtype) -> None:
    for numel in (0, 1, 7, 1023):
        for scale in (0, 1e-4, 1, 1e3):
            law(codec(), noise(1, numel, dtype)[0] * scale)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_the_codec_does_not_hide_what_is_not_finite(poison: float) -> None:
    laws.non_finite_stays_visible(codec(), noise(1, 65)[0], poison)


def test_sent_and_kept_is_what_it_had() -> None:
    inputs = [noise(1, 100, seed=step) for step in range(5)]
    outcome = exchange(algorithm(), inputs)[0]
    had = sum(step[0] for step in inputs)
    assert torch.allclose(sum(outcome.results) + outcome.state["residual"], had, atol=1e-5)


def test_a_run_resumes_bit_identically() -> None:
    def body(rank: int, saved: dict | None) -> tuple[Tensor, dict]:
        model, optimizer, replica = make_training(algorithm(bucket_bytes=200))
        for step in range(6):
            if step == 3 and saved is None:
                state = {"replica": replica.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                saved = torch.load(_through_a_file(state), weights_only=True)
            elif step == 3:
                for part, name in ((model, "model"), (optimizer, "optimizer"), (replica, "replica")):
                    part.load_state_dict(saved[name])
            elif step < 3 and saved is not None:
                continue
            train_step(model, optimizer, batch(step, rank))
        replica.close()
        return weights(model), saved

    runs = loopback(lambda rank: body(rank, None), 3)
    for (through, _), (again, _) in zip(runs, loopback(lambda rank: body(rank, runs[rank][1]), 3), strict=True):
        assert same_bits(through, again)


def _through_a_file(state: dict) -> object:
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def test_virtual_time_executes_the_same_operations() -> None:
    looped: dict = {}
    exchange(tap(algorithm(), looped), [noise(1, 22)])
    clocked: dict = {}
    model = torch.nn.ParameterList([torch.empty(22)])
    link, compute = Link(bandwidth=1e9), Compute(forward=0, backward=0)
    step_time(model, tap(algorithm(), clocked), world=1, link=link, compute=compute)
    assert looped[0, 0] == clocked[0, 0]
    assert step_time(Oddities(), algorithm(), world=5, link=link, compute=compute).bytes_per_step > 0


def test_every_algorithm_is_on_the_page_of_algorithms() -> None:
    page = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()
    named = [cls.__name__ for cls in registry().values() if getattr(gossamer, cls.__name__, None) is cls]
    assert [name for name in named if f"`{name}(" not in page] == []
