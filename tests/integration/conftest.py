"""Runs of real processes for the tests of this folder."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import COMPILED, World, open_world

from diloco.common.process.nats_server import NatsServer


@pytest.fixture(scope="session", autouse=True)
def _share_compiled_programs() -> None:
    """All processes of all workers' tests compile the tiny task once."""
    COMPILED.path = Path(os.environ["TESTS_COMPILED"]) / "processes"


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Fills a folder once for all workers, each of which would else make its own."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def once(name: str, make: Callable[[Path], None]) -> Path:
        folder, made = root / name, root / f"{name}.made"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                make(folder)
                made.touch()
        return folder

    return once


@pytest.fixture
def new_world(
    request: pytest.FixtureRequest, unique: str, tmp_path: Path
) -> Iterator[Callable[..., World]]:
    """Makes and creates a run on the session's server, or on one given as `server`."""
    with contextlib.ExitStack() as stack:

        def make(
            *, server: NatsServer | None = None, create: bool = True, **changes: dict[str, Any]
        ) -> World:
            url = (server or request.getfixturevalue("nats_server")).url
            return stack.enter_context(
                open_world(unique, tmp_path / "run", url, create=create, **changes)
            )

        yield make
