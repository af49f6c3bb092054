"""The pages on a run that got worse, followed to the letter on runs that were spoiled in known ways.

The commands are the pages' own, in their order; only what stands for a name is put in its place,
and that comes from what the page's commands said before.
"""

import json
import re

import pytest
import spoiled
from runbook_pages import ROOT, commands
from typer.testing import CliRunner

from diloco.common.process import log
from diloco.program import app
from diloco.replay.bundle import run_bundle
from diloco.replay.options import BundleOptions
from diloco.run.cli.opening import RunLocation, use_place

pytestmark = pytest.mark.slow

PAGES = ("loss-spike", "rejected-updates", "debug-with-replay")
# They want the run on a server, or text; `test_runbook_commands.py` runs them on one that goes on.
NOT_READING = ("run ", "auth", "sample")
# Noise is told by its direction, as `test_fleet.py` has it: of so few rounds blame is not sure.
VERDICTS = {"labels": "harmful", "rate": "harmful"}


@pytest.fixture(scope="module", params=VERDICTS)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    run = spoiled.make_run(folder, request.param, versions=20)
    use_place(RunLocation(None, str(run.store)))
    try:
        run_bundle(str(run.tape), folder / "run.bundle", BundleOptions())
    finally:
        use_place(RunLocation())
    return request.param, folder


def reading(page: str) -> list[list[str]]:
    """The commands of a page that look at a run, in the page's order."""
    found = [" ".join(words[1:]) for words in commands(ROOT / "runbooks" / f"{page}.md")]
    chosen = [text for text in found if "RUN" in text and not text.startswith(NOT_READING)]
    return [text.split() for text in dict.fromkeys(chosen)]


def said_by(words: list[str]) -> str:
    done = CliRunner().invoke(app, words, env={"COLUMNS": "250"})
    assert done.exit_code == 0, f"{words}: {done.output} {done.exception!r}"
    return done.output


@pytest.mark.parametrize("page", PAGES)
def test_the_page_leads_to_the_culprit(case, page, tmp_path, monkeypatch):
    kind, folder = case
    monkeypatch.setattr(log, "configure", lambda _level: None)
    monkeypatch.chdir(tmp_path)
    places = {
        "RUN": str(folder / "run.bundle"), "BUNDLE": str(tmp_path / "again.bundle"),
        "OTHER": str(folder / "run.bundle"),
        "MODEL": str(tmp_path / "model"), "2h": "3",
    }  # fmt: skip
    steps = reading(page)
    assert len(steps) >= 4
    # What a page asks for by name it has found before: the culprit and its first bad round.
    steps.sort(key=lambda words: bool({"WHAT", "NAME"} & {*words}))
    told = {}
    for words in steps:
        text = told[" ".join(words)] = said_by([places.get(word, word) for word in words])
        assert text.strip(), words
        if "--blame" in words:
            found = re.search(rf"({'|'.join(spoiled.LEARNERS)}) +(harmful|useless)", text)
            assert found is not None, text
            assert found.groups() == (spoiled.CULPRIT, VERDICTS[kind])
            places |= {"NAME": found[1], "WHAT": first_bad_round(places["RUN"])}
    assert int(places["WHAT"].split("@")[1]) == spoiled.SPOILED_FROM[kind] + 1
    assert spoiled.CULPRIT in told["show RUN WHAT"]


def first_bad_round(bundle: str) -> str:
    worst = json.loads(said_by(["replay", bundle, "--blame", "--json"]))["learners"][0]
    return f"{worst['since']['fragment']}@{worst['since']['version']}"
