"""The keeper of groups: what it decides, and what it asks of Google, which a server here stands for."""

import json
import random
import tempfile
import threading
import urllib.error
from collections.abc import Iterator
from datetime import UTC, datetime
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.infra import keeper
from diloco.infra.cloud import Google
from diloco.infra.ended import ATTRIBUTE, DROP_IN, ENDED, STATUS
from diloco.infra.keeper import GroupSpec, GroupState, Keeper, Spending, decide

RUNS = ("RUNNING",) * 4
SLICE = GroupSpec("p", "z", "diloco-demo-slice", 4, ours=True)
ONE = SLICE._replace(hosts=1, ours=False)


@pytest.mark.parametrize(
    ("wanted", "seen", "has_ended", "decided"),
    [
        pytest.param(SLICE, GroupState(4, RUNS, 0), False, (None, False), id="all is well"),
        pytest.param(SLICE, GroupState(4, (*RUNS[1:], "TERMINATED"), 0), False, (0, False),
                     id="a host was preempted: all go"),
        pytest.param(SLICE, GroupState(4, (*RUNS[1:], "STOPPING"), 0), False, (0, False), id="is being preempted"),
        pytest.param(SLICE, GroupState(0, RUNS, 0), False, (None, False), id="they are going"),
        pytest.param(SLICE, GroupState(0, (), 0), False, (4, False), id="they are gone: all come"),
        pytest.param(SLICE, GroupState(4, (), 0), False, (None, False), id="no capacity: the group asks"),
        pytest.param(SLICE, GroupState(4, ("PROVISIONING",) * 4, 0), False, (None, False), id="they come"),
        pytest.param(ONE, GroupState(1, ("TERMINATED",), 0), False, (None, False), id="Google mends one host"),
        pytest.param(ONE._replace(ours=True), GroupState(1, ("TERMINATED",), 0), False, (0, False),
                     id="but not one of flex-start"),
        pytest.param(SLICE, GroupState(4, RUNS, 3), False, (None, False), id="three of four say the end"),
        pytest.param(SLICE, GroupState(4, RUNS, 4), False, (0, True), id="all say the end"),
        pytest.param(ONE, GroupState(1, RUNS[:1], 1), False, (0, True), id="one host says the end"),
        pytest.param(SLICE, GroupState(0, RUNS[:2], 2), True, (None, True), id="after the end they go"),
        pytest.param(SLICE, GroupState(0, (), 0), True, (None, True), id="and none comes"),
        pytest.param(SLICE, GroupState(4, (), 0), True, (None, False), id="somebody wants them back"),
        pytest.param(SLICE._replace(hosts=0), GroupState(0, (), 0), False, (None, False), id="is paused"),
        pytest.param(SLICE._replace(hosts=0), GroupState(4, RUNS, 4), True, (None, False), id="a pause begins"),
    ],
)  # fmt: skip
def test_decisions(
    wanted: GroupSpec, seen: GroupState, has_ended: bool, decided: tuple[int | None, bool]
) -> None:
    assert decide(wanted, seen, has_ended, 0.0) == decided


@pytest.mark.parametrize(
    ("wanted", "seen", "lost_s", "decided"),
    [
        pytest.param(ONE, GroupState(1, ("TERMINATED",), 0), 899.0, None, id="Google has a while"),
        pytest.param(ONE, GroupState(1, ("TERMINATED",), 0), 900.0, 0, id="and has not mended it"),
        pytest.param(ONE, GroupState(1, RUNS[:1], 0), 0.0, None, id="it runs again"),
        pytest.param(SLICE, GroupState(4, RUNS[:3], 0), 60.0, None, id="a machine is missing"),
        pytest.param(SLICE, GroupState(4, RUNS[:3], 0), 900.0, 0, id="and nobody makes it"),
        pytest.param(SLICE, GroupState(4, (), 0), 900.0, 0, id="flex-start is over"),
        pytest.param(SLICE, GroupState(4, ("",) * 4, 0), 9e9, None, id="an operation that never ends"),
    ],
)  # fmt: skip
def test_what_is_lost_for_long_is_made_anew(
    wanted: GroupSpec, seen: GroupState, lost_s: float, decided: int | None
) -> None:
    lost_s *= seen.lost
    assert decide(wanted, seen, False, lost_s) == (decided, False)


