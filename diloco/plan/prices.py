"""Reads a table of prices: the packaged one, or the user's own."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from diloco.common.errors import ConfigError
from diloco.plan.costs import Prices

_HINT = "copy diloco/plan/prices.toml and change its numbers"


def read_prices(path: Path | None) -> Prices:
    """The packaged prices, or those of a file of the same keys.

    Raises:
        ConfigError: the file cannot be read, or lacks a price.
    """
    named = "prices.toml" if path is None else str(path)
    try:
        if path is None:
            text = resources.files("diloco.plan").joinpath("prices.toml").read_text("utf-8")
        else:
            text = path.read_text("utf-8")
        return _prices(tomllib.loads(text))
    except OSError as error:
        raise ConfigError(f"--prices {named}: {error.strerror}", hint=_HINT) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prices {named}: {error}", hint=_HINT) from error
    except KeyError as error:
        raise ConfigError(f"--prices {named}: there is no {error}", hint=_HINT) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"--prices {named}: {error}", hint=_HINT) from error


def _prices(document: dict[str, Any]) -> Prices:
    operations, storage = document["operations"], document["storage"]
    egress = {key: float(price) for key, price in document["egress"].items()}
    other = egress.pop("other")
    return Prices(
        as_of=str(document["as_of"]),
        regional_a=float(operations["regional_a"]),
        regional_b=float(operations["regional_b"]),
        multi_region_a=float(operations["multi_region_a"]),
        multi_region_b=float(operations["multi_region_b"]),
        regional_storage=float(storage["regional"]),
        multi_region_storage=float(storage["multi_region"]),
        replication=float(document["multi_region"]["replication"]),
        multi_region_read=float(document["multi_region"]["read"]),
        core=float(document["machines"]["core"]),
        gib=float(document["machines"]["gib"]),
        uploads_charged=bool(document["uploads"]["charged"]),
        continents={str(start): str(name) for start, name in document["continents"].items()},
        egress={_pair(key): price for key, price in egress.items()},
        other=other,
    )


def _pair(key: str) -> tuple[str, str]:
    names = sorted(key.split())
    if len(names) != 2:
        raise ValueError(f"egress {key!r}: expected two continents with a space between them")
    return names[0], names[1]
