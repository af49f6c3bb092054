"""`diloco watch`: which alerts fire, what is posted of them, and that each arrives once."""

import asyncio
import json
from dataclasses import asdict, replace

import pytest
import structlog
from receiver import Receiver, receiving

from diloco.common.process.config import RunSettings
from diloco.common.process.retry import Runtime
from diloco.common.protocol.errors import ConfigError
from diloco.judge.doctor import Report
from diloco.run import health_findings
from diloco.run.observed import Observed
from diloco.run.state import Finding
from diloco.show.alerts.fire_and_resolve import AlertLedger, Notice
from diloco.show.alerts.watching import is_blind
from diloco.show.alerts.webhook import Outbox, Webhook, WebhookAwayError, WebhookError

SECRETS = ("s3cr3t-path", "pa55word", "t0ken")


def silent(seconds: int, learner: str = "a") -> Finding:
    return Finding(
        severity="warning", about=f"learner {learner}", sentence=f"silent for {seconds} s",
        advice="start it again", runbook=health_findings.LAGGING_LEARNER,
    )  # fmt: skip


def error(about: str = "learner a", runbook: str = health_findings.LAGGING_LEARNER) -> Finding:
    return Finding(severity="error", about=about, sentence="it loops", runbook=runbook)


FINE = Finding(severity="ok", about="store", sentence="well")
NOTE = Finding(severity="note", about="layout", sentence="cannot be checked")


def told(notices: list[Notice]) -> list[tuple[str, str]]:
    return [("over" if n.ended_s is not None else n.alert.severity, n.alert.about)
            for n in notices]  # fmt: skip


def test_an_alert_is_told_once_however_its_sentence_changes_and_once_when_it_is_over() -> None:
    ledger = AlertLedger()
    assert told(ledger.look([silent(5), FINE, NOTE], 10.0)) == [("warning", "learner a")]
    assert ledger.look([silent(15)], 20.0) == []
    assert told(ledger.look([silent(25), silent(1, "b")], 30.0)) == [("warning", "learner b")]
    (over,) = ledger.look([silent(11, "b")], 40.0)
    assert (over.alert.about, over.alert.since_s, over.ended_s) == ("learner a", 10.0, 40.0)
    assert over.alert.sentences == ("silent for 25 s",)
    # It comes again: that is another alert.
    (again,) = ledger.look([silent(5), silent(11, "b")], 50.0)
    assert again.alert.id("r") != over.alert.id("r")


def test_findings_of_one_thing_and_page_are_one_alert_and_a_worse_one_is_told_again() -> None:
    ledger = AlertLedger()
    (first,) = ledger.look([silent(5)], 10.0)
    (worse,) = ledger.look([silent(15), error()], 20.0)
    assert worse.alert.severity == "error"
    assert worse.alert.sentences == ("silent for 15 s", "it loops")
    assert worse.alert.id("r") == first.alert.id("r")
    assert ledger.look([silent(25)], 30.0) == []
    assert told(ledger.look([silent(35), error("store", health_findings.STORE_AWAY)], 40.0)) == [
        ("error", "store")
    ]


def test_what_comes_and_goes_within_the_hold_is_not_told() -> None:
    ledger = AlertLedger(hold_s=30.0)
    assert ledger.look([silent(5)], 0.0) == []
    assert ledger.look([], 10.0) == []
    assert ledger.look([silent(5)], 20.0) == []
    assert ledger.look([silent(5)], 40.0) == []
    assert told(ledger.look([silent(5)], 50.0)) == [("warning", "learner a")]
    assert ledger.look([], 60.0) == []
    assert ledger.look([silent(5)], 80.0) == []  # it was not over
    assert ledger.look([], 90.0) == []
    (over,) = ledger.look([], 120.0)
    assert over.ended_s == 90.0


def test_who_cannot_look_says_of_nothing_that_it_is_over() -> None:
    ledger = AlertLedger()
    ledger.look([silent(5)], 0.0)
    away = error("bus", health_findings.NATS_AWAY)
    assert is_blind([away])
    assert told(ledger.look([away], 10.0, blind=True)) == [("error", "bus")]
    assert told(ledger.look([silent(30)], 20.0)) == [("over", "bus")]
    assert told(ledger.end(30.0)) == [("over", "learner a")]
    assert ledger.end(40.0) == []


def test_only_what_is_severe_enough_is_told() -> None:
    ledger = AlertLedger(least="error")
    assert ledger.look([silent(5)], 0.0) == []
    assert told(ledger.look([silent(5), error()], 10.0)) == [("error", "learner a")]


