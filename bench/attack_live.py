"""Liars beside three honest learners, all of them processes: what their attacks do to the run.

    .venv/bin/python -m bench.attack_live [--span 20] [--only NAME] [--trust A,B]

Two runs at the same time, so that whatever else the machine does meets both: each has a nats-server
with credentials and permissions (`diloco auth`), an aggregator, three learners that train
`examples/digits.py` at a pace that leaves the processor idle, and a folder as its store. Beside one
of them a process with more learners' credentials (`Liar`) lies: each attack in turn, for
a span of time, under a name of its own, which joins, and then is silent for some seconds. "nobody"
is a span without any: how far two equal runs differ.

Shown is the run with the liar in % of the other: versions and honest updates merged in a second of
each span, with the standard error over its parts; by how much the held-out loss went further away
from the other's within it, for what an attack has done stays; the part of a core that the processes
of each used (the liar's left out), how many cores the machine had in use, and its load; after how
many seconds status named the liar, and what `diloco why` says of it after the span; and of which
honest learners either says something. At last both runs are stopped, and must end.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import tomli_w

from bench.attack import Lie
from bench.failover import cpu_s, filling
from diloco import Task
from diloco.common.process import log
from diloco.common.process.config import load_config
from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.codecs import Encoded
from diloco.common.protocol.errors import DilocoError
from diloco.common.storage.bus import Bus, jetstream
from diloco.common.storage.store import DirectoryStore
from diloco.common.storage.tape import Entry, RunContext, read_item
from diloco.learner.load_and_check_task import build_task
from diloco.operate.auth import nats_config_and_credentials as auth
from diloco.operate.create import create_from
from diloco.run.cli.opening import OpenRun, open_run
from diloco.run.model.load import global_arrays
from diloco.run.watch import Watch

# --- The liar, a process

CODEC: Final = "int8"
RUN, HONEST = "live", ("a", "b", "c")
STEP_S = 0.06
# Updates of each honest learner that are merged before anybody lies.
FIRST = 30


@dataclasses.dataclass
class Liar:
    """A process with a learner's credentials, and no learner."""

    context: RunContext
    bus: Bus
    name: str
    config: Path
    incarnation: int = 0
    seqs: dict[int, int] = dataclasses.field(default_factory=dict)

    async def join(self) -> None:
        """Begin a life."""
        message = wire.Join(
            run=RUN, learner=self.name, layout=self.context.layout.digest, host="elsewhere"
        )
        self.incarnation = await self.bus.publish(names.join(RUN, self.name), wire.encode(message))

    async def wait(self) -> None:
        """Until every honest learner was merged."""
        merged = Counter[str]()
        async for record in self.records(1):
            merged.update(taken.learner for taken in record.inputs)
            if all(merged[name] >= FIRST for name in HONEST):
                return

    async def records(self, start: int = 0) -> AsyncIterator[wire.Record]:
        """The records from now on, or from a sequence."""
        start = start or await self.bus.last_sequence(self.context.tape) + 1
        async for message in self.bus.read(self.context.tape, [names.record(RUN, "*")], start):
            item = await read_item(self.context, message)
            if isinstance(item, Entry) and isinstance(item.body, wire.Record):
                yield item.body

    async def first(self) -> tuple[wire.Record, wire.Input]:
        """The next record that merges an honest learner's update, and that update."""
        async for record in self.records():
            taken = self.model(record)
            if taken is not None:
                return record, taken
        raise AssertionError("the tape has an end")

    def model(self, record: wire.Record) -> wire.Input | None:
        """An honest learner's update, to be forged after."""
        return next((taken for taken in record.inputs if taken.learner in HONEST), None)

    def read(self, taken: wire.Input) -> list[Encoded]:
        """Its parts."""
        return [
            shards.unpack(
                self.context.store.get(shard.name),
                codec=CODEC,
                count=slices.check(shard.slices, 1 << 40) * self.context.layout.block,
                block=self.context.layout.block,
            )
            for shard in taken.shards
        ]

    def manifest(self, record: wire.Record, taken: wire.Input) -> wire.Manifest:
        """An announcement as an honest learner would make it; its shards are not stored yet."""
        fragment = record.fragment
        seq = self.seqs[fragment] = self.seqs.get(fragment, 0) + 1
        prefix = names.shards_prefix(RUN, self.name, fragment, 0, self.incarnation, seq)
        entries = tuple(
            shard.model_copy(update={"name": f"{prefix}{index}"})
            for index, shard in enumerate(taken.shards)
        )
        return wire.Manifest(
            run=RUN, learner=self.name, epoch=0, incarnation=self.incarnation, seq=seq,
            fragment=fragment, base_version=record.version, base_digest=record.view_digest,
            layout=self.context.layout.digest, codec=CODEC, shards=entries,
            tokens=taken.tokens, steps=taken.steps, position=seq, local_step=seq, loss=taken.loss,
            step_time_s=STEP_S, encode_s=0.0, upload_s=0.0, attempt=0, final=False,
        )  # fmt: skip

    def store(self, manifest: wire.Manifest, parts: Sequence[Encoded]) -> wire.Manifest:
        """Store an update's parts; the manifest, with their checksums."""
        entries = []
        for shard, part in zip(manifest.shards, parts, strict=True):
            data = shards.pack(manifest.codec, part, self.context.layout.block)
            self.context.store.put(shard.name, data)
            entries.append(shard.model_copy(update={"crc32c": shards.crc32c(data)}))
        return manifest.model_copy(update={"shards": tuple(entries)})

    async def announce(self, manifest: wire.Manifest) -> None:
        """Publish it."""
        subject = names.update(RUN, self.name, manifest.fragment)
        await self.bus.publish(subject, wire.encode(manifest))