def test_a_learner_says_the_end_by_its_last_status() -> None:
    """tests/systemd/scenarios/ended.py sees that a learner's last status is this one."""
    scenario = Path(__file__).parents[1] / "systemd/scenarios/ended.py"
    assert f'status_text(A) == "{STATUS}"' in scenario.read_text()
    assert f'in "{STATUS}"*)' in DROP_IN


class Compute:
    """Groups of machines, over HTTP: a group that is resized has its machines at once."""

    def __init__(self) -> None:
        self.groups: dict[str, list[str]] = {}
        self.sizes: dict[str, int] = {}
        self.ended: set[str] = set()
        self.stop_at = ""
        self.budget: dict[str, Any] | None = None
        self.wanted: list[dict[str, Any]] = []
        self.refused = ""
        self.answers: tuple[int, bytes] = 403, b"{}"
        compute = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer = compute.answer(self.path)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                if status == 0:
                    return  # not even a status
                self.send_response(status)
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def answer(self, path: str) -> tuple[int, Any]:
        if path == "/m/attributes/diloco":
            return 200, {"groups": self.wanted, "stop_at": self.stop_at, "budget": self.budget}
        if path.startswith("/m/"):
            return 200, {"access_token": "t"}
        path, _, query = path.partition("?")
        *_, kind, name, verb = [*path.split("/"), ""] if path.count("/") == 7 else path.split("/")
        if name == self.refused:
            return self.answers
        if kind == "instances":
            assert query == f"queryPath={ATTRIBUTE}"
            items = {"queryValue": {"items": [{"key": "run", "value": ENDED}]}}
            return (200, items) if name in self.ended else (404, {})
        if verb == "listManagedInstances":
            url = f"{self.url}c/projects/p/zones/z/instances/{name}-"
            machines = [
                {"instance": f"{url}{index}", "instanceStatus": state}
                for index, state in enumerate(self.groups[name])
            ]
            first = query == "pageToken="
            page = {"managedInstances": machines[:1] if first else machines[1:]}
            return 200, page | ({"nextPageToken": "2"} if first and len(machines) > 1 else {})
        if verb == "resize":
            self.sizes[name] = int(query.removeprefix("size="))
            self.groups[name] = ["RUNNING"] * self.sizes[name]
            return 200, {}
        return 200, {"targetSize": self.sizes[name]}

    def add(self, name: str, hosts: int, *, ours: bool = True, dollars_hour: float = 0.0) -> None:
        told = {"project": "p", "zone": "z", "name": name, "hosts": hosts, "ours": ours}
        self.wanted.append(told | {"dollars_hour": dollars_hour})
        self.sizes[name], self.groups[name] = hosts, ["RUNNING"] * hosts


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compute]:
    compute = Compute()
    monkeypatch.setattr(keeper, "COMPUTE", f"{compute.url}c/")
    thread = threading.Thread(target=compute.server.serve_forever, args=[0.01])
    thread.start()
    yield compute
    compute.server.shutdown()
    thread.join()
    compute.server.server_close()


@pytest.fixture
def kept(compute: Compute, tmp_path: Path) -> Keeper:
    return Keeper(Google(f"{compute.url}m/"), tmp_path / "ended.json")


def test_a_preempted_slice_goes_and_comes_back(compute: Compute, kept: Keeper) -> None:
    compute.add("slice", 4)
    compute.add("other", 1)
    kept.check_groups()
    assert compute.sizes == {"slice": 4, "other": 1}
    compute.groups["slice"][2] = "TERMINATED"
    kept.check_groups()
    assert compute.sizes == {"slice": 0, "other": 1}
    kept.check_groups()
    assert compute.sizes == {"slice": 4, "other": 1}


