"""docs/protocol.md has every subject and every reason; its tables are generated."""

import re
from pathlib import Path

from diloco.common.protocol import names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "protocol.md"


def test_every_subject_is_in_the_page() -> None:
    page = PAGE.read_text()
    subjects = [*names.tape_subjects("{run}"), *names.ops_subjects("{run}")]
    subjects.append(names.round_open("{run}", "*"))
    for subject in subjects:
        pattern = re.escape(subject).replace(r"\*", r"\{[a-z]+\}")
        assert re.search(f"`{pattern}`", page), subject
