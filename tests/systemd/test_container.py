"""The units in a container, installed by the commands of docs/systemd.md: one scenario at a time.

It needs root and Debian's packages `systemd-container` and `debootstrap`; else it is skipped. RUN_UNITS is
the script that boots a throw-away copy of a root file system and runs a driver in it.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.py"))
TOOL = Path(os.environ.get("RUN_UNITS") or "none")
ROOTFS = Path(os.environ.get("ROOTFS") or ROOT / ".rootfs")
RELEASES = ("0.1.0", "0.2.0")
LIMIT_S = 840
# Sixteen processes compile, twice.
LIMITS_S = {"slice": 1800}


def why_not() -> str:
    """Returns the reason why no container can run here; '' if one can."""
    if not TOOL.exists():
        return "RUN_UNITS names no script that runs units in a container"
    if os.geteuid() != 0:
        return "only root can run a container"
    if shutil.which("systemd-nspawn") is None:
        return "there is no systemd-nspawn: Debian's package systemd-container"
    if not ROOTFS.exists() and shutil.which("debootstrap") is None:
        return f"there is neither {ROOTFS} nor debootstrap to make it"
    return ""


def make_rootfs() -> None:
    if not ROOTFS.exists():
        part = ROOTFS.with_name(ROOTFS.name + ".part")
        subprocess.run(
            ["debootstrap", "--variant=minbase",
             "--include=systemd,systemd-sysv,python3-minimal,libpython3-stdlib,nginx-light", "bookworm",
             str(part)],
            check=True,
        )  # fmt: skip
        part.rename(ROOTFS)


def make_release(folder: Path) -> None:
    """A virtual environment as the page has them, but that its packages and sources are bound."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / python / "site-packages"
    packages.mkdir(parents=True)
    (packages / "bound.pth").write_text("/opt/src\n/opt/site\n")
    (folder / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "python").symlink_to(f"/opt/python/bin/{python}")
    program = programs / "diloco"
    program.write_text(
        f"#!/opt/{folder.name}/bin/python\nfrom diloco.program import main\n\n"
        'if __name__ == "__main__":\n    main()\n'
    )
    program.chmod(0o755)
    server = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    assert server is not None
    shutil.copy(server, programs / "nats-server")


def make_sources(folder: Path) -> Path:
    """The repository as it is now, links and all: it may change while the container runs."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def binds(tmp_path: Path) -> list[str]:
    """Options that show the container our programs, read-only."""
    found = {
        make_sources(tmp_path / "src"): "/opt/src",
        Path(sysconfig.get_path("purelib")): "/opt/site",
        Path(sys.base_prefix): "/opt/python",
    }
    for version in RELEASES:
        release = tmp_path / "opt" / f"diloco-{version}"
        make_release(release)
        found[release] = f"/opt/{release.name}"
    return [f"--bind-ro={source}:{target}" for source, target in found.items()]


def boot(
    tmp_path: Path, driver: Path, *options: str, out: str = "out", limit_s: int = LIMIT_S
) -> str:
    """Boot a container and run a driver in it; what it has said."""
    units = tmp_path / "units"
    units.mkdir(exist_ok=True)
    # The tool copies some; the driver has the program write the real ones.
    (units / "none.service").write_text("[Service]\nExecStart=/bin/true\n")
    done = subprocess.run(
        ["bash", str(TOOL), str(ROOTFS), str(units), str(driver), str(tmp_path / out), *options],
        capture_output=True, text=True, check=False,
        env={**os.environ, "LIMIT_S": str(limit_s)},
    )  # fmt: skip
    print(done.stdout, done.stderr)
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(max(LIMITS_S.values()) + 60)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_units_do_their_work_in_a_container(tmp_path: Path, scenario: Path) -> None:
    make_rootfs()
    limit_s = LIMITS_S.get(scenario.stem, LIMIT_S)
    said = boot(tmp_path, scenario, *binds(tmp_path), limit_s=limit_s)
    assert said.rstrip().endswith("all passed")


def kept(tmp_path: Path) -> list[str]:
    """Options by which what the container writes stays, from boot to boot."""
    found = []
    for name in ("etc", "var", "srv", "opt", "root"):
        upper = tmp_path / "kept" / name
        upper.mkdir(parents=True)
        found.append(f"--overlay=+/{name}:{upper}:/{name}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_ten_shutdowns_lose_no_step(tmp_path: Path) -> None:
    make_rootfs()
    options = [*kept(tmp_path), *binds(tmp_path)]
    driver = Path(__file__).parent / "shutdown" / "machine.py"
    told = [boot(tmp_path, driver, *options, out=f"out-{n}") for n in range(11)]
    assert all("all passed" in said for said in told)
    assert "".join(told).count("left_unsent 0") == 20
