"""Offers a published decoder as functions, for users' tasks that define their own loss."""

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
    """A decoder as functions for a task; a function that a field of `Task` takes is named like it.

    Attributes:
        files: reads and writes the parameters in Hugging Face's format.
        compute: dtype, recomputation and attention of `logits`.
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
        """Returns the decoder of a Hugging Face folder, or of the contents of a `config.json`.

        Args:
            source: a Hugging Face folder, whose tensors are the run's first parameters; or the
                content of a `config.json`.
            fresh: whether the first parameters are random although the folder has tensors.
            dtype: "float32" or "bfloat16": of activations and products; parameters stay float32.
            remat: whether to recompute each block in the backward pass.

        Raises:
            ConfigError: the configuration is missing, or has a key or value that is not supported.
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
        """Returns random parameters, float32."""
        return model.init_params(self._config, key)

    def logits(
        self, params: Params, tokens_BxL: jax.Array, segments_BxL: jax.Array | None = None
    ) -> jax.Array:
        """Returns the logits of each next token, float32 [B, L, V].

        Args:
            params: as `init` returns them.
            tokens_BxL: token ids, int.
            segments_BxL: segment of each token, int; a token attends only within its segment.
                None: each row is one segment.
        """
        return model.logits_of(self._config, params, tokens_BxL, segments_BxL, compute=self.compute)

    def partition(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        """Returns a tensor's partition over a learner's mesh, given the tensor's name and shape."""
        return task.partition_of(self._config, None, name, shape)

    # Fields of `Task`: how to merge a tensor, and which of its matrices Muon orthogonalizes.
    hint = staticmethod(hint_of_decoder)
    matrices = staticmethod(task.matrices)
