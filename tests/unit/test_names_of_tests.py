"""No two files of tests have one name: pytest would take the second for the first."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
SHARED = {"__init__", "conftest"}


def test_every_file_of_tests_has_a_name_of_its_own() -> None:
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.stem not in SHARED)
    assert not [name for name, count in names.items() if count > 1]
