"""The built-in task: trains a small transformer on the bytes of a text."""

from diloco.models.bytes_lm.model import build

__all__ = ["build"]
