"""`diloco --help` fits one screen and has every command; an old command says its new name."""

import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from diloco.common.protocol.errors import ConfigError, Exit
from diloco.program import Program, app
from diloco.run.cli.help import FORMER

SCREEN = (40, 80)


def test_the_help_fits_one_screen_and_has_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output.splitlines()
    found = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert len(shown) <= SCREEN[0]
    assert max(map(len, shown)) < SCREEN[1]
    assert not [line for line in shown if line.endswith("...") and "COMMAND" not in line]
    listed = [name for names in Program.parts.values() for name in names]
    assert set(listed) == found
    assert len(listed) <= 24


@pytest.mark.parametrize("old", FORMER)
def test_an_old_command_says_what_is_typed_now(old: str) -> None:
    error = CliRunner().invoke(app, [*old.split(), "run.toml"]).exception
    assert isinstance(error, ConfigError)
    assert f"`diloco {old}`" in error.message
    assert error.hint is not None
    words = error.hint.removeprefix("now: diloco ").split()
    command = get_command(app)
    while words and words[0].islower():
        command = command.commands[words.pop(0)]  # type: ignore[attr-defined]


def test_its_exit_status_is_that_of_any_wrong_command() -> None:
    for wrong in ("rollback", "frobnicate"):
        done = subprocess.run(
            [sys.executable, "-m", "diloco", wrong], capture_output=True, text=True, check=False
        )
        assert (done.returncode, "Traceback" in done.stderr) == (Exit.CONFIG, False)
