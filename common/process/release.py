"""The release of the program that runs and its packages, as records name their maker."""

import re
from functools import cache
from importlib import metadata

from diloco.common.protocol import shards

# Of a requirement such as `jax>=0.7; extra == "dev"`.
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@cache
def release() -> str:
    """The release that is installed."""
    return metadata.version("diloco")


@cache
def packages() -> tuple[str, ...]:
    """The installed packages among those that the program requires, as `name==version`, by name."""
    required = [line for line in metadata.requires("diloco") or () if "extra ==" not in line]
    return tuple(sorted(filter(None, map(_installed, required))))


def _installed(requirement: str) -> str:
    name = _NAME.match(requirement)
    if name is None:
        return ""
    try:
        return f"{name[0].lower()}=={metadata.version(name[0])}"
    except metadata.PackageNotFoundError:
        return ""


@cache
def lock() -> str:
    """Digest of `packages`."""
    return shards.digest("\n".join(packages()).encode())
