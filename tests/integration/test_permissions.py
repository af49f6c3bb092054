"""Credentials and permissions on a real nats-server, with the configuration of `diloco auth`."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import ssl
import stat
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nats
import numpy as np
import pytest
import structlog
from harness import ENDLESS, PATIENCE_S, World, open_world

import diloco
from diloco.aggregator.compare_and_swap import swap
from diloco.aggregator.context import Context
from diloco.common.process.config import BusSection, RunSettings
from diloco.common.process.credentials import SHARED_API, consumer_names, load_credentials
from diloco.common.process.nats_server import NatsServer, free_port
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    BusError,
    BusUnavailableError,
    ConfigError,
    Exit,
    SubjectUntakenError,
    SwapLostError,
)
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.common.storage.bus import StreamLimits
from diloco.common.storage.bus.jetstream import NatsBus, connect, pull_consumer
from diloco.common.storage.store import MemoryStore
from diloco.common.storage.tape import RunContext, publish_once
from diloco.judge.doctor import examine
from diloco.operate.auth import guard
from diloco.operate.auth import nats_config_and_credentials as auth
from diloco.operate.make_streams import make_streams

Run = Callable[[Coroutine[Any, Any, None]], None]
RUN = "fenced"
TAPE, OPS, LEASES = names.tape_stream(RUN), names.ops_stream(RUN), names.leases_stream(RUN)


@dataclass
class Guarded:
    """A server that knows the operator, learners a and b, and an aggregator, of run 'fenced'."""

    folder: Path
    server: NatsServer
    monitor_port: int

    def ways_back(self) -> int:
        """To how many askers the server still keeps a way, in the run's account."""
        url = f"http://127.0.0.1:{self.monitor_port}/accountz?acc=diloco-{RUN}"
        with urllib.request.urlopen(url, timeout=300) as answer:
            return len(json.load(answer)["account_detail"].get("responses") or {})

    @property
    def url(self) -> str:
        return f"tls://127.0.0.1:{self.server.port}"

    @property
    def tls_ca(self) -> str:
        return str(self.folder / "tls" / "ca.pem")

    def credentials(self, name: str) -> str:
        return str(self.folder / "credentials" / f"{name}.toml")

    def section(self, name: str) -> dict[str, Any]:
        """Keys of `bus` for one party."""
        return {"url": self.url, "credentials": self.credentials(name), "tls_ca": self.tls_ca}

    def reload(self) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGHUP)

    @contextlib.asynccontextmanager
    async def enter(self, name: str) -> AsyncIterator[NatsBus]:
        bus = await connect(
            self.url, name=name, credentials=self.credentials(name), tls_ca=self.tls_ca
        )
        try:
            yield bus
        finally:
            await bus.close()

    async def raw(self, name: str) -> nats.NATS:
        """A client that asks for what it likes."""
        own = load_credentials(Path(self.credentials(name)))
        assert own is not None

        async def ignore(_error: Exception) -> None:
            """Denials are looked for in what the streams hold."""

        return await nats.connect(
            self.url,
            nkeys_seed_str=own.seed,
            inbox_prefix=own.inbox_prefix,
            tls=ssl.create_default_context(cafile=self.tls_ca),
            error_cb=ignore,
        )


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    folder = tmp_path / "auth"
    auth.init(folder, RUN, ["127.0.0.1"])
    for learner in ("a", "b"):
        auth.add(folder, learner, "learner")
    auth.add(folder, "agg", "aggregator")
    port = free_port()
    config = f"""
        http: "127.0.0.1:{port}"
        tls {{ cert_file: "{folder}/tls/nats-1.pem", key_file: "{folder}/tls/nats-1.key" }}
        accounts {{ include "../accounts.conf" }}
    """
    with NatsServer(folder / "server", extra_config=config) as server:
        yield Guarded(folder, server, port)


@pytest.fixture
def world(guarded: Guarded, tmp_path: Path) -> Iterator[World]:
    bus = guarded.section("operator")
    with open_world(RUN, tmp_path / "run", guarded.url, run=ENDLESS, bus=bus) as made:
        yield made


