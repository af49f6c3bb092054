"""RUN as operators name it: a file, or the folder of a local run that may have ended."""

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forged import Frames, frames_of, write
from harness import World, make_world

from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol.errors import (
    BusError,
    BusUnavailableError,
    ConfigError,
    IntegrityError,
    RunIncompleteError,
    RunMismatchError,
    RunMissingError,
    StoreMissingError,
)
from diloco.judge.doctor import examine
from diloco.operate.remove import belongings, check_bundled, remove
from diloco.replay.bundle import run_bundle
from diloco.replay.options import BundleOptions
from diloco.replay.restore import run_restore
from diloco.run.cli.opening import RunLocation, open_run, use_place

FRAGMENTS = 3


@pytest.fixture
def ended_run(tmp_path: Path, unique: str) -> World:
    """The folder of a local run; its server is stopped."""
    folder = tmp_path / "run"
    with NatsServer(folder / "nats") as server:
        world = make_world(unique, folder, server.url)
        world.create()
    return world


def opened(target: Path | str) -> tuple[str, int]:
    """Returns a run's name and its tape's last sequence, as opening finds them."""

    async def look() -> tuple[str, int]:
        async with open_run(target) as run:
            last = await run.context.bus.last_sequence(run.context.tape)
            return run.specification.run, last

    return asyncio.run(look())


def test_an_ended_local_run_is_served_for_the_time_of_the_command(ended_run: World) -> None:
    for _ in range(2):
        name, last = opened(ended_run.folder)
        assert name == ended_run.name
        assert last == 1 + FRAGMENTS, "the specification, and version 0 of each"
        with pytest.raises(BusUnavailableError):
            opened(ended_run.config_path)  # only the folder says that it is a local run


def test_a_local_run_under_way_is_asked_where_it_is(ended_run: World) -> None:
    with NatsServer(ended_run.folder / "nats", port=port_of(ended_run)):
        assert opened(ended_run.folder)[0] == ended_run.name
        assert opened(ended_run.config_path)[0] == ended_run.name


def test_a_local_run_that_is_being_created_is_said_to_begin(tmp_path: Path, unique: str) -> None:
    with NatsServer(tmp_path / "nats") as server:
        make_world(unique, tmp_path, server.url)
        with pytest.raises(RunIncompleteError, match="is being created"):
            opened(tmp_path)
        found = asyncio.run(examine(str(tmp_path)))
    (said,) = [one for one in found.findings if one.severity != "ok"]
    assert (said.about, said.severity, found.exists) == ("run", "note", False)
    assert "is being created" in said.sentence


def test_somebody_else_has_come_by_the_port(ended_run: World, tmp_path: Path) -> None:
    with NatsServer(tmp_path / "other", port=port_of(ended_run)):
        assert opened(ended_run.folder)[0] == ended_run.name
        with pytest.raises(RunMismatchError, match="there is no run"):
            opened(ended_run.config_path)


def test_a_folder_in_use_by_a_server_that_is_elsewhere(ended_run: World) -> None:
    with NatsServer(ended_run.folder / "nats"), pytest.raises(BusError, match="in use by"):
        opened(ended_run.folder)


def test_a_folder_that_was_copied_is_a_run_of_its_own(ended_run: World, tmp_path: Path) -> None:
    """Neither the first one's server nor its store is touched by who names the copy."""
    with NatsServer(ended_run.folder / "nats", port=port_of(ended_run)):
        pass
    copy = tmp_path / "copy"
    shutil.copytree(ended_run.folder, copy)
    with NatsServer(ended_run.folder / "nats", port=port_of(ended_run)):
        found = asyncio.run(belongings(str(copy), going_on=True))
        assert found.places[1] == str(copy / "store")
        assert found.objects
        asyncio.run(remove(str(copy), found))
        assert opened(ended_run.folder)[0] == ended_run.name
    with pytest.raises(RunMissingError):
        opened(copy)
    assert not [path for path in (copy / "store").rglob("*") if path.is_file()]


def test_a_run_that_is_bundled_and_removed_can_be_restored(
    ended_run: World, tmp_path: Path
) -> None:
    copy, file = tmp_path / "copy", tmp_path / "run.bundle"
    shutil.copytree(ended_run.folder, copy)
    run_bundle(str(copy), file, BundleOptions())
    run_bundle(str(copy), tmp_path / "tape", BundleOptions(objects=False))
    asyncio.run(check_bundled(str(copy), file))
    with pytest.raises(IntegrityError, match="is not the whole run"):
        asyncio.run(check_bundled(str(copy), tmp_path / "tape"))
    # As if the run had gone on: its last message is not in the file.
    write(tmp_path / "short", without_last_message(frames_of(file)))
    with pytest.raises(IntegrityError, match="is not the whole run"):
        asyncio.run(check_bundled(str(copy), tmp_path / "short"))
    with NatsServer(tmp_path / "other") as server:
        use_place(RunLocation(server.url, str(tmp_path / "objects")))
        try:
            run_restore(file, None, objects=True)
            assert opened(ended_run.name)[0] == ended_run.name
            asyncio.run(check_bundled(ended_run.name, file))
            # Nothing is put beside the objects of a run that is there.
            use_place(RunLocation(server.url, str(tmp_path / "untouched")))
            with pytest.raises(BusError, match="exists already"):
                run_restore(file, None, objects=True)
            assert not (tmp_path / "untouched").exists()
        finally:
            use_place(RunLocation())


def without_last_message(frames: Frames) -> Frames:
    last = max(index for index, one in enumerate(frames) if isinstance(one, list))
    end = frames[-1] | {"messages": frames[-1]["messages"] - 1}
    return [*frames[:last], *frames[last + 1 : -1], end]


@contextlib.contextmanager
def moved(path: Path) -> Iterator[None]:
    away = path.with_name("away")
    path.rename(away)
    yield
    assert not path.exists(), "who only reads makes no folder"
    away.rename(path)


def test_the_store_has_no_such_run(ended_run: World) -> None:
    with moved(ended_run.store), pytest.raises(StoreMissingError) as caught:
        opened(ended_run.folder)
    assert "store.url" in caught.value.hint
    assert opened(ended_run.folder)[0] == ended_run.name


def nothing(path: Path) -> Path:
    return path / "nothing"


def empty_folder(path: Path) -> Path:
    (path / "empty").mkdir()
    return path / "empty"


@pytest.mark.parametrize("target", [nothing, empty_folder])
def test_what_is_no_run_is_answered_with_a_sentence(
    tmp_path: Path, target: Callable[[Path], Path]
) -> None:
    with pytest.raises(ConfigError, match="neither a configuration file nor the folder"):
        opened(target(tmp_path))


def port_of(world: World) -> int:
    return int(world.url.rpartition(":")[2])
