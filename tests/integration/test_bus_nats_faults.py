"""`NatsBus` when the server dies, is cut off, refuses the client, or lost messages."""

import asyncio
import contextlib
import gc
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from proxy import Network, Proxy

from diloco.common.process.nats_server import NatsServer, find_binary, free_port
from diloco.common.protocol.errors import BusError, BusUnavailableError, ConfigError, SwapLostError
from diloco.common.storage.bus import Message, StreamLimits
from diloco.common.storage.bus.jetstream import NatsBus, connect

Run = Callable[[Coroutine[Any, Any, None]], None]

PERMISSIONS = """
authorization { users: [
  {user: operator, password: op}
  {user: learner, password: le, permissions: {
    publish: ["s.learner.>", "$JS.API.STREAM.INFO.s", "$JS.API.DIRECT.GET.s.>",
              "$JS.API.CONSUMER.CREATE.s.>", "$JS.API.CONSUMER.MSG.NEXT.s.*",
              "$JS.API.CONSUMER.DELETE.s.*"]
    subscribe: ["_INBOX_learner.>"] }}
  {user: mute, password: mu, permissions: {publish: [">"], subscribe: ["nothing"]}}
]}
"""


# An account whose number is less than a stream asks for, and one that names none.
FEW_READERS = """
accounts {
  few: {users: [{user: few, password: few}], jetstream: {max_file: 100M, max_consumers: 2}}
  any: {users: [{user: any, password: any}], jetstream: enabled}
}
"""


@contextlib.asynccontextmanager
async def connected(server: NatsServer | Proxy, **options: Any) -> AsyncIterator[NatsBus]:
    bus = await connect(server.url, name="test", **options)
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def collecting(bus: NatsBus, into: list[Message]) -> AsyncIterator["asyncio.Task[None]"]:
    """Reads stream 's' in the background for as long as the block lasts."""

    async def collect() -> None:
        async for message in bus.read("s", ["s.>"], 1):
            into.append(message)  # noqa: PERF401 - the test looks at it meanwhile

    task = asyncio.create_task(collect())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def publish_until_stored(bus: NatsBus, payload: bytes) -> int:
    """As the daemons do: the same msg_id until there is an answer."""
    while True:
        try:
            return await bus.publish("s.a", payload, msg_id=payload.decode())
        except BusUnavailableError:
            await asyncio.sleep(0.05)


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.02)


def test_a_killed_server_loses_nothing_acknowledged_and_readers_go_on(
    own_nats_server: NatsServer, run_async: Run
) -> None:
    async def scenario() -> None:
        async with connected(own_nats_server) as bus, connected(own_nats_server) as other:
            await bus.create_stream("s", ["s.>"], StreamLimits())
            received: list[Message] = []
            async with collecting(other, received):
                stored: dict[int, bytes] = {}
                for life in range(3):
                    for n in range(40):
                        payload = f"{life}-{n}".encode()
                        stored[await publish_until_stored(bus, payload)] = payload
                        if n == 20:
                            own_nats_server.kill()
                            with pytest.raises(BusUnavailableError):
                                await bus.publish("s.a", b"down", msg_id="down")
                            await bus.broadcast("x", b"dropped")
                            await asyncio.to_thread(own_nats_server.start)
                await until(lambda: len(received) >= 120)
                await asyncio.sleep(0.3)
            assert [m.seq for m in received] == [*range(1, 121)]
            assert {m.seq: m.payload for m in received} == stored

    run_async(scenario())


def test_a_kill_during_many_publishes(own_nats_server: NatsServer, run_async: Run) -> None:
    async def scenario() -> None:
        async with connected(own_nats_server) as bus:
            await bus.create_stream("s", ["s.>"], StreamLimits())
            received: list[Message] = []
            async with collecting(bus, received):
                publishing = [
                    asyncio.create_task(publish_until_stored(bus, b"%d" % n)) for n in range(300)
                ]
                await until(lambda: len(received) > 20)
                own_nats_server.kill()
                await asyncio.to_thread(own_nats_server.start)
                acknowledged = await asyncio.gather(*publishing)
                await until(lambda: len(received) >= 300)
            assert sorted(acknowledged) == [*range(1, 301)]
            assert [m.seq for m in received] == [*range(1, 301)]
            assert {m.payload for m in received} == {b"%d" % n for n in range(300)}

    run_async(scenario())


