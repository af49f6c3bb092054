"""`diloco.follow`: yields every version of a run's model in Python, as it is made; without JAX."""

import asyncio
import fnmatch
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args

import ml_dtypes
import numpy as np

from diloco.common.process.config import sync_of
from diloco.common.process.credentials import load_credentials
from diloco.common.process.tasks import cancel, running_loop
from diloco.common.protocol.codecs import Codec, Encoded, code_count, decode_numpy
from diloco.common.protocol.errors import (
    ConfigError,
    DilocoError,
    NewTapeError,
    RunMismatchError,
    RunMissingError,
    StreamMissingError,
)
from diloco.common.protocol.layout import Layout, Piece
from diloco.common.storage.tape import RunContext
from diloco.run.cli.opening import OpenRun, open_run, run_config
from diloco.run.model.follower import Advance, Follower, Lag, Standing
from diloco.run.model.load import piece_values
from diloco.run.model.whole import FollowRules, check_rules

T = TypeVar("T")

# Forms of leaves: rounded once from the float32 view, or the stored delta.
Form = Literal["float32", "bfloat16", "codes"]
# Seconds between two checks for the new tape of a run.
TAPE_RETRY_S = 5.0
_GONE = (
    "it was deleted, or its NATS server is away or lost its disk: runbooks/restore-from-bucket.md"
)


@dataclass(frozen=True, kw_only=True)
class LeafCodes:
    """The stored delta of some rows of a leaf, to be added to their float32 values.

    Attributes:
        codec, block: codec and block size of the codes; docs/protocol.md has their form.
        scales: bfloat16, one for each block; empty for the float codecs.
        codes: codes of the rows' elements in groups; each group is padded to whole blocks.
        groups: number of groups; each has `group_size` elements without the padding.
        shape: shape of the rows.
    """

    codec: Codec
    block: int
    scales: np.ndarray
    codes: np.ndarray
    groups: int
    group_size: int
    shape: tuple[int, ...]

    def decode(self) -> np.ndarray:
        """Returns the differences, float32 [*shape]."""
        values = decode_numpy(self.codec, Encoded(self.scales, self.codes), self.block)
        return values.reshape(self.groups, -1)[:, : self.group_size].reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class LeafRows:
    """Some rows of a leaf, or all, with their new values.

    Attributes:
        name: name of the leaf.
        rows: the rows' range along the first axis; `...` for a leaf without axes.
        shape: shape of the whole leaf.
        dtype: the leaf's dtype in the run, which `values` may not have.
        values: the new values of the rows, in the form asked for; None if `codes` is given.
        codes: in the form "codes", the delta to be added to the rows; None if the version was not
            reached by one delta: then `values` is given.
    """

    name: str
    rows: slice | EllipsisType
    shape: tuple[int, ...]
    dtype: str
    values: np.ndarray | None
    codes: LeafCodes | None = None


class FragmentVersion(NamedTuple):
    """A version of a fragment.

    Attributes:
        digest: the digest of the version's view.
        record_seq: stream sequence of the version's record.
    """

    fragment: int
    version: int
    digest: str
    record_seq: int


@dataclass(frozen=True, kw_only=True)
class ModelChange:
    """A change of the model, verified against the records.

    Attributes:
        event: "version": a new version; "rollback": the run was set back to an earlier version;
            "epoch": the run was resumed on a new tape, perhaps at an earlier version.
        version: the version of the one fragment, or of the last fragment of the whole model.
        fragment: index of the one fragment; None: this is one version of all followed fragments.
        fragments: the fragments whose view has changed.
        global_step: the run's clock at this version.
        closed_at_s: when the last of the rounds closed, in seconds since the epoch.
        epoch: number of the run's tape: 0, and 1 more each time the run is resumed on a new one.
    """

    event: Literal["version", "rollback", "epoch"]
    version: int
    fragment: int | None
    fragments: tuple[FragmentVersion, ...]
    global_step: int
    closed_at_s: float
    epoch: int
    _following: "Following" = field(repr=False)
    _encoded: Encoded | None = field(repr=False)

    @property
    def digest(self) -> str:
        """The digest of the changed fragment's view; if several changed, the first one's."""
        return self.fragments[0].digest

    @property
    def leaves(self) -> Iterator[LeafRows]:
        """The leaves of the changed fragments, one range of rows after the other.

        A leaf whose rows are in several fragments comes in several ranges. Each array is a copy.

        Raises:
            ConfigError: the next change was asked for, which replaces the values of this one.
        """
        for part in self.fragments:
            for piece in self._following.pieces(part.fragment):
                yield self._following.rows_of(self, part.fragment, piece, self._encoded)


