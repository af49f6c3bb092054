"""The blocks of docs/systemd.md that are tried in a container: what the page says is what runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "systemd.md"


def blocks(page=PAGE):
    """Name -> text of each block below a line `<!-- tried: NAME -->`."""
    found = re.findall(
        r"^<!-- tried: ([\w.-]+) -->\n```\w+\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
    )
    assert len({name for name, _ in found}) == len(found), "a name stands twice"
    return dict(found)
