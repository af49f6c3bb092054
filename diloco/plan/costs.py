"""Computes the dollars a day that a run costs, for each place where its bucket may be. Pure.

Counted: the bucket's operations and storage, bytes between regions, and the machines and disks of
aggregators, NATS servers (the bus), keeper and caches. Not counted: the learners' own machines
(`diloco check` counts a fleet's), gateways, disk snapshots, logs, and bytes between zones.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pydantic import field_validator

from diloco.common.process.config.run import Section
from diloco.common.protocol.codecs import encoded_bytes
from diloco.plan.forecast import Plan
from diloco.plan.traffic import RoundTraffic, retained_bytes

GIB = 1 << 30
MONTH_DAYS = 365.25 / 12
# The machines of infra/terraform: servers of the bus, a keeper, and GiB of disks.
BUS_NODES, BUS_MACHINE, BUS_BOOT_GIB, BUS_STREAMS_GIB = 3, "e2-standard-2", 20, 50
AGGREGATOR_DISK_GIB = 50
KEEPER_MACHINE, KEEPER_DISK_GIB = "e2-medium", 20
CACHE_MACHINE, CACHE_DISK_GIB = "e2-standard-2", 100
DISK, STREAMS_DISK = "pd-balanced", "pd-ssd"
# The series of an aggregator's machine, and its GB for each core.
AGGREGATOR_CLASS, CORE_GB = "n2-highmem", 8
# Memory beside an aggregator's arrays: the system, the interpreter, a reserve.
REST_BYTES = 4 * 10**9


class Rate(Section):
    """The dollars an hour that one core and one GiB of memory cost in a series of machines."""

    core: float
    gib: float


class Prices(Section):
    """A table of prices in dollars; `diloco/plan/prices.toml` explains each of its keys."""

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
    dns_zone: float
    chips: dict[str, float]
    aggregator_cores: tuple[int, ...]
    uploads_charged: bool
    continents: dict[str, str]
    egress: dict[str, float]
    other: float

    @field_validator("egress")
    @classmethod
    def _of_pairs(cls, egress: dict[str, float]) -> dict[str, float]:
        """Returns `egress` with the two continents of each key in alphabetical order."""
        for key in egress:
            if len(key.split()) != 2:
                raise ValueError(f"{key!r}: expected two continents with a space between them")
        return {" ".join(sorted(key.split())): price for key, price in egress.items()}

    def continent(self, region: str) -> str:
        """Returns the continent of a region such as us-central1; "" if unknown."""
        return self.continents.get(region.partition("-")[0], "")

    def machine(self, name: str, cores: int, gib: float) -> float | None:
        """Returns the dollars an hour of a machine; None if its price is unknown.

        Args:
            name: machine type, such as e2-standard-2.
            cores: the type's cores, used if the table has only the price of the type's series.
            gib: GiB of the type's memory, used in the same case.
        """
        rate = self.series.get(name.partition("-")[0])
        if name in self.machines or rate is None:
            return self.machines.get(name)
        return cores * rate.core + gib * rate.gib

    def disk_day(self, kind: str, gib: float) -> float:
        """Returns the dollars a day of a disk of `gib` GiB; `kind` is a type such as pd-ssd."""
        return self.disks[kind] * gib / MONTH_DAYS

    def between(self, one: str, other: str) -> float:
        """Returns the dollars for a GiB sent between two regions; 0 within one region."""
        if one == other:
            return 0.0
        pair = sorted((self.continent(one), self.continent(other)))
        return self.egress.get(" ".join(pair), self.other)


class DailyCost(NamedTuple):
    """Dollars a day of a run whose bucket is in one place, by cause.

    Attributes:
        name: the place of the bucket, for people.
        operations: requests to the bucket.
        storage: bytes that stay in the bucket.
        uploads: learners' updates that leave a learner's region.
        downloads: reads of deltas and, from a multi-region bucket, of updates.
        records: reads of records by all learners from the bus, in the aggregator's region.
        replication: bytes written to a multi-region bucket.
        machines: aggregators, NATS servers, keeper and caches.
        disks: the disks of these machines.
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
        """The sum of all causes, in dollars a day."""
        return sum(self[1:])


class Lever(NamedTuple):
    """A way to run for less with the same H.

    Attributes:
        name: what is changed, for people.
        cost: dollars a day, with a regional bucket.
        loss: least and most percent by which the loss is expected to grow.
    """

    name: str
    cost: DailyCost
    loss: tuple[float, float]

    @property
    def uploads_free(self) -> float:
        """The dollars a day if uploads into another region are free."""
        return self.cost.total - self.cost.uploads


