"""`diloco learner --dry-run`: prints what a learner needs of its slice, as tables or as JSON."""

from dataclasses import asdict
from typing import Any, Final

import jax
from rich.console import Console
from rich.table import Table

from diloco.common.process.config import Config
from diloco.common.protocol.errors import ConfigError
from diloco.learner.dry_run import SPREAD_EXPERTS, DryRun, FragmentFigures, dry_run, stand_in
from diloco.learner.library import check_name
from diloco.learner.topology import gpu_devices, gpu_named, tpu_devices
from diloco.operate.daemons.command import LearnerOptions
from diloco.run.cli.format_numbers import human_bytes
from diloco.run.cli.screen import plain_table

V5E_GBYTES_PER_S: Final = 819.0
# For devices that this machine does not have: a function from a topology to stand-ins for them, and
# the default topology.
ABSENT: Final = {"tpu": (tpu_devices, "v6e:2x4"), "cuda": (gpu_devices, "h100:1")}


def run_dry(config: Config, options: LearnerOptions) -> None:
    """Compiles a learner's programs from shapes, and prints the memory, time and traffic they need.

    Raises:
        ConfigError: a device has less memory than it needs.
        DilocoError: as the learner itself, except for errors of the bus and the store.
    """
    learner = options.name
    check_name(learner)
    hosts = options.hosts or len(config.learner.peers) or config.learner.hosts
    if options.platform == "here":
        figures = dry_run(_configure(config, hosts, options.devices), learner, hosts=hosts)
    else:
        # JAX must not search for a chip; the compiler options of the real hardware stay.
        jax.config.update("jax_platforms", "cpu")
        # A cached program of such a device cannot be read without the device.
        jax.config.update("jax_enable_compilation_cache", False)
        find, default = ABSENT[options.platform]
        devices = find(options.topology or default)
        figures = dry_run(config, learner, hosts=hosts, devices=devices)
    bandwidth = options.bandwidth or V5E_GBYTES_PER_S
    if options.platform == "cuda" and options.bandwidth is None:
        bandwidth = gpu_named(options.topology or ABSENT["cuda"][1]).bandwidth / 1e9
    if options.json:
        Console().print_json(data=as_json(figures, bandwidth))
    else:
        show(Console(), figures, bandwidth)
    check_fits(figures)


def check_fits(figures: DryRun) -> None:
    """Refuses a learner that needs more memory than its devices are known to have.

    Raises:
        ConfigError: a device has too little memory.
    """
    needed, there = max(figures.memory.training, figures.memory.start), figures.device_bytes
    if there is not None and needed > there:
        hint = "more devices in `fsdp`, a smaller batch, `accumulate`, or `sync.anchor = 'host'`"
        if figures.active_parameters is not None and figures.mesh["expert"] == 1:
            hint = f"{SPREAD_EXPERTS}; or {hint}"
        raise ConfigError(
            f"{figures.learner} needs {human_bytes(needed)} of each device, which has"
            f" {human_bytes(there)}",
            hint=hint,
        )


def _configure(config: Config, hosts: int, devices: int | None) -> Config:
    """Sets the number of devices that JAX emulates, before JAX looks for devices.

    Args:
        config: the configuration.
        hosts: number of the learner's processes, which are emulated in this one.
        devices: number of devices in all; None: `learner.cpu_devices` for each host, if set.

    Returns:
        The configuration of a learner with these devices.

    Raises:
        ConfigError: JAX has looked for devices already.
    """
    section = config.learner
    wanted = devices or section.cpu_devices * hosts
    if not wanted:
        return config
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError as error:
        raise ConfigError(f"JAX has its devices already: {error}") from error
    if devices is None:
        return config
    jax.config.update("jax_platforms", "cpu")
    return config.model_copy(update={"learner": stand_in(section)})


def as_json(figures: DryRun, bandwidth: float) -> dict[str, Any]:
    """Returns the figures of a dry run, and sums and times (in seconds), for JSON.

    `bandwidth` is that of a device's memory, in GB/s.
    """
    document = asdict(figures)
    document["memory"] |= {"training": figures.memory.training, "start": figures.memory.start}
    for one, fragment in zip(document["fragments"], figures.fragments, strict=True):
        for name, cost in (("send", fragment.send), ("adopt", fragment.adopt)):
            one[name] = cost._asdict() | {"seconds": _seconds(cost.moved_bytes, bandwidth)}
    document["bytes_up"] = sum(host.bytes_up for host in figures.traffic)
    document["bytes_down"] = sum(host.bytes_down for host in figures.traffic)
    return document | {"memory_gbytes_per_s": bandwidth}


