"""Install packages into a virtual environment of this clone, which is made if it is not there.

    python locks/install.py .venv-tpu --require-hashes -r requirements.lock

uv installs, as requirements.lock pins it: in a tenth of pip's time, and with one copy of a package
on the disk for all environments. pip follows where uv cannot: pip.conf may name an index that uv
does not know.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from resolve import BASE, ROOT, entries

UV = ROOT / ".venv/bin/uv"


def pip(python: Path, *arguments: str) -> None:
    """Installs with pip.

    Raises:
        subprocess.CalledProcessError: pip could not; it has said why.
    """
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run([python, "-m", "pip", "install", *quiet, *arguments], cwd=ROOT, check=True)


def main() -> None:
    """Install."""
    environment, *arguments = sys.argv[1:]
    python = ROOT / environment / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ROOT / environment], check=True)
    try:
        if not UV.exists():
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as lock:
                lock.write(entries(BASE.read_text())["uv"])
                lock.flush()
                pip(ROOT / ".venv/bin/python", "--require-hashes", "-r", lock.name)
        command = [UV, "pip", "install", "--quiet", "--python", python, *arguments]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            sys.stderr.write("installing: uv could not, so pip tries it\n")
            pip(python, *arguments)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
