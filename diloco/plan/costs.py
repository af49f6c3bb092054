"""The cost of a run a day, by where its bucket is: pure.

Left out: the learners' own machines, logs, and bytes between zones.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import field_validator

from diloco.common.process.config.run import Section
from diloco.plan.forecast import Plan

GIB = 1 << 30
MONTH_DAYS = 365.25 / 12
# The bus: three servers, of so many cores and GiB each. Beside each aggregator one stands by.
BUS_NODES, BUS_CORES, BUS_GIB = 3, 2, 8
AGGREGATORS = 2


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
    core: float
    gib: float
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
        """Where a region is; "" if no name begins so."""
        return self.continents.get(region.partition("-")[0], "")

    def between(self, one: str, other: str) -> float:
        """Dollars for a GiB from a region to another one."""
        if one == other:
            return 0.0
        pair = sorted((self.continent(one), self.continent(other)))
        return self.egress.get(" ".join(pair), self.other)


class DailyCost(NamedTuple):
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
        """The total of a day."""
        return sum(self[1:])


def compare(prices: Prices, regions: Sequence[str], made: Plan) -> list[DailyCost]:
    """A regional bucket with the aggregator beside it, and a multi-region one; cheapest first."""
    regional = [_regional(prices, regions, place, made) for place in sorted(set(regions))]
    best = min(regional, key=lambda cost: cost.total)
    return sorted([best, _multi_region(prices, regions, made)], key=lambda cost: cost.total)


def _machines(prices: Prices, made: Plan) -> float:
    cores = AGGREGATORS * made.cores + BUS_NODES * BUS_CORES
    gib = AGGREGATORS * made.memory_bytes / GIB + BUS_NODES * BUS_GIB
    return 24 * (cores * prices.core + gib * prices.gib)


def _each_gib(made: Plan) -> tuple[float, float]:
    """GiB a day that each learner sends and reads."""
    daily = made.daily
    read = daily.bytes_read - daily.bytes_merged
    return daily.bytes_merged / made.learners / GIB, read / made.learners / GIB


def _regional(prices: Prices, regions: Sequence[str], place: str, made: Plan) -> DailyCost:
    between = sum(prices.between(region, place) for region in regions)
    daily, (up_gib, down_gib) = made.daily, _each_gib(made)
    return DailyCost(
        f"regional bucket in {place}, aggregator beside it",
        (daily.objects_written * prices.regional_a + daily.gets * prices.regional_b) / 1000,
        made.retained_bytes / GIB * prices.regional_storage / MONTH_DAYS,
        up_gib * between * prices.uploads_charged,
        down_gib * between,
        0.0,
        _machines(prices, made),
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
        daily.bytes_written / GIB * prices.replication,
        _machines(prices, made),
    )
