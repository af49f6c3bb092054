"""docs/tutorial.md, word for word: its commands train its model and write its report."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def tutorial_commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines]


@pytest.mark.slow
def test_the_commands_lead_to_a_report(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "spirals.py").write_text(code)
    make, *ours = tutorial_commands()
    assert make == ["make", "install"]
    assert [words[:2] for words in ours] == [
        [".venv/bin/diloco", name]
        for name in ("check", "local", "report", "export", "replay", "doctor")
    ]
    said = []
    for words in ours:
        command = [sys.executable, "-m", "diloco", *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout + done.stderr)
    [(before, after)] = re.findall(r"held-out loss ([\d.]+) → ([\d.]+)", said[1])
    assert "a learner would take it" in said[0]
    assert float(after) < 0.1 < float(before)
    assert (tmp_path / "runs/spirals/report.html").is_file()
    assert (tmp_path / "spirals-model/model.safetensors").is_file()
    assert "bit for bit" in said[4]
