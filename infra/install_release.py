"""Reads releases, the archives that `make_release.py` makes, and installs them on a machine.

This file needs Python 3.10 and its standard library alone, as boot.py and join.py import it before
anything is installed.
"""

import hashlib
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

# The format of releases that this program understands; the first file of a release states its own.
FORMAT = 1
MANIFEST = "diloco/manifest.json"

# The journal's priority of an error, as in sd-daemon(3).
ERROR = "<3>"

# Seconds after its start for which the units of a new release are checked.
_TRIAL_S = 30

Run = Callable[[Sequence[str]], str]


class ReleaseRefused(Exception):  # noqa: N818 - no fault of this machine's
    """Raised for a release that this machine cannot use, or an argument; the text says why."""


class ReleaseManifest(NamedTuple):
    """`manifest.json`, the first file of a release.

    Attributes:
        format: number of the release's format; this program reads `FORMAT`.
        version, commit: the project's version and commit.
        kind: "cpu", "cuda" or "tpu".
        architecture: architecture of the release's programs, as `uname -m` prints it.
        glibc: version of the oldest glibc with which all its programs and libraries run.
        python: version of its interpreter.
        unpacked_bytes: total size of its files.
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
    """The releases on a machine, each in a folder `diloco-DIGEST` below `opt`.

    The link `diloco` names the release in use, `diloco-before` the previous one.

    Args:
        run: runs a command, and returns its output; raises if the command fails.
        opt: the folder of the releases.
    """

    def __init__(self, run: Run, opt: Path) -> None:
        self._run = run
        self._opt = opt

    @property
    def used(self) -> Path | None:
        """The folder of the release in use; None if none was installed."""
        return self._linked("diloco")

    def home(self, digest: str) -> Path:
        """Returns the folder for the release with this sha256; the folder need not exist."""
        return self._opt / f"diloco-{digest[:16]}"

    def archive(self, digest: str) -> Path:
        """Returns a path at which to store the archive with this sha256 until it is unpacked."""
        self._opt.mkdir(parents=True, exist_ok=True)
        return self._opt / f"diloco-{digest[:16]}.tar.gz"

    def unpack(self, archive: Path, digest: str, kind: str) -> Path:
        """Unpacks a release, and checks that its programs run; returns its folder.

        Args:
            archive: the release's archive.
            digest: sha256 of the archive, in hexadecimal, by which its folder is named.
            kind: kind of this machine: "cpu", "cuda" or "tpu".

        Raises:
            ReleaseRefused: this machine cannot use the release, and nothing has changed.
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
            raise ReleaseRefused(f"its programs do not run here: {error}") from error

    def install(self, home: Path) -> None:
        """Links `diloco` to the release's folder `home`, and installs the release's units.

        The units name `home`. Restarting them is up to the caller.
        """
        self.use(home)
        # Overwrites units without asking, as no person may be there; a unit that was edited is
        # saved next to the new one.
        programs = f"{home}/bin"
        self._run([f"{programs}/diloco", "host", "units", "--programs", programs, "--overwrite"])
        self._run(["systemd-sysusers"])
        self._run(["systemctl", "daemon-reload"])

    def settle(self, home: Path, before: Path | None, units: Sequence[str]) -> Path:
        """Watches new units for some seconds; goes back to the previous release if one fails.

        Also removes older releases.

        Args:
            home: folder of the release whose units were just started.
            before: folder of the previously used release; None or `home`: nothing is watched.
            units: names of the units.

        Returns:
            The folder of the release that is now in use.
        """
        if before not in (None, home) and not self._on_trial(units):
            say(f"{home.name} does not start: back to {before.name}")
            self.install(before)
            self._run(["systemctl", "restart", "--no-block", *units])
            home = before
        self.tidy()
        say(f"done, with {home.name}")
        return home

    def _on_trial(self, units: Sequence[str]) -> bool:
        """Watches the units for `_TRIAL_S` seconds; returns False if one fails or is restarted."""
        for _ in range(_TRIAL_S):
            self._run(["sleep", "1"])
            told = self._run(["systemctl", "show", "-p", "ActiveState,SubState", *units]).split()
            if {"ActiveState=failed", "SubState=auto-restart"} & set(told):
                return False
        return True

    def use(self, home: Path) -> None:
        """Links `diloco` to the folder `home`, and `diloco-before` to the previously used one."""
        if (used := self.used) is not None and used != home:
            self._link("diloco-before", used)
        self._link("diloco", home)

    def tidy(self) -> None:
        """Removes all releases but those that `diloco` and `diloco-before` link to."""
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


def manifest_of(archive: Path) -> ReleaseManifest:
    """Returns the manifest of a release, given the release's archive.

    Raises:
        ReleaseRefused: the archive is not a release, or has a format unknown to this program.
    """
    try:
        with tarfile.open(archive, "r|gz") as tar:
            first = tar.next()
            file = tar.extractfile(first) if first and first.name == MANIFEST else None
            document = json.loads(file.read(1 << 16)) if file else {}
        if document.get("format") != FORMAT:
            raise ReleaseRefused(
                f"{archive.name} is no release of format {FORMAT}; make it with: make release"
            )
        return ReleaseManifest(**{name: document[name] for name in ReleaseManifest._fields})
    except (OSError, EOFError, tarfile.TarError, ValueError, KeyError, AttributeError) as error:
        raise ReleaseRefused(
            f"{archive.name} is no release ({error}); make it with: make release"
        ) from error


def digest_of(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal; the file may be larger than memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def _check(manifest: ReleaseManifest, kind: str, free_bytes: int) -> None:
    here, glibc = platform.machine(), _glibc()
    if manifest.kind != kind:
        raise ReleaseRefused(
            f"the release is for {manifest.kind}, and this machine is of kind {kind}"
        )
    if manifest.architecture != here:
        raise ReleaseRefused(
            f"the release is for {manifest.architecture}, and this machine is {here}"
        )
    if _numbers(manifest.glibc) > _numbers(glibc):
        raise ReleaseRefused(
            f"the release needs glibc {manifest.glibc}, and this machine has {glibc}: take a newer "
            "image, or an older interpreter for the release"
        )
    if free_bytes < manifest.unpacked_bytes:
        raise ReleaseRefused(
            f"the release takes {manifest.unpacked_bytes >> 20} MiB, and the disk has "
            f"{free_bytes >> 20}: give the machine a larger one"
        )


def _glibc() -> str:
    return (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0").split()[-1]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def write(path: Path, data: bytes, mode: int) -> bool:
    """Writes a file completely or not at all; makes its folder if necessary.

    Args:
        path: the file.
        data: the file's whole contents.
        mode: the file's permissions, such as 0o600.

    Returns:
        True if contents or permissions have changed.
    """
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
    """Runs a command and returns its stdout; its stderr goes to this program's stderr.

    Raises:
        subprocess.CalledProcessError: the command fails.
    """
    say(" ".join(command))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return done.stdout


def say(text: str, priority: str = "") -> None:
    """Prints a line to stdout, and so to the machine's journal; `priority` as `ERROR`."""
    sys.stdout.write(f"{priority}diloco boot: {text}\n")
    sys.stdout.flush()
