"""Tells the machines which learners are heard of."""

import asyncio
from collections.abc import Collection

from diloco.aggregator.context import Context
from diloco.aggregator.core import events
from diloco.aggregator.core.hearing import Hearing
from diloco.aggregator.owner import FragmentOwner
from diloco.aggregator.tenure import Tenure
from diloco.common import metrics, names, wire
from diloco.common.errors import WireError
from diloco.common.service import first_of
from diloco.common.tape import decode_as


class LivenessWatch:
    """Reads heartbeats, and tells the owners' machines what follows (`core/hearing.py`).

    Attributes:
        hearing: what was heard.
    """

    def __init__(self, context: Context, owners: Collection[FragmentOwner]) -> None:
        self._context = context
        self._owners = owners
        self.hearing = Hearing(context.runtime.clock())

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
            if beat.state == "failed":
                continue  # The last word of a life that is over is no sign of life.
            now_s = context.runtime.clock()
            self.hearing.beat(beat.learner, beat.incarnation, now_s, self._live_s())

    async def _compare(self) -> None:
        while True:
            self._context.health.turned()
            self._context.metrics.set(metrics.HEARD_AT, self.hearing.newest_s)
            await asyncio.sleep(min(1.0, self._live_s() / 4))
            for owner in self._owners:
                if owner.tenure is not None:
                    self._tell(owner.tenure)

    def _tell(self, tenure: Tenure) -> None:
        now_s = self._context.runtime.clock()
        timeout_s = tenure.rules.quorum.liveness_timeout_s
        for name, member in tenure.state.members.items():
            live = self.hearing.is_live(tenure.fragment, name, member, now_s, timeout_s)
            if live != member.live and not member.left:
                tenure.tell(events.Liveness(now_s, name, member.incarnation, live))
