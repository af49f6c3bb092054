"""The dated table of what Google Cloud has, `known.toml`."""

import functools
import re
import tomllib
from datetime import date
from importlib import resources
from typing import Literal

from pydantic import BaseModel

Kind = Literal["v5p", "v6e", "tpu7x", "cpu"]
_MACHINE = re.compile(r"(?P<series>[a-z][a-z0-9]+)-(?P<class>standard|highmem)-(?P<cores>[0-9]+)")


class Accelerator(BaseModel):
    """The topologies and zones of a kind of accelerator.

    Attributes:
        chips: that a learner of one host may have.
        topologies: of slices of several hosts; empty where all of so many `dimensions` are.
        most_chips: of a slice; 0 where it is not known.
        zones: that have it, all of them in regions whose names begin with one of `read`.
    """

    chips: tuple[int, ...]
    dimensions: int
    zones: frozenset[str]
    read: tuple[str, ...]
    topologies: tuple[str, ...] = ()
    most_chips: int = 0


class Machines(BaseModel):
    """Machines whose memory is known: GB for each of their cores, by class."""

    series: frozenset[str]
    cores: tuple[int, ...]
    standard: int
    highmem: int


class Known(BaseModel):
    """The table; `as_of` is when the pages were read."""

    as_of: date
    kinds: dict[str, Accelerator]
    machines: Machines

    def memory_bytes(self, machine_type: str) -> int | None:
        """The memory of a machine; None where it is not known."""
        found, known = _MACHINE.fullmatch(machine_type), self.machines
        if found is None or found["series"] not in known.series:
            return None
        if int(found["cores"]) not in known.cores:
            return None
        of_core = known.standard if found["class"] == "standard" else known.highmem
        return int(found["cores"]) * of_core * 10**9

    def machine_with(self, memory_bytes: int) -> str | None:
        """The smallest machine of the default series that has so much memory."""
        names = [f"n2-highmem-{cores}" for cores in self.machines.cores if cores >= 4]
        return next((one for one in names if (self.memory_bytes(one) or 0) >= memory_bytes), None)


@functools.cache
def known() -> Known:
    """The packaged table."""
    text = resources.files("diloco.infra.provision").joinpath("known.toml").read_text("utf-8")
    return Known.model_validate(tomllib.loads(text))
