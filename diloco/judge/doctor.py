"""`diloco doctor`: reports the health of a run, or of a configuration whose run is not created yet.

It probes bus, store and clock, and reads tape, heartbeats and the list of objects. The probe of the
bus publishes a `Rejection` to a learner "doctor", which stays in the bounded stream.
`doctor_findings.py` turns facts into findings.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from diloco.common.process.config import Config, differences, fitted
from diloco.common.process.credentials import load_credentials
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    BusError,
    BusUnavailableError,
    ConfigError,
    DilocoError,
    IntegrityError,
    RunIncompleteError,
    RunMismatchError,
    RunMissingError,
    StoreError,
    StoreMissingError,
    StoreUnavailableError,
    TaskError,
)
from diloco.common.storage.bundle import is_bundle
from diloco.common.storage.store import ObjectStore, open_store
from diloco.common.storage.tape import RunContext
from diloco.judge import doctor_findings, service_findings
from diloco.judge.audit import Account, Audit, ObjectsReport, audit
from diloco.judge.evidence import wholeness
from diloco.judge.objects import check_bytes, check_objects, list_now, read_listing
from diloco.run.cli.opening import OpenRun, open_run, run_config
from diloco.run.cli.screen import SEVERITY_STYLES
from diloco.run.cli.subprocess import Isolated
from diloco.run.health_findings import (
    DIGEST_MISMATCH,
    NATS_AWAY,
    ORDER,
    STORE_AWAY,
    clock,
    configuration,
    failed,
    grouped,
    ranked,
)
from diloco.run.history import History, read_history
from diloco.run.model.evaluate import read_scores, scores_of
from diloco.run.newest_objects import deleted
from diloco.run.state import Finding, RunStatus
from diloco.run.timeseries import read_time_series
from diloco.run.watch import Watch

# The most times that tape and store are read. An object that is collected between the reading of
# the tape and that of the store seems to be missing; in a second reading it does not.
LOOKS = 3
# A deep examination scores versions on held-out data until the run has about this many scores.
SCORES = 8


@dataclass
class Report:
    """The doctor's findings on a run.

    Attributes:
        run: the run's name.
        account: numbers of updates; `run_now`: the run's state. Both are None if the tape could not
            be read.
        exists: False if the run is not created yet and nothing else is wrong.
    """

    run: str
    findings: list[Finding] = field(default_factory=list)
    account: Account | None = None
    run_now: RunStatus | None = None
    exists: bool = True

    @property
    def healthy(self) -> bool:
        """Whether the run exists, and no finding is an error."""
        return self.exists and all(finding.severity != "error" for finding in self.findings)

    @property
    def deeper(self) -> list[Finding]:
        """The findings beyond those of `run_now`: from the whole tape, store and bus."""
        now = self.run_now.findings if self.run_now is not None else ()
        return [one for one in self.findings if one not in now]

    def document(self) -> dict[str, object]:
        """Returns the report for JSON; of `run_now` only what the findings say."""
        return {
            "run": self.run,
            "exists": self.exists,
            "healthy": self.healthy,
            "findings": [asdict(finding) for finding in self.findings],
            "account": None if self.account is None else asdict(self.account),
        }


# A function that receives the report so far, and the name of the step that begins now.
Told = Callable[["Report", str], None]
# A function of (run, tape, the run's task as a `ScoredTask`, findings), which returns the findings
# and further ones.
Further = Callable[[RunContext, History, Isolated, list[Finding]], Awaitable[list[Finding]]]


def _not_told(_report: Report, _doing: str) -> None:
    """Ignores progress: the default of `told` in `examine`."""


async def examine(
    target: str, *, deep: bool = False, told: Told = _not_told, further: Further | None = None
) -> Report:
    """Examines a run, or a configuration, and reports its health; failures become findings.

    Args:
        target: RUN, as `diloco.run.cli.opening` takes it.
        deep: also read every object, recompute every version, and judge every record.
        told: called with the report so far, and the name of the step that begins.
        further: called last, with the run, its tape, its task and the findings; returns findings.

    Raises:
        ConfigError: `target` is not a configuration, or an invalid one.
    """
    config = run_config(target)
    report = Report(config.run.name)
    found: list[Finding] = []
    # A file has neither bus nor store to probe.
    file = is_bundle(Path(target))
    # A reader may neither publish nor store: nothing is probed by writing.
    writes = not file and not _is_reader(config)
    store, probed = (None, []) if file else await asyncio.to_thread(_probe_store, config, writes)
    found += probed
    try:
        async with open_run(target, name="doctor", reads=True) as run:
            # The task loads while the tape is read.
            task = Isolated("diloco.run.model.view:ScoredTask", run.config.settings())
            try:
                found += _compare(run)
                found += await _probe_bus(run.context) if writes else []
                report.findings = found
                found += await _examine_run(report, run, task, _Way(deep, told, further))
            finally:
                await asyncio.to_thread(task.close)
    except RunMissingError as error:
        found += await asyncio.to_thread(_no_run, config, error, store)
        report.exists = any(finding.severity == "error" for finding in found)
        found += await asyncio.to_thread(_task_of, config)
    except RunIncompleteError as error:
        report.exists = False
        # A store that does not exist yet is made with the run.
        found = [one for one in found if one.severity != "note"]
        found.append(replace(failed("run", error, doctor_findings.RUN_MISMATCH), severity="note"))
    except BusUnavailableError as error:
        found.append(failed("bus", error, NATS_AWAY))
    except BusError as error:
        found.append(failed("bus", error, doctor_findings.PERMISSIONS))
    except StoreUnavailableError as error:
        found.append(failed("store", error, STORE_AWAY))
    except StoreError as error:
        found.append(failed("store", error, doctor_findings.PERMISSIONS))
    except IntegrityError as error:
        found.append(failed("store", error, DIGEST_MISMATCH))
    except RunMismatchError as error:
        found.append(failed("store", error, STORE_AWAY))
    except DilocoError as error:
        found.append(failed("run", error, doctor_findings.RUN_MISMATCH))
    if report.run_now is None:
        found += configuration(config.settings())
    report.findings = ranked(without_repeats(found))
    return report


def without_repeats(findings: Iterable[Finding]) -> list[Finding]:
    """Removes repeated findings.

    Returns:
        One finding for each pair of subject and sentence: that with the worst severity.
    """
    worst: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        other = worst.setdefault((finding.about, finding.sentence), finding)
        if ORDER.index(finding.severity) < ORDER.index(other.severity):
            worst[finding.about, finding.sentence] = finding
    return [*worst.values()]


def _no_run(config: Config, error: DilocoError, store: ObjectStore | None) -> Iterator[Finding]:
    """Yields the finding on a run without a tape on the bus: not created, or the tape is lost."""
    try:
        # Objects of the run mean that its tape existed, and is lost or on another server.
        objects = len(list_now(store, config.run.name)) if store is not None else 0
    except StoreError as away:
        yield failed("run", away, STORE_AWAY)
        return
    if objects:
        yield Finding(
            severity="error",
            about="run",
            sentence=f"{error.message}, but the store holds {objects:,} objects of the run: its "
            "tape is lost, or on another server",
            advice="check bus.url; if the server's disk is lost, resume from the store",
            runbook=doctor_findings.RESTORE,
        )
        return
    yield Finding(
        severity="note", about="run", sentence=f"{error.message}: the run does not exist yet",
        advice=error.hint or "", runbook=doctor_findings.RUN_MISMATCH,
    )  # fmt: skip


def _is_reader(config: Config) -> bool:
    """True if the configuration has a reader's credentials; False too if they cannot be read."""
    with suppress(ConfigError):
        path = config.bus.credentials
        own = None if path is None else load_credentials(Path(path))
        return own is not None and own.role == "reader"
    return False


