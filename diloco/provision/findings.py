"""What is wrong with a fleet, as sentences."""

from typing import NamedTuple


class Finding(NamedTuple):
    """One sentence; `refused` where nothing may be made before it is mended."""

    sentence: str
    refused: bool = True
