"""A training loop beside its life: what the loop's steps count in updates and in checkpoints."""

import asyncio
import contextlib
import threading

import jax.numpy as jnp
import numpy as np
import pytest
import structlog

from diloco.common.process.config import LearnerSection, RunSettings
from diloco.common.process.retry import Runtime
from diloco.common.protocol.errors import DilocoError
from diloco.common.protocol.layout import Tensor, make_layout
from diloco.common.storage.bus import MemoryBus
from diloco.common.storage.store import MemoryStore
from diloco.learner.background import Context
from diloco.learner.core import sync
from diloco.learner.core.events import Published, Ready, Start, Stop, sync_rules
from diloco.learner.core.handover import Arrived, Outgoing
from diloco.learner.library import Learner
from diloco.learner.life import Life
from diloco.learner.synchronizer import Meter, Planner, Synchronizer
from diloco.learner.tensors.send_and_adopt import Replica
from diloco.learner.wire.checkpoint_save_and_restore import COVERED_S, Saver, open_folder, restore

NAMES = ("w", "v")
LAYOUT = make_layout(
    [Tensor(name=name, shape=(32,), dtype="float32") for name in NAMES], fragments=2, block=16
)
LIKE = {name: np.zeros(32, np.float32) for name in NAMES}
SETTINGS = RunSettings.model_validate(
    {"run": {"name": "r", "steps": 99}, "sync": {"fragments": 2, "block": 16, "interval_steps": 6}}
)
TOKENS = 10


class Answered:
    """An outbox whose updates are on the tape, and answered by a verdict, at the next boundary."""

    def __init__(self) -> None:
        self.sent: list[Outgoing] = []
        self._arrived: list[Arrived] = []

    def __call__(self, word: Outgoing) -> None:
        self.sent.append(word)
        send, seq = word.send, 100 + len(self.sent)
        answer = Ready(send.fragment, seq, send.base_version, send.base_digest, 0, send.seq)
        self._arrived += [Arrived(Published(1.0, send.fragment, send.seq)), Arrived(answer)]

    def stop(self) -> None:
        self._arrived.append(Arrived(Stop()))

    def events(self, _wait_s: float = 0.0) -> list[Arrived]:
        arrived, self._arrived = self._arrived, []
        return arrived


def make_loop(position: int = 0, folder=None) -> tuple[Learner, Answered]:
    """A loop whose life begins at a batch; with a folder, each step makes a checkpoint."""
    context = Context(
        settings=SETTINGS, layout=LAYOUT, epoch=0, bus=MemoryBus(), store=MemoryStore(),
        runtime=Runtime(), logger=structlog.get_logger(), learner="a",
    )  # fmt: skip
    section = LearnerSection(checkpoint_dir=folder and str(folder))
    kept = open_folder(context, section)
    saver = Saver(context, section, kept, 7) if kept is not None else None
    outbox = Answered()
    rules = sync_rules(SETTINGS.sync)
    starts = (Start(0, "0" * 32, 1, 0), Start(0, "0" * 32, 2, 0))
    planner = Planner(
        rules=rules, state=sync.begin(rules, starts), inbox=outbox, tokens_per_step=TOKENS,
        clock=context.runtime.clock, checkpoint_due=lambda: saver is not None,
    )  # fmt: skip
    synchronizer = Synchronizer(
        replica=Replica(SETTINGS.sync, LAYOUT, LIKE, [np.zeros(32, np.float32)] * 2),
        position=position, tokens_per_step=TOKENS, boundaries=planner, outbox=outbox,
        meter=Meter("a", context.traffic), saver=saver, clock=context.runtime.clock,
    )  # fmt: skip
    life = Life(
        host=None, context=context, synchronizer=synchronizer, params=LIKE, leave_run=str,
        give_up=planner.give_up, shares=None,
        find=lambda like, _: restore(context, section, kept, like, lambda _, read: read()),
    )  # fmt: skip
    return Learner(life, threading.Event()), outbox


def train(loop: Learner, steps: int) -> None:
    params = loop.params
    for step in range(steps):
        moved = {name: jnp.full(32, 1.0 + step) for name in params}
        params = loop.step(moved, loss=1.0, save={"count": jnp.int32(step)})


@pytest.mark.parametrize("begins", [0, 7])
def test_an_updates_position_is_behind_all_batches_in_it(begins):
    loop, outbox = make_loop(begins)
    train(loop, 17)
    for fragment in range(2):
        steps, sent = 0, [one for one in outbox.sent if one.send.fragment == fragment]
        assert len(sent) >= 2
        for one in sent:
            steps += one.send.steps
            assert one.position == begins + steps
    assert loop.position == begins + 17


def test_tokens_of_checkpoints_count_on_from_life_to_life(tmp_path):
    for life in range(4):
        loop, _ = make_loop(folder=tmp_path)
        state = loop.restore({"count": jnp.int32(0)})
        assert int(state["count"]) == (2 if life else 0)
        meter = loop._synchronizer.meter
        assert (meter.local_step, meter.earlier_tokens) == (3 * life, 3 * life * TOKENS)
        train(loop, 3)
        loop._synchronizer.saver.close()


def test_at_the_runs_end_no_update_waits_for_a_snapshot(tmp_path, run_async):
    """None is made any more: what is sent last has to come within the last rounds."""
    loop, outbox = make_loop(folder=tmp_path)
    train(loop, 1)
    saver = loop._synchronizer.saver

    async def is_covered() -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COVERED_S / 40):
                await saver._coverage.cover(99)
                return True
        return False

    async def scenario() -> None:
        assert not await is_covered()
        outbox.stop()
        train(loop, 1)
        assert await is_covered()

    run_async(scenario())
    saver.close()


def test_a_loop_whose_step_was_interrupted_goes_no_further(monkeypatch):
    """As a notebook's cell that is stopped while the run is paused: it never got what it adopted."""
    loop, outbox = make_loop()
    train(loop, 5)
    turn = loop._synchronizer.turn

    def interrupted(trained):
        turn(trained)
        raise KeyboardInterrupt

    loop._synchronizer.turn = interrupted
    with pytest.raises(KeyboardInterrupt):
        train(loop, 1)
    loop._synchronizer.turn = turn
    sent = len(outbox.sent)
    with pytest.raises(DilocoError, match="was broken off"):
        train(loop, 1)
    monkeypatch.setattr(Life, "leave", lambda _life: "")
    loop.finish()
    assert len(outbox.sent) == sent
