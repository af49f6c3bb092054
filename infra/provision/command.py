"""The command `diloco host provision`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.common.protocol.errors import Exit
from diloco.run.cli.command import command, group
from diloco.run.cli.help import host
from diloco.run.cli.screen import say_plainly

if TYPE_CHECKING:
    from diloco.infra.provision.plan import Checked

app = group()


@command(host, "provision")
def host_provision(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="the fleet's TOML file: docs/provision.md")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", help="the file of variables to write", metavar="PATH"),
    ] = Path("infra/terraform/terraform.tfvars.json"),
) -> int:
    """Check a fleet's file as `diloco check` does, and write the variables for Terraform."""
    checked = say_findings(file)
    if checked.refused:
        say_plainly("nothing was written")
        return Exit.FAILED
    out.write_text(json.dumps(checked.variables, indent=2, sort_keys=True) + "\n")
    say_plainly(f"wrote {out}; next: cd {out.parent} && terraform plan -out plan")
    return 0


def say_findings(file: Path) -> "Checked":
    """Checks the TOML file of a fleet (docs/provision.md) and the files that it names.

    Prints the findings and the costs, and returns the result.

    Raises:
        ConfigError: the fleet's file cannot be read, or breaks its schema.
    """
    from diloco.infra.provision.costs import cost_sentences
    from diloco.infra.provision.plan import check

    checked = check(file)
    for finding in checked.findings:
        say_plainly(f"{'refused' if finding.refused else 'warning'}: {finding.sentence}")
    if checked.refused:
        say_plainly(f"{len(checked.refused)} refused")
    for sentence in cost_sentences(checked.costs):
        say_plainly(sentence)
    return checked
