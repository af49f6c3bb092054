"""All decoders of input from others, with inputs that hypothesis draws for each.

A decoder takes bytes and returns, or raises one of our own errors. What it draws from is mostly
right: garbage alone would never come past the first check.
"""

import contextlib
import gzip
import string
import struct
import tomllib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import tomli_w
from hypothesis import strategies as st
from messages import BODIES, EXAMPLES, fields_of, json_like, messages

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.core import admission_and_credit
from diloco.aggregator.core import round_and_weight_formulas as formulas
from diloco.aggregator.owner.tenure import decode_event
from diloco.common.process.config import RunSettings, load_config, parse_settings, warnings
from diloco.common.process.credentials import Credentials, load_credentials, render_credentials
from diloco.common.protocol import names, shards, wire
from diloco.common.protocol.codecs import CODECS, Encoded, code_count, code_dtype
from diloco.common.protocol.errors import IntegrityError, WireError
from diloco.common.protocol.layout import Tensor, layout_bytes, make_layout, parse_layout
from diloco.common.storage.bundle import open_bundle, read_header
from diloco.common.storage.bundle.frames import MAGIC
from diloco.common.storage.bus import Message
from diloco.common.storage.store import MemoryStore
from diloco.common.storage.tape import parse_changed
from diloco.learner.tensors import checkpoint
from diloco.learner.tensors.quantize_and_pack import encode
from diloco.models.data.documents import Reading, read_documents
from diloco.models.data.manifest import (
    Counted,
    PrepareOptions,
    TokenizerFacts,
    TokenManifest,
    TokenShard,
    TokenSource,
    json_bytes,
    parse_manifest,
)
from diloco.models.data.sources import find_files

BLOCK = 16
COUNT = 8 * BLOCK
SETTINGS = RunSettings.model_validate(
    {"run": {"name": "r", "steps": 9}, "sync": {"fragments": 1, "block": BLOCK}}
)
LAYOUT = make_layout(
    [Tensor(name="w", shape=(8, BLOCK), dtype="float32")], fragments=1, block=BLOCK
)
RULES = formulas.fragment_rules(SETTINGS, LAYOUT, 0)


class Decoder(NamedTuple):
    """`draws` are inputs; `examples` right ones, parts of which are mixed into others.

    `bounded`: its memory is in proportion to its input. A file of one's own may be as it likes.
    """

    draws: st.SearchStrategy[bytes]
    examples: tuple[bytes, ...]
    decode: Callable[[bytes], object]
    bounded: bool = True


# Messages


def drawn_messages(body: type[wire.Body]) -> st.SearchStrategy[bytes]:
    """Right messages, and those with something else in some fields."""
    strange = st.dictionaries(st.sampled_from(sorted(body.model_fields)), json_like, max_size=3)
    return messages(body).map(wire.encode) | strange.map(
        lambda fields: msgpack.packb(fields_of(EXAMPLES[body]) | fields)
    )


def decode_message(body: type[wire.Body]) -> Callable[[bytes], object]:
    return lambda data: wire.decode(body, data)


def message_decoders() -> dict[str, Decoder]:
    return {
        f"message {body.kind}": Decoder(
            drawn_messages(body), (wire.encode(EXAMPLES[body]),), decode_message(body)
        )
        for body in BODIES
    }


EVENTS: dict[str, type[wire.Body]] = {
    "join.x": wire.Join,
    "leave.x": wire.Leave,
    "claim.x": wire.Claim,
    "update.x.0": wire.Manifest,
    "quarantine.x": wire.Quarantine,
}


def of_its_subject(message: wire.Body) -> bytes:
    """With the names that its subject has: another sender is refused before all else."""
    own = {"run": "r", "learner": "x", "fragment": 0}
    known = {name: value for name, value in own.items() if name in type(message).model_fields}
    return wire.encode(message.model_copy(update=known))


def drawn_events() -> st.SearchStrategy[bytes]:
    bodies = EVENTS.values()
    return st.one_of(
        *(messages(body).map(of_its_subject) for body in bodies), *map(drawn_messages, bodies)
    )


def tape_message(data: bytes) -> Message:
    return Message("diloco.r.join.x", 7, 1.0, data, "id")


