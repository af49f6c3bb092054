"""Figures of curves: drawn in a process of their own, with the errors of the one that asked."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from diloco.common.errors import ConfigError
from diloco.figures.curves import Curve, Curves, draw

SCRIPT = """
import sys
from pathlib import Path
from diloco.figures.curves import Curve, Curves, draw

if __name__ == "__main__":
    shown = Curves("a run", "loss", [Curve([1, 2, 3], [3.0, 2.0, 2.5], "island-a", holds=True)])
    draw(shown, Path("figure.png"))
    assert "matplotlib" not in sys.modules
"""


def test_who_draws_loads_no_matplotlib(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, program.name], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "figure.png") as picture:
        assert picture.size == (1050, 630)


@pytest.mark.parametrize("name", ["away/figure.png", "figure.unheard-of"])
def test_what_cannot_be_written_is_said(tmp_path, name):
    shown = Curves("a run", "loss", [Curve(np.arange(3), np.arange(3))], zero=True)
    with pytest.raises(ConfigError, match="cannot write the figure"):
        draw(shown, tmp_path / name)