def test_a_run_with_credentials_over_tls_loses_a_revoked_learner_and_nothing_else(
    world: World, guarded: Guarded
) -> None:
    files = {
        name: str(world.variant(name, {"bus": guarded.section(name)})) for name in ("agg", "a", "b")
    }
    aggregator = world.start("agg", "aggregator", "--config", files["agg"])
    kept = world.start("a", "learner", "--config", files["a"], "--learner", "a")
    # One after the other, since the cache of compiled programs can be read half written.
    world.until(lambda: world.steps("a") > 0, "training of a")
    gone = world.start("b", "learner", "--config", files["b"], "--learner", "b")

    def contributed(learner: str) -> bool:
        async def of_learner(bus: NatsBus) -> bool:
            last = await bus.last(TAPE, names.record(RUN, 0))
            assert last is not None
            record = wire.decode(wire.Record, last.payload)
            return any(mark.learner == learner and mark.seq > 0 for mark in record.policy.marks)

        return world.ask(of_learner)

    for learner in ("a", "b"):
        world.until(lambda learner=learner: contributed(learner), f"an update of {learner}")
    auth.revoke(guarded.folder, "b")
    guarded.reload()
    assert gone.wait() == Exit.SHUT_OUT
    assert "refused 'b'" in gone.log() or "no credentials file" in gone.log()
    world.processes.remove(gone)
    steps = world.steps("a")
    world.until(lambda: world.steps("a") > steps + 20, "training goes on")
    world.stop()
    assert kept.wait() == 0
    assert aggregator.wait() == 0
    for process in (kept, aggregator):
        process.check_clean_log()
        assert not process.events("bus_lost")
        assert "not permitted" not in process.log()
    assert world.ask(lambda bus: bus.last(TAPE, names.end(RUN))) is not None


def test_who_floods_the_tape_is_cut_off_and_nobody_else(world: World, guarded: Guarded) -> None:
    reload = f"kill -HUP {guarded.server.pid}"
    guard = world.start(
        "guard", "host", "guard", str(guarded.folder), str(world.config_path), "--max-rate", "20",
        "--reload", reload,
    )  # fmt: skip
    world.until(lambda: guard.events("guarding"), "the guard")

    async def flood() -> None:
        async with guarded.enter("b") as bus:
            while True:
                await bus.publish(names.update(RUN, "b", 0), b"flood")

    async def slowly() -> None:
        async with guarded.enter("a") as honest:
            for _ in range(20):
                await honest.publish(names.leave(RUN, "a"), b"slow")

    # A server that reloads may take the way to the stream before it takes the connection.
    with pytest.raises(BusError, match=r"lost|refused|closed|no responders"):
        asyncio.run(asyncio.wait_for(flood(), PATIENCE_S))
    world.until(lambda: guard.events("revoked"), "its word")
    assert [event["learner"] for event in guard.events("revoked")] == ["b"]
    assert not guard.events("reload_failed")
    asyncio.run(asyncio.wait_for(slowly(), PATIENCE_S))
    assert "b" not in {one.name for one in auth.identities(guarded.folder)}
    guard.terminate()


@pytest.mark.parametrize("what", ["consumers", "requests"])
def test_who_floods_the_server_is_cut_off_and_nobody_else(
    world: World, guarded: Guarded, what: str
) -> None:
    monitor = f"http://127.0.0.1:{guarded.monitor_port}" if what == "requests" else "http://[::1]:9"
    guard = world.start(
        "guard", "host", "guard", str(guarded.folder), str(world.config_path), "--max-rate", "20",
        "--reload", f"kill -HUP {guarded.server.pid}", "--monitor", monitor,
    )  # fmt: skip
    world.until(lambda: guard.events("guarding"), "the guard")

    async def flood() -> None:
        async with guarded.enter("b") as bus, guarded.enter("a") as honest:
            while True:
                for _ in range(100):
                    if what == "consumers":
                        await anext(bus.read(TAPE, [names.spec(RUN)], 1))
                    else:
                        # Revoked in the midst of a request it hears nobody, and is refused next.
                        with contextlib.suppress(SubjectUntakenError):
                            await bus.last(TAPE, names.spec(RUN))
                assert await honest.last(TAPE, names.end(RUN)) is None

    with pytest.raises(BusError, match=r"lost|refused|closed|no credentials file"):
        asyncio.run(asyncio.wait_for(flood(), PATIENCE_S))
    world.until(lambda: guard.events("revoked"), "its word")
    assert [event["learner"] for event in guard.events("revoked")] == ["b"]
    assert bool(guard.events("unwatched")) == (what == "consumers")
    guard.terminate()


async def make_run(guarded: Guarded) -> None:
    """The streams of a run, with something on each subject that a learner has no business with."""
    async with guarded.enter("operator") as bus:
        await make_streams(bus, RUN, BusSection())
        for subject in (names.spec(RUN), names.record(RUN, 0), names.update(RUN, "b", 0)):
            await bus.publish(subject, b"real")


