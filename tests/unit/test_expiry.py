"""An aggregator ends the life of a learner that holds shares of the data and is silent."""

import asyncio
import contextlib
from dataclasses import replace

from runlab import RUN, Lab
from test_dashboard import beat

from diloco.aggregator.context import Context
from diloco.aggregator.core.members import LastHeard
from diloco.aggregator.owner.liveness import Expiry, LivenessWatch, reached_before
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.protocol.layout import TensorHint
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.sequences import first_sequence
from diloco.common.storage.bus import StreamLimits
from diloco.common.storage.data_share_allocation import EXPIRY, lost_batches
from diloco.common.storage.tape import data_reached


async def claim(lab: Lab, learner: str, what: str, share: int = 0) -> None:
    word = wire.Claim(
        run=RUN, learner=learner, incarnation=lab.lives[learner], what=what, shares=3, batches=40,
        share=share, first=0, position=0, lost=(),
    )  # fmt: skip
    await lab.bus.publish(names.claim(RUN, learner), wire.encode(word))


async def claims(lab: Lab, learner: str) -> list[wire.Claim]:
    found = []
    last = await lab.bus.last_sequence(lab.context.tape)
    subjects = [names.claim(RUN, learner)]
    for seq in await lab.on_tape(names.claim(RUN, learner)):
        assert seq <= last
        async for message in lab.bus.read(lab.context.tape, subjects, seq):
            found.append(wire.decode(wire.Claim, message.payload))
            break
    return found


def test_what_the_silent_still_send_is_rejected_and_their_shares_are_free(run_async):
    async def scenario() -> None:
        lab = Lab(fragments=2)
        await lab.create()
        last_heard = LastHeard(0.0)
        async with lab.aggregating():
            for learner in ("a", "b"):
                await lab.join(learner)
                await claim(lab, learner, "begin")
            await claim(lab, "a", "claim", 1)
            await claim(lab, "b", "claim", 2)
            await lab.send("a", 0)
            late = lab.upload("a", 1)
            last_heard.beat("a", lab.lives["a"], 1.0, 2.0)
            watching = asyncio.ensure_future(Expiry(lab.context, last_heard).watch())
            # Nobody is heard: it is the bus that is silent, and nobody's life is ended.
            await asyncio.sleep(0.2)
            assert len(await claims(lab, "a")) == 2
            for now_s in range(2, 700):
                last_heard.beat("b", lab.lives["b"], float(now_s), 2.0)

            async def ended() -> bool:
                return len(await claims(lab, "a")) == 3

            await lab.until(ended, "its life is ended")
            *_, end = await claims(lab, "a")
            assert (end.what, end.position, end.lost) == ("end", 8, (0, 8))
            assert end.incarnation > lab.lives["a"]
            # Its process lives on, and announces what it had.
            await lab.announce(late)
            record = await lab.answered(late)
            (refused,) = record.rejected
            assert refused.reason == Reason.SUPERSEDED
            assert len(await claims(lab, "b")) == 2
            await cancel(watching)

    run_async(scenario())


def test_what_counts_is_what_was_announced_on_this_tape_before_the_life_was_ended(run_async):
    async def scenario() -> None:
        lab = Lab(fragments=2)
        await lab.create()
        life = await lab.join("a")

        async def leave(position: int, incarnation: int) -> None:
            word = wire.Leave(
                run=RUN, learner="a", incarnation=incarnation, position=position, fragments=(0,)
            )
            await lab.bus.publish(names.leave(RUN, "a"), wire.encode(word))

        other_tape = first_sequence(1) + 1
        sent = lab.upload("a", 0)
        await lab.announce(sent)
        await leave(9, life)
        await leave(99, other_tape)
        await lab.announce(lab.upload("a", 1).model_copy(update={"epoch": 1, "position": 99}))
        late = lab.upload("a", 0).model_copy(update={"position": 99})
        newer = await lab.join("a")
        # Of a superseded life: it will be rejected.
        await lab.announce(late)
        await leave(99, life)
        joined = await lab.join("a")
        await lab.announce(lab.upload("a", 0).model_copy(update={"position": 99}))
        await leave(99, newer)
        assert await reached_before(lab.context, "a", joined, 0) == {0: 9, None: 0}

    run_async(scenario())


