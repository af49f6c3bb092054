"""The shape of the house: its rooms, its names, its pages. What was reached once stays."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Eleven rooms, and two satellites: models and cloud. `docs/architecture.md` says what each is for.
ROOMS = (
    "common/protocol", "common/process", "common/storage", "learner", "aggregator",
    "diloco/run", "diloco/judge", "diloco/replay", "diloco/show", "diloco/operate", "diloco/plan",
)  # fmt: skip
SATELLITES = ("diloco/models", "diloco/torch", "infra")
# Files at the front: the command itself, and what users import.
FRONT = {"__init__", "__main__", "spare", "start", "program", "check_file"}
BANNED = {"kept", "held", "beside", "look", "foreign", "parts", "wanted", "stored"}
MOST_MEANINGS = 2


def tracked(*patterns: str) -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--", *patterns]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def production() -> Iterator[Path]:
    for name in tracked("common", "learner", "aggregator", "infra", "diloco"):
        path = ROOT / name
        if path.suffix == ".py" and not path.is_symlink():
            yield path.relative_to(ROOT)


def classes(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Where each name of a class stands."""
    found = defaultdict(list)
    for path in paths:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path))
    return dict(found)


def words_of(name: str) -> set[str]:
    """In lower case, of a name in either spelling."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_every_file_is_in_a_room():
    rooms = (*ROOMS, *SATELLITES)
    outside = [
        str(path)
        for path in production()
        if not any(path.is_relative_to(room) for room in rooms)
        and not (str(path.parent) == "diloco" and path.stem in FRONT)
        and str(path) != "common/__init__.py"
    ]
    assert outside == []


@pytest.mark.parametrize("room", [*ROOMS, *SATELLITES])
def test_the_first_file_of_a_room_says_what_it_is_for(room):
    first = ast.parse((ROOT / room / "__init__.py").read_text())
    assert (ast.get_docstring(first) or "").strip().endswith(".")


def module_of(room: str) -> str:
    return "diloco." + room.removeprefix("diloco/").replace("/", ".")


def imported(path: Path) -> Iterator[str]:
    """The modules, and what is taken from them, that a file imports anywhere."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", [*ROOMS, *SATELLITES])
def test_the_first_file_of_a_room_says_which_other_rooms_it_imports(room):
    names = {name for path in production() if path.is_relative_to(room) for name in imported(path)}
    found = [
        other
        for other in (*ROOMS, *SATELLITES)
        if other != room and any(f"{name}.".startswith(f"{module_of(other)}.") for name in names)
    ]
    document = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    last = " ".join(document.split("\n\n")[-1].split())
    listed = " and ".join(", ".join(f"`{one}`" for one in found).rsplit(", ", 1))
    assert last == (
        f"Of the other rooms it may import {listed} alone."
        if found
        else "It may import no other room."
    )


def test_names_of_files_say_what_they_hold():
    files = [Path(name) for name in tracked("*.py", "*.ipynb", "*.sh")]
    assert [str(path) for path in files if words_of(path.stem) & BANNED] == []


def test_names_of_classes_say_what_they_are():
    everywhere = [Path(name) for name in tracked("*.py") if not (ROOT / name).is_symlink()]
    assert [name for name in classes(everywhere) if words_of(name) & BANNED] == []


def test_a_class_name_has_two_meanings_at_most():
    often = {
        name: places
        for name, places in classes(production()).items()
        if len(places) > MOST_MEANINGS
    }
    assert often == {}


def test_benches_are_those_that_a_page_a_target_or_a_gate_uses():
    assert len(tracked("bench/*.py")) <= 25
