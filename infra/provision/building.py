"""Checks that a fleet's run can be built, and that its arrays and checkpoints fit the machines.

Builds the task's shapes, and allocates no arrays.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh

from diloco.common.process.config import AXES, Config, LearnerSection, RunSettings
from diloco.common.protocol.codecs import encoded_bytes
from diloco.common.protocol.errors import DilocoError
from diloco.infra.google_units import DATA
from diloco.infra.provision.fleet import FleetFile, FleetFinding, FleetLearner, chips_of, hosts_of
from diloco.infra.provision.known import Known
from diloco.learner.dry_run import device_bytes
from diloco.learner.island import task_of_slices
from diloco.learner.load_and_check_task import build_task, function_of, model_of
from diloco.learner.task import Task
from diloco.learner.tensors import tree
from diloco.learner.tensors.mesh import AUTO, ROWS, param_shardings, state_shardings

GIB = 1 << 30
DAY_S = 86400.0
# Kinds of accelerator whose chip is one device to JAX; for other kinds that is unknown.
ONE_DEVICE = frozenset({"v5p", "v6e"})
# The relative difference that `parameters` may have from the task's number.
TOLERANCE = 0.1
# GiB of a learner's disk for the image, the release, logs and the compiler's cache.
REST_GIB = 20


class ArrayBytes(NamedTuple):
    """Sizes in bytes of a learner's arrays, without activations.

    Attributes:
        device: on each device: parameters, optimizer state, view, and the quantized codes of
            updates in flight, as the mesh divides them.
        whole: the same arrays, undivided.
        state: the optimizer's state alone, undivided; checkpoints contain it.
    """

    device: int
    whole: int
    state: int


def model_or_fault(settings: RunSettings) -> Task | FleetFinding:
    """Returns the run's task, or a finding that says why it cannot be built here."""
    try:
        return model_of(settings)
    except Exception as error:  # noqa: BLE001 - a user's own code
        return _fault("run_toml: the task", error)


def _fault(where: str, error: Exception) -> FleetFinding:
    if isinstance(error, DilocoError):
        hint = f"; {error.hint}" if error.hint else ""
        return FleetFinding(f"{where}: {error.message}{hint}")
    return FleetFinding(
        f"{where} cannot be built: {type(error).__name__}: {error}; try it with: diloco check "
        "TASK.py, or the run's file"
    )


def check_run(fleet: FleetFile, config: Config, task: Task, known: Known) -> Iterator[FleetFinding]:
    """Yields a finding for each fault of the run, and of each learner under this run.

    Checked are the run's number of parameters, quorum and retention; and each learner's task
    options, batch, memory and disk.

    Args:
        fleet: the fleet's file.
        config: the run's file.
        task: the run's task, of which only shapes are used.
        known: the table of accelerators and machine types.
    """
    settings = config.settings()
    yield from _parameters(fleet, task)
    yield from _quorum(fleet, config)
    yield from _retention(fleet, config)
    layout = tree.task_layout(task, settings.sync)
    for name, learner in fleet.learners.items():
        where = f"learners.{name}"
        section = config.learner.island(name)
        options, own = {**settings.task.options, **section.options}, task
        if section.options:
            if unreached := [*check_reach(where, section.options, fleet.data)]:
                yield from unreached
                continue
            try:
                own = build_task(
                    settings.task.build, steps=settings.run.steps, seed=0, options=options
                )
            except Exception as error:  # noqa: BLE001 - a user's own code
                yield _fault(where, error)
                continue
            if tree.task_layout(own, settings.sync).digest != layout.digest:
                yield FleetFinding(
                    f"{where}: its options {dict(section.options)} make another model than the "
                    "run's, and its learner would be refused: leave out what changes tensors"
                )
                continue
        assert section.mesh is not None
        axes = section.mesh.shape(devices_of(learner, config))
        if axes is None:
            continue
        yield from _batch(where, settings.task.build, options, axes)
        yield from _shares(where, learner, config, own, options, axes)
        try:
            needed = array_bytes(own, config, name, layout, axes)
        except DilocoError as error:
            yield _fault(where, error)
            continue
        yield from _memory(where, learner, needed, known)
        yield from _disk(where, learner, needed, config)


