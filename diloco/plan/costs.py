"""What a run costs a day, by where its bucket is: pure.

Left out: the learners' own machines, logs, and bytes between zones.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diloco.plan.forecast import Plan

GIB = 1 << 30
MONTH_DAYS = 365.25 / 12
# The bus: three servers, of so many cores and GiB each. Beside each aggregator one stands by.
BUS_NODES, BUS_CORES, BUS_GIB = 3, 2, 8
AGGREGATORS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """A table of prices in dollars; see prices.toml.

    Attributes:
        egress: of a GiB between the continents of two regions, in alphabetical order.
        other: of a GiB between any two that `egress` lacks.
        continents: of a region, by how its name begins.
    """

    as_of: str
    regional_a: float
    regional_b: float
    multi_region_a: float
    multi_region_b: float
    regional_storage: float
    multi_region_storage: float
    replication: float
    multi_region_read: float
    core: float
    gib: float
    uploads_charged: bool
    continents: Mapping[str, str]
    egress: Mapping[tuple[str, str], float]
    other: float

    def continent(self, region: str) -> str:
        """Where a region is; "" if no name begins so."""
        return self.continents.get(region.partition("-")[0], "")

    def between(self, one: str, other: str) -> float:
        """Dollars for a GiB from a region to another one."""
        if one == other:
            return 0.0
        first, second = sorted((self.continent(one), self.continent(other)))
        return self.egress.get((first, second), self.other)


class Cost(NamedTuple):
    """Dollars a day of one arrangement, by part."""

    name: str
    operations: float
    storage: float
    uploads: float
    downloads: float
    replication: float
    machines: float

    @property
    def total(self) -> float:
        """Of a day."""
        return sum(self[1:])


class Usage(NamedTuple):
    """What a day takes; bytes of each learner, and of all."""

    class_a: float
    class_b: float
    up_gib: float
    down_gib: float
    written_gib: float
    merged_gib: float
    retained_gib: float
    cores: int
    memory_gib: float


def usage(made: Plan) -> Usage:
    """What a day of a planned run takes."""
    daily, learners = made.daily, made.learners
    return Usage(
        class_a=daily.objects_written,
        class_b=daily.gets,
        up_gib=daily.bytes_merged / learners / GIB,
        down_gib=(daily.bytes_read - daily.bytes_merged) / learners / GIB,
        written_gib=daily.bytes_written / GIB,
        merged_gib=daily.bytes_merged / GIB,
        retained_gib=made.retained_bytes / GIB,
        cores=made.cores,
        memory_gib=made.memory_bytes / GIB,
    )


def compare(prices: Prices, regions: Sequence[str], made: Plan) -> list[Cost]:
    """A regional bucket with the aggregator beside it, and a multi-region one; cheapest first."""
    used = usage(made)
    best = min(
        (_regional(prices, regions, place, used) for place in sorted(set(regions))),
        key=lambda cost: cost.total,
    )
    return sorted([best, _multi_region(prices, regions, used)], key=lambda cost: cost.total)


def _machines(prices: Prices, used: Usage) -> float:
    cores = AGGREGATORS * used.cores + BUS_NODES * BUS_CORES
    gib = AGGREGATORS * used.memory_gib + BUS_NODES * BUS_GIB
    return 24 * (cores * prices.core + gib * prices.gib)


def _regional(prices: Prices, regions: Sequence[str], place: str, used: Usage) -> Cost:
    between = sum(prices.between(region, place) for region in regions)
    return Cost(
        f"regional bucket in {place}, aggregator beside it",
        (used.class_a * prices.regional_a + used.class_b * prices.regional_b) / 1000,
        used.retained_gib * prices.regional_storage / MONTH_DAYS,
        used.up_gib * between * prices.uploads_charged,
        used.down_gib * between,
        0.0,
        _machines(prices, used),
    )


def _multi_region(prices: Prices, regions: Sequence[str], used: Usage) -> Cost:
    """On the continent of most learners; whoever is on another pays for the way there too."""
    counts = Counter(prices.continent(region) for region in regions)
    place, _ = counts.most_common(1)[0]
    away = [region for region in regions if prices.continent(region) != place]
    home = next(region for region in regions if prices.continent(region) == place)
    between = sum(prices.between(region, home) for region in away)
    near = len(regions) - len(away)
    return Cost(
        f"multi-region bucket in {place}",
        (used.class_a * prices.multi_region_a + used.class_b * prices.multi_region_b) / 1000,
        used.retained_gib * prices.multi_region_storage / MONTH_DAYS,
        used.up_gib * between * prices.uploads_charged,
        used.down_gib * (between + near * prices.multi_region_read)
        + used.merged_gib * prices.multi_region_read,
        used.written_gib * prices.replication,
        _machines(prices, used),
    )
