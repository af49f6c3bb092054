"""Checks a fleet's file, and returns findings, the variables of Terraform and costs.

Also chooses the machine types of aggregators, and checks that meshes fit slices.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diloco.common.process.config import Config, RunSettings
from diloco.common.protocol.errors import ConfigError
from diloco.infra.provision.building import (
    ONE_DEVICE,
    check_reach,
    check_run,
    model_or_fault,
    uploads_bytes_day,
)
from diloco.infra.provision.check_machines import check_machines
from diloco.infra.provision.costs import ResourceCost, budget_variable, fleet_costs
from diloco.infra.provision.files import (
    check_auth,
    check_names,
    check_outside,
    check_releases,
    check_webhook,
    read_run,
)
from diloco.infra.provision.fleet import FleetFile, FleetFinding, chips_of, machines_of, read_fleet
from diloco.infra.provision.known import Known, known
from diloco.infra.provision.places import check_places
from diloco.infra.provision.settings import check_settings
from diloco.learner.tensors.tree import task_layout
from diloco.plan.costs import REST_BYTES
from diloco.plan.inputs import read_prices
from diloco.plan.traffic import equal_fragments, sizes

_FILES = ("run_toml", "auth_folder", "webhook_file")
# Keys of the fleet's file that Terraform does not have, or has otherwise.
_NOT_TERRAFORMS: dict[str, Any] = {
    "parameters": True,
    "allow_unlisted": True,
    "budget": True,
    "learners": {"__all__": {"dollars_hour"}},
}


class Checked(NamedTuple):
    """The result of checking a fleet's file.

    Attributes:
        findings: all faults.
        variables: the values for infra/terraform/variables.tf; None if a finding is refused.
        costs: the costs of the resources that Terraform makes from `variables`; () without.
    """

    findings: list[FleetFinding]
    variables: dict[str, Any] | None
    costs: Sequence[ResourceCost] = ()

    @property
    def refused(self) -> list[FleetFinding]:
        """The findings that must be corrected before Terraform runs."""
        return [one for one in self.findings if one.refused]


def check(path: Path) -> Checked:
    """Reads and checks a fleet's file, and all files that it names.

    Raises:
        ConfigError: `path` is not a valid fleet's file by itself.
    """
    fleet = read_fleet(path)
    table = known()
    given_files = {key: file for key in _FILES if (file := getattr(fleet, key))}
    files = {key: (path.parent / file).absolute() for key, file in given_files.items()}
    releases = {
        kind: (path.parent / file).absolute() for kind, file in fleet.releases if file is not None
    }
    findings = [*check_places(fleet, table), *check_machines(fleet, table)]
    findings += check_releases(fleet, releases)
    findings += check_webhook(files.get("webhook_file"))
    try:
        config = read_run(files["run_toml"])
    except ConfigError as error:
        return Checked([*findings, FleetFinding(f"run_toml: {error.message}")], None)
    run = config.run.name
    findings += check_names(fleet, run)
    findings += check_outside(fleet, run)
    findings += check_meshes(fleet, config)
    findings += check_settings(fleet, config)
    findings += check_auth(fleet, files["auth_folder"], run)
    model = _model(fleet, config, table)
    findings += model.findings
    fragments = model.fragments
    needed = memory_needed(config.settings(), fragments) if fragments else 0
    findings += check_memory(fleet, table, needed)
    checked = Checked(findings, None)
    if checked.refused:
        return checked
    given: dict[str, Any] = {key: str(file) for key, file in files.items()} | {"run": run}
    given["releases"] = {kind: str(file) for kind, file in releases.items()}
    named, prices = machines(fleet, table, needed), read_prices(None)
    costs = fleet_costs(fleet, named, table, prices, model.uploads_bytes_day)
    if (budget := budget_variable(fleet, costs, table, prices)) is not None:
        given["budget"] = budget
        hour = budget["dollars_hour"] + sum(
            dollars * machines_of(fleet.learners[name])
            for name, dollars in budget["learners"].items()
        )
        if budget["dollars"] < hour:
            findings.append(
                FleetFinding(
                    f"budget: ${budget['dollars']:,.2f} are spent in less than an hour, which "
                    f"costs ${hour:,.2f}: give more"
                )
            )
            return Checked(findings, None)
        findings += [
            FleetFinding(f"budget: not counted: {what}", refused=False)
            for what in budget["uncounted"]
        ]
    return Checked(
        findings,
        variables=_variables(fleet, given, named),
        costs=costs,
    )


class _Model(NamedTuple):
    """What follows from a run's model.

    Attributes:
        findings: findings about the model, and about learners that train it.
        fragments: the elements of each fragment; empty if the model is unknown or cannot be built.
        uploads_bytes_day: bytes of checkpoints that each learner uploads in a day; None: unknown.
    """

    findings: Sequence[FleetFinding]
    fragments: Sequence[int] = ()
    uploads_bytes_day: float | None = None


def _model(fleet: FleetFile, config: Config, table: Known) -> _Model:
    settings = config.settings()
    if config.task.build:
        if unreached := [*check_reach("run_toml", settings.task.options, fleet.data)]:
            return _Model(unreached)
        task = model_or_fault(settings)
        if isinstance(task, FleetFinding):
            return _Model([task])
        fragments = [one.size for one in task_layout(task, config.sync).fragments]
        found = [*check_run(fleet, config, task, table)]
        return _Model(found, fragments, uploads_bytes_day(task, config.learner))
    if fleet.parameters is None:
        return _Model([FleetFinding("parameters is missing, and the run has no task that says it")])
    return _Model([], equal_fragments(settings, fleet.parameters))


def _variables(
    fleet: FleetFile, given: dict[str, Any], found: dict[str, str | None]
) -> dict[str, Any]:
    """Returns the values for infra/terraform/variables.tf, by name.

    Args:
        fleet: the fleet's file.
        given: values that are not in the file, or are paths relative to it.
        found: machine type of each aggregator, by name.
    """
    document = fleet.model_dump(exclude=_NOT_TERRAFORMS, exclude_none=True)
    if fleet.budget is not None and fleet.budget.billing_account is not None:
        document["billing_account"] = fleet.budget.billing_account
    for name, machine in found.items():
        document["aggregators"][name]["machine_type"] = machine
    return document | given | {"bucket_location": fleet.bucket()}


def memory_needed(settings: RunSettings, fragments: Sequence[int]) -> int:
    """Returns the bytes of memory that one aggregator needs to own all fragments.

    It owns all if the other aggregators are lost. `fragments` has the elements of each.
    """
    return sizes(settings, fragments).resident_bytes + REST_BYTES


def machines(fleet: FleetFile, known: Known, needed_bytes: int) -> dict[str, str | None]:
    """Returns the machine type of each aggregator, by the aggregator's name.

    It is the type that the file names, else the smallest known one with `needed_bytes` of memory;
    None if no known one has as much.
    """
    found = known.machine_with(needed_bytes)
    return {name: one.machine_type or found for name, one in fleet.aggregators.items()}


def check_memory(fleet: FleetFile, known: Known, needed_bytes: int) -> Iterator[FleetFinding]:
    """Yields a finding for each aggregator whose memory is unknown or less than `needed_bytes`."""
    needed = f"{needed_bytes / 1e9:.0f} GB for the run's model"
    fitting = known.machine_with(needed_bytes)
    hint = f"the smallest known here is {fitting}" if fitting else "none known here has as much"
    for name, machine in machines(fleet, known, needed_bytes).items():
        if machine is None:
            yield FleetFinding(f"aggregators.{name}: needs {needed}; {hint}: name a machine_type")
        elif (has := known.memory_bytes(machine)) is None:
            yield FleetFinding(
                f"aggregators.{name}: the memory of {machine} is not known here; it must have "
                f"{needed}",
                refused=False,
            )
        elif has < needed_bytes:
            yield FleetFinding(
                f"aggregators.{name}: {machine} has {has / 1e9:.0f} GB of memory, and needs "
                f"{needed}; {hint}"
            )


def check_meshes(fleet: FleetFile, config: Config) -> Iterator[FleetFinding]:
    """Yields a finding for each learner whose mesh does not fit its chips.

    Also for each section [learner.islands.NAME] of the run whose learner the fleet does not have.
    """
    for name, learner in fleet.learners.items():
        chips = chips_of(learner)
        # Where that is unknown, a chip is one device to JAX, or two.
        counts = [chips] if learner.kind in ONE_DEVICE else [chips, 2 * chips]
        mesh = config.learner.island(name).mesh or config.learner.mesh
        if chips and not any(mesh.shape(count) for count in counts):
            yield FleetFinding(
                f"learners.{name}: the mesh of the run's file ({mesh}) does not fit its {chips} "
                "chips: sizes must multiply to them, and 0 takes what the others leave; give it "
                f"one of its own under [learner.islands.{name}]"
            )
    for name in sorted(config.learner.islands.keys() - fleet.learners.keys()):
        yield FleetFinding(
            f"the run's file has [learner.islands.{name}], and the fleet no such learner",
            refused=False,
        )