def _probe_store(config: Config, writes: bool) -> tuple[ObjectStore | None, list[Finding]]:
    """Opens the store; with `writes` also writes, reads and deletes an object.

    Returns:
        The store (None if it does not exist or cannot be opened), and the findings.
    """
    name = f"{config.run.name}/doctor/{secrets.token_hex(8)}"
    store = None
    try:
        store = open_store(config.store.url, emulator=config.store.emulator)
        if not writes:
            return store, []
        _round_trip(store, name)
        taken = service_findings.accepts(store, config.store.url)
        return store, [
            Finding(severity="ok", about="store", sentence=taken),
            *service_findings.store_owner(store),
            *service_findings.store_fence(store, credentials=bool(config.bus.credentials)),
        ]
    except StoreMissingError as error:
        # For an existing run this is an error, which `open_run` raises.
        note = Finding(
            severity="note", about="store", sentence=error.message, advice=error.hint or "",
            runbook=STORE_AWAY,
        )  # fmt: skip
        return None, [note]
    except StoreUnavailableError as error:
        return store, [failed("store", error, STORE_AWAY)]
    except DilocoError as error:
        return store, [failed("store", error, doctor_findings.PERMISSIONS)]


def _round_trip(store: ObjectStore, name: str) -> None:
    data = name.encode()
    store.put(name, data)
    try:
        if store.get(name) != data:
            raise StoreError(f"object {name!r} is not what was written")
    finally:
        store.delete(name)


