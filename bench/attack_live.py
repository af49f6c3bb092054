"""Liars beside three honest learners, all of them processes: what their attacks do to the run.

    .venv/bin/python -m bench.attack_live [--span 20] [--only NAME] [--merges A,B]

Two runs at the same time, so that whatever else the machine does meets both: each has a nats-server
with credentials and permissions (`diloco auth`), an aggregator, three learners that train
`examples/digits.py` at a pace that leaves the processor idle, and a folder as its store. Beside one
of them a process with more learners' credentials (`bench/attack.py`) lies: each attack in turn, for
a span of time, under a name of its own, which joins, and then is silent for some seconds. "nobody"
is a span without any: how far two equal runs differ.

Shown is the run with the liar in % of the other: versions and honest updates merged in a second of
each span, with the standard error over its parts; by how much the held-out loss went further away
from the other's within it, for what an attack has done stays; the part of a core that the processes
of each used (the liar's left out), how many cores the machine had in use, and its load. At last
both runs are stopped, and must end.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tomli_w

from bench.attack import ACTS, CODEC, FIRST, HONEST, RUN, STEP_S, Liar
from bench.failover import cpu_s
from diloco import Task
from diloco.common.process import log
from diloco.common.process.config import load_config
from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import DilocoError
from diloco.common.storage.bus import jetstream
from diloco.common.storage.tape import Entry, read_item
from diloco.learner.contract import build_task
from diloco.operate.auth import files as auth
from diloco.operate.create import create_from
from diloco.run.cli.opening import OpenRun, open_run
from diloco.run.model.load import global_arrays

DIGITS = "examples.digits:build"
# Beyond what spans and gaps take: for daemons to begin, and for runs to end.
SPARE_S = 600.0
PARTS = 8
# Between two attacks.
GAP_S = 5.0
SAMPLE_S = 0.5
FloatArray = npt.NDArray[np.float64]


class AttackSpan(NamedTuple):
    """An attack, when its name had joined, and when it ended; what ended it early."""

    name: str
    began_s: float
    ended_s: float
    wrong: str = ""


def build(*, steps: int, seed: int) -> Task:
    """The digits, at a pace."""
    task = build_task(DIGITS, steps=steps, seed=seed, options={})

    def paced(learner: str, position: int) -> Iterator[Any]:
        for batch in task.batches(learner, position):
            time.sleep(STEP_S)
            yield batch

    return dataclasses.replace(task, batches=paced)


class Used(NamedTuple):
    """Processor seconds of a run's own processes, and of the whole machine, until a time."""

    at_s: float
    run_s: float
    machine_s: float