Act = Callable[[Liar], Awaitable[None]]


def forging(lie: Lie) -> Act:
    """Answers every version with an update that is forged after an honest one."""

    async def act(liar: Liar) -> None:
        async for record in liar.records():
            taken = liar.model(record)
            if taken is None:
                continue
            sent = liar.manifest(record, taken)
            parts = [Encoded(*map(np.asarray, part)) for part in liar.read(taken)]
            forged = [lie.forge(part, part) for part in parts]
            await liar.announce(lie.claims(liar.store(sent, forged)))

    return act


async def silent(liar: Liar) -> None:
    """Heartbeats and nothing else."""
    while True:
        beat = wire.Heartbeat(
            learner=liar.name, incarnation=liar.incarnation, local_step=1, global_step=1, tokens=1,
            loss=1.0, tokens_per_s=1.0, step_time_s=STEP_S, stall_s=0.0, run_s=1.0, bytes_up=0,
            bytes_down=0, updates_sent=0, state="training",
        )  # fmt: skip
        await liar.bus.publish(names.heartbeat(RUN, liar.name), wire.encode(beat))
        await asyncio.sleep(0.2)


def flooding(rate: float, size_bytes: int) -> Act:
    """A flood of manifests: how many a second, and of how many bytes."""

    async def act(liar: Liar) -> None:
        record, taken = await liar.first()
        sent = liar.manifest(record, taken)
        long = sent.model_copy(update={"shards": filling(size_bytes)}) if size_bytes else sent
        payload, began_s, count = wire.encode(long), time.monotonic(), 0
        while True:
            await liar.bus.publish(names.update(RUN, liar.name, record.fragment), payload)
            count += 1
            await asyncio.sleep(max(0.0, began_s + count / rate - time.monotonic()))

    return act


def spoiling(spoil: Callable[[Path], None]) -> Act:
    """Objects that are none, or none any more."""

    async def act(liar: Liar) -> None:
        root = DirectoryStore(Path(load_config(liar.config).store.url)).root
        async for record in liar.records():
            taken = liar.model(record)
            if taken is None:
                continue
            sent = liar.store(liar.manifest(record, taken), liar.read(taken))
            for shard in sent.shards:
                spoil(root / shard.name)
            await liar.announce(sent)

    return act


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _endless(path: Path) -> None:
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)


async def deleting(liar: Liar) -> None:
    """Deletes what of its own was merged."""
    root = DirectoryStore(Path(load_config(liar.config).store.url)).root
    async for record in liar.records():
        for taken in record.inputs:
            if taken.learner == liar.name:
                for shard in taken.shards:
                    (root / shard.name).unlink(missing_ok=True)
        if (honest := liar.model(record)) is not None:
            await liar.announce(liar.store(liar.manifest(record, honest), liar.read(honest)))


