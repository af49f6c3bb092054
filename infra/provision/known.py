"""Reads `known.toml`, a dated table of Google Cloud's regions, machine types and accelerators."""

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
    """The sizes and zones of a kind of accelerator.

    Attributes:
        chips: the numbers of chips that a learner of one host may have.
        hbm_gib: GiB of memory of a chip.
        dimensions: the number of sides of a topology: 2 of 4x4, 3 of 4x4x4.
        zones: the zones that have this kind.
        read: beginnings of regions' names, such as "us", for which `zones` is complete.
        topologies: the topologies of slices of several hosts; empty: each whose sides are multiples
            of 4, and some small ones.
        most_chips: the most chips of a slice; 0 if unknown.
    """

    chips: tuple[int, ...]
    hbm_gib: int
    dimensions: int
    zones: frozenset[str]
    read: tuple[str, ...]
    topologies: tuple[str, ...] = ()
    most_chips: int = 0


class MachineClass(BaseModel):
    """The sizes of a class of machines, such as highmem in a series.

    Attributes:
        gb: GB of memory for each core.
        cores: the numbers of cores that a machine may have.
    """

    gb: float
    cores: tuple[int, ...]


class Series(BaseModel):
    """A series of machines, such as n2.

    Attributes:
        standard, highmem, highcpu: sizes of each class; None if unknown, or if there is no such
            class.
        hyperdisk: True if machines of the series take no pd-balanced disk.
        arm: True if their processors are ARM, which releases are not for.
        paid: hardware in their price that diloco would not use; "": none.
    """

    standard: MachineClass | None = None
    highmem: MachineClass | None = None
    highcpu: MachineClass | None = None
    hyperdisk: bool = False
    arm: bool = False
    paid: str = ""

    @property
    def classes(self) -> dict[str, MachineClass]:
        """The classes whose sizes are known, by name."""
        named = {"standard": self.standard, "highmem": self.highmem, "highcpu": self.highcpu}
        return {name: one for name, one in named.items() if one}


class Known(BaseModel):
    """The table.

    Attributes:
        as_of: the day on which Google's pages were read.
        kinds: accelerators by kind.
        series: series of machines by name.
        regions: letters of the zones of each region, such as "abcf".
    """

    as_of: date
    kinds: dict[str, Accelerator]
    series: dict[str, Series]
    regions: dict[str, str]

    def size_of(self, machine_type: str) -> tuple[int, int] | None:
        """Returns (cores, bytes of memory) of a machine type; None if unknown."""
        found = _MACHINE.fullmatch(machine_type)
        if found is None or found["cores"] is None or found["series"] not in self.series:
            return None
        known = self.series[found["series"]].classes.get(found["class"])
        cores = int(found["cores"])
        return (cores, round(cores * known.gb * 10**9)) if known and cores in known.cores else None

    def memory_bytes(self, machine_type: str) -> int | None:
        """Returns the bytes of memory of a machine type; None if unknown."""
        size = self.size_of(machine_type)
        return size[1] if size else None

    def machine_with(self, memory_bytes: int) -> str | None:
        """Returns the smallest n2-highmem machine type with at least `memory_bytes` of memory.

        None if none has as much.
        """
        sizes = self.series["n2"].classes["highmem"].cores
        names = [f"n2-highmem-{cores}" for cores in sizes if cores >= 4]
        return next((one for one in names if (self.memory_bytes(one) or 0) >= memory_bytes), None)


@functools.cache
def known() -> Known:
    """Returns the table of the packaged `known.toml`."""
    text = resources.files("diloco.infra.provision").joinpath("known.toml").read_text("utf-8")
    return Known.model_validate(tomllib.loads(text))
