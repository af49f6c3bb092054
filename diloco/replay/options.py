"""The options of `diloco replay` and `diloco bundle`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from diloco.run.cli import options as shared

First = Annotated[
    int | None,
    typer.Option(
        "--from",
        help="start at the newest stored state up to this version [default: the oldest]",
        metavar="VERSION",
    ),
]
Until = Annotated[
    str | None,
    typer.Option(
        help="stop at a version, one version per fragment (12,12,11), a checkpoint, a time "
        "(2026-01-31T12:00:00Z) or an age (90m, 2h, 1d) [default: the newest version]",
        metavar="VERSIONS|TIME",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `diloco replay` on the command line."""

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
    blame: Annotated[
        bool,
        typer.Option(
            "--blame",
            help="score every round without each of its updates: who did harm, when and where",
        ),
    ] = False
    without: Annotated[
        list[str],
        typer.Option(
            "--without",
            help="merge without a learner's updates, of some versions or all; repeatable",
            metavar="NAME[@FROM-TO]",
        ),
    ] = field(default_factory=list)
    score: Annotated[bool, typer.Option("--score", help="score every version on held-out data")] = (
        False
    )
    bisect: Annotated[
        bool,
        typer.Option(
            "--bisect", help="score stored versions, then halve the largest rise down to its round"
        ),
    ] = False
    fragments: Annotated[
        str | None,
        typer.Option(
            "--fragments", help="fragments, such as 0-11 or 0,3,5-7 [default: all]", metavar="LIST"
        ),
    ] = None
    first: First = None
    until: Until = None
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
        typer.Option(
            help="with --set, --blame or --score: page with a figure to write", metavar="FILE.html"
        ),
    ] = None
    json: shared.Json = False
    points: Annotated[
        int, typer.Option(help="with --set: number of evaluations", min=1, max=1000)
    ] = 8


@dataclass(frozen=True, kw_only=True)
class BundleOptions:
    """The options for the contents of a bundle.

    Attributes:
        first: a version; each fragment begins at this version, or at the newest earlier one whose
            objects are all stored. None: at the oldest on the tape.
        until: the end, as text: a version, a version for each fragment, a checkpoint, a time, or an
            age; None: up to now.
        redact: replace names by hashes.
        logs: files, or folders of them.
        objects: include the objects; without them, a reader needs the run's store.
        salvage: take the intact parts of a damaged file.
    """

    first: First = None
    until: Until = None
    redact: Annotated[
        bool,
        typer.Option("--redact", help="hash the names of run, learners, machines and people"),
    ] = False
    logs: Annotated[
        list[Path],
        typer.Option(
            "--log",
            help="log file, or folder of them, to add; repeatable [default: those of a local run]",
            metavar="PATH",
        ),
    ] = field(default_factory=list)
    objects: Annotated[
        bool,
        typer.Option(help="include objects; without them, readers need the run's store"),
    ] = True
    salvage: Annotated[
        bool, typer.Option("--salvage", help="RUN is a damaged file: take its intact parts")
    ] = False
