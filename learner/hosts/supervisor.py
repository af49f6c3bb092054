"""The supervisor of one host of a learner of several slices: starts and ends its training process.

`core/formation.py` decides what to do; this module carries it out. It has a connection to each
other supervisor, and gives them this host's report several times a second. It reads the
notifications by which a daemon reports to systemd, and kills a training process that sends none. A
training process dies with its supervisor.

Connections begin with a proof that both sides know the learner's credentials:

    accepting -> calling   32 random bytes
    calling -> accepting   32 random bytes, HMAC-SHA256 of both
    accepting -> calling   HMAC-SHA256 of both, in the other order
    calling -> accepting   `Report`, again and again; or once `PartAsked`
    accepting -> calling   `Report`, again and again; after `PartAsked`, for each part from the
                           oldest on: length (8 bytes, big endian), and bytes; then a length of 0

The inner optimizer passes from slice to slice by checkpoints: hosts at the same place of their
slices have the same part of each. Before a training process begins, its supervisor copies the
parts of another slice, if its own newest is older: of the newest checkpoint another host of that
slice may have no part.

While a training process trains, a spare process imports what the next one needs
(`diloco/spare.py`), and becomes that one.
"""

import asyncio
import contextlib
import ctypes
import functools
import hashlib
import hmac
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from diloco.common.process import log
from diloco.common.process.config import Config, ServiceManager, environment_with, service_manager
from diloco.common.process.health import END_S, MEETS, WAITS, tell
from diloco.common.process.nats_server import free_port
from diloco.common.process.tasks import Tasks, first_of, within
from diloco.common.protocol import names
from diloco.common.protocol.errors import ConfigError, WireError
from diloco.learner.core import formation
from diloco.learner.core.formation import (
    Action,
    AskToLeave,
    Begin,
    Finish,
    FormationRules,
    HostReport,
    Kill,
)
from diloco.learner.core.handover import CheckpointId
from diloco.learner.hosts.messages import MEET_S, PartAsked, Report, frame, read_message

# Seconds between two reports to another supervisor.
REPORT_S = 0.25
# Seconds that a connection, or one message over it, may take.
CALL_S = 3.0
# A supervisor that is not reached for so many seconds is told of, once until it is.
UNREACHED_S = 10.0
# Seconds until a training process sends its first notification.
FIRST_WORD_S = 120.0
# A training process may be silent for so many times `learner.silent_s`: long calls of its own loop
# and task may hold Python's lock.
PATIENCE = 2.0
# The most bytes of a part's header; one that says more is damaged.
MOST_HEADER_BYTES = 64 << 20
# The port at which libtpu joins slices; infra/terraform/modules/learner opens it.
TPU_PORT = 8081
_NONCE_BYTES = 32
_CHUNK_BYTES = 1 << 20
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def supervise(config: Config, learner: str, arguments: Iterable[str]) -> int:
    """Runs the supervisor of one host until the learner ends; returns the exit status.

    Args:
        config: the learner's configuration.
        learner: its name.
        arguments: the arguments of `diloco` with which the training process is started; those that
            say which host it is are added.

    Raises:
        ConfigError: the host's own address cannot be bound.
    """
    return asyncio.run(_Supervisor(config, learner, tuple(arguments)).run())


class _Child(NamedTuple):
    """A training process, and the number of its formation."""

    process: Process
    formation: int


