"""The cost of a run a day, by where its bucket is: pure.

Left out: the learners' own machines (`diloco host provision` counts a fleet's), logs, and bytes
between zones.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import field_validator

from diloco.common.process.config.run import Section
from diloco.plan.forecast import Plan

GIB = 1 << 30
MONTH_DAYS = 365.25 / 12
# What infra/terraform makes: servers of the bus, aggregators, a keeper, with disks of so many GiB.
BUS_NODES, BUS_MACHINE, BUS_DISKS_GIB = 3, "e2-standard-2", 20 + 50
AGGREGATORS, AGGREGATOR_DISK_GIB = 2, 50
KEEPER_MACHINE, KEEPER_DISK_GIB = "e2-micro", 20
DISK = "pd-balanced"
# An aggregator's machine: of this class, with so many GB for each core.
AGGREGATOR_CLASS, CORE_GB = "n2-highmem", 8
# Beside an aggregator's arrays: the system, the interpreter, and room to breathe.
REST_BYTES = 4 * 10**9


class Rate(Section):
    """Dollars an hour of a core and of a GiB of memory."""

    core: float
    gib: float


class Prices(Section):
    """A table of prices in dollars, which prices.toml explains."""

    as_of: str
    regional_a: float
    regional_b: float
    multi_region_a: float
    multi_region_b: float
    regional_storage: float
    multi_region_storage: float
    replication: float
    multi_region_read: float
    series: dict[str, Rate]
    machines: dict[str, float]
    disks: dict[str, float]
    chips: dict[str, float]
    aggregator_cores: tuple[int, ...]
    uploads_charged: bool
    continents: dict[str, str]
    egress: dict[str, float]
    other: float

    @field_validator("egress")
    @classmethod
    def _of_pairs(cls, egress: dict[str, float]) -> dict[str, float]:
        """Pairs of continents in alphabetical order."""
        for key in egress:
            if len(key.split()) != 2:
                raise ValueError(f"{key!r}: expected two continents with a space between them")
        return {" ".join(sorted(key.split())): price for key, price in egress.items()}

    def continent(self, region: str) -> str:
        """The continent of a region; "" if no name begins so."""
        return self.continents.get(region.partition("-")[0], "")

    def machine(self, name: str, cores: int, gib: float) -> float | None:
        """Dollars an hour of a machine; None where its price is not known."""
        rate = self.series.get(name.partition("-")[0])
        if name in self.machines or rate is None:
            return self.machines.get(name)
        return cores * rate.core + gib * rate.gib

    def disk_day(self, kind: str, gib: float) -> float:
        """Dollars a day of a disk."""
        return self.disks[kind] * gib / MONTH_DAYS

    def between(self, one: str, other: str) -> float:
        """Dollars for a GiB from a region to another one."""
        if one == other:
            return 0.0
        pair = sorted((self.continent(one), self.continent(other)))
        return self.egress.get(" ".join(pair), self.other)


class DailyCost(NamedTuple):
    """Dollars a day of one arrangement, by part.

    Attributes:
        downloads: of deltas and, where the bucket charges it, of updates.
        records: that each learner reads from the place of the bus, beside the aggregator.
    """

    name: str
    operations: float
    storage: float
    uploads: float
    downloads: float
    records: float
    replication: float
    machines: float
    disks: float

    @property
    def total(self) -> float:
        """The total of a day."""
        return sum(self[1:])


def compare(prices: Prices, regions: Sequence[str], made: Plan) -> list[DailyCost]:
    """A regional bucket with the aggregator beside it, and a multi-region one; cheapest first."""
    regional = [_regional(prices, regions, place, made) for place in sorted(set(regions))]
    best = min(regional, key=lambda cost: cost.total)
    return sorted([best, _multi_region(prices, regions, made)], key=lambda cost: cost.total)


def aggregator_cores(prices: Prices, made: Plan) -> int:
    """Cores of the smallest machine that holds the model; of the largest where none does."""
    needed = made.memory_bytes + REST_BYTES
    fitting = (cores for cores in prices.aggregator_cores if cores * CORE_GB * 10**9 >= needed)
    return next(fitting, max(prices.aggregator_cores))


def _machines(prices: Prices, made: Plan) -> float:
    cores = aggregator_cores(prices, made)
    rate = prices.series[AGGREGATOR_CLASS.partition("-")[0]]
    aggregators = AGGREGATORS * cores * (rate.core + CORE_GB * rate.gib)
    bus = BUS_NODES * prices.machines[BUS_MACHINE]
    return 24 * (aggregators + bus + prices.machines[KEEPER_MACHINE])


def _disks(prices: Prices) -> float:
    gib = AGGREGATORS * AGGREGATOR_DISK_GIB + BUS_NODES * BUS_DISKS_GIB + KEEPER_DISK_GIB
    return prices.disk_day(DISK, gib)


def at_interval(cost: DailyCost, asked: int, steps: int) -> float:
    """Dollars a day with another H: all parts but machines and disks follow the number of sends."""
    fixed = cost.machines + cost.disks
    return fixed + (cost.total - fixed) * asked / steps


def _each_gib(made: Plan) -> tuple[float, float]:
    """GiB a day that each learner sends and reads."""
    daily = made.daily
    read = daily.bytes_read - daily.bytes_merged
    return daily.bytes_merged / made.learners / GIB, read / made.learners / GIB


def _records(prices: Prices, regions: Sequence[str], place: str, made: Plan) -> float:
    between = sum(prices.between(region, place) for region in regions)
    return made.daily.record_reads / made.learners / GIB * between


def _regional(prices: Prices, regions: Sequence[str], place: str, made: Plan) -> DailyCost:
    between = sum(prices.between(region, place) for region in regions)
    daily, (up_gib, down_gib) = made.daily, _each_gib(made)
    return DailyCost(
        f"regional bucket in {place}, aggregator beside it",
        (daily.objects_written * prices.regional_a + daily.gets * prices.regional_b) / 1000,
        made.retained_bytes / GIB * prices.regional_storage / MONTH_DAYS,
        up_gib * between * prices.uploads_charged,
        down_gib * between,
        _records(prices, regions, place, made),
        0.0,
        _machines(prices, made),
        _disks(prices),
    )


def _multi_region(prices: Prices, regions: Sequence[str], made: Plan) -> DailyCost:
    """On the continent of most learners; whoever is on another pays for the way there too."""
    counts = Counter(prices.continent(region) for region in regions)
    place, _ = counts.most_common(1)[0]
    away = [region for region in regions if prices.continent(region) != place]
    home = next(region for region in regions if prices.continent(region) == place)
    between = sum(prices.between(region, home) for region in away)
    near = len(regions) - len(away)
    daily, (up_gib, down_gib) = made.daily, _each_gib(made)
    return DailyCost(
        f"multi-region bucket in {place}",
        (daily.objects_written * prices.multi_region_a + daily.gets * prices.multi_region_b) / 1000,
        made.retained_bytes / GIB * prices.multi_region_storage / MONTH_DAYS,
        up_gib * between * prices.uploads_charged,
        down_gib * (between + near * prices.multi_region_read)
        + daily.bytes_merged / GIB * prices.multi_region_read,
        _records(prices, regions, home, made),
        daily.bytes_written / GIB * prices.replication,
        _machines(prices, made),
        _disks(prices),
    )
