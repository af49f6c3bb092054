"""The daily cost of a run, by the place of its bucket. Pure.

Not counted: the learners' own machines (`diloco check` counts a fleet's), gateways, snapshots,
logs, and bytes between zones.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import field_validator

from diloco.common.process.config.run import Section
from diloco.plan.forecast import Plan

GIB = 1 << 30
MONTH_DAYS = 365.25 / 12
# The machines of infra/terraform: servers of the bus, aggregators, a keeper, and GiB of disks.
BUS_NODES, BUS_MACHINE, BUS_BOOT_GIB, BUS_STREAMS_GIB = 3, "e2-standard-2", 20, 50
AGGREGATORS, AGGREGATOR_DISK_GIB = 2, 50
KEEPER_MACHINE, KEEPER_DISK_GIB = "e2-micro", 20
DISK, STREAMS_DISK = "pd-balanced", "pd-ssd"
# The series of an aggregator's machine, and its GB for each core.
AGGREGATOR_CLASS, CORE_GB = "n2-highmem", 8
# Memory beside an aggregator's arrays: the system, the interpreter, a reserve.
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
    gateway_machine: float
    gateway_machines: int
    gateway_address: float
    secret: float
    chips: dict[str, float]
    aggregator_cores: tuple[int, ...]
    uploads_charged: bool
    continents: dict[str, str]
    egress: dict[str, float]
    other: float

    @field_validator("egress")
    @classmethod
    def _of_pairs(cls, egress: dict[str, float]) -> dict[str, float]:
        """Returns the prices with each pair of continents in alphabetical order."""
        for key in egress:
            if len(key.split()) != 2:
                raise ValueError(f"{key!r}: expected two continents with a space between them")
        return {" ".join(sorted(key.split())): price for key, price in egress.items()}

    def continent(self, region: str) -> str:
        """Returns the continent of a region; "" if unknown."""
        return self.continents.get(region.partition("-")[0], "")

    def machine(self, name: str, cores: int, gib: float) -> float | None:
        """Returns the dollars an hour of a machine; None if its price is unknown."""
        rate = self.series.get(name.partition("-")[0])
        if name in self.machines or rate is None:
            return self.machines.get(name)
        return cores * rate.core + gib * rate.gib

    def disk_day(self, kind: str, gib: float) -> float:
        """Returns the dollars a day of a disk."""
        return self.disks[kind] * gib / MONTH_DAYS

    def between(self, one: str, other: str) -> float:
        """Returns the dollars for a GiB between two regions."""
        if one == other:
            return 0.0
        pair = sorted((self.continent(one), self.continent(other)))
        return self.egress.get(" ".join(pair), self.other)


class DailyCost(NamedTuple):
    """Dollars a day of one arrangement, by part.

    Attributes:
        downloads: reads of deltas and, if the bucket charges for them, of updates.
        records: reads of records by all learners, from the bus, which is beside the aggregator.
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
    """Returns the costs of a regional bucket and of a multi-region one, the cheapest first."""
    regional = [_regional(prices, regions, place, made) for place in sorted(set(regions))]
    best = min(regional, key=lambda cost: cost.total)
    return sorted([best, _multi_region(prices, regions, made)], key=lambda cost: cost.total)


def aggregator_cores(prices: Prices, made: Plan) -> int:
    """Returns the cores of the smallest machine that holds the model; if none, of the largest."""
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
    gib = AGGREGATORS * AGGREGATOR_DISK_GIB + BUS_NODES * BUS_BOOT_GIB + KEEPER_DISK_GIB
    streams = prices.disk_day(STREAMS_DISK, BUS_NODES * BUS_STREAMS_GIB)
    return prices.disk_day(DISK, gib) + streams


def at_interval(cost: DailyCost, asked: int, steps: int) -> float:
    """Returns the dollars a day with H = `asked`: all but machines and disks scale with sends."""
    fixed = cost.machines + cost.disks
    return fixed + (cost.total - fixed) * asked / steps


def _each_gib(made: Plan) -> tuple[float, float]:
    """Returns the GiB a day that each learner sends, and that it reads."""
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
    """Returns the cost of a bucket on most learners' continent; the others pay for the distance."""
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
