"""A run's tape as tests read it, with every invariant held against tape and objects.

`Tape.check` is `diloco.judge.audit` and `diloco.judge.remake_and_compare`, as the operator's command has them: it wants
nothing but read access.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from harness import PATIENCE_S, World

from diloco.common.storage import tape
from diloco.common.storage.tape import Item
from diloco.judge.audit import audit
from diloco.judge.objects import check_objects
from diloco.judge.oracle import Oracle
from diloco.judge.remake_and_compare import remake
from diloco.run.cli.opening import open_run
from diloco.run.history import History, read_history


class Tape(History):
    """A run's history, with its checks as assertions."""

    def check(
        self, *, ended: bool = True, hostile: Sequence[str] = (), collected: bool = False
    ) -> None:
        """Every invariant that holds at any time; with `ended`, those of a finished run too.

        Of their own data `hostile` senders may lie; with `collected`, objects that nobody needs
        may be gone.
        """
        assert self.stop is not None or not ended
        assert self.end is not None or not ended
        found = audit(self)
        objects = check_objects(self)
        assert collected or not objects.missing
        remake(self, objects)
        of_liars = tuple(f"learner {name} " for name in hostile)
        breaches = [
            one
            for one in found.breaches + objects.breaches
            if one.rule != "data" or not one.where.startswith(of_liars)
        ]
        assert not breaches, "\n".join(map(str, breaches))
        made = sum(record.what == "version" and record.version > 0 for record in self.all_records())
        assert objects.remade == made or collected


def judged(world: World) -> Oracle:
    """The oracle, after all of the tape."""
    history = read_tape(world)
    oracle = Oracle(history.specification, history.layout)
    for item in read_items(world):
        oracle.take(item)
    return oracle


def read_items(world: World) -> list[Item]:
    """Every message on the tape up to now."""

    async def read() -> list[Item]:
        async with open_run(world.folder) as run:
            return [item async for item in tape.read_tape(run.context)]

    return asyncio.run(asyncio.wait_for(read(), PATIENCE_S))


def read_tape(world: World, file: Path | None = None) -> Tape:
    """Returns all messages on the tape up to now, or in a file of it."""

    async def read() -> Tape:
        async with open_run(file or world.folder, reads=file is not None) as run:
            return Tape(**vars(await read_history(run.context)))

    return asyncio.run(asyncio.wait_for(read(), PATIENCE_S))
