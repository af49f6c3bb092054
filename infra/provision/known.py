"""The dated table of Google Cloud's regions, machines and accelerators, `known.toml`."""

import functools
import re
import tomllib
from datetime import date
from importlib import resources
from typing import Literal

from pydantic import BaseModel

Kind = Literal["v5p", "v6e", "tpu7x", "cpu"]
_MACHINE = re.compile(r"(?P<series>[a-z][a-z0-9]*)-(?P<class>[a-z]+)(-(?P<cores>[0-9]+))?.*")


class Accelerator(BaseModel):
    """The topologies and zones of a kind of accelerator.

    Attributes:
        chips: the numbers of chips that a learner of one host may have.
        topologies: those of slices of several hosts; empty: every topology of `dimensions` numbers.
        most_chips: the most chips of a slice; 0 if unknown.
        hbm_gib: memory of a chip, GiB.
        zones: the zones that have it, complete for regions whose names begin with one of `read`.
    """

    chips: tuple[int, ...]
    hbm_gib: int
    dimensions: int
    zones: frozenset[str]
    read: tuple[str, ...]
    topologies: tuple[str, ...] = ()
    most_chips: int = 0


class MachineClass(BaseModel):
    """The sizes of a class of machines: `gb` of memory for each of its `cores`."""

    gb: float
    cores: tuple[int, ...]


class Series(BaseModel):
    """A series of machines, by class; without classes its sizes are unknown.

    Attributes:
        hyperdisk: True if its machines take no pd-balanced disk.
        arm: True if its processors are not those that releases are for.
        paid: hardware in its price that diloco would not use.
    """

    standard: MachineClass | None = None
    highmem: MachineClass | None = None
    highcpu: MachineClass | None = None
    hyperdisk: bool = False
    arm: bool = False
    paid: str = ""

    @property
    def classes(self) -> dict[str, MachineClass]:
        """The classes whose sizes are known."""
        named = {"standard": self.standard, "highmem": self.highmem, "highcpu": self.highcpu}
        return {name: one for name, one in named.items() if one}


class Known(BaseModel):
    """The table; `as_of`: when Google's pages were read; `regions`: letters of zones by region."""

    as_of: date
    kinds: dict[str, Accelerator]
    series: dict[str, Series]
    regions: dict[str, str]

    def size_of(self, machine_type: str) -> tuple[int, int] | None:
        """Returns the cores and the bytes of memory of a machine; None if they are unknown."""
        found = _MACHINE.fullmatch(machine_type)
        if found is None or found["cores"] is None or found["series"] not in self.series:
            return None
        known = self.series[found["series"]].classes.get(found["class"])
        cores = int(found["cores"])
        return (cores, round(cores * known.gb * 10**9)) if known and cores in known.cores else None

    def memory_bytes(self, machine_type: str) -> int | None:
        """Returns the bytes of memory of a machine; None if unknown."""
        size = self.size_of(machine_type)
        return size[1] if size else None

    def machine_with(self, memory_bytes: int) -> str | None:
        """Returns the smallest machine of the default series with at least this memory, or None."""
        sizes = self.series["n2"].classes["highmem"].cores
        names = [f"n2-highmem-{cores}" for cores in sizes if cores >= 4]
        return next((one for one in names if (self.memory_bytes(one) or 0) >= memory_bytes), None)


@functools.cache
def known() -> Known:
    """Returns the packaged table."""
    text = resources.files("diloco.infra.provision").joinpath("known.toml").read_text("utf-8")
    return Known.model_validate(tomllib.loads(text))
