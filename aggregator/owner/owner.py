"""The owner of one fragment: recovers it, and begins anew whenever somebody else committed first.

A tenure (`tenure.py`) reads the tape from its position, feeds the machine (`core/machine.py`), and
does what the machine says: fetch, merge, announce, commit. A record of its fragment that it did not
write (another owner's, an operator's rollback) ends it, and the next begins from that record.
"""

from collections.abc import Awaitable, Callable

from diloco.aggregator.context import Context
from diloco.aggregator.core.state import State
from diloco.aggregator.owner.collector import Collector
from diloco.aggregator.owner.committer import Samples
from diloco.aggregator.owner.recovery import recover
from diloco.aggregator.owner.tenure import Tenure
from diloco.common.process import metrics
from diloco.common.process.service import first_of
from diloco.common.protocol.errors import SwapLostError


class FragmentOwner:
    """Makes the versions of one fragment, for as long as `own` runs.

    Args:
        context: the aggregator's.
        fragment: its index.
        still_ours: asked when somebody else has committed a record of the fragment.

    Attributes:
        fragment: its index.
        tenure: of now; None while it recovers.
    """

    def __init__(
        self, context: Context, fragment: int, still_ours: Callable[[int], Awaitable[bool]]
    ) -> None:
        self.tenure: Tenure | None = None
        self._context = context
        self.fragment = fragment
        self._still_ours = still_ours
        self._logger = context.logger.bind(fragment=fragment)
        self._samples = Samples(context, fragment, self._logger)
        self._collector = Collector(context, fragment, self._state)

    async def own(self) -> bool:
        """Recover from the tape and make versions; whenever another commits first, recover.

        Returns once the run has ended and every update stored before its end has its record;
        or, with False, once the fragment is somebody else's.

        Raises:
            IntegrityError: what is stored does not give the recorded digests.
        """
        while True:
            try:
                tenure = self.tenure = await self._recover()
                try:
                    await first_of(*tenure.work(), self._collector.work())
                finally:
                    self.tenure = None
                    await tenure.end()
            except SwapLostError as lost:
                if not await self._still_ours(self.fragment):
                    return False
                self._logger.warning("overtaken", expected=lost.expected)
            else:
                return True

    def _state(self) -> State | None:
        return self.tenure.state if self.tenure else None

    async def _recover(self) -> Tenure:
        context, runtime = self._context, self._context.runtime
        began_s = runtime.clock()
        recovered = await runtime.retry(
            "recovery", lambda: recover(context, self.fragment), logger=self._logger
        )
        context.metrics.add(metrics.RECOVERIES)
        context.metrics.add(metrics.MERGED_AGAIN, recovered.merged_again)
        self._logger.info(
            "recovered",
            version=recovered.record.version,
            merged_again=recovered.merged_again,
            position=recovered.record.position,
            took_s=round(runtime.clock() - began_s, 3),
        )
        return Tenure(context, recovered, self._samples, self._collector.wake)
