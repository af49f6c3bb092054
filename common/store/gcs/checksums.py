"""crc32c, as the service writes it."""

import base64

import requests

from diloco.common.parts import Data
from diloco.common.shards import crc32c


def checksum_of(data: Data) -> str:
    """The crc32c of `data`: base64 of four bytes, the greatest first."""
    return base64.b64encode(crc32c(data).to_bytes(4, "big")).decode()


def stored_checksum(response: requests.Response) -> str:
    """The crc32c in a header like "crc32c=AAAAAA==,md5=..."."""
    hashes = (item.strip().partition("=") for item in response.headers["x-goog-hash"].split(","))
    return next(value for kind, _, value in hashes if kind == "crc32c")