def test_an_acknowledgement_of_what_another_stored_is_not_believed(
    guarded: Guarded, run_async: Run
) -> None:
    """Under the credentials of daemons: with ids that can be predicted, and a learner who does."""
    settings = RunSettings.model_validate({"run": {"name": RUN, "steps": 1}})
    tensor = Tensor(name="w", shape=(16,), dtype="float32")
    layout = make_layout([tensor], fragments=1, block=16)
    ids = (f"{number}" for number in itertools.count())

    async def scenario() -> None:
        await make_run(guarded)
        async with guarded.enter("a") as a, guarded.enter("b") as b, guarded.enter("agg") as agg:
            shared = {
                "settings": settings, "layout": layout, "epoch": 0,
                "store": MemoryStore(), "runtime": Runtime(new_id=lambda: next(ids)),
                "logger": structlog.get_logger(),
            }  # fmt: skip
            for number in (0, 1, 3):
                await b.publish(names.update(RUN, "b", 0), b"garbage", msg_id=f"{number}")
            subject = names.update(RUN, "a", 0)
            seq = await publish_once(
                RunContext(bus=a, **shared),
                "announcing",
                lambda msg_id: a.publish(subject, b"mine", msg_id=msg_id),
            )
            last = await a.last(TAPE, subject)
            assert last is not None
            assert (last.seq, last.payload, last.msg_id) == (seq, b"mine", "2")
            # The same once more, after an answer that was lost: it stands, as it stood.
            assert await a.publish(subject, b"mine", msg_id="2") == seq
            aggregator = Context(name="agg", bus=agg, **shared)
            record, before = names.record(RUN, 0), await agg.last(TAPE, names.record(RUN, 0))
            assert before is not None
            with pytest.raises(SwapLostError):
                await swap(aggregator, record, b"next", next(ids), before.seq)
            seq = await swap(aggregator, record, b"next", next(ids), before.seq)
            last = await agg.last(TAPE, record)
            assert last is not None
            assert (last.seq, last.payload) == (seq, b"next")

    run_async(scenario())


async def first(messages: AsyncIterator[Any]) -> object:
    async for message in messages:
        return message
    return None


async def published(bus: NatsBus, subject: str) -> None:
    """Publish, whenever the server is ready for it."""
    for _ in range(100):
        with contextlib.suppress(BusUnavailableError):
            await bus.publish(subject, b"hello")
            return
        await asyncio.sleep(0.2)
    raise AssertionError(f"nobody takes {subject}")


FORBIDDEN: list[tuple[str, Callable[[NatsBus], Awaitable[object]], str]] = [
    *(
        (what, lambda bus, subject=subject: bus.publish(subject, b"forged"), subject)
        for what, subject in (
            ("update of another", names.update(RUN, "b", 0)),
            ("join as another", names.join(RUN, "b")),
            ("leave as another", names.leave(RUN, "b")),
            ("heartbeat of another", names.heartbeat(RUN, "b")),
            ("a version", names.record(RUN, 0)),
            ("settings", names.settings(RUN)),
            ("checkpoint", names.checkpoint(RUN)),
            ("stop", names.stop(RUN)),
            ("end", names.end(RUN)),
            ("specification", names.spec(RUN)),
            ("a rejection", names.rejected(RUN, "a")),
            ("a lease", names.fragment_lease(RUN, 0)),
            ("another run", names.update("other", "a", 0)),
        )
    ),
    (
        "delete the stream",
        lambda bus: bus._connection.call(
            f"{SHARED_API}.STREAM.DELETE.{TAPE}", lambda js: js.delete_stream(TAPE)
        ),
        f"{SHARED_API}.STREAM.DELETE.{TAPE}",
    ),
    (
        "purge the stream",
        lambda bus: bus._connection.call(
            f"{SHARED_API}.STREAM.PURGE.{TAPE}", lambda js: js.purge_stream(TAPE)
        ),
        f"{SHARED_API}.STREAM.PURGE.{TAPE}",
    ),
    (
        "create a stream",
        lambda bus: bus.create_stream("mine", ["mine.>"], StreamLimits()),
        f"{SHARED_API}.STREAM.CREATE.mine",
    ),
    (
        "read another's updates",
        lambda bus: first(bus.read(TAPE, [names.update(RUN, "b", "*")], 1)),
        names.update(RUN, "b", "*"),
    ),
    (
        "read several subjects in one order",
        lambda bus: first(bus.read(TAPE, [names.record(RUN, "*"), names.stop(RUN)], 1)),
        f"{SHARED_API}.CONSUMER.CREATE.{TAPE}",
    ),
    (
        "read the whole tape",
        lambda bus: first(bus.read(TAPE, [f"diloco.{RUN}.>"], 1)),
        f"diloco.{RUN}.>",
    ),
    (
        "read the leases",
        lambda bus: first(bus.read(LEASES, names.leases_subjects(RUN), 1)),
        LEASES,
    ),
    (
        "the last update of another",
        lambda bus: bus.last(TAPE, names.update(RUN, "b", 0)),
        names.update(RUN, "b", 0),
    ),
]


