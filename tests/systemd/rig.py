"""Code that the scenarios in a container share: the page's commands, units, the run.

Runs inside the container as root, on the system's own Python (3.10 or later), without packages.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import page

BIN = "/opt/diloco/bin/diloco"
RUN = "/etc/diloco/run.toml"
TASK = Path("/opt/diloco-task")
AGGREGATOR = "diloco-aggregator.service"
A, B = "diloco-learner@island-a.service", "diloco-learner@island-b.service"
NATS = "nats-server.service"
LOGS = "diloco-logs.service"
WATCH = "diloco-watch.service"
CHECKPOINT, GC = "diloco-checkpoint.service", "diloco-gc.service"
# The tests' server in place of Google's storage.
BUCKET, ORIGIN = "bucket.service", "http://127.0.0.1:9700"
UNITS = Path("/etc/systemd/system")
TESTS = Path("/opt/src/tests")
CONFIG = """
[run]
name = "demo"
steps = 1000000
seed = 7
[task]
build = "hanging_task:build"
[sync]
interval_steps = 8
fragments = 3
block = 16
shard_elements = 1024
min_steps = 3
snapshot_interval_versions = 3
reannounce_timeout_s = 3.0
[quorum]
deadline_s = 8.0
liveness_timeout_s = 4.0
[learner]
watchdog_timeout_s = 20.0
checkpoint_interval_s = 2.0
[aggregator]
lease_ttl_s = 3.0
"""
# A test need not wait for a minute.
QUICK = "[Service]\nWatchdogSec=5\nTimeoutAbortSec=3\nRestartSec=1\n"


def run(*command, check=True, env=None, **more):
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, **more
    )
    if check and done.returncode:
        raise AssertionError(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def follow_page(name):
    """Run a block of the page as it stands, up to the first command that fails."""
    return run("bash", "-e", "-o", "pipefail", "-c", page.blocks()[name])


def show(unit, name):
    return run("systemctl", "show", "--value", "-p", name, unit).strip()


def until(condition, what, within_s=120):
    end = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s} s: {what}")
        time.sleep(0.3)
    return found


def active(unit):
    return show(unit, "ActiveState") == "active"


def failed(unit):
    return show(unit, "ActiveState") == "failed"


def restarts(unit):
    return int(show(unit, "NRestarts"))


def restarted(unit, before):
    return lambda: restarts(unit) > before and active(unit)


def status_text(unit):
    return show(unit, "StatusText")


def journal(unit, *options):
    return run("journalctl", "-q", "-o", "cat", "-u", unit, *options, check=False)


def journal_of_systemd(unit):
    return run("journalctl", "-q", "-o", "cat", f"UNIT={unit}", check=False).lower()


def events(unit, *options):
    """Returns the events that a daemon has logged, as dictionaries."""
    lines = journal(unit, *options).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def actions(unit, *options):
    return {event["action"] for event in events(unit, *options)}


def diloco(*arguments, check=True):
    """A command of the operator's, as root."""
    return run(BIN, *arguments, check=check, cwd=TASK)


def status():
    return json.loads(diloco("status", RUN, "--json"))


def versions():
    return sum(fragment["version"] for fragment in status()["fragments"])


def try_versions():
    try:
        return versions()
    except AssertionError:
        return -1


def versions_go_on(within_s=120):
    before = try_versions()
    until(lambda: try_versions() > max(before, 0), "versions go on", within_s)


def findings():
    """Returns the doctor's findings: (severity, about, sentence)."""
    told = json.loads(diloco("doctor", RUN, "--json", check=False))
    return [(one["severity"], one["about"], one["sentence"]) for one in told["findings"]]


def begin(unit):
    run("systemctl", "start", "--no-block", unit)


def begin_alone(unit):
    """Not after the others: beside an aggregator that starts, a learner would wait for that."""
    run("systemctl", "start", "--no-block", "--job-mode=ignore-dependencies", unit)


def error_of(unit):
    """Returns the error that ended a unit; '' while it names none."""
    text = status_text(unit)
    return text if text.startswith("error: ") else ""


def drop_in(unit, text, name="90-test.conf"):
    folder = UNITS / f"{unit}.d"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)


def check(text):
    print(f"ok {text}", flush=True)


# What the page has an operator do


def install_as_the_page_says():
    Path("/etc/hosts").write_text("127.0.0.1 localhost nats.example.org\n")
    Path("/etc/ld.so.conf.d/python.conf").write_text("/opt/python/lib\n")
    run("ldconfig")
    follow_page("units")
    follow_page("nats")
    until(lambda: "Server is ready" in journal(NATS), "nats is ready")


def lay_out_boot():
    """Lays out the files of infra/terraform/startup.py.tftpl; returns the program to start."""
    folder = Path("/usr/local/lib/diloco/diloco/infra")
    folder.mkdir(parents=True, exist_ok=True)
    for source in Path("/opt/src/infra").glob("*.py"):
        (folder / source.name).write_text(source.read_text())
    return folder.parents[1]


def serve_bucket():
    """Start a server of the bucket `bucket`, which outlives this program."""
    (UNITS / BUCKET).write_text(
        "[Service]\nExecStart=/opt/diloco/bin/python /opt/src/tests/gcs_server.py /srv/bucket"
        f" --bucket bucket --port {ORIGIN.rpartition(':')[2]}\n"
    )
    run("systemctl", "daemon-reload")
    run("systemctl", "start", BUCKET)
    until(lambda: ORIGIN in journal(BUCKET), "the bucket's server listens")


def write_run_file(**instead):
    text = CONFIG + page.blocks()["run.toml"]
    for before, after in instead.items():
        assert before in text
        text = text.replace(before, after)
    Path(RUN).write_text(text)
    TASK.mkdir(exist_ok=True)
    for source in (TESTS / "systemd/hanging_task.py", TESTS / "integration/tiny_task.py"):
        (TASK / source.name).write_text(source.read_text())


def make_quick():
    """Shorter times for what runs in a test; beside the files that `diloco host units` writes."""
    for unit in ("diloco-aggregator.service", "diloco-learner@.service"):
        drop_in(unit, QUICK)
    run("systemctl", "daemon-reload")


def report_failure(error, *units):
    print(f"FAILED: {error!r}", flush=True)
    for unit in (AGGREGATOR, A, B, NATS, CHECKPOINT, GC, LOGS, WATCH, *units):
        print(f"--- {unit}: {show(unit, 'ActiveState')}: {status_text(unit)}")
        print("\n".join(line[:600] for line in journal(unit).splitlines()[-25:]))
        print("\n".join(journal_of_systemd(unit).splitlines()[-8:]))


def scenario(*parts, units=()):
    """Run the parts in order; the last line tells whether all went well. `units`: further ones."""
    try:
        for part in parts:
            began = time.monotonic()
            part()
            print(f"   {part.__name__} took {time.monotonic() - began:.0f} s", flush=True)
        print("all passed", flush=True)
    except BaseException as error:
        report_failure(error, *units)
        sys.exit(1)
