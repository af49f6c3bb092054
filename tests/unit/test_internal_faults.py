"""Faults that a sender's bytes do not explain: its own problem at last, and never the process's."""

import asyncio

import pytest
from runlab import Lab
from structlog.testing import capture_logs

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.leases import NoLeases
from diloco.aggregator.owner import download_and_verify, tenure
from diloco.common.protocol.errors import ObjectUnreadableError
from diloco.common.protocol.reasons import is_offence


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(download_and_verify, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(tenure, "BROKEN_PAUSE_S", 0.01)


def play(script, prepare=lambda lab: None, **lab_is) -> Lab:
    lab = Lab(**lab_is)

    async def run() -> None:
        await lab.create()
        prepare(lab)
        await script(lab)

    asyncio.run(asyncio.wait_for(run(), 300))
    return lab


def unreadable(lab: Lab, learner: str) -> None:
    """Every object of a learner fails in a way that no store's error describes."""
    get = lab.store.get

    def failing(name, *args, **kwargs):
        if f"/learner/{learner}/" in name:
            raise OSError(40, "too many levels of symbolic links", name)
        return get(name, *args, **kwargs)

    lab.store.get = failing  # type: ignore[method-assign]


def test_an_object_that_nobody_can_read_is_its_senders_verdict():
    async def script(lab):
        async with lab.aggregating():
            await lab.join("liar")
            await lab.join("honest")
            sent = lab.upload("liar")
            await lab.announce(sent)
            await lab.send_many("honest", 3)
            record = await lab.answered(sent)
            assert record.version >= 1

    lab = play(script, lambda lab: unreadable(lab, "liar"))
    rejected = [
        (one.learner, one.reason)
        for item in asyncio.run(lab.records())
        for one in item.record.rejected
    ]
    assert rejected == [("liar", "internal")]


def test_a_link_in_place_of_a_shard_is_its_senders_fault():
    def link(lab: Lab) -> None:
        get = lab.store.get

        def refusing(name, *args, **kwargs):
            if "/learner/liar/" in name:
                raise ObjectUnreadableError(f"object {name!r} cannot be read: it is a link")
            return get(name, *args, **kwargs)

        lab.store.get = refusing  # type: ignore[method-assign]

    async def script(lab):
        async with lab.aggregating():
            await lab.join("liar")
            sent = lab.upload("liar")
            await lab.announce(sent)
            await lab.answered(sent)

    lab = play(script, link)
    rejected = [one for item in asyncio.run(lab.records()) for one in item.record.rejected]
    assert [(one.learner, one.reason) for one in rejected] == [("liar", "unreadable")]
    assert is_offence(rejected[0].reason)


def test_a_fault_that_meets_everybody_rejects_nobody():
    async def script(lab):
        async with lab.aggregating():
            await lab.join("a")
            await lab.join("b")
            restore = lab.store.get
            unreadable(lab, "a")
            unreadable(lab, "b")
            sent = [lab.upload(name) for name in ("a", "b")]
            for one in sent:
                await lab.announce(one)
            await asyncio.sleep(0.3)
            del lab.store.get
            assert lab.store.get.__func__ is restore.__func__
            for one in sent:
                await lab.answered(one)

    lab = play(script)
    records = [item.record for item in asyncio.run(lab.records())]
    assert not [one for record in records for one in record.rejected]
    assert sum(len(record.inputs) for record in records) == 2


def test_a_sum_that_breaks_is_made_again_without_the_one_that_breaks_it(monkeypatch):
    merge = FragmentArrays.merge

    def breaking(self, payload, admitted):
        merge(self, payload, admitted)
        if admitted.manifest.learner == "liar":
            raise MemoryError

    monkeypatch.setattr(FragmentArrays, "merge", breaking)

    async def script(lab):
        async with lab.aggregating():
            await lab.join("liar")
            await lab.join("a")
            await lab.join("b")
            sent = [lab.upload(name) for name in ("liar", "a", "b")]
            for one in sent:
                await lab.announce(one)
            for one in sent:
                await lab.answered(one)

    lab = play(script)
    records = [item.record for item in asyncio.run(lab.records())]
    assert {one.learner for record in records for one in record.inputs} == {"a", "b"}
    assert [(one.learner, one.reason) for r in records for one in r.rejected] == [
        ("liar", "internal")
    ]


def test_an_addition_that_fails_once_costs_neither_its_sender_nor_the_aggregator(monkeypatch):
    """As where memory is short for a moment, now and then; another aggregator might take over."""
    refused, merged, failed = [], [], []
    monkeypatch.setattr(NoLeases, "others_may_serve", lambda self, fragment: True)
    monkeypatch.setattr(NoLeases, "refuse", lambda self, fragment: refused.append(fragment))
    merge = FragmentArrays.merge

    def short_once(self, payload, admitted):
        merge(self, payload, admitted)
        sent = admitted.manifest.learner, admitted.manifest.seq
        if merged and sent not in (*merged, *failed):
            failed.append(sent)
            raise MemoryError
        merged.append(sent)

    monkeypatch.setattr(FragmentArrays, "merge", short_once)
    rounds = 2 * tenure.BROKEN_MOST

    async def script(lab):
        async def is_merged() -> bool:
            return bool(merged)

        async def is_over() -> bool:
            return bool(refused) or (await lab.newest())[0].version == version

        async with lab.aggregating():
            await lab.join("a")
            await lab.join("b")
            for version in range(1, rounds + 1):
                merged.clear()
                first, second = "ab" if version % 2 else "ba"
                await lab.announce(lab.upload(first))
                await lab.until(is_merged, "an addition")
                await lab.announce(lab.upload(second))
                await lab.until(is_over, "a version")
                assert not refused

    with capture_logs():
        lab = play(script, sections={"quorum": {"min_learners": 2, "deadline_s": 100.0}})
    assert len(failed) == rounds
    records = [item.record for item in asyncio.run(lab.records())]
    assert not [one for record in records for one in record.rejected]
    assert [len(record.inputs) for record in records if record.version] == [2] * rounds
