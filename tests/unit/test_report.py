"""The report: one file, what it says, how it says it safely, and how a real browser takes it."""

import asyncio
import base64
import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from runlab import Lab

from bench.tapes import Forger
from diloco.common.process.config import RunSettings
from diloco.common.protocol import wire
from diloco.common.protocol.errors import ConfigError
from diloco.run.agreement import Pairs
from diloco.run.model.evaluate import _missing as missing
from diloco.run.model.evaluate import keep, read_scores, scores_of
from diloco.run.state import RunStatus
from diloco.run.timeseries import read_time_series
from diloco.run.watch import Watch
from diloco.show.page import html_page, svg
from diloco.show.page.figures import agreement, loss
from diloco.show.page.html_sections import DRAWINGS
from diloco.show.page.lanes import make_lanes
from diloco.show.page.numbers import Shown
from diloco.show.page.report import comparison, differing, in_short, named, report, sample_pairs
from diloco.show.page.summary import SummaryTable, settings
from diloco.show.page.svg import Axis, Panel, PlotMark, bars, data_block, element, line

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "</p></script><script>alert(1)</script><img src=http://example.com/x>\u2028"
MOST_BYTES = 5 << 20


def quiet(*_: object) -> None:
    """Nobody watches."""


def look_at(lab: Lab) -> tuple[Shown, RunStatus]:
    async def look() -> tuple[Shown, RunStatus]:
        series = await read_time_series(lab.context, 0.0)
        shown = Shown(series, make_lanes(series), await read_scores(lab.context))
        shown.pairs = await sample_pairs(lab.context, series, quiet)
        return shown, await Watch(lab.context).begin()

    return asyncio.run(look())


@pytest.fixture(scope="module")
def looked() -> tuple[Shown, RunStatus]:
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


@pytest.fixture(scope="module")
def shown(looked: tuple[Shown, RunStatus]) -> Shown:
    return looked[0]


def score(step: int) -> wire.Score:
    return wire.Score(
        run="lab", epoch=0, versions=(step, step), record_seqs=(step + 1, step + 2),
        global_step=step, tokens=1000 * step, at_s=1e9 + step, loss=5.0 - step / 24,
    )  # fmt: skip


@pytest.fixture(scope="module")
def html(looked: tuple[Shown, RunStatus]) -> str:
    return report(*looked)


def figures_of(html: str) -> dict[str, list[dict[str, Any]]]:
    """The numbers of each figure, as they stand in the page."""
    return {
        section: json.loads(data)
        for section, data in re.findall(
            r'<section id="(\w+)"(?:(?!</section>).)*'
            r'<script type="application/json">(.*?)</script>',
            html,
            re.DOTALL,
        )
    }


def test_every_figure_is_drawn_and_stands_there_in_numbers(html: str) -> None:
    found = figures_of(html)
    assert set(found) == {drawing.key for drawing in DRAWINGS} | {"rounds"}
    for key, panels in found.items():
        (section,) = re.findall(rf'<section id="{key}".*?</section>', html, re.DOTALL)
        assert section.count("<svg") == len(panels)
        assert section.count("data-save") == 3
    (training,) = [one for one in found["loss"][0]["marks"] if one["name"] == "training"]
    assert len(training["x"]) == len(training["y"]) > 20


def test_each_learner_has_a_curve_of_its_own_beside_the_median(shown: Shown) -> None:
    over_time, over_tokens = loss(shown)
    for panel in (over_time, over_tokens):
        curves = {mark.name: (mark.look, mark.dash) for mark in panel.marks if mark.kind == "line"}
        assert {*shown.series.learners, "training"} <= set(curves)
        assert len(set(curves.values())) == len(curves), "each looks otherwise"


def test_each_slice_has_a_curve_and_of_many_those_that_got_worse(shown: Shown) -> None:
    def at(step: int) -> wire.Score:
        slices = {f"s{n}": {"loss": 1.0 + n * step / 100} for n in range(12)}
        return score(step).model_copy(update={"slices": slices})

    panel = loss(replace(shown, scores=[score(0), at(24), at(48)]))[-1]
    assert panel.title == "by slice"
    assert [mark.name for mark in panel.marks] == [f"s{n}" for n in range(11, 3, -1)]
    assert len({(mark.look, mark.dash) for mark in panel.marks}) == 8
    assert np.isnan(panel.marks[0].y[0])
    assert [one.title for one in loss(shown)] == ["over time", "over tokens"]


