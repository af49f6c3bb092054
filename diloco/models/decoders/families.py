"""Defines the families of decoders: the keys of their `config.json`, and features of their layers.

A family has a row in `FAMILY_FILES`, by the `model_type` of its files.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

Family = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "qwen3_moe",
    "mixtral",
]
FAMILIES: tuple[Family, ...] = get_args(Family)
# (function that returns a key's value, number of layers) -> for each layer, whether it has a
# sliding window.
Sliding = Callable[[Callable[[str], Any], int], list[bool]]

# Keys without effect on the computed function: the file's origin, generation, initialization.
NEUTRAL = frozenset(
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
        # The number of devices over which products were once summed.
        "pretraining_tp",
    }
)
COMMON = frozenset(
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
# Values of keys that a file leaves out, unless its family has others.
DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0}
# Keys whose values are true or false.
SWITCHES = frozenset(
    {
        "tie_word_embeddings",
        "norm_topk_prob",
        "use_sliding_window",
        "enable_moe_block",
        "attention_bias",
        "mlp_bias",
        "attention_k_eq_v",
        "output_router_logits",
        "use_double_wide_mlp",
    }
)
# The values that these keys may have, unless the family supports others.
MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0, None),
    "chunk_size_feed_forward": (0,),
    "is_encoder_decoder": (False,),
}
# The keys for the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts")
# Keys for which null is a value; for other keys null means that the key is left out.
NULL = frozenset(
    {
        "num_key_value_heads",
        "sliding_window",
        "final_logit_softcapping",
        "attn_logit_softcapping",
    }
)


def never(value: Callable[[str], Any], layers: int) -> list[bool]:
    """Returns False for all layers: none has a sliding window."""
    del value
    return [False] * layers


def all_with_a_window(value: Callable[[str], Any], layers: int) -> list[bool]:
    """Returns True for all layers if the file has a window; null says that none has one."""
    return [value("sliding_window") is not None] * layers


def _all_if_asked(value: Callable[[str], Any], layers: int) -> list[bool]:
    return [bool(value("use_sliding_window"))] * layers


def _late_if_asked(value: Callable[[str], Any], layers: int) -> list[bool]:
    asked, first = bool(value("use_sliding_window")), int(value("max_window_layers"))
    return [asked and layer >= first for layer in range(layers)]


def _all_but_every_second(value: Callable[[str], Any], layers: int) -> list[bool]:
    del value
    return [layer % 2 == 0 for layer in range(layers)]


def _all_but_some(value: Callable[[str], Any], layers: int) -> list[bool]:
    every = int(value("sliding_window_pattern"))
    return [(layer + 1) % every != 0 for layer in range(layers)]


def _five_of_six(value: Callable[[str], Any], layers: int) -> list[bool]:
    """Returns True for layers with a sliding window: five of six, but never the last one."""
    del value
    return [(layer + 1) % 6 != 0 for layer in range(layers - 1)] + [False]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFiles:
    """The keys and names by which a family's files describe experts.

    Attributes:
        count: the key for the number of experts.
        chosen: the key for the number of experts that each token uses.
        width: the key for an expert's width.
        normed: whether a token's weights add up to 1; None: the key `norm_topk_prob` says it.
        module: the layer's module that has router and experts.
        matrices: names of an expert's matrices gate, up and down; None: one tensor has those of all
            experts.
        asked_by: the key that says whether layers have experts besides their MLP; None: all have
            experts, and no MLP.
    """

    count: str
    chosen: str = "num_experts_per_tok"
    width: str
    normed: bool | None
    module: str
    matrices: tuple[str, str, str] | None
    asked_by: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyFiles:
    """The rules by which a family's `config.json` is read, and the features of its layers.

    Attributes:
        title: the family's common name.
        architecture: the class that exported files name.
        defaults: values of keys that a file may leave out, common keys and the family's own.
        honoured: further keys that are read, if the file has them.
        must_be: keys that are refused unless they have one of these values.
        sliding: the rule for layers with a sliding window, for files without `layer_types`.
        biased: matrices that have a bias in every checkpoint, by their names in
            `tensor_names_and_shapes`.
        offset_norms: norms multiply by 1 + w instead of w.
        scaled_embeddings: embeddings are multiplied by the square root of their width.
        head_norms: each head's queries and keys are normed.
        value_norms: values are normed, too, without weights; and scores are not scaled.
        post_norms: attention and MLP each end in a norm.
        scaled_layers: a layer's output is multiplied by a number that is not trained.
        ropes: rotary positions of each kind of layer, for files without them; None: the files have
            the keys of one kind.
        experts: the description of experts; None: each layer has a plain MLP.
    """

    title: str
    architecture: str
    defaults: dict[str, Any]
    honoured: frozenset[str] = frozenset()
    must_be: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    sliding: Sliding = never
    biased: tuple[str, ...] = ()
    offset_norms: bool = False
    scaled_embeddings: bool = False
    head_norms: bool = False
    value_norms: bool = False
    post_norms: bool = False
    scaled_layers: bool = False
    ropes: dict[str, dict[str, Any]] | None = None
    experts: ExpertFiles | None = None

    @property
    def known(self) -> frozenset[str]:
        """The keys that are read."""
        return COMMON | self.honoured | self.defaults.keys()


_SOMETIMES_SLIDING = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
_ONE_WAY = {"use_bidirectional_attention": (False, None)}
# `router_jitter_noise` would add noise to the router's input in training.
_ROUTED = {"output_router_logits": (False, True), "router_jitter_noise": (0,)}

FAMILY_FILES: dict[Family, FamilyFiles] = {
    "llama": FamilyFiles(
        title="Llama 2 and 3, and what has their shape",
        architecture="LlamaForCausalLM",
        defaults={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    ),
    "qwen2": FamilyFiles(
        title="Qwen 2 and 2.5",
        architecture="Qwen2ForCausalLM",
        defaults={"hidden_act": "silu", "num_key_value_heads": 32, **_SOMETIMES_SLIDING},
        honoured=frozenset({"layer_types"}),
        must_be={"use_mrope": (False,)},
        sliding=_late_if_asked,
        biased=("q", "k", "v"),
    ),
    "qwen3": FamilyFiles(
        title="Qwen 3",
        architecture="Qwen3ForCausalLM",
        defaults={
            "hidden_act": "silu",
            "num_key_value_heads": 32,
            "head_dim": 128,
            "attention_bias": False,
            **_SOMETIMES_SLIDING,
        },
        honoured=frozenset({"layer_types"}),
        sliding=_late_if_asked,
        head_norms=True,
    ),
    "mistral": FamilyFiles(
        title="Mistral",
        architecture="MistralForCausalLM",
        defaults={"hidden_act": "silu", "num_key_value_heads": 8, "sliding_window": 4096},
        sliding=all_with_a_window,
    ),
    "gemma": FamilyFiles(
        title="Gemma, the first",
        architecture="GemmaForCausalLM",
        defaults={"num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh", **_GEMMA},
        # transformers ignores this key.
        must_be={"hidden_activation": ("gelu_pytorch_tanh",), **_ONE_WAY},
        offset_norms=True,
        scaled_embeddings=True,
    ),
    "gemma2": FamilyFiles(
        title="Gemma 2",
        architecture="Gemma2ForCausalLM",
        defaults={
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            **_GEMMA,
        },
        honoured=frozenset({"layer_types"}),
        must_be={"hidden_act": ("gelu_pytorch_tanh",), **_ONE_WAY},
        sliding=_all_but_every_second,
        offset_norms=True,
        scaled_embeddings=True,
        post_norms=True,
    ),
    "gemma3_text": FamilyFiles(
        title="Gemma 3, its text model",
        architecture="Gemma3ForCausalLM",
        honoured=frozenset({"_sliding_window_pattern", "layer_types", "final_logit_softcapping"}),
        # transformers reads the cap of attention scores, but does not apply it.
        must_be={"attn_logit_softcapping": (None,), **_ONE_WAY},
        defaults={
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            **_GEMMA,
        },
        sliding=_all_but_some,
        offset_norms=True,
        scaled_embeddings=True,
        head_norms=True,
        post_norms=True,
    ),
    "gemma4_text": FamilyFiles(
        title="Gemma 4, its text model",
        architecture="Gemma4ForCausalLM",
        honoured=frozenset(
            {
                "layer_types",
                "final_logit_softcapping",
                "per_layer_config",
                "num_global_key_value_heads",
                "num_experts",
                "top_k_experts",
                "moe_intermediate_size",
            }
        ),
        # "vision" is causal among text tokens, as None is.
        must_be={
            "use_bidirectional_attention": (None, "vision"),
            "rope_theta": (None,),
            "rope_scaling": (None,),
        },
        defaults={
            "vocab_size": 262_144,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 512,
            "global_head_dim": 512,
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
            "enable_moe_block": False,
            **_GEMMA,
        },
        sliding=_five_of_six,
        scaled_embeddings=True,
        head_norms=True,
        value_norms=True,
        post_norms=True,
        scaled_layers=True,
        ropes={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1_000_000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        experts=ExpertFiles(
            count="num_experts",
            chosen="top_k_experts",
            width="moe_intermediate_size",
            normed=True,
            module="experts",
            matrices=None,
            asked_by="enable_moe_block",
        ),
    ),
    "qwen3_moe": FamilyFiles(
        title="Qwen 3, mixtures of experts",
        architecture="Qwen3MoeForCausalLM",
        defaults={
            "hidden_act": "silu",
            "num_key_value_heads": 4,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "router_aux_loss_coef": 0.001,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        # transformers ignores these keys.
        honoured=frozenset({"max_window_layers"}),
        must_be=_ROUTED,
        sliding=_all_if_asked,
        head_norms=True,
        experts=ExpertFiles(
            count="num_experts",
            width="moe_intermediate_size",
            normed=None,
            module="mlp",
            matrices=("gate_proj", "up_proj", "down_proj"),
        ),
    ),
    "mixtral": FamilyFiles(
        title="Mixtral",
        architecture="MixtralForCausalLM",
        defaults={
            "hidden_act": "silu",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
        must_be=_ROUTED,
        sliding=all_with_a_window,
        experts=ExpertFiles(
            count="num_local_experts",
            width="intermediate_size",
            normed=True,
            module="block_sparse_moe",
            matrices=("w1", "w3", "w2"),
        ),
    ),
}
