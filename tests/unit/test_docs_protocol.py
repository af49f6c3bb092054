"""docs/protocol.md says what the code does: every field and its type, and the worked example.

`python tests/unit/test_docs_protocol.py` writes the example's blocks into the page anew.
"""

import json
import re
import typing
from pathlib import Path

import numpy as np
import pytest

from diloco.aggregator.arrays.fragment import FragmentArrays
from diloco.aggregator.core.state import Admitted
from diloco.aggregator.shard_reader import read_payload
from diloco.common import names, shards, slices, wire
from diloco.common.codec import decode_numpy
from diloco.common.config import RunSettings
from diloco.common.layout import Tensor, layout_bytes, make_layout
from diloco.common.quantize import encode
from diloco.common.store import MemoryStore

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "protocol.md"
FENCE = re.compile(r"```text (?P<name>[\w-]+)\n(?P<body>.*?)```", re.DOTALL)
TABLE = re.compile(r"^### (?P<title>\w+)\b[^|]*?\n(?P<rows>(?:\|.*\n)+)", re.MULTILINE)

CODEC = "int4"
BLOCK = 16
RUN = "demo"
LEARNER = "learner-0"
INCARNATION = 7


# --- The worked example


def example() -> dict[str, str]:
    """Each block of the page's example, by name."""
    settings = RunSettings.model_validate(
        {
            "run": {"name": RUN, "steps": 24},
            "sync": {"fragments": 1, "block": BLOCK, "codec": CODEC, "delta_codec": CODEC},
            "outer": {"optimizer": "sgd", "learning_rate": 1.0, "momentum": 0.0},
        }
    )
    layout = make_layout(
        [Tensor(name="w", shape=(4, 8), dtype="float32")], fragments=1, block=BLOCK
    )
    view = np.zeros(layout.fragments[0].size, np.float32)
    arrays = FragmentArrays.from_view(settings, layout, 0, view)
    view_digest_0 = shards.digest(view)

    update = (np.arange(32, dtype=np.float32) - 16) / 8
    packed = shards.pack(CODEC, encode(CODEC, update, BLOCK), BLOCK)
    name = names.shard(RUN, LEARNER, 0, 0, INCARNATION, 1, 0)
    join = wire.Join(run=RUN, learner=LEARNER, layout=layout.digest, host="island-a")
    manifest = wire.Manifest(
        run=RUN,
        learner=LEARNER,
        epoch=0,
        incarnation=INCARNATION,
        seq=1,
        fragment=0,
        base_version=0,
        base_digest=view_digest_0,
        layout=layout.digest,
        codec=CODEC,
        shards=(
            wire.Shard(
                name=name,
                size_bytes=len(packed),
                crc32c=shards.crc32c(packed),
                slices=slices.of_range(0, 32, BLOCK),
            ),
        ),
        tokens=2400,
        steps=24,
        position=24,
        local_step=24,
        loss=2.5,
        step_time_s=0.25,
        encode_s=0.0,
        upload_s=0.0,
        attempt=0,
        final=False,
    )
    store = MemoryStore()
    store.put(name, packed)
    payload = read_payload(store, manifest, arrays.grid)
    weight = manifest.tokens**2 / manifest.steps
    admitted = Admitted(manifest, 9, weight, 0, 1.0, 1.0, payload.norm)
    arrays.merge(payload, admitted)
    made = arrays.close_round([admitted], 1.0)
    delta = names.version_object(RUN, 0, 1, "delta", shards.digest(made.delta))
    decoded = decode_numpy(CODEC, shards.unpack(packed, codec=CODEC, count=32, block=BLOCK), BLOCK)
    return {
        "layout": hexdump(layout_bytes(layout)) + f"\ndigest {layout.digest}",
        "join": hexdump(wire.encode(join)),
        "update-values": numbers(update),
        "shard": hexdump(packed),
        "shard-values": numbers(decoded),
        "manifest-fields": json.dumps(manifest.model_dump(), indent=1),
        "manifest": hexdump(wire.encode(manifest)),
        "round": hexdump(wire.encode(wire.RoundOpen(fragment=0, version=1))),
        "merge": "\n".join(
            [
                f"weight        {weight!r}",
                f"norm          {payload.norm!r}",
                f"coefficients  {made.inputs[0].coefficients.hex()}",
                f"factors       {made.factors.hex()}",
                f"view_digest   {made.view_digest}",
                f"outer_digest  {made.outer_digest}",
            ]
        ),
        "delta": f"{delta}\n{hexdump(made.delta)}",
        "view-values": numbers(arrays.view),
    }