class Following:
    """A run that is followed; `diloco.follow` makes it.

    It is a context manager and an iterator over changes, either ordinary or asynchronous. The
    iteration ends with the run, or at the version `stay_at`.

    Attributes:
        ended: whether the run has ended.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        credentials: str | Path | None,
        leaves: Sequence[str] | None,
        rules: FollowRules,
        form: Form,
    ) -> None:
        self._target, self._credentials = run, credentials
        self._patterns, self._form = leaves, form
        self._rules = rules
        self._stack = AsyncExitStack()
        self._opened: OpenRun | None = None
        self._follower: Follower | None = None
        self._pending: asyncio.Future[Advance | None] | None = None
        self._resumed = False
        self._newest: ModelChange | None = None
        self._threads = ExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None

    # For asyncio

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pending is not None:
            await cancel(self._pending)
        await self._stack.aclose()

    def __aiter__(self) -> AsyncIterator[ModelChange]:
        return self

    async def __anext__(self) -> ModelChange:
        change = await self.take_async()
        if change is None:
            raise StopAsyncIteration
        return change

    async def take_async(self, within_s: float | None = None) -> ModelChange | None:
        """Waits for the next change, and returns it.

        Args:
            within_s: seconds to wait; None: without limit.

        Returns:
            None if no change came in time, or if the run has ended or `stay_at` is reached.

        Raises:
            DilocoError: the bus refuses; the run's last version is damaged or missing.
        """
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._advance())
        done, _ = await asyncio.wait([self._pending], timeout=within_s)
        if not done:
            return None
        advance, self._pending = self._pending.result(), None
        self._newest = None if advance is None else self._change(advance)
        return self._newest

    # For threads

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._loop = stack.enter_context(running_loop())
            self._call(self.__aenter__())
            self._threads = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._threads:
            self._call(self.__aexit__())
        self._loop = None

    def __iter__(self) -> Iterator[ModelChange]:
        return self

    def __next__(self) -> ModelChange:
        change = self.take()
        if change is None:
            raise StopIteration
        return change

    def take(self, within_s: float | None = None) -> ModelChange | None:
        """Works as `take_async`, outside of asyncio; with 0, returns only a change ready now."""
        return self._call(self.take_async(within_s))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the event loop's thread; an interrupt cancels the coroutine."""
        if self._loop is None:
            coroutine.close()
            raise _not_open()
        waits = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return waits.result()
        except BaseException:
            waits.cancel()
            raise

    # The state of the following

    @property
    def run(self) -> OpenRun:
        """The connected run: its configuration, its specification and its context."""
        if self._opened is None:
            raise _not_open()
        return self._opened

    @property
    def ended(self) -> bool:
        """Whether the run's end has been read."""
        return self._follower is not None and self._follower.ended

    @property
    def behind(self) -> Lag:
        """How far the last returned change is behind the tape, in versions and seconds."""
        return Lag(0, 0.0) if self._follower is None else self._follower.lag()

    @property
    def read_bytes(self) -> int:
        """Bytes of objects read since the run's present tape was opened."""
        return 0 if self._follower is None else self._follower.read_bytes

    def standing(self) -> dict[int, Standing]:
        """Returns the record of every followed fragment's view, by fragment."""
        assert self._follower is not None
        return self._follower.standing()

    def pieces(self, fragment: int) -> list[Piece]:
        """Returns a fragment's pieces (ranges of rows) that belong to followed leaves."""
        layout = self.run.context.layout
        names = _chosen(layout, self._patterns)
        return [piece for piece in layout.fragments[fragment].pieces if piece.tensor in names]

    def view(self, fragment: int) -> np.ndarray:
        """Returns a fragment's view as of the newest change, float32 [elements], with padding."""
        assert self._follower is not None
        return self._follower.view(fragment)

    def rows_of(
        self, change: ModelChange, fragment: int, piece: Piece, encoded: Encoded | None
    ) -> LeafRows:
        """Returns the rows of one piece as of a change; errors as `ModelChange.leaves`.

        Args:
            change: the newest change.
            fragment: the fragment of the piece.
            piece: the rows' range, and its place in the fragment.
            encoded: the change's delta; None if it has none.
        """
        if change is not self._newest or self._pending is not None:
            raise ConfigError(
                f"the values of version {change.version} are gone: a later change was asked for",
                hint="read a change's leaves before the next one is asked for",
            )
        layout = self.run.context.layout
        tensor = next(one for one in layout.tensors if one.name == piece.tensor)
        values, codes = None, None
        if self._form == "codes" and encoded is not None:
            codes = _codes_of(self.run.context, fragment, piece, encoded)
        else:
            dtype = ml_dtypes.bfloat16 if self._form == "bfloat16" else np.float32
            values = piece_values(piece, self.view(fragment)).astype(dtype)
        return LeafRows(
            name=piece.tensor,
            rows=slice(piece.start, piece.stop) if tensor.shape else ...,
            shape=tensor.shape,
            dtype=tensor.dtype,
            values=values,
            codes=codes,
        )

    # The next change

    async def _open(self) -> None:
        credentials = None if self._credentials is None else str(self._credentials)
        check_role(credentials or run_config(self._target).bus.credentials)
        opened = await self._stack.enter_async_context(
            open_run(self._target, name="follow", reads=True, credentials=credentials)
        )
        layout = opened.context.layout
        fragments = fragments_of(layout, self._patterns)
        rules = self._rules._replace(fragments=fragments)
        check_rules(rules, len(layout.fragments))
        before = self._opened
        if before is not None and before.context.layout.digest != layout.digest:
            raise RunMismatchError(
                f"run {opened.context.run!r} has other parameters now: it was created again",
                hint="start this process again",
            )
        carried = None if self._follower is None else self._follower.carried()
        follower = Follower(opened.context, rules, carried)
        self._follower = await self._stack.enter_async_context(follower)
        self._opened = opened

    async def _advance(self) -> Advance | None:
        """Waits for the next change; if the run is resumed on a new tape, opens that."""
        while True:
            if self._follower is None:
                raise _not_open()
            try:
                return await self._follower.advance()
            except (NewTapeError, StreamMissingError) as error:
                self.run.context.logger.warning("tape_changed", why=str(error))
                await self._reopen()

    async def _reopen(self) -> None:
        """Opens the run on its new tape; waits until there is one."""
        self._resumed = True
        logger = self.run.context.logger
        while True:
            await self._stack.aclose()
            try:
                await self._open()
            except DilocoError as error:
                if not (error.retry or isinstance(error, RunMissingError)):
                    raise
                logger.warning("waiting", what="the run's tape", error=error.message, hint=_GONE)
                await asyncio.sleep(TAPE_RETRY_S)
            else:
                return

    def _change(self, advance: Advance) -> ModelChange:
        records = advance.records
        event: Literal["version", "rollback", "epoch"] = "version"
        if advance.rolled_back:
            event = "rollback"
        if self._resumed:
            event, self._resumed = "epoch", False
        fragments = tuple(
            FragmentVersion(one.fragment, one.version, one.view_digest, heard.record_seq)
            for one, heard in zip(records, advance.heard, strict=True)
        )
        whole = self.standing() if self._rules.whole else {}
        newest = whole[max(whole)].record if whole else records[-1]
        return ModelChange(
            event=event,
            version=newest.version,
            fragment=None if self._rules.whole else records[-1].fragment,
            fragments=fragments,
            global_step=max(record.global_step for record in records),
            closed_at_s=max(record.closed_at_s for record in records),
            epoch=self.run.context.epoch,
            _following=self,
            _encoded=advance.encoded,
        )