async def _probe_bus(context: RunContext) -> list[Finding]:
    """Publishes a message and reads it back; compares the server's clock with this machine's."""
    subject = names.rejected(context.run, "doctor")
    probe = wire.Rejection(
        fragment=-1, learner="doctor", incarnation=0, seq=0, reason="probe", detail="diloco doctor"
    )
    answers = False
    try:
        filled = await context.bus.filled(context.tape)
        answers = True
        before_s = context.runtime.clock()
        await context.bus.publish(subject, wire.encode(probe))
        after_s = context.runtime.clock()
        message = await context.bus.last(names.ops_stream(context.run), subject)
    except BusUnavailableError as error:
        if answers:
            return [doctor_findings.stores_nothing(names.ops_stream(context.run), error.message)]
        return [failed("bus", error, NATS_AWAY)]
    except BusError as error:
        return [failed("bus", error, doctor_findings.PERMISSIONS)]
    assert message is not None
    # The message may have been stored at any moment between sending and answer.
    ahead_s = max(0.0, before_s - message.time_s) + min(0.0, after_s - message.time_s)
    liveness_timeout_s = context.settings.quorum.liveness_timeout_s
    return [
        Finding(severity="ok", about="bus", sentence="NATS answers and stores messages"),
        clock("this machine's clock", ahead_s, liveness_timeout_s),
        *doctor_findings.readers(filled),
    ]


def _compare(run: OpenRun) -> list[Finding]:
    """Compares the file's settings with the run's: one finding for each key that differs."""
    ours = fitted(run.config.settings(), run.context.layout)
    found = [
        Finding(
            severity="error",
            about="specification",
            sentence=sentence,
            advice="daemons with this file are refused: use the one the run was created with",
            runbook=doctor_findings.RUN_MISMATCH,
        )
        for sentence in differences(ours, run.context.settings)
    ]
    if not found:
        found.append(
            Finding(severity="ok", about="specification", sentence="the file matches the run")
        )
    return found


def _try_task(task: Isolated, build: str, layout: str | None = None) -> list[Finding]:
    """Checks that the task can be built here, and that its layout's digest is `layout`, the run's.

    If `layout` is None, the run does not exist yet, and any layout will do.
    """
    try:
        digest = task.call("digest")
    except (DilocoError, ImportError, OSError) as error:
        sentence = f"task {build!r} cannot be built here, so its layout is not checked: {error}"
        return [
            Finding(
                severity="note", about="layout", sentence=sentence,
                advice="only learners and `diloco run create` need the task",
                runbook=doctor_findings.RUN_MISMATCH,
            )
        ]  # fmt: skip
    if layout is None or digest == layout:
        return [Finding(severity="ok", about="layout", sentence=f"the task's layout is {digest}")]
    return [
        Finding(
            severity="error",
            about="layout",
            sentence=f"the task's layout is {digest} here, {layout} in the run",
            advice="learners with this task are refused: use the code the run was created with",
            runbook=doctor_findings.RUN_MISMATCH,
        )
    ]


def _task_of(config: Config) -> list[Finding]:
    """Checks that the task of a run that is not created yet can be built here."""
    task = Isolated("diloco.run.model.view:ScoredTask", config.settings())
    try:
        return _try_task(task, config.task.build)
    finally:
        task.close()


class _Way(NamedTuple):
    """The arguments of `examine` that say how to examine."""

    deep: bool
    told: Told
    further: Further | None


async def _examine_run(report: Report, run: OpenRun, task: Isolated, way: _Way) -> list[Finding]:
    """Returns the findings on tape, learners, fragments, objects and task.

    It sets `report.account` and `report.run_now`, and `report.findings` to those so far at each
    step.
    """
    context, known = run.context, report.findings

    def told(findings: Iterable[Finding], doing: str) -> None:
        report.findings = ranked(without_repeats([*known, *findings]))
        way.told(report, doing)

    told((await Watch(context).begin()).findings, "reading the tape")
    history, now, compared, found, objects = await _look(context, told, deep=way.deep)
    report.account, report.run_now = found.account, now
    made = await context.runtime.call(
        service_findings.newest_checkpoint, context.store, context.run
    )
    gone = await context.runtime.call(lambda: [*deleted(context.store, context.run)])
    findings = [
        *configuration(history.in_force, now.changes),
        *doctor_findings.aggregator_clocks(history),
        *compared.findings,
        *doctor_findings.ruined(await _scores(context, deep=way.deep)),
        *service_findings.checkpoints(history, made, now.as_of_s),
        *((_copy(),) if run.bundle is not None else ()),
        *doctor_findings.tape(history, found),
        *wholeness(history, objects),
        *gone,
        *doctor_findings.objects(objects, deep=way.deep),
        *doctor_findings.rules(found),
    ]
    told(findings, "loading the task")
    build, layout = run.config.task.build, run.specification.layout
    findings += await asyncio.to_thread(_try_task, task, build, layout)
    if way.further is None:
        return findings
    told(findings, "merging the newest rounds without each of their updates")
    return await way.further(context, history, task, findings)