def test_a_learner_may_do_nothing_else_and_is_told_what_and_who(
    guarded: Guarded, run_async: Run
) -> None:
    async def scenario() -> None:
        await make_run(guarded)
        async with guarded.enter("a") as bus, guarded.enter("operator") as operator:
            before = [await operator.last_sequence(stream) for stream in (TAPE, OPS, LEASES)]
            found = await asyncio.gather(
                *(act(bus) for _, act, _ in FORBIDDEN), return_exceptions=True
            )
            for (what, _, subject), error in zip(FORBIDDEN, found, strict=True):
                assert isinstance(error, BusError), (what, error)
                assert not error.retry, (what, error)
                assert "not permitted" in error.message, (what, error)
                assert subject in error.message, (what, error)
                assert "'a'" in error.message, (what, error)
            after = [await operator.last_sequence(stream) for stream in (TAPE, OPS, LEASES)]
            assert after == before
            # What it may do goes on, on the same connection.
            assert await bus.publish(names.update(RUN, "a", 0), b"mine") == before[0] + 1
            assert await bus.publish(names.heartbeat(RUN, "a"), b"mine") == before[1] + 1
            record = await bus.last(TAPE, names.record(RUN, 0))
            assert record is not None
            assert record.payload == b"real"
            read = await first(bus.read(TAPE, [names.record(RUN, "*")], 1))
            assert read.payload == b"real"  # type: ignore[attr-defined]

    run_async(scenario())


def test_a_learner_of_some_modules_sends_updates_of_their_fragments_alone(
    guarded: Guarded, run_async: Run
) -> None:
    async def scenario() -> None:
        await make_run(guarded)
        auth.add(guarded.folder, "half", "learner", fragments=(1, 3))
        for _ in range(2):
            guarded.reload()
            await asyncio.sleep(1)
        async with guarded.enter("half") as bus, guarded.enter("operator") as operator:
            for fragment in (1, 3):
                assert await bus.publish(names.update(RUN, "half", fragment), b"mine")
            before = await operator.last_sequence(TAPE)
            for fragment in (0, 2, 13):
                with pytest.raises(BusError, match="not permitted"):
                    await bus.publish(names.update(RUN, "half", fragment), b"another's")
            assert await operator.last_sequence(TAPE) == before
            # It reads its own updates, as each learner does, after a restart.
            read = await first(bus.read(TAPE, [names.update(RUN, "half", "*")], 1))
            assert read.payload == b"mine"  # type: ignore[attr-defined]

    run_async(scenario())


def test_an_aggregator_may_not_speak_for_learners_or_the_operator(
    guarded: Guarded, run_async: Run
) -> None:
    forbidden = [
        names.update(RUN, "a", 0),
        names.heartbeat(RUN, "a"),
        names.settings(RUN),
        names.spec(RUN),
        names.record("other", 0),
    ]

    async def scenario() -> None:
        await make_run(guarded)
        async with guarded.enter("agg") as bus:
            acts = [bus.publish(subject, b"forged") for subject in forbidden]
            deleted = f"{SHARED_API}.STREAM.DELETE.{TAPE}"
            acts.append(bus._connection.call(deleted, lambda js: js.delete_stream(TAPE)))
            found = await asyncio.gather(*acts, return_exceptions=True)
            for subject, error in zip([*forbidden, deleted], found, strict=True):
                assert isinstance(error, BusError), subject
                assert f"not permitted on '{subject}' as 'agg'" in error.message

    run_async(scenario())


