"""A checkpoint knows who is shut out when it is made, whatever the records already know."""

import asyncio

import pytest
from runlab import RUN, Lab

from diloco.aggregator import checkpoint
from diloco.aggregator.owner.quarantine_messages import quarantine, quarantined_learners
from diloco.common.storage import checkpoint_files


def kept(lab: Lab, name: str) -> list[tuple[str, ...]]:
    """Returns the quarantined learners of each fragment in a checkpoint."""
    return [r.policy.quarantined for r in checkpoint_files.load_file(lab.store, RUN, name).records]


@pytest.mark.parametrize("heard", [True, False], ids=["in a verdict", "by no record yet"])
def test_a_checkpoint_keeps_who_is_shut_out(heard):
    async def story() -> None:
        lab = Lab(fragments=2)
        await lab.create()
        async with lab.aggregating():
            for learner in ("good", "bad"):
                await lab.join(learner)
                await lab.send(learner, 0)
            await quarantine(lab.context, "bad", active=True, reason="test")
            if heard:
                record = await lab.send("bad", 0)
                assert [taken.reason for taken in record.rejected] == ["quarantined"]
        assert await quarantined_learners(lab.context) == {"bad"}
        marked = await checkpoint.mark(lab.context)
        assert kept(lab, marked.name) == [("bad",), ("bad",)]
        await quarantine(lab.context, "bad", active=False, reason="test")
        marked = await checkpoint.mark(lab.context)
        assert kept(lab, marked.name) == [(), ()]

    asyncio.run(story())
