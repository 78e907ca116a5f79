"""Who may import whom, read from the source."""

import ast
import re
from pathlib import Path

import pytest

import gossamer

ROOT = Path(gossamer.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def imports(path: Path) -> set[str]:
    """Every module or name that a file imports, in full, wherever in the file; and every ``torch.…`` it spells out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path)}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Attribute):
            spelled = ast.unparse(node)
            found |= {spelled} if spelled.startswith("torch.") else set()
    return found


IMPORTS = {place(path): imports(path) for path in SOURCES}


def offenders(inside: str, *forbidden: str) -> list[str]:
    """Files of a folder (or a file) that import one of these modules, or anything below them."""
    return [
        f"{name} imports {module}"
        for name, modules in IMPORTS.items()
        if name.startswith(inside)
        for module in modules
        if any(module == each or module.startswith(f"{each}.") for each in forbidden)
    ]


def test_the_reader_sees_imports() -> None:
    """Else the tests below could not fail."""
    assert offenders("comm/torch/runner.py", "torch.distributed")
    assert offenders("comm/connect.py", "gossamer.comm.torch.runner"), "inside a function, too"
    assert not offenders("algorithms/", "gossamer.simulate")


def test_only_the_torch_runner_the_benchmarks_and_the_integrations_know_the_network() -> None:
    allowed = ("comm/torch/", "bench/", "integrations/")
    assert [line for line in offenders("", "torch.distributed") if not line.startswith(allowed)] == []


UPPER_NAMES = (
    "checkpoint",
    "checkpoint_files",
    "engine",
    "replica",
    "replicate",
    "lab",
    "bench",
    "simulate",
    "planning",
    "replication",
    "cli",
    "data",
)
UPPER = [f"gossamer.{name}" for name in UPPER_NAMES]


@pytest.mark.parametrize(
    "folder",
    ["algorithms/", "codecs/", "comm/operations.py", "comm/ops.py", "bucket_plan.py", "buckets.py", "state.py"],
)
def test_what_an_algorithm_is_made_of_knows_nothing_above(folder: str) -> None:
    transports = [f"gossamer.comm.{name}" for name in ("runner", "loopback", "connect", "torch")]
    assert offenders(folder, *UPPER, *transports) == []


def test_algorithms_know_no_optimizer() -> None:
    assert offenders("algorithms/", "gossamer.optim") == []


def test_codecs_know_no_algorithm() -> None:
    assert offenders("codecs/", "gossamer.algorithms", "gossamer.comm") == []


def test_transports_know_no_algorithm() -> None:
    assert offenders("comm/", *UPPER, "gossamer.algorithms", "gossamer.codecs") == []


def test_topologies_import_nothing_of_ours_but_errors_and_checks() -> None:
    bottom = ("gossamer.errors", "gossamer.checks")
    below = (*bottom, "gossamer.comm.patterns")
    pure = (*below, "gossamer.comm.topology", "gossamer.comm.digraph")
    assert offenders("comm/topology.py", "numpy") == offenders("comm/patterns.py", "numpy") == []
    may_import = {"comm/patterns.py": bottom, "comm/topology.py": below, "comm/digraph.py": pure, "comm/mixing.py": pure}
    for file, may in may_import.items():
        allowed = tuple(f"{file} imports {name}" for name in may)
        assert [line for line in offenders(file, "gossamer", "torch") if not line.startswith(allowed)] == []


def test_optimizers_know_nothing_of_the_network() -> None:
    allowed = ("gossamer.errors", "gossamer.checks", "gossamer.compiling", "gossamer.hooks", "gossamer.optim")
    communicating = ("optim/__init__.py", "optim/communicating.py", "optim/one_bit_adam.py")  # these know algorithms and codecs
    others = [line for line in offenders("optim/", "gossamer") if not line.startswith(communicating)]
    assert [line for line in others if not line.split(" imports ")[1].startswith(allowed)] == []
    assert offenders("optim/", "gossamer.comm", "gossamer.engine", "gossamer.replica", "gossamer.replicate") == []


def test_data_know_the_exchanges_but_not_the_replicas() -> None:
    rooms = (
        "algorithms",
        "bucket_plan",
        "buckets",
        "codecs",
        "replica",
        "replicate",
        "lab",
        "bench",
        "simulate",
        "cli",
        "optim",
    )
    transports = ("loopback", "torch")
    assert offenders("data/", *(f"gossamer.{name}" for name in rooms), *(f"gossamer.comm.{name}" for name in transports)) == []
    allowed = ("gossamer.engine.agreement", "gossamer.engine.lagging")
    assert [line for line in offenders("data/", "gossamer.engine") if not line.split(" imports ")[1].startswith(allowed)] == []


def test_the_lab_itself_needs_no_torch() -> None:
    assert (
        offenders("lab/", "torch", *(f"gossamer.{name}" for name in ("algorithms", "comm", "engine", "replica", "replicate")))
        == []
    )


def test_simulation_needs_no_network() -> None:
    assert offenders("simulate/", "gossamer.comm.torch") == []


def test_plans_are_made_above_the_simulation_and_only_the_entry_point_asks_for_one() -> None:
    below = ("algorithms/", "codecs/", "comm/", "engine/", "optim/", "simulate/", "replica.py", "replication.py", "spelled.py")
    assert [line for folder in below for line in offenders(folder, "gossamer.planning")] == []
    assert offenders("planning/", "gossamer.replicate", "gossamer.comm.torch", "torch.distributed") == []
    assert offenders("simulate/", "gossamer.replicate") == []


def too_long(path: Path, lines: int = 300, statements: int = 60) -> list[str]:
    """A file of more lines, and functions that have more without their docstring."""
    text = path.read_text()
    found = [place(path)] if len(text.splitlines()) > lines else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            shown = first.end_lineno - first.lineno + 1 if ast.get_docstring(node) is not None else 0  # type: ignore[operator]
            if node.end_lineno - node.lineno + 1 - shown > statements:  # type: ignore[operator]
                found.append(f"{place(path)}: {node.name}")
    return found


def test_files_and_functions_are_short() -> None:
    assert [line for path in SOURCES for line in too_long(path)] == []


def test_the_reader_sees_what_is_too_long(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text('def short():\n    """Doc.\n\n    More.\n    """\n    return 1\n')
    assert too_long(file, lines=6, statements=2) == []
    assert too_long(file, lines=5, statements=1) == ["file.py", "file.py: short"]


def code_lines(path: Path) -> int:
    """Lines of a file that are no docstring, import, comment or blank."""
    text = path.read_text()
    other = {number for number, line in enumerate(text.splitlines(), 1) if not line.strip() or line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if words or isinstance(node, ast.Import | ast.ImportFrom):
            other |= set(range(node.lineno, node.end_lineno + 1))  # type: ignore[attr-defined]
    return len(text.splitlines()) - len(other)


def test_the_library_is_small() -> None:
    assert 1000 < sum(map(code_lines, SOURCES)) <= 21_000
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "bench").glob("*.py")) <= 3_500


OUTER_LOOPS = ("local_sgd", "diloco", "streaming_diloco", "eager_diloco", "sparse_loco", "des_loc", "sparta")


@pytest.mark.parametrize("method", OUTER_LOOPS)
def test_an_outer_loop_is_a_short_file_that_the_engine_does_not_know(method: str) -> None:
    """All of them are one mechanism: a cadence, an outer step, an average."""
    assert too_long(ROOT / "algorithms" / f"{method}.py", lines=100) == []
    for above in ("engine/", "replica.py", "replicate.py", "replication.py", "simulate/"):
        assert offenders(above, f"gossamer.algorithms.{method}") == []


def unpickled(path: Path) -> list[str]:
    """The calls of a file that may unpickle something."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            call, options = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
            careless = call == "torch.load" and options.get("weights_only") != "True"
            if careless or re.search(r"pickle\.|_object(_list)?$|^pickle", call):
                found.append(f"{place(path)}: {call}")
    return found


def test_nothing_is_unpickled() -> None:
    """Neither from a file nor from another rank: a pickle runs what its writer likes."""
    assert [call for path in SOURCES for call in unpickled(path)] == []
    assert offenders("", "pickle") == []


def test_the_reader_sees_what_unpickles(tmp_path: Path) -> None:
    text = "torch.load(f)\ntorch.load(f, weights_only=False)\ndist.all_gather_object(a, b)\ntorch.load(f, weights_only=True)"
    file = tmp_path / "file.py"
    file.write_text(text)
    assert len(unpickled(file)) == 3


def test_only_what_a_user_starts_knows_the_tools() -> None:
    tools = ("gossamer.lab", "gossamer.bench", "gossamer.cli")
    simulating = ("simulate/command.py", "simulate/named.py", "simulate/pictures.py")
    started = ("lab/", "bench/", "cli.py", "planning/command.py", "__main__.py", *simulating)
    assert [line for line in offenders("", *tools) if not line.startswith(started)] == []


def module_of(path: Path) -> str:
    return ".".join(("gossamer", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


def imported(path: Path) -> set[str]:
    """The modules of ours that are imported when a file is, without what its functions import when they are called."""
    top = [node for node in ast.parse(path.read_text()).body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    named: list[str] = []
    for node in (inner for each in top for inner in ast.walk(each)):
        if isinstance(node, ast.ImportFrom):
            named += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
    return {next((m for m in (name, name.rpartition(".")[0]) if m in MODULES), "") for name in named} - {"", module_of(path)}


def test_no_import_goes_in_a_circle() -> None:
    graph = {name: imported(path) for name, path in MODULES.items()}
    assert graph["gossamer.replicate"], "else this could not fail"
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        graph = {name: others for name, others in graph.items() if name not in leaves}
    assert not graph, f"these import each other: {sorted(graph)}"
