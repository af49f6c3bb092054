"""Every command of the runbooks that can run, run against a run that goes on."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from audit import read_tape
from harness import ENDLESS, World
from runbook_pages import RUNBOOKS, commands
from typer.testing import CliRunner

from diloco.common.process import log
from diloco.program import app

# Those that last as long as a run, that want a bus without it, or a task that writes text; and
# what changes the machine.
NOT_RUN = {"aggregator", "learner", "local", "run resume", "run create", "sample", "host units"}
# What changes the run comes after what looks at it, and what ends something last.
ORDER = [
    "auth init",
    "auth add-aggregator",
    "auth add-learner",
    "auth list",
    "auth revoke",
    "doctor",
    "status",
    "bundle",
    "run quarantine",
    "run release",
    "run checkpoint",
    "run rollback",
    "run set",
    "run pause",
    "run continue",
    "run end",
]


def runnable() -> list[list[str]]:
    """The commands of all pages, each once, in an order that makes sense."""
    found = {" ".join(words[1:]): words for path in RUNBOOKS for words in commands(path)}
    ours = [
        text
        for text, words in found.items()
        if words[0].endswith("diloco")
        and len(words) > 2
        and not NOT_RUN & {words[1], " ".join(words[1:3])}
        # With a run it wants a server that asks for credentials: test_permissions.py.
        and not (words[2] == "revoke" and "--run" in words)
        # `diloco auth init` and the like are only spoken of.
        and any(word.isupper() for word in words)
    ]
    return [found[text][1:] for text in sorted(ours, key=place)]


def place(text: str) -> tuple[int, str]:
    places = [at for at, begin in enumerate(ORDER) if text.startswith(begin)]
    return (max(places, default=ORDER.index("status")), text)


@pytest.fixture
def world(new_world: Callable[..., World]) -> Iterator[World]:
    task = {"options": {"notes": "notes", "sleep_s": 0.3}}
    made = new_world(run=ENDLESS, task=task)
    made.aggregator()
    made.learner("learner-0")
    made.until(lambda: min(read_tape(made).versions()) >= 4, "some versions")
    yield made
    for process in made.processes:
        process.check_not_failed()


def test_the_commands_of_the_runbooks_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "configure", lambda _level: None)
    monkeypatch.chdir(world.folder)
    replaced = {
        "RUN": str(world.config_path),
        "FILE": str(world.config_path),
        "OTHER": str(world.config_path),
        "WHAT": "0@2",
        "DIR": str(tmp_path / "auth"),
        "NAME": "learner-0",
        "BUNDLE": str(tmp_path / "run.bundle"),
        "URL": str(world.store),
        "2h": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    found = runnable()
    assert len(found) > 20
    for number, words in enumerate(found):
        # `export` writes into no folder that is there.
        names = {**replaced, "MODEL": str(tmp_path / f"model-{number}")}
        if "add-aggregator" in words:
            names["NAME"] = "standby"
        done = CliRunner().invoke(app, [names.get(word, word) for word in words], input="y\n")
        assert done.exit_code == 0, f"{words}: {done.output} {done.exception!r}"
        assert done.output.strip(), words
    # What one user exports another one may read, the weights like the rest.
    exported = [file for folder in tmp_path.glob("model-*") for file in folder.iterdir()]
    assert len({file.stat().st_mode for file in exported}) == 1, exported
