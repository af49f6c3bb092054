"""`diloco replay`, `diloco tape` and `diloco export`: a run's past, from tape and store."""

from pathlib import Path
from typing import Annotated

import typer

from diloco.common import log

tape_app = typer.Typer(help="A run's stream as one file.", no_args_is_help=True)

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="the run's TOML file, the folder of a local run, the name of a run on a bus, or a "
        "file of diloco tape export (diloco --bus URL --store URL COMMAND RUN)",
    ),
]
PlaceOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file that says which server", metavar="FILE")
]


def replay(
    run: RunArgument,
    decide: Annotated[
        bool, typer.Option("--decide", help="make the decisions again, not the versions")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="what if: section.key=value of outer, staleness, quorum or bounds; may be "
            "repeated",
            metavar="KEY=VALUE",
        ),
    ] = None,
    fragments: Annotated[
        str | None,
        typer.Option("--fragments", help="such as 0-11 or 0,3,5-7 [default: all]", metavar="LIST"),
    ] = None,
    first: Annotated[
        int | None,
        typer.Option(
            "--from", help="begin at the newest stored state up to here", metavar="VERSION"
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="end here: a version, one for each fragment (12,12,11), a checkpoint, a time "
            "(2026-01-31T12:00:00Z) or how long ago (90m, 2h, 1d)",
            metavar="VERSIONS|TIME",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--export", help="write the model as it is then, a folder", metavar="DIR"),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="remember here how far it came, and go on from there", metavar="FILE"),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="picture of what if [default: what-if-RUN.png]", metavar="FILE"),
    ] = None,
    points: Annotated[
        int, typer.Option(help="how often what if evaluates on the way", min=1, max=1000)
    ] = 8,
) -> None:
    """Go through a run's past: verify its versions, decide again, or ask what if.

    Without further options every version is merged again from its recorded inputs, and its
    digests compared bit for bit. --decide repeats the decisions: when rounds opened and closed,
    what was admitted. --set repeats the merges with other settings, and evaluates the resulting
    model beside the original. The exit status is 1 if something differs from the records.
    """
    log.configure("error")
    from diloco.replay.run import Options, run_replay

    options = Options(
        decide=decide,
        settings=tuple(settings or ()),
        fragments=fragments,
        first=first,
        until=until,
        export=to,
        resume=resume,
        plot=plot,
        points=points,
    )
    raise typer.Exit(run_replay(run, options))


def export(
    run: RunArgument,
    to: Annotated[Path, typer.Argument(metavar="DIR", help="folder to make")],
    form: Annotated[
        str, typer.Option("--format", help="safetensors or orbax", metavar="FORMAT")
    ] = "safetensors",
    version: Annotated[
        str | None,
        typer.Option(
            help="a version, one for each fragment, a checkpoint, a time or how long ago "
            "[default: the newest]",
            metavar="VERSIONS|TIME",
        ),
    ] = None,
) -> None:
    """Write the global model with its layout and its settings into a folder.

    A safetensors file among it can begin another run: diloco run create --from FILE.
    """
    log.configure("error")
    from diloco.replay.run import run_export

    run_export(run, to, form, version)


@tape_app.command("export")
def tape_export(
    run: RunArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="file to write")],
) -> None:
    """Write a run's whole stream into one file, up to its newest message.

    With it and the run's objects, `diloco replay FILE` shows everything that the run's own
    server would.
    """
    log.configure("error")
    from diloco.replay.run import run_tape_export

    run_tape_export(run, file)


@tape_app.command("import")
def tape_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="of diloco tape export")],
    config: PlaceOption = None,
) -> None:
    """Make a run's stream anew on another server: same sequence numbers, times and message ids.

    The server is the one of `diloco --bus URL tape import`, of --config, or of DILOCO_BUS_URL.
    """
    log.configure("error")
    from diloco.replay.run import run_tape_import

    run_tape_import(file, config)