class _Supervisor:
    def __init__(self, config: Config, learner: str, arguments: tuple[str, ...]) -> None:
        section = config.learner
        self._section = section
        self._learner = learner
        self._arguments = arguments
        self._key = _key_of(config, learner)
        self._logger = log.get(run=config.run.name, learner=learner, host=section.host)
        self._rules = FormationRules(
            slices=section.slices,
            hosts=section.slice_hosts,
            least=section.min_slices,
            silent_s=section.silent_s,
            meet_s=MEET_S,
        )
        part = names.checkpoint_part(section.host % section.slice_hosts, section.slice_hosts)
        assert section.checkpoint_dir is not None
        self._folder = Path(section.checkpoint_dir) / config.run.name / learner / part
        self._interface, _, port = section.peers[section.host].rpartition(":")
        self._port = int(port)
        with self._own_address():
            address = self._new_address()
        begun = formation.begin(section.host, secrets.token_hex(8), address, time.monotonic())
        self._state = replace(begun, me=begun.me._replace(alike=config.alike(learner)))
        # By host: the newest report of one whose settings are not this host's, and when it came.
        self._unlike: dict[int, tuple[HostReport, float]] = {}
        self._manager = service_manager()
        self._words = _Words(self._manager)
        # By connection: the host whose reports come over it, and its `boot`.
        self._heard_over: dict[asyncio.StreamReader, tuple[int, str]] = {}
        self._served: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._signals = 0
        self._child: _Child | None = None
        # A process that has imported all, and the last formation beside which one was started.
        self._spare: Process | None = None
        self._spared = 0
        self._copying = asyncio.Lock()
        self._warned: set[tuple[str, str]] = set()
        self._killed = 0  # The formation whose training process this supervisor has killed.
        self._finished: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Supervises until `Finish`; returns its status."""
        loop = asyncio.get_running_loop()
        self._finished = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked, number)
        server = await self._listen()
        tasks = Tasks()
        async with self._words.listening():
            for host in range(len(self._section.peers)):
                if host != self._section.host:
                    tasks.start(self._report_to(host))
            tasks.start(self._decide_again_and_again(tasks))
            tasks.start(self._keep_spare())
            tell(self._manager, READY="1")
            failing = asyncio.ensure_future(tasks.failure())
            ends: list[asyncio.Future[Any]] = [failing, self._finished]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    failing.result()
                return self._finished.result()
            finally:
                failing.cancel()
                server.close()
                self._kill()
                await tasks.stop()
                await self._end_spare()
                if self._finished.done() and not self._finished.result() and not self._signals:
                    tell(self._manager, STATUS="left: run ended")
                for writer in self._served.values():
                    writer.close()
                if self._served:
                    await asyncio.wait(self._served)

    async def _listen(self) -> asyncio.Server:
        with self._own_address():
            return await asyncio.start_server(self._accept, self._interface, self._port)

    @contextlib.contextmanager
    def _own_address(self) -> Iterator[None]:
        """Says whose fault it is if an address of `learner.peers` is not this host's own."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._section.peers[self._section.host]}, which learner.peers"
                f" has for host {self._section.host}: {error.strerror}",
                hint="give each host its own number, and an address of its own machine",
            ) from error

    def _asked(self, number: int) -> None:
        """Asks the supervisor to end; the second time, it ends at once."""
        self._signals += 1
        if self._signals > 1:
            self._kill()
            os._exit(128 + number)

    # --- Decisions

    async def _decide_again_and_again(self, tasks: Tasks) -> None:
        while True:
            self._end_if_silent()
            self._end_if_unlike()
            for action in self._decide():
                self._act(action, tasks)
            self._words.note(self._sentence())
            tell(self._manager, WATCHDOG="1")
            await asyncio.sleep(REPORT_S)

    def _decide(self) -> tuple[Action, ...]:
        self._state = formation.noted(
            self._state,
            leaving=self._signals > 0,
            address=self._state.me.address,
            newest=newest_part(self._folder),
            trains=self._child is not None and self._words.trains,
            meets=self._words.meets,
        )
        before = self._state.me.formation
        self._state, actions = formation.decide(self._rules, self._state, time.monotonic())
        after = self._state.me.formation
        if after is not None and after != before:
            strikes = {
                number: count for number, count in enumerate(self._state.me.strikes) if count
            }
            self._logger.info(
                "formation", slices=list(after.slices), number=after.number, strikes=strikes
            )
        return actions

    def _act(self, action: Action, tasks: Tasks) -> None:
        match action:
            case Begin():
                tasks.start(self._begin(action))
            case Kill():
                self._kill()
            case AskToLeave(number):
                if self._child is not None and self._child.formation == number:
                    self._ask(self._child)
            case Finish(status):
                assert self._finished is not None
                if not self._finished.done():
                    self._finished.set_result(status)

    def _sentence(self) -> str:
        """Returns which slices train, for `systemctl status`."""
        made = self._state.me.formation
        count = 0 if made is None else len(made.slices)
        return f"{count} of {self._rules.slices} slices"

    # --- The training process

    async def _begin(self, action: Begin) -> None:
        """Starts a training process, and notes its end."""
        made = action.formation
        for host in action.copy_from:
            async with self._copying:
                if not self._is_under_way(made) or await self._copy_parts(host):
                    break
        if self._child is not None:  # It was killed.
            await self._child.process.wait()
        if not self._is_under_way(made):
            return
        self._words.begin()
        place = {
            "hosts": str(self._rules.hosts * len(made.slices)),
            "host": str(action.rank),
            "coordinator": made.coordinator,
        }
        # As variables for the file's check, as options over those that this supervisor was given.
        options = [word for key, value in place.items() for word in (f"--{key}", value)]
        place["formation"] = ",".join(map(str, made.slices))
        variables = {f"DILOCO_LEARNER_{key.upper()}": value for key, value in place.items()}
        variables |= _joining_tpus(made, action.rank // self._rules.hosts)
        started = await self._start(
            [*self._arguments, *options],
            {**variables, **self._words.environment()},
        )
        child = self._child = _Child(started, made.number)
        if not self._is_under_way(made):  # It ended while the process was started.
            self._kill()
        elif self._state.asked == made.number:  # While the checkpoint was copied.
            self._ask(child)
        status = await started.wait()
        with contextlib.suppress(ProcessLookupError):  # Its workers, if it has left any.
            os.killpg(started.pid, signal.SIGKILL)
        if made.number == self._state.asked == self._killed:
            status = formation.UNREADY
        if child is self._child:
            self._child = None
        if status != 0 and made.number != self._killed:
            self._logger.warning("training_ended", status=status, number=made.number)
        self._state = formation.ended(self._state, made.number, status, time.monotonic())
        address = self._state.me.address
        with contextlib.suppress(OSError):  # Names may fail to resolve for a moment.
            address = self._new_address()
        self._state = formation.noted(
            self._state,
            leaving=self._signals > 0,
            address=address,
            newest=self._state.me.newest,
            trains=False,
            meets=self._words.meets,
        )

    async def _start(self, arguments: Sequence[str], changes: Mapping[str, str | None]) -> Process:
        """Returns a process that runs `diloco` with these arguments: the spare one, if there is.

        Args:
            arguments: what follows `diloco` on its command line.
            changes: the variables in which its environment differs from this process's.
        """
        spare, self._spare = self._spare, None
        if spare is not None and spare.returncode is None:
            assert spare.stdin is not None
            spare.stdin.write(json.dumps([arguments, changes]).encode())
            spare.stdin.close()
            return spare
        if spare is not None:
            self._logger.warning("no_spare_process", reason=f"it ended: {spare.returncode}")
        return await _python("diloco", *arguments, env=environment_with(changes))

    async def _keep_spare(self) -> None:
        """Starts a spare process beside each training process that trains; never returns."""
        while True:
            child = self._child
            if child is not None and child.formation != self._spared and self._words.trains:
                self._spared = child.formation
                await self._end_spare()
                try:
                    self._spare = await _python(
                        "diloco.spare", env=environment_with({}), stdin=asyncio.subprocess.PIPE
                    )
                except (OSError, subprocess.SubprocessError) as error:
                    self._logger.warning("no_spare_process", reason=str(error))
            await asyncio.sleep(REPORT_S)

    async def _end_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(ProcessLookupError):
                spare.kill()
            await spare.wait()

    def _is_under_way(self, made: formation.Formation) -> bool:
        """True if this host's training process is still to run in a formation."""
        process = self._state.me.process
        return (process.formation, process.phase) == (made.number, "running")

    def _new_address(self) -> str:
        """Returns an address for JAX's coordinator, with a port that is free now."""
        return f"{self._interface}:{free_port(self._interface)}"

    def _end_if_silent(self) -> None:
        """Kills a training process that sends no notifications; its end then counts as its own."""
        silent_s = self._words.silent_s(PATIENCE * self._section.silent_s)
        running = self._child is not None and self._child.formation != self._killed
        if running and silent_s:
            self._logger.warning("training_silent", silent_s=round(silent_s, 1))
            self._kill()

    def _end_if_unlike(self) -> None:
        """Ends this supervisor if its settings are those of fewer hosts than others are.

        Of groups of equal size one that trains stays, then the one with the lowest host.

        Raises:
            ConfigError: this host's settings are not those of the other hosts.
        """
        me, since_s = self._state.me, time.monotonic() - self._rules.silent_s
        known = [*self._unlike.values(), *self._state.heard.values()]
        groups = {me.alike: [me]}
        for report, came_s in known:
            if came_s >= since_s:
                groups.setdefault(report.alike, []).append(report)

        def rank(alike: str) -> tuple[int, bool, int]:
            there = groups[alike]
            trains = any(report.formation is not None for report in there)
            return len(there), trains, -min(report.host for report in there)

        most = max(groups, key=rank)
        if most != me.alike:
            hosts = ", ".join(str(report.host) for report in groups[most])
            raise ConfigError(
                f"this host's settings are {me.alike}; those of host {hosts} are {most}",
                hint="give all hosts of a learner the same configuration and release",
            )

    def _ask(self, child: _Child) -> None:
        """Asks a training process to end; one that does not train yet loses nothing if killed.

        It would wait for the others' processes, of which each may have come less far.
        """
        if self._words.ready:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
        else:
            self._kill()

    def _kill(self) -> None:
        if self._child is not None:
            self._killed = self._child.formation
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.process.pid, signal.SIGKILL)

    # --- Other supervisors

    async def _report_to(self, host: int) -> None:
        """Exchanges reports with another supervisor, over a new connection after each failure."""
        reached_s, told = time.monotonic(), False
        while True:
            try:
                reader, writer = await self._call(host)
                told = False
                try:
                    await self._exchange(reader, writer, called=False)
                finally:
                    writer.close()
                    reached_s = time.monotonic()
            except WireError as error:
                self._tell_unreadable(error)
            # A name that no host can have, such as one with two dots, is a UnicodeError.
            except (OSError, EOFError, TimeoutError, UnicodeError) as error:
                if not told and time.monotonic() - reached_s > UNREACHED_S:
                    told = True
                    peer, why = self._section.peers[host], str(error) or type(error).__name__
                    self._logger.warning("supervisor_unreached", peer=peer, error=why)
            await asyncio.sleep(REPORT_S)

    async def _call(self, host: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to another supervisor.

        Raises:
            OSError: it cannot be reached, or does not know the secret.
            EOFError, TimeoutError: it does not answer.
        """
        name, _, port = self._section.peers[host].rpartition(":")
        async with asyncio.timeout(CALL_S):
            reader, writer = await asyncio.open_connection(name, int(port))
            try:
                _limit_silence(writer)
                theirs, ours = await reader.readexactly(_NONCE_BYTES), _nonce()
                writer.write(ours + self._proof("calls", host, theirs + ours))
                given = await reader.readexactly(_NONCE_BYTES)
                if not hmac.compare_digest(given, self._proof("answers", host, ours + theirs)):
                    raise OSError(
                        f"{self._section.peers[host]} does not know the credentials of this learner"
                    )
            except BaseException:
                writer.close()
                raise
        return reader, writer

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving, own = asyncio.current_task(), self._section.host
        assert serving is not None
        self._served[serving] = writer
        try:
            async with asyncio.timeout(CALL_S):
                ours = _nonce()
                writer.write(ours)
                theirs = await reader.readexactly(_NONCE_BYTES)
                given = await reader.readexactly(_NONCE_BYTES)
            if not hmac.compare_digest(given, self._proof("calls", own, ours + theirs)):
                address, *_ = writer.get_extra_info("peername")
                if self._is_new("supervisor_refused", address):
                    self._logger.warning("supervisor_refused", peer=address)
                return
            writer.write(self._proof("answers", own, theirs + ours))
            _end_when_gone(writer)
            _limit_silence(writer)
            await self._serve(reader, writer)
        except WireError as error:
            self._tell_unreadable(error)
        except (OSError, EOFError, TimeoutError):
            pass  # Silence is judged by the reports that do not come.
        finally:
            writer.close()
            del self._served[serving]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Exchanges reports over a connection that another host opened, or sends parts."""
        match await read_message(reader):
            case PartAsked():
                await self._send_parts(writer)
            case Report(report=report) if self._hears(report, reader, called=True):
                await self._exchange(reader, writer, called=True)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, called: bool
    ) -> None:
        """Sends this host's reports, and takes those of another one, until the connection breaks.

        `called`: the other host opened the connection.
        """
        try:
            await first_of(self._send_reports(writer), self._take_reports(reader, called=called))
        finally:
            if reader in self._heard_over:
                host, boot = self._heard_over.pop(reader)
                if all(host != other for other, _ in self._heard_over.values()):
                    self._state = formation.lost(self._state, host, boot)

    async def _send_reports(self, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(frame(Report(report=self._state.me)))
            await within(CALL_S, writer.drain())
            await asyncio.sleep(REPORT_S)

    async def _take_reports(self, reader: asyncio.StreamReader, *, called: bool) -> None:
        while True:
            match await read_message(reader):
                case Report(report=report) if self._hears(report, reader, called=called):
                    pass
                case _:
                    return

    def _hears(self, report: HostReport, reader: asyncio.StreamReader, *, called: bool) -> bool:
        """Takes a report, if it is of one of the other hosts; returns whether it is."""
        if not self._expects(report):
            return False
        self._heard_over[reader] = report.host, report.boot
        self._state = formation.heard(self._state, report, time.monotonic(), called=called)
        return True

    def _tell_unreadable(self, error: WireError) -> None:
        if self._is_new("supervisor_unreadable", error.message):
            self._logger.warning("supervisor_unreadable", error=error.message)

    def _expects(self, report: HostReport) -> bool:
        """True for a report of another host of `learner.peers`; warns of others."""
        host, count = report.host, len(self._section.peers)
        error = f"host {host} calls host {self._section.host} of {count}"
        if host != self._section.host and host in range(count):
            if report.alike == self._state.me.alike:
                self._unlike.pop(host, None)
                return True
            # It is not heard: one of the two ends.
            self._unlike[host] = report, time.monotonic()
            error = f"host {host} has the settings {report.alike}"
        hint = "give all hosts the same configuration, and each its own number"
        if self._is_new("supervisor_unexpected", error):
            self._logger.warning("supervisor_unexpected", error=error, hint=hint)
        return False

    def _is_new(self, action: str, about: str) -> bool:
        """True if a warning was not given yet: it would come again with each call."""
        before = len(self._warned)
        self._warned.add((action, about))
        return len(self._warned) > before

    def _proof(self, does: str, called: int, nonces: bytes) -> bytes:
        """Returns the proof of who calls or answers; `called` is the number of the host called.

        Both are in it, so that nobody can have it from one host and show it to another.
        """
        return hmac.digest(self._key, f"{does} {called} ".encode() + nonces, "sha256")

    # --- Parts of checkpoints

    async def _send_parts(self, writer: asyncio.StreamWriter) -> None:
        for path in reversed(_files_of(self._folder)):
            # One that a newer checkpoint replaces meanwhile is left out.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                writer.write(os.fstat(file.fileno()).st_size.to_bytes(8, "big"))
                while chunk := file.read(_CHUNK_BYTES):
                    writer.write(chunk)
                    await within(CALL_S, writer.drain())
        writer.write(bytes(8))
        await within(CALL_S, writer.drain())

    async def _copy_parts(self, host: int) -> bool:
        """Copies the parts of another host; returns whether all have come.

        Without them all slices take an older checkpoint.
        """
        copied, count = self._folder / "copied", 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            reader, writer = await self._call(host)
            with contextlib.closing(writer):
                writer.write(frame(PartAsked()))
                while size := int.from_bytes(await within(CALL_S, reader.readexactly(8)), "big"):
                    await self._receive(reader, size, copied)
                    newest = _files_of(self._folder)
                    number = int(newest[0].stem) + 1 if newest else 1
                    copied.rename(self._folder / f"{number}.safetensors")
                    count += 1
                    # Older ones make room, as when a checkpoint is made.
                    for path in _files_of(self._folder)[self._section.checkpoint_keep :]:
                        path.unlink()
        except (OSError, EOFError, TimeoutError) as error:
            self._logger.warning("part_not_copied", source=host, error=str(error))
            with contextlib.suppress(OSError):
                copied.unlink()
            return False
        self._logger.info("parts_copied", source=host, count=count)
        return True

    async def _receive(self, reader: asyncio.StreamReader, left: int, into: Path) -> None:
        """Writes the next `left` bytes to a file.

        Raises:
            OSError: they do not fit on the disk.
            EOFError, TimeoutError: they do not all come.
        """
        if left > shutil.disk_usage(self._folder).free:
            raise OSError(f"{left} bytes do not fit on this disk")
        with into.open("wb") as file:
            while left:
                chunk = await within(CALL_S, reader.read(min(left, _CHUNK_BYTES)))
                if not chunk:
                    raise EOFError("the part ends early")
                file.write(chunk)
                left -= len(chunk)


class _Words:
    """The notifications of a training process, which it sends as if this supervisor were systemd.

    Args:
        manager: the real systemd, if it started the supervisor.

    Attributes:
        ready: the process has begun to train.
        meets: it waits for those of other hosts; of one that has ended: it did so last.
    """

    def __init__(self, manager: ServiceManager) -> None:
        self._manager = manager
        self._name = f"diloco-{secrets.token_hex(8)}"
        self._began_s = 0.0
        self._heard_s: float | None = None
        self.ready = self.meets = False
        self._stopping = self._waits = False
        self._said = ""
        self._slices = ""
        self._status = ""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Receives notifications while the block runs."""
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        receiver.bind(f"\0{self._name}")
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _Datagrams(self._take), sock=receiver
        )
        try:
            yield
        finally:
            transport.close()

    @property
    def trains(self) -> bool:
        """True if the process has begun to train, and waits for neither NATS nor the store."""
        return self.ready and not self._waits

    def environment(self) -> dict[str, str | None]:
        """Returns the variables with which a training process sends its notifications here."""
        return {
            "NOTIFY_SOCKET": f"@{self._name}",
            "WATCHDOG_USEC": str(int(END_S * 1e6)),
            "WATCHDOG_PID": None,
        }

    def begin(self) -> None:
        """Notes that a training process is started."""
        self._began_s, self._heard_s = time.monotonic(), None
        self.ready = self.meets = self._stopping = self._waits = False

    def silent_s(self, limit_s: float) -> float:
        """Returns for how long the process has been silent, if that is too long; else 0.

        Args:
            limit_s: the longest silence of a process that trains.
        """
        if self._heard_s is None:
            since_s, limit_s = self._began_s, FIRST_WORD_S
        else:
            since_s, limit_s = self._heard_s, END_S if self._stopping else limit_s
        silent_s = time.monotonic() - since_s
        return silent_s if silent_s > limit_s else 0.0

    def note(self, slices: str) -> None:
        """Tells systemd the state of the learner; `slices` says how many slices train."""
        self._slices = slices
        sentence = f"{slices}: {self._status or 'no training process'}"
        if sentence != self._said:
            self._said = sentence
            tell(self._manager, STATUS=sentence)

    def _take(self, data: bytes) -> None:
        fields = dict(
            line.split("=", 1) for line in data.decode(errors="replace").splitlines() if "=" in line
        )
        if {"WATCHDOG", "EXTEND_TIMEOUT_USEC", "READY"} & set(fields):
            self._heard_s = time.monotonic()
        self.ready = self.ready or "READY" in fields
        self._stopping = self._stopping or "STOPPING" in fields
        if WAITS in fields:
            self._waits = fields[WAITS] == "1"
        if MEETS in fields:
            self.meets = fields[MEETS] == "1"
        self._status = fields.get("STATUS", self._status)


class _Datagrams(asyncio.DatagramProtocol):
    """Passes on each datagram's bytes."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take

    def datagram_received(self, data: bytes, _address: object) -> None:
        """Passes the bytes on."""
        self._take(data)


def newest_part(folder: Path) -> CheckpointId | None:
    """Returns the newest checkpoint of which a folder has a part; None if it has none.

    Reads the header of the newest file alone: whether the arrays are whole is seen when the
    training process reads them.
    """
    files = []
    # A disk that fails costs its checkpoints, and not the training.
    with contextlib.suppress(OSError):
        files = _files_of(folder)
    for path in files:
        with contextlib.suppress(OSError):
            status = path.stat()
            if (found := _checkpoint_in(path, status.st_mtime_ns, status.st_size)) is not None:
                return found
    return None


@functools.lru_cache(maxsize=8)
def _checkpoint_in(path: Path, _changed_ns: int, _size_bytes: int) -> CheckpointId | None:
    """Returns the checkpoint of which a file is a part; None if its header is damaged.

    Raises:
        OSError: the file cannot be read now.
    """
    unreadable = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
    with contextlib.suppress(*unreadable), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length <= MOST_HEADER_BYTES:
            facts = json.loads(json.loads(file.read(length))["__metadata__"]["facts"])
            found = int(facts["incarnation"]), int(facts["local_step"])
            return found if all(number in range(1 << 53) for number in found) else None
    return None


def _files_of(folder: Path) -> list[Path]:
    """Returns the files of parts in a folder, newest first."""
    files = [path for path in folder.glob("*.safetensors") if path.stem.isdecimal()]
    return sorted(files, key=lambda path: int(path.stem), reverse=True)


def _key_of(config: Config, learner: str) -> bytes:
    """Returns the secret of a learner's supervisors, which follows from its credentials."""
    credentials = config.bus.credentials
    proof = Path(credentials).read_bytes() if credentials else b""
    return hashlib.sha256(f"{config.run.name} {learner} ".encode() + proof).digest()


def _joining_tpus(made: formation.Formation, place: int) -> dict[str, str]:
    """Returns the variables by which libtpu joins a formation's slices over their hosts' network.

    Nothing else reads them; they are those that JAX's `cloud_tpu_cluster.py` knows.

    Args:
        made: the formation.
        place: which of its slices the training process is of, from 0.
    """
    if len(made.slices) == 1:
        return {}
    first = made.coordinator.rpartition(":")[0]
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": f"{first}:{TPU_PORT}",
        "MEGASCALE_PORT": str(TPU_PORT),
        "MEGASCALE_NUM_SLICES": str(len(made.slices)),
        "MEGASCALE_SLICE_ID": str(place),
    }


def _python(module: str, *arguments: str, **how: Any) -> Awaitable[Process]:
    """Starts a process that runs a module, and dies with this one; `how` as of a subprocess."""
    return asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *arguments),
        start_new_session=True,
        preexec_fn=_die_with_parent,
        **how,
    )


def _nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


def _limit_silence(writer: asyncio.StreamWriter) -> None:
    """Makes the kernel end a connection over which nothing is acknowledged."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(CALL_S * 1000))


def _end_when_gone(writer: asyncio.StreamWriter) -> None:
    """Makes the kernel end a connection to a machine that is gone, although nothing is written."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(UNREACHED_S))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(CALL_S))


def _die_with_parent() -> None:
    """Makes the kernel kill this process when its supervisor is gone."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
