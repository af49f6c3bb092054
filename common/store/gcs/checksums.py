"""crc32c, as the service writes it."""

import base64

import google_crc32c
import requests

PIECE_BYTES = 1 << 20


def checksum_of(data: bytes | memoryview) -> str:
    """The crc32c of `data`: base64 of four bytes, the greatest first."""
    return base64.b64encode(_crc32c(data).to_bytes(4, "big")).decode()


def stored_checksum(response: requests.Response) -> str:
    """The crc32c in a header like "crc32c=AAAAAA==,md5=..."."""
    hashes = (item.strip().partition("=") for item in response.headers["x-goog-hash"].split(","))
    return next(value for kind, _, value in hashes if kind == "crc32c")


def _crc32c(data: bytes | memoryview) -> int:
    """Of any bytes; the library takes nothing but `bytes`."""
    if isinstance(data, bytes):
        return int(google_crc32c.value(data))
    view, value = data.cast("B"), 0
    for start in range(0, view.nbytes, PIECE_BYTES):
        value = google_crc32c.extend(value, bytes(view[start : start + PIECE_BYTES]))
    return value
