"""The commands of runbooks, for the test that checks them and the one that runs them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
INDEX = ROOT / "runbooks" / "README.md"
RUNBOOKS = sorted(path for path in (ROOT / "runbooks").glob("*.md") if path != INDEX)


def commands(path: Path) -> list[list[str]]:
    """The commands of a page, in blocks and within sentences, as lists of words."""
    text = path.read_text()
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    without = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += re.findall(r"`([^`]+)`", without)
    return [words for line in lines if (words := words_of(line))]


def words_of(line: str) -> list[str]:
    """The words of a shell command of ours or of systemd; none if it is something else."""
    if not re.match(r"\s*(\S*/)?(diloco|systemctl|journalctl)(?![-.{/\w])", line):
        return []
    return shlex.split(line, comments=True)
