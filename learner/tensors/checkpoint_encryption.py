"""Encrypts checkpoints that a learner uploads, with a key that only its owner has.

Who may read the run's store can read uploaded checkpoints, and private leaves are nowhere else. A
sealed checkpoint is AES-256-GCM in chunks, as one call takes less than 2 GiB. Each chunk's
associated data names the checkpoint, the chunk and the number of chunks, so that no chunk can be
moved, left out, or shown as part of another checkpoint.
"""

import os
from pathlib import Path

from diloco.common.process.credentials import check_secret
from diloco.common.protocol.errors import CheckpointError, ConfigError
from diloco.common.protocol.shards import Buffers, Data, parts_of

MAGIC = b"diloco sealed checkpoint 1\n"
KEY_BYTES = 32
CHUNK_BYTES = 64 << 20
_NONCE_BYTES, _TAG_BYTES = 12, 16
_CHUNK_OVERHEAD = _NONCE_BYTES + _TAG_BYTES


def read_key(path: str) -> bytes:
    """Returns the key in a file of 64 hexadecimal digits, uint8 [32].

    Raises:
        ConfigError: the file cannot be read, others can read it, or it holds something else.
    """
    try:
        status = Path(path).stat()
        key = bytes.fromhex(Path(path).read_text(encoding="ascii").strip())
    except OSError as error:
        raise ConfigError(
            f"learner.checkpoint_key: cannot read {path!r}: {error.strerror}"
        ) from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"learner.checkpoint_key: {path!r} must hold {2 * KEY_BYTES} hexadecimal digits",
            hint="make one: (umask 077; openssl rand -hex 32 > FILE); and keep a copy, as nothing"
            " else opens the uploads",
        )
    again = "if others may have read it, delete the uploads and make another"
    check_secret("learner.checkpoint_key:", Path(path), status, again)
    return key


def about(run: str, learner: str, local_step: int, part: str) -> str:
    """Returns the name of a checkpoint for `seal`; `part` is the name of a host's part, or ""."""
    return f"{run} {learner} {local_step} {part}"


def seal(key: bytes, data: Data, about: str) -> Buffers:
    """Returns `data`, encrypted and authenticated.

    Args:
        key: uint8 [32].
        data: the bytes.
        about: the name under which `opened` must be asked for them.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    cipher, chunks, parts = AESGCM(key), _chunks(len(data)), parts_of(data)
    sealed = [MAGIC]
    for index in range(chunks):
        nonce = os.urandom(_NONCE_BYTES)
        chunk = bytes(parts.between(index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES))
        sealed += [nonce, cipher.encrypt(nonce, chunk, _context(about, index, chunks))]
    return Buffers(*sealed)


def opened(key: bytes | None, data: bytes, about: str) -> bytes:
    """Returns what `seal` encrypted; without a key, `data` itself.

    Args:
        key: uint8 [32]; None: nothing is expected to be sealed.
        data: the bytes, which may be untrusted.
        about: the name that `seal` was given.

    Raises:
        CheckpointError: the data is sealed and there is no key; or it is not sealed, of another key
            or name, or changed.
    """
    if key is None:
        if data.startswith(MAGIC):
            raise CheckpointError("it is encrypted, and learner.checkpoint_key is not set")
        return data
    if not data.startswith(MAGIC):
        raise CheckpointError("it is not encrypted, though learner.checkpoint_key is set")
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    body = memoryview(data)[len(MAGIC) :]
    step = CHUNK_BYTES + _CHUNK_OVERHEAD
    chunks = max(1, -(-len(body) // step))
    cipher, parts = AESGCM(key), []
    try:
        for index in range(chunks):
            chunk = bytes(body[index * step : (index + 1) * step])
            nonce, sealed = chunk[:_NONCE_BYTES], chunk[_NONCE_BYTES:]
            parts.append(cipher.decrypt(nonce, sealed, _context(about, index, chunks)))
    except (InvalidTag, ValueError) as error:
        raise CheckpointError(
            "learner.checkpoint_key does not open it: the key is another, or its bytes were changed"
        ) from error
    return b"".join(parts)


def sealed_bytes(size_bytes: int) -> int:
    """Returns the length of `seal` for data of `size_bytes`."""
    return len(MAGIC) + size_bytes + _chunks(size_bytes) * _CHUNK_OVERHEAD


def _chunks(size_bytes: int) -> int:
    return max(1, -(-size_bytes // CHUNK_BYTES))


def _context(about: str, index: int, chunks: int) -> bytes:
    return f"{about} {index}/{chunks}".encode()
