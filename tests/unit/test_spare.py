"""A spare process runs what it is told, as if it had been started with that."""

import json
import os
import subprocess
import sys

import pytest
import tomli_w

from diloco.common.protocol.errors import Exit

SPARE = [sys.executable, "-P", "-m", "diloco.spare"]


def spare(given: bytes, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        SPARE, input=given, env={**os.environ, **variables}, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_it_runs_what_it_is_told_in_the_environment_that_it_is_told(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps({"run": {"name": "r", "steps": 1}}))
    arguments = ["learner", "--config", str(path), "--learner", "a"]
    told = {**os.environ, "DILOCO_LEARNER_SLICES": "many"}
    ran = spare(json.dumps([arguments, told]).encode(), DILOCO_LEARNER_HOSTS="none")
    assert ran.returncode == Exit.CONFIG, ran.stderr
    assert b"'learner.slices' must be a whole number, got 'many'" in ran.stderr
    assert b"learner.hosts" not in ran.stderr


def test_it_ends_with_its_supervisor():
    ran = spare(b"")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


@pytest.mark.parametrize("imported", [(), ("jax.devices()",)], ids=repr)
def test_it_touches_no_device_before_it_is_told(imported):
    """JAX takes other settings of devices until it has found any."""
    lines = ["import jax, diloco.spare", *imported, 'jax.config.update("jax_num_cpu_devices", 3)']
    ran = subprocess.run(
        [sys.executable, "-c", "; ".join(lines)], capture_output=True, timeout=120, check=False
    )
    assert (ran.returncode == 0) == (imported == ()), ran.stderr
