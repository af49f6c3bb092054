"""The powers of a learner with good credentials and bad intentions: publishing and storing.

Every well-formed update gets its verdict with the reason in a record and a copy on the rejected
subject; what is no update is sampled there; honest learners do not notice.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
from audit import read_tape
from harness import ENDLESS, World
from mallory import TOKENS_PER_STEP, Mallory

from diloco.common.protocol import names, shards, slices, wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.shards import HEADER
from diloco.common.storage.bus import Bus, Message
from diloco.common.storage.tape import decode, messages_of
from diloco.run.history import Sent


async def lie_in_manifests(mallory: Mallory, bus: Bus) -> None:
    """Manifests that show by themselves that they cannot be merged."""
    digest, block = "0" * 32, mallory.tape.settings.sync.block
    blocks = mallory.tape.layout.fragments[0].size // block

    def box(shape: tuple[int, ...], strides: tuple[int, ...]) -> wire.Slice:
        return wire.Slice(start=0, shape=shape, strides=strides)

    def first_shard(**changes: Any) -> Callable[[wire.Manifest], dict[str, Any]]:
        def change(own: wire.Manifest) -> dict[str, Any]:
            first, *more = own.shards
            return {"shards": (first.model_copy(update=changes), *more)}

        return change

    tricks: list[tuple[str, Callable[[wire.Manifest], dict[str, Any]]]] = [
        ("layout", lambda _: {"layout": digest}),
        ("codec", lambda _: {"codec": "int8"}),
        ("future", lambda _: {"base_version": 10**6}),
        ("base_digest", lambda _: {"base_digest": digest}),
        ("view", lambda _: {"held_digest": digest}),
        ("shards", lambda own: {"shards": own.shards * 3}),
        ("shards", lambda own: {"shards": own.shards[:1]}),
        ("shards", first_shard(slices=slices.of_range(0, block, block))),
        ("shards", first_shard(slices=slices.of_range(0, 1 << 62, block))),
        ("shards", first_shard(slices=(box((1 << 62,) * 4, (1,) * 4),))),
        ("shards", first_shard(slices=(box((2, 2), (1, 1)),))),
        ("shards", first_shard(slices=(box((2, 2), (1,)),))),
        ("shards", first_shard(slices=slices.of_range(0, block, block) * (1 + blocks))),
        ("shards", lambda own: {"shards": (own.shards[0], *own.shards[:-1])}),
        ("name", first_shard(name=f"{mallory.world.name}/learner/honest/update/0/1-1.0")),
        ("name", first_shard(name="../../../etc/passwd")),
        ("name", lambda own: {"shards": one_name(own.shards)}),
        ("size", first_shard(size_bytes=1 << 40)),
        ("size", first_shard(size_bytes=1)),
    ]
    for number, (reason, changes) in enumerate(tricks):
        learner = f"lies-{number}"
        await mallory.join(bus, learner)
        own = mallory.manifest(learner)
        await mallory.refused_for(bus, reason, own.model_copy(update=changes(own)))


def one_name(entries: tuple[wire.Shard, ...]) -> tuple[wire.Shard, ...]:
    """One object for two parts of the fragment."""
    first, second, *more = entries
    return (first, second.model_copy(update={"name": first.name}), *more)


async def lie_in_shards(mallory: Mallory, bus: Bus) -> None:
    """Manifests that are right, with objects that are not."""
    good, *rest = mallory.payloads(0)
    block = mallory.tape.settings.sync.block
    infinite = bytearray(good)
    infinite[HEADER.size : HEADER.size + 2] = b"\x80\x7f"
    negative = bytearray(good)
    negative[HEADER.size : HEADER.size + 2] = b"\x80\xbf"
    no_code = bytearray(good)
    no_code[-1] = 0
    flipped = bytearray(good)
    flipped[-1] ^= 0x11
    magic = b"EVIL" + good[4:]
    denormal = bytearray(good)
    denormal[HEADER.size : HEADER.size + 2] = b"\x01\x00"
    not_a_number = bytearray(good)
    not_a_number[HEADER.size : HEADER.size + 2] = b"\xc0\x7f"
    # A good shard, but of another part of another update.
    swapped = mallory.payloads(0, 2e-3)[1]
    # What is stored, and whether the manifest's checksum is of it or of the honest bytes.
    tricks: dict[str, tuple[bytes, bool]] = {
        "truncated": (good[: len(good) // 2], True),
        "truncated-2": (b"", True),
        "oversize": (good + b"\0" * 4096, True),
        "oversize-2": (good + b"\0" * (64 << 20), True),
        "checksum": (bytes(flipped), False),
        "bad_scale": (bytes(infinite), True),
        "bad_scale-2": (bytes(negative), True),
        "bad_scale-3": (bytes(denormal), True),
        "bad_scale-4": (bytes(not_a_number), True),
        "checksum-2": (swapped, False),
        "bad_code": (bytes(no_code), True),
        "bad_magic": (magic, True),
        "codec_mismatch": (HEADER.pack(b"DLS2", 3, 0, block, 7) + good[HEADER.size :], True),
    }
    for number, (name, (data, own_checksum)) in enumerate(tricks.items()):
        learner = f"shards-{number}"
        await mallory.join(bus, learner)
        manifest = mallory.manifest(learner, [data, *rest])
        entry = manifest.shards[0].model_copy(update={"size_bytes": len(good)})
        if not own_checksum:
            entry = entry.model_copy(update={"crc32c": shards.crc32c(good)})
        manifest = manifest.model_copy(update={"shards": (entry, *manifest.shards[1:])})
        await mallory.refused_for(bus, name.split("-")[0], manifest)
    await mallory.join(bus, "shards-missing")
    await mallory.refused_for(bus, "missing", mallory.manifest("shards-missing"))


async def lie_about_lives(mallory: Mallory, bus: Bus) -> None:
    """Incarnations that never were, or are over."""
    mallory.lives["ghost"] = 1
    await mallory.refused_for(bus, "unknown_incarnation", mallory.manifest("ghost"))
    first = await mallory.join(bus, "twice")
    early = mallory.manifest("twice")
    await mallory.join(bus, "twice")
    assert early.incarnation == first
    await mallory.refused_for(bus, "superseded", early)
    # More lives that never were than the machine keeps marks of.
    await mallory.join(bus, "cat")
    for life in range(9):
        manifest = mallory.manifest("cat").model_copy(update={"incarnation": 10**6 + life})
        await mallory.refused_for(bus, "unknown_incarnation", manifest)
    await mallory.refused_for(bus, "missing", mallory.manifest("cat"))


async def repeat(mallory: Mallory, bus: Bus) -> None:
    """One update, announced again and again."""
    await mallory.join(bus, "parrot")
    manifest = mallory.manifest("parrot", layout="0" * 32)
    for attempt in range(5):
        await mallory.refused_for(
            bus, "layout", manifest.model_copy(update={"attempt": attempt // 2})
        )


async def send_garbage(mallory: Mallory, bus: Bus, learner: str) -> None:
    """Publishes bytes that are no manifest on the subjects of manifests."""
    await mallory.join(bus, learner)
    good = mallory.manifest(learner).model_dump()
    fields = {**good, "schema": wire.SCHEMA, "kind": "update"}
    nested: Any = ()
    for _ in range(400):
        nested = (nested,)

    def packed(**changes: Any) -> bytes:
        changed = {**fields, **changes}
        return msgpack.packb({k: v for k, v in changed.items() if v is not None})

    for payload in (
        b"",
        b"\xc1",
        b"not a message",
        secrets.token_bytes(4096),
        msgpack.packb([1, 2, 3]),
        msgpack.packb(7),
        msgpack.packb(nested),
        msgpack.packb({1: 2}),
        msgpack.packb({"kind": "update"}),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        msgpack.packb(msgpack.ExtType(5, b"x" * 100)),
        packed()[:-1],
        packed() + b"\0",
        packed(schema=99),
        packed(schema="1"),
        packed(schema=True),
        packed(schema=None),
        packed(kind="record"),
        packed(extra=1),
        packed(tokens=None),
        packed(tokens=-1),
        packed(tokens=0),
        packed(tokens=1.0),
        packed(tokens="80"),
        packed(steps=0),
        packed(steps=1 << 63),
        packed(loss=float("nan")),
        packed(step_time_s=float("inf")),
        packed(step_time_s=-1.0),
        packed(codec="int3"),
        packed(shards=()),
        packed(shards=[{"name": "x"}]),
        packed(shards=fields["shards"][:1] * 4097),
        packed(base_digest="x"),
        packed(learner="Honest"),
        packed(learner="lies-0"),
        packed(run="other"),
        packed(fragment=1),
        b"\x81\xa1x\xc6\x00\x0f\x00\x00" + b"\0" * 0xF0000,
    ):
        await mallory.raw(bus, payload, learner)
    for fragment in ("77", "x", "-1", "0x0"):
        await mallory.raw(bus, packed(), learner, fragment)
    run = mallory.world.name
    for subject in (
        names.join(run, learner),
        names.leave(run, learner),
        names.heartbeat(run, learner),
        names.rejected(run, learner),
    ):
        for payload in (b"", b"\xc1", packed()):
            await bus.publish(subject, payload)
    for payload in (b"", b"\xc1" * 100, packed()):
        await bus.broadcast(names.round_open(run, 0), payload)


def verdicts(world: World) -> dict[Sent, str]:
    return {sent: taken.reason for sent, taken in read_tape(world).rejected().items()}


def shown(world: World) -> list[wire.Rejection]:
    """Every copy on the rejected subjects."""
    subject = names.rejected(world.name, "*")
    stream = names.ops_stream(world.name)
    found = []

    async def read(bus: Bus) -> list[Message]:
        subjects = [names.heartbeat(world.name, "*"), subject]
        return [message async for message in messages_of(bus, stream, subjects)]

    for message in world.ask(read):
        with contextlib.suppress(WireError):  # Mallory writes there too
            said = decode(message.subject, message.payload)
            if isinstance(said, wire.Rejection):
                found.append(said)
    return found


def test_lies_are_answered_and_honest_work_goes_on(new_world):
    world = new_world(
        run=ENDLESS,
        task={"options": {"notes": "notes", "sleep_s": 0.06}},
        # All get an answer, however many and however long they are.
        bounds={"max_tokens_per_step": TOKENS_PER_STEP, "max_updates_per_s": 1000.0},
    )
    aggregator = world.aggregator()
    mallory = Mallory(world, read_tape(world))
    for part in (lie_about_lives, repeat, lie_in_manifests, lie_in_shards):
        world.ask(lambda bus, part=part: part(mallory, bus))
    # Version 0 stands still: every verdict is what one expects of it.
    world.until(lambda: mallory.expected.keys() <= verdicts(world).keys(), "all verdicts")
    assert verdicts(world) == mallory.expected
    world.ask(lambda bus: send_garbage(mallory, bus, "garbage"))
    # The honest learner finds garbage under its own name when it begins.
    world.ask(lambda bus: send_garbage(mallory, bus, "honest"))
    honest = world.learner("honest")
    world.until(lambda: min(read_tape(world).versions()) >= 3, "versions")
    assert aggregator.running
    world.ask(lambda bus: send_garbage(mallory, bus, "honest-2"))
    world.ask(lambda bus: overwhelm(mallory, bus))
    reached = max(read_tape(world).versions()) + 2
    world.until(lambda: min(read_tape(world).versions()) >= reached, "more versions")
    world.ask(mallory.leave)
    world.stop()
    assert [honest.wait(), aggregator.wait()] == [0, 0]
    honest.check_clean_log()
    aggregator.check_clean_log()

    tape = read_tape(world)
    tape.check(hostile=[*mallory.names])
    assert {sent: taken.reason for sent, taken in tape.rejected().items()} == mallory.expected
    assert {sent.learner for sent in tape.merged()} <= {"honest", "feather", "greedy"}
    records = (record for fragment in range(3) for _, record in tape.records[fragment])
    for taken in (t for record in records for t in record.inputs if t.learner == "greedy"):
        assert taken.steps_credited < 10**6 < taken.steps
        assert taken.tokens_credited <= TOKENS_PER_STEP * taken.steps_credited
    assert all(np.isfinite(leaf).all() for leaf in world.params().values())
    copies = {
        Sent(copy.learner, copy.incarnation, copy.fragment, copy.seq): copy.reason
        for copy in shown(world)
        if copy.seq
    }
    assert copies == mallory.expected
    samples = {copy.reason for copy in shown(world) if not copy.seq}
    assert {"undecodable", "schema", "kind", "malformed", "sender", "oversize"} <= samples


async def overwhelm(mallory: Mallory, bus: Bus) -> None:
    """Updates that are well-formed and far too small for their claims."""
    mallory.tape = await asyncio.to_thread(read_tape, mallory.world)
    await mallory.join(bus, "greedy")
    for fragment in range(3):
        small = mallory.payloads(fragment, 2.0**-63)
        claims = {"steps": 10**9, "tokens": (1 << 63) - 1, "step_time_s": 1e-12}
        await mallory.publish(bus, mallory.manifest("greedy", small, fragment=fragment, **claims))
    await mallory.join(bus, "feather")
    for fragment, steps in itertools.product(range(3), [10_000]):
        feather = mallory.manifest(
            "feather",
            mallory.payloads(fragment, 2.0**-63),
            fragment=fragment,
            steps=steps,
            tokens=steps * TOKENS_PER_STEP,
        )
        await mallory.publish(bus, feather)