def decode_on_tape(data: bytes) -> None:
    """As an aggregator meets a message on the tape, on each subject that it reads."""
    faults = []
    for subject in EVENTS:
        try:
            decode_event(Message(f"diloco.r.{subject}", 7, 1.0, data, None), 0)
        except WireError as error:
            faults.append(error)
    try:
        wire.decode_record(data)
    except WireError:
        if len(faults) == len(EVENTS):
            raise faults[-1] from None


def judge_manifest(data: bytes) -> None:
    """Judges a decoded manifest by the run's rules, which must raise no error."""
    admission_and_credit.malformed(RULES, wire.decode(wire.Manifest, data))


# Objects


def shard(codec: Any) -> bytes:
    values = np.linspace(-1, 1, COUNT, dtype=np.float32)
    return shards.pack(codec, encode(codec, values, BLOCK), BLOCK)


def shard_decoders() -> dict[str, Decoder]:
    def decode(codec: Any) -> Callable[[bytes], object]:
        return lambda data: shards.unpack(data, codec=codec, count=COUNT, block=BLOCK)

    found = {}
    for codec in CODECS:
        right = shard(codec)
        body = st.binary(min_size=len(right) - 16, max_size=len(right) - 16)
        draws = body.map(lambda codes, head=right[:16]: head + codes)
        found[f"shard {codec}"] = Decoder(draws, (right,), decode(codec))
    return found


def delta_decoders() -> dict[str, Decoder]:
    """Of whole deltas, and of some blocks of them; most drawn have right checksums."""

    def whole(codec: Any) -> Callable[[bytes], object]:
        return lambda data: shards.unpack_delta(data, codec=codec, count=COUNT, block=BLOCK)

    def parts(codec: Any) -> Callable[[bytes], object]:
        def decode(data: bytes) -> object:
            store = MemoryStore()
            store.put("o", data)
            return shards.read_blocks(
                partial(store.get_range, "o"),
                codec=codec,
                count=COUNT,
                block=BLOCK,
                blocks=np.asarray([1, 5]),
            )

        return decode

    def packed(codec: Any, body: bytes) -> bytes:
        scales = len(body) - code_count(codec, COUNT) * code_dtype(codec).itemsize
        codes = np.frombuffer(body, code_dtype(codec), offset=scales)
        encoded = Encoded(np.frombuffer(body[:scales], np.uint16), codes)
        return shards.pack_delta(codec, encoded, BLOCK)

    found = {}
    for codec in CODECS:
        right = shard(codec)[16:]
        body = st.binary(min_size=len(right), max_size=len(right))
        draws = body.map(partial(packed, codec))
        example = (packed(codec, right),)
        found[f"delta {codec}"] = Decoder(draws, example, whole(codec))
        found[f"delta {codec}, parts"] = Decoder(draws, example, parts(codec))
    return found


ARRAYS = FragmentArrays.from_view(
    SETTINGS, LAYOUT, 0, np.ones(LAYOUT.fragments[0].size, np.float32)
)
VIEW = bytes(ARRAYS.view_object())


def decode_outer(data: bytes) -> None:
    FragmentArrays.from_objects(SETTINGS, LAYOUT, 0, view=VIEW, outer_state=data)


def decode_layout(data: bytes) -> None:
    """Under its own digest: that of the run would hold off everything."""
    parse_layout(data, shards.digest(data))


STATE = {"mean": jnp.ones((3, 2)), "count": jnp.ones((), jnp.int32)}
LIKE = jax.eval_shape(lambda: STATE)


def learner_checkpoint() -> bytes:
    arrays = checkpoint.on_host(STATE)
    facts = checkpoint.Facts(
        run="r", learner="x", layout="0" * 32, epoch=0, incarnation=1, local_step=1, tokens=1,
        position=1, global_step=1, leaves=checkpoint.describe(LIKE, arrays),
    )  # fmt: skip
    return bytes(checkpoint.pack(checkpoint.HostCheckpoint(facts, arrays)))


def decode_checkpoint(data: bytes) -> None:
    found = checkpoint.unpack(data)
    checkpoint.check_facts(found.facts, LIKE, run="r", layout="0" * 32, learner="x")
    checkpoint.rebuild(LIKE, found)


