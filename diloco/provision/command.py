"""`diloco provision`."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.command import command, group
from diloco.cli.screen import say_plainly
from diloco.common import log
from diloco.common.exits import Exit

app = group()
provision_app = group("Check a fleet on Google Cloud before Terraform makes it.")
app.add_typer(provision_app, name="provision")

FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="the fleet's TOML file: docs/provision.md")
]


@command(provision_app, "check")
def provision_check(file: FileArgument) -> int:
    """Check a fleet's file and all that it names: the run's file, credentials, the archive.

    Says everything that is wrong, and ends with 1 if anything is refused. Compares zones,
    accelerators and machines with a dated table; what that does not know is a warning. Asks nothing
    of Google Cloud, so quota and capacity are not known.
    """
    log.configure("error")
    return _say(file)


@command(provision_app, "plan")
def provision_plan(
    file: FileArgument,
    out: Annotated[
        Path,
        typer.Option("--out", help="the file of variables to write", metavar="PATH"),
    ] = Path("infra/terraform/terraform.tfvars.json"),
) -> int:
    """Check a fleet's file as `check` does, and write the variables that Terraform reads."""
    log.configure("error")
    return _say(file, out)


def _say(file: Path, out: Path | None = None) -> int:
    import json

    from diloco.provision.plan import check

    checked = check(file)
    for finding in checked.findings:
        say_plainly(f"{'refused' if finding.refused else 'warning'}: {finding.sentence}")
    if checked.refused:
        say_plainly(f"{len(checked.refused)} refused: nothing was written")
        return Exit.FAILED
    if out is None:
        say_plainly("nothing is refused")
        return 0
    out.write_text(json.dumps(checked.variables, indent=2, sort_keys=True) + "\n")
    say_plainly(f"wrote {out}; next: cd {out.parent} && terraform plan -out plan")
    return 0
