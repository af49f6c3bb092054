"""`diloco local`: a whole run on this machine, each daemon a separate process.

It starts a NATS server and the commands that an operator would: `diloco run create`,
`diloco aggregator`, `diloco learner`. It watches the tape as any reader could.
"""

import asyncio
import io
import itertools
import os
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median_low
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from diloco.common.process.accelerators import find_accelerators, unused
from diloco.common.process.config import (
    Config,
    allows_accelerators,
    make_config,
    unfilled,
    warnings,
)
from diloco.common.process.nats_server import NatsServer
from diloco.common.process.tasks import cancel
from diloco.common.protocol.errors import ConfigError, RunMismatchError
from diloco.common.storage.tape import has_ended, last_record
from diloco.operate.local import screen
from diloco.operate.local.command import LocalOptions
from diloco.operate.local.fleet import LocalDaemons
from diloco.operate.local.hardware import (
    Hardware,
    count_learners,
    on_accelerators,
    on_cpu,
    set_hardware,
)
from diloco.operate.local.options_file import (
    load_options,
    local_document,
    save_options,
    write_config,
)
from diloco.run.cli.folders import make_folder
from diloco.run.cli.opening import OpenRun, open_run
from diloco.run.cli.screen import say_json
from diloco.run.watch import Watch
from diloco.show.page.following import LiveRun, served

REFRESH_S = 0.5
LINE_S = 10.0
STOP_S = 15.0
# Names of processes that are not daemons of the run.
CREATE, SCORES = "create", "scores"
# The least seconds between two scores, and the greatest share of the time that scoring takes.
SCORE_S, SCORE_SHARE = 5.0, 0.1


@dataclass
class _Kill:
    name: str
    step: int
    done: bool = False


def run_local(options: LocalOptions) -> int:
    """Runs or resumes a local run.

    Returns:
        The exit status: 0 once the run has ended, 130 after Ctrl-C.

    Raises:
        DilocoError: wrong options, or a daemon that cannot work; nothing to resume, or it runs.
    """
    begins = options.resume is None
    if options.resume is not None:
        run_dir = options.resume.absolute()
        options, document = load_options(run_dir, options)
        learners = _learner_names(options)
        hardware = set_hardware(document["learner"], learners, options.mesh, options.hosts)
    else:
        name = datetime.now().astimezone().strftime("local-%Y%m%d-%H%M%S")
        run_dir = (options.run_dir or Path("runs") / name).absolute()
        _check_unused(run_dir)
        learners = _learner_names(options)
        document, hardware = local_document(options, name, learners, run_dir)
    # Options are checked before any file is written.
    steps = make_config(document, source=str(options.config or "the options")).run.steps
    # The demonstration shows a learner that dies and returns; a user's own task is left alone
    # unless --kill asks for it.
    own = options.config is not None or options.task is not None
    asked = ["none"] if own and options.kill is None else options.kill
    kills = _plan_kills(asked, learners, aggregator_names(options.aggregators), steps)
    # With --json a program reads standard output, which gets the summary alone.
    console = Console(stderr=options.json)
    hardware = _place(console, options, document, hardware)
    if begins:
        make_folder(run_dir)
        save_options(run_dir, options)
    with NatsServer(run_dir / "nats") as server, LocalDaemons(run_dir / "logs") as fleet:
        fleet.adopt(server)
        document["bus"] = {**document.get("bus", {}), "url": server.url}
        config = make_config(document, source="the options")
        config_path = write_config(run_dir, document)
        run = LocalRun(options, config, config_path, hardware, kills, fleet, console)
        status = asyncio.run(run.go())
        fleet.stop(within_s=STOP_S)
    return status


def _learner_names(options: LocalOptions) -> list[str]:
    count = count_learners(options.learners, options.mesh, options.hosts)
    return [f"learner-{index}" for index in range(count)]


def _check_unused(run_dir: Path) -> None:
    """Refuses a folder that a run cannot use.

    Raises:
        ConfigError: it is not a folder, not empty, or cannot be read or named.
    """
    try:
        str(run_dir).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the folder's name {str(run_dir)!a} is not text in UTF-8, as its files need it",
            hint="give another --run-dir",
        ) from error
    try:
        used = run_dir.exists() and any(run_dir.iterdir())
    except OSError as error:
        raise ConfigError(
            f"cannot use the folder {str(run_dir)!r}: {error.strerror}",
            hint="name a new folder, where you may write: --run-dir",
        ) from error
    if used:
        raise ConfigError(
            f"the folder {str(run_dir)!r} is not empty",
            hint="each local run needs a folder of its own: give another --run-dir",
        )


