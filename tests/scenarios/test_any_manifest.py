"""Every manifest that decodes gets a record that encodes and decodes.

What stands in a manifest is its sender's; whatever it is, it must not make a record that nobody can
write or read: that would stop the fragment for ever, at each restart again.
"""

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st
from machinelab import Lab, lab_rules, make_manifest

from diloco.aggregator.core import events
from diloco.aggregator.core.events import Fetch
from diloco.common.protocol import wire
from diloco.common.protocol.errors import WireError

NAMES = st.one_of(
    st.text(min_size=1, max_size=512),
    st.text(alphabet="\x00\x1b\x9f", min_size=500, max_size=512),
    st.just("\x01" * 512),
)
COUNTS = st.one_of(st.integers(0, 100), st.just(wire.GREATEST), st.integers(0, wire.GREATEST))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
SLICES = st.lists(
    st.builds(
        dict,
        start=COUNTS,
        shape=st.lists(COUNTS, min_size=1, max_size=4).map(tuple),
        strides=st.lists(COUNTS, min_size=1, max_size=4).map(tuple),
    ),
    max_size=3,
).map(tuple)
SHARDS = st.lists(
    st.builds(dict, name=NAMES, size_bytes=COUNTS, crc32c=st.integers(0, 1 << 32), slices=SLICES),
    min_size=1,
    max_size=4,
).map(tuple)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "shards": SHARDS,
        "shard_name": NAMES,
        "codec": st.text(max_size=3000),
        "layout": st.text(alphabet="0123456789abcdef", min_size=32, max_size=32),
        "base_digest": st.text(max_size=3000),
        "held_digest": st.text(max_size=3000),
        "base_version": COUNTS,
        "tokens": COUNTS,
        "steps": COUNTS,
        "position": COUNTS,
        "local_step": COUNTS,
        "seq": COUNTS,
        "incarnation": COUNTS,
        "epoch": COUNTS,
        "loss": FLOATS,
        "step_time_s": FLOATS,
        "encode_s": FLOATS,
        "upload_s": FLOATS,
        "attempt": COUNTS,
        "final": st.booleans(),
    },
)


def decoded(rules, fields) -> wire.Manifest | None:
    """A manifest as the tape brings it; None if no reader takes it."""
    honest = make_manifest(rules, "liar", 1, 1)
    shown = honest.model_dump()
    if (name := fields.pop("shard_name", None)) is not None:
        shown["shards"] = ({**shown["shards"][0], "name": name}, *shown["shards"][1:])
    raw = {**shown, **fields, "schema": wire.SCHEMA, "kind": wire.Manifest.kind}
    try:
        return wire.decode(wire.Manifest, msgpack.packb(raw))
    except WireError:
        return None


@settings(max_examples=400)
@given(FIELDS, st.floats(0, 1e300), st.booleans())
def test_every_manifest_that_decodes_gets_a_record(fields, norm, fails):
    lab = Lab(lab_rules(**{"quorum.grace_fraction": 0.0}))
    lab.step(lab.put(events.Joined, 100.0, "liar"))
    manifest = decoded(lab.rules, dict(fields, incarnation=fields.get("incarnation", 1)))
    if manifest is None:
        return
    # Of its newest life, as mostly; or of one that it made up.
    if manifest.incarnation == 1:
        manifest = manifest.model_copy(update={"incarnation": lab.tape[-1].stream_seq})
    effects = lab.step(lab.put(events.Announced, 124.0, manifest))
    for effect in effects:
        if isinstance(effect, Fetch) and fails:
            lab.step(events.Failed(125.0, effect.update, "checksum", manifest.codec * 100))
        elif isinstance(effect, Fetch):
            lab.step(events.Fetched(125.0, effect.update, norm))
    for _ in range(3):
        if lab.open_commit is not None:
            lab.commit(130.0)  # through the wire
        elif lab.cut_asked:
            lab.step(events.CutKnown(130.0, lab.last_update()))
        elif (due_s := lab.deadline()) is not None:
            lab.step(events.Timer(due_s))
