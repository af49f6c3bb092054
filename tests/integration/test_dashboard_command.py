"""`diloco dashboard` on real runs: from the command to Ctrl-C, and through a lost NATS server."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import ENDLESS, PATIENCE_S, World, environment

from diloco.common.protocol.errors import Exit


@contextmanager
def dashboard(folder: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The command and its page's address; it has ended after the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "diloco", "dashboard", *arguments], cwd=folder, env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert "http://127.0.0.1:" in first, process.communicate()
        yield process, "http://" + first.split("http://")[1].strip()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def step_of(part: Any) -> int:
    """The step that a part tells, 0 if it tells none."""
    found = re.search(r"step ([\d,]+) of", part) if isinstance(part, str) else None
    return int(found[1].replace(",", "")) if found else 0


def events(url: str) -> Iterator[tuple[str, Any]]:
    """Returns the events that an open page is sent."""
    event = ""
    with urllib.request.urlopen(f"{url}events", timeout=PATIENCE_S) as stream:
        for line in stream:
            key, _, value = line.decode().strip().partition(": ")
            if key == "event":
                event = value
            elif key == "data":
                yield event, json.loads(value)


@pytest.mark.long
def test_a_page_lives_through_a_lost_server_and_ends_at_once(own_nats_server, new_world) -> None:
    """The page says that it is old, and goes on by itself; Ctrl-C ends the command."""
    world: World = new_world(server=own_nats_server, run=ENDLESS)
    world.aggregator()
    world.learner("a")
    world.until(lambda: world.steps("a") > 8, "a trains")
    with dashboard(world.folder, str(world.config_path), "--port", "0") as (process, url):
        came = events(url)
        facts = next(part for event, part in came if event == "part" and 'id="facts"' in part)
        assert {"goodput", "versions"} <= set(re.findall("<dt>(.*?)</dt>", facts))
        step = next(step_of(part) for event, part in came if step_of(part))
        own_nats_server.stop()
        next(said for event, said in came if event == "state" and said["word"] == "out of touch")
        next(part for event, part in came if event == "part" and "/nats-away.md" in part)
        own_nats_server.start()
        next(said for event, said in came if event == "state" and said["word"] == "under way")
        next(part for event, part in came if step_of(part) > step)
        port = url.strip("/").rpartition(":")[2]
        taken = subprocess.run(
            [sys.executable, "-m", "diloco", "dashboard", str(world.config_path), "--port", port],
            cwd=world.folder, env=environment(), capture_output=True, text=True,
            timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert taken.returncode == Exit.CONFIG
        assert f"cannot listen on 127.0.0.1, port {port}" in taken.stderr
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1] == "stopped"
    world.stop()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dashboard", "nothing"], "there is no file or folder 'nothing'"),
        (["--bus", "nats://127.0.0.1:1", "dashboard"], "no connection to NATS at 127.0.0.1:1"),
    ],
)
def test_a_run_that_is_not_there_is_a_sentence(
    tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "diloco", *arguments], cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
