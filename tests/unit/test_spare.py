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
    changes = {"DILOCO_LEARNER_SLICES": "many", "DILOCO_LEARNER_HOSTS": None}
    ran = spare(json.dumps([arguments, changes]).encode(), DILOCO_LEARNER_HOSTS="none")
    assert ran.returncode == Exit.CONFIG, ran.stderr
    assert b"'learner.slices' must be a whole number, got 'many'" in ran.stderr
    assert b"learner.hosts" not in ran.stderr


def test_it_ends_with_its_supervisor():
    """Not with the status of a process whose run has ended: it would end all supervisors."""
    ran = spare(b"")
    assert (ran.returncode, ran.stdout, ran.stderr) == (Exit.PASSING, b"", b"")


def run(lines: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("imported", [(), ("jax.devices()",)], ids=repr)
def test_it_touches_no_device_before_it_is_told(imported):
    """JAX takes other settings of devices until it has found any."""
    lines = ["import jax, diloco.spare", "diloco.spare.prepared()", *imported]
    ran = run([*lines, 'jax.config.update("jax_num_cpu_devices", 3)'])
    assert (ran.returncode == 0) == (imported == ()), ran.stderr


def test_it_needs_nothing_that_an_installation_may_lack():
    """Its imports are dependencies of the program, not of an extra or of the developers."""
    blocked = ("flax", "grain", "keras", "orbax", "transformers", "torch", "pytest", "hypothesis")
    lines = ["import sys", f"sys.modules.update(dict.fromkeys({blocked}))", "import diloco.spare"]
    ran = run([*lines, "diloco.spare.prepared()"])
    assert ran.returncode == 0, ran.stderr


def test_what_imports_add_to_the_environment_stays():
    """As in a new process: with other flags of libtpu the hosts' programs would differ."""
    lines = [
        "import os, sys, diloco.spare",
        "diloco.spare.prepared()",
        "from diloco.common.process.config import change_environment",
        'os.environ["LIBTPU_INIT_ARGS"] = "added"',
        'change_environment({"DILOCO_LEARNER_HOSTS": "2", "HOME": None})',
        'print(*[os.environ.get(k) for k in ("LIBTPU_INIT_ARGS", "DILOCO_LEARNER_HOSTS", "HOME")])',
    ]
    assert run(lines).stdout == "added 2 None\n"


def test_what_a_task_spawns_does_not_import_it_all_again():
    """Such a process runs the main module's file once more."""
    ran = run(["import sys, diloco.spare", 'print("jax" in sys.modules)'])
    assert ran.stdout == "False\n", ran.stderr
