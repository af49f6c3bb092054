"""Sends the journal of this machine's units to Cloud Logging, so that logs outlive the machine.

Every few seconds this program reads the journal's new lines, in order, and sends each line of a
unit of the run as an entry, at least once. It stores the journal's cursor after the last line sent.
An entry that is sent twice has the same id both times, by which Google drops the second. While
entries cannot be sent, the journal keeps the lines.
"""

import contextlib
import hashlib
import itertools
import json
import subprocess
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError

from diloco.infra.cloud import LOGGING, Google
from diloco.infra.install_release import say

CURSOR = Path("/var/lib/diloco-logs/cursor")
# Prefixes of the names of the units whose lines are sent.
_UNITS = ("diloco-", "nats-server", "google-startup-scripts")
# Below Cloud Logging's limits, 256 KB an entry and 10 MB a request. A line that is cut ends in
# "(cut)".
_LONGEST = 100_000
_MOST = 50
_CHUNK = 500
_EVERY_S = 3.0
_AGAIN_S = 5.0
# Answers that no retry cures: the request is malformed, or too large.
_FOR_GOOD = (400, 413)
_LONGEST_PAUSE_S = 300.0
# By syslog's priority number.
_NAMES = ("EMERGENCY", "ALERT", "CRITICAL", "ERROR", "WARNING", "NOTICE", "INFO", "DEBUG")
_SEVERITIES = {str(number): name for number, name in enumerate(_NAMES)}


class Where(NamedTuple):
    """The machine that the entries are from: project, zone, instance id and name."""

    project: str
    zone: str
    instance: str
    name: str


def request(lines: Sequence[Mapping[str, Any]], where: Where) -> dict[str, Any]:
    """Returns the body of the request to Cloud Logging that writes lines of the journal.

    Args:
        lines: lines of `journalctl --output=json`, parsed.
        where: the machine.
    """
    return {
        "logName": f"projects/{where.project}/logs/diloco",
        "resource": {
            "type": "gce_instance",
            "labels": {
                "project_id": where.project, "zone": where.zone, "instance_id": where.instance,
            },
        },
        "labels": {"machine": where.name},
        "entries": [entry(line) for line in lines],
        # An entry that Google refuses does not prevent the others.
        "partialSuccess": True,
    }  # fmt: skip


def entry(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the log entry for a line of the journal.

    The payload is structured if the line's message is a JSON object, as daemons write, else text.
    """
    at = datetime.fromtimestamp(int(line["__REALTIME_TIMESTAMP"]) / 1e6, timezone.utc)
    text = _text(line.get("MESSAGE", ""))
    made: dict[str, Any] = {
        "timestamp": at.isoformat().replace("+00:00", "Z"),
        "severity": _SEVERITIES.get(str(line.get("PRIORITY")), "INFO"),
        "insertId": hashlib.sha256(line["__CURSOR"].encode()).hexdigest()[:32],
        "labels": {"unit": unit_of(line)},
    }
    with contextlib.suppress(ValueError, RecursionError):
        # NaN and infinity are no JSON to Google, so their names are sent.
        fields = json.loads(text, parse_constant=str) if text.startswith("{") else None
        if isinstance(fields, dict):
            # Refuses a number that is infinite as a double, such as 1e999.
            json.dumps(fields, allow_nan=False)
            return made | {"jsonPayload": fields}
    return made | {"textPayload": text}


def _text(message: object) -> str:
    """Returns a line's message as text, cut to `_LONGEST` characters.

    journalctl gives a message that is not text as a list of bytes, one that is too long as None,
    and one that the line has twice as a list of strings.
    """
    if isinstance(message, list):
        with contextlib.suppress(TypeError):
            message = bytes(message).decode(errors="replace")
    text = str(message or "")
    return text if len(text) <= _LONGEST else text[:_LONGEST] + " ... (cut)"


def follow(google: Google, where: Where, lines: Iterable[str], cursor: Path = CURSOR) -> None:
    """Sends those of `lines` that are of the run's units, until `lines` end.

    Args:
        google: access to Google Cloud.
        where: the machine.
        lines: lines of `journalctl --output=json`.
        cursor: file in which the cursor of the last line is stored after each chunk.
    """
    waiting = iter(lines)
    while chunk := [json.loads(line) for line in itertools.islice(waiting, _CHUNK)]:
        ours = [line for line in chunk if unit_of(line).startswith(_UNITS)]
        for start in range(0, len(ours), _MOST):
            send(google, request(ours[start : start + _MOST], where))
        part = cursor.with_suffix(".part")
        part.write_text(chunk[-1]["__CURSOR"])
        part.replace(cursor)


def send(google: Google, body: Mapping[str, Any]) -> None:
    """Sends a request to Cloud Logging, and retries until it is accepted.

    Entries with which the request is malformed or too large are left out.
    """
    pause_s = _AGAIN_S
    while True:
        try:
            google.call(LOGGING, body)
        except OSError as error:  # noqa: PERF203 - it is rare
            if isinstance(error, HTTPError) and error.code in _FOR_GOOD:
                _send_halves(google, body, error)
                return
            say(f"cannot send logs, again in {pause_s:g} s: {error}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            return


def _send_halves(google: Google, body: Mapping[str, Any], error: HTTPError) -> None:
    """Sends the halves of a refused request, each as `send` does, to find the refused entry."""
    entries = body["entries"]
    if len(entries) == 1:
        say(f"a line is refused for good, and left out: {error}: {str(entries[0])[:200]}")
        return
    middle = len(entries) // 2
    for half in (entries[:middle], entries[middle:]):
        send(google, {**body, "entries": half})


def command(cursor: Path = CURSOR) -> list[str]:
    """Returns the command that prints the journal from the stored cursor, or from its beginning.

    The command lacks `--follow`, which would ask the kernel for the boot id, hidden from a hardened
    unit.
    """
    since = [f"--after-cursor={cursor.read_text()}"] if cursor.exists() else []
    return ["journalctl", "--output=json", "--quiet", *since]


def unit_of(line: Mapping[str, Any]) -> str:
    """Returns the name of a line's unit: the unit that wrote it, or that systemd wrote it about."""
    own = str(line.get("_SYSTEMD_UNIT") or "")
    return own if own and own != "init.scope" else str(line.get("UNIT") or own)


def main() -> None:
    """Sends new lines of the journal every `_EVERY_S` seconds, while the machine runs."""
    google = Google()
    while True:
        try:
            zone = google.about_me("zone").decode()
            where = Where(
                zone.split("/")[1], zone.split("/")[-1],
                google.about_me("id").decode(), google.about_me("name").decode(),
            )  # fmt: skip
            with subprocess.Popen(command(), stdout=subprocess.PIPE, text=True) as journal:  # noqa: S603
                follow(google, where, journal.stdout or ())
        except Exception:  # noqa: BLE001 - nobody else is there to try again
            traceback.print_exc()
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    main()
