"""Text from the built-in model, byte by byte.

Shapes: L positions of the window, V vocabulary.
"""

import codecs
from collections.abc import Callable, Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from diloco.learner.task import Params

BYTES = 256
# What a text without a beginning begins with.
START = b"\n"

Sample = Callable[[Params, str, jax.Array, float], Iterator[str]]


def make_sampler(model: nn.Module, length: int) -> Sample:
    """A task's `sample` for a model of bytes.

    Args:
        model: int32 [1, L] -> logits [1, L, V].
        length: L, the positions it was trained on; of a longer text it sees the last L bytes.
    """

    @jax.jit
    def next_byte(
        params: Params, window_L: jax.Array, last: jax.Array, key: jax.Array, heat: jax.Array
    ) -> jax.Array:
        logits_LxV = jnp.asarray(model.apply({"params": params}, window_L[None]))[0]
        logits_V = logits_LxV[last, :BYTES].astype(jnp.float32)
        drawn = jax.random.categorical(key, logits_V / jnp.maximum(heat, 1e-6))
        return jnp.where(heat > 0, drawn, jnp.argmax(logits_V))

    def sample(params: Params, prompt: str, key: jax.Array, temperature: float) -> Iterator[str]:
        seen = (prompt.encode() or START)[-length:]
        # A character may be several bytes; the model may also write bytes that are none.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for number in range(1 << 31):
            window_L = np.zeros(length, np.int32)
            window_L[: len(seen)] = np.frombuffer(seen, np.uint8)
            chosen = next_byte(
                params, window_L, len(seen) - 1, jax.random.fold_in(key, number), temperature
            )
            written = bytes([int(chosen)])
            seen = (seen + written)[-length:]
            yield decoder.decode(written)

    return sample
