"""The project as users get it: an archive of the working tree, its wheel, and an environment with it.

For tests of what is installed; nothing of this tree is on the path of what they run.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Returns the output of a command that has nothing of this tree on its path."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=clean, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def source_of_tree(folder: Path) -> Path:
    """The working tree as `git archive` packs it and `tar` unpacks it, uncommitted changes too."""
    index = {**os.environ, "GIT_INDEX_FILE": str(folder / "index")}

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, env=index, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("read-tree", "HEAD")
    git("add", "--all")
    archive = folder / "diloco.tar.gz"
    git("archive", "--format=tar.gz", "--prefix=diloco/", "-o", str(archive), git("write-tree"))
    unpacked = folder / "source"
    unpacked.mkdir()
    run("tar", "-xzf", archive, "-C", unpacked, "--strip-components=1", cwd=folder)
    return unpacked


def build_wheel(source: Path, to: Path) -> Path:
    """Build it into a folder that has no other."""
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-build-isolation", "-w", to, source, cwd=to)
    (wheel,) = to.glob("*.whl")
    return wheel


def install(wheel: Path, home: Path) -> Path:
    """Make an environment with the wheel and this one's packages; its folder of programs."""
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home.parent)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--disable-pip-version-check", "--no-deps", wheel, cwd=home.parent)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(run(python, "-c", asked, cwd=home).strip())
    # As a plain path, so that this environment's own links, such as the editable one, are not read.
    (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    server = Path(sysconfig.get_path("scripts")) / "nats-server"
    (home / "bin" / "nats-server").symlink_to(server)
    return home / "bin"