def test_what_has_ended_stays_away_until_somebody_wants_it_back(
    compute: Compute, kept: Keeper
) -> None:
    compute.add("slice", 2)
    compute.ended = {"slice-0", "slice-1"}
    for _ in range(3):
        kept.check_groups()
        assert compute.sizes == {"slice": 0}
    compute.ended = set()
    compute.answer("/c/projects/p/zones/z/instanceGroupManagers/slice/resize?size=2")
    kept.check_groups()
    assert compute.sizes == {"slice": 2}


def test_after_the_time_to_stop_no_learner_has_machines_until_that_is_later(
    compute: Compute, tmp_path: Path
) -> None:
    now = datetime(2026, 12, 23, tzinfo=UTC).timestamp()
    kept = Keeper(Google(f"{compute.url}m/"), tmp_path / "ended.json", clock=lambda: now)
    compute.stop_at = "2026-12-24T00:00:00Z"
    compute.add("slice", 2)
    compute.add("over", 1)
    compute.ended = {"over-0"}
    kept.check_groups()
    assert compute.sizes == {"slice": 2, "over": 0}
    now += 24 * 3600
    compute.groups["slice"][0] = "STOPPED"
    for _ in range(3):
        kept.check_groups()
        assert compute.sizes == {"slice": 0, "over": 0}
    compute.answer("/c/projects/p/zones/z/instanceGroupManagers/slice/resize?size=2")
    kept.check_groups()
    assert compute.sizes == {"slice": 0, "over": 0}  # An apply after the stop.
    compute.stop_at = "2026-12-31T00:00:00Z"
    for _ in range(2):
        kept.check_groups()
        assert compute.sizes == {"slice": 2, "over": 0}


def test_what_is_spent_are_machines_times_hours_and_the_rest() -> None:
    groups = [SLICE._replace(dollars_hour=10.0), ONE._replace(name="one", dollars_hour=1.0)]
    begun = Spending().until(1000.0, groups, {"diloco-demo-slice": 4, "one": 1}, 3.0)
    assert begun == Spending(0.0, 1000.0, {"diloco-demo-slice": 4, "one": 1})
    # The slice went meanwhile, nobody knows when; the other could not be seen.
    hour = begun.until(4600.0, groups, {"diloco-demo-slice": 0}, 3.0)
    assert hour == Spending(44.0, 4600.0, {"diloco-demo-slice": 0, "one": 1})
    assert hour.until(8200.0, groups, {"diloco-demo-slice": 0, "one": 1}, 3.0).dollars == 48.0
    # A clock that was set back counts no time twice.
    back = hour.until(1000.0, groups, {}, 3.0)
    assert (back.dollars, back.at_s) == (44.0, 4600.0)


def test_machines_that_google_asks_nothing_for_are_not_paid() -> None:
    states = ("RUNNING", "STOPPING", "REPAIRING", "", "PROVISIONING", "STAGING", "TERMINATED")
    assert GroupState(7, states, 0).paid == 3


