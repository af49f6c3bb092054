"""A whole run of real processes whose objects are in a bucket, behind a service that fails."""

import os
import sys
from pathlib import Path

from audit import read_tape
from harness import eventually

from diloco.common.storage.store import open_store

sys.path.insert(0, str(Path(__file__).parents[1]))
from gcs_server import GcsServer


def test_a_run_trains_over_gs_to_its_end(new_world, tmp_path, monkeypatch):
    with GcsServer(tmp_path / "gcs", "bucket") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        world = new_world(store={"url": "gs://bucket/runs", "emulator": True})
        aggregator = world.aggregator()
        learners = [world.learner(f"learner-{index}") for index in range(2)]
        eventually(lambda: server.count("GET", "delta"), "a version's delta is read")
        faults = [
            server.fail("status", method="POST", status=503, times=3),
            server.fail("reset", method="GET", contains="alt=media", after_bytes=50, times=3),
            server.fail("lost", method="POST", times=2),
        ]
        assert aggregator.wait() == 0
        assert [learner.wait() for learner in learners] == [0, 0]
        for process in (aggregator, *learners):
            process.check_clean_log()
        assert not any(fault.times for fault in faults)
        read_tape(world).check()
        assert not (world.folder / "store").exists()
        names = [info.name for info in open_store("gs://bucket/runs", emulator=True).list("")]
        assert all(name.startswith(f"{world.name}/") for name in names)
        audit = world.start("doctor", "doctor", str(world.config_path), "--json")
        assert audit.wait() == 0, audit.log()


def test_a_daemon_refuses_an_emulator_that_nobody_asked_for(new_world, monkeypatch):
    world = new_world()
    path = world.variant("production", {"store": {"url": "gs://bucket/runs"}})
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    refused = world.start("refused", "aggregator", "--config", str(path))
    assert refused.wait() != 0
    assert "store.emulator is false" in refused.log()
    assert os.environ["STORAGE_EMULATOR_HOST"] in refused.log()
