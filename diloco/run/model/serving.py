"""Serves the newest whole version of a run to inference: as a folder, or in engines.

    DIR/0-000000000120   epoch 0, version 120, with the files of `diloco export`; with the suffix
                         `-last`, the run's last version, if another one has the same number
    DIR/latest           a link to the newest version

A version's folder is written under another name, synced to the disk, and then renamed; the link is
replaced in one step. So whenever the process is killed, the link names a complete version.
"""

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from diloco.common.process import metrics
from diloco.common.process.config import MetricsSection
from diloco.common.process.health import HealthView, report, tell, tell_stopping
from diloco.common.process.metrics import Metrics
from diloco.common.process.probes import Probes, make_probes, serving
from diloco.common.process.retry import Runtime
from diloco.common.process.signals import AskedToStopError, on_signals, unless_asked
from diloco.common.process.tasks import cancel
from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.layout import Layout
from diloco.run.cli.folders import make_folder
from diloco.run.model.files import write_model
from diloco.run.model.follow import Following, LeafRows, ModelChange

LATEST = "latest"
FORMS = ("hf", "safetensors", "deltas")
_PART = ".part"
_VERSION = re.compile(r"\d+-\d{12}(-last)?")
# Names of this process's own files: no other file of the folder is touched.
_LEFT = re.compile(rf"({_VERSION.pattern}|weight_v\d{{6}}|{LATEST}){re.escape(_PART)}")
# Seconds between two measurements of the lag.
LOOK_S = 1.0


class FolderRules(NamedTuple):
    """How a folder is filled with a run's newest versions.

    Attributes:
        folder: the folder, which is made if it is missing.
        form: one of `FORMS`.
        keep: number of newest versions that are not deleted.
        command: command line to run after each version, with the version's folder as its last
            argument; None: none.
    """

    folder: Path
    form: str
    keep: int = 3
    command: str | None = None


class ServedFolder:
    """Keeps a folder with the newest versions of a followed run.

    Args:
        model: the followed run, which must be open.
        rules: the folder, its form, and how many versions it keeps.

    Raises:
        ConfigError: no such form or command, nothing to keep, or the folder cannot be made.
    """

    def __init__(self, model: Following, rules: FolderRules) -> None:
        if rules.form not in FORMS:
            raise ConfigError(f"--format {rules.form!r}: expected {', '.join(FORMS)}")
        if rules.keep < 1:
            raise ConfigError(f"--keep {rules.keep}: expected at least 1")
        self._words = _words_of(rules.command)
        make_folder(rules.folder)
        self._model, self._rules = model, rules
        for left in filter(lambda path: _LEFT.fullmatch(path.name), [*rules.folder.iterdir()]):
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()

    async def take(self, change: ModelChange) -> Path:
        """Writes a version, points `latest` to it, and runs the command.

        Returns the version's folder.

        Raises:
            ConfigError: the version cannot be written, or the task has no such format.
        """
        home, path = self._rules.folder, await self._write(change)
        link = home / f"{LATEST}{_PART}"
        link.symlink_to(path.name)
        link.replace(home / LATEST)
        await asyncio.to_thread(_sync_folder, home)
        self._drop_old(path)
        await self._tell(path)
        return path

    async def _write(self, change: ModelChange) -> Path:
        path = self._rules.folder / f"{change.epoch}-{change.version:012}"
        if path.exists() and not self._is_here(path):
            path = path.with_name(f"{path.name}-last")
        if not path.exists():
            await self._write_files(path, self._rules.form)
        return path

    def _is_here(self, path: Path) -> bool:
        digests = [one.record.view_digest for _, one in sorted(self._model.standing().items())]
        return bool(json.loads((path / "about.json").read_text())["view_digests"] == digests)

    async def _write_files(self, path: Path, form: str, dtype: str | None = None) -> None:
        """Writes the model as of the newest change to the folder `path`, which must not exist."""
        part = path.with_name(path.name + _PART)
        context, at = self._model.run.context, self._model.standing()
        records = {fragment: one.record for fragment, one in at.items()}
        views = {fragment: self._model.view(fragment) for fragment in at}
        await write_model(part, form, context, views, records, dtype=dtype)
        await asyncio.to_thread(sync_files, part)
        part.rename(path)

    def _drop_old(self, newest: Path) -> None:
        """Deletes all but the versions written last, whose numbers may be lower after a resume."""
        others = (path for path in self._rules.folder.iterdir() if path != newest)
        found = [path for path in others if _VERSION.fullmatch(path.name)]
        found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in found[self._rules.keep - 1 :]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        # It is renamed first, so that an incomplete folder never looks like a version.
        shutil.rmtree(path.rename(path.with_name(path.name + _PART)))

    async def _tell(self, path: Path) -> None:
        if not self._words:
            return
        words = [*self._words, str(path)]
        logger = self._model.run.context.logger
        try:
            process = await asyncio.create_subprocess_exec(*words)
            status = await process.wait()
        except OSError as error:
            logger.warning("command_failed", command=words[0], why=str(error.strerror))
        else:
            if status:
                logger.warning("command_failed", command=words[0], why=f"exit status {status}")


