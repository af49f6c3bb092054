"""The installed releases of this program and of its packages; records and joins state them."""

import re
from functools import cache
from importlib import metadata

from diloco.common.protocol import shards

# The name at the beginning of a requirement such as `jax>=0.7; extra == "dev"`.
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@cache
def release() -> str:
    """Returns the installed release of this program."""
    return metadata.version("diloco")


@cache
def packages() -> tuple[str, ...]:
    """Returns the installed packages that this program requires, as `name==version`, sorted.

    Packages of optional extras are left out.
    """
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
    """Returns the xxh3-128 digest of the lines of `packages`, as 32 hex digits."""
    return shards.digest("\n".join(packages()).encode())