def _place(
    console: Console,
    options: LocalOptions,
    document: dict[str, Any],
    hardware: dict[str, Hardware],
) -> dict[str, Hardware]:
    """Assigns the machine's accelerators, if there are any, to the learners; prints the assignment.

    Raises:
        ConfigError: there are too few.
    """
    if options.cpu:
        return on_cpu(hardware)
    # Emulated devices, or JAX_PLATFORMS=cpu, mean that the user wants the CPU.
    asked_for_cpu = document["learner"].get("cpu_devices") or not allows_accelerators()
    found = None if asked_for_cpu else find_accelerators()
    if found is None:
        return hardware
    if not found.usable:
        console.print(f"[yellow]warning:[/] {unused(found)}", soft_wrap=True)
        return hardware
    placed = on_accelerators(hardware, found)
    for name, one in placed.items():
        console.print(f"{name}: {one.words()}", highlight=False)
    left = set(found.names).difference(*(one.accelerators() for one in placed.values()))
    if left:
        console.print(
            f"{found.count(len(left))} unused; --mesh says how many each learner takes",
            highlight=False,
        )
    return placed


def aggregator_names(count: int) -> list[str]:
    """Returns the names of a local run's aggregators: aggregator, aggregator-1, aggregator-2 ..."""
    return ["aggregator", *(f"aggregator-{index}" for index in range(1, count))]


