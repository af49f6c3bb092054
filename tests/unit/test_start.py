"""Ctrl-C at any moment of a command ends it in silence."""

import subprocess
import sys

import pytest

# Loads the command, and is interrupted amid it.
PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Interrupted(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "diloco.show.page.command":
            raise KeyboardInterrupt
        return None

sys.meta_path.insert(0, Interrupted())
"""
STARTS = {
    "the command": "from diloco.start import main\nmain()",
    "python -m diloco": "import runpy\nrunpy.run_module('diloco', run_name='__main__')",
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_an_interrupt_while_it_loads_leaves_no_trace(start):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + start], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# Ctrl-C amid the loading of what merges, where the interrupt is caught, as JAX's loading may.
LOST = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupted(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "diloco.aggregator.arrays":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass
        return None

sys.meta_path.insert(0, Interrupted())
sys.argv = ["diloco", "replay", "nowhere.toml"]
from diloco.start import main
main()
"""


def test_an_interrupt_while_jax_loads_is_not_lost():
    done = subprocess.run([sys.executable, "-c", LOST], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
