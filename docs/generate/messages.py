"""docs/protocol.md: each message, from the classes of `diloco.common.protocol.wire`; codecs."""

import inspect
import typing

from diloco.common.protocol import wire
from diloco.common.protocol.codecs import FORMS
from docs.generate.markdown import table

WORDS: list[tuple[object, str]] = [
    (wire.Name, "name"),
    (wire.Digest, "digest"),
    (wire.ObjectName, "object name"),
    (wire.Count, "count"),
    (wire.Positive, "positive"),
    (wire.SliceCount, "integer, 1 to 64"),
    (wire.PowerOfTwo, "power of two"),
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
    """Returns the type of a message's field in words."""
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


def messages() -> list[type[wire.NestedRecord]]:
    """Returns the classes of all messages, and of the records nested in messages."""
    found = [
        value
        for value in vars(wire).values()
        if isinstance(value, type) and issubclass(value, wire.NestedRecord)
    ]
    return [value for value in found if value not in (wire.NestedRecord, wire.Body)]


def section(message: type[wire.NestedRecord]) -> str:
    """Returns the section on a message: heading, docstring, and table of fields."""
    kind = f", kind `{message.kind}`" if issubclass(message, wire.Body) else ""
    hints = typing.get_type_hints(message, include_extras=True)
    rows = [
        (f"`{name}`", kind_of(hints[name]), field.description or "")
        for name, field in message.model_fields.items()
    ]
    text = inspect.cleandoc(message.__doc__ or "")
    return f"### {message.__name__}{kind}\n\n{text}\n\n{table(['field', 'type', 'meaning'], rows)}"


def codecs() -> str:
    """Returns the table of codecs."""
    rows = [
        (
            str(form.number),
            f"`{codec}`",
            form.codes,
            form.scale,
        )
        for codec, form in FORMS.items()
    ]
    return table(["number", "codec", "codes of a block", "its scale"], rows)


def blocks() -> dict[str, str]:
    """Returns a block for each message, and the block "codecs"."""
    made = {f"message {message.__name__}": section(message) for message in messages()}
    return made | {"codecs": codecs()}
