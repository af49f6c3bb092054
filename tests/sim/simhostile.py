"""A hostile learner, whose manifests can be decoded and state falsehoods.

The hostile learner has a learner's credentials: it may publish under its own subjects and store
objects under its own prefix, and do nothing else. Each lie is one update. Only lies that an honest
learner might have sent as well may be merged (`MAY_BE_MERGED`).
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from simadmission import LIAR, LIAR_INDEX
from simchain import UpdateId
from simtensors import TOKENS
from simworld import World

from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import DilocoError
from diloco.learner.background import Context as LearnerContext
from diloco.learner.core.events import (
    Send,
)
from diloco.learner.wire.incarnation import join
from diloco.learner.wire.publish import Uploader

# Mean seconds between two lies, and the share of them that are no manifests.
EVERY_S = 3.0
GARBLED = 0.15


class Truth(NamedTuple):
    """The basis of a lie: a true manifest of the liar, and other learners' manifests."""

    manifest: wire.Manifest
    others: list[wire.Manifest]


def _shards(truth: Truth, **changes: Any) -> tuple[wire.Shard, ...]:
    first, *rest = truth.manifest.shards
    return (first.model_copy(update=changes), *rest)


def _with(truth: Truth, **changes: Any) -> wire.Manifest:
    return truth.manifest.model_copy(update=changes)


def _honest(truth: Truth, _rng: random.Random) -> wire.Manifest:
    return truth.manifest


def _slow_and_late(truth: Truth, rng: random.Random) -> wire.Manifest:
    """Claims times and losses that nobody can have measured."""
    times = {"step_time_s": rng.choice([0.0, 1e-9, 1e12]), "encode_s": 1e12, "upload_s": 1e12}
    return _with(truth, **times, loss=rng.choice([-1e300, 0.0, 1e300]))


def _many_tokens(truth: Truth, _rng: random.Random) -> wire.Manifest:
    return _with(truth, tokens=wire.GREATEST)


def _many_steps(truth: Truth, rng: random.Random) -> wire.Manifest:
    steps = rng.choice([10**9, wire.GREATEST])
    return _with(truth, steps=steps, tokens=steps)


def _control_characters(truth: Truth, _rng: random.Random) -> wire.Manifest:
    return _with(truth, shards=_shards(truth, name="\x1b" * 512))


def _outside_of_its_prefix(truth: Truth, _rng: random.Random) -> wire.Manifest:
    name = truth.manifest.shards[0].name
    return _with(truth, shards=_shards(truth, name=f"{name}/../../{name}"))


def _anothers_work(truth: Truth, rng: random.Random) -> wire.Manifest:
    """Claims the shards of another learner's update."""
    if not truth.others:
        return _future(truth, rng)
    return _with(truth, shards=rng.choice(truth.others).shards)


def _missing(truth: Truth, _rng: random.Random) -> wire.Manifest:
    name = truth.manifest.shards[0].name
    prefix, _ = name.rsplit(".", 1)
    return _with(truth, shards=_shards(truth, name=f"{prefix}.77"))


def _altered(truth: Truth, _rng: random.Random) -> wire.Manifest:
    return _with(truth, shards=_shards(truth, crc32c=truth.manifest.shards[0].crc32c ^ 1))


def _too_long(truth: Truth, _rng: random.Random) -> wire.Manifest:
    return _with(truth, shards=_shards(truth, size_bytes=wire.GREATEST))


def _blocks_twice(truth: Truth, _rng: random.Random) -> wire.Manifest:
    return _with(truth, shards=truth.manifest.shards * 2)


def _blocks_of_nowhere(truth: Truth, _rng: random.Random) -> wire.Manifest:
    far = wire.Slice(start=wire.GREATEST, shape=(wire.GREATEST,), strides=(1,))
    return _with(truth, shards=_shards(truth, slices=(far,)))


def _future(truth: Truth, _rng: random.Random) -> wire.Manifest:
    return _with(truth, base_version=truth.manifest.base_version + 1000)


def _another_view(truth: Truth, _rng: random.Random) -> wire.Manifest:
    return _with(truth, base_digest="0" * 32)


def _another_layout(truth: Truth, _rng: random.Random) -> wire.Manifest:
    return _with(truth, layout="0" * 32)


def _another_epoch(truth: Truth, rng: random.Random) -> wire.Manifest:
    return _with(truth, epoch=truth.manifest.epoch + rng.choice([1, 7]))


