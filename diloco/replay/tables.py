"""`diloco.open`: a run's past in Python, as tables and arrays, with the results of the commands.

Rows are made while the tape is read, so that a table takes only the memory of its columns.
"""

import asyncio
import atexit
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np

from diloco.common.process.tasks import running_loop
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError
from diloco.common.protocol.layout import Piece
from diloco.common.storage.tape import RunContext
from diloco.common.storage.views import load_version
from diloco.judge.remake_and_compare import FragmentRemaker, is_stored
from diloco.replay import score_and_bisect, show, verify_run
from diloco.run.cli.opening import open_run
from diloco.run.history import History, Sent, answered, identity, read_history, resolves
from diloco.run.model.evaluate import Scorer, read_scores
from diloco.run.model.load import piece_values
from diloco.run.state import RunStatus
from diloco.run.watch import Watch

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")
Arrays = dict[str, np.ndarray]
Rows = Iterator[dict[str, Any]]
# The number of rows that are converted to columns at once.
BATCH = 10_000
# Columns of an update: from its manifest (ANNOUNCED), and from the record with its verdict
# (UNANSWERED: null without a verdict).
ANNOUNCED = (
    "learner", "incarnation", "seq", "fragment", "base_version", "tokens", "steps", "position",
    "local_step", "loss", "step_time_s", "encode_s", "upload_s",
)  # fmt: skip
UNANSWERED = dict.fromkeys(
    ("answer", "record_seq", "version", "staleness", "weight", "discount", "clip", "norm",
     "reason", "detail")
)  # fmt: skip


class Update(NamedTuple):
    """A merged update.

    Attributes:
        said: its entry in the record that merged it.
        gradient: its outer gradient, decoded, by tensor.
    """

    said: wire.Input
    gradient: Arrays


@dataclass(frozen=True)
class VersionStep:
    """One version of a fragment: parameters before and after it, and the updates it merged.

    Attributes:
        before, after: values of the fragment by tensor; the key of a part of a tensor is
            `name[start:stop]`.
        updates: in the order in which they were merged.
        again: a function that merges the round again in this process, for a debugger, and returns
            the parameters after it.
    """

    record: wire.Record
    record_seq: int
    before: Arrays
    after: Arrays
    updates: tuple[Update, ...]
    again: Callable[[], Arrays]


class Past:
    """A run's past. Close it by `close`, or as a context manager.

    Args:
        run: RUN, as commands take it, or a bundle.

    Raises:
        DilocoError: no such run; bus or store are unreachable.
    """

    def __init__(self, run: str | Path) -> None:
        self._stack = ExitStack()
        self._loop = self._stack.enter_context(running_loop())
        self._opened = AsyncExitStack()
        try:
            run_opened = open_run(run, name="open", reads=True)
            opened = self._call(self._opened.enter_async_context(run_opened))
        except BaseException:
            self._stack.close()
            raise
        self._context: RunContext = opened.context
        # A script may end without `close`; when the interpreter ends, the loop's thread is gone.
        atexit.register(self.close)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on a loop of another thread, since notebooks have a loop on this one."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes bus, store and file; closing twice is harmless."""
        atexit.unregister(self.close)
        if not self._loop.is_closed():
            self._call(self._opened.aclose())
        self._stack.close()

    @property
    def name(self) -> str:
        """The run's name."""
        return self._context.run

    @cached_property
    def history(self) -> History:
        """The tape, as the commands read it, up to the time of the first access."""
        return self._call(read_history(self._context))

    def now(self) -> RunStatus:
        """Returns the run's present status, from its whole tape: learners, fragments, findings."""
        return self._call(Watch(self._context).begin(1))

    def updates(self) -> "pa.Table":
        """Returns a table of all announced updates, each with its verdict."""
        return _table(_updates(self.history))

    def rounds(self) -> "pa.Table":
        """Returns a table of all records: of rounds with their times, and of verdicts alone."""
        return _table(_rounds(self.history))

    def versions(self) -> "pa.Table":
        """Returns a table of every version of every fragment, with its digests."""
        return _table(_versions(self.history))

    def scores(self, *, make: bool = False) -> "pa.Table":
        """Returns a table of the stored held-out losses.

        Args:
            make: compute and store the loss of every other version too.

        Raises:
            DilocoError: the task cannot be built.
        """
        made = self._make_scores() if make else self._stored_scores()
        return _table(_scores(self.history, self._call(made)))

    async def _stored_scores(self) -> dict[int, float]:
        return {max(one.record_seqs): one.loss for one in await read_scores(self._context)}

    async def _make_scores(self) -> dict[int, float]:
        context, history = self._context, self.history
        chosen = verify_run.chains(history, range(len(history.layout.fragments)), None, {})
        return await score_and_bisect.score_all(context, await Scorer.of_run(context), chosen)

    def step(self, version: str) -> VersionStep:
        """Returns a version of a fragment with its arrays; `version` is such as "0@12".

        Raises:
            ConfigError: the tape has no such version, or it was not merged from updates.
            DilocoError: an object of it is missing or damaged.
        """
        history = self.history
        (seq,) = show.find(history, version).seqs
        record = show.record_at(history, seq)
        if record is None or record.what != "version" or not record.inputs:
            raise ConfigError(f"{version!r} is not a version that was merged", hint=show.HINT)
        base = next(
            at
            for _, at in reversed(history.records[record.fragment])
            if at.version == record.version - 1 and at.what != "verdict"
        )
        views = [self._call(load_version(self._context, at)) for at in (base, record)]
        cut = partial(by_tensor, history, record.fragment)
        updates = tuple(
            Update(said, cut(vector))
            for said, vector in zip(record.inputs, show.gradients(history, record), strict=True)
        )
        again = partial(_again, history, seq, record)
        return VersionStep(record, seq, cut(views[0]), cut(views[1]), updates, lambda: cut(again()))