def test_cosines_between_learners_are_a_matrix(shown: Shown) -> None:
    pairs = Pairs(shown.series.learners)
    pairs._sums[:], pairs._counts[:], pairs.rounds = 0.5, 1, 1
    with_pairs = replace(shown, pairs=pairs)
    (matrix,) = [one for one in agreement(with_pairs) if one.title == "between learners"]
    drawn = svg.draw(matrix, "k")
    assert drawn.data["names"] == ["a", "b", "c", "real"]
    assert drawn.svg.count(">0.50</text>") == 16


def test_the_head_says_how_the_run_was(html: str) -> None:
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>", html))
    assert facts["learners"] == "4"
    assert facts["versions"] == "403"
    assert facts["held-out loss"] == "3.000"
    assert int(facts["updates rejected"]) > 5
    assert set(facts) >= {"duration", "global step", "tokens merged", "training loss", "goodput"}


def test_runs_are_compared_figure_by_figure_and_setting_by_setting(shown: Shown) -> None:
    changed = shown.series.settings.model_dump()
    changed["outer"] |= {"learning_rate": 0.25}
    slower = replace(shown.series, run="slower", settings=RunSettings.model_validate(changed))
    runs = named(["one", "two"], [shown, Shown(slower, shown.lanes, shown.scores)])
    told = {row[0]: row[1:] for row in in_short(runs).rows}
    assert told["held-out loss"] == ("3.000 (from 5.000)",) * 2
    before = str(shown.series.settings.outer.learning_rate)
    assert differing(runs).rows == (("outer.learning_rate", before, "0.25"),)
    made = comparison(runs)
    assert "Runs lab, slower" in made
    for panels in figures_of(made).values():
        assert {mark["name"] for mark in panels[0]["marks"] if mark["name"]} == {"lab", "slower"}


def test_runs_of_the_same_name_are_told_apart_by_what_was_given(shown: Shown) -> None:
    assert [*named(["x/a", "y/a"], [shown, shown])] == ["x/a", "y/a"]


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
        assert [found.global_step for found in await read_scores(lab.context)] == [0, 24]

    asyncio.run(twice())


def test_metrics_of_an_older_score_stay_on_the_page() -> None:
    """Not every version is scored by lm_eval; of what newer scores have too, theirs is shown."""
    lab = Lab()
    asyncio.run(lab.create())
    for step, metrics in ((0, {"exact": 0.1, "pick_acc": 0.625}), (24, {"exact": 0.875})):
        asyncio.run(keep(lab.context, score(step).model_copy(update={"metrics": metrics})))
    made = report(*look_at(lab))
    assert "pick_acc" in made
    assert "0.625" in made
    assert "0.875" in made


def test_a_run_in_which_nothing_has_happened() -> None:
    lab = Lab()
    asyncio.run(lab.create())
    made = report(*look_at(lab))
    assert "No update was rejected." in made
    assert "<svg" not in made


def test_many_learners_and_fragments_are_summed_up() -> None:
    lab = Lab(fragments=12)

    async def make() -> None:
        await lab.create()
        learners = [f"learner-{index:02d}" for index in range(60)]
        await Forger(lab.context, learners, 97, 20).forge(48)

    asyncio.run(make())
    made = report(*look_at(lab))
    assert "learner-59" in made
    (timeline,) = figures_of(made)["timeline"]
    assert (timeline["title"], len(timeline["names"])) == ("40 of 60 learners", 41)


def test_ten_thousand_versions_are_five_megabytes_at_most() -> None:
    lab = Lab(fragments=4)

    async def make() -> None:
        await lab.create()
        await Forger(lab.context, ["a", "b"], 97, 150).forge(10_000)

    asyncio.run(make())
    made = report(*look_at(lab))
    assert re.findall(r"<dt>versions</dt><dd>10,000<", made)
    assert len(made.encode()) < MOST_BYTES