def _unborn(truth: Truth, _rng: random.Random) -> wire.Manifest:
    return _with(truth, incarnation=truth.manifest.incarnation + 10**6)


Lie = Callable[[Truth, random.Random], wire.Manifest]
# Lies that may be merged: their claims are credited only as far as they are credible, or they are
# judged by rules that depend on when they come.
MAY_BE_MERGED: tuple[Lie, ...] = (
    _honest,
    _slow_and_late,
    _another_view,
    _many_tokens,
    _many_steps,
)
LIES: tuple[Lie, ...] = (
    *MAY_BE_MERGED,
    _control_characters,
    _outside_of_its_prefix,
    _anothers_work,
    _missing,
    _altered,
    _too_long,
    _blocks_twice,
    _blocks_of_nowhere,
    _future,
    _another_layout,
    _another_epoch,
    _unborn,
)


class Liar:
    """A hostile learner's process.

    Args:
        context: the liar's context, with its own bus and store.
        world: the simulated world, whose checkers are told which updates are lies.
        rng: draws the lies.
        positions: yields data positions, ascending over all incarnations of the liar.
    """

    def __init__(
        self, context: LearnerContext, world: World, rng: random.Random, positions: Iterator[int]
    ) -> None:
        self._context = context
        self._world = world
        self._rng = rng
        self._seqs = [0 for _ in world.layout.fragments]
        self._positions = positions

    async def live(self) -> None:
        """Join the run, and send lies until the process is ended."""
        life = await join(self._context, "somewhere")
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / EVERY_S))
            try:
                await self._lie(life.incarnation)
            except DilocoError as error:
                if not error.retry:
                    raise

    async def _lie(self, incarnation: int) -> None:
        world, context = self._world, self._context
        fragment = self._rng.randrange(len(self._seqs))
        chain = world.checkers.chains[fragment]
        if chain.record is None:
            return  # A new tape has no record of this fragment yet.
        honest = [one.manifest for one in chain.sent.values()]
        others = [one for one in honest if one and one.learner != context.learner]
        true = await self._true(fragment, incarnation, chain.record)
        truth = Truth(true, others)
        lie = self._rng.choice(LIES)
        manifest = lie(truth, self._rng)
        payload = wire.encode(manifest)
        if self._rng.random() < GARBLED:
            payload = _garbled(payload, self._rng)
        else:
            update = UpdateId(manifest.learner, manifest.incarnation, manifest.seq)
            world.checkers.admission.hostile[fragment, update] = lie in MAY_BE_MERGED
        world.injected["hostile"] += 1
        subject = names.update(context.run, context.learner, fragment)
        await context.bus.publish(subject, payload)

    async def _true(self, fragment: int, incarnation: int, record: wire.Record) -> wire.Manifest:
        """Stores an update of one step on a record's version; returns its true manifest."""
        world, context = self._world, self._context
        self._seqs[fragment] += 1
        position = next(self._positions)
        replica = world.tensors.replica(
            LIAR_INDEX, world.settings.sync, world.layout, [None] * len(self._seqs)
        )
        replica.begin(position - 1)
        replica.position = position
        send = Send(
            fragment=fragment,
            seq=self._seqs[fragment],
            base_version=record.version,
            base_digest=record.view_digest,
            tokens=TOKENS,
            steps=1,
            final=False,
        )
        stored = await Uploader(context, replica).store(incarnation, send, replica.send(fragment))
        return wire.Manifest(
            run=context.run,
            learner=context.learner,
            epoch=context.epoch,
            incarnation=incarnation,
            seq=send.seq,
            fragment=fragment,
            base_version=send.base_version,
            base_digest=send.base_digest,
            layout=context.layout.digest,
            codec="float32",
            shards=stored.shards,
            tokens=send.tokens,
            steps=send.steps,
            position=position,
            local_step=position,
            loss=1.0,
            step_time_s=1.0,
            encode_s=0.0,
            upload_s=0.0,
            attempt=0,
            final=False,
        )


def _garbled(payload: bytes, rng: random.Random) -> bytes:
    """Returns a damaged message: of a later schema, in another's name, cut short, or empty."""
    return rng.choice(
        [
            payload.replace(b"\xa6schema\x01", b"\xa6schema\x02"),
            payload.replace(LIAR.encode(), b"learner-0"),
            payload[: rng.randrange(len(payload))],
            b"",
        ]
    )