def test_during_an_outage_calls_fail_without_a_wait_and_then_work_again(
    own_nats_server: NatsServer, run_async: Run
) -> None:
    async def scenario() -> None:
        async with connected(own_nats_server) as bus:
            await bus.create_stream("s", ["s.>"], StreamLimits())
            own_nats_server.stop()
            await asyncio.sleep(0.5)
            for call in (bus.publish("s.a", b""), bus.last("s", "s.a"), bus.last_sequence("s")):
                with pytest.raises(BusUnavailableError, match="no connection") as caught:
                    await call
                assert caught.value.retry
            await asyncio.to_thread(own_nats_server.start)
            assert await publish_until_stored(bus, b"again") == 1

    run_async(scenario())


def test_a_frozen_server_is_unavailable_within_the_time_limit(
    own_nats_server: NatsServer, run_async: Run
) -> None:
    """A half-open connection: the socket stands, nobody answers."""

    async def scenario() -> None:
        async with connected(own_nats_server) as bus:
            await bus.create_stream("s", ["s.>"], StreamLimits())
            received: list[Message] = []
            async with collecting(bus, received):
                await bus.publish("s.a", b"1")
                assert own_nats_server.pid
                os.kill(own_nats_server.pid, signal.SIGSTOP)
                # On a busy machine it runs on for a moment.
                stat = Path(f"/proc/{own_nats_server.pid}/stat")
                await until(lambda: not stat.exists() or ") T " in stat.read_text())
                with pytest.raises(BusUnavailableError, match="no answer"):
                    await bus.publish("s.a", b"2", msg_id="2")
                await bus.broadcast("x", b"dropped")
                os.kill(own_nats_server.pid, signal.SIGCONT)
                assert await publish_until_stored(bus, b"2") == 2
                await until(lambda: len(received) == 2)

    run_async(scenario())


def test_a_reader_whose_consumer_is_deleted_goes_on(
    own_nats_server: NatsServer, run_async: Run
) -> None:
    async def scenario() -> None:
        async with connected(own_nats_server) as bus:
            await bus.create_stream("s", ["s.>"], StreamLimits())
            received: list[Message] = []
            async with collecting(bus, received):
                for round_ in range(1, 4):
                    await bus.publish("s.a", b"")
                    await until(lambda n=round_: len(received) == n, 2.0)  # type: ignore[misc]
                    for name in await consumers(bus):
                        await delete_consumer(bus, name)
            assert [m.seq for m in received] == [1, 2, 3]

    run_async(scenario())


def test_messages_that_went_astray_are_fetched_again_in_order(
    own_nats_server: NatsServer, run_async: Run
) -> None:
    """A second client pulls from the reader's consumer, so that the reader sees gaps."""

    async def scenario() -> None:
        async with connected(own_nats_server) as bus, connected(own_nats_server) as thief:
            await bus.create_stream("s", ["s.>"], StreamLimits())
            received: list[Message] = []
            stolen: list[object] = []
            async with collecting(bus, received):
                await bus.publish("s.a", b"")
                await until(lambda: len(received) == 1)
                assert thief._connection.link is not None
                (name,) = await consumers(bus)
                client, inbox = (
                    thief._connection.link.client,
                    thief._connection.link.client.new_inbox(),
                )

                async def steal(message: object) -> None:
                    stolen.append(message)

                await client.subscribe(inbox, cb=steal)
                await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.s.{name}", b"5", inbox)
                await client.flush()
                for _ in range(20):
                    await bus.publish("s.a", b"")
                await until(lambda: len(received) >= 21)
            assert len(stolen) >= 1
            assert [m.seq for m in received] == [*range(1, 22)]

    run_async(scenario())


@pytest.mark.parametrize(("count", "size"), [(1000, 10), (40, 900_000)])
def test_a_long_undisturbed_read_uses_one_consumer(
    own_nats_server: NatsServer, run_async: Run, count: int, size: int
) -> None:
    """Ends of pulls, by number or by bytes, are not taken for faults."""

    async def scenario() -> None:
        async with connected(own_nats_server) as bus:
            await bus.create_stream("s", ["s.>"], StreamLimits())
            for _ in range(count):
                await bus.publish("s.a", bytes(size))
            received: list[Message] = []
            async with collecting(bus, received):
                await until(lambda: len(received) == count, 5.0)
                assert bus._connection.link is not None
                (info,) = await bus._connection.link.js.consumers_info("s")
                assert info.delivered is not None
                assert info.delivered.consumer_seq == count

    run_async(scenario())


async def consumers(bus: NatsBus) -> list[str]:
    assert bus._connection.link is not None
    return [info.name for info in await bus._connection.link.js.consumers_info("s")]


