"""Releases: one archive with all that a machine needs to run this project, without fetching more.

    python -m diloco.infra.release --kind cpu [--interpreter DIR] [--out build]

Below `diloco/` it contains `manifest.json`, which is first; an interpreter, `python/`, with the
packages of locks/runtime.lock, of its kind (locks/cuda.lock, tpu.lock), of the user's task
(locks/task.lock) and this project, with its units; `bin/diloco`, `bin/python` and `bin/nats-
server`; the locks; and `digests`, a sha256 of each file. It can be unpacked anywhere. The same
commit, interpreter and packages give the same bytes.

On a machine this module reads and installs releases. That needs Python 3.10 and its standard
library alone, as boot.py and join.py run it before anything is installed.
"""

import argparse
import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# The format of releases that this program understands; the first file of a release states its own.
FORMAT = 1
MANIFEST = "diloco/manifest.json"

# Seconds for which the units of a new release are watched.
_TRIAL_S = 30

Run = Callable[[Sequence[str]], str]
ROOT = Path(__file__).resolve().parents[1]
KINDS = ("cpu", "cuda", "tpu")
# The Python that uv fetches if no interpreter is named; it runs with glibc 2.17 and later.
BROUGHT = "3.12"
# Parts of an interpreter that no daemon imports, or that belong to its original system.
_LEFT_OUT = shutil.ignore_patterns(
    "test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "__pycache__",
    "site-packages", "dist-packages", "config-*", "*.a", "sitecustomize.py", "EXTERNALLY-MANAGED",
)  # fmt: skip
_LAUNCHER = """#!/bin/sh
exec "$(dirname "$(readlink -f "$0")")/python" -s -P -m diloco "$@"
"""
# A version of glibc's symbols in a program or library, as the dynamic linker reads it.
_GLIBC = re.compile(rb"\0GLIBC_(\d+)\.(\d+)(?=[.\0])")
# Programs for the interpreter: print its package folder, and its own and the project's version.
_WHERE = "import site; print(site.getsitepackages()[-1])"
_WHICH = """import platform
from importlib import metadata

print(metadata.version("diloco"), platform.python_version())
"""
# Pure Python packages that are published without a wheel.
_SOURCES = ("--no-binary", "nkeys")
_INTERPRETER = re.compile(r"python3\.\d+")


class ReleaseRefused(Exception):  # noqa: N818 - no fault of this machine's
    """A release that this machine cannot use; the text says why."""


class ReleaseManifest(NamedTuple):
    """The first file of a release.

    Attributes:
        format: a number that tells which programs can unpack it.
        version, commit: the project's version and commit.
        kind: "cpu", "cuda" or "tpu".
        architecture: architecture of its programs, as `uname -m` prints it.
        glibc: the oldest glibc with which all its programs and libraries run.
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
    """The releases below `opt`, each in a folder named by its digest, with links to two of them.

    Args:
        run: runs a command.
        opt: the folder of the releases.
    """

    def __init__(self, run: Run, opt: Path) -> None:
        self._run = run
        self._opt = opt

    @property
    def used(self) -> Path | None:
        """The release that the link `diloco` names; None if there is none."""
        return self._linked("diloco")

    def home(self, digest: str) -> Path:
        """Returns the folder of the release with this sha256, which may not exist."""
        return self._opt / f"diloco-{digest[:16]}"

    def archive(self, digest: str) -> Path:
        """Returns the path for the archive of a release until it is unpacked."""
        self._opt.mkdir(parents=True, exist_ok=True)
        return self._opt / f"diloco-{digest[:16]}.tar.gz"

    def unpack(self, archive: Path, digest: str, kind: str) -> Path:
        """Unpacks a release, and checks that its programs run; returns its folder.

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
        """Links `diloco` to the release, and writes its units, which name its folder."""
        self.use(home)
        # Overwrites units without asking, as nobody is there; an edited one is saved next to it.
        programs = f"{home}/bin"
        self._run([f"{programs}/diloco", "host", "units", "--programs", programs, "--overwrite"])
        self._run(["systemd-sysusers"])
        self._run(["systemctl", "daemon-reload"])

    def settle(self, home: Path, before: Path | None, units: Sequence[str]) -> Path:
        """Goes back to the previous release if the units do not start; returns the one in use."""
        if before not in (None, home) and not self._on_trial(units):
            say(f"{home.name} does not start: back to {before.name}")
            self.install(before)
            self._run(["systemctl", "restart", "--no-block", *units])
            home = before
        self.tidy()
        say(f"done, with {home.name}")
        return home

    def _on_trial(self, units: Sequence[str]) -> bool:
        """True if no unit fails while it is watched; units may run, wait or have ended."""
        for _ in range(_TRIAL_S):
            self._run(["sleep", "1"])
            told = self._run(["systemctl", "show", "-p", "ActiveState,SubState", *units]).split()
            if {"ActiveState=failed", "SubState=auto-restart"} & set(told):
                return False
        return True

    def use(self, home: Path) -> None:
        """Links `diloco` to this release, and `diloco-before` to the previous one."""
        if (used := self.used) is not None and used != home:
            self._link("diloco-before", used)
        self._link("diloco", home)

    def tidy(self) -> None:
        """Removes all releases but the two that are linked to."""
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
    """Reads the manifest of a release.

    Raises:
        ReleaseRefused: it is no release, or one that this program does not understand.
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
    """Returns the sha256 of a file, which may be larger than memory."""
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
    """Writes a file completely or not at all, with mode `mode`; returns True if it changed."""
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
    """Runs a command and returns its output; its stderr goes to this program's."""
    say(" ".join(command))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    return done.stdout


