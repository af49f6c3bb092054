"""`diloco watch`: follows a run, makes findings as status and doctor do, and reports alerts.

The command reads the bus and the store, and needs neither Prometheus nor a daemon of the run. That
NATS or the store is unreachable is an alert too. Alerts go to the terminal, and to a webhook if
there is one.
"""

import asyncio
import contextlib
import json as json_module
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from diloco.common.process import log
from diloco.common.process.config import webhook as webhook_of_environment
from diloco.common.process.retry import Runtime
from diloco.common.process.signals import on_signals
from diloco.common.process.tasks import cancel
from diloco.common.protocol.errors import (
    BusUnavailableError,
    ConfigError,
    DilocoError,
    Exit,
    RunMissingError,
    StoreUnavailableError,
)
from diloco.judge import doctor_findings
from diloco.judge.doctor import examine
from diloco.run.cli.opening import open_run, run_config
from diloco.run.cli.screen import say_json, say_plainly
from diloco.run.health_findings import NATS_AWAY, STORE_AWAY, failed
from diloco.run.state import Finding
from diloco.run.watch import Watch
from diloco.show.alerts.fire_and_resolve import SEVERITIES, Alert, AlertLedger, Notice
from diloco.show.alerts.webhook import Outbox, Webhook

if TYPE_CHECKING:
    from diloco.show.alerts.command import WatchOptions

# Runbooks of problems that prevent any further look.
AWAY = (NATS_AWAY, STORE_AWAY, doctor_findings.RESTORE)
# Part of the time between two examinations that remains while there is a problem.
SOONER = 0.2
# Seconds that notices have to be delivered, once the run has ended or a signal came.
DRAIN_S = 30.0
ASKED_S = 3.0


def try_webhook(target: str, url: str | None) -> int:
    """Posts a test alert to the webhook, as firing and as resolved; returns the exit status.

    Args:
        target: RUN, whose name is in the alert.
        url: URL of the webhook; None: the one of the environment.

    Raises:
        ConfigError: there is no webhook.
        WebhookError: the receiver does not accept the messages.
    """
    found, run, now_s = find_webhook(url), run_config(target).run.name, time.time()
    if found is None:
        raise ConfigError(
            "there is no webhook to try", hint="give --webhook URL, or set DILOCO_WEBHOOK_URL"
        )
    alert = Alert(
        about="webhook", runbook="", severity="warning", sentences=("a test of `diloco watch`",),
        advice="nothing is to be done", since_s=now_s,
    )  # fmt: skip
    for notice in (Notice(alert), Notice(alert, now_s)):
        found.post(notice.body(run))
    say_plainly(f"the webhook at {found.host} took a test alert and its end")
    return Exit.ENDED


def find_webhook(url: str | None) -> Webhook | None:
    """Returns the webhook at `url`, else that of DILOCO_WEBHOOK_URL; None without either.

    Raises:
        ConfigError: the URL is not one of HTTP.
    """
    from_environment, token = webhook_of_environment()
    chosen = url or from_environment
    return Webhook(chosen, token) if chosen else None


def watch_run(target: str, options: "WatchOptions", url: str | None, *, json: bool) -> int:
    """Watches a run until it ends or a signal comes; returns the exit status.

    The status is 1 if alerts were not delivered to the webhook. The arguments are those of
    `diloco watch`; `url` is the webhook's.

    Raises:
        DilocoError: there is no such run, or the webhook's URL is invalid.
    """
    webhook = find_webhook(url)
    with contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(_watch(target, options, webhook, json=json))
    return Exit.ENDED


async def _watch(
    target: str, options: "WatchOptions", webhook: Webhook | None, *, json: bool
) -> int:
    run, runtime = run_config(target).run.name, Runtime()
    outbox = None if webhook is None else Outbox(webhook, run, runtime)

    def tell(notice: Notice) -> None:
        _print(run, notice, json=json)
        if outbox is not None:
            outbox.add(notice)

    if not json:
        to = f"alerts go to {webhook.host}" if webhook else "alerts are shown here alone"
        _note(f"watching run {run}, every {options.every_s:g} s; {to}; Ctrl-C ends it")
    ended = False
    try:
        ended = await _until_asked(Watcher(target, options, tell, runtime))
    finally:
        lost = 0 if outbox is None else await outbox.close(DRAIN_S if ended else ASKED_S)
    if ended and not json:
        _note(f"run {run} has ended")
    if lost:
        _note(f"{lost} alerts were not delivered to the webhook")
    return Exit.FAILED if lost else Exit.ENDED


