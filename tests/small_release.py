"""Releases of a few bytes, for tests of those who read and unpack them."""

import io
import json
import tarfile
from pathlib import Path
from typing import Any

from diloco.infra.install_release import FORMAT

RIGHT = {
    "format": FORMAT, "version": "0.1.0", "commit": "abc", "kind": "cpu", "architecture": "x86_64",
    "glibc": "2.17", "python": "3.11.2", "unpacked_bytes": 100,
}  # fmt: skip


def archive_of(path: Path, *names: str, **changed: Any) -> Path:
    """One whose manifest is right but for what is changed; None leaves a key out."""
    manifest = {key: value for key, value in (RIGHT | changed).items() if value is not None}
    files = {"manifest.json": json.dumps(manifest), **dict.fromkeys(names, "")}
    return packed(path, files)


def packed(path: Path, files: dict[str, str]) -> Path:
    """An archive of these texts below `diloco/`."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"diloco/{name}")
            entry.size, entry.mode = len(text), 0o755
            tar.addfile(entry, io.BytesIO(text.encode()))
    return path
