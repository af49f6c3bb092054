"""The report: its files, what it says, and how a real browser takes it."""

import asyncio
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from runlab import Lab

from bench.forger import Forger
from diloco.common import wire
from diloco.common.config import RunSettings
from diloco.model.scores import _missing as missing
from diloco.model.scores import keep, kept, scores_of
from diloco.projections.timeseries import read_time_series
from diloco.report import compare
from diloco.report.build import DRAWINGS, sample_pairs, write
from diloco.report.lanes import make_lanes
from diloco.report.numbers import Shown
from diloco.report.page import Fact, Page, Section, Table, render
from diloco.report.summary import settings

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "</p><script>alert(1)</script><img src=http://example.com/x>"


def quiet(*_: object) -> None:
    """Nobody watches."""


def look_at(lab: Lab) -> Shown:
    async def look() -> Shown:
        series = await read_time_series(lab.context, 0.0)
        shown = Shown(series, make_lanes(series), await kept(lab.context))
        shown.pairs = await sample_pairs(lab.context, series, quiet)
        return shown

    return asyncio.run(look())


@pytest.fixture(scope="module")
def shown() -> Shown:
    """A run of 400 versions with everything that a figure can show."""
    lab = Lab(fragments=2)

    async def make() -> None:
        await lab.create()
        await Forger(lab.context, ["a", "b", "c"], 97, 150).forge(400)
        async with lab.aggregating():
            await lab.join("real")  # Its shards are in the store.
            await lab.send_many("real", 3)
        for step in (0, 24, 48):
            await keep(lab.context, score(step))

    asyncio.run(make())
    return look_at(lab)


def score(step: int) -> wire.Score:
    return wire.Score(
        run="lab", epoch=0, versions=(step, step), record_seqs=(step + 1, step + 2),
        global_step=step, tokens=1000 * step, at_s=1e9 + step, loss=5.0 - step / 24,
    )  # fmt: skip


@pytest.fixture(scope="module")
def written(shown: Shown, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(shown, tmp_path_factory.mktemp("report") / "new" / "folder", quiet)


def test_every_figure_is_there_as_a_picture_and_in_the_page(written: Path) -> None:
    page = written.read_text()
    for drawing in DRAWINGS:
        with Image.open(written.parent / f"{drawing.key}.png") as picture:
            assert picture.width > 1000
            assert len(picture.convert("L").getcolors(256) or ()) > 20, "it is not empty"
        (section,) = re.findall(rf'<section id="{drawing.key}">.*?</section>', page, re.DOTALL)
        assert "data:image/svg+xml;base64," in section


def test_the_head_says_how_the_run_was(written: Path) -> None:
    head = written.read_text().split("<nav>")[0]
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)(?:<small>.*?</small>)?</dd>", head))
    assert facts["learners"] == "4"
    assert facts["versions"] == "403"
    assert facts["held-out loss"] == "3.000"
    assert int(facts["updates rejected"]) > 5
    assert set(facts) >= {"duration", "global step", "tokens merged", "training loss", "goodput"}


def test_runs_are_compared_figure_by_figure_and_setting_by_setting(
    shown: Shown, tmp_path: Path
) -> None:
    changed = shown.series.settings.model_dump()
    changed["outer"] |= {"learning_rate": 0.25}
    slower = replace(shown.series, run="slower", settings=RunSettings.model_validate(changed))
    runs = compare.named(["one", "two"], [shown, Shown(slower, shown.lanes, shown.scores)])
    page = compare.write(runs, tmp_path).read_text()
    told = {row[0]: row[1:] for row in compare.in_short(runs).rows}
    assert told["versions"] == ("403 (of 2 fragments)",) * 2
    assert told["held-out loss"] == ("3.000 (from 5.000)",) * 2
    before = str(shown.series.settings.outer.learning_rate)
    assert compare.differing(runs).rows == (("outer.learning_rate", before, "0.25"),)
    assert page.count("data:image/svg+xml;base64,") == 2
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.width > 1000
    assert "Runs lab, slower" in page


def test_runs_of_the_same_name_are_told_apart_by_what_was_given(shown: Shown) -> None:
    assert [run.name for run in compare.named(["x/a", "y/a"], [shown, shown])] == ["x/a", "y/a"]


