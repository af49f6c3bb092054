"""A daemon that has left ends, whatever a thread of its own waits for."""

import subprocess
import sys

HANGS = """
import asyncio, threading
from diloco.common.process import log

async def leave():
    asyncio.ensure_future(asyncio.to_thread(threading.Event().wait))
    await asyncio.sleep(0)
    log.end_within(0.2)

asyncio.run(leave())
"""


def test_a_thread_that_hangs_holds_no_process_for_ever():
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "shutdown_default_executor" in ended.stderr or "threading.py" in ended.stderr
