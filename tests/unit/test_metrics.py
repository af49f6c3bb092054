"""Counts: their names, how Prometheus reads them."""

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diloco.common.process import metrics
from diloco.common.process.metrics import Metrics

CATALOGUE = metrics.DAEMON + metrics.LEARNER + metrics.AGGREGATOR + metrics.FOLLOWER
UNITS = ("_seconds", "_bytes", "_tokens", "_steps", "_updates", "_versions")


def read(counted: Metrics) -> dict[str, float]:
    """Samples by name and labels, as a scraper has them."""
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())):
            sample.value
        for family in text_string_to_metric_families(counted.exposition().decode())
        for sample in family.samples
    }  # fmt: skip


def test_every_definition_is_in_the_catalogue() -> None:
    defined = {one for one in vars(metrics).values() if isinstance(one, metrics.Definition)}
    assert defined == set(CATALOGUE)


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_names_follow_prometheus(metric: metrics.Definition) -> None:
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    if metric.kind == "histogram":
        assert metric.name.endswith(UNITS)
    assert "_ms" not in metric.name
    assert not {"run", "learner_name", "le"} & set(metric.labels)


def test_series_carry_the_daemons_labels() -> None:
    counted = Metrics({"run": "demo", "learner": "a"})
    counted.add(metrics.FAULTS, 2, "publishing update", "bus")
    counted.add(metrics.FAULTS, 1, "publishing update", "bus")
    counted.set(metrics.LOSS, 2.5)
    found = read(counted)
    assert found["diloco_faults_total cause=bus learner=a run=demo what=publishing update"] == 3
    assert found["diloco_learner_loss learner=a run=demo"] == 2.5
    assert any(name.startswith("process_") for name in found)


def test_a_counter_goes_on_where_the_tape_is() -> None:
    counted = Metrics()
    counted.set(metrics.VERSION, 41, 0)
    counted.set(metrics.VERSION, 42, 0)
    assert read(counted)["diloco_aggregator_versions_total fragment=0"] == 42


def test_values_of_a_histogram_add_up_to_its_buckets() -> None:
    counted = Metrics()
    for staleness in (0, 0, 1, 40):
        counted.observe(metrics.STALENESS, staleness, "a")
    found = read(counted)
    name = "diloco_aggregator_staleness_versions"
    assert found[f"{name}_bucket le=0.0 learner=a"] == 2
    assert found[f"{name}_bucket le=1.0 learner=a"] == 3
    assert found[f"{name}_bucket le=32.0 learner=a"] == 3
    assert found[f"{name}_bucket le=+Inf learner=a"] == 4
    assert found[f"{name}_count learner=a"] == 4
    assert found[f"{name}_sum learner=a"] == 41


def test_what_is_read_at_a_scrape_is_new_each_time() -> None:
    counted, versions = Metrics(), {0: 1, 1: 1}

    def show() -> None:
        counted.forget(metrics.VERSION)
        for fragment, version in versions.items():
            counted.set(metrics.VERSION, version, fragment)

    counted.on_scrape(show)
    assert read(counted)["diloco_aggregator_versions_total fragment=1"] == 1
    del versions[1]
    versions[0] = 2
    found = read(counted)
    assert found["diloco_aggregator_versions_total fragment=0"] == 2
    assert "diloco_aggregator_versions_total fragment=1" not in found


def test_threads_count_together() -> None:
    counted = Metrics()

    def count() -> None:
        for _ in range(2000):
            counted.add(metrics.RECEIVED, 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(counted)["diloco_aggregator_received_bytes_total"] == 8000
