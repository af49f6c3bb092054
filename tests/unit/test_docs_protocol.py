"""docs/protocol.md has every subject and every reason; its tables are generated."""

import re
from pathlib import Path

from diloco.common import names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "protocol.md"


def test_every_subject_is_in_the_page() -> None:
    page = PAGE.read_text()
    subjects = [*names.tape_subjects("{run}"), *names.ops_subjects("{run}")]
    subjects.append(names.round_open("{run}", "*"))
    for subject in subjects:
        pattern = re.escape(subject).replace(r"\*", r"\{[a-z]+\}")
        assert re.search(f"`{pattern}`", page), subject


def test_every_reason_is_in_the_page() -> None:
    sources = "".join(
        (ROOT / path).read_text()
        for path in (
            "common/wire/coding.py",
            "common/shards.py",
            "aggregator/machine.py",
            "aggregator/policy.py",
            "aggregator/driver.py",
            "aggregator/fragment.py",
        )
    )
    reasons = {
        *re.findall(r'WireError\(\s*"(\w+)"', sources),
        *re.findall(r'return "(\w+)", f?"', sources),
        *re.findall(r'Refused\([^"()]*(?:\([^()]*\))?[^"()]*"(\w+)"', sources),
        *re.findall(r'Failed\([^"]*"(\w+)"', sources),
    }
    assert {"norm", "late", "missing", "superseded", "checksum"} <= reasons
    page = PAGE.read_text()
    assert sorted(reason for reason in reasons if f"`{reason}`" not in page) == []