def test_work_of_earlier_tapes_is_not_lost(run_async):
    async def scenario() -> None:
        lab = Lab(fragments=2)
        context, tape = lab.context, lab.context.tape
        await lab.bus.create_stream(tape, names.tape_subjects(RUN), StreamLimits())
        specification = wire.Specification(
            run=RUN, epoch=0, positions={"a": 500}, layout=context.layout.digest,
            settings=context.settings.model_dump(), constants=None, created_at_s=1.0,
            positions_object=None,
        )  # fmt: skip
        await lab.bus.publish(names.spec(RUN), wire.encode(specification))
        await lab.join("a")
        await claim(lab, "a", "begin")
        sent = lab.upload("a").model_copy(update={"position": 508})
        await lab.bus.publish(names.update(RUN, "a", 0), wire.encode(sent))
        expiry = Expiry(context, LastHeard(0.0))
        (begin,) = await claims(lab, "a")
        expiry._holdings.apply_claim(begin, lab.lives["a"] + 1)
        with contextlib.suppress(TimeoutError):
            # It would wait for its own word, which nobody reads to it here.
            await asyncio.wait_for(expiry._expire("a"), 0.5)
        *_, end = await claims(lab, "a")
        assert (end.what, end.position, end.lost) == ("end", 508, (0, 8))

    run_async(scenario())


def test_a_leave_of_some_fragments_says_nothing_of_others(run_async):
    async def scenario() -> None:
        lab = Lab(fragments=3)
        await lab.create()
        life = await lab.join("a")
        for position, fragments in ((9, (0,)), (10, (1,)), (7, ())):
            word = wire.Leave(
                run=RUN, learner="a", incarnation=life, position=position, fragments=fragments
            )
            await lab.bus.publish(names.leave(RUN, "a"), wire.encode(word))
        joined = await lab.join("a")
        reached = {None: 7, 0: 9, 1: 10}
        assert await data_reached(lab.context, "a") == reached
        assert await reached_before(lab.context, "a", joined, 0) == reached
        assert lost_batches(10, reached, 3) == (1, 0, 3)

    run_async(scenario())


def in_modules(name: str, _shape: tuple[int, ...]) -> TensorHint:
    return TensorHint(module=f"of-{name}")


def test_a_life_that_is_ended_held_what_its_join_says_and_lost_nothing_else(run_async):
    async def scenario() -> None:
        lab = Lab(fragments=2, hint=in_modules)
        await lab.create()
        context = lab.context
        first, second = (fragment.module for fragment in context.layout.fragments)
        await lab.join("a", holds=(first,))
        await claim(lab, "a", "begin")
        await lab.announce(lab.upload("a", 0).model_copy(update={"position": 8}))
        expiry = Expiry(context, LastHeard(0.0))
        (begin,) = await claims(lab, "a")
        expiry._holdings.apply_claim(begin, lab.lives["a"] + 1)
        with contextlib.suppress(TimeoutError):
            # It would wait for its own word, which nobody reads to it here.
            await asyncio.wait_for(expiry._expire("a"), 0.5)
        *_, end = await claims(lab, "a")
        assert (end.what, end.position, end.lost) == ("end", 8, (0, 0))
        last = await lab.bus.last(context.tape, names.join(RUN, "a"))
        assert wire.decode(wire.Join, last.payload).holds == (first,)
        # A life that holds the other module lost no batch of it, as the one before had none of it.
        await lab.join("b", holds=(first,))
        await lab.announce(lab.upload("b", 0).model_copy(update={"position": 8}))
        await lab.join("b", holds=(second,))
        assert await data_reached(context, "b") == {None: 0, 0: 8, 1: 8}

    run_async(scenario())


