"""Bundles on a machine: what one is, whether it runs here, and which of them is used.

Python 3.10 and its standard library alone: boot.py runs it before anything is installed.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

# What of a bundle this program understands; the first file of each says which it is.
FORMAT = 1
MANIFEST = "diloco/manifest.json"

# For so long the units of a new release are watched.
_TRIAL_S = 30

Run = Callable[[Sequence[str]], str]


class Refused(Exception):  # noqa: N818 - no fault of this machine's
    """A bundle that this machine cannot use; the text says why."""


class Manifest(NamedTuple):
    """The first file of a bundle.

    Attributes:
        format: which programs can unpack it.
        version, commit: of the project.
        kind: "cpu", "cuda" or "tpu".
        architecture: of its programs, as `uname -m` has it.
        glibc: the least one that all its programs and libraries run with.
        python: version of its interpreter.
        unpacked_bytes: of all its files.
    """

    format: int
    version: str
    commit: str
    kind: str
    architecture: str
    glibc: str
    python: str
    unpacked_bytes: int


class Releases:
    """Bundles below `opt`, each unpacked into a folder of its digest; one is used, one was before.

    Args:
        run: runs a command.
        opt: where they are.
    """

    def __init__(self, run: Run, opt: Path) -> None:
        self._run = run
        self._opt = opt

    @property
    def used(self) -> Path | None:
        """The release that `diloco` is a link to."""
        return self._linked("diloco")

    def home(self, digest: str) -> Path:
        """Where the bundle of this sha256 is, or would be."""
        return self._opt / f"diloco-{digest[:16]}"

    def archive(self, digest: str) -> Path:
        """Where its archive is while it is unpacked."""
        self._opt.mkdir(parents=True, exist_ok=True)
        return self._opt / f"diloco-{digest[:16]}.tar.gz"

    def unpack(self, archive: Path, digest: str, kind: str) -> Path:
        """Unpack a bundle beside the others, and see whether its programs run.

        Raises:
            Refused: this machine cannot use it. Nothing has changed.
        """
        home = self.home(digest)
        part = home.with_suffix(".part")
        try:
            _check(manifest_of(archive), kind, shutil.disk_usage(self._opt).free)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            self._run(["tar", "-xzf", str(archive), "-C", str(part), "--strip-components=1",
                       "--no-same-owner"])  # fmt: skip
            self._try(part)
            part.rename(home)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return home

    def _try(self, home: Path) -> None:
        programs = home / "bin"
        try:
            self._run(["sh", "-c", f"cd {home} && sha256sum --check --strict --quiet digests"])
            self._run([f"{programs}/diloco", "--version"])
            self._run(
                [f"{programs}/python", "-s", "-P", "-c", "import jax, nats, google.cloud.storage"]
            )
            self._run([f"{programs}/nats-server", "--version"])
        except (OSError, subprocess.CalledProcessError) as error:
            raise Refused(f"its programs do not run here: {error}") from error

    def install(self, home: Path) -> None:
        """Have it be `diloco`, and write its units, which name its folder."""
        self.use(home)
        # Who has edited a unit here finds the text beside it; nobody is there to be asked.
        programs = f"{home}/bin"
        self._run([f"{programs}/diloco", "install-units", "--programs", programs, "--overwrite"])
        self._run(["systemd-sysusers"])
        self._run(["systemctl", "daemon-reload"])

    def settle(self, home: Path, before: Path | None, units: Sequence[str]) -> Path:
        """See whether the units of a new release start, and go back if not; the one that stays."""
        if before not in (None, home) and not self._on_trial(units):
            say(f"{home.name} does not start: back to {before.name}")
            self.install(before)
            self._run(["systemctl", "restart", "--no-block", *units])
            home = before
        self.tidy()
        say(f"done, with {home.name}")
        return home

    def _on_trial(self, units: Sequence[str]) -> bool:
        """Whether no unit ends in failure while it is watched: it may run, wait or have ended."""
        for _ in range(_TRIAL_S):
            self._run(["sleep", "1"])
            told = self._run(["systemctl", "show", "-p", "ActiveState,SubState", *units]).split()
            if {"ActiveState=failed", "SubState=auto-restart"} & set(told):
                return False
        return True

    def use(self, home: Path) -> None:
        """Have `diloco` be this release, and `diloco-before` the one before."""
        if (used := self.used) is not None and used != home:
            self._link("diloco-before", used)
        self._link("diloco", home)

    def tidy(self) -> None:
        """Remove all but the two that are linked to."""
        kept = {self._linked("diloco"), self._linked("diloco-before")}
        for home in self._opt.glob("diloco-" + "[0-9a-f]" * 16):
            if home not in kept:
                shutil.rmtree(home)

    def _linked(self, name: str) -> Path | None:
        link = self._opt / name
        return self._opt / link.readlink() if link.is_symlink() else None

    def _link(self, name: str, home: Path) -> None:
        part = self._opt / f"{name}.part"
        part.unlink(missing_ok=True)
        part.symlink_to(home.name)
        part.replace(self._opt / name)


def manifest_of(archive: Path) -> Manifest:
    """What a bundle is.

    Raises:
        Refused: it is none, or one that this program does not know.
    """
    try:
        with tarfile.open(archive, "r|gz") as tar:
            first = tar.next()
            file = tar.extractfile(first) if first and first.name == MANIFEST else None
            document = json.loads(file.read(1 << 16)) if file else {}
        if document.get("format") != FORMAT:
            raise Refused(
                f"{archive.name} is no bundle of format {FORMAT}; make it with: make bundle"
            )
        return Manifest(**{name: document[name] for name in Manifest._fields})
    except (OSError, EOFError, tarfile.TarError, ValueError, KeyError, AttributeError) as error:
        raise Refused(
            f"{archive.name} is no bundle ({error}); make it with: make bundle"
        ) from error


def _check(manifest: Manifest, kind: str, free_bytes: int) -> None:
    here, glibc = platform.machine(), _glibc()
    if manifest.kind != kind:
        raise Refused(f"the bundle is for {manifest.kind}, and this machine is of kind {kind}")
    if manifest.architecture != here:
        raise Refused(f"the bundle is for {manifest.architecture}, and this machine is {here}")
    if _numbers(manifest.glibc) > _numbers(glibc):
        raise Refused(
            f"the bundle needs glibc {manifest.glibc}, and this machine has {glibc}: take a newer "
            "image, or an older interpreter for the bundle"
        )
    if free_bytes < manifest.unpacked_bytes:
        raise Refused(
            f"the bundle takes {manifest.unpacked_bytes >> 20} MiB, and the disk has "
            f"{free_bytes >> 20}: give the machine a larger one"
        )


def _glibc() -> str:
    return (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0").split()[-1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def write(path: Path, data: bytes, mode: int) -> bool:
    """Write a file whole or not at all, never open to more than `mode`; whether it was another."""
    if path.exists() and path.read_bytes() == data and path.stat().st_mode & 0o777 == mode:
        return False
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755 if mode == 0o644 else 0o700)
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
    part.replace(path)
    return True


def run_command(command: Sequence[str]) -> str:
    """Run a command; what it says on stderr goes where this program's goes."""
    say(" ".join(command))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return done.stdout


def say(text: str) -> None:
    """Tell it to whoever reads the machine's journal."""
    sys.stdout.write(f"diloco boot: {text}\n")
    sys.stdout.flush()
