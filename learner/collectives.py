"""Finds the collectives of a compiled program, the exchanges between devices, in its text."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

# A collective operation: the shapes of its results, its kind, and its first argument.
_COLLECTIVE = re.compile(
    r"= (\S.*?) (all-gather|all-reduce|(?:ragged-)?all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\([^%)]*%?([\w.-]*)"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_RESULT = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\S+) ")
_LOOP = re.compile(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LIMIT = re.compile(r"= s\d+\[\]\S* constant\((\d+)\)")
_CALLED = re.compile(r"(?:calls=|to_apply=|branch_computations=\{)%?([\w.-]+(?:, %?[\w.-]+)*)")


class Exchange(NamedTuple):
    """A collective operation of a program.

    Attributes:
        kind: the operation's name in HLO, such as "all-gather".
        received: the bytes that one device receives each time the operation runs.
        times: how often the operation runs when the program runs once.
    """

    kind: str
    received: int
    times: int


def exchanges(text: str) -> list[Exchange]:
    """Returns the collective operations of a compiled program, from its HLO text.

    A loop's body counts as often as the loop turns, and each branch of a condition as if it ran.
    How many bytes a ragged all-to-all gives a device depends on the data. For `received` the
    smaller one of its input and its output counts, which is right if all experts have equal loads.
    """
    bodies = _computations(text)
    named = [found for found in map(_RESULT.match, text.splitlines()) if found]
    shapes: dict[str, str] = {found.group(1): found.group(2) for found in named}
    times = Counter(list(bodies)[-1:])
    exchanged = []
    # A computation stands before those that call it.
    for name, lines in reversed(bodies.items()):
        for line in lines:
            for called, turns in _calls(line, bodies):
                times[called] += turns * times[name]
            for results, kind, given in _COLLECTIVE.findall(line):
                received = _bytes(results)
                if kind.startswith("ragged"):
                    received = min(received, _bytes(shapes[given]))
                exchanged.append(Exchange(kind, received, times[name]))
    return exchanged


def received_by_kind(found: Iterable[Exchange]) -> dict[str, int]:
    """Returns the bytes that one device receives when the program runs once, by operation kind.

    Kinds with most bytes are first; kinds without bytes are left out.
    """
    total: Counter[str] = Counter()
    for one in found:
        total[one.kind] += one.received * one.times
    return {kind: received for kind, received in total.most_common() if received}


def _computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of each HLO computation by its name, in the text's order; entry last."""
    name, found = "", {"": list[str]()}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header.group(1)
        found.setdefault(name, []).append(line)
    return found


def _calls(line: str, bodies: Mapping[str, list[str]]) -> Iterator[tuple[str, int]]:
    """Yields (name, count) of each computation that the operation in `line` runs `count` times."""
    if loop := _LOOP.search(line):
        condition, body = loop.groups()
        known = _TURNS.findall(line) or _LIMIT.findall("\n".join(bodies.get(condition, ())))
        yield body, max(map(int, known), default=1)
        return
    for names in _CALLED.findall(line):
        for name in names.split(", "):
            yield name.removeprefix("%"), 1


def _bytes(shapes: str) -> int:
    return sum(
        math.prod(int(size) for size in sizes.split(",") if size) * int(bits or 8) // 8
        for _, bits, sizes in _ARRAY.findall(shapes)
    )
