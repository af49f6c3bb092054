"""The join of a learner on the tape, and the detection of a newer join under the same name.

A *life* is the time from a join to the end of the process that joined; the join's sequence in the
stream is the *incarnation*. The process that joined last under a name is the learner; updates of
earlier lives are rejected. So a join must be stored only once, however often the publication is
retried: a second copy, published after a lost acknowledgement, would begin another life and
supersede the first.
"""

import contextlib
from typing import NamedTuple

from diloco.common.process import release
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    BusError,
    BusUnavailableError,
    ExpiredError,
    RunMissingError,
    StaleReadError,
    SupersededError,
    SwapLostError,
    WireError,
)
from diloco.common.storage.bus import Bus
from diloco.common.storage.data_share_allocation import EXPIRY
from diloco.common.storage.tape import check_epoch, decode_as, load_specification
from diloco.learner.background import Context


class Membership(NamedTuple):
    """The join of one life of a learner.

    Attributes:
        incarnation: the sequence of the join in the stream.
        ids: the message ids with which the process tried to publish the join. They are random, so
            that no join of another process has one of them.
        before: the sequence of the name's join before; 0: this is its first.
    """

    incarnation: int
    ids: frozenset[str]
    before: int = 0


async def join(
    context: Context,
    host: str,
    platform: str = "",
    slices: wire.LearnerSlices | None = None,
    holds: tuple[str, ...] = (),
) -> Membership:
    """Publishes this learner's join so that it is stored exactly once; retries transient faults.

    Args:
        context: the learner's context.
        host: the machine's name, for people.
        platform: devices and software of the machine, for people.
        slices: the slices that train; None: the learner does not have several.
        holds: the modules that this life holds; empty: all.

    Returns:
        The incarnation that the join began, and the message ids of the attempts to publish it.
    """
    message = wire.Join(
        run=context.run,
        learner=context.learner,
        layout=context.layout.digest,
        host=host,
        release=release.release(),
        lock=release.lock(),
        platform=platform,
        before=await _last_error(context),
        slices=slices,
        holds=holds,
    )
    subject = names.join(context.run, context.learner)
    before_seq = await context.runtime.retry(
        "publishing join", lambda: last_at_leader(context.bus, subject), logger=context.logger
    )
    joining = _Joining(context, wire.encode(message), before_seq)
    incarnation = await context.runtime.retry(
        "publishing join", joining.attempt, logger=context.logger
    )
    return Membership(incarnation, frozenset(joining.ids), joining.before_seq)


async def _last_error(context: Context) -> str:
    """Returns the error that ended the last process of this name; "" if none is known."""
    subject = names.heartbeat(context.run, context.learner)
    # The error is only for people: if it cannot be read, the join has none.
    with contextlib.suppress(BusError, WireError):
        message = await context.bus.last(names.ops_stream(context.run), subject)
        if message is not None:
            beat = decode_as(wire.Heartbeat, subject, message.payload)
            return wire.note(beat.trouble) if beat.state == "failed" else ""
    return ""


async def _leave_superseded(context: Context, life: Membership) -> None:
    """Publishes a leave of this process after a newer one has joined under the same name.

    So the tape shows that two processes ran. The leave has the data position 0, since only the
    newer process's position counts.
    """
    message = wire.Leave(
        run=context.run,
        learner=context.learner,
        incarnation=life.incarnation,
        position=0,
        fragments=(),
    )
    with contextlib.suppress(BusError):
        await context.bus.publish(names.leave(context.run, context.learner), wire.encode(message))


