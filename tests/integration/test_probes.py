"""Metrics and health of real daemons: what they say, and that a restart does not break history."""

import contextlib
import json
import urllib.error
import urllib.request

import pytest
from harness import ENDLESS, World, said_to_systemd
from prometheus_client.parser import text_string_to_metric_families

from diloco.common.process.nats_server import free_port


def page(port: int, path: str) -> str:
    """A page of a daemon; '' while it does not listen."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()
    except OSError:
        return ""


def total(port: int, name: str) -> float:
    """Sum of a metric's samples over its labels; -1 while there are none."""
    found = [
        sample.value
        for family in text_string_to_metric_families(page(port, "/metrics"))
        for sample in family.samples
        if sample.name == name
    ]
    return sum(found) if found else -1.0


def ready(port: int) -> bool:
    answer = page(port, "/readyz")
    return bool(answer) and bool(json.loads(answer)["ready"])


def start_aggregator(world: World, port: int):
    return world.start(
        "aggregator", "aggregator", "--config", str(world.config_path), "--metrics-port", str(port)
    )


def start_learner(world: World, name: str, port: int):
    return world.start(
        name, "learner", "--config", str(world.config_path), "--learner", name,
        "--metrics-port", str(port),
    )  # fmt: skip


def test_counts_go_on_over_the_deaths_of_their_daemons(new_world) -> None:
    world = new_world(run=ENDLESS)
    aggregator_port, learner_port = free_port(), free_port()
    aggregator = start_aggregator(world, aggregator_port)
    learner = start_learner(world, "a", learner_port)
    versions, merged = "diloco_aggregator_versions_total", "diloco_aggregator_tokens_merged_total"
    world.until(lambda: total(aggregator_port, versions) >= 9, "versions are counted")
    world.until(lambda: ready(aggregator_port) and ready(learner_port), "both are ready")
    assert total(learner_port, "diloco_learner_tokens_total") > 0
    assert total(learner_port, "diloco_learner_updates_sent_total") > 0
    assert total(aggregator_port, "diloco_aggregator_fragments_owned") == 3
    assert total(aggregator_port, "diloco_aggregator_round_seconds_count") > 0
    assert total(aggregator_port, "diloco_aggregator_received_bytes_total") > 0

    before = total(aggregator_port, versions), total(aggregator_port, merged)
    aggregator.kill()
    assert page(aggregator_port, "/readyz") == ""
    # While nobody makes versions, a new aggregator can only have them from the tape.
    data = total(learner_port, "diloco_learner_data_tokens")
    learner.kill()
    start_aggregator(world, aggregator_port)
    # It stands by, and is ready, until the leases of the dead one have expired.
    owned = "diloco_aggregator_fragments_owned"
    world.until(lambda: total(aggregator_port, owned) == 3, "the leases are its own")
    world.until(lambda: ready(aggregator_port), "the fragments are recovered")
    after = total(aggregator_port, versions), total(aggregator_port, merged)
    assert after >= before

    start_learner(world, "a", learner_port)
    world.until(lambda: ready(learner_port), "it trains again")
    # At most what was not sent is trained again: 8 steps of 8 tokens, and what it did since.
    assert total(learner_port, "diloco_learner_data_tokens") >= data - 2 * 8 * 8
    world.until(lambda: total(aggregator_port, versions) > after[0], "versions go on")


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_last_status_of_each_host_is_that_the_run_has_ended(
    new_world, tmp_path, monkeypatch, hosts
) -> None:
    """infra/ended.py tells the keeper by it that the learner's machines may go."""
    world = new_world(run={"steps": 40}, learner={"cpu_devices": 1})
    world.aggregator()
    meet = f"127.0.0.1:{free_port()}"
    further = ["--hosts", str(hosts), "--coordinator", meet] if hosts > 1 else []
    with contextlib.ExitStack() as stack:
        said = []
        for host in range(hosts):
            said.append(stack.enter_context(said_to_systemd(tmp_path / str(host), monkeypatch)))
            place = [*further, "--host", str(host)] if further else []
            world.start(
                f"a{host}", "learner", "--config", str(world.config_path), "--learner", "a", *place
            )
        for process in world.processes[1:]:
            assert process.wait() == 0, process.log()
    for words in said:
        lines = "\n".join(words).splitlines()
        assert [line for line in lines if line.startswith("STATUS=")][
            -1
        ] == "STATUS=left: run ended"


def test_waiting_for_the_bus_is_told_and_is_no_illness(new_world, own_nats_server) -> None:
    world = new_world(server=own_nats_server, run=ENDLESS)
    port = free_port()
    start_aggregator(world, free_port())
    start_learner(world, "a", port)
    world.until(lambda: ready(port), "it trains")
    own_nats_server.kill()
    waiting = world.until(
        lambda: json.loads(page(port, "/readyz"))["waiting"], "it waits for the bus"
    )
    assert "publishing update" in waiting
    assert ready(port)
    assert total(port, "diloco_faults_total") > 0
    own_nats_server.start()
    world.until(lambda: not json.loads(page(port, "/readyz"))["waiting"], "it waits no more")
