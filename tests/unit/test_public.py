"""The names that users import, and their weight: `import diloco` and --help stay light."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import diloco

ROOT = Path(__file__).parents[2]
HEAVY = ("jax", "optax", "orbax", "google.cloud.storage")

LOADED = f"""
import json, sys
{{code}}
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""

EVERY_HELP = """
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner
from diloco.program import app

def paths(command, *before):
    yield before
    if isinstance(command, TyperGroup):
        for name, part in command.commands.items():
            yield from paths(part, *before, name)

found = list(paths(get_command(app)))
assert len(found) > 30
for path in found:
    assert CliRunner().invoke(app, [*path, "--help"]).exit_code == 0, path
"""


def loaded_by(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(code=code)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import diloco",
        "from diloco import Config, ConfigError, TensorHint, __version__, load_config",
        EVERY_HELP,
        "import diloco.show.status.screen",
        "from diloco import follow; import diloco.run.model.follow",
        "import diloco.operate.local.run, diloco.operate.auth.guard, diloco.operate.run_garbage, diloco.replay.restore",
    ],
    ids=["package", "names", "help", "look", "follow", "others"],
)
def test_what_does_not_compute_loads_nothing_heavy(code: str) -> None:
    assert loaded_by(code) == []


@pytest.mark.parametrize(
    ("code", "most"),
    [
        ("sys.argv[1:] = ['--version']; from diloco.start import main; main()", 160),
        ("import diloco.program", 420),
    ],
    ids=["version", "commands"],
)
def test_what_tells_of_itself_loads_little(code: str, most: int) -> None:
    told = f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, check=True
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert not {"numpy", "nats", "pydantic"} & set(found)
    assert len(found) <= most


@pytest.mark.parametrize(
    ("code", "most", "without"),
    [
        ("import diloco.aggregator.daemon", 890, {"jax", "optax", "orbax"}),
        ("import diloco.learner.daemon, diloco.models.bytes_lm", 1200, {"flax", "orbax", "numba"}),
    ],
    ids=["aggregator", "learner"],
)
def test_a_daemon_loads_what_it_needs(code: str, most: int, without: set[str]) -> None:
    told = f"import json, sys; {code}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, check=True
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert not without & set(found)
    assert len(found) <= most


def test_what_computes_is_seen_to_load_jax() -> None:
    assert "jax" in loaded_by("from diloco import Task")


def test_every_public_name_is_there_and_found() -> None:
    for name in diloco.__all__:
        assert getattr(diloco, name) is not None
    assert set(diloco.__all__) <= set(dir(diloco))
    assert diloco.Task.__module__ == "diloco.learner.task"
    with pytest.raises(AttributeError, match="no attribute 'Tasc'"):
        diloco.Tasc  # noqa: B018


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs" / "tasks.md").read_text()
    table = page.partition("## What to import")[2].partition("\n## ")[0]
    rows = [row.partition(": ")[0] for row in table.splitlines() if row.startswith("- ")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(diloco.__all__)


def test_users_are_shown_no_other_names() -> None:
    """Examples and pages for users import from `diloco` alone, and PyTorch's from `diloco.torch`."""
    pages = [ROOT / "README.md", ROOT / "docs" / "tasks.md", *(ROOT / "examples").glob("*.py")]
    for page in pages:
        found = re.findall(r"(?:from|import) (diloco\.(?!torch\b)[\w.]+)", page.read_text())
        assert not found, page


WITHOUT_JAX = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax"):
            raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, Missing())
import diloco.show.status.screen
import diloco.replay.restore, diloco.show.page.report
"""


def test_what_only_looks_loads_no_jax() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_JAX], check=True)