def test_a_reader_reads_everything_and_publishes_nothing(guarded: Guarded, run_async: Run) -> None:
    subjects = [
        names.spec(RUN), names.record(RUN, 0), names.update(RUN, "a", 0), names.join(RUN, "a"),
        names.claim(RUN, "a"), names.heartbeat(RUN, "a"), names.settings(RUN), names.stop(RUN),
        names.end(RUN), names.checkpoint(RUN), names.quarantine(RUN, "a"), names.rejected(RUN, "a"),
        names.fragment_lease(RUN, 0), names.round_open(RUN, 0),
    ]  # fmt: skip

    async def scenario() -> None:
        auth.add(guarded.folder, "screen", "reader")
        for _ in range(2):
            guarded.reload()
            await asyncio.sleep(1.0)
        await make_run(guarded)
        async with guarded.enter("operator") as operator:
            await operator.publish(names.heartbeat(RUN, "a"), b"beat")
            before = [await operator.last_sequence(stream) for stream in (TAPE, OPS, LEASES)]
            async with guarded.enter("screen") as bus:
                refused = [bus.publish(subject, b"forged") for subject in subjects]
                refused += [
                    bus._connection.call(
                        f"{SHARED_API}.STREAM.{act}.{TAPE}",
                        lambda js, act=act: getattr(js, f"{act.lower()}_stream")(TAPE),
                    )
                    for act in ("DELETE", "PURGE")
                ]
                # Each waits for an answer that never comes: all of them at once.
                for answer in await asyncio.gather(*refused, return_exceptions=True):
                    assert isinstance(answer, BusError)
                    assert "not permitted" in str(answer)
                assert (await anext(bus.read(TAPE, [f"diloco.{RUN}.>"], 1))).payload == b"real"
                beats = bus.read(OPS, names.ops_subjects(RUN), 1)
                assert (await anext(beats)).payload == b"beat"
                assert await bus.last(TAPE, names.update(RUN, "b", 0)) is not None
                assert await bus.last(LEASES, names.fragment_lease(RUN, 0)) is None
                assert (await bus.filled(TAPE)).size_bytes > 0
            after = [await operator.last_sequence(stream) for stream in (TAPE, OPS, LEASES)]
            assert after == before

    run_async(scenario())


def test_a_reader_examines_a_run_and_writes_nothing(
    guarded: Guarded, world: World, run_async: Run
) -> None:
    """As the watch does, whose findings are alerts: what it may not do is none."""
    auth.add(guarded.folder, "screen", "reader")
    world.create()

    async def last() -> list[int]:
        async with guarded.enter("operator") as operator:
            return [await operator.last_sequence(stream) for stream in (TAPE, OPS)]

    async def scenario() -> None:
        for _ in range(2):
            guarded.reload()
            await asyncio.sleep(1.0)
        path = world.variant("screen", {"bus": guarded.section("screen")})
        before = await last(), [*world.store.rglob("*")]
        report = await examine(str(path))
        assert not [one for one in report.findings if one.severity in ("warning", "error")]
        assert "the file matches the run" in [one.sentence for one in report.findings]
        assert (await last(), [*world.store.rglob("*")]) == before

    run_async(scenario())


async def make_durable(
    client: nats.NATS, stream: str, subject: str, name: str, **config: Any
) -> dict[str, Any]:
    """The server's answer to a learner's request for a consumer that outlives its connection."""
    wanted = {"durable_name": name, "filter_subject": subject, "ack_policy": "none", **config}
    answer = await client.request(
        f"{SHARED_API}.CONSUMER.CREATE.{stream}.{name}.{subject}",
        json.dumps({"stream_name": stream, "config": wanted}).encode(),
        timeout=300,
    )
    told: dict[str, Any] = json.loads(answer.data)
    return told


def test_no_consumer_outlives_its_use_by_long(guarded: Guarded, run_async: Run) -> None:
    """Consumers of a revoked learner would cost the server memory for years."""

    async def scenario() -> None:
        await make_run(guarded)
        client, own = await guarded.raw("a"), names.update(RUN, "a", "*")
        for stream, subject in ((TAPE, own), (OPS, names.rejected(RUN, "a"))):
            name = consumer_names("learner", "a", (subject,))[0]
            for asked_s in (30, 1, None, 3 << 30):
                idle = {} if asked_s is None else {"inactive_threshold": asked_s * 10**9}
                told = await make_durable(client, stream, subject, name, **idle)
                if asked_s == 3 << 30:
                    assert "inactive threshold" in told["error"]["description"]
                else:
                    assert told["config"]["inactive_threshold"] == (asked_s or 30) * 10**9
        await client.close()

    run_async(scenario())


async def consumers_of(operator: NatsBus, name: str) -> list[str]:
    """Names of the consumers that streams hold for a learner."""
    return [
        consumer.name
        for stream in (TAPE, OPS, LEASES)
        for consumer in await operator._connection.call(
            f"$JS.API.CONSUMER.LIST.{stream}", lambda js, stream=stream: js.consumers_info(stream)
        )
        if f"_{name}_" in consumer.name
    ]


