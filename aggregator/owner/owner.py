"""The owners of fragments: each recovers its own, and again whenever somebody else commits first.

A tenure (`tenure.py`) reads the tape from its position, feeds the machine (`core/machine.py`), and
does what the machine says: fetch, merge, announce, commit. A record of its fragment that it did not
write (another owner's, an operator's rollback) ends it, and the next begins from that record.

At the foot: the metrics and the health of an aggregator, which speak of its fragments.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from diloco.aggregator.context import Context
from diloco.aggregator.core.state import State
from diloco.aggregator.owner.committer import Samples
from diloco.aggregator.owner.garbage_collector import Collector
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


class Owners:
    """The fragments that this process owns, a task for each.

    Args:
        context: the aggregator's.
        still_ours: whether a fragment's lease stands, asked of the server.
        done: called once nothing of a fragment is left to do.
        refuse: called once this process has failed at a fragment.
    """

    def __init__(
        self,
        context: Context,
        still_ours: Callable[[int], Awaitable[bool]],
        done: Callable[[int], Awaitable[None]],
        refuse: Callable[[int], None],
    ) -> None:
        self._context = context
        self._refuse = refuse
        self._still_ours = still_ours
        self._done = done
        self._tasks: dict[int, asyncio.Future[None]] = {}
        self._owners: dict[int, FragmentOwner] = {}
        self.damaged: dict[int, IntegrityError] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def show(self) -> None:
        """Tell metrics and health of the owners, whenever these ask."""
        context, fragments = self._context, len(self._context.layout.fragments)
        context.metrics.on_scrape(
            lambda: show_owned(context.metrics, self._tenures(), fragments, len(self.damaged))
        )
        context.health.view = lambda: describe(
            self._tenures(), {f: error.message for f, error in [*self.damaged.items()]}, fragments
        )

    def _tenures(self) -> dict[int, Tenure | None]:
        # Asked from other threads, while owners come and go.
        return {fragment: owner.tenure for fragment, owner in [*self._owners.items()]}

    def all(self) -> Collection[FragmentOwner]:
        """The owners of now, as they come and go."""
        return self._owners.values()

    def take(self, fragment: int) -> None:
        """Begin to own a fragment."""
        self._owners[fragment] = FragmentOwner(self._context, fragment, self._still_ours)
        self._tasks[fragment] = asyncio.ensure_future(self._own(fragment))

    async def drop(self, fragments: Iterable[int]) -> None:
        """Cease to own fragments; what was not committed is forgotten."""
        dropped = [f for f in fragments if f in self._tasks]
        for fragment in dropped:
            del self._owners[fragment]
        await cancel(*(self._tasks.pop(fragment) for fragment in dropped))

    async def drop_all(self) -> None:
        """Cease to own anything."""
        await self.drop([*self._tasks])

    async def failure(self) -> None:
        """Raise the error that ends the whole aggregator, once an owner has met it."""
        await self._failed

    async def _own(self, fragment: int) -> None:
        try:
            if await self._owners[fragment].own():
                await self._done(fragment)
        except IntegrityError as error:
            # This machine may be the bad one: whoever else is there tries. Other fragments go on.
            self._context.logger.exception("fragment_refused", fragment=fragment, hint=error.hint)
            self.damaged[fragment] = error
            self._refuse(fragment)
        except Exception as error:  # noqa: BLE001 - raised by `failure`
            if not self._failed.done():
                self._failed.set_exception(error)


# Of the fragments that are ours; others have those of the rest.
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
    """Set the metrics of the fragments that this process owns.

    `fragments` is P; `stopped` counts those that this process refuses. A fragment without a tenure
    is being recovered. Sums are those of the newest record, so that
    they go on where another process left them.
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
    """An aggregator's state, and the fragments that it cannot serve yet, or no more."""
    recovering = [fragment for fragment, tenure in tenures.items() if tenure is None]
    why = [f"refuses fragment {fragment}: {error}" for fragment, error in damaged.items()]
    why += [f"fragment {f} is being recovered" for f in recovering if f not in damaged]
    versions = [tenure.state.version for tenure in tenures.values() if tenure is not None]
    if not tenures:
        return HealthView("stands by", tuple(why))
    span = f" at versions {min(versions)} to {max(versions)}" if versions else ""
    return HealthView(f"owns {len(tenures)} of {fragments} fragments{span}", tuple(why))