def follow(
    run: str | Path,
    *,
    credentials: str | Path | None = None,
    leaves: str | Sequence[str] | None = None,
    whole: bool = True,
    every: int = 1,
    form: Form = "float32",
    stay_at: int | None = None,
) -> Following:
    """Follows a run: its newest version first, then every new one, each verified by its digest.

    Args:
        run: its TOML file, the folder of a local run, a run's name, or a bundle.
        credentials: a reader's file (`diloco auth add-reader`), instead of those that the run's
            file names.
        leaves: a leaf's name, a pattern such as "layers/*", or several; None: all leaves.
        whole: True: yield one version of all fragments at once; False: yield each fragment's
            version when it is made.
        every: least number of versions between two that are yielded.
        form: form of the leaves: float32 as the view is, bfloat16, or "codes": the stored delta of
            one fragment and version at a time.
        stay_at: the last version that is yielded; None: the run's last.

    Returns:
        A context manager; within its block, an iterator of `ModelChange`.

    Raises:
        ConfigError: options that exclude each other.
    """
    if form not in get_args(Form):
        raise ConfigError(f"form={form!r}: expected {', '.join(get_args(Form))}")
    if form == "codes" and (whole or every != 1):
        raise ConfigError(
            'form="codes" gives the delta of one fragment and version',
            hint="give whole=False and every=1 as well",
        )
    rules = FollowRules((), whole, every, stay_at)
    leaves = [leaves] if isinstance(leaves, str) else leaves
    return Following(run, credentials=credentials, leaves=leaves, rules=rules, form=form)