def test_heartbeats_of_a_superseded_life_keep_no_shares(run_async):
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        last_heard = LastHeard(0.0)
        older = await lab.join("a")
        for share, learner in enumerate(("a", "b")):
            await lab.join(learner)
            await claim(lab, learner, "begin")
            await claim(lab, learner, "claim", share)
        watching = asyncio.ensure_future(Expiry(lab.context, last_heard).watch())
        for now_s in range(700):
            last_heard.beat("a", older, float(now_s), 2.0)

        async def ended() -> bool:
            return len(await claims(lab, "b")) == 3

        # Holders are asked about in the order of their first claims.
        await lab.until(ended, "the life of one that is never heard is ended")
        assert len(await claims(lab, "a")) == 3
        await cancel(watching)

    run_async(scenario())


def test_the_last_word_of_a_life_that_has_failed_is_no_sign_of_life(run_async):
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        lives = {name: await lab.join(name) for name in ("a", "b")}
        watch = LivenessWatch(lab.context, ())
        watching = asyncio.ensure_future(watch.watch())
        began_s = watch.last_heard.newest_s

        async def heard() -> bool:
            await beat(lab, "a", lives["a"], state="failed")
            await beat(lab, "b", lives["b"])
            return watch.last_heard.newest_s > began_s

        await lab.until(heard, "heartbeats are read")
        await beat(lab, "b", lives["b"])
        assert [*watch.last_heard._heard_at_s] == ["b"]
        await cancel(watching)

    run_async(scenario())


def test_the_lives_of_a_tape_that_came_in_its_place_are_not_an_aggregators_to_end(run_async):
    async def scenario() -> None:
        lab = Lab(fragments=2)
        await lab.create()
        life = await lab.join("a")
        begin = wire.Claim(
            run=RUN, learner="a", incarnation=life, what="begin", shares=3, batches=40,
            share=0, first=0, position=0, lost=(),
        )  # fmt: skip

        async def expire_by(context: Context) -> int:
            """Messages that it adds."""
            expiry = Expiry(context, LastHeard(0.0))
            expiry._holdings.apply_claim(begin, life + 1)
            before = await lab.bus.last_sequence(context.tape)
            with contextlib.suppress(TimeoutError):
                # It would wait for its own word, which nobody reads to it here.
                await asyncio.wait_for(expiry._expire("a"), 0.5)
            return await lab.bus.last_sequence(context.tape) - before

        assert await expire_by(replace(lab.context, epoch=lab.context.epoch + 1)) == 0
        # On its own tape: join, leave and end.
        assert await expire_by(lab.context) == 3

    run_async(scenario())


def test_a_life_that_an_aggregator_has_begun_to_end_is_left_to_it_until_it_has_died(run_async):
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        context = replace(lab.context, share_expiry_s=2.0)
        for share, learner in enumerate(("a", "b")):
            await lab.join(learner)
            await claim(lab, learner, "begin")
            await claim(lab, learner, "claim", share)
        # An aggregator has died between its join, in b's name, and the end.
        word = wire.Join(run=RUN, learner="b", layout=context.layout.digest, host="aggregator x")
        await lab.bus.publish(names.join(RUN, "b"), wire.encode(word), msg_id=f"{EXPIRY}1")
        last_heard = LastHeard(0.0)
        for now_s in range(700):
            last_heard.beat("c", 1, float(now_s), 2.0)
        watching = [asyncio.ensure_future(Expiry(context, last_heard).watch()) for _ in range(3)]

        async def ended() -> bool:
            return all([len(await claims(lab, learner)) == 3 for learner in ("a", "b")])

        await lab.until(ended, "both lives are ended")
        assert len(await lab.on_tape(names.join(RUN, "a"))) == 2
        log = lab.bus.broker.stream(context.tape).log
        _, begun, taken_up = (log[seq] for seq in await lab.on_tape(names.join(RUN, "b")))
        assert taken_up.time_s - begun.time_s >= context.share_expiry_s
        await cancel(*watching)

    run_async(scenario())