class AttackedRun:
    """A run's server, daemons and files below a folder."""

    def __init__(self, folder: Path, liars: int, settings: dict[str, Any]) -> None:
        self._folder, self._settings = folder, settings
        self._liars = [liar_name(index) for index in range(liars)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._server = NatsServer(folder / "nats", extra_config=self._credentials())
        self.used = [Used(0.0, 0.0, 0.0)]
        # When each version was stored, and how many honest updates it holds.
        self.seen: list[tuple[float, int]] = []
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    def start(self) -> None:
        """Create the run, and start its daemons."""
        self._server.start()
        self._configure()
        create_from(load_config(self._file("operator")), None)
        self._start("agg", ["aggregator"])
        for learner in HONEST:
            self._start(learner, ["learner", "--learner", learner])

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._server.stop()

    def lie_command(self, attacks: Sequence[str], span_s: float) -> list[str]:
        """Of the process that lies beside it."""
        command = [sys.executable, "-m", "bench.attack_live", "--span", str(span_s)]
        return [*command, "--beside", str(self._folder), "--attacks", json.dumps(attacks)]

    def open(self) -> contextlib.AbstractAsyncContextManager[OpenRun]:
        """The run, as its operator."""
        return open_run(str(self._file("operator")), name="watch")

    async def follow(self, opened: OpenRun) -> None:
        """Read the run's tape to its end."""
        context, subjects = opened.context, [names.record(RUN, "*"), names.end(RUN)]
        async for message in context.bus.read(context.tape, subjects, 1):
            if message.subject == names.end(RUN):
                self.ended.set()
                return
            item = await read_item(context, message)
            if isinstance(item, Entry) and isinstance(item.body, wire.Record) and item.body.inputs:
                honest = sum(taken.learner in HONEST for taken in item.body.inputs)
                self.seen.append((item.time_s, honest))
            if len(self.seen) >= FIRST:
                self.begun.set()

    async def sample(self) -> None:
        """Note what is used, for ever."""
        while True:
            self.used.append(self._use())
            await asyncio.sleep(SAMPLE_S)

    def _use(self) -> Used:
        run_s = 0.0
        for pid in (self._server.pid, *(process.pid for process in self._processes)):
            with contextlib.suppress(FileNotFoundError, IndexError):
                run_s += cpu_s(pid or 0)
        ticks = [int(value) for value in Path("/proc/stat").read_text().split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]
        return Used(time.time(), run_s, busy / os.sysconf("SC_CLK_TCK"))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.toml"

    def _start(self, name: str, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "diloco", *arguments, "--config", str(self._file(name))]
        with (self._folder / f"{name}.log").open("wb") as file:
            self._processes.append(subprocess.Popen(command, stderr=file))

    def _credentials(self) -> str:
        """Make everybody's; what the server's configuration says of them."""
        folder = self._folder / "auth"
        auth.init(folder, RUN, ["127.0.0.1"])
        for learner in (*HONEST, *self._liars):
            auth.add(folder, learner, "learner")
        auth.add(folder, "agg", "aggregator")
        tls = folder / "tls"
        extra = f'tls {{ cert_file: "{tls}/nats-1.pem", key_file: "{tls}/nats-1.key" }}\n'
        return extra + 'accounts { include "../auth/accounts.conf" }\n'

    def _configure(self) -> None:
        for name in (*HONEST, *self._liars, "agg", "operator"):
            bus = {
                "url": f"tls://127.0.0.1:{self._server.port}",
                "credentials": str(self._folder / "auth" / "credentials" / f"{name}.toml"),
                "tls_ca": str(self._folder / "auth" / "tls" / "ca.pem"),
            }
            store = {"url": str(self._folder / "store")}
            self._file(name).write_text(
                tomli_w.dumps({**self._settings, "bus": bus, "store": store})
            )


class SpanOutcome(NamedTuple):
    """A span's rates: the run with the liar over the other, less 1; and the rates of each part.

    `loss` is the change of that within the span.

    `cores` are those in use: by the run with the liar, by the other, by the machine; and its load.
    `rate` and `alone_loss` are the other's: versions a second, and held-out.
    """

    name: str
    loss: float
    versions: tuple[float, ...]
    merged: tuple[float, ...]
    cores: tuple[float, float, float, float]
    rate: float
    alone_loss: float
    wrong: str


def play(folder: Path, attacks: Sequence[str], span_s: float, merge: str) -> list[SpanOutcome]:
    """Two runs from beginning to end.

    Raises:
        TimeoutError: one of them does not begin, or does not end.
    """
    document = settings(merge, steps=int(3 * (len(attacks) * (span_s + GAP_S) + 60) / STEP_S))
    alone = AttackedRun(folder / "alone", 0, document)
    lied = AttackedRun(folder / "lied", len(attacks), document)
    try:
        for fleet in (alone, lied):
            fleet.start()
        return asyncio.run(_compare(alone, lied, attacks, span_s, document["run"]["steps"]))
    finally:
        for fleet in (alone, lied):
            fleet.stop()


async def _compare(
    alone: AttackedRun, lied: AttackedRun, attacks: Sequence[str], span_s: float, steps: int
) -> list[SpanOutcome]:
    evaluate: Any = build_task(DIGITS, steps=steps, seed=0, options={}).evaluate
    found: list[SpanOutcome] = []

    async def losses() -> list[float]:
        return [
            float(evaluate(await global_arrays(run.context, run.specification))) for run in opened
        ]

    latest_s = len(attacks) * (span_s + GAP_S) + SPARE_S
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(latest_s))
        opened = [await stack.enter_async_context(fleet.open()) for fleet in (alone, lied)]
        working = [
            asyncio.ensure_future(work)
            for fleet, run in zip((alone, lied), opened, strict=True)
            for work in (fleet.follow(run), fleet.sample())
        ]
        stack.callback(lambda: [task.cancel() for task in working])
        await asyncio.gather(alone.begun.wait(), lied.begun.wait())
        before = await losses()
        async for span in _spans(lied.lie_command(attacks, span_s)):
            # The version after the span tells how far the last one within it had come.
            await asyncio.sleep(GAP_S / 2)
            after = await losses()
            loss = after[1] / after[0] / (before[1] / before[0]) - 1
            before = after
            found.append(_outcome(span, alone, lied, loss, after[0]))
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        for run in opened:
            message = wire.Stop(run=RUN, global_step=0, reason="the attacks are over", by="test")
            await run.context.bus.publish(names.stop(RUN), wire.encode(message))
        await asyncio.gather(alone.ended.wait(), lied.ended.wait())
    return found


async def _spans(command: list[str]) -> AsyncIterator[AttackSpan]:
    """The attacks that the liar's process reports."""
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            yield AttackSpan(*json.loads(line))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _outcome(
    span: AttackSpan, alone: AttackedRun, lied: AttackedRun, loss: float, alone_loss: float
) -> SpanOutcome:
    edges = np.linspace(span.began_s, span.ended_s, PARTS + 1)
    versions, before = _change(*(_grown(f.seen, [1] * len(f.seen), edges) for f in (alone, lied)))
    merged, _ = _change(*(_grown(f.seen, [one for _, one in f.seen], edges) for f in (alone, lied)))
    took_s = span.ended_s - span.began_s
    (lied_s, machine_s), (alone_s, _) = (_spent(fleet, span) for fleet in (lied, alone))
    cores = (lied_s / took_s, alone_s / took_s, machine_s / took_s, os.getloadavg()[0])
    rate = before / took_s
    return SpanOutcome(span.name, loss, versions, merged, cores, rate, alone_loss, span.wrong)


