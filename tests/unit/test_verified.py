"""Nothing is trusted that does not reproduce: digests, checksums, epochs, acknowledgements."""

import asyncio
import itertools
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from runlab import RUN, Lab
from structlog.testing import capture_logs

from diloco.aggregator.arrays.fragment import FragmentArrays, make_grid
from diloco.aggregator.compare_and_swap import swap
from diloco.aggregator.core import memory
from diloco.aggregator.daemon import aggregate
from diloco.aggregator.leases import Leases
from diloco.aggregator.owner.download_and_verify import read_input, read_payload
from diloco.aggregator.owner.garbage_collector import Collector, ShardListing
from diloco.aggregator.owner.recovery import MOST_AHEAD, _merge_again
from diloco.common.process.config import GcSection
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.errors import (
    BusError,
    BusUnavailableError,
    IntegrityError,
    RunMismatchError,
    SwapLostError,
    WireError,
)
from diloco.common.storage.store import MemoryStore
from diloco.common.storage.tape import last_record
from diloco.common.storage.views import load_version
from diloco.learner.tensors.checkpoint import PartFolder
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.run.watch import Watch

SNAPSHOT = 3


async def made(*learners: str, **sync: Any) -> tuple[Lab, wire.Record, FragmentArrays]:
    """A lab of four versions, the record of the last, and the arrays of the one before.

    Args:
        learners: of whom each has an update in each version; `a` alone if none is named.
        sync: settings of the section.
    """
    learners = learners or ("a",)
    quorum = {"min_learners": len(learners), "deadline_s": 300.0}
    lab = Lab(enabled=False, sections={"sync": sync, "quorum": quorum})
    # Far above the parameters, so that the last bits of a sum are not lost beside them.
    lab.loudness = dict.fromkeys(learners, 1e4)
    await lab.create()
    async with lab.aggregating():
        for learner in learners:
            await lab.join(learner)
        for _ in range(SNAPSHOT + 1):
            sent = [lab.upload(learner) for learner in learners]
            for manifest in sent:
                await lab.announce(manifest)
            for manifest in sent:
                await lab.answered(manifest)
    before, newest = [item.record for item in await lab.records()][-2:]
    arrays = FragmentArrays.from_objects(
        lab.context.settings, lab.context.layout, 0,
        view=lab.store.get(before.snapshot.name), outer_state=lab.store.get(before.outer.name),
    )  # fmt: skip
    assert before.outer_version == before.version == SNAPSHOT
    return lab, newest, arrays


@pytest.mark.parametrize("digest", ["view_digest", "outer_digest"])
def test_a_version_that_does_not_come_out_again_is_refused(run_async, digest):
    async def scenario() -> None:
        lab, record, arrays = await made()
        wrong = record.model_copy(update={digest: "f" * 32})
        with pytest.raises(IntegrityError, match="cannot be recomputed: digests"):
            arrays.merge_again(wrong, partial(read_input, lab.store, arrays.grid))

    run_async(scenario())


def test_inputs_are_added_in_the_order_of_the_record(run_async):
    """Another order gives other bits."""

    async def scenario() -> None:
        lab, record, arrays = await made("a", "b", "c", codec="float32")
        assert len(record.inputs) == 3
        arrays.merge_again(record, partial(read_input, lab.store, arrays.grid))

    run_async(scenario())


