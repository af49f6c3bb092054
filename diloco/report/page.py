"""The report as one HTML file that needs no network: text, tables, and figures within it.

Whatever comes from the run is escaped, and the page may load nothing and run nothing.
"""

import base64
from dataclasses import dataclass, field
from html import escape

_STYLE = """
:root { color-scheme: light dark;
  --text: light-dark(#111, #e6e8ea); --soft: light-dark(#444, #a5adb4);
  --page: light-dark(#fff, #121416); --line: light-dark(#ccc, #363c42); }
body { font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
  color: var(--text); background: var(--page); max-width: 62rem; margin: 2rem auto;
  padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .2rem; border-top: 1px solid var(--line);
  padding-top: .9rem; }
p { margin: .3rem 0 .8rem; max-width: 46rem; }
p.note { color: var(--soft); }
p.warning { border-left: 4px solid #D55E00; padding-left: .7rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5rem, 1fr));
  gap: .9rem 1.2rem; margin: 1.2rem 0; }
dt { color: var(--soft); font-size: .82rem; }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
dd small { font-weight: 400; font-size: .82rem; color: var(--soft); display: block; }
img { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums;
  width: 100%; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  vertical-align: top; white-space: nowrap; }
td.text:last-child { white-space: normal; }
th { border-bottom: 1px solid var(--text); font-weight: 600; }
td.text, th.text { text-align: left; }
div.table { overflow-x: auto; }
nav { font-size: .86rem; }
nav a { color: light-dark(#0072b2, #6cb8ea); margin-right: .9rem; }
footer { margin: 3rem 0 1rem; color: var(--soft); font-size: .82rem; }
/* Black on white turned about, hues kept: figures are drawn once. */
@media (prefers-color-scheme: dark) { img { filter: invert(.93) hue-rotate(180deg); } }
@media print {
  :root { color-scheme: light; }
  img { filter: none; }
  body { max-width: none; margin: 0; font-size: 10.5pt; }
  section { break-inside: avoid; }
  nav { display: none; }
}
"""


@dataclass(frozen=True)
class Fact:
    """One figure of the summary; `note` stands smaller below it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table; the columns named in `text` stand to the left, the others are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Section:
    """A part of the page: what is seen, a figure (SVG) or none, and a table or none."""

    key: str
    title: str
    caption: str
    figure: bytes | None = None
    table: Table | None = None


@dataclass(frozen=True)
class Page:
    """The whole report."""

    title: str
    subtitle: str
    facts: list[Fact]
    sections: list[Section]
    footer: str
    warnings: list[str] = field(default_factory=list)


def render(page: Page) -> str:
    """The page as HTML."""
    links = "".join(
        f'<a href="#{escape(section.key)}">{escape(section.title)}</a>' for section in page.sections
    )
    facts = "".join(_fact(fact) for fact in page.facts)
    warnings = "".join(f'<p class="warning">{escape(text)}</p>' for text in page.warnings)
    sections = "\n".join(_section(section) for section in page.sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(page.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>{escape(page.title)}</h1>
<p class="note">{escape(page.subtitle)}</p>
</header>
{warnings}
<dl>{facts}</dl>
<nav>{links}</nav>
{sections}
<footer>{escape(page.footer)}</footer>
</body>
</html>
"""


def _fact(fact: Fact) -> str:
    note = f"<small>{escape(fact.note)}</small>" if fact.note else ""
    return f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}{note}</dd></div>"


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>", f"<p>{escape(section.caption)}</p>"]
    if section.figure is not None:
        data = base64.b64encode(section.figure).decode()
        parts.append(f'<img alt="{escape(section.title)}" src="data:image/svg+xml;base64,{data}">')
    if section.table is not None:
        parts.append(_table(section.table))
    return f'<section id="{escape(section.key)}">\n' + "\n".join(parts) + "\n</section>"


def _table(table: Table) -> str:
    def cell(tag: str, column: str, value: str) -> str:
        kind = ' class="text"' if column in table.text else ""
        return f"<{tag}{kind}>{escape(value)}</{tag}>"

    head = "".join(cell("th", column, column) for column in table.columns)
    body = "\n".join(
        "<tr>" + "".join(map(cell, ["td"] * len(row), table.columns, row)) + "</tr>"
        for row in table.rows
    )
    return (
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )
