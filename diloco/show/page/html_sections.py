"""Makes the sections of a run's page, by their ids in the page. Pure.

No section grows with the fleet or the run: long lists are cut, and state their full length.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from diloco.common.protocol import wire
from diloco.run.cli.format_numbers import age, human_bytes, human_count
from diloco.run.health_findings import grouped
from diloco.run.state import Finding, FragmentStatus, RunStatus
from diloco.run.timeseries import TimeSeries
from diloco.show.page import figures as drawn
from diloco.show.page import summary
from diloco.show.page.html_page import section, whole
from diloco.show.page.numbers import LANES, Shown
from diloco.show.page.summary import TEXT, SummaryTable
from diloco.show.page.svg import NOTHING, Markup, Panel, element, joined

ALERTS, FRAGMENTS, LEARNERS = 20, 24, 40


@dataclass(frozen=True)
class Drawing:
    """A figure of the page.

    Attributes:
        key: id of the figure's section.
        panels: returns the figure's panels; none if there is nothing to show.
        nothing: text in place of an empty figure.
    """

    key: str
    title: str
    caption: str
    panels: Callable[[Shown], Sequence[Panel]]
    nothing: str = "The tape has nothing of it."


DRAWINGS = (
    Drawing(
        "loss", "Is it learning?",
        "Loss of the updates that learners sent (each learner's, or of the eight that stand out; "
        "median, and the middle 80 % as a band), and of the global model on held-out data.",
        drawn.loss,
    ),
    Drawing(
        "timeline", "What each learner did",
        "A lane for each learner, with its merged updates below. The first lane has a mark for "
        "each new version of a fragment. A lane is lower where fewer of a learner's slices train.",
        drawn.timeline,
    ),
    Drawing(
        "time", "Where the learners' time went",
        "The share of each learner's time whose work is in the model is its goodput.",
        drawn.time_spent,
    ),
    Drawing(
        "throughput", "Tokens per second",
        "Trained, as updates announce it, and merged into the model. What is trained and not "
        "merged was rejected, lost with a learner, or is on its way.",
        drawn.throughput,
    ),
    Drawing(
        "traffic", "Bytes per second",
        "Of all learners together. Up by the sizes of shards; down as each live learner reads "
        "each record and delta once, without first views of those that join.",
        drawn.traffic,
    ),
    Drawing(
        "staleness", "How stale and how heavy updates are",
        "Staleness is how many versions came between the one an update was made on and the one "
        "it went into.",
        drawn.staleness,
    ),
    Drawing(
        "phases", "Anatomy of a round",
        "wait: no update is in, or the pace does not allow it yet; open: until the quorum; grace: "
        "for those that are slower; merge: the outer step; publish: storing the version and "
        "committing its record.",
        drawn.anatomy,
    ),
    Drawing(
        "agreement", "Do learners agree?",
        "Cosine between the updates that were merged in one round: 1 when they point the same "
        "way, 0 when they have nothing in common.",
        drawn.agreement, "No round merged two updates by radial averaging.",
    ),
    Drawing(
        "beside", "Is a learner apart from the others?",
        "The eight learners that stand out most by loss and norm. A learner whose loss or norm is "
        "several times the others', or whose updates point elsewhere, is looked into with diloco "
        "why RUN.",
        drawn.learner_panels,
    ),
    Drawing(
        "fragments", "Fragment by fragment",
        "How far an update moves its fragment in one inner step; and cosines as above: fragments "
        "that are averaged plainly, such as the embedding, have none.",
        drawn.fragments,
    ),
    Drawing(
        "rejected", "Rejected updates",
        "Updates that the aggregator did not merge, and why.",
        drawn.rejected, "No update was rejected.",
    ),
)  # fmt: skip

# Sections of a run in their order.
ORDER = (
    "alerts", "facts", *(drawing.key for drawing in DRAWINGS), "rounds", "learners", "metrics",
    "refused", "events", "sample", "settings",
)  # fmt: skip

Sections = dict[str, Markup]


def skeleton(run: str) -> str:
    """Returns the HTML of a served page, whose sections are empty until its script fills them."""
    head = joined(
        element("link", {"rel": "stylesheet", "href": "/page.css"}),
        element("script", {"src": "/theme.js"}),
        element("script", {"src": "/page.js", "defer": True}),
        element("script", {"src": "/live.js", "defer": True}),
    )
    header = joined(
        element("span", {"id": "state", "class": "pill"}, "connecting"),
        element("div", {"id": "progress"}),
        element("div", {"id": "about"}),
        element("div", {"id": "notice", "role": "status", "aria-live": "polite"}),
    )
    empty = [element("section", {"id": key, "hidden": True}) for key in ORDER]
    return whole(run, head, header, joined(*empty))


def now(status: RunStatus, series: TimeSeries, *, served: bool = True) -> Sections:
    """Returns the sections on a run's present state: progress, alerts and newest rounds.

    Args:
        status: the run's present status, or the last known one.
        series: the run's tape.
        served: whether the page is served, so that alerts can link to runbooks.
    """
    # The rounds of a run that has ended stay the newest.
    until_s = series.ends_s if status.state == "ended" else status.as_of_s
    chosen = sorted(status.fragments, key=lambda one: -one.version_s)[:FRAGMENTS]
    chosen.sort(key=lambda one: one.fragment)
    note = "Open, in grace, merged and published; a line: the record."
    if len(chosen) < len(status.fragments):
        note = f"{len(chosen)} of {len(status.fragments)} fragments: the longest without a version."
    panels = drawn.rounds(series, [one.fragment for one in chosen], until_s)
    return {
        "progress": _progress(status),
        "alerts": section("alerts", "Alerts", body=_alerts(status.alerts, series, served=served)),
        "rounds": section("rounds", "Rounds", note, panels=panels, table=_fragments(chosen)),
    }


def _progress(status: RunStatus) -> Markup:
    said = [f"step {status.global_step:,} of {status.steps:,}"]
    if status.state != "ended":
        said.append(f"{human_count(status.tokens_per_s)} tokens/s")
        said.append(status.pace)
    limit = f" of {human_bytes(status.tape_limit_bytes)}" if status.tape_limit_bytes else ""
    said.append(f"tape {human_bytes(status.tape_bytes)}{limit}")
    states = sorted({one.state for one in status.learners})
    counts = [sum(one.state == state for one in status.learners) for state in states]
    told = [f"{count:,} {state}" for state, count in zip(states, counts, strict=True)]
    if told:
        said.append(f"learners: {', '.join(told)}")
    done = min(status.global_step, status.steps)
    bar = {"max": max(status.steps, 1), "value": done, "aria-label": "Steps done"}
    text = element("span", {"id": "steps"}, " · ".join(said))
    return element("div", {"id": "progress"}, element("progress", bar), text)


def _alerts(found: Sequence[Finding], series: TimeSeries, *, served: bool) -> Markup:
    groups = grouped(found)
    if not groups:
        return element("p", {"class": "note"}, "Nothing is amiss.")
    more = len(groups) - ALERTS
    axis = Shown(series, [])
    lines = [_alert(one, axis, served=served) for one in groups[:ALERTS]]
    if more > 0:
        lines.append(element("li", {}, f"… and {more:,} more"))
    return element("ul", {"class": "alerts"}, *lines)


def _alert(one: Finding, axis: Shown, *, served: bool) -> Markup:
    parts: list[str] = [element("b", {}, one.severity)]
    parts.append(f" {one.about[:TEXT]}: {one.sentence[:TEXT]} ")
    if one.evidence:
        parts.append(element("span", {"class": "note"}, f"({one.evidence[:TEXT]}) "))
    if one.about.startswith("learner"):
        # The page's script moves the curves' cursor to this time.
        at = {}
        if one.since_s is not None:
            at = {"data-at": f"{axis.since(np.asarray([one.since_s]))[0]:g}"}
        parts.append(element("a", {"href": "#beside", **at}, "its curve"))
        parts.append(" ")
    if one.since is not None:
        told = f"since version {one.since}: diloco show RUN FRAGMENT@{one.since} "
        parts.append(element("code", {}, told))
    parts.append(element("span", {"class": "note"}, f"{one.advice[:TEXT]} "))
    if one.runbook:
        name = one.runbook.removeprefix("runbooks/")
        title = f"Runbook: {name.removesuffix('.md')}"
        parts.append(element("a", {"href": f"/runbooks/{name}"}, title) if served else title)
    return element("li", {"class": one.severity}, *parts)


def _fragments(found: Sequence[FragmentStatus]) -> SummaryTable:
    rows = tuple(
        (
            f"{one.fragment}", f"{one.version:,}", one.owner or "nobody", age(one.version_s),
            f"{one.round_updates} of {one.live_learners}",
            f"{one.waiting} for {age(one.waiting_s)}" if one.waiting else "none",
        )
        for one in found
    )  # fmt: skip
    columns = ("fragment", "version", "owner", "made ago", "updates merged", "waiting")
    return SummaryTable(columns, rows, frozenset({"fragment", "owner"}))


def figures(shown: Shown) -> Sections:
    """Returns the sections with a run's figures and tables, except the learners' table."""
    about = [element("p", {"class": "note"}, summary.subtitle(shown))]
    about += [element("p", {"class": "warning"}, text) for text in summary.warnings(shown)]
    parts = {"about": element("div", {"id": "about"}, *about), "facts": _facts(shown)}
    for one in DRAWINGS:
        panels = one.panels(shown)
        parts[one.key] = section(
            one.key, one.title, one.caption, panels=panels, nothing=one.nothing
        )
    if measured := summary.metrics(shown):
        note = (
            "Metrics that losses report besides the loss: moving averages, from the newest "
            "heartbeats. Global model: the newest, on held-out data."
        )
        parts["metrics"] = section("metrics", "Metrics", note, table=measured)
    if shown.series.refused:
        table = summary.refusals(shown)
        parts["refused"] = section("refused", "Rejected, word for word", "The newest.", table=table)
    parts["events"] = section("events", "What happened", "", table=summary.events(shown))
    if written := [score for score in shown.scores if score.text]:
        parts["sample"] = _sample(written[-1])
    note = "All of them, as they are now: those of the run's creation, with every change since."
    parts["settings"] = section("settings", "Settings", note, table=summary.settings(shown))
    return parts


def _facts(shown: Shown) -> Markup:
    told = [
        element("div", {}, element("dt", {}, fact.name),
                element("dd", {}, fact.value, element("small", {}, fact.note)))
        for fact in summary.facts(shown)
    ]  # fmt: skip
    return section("facts", "In short", body=element("dl", {}, *told))


def _sample(score: wire.Score) -> Markup:
    note = f"At step {score.global_step:,}, held-out loss {score.loss:.4g}."
    region = {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": "Sample"}
    text = element("pre", region, score.text)
    return section("sample", "What the model writes", note, body=text)


class Learners:
    """Makes the learners' section of a served page: `LEARNERS` learners at a time, found by name.

    Args:
        shown: the numbers of the run.
        status: the status of the run.
    """

    def __init__(self, shown: Shown, status: RunStatus) -> None:
        # Computed here, since pages are served while the columns grow.
        self._shown = shown
        self._table = summary.learners(shown, status.learners)
        self._lanes = {lane.learner: lane for lane in shown.lanes}

    def __call__(self, page: int, find: str) -> Markup:
        """Returns the section with one page of the learners whose names contain `find`.

        With more than `LANES` learners in the run, the section also has the lanes of those shown.

        Args:
            page: number of the page, from 0; a number beyond the last page gives the last.
            find: text to find, in upper or lower case.
        """
        rows = [row for row in self._table.rows if find.casefold() in row[0].casefold()]
        pages = max(1, math.ceil(len(rows) / LEARNERS))
        page = min(max(page, 0), pages - 1)
        some = rows[page * LEARNERS : (page + 1) * LEARNERS]
        lanes = [self._lanes[row[0]] for row in some if row[0] in self._lanes]
        panels = (
            [drawn.lanes_of(self._shown, lanes)] if len(self._lanes) > LANES and lanes else None
        )
        said = f"{page * LEARNERS + 1} to {page * LEARNERS + len(some)} of {len(rows):,}"
        tools = _tools(page, pages, said if some else "No learner of that name.")
        return learners(replace(self._table, rows=tuple(some)), tools, panels)


def learners(
    table: SummaryTable, tools: Markup = NOTHING, panels: Sequence[Panel] | None = None
) -> Markup:
    """Returns the learners' section of a page.

    Args:
        table: the table of learners.
        tools: markup above the table, to search and to turn pages.
        panels: panels of the learners' lanes; None: none.
    """
    note = (
        "Step time, loss and norm are medians. Sync stall: share of its time that synchronization "
        "took from training, as the newest life's heartbeats say."
    )
    return section("learners", "Learners", note, panels=panels, table=table, body=tools)


def _tools(page: int, pages: int, said: str) -> Markup:
    find = {"type": "search", "id": "find", "autocomplete": "off", "spellcheck": "false"}
    return element(
        "p",
        {"class": "tools"},
        element("label", {}, "Find ", element("input", find)),
        _turn("Previous", page - 1, page > 0),
        element("span", {"id": "page", "aria-live": "polite"}, said),
        _turn("Next", page + 1, page < pages - 1),
    )


def _turn(word: str, page: int, there: bool) -> Markup:
    attributes: dict[str, object] = {"type": "button", "data-page": page}
    return element("button", attributes if there else attributes | {"disabled": True}, word)
