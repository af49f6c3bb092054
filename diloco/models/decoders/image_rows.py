"""Reads rows of text with images: each row is an .npz file with the output of a model's processor.

A processor is the class of transformers that turns text and images into arrays; `np.savez` saves
them. A folder has `train*.npz` and `held_out*.npz`.

Shapes: as in `vision`.
"""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from diloco.common.protocol.errors import TaskError
from diloco.models.decoders.config import DecoderConfig
from diloco.models.decoders.token_windows import TokenWindows
from diloco.models.decoders.vision import ImageOptions, ImageTextBatch, tokens_of_image

NEEDED = ("input_ids",)
# `labels` are the tokens, and IGNORED where a token is not trained on.
OPTIONAL = ("labels", "attention_mask", "pixel_values", "image_position_ids")
# These arrays can be computed from the others, and are ignored.
FOLLOWING = ("token_type_ids", "mm_token_type_ids", "num_soft_tokens_per_image")
IGNORED = -100
# Rounding, and resizing of images, may leave the pixels' range a little.
LEAST_PIXEL, LARGEST_PIXEL = -0.5, 1.5
DARKEST = 1.5 / 255  # below the second of 8 bits' values


class ImageRows:
    """Rows of text with images: a source of examples for grain.

    Each example is an `ImageTextBatch` without the axis B. Reading an example raises a TaskError if
    its file is damaged or does not fit the model.

    Args:
        paths: the files, one for each row.
        length: positions that a row predicts, L; shorter rows are padded.
        config: the configuration of a decoder with a vision tower.
        images: the greatest numbers of images in a row and of patches in an image.
    """

    def __init__(
        self, paths: Sequence[Path], *, length: int, config: DecoderConfig, images: ImageOptions
    ) -> None:
        assert config.image_text is not None
        assert config.tower is not None
        self._paths, self._length, self._images = tuple(paths), length, images
        self._vocab, self._text, self._tower = config.vocab, config.image_text, config.tower

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> ImageTextBatch:
        path = self._paths[index]
        arrays = _arrays(path)
        window = self._window(path, arrays)
        patches, positions, counts = self._patches(path, arrays)
        marked = np.where(window < 0, ~window, window) == self._text.image
        if marked.sum() != counts.sum():
            raise _refused(
                path,
                f"has {marked.sum()} tokens {self._text.image}, which stand for images, but its"
                f" patches are of {counts.sum()}",
                "save what the model's own processor gives for text and images together",
            )
        # Images are put in the places of their tokens in order: each run has whole images.
        ends = np.cumsum(marked)[marked & ~np.append(marked[1:], False)]
        if not np.isin(ends, np.cumsum(counts)).all():
            raise _refused(
                path,
                f"has images of {counts.tolist()} tokens, but runs of"
                f" {np.diff(ends, prepend=0).tolist()} tokens {self._text.image}",
                "give the processor the images in the order in which the text has them",
            )
        return ImageTextBatch(window, patches, positions)

    def _window(self, path: Path, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the row's tokens, padded, int32 [L + 1]; ~t is a token t not trained on."""
        tokens = _integers(path, "input_ids", arrays["input_ids"])
        kept = np.ones(tokens.shape, bool)
        labels = tokens
        if "attention_mask" in arrays:
            kept = _integers(path, "attention_mask", arrays["attention_mask"], tokens) != 0
        if np.count_nonzero(np.diff(kept.astype(np.int8), prepend=0) > 0) > 1:
            raise _refused(
                path,
                "has an attention_mask with zeros between tokens",
                "it is 0 for padding alone, before or behind all tokens; -100 in labels leaves a"
                " token untrained",
            )
        if "attention_mask" not in arrays:
            self._check_unpadded(path, tokens, labelled="labels" in arrays)
        if "labels" in arrays:
            labels = _integers(path, "labels", arrays["labels"], tokens)
        tokens, labels = tokens[kept], labels[kept]
        if len(tokens) > self._length + 1:
            raise _refused(
                path,
                f"has {len(tokens)} tokens, but rows have {self._length + 1}",
                "raise the option length, or make images and texts smaller",
            )
        self._check_tokens(path, tokens, labels)
        # The model is not trained to predict tokens that stand for an image.
        unlearned = (labels == IGNORED) | (tokens == self._text.image)
        window = np.full(self._length + 1, ~self._text.padding, np.int32)
        window[: len(tokens)] = np.where(unlearned, ~tokens, tokens)
        return window

    def _check_unpadded(self, path: Path, tokens: np.ndarray, *, labelled: bool) -> None:
        """Refuses padding in a row without an attention_mask, which would be trained on.

        Raises:
            TaskError: the row begins with padding, or ends with it and has no labels.
        """
        padding = self._text.padding
        if tokens[:1].tolist() == [padding] or (
            tokens[-2:].tolist() == [padding] * 2 and not labelled
        ):
            raise _refused(
                path,
                f"begins or ends with token {padding}, the padding, but has no attention_mask",
                "save attention_mask as the processor gives it, or rows without padding",
            )

    def _check_tokens(self, path: Path, tokens: np.ndarray, labels: np.ndarray) -> None:
        others = [each for each in self._text.soft if each != self._text.image]
        if (strange := tokens[np.isin(tokens, others)]).size:
            raise _refused(
                path,
                f"has a token {strange[0]}, which stands for a sound or a frame: of these no tower"
                " is trained",
                "leave out rows with sounds and videos",
            )
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab:
            raise _refused(
                path,
                f"has tokens from {tokens.min()} to {tokens.max()}, but the model has"
                f" {self._vocab}",
                "make the files with the model's own processor",
            )
        if (wrong := np.flatnonzero((labels != tokens) & (labels != IGNORED))).size:
            place = wrong[0]
            raise _refused(
                path,
                f"has labels that are neither input_ids nor {IGNORED}: {labels[place]} at place"
                f" {place}, where input_ids has {tokens[place]}",
                f"labels are the tokens themselves at the same places, not the next ones, and"
                f" {IGNORED} where none is trained on",
            )

    def _patches(
        self, path: Path, arrays: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (patches [I, P, W], positions [I, P, 2], number of tokens of each image)."""
        patches, positions = no_images(self._images, self._tower.patch_width)
        if "pixel_values" not in arrays and "image_position_ids" not in arrays:
            return patches, positions, np.zeros(0, int)
        found, there = self._image_arrays(path, arrays)
        counts = []
        for number, (pixels, place) in enumerate(zip(found, there.astype(np.int64), strict=True)):
            used = (place != -1).any(axis=1)
            counts.append(self._tokens_of(path, place[used], len(place)))
            count = int(used.sum())
            patches[number, :count], positions[number, :count] = pixels[used], place[used]
        return patches, positions, np.asarray(counts, int)

    def _image_arrays(
        self, path: Path, arrays: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns pixel_values and image_position_ids of a row, of which it has at least one."""
        width, most = self._tower.patch_width, self._images.row
        if "pixel_values" not in arrays or "image_position_ids" not in arrays:
            raise _refused(
                path,
                "has only one of pixel_values and image_position_ids",
                "save both as the model's own processor gives them; that of another family gives"
                " no image_position_ids",
            )
        found, there = arrays["pixel_values"], arrays["image_position_ids"]
        alike = found.ndim == 3 and there.shape == (*found.shape[:2], 2)
        kinds = found.dtype.kind in "fiu" and there.dtype.kind in "iu"
        if not alike or not kinds or found.shape[2] != width:
            raise _refused(
                path,
                f"has pixel_values {found.dtype}{list(found.shape)} and image_position_ids"
                f" {there.dtype}{list(there.shape)}, but numbers [images, patches, {width}] and"
                " integers [images, patches, 2] are expected",
                "make the files with the model's own processor",
            )
        if len(found) > most:
            raise _refused(
                path,
                f"has {len(found)} images, but rows have {most} at most",
                "raise the option images.row",
            )
        _check_pixels(path, found)
        return found, there

    def _tokens_of(self, path: Path, place: np.ndarray, padded: int) -> int:
        """Returns the number of tokens of an image whose patches have these positions (x, y).

        `padded` is the number of patches to which the file pads each image.
        """
        tower, most = self._tower, self._images.patches
        if len(place) > most:
            raise _refused(
                path,
                f"has an image of {len(place)} patches, but images have {most} at most",
                f"raise the option images.patches to {padded}, to which the processor pads each"
                " image, or give the processor a smaller max_soft_tokens",
            )
        if (tokens := tokens_of_image(tower, place)) is None:
            raise _refused(
                path,
                f"has an image whose {len(place)} patches are no rectangle of {tower.side} x"
                f" {tower.side} squares with positions from 0 to {tower.places - 1}; they go from"
                f" {place.min(initial=0)} to {place.max(initial=0)}",
                "save image_position_ids as the processor gives them, (x, y) of each patch and"
                " -1 for padding",
            )
        # Pixels of exchanged coordinates are those of another picture, which fits as well.
        number = place[:, 0] + (place[:, 0].max() + 1) * place[:, 1]
        if (np.diff(number) != 1).any():
            second = place[np.flatnonzero(np.diff(number) != 1)[0] + 1]
            raise _refused(
                path,
                f"has an image whose patches are not in the order of a processor: ({second[0]},"
                f" {second[1]}) is too early",
                "a position is (x, y), and x counts first: save image_position_ids as the processor"
                " gives them",
            )
        return tokens


def _check_pixels(path: Path, pixels: np.ndarray) -> None:
    """Refuses pixels that are not from 0 to 1, and those that were divided by 255 twice.

    Raises:
        TaskError: a pixel is out of range, or all are so dark as no picture of 8 bits is.
    """
    least, largest = pixels.min(initial=0), pixels.max(initial=0)
    if not LEAST_PIXEL <= least <= largest <= LARGEST_PIXEL:
        raise _refused(
            path,
            f"has pixels from {least:g} to {largest:g}, but 0 to 1 is expected",
            "divide them by 255, as the processor does (do_rescale), and no more: no mean is taken"
            " off (do_normalize)",
        )
    steps = 255.0 * pixels
    if 0 < largest <= DARKEST and np.abs(steps - np.rint(steps)).max() > 0.01:
        raise _refused(
            path,
            f"has pixels from {least:g} to {largest:g}, as if divided by 255 twice",
            "give the processor pixels from 0 to 255; or, if they are from 0 to 1 already,"
            " do_rescale=False",
        )


class TextRows:
    """Windows of text as `ImageTextBatch` rows without images: a source of examples for grain.

    Args:
        windows: windows of text.
        images: the greatest numbers of images in a row and of patches in an image.
        width: numbers of a patch, W.
    """

    def __init__(self, windows: TokenWindows, images: ImageOptions, width: int) -> None:
        self._windows, self._none = windows, no_images(images, width)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> ImageTextBatch:
        return ImageTextBatch(self._windows[index], *self._none)


def no_images(images: ImageOptions, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (patches [I, P, W], positions [I, P, 2]) of a row without images: 0 and -1."""
    shape = (images.row, images.patches)
    return np.zeros((*shape, width), np.float32), np.full((*shape, 2), -1, np.int32)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            known = (*NEEDED, *OPTIONAL, *FOLLOWING)
            if strange := sorted(set(file.files) - set(known)):
                raise _refused(
                    path,
                    f"has {strange[0]}, which is not read: only text and images are",
                    f"{', '.join((*NEEDED, *OPTIONAL))} are read: give what the model's own"
                    " processor makes of text and images, without sounds and videos",
                )
            if missing := [name for name in NEEDED if name not in file.files]:
                raise _refused(path, f"has no {missing[0]}", "save what the processor gives")
            return {name: file[name] for name in (*NEEDED, *OPTIONAL) if name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise TaskError(
            f"{str(path)!r} cannot be read: {error}",
            hint="it is not a file of np.savez, or it is cut short: make it again",
        ) from error


def _integers(
    path: Path, name: str, values: np.ndarray, like: np.ndarray | None = None
) -> np.ndarray:
    """Returns an array of a processor as int64 [tokens].

    Args:
        path: the file, for errors.
        name: the array's name, for errors.
        values: the array, [tokens] or [1, tokens].
        like: an array whose shape the result must have; None: any.

    Raises:
        TaskError: the array has another shape or dtype.
    """
    flat = values[0] if values.ndim == 2 and len(values) == 1 else values
    if (
        flat.ndim != 1
        or flat.dtype.kind not in "iub"
        or (like is not None and flat.shape != like.shape)
    ):
        raise _refused(
            path,
            f"has {name} {values.dtype}{list(values.shape)}, but integers [length] of one row are"
            " expected",
            "save each row in a file of its own",
        )
    return flat.astype(np.int64)


def _refused(path: Path, what: str, hint: str) -> TaskError:
    return TaskError(f"{str(path)!r} {what}", hint=hint)