def _copy() -> Finding:
    """Returns the note that a bundle's heartbeats, losses and logs cannot be verified."""
    return Finding(
        severity="note", about="file",
        sentence="this is a copy in a file: its heartbeats, held-out losses and logs are its "
        "maker's word alone",
        advice="`diloco replay FILE` verifies its tape and its objects",
    )  # fmt: skip


async def _scores(context: RunContext, *, deep: bool) -> list[wire.Score]:
    """Returns the stored held-out losses; with `deep`, also new ones, spread over the run.

    Raises:
        StoreError: the store is unreachable.
    """
    if not deep:
        return await read_scores(context)
    series = await read_time_series(context, 0.0)
    try:
        return await scores_of(context, series, SCORES)
    except (TaskError, ConfigError, ImportError):
        return await read_scores(context)  # `_try_task` reports that it cannot be built.


class _Inspection(NamedTuple):
    """The tape and the store, as they were read.

    Attributes:
        now: the run's state when the tape had been read.
        compared: that state, and findings from the shards of the newest rounds.
    """

    history: History
    now: RunStatus
    compared: RunStatus
    audit: Audit
    objects: ObjectsReport


async def _look(
    context: RunContext, told: Callable[[Iterable[Finding], str], None], *, deep: bool
) -> _Inspection:
    """Reads and checks tape and store; again if a rule is broken and the tape has grown since."""
    for look in range(1, LOOKS + 1):
        before = await read_listing(context)
        watch = Watch(context)
        watch.observed.from_start = True
        history = await read_history(context, watch.observed.take)
        # Before the deep part, which may take hours that must not count as waiting.
        now = await watch.caught_up()
        compared = await watch.look_into_store(objects=False)
        told(compared.findings, "reading the store's objects")
        found = await context.runtime.call(partial(audit, history, deep=deep))
        objects = await context.runtime.call(partial(check_objects, history, before=before))
        if deep:
            # It merges with JAX, which takes time and memory to load.
            from diloco.judge.remake_and_compare import remake

            def hear(done: int, total: int, known: RunStatus = compared) -> None:
                told(known.findings, f"making version {done:,} of {total:,} again")

            await context.runtime.call(remake, history, objects, hear)
        else:
            await context.runtime.call(check_bytes, history, objects)
        if not (found.breaches or objects.breaches) or look == LOOKS:
            break
        if await context.bus.last_sequence(context.tape) == history.last_seq:
            break
    return _Inspection(history, now, compared, found, objects)


def show(report: Report, console: Console) -> None:
    """Prints the report, with its summary."""
    console.print(picture(report))


def picture(report: Report, *, ended: bool = True) -> RenderableType:
    """Returns the report as a table: the worst findings first, equal findings as one.

    Args:
        report: the report.
        ended: True if the examination has ended: a summary follows the table.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("severity", no_wrap=True)
    table.add_column("about", overflow="fold", max_width=24)
    table.add_column("sentence", overflow="fold")
    for one in grouped(report.findings):
        since = "" if one.since is None else f"since version {one.since}"
        if one.since_s is not None:
            at = datetime.fromtimestamp(one.since_s).astimezone()
            since = f"{since or 'since'}{', ' if since else ' '}{at:%Y-%m-%d %H:%M:%S}"
        lines = [one.evidence, one.harm and f"harm: {one.harm}", since, one.advice, one.runbook]
        told = [escape(one.sentence), *(f"[dim]{escape(line)}[/]" for line in lines if line)]
        colour = SEVERITY_STYLES[one.severity]
        table.add_row(f"[{colour}]{one.severity}[/]", escape(one.about), "\n".join(told))
    return Group(table, _sum(report)) if ended else table


def _sum(report: Report) -> str:
    counts = {
        severity: sum(finding.severity == severity for finding in report.findings)
        for severity in ORDER[:-1]
    }
    listed = ", ".join(
        f"{count} {severity}{'s' * (count > 1)}" for severity, count in counts.items() if count
    )
    state = "is healthy" if report.healthy else "is [bold red]not healthy[/]"
    if report.healthy and counts["warning"]:
        state = "has no errors, [yellow]but look at its warnings[/]"
    state = state if report.exists else "does not exist yet"
    return f"run [bold]{report.run}[/] {state}{f' ({listed})' if listed else ''}"
