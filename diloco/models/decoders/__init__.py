"""Decoders of published families (`families`), from Hugging Face checkpoints and back."""

from diloco.models.decoders.task import build

__all__ = ["build"]
