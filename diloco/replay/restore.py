"""`diloco restore`: puts a bundle's tape and objects on a server, or its logs into a folder."""

import asyncio
import contextlib
from pathlib import Path

from diloco.common.process.config import Config, load_config
from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError, IntegrityError, StreamMissingError
from diloco.common.storage.bundle import Bundle, BundleStore, open_bundle
from diloco.common.storage.bus import jetstream
from diloco.common.storage.bus.protocol import stream_exists
from diloco.common.storage.store import ObjectStore, open_store
from diloco.operate.make_streams import make_streams, tape_limits
from diloco.run.cli.opening import placed
from diloco.run.cli.screen import say, working

# The most messages that a tape may lack between its first and last. Each is filled in and deleted
# on the server, which takes about an hour for so many.
MOST_MISSING = 100_000_000


def run_restore(path: Path, config: Path | None, *, objects: bool) -> None:
    """Puts a bundle's tape on a server that does not have the run.

    Args:
        path: the bundle.
        config: TOML file that names server and store; None: those of command line and environment.
        objects: also put the bundle's objects into the store.

    Raises:
        DilocoError: the file is not a whole bundle, or the server has the run already.
    """
    with contextlib.closing(open_bundle(path)) as bundle:
        if lost := bundle.header.get("lost", ""):
            raise ConfigError(f"{str(path)!r} is a part of a run only: {lost}")
        _check_gaps(bundle)
        if objects and not bundle.has_objects:
            raise ConfigError(f"{str(path)!r} was made with --no-objects: it has none to restore")
        place = load_config(config) if config else placed(bundle.run, stored=objects)
        with working("writing"):
            count = asyncio.run(_restore(bundle, place, objects=objects))
        told = f"run [bold]{bundle.run}[/]: {count} messages are on {place.bus.url}"
        more = f", {len(bundle.objects)} objects in {place.store.url}" if objects else ""
        say(told + more)


def _check_gaps(bundle: Bundle) -> None:
    """Refuses a tape with more than `MOST_MISSING` missing messages.

    Raises:
        IntegrityError: it has more.
    """
    seqs = bundle.tape.seqs
    missing = seqs[-1] - seqs[0] + 1 - len(seqs) if seqs else 0
    if missing > MOST_MISSING:
        raise IntegrityError(
            f"the tape in {str(bundle.path)!r} has gaps of {missing:,} messages: no run's has more "
            f"than {MOST_MISSING:,}",
            hint="the file's maker wrote false sequences; commands that only read still take it",
        )


async def _restore(bundle: Bundle, place: Config, *, objects: bool) -> int:
    run, section = bundle.run, place.bus
    bus = await jetstream.connect(
        section.url, name="restore", credentials=section.credentials, tls_ca=section.tls_ca
    )
    try:
        stream, subjects = names.tape_stream(run), names.tape_subjects(run)
        # Before objects are stored beside those of an existing run.
        with contextlib.suppress(StreamMissingError):
            await bus.last_sequence(stream)
            raise stream_exists(stream)
        if objects:
            url, emulator = place.store.url, place.store.emulator
            put_objects(bundle, open_store(url, emulator=emulator, create=True))
        messages = map(bundle.message, bundle.tape.offsets)
        count = await bus.restore(stream, subjects, tape_limits(section), messages)
        await make_streams(bus, run, section)
    finally:
        await bus.close()
    return count


def put_objects(bundle: Bundle, store: ObjectStore) -> None:
    """Stores the objects of a bundle; existing objects stay.

    Raises:
        ObjectExistsError: the store has an object of the same name with other bytes.
    """
    held = BundleStore(bundle)
    for info in held.walk(""):
        store.put(info.name, held.get(info.name))


def run_unpack(path: Path, folder: Path) -> None:
    """Writes the files of a bundle (logs, notes, list of packages) into a new folder.

    Raises:
        ConfigError: the folder exists.
        IntegrityError: the bundle is damaged.
    """
    if folder.exists():
        raise ConfigError(f"{str(folder)!r} exists already", hint="give another name")
    with contextlib.closing(open_bundle(path)) as bundle:
        # A file whose names lead out of the folder is refused (`common/storage/bundle/check.py`).
        for name in bundle.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("xb") as file:
                file.writelines(bundle.parts(name))
        say(
            f"{len(bundle.files)} files are in {folder}, as the bundle's maker has them: nothing "
            "has checked what they say"
        )