def decode_names(data: bytes) -> None:
    name = data.decode(errors="replace")
    names.parse_version_object("r", 0, name)
    names.parse_shard("r", name)


NAMES = (
    names.shard("r", "x", 0, 0, 7, 1, 0).encode(),
    names.version_object("r", 0, 12, "delta", "0" * 32).encode(),
)


# Configuration


PLAIN = string.ascii_letters + string.digits + "-_./:é "
toml_like = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(PLAIN) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(PLAIN), inner, max_size=3),
    max_leaves=5,
)
DOCUMENT: dict[str, dict[str, Any]] = {
    **SETTINGS.model_dump(exclude_none=True),
    "store": {"url": "/x"},
    "bus": {"url": "nats://x:1"},
    "learner": {"heartbeat_interval_s": 1.0},
    "gc": {"replay_window_s": 1.0},
}
KEYS = sorted((section, key) for section, keys in DOCUMENT.items() for key in keys)


def changed(replaced: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """The document with other values, or (key "") another section."""
    document: dict[str, Any] = {name: dict(keys) for name, keys in DOCUMENT.items()}
    for (section, key), value in replaced.items():
        if isinstance(document[section], dict):
            document[section][key] = value
    return document


replacements = st.dictionaries(st.sampled_from(KEYS), toml_like, max_size=3)


def file_decoder(
    folder: Path, name: str, load: Callable[[Path], object]
) -> Callable[[bytes], object]:
    path = folder / name

    def decode(data: bytes) -> None:
        path.touch(mode=0o600)
        path.write_bytes(data)
        load(path)

    return decode


def load_and_warn(path: Path) -> None:
    warnings(load_config(path).settings())


def settings_message(settings: Any) -> bytes:
    return wire.encode(wire.Settings(run="r", settings=settings, changed=(), by="test"))


def settings_of(replaced: dict[tuple[str, str], Any]) -> dict[str, Any]:
    sections = RunSettings.model_fields
    # msgpack has integers of 64 bits alone.
    document = tomllib.loads(tomli_w.dumps(changed(replaced)).replace(str(10**400), "1"))
    return {name: keys for name, keys in document.items() if name in sections}


def decode_settings(data: bytes) -> None:
    warnings(parse_changed(SETTINGS, Message("diloco.r.settings", 7, 1.0, data, "")))


def decode_specification(data: bytes) -> None:
    warnings(parse_settings(wire.decode(wire.Specification, data).settings))


def packable(value: Any) -> bool:
    try:
        msgpack.packb(value)
    except OverflowError:
        return False
    return True


# A bundle: the input is one frame among others, since checksums hold off all else.


def framed(data: bytes) -> bytes:
    return struct.pack("<II", len(data), shards.crc32c(data)) + data


def bundle_of(frame: bytes) -> bytes:
    head = msgpack.packb({"run": "r", "made_s": 1.0, "objects": True})
    end = msgpack.packb({"messages": 1, "objects": 0})
    return MAGIC + framed(head) + framed(frame) + framed(end)


def load_bundle(path: Path) -> None:
    content = path.read_bytes()
    for _ in range(2):  # As it is, and as a frame.
        with contextlib.suppress(IntegrityError):
            read_header(path)
        try:
            open_bundle(path).close()
        except IntegrityError as error:
            fault = error
            path.write_bytes(bundle_of(content))
        else:
            return
    raise fault


# Sources of tokens, and what a folder of them says of itself


def token_manifest() -> bytes:
    shard = TokenShard(
        name="train-00000.npy", side="train", size_bytes=138, documents=1, tokens=5,
        largest=7, sha256="a" * 64,
    )  # fmt: skip
    options = PrepareOptions(
        documents="file", field="text", held_out=0.1, shard_bytes=9, special=False
    )
    counted = Counted(documents=1, tokens=5)
    source = TokenSource(
        path="a", files=1, size_bytes=9, empty=0, train=counted, held_out=Counted()
    )
    facts = TokenizerFacts(sha256="b" * 64, rules_sha256="c" * 64, vocabulary=9)
    return json_bytes(
        TokenManifest(
            tokenizer=facts, dtype="uint16", begin=(), end=0, options=options,
            input_sha256="d" * 64, sources=(source,), shards=(shard,),
        )
    )  # fmt: skip


def read_source(path: Path) -> None:
    (file,) = find_files([str(path)])
    list(read_documents(file, 0, Reading("text", by_line=True, vocabulary=9, end=0)))


def token_decoders(folder: Path) -> dict[str, Decoder]:
    lines = b'{"text": "one \xc3\xbc"}\n{"n": 1, "text": null}\n\n{"text": "\\ud83d\\ude42"}'
    right = token_manifest()
    found = {
        "token manifest": Decoder(
            st.just(right), (right,), lambda data: parse_manifest(data, "tokens.json")
        )
    }
    tokens = np.asarray([5, 0, 6, 7, 0], "<u2").tobytes()

    def read_indexed(path: Path) -> None:
        path.with_suffix(".bin").write_bytes(tokens)
        read_source(path)

    index = struct.pack("<9sQBQQ2i5q", b"MMIDIDX\0\0", 1, 8, 2, 3, 2, 3, 0, 4, 0, 1, 2)
    decode = file_decoder(folder, "indexed.idx", read_indexed)
    found["source .idx"] = Decoder(st.just(index), (index,), decode, bounded=False)
    sources = {".jsonl": lines, ".txt": lines, ".json.gz": gzip.compress(lines), ".bin": tokens}
    for suffix, data in sources.items():
        decode = file_decoder(folder, f"source{suffix}", read_source)
        found[f"source {suffix}"] = Decoder(st.just(data), (data,), decode, bounded=False)
    return found


@cache
def decoders(folder: Path) -> dict[str, Decoder]:
    """All by name; files are read from `folder`."""
    settings = replacements.map(settings_of).filter(packable)
    specification = EXAMPLES[wire.Specification]
    credentials = Credentials(run="r", identity="x", role="learner", seed="SUAB")
    layout, outer = layout_bytes(LAYOUT), bytes(ARRAYS.outer_object())
    kept = learner_checkpoint()
    right_config = tomli_w.dumps(DOCUMENT).encode()
    right_credentials = render_credentials(credentials).encode()
    events = [of_its_subject(EXAMPLES[body]) for body in EVENTS.values()]
    manifests = drawn_messages(wire.Manifest)
    return {
        **message_decoders(),
        **shard_decoders(),
        **delta_decoders(),
        "tape": Decoder(drawn_events(), tuple(events), decode_on_tape),
        "manifest's judgement": Decoder(
            manifests, (wire.encode(EXAMPLES[wire.Manifest]),), judge_manifest
        ),
        "outer state": Decoder(st.just(outer), (outer,), decode_outer),
        "layout": Decoder(st.just(layout), (layout,), decode_layout),
        "learner's checkpoint": Decoder(st.just(kept), (kept,), decode_checkpoint),
        "object names": Decoder(st.sampled_from(NAMES), NAMES, decode_names),
        "configuration": Decoder(
            replacements.map(lambda replaced: tomli_w.dumps(changed(replaced)).encode()),
            (right_config,),
            file_decoder(folder, "run.toml", load_and_warn),
            bounded=False,
        ),
        "credentials": Decoder(
            st.just(right_credentials),
            (right_credentials,),
            file_decoder(folder, "x.cred", load_credentials),
            bounded=False,
        ),
        "bundle": Decoder(
            drawn_events().map(lambda data: msgpack.packb(list(tape_message(data)))),
            tuple(msgpack.packb(list(tape_message(data))) for data in events),
            file_decoder(folder, "bundle", load_bundle),
            bounded=False,
        ),
        **token_decoders(folder),
        "changed settings": Decoder(
            settings.map(settings_message),
            (settings_message(SETTINGS.model_dump()),),
            decode_settings,
        ),
        "specification's settings": Decoder(
            settings.map(
                lambda found: wire.encode(specification.model_copy(update={"settings": found}))
            ),
            (wire.encode(specification.model_copy(update={"settings": SETTINGS.model_dump()})),),
            decode_specification,
        ),
    }