def open(run: str | Path) -> Past:  # noqa: A001 - `diloco.open`, as `tarfile.open`
    """Opens a run's past, for scripts and notebooks; arguments and errors as `Past`."""
    return Past(run)


# Arrays


def by_tensor(history: History, fragment: int, vector: np.ndarray) -> Arrays:
    """Returns a fragment's vector divided into arrays, by tensor; `name[start:stop]` for a part."""
    pieces = history.layout.fragments[fragment].pieces
    shapes = {tensor.name: tensor.shape for tensor in history.layout.tensors}
    return {_name(piece, shapes): piece_values(piece, vector).copy() for piece in pieces}


def _name(piece: Piece, shapes: Mapping[str, tuple[int, ...]]) -> str:
    shape = shapes[piece.tensor]
    whole = not shape or (piece.start, piece.stop) == (0, shape[0])
    return piece.tensor if whole else f"{piece.tensor}[{piece.start}:{piece.stop}]"


def _again(history: History, seq: int, record: wire.Record) -> np.ndarray:
    """Recomputes the view after a round, from the newest state before it that is stored.

    Raises:
        ConfigError: no state is stored.
        IntegrityError: the result differs from the record.
    """
    last = {record.fragment: seq}
    until = verify_run.chains(history, [record.fragment], record.version - 1, last)
    remaker = FragmentRemaker(history, record.fragment, compare=False)
    for at in until[record.fragment]:
        remaker.take(*at)
    return np.asarray(remaker.view)


# Tables


def _table(rows: Iterable[dict[str, Any]]) -> "pa.Table":
    """Returns rows as a table; columns are in the order of the first row's keys.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise ConfigError(
            "tables need pyarrow, which is not installed", hint="pip install 'diloco[arrow]'"
        ) from error
    tables, batch = [], []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            tables.append(pa.Table.from_pylist(batch))
            batch = []
    if batch or not tables:
        tables.append(pa.Table.from_pylist(batch))
    return pa.concat_tables(tables, promote_options="permissive")


def _updates(history: History) -> Rows:
    for fragment in sorted(history.manifests_of):
        chain, answers = history.records[fragment], dict[Sent, tuple[int, int]]()
        for index, (_, record) in enumerate(chain):
            for place, taken in enumerate(resolves(record)):
                answers.setdefault(answered(record, taken), (index, place))
        told: set[Sent] = set()
        for stream_seq, sent in history.announced(fragment):
            if (update := identity(sent)) in told:
                continue
            told.add(update)
            row = {name: getattr(sent, name) for name in ANNOUNCED}
            row |= {"stream_seq": stream_seq, "announced_s": history.times_s[stream_seq]}
            row["bytes"] = sum(one.size_bytes for one in sent.shards)
            index, place = answers.get(update, (-1, 0))
            yield row | (UNANSWERED if index < 0 else _answer(*chain[index], place))


def _answer(seq: int, record: wire.Record, place: int) -> dict[str, Any]:
    """Returns the columns of the verdict that a record gives on its update at index `place`.

    Columns that apply only to the other verdict are null.
    """
    taken = resolves(record)[place]
    found = {name: getattr(taken, name, None) for name in UNANSWERED}
    fate = "merged" if isinstance(taken, wire.Input) else "rejected"
    return found | {"answer": fate, "record_seq": seq, "version": record.version}


def _rounds(history: History) -> Rows:
    for seq, record in history.in_order():
        yield {
            "record_seq": seq, "what": record.what, "fragment": record.fragment,
            "version": record.version, "global_step": record.global_step,
            "reason": record.reason, "opened_s": record.opened_at_s,
            "quorum_s": record.quorum_at_s or None, "closed_s": record.closed_at_s,
            "merged_s": record.merged_at_s, "stored_s": history.times_s[seq],
            "inputs": len(record.inputs), "rejected": len(record.rejected),
            "learners": [taken.learner for taken in record.inputs],
            "tokens": sum(taken.tokens for taken in record.inputs),
            "learning_rate": record.learning_rate, "momentum": record.momentum,
            "settings_seq": record.policy.settings_seq, "aggregator": record.aggregator,
        }  # fmt: skip


def _versions(history: History) -> Rows:
    for seq, record in history.in_order():
        if record.what != "verdict":
            yield {
                "fragment": record.fragment, "version": record.version, "what": record.what,
                "record_seq": seq, "global_step": record.global_step,
                "closed_s": record.closed_at_s, "view_digest": record.view_digest,
                "outer_digest": record.outer_digest, "stored": is_stored(record),
                "delta_bytes": record.delta.size_bytes if record.delta else None,
                "tokens_merged": record.totals.tokens_merged,
            }  # fmt: skip


def _scores(history: History, losses: Mapping[int, float]) -> Rows:
    """Yields a row for each loss, by the sequence of the record that made the model."""
    for seq, record in history.in_order():
        if seq in losses:
            yield {
                "record_seq": seq, "fragment": record.fragment, "version": record.version,
                "global_step": record.global_step, "closed_s": record.closed_at_s,
                "loss": losses[seq],
            }  # fmt: skip