async def babbling(liar: Liar) -> None:
    """Sends a byte that is no message, wherever it may speak."""
    subjects = [names.update(RUN, liar.name, 0), names.join(RUN, liar.name)]
    subjects += [names.leave(RUN, liar.name), names.heartbeat(RUN, liar.name)]
    while True:
        for subject in subjects:
            await liar.bus.publish(subject, b"\xc1")
        await asyncio.sleep(0.5)


async def foreseeing(liar: Liar) -> None:
    """Stores empty objects of a life that is far beyond the tape's end."""
    for seq in range(1, 100):
        prefix = names.shards_prefix(RUN, liar.name, 0, 0, 10**15, seq)
        liar.context.store.put(f"{prefix}0", b"")
        await asyncio.sleep(0.2)


POISONED = "true claims, turned and ten times as long"
FORGED = {
    "none: an honest fourth": Lie(),
    "60,000 steps of 2^32 tokens": Lie(steps=math.inf, tokens=math.inf),
    "tiny step time": Lie(step_time=1e-9),
    "huge step time": Lie(step_time=math.inf),
    "one step and one token": Lie(steps=0.0, tokens=0.0),
    "tiny updates": Lie(step_time=1e-9, length=2.0**-40),
    "zeros with the greatest claims": Lie(steps=math.inf, tokens=math.inf, direction="zero"),
}
ACTS: dict[str, Act] = {
    **{name: forging(lie) for name, lie in FORGED.items()},
    "heartbeats and nothing else": silent,
    "objects that are links to /dev/zero": spoiling(_link),
    "objects of a terabyte": spoiling(_endless),
    "deletes what was merged": deleting,
    "a byte that is no message": babbling,
    "empty objects of a life to come": foreseeing,
    # What these leave behind, a spoilt model or a long tape, is to meet few after them.
    POISONED: forging(Lie(direction="turned", length=10.0)),
    "1,000 manifests a second": flooding(1000.0, 0),
    "40 manifests a second of 1 MB": flooding(40.0, 1_000_000),
}


