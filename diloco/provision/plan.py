"""A fleet's file, everything that is wrong with it, and the variables that Terraform is given."""

from pathlib import Path
from typing import Any, NamedTuple

from diloco.common.errors import ConfigError
from diloco.provision.files import check_auth, check_bundles, check_names, read_run
from diloco.provision.findings import Finding
from diloco.provision.fleet import Fleet, read_fleet
from diloco.provision.known import known
from diloco.provision.meshes import check_meshes
from diloco.provision.places import check_places
from diloco.provision.sizing import check_memory, machines, memory_needed

_FILES = ("run_toml", "auth_folder")


class Checked(NamedTuple):
    """A fleet, and what was found.

    Attributes:
        variables: what Terraform is given; None where something is refused.
    """

    findings: list[Finding]
    variables: dict[str, Any] | None

    @property
    def refused(self) -> list[Finding]:
        """What must be mended first."""
        return [one for one in self.findings if one.refused]


def check(path: Path) -> Checked:
    """Read the file of a fleet and all that it names.

    Raises:
        ConfigError: the file itself is not one of a fleet.
    """
    fleet = read_fleet(path)
    table = known()
    files = {key: (path.parent / getattr(fleet, key)).absolute() for key in _FILES}
    bundles = {
        kind: (path.parent / file).absolute() for kind, file in fleet.bundles if file is not None
    }
    findings = [*check_places(fleet, table), *check_bundles(fleet, bundles)]
    try:
        config = read_run(files["run_toml"])
    except ConfigError as error:
        return Checked([*findings, Finding(f"run_toml: {error.message}")], None)
    run = config.run.name
    needed = memory_needed(fleet, config.settings())
    findings += check_names(fleet, run)
    findings += check_memory(fleet, table, needed)
    findings += check_meshes(fleet, config)
    findings += check_auth(fleet, files["auth_folder"], run)
    checked = Checked(findings, None)
    if checked.refused:
        return checked
    given: dict[str, Any] = {key: str(file) for key, file in files.items()} | {"run": run}
    given["bundles"] = {kind: str(file) for kind, file in bundles.items()}
    return checked._replace(variables=_variables(fleet, given, machines(fleet, table, needed)))


def _variables(fleet: Fleet, given: dict[str, Any], found: dict[str, str | None]) -> dict[str, Any]:
    """As infra/terraform/variables.tf wants them."""
    document = fleet.model_dump(exclude={"parameters", "allow_unlisted"}, exclude_none=True)
    for name, machine in found.items():
        document["aggregators"][name]["machine_type"] = machine
    return document | given | {"bucket_location": fleet.bucket()}