# Percent by which 2 bits an element in place of 4 exceeded the loss, both ways: three seeds of one
# small task (docs/adr/0109-two-bits.md).
TWO_BITS_LOSS = (0.2, 0.8)
SHORT_REPLAY_S = 6 * 3600.0


def levers(prices: Prices, regions: Sequence[str], made: Plan, block: int) -> list[Lever]:
    """Returns the run as it is, and cheaper ways, from the least to the most that is changed.

    Args:
        prices: the table of prices.
        regions: the region of each learner; the bucket is in the cheapest of these.
        made: the plan as it is.
        block: elements that share a scale.
    """
    none = (0.0, 0.0)
    short = _short_replay(made, made.sizes)
    thin = _thin(made, block)

    def lever(
        name: str, plan: Plan, caches: bool = True, standby: bool = True, near: bool = False
    ) -> Lever:
        found = [
            _regional(
                prices, _near(regions, place) if near else regions, place, plan, caches, standby
            )
            for place in sorted(set(regions))
        ]
        best = min(found, key=lambda cost: cost.total)
        return Lever(name, best, TWO_BITS_LOSS if plan is thin else none)

    hours = f"{SHORT_REPLAY_S / 3600:.0f} h of replay"
    least = f"{hours}, one aggregator"
    return [
        lever("as it is", made, caches=False),
        lever("a cache in each region", made),
        lever(f"caches, {hours}", short),
        lever(f"caches, {least}", short, standby=False),
        lever(f"one learner away in each region, {least}", short, standby=False, near=True),
        lever(f"2 bits both ways, {hours}", thin, caches=False),
        lever(f"2 bits both ways, caches, {hours}", thin),
        lever(f"2 bits both ways, caches, {least}", thin, standby=False),
    ]


def _near(regions: Sequence[str], place: str) -> list[str]:
    """Returns where learners are if each region but `place` keeps one, and `place` has the rest.

    No placement in as many regions sends fewer bytes between regions.
    """
    away = sorted(set(regions) - {place})
    return [*away, *[place] * (len(regions) - len(away))]


def _short_replay(made: Plan, sized: RoundTraffic) -> Plan:
    """Returns the plan with objects of the sizes `sized` kept for `SHORT_REPLAY_S`, or less."""
    kept = retained_bytes(sized, made.participants, made.interval_s, SHORT_REPLAY_S)
    return replace(made, retained_bytes=min(kept, made.retained_bytes))


def _thin(made: Plan, block: int) -> Plan:
    """Returns `_short_replay` of the plan with the codec int2 both ways.

    Requests stay as many, and so do the bytes that are written to a multi-region bucket.
    """
    sized, daily = made.sizes, made.daily
    thin_bytes = encoded_bytes("int2", sized.elements, block)
    merged = daily.bytes_merged * thin_bytes / sized.update_bytes
    read = (daily.bytes_read - daily.bytes_merged) * thin_bytes / sized.delta_bytes
    thin = replace(sized, update_bytes=thin_bytes, delta_bytes=thin_bytes)
    daily = daily._replace(bytes_merged=merged, bytes_read=merged + read)
    return replace(_short_replay(made, thin), sizes=thin, daily=daily)


def compare(prices: Prices, regions: Sequence[str], made: Plan) -> list[DailyCost]:
    """Returns the costs of a regional bucket and of a multi-region one, the cheapest first.

    Args:
        prices: the table of prices.
        regions: the region of each learner; the regional bucket is in the cheapest of these.
        made: the plan, whose traffic is priced.
    """
    regional = [_regional(prices, regions, place, made) for place in sorted(set(regions))]
    best = min(regional, key=lambda cost: cost.total)
    return sorted([best, _multi_region(prices, regions, made)], key=lambda cost: cost.total)


class Aggregators(NamedTuple):
    """The machines of a run's aggregators.

    Attributes:
        working: machines that share the fragments.
        cores: cores of each of them, and of those that stand by.
        standby: machines that take over from one that fails.
    """

    working: int
    cores: int
    standby: int = 1

    @property
    def machines(self) -> int:
        """The number of machines."""
        return self.working + self.standby


def aggregators(prices: Prices, made: Plan, *, standby: bool = True) -> Aggregators:
    """Returns the fewest and then smallest machines with the plan's memory and cores.

    Args:
        prices: has the cores of the machines that there are.
        made: the plan.
        standby: whether one more machine takes over from one that fails.
    """

    def holds(cores: int) -> float:
        return cores * CORE_GB * 10**9 - REST_BYTES

    most = max(prices.aggregator_cores)
    working = max(math.ceil(made.cores / most), math.ceil(made.memory_bytes / holds(most)))
    cores = next(
        cores
        for cores in sorted(prices.aggregator_cores)
        if working * cores >= made.cores and working * holds(cores) >= made.memory_bytes
    )
    return Aggregators(working, cores, int(standby))


