"""The owners of fragments: each recovers its fragment, and again if another process commits first.

A tenure (`tenure.py`) reads the tape from the fragment's position, feeds the state machine
(`core/machine.py`), and carries out the machine's effects: fetch, merge, announce, commit. A tenure
ends when the tape has a record of the fragment that the tenure did not write: another owner's, or
an operator's rollback. The next tenure begins from that record.

At the end of the file: the metrics and the health of an aggregator, which show its fragments.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from functools import partial

from diloco.aggregator.context import Context
from diloco.aggregator.core.state import State
from diloco.aggregator.leases import Leases, NoLeases
from diloco.aggregator.owner.committer import IgnoredMessages
from diloco.aggregator.owner.garbage_collector import Collector, ShardListing
from diloco.aggregator.owner.recovery import recover
from diloco.aggregator.owner.tenure import Tenure
from diloco.common.process import metrics
from diloco.common.process.health import HealthView
from diloco.common.process.metrics import Metrics
from diloco.common.process.tasks import cancel, first_of
from diloco.common.protocol import wire
from diloco.common.protocol.errors import IntegrityError, SwapLostError


class FragmentOwner:
    """Makes the versions of one fragment, for as long as `own` runs.

    Args:
        context: the aggregator's context.
        fragment: the fragment's index.
        leases: the leases of the fragments.
        shards: the listing of shards, shared by the garbage collectors of all fragments.

    Attributes:
        fragment: the fragment's index.
        tenure: the present tenure; None while the fragment is being recovered.
    """

    def __init__(
        self,
        context: Context,
        fragment: int,
        leases: Leases | NoLeases,
        shards: ShardListing,
    ) -> None:
        self.tenure: Tenure | None = None
        self._context = context
        self.fragment = fragment
        self._leases = leases
        self._logger = context.logger.bind(fragment=fragment)
        self._ignored = IgnoredMessages(context, fragment, self._logger)
        self._collector = Collector(context, fragment, self._state, shards)

    async def own(self) -> bool:
        """Recovers from the tape and makes versions; recovers again if another process commits.

        Returns True once the run has ended and every update stored before its end has a verdict,
        and False once another process has the lease of the fragment.

        Raises:
            IntegrityError: the stored objects do not give the recorded digests, or this process
                fails to add updates, and another aggregator may own the fragment.
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
                if not await self._leases.still_ours(self.fragment):
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
        others_may = partial(self._leases.others_may_serve, self.fragment)
        return Tenure(context, recovered, self._ignored, self._collector.wake, others_may)


class Owners:
    """The fragments that this process owns, with a task for each.

    Args:
        context: the aggregator's context.
        leases: the leases of the fragments.

    Attributes:
        damaged: the fragments that this process refuses, with the error that is the reason.
    """

    def __init__(self, context: Context, leases: Leases | NoLeases) -> None:
        self._context = context
        self._leases = leases
        self._shards = ShardListing()
        self._tasks: dict[int, asyncio.Future[None]] = {}
        self._owners: dict[int, FragmentOwner] = {}
        self.damaged: dict[int, IntegrityError] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def show(self) -> None:
        """Registers the owned fragments with metrics and health, which show them when read."""
        context, fragments = self._context, len(self._context.layout.fragments)
        context.metrics.on_scrape(
            lambda: show_owned(context.metrics, self._tenures(), fragments, len(self.damaged))
        )
        context.health.view = lambda: describe(
            self._tenures(), {f: error.message for f, error in [*self.damaged.items()]}, fragments
        )

    def _tenures(self) -> dict[int, Tenure | None]:
        # Copied, as other threads call this while owners come and go.
        return {fragment: owner.tenure for fragment, owner in [*self._owners.items()]}

    def all(self) -> Collection[FragmentOwner]:
        """Returns the present owners, as a view that follows `take` and `drop`."""
        return self._owners.values()

    def take(self, fragment: int) -> None:
        """Starts the task that owns a fragment."""
        self._owners[fragment] = FragmentOwner(self._context, fragment, self._leases, self._shards)
        self._tasks[fragment] = asyncio.ensure_future(self._own(fragment))

    async def drop(self, fragments: Iterable[int]) -> None:
        """Cancels the tasks of these fragments and waits for them; uncommitted work is lost."""
        dropped = [f for f in fragments if f in self._tasks]
        for fragment in dropped:
            del self._owners[fragment]
        await cancel(*(self._tasks.pop(fragment) for fragment in dropped))

    async def drop_all(self) -> None:
        """Ceases to own all fragments."""
        await self.drop([*self._tasks])

    async def failure(self) -> None:
        """Waits for an error of an owner that must end the whole aggregator, and raises it."""
        await self._failed

    async def _own(self, fragment: int) -> None:
        try:
            if await self._owners[fragment].own():
                await self._leases.done(fragment)
        except IntegrityError as error:
            # This machine may be at fault: other aggregators may try. Other fragments go on.
            self._context.logger.exception("fragment_refused", fragment=fragment, hint=error.hint)
            self.damaged[fragment] = error
            self._leases.refuse(fragment)
        except Exception as error:  # noqa: BLE001 - raised by `failure`
            if not self._failed.done():
                self._failed.set_exception(error)


