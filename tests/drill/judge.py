"""Judges the first screen of each run that `plant.py` has left: is the cause named, and who did it?

    python tests/drill/judge.py FOLDER [NAME ...]

The first screen is what `diloco why` says, asked now, or what it said while the trouble lasted. A
kind is named if its first finding, or one as severe, matches it, and where a learner is at fault
names that learner and no other. An honest run accuses somebody if a warning or an error is about a
learner.
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


def findings(folder: Path) -> tuple[list[dict], float]:
    """The list, and how long the command took."""
    if not (folder / "why.json").exists() or "moved" not in {one.name for one in folder.iterdir()}:
        why(folder)
    found = json.loads((folder / "why.json").read_text())
    if not found["said"]:
        return [{"severity": "error", "about": "", "sentence": found["errors"]}], found["took_s"]
    return json.loads(found["said"])["findings"], found["took_s"]


def names(one: dict) -> set[str]:
    return {name for name in LEARNERS if re.search(rf"\b{name}\b", one["about"])}


def is_named(planted: Planted, found: list[dict]) -> bool:
    first = [one for one in found if one["severity"] == found[0]["severity"]]
    return any(
        re.search(KINDS[planted.kind].named, one["sentence"])
        and (not planted.culprit or names(one) == {planted.culprit})
        for one in first
    )


def accused(found: list[dict]) -> list[dict]:
    return [one for one in found if one["severity"] in ("warning", "error") and names(one)]


def main() -> None:
    root, wanted = Path(sys.argv[1]).absolute(), set(sys.argv[2:])
    harness.HERE, harness.COMPILED.path = Path(__file__).parent, root / "compiled"
    named = total = wrong = runs = 0
    for one in drawn():
        folder = root / one.kind
        if folder.exists() and (not wanted or one.kind in wanted):
            found, took_s = findings(folder)
            good = is_named(one, found)
            named, total = named + good, total + 1
            others = {name for each in accused(found) for name in names(each)} - {one.culprit}
            told = f"{found[0]['severity']} {found[0]['about']}: {found[0]['sentence']}"
            also = f"; also accused: {', '.join(sorted(others))}" if others else ""
            print(
                f"{'named' if good else 'MISSED':6} {one.kind:10} {took_s:4.0f} s {told[:150]}{also}",
                flush=True,
            )
    for number, conditions in enumerate(honest(), 1):
        folder = root / f"honest-{number:02}"
        if folder.exists() and (not wanted or folder.name in wanted):
            found, took_s = findings(folder)
            bad = accused(found)
            wrong, runs = wrong + bool(bad), runs + 1
            told = "; ".join(
                f"{each['severity']} {each['about']}: {each['sentence'][:150]}" for each in bad
            )
            print(
                f"{'ACCUSED' if bad else 'fine':7} {folder.name} {' + '.join(conditions)} {took_s:4.0f} s {told}",
                flush=True,
            )
    print(f"{named} of {total} causes named; {wrong} of {runs} honest runs accused")
    print(f"processor time of all: {resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime:.0f} s")


if __name__ == "__main__":
    main()