def _plan_kills(
    wanted: list[str] | None, learners: list[str], aggregators: list[str], steps: int
) -> list[_Kill]:
    """Returns the daemons to kill, each with the global step at which that is due.

    `wanted` are the values of --kill; None: one learner after a third of the run.

    Raises:
        ConfigError: not NAME@STEP, or no daemon of that name.
    """
    if wanted is None:
        return [_Kill(learners[1], steps // 3)] if len(learners) > 1 else []
    kills = []
    for item in wanted:
        if item == "none":
            continue
        name, at, step = item.partition("@")
        if not at or not step.isdecimal() or name not in learners + aggregators:
            known = ", ".join(learners + aggregators)
            raise ConfigError(
                f"--kill {item!r}: expected NAME@STEP with one of {known}",
                hint=f"for example --kill {learners[-1]}@{steps // 3}, or --kill none",
            )
        kills.append(_Kill(name, int(step)))
    return kills


@dataclass
class LocalRun:
    """One local run, from creation to summary.

    Attributes:
        learners: by name, each learner's hardware.
        kills: the daemons to kill during the run.
        fleet: its processes.
        losses: the median of the learners' training losses, at each refresh of the screen.
        note: a sentence on the screen.
    """

    options: LocalOptions
    config: Config
    config_path: Path
    learners: dict[str, Hardware]
    kills: list[_Kill]
    fleet: LocalDaemons
    console: Console
    losses: list[float] = field(default_factory=list)
    note: str = ""
    # The tape's last sequence when reading began: messages up to it are of the past.
    past_seq: int = 0
    _began_s: float = field(default_factory=time.monotonic)

    async def go(self) -> int:
        """Creates or resumes the run, trains it, prints the summary.

        Returns:
            The exit status: 0 once the run has ended, 130 after a signal to stop.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted, stop)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up, stop)
        run = self.config.run
        self.console.print(
            f"run [bold]{run.name}[/]: {len(self.learners)} learners, "
            f"{'resumed' if self.options.resume else f'{run.steps} steps'}, "
            f"in {self.config_path.parent}",
            soft_wrap=True,
        )
        for sentence in warnings(self.config.settings()):
            self.console.print(f"[yellow]warning:[/] {sentence}", soft_wrap=True)
        work = asyncio.ensure_future(self._work())
        waiting = asyncio.ensure_future(stop.wait())
        await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if work.done():
            work.result()
            return 0
        await cancel(work)
        self.console.print("stopping: learners finish their step and leave ...")
        await asyncio.to_thread(self.fleet.stop, within_s=STOP_S)
        self.console.print(
            f"stopped; to continue: diloco local --resume {self._folder}",
            soft_wrap=True,
        )
        return 130

    @property
    def _folder(self) -> str:
        """The run's folder, quoted for a shell."""
        return shlex.quote(str(self.config_path.parent))

    def _hung_up(self, stop: asyncio.Event) -> None:
        """Stops the run after its terminal was closed; further output is discarded."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            if os.isatty(descriptor):
                os.dup2(nowhere, descriptor)
        self._interrupted(stop)

    def _interrupted(self, stop: asyncio.Event) -> None:
        if stop.is_set():
            self.fleet.__exit__()
            os._exit(130)
        stop.set()

    async def _work(self) -> None:
        from diloco.run.model.evaluate import read_scores

        created = await self._is_created()
        if not created:
            await self._create()
        async with open_run(self.config_path, name="local") as opened, self._page(opened) as url:
            context = opened.context
            self.console.print(f"dashboard: {url}", soft_wrap=True)
            if sentence := unfilled(self.config, len(context.layout.fragments)):
                self.console.print(sentence, soft_wrap=True)
            if await has_ended(context.bus, context.run):
                self.console.print("it has ended: begin another run from its parameters")
                return
            self.past_seq = await context.bus.last_sequence(context.tape)
            watch = Watch(context)
            if created:
                self._start_daemons()
            self._start_scores()
            await self._watch(watch)
            await self._wait_for_daemons()
            with self.console.status("evaluating the final version on held-out data ..."):
                self.fleet.hurry(SCORES)  # Nothing is left to yield to; others may be busy.
                await self._end_of(SCORES)
            scores = await read_scores(context, thinned=True)
        summary = self._summary(watch, scores[0].loss, scores[-1].loss)
        self._tell(summary)
        self._save_picture(self._frame(watch), summary)

    def _page(self, opened: OpenRun) -> AbstractAsyncContextManager[str]:
        """Serves the run's page, on the default port or any free one, until this command ends."""
        again = f"diloco dashboard {self._folder}"
        run = LiveRun(opened.context, opened.specification.created_at_s)
        return served(run, port=None, again=again)

    async def _is_created(self) -> bool:
        """True if there is a run to resume, with version 0 of every fragment."""
        if self.options.resume is None:
            return False
        try:
            async with open_run(self.config_path, name="local") as opened:
                for fragment in range(len(opened.context.layout.fragments)):
                    await last_record(opened.context, fragment)
        except RunMismatchError:
            return False
        return True

    async def _create(self) -> None:
        """Creates the run, or completes it; its daemons start meanwhile, and wait for it."""
        source = ["--from", self.options.source] if self.options.source else []
        command = ["run", "create", "--config", str(self.config_path), *source]
        self.fleet.start(CREATE, command)
        self._start_daemons()
        with self.console.status("creating the run: first parameters, streams, version 0 ..."):
            await self._end_of(CREATE)

    async def _end_of(self, name: str) -> None:
        """Waits until one process ends; raises its error before those of others."""
        while not self.fleet.daemons[name].ended:
            await asyncio.sleep(0.05)
            self.fleet.look_after(name)

    def _start_scores(self) -> None:
        """Starts a process that scores the model during the run, at the lowest priority."""
        command = ["evaluate", str(self.config_path), "--follow", "--json"]
        pace = ["--every-s", str(SCORE_S), "--share", str(SCORE_SHARE)]
        self.fleet.start(SCORES, [*command, *pace], yields=True)

    def _start_daemons(self) -> None:
        path = str(self.config_path)
        ports = itertools.count(self.config.metrics.port)
        for name in aggregator_names(self.options.aggregators):
            own = ["aggregator", "--config", path, "--name", name, *self._port(ports)]
            self.fleet.start(name, own)
        for index, (name, hardware) in enumerate(self.learners.items()):
            own = ["learner", "--config", path, "--learner", name, *hardware.arguments()]
            hosts = [[*own, *self._port(ports)] for _ in range(hardware.hosts)]
            self.fleet.start(
                name,
                *hosts,
                cores=_cores(index, len(self.learners)),
                environments=hardware.environments(),
                spare=True,
            )

    def _port(self, ports: Iterator[int]) -> list[str]:
        """Returns the option for a daemon's metrics port, if the run's file sets the first port."""
        return ["--metrics-port", str(next(ports))] if self.config.metrics.port else []

    async def _watch(self, watch: Watch) -> None:
        """Shows the run until its end is on the tape.

        Meanwhile restarts daemons that fail, and kills those of `--kill` at their steps.
        """
        following = asyncio.ensure_future(watch.follow())
        shown_s = 0.0
        live = Live(console=self.console, auto_refresh=False, transient=False)
        try:
            with live:
                while not following.done():
                    await asyncio.sleep(REFRESH_S)
                    self.fleet.look_after()
                    self._tell_of_daemons()
                    self._kill_as_planned(watch)
                    frame = self._frame(watch)
                    if self.console.is_terminal:
                        live.update(screen.picture(frame), refresh=True)
                    elif time.monotonic() - shown_s > LINE_S and not frame.behind:
                        self.console.print(screen.line(frame), soft_wrap=True)
                        shown_s = time.monotonic()
            following.result()
        finally:
            await cancel(following)

    def _tell_of_daemons(self) -> None:
        for sentence in self.fleet.came_back:
            self.console.print(f"[yellow]{escape(sentence)}[/]", soft_wrap=True)
        self.fleet.came_back.clear()
        for sentence in self.fleet.given_up:
            self.console.print(f"[red]error:[/] {escape(sentence)}", soft_wrap=True)
            self.note = sentence
        self.fleet.given_up.clear()

    def _kill_as_planned(self, watch: Watch) -> None:
        for kill in self.kills:
            if not kill.done and watch.observed.global_step >= kill.step:
                kill.done = True
                killed = self.fleet.kill(kill.name)
                self.note = f"{killed} was killed at step {kill.step} and started again"

    def _frame(self, watch: Watch) -> screen.Picture:
        observed = watch.observed.run(time.time())
        behind = watch.observed.extent.last_seq < self.past_seq
        losses = [one.loss for one in observed.learners if one.loss is not None]
        if losses:
            self.losses.append(median_low(losses))
        return screen.Picture(
            run=self.config.run.name,
            learners=self.learners,
            daemons=self.fleet.daemons,
            observed=observed,
            losses=self.losses,
            note="reading what the tape has so far ..." if behind else self.note,
            behind=behind,
            elapsed_s=time.monotonic() - self._began_s,
        )

    async def _wait_for_daemons(self) -> None:
        """Waits after the run's end until all daemons have ended, for at most `STOP_S` seconds."""
        deadline_s = time.monotonic() + STOP_S
        while time.monotonic() < deadline_s:
            self.fleet.look_after()
            if all(one.ended for one in self.fleet.daemons.values() if one.name != SCORES):
                return
            await asyncio.sleep(0.1)

    def _summary(self, watch: Watch, first: float, last: float) -> dict[str, Any]:
        seen = watch.observed.run(time.time())
        return {
            "run": self.config.run.name,
            "learners": len(self.learners),
            "steps": seen.global_step,
            "tokens": seen.tokens_merged,
            "eval_loss_first": round(first, 4),
            "eval_loss_last": round(last, 4),
            "versions": seen.versions,
            "updates_sent": seen.updates_sent,
            "updates_merged": seen.updates_merged,
            "updates_rejected": seen.updates_rejected,
            "bytes_up": seen.bytes_up,
            "bytes_down": seen.bytes_down,
            "stall_fraction": round(seen.stall_fraction, 5),
            "wall_s": round(time.monotonic() - self._began_s, 1),
            "restarts": self.fleet.restarts,
        }

    def _tell(self, summary: dict[str, Any]) -> None:
        self.console.print(screen.sentence(summary))
        folder = self.config_path.parent
        self.console.print(f"everything of this run is in {folder}", soft_wrap=True)
        self.console.print(f"for figures of it: diloco report {self._folder}", soft_wrap=True)
        if self.options.json:
            say_json(summary)

    def _save_picture(self, frame: screen.Picture, summary: dict[str, Any]) -> None:
        """Saves the last screen of the run as screen.svg in its folder."""
        paper = Console(record=True, width=screen.WIDTH, file=io.StringIO(), force_terminal=True)
        paper.print(screen.picture(frame))
        paper.print(screen.sentence(summary))
        path = self.config_path.parent / "screen.svg"
        paper.save_svg(str(path), title="diloco local")


def _cores(index: int, learners: int) -> set[int] | None:
    """Returns the CPU cores for learner number `index` of `learners`; None for any.

    Learners share no core if there are enough.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    available = sorted(os.sched_getaffinity(0))
    each = len(available) // learners
    if each == 0:
        return {available[index % len(available)]}
    return set(available[index * each : (index + 1) * each])
