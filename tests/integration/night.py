"""An operator at night, with nothing but the runbooks: each command is read from the page.

Units of systemd are processes of the test: on "two machines", one with NATS and the aggregators,
one with the learners. What stands for a name on the pages is put in its place, and nothing else.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from harness import Process, World
from runbook_pages import ROOT, commands
from typer.testing import CliRunner

from diloco.common.process.nats_server import NatsServer
from diloco.common.protocol.errors import DilocoError
from diloco.program import app


class Said(NamedTuple):
    """The outcome of a command: its exit status and its output."""

    status: int
    text: str


@dataclass
class Night:
    """The state of the run that an operator faces.

    Attributes:
        world: the run, and the processes of its units.
        server: NATS.
        places: what to put for RUN, NAME, DIR ...
        slices: of a unit that runs on several machines, the options of each.
        units: what runs, or ran last: of a unit on several machines `UNIT.0`, `UNIT.1` ...
        programs: of a release, by its folder on the pages: where its programs are.
        releases: of a unit that a release has written: where those are. Others are of this tree.
    """

    world: World
    server: NatsServer
    places: dict[str, str] = field(default_factory=dict)
    slices: dict[str, list[list[str]]] = field(default_factory=dict)
    units: dict[str, Process] = field(default_factory=dict)
    programs: dict[str, Path] = field(default_factory=dict)
    releases: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        run = str(self.world.config_path)
        auth = str(self.world.folder / "auth")
        self.places = {"RUN": run, "FILE": run, "DIR": auth, "NAME": "learner-0", **self.places}

    def do(self, page: str, begins: str, **places: str) -> str:
        """Give the page's command that begins so; what it prints. The page must have it."""
        done = self.ask(page, begins, **places)
        assert done.status == 0, f"{begins}: {done.text}"
        return done.text

    def ask(self, page: str, begins: str, **places: str) -> "Said":
        """As `do`, whatever becomes of it."""
        found = [words for words in commands(ROOT / "runbooks" / f"{page}.md")
                 if shlex.join(words).startswith(begins)]  # fmt: skip
        assert found, f"{page}.md has no command {begins!r} any more"
        words = [self._put(word, {**self.places, **places}) for word in found[0]]
        if words[0] == "systemctl":
            return Said(0, self._systemctl(words[1], words[-1]))
        if words[0] == "journalctl":
            return Said(0, self._journal(words[words.index("-u") + 1]))
        if words[1:3] == ["host", "units"]:
            return Said(0, self._install_unit(words[0].removesuffix("/bin/diloco"), words[3]))
        return self.run(words[1:])

    def run(self, words: list[str]) -> "Said":
        """`diloco WORDS...` where nobody sits at the terminal: a question has no answer."""
        done = CliRunner().invoke(app, words, env={"COLUMNS": "250"}, input="")
        error = done.exception
        if isinstance(error, DilocoError):
            return Said(int(error.status), f"{done.output}{error.message}\n{error.hint}")
        assert error is None or isinstance(error, SystemExit), f"{words}: {error!r}"
        return Said(done.exit_code, done.output)

    @staticmethod
    def _put(word: str, places: dict[str, str]) -> str:
        """A word of a page with what stands for a name put in its place."""
        return re.sub(r"(?<![A-Za-z])[A-Z]+(?![A-Za-z])", lambda m: places.get(m[0], m[0]), word)

    # Units

    def _systemctl(self, verb: str, unit: str) -> str:
        if unit == "nats-server":
            return self._nats(verb)
        there = self._instances(unit)
        if verb in ("stop", "restart", "disable"):
            ending = [self.units.pop(one) for one in there if one in self.units]
            for process in ending:
                process.terminate()
            for process in ending:
                process.wait()
        if verb in ("start", "restart", "enable"):
            for one in there:
                if one not in self.units or not self.units[one].running:
                    self.units[one] = self._start(one)
        return ""

    def _journal(self, unit: str) -> str:
        return "\n".join(self.units[one].log() for one in self._instances(unit))

    def _instances(self, unit: str) -> list[str]:
        """The unit by the machines on which it runs."""
        if unit not in self.slices:
            return [unit]
        return [f"{unit}.{machine}" for machine in range(len(self.slices[unit]))]

    def _nats(self, verb: str) -> str:
        if verb in ("stop", "restart"):
            self.server.stop()
        if verb in ("start", "restart", "enable") and not self.server.running:
            self.server.start()
        return ""

    def _install_unit(self, release: str, unit: str) -> str:
        """From its next start on the unit's programs are the release's: units name their folder."""
        self.releases[unit.rstrip("@")] = self.programs[release]
        return ""

    def _start(self, one: str) -> Process:
        unit, _, machine = one.partition(".")
        name, _, instance = unit.partition("@")
        programs = self.releases.get(name)
        python = programs / "python" if programs is not None else None
        if name == "diloco-aggregator":
            return self.world.aggregator(python=python)
        assert name == "diloco-learner", unit
        options = self.slices[unit][int(machine)] if machine else []
        return self.world.learner(instance, options, python=python)
