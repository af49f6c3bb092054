"""The kept list of planted bugs, and a copy of the tree with one of them."""

import hashlib
import shutil
import subprocess
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")


class DriftError(Exception):
    """A mutant does not fit the code any more."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One planted bug.

    Attributes:
        name: unique; `breaks` says which rule it breaks.
        file: in which; `old` stands there exactly once, and becomes `new`.
        tests: asked first.
        equivalent: why nothing can tell it from the code; "" if something must.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    def source(self, root: Path) -> str:
        """The file with the bug in it.

        Raises:
            DriftError: it cannot be planted.
        """
        text = (root / self.file).read_text()
        count = text.count(self.old)
        if count != 1:
            raise DriftError(
                f"mutant {self.name!r}: expected its old line once in {self.file}, found {count}: "
                f"bring {LIST.name} up to date with\n{self.old}"
            )
        return text.replace(self.old, self.new)

    @property
    def digest(self) -> str:
        """Of the bug and of what is asked first."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()[:16]


def load(path: Path = LIST) -> list[Mutant]:
    """The kept list.

    Raises:
        DriftError: two have one name, or a test is not there.
    """
    entries = tomllib.loads(path.read_text())["mutant"]
    found = [Mutant(**{**entry, "tests": tuple(entry.get("tests", ()))}) for entry in entries]
    names = [mutant.name for mutant in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise DriftError(f"two mutants have one name: {sorted(twice)}")
    missing = {test for one in found for test in one.tests if not (ROOT / test).exists()}
    if missing:
        raise DriftError(f"mutants name tests that are not there: {sorted(missing)}")
    return found


def tracked(root: Path = ROOT) -> list[str]:
    """Files of the working tree that belong to it, new ones with them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [
        name
        for name in listed.splitlines()
        if (root / name).is_symlink() or (root / name).is_file()
    ]


def tree_digest(root: Path = ROOT) -> str:
    """Names the working tree as it is: the commit, and what has changed since."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True).stdout

    commit = git("rev-parse", "--short=10", "HEAD").decode().strip()
    changes = git("diff", "HEAD", "--", ".") + git("ls-files", "--others", "--exclude-standard")
    return commit + (f"-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else "")


def plant(mutant: Mutant, folder: Path, root: Path = ROOT) -> None:
    """Make a copy of the tree with the bug.

    No links: who edits the tree meanwhile changes nothing that is being asked.

    Raises:
        DriftError: it cannot be planted.
    """
    source = mutant.source(root)
    for name in tracked(root):
        there, here = root / name, folder / name
        here.parent.mkdir(parents=True, exist_ok=True)
        if there.is_symlink():
            here.symlink_to(there.readlink())
        else:
            shutil.copyfile(there, here)
    (folder / mutant.file).write_text(source)
