"""`diloco run delete`: lists the streams and objects of a run, and removes them.

Objects are removed first, then the streams, the tape last of them, and then the layout's object: an
interrupted removal can be repeated as long as the run can be opened, which needs its tape and its
layout. Leases that outlived their tape would say to a new run of that name that all is done.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from diloco.common.protocol import names
from diloco.common.protocol.errors import IntegrityError, RunMismatchError, StreamMissingError
from diloco.common.storage.bundle import open_bundle
from diloco.common.storage.store import ObjectInfo
from diloco.common.storage.tape import has_ended, messages_of
from diloco.run.cli.format_numbers import human_bytes
from diloco.run.cli.opening import OpenRun, open_run

# The number of objects that a thread removes in one call.
AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Belongings:
    """The streams and objects of a run.

    Attributes:
        ended: whether the run has ended.
        streams: by name, the bytes of each existing stream.
        objects: names and sizes of the objects below the run's name in the store.
        places: the addresses of bus and store, for people.
    """

    run: str
    ended: bool
    streams: dict[str, int]
    objects: list[ObjectInfo]
    places: tuple[str, str]

    def sentences(self) -> list[str]:
        """Returns lines for the operator: whether the run has ended, and what it has.

        They name each stream and the number of objects, with sizes and places.
        """
        bus, store = self.places
        size = sum(info.size_bytes for info in self.objects)
        state = "has ended" if self.ended else "has NOT ended"
        return [
            f"run {self.run} {state}; it has",
            *(
                f"  stream {name}, {human_bytes(held)}, on {bus}"
                for name, held in self.streams.items()
            ),
            f"  {len(self.objects):,} objects, {human_bytes(size)}, below {self.run}/ in {store}",
        ]


async def check_bundled(target: str, file: Path) -> None:
    """Reads a bundle back, and compares it with the run's tape.

    Raises:
        IntegrityError: the bundle is damaged, without objects, or lacks a part of the run's tape.
    """
    async with open_run(target) as opened:
        context = opened.context
        with contextlib.closing(open_bundle(file)) as bundle:
            whole = bundle.has_objects and not bundle.header.get("lost", "")
            subjects, left = names.tape_subjects(context.run), iter(bundle.tape.seqs)
            async for message in messages_of(context.bus, context.tape, subjects):
                whole = whole and message.seq in left  # both rise, so `left` is consumed in step
            if not whole or bundle.run != context.run:
                raise IntegrityError(
                    f"{str(file)!r} is not the whole run {context.run!r}",
                    hint="nothing was removed; make it again: diloco bundle RUN FILE",
                )


async def belongings(target: str, *, going_on: bool) -> Belongings:
    """Lists the streams and objects of a run.

    Args:
        target: RUN.
        going_on: allows a run that has not ended.

    Raises:
        RunMismatchError: there is no such run, or it has not ended.
    """
    async with open_run(target) as opened:
        context = opened.context
        ended = await has_ended(context.bus, context.run)
        if not (ended or going_on):
            raise RunMismatchError(
                f"run {context.run!r} has not ended",
                hint="end it: diloco run end RUN. To remove it without a copy, stop its daemons, "
                "and use: diloco run delete RUN --going-on",
            )
        return Belongings(
            run=context.run,
            ended=ended,
            streams=await _streams(opened),
            objects=await context.runtime.call(context.store.list, f"{context.run}/"),
            places=(opened.config.bus.url, opened.config.store.url),
        )


async def _streams(opened: OpenRun) -> dict[str, int]:
    run, bus = opened.context.run, opened.context.bus
    found: dict[str, int] = {}
    for stream in names.streams(run):
        with contextlib.suppress(StreamMissingError):
            found[stream] = (await bus.filled(stream)).size_bytes
    return found


async def remove(target: str, found: Belongings) -> None:
    """Removes the streams and objects in `found` of the run `target`.

    Raises:
        DilocoError: bus or store are unreachable, or do not permit it.
    """
    async with open_run(target) as opened:
        context = opened.context
        layout = names.layout_object(context.run, context.layout.digest)
        doomed = [info.name for info in found.objects if info.name != layout]
        for start in range(0, len(doomed), AT_ONCE):
            await context.runtime.call(_delete, opened, doomed[start : start + AT_ONCE])
        for stream in reversed(found.streams):
            await context.bus.remove_stream(stream)
        await context.runtime.call(_delete, opened, [layout])


def _delete(opened: OpenRun, doomed: list[str]) -> None:
    for name in doomed:
        opened.context.store.delete(name)