def say(text: str) -> None:
    """Prints a text for readers of the machine's journal."""
    sys.stdout.write(f"diloco boot: {text}\n")
    sys.stdout.flush()


# Making one


def make(kind: str, interpreter: Path, out: Path) -> Path:
    """Makes the release of a kind; returns the archive's path."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix="release-") as folder:
        stage = Path(folder) / "diloco"
        python = _copy_interpreter(interpreter, stage / "python")
        _install(kind, python, stage)
        _link_programs(python, stage)
        _compile(python, stage)
        manifest = _describe(kind, python, stage)
        name = f"diloco-{manifest.version}-{manifest.commit}-{kind}-{manifest.architecture}.tar.gz"
        part = Path(folder) / name
        _pack(stage, manifest, part)
        part.replace(out / name)
    write_join(out / "join")
    return out / name


def write_join(path: Path) -> None:
    """Writes the program that lets a machine join a run, as one file that Python can run."""
    texts = {"__main__.py": "from diloco.infra.join import main\n\nmain()\n"}
    texts |= dict.fromkeys(("diloco/__init__.py", "diloco/infra/__init__.py"), "")
    for name in ("join.py", "release.py"):
        texts[f"diloco/infra/{name}"] = (ROOT / "infra" / name).read_text()
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name), text)


def brought(folder: Path) -> Path:
    """Fetches an interpreter with uv, which needs only glibc of the system; returns its folder."""
    _run(_uv(), "python", "install", "--install-dir", folder, "--no-bin", BROUGHT)
    return max(folder.glob(f"cpython-{BROUGHT}.*"))


def _copy_interpreter(source: Path, to: Path) -> Path:
    """Copies `bin/python3.N` and its library; returns the path of the copied program.

    Raises:
        SystemExit: there is none, or it is older than the project needs.
    """
    found = sorted(
        (path for path in (source / "bin").glob("python3.*") if _INTERPRETER.fullmatch(path.name)),
        key=lambda path: int(path.name.partition(".")[2]),
    )
    if not found or int(found[-1].name.partition(".")[2]) < 11:
        sys.exit(f"error: {source} has no bin/python3.11 or newer; hint: --interpreter /usr")
    program = found[-1]
    (to / "bin").mkdir(parents=True)
    shutil.copy2(program, to / "bin" / program.name)
    library = to / "lib" / program.name
    shutil.copytree(source / "lib" / program.name, library, ignore=_LEFT_OUT)
    for shared in (source / "lib").glob("libpython3*.so*"):
        shutil.copy2(shared, to / "lib" / shared.name)
    return to / "bin" / program.name


def _install(kind: str, python: Path, stage: Path) -> None:
    """Installs the packages where this interpreter looks for them, and copies the locks."""
    site = Path(_run(python, "-s", "-P", "-c", _WHERE).strip())
    names = ["runtime", *([kind] if kind != "cpu" else []), "task"]
    locks = [ROOT / f"locks/{name}.lock" for name in names]
    locks = [lock for lock in locks if lock.exists()]
    into = ("--python", python, "--target", site, "--quiet", "--no-config", "--link-mode", "copy")
    only = ("--only-binary", ":all:", *_SOURCES, "--require-hashes")
    wanted = [word for lock in locks for word in ("-r", lock)]
    _run(_uv(), "pip", "install", *into, *only, *wanted)
    with tempfile.TemporaryDirectory(dir=stage) as folder:
        wheel = _wheel(Path(folder))
        _run(_uv(), "pip", "install", *into, "--no-deps", wheel)
    (stage / "locks").mkdir()
    for lock in locks:
        shutil.copy2(lock, stage / "locks")
    (stage / "bin").mkdir()
    shutil.move(site / "bin/nats-server", stage / "bin/nats-server")
    # Scripts with the interpreter's original path, and notes of the wheel's origin.
    shutil.rmtree(site / "bin")
    _forget(site, "direct_url.json", "uv_cache.json")


def _forget(site: Path, *names: str) -> None:
    """Removes files of the installer that differ from day to day."""
    for name in names:
        for path in site.glob(f"*.dist-info/{name}"):
            path.unlink()
            record = path.with_name("RECORD")
            lines = record.read_text().splitlines(keepends=True)
            kept = (one for one in lines if not one.startswith(f"{path.parent.name}/{name},"))
            record.write_text("".join(kept))


def _wheel(folder: Path) -> Path:
    """Builds the wheel of this project from the working tree, without files that git ignores."""
    listed = _run("git", "-C", ROOT, "ls-files", "--cached", "-z").split("\0")
    source = folder / "source"
    for name in filter(None, listed):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    _run(*pip, "-w", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _link_programs(python: Path, stage: Path) -> None:
    programs = stage / "bin"
    (programs / "python").symlink_to(f"../python/bin/{python.name}")
    (programs / "diloco").write_text(_LAUNCHER)
    for name in ("diloco", "nats-server"):
        (programs / name).chmod(0o755)


def _compile(python: Path, stage: Path) -> None:
    """Compiles all bytecode, as daemons may not write where they are installed."""
    where = ("-s", stage, "-p", "/opt/diloco", "--invalidation-mode", "unchecked-hash")
    # Some packages contain templates that end in .py and are no Python.
    _run(python, "-m", "compileall", "-q", "-q", *where, stage / "python/lib", check=False)


def _describe(kind: str, python: Path, stage: Path) -> ReleaseManifest:
    files = _files(stage)
    version, interpreter = _run(python, "-s", "-P", "-c", _WHICH).split()
    commit = _run("git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12").strip()
    return ReleaseManifest(
        format=FORMAT, version=version, commit=commit, kind=kind,
        architecture=platform.machine(), glibc=least_glibc(files), python=interpreter,
        unpacked_bytes=sum(path.stat().st_size for path in files),
    )  # fmt: skip


def least_glibc(files: Sequence[Path]) -> str:
    """Returns the newest version of glibc's symbols that one of the files needs."""
    found = {(2, 17)}
    for path in files:
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
            data = file.read()
        found |= {(int(major), int(minor)) for major, minor in _GLIBC.findall(data)}
    return ".".join(map(str, max(found)))