async def _until_asked(watcher: "Watcher") -> bool:
    """Runs the watcher until the run ends or a signal comes; returns whether the run has ended."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    on_signals(lambda: loop.call_soon_threadsafe(asked.set))
    work, stop = asyncio.ensure_future(watcher.run()), asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return False
        work.result()
        return True
    finally:
        await cancel(work, stop)


def _print(run: str, notice: Notice, *, json: bool) -> None:
    if json:
        say_json(notice.body(run))
        return
    severity = notice.alert.severity if notice.ended_s is None else "info"
    # By their priority those who collect the journal hear of alerts too.
    begun = log.PRIORITIES[severity] if log.in_journal() else time.strftime("%H:%M:%S ")
    say_plainly(f"{begun}{notice.line(run)}")
    if notice.ended_s is None and notice.alert.advice:
        say_plainly(f"         {notice.alert.advice}")


def _note(text: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(text)


class Watcher:
    """Watches a run until it ends.

    Args:
        target: RUN, as `diloco.run.cli.opening` defines it.
        options: intervals, least severity, and the file in which firing alerts are kept for the
            next process.
        tell: called with each notice.
        runtime: gives the time, and random numbers for intervals.
    """

    def __init__(
        self,
        target: str,
        options: "WatchOptions",
        tell: Callable[[Notice], None],
        runtime: Runtime,
    ) -> None:
        self._target = target
        self._options = options
        self._kept: Path | None = options.state
        self._ledger = AlertLedger(options.hold_s, options.severity)
        self._tell = tell
        self._runtime = runtime
        self._examined: list[Finding] = []
        self._opened = False

    async def run(self) -> None:
        """Watches the run until its end.

        Raises:
            ConfigError: the file of kept alerts is not one of this command's.
            DilocoError: there is no such run; a run that was there before counts as lost, which is
                an alert.
        """
        self._restore()
        ended = await self._until_away()
        while not ended:
            await asyncio.sleep(self._options.every_s)
            ended = await self._until_away()
        self._say(self._ledger.end(self._runtime.clock()))

    async def _until_away(self) -> bool:
        """Watches until the run ends (returns True), or cannot be reached (returns False)."""
        try:
            async with open_run(self._target, name="watch", reads=True) as opened:
                watch = Watch(opened.context)
                status = await watch.begin()
                self._opened = True
                if status.state == "ended":
                    # Its problem needs an operator.
                    self._ledger.hold_s = 0.0
                if opened.bundle is not None:
                    self.look(status.alerts)
                    return True
                return await self._follow(watch)
        except BusUnavailableError as error:
            self.look([failed("bus", error, NATS_AWAY)])
        except StoreUnavailableError as error:
            self.look([failed("store", error, STORE_AWAY)])
        except RunMissingError as error:
            if not self._opened:
                raise
            self.look([_lost(error)])
        return False

    async def _follow(self, watch: Watch) -> bool:
        following = asyncio.ensure_future(watch.follow(store=True))
        examining = asyncio.ensure_future(self._examine())
        try:
            while not following.done():
                self.look((await watch.now()).alerts)
                await asyncio.wait([following], timeout=self._options.every_s)
                if examining.done():
                    examining.result()
            following.result()
            return True
        finally:
            await cancel(following, examining)

    async def _examine(self) -> None:
        """Makes the doctor's findings at intervals, which are shorter while there are problems."""
        while self._options.doctor_s:
            report = await examine(self._target)
            if not is_blind(report.findings):
                # The other findings come from each look itself; the doctor's may be minutes old.
                self._examined = report.deeper
            amiss = any(one.severity in SEVERITIES for one in self._examined)
            rest_s = self._options.doctor_s * (SOONER if amiss else 1.0)
            await asyncio.sleep(rest_s * self._runtime.rng.uniform(0.9, 1.1))
        await asyncio.Event().wait()

    def look(self, findings: Sequence[Finding]) -> None:
        """Passes the findings of a check to the alerts, and sends the notices that follow."""
        now_s = self._runtime.clock()
        if is_blind(findings):
            # A check that cannot see the run shows neither silent learners nor problems that ended.
            away = [one for one in findings if one.runbook in AWAY]
            self._say(self._ledger.look(away, now_s, blind=True))
        else:
            self._say(self._ledger.look([*findings, *self._examined], now_s))

    def _say(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            self._tell(notice)
        if notices and self._kept is not None:
            firing = [asdict(alert) for alert in self._ledger.firing()]
            part = self._kept.with_name(f"{self._kept.name}.part")
            part.write_text(json_module.dumps(firing))
            part.replace(self._kept)

    def _restore(self) -> None:
        """Restores the firing alerts that an earlier process has kept in the file, if there is one.

        Raises:
            ConfigError: the file is not one that this command writes.
        """
        if self._kept is None or not self._kept.exists():
            return
        try:
            self._ledger.restore(json_module.loads(self._kept.read_text()))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{str(self._kept)!r} is not what `diloco watch --state` writes",
                hint="remove it, or name another file",
            ) from error


def is_blind(findings: Sequence[Finding]) -> bool:
    """Returns whether the findings are of a check that could not reach bus, store or run."""
    return any(one.runbook in AWAY and one.severity == "error" for one in findings)


def _lost(error: DilocoError) -> Finding:
    return Finding(
        severity="error",
        about="run",
        sentence=f"{error.message}, and it was there",
        advice="if the server's disk is lost, resume from the store",
        runbook=doctor_findings.RESTORE,
    )
