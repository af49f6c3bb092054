"""Retries of every daemon: transient faults are waited out, and only those."""

import asyncio
import random

import pytest
import structlog

from diloco.common.process import tasks
from diloco.common.process.retry import FIRST_BACKOFF_S, LAST_BACKOFF_S, Runtime
from diloco.common.process.signals import AskedToStopError, unless_asked
from diloco.common.process.tasks import cancel, first_of, running_loop
from diloco.common.protocol.errors import (
    BusUnavailableError,
    ConfigError,
    ObjectLostError,
    StoreUnavailableError,
)


class Clock:
    """Virtual time: sleeping is what moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.sleeps_s: list[float] = []
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.sleeps_s.append(seconds)
        self.now_s += seconds

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Largest(random.Random):
    """Draws the upper end of every range, so that the backoff itself can be seen."""

    def uniform(self, a: float, b: float) -> float:
        return b


def attempts(*outcomes):
    """An attempt that raises or returns each of these in turn, and the list of what is left."""
    left = list(outcomes)

    async def attempt():
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return attempt, left


def retry(run_async, clock, attempt, *, rng=None, deadline_s=None, logger=None):
    runtime = Runtime(clock=clock, rng=rng or Largest())
    logger = logger or structlog.get_logger()
    return run_async(runtime.retry("the thing", attempt, logger=logger, deadline_s=deadline_s))


AWAY = BusUnavailableError("no answer")


def test_what_works_at_once_is_not_waited_for(run_async, clock):
    attempt, left = attempts("done")
    assert retry(run_async, clock, attempt) == "done"
    assert (left, clock.sleeps_s) == ([], [])


def test_a_passing_fault_is_tried_again_until_it_has_passed(run_async, clock):
    attempt, left = attempts(AWAY, StoreUnavailableError("full"), AWAY, "done", "never")
    assert retry(run_async, clock, attempt) == "done"
    assert left == ["never"]
    assert clock.sleeps_s == [0.1, 0.2, 0.4]


def test_the_backoff_doubles_up_to_its_end(run_async, clock):
    attempt, _ = attempts(*[AWAY] * 12, "done")
    retry(run_async, clock, attempt)
    doubled = [FIRST_BACKOFF_S * 2**n for n in range(12)]
    assert clock.sleeps_s == pytest.approx([min(s, LAST_BACKOFF_S) for s in doubled])
    assert clock.sleeps_s[-1] == LAST_BACKOFF_S


def test_the_jitter_is_over_the_whole_backoff(run_async, clock):
    """Full jitter: learners that lost the same server do not come back in step."""
    attempt, _ = attempts(*[AWAY] * 300, "done")
    retry(run_async, clock, attempt, rng=random.Random(1))
    late = clock.sleeps_s[10:]
    assert all(0 <= slept <= LAST_BACKOFF_S for slept in late)
    assert min(late) < 0.1 * LAST_BACKOFF_S
    assert max(late) > 0.9 * LAST_BACKOFF_S
    assert sum(late) / len(late) == pytest.approx(LAST_BACKOFF_S / 2, rel=0.15)


def test_a_lasting_error_ends_it(run_async, clock):
    attempt, left = attempts(AWAY, ConfigError("wrong key"), "never")
    with pytest.raises(ConfigError, match="wrong key"):
        retry(run_async, clock, attempt)
    assert left == ["never"]


@pytest.mark.parametrize("bug", [ValueError("bug"), KeyError("bug"), OSError("not ours")])
def test_bugs_are_not_swallowed(run_async, clock, bug):
    attempt, _ = attempts(bug, "never")
    with pytest.raises(type(bug), match=r"bug|not ours"):
        retry(run_async, clock, attempt)
    assert clock.sleeps_s == []


def test_cancelling_ends_it(clock):
    attempt, _ = attempts(AWAY, asyncio.CancelledError(), "never")
    runtime = Runtime(clock=clock, rng=Largest())

    async def cancelled():
        with pytest.raises(asyncio.CancelledError):
            await runtime.retry("the thing", attempt, logger=structlog.get_logger())

    asyncio.run(cancelled())


def test_a_fault_is_waited_for_no_longer_than_its_patience(run_async, clock):
    lost = ObjectLostError("gone")
    attempt, _ = attempts(lost, lost, "there")
    assert retry(run_async, clock, attempt) == "there"
    began_s = clock.now_s
    attempt, _ = attempts(*[lost] * 20)
    with pytest.raises(ObjectLostError):
        retry(run_async, clock, attempt)
    assert clock.now_s - began_s == pytest.approx(lost.patience_s, abs=10)
    # Only the time since it began counts, not that of an outage before.
    attempt, _ = attempts(*[AWAY] * 20, lost, lost, "there")
    assert retry(run_async, clock, attempt) == "there"


def test_the_deadline_ends_it_with_the_last_error(run_async, clock):
    last = BusUnavailableError("the last one")
    attempt, left = attempts(AWAY, AWAY, AWAY, last, "never")
    with pytest.raises(BusUnavailableError, match="the last one"):
        retry(run_async, clock, attempt, deadline_s=0.5)
    assert left == ["never"]
    assert clock.now_s - 1000.0 == pytest.approx(0.7)


def test_it_is_told_once_when_it_fails_and_once_when_it_works(run_async, clock):
    attempt, _ = attempts(AWAY, AWAY, "done")
    with structlog.testing.capture_logs() as told:
        retry(run_async, clock, attempt)
    assert [entry["event"] for entry in told] == ["waiting", "resumed"]
    assert told[0] | {"what": "the thing", "error": "no answer"} == told[0]
    assert told[1] | {"what": "the thing", "attempts": 3, "waited_s": 0.3} == told[1]


def test_nothing_is_told_of_what_works(run_async, clock):
    attempt, _ = attempts("done")
    with structlog.testing.capture_logs() as told:
        retry(run_async, clock, attempt)
    assert told == []


def test_a_blocking_call_runs_beside_the_loop(run_async):
    async def main():
        import threading

        where = await Runtime().call(threading.get_ident)
        assert where != threading.get_ident()
        assert await Runtime().call(max, 1, 2, key=lambda n: -n) == 1

    run_async(main())


# Tasks


async def forever(log: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        log.append(name)


def test_the_first_that_ends_ends_the_others(run_async):
    log: list[str] = []

    async def ends():
        await asyncio.sleep(0.01)

    run_async(first_of(ends(), forever(log, "a"), forever(log, "b")))
    assert sorted(log) == ["a", "b"]


def test_what_the_first_raises_is_raised(run_async):
    log: list[str] = []

    async def fails():
        await asyncio.sleep(0.01)
        raise ValueError("bug")

    with pytest.raises(ValueError, match="bug"):
        run_async(first_of(forever(log, "a"), fails()))
    assert log == ["a"]


def test_cancelling_all_of_them_leaves_none(run_async):
    log: list[str] = []

    async def main():
        before = asyncio.all_tasks()
        outer = asyncio.ensure_future(first_of(forever(log, "a"), forever(log, "b")))
        await asyncio.sleep(0.01)
        await cancel(outer)
        assert outer.cancelled()
        assert asyncio.all_tasks() == before

    run_async(main())
    assert sorted(log) == ["a", "b"]


def test_a_cancellation_that_was_forgotten_is_sent_again(run_async, monkeypatch):
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_S", 0.01)
    forgotten = []

    async def forgetful():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            forgotten.append(1)  # As `asyncio.wait_for` does whose answer came just now.
        await asyncio.Event().wait()

    async def main():
        task = asyncio.ensure_future(forgetful())
        await asyncio.sleep(0)
        async with asyncio.timeout(300):
            await cancel(task)
        assert task.cancelled()

    run_async(main())
    assert forgotten == [1]


def test_cancelled_tasks_are_waited_for_whatever_they_raise(run_async):
    ended = []

    async def slow():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)
            raise ValueError("while ending")

    async def main():
        task = asyncio.ensure_future(slow())
        await asyncio.sleep(0.01)
        await cancel(task)
        assert task.done()

    run_async(main())
    assert ended == [True]


def test_a_start_waits_until_somebody_asks_for_its_end(run_async):
    async def begin() -> str:
        return "begun"

    assert run_async(unless_asked(begin(), lambda: False)) == "begun"
    ended = []

    async def waits_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    answers = iter([False, False, True])
    with pytest.raises(AskedToStopError):
        run_async(unless_asked(waits_for_ever(), lambda: next(answers)))
    assert ended


def test_what_runs_on_a_thread_s_loop_is_cancelled_at_its_end():
    ended = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with running_loop() as loop:
        asyncio.run_coroutine_threadsafe(waits(), loop)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
    assert ended
    assert loop.is_closed()
