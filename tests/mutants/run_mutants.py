"""Plant bugs one by one, and say what finds each: `python tests/mutants/run_mutants.py`; see `make mutants`.

Each is asked of the tests that its entry names, and of some seeds with the oracle. Who survives is
asked of everything. Results are kept by mutant and tree, so that a run that was stopped goes on.
Ends with 1 if one survives that is not said to be equivalent.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutants import ROOT, DriftError, Mutant, load, plant, tree_digest

# What is asked of each, and of who survives that.
# Seeds: the first, and how many; light ones, dense ones, and those of full worlds.
ASKED = {"seeds": (0, 16), "dense": (60, 2), "full": (0, 60)}
MORE = {"seeds": (16, 300), "dense": (62, 20), "full": (60, 300)}
# Tests that cover the lines of a folder; those of an entry are asked before.
COVERING = {
    "aggregator/core/": ("tests/scenarios/test_oracle_histories.py",),
    "aggregator/arrays/": ("tests/unit/test_oracle.py",),
    "aggregator/": ("tests/unit/test_decisions.py",),
    "learner/": ("tests/scenarios/test_sync_scenarios.py",),
}
EVERYTHING = ("tests/unit", "tests/scenarios", "tests/paper", "tests/conformance", "tests/sim")
LIMIT_S = 900.0
LONG_LIMIT_S = 7200.0


@dataclass(frozen=True)
class Result:
    """The fate of a mutant; `caught` is empty if nothing found it."""

    name: str
    caught: str
    took_s: float


def main() -> int:
    """The exit code."""
    arguments = _parse()
    try:
        mutants = [one for one in load() if arguments.only in one.name]
        for mutant in mutants:
            mutant.source(ROOT)
    except DriftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.check:
        print(f"{len(mutants)} mutants can be planted")
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    tree = tree_digest()
    print(f"{len(mutants)} mutants, tree {tree}", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda one: _ask(one, tree, arguments), mutants))
    return _tell(mutants, results)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", default="", help="those whose name holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "mutants", help="of results")
    parser.add_argument("--check", action="store_true", help="only see that each can be planted")
    parser.add_argument(
        "--quick", action="store_true", help="do not ask everything of those that survive"
    )
    return parser.parse_args()


def _ask(mutant: Mutant, tree: str, arguments: argparse.Namespace) -> Result:
    """Returns the tests that find a mutant; from the cache, if this tree was asked before."""
    kept = arguments.folder / f"{mutant.digest}-{tree}{'-quick' * arguments.quick}.json"
    if kept.exists():
        return Result(**json.loads(kept.read_text()))
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="tree-") as folder:
        plant(mutant, Path(folder))
        caught = _probe(Path(folder), _tests(mutant), ASKED, LIMIT_S)
        if not caught and not mutant.equivalent and not arguments.quick:
            caught = _probe(Path(folder), EVERYTHING, MORE, LONG_LIMIT_S)
    result = Result(mutant.name, caught, round(time.monotonic() - began_s, 1))
    kept.write_text(json.dumps(vars(result)))
    print(f"  {mutant.name}: {caught or 'SURVIVES'} ({result.took_s:.0f} s)", flush=True)
    return result


def _tests(mutant: Mutant) -> tuple[str, ...]:
    """Returns the tests of its entry, then those of the first folder that its file lies in."""
    covering = (tests for folder, tests in COVERING.items() if mutant.file.startswith(folder))
    return tuple(dict.fromkeys((*mutant.tests, *next(covering, ()))))


def _probe(
    folder: Path,
    tests: tuple[str, ...],
    seeds: Mapping[str, tuple[int, int]],
    limit_s: float,
) -> str:
    asked = json.dumps({"tests": tests, **seeds})
    # Before the installed package: the copy is what is imported.
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    probe = [sys.executable, "tests/mutants/probe.py", asked]
    try:
        done = subprocess.run(
            probe, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"does not end within {limit_s:.0f} s"
    lines = done.stdout.splitlines()
    try:
        return str(json.loads(lines[-1])["caught"])
    except (IndexError, ValueError, KeyError, TypeError):
        return f"ends with {done.returncode}: {done.stderr[-200:]}"


def _tell(mutants: list[Mutant], results: list[Result]) -> int:
    """The table, and who survives."""
    told = {result.name: result for result in results}
    width = max(map(len, told), default=0)
    for mutant in mutants:
        caught = told[mutant.name].caught
        end = caught or (f"equivalent: {mutant.equivalent}" if mutant.equivalent else "SURVIVES")
        print(f"{mutant.name:<{width}}  {end}")
    survivors = [m.name for m in mutants if not m.equivalent and not told[m.name].caught]
    equivalent = sum(bool(m.equivalent) and not told[m.name].caught for m in mutants)
    caught_count = len(mutants) - len(survivors) - equivalent
    print(f"{caught_count} of {len(mutants)} caught, {equivalent} equivalent", end="")
    print(f", {len(survivors)} survive: {', '.join(survivors)}" if survivors else "")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