def test_inputs_are_read_ahead_as_far_as_a_view_takes_memory(run_async):
    """One after the other, each of a thousand would wait for the store's answer."""

    async def scenario() -> None:
        lab, record, arrays = await made(codec="int8")
        (taken,) = record.inputs
        get, at_once, seen = lab.store.get, [], []
        others = threading.Semaphore(0)

        def counted(name: str, limit_bytes: int | None = None) -> bytes:
            at_once.append(name)
            seen.append(len(at_once))
            # The first waits until another is under way: it would wait for ever for none.
            if len(seen) == 1:
                assert others.acquire(timeout=300)
            else:
                others.release()
            try:
                return get(name, limit_bytes)
            finally:
                at_once.remove(name)

        lab.store.get = counted
        wrong = record.model_copy(update={"inputs": (taken,) * 40})
        with pytest.raises(IntegrityError, match="cannot be recomputed: digests"):
            await _merge_again(lab.context, arrays, wrong)
        size_bytes = sum(shard.size_bytes for shard in taken.shards)
        assert len(seen) == 40 * len(taken.shards)
        assert 1 < max(seen) <= max(1, arrays.view.nbytes // size_bytes) <= MOST_AHEAD

    run_async(scenario())


def test_a_view_of_another_digest_is_refused(run_async):
    async def scenario() -> None:
        lab, record, _ = await made()
        wrong = record.model_copy(update={"view_digest": "f" * 32})
        with pytest.raises(IntegrityError, match="the record says ffff"):
            await load_version(lab.context, wrong)

    run_async(scenario())


def test_a_shard_of_other_bytes_is_refused_though_it_can_be_read(run_async):
    async def scenario() -> None:
        lab, _, _ = await made()
        manifest = lab.upload("a")
        (entry,) = manifest.shards
        grid = make_grid(lab.context.settings, lab.context.layout, 0)
        other = shards.pack("float32", encode("float32", np.ones(grid.size, np.float32), 16), 16)
        lab.store.delete(entry.name)
        lab.store.put(entry.name, other)
        assert len(other) == entry.size_bytes
        with pytest.raises(WireError) as caught:
            read_payload(lab.store, manifest, grid)
        assert caught.value.reason == "checksum"

    run_async(scenario())


def test_a_record_of_another_epoch_ends_the_process(run_async):
    async def scenario() -> None:
        lab, _, _ = await made()
        with pytest.raises(RunMismatchError, match="is in epoch 0, this process began in epoch 1"):
            await last_record(replace(lab.context, epoch=1), 0)

    run_async(scenario())


class LyingBus:
    """A bus that loses the first answer, then takes a stale swap for a duplicate and says yes."""

    def __init__(self, bus, rival) -> None:
        self._bus, self._rival, self.calls = bus, rival, 0

    def __getattr__(self, name: str):
        return getattr(self._bus, name)

    async def publish(self, subject: str, payload: bytes, **options):
        self.calls += 1
        if self.calls == 1:
            raise BusUnavailableError("no answer")
        await self._rival()
        return 1 << 20


def test_an_acknowledgement_after_a_doubt_is_not_believed(run_async):
    """A cluster may acknowledge a stale swap; what stands is read, and it is another's."""

    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        subject = names.stop(RUN)
        stop = wire.encode(wire.Stop(run=RUN, global_step=0, reason="steps", by="test"))

        async def rival() -> None:
            await lab.bus.publish(subject, stop, msg_id="rival", expected_last=0)

        bus = LyingBus(lab.bus, rival)
        context = replace(lab.context, bus=bus)
        with pytest.raises(SwapLostError):
            await asyncio.wait_for(swap(context, subject, stop, "ours", 0), 300)
        assert bus.calls == 2

    run_async(scenario())


def test_the_run_goes_on_where_somebody_publishes_under_the_ids_that_come_next(run_async):
    """The ids of this run can be predicted, as those of no run can; and somebody does so."""

    async def scenario() -> None:
        lab, drawn = Lab(), itertools.count()
        runtime = replace(lab.context.runtime, new_id=lambda: str(next(drawn)))
        lab.context = replace(lab.context, runtime=runtime)
        await lab.create()
        async with lab.aggregating():
            await lab.join("learner")
            before = (await lab.send("learner")).version
            ahead = range(next(drawn), 1 << 30)[:3]
            for number in ahead:
                subject = names.update(RUN, "squatter", 0)
                await lab.bus.publish(subject, b"x", msg_id=str(number))
            assert (await lab.send("learner")).version == before + 1
            assert (await lab.send("learner")).version == before + 2
        assert next(drawn) > ahead[-1]

    run_async(scenario())


def test_nothing_is_published_on_top_of_another_message_of_the_same_number(run_async):
    """A server may give the sequence of a message that it lost to another."""

    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        subject, body = (
            names.stop(RUN),
            wire.encode(wire.Stop(run=RUN, global_step=0, reason="x", by="test")),
        )
        seq = await lab.bus.publish(subject, body, msg_id="what stands")
        with pytest.raises(SwapLostError):
            await swap(lab.context, subject, body, "ours", seq, "what was lost")
        assert await swap(lab.context, subject, body, "theirs", seq, "what stands") > seq

    run_async(scenario())


def test_the_newest_checkpoint_is_that_of_the_greatest_number(tmp_path):
    for number in (9, 100, 20):
        (tmp_path / f"{number}.safetensors").touch()
    assert PartFolder(tmp_path, keep=3).numbers() == [100, 20, 9]


def test_a_lease_that_another_has_taken_is_not_ours(run_async):
    async def scenario() -> None:
        lab = Lab()
        await lab.create()
        first, thief = Leases(lab.context, 60.0), Leases(lab.context, 60.0)
        assert await first._acquire(0)
        assert await first.still_ours(0)
        subject = names.fragment_lease(RUN, 0)
        await thief._publish(subject, "held", first._held[0])
        assert not await first.still_ours(0)

    run_async(scenario())


class BadDisk(MemoryStore):
    """A store as others have it, of which this machine reads nothing below a prefix as it is."""

    def __init__(self, behind: MemoryStore, prefix: str) -> None:
        self._lock, self._objects = behind._lock, behind._objects
        self._prefix = prefix

    def get(self, name: str, *limits: Any) -> bytes:
        data = super().get(name, *limits)
        return data[:-1] + bytes([data[-1] ^ 1]) if name.startswith(self._prefix) else data


def test_one_bad_machine_stops_no_fragment(run_async):
    """The machine gives up fragment 0, at which it fails; a healthy one serves it, visibly."""

    async def scenario() -> None:
        lab = Lab(fragments=2)
        await lab.create()
        bad = replace(
            lab.context, name="bad", store=BadDisk(lab.store, names.global_prefix(RUN) + "0/")
        )
        held = Leases(bad, 2.0)
        first = asyncio.ensure_future(aggregate(bad, held))
        await lab.join("a")

        async def refused() -> bool:
            return held._refuses == {0}

        async def stopped() -> bool:
            return bool(await said("stopped: what is stored did not give bad "))

        async def said(words: str) -> list[str]:
            run = await Watch(lab.context).begin(1)
            return [one.sentence for one in run.findings if one.sentence.startswith(words)]

        await lab.until(refused, "the bad one's word")
        await lab.until(stopped, "the finding that all have failed")
        # A share of the other fragment is still its own.
        await lab.send("a", 1)
        healthy = Leases(replace(lab.context, name="good"), 2.0)
        second = asyncio.ensure_future(aggregate(replace(lab.context, name="good"), healthy))
        await lab.send_many("a", 3, 0)
        assert await said("served by good; what is stored did not give bad ")
        # Shared evenly, what the bad one gave up never comes back to it.
        await lab.send_many("a", 3, 1)
        assert 0 not in held._held
        assert 0 in healthy._held
        await cancel(first, second)

    with capture_logs() as logged:
        run_async(scenario())
    assert [one["event"] for one in logged if one["event"].startswith("fragment_")] == [
        "fragment_refused", "fragment_stopped",
    ]  # fmt: skip


def test_nothing_is_deleted_while_the_tape_names_it(run_async, monkeypatch):
    """The tape is trimmed first: where that fails, every object stays."""

    async def scenario() -> None:
        lab = Lab(enabled=False)
        await lab.create()
        async with lab.aggregating():
            await lab.join("a")
            await lab.send_many("a", 3 * SNAPSHOT)
        there = lab.objects()

        async def refused(*_arguments: object) -> None:
            raise BusError("not permitted")

        monkeypatch.setattr(lab.bus, "trim", refused)
        lab.context = replace(lab.context, gc=GcSection(replay_window_s=0.0))
        state = memory.resume(*await lab.newest(), 0.0)._replace(known_seq=0)
        collector = Collector(lab.context, 0, lambda: state, ShardListing())
        with pytest.raises(BusError):
            await collector._collect()
        assert lab.objects() == there

    run_async(scenario())
