"""The streams of a run are as the configuration says, and stay so."""

import asyncio
from collections.abc import Callable
from typing import Any

import nats
import pytest
from harness import World

from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol import names
from diloco.common.protocol.errors import Exit

BUS = {
    "duplicate_window_s": 60.0,
    "tape_max_bytes": 50_000_000,
    "ops_max_age_s": 7200.0,
    "ops_max_bytes": 1_000_000,
}


async def configurations(url: str, run: str) -> dict[str, Any]:
    """Returns the server's configurations of the run's streams."""
    client = await nats.connect(url)
    try:
        streams = names.streams(run)
        return {s: (await client.jetstream().stream_info(s)).config for s in streams}
    finally:
        await client.close()


def test_create_makes_the_streams_and_never_changes_them(
    new_world: Callable[..., World], nats_server: NatsServer
) -> None:
    world = new_world(bus={"url": nats_server.url, **BUS})
    run = world.name
    found = asyncio.run(configurations(world.url, run))
    tape, ops, leases = found.values()
    assert (tape.max_bytes, tape.discard, tape.max_age or 0) == (50_000_000, "new", 0)
    assert (ops.max_bytes, ops.discard, ops.max_age) == (1_000_000, "old", 7200.0)
    assert (leases.max_msgs_per_subject, leases.allow_msg_ttl) == (1, True)
    for stream in found.values():
        assert stream.num_replicas == 1
        assert stream.duplicate_window == 60.0
        assert stream.max_msg_size == 1 << 20
        assert stream.storage == "file"

    other = {**BUS, "tape_max_bytes": 60_000_000, "duplicate_window_s": 90.0}
    path = world.variant("other", {"bus": other})
    again = world.start("create", "run", "create", "--config", str(path))
    assert again.wait() == Exit.REFUSED
    assert "exists with other settings" in again.log()
    assert "max_bytes is 50000000, not 60000000" in again.log()
    assert "duplicate_window_s is 60.0, not 90.0" in again.log()
    world.processes.remove(again)
    assert asyncio.run(configurations(world.url, run)) == found


@pytest.mark.parametrize("part", ["ops_max_age_s", "ops_max_bytes"])
def test_a_difference_in_the_bounded_stream_is_named_too(
    new_world: Callable[..., World], nats_server: NatsServer, part: str
) -> None:
    world = new_world(bus={"url": nats_server.url, **BUS})
    path = world.variant("other", {"bus": {part: 100_000}})
    again = world.start("create", "run", "create", "--config", str(path))
    assert again.wait() == Exit.REFUSED
    assert f"{part.removeprefix('ops_')} is" in again.log()
    world.processes.remove(again)
