"""Renders runbooks as HTML with markdown-it; raw HTML in them is escaped."""

from html import escape
from importlib.resources import files

from markdown_it import MarkdownIt
from markdown_it.token import Token


def runbook_names() -> frozenset[str]:
    """Returns the file names of the runbooks, such as disk-full.md."""
    folder = files("diloco.runbooks")
    return frozenset(entry.name for entry in folder.iterdir() if entry.name.endswith(".md"))


def render(name: str) -> str:
    """Returns a runbook as an HTML document; `name` is one of `runbook_names`."""
    text = files("diloco.runbooks").joinpath(name).read_text(encoding="utf-8")
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(text)
    known = runbook_names()
    for token in tokens:
        _keep_links(token, known)
    title = next((t.content for t in tokens if t.type == "inline"), name)
    body = parser.renderer.render(tokens, parser.options, {})
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/page.css">
<script src="/theme.js"></script>
<title>{escape(title)}</title>
</head>
<body>
<main class="runbook">
<p><a href="/">The run</a></p>
{body}
</main>
</body>
</html>
"""


def _keep_links(token: Token, known: frozenset[str]) -> None:
    """Directs links to other runbooks to the server; turns all other links into plain text."""
    depth: list[bool] = []
    for part in token.children or []:
        if part.type == "link_open":
            target = str(part.attrs.get("href", "")).partition("#")[0]
            part.attrs["href"] = f"/runbooks/{target}"
            depth.append(target in known)
        if part.type in ("link_open", "link_close") and not depth[-1]:
            part.tag, part.attrs = "span", {}
        if part.type == "link_close":
            depth.pop()