def devices_of(learner: FleetLearner, config: Config) -> int:
    """Returns the number of devices that JAX will have on a learner, taking a chip as one device.

    Without accelerators: `learner.cpu_devices`, or 1.
    """
    return chips_of(learner) or config.learner.cpu_devices or 1


def _parameters(fleet: FleetFile, task: Task) -> Iterator[FleetFinding]:
    shapes = task.shapes
    trained = tree.division_of(task, shapes).trained_of(shapes)
    true = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained))
    said = fleet.parameters
    if said is not None and abs(said - true) > TOLERANCE * true:
        yield FleetFinding(
            f"parameters = {said:_}, and the run's task trains {true:_}: leave the key out"
        )


def _quorum(fleet: FleetFile, config: Config) -> Iterator[FleetFinding]:
    count, least = len(fleet.learners), config.quorum.min_learners
    if count < least and config.sync.mode == "lockstep":
        yield FleetFinding(
            f"the run's quorum.min_learners is {least}, and the fleet has {count} learners: in "
            "lockstep no version would ever be made"
        )
    shares = config.run.data_shares or config.task.options.get("shares", 0)
    if isinstance(shares, int) and 0 < shares < count:
        yield FleetFinding(
            f"the run's data has {shares} shares, and the fleet {count} learners: some would have "
            "nothing to train on"
        )


def _retention(fleet: FleetFile, config: Config) -> Iterator[FleetFinding]:
    days, kept = config.gc.replay_window_s / DAY_S, fleet.bucket_backstop_days.updates
    if days + 1 > kept:
        yield FleetFinding(
            f"the run's gc.replay_window_s is {days:g} days, and the bucket itself deletes updates "
            f"after {kept}: set bucket_backstop_days.updates to {math.ceil(days) + 1} or more"
        )


def check_reach(where: str, options: Mapping[str, Any], data: str | None) -> Iterator[FleetFinding]:
    """Yields a finding for each path in a task's options that machines will not have.

    Machines have the release, and `DATA` if the fleet's `data` is set.

    Args:
        where: whose options they are, for people.
        options: the task's options.
        data: the fleet's `data`.
    """
    for key, value in options.items():
        paths = [value] if isinstance(value, str) else [*value] if isinstance(value, dict) else []
        for path in paths:
            away = "://" in path or (key == "data" and not path.startswith("/"))
            if not (away or path.startswith("/")) or Path(path).is_relative_to("/opt/diloco"):
                continue
            if away or not Path(path).is_relative_to(DATA):
                yield FleetFinding(
                    f"{where}: the task's option {key} names {path}, which is on no machine: bring "
                    f'it by the fleet\'s data = "gs://BUCKET/FOLDER", which is copied to {DATA}'
                )
            elif data is None:
                yield FleetFinding(
                    f"{where}: the task's option {key} names {path}, and nothing is copied there: "
                    'set data = "gs://BUCKET/FOLDER" in the fleet\'s file'
                )


def _batch(
    where: str, build: str, options: Mapping[str, Any], axes: tuple[int, ...]
) -> Iterator[FleetFinding]:
    """Yields a finding if the mesh cannot divide a batch's rows; for tasks with option `batch`."""
    rows = _rows(build, options)
    parts = math.prod(size for axis, size in zip(AXES, axes, strict=True) if axis in ROWS)
    if isinstance(rows, int) and rows % parts:
        yield FleetFinding(
            f"{where}: a batch of {rows} rows cannot be cut into {' x '.join(ROWS)} = {parts} "
            "parts of its mesh"
        )


def _rows(build: str, options: Mapping[str, Any]) -> Any:
    """Returns a task's option `batch`, or its default; None: it has no such option."""
    parameter = inspect.signature(function_of(build)).parameters.get("batch")
    return options.get("batch", parameter.default if parameter else None)


def _shares(
    where: str,
    learner: FleetLearner,
    config: Config,
    task: Task,
    options: Mapping[str, Any],
    axes: tuple[int, ...],
) -> Iterator[FleetFinding]:
    """Yields a finding if a batch cannot be divided over each number of slices that may train.

    Args:
        where: the learner's key in the fleet.
        learner: the learner, of one slice or several.
        config: the run's file.
        task: the learner's task.
        options: the task's options.
        axes: sizes of the axes of the mesh of one slice.
    """
    rows = _rows(config.task.build, options)
    too_few = learner.slices < config.learner.min_slices  # `check_slices` says so.
    if learner.slices == 1 or too_few or not isinstance(rows, int):
        return
    section = config.learner.model_copy(update={"slices": learner.slices, "formation": ()})
    whole: Any = AbstractMesh((axes[0] * learner.slices, *axes[1:]), AXES, axis_types=AUTO)
    try:
        task_of_slices(task, jax.ShapeDtypeStruct((rows,), np.int32), section, whole)
    except DilocoError as error:
        yield _fault(where, error)


