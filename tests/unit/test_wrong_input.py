"""Wrong input on the command line ends in a sentence, never in a trace, and leaves nothing behind."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.__main__ import app
from diloco.cli.settings import assign, parse_assigned
from diloco.common.config import RunSettings
from diloco.common.errors import ConfigError
from diloco.common.exits import Exit


def refusal(*words: str) -> ConfigError:
    """What a command says to its words."""
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
        ('[run]\nname = "x"\nsteps = "many"\n', "'run.steps': Input should be a valid integer"),
        ("[run\n", "is not valid TOML"),
        ("[sync]\nfragmets = 3\n", "did you mean 'sync.fragments'?"),
        ("[snyc]\n", "did you mean 'sync'?"),
        ("[outer]\nzzz = 1\n", "unknown key 'outer.zzz'"),
    ],
)
def test_files_are_named_in_what_is_said_of_them(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    error = refusal("doctor", str(path))
    assert said in error.message
    assert error.message.startswith(str(path))


@pytest.mark.parametrize("wrong", ["sync.fragmets=3", "outer.learning_rate.x=1", "run.steps=many"])
def test_a_misspelt_setting_of_a_local_run_leaves_no_folder(tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "run"
    words = ("local", "--run-dir", str(folder), "--learners", "1", "--steps", "4")
    refusal(*words, "--set", wrong)
    assert not folder.exists()


def test_keys_of_a_value_are_refused_where_settings_are_changed() -> None:
    document = RunSettings.model_validate({"run": {"name": "r", "steps": 9}}).model_dump()
    with pytest.raises(ConfigError, match="'learning_rate' is a value, and has no keys") as caught:
        assign(document, "outer.learning_rate.x=1")
    assert caught.value.hint == "for example --set outer.learning_rate=1"
    assign(document, "outer.learning_rate=1")
    assert parse_assigned(document).outer.learning_rate == 1.0
