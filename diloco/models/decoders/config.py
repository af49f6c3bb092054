"""Reads Hugging Face's `config.json` of a decoder with an allow-list of keys, and writes it.

A key is accepted if it is supported, if it cannot change the computed function, or if it has the
one value that this implementation computes; all other keys are refused by name. Both spellings of
rotary positions are read: `rope_theta` with `rope_scaling`, and `rope_parameters`. A key that a
file leaves out has the family's default.
"""

import dataclasses
import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.common.protocol.errors import ConfigError
from diloco.models.decoders.families import (
    DEFAULTS,
    EXPERT_COUNTS,
    FAMILIES,
    FAMILY_FILES,
    MUST_BE,
    NEUTRAL,
    NULL,
    SWITCHES,
    Family,
    all_with_a_window,
)
from diloco.models.decoders.image_text import TEXT_FAMILIES, ImageText, text_part
from diloco.models.decoders.layer_kinds import (
    FULL,
    SLIDING,
    Experts,
    LayerDifferences,
    said_of_differences,
)
from diloco.models.decoders.rope import KINDS, Rope

if TYPE_CHECKING:
    from diloco.models.decoders.vision import Tower

CONFIG = "config.json"
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")
Document = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The hyperparameters that determine a decoder's parameters and its function.

    Attributes:
        family: the family, `model_type` in the file.
        vocab: size of the vocabulary, V.
        width: width of the model, D.
        mlp_width: width of the MLP, F.
        heads: heads of queries, H.
        kv_heads: heads of keys and values, G, which divides H.
        head_width: width of a head, K.
        norm_eps: the number that norms add to the mean square.
        activation: the activation of the MLP's gate, one of `ACTIVATIONS`.
        query_scale: factor of attention scores.
        tied: whether the output head is the embedding.
        sliding: for each layer, whether it attends only to the last `window` positions.
        window: the positions of a sliding window, a token's own included; None: no layer has one.
        rope: rotary positions of full layers, which have no sliding window.
        local_rope: rotary positions of layers with a sliding window.
        logit_cap: bound of the logits, by tanh; None: no bound.
        score_cap: bound of attention scores, by tanh; None: no bound.
        biased: matrices of a layer that have a bias, by their names in `tensor_names_and_shapes`.
        offset_norms: norms multiply by 1 + w instead of w.
        scaled_embeddings: embeddings are multiplied by the square root of their width.
        head_norms: each head's queries and keys are normed.
        value_norms: values are normed, too, without weights.
        post_norms: attention and MLP each end in a norm.
        scaled_layers: a layer's output is multiplied by a number that is not trained.
        keys_are_values: values are the keys before norm and rotation, and have no matrix.
        takes_keys: layers use keys and values of other layers, and compute none.
        experts: experts of each layer; None: layers have an MLP only.
        fed_width: width P of per-layer embeddings; 0: the model has none.
        fed_vocab: rows of the table of per-layer embeddings.
        dense: numbers of a mixture's layers that have an MLP in place of experts.
        layer_differences: further differences between layers; None: there are none.
        image_text: properties of the image-and-text checkpoint whose text model this decoder is;
            None: it is of no such checkpoint.
        tower: the vision tower; None: it is not among the parameters.
        positions: the length in tokens that the model was trained for; only copied to exports.
        tokens: ids of special tokens, by their keys in the file; only copied to exports.
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
    score_cap: float | None = None
    biased: tuple[str, ...] = ()
    offset_norms: bool = False
    scaled_embeddings: bool = False
    head_norms: bool = False
    value_norms: bool = False
    post_norms: bool = False
    scaled_layers: bool = False
    keys_are_values: bool = False
    takes_keys: bool = False
    experts: Experts | None = None
    fed_width: int = 0
    fed_vocab: int = 0
    dense: tuple[int, ...] = ()
    layer_differences: LayerDifferences | None = None
    image_text: ImageText | None = None
    tower: "Tower | None" = None
    positions: int = 0
    # Excluded from the hash, since a value may be a list.
    tokens: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), hash=False)

    @property
    def layers(self) -> int:
        """The number of layers, N."""
        return len(self.sliding)


def read_config(folder: Path) -> DecoderConfig:
    """Returns the configuration that a folder's `config.json` describes.

    Raises:
        ConfigError: the file is missing or damaged, or has a key that is not supported.
    """
    return parse_config(read_document(folder), source=str(folder / CONFIG))


