"""A loop of one's own in the kernel of a notebook: `make test-extras` has one."""

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import ENDLESS, PATIENCE_S, environment

manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")

BEGIN = """
import asyncio, signal, time
import numpy as np
import diloco
assert asyncio.get_running_loop().is_running()
like = {"w": np.zeros((16, 16), np.float32), "b": np.zeros(16, np.float32)}
handler = signal.getsignal(signal.SIGINT)
diloco.create("run.toml", like)
"""
JOINED = 'diloco.join("run.toml", learner="a", like=like)'
LOOP = """
print("in the loop", flush=True)
while not island.done:
    time.sleep(0.01)
    params = island.step(params, loss=1.0)
"""
WHOLE = f"""
with {JOINED} as island:
    params = island.params
    {LOOP.strip().replace(chr(10), chr(10) + "    ")}
print("left at", island.position)
"""


class Kernel:
    """A kernel with its client."""

    def __init__(self, cwd: str) -> None:
        self._manager = manager.KernelManager(kernel_name="python3")
        self._manager.start_kernel(env=environment(), cwd=cwd)
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE_S)

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def run(self, code: str, interrupt_at: str | None = None) -> dict[str, str]:
        """Returns a cell's output and error; interrupts the cell once it has printed something."""
        asked = self._client.execute(code)
        said = {"stdout": "", "stderr": "", "error": ""}
        deadline_s, interrupted = time.monotonic() + PATIENCE_S, False
        while True:
            assert time.monotonic() < deadline_s, said
            if interrupt_at is not None and interrupt_at in said["stdout"] and not interrupted:
                self._manager.interrupt_kernel()
                interrupted = True
            try:
                message: dict[str, Any] = self._client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "stream":
                said[content["name"]] += content["text"]
            elif kind == "error":
                said["error"] = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return said


@pytest.fixture
def kernel(new_world: Callable[..., Any]) -> Iterator[Kernel]:
    run = {**ENDLESS, "tokens_per_step": 8}
    world = new_world(create=False, run=run, learner={"drain_timeout_s": 0.5})
    del world.document["task"]
    world.document["sync"] = {"interval_steps": 4, "fragments": 2, "min_steps": 2}
    world.variant("run", {})
    kernel = Kernel(str(world.folder))
    try:
        yield kernel
    finally:
        kernel.close()


def test_a_loop_in_a_notebook_ends_by_the_kernels_interrupt(kernel: Kernel) -> None:
    assert not kernel.run(BEGIN)["error"]
    said = kernel.run(WHOLE, interrupt_at="in the loop")
    assert not said["error"], said
    # What the cell prints is its own; lines for people go to standard error.
    assert [line[:7] for line in said["stdout"].splitlines()] == ["in the ", "left at"]
    assert "started: position 0" in said["stderr"]
    assert "left: why asked to" in said["stderr"]
    # Entered and left in cells of their own: the learner stays when a cell between is interrupted.
    said = kernel.run(f"place = {JOINED}; island = place.__enter__(); params = island.params")
    assert "started" in said["stderr"]
    assert kernel.run(LOOP, interrupt_at="in the loop")["error"] == "KeyboardInterrupt"
    assert not kernel.run("for _ in range(9): params = island.step(params, loss=1.0)")["error"]
    assert not kernel.run("assert not island.done; place.__exit__(None, None, None)")["error"]
    said = kernel.run('assert signal.getsignal(signal.SIGINT) is handler\ndiloco.load("run.toml")')
    assert not said["error"]
