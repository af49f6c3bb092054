"""Reads that take too long: of one sender alone they are its fault, of everybody nobody's."""

import asyncio
import sys
from pathlib import Path

import pytest
from runlab import Lab

sys.path.append(str(Path(__file__).parents[1]))

from gcs_server import GcsServer

from diloco.aggregator.owner import download_and_verify
from diloco.aggregator.owner.download_and_verify import Limited, Patience
from diloco.common.protocol.errors import StoreSlowError, WireError
from diloco.common.protocol.reasons import is_offence
from diloco.common.storage.store import MemoryStore
from diloco.common.storage.store.gcs import open_gcs


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A run in a real store over HTTP, whose reader has little patience."""
    monkeypatch.setattr(download_and_verify, "FIRST_S", 0.2)
    with GcsServer(tmp_path, "bucket") as server:
        # Rounds go on soon without what is not read.
        quick = {"quorum": {"read_timeout_s": 0.1, "deadline_s": 0.2}}
        made = Lab(store=open_gcs("gs://bucket", server.url), sections=quick)
        made.server = server
        yield made


def play(lab, script) -> list:
    """The records of what a script does beside an aggregator."""

    async def run() -> list:
        await lab.create()
        async with lab.aggregating():
            await script()
        return [item.record for item in await lab.records()]

    return asyncio.run(asyncio.wait_for(run(), 300))


def test_what_alone_is_slow_is_its_senders_verdict(lab):
    async def script():
        for name in ("slow", "honest"):
            await lab.join(name)
        lab.server.fail("trickle", contains="learner%2Fslow", times=1 << 30, stall_s=0.05)
        sent = lab.upload("slow")
        await lab.announce(sent)
        answered = asyncio.ensure_future(lab.answered(sent))
        while not answered.done():
            await lab.send("honest")
        await answered

    records = play(lab, script)
    rejected = [one for record in records for one in record.rejected]
    assert [(one.learner, one.reason) for one in rejected] == [("slow", "slow")]
    assert is_offence("slow")
    assert {one.learner for record in records for one in record.inputs} == {"honest"}


def tries(lab, manifest) -> int:
    """How often an update's reading has begun."""
    return lab.server.count("GET", manifest.shards[0].name.replace("/", "%2F"))


def test_a_store_that_is_slow_rejects_nobody(lab):
    async def script():
        sent = []
        for name in ("a", "b", "c"):
            await lab.join(name)
            sent.append(lab.upload(name))
        lab.server.fail("trickle", contains="learner%2F", times=1 << 30, stall_s=0.05)
        for one in sent:
            await lab.announce(one)
        for one in sent:
            while tries(lab, one) < 4:  # noqa: ASYNC110 - the server knows no events
                await asyncio.sleep(0.05)
        # The reader has become patient meanwhile.
        lab.server.mend()
        for one in sent:
            await lab.answered(one)

    records = play(lab, script)
    assert not [one for record in records for one in record.rejected]
    assert sorted(one.learner for record in records for one in record.inputs) == ["a", "b", "c"]


def test_one_slow_read_is_nobodys_fault_and_each_attempt_is_given_longer():
    made = Lab()
    made.lives["a"] = 1
    waits = Patience(made.upload("a"))
    slow = StoreSlowError("slow")
    first_s = waits.within_s
    waits.lost(slow, others_read=False)
    waits.lost(slow, others_read=True)
    assert waits.within_s == 4 * first_s
    with pytest.raises(WireError) as caught:
        waits.lost(slow, others_read=True)
    assert caught.value.reason == "slow"


def test_all_reads_of_an_update_share_their_time():
    class Slow(MemoryStore):
        def get(self, name, limit_bytes=None, within_s=None):
            asked.append(within_s)
            return super().get(name, limit_bytes, within_s)

    asked: list[float] = []
    store = Slow()
    store.put("o", b"bytes")
    limited = Limited(store, 100.0)
    for _ in range(3):
        assert limited.get("o") == b"bytes"
    assert 100.0 >= asked[0] > asked[1] > asked[2] > 0
