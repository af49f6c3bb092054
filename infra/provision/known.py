"""The dated table of what Google Cloud has, `known.toml`."""

import functools
import re
import tomllib
from importlib import resources
from typing import Any, Literal, NamedTuple

Kind = Literal["v5p", "v6e", "tpu7x", "cpu"]
_MACHINE = re.compile(r"(?P<series>[a-z][a-z0-9]+)-(?P<class>standard|highmem)-(?P<cores>[0-9]+)")


class Accelerator(NamedTuple):
    """The topologies, zones and runtime of a kind of accelerator.

    Attributes:
        chips: that a learner of one host may have.
        topologies: of slices of several hosts; empty where all of so many `dimensions` are.
        most_chips: of a slice; 0 where it is not known.
        zones: that have it, all of them in regions whose names begin with one of `read`.
        runtime: the software's name for the Cloud TPU API; "" where it is not known.
    """

    chips: tuple[int, ...]
    dimensions: int
    zones: frozenset[str]
    read: tuple[str, ...]
    topologies: tuple[str, ...] = ()
    most_chips: int = 0
    runtime: str = ""


class Known(NamedTuple):
    """The table.

    Attributes:
        as_of: when the pages were read.
        series: of machines whose memory is known.
        cores: that machines of these have; `gb_of_core` the memory for each, by class.
    """

    as_of: str
    kinds: dict[str, Accelerator]
    series: frozenset[str]
    cores: tuple[int, ...]
    gb_of_core: dict[str, int]

    def memory_bytes(self, machine_type: str) -> int | None:
        """The memory of a machine; None where it is not known."""
        found = _MACHINE.fullmatch(machine_type)
        if found is None or found["series"] not in self.series:
            return None
        if int(found["cores"]) not in self.cores:
            return None
        return int(found["cores"]) * self.gb_of_core[found["class"]] * 10**9

    def machine_with(self, memory_bytes: int) -> str | None:
        """The smallest machine of the default series that has so much memory."""
        names = [f"n2-highmem-{cores}" for cores in self.cores if cores >= 4]
        return next((one for one in names if (self.memory_bytes(one) or 0) >= memory_bytes), None)


@functools.cache
def known() -> Known:
    """The packaged table."""
    text = resources.files("diloco.infra.provision").joinpath("known.toml").read_text("utf-8")
    document = tomllib.loads(text)
    machines = document["machines"]
    return Known(
        as_of=str(document["as_of"]),
        kinds={name: _accelerator(one) for name, one in document["kinds"].items()},
        series=frozenset(machines["series"]),
        cores=tuple(machines["cores"]),
        gb_of_core={name: machines[name] for name in ("standard", "highmem")},
    )


def _accelerator(document: dict[str, Any]) -> Accelerator:
    values = {key: tuple(one) if isinstance(one, list) else one for key, one in document.items()}
    return Accelerator(**values | {"zones": frozenset(values["zones"])})
