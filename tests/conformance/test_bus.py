"""The rules of every bus: one suite over `MemoryBus` and over `NatsBus` with a real nats-server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.common.protocol.errors import (
    BusError,
    BusUnavailableError,
    IdTakenError,
    StreamMissingError,
    SwapLostError,
)
from diloco.common.storage.bus import (
    LISTEN_BACKLOG,
    Bus,
    MemoryBroker,
    MemoryBus,
    Message,
    StreamLimits,
    check_patterns,
    check_subject,
    subject_matches,
    subjects_overlap,
)
from diloco.common.storage.bus.jetstream import connect
from diloco.learner.wire.incarnation import last_at_leader

Connect: TypeAlias = Callable[[], Awaitable[Bus]]
Scenario: TypeAlias = Callable[[Connect, str], Coroutine[Any, Any, None]]
Play: TypeAlias = Callable[[Scenario], None]

LIMITS = StreamLimits()


@pytest.fixture(params=["memory", "nats"])
def play(request: pytest.FixtureRequest, unique: str) -> Play:
    """Runs a scenario with a function that makes clients of one broker, and a unique token."""
    if request.param == "memory":
        broker = MemoryBroker()

        async def client() -> Bus:
            return MemoryBus(broker)
    else:
        server = request.getfixturevalue("nats_server")

        async def client() -> Bus:
            return await connect(server.url, name="test")

    def run(scenario: Scenario) -> None:
        asyncio.run(_run(scenario, client, unique))

    return run


async def _run(scenario: Scenario, client: Connect, token: str) -> None:
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(300.0):

        async def tracked() -> Bus:
            bus = await client()
            stack.push_async_callback(bus.close)
            return bus

        await scenario(tracked, token)


async def take(messages: AsyncIterator[Any], count: int) -> list[Any]:
    """The next `count` of `messages`."""
    async with asyncio.timeout(300.0):
        return [await anext(messages) for _ in range(count)]


async def finish(messages: AsyncIterator[Any]) -> None:
    await messages.aclose()  # type: ignore[attr-defined]


async def nothing_comes(pending: "asyncio.Task[Any]") -> bool:
    done, _ = await asyncio.wait({pending}, timeout=0.2)
    return not done


def test_messages_are_numbered_from_one_and_keep_what_they_had(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        assert await bus.last_sequence(t) == 0
        before = time.time()
        assert await bus.publish(f"{t}.a", b"one", msg_id="id-1") == 1
        assert await bus.publish(f"{t}.b.c", b"") == 2
        assert await bus.last_sequence(t) == 2
        reader = bus.read(t, [f"{t}.>"], 1)
        one, two = await take(reader, 2)
        assert one == Message(f"{t}.a", 1, one.time_s, b"one", "id-1")
        assert two == Message(f"{t}.b.c", 2, two.time_s, b"", "")
        assert before - 1 <= one.time_s <= two.time_s <= time.time() + 1
        await finish(reader)

    play(scenario)


def test_a_stream_begins_where_it_is_told_and_keeps_to_that(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus, first = await client(), 3 * 10**12 + 1
        await bus.create_stream(t, [f"{t}.>"], LIMITS, first_seq=first)
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        assert await bus.last_sequence(t) == first - 1
        reader = bus.read(t, [f"{t}.>"], 1)
        waiting = asyncio.ensure_future(anext(reader))
        assert await nothing_comes(waiting)
        for index in range(3):
            assert await bus.publish(f"{t}.a", b"%d" % index) == first + index
        assert (await waiting).seq == first
        assert [message.seq for message in await take(reader, 2)] == [first + 1, first + 2]
        # What another tape of other numbers asks for takes nothing, and wins nothing.
        await bus.trim(t, f"{t}.a", 1000)
        with pytest.raises(SwapLostError):
            await bus.publish(f"{t}.a", b"", expected_last=3)
        again = bus.read(t, [f"{t}.a"], 1)
        assert (await take(again, 1))[0].seq == first
        assert await bus.publish(f"{t}.a", b"", expected_last=first + 2) == first + 3
        await finish(reader)
        await finish(again)

    play(scenario)


def test_streams_are_listed_by_name(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        assert not [name for name in await bus.streams() if name.startswith(t)]
        for name in ("b", "a"):
            await bus.create_stream(f"{t}{name}", [f"{t}{name}.>"], LIMITS)
        assert [name for name in await bus.streams() if name.startswith(t)] == [f"{t}a", f"{t}b"]

    play(scenario)


def test_a_stream_is_removed_with_all_that_it_holds(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        await bus.create_stream(f"{t}-other", [f"{t}-other.>"], LIMITS)
        await bus.publish(f"{t}.a", b"x")
        await bus.remove_stream(t)
        await bus.remove_stream(t)
        assert [name for name in await bus.streams() if name.startswith(t)] == [f"{t}-other"]
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        assert await bus.last(t, f"{t}.a") is None

    play(scenario)


def test_a_swap_that_cannot_succeed_says_what_the_last_message_is(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        assert await last_at_leader(bus, f"{t}.a") == 0
        await bus.publish(f"{t}.a", b"v0")
        newest = await bus.publish(f"{t}.a", b"v1")
        await bus.publish(f"{t}.b", b"v0")
        assert await last_at_leader(bus, f"{t}.a") == newest
        assert await bus.last_sequence(t) == newest + 1

    play(scenario)


def test_swap_succeeds_only_on_the_subjects_last_message(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        first = await bus.publish(f"{t}.a", b"v0", expected_last=0)
        await bus.publish(f"{t}.other", b"between")
        second = await bus.publish(f"{t}.a", b"v1", expected_last=first)
        assert (first, second) == (1, 3)
        for wrong in (0, first, 2, 99):
            with pytest.raises(SwapLostError, match=f"{t}.a") as caught:
                await bus.publish(f"{t}.a", b"fork", expected_last=wrong)
            assert (caught.value.expected, caught.value.last) == (wrong, second)
            assert not caught.value.retry
        assert await bus.last_sequence(t) == 3
        last = await bus.last(t, f"{t}.a")
        assert last is not None
        assert last.payload == b"v1"

    play(scenario)


def test_trim_takes_the_old_messages_of_one_subject_and_never_its_last(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        for turn in range(4):
            await bus.publish(f"{t}.a", b"%d" % turn)  # sequences 1, 3, 5, 7
            await bus.publish(f"{t}.a.b", b"%d" % turn)  # 2, 4, 6, 8

        async def left() -> list[int]:
            reader = bus.read(t, [f"{t}.>"], 1)
            found: list[int] = []
            while not found or found[-1] < 8:
                found += [m.seq for m in await take(reader, 1)]
            await finish(reader)
            return found

        for nothing in (0, 1):
            await bus.trim(t, f"{t}.a", nothing)
        await bus.trim(t, f"{t}.none", 99)
        assert await left() == [1, 2, 3, 4, 5, 6, 7, 8]
        await bus.trim(t, f"{t}.a", 5)
        assert await left() == [2, 4, 5, 6, 7, 8]
        await bus.trim(t, f"{t}.a", 5)
        await bus.trim(t, f"{t}.a", 99)
        assert await left() == [2, 4, 6, 7, 8]
        await bus.trim(t, f"{t}.a.b", 7)
        assert await left() == [7, 8]

    play(scenario)


def test_a_trimmed_subject_goes_on_as_before(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        follower = bus.read(t, [f"{t}.a"], 1)
        first = await bus.publish(f"{t}.a", b"0", msg_id="first", expected_last=0)
        second = await bus.publish(f"{t}.a", b"1", msg_id="second", expected_last=first)
        await take(follower, 1)
        await bus.trim(t, f"{t}.a", 99)
        last = await bus.last(t, f"{t}.a")
        assert last is not None
        assert (last.seq, last.payload) == (second, b"1")
        assert await bus.last_sequence(t) == 2
        with pytest.raises(IdTakenError):
            await bus.publish(f"{t}.a", b"0", msg_id="first")
        with pytest.raises(SwapLostError):
            await bus.publish(f"{t}.a", b"fork", expected_last=0)
        third = await bus.publish(f"{t}.a", b"2", expected_last=second)
        assert [m.seq for m in await take(follower, 2)] == [second, third]
        late = bus.read(t, [f"{t}.a"], 1)
        assert [m.seq for m in await take(late, 2)] == [second, third]
        await finish(follower)
        await finish(late)

    play(scenario)


def test_trim_refuses_patterns_and_streams_that_are_not_there(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        await bus.publish(f"{t}.a", b"")
        for pattern in (f"{t}.*", f"{t}.>"):
            with pytest.raises(BusError):
                await bus.trim(t, pattern, 99)
        with pytest.raises(StreamMissingError):
            await bus.trim(f"{t}-none", f"{t}.a", 99)

    play(scenario)


def test_a_stream_is_restored_as_it_was(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        # More than are written at once, a gap at the beginning and one within, an id met twice.
        exported = [
            Message(f"{t}.{seq % 3}", seq, 1e9 + seq / 7, b"%d" % seq, "twice" if seq % 2 else "")
            for seq in range(5, 700)
            if not 100 <= seq < 420
        ]
        assert await bus.restore(t, [f"{t}.*"], LIMITS, iter(exported)) == len(exported)
        reader = bus.read(t, [f"{t}.*"], 1)
        assert await take(reader, len(exported)) == exported
        await finish(reader)
        assert await bus.last_sequence(t) == 699
        assert await bus.last(t, f"{t}.0") == exported[-1]
        # It is a stream like any other.
        with pytest.raises(SwapLostError):
            await bus.publish(f"{t}.0", b"", expected_last=0)
        assert await bus.publish(f"{t}.0", b"", expected_last=699) == 700
        with pytest.raises(BusError, match="exists already"):
            await bus.restore(t, [f"{t}.*"], LIMITS, exported)

    play(scenario)


def test_a_stream_that_cannot_be_restored_is_not_there(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        foreign = [Message(f"{t}.a", 1, 1.0, b"", ""), Message(f"other{t}", 2, 1.0, b"", "")]
        with pytest.raises(BusError):
            await bus.restore(t, [f"{t}.*"], LIMITS, foreign)
        with pytest.raises(StreamMissingError):
            await bus.last_sequence(t)

    play(scenario)


def test_a_swap_of_an_empty_subject_expects_zero(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        with pytest.raises(SwapLostError):
            await bus.publish(f"{t}.a", b"", expected_last=1)
        assert await bus.publish(f"{t}.a", b"", expected_last=0) == 1

    play(scenario)


def test_of_two_concurrent_swaps_one_wins(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        one, two = await client(), await client()
        await one.create_stream(t, [f"{t}.>"], LIMITS)
        for turn in range(10):
            results = await asyncio.gather(
                *(
                    bus.publish(f"{t}.a", name, msg_id=f"{turn}{name!r}", expected_last=turn)
                    for bus, name in ((one, b"1"), (two, b"2"))
                ),
                return_exceptions=True,
            )
            assert sorted(type(r).__name__ for r in results) == ["SwapLostError", "int"]

    play(scenario)


def test_a_known_msg_id_stores_nothing_and_gives_the_first_sequence(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        await bus.publish(f"{t}.x", b"")
        assert await bus.publish(f"{t}.a", b"1", msg_id="id") == 2
        await bus.publish(f"{t}.x", b"")
        assert await bus.publish(f"{t}.a", b"1", msg_id="id") == 2
        # As sent by a client that never heard the answer: others have written meanwhile.
        await bus.publish(f"{t}.a", b"newer")
        assert await bus.publish(f"{t}.a", b"1", msg_id="id") == 2
        assert await bus.last_sequence(t) == 4

    play(scenario)


def test_what_has_the_id_of_another_message_is_not_taken_for_stored(play: Play) -> None:
    """A server acknowledges it, as a copy of what somebody published who knew its id."""

    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        await bus.publish(f"{t}.a", b"older")
        assert await bus.publish(f"{t}.squatter", b"garbage", msg_id="id") == 2
        for subject, payload, expected in (("a", b"1", 1), ("a", b"1", None), ("b", b"1", None)):
            with pytest.raises(IdTakenError, match="sequence 2 has its id"):
                await bus.publish(f"{t}.{subject}", payload, msg_id="id", expected_last=expected)
        with pytest.raises(IdTakenError):
            await bus.publish(f"{t}.squatter", b"something else", msg_id="id")
        await bus.publish(f"{t}.a", b"newer")
        with pytest.raises(IdTakenError):
            await bus.publish(f"{t}.a", b"1", msg_id="id")
        assert await bus.last_sequence(t) == 3
        assert await bus.last(t, f"{t}.b") is None

    play(scenario)


def test_repeating_a_swap_that_won_is_refused_and_the_last_message_tells(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        await bus.publish(f"{t}.a", b"mine", msg_id="id", expected_last=0)
        with pytest.raises(SwapLostError):
            await bus.publish(f"{t}.a", b"mine", msg_id="id", expected_last=0)
        last = await bus.last(t, f"{t}.a")
        assert last is not None
        assert (last.seq, last.msg_id) == (1, "id")
        assert await bus.publish(f"{t}.a", b"mine", msg_id="id", expected_last=1) == 1

    play(scenario)


def test_the_duplicate_window_ends(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS._replace(duplicate_window_s=0.3))
        assert await bus.publish(f"{t}.a", b"", msg_id="id") == 1
        assert await bus.publish(f"{t}.a", b"", msg_id="id") == 1
        await asyncio.sleep(1.0)
        assert await bus.publish(f"{t}.a", b"", msg_id="id") == 2

    play(scenario)


def test_reading_starts_anywhere_and_filters(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        for n in range(1, 11):
            await bus.publish(f"{t}.{'ab'[n % 2]}.{n}", b"")
        for subjects, start, expected in (
            ([f"{t}.>"], 8, [8, 9, 10]),
            ([f"{t}.a.*"], 3, [4, 6, 8, 10]),
            ([f"{t}.a.*", f"{t}.b.7"], 5, [6, 7, 8, 10]),
            ([f"{t}.b.1"], 0, [1]),
        ):
            reader = bus.read(t, subjects, start)
            assert [m.seq for m in await take(reader, len(expected))] == expected
            following = asyncio.ensure_future(anext(reader))
            assert await nothing_comes(following)
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following

    play(scenario)


def test_reading_waits_for_new_messages(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus, other = await client(), await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        reader = bus.read(t, [f"{t}.a"], 1)
        pending = asyncio.ensure_future(anext(reader))
        assert await nothing_comes(pending)
        await other.publish(f"{t}.b", b"not for us")
        await other.publish(f"{t}.a", b"new")
        async with asyncio.timeout(300.0):
            message = await pending
        assert (message.seq, message.payload) == (2, b"new")
        await finish(reader)

    play(scenario)


def test_two_readers_each_get_everything_in_order(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus, other = await client(), await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        count = 600  # more than one pull
        readers = [bus.read(t, [f"{t}.>"], 1), other.read(t, [f"{t}.>"], 1)]
        taking = [asyncio.ensure_future(take(reader, count)) for reader in readers]
        for start in range(0, count, 100):
            await asyncio.gather(
                *(bus.publish(f"{t}.a", b"%d" % n) for n in range(start, start + 100))
            )
        for task in taking:
            assert [m.seq for m in await task] == [*range(1, count + 1)]
        for reader in readers:
            await finish(reader)

    play(scenario)


def test_large_messages_are_read_one_after_another(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        for _ in range(24):
            await bus.publish(f"{t}.a", bytes(900_000))
        reader = bus.read(t, [f"{t}.>"], 1)
        assert [m.seq for m in await take(reader, 24)] == [*range(1, 25)]
        await finish(reader)

    play(scenario)


def test_a_message_too_large_is_refused_for_good(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS._replace(max_message_bytes=1000))
        for size in (1100, 2_000_000):
            with pytest.raises(BusError) as caught:
                await bus.publish(f"{t}.a", bytes(size))
            assert not caught.value.retry
        assert await bus.publish(f"{t}.a", bytes(900)) == 1

    play(scenario)


def test_last_of_a_subject(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        assert await bus.last(t, f"{t}.a") is None
        for n in range(3):
            await bus.publish(f"{t}.a", b"%d" % n, msg_id=f"id{n}")
        await bus.publish(f"{t}.b", b"")
        last = await bus.last(t, f"{t}.a")
        reader = bus.read(t, [f"{t}.a"], 3)
        assert [last] == await take(reader, 1)  # the time too: both ways tell the same
        assert await bus.last(t, f"{t}.c") is None
        empty = await bus.last(t, f"{t}.b")
        assert empty is not None
        assert empty.payload == b""
        await finish(reader)

    play(scenario)


def test_what_no_stream_holds(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        with pytest.raises(BusError, match=t):
            await bus.publish(f"{t}.a", b"")
        for call in (bus.last(t, f"{t}.a"), bus.last_sequence(t), anext(bus.read(t, [t], 1))):
            with pytest.raises(BusError, match=t) as caught:
                await call
            assert not caught.value.retry

    play(scenario)


def test_a_position_beyond_the_end_is_refused(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        await bus.publish(f"{t}.a", b"")
        with pytest.raises(BusError, match="ends at 1, but sequence 2 was seen"):
            await anext(bus.read(t, [f"{t}.>"], 3))
        reader = bus.read(t, [f"{t}.>"], 2)
        pending = asyncio.ensure_future(anext(reader))
        assert await nothing_comes(pending)
        await bus.publish(f"{t}.a", b"")
        assert (await pending).seq == 2
        await finish(reader)

    play(scenario)


def test_creating_a_stream_again_names_every_difference(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus, other = await client(), await client()
        limits = StreamLimits(max_age_s=3600.0, max_bytes=1 << 20, max_message_bytes=5000)
        await bus.create_stream(t, [f"{t}.a", f"{t}.b.>"], limits)
        await other.create_stream(t, [f"{t}.b.>", f"{t}.a"], limits)
        await bus.publish(f"{t}.a", b"")
        changed = StreamLimits(7200.0, 2 << 20, 6000, 60.0)
        with pytest.raises(BusError) as caught:
            await other.create_stream(t, [f"{t}.a"], changed)
        for part in ("subjects", "max_age_s", "max_bytes", "max_message_bytes", "duplicate_window"):
            assert part in caught.value.message
        assert "replicas" not in caught.value.message
        assert "3600.0, not 7200.0" in caught.value.message
        assert await bus.last_sequence(t) == 1

    play(scenario)


@pytest.mark.parametrize(
    ("subjects", "limits"),
    [
        ([], LIMITS),
        (["{t}.a..b"], LIMITS),
        (["{t}.a", "{t}.*"], LIMITS),
        (["{t}.a"], LIMITS._replace(duplicate_window_s=0.0)),
        (["{t}.a"], LIMITS._replace(max_age_s=10.0)),
        (["{t}.a"], LIMITS._replace(max_bytes=-1)),
    ],
)
def test_a_stream_that_makes_no_sense_is_refused(
    play: Play, subjects: list[str], limits: StreamLimits
) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        with pytest.raises(BusError):
            await bus.create_stream(t, [s.format(t=t) for s in subjects], limits)

    play(scenario)


def test_two_streams_cannot_own_one_subject(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.*.x"], LIMITS)
        with pytest.raises(BusError, match="overlap"):
            await bus.create_stream(f"{t}-2", [f"{t}.a.>"], LIMITS)

    play(scenario)


def test_a_bounded_stream_drops_its_oldest(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS._replace(max_bytes=10_000))
        await bus.publish(f"{t}.first", bytes(1000))
        for _ in range(20):
            await bus.publish(f"{t}.a", bytes(1000))
        assert await bus.last_sequence(t) == 21
        assert await bus.last(t, f"{t}.first") is None
        reader = bus.read(t, [f"{t}.>"], 1)
        kept = (await take(reader, 1))[0].seq
        assert 10 <= kept <= 14
        assert await bus.publish(f"{t}.first", b"", expected_last=0) == 22
        await finish(reader)

    play(scenario)


def test_messages_age(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], StreamLimits(max_age_s=0.5, duplicate_window_s=0.5))
        await bus.publish(f"{t}.a", b"")
        for _ in range(100):
            if await bus.last(t, f"{t}.a") is None:
                break
            await asyncio.sleep(0.1)
        assert await bus.last_sequence(t) == 1
        assert await bus.publish(f"{t}.a", b"", expected_last=0) == 2

    play(scenario)


def test_a_broadcast_reaches_all_who_listen_and_is_kept_nowhere(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        one, two = await client(), await client()
        await one.broadcast(f"{t}.x.1", b"before anyone listens")
        await asyncio.sleep(0.1)
        listeners = [one.listen(f"{t}.*.1"), two.listen(f"{t}.>")]
        pending = [asyncio.ensure_future(anext(listener)) for listener in listeners]
        await asyncio.sleep(0.3)  # until the server has both subscriptions
        await two.broadcast(f"{t}.x.2", b"for the second")
        await two.broadcast(f"{t}.x.1", b"for both")
        assert await pending[0] == (f"{t}.x.1", b"for both")
        assert await pending[1] == (f"{t}.x.2", b"for the second")
        assert await take(listeners[1], 1) == [(f"{t}.x.1", b"for both")]
        for listener in listeners:
            await finish(listener)
        await two.broadcast(f"{t}.x.1", b"after")

    play(scenario)


def test_a_listener_that_does_not_take_is_bounded(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        listener = bus.listen(t)
        pending = asyncio.ensure_future(anext(listener))
        await asyncio.sleep(0.3)
        for n in range(LISTEN_BACKLOG + 500):
            await bus.broadcast(t, b"%d" % n)
        await pending
        await asyncio.sleep(0.3)
        heard = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                async for _ in listener:
                    heard += 1
        assert 0 < heard <= LISTEN_BACKLOG

    play(scenario)


@pytest.mark.parametrize("subject", ["", "a b", "a..b", ".a", "a.", "a.*", "a.>", "a\r\nPUB"])
def test_a_subject_to_publish_on_is_plain(play: Play, subject: str) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        for call in (bus.publish(subject, b""), bus.broadcast(subject, b"")):
            with pytest.raises(BusError, match="is not a subject"):
                await call

    play(scenario)


def test_closing_ends_reads_and_listeners_and_refuses_calls(play: Play) -> None:
    async def scenario(client: Connect, t: str) -> None:
        bus = await client()
        await bus.create_stream(t, [f"{t}.>"], LIMITS)
        waiting = [
            asyncio.ensure_future(anext(messages, None))
            for messages in (bus.read(t, [f"{t}.>"], 1), bus.listen(t))
        ]
        await asyncio.sleep(0.2)
        await bus.close()
        await bus.close()
        async with asyncio.timeout(300.0):
            assert await asyncio.gather(*waiting) == [None, None]
        for call in (bus.publish(f"{t}.a", b""), bus.last_sequence(t)):
            with pytest.raises(BusError, match="closed") as caught:
                await call
            assert not isinstance(caught.value, BusUnavailableError)
        await bus.broadcast(t, b"nobody cares")

    play(scenario)


def test_memory_bus_uses_only_the_clock_it_is_given() -> None:
    now = [1000.0]

    async def scenario() -> None:
        bus = MemoryBus(MemoryBroker(clock=lambda: now[0]))
        await bus.create_stream("s", ["s"], StreamLimits(max_age_s=300.0))
        await bus.publish("s", b"", msg_id="id")
        now[0] += 119.0
        assert await bus.publish("s", b"", msg_id="id") == 1
        now[0] += 1.0
        assert await bus.publish("s", b"", msg_id="id") == 2
        now[0] += 180.0
        last = await bus.last("s", "s")
        assert last is not None
        assert last.time_s == 1120.0
        reader = bus.read("s", ["s"], 1)
        assert [m.seq for m in await take(reader, 1)] == [2]
        await finish(reader)

    asyncio.run(scenario())


tokens = st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=4)
patterns = st.builds(lambda t, rest: ".".join(t + [">"] * rest), tokens, st.booleans())
literals = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=5).map(".".join)


@given(patterns, patterns, st.lists(literals, min_size=30, max_size=30))
def test_patterns_with_a_common_subject_overlap(one: str, two: str, subjects: list[str]) -> None:
    common = [s for s in subjects if subject_matches(one, s) and subject_matches(two, s)]
    assert subjects_overlap(one, two) or not common
    assert subjects_overlap(one, two) == subjects_overlap(two, one)


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("a.b", ["a.b"], ["a", "a.c", "a.b.c", "b.a"]),
        ("a.*", ["a.b", "a.c"], ["a", "a.b.c", "b.a"]),
        ("*.b", ["a.b"], ["b", "a.b.b"]),
        ("a.>", ["a.b", "a.b.c"], ["a", "b.a"]),
        (">", ["a", "a.b"], []),
        ("*.*.>", ["a.b.c", "a.b.c.d"], ["a.b"]),
    ],
)
def test_subject_matches(pattern: str, matching: list[str], other: list[str]) -> None:
    check_subject(pattern, wildcards=True)
    assert [s for s in matching + other if subject_matches(pattern, s)] == matching


@pytest.mark.parametrize(
    ("one", "two", "overlap"),
    [
        ("a", "a", True),
        ("a", "a.>", False),
        ("a.b", "a.>", True),
        ("a.*", "*.b", True),
        ("a.*.c", "a.b", False),
        ("a.*.c", "b.>", False),
        (">", "a.b.c", True),
        ("a.>", "a.*.x", True),
    ],
)
def test_subjects_overlap(one: str, two: str, overlap: bool) -> None:
    assert subjects_overlap(one, two) is overlap
    if overlap:
        with pytest.raises(BusError, match="overlap"):
            check_patterns([one, two])
    else:
        check_patterns([one, two])


def test_a_lease_is_held_by_one_and_expires(play: Play) -> None:
    async def scenario(client: Connect, token: str) -> None:
        one, other = await client(), await client()
        bucket = f"$KV.{token}"
        await one.create_stream(f"KV_{token}", [f"{bucket}.>"], StreamLimits(last_only=True))
        held = await one.publish(f"{bucket}.a", b"one", expected_last=0, ttl_s=1.0)
        with pytest.raises(SwapLostError):
            await other.publish(f"{bucket}.a", b"other", expected_last=0, ttl_s=1.0)
        renewed = await one.publish(f"{bucket}.a", b"one", expected_last=held, ttl_s=1.0)
        assert renewed > held
        with pytest.raises(SwapLostError):
            await one.publish(f"{bucket}.a", b"stale", expected_last=held, ttl_s=1.0)
        await one.publish(f"{bucket}.b", b"for ever", expected_last=0)
        last = await one.last(f"KV_{token}", f"{bucket}.a")
        assert last is not None
        assert (last.seq, last.payload) == (renewed, b"one")

        while await other.last(f"KV_{token}", f"{bucket}.a") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        with pytest.raises(SwapLostError):
            await one.publish(f"{bucket}.a", b"late", expected_last=renewed, ttl_s=1.0)
        assert await other.publish(f"{bucket}.a", b"other", expected_last=0, ttl_s=1.0) > renewed
        kept = await one.last(f"KV_{token}", f"{bucket}.b")
        assert kept is not None
        assert kept.payload == b"for ever"

    play(scenario)


def test_a_stream_of_last_messages_keeps_one_for_each_subject(play: Play) -> None:
    async def scenario(client: Connect, token: str) -> None:
        bus = await client()
        limits = StreamLimits(last_only=True)
        await bus.create_stream(token, [f"{token}.>"], limits)
        await bus.create_stream(token, [f"{token}.>"], limits)
        for number in range(3):
            await bus.publish(f"{token}.a", b"%d" % number)
            await bus.publish(f"{token}.b", b"%d" % number)
        found = await take(bus.read(token, [f"{token}.>"], 1), 2)
        assert [(m.subject, m.seq, m.payload) for m in found] == [
            (f"{token}.a", 5, b"2"),
            (f"{token}.b", 6, b"2"),
        ]
        with pytest.raises(BusError, match="last_only"):
            await bus.create_stream(token, [f"{token}.>"], StreamLimits())

    play(scenario)


def test_a_time_to_live_is_a_second_at_least_and_not_for_the_tape(play: Play) -> None:
    async def scenario(client: Connect, token: str) -> None:
        bus = await client()
        await bus.create_stream(token, [f"{token}.>"], LIMITS)
        with pytest.raises(BusError):
            await bus.publish(f"{token}.a", b"", ttl_s=0.5)
        with pytest.raises(BusError):
            await bus.publish(f"{token}.a", b"", ttl_s=2.0)
        assert await bus.last(token, f"{token}.a") is None

    play(scenario)


def test_a_stream_that_keeps_what_is_old_takes_nothing_when_full(play: Play) -> None:
    async def scenario(client: Connect, token: str) -> None:
        bus = await client()
        limits = StreamLimits(max_bytes=20_000, keep_old=True)
        await bus.create_stream(token, [f"{token}.>"], limits)
        await bus.create_stream(token, [f"{token}.>"], limits)
        assert (await bus.filled(token))[:2] == (0, 20_000)
        taken, refusal = 0, None
        while refusal is None:
            try:
                await bus.publish(f"{token}.{taken % 2}", bytes(1000), msg_id=f"id-{taken}")
                taken += 1
            except BusUnavailableError as error:
                refusal = error
        assert "is full" in refusal.message
        assert 15 <= taken <= 20
        filled = await bus.filled(token)
        assert 0.75 * filled.max_bytes < filled.size_bytes <= filled.max_bytes == 20_000
        assert [m.seq for m in await take(bus.read(token, [f"{token}.>"], 1), 1)] == [1]
        # A repeat of what is there is no new message; and once there is room, all goes on.
        assert await bus.publish(f"{token}.0", bytes(1000), msg_id="id-0") == 1
        await bus.trim(token, f"{token}.0", taken)
        assert await bus.publish(f"{token}.0", bytes(1000), msg_id="new") == taken + 1
        with pytest.raises(BusError, match="keep_old"):
            await bus.create_stream(token, [f"{token}.>"], limits._replace(keep_old=False))
        unlimited = StreamLimits()
        await bus.create_stream(f"{token}-u", [f"{token}u.>"], unlimited)
        assert (await bus.filled(f"{token}-u")).max_bytes == 0

    play(scenario)
