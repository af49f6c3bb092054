"""The wheel and the sdist, installed outside the tree, and what they are without it.

Both are built from an archive of the working tree, made and unpacked as docs/provision.md and
infra/boot.py do; links in `diloco/` to the folders at the top have to hold on all these ways. The
environments share the packages of this one, but not the project: that is a wheel's own.
"""

import json
import subprocess
import sys
import tarfile
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from built import ROOT, build_wheel, install, run, source_of_tree

pytestmark = pytest.mark.slow

OWN_TASK = """
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.shapes import WIDTH

from diloco import Task, TensorHint, adamw, warmup_cosine


def build(*, steps, seed):
    def batches(learner, position):
        while True:
            rng = np.random.default_rng([seed, zlib.crc32(learner.encode()), position])
            yield rng.normal(size=(8, WIDTH)).astype(np.float32)
            position += 1

    def loss(params, batch, key=None):
        return jnp.mean((params["w"] - 1 + 0.1 * batch) ** 2), {}

    return Task(
        init=lambda key: {"w": jax.random.normal(key, (WIDTH,))}, loss=loss, batches=batches,
        tokens_per_batch=8, optimizer=adamw(weight_decay=0.0),
        evaluate=lambda params: float(loss(params, np.zeros((1, WIDTH), np.float32))[0]),
        schedule=warmup_cosine(steps=steps, peak=0.05, warmup_steps=2),
        hint=lambda name, shape: TensorHint(merge="average"),
    )
"""
SMALL = ("--learners", "2", "--steps", "32", "--kill", "none", "--set", "sync.interval_steps=8",
         "--set", "sync.min_steps=4")  # fmt: skip
EVERY_HELP = """
import sys
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner
from diloco.program import app

def paths(command, *before):
    yield before
    if isinstance(command, TyperGroup):
        for name, part in command.commands.items():
            yield from paths(part, *before, name)

for path in paths(get_command(app)):
    found = CliRunner().invoke(app, [*path, "--help"])
    assert found.exit_code == 0, (path, found.output)
assert "jax" not in sys.modules
"""


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_of_tree(tmp_path_factory.mktemp("archive"))


@pytest.fixture(scope="session")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(to)!r})"
    run(sys.executable, "-c", code, cwd=source)
    (archive,) = to.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="session")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel, outside the tree."""
    return install(wheel, tmp_path_factory.mktemp("installed") / "environment")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A user's folder, whose files have the names of ours and of the standard library's."""
    for name in ("common", "learner", "aggregator", "infra", "diloco"):
        (tmp_path / name).mkdir()
    (tmp_path / "common" / "shapes.py").write_text("WIDTH = 48")
    (tmp_path / "learner" / "model.py").write_text(OWN_TASK)
    (tmp_path / "random.py").write_text("raise RuntimeError('nobody imports this')")
    return tmp_path


def contents(wheel: Path) -> dict[str, str]:
    """Digests of its files by name, but for those that list or date the others."""
    with zipfile.ZipFile(wheel) as file:
        names = [name for name in file.namelist() if not name.endswith(("RECORD", "/"))]
        return {name: sha256(file.read(name)).hexdigest() for name in names}


def tracked(*folders: str) -> set[str]:
    """Files of the repository, as a wheel has them."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    files = {name for name in listed if (ROOT / name).is_file()}
    return {name if name.startswith("diloco/") else f"diloco/{name}" for name in files}


def test_the_wheel_has_every_module_and_all_data(wheel: Path) -> None:
    found = contents(wheel)
    code = {name for name in tracked("*.py") if name.split("/")[1] not in NOT_PACKAGED}
    data = tracked("runbooks/*.md", "infra/grafana", "infra/prometheus", "infra/systemd",
                   "infra/nats", "diloco/py.typed")  # fmt: skip
    assert code | data <= set(found)
    assert {name.split("/")[0].split("-")[0] for name in found} == {"diloco"}


# Folders at the top that are the repository's, not the package's.
NOT_PACKAGED = {"bench", "docs", "examples", "locks", "tests"}


def test_the_sdist_makes_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build_wheel(unpacked, tmp_path)
    assert contents(again) == contents(wheel)


def test_every_command_has_help(programs: Path, elsewhere: Path) -> None:
    run(programs / "python", "-P", "-c", EVERY_HELP, cwd=elsewhere)
    where = "import diloco; print(diloco.__file__)"
    found = run(programs / "python", "-P", "-c", where, cwd=elsewhere)
    assert Path(found.strip()).is_relative_to(programs.parent)
    assert run(programs / "diloco", "--version", cwd=elsewhere).startswith("diloco 0.")


def test_a_users_task_among_files_of_our_names(programs: Path, elsewhere: Path) -> None:
    """From the first parameters to a report, of a module that is called as ours is."""
    told = run(programs / "diloco", "local", "--run-dir", "run", "--json", "--task",
               "learner.model:build", *SMALL, cwd=elsewhere)  # fmt: skip
    summary = json.loads(told.splitlines()[-1])
    assert summary["steps"] >= 32
    assert summary["eval_loss_last"] < summary["eval_loss_first"]
    told = run(programs / "diloco", "replay", "run", cwd=elsewhere)
    assert "bit for bit" in told
    assert "run" in run(programs / "diloco", "status", "run", "--once", cwd=elsewhere)


def test_units_are_written(programs: Path, elsewhere: Path) -> None:
    # In place of ours, which stand below a home folder where units could not start them.
    stand_ins = elsewhere / "bin"
    stand_ins.mkdir()
    for name in ("diloco", "python"):
        (stand_ins / name).write_text("#!/bin/sh\n")
        (stand_ins / name).chmod(0o755)
    run(programs / "diloco", "host", "units", "--to", "units", "--programs", stand_ins,
        cwd=elsewhere)  # fmt: skip
    unit = elsewhere / "units" / "diloco-aggregator.service"
    assert f"ExecStart={stand_ins}/diloco aggregator" in unit.read_text()
