"""Numba's cache of a kernel: truncated, not writable, written by two processes at once."""

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diloco.aggregator.kernel_cache import CachedKernel

KERNEL = """
from diloco.aggregator.kernel_cache import compiled

@compiled
def twice(values):
    return values[0] + values[0]
"""
WHOLE, REAL = np.array([3], np.int32), np.array([0.25], np.float64)


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "kept"))
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    # Stored code names the module that it came from.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "kernel", None)
    return path


def another_process(path: Path):
    """The kernel as one that starts now has it: nothing compiled, nothing loaded."""
    spec = importlib.util.spec_from_file_location("kernel", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel"] = module
    spec.loader.exec_module(module)
    return module.twice


def kept(path: Path, ending: str) -> list[Path]:
    return list((path.parent / "kept").rglob(f"*.{ending}"))


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0, 20])
def test_what_a_power_failure_cut_short_is_compiled_again_and_kept(source, ending, left):
    another_process(source)(REAL)
    (file,) = kept(source, ending)
    file.write_bytes(file.read_bytes()[:left])
    assert another_process(source)(REAL) == 0.5
    third = another_process(source)
    assert third(REAL) == 0.5
    assert sum(third.stats.cache_hits.values()) == 1


def test_who_is_stopped_with_the_folder_holds_up_nobody(source, monkeypatch):
    """The lock of a process that a debugger or a full disk has stopped is never let go."""
    another_process(source)(REAL)
    (index,) = kept(source, "nbi")
    monkeypatch.setattr(CachedKernel, "patience_s", 0.01)
    with (index.parent / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = another_process(source)
        assert second(REAL) == 0.5
        assert second(WHOLE) == 6
    assert not sum(second.stats.cache_hits.values())
    assert CachedKernel.patience_s == 0


def test_numba_that_may_not_compile_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "diloco.aggregator.compile_kernels"],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode
    assert "ConfigError: NUMBA_DISABLE_JIT is set in the environment" in done.stderr


def test_a_kernel_is_compiled_again_when_one_that_it_calls_changes(source):
    other = source.with_name("other.py")
    other.write_text("from diloco.aggregator.kernel_cache import compiled\n")
    with other.open("a") as file:
        file.write("@compiled\ndef sum_of(a, b):\n    return a + b\n")
    source.write_text(
        KERNEL.replace("\n@", "from other import sum_of\n@").replace(
            "values[0] + values[0]", "sum_of(values[0], values[0])"
        )
    )
    assert another_process(source)(REAL) == 0.5
    other.write_text(other.read_text().replace("a + b", "a * b "))
    sys.modules.pop("other")
    assert another_process(source)(REAL) == 0.0625
    sys.modules.pop("other")


def test_a_kernel_that_cannot_be_stored_works_all_the_same(source):
    kernel = another_process(source)
    folder = Path(kernel.stats.cache_path)
    folder.rmdir()
    folder.write_text("in its place")
    assert kernel(REAL) == 0.5


# Each as it would be at the worst moment: "a" has seen no entry and writes the index after "b" has
# written its own, and "b" its code after "a" has.
ONE_OF_TWO = """
import sys, time
from pathlib import Path
import numpy as np
from numba.core import caching

role, folder = sys.argv[1], Path(sys.argv[2])
sys.path.insert(0, str(folder))

def wait(name, most_s=60.0):
    until = time.monotonic() + most_s
    while not (folder / name).exists() and time.monotonic() < until:
        time.sleep(0.01)

def before(owner, name, act):
    inner = getattr(owner, name)
    def outer(*args):
        act()
        return inner(*args)
    setattr(owner, name, outer)

def a_writes_the_index():
    (folder / "a has looked").touch()
    wait("b stores")
    wait("b has written the index", 0.5)

def b_stores():
    wait("a has looked")
    (folder / "b stores").touch()

def b_writes_code():
    (folder / "b has written the index").touch()
    wait("a is done")

from kernel import twice
file = caching.IndexDataCacheFile
if role == "a":
    before(file, "_save_index", a_writes_the_index)
    twice(np.array([3], np.int32))
    (folder / "a is done").touch()
else:
    before(twice._cache, "save_overload", b_stores)
    before(file, "_save_data", b_writes_code)
    twice(np.array([0.25]))
"""


def test_two_processes_that_store_at_once_do_not_mix_their_code(source):
    folder = source.parent
    each = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO, role, folder],
            env={**os.environ, "NUMBA_CACHE_DIR": str(folder / "kept")},
        )
        for role in "ab"
    ]
    assert [one.wait(120) for one in each] == [0, 0]
    later = another_process(source)
    assert (later(WHOLE), later(REAL)) == (6, 0.5)
    assert sum(later.stats.cache_hits.values()) == 2