def _not_open() -> ConfigError:
    return ConfigError(
        "a run is followed within its block only",
        hint="`with diloco.follow(...) as model`, where model.take() and `for` are for it; within "
        "`async with` await model.take_async(), or `async for`",
    )


def check_role(path: str | None) -> None:
    """Refuses the credentials of a daemon, which may write.

    Raises:
        ConfigError: the credentials are a learner's or an aggregator's.
    """
    found = None if path is None else load_credentials(Path(path))
    if found is not None and found.role in ("learner", "aggregator"):
        raise ConfigError(
            f"{path!r} has the credentials of {found.role} {found.identity!r}; a follower takes "
            "those of a reader",
            hint="make them: diloco auth add-reader DIR NAME",
        )


def fragments_of(layout: Layout, patterns: Sequence[str] | None) -> tuple[int, ...]:
    """Returns the indices of the fragments that have rows of the leaves that match `patterns`.

    With None, all leaves match.

    Raises:
        ConfigError: a pattern matches no leaf of the run.
    """
    names = _chosen(layout, patterns)
    return tuple(
        index
        for index, fragment in enumerate(layout.fragments)
        if any(piece.tensor in names for piece in fragment.pieces)
    )


def _chosen(layout: Layout, patterns: Sequence[str] | None) -> set[str]:
    known = [tensor.name for tensor in layout.tensors]
    if patterns is None:
        return set(known)
    found = {pattern: fnmatch.filter(known, pattern) for pattern in patterns}
    missing = [pattern for pattern, names in found.items() if not names]
    if missing or not patterns:
        raise ConfigError(
            f"leaves={[*patterns]!r}: the run has no synchronized leaf "
            f"{', '.join(map(repr, missing)) or 'of no name'}",
            hint=f"it has {', '.join(known[:8])}{' ...' if len(known) > 8 else ''}",
        )
    return {name for names in found.values() for name in names}


def _codes_of(context: RunContext, fragment: int, piece: Piece, encoded: Encoded) -> LeafCodes:
    section = sync_of(context.settings.sync, context.layout.fragments[fragment])
    first, count = piece.offset // section.block, piece.stride // section.block
    each = code_count(section.delta_codec, section.block)
    scales = np.asarray(encoded.scales)
    return LeafCodes(
        codec=section.delta_codec,
        block=section.block,
        scales=scales[first : first + count].copy(),
        codes=np.asarray(encoded.codes)[first * each : (first + count) * each].copy(),
        groups=piece.groups,
        group_size=piece.group_size,
        shape=piece.shape,
    )