def test_once_the_budget_is_spent_no_learner_has_machines_until_there_is_more(
    compute: Compute, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    compute.budget = {"dollars": 200.0, "dollars_hour": 8.0, "uncounted": ["east: spot"]}
    compute.add("slice", 4, dollars_hour=10.0)
    compute.add("east", 1)

    def look() -> str:
        """As after a restart: what was spent is in the file."""
        Keeper(Google(f"{compute.url}m/"), tmp_path / "groups.json", lambda: now).check_groups()
        return capsys.readouterr().out

    assert look() == ""
    for _ in range(4):
        now += 3600
        assert "of the budget of $200.00 are spent; not counted: east: spot" in look()
        assert compute.sizes == {"slice": 4, "east": 1}
    now += 600  # 4 hours and 10 minutes at 48 dollars an hour
    said = look()
    assert "<3>diloco boot: $200.00 of the budget of $200.00 are spent" in said
    assert "slice: to 0 machines, as $200.00 of the budget" in said
    assert compute.sizes == {"slice": 0, "east": 0}
    compute.answer("/c/projects/p/zones/z/instanceGroupManagers/slice/resize?size=4")
    look()
    assert compute.sizes == {"slice": 0, "east": 0}  # An apply after the stop.
    now += 3600
    # Of what goes on to cost beside learners it tells again, each tenth of the budget.
    assert "<3>diloco boot: $248.00 of the budget" in look()
    compute.budget = compute.budget | {"dollars": 300.0}
    look()
    assert compute.sizes == {"slice": 4, "east": 1}
    spent = json.loads((tmp_path / "groups.json").read_text())["spent"]["dollars"]
    # After the stop machines were seen once more, and the rest goes on.
    assert spent == pytest.approx(200.0 + 4 * 10.0 + 1 * 8.0)


def test_what_cannot_be_seen_is_counted_as_before(compute: Compute, tmp_path: Path) -> None:
    now = 0.0
    compute.budget = {"dollars": 100.0, "dollars_hour": 0.0, "uncounted": []}
    compute.add("slice", 2, dollars_hour=25.0)
    compute.add("other", 1)
    kept = Keeper(Google(f"{compute.url}m/"), tmp_path / "groups.json", lambda: now)
    kept.check_groups()
    compute.refused = "slice"
    now = 7200.0
    kept.check_groups()
    assert compute.sizes == {"slice": 2, "other": 0}
    compute.refused = ""
    kept.check_groups()
    assert compute.sizes == {"slice": 0, "other": 0}


def test_a_refusal_keeps_it_from_no_other_group(
    compute: Compute, kept: Keeper, capsys: pytest.CaptureFixture[str]
) -> None:
    compute.add("first", 2)
    compute.add("second", 2)
    compute.refused = "first"
    compute.groups["second"][0] = "STOPPED"
    kept.check_groups()
    assert compute.sizes["second"] == 0
    assert "first: <HTTPError 403" in capsys.readouterr().out


# What Google says of a group when something is wrong with it.
ANSWERS: dict[str, tuple[int, bytes]] = {
    "the account has no right": (403, b"{}"),
    "an organisation's policy forbids it": (412, b"{}"),
    "its token has expired": (401, b"{}"),
    "the group is gone": (404, b"{}"),
    "another resize is under way": (409, b"{}"),
    "the project is billed no more": (402, b"{}"),
    "a field that it does not take": (400, b"{}"),
    "too many requests": (429, b"{}"),
    "the quota of requests": (403, b'{"error": {"errors": [{"reason": "quotaExceeded"}]}}'),
    "no capacity in the zone": (503, b'{"error": {"status": "ZONE_RESOURCE_POOL_EXHAUSTED"}}'),
    "a fault of Google's": (500, b"{}"),
    "a gateway's fault": (502, b"<html>"),
    "a gateway that waits": (504, b""),
    "a page in place of an answer": (200, b"<html>"),
    "half an answer": (200, b'{"targetSize": 2, "manag'),
    "an answer that is a list": (200, b"[]"),
    "a size in words": (200, b'{"targetSize": "many"}'),
    "machines without a name": (200, b'{"targetSize": 2, "managedInstances": [{"id": 1}]}'),
    "machines that are text": (200, b'{"targetSize": 2, "managedInstances": ["one"]}'),
    "no answer at all": (0, b""),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_of_googles_keeps_the_keeper_from_no_other_group(
    compute: Compute, kept: Keeper, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    compute.add("first", 2)
    compute.add("second", 2)
    compute.refused, compute.answers = "first", ANSWERS[name]
    compute.groups["second"][0] = "STOPPED"
    kept.check_groups()
    kept.check_groups()
    assert compute.sizes["second"] == 2
    assert "first: " in capsys.readouterr().out
    compute.refused = ""
    compute.groups["first"][1] = "TERMINATED"
    kept.check_groups()
    assert compute.sizes["first"] == 0


def test_one_host_that_google_does_not_mend_is_made_anew(compute: Compute, tmp_path: Path) -> None:
    """The host was down for 565 of 600 minutes; the keeper's own restart forgets nothing."""
    now = 1000.0
    compute.add("east", 1, ours=False)
    compute.groups["east"] = ["TERMINATED"]
    sizes = []
    for _ in range(18):
        noted = tmp_path / "groups.json"
        Keeper(Google(f"{compute.url}m/"), noted, lambda now=now: now).check_groups()
        sizes.append(compute.sizes["east"])
        now += 60.0
    assert sizes == [1] * 15 + [0, 1, 1]


class Project(Google):
    """A project in which groups need minutes for everything, and much goes wrong until `calm`.

    Machines are preempted or vanish; of a group of one host Google mends some. A resize is refused,
    or has part of its machines for want of capacity, or is an operation that never ends.
    """

    def __init__(self, chance: random.Random, groups: dict[str, int]) -> None:
        self.chance, self.calm, self.hosts = chance, False, groups
        self.sizes = dict(groups)
        self.states = {name: ["RUNNING"] * hosts for name, hosts in groups.items()}
        # How many machines the group gets, and from when on Google does anything for it.
        self.capacity = dict(groups)
        self.asleep_until = dict.fromkeys(groups, 0)
        self.now = 0

    def parameters(self) -> dict[str, Any]:
        told = {"project": "p", "zone": "z"}
        return {
            "groups": [
                told | {"name": name, "hosts": hosts, "ours": hosts > 1}
                for name, hosts in self.hosts.items()
            ]
        }

    def call(self, url: str, body: Any = None) -> dict[str, Any]:
        name, _, verb = url.partition("instanceGroupManagers/")[2].partition("/")
        if "getGuestAttributes" in url or (not self.calm and self.chance.random() < 0.1):
            code = 404 if "getGuestAttributes" in url else self.chance.choice((403, 429, 500, 503))
            raise urllib.error.HTTPError(url, code, "no", Message(), None)
        if verb.startswith("resize?size="):
            size = int(verb.removeprefix("resize?size="))
            # A group in bulk mode grows from nothing only.
            assert size in (0, self.hosts[name])
            assert size == 0 or (self.sizes[name], self.states[name]) == (0, [])
            self.sizes[name] = size
            if not self.calm and self.chance.random() < 0.2:
                self.asleep_until[name] = self.now + 10**6
            return {}
        if verb.startswith("listManagedInstances"):
            machines = [{"instance": name, "instanceStatus": one} for one in self.states[name]]
            return {"managedInstances": machines}
        return {"targetSize": self.sizes[name]}

    def minute(self) -> None:
        """Lets a minute pass, in which each group moves on and may meet something."""
        self.now += 1
        for name, states in self.states.items():
            if self.now < self.asleep_until[name]:
                continue
            if self.sizes[name] == 0:
                del states[: self.chance.randint(1, 4)]
            elif not states or "" in states:
                there = [state or "RUNNING" for state in states]
                states[:] = there or [""] * min(self.sizes[name], self.capacity[name])
            if self.calm:
                continue
            if states and self.chance.random() < 0.1:
                lost = self.chance.randrange(len(states))
                if self.chance.random() < 0.5:
                    states[lost] = self.chance.choice(("STOPPING", "TERMINATED", "STOPPED"))
                else:
                    del states[lost]
            if self.chance.random() < 0.1:
                self.capacity[name] = self.chance.randint(0, self.hosts[name])

    def mend(self) -> None:
        """Ends all that is wrong with Google; lost machines stay lost."""
        self.calm, self.capacity = True, dict(self.hosts)
        self.asleep_until = dict.fromkeys(self.hosts, 0)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), minutes=st.integers(1, 90))
def test_whatever_google_does_all_groups_are_whole_half_an_hour_after_it_stops(
    seed: int, minutes: int
) -> None:
    google = Project(random.Random(seed), {"slice": 4, "pair": 2, "one": 1})
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "groups.json"
        for minute in range(minutes + 30):
            if minute == minutes:
                google.mend()
            # A new process each time: it remembers by its file alone.
            Keeper(google, noted, lambda: 60.0 * google.now).check_groups()
            google.minute()
    assert google.states == {name: ["RUNNING"] * hosts for name, hosts in google.hosts.items()}