class Elements(HTMLParser):
    """A page as a browser parses it: its elements, and the texts of its scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        data = dict(attrs).get("type") == "application/json"
        self._inside = "data" if data else tag if tag in ("script", "style") else ""

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts.append((self._inside, data))
        self._inside = ""


def test_what_comes_from_the_run_is_text() -> None:
    panel = Panel(
        marks=[
            line(np.arange(3.0), np.arange(3.0), "blue", HOSTILE),
            bars((np.zeros(1), np.ones(1)), (np.zeros(1), np.ones(1)), "yellow", HOSTILE),
            PlotMark(kind="texts", x=np.zeros(1), y=np.zeros(1), texts=[HOSTILE]),
        ],
        title=HOSTILE, x=Axis(label=HOSTILE), y=Axis(names=[HOSTILE]),
    )  # fmt: skip
    table = SummaryTable((HOSTILE,), ((HOSTILE,),), frozenset({HOSTILE}))
    section = html_page.section("k", HOSTILE, HOSTILE, panels=[panel], table=table)
    seen = Elements(
        html_page.saved_page(HOSTILE, element("p", {"title": HOSTILE}, HOSTILE), [section])
    )
    assert "img" not in {tag for tag, _ in seen.found}
    assert [kind for kind, _ in seen.texts] == ["style", "script", "data", "script"]
    (data,) = [json.loads(text) for kind, text in seen.texts if kind == "data"]
    assert data[0]["title"] == HOSTILE
    # Also as a file of its own, where a control character would be no XML.
    assert "\x1b" not in svg.draw(replace(panel, title="\x1b[31m"), "k").svg


def test_nothing_ends_a_block_of_data() -> None:
    block = data_block([HOSTILE, "<!--", "]]>"])
    inside = block.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert not set("<>&\u2028\u2029") & set(inside)
    assert json.loads(inside) == [HOSTILE, "<!--", "]]>"]


def test_it_asks_the_network_for_nothing_and_runs_its_own_scripts_alone(html: str) -> None:
    seen = Elements(html)
    for _, attributes in seen.found:
        assert all(
            (attributes.get(name) or "data:").startswith(("data:", "#")) for name in ("src", "href")
        )
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
    (policy,) = [one["content"] for tag, one in seen.found if "http-equiv" in one]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for kind, text in seen.texts:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert (kind == "data") != (f"'sha256-{digest}'" in policy)
    assert "@import" not in html
    assert not re.findall(r"url\((?!#)", html)


def test_a_name_that_is_no_pages_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not end in \.html") as refused:
        html_page.write(tmp_path / "loss.png", "")
    assert "FILE.html" in (refused.value.hint or "")


def chromium(path: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--enable-logging=stderr", f"--user-data-dir={path.parent / 'profile'}", *options,
        path.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)


# Counts what a person would see; in a copy of the page that allows it.
PROBE = """<script>window.onload = () => {
  const seen = [...document.querySelectorAll(".panel svg")].filter(i => i.getBoundingClientRect().width > 300);
  document.body.dataset.seen = [...new Set(seen.map(i => i.closest("section").id))].join(" ");
  document.body.dataset.wide = document.documentElement.scrollWidth - window.innerWidth;
}</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_shows_every_figure(html: str, tmp_path: Path) -> None:
    picture, written = tmp_path / "page.png", html_page.write(tmp_path / "page.html", html)
    shot = chromium(written, "--window-size=1100,6500", f"--screenshot={picture}")
    assert "CONSOLE" not in shot.stderr
    with Image.open(picture) as image:
        assert image.size == (1100, 6500)

    copy = tmp_path / "copy.html"
    policy = re.compile(r"<meta http-equiv=.*?>", re.DOTALL)
    copy.write_text(policy.sub("", html, count=1).replace("</body>", PROBE))
    probed = chromium(copy, "--window-size=1100,900", "--dump-dom").stdout
    (seen,) = re.findall(r'data-seen="(.*?)"', probed)
    assert set(seen.split()) == {drawing.key for drawing in DRAWINGS} | {"rounds"}
    (too_wide,) = re.findall(r'data-wide="(.*?)"', probed)
    assert int(too_wide) <= 0, "nothing is cut off at the side"


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values", [[1e308], [-1e308, 1e308], [5e-324], [5e-324, 1e308], [np.nan], [np.inf, -np.inf]]
)
def test_numbers_of_any_size_are_drawn(values: list[float], log: bool) -> None:
    told = np.asarray(values)
    marks = [line(told, told, "blue"), bars((told, told), (told, told), "yellow")]
    for one in marks:
        drawn = svg.draw(Panel(marks=[one], x=Axis(log=log), y=Axis(log=log)), "figure")
        assert not re.search(r"\b(nan|inf)\b", drawn.svg)
        data_block(drawn.data)


def test_a_point_alone_is_a_dot_of_the_line() -> None:
    values = np.asarray([1.0, np.nan, 2.0, 3.0])
    drawn = svg.draw(Panel(marks=[line(np.arange(4.0), values, "blue")]), "alone")
    (path,) = re.findall(r'd="(M[^"]*)"[^>]*stroke-linecap="round"', str(drawn))
    assert [*re.sub(r"[^MhL]", "", path)] == ["M", "h", "M", "h", "L"]
