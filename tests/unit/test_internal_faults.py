"""Faults that a sender's bytes do not explain: its own problem at last, and never the process's."""

import asyncio

import pytest
from runlab import Lab

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.owner import download_and_verify, tenure
from diloco.common.protocol.errors import ObjectUnreadableError
from diloco.common.protocol.reasons import is_offence


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(download_and_verify, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(tenure, "BROKEN_PAUSE_S", 0.01)


def play(script, prepare=lambda lab: None) -> Lab:
    lab = Lab()

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
