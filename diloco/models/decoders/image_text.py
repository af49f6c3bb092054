"""Reads the configuration of image-and-text checkpoints, whose text model is what is trained.

Such a checkpoint has a text model, towers (a vision and an audio encoder), and matrices that turn
the towers' outputs into embeddings for the text model. In a row of tokens, placeholder ids called
soft tokens stand for images, video frames and sounds. `config.json` has the text model's keys under
`text_config`, and the names of the text model's tensors begin with `WITHIN`. All other tensors are
copied from the folder into every export, bit for bit (ADR 100).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from diloco.common.protocol.errors import ConfigError
from diloco.models.decoders.families import NEUTRAL, Family

# `model_type` of a whole checkpoint, and of its text model.
TEXT_FAMILIES: dict[str, Family] = {"gemma4": "gemma4_text"}
ARCHITECTURE = "Gemma4ForConditionalGeneration"
# Prefixes of the text model's tensors: in a whole checkpoint, and in a checkpoint of text alone.
WITHIN, ALONE = "model.language_model.", "model."
# Prefixes of the vision tower's tensors; then those of each tower, by its key in `config.json`.
VISION = ("model.vision_tower.", "model.embed_vision.")
_MODULES = {
    "vision_config": VISION,
    "audio_config": ("model.audio_tower.", "model.embed_audio."),
}
OTHERS = tuple(module for modules in _MODULES.values() for module in modules)
_SOFT = ("image_token_id", "video_token_id", "audio_token_id")
_KNOWN = {
    *("text_config", "tie_word_embeddings", "vision_soft_tokens_per_image", "eoa_token_index"),
    *_MODULES,
}
# The ids of soft tokens if a file leaves them out, in the order of `_SOFT`.
_SOFT_DEFAULTS = (258_880, 258_884, 258_881)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageText:
    """The properties of an image-and-text checkpoint that its text model depends on.

    Attributes:
        soft: ids of soft tokens, for images, frames and sounds; the text model embeds each as
            `padding`.
        image: the id of soft tokens for images; None: the checkpoint has none.
        padding: the id of the padding token.
        modules: prefixes of the tensors that are not parameters, and that exports copy.
        both_ways: whether the tokens of one image attend to each other in both directions, in
            sliding layers.
    """

    soft: tuple[int, ...]
    image: int | None
    padding: int
    modules: tuple[str, ...]
    both_ways: bool


def text_part(document: Mapping[str, Any], source: str) -> tuple[dict[str, Any], ImageText]:
    """Returns (content of a `config.json` for the text model alone, properties of the checkpoint).

    Args:
        document: the content of the whole checkpoint's `config.json`.
        source: the document's origin, for errors.

    Raises:
        ConfigError: the text model is not of the expected family, or a key is unknown.
    """
    family = TEXT_FAMILIES[document["model_type"]]
    text = document.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type", family) != family:
        raise ConfigError(
            f"{source}: text_config is {text!r:.80}, but model_type {document['model_type']!r}"
            f" has a text model of {family!r}",
            hint="copy config.json from the checkpoint again",
        )
    for key, value in document.items():
        known = key in NEUTRAL | _KNOWN or key.endswith("_token_id")
        if value is None or known or key == "quantization_config":
            continue
        raise ConfigError(
            f"{source}: {key} = {value!r:.80} is not known, and may change what the model computes",
            hint="take the key out if it changes nothing",
        )
    # transformers takes these keys from the whole document.
    own = {"tie_word_embeddings": document.get("tie_word_embeddings", True)}
    own |= {key: document[key] for key in ("quantization_config",) if key in document}
    ids = [document.get(key, usual) for key, usual in zip(_SOFT, _SOFT_DEFAULTS, strict=True)]
    return {**text, "model_type": family, **own}, ImageText(
        soft=tuple(each for each in ids if each is not None),
        image=ids[0],
        padding=text.get("pad_token_id") or 0,
        modules=tuple(m for key, modules in _MODULES.items() if document.get(key) for m in modules),
        both_ways=text.get("use_bidirectional_attention") == "vision",
    )


def whole_document(document: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the content of an export's `config.json`: `document` with `dtype` as its dtype."""
    return {
        **document,
        "architectures": [ARCHITECTURE],
        "dtype": dtype,
        "text_config": {**document["text_config"], "dtype": dtype},
    }
