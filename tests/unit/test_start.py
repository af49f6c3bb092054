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
        if name == "diloco.report.command":
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