async def end_when_superseded(context: Context, life: Membership) -> None:
    """Reads the joins under this learner's name until there is a newer one; never returns.

    Raises:
        SupersededError: another process has joined under the name.
        ExpiredError: an aggregator has ended this learner's life, as it was silent for too long.
    """
    subject = names.join(context.run, context.learner)
    async for message in context.bus.read(context.tape, [subject], life.incarnation + 1):
        try:
            newer = decode_as(wire.Join, message.subject, message.payload)
        except WireError as error:
            # The aggregator ignores it too.
            context.logger.warning("unreadable", subject=subject, reason=error.reason)
            continue
        if message.msg_id.startswith(EXPIRY):
            raise ExpiredError(
                f"{newer.host} has ended this life of {context.learner!r}, which was silent for"
                " aggregator.share_expiry_s: its shares of the data went to others",
                hint="start it again: it joins the run and takes shares that are free",
            )
        if message.msg_id not in life.ids:
            await _leave_superseded(context, life)
            raise SupersededError(
                f"another process, on {newer.host!r}, has joined run {context.run!r} as "
                f"{context.learner!r}: what this one does counts no longer",
                hint="let one process run under each name; to train with both, give this one a "
                "name of its own: runbooks/add-remove-learner.md",
            )


class _Joining:
    """Publishes a join by compare-and-swap on the last join of the name, so that it is stored once.

    Args:
        context: the learner's context.
        payload: the bytes of the join.
        before_seq: sequence of the last join of this name; 0 if there is none.

    Attributes:
        ids: message ids of the attempts so far.
        before_seq: the sequence that the next compare-and-swap expects.
    """

    def __init__(self, context: Context, payload: bytes, before_seq: int) -> None:
        self._context = context
        self._subject = names.join(context.run, context.learner)
        self._payload = payload
        self.before_seq = before_seq
        self.ids: list[str] = []
        self._doubt = False

    async def attempt(self) -> int:
        """Publishes the join, unless an earlier attempt has stored it; returns its sequence.

        Raises:
            NewTapeError: the run was resumed on a new tape; a join there would end the life of a
                process that knows it.
            StaleReadError: another join was stored meanwhile; call again.
            BusUnavailableError: the join may or may not be stored; call again.
        """
        if self._doubt and (standing := await self._look()):
            return standing
        await self._check_tape()
        self.ids.append(self._context.runtime.new_id())
        try:
            seq = await self._context.bus.publish(
                self._subject,
                self._payload,
                # Each attempt has its own id: a cluster may acknowledge a stale swap by its id.
                msg_id=self.ids[-1],
                expected_last=self.before_seq,
            )
        except (SwapLostError, BusUnavailableError) as error:
            self._doubt = True
            if isinstance(error, SwapLostError):
                raise StaleReadError(error.message) from error
            raise
        return seq

    async def _check_tape(self) -> None:
        # A join is tried again for as long as a server is away, which is when a new one comes.
        context = self._context
        with contextlib.suppress(RunMissingError):
            check_epoch(context, (await load_specification(context.bus, context.run)).epoch)

    async def _look(self) -> int:
        """Returns the sequence of this process's join if it is stored, else 0.

        Updates the sequence that the next compare-and-swap expects.
        """
        newest_seq = await last_at_leader(self._context.bus, self._subject)
        if newest_seq > self.before_seq:
            messages = self._context.bus.read(
                self._context.tape, [self._subject], self.before_seq + 1
            )
            async with contextlib.aclosing(messages):  # type: ignore[type-var]
                async for message in messages:
                    if message.msg_id in self.ids:
                        return message.seq
                    if message.seq >= newest_seq:
                        break
        self.before_seq = newest_seq
        return 0


async def last_at_leader(bus: Bus, subject: str) -> int:
    """Returns the sequence of the last message of a subject, by the stream's leader.

    Publishes a compare-and-swap that cannot succeed: only the leader checks it, and the refusal
    names the last sequence. A read may be answered by a replica that lags.

    Args:
        bus: the connection to NATS.
        subject: a subject to which this process may publish.

    Returns:
        The sequence; 0 if the subject has no message.

    Raises:
        StaleReadError: the refusal did not name a sequence; call again.
    """
    try:
        await bus.publish(subject, b"", expected_last=wire.GREATEST)
    except SwapLostError as error:
        if error.last is not None:
            return error.last
    raise StaleReadError(f"the leader does not say what the last message of {subject!r} is")