def array_bytes(
    task: Task, config: Config, name: str, layout: Any, axes: tuple[int, ...]
) -> ArrayBytes:
    """Returns the sizes of a learner's arrays, as its mesh divides them.

    Args:
        task: the learner's task, of which only shapes are used.
        config: the run's file.
        name: the learner's name.
        layout: the layout of the run's fragments.
        axes: sizes of the mesh's axes, in the order of `AXES`.

    Raises:
        DilocoError: the task's tensors cannot be sharded over this mesh.
    """
    sync = config.sync
    mesh: Any = AbstractMesh(axes, AXES, axis_types=AUTO)
    shapes = task.shapes
    division = tree.division_of(task, shapes)
    shardings = param_shardings(task, layout, shapes, mesh)
    trained, lying = division.trained_of(shapes), division.trained_of(shardings)
    state = jax.eval_shape(task.optimizer.init, trained)
    placed = _placed(state, state_shardings(state, trained, lying, mesh))
    views = 0 if (config.learner.island(name).anchor or sync.anchor) == "host" else 1
    views *= 2 if sync.adopt == "blend" else 1
    floats = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32), trained)
    view = _placed(floats, lying)
    codes = sum(encoded_bytes(sync.codec, one.size, sync.block) for one in layout.fragments)
    kept = device_bytes(_placed(shapes, shardings)) + device_bytes(placed)
    state_bytes = _whole(state)
    return ArrayBytes(
        kept + views * device_bytes(view) + codes // math.prod(axes),
        _whole(shapes) + state_bytes + views * _whole(view) + codes,
        state_bytes,
    )


def uploads_bytes_day(task: Task, section: LearnerSection) -> float:
    """Returns the bytes of checkpoints that a learner uploads in a day while it trains."""
    division = tree.division_of(task, task.shapes)
    state = jax.eval_shape(task.optimizer.init, division.trained_of(task.shapes))
    every_s = section.checkpoint_interval_s * section.checkpoint_upload_every
    return _whole(state) * DAY_S / every_s


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


def _whole(shapes: Any) -> int:
    leaves = jax.tree.leaves(shapes)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def _memory(
    where: str, learner: FleetLearner, needed: ArrayBytes, known: Known
) -> Iterator[FleetFinding]:
    """Yields a finding if a learner's arrays do not fit its memory.

    Activations are not counted; `diloco learner --dry-run` counts them.
    """
    if learner.kind == "cpu":
        has, takes, what = known.memory_bytes(learner.machine_type or ""), needed.whole, "it"
        of = str(learner.machine_type)
    else:
        has, what, of = known.kinds[learner.kind].hbm_gib * GIB, "each device", learner.kind
        exact = learner.kind in ONE_DEVICE
        takes = needed.device if exact else needed.whole // chips_of(learner)
    if has is not None and takes > has:
        yield FleetFinding(
            f"{where}: parameters, optimizer and view take {takes / 1e9:.0f} GB of {what}, and "
            f"{of} has {has / 1e9:.0f}: give it more chips, or a mesh that cuts more; "
            "diloco learner --dry-run shows all that the learner needs"
        )


def _disk(
    where: str, learner: FleetLearner, needed: ArrayBytes, config: Config
) -> Iterator[FleetFinding]:
    """Yields a finding if a learner's checkpoints do not fit its disk.

    While a checkpoint is written, the disk has one more than `learner.checkpoint_keep`.
    """
    each = needed.state / hosts_of(learner) / GIB
    count = config.learner.checkpoint_keep + 1
    if REST_GIB + count * each > learner.disk_gib:
        yield FleetFinding(
            f"{where}: disk_gib is {learner.disk_gib}, and {count} checkpoints of {each:.1f} GiB "
            f"for each host need {math.ceil(REST_GIB + count * each)} with the system: give it "
            "more, or set learner.checkpoint_keep"
        )
