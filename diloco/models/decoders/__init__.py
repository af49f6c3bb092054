"""Trains decoders of published families (`families`); reads and writes Hugging Face checkpoints."""

from diloco.models.decoders.task import build

__all__ = ["build"]
