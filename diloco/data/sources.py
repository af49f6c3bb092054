"""The files that the command line means: files, folders and globs, in one order everywhere."""

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from diloco.common.errors import ConfigError, DataError
from diloco.data.parquet import groups_of
from diloco.data.plan import Kind, SourceFile

KINDS: dict[str, Kind] = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
ARCHIVES = (".zip", ".tar", ".tgz", ".7z", ".rar")


def find_files(sources: Sequence[str], field: str) -> list[SourceFile]:
    """All files of all sources; one that two sources mean belongs to the first.

    Args:
        sources: paths of files or folders, or globs.
        field: the column of Parquet files.

    Raises:
        ConfigError: a source is missing or has nothing.
        DataError: a file cannot be read for what it is, as far as a glance says.
    """
    found: dict[str, SourceFile] = {}
    for number, source in enumerate(sources):
        paths = list(_paths(source))
        for path in paths:
            if str(path) not in found:
                found[str(path)] = _looked_at(number, path, field)
        if not sum(found[str(path)].size_bytes for path in paths):
            raise DataError(
                f"the source {source!r} is empty: no visible file in it has any bytes",
                hint="leave it out, or add documents; names that begin with a dot are skipped",
            )
    return list(found.values())


def listing_digest(files: Sequence[SourceFile], *, times: bool = False) -> str:
    """Of names and sizes, and of the times of the last change: whether sources are the same."""
    rows = ([one.path, one.size_bytes, one.modified_ns if times else 0] for one in files)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row).encode())
    return digest.hexdigest()


def _paths(source: str) -> Iterator[Path]:
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
        yield from sorted(one for one in path.rglob("*") if _is_visible(one, path))
    elif path.exists():
        yield path
    elif found := _globbed(source):
        yield from found
    else:
        raise ConfigError(
            f"the source {source!r} does not exist, and as a glob it matches nothing"
            f" (seen from {Path.cwd()})",
            hint="give files, folders, or globs in quotes such as 'text/**/*.md'",
        )


def _globbed(source: str) -> list[Path]:
    # A path's own glob takes no absolute one.
    found = map(Path, glob.glob(source, recursive=True))  # noqa: PTH207
    return sorted(path for path in found if path.is_file())


def _is_visible(path: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    return not hidden and path.is_file()


def _looked_at(source: int, path: Path, field: str) -> SourceFile:
    suffix = path.suffix.lower()
    if suffix in ARCHIVES:
        raise DataError(
            f"{str(path)!r} is an archive of files",
            hint="unpack it, and give the folder; .gz, .bz2, .xz and .zst of one file are read",
        )
    compression = suffix if suffix in COMPRESSIONS else ""
    kind = KINDS.get(Path(path.stem).suffix.lower() if compression else suffix, "text")
    if kind == "parquet" and compression:
        raise DataError(
            f"{str(path)!r} is a compressed Parquet file", hint="unpack it: Parquet is compressed"
        )
    status = path.stat()
    return SourceFile(
        source=source,
        path=str(path),
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        kind=kind,
        compression=compression,
        groups=groups_of(str(path), field) if kind == "parquet" else (),
    )
