"""`diloco watch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from diloco.run.cli import options as shared
from diloco.run.cli.command import command, group

app = group()


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The options of `diloco watch` that the loop of checks needs."""

    severity: Annotated[
        Literal["warning", "error"],
        typer.Option(help="least severity to report", metavar="warning|error"),
    ] = "warning"
    every_s: Annotated[
        float, typer.Option("--every", help="time between two checks", min=0.1, metavar="SECONDS")
    ] = 10.0
    hold_s: Annotated[
        float,
        typer.Option(
            "--hold",
            help="an alert fires after a problem has lasted this long, and resolves after it has "
            "been absent this long",
            min=0,
            metavar="SECONDS",
        ),
    ] = 30.0
    doctor_s: Annotated[
        float,
        typer.Option(
            "--doctor", help="time between two examinations as by `diloco doctor`; 0: none", min=0,
            metavar="SECONDS",
        ),
    ] = 600.0  # fmt: skip
    state: Annotated[
        Path | None,
        typer.Option(
            help="keep the alerts that fire in this file, so that a restart repeats none",
            metavar="FILE",
        ),
    ] = None


@command(app, logs="warning")
def watch(
    run: shared.RunOrTape,
    options: WatchOptions,
    webhook: Annotated[
        str | None,
        typer.Option(
            help="post each alert there as JSON, when it fires and when it resolves [default: "
            "DILOCO_WEBHOOK_URL]",
            metavar="URL",
        ),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="post a test alert and its end, then exit")
    ] = False,
    json: shared.Json = False,
) -> int:
    """Watch a run and report problems: here, and to a webhook.

    Needs no Prometheus: it judges as `diloco status` and `diloco doctor` do, until the run ends or
    Ctrl-C. Each alert is reported once when it fires and once when it resolves, and posted until
    the receiver has accepted it.
    """
    from diloco.show.alerts.watching import try_webhook, watch_run

    if test:
        return try_webhook(run, webhook)
    return watch_run(run, options, webhook, json=json)
