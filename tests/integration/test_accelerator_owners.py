"""Only learners start JAX on an accelerator; what its library says does not break a log."""

import sys
from pathlib import Path

from harness import ENDLESS, World

# A plugin of JAX's that notes who starts it, speaks as libraries do, and finds nothing.
PLUGIN = """
import os, sys
from jax._src import xla_bridge

def start():
    with open({started!r}, "a") as notes:
        print(sys.argv[1], file=notes)
    os.write(2, b"E0000 00:00:1 invented.cc:7] no chips\\npartial")
    raise RuntimeError("no chips")

def initialize():
    xla_bridge.register_backend_factory("invented", start, priority=900, fail_quietly=True)
"""


def test_nothing_but_a_learner_starts_an_accelerator(
    new_world, monkeypatch, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    package = tmp_path / "plugins" / "jax_plugins" / "invented"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PLUGIN.format(started=str(started)))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    world: World = new_world(run=ENDLESS)
    found = sys.modules["harness"].environment
    plugins = str(package.parent.parent)
    monkeypatch.setattr(
        "harness.environment",
        lambda **how: {**found(**how), "PYTHONPATH": f"{found(**how)['PYTHONPATH']}:{plugins}"},
    )
    aggregator, learner = world.aggregator(), world.learner("a")
    world.until(lambda: aggregator.events("committed"), "a version")
    replay = world.start("replay", "replay", str(world.config_path))
    assert replay.wait() == 0, replay.log()
    world.stop()
    for process in (aggregator, learner):
        assert process.wait() == 0, process.log()
        process.check_clean_log()
    assert set(started.read_text().splitlines()) == {"learner"}
    said = [event["message"] for event in learner.events("said")]
    assert "E0000 00:00:1 invented.cc:7] no chips" in said
    assert not aggregator.events("said")
