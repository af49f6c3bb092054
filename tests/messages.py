"""Messages of every kind for tests, made from the classes' own annotations."""

from typing import Annotated, Any, Literal, get_args, get_origin

import msgpack
from annotated_types import Ge, Le, Lt, MaxLen, MinLen
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from diloco.common.protocol import wire

BODIES = sorted(wire.Body.__subclasses__(), key=lambda body: body.kind)

# So a new field is tested at once.


def values_of(annotation: Any, bounds: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    limits = {type(bound): bound for bound in bounds}
    if any(getattr(bound, "pattern", None) for bound in bounds):
        pattern = next(bound.pattern for bound in bounds if getattr(bound, "pattern", None))
        return st.from_regex(pattern.strip("^$"), fullmatch=True)
    if get_origin(annotation) is Annotated:
        inner, *own = get_args(annotation)
        return values_of(inner, (*bounds, *flat(own)))
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is tuple:
        most = limits[MaxLen].max_length if MaxLen in limits else 3
        least = limits[MinLen].min_length if MinLen in limits else 0
        items = values_of(get_args(annotation)[0], ())
        return st.lists(items, min_size=least, max_size=min(most, 3)).map(tuple)
    if annotation is int:
        low = limits[Ge].ge if Ge in limits else -(1 << 63)
        high = limits[Le].le if Le in limits else (1 << 63) - 1
        high = min(high, limits[Lt].lt - 1) if Lt in limits else high
        return st.integers(low, high)
    if annotation is float:
        low = limits[Ge].ge if Ge in limits else None
        high = limits[Le].le if Le in limits else None
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    if annotation is str:
        least = limits[MinLen].min_length if MinLen in limits else 0
        return st.text(st.characters(exclude_categories=["Cs"]), min_size=least, max_size=20)
    if annotation is bool:
        return st.booleans()
    if annotation is bytes:
        return st.binary(max_size=20)
    if get_origin(annotation) is dict:
        return maps(*get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return messages(annotation)
    return st.one_of(*(option(one) for one in get_args(annotation)))


def maps(keys: Any, values: Any) -> st.SearchStrategy[Any]:
    if values is not Any:
        return st.dictionaries(values_of(keys, ()), values_of(values, ()), max_size=3)
    leaves = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(0, 1) | st.text()
    return st.dictionaries(st.text(max_size=5), st.dictionaries(st.text(max_size=5), leaves))


def option(annotation: Any) -> st.SearchStrategy[Any]:
    return st.none() if annotation is type(None) else values_of(annotation, ())


def flat(metadata: list[Any]) -> list[Any]:
    found = []
    for item in metadata:
        found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found


def messages(model: type[BaseModel]) -> st.SearchStrategy[Any]:
    if model is wire.LearnerSlices:  # Its fields are bound to each other.
        counts = st.lists(st.integers(1, 64), min_size=3, max_size=3).map(sorted)
        return counts.map(lambda found: model(least=found[0], present=found[1], given=found[2]))
    fields = {
        name: values_of(field.annotation, tuple(field.metadata))
        for name, field in model.model_fields.items()
    }
    return st.builds(model, **fields)


def example_of(body: type[wire.Body]) -> wire.Body:
    """One message of a kind, always the same."""
    found: list[wire.Body] = []

    @settings(max_examples=1, derandomize=True, database=None)
    @given(messages(body))
    def take(message):
        found.append(message)

    take()
    return found[0]


EXAMPLES = {body: example_of(body) for body in BODIES}


def fields_of(message: wire.Body) -> dict[str, Any]:
    return msgpack.unpackb(wire.encode(message))


# What MessagePack can say, for fields that expect something else.
json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
