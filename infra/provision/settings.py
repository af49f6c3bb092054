"""Checks a run's settings as the machines of a fleet will have them. Pure."""

from collections.abc import Iterator

from pydantic import ValidationError

from diloco.common.process.config import MOST_SUPERVISORS, Config, LearnerSection
from diloco.common.process.config.advice import warnings
from diloco.infra.provision.fleet import (
    FleetFile,
    FleetFinding,
    FleetLearner,
    hosts_of,
    machines_of,
)
from diloco.infra.provision.places import SUPERVISOR_PORT

# Shortest silence after which the host of another slice may count as lost. A report comes each
# quarter of a second; one whose packet the link loses three times in a row comes 1.4 s late, as TCP
# sends it again after 0.2, 0.4 and 0.8 s.
LEAST_SILENT_S = 2.0
# Keys of [learner] that each machine is told, or finds out.
_TOLD = ("hosts", "host", "coordinator")
_DAY_S = 86400.0


def check_settings(fleet: FleetFile, config: Config) -> Iterator[FleetFinding]:
    """Yields a finding for each setting of the run that machines refuse, or that wastes them.

    Args:
        fleet: the fleet's file.
        config: the run's file.
    """
    yield from _run(fleet, config)
    yield from _checkpoints(fleet, config)
    section = config.learner
    for key in _TOLD:
        if key in section.model_fields_set:
            yield FleetFinding(
                f"the run's file has learner.{key} = {getattr(section, key)!r}: leave it out, as "
                "machines are told, or find out, which hosts a learner has"
            )
    slices = [*_slices(fleet, config)]
    yield from slices
    for name, learner in fleet.learners.items():
        if section.cpu_devices and learner.kind != "cpu":
            yield FleetFinding(
                f"learners.{name}: the run's learner.cpu_devices is {section.cpu_devices}, so that "
                f"it would train on the processors beside its {learner.kind}: leave it out"
            )
        if not slices:
            yield from _refused_there(name, learner, section)


def _run(fleet: FleetFile, config: Config) -> Iterator[FleetFinding]:
    run, sync = config.run, config.sync
    if not config.task.build:
        yield FleetFinding(
            "the run's file has no [task], and the units of learners' machines train nothing "
            "without one: give task.build, or bring a loop and a unit of your own",
            refused=False,
        )
    if run.steps < sync.interval_steps:
        yield FleetFinding(
            f"run.steps is {run.steps}, and sync.interval_steps {sync.interval_steps}: the run "
            "would be over before an update is due; train for longer, or lower interval_steps"
        )
    if run.paused:
        yield FleetFinding(
            "run.paused is true: machines would be paid for and train nothing until `diloco run "
            "resume`",
            refused=False,
        )
    if run.trust == "others" and len(fleet.learners) < 3:
        yield FleetFinding(
            f'run.trust is "others", which needs three honest learners, and the fleet has '
            f"{len(fleet.learners)}: docs/security.md",
            refused=False,
        )
    for sentence in warnings(config.settings()):
        yield FleetFinding(f"run_toml: {sentence}", refused=False)


def _checkpoints(fleet: FleetFile, config: Config) -> Iterator[FleetFinding]:
    section, days = config.learner, fleet.bucket_backstop_days.checkpoints
    every_s = section.checkpoint_interval_s * section.checkpoint_upload_every
    if every_s > (days - 1) * _DAY_S:
        yield FleetFinding(
            f"a learner uploads a checkpoint each {every_s / _DAY_S:g} days, and the bucket itself "
            f"deletes them after {days}: lower learner.checkpoint_interval_s or "
            "checkpoint_upload_every, or raise bucket_backstop_days.checkpoints"
        )
    if section.checkpoint_key is not None:
        yield FleetFinding(
            f"the run's learner.checkpoint_key is {section.checkpoint_key}, and nothing brings "
            "that file to the machines: leave it out"
        )
    if section.warm_start and not any(one.warm_start for one in fleet.learners.values()):
        yield FleetFinding(
            "the run's learner.warm_start is true, and no learner of the fleet may read others' "
            "checkpoints: set warm_start of those that shall, or leave it out"
        )


def _refused_there(
    name: str, learner: FleetLearner, section: LearnerSection
) -> Iterator[FleetFinding]:
    """Yields a finding if a learner's machines would refuse the run's settings."""
    hosts, told = hosts_of(learner), {}
    if learner.slices > 1:
        told = {
            "slices": learner.slices,
            "peers": [f"h{at}:{SUPERVISOR_PORT}" for at in range(machines_of(learner))],
        }
    elif hosts > 1:
        told = {"hosts": hosts, "coordinator": "auto"}
        if section.warm_start:
            yield FleetFinding(
                f"learners.{name}: the run's learner.warm_start is true, and a learner of several "
                "hosts begins from its own checkpoints: leave it out"
            )
    own = section.model_dump(exclude_unset=True, exclude={*_TOLD, "slices", "peers"})
    try:
        LearnerSection.model_validate(own | told)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        yield FleetFinding(f"learners.{name}: its machines would refuse the run's file: {why}")


def _slices(fleet: FleetFile, config: Config) -> Iterator[FleetFinding]:
    """Yields a finding for each setting of the run that a learner's several slices contradict.

    Terraform tells machines `learner.slices`, `learner.peers` and `learner.host`; all other
    settings are the run's.
    """
    section = config.learner
    for name, learner in fleet.learners.items():
        where, slices = f"learners.{name}", learner.slices
        if "slices" in section.model_fields_set and section.slices != slices:
            yield FleetFinding(
                f"{where}: the fleet gives it {slices} slices, and the run's file has "
                f"learner.slices = {section.slices}: leave learner.slices and learner.peers out of "
                "the run's file, as Terraform tells them to machines"
            )
        if slices == 1:
            continue
        if section.min_slices > slices:
            yield FleetFinding(
                f"{where}: the run's learner.min_slices is {section.min_slices}, and the fleet "
                f"gives it {slices} slices, so that it would never train: lower min_slices, or set "
                f"slices = {section.min_slices}"
            )
        if section.silent_s < LEAST_SILENT_S:
            yield FleetFinding(
                f"{where}: the run's learner.silent_s is {section.silent_s:g}, and between slices "
                f"a report may be {LEAST_SILENT_S:g} s late, so that hosts that work would count "
                f"as lost: set it to {LEAST_SILENT_S:g} or more; the default is 5"
            )
        if machines_of(learner) > MOST_SUPERVISORS:
            yield FleetFinding(
                f"{where}: {slices} slices have {machines_of(learner)} hosts, and a learner of "
                f"several slices has {MOST_SUPERVISORS} at most: take fewer slices, or smaller ones"
            )
