"""Deaths around records in objects: between object and pointer, and between word and answer."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
from simrun import simulate
from simtrial import Trial

from diloco.aggregator.owner import committer
from diloco.common.protocol import wire
from diloco.learner.wire import fetch_versions

KINDS = ("bodies", "crash", "delay")
SEEDS = 400
# Tried first: seeds that had a death between word and answer, and between object and pointer.
HAD_ONE = (11, 71)


def commits_object(arguments: Sequence[Any]) -> bool:
    return isinstance(wire.decode_record(arguments[2]), wire.RecordPointer)


def reads_range(arguments: Sequence[Any]) -> bool:
    return isinstance(arguments[1].on_tape, wire.RecordPointer)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the commits and the reads of answers that a death breaks off."""
    found: Counter[str] = Counter()

    def counting(what, function, pointer):
        async def call(*arguments):
            try:
                return await function(*arguments)
            finally:
                found[what] += arguments[0].bus.actor.dead and pointer(arguments)

        return call

    with (
        mock.patch.object(committer, "swap", counting("object", committer.swap, commits_object)),
        mock.patch.object(
            fetch_versions, "read_answer", counting("word", fetch_versions.read_answer, reads_range)
        ),
    ):
        yield found


def test_deaths_at_each_point_of_a_record_in_an_object_lose_no_update() -> None:
    with counted() as found:
        for seed in (*HAD_ONE, *range(SEEDS)):
            trial = Trial(seed=seed, minutes=1.0, kinds=KINDS, intensity=4.0)
            if not all(map(trial.has, KINDS)):
                continue
            outcome = simulate(trial)
            assert outcome.violation is None, f"seed {seed}"
            if found["object"] and found["word"]:
                return
    pytest.fail(f"deaths within {SEEDS} seeds: {found}")
