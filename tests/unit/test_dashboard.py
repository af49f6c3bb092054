"""The live page without a browser: what it is sent, who may ask, and what it costs."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from html import escape
from typing import Any

import numpy as np
import pytest
from runlab import RUN, Lab

from bench.tapes import Forger
from diloco.common.process.retry import Clock
from diloco.common.process.tasks import cancel
from diloco.common.protocol import names, wire
from diloco.common.protocol.errors import BusUnavailableError, ConfigError
from diloco.judge import doctor_findings
from diloco.run import health_findings
from diloco.run.model.evaluate import keep
from diloco.run.state import Finding, RunStatus
from diloco.run.timeseries import TimeSeries, condense, read_time_series
from diloco.show.page import following, html_sections, server
from diloco.show.page.following import LiveRun, served
from diloco.show.page.lanes import make_lanes
from diloco.show.page.numbers import Shown, goodput, spent
from diloco.show.page.runbook import render, runbook_names
from diloco.show.page.server import FILES, MOST_CONNECTIONS, MOST_PAGES, Board, serving
from diloco.show.page.summary import TEXT, facts
from diloco.show.page.svg import Markup, short

HOSTILE = "</td><script>alert(1)</script>"
PATIENCE_S = 300.0


async def made(versions: int, learners: int = 3, fragments: int = 2, failed: str = "") -> Lab:
    lab = Lab(fragments=fragments)
    await lab.create()
    forger = Forger(lab.context, [f"learner-{index:04d}" for index in range(learners)], 97, 40)
    await forger.forge(versions)
    for learner, life in forger.lives.items():
        await beat(lab, learner, life, state="failed" if learner == failed else "training")
    return lab


async def beat(lab: Lab, learner: str, life: int, **more: Any) -> None:
    fields = {
        "local_step": 100, "global_step": 96, "tokens": 1000, "loss": 2.5, "tokens_per_s": 10.0,
        "step_time_s": 0.01, "stall_s": 0.1, "run_s": 10.0, "bytes_up": 1, "bytes_down": 2,
        "updates_sent": 3, "state": "training",
    }  # fmt: skip
    message = wire.Heartbeat(learner=learner, incarnation=life, **(fields | more))
    await lab.bus.publish(names.heartbeat("lab", learner), wire.encode(message))


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if there():
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def followed_run(lab: Lab) -> AsyncIterator[LiveRun]:
    run = LiveRun(lab.context, 0.0)
    work = asyncio.ensure_future(run.follow())
    try:
        await until(lambda: run.progress is None)
        yield run
    finally:
        work.cancel()
        await asyncio.wait([work])


def test_its_figures_are_those_of_the_report() -> None:
    async def look() -> tuple[Shown, Shown]:
        lab = await made(200)
        await keep(lab.context, score())
        series = await read_time_series(lab.context, 0.0)
        of_report = Shown(series, make_lanes(series), [score()])
        async with followed_run(lab) as run:
            await until(lambda: bool(run.shown().scores))
            return run.shown(), of_report

    followed, of_report = asyncio.run(look())
    assert facts(followed) == facts(of_report)
    assert html_sections.figures(followed) == html_sections.figures(of_report)


def versions_of(status: RunStatus) -> int:
    return sum(one.version for one in status.fragments)


def score() -> wire.Score:
    return wire.Score(
        run="lab", epoch=0, versions=(1, 1), record_seqs=(1, 2), global_step=24, tokens=1000,
        at_s=1e9, loss=5.0, text="def f():\n\x1b[31m\treturn",
    )  # fmt: skip


def test_a_text_sample_keeps_its_lines_and_no_control_characters() -> None:
    assert score().text == "def f():\n?[31m?return"


def test_figures_move_with_the_run_and_nothing_is_read_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look() -> None:
        lab = await made(40)
        taken: list[int] = []
        take = LiveRun._take
        monkeypatch.setattr(
            LiveRun, "_take", lambda run, item: (taken.append(item.seq), take(run, item))
        )
        async with followed_run(lab) as run:
            status = await run.status()
            assert status is not None
            before, versions = html_sections.now(status, run.series), versions_of(status)
            async with lab.aggregating():
                await lab.join("real")
                await lab.send_many("real", 3)
                await until(lambda: run.series.learners[-1] == "real")
            status = await run.status()
            assert status is not None
            after = html_sections.now(status, run.series)
        assert versions_of(status) > versions
        assert all(after[key] != before[key] for key in ("progress", "rounds"))
        assert taken == sorted(set(taken)), "each message once, in order"

    asyncio.run(look())


def test_a_bus_that_is_away_makes_the_page_old_and_not_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look() -> None:
        lab = await made(20)
        async with followed_run(lab) as run:
            assert (await run.status()).current  # type: ignore[union-attr]

            async def away(*_: object) -> None:
                raise BusUnavailableError("the connection is lost")

            monkeypatch.setattr(lab.bus, "filled", away)
            long_after_s = run.context.runtime.clock() + 1e6
            monkeypatch.setattr(Clock, "__call__", lambda _: long_after_s)
            status = await run.status()
            assert status is not None
            assert status.current is False
            parts = html_sections.now(status, run.series)
            assert "/runbooks/nats-away.md" in parts["alerts"]
            # Who cannot look does not know that anybody is silent.
            assert "learners: 3 training" in parts["progress"]
            assert "no-learners.md" not in parts["alerts"]
            assert versions_of(status) == 20

    asyncio.run(look())


def test_a_run_that_is_removed_or_a_bug_is_told_and_the_page_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look() -> None:
        lab = await made(20)
        board = Board("")
        board.enter(1)
        shown = following.LivePage(board, LiveRun(lab.context, 0.0), "diloco dashboard lab")
        keeping = asyncio.ensure_future(shown.keep())

        def told() -> str:
            states = [one for one in board.after(0, 0.0) or [] if one.event == "state"]
            return str(json.loads(states[-1].data)["sentence"]) if states else ""

        try:
            await until(lambda: "drawn" in {one.event for one in board.after(0, 0.0) or []})
            with monkeypatch.context() as patch:
                patch.setattr(html_sections, "now", None)
                await until(lambda: "a bug" in told())
            await until(lambda: not told())
            await lab.bus.remove_stream(lab.context.tape)
            await until(lambda: "its tape is gone" in told())
        finally:
            await cancel(keeping)

    monkeypatch.setattr(following, "EVERY_S", 0.01)
    asyncio.run(look())


def test_long_series_are_condensed_and_their_sums_hold() -> None:
    async def read() -> tuple[Shown, Shown]:
        lab = await made(400)
        whole = await read_time_series(lab.context, 0.0)
        short = await read_time_series(lab.context, 0.0)
        return Shown(whole, make_lanes(whole)), Shown(short, [])

    whole, short = asyncio.run(read())
    while condense(short.series, 300):
        pass
    assert len(short.series.updates) <= 300 < len(whole.series.updates)
    assert len(short.series.inputs) <= 300 < len(whole.series.inputs)
    for table, columns in (
        ("updates", ("tokens", "steps", "bytes", "updates")),
        ("inputs", ("tokens", "steps", "updates")),
    ):
        for column in columns:
            sums = [getattr(one.series, table)[column].sum() for one in (whole, short)]
            assert sums[0] == sums[1], (table, column)
    worst_s = [one.series.inputs["worst_wait_s"].max() for one in (whole, short)]
    assert worst_s[0] == worst_s[1] > 0
    short.lanes = make_lanes(short.series)
    assert [lane.lives for lane in short.lanes] == [lane.lives for lane in whole.lanes]
    assert goodput(spent(short)) == pytest.approx(goodput(spent(whole)), abs=0.1)
    times_s = short.series.inputs["time_s"]
    assert (np.diff(times_s) >= 0).all()


def test_parts_do_not_grow_with_the_fleet() -> None:
    async def sizes(learners: int) -> tuple[int, ...]:
        lab = await made(4, learners=learners)
        async with followed_run(lab) as run:
            status, shown = await run.status(), run.shown()
            assert status is not None
            known = html_sections.Learners(shown, status)
            first = known(0, "")
            assert first.count("</td>") == html_sections.LEARNERS * first.count("</th>")
            assert f"1 to 40 of {learners}" in first
            assert f"to {learners} of {learners}" in known(10**8, "")
            assert "1 to 1 of 1<" in known(0, "LEARNER-0041")
            assert "No learner of that name." in known(0, "nobody")
            moving, drawn = html_sections.now(status, run.series), html_sections.figures(shown)
            sums = [sum(map(len, parts.values())) for parts in (moving, drawn)]
            return (*sums, len(first))

    for size, most in zip(asyncio.run(sizes(400)), (32 << 10, 256 << 10, 96 << 10), strict=True):
        assert size < most


def test_learners_that_do_not_train_are_on_the_first_page_of_the_table() -> None:
    async def first_learners() -> list[str]:
        lab = await made(4, learners=html_sections.LEARNERS + 20, failed="learner-0059")
        async with followed_run(lab) as run:
            status = await run.status()
            assert status is not None
            first = html_sections.Learners(run.shown(), status)(0, "")
            return re.findall(r'<tr><td class="text">(learner-\d+)<', first)

    shown = asyncio.run(first_learners())
    assert len(shown) == html_sections.LEARNERS
    assert shown[:3] == ["learner-0059", "learner-0000", "learner-0001"]


def test_what_is_no_number_is_null() -> None:
    assert [short(value) for value in (1.0, np.nan, np.inf, 1 / 3)] == [1.0, None, None, 0.33333]


# The server


@pytest.fixture
def board() -> Board:
    return Board(html_sections.skeleton("lab"))


@pytest.fixture
def url(board: Board) -> Iterator[str]:
    with serving(board, 0) as address:
        yield address


def ask(url: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    host = url.removeprefix("http://").strip("/")
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    connection.request("GET", path, headers={"Host": host, **headers})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {key.lower(): value for key, value in answer.getheaders()}, body


def test_every_file_is_served_with_headers_that_let_nothing_else_in(url: str) -> None:
    for path in ("/", *(f"/{name}" for name in FILES), "/learners"):
        status, headers, body = ask(url, path)
        assert (status, bool(body)) == (200, path != "/learners"), path
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
    _, _, page_ = ask(url, "/")
    assert b"http://" not in page_
    assert b"https://" not in page_


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {"Host": "evil.example"}, 403),
        ("/learners", {"Host": "127.0.0.1.evil.example:8780"}, 403),
        ("/", {"Host": "[::1"}, 403),
        ("/", {"Host": ""}, 403),
        ("/events", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}, 403),
        ("/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ("/", {"Host": "localhost:1"}, 200),
        ("/", {"Host": "[::1]:8780"}, 200),
        ("/../following.py", {}, 404),
        ("/page.py", {}, 404),
        ("/runbooks/../page.css", {}, 404),
        ("/runbooks/nothing.md", {}, 404),
        ("/learners?page=%00&find=" + "x" * 5000, {}, 200),
        ("/learners?page=" + "9" * 60, {}, 200),
    ],
)
def test_who_may_ask_for_what(url: str, path: str, headers: dict[str, str], status: int) -> None:
    assert ask(url, path, **headers)[0] == status


def test_it_only_answers_get(url: str) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        request = urllib.request.Request(url, method=method, data=b"x")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=PATIENCE_S)
        assert refused.value.code == 501
        refused.value.close()


def opened(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").strip("/").split(":")
    stream = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    stream.sendall(f"GET /events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    return stream


def test_events_come_as_they_are_shown_and_the_newest_at_once(board: Board, url: str) -> None:
    board.show({"progress": Markup("step 1")})
    board.show({"progress": Markup("step 2")})
    with opened(url) as stream, stream.makefile("rb") as lines:
        assert next(line for line in lines if line.startswith(b"data")) == b'data: "step 2"\n'
        board.show({"progress": Markup("step 2")})  # Of what is the same nothing is sent.
        board.say({"word": "ended"})
        assert next(line for line in lines if line.startswith(b"event")) == b"event: state\n"


def test_no_more_pages_than_the_server_can_bear(board: Board, url: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_PAGES):
            stream = stack.enter_context(opened(url))
            stream.recv(1)
        assert ask(url, "/events")[0] == 503
        assert ask(url, "/")[0] == 200


def test_clients_that_never_say_what_they_want_hold_up_nobody(
    board: Board, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._PageHandler, "timeout", None)
    held = [opened(url)]
    assert held[0].recv(1)
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1].strip("/")))
    for _ in range(2 * MOST_CONNECTIONS):
        slow = socket.create_connection(address)
        slow.sendall(b"GET / HTTP/1.1\r\nHost: local")
        held.append(slow)
    assert ask(url, "/")[0] == 200
    board.say({"word": "training"})
    with held[0].makefile("rb") as lines:
        assert any(b"training" in line for line in lines), "a page that is open stays"
    for one in held:
        one.close()


def test_a_port_in_use_is_a_sentence(board: Board, url: str) -> None:
    port = int(url.strip("/").rpartition(":")[2])
    with (
        pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"),
        serving(Board(""), port),
    ):
        pass


def test_a_fault_in_a_drawing_is_printed(
    board: Board, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(_page: int, _find: str) -> Markup:
        raise ValueError("no such learner to draw")

    board.show_learners(draw)
    with pytest.raises(http.client.RemoteDisconnected):
        ask(url, "/learners")
    until_answered()
    assert "ValueError: no such learner to draw" in capsys.readouterr().err


def test_a_client_that_is_gone_is_not_printed(
    board: Board, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, gone = threading.Event(), threading.Event()

    def draw(_page: int, _find: str) -> Markup:
        asked.set()
        assert gone.wait(PATIENCE_S)
        return Markup("x" * (1 << 24))

    board.show_learners(draw)
    host, port = url.removeprefix("http://").strip("/").split(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as client:
        client.sendall(f"GET /learners HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert asked.wait(PATIENCE_S)
        # The server then gets a reset, not an orderly end.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.set()
    until_answered()
    assert capsys.readouterr().err == ""


def until_answered() -> None:
    """Waits until the server has answered all requests."""
    deadline_s = time.monotonic() + PATIENCE_S
    while any("process_request_thread" in one.name for one in threading.enumerate()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_whole_page_of_a_run_from_its_server() -> None:
    async def look() -> tuple[dict[str, Any], str, str]:
        lab = await made(40)
        run = LiveRun(lab.context, 0.0)
        async with served(run, port=0, again="diloco dashboard lab") as url:
            state, parts = await asyncio.to_thread(read_events, url)
            learners = (await asyncio.to_thread(ask, url, "/learners"))[2].decode()
            return state, parts, learners

    state, parts, learners = asyncio.run(look())
    assert (state["word"], state["again"]) == ("under way", "diloco dashboard lab")
    assert {"training loss", "goodput"} <= set(re.findall("<dt>(.*?)</dt>", parts))
    named = re.findall('<td class="text">(learner-.*?)</td>', learners)
    assert named == [f"learner-{i:04d}" for i in range(3)]
    assert '<td class="text">sync.fragments</td><td class="text">2</td>' in parts


def read_events(url: str) -> tuple[dict[str, Any], str]:
    state: dict[str, Any] = {}
    parts: list[str] = []
    event = ""
    with opened(url) as stream, stream.makefile("rb") as lines:
        for line in lines:
            key, _, value = line.decode().strip().partition(": ")
            if key == "event":
                event = value
            elif key == "data":
                if event == "state":
                    state = json.loads(value)
                elif event == "part":
                    parts.append(json.loads(value))
                elif event == "drawn":
                    return state, "".join(parts)
    raise AssertionError(state)


# Runbooks


def test_every_runbook_is_a_page_whose_links_lead_somewhere() -> None:
    pages = runbook_names()
    for name in pages:
        text = render(name)
        assert text.count("<h1>") == 1, name
        targets = re.findall(r'href="(.*?)"', text)
        local = {"/", "/page.css", "data:,", *(f"/runbooks/{one}" for one in pages)}
        assert set(targets) <= local, name


def test_alerts_name_runbooks_that_there_are() -> None:
    named = {
        value
        for value in (vars(doctor_findings) | vars(health_findings)).values()
        if str(value).startswith("runbooks/")
    }
    assert {name.removeprefix("runbooks/") for name in named} <= runbook_names()


def test_an_alert_leads_to_its_time_in_the_curves() -> None:
    lab = Lab()
    series = TimeSeries(RUN, lab.context.settings, lab.context.layout, 100.0)
    one = Finding(severity="error", about="learner a", sentence="it is odd", since=7, since_s=103.5)
    found = html_sections._alerts([one], series, served=True)
    assert '<a href="#beside" data-at="103.5">its curve</a>' in found
    assert "diloco show RUN FRAGMENT@7" in found


def test_long_strings_of_a_run_are_cut() -> None:
    one = Finding(severity="error", about=HOSTILE, sentence="x" * 10**6)
    lab = Lab()
    series = TimeSeries(RUN, lab.context.settings, lab.context.layout, 0.0)
    found = html_sections._alerts([one], series, served=True)
    assert "<script" not in found
    assert escape(HOSTILE) in found
    assert len(found) < 2 * TEXT
