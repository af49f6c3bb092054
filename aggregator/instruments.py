"""The metrics of an aggregator, as `common/process/metrics.py` defines them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from diloco.aggregator.core.state import State
from diloco.common.process import metrics
from diloco.common.process.health import HealthView
from diloco.common.process.metrics import Metrics
from diloco.common.protocol import wire

if TYPE_CHECKING:
    from diloco.aggregator.owner.tenure import Tenure

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
    counted: Metrics, tenures: Mapping[int, "Tenure | None"], fragments: int, stopped: int
) -> None:
    """Say how the fragments that are ours stand; `fragments` is P, `stopped` how many are damaged.

    A fragment without a tenure is being recovered. Sums are those of the newest record, so that
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


def count_record(counted: Metrics, before: wire.Record, record: wire.Record) -> None:
    """A record is committed: its inputs, its rejections, and how long its round waited for what."""
    for taken in record.inputs:
        counted.observe(metrics.STALENESS, taken.staleness, taken.learner)
    for refused in record.rejected:
        counted.add(metrics.VERDICTS, 1, refused.learner, refused.reason)
    if record.what != "version":
        return
    counted.observe(metrics.ROUND_UPDATES, len(record.inputs))
    if before.what == "version" and before.inputs:
        counted.observe(metrics.ROUND, max(0.0, record.opened_at_s - before.closed_at_s), "idle")
    quorum_at_s = record.quorum_at_s or record.closed_at_s
    counted.observe(metrics.ROUND, max(0.0, quorum_at_s - record.opened_at_s), "quorum")
    counted.observe(metrics.ROUND, max(0.0, record.closed_at_s - quorum_at_s), "grace")


@contextlib.contextmanager
def timing(counted: Metrics, clock: Callable[[], float], part: str) -> Iterator[None]:
    """Count how long a part of a round took, if it ends well."""
    began_s = clock()
    yield
    counted.observe(metrics.ROUND, clock() - began_s, part)


def describe(
    tenures: Mapping[int, "Tenure | None"], damaged: Mapping[int, str], fragments: int
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
