"""The units of infra/systemd: what systemd says of them, and how they are written."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.common.process.config import Config
from diloco.common.protocol.errors import ConfigError, Exit
from diloco.operate.units import (
    PAUSES,
    UnitOptions,
    install_units,
    is_edited,
    marked,
    render,
)

ROOT = Path(__file__).parents[2]
EXPOSED = {"diloco-aggregator.service": 1.5}
MOST_EXPOSED = 2.0
# Of systemd 250 and later, or of 254.
TOO_NEW = ("%d", "RestartSteps", "RestartMaxDelaySec", "Encrypted", "ImportCredential")
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
@pytest.mark.parametrize(
    ("credentials", "store"), [(True, None), (False, None), (True, Path("/srv/diloco"))]
)
def test_systemd_has_nothing_to_say(
    tmp_path: Path, programs: Path, *, credentials: bool, store: Path | None
) -> None:
    units = tmp_path / "units"
    install_units(
        UnitOptions(folder=units, programs=programs, credentials=credentials, store_folder=store)
    )
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


@pytest.mark.parametrize("unit", SERVICES, ids=lambda path: path.name)
def test_units_set_keys_that_there_are(unit: Path) -> None:
    for section, key in re.findall(r"DILOCO_([A-Z]+)_([A-Z_]+)=", unit.read_text()):
        known = Config.model_fields[section.lower()].annotation
        assert known is not None
        assert key.lower() in known.model_fields


def test_restarts_pause_longer_and_longer(programs: Path) -> None:
    files = render(UnitOptions(), programs)
    for unit in ("diloco-aggregator.service", "diloco-learner@.service", "nats-server.service"):
        assert files[f"{unit}.d/10-pauses.conf"] == PAUSES


@pytest.mark.parametrize(
    ("restarts", "lived_s", "pause_s"),
    [(0, 1, 0), (1, 1, 0), (2, 1, 5), (3, 599, 10), (12, 1, 55), (90, 1, 55), (90, 600, 0)],
)
def test_how_long_a_restart_pauses(
    tmp_path: Path, restarts: int, lived_s: int, pause_s: int
) -> None:
    """The very command, with something in place of `systemctl` and `sleep`."""
    (command,) = re.findall(r"'(.*)'", PAUSES.replace("\\\n", " "), re.DOTALL)
    answers = {
        "systemctl": f"echo NRestarts={restarts}; echo ExecMainStartTimestampMonotonic=7000000; "
        f"echo ExecMainExitTimestampMonotonic={(lived_s + 7) * 1000000}",
        "sleep": 'echo "slept $1"',
    }
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", command.replace("$$", "$").replace("%n", "unit.service")],
        capture_output=True, text=True, check=True, env={"PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.stderr == ""
    assert f"slept {pause_s}\n" in done.stdout if pause_s else done.stdout == ""


def test_memory_is_bounded_and_nats_goes_last(programs: Path) -> None:
    files = render(UnitOptions(), programs)
    worth = {}
    for unit in ("nats-server", "diloco-aggregator", "diloco-learner@"):
        (worth[unit],) = re.findall(
            r"^OOMScoreAdjust=(.*)$", files[f"{unit}.service"], re.MULTILINE
        )
    assert sorted(worth, key=lambda unit: int(worth[unit])) == [*worth]
    for unit in SERVICES:
        if unit.name.startswith("diloco-"):
            assert "MemoryMax=90%" in files[unit.name]


def test_a_supervisor_outlives_its_training_process(programs: Path) -> None:
    """By default systemd ends all of a unit once the kernel has killed one of its processes."""
    text = render(UnitOptions(), programs)["diloco-learner@.service"]
    assert "\nOOMPolicy=continue\n" in text
    assert "\nKillMode=mixed\n" in text  # SIGTERM reaches the supervisor alone


def test_units_start_the_program_that_installed_them(tmp_path: Path, programs: Path) -> None:
    units = tmp_path / "units"
    wanted = UnitOptions(folder=units, programs=programs, credentials=False)
    assert install_units(replace(wanted, dry_run=True))[0]
    assert not units.exists()
    written, _ = install_units(wanted)
    assert {path.name for path in written} >= {path.name for path in UNITS}
    text = (units / "diloco-aggregator.service").read_text()
    assert f"ExecStart={programs}/diloco aggregator" in text
    assert "/opt/diloco/" not in text
    assert "Credential=" not in text
    assert "DILOCO_BUS_CREDENTIALS" not in text


def test_units_stay_with_the_release_that_a_link_led_to(tmp_path: Path, programs: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(programs)
    install_units(UnitOptions(folder=tmp_path / "units", programs=link))
    text = (tmp_path / "units" / "diloco-aggregator.service").read_text()
    assert f"ExecStart={programs}/diloco aggregator" in text


def test_what_a_restart_cannot_mend_is_not_restarted(programs: Path) -> None:
    files = render(UnitOptions(), programs)
    for unit in ("diloco-aggregator.service", "diloco-learner@.service"):
        (line,) = re.findall(r"^RestartPreventExitStatus=(.*)$", files[unit], re.MULTILINE)
        statuses = {int(status) for status in line.split()}
        assert {Exit.CONFIG, Exit.SHUT_OUT, Exit.TASK} <= statuses
        assert not {Exit.ENDED, Exit.FAILED, Exit.PASSING, Exit.NO_RUN} & statuses


def test_one_unit_at_a_time(tmp_path: Path, programs: Path) -> None:
    units = ["diloco-learner@a", "diloco-gc.timer"]
    written, _ = install_units(UnitOptions(folder=tmp_path, programs=programs, units=units))
    assert {path.name for path in written if not path.name.endswith(".conf")} == {
        "diloco-learner@.service", "diloco-gc.service", "diloco-gc.timer"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="no unit 'diloco-learner'") as error:
        install_units(UnitOptions(folder=tmp_path, programs=programs, units=["diloco-learner"]))
    assert "diloco-learner@" in (error.value.hint or "")


def test_edited_units_are_named_and_nothing_is_written(tmp_path: Path, programs: Path) -> None:
    wanted = UnitOptions(folder=tmp_path, programs=programs)
    install_units(wanted)
    install_units(wanted)
    unit, other = tmp_path / "diloco-aggregator.service", tmp_path / "diloco-gc.service"
    edited = unit.read_text() + "CPUQuota=50%\n"
    unit.write_text(edited)
    other.write_text(marked("of an older release\n"))
    own = tmp_path / "diloco-aggregator.service.d" / "mine.conf"
    own.write_text("[Service]\nNice=5\n")
    with pytest.raises(ConfigError, match=rf"edited since .*: {re.escape(str(unit))}\n"):
        install_units(wanted)
    assert unit.read_text() == edited
    assert "older release" in other.read_text()
    _, kept = install_units(replace(wanted, overwrite=True))
    assert not is_edited(unit.read_text())
    assert kept == {unit: tmp_path / "diloco-aggregator.service.edited"}
    assert kept[unit].read_text() == edited
    assert "Nice=5" in own.read_text()


def test_a_store_folder_has_a_user(tmp_path: Path, programs: Path) -> None:
    install_units(UnitOptions(folder=tmp_path, programs=programs, store_folder=Path("/srv/store")))
    assert "u diloco " in (tmp_path / "diloco-store-sysusers.conf").read_text()
    assert (
        "d /srv/store 2750 diloco diloco" in (tmp_path / "diloco-store-tmpfiles.conf").read_text()
    )
    for unit in ("diloco-aggregator", "diloco-learner@", "diloco-gc", "diloco-checkpoint"):
        text = (tmp_path / f"{unit}.service.d" / "20-store.conf").read_text()
        assert "User=diloco" in text
        assert "ReadWritePaths=/srv/store" in text
    for folder in ("srv/store", "/home/store", "/tmp/store", "/srv/a store"):
        with pytest.raises(ConfigError, match="store's folder"):
            install_units(
                UnitOptions(folder=tmp_path, programs=programs, store_folder=Path(folder))
            )


def test_programs_that_units_cannot_start_are_refused(tmp_path: Path, programs: Path) -> None:
    with pytest.raises(ConfigError, match="there is no program"):
        install_units(UnitOptions(folder=tmp_path, programs=tmp_path / "nowhere", dry_run=True))
    (programs / "python").unlink()
    (programs / "python").symlink_to("/home/somebody/python")
    with pytest.raises(ConfigError, match="below a home folder"):
        install_units(UnitOptions(folder=tmp_path, programs=programs, dry_run=True))
    (programs / "python").unlink()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"cannot (write|read)"):
        install_units(UnitOptions(folder=blocked, programs=programs))
