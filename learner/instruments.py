"""What a learner counts, as `common/metrics.py` defines it: read from its meter and its core."""

from diloco.common import metrics
from diloco.common.health import View
from diloco.common.metrics import Metrics
from diloco.common.wire import LEARNER_STATES
from diloco.learner import sync
from diloco.learner.synchronizer import Meter, Synchronizer

STATES = LEARNER_STATES
# States that are no training, as whoever asks for health reads them.
WHY_NOT = {
    "starting": "it loads versions and compiles",
    "paused": "the run is paused",
    "flushing": "it sends what is unsent, and trains no more",
    "leaving": "it says that it leaves",
    "failed": "an error ends it",
}


def view(meter: Meter) -> View:
    """What a learner does, and what keeps it from training."""
    why = (WHY_NOT[meter.state],) if meter.state in WHY_NOT else ()
    return View(f"{meter.state}: step {meter.local_step:,}, loss {meter.loss:.4f}", why)


def show(counted: Metrics, learner: Synchronizer, state: sync.State) -> None:
    """Set a learner's series; `state` is its core's."""
    meter, traffic = learner.meter, learner.meter.traffic
    each = learner.tokens_per_step
    for metric, value in (
        (metrics.TOKENS, meter.tokens),
        (metrics.STEPS, meter.tokens / each),
        (metrics.DATA_TOKENS, learner.position * each),
        (metrics.GLOBAL_STEP, meter.global_step),
        (metrics.LOSS, meter.loss),
        (metrics.STEP_TIME, meter.step_time_s),
        (metrics.STALL, meter.stall_s),
        (metrics.DATA_WAIT, meter.data_s),
        (metrics.RUN_TIME, meter.run_s),
        (metrics.UP, traffic.bytes_up),
        (metrics.DOWN, traffic.bytes_down),
        (metrics.SENT, traffic.updates_sent),
    ):
        counted.set(metric, value)
    for name, value in meter.metrics.items():
        counted.set(metrics.METRIC, value, name)
    for name in STATES:
        counted.set(metrics.STATE, name == meter.state, name)
    unsent = sync.unsent(state)
    for index, fragment in enumerate(state.fragments):
        counted.set(metrics.ADOPTED, fragment.version, index)
        counted.set(metrics.UNSENT, unsent.get(index, 0), index)
