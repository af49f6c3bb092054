"""The metrics of a daemon, for Prometheus to read; docs/metrics.md explains each.

No other module imports prometheus_client. Rules:
- Cores (pure state machines) count nothing. Drivers, which run the cores, count effects and events.
  Values that exist anyway (the newest record, a heartbeat) are read when Prometheus asks
  (`on_scrape`).
- Names follow Prometheus's conventions: base units, `_total` for counters. Each series has the
  run's name and the daemon's as labels, in addition to the scraper's labels.
- A counter whose value is on the tape continues after an aggregator's restart. After a learner's
  restart its counters begin at 0, as work that a killed learner never sent is lost; Prometheus
  treats a counter that decreases as restarted.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
UPDATES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


class Definition(NamedTuple):
    """A metric of a daemon.

    Attributes:
        name: the full name, as Prometheus shows it.
        help: the meaning, for people.
        labels: names of the labels that follow those of the run and the daemon.
        buckets: a histogram's upper bounds.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Definition:
    return Definition(f"diloco_{name}", "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Definition:
    return Definition(f"diloco_{name}", "gauge", text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Definition:
    return Definition(f"diloco_{name}", "histogram", text, labels, buckets)


# Of every daemon
LIVE = _gauge("live", "1 while the main loop makes progress")
READY = _gauge("ready", "1 while the daemon can do its work")
FAULTS = _counter("faults_total", "attempts that failed with a transient fault", "what", "cause")
WAITING = _gauge("waiting", "calls that retry after a transient fault", "what", "cause")

# Of a learner
TOKENS = _counter("learner_tokens_total", "tokens trained by this process")
STEPS = _counter("learner_steps_total", "inner steps taken by this process")
DATA_TOKENS = _gauge("learner_data_tokens", "tokens consumed, over all incarnations")
GLOBAL_STEP = _gauge("learner_global_step", "newest global step known to the learner")
LOSS = _gauge("learner_loss", "training loss, moving average over steps")
METRIC = _gauge(
    "learner_metric",
    "further scalars of the loss, moving average over steps; `held_out_...`: figures of the loop on"
    " held-out data; `mfu`: model FLOPs utilization, where the devices' peak is known",
    "metric",
)
STEP_TIME = _gauge("learner_step_seconds", "inner step time, moving average")
STALL = _counter(
    "learner_stall_seconds_total", "time that synchronization blocked the training thread"
)
DATA_WAIT = _counter("learner_data_wait_seconds_total", "time that training waited for its batches")
RUN_TIME = _counter("learner_run_seconds_total", "time since the first step")
UP = _counter("learner_uploaded_bytes_total", "bytes written to the store")
DOWN = _counter("learner_downloaded_bytes_total", "bytes read from the store")
CACHE_READS = _counter(
    "learner_cache_reads_total",
    "reads for which the region's cache was asked: `hit`, `miss`; and of the store instead, as the"
    " cache was `away`, `slow`, `refused` (wrong bytes), or `paused` after one of these",
    "outcome",
)
SENT = _counter("learner_updates_sent_total", "updates announced")
CHECKPOINTED_AT = _gauge(
    "learner_checkpoint_timestamp_seconds", "time of the newest checkpoint of this process"
)
CHECKPOINT_FAILURES = _counter(
    "learner_checkpoint_failures_total", "checkpoints that could not be made"
)
DELAY = _gauge(
    "learner_delay_seconds", "time from an update's send to the adoption of its answer; mean"
)
DELAY_STEPS = _gauge("learner_delay_steps", "likewise, in inner steps; mean of the last updates")
ADOPTION = _gauge(
    "learner_adoption_seconds",
    "time from a version's record to its adoption: mean and worst of the last versions",
    "of",
)
ADOPTION_STEPS = _gauge("learner_adoption_steps", "likewise, in inner steps", "of")
STATE = _gauge("learner_state", "1 for the current state", "state")
SLICES = _gauge(
    "learner_slices",
    "slices of a learner that has several: that train (`present`), and that it has (`given`)",
    "of",
)
ADOPTED = _gauge("learner_version", "version adopted", "fragment")
UNSENT = _gauge("learner_unsent_steps", "inner steps not yet announced", "fragment")
SENDING = _histogram("learner_send_seconds", "time to send an update, by phase", SECONDS, "part")

# Of an aggregator
FRAGMENTS = _gauge("aggregator_fragments", "fragments of the run")
OWNED = _gauge("aggregator_fragments_owned", "fragments that this aggregator owns")
REFUSED = _gauge(
    "aggregator_fragments_refused",
    "fragments that this process no longer serves: it computed other digests from their objects",
)
VERSION = _counter("aggregator_versions_total", "versions on the tape", "fragment")
CLOCK = _gauge("aggregator_global_step", "global step of the newest version", "fragment")
COMMITTED_AT = _gauge(
    "aggregator_version_timestamp_seconds", "time at which the newest round closed", "fragment"
)
MERGED = _counter("aggregator_updates_merged_total", "updates merged, on the tape", "fragment")
REJECTED = _counter(
    "aggregator_updates_rejected_total", "updates rejected, on the tape", "fragment"
)
DELIVERED = _counter(
    "aggregator_tokens_merged_total", "tokens of merged updates, on the tape", "fragment"
)
LOST = _counter(
    "aggregator_tokens_rejected_total", "tokens of rejected updates, on the tape", "fragment"
)
PENDING = _gauge("aggregator_pending_updates", "updates announced and not merged yet", "fragment")
QUEUED = _gauge("aggregator_queued_events", "events queued for the fragment's core", "fragment")
LIVE_LEARNERS = _gauge("aggregator_live_learners", "live learners", "fragment")
HEARD_AT = _gauge(
    "aggregator_heard_timestamp_seconds",
    "time of the newest heartbeat of any learner, or of this process's start",
)
QUARANTINED = _gauge(
    "aggregator_quarantined",
    "1 for a quarantined learner",
    "fragment",
    "learner",
)
VERDICTS = _counter(
    "aggregator_rejections_total", "updates rejected by this process", "learner", "reason"
)
IGNORED = _counter("aggregator_ignored_total", "messages ignored: not a valid update", "reason")
STALENESS = _histogram(
    "aggregator_staleness_versions", "staleness of merged updates, in versions", VERSIONS, "learner"
)
WAIT = _histogram(
    "aggregator_wait_seconds",
    "from a merged update's announcement to its record",
    SECONDS,
    "learner",
)
ROUND_UPDATES = _histogram("aggregator_round_updates", "updates merged in a round", UPDATES)
ROUND = _histogram("aggregator_round_seconds", "round time, by phase", SECONDS, "part")
RECOVERIES = _counter("aggregator_recoveries_total", "recoveries of a fragment")
MERGED_AGAIN = _counter(
    "aggregator_versions_merged_again_total", "versions merged again during recovery"
)
RECEIVED = _counter("aggregator_received_bytes_total", "bytes of updates read from the store")
STORED = _counter("aggregator_stored_bytes_total", "bytes of versions written to the store")
COLLECTED = _counter("aggregator_collected_bytes_total", "bytes deleted by garbage collection")
RUN_CHECKPOINTED_AT = _gauge(
    "run_checkpoint_timestamp_seconds",
    "time of the run's newest checkpoint in the store, or of its creation if there is none",
)
HELD_OUT = _gauge(
    "run_held_out_loss",
    "loss of the global view on held-out data, of the scores that are kept: the first, the least"
    " (`best`) and the newest",
    "which",
)
HELD_OUT_STEP = _gauge("run_held_out_step", "global step of the newest score that is kept")
PAUSED = _gauge("run_paused", "1 while the run is paused")
TAPE_SIZE = _gauge("tape_size_bytes", "size of the tape")
TAPE_LIMIT = _gauge("tape_limit_bytes", "size limit of the tape; 0: none")

# Of a follower
FOLLOWED = _gauge("follower_version", "version of the model that the follower has handed out last")
BEHIND = _gauge(
    "follower_behind_seconds",
    "age of the newest whole version, if the follower does not have it yet; else 0",
)
BEHIND_VERSIONS = _gauge("follower_behind_versions", "likewise, in versions")
FOLLOWER_DOWN = _counter("follower_downloaded_bytes_total", "bytes read from the store")

DAEMON = (LIVE, READY, FAULTS, WAITING)
LEARNER = (
    TOKENS, STEPS, DATA_TOKENS, GLOBAL_STEP, LOSS, METRIC, STEP_TIME, DELAY, DELAY_STEPS,
    ADOPTION, ADOPTION_STEPS, STALL, DATA_WAIT, RUN_TIME, UP, DOWN, CACHE_READS, SENT,
    CHECKPOINTED_AT, CHECKPOINT_FAILURES, STATE, SLICES, ADOPTED, UNSENT, SENDING,
)  # fmt: skip
AGGREGATOR = (
    FRAGMENTS, OWNED, REFUSED, VERSION, CLOCK, COMMITTED_AT, MERGED, REJECTED, DELIVERED, LOST,
    PENDING, QUEUED, LIVE_LEARNERS, HEARD_AT, QUARANTINED, VERDICTS, IGNORED, STALENESS, WAIT,
    ROUND_UPDATES, ROUND, RECOVERIES, MERGED_AGAIN, RECEIVED, STORED, COLLECTED,
    RUN_CHECKPOINTED_AT, HELD_OUT, HELD_OUT_STEP, PAUSED, TAPE_SIZE, TAPE_LIMIT,
)  # fmt: skip
FOLLOWER = (FOLLOWED, BEHIND, BEHIND_VERSIONS, FOLLOWER_DOWN)


class Metrics(Collector):
    """The metrics of one daemon; any thread may call the methods.

    The argument `labels` of a method has a value for each of the metric's own labels.

    Args:
        labels: label -> value, added to every series: the names of the run and the daemon.
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self._labels = dict(labels or {})
        self._lock = threading.Lock()
        self._scraping = threading.Lock()
        self._values: dict[Definition, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[Definition, Histogram] = {}
        self._sources: list[Callable[[], None]] = []

    def add(self, metric: Definition, amount: float = 1.0, *labels: object) -> None:
        """Adds `amount` to a counter, which begins at 0."""
        key = _key(metric, labels)
        with self._lock:
            series = self._values.setdefault(metric, {})
            series[key] = series.get(key, 0.0) + amount

    def set(self, metric: Definition, value: float, *labels: object) -> None:
        """Sets a gauge, or a counter whose total is kept elsewhere, to `value`."""
        with self._lock:
            self._values.setdefault(metric, {})[_key(metric, labels)] = float(value)

    def observe(self, metric: Definition, value: float, *labels: object) -> None:
        """Adds one value to a histogram."""
        values = (*self._labels.values(), *_key(metric, labels))
        with self._lock:
            if metric not in self._histograms:
                named = [*self._labels, *metric.labels]
                self._histograms[metric] = Histogram(
                    metric.name, metric.help, named, buckets=metric.buckets, registry=None
                )
            histogram = self._histograms[metric]
        (histogram.labels(*values) if values else histogram).observe(value)

    def forget(self, *metrics: Definition) -> None:
        """Drops all series of some gauges or counters, as when the daemon lost its fragments."""
        with self._lock:
            for metric in metrics:
                self._values.pop(metric, None)

    def on_scrape(self, source: Callable[[], None]) -> None:
        """Makes each scrape call `source` first, on the thread that answers the scrape."""
        self._sources.append(source)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their present values, for prometheus_client."""
        with self._scraping:
            for source in self._sources:
                source()
            with self._lock:
                values = {metric: dict(series) for metric, series in self._values.items()}
                histograms = [*self._histograms.values()]
        own = [*self._labels.values()]
        for metric, series in values.items():
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=[*self._labels, *metric.labels])
            for key, value in series.items():
                family.add_metric([*own, *key], value)
            yield family
        for histogram in histograms:
            for found in histogram.collect():
                # Drops the histogram's creation time, which says nothing about the daemon.
                found.samples = [one for one in found.samples if "_created" not in one.name]
                yield found

    def exposition(self) -> bytes:
        """Returns all metrics, and the process's and Python's, in Prometheus's text format."""
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        return generate_latest(registry)


def _key(metric: Definition, labels: tuple[object, ...]) -> tuple[str, ...]:
    assert len(labels) == len(metric.labels), metric.name
    return tuple(str(label) for label in labels)
