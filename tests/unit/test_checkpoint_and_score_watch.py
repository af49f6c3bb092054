"""Held-out loss as a metric: of the scores in the store, whoever has kept them."""

import asyncio
import dataclasses
import time

import structlog
from runlab import RUN, Lab

from diloco.aggregator.checkpoint import mark
from diloco.aggregator.checkpoint_and_score_watch import CheckpointWatch, ScoreWatch
from diloco.common.process import log
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import StoreUnavailableError
from diloco.common.storage.checkpoint_files import checkpoints
from diloco.run.model.evaluate import keep


def score(lab: Lab, at_s: float, loss: float, epoch: int = 0) -> None:
    """Keep a score, as `diloco evaluate` does."""
    made = wire.Score(
        run=RUN, epoch=epoch, versions=(1,), record_seqs=(int(at_s),), global_step=int(at_s),
        tokens=8, at_s=at_s, loss=loss,
    )  # fmt: skip
    asyncio.run(keep(lab.context, made))


def shown(lab: Lab) -> dict[str, float]:
    """The figures of held-out loss, by their labels."""
    exposed = lab.context.metrics.exposition().decode()
    lines = [line for line in exposed.splitlines() if line.startswith("diloco_run_held_out")]
    return {line.split("{")[-1].rpartition(" ")[0].rstrip("}"): float(line.split()[-1])
            for line in lines}  # fmt: skip


def test_first_least_and_newest_score_are_told() -> None:
    lab = Lab()
    watch = ScoreWatch(lab.context)
    asyncio.run(watch.look())
    assert shown(lab) == {}
    for at_s, loss in ((10.0, 5.0), (20.0, 2.0), (30.0, 3.0)):
        score(lab, at_s, loss)
    score(lab, 40.0, 0.1, epoch=1)  # of a tape that is lost
    asyncio.run(watch.look())
    assert shown(lab) == {
        'which="first"': 5.0, 'which="best"': 2.0, 'which="newest"': 3.0,
        "diloco_run_held_out_step": 30.0,
    }  # fmt: skip
    # Whoever cleans up the store takes nothing from what is known.
    for info in lab.store.list(names.scores_prefix(RUN)):
        lab.store.delete(info.name)
    score(lab, 50.0, 1.5)
    asyncio.run(watch.look())
    assert shown(lab)['which="newest"'] == shown(lab)['which="best"'] == 1.5
    assert shown(lab)['which="first"'] == 5.0


def test_a_checkpoint_of_a_clock_that_is_ahead_does_not_put_off_the_next(run_async) -> None:
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        ahead = dataclasses.replace(lab.context.runtime, clock=lambda: time.time() + 43_200)
        watch = CheckpointWatch(lab.context, 0.05)
        async with lab.aggregating():
            await lab.join("a")
            await lab.send("a")
            await mark(dataclasses.replace(lab.context, runtime=ahead))
            await watch.look()
            await lab.send("a")
            await asyncio.sleep(0.1)
            await watch.look()
        assert len(checkpoints(lab.store, RUN)) == 2

    run_async(scenario())


def test_a_bug_in_one_check_does_not_end_the_checks() -> None:
    class Broken(ScoreWatch):
        async def _look(self) -> None:
            raise MemoryError

    with structlog.testing.capture_logs() as logged:
        watch = Broken(dataclasses.replace(Lab().context, logger=log.get()))
        for _ in range(2):
            asyncio.run(watch.look())
    assert [entry["event"] for entry in logged] == ["check_broke"]


def test_what_cannot_be_read_is_told_once_and_is_no_failure() -> None:
    class Away(type(Lab().store)):
        def list(self, prefix: str) -> list[object]:
            raise StoreUnavailableError("the store is away")

    lab = Lab()
    lab.store.put(names.score_object(RUN, 0, 1, "0" * 32), b"rubbish")
    asyncio.run(ScoreWatch(lab.context).look())
    assert shown(lab) == {}
    with structlog.testing.capture_logs() as logged:
        watch = ScoreWatch(dataclasses.replace(lab.context, store=Away(), logger=log.get()))
        asyncio.run(watch.look())
        asyncio.run(watch.look())
    assert [entry["event"] for entry in logged] == ["scores_unread"]
