"""A decoder of people's checkpoints, as parts for a task with a loss of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
from jax.sharding import PartitionSpec

from diloco.learner.task import Params, hint_of_decoder
from diloco.models.decoders import model, task
from diloco.models.decoders.config import DecoderConfig, parse_config, read_config
from diloco.models.decoders.files import HuggingFace


@dataclass(frozen=True)
class CausalLM:
    """A decoder as the functions that a `Task` takes, each named as the field of `Task`.

    Attributes:
        files: the parameters in Hugging Face's format.
        compute: the way in which `logits` are computed.
    """

    files: HuggingFace
    compute: model.Compute

    @classmethod
    def of(
        cls,
        source: str | Path | Mapping[str, Any],
        *,
        fresh: bool = False,
        dtype: str = "float32",
        remat: bool = True,
    ) -> Self:
        """The decoder of a Hugging Face folder, or of the contents of a `config.json`.

        Args:
            source: a folder, whose tensors a run begins with; or a mapping: "model_type", ...
            fresh: a run begins at random though the folder has tensors.
            dtype: "float32" or "bfloat16": of activations and products; parameters stay float32.
            remat: recompute each block in the backward pass.

        Raises:
            ConfigError: the configuration is missing, or says what is not honoured.
        """
        if isinstance(source, Mapping):
            files = HuggingFace(parse_config(source, source="the mapping"), None, fresh=True)
        else:
            files = HuggingFace(read_config(Path(source)), Path(source), fresh)
        return cls(files, model.Compute(dtype, remat))

    @property
    def _config(self) -> DecoderConfig:
        return self.files.config

    def init(self, key: jax.Array) -> Params:
        """Parameters at random, float32."""
        return model.init_params(self._config, key)

    def logits(
        self, params: Params, tokens_BxL: jax.Array, segments_BxL: jax.Array | None = None
    ) -> jax.Array:
        """Logits of the token behind each, float32 [B, L, V].

        Args:
            params: as `init` gives them.
            tokens_BxL: int.
            segments_BxL: int; no token sees one of another segment. None: each row is one.
        """
        return model.logits_of(self._config, params, tokens_BxL, segments_BxL, compute=self.compute)

    def partition(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """The cut of a tensor over a learner's mesh."""
        return task.partition_of(self._config, None, name, shape)

    # How a tensor is merged, and what of it Muon orthogonalizes.
    hint = staticmethod(hint_of_decoder)
    matrices = staticmethod(task.matrices)
