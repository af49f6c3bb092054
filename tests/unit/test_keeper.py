"""The keeper of groups: what it decides, and what it asks of Google, which a server here stands for."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from diloco.infra import keeper
from diloco.infra.cloud import Google
from diloco.infra.ended import ATTRIBUTE, DROP_IN, ENDED, STATUS
from diloco.infra.keeper import GroupSpec, GroupState, Keeper, decide

RUNS = ("RUNNING",) * 4
SLICE = GroupSpec("p", "z", "diloco-demo-slice", 4, spot=True)
ONE = SLICE._replace(hosts=1)


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
        pytest.param(SLICE._replace(spot=False), GroupState(4, ("TERMINATED",) * 4, 0), False, (None, False),
                     id="and what is not spot"),
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
    assert decide(wanted, seen, has_ended) == decided


def test_a_learner_says_the_end_by_its_last_status() -> None:
    """tests/systemd/scenarios/ended.py sees that a learner's last status is this one."""
    scenario = Path(__file__).parents[1] / "systemd/scenarios/ended.py"
    assert f'status_text(A) == "{STATUS}"' in scenario.read_text()
    assert f'!= "{STATUS}"' in DROP_IN


class Compute:
    """Groups of machines, over HTTP: a group that is resized has its machines at once."""

    def __init__(self) -> None:
        self.groups: dict[str, list[str]] = {}
        self.sizes: dict[str, int] = {}
        self.ended: set[str] = set()
        self.wanted: list[dict[str, Any]] = []
        self.refused = ""
        compute = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer = compute.answer(self.path)
                data = json.dumps(answer).encode()
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
            return 200, {"groups": self.wanted}
        if path.startswith("/m/"):
            return 200, {"access_token": "t"}
        path, _, query = path.partition("?")
        *_, kind, name, verb = [*path.split("/"), ""] if path.count("/") == 7 else path.split("/")
        if name == self.refused:
            return 403, {}
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

    def add(self, name: str, hosts: int, *, spot: bool = True) -> None:
        self.wanted.append(
            {"project": "p", "zone": "z", "name": name, "hosts": hosts, "spot": spot}
        )
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
    kept.look()
    assert compute.sizes == {"slice": 4, "other": 1}
    compute.groups["slice"][2] = "TERMINATED"
    kept.look()
    assert compute.sizes == {"slice": 0, "other": 1}
    kept.look()
    assert compute.sizes == {"slice": 4, "other": 1}


def test_what_has_ended_stays_away_until_somebody_wants_it_back(
    compute: Compute, kept: Keeper
) -> None:
    compute.add("slice", 2)
    compute.ended = {"slice-0", "slice-1"}
    for _ in range(3):
        kept.look()
        assert compute.sizes == {"slice": 0}
    compute.ended = set()
    compute.answer("/c/projects/p/zones/z/instanceGroupManagers/slice/resize?size=2")
    kept.look()
    assert compute.sizes == {"slice": 2}


def test_a_refusal_keeps_it_from_no_other_group(
    compute: Compute, kept: Keeper, capsys: pytest.CaptureFixture[str]
) -> None:
    compute.add("first", 2)
    compute.add("second", 2)
    compute.refused = "first"
    compute.groups["second"][0] = "STOPPED"
    kept.look()
    assert compute.sizes["second"] == 0
    assert "first: HTTP Error 403" in capsys.readouterr().out
