"""MkDocs hooks: pages for the runbooks, and links that hold in repository and site.

Pages link to each other as files of the repository, so that they can be read there. On the site the
runbooks lie below docs/, and what is no page of it cannot be linked to.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Where a section's pages lie in the repository.
FOLDERS = {"runbooks": ROOT / "runbooks", "adr": ROOT / "docs" / "adr"}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put all pages of a folder where the navigation names it."""
    assert config.nav is not None
    config.nav = [
        {title: _pages(value) if isinstance(value, str) and value in FOLDERS else value}
        for entry in config.nav
        for title, value in entry.items()
    ]
    return config


def _pages(folder: str) -> list[Any]:
    names = sorted(path.name for path in FOLDERS[folder].glob("*.md"))
    return [f"{folder}/README.md", *(f"{folder}/{name}" for name in names if name != "README.md")]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the runbooks."""
    for path in sorted(FOLDERS["runbooks"].glob("*.md")):
        uri = f"runbooks/{path.name}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links from where the page lies in the repository to where it lies on the site."""
    here = page.file.src_uri
    source = here if here.startswith("runbooks/") else f"docs/{here}"
    return LINK.sub(lambda found: _link(found["text"], found["target"], source, here), markdown)


def _link(text: str, target: str, source: str, here: str) -> str:
    path, hash_, anchor = target.partition("#")
    if "://" in target or not path:
        return f"[{text}]({target})"
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if found.startswith("docs/"):
        wanted = found.removeprefix("docs/")
    elif found.partition("/")[0] == "runbooks":
        wanted = found
    else:
        return text
    if wanted in FOLDERS:
        wanted = f"{wanted}/README.md"
    return f"[{text}]({posixpath.relpath(wanted, posixpath.dirname(here) or '.')}{hash_}{anchor})"
