"""Lab command: its options, its refusals, its exit codes."""

from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from gossamer.lab.command import CONTEXT_SETTINGS, lab

app = typer.Typer()
app.command(context_settings=CONTEXT_SETTINGS)(lab)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--hosts 0", "hosts is 0"),
        ("--hosts 2 --rate fast", "'fast' is no rate"),
        ("--hosts 2 --rate 1gbit,1gbit,1gbit", "3 rates for 2 hosts"),
        ("--hosts 2 --slow 1", "'1' is no slowed host"),
        ("--hosts 2 --slow-link one=1gbit", "'one=1gbit' is no slow link"),
        ("--hosts 2 --slow-link 1=fast", "'fast' is no rate"),
        ("--hosts 2 --slow-by magic", "slow_by is 'magic'"),
        ("--hosts 2 --slow 5=2", "slow names host 5"),
        ("--hosts 2 --latency fast", "'fast' is no duration"),
        ("--hosts 2 --shaping magic", "shaping is 'magic'"),
        ("--hosts 2 --timeout -1", "timeout is -1"),
        ("--hosts 2", "there is no script 'nowhere.py'"),
    ],
)
def test_refuses_immediately(options: str, complaint: str) -> None:
    outcome = CliRunner().invoke(app, [*options.split(), "--", "nowhere.py"])
    assert outcome.exit_code == 2
    assert complaint in outcome.output


def test_an_unknown_option_is_an_error(script: Callable[[str], str]) -> None:
    assert CliRunner().invoke(app, ["--host", "2", "--", script("pass")]).exit_code == 2


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_a_scripts_own_options_are_its_own(
    script: Callable[[str], str], capfd: pytest.CaptureFixture[str], separator: list[str]
) -> None:
    path = script("import sys; print(sys.argv[1:]); sys.exit(5)")
    outcome = CliRunner().invoke(app, ["--hosts", "1", "--shaping", "none", *separator, path, "--hosts", "9"])
    assert outcome.exit_code == 5
    assert "[rank 0] ['--hosts', '9']" in outcome.output + capfd.readouterr().out
