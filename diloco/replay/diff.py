"""`diloco show --against`: lists how two runs differ, from settings to the first version."""

import asyncio
from collections.abc import Iterator

from diloco.common.process.config import changes
from diloco.common.protocol import wire
from diloco.run.cli.opening import open_run
from diloco.run.cli.screen import say_plainly
from diloco.run.history import History, read_history


def run_diff(one: str, other: str) -> None:
    """Prints the differences of two runs, each given as RUN.

    Raises:
        DilocoError: no such run; bus or store are unreachable.
    """
    for line in asyncio.run(_diff(one, other)):
        say_plainly(line)


async def _diff(one: str, other: str) -> list[str]:
    async with (
        open_run(one, name="diff", reads=True) as first,
        open_run(other, name="diff", reads=True) as second,
    ):
        histories = [await read_history(run.context) for run in (first, second)]
        return [*differences(*histories)]


def differences(one: History, other: History) -> Iterator[str]:
    """Yields lines on the differences: in settings, layout, releases, learners and versions."""
    settings = changes(one.settings, other.settings)
    yield from (f"setting {sentence}" for sentence in settings)
    if not settings:
        yield "settings: the same"
    yield from _changed_later(one, "the first")
    yield from _changed_later(other, "the second")
    if one.layout.digest != other.layout.digest:
        yield f"layout: {one.layout.digest} and {other.layout.digest}: no version can be compared"
        return
    yield from _makers(one, other)
    yield from _learners(one, other)
    yield from _versions(one, other)


def _changed_later(history: History, which: str) -> Iterator[str]:
    for seq, settings in history.changes.items():
        for sentence in changes(history.settings, settings):
            yield f"{which} from message {seq} on: {sentence}"


def _makers(one: History, other: History) -> Iterator[str]:
    made = [{(r.release, r.lock) for r in history.all_records()} for history in (one, other)]
    if made[0] != made[1]:
        told = [", ".join(f"{r}/{lock[:8]}" for r, lock in sorted(s)) for s in made]
        yield f"release and packages: {told[0]} and {told[1]}"


def _learners(one: History, other: History) -> Iterator[str]:
    theirs = [{join.learner for _, join in history.joins} for history in (one, other)]
    for which, only in (("first", theirs[0] - theirs[1]), ("second", theirs[1] - theirs[0])):
        if only:
            yield f"learners of the {which} alone: {', '.join(sorted(only))}"


def _versions(one: History, other: History) -> Iterator[str]:
    for fragment in range(len(one.layout.fragments)):
        chains = [_made(history, fragment) for history in (one, other)]
        shared = sorted(chains[0].keys() & chains[1].keys())
        first = next((v for v in shared if _view(chains[0][v]) != _view(chains[1][v])), None)
        last = [max(chain, default=0) for chain in chains]
        if first is None:
            yield (
                f"fragment {fragment}: the same in all {len(shared)} versions that both have; they "
                f"end at {last[0]} and {last[1]}"
            )
            continue
        yield f"fragment {fragment}: version {first} is the first that differs"
        yield from _round(chains[0][first], chains[1][first])


def _made(history: History, fragment: int) -> dict[int, tuple[int, wire.Record]]:
    chain = history.records.get(fragment, [])
    return {record.version: (seq, record) for seq, record in chain if record.what != "verdict"}


def _view(at: tuple[int, wire.Record]) -> str:
    return at[1].view_digest


def _round(one: tuple[int, wire.Record], other: tuple[int, wire.Record]) -> Iterator[str]:
    """Yields lines on the rounds of two runs that made one version: inputs and close of each."""
    for which, (seq, record) in (("first", one), ("second", other)):
        inputs = ", ".join(
            f"{taken.learner} (norm {taken.norm:.4g}, loss {taken.loss:.4g}, stale "
            f"{taken.staleness}, clip {taken.clip:.3g})"
            for taken in record.inputs
        )
        yield (
            f"  the {which}, record {seq}, closed for {record.reason}, learning rate "
            f"{record.learning_rate:g}: {inputs or record.what}"
        )
