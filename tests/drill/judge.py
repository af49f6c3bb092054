"""Judges the first screen of each run that `plant.py` has left: is the cause named, and who did it?

    python tests/drill/judge.py FOLDER [NAME ...]

The first screen is the first 24 lines of 80 columns of the list that `diloco why` prints, asked now,
or what it said while the trouble lasted. A kind is named if its first finding, or one as severe,
matches it, and where a learner is at fault names that learner and no other. An honest run accuses
somebody if a warning or an error, on the first screen or after it, is about a learner.
"""

import json
import re
import resource
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "integration")]

import harness
from kinds import KINDS, LEARNERS, Planted, drawn, honest
from plant import why

LINES = 24
SEVERE = ("warning", "error")
SEVERITIES = (*SEVERE, "note")


def findings(folder: Path) -> tuple[list[str], list[str], float]:
    """The findings on the first screen, all of them, and how long the command took."""
    if not (folder / "why.json").exists() or "moved" not in {one.name for one in folder.iterdir()}:
        why(folder)
    found = json.loads((folder / "why.json").read_text())
    said = found["said"].rpartition("all findings, the worst first:\n")[2] or found["errors"]
    lines = said.splitlines()
    return rows(lines[:LINES]), rows(lines), found["took_s"]


def rows(lines: list[str]) -> list[str]:
    """Each finding in one line: its severity, what it is about, what it says."""
    found = [" ".join(one.split()) for one in re.split(r"\n(?=\S)", "\n".join(lines))]
    return [one for one in found if severity(one) in SEVERITIES] or [" ".join(lines)]


def severity(row: str) -> str:
    return row.partition(" ")[0]


def names(row: str) -> set[str]:
    about = re.match(r"\w+ ((?:learners? \w+(?:, | and \w+)? ?)*)", row)
    return {name for name in LEARNERS if about and re.search(rf"\b{name}\b", about[1])}


def is_named(planted: Planted, screen: list[str]) -> bool:
    return severity(screen[0]) in SEVERITIES and any(
        re.search(KINDS[planted.kind].named, row)
        and (not planted.culprit or names(row) == {planted.culprit})
        for row in screen
        if severity(row) == severity(screen[0])
    )


def accused(found: list[str]) -> list[str]:
    return [row for row in found if severity(row) in SEVERE and names(row)]


def main() -> None:
    root, wanted = Path(sys.argv[1]).absolute(), set(sys.argv[2:])
    harness.HERE, harness.COMPILED.path = Path(__file__).parent, root / "compiled"
    named = total = wrong = runs = 0
    for one in drawn():
        folder = root / one.kind
        if folder.exists() and (not wanted or one.kind in wanted):
            screen, found, took_s = findings(folder)
            good = is_named(one, screen)
            named, total = named + good, total + 1
            others = {name for each in accused(found) for name in names(each)} - {one.culprit}
            also = f"; also accused: {', '.join(sorted(others))}" if others else ""
            print(
                f"{'named' if good else 'MISSED':6} {one.kind:10} {took_s:4.0f} s {screen[0][:150]}{also}",
                flush=True,
            )
    for number, conditions in enumerate(honest(), 1):
        folder = root / f"honest-{number:02}"
        if folder.exists() and (not wanted or folder.name in wanted):
            _, found, took_s = findings(folder)
            bad = accused(found)
            wrong, runs = wrong + bool(bad), runs + 1
            told = "; ".join(each[:150] for each in bad)
            print(
                f"{'ACCUSED' if bad else 'fine':7} {folder.name} {' + '.join(conditions)} {took_s:4.0f} s {told}",
                flush=True,
            )
    print(f"{named} of {total} causes named; {wrong} of {runs} honest runs accused")
    print(f"processor time of all: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.0f} s")


if __name__ == "__main__":
    main()
