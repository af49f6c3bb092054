"""The options of `diloco replay`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from diloco.cli import options as shared


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line, as given."""

    decide: Annotated[
        bool, typer.Option("--decide", help="repeat the decisions, not the merges")
    ] = False
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="merge with another setting of outer, staleness, quorum or bounds, as "
            "section.key=value; repeatable",
            metavar="KEY=VALUE",
        ),
    ] = field(default_factory=list)
    fragments: Annotated[
        str | None,
        typer.Option(
            "--fragments", help="fragments, such as 0-11 or 0,3,5-7 [default: all]", metavar="LIST"
        ),
    ] = None
    first: Annotated[
        int | None,
        typer.Option(
            "--from",
            help="start at the newest stored state up to this version [default: the oldest]",
            metavar="VERSION",
        ),
    ] = None
    until: Annotated[
        str | None,
        typer.Option(
            help="stop at a version, one version per fragment (12,12,11), a checkpoint, a time "
            "(2026-01-31T12:00:00Z) or an age (90m, 2h, 1d) [default: the newest version]",
            metavar="VERSIONS|TIME",
        ),
    ] = None
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", help="write the resulting model to this new folder", metavar="DIR"
        ),
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(help="progress file; an interrupted replay continues from it", metavar="FILE"),
    ] = None
    plot: Annotated[
        Path | None,
        typer.Option(help="with --set: figure to write [default: what-if-RUN.png]", metavar="FILE"),
    ] = None
    json: shared.Json = False
    points: Annotated[
        int, typer.Option(help="with --set: number of evaluations", min=1, max=1000)
    ] = 8
