"""Computes the dollars a day of the Google Cloud resources that Terraform makes for a fleet. Pure.

Uploads of checkpoints are included. Not included: the bucket's storage and operations, and traffic
of updates and versions, which depend on the run's pace; `diloco plan --regions` shows these.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from diloco.infra.provision.fleet import (
    MULTI_REGIONS,
    FleetFile,
    FleetLearner,
    chips_of,
    machines_of,
    region_of,
)
from diloco.infra.provision.known import Known
from diloco.plan.costs import (
    BUS_BOOT_GIB,
    CACHE_DISK_GIB,
    CACHE_MACHINE,
    DISK,
    KEEPER_DISK_GIB,
    KEEPER_MACHINE,
    MONTH_DAYS,
    STREAMS_DISK,
    Prices,
)

GIB = 1 << 30
# The disk type of accelerators whose machines take no other, as in infra/terraform/modules/learner.
DISKS = {"v6e": "hyperdisk-balanced", "tpu7x": "hyperdisk-balanced"}


class ResourceCost(NamedTuple):
    """The cost of some resources of one sort.

    Attributes:
        what: the resources, for people, such as "NATS: 3 x e2-standard-2".
        dollars: dollars a day of all of them; None if the price is unknown.
    """

    what: str
    dollars: float | None


def fleet_costs(
    fleet: FleetFile,
    aggregators: Mapping[str, str | None],
    known: Known,
    prices: Prices,
    uploads_bytes_day: float | None,
) -> list[ResourceCost]:
    """Returns the costs of a fleet's resources while all machines run that are not paused.

    Args:
        fleet: the fleet's file.
        aggregators: machine type of each aggregator, by name.
        known: the table of machine types.
        prices: the table of prices.
        uploads_bytes_day: bytes of checkpoints that each learner uploads in a day; None: unknown.
    """
    found = [_machines(len(fleet.nats.zones), fleet.nats.machine_type, "NATS", known, prices)]
    found += [_machines(1, str(one), name, known, prices) for name, one in aggregators.items()]
    if fleet.keeper:
        found.append(_machines(1, KEEPER_MACHINE, "keeper", known, prices))
    if fleet.caches:
        found.append(_machines(len(fleet.caches), CACHE_MACHINE, "caches", known, prices))
    running = _running(fleet)
    found += [_learner(name, learner, known, prices) for name, learner in running.items()]
    found += [*_disks(fleet, prices), _gateways(fleet, prices), _secrets(fleet, prices)]
    if names := sum(one.slices > 1 for one in fleet.learners.values()):
        price = names * prices.dns_zone / MONTH_DAYS
        found.append(ResourceCost(f"names of slices' hosts: {names} zones", price))
    found.append(_uploads(fleet, prices, uploads_bytes_day))
    # Both are priced by bytes that are unknown before the run: changes on disks, lines of logs.
    return [
        *found,
        ResourceCost("snapshots of the streams", None),
        ResourceCost("logs and alerts", None),
    ]


def _running(fleet: FleetFile) -> Mapping[str, FleetLearner]:
    """Returns the learners that have machines, by name: those that are not paused."""
    return {n: one for n, one in fleet.learners.items() if not (fleet.paused or one.paused)}


def _gateways(fleet: FleetFile, prices: Prices) -> ResourceCost:
    """Returns the cost of the regions' NAT gateways: for addresses, and for machines that use them.

    The few bytes that machines send through a gateway are not counted.
    """
    zones = [*fleet.nats.zones, *(one.zone for one in fleet.aggregators.values())]
    zones += [fleet.nats.zones[0]] * fleet.keeper + fleet.caches
    for one in _running(fleet).values():
        zones += [one.zone] * machines_of(one)
    machines = Counter(map(region_of, zones))
    counted = sum(min(count, prices.gateway_machines) for count in machines.values())
    hour = counted * prices.gateway_machine + len(machines) * prices.gateway_address
    used = f"{len(machines)} regions, {machines.total()} machines"
    return ResourceCost(f"gateways: {used}", 24 * hour)


def _uploads(fleet: FleetFile, prices: Prices, each_bytes: float | None) -> ResourceCost:
    """Returns the cost of the checkpoints that learners of other regions upload to the bucket."""
    what = "uploads of checkpoints from other regions"
    if each_bytes is None:
        return ResourceCost(what, None)
    # A multi-region bucket charges for the copies of what is written, wherever it comes from.
    copied = fleet.bucket() in MULTI_REGIONS
    dollars = sum(
        prices.replication if copied else prices.between(region_of(one.zone), fleet.bucket())
        for one in _running(fleet).values()
    )
    charged = copied or prices.uploads_charged
    return ResourceCost(
        f"{what}: {each_bytes / GIB:,.0f} GiB of each learner; learner.checkpoint_upload_every",
        charged * dollars * each_bytes / GIB,
    )


def _secrets(fleet: FleetFile, prices: Prices) -> ResourceCost:
    holders = len(fleet.nats.zones) + len(fleet.aggregators) + len(fleet.learners)
    count = holders + fleet.hourly_checkpoints + fleet.keeper + (fleet.webhook_file is not None)
    return ResourceCost(f"secrets: {count}", count * prices.secret / MONTH_DAYS)


def _machines(count: int, machine: str, name: str, known: Known, prices: Prices) -> ResourceCost:
    cores, memory = known.size_of(machine) or (0, 0)
    hour = prices.machine(machine, cores, memory / 1e9)
    day = 24 * count * hour if hour else None
    return ResourceCost(f"{name}: {count} x {machine}", day)


def _learner(name: str, learner: FleetLearner, known: Known, prices: Prices) -> ResourceCost:
    found = _by_list(name, learner, known, prices)
    if found.dollars is None and learner.dollars_hour is not None:
        return found._replace(dollars=24 * machines_of(learner) * learner.dollars_hour)
    return found


def _by_list(name: str, learner: FleetLearner, known: Known, prices: Prices) -> ResourceCost:
    if learner.kind == "cpu" and not learner.spot:
        return _machines(machines_of(learner), str(learner.machine_type), name, known, prices)
    way = "spot" if learner.spot else "of a reservation" if learner.reservation else "on demand"
    way = "flex-start" if learner.flex_start_hours else way
    count, what = learner.slices * chips_of(learner), f"chips of {learner.kind}"
    if learner.kind == "cpu":
        count, what = machines_of(learner), str(learner.machine_type)
    hour = prices.chips.get(learner.kind) if way == "on demand" else None
    return ResourceCost(f"{name}: {count} {what}, {way}", 24 * count * hour if hour else None)


def budget_variable(
    fleet: FleetFile, costs: Sequence[ResourceCost], known: Known, prices: Prices
) -> dict[str, Any] | None:
    """Returns what the keeper counts a fleet's spending by; None without a budget.

    `costs` is the result of `fleet_costs`. The keys are those of the variable `budget` in
    infra/terraform/variables.tf.
    """
    if fleet.budget is None:
        return None
    of_learners = {name: _learner(name, one, known, prices) for name, one in fleet.learners.items()}
    rest = [one.dollars or 0.0 for one in costs if one not in of_learners.values()]
    uncounted = [one for one in of_learners.values() if one.dollars is None]
    uncounted += [one for one in costs if one.dollars is None and one not in uncounted]
    names = [one.what for one in uncounted]
    if not fleet.budget.traffic_dollars_day:
        names.append("the bucket and its traffic")
    return {
        "dollars": fleet.budget.dollars,
        "dollars_hour": (sum(rest) + fleet.budget.traffic_dollars_day) / 24,
        "learners": {
            name: one.dollars / 24 / machines_of(fleet.learners[name])
            for name, one in of_learners.items()
            if one.dollars is not None
        },
        "uncounted": names,
    }


def _disks(fleet: FleetFile, prices: Prices) -> Iterator[ResourceCost]:
    servers = len(fleet.nats.zones)
    gib = Counter({STREAMS_DISK: servers * fleet.nats.disk_gib, DISK: servers * BUS_BOOT_GIB})
    gib[DISK] += sum(one.disk_gib for one in fleet.aggregators.values())
    gib[DISK] += KEEPER_DISK_GIB * fleet.keeper + CACHE_DISK_GIB * len(fleet.caches)
    for learner in _running(fleet).values():
        gib[DISKS.get(learner.kind, DISK)] += machines_of(learner) * learner.disk_gib
    for kind, size in gib.items():
        yield ResourceCost(f"disks: {size} GiB of {kind}", prices.disk_day(kind, size))


def cost_sentences(costs: Sequence[ResourceCost]) -> Iterable[str]:
    """Yields a sentence for each cost, and one for their sum; none if there are no costs."""
    for one in costs:
        dollars = "price not known" if one.dollars is None else f"${one.dollars:,.2f} a day"
        yield f"cost: {one.what}: {dollars}"
    unknown = sum(one.dollars is None for one in costs)
    if costs:
        total = sum(one.dollars or 0.0 for one in costs)
        besides = f", and {unknown} whose prices are not known" if unknown else ""
        yield (
            f"cost: ${total:,.2f} a day{besides}; the bucket and its traffic: diloco plan --regions"
        )
