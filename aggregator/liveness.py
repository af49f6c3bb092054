"""Which learners are heard of."""

import asyncio
from collections.abc import Collection

from diloco.aggregator.context import Context
from diloco.aggregator.core import events
from diloco.aggregator.owner import FragmentOwner
from diloco.aggregator.tenure import Tenure
from diloco.common import metrics, names, wire
from diloco.common.errors import WireError
from diloco.common.service import first_of
from diloco.common.tape import decode_as


class LivenessWatch:
    """Tells the owners' machines which learners are heard of.

    A learner is dead once it was silent for `quorum.liveness_timeout_s` while another was heard:
    when nobody is heard it is the bus that is silent, and nobody is taken for dead.
    """

    def __init__(self, context: Context, owners: Collection[FragmentOwner]) -> None:
        self._context = context
        self._owners = owners
        self._heard_at_s: dict[str, float] = {}
        self._signs: dict[tuple[int, str], tuple[int, float]] = {}
        self._newest_s = context.runtime.clock()

    def _live_s(self) -> float:
        """The longest silence of a live learner; owners follow changed settings one by one."""
        own = self._context.settings.quorum.liveness_timeout_s
        rules = [owner.tenure.rules for owner in self._owners if owner.tenure is not None]
        return max((each.quorum.liveness_timeout_s for each in rules), default=own)

    async def watch(self) -> None:
        """Read heartbeats and compare, for ever."""
        await first_of(self._listen(), self._compare())

    async def _listen(self) -> None:
        context = self._context
        stream = names.ops_stream(context.run)
        start = await context.runtime.retry(
            "heartbeats", lambda: context.bus.last_sequence(stream), logger=context.logger
        )
        subjects = [names.heartbeat(context.run, "*")]
        async for message in context.bus.read(stream, subjects, start + 1):
            try:
                beat = decode_as(wire.Heartbeat, message.subject, message.payload)
            except WireError as error:
                context.metrics.add(metrics.IGNORED, 1, error.reason)
                continue
            self._hear(beat.learner, context.runtime.clock())

    def _hear(self, learner: str, now_s: float) -> None:
        if now_s - self._newest_s > self._live_s():
            # After a silence of all, everybody has as long again to be heard.
            self._heard_at_s = dict.fromkeys(self._heard_at_s, now_s)
        self._newest_s = self._heard_at_s[learner] = now_s

    async def _compare(self) -> None:
        while True:
            self._context.health.turned()
            await asyncio.sleep(min(1.0, self._live_s() / 4))
            for owner in self._owners:
                if owner.tenure is not None:
                    self._tell(owner.tenure)

    def _tell(self, tenure: Tenure) -> None:
        now_s = self._context.runtime.clock()
        for name, member in tenure.state.members.items():
            # One that was never heard of counts from its join, or from our own beginning.
            self._heard_at_s.setdefault(name, now_s)
            # Joins and updates are signs of life too, from when we see them: the server's clock,
            # which their times are of, may differ from ours by hours.
            key, sign = (tenure.fragment, name), (member.incarnation, member.heard_at_s)
            if self._signs.setdefault(key, sign) != sign:
                self._signs[key], self._heard_at_s[name] = sign, now_s
            live = self._newest_s - self._heard_at_s[name] < tenure.rules.quorum.liveness_timeout_s
            if live != member.live and not member.left:
                tenure.tell(events.Liveness(now_s, name, member.incarnation, live))