def different_fields(
    one: DecoderConfig, other: DecoderConfig, besides: AbstractSet[str]
) -> list[str]:
    """Returns the names of the fields in which two decoders differ, in the order of the class.

    Left out are fields without effect on the function: those about tokens and lengths, an
    image-and-text checkpoint's `modules`, and the weight of the experts' balance in the loss.

    Args:
        one: the one configuration.
        other: the other configuration.
        besides: names of further fields to leave out.
    """
    left = [f.name for f in dataclasses.fields(one) if f.name not in besides | _WITHOUT_EFFECT]
    return [name for name in left if _compared(one, name) != _compared(other, name)]


def _compared(config: DecoderConfig, name: str) -> Any:
    value = getattr(config, name)
    if isinstance(value, Experts):
        return dataclasses.replace(value, balance=0.0)
    if isinstance(value, ImageText):
        return dataclasses.replace(value, modules=())
    # Files give the inverse square, which is not exact.
    return float(f"{value:.12g}") if name == "query_scale" else value


_WITHOUT_EFFECT = frozenset({"positions", "tokens"})


def read_document(folder: Path) -> dict[str, Any]:
    """Returns the content of a folder's `config.json`, unchecked.

    Raises:
        ConfigError: the file is missing or damaged.
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
    """Returns the configuration of the decoder that a document describes.

    Args:
        document: the content of a `config.json`.
        source: the document's origin, for errors.

    Raises:
        ConfigError: the document has a key or value that is not supported.
    """
    image_text = None
    if document.get("model_type") in TEXT_FAMILIES:
        document, image_text = text_part(document, source)
    family = document.get("model_type")
    if family not in FAMILIES:
        known = ", ".join((*FAMILIES, *TEXT_FAMILIES))
        raise ConfigError(
            f"{source}: model_type is {family!r}, but {known} are what is read",
            hint=f"give a decoder of one of these families; {_ANY_MODEL}",
        )
    return dataclasses.replace(_Parser(family, document, source).config(), image_text=image_text)


class _Parser:
    """Parses the content of one `config.json`; all methods raise ConfigErrors of invalid values.

    Args:
        family: the decoder's family.
        document: the content.
        source: the document's origin, for errors.
    """

    def __init__(self, family: Family, document: Document, source: str) -> None:
        self._files = FAMILY_FILES[family]
        self._family, self._source = family, source
        self._document = {k: v for k, v in document.items() if v is not None or k in NULL}
        if self._files.experts is not None:
            self._take_count(self._files.experts.count)
        self._check_keys()

    def config(self) -> DecoderConfig:
        """Returns the configuration that the document describes."""
        heads = self._count("num_attention_heads")
        width, layers = self._count("hidden_size"), self._count("num_hidden_layers")
        kv_heads = heads
        if self._value("num_key_value_heads") is not None:
            kv_heads = self._count("num_key_value_heads")
        head_width = self._count("head_dim", width // heads)
        if heads % kv_heads or head_width % 2:
            self._refuse(
                f"num_attention_heads {heads}, num_key_value_heads {kv_heads} and head_dim"
                f" {head_width} do not fit",
                "key heads divide query heads, and heads are of even width",
            )
        rope, local_rope = self._ropes()
        sliding, window = self._sliding(layers)
        experts = self._experts()
        layer_differences = self._layer_differences(sliding, kv_heads)
        fed_width = self._natural("hidden_size_per_layer_input")
        scalar = self._number("query_pre_attn_scalar", head_width)
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
            query_scale=1.0 if self._files.value_norms else scalar**-0.5,
            tied=bool(self._value("tie_word_embeddings")),
            sliding=sliding,
            window=window,
            rope=rope,
            local_rope=local_rope,
            logit_cap=self._cap("final_logit_softcapping"),
            score_cap=self._cap("attn_logit_softcapping"),
            biased=self._biased(),
            offset_norms=self._files.offset_norms,
            scaled_embeddings=self._files.scaled_embeddings,
            head_norms=self._files.head_norms,
            value_norms=self._files.value_norms,
            post_norms=self._files.post_norms,
            scaled_layers=self._files.scaled_layers,
            experts=experts,
            dense=self._dense(layers),
            fed_width=fed_width,
            fed_vocab=self._fed_vocab() if fed_width else 0,
            layer_differences=layer_differences,
            positions=int(self._document.get("max_position_embeddings", 0)),
            tokens=tuple((k, v) for k, v in self._document.items() if k.endswith("_token_id")),
        )

    def _take_count(self, own: str) -> None:
        """Moves the number of experts to the key `own`, whichever of `EXPERT_COUNTS` has it."""
        found = {key: self._document.pop(key) for key in EXPERT_COUNTS if key in self._document}
        if len(set(found.values())) > 1:
            self._refuse(f"{' and '.join(found)} are {list(found.values())}", "make the two agree")
        for value in found.values():
            self._document[own] = value

    def _check_keys(self) -> None:
        known = NEUTRAL | self._files.known
        must_be = {k: v for k, v in MUST_BE.items() if k not in known} | self._files.must_be
        for key, value in self._document.items():
            if value is None:
                continue
            if key in ("quantization_config", "compression_config"):
                self._refuse(
                    f"{key} says that its tensors are quantized",
                    "quantized checkpoints are not trained: give the one that they were made from",
                )
            elif key in must_be:
                if value not in must_be[key]:
                    self._refuse(
                        f"{key} is {value!r}, which would change what the model computes",
                        f"only {must_be[key][0]!r} is computed here; {_ANY_MODEL}",
                    )
            elif key in SWITCHES and not isinstance(value, bool):
                self._refuse(f"{key} must be true or false, but it is {value!r}", "repair it")
            elif key not in known:
                self._refuse(
                    f"{key} = {value!r} is not known, and may change what the model computes",
                    f"take the key out if it changes nothing; {_ANY_MODEL}",
                )

    def _refuse(self, what: str, hint: str) -> None:
        raise ConfigError(f"{self._source}: {what}", hint=hint)

    def _value(self, key: str, default: Any = None) -> Any:
        defaults = DEFAULTS | self._files.defaults
        return self._document.get(key, defaults.get(key, default))

    def _count(self, key: str, default: Any = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self._refuse(f"{key} must be an int of at least 1, but it is {value!r}", "repair it")
        return int(value)

    def _natural(self, key: str) -> int:
        return self._count(key) if self._value(key) else 0

    def _number(self, key: str, default: Any = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self._refuse(f"{key} must be a number above 0, but it is {value!r}", "repair it")
        return float(value)

    def _cap(self, key: str) -> float | None:
        return None if self._value(key) is None else self._number(key)

    def _biased(self) -> tuple[str, ...]:
        attention = ("q", "k", "v", "o") if self._value("attention_bias") else ()
        mlp = ("gate", "up", "down") if self._value("mlp_bias") else ()
        return (*self._files.biased, *attention, *mlp)

    def _experts(self) -> Experts | None:
        files = self._files.experts
        if files is None or (files.asked_by is not None and not self._value(files.asked_by)):
            return None
        count, chosen = self._count(files.count), self._count(files.chosen)
        if chosen > count:
            self._refuse(f"{files.chosen} is {chosen}, but {files.count} is {count}", "repair it")
        balance = self._value("router_aux_loss_coef")
        return Experts(
            count=count,
            chosen=chosen,
            width=self._count(files.width),
            normed=bool(self._value("norm_topk_prob")) if files.normed is None else files.normed,
            balance=self._number("router_aux_loss_coef") if balance else 0.0,
            beside=files.asked_by is not None,
        )

    def _dense(self, layers: int) -> tuple[int, ...]:
        """Returns the numbers of a mixture's layers that have an MLP in place of experts."""
        if "mlp_only_layers" not in self._files.defaults:
            return ()
        every, named = self._count("decoder_sparse_step"), self._value("mlp_only_layers")
        if not isinstance(named, list) or not all(type(each) is int for each in named):
            self._refuse(f"mlp_only_layers is {named!r:.80}", "it is a list of layers' numbers")
        dense = [n for n in range(layers) if (n + 1) % every or n in named]
        if len(dense) == layers:
            self._refuse(
                f"decoder_sparse_step {every} and mlp_only_layers {named} leave no layer of"
                f" {layers} experts",
                "repair it",
            )
        return tuple(dense)

    def _layer_differences(
        self, sliding: tuple[bool, ...], kv_heads: int
    ) -> LayerDifferences | None:
        """Returns the differences between layers; None: the family's layers do not differ so.

        Args:
            sliding: whether each layer has a sliding window.
            kv_heads: heads of keys of layers with a sliding window.
        """
        if "num_kv_shared_layers" not in self._files.defaults:
            return None
        if sliding[-1]:
            self._refuse(
                f"the last of layer_types is {SLIDING}", f"the reference makes it {FULL}: say so"
            )
        shared = self._natural("num_kv_shared_layers")
        if not set(sliding) <= set(sliding[: len(sliding) - shared]):
            self._refuse(
                f"num_kv_shared_layers is {shared}, which leaves a kind of layer_types without a"
                " layer that has keys",
                "repair it",
            )
        keys_are_values = bool(self._value("attention_k_eq_v"))
        width, own_heads = self._of_full_layers(sliding, kv_heads, keys_are_values)
        widths = 2 if self._value("use_double_wide_mlp") else 1
        return LayerDifferences(
            full_head_width=width,
            full_kv_heads=own_heads,
            full_keys_are_values=keys_are_values,
            shared=shared,
            shared_mlp_width=widths * self._count("intermediate_size"),
        )

    def _of_full_layers(
        self, sliding: tuple[bool, ...], kv_heads: int, keys_are_values: bool
    ) -> tuple[int, int]:
        """Returns (width of a head, number of heads of keys) of layers without a sliding window."""
        each = self._document.get("per_layer_config")
        if each is None:
            given = self._value("num_global_key_value_heads") if keys_are_values else None
            heads = kv_heads if given is None else self._count("num_global_key_value_heads")
            width = self._count("global_head_dim")
        else:
            # transformers pads the numbers of layers: "05" where there are ten or more.
            each = {number.lstrip("0") or "0": own for number, own in each.items()}
            told = [each.get(str(n), {}) for n, slides in enumerate(sliding) if not slides]
            known = {"head_dim", "num_key_value_heads"}
            alike = len(each) == len(told) and all(one == told[0] for one in told)
            if not alike or told[0].keys() - known:
                self._refuse(
                    f"per_layer_config is {each!r:.80}",
                    f"head_dim and num_key_value_heads of all {FULL} layers alike are read",
                )
            heads = told[0].get("num_key_value_heads", kv_heads)
            width = told[0].get("head_dim", self._count("head_dim"))
        if self._count("num_attention_heads") % heads or width % 2:
            self._refuse(
                f"{heads} heads of keys of width {width} in {FULL} layers do not fit",
                "key heads divide query heads, and heads are of even width",
            )
        return width, heads

    def _fed_vocab(self) -> int:
        rows = self._count("vocab_size_per_layer_input")
        if rows < self._count("vocab_size"):
            self._refuse(f"vocab_size_per_layer_input is {rows}, less than vocab_size", "repair it")
        return rows

    def _activation(self) -> str:
        key = "hidden_act" if "hidden_act" in self._files.defaults else "hidden_activation"
        value = self._value(key)
        if value not in ACTIVATIONS:
            self._refuse(f"{key} is {value!r}", f"{', '.join(ACTIVATIONS)} are computed here")
        # Files of the first Gemma say "gelu" for its approximation, as transformers knows.
        return "gelu_pytorch_tanh" if (self._family, value) == ("gemma", "gelu") else str(value)

    def _sliding(self, layers: int) -> tuple[tuple[bool, ...], int | None]:
        kinds = self._document.get("layer_types")
        if kinds and SLIDING in kinds and self._value("use_sliding_window") is False:
            self._refuse(
                "layer_types has sliding_attention, but use_sliding_window is not true",
                "make the two agree",
            )
        if kinds is None:
            self._check_pattern()
            slides = self._files.sliding(self._value, layers)
            kinds = [SLIDING if each else FULL for each in slides]
        if len(kinds) != layers or not set(kinds) <= {SLIDING, FULL}:
            self._refuse(
                f"layer_types must name {SLIDING} or {FULL} for each of {layers} layers, but it is"
                f" {kinds!r:.80}",
                "repair it",
            )
        sliding = tuple(kind == SLIDING for kind in kinds)
        return sliding, self._count("sliding_window") if any(sliding) else None

    def _check_pattern(self) -> None:
        """Refuses an old key of Gemma's files that says another pattern of windows than the new."""
        new, old = "sliding_window_pattern", "_sliding_window_pattern"
        if old in self._document and self._document[old] != self._value(new):
            self._refuse(
                f"{old} is {self._document[old]!r}, but {new} is {self._value(new)!r}",
                "give layer_types, or make the two agree",
            )

    def _ropes(self) -> tuple[Rope, Rope]:
        """Returns the rotary positions (of full layers, of layers with a sliding window)."""
        given = self._document.get("rope_parameters") or {}
        two = self._files.ropes is not None or "rope_local_base_freq" in self._files.defaults
        if two and given and set(given) != {FULL, SLIDING}:
            self._refuse(
                f"rope_parameters must be given for {FULL} and {SLIDING}", "as Gemma's files do"
            )
        if self._files.ropes is not None:
            both = self._files.ropes | given
            return self._rope(both[FULL]), self._rope(both[SLIDING])
        plain = {"rope_theta": self._number("rope_theta")}
        if not two:
            rope = self._one_rope(plain, given)
            return rope, rope
        local = {"rope_theta": self._number("rope_local_base_freq")}
        return (
            self._one_rope(plain, given.get(FULL) or {}),
            self._rope(local | (given.get(SLIDING) or {})),
        )

    def _one_rope(self, plain: Document, given: Document) -> Rope:
        """Returns the rotary positions of `rope_parameters`, or else of the older `rope_scaling`.

        Args:
            plain: `rope_theta`, as the file or its family has it.
            given: the value of `rope_parameters` for these layers; may be empty.
        """
        scaling = self._document.get("rope_scaling") or {}
        older, newer = self._rope({**plain, **scaling}), self._rope({**plain, **given})
        if scaling and given and older != newer:
            self._refuse(
                f"rope_scaling is {scaling}, but rope_parameters is {given}",
                "make the two agree, or leave one out",
            )
        return newer if given else older

    def _rope(self, given: Document) -> Rope:
        kind = given.get("rope_type", given.get("type", "default"))
        try:
            said = {k: v for k, v in given.items() if k not in _KINDS and v is not None}
            return Rope.parse(kind, said, self._document.get("max_position_embeddings"))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{self._source}: rotary positions: {error}",
                hint=f"{', '.join(KINDS)} are computed here; {_ANY_MODEL}",
            ) from error


