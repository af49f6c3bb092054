"""Ctrl-C at any moment of a command ends it in silence."""

import subprocess
import sys

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
from diloco.start import main
main()
"""


def test_an_interrupt_while_it_loads_leaves_no_trace():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