# --- Beside the honest

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
        # When status first said something of a learner, but that it is silent, and what.
        self.named: dict[str, tuple[float, str]] = {}

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

    async def watch(self, opened: OpenRun) -> None:
        """Note whom status names, for ever."""
        watch = Watch(opened.context)
        await watch.begin(1)
        following = asyncio.ensure_future(watch.follow(store=True))
        try:
            while True:
                for one in (await watch.now()).findings:
                    said = one.severity in ("warning", "error")
                    if said and not one.sentence.startswith("silent"):
                        name = one.about.removeprefix("learner ")
                        self.named.setdefault(name, (time.time(), one.sentence))
                await asyncio.sleep(SAMPLE_S)
        finally:
            following.cancel()

    async def why(self, liar: str) -> tuple[str, tuple[str, ...]]:
        """Returns the findings of `diloco why` on the liar, and the honest learners it names."""
        command = [sys.executable, "-m", "diloco", "why", str(self._file("operator")), "--json"]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        told, _ = await process.communicate()
        amiss = [
            one for one in json.loads(told)["findings"] if one["severity"] in ("warning", "error")
        ]
        said = [one["sentence"] for one in amiss if one["about"] == f"learner {liar}"]
        honest = {f"learner {name}": name for name in HONEST}
        accused = [
            f"{honest[one['about']]}: {one['sentence']}" for one in amiss if one["about"] in honest
        ]
        now = [name for name in HONEST if name in self.named]
        accused += [f"{name}, once: {self.named.pop(name)[1]}" for name in now]
        return "; ".join(said), tuple(accused)

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
    `rate` and `alone_loss` are the other's: versions a second, and held-out. `said` is what
    `diloco why` says of the liar, `accused` what it says of honest ones, and
    `named_after_s` the seconds after which status named the liar; `why_s` those that `diloco why`
    took.
    """

    name: str
    loss: float
    versions: tuple[float, ...]
    merged: tuple[float, ...]
    cores: tuple[float, float, float, float]
    rate: float
    alone_loss: float
    wrong: str
    said: str = ""
    accused: tuple[str, ...] = ()
    named_after_s: float = math.nan
    why_s: float = math.nan


def play(folder: Path, attacks: Sequence[str], span_s: float, trust: str) -> list[SpanOutcome]:
    """Two runs from beginning to end.

    Raises:
        TimeoutError: one of them does not begin, or does not end.
    """
    document = settings(trust, steps=int(3 * (len(attacks) * (span_s + GAP_S) + 60) / STEP_S))
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
        working.append(asyncio.ensure_future(lied.watch(opened[1])))
        stack.callback(lambda: [task.cancel() for task in working])
        await asyncio.gather(alone.begun.wait(), lied.begun.wait())
        before = await losses()
        async for span in _spans(lied.lie_command(attacks, span_s)):
            # The version after the span tells how far the last one within it had come.
            await asyncio.sleep(GAP_S / 2)
            after = await losses()
            loss = after[1] / after[0] / (before[1] / before[0]) - 1
            before = after
            outcome = _outcome(span, alone, lied, loss, after[0])
            named_s, _ = lied.named.get(liar_name(len(found)), (math.nan, ""))
            began_s = time.monotonic()
            said, accused = await lied.why(liar_name(len(found)))
            took_s = time.monotonic() - began_s
            outcome = outcome._replace(said=said, accused=accused, why_s=took_s)
            found.append(outcome._replace(named_after_s=named_s - span.began_s))
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


def rows(attacks: Sequence[str], span_s: float, trusts: Sequence[str]) -> Iterator[str]:
    """The table, line by line."""
    found = {}
    for trust in trusts:
        with tempfile.TemporaryDirectory(prefix="bench-live-") as folder:
            found[trust] = play(Path(folder), attacks, span_s, trust)
    cells = (
        "versions a second, % | honest updates, % | loss, % | cores: with, without, machine; load"
        " | named after, s | `diloco why`: s; of the liar; **of the honest**"
    )
    yield f"| the liar beside three | {' | '.join(f'{trust}: {cells}' for trust in trusts)} |"
    yield f"|{' --- |' * (1 + 6 * len(trusts))}"
    for made in zip(*found.values(), strict=True):
        yield f"| {made[0].name or 'nobody'} | {' | '.join(map(_cells, made))} |"
    every = [one for made in found.values() for one in made]
    rate, loss = fmean(one.rate for one in every), fmean(one.alone_loss for one in every)
    yield f"\nWithout a liar: {rate:.2f} versions a second, held-out loss {loss:.4f}"


def _cells(one: SpanOutcome) -> str:
    lied, alone, machine, load = one.cores
    used = f"{lied:.2f}, {alone:.2f}, {machine:.1f}; {load:.0f}"
    rates = " | ".join(map(_percent, (one.versions, one.merged)))
    wrong = f" ({one.wrong})" if one.wrong else ""
    accused = f" **{'; '.join(one.accused)}**" if one.accused else ""
    named = f"{one.named_after_s:.0f}" if math.isfinite(one.named_after_s) else "-"
    told = f"{named} | {one.why_s:.0f}: {one.said or '-'}{accused}"
    return f"{rates} | {100 * one.loss:+.1f} | {used}{wrong} | {told}"


def settings(trust: str, steps: int) -> dict[str, Any]:
    """Settings of a run, but for its bus and store."""
    return {
        "run": {"name": RUN, "steps": steps, "seed": 0, "trust": trust},
        "task": {"build": "bench.attack_live:build"},
        "sync": {"fragments": 2, "interval_steps": 12, "codec": CODEC, "block": 16},
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
            # Who says nothing of itself is named for that alone.
            acts = [ACTS[attack](liar), silent(liar)] if attack else []
            await asyncio.gather(asyncio.sleep(2 * span_s), *acts)
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
    parser.add_argument("--trust", default="own,others", help="of run.trust")
    parser.add_argument("--beside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--attacks", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    log.configure("error")
    if options.beside:
        asyncio.run(lie(options.beside, options.attacks, options.span))
        return
    attacks = [name for name in ("", *ACTS) if not name or options.only in name]
    for line in rows(attacks, options.span, options.trust.split(",")):
        print(line, flush=True)


if __name__ == "__main__":
    main()
