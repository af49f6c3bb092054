"""One life of a learner on the tape: how it begins, and how it notices that another replaced it.

The process that joined last under a name is the learner; updates of earlier lives are rejected. So
a join must be stored once, however often it is retried: a second copy, published after a lost
acknowledgement, would supersede the life that it began.
"""

import contextlib
from typing import NamedTuple

from diloco.common.process import release
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import (
    BusError,
    BusUnavailableError,
    ExpiredError,
    StaleReadError,
    SupersededError,
    SwapLostError,
    WireError,
)
from diloco.common.storage.bus import Bus
from diloco.common.storage.data_share_allocation import EXPIRY
from diloco.common.storage.tape import decode_as
from diloco.learner.background import Context


class Joined(NamedTuple):
    """One life of a learner on the tape.

    Attributes:
        incarnation: sequence of its join in the stream.
        ids: the message ids under which it tried to publish its join; no other life has them.
    """

    incarnation: int
    ids: frozenset[str]


async def join(context: Context, host: str, platform: str = "") -> Joined:
    """Begins a life; `host` and `platform` tell people on what machine it runs."""
    message = wire.Join(
        run=context.run,
        learner=context.learner,
        layout=context.layout.digest,
        host=host,
        release=release.release(),
        lock=release.lock(),
        platform=platform,
        before=await _last_error(context),
    )
    subject = names.join(context.run, context.learner)
    before_seq = await context.runtime.retry(
        "publishing join", lambda: last_at_leader(context.bus, subject), logger=context.logger
    )
    joining = _Joining(context, wire.encode(message), before_seq)
    incarnation = await context.runtime.retry(
        "publishing join", joining.attempt, logger=context.logger
    )
    return Joined(incarnation, frozenset(joining.ids))


async def _last_error(context: Context) -> str:
    """Returns the error with which the last life under this name ended; "" if unknown."""
    subject = names.heartbeat(context.run, context.learner)
    # The error is only for people: if it cannot be read, the life begins without it.
    with contextlib.suppress(BusError, WireError):
        message = await context.bus.last(names.ops_stream(context.run), subject)
        if message is not None:
            beat = decode_as(wire.Heartbeat, subject, message.payload)
            return wire.note(beat.trouble) if beat.state == "failed" else ""
    return ""


async def _leave_superseded(context: Context, life: Joined) -> None:
    """Publishes a leave for a superseded life: the tape then shows two processes of one name.

    The leave has no data position, since only the newer life's position counts.
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


async def end_when_superseded(context: Context, life: Joined) -> None:
    """Waits until another process joins under this learner's name; never returns.

    Raises:
        SupersededError: another process has joined.
        ExpiredError: an aggregator has ended this life.
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
    """Publishes a join by compare-and-swap on the join before it, so that it is stored only once.

    Args:
        context: the learner's context.
        payload: the bytes of the join.
        before_seq: sequence of the last join of this name; 0 if there is none.

    Attributes:
        ids: message ids of the attempts so far.
    """

    def __init__(self, context: Context, payload: bytes, before_seq: int) -> None:
        self._context = context
        self._subject = names.join(context.run, context.learner)
        self._payload = payload
        self._before_seq = before_seq
        self.ids: list[str] = []
        self._doubt = False

    async def attempt(self) -> int:
        """Publishes the join, unless an earlier attempt is stored; returns its sequence."""
        if self._doubt and (standing := await self._look()):
            return standing
        self.ids.append(self._context.runtime.new_id())
        try:
            seq = await self._context.bus.publish(
                self._subject,
                self._payload,
                # Each attempt has its own id: a cluster may acknowledge a stale swap by its id.
                msg_id=self.ids[-1],
                expected_last=self._before_seq,
            )
        except (SwapLostError, BusUnavailableError) as error:
            self._doubt = True
            if isinstance(error, SwapLostError):
                raise StaleReadError(error.message) from error
            raise
        return seq

    async def _look(self) -> int:
        """Returns the sequence of our join if it is stored, else 0; updates the expected last."""
        newest_seq = await last_at_leader(self._context.bus, self._subject)
        if newest_seq > self._before_seq:
            messages = self._context.bus.read(
                self._context.tape, [self._subject], self._before_seq + 1
            )
            async with contextlib.aclosing(messages):  # type: ignore[type-var]
                async for message in messages:
                    if message.msg_id in self.ids:
                        return message.seq
                    if message.seq >= newest_seq:
                        break
        self._before_seq = newest_seq
        return 0


async def last_at_leader(bus: Bus, subject: str) -> int:
    """Returns the last sequence of a subject that one may publish to; 0 if it has no message.

    Only the stream's leader checks a compare-and-swap, so its refusal of a swap that cannot succeed
    names the last message. Reading could not tell: a learner may read its subjects only one by one,
    from any replica.

    Raises:
        StaleReadError: the leader did not name it; try again.
    """
    try:
        await bus.publish(subject, b"", expected_last=wire.GREATEST)
    except SwapLostError as error:
        if error.last is not None:
            return error.last
    raise StaleReadError(f"the leader does not say what the last message of {subject!r} is")
