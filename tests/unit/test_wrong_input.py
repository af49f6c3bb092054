"""Wrong input on the command line ends in a sentence, never in a trace, and leaves nothing behind."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import typer
from typer.testing import CliRunner

from diloco.common.process.config import RunSettings
from diloco.common.protocol.errors import ConfigError, Exit
from diloco.program import app
from diloco.run.cli.failing import as_failure
from diloco.run.cli.screen import confirm
from diloco.run.cli.settings import assign, parse_assigned


def refusal(*words: str) -> ConfigError:
    """Returns a command's refusal of its arguments."""
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, words, catch_exceptions=False, standalone_mode=False)
    assert caught.value.status == Exit.CONFIG
    return caught.value


def test_folders_that_cannot_be_made() -> None:
    for words in (
        ("local", "--run-dir", "/proc/x", "--learners", "1", "--steps", "4"),
        ("auth", "init", "/proc/x", "--run", "demo"),
    ):
        assert "cannot make the folder '/proc/x'" in refusal(*words).message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[run]\nname = "x"\nsteps = "many"\n', "'run.steps' must be a whole number, got 'many'"),
        ("[run\n", "is not valid TOML"),
        ("[sync]\nfragmets = 3\n", "did you mean 'sync.fragments'?"),
        ("[snyc]\n", "did you mean 'sync'?"),
        ("[outer]\nzzz = 1\n", "unknown key 'outer.zzz'"),
        ("bus = 3\n", "'bus' must be a table, got 3"),
        ('[run]\nname = "x"\nsteps = 9999999999\n', "'run.steps' must be at most"),
    ],
)
def test_files_are_named_in_what_is_said_of_them(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    error = refusal("doctor", str(path))
    assert said in error.message
    assert error.message.startswith(str(path))


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    assert (
        refusal("doctor", str(path)).message
        == f"cannot read {str(path)!r}: it is not text in UTF-8"
    )


@pytest.mark.parametrize("url", ["http://me:secret@host:4222", "nats://me:secret@host:99999"])
@pytest.mark.parametrize("words", [("check",), ("run", "create", "--config")])
def test_a_url_is_looked_at_before_a_model_is_made(
    tmp_path: Path, words: tuple[str, ...], url: str
) -> None:
    path = tmp_path / "run.toml"
    sections = {"run": {"name": "x", "steps": 4}, "store": {"url": str(tmp_path / "store")}}
    # A task that cannot be made: the URL comes first.
    sections |= {"bus": {"url": url}, "task": {"build": "nosuch:build"}}
    path.write_text(tomli_w.dumps(sections))
    message = refusal(*words, str(path)).message
    assert message == f"{url.partition('@')[2]!r} is not a NATS URL"


def test_a_question_that_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, caught in (("", ConfigError), ("n\n", typer.Abort)):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        with pytest.raises(caught):
            confirm("go on?")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    confirm("go on?")


@pytest.mark.parametrize("wrong", ["sync.fragmets=3", "outer.learning_rate.x=1", "run.steps=many"])
def test_a_misspelt_setting_of_a_local_run_leaves_no_folder(tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "run"
    words = ("local", "--run-dir", str(folder), "--learners", "1", "--steps", "4")
    refusal(*words, "--set", wrong)
    assert not folder.exists()


def test_a_local_run_takes_only_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("/dev/null", str(tmp_path)):
        assert folder in refusal("local", "--run-dir", folder, "--steps", "4").message


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text elsewhere")
def test_a_local_runs_folder_needs_a_name_that_is_text(tmp_path: Path) -> None:
    folder = os.fsdecode(bytes(tmp_path) + b"/run\xff")
    error = refusal("local", "--run-dir", folder, "--learners", "1", "--steps", "4")
    assert "is not text in UTF-8" in error.message
    assert not Path(folder).exists()


def test_a_local_runs_file_is_checked_before_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('[run]\nname = "x"\nsteps = "many"\n')
    error = refusal("local", "--config", str(path), "--run-dir", str(tmp_path / "run"))
    assert error.message.startswith(f"{path}: 'run.steps'")


def test_a_budget_of_tokens_needs_the_tokens_of_a_step() -> None:
    error = refusal("plan", "--learners", "2", "--mtbi", "never", "--tokens", "1e12")
    assert "depends on the tokens of a step" in error.message
    assert error.hint is not None
    assert "--step-tokens" in error.hint


def test_what_the_machine_refuses_is_said_with_its_path() -> None:
    assert (said := as_failure(PermissionError(13, "Permission denied", "/proc/x"))) is not None
    assert said.message == "cannot use '/proc/x': Permission denied"
    assert (said := as_failure(OSError(28, "No space left on device"))) is not None
    assert said.message == "a disk is full: No space left on device"
    assert as_failure(OSError("of a library")) is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("option", ["--version", "--help"])
def test_an_output_that_takes_nothing(option: str) -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "diloco", option],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=300,
        )  # fmt: skip
    assert ended.returncode == Exit.FAILED
    assert ended.stderr.startswith("error: a disk is full: No space left on device\n")
    assert "Traceback" not in ended.stderr


def test_words_that_are_no_commands_nor_options() -> None:
    for words, meant in (
        (["statsu"], "status"),
        (["run", "sett"], "set"),
        (["plan", "--lerners", "2"], "--learners"),
        (["run", "create", "--config", "x", "--log-level", "loud"], "warning"),
    ):
        shown = CliRunner().invoke(app, words)
        assert shown.exit_code == Exit.CONFIG
        assert meant in shown.stderr


def test_a_shell_completes() -> None:
    asked = {"_DILOCO_COMPLETE": "complete_bash", "COMP_WORDS": "diloco sta", "COMP_CWORD": "1"}
    shown = CliRunner().invoke(app, [], prog_name="diloco", env=asked)
    assert shown.stdout.split() == ["status"]


def test_keys_of_a_value_are_refused_where_settings_are_changed() -> None:
    document = RunSettings.model_validate({"run": {"name": "r", "steps": 9}}).model_dump()
    with pytest.raises(ConfigError, match="'learning_rate' is a value, and has no keys") as caught:
        assign(document, "outer.learning_rate.x=1")
    assert caught.value.hint == "for example --set outer.learning_rate=1"
    assign(document, "outer.learning_rate=1")
    assert parse_assigned(document).outer.learning_rate == 1.0
