"""Alerts that arrive: a run is broken, a webhook hears of it, and hears when it is well again.

Once by `diloco watch` alone, and once by a real Prometheus and a real Alertmanager with the files
of infra/prometheus (Debian's packages `prometheus` and `prometheus-alertmanager`; `make
test-alerts`). Only their times are made shorter: scrapes, pauses, and for how long a thing must be amiss.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import ENDLESS, World, eventually
from receiver import Receiver, receiving
from test_probes import start_aggregator, start_learner, total
from test_prometheus import ALERTMANAGER, ALERTS, CONFIG, ask

from diloco.common.process.nats_server import free_port
from diloco.common.protocol import names, shards, wire
from diloco.common.storage.store import open_store

NEEDED = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
needs_alertmanager = pytest.mark.skipif(
    bool(MISSING),
    reason=f"not installed here: {', '.join(MISSING)} (Debian's prometheus and "
    "prometheus-alertmanager)",
)
GONE = "runbooks/no-learners.md"


def arrived(receiver: Receiver, status: str, runbook: str) -> dict[str, Any] | None:
    """The first message of an alert."""
    return next((one for one in receiver.of(status) if one["runbook"] == runbook), None)


@pytest.mark.long
def test_watch_tells_a_webhook_that_all_learners_are_gone_and_that_one_is_back(new_world) -> None:
    world = new_world(run=ENDLESS)
    target = str(world.config_path)
    world.aggregator()
    learner = world.learner("a")
    with receiving([503]) as receiver:
        watch = world.start(
            "watch", "watch", target, "--webhook", receiver.url, "--every", "0.3", "--hold", "0.5",
            "--doctor", "0", "--state", str(world.folder / "told"),
        )  # fmt: skip
        world.until(lambda: "watching run" in watch.log(), "the watch says that it watches")
        world.until(lambda: world.steps("a") > 20, "it trains")
        learner.kill()
        fired = world.until(lambda: arrived(receiver, "firing", GONE), "the alert arrives")
        assert (fired["severity"], fired["run"]) == ("error", world.name)
        assert "no learner is there" in fired["summary"]
        # A restart of the watch tells nothing again, and what was told is told to be over.
        watch.terminate()
        assert watch.wait() == 0
        told = len(receiver.taken)
        watch = world.start(
            "watch", "watch", target, "--webhook", receiver.url, "--every", "0.3", "--hold", "0.5",
            "--doctor", "0", "--state", str(world.folder / "told"), "--json",
        )  # fmt: skip
        world.learner("a")
        over = world.until(lambda: arrived(receiver, "resolved", GONE), "its end arrives")
        assert over["id"] == fired["id"]
        assert not [one for one in receiver.taken[told:] if one["status"] == "firing"]
        world.stop()
        assert watch.wait() == 0
    assert "s3cr3t" not in "".join(process.log() for process in world.processes)
    lines = [json.loads(line) for line in watch.log().splitlines()]
    assert [one["status"] for one in lines if "status" in one] == ["resolved"] * len(lines)


@pytest.mark.long
def test_watch_tells_that_nats_is_away_and_says_nothing_of_what_it_cannot_see(
    new_world, own_nats_server
) -> None:
    world = new_world(server=own_nats_server, run=ENDLESS)
    world.aggregator()
    world.learner("a")
    world.until(lambda: world.steps("a") > 5, "it trains")
    with receiving() as receiver:
        watch = world.start(
            "watch", "watch", str(world.config_path), "--webhook", receiver.url, "--every", "0.3",
            "--hold", "0", "--doctor", "0",
        )  # fmt: skip
        world.until(lambda: "watching run" in watch.log(), "it watches")
        own_nats_server.kill()
        away = "runbooks/nats-away.md"
        eventually(lambda: arrived(receiver, "firing", away), "NATS is away")
        # A watch that begins now waits, and tells it as well.
        late = world.start(
            "late", "watch", str(world.config_path), "--every", "0.3", "--hold", "0", "--json"
        )
        eventually(lambda: "nats-away" in late.log(), "another watch tells it", every_s=0.2)
        own_nats_server.start()
        eventually(lambda: arrived(receiver, "resolved", away), "NATS is back")
        eventually(lambda: "resolved" in late.log(), "the other tells it too", every_s=0.2)
        for process in (watch, late):
            process.signal(signal.SIGINT)
            assert process.wait() == 0
    assert "Traceback" not in watch.log() + late.log()


# Prometheus and Alertmanager


class Servers:
    """A Prometheus that scrapes, and an Alertmanager that it tells."""

    def __init__(self, folder: Path, receiver: Receiver) -> None:
        self.folder, self.port, self.manager = folder, free_port(), free_port()
        self.targets = {kind: folder / f"{kind}.yml" for kind in ("aggregators", "learners")}
        for path in self.targets.values():
            path.write_text("[]")
        self._write_alertmanager(receiver)
        self._write_prometheus()

    def _write_alertmanager(self, receiver: Receiver) -> None:
        text = ALERTMANAGER.read_text()
        config = yaml.safe_load(text.replace("http://127.0.0.1:9099", receiver.url))
        for route in (config["route"], *config["route"]["routes"]):
            route |= {"group_wait": "200ms", "group_interval": "1s"}
        (self.folder / "alertmanager.yml").write_text(yaml.safe_dump(config))

    def _write_prometheus(self) -> None:
        rules = yaml.safe_load(ALERTS.read_text())
        for rule in rules["groups"][0]["rules"]:
            rule.update({"for": "1s"} if "for" in rule else {})
        (self.folder / "alerts.yml").write_text(yaml.safe_dump(rules))
        config = yaml.safe_load(CONFIG.read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        for job in config["scrape_configs"]:
            path = self.targets[job["job_name"].removeprefix("diloco-")]
            job["file_sd_configs"] = [{"files": [str(path)], "refresh_interval": "1s"}]
        (manager,) = config["alerting"]["alertmanagers"]
        manager["static_configs"][0]["targets"] = [f"127.0.0.1:{self.manager}"]
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def scrape(self, **ports: list[int]) -> None:
        """Scrape these from now on."""
        for kind, numbers in ports.items():
            hosts = [f"127.0.0.1:{port}" for port in numbers]
            self.targets[kind].write_text(yaml.safe_dump([{"targets": hosts}]))

    def commands(self) -> list[list[str]]:
        return [
            [
                "prometheus", f"--config.file={self.folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            [
                "prometheus-alertmanager", f"--config.file={self.folder / 'alertmanager.yml'}",
                f"--storage.path={self.folder / 'alertmanager'}", "--cluster.listen-address=",
                f"--web.listen-address=127.0.0.1:{self.manager}",
            ],
        ]  # fmt: skip


@contextlib.contextmanager
def serving(folder: Path, receiver: Receiver) -> Iterator[Servers]:
    folder.mkdir()
    servers = Servers(folder, receiver)
    with contextlib.ExitStack() as stack:
        for command, port in zip(servers.commands(), (servers.port, servers.manager), strict=True):
            path = folder / f"{command[0]}.log"
            process = subprocess.Popen(
                command, stdout=stack.enter_context(path.open("wb")), stderr=subprocess.STDOUT
            )
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            eventually(partial(is_ready, process, port, path), f"{command[0]} is ready")
        yield servers


def is_ready(process: "subprocess.Popen[bytes]", port: int, log: Path) -> bool:
    """Whether a server answers; one that has ended says why."""
    assert process.poll() is None, log.read_text()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=300) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def alert(receiver: Receiver, name: str, status: str) -> dict[str, Any] | None:
    """The first alert of that name and status that Alertmanager has sent."""
    found = (one for message in receiver.taken for one in message["alerts"])
    return next(
        (one for one in found if (one["labels"]["alertname"], one["status"]) == (name, status)),
        None,
    )


@pytest.fixture
def hears(tmp_path: Path) -> Iterator[tuple[Servers, Callable[[str, str], Any]]]:
    with receiving() as receiver, serving(tmp_path / "servers", receiver) as servers:
        yield servers, lambda name, status: alert(receiver, name, status)


@needs_alertmanager
@pytest.mark.slow
def test_an_alert_of_a_broken_run_passes_alertmanager_and_resolves(new_world, hears) -> None:
    servers, heard = hears
    world = new_world(run=ENDLESS)
    ports = {"aggregators": [free_port()], "learners": [free_port()]}
    start_aggregator(world, ports["aggregators"][0])
    learner = start_learner(world, "a", ports["learners"][0])
    # A learner that was not started yet is missed as well.
    merged = "diloco_aggregator_updates_merged_total"
    world.until(lambda: total(ports["aggregators"][0], merged) > 0, "it is merged")
    servers.scrape(**ports)
    live = "max(diloco_aggregator_live_learners) > 0"
    world.until(lambda: (ask(servers.port, "query", query=live) or {}).get("result"), "it is live")
    assert heard("DilocoLearnersGone", "firing") is None

    learner.kill()
    fired = world.until(lambda: heard("DilocoLearnersGone", "firing"), "the alert arrives")
    assert fired["labels"]["severity"] == "critical"
    assert fired["labels"]["run"] == world.name
    assert fired["annotations"]["runbook"] == GONE
    world.until(lambda: heard("DilocoLearnerDown", "firing"), "and that its page is away")

    start_learner(world, "a", ports["learners"][0])
    for name in ("DilocoLearnersGone", "DilocoLearnerDown"):
        over = world.until(lambda name=name: heard(name, "resolved"), f"{name} resolves")
        assert over["startsAt"] < over["endsAt"]


@needs_alertmanager
@pytest.mark.slow
def test_a_held_out_loss_that_rises_arrives(new_world, hears) -> None:
    servers, heard = hears
    world = new_world(run=ENDLESS)
    for step, loss in ((8, 5.0), (16, 2.0), (24, 4.5)):
        keep_score(world, step, loss)
    port = free_port()
    start_aggregator(world, port)
    servers.scrape(aggregators=[port])
    fired = world.until(lambda: heard("DilocoHeldOutLossRises", "firing"), "the alert arrives")
    assert fired["annotations"]["runbook"] == "runbooks/loss-spike.md"
    assert "2.5 above its least" in fired["annotations"]["summary"]


def keep_score(world: World, step: int, loss: float) -> None:
    """Keep a score of the run, as `diloco evaluate` does."""
    score = wire.Score(
        run=world.name, epoch=0, versions=(1,), record_seqs=(step,), global_step=step, tokens=step,
        at_s=float(step), loss=loss,
    )  # fmt: skip
    data = wire.encode(score)
    name = names.score_object(world.name, 0, step, shards.digest(data))
    open_store(str(world.store)).put(name, data)


@needs_alertmanager
def test_amtool_accepts_the_example_and_routes_by_severity() -> None:
    def amtool(*arguments: str) -> str:
        done = subprocess.run(
            ["amtool", *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "SUCCESS" in amtool("check-config", str(ALERTMANAGER))
    for severity, receiver in (("critical", "on-call"), ("warning", "people")):
        routed = amtool(
            "config", "routes", "test", f"--config.file={ALERTMANAGER}", f"severity={severity}"
        )
        assert routed.strip() == receiver


def test_the_example_inhibits_alerts_that_exist() -> None:
    config = yaml.safe_load(ALERTMANAGER.read_text())
    known = {rule["alert"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]}
    for rule in config["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            named = matcher.partition("=")[2].strip('~"').split("|")
            assert {*named} <= known
    receivers = {one["name"] for one in config["receivers"]}
    routes = (config["route"], *config["route"]["routes"])
    assert {route["receiver"] for route in routes} == receivers
