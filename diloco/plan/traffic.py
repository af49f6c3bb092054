"""Computes the traffic of a run and the needs of its aggregator: bytes, Gbit/s, cores, memory.

Pure, in closed form. The bytes are those of the codecs themselves; processor times were measured by
`bench.merge` (docs/benchmarks.md), on the machine described there. Where a function has `updates`,
it is the mean number of updates merged in a version; `interval_s` is the seconds between two
versions of a fragment.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.aggregator.arrays.outer import make_outer
from diloco.common.process.config import RunSettings
from diloco.common.protocol.codecs import encoded_bytes
from diloco.common.protocol.shards import shard_bytes, shard_ranges

# Core-seconds for each element of each update: its norm and its addition, 2 cores x 133.9 ms for 8
# updates of 67,108,864 elements.
UPDATE_CORE_S = 2 * (35.3e-3 + 98.6e-3) / (8 * (1 << 26))
# For each update of a fragment, whatever its size: to read it from the store, check it and give its
# verdict (`bench.protocol_clients --learners 1000 --fragment 65536`).
SMALL_UPDATE_CORE_S = 2.1e-3
# For each element of each version: norms of the sum, outer step, delta.
VERSION_CORE_S = 2 * (14.0e-3 + 66.1e-3 + 94.1e-3) / (1 << 26)
# Threads up to which making a version was measured to scale.
CLOSING_THREADS = 2
# For each byte from or to the store: sockets, copies and checksum, and with TLS its cipher too.
PLAIN_CORE_S, TLS_CORE_S = 0.7e-9, 1e-9
# An object is read in ranges of this length, a request each.
RANGE_BYTES = 8 << 20
# Bytes on the tape: of a manifest, and of each of its shards.
MANIFEST_BYTES, SHARD_BYTES = 600, 160
# Bytes of a record: of the record alone, for each learner that its fragment knows, and for each
# update in it, without the update's shards (`python -m bench.rounds events`).
RECORD_BYTES, LEARNER_BYTES, INPUT_BYTES = 1000, 345, 225
# Bytes that a learner reads of a record in an object: its word on the tape, with the deltas since
# the stored view, and the range with the answers to it.
WORD_BYTES, ANSWERS_BYTES = 1200, 1700
# Share of its cores that an aggregator should use on average: the rest is for bursts, recovery.
BUSY = 0.5
# Updates whose payloads are in memory at once while a fragment's round is open.
PAYLOADS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTraffic:
    """Bytes and objects of one round of every fragment, which is the traffic of H steps.

    Attributes:
        elements: parameters of all fragments, padded to whole blocks.
        largest: elements of the largest fragment.
        fragments: the number of fragments, P.
        update_bytes: bytes of one learner's updates, one for each fragment.
        update_objects: the number of shards of these updates, each one object.
        update_gets: requests that read these shards.
        delta_bytes: bytes of the versions' deltas, one object a fragment.
        delta_gets: requests that read these deltas.
        snapshot_bytes: bytes of the views and outer states, two objects a fragment.
        snapshot_interval_versions: versions of a fragment from one snapshot to the next.
        resident_bytes: bytes of the aggregator's arrays in memory.
    """

    elements: int
    largest: int
    fragments: int
    update_bytes: int
    update_objects: int
    update_gets: int
    delta_bytes: int
    delta_gets: int
    snapshot_bytes: int
    snapshot_interval_versions: int
    resident_bytes: int


def equal_fragments(settings: RunSettings, parameters: int) -> list[int]:
    """Returns the elements of each fragment of a model whose tensors are unknown.

    All are equal: the parameters divided among the fragments, padded to a multiple of two blocks.
    """
    pair = 2 * settings.sync.block
    return [math.ceil(parameters / settings.sync.fragments / pair) * pair] * settings.sync.fragments


def sizes(settings: RunSettings, fragments: Sequence[int]) -> RoundTraffic:
    """Returns the bytes and objects of a round of every fragment.

    Args:
        settings: settings of the run.
        fragments: the number of elements of each fragment.
    """
    run = settings.sync
    shards = [
        shard_bytes(run.codec, stop - start, run.block)
        for size in fragments
        for start, stop in shard_ranges(size, run.block, run.shard_elements)
    ]
    state = make_outer(
        settings.outer.optimizer,
        delay=settings.outer.delay_rounds,
        delay_fraction=settings.outer.delay_fraction,
    ).init(2 * run.block)
    slots = sum(array.size == 2 * run.block for array in state.values())
    elements, largest = sum(fragments), max(fragments)
    # View, master parameters, the open round's sum, and the outer optimizer's state stay in memory.
    deltas = [encoded_bytes(run.delta_codec, size, run.block) for size in fragments]
    payloads = PAYLOADS * encoded_bytes(run.codec, largest, run.block)
    return RoundTraffic(
        elements=elements,
        largest=largest,
        fragments=len(fragments),
        update_bytes=sum(shards),
        update_objects=len(shards),
        update_gets=sum(map(gets, shards)),
        delta_bytes=sum(deltas),
        delta_gets=sum(map(gets, deltas)),
        snapshot_bytes=4 * elements * (2 + slots),
        snapshot_interval_versions=run.snapshot_interval_versions,
        resident_bytes=4 * elements * (3 + slots) + payloads,
    )


def gets(size_bytes: int) -> int:
    """Returns the number of requests that read an object of `size_bytes`, by `RANGE_BYTES` each."""
    return max(1, math.ceil(size_bytes / RANGE_BYTES))


def ring_bits(parameters: int, bits: int, sites: int) -> float:
    """Returns the bits that each of `sites` sends when they average a gradient in a ring.

    The gradient has `parameters` elements of `bits` bits.
    """
    return bits * parameters * 2 * (1 - 1 / sites)


def data_parallel_step_s(
    step_s: float, sent_bits: float, gbit: float, rtt_s: float, hidden: float
) -> float:
    """Returns the seconds of a data-parallel step, whose exchange the backward pass hides in part.

    Args:
        step_s: seconds of the step alone.
        sent_bits: bits that each site sends; 0 for one site alone.
        gbit: Gbit/s of the slowest site.
        rtt_s: round trip between sites.
        hidden: share of a step with which the exchange may overlap.
    """
    exchange_s = sent_bits / (gbit * 1e9) + rtt_s if sent_bits else 0.0
    return step_s + max(0.0, exchange_s - hidden * step_s)


def data_parallel_gbit(
    step_s: float, sent_bits: float, rtt_s: float, hidden: float, utilization: float
) -> float:
    """Returns the Gbit/s that each site needs for a utilization in data-parallel training.

    Infinite if the round trip alone takes too long. Arguments are as in `data_parallel_step_s`;
    `utilization` is `step_s` as a share of the step with its exchange.
    """
    exchange_s = hidden * step_s + step_s * (1 / utilization - 1) - rtt_s
    if not sent_bits:
        return 0.0
    return sent_bits / exchange_s / 1e9 if exchange_s > 0 else math.inf


def lockstep_gbit(
    sized: RoundTraffic, interval_s: float, round_s: float, rtt_s: float, utilization: float
) -> float:
    """Returns the Gbit/s that each site needs in lockstep mode, where learners wait for versions.

    Args:
        sized: bytes of a round of every fragment.
        interval_s: seconds of H steps.
        round_s: seconds that the aggregator takes for a version: to read updates, merge and store.
        rtt_s: seconds of a round trip; a version takes two: one for an update and its manifest, one
            for a record and its delta.
        utilization: share of the time in which learners train.
    """
    wait_s = interval_s * (1 / utilization - 1) / sized.fragments - round_s - 2 * rtt_s
    bits = 8 * (sized.update_bytes + sized.delta_bytes) / sized.fragments
    return bits / wait_s / 1e9 if wait_s > 0 else math.inf


def steady_gbit(sized: RoundTraffic, interval_s: float) -> float:
    """Returns the Gbit/s that each site needs for a version of every fragment in `interval_s`.

    On a slower link no learner waits either, but versions come later.
    """
    return 8 * max(sized.update_bytes, sized.delta_bytes) / interval_s / 1e9


def travel_s(sized: RoundTraffic, interval_s: float, gbit: float) -> tuple[float, float]:
    """Returns the seconds that (an update, a delta) of a fragment takes on a link.

    The link's round trip is not included.

    A link that is too slow for a version of each fragment in `interval_s` is always full: each
    fragment then waits until the others have passed.
    """
    up_s = 8 * sized.update_bytes / sized.fragments / (gbit * 1e9)
    down_s = 8 * sized.delta_bytes / sized.fragments / (gbit * 1e9)
    cycle_s = sized.fragments * max(up_s, down_s)
    if cycle_s <= interval_s:
        return up_s, down_s
    return max(up_s, cycle_s - down_s), down_s


def core_s(sized: RoundTraffic, updates: float, *, tls: bool) -> float:
    """Returns the aggregator's core-seconds for a version of every fragment."""
    snapshots = sized.snapshot_bytes / sized.snapshot_interval_versions
    moved = updates * sized.update_bytes + sized.delta_bytes + snapshots
    computed_s = updates * update_core_s(sized) + sized.elements * VERSION_CORE_S
    return computed_s + moved * byte_core_s(tls=tls)


