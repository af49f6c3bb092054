"""docs/metrics.md: the tables of metrics, from `diloco.common.process.metrics`."""

from diloco.common.process import metrics
from docs.generate.markdown import table


def listed(catalogue: tuple[metrics.Definition, ...]) -> str:
    """Returns the table of some metrics."""
    rows = [
        (
            f"`{metric.name}`",
            metric.kind,
            ", ".join(f"`{label}`" for label in metric.labels) or "-",
            metric.help,
        )
        for metric in catalogue
    ]
    return table(["metric", "type", "labels", "meaning"], rows)


def blocks() -> dict[str, str]:
    """Returns the tables of the metrics of all daemons, learners, aggregators and followers."""
    return {
        "metrics daemon": listed(metrics.DAEMON),
        "metrics learner": listed(metrics.LEARNER),
        "metrics aggregator": listed(metrics.AGGREGATOR),
        "metrics follower": listed(metrics.FOLLOWER),
    }