def test_a_learner_makes_the_consumers_of_its_names_alone_and_leaves_none_when_revoked(
    guarded: Guarded, run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "AGAIN_S", 0.2)
    own = names.update(RUN, "a", "*")
    lanes = consumer_names("learner", "a", (own,))
    huge = {"metadata": {"k": "x" * 100_000}}

    async def scenario() -> None:
        await make_run(guarded)
        client = await guarded.raw("a")
        # No answer comes to what is not permitted.
        for number in range(1500):
            config = {"durable_name": f"d{number}", "filter_subject": own, "ack_policy": "none"}
            await client.publish(
                f"{SHARED_API}.CONSUMER.CREATE.{TAPE}.d{number}.{own}",
                json.dumps({"stream_name": TAPE, "config": {**config, **huge}}).encode(),
            )
        for lane in lanes:
            told = await make_durable(client, TAPE, own, lane, **huge)
            assert told["name"] == lane
        async with guarded.enter("operator") as operator, guarded.enter("b") as other:
            reading = other.read(TAPE, [names.record(RUN, "*")], 1)
            assert (await anext(reading)).payload == b"real"
            made = await operator.filled(TAPE)
            assert made.readers == len(lanes) + 1
            assert sorted(await consumers_of(operator, "a")) == sorted(lanes)
            context = RunContext(
                settings=RunSettings.model_validate({"run": {"name": RUN, "steps": 1}}),
                layout=make_layout(
                    [Tensor(name="w", shape=(16,), dtype="float32")], fragments=1, block=16
                ),
                epoch=0, bus=operator, store=MemoryStore(), runtime=Runtime(),
                logger=structlog.get_logger(),
            )  # fmt: skip
            reload = ["kill", "-HUP", str(guarded.server.pid)]
            assert await guard.cut_off(context, guarded.folder, "a", reload) == ""
            assert await consumers_of(operator, "a") == []
            assert await guard.cut_off(context, guarded.folder, "a", reload) is None
            await operator.publish(names.record(RUN, 0), b"next")
            assert (await anext(reading)).payload == b"next"
            assert not client.is_connected
        await client.close()

    run_async(scenario())


def test_a_learner_reads_on_after_an_earlier_life_that_left_its_consumers(
    guarded: Guarded, run_async: Run
) -> None:
    records = names.record(RUN, "*")

    async def scenario() -> None:
        await make_run(guarded)
        client = await guarded.raw("a")
        for name in consumer_names("learner", "a", (records,)):
            assert "error" not in await make_durable(client, TAPE, records, name)
        await client.close()
        async with guarded.enter("a") as bus:
            reading = [bus.read(TAPE, [records], 1) for _ in range(2)]
            for one in reading:
                assert (await anext(one)).payload == b"real"
            # A third waits until one of the others is done.
            third = asyncio.ensure_future(anext(bus.read(TAPE, [records], 1)))
            await asyncio.sleep(0.5)
            assert not third.done()
            await reading[0].aclose()  # type: ignore[attr-defined]
            assert (await third).payload == b"real"

    run_async(scenario())


def test_processes_with_one_readers_credentials_read_beside_each_other(
    guarded: Guarded, run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_consumer, "_OTHERS_S", 0.0)
    spec, processes = names.spec(RUN), 6
    most = len(consumer_names("reader", "screen", (), processes))

    async def scenario() -> None:
        auth.add(guarded.folder, "screen", "reader", processes)
        for _ in range(2):
            guarded.reload()
            await asyncio.sleep(1.0)
        await make_run(guarded)
        async with contextlib.AsyncExitStack() as stack:
            own = [
                await stack.enter_async_context(guarded.enter("screen")) for _ in range(processes)
            ]
            with pytest.raises(BusUnavailableError, match="as many connections") as told:
                await stack.enter_async_context(guarded.enter("screen"))
            assert "--processes" in (told.value.hint or "")
            reading = [
                bus.read(TAPE, [spec], 1) for bus in itertools.islice(itertools.cycle(own), most)
            ]
            for one in reading:
                assert (await anext(one)).payload == b"real"
            with pytest.raises(BusError, match=r"reader 'screen', which are for 6 proc") as told:
                await anext(own[1].read(TAPE, [spec], 1))
            assert "add-reader" in (told.value.hint or "")
            for one in reading:
                await one.aclose()  # type: ignore[attr-defined]

    run_async(scenario())


