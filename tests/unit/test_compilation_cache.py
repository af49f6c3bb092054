"""The user's cache of compiled programs: shared by processes, bounded, done without where it fails."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from diloco.common.process import log
from diloco.common.process.config import cache_home
from diloco.learner import compilation_cache

INTEGRATION = Path(__file__).parents[1] / "integration"
PROCESS = """
import json, sys
import jax
from diloco.common.process import log
from diloco.common.process.config import cache_home
from diloco.learner.compilation_cache import keep_programs

log.configure()
counted = {}
def count(event, **_):
    counted[event.rpartition("/")[2]] = counted.get(event.rpartition("/")[2], 0) + 1
jax.monitoring.register_event_listener(count)
programs = keep_programs(None, log.get())
with programs.compiling("these"):
    result = float(jax.jit(lambda x: x * 2 + 1)(3.0))
print(json.dumps([result, counted.get("cache_hits", 0), counted.get("cache_misses", 0)]))
"""


# All that a learner of a task compiles before its first step.
LEARNER = """
import sys
import numpy as np
from diloco.common.process import log
from diloco.common.process.config import make_config
from diloco.learner.compilation_cache import keep_programs
from diloco.learner.island import Island
from diloco.learner.train import TaskProgram

keep_programs(sys.argv[1], log.get())
sync = {"fragments": 2, "block": 16, "adopt": "blend"}
document = {"run": {"name": "r", "steps": 100}, "store": {"url": "unused"}, "sync": sync}
config = make_config({**document, "task": {"build": "tiny_task:build"}}, source="test")
island = Island(config, "a")
TaskProgram(island).compile()
with island.context():
    island.replica(np.zeros(one.size, np.float32) for one in island.layout.fragments).warm_up()
"""


def process(home) -> tuple[float, int, int, list[dict]]:
    """Returns a process's result, its counts of loaded and compiled programs, and its log."""
    own = {"XDG_CACHE_HOME": str(home), "JAX_COMPILATION_CACHE_DIR": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    return (*json.loads(done.stdout), lines)


def kept(home):
    return list((home / "diloco").rglob("*-cache"))


def test_what_one_process_compiled_another_loads_and_what_is_damaged_is_kept_again(tmp_path):
    assert process(tmp_path) == (7.0, 0, 1, [])
    (file,) = kept(tmp_path)
    assert process(tmp_path) == (7.0, 1, 0, [])
    file.write_bytes(file.read_bytes()[:40])
    result, loaded, _, lines = process(tmp_path)
    assert (result, loaded) == (7.0, 0)
    (line,) = lines
    assert (line["action"], line["level"]) == ("cache_unusable", "warning")
    assert "Error reading" in line["error"]
    assert not kept(tmp_path)
    assert process(tmp_path)[:3] == (7.0, 0, 1)


def test_a_learner_compiles_few_programs(tmp_path):
    """Its step and six beside, and for each fragment eight: each costs every learner a moment."""
    own = {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LEARNER, str(tmp_path)]
    subprocess.run(command, env=os.environ | own, cwd=INTEGRATION, check=True)
    assert len(list(tmp_path.rglob("*-cache"))) <= 1 + 6 + 2 * 8


@pytest.fixture
def jax_settings(monkeypatch):
    """Records the settings of JAX instead of applying them."""
    told = {}
    monkeypatch.setattr(compilation_cache.jax.config, "update", told.__setitem__)
    return told


def test_a_cache_that_cannot_be_written_is_named_once_and_done_without(tmp_path, jax_settings):
    (tmp_path / "file").write_text("")
    with capture_logs() as lines:
        programs = compilation_cache.keep_programs(str(tmp_path / "file"), log.get())
        with programs.compiling("these"):
            pass
    (line,) = lines
    assert line["event"] == "cache_unusable"
    assert str(tmp_path / "file") in line["error"]
    assert programs.folder is None
    assert not jax_settings


def test_the_users_cache_is_where_the_environment_says_if_that_is_absolute(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for said, found in ((str(tmp_path / "x"), tmp_path / "x"), ("x", tmp_path / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", said)
        assert cache_home() == found


def test_where_a_program_lies_is_not_in_its_key(tmp_path, jax_settings):
    programs = compilation_cache.keep_programs(str(tmp_path / "kept"), log.get())
    assert jax_settings["jax_compilation_cache_dir"] == str(programs.folder)
    assert jax_settings["jax_persistent_cache_enable_xla_caches"] == "none"
    assert programs.folder.stat().st_mode & 0o77 == 0


def test_a_process_that_is_stopped_is_not_waited_for_for_ever(tmp_path, jax_settings, monkeypatch):
    programs = compilation_cache.keep_programs(str(tmp_path), log.get())
    with programs.compiling("these"):
        (lock,) = programs.folder.glob("*.lock")
    # Another of the same waits, and one of others does not.
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        patience = []
        monkeypatch.setattr(compilation_cache, "PATIENCE_S", 0.0)
        for what in ("these", "others", None):
            with programs.compiling(what):
                patience.append(what)
    assert patience == ["these", "others", None]


def test_programs_that_were_used_least_recently_make_room(tmp_path, jax_settings, monkeypatch):
    folder = compilation_cache.keep_programs(str(tmp_path), log.get()).folder
    for age, name in enumerate(("new", "older", "oldest")):
        path = folder / f"{name}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(compilation_cache, "MOST_BYTES", 250)
    compilation_cache.keep_programs(str(tmp_path), log.get())
    assert {path.name for path in folder.glob("*-cache")} == {"new-cache", "older-cache"}


def test_what_is_compiled_for_later_is_compiled_once_and_an_error_in_it_ends_nothing(tmp_path):
    programs = compilation_cache.CompiledPrograms(tmp_path, log.get())
    passed = []
    for fails in (True, False, False):
        with programs.rehearsing("a step") as before:
            passed.append(before)
            if fails:
                raise ValueError("no such mesh")
    assert passed == [False, False, True]


def test_what_ended_the_process_twice_is_not_compiled_for_later_again(tmp_path):
    programs = compilation_cache.CompiledPrograms(tmp_path, log.get())
    passed = []
    for _ in range(3):
        # The process is gone amid the block: nothing behind it runs.
        block = programs.rehearsing("a step")
        passed.append(block.__enter__())
        del block
    assert passed == [False, False, True]
