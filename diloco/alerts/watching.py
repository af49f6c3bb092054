"""Follow a run, judge it as `diloco status` and `diloco doctor` do, and tell what is amiss.

Neither Prometheus nor a daemon of the run is needed: it reads the bus and the store. While NATS is
away that is what it tells.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.alerts import message
from diloco.alerts.ledger import SEVERITIES, Ledger, Notice
from diloco.check import symptoms
from diloco.check.doctor import examine
from diloco.check.symptoms import Finding
from diloco.cli.opening import open_run
from diloco.common.errors import (
    BusUnavailableError,
    ConfigError,
    DilocoError,
    RunMissingError,
    StoreUnavailableError,
)
from diloco.common.service import Runtime, cancel
from diloco.look.status import Watch

# What `diloco status` judges at each look; the doctor's word on it may be minutes old.
OF_STATUS = ("bus", "fragment", "fragments", "learner", "learners", "owners")
# What keeps from looking at anything else.
AWAY = (symptoms.NATS_AWAY, symptoms.STORE_AWAY, symptoms.RESTORE)
# Of the time between two examinations, while something is amiss.
SOONER = 0.2
Tell = Callable[[Notice], None]


@dataclass(kw_only=True)
class Watcher:
    """Looks at a run until it ends.

    Args:
        target: RUN.
        ledger: of its alerts.
        tell: takes what there is to tell.
        every_s: between two looks.
        doctor_s: between two examinations as `diloco doctor` makes them; 0: none.
        kept: where it is written what fires, for the next process; None: nowhere.
    """

    target: str
    ledger: Ledger
    tell: Tell
    runtime: Runtime = field(default_factory=Runtime)
    every_s: float = 10.0
    doctor_s: float = 600.0
    kept: Path | None = None
    _examined: list[Finding] = field(default_factory=list)
    _opened: bool = False

    async def run(self) -> None:
        """Until the run's end.

        Raises:
            DilocoError: there is no such run, and there was none when the watch began.
        """
        self._restore()
        ended = await self._until_away()
        while not ended:
            await asyncio.sleep(self.every_s)
            ended = await self._until_away()
        self._say(self.ledger.end(self.runtime.clock()))

    async def _until_away(self) -> bool:
        """Look until the run has ended, or until bus or store are away; whether it has ended."""
        try:
            async with open_run(self.target, name="watch", reads=True) as opened:
                watch = Watch(opened.context)
                status = await watch.begin()
                self._opened = True
                if opened.kept is not None:
                    self.look(status.alerts)
                    return True
                return await self._follow(watch)
        except BusUnavailableError as error:
            self.look([symptoms.failed("bus", error, symptoms.NATS_AWAY)])
        except StoreUnavailableError as error:
            self.look([symptoms.failed("store", error, symptoms.STORE_AWAY)])
        except RunMissingError as error:
            if not self._opened:
                raise
            self.look([_lost(error)])
        return False

    async def _follow(self, watch: Watch) -> bool:
        following = asyncio.ensure_future(watch.follow())
        examining = asyncio.ensure_future(self._examine())
        try:
            while not following.done():
                self.look((await watch.now()).alerts)
                await asyncio.wait([following], timeout=self.every_s)
                if examining.done():
                    examining.result()
            following.result()
            return True
        finally:
            await cancel(following, examining)

    async def _examine(self) -> None:
        """The doctor's word, now and then; sooner while it has something to say."""
        while self.doctor_s:
            report = await examine(self.target)
            if not is_blind(report.findings):
                self._examined = [*of_doctor(report.findings)]
            amiss = any(one.severity in SEVERITIES for one in self._examined)
            rest_s = self.doctor_s * (SOONER if amiss else 1.0)
            await asyncio.sleep(rest_s * self.runtime.rng.uniform(0.9, 1.1))
        await asyncio.Event().wait()

    def look(self, findings: Sequence[Finding]) -> None:
        """Tell what is new after a look."""
        now_s = self.runtime.clock()
        if is_blind(findings):
            # Whoever cannot look knows neither who is silent now, nor what has ended.
            away = [one for one in findings if one.runbook in AWAY]
            self._say(self.ledger.look(away, now_s, blind=True))
        else:
            self._say(self.ledger.look([*findings, *self._examined], now_s))

    def _say(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            self.tell(notice)
        if notices and self.kept is not None:
            firing = [message.as_document(alert) for alert in self.ledger.firing()]
            part = self.kept.with_name(f"{self.kept.name}.part")
            part.write_text(json.dumps(firing))
            part.replace(self.kept)

    def _restore(self) -> None:
        """Go on from what the process before has told.

        Raises:
            ConfigError: what is kept is nothing of ours.
        """
        if self.kept is None or not self.kept.exists():
            return
        try:
            kept = json.loads(self.kept.read_text())
            self.ledger.restore([message.from_document(one) for one in kept])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{str(self.kept)!r} is not what `diloco watch --state` writes",
                hint="remove it, or name another file",
            ) from error


def is_blind(findings: Sequence[Finding]) -> bool:
    """Whether findings are of a look that could not see the run."""
    return any(one.runbook in AWAY and one.severity == "error" for one in findings)


def of_doctor(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Of what the doctor finds, what a look at the status does not."""
    for one in findings:
        if one.about.partition(" ")[0] not in OF_STATUS and one.runbook != symptoms.TAPE_FULL:
            yield one


def _lost(error: DilocoError) -> Finding:
    return Finding(
        severity="error",
        about="run",
        sentence=f"{error.message}, and it was there",
        advice="if the server's disk is lost, resume from the store",
        runbook=symptoms.RESTORE,
    )
