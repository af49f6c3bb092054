"""A life of a learner on the tape: how it begins, and how it is known that another took its place.

Who joined last under a name is the learner; whatever an earlier life still announces is rejected.
So a join stands on the tape once, however often it was tried: tried again behind a lost answer it
would supersede the very life that it began.
"""

import contextlib
from typing import NamedTuple

from diloco.common import names, wire
from diloco.common.bus import Message
from diloco.common.errors import (
    BusUnavailableError,
    ExpiredError,
    StaleReadError,
    SupersededError,
    SwapLostError,
    WireError,
)
from diloco.common.holdings import EXPIRY
from diloco.common.tape import decode_as
from diloco.learner.context import Context
from diloco.learner.position import last_at_leader


class Joined(NamedTuple):
    """One life of a learner on the tape.

    Attributes:
        incarnation: sequence of its join in the stream.
        nonce: 128 random bits in the ids of its messages, so that none is taken for another life's.
    """

    incarnation: int
    nonce: str


async def join(context: Context, host: str) -> Joined:
    """Begin a life; `host` is the machine's name, for people."""
    nonce = f"{context.runtime.rng.getrandbits(128):032x}"
    message = wire.Join(
        run=context.run, learner=context.learner, layout=context.layout.digest, host=host
    )
    subject = names.join(context.run, context.learner)
    before_seq = await context.runtime.retry(
        "publishing join", lambda: last_at_leader(context.bus, subject), logger=context.logger
    )
    joining = _Joining(context, wire.encode(message), nonce, before_seq)
    incarnation = await context.runtime.retry(
        "publishing join", joining.attempt, logger=context.logger
    )
    return Joined(incarnation, nonce)


async def end_when_superseded(context: Context, life: Joined) -> None:
    """Wait until another process joins under this learner's name; never returns.

    Raises:
        SupersededError: it has.
        ExpiredError: an aggregator has, in its place.
    """
    subject = names.join(context.run, context.learner)
    async for message in context.bus.read(context.tape, [subject], life.incarnation + 1):
        try:
            newer = decode_as(wire.Join, message.subject, message.payload)
        except WireError as error:
            # To the aggregator it is no join either.
            context.logger.warning("unreadable", subject=subject, reason=error.reason)
            continue
        if message.msg_id.startswith(EXPIRY):
            raise ExpiredError(
                f"{newer.host} has ended this life of {context.learner!r}, which was silent for"
                " aggregator.share_expiry_s: its shares of the data went to others",
                hint="start it again: it joins the run and takes shares that are free",
            )
        if not _is_of(message, life.nonce):
            raise SupersededError(
                f"another process, on {newer.host!r}, has joined run {context.run!r} as "
                f"{context.learner!r}: what this one does counts no longer",
                hint="let one process run under each name; to train with both, give this one a "
                "name of its own: runbooks/add-remove-learner.md",
            )


class _Joining:
    """The publishing of a join on top of the one before it, so that it stands only once.

    Args:
        context: the learner's.
        payload: of the join.
        nonce: the life's.
        before_seq: of the last join of this name; 0 if there is none.
    """

    def __init__(self, context: Context, payload: bytes, nonce: str, before_seq: int) -> None:
        self._context = context
        self._subject = names.join(context.run, context.learner)
        self._payload = payload
        self._nonce = nonce
        self._before_seq = before_seq
        self._attempts = 0
        self._doubt = False

    async def attempt(self) -> int:
        """Publish it, unless an attempt before this one has; its sequence."""
        if self._doubt and (standing := await self._look()):
            return standing
        self._attempts += 1
        try:
            seq = await self._context.bus.publish(
                self._subject,
                self._payload,
                # Of this attempt alone: a cluster may acknowledge a stale swap by its id.
                msg_id=f"{_prefix(self._nonce)}{self._attempts}",
                expected_last=self._before_seq,
            )
        except (SwapLostError, BusUnavailableError) as error:
            self._doubt = True
            if isinstance(error, SwapLostError):
                raise StaleReadError(error.message) from error
            raise
        return seq

    async def _look(self) -> int:
        """The sequence of ours if it stands; 0 if not, and the next is on top of what does."""
        newest_seq = await last_at_leader(self._context.bus, self._subject)
        if newest_seq > self._before_seq:
            messages = self._context.bus.read(
                self._context.tape, [self._subject], self._before_seq + 1
            )
            async with contextlib.aclosing(messages):  # type: ignore[type-var]
                async for message in messages:
                    if _is_of(message, self._nonce):
                        return message.seq
                    if message.seq >= newest_seq:
                        break
        self._before_seq = newest_seq
        return 0


def _prefix(nonce: str) -> str:
    return f"join-{nonce}-"


def _is_of(message: Message, nonce: str) -> bool:
    """Whether a join is that of a life."""
    return message.msg_id.startswith(_prefix(nonce))
