"""The journal that leaves a machine: entries, batches, and at least once."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from diloco.infra import google_units, logs
from diloco.infra.cloud import LOGGING, Google

WHERE = logs.Where("p", "us-central1-a", "123", "diloco-demo-east-x1")


def line(number: int, message: object = "text", **more: Any) -> dict[str, Any]:
    at = str(1_700_000_000_250_000 + number)
    return {"__CURSOR": f"s=1;i={number}", "__REALTIME_TIMESTAMP": at, "MESSAGE": message,
            "PRIORITY": "6", "_SYSTEMD_UNIT": "diloco-learner@east.service"} | more  # fmt: skip


def test_a_daemons_line_keeps_its_fields() -> None:
    made = logs.entry(line(0, json.dumps({"action": "started", "step": 3}), PRIORITY="4"))
    assert made["jsonPayload"] == {"action": "started", "step": 3}
    assert made["severity"] == "WARNING"
    assert made["timestamp"] == "2023-11-14T22:13:20.250000Z"
    assert made["labels"] == {"unit": "diloco-learner@east.service"}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("plain", "plain"),
        ("{no json", "{no json"),
        ("[1, 2]", "[1, 2]"),
        ([104, 105, 255], "hi\N{REPLACEMENT CHARACTER}"),
        (None, ""),
        ("x" * 200_000, "x" * 100_000 + " ... (cut)"),
    ],
)
def test_what_is_no_line_of_a_daemon_is_text(message: object, text: str) -> None:
    assert logs.entry(line(0, message))["textPayload"] == text


def test_what_is_no_number_is_sent_by_its_name() -> None:
    made = logs.entry(line(0, '{"loss": NaN, "norm": Infinity, "step": 3}'))
    assert made["jsonPayload"] == {"loss": "NaN", "norm": "Infinity", "step": 3}
    json.dumps(made, allow_nan=False)


def test_a_number_beyond_all_bounds_is_text() -> None:
    assert logs.entry(line(0, '{"norm": 1e999}'))["textPayload"] == '{"norm": 1e999}'


@pytest.mark.parametrize("priority", ["9", "-1", "high", ["3", "6"], None])
def test_a_priority_that_is_none_ends_no_machines_logs(priority: object, tmp_path: Path) -> None:
    google = Accepting(refusals=0)
    lines = [line(0, "before"), line(1, "odd", PRIORITY=priority), line(2, "after")]
    logs.follow(google, WHERE, map(json.dumps, lines), tmp_path / "cursor")
    assert google.taken == ["before", "odd", "after"]


def test_a_message_that_came_twice_in_one_entry_is_text() -> None:
    assert logs.entry(line(0, ["one", "two"]))["textPayload"] == "['one', 'two']"


def test_what_is_nested_without_end_is_text() -> None:
    text = '{"a": ' * 9_000
    assert logs.entry(line(0, text))["textPayload"] == text


def test_one_entry_that_is_refused_keeps_none_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """602 lines, of which Google refuses the 49th and the 300th with all that come with them."""
    taken: list[str] = []

    class Refusing(Google):
        def call(self, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
            texts = [entry["textPayload"] for entry in (body or {})["entries"]]
            if {"48", "299"} & set(texts):
                raise HTTPError(url, 400, "Bad Request", None, None)  # type: ignore[arg-type]
            taken.extend(texts)
            return {}

    lines = [json.dumps(line(number, str(number))) for number in range(602)]
    logs.follow(Refusing(), WHERE, lines, tmp_path / "cursor")
    assert taken == [str(number) for number in range(602) if number not in (48, 299)]
    assert (tmp_path / "cursor").read_text() == "s=1;i=601"
    assert capsys.readouterr().out.count("refused for good") == 2


def test_an_entry_that_is_sent_twice_has_one_name() -> None:
    first, again, other = logs.entry(line(1)), logs.entry(line(1)), logs.entry(line(2))
    assert first["insertId"] == again["insertId"] != other["insertId"]


def test_a_request_says_whose_entries_they_are() -> None:
    made = logs.request([line(1)], WHERE)
    assert made["logName"] == "projects/p/logs/diloco"
    assert made["resource"]["labels"]["instance_id"] == "123"
    assert made["partialSuccess"] is True
    assert len(made["entries"]) == 1


class Accepting(Google):
    """Takes what is sent after some refusals."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals
        self.taken: list[str] = []

    def call(self, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        assert url == LOGGING
        assert body is not None
        if self.refusals:
            self.refusals -= 1
            raise OSError("no route to host")
        self.taken += [entry["textPayload"] for entry in body["entries"]]
        return {}


def test_every_line_is_sent_in_order_and_noted_when_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs.time, "sleep", lambda seconds: None)
    google, cursor = Accepting(refusals=3), tmp_path / "cursor"
    lines = [json.dumps(line(number, f"line {number}")) + "\n" for number in range(120)]
    logs.follow(google, WHERE, iter(lines), cursor)
    assert google.taken == [f"line {number}" for number in range(120)]
    assert cursor.read_text() == "s=1;i=119"
    assert "--after-cursor=s=1;i=119" in logs.command(cursor)
    assert not any("cursor" in word for word in logs.command(tmp_path / "none"))


def test_lines_of_the_runs_units_leave_the_machine_and_no_others(tmp_path: Path) -> None:
    google, cursor = Accepting(refusals=0), tmp_path / "cursor"
    lines = [
        line(0, "own"),
        line(1, "ssh", _SYSTEMD_UNIT="ssh.service"),
        line(2, "of systemd", _SYSTEMD_UNIT="init.scope", UNIT="nats-server.service"),
        line(3, "boot", _SYSTEMD_UNIT="google-startup-scripts.service"),
        line(4, "nobody's", _SYSTEMD_UNIT=None),
    ]
    logs.follow(google, WHERE, map(json.dumps, lines), cursor)
    assert google.taken == ["own", "of systemd", "boot"]
    assert cursor.read_text() == "s=1;i=4"


def test_the_units_beside_a_release_need_no_package() -> None:
    for unit in google_units.UNITS.values():
        assert "ExecStart=/usr/bin/python3 -m diloco.infra." in unit
        assert f"WorkingDirectory={google_units.PROGRAM}\n" in unit