def show(console: Console, figures: DryRun, bandwidth: float) -> None:
    """Prints the figures of a dry run as tables.

    `bandwidth` is that of a device's memory, in GB/s.
    """
    mesh = " x ".join(f"{axis} {size}" for axis, size in figures.mesh.items())
    active = figures.active_parameters
    console.print(
        f"[bold]{figures.learner}[/]: {figures.parameters:,} parameters in "
        f"{len(figures.fragments)} fragments; {figures.devices} devices ({mesh}), "
        f"{figures.hosts} host(s); {figures.tokens_per_batch:,} tokens a step"
        + (f"; {figures.frozen_parameters:,} more are frozen" if figures.frozen_parameters else "")
        + (f"; it holds {', '.join(figures.holds)} alone" if figures.holds else "")
        + (f"; a token passes {active:,} parameters" if active else ""),
        f"compiled for {figures.platform}; nothing was allocated",
        sep="\n",
        soft_wrap=True,
    )
    console.print(_memory_table(figures))
    if figures.step_exchanged:
        each = ", ".join(
            f"{human_bytes(count)} by {kind}" for kind, count in figures.step_exchanged.items()
        )
        console.print(f"a step brings a device from others: {each}", soft_wrap=True)
    console.print(_fragments_table(figures.fragments, bandwidth))
    _say_time(console, figures, bandwidth)
    console.print(_traffic_table(figures))


def _memory_table(figures: DryRun) -> Table:
    memory = figures.memory
    table = plain_table("", "bytes", " ", words=" ", title="memory of a device")
    anchor = "one view of each fragment"
    if memory.host_anchor:
        anchor = f"in the host's memory: {human_bytes(memory.host_anchor)} a host"
    for name, count, note in (
        ("parameters", memory.parameters, ""),
        ("optimizer", memory.optimizer, ""),
        ("anchor", memory.anchor, anchor),
        ("updates in flight", memory.in_flight, "at most: one of each fragment"),
        ("batch", memory.batch, ""),
        ("activations", memory.activations, "what the step needs besides; the compiler's"),
        ("synchronization", memory.synchronization, "of one fragment, at most; the compiler's"),
        ("checkpoint", memory.checkpoint, "copies of which one is made; 0 without checkpoint_dir"),
    ):
        table.add_row(name, human_bytes(count), note)
    table.add_section()
    table.add_row("training", human_bytes(memory.training), "all of these")
    table.add_row("at the start", human_bytes(memory.start), "programs are tried on copies")
    return table


def _fragments_table(fragments: tuple[FragmentFigures, ...], bandwidth: float) -> Table:
    table = plain_table(
        *("fragment", "parameters", "encode", "", "adopt", "", "from other devices"),
        title=f"what a device moves to synchronize, at {bandwidth:g} GB/s",
    )
    for one in fragments:
        table.add_row(
            str(one.index),
            f"{one.elements:,}",
            *_moved(one.send.moved_bytes, bandwidth),
            *_moved(one.adopt.moved_bytes, bandwidth),
            human_bytes(one.send.exchanged_bytes + one.adopt.exchanged_bytes),
        )
    return table


def _say_time(console: Console, figures: DryRun, bandwidth: float) -> None:
    steps, tau = figures.interval_steps, figures.overlap_steps
    moved = sum(one.send.moved_bytes + one.adopt.moved_bytes for one in figures.fragments)
    total_s = _seconds(moved, bandwidth)
    console.print(
        f"all fragments: {1e3 * total_s:.2f} ms in {steps} steps (H), 1 % of training if a step "
        f"takes {1e5 * total_s / steps:.2f} ms; an update and its version may travel for {tau} "
        "steps (tau)",
        soft_wrap=True,
    )


def _traffic_table(figures: DryRun) -> Table:
    table = plain_table("", "up", "down", "objects up", title="a round of every fragment")
    ups = [host.bytes_up for host in figures.traffic]
    downs = [host.bytes_down for host in figures.traffic]
    objects = [host.objects_up for host in figures.traffic]
    rows = (("learner", sum), ("host, at most", max), ("host, at least", min))
    for name, of in rows if figures.hosts > 1 else rows[:1]:
        table.add_row(name, human_bytes(of(ups)), human_bytes(of(downs)), f"{of(objects):,}")
    return table


def _moved(count: int, bandwidth: float) -> tuple[str, str]:
    return human_bytes(count), f"{1e3 * _seconds(count, bandwidth):.2f} ms"


def _seconds(count: float, bandwidth: float) -> float:
    return count / (bandwidth * 1e9)
