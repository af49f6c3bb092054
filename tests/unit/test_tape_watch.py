"""The warning before the tape is full: in the aggregator's log, and by the doctor."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from diloco.aggregator import tape_watch
from diloco.aggregator.tape_watch import watch_tape
from diloco.common.process.metrics import Metrics
from diloco.common.storage.bus import Filled, MemoryBus, StreamLimits
from diloco.judge import doctor_findings
from diloco.run.health_findings import tape_fill

LIMITS = StreamLimits(max_bytes=100_000, keep_old=True)


async def watched(bus: MemoryBus, fill: list[int]) -> list[dict[str, Any]]:
    """Returns the log lines while so many bytes come one after the other."""
    with structlog.testing.capture_logs() as logs:
        context: Any = SimpleNamespace(
            bus=bus, tape="tape", logger=structlog.get_logger(), metrics=Metrics()
        )
        watching = asyncio.ensure_future(watch_tape(context))
        for size in fill:
            await asyncio.sleep(0.02)
            await bus.publish("t", bytes(size))
        await asyncio.sleep(0.02)
        watching.cancel()
    return logs


def test_it_is_said_at_80_percent_and_with_each_5_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_watch, "LOOK_S", 0.001)

    async def scenario() -> None:
        bus = MemoryBus()
        await bus.create_stream("tape", ["t"], LIMITS)
        assert await watched(bus, [50_000, 29_000]) == []
        logs = await watched(bus, [2_000, 1_000, 1_000, 4_000, 500])
        assert [(log["event"], log["log_level"], log["size_bytes"]) for log in logs] == [
            ("tape_nearly_full", "warning", 81_001 + 2),
            ("tape_nearly_full", "warning", 87_000 + 6),
        ]
        assert logs[0]["max_bytes"] == 100_000

    asyncio.run(scenario())


def test_nothing_is_said_of_a_tape_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_watch, "LOOK_S", 0.001)

    async def scenario() -> None:
        bus = MemoryBus()
        await bus.create_stream("tape", ["t"], StreamLimits())
        assert await watched(bus, [900_000]) == []

    asyncio.run(scenario())


def test_the_doctor_says_how_full_it_is() -> None:
    assert list(tape_fill(10**9, 0)) == []
    assert [f.severity for f in tape_fill(79, 100)] == ["ok"]
    (finding,) = tape_fill(80, 100)
    assert finding.severity == "warning"
    assert finding.runbook == "runbooks/tape-full.md"


@pytest.mark.parametrize(
    ("taken", "most", "said"),
    [(799, 0, ""), (800, 0, "the server allows 1000, unless its account"), (800, 65_536, ""),
     (60_000, 65_536, "the server allows 65536:")],
)  # fmt: skip
def test_the_doctor_says_how_many_read_it(taken: int, most: int, said: str) -> None:
    found = list(doctor_findings.readers(Filled(0, 0, taken, most)))
    assert [one.severity for one in found] == ["warning"] * bool(said)
    assert all(said in one.sentence for one in found)
