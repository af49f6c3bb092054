"""Reads `peft`'s `adapter_config.json` with an allow-list of keys.

A key is accepted if it has the task's value, if it cannot change what the stored adapters compute,
or if its value is one of those by which `peft` says that a feature is not used; all others are
refused by name. Source: `LoraConfig` of peft 0.21.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.common.protocol.errors import ConfigError
from diloco.models.decoders.lora import Lora

ADAPTER_CONFIG = "adapter_config.json"
# Keys without effect on what the stored adapters compute.
_NEUTRAL = frozenset(
    {
        # Names and versions.
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
        # Dropout is the task's own.
        "lora_dropout",
        # The names of the file's tensors say which matrices have adapters; they are all compared.
        "target_modules",
        "target_parameters",
        # Parameters of features that another key asks for.
        "eva_config",
        "megatron_core",
        "qalora_group_size",
    }
)
# Values by which a key that is not honoured says that its feature is not used.
_UNUSED: tuple[Any, ...] = (None, False, [], {})
# First values of A and B, which the file's tensors replace. All other kinds change the base, too.
_FIRST_VALUES = (True, False, None, "default", "gaussian", "eva", "orthogonal")
# The values that peft takes for keys that a file leaves out.
_DEFAULTS = {"peft_type": "LORA", "r": 8, "lora_alpha": 8}


def check_adapter_config(folder: Path, lora: Lora) -> None:
    """Checks that the adapters in a folder of `peft` compute what the task's adapters do.

    Args:
        folder: the adapter's folder.
        lora: the hyperparameters of the task's adapters.

    Raises:
        ConfigError: a hyperparameter differs, a key is not honoured, or the file is missing or
            damaged.
    """
    path = folder / ADAPTER_CONFIG
    try:
        there = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}",
            hint="--from takes an adapter's folder here; the base is the option model's",
        ) from error
    if not isinstance(there, dict):
        raise ConfigError(
            f"{str(path)!r} must hold a JSON object", hint="copy it from the adapter again"
        )
    wanted = {"peft_type": "LORA", "bias": "none", "r": lora.rank, "lora_alpha": lora.alpha}
    for key, value in (_DEFAULTS | there).items():
        if key not in _NEUTRAL:
            _check_key(path, key, value, wanted)


def _check_key(path: Path, key: str, value: Any, wanted: Mapping[str, Any]) -> None:
    """Checks one key that is not neutral.

    Args:
        path: the file, for errors.
        key: the key.
        value: its value in the file.
        wanted: the values that keys must have.

    Raises:
        ConfigError: the value is another than the task's, or the key is not honoured.
    """
    if key in wanted:
        if value != wanted[key]:
            own = key in ("r", "lora_alpha")
            raise ConfigError(
                f"{str(path)!r} has {key}={value!r:.80}, but the task's adapters have"
                f" {wanted[key]!r}",
                hint="give the task's option lora the adapter's own rank and alpha"
                if own
                else "begin with an adapter of plain LoRA, or merge this one into its base in peft",
            )
    elif key == "init_lora_weights":
        if not _is_one_of(value, _FIRST_VALUES):
            raise ConfigError(
                f"{str(path)!r} has {key}={value!r:.80}, with which peft changes the base when it"
                " loads the adapter",
                hint="convert the adapter: save_pretrained of peft with"
                " path_initial_model_for_weight_conversion",
            )
    elif not _is_one_of(value, _UNUSED):
        raise ConfigError(
            f"{str(path)!r} has {key}={value!r:.80}, which is not honoured, and may change what the"
            " adapters compute",
            hint="take the key out if it changes nothing; or merge the adapter into its base in"
            " peft",
        )


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    # By type too, since 0 == False and 1 == True.
    return any(type(value) is type(each) and value == each for each in values)
