"""Within a tree: tests, then seeds, until one fails; prints which, as JSON, as the last line.

`python probe.py '{"tests": [...], "seeds": [first, count], "dense": [...], "full": [...]}'`
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path.cwd()


class _First:
    """Remembers the first test that fails."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.name:
            self.name = f"{report.nodeid} (collection)"


def failing_test(tests: list[str]) -> str:
    """The first test that fails, "" if none does."""
    import pytest

    first = _First()
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow"]
    status = pytest.main([*tests, *options], plugins=[first])
    return first.name or ("" if status in (0, 5) else f"pytest ended with {status}")


def failing_seed(seeds: list[int], kind: str) -> str:
    """The first seed that breaks something, with its rule; "" if none does."""
    from simrun import simulate
    from simtrial import FULL, Trial

    plans: dict[str, dict[str, Any]] = {
        "seed": {},
        "dense seed": {"minutes": 1.0, "dense": True},
        "full seed": {"minutes": 1.0, "learners": 3, "kinds": FULL},
    }

    first, count = seeds
    for seed in range(first, first + count):
        try:
            violation = simulate(Trial(seed=seed, **plans[kind])).violation
        except Exception as error:  # Whatever it is, the seed has found the bug.
            return f"{kind} {seed}: {error!r}"[:300]
        if violation is not None:
            return f"{kind} {seed}: {violation}"[:300]
    return ""


def main() -> None:
    """See above."""
    asked = json.loads(sys.argv[1])
    sys.path[:0] = [str(HERE), str(HERE / "tests" / "sim")]
    caught = failing_test(asked["tests"]) if asked["tests"] else ""
    caught = caught or failing_seed(asked["seeds"], "seed")
    caught = caught or failing_seed(asked["dense"], "dense seed")
    caught = caught or failing_seed(asked["full"], "full seed")
    print(json.dumps({"caught": caught}))


if __name__ == "__main__":
    main()
