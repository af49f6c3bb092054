"""Hugging Face's `config.json` of a decoder, read with an allow-list.

A key is honoured, or cannot change what the model computes, or must have the one value for which
the model here computes the same; any other is refused by name. Files of both spellings are read:
`rope_theta` with `rope_scaling`, and `rope_parameters`. A key that a file leaves out has the value
that the family gives it.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from diloco.common.protocol.errors import ConfigError
from diloco.learner.tensors.utilization import flops_per_token
from diloco.models.decoders.rope import Rope

Family = Literal["llama", "qwen3", "gemma3_text"]
FAMILIES: tuple[Family, ...] = get_args(Family)
CONFIG = "config.json"
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
SLIDING, FULL = "sliding_attention", "full_attention"
Document = Mapping[str, Any]

# Say nothing of the function: how a file was made, how text is generated, how weights began.
_NEUTRAL = frozenset(
    {
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "model_type",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "max_position_embeddings",
        "cache_implementation",
        "_name_or_path",
        "output_hidden_states",
        "output_attentions",
        "return_dict",
        "problem_type",
        "id2label",
        "label2id",
        "_attn_implementation_autoset",
    }
)
_COMMON = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    }
)
# What a key has that a file leaves out, unless its family says otherwise.
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
# Values with which a key changes nothing.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0, None),
    "chunk_size_feed_forward": (0,),
    "is_encoder_decoder": (False,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FamilyFiles:
    """How a family's files are read: what they may hold, and what they may leave out.

    Attributes:
        architecture: the class that exported files name.
        defaults: keys beside the common ones that are read, and all that a file may leave out, with
            what they are then.
        honoured: further keys that are read, if they are there.
        must_be: values with which a key changes nothing.
    """

    architecture: str
    defaults: dict[str, Any]
    honoured: frozenset[str] = frozenset()
    must_be: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


_FAMILY_FILES: dict[Family, _FamilyFiles] = {
    "llama": _FamilyFiles(
        architecture="LlamaForCausalLM",
        defaults={"hidden_act": "silu"},
        must_be={"mlp_bias": (False,), "pretraining_tp": (1, None)},
    ),
    "qwen3": _FamilyFiles(
        architecture="Qwen3ForCausalLM",
        defaults={
            "hidden_act": "silu",
            "head_dim": 128,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        honoured=frozenset({"layer_types"}),
    ),
    "gemma3_text": _FamilyFiles(
        architecture="Gemma3ForCausalLM",
        honoured=frozenset({"_sliding_window_pattern", "layer_types", "final_logit_softcapping"}),
        # The reference reads the cap of attention's scores, and then applies none.
        must_be={"attn_logit_softcapping": (None,), "use_bidirectional_attention": (False, None)},
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The hyperparameters that determine a decoder's parameters and its function.

    Attributes:
        vocab: V.
        width: D.
        mlp_width: F.
        heads: H of queries; kv_heads, G, of keys and values, divides it.
        head_width: K.
        activation: of the gate.
        query_scale: what scores are multiplied by.
        tied: whether the head is the embedding.
        sliding: of each layer, whether it sees the last `window` positions alone.
        rope: of layers that see everything; `local_rope` of the others.
        logit_cap: logits are at most this, by tanh; None: as they are.
        positions: that the model was trained for; carried, not honoured.
        tokens: ids of special tokens, as the file names them; carried.
    """

    family: Family
    vocab: int
    width: int
    mlp_width: int
    heads: int
    kv_heads: int
    head_width: int
    norm_eps: float
    activation: str
    query_scale: float
    tied: bool
    sliding: tuple[bool, ...]
    window: int | None
    rope: Rope
    local_rope: Rope
    logit_cap: float | None = None
    positions: int = 0
    # Not hashed: a value may be a list.
    tokens: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), hash=False)

    @property
    def layers(self) -> int:
        """N."""
        return len(self.sliding)

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: of all matrices, the head's too."""
        heads = (2 * self.heads + 2 * self.kv_heads) * self.head_width
        return self.layers * self.width * (heads + 3 * self.mlp_width) + self.vocab * self.width

    def flops_per_token(self, length: int) -> float:
        """As `Task.flops_per_token`, in rows of `length` tokens."""
        near = min(length, self.window or length)
        positions = sum(near if slides else length for slides in self.sliding)
        return flops_per_token(self.multiplied, self.heads * self.head_width * positions)

    @property
    def gemma(self) -> bool:
        """Whether it is Gemma: norms multiply by 1 + w, attention and MLP end in one, and so on."""
        return self.family == "gemma3_text"

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normed, head by head."""
        return self.family != "llama"


def read_config(folder: Path) -> DecoderConfig:
    """The decoder of a folder.

    Raises:
        ConfigError: there is no such file, it is damaged, or it says what is not honoured.
    """
    return parse_config(read_document(folder), source=str(folder / CONFIG))


def read_document(folder: Path) -> dict[str, Any]:
    """The text model's part of a folder's `config.json`.

    Raises:
        ConfigError: there is no such file, or it is damaged.
    """
    path = folder / CONFIG
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{str(folder)!r} has no {CONFIG}",
            hint="give the folder of a Hugging Face checkpoint: config.json, *.safetensors and"
            " tokenizer.json",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}", hint="copy it from the checkpoint again"
        ) from error
    if not isinstance(document, dict):
        raise ConfigError(f"{str(path)!r} must hold a JSON object", hint="copy it again")
    return document


def parse_config(document: Document, *, source: str) -> DecoderConfig:
    """The decoder that a document describes.

    Args:
        document: of `config.json`.
        source: where it comes from, for errors.

    Raises:
        ConfigError: it says what is not honoured.
    """
    family = document.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{source}: model_type is {family!r}, but {', '.join(FAMILIES)} are what is read",
            hint="give a text decoder of one of these families",
        )
    return _Parser(family, document, source).config()


class _Parser:
    """Reads one document."""

    def __init__(self, family: Family, document: Document, source: str) -> None:
        self._files = _FAMILY_FILES[family]
        self._family, self._source = family, source
        self._document = {k: v for k, v in document.items() if v is not None}
        self._check_keys()

    def config(self) -> DecoderConfig:
        """See `parse_config`."""
        heads = self._count("num_attention_heads")
        width, layers = self._count("hidden_size"), self._count("num_hidden_layers")
        kv_heads = self._count("num_key_value_heads", heads)
        head_width = self._count("head_dim", width // heads)
        if heads % kv_heads or head_width % 2:
            self._refuse(
                f"num_attention_heads {heads}, num_key_value_heads {kv_heads} and head_dim"
                f" {head_width} do not fit",
                "key heads divide query heads, and heads are of even width",
            )
        rope, local_rope = self._ropes()
        sliding, window = self._sliding(layers)
        scalar = self._number("query_pre_attn_scalar", head_width)
        cap = self._value("final_logit_softcapping")
        return DecoderConfig(
            family=self._family,
            vocab=self._count("vocab_size"),
            width=width,
            mlp_width=self._count("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            norm_eps=self._number("rms_norm_eps"),
            activation=self._activation(),
            query_scale=scalar**-0.5,
            tied=bool(self._value("tie_word_embeddings")),
            sliding=sliding,
            window=window,
            rope=rope,
            local_rope=local_rope,
            logit_cap=None if cap is None else self._number("final_logit_softcapping"),
            positions=int(self._document.get("max_position_embeddings", 0)),
            tokens=tuple((k, v) for k, v in self._document.items() if k.endswith("_token_id")),
        )

    def _check_keys(self) -> None:
        known = _NEUTRAL | _COMMON | self._files.honoured | self._files.defaults.keys()
        must_be = _MUST_BE | self._files.must_be
        for key, value in self._document.items():
            if key in must_be:
                if value not in must_be[key]:
                    self._refuse(
                        f"{key} is {value!r}, which would change what the model computes",
                        f"only {must_be[key][0]!r} is computed here",
                    )
            elif key not in known:
                self._refuse(
                    f"{key} = {value!r} is not known, and may change what the model computes",
                    "take the key out if it changes nothing, or train another checkpoint",
                )

    def _refuse(self, what: str, hint: str) -> None:
        raise ConfigError(f"{self._source}: {what}", hint=hint)

    def _value(self, key: str, default: Any = None) -> Any:
        defaults = _DEFAULTS | self._files.defaults
        return self._document.get(key, defaults.get(key, default))

    def _count(self, key: str, default: Any = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._refuse(f"{key} must be an int of at least 1, but it is {value!r}", "repair it")
        return int(value)

    def _number(self, key: str, default: Any = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self._refuse(f"{key} must be a number above 0, but it is {value!r}", "repair it")
        return float(value)

    def _activation(self) -> str:
        key = "hidden_activation" if self._family == "gemma3_text" else "hidden_act"
        value = self._value(key)
        if value not in ACTIVATIONS:
            self._refuse(f"{key} is {value!r}", f"{' and '.join(ACTIVATIONS)} are computed here")
        return str(value)

    def _sliding(self, layers: int) -> tuple[tuple[bool, ...], int | None]:
        kinds = self._document.get("layer_types")
        if self._family == "llama":
            return (False,) * layers, None
        if self._family == "qwen3" and not self._value("use_sliding_window"):
            if kinds and SLIDING in kinds:
                self._refuse(
                    "layer_types has sliding_attention, but use_sliding_window is not true",
                    "make the two agree",
                )
            return (False,) * layers, None
        if kinds is None:
            kinds = [SLIDING if slides else FULL for slides in self._by_rule(layers)]
        if len(kinds) != layers or not set(kinds) <= {SLIDING, FULL}:
            self._refuse(
                f"layer_types must name {SLIDING} or {FULL} for each of {layers} layers, but it is"
                f" {kinds!r:.80}",
                "repair it",
            )
        sliding = tuple(kind == SLIDING for kind in kinds)
        return sliding, self._count("sliding_window") if any(sliding) else None

    def _by_rule(self, layers: int) -> list[bool]:
        """Which layers slide, by the rule of the family."""
        if self._family == "qwen3":
            first = int(self._value("max_window_layers"))
            return [layer >= first for layer in range(layers)]
        every = self._count("_sliding_window_pattern", self._count("sliding_window_pattern"))
        return [(layer + 1) % every != 0 for layer in range(layers)]

    def _ropes(self) -> tuple[Rope, Rope]:
        """Rotary positions of full and of sliding layers."""
        given = self._document.get("rope_parameters") or {}
        scaling = self._document.get("rope_scaling") or {}
        theta = self._number("rope_theta")
        if self._family != "gemma3_text":
            rope = self._rope({"rope_theta": theta} | scaling | given)
            return rope, rope
        if given and not set(given) <= {FULL, SLIDING}:
            self._refuse(
                f"rope_parameters must be given for {FULL} and {SLIDING}", "as Gemma's files do"
            )
        local = {"rope_theta": self._number("rope_local_base_freq")}
        return (
            self._rope({"rope_theta": theta} | scaling | (given.get(FULL) or {})),
            self._rope(local | (given.get(SLIDING) or {})),
        )

    def _rope(self, given: Document) -> Rope:
        kind = given.get("rope_type", given.get("type", "default"))
        try:
            return Rope.parse(kind, {k: v for k, v in given.items() if k not in _KINDS})
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._source}: rotary positions: {error}",
                hint="default, linear and llama3 are computed here",
            ) from error


_KINDS = ("rope_type", "type")


def config_document(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The content of a decoder's `config.json`, with both spellings of rotary positions."""
    document: dict[str, Any] = {
        "architectures": [_FAMILY_FILES[config.family].architecture],
        "model_type": config.family,
        "dtype": dtype,
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "attention_dropout": 0.0,
        **dict(config.tokens),
    }
    if config.positions:
        document["max_position_embeddings"] = config.positions
    return document | _family_document(config)


def _family_document(config: DecoderConfig) -> dict[str, Any]:
    kinds = [SLIDING if slides else FULL for slides in config.sliding]
    if config.family == "llama":
        return {"hidden_act": config.activation, "mlp_bias": False, **config.rope.document()}
    if config.family == "qwen3":
        return {
            "hidden_act": config.activation,
            "use_sliding_window": any(config.sliding),
            "sliding_window": config.window,
            "layer_types": kinds,
            **config.rope.document(),
        }
    return {
        "hidden_activation": config.activation,
        "query_pre_attn_scalar": _scalar(config.query_scale),
        "sliding_window": config.window,
        "layer_types": kinds,
        "final_logit_softcapping": config.logit_cap,
        **config.rope.document(),
        "rope_local_base_freq": config.local_rope.theta,
        "rope_parameters": {
            FULL: config.rope.parameters(),
            SLIDING: config.local_rope.parameters(),
        },
    }


def _scalar(scale: float) -> float | int:
    """`query_pre_attn_scalar` of a scale; whole where it is."""
    scalar = scale**-2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar
