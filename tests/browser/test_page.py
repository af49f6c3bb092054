"""The live page in a real Chromium: `make test-browser` installs what drives it.

Without a Chromium, Node or the tools of package.json these are skipped; what the page is sent is
tested without them (tests/unit/test_dashboard.py).
"""

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from runlab import Lab
from test_dashboard import beat, score

from bench.tapes import Forger
from diloco.common.protocol.errors import BusUnavailableError
from diloco.run.model.evaluate import keep
from diloco.show.page.following import LiveRun, served

HERE = Path(__file__).parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NODE = shutil.which("node")
MISSING = [
    what
    for what, there in {
        "no Chromium": CHROMIUM,
        "no Node": NODE,
        "no tools, which make test-browser installs": (HERE / "node_modules").is_dir(),
    }.items()
    if not there
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} here")
HOSTILE = "<img src=x onerror=alert(1)>"


def look(url: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [str(NODE), str(HERE / "check_page.mjs"), url, str(CHROMIUM), str(folder)],
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def run_with_everything(folder: Path) -> dict[str, Any]:
    """Looked at while versions are made: three learners, one of whom says what no page may obey."""
    lab = Lab(fragments=2)
    await lab.create()
    forger = Forger(lab.context, ["a", "b", "c"], 97, 40)
    await forger.forge(120)
    await keep(lab.context, score())
    await beat(lab, "a", forger.lives["a"], state="failed", trouble=HOSTILE)
    for name in ("b", "c"):
        await beat(lab, name, forger.lives[name])
    page = served(LiveRun(lab.context, 0.0), port=0, again="diloco dashboard lab")
    async with page as url, lab.aggregating():
        await lab.join("real")
        looking = asyncio.ensure_future(asyncio.to_thread(look, url, folder))
        while not looking.done():
            await lab.send_many("real", 1)
            await asyncio.sleep(1.0)
        return looking.result()


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    found = asyncio.run(run_with_everything(tmp_path))
    assert found["errors"] == []
    assert found["foreign"] == []
    assert found["barriers"] == []
    assert found["wide"] == []
    assert found["moved"] == ["#steps", "#facts", "#rounds"], "they move with the run"
    assert {"theme", "find", "SVG of: Is it learning?"} <= set(found["reached"])
    assert found["dead"] == [], "what has the focus shows it"
    assert (found["theme"], found["remembered"]) == ("light", "light")
    assert "training" in found["readout"]
    assert found["none"] == "No learner of that name."
    kinds = {kind: what for kind, (what, _) in found["kept"].items()}
    assert kinds == {"SVG": "image/svg+xml", "PNG": "image/png", "CSV": "text/csv"}
    assert found["kept"]["CSV"][1] == "panel,series,row,x,to,y,low,high,shade"
    assert found["kept"]["SVG"][1].startswith("<svg xmlns=")
    assert found["settings"] > 20
    assert found["runbook"] == "A disk is full"


class Looker:
    """A Chromium with the page open, that waits for what the page says of itself."""

    def __init__(self, url: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [str(NODE), str(HERE / "away.mjs"), url, str(CHROMIUM), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def until_drawn(self) -> None:
        assert self._line() == "drawn\n"

    def see(self, state: str) -> dict[str, Any]:
        """Returns the page's texts once it calls itself so; they must be fit to be read."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{state}\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line())
        assert (found["faults"], found["barriers"], found["wide"]) == ([], [], []), state
        return found

    def end(self) -> None:
        self._process.communicate(timeout=300)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


async def see_it_go(folder: Path) -> dict[str, dict[str, Any]]:
    """The bus goes away and comes back, the run is removed, the page's server ends."""
    lab = Lab(fragments=2)
    await lab.create()
    forger = Forger(lab.context, ["a", "b"], 97, 40)
    await forger.forge(60)
    for name, life in forger.lives.items():
        await beat(lab, name, life)
    found = {}
    run = LiveRun(lab.context, 0.0)
    async with served(run, port=0, again="diloco dashboard lab") as url:
        looker = Looker(url, folder)
        await asyncio.to_thread(looker.until_drawn)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lab.bus, "filled", away)
            found["old"] = await asyncio.to_thread(looker.see, "out of touch")
        found["back"] = await asyncio.to_thread(looker.see, "under way")
        await lab.bus.remove_stream(lab.context.tape)
        found["removed"] = await asyncio.to_thread(looker.see, "not followed")
    found["gone"] = await asyncio.to_thread(looker.see, "disconnected")
    await asyncio.to_thread(looker.end)
    return found


async def away(*_: object) -> None:
    raise BusUnavailableError("away")


def test_the_page_says_what_has_gone_away(tmp_path: Path) -> None:
    found = asyncio.run(see_it_go(tmp_path))
    assert "The bus does not answer" in found["old"]["notice"]
    assert found["back"]["notice"] == ""
    assert "not followed any more" in found["removed"]["notice"]
    assert "diloco dashboard lab" in found["gone"]["notice"]
