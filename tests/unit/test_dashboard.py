"""The live page without a browser: what it is sent, who may ask, and what it costs."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from runlab import Lab

from bench.forger import Forger
from diloco.check import symptoms
from diloco.check.symptoms import Finding
from diloco.common import names, wire
from diloco.common.clock import Clock
from diloco.common.errors import BusUnavailableError, ConfigError
from diloco.common.service import cancel
from diloco.dashboard import frames, page
from diloco.dashboard.board import Board
from diloco.dashboard.following import LiveRun
from diloco.dashboard.page import served
from diloco.dashboard.runbook import render, runbook_names
from diloco.dashboard.server import FILES, MOST_PAGES, serving
from diloco.model.scores import keep
from diloco.projections.condense import condense
from diloco.projections.timeseries import read_time_series
from diloco.report.lanes import make_lanes
from diloco.report.numbers import Shown, goodput, spent
from diloco.report.summary import facts

HOSTILE = "</td><script>alert(1)</script>"
PATIENCE_S = 30.0


async def made(versions: int, learners: int = 3, fragments: int = 2) -> Lab:
    lab = Lab(fragments=fragments)
    await lab.create()
    forger = Forger(lab.context, [f"learner-{index:04d}" for index in range(learners)], 97, 40)
    await forger.forge(versions)
    for life in forger.lives.items():
        await beat(lab, *life)
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
async def following(lab: Lab) -> AsyncIterator[LiveRun]:
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
        async with following(lab) as run:
            await until(lambda: bool(run.shown().scores))
            return run.shown(), of_report

    live, of_report = asyncio.run(look())
    assert facts(live) == facts(of_report)
    assert frames.figures(live, 0.0)["loss"] == frames.figures(of_report, 0.0)["loss"]


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
        take = page.LiveRun._take
        monkeypatch.setattr(
            page.LiveRun, "_take", lambda run, item: (taken.append(item.seq), take(run, item))
        )
        async with following(lab) as run:
            status = await run.status()
            assert status is not None
            before = frames.now(status, run.series)
            async with lab.aggregating():
                await lab.join("real")
                await lab.send_many("real", 3)
                await until(lambda: run.series.learners[-1] == "real")
            status = await run.status()
            assert status is not None
            after = frames.now(status, run.series)
        assert sum(one["version"] for one in after["fragments"]) > sum(
            one["version"] for one in before["fragments"]
        )
        assert len(after["rounds"]) >= len(before["rounds"]) > 0
        assert taken == sorted(set(taken)), "each message once, in order"

    asyncio.run(look())


def test_a_bus_that_is_away_makes_the_page_old_and_not_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look() -> None:
        lab = await made(20)
        async with following(lab) as run:
            assert (await run.status()).current  # type: ignore[union-attr]

            async def away(*_: object) -> None:
                raise BusUnavailableError("the connection is lost")

            monkeypatch.setattr(lab.bus, "filled", away)
            long_after_s = run.clock() + 1e6
            monkeypatch.setattr(Clock, "__call__", lambda _: long_after_s)
            status = await run.status()
            assert status is not None
            document = frames.now(status, run.series)
            assert document["current"] is False
            assert document["alerts"][0]["runbook"] == "nats-away.md"
            # Who cannot look does not know that anybody is silent.
            assert document["states"] == {"training": 3}
            assert "no-learners.md" not in [one["runbook"] for one in document["alerts"]]
            assert sum(one["version"] for one in document["fragments"]) == 20

    asyncio.run(look())


def test_a_run_that_is_removed_or_a_bug_is_told_and_the_page_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look() -> None:
        lab = await made(20)
        board = Board()
        board.enter(1)
        shown = page.Page(board, LiveRun(lab.context, 0.0), "diloco dashboard lab")
        keeping = asyncio.ensure_future(shown.keep())

        def told() -> str:
            frame = (board.after(0, 0.0) or {}).get("now")
            return (json.loads(frame.data)["failure"] or "") if frame else ""

        try:
            await until(lambda: "figures" in (board.after(0, 0.0) or {}))
            with monkeypatch.context() as patch:
                patch.setattr(frames, "now", None)
                await until(lambda: "a bug" in told())
            await until(lambda: not told())
            await lab.bus.remove_stream(lab.context.tape)
            await until(lambda: "its tape is gone" in told())
        finally:
            await cancel(keeping)

    monkeypatch.setattr(page, "EVERY_S", 0.01)
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
        ("updates", ("tokens", "steps", "bytes")),
        ("inputs", ("tokens", "steps")),
    ):
        for column in columns:
            sums = [getattr(one.series, table)[column].sum() for one in (whole, short)]
            assert sums[0] == sums[1], (table, column)
    short.lanes = make_lanes(short.series)
    assert [lane.lives for lane in short.lanes] == [lane.lives for lane in whole.lanes]
    assert goodput(spent(short)) == pytest.approx(goodput(spent(whole)), abs=0.1)
    times_s = short.series.inputs["time_s"]
    assert (np.diff(times_s) >= 0).all()


def test_frames_do_not_grow_with_the_fleet() -> None:
    async def sizes(learners: int) -> list[int]:
        lab = await made(4, learners=learners)
        async with following(lab) as run:
            status, shown = await run.status(), run.shown()
            assert status is not None
            lanes = {lane.learner: lane for lane in shown.lanes}
            known = frames.Learners(status.learners, lanes, shown.begin_s, shown.span_s)
            first = frames.learners(known, page=0, find="")
            assert (first["of"], len(first["rows"])) == (learners, frames.PAGE)
            assert frames.learners(known, page=10**8, find="")["rows"]
            assert frames.learners(known, page=0, find="LEARNER-0041")["found"] == 1
            documents = (frames.now(status, run.series), frames.figures(shown, 0.0), first)
            return [len(frames.as_bytes(one)) for one in documents]

    for size, most in zip(asyncio.run(sizes(400)), (32 << 10, 32 << 10, 96 << 10), strict=True):
        assert size < most


def test_what_is_no_number_is_null() -> None:
    assert frames._list(np.asarray([1.0, np.nan, np.inf, 1 / 3])) == [1.0, None, None, 0.33333]


# The server


@pytest.fixture
def board() -> Board:
    return Board()


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
    for path in ("/", *(f"/{name}" for name in FILES), "/learners", "/settings"):
        status, headers, body = ask(url, path)
        assert (status, bool(body)) == (200, True), path
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
        ("/page.html", {}, 404),
        ("/runbooks/../page.html", {}, 404),
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
    board.show("now", b'{"step":1}')
    board.show("now", b'{"step":2}')
    with opened(url) as stream, stream.makefile("rb") as lines:
        assert next(line for line in lines if line.startswith(b"data")) == b'data: {"step":2}\n'
        board.show("figures", b"{}")
        assert next(line for line in lines if line.startswith(b"event")) == b"event: figures\n"


def test_no_more_pages_than_the_server_can_bear(board: Board, url: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MOST_PAGES):
            stream = stack.enter_context(opened(url))
            stream.recv(1)
        assert ask(url, "/events")[0] == 503
        assert ask(url, "/")[0] == 200


def test_a_port_in_use_is_a_sentence(board: Board, url: str) -> None:
    port = int(url.strip("/").rpartition(":")[2])
    with (
        pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}"),
        serving(Board(), port),
    ):
        pass


def test_the_whole_page_of_a_run_from_its_server() -> None:
    async def look() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
        lab = await made(40)
        async with served(lab.context, 0.0, port=0, again="diloco dashboard lab") as url:
            events = await asyncio.to_thread(read_events, url)
            learners = json.loads((await asyncio.to_thread(ask, url, "/learners"))[2])
            settings = json.loads((await asyncio.to_thread(ask, url, "/settings"))[2])
            return events["now"], events["figures"], learners, settings

    now, figures, learners, settings = asyncio.run(look())
    assert (now["run"], now["state"], now["current"]) == ("lab", "under way", True)
    assert now["again"] == "diloco dashboard lab"
    assert {fact["name"] for fact in figures["facts"]} >= {"training loss", "goodput"}
    assert [one["name"] for one in learners["rows"]] == [f"learner-{i:04d}" for i in range(3)]
    assert all(one["lane"]["spans"] for one in learners["rows"])
    assert ["sync.fragments", "2"] in settings["rows"]


def read_events(url: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    event = ""
    with opened(url) as stream, stream.makefile("rb") as lines:
        for line in lines:
            key, _, value = line.decode().strip().partition(": ")
            if key == "event":
                event = value
            elif key == "data":
                found[event] = json.loads(value)
            if found.get("now", {}).get("state") and "figures" in found:
                return found
    raise AssertionError(found)


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
    named = {value for value in vars(symptoms).values() if str(value).startswith("runbooks/")}
    assert {name.removeprefix("runbooks/") for name in named} <= runbook_names()


def test_long_strings_of_a_run_are_cut() -> None:
    found = frames._alert(Finding(severity="error", about=HOSTILE, sentence="x" * 10**6))
    assert found["about"] == HOSTILE, "it is text here, and becomes text on the page"
    assert len(json.dumps(found)) < 2 * frames.TEXT
