"""Configuration keys that had another name: a file is told the new one, a specification is read."""

import pytest

from diloco.common.config import RENAMED, Config, make_config, parse_settings
from diloco.common.errors import ConfigError

LEAST = {"run": {"name": "r", "steps": 100}, "store": {"url": "file:///tmp/x"}}


def make(**sections) -> Config:
    return make_config({**LEAST, **sections}, source="run.toml")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_key_answers_with_the_new_one(old, new):
    section, key = old.split(".")
    with pytest.raises(ConfigError) as caught:
        make(**{section: {key: 3}})
    assert caught.value.message == f"run.toml: '{old}' is now '{new}'"


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_new_name_is_a_key(old, new):
    section, key = new.split(".")
    fields = Config.model_fields[section].annotation.model_fields
    assert key in fields
    assert old.split(".")[1] not in fields


def test_an_old_specification_is_read():
    settings = make(quorum={"liveness_timeout_s": 3.0}, staleness={"max_versions": 5}).settings()
    fields = settings.model_dump()
    for old, new in RENAMED.items():
        section, key = old.split(".")
        if section in fields:
            fields[section][key] = fields[section].pop(new.split(".")[1])
    assert fields["quorum"]["live_s"] == 3.0
    assert parse_settings(fields) == settings


def test_both_names_in_one_specification_are_refused():
    fields = make().settings().model_dump()
    fields["quorum"]["live_s"] = 3.0
    with pytest.raises(ConfigError, match=r"'quorum.live_s' is now 'quorum.liveness_timeout_s'"):
        parse_settings(fields)
