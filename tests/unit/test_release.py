"""How a release is made: from which interpreter, for which systems, and with which bytes."""

import tarfile
from pathlib import Path

import pytest

from diloco.infra import make_release
from diloco.infra.install_release import MANIFEST, ReleaseManifest, manifest_of

WHAT = ReleaseManifest(1, "0.1.0", "abc", "cpu", "x86_64", "2.35", "3.11.2", 3)


def interpreter(folder: Path, name: str = "python3.12") -> Path:
    for path in (f"bin/{name}", f"lib/{name}/os.py", f"lib/{name}/test/test_os.py",
                 f"lib/{name}/site-packages/pip.py", "lib/libpython3.12.so.1.0", "bin/python3-config",
                 "share/doc.txt"):  # fmt: skip
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("")
    return folder


def test_an_interpreter_is_its_program_and_its_library(tmp_path: Path) -> None:
    source, to = interpreter(tmp_path / "from"), tmp_path / "to"
    program = make_release._copy_interpreter(source, to)
    assert program == to / "bin/python3.12"
    found = {str(path.relative_to(to)) for path in to.rglob("*") if path.is_file()}
    assert found == {"bin/python3.12", "lib/python3.12/os.py", "lib/libpython3.12.so.1.0"}


@pytest.mark.parametrize("name", ["python3.10", "python2"])
def test_an_interpreter_that_is_too_old_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SystemExit, match=r"has no bin/python3\.11 or newer"):
        make_release._copy_interpreter(interpreter(tmp_path / "from", name), tmp_path / "to")


def test_an_interpreter_that_cannot_be_fetched_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real uv, and a port of this machine at which nobody listens in place of GitHub."""
    monkeypatch.setenv("UV_PYTHON_INSTALL_MIRROR", "http://127.0.0.1:9")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(SystemExit, match=r"^error: uv could not fetch .* INTERPRETER=/usr$"):
        make_release.brought(tmp_path)


def test_the_least_glibc_is_that_of_the_newest_symbol_that_is_needed(tmp_path: Path) -> None:
    elf, other = b"\x7fELF\0", b"text\0"
    needs = {
        "one.so": elf + b"\0GLIBC_2.2.5\0GLIBC_2.28\0",
        "two.so": elf + b"\0GLIBC_2.9\0GLIBC_PRIVATE\0GLIBCXX_3.4.30\0",
        "text.py": other + b"\0GLIBC_2.99\0",
        "table.so": elf + b" GLIBC_2.77 is no symbol\0",
    }
    paths = []
    for name, data in needs.items():
        (tmp_path / name).write_bytes(data)
        paths.append(tmp_path / name)
    assert make_release.least_glibc(paths) == "2.28"
    assert make_release.least_glibc([]) == "2.17"


def staged(folder: Path, mode: int) -> Path:
    stage = folder / "diloco"
    (stage / "bin").mkdir(parents=True)
    (stage / "bin/program").write_text("#!/bin/sh\n")
    (stage / "bin/program").chmod(mode)
    (stage / "bin/link").symlink_to("program")
    (stage / "text").write_text("one")
    (stage / "text").chmod(0o600)
    return stage


def test_the_same_files_make_the_same_bytes(tmp_path: Path) -> None:
    for name, mode in (("first", 0o755), ("second", 0o700)):
        make_release._pack(staged(tmp_path / name, mode), WHAT, tmp_path / f"{name}.tar.gz")
    first, second = (tmp_path / f"{name}.tar.gz" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert manifest_of(first) == WHAT
    with tarfile.open(first) as tar:
        entries = tar.getmembers()
    assert entries[0].name == MANIFEST
    modes = {entry.name.removeprefix("diloco/"): entry.mode for entry in entries}
    assert modes["bin/program"] == 0o755
    assert modes["text"] == 0o644
    assert {entry.uid for entry in entries} == {0}


def test_each_file_has_a_digest(tmp_path: Path) -> None:
    stage = staged(tmp_path, 0o755)
    make_release._pack(stage, WHAT, tmp_path / "release.tar.gz")
    lines = (stage / "digests").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["bin/program", "manifest.json", "text"]


def test_notes_of_the_installer_are_forgotten(tmp_path: Path) -> None:
    info = tmp_path / "diloco-0.1.0.dist-info"
    info.mkdir()
    (info / "direct_url.json").write_text("{}")
    (info / "RECORD").write_text(f"a.py,,\n{info.name}/direct_url.json,sha256=x,2\nb.py,,\n")
    make_release._forget(tmp_path, "direct_url.json")
    assert [path.name for path in info.iterdir()] == ["RECORD"]
    assert (info / "RECORD").read_text() == "a.py,,\nb.py,,\n"
