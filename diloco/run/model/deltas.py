"""A folder of whole versions, with lossless deltas between them, in bfloat16.

    DIR/weight_v000012   the twelfth version here: whole, or the bits that differ from the eleventh
    DIR/.whole-000012    the newest version, whole, to compare the next one with

SGLang's `/pull_weights` reads this form, in which the trainers slime and miles bring versions to
inference engines. A whole version is a folder of `--format hf`. A delta has the same files; in
these, a tensor's bytes are the exclusive or of its bytes in this version and in the one before,
compressed, with a checksum of this version's bytes. A reader with version n - 1 applies delta n;
any other reader begins with a whole version.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash
from safetensors.numpy import save_file

from diloco.common.protocol.errors import ConfigError
from diloco.run.model.follow import Following, ModelChange
from diloco.run.model.serving import FolderRules, ServedFolder, sync_files

# Versions from one whole version to the next.
WHOLE_EVERY = 32
_INDEX = "model.safetensors.index.json"
_FORM = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "xxh3-128"}


class DeltaFolder(ServedFolder):
    """A `ServedFolder` that writes most versions as their differences from the version before.

    The first version, and then every `WHOLE_EVERY`th, is written whole.
    """

    async def _write(self, change: ModelChange) -> Path:  # noqa: ARG002 - has numbers of its own
        home, compress = self._rules.folder, _compressor()
        last = max((_number(path) for path in home.glob("weight_v??????")), default=0)
        before, whole = _whole(home, last), _whole(home, last + 1)
        shutil.rmtree(whole, ignore_errors=True)
        await self._write_files(whole, "hf", "bfloat16")
        about = "about.json"
        if before.exists() and (before / about).read_text() == (whole / about).read_text():
            shutil.rmtree(whole)  # this process was restarted
            return _version(home, last)
        path = _version(home, last + 1)
        part = path.with_name(path.name + ".part")
        if last % WHOLE_EVERY and before.exists():
            await asyncio.to_thread(write_delta, before, whole, part, last + 1, compress)
        else:
            shutil.copytree(whole, part, copy_function=os.link)
        await asyncio.to_thread(sync_files, part)
        part.rename(path)
        for other in home.glob(".whole-*"):  # one more, if an earlier process was killed
            if other != whole:
                shutil.rmtree(other)
        return path

    def _drop_old(self, newest: Path) -> None:
        """Deletes all versions that are not needed to rebuild the newest `FolderRules.keep`."""
        numbers = sorted(_number(path) for path in newest.parent.glob("weight_v??????"))
        wanted = numbers[-self._rules.keep :][0]
        roots = [one for one in numbers if one <= wanted and not _is_delta(newest.parent, one)]
        for number in numbers:
            if roots and number < roots[-1]:
                self._remove(_version(newest.parent, number))


def served_folder(model: Following, rules: FolderRules) -> ServedFolder:
    """Returns the writer of a folder: `DeltaFolder` for the form "deltas", else `ServedFolder`.

    Raises:
        ConfigError: as `ServedFolder`.
    """
    return (DeltaFolder if rules.form == "deltas" else ServedFolder)(model, rules)


def write_delta(
    older: Path, newer: Path, folder: Path, number: int, compress: Callable[[bytes], bytes]
) -> None:
    """Writes the difference between two folders of safetensors files with the same tensors.

    Args:
        older: the folder of version `number` - 1.
        newer: the folder of version `number`.
        folder: the folder to write, which must not exist.
        number: the version's number in this folder of versions.
        compress: compresses the bytes of a tensor's difference.
    """
    folder.mkdir()
    places: dict[str, str] = {}
    for path in sorted(newer.glob("*.safetensors")):
        header, data = _read(path)
        _, base = _read(older / path.name)
        deltas, sums = {}, {}
        for name, entry in header.items():
            rows = slice(*entry["data_offsets"])
            changed = np.bitwise_xor(data[rows], base[rows]).tobytes()
            deltas[name] = np.frombuffer(compress(changed), np.uint8)
            sums[name] = xxhash.xxh3_128_hexdigest(data[rows].tobytes())
            places[name] = path.name
        save_file(deltas, folder / path.name, metadata=sums)
    versions = {"version": f"{number:06}", "base_version": f"{number - 1:06}"}
    document = {"metadata": {**versions, **_FORM}, "weight_map": places}
    (folder / _INDEX).write_text(json.dumps(document, indent=1) + "\n")
    shutil.copy(newer / "about.json", folder)


def _read(path: Path) -> tuple[dict[str, dict[str, list[int]]], np.ndarray]:
    """Returns a safetensors file's header and its data, uint8 [bytes].

    The header has, for each tensor, its `data_offsets` in the data.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        return header, np.fromfile(file, np.uint8)


def _version(home: Path, number: int) -> Path:
    return home / f"weight_v{number:06}"


def _whole(home: Path, number: int) -> Path:
    return home / f".whole-{number:06}"


def _number(path: Path) -> int:
    return int(path.name.removeprefix("weight_v"))


def _is_delta(home: Path, number: int) -> bool:
    index = _version(home, number) / _INDEX
    return index.exists() and "delta_encoding" in json.loads(index.read_text())["metadata"]


def _compressor() -> Callable[[bytes], bytes]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ConfigError(
            "--format deltas needs pyarrow, which is not installed",
            hint="pip install 'diloco[arrow]'",
        ) from error
    return lambda data: pa.compress(data, codec="zstd", asbytes=True)