def _grown(seen: list[tuple[float, int]], counts: list[int], edges: FloatArray) -> FloatArray:
    """How many were counted in each part; what lies over an edge counts for both."""
    times = np.array([at_s for at_s, _ in seen])
    return np.diff(np.interp(edges, times, np.cumsum(np.array(counts, np.float64))))


def _change(before: FloatArray, after: FloatArray) -> tuple[tuple[float, ...], float]:
    """Of each part; and how many there were before."""
    return tuple(map(float, (after - before) / before.mean())), float(before.sum())


def _spent(fleet: AttackedRun, span: AttackSpan) -> tuple[float, float]:
    """Processor seconds of the run and of the machine within a span."""
    times, run_s, machine_s = np.array(fleet.used[1:]).T
    edges = np.array([span.began_s, span.ended_s])
    run, machine = (np.diff(np.interp(edges, times, spent)) for spent in (run_s, machine_s))
    return float(run[0]), float(machine[0])


# The table


def rows(attacks: Sequence[str], span_s: float, merges: Sequence[str]) -> Iterator[str]:
    """The table, line by line."""
    found = {}
    for merge in merges:
        with tempfile.TemporaryDirectory(prefix="bench-live-") as folder:
            found[merge] = play(Path(folder), attacks, span_s, merge)
    cells = "versions a second, % | honest updates, % | loss, % | cores: with, without, machine"
    yield f"| the liar beside three | {' | '.join(f'{merge}: {cells}; load' for merge in merges)} |"
    yield f"|{' --- |' * (1 + 4 * len(merges))}"
    for made in zip(*found.values(), strict=True):
        yield f"| {made[0].name or 'nobody'} | {' | '.join(map(_cells, made))} |"
    every = [one for made in found.values() for one in made]
    rate, loss = fmean(one.rate for one in every), fmean(one.alone_loss for one in every)
    yield f"\nWithout a liar: {rate:.2f} versions a second, held-out loss {loss:.4f}"


def _cells(one: SpanOutcome) -> str:
    lied, alone, machine, load = one.cores
    used = f"{lied:.2f}, {alone:.2f}, {machine:.1f}; {load:.0f}"
    rates = " | ".join(map(_percent, (one.versions, one.merged)))
    return f"{rates} | {100 * one.loss:+.1f} | {used}" + (f" ({one.wrong})" if one.wrong else "")


def settings(merge: str, steps: int) -> dict[str, Any]:
    """Settings of a run, but for its bus and store."""
    return {
        "run": {"name": RUN, "steps": steps, "seed": 0},
        "task": {"build": "bench.attack_live:build"},
        "sync": {"fragments": 2, "interval_steps": 12, "codec": CODEC, "block": 16},
        "outer": {"merge": merge},
        # The end waits no longer for who never sends its last update.
        "quorum": {"deadline_s": 5.0, "read_timeout_s": 5.0},
    }


def _percent(values: Sequence[float]) -> str:
    return f"{100 * fmean(values):+.1f} ± {100 * stdev(values) / len(values) ** 0.5:.1f}"


def liar_name(index: int) -> str:
    """The name of the attack at an index."""
    return f"liar-{index}"


async def lie(folder: Path, attacks: Sequence[str], span_s: float) -> None:
    """The liar's process: "" among the attacks is nobody. Tells of each on standard output."""
    for index, attack in enumerate(attacks):
        name = liar_name(index)
        config = folder / f"{name}.toml"
        async with open_run(str(config), name=name, reads=True) as opened:
            section = load_config(config).bus
            bus = await jetstream.connect(
                section.url, name=name, credentials=section.credentials, tls_ca=section.tls_ca
            )
            liar = Liar(opened.context, bus, name, config)
            if not index:
                await liar.wait()
            print(json.dumps(await _act(liar, attack, span_s)), flush=True)
            await bus.close()
        await asyncio.sleep(GAP_S)


async def _act(liar: Liar, attack: str, span_s: float) -> AttackSpan:
    if attack:
        await liar.join()
    began_s, wrong = time.time(), ""
    try:
        async with asyncio.timeout(span_s):
            await (ACTS[attack](liar) if attack else asyncio.sleep(2 * span_s))
    except TimeoutError:
        pass
    except DilocoError as error:
        wrong = error.message
    return AttackSpan(attack, began_s, time.time(), wrong)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="bench.attack_live", description=__doc__)
    parser.add_argument("--span", type=float, default=20.0, help="seconds of each attack")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument("--merges", default="rda,centered_clipping", help="of outer.merge")
    parser.add_argument("--beside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--attacks", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    log.configure("error")
    if options.beside:
        asyncio.run(lie(options.beside, options.attacks, options.span))
        return
    attacks = [name for name in ("", *ACTS) if not name or options.only in name]
    for line in rows(attacks, options.span, options.merges.split(",")):
        print(line, flush=True)


if __name__ == "__main__":
    main()
