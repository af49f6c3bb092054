"""A learner claims shares of the data on the tape, also when others are faster."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_incarnation import made, specification
from test_publish import make_context

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    AccessDeniedError,
    BusError,
    NewTapeError,
    ReadFurtherError,
)
from diloco.common.protocol.layout import Tensor, TensorHint, make_layout
from diloco.common.protocol.sequences import first_sequence
from diloco.common.storage.bus import MemoryBus, StreamLimits
from diloco.common.storage.data_share_allocation import Sizes
from diloco.learner.background import Background
from diloco.learner.leading_host import say_end
from diloco.learner.wire import resume_position
from diloco.learner.wire.claims import Claims
from diloco.learner.wire.incarnation import Membership, join
from diloco.learner.wire.resume_position import ResumePosition, place_after_join

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


class FewClaims(MemoryBus):
    """A bus that takes ten claims."""

    claims = 0

    async def publish(self, subject, payload, **how):
        self.claims += ".claim." in subject
        if self.claims > 10:
            raise BusError("no more claims")
        return await super().publish(subject, payload, **how)


def test_a_life_that_meets_a_new_tape_claims_once(run_async):
    """Until it notices that the run was resumed, and ends, it would claim without a pause."""

    async def scenario():
        bus = FewClaims()
        context = await made(bus)
        life = await join(context, "here")
        background = Background(asyncio.get_running_loop())
        claims = Claims(
            context, lambda: False, life, ResumePosition(0, (0, 0)), background=background,
            told=lambda *_: None,
        )  # fmt: skip
        claims.divide(SIZES)
        await asyncio.wait_for(asyncio.to_thread(claims.at, 0), PATIENCE_S)
        await bus.remove_stream("diloco-r")
        await bus.create_stream(
            "diloco-r", names.tape_subjects("r"), StreamLimits(), first_seq=first_sequence(1)
        )
        with pytest.raises(NewTapeError, match="resumed on a new tape"):
            await asyncio.wait_for(asyncio.to_thread(all_of, claims), PATIENCE_S)
        await asyncio.to_thread(background.close)
        assert len(bus.broker.stream("diloco-r").log) == 1

    run_async(scenario())


def all_of(claims):
    """Reads all of a learner's batches, for ever."""
    position = 0
    while True:
        claims.at(position)
        position += 1


def said(life, what, position, share=0):
    word = wire.Claim(
        run="r", learner="learner-0", incarnation=life.incarnation, what=what, shares=SIZES.shares,
        batches=SIZES.batches, share=share, first=0, position=position, lost=(),
    )  # fmt: skip
    return names.claim("r", "learner-0"), wire.encode(word)


def test_a_life_begins_behind_the_claims_that_its_learner_has_ended(run_async):
    """With unsent work in a snapshot that the next life does not have."""

    async def scenario():
        bus = MemoryBus()
        context = await made(bus)
        await bus.publish(names.spec("r"), wire.encode(specification(context)))
        life = await join(context, "here")
        for word in (("begin", 0), ("claim", 0), ("claim", 4, 1), ("end", 6)):
            await bus.publish(*said(life, *word))
        second = await join(context, "here")
        place = await place_after_join(context, second.incarnation)
        # Nor does a third life, if the second has claimed and sent nothing.
        for word in (("begin", 6), ("claim", 6, 2)):
            await bus.publish(*said(second, *word))
        third = await join(context, "here")
        return place, await place_after_join(context, third.incarnation)

    for place in run_async(scenario()):
        assert (place.position, place.lost) == (6, (6, 6))


def test_what_the_life_before_did_not_hold_is_not_lost(run_async):
    """It has trained one of two modules, and ended its claims with its work unsent."""
    tensors = [Tensor(name=name, shape=(16,), dtype="float32") for name in "ab"]
    layout = make_layout(
        tensors, fragments=2, block=16, hint=lambda name, _: TensorHint(module=name)
    )

    async def scenario():
        bus = MemoryBus()
        context = replace(await made(bus), layout=layout)
        await bus.publish(names.spec("r"), wire.encode(specification(context)))
        life = await join(context, "here", holds=("a",))
        for word in (("begin", 0), ("claim", 0), ("end", 3)):
            await bus.publish(*said(life, *word))
        second = await join(context, "here", holds=("b",))
        return await place_after_join(context, second.incarnation)

    place = run_async(scenario())
    assert (place.position, place.lost) == (3, (3, 0))


def test_a_run_of_a_release_without_claims_needs_none(run_async):
    """Its stream takes none, and its learners' credentials let them publish none."""

    class Old(MemoryBus):
        async def last(self, stream, subject):
            if ".claim." in subject:
                raise AccessDeniedError(subject)
            return await super().last(stream, subject)

    async def scenario():
        bus = Old()
        subjects = [one for one in names.tape_subjects("r") if ".claim." not in one]
        await bus.create_stream("diloco-r", subjects, StreamLimits())
        context = make_context(bus)
        await bus.publish(names.spec("r"), wire.encode(specification(context)))
        life = await join(context, "here")
        return (await place_after_join(context, life.incarnation)).position

    assert run_async(scenario()) == 0


@pytest.mark.parametrize(("snapshot", "stated"), [(False, 8), (True, 0)])
def test_a_leave_that_spares_a_snapshot_counts_none_of_its_work_as_sent(
    run_async, snapshot, stated
):
    said = []

    class Says(SimpleNamespace):
        async def leave(self, position):
            said.append(("leave", position))

        async def end(self, position):
            said.append(("end", position))

    async def scenario():
        await say_end(Says(), Says(), 8, snapshot=snapshot)

    run_async(scenario())
    assert said == [("leave", stated), ("end", 8)]


def test_no_snapshot_is_gone_on_with_that_is_older_than_the_end_of_its_lifes_claims(monkeypatch):
    monkeypatch.setattr(resume_position, "carried", lambda *_: ())
    place, life = ResumePosition(6, ()), Membership(9, frozenset(), before=4)
    older, newest = (
        SimpleNamespace(incarnation=4, unsent=(), position=at, loss=2.5) for at in (5, 6)
    )
    assert place.fits(older, life, None, ()) is None
    assert place.fits(newest, life, None, ()) == ()
    # An earlier release made it.
    newest.loss = None
    assert place.fits(newest, life, None, ()) is None


def test_a_life_does_not_wait_for_batches_that_another_process_has_given_up(run_async):
    """That process joined before, and ended its claims once this one had read the tape."""

    async def scenario():
        bus = MemoryBus()
        context = await made(bus)
        before = await join(context, "there")
        life = await join(context, "here")
        for word in (("begin", 0), ("claim", 0), ("end", 3)):
            await bus.publish(*said(before, *word))
        background = Background(asyncio.get_running_loop())
        late = asyncio.get_running_loop().time() + PATIENCE_S
        claims = Claims(
            context, lambda: background.loop.time() > late, life, ResumePosition(2, ()),
            background=background, told=lambda *_: None,
        )  # fmt: skip
        claims.divide(SIZES)
        with pytest.raises(ReadFurtherError, match="up to batch 3, and said so after this one"):
            await asyncio.to_thread(claims.at, 2)
        await asyncio.to_thread(background.close)

    run_async(scenario())