async def delete_consumer(bus: NatsBus, name: str) -> None:
    assert bus._connection.link is not None
    await bus._connection.link.js.delete_consumer("s", name)


def test_a_reader_that_ends_leaves_no_consumer(own_nats_server: NatsServer, run_async: Run) -> None:
    async def scenario() -> None:
        async with connected(own_nats_server) as bus:
            await bus.create_stream("s", ["s.>"], StreamLimits())
            received: list[Message] = []
            async with collecting(bus, received):
                await bus.publish("s.a", b"")
                await until(lambda: len(received) == 1)
                assert len(await consumers(bus)) == 1
            for _ in range(50):
                if not await consumers(bus):
                    break
                await asyncio.sleep(0.05)
            assert await consumers(bus) == []

    run_async(scenario())


def test_a_listener_goes_on_after_a_restart(own_nats_server: NatsServer, run_async: Run) -> None:
    async def scenario() -> None:
        async with connected(own_nats_server) as bus:
            listener = bus.listen("x")
            heard = asyncio.ensure_future(anext(listener))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(own_nats_server.stop)
            await asyncio.to_thread(own_nats_server.start)
            for _ in range(100):
                await bus.broadcast("x", b"hello")
                if (await asyncio.wait({heard}, timeout=0.1))[0]:
                    break
            assert heard.result() == ("x", b"hello")
            await listener.aclose()  # type: ignore[attr-defined]

    run_async(scenario())


def test_a_server_that_lost_messages_is_noticed(
    own_nats_server: NatsServer, run_async: Run, tmp_path: Path
) -> None:
    server, copy = own_nats_server, tmp_path / "copy"

    async def scenario() -> None:
        async with connected(server) as bus:
            await bus.create_stream("s", ["s.>"], StreamLimits())
            await bus.publish("s.a", b"1")
            await asyncio.to_thread(server.stop)
            shutil.copytree(server.folder / "jetstream", copy)
            await asyncio.to_thread(server.start)
            received: list[Message] = []
            async with collecting(bus, received) as reading:
                await publish_until_stored(bus, b"2")
                await publish_until_stored(bus, b"3")
                await until(lambda: len(received) == 3)
                await asyncio.to_thread(server.kill)
                shutil.rmtree(server.folder / "jetstream")
                shutil.copytree(copy, server.folder / "jetstream")
                await asyncio.to_thread(server.start)
                await asyncio.wait({reading}, timeout=300.0)
                with pytest.raises(BusError, match="ends at 1, but sequence 3 was seen"):
                    reading.result()

    run_async(scenario())


def test_a_link_that_breaks_with_data_unsent_leaves_no_trace(
    own_nats_server: NatsServer, run_async: Run
) -> None:
    """Stalled until the buffers are full, then cut: nats-py's flusher ends with an error."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        said: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: said.append(context))
        async with connected(proxy) as bus:
            await bus.create_stream("s", ["s.>"], StreamLimits())
            proxy.stall()
            for _ in range(100):
                await bus.broadcast("other", bytes(100_000))
                await asyncio.sleep(0)
            proxy.cut()
            await until(lambda: bus._connection.link is None)
            proxy.heal()
            await publish_until_stored(bus, b"again")
        gc.collect()
        await asyncio.sleep(0)
        assert not said, said

    with Network() as network:
        proxy = network.proxy(own_nats_server.port)
        run_async(scenario())


def test_who_is_cancelled_while_it_connects_is_cancelled(
    own_nats_server: NatsServer, run_async: Run
) -> None:
    rng = random.Random(1)

    async def scenario() -> None:
        for _ in range(60):
            connecting = asyncio.ensure_future(connect(own_nats_server.url, name="test"))
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            if connecting.done():
                await (await connecting).close()
                continue
            connecting.cancel()
            await asyncio.wait({connecting})
            assert connecting.cancelled()

    run_async(scenario())


def test_a_wrong_address_fails_in_bounded_time(run_async: Run) -> None:
    async def scenario() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"nats://user:secret@127.0.0.1:{closed.getsockname()[1]}"
            with pytest.raises(BusUnavailableError, match="no connection to NATS at 127") as caught:
                await connect(url, name="test", connect_timeout_s=1.0)
            assert "secret" not in str(caught.value)

    run_async(scenario())


def test_a_stranger_on_the_port_fails_in_bounded_time(run_async: Run) -> None:
    """Something accepts the connection and says nothing."""

    async def scenario() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            with pytest.raises(BusUnavailableError):
                await connect(
                    f"nats://127.0.0.1:{silent.getsockname()[1]}", name="x", connect_timeout_s=1.0
                )

    run_async(scenario())


def test_an_api_that_nobody_serves_is_waited_for(tmp_path: Path, run_async: Run) -> None:
    """As while a server reads its accounts again: who asks JetStream's API is not heard."""

    async def scenario(url: str) -> None:
        async with contextlib.AsyncExitStack() as stack:
            bus = await connect(url, name="test")
            stack.push_async_callback(bus.close)
            for ask in (lambda: bus.last("s", "s.a"), lambda: bus.last_sequence("s"), bus.streams):
                with pytest.raises(BusUnavailableError, match="no responders") as caught:
                    await ask()
                assert "nats-server -js" in (caught.value.hint or "")

    port = free_port()
    command = [str(find_binary()), "-a", "127.0.0.1", "-p", str(port)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            run_async(scenario(f"nats://127.0.0.1:{port}"))
        finally:
            server.kill()


@pytest.mark.parametrize("url", ["http://h:1", "nats://", "h:4222", "nats://a,ftp://b"])
def test_a_url_of_another_kind_is_a_configuration_error(run_async: Run, url: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError):
            await connect(url, name="test")

    run_async(scenario())


def test_missing_credentials_are_a_configuration_error(run_async: Run, tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="no credentials file"):
            await connect("nats://h:1", name="test", credentials=str(tmp_path / "none"))

    run_async(scenario())


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "guarded", extra_config=PERMISSIONS) as server:
        yield server


