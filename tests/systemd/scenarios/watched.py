#!/usr/bin/python3
"""A stuck learner is told to a webhook within five minutes, by the units as the page installs them.

No time is made shorter: watchdogs, the watch's intervals and the settings of health are defaults.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, "/opt/src/tests/systemd")

from rig import (
    NATS,
    WATCH,
    A,
    B,
    active,
    check,
    events,
    follow_page,
    install_as_the_page_says,
    journal,
    restarts,
    run,
    scenario,
    show,
    until,
    versions,
    write_run_file,
)

WITHIN_S = 300.0
LAGGING = "runbooks/lagging-learner.md"
taken = []


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self):
        taken.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def told(status, about, word=""):
    """The first message of an alert, by its state, subject and a word of its sentence."""
    return next(
        (
            one
            for one in taken
            if (one["status"], one["about"]) == (status, about) and word in one["summary"]
        ),
        None,
    )


def start():
    install_as_the_page_says()
    write_run_file(**{
        "watchdog_timeout_s = 20.0\n": "",
        "liveness_timeout_s = 4.0\n": "",
    })  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = Path("/etc/diloco/watch.env")
    env.write_text(f"DILOCO_WEBHOOK_URL=http://127.0.0.1:{server.server_port}/s3cr3t\n")
    env.chmod(0o600)
    follow_page("ports")
    follow_page("create")
    follow_page("start")
    until(lambda: versions() >= 6, "versions are made")
    assert active(WATCH)
    until(lambda: "alerts go to 127.0.0.1" in journal(WATCH), "the watch knows its webhook")
    assert "s3cr3t" not in journal(WATCH)
    check("the page's commands start a watch beside the run")


def peak_mib(pid):
    """The most memory that a process has taken; what it started is counted apart."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) >> 10


def all_is_well():
    time.sleep(60)
    # That updates wait long for their versions is true of a busy machine.
    amiss = [one for one in taken if one["about"] != "rounds"]
    assert not amiss, amiss
    assert active(WATCH), journal(WATCH)
    assert restarts(WATCH) == 0, journal(WATCH)
    print(f"   the watch has taken {peak_mib(show(WATCH, 'MainPID'))} MiB", flush=True)
    check("a run that is well has no alert, with a reader's credentials either")


def its_step_hangs():
    """Its process lives and its heartbeats go on; /livez fails after ten minutes, and not before."""
    Path("/run/hang-island-a").touch()
    began = time.monotonic()
    alert = until(lambda: told("firing", "learner island-a"), "the webhook is told", WITHIN_S)
    print(f"   told after {time.monotonic() - began:.0f} s: {alert['summary']}", flush=True)
    assert alert["runbook"] == LAGGING, alert
    assert restarts(A) == 0
    assert active(A)
    Path("/run/hang-island-a").unlink()
    until(lambda: told("resolved", "learner island-a"), "and that it is over", WITHIN_S)
    check("a learner whose training step hangs is told to the webhook within five minutes")


def its_process_is_stopped():
    os.kill(int(show(B, "MainPID")), signal.SIGSTOP)
    began = time.monotonic()
    alert = until(lambda: told("firing", "learner island-b", "silent"), "it is told", WITHIN_S)
    print(f"   told after {time.monotonic() - began:.0f} s: {alert['summary']}", flush=True)
    # Its watchdog would end it after 75 s, and start it again.
    os.kill(int(show(B, "MainPID")), signal.SIGCONT)
    until(lambda: told("resolved", "learner island-b", "silent"), "and it is over", WITHIN_S)
    check(
        "a learner whose process is stopped by SIGSTOP is told to the webhook, and that it is back"
    )


def it_starts_again():
    count = len(taken)
    run("systemctl", "restart", WATCH)
    run("systemctl", "stop", NATS)
    alert = until(lambda: told("firing", "bus"), "NATS is away", WITHIN_S)
    assert alert["severity"] == "error"
    assert "<3>" not in journal(WATCH)
    assert "[ERROR]" in run("journalctl", "-q", "-o", "cat", "-p", "err", "-u", WATCH)
    run("systemctl", "start", NATS)
    until(lambda: told("resolved", "bus"), "and back", WITHIN_S)
    again = [one["about"] for one in taken[count:] if one["about"].startswith("learner")]
    assert not again, again
    assert not [event for event in events(WATCH) if event["action"] == "alert_refused"]
    check("a watch that is started again repeats nothing, and errors are errors in the journal")


scenario(start, all_is_well, its_step_hangs, its_process_is_stopped, it_starts_again)