# Metrics with a label for the fragment; each aggregator sets those of the fragments it owns.
BY_FRAGMENT = (
    metrics.VERSION,
    metrics.CLOCK,
    metrics.COMMITTED_AT,
    metrics.MERGED,
    metrics.REJECTED,
    metrics.DELIVERED,
    metrics.LOST,
    metrics.PENDING,
    metrics.QUEUED,
    metrics.LIVE_LEARNERS,
    metrics.QUARANTINED,
)


def show_owned(
    counted: Metrics, tenures: Mapping[int, Tenure | None], fragments: int, stopped: int
) -> None:
    """Sets the metrics of the fragments that this process owns.

    Sums come from the fragment's newest record, so that they continue after a change of owner.

    Args:
        counted: the metrics.
        tenures: the tenure of each owned fragment; None while the fragment is being recovered.
        fragments: the number of fragments of the run, P.
        stopped: the number of fragments that this process refuses.
    """
    counted.forget(*BY_FRAGMENT, metrics.PAUSED)
    counted.set(metrics.FRAGMENTS, fragments)
    counted.set(metrics.OWNED, len(tenures))
    counted.set(metrics.REFUSED, stopped)
    for fragment, tenure in sorted(tenures.items()):
        if tenure is not None:
            _show_fragment(counted, fragment, tenure.newest, tenure.state)
            counted.set(metrics.PAUSED, tenure.paused)
            counted.set(metrics.QUEUED, tenure.queued, fragment)


def _show_fragment(counted: Metrics, fragment: int, newest: wire.Record, state: State) -> None:
    live = sum(member.live and not member.left for member in state.members.values())
    for metric, value in (
        (metrics.VERSION, newest.version),
        (metrics.CLOCK, newest.global_step),
        (metrics.COMMITTED_AT, newest.closed_at_s),
        (metrics.MERGED, newest.totals.updates_merged),
        (metrics.REJECTED, newest.totals.updates_rejected),
        (metrics.DELIVERED, newest.totals.tokens_merged),
        (metrics.LOST, newest.totals.tokens_rejected),
        (metrics.PENDING, len(state.pending)),
        (metrics.LIVE_LEARNERS, live),
    ):
        counted.set(metric, value, fragment)
    for learner in sorted(state.quarantined):
        counted.set(metrics.QUARANTINED, 1, fragment, learner)


def describe(
    tenures: Mapping[int, Tenure | None], damaged: Mapping[int, str], fragments: int
) -> HealthView:
    """Returns an aggregator's state in words, and why it does not serve some fragments.

    Args:
        tenures: the tenure of each owned fragment; None while the fragment is being recovered.
        damaged: why this process refuses a fragment, by the fragment's index.
        fragments: the number of fragments of the run, P.
    """
    recovering = [fragment for fragment, tenure in tenures.items() if tenure is None]
    why = [f"refuses fragment {fragment}: {error}" for fragment, error in damaged.items()]
    why += [f"fragment {f} is being recovered" for f in recovering if f not in damaged]
    versions = [tenure.state.version for tenure in tenures.values() if tenure is not None]
    if not tenures:
        return HealthView("stands by", tuple(why))
    span = f" at versions {min(versions)} to {max(versions)}" if versions else ""
    return HealthView(f"owns {len(tenures)} of {fragments} fragments{span}", tuple(why))