_KINDS = ("rope_type", "type")
_ANY_MODEL = "DilocoCallback trains any model of transformers (docs/library.md)"


def config_document(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Returns the content of a decoder's `config.json`, with both spellings of rotary positions.

    Args:
        config: the decoder's configuration.
        dtype: the dtype of the checkpoint's tensors.
    """
    files = FAMILY_FILES[config.family]
    said = _said(config)
    document: dict[str, Any] = {
        "architectures": [files.architecture],
        "model_type": config.family,
        "dtype": dtype,
        "attention_dropout": 0.0,
        **dict(config.tokens),
        **{key: said[key] for key in sorted((files.known - files.must_be.keys()) & said.keys())},
    }
    if config.positions:
        document["max_position_embeddings"] = config.positions
    return document


def _window(config: DecoderConfig) -> int | None:
    """Returns the value of `sliding_window`: a number, unless null says that no layer has one.

    transformers cannot load some families without a number, even if no layer has a window.
    """
    files = FAMILY_FILES[config.family]
    if config.window is not None or files.sliding is all_with_a_window:
        return config.window
    number: int | None = files.defaults.get("sliding_window")
    return number


def _said(config: DecoderConfig) -> dict[str, Any]:
    """Returns a decoder's values of all keys that any family has."""
    said: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "hidden_act": config.activation,
        "hidden_activation": config.activation,
        "attention_bias": "o" in config.biased,
        "mlp_bias": "up" in config.biased,
        "use_sliding_window": any(config.sliding),
        "sliding_window": _window(config),
        "layer_types": [SLIDING if slides else FULL for slides in config.sliding],
        "query_pre_attn_scalar": _scalar(config.query_scale),
        "final_logit_softcapping": config.logit_cap,
        "attn_logit_softcapping": config.score_cap,
        **config.rope.document(),
    }
    files = FAMILY_FILES[config.family]
    if "rope_local_base_freq" in files.defaults:
        said["rope_local_base_freq"] = config.local_rope.theta
        parameters = {FULL: config.rope.parameters(), SLIDING: config.local_rope.parameters()}
        said["rope_parameters"] = parameters
    if config.layer_differences is not None:
        said |= said_of_differences(config, config.layer_differences)
    if config.experts is not None and files.experts is not None:
        said[files.experts.chosen] = config.experts.chosen
        said["norm_topk_prob"] = config.experts.normed
        said["mlp_only_layers"], said["decoder_sparse_step"] = list(config.dense), 1
        said["router_aux_loss_coef"] = config.experts.balance
        said[files.experts.count] = config.experts.count
        said[files.experts.width] = config.experts.width
    return said


def _scalar(scale: float) -> float | int:
    """Returns the value of `query_pre_attn_scalar` for `query_scale`; an int if it is whole."""
    scalar = scale**-2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar
