"""Health: what lives, what is ready, what systemd and whoever asks over HTTP are told."""

import asyncio
import json
import socket
import urllib.error
import urllib.request

import pytest

from diloco.common.process.config import MetricsSection, ServiceManager, service_manager
from diloco.common.process.health import (
    PHASE_S,
    Health,
    HealthView,
    Starting,
    report,
    step_limit_s,
    tell,
    tell_error,
    tell_stopping,
)
from diloco.common.process.nats_server import free_port
from diloco.common.process.probes import make_probes, serving
from diloco.common.process.retry import Retries, Runtime
from diloco.common.protocol.errors import BusUnavailableError, ConfigError, StoreUnavailableError


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def working() -> HealthView:
    return HealthView("trains")


def test_a_main_loop_that_does_not_turn_is_dead() -> None:
    clock = Clock()
    health = Health(limit_s=lambda: 30.0, view=working, clock=clock)
    health.turned()
    clock.now_s += 30
    assert health.answer().live
    clock.now_s += 1
    answer = health.answer()
    assert not answer.live
    assert not answer.ready
    assert answer.why == ("the main loop has not turned for 31 s",)
    health.turned()
    assert health.answer().ready


def test_what_has_not_begun_lives_and_is_not_ready() -> None:
    answer = Health().answer()
    assert answer.live
    assert not answer.ready
    assert answer.why


