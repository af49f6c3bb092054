"""Rollback: commits a next version of each fragment with the contents of an earlier one.

A rollback is a record of the tape like any other, so the aggregators need not be asked and may be
down; a fragment's owner reads the record and continues from it. A rollback can itself be rolled
back, as long as garbage collection has kept the objects.
"""

import asyncio
from collections.abc import Mapping

from diloco.aggregator.context import Context
from diloco.aggregator.core.decisions import Decided
from diloco.aggregator.owner.committer import (
    RecordContents,
    commit_record,
    compose,
    contents_of,
    with_snapshot,
)
from diloco.aggregator.owner.recovery import Recovered, missing_object, rebuild
from diloco.aggregator.settings import check_goes_on
from diloco.common.protocol import wire
from diloco.common.protocol.errors import (
    ConfigError,
    IntegrityError,
    ObjectMissingError,
    RunMismatchError,
    SwapLostError,
)
from diloco.common.storage.tape import Recorded, RunContext, last_record, records_of


async def find_versions(context: RunContext, wanted: Mapping[int, int]) -> dict[int, Recorded]:
    """Returns the record that made the requested version, for each fragment.

    Args:
        context: the run's context.
        wanted: the requested version of each fragment, by the fragment's index.

    Raises:
        ConfigError: a fragment never had that version, or the record was collected as garbage.
    """
    found = await asyncio.gather(
        *(_find_version(context, fragment, version) for fragment, version in wanted.items())
    )
    return dict(zip(wanted, found, strict=True))


async def _find_version(context: RunContext, fragment: int, version: int) -> Recorded:
    oldest, newest = -1, -1
    async for recorded in records_of(context, fragment):
        newest = recorded.record.version
        oldest = newest if oldest < 0 else oldest
        if newest == version and recorded.record.what != "verdict":
            return recorded
    raise ConfigError(
        f"fragment {fragment}: there is no record of version {version} on the tape, "
        f"which has {oldest} to {newest}",
        hint="choose a later version; garbage collection keeps gc.replay_window_s"
        if version < oldest
        else "choose a version of these",
    )


async def find_time(context: RunContext, at_s: float) -> dict[int, Recorded]:
    """Returns the record of each fragment's newest version at `at_s`, in seconds of Unix time.

    Raises:
        ConfigError: the tape does not reach back so far.
    """
    fragments = range(len(context.layout.fragments))
    found = await asyncio.gather(*(_find_time(context, fragment, at_s) for fragment in fragments))
    return dict(zip(fragments, found, strict=True))


async def _find_time(context: RunContext, fragment: int, at_s: float) -> Recorded:
    found = None
    async for recorded in records_of(context, fragment):
        if recorded.stored_at_s <= at_s and recorded.record.what != "verdict":
            found = recorded
    if found is None:
        raise ConfigError(
            f"fragment {fragment}: the tape has no version so early",
            hint="choose a later time; garbage collection keeps gc.replay_window_s",
        )
    return found


async def roll_back(context: Context, targets: Mapping[int, Recorded]) -> dict[int, wire.Record]:
    """Publishes a next version of each fragment with the contents of an earlier one.

    Updates based on the versions in between are rejected, learners set their parameters to the
    view, and the run's clock goes back. A fragment that is at its target already is left alone.

    Args:
        context: the operator's context.
        targets: the record of the earlier version, by the fragment's index.

    Returns:
        Each fragment's newest record afterwards.

    Raises:
        RunMismatchError: the run has stopped, before or during the rollback.
        ConfigError: the objects of an earlier version were collected as garbage.
        IntegrityError: the objects of an earlier version do not give the recorded digests.
    """
    await check_goes_on(context)
    # All of them are stored before the first is published, and then nothing but the last version of
    # a fragment ends this: a run that stops amid it would end with a part of it.
    made = [_Made(context, target) for target in targets.values()]
    await asyncio.gather(*(one.prepare() for one in made))
    await check_goes_on(context)
    records = await asyncio.gather(*(one.commit() for one in made))
    return dict(zip(targets, records, strict=True))


class _Made:
    """One fragment's rollback: its arrays, and the record that follows the newest one."""

    def __init__(self, context: Context, target: Recorded) -> None:
        self._context, self._target = context, target
        self._arrays: Recovered | None = None
        self._record: wire.Record | None = None

    async def prepare(self) -> wire.Record | None:
        """Stores the contents after the newest version; returns the newest record if it has them.

        Raises:
            RunMismatchError: the fragment has had its last version.
        """
        target, self._record = self._target.record, None
        newest, newest_seq = await last_record(self._context, target.fragment)
        if target.version in (newest.version, newest.restored_version):
            return newest  # Perhaps by an interrupted rollback.
        if newest.final:
            raise RunMismatchError(
                f"fragment {newest.fragment} has had its last version, {newest.version}: the run "
                "has stopped meanwhile",
                hint="create another run from its parameters: diloco run create --from FILE",
            )
        if self._arrays is None:
            self._arrays = await _rebuild(self._context, self._target)
        self._record = await _again(self._context, target, self._arrays, newest, newest_seq)
        return None

    async def commit(self) -> wire.Record:
        """Publishes the record; again on top of a newer one, if an aggregator has made one."""
        while True:
            if self._record is None and (newest := await self.prepare()) is not None:
                return newest
            assert self._record is not None
            try:
                await commit_record(self._context, self._record)
            except SwapLostError:
                self._record = None
            else:
                return self._record


async def _rebuild(context: Context, target: Recorded) -> Recovered:
    try:
        return await rebuild(context, target.record, target.record_seq)
    except (ObjectMissingError, IntegrityError) as error:
        if (missing := missing_object(error)) is None:
            raise
        raise ConfigError(
            f"fragment {target.record.fragment}: version {target.record.version} cannot be "
            f"recomputed: {missing.message}",
            hint="choose a later version; garbage collection keeps gc.replay_window_s",
        ) from error


async def _again(
    context: Context,
    target: wire.Record,
    recovered: Recovered,
    newest: wire.Record,
    newest_seq: int,
) -> wire.Record:
    """Stores `target`'s contents as the version after `newest`; returns that version's record."""
    version, now_s = newest.version + 1, context.runtime.clock()
    contents = await store_whole_view(context, target, recovered, version)
    decided = Decided(
        what="restore",
        base_seq=newest_seq,
        version=version,
        global_step=target.global_step,
        reason="rollback",
        position=newest.position,
        # Updates on older versions are not merged any more.
        policy=newest.policy.model_copy(update={"floor": version}),
        opened_at_s=now_s,
        quorum_at_s=now_s,
        closed_at_s=now_s,
    )
    return compose(
        context,
        target.fragment,
        decided,
        contents._replace(
            learning_rate=newest.learning_rate, momentum=newest.momentum, merged_at_s=now_s
        ),
        previous=newest,
        totals=newest.totals,
        restored_version=target.version,
    )


async def store_whole_view(
    context: Context, source: wire.Record, recovered: Recovered, version: int
) -> RecordContents:
    """Stores view and outer state as objects of `version`; returns contents that need no delta."""
    contents = contents_of(source)._replace(inputs=(), factors=b"", delta=None)
    return await with_snapshot(
        context, source.fragment, version, recovered.arrays, contents, context.logger
    )
