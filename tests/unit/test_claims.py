"""A learner claims shares of the data on the tape, also when others are faster."""

import asyncio

import pytest
from test_incarnation import made

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import BusError, NewTapeError
from diloco.common.protocol.sequences import first_sequence
from diloco.common.storage.bus import MemoryBus
from diloco.common.storage.data_share_allocation import Sizes
from diloco.learner.background import Background
from diloco.learner.wire.claims import Claims
from diloco.learner.wire.incarnation import Membership, join
from diloco.learner.wire.resume_position import ResumePosition

SIZES = Sizes(3, 4)
# Seconds after which a learner that waits is taken to wait for ever.
PATIENCE_S = 60.0


class BehindARival(MemoryBus):
    """Another learner claims, just before this bus's first claim, the share that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.rival: int | None = None

    async def publish(self, subject, payload, **how):
        if ".claim." in subject and self.rival is not None:
            word = wire.decode(wire.Claim, payload)
            if word.what == "claim":
                theirs, self.rival = {"learner": "rival", "incarnation": self.rival}, None
                for what in ("begin", "claim"):
                    said = word.model_copy(update={**theirs, "what": what})
                    await super().publish(names.claim("r", "rival"), wire.encode(said))
        return await super().publish(subject, payload, **how)


def test_who_loses_a_share_to_a_faster_learner_claims_another_one(run_async):
    async def scenario():
        bus = BehindARival()
        context = await made(bus)
        life = await join(context, "here")
        bus.rival = life.incarnation + 1
        granted = asyncio.Queue()
        background = Background(asyncio.get_running_loop())
        claims = Claims(
            context, lambda: False, life, ResumePosition(0, (0, 0)), background=background,
            told=lambda holding, end: granted.put_nowait((holding, end)),
        )  # fmt: skip
        claims.divide(SIZES)
        holding, end = await asyncio.wait_for(granted.get(), PATIENCE_S)
        await asyncio.to_thread(background.close)
        log = bus.broker.stream("diloco-r").log.values()
        said = [wire.decode(wire.Claim, m.payload) for m in log if ".claim." in m.subject]
        of_rival = next(word for word in said if (word.learner, word.what) == ("rival", "claim"))
        own = [word.share for word in said if (word.learner, word.what) == ("learner-0", "claim")]
        assert own[0] == of_rival.share
        assert own[1] == holding.share != of_rival.share
        assert end - holding.position == SIZES.batches

    run_async(scenario())


@pytest.mark.parametrize(
    ("joined_seq", "error", "says"),
    [
        (99, BusError, "sequence 99 was seen earlier"),
        (first_sequence(1) + 7, NewTapeError, "resumed on a new tape"),
    ],
    ids=["the server lost its end", "another tape"],
)
def test_a_life_whose_join_is_not_on_the_tape_claims_nothing(run_async, joined_seq, error, says):
    """No claim of such a life counts, so its claims would have no end."""

    async def scenario():
        bus = MemoryBus()
        context = await made(bus)
        background = Background(asyncio.get_running_loop())
        claims = Claims(
            context, lambda: False, Membership(joined_seq, frozenset()), ResumePosition(0, (0, 0)),
            background=background, told=lambda *_: None,
        )  # fmt: skip
        claims.divide(SIZES)
        with pytest.raises(error, match=says):
            await asyncio.wait_for(asyncio.to_thread(claims.at, 0), PATIENCE_S)
        await asyncio.to_thread(background.close)
        log = bus.broker.stream("diloco-r").log.values()
        said = [wire.decode(wire.Claim, m.payload).what for m in log if ".claim." in m.subject]
        assert said == ["begin"]

    run_async(scenario())