@pytest.mark.long
def test_a_hundred_followers_with_one_readers_credentials_have_every_version(
    world: World, guarded: Guarded, run_async: Run
) -> None:
    # The learner makes no pause: on a busy machine one process cannot read a hundred times all that
    # it sends.
    files = {n: str(world.variant(n, {"bus": guarded.section(n)})) for n in ("agg", "a")}
    auth.add(guarded.folder, "site", "reader", 100)
    site = world.variant("site", {"bus": guarded.section("site")})
    seen: list[dict[int, dict[int, str]]] = [{} for _ in range(100)]

    async def follow(own: dict[int, dict[int, str]]) -> None:
        digests: dict[int, str] = {}
        async with diloco.follow(site) as model:
            async for change in model:
                digests |= {part.fragment: part.digest for part in change.fragments}
                own[change.version] = dict(digests)

    async def scenario() -> None:
        for _ in range(2):
            guarded.reload()
            await asyncio.sleep(1.0)
        following: list[asyncio.Task[None]] = []

        async def reached(versions: int) -> None:
            while min(map(len, seen[: len(following)])) < versions:
                assert [one.result() for one in following if one.done()] == []
                await asyncio.sleep(0.1)

        # One process makes a hundred handshakes of TLS: all at once, a busy machine has no time for
        # any of them.
        while len(following) < len(seen):
            following += [asyncio.create_task(follow(own)) for own in seen[len(following) :][:10]]
            await reached(1)
        await reached(4)
        await asyncio.to_thread(world.stop)
        await asyncio.gather(*following)

    world.start("agg", "aggregator", "--config", files["agg"])
    world.start("a", "learner", "--config", files["a"], "--learner", "a")
    run_async(scenario())
    known = {version: digests for own in seen for version, digests in own.items()}
    for own in seen:
        assert own == {version: known[version] for version in own}
        assert max(own) == max(known)


def test_no_answer_is_stored_where_a_learner_asks_for_it(guarded: Guarded, run_async: Run) -> None:
    """The server would send acknowledgements and what it reads to any subject a request names."""
    own, of_all = names.update(RUN, "a", 0), names.update(RUN, "a", "*")
    pull, push = consumer_names("learner", "a", (of_all,))
    wanted = [
        names.record(RUN, 0),
        names.end(RUN),
        names.update(RUN, "b", 0),
        names.heartbeat(RUN, "b"),
        names.fragment_lease(RUN, 0),
        f"$JS.API.STREAM.PURGE.{TAPE}",
    ]
    api = f"{SHARED_API}.CONSUMER"

    async def scenario() -> None:
        await make_run(guarded)
        client = await guarded.raw("a")
        async with guarded.enter("operator") as operator:
            before = [await operator.last_sequence(stream) for stream in (TAPE, OPS, LEASES)]
            assert "error" not in await make_durable(client, TAPE, of_all, pull)
            for subject in wanted:
                await client.publish(own, b'{"keep": 0}', reply=subject)
                await client.publish(f"{SHARED_API}.DIRECT.GET.{TAPE}.{own}", b"", reply=subject)
                await client.publish(f"{api}.MSG.NEXT.{TAPE}.{pull}", b'{"batch":1}', reply=subject)
                await make_durable(client, TAPE, of_all, push, deliver_subject=subject)
            await client.flush()
            await asyncio.sleep(1.0)
            after = [await operator.last_sequence(stream) for stream in (TAPE, OPS, LEASES)]
            assert after == [before[0] + len(wanted), *before[1:]]
            for subject in wanted[:3]:
                last = await operator.last(TAPE, subject)
                assert last is None or last.payload == b"real"
        await client.close()

    run_async(scenario())


def test_the_server_keeps_nothing_of_what_was_answered(
    guarded: Guarded, run_async: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_consumer, "_PULL_EXPIRES_S", 0.3)
    monkeypatch.setattr(pull_consumer, "_HEARTBEAT_S", 0.1)

    async def scenario() -> None:
        await make_run(guarded)
        async with guarded.enter("a") as bus, guarded.enter("operator") as operator:
            reader = bus.read(TAPE, [names.record(RUN, "*")], 1)
            for _ in range(30):
                message = await anext(reader)
                await operator.publish(message.subject, b"next")
                await bus.publish(names.update(RUN, "a", 0), b"mine")
                assert await bus.last(TAPE, names.spec(RUN)) is not None
                await asyncio.sleep(0.1)
            # One for the pull that waits, and one that may just have ended.
            assert guarded.ways_back() <= 2

    run_async(scenario())


