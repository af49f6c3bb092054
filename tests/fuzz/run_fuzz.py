"""Fuzz all decoders: `python tests/fuzz/run_fuzz.py --cases 1000000`; see `make fuzz`.

Ends with 1 after the first input that a decoder does not take as it should, with the seed that
repeats it.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from decoders import decoders
from fuzzing import BATCH, CaseError, fuzz
from hypothesis.errors import Flaky

# Cases that one decoder is fed with before it is another's turn.
PORTION = 80 * BATCH


class Portion(NamedTuple):
    name: str
    seed: int
    cases: int


class Outcome(NamedTuple):
    portion: Portion
    ends: Counter[str]
    fault: str | None


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="inputs in all")
    parser.add_argument("--seed", type=int, default=None, help="of the first portion")
    parser.add_argument("--only", default="", help="decoders whose names hold this")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    names = [name for name in decoders(Path("unused")) if arguments.only in name]
    first = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"{len(names)} decoders, {arguments.cases:,} cases, seed {first}", flush=True)
    began_s, ends = time.monotonic(), {name: Counter[str]() for name in names}
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        todo = pool.imap_unordered(feed, portions(names, arguments.cases, first))
        for outcome in todo:
            name, seed, cases = outcome.portion
            if outcome.fault is not None:
                print(f"{name}: {outcome.fault}")
                print(f"repeat it with: --only {name!r} --seed {seed} --cases {cases}")
                return 1
            ends[name] += outcome.ends
    took_s = time.monotonic() - began_s
    for name, found in ends.items():
        most = ", ".join(f"{reason} {count:,}" for reason, count in found.most_common(5))
        print(f"{name:28} {found.total():>9,}  {most}")
    total = sum(found.total() for found in ends.values())
    print(f"{total:,} cases in {took_s:.0f} s: no error but our own, no memory beyond the limit")
    return 0


def portions(names: list[str], cases: int, seed: int) -> Iterator[Portion]:
    """Rounds of one portion for each decoder; at least so many cases."""
    size = min(PORTION, -(-cases // len(names)))
    fed = 0
    while fed < cases:
        for name in names:
            yield Portion(name, seed, size)
            fed += size
        seed += 1


def feed(portion: Portion) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        decoder = decoders(Path(folder))[portion.name]
        try:
            return Outcome(portion, fuzz(decoder, portion.cases, portion.seed), None)
        except (CaseError, Flaky) as error:
            return Outcome(portion, Counter(), str(error))


if __name__ == "__main__":
    sys.exit(main())
