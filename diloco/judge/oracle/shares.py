"""Shares of the data: which learner has each, and that no batch is merged twice into a fragment.

A claim counts if, when the tape stored it, its life had begun and not ended, the share was free,
and all shares of earlier epochs of the data were claimed. When a life ends, the batches of its
shares that it has not reached become free. Those that it has reached stay its learner's, whose next
life may go on with its unsent work.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from diloco.common.process.config import RunSection, RunSettings
from diloco.common.protocol import names, slices, wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.layout import Layout
from diloco.common.protocol.reasons import Reason
from diloco.common.protocol.shards import shard_bytes, shard_ranges
from diloco.common.storage.tape import same_tape
from diloco.judge.oracle.finding import Violation


class _ReadShare(NamedTuple):
    """A share that a learner has claimed.

    The share's batches from `first` on are the learner's data from position `start` to `stop`.
    """

    share: int
    first: int
    start: int
    stop: int


class BatchRange(NamedTuple):
    """The batches [first, stop) of a share."""

    share: int
    first: int
    stop: int


class Shares:
    """The claimed shares of all learners, and the batches of each share that are merged.

    Args:
        run: its `data_shares` and `share_batches` are the numbers of shares and of their batches;
            if they are 0, the first claim states them.
    """

    def __init__(self, run: RunSection | None = None) -> None:
        self._shares = run.data_shares if run else 0
        self._batches = run.share_batches if run else 0
        self._lives: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._held: dict[str, list[_ReadShare]] = defaultdict(list)
        # What lives that have ended had reached.
        self._done: dict[str, list[_ReadShare]] = defaultdict(list)
        self._reached: dict[str, int] = defaultdict(int)
        # By share, the number of its batches that are claimed; all of them while a learner has it.
        self._given: dict[int, int] = defaultdict(int)
        self._covers: dict[tuple[str, int, int, int], list[BatchRange]] = {}
        # By fragment and share, the merged ranges: ascending and disjoint.
        self._merged: dict[tuple[int, int], list[BatchRange]] = defaultdict(list)

    def take(self, body: wire.Body, seq: int) -> Iterator[Violation]:
        """Takes a claim or a manifest, whose batches its learner must have claimed."""
        match body:
            case wire.Claim():
                self._claim(body, seq)
            case wire.Manifest() if self._held[body.learner] or self._done[body.learner]:
                yield from self._manifest(body, seq)

    def _claim(self, claim: wire.Claim, seq: int) -> None:
        if claim.incarnation >= seq or not same_tape(claim.incarnation, seq):
            return
        if not self._shares:
            self._shares, self._batches = claim.shares, claim.batches
        name, life = claim.learner, self._lives.get(claim.learner, 0)
        alike = (claim.shares, claim.batches) == (self._shares, self._batches)
        if claim.incarnation < life or not alike:
            return
        if claim.what != "claim":
            self._lives[name] = claim.incarnation
            if claim.what == "end":
                self._end(name, claim.position)
                self._ended[name] = claim.incarnation
        elif self._ended.get(name, 0) < claim.incarnation == life and self._may_have(claim):
            stop = claim.position + self._batches - claim.first
            self._held[name].append(_ReadShare(claim.share, claim.first, claim.position, stop))
            self._given[claim.share] = self._batches
            self._reached[name] = stop

    def _may_have(self, claim: wire.Claim) -> bool:
        before = range(claim.share - claim.share % self._shares)
        return (
            claim.position >= self._reached[claim.learner]
            and self._given[claim.share] == claim.first < self._batches
            and all(self._given[share] == self._batches for share in before)
        )

    def _end(self, name: str, position: int) -> None:
        ended = False
        for held in self._held[name]:
            done = min(max(position, held.start), held.stop) - held.start
            self._given[held.share] = held.first + done
            if done:
                self._done[name].append(held._replace(stop=held.start + done))
            ended = True
        self._held[name] = []
        self._reached[name] = position if ended else max(position, self._reached[name])

    def _manifest(self, manifest: wire.Manifest, seq: int) -> Iterator[Violation]:
        start = manifest.position - manifest.steps
        covered = [
            BatchRange(
                held.share,
                held.first + max(start, held.start) - held.start,
                held.first + min(manifest.position, held.stop) - held.start,
            )
            for held in (*self._done[manifest.learner], *self._held[manifest.learner])
            if max(start, held.start) < min(manifest.position, held.stop)
        ]
        count = sum(span.stop - span.first for span in covered)
        update = (manifest.learner, manifest.incarnation, manifest.fragment, manifest.seq)
        self._covers[update] = covered
        # Updates of superseded lives are rejected, whatever they cover.
        if count < manifest.steps and manifest.incarnation >= self._lives[manifest.learner]:
            about = f"learner {manifest.learner} fragment {manifest.fragment}"
            yield Violation("shares", seq, about, "steps", count, manifest.steps)

    def resolve(self, record: wire.Record, seq: int) -> Iterator[Violation]:
        """Checks that a record merges only batches that its fragment has not merged yet."""
        for one in record.inputs:
            update = (one.learner, one.incarnation, record.fragment, one.seq)
            for span in self._covers.pop(update, ()):
                merged = self._merged[record.fragment, span.share]
                again = [it for it in merged if it.first < span.stop and span.first < it.stop]
                if again:
                    about = f"update {one.incarnation}-{one.seq} of {one.learner}"
                    yield Violation("shares", seq, about, "", "each batch once", again[0])
                merged[:] = _joined([*merged, span])

    def merged(self, fragment: int) -> list[BatchRange]:
        """Returns the ranges of batches that are merged into a fragment."""
        mine = [spans for (index, _), spans in self._merged.items() if index == fragment]
        return [span for spans in mine for span in spans]


def _joined(spans: list[BatchRange]) -> list[BatchRange]:
    """Returns the ranges of one share, ascending, with those that touch or overlap joined."""
    joined: list[BatchRange] = []
    for span in sorted(spans):
        if joined and span.first <= joined[-1].stop:
            joined[-1] = joined[-1]._replace(stop=max(span.stop, joined[-1].stop))
        else:
            joined.append(span)
    return joined


def wrong_claim(
    settings: RunSettings, layout: Layout, epoch: int, manifest: wire.Manifest
) -> str | None:
    """Returns the reason to reject a manifest for its own fields, or None."""
    if manifest.layout != layout.digest:
        return Reason.LAYOUT
    if manifest.codec != settings.sync.codec:
        return Reason.CODEC
    return _wrong_shards(settings, layout, epoch, manifest)


def _wrong_shards(
    settings: RunSettings, layout: Layout, epoch: int, manifest: wire.Manifest
) -> str | None:
    """Returns the reason to reject a manifest for its shards, or None.

    Together the shards must have each block once. Each must have a name under the sender's prefix,
    and the size that the codec gives it.
    """
    sync, size = settings.sync, layout.fragments[manifest.fragment].size
    ranges = shard_ranges(size, sync.block, sync.shard_elements)
    longest = max(stop - start for start, stop in ranges) // sync.block
    try:
        held = [shard.slices for shard in manifest.shards]
        counts = slices.partition(held, size // sync.block, longest)
    except WireError as error:
        return error.reason
    prefix = names.shards_prefix(
        settings.run.name, manifest.learner, manifest.fragment, epoch, manifest.incarnation,
        manifest.seq,
    )  # fmt: skip
    known = set()
    for shard, count in zip(manifest.shards, counts, strict=True):
        own = shard.name.startswith(prefix) and names.is_index(shard.name.removeprefix(prefix))
        if not own or shard.name in known:
            return Reason.NAME
        known.add(shard.name)
        if shard.size_bytes != shard_bytes(sync.codec, count * sync.block, sync.block):
            return Reason.SIZE
    return None
