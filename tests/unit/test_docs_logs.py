"""docs/logs.md lists every event that the code logs, with its level and fields."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from diloco.common.protocol import wire

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "aggregator", "learner", "diloco")
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
# Where the action is not written out: the messages whose kind and fields are logged.
NAMED_BY_DATA = {"aggregator/conductor.py": (wire.Stop, wire.End)}


class Event(NamedTuple):
    action: str
    level: str
    fields: frozenset[str]


def logged() -> Iterator[Event]:
    """Every call of a method named like a level on something called a logger."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in LEVELS
                    and ast.unparse(node.func.value).endswith("logger")
                ):
                    yield from events_of(node, node.func.attr, file)


def events_of(call: ast.Call, level: str, file: str) -> Iterator[Event]:
    action = call.args[0]
    if isinstance(action, ast.Constant):
        fields = frozenset(keyword.arg or "**" for keyword in call.keywords)
        yield Event(str(action.value), level, fields)
        return
    assert file in NAMED_BY_DATA, f"{file}: an action that cannot be found by searching for it"
    for message in NAMED_BY_DATA[file]:
        yield Event(message.kind, level, frozenset(message.model_fields) - {"run"})


def listed() -> Iterator[Event]:
    page = (ROOT / "docs" / "logs.md").read_text()
    for line in page.splitlines():
        if line.startswith("| `"):
            action, level, fields, _ = (cell.strip() for cell in line[1:-1].split("|"))
            names = [] if fields == "-" else [name.strip(" `") for name in fields.split(",")]
            yield Event(action.strip("`"), level, frozenset(names))


def test_every_event_is_in_the_page_and_no_other() -> None:
    assert sorted(set(logged()), key=str) == sorted(set(listed()), key=str)


def test_no_event_is_listed_twice() -> None:
    assert len(list(listed())) == len(set(listed()))


def test_events_are_found() -> None:
    found = {event.action for event in logged()}
    assert {"committed", "waiting", "stop", "left"} <= found