def test_another_process_goes_on_from_what_was_told() -> None:
    ledger = AlertLedger()
    (before,) = ledger.look([silent(5)], 10.0)
    kept = json.loads(json.dumps([asdict(alert) for alert in ledger.firing()]))
    after = AlertLedger()
    after.restore(kept)
    assert after.look([silent(65)], 70.0) == []
    (over,) = after.look([], 80.0)
    assert over.alert.id("r") == before.alert.id("r")


def test_of_the_doctor_only_what_the_status_does_not_say_is_taken() -> None:
    seen = Observed("r", 0, RunSettings.model_validate({"run": {"name": "r", "steps": 1}}))
    now = replace(seen.run(0.0), findings=(silent(5), error("fragment 3")))
    loss = error("held-out loss", "runbooks/loss-spike.md")
    report = Report("r", findings=[silent(5), loss, error("fragment 3")], run_now=now)
    assert report.deeper == [loss]
    assert Report("r", findings=[loss]).deeper == [loss]


def test_the_body_says_all_of_an_alert() -> None:
    (fires,) = AlertLedger().look([silent(5)], 1_700_000_000.0)
    ident = fires.alert.id("demo")
    assert fires.body("demo") == {
        "version": 1, "status": "firing", "id": ident, "run": "demo", "severity": "warning",
        "about": "learner a", "summary": "silent for 5 s", "advice": "start it again",
        "runbook": "runbooks/lagging-learner.md", "starts_at": "2023-11-14T22:13:20Z",
        "ends_at": None,
        "text": "[WARNING] run demo, learner a: silent for 5 s (runbooks/lagging-learner.md)",
    }  # fmt: skip
    over = Notice(fires.alert, 1_700_000_060.0).body("demo")
    assert (over["status"], over["id"]) == ("resolved", ident)
    assert over["ends_at"] == "2023-11-14T22:14:20Z"
    assert (
        over["text"] == '[resolved] run demo, learner a: over after 60 s; it was "silent for 5 s"'
    )


# The webhook


def deliver(receiver: Receiver, *findings: Finding, url: str | None = None) -> int:
    """Send an alert of each finding; how many were not delivered."""

    async def run() -> int:
        outbox = Outbox(Webhook(url or receiver.url), "demo", Runtime())
        for notice in AlertLedger().look(findings, 1.0):
            outbox.add(notice)
        return await outbox.close(60.0)

    return asyncio.run(run())


def test_what_a_receiver_cannot_take_now_is_sent_again_in_order() -> None:
    with receiving([503, 429, 500]) as receiver:
        assert deliver(receiver, silent(5), silent(5, "b"), silent(5, "c")) == 0
    assert [one["about"] for one in receiver.taken] == ["learner a", "learner b", "learner c"]
    assert len(receiver.headers) == 6


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_what_a_receiver_refuses_is_said_and_not_sent_again(status: int) -> None:
    with receiving([status]) as receiver, structlog.testing.capture_logs() as logged:
        assert deliver(receiver, silent(5), silent(5, "b")) == 1
    assert [one["about"] for one in receiver.taken] == ["learner b"]
    assert [entry["event"] for entry in logged] == ["alert_refused"]
    assert f"status {status}" in logged[0]["why"]


def test_an_outbox_that_is_closed_says_what_waits() -> None:
    async def run() -> int:
        outbox = Outbox(Webhook("http://127.0.0.1:9/hook"), "demo", Runtime())
        for notice in AlertLedger().look([silent(5), silent(5, "b")], 1.0):
            outbox.add(notice)
        return await outbox.close(0.2)

    assert asyncio.run(run()) == 2


def test_secrets_are_sent_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving([500]) as receiver:
        mine = receiver.url.replace("://", "://me:pa55word@")
        with structlog.testing.capture_logs() as logged:
            assert deliver(receiver, silent(5), url=mine) == 0
        Webhook(receiver.url, "t0ken").post({"status": "firing"})
        said = [str(logged)]
        for answer in (500, 404):
            receiver.answers = [answer]
            with pytest.raises(WebhookError) as refused:
                Webhook(mine, "t0ken").post({})
            said.append(f"{refused.value} {refused.value.hint} {refused.value.__cause__}")
    with pytest.raises(WebhookAwayError) as away:
        Webhook(mine, "t0ken").post({})
    said.append(f"{away.value} {away.value.hint} {away.value.__cause__}")
    for wrong in ("ftp://me:pa55word@host/s3cr3t-path", "s3cr3t-path", "http://:pa55word@:x/"):
        with pytest.raises(ConfigError) as none:
            Webhook(wrong)
        said.append(f"{none.value} {none.value.hint}")
    assert not [secret for secret in SECRETS for text in said if secret in text]
    assert receiver.headers[0]["Authorization"].startswith("Basic ")
    assert receiver.headers[2]["Authorization"] == "Bearer t0ken"
