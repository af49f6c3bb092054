"""Decoders that people have, from their checkpoints and back: Llama 3, Qwen 3 and Gemma 3."""

from diloco.models.decoders.task import build

__all__ = ["build"]
