"""The site: it builds with every link checked, and its pages fetch nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a browser loads by itself; a link that is clicked is another thing.
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|"
                    r"<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//")  # fmt: skip
FETCHED = re.compile(r"url\([\"']?(?:https?:)?//|@import")


def build(into: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(into)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("site")
    built = build(into)
    assert built.returncode == 0, built.stderr
    return into


def test_every_page_is_there(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    pages += [path.relative_to(ROOT) for path in (ROOT / "runbooks").glob("*.md")]
    assert len(pages) > 60
    for page in pages:
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (site / page.parent / name).is_file(), page


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not LOADED.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not FETCHED.search(style.read_text()), style


def test_no_code_of_the_generator_is_published(site: Path) -> None:
    assert list(site.rglob("*.py")) == []