def _words_of(command: str | None) -> list[str]:
    if command is None:
        return []
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--exec {command!r} cannot be read: {error}") from error
    if not words:
        raise ConfigError(f"--exec {command!r}: expected a command")
    return words


def sync_files(folder: Path) -> None:
    """Syncs a folder and all files below it to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- `diloco follow`


def serve_folder(
    model: Following, make: Callable[[], ServedFolder], run: str, section: MetricsSection
) -> None:
    """Writes versions to a folder until the run ends or a signal comes; serves metrics meanwhile.

    Args:
        model: the followed run, which is not open yet.
        make: returns the folder, once the run is open.
        run: the run's name.
        section: the settings of metrics.

    Raises:
        DilocoError: an error that no retry can mend, with advice.
    """
    probes = make_probes(Runtime().retries, run=run)
    with serving(section, probes), contextlib.suppress(AskedToStopError):
        asyncio.run(_serve(model, make, probes))


async def _serve(model: Following, make: Callable[[], ServedFolder], probes: Probes) -> None:
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    on_signals(lambda: loop.call_soon_threadsafe(asked.set))
    probes.health.begin_phase("connecting to the run")
    async with model:
        logger = model.run.context.logger
        folder = make()
        probes.health.view = lambda: HealthView("following")
        probes.start.over()
        tell(probes.manager, READY="1")
        beside = [
            asyncio.ensure_future(report(probes.health, probes.manager)),
            asyncio.ensure_future(_look(model, probes)),
        ]
        try:
            while (change := await unless_asked(model.take_async(), asked.is_set)) is not None:
                path = await unless_asked(folder.take(change), asked.is_set)
                probes.metrics.set(metrics.FOLLOWED, change.version)
                logger.info("served", folder=str(path), version=change.version, what=change.event)
        finally:
            tell_stopping(probes.manager)
            await cancel(*beside)
        if model.ended:
            logger.info("run_over", advice="this was its last version")


async def _look(model: Following, probes: Probes) -> None:
    while True:
        probes.health.turned()
        show_lag(model, probes.metrics)
        await asyncio.sleep(LOOK_S)


def show_lag(model: Following, counted: Metrics) -> None:
    """Sets a follower's metrics: its lag in seconds and in versions, and the bytes it has read."""
    lag = model.behind
    counted.set(metrics.BEHIND, lag.seconds)
    counted.set(metrics.BEHIND_VERSIONS, lag.versions)
    counted.set(metrics.FOLLOWER_DOWN, model.read_bytes)


# --- Engines


class EngineSink(Protocol):
    """The four methods by which an inference engine takes weights; one sink a rank or replica.

    `init` is called once, before the others. Between `start` and `finish` the engine must not
    generate, since its weights are of two versions. In `finish` the engine must drop everything
    that it computed from earlier weights (caches of keys and values, of prefixes), and may then
    generate again.
    """

    def init(self, layout: Layout) -> None:
        """Takes the run's layout, with names, shapes and dtypes of all leaves."""

    def start(self, version: int) -> None:
        """Stops generating, since the weights of a version follow."""

    def update(self, leaf: LeafRows) -> None:
        """Copies some rows of a leaf into the engine's weights."""

    def finish(self, version: int) -> None:
        """Generates again, with this version; all engines have all its weights now."""


def feed(model: Following, engines: Sequence[EngineSink]) -> Iterator[ModelChange]:
    """Brings each version to all engines before any of them serves it; then yields its change.

    If an engine's `start` or `update` raises, all engines stay stopped, and none has served the
    version. To begin again, call `feed` with another `diloco.follow`: all engines then get the
    newest version.

    Args:
        model: a run followed by whole versions, which must be open.
        engines: the sinks of all ranks and replicas.
    """
    layout = model.run.context.layout
    for engine in engines:
        engine.init(layout)
    for change in model:
        for engine in engines:
            engine.start(change.version)
        for leaf in change.leaves:
            for engine in engines:
                engine.update(leaf)
        for engine in engines:
            engine.finish(change.version)
        yield change