def update_core_s(sized: RoundTraffic) -> float:
    """Returns the core-seconds to check and add one learner's update of every fragment.

    To move the update's bytes takes `byte_core_s` for each, which is not included.
    """
    return sized.elements * UPDATE_CORE_S + sized.fragments * SMALL_UPDATE_CORE_S


def byte_core_s(*, tls: bool) -> float:
    """Returns the core-seconds to move one byte from or to the store."""
    return TLS_CORE_S if tls else PLAIN_CORE_S


def cores(sized: RoundTraffic, updates: float, interval_s: float, *, tls: bool) -> int:
    """Returns the cores that the aggregator needs, if they are to be busy for half of the time."""
    return max(1, math.ceil(core_s(sized, updates, tls=tls) / interval_s / BUSY))


def record_bytes(sized: RoundTraffic, learners: int, updates: float) -> float:
    """Returns the bytes of a record, given the run's learners and the updates in a version."""
    shards = sized.update_objects / sized.fragments
    return RECORD_BYTES + learners * LEARNER_BYTES + updates * (INPUT_BYTES + shards * SHARD_BYTES)


def tape_bytes(sized: RoundTraffic, learners: int, updates: float) -> float:
    """Returns the bytes on the tape for a version of every fragment: manifests and records.

    A record that is too large for a message is an object, and counted here too.
    """
    manifests = updates * (sized.fragments * MANIFEST_BYTES + sized.update_objects * SHARD_BYTES)
    return manifests + sized.fragments * record_bytes(sized, learners, updates)


def retained_bytes(
    sized: RoundTraffic, updates: float, interval_s: float, window_s: float
) -> float:
    """Returns the bytes in the store after garbage collection with a replay window of `window_s`.

    Objects are kept from the last snapshot before the window on, or from the second newest
    snapshot on if that is older.
    """
    versions = max(window_s / interval_s, sized.snapshot_interval_versions)
    versions += sized.snapshot_interval_versions / 2
    each = updates * sized.update_bytes + sized.delta_bytes
    snapshots = versions / sized.snapshot_interval_versions + 1
    return versions * each + snapshots * sized.snapshot_bytes