def test_revoking_cuts_off_one_identity_and_no_other_connection(
    guarded: Guarded, run_async: Run
) -> None:
    async def scenario() -> None:
        await make_run(guarded)
        async with (
            guarded.enter("a") as kept,
            guarded.enter("agg") as aggregator,
            guarded.enter("b") as gone,
        ):
            links = [kept._connection.link, aggregator._connection.link]
            reading = asyncio.ensure_future(first(gone.read(TAPE, [names.stop(RUN)], 1)))
            await gone.publish(names.update(RUN, "b", 0), b"welcome")
            auth.revoke(guarded.folder, "b")
            guarded.reload()
            with pytest.raises(BusError, match=r"refused 'b'|no credentials file") as caught:
                await asyncio.wait_for(reading, PATIENCE_S)
            assert not caught.value.retry
            with pytest.raises(BusError):
                await gone.publish(names.update(RUN, "b", 0), b"unwelcome")
            await kept.publish(names.update(RUN, "a", 0), b"mine")
            await aggregator.publish(names.record(RUN, 0), b"next")
            assert [kept._connection.link, aggregator._connection.link] == links
            # Somebody new needs no restart either, but a second reload: see docs/operations.md.
            auth.add(guarded.folder, "c", "learner")
            guarded.reload()
            await asyncio.sleep(1.0)
            guarded.reload()
            await asyncio.sleep(1.0)
            async with guarded.enter("c") as late:
                await published(late, names.join(RUN, "c"))
            assert [kept._connection.link, aggregator._connection.link] == links

    run_async(scenario())


def test_credentials_of_others_are_of_no_use(guarded: Guarded, run_async: Run) -> None:
    for name in ("a", "b", "agg", "operator"):
        assert stat.S_IMODE(Path(guarded.credentials(name)).stat().st_mode) == 0o600

    async def scenario() -> None:
        with pytest.raises(BusError, match="refused 'nobody'"):
            await connect(guarded.url, name="nobody", tls_ca=guarded.tls_ca)
        stranger = guarded.folder.parent / "other"
        auth.init(stranger, RUN, ["127.0.0.1"])
        with pytest.raises(BusError, match="refused 'mallory'"):
            await connect(
                guarded.url,
                name="mallory",
                credentials=str(stranger / "credentials" / "operator.toml"),
                tls_ca=guarded.tls_ca,
            )
        with pytest.raises(BusError, match="certificate"):
            await connect(
                guarded.url,
                name="a",
                credentials=guarded.credentials("a"),
                tls_ca=str(stranger / "tls" / "ca.pem"),
            )
        Path(guarded.credentials("a")).chmod(0o644)
        with pytest.raises(ConfigError, match="others can read it"):
            await connect(guarded.url, name="a", credentials=guarded.credentials("a"))

    run_async(scenario())


@pytest.fixture
def loops_world(guarded: Guarded, tmp_path: Path) -> Iterator[World]:
    """A run for loops of a user's own, with parameters."""
    run = {**ENDLESS, "tokens_per_step": 1}
    bus = guarded.section("operator")
    with open_world(RUN, tmp_path / "run", guarded.url, create=False, run=run, bus=bus) as made:
        del made.document["task"]
        made.variant("run", {})
        diloco.create(made.config_path, PARAMS)
        yield made


PARAMS = {"weights": np.zeros((8, 8), np.float32), "bias": np.zeros(8, np.float32)}


def test_credentials_of_another_role_or_name_are_refused_before_the_run_hears_of_it(
    loops_world: World, guarded: Guarded, run_async: Run
) -> None:
    for name, owner in (("agg", "aggregator 'agg'"), ("b", "learner 'b'")):
        file = loops_world.variant(name, {"bus": guarded.section(name)})
        with (
            pytest.raises(ConfigError, match=f"credentials of {owner}, not .* learner 'a'") as told,
            diloco.join(file, learner="a", like=PARAMS),
        ):
            raise AssertionError("it joined")
        assert "diloco auth add-learner" in told.value.hint

    async def scenario() -> None:
        async with guarded.enter("operator") as bus:
            assert await bus.last(TAPE, names.join(RUN, "a")) is None

    run_async(scenario())
    file = loops_world.variant("a", {"bus": guarded.section("a")})
    aggregator = loops_world.start("aggregator", "aggregator", "--config", str(file))
    assert aggregator.wait() == Exit.CONFIG
    assert "credentials of learner 'a', not those of aggregator" in aggregator.log()


def test_the_operators_credentials_are_warned_of(loops_world: World) -> None:
    with (
        structlog.testing.capture_logs() as said,
        diloco.join(loops_world.config_path, learner="a", like=PARAMS),
    ):
        pass
    [warning] = [line for line in said if line["event"] == "operators_credentials"]
    assert warning["instead_of"] == "learner"
