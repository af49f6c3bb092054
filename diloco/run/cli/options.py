"""Options and arguments that several commands take."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="TOML file, folder of a local run, or name of a run on a bus "
        "(diloco --bus URL --store URL COMMAND NAME)",
    ),
]
# For commands that only read.
RunOrTape = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="TOML file, folder of a local run, file of diloco bundle, or name of a run on a bus "
        "(diloco --bus URL --store URL COMMAND NAME)",
    ),
]
ConfigFile = Annotated[
    Path,
    typer.Option("--config", help="the run's TOML file; see docs/configuration.md", metavar="FILE"),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option("--log-level", help="debug, info, warning or error", metavar="LEVEL"),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        help="port of /metrics, /livez and /readyz, 0 for none [default: from the file]",
        min=0,
        max=65535,
        metavar="PORT",
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set", help="any setting, as section.key=value; repeatable", metavar="KEY=VALUE"
    ),
]
Version = Annotated[
    str | None,
    typer.Option(
        help="a version, one version per fragment, a checkpoint, a time or an age "
        "[default: the newest]",
        metavar="VERSIONS|TIME",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
