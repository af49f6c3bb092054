"""Dashboard and alerts: every query names metrics and labels that exist, and Prometheus answers it.

The last needs Debian's package `prometheus` (the server and promtool); without it those tests are
skipped.
"""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from harness import ENDLESS, ROOT
from test_probes import start_aggregator, start_learner

from diloco.common.process import metrics
from diloco.common.process.nats_server import free_port

ALERTS = ROOT / "infra" / "prometheus" / "alerts.yml"
CONFIG = ROOT / "infra" / "prometheus" / "prometheus.yml"
ALERTMANAGER = ROOT / "infra" / "prometheus" / "alertmanager.yml"
DASHBOARD = ROOT / "infra" / "grafana" / "diloco.json"
CATALOGUE = {one.name: one for one in metrics.DAEMON + metrics.LEARNER + metrics.AGGREGATOR}
NEVER_OURS = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
SCRAPED = {"run", "instance", "job"}
# What a run that nothing befalls does not have, or one whose task says no more than its loss.
ONLY_IN_NEED = {
    "diloco_faults_total", "diloco_waiting", "diloco_aggregator_rejections_total",
    "diloco_aggregator_ignored_total", "diloco_aggregator_collected_bytes_total",
    "diloco_aggregator_quarantined", "diloco_run_held_out_loss", "diloco_run_held_out_step",
    "diloco_learner_metric", "diloco_learner_checkpoint_timestamp_seconds",
    "diloco_learner_checkpoint_failures_total", "diloco_learner_slices",
    "diloco_learner_cache_reads_total",
}  # fmt: skip
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Debian's package `prometheus` is not installed",
)


class Query(NamedTuple):
    where: str
    expression: str


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [one for one in json.loads(DASHBOARD.read_text())["panels"] if one["type"] != "row"]


def queries() -> list[Query]:
    found = [Query(rule["alert"], rule["expr"]) for rule in alerts()]
    for panel in panels():
        found += [Query(panel["title"], target["expr"]) for target in panel["targets"]]
    return found


def named(expression: str) -> set[str]:
    """The metrics of a query, by their full names as the catalogue has them."""
    plain = re.sub(r'"[^"]*"', "", expression)
    return {
        name if name in CATALOGUE else re.sub(r"_(bucket|sum|count)$", "", name)
        for name in re.findall(r"\b(?:diloco|process)_\w+|\bup\b", plain)
    }


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.where)
def test_queries_name_metrics_and_labels_that_exist(query: Query) -> None:
    names = named(query.expression)
    assert names
    assert names <= CATALOGUE.keys() | NEVER_OURS
    for name in re.findall(r"\b(diloco_\w+)_(?:bucket|sum|count)\b", query.expression):
        assert CATALOGUE[name].kind == "histogram"
    labels = {label for name in names & CATALOGUE.keys() for label in CATALOGUE[name].labels}
    labels |= {"learner"} if any("_learner_" in name for name in names) else set()
    used = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~?|!~|!=)", query.expression))
    for grouped in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", query.expression):
        used |= {label.strip() for label in grouped.split(",")}
    assert used <= labels | SCRAPED | {"le"}


def test_counters_are_read_as_rates_or_as_they_stand() -> None:
    for query in queries():
        for name in named(query.expression) & CATALOGUE.keys():
            if CATALOGUE[name].kind == "gauge":
                assert not re.search(rf"(rate|increase)\({name}\b", query.expression), query


def test_every_metric_of_a_dashboard_is_of_the_chosen_run() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for name in re.findall(r"\bdiloco_\w+", target["expr"]):
                assert f'{name}{{run=~"$run"' in target["expr"], panel["title"]


def test_alerts_say_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert {"summary", "description", "runbook"} == rule["annotations"].keys()
        page = (ROOT / rule["annotations"]["runbook"]).read_text()
        symptom = page.partition("## Symptom")[2].partition("## Meaning")[0]
        assert f"`{rule['alert']}`" in symptom


@needs_prometheus
def test_promtool_accepts_the_files_and_alerts_fire_when_they_should() -> None:
    for arguments in (
        ["check", "rules", str(ALERTS)],
        ["check", "config", str(CONFIG)],
        ["test", "rules", str(Path(__file__).parent / "alerts_test.yml")],
    ):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[int, dict[str, Path]]]:
    """A server with our configuration, scraping each second; its port and its files of targets."""
    targets = {kind: tmp_path / f"{kind}.yml" for kind in ("aggregators", "learners")}
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ALERTS)]
    for job in config["scrape_configs"]:
        kind = job["job_name"].removeprefix("diloco-")
        targets[kind].write_text("[]")
        job["file_sd_configs"] = [{"files": [str(targets[kind])], "refresh_interval": "1s"}]
    path, port = tmp_path / "prometheus.yml", free_port()
    path.write_text(yaml.safe_dump(config))
    with (tmp_path / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(
            [
                "prometheus", f"--config.file={path}", f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            yield port, targets
        finally:
            server.terminate()
            server.wait(30)


def ask(port: int, path: str, **parameters: str) -> Any:
    """The `data` of Prometheus's answer; None while it is not up."""
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=300) as answer:
            document = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
    except OSError:
        return None
    assert document["status"] == "success", document
    return document["data"]


@needs_prometheus
@pytest.mark.slow
def test_a_real_prometheus_answers_every_query_about_a_run(new_world, prometheus) -> None:
    port, targets = prometheus
    world = new_world(run=ENDLESS, bus={"tape_max_bytes": 1 << 30})
    aggregator, learners = free_port(), [free_port(), free_port()]
    start_aggregator(world, aggregator)
    for name, learner in zip("ab", learners, strict=True):
        start_learner(world, name, learner)
    for kind, ports in (("aggregators", [aggregator]), ("learners", learners)):
        hosts = [f"127.0.0.1:{number}" for number in ports]
        targets[kind].write_text(yaml.safe_dump([{"targets": hosts}]))

    def all_scraped() -> bool:
        found = ask(port, "query", query="diloco_aggregator_updates_merged_total > 9")
        state = ask(port, "query", query='diloco_learner_state{state="training"} == 1')
        return found is not None and len(found["result"]) == 3 and len(state["result"]) == 2

    world.until(all_scraped, "everybody is scraped")
    time.sleep(6)  # rates need a few scrapes
    missing = {
        name
        for name in CATALOGUE
        for series in [ask(port, "series", **{"match[]": f'{{__name__=~"{name}(_count)?"}}'})]
        if not series
    }
    assert missing <= ONLY_IN_NEED
    for query in queries():
        expression = query.expression.replace("$run", world.name)
        answer = ask(port, "query", query=expression.replace("$__rate_interval", "5s"))
        is_panel = query.where in {panel["title"] for panel in panels()}
        in_need = named(query.expression) & ONLY_IN_NEED
        assert answer["result"] or in_need or not is_panel, query
    rules = ask(port, "rules")["groups"][0]["rules"]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in alerts()}
    assert all(rule["health"] == "ok" for rule in rules), rules
    firing = [rule["name"] for rule in rules if rule["state"] != "inactive"]
    assert firing == []
