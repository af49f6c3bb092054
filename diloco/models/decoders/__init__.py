"""Decoders that people have, from their checkpoints and back: of the families in `families`."""

from diloco.models.decoders.task import build

__all__ = ["build"]
