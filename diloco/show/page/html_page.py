"""Makes HTML pages of sections, and writes them to files.

A served page and a saved one have the same sections. Scripts and styles of a served page come from
the server. Those of a saved page are in the file, with a Content-Security-Policy that allows only
their hashes; so a saved page needs no network.
"""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from diloco.common.protocol.errors import ConfigError
from diloco.show.page.summary import SummaryTable
from diloco.show.page.svg import (
    NOTHING,
    WIDTH,
    Axis,
    Markup,
    Panel,
    PlotMark,
    data_block,
    draw,
    element,
    joined,
)

SAVES = ("SVG", "PNG", "CSV")


def section(
    key: str,
    title: str,
    note: str = "",
    *,
    panels: Sequence[Panel] | None = None,
    table: SummaryTable | None = None,
    body: Markup = NOTHING,
    nothing: str = "Nothing yet.",
) -> Markup:
    """Returns a section of the page: a heading, then what is given of `body`, figure and table.

    Args:
        key: the section's id in the page.
        title: the heading.
        note: text below the heading; left out if `panels` is empty.
        panels: the panels of the figure; None: no figure.
        table: the table; None: no table.
        body: finished markup.
        nothing: text in place of the figure if `panels` is empty.
    """
    head = element("h2", {"id": f"{key}-title"}, title)
    parts = [element("div", {"class": "head"}, head, _saves(title)) if panels else head]
    if note and panels != []:
        parts.append(element("p", {"class": "note"}, note))
    parts.append(body)
    if panels is not None:
        parts.append(_figure(key, panels) if panels else element("p", {"class": "note"}, nothing))
    if table is not None:
        parts.append(_table(title, table))
    wide = "" if panels and len(panels) == 1 and panels[0].width == WIDTH else "wide"
    attributes = {"id": key, "class": wide, "aria-labelledby": f"{key}-title"}
    return element("section", attributes, *parts)


def _saves(title: str) -> Markup:
    buttons = [
        element(
            "button",
            {"type": "button", "data-save": kind, "aria-label": f"{kind} of: {title}"},
            kind,
        )
        for kind in SAVES
    ]
    return element("span", {"class": "saves"}, *buttons)


def _figure(key: str, panels: Sequence[Panel]) -> Markup:
    drawn = [draw(panel, f"{key}-{place}") for place, panel in enumerate(panels)]
    pictures = [
        element(
            "div",
            {"class": f"panel {'broad' if panel.width > WIDTH else ''}", "tabindex": 0,
             "role": "img", "aria-label": f"{one.words or key}. Arrow keys read values."},
            one.svg,
        )
        for panel, one in zip(panels, drawn, strict=True)
    ]  # fmt: skip
    return joined(
        element("div", {"class": "panels"}, *pictures),
        element("p", {"class": "readout", "aria-live": "polite"}),
        data_block([one.data for one in drawn]),
    )


def _table(title: str, table: SummaryTable) -> Markup:
    def row(tag: str, cells: Sequence[str]) -> Markup:
        kinds = [{"class": "text"} if name in table.text else {} for name in table.columns]
        return element("tr", {}, *map(element, [tag] * len(cells), kinds, cells))

    head = element("thead", {}, row("th", table.columns))
    body = element("tbody", {}, *[row("td", cells) for cells in table.rows])
    region = {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": f"Table: {title}"}
    return element("div", region, element("table", {}, head, body))


def saved_page(title: str, about: Markup, sections: Iterable[Markup]) -> str:
    """Returns an HTML page that loads nothing, and runs only the scripts that it contains.

    Args:
        title: title and heading of the page.
        about: markup in the page's head, below the heading.
        sections: the sections, in their order.
    """
    style, theme, script = (asset(name) for name in ("page.css", "theme.js", "page.js"))
    policy = (
        f"default-src 'none'; img-src data: blob:; style-src {_hash(style)}; "
        f"script-src {_hash(theme)} {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    head = joined(
        element("meta", {"http-equiv": "Content-Security-Policy", "content": policy}),
        element("style", {}, Markup(style)),
        element("script", {}, Markup(theme)),
    )
    return whole(title, head, about, joined(*sections), element("script", {}, Markup(script)))


def whole(title: str, head: Markup, header: Markup, main: Markup, end: Markup = NOTHING) -> str:
    """Returns an HTML document with the heading `title` and the choice of a theme.

    Args:
        title: title and heading of the page.
        head: further markup of the element `head`.
        header: markup of the element `header`, after the heading.
        main: markup of the element `main`.
        end: markup after the element `main`.
    """
    meta = joined(
        element("meta", {"charset": "utf-8"}),
        head,
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("link", {"rel": "icon", "href": "data:,"}),
        element("title", {}, title),
    )
    body = joined(
        element("header", {}, element("h1", {"id": "run"}, title), _themes(), header),
        element("main", {}, main),
        end,
    )
    page = element("html", {"lang": "en"}, element("head", {}, meta), element("body", {}, body))
    return f"<!doctype html>\n{page}\n"


def _themes() -> Markup:
    choices = [
        element("label", {}, element("input", {"type": "radio", "name": "theme", "value": value}),
                element("span", {}, value.capitalize()))
        for value in ("auto", "light", "dark")
    ]  # fmt: skip
    legend = element("legend", {"class": "hidden"}, "Colours")
    return element("fieldset", {"id": "theme"}, legend, *choices)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def asset(name: str) -> str:
    """Returns the text of a file in the folder `assets`, such as page.css."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def write_figure(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Writes an HTML page with one figure to `path`; errors as `write`."""
    write(path, saved_page(title, NOTHING, [section("figure", "Figure", panels=panels)]))


def write_curves(title: str, marks: Sequence[PlotMark], y: str, path: Path) -> None:
    """Writes an HTML page with curves over the global step; errors as `write`.

    Args:
        title: title of the page.
        marks: the curves.
        y: label of the vertical axis.
        path: path of the page.
    """
    x = Axis(label="global step")
    write_figure(title, [Panel(marks=marks, x=x, y=Axis(label=y), width=800, height=400)], path)


def check_name(path: Path | None) -> None:
    """Refuses a file name that does not end in .html; None is allowed.

    Raises:
        ConfigError: the name does not end in .html.
    """
    if path is not None and path.suffix != ".html":
        raise ConfigError(
            f"{str(path)!r} is to be a page, and its name does not end in .html",
            hint="figures are drawn on a page, which saves each as SVG, PNG or CSV: give FILE.html",
        )


def write(path: Path, html: str) -> Path:
    """Writes an HTML page, and makes its folder if it is missing; returns `path`.

    Raises:
        ConfigError: the file cannot be written, or its name does not end in .html.
    """
    check_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the page {str(path)!r}: {error}") from error
    return path
