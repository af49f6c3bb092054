"""A NATS server whose disk fills and is freed, on a small file system of its own."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import structlog
from small_disk import fill, small_disk

from diloco.common.process.config import RunSettings
from diloco.common.process.nats_server import NatsServer
from diloco.common.process.retry import Runtime
from diloco.common.protocol import names
from diloco.common.protocol.errors import BusUnavailableError
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.common.storage.bus import StreamLimits, jetstream
from diloco.common.storage.store import MemoryStore
from diloco.judge import doctor
from diloco.learner.background import Context, NoOtherHosts
from diloco.learner.synchronizer import Meter
from diloco.learner.wire.incarnation import Membership
from diloco.learner.wire.publish import Publisher, Uploader

RUN = "full"
LAYOUT = make_layout([Tensor(name="w", shape=(32,), dtype="float32")], fragments=1, block=16)


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.1)


async def scenario(server: NatsServer, disk: Path) -> None:
    bus = await jetstream.connect(server.url, name="island")
    ops, tape = names.ops_stream(RUN), names.tape_stream(RUN)
    bounded = StreamLimits(max_age_s=3600.0, max_bytes=1 << 20)
    await bus.create_stream(tape, names.tape_subjects(RUN), StreamLimits())
    await bus.create_stream(ops, names.ops_subjects(RUN), bounded)
    context = Context(
        settings=RunSettings.model_validate({"run": {"name": RUN, "steps": 9}}),
        layout=LAYOUT,
        epoch=0,
        bus=bus,
        store=MemoryStore(),
        runtime=Runtime(),
        logger=structlog.get_logger(),
        learner="island",
    )
    meter = Meter("island", context.traffic)
    uploader = Uploader(context, tensors=None)  # nothing is sent but heartbeats
    publisher = Publisher(
        context,
        lambda _event, _payload=None: None,
        uploader,
        NoOtherHosts(),
        Membership(1, frozenset()),
    )
    with structlog.testing.capture_logs() as logged:

        def said(event: str, level: str) -> bool:
            return any((e["event"], e["log_level"]) == (event, level) for e in logged)

        beating = asyncio.create_task(publisher.beat(lambda: meter.heartbeat(1), 0.2))
        try:
            heard = names.heartbeat(RUN, "island")
            while await bus.last(ops, heard) is None:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.1)
            fill(disk / "filler")
            await until(lambda: said("heartbeats_lost", "warning"))
            (disk / "filler").unlink()
            # Room alone does not mend the stream, which is what `doctor` says.
            with pytest.raises(BusUnavailableError, match="no answer"):
                await bus.publish(names.rejected(RUN, "a"), b"x")
            (finding,) = await doctor._probe_bus(context)
            assert finding.runbook == "runbooks/disk-full.md"
            assert "restarted" in finding.advice
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            await until(lambda: said("heartbeats_resumed", "info"))
            bus_finding, *_ = await doctor._probe_bus(context)
            assert (bus_finding.severity, bus_finding.about) == ("ok", "bus")
        finally:
            beating.cancel()
            await asyncio.wait({beating})
            await bus.close()


def test_a_full_disk_is_warned_of_and_a_restart_mends_what_room_does_not(
    tmp_path: Path, run_async: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    with small_disk(tmp_path / "disk", size="8m") as disk, NatsServer(disk / "nats") as server:
        run_async(scenario(server, disk))