async def enter(server: NatsServer, user: str, password: str, **options: Any) -> NatsBus:
    url = f"nats://{user}:{password}@127.0.0.1:{server.port}"
    return await connect(url, name=user, **options)


def test_wrong_passwords_are_refused_at_once(guarded: NatsServer, run_async: Run) -> None:
    async def scenario() -> None:
        with pytest.raises(BusError, match=r"refused 'learner'.*uthorization") as caught:
            await enter(guarded, "learner", "wrong")
        assert not caught.value.retry
        assert "wrong" not in caught.value.message

    run_async(scenario())


def test_a_learner_does_all_it_needs_with_the_permissions_named(
    guarded: NatsServer, run_async: Run
) -> None:
    async def scenario() -> None:
        operator = await enter(guarded, "operator", "op")
        learner = await enter(
            guarded, "learner", "le", inbox_prefix="_INBOX_learner", direct_reads=True
        )
        await operator.create_stream("s", ["s.>"], StreamLimits())
        assert await learner.publish("s.learner.x", b"1", msg_id="1", expected_last=0) == 1
        with pytest.raises(SwapLostError):
            await learner.publish("s.learner.x", b"1", expected_last=0)
        last = await learner.last("s", "s.learner.x")
        assert last == await operator.last("s", "s.learner.x")
        assert await learner.last("s", "s.learner.y") is None
        reader = learner.read("s", ["s.>"], 1)
        assert await anext(reader) == last
        await reader.aclose()  # type: ignore[attr-defined]
        await learner.close()
        await operator.close()

    run_async(scenario())


def test_what_is_not_permitted_is_named_by_its_subject(guarded: NatsServer, run_async: Run) -> None:
    async def scenario() -> None:
        operator = await enter(guarded, "operator", "op")
        await operator.create_stream("s", ["s.>"], StreamLimits())
        learner = await enter(guarded, "learner", "le", inbox_prefix="_INBOX_learner")
        mute = await enter(guarded, "mute", "mu")
        results = await asyncio.gather(
            learner.publish("s.Other.x", b""),
            learner.last("s", "s.a"),
            anext(learner.listen("s.open")),
            mute.publish("s.a", b""),
            return_exceptions=True,
        )
        for result, subject in zip(
            results, ["s.Other.x", "$JS.API.STREAM.MSG.GET.s", "s.open", "s.a"], strict=True
        ):
            assert isinstance(result, BusError), result
            assert not result.retry
            assert f"not permitted on '{subject}'" in result.message
        for bus in (operator, learner, mute):
            await bus.close()

    run_async(scenario())