def _machines(prices: Prices, those: Aggregators) -> float:
    rate = prices.series[AGGREGATOR_CLASS.partition("-")[0]]
    each = those.cores * (rate.core + CORE_GB * rate.gib)
    bus = BUS_NODES * prices.machines[BUS_MACHINE]
    return 24 * (those.machines * each + bus + prices.machines[KEEPER_MACHINE])


def _disks(prices: Prices, those: Aggregators) -> float:
    gib = those.machines * AGGREGATOR_DISK_GIB + BUS_NODES * BUS_BOOT_GIB + KEEPER_DISK_GIB
    streams = prices.disk_day(STREAMS_DISK, BUS_NODES * BUS_STREAMS_GIB)
    return prices.disk_day(DISK, gib) + streams


def at_interval(cost: DailyCost, asked: int, steps: int) -> float:
    """Returns the dollars a day with H = `steps`, given the cost with H = `asked`.

    All causes but machines and disks are in proportion to 1/H.
    """
    fixed = cost.machines + cost.disks
    return fixed + (cost.total - fixed) * asked / steps


def _each_gib(made: Plan) -> tuple[float, float]:
    """Returns the GiB a day that (one learner sends, one learner reads), on average."""
    daily = made.daily
    read = daily.bytes_read - daily.bytes_merged
    return daily.bytes_merged / made.learners / GIB, read / made.learners / GIB


def _records(prices: Prices, regions: Sequence[str], place: str, made: Plan) -> float:
    between = sum(prices.between(region, place) for region in regions)
    return made.daily.record_reads / made.learners / GIB * between


def _cached(prices: Prices, regions: Sequence[str], place: str) -> list[str]:
    """Returns the regions in which a cache pays: of several learners, and away from the bucket."""
    counts = Counter(region for region in regions if prices.between(region, place))
    return [region for region, count in counts.items() if count > 1]


def _regional(
    prices: Prices,
    regions: Sequence[str],
    place: str,
    made: Plan,
    caches: bool = False,
    standby: bool = True,
) -> DailyCost:
    between = sum(prices.between(region, place) for region in regions)
    cached = _cached(prices, regions, place) if caches else []
    # A region with a cache reads each version once.
    readers = [*cached, *(region for region in regions if region not in cached)]
    read_between = sum(prices.between(region, place) for region in readers)
    cache_disk = prices.disk_day(DISK, CACHE_DISK_GIB)
    daily, (up_gib, down_gib) = made.daily, _each_gib(made)
    those = aggregators(prices, made, standby=standby)
    return DailyCost(
        f"regional bucket in {place}, aggregator beside it",
        (daily.objects_written * prices.regional_a + daily.gets * prices.regional_b) / 1000,
        made.retained_bytes / GIB * prices.regional_storage / MONTH_DAYS,
        up_gib * between * prices.uploads_charged,
        down_gib * read_between,
        _records(prices, regions, place, made),
        0.0,
        _machines(prices, those) + 24 * len(cached) * prices.machines[CACHE_MACHINE],
        _disks(prices, those) + len(cached) * cache_disk,
    )


def _multi_region(prices: Prices, regions: Sequence[str], made: Plan) -> DailyCost:
    """Returns the cost of a multi-region bucket on the continent with the most learners.

    Learners on other continents pay for bytes between continents.
    """
    counts = Counter(prices.continent(region) for region in regions)
    place, _ = counts.most_common(1)[0]
    away = [region for region in regions if prices.continent(region) != place]
    home = next(region for region in regions if prices.continent(region) == place)
    between = sum(prices.between(region, home) for region in away)
    near = len(regions) - len(away)
    daily, (up_gib, down_gib) = made.daily, _each_gib(made)
    those = aggregators(prices, made)
    return DailyCost(
        f"multi-region bucket in {place}",
        (daily.objects_written * prices.multi_region_a + daily.gets * prices.multi_region_b) / 1000,
        made.retained_bytes / GIB * prices.multi_region_storage / MONTH_DAYS,
        up_gib * between * prices.uploads_charged,
        down_gib * (between + near * prices.multi_region_read)
        + daily.bytes_merged / GIB * prices.multi_region_read,
        _records(prices, regions, home, made),
        daily.bytes_written / GIB * prices.replication,
        _machines(prices, those),
        _disks(prices, those),
    )
