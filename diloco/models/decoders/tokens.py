"""Opens folders of token files as training and held-out rows, and checks them by their manifests.

A folder without a manifest (`diloco.models.data.manifest`) is used unchecked.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import numpy as np
from pydantic import Discriminator, Field, Tag

from diloco.common.protocol.errors import DataError
from diloco.models.data.manifest import (
    MANIFEST,
    UNFINISHED,
    Side,
    TokenManifest,
    parse_manifest,
    rules_digest,
)
from diloco.models.data.weighted_sources import WeightedSources
from diloco.models.decoders.config import DecoderConfig
from diloco.models.decoders.image_rows import ImageRows, TextRows
from diloco.models.decoders.token_windows import TokenWindows, files_of
from diloco.models.decoders.vision import ImageOptions

if TYPE_CHECKING:
    import grain

# The option `data` of a task: a folder's path, or weights by the paths of several folders.
Folder = Annotated[str, Field(min_length=1)]
Weights = Mapping[Folder, Annotated[float, Field(gt=0)]]
Data = Annotated[
    Annotated[Folder, Tag("path")] | Annotated[Weights, Field(min_length=1), Tag("weights")],
    Discriminator(lambda data: "weights" if isinstance(data, Mapping) else "path"),
]
# grain's shuffle counts in 32 bits.
MOST_ROWS = (1 << 32) - 1


class TokenFolders:
    """The rows of one folder, or of several in proportion to weights.

    Args:
        data: a folder, or folders with their weights.
        length: tokens that a row predicts.
        vocab: size of the model's vocabulary.
        model: the model's folder; if it has a tokenizer, the tokens must be from the same one.
        digests: SHA-256 of each folder's manifest, in any order; empty: any data is accepted.
        images: (the option `images`, the configuration of the decoder with a vision tower); None:
            rows are text alone.

    Raises:
        DataError: a folder is incomplete or damaged, has another digest, or was made for another
            tokenizer than the model's or the other folders'.
    """

    def __init__(
        self,
        data: Data,
        *,
        length: int,
        vocab: int,
        model: Path | None = None,
        digests: Sequence[str] = (),
        images: tuple[ImageOptions, DecoderConfig] | None = None,
    ) -> None:
        self._images = images
        # Sorted, since learners must agree, and keys in a file have no order.
        given = {data: 1.0} if isinstance(data, str) else dict(sorted(data.items()))
        self._folders = [Path(name) for name in given]
        self._weights = [weight / sum(given.values()) for weight in given.values()]
        self._length, self._vocab = length, vocab
        self._manifests = [_manifest_of(folder) for folder in self._folders]
        rules = _rules_of(model)
        for folder, manifest in zip(self._folders, self._manifests, strict=True):
            if manifest is not None:
                _check_tokenizer(folder, manifest, vocab, model, rules)
                _check_shards(folder, manifest)
        self._check_alike()
        if digests:
            _check_digests(self._folders, digests)

    @property
    def end(self) -> int | None:
        """The token that ends each document; None if no folder has a manifest."""
        ends = {manifest.end for manifest in self._manifests if manifest is not None}
        return ends.pop() if len(ends) == 1 else None

    def train(self, seed: int) -> "grain.MapDataset[Any]":
        """Returns the training rows as a dataset of one epoch.

        A row is a window int32 [L + 1]; with `images`, an `ImageTextBatch` without the axis B.

        Args:
            seed: seed by which the rows of each of several folders are shuffled.

        Raises:
            DataError: a folder has no training rows, or too many.
        """
        import grain

        sources = [grain.MapDataset.source(self._rows(i, "train")) for i in self._numbers()]
        if len(sources) == 1:
            return sources[0]
        # Each source is shuffled by itself, so that an epoch mixes all its parts.
        shuffled = [
            source.shuffle(seed=zlib.crc32(f"{seed}/mixture/{number}".encode()))
            for number, source in enumerate(sources)
        ]
        return grain.MapDataset.select_from_datasets(shuffled, self._mixture(sources))

    def held_out(self, rows: int) -> list[Any]:
        """Returns about `rows` batches of one held-out row each, the same each time.

        Each folder gives rows in proportion to its weight, evenly spread over its held-out rows.
        """
        found: list[Any] = []
        for number, weight in zip(self._numbers(), self._weights, strict=True):
            there = self._rows(number, "held_out")
            wanted = min(len(there), max(1, round(rows * weight)))
            places = np.linspace(0, len(there) - 1, wanted).astype(int)
            found += [jax.tree.map(lambda one: one[None], there[int(place)]) for place in places]
        return found

    def every_row(self) -> list[Any]:
        """Returns the training rows and the held-out rows of each folder, a sequence for each side.

        Raises:
            DataError: a folder lacks the rows of a side.
        """
        sides: tuple[Side, Side] = ("train", "held_out")
        return [self._rows(number, side) for number in self._numbers() for side in sides]

    def _rows(self, number: int, side: Side) -> ImageRows | TextRows | TokenWindows:
        if self._images is None:
            return self._windows(number, side)
        (images, config), folder = self._images, self._folders[number]
        assert config.tower is not None
        if not any(folder.glob("*.npz")):
            return TextRows(self._windows(number, side), images, config.tower.patch_width)
        if not (paths := sorted(folder.glob(f"{side}*.npz"))):
            raise DataError(
                f"{str(folder)!r} has rows with images, but no {side}*.npz",
                hint="a folder needs train*.npz and held_out*.npz: name some of its files so",
            )
        if text := sorted(folder.glob(f"{side}*.npy")):
            raise DataError(
                f"{str(folder)!r} has rows with images, and also text, {text[0].name}, which would"
                " not be read",
                hint="move it into a folder of its own, and mix the two by weights",
            )
        return ImageRows(paths, length=self._length, config=config, images=images)

    def _numbers(self) -> range:
        return range(len(self._folders))

    def _windows(self, number: int, side: Side) -> TokenWindows:
        folder, manifest = self._folders[number], self._manifests[number]
        if manifest is None:
            paths = files_of(folder, side)
        elif shards := manifest.of(side):
            paths = [folder / shard.name for shard in shards]
        else:
            raise DataError(
                f"{str(folder)!r} has no {side} shards: it was prepared with --held-out"
                f" {manifest.options.held_out:g}",
                hint="prepare it again with another --held-out",
            )
        masked = manifest is not None and manifest.dtype == "int32"
        windows = TokenWindows(paths, length=self._length, vocab=self._vocab, masked=masked)
        if len(windows) > MOST_ROWS:
            raise DataError(
                f"{str(folder)!r} has {len(windows)} rows of {self._length} tokens: more than"
                f" {MOST_ROWS}",
                hint="choose a greater length, or prepare several folders and mix them",
            )
        return windows

    def _mixture(self, sources: "Sequence[grain.MapDataset[Any]]") -> WeightedSources:
        try:
            return WeightedSources([len(source) for source in sources], self._weights)
        except ValueError as error:
            folder = self._folders[error.args[0]]
            raise DataError(
                f"{str(folder)!r} would have less than one row in an epoch of the mixture",
                hint="raise its weight, or leave it out",
            ) from error

    def _check_alike(self) -> None:
        """Checks that all folders were made with one tokenizer and one end token.

        Raises:
            DataError: two folders differ.
        """
        known = [
            (folder, manifest)
            for folder, manifest in zip(self._folders, self._manifests, strict=True)
            if manifest is not None
        ]
        for folder, manifest in known[1:]:
            first_folder, first = known[0]
            if manifest.tokenizer.rules_sha256 != first.tokenizer.rules_sha256:
                what = "by another tokenizer"
            elif manifest.end != first.end:
                what = f"with documents that end in token {manifest.end}, not {first.end}"
            else:
                continue
            raise DataError(
                f"{str(folder)!r} was prepared {what} than {str(first_folder)!r}",
                hint="prepare all folders of a mixture with the same --tokenizer and --end",
            )


def _manifest_of(folder: Path) -> TokenManifest | None:
    """Returns a folder's manifest; None if the folder has none.

    Raises:
        DataError: the folder's preparation is not finished.
    """
    path = folder / MANIFEST
    if path.exists():
        return parse_manifest(path.read_bytes(), str(path))
    if (folder / UNFINISHED).exists():
        raise DataError(
            f"{str(folder)!r} is not whole: whatever prepared or copied it was ended midway",
            hint="run the same diloco data prepare or diloco data copy again, which continues",
        )
    return None


def _rules_of(model: Path | None) -> str | None:
    """Returns `rules_digest` of the tokenizer in the model's folder; None if there is none.

    Raises:
        DataError: the folder's tokenizer.json is invalid.
    """
    if model is None or not (path := model / "tokenizer.json").exists():
        return None
    try:
        return rules_digest(json.loads(path.read_bytes()))
    except (ValueError, AttributeError) as error:
        raise DataError(f"{str(path)!r} is not a tokenizer: {error}", hint="copy it again") from (
            error
        )


def _check_tokenizer(
    folder: Path, manifest: TokenManifest, vocab: int, model: Path | None, rules: str | None
) -> None:
    own = rules == manifest.tokenizer.rules_sha256
    if rules is not None and not own:
        raise DataError(
            f"{str(folder)!r} was prepared by another tokenizer than that of {str(model)!r}",
            hint=f"prepare it again: diloco data prepare ... --tokenizer {model}",
        )
    # Gemma 3's tokenizer has a token for images that the text model does not have.
    if manifest.tokenizer.vocabulary > vocab and (not own or manifest.largest >= vocab):
        raise DataError(
            f"{str(folder / MANIFEST)!r}: the tokenizer has {manifest.tokenizer.vocabulary} tokens,"
            f" but the model has {vocab}",
            hint="prepare the data again with the model's own tokenizer: diloco data prepare ... "
            f"--tokenizer {model or 'PATH'}",
        )


def _check_digests(folders: Sequence[Path], digests: Sequence[str]) -> None:
    """Checks that each folder's manifest has one of the run's `digests`.

    Learners claim shares of the data, which mean the same rows only in the same data.

    Raises:
        DataError: a folder has no manifest, or another one.
    """
    for folder in folders:
        path = folder / MANIFEST
        found = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "no digest"
        if found not in digests:
            raise DataError(
                f"{str(path)!r} has {found}, but the run was made for {', '.join(digests)}",
                hint="copy the run's data here: diloco data copy; diloco check shows a digest",
            )


def _check_shards(folder: Path, manifest: TokenManifest) -> None:
    """Checks that a folder has all shards of its manifest, of the right sizes, and no others.

    Digests are not compared here; `diloco check` compares them.

    Raises:
        DataError: a shard is missing, unknown, or of another size.
    """
    again = "copy the folder again (diloco data copy), or prepare it again"
    for shard in manifest.shards:
        path = folder / shard.name
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise DataError(f"{str(path)!r} is missing: {error.strerror}", hint=again) from error
        if size_bytes != shard.size_bytes:
            raise DataError(
                f"{str(path)!r} has {size_bytes} bytes, but {shard.size_bytes} by {MANIFEST}",
                hint=again,
            )
    named = {shard.name for shard in manifest.shards}
    other = [one.name for side in ("train", "held_out") for one in folder.glob(f"{side}*.npy")]
    if strange := sorted(set(other) - named):
        raise DataError(
            f"{str(folder / strange[0])!r} is not in {MANIFEST}, and would not be read",
            hint="move it into a folder of its own, and mix the two",
        )
