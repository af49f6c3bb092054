"""How aggregators divide fragments: `diloco.aggregator.core.ownership_division`, step by step until nothing moves."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runlab import RUN, Lab
from structlog.testing import capture_logs

from diloco.aggregator import leases
from diloco.aggregator.core.ownership_division import AggregatorTerms, divide
from diloco.aggregator.owner.owner import Owners
from diloco.aggregator.rollback import find_versions, roll_back
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names
from diloco.common.protocol.errors import BusUnavailableError, StoreUnavailableError
from diloco.common.storage.bus import MemoryBus
from diloco.run.watch import Watch

lives = st.lists(st.from_regex(r"[0-9a-f]{4}", fullmatch=True), min_size=1, max_size=6, unique=True)


def settle(members, holders, fragments):
    """Everybody takes steps, one after the other, until nobody has anything to do."""
    for moves in range(200):
        idle = True
        for me in members:
            found = divide(me, members, holders, fragments)
            assert all(holders[f] is None for f in found.acquire)
            assert all(holders[f] == me for f in found.release)
            for fragment in found.release:
                holders[fragment] = None
            for fragment in found.acquire:
                holders[fragment] = me
            idle = idle and not (found.acquire or found.release)
        if idle:
            return moves
    raise AssertionError("it never settles")


def counts(members, holders):
    return sorted(sum(holder == me for holder in holders.values()) for me in members)


@given(lives, st.integers(1, 40))
def test_shares_are_even_and_everything_is_owned(found, fragments):
    members = dict.fromkeys(found, AggregatorTerms())
    holders = dict.fromkeys(range(fragments))
    settle(members, holders, fragments)
    shares = counts(members, holders)
    assert None not in holders.values()
    assert shares[-1] - shares[0] <= 1


@given(lives, st.integers(1, 40), st.data())
def test_those_who_come_and_go_are_evened_out(found, fragments, data):
    members = dict.fromkeys(found, AggregatorTerms())
    holders = dict.fromkeys(range(fragments))
    settle(members, holders, fragments)
    gone = data.draw(st.sampled_from(found))
    kept = {f: h for f, h in holders.items() if h != gone}
    members = dict.fromkeys([me for me in members if me != gone] + ["new"], AggregatorTerms())
    holders = {f: (None if h == gone else h) for f, h in holders.items()}
    settle(members, holders, fragments)
    shares = counts(members, holders)
    assert shares[-1] - shares[0] <= 1
    # Nobody gives up more than the newcomer and the rest of the division ask for.
    moved = sum(holders[f] != h for f, h in kept.items())
    assert moved <= fragments // len(members) + len(members)


@given(lives, st.integers(1, 40))
def test_nothing_moves_once_it_is_even(found, fragments):
    members = dict.fromkeys(found, AggregatorTerms())
    holders = dict.fromkeys(range(fragments))
    settle(members, holders, fragments)
    assert settle(members, holders, fragments) == 0


@given(lives, st.integers(2, 40), st.data())
def test_who_is_pinned_gets_what_it_is_pinned_to_and_nothing_else(found, fragments, data):
    members = dict.fromkeys(found, AggregatorTerms())
    holders = dict.fromkeys(range(fragments))
    settle(members, holders, fragments)
    pinned = data.draw(st.frozensets(st.integers(0, fragments - 1), min_size=1))
    members["pin"] = AggregatorTerms(pinned)
    settle(members, holders, fragments)
    assert {f for f, holder in holders.items() if holder == "pin"} == pinned
    shares = counts(found, holders)
    assert shares[-1] - shares[0] <= 1
    assert None not in holders.values()


@given(lives, st.integers(1, 24), st.data())
def test_what_some_refuse_goes_to_who_may_serve_it_and_once_all_refuse_to_nobody(
    found, fragments, data
):
    members = dict.fromkeys(found, AggregatorTerms())
    holders = dict.fromkeys(range(fragments))
    settle(members, holders, fragments)
    some = st.frozensets(st.integers(0, fragments - 1))
    members = {me: AggregatorTerms(None, data.draw(some)) for me in found}
    members["pin"] = AggregatorTerms(data.draw(some), data.draw(some))
    settle(members, holders, fragments)
    for fragment, holder in holders.items():
        able = {me for me, one in members.items() if one.may_serve(fragment)}
        assert holder in able if able else holder is None
        assert holder == "pin" or "pin" not in able


def test_a_pinned_one_alone_leaves_the_rest():
    holders = dict.fromkeys(range(4))
    assert divide("me", {"me": AggregatorTerms(frozenset({1, 3}))}, holders, 4).acquire in (
        (1, 3),
        (3, 1),
    )


@given(lives, st.integers(1, 40), st.data())
def test_what_is_done_is_nobodys(found, fragments, data):
    members = dict.fromkeys(found, AggregatorTerms())
    done = data.draw(st.frozensets(st.integers(0, fragments - 1)))
    holders = {f: None for f in range(fragments) if f not in done}
    settle(members, holders, fragments)
    assert None not in holders.values()


def test_a_pinned_aggregator_releases_what_it_fails_at():
    members = {"me": AggregatorTerms(frozenset({0, 1}), frozenset({0}))}
    assert divide("me", members, {0: "me", 1: "me"}, 2) == ((), (0,))
    assert divide("me", members, {0: None, 1: "me"}, 2) == ((), ())


def test_who_has_its_share_acquires_no_more():
    """Or each of two would take what the other is about to take."""
    members = dict.fromkeys(("me", "other"), AggregatorTerms())
    holders = {0: "me", 1: None, 2: "me", 3: None}
    assert divide("me", members, holders, 4) == ((), ())
    assert sorted(divide("other", members, holders, 4).acquire) == [1, 3]


def test_who_is_cut_off_counts_as_absent():
    members = {
        "cut": AggregatorTerms(cut_off=True),
        "some": AggregatorTerms(refuses=frozenset({1})),
        "new": AggregatorTerms(frozenset({2, 3})),
    }
    holders = {0: "cut", 1: "cut", 2: "some", 3: "new"}
    # Nobody else serves fragment 1: to release it would cost a recovery, and bring nothing.
    assert divide("cut", members, holders, 4) == ((), (0,))
    assert divide("cut", members, {**holders, 0: None}, 4) == ((), ())
    assert divide("some", members, {**holders, 0: None}, 4).acquire == (0,)
    three = dict.fromkeys("abc", AggregatorTerms()) | {"cut": AggregatorTerms(cut_off=True)}
    owned = dict.fromkeys(range(12))
    settle(three, owned, 12)
    assert counts("abc", owned) == [4, 4, 4]


def test_if_the_store_answers_nobody_no_fragment_changes_its_owner():
    members = dict.fromkeys("abc", AggregatorTerms(cut_off=True))
    holders = dict(enumerate("aabbcc"))
    assert all(divide(me, members, holders, 6) == ((), ()) for me in members)


def test_an_attempt_that_waited_once_is_no_silence_of_the_store(run_async):
    """A recovery counts as waiting from its first fault to its end, however much it has read."""

    async def scenario():
        lab = Lab()
        await lab.create()
        held = leases.Leases(lab.context, 1.0)
        with lab.context.runtime.retries.note("recovery") as fault:
            fault(StoreUnavailableError("one 503"))
            watching = asyncio.create_task(held._watch_store())
            await asyncio.sleep(2.5)
            assert not held._cut_off
            await cancel(watching)

    run_async(scenario())


def test_who_was_cut_off_has_its_share_again_once_the_store_answers(run_async, monkeypatch):
    monkeypatch.setattr(leases, "LOOK_S", 0.01)
    holders = dict.fromkeys(range(4))

    async def scenario():
        lab = Lab(fragments=4)
        await lab.create()
        other, held = leases.Leases(lab.context, 60.0), leases.Leases(lab.context, 0.1)
        await other.still_ours(0)
        working = [asyncio.create_task(one) for one in (held._follow(), held._watch_store())]

        async def has_its_share() -> bool:
            members = held._members(leases._now_s())
            return len(divide(held._life, members, holders, 4).acquire) == 2

        async def has_none() -> bool:
            return not divide(held._life, held._members(leases._now_s()), holders, 4).acquire

        await lab.until(has_its_share, "a share")
        monkeypatch.setattr(lab.store, "get_range", unavailable, raising=True)
        with lab.context.runtime.retries.note("recovery") as fault:
            fault(StoreUnavailableError("503"))
            await lab.until(has_none, "no share")
        monkeypatch.undo()
        await lab.until(has_its_share, "a share again")
        for one in working:
            await cancel(one)

    run_async(scenario())


def unavailable(*_args):
    raise StoreUnavailableError("503")


def test_a_lease_whose_answer_was_lost_is_free_for_its_owner(run_async):
    async def scenario():
        lab = Lab(fragments=2)
        await lab.create()
        owner, other = leases.Leases(lab.context, 60.0), leases.Leases(lab.context, 60.0)
        assert await owner._acquire(0)
        assert await other._acquire(1)
        owner._held.clear()
        follower = asyncio.create_task(owner._follow())

        async def heard() -> bool:
            return len(owner._seen) == 2

        await lab.until(heard, "both leases")
        assert owner._holders(leases._now_s()) == {0: None, 1: other._life}
        await cancel(follower)

    run_async(scenario())


class FullDisk(MemoryBus):
    """Its leases stream stores nothing while `full`."""

    full = True

    async def publish(self, subject, payload, **how):
        if self.full:
            raise BusUnavailableError("insufficient resources")
        return await super().publish(subject, payload, **how)


def test_leases_that_cannot_be_stored_are_a_warning_after_seconds(run_async, monkeypatch):
    monkeypatch.setattr(leases, "SILENT_S", 0.0)

    async def scenario():
        lab = Lab()
        await lab.create()
        bus = FullDisk(lab.bus.broker)
        held = leases.Leases(replace(lab.context, bus=bus), 5.0)
        for full in (True, True, False, False):
            bus.full = full
            await asyncio.sleep(0.01)
            await held.still_ours(0)

    with capture_logs() as logged:
        run_async(scenario())
    said = [entry["event"] for entry in logged if entry["event"].startswith("renewals")]
    assert said == ["renewals_lost", "renewals_resumed"]


def test_an_aggregator_that_the_store_does_not_answer_is_named(run_async):
    async def scenario():
        lab = Lab()
        await lab.create()
        held = leases.Leases(replace(lab.context, name="one"), 60.0)
        found = []
        for cut_off in (False, True):
            held._cut_off = cut_off
            await held.still_ours(0)
            findings = (await Watch(lab.context).begin(1)).findings
            found.append([each for each in findings if "does not answer" in each.sentence])
        assert found[0] == []
        assert [(each.about, each.severity) for each in found[1]] == [("aggregator one", "warning")]

    run_async(scenario())


class Unanswered(MemoryBus):
    """Stores what says that something is done, and loses the answer."""

    async def publish(self, subject, payload, **how):
        seq = await super().publish(subject, payload, **how)
        if b"done" in payload:
            raise BusUnavailableError("no answer")
        return seq


def test_what_one_has_said_is_done_is_done_although_no_answer_came(run_async):
    """And the fragment was released meanwhile: or it would be tried for without end."""

    async def scenario():
        lab = Lab()
        await lab.create()
        context = replace(lab.context, bus=Unanswered(lab.bus.broker))
        owner = leases.Leases(context, 60.0)
        assert await owner._acquire(0)
        follower = asyncio.create_task(owner._follow())
        with pytest.raises(BusUnavailableError):
            await owner._say_done(0)
        await owner._give_up(0)

        async def finished() -> bool:
            return not owner._holders(leases._now_s()).keys() & {0}

        await lab.until(finished, "the end of a fragment")
        await cancel(follower)

    run_async(scenario())


@pytest.mark.parametrize("ours", [True, False])
def test_a_fragment_is_done_though_the_answer_to_a_renewal_was_lost(run_async, ours):
    """Else others take it again, of whom the last one may have a bad machine. Another owner keeps it."""

    async def scenario():
        lab = Lab()
        await lab.create()
        owner, other = (leases.Leases(lab.context, 60.0) for _ in range(2))
        assert await owner._acquire(0)
        known = owner._held[0]
        if ours:
            await owner._renew_one(0)
        else:
            await other._publish(names.fragment_lease(RUN, 0), "held", known)
        owner._held[0] = known
        await owner._say_done(0)
        return (await owner._last(names.fragment_lease(RUN, 0))).lease.state

    assert run_async(scenario()) == ("done" if ours else "held")


def test_after_the_runs_end_nobody_waits_for_what_it_refuses(run_async):
    """Also where another one has finished some of it, and is gone without the rest."""

    async def scenario():
        lab = Lab(fragments=2)
        await lab.create()
        owner, other = (leases.Leases(lab.context, 60.0) for _ in range(2))
        for fragment in range(2):
            owner.refuse(fragment)
        follower = asyncio.create_task(owner._follow())
        assert await other._acquire(0)
        await other._say_done(0)

        async def is_done() -> bool:
            owner._holders(leases._now_s())
            return owner._done == {0}

        await lab.until(is_done, "the end of a fragment")
        assert not owner._finished()
        owner.run_ended()
        assert owner._finished()
        await cancel(follower)

    run_async(scenario())


class Repeating(MemoryBus):
    """After each message but the first gives the one before it again."""

    repeated = False

    async def read(self, stream, subjects, start_seq):
        before = None
        async for message in super().read(stream, subjects, start_seq):
            yield message
            if before is not None:
                yield before
                self.repeated = True
            before = message


def test_a_lease_that_is_heard_again_is_not_the_newest_again(run_async):
    """Or what is done would be held once more, expire, and be tried for without end."""

    async def scenario():
        lab = Lab()
        await lab.create()
        bus = Repeating(lab.bus.broker)
        watching = leases.Leases(replace(lab.context, bus=bus), 60.0)
        follower = asyncio.create_task(watching._follow())
        owner, subject = leases.Leases(lab.context, 60.0), names.fragment_lease(RUN, 0)

        async def heard() -> bool:
            return subject in watching._seen

        assert await owner._acquire(0)
        await lab.until(heard, "a lease")
        await owner.done(0)

        async def repeated() -> bool:
            return bus.repeated

        await lab.until(repeated, "the lease once more")
        assert watching._seen[subject].lease.state == "done"
        await cancel(follower)

    run_async(scenario())


class TakenOver(leases.NoLeases):
    """Leases that another aggregator has by the time that an owner asks for them."""

    def __init__(self, context) -> None:
        super().__init__(context)
        self.said_done: list[int] = []

    async def still_ours(self, _fragment: int) -> bool:
        return False

    async def done(self, fragment: int) -> None:
        self.said_done.append(fragment)


def test_a_fragment_that_was_lost_to_another_owner_is_not_done(run_async):
    async def scenario():
        lab = Lab()
        await lab.create()
        await lab.join("a")
        async with lab.aggregating():
            await lab.send_many("a", 2)
        taken = TakenOver(lab.context)
        owners = Owners(lab.context, taken)
        owners.take(0)
        (owner,) = owners.all()

        async def serves() -> bool:
            return owner.tenure is not None

        async def has_ended() -> bool:
            return owners._tasks[0].done()

        await lab.until(serves, "an owner")
        await roll_back(lab.context, await find_versions(lab.context, {0: 1}))
        await lab.until(has_ended, "the end of an owner whose record was overtaken")
        assert taken.said_done == []

    run_async(scenario())