def test_a_slow_step_is_not_a_hung_one() -> None:
    assert step_limit_s(600.0, 0.1) == 600.0
    assert step_limit_s(600.0, 120.0) == 2400.0


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """A socket that stands for systemd's, and what was said on it."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind("notify")
        listener.setblocking(False)

        def heard() -> list[str]:
            found = []
            while True:
                try:
                    found.append(listener.recv(4096).decode())
                except BlockingIOError:
                    return found

        yield ServiceManager("notify", watchdog_s=0.04), heard


def test_systemd_hears_what_a_daemon_says(manager) -> None:
    systemd, heard = manager
    tell(systemd, READY="1", STATUS="trains")
    tell_stopping(systemd)
    assert heard() == ["READY=1\nSTATUS=trains", "STOPPING=1\nWATCHDOG_USEC=600000000"]


def test_systemd_hears_why_a_daemon_ends_in_one_line(manager) -> None:
    systemd, heard = manager
    tell_error(systemd, "no key 'stepz'\n in run.toml", "see docs/configuration.md")
    tell_error(systemd, "no such run", None)
    assert heard() == [
        "STATUS=error: no key 'stepz' in run.toml; hint: see docs/configuration.md",
        "STATUS=error: no such run",
    ]


def test_a_start_tells_its_phase_and_asks_for_time_until_it_is_over(manager) -> None:
    systemd, heard = manager
    health = Health()
    health.begin_phase("compiling")
    start = Starting(health, systemd)
    start.begin()
    start.over()
    said = "".join(heard())
    assert "STATUS=compiling; it has not started yet" in said
    assert "EXTEND_TIMEOUT_USEC=60000000" in said
    assert heard() == []


def test_a_phase_may_not_take_for_ever_unless_it_waits_for_others() -> None:
    clock = Clock()
    waiting: list[str] = []
    health = Health(clock=clock, waiting=lambda: tuple(waiting))
    health.begin_phase("compiling")
    clock.now_s += PHASE_S + 1
    assert not health.progresses()
    waiting.append("connecting")
    assert health.progresses()
    waiting.clear()
    health.begin_phase("joining the run")
    assert health.progresses()


def test_phases_of_a_start_are_timed_by_their_first_words() -> None:
    clock = Clock()
    health = Health(clock=clock)
    for what, took_s in [("compiling", 5), ("loading 1 of 2", 1), ("loading 2 of 2", 2)]:
        health.begin_phase(what)
        clock.now_s += took_s
    assert health.phases() == {"compiling": 5.0, "loading": 3.0}


def test_troubles_are_told_and_leave_a_daemon_ready() -> None:
    health = Health(view=working)
    health.troubles["checkpoint"] = "checkpoints fail: disk full"
    answer = health.answer()
    assert answer.ready
    assert answer.sentence() == "trains; checkpoints fail: disk full"
    assert health.line() == "checkpoints fail: disk full"


def test_without_systemd_nothing_is_said() -> None:
    tell(ServiceManager(), READY="1")
    tell(ServiceManager("/nowhere/notify"), READY="1")


def test_the_watchdog_hears_from_a_loop_that_turns_and_not_from_one_that_hangs(
    manager, run_async
) -> None:
    systemd, heard = manager
    clock = Clock()
    waits: list[str] = []
    health = Health(limit_s=lambda: 30.0, view=working, clock=clock, waiting=lambda: tuple(waits))
    health.turned()

    async def look() -> tuple[list[str], list[str]]:
        task = asyncio.ensure_future(report(health, systemd))
        alive: list[str] = []
        while alive.count("WATCHDOG=1") < 2:
            await asyncio.sleep(0.01)
            alive += heard()
        waits.append("publishing")
        while not any("X_DILOCO_WAITS=1" in one for one in alive):
            await asyncio.sleep(0.01)
            alive += heard()
        clock.now_s += 31
        await asyncio.sleep(0.05)
        heard()
        await asyncio.sleep(0.1)
        task.cancel()
        return alive, heard()

    alive, hung = run_async(look())
    assert [one for one in alive if "STATUS" in one] == [
        "STATUS=trains\nX_DILOCO_WAITS=0",
        "STATUS=trains; waits: publishing\nX_DILOCO_WAITS=1",
    ]
    assert "WATCHDOG=1" not in hung


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ServiceManager()),
        ({"NOTIFY_SOCKET": "/run/x"}, ServiceManager("/run/x", 0.0)),
        (
            {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "90000000"},
            ServiceManager("@x", 90.0),
        ),
        # The variables were meant for the process that started this one.
        ({"WATCHDOG_USEC": "90000000", "WATCHDOG_PID": "1"}, ServiceManager()),
    ],
)
def test_who_watches_is_read_from_the_environment(monkeypatch, variables, expected) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert service_manager() == expected


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_pages_over_http() -> None:
    waits = Retries()
    probes = make_probes(waits, run="demo", learner="a")
    port = free_port()
    with serving(MetricsSection(port=port), probes):
        status, body = get(port, "/readyz")
        assert (status, json.loads(body)["ready"]) == (503, False)
        assert get(port, "/livez") == (200, body)
        probes.health.view = working
        with waits.note("reading shards") as fault:
            fault(StoreUnavailableError("away"))
            status, body = get(port, "/readyz?verbose")
            assert status == 200
            assert json.loads(body) == {
                "live": True, "ready": True, "why": [], "waiting": ["reading shards"],
                "state": "trains", "troubles": [],
            }  # fmt: skip
        status, body = get(port, "/metrics")
        assert status == 200
        assert 'diloco_ready{learner="a",run="demo"} 1.0' in body
        assert (
            'diloco_faults_total{cause="store",learner="a",run="demo",what="reading shards"} 1.0'
            in body
        )
        assert (
            'diloco_waiting{cause="store",learner="a",run="demo",what="reading shards"} 0.0' in body
        )
        assert get(port, "/else")[0] == 404
    with pytest.raises(urllib.error.URLError):
        get(port, "/livez")


def test_who_hangs_is_neither_live_nor_ready_over_http() -> None:
    probes, clock, port = make_probes(Retries()), Clock(), free_port()
    probes.health.clock, probes.health.view = clock, working
    with serving(MetricsSection(port=port), probes):
        probes.health.turned()
        clock.now_s += 31.0
        assert [get(port, path)[0] for path in ("/livez", "/readyz")] == [503, 503]
        probes.health.turned()
        assert [get(port, path)[0] for path in ("/livez", "/readyz")] == [200, 200]


def test_a_port_that_is_taken_is_an_error_with_a_hint() -> None:
    probes = make_probes(Retries())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        section = MetricsSection(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen") as caught:
            serving(section, probes).__enter__()
        assert "--metrics-port" in str(caught.value.hint)


def test_waits_name_what_passing_faults_keep_waiting(run_async, monkeypatch) -> None:
    runtime = Runtime()
    seen = []

    async def no_sleep(_seconds: float) -> None:
        seen.append(runtime.retries.now())

    monkeypatch.setattr("diloco.common.process.retry.asyncio.sleep", no_sleep)
    left = [BusUnavailableError("away"), StoreUnavailableError("away"), None]

    async def attempt() -> None:
        if (error := left.pop(0)) is not None:
            raise error

    from diloco.common.process import log

    run_async(runtime.retry("publishing", attempt, logger=log.get()))
    assert seen == [("publishing",), ("publishing",)]
    assert runtime.retries.now() == ()
    assert runtime.retries.faults == {("publishing", "bus"): 1, ("publishing", "store"): 1}
    assert not any(runtime.retries.waiting.values())
