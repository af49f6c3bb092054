"""The units of infra/systemd: what systemd says of them, and how they do in a container.

The container needs root, Debian's packages `systemd-container` and `debootstrap`, and a script of
this project's workplace that is not part of the repository; elsewhere that test is skipped.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from diloco.common.errors import ConfigError
from diloco.operate.units import BACKOFF, install_units, render_units

ROOT = Path(__file__).parents[2]
TOOL = ROOT.parent / "shared" / "tools" / "systemd-nspawn" / "run_units.sh"
ROOTFS = Path(os.environ.get("ROOTFS") or ROOT / ".rootfs")
MIRROR = "http://deb.debian.org/debian"
EXPOSED = {"diloco-aggregator.service": 1.5}
MOST_EXPOSED = 2.0
# Of systemd 250 and later, or of 254.
TOO_NEW = ("%d", "RestartSteps", "RestartMaxDelaySec", "SetCredential", "ImportCredential")
UNITS = sorted(
    path for path in (ROOT / "infra" / "systemd").iterdir() if path.suffix in (".service", ".timer")
)
SERVICES = [path for path in UNITS if path.suffix == ".service"]
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze"
)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with something in place of the programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("diloco", "nats-server", "python"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


@needs_systemd
@pytest.mark.parametrize("credentials", [True, False])
def test_systemd_has_nothing_to_say(tmp_path: Path, programs: Path, *, credentials: bool) -> None:
    units = tmp_path / "units"
    install_units(units, programs, credentials=credentials, dry_run=False)
    files = [str(path) for path in units.iterdir() if path.suffix in (".service", ".timer")]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout + done.stderr == ""


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.name)
def test_units_expose_little(unit: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=100", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found.group(1)) <= EXPOSED.get(unit.name, MOST_EXPOSED)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_are_of_systemd_249(unit: Path) -> None:
    settings = [line for line in unit.read_text().splitlines() if not line.startswith("#")]
    assert not [line for line in settings for word in TOO_NEW if word in line]


def test_newer_systemd_backs_off(programs: Path) -> None:
    files = render_units(programs, credentials=True, backoff=True)
    assert files["diloco-learner@.service.d/10-backoff.conf"] == BACKOFF
    assert not [name for name in render_units(programs, credentials=True, backoff=False)
                if name.endswith(".d/10-backoff.conf")]  # fmt: skip


def test_units_start_the_program_that_installed_them(tmp_path: Path, programs: Path) -> None:
    units = tmp_path / "units"
    assert install_units(units, programs, credentials=True, dry_run=True)
    assert not units.exists()
    written = install_units(units, programs, credentials=False, dry_run=False)
    assert {path.name for path in written} >= {path.name for path in UNITS}
    text = (units / "diloco-aggregator.service").read_text()
    assert f"ExecStart={programs}/diloco aggregator" in text
    assert "/opt/diloco" not in text
    assert "LoadCredential" not in text
    assert "DILOCO_BUS_CREDENTIALS" not in text


def test_programs_that_units_cannot_start_are_refused(tmp_path: Path, programs: Path) -> None:
    with pytest.raises(ConfigError, match="there is no program"):
        install_units(tmp_path, tmp_path / "nowhere", credentials=True, dry_run=True)
    (programs / "python").unlink()
    (programs / "python").symlink_to("/home/somebody/python")
    with pytest.raises(ConfigError, match="below a home folder"):
        install_units(tmp_path, programs, credentials=True, dry_run=True)
    (programs / "python").unlink()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        install_units(blocked, programs, credentials=True, dry_run=False)


def why_not() -> str:
    """What the container lacks here; '' if nothing."""
    if not TOOL.exists():
        return "the script that runs units in a container is not here"
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
             "--include=systemd,systemd-sysv,python3-minimal,libpython3-stdlib", "bookworm",
             str(part), MIRROR],
            check=True,
        )  # fmt: skip
        part.rename(ROOTFS)


def make_programs(folder: Path) -> None:
    """What the container has as /opt/diloco: a launcher, and places to bind the rest to."""
    for name in ("bin", "src", "site", "tests", "python"):
        (folder / name).mkdir(parents=True)
    launcher = folder / "bin" / "diloco"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = "/opt/diloco/src:/opt/diloco/src/tests/systemd:/opt/diloco/src/tests/integration"
    launcher.write_text(
        "#!/bin/sh\nexport PYTHONDONTWRITEBYTECODE=1\n"
        f"export PYTHONPATH={paths}:/opt/diloco/site LD_LIBRARY_PATH=/opt/diloco/python/lib\n"
        f'exec /opt/diloco/python/bin/{python} -m diloco "$@"\n'
    )
    launcher.chmod(0o755)
    (folder / "bin" / "python").symlink_to(f"/opt/diloco/python/bin/{python}")
    server = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
    assert server is not None
    shutil.copy(server, folder / "bin" / "nats-server")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_units_do_their_work_in_a_container(tmp_path: Path) -> None:
    make_rootfs()
    make_programs(tmp_path / "opt")
    units, out = tmp_path / "units", tmp_path / "out"
    units.mkdir()
    # The tool copies some; the driver writes the real ones itself.
    (units / "none.service").write_text("[Service]\nExecStart=/bin/true\n")
    binds = {
        tmp_path / "opt": "/opt/diloco",
        ROOT: "/opt/diloco/src",
        Path(sysconfig.get_path("purelib")): "/opt/diloco/site",
        Path(sys.base_prefix): "/opt/diloco/python",
    }
    done = subprocess.run(
        ["bash", str(TOOL), str(ROOTFS), str(units), str(Path(__file__).with_name("driver.py")),
         str(out), *(f"--bind-ro={source}:{target}" for source, target in binds.items())],
        capture_output=True, text=True, check=False, env={**os.environ, "LIMIT_S": "840"},
    )  # fmt: skip
    print(done.stdout, done.stderr)
    assert done.stdout.rstrip().endswith("all passed")