def hexdump(data: bytes) -> str:
    """Offsets and bytes, 16 a line, in groups of four."""
    lines = []
    for start in range(0, len(data), 16):
        groups = [data[i : i + 4].hex() for i in range(start, min(start + 16, len(data)), 4)]
        lines.append(f"{start:04x}  {' '.join(groups)}")
    return "\n".join(lines)


def numbers(values: np.ndarray) -> str:
    """Values in full, eight a line."""
    rows = values.reshape(-1, 8).tolist()
    return "\n".join(" ".join(f"{value:g}" for value in row) for row in rows)


def test_the_worked_example_is_what_the_code_gives() -> None:
    shown = {found["name"]: found["body"].strip() for found in FENCE.finditer(PAGE.read_text())}
    assert shown == example()


# --- The tables of fields

WORDS: list[tuple[object, str]] = [
    (wire.Name, "name"),
    (wire.Digest, "digest"),
    (wire.ObjectName, "object name"),
    (wire.Count, "count"),
    (wire.Positive, "positive"),
    (wire.Seconds, "seconds"),
    (wire.Text, "text"),
    (bool, "bool"),
    (int, "integer"),
    (float, "float"),
    (str, "string"),
    (bytes, "binary"),
    (dict[str, typing.Any], "map"),
    (typing.Annotated[int, "crc"], "crc32c"),
]


def kind_of(annotation: object) -> str:
    """A field's type in the words of the page."""
    for known, word in WORDS:
        if annotation == known:
            return word
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = kind_of(arguments[0])
        return "crc32c" if inner == "integer" else inner
    if origin is tuple:
        return f"list of {kind_of(arguments[0])}"
    if origin is dict:
        return f"map of {kind_of(arguments[0])} to {kind_of(arguments[1])}"
    if origin is typing.Literal:
        return "one of " + ", ".join(arguments)
    if type(None) in arguments:
        return f"{kind_of(arguments[0])} or nil"
    assert isinstance(annotation, type)
    return annotation.__name__


def messages() -> list[type[wire.Part]]:
    """Every message and every record within one."""
    found = [
        value
        for value in vars(wire).values()
        if isinstance(value, type) and issubclass(value, wire.Part)
    ]
    return [value for value in found if value not in (wire.Part, wire.Body)]


def fields_in_page() -> dict[str, list[tuple[str, str]]]:
    tables = {}
    for found in TABLE.finditer(PAGE.read_text()):
        rows = [row.strip("|").split("|") for row in found["rows"].strip().splitlines()[2:]]
        tables[found["title"]] = [(row[0].strip(" `"), row[1].strip()) for row in rows]
    return tables


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.__name__)
def test_every_field_is_in_the_page(message: type[wire.Part]) -> None:
    hints = typing.get_type_hints(message, include_extras=True)
    fields = [(name, kind_of(hints[name])) for name in message.model_fields]
    assert fields_in_page()[message.__name__] == fields


def test_every_subject_is_in_the_page() -> None:
    page = PAGE.read_text()
    subjects = [*names.tape_subjects("{run}"), *names.ops_subjects("{run}")]
    subjects.append(names.round_open("{run}", "*"))
    for subject in subjects:
        pattern = re.escape(subject).replace(r"\*", r"\{[a-z]+\}")
        assert re.search(f"`{pattern}`", page), subject


def test_every_reason_is_in_the_page() -> None:
    files = [ROOT / "common/wire.py", ROOT / "common/shards.py"]
    files += sorted((ROOT / "aggregator").rglob("*.py"))
    sources = "".join(path.read_text() for path in files)
    reasons = {
        *re.findall(r'WireError\(\s*"(\w+)"', sources),
        *re.findall(r'return "(\w+)", f?"', sources),
        *re.findall(r'Refused\([^"()]*(?:\([^()]*\))?[^"()]*"(\w+)"', sources),
        *re.findall(r'Failed\([^"]*"(\w+)"', sources),
    }
    assert {"norm", "late", "missing", "superseded", "checksum"} <= reasons
    page = PAGE.read_text()
    assert sorted(reason for reason in reasons if f"`{reason}`" not in page) == []


def rewrite() -> None:
    """Put the example's blocks into the page."""
    made = example()
    text = FENCE.sub(
        lambda found: f"```text {found['name']}\n{made[found['name']]}\n```", PAGE.read_text()
    )
    PAGE.write_text(text)


if __name__ == "__main__":
    rewrite()
