"""The operator's command; `diloco --help` lists its parts.

JAX is loaded only by the commands that need it, once their file is read, so that `--help` and
wrong settings are answered at once.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from diloco.auth.command import auth_app
from diloco.common import log
from diloco.common.config import Config, load_config, make_config, with_mesh
from diloco.common.errors import ConfigError, DilocoError
from diloco.replay.command import export, replay, tape_app

app = typer.Typer(
    name="diloco",
    help="Train one model on islands of accelerators that are far apart, unequal and unreliable.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
run_app = typer.Typer(help="Create and change runs.", no_args_is_help=True)
app.add_typer(run_app, name="run")
app.add_typer(auth_app, name="auth")
app.add_typer(tape_app, name="tape")
app.command()(replay)
app.command()(export)

ConfigOption = Annotated[
    Path,
    typer.Option("--config", help="TOML file of the run; docs/configuration.md", metavar="FILE"),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="the run's TOML file, the folder of a local run, or the name of a run on a bus "
        "(diloco --bus URL --store URL COMMAND NAME)",
    ),
]
LevelOption = Annotated[
    str, typer.Option("--log-level", help="debug, info, warning or error", metavar="LEVEL")
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        help="serve /metrics and /healthz here, 0 for no port [default: of the file]",
        min=0,
        max=65535,
        metavar="PORT",
    ),
]


@app.callback()
def options(
    bus: Annotated[
        str | None,
        typer.Option(
            help="server of a run that is given by name [default: DILOCO_BUS_URL, or "
            "nats://127.0.0.1:4222]",
            metavar="URL",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="object store of a run that is given by name or by its tape file [default: "
            "DILOCO_STORE_URL]",
            metavar="URL",
        ),
    ] = None,
) -> None:
    """Train one model on islands of accelerators that are far apart, unequal and unreliable."""
    if bus is not None or store is not None:
        from diloco.cli.opening import Place, use_place

        use_place(Place(bus, store))


def _load(path: Path, level: str, **options: Mapping[str, object]) -> Config:
    """The file, with the keys that options of the command line set: section={key: value}."""
    log.configure(level)
    loaded = load_config(path)
    for section, keys in options.items():
        given = {key: value for key, value in keys.items() if value is not None}
        if given:
            changed = {**getattr(loaded, section).model_dump(), **given}
            source = ", ".join(f"--{key.replace('_', '-')}" for key in given)
            loaded = make_config({**loaded.model_dump(), section: changed}, source=source)
    return loaded


@app.command()
def aggregator(
    config: ConfigOption,
    name: Annotated[
        str | None,
        typer.Option("--name", help="its name in records and logs [default: of the file]"),
    ] = None,
    fragments: Annotated[
        str | None,
        typer.Option(
            help="own these fragments and no others, such as 0-11 or 0,3,5-7 "
            "[default: a share of all]",
            metavar="LIST",
        ),
    ] = None,
    metrics_port: MetricsPortOption = None,
    log_level: LevelOption = "info",
) -> None:
    """Merge the learners' updates and commit new versions, until the run ends.

    Any number may run: they divide the fragments by leases, and take over from one that dies. The
    first SIGINT or SIGTERM asks for a clean stop, the second ends the process at once. Killed at
    any point, a new one goes on where it was. Logs are JSON lines on standard error.
    """
    from diloco.cli.settings import parse_fragments

    pinned = None if fragments is None else parse_fragments(fragments)
    loaded = _load(config, log_level, aggregator={"name": name}, metrics={"port": metrics_port})
    from diloco.aggregator.daemon import serve

    serve(loaded, pinned)


@app.command()
def learner(
    config: ConfigOption,
    name: Annotated[
        str, typer.Option("--learner", help="this learner's name in the run", metavar="NAME")
    ],
    mesh: Annotated[
        str | None,
        typer.Option(
            help="devices of the learner, of all its hosts: 4, or fsdp=4,tensor=2 "
            "[default: of the file, or all that there are]",
            metavar="MESH",
        ),
    ] = None,
    hosts: Annotated[
        int | None,
        typer.Option(
            help="processes that the learner consists of [default: of the file]",
            min=1,
            metavar="N",
        ),
    ] = None,
    host: Annotated[
        int | None,
        typer.Option(help="which of them this one is, from 0", min=0, metavar="I"),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            help="where the others find host 0, as HOST:PORT; auto where the platform knows all "
            "of this (Cloud TPU, Slurm)",
            metavar="ADDRESS",
        ),
    ] = None,
    cpu_devices: Annotated[
        int | None,
        typer.Option(
            help="train on the CPU, taken for so many devices: to try a mesh", min=1, metavar="N"
        ),
    ] = None,
    metrics_port: MetricsPortOption = None,
    log_level: LevelOption = "info",
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="say what memory, time and traffic it will need, and train nothing; asks neither "
            "bus nor store",
        ),
    ] = False,
    devices: Annotated[
        int | None,
        typer.Option(
            help="of a dry run: devices of the learner, for which this machine's CPU is taken "
            "[default: learner.cpu_devices on each host, or what JAX finds]",
            min=1,
            max=65536,
            metavar="N",
        ),
    ] = None,
    bandwidth: Annotated[
        float,
        typer.Option(
            help="of a dry run: GB/s of a device's memory; 819 is a TPU v5e", min=1, metavar="GB/S"
        ),
    ] = 819.0,
    json: Annotated[bool, typer.Option("--json", help="of a dry run: print a JSON object")] = False,
) -> None:
    """Train on this island's data, send outer gradients, adopt new versions, until the run ends.

    The first SIGINT or SIGTERM asks for a clean stop (finish the step, send what is unsent,
    announce the leave), the second ends the process at once. Logs are JSON lines on standard error.

    A learner of several hosts is this command on each of them, with the same name, the same file,
    and `--hosts`, `--host`, `--coordinator`. With `--dry-run`, programs are only compiled, from
    shapes, for all hosts at once: no parameter is allocated.
    """
    hardware = {
        # Those of a dry run do not meet anywhere.
        "hosts": None if dry_run else hosts,
        "host": host,
        "coordinator": coordinator,
        "cpu_devices": cpu_devices,
    }
    loaded = _load(config, log_level, metrics={"port": metrics_port}, learner=hardware)
    if mesh is not None:
        loaded = with_mesh(loaded, name, mesh)
    if dry_run:
        from diloco.daemons.dry_run import DryRunOptions, run_dry

        run_dry(
            loaded,
            name,
            DryRunOptions(devices=devices, hosts=hosts, bandwidth=bandwidth, json=json),
        )
        return
    if devices or json:
        raise ConfigError(
            "--devices and --json are of a dry run",
            hint="add --dry-run; to train on the CPU as so many devices, use --cpu-devices",
        )
    from diloco.learner.daemon import serve

    serve(loaded, name)


@run_app.command("create")
def run_create(
    config: ConfigOption,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="safetensors file with the first parameters", metavar="FILE"),
    ] = None,
    log_level: LevelOption = "info",
) -> None:
    """Create a run: its streams, its specification, and version 0 of every fragment."""
    loaded = _load(config, log_level)
    from diloco.common.guard_rails import warnings
    from diloco.operate.create import create

    console = Console()
    for sentence in warnings(loaded.settings()):
        console.print(f"[yellow]warning:[/] {sentence}", soft_wrap=True)
    layout = create(loaded, source)
    elements = sum(fragment.elements for fragment in layout.fragments)
    console.print(
        f"created run [bold]{loaded.run.name}[/]: {elements:,} parameters in "
        f"{len(layout.fragments)} fragments, layout {layout.digest}",
        soft_wrap=True,
    )


@run_app.command("set")
def run_set(
    run: RunArgument,
    assignments: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE...", help="settings, as section.key=value")
    ],
) -> None:
    """Change settings of a run that goes on, from each fragment's next version on.

    H and other times of `sync`, the outer learning rate and momentum, `staleness`, `quorum` and
    `bounds` can be changed; docs/configuration.md marks each key. It stands on the tape.
    """
    log.configure("error")
    from diloco.operate.change import change

    changed, sentences = asyncio.run(change(run, assignments))
    for sentence in changed:
        _say(f"changed {sentence}")
    if not changed:
        _say("nothing changed: the run has these settings already")
    for sentence in sentences:
        _say(f"[yellow]warning:[/] {sentence}")


@app.command()
def checkpoint(run: RunArgument) -> None:
    """Mark a point from which the whole run can begin again, even with a new NATS server.

    Everything needed is then in the object store; `diloco resume` begins from it. Training goes
    on meanwhile.
    """
    log.configure("error")
    from diloco.operate.change import mark

    marked = asyncio.run(mark(run))
    _say(f"checkpoint [bold]{marked.name}[/]: versions {_vector(marked.versions)}")


@app.command()
def resume(
    run: RunArgument,
    source: Annotated[
        str | None,
        typer.Option("--from", help="which checkpoint [default: the newest]", metavar="CHECKPOINT"),
    ] = None,
) -> None:
    """Begin a run again from a checkpoint, on a NATS server that does not have it.

    Aggregators and learners are then started as always: data goes on where the checkpoint was.
    """
    log.configure("error")
    from diloco.operate.change import resume as begin_again

    resumed = asyncio.run(begin_again(run, source))
    _say(
        f"resumed from checkpoint [bold]{resumed.checkpoint}[/] as epoch {resumed.epoch}: "
        f"versions {_vector(resumed.versions)}"
    )


@app.command()
def rollback(
    run: RunArgument,
    to: Annotated[
        str,
        typer.Option(
            help="a version, or one for each fragment (12,12,11), a checkpoint's name, a time "
            "(2026-01-31T12:00:00Z), or how long ago (90m, 2h, 1d)",
            metavar="VERSIONS|TIME",
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
) -> None:
    """Go back: publish earlier contents as each fragment's next version.

    Work based on what came before is rejected, learners take the earlier parameters, the run's
    clock goes back; data does not. Nothing is deleted: a rollback can be rolled back.
    """
    log.configure("error")
    from diloco.operate.change import plan_rollback, roll_back

    moves = asyncio.run(plan_rollback(run, to))
    for move in moves:
        record = move.target.record
        _say(
            f"fragment {move.fragment}: version {move.newest} -> contents of version "
            f"{record.version} (step {record.global_step})"
        )
    if not yes:
        typer.confirm("roll back?", abort=True)
    made = asyncio.run(roll_back(run, moves))
    _say(f"rolled back: versions are now {_vector([record.version for record in made])}")


@app.command()
def gc(
    run: RunArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would go, remove nothing")
    ] = False,
) -> None:
    """Remove what neither recovery, nor the replay window, nor a checkpoint needs.

    Aggregators do this by themselves (`gc.enabled`); this also looks at what no aggregator knows,
    such as the shards of learners that are long gone. Training may go on meanwhile.
    """
    log.configure("error")
    from diloco.operate.collect import collect, table

    found = asyncio.run(collect(run, dry_run=dry_run))
    Console().print(table(found, dry_run=dry_run))


@app.command()
def learners(
    run: RunArgument,
    shut_out: Annotated[
        str | None,
        typer.Option("--quarantine", help="shut this learner out", metavar="NAME"),
    ] = None,
    release: Annotated[
        str | None,
        typer.Option(help="let this learner in again, and forget its offences", metavar="NAME"),
    ] = None,
    reason: Annotated[str, typer.Option(help="why, for people", metavar="TEXT")] = "by hand",
    json: Annotated[bool, typer.Option("--json", help="print a JSON array")] = False,
) -> None:
    """Show who takes part, what became of their updates, and who is shut out and why.

    Aggregators shut a learner out by themselves after `bounds.quarantine_offences`: its updates
    are rejected, nobody waits for it, and it stays so until it is released.
    """
    log.configure("error")
    from diloco.look.learners import as_json, chosen, judge, look, table

    judged = chosen(shut_out, release)
    if judged is not None:
        name, active = judged
        asyncio.run(judge(run, name, active=active, reason=reason))
        _say(f"{name} is {'quarantined' if active else 'released'}")
        return
    found = asyncio.run(look(run))
    if json:
        Console().print_json(data=as_json(found))
        return
    Console().print(table(found))
    for one in found:
        if one.why:
            _say(f"[bold]{one.name}[/] is quarantined: {escape(one.why)}")


def _vector(versions: Sequence[int]) -> str:
    return ",".join(str(version) for version in versions)


def _say(text: str) -> None:
    Console().print(text, soft_wrap=True, highlight=False)


@app.command()
def local(
    learners: Annotated[
        int | None,
        typer.Option(
            help="number of learners [default: 4, or as many as --mesh or --hosts says]",
            min=1,
            max=64,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="devices of each learner, forced on the CPU: 4,2,1,1; or sizes of the axes "
            "data, fsdp and tensor: fsdp=2/tensor=2,2,1,1",
            metavar="LIST",
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            help="processes of each learner, which share its devices: 2,1,1,1 [default: one]",
            metavar="LIST",
        ),
    ] = None,
    aggregators: Annotated[int, typer.Option(help="number of aggregators", min=1, max=16)] = 1,
    steps: Annotated[
        int | None, typer.Option(help="length of the run in inner steps [default: 600]", min=1)
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="folder of the run [default: runs/<name>, a new one]", metavar="DIR"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file to begin from; bus and store are set here", metavar="FILE"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="the task, as package.module:function", metavar="MODULE:FUNCTION"),
    ] = None,
    corpus: Annotated[
        str | None,
        typer.Option(
            help="folder of text for the built-in task [default: Python's standard library]",
            metavar="DIR",
        ),
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(help="slow some learners: shares of full speed, 1,1,0.5,1", metavar="LIST"),
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(
            help="kill a learner (of one with --hosts, a host) or an aggregator with SIGKILL at a "
            "step and start it again; may be repeated; 'none' for nobody [default: the second "
            "learner after a third of the run]",
            metavar="NAME@STEP",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="any setting, as section.key=value", metavar="KEY=VALUE"),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="print a summary as one JSON object, last line")
    ] = False,
) -> None:
    """Train with several learners, an aggregator and a NATS server, all on this machine.

    Every part is a process of its own, as it would be on machines far apart: the same commands,
    the same protocol. Learners may have different numbers of devices (`--mesh`) and consist of
    several processes (`--hosts`). Ctrl-C stops all of them cleanly; a second Ctrl-C at once.
    """
    from diloco.local.run import LocalOptions, run_local

    options = LocalOptions(
        learners=learners,
        aggregators=aggregators,
        steps=steps,
        run_dir=run_dir,
        config=config,
        task=task,
        corpus=corpus,
        mesh=mesh,
        hosts=hosts,
        speed=speed,
        kill=kill,
        settings=settings or [],
        json=json,
    )
    raise typer.Exit(run_local(options))


@app.command()
def status(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="show it as it is now, and end")] = False,
    json: Annotated[bool, typer.Option("--json", help="print it as one JSON object")] = False,
) -> None:
    """Show a run as it goes on: learners, fragments, rounds, rates, and what is amiss.

    Ends with the run, or with Ctrl-C; where the output is no terminal it is shown once.
    """
    log.configure("error")
    from diloco.look.status_screen import show_status

    show_status(run, once=once, json=json)


@app.command()
def runs(
    bus: Annotated[
        str | None,
        typer.Argument(
            metavar="BUS",
            help="a server (nats://host:4222), a run's TOML file, or the folder of a local run "
            "under way [default: nats://127.0.0.1:4222]",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print them as one JSON array")] = False,
) -> None:
    """List the runs on a bus, the newest first."""
    log.configure("error")
    from diloco.look.runs import list_runs

    list_runs(bus, json=json)


@app.command("install-units")
def install_units(
    to: Annotated[
        Path, typer.Option("--to", help="where systemd looks for units", metavar="DIR")
    ] = Path("/etc/systemd/system"),
    programs: Annotated[
        Path | None,
        typer.Option(
            help="folder that has diloco and nats-server [default: of this program]",
            metavar="DIR",
        ),
    ] = None,
    credentials: Annotated[
        bool, typer.Option(help="whether NATS asks for credentials: /etc/diloco/credentials")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be written, write nothing")
    ] = False,
) -> None:
    """Write the systemd units of aggregator, learners, NATS server and timers; start nothing.

    The same again brings them up to date. docs/systemd.md has the rest of the way.
    """
    from diloco.operate.units import install_units as install

    for path in install(to, programs, credentials=credentials, dry_run=dry_run):
        _say(f"{'would write' if dry_run else 'wrote'} {path}")
    if not dry_run:
        _say("now: systemd-sysusers; systemctl daemon-reload; systemctl enable --now UNIT ...")


@app.command()
def doctor(
    run: RunArgument,
    deep: Annotated[
        bool, typer.Option("--deep", help="read every object, make every version again")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="print the report as one JSON object")
    ] = False,
) -> None:
    """Explain the health of a run or of a configuration; each finding names its runbook.

    The exit status is 1 if something is an error.
    """
    log.configure("error")
    from diloco.check.doctor import run_doctor

    raise typer.Exit(run_doctor(run, deep=deep, json=json))


@app.command()
def report(
    run: RunArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="folder to write to [default: report/ in the folder of a local run, else "
            "report-RUN]",
            metavar="DIR",
        ),
    ] = None,
    evaluations: Annotated[
        int,
        typer.Option(
            "--evaluations",
            help="score so many views on held-out data, spread over the run; 0 for none",
            min=0,
        ),
    ] = 16,
) -> None:
    """Write a run's report: one HTML file that needs no network, and a PNG of each figure.

    Loss, a lane for each learner, staleness and weights, rounds, traffic, agreement, what was
    rejected and why. The run may be going on, or have ended; nothing of it is changed.
    """
    log.configure("error")
    from diloco.report.build import run_report

    # On standard output stands the file alone, for scripts.
    Console().print(str(run_report(run, out=out, evaluations=evaluations)), soft_wrap=True)


@app.command()
def evaluate(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", help="again whenever it has moved, until the run ends")
    ] = False,
    every_s: Annotated[
        float, typer.Option("--every-s", help="with --follow: seconds between two scores", min=0)
    ] = 10.0,
    keep: Annotated[
        bool, typer.Option(help="keep scores in the run's store, for diloco report")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="print each score as a JSON object")] = False,
) -> None:
    """Score the run's global view on the task's held-out data."""
    log.configure("error")
    from diloco.model.evaluate import run_evaluate

    asyncio.run(run_evaluate(run, follow=follow, every_s=every_s, keep=keep, json=json))


@app.command()
def sample(
    run: RunArgument,
    prompt: Annotated[str, typer.Option("--prompt", help="what the text begins with")] = "def ",
    length: Annotated[int, typer.Option("--length", help="tokens to write", min=1)] = 300,
    temperature: Annotated[
        float,
        typer.Option("--temperature", help="how freely it chooses; 0: the likeliest", min=0),
    ] = 0.7,
    seed: Annotated[int, typer.Option("--seed", help="another seed, another text")] = 0,
) -> None:
    """Print what the run's newest global model writes after a prompt.

    For the built-in task, and for tasks of yours that have a `sample` (docs/tasks.md).
    """
    log.configure("error")
    from diloco.model.sample import run_sample

    asyncio.run(run_sample(run, prompt, length=length, temperature=temperature, seed=seed))


@app.command()
def plan(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="TOML file of the run [default: options alone]"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="a key of the run, such as sync.interval_steps=48; may be repeated",
            metavar="KEY=VALUE",
        ),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(help="of the model, such as 5B [default: of the file's task, else 5B]"),
    ] = None,
    learners: Annotated[int, typer.Option(help="how many, one a site", min=1, max=4096)] = 8,
    chips: Annotated[
        str | None,
        typer.Option(help="of all, or a list with one for each learner [default: one each]"),
    ] = None,
    step_s: Annotated[
        str, typer.Option(help="seconds of an inner step; one, or a list as long as learners")
    ] = "1",
    step_tokens: Annotated[
        str | None,
        typer.Option(help="tokens of a learner's step; one, or a list [default: of the task]"),
    ] = None,
    gbit: Annotated[
        str | None,
        typer.Option(help="Gbit/s of a learner's link; one, or a list [default: no limit]"),
    ] = None,
    rtt_ms: Annotated[str, typer.Option(help="round trip of that link; one, or a list")] = "10",
    aggregator_gbit: Annotated[
        float, typer.Option(help="of the aggregator's link to the store", min=0.001)
    ] = 10.0,
    mtbi: Annotated[
        str, typer.Option(help="mean time between two failures of a chip, or never")
    ] = "1y",
    slice_chips: Annotated[
        int, typer.Option(help="chips that go when one of them fails", min=1)
    ] = 128,
    return_time: Annotated[
        str, typer.Option("--return", help="mean time until a failed slice is back")
    ] = "20m",
    spread: Annotated[
        str, typer.Option(help="of that time: exponential, uniform (half to one and a half), fixed")
    ] = "exponential",
    hold_s: Annotated[
        float, typer.Option(help="a slice that is back waits so long for others", min=0)
    ] = 30.0,
    reconfigure_s: Annotated[
        float, typer.Option(help="an elastic job stands so long when slices come or go", min=0)
    ] = 15.0,
    restart_s: Annotated[
        float, typer.Option(help="a job that lost everything needs so long to start", min=0)
    ] = 75.0,
    learner_restart_s: Annotated[
        float | None, typer.Option(help="the same of a learner [default: the same]", min=0)
    ] = None,
    checkpoint_every_s: Annotated[
        float,
        typer.Option(help="data-parallel's; 0: it loses the step under way alone", min=0),
    ] = 0.0,
    spares: Annotated[
        bool, typer.Option(help="a spare slice is at hand for data-parallel without elasticity")
    ] = True,
    rigid: Annotated[
        bool, typer.Option("--rigid", help="a learner stops whole when one of its slices fails")
    ] = False,
    gradient_bits: Annotated[
        int, typer.Option(help="of an element of data-parallel's gradient", min=1, max=64)
    ] = 16,
    hidden: Annotated[
        float,
        typer.Option(help="share of a step that hides data-parallel's exchange", min=0, max=1),
    ] = 2 / 3,
    tokens: Annotated[
        str | None, typer.Option(help="the budget, such as 1T [default: of the file]")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the simulated failures", min=0)] = 0,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="picture over the number of learners", metavar="FILE")
    ] = None,
) -> None:
    """Tell what to expect of a fleet: goodput, traffic, links, the aggregator's needs, time.

    Data-parallel training on the same fleet stands beside it, with and without elasticity. Times
    are given as 300s, 20m, 6h, 90d or 1y, numbers as 5000, 1.2M or 5B. docs/plan.md says what is
    simulated and what the constants are.
    """
    log.configure("error")
    from diloco.plan.command import PlanOptions, run_plan

    run_plan(
        PlanOptions(
            config=config,
            settings=tuple(settings or ()),
            parameters=parameters,
            learners=learners,
            chips=chips,
            step_s=step_s,
            step_tokens=step_tokens,
            gbit=gbit,
            rtt_ms=rtt_ms,
            aggregator_gbit=aggregator_gbit,
            mtbi=mtbi,
            slice_chips=slice_chips,
            return_time=return_time,
            spread=spread,
            hold_s=hold_s,
            reconfigure_s=reconfigure_s,
            restart_s=restart_s,
            learner_restart_s=learner_restart_s,
            checkpoint_every_s=checkpoint_every_s,
            spares=spares,
            rigid=rigid,
            gradient_bits=gradient_bits,
            hidden=hidden,
            tokens=tokens,
            seed=seed,
            json=json,
            plot=plot,
        )
    )


def main() -> None:
    """Run the command; our own errors are shown as sentences, bugs keep their trace."""
    try:
        app()
    except DilocoError as error:
        # Not wrapped: a path cut in two cannot be found again.
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        console.print(f"error: {error.message}", style="red")
        if error.hint:
            console.print(f"hint: {error.hint}")
        sys.exit(1)


if __name__ == "__main__":
    main()