def test_a_revoked_user_is_told_so_and_comes_back_when_restored(
    guarded: NatsServer, run_async: Run
) -> None:
    config = guarded.folder / "nats-server.conf"
    permitted = config.read_text()

    def reload(text: str) -> None:
        config.write_text(text)
        assert guarded.pid
        os.kill(guarded.pid, signal.SIGHUP)

    async def scenario() -> None:
        operator = await enter(guarded, "operator", "op")
        await operator.create_stream("s", ["s.>"], StreamLimits())
        learner = await enter(guarded, "learner", "le", inbox_prefix="_INBOX_learner")
        reader = learner.read("s", ["s.>"], 1)
        reading = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0.2)
        reload(permitted.replace("password: le,", "password: new,"))
        with pytest.raises(BusError, match="refused 'learner'"):
            await reading
        with pytest.raises(BusError, match="refused 'learner'") as caught:
            await learner.publish("s.learner.x", b"")
        assert not caught.value.retry
        assert await operator.publish("s.a", b"undisturbed") == 1
        reload(permitted)
        for _ in range(200):
            with contextlib.suppress(BusError):
                assert await learner.publish("s.learner.x", b"", msg_id="x") == 2
                break
            await asyncio.sleep(0.1)
        assert await operator.last_sequence("s") == 2
        await learner.close()
        await operator.close()

    run_async(scenario())


def test_two_servers_on_one_folder_are_refused(own_nats_server: NatsServer) -> None:
    second = NatsServer(own_nats_server.folder)
    with pytest.raises(BusError, match=rf"in use by.*{own_nats_server.port}.*{os.getpid()}"):
        second.start()
    assert not second.running
    own_nats_server.stop()
    second.start()
    second.stop()


def test_a_port_in_use_is_an_error_with_the_servers_words(
    own_nats_server: NatsServer, tmp_path: Path
) -> None:
    second = NatsServer(tmp_path / "second", port=own_nats_server.port)
    with pytest.raises(BusError, match="address already in use"):
        second.start()
    assert not second.running


def test_a_bad_configuration_is_an_error_with_the_servers_words(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "n", extra_config="no_such_setting: 1")
    with pytest.raises(BusError, match="no_such_setting"):
        server.start()


def test_a_restart_keeps_port_and_starting_twice_is_one_server(own_nats_server: NatsServer) -> None:
    url, pid = own_nats_server.url, own_nats_server.pid
    own_nats_server.start()
    assert own_nats_server.pid == pid
    own_nats_server.stop()
    own_nats_server.start()
    assert own_nats_server.url == url
    assert own_nats_server.pid not in {None, pid}
    own_nats_server.kill()
    own_nats_server.stop()
    assert own_nats_server.pid is None


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_server_dies_with_its_parent_and_holds_the_lock_until_then(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from diloco.common.process.nats_server import NatsServer\n"
        "s = NatsServer(pathlib.Path(sys.argv[1])); s.start(); print(s.pid, flush=True)\n"
        "time.sleep(3600)"
    )
    folder = tmp_path / "n"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    with pytest.raises(BusError, match=f"process {parent.pid}"):
        NatsServer(folder).start()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 300.0
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    with NatsServer(folder) as successor:
        assert successor.running


def test_a_port_that_was_taken_meanwhile_is_left_for_another(tmp_path):
    server = NatsServer(tmp_path / "nats")
    with socket.create_server(("127.0.0.1", server.port)) as stranger, server:
        assert server.running
        assert server.port != stranger.getsockname()[1]


def test_a_port_that_was_asked_for_is_never_left_for_another(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        server = NatsServer(tmp_path / "nats", port=stranger.getsockname()[1])
        with pytest.raises(BusError, match="address already in use"):
            server.start()


@pytest.mark.parametrize(("user", "most"), [("few", 0), ("any", 65_536)])
def test_a_stream_takes_as_many_readers_as_its_account_allows(
    run_async: Run, tmp_path: Path, user: str, most: int
) -> None:
    async def scenario(server: NatsServer) -> None:
        url = server.url.replace("nats://", f"nats://{user}:{user}@")
        bus = await connect(url, name="test")
        for _ in range(2):
            await bus.create_stream("s", ["s.>"], StreamLimits())
        await bus.publish("s.a", b"1")
        readers = [bus.read("s", ["s.>"], 1) for _ in range(3)]
        for reader in readers[:2]:
            assert (await anext(reader)).seq == 1
        filled = await bus.filled("s")
        assert (filled.readers, filled.max_readers) == (2, most)
        if user == "few":
            with pytest.raises(BusError, match="maximum consumers limit reached") as caught:
                await anext(readers[2])
            assert "Large fleets" in (caught.value.hint or "")
        else:
            assert (await anext(readers[2])).seq == 1
        for reader in readers:
            await reader.aclose()
        await bus.close()

    with NatsServer(tmp_path, extra_config=FEW_READERS) as server:
        run_async(scenario(server))