def test_stored_scores_are_shown_when_none_is_to_be_made() -> None:
    async def look() -> list[wire.Score]:
        lab = Lab()
        await lab.create()
        await keep(lab.context, score(24))
        series = await read_time_series(lab.context, 0.0)
        return await scores_of(lab.context, series, 0)

    assert asyncio.run(look()) == [score(24)]


def test_every_setting_is_told(shown: Shown) -> None:
    told = dict(settings(shown).rows)
    document = shown.series.settings.model_dump()
    assert set(told) == {f"{section}.{key}" for section in document for key in document[section]}
    assert told["sync.codec"] == '"float32"'


def test_scores_come_in_order(shown: Shown) -> None:
    assert [found.global_step for found in shown.scores] == [0, 24, 48]


def test_no_more_views_are_scored_than_there_are_versions(shown: Shown) -> None:
    some, all_of_them = (len(missing(shown.series, [], count)) for count in (16, 10**21))
    assert (some, all_of_them) == (16, shown.series.versions["seq"].size)


def test_a_view_has_one_score_however_often_it_was_scored() -> None:
    async def twice() -> None:
        lab = Lab()
        for made in (score(24), score(24), score(0)):
            await keep(lab.context, made)
        assert len(lab.objects()) == 2
        await keep(lab.context, score(24).model_copy(update={"loss": 4.0000001}))
        await keep(lab.context, score(48).model_copy(update={"epoch": 1}))
        lab.store.put("lab/score/0000-000000000072-strange", b"rubbish")
        assert [found.global_step for found in await kept(lab.context)] == [0, 24]

    asyncio.run(twice())


def test_a_run_in_which_nothing_has_happened(tmp_path: Path) -> None:
    lab = Lab()
    asyncio.run(lab.create())
    (tmp_path / "rejected.png").write_bytes(b"of an earlier report")
    page = write(look_at(lab), tmp_path, quiet).read_text()
    assert "No update was rejected." in page
    assert "svg" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_many_learners_and_fragments_are_summed_up(tmp_path: Path) -> None:
    lab = Lab(fragments=12)

    async def make() -> None:
        await lab.create()
        learners = [f"learner-{index:02d}" for index in range(60)]
        await Forger(lab.context, learners, 97, 20).forge(48)

    asyncio.run(make())
    page = write(look_at(lab), tmp_path, quiet).read_text()
    assert "learner-59" in page
    with Image.open(tmp_path / "timeline.png") as picture:
        assert picture.height < 2 * picture.width


def test_what_comes_from_the_run_is_text() -> None:
    page = render(
        Page(
            title=HOSTILE,
            subtitle=HOSTILE,
            facts=[Fact(HOSTILE, HOSTILE, HOSTILE)],
            sections=[Section("k", HOSTILE, HOSTILE, b"<svg/>", Table((HOSTILE,), ((HOSTILE,),)))],
            footer=HOSTILE,
            warnings=[HOSTILE],
        )
    )
    assert "<script" not in page
    assert "<img src=http" not in page


def test_it_asks_the_network_for_nothing(written: Path) -> None:
    page = written.read_text()
    assert "default-src 'none'" in page
    assert not re.findall(r'(?:src|href)="(?!data:|#)', page)
    assert "@import" not in page
    assert "url(" not in page


def chromium(page: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}", *options,
        page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


# Counts what a person would see; in a copy of the page that allows it.
PROBE = """<script>window.onload = () => {
  const seen = [...document.images].filter(i => i.complete && i.naturalWidth > 500);
  document.body.dataset.seen = seen.map(i => i.closest("section").id).join(" ");
  document.body.dataset.wide = document.documentElement.scrollWidth - window.innerWidth;
}</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_shows_every_figure(written: Path, tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    shot = chromium(written, "--window-size=1100,6500", f"--screenshot={picture}")
    assert "CONSOLE" not in shot.stderr
    with Image.open(picture) as image:
        assert image.size == (1100, 6500)

    copy = tmp_path / "copy.html"
    policy = re.compile(r"<meta http-equiv=.*?>", re.DOTALL)
    copy.write_text(policy.sub("", written.read_text(), count=1).replace("</body>", PROBE))
    page = chromium(copy, "--window-size=1100,900", "--dump-dom").stdout
    (seen,) = re.findall(r'data-seen="(.*?)"', page)
    assert seen.split() == [drawing.key for drawing in DRAWINGS]
    (too_wide,) = re.findall(r'data-wide="(.*?)"', page)
    assert int(too_wide) <= 0, "nothing is cut off at the side"
