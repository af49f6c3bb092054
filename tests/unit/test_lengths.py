"""How long an update's message may be, from the layout alone."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scenarios"))

from machinelab import LAYOUT, lab_rules, make_manifest

from diloco.aggregator.owner import tenure
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import WireError
from diloco.common.protocol.slices import MOST_SLICES
from diloco.common.storage.bus import Message
from diloco.common.storage.tape import check_length
from diloco.common.storage.tape.messages import manifest_bytes

GREAT = wire.GREATEST
LONG = "x" * 40


def longest(shards: int, slices: int) -> int:
    """Bytes of a manifest of so many shards and slices, whose every field is as long as it gets."""
    axes = (GREAT,) * wire.MAX_AXES
    box = wire.Slice(start=GREAT, shape=axes, strides=axes)
    name = names.shard(LONG, LONG, GREAT, GREAT, GREAT, GREAT, GREAT)
    each = slices // shards
    counts = [each + slices - each * shards, *[each] * (shards - 1)]
    shard = wire.Shard(name=name, size_bytes=GREAT, crc32c=(1 << 32) - 1, slices=(box,))
    changes = dict.fromkeys(
        ("fragment", "seq", "epoch", "base_version", "tokens", "steps", "position", "local_step"),
        GREAT,
    )
    sent = make_manifest(lab_rules(), LONG, GREAT, 1).model_copy(
        update={
            **changes, "run": LONG, "attempt": GREAT, "codec": "bfloat16", "final": True,
            "shards": tuple(
                shard.model_copy(update={"slices": (box,) * count}) for count in counts
            ),
        }
    )  # fmt: skip
    return len(wire.encode(sent))


@pytest.mark.parametrize("blocks", [1, 2, 15, 16, 17, 128, 800])
@pytest.mark.parametrize("part", [1, 2, 16])
def test_no_manifest_of_a_fragment_is_longer_than_its_bound(blocks, part):
    shards = max(1, blocks // part)
    assert longest(shards, blocks) <= manifest_bytes(blocks)


def test_the_bound_is_near_what_a_small_fragment_needs_and_never_above_a_messages():
    assert manifest_bytes(128) < 1.1 * longest(128, 128)
    assert manifest_bytes(10**12) == wire.MESSAGE_BYTES
    assert manifest_bytes(MOST_SLICES) == wire.MESSAGE_BYTES


def test_what_is_too_long_for_its_fragment_is_no_update_and_comes_without_its_bytes():
    blocks = LAYOUT.fragments[0].size // LAYOUT.block
    subject = names.update("lab", "a", 0)
    fits, too_long = (
        Message(subject, 7, 1.0, bytes(manifest_bytes(blocks) + n), "") for n in (0, 1)
    )
    stored = tenure._update_stored(LAYOUT, fits, "a")
    assert stored.why is None
    assert stored.message is fits
    stored = tenure._update_stored(LAYOUT, too_long, "a")
    assert stored.why is not None
    assert stored.why.reason == "oversize"
    assert stored.message.payload == b""
    assert stored.event.size_bytes == len(too_long.payload)


@pytest.mark.parametrize(
    "subject", [names.join("lab", "a"), names.update("lab", "a", 77), names.record("lab", 0)]
)
def test_the_bound_is_of_updates_of_this_layout_alone(subject):
    check_length(LAYOUT, subject, 1 << 20)
    with pytest.raises(WireError, match="at most"):
        check_length(LAYOUT, names.update("lab", "a", 0), 1 << 20)
