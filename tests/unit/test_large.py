"""`make quality-large` in its smallest size, on the CPU: the command itself, piece by piece."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.large import GO_ON

ROOT = Path(__file__).parents[2]
# Some steps of a learner, of the sweep's 41,088 parameters.
SMALLEST = ["--size", "sweep", "--batch", "2", "--length", "32", "--dtype", "float32",
            "--tokens-per-parameter", "0.08"]  # fmt: skip
CASES = ["data-parallel", "kills"]


def piece(folder: Path, minutes: str) -> subprocess.CompletedProcess[str]:
    words = ["--folder", str(folder), "--minutes", minutes, "--only", ";".join(CASES)]
    return subprocess.run(
        [sys.executable, "-m", "bench.large", *words, *SMALLEST],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_smallest_size_ends_in_a_table(tmp_path: Path) -> None:
    """A piece without time leaves a half-done run, with which the same command goes on."""
    first = piece(tmp_path, "0")
    assert first.returncode == GO_ON, first.stderr
    assert "the same command goes on with 'kills'" in first.stdout
    assert list(tmp_path.glob("*.half"))
    last = piece(tmp_path, "15")
    assert last.returncode == 0, last.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["kills", "data-parallel"]
    assert all(3 < line["loss"] < 6 for line in lines)
    assert "| data-parallel |" in last.stdout
    assert not list(tmp_path.glob("*.half"))
