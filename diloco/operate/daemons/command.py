"""`diloco aggregator` and `diloco learner`."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from diloco.common.process import log
from diloco.common.protocol.errors import ConfigError
from diloco.run.cli import options as shared
from diloco.run.cli.command import command, group

if TYPE_CHECKING:
    from diloco.common.process.config import Config

app = group()


@command(app, daemon=True)
def aggregator(
    config: shared.ConfigFile,
    name: Annotated[
        str | None,
        typer.Option("--name", help="name in records and logs [default: from the file]"),
    ] = None,
    fragments: Annotated[
        str | None,
        typer.Option(
            help="own only these fragments, such as 0-11 or 0,3,5-7 [default: an equal share]",
            metavar="LIST",
        ),
    ] = None,
    metrics_port: shared.MetricsPort = None,
    log_level: shared.LogLevel = "info",
) -> None:
    """Merge learners' updates and publish versions until the run ends.

    Run any number: they share the fragments by leases and take over from one that fails. After a
    restart an aggregator resumes from the tape. The first SIGINT or SIGTERM stops it cleanly, the
    second at once. Logs are JSON lines on stderr, on a terminal lines for people.
    """
    from diloco.run.cli.settings import parse_fragments

    log.take_stderr()
    pinned = None if fragments is None else parse_fragments(fragments)
    loaded = _load(config, log_level, aggregator={"name": name}, metrics={"port": metrics_port})
    from diloco.aggregator.daemon import serve

    serve(loaded, pinned)


@dataclass(frozen=True, kw_only=True)
class LearnerOptions:
    """The options of `diloco learner` on the command line."""

    config: shared.ConfigFile
    name: Annotated[
        str, typer.Option("--learner", help="name of this learner in the run", metavar="NAME")
    ]
    mesh: Annotated[
        str | None,
        typer.Option(
            help="devices of the learner over all hosts: 4, or fsdp=4,tensor=2 "
            "[default: from the file, else all devices]",
            metavar="MESH",
        ),
    ] = None
    hosts: Annotated[
        int | None,
        typer.Option(
            help="number of processes of the learner [default: from the file]", min=1, metavar="N"
        ),
    ] = None
    host: Annotated[
        int | None, typer.Option(help="index of this process, from 0", min=0, metavar="I")
    ] = None
    coordinator: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of host 0, or auto where the platform provides it (Cloud TPU, Slurm)",
            metavar="ADDRESS",
        ),
    ] = None
    cpu_devices: Annotated[
        int | None, typer.Option(help="emulate N devices on the CPU", min=1, metavar="N")
    ] = None
    metrics_port: shared.MetricsPort = None
    log_level: shared.LogLevel = "info"
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="estimate memory, time and traffic, without training; needs no bus and no store",
        ),
    ] = False
    devices: Annotated[
        int | None,
        typer.Option(
            help="dry run: number of devices to emulate [default: learner.cpu_devices per host, "
            "else the devices that JAX finds]",
            min=1,
            max=65536,
            metavar="N",
        ),
    ] = None
    bandwidth: Annotated[
        float | None,
        typer.Option(
            help="dry run: memory bandwidth of a device [default: 819, a TPU v5e's; with "
            "--platform cuda the GPU's]",
            min=1,
            metavar="GB/S",
        ),
    ] = None
    platform: Annotated[
        Literal["here", "tpu", "cuda"],
        typer.Option(
            help="dry run: compile for what JAX finds here, or for TPUs (by libtpu) or GPUs (by "
            "JAX's CUDA plugin) that are not here"
        ),
    ] = "here"
    topology: Annotated[
        str | None,
        typer.Option(
            help="dry run: chip and shape of the slice with --platform tpu [default: v6e:2x4], GPU "
            "and number with --platform cuda [default: h100:1]",
            metavar="CHIP:SHAPE",
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="dry run: print JSON")] = False


@command(app, daemon=True)
def learner(options: LearnerOptions) -> None:
    """Train on this island's data, in step with the run until it ends.

    The first SIGINT or SIGTERM stops cleanly (finish the step, send pending updates, leave the
    run), the second at once. Logs are JSON lines on stderr, on a terminal lines for people.

    For a learner of several hosts, start this command on each of them with the same name and file
    and with `--hosts`, `--host` and `--coordinator`. With `--dry-run`, programs are compiled from
    shapes, for all hosts at once, and no parameters are allocated.
    """
    if not options.dry_run:
        log.take_stderr()
    config = _learner_config(options)
    if options.dry_run:
        _check_platform(options)
        from diloco.operate.daemons.dry_run import run_dry

        run_dry(config, options)
        return
    if options.devices or options.json:
        raise ConfigError(
            "--devices and --json need --dry-run",
            hint="add --dry-run; to train with emulated devices, use --cpu-devices",
        )
    if config.learner.slices > 1 and not config.learner.formation:
        from diloco.learner.hosts.supervisor import supervise

        raise typer.Exit(supervise(config, options.name, sys.argv[1:]))
    from diloco.learner.daemon import serve

    raise typer.Exit(serve(config, options.name))


def _check_platform(options: LearnerOptions) -> None:
    if options.platform != "here" and options.devices:
        raise ConfigError(
            "--devices emulates devices on the CPU, and --platform compiles for others",
            hint="say which: --platform tpu --topology v6e:2x4, --platform cuda --topology h100:8",
        )
    if options.platform == "here" and options.topology:
        raise ConfigError(
            f"--topology {options.topology} is of devices that are not here",
            hint="say of which kind: --platform tpu or --platform cuda",
        )


def _learner_config(options: LearnerOptions) -> "Config":
    hardware = {
        # The hosts of a dry run are emulated in this process.
        "hosts": None if options.dry_run else options.hosts,
        "host": options.host,
        "coordinator": options.coordinator,
        "cpu_devices": options.cpu_devices,
    }
    metrics = {"port": options.metrics_port}
    config = _load(
        options.config,
        options.log_level,
        connects=not options.dry_run,
        metrics=metrics,
        learner=hardware,
    )
    from diloco.common.process.config import with_mesh

    return config if options.mesh is None else with_mesh(config, options.name, options.mesh)


def _load(
    path: Path, level: str, *, connects: bool = True, **options: Mapping[str, object]
) -> "Config":
    """Loads the configuration file, with options of the command line in place of its keys.

    Args:
        path: the TOML file.
        level: the log level.
        connects: False if the command needs neither bus nor store.
        options: section={key: value}; a value of None leaves the file's.
    """
    log.configure(level)
    from diloco.common.process.config import load_config, make_config

    loaded = load_config(path, connects=connects)
    for section, keys in options.items():
        given = {key: value for key, value in keys.items() if value is not None}
        if given:
            changed = {**getattr(loaded, section).model_dump(), **given}
            source = ", ".join(f"--{key.replace('_', '-')}" for key in given)
            loaded = make_config({**loaded.model_dump(), section: changed}, source=source)
    return loaded
