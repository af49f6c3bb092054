"""The pages of a round name every phase, observation and reason of closing that the code has."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from diloco.aggregator.core.state import Phase
from diloco.common.protocol import wire

ROOT = Path(__file__).parents[2]
CORE = [ast.parse(path.read_text()) for path in sorted((ROOT / "aggregator/core").glob("*.py"))]
BESIDE = [ast.parse(path.read_text()) for path in sorted((ROOT / "aggregator").glob("*.py"))]
# Where a function of the core takes the reason why a round closes.
REASON_AT = {"close": 3, "give_verdicts": 3, "cut": 1}


def calls(trees: list[ast.Module]) -> Iterator[tuple[str, ast.Call]]:
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield getattr(node.func, "attr", getattr(node.func, "id", "")), node


def literals(node: ast.expr) -> Iterator[str]:
    """The strings that an argument may be: itself, or either side of a choice."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    if isinstance(node, ast.IfExp):
        yield from literals(node.body)
        yield from literals(node.orelse)


def observed() -> set[str]:
    """Names of the observations that the machine's code notes."""
    return {
        what
        for name, call in calls(CORE)
        if name == "with_observation"
        for what in literals(call.args[1])
    }


def reasons() -> set[str]:
    """Why records are made: by the machine, and by operators."""
    decided = {
        reason
        for name, call in calls(CORE)
        if name in REASON_AT and len(call.args) > REASON_AT[name]
        for reason in literals(call.args[REASON_AT[name]])
    }
    stated = {
        reason
        for name, call in calls(BESIDE)
        if name == "Decided"
        for keyword in call.keywords
        if keyword.arg == "reason"
        for reason in literals(keyword.value)
    }
    return decided | stated


def named(description: str | None) -> set[str]:
    return set(re.findall(r"`(\w+)`", description or ""))


def test_every_observation_is_described() -> None:
    assert {"fetched", "timer", "live", "dead"} <= observed()
    assert observed() == named(wire.Observation.model_fields["what"].description)


def test_every_reason_of_a_record_is_described() -> None:
    assert {"complete", "grace", "deadline", "created"} <= reasons()
    assert reasons() == named(wire.Record.model_fields["reason"].description)


def test_the_pages_have_every_phase_of_a_round() -> None:
    pages = ["docs/design/design.md", "docs/design/glossary.md", "docs/architecture.md"]
    for page in pages:
        text = (ROOT / page).read_text()
        assert all(re.search(rf"\b{phase}\b", text) for phase in get_args(Phase)), page
    rows = re.findall(r"^\| ([a-z, ]+) \|", (ROOT / pages[0]).read_text(), re.MULTILINE)
    told = {phase for row in rows for phase in row.split(", ")}
    assert set(get_args(Phase)) <= told
