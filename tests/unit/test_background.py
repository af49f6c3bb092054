"""The training thread waits for the event loop, and not for ever where the learner ends."""

import asyncio
import threading
import time

import pytest

from diloco.common.process.signals import AskedToStopError
from diloco.common.protocol.errors import SupersededError
from diloco.learner.background import Background


@pytest.fixture
def background():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield Background(loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def later(seconds):
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() > until_s


async def for_ever(ended):
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


def test_a_start_that_waits_ends_with_the_error_of_another_task(background):
    """Such as a store that is away, while another process takes the learner's name."""
    ended = threading.Event()
    timer = threading.Timer(0.1, background.fail, [SupersededError("another process")])
    timer.start()
    with pytest.raises(SupersededError):
        background.call_unless_failed(for_ever(ended), later(10.0))
    assert ended.is_set()


def test_a_start_that_waits_ends_when_it_is_asked_to(background):
    with pytest.raises(AskedToStopError):
        background.call_unless_failed(for_ever(threading.Event()), lambda: True)


def test_what_is_done_in_time_is_given(background):
    async def soon():
        return 7

    assert background.call_unless_failed(soon()) == 7
