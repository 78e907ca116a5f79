"""What a script of the lab printed, and what is said when it failed."""

import pytest

from gossamer.bench.in_lab import lab_json, lab_result
from gossamer.errors import GossamerError
from gossamer.lab import LabError, LabSpec

HERE = LabSpec(hosts=2, shaping="none", timeout=60)

pytestmark = pytest.mark.processes


@pytest.fixture
def script(tmp_path):
    def write(source):
        path = tmp_path / "script.py"
        path.write_text("import os, sys, json, time\nrank = int(os.environ['RANK'])\n" + source)
        return [str(path)]

    return write


def test_the_result_is_known_by_its_key_however_long_it_is_and_whatever_else_is_printed(script):
    source = (
        "if rank == 0:\n    print(json.dumps({'methods': ['x' * 300_000]}))\n    print('{\"loss\": 1}')\n    print('{no')\n"
    )
    source += "    print('{\"methods\": 2}', file=sys.stderr)\n"
    assert lab_result(HERE, script(source), "methods") == {"methods": ["x" * 300_000]}


def test_no_result_is_an_error(script):
    with pytest.raises(GossamerError, match="printed no result"):
        lab_result(HERE, script("print('{\"loss\": 1}')"), "methods")


def test_the_rank_that_failed_first_is_quoted_and_not_those_that_missed_it(script):
    source = "if rank == 1:\n    raise ValueError('the cause')\ntime.sleep(3)\n"
    source += "print('\\n'.join(['Connection closed by peer'] * 50), file=sys.stderr)\nsys.exit(3)\n"
    with pytest.raises(GossamerError, match=r"first on rank 1:(.|\n)*ValueError: the cause") as caught:
        lab_json(HERE, script(source))
    assert "Connection closed" not in str(caught.value)


def test_a_network_is_emulated_or_refused(monkeypatch):
    asked = []

    def refuse(spec, command, on_line):
        asked.append(spec.shaping)
        raise LabError("not possible here")

    monkeypatch.setattr("gossamer.bench.in_lab.run_lab", refuse)
    for spec in (LabSpec(hosts=2, rate="20mbit"), LabSpec(hosts=2)):
        with pytest.raises(LabError):
            lab_json(spec, ["-c", "pass"])
    assert asked == ["namespaces", "auto"]