def _files(stage: Path) -> list[Path]:
    return sorted(path for path in stage.rglob("*") if path.is_file() and not path.is_symlink())


def _pack(stage: Path, manifest: ReleaseManifest, archive: Path) -> None:
    """Writes the archive: the manifest first, then all files by name, without times and owners."""
    (stage / "manifest.json").write_text(json.dumps(manifest._asdict(), indent=2) + "\n")
    (stage / "digests").write_text("".join(_digests(stage)))
    paths = sorted(
        path for path in stage.rglob("*") if path.name != "manifest.json" or path.parent != stage
    )
    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", 6, file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|") as tar,
    ):
        for path in [stage / "manifest.json", *paths]:
            tar.add(path, str(path.relative_to(stage.parent)), recursive=False, filter=_plain)


def _digests(stage: Path) -> Iterator[str]:
    for path in _files(stage):
        yield f"{digest_of(path)}  {path.relative_to(stage)}\n"


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = "root"
    entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
    return entry


def _uv() -> Path:
    return Path(sys.executable).parent / "uv"


def _run(*command: str | Path, check: bool = True) -> str:
    done = subprocess.run(  # noqa: S603 - our own words
        [str(word) for word in command], check=check, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def main() -> None:
    """Makes a release, and prints its path, size and digest."""
    parser = argparse.ArgumentParser(description="Make a release: docs/release.md")
    parser.add_argument("--kind", choices=KINDS, default="cpu")
    parser.add_argument("--interpreter", type=Path, help="a folder with bin/python3.N and lib")
    parser.add_argument("--out", type=Path, default=ROOT / "build")
    options = parser.parse_args()
    interpreter = options.interpreter or brought(options.out / "pythons")
    archive = make(options.kind, interpreter, options.out)
    size_mb = archive.stat().st_size / 1e6
    sys.stdout.write(f"{archive}\n{size_mb:.0f} MB, sha256 {digest_of(archive)}\n")


if __name__ == "__main__":
    main()
