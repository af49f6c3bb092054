"""How to reach the servers, who we are, and when to try again."""

import asyncio
import math
import random
import ssl
import urllib.parse
from pathlib import Path
from typing import Any, NamedTuple

from diloco.common.credentials import load_credentials
from diloco.common.errors import ConfigError

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.1, 5.0


class Address(NamedTuple):
    """How to reach the servers and who we are."""

    url: str
    name: str
    credentials: Path | None
    inbox_prefix: str
    api: str
    tls_ca: Path | None

    def tls(self) -> ssl.SSLContext | None:
        """What the server's certificate is checked with; None if the URL and file ask for none."""
        if self.tls_ca is None and not self.url.startswith("tls://"):
            return None
        return ssl.create_default_context(cafile=self.tls_ca)

    def identity(self) -> dict[str, Any]:
        """Arguments of nats-py's `connect` that prove who we are, read anew."""
        if self.credentials is None:
            return {}
        own = load_credentials(self.credentials)
        if own is None:
            return {"user_credentials": str(self.credentials)}
        return {"nkeys_seed_str": own.seed}

    def shown(self) -> str:
        """The URL without user names and passwords."""
        return shown(self.url)


class Pause:
    """Growing pauses between attempts, with jitter so that a fleet does not come back at once."""

    def __init__(self) -> None:
        self._next_s = _PAUSE_MIN_S
        self._rng = random.Random()  # noqa: S311 - jitter, no secret

    async def wait(self, at_most_s: float = math.inf) -> None:
        """Sleep for the next pause."""
        pause_s = self._next_s * self._rng.uniform(0.5, 1.5)
        self._next_s = min(self._next_s * 2, _PAUSE_MAX_S)
        await asyncio.sleep(min(pause_s, at_most_s))

    def reset_after(self, good_s: float) -> None:
        """Begin with short pauses again if all was well for longer than the longest pause."""
        if good_s > _PAUSE_MAX_S:
            self._next_s = _PAUSE_MIN_S


def shown(url: str) -> str:
    """A URL without user names and passwords."""
    return ",".join(part.rpartition("@")[2].rpartition("/")[2] for part in url.split(","))


def check_url(url: str) -> None:
    """Refuse what is no URL of NATS servers.

    Raises:
        ConfigError: it is none, or has a port that there is not.
    """
    if not all(_is_server(part) for part in url.split(",")):
        raise ConfigError(f"{shown(url)!r} is not a NATS URL", hint="write nats://host:4222")


def _is_server(part: str) -> bool:
    try:
        parsed = urllib.parse.urlsplit(part)
        return parsed.scheme in {"nats", "tls"} and bool(parsed.hostname) and parsed.port != 0
    except ValueError:  # no port, or no address
        return False


def check_address(address: Address) -> None:
    """Refuse what cannot be reached by its form alone.

    Raises:
        ConfigError: no NATS URL, or certificates that cannot be used.
    """
    check_url(address.url)
    try:
        address.tls()
    except OSError as error:
        raise ConfigError(
            f"cannot use the certificates in {str(address.tls_ca)!r}: {error}",
            hint="bus.tls_ca is a PEM file with the certificate of the server's authority",
        ) from error
