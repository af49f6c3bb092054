"""Finds the source files of `diloco data prepare`; their order is the same on all machines."""

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from diloco.common.protocol.errors import ConfigError, DataError
from diloco.models.data.token_files import INDEX

Kind = Literal["text", "json", "parquet", "arrow", "saved", "tokens"]
KINDS: dict[str, Kind] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".bin": "tokens",
}
# Kinds of files that have columns.
TABLES = ("parquet", "arrow", "saved")
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")


class SourceFile(NamedTuple):
    """One file of documents, or one folder that the library `datasets` saved.

    Attributes:
        source: index of the command line's source that it belongs to.
        path: path to open it by.
        size_bytes: bytes on disk.
        modified_ns: time of the last change, in ns since the epoch.
        kind: the format of its content.
        compression: suffix of its compression, such as ".gz"; "" if it is not compressed.
    """

    source: int
    path: str
    size_bytes: int
    modified_ns: int
    kind: Kind
    compression: str = ""


def find_files(sources: Sequence[str]) -> list[SourceFile]:
    """Returns all files of all sources; a file that two sources name belongs to the first.

    Args:
        sources: files, folders and globs, as on the command line.

    Raises:
        ConfigError: a source does not exist, or matches no file.
        DataError: a source is empty; or a file's suffix is one that cannot be read.
    """
    found: dict[Path, SourceFile] = {}
    for number, source in enumerate(sources):
        paths = [path for path in _paths(source) if not _is_index(path)]
        for path in paths:
            if path not in found:
                found[path] = _looked_at(number, path)
        if not sum(found[path].size_bytes for path in paths):
            raise DataError(
                f"the source {source!r} is empty: no visible file in it has any bytes",
                hint="leave it out, or add documents; names that begin with a dot are skipped",
            )
    return list(found.values())


def listing_digest(files: Sequence[SourceFile], *, times: bool = False) -> str:
    """Returns a SHA-256, in hexadecimal, of the files' paths and sizes.

    With `times`, the digest also covers the files' modification times.
    """
    rows = ([one.path, one.size_bytes, one.modified_ns if times else 0] for one in files)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode())
    return digest.hexdigest()


def _paths(source: str) -> Iterable[Path]:
    path = Path(source)
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the source {os.fsencode(source)!r} is not text in UTF-8, and cannot be named in a"
            " manifest",
            hint="rename it, or give the folder that has it",
        ) from error
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return [path.with_suffix(".bin") if _is_index(path) else path]
    # Path.glob refuses absolute patterns.
    globbed = map(Path, glob.glob(source, recursive=True))  # noqa: PTH207
    if found := sorted(one for one in globbed if one.is_file()):
        return found
    raise ConfigError(
        f"the source {source!r} does not exist, and as a glob it matches nothing"
        f" (seen from {Path.cwd()})",
        hint="give files, folders, or globs in quotes such as 'text/**/*.md'",
    )


def _in_folder(folder: Path) -> list[Path]:
    """Returns a folder's visible files, sorted; a folder saved by `datasets` is one entry."""
    files = [
        one
        for one in folder.rglob("*")
        if one.is_file() and not any(p.startswith(".") for p in one.relative_to(folder).parts)
    ]
    saved = {one.parent for one in files if _is_saved(one.parent)}
    splits = {one.parent / "dataset_dict.json" for one in saved}
    return sorted({one.parent if one.parent in saved else one for one in files} - splits)


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").exists() and (folder / "dataset_info.json").exists()


def _is_index(path: Path) -> bool:
    """True if a file is the `.idx` of a Megatron `.bin` beside it."""
    return path.suffix == INDEX and path.with_suffix(".bin").exists()


def _looked_at(source: int, path: Path) -> SourceFile:
    suffix = path.suffix.lower()
    if suffix in ARCHIVES:
        raise DataError(
            f"{str(path)!r} is an archive of files",
            hint="unpack it, and give the folder; .gz, .bz2, .xz and .zst of one file are read",
        )
    compression = suffix if suffix in COMPRESSIONS else ""
    kind = KINDS.get(Path(path.stem).suffix.lower() if compression else suffix, "text")
    if compression and kind in (*TABLES, "tokens"):
        raise DataError(f"{str(path)!r} is a compressed file of {kind.title()}", hint="unpack it")
    own = [path, path.with_suffix(INDEX)] if kind == "tokens" else [path]
    parts = [one.stat() for one in (path.iterdir() if path.is_dir() else own) if one.exists()]
    return SourceFile(
        source=source,
        path=str(path),
        size_bytes=sum(part.st_size for part in parts),
        modified_ns=max(part.st_mtime_ns for part in parts),
        kind="saved" if path.is_dir() else kind,
        compression=compression,
    )
